"""`benchmarks tail`: from an append until a reader at the tail has the message.

A producer thread appends one message every few milliseconds with the time in its payload; readers
wait in `next_batch`. Every delivery to every reader is one sample. The limit is the same with
nothing in between: the producer wakes as many threads, or tasks of one loop, as there are readers
and each notes the time.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.measurement import MESSAGE_BYTES, TOPIC, Run, open_log, quantile
from ister.errors import UnavailableError
from ister.topic.message import Message
from ister.topic.topic import Topic

_MESSAGES: Final = 1000
_PACE_SECONDS: Final = 0.003
"""Longer than a delivery to 100 readers takes: each message is delivered before the next one."""
_CROWD: Final = 100
_CROWD_MESSAGES: Final = 300
_CROWD_PACE_SECONDS: Final = 0.02
"""A hundred threads need longer to take their turns."""
_LONE_TARGET_US: Final = 100.0
_CROWD_TARGET_US: Final = 500.0
_OVERDUE_SECONDS: Final = 30.0
"""When the last message is so old and a reader still waits, the benchmark ends with an error."""

_STAMP: Final = struct.Struct("<Q")
_PADDING: Final = bytes(MESSAGE_BYTES - _STAMP.size)
_now = time.perf_counter_ns


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    count, crowd_count = run.scaled(_MESSAGES), run.scaled(_CROWD_MESSAGES)
    crowd = run.scaled(_CROWD)
    _add(
        run,
        "1 reader thread",
        times=_deliver(run, _ThreadReaders, 1, count, _PACE_SECONDS),
        bare=_wake_threads(1, count, _PACE_SECONDS),
        bare_name="waking 1 thread",
        target_us=_LONE_TARGET_US,
    )
    _add(
        run,
        f"{crowd} reader tasks",
        times=_deliver(run, _TaskReaders, crowd, crowd_count, _PACE_SECONDS),
        bare=_wake_tasks(crowd, crowd_count, _PACE_SECONDS),
        bare_name=f"waking {crowd} tasks of one loop",
        target_us=_CROWD_TARGET_US,
    )
    _add(
        run,
        f"{crowd} reader threads",
        times=_deliver(run, _ThreadReaders, crowd, crowd_count, _CROWD_PACE_SECONDS),
        bare=_wake_threads(crowd, crowd_count, _CROWD_PACE_SECONDS),
        bare_name=f"waking {crowd} threads",
        target_us=None,
    )
    _add(
        run,
        "1 reader thread",
        level="synced",
        times=_deliver(run, _ThreadReaders, 1, count, _PACE_SECONDS, ack="synced"),
        bare=_sync_bare(run.path("bare"), count, _PACE_SECONDS),
        bare_name="pwrite + fdatasync of a message",
        target_us=None,
    )


def _add(
    run: Run,
    who: str,
    *,
    times: list[float],
    bare: list[float],
    bare_name: str,
    target_us: float | None,
    level: str = "memory",
) -> None:
    run.add(
        f"append until the reader has it, {level}, {who}, p50",
        quantile(times, 0.5) / 1000,
        "us",
        limit=quantile(bare, 0.5) / 1000,
        limit_name=f"{bare_name}, p50",
        at_most=target_us,
        note=f"{len(times)} deliveries, p99 {quantile(times, 0.99) / 1000:.0f} us, "
        f"limit's p99 {quantile(bare, 0.99) / 1000:.0f} us",
    )


def _produce(send: Callable[[int], object], count: int, pace_seconds: float) -> None:
    """Calls `send` with the time, so many times, one after a pause."""
    for _ in range(count):
        time.sleep(pace_seconds)
        send(_now())


def _join(threads: Sequence[threading.Thread], who: str) -> None:
    """Waits for threads that have everything they wait for.

    Raises:
        UnavailableError: One has not.
    """
    deadline = time.monotonic() + _OVERDUE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise UnavailableError(f"{who} did not get all of its messages")


# -- through a topic ------------------------------------------------------------------------


class _ThreadReaders:
    """So many threads, each with a reader at the tail; `times` holds one sample per delivery."""

    def __init__(self, topic: Topic, readers: int, count: int) -> None:
        self.times: list[float] = []
        self._topic = topic
        self._count = count
        self._ready = threading.Barrier(readers + 1)
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(readers)]
        for thread in self._threads:
            thread.start()
        self._ready.wait()

    def _read(self) -> None:
        with self._topic.reader("latest") as reader:
            self._ready.wait()
            seen = 0
            while seen < self._count:
                batch = reader.next_batch()
                seen += len(batch)
                _note(self.times, batch)

    def join(self) -> None:
        _join(self._threads, "a reader thread")


class _TaskReaders:
    """So many tasks of one loop, each with a reader at the tail."""

    def __init__(self, topic: Topic, readers: int, count: int) -> None:
        self.times: list[float] = []
        self._topic = topic
        self._readers = readers
        self._count = count
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()), daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _read_all(self) -> None:
        readers = [self._topic.aio.reader("latest") for _ in range(self._readers)]

        async def read(number: int) -> None:
            seen = 0
            while seen < self._count:
                batch = await readers[number].next_batch()
                seen += len(batch)
                _note(self.times, batch)

        tasks = [asyncio.create_task(read(number)) for number in range(self._readers)]
        await asyncio.sleep(0)
        self._ready.set()
        await asyncio.gather(*tasks)
        for reader in readers:
            reader.close()

    def join(self) -> None:
        _join([self._thread], "a reader task")


def _note(times: list[float], batch: Sequence[Message]) -> None:
    now = _now()
    times += [now - _STAMP.unpack_from(message.payload)[0] for message in batch]


def _deliver(
    run: Run,
    kind: type[_ThreadReaders | _TaskReaders],
    readers: int,
    count: int,
    pace_seconds: float,
    *,
    ack: str = "memory",
) -> list[float]:
    """Nanoseconds from append to reader, per delivery."""
    with open_log(run.path(f"{kind.__name__}-{readers}-{ack}")) as log:
        topic = log.topic(TOPIC, create=True, ack=ack)
        crowd = kind(topic, readers, count)
        _produce(lambda stamp: topic.append(_STAMP.pack(stamp) + _PADDING), count, pace_seconds)
        crowd.join()
    if len(crowd.times) != readers * count:
        raise UnavailableError(
            f"{len(crowd.times)} of {readers * count} messages were delivered",
            hint="the traceback above says why a reader ended",
        )
    return crowd.times


# -- without one ----------------------------------------------------------------------------


def _wake_threads(readers: int, count: int, pace_seconds: float) -> list[float]:
    """Nanoseconds until a thread that blocks on a lock of its own runs."""
    times: list[float] = []
    locks = [threading.Lock() for _ in range(readers)]
    # What was sent last; None at the end. A thread that is late for one sees only the next.
    stamps: list[int | None] = [0]

    def wait(lock: threading.Lock) -> None:
        while True:
            lock.acquire()
            now, stamp = _now(), stamps[0]
            if stamp is None:
                return
            times.append(now - stamp)

    def send(stamp: int | None) -> None:
        stamps[0] = stamp
        for lock in locks:
            if lock.locked():
                lock.release()

    for lock in locks:
        lock.acquire()
    threads = [threading.Thread(target=wait, args=(lock,), daemon=True) for lock in locks]
    for thread in threads:
        thread.start()
    _produce(send, count, pace_seconds)
    time.sleep(_CROWD_PACE_SECONDS)
    send(None)
    _join(threads, "a bare thread")
    return times


def _wake_tasks(readers: int, count: int, pace_seconds: float) -> list[float]:
    """Nanoseconds until a task that awaits a future of its own runs; the loop is woken once."""
    times: list[float] = []
    futures: list[asyncio.Future[int | None]] = []
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def wait(number: int) -> None:
        while (stamp := await futures[number]) is not None:
            times.append(_now() - stamp)
            futures[number] = loops[0].create_future()

    async def wait_all() -> None:
        loops.append(asyncio.get_running_loop())
        futures.extend(loops[0].create_future() for _ in range(readers))
        tasks = [asyncio.create_task(wait(number)) for number in range(readers)]
        await asyncio.sleep(0)
        ready.set()
        await asyncio.gather(*tasks)

    def wake(stamp: int | None) -> None:
        for future in futures:
            if not future.done():
                future.set_result(stamp)

    def send(stamp: int | None) -> None:
        loops[0].call_soon_threadsafe(wake, stamp)

    thread = threading.Thread(target=lambda: asyncio.run(wait_all()), daemon=True)
    thread.start()
    ready.wait()
    _produce(send, count, pace_seconds)
    time.sleep(_CROWD_PACE_SECONDS)
    send(None)
    _join([thread], "a bare task")
    return times


def _sync_bare(path: str, count: int, pace_seconds: float) -> list[float]:
    """Nanoseconds for a write and a sync of one message."""
    times: list[float] = []
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def send(stamp: int) -> None:
        os.write(fd, _STAMP.pack(stamp) + _PADDING)
        os.fdatasync(fd)
        times.append(_now() - stamp)

    try:
        _produce(send, count, pace_seconds)
    finally:
        os.close(fd)
    return times
