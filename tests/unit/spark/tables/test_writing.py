"""Rows as files: by date, in row groups, bounded."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ister.spark.tables import writing
from ister.spark.tables.base import Layout
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.targets import Storage, StoreTarget
from ister.spark.tables.writing import FileMaker
from tests.support.exports import DAY_US, NOON_US, rows_of


@pytest.fixture
def target(tmp_path):
    """A directory."""
    return StoreTarget(storage=Storage("fs", str(tmp_path)))


def _maker(target, *, layout=None, file_bytes=1 << 30):
    layout = layout or Layout(schema=ENVELOPE, by_date=True)
    return FileMaker(target, layout, name="f", file_bytes=file_bytes, zstd_level=1)


def test_days_interleaved(target, tmp_path):
    maker = _maker(target)
    rows = rows_of(0, 100)
    times = [NOON_US + number % 3 * DAY_US for number in range(100)]
    index = rows.schema.get_field_index("publish_time")
    rows = rows.set_column(index, "publish_time", pa.array(times, ENVELOPE.field(2).type))
    for batch in rows.to_batches(max_chunksize=7):
        maker.write(batch)
    files = sorted(maker.finish(), key=lambda file: file.date)
    assert [file.date for file in files] == ["2023-11-14", "2023-11-15", "2023-11-16"]
    for day, file in enumerate(files):
        found = pq.ParquetFile(tmp_path / file.path).read()
        assert found.column("offset").to_pylist() == list(range(day, 100, 3))
        assert file.path.startswith(f"publish_date={file.date}/f-")
        assert (file.first_offset, file.last_offset) == (day, list(range(day, 100, 3))[-1])
        assert file.rows == found.num_rows
        assert file.bytes == (tmp_path / file.path).stat().st_size
        assert file.first_time_us == file.last_time_us == NOON_US + day * DAY_US


def test_more_days_than_files_may_be_open(target, tmp_path):
    maker = _maker(target)
    for start in (0, 60):
        for batch in rows_of(start, start + 60, step_us=DAY_US).to_batches():
            maker.write(batch)
    files = maker.finish()
    assert sum(file.rows for file in files) == 120
    assert len({file.date for file in files}) == 60


def test_row_groups_and_files_have_a_size(target, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_ROW_GROUP_BYTES", 2000)
    maker = _maker(target, file_bytes=4000)
    for batch in rows_of(0, 1000).to_batches(max_chunksize=10):
        maker.write(batch)
    files = maker.finish()
    assert len(files) > 3
    found = [pq.ParquetFile(tmp_path / file.path) for file in files]
    assert all(file.metadata.num_row_groups > 1 for file in found[:-1])
    offsets = [o for file in found for o in file.read().column("offset").to_pylist()]
    assert sorted(offsets) == list(range(1000))
    column = found[0].metadata.row_group(0).column(1)
    assert (column.compression, column.statistics.min) == ("ZSTD", 0)


def test_no_file_has_ids_of_fields(target, tmp_path):
    """Iceberg gives columns ids of its own, and goes by names where a file has none."""
    maker = _maker(target)
    maker.write(rows_of(0, 3).to_batches()[0])
    [file] = maker.finish()
    schema = pq.ParquetFile(tmp_path / file.path).schema_arrow
    assert all(b"PARQUET:field_id" not in (item.metadata or {}) for item in schema)


def test_a_table_without_partitions(target, tmp_path):
    maker = _maker(target, layout=Layout(schema=ENVELOPE, by_date=False))
    for batch in rows_of(0, 10, step_us=DAY_US).to_batches():
        maker.write(batch)
    [file] = maker.finish()
    assert (file.date, file.rows, "/" in file.path) == (None, 10, False)


def test_no_rows_make_no_file(target, tmp_path):
    maker = _maker(target)
    maker.write(rows_of(0, 0).to_batches()[0] if rows_of(0, 0).to_batches() else _nothing())
    assert maker.finish() == []
    assert not list(tmp_path.rglob("*.parquet"))


def _nothing() -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in ENVELOPE], schema=ENVELOPE)


def test_what_is_given_up_leaves_nothing(target, tmp_path):
    maker = _maker(target, file_bytes=1)
    maker.write(rows_of(0, 10, step_us=DAY_US // 4).to_batches()[0])
    maker._complete(next(iter(maker._open)))
    assert len(maker.files) == 1
    maker.abort()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
