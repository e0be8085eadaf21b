"""When the wall clock is believed: steps, what explains them, restarts, recorded times."""

import pytest

from ister.base.clock_guard import OFF_SECONDS_MAX, STEP_SECONDS, ClockGuard, ClockMark
from tests.support.cases import each
from tests.support.clock import ManualClock

DAY = 86_400
DAY_MS = DAY * 1000
FAR = [30 * DAY_MS, -30 * DAY_MS, 61_000, -61_000, 75 * 365 * DAY_MS]


@pytest.fixture
def clock():
    return ManualClock()


def now_ms(clock):
    return clock.now_ns() // 1_000_000


def test_clock_that_runs_evenly_is_trusted(clock):
    guard = ClockGuard(clock)
    for seconds in (0.1, 60, 10 * DAY, 1000 * DAY):
        clock.advance(seconds)
        assert guard.check() is None


def test_suspended_machine_is_no_step(clock):
    guard = ClockGuard(clock)
    clock.suspend(40 * DAY)
    assert guard.check() is None


@each("jump_ms", FAR)
def test_step_lasts_until_it_is_undone(clock, jump_ms):
    guard = ClockGuard(clock)
    clock.advance(100)
    clock.jump_wall(jump_ms)
    step = guard.check()
    assert step.seconds == pytest.approx(jump_ms / 1000)
    assert ("forward" if jump_ms > 0 else "back") in step.reason
    clock.advance(3600)
    assert guard.check() is step
    assert guard.step is step
    clock.jump_wall(-jump_ms)
    assert guard.check() is None


def test_corrections_are_no_steps_and_do_not_add_up(clock):
    guard = ClockGuard(clock)
    for _ in range(100):
        clock.advance(60)
        clock.jump_wall(int(STEP_SECONDS * 900))
        assert guard.check() is None


@each("jump_ms", FAR)
def test_step_lasts_until_it_is_confirmed(clock, jump_ms):
    guard = ClockGuard(clock)
    clock.jump_wall(jump_ms)
    step = guard.check()
    assert guard.confirm() is step
    assert guard.check() is None
    assert guard.confirm() is None
    clock.jump_wall(-jump_ms)
    assert guard.check().seconds == pytest.approx(-jump_ms / 1000)


def test_step_ends_when_everything_stored_before_it_has_expired(clock):
    guard = ClockGuard(clock, longest_seconds=7 * DAY)
    clock.jump_wall(30 * DAY_MS)
    assert guard.check() is not None
    clock.advance(7 * DAY - 1)
    assert guard.check() is not None
    clock.jump_wall(DAY_MS)  # not evenly
    assert guard.check() is not None
    clock.advance(7 * DAY - 1)
    assert guard.check() is not None
    clock.advance(2)
    assert guard.check() is None


def restarted(guard, clock, *, boot="one", **settings):
    mark = ClockMark.decode(guard.mark().encode())
    return ClockGuard(clock, mark=mark, boot=boot, **settings)


@each("jump_ms", FAR)
@each("is_noticed", [False, True])
def test_step_across_a_restart_is_detected(clock, jump_ms, is_noticed):
    guard = ClockGuard(clock, boot="one")
    clock.advance(100)
    guard.check()
    if is_noticed:
        clock.jump_wall(jump_ms)
        guard.check()
    before = guard
    clock.advance(50)
    if not is_noticed:
        clock.jump_wall(jump_ms)
    guard = restarted(before, clock)
    assert guard.step.seconds == pytest.approx(jump_ms / 1000)
    clock.jump_wall(-jump_ms)
    assert guard.check() is None


@each(
    ("off_seconds", "has_step"),
    [
        (0, False),
        (3600, False),
        (OFF_SECONDS_MAX, False),
        (OFF_SECONDS_MAX + 60, True),
        (30 * DAY, True),
        (-10, False),
        (-60, True),
        (-50 * 365 * DAY, True),
    ],
)
def test_after_a_boot_the_clock_is_compared_with_the_last_recorded_time(off_seconds, has_step):
    clock = ManualClock()
    clock.advance(1000)
    guard = ClockGuard(clock, boot="one")
    clock = ManualClock(now_ms=now_ms(clock) + int(off_seconds * 1000))
    guard = restarted(guard, clock, boot="two")
    assert (guard.step is not None) == has_step
    if has_step:
        assert "last recorded time" in guard.step.reason
        clock.advance(50)
        assert guard.check() is not None
        guard.confirm()
    clock.advance(50)
    assert guard.check() is None


@each("data", [b"", b"{}", b"[]", b"nonsense", b'{"wall": "x"}', b"\xff"])
def test_invalid_clock_mark_is_logged_and_ignored(data):
    assert ClockMark.decode(data) is None


# -- times that were recorded under a wrong clock ---------------------------------------------


@each("restarts", [False, True])
def test_time_of_a_clock_that_was_behind_counts_as_the_time_it_was_set_right(clock, restarts):
    guard = ClockGuard(clock, boot="one")
    clock.advance(DAY)
    guard.check()
    before = now_ms(clock)
    clock.jump_wall(-30 * DAY_MS)
    guard.check()
    clock.advance(3600)
    written = now_ms(clock)
    guard.check()
    clock.advance(60)
    if restarts:
        guard = restarted(guard, clock)
    clock.jump_wall(30 * DAY_MS)
    guard.check()
    assert guard.correct(written) == now_ms(clock)
    assert guard.correct(before) == before
    clock.advance(DAY)
    guard.check()
    assert guard.correct(now_ms(clock)) == now_ms(clock)


def test_time_corrected_by_a_clock_that_was_wrong_as_well_is_corrected_again(clock):
    guard = ClockGuard(clock)
    clock.advance(100)
    clock.jump_wall(3_600_000)  # wrong, undone
    guard.check()
    written = now_ms(clock)
    clock.jump_wall(-3_600_000)
    guard.check()
    clock.jump_wall(30 * DAY_MS)  # right: the clock was behind all the time
    guard.check()
    guard.confirm()
    assert guard.correct(written) == now_ms(clock)


@each("is_noticed", [False, True])
def test_time_of_a_clock_set_back_is_corrected_while_the_step_lasts(clock, is_noticed):
    guard = ClockGuard(clock)
    clock.advance(100)
    before = now_ms(clock)
    clock.jump_wall(-30 * DAY_MS)
    if is_noticed:
        assert guard.check() is not None
    clock.advance(7)
    assert guard.correct(now_ms(clock)) == before + 7000
    assert guard.correct(before) == before


def test_time_of_a_clock_that_was_behind_is_kept_over_a_boot(clock):
    guard = ClockGuard(clock, boot="one")
    clock.jump_wall(-30 * DAY_MS)
    guard.check()
    clock.advance(100)
    written, mark = now_ms(clock), guard.mark()
    clock = ManualClock(now_ms=written + 30 * DAY_MS)
    guard = ClockGuard(clock, mark=mark, boot="two")
    assert guard.step is None
    assert guard.correct(written) == now_ms(clock)


def test_confirmed_step_ahead_makes_what_was_recorded_before_it_new(clock):
    """A machine that booted with a wrong clock, which was then set right."""
    clock.advance(3600)
    guard = ClockGuard(clock)
    clock.advance(600)
    guard.check()
    written = now_ms(clock)
    clock.jump_wall(50 * 365 * DAY_MS)
    guard.check()
    guard.confirm()
    assert guard.correct(written) == now_ms(clock)
    assert guard.correct(written - DAY_MS) == written - DAY_MS, "from before the boot"
