"""An Iceberg table: tables of others, lost answers, what its properties say."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import BinaryType

from ister.errors import CommitUnknownError, ConflictError, CorruptDataError
from ister.spark.tables.column_ids import ids_of
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.json_rows import JsonParser
from ister.spark.tables.json_schema import columns_of, with_types
from tests.support.exports import (
    TOPIC,
    add_rows,
    adding,
    forget_history,
    iceberg_catalog,
    offsets_in,
    read_table,
    rows_of,
    table_at,
    write_files,
)


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
    [
        None,
        ("publish_time", DayTransform(), "d"),
        ("publish_date", IdentityTransform(), "d"),
    ],
)
def test_a_table_of_somebody_else_is_taken(tmp_path, partition):
    schema = pa.schema([*ENVELOPE, ("note", pa.string()), ("publish_date", pa.date32())])
    _make(tmp_path, partition=partition, schema=schema)
    table = table_at(tmp_path, "iceberg")
    assert table.open(ENVELOPE).by_date == (partition is not None)
    add_rows(table, 0, 5)
    assert offsets_in(tmp_path, "iceberg") == list(range(5))
    if partition is not None and partition[0] == "publish_date":
        days = read_table(tmp_path, "iceberg")["publish_date"].to_pylist()
        assert {str(day) for day in days} == {"2023-11-14"}
    table.close()


def test_a_table_with_another_layout_is_refused(tmp_path):
    _make(tmp_path, partition=("topic", BucketTransform(4), "b"))
    table = table_at(tmp_path, "iceberg")
    with pytest.raises(ConflictError, match=r"bucket\[4\]\(topic\)"):
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


# -- columns that somebody renamed or dropped -----------------------------------------------------

_O = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.string())])))])
_WIDE = pa.schema([*ENVELOPE, ("o", _O)])


def _wide(start, end):
    values = [{"a": number, "b": [{"c": f"c{number}"}]} for number in range(start, end)]
    return rows_of(start, end, step_us=1000, o=pa.array(values, _O))


def _add(table, rows, run, schema=ENVELOPE):
    layout = table.open(schema)
    files = write_files(table.target(run), layout, rows)
    first = rows.column("offset")[0].as_py()
    table.commit(adding(files, (first, first + len(rows)), id=run), check=lambda: None)


def _change(tmp_path, change):
    """What somebody does to the columns."""
    with (
        iceberg_catalog(tmp_path) as catalog,
        catalog.load_table("default.orders").update_schema(allow_incompatible_changes=True) as to,
    ):
        change(to)


def _columns(tmp_path):
    with iceberg_catalog(tmp_path) as catalog:
        return catalog.load_table("default.orders").schema().column_names


def test_files_have_the_ids_of_columns(tmp_path):
    table = table_at(tmp_path, "iceberg")
    _add(table, _wide(0, 3), "a", _WIDE)
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders")
        ids = {found.schema().find_field(name).field_id for name in found.schema().column_names}
        [file] = found.inspect.files().to_pylist()
        assert found.name_mapping() is None
        metadata = found.io.new_input(file["file_path"])
        with metadata.open() as stream:
            schema = pq.read_schema(stream)
        assert set(ids_of(schema).values()) == ids
        assert file["readable_metrics"]["offset"]["upper_bound"] == 2
    table.close()


def test_a_column_that_was_renamed_is_written_under_its_new_name(tmp_path):
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    for name in ("payload", "offset", "publish_time"):
        _change(tmp_path, lambda to, name=name: to.rename_column(name, f"{name}_2"))
    before = _columns(tmp_path)
    add_rows(table, 5, 9, run="b")
    assert _columns(tmp_path) == before
    with iceberg_catalog(tmp_path) as catalog:
        rows = catalog.load_table("default.orders").scan().to_arrow().sort_by("offset_2")
    assert rows.column("payload_2").to_pylist() == [b"%d" % number for number in range(9)]
    assert rows.column("publish_time_2").null_count == 0
    # The last row is found under its new name.
    for number in (100, 101):
        with iceberg_catalog(tmp_path) as catalog:
            catalog.load_table("default.orders").transaction().update_snapshot().fast_append()
            with (
                catalog.load_table("default.orders").transaction() as change,
                change.update_snapshot({"n": str(number)}).fast_append(),
            ):
                pass
    forget_history(tmp_path, "iceberg")
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)
    table.close()


def test_a_column_that_was_dropped_stays_away_with_its_values(tmp_path):
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    _change(tmp_path, lambda to: to.delete_column("payload"))
    add_rows(table, 5, 9, run="b")
    assert "payload" not in _columns(tmp_path)
    assert offsets_in(tmp_path, "iceberg") == list(range(9))
    newest = max((tmp_path / "iceberg").rglob("f-*.parquet"), key=lambda path: path.stat().st_mtime)
    assert "payload" not in pq.read_schema(newest).names
    # Whoever makes it again wants it filled from now on.
    _change(tmp_path, lambda to: to.add_column("payload", BinaryType()))
    add_rows(table, 9, 11, run="c")
    found = read_table(tmp_path, "iceberg").column("payload").to_pylist()
    assert found == [None] * 9 + [b"9", b"10"]
    table.close()


def test_fields_within_columns_are_renamed_and_dropped_too(tmp_path):
    table = table_at(tmp_path, "iceberg")
    _add(table, _wide(0, 3), "a", _WIDE)
    _change(tmp_path, lambda to: to.rename_column("o", "p").rename_column("o.b.element.c", "d"))
    _change(tmp_path, lambda to: to.delete_column("p.a"))
    larger = pa.schema([*ENVELOPE, ("o", pa.struct([*_O, ("e", pa.string())]))])
    layout = table.open(larger)
    assert [item.name for item in layout.schema.field("o").type] == ["b", "e"]
    rows = rows_of(
        3,
        5,
        o=pa.array(
            [{"b": [{"c": f"c{number}"}], "e": "e"} for number in (3, 4)],
            layout.schema.field("o").type,
        ),
    )
    _add(table, rows, "b", larger)
    found = read_table(tmp_path, "iceberg")
    assert "o" not in found.column_names
    values = found.column("p").to_pylist()
    assert values == [
        {"b": [{"d": f"c{number}"}], "e": None if number < 3 else "e"} for number in range(5)
    ]
    # With all of its fields gone, so is the column.
    _change(tmp_path, lambda to: to.delete_column("p.b").delete_column("p.e"))
    assert "o" not in table.open(larger).schema.names
    table.close()


def test_a_column_whose_name_another_one_has_now_is_refused(tmp_path):
    table = table_at(tmp_path, "iceberg")
    add_rows(table, 0, 5)
    _change(tmp_path, lambda to: to.rename_column("payload", "body"))
    _change(tmp_path, lambda to: to.add_column("payload", BinaryType()))
    with pytest.raises(ConflictError, match="payload was renamed to body"):
        table.open(ENVELOPE)
    table.close()


def test_values_are_left_out_of_rows_whose_columns_were_dropped():
    members = columns_of(
        {
            "properties": {
                "n": {"type": "integer"},
                "o": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                },
            }
        }
    )
    left = with_types(members, pa.schema([("o", pa.struct([("b", pa.string())]))]))
    assert [item.column for item in left] == ["o"]
    columns, bad = JsonParser(left).parse(pa.array([b'{"n":1,"o":{"a":2,"b":"x"}}']))
    assert (columns[0].to_pylist(), bad) == ([{"b": "x"}], [])


def test_what_a_table_asks_of_writers_and_would_not_get_is_refused(tmp_path):
    required = pa.schema(
        [
            pa.field(item.name, item.type, nullable=item.name not in ("offset", "payload"))
            for item in ENVELOPE
        ]
    )
    _make(tmp_path, schema=required)
    table = table_at(tmp_path, "iceberg")
    with pytest.raises(ConflictError, match="payload may not be null"):
        table.open(ENVELOPE)
    _change(tmp_path, lambda to: to.make_column_optional("payload"))
    table.open(ENVELOPE)
    table.close()


def test_a_table_of_a_newer_format_is_refused(tmp_path):
    _make(tmp_path)
    [metadata] = (tmp_path / "iceberg").rglob("*.metadata.json")
    newer = json.loads(metadata.read_text()) | {"format-version": 3, "next-row-id": 0}
    metadata.write_text(json.dumps(newer))
    table = table_at(tmp_path, "iceberg")
    with pytest.raises(ConflictError, match="version 3"):
        table.open(ENVELOPE)
    table.close()
