"""Busy streams: written in order, and clients that do not read hold nobody up."""

import threading
import time

import pytest

from ister.broker.rpc import native_writers as module
from ister.broker.rpc.native_writers import Senders

PATIENCE_SECONDS = 60.0


class Engine:
    """Takes one message of a stream, and the next one only after `read`."""

    def __init__(self):
        self.taken = {}
        self.waiting = set()
        self.closed = set()
        self.tries = 0
        self.is_over = False

    def try_send(self, call, message):
        self.tries += 1
        if call in self.closed:
            return None
        if call in self.waiting:
            return False
        self.waiting.add(call)
        self.taken.setdefault(call, []).append(message)
        return True

    def send(self, call, message):
        """Waits until the message is taken."""
        while (outcome := self.try_send(call, message)) is False:
            if self.is_over:
                return False
            time.sleep(0.0005)
        return outcome is True

    def read(self, call):
        self.waiting.discard(call)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def senders(engine):
    made = Senders(engine.try_send, engine.send)
    yield made
    engine.is_over = True  # whoever waits is let go of when the engine is closed
    made.close()


@pytest.fixture
def without_blocking(monkeypatch):
    """No thread that blocks is left."""
    monkeypatch.setattr(module, "_BLOCKING_THREADS", 0)


def write(senders, call, messages):
    """Writes; returns what tells how it ended."""
    done = threading.Event()
    outcomes = []

    def on_done(outcome):
        outcomes.append(outcome)
        done.set()

    senders.write(call, messages, on_done)
    return done, outcomes


def read_until(engine, call, done):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done.is_set():
        assert time.monotonic() < deadline, "never written"
        engine.read(call)
        time.sleep(0)


@pytest.mark.parametrize("threads", [0, 2])
def test_all_messages_are_written_in_order(engine, monkeypatch, threads):
    monkeypatch.setattr(module, "_BLOCKING_THREADS", threads)
    senders = Senders(engine.try_send, engine.send)
    messages = [b"%d" % number for number in range(200)]
    done, outcomes = write(senders, 1, messages)
    read_until(engine, 1, done)
    assert outcomes == [True]
    assert engine.taken[1] == messages
    senders.close()


def test_clients_that_do_not_read_hold_nobody_up(engine, senders):
    """More of them than threads that block."""
    lost = range(100, 100 + module._BLOCKING_THREADS + 2)
    for call in lost:
        write(senders, call, [b"a", b"b"])
    stuck, _ = write(senders, 1, [b"a", b"b"])
    for call in (2, 3):
        done, outcomes = write(senders, call, [b"x"] * 50)
        read_until(engine, call, done)
        assert outcomes == [True]
    assert not stuck.is_set()
    assert engine.taken[1] == [b"a"]
    read_until(engine, 1, stuck)
    assert engine.taken[1] == [b"a", b"b"]


@pytest.mark.usefixtures("without_blocking")
def test_a_client_that_does_not_read_is_tried_less_and_less_often(engine, senders):
    write(senders, 1, [b"a", b"b"])
    time.sleep(0.5)
    # At twenty microseconds it would be 25,000 times.
    assert engine.tries < 200


def test_a_stream_that_is_closed_is_not_written_on(engine, senders):
    engine.closed.add(1)
    done, outcomes = write(senders, 1, [b"a"])
    assert done.wait(PATIENCE_SECONDS)
    assert outcomes == [False]


def test_what_is_done_with_an_outcome_does_not_end_the_thread(engine, senders):
    def fail(outcome):
        raise RuntimeError(outcome)

    senders.write(1, [b"a"], fail)
    done, outcomes = write(senders, 2, [b"b"])
    assert done.wait(PATIENCE_SECONDS)
    assert outcomes == [True]
