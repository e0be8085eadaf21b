"""Signals that the main thread is not awake for.

A signal that comes between the last look at signals and the system call that waits does not end
that call. The same is had at will by blocking the signal in the main thread: another thread takes
it, and Python notes it, but nothing that waits is interrupted.
"""

import asyncio
import os
import select
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from ister.cli.interrupts import Interrupts
from ister.client.loop_thread import LoopThread

PATIENCE = 60


@contextmanager
def unheard_signal(number, after=0.2):
    """Another thread gets the signal, while the main thread waits already."""
    is_over = threading.Event()

    def send():
        is_over.wait(after)
        os.kill(os.getpid(), number)
        is_over.wait(PATIENCE)

    sender = threading.Thread(target=send)
    sender.start()  # with the signal let through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        is_over.set()
        sender.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_wait_ends():
    for number in [signal.SIGINT, signal.SIGTERM]:
        began = time.monotonic()
        with Interrupts() as interrupts, unheard_signal(number):
            assert interrupts.wait(PATIENCE), number
        assert time.monotonic() - began < PATIENCE / 2, number


def test_a_read_without_end_ends():
    read_end, write_end = os.pipe()
    try:
        with Interrupts() as interrupts, unheard_signal(signal.SIGINT):
            assert interrupts.reading(read_end)(10) == b""
    finally:
        os.close(read_end)
        os.close(write_end)


def test_whoever_waits_for_the_file_is_woken():
    with Interrupts() as interrupts, unheard_signal(signal.SIGINT):
        poll = select.poll()
        poll.register(interrupts.fd, select.POLLIN)
        assert poll.poll(PATIENCE * 1000)
        assert interrupts.is_set


def test_a_call_that_may_be_broken_off_is():
    thread = LoopThread()
    began = time.monotonic()
    try:
        with (
            Interrupts() as interrupts,
            unheard_signal(signal.SIGINT),
            pytest.raises(KeyboardInterrupt),
            interrupts.breaking(),
        ):
            thread.run(asyncio.sleep(PATIENCE))
    finally:
        thread.close()
    assert time.monotonic() - began < PATIENCE / 2


def test_what_was_woken_before_is_woken_again():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end)
    try:
        with Interrupts():
            pass
        assert signal.set_wakeup_fd(before) == write_end
    finally:
        signal.set_wakeup_fd(before)
        os.close(read_end)
        os.close(write_end)
