"""How often a call is repeated, when, and what never is."""

import random

import pytest

from ister.clock import ManualClock
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    DiskError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.objectstore.retry import Retry


class Call:
    """Fails with the given errors, one after the other, and then succeeds."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.count = 0

    def __call__(self, deadline):
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def retry(clock, pauses):
    def sleep(seconds):
        pauses.append(seconds)
        clock.advance(seconds)

    def make(**settings):
        return Retry(clock=clock, sleep=sleep, rng=random.Random(7), **settings)

    return make


def test_call_that_succeeds_is_made_once(retry, pauses):
    call = Call()
    assert retry().repeat(call) == "done"
    assert (call.count, pauses) == (1, [])


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_call_is_repeated_until_it_succeeds(retry, pauses, failures):
    call = Call(*[UnavailableError("busy") for _ in range(failures)])
    assert retry(retries=4).repeat(call) == "done"
    assert (call.count, len(pauses)) == (failures + 1, failures)


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_last_error_is_raised_when_attempts_are_used_up(retry, pauses, retries):
    errors = [UnavailableError(f"number {number}") for number in range(9)]
    call = Call(*errors)
    with pytest.raises(UnavailableError) as raised:
        retry(retries=retries).repeat(call)
    assert raised.value is errors[retries]
    assert (call.count, len(pauses)) == (retries + 1, retries)


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("x"),
        AlreadyExistsError("x"),
        PermissionDeniedError("x"),
        UnsupportedOperationError("x"),
        CapacityError("x"),
        DiskError("x", errno=5),
        ValueError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_definite_answer_is_never_asked_for_again(retry, pauses, error):
    call = Call(error)
    with pytest.raises(type(error)):
        retry().repeat(call)
    assert (call.count, pauses) == (1, [])


def test_pauses_double_within_their_bounds_and_differ(retry):
    maker = retry(first_pause_seconds=0.1, pause_seconds_max=2.0)
    for attempt in range(12):
        longest = min(0.1 * 2**attempt, 2.0)
        drawn = {maker.pause_seconds(attempt) for _ in range(200)}
        assert all(longest / 2 <= pause <= longest for pause in drawn)
        assert len(drawn) > 100


def test_no_attempt_begins_after_the_deadline(retry, clock, pauses):
    def call(deadline):
        attempts.append(clock.monotonic())
        assert deadline == 10.0
        clock.advance(4)
        raise UnavailableError("slow")

    attempts = []
    with pytest.raises(UnavailableError):
        retry(retries=99, deadline_seconds=10.0).repeat(call)
    assert len(attempts) == 3
    assert all(moment < 10 for moment in attempts)


def test_sleep_that_is_cut_short_ends_the_repetition(clock):
    call = Call(*[UnavailableError("busy") for _ in range(9)])
    retry = Retry(clock=clock, sleep=lambda seconds: True, rng=random.Random(1))
    with pytest.raises(UnavailableError):
        retry.repeat(call)
    assert call.count == 1
