"""The wall clock steps: nothing that is young goes in either tier, and what is old goes in time."""

from dataclasses import replace

import pytest

from ister.errors import UnavailableError
from ister.format.records import Progress, encode_progress
from tests.support.stores import NAME

TEXT = str(NAME)
DAY = 86_400
DAY_MS = DAY * 1000
MODES = ["wal_cloud", "local_only"]
STEPS = [30 * DAY_MS, 75 * 365 * DAY_MS, -30 * DAY_MS]


def opened(site, mode="wal_cloud", *, minutes=60, size_mb=None, **uploader):
    bucket = {
        "cloud": {"retention": {"time_minutes": minutes}, "orphan_grace_minutes": 60},
        "uploader": uploader,
    }
    return site.open(
        storage={"mode": mode, **(bucket if mode == "wal_cloud" else {})},
        rotate_max_bytes=4096,
        retention={"time_minutes": minutes, "size_mb": size_mb},
    )


def fill(log, *, files=3, **message):
    """Files of one message each, one object each, and one more message."""
    topic = log.topic(TEXT, create=True)
    for _ in range(files):
        topic.append(b"x" * 5000, **message)
        topic.flush()
        if topic.bucket is not None:
            topic.upload()
    topic.append(b"last", **message)
    topic.flush()
    if topic.bucket is not None:
        topic.upload()
    return topic


def tidy(log):
    """One pass of everything that deletes; whether it has."""
    topic = log.topic(TEXT)
    if topic.bucket is None:
        return log.trim(TEXT)
    log.stores.membership.renew()
    return (
        topic.bucket.retention.trim()
        + topic.bucket.retention.expire()
        + len(topic.bucket.retention.collect_orphans())
    )


# -- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jump_ms", STEPS)
def test_step_of_the_clock_deletes_nothing(site, mode, jump_ms):
    log = opened(site, mode)
    fill(log)
    site.clock.advance(10)
    site.clock.jump_wall(jump_ms)
    assert tidy(log) == 0
    assert log.clock_step.seconds == pytest.approx(jump_ms / 1000)
    site.clock.advance(3000)
    assert tidy(log) == 0
    site.clock.jump_wall(-jump_ms)
    assert tidy(log) == 0
    assert log.clock_step is None
    site.clock.advance(601)
    assert tidy(log) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jump_ms", STEPS)
@pytest.mark.parametrize("is_clean", [True, False])
def test_step_across_a_restart_deletes_nothing(site, mode, jump_ms, is_clean):
    log = opened(site, mode)
    fill(log)
    (log.close if is_clean else lambda: site.kill(log))()
    site.clock.advance(10)
    site.clock.jump_wall(jump_ms)
    log = opened(site, mode)
    assert log.clock_step is not None
    assert tidy(log) == 0
    assert log.confirm_clock() is not None
    assert log.clock_step is None
    assert tidy(log) == 0, "what was stored before the step is no older for it"
    site.clock.advance(31 * DAY)
    assert tidy(log) > 0


@pytest.mark.parametrize("mode", MODES)
def test_suspended_machine_deletes_what_has_become_old(site, mode):
    log = opened(site, mode)
    fill(log)
    site.clock.suspend(3599)
    assert tidy(log) == 0
    site.clock.suspend(2)
    assert tidy(log) > 0
    assert log.clock_step is None


@pytest.mark.parametrize("mode", MODES)
def test_size_limits_do_not_depend_on_the_clock(site, mode):
    log = opened(site, mode, minutes=None if mode == "local_only" else 60, size_mb=0)
    topic = fill(log)
    site.clock.jump_wall(30 * DAY_MS)
    assert tidy(log) == 3
    assert log.clock_step is not None
    assert topic.watermarks.trimmed == 3


def test_stepped_clock_makes_no_subscription_inactive(site):
    log = opened(site, size_mb=0)
    topic = fill(log)
    keys = site.catalog().keys
    progress = Progress(offset=1, timestamp=site.clock.now_ns() // 1_000_000)
    site.metadata.put(keys.progress("slow"), encode_progress(progress))
    site.clock.jump_wall(30 * DAY_MS)
    assert topic.bucket.retention.trim() == 1
    assert topic.watermarks.trimmed == 1


# -- arrival ------------------------------------------------------------------------------------


def test_object_knows_when_its_messages_arrived(site):
    log = opened(site)
    topic = log.topic(TEXT, create=True)
    topic.append(b"x", publish_time=5)
    topic.flush()
    arrived_ms = site.clock.now_ns() // 1_000_000
    site.clock.advance(900)
    log.stores.membership.renew()
    topic.upload()
    [(described, _)] = site.catalog().descriptors()
    assert described.arrival_time_max == arrived_ms
    assert described.created_at == arrived_ms // 1000 + 900
    # And still does when it is uploaded again.
    site.objects.drop(site.key(0))
    assert topic.bucket.repair_objects().objects == [described.object_id]
    [(again, _)] = site.catalog().descriptors()
    assert again == replace(described, created_at=again.created_at, etag=again.etag)


def test_backfill_with_times_far_apart_is_one_object(site):
    log = opened(site, max_object_seconds=300)
    topic = log.topic(TEXT, create=True)
    for number in range(500):
        topic.append(b"five!", publish_time=number * 3_600_000)
    topic.flush()
    topic.upload()
    assert [(d.start, d.end) for d, _ in site.catalog().descriptors()] == [(0, 500)]


def test_object_is_cut_by_arrival(site):
    log = opened(site, max_object_seconds=300)
    topic = log.topic(TEXT, create=True)
    for _ in range(4):
        topic.append_many([b"x"] * 10)
        topic.flush()
        site.clock.advance(200)
        log.stores.membership.renew()
    topic.upload()
    assert [(d.start, d.end) for d, _ in site.catalog().descriptors()] == [(0, 20), (20, 40)]


# -- piece by piece -----------------------------------------------------------------------------


def test_trim_goes_as_far_as_objects_can_be_read(site):
    log = opened(site)
    topic = fill(log, files=4)
    site.clock.advance(3700)
    log.stores.membership.renew()
    bad = site.key(2)

    def fail(kind, key):
        if kind == "read" and key == bad:
            raise UnavailableError("no answer")

    site.objects.before = fail
    with pytest.raises(UnavailableError):
        topic.bucket.retention.trim()
    assert topic.watermarks.trimmed == 2
    site.objects.before = lambda kind, key: None
    reads = len(site.objects.reads)
    assert topic.bucket.retention.trim() == 2
    assert topic.watermarks.trimmed == 4
    assert not [key for key, *_ in site.objects.reads[reads:] if key in (site.key(0), site.key(1))]
