"""The sink with rows of many topics: one staged file for each task, commits of many topics at once.

As in `test_sink`, without Spark.
"""

import itertools
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampType

from ister.base import failpoints, retry
from ister.errors import InvalidRequestError, MessageTooLargeError, UnavailableError
from ister.spark import location, row_staging
from ister.spark.row_staging import _commit_at_once
from ister.topic import batches
from tests.servers.flight import FlightTopics
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.cluster import enter
from tests.support.machine import PATIENCE_SECONDS, Task, eventually, payloads
from tests.support.sinks import BY_TOPIC, Sink, crash_at, in_both_places
from tests.support.streams import A, B

pytestmark = pytest.mark.usefixtures("quick")

POINTS = sorted(point for point in failpoints.FAILPOINTS if point.startswith("batch."))
C = "/default/third"


def staged_rows(home):
    """The staged files of rows."""
    return {path for path in home.staged() if path.endswith(".rows")}


# -- one file -----------------------------------------------------------------------------------


@in_both_places()
def test_task_writes_one_file_however_many_topics_it_has(make, there, home):
    names = [f"/default/t{number:03}" for number in range(60)]
    blocks = [[(name, b"%d" % block) for name in names] for block in range(4)]
    writing = make(schema=BY_TOPIC)
    messages = [writing.write(0, number, *blocks[2 * number :][:2]) for number in range(2)]
    assert len(staged_rows(home)) == 2
    assert all(len({file.key for _, file in message.files}) == 1 for message in messages)
    assert [len(message.files) for message in messages] == [60, 60], "a segment for each topic"
    writing.commit(messages, 0)
    assert home.staged() == set()
    for name in names[::20]:
        assert there.texts(name) == [b"0", b"1", b"2", b"3"]


@in_both_places()
def test_rows_beyond_the_bound_make_more_segments_of_the_same_file(make, there, home):
    """Goal: memory is bounded; the order within a topic stays."""
    rows = [b"%05d" % number * 20 for number in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_staging, "_WAITING_BYTES", 2000)
        patch.setattr(row_staging, "_BLOCK_BYTES_MIN", 500)
        blocks = [[(A, row), (B, row)] for row in rows]
        message = make(schema=BY_TOPIC).write(0, 0, *blocks)
    assert len(staged_rows(home)) == 1
    assert sum(topic == A for topic, _ in message.files) > 3
    make(schema=BY_TOPIC).commit([message], 0)
    assert there.texts(A) == rows
    assert there.texts(B) == rows


def test_segments_of_one_topic_that_follow_each_other_are_one(home, monkeypatch):
    monkeypatch.setattr(row_staging, "_WAITING_BYTES", 1)
    writing = Sink(monkeypatch, {"config": home.config, "topic": A})
    message = writing.write(0, 0, [b"0"], [b"1"], [b"2"])
    assert [(topic, file.rows, file.position) for topic, file in message.files] == [(A, 3, 0)]
    writing.commit([message], 0)
    assert payloads(home.read(A)) == [b"0", b"1", b"2"]


def test_row_that_is_too_large_names_its_topic(home, monkeypatch):
    writing = Sink(monkeypatch, {"config": home.config}, schema=BY_TOPIC)
    limit = writing.writer()._place.config.storage.max_message_size
    with pytest.raises(MessageTooLargeError) as caught:
        writing.write(0, 0, [(A, b"0"), (B, b"x" * (limit + 1))])
    assert caught.value.topic == B
    assert home.staged() == set()


# -- tombstones ---------------------------------------------------------------------------------

KEYED = StructType([StructField("payload", BinaryType()), StructField("routing_key", StringType())])


def keyed(writing, rows):
    """A sink whose rows have a payload and a key."""
    payload, keys = zip(*rows, strict=True)
    batch = pa.record_batch(
        {"payload": pa.array(payload, pa.binary()), "routing_key": pa.array(keys, pa.string())}
    )
    writing._block = lambda _: batch
    return writing


@in_both_places()
def test_null_payload_with_a_key_is_a_tombstone(make, there, home):
    rows = [(b"1", "a"), (None, "a"), (b"", None)]
    keyed(make(topic=A, schema=KEYED), rows).run(0, [rows])
    assert there.texts() == [b"1", b"", b""]


def test_null_payload_without_a_key_fails_its_task(home, monkeypatch):
    rows = [(b"1", None), (None, None)]
    writing = Sink(monkeypatch, {"config": home.config, "topic": A}, schema=KEYED)
    with pytest.raises(InvalidRequestError, match="row 1 has neither a payload nor a routing_key"):
        keyed(writing, rows).write(0, 0, rows)
    assert home.staged() == set()


# -- commits that end half way ------------------------------------------------------------------

PARTS = [[(A, b"0"), (B, b"1"), (C, b"2"), (A, b"3")], [(B, b"4"), (C, b"5")]]
ANEW = [[(C, b"5"), (B, b"4"), (A, b"3")], [(A, b"0"), (C, b"2"), (B, b"1")]]
WANTED = {A: [b"0", b"3"], B: [b"1", b"4"], C: [b"2", b"5"]}


@in_both_places(("point", "visit"), list(itertools.product(POINTS, [1, 2, 3])))
def test_commit_of_topics_that_raises_anywhere_is_finished(make, there, home, point, visit):
    """Goal: each row is in once, although topics share the files of both attempts."""
    crash_at(point, visit=visit)
    with pytest.raises(Exception, match=f"{point}|CrashError"):
        make(schema=BY_TOPIC).run(0, PARTS)
    failpoints.disarm()
    assert staged_rows(home), "a topic may need them"
    make(schema=BY_TOPIC).run(0, ANEW)
    for topic, wanted in WANTED.items():
        assert sorted(there.texts(topic)) == wanted
    make(schema=BY_TOPIC).run(0, PARTS)
    for topic, wanted in WANTED.items():
        assert sorted(there.texts(topic)) == wanted


# -- many at once -------------------------------------------------------------------------------


def test_topics_are_committed_at_once():
    barrier = threading.Barrier(3)

    def work(topic, check):
        barrier.wait(PATIENCE_SECONDS)
        return topic.upper()

    assert _commit_at_once([["a", "b"], ["c"]], work) == {"a": "A", "b": "B", "c": "C"}


def test_first_error_is_raised_and_no_other_topic_is_begun(monkeypatch):
    monkeypatch.setattr(row_staging, "_TOPICS_AT_ONCE", 2)
    begun, failed = [], threading.Event()

    def work(topic, check):
        begun.append(topic)
        if topic == "1":
            failed.set()
            raise UnavailableError("no answer")
        assert failed.wait(PATIENCE_SECONDS)
        eventually(lambda: raises(check))

    with pytest.raises(UnavailableError, match="no answer") as caught:
        _commit_at_once([[str(number) for number in range(20)]], work)
    assert caught.value.topic == "1", "the error names the topic"
    assert set(begun) == {"0", "1"}


def raises(check):
    try:
        check()
    except UnavailableError:
        return True
    return False


def test_group_that_waits_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(row_staging, "_TOPICS_AT_ONCE", 2)
    done, others = [], threading.Event()

    def work(topic, check):
        if topic.startswith("slow"):
            assert others.wait(PATIENCE_SECONDS)
        done.append(topic)
        if len(done) == 10:
            others.set()

    slow, fast = ([f"{kind} {number}" for number in range(10)] for kind in ("slow", "fast"))
    assert len(_commit_at_once([slow, fast], work)) == 20
    assert set(done[:10]) == set(fast)


@contextmanager
def one_of_two_is_down(home):
    """Two owners; the second does not answer at its port."""
    with home.open() as one, home.second_node().open() as two, FlightTopics(one) as at_one:
        at_two = FlightTopics(two)
        enter(one, at_one.address)
        enter(two, at_two.address)
        one.topic(A, create=True)
        two.topic(B, create=True)
        at_two.close()
        yield one, two, at_two.port


def test_owner_that_is_down_delays_its_own_topics_only(home, monkeypatch):
    """Goal: two brokers append at once; one is dead at first, and is retried."""
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.01, 0.05))
    with one_of_two_is_down(home) as (one, two, port):
        options = {"config": home.remote_config(), "commitTimeoutSeconds": "30"}
        writing = Sink(monkeypatch, options, schema=BY_TOPIC)
        messages = writing.stage(0, [[(B, b"b0"), (A, b"a0")], [(B, b"b1")]])
        committing = Task(writing.commit, messages, 0)
        eventually(lambda: payloads(one.topic(A).read()) == [b"a0"])
        assert committing.is_running
        assert len(staged_rows(home)) == 2, "topic B needs them"
        with FlightTopics(two, port=port):
            committing.join(PATIENCE_SECONDS)
            committing.result()
        assert payloads(two.topic(B).read()) == [b"b0", b"b1"]
        assert home.staged() == set()


def test_owner_that_stays_down_ends_the_commit_with_its_topic(home, monkeypatch):
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.01, 0.02))
    with one_of_two_is_down(home) as (one, two, port):
        options = {"config": home.remote_config(), "commitTimeoutSeconds": "2"}
        writing = Sink(monkeypatch, options, schema=BY_TOPIC)
        with pytest.raises(UnavailableError) as caught:
            writing.run(0, [[(B, b"b0"), (A, b"a0")]])
        assert caught.value.topic == B
        assert staged_rows(home), "topic B may need them"
        with FlightTopics(two, port=port):
            location._close_all()
            writing.run(0, [[(A, b"other"), (B, b"b0")]])
        assert payloads(one.topic(A).read()) == [b"a0"]
        assert payloads(two.topic(B).read()) == [b"b0"]


class SlowBroker:
    """Answers the last of some calls; the others take their time and are lost."""

    def __init__(self, *, lost, grows, clock):
        self.lost, self.grows, self.clock = lost, grows, clock
        self.given = []

    def append_staged(self, topic, batch, *, timeout_seconds, **settings):
        self.given.append(timeout_seconds)
        if len(self.given) <= self.lost:
            self.clock.advance(timeout_seconds)
            raise UnavailableError("no answer in time")
        return "appended"

    def watermarks(self, topics, *, timeout_seconds):
        return {topic: SimpleNamespace(next=len(self.given) * self.grows) for topic in topics}


@each(
    "lost, grows, calls",
    [
        # The broker is gone, and nothing says so.
        pytest.param(1, 0, 2, id="a call is lost"),
        pytest.param(9, 0, 3, id="the topic does not grow"),
        pytest.param(9, 1, 10, id="it has no compiled loops"),
        pytest.param(99, 1, 30, id="other producers let it grow"),
    ],
)
def test_lost_call_leaves_time_for_others_and_growth_for_more(monkeypatch, lost, grows, calls):
    """Goal: a broker that restarts in the middle of a commit does not end the query."""
    clock = ManualClock()
    broker = SlowBroker(lost=lost, grows=grows, clock=clock)
    monkeypatch.setattr(retry, "SystemClock", clock)
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(row_staging, "ask", lambda place, topic, call: call(broker))
    monkeypatch.setattr(row_staging, "has_brokers", lambda place: True)
    monkeypatch.setattr(row_staging, "group_by_owner", lambda place, topics: [list(topics)])
    monkeypatch.setattr(row_staging.Committer, "_remove_files", lambda self, staged: None)
    committer = row_staging.Committer(
        place=SimpleNamespace(
            brokers=("grpc://b:1",), history=lambda: SimpleNamespace(objects=None)
        ),
        creates=True,
        timeout_seconds=60.0,
    )
    monkeypatch.setattr(row_staging.Committer, "_check_same", lambda self, staged, appended: None)
    batch = batches.StagedBatch(writer="w", batch=1, files=())
    if calls <= lost:
        with pytest.raises(UnavailableError):
            committer.commit({A: batch})
    else:
        assert committer.commit({A: batch}) == {A: "appended"}
    assert broker.given == [20.0] * calls


@in_both_places()
def test_microseconds_of_publish_times_are_cut_off(make, there):
    times = [1_700_000_000_123_999, 1_700_000_000_124_000, 0]
    schema = StructType(
        [StructField("payload", BinaryType()), StructField("publish_time", TimestampType())]
    )
    rows = pa.record_batch(
        {
            "payload": pa.array([b"x"] * len(times)),
            "publish_time": pa.array(times, pa.timestamp("us", "UTC")),
        }
    )
    sink = make(schema=schema, topic=A)
    sink._block = lambda block: block
    sink.run(0, [rows])
    with there.opened() as log:
        found = [message.publish_time_ms for message in log.topic(A).read()]
    assert found == [time // 1000 for time in times]
