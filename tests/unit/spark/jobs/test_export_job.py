"""The export without Spark, tasks in this process: plans, commits, refusals, what a kill leaves."""

import argparse
import signal
import threading
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from ister.base import failpoints
from ister.base.limits import MIB
from ister.base.model import Codec
from ister.bucket.fence import Fence
from ister.cli.pipeline import export as command
from ister.errors import (
    CapacityError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.spark.jobs import export_job, export_round, leases
from ister.spark.jobs.export_job import ExportSettings, export
from ister.spark.jobs.export_round import _divide_evenly
from ister.spark.jobs.job import Job, open_job
from ister.spark.jobs.leases import LeaseKeeper
from ister.spark.planner import TopicRange
from ister.spark.tables.delta import DeltaTable
from ister.spark.tables.iceberg import IcebergTable
from ister.spark.tables.parquet_directory import ParquetDirectory
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace, expire_before, fill
from tests.support.cases import each, product
from tests.support.exports import (
    FORMATS,
    TOPIC,
    add_foreign_rows,
    commit_nothing,
    commits_in,
    export_here,
    forget_history,
    fresh,
    offsets_in,
    read_table,
    roll_back,
    states_of,
    where,
)
from tests.support.spark_here import killed_at

SCHEMA = {"properties": {"id": {"type": "integer"}, "name": {"type": "string"}}}


@pytest.fixture
def place(tmp_path):
    """A data directory."""
    return SparkPlace(tmp_path / "data")


def _fill_json(place: SparkPlace, count: int, *, bad=(), first: int = 0, upload: bool = True):
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for number in range(first, first + count):
            payload = b"?" if number in bad else b'{"id":%d,"name":"n%d"}' % (number, number)
            topic.append(payload, publish_time=PUBLISHED_MS + number)
        topic.flush()
        if upload:
            topic.upload()


# -- plans --------------------------------------------------------------------------------------


@each("format", FORMATS, fresh=fresh)
def test_all_of_it_once(spark, place, tmp_path, format):
    place.fill(TOPIC, 120, uploaded=100)
    plan = export_here(spark, place, tmp_path, format, dry_run=True)
    assert plan.topics[TOPIC]["messages"] == 100
    assert plan.topics[TOPIC]["bytes"] > 0
    assert not (tmp_path / format).exists()
    first = export_here(spark, place, tmp_path, format)
    assert (first.ok, first.topics[TOPIC]["messages"]) == (True, 100)
    again = export_here(spark, place, tmp_path, format)
    assert (again.ok, again.topics[TOPIC]["messages"], again.total("files")) == (True, 0, 0)
    assert offsets_in(tmp_path, format) == list(range(100))


@each("format", FORMATS, fresh=fresh)
def test_missing_ranges_are_filled(spark, place, tmp_path, format):
    place.fill(TOPIC, 100, uploaded=100)
    for start, end in ((20, 40), (60, 70)):
        export_here(spark, place, tmp_path, format, start=start, end=end)
    assert offsets_in(tmp_path, format) == [*range(20, 40), *range(60, 70)]
    plan = export_here(spark, place, tmp_path, format, dry_run=True)
    assert plan.topics[TOPIC]["ranges"] == [[0, 20], [40, 60], [70, 100]]
    export_here(spark, place, tmp_path, format)
    assert offsets_in(tmp_path, format) == list(range(100))


def test_points_in_time(spark, place, tmp_path):
    place.fill(TOPIC, 100, uploaded=100, step_ms=1000)
    begin = datetime.fromtimestamp(PUBLISHED_MS / 1000, UTC)
    export_here(
        spark,
        place,
        tmp_path,
        start=begin + timedelta(seconds=10),
        end=begin + timedelta(seconds=20),
    )
    assert offsets_in(tmp_path, "parquet") == list(range(10, 20))


def test_ranges_that_could_be_read_count_beside_one_that_could_not(spark, place, tmp_path):
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for first in range(0, 300, 100):
            fill(topic, 100, first=first)
            topic.upload()
    objects = sorted((tmp_path / "data/objects").rglob("*.dnb1"))
    good = objects[1].read_bytes()
    objects[1].write_bytes(b"\0" * len(good))
    # Objects are small: give each a task of its own.
    real = export_round.plan
    export_round.plan = lambda ranges, **_: real(ranges, split_bytes=1)
    try:
        report = export(spark, place.elsewhere, to=where(tmp_path, "parquet"))
    finally:
        export_round.plan = real
    assert report.errors
    assert {error["code"] for error in report.errors} == {"DATA_LOSS"}
    before = offsets_in(tmp_path, "parquet")
    assert set(range(100)) <= set(before)
    assert 150 not in before
    objects[1].write_bytes(good)
    assert export_here(spark, place, tmp_path).ok
    assert offsets_in(tmp_path, "parquet") == list(range(300))


# -- typed columns and dead letters ---------------------------------------------------------------


@each("format", FORMATS, fresh=fresh)
def test_bad_rows_become_dead_letters(spark, place, tmp_path, format):
    _fill_json(place, 60, bad={3, 40})
    report = export_here(spark, place, tmp_path, format, schema=SCHEMA)
    assert report.ok
    assert (report.total("messages"), report.total("dead_letters")) == (58, 2)
    rows = read_table(tmp_path, format)
    assert rows.column("id").to_pylist() == [n for n in range(60) if n not in (3, 40)]
    assert rows.column("name").to_pylist()[:2] == ["n0", "n1"]
    assert "payload" not in rows.column_names
    letters = read_table(tmp_path, format, "orders_dead_letters")
    assert letters.column("offset").to_pylist() == [3, 40]
    assert letters.column("payload").to_pylist() == [b"?", b"?"]
    assert "not JSON" in letters.column("reason").to_pylist()[0]
    again = export_here(spark, place, tmp_path, format, schema=SCHEMA)
    assert again.total("dead_letters") == 0


@each("format", FORMATS, fresh=fresh)
def test_dead_letters_are_not_written_again_after_a_crash(spark, place, tmp_path, format):
    _fill_json(place, 60, bad={3, 40})
    with killed_at("export.after_dead_letters"):
        export_here(spark, place, tmp_path, format, schema=SCHEMA)
    _fill_json(place, 10, first=60, bad={65})
    report = export_here(spark, place, tmp_path, format, schema=SCHEMA)
    assert report.ok
    assert offsets_in(tmp_path, format, "orders_dead_letters") == [3, 40, 65]
    assert offsets_in(tmp_path, format) == [n for n in range(70) if n not in (3, 40, 65)]


def test_another_schema_after_such_a_crash_loses_nothing(spark, place, tmp_path):
    """Rows that fitted the first schema and not the second are letters, too."""
    _fill_json(place, 60, bad={3})
    with killed_at("export.after_dead_letters"):
        export_here(spark, place, tmp_path, schema=SCHEMA)
    wrong = {"properties": {"name": {"type": "integer"}}}
    assert export_here(spark, place, tmp_path, schema=wrong).total("dead_letters") == 60
    letters = offsets_in(tmp_path, "parquet", "orders_dead_letters")
    assert set(letters) == set(range(60))


# -- what is committed stays --------------------------------------------------------------------

_TABLES = {"parquet": ParquetDirectory, "iceberg": IcebergTable, "delta": DeltaTable}


@each(("format", "is_in"), product(FORMATS, [True, False]), fresh=fresh)
def test_an_outcome_that_is_not_known_costs_no_rows(
    spark, place, tmp_path, monkeypatch, format, is_in
):
    """Whatever a table raises once it has tried, but a refusal: it may have the files."""
    place.fill(TOPIC, 100, uploaded=100)
    real = _TABLES[format].commit

    def lossy(self, addition, *, check) -> None:
        check()
        if is_in:
            real(self, addition, check=check)
        raise CapacityError("whatever")

    monkeypatch.setattr(_TABLES[format], "commit", lossy)
    assert not export_here(spark, place, tmp_path, format).ok
    monkeypatch.undo()
    assert len(list((tmp_path / format).rglob("default-orders-*.parquet*"))) == 1
    assert export_here(spark, place, tmp_path, format).ok
    assert offsets_in(tmp_path, format) == list(range(100))


@each("format", FORMATS, fresh=fresh)
def test_what_was_not_tried_is_removed(spark, place, tmp_path, monkeypatch, format):
    place.fill(TOPIC, 30, uploaded=30)

    def unavailable(self, addition, *, check) -> None:
        raise UnavailableError("the catalog does not answer")

    monkeypatch.setattr(_TABLES[format], "commit", unavailable)
    assert not export_here(spark, place, tmp_path, format).ok
    assert not list((tmp_path / format).rglob("default-orders-*.parquet*"))


def test_a_round_says_in_its_tables_that_it_is_under_way(spark, place, tmp_path):
    """And no longer, when it is over."""
    _fill_json(place, 10, bad={3})
    seen = []

    def look() -> None:
        seen.extend(path.parents[2].name for path in tmp_path.rglob("_ister/runs/*"))

    failpoints.arm("pipeline.before_commit", look)
    assert export_here(spark, place, tmp_path, schema=SCHEMA).ok
    assert sorted(seen) == ["orders", "orders_dead_letters"]
    assert not list(tmp_path.rglob("_ister/runs/*"))


def test_marks_are_renewed_beside_leases(spark, place, monkeypatch):
    monkeypatch.setattr(leases, "_MARK_RENEWAL_SECONDS", 0.0)
    monkeypatch.setattr(leases, "_RENEWALS_PER_LEASE", 10_000)
    renewed, again = [], threading.Event()

    def renew() -> None:
        renewed.append(1)
        if len(renewed) == 1:
            raise UnavailableError("once")
        again.set()

    with (
        open_job("export", spark, place.config) as job,
        LeaseKeeper(job.store, ttl_seconds=15, clock=job.clock, thread="ister-test") as keeper,
    ):
        keeper.renew_also(renew)
        assert again.wait(30)


# -- refusals -------------------------------------------------------------------------------------


def test_one_export_of_a_topic_into_a_table_at_a_time(spark, place, tmp_path):
    place.fill(TOPIC, 30, uploaded=30)
    taken: list[str] = []
    real = Fence.take.__func__

    def remember(cls, store, key, **fields):
        taken.append(key)
        return real(cls, store, key, **fields)

    Fence.take = classmethod(remember)
    try:
        export_here(spark, place, tmp_path, end=10)
    finally:
        Fence.take = classmethod(real)
    [key] = [key for key in taken if "/exports/" in key]
    with open_job("other", spark, place.config, exclusive=lambda _: key):
        report = export_here(spark, place, tmp_path)
        assert "another export" in report.errors[0]["message"]
        # Into another table it may.
        assert export_here(spark, place, tmp_path, to=str(tmp_path / "else")).ok
    assert export_here(spark, place, tmp_path).total("messages") == 20


@each("format", FORMATS, fresh=fresh)
def test_an_export_whose_lease_has_ended_commits_nothing(spark, place, tmp_path, format):
    place.fill(TOPIC, 30, uploaded=30)
    with open_job("export", spark, place.config) as job:
        failpoints.arm("pipeline.before_commit", job.fence.release)
        settings = ExportSettings(to=where(tmp_path, format), format=format_of(format))
        export_job.export_topics(job, settings)
        assert [error["code"] for error in job.report.errors] == ["ABORTED"]
    failpoints.disarm()
    assert offsets_in(tmp_path, format) == []
    # Nor does it leave files behind.
    left = [p for p in (tmp_path / format).rglob("*.parquet*") if ".tmp" not in str(p)]
    assert [path for path in left if "_delta_log" not in str(path)] == []


def format_of(name: str):
    """The format of a name."""
    return export_job._parse_format(name)


@pytest.mark.nightly
@each(("format", "together"), product(FORMATS, [True, False]), fresh=fresh)
def test_dead_letters_do_not_go_among_the_rows_of_another_topic(
    spark, place, tmp_path, format, together
):
    names = ("/default/orders", "/default/orders_dead_letters")
    with place.open() as log:
        for name in names:
            topic = log.topic(name, create=True)
            topic.append(b"?", publish_time=PUBLISHED_MS)
            topic.append(b'{"id":1}', publish_time=PUBLISHED_MS)
            topic.flush()
            topic.upload()
    to = str(tmp_path / format / "{topic}")
    errors = []
    for topics in [[*names]] if together else [[name] for name in names]:
        report = export(spark, place.config, to=to, format=format, schema=SCHEMA, topics=topics)
        errors += report.errors
    assert [error["topic"] for error in errors] == [names[1]]
    assert "dead letters" in errors[0]["message"]
    assert set(read_table(tmp_path, format, "orders_dead_letters")["topic"].to_pylist()) == {
        names[0]
    }
    # And the other way round.
    letters = str(tmp_path / format / "orders")
    report = export(
        spark, place.config, to=f"{to}_2", format=format, schema=SCHEMA, dead_letters=letters
    )
    assert {error["code"] for error in report.errors} == {"ABORTED"}
    assert "the table has rows" in report.errors[0]["message"]


@each(
    "wrong",
    [
        {"format": "csv"},
        {"file_mb": 0},
        {"zstd_level": 99},
        {"start": -1},
        {"to": "{x}"},
        {"schema": {"type": "string"}},
        {"schema": SCHEMA, "dead_letters": "SAME"},
    ],
    fresh=fresh,
)
def test_what_makes_no_sense(spark, place, tmp_path, wrong):
    place.fill(TOPIC, 3, uploaded=3)
    to = where(tmp_path, "parquet")
    arguments = {"to": to, **wrong}
    if arguments.get("dead_letters"):
        arguments["dead_letters"] = to
    try:
        report = export(spark, place.config, **arguments)
    except InvalidRequestError:
        return
    assert [error["code"] for error in report.errors] == ["INVALID_ARGUMENT"]


def test_a_topic_that_is_not_there(spark, place, tmp_path):
    place.fill(TOPIC, 3, uploaded=3)
    with pytest.raises(NotFoundError):
        export_here(spark, place, tmp_path, topics="/default/none")
    assert export_here(spark, place, tmp_path, topics="/none/*").topics == {}


@each("error", [UnavailableError("an election"), FencedError("it has ended")], fresh=fresh)
def test_an_export_that_goes_on_outlives_a_store_that_does_not(
    spark, place, tmp_path, monkeypatch, error
):
    place.fill(TOPIC, 10, uploaded=10)
    stop, rounds, real = threading.Event(), [], Job.topics

    def topics(self, wanted):
        rounds.append(self)
        if len(rounds) in (2, 3):
            raise error.again()
        if len(rounds) == 4:
            place.fill(TOPIC, 20, uploaded=20)
        if len(rounds) == 5:
            stop.set()
        return real(self, wanted)

    monkeypatch.setattr(Job, "topics", topics)
    report = export_here(spark, place, tmp_path, available_now=False, interval=0.01, stop=stop)
    assert (report.ok, len(rounds)) == (True, 5)
    assert offsets_in(tmp_path, "parquet") == list(range(30))
    assert report.topics[TOPIC]["messages"] == 30
    # A lease that has ended is taken anew: without it no round could commit.
    assert len(set(rounds)) == (3 if isinstance(error, FencedError) else 1)


def test_an_export_that_goes_on_ends_with_what_waiting_does_not_heal(spark, place, tmp_path):
    place.fill(TOPIC, 10, uploaded=10)
    with pytest.raises(NotFoundError):
        export_here(
            spark, place, tmp_path, available_now=False, interval=0.01, topics="/default/none"
        )


def test_an_export_that_is_ended_while_a_store_does_not_answer_says_so(spark, place, tmp_path):
    place.fill(TOPIC, 10, uploaded=10)
    stop = threading.Event()

    def fail() -> None:
        stop.set()
        raise UnavailableError("an election")

    failpoints.arm("pipeline.after_plan", fail)
    report = export_here(spark, place, tmp_path, available_now=False, interval=0.01, stop=stop)
    assert [error["message"] for error in report.errors] == ["an election"]


def test_what_retention_took_between_two_exports_is_told(spark, place, tmp_path):
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        fill(topic, 200)
        topic.upload()
    assert "gap" not in export_here(spark, place, tmp_path, end=150).topics[TOPIC]
    with place.open() as log:
        topic = log.topic(TOPIC)
        for first in (200, 400):
            fill(topic, 200, first=first)
            topic.upload()
        earliest = expire_before(log, topic, 300)
    assert earliest > 150
    report = export_here(spark, place, tmp_path)
    assert report.topics[TOPIC]["gap"] == [[150, earliest]]
    assert offsets_in(tmp_path, "parquet") == [*range(150), *range(earliest, 600)]


def test_the_gap_that_compaction_left_is_covered(spark, place, tmp_path, monkeypatch):
    """A range is done when it was read, whether or not each offset has a row."""
    place.fill(TOPIC, 100, uploaded=100)
    real = export_round.export_item

    monkeypatch.setattr("ister.spark.jobs.export_task.ReadTask.read", _without_odd_offsets())
    assert real is export_round.export_item
    export_here(spark, place, tmp_path)
    monkeypatch.undo()
    assert offsets_in(tmp_path, "parquet") == list(range(0, 100, 2))
    assert export_here(spark, place, tmp_path).total("messages") == 0


def _without_odd_offsets():
    from ister.spark.read_task import ReadTask  # noqa: PLC0415 - what is replaced

    read = ReadTask.read

    def some(self, partition, identities):
        for batch in read(self, partition, identities):
            wanted = [offset % 2 == 0 for offset in batch.column("offset").to_pylist()]
            yield batch.filter(pa.array(wanted))

    return some


# -- tables that people roll back, clean and change in between ------------------------------------

_WITH_HISTORY = ("iceberg", "delta")
_LETTERS = "orders_dead_letters"


def _send(place: SparkPlace, start: int, end: int, *, bad=()) -> None:
    _fill_json(place, end - start, first=start, bad=bad)


@each("format", _WITH_HISTORY, fresh=fresh)
def test_what_a_rollback_took_and_the_topic_does_not_have_any_more_is_told(
    spark, place, tmp_path, format
):
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        fill(topic, 100)
        topic.upload()
    export_here(spark, place, tmp_path, format, end=50)
    state = states_of(tmp_path, format)[-1]
    export_here(spark, place, tmp_path, format)
    roll_back(tmp_path, format, state)
    with place.open() as log:
        topic = log.topic(TOPIC)
        for first in (100, 300):
            fill(topic, 200, first=first)
            topic.upload()
        earliest = expire_before(log, topic, 150)
    assert earliest >= 100
    report = export_here(spark, place, tmp_path, format)
    [error] = report.errors
    assert "50 up to 100" in error["message"]
    # What there is, is exported; the next export has nothing to complain of.
    assert offsets_in(tmp_path, format) == [*range(50), *range(earliest, 500)]
    assert export_here(spark, place, tmp_path, format).ok


@each("format", _WITH_HISTORY, fresh=fresh)
def test_dead_letters_that_a_rollback_took(spark, place, tmp_path, format):
    _send(place, 0, 10, bad={3})
    export_here(spark, place, tmp_path, format, schema=SCHEMA)
    before = {name: states_of(tmp_path, format, name)[-1] for name in ("orders", _LETTERS)}
    _send(place, 10, 20, bad={13})
    export_here(spark, place, tmp_path, format, schema=SCHEMA)
    roll_back(tmp_path, format, before[_LETTERS], _LETTERS)
    _send(place, 20, 25, bad={23})
    report = export_here(spark, place, tmp_path, format, schema=SCHEMA)
    [error] = report.errors
    assert "10 up to 20" in error["message"]
    assert offsets_in(tmp_path, format, _LETTERS) == [3]
    roll_back(tmp_path, format, before["orders"])
    assert export_here(spark, place, tmp_path, format, schema=SCHEMA).ok
    assert offsets_in(tmp_path, format, _LETTERS) == [3, 13, 23]
    assert offsets_in(tmp_path, format) == [n for n in range(25) if n not in (3, 13, 23)]
    # With the rows alone, they are there already.
    roll_back(tmp_path, format, before["orders"])
    assert export_here(spark, place, tmp_path, format, schema=SCHEMA).ok
    assert offsets_in(tmp_path, format, _LETTERS) == [3, 13, 23]
    assert offsets_in(tmp_path, format) == [n for n in range(25) if n not in (3, 13, 23)]


@each("format", _WITH_HISTORY, fresh=fresh)
def test_a_rollback_after_which_nothing_is_new_is_recorded(spark, place, tmp_path, format):
    """Dead letters are rare, and upkeep removes what says that their table was rolled back."""
    _send(place, 0, 10, bad={3})
    export_here(spark, place, tmp_path, format, schema=SCHEMA)
    before = {name: states_of(tmp_path, format, name)[-1] for name in ("orders", _LETTERS)}
    _send(place, 10, 20, bad={13})
    export_here(spark, place, tmp_path, format, schema=SCHEMA)
    for name, state in before.items():
        roll_back(tmp_path, format, state, name)
    assert export_here(spark, place, tmp_path, format, schema=SCHEMA, end=10).ok
    commits = {name: commits_in(tmp_path, format, name) for name in before}
    assert export_here(spark, place, tmp_path, format, schema=SCHEMA, end=10).ok
    assert commits == {name: commits_in(tmp_path, format, name) for name in before}
    for name in before:
        commit_nothing(tmp_path, format, name)
        commit_nothing(tmp_path, format, name)
        forget_history(tmp_path, format, name)
    assert export_here(spark, place, tmp_path, format, schema=SCHEMA).ok
    assert offsets_in(tmp_path, format, _LETTERS) == [3, 13]
    assert offsets_in(tmp_path, format) == [n for n in range(20) if n not in (3, 13)]


@each("format", _WITH_HISTORY, fresh=fresh)
def test_a_topic_that_was_made_again_is_refused_without_the_history_too(
    spark, place, tmp_path, format
):
    """Offsets of the old topic say nothing of the new one."""
    place.fill(TOPIC, 30, uploaded=30)
    export_here(spark, place, tmp_path, format)
    with place.open() as log:
        log.delete(TOPIC)
    place.fill(TOPIC, 50, uploaded=50)
    add_foreign_rows(tmp_path, format, 1000, 1001)
    add_foreign_rows(tmp_path, format, 1001, 1002)
    forget_history(tmp_path, format)
    [error] = export_here(spark, place, tmp_path, format).errors
    assert "created again" in error["message"]
    report = export_here(spark, place, tmp_path, format, accept_remade=True)
    assert report.total("messages") == 50
    found = offsets_in(tmp_path, format)
    assert found == sorted([*range(30), *range(50), 1000, 1001])


# -- how a topic is divided among tasks ------------------------------------------------------------

OBJECT_BYTES = 16 * MIB - 100
ROWS = 16_000


def _range_of(objects: int, last_bytes: int = OBJECT_BYTES) -> TopicRange:
    found = [
        ObjectDescriptor(
            object_id=f"data-{number}.dnb1",
            start=number * ROWS,
            end=(number + 1) * ROWS,
            size_bytes=OBJECT_BYTES if number < objects - 1 else last_bytes,
            offset_index=((number * ROWS, 0),),
            codec=Codec.BINCODE2,
        )
        for number in range(objects)
    ]
    end = objects * ROWS
    return TopicRange(
        topic="/default/orders",
        incarnation="i",
        start=0,
        end=end,
        tiered=end,
        descriptors=found,
        tail_bytes=0,
    )


@pytest.mark.parametrize(("slots", "sizes"), [(1, 7 * [112]), (2, 8 * [96]), (4, 8 * [96])])
def test_slots_are_busy_to_the_end(slots, sizes):
    parts = _divide_evenly([_range_of(49, last_bytes=MIB)], 128 * MIB, slots)
    found = [round(part.bytes / MIB) for part in parts]
    assert len(found) == len(sizes)
    assert all(abs(size - wanted) <= 16 for size, wanted in zip(found, sizes, strict=True))
    rounds = -(-len(found) // slots)
    assert rounds * max(found) * slots <= 1.2 * sum(found)


def test_a_topic_smaller_than_a_file_is_divided_among_slots():
    assert len(_divide_evenly([_range_of(4)], 128 * MIB, 2)) == 2


def test_what_is_small_stays_together():
    assert len(_divide_evenly([_range_of(2, last_bytes=100)], 128 * MIB, 64)) == 2
    assert len(_divide_evenly([_range_of(1, last_bytes=MIB)], 128 * MIB, 64)) == 1
    assert not _divide_evenly([_range_of(0)], 128 * MIB, 64)


# -- the command ----------------------------------------------------------------------------------


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers(required=True))
    return parser.parse_args(["export", *arguments])


def test_the_command(monkeypatch):
    seen = {}

    def fake(spark, config, **options):
        seen.update(options)

    monkeypatch.setattr(export_job, "export", fake)
    options = _parse(
        *("--to", "lake.orders", "--format", "iceberg", "--schema", "s.json"),
        *("--catalog", "type=rest", "--catalog", "uri=http://x?a=b", "--from", "17"),
        *("--until", "2026-03-01T10:00+02:00", "--dead-letters", "lake.bad", "--include-tail"),
        *("--interval", "5"),
    )
    command._export(options, None, command.JobLocation(None, "b:1"), None)
    assert seen["catalog"] == {"type": "rest", "uri": "http://x?a=b"}
    assert seen["start"] == 17
    assert seen["end"] == datetime(2026, 3, 1, 8, tzinfo=UTC)
    assert (seen["available_now"], seen["interval"]) == (False, 5.0)
    assert (seen["include_tail"], seen["dead_letters"]) == (True, "lake.bad")
    assert seen["storage_options"] is None


@each(
    "wrong",
    [("--catalog", "type"), ("--from", "yesterday"), ("--interval", "0"), ("--until", "3x")],
)
def test_wrong_arguments(monkeypatch, wrong):
    monkeypatch.setattr(export_job, "export", lambda *_, **__: None)
    # Some are refused as wrong usage already.
    with pytest.raises((InvalidRequestError, SystemExit)):
        command._export(_parse("--to", "x", *wrong), None, command.JobLocation(None, None), None)


def test_a_signal_ends_an_export_that_goes_on(monkeypatch):
    def fake(spark, config, *, stop, **options):
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(export_job, "export", fake)
    before = signal.getsignal(signal.SIGTERM)
    options = _parse("--to", "x", "--interval", "5")
    command._export(options, None, command.JobLocation(None, None), None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_formats_are_those_of_the_config():
    settings = ExportSettings.from_config(
        export_job.ExportConfig(to="x", catalog={"type": "rest"}, format=format_of("iceberg"))
    )
    assert (settings.to, settings.catalog) == ("x", {"type": "rest"})
    with pytest.raises(InvalidRequestError):
        ExportSettings.from_config(export_job.ExportConfig())
