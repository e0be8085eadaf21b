"""A Delta table: tables of others, lost answers, a log that was cleaned."""

import json
import shutil
from contextlib import nullcontext

import deltalake
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from ister.errors import CommitUnknownError, ConflictError
from ister.objectstore.base import Capabilities
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.delta import DeltaTable as OurTable
from ister.spark.tables.targets import Storage
from tests.support.cases import case, each
from tests.support.exports import (
    TOPIC,
    add_rows,
    adding,
    offsets_in,
    rows_of,
    table_at,
    where,
    write_files,
)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_is_found_out(tmp_path, monkeypatch, when):
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    layout = table.open(ENVELOPE)
    files = write_files(table.target("b"), layout, rows_of(5, 9))
    real = DeltaTable.create_write_transaction

    def lossy(self, *arguments, **named):
        if when == "after":
            real(self, *arguments, **named)
        raise OSError("no answer")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lossy)
    if when == "after":
        table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    else:
        with pytest.raises(CommitUnknownError):
            table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
        monkeypatch.undo()
        table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    assert offsets_in(tmp_path, "delta") == list(range(9))
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)


def test_a_lost_answer_is_found_out_beyond_many_commits_of_others(tmp_path, monkeypatch):
    """A store's client that asks twice is told that the version is taken: by itself."""
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    files = write_files(table.target("b"), table.open(ENVELOPE), rows_of(5, 9))
    real = DeltaTable.create_write_transaction
    begun = []

    def lossy(self, *arguments, **named):
        real(self, *arguments, **named)
        if not begun:
            begun.append(1)
            for number in range(12):
                DeltaTable(where(tmp_path, "delta")).alter.set_table_properties(
                    {"some.thing": str(number)}, raise_if_not_exists=False
                )
            raise CommitFailedError("there is such a version")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lossy)
    table.commit(adding(files, (5, 9), id="b"), check=lambda: None)
    assert offsets_in(tmp_path, "delta") == list(range(9))


def test_a_lost_answer_that_cannot_be_found_out_is_told(tmp_path, monkeypatch):
    """The log was cleaned since: what was committed is not taken for refused."""
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    files = write_files(table.target("b"), table.open(ENVELOPE), rows_of(5, 9))

    def lossy(self, *arguments, **named):
        monkeypatch.setattr(DeltaTable, "version", lambda self: 50)
        raise CommitFailedError("there is such a version")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lossy)
    with pytest.raises(CommitUnknownError):
        table.commit(adding(files, (5, 9), id="b"), check=lambda: None)


def test_times_that_no_calendar_has(tmp_path):
    table = table_at(tmp_path, "delta")
    layout = table.open(ENVELOPE)
    rows = rows_of(0, 3, time_us=253_402_300_799_000_000, step_us=10**6)
    files = write_files(table.target("a"), layout, rows)
    table.commit(adding(files, (0, 3)), check=lambda: None)
    assert offsets_in(tmp_path, "delta") == [0, 1, 2]


def test_whoever_else_writes_does_not_get_in_the_way(tmp_path):
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    theirs = rows_of(100, 101).append_column(
        "publish_date", pa.array(["2020-01-01"]).cast(pa.date32())
    )
    begun = []

    def meanwhile() -> None:
        if not begun:
            begun.append(1)
            write_deltalake(where(tmp_path, "delta"), theirs, mode="append")

    layout = table.open(ENVELOPE)
    files = write_files(table.target("b"), layout, rows_of(5, 9))
    table.commit(adding(files, (5, 9), id="b"), check=meanwhile)
    assert offsets_in(tmp_path, "delta") == [*range(9), 100]
    for number in range(12):
        write_deltalake(
            where(tmp_path, "delta"),
            theirs.slice(0, 0),
            mode="append",
            commit_properties=CommitProperties(custom_metadata={"n": str(number)}),
        )
    assert table.coverage().of(TOPIC, "i") == ((0, 9),)


def test_a_table_without_partitions_is_taken(tmp_path):
    theirs = rows_of(0, 1).append_column("publish_date", pa.array(["2020-01-01"]).cast(pa.date32()))
    write_deltalake(where(tmp_path, "delta"), theirs)
    table = table_at(tmp_path, "delta")
    layout = table.open(ENVELOPE)
    assert not layout.by_date
    rows = rows_of(1, 5, step_us=50_000_000_000)
    files = write_files(table.target("a"), layout, rows)
    table.commit(adding(files, (1, 5)), check=lambda: None)
    found = DeltaTable(where(tmp_path, "delta")).to_pyarrow_table().sort_by("offset")
    assert [str(day) for day in found.column("publish_date").to_pylist()] == [
        "2020-01-01",
        "2023-11-14",
        "2023-11-15",
        "2023-11-15",
        "2023-11-16",
    ]


def test_a_table_with_another_layout_is_refused(tmp_path):
    write_deltalake(where(tmp_path, "delta"), rows_of(0, 1), partition_by=["topic"])
    with pytest.raises(ConflictError, match="topic"):
        table_at(tmp_path, "delta").open(ENVELOPE)


def test_types_of_a_table_are_kept(tmp_path):
    theirs = pa.schema([*ENVELOPE, ("n", pa.float64()), ("note", pa.string())])
    deltalake.DeltaTable.create(where(tmp_path, "delta"), deltalake.Schema.from_arrow(theirs))
    layout = table_at(tmp_path, "delta").open(pa.schema([*ENVELOPE, ("n", pa.int64())]))
    assert layout.schema.field("n").type == pa.float64()
    assert "note" not in layout.schema.names


def test_statistics_say_where_offsets_are(tmp_path):
    table = table_at(tmp_path, "delta")
    add_rows(table, 3, 9)
    [found] = pa.table(
        DeltaTable(where(tmp_path, "delta")).get_add_actions(flatten=True)
    ).to_pylist()
    assert (found["min.offset"], found["max.offset"], found["num_records"]) == (3, 8, 6)
    assert found["partition.publish_date"].isoformat() == "2023-11-14"


def test_options_of_a_bucket_in_the_words_of_delta():
    options = {"endpoint": "http://x:1", "access_key": "a", "secret_key": "b", "region": "r"}
    table = OurTable(Storage("s3", "s3://b/t", options), clock=None)
    assert table._storage_options() == {
        "AWS_ENDPOINT_URL": "http://x:1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "r",
        "AWS_ALLOW_HTTP": "true",
    }
    assert "b" not in repr(table._storage).split("options")


@pytest.mark.parametrize("ignores", [False, True])
def test_a_store_without_conditions_is_known(tmp_path, monkeypatch, ignores):
    class Store:
        def probe(self) -> Capabilities:
            return Capabilities(conditional_create=not ignores, copy=True)

    monkeypatch.setattr(Storage, "store", lambda self: Store())
    bucket = OurTable(Storage("s3", "s3://b/t"), clock=None)
    assert bucket.has_exclusive_commits() is not ignores
    assert OurTable(Storage("fs", str(tmp_path)), clock=None).has_exclusive_commits()


# -- what a table asks of writers ----------------------------------------------------------------


def _make(tmp_path, *, features=None, writer=7, configuration=None, column="note", **metadata):
    """A table of another program's, with one column more than an export has."""
    place = tmp_path / "delta" / "orders"
    shutil.rmtree(place, ignore_errors=True)
    theirs = pa.schema([*ENVELOPE, ("note", pa.struct([("a", pa.string())]))])
    DeltaTable.create(str(place), deltalake.Schema.from_arrow(theirs))
    first = place / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in first.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 1, "minWriterVersion": writer}
            if writer == 7:
                action["protocol"]["writerFeatures"] = features
        if "metaData" in action:
            action["metaData"]["configuration"] = configuration or {}
            schema = json.loads(action["metaData"]["schemaString"])
            found = next(item for item in schema["fields"] if item["name"] == "note")
            if column == "note.a":
                found = found["type"]["fields"][0]
            found["metadata"] = metadata
            action["metaData"]["schemaString"] = json.dumps(schema)
    first.write_text("".join(json.dumps(action) + "\n" for action in actions))


@each(
    ("made", "told"),
    [
        ({"writer": 3, "configuration": {"delta.constraints.c": "offset > 3"}}, "c: offset > 3"),
        ({"writer": 5, "configuration": {"delta.columnMapping.mode": "name"}}, "columnMapping"),
        ({"writer": 6}, "identityColumns"),
        ({"features": ["appendOnly", "rowTracking"]}, "features: rowTracking"),
        ({"features": ["a new one"]}, "a new one"),
        ({"writer": 4, "delta.generationExpression": "1"}, "note is a generated column"),
        ({"writer": 2, "delta.invariants": "{}"}, "note has an invariant"),
        ({"writer": 2, "delta.invariants": "{}", "column": "note.a"}, "note.a has an invariant"),
        ({"features": ["identityColumns"], "delta.identity.start": 1}, "identityColumns"),
        ({"features": ["allowColumnDefaults"], "CURRENT_DEFAULT": "1"}, "allowColumnDefaults"),
        ({"writer": 2, "__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}, "note has a length"),
    ],
)
def test_a_table_that_asks_what_would_not_be_observed_is_refused(tmp_path, made, told):
    _make(tmp_path, **made)
    with pytest.raises(ConflictError, match=told):
        table_at(tmp_path, "delta").open(ENVELOPE)


@each(
    "made",
    [
        {"writer": 2, "configuration": {"delta.appendOnly": "true"}},
        {"writer": 4, "configuration": {"delta.enableChangeDataFeed": "true"}},
        {"writer": 5, "configuration": {"delta.columnMapping.mode": "none"}},
        {"features": ["appendOnly", "invariants", "checkConstraints", "generatedColumns"]},
    ],
)
def test_a_table_that_could_ask_more_and_does_not_is_taken(tmp_path, made):
    _make(tmp_path, **made)
    add_rows(table_at(tmp_path, "delta"), 0, 5)
    assert offsets_in(tmp_path, "delta") == list(range(5))


def test_a_constraint_that_is_added_during_an_export_is_seen(tmp_path):
    table = table_at(tmp_path, "delta")
    add_rows(table, 0, 5)
    files = write_files(table.target("b"), table.open(ENVELOPE), rows_of(5, 9))
    begun = []

    def meanwhile() -> None:
        if not begun:
            begun.append(1)
            found = DeltaTable(where(tmp_path, "delta"))
            found.alter.add_constraint({"few": '"offset" < 5'})

    with pytest.raises(ConflictError, match="CHECK constraint, few"):
        table.commit(adding(files, (5, 9), id="b"), check=meanwhile)
    assert offsets_in(tmp_path, "delta") == list(range(5))


def test_columns_that_may_not_be_null_are_refused(tmp_path):
    for part in ("payload", "attributes", "offset"):
        fields = []
        for item in ENVELOPE:
            kind = item.type
            if item.name == part == "attributes":
                kind = pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False))
            fields.append(
                pa.field(item.name, kind, nullable=item.name != part or kind != item.type)
            )
        schema = deltalake.Schema.from_arrow(pa.schema(fields))
        DeltaTable.create(where(tmp_path, "delta"), schema, mode="overwrite")
        table = table_at(tmp_path, "delta")
        with (
            case(part),
            nullcontext()
            if part == "offset"
            else pytest.raises(ConflictError, match=f"column {part}"),
        ):
            table.open(ENVELOPE)
