"""The queue between a subscription and a consumer's stream: bounded, with one taker."""

import asyncio

import pytest

from ister.broker.dispatch.memory_budget import Budget
from ister.broker.dispatch.outbox import OUTBOX_MESSAGES, Outbox
from ister.errors import UnavailableError
from tests.support.cases import each


async def test_items_come_in_order_and_not_more_than_asked_for():
    outbox = Outbox(1, Budget(1000).writes)
    for number in range(10):
        outbox.push(number)
    assert await outbox.take(4) == [0, 1, 2, 3]
    assert await outbox.take() == [4, 5, 6, 7, 8, 9]


async def test_taking_waits_for_the_first_item():
    outbox = Outbox(1, Budget(1000).writes)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.push("a")
    outbox.push("b")
    assert await asyncio.wait_for(taking, 60) == ["a", "b"]


async def test_taker_that_also_waits_for_something_else_is_woken_for_either():
    outbox = Outbox(1, Budget(1000).writes)
    for happen in (outbox.wake, lambda: outbox.push("a"), outbox.end):
        waiting = asyncio.create_task(outbox.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        happen()
        await asyncio.wait_for(waiting, 60)
        assert outbox.is_ready == (happen != outbox.wake)


async def test_room_comes_back_when_items_are_written_not_when_they_are_taken():
    outbox = Outbox(1, Budget(1000).writes)
    assert outbox.room == OUTBOX_MESSAGES
    for number in range(OUTBOX_MESSAGES):
        outbox.push(number)
    assert outbox.room == 0
    await outbox.take(100)
    assert outbox.room == 0
    outbox.written(60)
    assert outbox.room == 60
    outbox.push("x")
    assert outbox.room == 59
    outbox.written(40)
    assert outbox.room == 99


async def test_an_end_in_order_leaves_out_what_was_not_taken():
    outbox = Outbox(1, Budget(1000).writes)
    outbox.push("a")
    outbox.end()
    assert outbox.is_ended
    assert outbox.room == 0
    assert await outbox.take() == []
    assert await outbox.take() == []


async def test_an_end_with_a_reason_is_raised():
    outbox, reason = Outbox(1, Budget(1000).writes), UnavailableError("moved")
    outbox.push("a")
    outbox.end(reason)
    outbox.end(None)  # the first one counts
    with pytest.raises(UnavailableError, match="moved"):
        await outbox.take()


@each("reason", [None, UnavailableError("moved")])
async def test_whoever_waits_is_told_of_the_end(reason):
    outbox = Outbox(1, Budget(1000).writes)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.end(reason)
    if reason is None:
        assert await asyncio.wait_for(taking, 60) == []
    else:
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(taking, 60)


async def test_an_end_may_take_its_time_and_nothing_comes_meanwhile():
    outbox = Outbox(1, Budget(1000).writes)
    outbox.push("a")
    loop = asyncio.get_running_loop()
    start = loop.time()
    outbox.end(after_seconds=0.2)
    assert outbox.room == 0
    assert await outbox.take() == []
    assert loop.time() - start >= 0.19


async def test_a_cancelled_taker_has_taken_nothing():
    outbox = Outbox(1, Budget(1000).writes)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    outbox.push("a")
    assert outbox.room == OUTBOX_MESSAGES - 1
    assert await outbox.take() == ["a"]
