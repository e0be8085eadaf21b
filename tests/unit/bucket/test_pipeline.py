"""What logs and pipelines ask of each other: requests, taken once, and who has the lease."""

import json

import pytest

from ister.bucket.fence import Fence
from ister.bucket.pipeline import (
    REQUEST_SECONDS_MAX,
    PipelineKeys,
    PipelineWatch,
    read_requests,
    request_job,
    take_request,
)
from ister.config import load_config
from ister.errors import CommitUnknownError, ConflictError, InvalidRequestError, TopicNameError
from ister.topic.pipeline_status import describe_pipeline, read_status
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata
from tests.support.stores import PREFIX, Cluster, silent

KEYS = PipelineKeys(load_config(None, {}).storage.metadata.root_prefix)
A, B = "/default/a", "/default/b"


class Place:
    def __init__(self):
        self.clock = ManualClock()
        self.store = MemoryMetadata(self.clock)

    def hold(self, job="run"):
        return Fence.take(
            self.store,
            KEYS.lease,
            id="x",
            about={"job": job, "host": "h"},
            ttl_seconds=10**6,
            clock=self.clock,
        )

    def ask(self, job="compact", topics=None, by="user:a"):
        return request_job(self.store, KEYS, job, by=by, topics=topics, clock=self.clock)

    def waiting(self):
        return [(one.job, one.topics) for one in read_requests(self.store, KEYS)]


@pytest.fixture
def place():
    one = Place()
    yield one
    one.store.close()


def test_somebody_has_to_be_there_to_do_it(place):
    with pytest.raises(ConflictError, match="no pipeline"):
        place.ask()
    held = place.hold("tier")  # one job alone, which looks for no requests
    with pytest.raises(ConflictError, match="no pipeline"):
        place.ask()
    held.release()
    place.hold()
    place.ask()
    assert place.waiting() == [("compact", None)]


def test_what_can_be_asked_for(place):
    place.hold()
    for job in ("replay", "", "../lease"):
        with pytest.raises(InvalidRequestError):
            place.ask(job)
    for topics in ([], ["/default/t"] * 1001):
        with pytest.raises(InvalidRequestError):
            place.ask(topics=topics)
    with pytest.raises(TopicNameError):
        place.ask(topics=["*"])
    assert place.waiting() == []


def test_two_requests_become_one(place):
    place.hold()
    place.ask(topics=[B])
    place.ask(topics=[A, B], by="user:b")
    assert place.waiting() == [("compact", (A, B))]
    [request] = read_requests(place.store, KEYS)
    assert request.by == "user:b"
    place.ask(topics=None)
    place.ask(topics=[A])
    assert place.waiting() == [("compact", None)]
    # But not with one that nobody is going to do any more.
    place.clock.advance(REQUEST_SECONDS_MAX + 1)
    place.ask(topics=[A])
    assert place.waiting() == [("compact", (A,))]


def test_requests_are_taken_once_and_by_the_holder(place):
    fence = place.hold()
    place.ask("scrub")
    place.ask("tier", topics=[A])
    first, second = read_requests(place.store, KEYS)
    assert (first.job, second.job) == ("tier", "scrub")
    # Asked for again meanwhile: what was read is not what is there.
    place.ask("tier", topics=[B])
    assert not take_request(place.store, KEYS, first, compares=[fence.compare])
    [first, _] = read_requests(place.store, KEYS)
    assert first.topics == (A, B)
    assert take_request(place.store, KEYS, first, compares=[fence.compare])
    assert not take_request(place.store, KEYS, first, compares=[fence.compare])
    fence.release()
    assert not take_request(place.store, KEYS, second, compares=[fence.compare])
    assert place.waiting() == [("scrub", None)]


def test_answer_that_was_lost(place, monkeypatch):
    place.hold()
    transact, calls = place.store.transact, []

    def lose_the_first(compares, operations):
        calls.append(transact(compares, operations))
        if len(calls) == 1:
            raise CommitUnknownError("lost")
        return calls[-1]

    monkeypatch.setattr(place.store, "transact", lose_the_first)
    place.ask(topics=[A])
    assert place.waiting() == [("compact", (A,))]


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"requested_at": "x"}', b"\xff"])
def test_what_is_no_request_is_replaced(place, value):
    place.hold()
    place.store.put(KEYS.request("compact"), value)
    place.store.put(KEYS.request("unknown"), b"{}")
    assert place.waiting() == []
    place.ask(topics=[A])
    assert place.waiting() == [("compact", (A,))]


def test_status_shows_requests(place):
    config = load_config(None, {})
    fields = read_status(place.store, config)
    assert (fields["is_running"], fields["requests"]) == (False, {})
    fence = place.hold()
    place.ask("scrub", topics=[A])
    status = {"holder": "x", "requests": {"compact": {"state": "done"}, "scrub": {"state": "done"}}}
    place.store.put(KEYS.status, json.dumps(status).encode())
    fields = read_status(place.store, config)
    assert fields["requests"]["compact"] == {"state": "done"}
    assert fields["requests"]["scrub"]["state"] == "waiting"
    assert fields["requests"]["scrub"]["topics"] == [A]
    assert describe_pipeline(fields) == "A pipeline runs on h."
    # One that has ended is not running anything.
    fence.release()
    fields = read_status(place.store, config)
    assert list(fields["requests"]) == ["scrub"]
    place.store.put(KEYS.lease, b"no")
    fields = read_status(place.store, config)
    assert (fields["is_running"], fields["errors"][0]["code"]) == (False, "DATA_LOSS")


# -- whether a pipeline has the lease -----------------------------------------------------------


def test_lease_is_looked_up_a_few_times_in_its_time():
    cluster = Cluster()
    watch = PipelineWatch(
        cluster.metadata, PipelineKeys(PREFIX), ttl_seconds=15, clock=cluster.clock
    )
    looks = []
    cluster.metadata.before = lambda kind, key: looks.append(key)
    for _ in range(100):
        watch.is_running()
        cluster.clock.advance(0.15)
    assert set(looks) == {"/danube/pipeline/lease"}
    assert 4 <= len(looks) <= 6


def test_silent_store_changes_nobodys_mind():
    cluster = Cluster()
    keys = PipelineKeys(PREFIX)
    watch = PipelineWatch(cluster.metadata, keys, ttl_seconds=15, clock=cluster.clock)
    assert not watch.is_running()
    cluster.metadata.put(keys.lease, b"{}")
    cluster.clock.advance(5)
    assert watch.is_running()

    cluster.metadata.before = silent
    cluster.clock.advance(100)
    assert watch.is_running()
    cluster.metadata.before = lambda kind, key: None
    cluster.metadata.delete(keys.lease)
    assert watch.is_running()
    cluster.clock.advance(5)
    assert not watch.is_running()
