"""Decodes frames as Arrow record batches; see `ister.format.arrow`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from ister import kernels
from ister.base.limits import FRAME_BODY_BYTES_MAX, KIB
from ister.base.model import Codec, StreamMessage
from ister.errors import CorruptDataError, InvalidRequestError, InvariantError
from ister.format.arrow import loops as at
from ister.format.arrow.layout import (
    FIXED,
    FRAME_BYTES_MIN,
    NULLABLE,
    VARIABLE,
    BatchResource,
    Layout,
    layout_of,
)
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

# Memory that a batch may leave unused, besides an eighth of its content; with more it is copied.
_SLACK_BYTES: Final = 16 * KIB
_ENTRY: Final = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.string())])


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
        self.columns = tuple((field.name, field.type) for field in self.schema)
        self.is_compiled = wants_compiled(is_compiled)
        """Whether this decoder runs as compiled code."""
        self.topic_bytes = pa.py_buffer(topic.encode())
        self._layout = layout_of(topic, codec, self.schema) if self.is_compiled else None
        # By column: an array that repeats one value, and the slice of it in the last batch.
        self._repeated: dict[str, tuple[pa.Array, pa.Array]] = {}

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
        """The topic's name `count` times."""
        rows_max = COLUMN_BYTES_MAX // max(self.topic_bytes.size, 1)
        if count > rows_max:
            raise self._too_much(f"{count} rows with their topic's name")
        return self.repeated_column("topic", pa.string(), self.topic, count, rows_max)

    def repeated_column(
        self,
        name: str,
        kind: pa.DataType,
        value: object,
        count: int,
        rows_max: int = COLUMN_BYTES_MAX,
    ) -> pa.Array:
        """One value `count` times, as a slice of an array that all batches share.

        The value of a column must be the same in all calls.
        """
        # Threads may make it at the same time: each uses the one that it has seen.
        whole, last = self._repeated.get(name, (None, None))
        if last is not None and len(last) == count:
            return last
        if whole is None or len(whole) < count:
            # Somewhat more, so that batches that grow little by little do not rebuild it each time.
            size = max(min(count + count // 8, rows_max), 1)
            whole = _repeat(value, kind, size)
        last = whole.slice(0, count)
        self._repeated[name] = whole, last
        return last

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


class _CompiledRows:
    """Rows in Arrow's buffers, filled by compiled code.

    The sizes of the buffers are estimated from the batches before. When one is full the loop stops
    and continues with a larger one. A batch is built for every few megabytes of frames, which by
    then fill the processor's caches, so that Python runs slowly: little is done here for a batch,
    and most of it in advance (`Layout.plan`).
    """

    def __init__(self, decoder: ColumnarDecoder, layout: Layout, size_bytes: int) -> None:
        self._decoder = decoder
        self._layout = layout
        self._taken_bytes = 0
        plan = layout.plan(size_bytes)
        self._positions = plan.positions
        self._memory = pa.allocate_buffer(plan.size_bytes)
        self._enlarged: dict[int, pa.Buffer] = {}
        self._fields = fields = plan.fields.copy()
        fields[at.IS_VARINT] = decoder.codec is Codec.BINCODE2
        fields[at.TOPIC] = decoder.topic_bytes.address
        fields[at.TOPIC_BYTES] = decoder.topic_bytes.size
        base = self._memory.address
        for field, position in plan.positions.items():
            fields[field] = base + position

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

    def _make_room(self, room: BatchResource, left_bytes: int) -> None:
        """Enlarges the buffers of `room` to what `left_bytes` of frames need at most."""
        fields = self._fields.tolist()
        capacity = fields[room.used] + left_bytes // room.bytes_min + 1
        self._fields[room.capacity] = capacity
        for slot in self._layout.slots.values():
            if slot.room is room:
                larger = _copied(self._buffer(slot.field, fields), slot.size_for(capacity))
                self._enlarged[slot.field] = larger
                self._fields[slot.field] = larger.address

    def _buffer(self, field: int, fields: Sequence[int]) -> pa.Buffer:
        """The filled part of a buffer."""
        size = self._layout.slots[field].size(fields)
        if self._enlarged and field in self._enlarged:
            return self._enlarged[field].slice(0, size)
        return self._memory.slice(self._positions[field], size)

    def finish(self) -> pa.RecordBatch:
        fields, layout = self._fields.tolist(), self._layout
        used = layout.used_bytes(fields)
        held = self._memory.size + sum(buffer.size for buffer in self._enlarged.values())
        is_loose = held - used > _SLACK_BYTES + used // 8
        if is_loose:
            # Otherwise the unused memory stays in use as long as the batch.
            for field in self._positions:
                filled = self._buffer(field, fields)
                self._enlarged[field] = _copied(filled, filled.size)
        if self._taken_bytes and (is_loose or self._enlarged):
            layout.learn(fields, self._taken_bytes)
        count = fields[at.ROWS]
        columns = [self._column(name, kind, fields) for name, kind in self._decoder.columns]
        return make_batch(columns, self._decoder.schema, count)

    def _column(self, name: str, kind: pa.DataType, fields: list[int]) -> pa.Array:
        decoder, count = self._decoder, fields[at.ROWS]
        if name == "topic":
            return decoder.topic_column(count)
        if name == "attributes":
            entries = fields[at.ATTRIBUTES + at.DATA_BYTES]
            if not entries:
                return decoder.repeated_column(name, kind, [], count)
            children = [
                pa.Array.from_buffers(pa.string(), entries, [None, *self._text(block, fields)], 0)
                for block in (at.KEYS, at.VALUES)
            ]
            entry = pa.Array.from_buffers(_ENTRY, entries, [None], 0, children=children)
            offsets = self._buffer(at.ATTRIBUTES + at.OFFSETS, fields)
            return pa.Array.from_buffers(kind, count, [None, offsets], 0, children=[entry])
        is_variable = name in VARIABLE
        block = VARIABLE[name] if is_variable else FIXED[name][0]
        validity, nulls = None, 0
        if block in NULLABLE:
            nulls = count - fields[block + at.VALID]
            if nulls == count:
                return decoder.repeated_column(name, kind, None, count)
            validity = self._buffer(block + at.VALIDITY, fields) if nulls else None
        if is_variable:
            buffers = [validity, *self._text(block, fields)]
        else:
            buffers = [validity, self._buffer(block + at.OFFSETS, fields)]
        return pa.Array.from_buffers(kind, count, buffers, nulls)

    def _text(self, block: int, fields: list[int]) -> tuple[pa.Buffer, pa.Buffer]:
        """The offsets and the data of a column of variable width."""
        return self._buffer(block + at.OFFSETS, fields), self._buffer(block + at.DATA, fields)


def _repeat(value: object, kind: pa.DataType, count: int) -> pa.Array:
    """Returns `count` times a string, None or `[]`, which stands for no attributes."""
    if value == []:
        # `pa.repeat` concatenates `count` arrays for a map.
        ends = pa.repeat(pa.scalar(0, pa.int32()), count + 1)
        return pa.MapArray.from_arrays(ends, pa.array([], pa.string()), pa.array([], pa.string()))
    return pa.repeat(pa.scalar(value, kind), count)


def _copied(buffer: pa.Buffer, size_bytes: int) -> pa.Buffer:
    """Copies a buffer into a new one of `size_bytes`, which may be larger."""
    copied = pa.allocate_buffer(size_bytes)
    memoryview(copied)[: buffer.size] = memoryview(buffer)
    return copied


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
            min(BATCH_BYTES_MAX, rows_max * FRAME_BYTES_MIN[decoder.codec]),
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
