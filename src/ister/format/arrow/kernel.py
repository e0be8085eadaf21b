"""The two loops of this package, compiled by `ister.kernels`; numba is an extra.

Nothing else imports them. They are in a separate file so that the cache on disk, which depends on
this file's content, stays valid when other code changes. Written for the compiler: flat, 64-bit
signed integers, raw addresses, no objects. Each loop takes one array of integers with its arguments
and results, at the indexes that `ister.format.arrow.loops` names, so there is one signature to
compile wherever the bytes are in memory.

Every length is checked against the end of its buffer before it is used. Unsigned 64-bit values keep
their bits: a negative length is one of 2^63 or more, and is refused. A loop stops at the first
invalid byte; the caller then finds the reason in Python.
"""

from __future__ import annotations

import sys
from typing import Final, cast

import numpy as np
from numba import types

# isort: off
# fmt: off
from ister.format.arrow.loops import (
    ATTRIBUTES, BASE, BODY_BYTES_MAX, BODY_IS_BAD, BROKERS, CROWDED, CROWD_MIN, DATA, DATA_BYTES,
    DATA_BYTES_MAX, DONE, END_OFFSET, ENVELOPE_BYTES_MAX, EXACT_TIMES, FIELDS, IS_CHECK, IS_VARINT,
    KEYS, MESSAGE_OFFSETS, MESSAGE_TOPICS, MIDDLE, MIDDLE_BYTES, NAMES, NEEDS_ROOM, NUMBERS, OFFSET,
    OFFSETS, PAYLOADS, PAYLOAD_BYTES_MAX, PERMITTED, POSITION, PRODUCER_IDS, REQUEST_ID,
    REQUEST_IDS, ROOM, ROUTING_KEYS, ROWS, ROWS_MAX, SCHEMA_IDS, SCHEMA_VERSIONS, SCRATCH,
    SEGMENT_BYTES, SEGMENT_IS_FULL, SIZE, STARTS, SUBSCRIPTIONS, TIMES, TIME_DEFAULT, TIME_DIVISOR,
    TIME_LAST, TIME_MS_MAX, TIME_MULTIPLIER, TIME_RAW_MAX, TIME_US_CLAMPED, TOPIC, TOPIC_BYTES,
    VALID, VALIDITY, VALIDITY_START, VALUES, IntArray,
)
from ister.format.arrow.kernel_parts import (
    U32_END, body_crc, copy, integer_bytes, is_known_key, load32, load64, load8, mark_valid, memcmp,
    memcpy, part, put_blob, put_integer, read_blob, read_integer, read_text, store32, store64,
    store8,
)
# fmt: on
# isort: on
from ister.base.model import Codec, StreamMessage
from ister.format.frame import encode_frame
from ister.format.message import encode_message

if sys.maxsize < 1 << 32 or sys.byteorder != "little":  # pragma: no cover - no such machine here
    raise ImportError("the compiled loops need a little-endian machine of 64 bits")


def new_fields() -> IntArray:
    """An array for one of the loops, all zero."""
    return cast("IntArray", np.zeros(FIELDS, np.int64))


# -- frames to columns ----------------------------------------------------------------------


def decode(fields: IntArray) -> int:
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
    scratch = fields.ctypes.data + 8 * SCRATCH
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
    versions, version_bits = (fields[SCHEMA_VERSIONS + OFFSETS], fields[SCHEMA_VERSIONS + VALIDITY])
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
                store32(fields[column], 0)
    status = DONE
    while offset < end_offset and limit - at >= 16:
        body = at + 16
        length = load32(at + 8)
        if (
            load64(at) != offset
            or length == 0
            or length > body_max
            or length > limit - body
            or body_crc(body, length) != load32(at + 12)
        ):
            break
        if row >= rows_max:
            status = NEEDS_ROOM
            fields[ROOM] = -1
            break
        # From here on: a bad body, unless it is walked to its end.
        status = BODY_IS_BAD
        end = body + length
        request_id, here = read_integer(body, end, is_varint)
        if here == 0:
            break
        producer_id, here = read_integer(here, end, is_varint)
        if here == 0:
            break
        topic, topic_end = read_text(here, end, is_varint, limit)
        if topic_end == 0:
            break
        broker, broker_end = read_text(topic_end, end, is_varint, limit)
        if broker_end == 0:
            break
        own_offset, here = read_integer(broker_end, end, is_varint)
        if here == 0:
            break
        payload, payload_end = read_blob(here, end, is_varint)
        if payload_end == 0:
            break
        time, here = read_integer(payload_end, end, is_varint)
        if here == 0:
            break
        name, name_end = read_text(here, end, is_varint, limit)
        if name_end == 0 or name_end >= end:
            break
        here = name_end + 1
        is_some = load8(name_end)
        if is_some > 1:
            break
        member = member_end = here
        if is_some:
            member, member_end = read_text(here, end, is_varint, limit)
            if member_end == 0:
                break
            here = member_end
        count, here = read_integer(here, end, is_varint)
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
            key, key_end = read_text(here, end, is_varint, limit)
            if key_end == 0:
                break
            if count < CROWD_MIN and is_known_key(scratch, entry, key, key_end - key):
                break
            value, value_end = read_text(key_end, end, is_varint, limit)
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
                copy(key_data + new_key_bytes, key, key_end - key, key_data + key_max, limit)
                copy(
                    value_data + new_value_bytes,
                    value,
                    value_end - value,
                    value_data + value_max,
                    limit,
                )
                new_key_bytes += key_end - key
                new_value_bytes += value_end - value
                store32(key_offsets + 4 * (entries + entry + 1), new_key_bytes)
                store32(value_offsets + 4 * (entries + entry + 1), new_value_bytes)
            entry += 1
        if entry < count:
            break
        schema_id = schema_version = has_schema = has_version = has_route = 0
        route = route_end = here
        # Bodies of older Danubes end here, or before the routing key.
        if is_varint and here < end:
            has_schema = load8(here)
            here += 1
            if has_schema > 1:
                break
            if has_schema:
                schema_id, here = read_integer(here, end, is_varint)
                if here == 0:
                    break
            if here >= end:
                break
            has_version = load8(here)
            here += 1
            if has_version > 1:
                break
            if has_version:
                schema_version, here = read_integer(here, end, is_varint)
                if here == 0 or schema_version < 0 or schema_version >= U32_END:
                    break
            if here < end:
                has_route = load8(here)
                here += 1
                if has_route > 1:
                    break
            route = route_end = here
            if has_route:
                route, route_end = read_text(here, end, is_varint, limit)
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
            store64(numbers + 8 * row, offset)
        if times:
            is_of_a_calendar = 0 <= time <= TIME_MS_MAX
            store64(times + 8 * row, time * 1000 if is_of_a_calendar else TIME_US_CLAMPED)
        if name_offsets:
            copy(name_data + name_bytes, name, name_end - name, name_data + name_max, limit)
            name_bytes += name_end - name
            store32(name_offsets + 4 * (row + 1), name_bytes)
        if payload_offsets:
            copy(
                payload_data + payload_bytes,
                payload,
                payload_end - payload,
                payload_data + payload_max,
                limit,
            )
            payload_bytes += payload_end - payload
            store32(payload_offsets + 4 * (row + 1), payload_bytes)
        if attribute_offsets:
            entries += count
            key_bytes, value_bytes = new_key_bytes, new_value_bytes
            store32(attribute_offsets + 4 * (row + 1), entries)
        if route_offsets:
            copy(route_data + route_bytes, route, route_end - route, route_data + route_max, limit)
            route_bytes += route_end - route
            store32(route_offsets + 4 * (row + 1), route_bytes)
            mark_valid(route_bits, row, has_route)
            routes += has_route
        if schema_ids:
            store64(schema_ids + 8 * row, schema_id)
            mark_valid(schema_id_bits, row, has_schema)
            schemas += has_schema
        if versions:
            store32(versions + 4 * row, schema_version)
            mark_valid(version_bits, row, has_version)
            versioned += has_version
        if request_ids:
            store64(request_ids + 8 * row, request_id)
        if producer_ids:
            store64(producer_ids + 8 * row, producer_id)
        if topic_offsets:
            is_other = 0
            size = topic_end - topic
            if size != own_topic_bytes or memcmp(topic, own_topic, size) != 0:
                is_other = 1
                copy(topic_data + topic_bytes, topic, size, topic_data + topic_max, limit)
                topic_bytes += size
            store32(topic_offsets + 4 * (row + 1), topic_bytes)
            mark_valid(topic_bits, row, is_other)
            topics += is_other
        if broker_offsets:
            size = broker_end - broker
            copy(broker_data + broker_bytes, broker, size, broker_data + broker_max, limit)
            broker_bytes += size
            store32(broker_offsets + 4 * (row + 1), broker_bytes)
            is_other = 1 if size > 0 else 0
            mark_valid(broker_bits, row, is_other)
            brokers += is_other
        if member_offsets:
            size = member_end - member
            copy(member_data + member_bytes, member, size, member_data + member_max, limit)
            member_bytes += size
            store32(member_offsets + 4 * (row + 1), member_bytes)
            mark_valid(member_bits, row, is_some)
            members += is_some
        if own_offsets:
            is_other = 1 if own_offset != offset else 0
            store64(own_offsets + 8 * row, own_offset if is_other else 0)
            mark_valid(own_offset_bits, row, is_other)
            own_offset_count += is_other
        if exact_times:
            is_other = 0 if 0 <= time <= TIME_MS_MAX else 1
            store64(exact_times + 8 * row, time if is_other else 0)
            mark_valid(exact_time_bits, row, is_other)
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


@part
def _is_valid(fields: IntArray, column: int, row: int) -> bool:
    """Whether a value of a column is not null."""
    bits = fields[column + VALIDITY]
    bit = fields[column + VALIDITY_START] + row
    return bool(bits == 0 or (load8(bits + (bit >> 3)) >> (bit & 7)) & 1 == 1)


@part
def _value(fields: IntArray, column: int, row: int) -> tuple[int, int]:
    """The address of a value and its size, -1 if its offsets lie."""
    start = load64(fields[column + OFFSETS] + 8 * row)
    end = load64(fields[column + OFFSETS] + 8 * row + 8)
    if start < 0 or end < start or end > fields[column + DATA_BYTES]:
        return 0, -1
    return fields[column + DATA] + start, end - start


def encode(fields: IntArray) -> int:
    """Writes rows as frames from `BASE` on, until a segment is full; returns why it stopped.

    With `IS_CHECK` it writes nothing, and stops at the first row that cannot be written.
    """
    base = fields[BASE]
    room = fields[SIZE]
    used = fields[POSITION]
    scratch = fields.ctypes.data + 8 * SCRATCH
    offset = fields[OFFSET]
    row = fields[ROWS]
    rows_max = fields[ROWS_MAX]
    is_varint = fields[IS_VARINT]
    is_check = fields[IS_CHECK]
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
            time = load64(times + 8 * row)
            if time < 0 or time > time_raw_max:
                break
            time = time * time_multiplier // time_divisor
        own_offset = offset
        if numbers:
            # A message as it once was: all of it lies in columns.
            offset = load64(numbers + 8 * row)
            own_offset = offset
            if fields[MESSAGE_OFFSETS] and _is_valid(fields, MESSAGE_OFFSETS, row):
                own_offset = load64(fields[MESSAGE_OFFSETS] + 8 * row)
            if fields[EXACT_TIMES] and _is_valid(fields, EXACT_TIMES, row):
                time = load64(fields[EXACT_TIMES] + 8 * row)
            request_id = load64(fields[REQUEST_IDS] + 8 * row)
            producer_id = load64(fields[PRODUCER_IDS] + 8 * row)
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
                integer_bytes(producer_id, is_varint)
                + integer_bytes(topic_bytes, is_varint)
                + topic_bytes
                + integer_bytes(broker_bytes, is_varint)
                + broker_bytes
            )
        member_size = integer_bytes(member_bytes, is_varint) + member_bytes if has_member else 0
        name, name_bytes = fields[NAMES + DATA], 0
        if not fields[NAMES]:
            # One name for all rows, or none.
            name_bytes = fields[NAMES + DATA_BYTES]
        elif _is_valid(fields, NAMES, row):
            name, name_bytes = _value(fields, NAMES, row)
            if name_bytes < 0:
                break
        envelope = (
            integer_bytes(request_id, is_varint)
            + middle_bytes
            + integer_bytes(own_offset, is_varint)
            + integer_bytes(payload_bytes, is_varint)
            + integer_bytes(time, is_varint)
            + integer_bytes(name_bytes, is_varint)
            + name_bytes
            + 1
            + member_size
        )
        first = count = 0
        if attribute_offsets and _is_valid(fields, ATTRIBUTES, row):
            first = load32(attribute_offsets + 4 * row) - fields[ATTRIBUTES + DATA]
            count = load32(attribute_offsets + 4 * row + 4) - fields[ATTRIBUTES + DATA] - first
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
                    or (count < CROWD_MIN and is_known_key(scratch, entry, key, key_bytes))
                ):
                    break
                envelope += integer_bytes(key_bytes, is_varint) + key_bytes
                envelope += integer_bytes(value_bytes, is_varint) + value_bytes
                entry += 1
            if entry < count:
                break
        envelope += integer_bytes(count, is_varint)
        has_schema = fields[SCHEMA_IDS] != 0 and _is_valid(fields, SCHEMA_IDS, row)
        has_version = fields[SCHEMA_VERSIONS] != 0 and _is_valid(fields, SCHEMA_VERSIONS, row)
        has_route = fields[ROUTING_KEYS] != 0 and _is_valid(fields, ROUTING_KEYS, row)
        schema_id = schema_version = route = route_bytes = 0
        if is_varint:
            envelope += 3
            if has_schema:
                schema_id = load64(fields[SCHEMA_IDS] + 8 * row)
                envelope += integer_bytes(schema_id, is_varint)
            if has_version:
                schema_version = load32(fields[SCHEMA_VERSIONS] + 4 * row)
                envelope += integer_bytes(schema_version, is_varint)
            if has_route:
                route, route_bytes = _value(fields, ROUTING_KEYS, row)
                if route_bytes < 0:
                    break
                envelope += integer_bytes(route_bytes, is_varint) + route_bytes
        elif has_schema or has_version or has_route:
            break
        body_bytes = payload_bytes + envelope
        if envelope > fields[ENVELOPE_BYTES_MAX] or body_bytes > fields[BODY_BYTES_MAX]:
            break
        if is_check:
            status = DONE
            row += 1
            offset += 1
            request_id += 1
            continue
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
        here = put_integer(body, request_id, is_varint)
        if numbers:
            here = put_integer(here, producer_id, is_varint)
            # The topic's own name lies elsewhere: nothing is known to follow it.
            end = topic + topic_bytes if topic == own_topic else topic_limit
            here = put_blob(here, topic, topic_bytes, is_varint, limit, end)
            here = put_blob(here, broker, broker_bytes, is_varint, limit, broker_limit)
        else:
            memcpy(here, middle, middle_bytes)
            here += middle_bytes
        here = put_integer(here, own_offset, is_varint)
        here = put_blob(here, payload, payload_bytes, is_varint, limit, payload_limit)
        here = put_integer(here, time, is_varint)
        here = put_blob(here, name, name_bytes, is_varint, limit, name_limit)
        # The subscription of a new message is there, and empty.
        store8(here, has_member)
        here += 1
        if has_member:
            here = put_blob(here, member, member_bytes, is_varint, limit, member_limit)
        here = put_integer(here, count, is_varint)
        for entry in range(first, first + count):
            key, key_bytes = _value(fields, KEYS, entry)
            value, value_bytes = _value(fields, VALUES, entry)
            here = put_blob(here, key, key_bytes, is_varint, limit, key_limit)
            here = put_blob(here, value, value_bytes, is_varint, limit, value_limit)
        if is_varint:
            store8(here, has_schema)
            here += 1
            if has_schema:
                here = put_integer(here, schema_id, is_varint)
            store8(here, has_version)
            here += 1
            if has_version:
                here = put_integer(here, schema_version, is_varint)
            store8(here, has_route)
            here += 1
            if has_route:
                here = put_blob(here, route, route_bytes, is_varint, limit, route_limit)
        store64(at, offset)
        store32(at + 8, body_bytes)
        store32(at + 12, body_crc(body, body_bytes))
        if starts:
            store64(starts + 8 * row, used)
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
    """Self-test: decodes one known frame of bincode2 at offset 0.

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
