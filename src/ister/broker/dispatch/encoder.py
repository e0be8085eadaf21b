"""Encodes stored bodies as Danube's clients get them, without a message object in between.

    body (bincode)  ─ split ─►  parts ─ join ─►  danube.StreamMessage (protobuf)

The result is what protobuf would make of the same fields; `encode` does that, more slowly, and
defines which fields these are. The topic is the name that the client subscribed to, which it uses
when it acknowledges; the broker's address contains the receipt, which the client sends back.

Owns: the bytes of a delivered message. Does not own: the parts of a body (`ister.format`), receipts
(`ister.subscription.receipts`). What repeats from message to message is encoded once and looked up
by its stored bytes; these caches are bounded.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from ister.base.limits import KIB
from ister.base.model import Codec, StreamMessage
from ister.broker.dispatch.consumer_ids import ConsumerIdentity
from ister.errors import CorruptDataError
from ister.format.message import decode_identity, decode_suffix, split
from ister.subscription.receipts import Receipts
from ister.topic.message import Message, stored_body
from ister.wire import danube

_KEY_CHARACTERS_MAX: Final = 256
_TAILS_MAX: Final = 4096
_TAIL_BYTES_MAX: Final = 512
_IDENTITIES_MAX: Final = 64
_HIGH_PARTS_MAX: Final = 4096
# Larger payloads are copied once, smaller ones twice: the second copy costs less than a view.
_VIEWED_BYTES: Final = 16 * KIB
# The receipt in hexadecimal digits.
_TOKEN_BYTES: Final = 16
_OFFSET_BYTES_MAX: Final = 11

# Fields of danube.StreamMessage and danube.MsgID: number and wire type.
_REQUEST_ID, _MSG_ID, _PAYLOAD, _PUBLISH_TIME = b"\x08", b"\x12", b"\x1a", b"\x20"
_PRODUCER_NAME, _SUBSCRIPTION_NAME, _ATTRIBUTES = b"\x2a", b"\x32", b"\x3a"
_SCHEMA_ID, _SCHEMA_VERSION, _ROUTING_KEY = b"\x40", b"\x48", b"\x52"
_PRODUCER_ID, _TOPIC_NAME, _BROKER_ADDR, _TOPIC_OFFSET = b"\x08", b"\x12", b"\x1a", b"\x28"
_ENTRY_KEY, _ENTRY_VALUE = b"\x0a", b"\x12"

_TWO_BYTES: Final = Struct("<H").pack
_high_parts: Final[dict[int, bytes]] = {}


def varint(value: int) -> bytes:
    """Encodes an unsigned integer as protobuf does."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return _TWO_BYTES(value & 0x7F | 0x80 | (value & 0x3F80) << 1)
    # Numbers that follow each other (offsets, times, request ids) share all but the first bytes.
    high = value >> 14
    rest = _high_parts.get(high)
    if rest is None:
        if len(_high_parts) >= _HIGH_PARTS_MAX:
            _high_parts.clear()
        rest = _high_parts[high] = varint(high)
    return _TWO_BYTES(value & 0x7F | 0x8080 | (value & 0x3F80) << 1) + rest


def encode_answer(request_id: int) -> bytes:
    """Encodes a danube.MessageResponse or danube.AckResponse: both have only this field."""
    return _REQUEST_ID + varint(request_id) if request_id else b""


def _text_field(tag: bytes, text: str) -> bytes:
    data = text.encode()
    return tag + varint(len(data)) + data


class _Tail(NamedTuple):
    """The encoded fields behind the publish time, without the subscription's name."""

    name: bytes
    """The producer's name, which comes before the subscription's."""
    rest: bytes
    """The fields after the subscription's name."""
    key: str
    """The message's key for key_shared."""


_tails: Final[dict[bytes, _Tail]] = {}
_tails_fixint: Final[dict[bytes, _Tail]] = {}


def _tail_of(suffix: bytes, codec: Codec) -> _Tail:
    """Returns the encoded fields behind the publish time, from the cache if they are there."""
    known = _tails if codec is Codec.BINCODE2 else _tails_fixint
    found = known.get(suffix)
    if found is None:
        found = _make_tail(suffix, codec)
        if len(suffix) <= _TAIL_BYTES_MAX:
            if len(known) >= _TAILS_MAX:
                known.clear()
            known[suffix] = found
    return found


def _make_tail(suffix: bytes, codec: Codec) -> _Tail:
    fields = decode_suffix(suffix, codec)
    name = fields.producer_name
    parts: list[bytes] = []
    for key, value in fields.attributes.items():
        entry = _text_field(_ENTRY_KEY, key) + _text_field(_ENTRY_VALUE, value)
        parts += (_ATTRIBUTES, varint(len(entry)), entry)
    if fields.schema_id is not None:
        parts += (_SCHEMA_ID, varint(fields.schema_id))
    if fields.schema_version is not None:
        parts += (_SCHEMA_VERSION, varint(fields.schema_version))
    if fields.routing_key is not None:
        parts.append(_text_field(_ROUTING_KEY, fields.routing_key))
    return _Tail(
        _text_field(_PRODUCER_NAME, name) if name else b"",
        b"".join(parts),
        (fields.routing_key or name)[:_KEY_CHARACTERS_MAX],
    )


def key_of(message: Message) -> str:
    """Returns the key of a message for key_shared; "" if its body cannot be decoded.

    Cut to `_KEY_CHARACTERS_MAX`. Filters match every character of it on the loop: 64 filters and a
    key of 1 MiB took 18 seconds.
    """
    stored = stored_body(message)
    try:
        if stored is None:
            return key_of_record(message.record)
        buffer, start, end, codec = stored
        *_, suffix_at = split(buffer, start, end, codec)
        return _tail_of(buffer[suffix_at:end], codec).key
    except CorruptDataError:
        return ""  # its delivery reports the damage


def key_of_record(record: StreamMessage) -> str:
    """Like `key_of`, for a decoded record."""
    return (record.routing_key or record.producer_name)[:_KEY_CHARACTERS_MAX]


class DeliveredEncoder:
    """Encodes stored messages for one consumer's stream. Not thread-safe."""

    def __init__(self, consumer: ConsumerIdentity, receipts: Receipts) -> None:
        self._consumer = consumer
        self._stamp = receipts.hexadecimal
        name = consumer.subscription
        self._subscription = _text_field(_SUBSCRIPTION_NAME, name) if name else b""
        self._heads: dict[tuple[bytes, Codec], list[bytes]] = {}
        # Of the last message: the next one is usually of the same producer.
        self._identity = b""
        self._codec: Codec | None = None
        self._head: list[bytes] = []

    def encode(self, message: Message, attempt: int) -> tuple[bytes, int] | None:
        """Returns a message as its consumer gets it, and the size of its payload.

        None if the caller has to decode it: its body is damaged, or was replaced by its fields.
        """
        stored = stored_body(message)
        if stored is None:
            return None
        buffer, start, end, codec = stored
        try:
            request_id, identity, at, payload_end, publish_time, suffix_at = split(
                buffer, start, end, codec, self._identity
            )
            if identity is not self._identity or codec is not self._codec:
                self._use_identity(identity, codec)
            tail = _tail_of(buffer[suffix_at:end], codec)
        except CorruptDataError:
            return None
        number = message.offset
        offset = _TOPIC_OFFSET + varint(number) if number else b""
        size = payload_end - at
        payload: bytes | memoryview
        if size < _VIEWED_BYTES:
            payload = buffer[at:payload_end]
        else:
            payload = memoryview(buffer)[at:payload_end]
        data = b"".join(
            (
                _REQUEST_ID + varint(request_id) if request_id else b"",
                self._head[len(offset)],
                self._stamp(self._consumer.id, number, attempt),
                offset,
                _PAYLOAD + varint(size) if size else b"",
                payload,
                _PUBLISH_TIME + varint(publish_time) if publish_time else b"",
                tail.name,
                self._subscription,
                tail.rest,
            )
        )
        return data, size

    def _use_identity(self, identity: bytes, codec: Codec) -> None:
        """Sets the identity of the message, and with it what comes before the receipt."""
        heads = self._heads.get((identity, codec))
        if heads is None:
            if len(self._heads) >= _IDENTITIES_MAX:
                self._heads.clear()
            heads = self._heads[identity, codec] = self._make_heads(identity, codec)
        self._identity, self._codec, self._head = identity, codec, heads

    def _make_heads(self, identity: bytes, codec: Codec) -> list[bytes]:
        """Encodes a message id up to its receipt, for each size of the offset behind that."""
        known = decode_identity(identity, codec)
        # As `Receipts.stamp`, without the token.
        address = f"{known.broker_addr}#{self._consumer.id:x}.".encode()
        fields = (
            (_PRODUCER_ID + varint(known.producer_id) if known.producer_id else b"")
            + (_text_field(_TOPIC_NAME, self._consumer.topic) if self._consumer.topic else b"")
            + (_BROKER_ADDR + varint(len(address) + _TOKEN_BYTES) + address)
        )
        size = len(fields) + _TOKEN_BYTES
        return [
            _MSG_ID + varint(size + offset_bytes) + fields
            for offset_bytes in range(_OFFSET_BYTES_MAX + 1)
        ]


def encode(
    record: StreamMessage,
    offset: int,
    attempt: int,
    consumer: ConsumerIdentity,
    receipts: Receipts | None,
) -> bytes:
    """Encodes a decoded message as its consumer gets it; without a log there is no receipt."""
    known = record.msg_id
    address = known.broker_addr
    if receipts is not None:
        address = receipts.stamp(address, consumer.id, offset, attempt)
    message = danube.StreamMessage(
        request_id=record.request_id,
        msg_id=danube.MsgID(
            producer_id=known.producer_id,
            topic_name=consumer.topic,
            broker_addr=address,
            topic_offset=offset,
        ),
        payload=record.payload,
        publish_time=record.publish_time,
        producer_name=record.producer_name,
        subscription_name=consumer.subscription,
        schema_id=record.schema_id,
        schema_version=record.schema_version,
        routing_key=record.routing_key,
    )
    if record.attributes:
        message.attributes.update(record.attributes)
    data: bytes = message.SerializeToString()
    return data
