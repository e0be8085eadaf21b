"""Whose turn it is to take calls: one thread at a time, another one when that is stuck."""

import threading
import time
from queue import SimpleQueue

import pytest

from ister.broker.rpc import native_receivers as module
from ister.broker.rpc.native_receivers import Receivers

PATIENCE_SECONDS = 60.0


@pytest.fixture
def calls():
    return SimpleQueue()


@pytest.fixture
def rig(calls):
    """Makes receivers of the calls in a queue; None in it ends them."""
    made = []

    def make(handle):
        receivers = Receivers(calls.get, handle)
        receivers.start()
        made.append(receivers)
        return receivers

    yield make
    calls.put(None)
    for receivers in made:
        receivers.join()


def look_until(receivers, happens):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happens():
        assert time.monotonic() < deadline, "never happened"
        receivers.replace_stuck()
        time.sleep(0.005)


def test_one_thread_handles_what_it_has_taken_before_it_takes_more(rig, calls):
    handled, done = [], threading.Event()

    def handle(batch):
        handled.append((threading.get_ident(), batch))
        if len(handled) == 100:
            done.set()

    rig(handle)
    for number in range(100):
        calls.put([number])
    assert done.wait(PATIENCE_SECONDS)
    assert [batch for _, batch in handled] == [[number] for number in range(100)]
    assert len({thread for thread, _ in handled}) == 1


def test_a_thread_that_is_stuck_gives_its_turn_away(rig, calls):
    stuck, go_on, handled = threading.Event(), threading.Event(), []

    def handle(batch):
        if batch == ["disk"]:
            assert receivers.begin()
            stuck.set()
            go_on.wait(PATIENCE_SECONDS)
            receivers.end()
        handled.append(batch)

    receivers = rig(handle)
    calls.put(["disk"])
    assert stuck.wait(PATIENCE_SECONDS)
    calls.put(["other"])
    look_until(receivers, lambda: handled)
    assert handled == [["other"]]
    go_on.set()
    look_until(receivers, lambda: len(handled) == 2)
    # Whoever has the turn now, calls are taken, each once.
    calls.put(["next"])
    look_until(receivers, lambda: len(handled) == 3)
    assert handled == [["other"], ["disk"], ["next"]]


def test_a_second_thread_that_is_stuck_gives_its_turn_away_though_the_first_goes_on(rig, calls):
    stuck = {name: threading.Event() for name in ("first", "second")}
    go_on = {name: threading.Event() for name in ("first", "second")}
    handled = []

    def handle(batch):
        (name,) = batch
        if name in stuck:
            assert receivers.begin()
            stuck[name].set()
            go_on[name].wait(PATIENCE_SECONDS)
            receivers.end()
        handled.append(name)

    receivers = rig(handle)
    calls.put(["first"])
    assert stuck["first"].wait(PATIENCE_SECONDS)
    calls.put(["second"])
    look_until(receivers, stuck["second"].is_set)
    go_on["first"].set()
    look_until(receivers, lambda: handled == ["first"])
    calls.put(["other"])
    look_until(receivers, lambda: "other" in handled)
    assert handled == ["first", "other"]
    go_on["second"].set()
    look_until(receivers, lambda: len(handled) == 3)


def test_a_thread_that_is_slow_and_does_not_block_keeps_its_turn(rig, calls):
    inside, go_on, handled = threading.Event(), threading.Event(), []

    def handle(batch):
        inside.set()
        go_on.wait(PATIENCE_SECONDS)
        handled.append(batch)

    receivers = rig(handle)
    calls.put([1])
    calls.put([2])
    assert inside.wait(PATIENCE_SECONDS)
    time.sleep(2 * module._STUCK_SECONDS)
    receivers.replace_stuck()
    assert calls.qsize() == 1
    go_on.set()
    look_until(receivers, lambda: len(handled) == 2)


def test_the_last_free_thread_must_not_block(rig, calls):
    go_on, answers = threading.Event(), []

    def handle(batch):
        may = receivers.begin()
        answers.append(may)
        if may:
            go_on.wait(PATIENCE_SECONDS)
            receivers.end()

    receivers = rig(handle)
    for number in range(module._THREADS):
        calls.put([number])
        look_until(receivers, lambda count=number + 1: len(answers) == count)
    assert answers == [True] * (module._THREADS - 1) + [False]
    calls.put(["while all others are stuck"])
    look_until(receivers, lambda: len(answers) == module._THREADS + 1)
    go_on.set()


def test_all_threads_end_when_there_are_no_more_calls(rig, calls):
    receivers = rig(lambda batch: None)
    calls.put(None)
    receivers.join()
    assert not any(thread.is_alive() for thread in receivers._threads)
    calls.put(None)
