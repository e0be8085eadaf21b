"""Iceberg and Delta tables that others roll back, replace and clean: what they have is known."""

import time
from datetime import UTC, datetime
from functools import partial

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from ister.errors import ConflictError, CorruptDataError
from ister.spark.tables.columns import ENVELOPE
from tests.support.cases import each, product
from tests.support.exports import (
    TOPIC,
    add_foreign_rows,
    add_rows,
    adding,
    forget_history,
    iceberg_catalog,
    offsets_in,
    roll_back,
    rows_of,
    states_of,
    table_at,
    where,
    write_files,
)

FORMATS = ("iceberg", "delta")
OTHER = "/default/other"


def _delete(tmp_path, format, start: int, end: int) -> None:
    """Rows that somebody deletes."""
    if format == "delta":
        DeltaTable(where(tmp_path, format)).delete(f'"offset" >= {start} and "offset" < {end}')
        return
    with iceberg_catalog(tmp_path) as catalog:
        catalog.load_table("default.orders").delete(f"offset >= {start} and offset < {end}")


@each("format", FORMATS)
def test_a_table_that_was_rolled_back_has_what_it_had_then(tmp_path, format):
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    state = states_of(tmp_path, format)[-1]
    add_rows(table, 5, 9, run="b")
    add_rows(table, 0, 3, run="c", topic=OTHER)
    roll_back(tmp_path, format, state)
    coverage = table.coverage()
    assert coverage.of(TOPIC, "i") == ((0, 5),)
    assert coverage.undone(TOPIC, "i") == ((5, 9),)
    assert coverage.of(OTHER, "i") == ()
    add_rows(table, 5, 9, run="d")
    assert offsets_in(tmp_path, format) == list(range(9))
    coverage = table.coverage()
    assert coverage.of(TOPIC, "i") == ((0, 9),)
    assert coverage.of(OTHER, "i") == coverage.undone(OTHER, "i") == ()
    with pytest.raises(ConflictError):
        add_rows(table, 4, 6, run="e")
    table.close()


@each("format", FORMATS)
def test_a_table_may_be_rolled_back_to_and_fro(tmp_path, format):
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    first = states_of(tmp_path, format)[-1]
    add_rows(table, 5, 9, run="b")
    second = states_of(tmp_path, format)[-1]
    roll_back(tmp_path, format, first)
    add_rows(table, 5, 7, run="c")
    assert table.coverage().of(TOPIC, "i") == ((0, 7),)
    roll_back(tmp_path, format, second)
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)
    add_foreign_rows(tmp_path, format, 100, 101)
    add_rows(table, 9, 11, run="d")
    assert offsets_in(tmp_path, format) == [*range(11), 100]
    table.close()


@each("format", FORMATS)
def test_a_table_that_was_rolled_back_to_before_its_first_export_has_nothing(tmp_path, format):
    table = table_at(tmp_path, format)
    table.open(ENVELOPE)
    add_foreign_rows(tmp_path, format, 100, 101)
    state = states_of(tmp_path, format)[-1]
    add_rows(table, 0, 5)
    roll_back(tmp_path, format, state)
    add_foreign_rows(tmp_path, format, 101, 102)
    assert table.coverage().of(TOPIC, "i") == ()
    assert table.coverage().undone(TOPIC, "i") == ((0, 5),)
    add_rows(table, 0, 7, run="b")
    assert offsets_in(tmp_path, format) == [*range(7), 100, 101]
    table.close()


@each("format", FORMATS)
def test_a_rollback_during_an_export_is_noticed(tmp_path, format):
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    state = states_of(tmp_path, format)[-1]
    add_rows(table, 5, 9, run="b")
    files = write_files(table.target("c"), table.open(ENVELOPE), rows_of(9, 12))
    begun = []

    def meanwhile() -> None:
        if not begun:
            begun.append(1)
            roll_back(tmp_path, format, state)

    table.commit(adding(files, (9, 12), id="c"), check=meanwhile)
    assert table.coverage().of(TOPIC, "i") == ((0, 5), (9, 12))
    add_rows(table, 5, 9, run="d")
    assert offsets_in(tmp_path, format) == list(range(12))
    table.close()


@each("format", FORMATS)
def test_rows_that_were_deleted_do_not_return(tmp_path, format):
    table = table_at(tmp_path, format)
    for number in range(3):
        add_rows(table, number * 3, number * 3 + 3, run=str(number))
    _delete(tmp_path, format, 3, 6)
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)
    forget_history(tmp_path, format)
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)
    add_rows(table, 9, 11, run="b")
    assert offsets_in(tmp_path, format) == [0, 1, 2, *range(6, 11)]
    table.close()


@each("format", FORMATS)
def test_upkeep_between_two_exports_costs_no_record(tmp_path, format):
    """Others write, and all that our commits have left is their rows."""
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    add_rows(table, 8, 10, run="b")
    table.commit(adding([], (10, 12), id="c"), check=lambda: None)
    add_foreign_rows(tmp_path, format, 100, 101)
    add_foreign_rows(tmp_path, format, 101, 102)
    forget_history(tmp_path, format)
    coverage = table.coverage()
    assert coverage.of(TOPIC, "i") == ((0, 5), (8, 12))
    assert coverage.of(TOPIC, "another") == ()
    assert coverage.other_incarnations(TOPIC, "another") == ["i"]
    add_rows(table, 5, 8, run="d")
    with pytest.raises(ConflictError):
        add_rows(table, 9, 11, run="e")
    assert offsets_in(tmp_path, format) == [*range(10), 100, 101]
    table.close()


@each(("format", "is_cleaned"), product(FORMATS, [False, True]))
def test_a_rollback_before_the_history_was_cleaned(tmp_path, format, is_cleaned):
    """It is refused, with what was exported, if nothing says any more what the table has."""
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    state = states_of(tmp_path, format)[-1]
    add_rows(table, 5, 9, run="b")
    roll_back(tmp_path, format, state)
    if is_cleaned:
        add_foreign_rows(tmp_path, format, 100, 101)
        add_foreign_rows(tmp_path, format, 101, 102)
        forget_history(tmp_path, format)
        with pytest.raises(ConflictError, match="0 up to 9"):
            table.coverage()
        with pytest.raises(ConflictError, match="0 up to 9"):
            add_rows(table, 9, 10, run="c")
    elif format == "iceberg":
        forget_history(tmp_path, format)
        assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    table.close()


@each("format", FORMATS)
def test_a_table_that_was_replaced_is_refused(tmp_path, format):
    """Rows of an export may be in it, or not."""
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    if format == "delta":
        found = DeltaTable(where(tmp_path, format))
        DeltaTable.create(
            where(tmp_path, format), found.schema(), mode="overwrite", partition_by=["publish_date"]
        )
    else:
        _cut_off(tmp_path)
    with pytest.raises(ConflictError, match="0 up to 5"):
        table.coverage()
    table.close()


def _cut_off(tmp_path) -> None:
    """A snapshot without parents, as `CREATE OR REPLACE TABLE` makes one."""
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders")
        with found.transaction() as change, change.update_snapshot().fast_append() as append:
            append._parent_snapshot_id = None


def test_a_picked_snapshot_of_an_export_is_refused(tmp_path):
    """Its rows are in the table, and it is not among the ancestors."""
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    first = states_of(tmp_path, "iceberg")[-1]
    add_rows(table, 5, 9, run="b")
    second = states_of(tmp_path, "iceberg")[-1]
    roll_back(tmp_path, "iceberg", first)
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders")
        with found.transaction() as change:
            properties = {"source-snapshot-id": str(second)}
            with change.update_snapshot(properties).fast_append():
                pass
    with pytest.raises(ConflictError, match=f"{second} was picked"):
        table.coverage()
    table.close()


def test_records_of_iceberg_are_checked(tmp_path):
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    for name in ("ister.last", "ister.columns"):
        with iceberg_catalog(tmp_path) as catalog:
            found = catalog.load_table("default.orders")
            before = found.properties[name]
            with found.transaction() as change:
                change.set_properties({name: "gone"})
        with pytest.raises(CorruptDataError, match=name.removeprefix("ister.")):
            (table.coverage if name == "ister.last" else partial(table.open, ENVELOPE))()
        with (
            iceberg_catalog(tmp_path) as catalog,
            catalog.load_table("default.orders").transaction() as change,
        ):
            change.set_properties({name: before})
    table.close()


def test_a_lost_race_of_iceberg_leaves_the_winners_record(tmp_path, monkeypatch):
    table, other = table_at(tmp_path, "iceberg"), table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    files = write_files(table.target("b"), table.open(ENVELOPE), rows_of(5, 9))
    real, lost = SqlCatalog.commit_table, []

    def failing(self, *arguments):
        if not lost:
            lost.append(1)
            add_rows(other, 20, 25, run="c")
            raise CommitFailedException("somebody was faster")
        return real(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", failing)
    table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    assert table.coverage().of(TOPIC, "i") == ((0, 9), (20, 25))
    table.close()
    other.close()


@each("how", ["version", "time"])
def test_a_delta_table_that_was_restored_to_a_version_or_a_time(tmp_path, how):
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    state = states_of(tmp_path, "delta")[-1]
    when = datetime.now(UTC)
    time.sleep(0.02)  # a version's time is not finer than this
    add_rows(table, 5, 9, run="b")
    add_foreign_rows(tmp_path, "delta", 100, 101)
    DeltaTable(where(tmp_path, "delta")).restore(state if how == "version" else when)
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    # And once more, to what is not there any more.
    last = states_of(tmp_path, "delta")[-1]
    DeltaTable(where(tmp_path, "delta")).restore(last - 1)
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)
    DeltaTable(where(tmp_path, "delta")).restore(last)
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    add_rows(table, 5, 9, run="c")
    assert offsets_in(tmp_path, "delta") == list(range(9))


def test_records_beside_a_delta_log_survive_a_vacuum_and_do_not_pile_up(tmp_path):
    table = table_at(tmp_path, "delta")
    for number in range(4):
        add_rows(table, number, number + 1, run=str(number))
    assert len(list((tmp_path / "delta/orders/_ister").iterdir())) == 4
    assert table.tidy(0) == 3
    found = DeltaTable(where(tmp_path, "delta"))
    found.optimize.compact()
    found.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    [left] = (tmp_path / "delta/orders/_ister").iterdir()
    forget_history(tmp_path, "delta")
    assert table.coverage().of(TOPIC, "i") == ((0, 4),)
    assert table.tidy(0) == 0
    left.unlink()
    with pytest.raises(ConflictError, match="cleaned"):
        table.coverage()
    assert offsets_in(tmp_path, "delta") == list(range(4))


def test_a_delta_table_that_was_overwritten_keeps_its_record(tmp_path):
    """As if its rows had been deleted."""
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    day = pa.array(["2020-01-01"]).cast(pa.date32())
    rows = rows_of(100, 101).append_column("publish_date", day)
    write_deltalake(where(tmp_path, "delta"), rows, mode="overwrite")
    add_rows(table, 5, 7, run="b")
    assert offsets_in(tmp_path, "delta") == [5, 6, 100]
