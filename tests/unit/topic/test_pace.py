"""Uploads beside a busy producer: how long they pause, and when they do not."""

import pytest

from ister.base.limits import KIB
from ister.base.metrics import Metrics
from ister.topic.pace import PacedReader
from tests.support.clock import ManualClock
from tests.support.machine import NoThreads, Task, eventually, numbered, waiting
from tests.support.stores import NAME, Site

CHUNK = 16 * KIB


class Pauses:
    """Notes how long an upload has paused."""

    def __init__(self):
        self.seconds = []

    def __call__(self, seconds):
        self.seconds.append(seconds)


@pytest.fixture
def topic(machine):
    topic = machine.topic(ack="memory", scheduler=NoThreads())
    topic.append_many(numbered(100, size=KIB))
    topic.flush()
    return topic


def a_reader(topic, clock, pauses, *, may_pause=True):
    return PacedReader(
        topic.wal,
        chunk_bytes=CHUNK,
        metrics=Metrics(),
        clock=clock,
        may_pause=lambda: may_pause,
        sleep=pauses,
    )


@pytest.mark.parametrize(
    ("appended", "took", "may_pause", "paused"),
    [
        pytest.param(20, 0.1, True, [0.2], id="busy"),
        pytest.param(20, 5.0, True, [1.0], id="busy and the store is slow"),
        pytest.param(20, 0.1, False, [], id="busy and somebody waits"),
        pytest.param(2, 0.1, True, [], id="not busy"),
        pytest.param(0, 0.1, True, [], id="idle"),
    ],
)
def test_pause_is_twice_the_time_of_the_chunk_while_a_producer_is_busy(
    topic, appended, took, may_pause, paused
):
    clock, pauses = ManualClock(), Pauses()
    reader = a_reader(topic, clock, pauses, may_pause=may_pause)
    first = reader.fetch(0, 100, bytes_max=CHUNK)
    assert pauses.seconds == []
    for payload in numbered(appended, size=KIB):
        topic.append(payload)
    clock.advance(took)
    second = reader.fetch(first.next_offset, 100, bytes_max=CHUNK)
    assert pauses.seconds == pytest.approx(paused)
    assert second.first_offset == first.next_offset
    reader.close()


def test_upload_does_not_pause_while_somebody_waits_for_tiered():
    with Site() as site:
        topic = site.open("a").topic(str(NAME), create=True)
        assert topic.bucket.uploads._may_pause()
        waiter = Task(topic.wait, topic.append(b"a"), "tiered")
        eventually(lambda: waiting(topic, "tiered") == 1)
        assert not topic.bucket.uploads._may_pause()
        topic.flush()
        topic.upload()
        waiter.result()
        assert topic.bucket.uploads._may_pause()


def test_upload_does_not_pause_once_the_lag_grows():
    with Site() as site:
        log = site.open("a", storage={"uploader": {"max_lag_bytes": 4 * KIB}})
        topic = log.topic(str(NAME), create=True)
        topic.append(b"x" * 500)
        topic.flush()
        assert topic.bucket.uploads._may_pause()
        topic.append(b"x" * 600)
        topic.flush()
        assert not topic.bucket.uploads._may_pause()
