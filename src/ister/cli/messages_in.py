"""Splits the input of `ister produce` into messages.

    lines, or anything else between delimiters ─┐
    JSON, an object a line ─────────────────────┼─► payload, routing key, attributes
    all of the input as one ────────────────────┘

Owns: splitting, and what a line means. Does not own: where bytes come from, publishing.

Bytes are taken as they come, so that a line typed at a terminal goes at once. What follows the last
delimiter is a message too, if it is not empty. A line that is longer than a message may be is an
error before it is held whole.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ister.base.limits import KIB, MESSAGE_SIZE_BYTES_MAX
from ister.base.model import JsonObject
from ister.errors import InvalidRequestError, MessageTooLargeError

_CHUNK_BYTES: Final = 256 * KIB
# A message as JSON: base64 makes a third more, and attributes come on top.
_LINE_BYTES_MAX: Final = 2 * MESSAGE_SIZE_BYTES_MAX
_SHOWN_CHARACTERS: Final = 60


class InputMessage(NamedTuple):
    """What is published."""

    payload: bytes
    routing_key: str | None
    attributes: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """How input is read."""

    delimiter: bytes = b"\n"
    is_whole: bool = False
    """All of it is one message."""
    is_json: bool = False
    """A JSON object a line, as `ister consume --json` prints them."""
    key: str | None = None
    """The routing key of all messages that have none of their own."""
    key_field: str | None = None
    """Lines are JSON objects, and this field of theirs is the routing key."""
    attributes: Mapping[str, str] | None = None
    """Of all messages; their own come on top."""


def read_messages(read: Callable[[int], bytes], options: InputOptions) -> Iterator[InputMessage]:
    """The messages of an input.

    `read` returns at most so many bytes, and none at the end.

    Raises:
        InvalidRequestError: A line is not what it should be; names it.
        MessageTooLargeError: There is no end to one.
    """
    make = _maker(options)
    pieces = [_read_all(read)] if options.is_whole else split(read, options.delimiter)
    for number, piece in enumerate(pieces, 1):
        try:
            yield make(piece)
        except InvalidRequestError as error:
            error.message = f"message {number} of the input: {error.message}"
            raise


def split(read: Callable[[int], bytes], delimiter: bytes) -> Iterator[bytes]:
    """What is between delimiters."""
    held = bytearray()
    while chunk := read(_CHUNK_BYTES):
        # A long delimiter may lie across two chunks.
        seen = max(0, len(held) - len(delimiter) + 1)
        held += chunk
        if held.find(delimiter, seen) >= 0:
            *pieces, rest = bytes(held).split(delimiter)
            held = bytearray(rest)
            yield from pieces
        if len(held) > _LINE_BYTES_MAX:
            raise MessageTooLargeError(
                f"more than {_LINE_BYTES_MAX:,} bytes of input without a delimiter",
                hint="set the separator with --delimiter or --null",
            )
    if held:
        yield bytes(held)


def _read_all(read: Callable[[int], bytes]) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while chunk := read(_CHUNK_BYTES):
        pieces.append(chunk)
        size += len(chunk)
        if size > MESSAGE_SIZE_BYTES_MAX:
            raise MessageTooLargeError(
                f"the input has more than {MESSAGE_SIZE_BYTES_MAX:,} bytes, and --whole makes it "
                "one message"
            )
    return b"".join(pieces)


def _maker(options: InputOptions) -> Callable[[bytes], InputMessage]:
    key, attributes = options.key, dict(options.attributes or {}) or None
    if options.is_json:
        return lambda piece: _of_json(piece, key, attributes)
    field = options.key_field
    if field is not None:
        return lambda piece: InputMessage(piece, _key_in(piece, field, key), attributes)
    return lambda piece: InputMessage(piece, key, attributes)


def _of_json(line: bytes, key: str | None, attributes: Mapping[str, str] | None) -> InputMessage:
    fields = _object(line)
    own = fields.get("attributes") or {}
    if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
        raise InvalidRequestError("attributes must be an object of strings")
    own_key = fields.get("routing_key")
    if own_key is not None and not isinstance(own_key, str):
        raise InvalidRequestError("routing_key must be a string")
    return InputMessage(
        _payload(fields), key if own_key is None else own_key, {**(attributes or {}), **own} or None
    )


def _payload(fields: JsonObject) -> bytes:
    encoded = fields.get("payload_base64")
    if encoded is not None:
        if not isinstance(encoded, str):
            raise InvalidRequestError("payload_base64 is not valid base64")
        try:
            return base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise InvalidRequestError("payload_base64 is not valid base64") from error
    if fields.get("payload") is None:
        raise InvalidRequestError(
            "the object has no payload", hint="add payload, or payload_base64 for binary data"
        )
    payload = fields["payload"]
    if not isinstance(payload, str):
        payload = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    try:
        return payload.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("payload is not valid Unicode") from error


def _key_in(line: bytes, field: str, otherwise: str | None) -> str | None:
    """The routing key in a line of JSON; a name with dots leads into objects."""
    value: object = _object(line)
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return otherwise
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _object(line: bytes) -> JsonObject:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN_CHARACTERS].decode(errors="replace")
        raise InvalidRequestError(f"{shown!r} is not JSON") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the JSON value is not an object")
    return fields
