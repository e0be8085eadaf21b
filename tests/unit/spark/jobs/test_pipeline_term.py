"""When the service's jobs are due, by a clock that moves by hand; and its memory, by a `/proc`."""

import os
import random

import pytest

from ister.spark.jobs.pipeline_term import Schedule, sample_memory
from tests.support.clock import ManualClock

HOUR = 3600.0


@pytest.fixture
def clock():
    return ManualClock()


def schedule_of(clock, *, last=None, every=HOUR):
    return Schedule(every, clock=clock, rng=random.Random(1), last_started_at=last)


def now(clock):
    return clock.now_ns() // 1_000_000_000


def run(clock, schedule, *, seconds=0.0, **result):
    schedule.begin()
    clock.advance(seconds)
    schedule.end(result.pop("error", None), **result)


def test_job_that_was_never_done_is_done_soon(clock):
    schedule = schedule_of(clock)
    assert not schedule.is_due
    clock.advance(10)
    assert schedule.is_due


def test_schedule_goes_on_where_another_process_left_it(clock):
    schedule = schedule_of(clock, last=now(clock) - 3000)
    assert schedule.wait_seconds == pytest.approx(600)
    assert schedule_of(clock, last=now(clock) - 9999).wait_seconds <= 10
    # A clock that was wrong.
    assert schedule_of(clock, last=now(clock) + 10**6).wait_seconds <= HOUR


def test_time_is_counted_from_start_to_start(clock):
    schedule = schedule_of(clock)
    run(clock, schedule, seconds=600)
    assert schedule.wait_seconds == pytest.approx(HOUR - 600)
    run(clock, schedule, seconds=2 * HOUR)
    assert schedule.is_due


def test_failures_come_back_sooner_and_then_later(clock):
    schedule = schedule_of(clock)
    waits = []
    for _ in range(12):
        run(clock, schedule, error="no", is_cut_off=True)
        waits.append(schedule.wait_seconds)
    assert 15 <= waits[0] <= 30
    assert 30 <= waits[1] <= 60
    assert all(1800 <= wait <= HOUR for wait in waits[8:])
    run(clock, schedule)
    assert schedule.wait_seconds == pytest.approx(HOUR)
    run(clock, schedule, error="no", is_cut_off=True)
    assert schedule.wait_seconds <= 30


def test_findings_are_not_looked_for_again_at_once(clock):
    schedule = schedule_of(clock)
    run(clock, schedule, error="an object is damaged")
    assert schedule.wait_seconds == pytest.approx(HOUR)
    assert (schedule.last_ok, schedule.last_error) == (False, "an object is damaged")


def test_job_that_was_interrupted_is_due_as_it_was(clock):
    schedule = schedule_of(clock)
    clock.advance(10)
    schedule.begin()
    clock.advance(5)
    schedule.put_off()
    assert schedule.is_due
    assert schedule.last_ok is None


def test_what_the_status_says(clock):
    schedule = schedule_of(clock)
    run(clock, schedule, seconds=2)
    assert schedule.as_json() == {
        "every_seconds": HOUR,
        "next_at": now(clock) + 3598,
        "runs": 1,
        "last_started_at": now(clock) - 2,
        "last_seconds": 2.0,
        "last_ok": True,
        "last_error": None,
    }


def test_memory_is_that_of_the_driver_its_jvm_and_what_is_below_it(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")

    def add(pid, parent, name, pages):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0\n")
        (tmp_path / str(pid) / "statm").write_text(f"999 {pages} 3 4\n")

    own, jvm = os.getpid(), 10**8
    add(own, 1, "python", 10)
    found = sample_memory(str(tmp_path))
    assert found["driver_rss_bytes"] == 10 * page
    assert found["jvm_rss_bytes"] is found["workers"] is None
    (tmp_path / "self").mkdir()
    add(jvm, own, "java", 100)
    add(jvm + 1, jvm, "a (strange) name", 5)
    add(jvm + 2, jvm + 1, "python", 7)
    add(jvm + 3, own, "not ours", 1000)
    add(jvm + 4, 1, "java", 1000)
    expected = {
        "driver_rss_bytes": 10 * page,
        "jvm_rss_bytes": 100 * page,
        "workers_rss_bytes": 12 * page,
        "workers": 2,
    }
    assert sample_memory(str(tmp_path)) == expected
    # A process that ends while it is looked at.
    (tmp_path / str(jvm + 2) / "statm").unlink()
    assert sample_memory(str(tmp_path))["workers"] == 1
    assert set(sample_memory(str(tmp_path / "nowhere")).values()) == {None}
