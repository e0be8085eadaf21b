"""Kafka's record batches ⇄ messages, byte for byte.

    base offset i64 · length i32 · leader epoch i32 · magic i8 · crc32c u32 · attributes i16 ·
    last offset delta i32 · base time i64 · newest time i64 · producer id i64 · producer epoch i16 ·
    base sequence i32 · count i32 · records, compressed or not

What a record has and a message has no field for is kept in attributes whose names begin with
`kafka.`, so every record comes back as it came:

    value                 payload; null: empty, and `kafka.null-value`
    key                   routing key; where it is no UTF-8: `kafka.key`, in base64
    headers               attributes; repeated, null or binary ones, and headers with names of ours:
                          all of them in `kafka.headers`, in base64
    timestamp             publish time; before 1970: 0, and `kafka.timestamp`

Messages of other doors are records by the same table read backwards. Where such an attribute is not
what this module writes, it is a header like any other.

Owns: batches of version 2, the only ones that are read and written, compression, and the table.
Does not own: which records are accepted (`produce`), frames in the log.

Everything is bounded before it is allocated: batches by their own size, what they decompress to by
`size_max`. A length field by itself reserves nothing.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import cramjam
from crc32c import crc32c
from kio.schema.errors import ErrorCode

from ister.base.limits import KIB
from ister.broker.kafka.protocol import KafkaError

NULL_VALUE: Final = "kafka.null-value"
KEY: Final = "kafka.key"
HEADERS: Final = "kafka.headers"
TIMESTAMP: Final = "kafka.timestamp"
_OURS: Final = "kafka."

NO_PRODUCER: Final = -1
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_SUMMED_FROM: Final = 21
_CRC_AT: Final = 17
_MAGIC_AT: Final = 16
_MAGIC: Final = 2
_LENGTH_AT: Final = 8
# Offset and length, which the length does not count.
_BEFORE_LENGTH: Final = 12
_COMPRESSION: Final = 0x07
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
# A record is at least its length, attributes, two deltas, two lengths and a count.
_RECORD_BYTES_MIN: Final = 7
_INT64_MIN: Final = -(1 << 63)
TIME_MAX: Final = (1 << 63) - 1
"""The latest timestamp."""

Header = tuple[bytes, bytes | None]


class Record(NamedTuple):
    """A record as Kafka's clients see it, without its offset."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: bytes
    """Encoded, with their count first; `NO_HEADERS` for none."""


class Batch(NamedTuple):
    """A record batch of a producer."""

    producer_id: int
    """-1 for a producer without idempotence."""
    producer_epoch: int
    base_sequence: int
    records: list[Record]


class Stored(NamedTuple):
    """What a message has of a record."""

    payload: bytes
    publish_time: int
    routing_key: str | None
    attributes: Mapping[str, str]


NO_HEADERS: Final = b"\0"
"""The headers of a record without any."""
_NO_ATTRIBUTES: Final[Mapping[str, str]] = {}


def _corrupt(why: str) -> KafkaError:
    return KafkaError(ErrorCode.corrupt_message, f"the record batch is damaged: {why}")


def _invalid(why: str) -> KafkaError:
    return KafkaError(ErrorCode.invalid_record, why)


# -- batches of producers -------------------------------------------------------------------


def decode_batches(data: bytes, *, size_max: int) -> list[Batch]:
    """The record batches of a produce request, one after the other.

    Args:
        data: All of them, and nothing else.
        size_max: What they may decompress to, in bytes, all together.

    Raises:
        KafkaError: They are damaged, too large, or of a kind that is not taken.
    """
    batches: list[Batch] = []
    at, left = 0, size_max
    while at < len(data):
        if len(data) - at < _HEADER.size:
            if len(data) - at > _MAGIC_AT and data[at + _MAGIC_AT] < _MAGIC:
                raise _old_format()
            raise _corrupt("it ends within its header")
        batch, end, size = _decode_batch(data, at, left)
        batches.append(batch)
        left -= size
        at = end
    return batches


def _old_format() -> KafkaError:
    return KafkaError(
        ErrorCode.unsupported_for_message_format,
        "messages in the formats before Kafka 0.11 are not taken",
    )


def _decode_batch(data: bytes, at: int, size_max: int) -> tuple[Batch, int, int]:
    """A batch, where it ends, and the size of its records."""
    (
        _,
        length,
        _,
        magic,
        crc,
        attributes,
        last_delta,
        base_time,
        _,
        producer_id,
        epoch,
        sequence,
        count,
    ) = _HEADER.unpack_from(data, at)
    if magic != _MAGIC:
        raise _old_format() if 0 <= magic < _MAGIC else _corrupt("its version is unknown")
    end = at + _BEFORE_LENGTH + length
    if length < _HEADER.size - _BEFORE_LENGTH or end > len(data):
        raise _corrupt("its length is wrong")
    if crc32c(memoryview(data)[at + _SUMMED_FROM : end]) != crc:
        raise _corrupt("its checksum is wrong")
    if attributes & _CONTROL:
        raise _invalid("control batches are written by brokers")
    if attributes & _TRANSACTIONAL:
        raise _invalid("transactions are not supported")
    if count < 1 or last_delta != count - 1:
        raise _invalid("the number of records is wrong")
    if producer_id >= 0 and (epoch < 0 or sequence < 0):
        raise _invalid("a producer's epoch or sequence is negative")
    body = _decompress(attributes & _COMPRESSION, data[at + _HEADER.size : end], size_max)
    if count > len(body) // _RECORD_BYTES_MIN:
        raise _corrupt("it has fewer records than it says")
    try:
        records = _decode_records(body, count, base_time)
    except IndexError:
        raise _corrupt("its records end too early") from None
    return Batch(producer_id, epoch, sequence, records), end, len(body)


def _decode_records(body: bytes, count: int, base_time: int) -> list[Record]:
    records: list[Record] = []
    at, size = 0, len(body)
    for number in range(count):
        # Lengths of up to 63 are one byte; the function reads all others.
        length = body[at]
        at += 1
        if length >= 0x80:
            length, at = _unsigned(body, at - 1)
        length = (length >> 1) ^ -(length & 1)
        end = at + length
        if length < _RECORD_BYTES_MIN - 1 or end > size:
            raise _corrupt("a record's length is wrong")
        delta = body[at + 1]
        at += 2
        if delta >= 0x80:
            delta, at = _unsigned(body, at - 1)
        timestamp = base_time + ((delta >> 1) ^ -(delta & 1))
        delta = body[at]
        at += 1
        if delta >= 0x80:
            delta, at = _unsigned(body, at - 1)
        if delta != number << 1:
            raise _invalid("the offsets of the records are not one after the other")
        key, at = _bytes(body, at, end)
        value, at = _bytes(body, at, end)
        headers = NO_HEADERS
        if end - at != 1 or body[at]:
            headers = body[at:end]
            _check_headers(headers)
        if not _INT64_MIN <= timestamp <= TIME_MAX:
            raise _invalid("a timestamp is out of range")
        records.append(Record(timestamp, key, value, headers))
        at = end
    if at != size:
        raise _corrupt("bytes are left over behind its records")
    return records


def _bytes(body: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    """Bytes with their length first, -1 for null."""
    length = body[at]
    at += 1
    if length >= 0x80:
        length, at = _unsigned(body, at - 1)
    length = (length >> 1) ^ -(length & 1)
    if length == -1:
        return None, at
    stop = at + length
    if length < 0 or stop > end:
        raise _corrupt("a length in a record is wrong")
    return body[at:stop], stop


def _unsigned(body: bytes, at: int) -> tuple[int, int]:
    """A varint of up to ten bytes."""
    value = shift = 0
    while shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _corrupt("a number in a record is too long")


def _check_headers(headers: bytes) -> None:
    decode_headers(headers)


def decode_headers(data: bytes) -> list[Header]:
    """Headers in the form that they have in a record.

    Raises:
        KafkaError: They are none.
    """
    found: list[Header] = []
    try:
        count, at = _unsigned(data, 0)
        count = (count >> 1) ^ -(count & 1)
        if not 0 <= count <= len(data) // 2:
            raise _corrupt("the number of headers is wrong")
        for _ in range(count):
            name, at = _bytes(data, at, len(data))
            if name is None:
                raise _corrupt("a header has no name")
            value, at = _bytes(data, at, len(data))
            found.append((name, value))
    except IndexError:
        raise _corrupt("a header ends too early") from None
    if at != len(data):
        raise _corrupt("bytes are left over behind its headers")
    return found


def encode_headers(headers: Sequence[Header]) -> bytes:
    """Headers in the form that they have in a record."""
    if not headers:
        return NO_HEADERS
    parts = [_signed(len(headers))]
    for name, value in headers:
        parts += (_signed(len(name)), name)
        parts += (_NULL,) if value is None else (_signed(len(value)), value)
    return b"".join(parts)


# -- compression ----------------------------------------------------------------------------

_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER: Final = 16
_FIRST_GUESS: Final = 8
_GUESS_BYTES_MIN: Final = 64 * KIB
_INTO: Final[dict[int, Callable[[bytes, bytearray], int]]] = {
    1: cramjam.gzip.decompress_into,
    3: cramjam.lz4.decompress_into,
    4: cramjam.zstd.decompress_into,
}
_NO_ROOM: Final = "whole buffer"


def _decompress(kind: int, data: bytes, size_max: int) -> bytes:
    """Records as they were before their compression, which are no larger than `size_max`."""
    if kind == 0:
        if len(data) > size_max:
            raise _too_large(size_max)
        return data
    if kind == 2:
        return _from_snappy(data, size_max)
    into = _INTO.get(kind)
    if into is None:
        raise KafkaError(
            ErrorCode.unsupported_compression_type, f"unknown compression {kind}: use another one"
        )
    room = min(size_max, max(_GUESS_BYTES_MIN, _FIRST_GUESS * len(data)))
    while True:
        buffer = bytearray(room)
        try:
            size = into(data, buffer)
        except cramjam.DecompressionError as error:
            if _NO_ROOM not in str(error):
                raise _corrupt("it cannot be decompressed") from None
            if room >= size_max:
                raise _too_large(size_max) from None
            room = min(size_max, 4 * room)
            continue
        return bytes(memoryview(buffer)[:size])


def _from_snappy(data: bytes, size_max: int) -> bytes:
    """Snappy: one block, or several behind Xerial's header, each with its length."""
    if not data.startswith(_XERIAL):
        return _snappy_block(data, size_max)
    blocks: list[bytes] = []
    at, left = _XERIAL_HEADER, size_max
    while at < len(data):
        if len(data) - at < 4:
            raise _corrupt("it cannot be decompressed")
        length = int.from_bytes(data[at : at + 4], "big")
        at += 4
        if not 0 < length <= len(data) - at:
            raise _corrupt("it cannot be decompressed")
        block = _snappy_block(data[at : at + length], left)
        blocks.append(block)
        left -= len(block)
        at += length
    return b"".join(blocks)


def _snappy_block(data: bytes, size_max: int) -> bytes:
    try:
        size = cramjam.snappy.decompress_raw_len(data)
        if size > size_max:
            raise _too_large(size_max)
        # One byte of a block stands for at most 64, so what is allocated is in proportion to it.
        if size > 64 * len(data):
            raise _corrupt("it cannot be decompressed")
        buffer = bytearray(size)
        if cramjam.snappy.decompress_raw_into(data, buffer) != size:
            raise _corrupt("it cannot be decompressed")
    except cramjam.DecompressionError:
        raise _corrupt("it cannot be decompressed") from None
    return bytes(buffer)


def _too_large(size_max: int) -> KafkaError:
    return KafkaError(
        ErrorCode.message_too_large,
        f"the records of a request have more than {size_max} bytes, decompressed",
    )


# -- batches for consumers ------------------------------------------------------------------


def _signed(value: int) -> bytes:
    """A varint in zigzag form."""
    if 0 <= value < _KEPT:
        return _KEPT_VARINTS[value]
    return _encode_signed(value)


def _encode_signed(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_KEPT: Final = 8192
_KEPT_VARINTS: Final = tuple(_encode_signed(value) for value in range(_KEPT))
_NULL: Final = _encode_signed(-1)


def encode_batch(numbered: Sequence[tuple[int, Record]]) -> bytes:
    """A record batch, not compressed, of records with ascending offsets; at least one."""
    base, base_time = numbered[0][0], numbered[0][1].timestamp
    newest = base_time
    signed = _signed
    parts: list[bytes] = [b""]
    for offset, (timestamp, key, value, headers) in numbered:
        newest = max(newest, timestamp)
        body = b"".join(
            (
                b"\0",
                signed(timestamp - base_time),
                signed(offset - base),
                _NULL if key is None else signed(len(key)) + key,
                _NULL if value is None else signed(len(value)),
                value or b"",
                headers,
            )
        )
        parts.append(signed(len(body)))
        parts.append(body)
    last_delta, count = numbered[-1][0] - base, len(numbered)
    length = _HEADER.size - _BEFORE_LENGTH + sum(map(len, parts))
    parts[0] = _HEADER.pack(
        base, length, -1, _MAGIC, 0, 0, last_delta, base_time, newest, NO_PRODUCER, -1, -1, count
    )
    batch = bytearray(b"".join(parts))
    struct.pack_into(">I", batch, _CRC_AT, crc32c(memoryview(batch)[_SUMMED_FROM:]))
    return bytes(batch)


# -- the table ------------------------------------------------------------------------------


def to_stored(record: Record) -> Stored:
    """A record as a message has it."""
    timestamp, key, value, headers = record
    if timestamp >= 0 and value is not None and headers == NO_HEADERS:
        # The usual case.
        if key is None:
            return Stored(value, timestamp, None, _NO_ATTRIBUTES)
        try:
            return Stored(value, timestamp, key.decode(), _NO_ATTRIBUTES)
        except UnicodeDecodeError:
            pass
    attributes = {} if headers == NO_HEADERS else _attributes_of(headers)
    routing_key: str | None = None
    if key is not None:
        try:
            routing_key = key.decode()
        except UnicodeDecodeError:
            attributes[KEY] = base64.b64encode(key).decode()
    if value is None:
        attributes[NULL_VALUE] = "1"
    if timestamp < 0:
        attributes[TIMESTAMP] = str(timestamp)
    return Stored(value or b"", max(0, timestamp), routing_key, attributes)


def _attributes_of(headers: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        for name, value in decode_headers(headers):
            text = name.decode()
            if value is None or text in found or text.startswith(_OURS):
                break
            found[text] = value.decode()
        else:
            # Others than the shortest form of a number could not be told from it.
            if encode_headers([(k.encode(), v.encode()) for k, v in found.items()]) == headers:
                return found
    except UnicodeDecodeError:
        pass
    return {HEADERS: base64.b64encode(headers).decode()}


def to_record(stored: Stored) -> Record:
    """A message as a record."""
    payload, publish_time, routing_key, attributes = stored
    key = None if routing_key is None else routing_key.encode()
    timestamp = min(publish_time, TIME_MAX)
    if not attributes:
        return Record(timestamp, key, payload, NO_HEADERS)
    left = dict(attributes)
    value: bytes | None = payload
    if not payload and left.get(NULL_VALUE) == "1":
        del left[NULL_VALUE]
        value = None
    if key is None and (found := _from_base64(left.get(KEY))) is not None:
        del left[KEY]
        key = found
    if publish_time == 0 and (before := _negative(left.get(TIMESTAMP))) is not None:
        del left[TIMESTAMP]
        timestamp = before
    encoded = _headers_in(left)
    if encoded is not None:
        del left[HEADERS]
        if left:
            encoded = encode_headers([*decode_headers(encoded), *_headers_of(left.items())])
        return Record(timestamp, key, value, encoded)
    return Record(timestamp, key, value, encode_headers(_headers_of(left.items())))


def _headers_of(attributes: Iterable[tuple[str, str]]) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in attributes]


def _headers_in(attributes: Mapping[str, str]) -> bytes | None:
    encoded = _from_base64(attributes.get(HEADERS))
    if encoded is None:
        return None
    try:
        decode_headers(encoded)
    except KafkaError:
        return None
    return encoded


def _from_base64(text: str | None) -> bytes | None:
    """The bytes of a text that `b64encode` has written."""
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _negative(text: str | None) -> int | None:
    """A negative number that `str` has written and that fits into 64 bits."""
    if text is None or not (2 <= len(text) <= 20 and text[0] == "-" and text[1:].isascii()):
        return None
    if not text[1:].isdigit():
        return None
    number = int(text)
    return number if _INT64_MIN <= number < 0 and str(number) == text else None
