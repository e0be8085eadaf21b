"""A pipeline uploads in the owner's name: the owner finds out, and both may try at once."""

from dataclasses import replace

import pytest

from ister.base import failpoints
from ister.base.model import AckLevel
from ister.errors import ClosedError, UnavailableError
from tests.support.cases import each
from tests.support.machine import ROOT, Task, eventually, numbered, payloads, waiting
from tests.support.stores import NAME, Pipeline, Site

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"


def a_topic(site, disk="a", *, storage=None, take_over=False, ack=None, **wal):
    return site.open(disk, storage=storage, **wal).topic(
        TEXT, create=True, take_over=take_over, ack=ack
    )


def fill(topic, count, *, size=0):
    """Messages that others can see are durable."""
    topic.append_many(numbered(count, first=topic.watermarks.next, size=size))
    save(topic)


def a_filled_topic(site, count=10, **options):
    topic = a_topic(site, **options)
    fill(topic, count)
    return topic


def save(topic):
    topic.flush()
    topic.wal.save_checkpoint()


def checkpoint(site, disk="a"):
    """The bytes of `uploader.ckpt`; None if there is none."""
    return site.files(disk).content(PATH).get("uploader.ckpt")


# -- the owner finds out --------------------------------------------------------------------------


def test_waiters_for_the_bucket_are_woken(site):
    topic = a_topic(site, ack="tiered")
    assert topic.ack is AckLevel.TIERED
    offset = topic.append(b"x")
    save(topic)
    waiter = Task(topic.wait, offset, timeout=60)
    eventually(lambda: waiting(topic, "tiered"))
    topic.bucket.uploads.follow()
    assert waiter.is_running
    Pipeline(site).upload()
    topic.bucket.uploads.follow()
    waiter.result()


def test_part_of_what_is_synced_is_followed(site):
    topic = a_filled_topic(site)
    assert topic.bucket.uploads.follow() == 0
    assert checkpoint(site) is None, "nothing to follow changes nothing"
    pipeline = Pipeline(site)
    pipeline.upload(end=4)
    assert topic.bucket.uploads.follow() == 4
    topic.append_many(numbered(5))  # more comes, which is not durable yet
    pipeline.upload()
    assert topic.bucket.uploads.follow() == topic.watermarks.tiered == 10
    assert not topic.bucket.uploads.is_idle
    save(topic)
    pipeline.upload()
    assert topic.bucket.uploads.follow() == 15
    assert topic.bucket.uploads.is_idle


@each("uploader", [{}, {"max_object_bytes": 4096}, {"index_every_messages": 3}])
def test_pipeline_leaves_what_the_owner_would_have(uploader):
    """The same objects, descriptors and checkpoint, byte for byte, but for arrival times."""
    with Site() as one, Site() as two:
        for site in (one, two):
            topic = a_topic(site, storage={"uploader": uploader}, rotate_max_bytes=8192)
            for _ in range(8):
                fill(topic, 5, size=700)
            if site is one:
                topic.upload()
            else:
                Pipeline(site).upload(**uploader)
                topic.bucket.uploads.follow()
        found = [
            [
                replace(d, incarnation="", arrival_time_max=None, etag=None)
                for d, _ in site.catalog().descriptors()
            ]
            for site in (one, two)
        ]
        assert found[0] == found[1]
        assert len(found[0]) > (1 if "max_object_bytes" in uploader else 0)
        for described in found[0]:
            key = one.key(described.start)
            assert key == two.key(described.start)
            assert one.objects.read(key, 0, 1 << 30) == two.objects.read(key, 0, 1 << 30)
        assert checkpoint(one) == checkpoint(two) is not None


def test_producers_that_were_held_are_let_go(site):
    topic = a_topic(site, storage={"uploader": {"max_lag_bytes": 2000}})
    fill(topic, 10, size=500)
    topic.bucket.uploads.apply_pressure()
    assert topic.bucket.uploads.lag_bytes > 2000
    producer = Task(topic.append, b"x")
    pipeline = Pipeline(site)
    pipeline.upload(end=2)
    topic.bucket.uploads.follow()
    assert 2000 < topic.bucket.uploads.lag_bytes < 5000
    assert producer.is_running
    pipeline.upload()
    topic.bucket.uploads.follow()
    assert producer.result() == 10
    assert topic.bucket.uploads.lag_bytes < 100


@pytest.mark.parametrize("kind", ["get", "range"])
def test_look_that_fails_half_way_is_made_up_for(site, kind):
    topic = a_filled_topic(site, 5)
    Pipeline(site).upload()
    for number in range(10):
        left = [number]

        def silent(operation, key, left=left):
            if operation == kind:
                left[0] -= 1
                if left[0] < 0:
                    raise UnavailableError("silent")

        site.metadata.before = silent
        try:
            topic.bucket.uploads.follow()
        except UnavailableError:
            assert topic.watermarks.tiered == 0
        else:
            break
    assert number > 0
    assert topic.watermarks.tiered == 5


# -- both at once ---------------------------------------------------------------------------------


def between(point, action):
    """Does something once, when an upload comes by a failpoint."""
    acted = []

    def act():
        if not acted:
            acted.append(1)
            action()

    failpoints.arm(point, act)
    return acted


@pytest.mark.parametrize("point", ["tier.before_session", "tier.after_part", "tier.before_commit"])
@pytest.mark.parametrize("end", [3, 7, 10])
def test_owner_goes_on_where_a_faster_pipeline_has_ended(site, point, end):
    topic = a_filled_topic(site)
    pipeline = Pipeline(site)
    failpoints.disarm()
    acted = between(point, lambda: pipeline.upload(end=end))
    topic.upload()
    assert acted
    assert site.ranges() == ([(0, end), (end, 10)] if end < 10 else [(0, 10)])
    assert topic.watermarks.tiered == 10
    assert payloads(topic.read()) == numbered(10)
    assert topic.bucket.uploads.last_error is None


def test_follow_does_not_wait_for_an_upload_under_way(site):
    topic = a_filled_topic(site)
    found = []
    between("tier.before_commit", lambda: found.append(topic.bucket.uploads.follow()))
    topic.upload()
    assert found == [0]


def test_upload_after_the_end_is_refused(site):
    topic = a_filled_topic(site)
    topic.bucket.uploads.stop()
    with pytest.raises(ClosedError):
        topic.upload()


# -- whose turn it is -----------------------------------------------------------------------------


def test_looks_are_a_second_apart(site):
    topic = a_topic(site)
    uploads, clock = topic.bucket.uploads, site.clock
    assert not uploads.is_follow_due(clock.monotonic())  # nothing is missing
    fill(topic, 5)
    assert uploads.is_follow_due(clock.monotonic())
    uploads.follow()
    assert not uploads.is_follow_due(clock.monotonic())
    clock.advance(1.1)
    assert uploads.is_follow_due(clock.monotonic())


def is_left_behind(site, topic):
    return topic.bucket.uploads.is_left_behind(site.clock.monotonic())


def test_topic_is_left_behind_when_nothing_comes_for_long(site):
    topic = a_filled_topic(site)
    topic.bucket.uploads.follow()
    site.clock.advance(59)
    assert not is_left_behind(site, topic)
    site.clock.advance(2)
    assert is_left_behind(site, topic)
    # One object is enough to show that somebody is at it.
    topic.bucket._stores.membership.renew()
    Pipeline(site).upload(end=3)
    topic.bucket.uploads.follow()
    assert not is_left_behind(site, topic)


def test_pipeline_gets_another_chance_after_an_upload_of_the_owners_own(site):
    topic = a_filled_topic(site)
    topic.bucket.uploads.follow()
    for _ in range(7):
        site.clock.advance(10)
        topic.bucket._stores.membership.renew()
    assert is_left_behind(site, topic)
    topic.upload()
    fill(topic, 5)
    assert not is_left_behind(site, topic)
    topic.bucket.uploads.follow()
    assert not is_left_behind(site, topic)


def test_patience_is_longer_where_uploads_are_rare(site):
    topic = a_topic(site, storage={"uploader": {"interval_seconds": 600}})
    fill(topic, 10)
    topic.bucket.uploads.follow()
    site.clock.advance(3599)
    assert not is_left_behind(site, topic)
    site.clock.advance(2)
    assert is_left_behind(site, topic)
