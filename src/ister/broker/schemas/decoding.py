"""Payloads by their schemas, as values of JSON: for people who look at messages.

Owns: how each kind of payload is shown. Does not own: what fits a schema (`definitions`).

Both come from strangers. A payload that does not fit is not decoded, so what is decoded is bounded
as the check is. What comes out is bounded, too: names of a schema may be long and come often.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import math
import struct
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

import fastavro
from google.protobuf import json_format

from ister.broker.schemas.avro import AvroDefinition
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.kinds import SchemaType
from ister.broker.schemas.primitives import NumberDefinition
from ister.broker.schemas.protobuf import ProtobufDefinition
from ister.errors import InvalidRequestError
from ister.limits import KIB

__all__ = ["DECODED_BYTES_MAX", "decode_payload", "parse_json"]

DECODED_BYTES_MAX: Final = 256 * KIB
"""The largest payload that is decoded, and about the most that comes out of one."""

_DEPTH_MAX: Final = 100
_NUMBERS: Final = {"int": "i", "float": "f", "int64": "q", "double": "d"}


def decode_payload(definition: Definition, payload: bytes) -> Any:  # noqa: ANN401 - JSON
    """A payload as values of JSON.

    Bytes in it are base64, points in time and decimals are text, and so are numbers that JSON has
    no word for.

    Raises:
        InvalidRequestError: It does not fit, or is too large to be shown.
    """
    if len(payload) > DECODED_BYTES_MAX:
        raise InvalidRequestError(
            f"{len(payload)} bytes are too many to be decoded here",
            hint=f"at most {DECODED_BYTES_MAX} are",
        )
    reason = definition.check(payload)
    if reason is not None:
        raise InvalidRequestError(f"it does not fit its schema: {reason}")
    try:
        return _Plain().of(_decode(definition, payload), 0)
    except InvalidRequestError:
        raise
    except RecursionError as error:
        raise InvalidRequestError("it is nested too deep to be shown") from error
    except Exception as error:  # what a library stumbles over
        raise InvalidRequestError(f"it cannot be decoded: {type(error).__name__}") from error


def parse_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Bytes as JSON.

    Raises:
        ValueError: They are none, or nested too deep to be shown.
    """
    try:
        value = json.loads(data, parse_constant=_refuse)
        return _Plain().of(value, 0)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _decode(definition: Definition, payload: bytes) -> Any:  # noqa: ANN401 - any value
    if isinstance(definition, AvroDefinition):
        if payload.startswith(b"Obj\x01") and definition.check_datum(payload) is not None:
            return list(fastavro.reader(io.BytesIO(payload)))
        return fastavro.schemaless_reader(io.BytesIO(payload), definition.schema, None)
    if isinstance(definition, ProtobufDefinition):
        return json_format.MessageToDict(
            definition.message_class.FromString(payload), preserving_proto_field_name=True
        )
    if isinstance(definition, NumberDefinition):
        return _number(definition.name, payload)
    if definition.schema_type is SchemaType.STRING:
        return payload.decode()
    if definition.schema_type is SchemaType.JSON_SCHEMA:
        return json.loads(payload)
    return payload


def _number(name: str, payload: bytes) -> dict[str, float] | None:
    """A number in either order of bytes: no schema says in which one clients write it.

    None if the schema does not say which of the numbers of this width it is.
    """
    kind = _NUMBERS.get(name)
    if kind is None:
        return None
    return {
        "little_endian": struct.unpack(f"<{kind}", payload)[0],
        "big_endian": struct.unpack(f">{kind}", payload)[0],
    }


class _Plain:
    """Makes values of JSON out of others, as long as they do not become too many."""

    def __init__(self) -> None:
        self._room = 2 * DECODED_BYTES_MAX

    def of(self, value: Any, depth: int) -> Any:  # noqa: ANN401 - one line for each kind
        """A value, and all that is in it."""
        if depth > _DEPTH_MAX:
            raise InvalidRequestError("it is nested too deep to be shown")
        self._take(2)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            # Beyond 64 bits nobody would read it as a number.
            return value if -(1 << 63) <= value < 1 << 64 else self._text(f"{value:#x}")
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, bytes | bytearray):
            return self._text(base64.b64encode(value).decode())
        if isinstance(value, Mapping):
            return {self._text(str(key)): self.of(one, depth + 1) for key, one in value.items()}
        if isinstance(value, datetime.datetime | datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
            return self._text(str(value))
        if isinstance(value, Iterable):
            return [self.of(one, depth + 1) for one in value]
        return self._text(str(value))

    def _text(self, text: str) -> str:
        self._take(len(text))
        return text

    def _take(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise InvalidRequestError("it is too large to be shown")
