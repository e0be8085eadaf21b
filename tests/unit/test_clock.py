"""Clocks: the machine's, and one that moves by hand."""

import time

from ister.clock import ManualClock, SystemClock


def test_system_clock_is_the_machines():
    clock = SystemClock()
    before = time.time_ns()
    assert before <= clock.now_ns() <= time.time_ns()
    assert clock.monotonic() <= clock.monotonic()


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
