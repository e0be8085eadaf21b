"""Threads for those who look: few, bounded, and left behind by those who waited long enough."""

import asyncio
import threading

import pytest

from ister.broker.observe.query_threads import QueryThreads
from ister.errors import CapacityError, NotFoundError, UnavailableError
from tests.support.broker import eventually


async def test_answers_and_errors_come_back():
    query_threads = QueryThreads()
    assert await query_threads.run(divmod, 7, 3) == (2, 1)
    assert await query_threads.run(sorted, [1, 2], reverse=True) == [2, 1]

    def fail():
        raise NotFoundError("none")

    with pytest.raises(NotFoundError):
        await query_threads.run(fail)
    await query_threads.close()
    with pytest.raises(UnavailableError):
        await query_threads.run(fail)


async def test_those_that_take_long_are_left_behind_and_counted():
    goes_on = threading.Event()
    query_threads = QueryThreads(threads=1, waiting_max=2, seconds=0.1)
    with pytest.raises(UnavailableError, match=r"0\.1 seconds"):
        await query_threads.run(goes_on.wait, 20)
    second = asyncio.ensure_future(query_threads.run(goes_on.wait, 20))
    await asyncio.sleep(0)
    # The first one still has its thread, whoever asked for it has gone.
    with pytest.raises(CapacityError):
        await query_threads.run(goes_on.wait, 20)
    goes_on.set()
    assert await second
    await eventually(lambda: not query_threads._waiting)
    assert await query_threads.run(int, "3") == 3
    await query_threads.close()


async def test_an_end_waits_a_while_for_those_who_look_and_no_longer():
    goes_on = threading.Event()
    query_threads = QueryThreads(threads=1)
    begun = asyncio.ensure_future(query_threads.run(goes_on.wait, 20))
    waiting = asyncio.ensure_future(query_threads.run(goes_on.wait, 20))
    await eventually(lambda: query_threads._waiting == 2)
    try:
        # Topics are to be closed meanwhile: a store may not answer for a minute.
        await asyncio.wait_for(query_threads.close(within=0.05), 60)
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting
        assert not begun.done()
    finally:
        goes_on.set()
    assert await begun
    ended = QueryThreads(threads=1)
    last = asyncio.ensure_future(ended.run(threading.Event().wait, 0.2))
    await eventually(lambda: ended._waiting == 1)
    await ended.close()
    assert await last is False
