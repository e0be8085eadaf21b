"""The limit on what uploads send: exact, shared, fair, and no reason to wait when closing."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import ister
from ister.base.clock import SystemClock
from ister.base.limits import KIB, MIB
from ister.bucket.egress import EgressLimit
from tests.support.clock import ManualClock
from tests.support.machine import eventually, numbered, payloads
from tests.support.stores import NAME, Site


class Sleeper:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.clock = ManualClock()
        self.on_sleep = lambda: None

    def __call__(self, seconds):
        on_sleep, self.on_sleep = self.on_sleep, lambda: None
        on_sleep()
        self.clock.advance(seconds)


@pytest.fixture
def sleeper():
    return Sleeper()


@pytest.fixture
def limit(sleeper):
    return EgressLimit(1000, clock=sleeper.clock, sleep=sleeper)


@pytest.mark.parametrize("sizes", [[10_000], [1] * 3000, [999, 1, 4000]], ids=str)
def test_rate_is_the_configured_bytes_per_second(limit, sleeper, sizes):
    began = sleeper.clock.monotonic()
    for size in sizes:
        assert limit.take(size)
    elapsed = sleeper.clock.monotonic() - began
    # The first slice, a quarter of a second, goes at once.
    assert sum(sizes) / 1000 - 0.26 <= elapsed <= sum(sizes) / 1000 + 0.01


def test_unused_time_does_not_accumulate(limit, sleeper):
    sleeper.clock.advance(3600)
    began = sleeper.clock.monotonic()
    limit.take(5000)
    assert sleeper.clock.monotonic() - began >= 4.7


def test_small_upload_waits_for_slices_of_others_not_for_their_objects(limit, sleeper):
    """Goal: fair, and no lock is held meanwhile.

    Method: in the first sleep of one that takes 100 s, another one takes a slice.
    """
    took = []

    def little():
        began = sleeper.clock.monotonic()
        limit.take(250)
        took.append(sleeper.clock.monotonic() - began)

    sleeper.on_sleep = little
    limit.take(100_000)
    assert took[0] <= 0.51


def test_waiting_upload_stops_when_asked(limit, sleeper):
    is_stopping = threading.Event()
    sleeper.on_sleep = is_stopping.set
    began = sleeper.clock.monotonic()
    assert not limit.take(1_000_000, is_stopping.is_set)
    assert sleeper.clock.monotonic() - began <= 0.3


def _config(path, rate, **uploader):
    return {
        "storage": {
            "wal": {"dir": str(path / "wal")},
            "uploader": {"engine": "none", "max_bytes_per_second": rate, **uploader},
        }
    }


def test_topics_share_the_limit_of_their_process(tmp_path):
    """Only a lower bound is checked: a busy machine may take longer."""
    with ister.open(_config(tmp_path, MIB)) as log:
        topics = [log.topic(f"/default/{name}", create=True) for name in "abc"]
        for topic in topics:
            topic.append_many([bytes(100 * KIB)] * 4)
            topic.flush()
        began = SystemClock().monotonic()
        with ThreadPoolExecutor(3) as pool:
            tiered = list(pool.map(lambda topic: topic.upload(), topics))
        elapsed = SystemClock().monotonic() - began
        total = sum(item.size_bytes for item in tiered)
        assert total > 1200 * KIB
        assert elapsed >= total / MIB - 0.26
        assert all(topic.watermarks.tiered == 4 for topic in topics)


def test_closing_does_not_wait_for_the_limit_and_nothing_is_lost(tmp_path):
    """An upload of two minutes is given up; the next process has all of it."""
    sent = [bytes([number]) * 100 * KIB for number in range(80)]
    log = ister.open(_config(tmp_path, 64 * KIB, engine="embedded", max_batch_bytes=1))
    topic = log.topic("/default/a", create=True)
    topic.append_many(sent)
    topic.flush()
    eventually(lambda: log.metrics.snapshot()["uploader.memory_usage_bytes"] > 0)
    began = SystemClock().monotonic()
    log.close()
    assert SystemClock().monotonic() - began < 60
    with ister.open(tmp_path) as log:
        topic = log.topic("/default/a")
        topic.upload()
        assert topic.watermarks.tiered == 80
        assert payloads(topic.read()) == sent


def test_topic_with_a_long_backlog_lets_others_go_first():
    """Goal: whoever waits for `tiered` waits for an object of others, not for their backlog.

    Method: one thread uploads; the first object of the backlog is held until the other topic is in
    the queue. Then objects are looked at in the order in which they came.
    """
    with Site(clock=SystemClock()) as site:
        log = site.open(
            background=True,
            storage={"uploader": {"threads": 1, "max_object_bytes": 4096, "max_batch_bytes": 1}},
        )
        backlog, small = (log.topic(name, create=True) for name in (str(NAME), "/ns/small"))
        order, is_queued = [], threading.Event()

        def before(kind, key):
            if kind == "close":
                order.append("small" if "small" in key else "backlog")
                is_queued.wait(60)

        site.objects.before = before
        backlog.append_many(numbered(60, size=3000))
        backlog.flush()
        eventually(lambda: order)
        offset = small.append(b"x")
        waiting = threading.Thread(target=small.wait, args=(offset, "tiered", 120))
        waiting.start()
        eventually(lambda: log._background._queued_count > 0)
        is_queued.set()
        waiting.join()
        assert order.index("small") <= 2
        eventually(lambda: backlog.watermarks.tiered == 60)
