"""The loops of `ister.format.columnar`, compiled by `ister.kernels`; numba is an extra.

Nothing else imports them. They are in a separate file so that the cache on disk, which depends on
this file's content, stays valid when other code changes. Written for the compiler: flat, 64-bit
signed integers, raw addresses, no objects. Each loop takes one array of integers with its arguments
and results, at the indexes named below; so there is one signature to compile, wherever the bytes
are in memory.

Every length is checked against the end of what it is a length in before it is used. Unsigned
64-bit values keep their bits: a negative length is one of 2^63 or more, and refused.

They stop at the first byte that is not what it should be; why is found out in Python, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba
import numpy as np
from isal import isal_zlib
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ister.format.frame import encode_frame
from ister.format.message import encode_message
from ister.model import Codec, StreamMessage

__all__ = [
    "ATTRIBUTES",
    "BASE",
    "BODY_BYTES_MAX",
    "BODY_IS_BAD",
    "BROKERS",
    "COLUMN_FIELDS",
    "CROWDED",
    "CROWD_MIN",
    "DATA",
    "DATA_BYTES",
    "DATA_BYTES_MAX",
    "DONE",
    "END_OFFSET",
    "ENVELOPE_BYTES_MAX",
    "EXACT_TIMES",
    "FIELDS",
    "IS_VARINT",
    "KEYS",
    "LOOPS",
    "MESSAGE_OFFSETS",
    "MESSAGE_TOPICS",
    "MIDDLE",
    "MIDDLE_BYTES",
    "NAMES",
    "NEEDS_ROOM",
    "NUMBERS",
    "OFFSET",
    "OFFSETS",
    "PAYLOADS",
    "PAYLOAD_BYTES_MAX",
    "PERMITTED",
    "POSITION",
    "PRODUCER_IDS",
    "REQUEST_ID",
    "REQUEST_IDS",
    "ROOM",
    "ROUTING_KEYS",
    "ROWS",
    "ROWS_MAX",
    "SCHEMA_IDS",
    "SCHEMA_VERSIONS",
    "SEGMENT_BYTES",
    "SEGMENT_IS_FULL",
    "SIZE",
    "STARTS",
    "SUBSCRIPTIONS",
    "TIMES",
    "TIME_DEFAULT",
    "TIME_DIVISOR",
    "TIME_LAST",
    "TIME_MULTIPLIER",
    "TIME_RAW_MAX",
    "TOPIC",
    "TOPIC_BYTES",
    "VALID",
    "VALIDITY",
    "VALIDITY_START",
    "VALUES",
    "decode",
    "encode",
    "new_fields",
    "prove",
]

if sys.maxsize < 1 << 32 or sys.byteorder != "little":  # pragma: no cover - no such machine here
    raise ImportError("the compiled columnar loops need a little-endian machine of 64 bits")

# -- the fields of the array ----------------------------------------------------------------

# Of both loops.
BASE: Final = 0
"""The address of the frames: where they are read, or written to."""
SIZE: Final = 1
"""How many bytes there are from `BASE` on."""
POSITION: Final = 2
"""Decoding: the next frame's position, moved over the frames taken. Encoding: bytes written."""
OFFSET: Final = 3
"""The next frame's offset, moved over the frames taken or written."""
ROWS: Final = 4
"""How many rows there are by now, or have been written."""
ROWS_MAX: Final = 5
"""Decoding: how many there is room for. Encoding: how many there are to write."""
IS_VARINT: Final = 6
"""1 for bincode2, 0 for bincode1."""
BODY_BYTES_MAX: Final = 7
PERMITTED: Final = 8
"""The offset of the one message that may be crowded: its attributes have been looked at."""
ROOM: Final = 9
"""With `NEEDS_ROOM`, decoding: the column, or -1 for rows. Encoding: how many bytes."""

# Of decoding.
END_OFFSET: Final = 10

# Of encoding.
REQUEST_ID: Final = 11
MIDDLE: Final = 12
"""The address of what lies between request id and offset, the same for all messages."""
MIDDLE_BYTES: Final = 13
SEGMENT_BYTES: Final = 14
PAYLOAD_BYTES_MAX: Final = 15
ENVELOPE_BYTES_MAX: Final = 16
TIME_DEFAULT: Final = 17
TIME_MULTIPLIER: Final = 18
TIME_DIVISOR: Final = 19
TIME_RAW_MAX: Final = 20
"""The largest publish time, in its column's unit."""
TIME_LAST: Final = 21
"""The largest publish time written, in milliseconds."""
TOPIC: Final = 22
"""The address of the topic's name. (Of both loops.)"""
TOPIC_BYTES: Final = 23
STARTS: Final = 24
"""The address of where each frame begins; 0 if nobody wants to know."""

# Columns, a block of fields each. A column whose OFFSETS is 0 is not wanted, or not there.
COLUMN_FIELDS: Final = 6
OFFSETS: Final = 0
"""The address of the values; of columns without a fixed width, where each value begins in DATA."""
DATA: Final = 1
DATA_BYTES: Final = 2
"""How much of DATA is filled; of ATTRIBUTES, how many entries there are."""
DATA_BYTES_MAX: Final = 3
VALIDITY: Final = 4
"""The address of the bits that say which values are not null; 0 for all."""
VALID: Final = 5
"""Decoding: how many values are not null."""
VALIDITY_START: Final = 5
"""Encoding: the bit of the first row."""

_HEADER_FIELDS: Final = 25
TIMES: Final = _HEADER_FIELDS
NAMES: Final = TIMES + COLUMN_FIELDS
PAYLOADS: Final = NAMES + COLUMN_FIELDS
ATTRIBUTES: Final = PAYLOADS + COLUMN_FIELDS
KEYS: Final = ATTRIBUTES + COLUMN_FIELDS
VALUES: Final = KEYS + COLUMN_FIELDS
ROUTING_KEYS: Final = VALUES + COLUMN_FIELDS
SCHEMA_IDS: Final = ROUTING_KEYS + COLUMN_FIELDS
SCHEMA_VERSIONS: Final = SCHEMA_IDS + COLUMN_FIELDS
REQUEST_IDS: Final = SCHEMA_VERSIONS + COLUMN_FIELDS
PRODUCER_IDS: Final = REQUEST_IDS + COLUMN_FIELDS
NUMBERS: Final = PRODUCER_IDS + COLUMN_FIELDS
"""The column of offsets. Encoding: there if messages are restored as they once were."""
MESSAGE_TOPICS: Final = NUMBERS + COLUMN_FIELDS
"""Null where a message names the topic that it is in."""
MESSAGE_OFFSETS: Final = MESSAGE_TOPICS + COLUMN_FIELDS
"""Null where a message has the offset of its frame."""
BROKERS: Final = MESSAGE_OFFSETS + COLUMN_FIELDS
"""Null where it is empty."""
SUBSCRIPTIONS: Final = BROKERS + COLUMN_FIELDS
EXACT_TIMES: Final = SUBSCRIPTIONS + COLUMN_FIELDS
"""Null where the publish time is one that a calendar has."""
CROWD_MIN: Final = 65
"""With so many attributes comparing each with each takes longer than asking Python."""
# Address and size of each key of one message.
_SCRATCH: Final = EXACT_TIMES + COLUMN_FIELDS
FIELDS: Final = _SCRATCH + 2 * CROWD_MIN
"""How many there are."""

# What a loop returns: why it stopped.
DONE: Final = 0
"""At the end of what it was to do, or at a frame that is not whole or not good."""
BODY_IS_BAD: Final = 1
"""Before a good frame whose body is no message, or before a row that cannot be one."""
NEEDS_ROOM: Final = 2
"""Before a row that there is no room for."""
CROWDED: Final = 3
"""Before a message with `CROWD_MIN` attributes or more: whether one is there twice is not known."""
SEGMENT_IS_FULL: Final = 4

_NOT_ASCII: Final = -0x7F7F7F7F7F7F7F80
"""0x8080808080808080: the high bit of each of eight bytes."""
_TIME_MS_MAX: Final = 253_402_300_799_999
_TIME_US_CLAMPED: Final = 253_402_300_799_999_999
_U32_END: Final = 1 << 32

_Function = TypeVar("_Function", bound=Callable[..., Any])

# -- what the machine offers ----------------------------------------------------------------

# isal's wheel exports its crc32 as a plain C function, which compiled code can call.
binding.load_library_permanently(isal_zlib.__file__)
_crc32: Any = types.ExternalFunction(
    "crc32_gzip_refl", types.uint32(types.uint32, types.int64, types.int64)
)
_memcpy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_memcmp: Any = types.ExternalFunction("memcmp", types.int32(types.int64, types.int64, types.int64))


def _loader(bits: int) -> Any:  # noqa: ANN401 - a function of compiled code
    """Makes a load of an unsigned integer from an address that need not be aligned."""

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:  # noqa: ANN401
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            word = ir.IntType(bits)
            value = builder.load(builder.inttoptr(arguments[0], word.as_pointer()))
            value.align = 1
            return builder.zext(value, ir.IntType(64)) if bits < 64 else value

        return types.int64(types.int64), emit

    return load


def _storer(bits: int) -> Any:  # noqa: ANN401 - a function of compiled code
    """Makes a store of an integer's low bits to an address that need not be aligned."""

    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ANN401
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            word = ir.IntType(bits)
            low = builder.trunc(arguments[1], word) if bits < 64 else arguments[1]
            builder.store(low, builder.inttoptr(arguments[0], word.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return store


_load8, _load16, _load32, _load64 = _loader(8), _loader(16), _loader(32), _loader(64)
_store8, _store16, _store32, _store64 = _storer(8), _storer(16), _storer(32), _storer(64)


def _part(function: _Function) -> _Function:
    """Makes a function a part of those that are compiled."""
    part: _Function = numba.njit(function)
    return part


def new_fields() -> Any:  # noqa: ANN401 - an array of integers
    """An array for one of the loops, all zero."""
    return np.zeros(FIELDS, np.int64)


# -- parts of both loops --------------------------------------------------------------------


@_part
def _copy(target: int, source: int, size: int, target_end: int, source_end: int) -> None:
    """Copies `size` bytes; up to the two ends it may copy more than that."""
    if size > 16 or target_end - target < 16 or source_end - source < 16:
        _memcpy(target, source, size)
    elif size > 0:
        # Two moves that need no call; what they put behind the value is overwritten by the next.
        first = _load64(source)
        second = _load64(source + 8)
        _store64(target, first)
        _store64(target + 8, second)


@_part
def _is_utf8(at: int, size: int) -> bool:
    """Whether Python would decode these bytes as UTF-8."""
    end = at + size
    while at < end:
        byte = _load8(at)
        at += 1
        if byte < 0x80:
            continue
        low, high = 0x80, 0xBF
        if byte < 0xC2:
            return False
        if byte < 0xE0:
            more = 1
        elif byte < 0xF0:
            more = 2
            # No longer forms than needed, and no surrogates.
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        elif byte < 0xF5:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        else:
            return False
        if end - at < more:
            return False
        byte = _load8(at)
        if byte < low or byte > high:
            return False
        for _ in range(more - 1):
            at += 1
            if _load8(at) & 0xC0 != 0x80:
                return False
        at += 1
    return True


@_part
def _is_ascii(at: int, size: int, limit: int) -> bool:
    """Whether no byte has its high bit set; may look at bytes up to `limit`."""
    if size >= 8:
        last = at + size - 8
        seen = _load64(last)
        while at < last:
            seen |= _load64(at)
            at += 8
        return bool(seen & _NOT_ASCII == 0)
    if size == 0:
        return True
    if limit - at >= 8:
        return bool((_load64(at) << (64 - 8 * size)) & _NOT_ASCII == 0)
    seen = 0
    for byte in range(size):
        seen |= _load8(at + byte)
    return bool(seen < 0x80)


@_part
def _integer(at: int, end: int, is_varint: int) -> tuple[int, int]:
    """The integer at an address, and the address behind it, 0 if there is none."""
    if is_varint:
        if at >= end:
            return 0, 0
        tag = _load8(at)
        at += 1
        if tag < 251:
            return tag, at
        if tag == 251:
            if end - at < 2:
                return 0, 0
            value = _load16(at)
            return value, (at + 2 if value >= 251 else 0)
        if tag == 252:
            if end - at < 4:
                return 0, 0
            value = _load32(at)
            return value, (at + 4 if value >= 1 << 16 else 0)
        if tag > 253 or end - at < 8:
            return 0, 0
        value = _load64(at)
        return value, (at + 8 if value < 0 or value >= _U32_END else 0)
    if end - at < 8:
        return 0, 0
    return _load64(at), at + 8


@_part
def _blob(at: int, end: int, is_varint: int) -> tuple[int, int]:
    """The address of a blob's first byte, and the one behind its last, 0 if there is none."""
    size, start = _integer(at, end, is_varint)
    if start == 0 or size < 0 or size > end - start:
        return 0, 0
    return start, start + size


@_part
def _text(at: int, end: int, is_varint: int, limit: int) -> tuple[int, int]:
    """As `_blob`, and it has to be UTF-8; may look at bytes up to `limit`."""
    start, stop = _blob(at, end, is_varint)
    if stop == 0 or not (_is_ascii(start, stop - start, limit) or _is_utf8(start, stop - start)):
        return 0, 0
    return start, stop


@_part
def _is_known(scratch: int, count: int, key: int, size: int) -> bool:
    """Whether a key is one of the `count` before it; remembers it otherwise."""
    for other in range(count):
        if (
            _load64(scratch + 16 * other + 8) == size
            and _memcmp(_load64(scratch + 16 * other), key, size) == 0
        ):
            return True
    _store64(scratch + 16 * count, key)
    _store64(scratch + 16 * count + 8, size)
    return False


@_part
def _mark(bits: int, row: int, is_valid: int) -> None:
    """Says whether a row is not null; rows are marked in order, so that each byte begins at 0."""
    at = bits + (row >> 3)
    if row & 7 == 0:
        _store8(at, is_valid)
    else:
        _store8(at, _load8(at) | (is_valid << (row & 7)))


# -- frames to columns ----------------------------------------------------------------------


def decode(fields: Any) -> int:  # noqa: ANN401 - an array of integers
    """Takes the frames from `POSITION` on into the columns; returns why it stopped.

    A row is counted when all of it is there: one that turns out bad, or too large for the room
    left, leaves no trace.
    """
    base = fields[BASE]
    limit = base + fields[SIZE]
    at = base + fields[POSITION]
    offset = fields[OFFSET]
    end_offset = fields[END_OFFSET]
    is_varint = fields[IS_VARINT]
    body_max = fields[BODY_BYTES_MAX]
    scratch = fields.ctypes.data + 8 * _SCRATCH
    row = fields[ROWS]
    rows_max = fields[ROWS_MAX]
    numbers = fields[NUMBERS]
    times = fields[TIMES]
    request_ids = fields[REQUEST_IDS]
    producer_ids = fields[PRODUCER_IDS]
    name_offsets, name_data = fields[NAMES + OFFSETS], fields[NAMES + DATA]
    name_bytes, name_max = fields[NAMES + DATA_BYTES], fields[NAMES + DATA_BYTES_MAX]
    payload_offsets, payload_data = fields[PAYLOADS + OFFSETS], fields[PAYLOADS + DATA]
    payload_bytes, payload_max = fields[PAYLOADS + DATA_BYTES], fields[PAYLOADS + DATA_BYTES_MAX]
    attribute_offsets = fields[ATTRIBUTES + OFFSETS]
    entries, entries_max = fields[ATTRIBUTES + DATA_BYTES], fields[ATTRIBUTES + DATA_BYTES_MAX]
    key_offsets, key_data = fields[KEYS + OFFSETS], fields[KEYS + DATA]
    key_bytes, key_max = fields[KEYS + DATA_BYTES], fields[KEYS + DATA_BYTES_MAX]
    value_offsets, value_data = fields[VALUES + OFFSETS], fields[VALUES + DATA]
    value_bytes, value_max = fields[VALUES + DATA_BYTES], fields[VALUES + DATA_BYTES_MAX]
    route_offsets, route_data = fields[ROUTING_KEYS + OFFSETS], fields[ROUTING_KEYS + DATA]
    route_bytes = fields[ROUTING_KEYS + DATA_BYTES]
    route_max = fields[ROUTING_KEYS + DATA_BYTES_MAX]
    route_bits, routes = fields[ROUTING_KEYS + VALIDITY], fields[ROUTING_KEYS + VALID]
    schema_ids, schema_id_bits = fields[SCHEMA_IDS + OFFSETS], fields[SCHEMA_IDS + VALIDITY]
    schemas = fields[SCHEMA_IDS + VALID]
    versions, version_bits = (
        fields[SCHEMA_VERSIONS + OFFSETS],
        fields[SCHEMA_VERSIONS + VALIDITY],
    )
    versioned = fields[SCHEMA_VERSIONS + VALID]
    own_topic, own_topic_bytes = fields[TOPIC], fields[TOPIC_BYTES]
    topic_offsets, topic_data = fields[MESSAGE_TOPICS + OFFSETS], fields[MESSAGE_TOPICS + DATA]
    topic_bytes = fields[MESSAGE_TOPICS + DATA_BYTES]
    topic_max = fields[MESSAGE_TOPICS + DATA_BYTES_MAX]
    topic_bits, topics = fields[MESSAGE_TOPICS + VALIDITY], fields[MESSAGE_TOPICS + VALID]
    broker_offsets, broker_data = fields[BROKERS + OFFSETS], fields[BROKERS + DATA]
    broker_bytes, broker_max = fields[BROKERS + DATA_BYTES], fields[BROKERS + DATA_BYTES_MAX]
    broker_bits, brokers = fields[BROKERS + VALIDITY], fields[BROKERS + VALID]
    member_offsets, member_data = fields[SUBSCRIPTIONS + OFFSETS], fields[SUBSCRIPTIONS + DATA]
    member_bytes = fields[SUBSCRIPTIONS + DATA_BYTES]
    member_max = fields[SUBSCRIPTIONS + DATA_BYTES_MAX]
    member_bits, members = fields[SUBSCRIPTIONS + VALIDITY], fields[SUBSCRIPTIONS + VALID]
    own_offsets, own_offset_bits = (
        fields[MESSAGE_OFFSETS + OFFSETS],
        fields[MESSAGE_OFFSETS + VALIDITY],
    )
    own_offset_count = fields[MESSAGE_OFFSETS + VALID]
    exact_times, exact_time_bits = fields[EXACT_TIMES + OFFSETS], fields[EXACT_TIMES + VALIDITY]
    exact_time_count = fields[EXACT_TIMES + VALID]
    if row == 0:
        for column in (
            NAMES,
            PAYLOADS,
            ATTRIBUTES,
            KEYS,
            VALUES,
            ROUTING_KEYS,
            MESSAGE_TOPICS,
            BROKERS,
            SUBSCRIPTIONS,
        ):
            if fields[column]:
                _store32(fields[column], 0)
    status = DONE
    while offset < end_offset and limit - at >= 16:
        body = at + 16
        length = _load32(at + 8)
        if (
            _load64(at) != offset
            or length == 0
            or length > body_max
            or length > limit - body
            or np.int64(_crc32(np.uint32(0), body, length)) != _load32(at + 12)
        ):
            break
        if row >= rows_max:
            status = NEEDS_ROOM
            fields[ROOM] = -1
            break
        # From here on: a bad body, unless it is walked to its end.
        status = BODY_IS_BAD
        end = body + length
        request_id, here = _integer(body, end, is_varint)
        if here == 0:
            break
        producer_id, here = _integer(here, end, is_varint)
        if here == 0:
            break
        topic, topic_end = _text(here, end, is_varint, limit)
        if topic_end == 0:
            break
        broker, broker_end = _text(topic_end, end, is_varint, limit)
        if broker_end == 0:
            break
        own_offset, here = _integer(broker_end, end, is_varint)
        if here == 0:
            break
        payload, payload_end = _blob(here, end, is_varint)
        if payload_end == 0:
            break
        time, here = _integer(payload_end, end, is_varint)
        if here == 0:
            break
        name, name_end = _text(here, end, is_varint, limit)
        if name_end == 0 or name_end >= end:
            break
        here = name_end + 1
        is_some = _load8(name_end)
        if is_some > 1:
            break
        member = member_end = here
        if is_some:
            member, member_end = _text(here, end, is_varint, limit)
            if member_end == 0:
                break
            here = member_end
        count, here = _integer(here, end, is_varint)
        # An attribute has two lengths, so that a count that cannot be is seen at once.
        if here == 0 or count < 0 or count > (end - here) // (2 if is_varint else 16):
            break
        if count >= CROWD_MIN and fields[PERMITTED] != offset:
            status = CROWDED
            break
        if attribute_offsets and count > entries_max - entries:
            status = NEEDS_ROOM
            fields[ROOM] = ATTRIBUTES
            break
        new_key_bytes, new_value_bytes = key_bytes, value_bytes
        entry = 0
        while entry < count:
            key, key_end = _text(here, end, is_varint, limit)
            if key_end == 0:
                break
            if count < CROWD_MIN and _is_known(scratch, entry, key, key_end - key):
                break
            value, value_end = _text(key_end, end, is_varint, limit)
            if value_end == 0:
                break
            here = value_end
            if attribute_offsets:
                if key_end - key > key_max - new_key_bytes:
                    status = NEEDS_ROOM
                    fields[ROOM] = KEYS
                    break
                if value_end - value > value_max - new_value_bytes:
                    status = NEEDS_ROOM
                    fields[ROOM] = VALUES
                    break
                _copy(key_data + new_key_bytes, key, key_end - key, key_data + key_max, limit)
                _copy(
                    value_data + new_value_bytes,
                    value,
                    value_end - value,
                    value_data + value_max,
                    limit,
                )
                new_key_bytes += key_end - key
                new_value_bytes += value_end - value
                _store32(key_offsets + 4 * (entries + entry + 1), new_key_bytes)
                _store32(value_offsets + 4 * (entries + entry + 1), new_value_bytes)
            entry += 1
        if entry < count:
            break
        schema_id = schema_version = has_schema = has_version = has_route = 0
        route = route_end = here
        if is_varint:
            if here >= end:
                break
            has_schema = _load8(here)
            here += 1
            if has_schema > 1:
                break
            if has_schema:
                schema_id, here = _integer(here, end, is_varint)
                if here == 0:
                    break
            if here >= end:
                break
            has_version = _load8(here)
            here += 1
            if has_version > 1:
                break
            if has_version:
                schema_version, here = _integer(here, end, is_varint)
                if here == 0 or schema_version < 0 or schema_version >= _U32_END:
                    break
            if here >= end:
                break
            has_route = _load8(here)
            here += 1
            if has_route > 1:
                break
            route = route_end = here
            if has_route:
                route, route_end = _text(here, end, is_varint, limit)
                if route_end == 0:
                    break
            here = route_end
        if here != end:
            break
        # It is a message. Room first, so that nothing is half written.
        status = NEEDS_ROOM
        if name_offsets and name_end - name > name_max - name_bytes:
            fields[ROOM] = NAMES
            break
        if payload_offsets and payload_end - payload > payload_max - payload_bytes:
            fields[ROOM] = PAYLOADS
            break
        if route_offsets and route_end - route > route_max - route_bytes:
            fields[ROOM] = ROUTING_KEYS
            break
        if topic_offsets and topic_end - topic > topic_max - topic_bytes:
            fields[ROOM] = MESSAGE_TOPICS
            break
        if broker_offsets and broker_end - broker > broker_max - broker_bytes:
            fields[ROOM] = BROKERS
            break
        if member_offsets and member_end - member > member_max - member_bytes:
            fields[ROOM] = SUBSCRIPTIONS
            break
        status = DONE
        if numbers:
            _store64(numbers + 8 * row, offset)
        if times:
            is_of_a_calendar = 0 <= time <= _TIME_MS_MAX
            _store64(times + 8 * row, time * 1000 if is_of_a_calendar else _TIME_US_CLAMPED)
        if name_offsets:
            _copy(name_data + name_bytes, name, name_end - name, name_data + name_max, limit)
            name_bytes += name_end - name
            _store32(name_offsets + 4 * (row + 1), name_bytes)
        if payload_offsets:
            _copy(
                payload_data + payload_bytes,
                payload,
                payload_end - payload,
                payload_data + payload_max,
                limit,
            )
            payload_bytes += payload_end - payload
            _store32(payload_offsets + 4 * (row + 1), payload_bytes)
        if attribute_offsets:
            entries += count
            key_bytes, value_bytes = new_key_bytes, new_value_bytes
            _store32(attribute_offsets + 4 * (row + 1), entries)
        if route_offsets:
            _copy(route_data + route_bytes, route, route_end - route, route_data + route_max, limit)
            route_bytes += route_end - route
            _store32(route_offsets + 4 * (row + 1), route_bytes)
            _mark(route_bits, row, has_route)
            routes += has_route
        if schema_ids:
            _store64(schema_ids + 8 * row, schema_id)
            _mark(schema_id_bits, row, has_schema)
            schemas += has_schema
        if versions:
            _store32(versions + 4 * row, schema_version)
            _mark(version_bits, row, has_version)
            versioned += has_version
        if request_ids:
            _store64(request_ids + 8 * row, request_id)
        if producer_ids:
            _store64(producer_ids + 8 * row, producer_id)
        if topic_offsets:
            is_other = 0
            size = topic_end - topic
            if size != own_topic_bytes or _memcmp(topic, own_topic, size) != 0:
                is_other = 1
                _copy(topic_data + topic_bytes, topic, size, topic_data + topic_max, limit)
                topic_bytes += size
            _store32(topic_offsets + 4 * (row + 1), topic_bytes)
            _mark(topic_bits, row, is_other)
            topics += is_other
        if broker_offsets:
            size = broker_end - broker
            _copy(broker_data + broker_bytes, broker, size, broker_data + broker_max, limit)
            broker_bytes += size
            _store32(broker_offsets + 4 * (row + 1), broker_bytes)
            is_other = 1 if size > 0 else 0
            _mark(broker_bits, row, is_other)
            brokers += is_other
        if member_offsets:
            size = member_end - member
            _copy(member_data + member_bytes, member, size, member_data + member_max, limit)
            member_bytes += size
            _store32(member_offsets + 4 * (row + 1), member_bytes)
            _mark(member_bits, row, is_some)
            members += is_some
        if own_offsets:
            is_other = 1 if own_offset != offset else 0
            _store64(own_offsets + 8 * row, own_offset if is_other else 0)
            _mark(own_offset_bits, row, is_other)
            own_offset_count += is_other
        if exact_times:
            is_other = 0 if 0 <= time <= _TIME_MS_MAX else 1
            _store64(exact_times + 8 * row, time if is_other else 0)
            _mark(exact_time_bits, row, is_other)
            exact_time_count += is_other
        row += 1
        offset += 1
        at = end
    fields[POSITION] = at - base
    fields[OFFSET] = offset
    fields[ROWS] = row
    fields[NAMES + DATA_BYTES] = name_bytes
    fields[PAYLOADS + DATA_BYTES] = payload_bytes
    fields[ATTRIBUTES + DATA_BYTES] = entries
    fields[KEYS + DATA_BYTES] = key_bytes
    fields[VALUES + DATA_BYTES] = value_bytes
    fields[ROUTING_KEYS + DATA_BYTES] = route_bytes
    fields[ROUTING_KEYS + VALID] = routes
    fields[SCHEMA_IDS + VALID] = schemas
    fields[SCHEMA_VERSIONS + VALID] = versioned
    fields[MESSAGE_TOPICS + DATA_BYTES] = topic_bytes
    fields[MESSAGE_TOPICS + VALID] = topics
    fields[BROKERS + DATA_BYTES] = broker_bytes
    fields[BROKERS + VALID] = brokers
    fields[SUBSCRIPTIONS + DATA_BYTES] = member_bytes
    fields[SUBSCRIPTIONS + VALID] = members
    fields[MESSAGE_OFFSETS + VALID] = own_offset_count
    fields[EXACT_TIMES + VALID] = exact_time_count
    return status


# -- columns to frames ----------------------------------------------------------------------


@_part
def _integer_bytes(value: int, is_varint: int) -> int:
    """How many bytes an integer takes."""
    if not is_varint:
        return 8
    if value < 0 or value >= _U32_END:
        return 9
    if value < 251:
        return 1
    return 3 if value < 1 << 16 else 5


@_part
def _put_integer(at: int, value: int, is_varint: int) -> int:
    """Writes an integer; returns the address behind it."""
    if not is_varint:
        _store64(at, value)
        return at + 8
    if value < 0 or value >= _U32_END:
        _store8(at, 253)
        _store64(at + 1, value)
        return at + 9
    if value < 251:
        _store8(at, value)
        return at + 1
    if value < 1 << 16:
        _store8(at, 251)
        _store16(at + 1, value)
        return at + 3
    _store8(at, 252)
    _store32(at + 1, value)
    return at + 5


@_part
def _put_blob(  # noqa: PLR0917
    at: int, value: int, size: int, is_varint: int, at_end: int, value_end: int
) -> int:
    """Writes a length and so many bytes; returns the address behind them."""
    at = _put_integer(at, size, is_varint)
    _copy(at, value, size, at_end, value_end)
    return at + size


@_part
def _is_valid(fields: Any, column: int, row: int) -> bool:  # noqa: ANN401
    """Whether a value of a column is not null."""
    bits = fields[column + VALIDITY]
    bit = fields[column + VALIDITY_START] + row
    return bool(bits == 0 or (_load8(bits + (bit >> 3)) >> (bit & 7)) & 1 == 1)


@_part
def _value(fields: Any, column: int, row: int) -> tuple[int, int]:  # noqa: ANN401
    """The address of a value and its size, -1 if its offsets lie."""
    start = _load64(fields[column + OFFSETS] + 8 * row)
    end = _load64(fields[column + OFFSETS] + 8 * row + 8)
    if start < 0 or end < start or end > fields[column + DATA_BYTES]:
        return 0, -1
    return fields[column + DATA] + start, end - start


def encode(fields: Any) -> int:  # noqa: ANN401 - an array of integers
    """Writes rows as frames from `BASE` on, until a segment is full; returns why it stopped."""
    base = fields[BASE]
    room = fields[SIZE]
    used = fields[POSITION]
    scratch = fields.ctypes.data + 8 * _SCRATCH
    offset = fields[OFFSET]
    row = fields[ROWS]
    rows_max = fields[ROWS_MAX]
    is_varint = fields[IS_VARINT]
    limit = base + room
    middle, middle_bytes = fields[MIDDLE], fields[MIDDLE_BYTES]
    request_id = fields[REQUEST_ID]
    times, time_raw_max = fields[TIMES], fields[TIME_RAW_MAX]
    time_multiplier, time_divisor = fields[TIME_MULTIPLIER], fields[TIME_DIVISOR]
    time_last = fields[TIME_LAST]
    segment_bytes = fields[SEGMENT_BYTES]
    attribute_offsets = fields[ATTRIBUTES + OFFSETS]
    payload_limit = fields[PAYLOADS + DATA] + fields[PAYLOADS + DATA_BYTES]
    name_limit = fields[NAMES + DATA] + fields[NAMES + DATA_BYTES]
    key_limit = fields[KEYS + DATA] + fields[KEYS + DATA_BYTES]
    value_limit = fields[VALUES + DATA] + fields[VALUES + DATA_BYTES]
    route_limit = fields[ROUTING_KEYS + DATA] + fields[ROUTING_KEYS + DATA_BYTES]
    numbers, starts = fields[NUMBERS], fields[STARTS]
    own_topic, own_topic_bytes = fields[TOPIC], fields[TOPIC_BYTES]
    topic_limit = fields[MESSAGE_TOPICS + DATA] + fields[MESSAGE_TOPICS + DATA_BYTES]
    broker_limit = fields[BROKERS + DATA] + fields[BROKERS + DATA_BYTES]
    member_limit = fields[SUBSCRIPTIONS + DATA] + fields[SUBSCRIPTIONS + DATA_BYTES]
    topic = broker = member = 0
    topic_bytes = broker_bytes = member_bytes = 0
    producer_id = 0
    has_member = 1
    status = DONE
    while row < rows_max:
        # What there is to write, and how many bytes that makes.
        status = BODY_IS_BAD
        payload, payload_bytes = _value(fields, PAYLOADS, row)
        if payload_bytes < 0 or payload_bytes > fields[PAYLOAD_BYTES_MAX]:
            break
        time = fields[TIME_DEFAULT]
        if times and _is_valid(fields, TIMES, row):
            time = _load64(times + 8 * row)
            if time < 0 or time > time_raw_max:
                break
            time = time * time_multiplier // time_divisor
        own_offset = offset
        if numbers:
            # A message as it once was: all of it lies in columns.
            offset = _load64(numbers + 8 * row)
            own_offset = offset
            if fields[MESSAGE_OFFSETS] and _is_valid(fields, MESSAGE_OFFSETS, row):
                own_offset = _load64(fields[MESSAGE_OFFSETS] + 8 * row)
            if fields[EXACT_TIMES] and _is_valid(fields, EXACT_TIMES, row):
                time = _load64(fields[EXACT_TIMES] + 8 * row)
            request_id = _load64(fields[REQUEST_IDS] + 8 * row)
            producer_id = _load64(fields[PRODUCER_IDS] + 8 * row)
            topic, topic_bytes = own_topic, own_topic_bytes
            if fields[MESSAGE_TOPICS] and _is_valid(fields, MESSAGE_TOPICS, row):
                topic, topic_bytes = _value(fields, MESSAGE_TOPICS, row)
                if topic_bytes < 0:
                    break
            broker, broker_bytes = 0, 0
            if fields[BROKERS] and _is_valid(fields, BROKERS, row):
                broker, broker_bytes = _value(fields, BROKERS, row)
                if broker_bytes < 0:
                    break
            member, member_bytes, has_member = 0, 0, 0
            if fields[SUBSCRIPTIONS] and _is_valid(fields, SUBSCRIPTIONS, row):
                member, member_bytes = _value(fields, SUBSCRIPTIONS, row)
                has_member = 1
                if member_bytes < 0:
                    break
            middle_bytes = (
                _integer_bytes(producer_id, is_varint)
                + _integer_bytes(topic_bytes, is_varint)
                + topic_bytes
                + _integer_bytes(broker_bytes, is_varint)
                + broker_bytes
            )
        member_size = _integer_bytes(member_bytes, is_varint) + member_bytes if has_member else 0
        name, name_bytes = fields[NAMES + DATA], 0
        if fields[NAMES] and _is_valid(fields, NAMES, row):
            name, name_bytes = _value(fields, NAMES, row)
            if name_bytes < 0:
                break
        envelope = (
            _integer_bytes(request_id, is_varint)
            + middle_bytes
            + _integer_bytes(own_offset, is_varint)
            + _integer_bytes(payload_bytes, is_varint)
            + _integer_bytes(time, is_varint)
            + _integer_bytes(name_bytes, is_varint)
            + name_bytes
            + 1
            + member_size
        )
        first = count = 0
        if attribute_offsets and _is_valid(fields, ATTRIBUTES, row):
            first = _load32(attribute_offsets + 4 * row) - fields[ATTRIBUTES + DATA]
            count = _load32(attribute_offsets + 4 * row + 4) - fields[ATTRIBUTES + DATA] - first
            if first < 0 or count < 0 or count > fields[ATTRIBUTES + DATA_BYTES] - first:
                break
            if count >= CROWD_MIN and fields[PERMITTED] != offset:
                status = CROWDED
                break
            entry = 0
            while entry < count:
                key, key_bytes = _value(fields, KEYS, first + entry)
                value, value_bytes = _value(fields, VALUES, first + entry)
                if (
                    key_bytes < 0
                    or value_bytes < 0
                    or not _is_valid(fields, KEYS, first + entry)
                    or not _is_valid(fields, VALUES, first + entry)
                    or (count < CROWD_MIN and _is_known(scratch, entry, key, key_bytes))
                ):
                    break
                envelope += _integer_bytes(key_bytes, is_varint) + key_bytes
                envelope += _integer_bytes(value_bytes, is_varint) + value_bytes
                entry += 1
            if entry < count:
                break
        envelope += _integer_bytes(count, is_varint)
        has_schema = fields[SCHEMA_IDS] != 0 and _is_valid(fields, SCHEMA_IDS, row)
        has_version = fields[SCHEMA_VERSIONS] != 0 and _is_valid(fields, SCHEMA_VERSIONS, row)
        has_route = fields[ROUTING_KEYS] != 0 and _is_valid(fields, ROUTING_KEYS, row)
        schema_id = schema_version = route = route_bytes = 0
        if is_varint:
            envelope += 3
            if has_schema:
                schema_id = _load64(fields[SCHEMA_IDS] + 8 * row)
                envelope += _integer_bytes(schema_id, is_varint)
            if has_version:
                schema_version = _load32(fields[SCHEMA_VERSIONS] + 4 * row)
                envelope += _integer_bytes(schema_version, is_varint)
            if has_route:
                route, route_bytes = _value(fields, ROUTING_KEYS, row)
                if route_bytes < 0:
                    break
                envelope += _integer_bytes(route_bytes, is_varint) + route_bytes
        elif has_schema or has_version or has_route:
            break
        body_bytes = payload_bytes + envelope
        if envelope > fields[ENVELOPE_BYTES_MAX] or body_bytes > fields[BODY_BYTES_MAX]:
            break
        if used > 0 and used + 16 + body_bytes > segment_bytes:
            status = SEGMENT_IS_FULL
            break
        if 16 + body_bytes > room - used:
            status = NEEDS_ROOM
            fields[ROOM] = used + 16 + body_bytes
            break
        # It fits: write it.
        status = DONE
        at = base + used
        body = at + 16
        here = _put_integer(body, request_id, is_varint)
        if numbers:
            here = _put_integer(here, producer_id, is_varint)
            # The topic's own name lies elsewhere: nothing is known to follow it.
            end = topic + topic_bytes if topic == own_topic else topic_limit
            here = _put_blob(here, topic, topic_bytes, is_varint, limit, end)
            here = _put_blob(here, broker, broker_bytes, is_varint, limit, broker_limit)
        else:
            _memcpy(here, middle, middle_bytes)
            here += middle_bytes
        here = _put_integer(here, own_offset, is_varint)
        here = _put_blob(here, payload, payload_bytes, is_varint, limit, payload_limit)
        here = _put_integer(here, time, is_varint)
        here = _put_blob(here, name, name_bytes, is_varint, limit, name_limit)
        # The subscription of a new message is there, and empty.
        _store8(here, has_member)
        here += 1
        if has_member:
            here = _put_blob(here, member, member_bytes, is_varint, limit, member_limit)
        here = _put_integer(here, count, is_varint)
        for entry in range(first, first + count):
            key, key_bytes = _value(fields, KEYS, entry)
            value, value_bytes = _value(fields, VALUES, entry)
            here = _put_blob(here, key, key_bytes, is_varint, limit, key_limit)
            here = _put_blob(here, value, value_bytes, is_varint, limit, value_limit)
        if is_varint:
            _store8(here, has_schema)
            here += 1
            if has_schema:
                here = _put_integer(here, schema_id, is_varint)
            _store8(here, has_version)
            here += 1
            if has_version:
                here = _put_integer(here, schema_version, is_varint)
            _store8(here, has_route)
            here += 1
            if has_route:
                here = _put_blob(here, route, route_bytes, is_varint, limit, route_limit)
        _store64(at, offset)
        _store32(at + 8, body_bytes)
        _store32(at + 12, np.int64(_crc32(np.uint32(0), body, body_bytes)))
        if starts:
            _store64(starts + 8 * row, used)
        used += 16 + body_bytes
        time_last = max(time_last, time)
        row += 1
        offset += 1
        request_id += 1
    fields[POSITION] = used
    fields[OFFSET] = offset
    fields[ROWS] = row
    fields[REQUEST_ID] = request_id
    fields[TIME_LAST] = time_last
    return status


LOOPS: Final = {
    "decode": (decode, types.int64(types.int64[::1])),
    "encode": (encode, types.int64(types.int64[::1])),
}
"""The functions to compile, each with its signature; `ister.kernels` replaces them here."""


def prove() -> None:
    """Decodes one frame of bincode2 at offset 0, so that a loop that does not work shows it.

    Raises:
        RuntimeError: It does not.
    """
    frame = encode_frame(0, encode_message(StreamMessage(), Codec.BINCODE2))
    data = np.frombuffer(frame, np.uint8)
    fields = new_fields()
    fields[BASE], fields[SIZE] = data.ctypes.data, len(frame)
    fields[END_OFFSET] = fields[IS_VARINT] = fields[ROWS_MAX] = 1
    fields[BODY_BYTES_MAX] = len(frame)
    if decode(fields) != DONE or fields[ROWS] != 1 or fields[POSITION] != len(frame):
        raise RuntimeError("the compiled loops do not decode what Python encodes")
