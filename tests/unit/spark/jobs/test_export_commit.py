"""Many topics in one table: one commit a round, whatever fails and whenever it is ended."""

import json

import pyarrow as pa
from deltalake import DeltaTable as DeltaLibrary
from pyiceberg.io.pyarrow import PyArrowFileIO

from ister.base import failpoints
from ister.errors import ConflictError, FencedError, UnavailableError
from ister.spark.jobs import export_commit, export_round
from ister.spark.jobs.export_commit import TableCommitter
from ister.spark.jobs.leases import LeaseKeeper
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.delta import DeltaTable
from ister.spark.tables.iceberg import IcebergTable
from ister.spark.tables.parquet_directory import ParquetDirectory
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace
from tests.support.cases import each, product
from tests.support.exports import (
    FORMATS,
    commits_in,
    export_here,
    fresh,
    iceberg_catalog,
    offsets_in,
    part_of,
    read_table,
    rows_of,
    table_at,
    write_files,
)
from tests.support.scale import scaled
from tests.support.spark_here import killed_at

A, B, C = "/default/a", "/default/b", "/default/c"
SCHEMA = {"properties": {"id": {"type": "integer"}}}
_TABLES = {"parquet": ParquetDirectory, "iceberg": IcebergTable, "delta": DeltaTable}


def _fill(place: SparkPlace, topics, count: int, *, first: int = 0, bad=()) -> None:
    with place.open() as log:
        for name in topics:
            topic = log.topic(name, create=True)
            for number in range(first, first + count):
                payload = b"?" if number in bad else b'{"id":%d}' % number
                topic.append(payload, publish_time=PUBLISHED_MS + number)
            topic.flush()
            topic.upload()


def _rows(tmp_path, format, name="orders") -> dict[str, list[int]]:
    """The offsets of each topic, each as often as it is there."""
    found: dict[str, list[int]] = {}
    if offsets_in(tmp_path, format, name):
        table = read_table(tmp_path, format, name)
        for topic, offset in zip(
            table["topic"].to_pylist(), table["offset"].to_pylist(), strict=True
        ):
            found.setdefault(topic, []).append(offset)
    return {topic: sorted(offsets) for topic, offsets in found.items()}


def _each_has(topics, offsets) -> dict[str, list[int]]:
    """The same offsets of each topic."""
    return {topic: list(offsets) for topic in topics}


def _left(tmp_path, format) -> list[str]:
    """Data files of topics that are there, in the table or not."""
    return sorted(
        path.name.split("-")[1] for path in (tmp_path / format).rglob("default-*.parquet*")
    )


# -- one commit ---------------------------------------------------------------------------------


def test_many_topics_are_one_commit(spark, tmp_path):
    place = SparkPlace(tmp_path / "data")
    count = scaled(30, 100)
    topics = [f"/default/t{number:03d}" for number in range(count)]
    _fill(place, topics, 2)
    for format in FORMATS:  # noqa: A001
        report = export_here(spark, place, tmp_path, format)
        assert report.ok, report.errors
        assert report.more["commits"] == 1
        assert commits_in(tmp_path, format) == 1
        assert _rows(tmp_path, format) == _each_has(topics, [0, 1])
        # Nothing new: nothing is committed.
        again = export_here(spark, place, tmp_path, format)
        assert (again.ok, again.more.get("commits"), again.total("messages")) == (True, None, 0)
        assert commits_in(tmp_path, format) == 1
    # A few of them have news.
    _fill(place, topics[:7], 3, first=2)
    for format in FORMATS:  # noqa: A001
        assert export_here(spark, place, tmp_path, format).total("messages") == 21
        assert commits_in(tmp_path, format) == 2
        assert sum(map(len, _rows(tmp_path, format).values())) == 2 * count + 21


def test_a_table_for_each_topic_has_a_commit_for_each(spark, tmp_path):
    place = SparkPlace(tmp_path / "data")
    _fill(place, [A, B], 3)
    for format in FORMATS:  # noqa: A001
        report = export_here(spark, place, tmp_path, format, to=f"{tmp_path}/{format}/{{topic}}")
        assert (report.ok, report.more["commits"]) == (True, 2)
        assert [commits_in(tmp_path, format, name) for name in ("a", "b")] == [1, 1]


@each("limit", ["_COMMIT_BYTES_PER_SLOT", "_COMMIT_FILES"], fresh=fresh)
def test_a_large_backlog_takes_several_commits(spark, place, tmp_path, monkeypatch, limit):
    _fill(place, [A, B, C], 5)
    monkeypatch.setattr(export_round, limit, 1)
    report = export_here(spark, place, tmp_path)
    assert (report.ok, report.more["commits"]) == (True, 3)
    assert _rows(tmp_path, "parquet") == _each_has([A, B, C], list(range(5)))


@each("format", FORMATS, fresh=fresh)
def test_a_round_reads_as_much_after_many_rounds_as_after_few(
    spark, place, tmp_path, monkeypatch, format
):
    reads: list[str] = []

    def count(owner, name, what):
        real = getattr(owner, name)

        def counted(self, *arguments, **named):
            reads.append(what)
            found = real(self, *arguments, **named)
            if what == "list":
                found = list(found)
                reads.extend("entry" for _ in found)
            if what == "history":
                reads.extend("version" for _ in found)
            return found

        monkeypatch.setattr(owner, name, counted)

    # What each kind of table is read with: a store, pyiceberg's files, delta-rs' log.
    table = table_at(tmp_path, "parquet", "other")
    store = type(table._store)
    table.close()
    count(store, "list", "list")
    count(store, "read", "read")
    count(PyArrowFileIO, "new_input", "read")
    count(DeltaLibrary, "__init__", "read")
    count(DeltaLibrary, "history", "history")
    monkeypatch.setattr("ister.spark.tables.parquet_directory._KEPT_RECORDS", 4)
    monkeypatch.setattr("ister.spark.tables.parquet_directory._KEPT_SECONDS", -1.0)
    counts = []
    rounds = scaled(16, 24)
    for number in range(rounds):
        _fill(place, [A, B], 1, first=number)
        reads.clear()
        assert export_here(spark, place, tmp_path, format).ok
        counts.append(len(reads))
    assert commits_in(tmp_path, format) == (4 if format == "parquet" else rounds)
    assert counts[-1] == counts[11], counts
    assert _rows(tmp_path, format) == _each_has([A, B], list(range(rounds)))


# -- a topic that fails -------------------------------------------------------------------------


@each("format", FORMATS, fresh=fresh)
def test_a_topic_that_another_export_was_faster_with_is_left_out(
    spark, place, tmp_path, monkeypatch, format
):
    _fill(place, [A, B, C], 10)
    real = LeaseKeeper.take
    monkeypatch.setattr(
        LeaseKeeper,
        "take",
        lambda self, key, *about, **more: real(self, f"{key}{id(self)}", *about, **more),
    )

    def overtake() -> None:
        failpoints.disarm()
        export_here(spark, place, tmp_path, format, topics=B, end=4)

    failpoints.arm("pipeline.before_commit", overtake)
    report = export_here(spark, place, tmp_path, format)
    monkeypatch.undo()
    assert [error["topic"] for error in report.errors] == [B]
    assert "0 up to 4" in report.errors[0]["message"]
    assert (report.total("messages"), commits_in(tmp_path, format)) == (20, 2)
    # Its file is not left behind.
    assert _left(tmp_path, format) == ["a", "b", "c"]
    assert export_here(spark, place, tmp_path, format).total("messages") == 6
    assert _rows(tmp_path, format) == _each_has([A, B, C], list(range(10)))


@each("format", FORMATS, fresh=fresh)
def test_a_topic_whose_file_is_gone_is_left_out(spark, place, tmp_path, monkeypatch, format):
    _fill(place, [A, B, C], 5)
    real = TableCommitter.commit

    def lose(self, destination) -> None:
        for path in (tmp_path / format).rglob("default-b-*.parquet*"):
            path.unlink()
        real(self, destination)

    monkeypatch.setattr(TableCommitter, "commit", lose)
    report = export_here(spark, place, tmp_path, format)
    monkeypatch.undo()
    [error] = report.errors
    assert (error["code"], error["topic"]) == ("NOT_FOUND", B)
    assert commits_in(tmp_path, format) == 1
    assert export_here(spark, place, tmp_path, format).total("messages") == 5
    assert _rows(tmp_path, format) == _each_has([A, B, C], list(range(5)))


def test_a_topic_whose_lease_has_ended_is_left_out(spark, tmp_path):
    place = SparkPlace(tmp_path / "data")
    _fill(place, [A, B, C], 5, bad={2})
    fences = []
    real = LeaseKeeper.take

    def take(self, key, about, **more):
        fence = real(self, key, about, **more)
        if about.get("topic") == B:
            fences.append(fence)
        return fence

    LeaseKeeper.take = take
    try:
        # It is not taken yet.
        failpoints.arm("pipeline.before_commit", lambda: [item.release() for item in fences])
        report = export_here(spark, place, tmp_path, schema=SCHEMA)
    finally:
        LeaseKeeper.take = real
        failpoints.disarm()
    assert [(error["topic"], error["code"]) for error in report.errors] == [(B, "ABORTED")]
    assert _rows(tmp_path, "parquet") == _each_has([A, C], [0, 1, 3, 4])
    # Its dead letters were committed before, and are not written again.
    assert export_here(spark, place, tmp_path, schema=SCHEMA).ok
    assert _rows(tmp_path, "parquet") == _each_has([A, B, C], [0, 1, 3, 4])
    assert _rows(tmp_path, "parquet", "orders_dead_letters") == _each_has([A, B, C], [2])


def test_dead_letters_that_are_refused_keep_their_topics_rows_back(spark, tmp_path, monkeypatch):
    place = SparkPlace(tmp_path / "data")
    _fill(place, [A], 5, bad={2})
    _fill(place, [B], 5)
    real = ParquetDirectory.commit

    def refuse(self, addition, *, check) -> None:
        if "@" in addition.topics[0].incarnation:
            raise UnavailableError("no answer")
        real(self, addition, check=check)

    monkeypatch.setattr(ParquetDirectory, "commit", refuse)
    report = export_here(spark, place, tmp_path, schema=SCHEMA)
    monkeypatch.undo()
    assert [error["topic"] for error in report.errors] == [A]
    assert _rows(tmp_path, "parquet") == {B: list(range(5))}
    assert _left(tmp_path, "parquet") == ["b"]


@each(
    ("format", "error"),
    product(FORMATS, [FencedError("ended"), UnavailableError("no answer"), ConflictError("no")]),
    fresh=fresh,
)
def test_a_commit_that_fails_as_a_whole_fails_every_topic(
    spark, place, tmp_path, monkeypatch, format, error
):
    """What was tried and not refused stays, because the table may have it."""
    _fill(place, [A, B], 3)

    def fail(self, addition, *, check) -> None:
        check()
        raise error.again()

    monkeypatch.setattr(_TABLES[format], "commit", fail)
    report = export_here(spark, place, tmp_path, format)
    monkeypatch.undo()
    assert [item["topic"] for item in report.errors] == [A, B]
    assert _left(tmp_path, format) == ([] if isinstance(error, ConflictError) else ["a", "b"])
    assert export_here(spark, place, tmp_path, format).ok
    assert _rows(tmp_path, format) == _each_has([A, B], [0, 1, 2])


def test_a_table_that_refuses_topic_after_topic_is_not_asked_for_ever(spark, tmp_path, monkeypatch):
    place = SparkPlace(tmp_path / "data")
    topics = [f"/default/t{number:02d}" for number in range(6)]
    _fill(place, topics, 1)
    asked = []

    def refuse(self, addition, *, check) -> None:
        asked.append(len(addition.topics))
        raise ConflictError("no", topic=addition.topics[0].topic, offset=7)

    monkeypatch.setattr(ParquetDirectory, "commit", refuse)
    monkeypatch.setattr(export_commit, "_LEFT_OUT_MAX", 2)
    report = export_here(spark, place, tmp_path)
    assert asked == [6, 5, 4]
    assert [error["topic"] for error in report.errors] == topics
    # An offset is that of the topic that has it.
    assert [error["offset"] for error in report.errors] == [7, 7, 7, None, None, None]
    assert _left(tmp_path, "parquet") == []


# -- ended at every step --------------------------------------------------------------------------

_POINTS = (
    ("pipeline.after_plan", 1),
    ("pipeline.after_task", 2),
    # The first commit is that of the dead letters.
    ("export.before_table_commit", 1),
    ("export.after_table_commit", 1),
    ("export.after_publish", 2),
    ("export.after_dead_letters", 1),
    ("pipeline.before_commit", 1),
    ("export.before_table_commit", 2),
    ("export.after_table_commit", 2),
    ("export.after_publish", 5),
    ("pipeline.after_commit", 1),
)


@each("format", FORMATS, fresh=fresh)
def test_ended_at_every_step_each_offset_of_each_topic_is_there_once(
    spark, place, tmp_path, format
):
    count, bad = 0, set()
    for point, visit in _POINTS:
        if "publish" in point and format != "parquet":
            continue
        bad.add(count + 1)
        _fill(place, [A, B, C], 3, first=count, bad=bad)
        count += 3
        with killed_at(point, visit):
            export_here(spark, place, tmp_path, format, schema=SCHEMA)
    assert export_here(spark, place, tmp_path, format, schema=SCHEMA).ok
    good = [number for number in range(count) if number not in bad]
    assert _rows(tmp_path, format) == _each_has([A, B, C], good)
    letters = _rows(tmp_path, format, "orders_dead_letters")
    assert letters == _each_has([A, B, C], sorted(bad))


# -- tables of earlier versions -------------------------------------------------------------------


def test_a_snapshot_says_what_it_has_of_each_topic(tmp_path):
    table = table_at(tmp_path, "iceberg")
    layout = table.open(ENVELOPE)
    files = [
        write_files(
            table.target("r"), layout, rows_of(0, 3).set_column(0, "topic", pa.array([name] * 3))
        )
        for name in (A, B)
    ]
    addition = export_commit.Addition(
        id="x",
        topics=[part_of(own, (0, 3), topic=name) for own, name in zip(files, (A, B), strict=True)],
    )
    table.commit(addition, check=lambda: None)
    table.close()
    with iceberg_catalog(tmp_path) as catalog:
        found = catalog.load_table("default.orders").current_snapshot().summary
    assert found["ister.topics"] == "2"
    assert json.loads(found["ister.ranges"]) == {A: [[0, 3]], B: [[0, 3]]}
