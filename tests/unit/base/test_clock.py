"""Clocks: the machine's, and one that moves by hand."""

import time

from ister.base.clock import SystemClock
from tests.support.clock import ManualClock


def test_system_clock_is_the_machines():
    clock = SystemClock()
    before = time.time_ns()
    assert before <= clock.now_ns() <= time.time_ns()
    assert clock.monotonic() <= clock.monotonic()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.boottime() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_manual_clock_moves_only_when_told():
    clock = ManualClock(now_ms=5)
    assert (clock.now_ns(), clock.monotonic()) == (5_000_000, 0.0)
    clock.advance(1.5)
    assert (clock.now_ns(), clock.monotonic()) == (1_505_000_000, 1.5)


def test_jump_of_the_wall_leaves_elapsed_time_alone():
    clock = ManualClock(now_ms=10_000)
    clock.advance(1)
    clock.jump_wall(-5000)
    assert (clock.now_ns(), clock.monotonic()) == (6_000_000_000, 1.0)


def test_suspended_machine_does_not_count_monotonic_time():
    clock = ManualClock(now_ms=10_000)
    clock.advance(1)
    clock.suspend(60)
    assert (clock.now_ns(), clock.monotonic()) == (71_000_000_000, 1.0)
    assert clock.boottime() == 61.0
