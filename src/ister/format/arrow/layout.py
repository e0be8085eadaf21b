"""The memory of a batch that compiled code fills: which buffers, how large, and where.

Owns: the estimate of what a batch needs, and the plan of its buffers. Does not own: what the loops
write into them (`kernel`), the arrays made of them (`decode`).

All buffers of a batch are parts of one allocation: allocating and resizing fifteen takes Python as
long as the loop takes for a thousand small messages. Plans are cached, because most batches of a
topic are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import pyarrow as pa

from ister.base.limits import FRAME_BODY_BYTES_MAX
from ister.base.model import Codec
from ister.format.arrow import loops as at
from ister.format.arrow.loops import IntArray, loops

FRAME_BYTES_MIN: Final = {Codec.BINCODE1: 16 + 73, Codec.BINCODE2: 16 + 10}
"""The size of a frame whose message is empty."""
_SPARE: Final = 64
"""Rows, entries or bytes beyond an estimate, for small batches."""
_ALIGNMENT: Final = 64
"""What Arrow recommends for a buffer."""
_STEP_BITS: Final = 6
"""Significant bits of a planned size, so that batches of similar sizes share a plan."""
_PLANS_MAX: Final = 16
"""Plans that a layout caches."""

# Columns by their blocks in the compiled loops, with the bits of a value.
FIXED: Final = {
    "offset": (at.NUMBERS, 64),
    "publish_time": (at.TIMES, 64),
    "schema_id": (at.SCHEMA_IDS, 64),
    "schema_version": (at.SCHEMA_VERSIONS, 32),
    "request_id": (at.REQUEST_IDS, 64),
    "producer_id": (at.PRODUCER_IDS, 64),
    "message_offset": (at.MESSAGE_OFFSETS, 64),
    "publish_time_ms": (at.EXACT_TIMES, 64),
}
VARIABLE: Final = {
    "producer_name": at.NAMES,
    "payload": at.PAYLOADS,
    "routing_key": at.ROUTING_KEYS,
    "message_topic": at.MESSAGE_TOPICS,
    "broker_addr": at.BROKERS,
    "subscription_name": at.SUBSCRIPTIONS,
}
NULLABLE: Final = {
    at.ROUTING_KEYS,
    at.SCHEMA_IDS,
    at.SCHEMA_VERSIONS,
    at.MESSAGE_TOPICS,
    at.MESSAGE_OFFSETS,
    at.BROKERS,
    at.SUBSCRIPTIONS,
    at.EXACT_TIMES,
}

_ROWS: Final = -1
"""The value of `at.ROOM` if there is no room for another row; otherwise it is a block."""
# What a batch needs room for, and how much of it for each byte of frames, until batches have shown
# it: rows, entries of attributes, and the bytes of columns.
_FILLING: Final = {
    _ROWS: 1 / 128,
    at.ATTRIBUTES: 1 / 128,
    at.NAMES: 1 / 8,
    at.PAYLOADS: 1.0,
    at.KEYS: 1 / 16,
    at.VALUES: 1 / 16,
    at.ROUTING_KEYS: 1 / 32,
    at.MESSAGE_TOPICS: 0,
    at.BROKERS: 1 / 64,
    at.SUBSCRIPTIONS: 1 / 64,
}


class BatchResource(NamedTuple):
    """A limited resource of a batch, with its fields in the compiled loops."""

    block: int
    """A key of `_FILLING`."""
    used: int
    """The field that says how much is used."""
    capacity: int
    """The field that says how much there is."""
    bytes_min: int
    """The fewest bytes of frames that use one unit (a row, an entry or a byte)."""


class Slot(NamedTuple):
    """A buffer of a batch."""

    field: int
    """The field that takes its address."""
    room: BatchResource
    bits: int
    """For each unit of `room`."""
    extra_bytes: int

    def size(self, fields: Sequence[int]) -> int:
        """The size of its used part, according to the fields of the loop."""
        return self.size_for(fields[self.room.used])

    def size_for(self, count: int) -> int:
        """Its size in bytes, for `count` units of its room."""
        return (self.bits * count + 7) // 8 + self.extra_bytes


class Plan(NamedTuple):
    """The memory of a batch: one allocation, divided into buffers."""

    fields: IntArray
    """The arguments of the loop, without addresses."""
    positions: dict[int, int]
    """Where each buffer begins, by the field of its address."""
    size_bytes: int


class Layout:
    """The buffers that some columns need, and how large they are likely to get."""

    def __init__(self, schema: pa.Schema, codec: Codec) -> None:
        rows = BatchResource(_ROWS, at.ROWS, at.ROWS_MAX, FRAME_BYTES_MIN[codec])
        self.rooms = {_ROWS: rows}
        self.slots: dict[int, Slot] = {}
        """By their fields."""
        # How much of each room a byte of frames is likely to use.
        self._filling = dict(_FILLING)
        self._plans: dict[int, Plan] = {}

        def add_room(block: int, bytes_min: int) -> BatchResource:
            room = BatchResource(block, block + at.DATA_BYTES, block + at.DATA_BYTES_MAX, bytes_min)
            self.rooms[block] = room
            return room

        def add_slot(field: int, room: BatchResource, bits: int, extra_bytes: int = 0) -> None:
            self.slots[field] = Slot(field, room, bits, extra_bytes)

        def add_variable(block: int, count: BatchResource) -> None:
            add_slot(block + at.OFFSETS, count, 32, 4)
            add_slot(block + at.DATA, add_room(block, 1), 8)

        for column in schema.names:
            block = _ROWS
            if column in FIXED:
                block, width = FIXED[column]
                add_slot(block + at.OFFSETS, rows, width)
            elif column in VARIABLE:
                block = VARIABLE[column]
                add_variable(block, rows)
            elif column == "attributes":
                add_slot(at.ATTRIBUTES + at.OFFSETS, rows, 32, 4)
                entries = add_room(at.ATTRIBUTES, 2)
                add_variable(at.KEYS, entries)
                add_variable(at.VALUES, entries)
            if block in NULLABLE:
                add_slot(block + at.VALIDITY, rows, 1)
        bits = dict.fromkeys((room.used for room in self.rooms.values()), 0)
        for slot in self.slots.values():
            bits[slot.room.used] += slot.bits
        self._bits = tuple(bits.items())

    def plan(self, size_bytes: int) -> Plan:
        """Returns the plan for a batch of `size_bytes` of frames, or a little more."""
        step = 1 << max(size_bytes.bit_length() - _STEP_BITS, _STEP_BITS)
        size_bytes = -(-size_bytes // step) * step
        found = self._plans.get(size_bytes)
        if found is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            found = self._plans[size_bytes] = self._make_plan(size_bytes)
        return found

    def _make_plan(self, size_bytes: int) -> Plan:
        fields = loops().new_fields()
        fields[at.PERMITTED] = -1
        fields[at.BODY_BYTES_MAX] = FRAME_BODY_BYTES_MAX
        for room in self.rooms.values():
            likely = int(size_bytes * self._filling[room.block] * 1.03) + _SPARE
            fields[room.capacity] = min(likely, size_bytes // room.bytes_min + 1)
        positions: dict[int, int] = {}
        end = 0
        for slot in self.slots.values():
            positions[slot.field] = end
            size = slot.size_for(int(fields[slot.room.capacity]))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return Plan(fields, positions, end)

    def used_bytes(self, fields: Sequence[int]) -> int:
        """About how many bytes of its memory a batch uses."""
        return sum(fields[used] * bits for used, bits in self._bits) // 8

    def learn(self, fields: Sequence[int], taken_bytes: int) -> None:
        """Replaces the estimates by what a batch used whose plan was too small or too large."""
        for room in self.rooms.values():
            self._filling[room.block] = fields[room.used] / taken_bytes
        self._plans = {}


@lru_cache(maxsize=256)
def layout_of(topic: str, codec: Codec, schema: pa.Schema) -> Layout:
    """The layout of a topic's batches; its decoders share it, and with it the estimates."""
    return Layout(schema, codec)
