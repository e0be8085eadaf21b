"""The stream sink as Spark uses it, without Spark: each micro-batch once, whatever happens when.

A batch is staged by writers in tasks and committed by another writer on the driver; a commit that
raises is followed by `abort` with every message, and later by the same batch, staged anew.
"""

import itertools
import threading
from contextlib import ExitStack

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

import ister
from ister.base import failpoints, retry
from ister.base.partitions import partition_of
from ister.errors import (
    ConflictError,
    DirectoryLockedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.spark import location, row_staging
from ister.spark.options import WriteOptions
from ister.spark.sink import BatchWriter, StreamWriter
from ister.topic.uploads import TopicUploads
from tests.servers.flight import FlightTopics
from tests.support.cluster import enter
from tests.support.machine import PATIENCE_SECONDS, Task, eventually, payloads
from tests.support.sinks import (
    BY_TOPIC,
    IN_PARTS,
    OTHER,
    PLAIN,
    CrashError,
    Sink,
    crash_at,
    in_both_places,
    make_sink,
    place_for,
)
from tests.support.streams import A, B, Home

pytestmark = pytest.mark.usefixtures("quick")

POINTS = sorted(point for point in failpoints.FAILPOINTS if point.startswith("batch."))


PARTS = [[b"0", b"1", b"2"], [b"3"], [], [b"4", b"5"]]
ROWS = [b"0", b"1", b"2", b"3", b"4", b"5"]
ANEW = [[b"5", b"3", b"1"], [b"0", b"2", b"4"]]


# -- once ---------------------------------------------------------------------------------------


@in_both_places()
def test_rows_arrive_in_the_order_of_partitions(make, there, home):
    messages = make().stage(0, PARTS)
    make().commit([messages[at] for at in (3, 0, 2, 1)], 0)
    assert there.texts() == ROWS
    assert home.staged() == set()


@in_both_places()
def test_writer_has_the_numbers_of_its_name(make, there, home):
    """Goal: after a rewound checkpoint, a new name appends; a query may continue another one."""
    for batch in range(3):
        make().run(batch, [[b"%d" % batch]])
    again = make(writer="again")
    again.run(1, [[b"1"]])
    again.run(1, [[b"1"]])
    make(query=OTHER, writer="again").run(1, [[b"1"]])
    make(query=OTHER, writer="again").run(2, [[b"2"]])
    assert there.texts() == [b"0", b"1", b"2", b"1", b"2"]
    assert home.staged() == set()


@pytest.mark.parametrize("where", ["directory", "broker"])
def test_batch_that_comes_again_with_other_rows_is_said(home, monkeypatch, caplog, where):
    with place_for(where, home) as (options, there):
        lenient = make_sink(monkeypatch, options)
        strict = make_sink(monkeypatch, options, replayedBatch="error")
        lenient.run(0, [[b"a", b"b"], [b"c"]])
        lenient.run(0, [[b"c"], [b"b", b"a"]])
        strict.run(0, [[b"b"], [b"a", b"c"]])
        assert "came again" not in caplog.text
        lenient.run(0, [[b"a", b"b", b"other"]])
        assert "came again with other payloads or keys: 3 rows were not appended" in caplog.text
        with pytest.raises(ConflictError, match="3 rows were not appended"):
            strict.run(0, [[b"a", b"b", b"other"]])
        with pytest.raises(ConflictError, match="with 3 rows, and comes again with 2"):
            lenient.run(0, [[b"a", b"b"]])
        assert there.texts() == [b"a", b"b", b"c"]


@pytest.mark.parametrize("name", ["job-1", "replay-1", "a/b", ""])
def test_writer_may_not_be_called_this(name):
    with pytest.raises(InvalidRequestError):
        WriteOptions.parse({"topic": A, "writer": name}, is_streaming=True)


@pytest.mark.parametrize(("name", "value"), [("writer", "w"), ("replayedBatch", "error")])
def test_options_of_repeated_batches_are_not_for_a_batch(name, value):
    with pytest.raises(InvalidRequestError, match="not for a batch") as caught:
        WriteOptions.parse({"topic": A, name: value}, is_streaming=False)
    assert "df.writeStream" in caught.value.hint


@pytest.mark.parametrize("is_broker", [False, True])
def test_batch_write_is_forgotten_once_it_is_in(home, is_broker):
    """Goal: a thousand writes leave no thousand records behind."""
    with home.open() as log:
        log.topic(A, create=True)
    with ExitStack() as stack:
        if is_broker:
            log = stack.enter_context(home.open())
            server = stack.enter_context(FlightTopics(log))
            enter(log, server.address)
        options = {"config": home.remote_config() if is_broker else home.config, "topic": A}
        parsed = WriteOptions.parse(options, is_streaming=False)
        writer = BatchWriter(parsed, PLAIN, overwrite=False)
        rows = pa.record_batch({"payload": pa.array([b"x", b"y"], pa.binary())})
        writer.commit([writer.write(iter([rows]))])
        assert [key for key in home.metadata() if "/writers/" in key] == []
        if is_broker:
            assert payloads(log.topic(A).read()) == [b"x", b"y"]
    assert home.staged() == set()


@in_both_places()
def test_batches_without_rows_leave_nothing(make, there, home):
    make().run(0, [[], []])
    make().run(1, [])
    assert there.topics() == []
    make().run(2, [[b"2"]])
    make().run(3, [[]])
    make().run(2, [[b"2"]])
    assert there.texts() == [b"2"]
    assert home.staged() == set()


# -- partitions -----------------------------------------------------------------------------------


@in_both_places(("schema",), [(one,) for one in [PLAIN, BY_TOPIC]], is_partitioned=True)
def test_rows_of_a_partitioned_topic_go_to_its_partitions(make, there, home, schema):
    rows = [b"%d" % n for n in range(60)]
    make(schema=schema).run(0, [rows if schema is PLAIN else [(A, row) for row in rows]])
    assert there.topics() == IN_PARTS
    found = [there.texts(name) for name in IN_PARTS]
    assert all(found)
    assert sorted(text for texts in found for text in texts) == sorted(rows)
    assert home.staged() == set()


@in_both_places(is_partitioned=True)
def test_rows_with_a_key_go_to_the_partition_of_the_client(make, there):
    keys = ["a", "b", "order-17", "", "x" * 50]
    batch = pa.record_batch(
        {
            "payload": pa.array([key.encode() for key in keys], pa.binary()),
            "routing_key": pa.array(keys, pa.string()),
        }
    )
    keyed = StructType([*PLAIN.fields, StructField("routing_key", StringType())])
    sink_ = make(topic=A, schema=keyed)
    sink_._block = lambda rows: rows
    sink_.run(0, [batch])
    for key in keys:
        assert key.encode() in there.texts(IN_PARTS[partition_of(key, 3)])


# -- commits that end half way --------------------------------------------------------------------


@in_both_places()
def test_abort_keeps_the_files_that_a_begun_commit_needs(make, there, home):
    messages = make().stage(0, PARTS)
    needed = {file.key for message in messages for _, file in message.files}
    crash_at("batch.after_rows")
    with pytest.raises(Exception, match=r"after_rows|CrashError"):
        make().commit(messages, 0)
    failpoints.disarm()
    assert needed <= home.staged()
    # Even if the tasks of the next attempt fail for good.
    make().writer().abort([*make().stage(0, ANEW), None], 0)
    assert needed <= home.staged()
    make().run(0, ANEW)
    assert there.texts() == ROWS
    assert home.staged() == set()


@in_both_places()
def test_abort_after_a_failed_task_removes_what_the_others_have_staged(make, there, home):
    messages = make().stage(0, PARTS)
    assert len(home.staged()) == 3
    make().writer().abort([messages[0], None, *messages[1:]], 0)
    assert home.staged() == set()
    make().run(0, PARTS)
    assert there.texts() == ROWS


@in_both_places()
def test_abort_removes_nothing_of_others(make, there, home):
    others = [make(query=OTHER).stage(0, PARTS), make().stage(7, PARTS)]
    kept = home.staged()
    messages = make().stage(0, PARTS)
    make().writer().abort([*messages, None], 0)
    assert home.staged() == kept
    make(query=OTHER).commit(others[0], 0)
    make().commit(others[1], 7)
    assert there.texts() == ROWS + ROWS


@in_both_places(("topics_written",), [(one,) for one in [0, 1, 40]])
def test_task_that_raises_leaves_nothing(make, home, topics_written):
    """With files that it has not closed yet, and with files that it has."""

    def fail():
        raise CrashError("a row cannot be computed")

    names = [f"/default/t{number}" for number in range(topics_written)]
    before = home.objects()
    with pytest.raises(CrashError):
        make(schema=BY_TOPIC).write(0, 0, *[[(name, b"x")] for name in names], fail)
    assert home.objects() == before, "neither under their names nor under way to them"


@in_both_places()
def test_attempt_that_was_killed_leaves_files_that_count_for_nothing(make, there, home):
    lost = make().write(0, 0, [b"0", b"1"])
    make().commit([make().write(0, 0, [b"0", b"1"])], 0)
    assert there.texts() == [b"0", b"1"]
    assert home.staged() == {file.key for _, file in lost.files}


# -- topics by column -----------------------------------------------------------------------------


@in_both_places(
    (
        "row",
        "text",
    ),
    [((None, b"x"), "no topic"), (("no name", b"x"), "no name")],
)
def test_row_without_a_proper_topic_fails_its_task(make, home, row, text):
    with pytest.raises(InvalidRequestError, match=text):
        make(schema=BY_TOPIC).run(0, [[(A, b"0"), row]])
    assert home.staged() == set()


@in_both_places()
def test_topics_are_not_made_where_that_is_not_wanted(make, there):
    with pytest.raises(NotFoundError, match="does not exist"):
        make(createTopics="false").run(0, [[b"0"]])
    assert there.topics() == []
    make(createTopics="true").run(0, [[b"0"]])
    make(createTopics="false").run(1, [[b"1"]])
    assert there.texts() == [b"0", b"1"]


def test_commit_waits_for_whoever_has_the_directory_open(home, monkeypatch):
    writing = Sink(monkeypatch, {"config": home.config, "topic": A})
    messages = writing.stage(0, PARTS)
    with home.open():
        committing = Task(writing.commit, messages, 0)
        committing.join(0.3)
        assert committing.is_running
    committing.result()
    assert payloads(home.read(A)) == ROWS


# -- who has the log -----------------------------------------------------------------------------


def test_each_topics_broker_appends_without_being_named(home, monkeypatch):
    """Goal: a config is enough, and a topic that moves between two batches is found again."""
    second = home.second_node()
    with (
        home.open() as one,
        second.open() as two,
        FlightTopics(one) as at_one,
        FlightTopics(two) as at_two,
    ):
        enter(one, at_one.address)
        enter(two, at_two.address)
        one.topic(A, create=True)
        two.topic(B, create=True)
        options = {"config": home.remote_config(), "createTopics": "false"}
        writing = Sink(monkeypatch, options, schema=BY_TOPIC)
        writing.run(0, [[(A, b"a0"), (B, b"b0")]])
        one.seal(A)
        two.topic(A)
        writing.run(1, [[(A, b"a1"), (B, b"b1")]])
        assert payloads(two.topic(A).read()) == [b"a0", b"a1"]
        assert payloads(two.topic(B).read()) == [b"b0", b"b1"]
        assert at_one.calls["append_staged"] == 1


def test_topic_whose_files_are_here_and_that_nobody_has_open_is_appended_here(home, monkeypatch):
    second = home.second_node()
    home.append(A, 1)
    with second.open() as two, FlightTopics(two) as at_two:
        enter(two, at_two.address)
        Sink(monkeypatch, {"config": home.config, "topic": A}).run(0, [[b"x"]])
        assert at_two.calls["append_staged"] == 0
    assert payloads(home.read(A))[1:] == [b"x"]


def test_commit_that_waits_too_long_says_who_to_ask(home, monkeypatch):
    writing = Sink(monkeypatch, {"config": home.config, "topic": A, "commitTimeoutSeconds": "0.2"})
    messages = writing.stage(0, PARTS)
    with home.open(), pytest.raises(DirectoryLockedError, match="ister serve"):
        writing.commit(messages, 0)
    writing.commit(messages, 0)
    assert payloads(home.read(A)) == ROWS


@in_both_places()
def test_queries_that_write_the_same_topic_at_once_all_finish(make, there):
    queries, batches = ("one", "two", "three"), 6
    barrier = threading.Barrier(len(queries))

    def run(query, staged):
        barrier.wait(PATIENCE_SECONDS)
        for batch, messages in enumerate(staged):
            make(query=query).commit(messages, batch)

    staged = {
        query: [
            make(query=query).stage(
                batch, [[f"{query} {batch} {row}".encode() for row in range(3)]]
            )
            for batch in range(batches)
        ]
        for query in queries
    }
    running = [Task(run, query, messages) for query, messages in staged.items()]
    for task in running:
        task.join(PATIENCE_SECONDS)
        task.result()
    seen = [text.decode() for text in there.texts()]
    for query in queries:
        mine = [text for text in seen if text.startswith(query + " ")]
        assert mine == [f"{query} {batch} {row}" for batch in range(batches) for row in range(3)]
    assert len(seen) == len(queries) * batches * 3


# -- brokers that come and go ---------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_broker_whose_stores_do_not_answer_is_asked_again(home, monkeypatch, point):
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.001, 0.001))
    with place_for("broker", home) as (options, there):
        crash_at(point, error=UnavailableError)
        Sink(monkeypatch, {**options, "topic": A}).run(0, PARTS)
        assert there.texts() == ROWS


def test_broker_that_never_comes_back_ends_the_batch_and_not_its_rows(home, monkeypatch):
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.05, 0.05))
    with home.open() as log, FlightTopics(log) as server:
        options = {
            "broker": server.address,
            "config": home.remote_config(),
            "topic": A,
        }
        writing = Sink(monkeypatch, options | {"commitTimeoutSeconds": "0.2"})
        messages = writing.stage(0, PARTS)
        server.close()
        with pytest.raises(UnavailableError):
            writing.commit(messages, 0)
        assert len(home.staged()) == 3, "the commit may have begun"
        with FlightTopics(log, port=server.port):
            location._close_all()
            Sink(monkeypatch, options).run(0, PARTS)
        assert payloads(log.topic(A).read()) == ROWS


# -- what else the commit does --------------------------------------------------------------------


def test_large_batches_are_uploaded_by_the_commit_itself(memory, monkeypatch):
    """Nobody else would: the log is open for as long as the commit lasts."""
    home = Home(memory, uploader={"engine": "auto", "max_batch_bytes": 1000})
    Sink(monkeypatch, {"config": home.config, "topic": A}).run(0, [[b"x" * 100] * 50])
    with ister.open_bucket(home.config) as history:
        assert history.topic(A).tiered == 50


@pytest.fixture
def early(memory, monkeypatch):
    """A sink whose commits upload from the first synced byte on, and the tiers that they upload."""
    tiers = []

    class Noted(row_staging._EarlyUpload):
        def __init__(self, tier, pool):
            super().__init__(tier, pool)
            tiers.append(tier)

    monkeypatch.setattr(row_staging, "_EarlyUpload", Noted)
    monkeypatch.setattr(row_staging, "_UPLOAD_BYTES", 1)
    home = Home(
        memory,
        uploader={"engine": "auto", "max_batch_bytes": 1},
        wal={"fsync_max_batch_bytes": 1},
    )
    yield Sink(monkeypatch, {"config": home.config, "topic": A}), home, tiers
    failpoints.disarm()


def test_upload_begins_while_rows_are_still_appended(early):
    sink, home, tiers = early
    visits = itertools.count(1)

    def after_rows():
        visit = next(visits)
        if visit == 1:
            eventually(lambda: tiers[0].uploads.lag_bytes > 0)
        elif visit == 2:
            eventually(lambda: tiers[0].owned.tiered > 0)

    failpoints.arm("batch.after_rows", after_rows)
    sink.run(0, [[b"0"], [b"1"], [b"2"]])
    with ister.open_bucket(home.config) as history:
        assert history.topic(A).tiered == 3
        assert len(history.topic(A).descriptors(0, 3)) > 1


def test_early_upload_that_fails_does_not_fail_the_commit(early, monkeypatch):
    sink, home, tiers = early
    calls = []

    def refuse(tier, *, is_paced=True, **_):
        calls.append(is_paced)
        raise UnavailableError("silent")

    monkeypatch.setattr(TopicUploads, "upload", refuse)
    failpoints.arm("batch.after_rows", lambda: eventually(lambda: tiers[0].uploads.lag_bytes > 0))
    sink.run(0, [[b"0"], [b"1"], [b"2"]])
    # Once while the rows are appended, and once more at the end.
    assert calls == [False, True]
    assert payloads(home.read(A)) == [b"0", b"1", b"2"]


def test_small_batches_wait_for_their_upload(home, monkeypatch):
    Sink(monkeypatch, {"config": home.config, "topic": A}).run(0, [[b"x"]])
    with ister.open_bucket(home.config) as history:
        assert history.topic(A).tiered == 0
    assert payloads(home.read(A)) == [b"x"]


def test_task_that_spark_says_nothing_about_is_refused(home, monkeypatch):
    writing = Sink(monkeypatch, {"config": home.config, "topic": A})
    with pytest.raises(InvalidRequestError, match="did not pass the query"):
        writing.writer().write(iter(()))


def test_topic_cannot_be_overwritten(home):
    options = WriteOptions.parse({"config": home.config, "topic": A}, is_streaming=True)
    with pytest.raises(InvalidRequestError, match="can only be appended to"):
        StreamWriter(options, PLAIN, overwrite=True)
