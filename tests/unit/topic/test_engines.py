"""Who uploads: a pipeline while it has the lease, the log's own threads while nobody has."""

import threading

import pytest

from ister.base.clock import SystemClock
from ister.topic.uploads import TopicUploads
from tests.support.machine import Task, eventually, numbered, payloads
from tests.support.scale import scaled
from tests.support.stores import NAME, Pipeline, Site

TEXT = str(NAME)
LEASE_SECONDS = 4


@pytest.fixture
def site():
    with Site(clock=SystemClock()) as site:
        yield site


def a_topic(site, engine):
    storage = {
        "uploader": {"engine": engine, "interval_seconds": 1},
        "metadata": {"lease_ttl_seconds": LEASE_SECONDS},
    }
    return site.open(background=True, storage=storage).topic(TEXT, create=True)


def append(topic, count=5):
    topic.append_many(numbered(count, first=topic.watermarks.next))
    topic.flush()
    topic.wal.save_checkpoint()


def made_by(site):
    """How many objects were begun."""
    return sum(kind == "open_writer" for kind, _ in list(site.objects.calls))


def a_while(seconds=2.5):
    """Longer than an upload would wait."""
    threading.Event().wait(seconds)


class Kept:
    """A pipeline whose lease is kept by a thread."""

    def __init__(self, site):
        self.pipeline = Pipeline(site, ttl_seconds=LEASE_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self):
        while not self._stop.wait(LEASE_SECONDS / 4):
            self.pipeline.fence.renew()

    def die(self):
        """Nothing is given back: the lease ends by itself."""
        self._stop.set()
        self._thread.join()

    def end(self):
        self.die()
        self.pipeline.fence.release()


@pytest.fixture
def kept(site):
    kept = Kept(site)
    yield kept
    kept.end()


# -- auto -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_uploads_are_left_to_a_pipeline_and_followed(site, kept):
    topic = a_topic(site, "auto")
    append(topic)
    waiter = Task(topic.wait, 4, "tiered", timeout=60)
    a_while()
    assert made_by(site) == 0
    assert waiter.is_running
    kept.pipeline.upload()
    waiter.result()
    assert topic.watermarks.tiered == 5
    append(topic)
    kept.pipeline.upload()
    eventually(lambda: topic.watermarks.tiered == 10)
    assert site.ranges() == [(0, 5), (5, 10)]


def test_uploads_are_taken_back_when_the_pipeline_ends(site, kept):
    topic = a_topic(site, "auto")
    append(topic)
    a_while(1.5)
    assert topic.watermarks.tiered == 0
    kept.end()
    eventually(lambda: topic.watermarks.tiered == 5)
    assert site.ranges() == [(0, 5)]


def test_uploads_are_taken_back_within_two_lease_times_of_a_death(site, kept):
    topic = a_topic(site, "auto")
    append(topic)
    kept.pipeline.upload(end=3)
    eventually(lambda: topic.watermarks.tiered == 3)
    clock = SystemClock()
    kept.die()
    died_at = clock.monotonic()
    eventually(lambda: topic.watermarks.tiered == 5)
    # A slow machine has more.
    assert clock.monotonic() - died_at < 2 * LEASE_SECONDS + scaled(30, 2)
    assert site.ranges() == [(0, 3), (3, 5)]


@pytest.mark.nightly
def test_uploads_go_to_and_fro(site):
    """Each offset goes to the bucket once, whoever is at it."""
    topic = a_topic(site, "auto")
    for number in range(3):
        append(topic)
        eventually(lambda end=topic.watermarks.next: topic.watermarks.tiered == end)
        kept = Kept(site)
        append(topic)
        a_while(LEASE_SECONDS / 2)  # the log has seen the lease by now
        if topic.watermarks.tiered < topic.watermarks.next:
            kept.pipeline.upload()
        eventually(lambda end=topic.watermarks.next: topic.watermarks.tiered == end)
        kept.end() if number % 2 else kept.die()
    found = site.ranges()
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == 30
    assert payloads(topic.read()) == numbered(30)


def test_topic_that_a_pipeline_leaves_behind_is_uploaded_here(site, kept, monkeypatch):
    monkeypatch.setattr(TopicUploads, "is_left_behind", lambda self, now: True)
    topic = a_topic(site, "auto")
    append(topic)
    eventually(lambda: topic.watermarks.tiered == 5)
    assert made_by(site) == 1


# -- the others -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_engine_spark_never_uploads(site, monkeypatch):
    monkeypatch.setattr(TopicUploads, "is_left_behind", lambda self, now: True)
    topic = a_topic(site, "spark")
    append(topic)
    a_while()
    assert made_by(site) == 0
    # Whether or not anybody has the lease, what is committed is followed.
    Pipeline(site, key="/danube/pipeline/jobs/one").upload()
    eventually(lambda: topic.watermarks.tiered == 5)


def test_engine_embedded_uploads_beside_a_pipeline(site, kept):
    topic = a_topic(site, "embedded")
    append(topic)
    eventually(lambda: topic.watermarks.tiered == 5)
    assert site.ranges() == [(0, 5)]
