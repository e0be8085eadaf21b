"""What a log does on its own, with real threads: uploads when due, leases, retention, the end."""

import threading
import time

import pytest

from ister.base import threads
from ister.base.clock import SystemClock
from ister.errors import ClosedError, FencedError, UnavailableError
from ister.topic.background import Background
from tests.support.machine import Task, TurningClock, eventually, numbered, payloads
from tests.support.stores import NAME, TTL_SECONDS, Site, calm, silent

TEXT = str(NAME)
SLOW = {"interval_seconds": 86_400, "max_batch_bytes": 1 << 40}


@pytest.fixture
def site():
    with Site(clock=SystemClock()) as site:
        yield site


def opened(site, disk="a", *, uploader=None, storage=None, **wal):
    return site.open(
        disk, background=True, storage={"uploader": uploader or {}, **(storage or {})}, **wal
    )


def ours():
    """All but the one that loads the compiled loops, which is the process's."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("ister-") and name != "ister-kernels"]


# -- when uploads begin -------------------------------------------------------------------------


def test_what_is_synced_is_uploaded_after_the_interval(site):
    topic = opened(site, uploader={**SLOW, "interval_seconds": 1}).topic(TEXT, create=True)
    topic.append_many(numbered(10))
    topic.flush()
    eventually(lambda: topic.watermarks.tiered == 10)
    assert site.ranges()[-1][1] == 10


def test_many_bytes_are_uploaded_before_their_time(site):
    topic = opened(site, uploader={**SLOW, "max_batch_bytes": 20_000}).topic(TEXT, create=True)
    topic.append(b"first")
    topic.flush()
    eventually(lambda: topic.bucket.uploads._cycle_at > 0)  # the first cycle is due at once
    eventually(lambda: topic.watermarks.tiered == 1)
    for payload in numbered(30, size=1000):
        topic.append(payload)
    topic.flush()
    eventually(lambda: topic.watermarks.tiered == 31)


def test_little_waits_for_its_time(site):
    topic = opened(site, uploader=SLOW).topic(TEXT, create=True)
    topic.wait(topic.append(b"first"), "tiered")
    topic.append(b"second")
    topic.flush()
    now = site.clock.monotonic()
    assert not topic.bucket.uploads.is_due(now)
    assert topic.bucket.uploads.is_due(now + SLOW["interval_seconds"])


@pytest.mark.parametrize(("ack", "level"), [("synced", "tiered"), ("tiered", None)])
def test_waiter_for_tiered_has_the_upload_begin_at_once(site, ack, level):
    topic = opened(site, uploader=SLOW).topic(TEXT, create=True, ack=ack)
    for number in range(5):
        topic.wait(topic.append(b"%d" % number), level, timeout=60)
    assert topic.watermarks.tiered == 5


def test_engine_none_leaves_uploads_to_the_caller(site):
    log = opened(site, uploader={"engine": "none", "interval_seconds": 1})
    topic = log.topic(TEXT, create=True)
    topic.append(b"x")
    topic.flush()
    log._background._hand_out(site.clock.monotonic() + 2)
    assert not topic.bucket.uploads.is_submitted
    topic.upload()
    assert topic.watermarks.tiered == 1


def test_topic_opened_with_a_backlog_is_uploaded(site):
    log = opened(site, uploader={"engine": "none"})
    topic = log.topic(TEXT, create=True)
    topic.append_many(numbered(10))
    topic.flush()
    log.close()
    topic = opened(site).topic(TEXT)
    eventually(lambda: topic.watermarks.tiered == 10)


# -- errors -------------------------------------------------------------------------------------


def test_failing_topic_backs_off_and_the_others_go_on(site):
    log = opened(site, uploader={"interval_seconds": 1})
    bad, good = log.topic(TEXT, create=True), log.topic("/default/other", create=True)

    def fail(kind, key):
        if kind == "open_writer" and "/orders/" in key:
            raise UnavailableError("silent")

    site.objects.before = fail
    bad.append(b"x")
    bad.flush()
    eventually(lambda: bad.bucket.uploads.last_error is not None)
    for number in range(3):
        good.wait(good.append(b"%d" % number), "tiered", timeout=60)
    attempts = sum(
        kind == "open_writer" and "/orders/" in key for kind, key in list(site.objects.calls)
    )
    assert attempts <= 4
    site.objects.before = calm
    eventually(lambda: bad.watermarks.tiered == 1)
    assert bad.bucket.uploads.last_error is None


def test_pool_that_ends_in_the_middle_of_a_tick_fails_the_waits(site, monkeypatch, caplog):
    log = opened(site, uploader=SLOW)
    topic = log.topic(TEXT, create=True)
    has_ended = threading.Event()

    def refuse(now):
        has_ended.set()
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(threads, "have_pools_ended", has_ended.is_set)
    monkeypatch.setattr(log._background, "_hand_out", refuse)
    # A tick that had begun before would upload the message.
    eventually(has_ended.is_set)
    with pytest.raises(ClosedError):
        topic.wait(topic.append(b"x"), "tiered", timeout=60)
    assert not [found for found in caplog.records if found.exc_info]


@pytest.mark.parametrize("error", [UnavailableError, ZeroDivisionError])
def test_waiter_for_tiered_outlives_an_upload_that_failed_once(site, error):
    """Goal: somebody still waits, so the next try does not wait for the interval."""
    topic = opened(site, uploader=SLOW).topic(TEXT, create=True)
    raised = []

    def fail(kind, key):
        if kind == "open_writer" and not raised:
            raised.append(1)
            raise error("once")

    site.objects.before = fail
    topic.wait(topic.append(b"x"), "tiered", timeout=60)
    assert raised


# -- leases -------------------------------------------------------------------------------------


def test_lease_is_renewed_by_itself(site):
    log = opened(site, storage={"metadata": {"lease_ttl_seconds": 2}})
    log.topic(TEXT, create=True)
    until = log.stores.membership.valid_until
    eventually(lambda: log.stores.membership.valid_until > until + 1)
    assert site.catalog().owner() is not None


def test_lease_keeper_survives_an_exception_that_nobody_expected(site):
    """Goal: it is told, nothing is acknowledged without a lease, and renewals go on."""
    threads.forget()
    log = opened(site, storage={"metadata": {"lease_ttl_seconds": 2}})
    topic = log.topic(TEXT, create=True)

    def fail(kind, key):
        raise RuntimeError("unexpected")

    site.metadata.before = fail
    eventually(lambda: topic.wal.gate.holds, "appends are held")
    with pytest.raises(UnavailableError, match="may have another owner"):
        topic.append(b"x")
    assert ("ister-lease", False) in [(f.thread, f.has_ended) for f in threads.failures()]
    site.metadata.before = calm
    eventually(lambda: not topic.wal.gate.holds, "appends go on")
    topic.wait(topic.append(b"x"), "synced")
    threads.forget()


def test_lease_that_cannot_be_renewed_holds_appends_and_lets_go_later(site):
    log = opened(site, storage={"metadata": {"lease_ttl_seconds": 2}})
    topic = log.topic(TEXT, create=True)
    topic.append(b"x")
    site.metadata.before = silent
    eventually(lambda: topic.wal.gate.holds, "appends are held")
    with pytest.raises(UnavailableError, match="may have another owner"):
        topic.append(b"y")
    with pytest.raises(UnavailableError, match="may have another owner"):
        topic.wait(0, "synced")
    site.metadata.before = calm
    eventually(lambda: not topic.wal.gate.holds, "appends go on")
    topic.wait(topic.append(b"y"), "synced")
    assert site.catalog().owner()[0].epoch == 1


def test_owner_that_slept_too_long_is_fenced_by_its_own_thread():
    clock = TurningClock()
    with Site(clock=clock) as site:
        log = opened(site, storage={"metadata": {"lease_ttl_seconds": 2}})
        topic = log.topic(TEXT, create=True)
        topic.wait(topic.append(b"x"), "tiered", timeout=60)
        there = site.open("b")
        # Else it has the topic again before the other one can take it.
        asleep = ("renew", "grant_lease")
        site.metadata.before = lambda kind, key: silent() if kind in asleep else None
        # The node stops trusting its lease before the store ends it.
        eventually(lambda: not site.catalog().owner())
        other = there.topic(TEXT, take_over=True)
        site.metadata.before = calm
        eventually(lambda: topic.bucket.owned.is_fenced)
        assert other.append(b"y") == 1


def test_append_of_an_owner_that_was_replaced_is_told_so_although_its_lease_lapsed_first():
    """Goal: "appends resume when the store answers" is wrong once another owner has the topic."""
    with Site() as site:
        topic = site.open("a").topic(TEXT, create=True)
        topic.append(b"x")
        topic.upload()
        topic.wal.gate.hold("lease", topic.bucket.refused_error, waits=False)
        with pytest.raises(UnavailableError):
            topic.append(b"y")
        site.clock.advance(2 * TTL_SECONDS)
        site.open("b").topic(TEXT, take_over=True)
        with pytest.raises(FencedError):
            topic.bucket.owned.check()
        with pytest.raises(FencedError):
            topic.append(b"y")


# -- retention ----------------------------------------------------------------------------------


def test_retention_runs_when_it_is_due(site):
    retention = {"time_minutes": 0, "size_mb": 0}
    log = opened(site, rotate_max_bytes=4096, retention=retention)
    topic = log.topic(TEXT, create=True)
    for payload in numbered(40, size=500):
        topic.append(payload)
        topic.flush()
    topic.wait(39, "tiered", timeout=60)
    log._background._retention_at = log._clock.monotonic()
    eventually(lambda: topic.watermarks.trimmed > 0)
    assert payloads(topic.read()) == numbered(40, size=500)


# -- the end ------------------------------------------------------------------------------------


def test_close_leaves_no_thread(site):
    log = opened(site)
    topic = log.topic(TEXT, create=True)
    topic.wait(topic.append(b"x"), "tiered", timeout=60)
    assert {"ister-lease", "ister-tender"} <= set(ours())
    log.close()
    assert ours() == []


def test_close_finishes_the_cycle_under_way(site):
    log = opened(site, uploader=SLOW)
    topic = log.topic(TEXT, create=True)
    reached, go_on = threading.Event(), threading.Event()

    def hold(kind, key):
        if kind == "close":
            reached.set()
            assert go_on.wait(60)

    site.objects.before = hold
    topic.append(b"x")
    topic.flush()  # the first cycle is due at once
    assert reached.wait(60)
    closing = Task(log.close)
    closing.join(0.1)
    assert closing.is_running
    go_on.set()
    closing.result()
    assert site.ranges() == [(0, 1)]


def test_close_while_the_bucket_is_silent_ends(site):
    log = opened(site, uploader={"interval_seconds": 1})
    topic = log.topic(TEXT, create=True)
    site.objects.before = silent
    topic.append(b"x")
    topic.flush()
    eventually(lambda: topic.bucket.uploads.last_error is not None)
    log.close()
    assert ours() == []
    site.objects.before = calm
    topic = opened(site).topic(TEXT)
    eventually(lambda: topic.watermarks.tiered == 1)


def test_tender_does_not_spin_while_producers_are_held(site, monkeypatch):
    rounds, hand_out = [], Background._hand_out

    def counted(self, now):
        rounds.append(now)
        hand_out(self, now)

    monkeypatch.setattr(Background, "_hand_out", counted)
    log = site.open(
        background=True, storage={"uploader": {"max_lag_bytes": 1000}}, buffer_full="refuse"
    )
    topic = log.topic(TEXT, create=True)
    site.objects.before = silent
    topic.append_many([b"x" * 100] * 20)
    topic.flush()
    eventually(lambda: "lag" in topic.wal.gate.holds)
    before = len(rounds)
    time.sleep(1)
    assert len(rounds) - before < 50
