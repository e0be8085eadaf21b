"""Serializers: convert values of a program to payloads and back.

    json     what `msgspec` supports: dict, list, str, numbers, dataclasses, datetime, UUID, …
    text     str, as UTF-8
    bytes    bytes, unchanged

Owns: the protocol and these three. Does not own: schemas, which a broker checks. Any object with
`serialize` and `deserialize` is a serializer; a program brings its own for Avro or Protobuf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast

import msgspec

from ister.base.structs import make_decoder
from ister.errors import InvalidRequestError

_Value = TypeVar("_Value")
Json: TypeAlias = Any  # as `json.loads` returns: only the program knows what its messages have


class Serializer(Protocol[_Value]):
    """Converts values to payloads and back. Thread-safe if several threads use its producer."""

    def serialize(self, value: _Value) -> bytes:
        """The payload of a value; what it raises is raised by `send`."""
        ...

    def deserialize(self, payload: bytes) -> _Value:
        """The value of a payload; what it raises is raised by `ReceivedMessage.value`."""
        ...


class JsonSerializer(Generic[_Value]):
    """JSON, UTF-8. Thread-safe."""

    def __init__(self, type: type[_Value] | None = None) -> None:
        """Makes a serializer.

        Args:
            type: What payloads are converted to and checked against, such as a dataclass, a
                `TypedDict` or a `msgspec.Struct`; dicts, lists and scalars by default.
        """
        self._encoder = msgspec.json.Encoder(enc_hook=_as_known)
        self._decode = cast(
            "Callable[[bytes], _Value]",
            msgspec.json.decode if type is None else make_decoder(type).decode,
        )

    def serialize(self, value: _Value) -> bytes:
        """Encodes a value; NaN and infinities become null, a `Decimal` becomes a string.

        Raises:
            InvalidRequestError: The value cannot be encoded as JSON.
        """
        try:
            return self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
            raise InvalidRequestError(f"cannot encode as JSON: {error}") from error

    def deserialize(self, payload: bytes) -> _Value:
        """Decodes a payload.

        Raises:
            InvalidRequestError: The payload is not JSON, or not of the type.
        """
        try:
            return self._decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"payload cannot be decoded as JSON: {error}") from error


def _as_known(value: object) -> object:
    """Converts a pydantic model to a dict, since msgspec does not support it."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"objects of type {type(value).__name__} are not supported")
    return dump(mode="json")


class TextSerializer:
    """Text as UTF-8."""

    def serialize(self, value: str) -> bytes:
        """Encodes a text.

        Raises:
            InvalidRequestError: The value is not a str, or has lone surrogates.
        """
        if not isinstance(value, str):
            raise InvalidRequestError(f"value must be str, not {type(value).__name__}")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"text is not valid Unicode: {error}") from error

    def deserialize(self, payload: bytes) -> str:
        """Decodes a payload.

        Raises:
            InvalidRequestError: The payload is not UTF-8.
        """
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"payload is not UTF-8: {error}") from error


class BytesSerializer:
    """Bytes, unchanged."""

    def serialize(self, value: bytes) -> bytes:
        return value

    def deserialize(self, payload: bytes) -> bytes:
        return payload


AnySerializer: TypeAlias = Serializer[Json] | str
"""A serializer, or the name of one: `json`, `text`, `bytes`."""
JSON: Final = JsonSerializer[Json]()
TEXT: Final = TextSerializer()
_BY_NAME: Final[dict[str, Serializer[Json]]] = {
    "json": JSON,
    "text": TEXT,
    "bytes": BytesSerializer(),
}


def find_serializer(serializer: AnySerializer) -> Serializer[Json]:
    """The serializer of a name, or the one given.

    Raises:
        InvalidRequestError: It is neither.
    """
    if isinstance(serializer, str):
        found = _BY_NAME.get(serializer)
        if found is None:
            raise InvalidRequestError(
                f"unknown serializer {serializer!r}",
                hint=f"use {', '.join(_BY_NAME)}, or an object with serialize and deserialize",
            )
        return found
    for name in ("serialize", "deserialize"):
        if not callable(getattr(serializer, name, None)):
            raise InvalidRequestError(
                f"serializer {type(serializer).__name__} has no method {name}"
            )
    return serializer


def decode_payload_by(
    serializer: Serializer[Json], payload: bytes, *, offset: int, topic: str | None = None
) -> Json:
    """The value of a message's payload; errors of this module say which message it is.

    Raises:
        InvalidRequestError: The payload cannot be decoded.
        Exception: What another serializer raises.
    """
    try:
        return serializer.deserialize(payload)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            error.message, topic=topic, offset=offset, hint=error.hint
        ) from error
