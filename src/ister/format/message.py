"""Message bodies: Danube's `StreamMessage` in bincode, byte for byte.

    request_id · producer_id · topic_name · broker_addr · topic_offset · payload · publish_time ·
    producer_name · subscription_name? · attributes{} · [schema_id? · schema_version? ·
    routing_key?]

`bincode2` (Danube ≥ 0.12) has all of it, `bincode1` (Danube 0.5.0) ends before the bracket. The
body does not say which one it is: topics and objects record their codec, and `recognise` tells for
bodies without such a record. Earlier versions of Danube wrote shorter `bincode2` bodies: 0.5.1 ends
before the bracket, 0.6 to 0.11 before `routing_key`. They are read, with None for the missing
fields, and never written.

The order of attributes is the mapping's own; Danube's is random per process, so equal messages may
have unequal bytes and only decoded values are compared.

Owns: the encodings, and two ways to build a body around a payload from parts that are encoded once:
`BodyEncoder` for messages of this process, `RecordEncoder` for those that came over a wire with
their own ids. Does not own: frames, offsets, size limits of messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from operator import index
from typing import Final, NamedTuple, TypeVar

from ister.base.limits import SUFFIX_CACHE_ENTRIES_MAX
from ister.base.model import Codec, MessageId, StreamMessage
from ister.errors import CorruptDataError, InvalidRequestError
from ister.format import compiled
from ister.format.bincode import (
    BincodeError,
    BodyReader,
    FixintReader,
    FixintWriter,
    VarintReader,
    VarintWriter,
    Writer,
    encode_varint,
    varint_form,
)
from ister.format.crc import Buffer
from ister.format.frame import FRAME_HEADER_SIZE

_U64: Final = struct.Struct("<Q")
# Parts of a body that are kept for the next one are no larger than this.
_KEPT_BYTES_MAX: Final = 4096

# What encoding raises for a value out of range, or of another type than its field's.
_MISFITS: Final = (BincodeError, ArithmeticError, AttributeError, TypeError, struct.error)
# A lookup also raises ValueError: some memoryviews have no hash.
_KEY_MISFITS: Final = (*_MISFITS, ValueError)
_BITS: Final = {"request_id": 64, "producer_id": 64, "schema_id": 64, "schema_version": 32}
_OPTIONAL: Final = {"subscription_name", "schema_id", "schema_version", "routing_key"}


# request_id, producer_id, topic_name, broker_addr, topic_offset, and the payload's length.
_FIELDS_BEFORE_PAYLOAD: Final = (False, False, True, True, False, False)
_VARINT_WIDTHS: Final = {0xFB: 2, 0xFC: 4, 0xFD: 8}

_READERS: Final[dict[Codec, Callable[[Buffer], BodyReader]]] = {
    Codec.BINCODE1: FixintReader,
    Codec.BINCODE2: VarintReader,
}


def _writer(codec: Codec) -> Writer:
    return VarintWriter() if codec is Codec.BINCODE2 else FixintWriter()


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
    identity = message.msg_id
    try:
        return (
            _writer(codec)
            .u64(message.request_id)
            .u64(identity.producer_id)
            .text(identity.topic_name)
            .text(identity.broker_addr)
            .u64(identity.topic_offset)
            .blob(message.payload)
            .u64(message.publish_time)
            .finish()
        ) + _encode_suffix(
            codec,
            producer_name=message.producer_name,
            subscription_name=message.subscription_name,
            attributes=message.attributes,
            schema_id=message.schema_id,
            schema_version=message.schema_version,
            routing_key=message.routing_key,
        )
    except _MISFITS as error:
        raise InvalidRequestError(f"the message cannot be encoded: {error}") from error


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
    writer = _writer(codec).text(producer_name).some(subscription_name is not None)
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


def encode_prefix(topic_name: str, codec: Codec) -> bytes:
    """Everything before the offset, of a message that was appended in this process."""
    # request_id and producer_id name a producer's connection and broker_addr the broker;
    # a log opened in-process has none of them.
    return _writer(codec).u64(0).u64(0).text(topic_name).text("").finish()


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
    suffix = decode_suffix(reader, codec)
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


def decode_suffix(reader: BodyReader, codec: Codec) -> Suffix:
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


def decode_payload(body: Buffer, codec: Codec, *, start: int = 0, end: int | None = None) -> bytes:
    """The payload alone: what most readers want, for a fraction of the cost of all fields.

    Looks no further than it has to: what follows may still turn out to be no message.

    The body is in `body[start:end]`, by default all of it.

    Raises:
        CorruptDataError: The bytes up to the payload are not those of a message in this codec.
    """
    position, size = _find_payload(body, codec, start, len(body) if end is None else end)
    return bytes(body[position : position + size])


def decode_publish_time(
    body: Buffer, codec: Codec, *, start: int = 0, end: int | None = None
) -> int:
    """The publish time alone, in milliseconds; otherwise as `decode_payload`."""
    limit = len(body) if end is None else end
    position, size = _find_payload(body, codec, start, limit)
    position += size
    if codec is Codec.BINCODE2:
        width = 0
        tag = body[position] if position < limit else 0xFF
        if tag < 0xFB:
            return int(tag)
        width = _VARINT_WIDTHS.get(tag, limit)
        position += 1
    else:
        width = 8
    if position + width > limit:
        raise CorruptDataError(f"not a {codec} message: its publish time runs past its end")
    return int.from_bytes(body[position : position + width], "little")


def decode_publish_times(
    chunk: Buffer, starts: list[int], end: int, codec: Codec
) -> list[int] | None:
    """The publish times of frames that follow each other in `chunk`.

    None if one of them has none, or one that no clock gives (it does not fit into 63 bits).

    `starts` has where each frame begins, `end` where the last one ends.
    """
    if compiled.is_loaded():
        return compiled.publish_times(chunk, starts, end, is_varint=codec is Codec.BINCODE2)
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


def _find_payload(body: Buffer, codec: Codec, start: int, limit: int) -> tuple[int, int]:
    """Where the payload lies in `body[start:limit]`, and its size.

    Written out, because this is done for every message that is read.
    """
    try:
        size = 0
        position = start
        if codec is Codec.BINCODE2:
            for is_text in _FIELDS_BEFORE_PAYLOAD:
                size = body[position]
                position += 1
                if size >= 0xFB:
                    width = _VARINT_WIDTHS[size]
                    size = int.from_bytes(body[position : position + width], "little")
                    position += width
                if is_text:
                    position += size
        else:
            for is_text in _FIELDS_BEFORE_PAYLOAD:
                (size,) = _U64.unpack_from(body, position)
                position += 8
                if is_text:
                    position += size
    except (LookupError, struct.error, OverflowError) as error:
        raise CorruptDataError(f"not a {codec} message: {error!r}") from error
    if position + size > limit:
        raise CorruptDataError(f"not a {codec} message: its payload runs past its end")
    return position, size


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
    """Builds bodies for one topic: what does not change from message to message is encoded once.

    `encode` is the hot path. It packs the head (ids, offset, payload length) with one precompiled
    struct and joins head, payload, publish time and suffix.
    """

    __slots__ = ("_codec", "encode")

    def __init__(self, *, topic_name: str, codec: Codec) -> None:
        self._codec = codec
        prefix = encode_prefix(topic_name, codec)
        self.encode: Callable[[int, bytes, int, bytes], bytes]
        """(offset, payload, publish_time_ms, suffix) -> body. Not thread-safe."""
        if codec is Codec.BINCODE1:
            self.encode = _fixint_encoder(prefix)
        else:
            self.encode = _varint_encoder(prefix)

    def suffix(
        self,
        *,
        producer_name: str = "",
        attributes: Mapping[str, str] | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
        routing_key: str | None = None,
    ) -> bytes:
        """The part after the publish time, for `encode`; worth keeping where it recurs.

        Raises:
            InvalidRequestError: A field does not fit its type, or the codec has no such field.
        """
        try:
            return _encode_suffix(
                self._codec,
                producer_name=producer_name,
                subscription_name="",
                attributes={} if attributes is None else attributes,
                schema_id=schema_id,
                schema_version=schema_version,
                routing_key=routing_key,
            )
        except _MISFITS as error:
            raise _misfit(
                error,
                producer_name=producer_name,
                attributes={} if attributes is None else attributes,
                schema_id=schema_id,
                schema_version=schema_version,
                routing_key=routing_key,
            ) from error


class RecordEncoder:
    """Builds the bodies of records: a head and a tail, both without the offset, around a payload.

    Heads and tails are the same for many messages of a producer, except for `request_id`; those
    parts are kept. Thread-safe.
    """

    __slots__ = ("_codec", "_identities", "_number", "_tails")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._number: Callable[[int], bytes] = (
            encode_varint if codec is Codec.BINCODE2 else _U64.pack
        )
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
                writer = _writer(self._codec).u64(producer_id).text(topic_name).text(broker_addr)
                identity = _keep(self._identities, key, writer.finish())
            return self._number(index(request_id)) + identity
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
            BincodeError, struct.error: The publish time is not an unsigned 64-bit integer.
        """
        number = self._number
        return b"".join(
            (head, number(offset), number(len(payload)), payload, number(publish_time), tail)
        )


_Key = TypeVar("_Key")


def _keep(kept: dict[_Key, bytes], key: _Key, encoded: bytes) -> bytes:
    """Keeps an encoded part for the next message, unless it is large; forgets all of too many."""
    if len(encoded) <= _KEPT_BYTES_MAX:
        if len(kept) >= SUFFIX_CACHE_ENTRIES_MAX:
            kept.clear()
        kept[key] = encoded
    return encoded


def _fixint_encoder(prefix: bytes) -> Callable[[int, bytes, int, bytes], bytes]:
    pack_head = struct.Struct(f"<{len(prefix)}sQQ").pack
    join = b"".join

    def encode(offset: int, payload: bytes, publish_time_ms: int, suffix: bytes) -> bytes:
        head = pack_head(prefix, offset, len(payload))
        return join((head, payload, _U64.pack(publish_time_ms), suffix))

    return encode


def _varint_encoder(prefix: bytes) -> Callable[[int, bytes, int, bytes], bytes]:
    """The encoder for bincode 2, as a closure: its variables are cheaper to reach than attributes.

    A varint's width changes only at a few values, so one struct serves millions of messages; its
    tag bytes become part of the constant fields around it.
    """
    pack_head = struct.Struct("").pack
    head_constant = size_tag = b""
    offset_start = offset_end = size_start = size_end = 0
    join, pack_time = b"".join, struct.Struct("<BQ").pack

    def compile_head(offset: int, size: int) -> None:
        nonlocal pack_head, head_constant, size_tag
        nonlocal offset_start, offset_end, size_start, size_end
        # No size matches until the last line: an exception from a signal handler in between must
        # not leave the new ranges with the old struct.
        size_end = 0
        offset_start, offset_end, offset_tag, offset_letter = varint_form(offset)
        size_start, end, size_tag, size_letter = varint_form(size)
        head_constant = prefix + offset_tag
        pack_head = struct.Struct(
            f"<{len(head_constant)}s{offset_letter}{len(size_tag)}s{size_letter}"
        ).pack
        size_end = end

    def encode(offset: int, payload: bytes, publish_time_ms: int, suffix: bytes) -> bytes:
        size = len(payload)
        if not (size_start <= size < size_end and offset_start <= offset < offset_end):
            compile_head(offset, size)
        if publish_time_ms >= 4_294_967_296:
            time = pack_time(0xFD, publish_time_ms)
        else:
            time = encode_varint(publish_time_ms)
        return join((pack_head(head_constant, offset, size_tag, size), payload, time, suffix))

    return encode
