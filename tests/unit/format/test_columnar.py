"""Frames to Arrow and back: values, verdicts and errors, compiled and in Python alike."""

import gc
import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

pa = pytest.importorskip("pyarrow")

from ister import kernels  # noqa: E402
from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX, FRAME_BODY_BYTES_MAX, KIB, MIB  # noqa: E402
from ister.base.model import (  # noqa: E402
    COLUMNS,
    Codec,
    MessageId,
    StreamMessage,
)
from ister.errors import (  # noqa: E402
    ConfigError,
    CorruptDataError,
    InvalidRequestError,
    MessageTooLargeError,
)
from ister.format.arrow import decode  # noqa: E402
from ister.format.arrow.decode import ColumnarDecoder, FrameFeed  # noqa: E402
from ister.format.arrow.encode import check_rows, encode_frames  # noqa: E402
from ister.format.arrow.schema import HIDDEN, arrow_schema  # noqa: E402
from ister.format.frame import (  # noqa: E402
    Corrupt,
    CorruptReason,
    encode_frame,
    scan_frames,
)
from ister.format.message import decode_message, encode_message  # noqa: E402
from tests.support.builders import a_message, bincode_integer, frames  # noqa: E402
from tests.support.cases import each  # noqa: E402
from tests.support.danube_files import a_danube_message, danube_frames  # noqa: E402

TOPIC = "/default/t"
NOW_MS = 1_760_745_600_000
MAP = pa.map_(pa.string(), pa.string())


@pytest.fixture(params=["compiled", "pure"])
def is_compiled(request) -> bool:
    if request.param == "compiled" and not kernels.load():
        pytest.skip("numba is not installed: the extra `fast` is half of what is tested here")
    return request.param == "compiled"


def messages(count, **fields):
    return [
        a_message(topic_offset=number, payload=b"payload %d" % number, **fields)
        for number in range(count)
    ]


def framed(items, codec=Codec.BINCODE2, first_offset=0):
    return frames(first_offset, [encode_message(item, codec) for item in items])


def decoder(is_compiled, columns=None, codec=Codec.BINCODE2):
    return ColumnarDecoder(TOPIC, codec, columns, is_compiled=is_compiled)


def encode(batch, is_compiled, **settings):
    settings = {
        "topic": TOPIC,
        "codec": Codec.BINCODE2,
        "first_offset": 0,
        "now_ms": NOW_MS,
        "payload_bytes_max": 10 * MIB,
        **settings,
    }
    return encode_frames(batch, is_compiled=is_compiled, **settings)


def table_of(**columns):
    return pa.RecordBatch.from_pydict(columns)


# -- the schema -----------------------------------------------------------------------------


def test_columns_come_in_the_order_asked_for(is_compiled):
    wanted = ["payload", "request_id", "offset"]
    assert arrow_schema(wanted).names == wanted
    assert arrow_schema().names == list(COLUMNS)
    batch = decoder(is_compiled, wanted).decode(framed(messages(2)), expected_offset=0).batch
    assert batch.schema.equals(arrow_schema(wanted))
    assert batch.to_pylist()[1] == {"payload": b"payload 1", "request_id": 1, "offset": 1}


@each(
    ("columns", "text"),
    [
        (["payload", "body"], "unknown column 'body'.*publish_time.*request_id"),
        (["offset"] * 2, "twice"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, text):
    with pytest.raises(InvalidRequestError, match=text):
        arrow_schema(columns)
    with pytest.raises(InvalidRequestError, match=text):
        ColumnarDecoder(TOPIC, Codec.BINCODE2, columns, is_compiled=False)


# -- decoding: values -----------------------------------------------------------------------


@each(
    ("stored_ms", "microseconds"),
    [
        (0, 0),
        (253_402_300_799_999, 253_402_300_799_999_000),
        (253_402_300_800_000, 253_402_300_799_999_999),
        (2**63, 253_402_300_799_999_999),
        (2**64 - 1, 253_402_300_799_999_999),
    ],
)
def test_publish_times_end_with_the_calendar(is_compiled, stored_ms, microseconds):
    data = framed([a_message(publish_time=stored_ms)])
    column = decoder(is_compiled, ["publish_time"]).decode(data, expected_offset=0).batch.column(0)
    assert column.cast(pa.int64()).to_pylist() == [microseconds]
    assert column.to_pylist()[0] == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
        microseconds=microseconds
    )


@each("codec", list(Codec))
def test_batches_of_any_shape_follow_each_other(is_compiled, codec):
    """Goal: room that was right for one batch and is wrong for the next is made anew.

    Batches of large payloads, of tiny messages, of long names and of many attributes take turns.
    """
    shapes = [
        [a_message(payload=bytes(20_000)) for _ in range(20)],
        [StreamMessage(subscription_name=None) for _ in range(3000)],
        [a_message(payload=b"", producer_name="name" * 500) for _ in range(30)],
        [a_message(attributes={f"key {n}": "value" * n for n in range(60)}) for _ in range(50)],
        [a_message(payload=bytes(n)) for n in range(500)],
    ]
    if codec is Codec.BINCODE2:
        shapes.append([a_message(routing_key="r" * 3000, schema_id=n) for n in range(40)])
    one = decoder(is_compiled, [*COLUMNS, *HIDDEN], codec)
    for shape in [*shapes, *reversed(shapes)]:
        data = framed(shape, codec, first_offset=70)
        batch = one.decode(data, expected_offset=70).batch
        batch.validate(full=True)
        assert batch.column("payload").to_pylist() == [message.payload for message in shape]
        assert [dict(row) for row in batch.column("attributes").to_pylist()] == [
            dict(message.attributes) for message in shape
        ]
        for name in ("producer_name", "routing_key", "schema_id", "request_id"):
            assert batch.column(name).to_pylist() == [getattr(each, name) for each in shape]
        assert batch.column("offset").to_pylist() == list(range(70, 70 + len(shape)))


@pytest.mark.parametrize("is_compiled", ["compiled"], indirect=True)
def test_batches_share_the_columns_that_have_one_value(is_compiled):
    data = framed([a_message(payload=bytes(9), attributes={}) for _ in range(50)])
    one = decoder(is_compiled)
    first, second = (one.decode(data, expected_offset=0).batch for _ in range(2))
    for name in ("topic", "routing_key", "schema_id", "schema_version", "attributes"):
        buffers = [batch.column(name).buffers() for batch in (first, second)]
        assert [part and part.address for part in buffers[0]] == [
            part and part.address for part in buffers[1]
        ]
    assert first.column("payload").buffers()[2].address != (
        second.column("payload").buffers()[2].address
    )


@pytest.mark.nightly
def test_batch_holds_little_more_than_its_rows(is_compiled):
    """Goal: a batch that is kept does not keep room that it has no use for.

    Measured at Arrow's own pool, for the first batch, when nothing is known of what comes, and for
    the ones after it.
    """
    data = framed([a_message(payload=bytes(100)) for _ in range(20_000)])
    one = decoder(is_compiled, [name for name in COLUMNS if name != "topic"])
    batches = []
    gc.collect()  # what other tests have left to the collector must not go meanwhile
    for _ in range(3):
        before = pa.total_allocated_bytes()
        batches.append(one.decode(data, expected_offset=0).batch)
        held = pa.total_allocated_bytes() - before
        # Batches share columns that have one value; threads that other tests have left may give
        # some of theirs back meanwhile.
        size = batches[-1].nbytes
        assert 0.8 * size <= held <= size * 1.13 + 12 * 17 * KIB


def test_batch_is_independent_of_the_buffer(is_compiled):
    data = bytearray(framed(messages(50)))
    batch = decoder(is_compiled).decode(data, expected_offset=0).batch
    before = batch.to_pylist()
    data[:] = b"\xff" * len(data)
    assert batch.to_pylist() == before


@each(
    "wrap",
    [
        bytes,
        bytearray,
        lambda data: memoryview(b"xyz" + data)[3:],
        lambda data: memoryview(data).cast("b"),
        lambda data: memoryview(data + bytes(-len(data) % 8)).cast("Q"),
        pa.py_buffer,
    ],
    ids=["bytes", "bytearray", "slice", "signed", "words", "arrow"],
)
def test_any_contiguous_buffer_is_read(is_compiled, wrap):
    data = framed(messages(20))
    found = decoder(is_compiled, ["payload"]).decode(wrap(data), expected_offset=0)
    assert (found.batch.num_rows, found.end) == (20, len(data))


def test_threads_share_a_decoder(is_compiled):
    data = framed(messages(3000))
    one = decoder(is_compiled)
    expected = one.decode(data, expected_offset=0).batch
    wrong = []

    def work():
        for end in range(500, 3001, 500):
            batch = one.decode(data, expected_offset=0, end_offset=end).batch
            if not batch.equals(expected.slice(0, end)):
                wrong.append(end)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- decoding: verdicts ---------------------------------------------------------------------


@each(
    "damage",
    [
        pytest.param(lambda data: data, id="none"),
        pytest.param(lambda data: data[:-1], id="cut"),
        pytest.param(lambda data: data + bytes(15), id="part-of-a-header"),
        pytest.param(lambda data: data + bytes(16), id="zeros"),
        pytest.param(lambda data: data + b"\xff" * 16, id="length-over-limit"),
        pytest.param(lambda data: data[:200] + b"\xff" + data[201:], id="crc"),
        pytest.param(lambda data: data + encode_frame(77, b"x"), id="another-offset"),
        pytest.param(lambda data: data + encode_frame(10, bytes(100))[:50], id="no-end"),
        pytest.param(lambda data: b"", id="nothing"),
    ],
)
@each("end_offset", [None, 0, 3, 4, 10, 11])
def test_decoding_stops_where_a_scan_does(is_compiled, damage, end_offset):
    data = b"abc" + damage(framed(messages(10)))
    scan = scan_frames(data, 3, expected_offset=0, end_offset=end_offset)
    for columns in (None, []):
        found = decoder(is_compiled, columns).decode(
            data, 3, expected_offset=0, end_offset=end_offset
        )
        assert (found.end, found.next_offset) == (scan.end, scan.next_offset)
        assert found.stop == scan.stop
        assert found.batch.num_rows == len(scan.starts)


def text(value, codec):
    return bincode_integer(len(value), codec) + value


def body_of(
    codec,
    *,
    topic=b"/default/t",
    broker=b"b:1",
    name=b"p",
    subscription=b"\1\0",
    count=None,
    attributes=((b"k", b"v"),),
    rest=b"\0\0\0",
):
    """A body in pieces, so that each of them can be wrong."""

    def integer(value):
        return bincode_integer(value, codec)

    body = integer(1) + integer(2) + text(topic, codec) + text(broker, codec) + integer(3)
    body += text(b"payload", codec) + integer(NOW_MS) + text(name, codec)
    body += b"\1" + text(b"", codec) if subscription == b"\1\0" else subscription
    body += integer(len(attributes) if count is None else count)
    for key, value in attributes:
        body += text(key, codec) + text(value, codec)
    return body + (rest if codec is Codec.BINCODE2 else b"")


NOT_TEXT = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"name\xc3",
    b"abcdefgh\x80",
]
MANY = tuple((b"key %d" % number, b"") for number in range(200))
BAD_BODIES = {
    "left-over": lambda codec: body_of(codec) + b"\0",
    "cut": lambda codec: body_of(codec)[:-2],
    "one-byte": lambda codec: b"\1",
    "option-tag": lambda codec: body_of(codec, subscription=b"\2"),
    "attribute-twice": lambda codec: body_of(codec, attributes=((b"k", b"v"), (b"k", b"w"))),
    "one-of-many-twice": lambda codec: body_of(codec, attributes=(*MANY, MANY[70])),
    "count-bomb": lambda codec: body_of(codec, count=2**64 - 1),
    "count-of-half": lambda codec: body_of(codec, count=2**63),
    "count-over-end": lambda codec: body_of(codec, count=2),
    "no-attributes-said": lambda codec: body_of(codec, count=0),
    "length-bomb": lambda codec: bytes(2) + bincode_integer(2**64 - 1, codec) + bytes(100),
    **{
        f"{field}-{number}": lambda codec, field=field, value=value: body_of(
            codec, **{field: value}
        )
        for field in ("topic", "broker", "name")
        for number, value in enumerate(NOT_TEXT)
    },
    **{
        f"attribute-{number}": lambda codec, value=value: body_of(codec, attributes=((b"", value),))
        for number, value in enumerate(NOT_TEXT)
    },
    "key": lambda codec: body_of(codec, attributes=((b"\xff", b"value"),)),
    "subscription": lambda codec: body_of(codec, subscription=b"\1" + text(b"\x80", codec)),
}
BAD_TAILS = {
    "schema-tag": b"\2\0\0",
    "schema-missing": b"\1",
    "schema-longer-than-needed": b"\1\xfb\xfa\x00\0\0",
    "schema-in-64-bits-without-need": b"\1\xfd" + (2**32 - 1).to_bytes(8, "little") + b"\0\0",
    "version-tag": b"\0\2\0",
    "version-over-32-bits": b"\0\1\xfd" + (2**32).to_bytes(8, "little") + b"\0",
    "version-over-63-bits": b"\0\1\xfd" + (2**64 - 1).to_bytes(8, "little") + b"\0",
    "version-longer-than-needed": b"\0\1\xfc\xff\xff\x00\x00\0",
    "integer-tag": b"\1\xfe" + bytes(16) + b"\0\0",
    "routing-key-tag": b"\0\0\xff",
    "routing-key": b"\0\0\1\1\xff",
    "routing-key-cut": b"\0\0\1\5abc",
    "version-missing": b"\0",
}
CASES = [
    *(
        pytest.param(codec, make(codec), id=f"{codec}-{name}")
        for codec in Codec
        for name, make in BAD_BODIES.items()
    ),
    *(
        pytest.param(Codec.BINCODE2, body_of(Codec.BINCODE2, rest=rest), id=name)
        for name, rest in BAD_TAILS.items()
    ),
]


@each("body", ["0.5.1", "0.6", "0.12"])
def test_bodies_of_older_danubes_become_rows(is_compiled, body):
    wanted = [a_danube_message(offset, body) for offset in range(20)]
    data = danube_frames(wanted, body)
    found = decoder(is_compiled).decode(data, expected_offset=0)
    assert found.next_offset == 20
    rows = found.batch.to_pylist()
    assert [row["payload"] for row in rows] == [message.payload for message in wanted]
    for name in ("producer_name", "schema_id", "schema_version", "routing_key"):
        assert [row[name] for row in rows] == [getattr(message, name) for message in wanted]
    assert [dict(row["attributes"]) for row in rows] == [m.attributes for m in wanted]


@each(("codec", "body"), CASES)
def test_good_frame_with_a_body_that_is_no_message(is_compiled, codec, body):
    """Goal: the error of `decode_message`, with the offset, whatever columns are wanted."""
    with pytest.raises(CorruptDataError) as reference:
        decode_message(body, codec)
    good = [encode_message(message, codec) for message in messages(6)]
    good[3] = body
    data = frames(100, good)
    for columns in (None, [], ["payload"], ["attributes"]):
        one = decoder(is_compiled, columns, codec)
        with pytest.raises(CorruptDataError) as caught:
            one.decode(data, expected_offset=100)
        assert (caught.value.topic, caught.value.offset) == (TOPIC, 103)
        assert caught.value.message == reference.value.message
        before = one.decode(data, expected_offset=100, end_offset=103)
        assert (before.batch.num_rows, before.next_offset) == (3, 103)
        feed = FrameFeed(one, expected_offset=100)
        rows = feed.feed(data)
        assert next(rows).num_rows == 3
        with pytest.raises(CorruptDataError):
            next(rows)
        assert feed.next_offset == 103
        with pytest.raises(CorruptDataError) as again:
            next(feed.feed(b""))
        assert again.value.offset == 103


@each("count", [1, 63, 64, 65, 66, 300])
def test_many_attributes_are_fine_as_long_as_they_differ(is_compiled, count):
    attributes = {f"key {number:03}": str(number) for number in range(count)}
    message = a_message(attributes=attributes)
    data = framed([a_message(), message, message])
    one = decoder(is_compiled, ["attributes"])
    rows = one.decode(data, expected_offset=0).batch.column(0).to_pylist()
    assert [dict(row) for row in rows] == [{"k": "v"}, attributes, attributes]
    twice = encode_message(message, Codec.BINCODE2).replace(b"key 000", b"key %03d" % (count - 1))
    if count > 1:
        with pytest.raises(CorruptDataError):
            one.decode(encode_frame(0, twice), expected_offset=0)


@each("offset", [-1, 2**63 - 1, 2**63, 2**64])
def test_offsets_that_arrow_cannot_hold_are_refused(is_compiled, offset):
    with pytest.raises(InvalidRequestError):
        decoder(is_compiled).decode(b"", expected_offset=offset)
    with pytest.raises(InvalidRequestError):
        FrameFeed(decoder(is_compiled), expected_offset=offset)
    with pytest.raises(InvalidRequestError):
        encode(table_of(payload=[b"x"]), is_compiled, first_offset=offset)


@each("position", [-1, 101])
def test_position_outside_of_the_buffer_is_refused(is_compiled, position):
    with pytest.raises(InvalidRequestError):
        decoder(is_compiled).decode(bytes(100), position, expected_offset=0)


def test_more_than_a_batch_can_hold_is_refused(is_compiled, monkeypatch):
    monkeypatch.setattr(decode, "COLUMN_BYTES_MAX", 1000)
    data = framed(messages(30))
    with pytest.raises(InvalidRequestError):
        decoder(is_compiled, ["offset"]).decode(data, expected_offset=0)
    small = framed([StreamMessage()] * 30)
    assert len(small) < 1000
    long_name = ColumnarDecoder("/default/" + "t" * 100, Codec.BINCODE2, is_compiled=is_compiled)
    with pytest.raises(InvalidRequestError):
        long_name.decode(small, expected_offset=0)


# -- a stream of chunks ---------------------------------------------------------------------


def fed(feed, chunks):
    return [batch for chunk in chunks for batch in feed.feed(chunk)]


def test_chunks_cut_anywhere_give_the_same_rows(is_compiled):
    """Every single cut, and every size of chunks, through three frames of different sizes."""
    items = [a_message(payload=bytes(size)) for size in (0, 40, 3)]
    data = framed(items, first_offset=5)
    one = decoder(is_compiled)
    whole = one.decode(data, expected_offset=5).batch
    cuts = [[data[:at], data[at:]] for at in range(len(data) + 1)]
    cuts += [
        [data[at : at + size] for at in range(0, len(data), size)]
        for size in (1, 2, 3, 7, 15, 16, 17, 50)
    ]
    for chunks in cuts:
        feed = FrameFeed(one, expected_offset=5)
        batches = fed(feed, chunks)
        assert pa.Table.from_batches(batches).combine_chunks().to_batches()[0].equals(whole)
        assert (feed.next_offset, feed.carried_bytes, feed.corrupt) == (8, 0, None)
        assert len(batches) <= len(chunks)


def test_large_chunks_are_split_over_batches(is_compiled):
    data = framed(messages(200))
    feed = FrameFeed(decoder(is_compiled), expected_offset=0)
    feed._bytes_max = 1000
    batches = fed(feed, [data[:5000], data[5000:]])
    assert len(batches) > 10
    assert all(batch.nbytes < 3000 for batch in batches)
    assert sum(batch.num_rows for batch in batches) == feed.next_offset == 200
    assert feed.carried_bytes == 0


def test_feed_ends_at_its_end_offset(is_compiled):
    data = framed(messages(10))
    for cut in range(0, len(data), 7):
        feed = FrameFeed(decoder(is_compiled, ["offset"]), expected_offset=0, end_offset=6)
        batches = fed(feed, [data[:cut], data[cut:], data])
        assert sum(batch.num_rows for batch in batches) == 6
        assert feed.is_done
        assert (feed.next_offset, feed.carried_bytes, feed.corrupt) == (6, 0, None)


@each("step", [1, 10, 33, 10_000])
def test_feed_ends_at_damage_with_the_rows_before_it(is_compiled, step):
    data = bytearray(framed(messages(10)))
    scan = scan_frames(data, expected_offset=0)
    data[scan.starts[6] + 20] ^= 1
    feed = FrameFeed(decoder(is_compiled, ["offset"]), expected_offset=0)
    batches = fed(feed, [bytes(data[at : at + step]) for at in range(0, len(data), step)])
    assert sum(batch.num_rows for batch in batches) == feed.next_offset == 6
    assert isinstance(feed.corrupt, Corrupt)
    assert feed.corrupt.reason is CorruptReason.CRC_MISMATCH
    assert (feed.carried_bytes, feed.is_done) == (0, False)
    assert not fed(feed, [framed(messages(10)[6:], first_offset=6)])


# -- encoding: values -----------------------------------------------------------------------


def a_row(row, *, first_offset=0, **fields):
    return StreamMessage(
        request_id=row,
        msg_id=MessageId(topic_name=TOPIC, topic_offset=first_offset + row),
        **{"publish_time": NOW_MS, **fields},
    )


def test_ids_are_counted_up_to_their_last(is_compiled):
    batch = table_of(payload=[b"a", b"b"])
    settings = {"first_request_id": 2**64 - 2, "producer_id": 2**64 - 1}
    (found,) = encode(batch, is_compiled, **settings)
    one = decoder(is_compiled, ["request_id", "producer_id"])
    rows = one.decode(found.data, expected_offset=0).batch.to_pylist()
    assert [tuple(row.values()) for row in rows] == [(2**64 - 2, 2**64 - 1), (2**64 - 1, 2**64 - 1)]
    with pytest.raises(InvalidRequestError):
        encode(batch, is_compiled, first_request_id=2**64 - 1)
    with pytest.raises(InvalidRequestError):
        encode(batch, is_compiled, producer_id=2**64)


def test_segments_end_between_frames(is_compiled):
    sizes = [10, 10, 5000, 10, 400, 400, 400, 10]
    times = [5, 9, 3, 4, 8, 1, 2, 7]
    batch = table_of(
        payload=[bytes(size) for size in sizes], publish_time=pa.array(times, pa.timestamp("ms"))
    )
    found = encode(batch, is_compiled, segment_bytes=1000)
    assert [segment.count for segment in found] == [2, 1, 3, 2]
    assert [segment.first_offset for segment in found] == [0, 2, 3, 6]
    assert [segment.publish_time_max for segment in found] == [9, 3, 8, 7]
    assert [len(segment.data) <= 1000 for segment in found] == [True, False, True, True]
    joined = b"".join(segment.data for segment in found)
    assert joined == encode(batch, is_compiled, segment_bytes=2**40)[0].data
    assert len(encode(batch, is_compiled, segment_bytes=1)) == 8
    assert scan_frames(joined, expected_offset=0).next_offset == 8


def typed(kind, *values):
    return pa.array(values, kind)


@each(
    ("columns", "rows"),
    [
        *(
            ({"payload": typed(kind, b"abc", b"def")}, [{"payload": b"abc"}, {"payload": b"def"}])
            for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3))
        ),
        *(
            ({"payload": typed(kind, "abc", "def")}, [{"payload": b"abc"}, {"payload": b"def"}])
            for kind in (pa.string(), pa.large_string(), pa.string_view())
        ),
        *(
            (
                {"producer_name": typed(kind, "n", None), "routing_key": typed(kind, "n", None)},
                [{"producer_name": "n", "routing_key": "n"}, {}],
            )
            for kind in (
                pa.string(),
                pa.large_string(),
                pa.string_view(),
                pa.dictionary(pa.int8(), pa.string()),
            )
        ),
        *(
            ({"attributes": typed(kind, [("k", "v")], None)}, [{"attributes": {"k": "v"}}, {}])
            for kind in (
                pa.map_(pa.string(), pa.large_string()),
                pa.map_(pa.string_view(), pa.string()),
            )
        ),
        *(
            ({name: pa.nulls(2)}, [{}, {}])
            for name in ("producer_name", "routing_key", "attributes", "schema_id")
        ),
        *(
            ({"schema_id": typed(kind, value, None)}, [{"schema_id": value}, {}])
            for kind, value in ((pa.uint64(), 2**64 - 1), (pa.int8(), 5))
        ),
        *(
            ({"schema_version": typed(kind, value, None)}, [{"schema_version": stored}, {}])
            for kind, value, stored in (
                (pa.uint32(), 2**32 - 1, 2**32 - 1),
                (pa.int64(), 5, 5),
                (pa.int64(), -1, 2**32 - 1),
                (pa.uint8(), 255, 255),
            )
        ),
    ],
)
def test_columns_may_be_of_other_types_of_arrow(is_compiled, columns, rows):
    batch = table_of(**{"payload": [b"a", b"b"], **columns})
    items = [
        a_row(number, **{"payload": b"ab"[number : number + 1], **row})
        for number, row in enumerate(rows)
    ]
    assert encode(batch, is_compiled)[0].data == framed(items)


@each(
    ("kind", "value", "milliseconds"),
    [
        (pa.timestamp("s"), 3, 3000),
        (pa.timestamp("s", "UTC"), 253_402_300_799, 253_402_300_799_000),
        (pa.timestamp("ms", "Asia/Tokyo"), 253_402_300_799_999, 253_402_300_799_999),
        (pa.timestamp("us", "Etc/UTC"), 1_999, 1),
        (pa.timestamp("us"), 253_402_300_799_999_999, 253_402_300_799_999),
        (pa.timestamp("ns"), 1_999_999, 1),
        (pa.timestamp("ns"), 2**63 - 1, (2**63 - 1) // 10**6),
        (pa.timestamp("us"), 0, 0),
        (pa.null(), None, NOW_MS),
    ],
    ids=str,
)
def test_publish_times_of_any_unit_are_floored(is_compiled, kind, value, milliseconds):
    batch = table_of(payload=[b"a"], publish_time=pa.array([value], kind))
    (found,) = encode(batch, is_compiled)
    assert found.data == framed([a_row(0, payload=b"a", publish_time=milliseconds)])
    assert found.publish_time_max == milliseconds


@each(
    ("kind", "value"),
    [
        (pa.timestamp("s"), -1),
        (pa.timestamp("us"), -1),
        (pa.timestamp("ns"), -(2**63)),
        (pa.timestamp("s"), 253_402_300_800),
        (pa.timestamp("s"), 2**63 - 1),
        (pa.timestamp("ms"), 253_402_300_800_000),
        (pa.timestamp("us"), 253_402_300_800_000_000),
    ],
    ids=str,
)
def test_publish_times_that_no_calendar_has_are_refused(is_compiled, kind, value):
    batch = table_of(payload=[b"a", b"b"], publish_time=pa.array([None, value], kind))
    with pytest.raises(InvalidRequestError, match="row 1 has a publish_time"):
        encode(batch, is_compiled)


def test_null_attributes_hide_what_lies_under_them(is_compiled):
    """Arrow allows a null map to have entries, even such that would be refused."""
    keys, values = pa.array(["a", "a", "b"]), pa.array(["1", "2", "3"])
    hidden = pa.MapArray.from_arrays(pa.array([0, 2, 3], pa.int32()), keys, values)
    maps = pa.Array.from_buffers(
        MAP,
        2,
        [pa.py_buffer(b"\2"), hidden.buffers()[1]],
        children=[hidden.values if hasattr(hidden, "values") else hidden.field(0)],
    )
    assert maps.to_pylist() == [None, [("b", "3")]]
    (found,) = encode(table_of(payload=[b"x", b"y"], attributes=maps), is_compiled)
    assert found.data == framed(
        [a_row(0, payload=b"x"), a_row(1, payload=b"y", attributes={"b": "3"})]
    )


# -- encoding: errors -----------------------------------------------------------------------

GOOD = [b"a", b"b", b"c"]
BAD_TABLES = {
    "row 1 has no payload": {"payload": [b"a", None, b"c"]},
    "row 0": {"payload": pa.nulls(2)},
    "no column 'payload'": {"offset": [1]},
    "rename it to 'payload'": {"value": GOOD},
    "to 'routing_key'": {"payload": GOOD, "key": GOOD},
    "'colour'.*topic, offset, publish_time": {"payload": GOOD, "colour": GOOD},
    "int64": {"payload": [1, 2]},
    "binary, not string": {"payload": GOOD, "producer_name": GOOD},
    "not a timestamp": {"payload": GOOD, "publish_time": [1, 2, 3]},
    "not map": {"payload": [b"a"], "attributes": [{"k": "v"}]},
    "a part of column 'attributes' is int64, not string": {
        "payload": [b"a"],
        "attributes": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    },
    "not an integer": {"payload": [b"a"], "schema_id": ["1"]},
    "schema_version": {"payload": [b"a"], "schema_version": [2**40]},
    "row 2 has an attribute 'l' that is null": {
        "payload": GOOD,
        "attributes": pa.array([None, [], [("k", "v"), ("l", None)]], MAP),
    },
    "row 1 has the attribute 'k' twice": {
        "payload": GOOD,
        "attributes": pa.array([[], [("k", "v"), ("k", "v")], []], MAP),
    },
    "row 1 has the attribute '0' twice": {
        "payload": GOOD,
        "attributes": pa.array([[], [(str(n % 99), "") for n in range(100)], []], MAP),
    },
}
BINCODE1 = {"codec": Codec.BINCODE1}
BAD_FOR_SETTINGS = [
    ({"payload": GOOD, "schema_id": [None, None, 1]}, BINCODE1, "no field schema_id"),
    ({"payload": GOOD, "schema_version": [None, 0, None]}, BINCODE1, "no field schema_version"),
    ({"payload": GOOD, "routing_key": ["", None, None]}, BINCODE1, "no field routing_key"),
    ({"payload": GOOD}, {"topic": "\ud800"}, "Unicode"),
]
TOO_LARGE = [
    ({"payload": [b"", bytes(100), bytes(101)]}, {"payload_bytes_max": 100}, "row 2 .* 101 bytes"),
    (
        {"payload": [b"", b""], "producer_name": ["", "x" * ENVELOPE_SIZE_BYTES_MAX]},
        {},
        "row 1 has names",
    ),
    (
        {"payload": [bytes(FRAME_BODY_BYTES_MAX - 10)]},
        {"payload_bytes_max": 2**40},
        "a frame's body",
    ),
]


@each(
    ("columns", "settings", "text", "kind"),
    [
        *((columns, {}, text, InvalidRequestError) for text, columns in BAD_TABLES.items()),
        *((*row, InvalidRequestError) for row in BAD_FOR_SETTINGS),
        *((*row, MessageTooLargeError) for row in TOO_LARGE),
    ],
)
def test_rows_that_cannot_be_messages_are_refused(is_compiled, columns, settings, text, kind):
    batch = table_of(**columns)
    with pytest.raises(InvalidRequestError, match=text) as caught:
        encode(batch, is_compiled, **settings)
    assert type(caught.value) is kind
    assert caught.value.hint or kind is MessageTooLargeError or "Arrow" not in caught.value.message
    settings = {"topic": TOPIC, "codec": Codec.BINCODE2, "payload_bytes_max": 10 * MIB, **settings}
    with pytest.raises(kind, match=text):
        check_rows(batch, is_compiled=is_compiled, **settings)


def test_column_that_is_there_twice_and_a_time_before_1970_are_refused(is_compiled):
    batch = pa.RecordBatch.from_arrays([pa.array(GOOD), pa.array(GOOD)], names=["payload"] * 2)
    with pytest.raises(InvalidRequestError):
        encode(batch, is_compiled)
    with pytest.raises(InvalidRequestError):
        encode(table_of(payload=GOOD), is_compiled, now_ms=-1)


@each("rows", [0, 1, 3000])
def test_check_accepts_what_can_be_encoded(is_compiled, rows):
    """Attributes that only Python can check are in the first row and in the last one."""
    many = [(str(number), "x") for number in range(100)]
    batch = table_of(
        payload=pa.array([b"x" * (number % 7) for number in range(rows)], pa.binary()),
        attributes=pa.array(
            [many if n in (0, rows - 1) else [("a", "b")] for n in range(rows)], MAP
        ),
    )
    check_rows(
        batch, topic=TOPIC, codec=Codec.BINCODE2, payload_bytes_max=6, is_compiled=is_compiled
    )


def test_row_that_passes_the_check_fits_with_any_offset(is_compiled):
    """An envelope at its limit with the smallest numbers is over it with larger ones."""
    limits = {"topic": TOPIC, "codec": Codec.BINCODE2, "payload_bytes_max": 10}

    def fits(name_bytes):
        batch = table_of(payload=[b"a"], producer_name=["x" * name_bytes])
        try:
            check_rows(batch, is_compiled=is_compiled, **limits)
        except MessageTooLargeError:
            return None
        return batch

    sizes = range(ENVELOPE_SIZE_BYTES_MAX - 200, ENVELOPE_SIZE_BYTES_MAX)
    last = [batch for size in sizes if (batch := fits(size)) is not None][-1]
    largest = {"first_offset": 2**62, "producer_id": 2**64 - 1, "first_request_id": 2**62}
    assert encode(last, is_compiled, payload_bytes_max=10, **largest)
    assert fits(len(last["producer_name"][0].as_py()) + 1) is None


@each("codec", list(Codec))
def test_fields_that_a_codec_lacks_may_be_null(is_compiled, codec):
    batch = table_of(
        payload=[b"a"],
        schema_id=pa.nulls(1, pa.int64()),
        schema_version=pa.nulls(1, pa.int32()),
        routing_key=pa.nulls(1, pa.string()),
    )
    (found,) = encode(batch, is_compiled, codec=codec)
    assert found.data == framed([a_row(0, payload=b"a")], codec)


def test_limits_are_the_last_sizes_that_are_taken(is_compiled):
    """The largest envelope and the largest payload go through; a byte more does not."""
    row = a_row(0, payload=b"a", producer_name="x" * (ENVELOPE_SIZE_BYTES_MAX - 100))
    spare = ENVELOPE_SIZE_BYTES_MAX - (len(encode_message(row, Codec.BINCODE2)) - 1)
    name = row.producer_name + "x" * spare
    (found,) = encode(table_of(payload=[b"a"], producer_name=[name]), is_compiled)
    assert found.data == framed([replace(row, producer_name=name)])
    with pytest.raises(MessageTooLargeError):
        encode(table_of(payload=[b"a"], producer_name=[name + "x"]), is_compiled)
    assert encode(table_of(payload=[bytes(100)]), is_compiled, payload_bytes_max=100)


ENTRIES = pa.array(
    [("a", "b"), ("c", "d"), ("e", "f")],
    pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.string())]),
)


@each(
    ("column", "kind", "offsets", "data"),
    [
        ("payload", pa.binary(), [0, 1, 2, 2**31 - 1], b"abc"),
        ("payload", pa.binary(), [0, 3, 0, 3], b"abc"),
        ("payload", pa.binary(), [0, 2**31 - 1, 2, 3], b"abc"),
        ("payload", pa.binary(), [-5, 1, 2, 3], b"abc"),
        ("payload", pa.large_binary(), [0, 1, 2**62, 3], b"abc"),
        ("payload", pa.string(), [0, 1, 2, 3], b"ab\xff"),
        ("producer_name", pa.string(), [0, 1, 2, 3], b"\xffbc"),
        ("routing_key", pa.large_string(), [0, 9, 9, 9], b"abc"),
        ("attributes", MAP, [0, 9, 9, 9], None),
        ("attributes", MAP, [0, 3, 1, 3], None),
        ("attributes", MAP, [-1, 1, 2, 3], None),
    ],
)
def test_arrays_that_lie_about_their_memory_are_refused(is_compiled, column, kind, offsets, data):
    """The batch is valid while Arrow makes it, and is changed under its hands then."""
    layout = "<4q" if kind in (pa.large_string(), pa.large_binary()) else "<4i"
    numbers, values = bytearray(struct.pack(layout, 0, 1, 2, 3)), bytearray(b"abc")
    buffers = [None, pa.py_buffer(numbers)]
    if data is None:
        array = pa.Array.from_buffers(kind, 3, buffers, children=[ENTRIES])
    else:
        array = pa.Array.from_buffers(kind, 3, [*buffers, pa.py_buffer(values)])
    batch = table_of(**{"payload": GOOD, column: array})
    assert encode(batch, is_compiled)
    numbers[:] = struct.pack(layout, *offsets)
    values[:] = data or values
    with pytest.raises(InvalidRequestError):
        encode(batch, is_compiled)


# -- the compiled loops ---------------------------------------------------------------------


def in_a_process(script, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=False,
        timeout=240,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_what_is_required_and_not_there_is_a_setting_to_fix(monkeypatch):
    monkeypatch.setattr(kernels, "_current", None)
    monkeypatch.setattr(kernels, "request", lambda: None)
    with pytest.raises(ConfigError):
        ColumnarDecoder(TOPIC, Codec.BINCODE2, is_compiled=True)
    with pytest.raises(ConfigError):
        encode(table_of(payload=[b"a"]), True)
    one = ColumnarDecoder(TOPIC, Codec.BINCODE2)
    assert not one.is_compiled
    (found,) = encode(table_of(payload=[b"a"]), None)
    assert one.decode(found.data, expected_offset=0).batch.num_rows == 1


def test_module_needs_no_numba_until_it_decodes():
    in_a_process(
        "import sys, ister.format.arrow.decode as c, ister.format.arrow.encode\n"
        "from ister.base.model import Codec\n"
        "c.ColumnarDecoder('/a/b', Codec.BINCODE2, is_compiled=False)\n"
        "assert 'numba' not in sys.modules"
    )


GUARDED = """
import ctypes, mmap, random, zlib
from tests.support.builders import a_message
from ister.errors import CorruptDataError
from ister import kernels
from ister.format.arrow.decode import ColumnarDecoder
from ister.format.frame import pack_header
from ister.format.message import decode_message, encode_message
from ister.base.model import Codec

if not kernels.load():
    raise SystemExit
seed = 20_264
rng = random.Random(seed)
room = 64 * mmap.PAGESIZE
memory = mmap.mmap(-1, room + mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
FILLINGS = (b"\\xff", b"\\xfd" + b"\\xff" * 8, b"\\xfb\\xff\\xff", b"\\xfc\\xff\\xff\\xff\\x7f",
            (2**63).to_bytes(8, "little"), (2**63 - 1).to_bytes(8, "little"),
            (2**64 - 1).to_bytes(8, "little"), bytes(8), b"\\xfb", b"\\x01", b"\\x7f")
bodies = {codec: [encode_message(a_message(
    payload=bytes(size), producer_name="n" * (size % 19), attributes={"k" * size: "v", "": "w"},
    **({"schema_id": 2**size, "schema_version": size, "routing_key": "r" * size}
       if codec is Codec.BINCODE2 else {})), codec) for size in range(0, 40, 3)] for codec in Codec}
decoders = [ColumnarDecoder("/default/t", codec, columns, is_compiled=True)
            for codec in Codec for columns in (None, [], ["payload"], ["attributes"])]
good = bad = 0
for turn in range(12_000):
    decoder = decoders[turn % len(decoders)]
    body = bytearray(rng.choice(bodies[decoder.codec]))
    for _ in range(rng.randrange(3)):
        filling = rng.choice(FILLINGS)
        at = rng.randrange(len(body) + 1)
        body[at : at + rng.choice((0, len(filling)))] = filling
    del body[rng.choice((len(body), rng.randrange(1, len(body) + 1))) :]
    body = bytes(body)
    frame = pack_header(0, len(body), zlib.crc32(body)) + body
    start = room - len(frame)
    memory[start:room] = frame
    view = memoryview(memory)[start:room]
    try:
        decode_message(body, decoder.codec)
        is_good = True
    except CorruptDataError:
        is_good = False
    try:
        assert decoder.decode(view, expected_offset=0).batch.num_rows == 1
        assert is_good, (seed, turn)
        good += 1
    except CorruptDataError:
        assert not is_good, (seed, turn)
        bad += 1
    # A header that lies: no more is read than there is.
    memory[start + 8 : start + 12] = rng.randrange(2**32).to_bytes(4, "little")
    decoder.decode(view, expected_offset=0)
    cut = rng.randrange(len(frame))
    decoder.decode(view[len(view) - cut :], expected_offset=0)
assert good > 1000 and bad > 1000, (good, bad)
"""


def test_no_byte_outside_of_a_buffer_is_touched():
    """Goal: a body that lies about its lengths makes the compiled loop read nothing else.

    Frames lie at the very end of a page, and the next one may not be touched. Arrow's own guards
    around its buffers stop the process if something was written beside one.
    """
    in_a_process(GUARDED, ARROW_DEBUG_MEMORY_POOL="abort")


GUARDED_WRITING = """
import random
import pyarrow as pa
from ister import kernels
from ister.format.arrow.encode import encode_frames
from ister.base.model import Codec

if not kernels.load():
    raise SystemExit
seed = 20_265
rng = random.Random(seed)

def text():
    return rng.choice((None, "", "x" * rng.randrange(40), "y" * rng.choice((250, 251, 70_000))))

for turn in range(300):
    count = rng.randrange(1, 30)
    batch = pa.RecordBatch.from_pydict({
        "payload": pa.array([rng.randbytes(rng.choice((0, 3, 17, 300))) for _ in range(count)]),
        "producer_name": pa.array([text() for _ in range(count)], pa.string()),
        "attributes": pa.array([[(str(n), text() or "") for n in range(rng.randrange(4))]
                                for _ in range(count)], pa.map_(pa.string(), pa.string())),
        "routing_key": pa.array([text() for _ in range(count)], pa.string()),
    })
    settings = dict(topic="/default/t", codec=Codec.BINCODE2, first_offset=rng.choice((0, 2**40)),
                    now_ms=1, payload_bytes_max=1000, segment_bytes=rng.choice((1, 500, 2**20)))
    fast = encode_frames(batch, **settings, is_compiled=True)
    assert fast == encode_frames(batch, **settings, is_compiled=False), (seed, turn)
"""


def test_no_byte_outside_of_a_segment_is_written():
    """As above, for encoding: segments of every size, and frames much larger than one."""
    in_a_process(GUARDED_WRITING, ARROW_DEBUG_MEMORY_POOL="abort")


def test_import_loads_no_pandas():
    """Goal: Arrow imports pandas with the first array that it makes of Python values."""
    script = "import sys, ister.topic.columns; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
