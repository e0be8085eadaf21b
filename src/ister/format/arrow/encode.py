"""Encodes Arrow record batches as frames; see `ister.format.arrow`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ister import kernels
from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX, FRAME_BODY_BYTES_MAX, MIB
from ister.base.model import COLUMNS, Codec, MessageId, StreamMessage
from ister.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvariantError,
    MessageTooLargeError,
    check,
)
from ister.format.arrow import loops as at
from ister.format.arrow.loops import ROWS_WEIGHT, TIME_MS_MAX, IntArray, loops, wants_compiled
from ister.format.arrow.schema import (
    BATCH_BYTES_MAX,
    COLUMN_BYTES_MAX,
    EVERY_FIELD,
    arrow_schema,
    check_offset,
    to_signed,
)
from ister.format.arrow.table import NUMBERS_BYTES_MAX, BatchColumns, Times, as_table, as_text
from ister.format.frame import encode_frame
from ister.format.message import encode_identity, encode_message
from ister.format.payloads import Payloads

# Rows that become Python objects at a time.
_PYTHON_ROWS: Final = 1024
# No integer takes more bytes in a body.
_LARGE_NUMBER: Final = 1 << 62

_Value = Any  # a value of any Arrow type, as `to_pylist` gives it


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
    producer_name: str | None
    """Of all messages; None for what the rows say."""
    is_check: bool = False
    """Whether rows are checked, and nothing is written."""


def encode_frames(
    rows: pa.RecordBatch | Payloads,
    *,
    topic: str,
    codec: Codec,
    first_offset: int,
    now_ms: int,
    payload_bytes_max: int,
    producer_id: int = 0,
    first_request_id: int = 0,
    producer_name: str | None = None,
    segment_bytes: int = 1 * MIB,
    is_compiled: bool | None = None,
) -> list[EncodedFrames]:
    """Encodes rows as frames: row `i` is the message of offset `first_offset + i`.

    Args:
        rows: Any of `COLUMNS`, in any order; `payload` is required and has no nulls. The columns
            `topic` and `offset` are ignored: the arguments decide. `Payloads` of many rows are
            encoded without an Arrow object; they need the compiled loops.
        topic: The topic's name, which is part of every body.
        codec: How bodies are encoded.
        first_offset: The first frame's offset.
        now_ms: The publish time of rows without one, in milliseconds.
        payload_bytes_max: The size limit of a payload.
        producer_id: For all messages.
        first_request_id: The first message's request id, one more for each one after it.
        producer_name: For all messages, instead of the column's; None to use the column.
        segment_bytes: About the size of each result. A larger frame gets one of its own.
        is_compiled: Whether to use compiled code: None if it is available, True to require it.

    Returns:
        The frames in segments that end at frame boundaries; an empty list for no rows.

    Raises:
        InvalidRequestError: A column is unknown or of another type, a message cannot have a value,
            or the codec has no such field.
        MessageTooLargeError: A payload, or the rest of a message, is over its limit.
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
        segment_bytes=min(segment_bytes, BATCH_BYTES_MAX),
        producer_name=producer_name,
    )
    _check_writing(writing, rows.num_rows)
    if isinstance(rows, Payloads):
        return _encode_payloads(rows, writing)
    return _encode_rows(rows, writing, is_compiled)


def check_rows(
    rows: pa.RecordBatch,
    *,
    topic: str,
    codec: Codec,
    payload_bytes_max: int,
    is_compiled: bool | None = None,
) -> None:
    """Checks that `encode_frames` can encode rows, whatever their offsets and ids will be.

    Faster than encoding: nothing is written, and no checksum is computed.

    Args:
        rows: As for `encode_frames`.
        topic: The topic's name, which is part of every body.
        codec: How bodies are encoded.
        payload_bytes_max: The size limit of a payload.
        is_compiled: Whether to use compiled code: None if it is available, True to require it.

    Raises:
        As `encode_frames`.
    """
    # Numbers of the largest size: a message must fit with the ones that it gets.
    writing = _Writing(
        topic=topic,
        codec=codec,
        first_offset=_LARGE_NUMBER,
        now_ms=TIME_MS_MAX,
        payload_bytes_max=payload_bytes_max,
        producer_id=_LARGE_NUMBER,
        first_request_id=_LARGE_NUMBER,
        segment_bytes=0,
        producer_name=None,
        is_check=True,
    )
    _check_writing(writing, rows.num_rows)
    _encode_rows(rows, writing, is_compiled)


def _encode_rows(
    rows: pa.RecordBatch, writing: _Writing, is_compiled: bool | None
) -> list[EncodedFrames]:
    is_fast = wants_compiled(is_compiled)
    table = as_table(rows)
    if not table.count:
        return []
    if is_fast:
        return _encode_compiled(table, writing)
    kernels.count_work(rows.nbytes * ROWS_WEIGHT)
    return _encode_in_python(table, writing)


def _encode_payloads(rows: Payloads, writing: _Writing) -> list[EncodedFrames]:
    fields = loops().new_fields()
    offsets, data = rows.addresses
    fields[at.PAYLOADS + at.OFFSETS] = offsets
    fields[at.PAYLOADS + at.DATA], fields[at.PAYLOADS + at.DATA_BYTES] = data, len(rows.data)

    def explain(row: int) -> None:
        _encode_in_python(as_table(rows.to_arrow()), writing)

    bytes_max = rows.nbytes + rows.num_rows * NUMBERS_BYTES_MAX
    return _encode_segments(fields, writing, rows.num_rows, bytes_max, explain)


def _check_writing(writing: _Writing, count: int) -> None:
    check_offset(writing.first_offset)
    check_offset(writing.first_offset + count)
    if not 0 <= writing.now_ms <= TIME_MS_MAX:
        raise InvalidRequestError(f"now_ms {writing.now_ms} is not in 0..{TIME_MS_MAX}")
    if not 0 <= writing.producer_id < 1 << 64:
        raise InvalidRequestError(f"producer_id {writing.producer_id} is not in 0..2^64-1")
    if not 0 <= writing.first_request_id <= (1 << 64) - max(count, 1):
        raise InvalidRequestError(
            f"{count} request ids from {writing.first_request_id} on are not in 0..2^64-1"
        )
    for what, text in (("topic", writing.topic), ("producer_name", writing.producer_name or "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{what} {text!r} is not valid Unicode text") from error


def _encode_compiled(table: BatchColumns, writing: _Writing) -> list[EncodedFrames]:
    fields = loops().new_fields()
    _point_at_columns(fields, table)

    def explain(row: int) -> None:
        for message in _messages(table, writing, range(row, row + 1)):
            encode_frame(message.msg_id.topic_offset, _encode_body(message, writing))

    return _encode_segments(fields, writing, table.count, table.bytes_max, explain)


def _encode_segments(
    fields: IntArray, writing: _Writing, count: int, bytes_max: int, explain: Callable[[int], None]
) -> list[EncodedFrames]:
    """Encodes rows with the compiled loop.

    Args:
        fields: The loop's arguments, with the addresses of the columns.
        writing: What the frames have in common.
        count: The number of rows.
        bytes_max: An upper bound of the frames' bytes, without the names that all of them share.
        explain: Encodes a row in Python, which raises the error of an invalid row.
    """
    identity = encode_identity(writing.producer_id, writing.topic, "", writing.codec)
    middle = pa.py_buffer(identity)
    fields[at.MIDDLE], fields[at.MIDDLE_BYTES] = middle.address, middle.size
    name = pa.py_buffer((writing.producer_name or "").encode())
    if writing.producer_name is not None:
        fields[at.NAMES + at.OFFSETS] = 0
        fields[at.NAMES + at.DATA], fields[at.NAMES + at.DATA_BYTES] = name.address, name.size
    fields[at.OFFSET] = writing.first_offset
    fields[at.REQUEST_ID] = to_signed(writing.first_request_id, 64) or 0
    fields[at.PAYLOAD_BYTES_MAX] = min(writing.payload_bytes_max, FRAME_BODY_BYTES_MAX)
    fields[at.ENVELOPE_BYTES_MAX] = ENVELOPE_SIZE_BYTES_MAX
    fields[at.SEGMENT_BYTES] = writing.segment_bytes
    fields[at.IS_CHECK] = writing.is_check
    fields[at.TIME_DEFAULT] = writing.now_ms
    # Room for a segment, or for everything if that is less.
    room = min(writing.segment_bytes, bytes_max + count * (middle.size + name.size))
    buffer = pa.allocate_buffer(max(room, 0), resizable=True)
    segments: list[EncodedFrames] = []
    first_row = 0
    while True:
        status = _run_loop(fields, buffer, writing.codec, count, explain)
        row = int(fields[at.ROWS])
        segments.append(
            EncodedFrames(
                buffer.slice(0, int(fields[at.POSITION])).to_pybytes(),
                row - first_row,
                writing.first_offset + first_row,
                int(fields[at.TIME_LAST]),
            )
        )
        if status == at.DONE:
            return segments
        first_row = row
        fields[at.POSITION] = fields[at.TIME_LAST] = 0


def _run_loop(
    fields: IntArray,
    buffer: pa.ResizableBuffer,
    codec: Codec,
    count: int,
    explain: Callable[[int], None],
) -> int:
    """Encodes rows until `count` of them are done or a segment is full; returns which."""
    encode = loops().encode
    fields[at.ROWS_MAX] = count
    fields[at.IS_VARINT] = codec is Codec.BINCODE2
    fields[at.BODY_BYTES_MAX] = FRAME_BODY_BYTES_MAX
    fields[at.PERMITTED] = -1
    while True:
        fields[at.BASE], fields[at.SIZE] = buffer.address, buffer.size
        status: int = encode(fields)
        if status == at.NEEDS_ROOM:
            buffer.resize(int(fields[at.ROOM]))
        elif status in (at.BODY_IS_BAD, at.CROWDED):
            row = int(fields[at.ROWS])
            explain(row)
            check(status == at.CROWDED, f"only the compiled encoder refuses row {row}")
            fields[at.PERMITTED] = fields[at.OFFSET]
        else:
            return status


def _point_at_columns(fields: IntArray, table: BatchColumns) -> None:
    """Tells the compiled loop where the columns are; the table has to stay alive meanwhile."""
    _point_at_variable(fields, at.PAYLOADS, table.payload)
    _point_at_variable(fields, at.NAMES, table.producer_name)
    _point_at_variable(fields, at.ROUTING_KEYS, table.routing_key)
    if (times := table.publish_time) is not None:
        _point(fields, at.TIMES, times.values, 8)
        fields[at.TIME_MULTIPLIER], fields[at.TIME_DIVISOR] = times.multiplier, times.divisor
        latest = ((TIME_MS_MAX + 1) * times.divisor - 1) // times.multiplier
        fields[at.TIME_RAW_MAX] = min(latest, (1 << 63) - 1)
    if (maps := table.attributes) is not None:
        _point(fields, at.ATTRIBUTES, maps.maps, 4)
        fields[at.ATTRIBUTES + at.DATA] = maps.first_entry
        fields[at.ATTRIBUTES + at.DATA_BYTES] = len(maps.keys)
        _point_at_variable(fields, at.KEYS, maps.keys)
        _point_at_variable(fields, at.VALUES, maps.values)
    if table.schema_id is not None:
        _point(fields, at.SCHEMA_IDS, table.schema_id, 8)
    if table.schema_version is not None:
        _point(fields, at.SCHEMA_VERSIONS, table.schema_version, 4)


def _point_at_variable(fields: IntArray, block: int, array: pa.Array | None) -> None:
    # Arrow gives an empty array no buffers, and the loop looks at none of its values.
    if array is None or not len(array):
        return
    data = _point(fields, block, array, 8)[2]
    if data is not None:
        fields[block + at.DATA], fields[block + at.DATA_BYTES] = data.address, data.size


def _point(fields: IntArray, block: int, array: pa.Array, width: int) -> list[pa.Buffer | None]:
    """Tells the compiled loop where one column is; returns its buffers."""
    buffers: list[pa.Buffer] = array.buffers()
    fields[block + at.OFFSETS] = buffers[1].address + width * array.offset
    if buffers[0] is not None and array.null_count:
        fields[block + at.VALIDITY] = buffers[0].address
        fields[block + at.VALIDITY_START] = array.offset
    return buffers


def _encode_in_python(table: BatchColumns, writing: _Writing) -> list[EncodedFrames]:
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
        if writing.is_check:
            offset += 1
            continue
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
        InvalidRequestError, MessageTooLargeError: See `encode_frames`.
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


def _messages(table: BatchColumns, writing: _Writing, rows: range) -> Iterator[StreamMessage]:
    """The messages of some rows, a bounded number of them as Python objects at a time.

    Raises:
        InvalidRequestError: A value is not one that a message can have.
    """
    maps = None if table.attributes is None else table.attributes.maps
    times = table.publish_time
    for start in range(rows.start, rows.stop, _PYTHON_ROWS):
        count = min(_PYTHON_ROWS, rows.stop - start)
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
                producer_name=(
                    writing.producer_name if writing.producer_name is not None else name or ""
                ),
                subscription_name="",
                attributes=_attributes(attributes or [], row),
                schema_id=None if schema_id is None else schema_id % (1 << 64),
                schema_version=None if schema_version is None else schema_version % (1 << 32),
                routing_key=routing_key,
            )


def _values(column: pa.Array | None, start: int, count: int) -> list[_Value]:
    return [None] * count if column is None else column.slice(start, count).to_pylist()


def _milliseconds(times: Times | None, value: int, row: int) -> int:
    if times is None:
        raise InvariantError("a publish time without its column")
    time_ms = value * times.multiplier // times.divisor
    if not 0 <= time_ms <= TIME_MS_MAX:
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


_MICROSECONDS: Final = Times(pa.nulls(0, pa.int64()), 1, 1000)
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
    """Encodes rows as the frames that they were decoded from, byte for byte.

    Args:
        batch: The columns `EVERY_FIELD`, in this order, with offsets that ascend.
        topic: The topic's name.
        codec: How bodies are encoded.
        is_compiled: Whether to use compiled code: None if it is available, True to require it.

    Raises:
        CorruptDataError: A decoder never gives such values.
        ConfigError: The compiled loops are required and not available.
    """
    is_fast = wants_compiled(is_compiled)
    if not batch.schema.equals(arrow_schema(EVERY_FIELD)):
        raise CorruptDataError("the columns are not `EVERY_FIELD`", topic=topic)
    for name in _NEVER_NULL:
        if batch.column(name).null_count:
            raise CorruptDataError(f"a message without {name}", topic=topic)
    if not batch.num_rows:
        return RestoredFrames(b"", [], [])
    try:
        if is_fast:
            return _restore_compiled(batch, topic, codec)
        kernels.count_work(batch.nbytes * ROWS_WEIGHT)
        return _restore_in_python(batch, topic, codec)
    except (InvalidRequestError, MessageTooLargeError) as error:
        raise CorruptDataError(f"not a message: {error.message}", topic=topic) from error


def _restore_compiled(batch: pa.RecordBatch, topic: str, codec: Codec) -> RestoredFrames:
    table = as_table(batch.select([n for n in COLUMNS if n not in {"topic", "offset"}]))
    texts = {
        block: as_text(batch.column(name), f"column {name!r}")
        for name, block in (
            ("message_topic", at.MESSAGE_TOPICS),
            ("broker_addr", at.BROKERS),
            ("subscription_name", at.SUBSCRIPTIONS),
        )
        if batch.column(name).null_count < batch.num_rows
    }
    fields = loops().new_fields()
    own = pa.py_buffer(topic.encode())
    fields[at.TOPIC], fields[at.TOPIC_BYTES] = own.address, own.size
    fields[at.PAYLOAD_BYTES_MAX] = fields[at.ENVELOPE_BYTES_MAX] = FRAME_BODY_BYTES_MAX
    fields[at.SEGMENT_BYTES] = COLUMN_BYTES_MAX
    _point_at_columns(fields, table)
    for block, column in texts.items():
        _point_at_variable(fields, block, column)
    for name, block in (
        ("offset", at.NUMBERS),
        ("request_id", at.REQUEST_IDS),
        ("producer_id", at.PRODUCER_IDS),
        ("message_offset", at.MESSAGE_OFFSETS),
        ("publish_time_ms", at.EXACT_TIMES),
    ):
        if batch.column(name).null_count < batch.num_rows:
            _point(fields, block, batch.column(name), 8)
    beside = sum(column.nbytes for column in texts.values())
    buffer = pa.allocate_buffer(table.bytes_max + beside + table.count * own.size, resizable=True)
    starts = pa.allocate_buffer(8 * table.count)
    fields[at.STARTS] = starts.address

    def explain(row: int) -> None:
        _restore_in_python(batch.slice(row, 1), topic, codec)

    if _run_loop(fields, buffer, codec, table.count, explain) == at.SEGMENT_IS_FULL:
        raise InvalidRequestError(f"the frames of {table.count} rows are too large for one buffer")
    positions = pa.Array.from_buffers(pa.int64(), table.count, [None, starts])
    return RestoredFrames(
        buffer.slice(0, int(fields[at.POSITION])).to_pybytes(),
        positions.to_numpy().tolist(),
        batch.column("offset").to_numpy().tolist(),
    )


def _restore_in_python(batch: pa.RecordBatch, topic: str, codec: Codec) -> RestoredFrames:
    frames: list[bytes] = []
    starts: list[int] = []
    offsets: list[int] = []
    size = 0
    at = batch.schema.get_field_index("publish_time")
    batch = batch.set_column(at, "publish_time", batch.column(at).view(pa.int64()))
    for start in range(0, batch.num_rows, _PYTHON_ROWS):
        for row, values in enumerate(batch.slice(start, _PYTHON_ROWS).to_pylist(), start):
            message = _restored(values, topic, row)
            frame = encode_frame(values["offset"], encode_message(message, codec))
            frames.append(frame)
            starts.append(size)
            offsets.append(values["offset"])
            size += len(frame)
    return RestoredFrames(b"".join(frames), starts, offsets)


def _restored(values: dict[str, _Value], topic: str, row: int) -> StreamMessage:
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
