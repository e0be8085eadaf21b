"""An Iceberg table: tables of others, lost answers, what its properties say."""

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform

from ister.errors import CommitUnknownError, ConflictError, CorruptDataError
from ister.spark.tables.columns import ENVELOPE
from support.exports import (
    TOPIC,
    add_rows,
    adding,
    iceberg_catalog,
    offsets_in,
    rows_of,
    table_at,
    tasks_here,
    write_files,
)


@pytest.fixture(autouse=True)
def _closed():
    with tasks_here():
        yield


def _make(tmp_path, *, partition=None, schema=ENVELOPE, **properties):
    """A table of somebody else's."""
    (tmp_path / "iceberg").mkdir()
    with iceberg_catalog(tmp_path) as catalog:
        catalog.create_namespace("default")
        with catalog.create_table_transaction(
            "default.orders", schema=schema, properties=properties
        ) as making:
            if partition is not None:
                with making.update_spec() as spec:
                    spec.add_field(*partition)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_is_found_out(tmp_path, monkeypatch, when):
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    real = SqlCatalog.commit_table
    lost = []

    def lossy(self, *arguments):
        lost.append(1)
        if len(lost) > 1 or when == "after":
            real(self, *arguments)
        if len(lost) == 1:
            raise CommitStateUnknownException("no answer")

    monkeypatch.setattr(SqlCatalog, "commit_table", lossy)
    layout = table.open(ENVELOPE)
    files = write_files(table.target("b"), layout, rows_of(5, 9))
    if when == "after":
        table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    else:
        # It may still come: files that it names must stay.
        with pytest.raises(CommitUnknownError):
            table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    monkeypatch.undo()
    if when == "before":
        table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    assert offsets_in(tmp_path, "iceberg") == list(range(9))
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)
    table.close()


def test_a_commit_that_was_called_a_failure_and_is_there_counts_once(tmp_path, monkeypatch):
    table = table_at(tmp_path, "iceberg")
    layout = table.open(ENVELOPE)
    files = write_files(table.target("b"), layout, rows_of(0, 5))
    real = SqlCatalog.commit_table

    def liar(self, *arguments):
        real(self, *arguments)
        raise CommitFailedException("no, says a proxy that asked twice")

    monkeypatch.setattr(SqlCatalog, "commit_table", liar)
    table.commit(adding(files, (0, 5)), check=lambda: None)
    monkeypatch.undo()
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    # What pyiceberg takes for uncommitted is not deleted.
    assert offsets_in(tmp_path, "iceberg") == list(range(5))
    table.close()


@pytest.mark.parametrize(
    "partition",
    [None, ("publish_time", DayTransform(), "d")],
)
def test_a_table_of_somebody_else_is_taken(tmp_path, partition):
    schema = pa.schema([*ENVELOPE, ("note", pa.string())])
    _make(tmp_path, partition=partition, schema=schema)
    table = table_at(tmp_path, "iceberg")
    assert table.open(ENVELOPE).by_date == (partition is not None)
    add_rows(table, 0, 5)
    assert offsets_in(tmp_path, "iceberg") == list(range(5))
    table.close()


def test_a_table_by_date_is_taken(tmp_path):
    schema = pa.schema([*ENVELOPE, ("publish_date", pa.date32())])
    _make(tmp_path, partition=("publish_date", IdentityTransform(), "d"), schema=schema)
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders").scan().to_arrow()
    assert {str(day) for day in found.column("publish_date").to_pylist()} == {"2023-11-14"}
    table.close()


def test_a_table_with_another_layout_is_refused(tmp_path):
    _make(tmp_path, partition=("topic", BucketTransform(4), "b"))
    table = table_at(tmp_path, "iceberg")
    with pytest.raises(ConflictError, match=r"bucket\[4\]\(topic\)"):
        table.open(ENVELOPE)
    table.close()


def test_columns_that_must_not_be_null_are_refused(tmp_path):
    schema = pa.schema([*ENVELOPE, pa.field("note", pa.string(), nullable=False)])
    _make(tmp_path, schema=schema)
    table = table_at(tmp_path, "iceberg")
    with pytest.raises(ConflictError, match="note"):
        table.open(ENVELOPE)
    table.close()


def test_new_fields_within_structs_are_added(tmp_path):
    table = table_at(tmp_path, "iceberg")
    small = pa.struct([("a", pa.int64())])
    large = pa.struct([("a", pa.int64()), ("b", pa.string())])
    table.open(pa.schema([*ENVELOPE, ("o", small)]))
    layout = table.open(pa.schema([*ENVELOPE, ("o", large)]))
    assert layout.schema.field("o").type == large
    with iceberg_catalog(tmp_path) as catalog:
        assert "o.b" in catalog.load_table("default.orders").schema().column_names
    table.close()


def test_the_ranges_outlive_snapshots_and_are_checked(tmp_path):
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders")
        assert found.properties[f"ister.offsets.{TOPIC}"].startswith('{"version":1')
        assert "commit.retry.num-retries" not in found.properties
        with found.transaction() as change:
            change.set_properties({f"ister.offsets.{TOPIC}": "gone"})
    with pytest.raises(CorruptDataError):
        table.coverage()
    table.close()


def test_pyiceberg_does_not_repeat_our_commits_by_itself(tmp_path, monkeypatch):
    """It would put our ranges over those of whoever was faster."""
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    layout = table.open(ENVELOPE)
    files = write_files(table.target("b"), layout, rows_of(5, 9))
    real, tries, checks = SqlCatalog.commit_table, [], []

    def failing(self, *arguments):
        tries.append(1)
        if len(tries) < 3:
            raise CommitFailedException("somebody was faster")
        return real(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", failing)
    table.commit(adding(files, (5, 9), id="b"), check=lambda: checks.append(1))
    assert len(tries) == len(checks) == 3
    assert offsets_in(tmp_path, "iceberg") == list(range(9))
    table.close()


def test_manifests_are_merged_so_that_a_commit_does_not_list_ever_more(tmp_path):
    _make(tmp_path, **{"commit.manifest.min-count-to-merge": "4"})
    table = table_at(tmp_path, "iceberg")
    for number in range(10):
        add_rows(table, number, number + 1, run=str(number))
    table.close()
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders")
        assert len(found.current_snapshot().manifests(found.io)) <= 4
        assert "commit.manifest-merge.enabled" not in found.properties
    assert offsets_in(tmp_path, "iceberg") == list(range(10))
