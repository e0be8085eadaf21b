"""How often a call is repeated, when, and which errors end it at once."""

import asyncio
import logging
import random

import pytest

from ister.base import retry
from ister.base.retry import AsyncRetry, RetryPolicy, backoff_seconds, retry_unavailable
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    DiskError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)
from tests.support.clock import ManualClock


class Call:
    """Fails with the given errors, one after the other, and then succeeds."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.count = 0

    def __call__(self, deadline=None):
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
def policy(clock, pauses):
    def sleep(seconds):
        pauses.append(seconds)
        clock.advance(seconds)

    def make(**settings):
        return RetryPolicy(clock=clock, sleep=sleep, rng=random.Random(7), **settings)

    return make


def test_pauses_double_within_their_bounds_and_differ():
    rng = random.Random(7)
    for failures in (1, 2, 3, 5, 6, 12, 10**6):
        longest = min(0.1 * 2 ** min(failures - 1, 20), 2.0)
        drawn = {backoff_seconds(failures, first=0.1, most=2.0, rng=rng) for _ in range(200)}
        assert all(longest / 2 <= pause <= longest for pause in drawn), failures
        assert len(drawn) > 100, failures


def test_call_is_repeated_until_it_succeeds(policy, pauses):
    for failures in (0, 1, 3, 4):
        pauses.clear()
        call = Call(*[UnavailableError("busy") for _ in range(failures)])
        assert policy(retries=4).call(call) == "done"
        assert (call.count, len(pauses)) == (failures + 1, failures)


def test_last_error_is_raised_when_attempts_are_used_up(policy, pauses):
    for retries in (0, 1, 4):
        pauses.clear()
        errors = [UnavailableError(f"number {number}") for number in range(9)]
        call = Call(*errors)
        with pytest.raises(UnavailableError) as raised:
            policy(retries=retries).call(call)
        assert raised.value is errors[retries]
        assert (call.count, len(pauses)) == (retries + 1, retries)


def test_definite_answer_is_not_asked_for_again(policy, pauses):
    for kind in (
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        UnsupportedOperationError,
        CapacityError,
        ValueError,
        lambda text: DiskError(text, errno=5),
    ):
        error = kind("x")
        call = Call(error)
        with pytest.raises(type(error)):
            policy().call(call)
        assert (call.count, pauses) == (1, []), type(error)


def test_no_attempt_begins_after_the_deadline(policy, clock):
    def call(deadline):
        attempts.append(clock.monotonic())
        assert deadline == 10.0
        clock.advance(4)
        raise UnavailableError("slow")

    attempts = []
    with pytest.raises(UnavailableError):
        policy(retries=99, deadline_seconds=10.0).call(call)
    assert len(attempts) == 3
    assert all(moment < 10 for moment in attempts)


def test_unavailable_store_is_asked_again_for_a_while(monkeypatch):
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.001, 0.002))
    call = Call(*[UnavailableError("busy") for _ in range(5)])
    assert retry_unavailable(call) == "done"
    assert call.count == 6
    call = Call(*[UnavailableError("busy") for _ in range(10_000)])
    with pytest.raises(UnavailableError):
        retry_unavailable(call, seconds=0.02)
    with pytest.raises(NotFoundError):
        retry_unavailable(Call(NotFoundError("x")))


def test_an_outage_is_one_warning_for_a_while(monkeypatch, caplog):
    monkeypatch.setattr(retry, "_DRIVER_PAUSES", (0.001, 0.002))
    with caplog.at_level(logging.DEBUG, logger="ister.retry"):
        retry_unavailable(Call(*[UnavailableError("busy") for _ in range(5)]))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, *[logging.DEBUG] * 4]
    monkeypatch.setattr(retry, "_WARN_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, logger="ister.retry"):
        retry_unavailable(Call(*[UnavailableError("busy") for _ in range(5)]))
    assert len(caplog.records) == 10


@pytest.fixture
def slept(monkeypatch):
    taken = []
    real = asyncio.sleep

    async def sleep(seconds):
        taken.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return taken


async def test_client_pauses_double_until_a_success(slept, caplog):
    retries = AsyncRetry(None)
    for _ in range(12):
        await retries.pause(UnavailableError("x"))
    retries.reset()
    await retries.pause(UnavailableError("x"))
    for number, pause in enumerate(slept[:12]):
        most = min(0.05 * 2**number, 2.0)
        assert most / 2 <= pause <= most, number
    assert slept[12] <= 0.05
    assert len(set(slept)) > 6, "jitter"
    assert caplog.messages == ["the broker does not respond; retrying: x"], "once for an outage"


async def test_client_gives_up_after_its_timeout(slept):
    retries = AsyncRetry(0.05)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def pause_for_ever():
        while loop.time() < begin + 10:
            await retries.pause(UnavailableError("x"))

    with pytest.raises(UnavailableError):
        await pause_for_ever()
    retries.reset()
    await retries.pause(UnavailableError("x"))
    assert max(slept) <= 0.05
