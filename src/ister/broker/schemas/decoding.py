"""Decodes payloads by their schemas into JSON values, for browsing messages.

Does not own: whether a payload matches its schema (`definitions`).

Both are untrusted. Only a payload that matches is decoded, so the limits of the check hold here
too. The output is limited as well, since the names in a schema may be long and repeated.
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
from typing import Final, NoReturn

import fastavro
from google.protobuf import json_format

from ister.base.limits import KIB
from ister.broker.schemas.avro import AvroDefinition
from ister.broker.schemas.definition import Definition, Json
from ister.broker.schemas.primitives import NumberDefinition
from ister.broker.schemas.protobuf import ProtobufDefinition
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import SchemaType

DECODED_BYTES_MAX: Final = 256 * KIB
"""The largest payload that is decoded; the output is at most about twice as large."""

_DEPTH_MAX: Final = 100
_NUMBERS: Final = {"int": "i", "float": "f", "int64": "q", "double": "d"}


def decode_payload(definition: Definition, payload: bytes) -> Json:
    """Decodes a payload into JSON values.

    Bytes become base64; times, decimals, and numbers that JSON cannot express become strings.
    """
    if len(payload) > DECODED_BYTES_MAX:
        raise InvalidRequestError(
            f"the payload has {len(payload)} bytes; at most {DECODED_BYTES_MAX} are decoded"
        )
    reason = definition.check(payload)
    if reason is not None:
        raise InvalidRequestError(f"the payload does not match its schema: {reason}")
    try:
        return _Plain().of(_decode(definition, payload), 0)
    except InvalidRequestError:
        raise
    except RecursionError as error:
        raise InvalidRequestError("the payload is nested too deep") from error
    except Exception as error:  # libraries raise errors of their own
        raise InvalidRequestError(
            f"the payload cannot be decoded: {type(error).__name__}"
        ) from error


def parse_json(data: bytes) -> Json:
    """Parses JSON within the limits of `decode_payload`.

    Raises:
        ValueError: It is not JSON, or nested too deep.
    """
    try:
        value = json.loads(data, parse_constant=_refuse)
        return _Plain().of(value, 0)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _decode(definition: Definition, payload: bytes) -> Json:
    if isinstance(definition, AvroDefinition):
        if payload.startswith(b"Obj\x01") and definition.check_datum(payload) is not None:
            return list(fastavro.reader(io.BytesIO(payload)))
        return fastavro.schemaless_reader(io.BytesIO(payload), definition.schema, None)
    if isinstance(definition, ProtobufDefinition):
        return json_format.MessageToDict(
            definition.decode(payload), preserving_proto_field_name=True
        )
    if isinstance(definition, NumberDefinition):
        return _number(definition.name, payload)
    if definition.schema_type is SchemaType.STRING:
        return payload.decode()
    if definition.schema_type is SchemaType.JSON_SCHEMA:
        return json.loads(payload)
    return payload


def _number(name: str, payload: bytes) -> dict[str, float] | None:
    """A number in both byte orders, since no schema says which one clients use.

    None if the schema does not name the number type.
    """
    kind = _NUMBERS.get(name)
    if kind is None:
        return None
    return {
        "little_endian": struct.unpack(f"<{kind}", payload)[0],
        "big_endian": struct.unpack(f">{kind}", payload)[0],
    }


class _Plain:
    """Converts values to JSON values, up to a total size."""

    def __init__(self) -> None:
        self._room = 2 * DECODED_BYTES_MAX

    def of(self, value: Json, depth: int) -> Json:
        """Converts a value and everything in it."""
        if depth > _DEPTH_MAX:
            raise InvalidRequestError("the payload is nested too deep")
        self._take(2)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            # JavaScript and others cannot read larger numbers.
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
        # JSON may escape half of a surrogate pair, which no answer can be encoded with.
        return text if text.isascii() else text.encode(errors="replace").decode()

    def _take(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise InvalidRequestError("the decoded payload is too large")
