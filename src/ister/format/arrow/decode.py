"""Decodes frames as Arrow record batches; see `ister.format.arrow`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from ister import kernels
from ister.errors import CorruptDataError, InvalidRequestError, InvariantError
from ister.format.arrow import loops as at
from ister.format.arrow.loops import (
    ROWS_WEIGHT,
    TIME_MS_MAX,
    TIME_US_CLAMPED,
    loops,
    wants_compiled,
)
from ister.format.arrow.schema import (
    BATCH_BYTES_MAX,
    COLUMN_BYTES_MAX,
    arrow_schema,
    check_offset,
    cut_offset,
    make_batch,
    to_signed,
)
from ister.format.crc import Buffer
from ister.format.frame import (
    FRAME_HEADER_SIZE,
    Corrupt,
    Frame,
    NeedMore,
    decode_frame,
    scan_frames,
)
from ister.format.message import decode_message
from ister.limits import FRAME_BODY_BYTES_MAX, KIB
from ister.model import Codec, StreamMessage

_FRAME_BYTES_MIN: Final = {Codec.BINCODE1: 16 + 73, Codec.BINCODE2: 16 + 10}
# A buffer may be this much, plus an eighth, larger than its content: shrinking it takes a copy.
_SLACK_BYTES: Final = 16 * KIB


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
    """How far a collector got in a buffer."""

    end: int
    next_offset: int
    error: CorruptDataError | None
    """Set if the frame at `end` is intact and its body is not a message."""


class _Collector(Protocol):
    """Collects the rows of one batch, from one or more buffers."""

    def take(self, view: memoryview, position: int, expected: int, end_offset: int) -> _Taken:
        """Adds the frames from `position` on."""
        ...

    def finish(self) -> pa.RecordBatch:
        """The batch of everything that was added."""
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
        """Creates a decoder.

        Args:
            topic: The topic's name, which becomes the column `topic`.
            codec: How the bodies are encoded.
            columns: What to build; see `arrow_schema`.
            is_compiled: Whether to use compiled code: None if it is available, True to require it.

        Raises:
            InvalidRequestError: A column is unknown, or requested twice.
            ConfigError: The compiled loops are required and not available.
        """
        self.topic = topic
        self.codec = codec
        self.schema = arrow_schema(columns)
        """The columns of the batches."""
        self.is_compiled = wants_compiled(is_compiled)
        """Whether this decoder runs as compiled code."""
        self.topic_bytes = pa.py_buffer(topic.encode())
        self.filling = dict(_FILLING)
        """How much of each kind of room a byte of frames has taken so far."""
        self._layout = _Layout(self.schema, codec) if self.is_compiled else None
        self._topics = pa.array([], pa.string())

    def decode(
        self,
        buffer: Buffer,
        position: int = 0,
        *,
        expected_offset: int,
        end_offset: int | None = None,
    ) -> DecodedFrames:
        """Decodes the frames in `buffer`, each checked by crc and offset.

        Args:
            buffer: Bytes that hold frames from `position` on.
            position: Where the first frame begins.
            expected_offset: The first frame's offset.
            end_offset: Stop before this offset.

        Raises:
            CorruptDataError: A frame is intact and its body is not a message in this codec. The
                error has its `offset`; decoding with that as `end_offset` gives the rows before.
            InvalidRequestError: The position is outside of the buffer, the offset does not fit
                into its column, or the rows do not fit into one batch.
        """
        view = _as_view(buffer)
        if not 0 <= position <= len(view):
            raise InvalidRequestError(f"position {position} in a buffer of {len(view)} bytes")
        check_offset(expected_offset)
        if len(view) - position > COLUMN_BYTES_MAX:
            raise self._too_much(f"{len(view) - position} bytes of frames")
        offset_end = cut_offset(end_offset)
        rows = self.collect(len(view) - position)
        end, next_offset, error = rows.take(view, position, expected_offset, offset_end)
        if error is not None:
            raise error
        stop: Frame | NeedMore | Corrupt = NeedMore(FRAME_HEADER_SIZE)
        if next_offset < offset_end:
            stop = decode_frame(view, end, expected_offset=next_offset)
        if isinstance(stop, Frame):
            raise InvariantError(f"decoding stopped before a good frame at {end}")
        return DecodedFrames(rows.finish(), end, next_offset, stop)

    # -- for feeds and collectors -----------------------------------------------------------

    def collect(self, size_bytes: int) -> _Collector:
        """Begins a batch of about `size_bytes` of frames."""
        if self._layout is None:
            return _PythonRows(self)
        return _CompiledRows(self, self._layout, size_bytes)

    def topic_column(self, count: int) -> pa.Array:
        """The topic's name `count` times, out of one array that all batches share."""
        # Threads may make it at the same time: each uses the one that it has seen.
        topics = self._topics
        if len(topics) < count:
            rows_max = COLUMN_BYTES_MAX // max(self.topic_bytes.size, 1)
            if count > rows_max:
                raise self._too_much(f"{count} rows with their topic's name")
            # Somewhat more, so that batches that grow little by little do not rebuild it each time.
            size = min(count + count // 8, rows_max)
            topics = self._topics = pa.repeat(pa.scalar(self.topic, pa.string()), size)
        return topics.slice(0, count)

    def check_body(self, view: memoryview, position: int, offset: int) -> CorruptDataError | None:
        """Why the body of the intact frame at `position` is not a message; None if it is one."""
        frame = decode_frame(view, position, expected_offset=offset)
        if not isinstance(frame, Frame):
            raise InvariantError(f"taken for a frame at {position}: {frame}")
        try:
            decode_message(frame.body, self.codec)
        except CorruptDataError as error:
            return self.not_a_message(offset, error)
        return None

    def not_a_message(self, offset: int, error: CorruptDataError) -> CorruptDataError:
        """The error of `decode_message`, with topic and offset."""
        found = CorruptDataError(
            error.message,
            topic=self.topic,
            offset=offset,
            hint="the frame is intact: it may have been written in another codec",
        )
        found.__cause__ = error
        return found

    def _too_much(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{what} do not fit into one batch",
            topic=self.topic,
            hint="decode less at a time, or use a FrameFeed",
        )


def _as_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


_FIELDS: Final[dict[str, Callable[[StreamMessage], object]]] = {
    "publish_time": lambda message: (
        message.publish_time * 1000 if message.publish_time <= TIME_MS_MAX else TIME_US_CLAMPED
    ),
    "producer_name": lambda message: message.producer_name,
    "payload": lambda message: message.payload,
    "attributes": lambda message: list(message.attributes.items()),
    "routing_key": lambda message: message.routing_key,
    "schema_id": lambda message: to_signed(message.schema_id, 64),
    "schema_version": lambda message: to_signed(message.schema_version, 32),
    "request_id": lambda message: message.request_id,
    "producer_id": lambda message: message.msg_id.producer_id,
    "broker_addr": lambda message: message.msg_id.broker_addr or None,
    "subscription_name": lambda message: message.subscription_name,
    "publish_time_ms": lambda message: (
        message.publish_time if message.publish_time > TIME_MS_MAX else None
    ),
    # Values of these two that equal the frame's become null when the column is built.
    "message_topic": lambda message: message.msg_id.topic_name,
    "message_offset": lambda message: message.msg_id.topic_offset,
}


class _PythonRows:
    """Rows as lists of Python values, one for each column."""

    def __init__(self, decoder: ColumnarDecoder) -> None:
        self._decoder = decoder
        self._count = 0
        self._first_offset = 0
        self._values: dict[str, list[object]] = {
            name: [] for name in decoder.schema.names if name in _FIELDS
        }

    def take(self, view: memoryview, position: int, expected: int, end_offset: int) -> _Taken:
        kernels.count_work((len(view) - position) * ROWS_WEIGHT)
        scan = scan_frames(view, position, expected_offset=expected, end_offset=end_offset)
        if not self._count:
            self._first_offset = expected
        codec = self._decoder.codec
        fields = [(values.append, _FIELDS[name]) for name, values in self._values.items()]
        for start, end in zip(scan.starts, [*scan.starts[1:], scan.end], strict=False):
            try:
                message = decode_message(view[start + FRAME_HEADER_SIZE : end], codec)
            except CorruptDataError as error:
                return _Taken(start, expected, self._decoder.not_a_message(expected, error))
            # Values rather than messages are kept: they cost the garbage collector nothing.
            for append, value in fields:
                append(value(message))
            self._count += 1
            expected += 1
        return _Taken(scan.end, expected, None)

    def finish(self) -> pa.RecordBatch:
        schema = self._decoder.schema
        return make_batch([self._column(field) for field in schema], schema, self._count)

    def _column(self, field: pa.Field) -> pa.Array:
        if field.name == "topic":
            return self._decoder.topic_column(self._count)
        if field.name == "offset":
            return pa.array(range(self._first_offset, self._first_offset + self._count), field.type)
        values = self._values[field.name]
        if field.name == "message_topic":
            values = [None if value == self._decoder.topic else value for value in values]
        elif field.name == "message_offset":
            numbered = enumerate(values, self._first_offset)
            values = [None if value == offset else value for offset, value in numbered]
        return pa.array(values, field.type)


# Columns by their blocks in the compiled loops, with the bits of a value.
_FIXED: Final = {
    "offset": (at.NUMBERS, 64),
    "publish_time": (at.TIMES, 64),
    "schema_id": (at.SCHEMA_IDS, 64),
    "schema_version": (at.SCHEMA_VERSIONS, 32),
    "request_id": (at.REQUEST_IDS, 64),
    "producer_id": (at.PRODUCER_IDS, 64),
    "message_offset": (at.MESSAGE_OFFSETS, 64),
    "publish_time_ms": (at.EXACT_TIMES, 64),
}
_VARIABLE: Final = {
    "producer_name": at.NAMES,
    "payload": at.PAYLOADS,
    "routing_key": at.ROUTING_KEYS,
    "message_topic": at.MESSAGE_TOPICS,
    "broker_addr": at.BROKERS,
    "subscription_name": at.SUBSCRIPTIONS,
}
_NULLABLE: Final = {
    at.ROUTING_KEYS,
    at.SCHEMA_IDS,
    at.SCHEMA_VERSIONS,
    at.MESSAGE_TOPICS,
    at.MESSAGE_OFFSETS,
    at.BROKERS,
    at.SUBSCRIPTIONS,
    at.EXACT_TIMES,
}
_ENTRY: Final = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.string())])

_ROWS: Final = -1
"""As `at.ROOM` says it: room for rows, rather than in a column's block."""
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


class _Room(NamedTuple):
    """A limited resource of a batch, with its fields in the compiled loops."""

    block: int
    """A key of `_FILLING`."""
    used: int
    """The field that says how much is used."""
    capacity: int
    """The field that says how much there is."""
    bytes_min: int
    """The fewest bytes of frames that use one of it."""


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
        rows = _Room(_ROWS, at.ROWS, at.ROWS_MAX, _FRAME_BYTES_MIN[codec])
        self.rooms = {_ROWS: rows}
        self.slots: list[_Slot] = []

        def add_room(block: int, bytes_min: int) -> _Room:
            room = _Room(block, block + at.DATA_BYTES, block + at.DATA_BYTES_MAX, bytes_min)
            self.rooms[block] = room
            return room

        def add_variable(block: int, count: _Room) -> None:
            self.slots.append(_Slot(block + at.OFFSETS, count, 32, 4))
            self.slots.append(_Slot(block + at.DATA, add_room(block, 1), 8, 0))

        for column in schema.names:
            block = _ROWS
            if column in _FIXED:
                block, bits = _FIXED[column]
                self.slots.append(_Slot(block + at.OFFSETS, rows, bits, 0))
            elif column in _VARIABLE:
                block = _VARIABLE[column]
                add_variable(block, rows)
            elif column == "attributes":
                self.slots.append(_Slot(at.ATTRIBUTES + at.OFFSETS, rows, 32, 4))
                entries = add_room(at.ATTRIBUTES, 2)
                add_variable(at.KEYS, entries)
                add_variable(at.VALUES, entries)
            if block in _NULLABLE:
                self.slots.append(_Slot(block + at.VALIDITY, rows, 1, 0))


class _CompiledRows:
    """Rows in Arrow's buffers, filled by compiled code.

    The sizes of the buffers are estimated from the batches before. When one is full the loop stops
    and continues with a larger one; at the end, unused memory is given back.
    """

    def __init__(self, decoder: ColumnarDecoder, layout: _Layout, size_bytes: int) -> None:
        self._decoder = decoder
        self._layout = layout
        self._taken_bytes = 0
        self._fields = fields = loops().new_fields()
        fields[at.PERMITTED] = -1
        fields[at.BODY_BYTES_MAX] = FRAME_BODY_BYTES_MAX
        fields[at.IS_VARINT] = decoder.codec is Codec.BINCODE2
        fields[at.TOPIC] = decoder.topic_bytes.address
        fields[at.TOPIC_BYTES] = decoder.topic_bytes.size
        for room in layout.rooms.values():
            likely = int(size_bytes * decoder.filling[room.block] * 1.03) + 64
            fields[room.capacity] = min(likely, size_bytes // room.bytes_min + 1)
        self._buffers: dict[int, pa.ResizableBuffer] = {}
        for slot in layout.slots:
            size = slot.size(int(fields[slot.room.capacity]))
            buffer = pa.allocate_buffer(size, resizable=True)
            self._buffers[slot.field] = buffer
            fields[slot.field] = buffer.address

    def take(self, view: memoryview, position: int, expected: int, end_offset: int) -> _Taken:
        fields, decode = self._fields, loops().decode
        buffer = pa.py_buffer(view)
        fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
        fields[at.POSITION] = position
        fields[at.OFFSET], fields[at.END_OFFSET] = expected, end_offset
        error: CorruptDataError | None = None
        while error is None:
            status = decode(fields)
            end, next_offset = int(fields[at.POSITION]), int(fields[at.OFFSET])
            if status == at.DONE:
                break
            if status == at.NEEDS_ROOM:
                self._make_room(self._layout.rooms[int(fields[at.ROOM])], len(view) - end)
                continue
            error = self._decoder.check_body(view, end, next_offset)
            if error is None and status == at.BODY_IS_BAD:
                raise InvariantError(
                    "the compiled decoder refuses a message that the Python decoder accepts",
                    topic=self._decoder.topic,
                    offset=next_offset,
                )
            fields[at.PERMITTED] = next_offset
        self._taken_bytes += end - position
        return _Taken(end, next_offset, error)

    def _make_room(self, room: _Room, left_bytes: int) -> None:
        """Enlarges the buffers of `room` to what `left_bytes` of frames need at most."""
        fields = self._fields
        capacity = int(fields[room.used]) + left_bytes // room.bytes_min + 1
        fields[room.capacity] = capacity
        for slot in self._layout.slots:
            if slot.room is room:
                buffer = self._buffers[slot.field]
                buffer.resize(slot.size(capacity))
                fields[slot.field] = buffer.address

    def finish(self) -> pa.RecordBatch:
        schema, filling, fields = self._decoder.schema, self._decoder.filling, self._fields
        if self._taken_bytes:
            for room in self._layout.rooms.values():
                now = int(fields[room.used]) / self._taken_bytes
                # Rises at once and falls slowly: an estimate that is too low costs a copy.
                filling[room.block] = max(now, (now + filling[room.block]) / 2)
        for slot in self._layout.slots:
            buffer = self._buffers[slot.field]
            size = slot.size(int(fields[slot.room.used]))
            buffer.resize(size, shrink_to_fit=buffer.size - size > _SLACK_BYTES + size // 8)
        count = int(fields[at.ROWS])
        return make_batch([self._column(field, count) for field in schema], schema, count)

    def _column(self, field: pa.Field, count: int) -> pa.Array:
        buffers = self._buffers
        if field.name == "topic":
            return self._decoder.topic_column(count)
        if field.name == "attributes":
            entries = int(self._fields[at.ATTRIBUTES + at.DATA_BYTES])
            children = [
                pa.Array.from_buffers(pa.string(), entries, [None, *self._parts(block)], 0)
                for block in (at.KEYS, at.VALUES)
            ]
            entry = pa.Array.from_buffers(_ENTRY, entries, [None], 0, children=children)
            offsets = buffers[at.ATTRIBUTES + at.OFFSETS]
            return pa.Array.from_buffers(field.type, count, [None, offsets], 0, children=[entry])
        block = _VARIABLE.get(field.name) or _FIXED[field.name][0]
        validity, nulls = None, 0
        if block in _NULLABLE:
            nulls = count - int(self._fields[block + at.VALID])
            validity = buffers[block + at.VALIDITY] if nulls else None
        return pa.Array.from_buffers(field.type, count, [validity, *self._parts(block)], nulls)

    def _parts(self, block: int) -> list[pa.Buffer]:
        """The buffers of a column without its validity."""
        parts = (self._buffers.get(block + part) for part in (at.OFFSETS, at.DATA))
        return [part for part in parts if part is not None]


class FrameFeed:
    """Turns a stream of chunks of any size into record batches, carrying the unfinished frame over.

    Holds at most one partial frame. After `corrupt` is set nothing more comes out: what follows
    damage cannot be trusted to be aligned.
    """

    def __init__(
        self, decoder: ColumnarDecoder, *, expected_offset: int, end_offset: int | None = None
    ) -> None:
        """Creates a feed.

        Args:
            decoder: What decodes the frames.
            expected_offset: The first frame's offset.
            end_offset: Stop before this offset; what is fed beyond it is ignored.

        Raises:
            InvalidRequestError: The offset does not fit into its column.
        """
        check_offset(expected_offset)
        self._decoder = decoder
        self._end_offset = cut_offset(end_offset)
        self._carry = bytearray()
        self._needed = FRAME_HEADER_SIZE
        self._error: CorruptDataError | None = None
        # The smallest frames in this many bytes do not overfill the column of the topic's name.
        rows_max = COLUMN_BYTES_MAX // max(decoder.topic_bytes.size, 1)
        self._bytes_max = max(
            min(BATCH_BYTES_MAX, rows_max * _FRAME_BYTES_MIN[decoder.codec]),
            FRAME_HEADER_SIZE + FRAME_BODY_BYTES_MAX,
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
            CorruptDataError: A frame is intact and its body is not a message in the codec. Raised
                after all rows before it have come out, and by every later call.
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
            rows = self._decoder.collect(limit - position + len(self._carry))
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
            stop = self._check_frame(frame, 0) if end == 0 and self._is_open else None
            if stop is None:
                carry.clear()
            self._needed = FRAME_HEADER_SIZE if stop is None else stop.size_bytes
        return position

    def _take_frames(self, rows: _Collector, view: memoryview, position: int, limit: int) -> int:
        """Takes the frames up to `limit`, and carries the last one if its end is still to come."""
        position = self._take(rows, view[:limit], position)
        if not self._is_open:
            return position
        stop = self._check_frame(view, position)
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

    def _check_frame(self, buffer: Buffer, position: int) -> NeedMore | None:
        """Sets `corrupt` if the frame at `position` is damaged; returns NeedMore if it is cut."""
        stop = decode_frame(buffer, position, expected_offset=self.next_offset)
        if isinstance(stop, NeedMore):
            return stop
        if isinstance(stop, Corrupt):
            self.corrupt = stop
        return None
