"""Archives: every field of every message in Parquet, and back to the very same frames."""

import io
import json
import random
from contextlib import suppress
from dataclasses import replace

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from ister.base.limits import OBJECT_INDEX_ENTRIES_MAX  # noqa: E402
from ister.base.model import (  # noqa: E402
    COLUMNS,
    Codec,
    MessageId,
)
from ister.errors import (  # noqa: E402
    CorruptDataError,
    InvalidRequestError,
    UnsupportedVersionError,
)
from ister.format.archive import ArchiveReader  # noqa: E402
from ister.format.archive_writer import ArchiveWriter  # noqa: E402
from ister.format.arrow.decode import ColumnarDecoder  # noqa: E402
from ister.format.arrow.encode import restore_frames  # noqa: E402
from ister.format.arrow.schema import EVERY_FIELD, arrow_schema  # noqa: E402
from ister.format.crc import crc32  # noqa: E402
from ister.format.frame import FrameBatch, scan_frames  # noqa: E402
from ister.format.message import encode_message  # noqa: E402
from tests.support.builders import a_message, frames, with_bit_flipped  # noqa: E402
from tests.support.cases import each  # noqa: E402

TOPIC = "/default/t"
BOTH_CODECS = each("codec", list(Codec))


def bodies(count, codec, first=0):
    """Bodies with all that is unusual now and then."""
    for number in range(first, first + count):
        message = a_message(
            topic_offset=number if number % 5 else 2**64 - 1,
            topic_name=TOPIC if number % 7 else "/other/topic",
            broker_addr="" if number % 3 else "b:6650",
            publish_time=2**64 - 1 if number == 11 else 1_700_000_000_000 + number,
            payload=b"%d" % number * (number % 50),
            subscription_name=(None, "", "s")[number % 3],
        )
        if codec is Codec.BINCODE2 and number % 2:
            message = replace(message, routing_key="k", schema_id=2**64 - 1, schema_version=1)
        yield encode_message(message, codec)


def as_batch(data, codec, first=0):
    decoder = ColumnarDecoder(TOPIC, codec, EVERY_FIELD)
    decoded = decoder.decode(data, expected_offset=first)
    assert decoded.end == len(data)
    return decoded.batch


def a_batch(count, first=0):
    """Messages in bincode 2."""
    return as_batch(frames(first, bodies(count, Codec.BINCODE2, first)), Codec.BINCODE2, first)


def written(batches, *, codec=Codec.BINCODE2, start=0, end=None, kept="", row_group_bytes=4096):
    file = io.BytesIO()
    writer = ArchiveWriter(file, topic=TOPIC, codec=codec, row_group_bytes=row_group_bytes)
    for batch in batches:
        writer.write(batch)
    rows = sum(batch.num_rows for batch in batches)
    archive = writer.finish(start=start, end=start + rows if end is None else end, kept=kept)
    return file.getvalue(), archive


def opened(data, **named):
    return ArchiveReader(
        lambda position, size: data[position : position + size], len(data), path="o", **named
    )


def restored(reader):
    return b"".join(reader.restore(number).data for number in range(len(reader.row_groups)))


@BOTH_CODECS
def test_frames_come_back_byte_for_byte(codec):
    data = frames(100, bodies(500, codec, 100))
    file, archive = written([as_batch(data, codec, 100)], codec=codec, start=100)
    reader = opened(file, topic=TOPIC)
    assert (reader.start, reader.end, reader.codec, reader.kept) == (100, 600, codec, "")
    assert len(reader.row_groups) > 3
    assert reader.row_groups == archive.row_groups
    assert restored(reader) == data


@BOTH_CODECS
@each("is_compiled", [False, None])
def test_a_part_of_a_batch_is_restored_alone(codec, is_compiled):
    data = frames(0, bodies(300, codec))
    whole = restore_frames(as_batch(data, codec), topic=TOPIC, codec=codec)
    part = restore_frames(
        as_batch(data, codec).slice(37, 100), topic=TOPIC, codec=codec, is_compiled=is_compiled
    )
    assert part.data == data[whole.starts[37] : whole.starts[137]]
    assert part.offsets == list(range(37, 137))


def test_the_table_is_the_usual_one_to_others(tmp_path):
    """Goal: any tool that reads Parquet sees the columns of `read_arrow`, with the same types."""
    batch = a_batch(200)
    path = tmp_path / "o.parquet"
    path.write_bytes(written([batch])[0])
    table = pq.read_table(path, columns=list(COLUMNS))
    assert table.schema.equals(arrow_schema())
    assert table.equals(pa.Table.from_batches([batch.select(list(COLUMNS))]))
    found = pq.read_table(path, filters=[("offset", ">=", 150)])
    assert found["offset"].to_pylist() == list(range(150, 200))
    metadata = pq.read_metadata(path)
    statistics = metadata.row_group(0).column(1).statistics
    assert (statistics.min, metadata.row_group(0).column(0).compression) == (0, "ZSTD")


@each("columns", [(), ("payload",), ("attributes", "offset"), EVERY_FIELD])
def test_some_columns_in_the_wanted_order(columns):
    batch = a_batch(300)
    reader = opened(written([batch])[0])
    first = 0
    for number, group in enumerate(reader.row_groups):
        rows = reader.read(number, columns)
        assert rows.batch.num_rows == group.rows
        assert rows.batch.schema.names == list(columns)
        for name in columns:
            assert rows.batch.column(name).equals(batch.column(name).slice(first, group.rows))
        first += group.rows


def test_columns_that_are_not_wanted_are_not_fetched():
    noise = random.Random(1)
    body = [encode_message(a_message(payload=noise.randbytes(1_000_000)), Codec.BINCODE2)]
    batch = as_batch(frames(0, body), Codec.BINCODE2)
    data = written([batch])[0]
    seen = []

    def read(position, size):
        seen.append(size)
        return data[position : position + size]

    reader = ArchiveReader(read, len(data), path="o")
    seen.clear()
    reader.read(0, ["offset", "routing_key"])
    assert 0 < sum(seen) < 100_000 < len(data)


def test_descriptor_of_an_archive():
    batch = a_batch(400, 20)
    data, archive = written([batch], start=20)
    described = archive.describe("o", epoch=3, incarnation="i", created_at=5, etag="e")
    assert (described.start, described.end, described.messages) == (20, 420, 400)
    assert (described.format, described.codec, described.kept) == ("parquet", Codec.BINCODE2, "")
    assert described.size_bytes == len(data)
    reader = opened(data)
    metadata = pq.read_metadata(io.BytesIO(data))
    assert described.uncompressed_bytes == sum(
        metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)
    )
    assert described.uncompressed_bytes >= sum(len(one) for one in batch["payload"].to_pylist())
    assert described.offset_index == tuple((g.first_offset, g.position) for g in reader.row_groups)
    assert described.publish_time_min == 1_700_000_000_020
    assert described.publish_time_max == 1_700_000_000_419
    firsts = [offset for offset, _ in described.offset_index]
    assert described.publish_time_index == (
        0,
        *(1_700_000_000_000 + first - 1 for first in firsts[1:]),
    )
    assert opened(data).describe(archive.crc) == archive


def test_times_that_no_clock_gives_are_kept_and_not_indexed():
    codec = Codec.BINCODE2
    data = frames(0, bodies(20, codec))
    file, archive = written([as_batch(data, codec)])
    described = archive.describe("o", epoch=1, incarnation="i", created_at=5, etag=None)
    assert (described.publish_time_max, described.publish_time_index) == (None, ())
    assert restored(opened(file)) == data


def test_index_has_a_bound():
    count = OBJECT_INDEX_ENTRIES_MAX + 100
    batch = a_batch(count)
    data, archive = written([batch.slice(at, 1) for at in range(count)], row_group_bytes=1)
    described = archive.describe("o", epoch=1, incarnation="i", created_at=5, etag=None)
    assert OBJECT_INDEX_ENTRIES_MAX // 2 <= len(described.offset_index) <= OBJECT_INDEX_ENTRIES_MAX
    assert opened(data).rows == count


def test_messages_left_out_on_purpose():
    batch = a_batch(300)
    mask = pc.equal(pc.bit_wise_and(batch.column("offset"), pa.scalar(3)), 1)
    data, archive = written([batch.filter(mask)], end=300, kept="latest-per-key")
    reader = opened(data)
    assert (reader.kept, reader.rows, archive.rows) == ("latest-per-key", 75, 75)
    found = [
        offset
        for number in range(len(reader.row_groups))
        for offset in reader.restore(number).offsets
    ]
    assert found == list(range(1, 300, 4))
    assert reader.find(0) == 0
    assert reader.find(299) == len(reader.row_groups)


def test_an_archive_of_nothing_says_what_it_is():
    data, archive = written([], end=50, kept="latest-per-key")
    reader = opened(data)
    assert (reader.start, reader.end, reader.rows, reader.row_groups) == (0, 50, 0, ())
    described = archive.describe("o", epoch=1, incarnation="i", created_at=5, etag=None)
    assert (described.messages, described.offset_index) == (0, ())
    assert described.publish_time_min is None


def test_what_a_writer_refuses():
    batch = a_batch(10)
    with pytest.raises(InvalidRequestError):
        written([batch.slice(0, 9)], end=10)
    with pytest.raises(InvalidRequestError):
        written([batch, batch])
    with pytest.raises(InvalidRequestError):
        written([batch.select(["offset"])])
    with pytest.raises(InvalidRequestError):
        written([batch], start=3, end=20, kept="latest-per-key")
    with pytest.raises(InvalidRequestError):
        written([pa.concat_batches([batch.slice(5), batch.slice(0, 5)])])
    writer = ArchiveWriter(io.BytesIO(), topic=TOPIC, codec=Codec.BINCODE1)
    data = frames(0, bodies(3, Codec.BINCODE2))
    scan = scan_frames(data, expected_offset=0)
    with pytest.raises(InvalidRequestError):
        writer.write_frames(FrameBatch(data, scan.starts, scan.end, 0, Codec.BINCODE2))


def with_checksum(data):
    """A Parquet file with the checksum of its footer before that."""
    size = int.from_bytes(data[-8:-4], "little") + 8
    return data[:-size] + b"ISTR" + crc32(data[-size:]).to_bytes(4, "little") + data[-size:]


def with_metadata(data, **changes):
    """The same table with other words about it."""
    file = pq.ParquetFile(io.BytesIO(data))
    words = {k.decode(): v.decode() for k, v in file.metadata.metadata.items() if b"ister" in k}
    words |= {f"ister.{name}": value for name, value in changes.items()}
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, file.schema_arrow, compression="zstd") as writer:
        writer.write_table(file.read())
        writer.add_key_value_metadata(words)
    return with_checksum(sink.getvalue())


def test_a_newer_version_is_not_read():
    data, _ = written([a_batch(10)])
    with pytest.raises(UnsupportedVersionError):
        opened(with_metadata(data, format_version="2"))
    with pytest.raises(CorruptDataError):
        opened(with_metadata(data, format_version="x"))
    foreign = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), foreign)
    for other in (foreign.getvalue(), with_checksum(foreign.getvalue())):
        with pytest.raises(CorruptDataError):
            opened(other)


@each(
    "changes",
    [
        {"start": "1"},
        {"end": "11"},
        {"end": "x"},
        {"codec": "bincode9"},
        {"row_groups": "[]"},
        {"row_groups": "[[0,10]]"},
        {"row_groups": "x"},
        {"row_groups": "[" * 100_000},
    ],
)
def test_a_footer_that_contradicts_itself_is_damage(changes):
    data, _ = written([a_batch(10)])
    with pytest.raises(CorruptDataError):
        opened(with_metadata(data, **changes))


def test_an_offset_that_is_missing_or_twice_is_damage():
    """Goal: what the footer promises is compared with the rows, not believed."""
    batch = a_batch(10)
    data, archive = written([batch])
    for wrong in (
        pa.array([0, 1, 2, 3, 4, 4, 6, 7, 8, 9], pa.int64()),
        pa.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], pa.int64()),
    ):
        sink = io.BytesIO()
        table = pa.Table.from_batches([batch.set_column(1, "offset", wrong)])
        with pq.ParquetWriter(sink, table.schema, compression="zstd") as writer:
            writer.write_table(table)
            group = archive.row_groups[0]
            words = {
                k.decode(): v.decode()
                for k, v in pq.read_metadata(io.BytesIO(data)).metadata.items()
                if b"ister" in k
            }
            size = sink.tell() - 4
            content = sink.getvalue()[4:]
            group = group._replace(size_bytes=size, crc=crc32(content))
            words["ister.row_groups"] = json.dumps([group])
            writer.add_key_value_metadata(words)
        with pytest.raises(CorruptDataError) as caught:
            opened(with_checksum(sink.getvalue())).read(0)
        assert (caught.value.offset, caught.value.path) == (0, "o")


def test_every_flipped_bit_is_found_or_harmless():
    """Goal: whatever bit of a file is another one, the frames are the same or it is an error."""
    codec = Codec.BINCODE2
    data = frames(0, bodies(60, codec))
    file, _ = written([as_batch(data, codec)], row_group_bytes=100_000)
    groups_end = opened(file).row_groups[-1].end_position
    bits = [*range(0, 8 * groups_end, 61), *range(8 * groups_end, 8 * len(file), 37)]
    found = 0
    for bit in bits:
        flipped = with_bit_flipped(file, bit)
        try:
            assert restored(opened(flipped)) == data, bit
        except (CorruptDataError, UnsupportedVersionError) as error:
            found += 1
            assert isinstance(error, UnsupportedVersionError) or error.path == "o"
            if 32 <= bit < 8 * groups_end:
                assert (error.offset, error.position) == (0, 4), bit
        for columns in (["payload", "attributes"], ["offset"], ["routing_key", "topic"]):
            # Whatever it says, it comes back.
            with suppress(CorruptDataError, UnsupportedVersionError):
                opened(flipped).read(0, columns)
    assert found > len(bits) * 0.98


@each("size", [0, 1, 8, 11, 12, 100, -1, -8, -2000])
def test_a_file_that_was_cut_short_is_damage(size):
    file, _ = written([a_batch(60)])
    with pytest.raises(CorruptDataError):
        opened(file[:size])


def test_a_damaged_page_is_found_when_only_its_column_is_read():
    file, _ = written([a_batch(60)], row_group_bytes=100_000)
    column = pq.read_metadata(io.BytesIO(file)).row_group(0).column(4)
    assert column.path_in_schema == "payload"
    position = column.data_page_offset + column.total_compressed_size - 3
    flipped = with_bit_flipped(file, 8 * position)
    with pytest.raises(CorruptDataError):
        opened(flipped).read(0, ["payload"])
    assert opened(flipped).read(0, ["offset"]).batch.num_rows == 60


def test_another_topic_s_archive_is_not_taken():
    file, _ = written([a_batch(5)])
    with pytest.raises(CorruptDataError):
        opened(file, topic="/default/u")


def test_rows_that_no_decoder_gives_are_not_restored():
    batch = as_batch(frames(0, bodies(5, Codec.BINCODE1)), Codec.BINCODE1)
    routed = batch.set_column(6, "routing_key", pa.array(["k"] * 5))
    for is_compiled in (False, None):
        with pytest.raises(CorruptDataError):
            restore_frames(routed, topic=TOPIC, codec=Codec.BINCODE1, is_compiled=is_compiled)
    nameless = batch.set_column(3, "producer_name", pa.array([None] * 5, pa.string()))
    with pytest.raises(CorruptDataError):
        restore_frames(nameless, topic=TOPIC, codec=Codec.BINCODE1)


def test_message_ids_default_to_topic_and_offset():
    """Goal: what is as it should be costs nothing."""
    message = a_message(broker_addr="")
    own = [
        encode_message(
            replace(message, msg_id=MessageId(topic_name=TOPIC, topic_offset=offset)),
            Codec.BINCODE2,
        )
        for offset in range(10)
    ]
    batch = as_batch(frames(0, own), Codec.BINCODE2)
    for name in ("message_topic", "message_offset", "broker_addr", "publish_time_ms"):
        assert batch.column(name).null_count == 10
