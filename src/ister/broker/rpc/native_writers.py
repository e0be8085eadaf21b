"""Writes to busy streams of the native engine, without blocking the loop.

The engine takes one message of a stream at a time, and does not signal when it can take
another. The broker's loop tries, and leaves what was not taken to the threads here:

    a few that block    one stream each, until all is written: the cheapest way
    one that retries    all other streams: after microseconds while a client reads, less and less
                        often while it does not

A thread that blocks for a client that does not read is lost until that client reads or leaves. If
all of them are lost, the thread that retries serves the other streams, so no client waits for
another.

Owns: the threads, and the messages that they have to write. Does not own: how much that is; a
stream has one list of messages here at a time, and its caller makes the next one when that is
written. Nothing here survives a crash, and nothing has to.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from ister.base import threads

_THREAD: Final = "ister-stream-writer"
_BLOCKING_THREADS: Final = 4
_PAUSE_SECONDS_MIN: Final = 20e-6
_PAUSE_SECONDS_MAX: Final = 0.02


class _PendingWrite:
    """Messages of one stream that are still to be written."""

    __slots__ = ("call", "messages", "on_done", "pause", "try_at")

    def __init__(
        self, call: int, messages: Sequence[bytes], on_done: Callable[[bool], None]
    ) -> None:
        self.call = call
        self.messages = deque(messages)
        self.on_done = on_done
        self.pause = _PAUSE_SECONDS_MIN
        self.try_at = 0.0


class Senders:
    """The threads that write.

    Args:
        try_send: Writes a message to the stream of a call: True if the engine has taken it, False
            if it has not, None if the stream is closed. Does not block.
        send: Writes a message and blocks until the engine takes it; False if the stream is closed.
    """

    def __init__(
        self,
        try_send: Callable[[int, bytes], bool | None],
        send: Callable[[int, bytes], bool],
    ) -> None:
        self._try_send = try_send
        self._send = send
        self._retrying: SimpleQueue[_PendingWrite | None] = SimpleQueue()
        self._blocking: SimpleQueue[_PendingWrite | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = _BLOCKING_THREADS
        self._threads = [threads.start(_THREAD, self._retry)]
        self._threads += [
            threads.start(f"{_THREAD}-{number}", self._write_blocking)
            for number in range(_BLOCKING_THREADS)
        ]

    def write(self, call: int, messages: Sequence[bytes], on_done: Callable[[bool], None]) -> None:
        """Writes messages as fast as they are taken.

        `on_done` is called in a thread here: True if all were written, False if the stream closed.
        """
        with self._lock:
            may_block = self._free > 0
            self._free -= may_block
        (self._blocking if may_block else self._retrying).put(
            _PendingWrite(call, messages, on_done)
        )

    def close(self) -> None:
        """Ends the threads, after the engine was closed; what is left is not written."""
        self._retrying.put(None)
        for _ in range(_BLOCKING_THREADS):
            self._blocking.put(None)
        for thread in self._threads:
            thread.join()

    def _write_blocking(self) -> None:
        while (one := self._blocking.get()) is not None:
            is_open = all(self._send(one.call, message) for message in one.messages)
            with self._lock:
                self._free += 1
            with threads.guard(_THREAD):
                one.on_done(is_open)

    def _retry(self) -> None:
        busy: list[_PendingWrite] = []
        while True:
            try:
                pause = None
                if busy:
                    pause = max(0.0, min(one.try_at for one in busy) - time.monotonic())
                found = (
                    self._retrying.get(timeout=pause)
                    if pause != 0.0
                    else self._retrying.get_nowait()
                )
                if found is None:
                    return
                busy.append(found)
                continue  # takes all new ones before it tries any
            except Empty:
                now = time.monotonic()
                busy = [one for one in busy if one.try_at > now or not self._is_done(one)]

    def _is_done(self, one: _PendingWrite) -> bool:
        """Writes what the engine takes; returns whether nothing is left to do."""
        messages, is_taken = one.messages, False
        while messages:
            outcome = self._try_send(one.call, messages[0])
            if outcome is None:
                break
            if not outcome:
                one.pause = (
                    _PAUSE_SECONDS_MIN if is_taken else min(2 * one.pause, _PAUSE_SECONDS_MAX)
                )
                one.try_at = time.monotonic() + one.pause
                return False
            is_taken = True
            messages.popleft()
        with threads.guard(_THREAD):
            one.on_done(not messages)
        return True
