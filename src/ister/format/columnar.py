"""Frames to Arrow and back: how long histories reach Spark, DuckDB, Polars and pandas.

    frames of one topic ── ColumnarDecoder, FrameFeed ──► record batches
    record batches ────── encode_frames ────────────────► frames, in segments
    rows with every field ─ restore_frames ─────────────► the frames that they were decoded from

The same verdicts as `ister.format.frame` and `ister.format.message` give, for every byte: a frame
is checked by crc and continuity, and its body is walked to its end, whatever columns are wanted.
With the extra `ister[fast]` the loops run as machine code (`ister.format.columnar_kernel`), without
a Python object per message and without the interpreter lock; without it they run in Python, slower,
with the same results.

Owns: the columns, their Arrow types, and how values map to them. Does not own: where bytes come
from, which offsets exist, sizes that a topic allows.

Values that Arrow's types do not hold as they are: a `schema_id` over 2^63-1 and a `schema_version`
over 2^31-1 become the negative number of the same bits, and encoding turns them back. A publish
time that no calendar has becomes the last microsecond of the year 9999.

Invariants: a row per frame, in order, without a hole; a batch refers to no byte of the buffer that
it was decoded from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ister import kernels
from ister.errors import (
    ConfigError,
    CorruptDataError,
    InvalidRequestError,
    InvariantError,
    MessageTooLargeError,
    check,
)
from ister.format.bincode import FixintWriter, VarintWriter
from ister.format.crc import Buffer
from ister.format.frame import (
    FRAME_HEADER_SIZE,
    Corrupt,
    Frame,
    NeedMore,
    decode_frame,
    encode_frame,
    scan_frames,
)
from ister.format.message import decode_message, encode_message
from ister.limits import ENVELOPE_SIZE_BYTES_MAX, FRAME_BODY_BYTES_MAX, GIB, KIB, MIB
from ister.model import Codec, MessageId, StreamMessage

__all__ = [
    "COLUMNS",
    "EVERY_FIELD",
    "HIDDEN",
    "ColumnarDecoder",
    "DecodedFrames",
    "EncodedFrames",
    "FrameFeed",
    "RestoredFrames",
    "arrow_schema",
    "encode_frames",
    "restore_frames",
]

COLUMNS: Final = (
    "topic",
    "offset",
    "publish_time",
    "producer_name",
    "payload",
    "attributes",
    "routing_key",
    "schema_id",
    "schema_version",
)
"""What a message is to a table, in this order."""

HIDDEN: Final = ("request_id", "producer_id")
"""What Danube's wire needs and a table does not: there for those who ask by name."""

EVERY_FIELD: Final = (
    *COLUMNS,
    *HIDDEN,
    "message_topic",
    "message_offset",
    "broker_addr",
    "subscription_name",
    "publish_time_ms",
)
"""All that a body has: rows with these columns can be made into the same frames again.

Most of the last five is null. `message_topic` and `message_offset` are what a message says about
itself where that is not the topic and the offset under which it lies, `broker_addr` is there where
it is not empty, and `publish_time_ms` where the time is one that no calendar has."""

_TYPES: Final[dict[str, pa.DataType]] = {
    "topic": pa.string(),
    "offset": pa.int64(),
    "publish_time": pa.timestamp("us", tz="UTC"),
    "producer_name": pa.string(),
    "payload": pa.binary(),
    "attributes": pa.map_(pa.string(), pa.string()),
    "routing_key": pa.string(),
    "schema_id": pa.int64(),
    "schema_version": pa.int32(),
    "request_id": pa.uint64(),
    "producer_id": pa.uint64(),
    "message_topic": pa.string(),
    "message_offset": pa.uint64(),
    "broker_addr": pa.string(),
    "subscription_name": pa.string(),
    "publish_time_ms": pa.uint64(),
}

# Arrow's `offset` column is signed, and the offset after the last one has to fit too.
_OFFSET_END: Final = (1 << 63) - 1
# Arrow counts the bytes of a column of text or blobs in 32 signed bits.
_COLUMN_BYTES_MAX: Final = (1 << 31) - 1
# How many bytes of frames a feed puts into one batch: far from the bound above, and larger than
# any frame.
_BATCH_BYTES_MAX: Final = 1 * GIB
_FRAME_BYTES_MIN: Final = {Codec.BINCODE1: 16 + 73, Codec.BINCODE2: 16 + 13}
_TIME_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, where calendars end."""
_TIME_US_CLAMPED: Final = 253_402_300_799_999_999
# A buffer may be so much, and an eighth, larger than what it holds: giving it back takes a copy.
_LEFT_OVER_BYTES: Final = 16 * KIB
# Rows that become Python objects at a time.
_PURE_ROWS: Final = 1024


def arrow_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The Arrow schema of messages.

    It is the one that Spark makes of the same columns, so that batches go over without a cast.

    Args:
        columns: Names out of `EVERY_FIELD`, in any order; None for `COLUMNS`.

    Raises:
        InvalidRequestError: A name is unknown, or stands there twice.
    """
    names = COLUMNS if columns is None else tuple(columns)
    for number, name in enumerate(names):
        if name not in _TYPES:
            raise InvalidRequestError(
                f"there is no column {name!r}", hint=f"the columns are {_known_columns()}"
            )
        if name in names[:number]:
            raise InvalidRequestError(f"column {name!r} twice", hint="name each column once")
    return pa.schema([pa.field(name, _TYPES[name]) for name in names])


def _known_columns() -> str:
    return ", ".join(COLUMNS) + "; and, by name only, " + ", ".join(HIDDEN)


# -- the compiled loops ---------------------------------------------------------------------


# In Python, a row costs about this many times as much as scanning a frame of its size.
_ROWS_WEIGHT: Final = 16


def _wants_compiled(is_compiled: bool | None) -> bool:
    """Whether to use the compiled loops: they are loaded, or requested and then loaded."""
    if is_compiled is False:
        return False
    is_there = kernels.load() if is_compiled else kernels.current() is not None
    if is_compiled and not is_there:
        raise ConfigError(
            "the compiled columnar loops are not available",
            hint="install the extra: pip install 'ister[fast]'",
        )
    return is_there


def _loops() -> Any:  # noqa: ANN401 - a module of an extra
    """The compiled loops, which have to be loaded; they are never unloaded."""
    loaded = kernels.current()
    check(loaded is not None, "compiled loops are loaded before they are used")
    return loaded.columnar if loaded is not None else None


# -- decoding -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodedFrames:
    """The whole frames of a buffer as rows, and why there are no more."""

    batch: pa.RecordBatch
    """A row per frame; may have none."""
    end: int
    """The position after the last whole frame."""
    next_offset: int
    """The offset after the last whole frame's."""
    stop: NeedMore | Corrupt
    """What `ister.format.frame.scan_frames` gives for the same buffer."""


class _Taken(NamedTuple):
    """How far a collector came in a buffer."""

    end: int
    next_offset: int
    error: CorruptDataError | None
    """Set if the frame at `end` is whole and its body is no message."""


class _Collector(Protocol):
    """Collects the rows of one batch, from one or more buffers."""

    def take(self, view: memoryview, position: int, expected: int, end_offset: int) -> _Taken:
        """Adds the frames from `position` on."""
        ...

    def finish(self) -> pa.RecordBatch:
        """The batch of all that was added."""
        ...


class ColumnarDecoder:
    """Decodes chunks of frames of one topic.

    May be shared by threads. A buffer must not change while it is decoded.
    """

    def __init__(
        self,
        topic: str,
        codec: Codec,
        columns: Sequence[str] | None = None,
        *,
        is_compiled: bool | None = None,
    ) -> None:
        """Makes a decoder.

        Args:
            topic: The topic's name, which becomes the column `topic`.
            codec: How the bodies are encoded.
            columns: What to build; see `arrow_schema`.
            is_compiled: Whether machine code does it: None for where it is available, True to
                require it.

        Raises:
            InvalidRequestError: A column is unknown, or wanted twice.
            ConfigError: The compiled loops are required and not available.
        """
        self.topic = topic
        self.codec = codec
        self.schema = arrow_schema(columns)
        """The columns of the batches."""
        self.is_compiled = _wants_compiled(is_compiled)
        """Whether this decoder runs as machine code."""
        layout = _Layout(self.schema, codec) if self.is_compiled else None
        self._plan = _Plan(topic, codec, self.schema, layout)

    def decode(
        self,
        buffer: Buffer,
        position: int = 0,
        *,
        expected_offset: int,
        end_offset: int | None = None,
    ) -> DecodedFrames:
        """Decodes the frames in `buffer`, each checked by crc and continuity.

        Args:
            buffer: Bytes that hold frames from `position` on.
            position: Where the first frame begins.
            expected_offset: The first frame's offset.
            end_offset: Stop before this offset.

        Raises:
            CorruptDataError: A frame is whole and its body is not a message in this codec. The
                error has its `offset`; decoding with that as `end_offset` gives the rows before.
            InvalidRequestError: The position is outside of the buffer, the offset is none that
                Arrow can hold, or the rows are more than a batch can hold.
        """
        view = _as_view(buffer)
        if not 0 <= position <= len(view):
            raise InvalidRequestError(f"position {position} in a buffer of {len(view)} bytes")
        _check_offset(expected_offset)
        if len(view) - position > _COLUMN_BYTES_MAX:
            raise InvalidRequestError(
                f"{len(view) - position} bytes of frames do not fit into one batch",
                topic=self.topic,
                hint="decode less at a time, or give it to a FrameFeed",
            )
        offset_end = _offset_end(end_offset)
        rows = self._plan.collect(len(view) - position)
        end, next_offset, error = rows.take(view, position, expected_offset, offset_end)
        if error is not None:
            raise error
        stop: Frame | NeedMore | Corrupt = NeedMore(FRAME_HEADER_SIZE)
        if next_offset < offset_end:
            stop = decode_frame(view, end, expected_offset=next_offset)
        if isinstance(stop, Frame):
            raise InvariantError(f"decoding stopped before a good frame at {end}")
        return DecodedFrames(rows.finish(), end, next_offset, stop)


def _as_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _check_offset(offset: int) -> None:
    if not 0 <= offset < _OFFSET_END:
        raise InvalidRequestError(f"offset {offset} is not in 0..{_OFFSET_END - 1}")


def _offset_end(end_offset: int | None) -> int:
    return _OFFSET_END if end_offset is None else max(0, min(end_offset, _OFFSET_END))


def _signed(value: int | None, bits: int) -> int | None:
    if value is None:
        return None
    return value - (1 << bits) if value >> (bits - 1) else value


_FIELDS: Final[dict[str, Callable[[StreamMessage], object]]] = {
    "publish_time": lambda message: (
        message.publish_time * 1000 if message.publish_time <= _TIME_MS_MAX else _TIME_US_CLAMPED
    ),
    "producer_name": lambda message: message.producer_name,
    "payload": lambda message: message.payload,
    "attributes": lambda message: list(message.attributes.items()),
    "routing_key": lambda message: message.routing_key,
    "schema_id": lambda message: _signed(message.schema_id, 64),
    "schema_version": lambda message: _signed(message.schema_version, 32),
    "request_id": lambda message: message.request_id,
    "producer_id": lambda message: message.msg_id.producer_id,
    "broker_addr": lambda message: message.msg_id.broker_addr or None,
    "subscription_name": lambda message: message.subscription_name,
    "publish_time_ms": lambda message: (
        message.publish_time if message.publish_time > _TIME_MS_MAX else None
    ),
    # Of these two, what is as it should be becomes null when the column is made.
    "message_topic": lambda message: message.msg_id.topic_name,
    "message_offset": lambda message: message.msg_id.topic_offset,
}


class _Plan:
    """What the batches of one decoder have in common."""

    def __init__(self, topic: str, codec: Codec, schema: pa.Schema, layout: _Layout | None) -> None:
        self.topic = topic
        self.codec = codec
        self.schema = schema
        self.filling = dict(_FILLING)
        """How much of each kind of room a byte of frames has taken so far."""
        self.topic_bytes = pa.py_buffer(topic.encode())
        self._layout = layout
        self._topics = pa.array([], pa.string())

    def collect(self, size_bytes: int) -> _Collector:
        """A collector of rows, for about so many bytes of frames."""
        if self._layout is None:
            return _PureRows(self)
        return _CompiledRows(self, self._layout, size_bytes)

    def topic_column(self, count: int) -> pa.Array:
        """The topic's name `count` times, out of one array that all batches share."""
        # Threads may make it at the same time: each uses the one that it has seen.
        topics = self._topics
        if len(topics) < count:
            rows_max = _COLUMN_BYTES_MAX // max(len(self.topic.encode()), 1)
            if count > rows_max:
                raise InvalidRequestError(
                    f"{count} rows do not fit into one batch with their topic's name",
                    topic=self.topic,
                    hint="decode less at a time, or give it to a FrameFeed",
                )
            # Somewhat more, so that batches that grow little by little do not make it each time.
            size = min(count + count // 8, rows_max)
            topics = self._topics = pa.repeat(pa.scalar(self.topic, pa.string()), size)
        return topics.slice(0, count)

    def judge_body(self, view: memoryview, position: int, offset: int) -> CorruptDataError | None:
        """Why the body of the good frame at `position` is no message; None if it is one."""
        frame = decode_frame(view, position, expected_offset=offset)
        if not isinstance(frame, Frame):
            raise InvariantError(f"taken for a frame at {position}: {frame}")
        try:
            decode_message(frame.body, self.codec)
        except CorruptDataError as error:
            return self.not_a_message(offset, error)
        return None

    def not_a_message(self, offset: int, error: CorruptDataError) -> CorruptDataError:
        """The error of `decode_message` with what it does not know."""
        found = CorruptDataError(
            error.message,
            topic=self.topic,
            offset=offset,
            hint="the frame is intact: it may have been written in another codec",
        )
        found.__cause__ = error
        return found


class _PureRows:
    """Rows as lists of Python values, one for each column."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._count = 0
        self._first_offset = 0
        self._values: dict[str, list[object]] = {
            name: [] for name in plan.schema.names if name in _FIELDS
        }

    def take(self, view: memoryview, position: int, expected: int, end_offset: int) -> _Taken:
        kernels.count_work((len(view) - position) * _ROWS_WEIGHT)
        scan = scan_frames(view, position, expected_offset=expected, end_offset=end_offset)
        if not self._count:
            self._first_offset = expected
        codec = self._plan.codec
        fields = [(values.append, _FIELDS[name]) for name, values in self._values.items()]
        for start, end in zip(scan.starts, [*scan.starts[1:], scan.end], strict=False):
            try:
                message = decode_message(view[start + FRAME_HEADER_SIZE : end], codec)
            except CorruptDataError as error:
                return _Taken(start, expected, self._plan.not_a_message(expected, error))
            # Values rather than messages are kept: the garbage collector has none of it to do.
            for append, value in fields:
                append(value(message))
            self._count += 1
            expected += 1
        return _Taken(scan.end, expected, None)

    def finish(self) -> pa.RecordBatch:
        schema = self._plan.schema
        return _make_batch([self._column(field) for field in schema], schema, self._count)

    def _column(self, field: pa.Field) -> pa.Array:
        if field.name == "topic":
            return self._plan.topic_column(self._count)
        if field.name == "offset":
            return pa.array(range(self._first_offset, self._first_offset + self._count), field.type)
        values = self._values[field.name]
        if field.name == "message_topic":
            values = [None if value == self._plan.topic else value for value in values]
        elif field.name == "message_offset":
            numbered = enumerate(values, self._first_offset)
            values = [None if value == offset else value for offset, value in numbered]
        return pa.array(values, field.type)


# Columns by their names in the compiled loops, with the bits of a value.
_FIXED: Final = {
    "offset": ("NUMBERS", 64),
    "publish_time": ("TIMES", 64),
    "schema_id": ("SCHEMA_IDS", 64),
    "schema_version": ("SCHEMA_VERSIONS", 32),
    "request_id": ("REQUEST_IDS", 64),
    "producer_id": ("PRODUCER_IDS", 64),
    "message_offset": ("MESSAGE_OFFSETS", 64),
    "publish_time_ms": ("EXACT_TIMES", 64),
}
_VARIABLE: Final = {
    "producer_name": "NAMES",
    "payload": "PAYLOADS",
    "routing_key": "ROUTING_KEYS",
    "message_topic": "MESSAGE_TOPICS",
    "broker_addr": "BROKERS",
    "subscription_name": "SUBSCRIPTIONS",
}
_NULLABLE: Final = frozenset(
    {
        "routing_key",
        "schema_id",
        "schema_version",
        "message_topic",
        "message_offset",
        "broker_addr",
        "subscription_name",
        "publish_time_ms",
    }
)
_ENTRY: Final = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.string())])

# What a batch needs room for, and how much of it for each byte of frames, until batches have shown
# it: rows, entries of attributes, and the bytes of columns.
_FILLING: Final = {
    "ROWS": 1 / 128,
    "ATTRIBUTES": 1 / 128,
    "NAMES": 1 / 8,
    "PAYLOADS": 1.0,
    "KEYS": 1 / 16,
    "VALUES": 1 / 16,
    "ROUTING_KEYS": 1 / 32,
    "MESSAGE_TOPICS": 0,
    "BROKERS": 1 / 64,
    "SUBSCRIPTIONS": 1 / 64,
}


class _Room(NamedTuple):
    """Something of which a batch has only so much, with its fields in the compiled loops."""

    name: str
    used: int
    """The field that says how much is used."""
    capacity: int
    """The field that says how much there is."""
    bytes_min: int
    """How many bytes of frames there are at least to one of it."""


class _Slot(NamedTuple):
    """A buffer of a batch."""

    field: int
    """Where its address goes."""
    room: _Room
    bits: int
    """For each one of `room`."""
    extra_bytes: int

    def size(self, count: int) -> int:
        return (self.bits * count + 7) // 8 + self.extra_bytes


class _Layout:
    """The buffers that some columns need."""

    def __init__(self, schema: pa.Schema, codec: Codec) -> None:
        at = _loops()
        rows = _Room("ROWS", at.ROWS, at.ROWS_MAX, _FRAME_BYTES_MIN[codec])
        self.rooms = {-1: rows}
        self.slots: list[_Slot] = []

        def add_room(name: str, bytes_min: int) -> _Room:
            block = getattr(at, name)
            room = _Room(name, block + at.DATA_BYTES, block + at.DATA_BYTES_MAX, bytes_min)
            self.rooms[block] = room
            return room

        def add_variable(name: str, count: _Room) -> None:
            block = getattr(at, name)
            self.slots.append(_Slot(block + at.OFFSETS, count, 32, 4))
            self.slots.append(_Slot(block + at.DATA, add_room(name, 1), 8, 0))

        for column in schema.names:
            block = -1
            if column in _FIXED:
                name, bits = _FIXED[column]
                block = getattr(at, name)
                self.slots.append(_Slot(block + at.OFFSETS, rows, bits, 0))
            elif column in _VARIABLE:
                name = _VARIABLE[column]
                block = getattr(at, name)
                add_variable(name, rows)
            elif column == "attributes":
                self.slots.append(_Slot(at.ATTRIBUTES + at.OFFSETS, rows, 32, 4))
                entries = add_room("ATTRIBUTES", 2)
                add_variable("KEYS", entries)
                add_variable("VALUES", entries)
            if column in _NULLABLE:
                self.slots.append(_Slot(block + at.VALIDITY, rows, 1, 0))


class _CompiledRows:
    """Rows in Arrow's buffers, filled by machine code.

    The buffers are as large as the batches before this one make likely. When one is full the loop
    stops, and goes on with more room; at the end what is left over is given back.
    """

    def __init__(self, plan: _Plan, layout: _Layout, size_bytes: int) -> None:
        at = _loops()
        self._plan = plan
        self._layout = layout
        self._taken_bytes = 0
        self._fields = fields = at.new_fields()
        fields[at.PERMITTED] = -1
        fields[at.BODY_BYTES_MAX] = FRAME_BODY_BYTES_MAX
        fields[at.IS_VARINT] = plan.codec is Codec.BINCODE2
        fields[at.TOPIC] = plan.topic_bytes.address
        fields[at.TOPIC_BYTES] = plan.topic_bytes.size
        for room in layout.rooms.values():
            likely = int(size_bytes * plan.filling[room.name] * 1.03) + 64
            fields[room.capacity] = min(likely, size_bytes // room.bytes_min + 1)
        self._buffers: dict[int, pa.ResizableBuffer] = {}
        for slot in layout.slots:
            size = slot.size(int(fields[slot.room.capacity]))
            buffer = pa.allocate_buffer(size, resizable=True)
            self._buffers[slot.field] = buffer
            fields[slot.field] = buffer.address

    def take(self, view: memoryview, position: int, expected: int, end_offset: int) -> _Taken:
        at, fields = _loops(), self._fields
        buffer = pa.py_buffer(view)
        fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
        fields[at.POSITION] = position
        fields[at.OFFSET], fields[at.END_OFFSET] = expected, end_offset
        error: CorruptDataError | None = None
        while error is None:
            status = at.decode(fields)
            end, next_offset = int(fields[at.POSITION]), int(fields[at.OFFSET])
            if status == at.DONE:
                break
            if status == at.NEEDS_ROOM:
                self._make_room(self._layout.rooms[int(fields[at.ROOM])], len(view) - end)
                continue
            error = self._plan.judge_body(view, end, next_offset)
            if error is None and status == at.BODY_IS_BAD:
                raise InvariantError(
                    "a message that one decoder takes and the other does not",
                    topic=self._plan.topic,
                    offset=next_offset,
                )
            fields[at.PERMITTED] = next_offset
        self._taken_bytes += end - position
        return _Taken(end, next_offset, error)

    def _make_room(self, room: _Room, left_bytes: int) -> None:
        """Makes room for all that so many bytes of frames can hold of it."""
        fields = self._fields
        capacity = int(fields[room.used]) + left_bytes // room.bytes_min + 1
        fields[room.capacity] = capacity
        for slot in self._layout.slots:
            if slot.room is room:
                buffer = self._buffers[slot.field]
                buffer.resize(slot.size(capacity))
                fields[slot.field] = buffer.address

    def finish(self) -> pa.RecordBatch:
        plan, fields = self._plan, self._fields
        if self._taken_bytes:
            for room in self._layout.rooms.values():
                filling = int(fields[room.used]) / self._taken_bytes
                # More at once, less by and by: asking for too little costs a copy.
                before = plan.filling[room.name]
                plan.filling[room.name] = max(filling, (filling + before) / 2)
        for slot in self._layout.slots:
            buffer = self._buffers[slot.field]
            size = slot.size(int(fields[slot.room.used]))
            buffer.resize(size, shrink_to_fit=buffer.size - size > _LEFT_OVER_BYTES + size // 8)
        count = int(fields[_loops().ROWS])
        return _make_batch(
            [self._column(field, count) for field in plan.schema], plan.schema, count
        )

    def _column(self, field: pa.Field, count: int) -> pa.Array:
        at, buffers = _loops(), self._buffers
        if field.name == "topic":
            return self._plan.topic_column(count)
        if field.name == "attributes":
            entries = int(self._fields[at.ATTRIBUTES + at.DATA_BYTES])
            children = [
                pa.Array.from_buffers(pa.string(), entries, [None, *self._parts(block)], 0)
                for block in (at.KEYS, at.VALUES)
            ]
            entry = pa.Array.from_buffers(_ENTRY, entries, [None], 0, children=children)
            offsets = buffers[at.ATTRIBUTES + at.OFFSETS]
            return pa.Array.from_buffers(field.type, count, [None, offsets], 0, children=[entry])
        name = _VARIABLE.get(field.name) or _FIXED[field.name][0]
        block = getattr(at, name)
        validity, nulls = None, 0
        if field.name in _NULLABLE:
            nulls = count - int(self._fields[block + at.VALID])
            validity = buffers[block + at.VALIDITY] if nulls else None
        return pa.Array.from_buffers(field.type, count, [validity, *self._parts(block)], nulls)

    def _parts(self, block: int) -> list[pa.Buffer]:
        """The buffers of a column without its validity."""
        parts = (self._buffers.get(block + part) for part in (_loops().OFFSETS, _loops().DATA))
        return [part for part in parts if part is not None]


def _make_batch(arrays: list[pa.Array], schema: pa.Schema, count: int) -> pa.RecordBatch:
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    # Rows without columns: what is left of them is how many they are.
    return pa.RecordBatch.from_struct_array(
        pa.StructArray.from_buffers(pa.struct([]), count, [None])
    )


class FrameFeed:
    """Turns a stream of chunks of any size into record batches, carrying the unfinished frame over.

    Holds at most one partial frame. After `corrupt` is set nothing more comes out: what follows
    damage cannot be trusted to be aligned.
    """

    def __init__(
        self, decoder: ColumnarDecoder, *, expected_offset: int, end_offset: int | None = None
    ) -> None:
        """Makes a feed.

        Args:
            decoder: What decodes the frames.
            expected_offset: The first frame's offset.
            end_offset: Stop before this offset; what is fed beyond it is ignored.

        Raises:
            InvalidRequestError: The offset is none that Arrow can hold.
        """
        _check_offset(expected_offset)
        self._plan = decoder._plan  # noqa: SLF001 - the two are made for each other
        self._end_offset = _offset_end(end_offset)
        self._carry = bytearray()
        self._needed = FRAME_HEADER_SIZE
        self._error: CorruptDataError | None = None
        name_bytes = max(len(decoder.topic.encode()), 1)
        # So many bytes cannot have so many frames that their topic's name fills its column.
        unfilled_bytes = _COLUMN_BYTES_MAX // name_bytes * _FRAME_BYTES_MIN[decoder.codec]
        self._bytes_max = max(
            min(_BATCH_BYTES_MAX, unfilled_bytes), FRAME_HEADER_SIZE + FRAME_BODY_BYTES_MAX
        )
        self.next_offset = expected_offset
        """The offset after the last row's."""
        self.corrupt: Corrupt | None = None
        """Why the frames ended, if they did."""

    @property
    def carried_bytes(self) -> int:
        """The size of the partial frame held."""
        return len(self._carry)

    @property
    def is_done(self) -> bool:
        """Whether the end offset is reached."""
        return self.next_offset >= self._end_offset

    def feed(self, chunk: Buffer) -> Iterator[pa.RecordBatch]:
        """Takes the next bytes and yields the rows that they complete.

        One batch, or none if no frame ends in the chunk; more only for chunks of about a GiB.
        The chunk is read while the iterator runs, which has to be exhausted before the next call.

        Raises:
            CorruptDataError: A frame is whole and its body is not a message in the codec; raised
                when all rows before it have come out, and again by every later call.
        """
        if self._error is not None:
            raise self._error.again()
        view = _as_view(chunk)
        position, size = 0, len(view)
        if self._is_open and len(self._carry) + size < self._needed:
            self._carry += view
            return
        while position < size and self._is_open:
            limit = min(size, position + self._bytes_max)
            first = self.next_offset
            rows = self._plan.collect(limit - position + len(self._carry))
            if self._carry:
                position = self._complete_carried(rows, view, position)
            if position < limit and self._is_open and not self._carry:
                position = self._take_frames(rows, view, position, limit)
            if self.next_offset > first:
                yield rows.finish()
            if self._error is not None:
                raise self._error

    @property
    def _is_open(self) -> bool:
        return not self.is_done and self.corrupt is None and self._error is None

    def _complete_carried(self, rows: _Collector, view: memoryview, position: int) -> int:
        """Gives the carried frame the bytes that it lacks; returns the position behind them."""
        carry = self._carry
        # Twice at most: for the header, which tells the size, and for the rest.
        while carry and position < len(view):
            missing = view[position : position + self._needed - len(carry)]
            carry += missing
            position += len(missing)
            if len(carry) < self._needed:
                break
            frame = bytes(carry)
            end = self._take(rows, memoryview(frame), 0)
            stop = self._judge(frame, 0) if end == 0 and self._is_open else None
            if stop is None:
                carry.clear()
            self._needed = FRAME_HEADER_SIZE if stop is None else stop.size_bytes
        return position

    def _take_frames(self, rows: _Collector, view: memoryview, position: int, limit: int) -> int:
        """Takes the frames up to `limit`, and carries the last one if its end is still to come."""
        position = self._take(rows, view[:limit], position)
        if not self._is_open:
            return position
        stop = self._judge(view, position)
        if stop is not None:
            self._carry += view[position:]
            self._needed = stop.size_bytes
            return len(view)
        return position

    def _take(self, rows: _Collector, view: memoryview, position: int) -> int:
        end, self.next_offset, self._error = rows.take(
            view, position, self.next_offset, self._end_offset
        )
        return end

    def _judge(self, buffer: Buffer, position: int) -> NeedMore | None:
        """Why there is no frame at `position`; None if it is damage, or there is one."""
        stop = decode_frame(buffer, position, expected_offset=self.next_offset)
        if isinstance(stop, NeedMore):
            return stop
        if isinstance(stop, Corrupt):
            self.corrupt = stop
        return None


# -- encoding -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedFrames:
    """Frames that follow each other, ready to be written."""

    data: bytes
    count: int
    """How many frames."""
    first_offset: int
    """The first frame's offset."""
    publish_time_max: int
    """The latest publish time, in milliseconds."""


class _Times(NamedTuple):
    """Publish times as integers, and how to make milliseconds of them."""

    values: pa.Array
    multiplier: int
    divisor: int


class _Maps(NamedTuple):
    """Attributes: where the entries of each row begin in `keys` and `values`."""

    maps: pa.Array
    keys: pa.Array
    values: pa.Array
    first_entry: int
    """The entry of the maps' child that is the first of `keys`."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns of a batch in the types that encoding takes, None for those not given."""

    count: int
    payload: pa.Array
    publish_time: _Times | None
    producer_name: pa.Array | None
    attributes: _Maps | None
    routing_key: pa.Array | None
    schema_id: pa.Array | None
    schema_version: pa.Array | None

    @property
    def bytes_max(self) -> int:
        """No less than what the frames have beside the topic's name."""
        entries = 0 if self.attributes is None else len(self.attributes.keys)
        sizes: list[int] = [
            column.nbytes
            for column in (
                self.payload,
                self.producer_name,
                self.routing_key,
                None if self.attributes is None else self.attributes.keys,
                None if self.attributes is None else self.attributes.values,
            )
            if column is not None
        ]
        # Header, eleven integers and four tags; two lengths for an attribute.
        return sum(sizes) + self.count * (16 + 11 * 9 + 4) + entries * 18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    """What the frames of a batch have in common."""

    topic: str
    codec: Codec
    first_offset: int
    now_ms: int
    payload_bytes_max: int
    producer_id: int
    first_request_id: int
    segment_bytes: int


def encode_frames(
    batch: pa.RecordBatch,
    *,
    topic: str,
    codec: Codec,
    first_offset: int,
    now_ms: int,
    payload_bytes_max: int,
    producer_id: int = 0,
    first_request_id: int = 0,
    segment_bytes: int = 1 * MIB,
    is_compiled: bool | None = None,
) -> list[EncodedFrames]:
    """Encodes rows as frames: row `i` is the message of offset `first_offset + i`.

    Args:
        batch: Any of `COLUMNS`, in any order; `payload` has to be there and has no nulls. `topic`
            and `offset` are ignored: `topic` and `first_offset` decide.
        topic: The topic's name, which is part of every body.
        codec: How bodies are encoded.
        first_offset: The first frame's offset.
        now_ms: The publish time of rows without one, in milliseconds.
        payload_bytes_max: The most bytes of a payload.
        producer_id: For all messages.
        first_request_id: The first message's request id, one more for each one after it.
        segment_bytes: About the size of each result. A larger frame is one alone.
        is_compiled: Whether machine code does it: None for where it is available, True to
            require it.

    Returns:
        The frames in segments that end at frame boundaries; an empty list for no rows.

    Raises:
        InvalidRequestError: A column is unknown or of another type, a value is not one that a
            message can have, or the codec has no such field.
        MessageTooLargeError: A payload, or what surrounds it, is over its limit.
        ConfigError: The compiled loops are required and not available.
    """
    writing = _Writing(
        topic=topic,
        codec=codec,
        first_offset=first_offset,
        now_ms=now_ms,
        payload_bytes_max=payload_bytes_max,
        producer_id=producer_id,
        first_request_id=first_request_id,
        segment_bytes=min(segment_bytes, _BATCH_BYTES_MAX),
    )
    _check_writing(writing, batch.num_rows)
    is_fast = _wants_compiled(is_compiled)
    table = _as_table(batch)
    if not table.count:
        return []
    if is_fast:
        return _encode_compiled(table, writing)
    kernels.count_work(batch.nbytes * _ROWS_WEIGHT)
    return _encode_pure(table, writing)


def _check_writing(writing: _Writing, count: int) -> None:
    _check_offset(writing.first_offset)
    _check_offset(writing.first_offset + count)
    if not 0 <= writing.now_ms <= _TIME_MS_MAX:
        raise InvalidRequestError(f"now_ms {writing.now_ms} is not in 0..{_TIME_MS_MAX}")
    if not 0 <= writing.producer_id < 1 << 64:
        raise InvalidRequestError(f"producer_id {writing.producer_id} is not in 0..2^64-1")
    if not 0 <= writing.first_request_id <= (1 << 64) - max(count, 1):
        raise InvalidRequestError(
            f"{count} request ids from {writing.first_request_id} on are not in 0..2^64-1"
        )
    try:
        writing.topic.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"topic {writing.topic!r} is not valid Unicode text") from error


def _as_table(batch: pa.RecordBatch) -> _Table:
    """Checks the columns and brings each into the one type that encoding takes.

    Arrow is told to look through all of it first: a batch may come from anywhere, and machine code
    believes the offsets in it.
    """
    columns: dict[str, pa.Array] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in COLUMNS:
            raise _unknown_column(name)
        if name in columns:
            raise InvalidRequestError(f"column {name!r} twice", hint="name each column once")
        columns[name] = column
        if name in {"topic", "offset"}:
            continue
        try:
            column.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidRequestError(
                f"column {name!r} is not a valid Arrow array: {error}"
            ) from error
    payload = columns.get("payload")
    if payload is None:
        raise InvalidRequestError(
            "there is no column 'payload'", hint="payload is the one column that has to be there"
        )
    payload = _cast(payload, "column 'payload'", pa.large_binary(), _is_blob, "binary or string")
    if payload.null_count:
        row = pc.index(payload.is_null(), True).as_py()
        raise InvalidRequestError(
            f"row {row} has no payload", hint="an empty payload is b'', not null"
        )

    def text(name: str) -> pa.Array | None:
        column = columns.get(name)
        return None if column is None else _as_text(column, f"column {name!r}")

    times, attributes = columns.get("publish_time"), columns.get("attributes")
    return _Table(
        count=batch.num_rows,
        payload=payload,
        publish_time=None if times is None else _as_times(times),
        producer_name=text("producer_name"),
        attributes=None if attributes is None else _as_maps(attributes),
        routing_key=text("routing_key"),
        schema_id=_as_integers(columns.get("schema_id"), "schema_id", 64),
        schema_version=_as_integers(columns.get("schema_version"), "schema_version", 32),
    )


def _unknown_column(name: str) -> InvalidRequestError:
    renamed = {"value": "payload", "key": "routing_key"}.get(name)
    return InvalidRequestError(
        f"there is no column {name!r}",
        hint=f"rename it to {renamed!r}"
        if renamed
        else f"the columns are {', '.join(COLUMNS)}; drop or rename it",
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_blob(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
        or _is_text(kind)
    )


def _cast(
    column: pa.Array,
    what: str,
    kind: pa.DataType,
    accepts: Callable[[pa.DataType], bool],
    expected: str,
) -> pa.Array:
    found = column.type
    plain = found.value_type if pa.types.is_dictionary(found) else found
    if not (accepts(plain) or pa.types.is_null(plain)):
        raise InvalidRequestError(
            f"{what} is {found}, not {expected}", hint="cast it before it is written"
        )
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"{what} does not fit {expected}: {error}") from error


def _as_text(column: pa.Array, what: str) -> pa.Array:
    return _cast(column, what, pa.large_string(), _is_text, "string")


def _as_integers(column: pa.Array | None, name: str, bits: int) -> pa.Array | None:
    """The column as signed integers; unsigned ones keep their bits."""
    if column is None:
        return None
    kind = pa.int64() if bits == 64 else pa.int32()
    if column.type == (pa.uint64() if bits == 64 else pa.uint32()):
        return column.view(kind)
    return _cast(
        column, f"column {name!r}", kind, pa.types.is_integer, f"an integer of {bits} bits"
    )


_UNITS: Final = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


def _as_times(column: pa.Array) -> _Times:
    kind = column.type
    if pa.types.is_null(kind):
        return _Times(column.cast(pa.int64()), 1, 1)
    if not pa.types.is_timestamp(kind):
        raise InvalidRequestError(
            f"column 'publish_time' is {kind}, not a timestamp", hint="cast it before it is written"
        )
    return _Times(column.view(pa.int64()), *_UNITS[kind.unit])


def _as_maps(column: pa.Array) -> _Maps | None:
    kind = column.type
    if pa.types.is_null(kind):
        return None
    if not pa.types.is_map(kind):
        raise InvalidRequestError(
            f"column 'attributes' is {kind}, not map<string, string>",
            hint="cast it before it is written",
        )
    first, last = 0, 0
    if len(column):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return _Maps(
        column,
        _as_text(column.keys.slice(first, last - first), "a part of column 'attributes'"),
        _as_text(column.items.slice(first, last - first), "a part of column 'attributes'"),
        first,
    )


def _encode_compiled(table: _Table, writing: _Writing) -> list[EncodedFrames]:
    at = _loops()
    fields = at.new_fields()
    writer = VarintWriter() if writing.codec is Codec.BINCODE2 else FixintWriter()
    middle = writer.u64(writing.producer_id).text(writing.topic).text("").finish()
    held = pa.py_buffer(middle)
    fields[at.MIDDLE], fields[at.MIDDLE_BYTES] = held.address, held.size
    fields[at.OFFSET], fields[at.ROWS_MAX] = writing.first_offset, table.count
    fields[at.REQUEST_ID] = _signed(writing.first_request_id, 64)
    fields[at.IS_VARINT] = writing.codec is Codec.BINCODE2
    fields[at.BODY_BYTES_MAX] = FRAME_BODY_BYTES_MAX
    fields[at.PAYLOAD_BYTES_MAX] = min(writing.payload_bytes_max, FRAME_BODY_BYTES_MAX)
    fields[at.ENVELOPE_BYTES_MAX] = ENVELOPE_SIZE_BYTES_MAX
    fields[at.SEGMENT_BYTES] = writing.segment_bytes
    fields[at.PERMITTED] = -1
    fields[at.TIME_DEFAULT] = writing.now_ms
    _point_at_columns(fields, table)
    # A segment, or all that there is where that is less.
    room = min(writing.segment_bytes, table.bytes_max + table.count * len(middle))
    buffer = pa.allocate_buffer(max(room, 0), resizable=True)
    fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
    segments: list[EncodedFrames] = []
    first_row = 0
    while True:
        status = at.encode(fields)
        row, size = int(fields[at.ROWS]), int(fields[at.POSITION])
        if status == at.NEEDS_ROOM:
            buffer.resize(int(fields[at.ROOM]))
            fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
        elif status in (at.BODY_IS_BAD, at.CROWDED):
            # The row as Python sees it: raises what is wrong with it.
            for message in _messages(table, writing, range(row, row + 1)):
                encode_frame(message.msg_id.topic_offset, _encode_body(message, writing))
            check(status == at.CROWDED, f"row {row} is one to one encoder and none to the other")
            fields[at.PERMITTED] = fields[at.OFFSET]
        else:
            segments.append(
                EncodedFrames(
                    buffer.slice(0, size).to_pybytes(),
                    row - first_row,
                    writing.first_offset + first_row,
                    int(fields[at.TIME_LAST]),
                )
            )
            if status == at.DONE:
                return segments
            first_row = row
            fields[at.POSITION] = fields[at.TIME_LAST] = 0


def _point_at_columns(fields: Any, table: _Table) -> None:  # noqa: ANN401 - an array
    """Tells the compiled loop where the columns lie; the table has to stay alive meanwhile."""
    at = _loops()

    def point(block: int, array: pa.Array, width: int) -> list[Any]:
        return _point(fields, block, array, width)

    def point_at_variable(block: int, array: pa.Array | None) -> None:
        # Arrow gives an empty array no buffers, and it has no value that would be looked at.
        if array is None or not len(array):
            return
        data = point(block, array, 8)[2]
        if data is not None:
            fields[block + at.DATA], fields[block + at.DATA_BYTES] = data.address, data.size

    point_at_variable(at.PAYLOADS, table.payload)
    point_at_variable(at.NAMES, table.producer_name)
    point_at_variable(at.ROUTING_KEYS, table.routing_key)
    if (times := table.publish_time) is not None:
        point(at.TIMES, times.values, 8)
        fields[at.TIME_MULTIPLIER], fields[at.TIME_DIVISOR] = times.multiplier, times.divisor
        latest = ((_TIME_MS_MAX + 1) * times.divisor - 1) // times.multiplier
        fields[at.TIME_RAW_MAX] = min(latest, (1 << 63) - 1)
    if (maps := table.attributes) is not None:
        point(at.ATTRIBUTES, maps.maps, 4)
        fields[at.ATTRIBUTES + at.DATA] = maps.first_entry
        fields[at.ATTRIBUTES + at.DATA_BYTES] = len(maps.keys)
        point_at_variable(at.KEYS, maps.keys)
        point_at_variable(at.VALUES, maps.values)
    if table.schema_id is not None:
        point(at.SCHEMA_IDS, table.schema_id, 8)
    if table.schema_version is not None:
        point(at.SCHEMA_VERSIONS, table.schema_version, 4)


def _point(fields: Any, block: int, array: pa.Array, width: int) -> list[Any]:  # noqa: ANN401
    """Tells the compiled loop where one column lies; returns its buffers."""
    at = _loops()
    buffers: list[Any] = array.buffers()
    fields[block + at.OFFSETS] = buffers[1].address + width * array.offset
    if buffers[0] is not None and array.null_count:
        fields[block + at.VALIDITY] = buffers[0].address
        fields[block + at.VALIDITY_START] = array.offset
    return buffers


def _encode_pure(table: _Table, writing: _Writing) -> list[EncodedFrames]:
    segments: list[EncodedFrames] = []
    frames: list[bytes] = []
    size = time_max = 0
    first_offset = offset = writing.first_offset

    def cut() -> None:
        nonlocal size, time_max, first_offset
        segments.append(EncodedFrames(b"".join(frames), len(frames), first_offset, time_max))
        frames.clear()
        size, time_max, first_offset = 0, 0, offset

    for message in _messages(table, writing, range(table.count)):
        frame = encode_frame(offset, _encode_body(message, writing))
        if frames and size + len(frame) > writing.segment_bytes:
            cut()
        frames.append(frame)
        size += len(frame)
        time_max = max(time_max, message.publish_time)
        offset += 1
    if frames:
        cut()
    return segments


def _encode_body(message: StreamMessage, writing: _Writing) -> bytes:
    """The body of a row's message.

    Raises:
        As `encode_frames`.
    """
    row = message.msg_id.topic_offset - writing.first_offset
    size = len(message.payload)
    if size > writing.payload_bytes_max:
        raise MessageTooLargeError(
            f"row {row} has a payload of {size} bytes",
            topic=writing.topic,
            hint=f"at most {writing.payload_bytes_max}; storage.max_message_size sets the limit",
        )
    body = encode_message(message, writing.codec)
    envelope = len(body) - size
    if envelope > ENVELOPE_SIZE_BYTES_MAX:
        raise MessageTooLargeError(
            f"row {row} has names, keys and attributes of {envelope} bytes",
            topic=writing.topic,
            hint=f"at most {ENVELOPE_SIZE_BYTES_MAX}; large data belongs into the payload",
        )
    return body


def _messages(table: _Table, writing: _Writing, rows: range) -> Iterator[StreamMessage]:
    """The messages of some rows, a bounded number of them as Python objects at a time.

    Raises:
        InvalidRequestError: A value is not one that a message can have.
    """
    maps = None if table.attributes is None else table.attributes.maps
    times = table.publish_time
    for start in range(rows.start, rows.stop, _PURE_ROWS):
        count = min(_PURE_ROWS, rows.stop - start)
        values = zip(
            range(start, start + count),
            _values(table.payload, start, count),
            _values(None if times is None else times.values, start, count),
            _values(table.producer_name, start, count),
            _values(maps, start, count),
            _values(table.schema_id, start, count),
            _values(table.schema_version, start, count),
            _values(table.routing_key, start, count),
            strict=True,
        )
        for row, payload, time, name, attributes, schema_id, schema_version, routing_key in values:
            yield StreamMessage(
                request_id=writing.first_request_id + row,
                msg_id=MessageId(
                    producer_id=writing.producer_id,
                    topic_name=writing.topic,
                    topic_offset=writing.first_offset + row,
                ),
                payload=payload,
                publish_time=writing.now_ms if time is None else _milliseconds(times, time, row),
                producer_name=name or "",
                subscription_name="",
                attributes=_attributes(attributes or [], row),
                schema_id=None if schema_id is None else schema_id % (1 << 64),
                schema_version=None if schema_version is None else schema_version % (1 << 32),
                routing_key=routing_key,
            )


def _values(column: pa.Array | None, start: int, count: int) -> list[Any]:
    return [None] * count if column is None else column.slice(start, count).to_pylist()


def _milliseconds(times: _Times | None, value: int, row: int) -> int:
    if times is None:
        raise InvariantError("a time of a column that is not there")
    time_ms = value * times.multiplier // times.divisor
    if not 0 <= time_ms <= _TIME_MS_MAX:
        raise InvalidRequestError(
            f"row {row} has a publish_time of {time_ms} ms since 1970",
            hint="it has to lie between the years 1970 and 9999",
        )
    return time_ms


def _attributes(entries: list[tuple[str | None, str | None]], row: int) -> dict[str, str]:
    attributes: dict[str, str] = {}
    for key, value in entries:
        if key is None or value is None:
            raise InvalidRequestError(
                f"row {row} has an attribute {key!r} that is null",
                hint="drop it, or make it an empty string",
            )
        if key in attributes:
            raise InvalidRequestError(
                f"row {row} has the attribute {key!r} twice", hint="a message has each one once"
            )
        attributes[key] = value
    return attributes


# -- every field, back to frames ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoredFrames:
    """Frames of rows, in their order; offsets may be missing between them."""

    data: bytes
    starts: list[int]
    """Where each frame begins."""
    offsets: list[int]
    """The offset of each frame."""


_MICROSECONDS: Final = _Times(pa.array([], pa.int64()), 1, 1000)
_NEVER_NULL: Final = (
    "topic",
    "offset",
    "publish_time",
    "producer_name",
    "payload",
    "attributes",
    "request_id",
    "producer_id",
)


def restore_frames(
    batch: pa.RecordBatch, *, topic: str, codec: Codec, is_compiled: bool | None = None
) -> RestoredFrames:
    """The frames that rows were decoded from, byte for byte.

    Args:
        batch: The columns `EVERY_FIELD`, in this order, with offsets that ascend.
        topic: The topic's name.
        codec: How bodies are encoded.
        is_compiled: Whether machine code does it: None for where it is available, True to
            require it.

    Raises:
        CorruptDataError: A value is none that a decoder gives.
        ConfigError: The compiled loops are required and not available.
    """
    is_fast = _wants_compiled(is_compiled)
    if not batch.schema.equals(arrow_schema(EVERY_FIELD)):
        raise CorruptDataError("the columns are not those of messages", topic=topic)
    for name in _NEVER_NULL:
        if batch.column(name).null_count:
            raise CorruptDataError(f"a message without {name}", topic=topic)
    if not batch.num_rows:
        return RestoredFrames(b"", [], [])
    try:
        if is_fast:
            return _restore_compiled(batch, topic, codec)
        kernels.count_work(batch.nbytes * _ROWS_WEIGHT)
        return _restore_pure(batch, topic, codec)
    except (InvalidRequestError, MessageTooLargeError) as error:
        raise CorruptDataError(f"not a message: {error.message}", topic=topic) from error


def _restore_compiled(batch: pa.RecordBatch, topic: str, codec: Codec) -> RestoredFrames:
    at = _loops()
    visible = batch.select([name for name in COLUMNS if name not in {"topic", "offset"}])
    table = _as_table(visible)
    texts = {
        block: _as_text(batch.column(name), f"column {name!r}")
        for name, block in (
            ("message_topic", at.MESSAGE_TOPICS),
            ("broker_addr", at.BROKERS),
            ("subscription_name", at.SUBSCRIPTIONS),
        )
        if batch.column(name).null_count < batch.num_rows
    }
    numbers = {
        block: batch.column(name)
        for name, block in (
            ("offset", at.NUMBERS),
            ("request_id", at.REQUEST_IDS),
            ("producer_id", at.PRODUCER_IDS),
            ("message_offset", at.MESSAGE_OFFSETS),
            ("publish_time_ms", at.EXACT_TIMES),
        )
        if batch.column(name).null_count < batch.num_rows
    }
    fields = at.new_fields()
    own = pa.py_buffer(topic.encode())
    fields[at.TOPIC], fields[at.TOPIC_BYTES] = own.address, own.size
    fields[at.ROWS_MAX] = table.count
    fields[at.IS_VARINT] = codec is Codec.BINCODE2
    fields[at.BODY_BYTES_MAX] = fields[at.PAYLOAD_BYTES_MAX] = FRAME_BODY_BYTES_MAX
    fields[at.ENVELOPE_BYTES_MAX] = FRAME_BODY_BYTES_MAX
    fields[at.SEGMENT_BYTES] = _COLUMN_BYTES_MAX
    fields[at.PERMITTED] = -1
    _point_at_columns(fields, table)
    for block, column in texts.items():
        _point(fields, block, column, 8)
        data = column.buffers()[2]
        if data is not None:
            fields[block + at.DATA], fields[block + at.DATA_BYTES] = data.address, data.size
    for block, column in numbers.items():
        _point(fields, block, column, 8)
    beside = sum(column.nbytes for column in texts.values())
    buffer = pa.allocate_buffer(table.bytes_max + beside + table.count * own.size, resizable=True)
    starts = pa.allocate_buffer(8 * table.count)
    fields[at.STARTS] = starts.address
    fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
    while (status := at.encode(fields)) != at.DONE:
        row = int(fields[at.ROWS])
        if status == at.NEEDS_ROOM:
            buffer.resize(int(fields[at.ROOM]))
            fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
        elif status == at.SEGMENT_IS_FULL:
            raise InvalidRequestError(f"{table.count} rows are too many bytes of frames")
        else:
            # The row as Python sees it: raises what is wrong with it.
            _restore_pure(batch.slice(row, 1), topic, codec)
            check(status == at.CROWDED, f"row {row} is one to one encoder and none to the other")
            fields[at.PERMITTED] = fields[at.OFFSET]
    positions = pa.Array.from_buffers(pa.int64(), table.count, [None, starts])
    size = int(fields[at.POSITION])
    return RestoredFrames(
        buffer.slice(0, size).to_pybytes(),
        positions.to_numpy().tolist(),
        batch.column("offset").to_numpy().tolist(),
    )


def _restore_pure(batch: pa.RecordBatch, topic: str, codec: Codec) -> RestoredFrames:
    frames: list[bytes] = []
    starts: list[int] = []
    offsets: list[int] = []
    size = 0
    at = batch.schema.get_field_index("publish_time")
    batch = batch.set_column(at, "publish_time", batch.column(at).view(pa.int64()))
    for start in range(0, batch.num_rows, _PURE_ROWS):
        for row, values in enumerate(batch.slice(start, _PURE_ROWS).to_pylist(), start):
            message = _restored(values, topic, row)
            frame = encode_frame(values["offset"], encode_message(message, codec))
            frames.append(frame)
            starts.append(size)
            offsets.append(values["offset"])
            size += len(frame)
    return RestoredFrames(b"".join(frames), starts, offsets)


def _restored(values: dict[str, Any], topic: str, row: int) -> StreamMessage:
    """The message of a row with every field."""
    time_ms = values["publish_time_ms"]
    if time_ms is None:
        time_ms = _milliseconds(_MICROSECONDS, values["publish_time"], row)
    schema_id, schema_version = values["schema_id"], values["schema_version"]
    own_topic, own_offset = values["message_topic"], values["message_offset"]
    return StreamMessage(
        request_id=values["request_id"],
        msg_id=MessageId(
            producer_id=values["producer_id"],
            topic_name=topic if own_topic is None else own_topic,
            broker_addr=values["broker_addr"] or "",
            topic_offset=values["offset"] if own_offset is None else own_offset,
        ),
        payload=values["payload"],
        publish_time=time_ms,
        producer_name=values["producer_name"],
        subscription_name=values["subscription_name"],
        attributes=_attributes(values["attributes"], row),
        schema_id=None if schema_id is None else schema_id % (1 << 64),
        schema_version=None if schema_version is None else schema_version % (1 << 32),
        routing_key=values["routing_key"],
    )
