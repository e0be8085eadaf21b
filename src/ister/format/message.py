"""Message bodies: Danube's `StreamMessage` in bincode, byte for byte.

    request_id · producer_id · topic_name · broker_addr · topic_offset · payload · publish_time ·
    producer_name · subscription_name? · attributes{} · [schema_id? · schema_version? ·
    routing_key?]

`bincode2` (Danube ≥ 0.12) has all of it, `bincode1` (Danube 0.5.0) ends before the bracket. The
body does not say which one it is: topics and objects record their codec, and `recognise` tells for
bodies without such a record. Earlier versions of Danube wrote shorter `bincode2` bodies: 0.5.1 ends
before the bracket, 0.6 to 0.11 before `routing_key`. They are read, with None for the missing
fields, and never written.

`split` finds the parts of a body without decoding all of it:

    request_id · identity · topic_offset · payload · publish_time · suffix

The `identity` is the producer's id, the topic's name and the broker's address; the `suffix` is
everything behind the publish time. Both are the same for many messages, so callers decode them once
and look them up by their bytes from then on. `split` is as strict as `decode_message` about
everything outside of these two: a body is valid exactly if `split`, `decode_identity` and
`decode_suffix` accept it.

The order of attributes is the mapping's own; Danube's is random per process, so equal messages may
have unequal bytes and only decoded values are compared.

Owns: the encodings, and `BodyEncoder`, which builds bodies around payloads from parts that are
encoded once. Does not own: frames, offsets, size limits of messages; bodies in columns
(`ister.format.arrow`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Final, NamedTuple, TypeVar

from ister import kernels
from ister.base.limits import SUFFIX_CACHE_ENTRIES_MAX
from ister.base.model import Codec, MessageId, StreamMessage
from ister.errors import CorruptDataError, InvalidRequestError
from ister.format.bincode import (
    BincodeError,
    BodyReader,
    FixintReader,
    VarintReader,
    Writer,
    encode_fixint,
    encode_varint,
)
from ister.format.crc import Buffer
from ister.format.frame import FRAME_HEADER_SIZE

# Parts of a body that are kept for the next one are no larger than this.
_KEPT_BYTES_MAX: Final = 4096

# What encoding raises for a value out of range, or of another type than its field's.
_MISFITS: Final = (BincodeError, ArithmeticError, AttributeError, TypeError, struct.error)
# A lookup also raises ValueError: some memoryviews have no hash.
_KEY_MISFITS: Final = (*_MISFITS, ValueError)
_BITS: Final = {
    "request_id": 64,
    "producer_id": 64,
    "topic_offset": 64,
    "publish_time": 64,
    "schema_id": 64,
    "schema_version": 32,
}
_OPTIONAL: Final = {"subscription_name", "schema_id", "schema_version", "routing_key"}


_READ_U64: Final = struct.Struct("<Q").unpack_from
_TWO_U64: Final = struct.Struct("<QQ").unpack_from
# By the tag of a varint: how to read it, its width, and the least value that needs it.
_LONG: Final = {
    0xFB: (struct.Struct("<H").unpack_from, 2, 0xFB),
    0xFC: (struct.Struct("<I").unpack_from, 4, 1 << 16),
    0xFD: (_READ_U64, 8, 1 << 32),
}
_DAMAGES: Final = (BincodeError, LookupError, struct.error, OverflowError)

_NUMBERS: Final[dict[Codec, Callable[[int], bytes]]] = {
    Codec.BINCODE1: encode_fixint,
    Codec.BINCODE2: encode_varint,
}
"""How integers are encoded."""
_READERS: Final[dict[Codec, Callable[[Buffer], BodyReader]]] = {
    Codec.BINCODE1: FixintReader,
    Codec.BINCODE2: VarintReader,
}


def _misfit(error: Exception, **fields: object) -> InvalidRequestError:
    """The error for fields that cannot be encoded; names the first of the wrong type."""
    for name, value in fields.items():
        if value is None and name in _OPTIONAL:
            continue
        if bits := _BITS.get(name):
            wanted = f"an integer from 0 to 2**{bits}-1"
            fits = isinstance(value, int) and 0 <= value < 1 << bits
        elif name == "attributes":
            wanted = "a mapping of strings to strings"
            fits = isinstance(value, Mapping) and all(
                isinstance(text, str) for pair in value.items() for text in pair
            )
        else:
            wanted = "a string"
            fits = isinstance(value, str)
        if not fits:
            reason = f"{name} must be {wanted}, not {value!r:.80}"
            return InvalidRequestError(f"the message cannot be encoded: {reason}")
    return InvalidRequestError(f"the message cannot be encoded: {error}")


def encode_message(message: StreamMessage, codec: Codec) -> bytes:
    """The body of `message`.

    Raises:
        InvalidRequestError: A field does not fit its type, or the codec has no such field.
    """
    encoder, identity = BodyEncoder(codec), message.msg_id
    head = encoder.head(
        message.request_id, identity.producer_id, identity.topic_name, identity.broker_addr
    )
    tail = encoder.tail(
        message.producer_name,
        message.subscription_name,
        message.attributes,
        schema_id=message.schema_id,
        schema_version=message.schema_version,
        routing_key=message.routing_key,
    )
    offset, payload, time = identity.topic_offset, message.payload, message.publish_time
    try:
        return encoder.body(head, offset, payload, time, tail)
    except _MISFITS as error:
        raise _misfit(error, topic_offset=offset, publish_time=time) from error


def _encode_suffix(
    codec: Codec,
    *,
    producer_name: str,
    subscription_name: str | None,
    attributes: Mapping[str, str],
    schema_id: int | None,
    schema_version: int | None,
    routing_key: str | None,
) -> bytes:
    """Everything after `publish_time`: the part that is the same for many messages."""
    writer = Writer(_NUMBERS[codec]).text(producer_name).some(subscription_name is not None)
    if subscription_name is not None:
        writer.text(subscription_name)
    writer.u64(len(attributes))
    for key, value in attributes.items():
        writer.text(key).text(value)
    if codec is Codec.BINCODE1:
        for name, value_ in (
            ("schema_id", schema_id),
            ("schema_version", schema_version),
            ("routing_key", routing_key),
        ):
            if value_ is not None:
                raise InvalidRequestError(
                    f"{codec} has no field {name}", hint="use a topic with codec bincode2"
                )
        return writer.finish()
    writer.some(schema_id is not None)
    if schema_id is not None:
        writer.u64(schema_id)
    writer.some(schema_version is not None)
    if schema_version is not None:
        writer.u32(schema_version)
    writer.some(routing_key is not None)
    if routing_key is not None:
        writer.text(routing_key)
    return writer.finish()


def encode_identity(producer_id: int, topic_name: str, broker_addr: str, codec: Codec) -> bytes:
    """The fields between the request id and the offset."""
    writer = Writer(_NUMBERS[codec])
    return writer.u64(producer_id).text(topic_name).text(broker_addr).finish()


def decode_message(body: Buffer, codec: Codec) -> StreamMessage:
    """The message in `body`, all of it and nothing behind it.

    Raises:
        CorruptDataError: The bytes are not a message in this codec.
    """
    try:
        return _decode(body, codec)
    except BincodeError as error:
        raise CorruptDataError(f"not a {codec} message: {error}") from error


def _decode(body: Buffer, codec: Codec) -> StreamMessage:
    reader = _READERS[codec](body)
    request_id = reader.u64()
    msg_id = MessageId(
        producer_id=reader.u64(),
        topic_name=reader.text(),
        broker_addr=reader.text(),
        topic_offset=reader.u64(),
    )
    payload = reader.blob()
    publish_time = reader.u64()
    suffix = _decode_suffix(reader, codec)
    return StreamMessage(
        request_id=request_id,
        msg_id=msg_id,
        payload=payload,
        publish_time=publish_time,
        producer_name=suffix.producer_name,
        subscription_name=suffix.subscription_name,
        attributes=suffix.attributes,
        schema_id=suffix.schema_id,
        schema_version=suffix.schema_version,
        routing_key=suffix.routing_key,
    )


class Suffix(NamedTuple):
    """The fields of a body behind its publish time: the same for many messages."""

    producer_name: str
    subscription_name: str | None
    attributes: dict[str, str]
    schema_id: int | None
    schema_version: int | None
    routing_key: str | None


def _decode_suffix(reader: BodyReader, codec: Codec) -> Suffix:
    """The fields behind the publish time, up to the end of the body.

    Raises:
        BincodeError: The bytes are not those fields, or go on behind them.
    """
    producer_name = reader.text()
    subscription_name = reader.text() if reader.some() else None
    attributes = _decode_attributes(reader)
    schema_id: int | None = None
    schema_version: int | None = None
    routing_key: str | None = None
    if codec is Codec.BINCODE2 and not reader.at_end():
        schema_id = reader.u64() if reader.some() else None
        schema_version = reader.u32() if reader.some() else None
        if not reader.at_end():
            routing_key = reader.text() if reader.some() else None
    if not reader.at_end():
        raise BincodeError(f"bytes left over from {reader.position} on")
    return Suffix(
        producer_name, subscription_name, attributes, schema_id, schema_version, routing_key
    )


def _decode_attributes(reader: BodyReader) -> dict[str, str]:
    count = reader.u64()
    attributes: dict[str, str] = {}
    # A count bomb ends at the first missing key: nothing is allocated ahead.
    for _ in range(count):
        key = reader.text()
        if key in attributes:
            raise BincodeError(f"attribute {key!r} twice")
        attributes[key] = reader.text()
    return attributes


class Identity(NamedTuple):
    """The fields of an identity."""

    producer_id: int
    topic_name: str
    broker_addr: str


Parts = tuple[int, bytes, int, int, int, int]
"""request_id, identity, start and end of the payload, publish_time, start of the suffix."""


def split(buffer: Buffer, start: int, end: int, codec: Codec, known: bytes = b"") -> Parts:
    """Returns the parts of the body in `buffer[start:end]`.

    Args:
        buffer: Bytes that hold the body.
        start: Where it begins.
        end: Where it ends.
        codec: How it is encoded.
        known: An identity that the body may have; if it does, this object is returned. Only for
            `bytes`.

    Raises:
        CorruptDataError: The bytes are not a message in this codec.
    """
    data: bytes = buffer  # type: ignore[assignment]
    try:
        if codec is Codec.BINCODE2:
            return _split_varint(data, start, end, known)
        return _split_fixint(data, start, end, known)
    except _DAMAGES as error:
        raise CorruptDataError(f"not a {codec} message: {error!r}") from error


def _split_varint(buffer: bytes, start: int, end: int, known: bytes | None) -> Parts:
    """Splits a varint body; reads integers inline, because it runs for every message read.

    Looks no further than the payload if `known` is None, and returns no identity.
    """
    request_id = buffer[start]
    at = start + 1
    if request_id >= 0xFB:
        request_id, at = _long(buffer, at, request_id)
    if known and buffer.startswith(known, at):
        identity = known
        at += len(known)
    else:
        begin = at
        number = buffer[at]
        at += 1
        if number >= 0xFB:
            _, at = _long(buffer, at, number)
        size = buffer[at]
        at += 1
        if size >= 0xFB:
            size, at = _long(buffer, at, size)
        at += size
        size = buffer[at]
        at += 1
        if size >= 0xFB:
            size, at = _long(buffer, at, size)
        at += size
        identity = b"" if known is None else buffer[begin:at]
    number = buffer[at]
    at += 1
    if number >= 0xFB:
        _, at = _long(buffer, at, number)
    size = buffer[at]
    at += 1
    if size >= 0xFB:
        size, at = _long(buffer, at, size)
    payload_at = at
    at = payload_end = at + size
    if at >= end:
        raise BincodeError(f"a payload of {size} bytes runs past the end")
    if known is None:
        return request_id, b"", payload_at, payload_end, 0, at
    publish_time = buffer[at]
    at += 1
    if publish_time == 0xFD and (usual := _READ_U64(buffer, at)[0]) >= 1 << 32:
        publish_time = usual
        at += 8
    elif publish_time >= 0xFB:
        publish_time, at = _long(buffer, at, publish_time)
    if at > end:
        raise BincodeError("the publish time runs past the end")
    return request_id, identity, payload_at, payload_end, publish_time, at


def _long(buffer: Buffer, at: int, tag: int) -> tuple[int, int]:
    """Returns an integer of more than one byte, and where it ends."""
    unpack, width, least = _LONG[tag]
    value: int = unpack(buffer, at)[0]
    if value < least:
        raise BincodeError(f"{value} in a longer form than needed at {at}")
    return value, at + width


def _split_fixint(buffer: bytes, start: int, end: int, known: bytes | None) -> Parts:
    request_id: int = _READ_U64(buffer, start)[0]
    at = start + 8
    if known and buffer.startswith(known, at):
        identity = known
        at += len(known)
    else:
        begin = at
        at += 16 + _READ_U64(buffer, at + 8)[0]
        at += 8 + _READ_U64(buffer, at)[0]
        identity = b"" if known is None else buffer[begin:at]
    _, size = _TWO_U64(buffer, at)
    payload_at = at + 16
    payload_end = payload_at + size
    if payload_end + 8 > end:
        raise BincodeError(f"a payload of {size} bytes runs past the end")
    publish_time: int = _READ_U64(buffer, payload_end)[0]
    return request_id, identity, payload_at, payload_end, publish_time, payload_end + 8


def decode_identity(identity: bytes, codec: Codec) -> Identity:
    """Decodes the fields of an identity.

    Raises:
        CorruptDataError: The bytes are not an identity in this codec.
    """
    try:
        reader = _READERS[codec](identity)
        return Identity(reader.u64(), reader.text(), reader.text())
    except BincodeError as error:
        raise CorruptDataError(f"not a {codec} message: {error}") from error


def decode_suffix(suffix: bytes, codec: Codec) -> Suffix:
    """Decodes the fields behind the publish time.

    Raises:
        CorruptDataError: The bytes are not such fields in this codec.
    """
    try:
        return _decode_suffix(_READERS[codec](suffix), codec)
    except BincodeError as error:
        raise CorruptDataError(f"not a {codec} message: {error}") from error


def decode_payload(body: Buffer, codec: Codec, *, start: int = 0, end: int | None = None) -> bytes:
    """The payload of the body in `body[start:end]`, by default all of it.

    Looks no further than it has to: what follows may still turn out to be no message.

    Raises:
        CorruptDataError: The bytes up to the payload are not those of a message in this codec.
    """
    data: bytes = body  # type: ignore[assignment]
    limit = len(data) if end is None else end
    try:
        # Not by `split`: less work for every message whose payload is used.
        if codec is Codec.BINCODE2:
            parts = _split_varint(data, start, limit, None)
        else:
            parts = _split_fixint(data, start, limit, None)
    except _DAMAGES as error:
        raise CorruptDataError(f"not a {codec} message: {error!r}") from error
    return bytes(data[parts[2] : parts[3]])


def decode_publish_time(
    body: Buffer, codec: Codec, *, start: int = 0, end: int | None = None
) -> int:
    """The publish time of a body, in milliseconds; what follows it is not looked at.

    Raises:
        CorruptDataError: The bytes up to the publish time are not those of a message.
    """
    return split(body, start, len(body) if end is None else end, codec)[4]


def decode_publish_times(
    chunk: Buffer, starts: list[int], end: int, codec: Codec
) -> list[int] | None:
    """The publish times of frames that follow each other in `chunk`.

    None if one of them has none, or one that no clock gives (it does not fit into 63 bits).

    `starts` has where each frame begins, `end` where the last one ends.
    """
    if kernels.current() is not None:
        return kernels.publish_times(chunk, starts, end, is_varint=codec is Codec.BINCODE2)
    try:
        times = [
            decode_publish_time(chunk, codec, start=start + FRAME_HEADER_SIZE, end=stop)
            for start, stop in zip(starts, [*starts[1:], end], strict=True)
        ]
    except CorruptDataError:
        return None
    return times if max(times, default=0) < 1 << 63 else None


def first_at_or_after(times: list[int], publish_time: int) -> int | None:
    """Returns the index of the first time at or after `publish_time`, or None."""
    # Most lists have none, and `max` does not run as Python.
    if max(times, default=publish_time - 1) < publish_time:
        return None
    return next(place for place, time in enumerate(times) if time >= publish_time)


def recognise(body: Buffer, *, offset: int | None = None) -> Codec | None:
    """The codec of a body that carries no record of it, or None if it is neither.

    A body counts as one in a codec if it decodes without a byte left over; where both would do,
    the one whose `topic_offset` is the frame's `offset` wins, then the newer one.
    """
    candidates: list[Codec] = []
    for codec in (Codec.BINCODE2, Codec.BINCODE1):
        try:
            message = _decode(body, codec)
        except BincodeError:
            continue
        if offset is not None and message.msg_id.topic_offset == offset:
            return codec
        candidates.append(codec)
    return candidates[0] if candidates else None


class BodyEncoder:
    """Builds bodies: a head and a tail, both without the offset, around a payload.

    Heads and tails are the same for many messages of a producer, except for `request_id`; those
    parts are kept. Thread-safe.
    """

    __slots__ = ("_codec", "_identities", "_tails", "number")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.number = _NUMBERS[codec]
        """Encodes an integer of 64 bits."""
        self._identities: dict[tuple[int, str, str], bytes] = {}
        self._tails: dict[tuple[str, str | None], bytes] = {}

    def head(self, request_id: int, producer_id: int, topic_name: str, broker_addr: str) -> bytes:
        """The fields before the offset.

        Raises:
            InvalidRequestError: A field does not fit its type.
        """
        try:
            key = (index(producer_id), topic_name, broker_addr)
            identity = self._identities.get(key)
            if identity is None:
                identity = encode_identity(producer_id, topic_name, broker_addr, self._codec)
                _keep(self._identities, key, identity)
            return self.number(index(request_id)) + identity
        except _KEY_MISFITS as error:
            raise _misfit(
                error,
                request_id=request_id,
                producer_id=producer_id,
                topic_name=topic_name,
                broker_addr=broker_addr,
            ) from error

    def tail(
        self,
        producer_name: str,
        subscription_name: str | None,
        attributes: Mapping[str, str],
        *,
        schema_id: int | None,
        schema_version: int | None,
        routing_key: str | None,
    ) -> bytes:
        """The fields after the publish time.

        Raises:
            InvalidRequestError: A field does not fit its type, or the codec has no such field.
        """
        try:
            is_plain = (
                len(attributes) == 0
                and schema_id is None
                and schema_version is None
                and routing_key is None
            )
            key = (producer_name, subscription_name)
            found = self._tails.get(key) if is_plain else None
            if found is None:
                found = _encode_suffix(
                    self._codec,
                    producer_name=producer_name,
                    subscription_name=subscription_name,
                    attributes=attributes,
                    schema_id=schema_id,
                    schema_version=schema_version,
                    routing_key=routing_key,
                )
                if is_plain:
                    _keep(self._tails, key, found)
        except InvalidRequestError:
            raise
        except _KEY_MISFITS as error:
            raise _misfit(
                error,
                producer_name=producer_name,
                subscription_name=subscription_name,
                attributes=attributes,
                schema_id=schema_id,
                schema_version=schema_version,
                routing_key=routing_key,
            ) from error
        return found

    def body(
        self, head: bytes, offset: int, payload: bytes, publish_time: int, tail: bytes
    ) -> bytes:
        """The body of a message with an offset.

        Raises:
            BincodeError: The publish time is not an unsigned 64-bit integer.
        """
        number = self.number
        return b"".join(
            (head, number(offset), number(len(payload)), payload, number(publish_time), tail)
        )

    def bodies(
        self, head: bytes, first: int, payloads: Sequence[bytes], publish_time: int, tail: bytes
    ) -> list[bytes]:
        """The bodies of messages from offset `first` on that differ in their payloads alone."""
        number, join = self.number, b"".join
        end, size, length = number(publish_time) + tail, -1, b""
        bodies: list[bytes] = []
        for offset, payload in enumerate(payloads, first):
            if len(payload) != size:
                size = len(payload)
                length = number(size)
            bodies.append(join((head, number(offset), length, payload, end)))
        return bodies


_Key = TypeVar("_Key")


def _keep(kept: dict[_Key, bytes], key: _Key, encoded: bytes) -> bytes:
    """Keeps an encoded part for the next message, unless it is large; forgets all of too many."""
    if len(encoded) <= _KEPT_BYTES_MAX:
        if len(kept) >= SUFFIX_CACHE_ENTRIES_MAX:
            kept.clear()
        kept[key] = encoded
    return encoded
