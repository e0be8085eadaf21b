"""Finds the parts of an encoded message body without decoding all of it.

    request_id · identity · topic_offset · payload · publish_time · suffix

The `identity` is the producer's id, the topic's name and the broker's address; the `suffix` is
everything behind the publish time. Both are the same for many messages, so callers decode them once
and look them up by their bytes from then on.

Owns: `split`, which is as strict as `ister.format.message.decode_message` about everything outside
of the identity and the suffix, and `decode_identity` and `decode_suffix` for those two. A body is
valid exactly if `split` and both of these accept it. Does not own: the encoding
(`ister.format.message`, `ister.format.bincode`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from ister.base.model import Codec
from ister.errors import CorruptDataError
from ister.format import message
from ister.format.bincode import BincodeError, BodyReader, FixintReader, VarintReader
from ister.format.message import Suffix

NO_IDENTITY: Final = b"\xff" * 16
"""Bytes that no identity begins with."""

_U64: Final = struct.Struct("<Q").unpack_from
_TWO_U64: Final = struct.Struct("<QQ").unpack_from
# By the tag of a varint: how to read it, its width, and the least value that needs it.
_LONG: Final = {
    0xFB: (struct.Struct("<H").unpack_from, 2, 0xFB),
    0xFC: (struct.Struct("<I").unpack_from, 4, 1 << 16),
    0xFD: (_U64, 8, 1 << 32),
}
_DAMAGES: Final = (BincodeError, LookupError, struct.error, OverflowError)

Parts = tuple[int, bytes, int, int, int, int]
"""request_id, identity, start and end of the payload, publish_time, start of the suffix."""


class Identity(NamedTuple):
    """The fields of an identity."""

    producer_id: int
    topic_name: str
    broker_addr: str


def split(buffer: bytes, start: int, end: int, codec: Codec, known: bytes = NO_IDENTITY) -> Parts:
    """Returns the parts of the body in `buffer[start:end]`.

    Args:
        buffer: Bytes that hold the body.
        start: Where it begins.
        end: Where it ends.
        codec: How it is encoded.
        known: An identity that the body may have; if it does, this object is returned.

    Raises:
        CorruptDataError: The bytes are not a message in this codec.
    """
    try:
        if codec is Codec.BINCODE2:
            return _split_varint(buffer, start, end, known)
        return _split_fixint(buffer, start, end, known)
    except _DAMAGES as error:
        raise CorruptDataError(f"not a {codec} message: {error!r}") from error


def _split_varint(buffer: bytes, start: int, end: int, known: bytes) -> Parts:
    """Splits a varint body; reads integers inline, because it runs for every delivered message."""
    request_id = buffer[start]
    at = start + 1
    if request_id >= 0xFB:
        request_id, at = _long(buffer, at, request_id)
    if buffer.startswith(known, at):
        identity = known
        at += len(known)
    else:
        begin = at
        reader = VarintReader(buffer, begin)
        reader.u64()
        reader.skip()
        reader.skip()
        at = reader.position
        identity = buffer[begin:at]
    tag = buffer[at]
    at += 1
    if tag >= 0xFB:
        _, at = _long(buffer, at, tag)
    size = buffer[at]
    at += 1
    if size >= 0xFB:
        size, at = _long(buffer, at, size)
    payload_at = at
    at = payload_end = at + size
    if at >= end:
        raise BincodeError(f"a payload of {size} bytes runs past the end")
    publish_time = buffer[at]
    at += 1
    if publish_time >= 0xFB:
        publish_time, at = _long(buffer, at, publish_time)
    if at > end:
        raise BincodeError("the publish time runs past the end")
    return request_id, identity, payload_at, payload_end, publish_time, at


def _long(buffer: bytes, at: int, tag: int) -> tuple[int, int]:
    """Returns an integer of more than one byte, and where it ends."""
    unpack, width, least = _LONG[tag]
    value: int = unpack(buffer, at)[0]
    if value < least:
        raise BincodeError(f"{value} in a longer form than needed at {at}")
    return value, at + width


def _split_fixint(buffer: bytes, start: int, end: int, known: bytes) -> Parts:
    request_id: int = _U64(buffer, start)[0]
    at = start + 8
    if buffer.startswith(known, at):
        identity = known
        at += len(known)
    else:
        reader = FixintReader(buffer, at + 8)
        reader.skip()
        reader.skip()
        identity = buffer[at : reader.position]
        at = reader.position
    _, size = _TWO_U64(buffer, at)
    payload_at = at + 16
    payload_end = payload_at + size
    if payload_end + 8 > end:
        raise BincodeError(f"a payload of {size} bytes runs past the end")
    publish_time: int = _U64(buffer, payload_end)[0]
    return request_id, identity, payload_at, payload_end, publish_time, payload_end + 8


def decode_identity(identity: bytes, codec: Codec) -> Identity:
    """Decodes the fields of an identity.

    Raises:
        CorruptDataError: The bytes are not an identity in this codec.
    """
    try:
        reader = _reader(identity, codec)
        return Identity(reader.u64(), reader.text(), reader.text())
    except BincodeError as error:
        raise CorruptDataError(f"not a {codec} message: {error}") from error


def decode_suffix(suffix: bytes, codec: Codec) -> Suffix:
    """Decodes the fields behind the publish time.

    Raises:
        CorruptDataError: The bytes are not such fields in this codec.
    """
    try:
        return message.decode_suffix(_reader(suffix, codec), codec)
    except BincodeError as error:
        raise CorruptDataError(f"not a {codec} message: {error}") from error


def _reader(data: bytes, codec: Codec) -> BodyReader:
    return VarintReader(data) if codec is Codec.BINCODE2 else FixintReader(data)
