"""Work that a signal ends in order, whenever it comes."""

import asyncio
import os
import signal
import threading

import pytest

from demo.interrupts import SIGNALS, run_until_signal


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_work_in_order(number):
    seen = []

    async def work():
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_until_signal(work)
    assert seen == ["ended"]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_loop_is_made_ends_it_before_it_begins(number, monkeypatch):
    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self):
            os.kill(os.getpid(), number)
            return super().new_event_loop()

    begun = []

    async def work():
        begun.append(True)

    asyncio.set_event_loop_policy(Policy())
    try:
        with pytest.raises(KeyboardInterrupt):
            run_until_signal(work)
    finally:
        asyncio.set_event_loop_policy(None)
    assert not begun


def test_work_without_a_signal_ends_by_itself_in_any_thread():
    done = []

    async def work():
        await asyncio.sleep(0)
        done.append(threading.current_thread().name)

    run_until_signal(work)
    thread = threading.Thread(target=run_until_signal, args=(work,), name="other")
    thread.start()
    thread.join()
    assert done == ["MainThread", "other"]


def test_an_error_of_the_work_is_raised():
    async def work():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_until_signal(work)
