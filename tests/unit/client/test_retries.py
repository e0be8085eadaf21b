"""Pauses grow, have jitter, and end."""

import asyncio

import pytest

from ister.client.retries import Retries
from ister.errors import NotFoundError, UnavailableError


@pytest.fixture
def pauses(monkeypatch):
    taken = []
    real = asyncio.sleep

    async def sleep(seconds):
        taken.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return taken


def test_pauses_double_up_to_a_bound_with_jitter(pauses):
    async def scenario():
        retries = Retries(None)
        for _ in range(12):
            await retries.pause(UnavailableError("x"))
        retries.reset()
        await retries.pause(UnavailableError("x"))

    asyncio.run(scenario())
    for number, pause in enumerate(pauses[:12]):
        most = min(0.05 * 2**number, 2.0)
        assert most / 2 <= pause <= most
    assert pauses[12] <= 0.05
    assert len(set(pauses)) > 6, "chance has a part in it"


def test_what_would_not_help_is_not_tried_again(pauses):
    error = NotFoundError("x")
    with pytest.raises(NotFoundError) as caught:
        asyncio.run(Retries(None).pause(error))
    assert caught.value is error
    assert pauses == []


def test_the_time_is_over(pauses):
    async def scenario():
        retries = Retries(0.05)
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def pause_for_ever():
            while loop.time() < begin + 10:
                await retries.pause(UnavailableError("x"))

        with pytest.raises(UnavailableError):
            await pause_for_ever()
        retries.reset()
        await retries.pause(UnavailableError("x"))

    asyncio.run(scenario())
    assert max(pauses) <= 0.05
