"""Clocks: the machine's, and one that moves by hand."""

import time

from ister.base.clock import SystemClock


def test_system_clock_is_the_machines():
    clock = SystemClock()
    before = time.time_ns()
    assert before <= clock.now_ns() <= time.time_ns()
    assert clock.monotonic() <= clock.monotonic()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.boottime() <= time.clock_gettime(time.CLOCK_BOOTTIME)
