"""Exports into tables that people roll back, clean and change in between; tasks in this process."""

import pytest

from ister.spark.jobs.export_job import export
from tests.integration.spark_topics import SparkPlace, expire_before, fill
from tests.support.cases import each, making
from tests.support.exports import (
    TOPIC,
    add_foreign_rows,
    commit_nothing,
    commits_in,
    forget_history,
    iceberg_catalog,
    offsets_in,
    read_table,
    roll_back,
    states_of,
    tasks_here,
    where,
)

FORMATS = ("iceberg", "delta")
SCHEMA = {"properties": {"id": {"type": "integer"}, "name": {"type": "string"}}}
LETTERS = "orders_dead_letters"


@pytest.fixture
def spark():
    """Tasks run here."""
    with tasks_here() as session:
        yield session


@pytest.fixture
def place(tmp_path):
    """A data directory."""
    return SparkPlace(tmp_path / "data")


@making("tmp_path", "place")
def fresh(path):
    """A data directory, and a directory for tables, of one case."""
    return {"tmp_path": path, "place": SparkPlace(path / "data")}


def _export(spark, place, tmp_path, format, **options):
    return export(spark, place.config, to=where(tmp_path, format), format=format, **options)


def _send(place: SparkPlace, start: int, end: int, *, bad=()) -> None:
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for number in range(start, end):
            topic.append(b"?" if number in bad else b'{"id":%d,"name":"n%d"}' % (number, number))
        topic.flush()
        topic.upload()


@each("format", FORMATS, fresh=fresh)
def test_what_a_rollback_took_is_added_again(spark, place, tmp_path, format):
    _send(place, 0, 20)
    _export(spark, place, tmp_path, format)
    state = states_of(tmp_path, format)[-1]
    _send(place, 20, 30)
    _export(spark, place, tmp_path, format)
    roll_back(tmp_path, format, state)
    _send(place, 30, 35)
    planned = _export(spark, place, tmp_path, format, dry_run=True)
    assert planned.topics[TOPIC]["ranges"] == [[20, 35]]
    report = _export(spark, place, tmp_path, format)
    assert (report.ok, report.total("messages")) == (True, 15)
    assert offsets_in(tmp_path, format) == list(range(35))
    assert _export(spark, place, tmp_path, format).total("messages") == 0


@each("format", FORMATS, fresh=fresh)
def test_what_a_rollback_took_and_the_topic_does_not_have_any_more_is_told(
    spark, place, tmp_path, format
):
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        fill(topic, 100)
        topic.upload()
    _export(spark, place, tmp_path, format, end=50)
    state = states_of(tmp_path, format)[-1]
    _export(spark, place, tmp_path, format)
    roll_back(tmp_path, format, state)
    with place.open() as log:
        topic = log.topic(TOPIC)
        for first in (100, 300):
            fill(topic, 200, first=first)
            topic.upload()
        earliest = expire_before(log, topic, 150)
    assert earliest >= 100
    report = _export(spark, place, tmp_path, format)
    [error] = report.errors
    assert "50 up to 100" in error["message"]
    # What there is, is exported; the next export has nothing to complain of.
    assert offsets_in(tmp_path, format) == [*range(50), *range(earliest, 500)]
    assert _export(spark, place, tmp_path, format).ok


@each("format", FORMATS, fresh=fresh)
def test_dead_letters_that_a_rollback_took(spark, place, tmp_path, format):
    _send(place, 0, 10, bad={3})
    _export(spark, place, tmp_path, format, schema=SCHEMA)
    before = {name: states_of(tmp_path, format, name)[-1] for name in ("orders", LETTERS)}
    _send(place, 10, 20, bad={13})
    _export(spark, place, tmp_path, format, schema=SCHEMA)
    roll_back(tmp_path, format, before[LETTERS], LETTERS)
    _send(place, 20, 25, bad={23})
    report = _export(spark, place, tmp_path, format, schema=SCHEMA)
    [error] = report.errors
    assert "10 up to 20" in error["message"]
    assert offsets_in(tmp_path, format, LETTERS) == [3]
    roll_back(tmp_path, format, before["orders"])
    assert _export(spark, place, tmp_path, format, schema=SCHEMA).ok
    assert offsets_in(tmp_path, format, LETTERS) == [3, 13, 23]
    assert offsets_in(tmp_path, format) == [n for n in range(25) if n not in (3, 13, 23)]
    # With the rows alone, they are there already.
    roll_back(tmp_path, format, before["orders"])
    assert _export(spark, place, tmp_path, format, schema=SCHEMA).ok
    assert offsets_in(tmp_path, format, LETTERS) == [3, 13, 23]
    assert offsets_in(tmp_path, format) == [n for n in range(25) if n not in (3, 13, 23)]


@each("format", FORMATS, fresh=fresh)
def test_a_rollback_after_which_nothing_is_new_is_recorded(spark, place, tmp_path, format):
    """Dead letters are rare, and upkeep removes what says that their table was rolled back."""
    _send(place, 0, 10, bad={3})
    _export(spark, place, tmp_path, format, schema=SCHEMA)
    before = {name: states_of(tmp_path, format, name)[-1] for name in ("orders", LETTERS)}
    _send(place, 10, 20, bad={13})
    _export(spark, place, tmp_path, format, schema=SCHEMA)
    for name, state in before.items():
        roll_back(tmp_path, format, state, name)
    assert _export(spark, place, tmp_path, format, schema=SCHEMA, end=10).ok
    commits = {name: commits_in(tmp_path, format, name) for name in before}
    assert _export(spark, place, tmp_path, format, schema=SCHEMA, end=10).ok
    assert commits == {name: commits_in(tmp_path, format, name) for name in before}
    for name in before:
        commit_nothing(tmp_path, format, name)
        commit_nothing(tmp_path, format, name)
        forget_history(tmp_path, format, name)
    assert _export(spark, place, tmp_path, format, schema=SCHEMA).ok
    assert offsets_in(tmp_path, format, LETTERS) == [3, 13]
    assert offsets_in(tmp_path, format) == [n for n in range(20) if n not in (3, 13)]


@each("format", FORMATS, fresh=fresh)
def test_a_topic_that_was_made_again_is_refused_without_the_history_too(
    spark, place, tmp_path, format
):
    """Offsets of the old topic say nothing of the new one."""
    place.fill(TOPIC, 30, uploaded=30)
    _export(spark, place, tmp_path, format)
    with place.open() as log:
        log.delete(TOPIC)
    place.fill(TOPIC, 50, uploaded=50)
    add_foreign_rows(tmp_path, format, 1000, 1001)
    add_foreign_rows(tmp_path, format, 1001, 1002)
    forget_history(tmp_path, format)
    [error] = _export(spark, place, tmp_path, format).errors
    assert "created again" in error["message"]
    report = _export(spark, place, tmp_path, format, accept_remade=True)
    assert report.total("messages") == 50
    found = offsets_in(tmp_path, format)
    assert found == sorted([*range(30), *range(50), 1000, 1001])


def test_columns_of_payloads_that_were_renamed_and_dropped(spark, place, tmp_path):
    _send(place, 0, 5)
    _export(spark, place, tmp_path, "iceberg", schema=SCHEMA)
    with (
        iceberg_catalog(tmp_path) as catalog,
        catalog.load_table("default.orders").update_schema() as change,
    ):
        change.rename_column("id", "number").delete_column("name")
    _send(place, 5, 9)
    report = _export(spark, place, tmp_path, "iceberg", schema=SCHEMA)
    assert (report.ok, report.total("messages")) == (True, 4)
    rows = read_table(tmp_path, "iceberg")
    assert rows.column("number").to_pylist() == list(range(9))
    assert not {"id", "name"} & set(rows.column_names)
