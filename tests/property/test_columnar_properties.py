"""Properties of frames as columns: whatever the bytes, machine code and Python say the same.

A failure prints the smallest input and `@reproduce_failure`; put that above the test to replay it.
"""

import io
import itertools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from ister import kernels  # noqa: E402
from ister.base.model import COLUMNS, Codec, MessageId, StreamMessage  # noqa: E402
from ister.errors import CorruptDataError  # noqa: E402
from ister.format.archive import ArchiveReader  # noqa: E402
from ister.format.archive_writer import ArchiveWriter  # noqa: E402
from ister.format.arrow.decode import ColumnarDecoder, FrameFeed  # noqa: E402
from ister.format.arrow.encode import encode_frames, restore_frames  # noqa: E402
from ister.format.arrow.schema import EVERY_FIELD, HIDDEN  # noqa: E402
from ister.format.frame import pack_header, scan_frames  # noqa: E402
from ister.format.message import decode_message, encode_message  # noqa: E402
from tests.support.builders import VARINT_BOUNDARIES, a_message, frames  # noqa: E402
from tests.support.scale import scaled  # noqa: E402

EXAMPLES = settings(max_examples=scaled(100, 300), deadline=None, print_blob=True)
BOTH_CODECS = pytest.mark.parametrize("codec", list(Codec))

TOPIC = "/default/orders"
ALL = (*COLUMNS, *HIDDEN)

U64 = st.sampled_from(VARINT_BOUNDARIES) | st.integers(0, 2**64 - 1)
U32 = st.sampled_from([n for n in VARINT_BOUNDARIES if n < 2**32]) | st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=20)
PAYLOAD = st.sampled_from((0, 15, 16, 17, 250, 251, 600)).map(bytes) | st.binary(max_size=60)
MANY_ATTRIBUTES = st.integers(60, 70).map(lambda count: {f"key {n}": str(n) for n in range(count)})
ATTRIBUTES = st.dictionaries(TEXT, TEXT, max_size=5) | MANY_ATTRIBUTES
FIELDS_OF_BINCODE1 = {
    "request_id": U64,
    "msg_id": st.builds(
        MessageId, producer_id=U64, topic_name=TEXT, broker_addr=TEXT, topic_offset=U64
    ),
    "payload": PAYLOAD,
    "publish_time": U64,
    "producer_name": TEXT,
    "subscription_name": st.none() | TEXT,
    "attributes": ATTRIBUTES,
}
MESSAGES = {
    Codec.BINCODE1: st.builds(StreamMessage, **FIELDS_OF_BINCODE1),
    Codec.BINCODE2: st.builds(
        StreamMessage,
        **FIELDS_OF_BINCODE1,
        schema_id=st.none() | U64,
        schema_version=st.none() | U32,
        routing_key=st.none() | TEXT,
    ),
}
FIRST_OFFSETS = st.sampled_from((0, 249, 2**32 - 2, 2**62)) | st.integers(0, 2**62)
PROJECTIONS = st.just(COLUMNS) | st.lists(st.sampled_from(ALL), unique=True)

_decoders = {}


def decoders(codec, columns):
    """The decoder in Python, and the compiled one if there is one; what it learned it keeps."""
    key = (codec, tuple(columns))
    if key not in _decoders:
        ways = [False, True] if kernels.load() else [False]
        _decoders[key] = [ColumnarDecoder(TOPIC, codec, columns, is_compiled=way) for way in ways]
    return _decoders[key]


def signed(value, bits):
    return value if value is None or value < 2 ** (bits - 1) else value - 2**bits


def row_of(message, offset):
    """What a message is as a row, said a second time and apart from the code under test."""
    time_us = message.publish_time * 1000
    return {
        "topic": TOPIC,
        "offset": offset,
        "publish_time": time_us if time_us < 253_402_300_800_000_000 else 253_402_300_799_999_999,
        "producer_name": message.producer_name,
        "payload": message.payload,
        "attributes": list(message.attributes.items()),
        "routing_key": message.routing_key,
        "schema_id": signed(message.schema_id, 64),
        "schema_version": signed(message.schema_version, 32),
        "request_id": message.request_id,
        "producer_id": message.msg_id.producer_id,
    }


def rows_of(batch):
    batch.validate(full=True)
    columns = {
        name: (column.cast(pa.int64()) if name == "publish_time" else column).to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [{name: columns[name][row] for name in columns} for row in range(batch.num_rows)]


def verdict(decoder, data, expected_offset, end_offset):
    """All that decoding says of some bytes, in a form that compares."""
    try:
        found = decoder.decode(data, expected_offset=expected_offset, end_offset=end_offset)
    except CorruptDataError as error:
        return error.offset, error.message
    found.batch.validate(full=True)
    return found.end, found.next_offset, found.stop, found.batch


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(data=st.data(), first_offset=FIRST_OFFSETS, columns=PROJECTIONS)
def test_rows_are_the_messages(codec, data, first_offset, columns):
    messages = data.draw(st.lists(MESSAGES[codec], max_size=6))
    buffer = frames(first_offset, [encode_message(message, codec) for message in messages])
    expected = [row_of(message, first_offset + row) for row, message in enumerate(messages)]
    for decoder in decoders(codec, columns):
        found = decoder.decode(buffer, expected_offset=first_offset)
        assert rows_of(found.batch) == [{name: row[name] for name in columns} for row in expected]
        assert found.batch.num_rows == len(messages)
        assert (found.end, found.next_offset) == (len(buffer), first_offset + len(messages))


@pytest.mark.parametrize("size", range(3))
def test_every_projection_has_its_columns(size):
    """All combinations of up to two columns, in both orders."""
    message = a_message(schema_id=2**64 - 1, schema_version=7, routing_key="r")
    buffer = frames(0, [encode_message(message, Codec.BINCODE2)])
    for columns in itertools.permutations(ALL, size):
        for decoder in decoders(Codec.BINCODE2, columns):
            found = decoder.decode(buffer, expected_offset=0)
            row = row_of(message, 0)
            assert rows_of(found.batch) == [{name: row[name] for name in columns}]


FILLINGS = (
    bytes(1),
    bytes(8),
    bytes(16),
    b"\1",
    b"\2",
    b"\xfa",
    b"\xfb\xff\xff",
    b"\xfc\xff\xff\xff\xff",
    b"\xfd" + b"\xff" * 8,
    b"\xff" * 8,
    (2**63).to_bytes(8, "little"),
    (2**63 - 1).to_bytes(8, "little"),
    b"\xc3\xa4",
    b"\xed\xa0\x80",
)


@st.composite
def damaged(draw, data):
    """Some of the bytes of `data` overwritten, cut out or inserted."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(result)))
        end = draw(st.integers(start, min(len(result), start + 8)))
        result[start:end] = draw(st.sampled_from(FILLINGS) | st.binary(max_size=8))
    return bytes(result)


def framed(first_offset, bodies):
    """Frames with right crcs around any bodies."""
    return b"".join(
        pack_header(first_offset + row, len(body), zlib.crc32(body)) + body
        for row, body in enumerate(bodies)
        if body
    )


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(data=st.data(), columns=PROJECTIONS)
def test_damaged_bodies_get_the_verdict_of_decode_message(codec, data, columns):
    """The crcs are set right, so that the walk through the body decides."""
    messages = data.draw(st.lists(MESSAGES[codec], min_size=1, max_size=4))
    bodies = [encode_message(message, codec) for message in messages]
    which = data.draw(st.integers(0, len(bodies) - 1))
    bodies[which] = data.draw(damaged(bodies[which]) | st.binary(min_size=1, max_size=80)) or b"\0"
    expected, error = [], None
    for row, body in enumerate(bodies):
        try:
            expected.append(row_of(decode_message(body, codec), 50 + row))
        except CorruptDataError as caught:
            error = (50 + row, caught.message)
            break
    buffer = framed(50, bodies)
    for decoder in decoders(codec, columns):
        found = verdict(decoder, buffer, 50, None)
        if error is None:
            assert rows_of(found[3]) == [{name: row[name] for name in columns} for row in expected]
            continue
        assert found == error
        before = decoder.decode(buffer, expected_offset=50, end_offset=error[0])
        assert rows_of(before.batch) == [{name: row[name] for name in columns} for row in expected]


@EXAMPLES
@given(
    buffer=st.binary(max_size=300),
    codec=st.sampled_from(Codec),
    position=st.integers(0, 40),
    expected_offset=st.integers(0, 300),
)
def test_any_bytes_get_the_verdict_of_a_scan(buffer, codec, position, expected_offset):
    position = min(position, len(buffer))
    scan = scan_frames(buffer, position, expected_offset=expected_offset)
    for decoder in decoders(codec, COLUMNS):
        try:
            found = decoder.decode(buffer, position, expected_offset=expected_offset)
        except CorruptDataError:
            assert scan.starts
            continue
        assert (found.end, found.next_offset, found.stop) == (scan.end, scan.next_offset, scan.stop)


def cut(buffer, cuts):
    ends = [*sorted(at % (len(buffer) + 1) for at in cuts), len(buffer)]
    return [buffer[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(
    data=st.data(),
    cuts=st.lists(st.integers(0, 2**16), max_size=12),
    is_damaged=st.booleans(),
    has_right_crcs=st.booleans(),
    end_offset=st.none() | st.integers(0, 8),
)
def test_chunks_say_what_the_whole_says(codec, data, cuts, is_damaged, has_right_crcs, end_offset):
    messages = data.draw(st.lists(MESSAGES[codec], max_size=6))
    bodies = [encode_message(message, codec) for message in messages]
    if is_damaged and bodies and has_right_crcs:
        bodies[-1] = data.draw(damaged(bodies[-1]))
    buffer = framed(2, bodies)
    if is_damaged and not has_right_crcs:
        buffer = data.draw(damaged(buffer))
    scan = scan_frames(buffer, expected_offset=2, end_offset=end_offset)
    is_done = end_offset is not None and scan.next_offset >= end_offset
    for decoder in decoders(codec, COLUMNS):
        feed = FrameFeed(decoder, expected_offset=2, end_offset=end_offset)
        batches, error = [], None
        chunks = cut(buffer, cuts)
        try:
            for chunk in chunks:
                for batch in feed.feed(chunk):
                    batches.append(batch)  # noqa: PERF402 - what comes before an error is kept
        except CorruptDataError as caught:
            error = caught
        expected = verdict(decoder, buffer, 2, end_offset)
        rows = [row for batch in batches for row in rows_of(batch)]
        assert feed.next_offset == 2 + len(rows)
        assert len(batches) <= len(chunks)
        if len(expected) == 2:
            assert (error.offset, error.message) == expected
            before = decoder.decode(buffer, expected_offset=2, end_offset=error.offset).batch
            assert rows == rows_of(before)
            continue
        assert error is None
        assert rows == rows_of(expected[3])
        assert feed.is_done == is_done
        if is_done:
            assert feed.carried_bytes == 0
        elif isinstance(scan.stop, tuple) and hasattr(scan.stop, "reason"):
            assert feed.corrupt is not None
            assert feed.corrupt.reason is scan.stop.reason
            assert feed.carried_bytes == 0
        else:
            assert feed.corrupt is None
            assert feed.carried_bytes == len(buffer) - scan.end


ROW = {
    "payload": PAYLOAD,
    "publish_time": st.none()
    | st.sampled_from((0, 250, 251, 2**32, 253_402_300_799_999))
    | st.integers(0, 253_402_300_799_999),
    "producer_name": st.none() | TEXT,
    "attributes": st.none() | ATTRIBUTES.map(lambda value: list(value.items())),
    "routing_key": st.none() | TEXT,
    "schema_id": st.none() | st.integers(-(2**63), 2**63 - 1),
    "schema_version": st.none() | st.integers(-(2**31), 2**31 - 1),
}
TYPES = {
    "payload": pa.binary(),
    "publish_time": pa.timestamp("ms", tz="UTC"),
    "producer_name": pa.string(),
    "attributes": pa.map_(pa.string(), pa.string()),
    "routing_key": pa.string(),
    "schema_id": pa.int64(),
    "schema_version": pa.int32(),
}
ONLY_BINCODE2 = {"routing_key", "schema_id", "schema_version"}


def table_of(rows, columns):
    return pa.RecordBatch.from_arrays(
        [pa.array([row[name] for row in rows], TYPES[name]) for name in columns],
        names=list(columns),
    )


def message_of(row, columns, number, *, first_offset, first_request_id, producer_id):
    """The message that a row is to become, put together by hand."""
    values = {name: row[name] if name in columns else None for name in TYPES}
    schema_id, version = values["schema_id"], values["schema_version"]
    return StreamMessage(
        request_id=first_request_id + number,
        msg_id=MessageId(
            producer_id=producer_id, topic_name=TOPIC, topic_offset=first_offset + number
        ),
        payload=values["payload"],
        publish_time=77 if values["publish_time"] is None else values["publish_time"],
        producer_name=values["producer_name"] or "",
        attributes=dict(values["attributes"] or []),
        schema_id=None if schema_id is None else schema_id & (2**64 - 1),
        schema_version=None if version is None else version & (2**32 - 1),
        routing_key=values["routing_key"],
    )


@BOTH_CODECS
@EXAMPLES
@given(
    rows=st.lists(st.fixed_dictionaries(ROW), min_size=1, max_size=8),
    optional=st.lists(st.sampled_from([name for name in ROW if name != "payload"]), unique=True),
    first_offset=FIRST_OFFSETS,
    first_request_id=U64.filter(lambda value: value < 2**64 - 8),
    producer_id=U64,
    segment_bytes=st.sampled_from((1, 200, 2**20)),
    skipped=st.integers(0, 3),
)
def test_rows_become_the_bytes_of_their_messages(
    codec, rows, optional, first_offset, first_request_id, producer_id, segment_bytes, skipped
):
    """Encoded by both ways and one by one: the same bytes, which decode to the same rows."""
    columns = ["payload", *optional]
    if codec is Codec.BINCODE1:
        columns = [name for name in columns if name not in ONLY_BINCODE2]
    # A slice, so that arrays do not begin at their buffers' beginning.
    batch = table_of(rows, columns).slice(skipped)
    rows = rows[skipped:]
    ids = {
        "first_offset": first_offset,
        "first_request_id": first_request_id,
        "producer_id": producer_id,
    }
    messages = [message_of(row, columns, number, **ids) for number, row in enumerate(rows)]
    expected = frames(first_offset, [encode_message(message, codec) for message in messages])
    results = [
        encode_frames(
            batch,
            topic=TOPIC,
            codec=codec,
            now_ms=77,
            payload_bytes_max=1000,
            segment_bytes=segment_bytes,
            is_compiled=decoder.is_compiled,
            **ids,
        )
        for decoder in decoders(codec, ALL)
    ]
    for segments in results:
        assert segments == results[0]
        assert b"".join(segment.data for segment in segments) == expected
        next_offset = first_offset
        for segment in segments:
            assert segment.first_offset == next_offset
            assert segment.count == 1 or len(segment.data) <= segment_bytes
            part = messages[next_offset - first_offset :][: segment.count]
            assert segment.publish_time_max == max(message.publish_time for message in part)
            next_offset += segment.count
        assert next_offset == first_offset + len(rows)
    for decoder in decoders(codec, ALL):
        found = decoder.decode(expected, expected_offset=first_offset)
        assert rows_of(found.batch) == [
            row_of(message, first_offset + number) for number, message in enumerate(messages)
        ]


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(data=st.data(), first=FIRST_OFFSETS, group_bytes=st.sampled_from((1, 1000, 10**6)))
def test_frames_to_parquet_to_frames_changes_no_byte(codec, data, first, group_bytes):
    """Whatever a message has in it, an archive has it too."""
    messages = data.draw(st.lists(MESSAGES[codec], min_size=1, max_size=8))
    original = frames(first, [encode_message(message, codec) for message in messages])
    batches = [
        decoder.decode(original, expected_offset=first).batch
        for decoder in decoders(codec, EVERY_FIELD)
    ]
    assert all(batch.equals(batches[0]) for batch in batches)
    for is_compiled in (False, None):
        found = restore_frames(batches[0], topic=TOPIC, codec=codec, is_compiled=is_compiled)
        assert found.data == original
    file = io.BytesIO()
    writer = ArchiveWriter(file, topic=TOPIC, codec=codec, row_group_bytes=group_bytes)
    writer.write(batches[0])
    writer.finish(start=first, end=first + len(messages))
    stored = file.getvalue()
    reader = ArchiveReader(lambda at, size: stored[at : at + size], len(stored), path="o")
    groups = range(len(reader.row_groups))
    assert b"".join(reader.restore(number).data for number in groups) == original
