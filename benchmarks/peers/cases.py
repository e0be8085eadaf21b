"""The cases: what is measured of each contender, and how.

    one        publish one at a time, each answered before the next: messages a second, p50, p99
    many       64 senders, each of which waits for its answer
    batched    as fast as the client can, everything answered
    consume    a backlog in a new subscription, acknowledged
    replay     a backlog without acknowledgements
    tail       from just before a publish to the consumer, at a steady rate: p50, p99
    memory     of the server's processes: idle, and after everything
    restart    after `kill -9` with 1 GiB in the topic: until the next message is answered

Owns: the cases and their sizes. Does not own: how a contender publishes and reads (`contender`).

Every case but the last is bounded by time, so that a slow contender takes as long as a fast one.
Publishing and reading cases are measured in rounds; the figure is their median.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from benchmarks.peers.contender import Contender, Quota
from benchmarks.peers.processes import resident_mib
from benchmarks.peers.statistics import median, quantile, spread

MESSAGE_BYTES = 1024
SENDERS = 64
TAIL_RATE = 500
ROUNDS = 3
_ROUND_SECONDS = 1.5
_TAIL_SECONDS = 6.0
_BACKLOG = 200_000
_FILL_SECONDS = 8.0
_RESTART_MESSAGES = 1 << 20
_BATCH_MESSAGES_MAX = 400_000
_SETTLE_SECONDS = 30.0
_RESTART_SECONDS_MAX = 120.0
_STAMP = struct.Struct("<Q")

Result = dict[str, Any]


def _payloads(limit: int, seconds: float) -> Iterator[bytes]:
    """Yields payloads until the time is over: 64 different ones, which no disk can compress."""
    distinct = [os.urandom(MESSAGE_BYTES) for _ in range(64)]
    deadline = time.perf_counter() + seconds
    for number, payload in enumerate(itertools.cycle(distinct)):
        if number >= limit or time.perf_counter() > deadline:
            return
        yield payload


async def measure(
    contender: Contender, scale: float, say: Callable[[str], None], *, with_restart: bool
) -> Result:
    """Measures a contender that was started.

    Args:
        contender: The contender.
        scale: 1 for a full run; less for a shorter trial.
        say: Called with each line of progress.
        with_restart: Whether to measure the restart, last.
    """
    result: Result = {"idle_mib": resident_mib(contender.pids())}
    seconds = _ROUND_SECONDS * scale

    async def rounds(name: str, work: Callable[[], Awaitable[float]]) -> None:
        await work()  # warms up connections, code and the page cache
        found = [await work() for _ in range(ROUNDS)]
        result[name] = {"value": median(found), "spread": spread(found)}
        say(f"{name} {median(found):,.0f}/s")

    times: list[float] = []

    async def waiting(senders: int) -> float:
        nonlocal times
        began = time.perf_counter()
        times = await contender.publish_waiting(_payloads(1 << 40, seconds), senders)
        return len(times) / (time.perf_counter() - began)

    async def batched() -> float:
        count = 0

        def counted() -> Iterator[bytes]:
            nonlocal count
            for payload in _payloads(_BATCH_MESSAGES_MAX, seconds):
                count += 1
                yield payload

        began = time.perf_counter()
        await contender.publish_many(counted())
        return count / (time.perf_counter() - began)

    names = itertools.count()

    async def consume() -> float:
        quota = Quota(await contender.stored(), 2 * seconds)
        await contender.consume(f"bench-{next(names)}", quota)
        return quota.count / quota.elapsed

    async def replay() -> float:
        quota = Quota(await contender.stored(), 2 * seconds)
        await contender.replay(quota)
        return quota.count / quota.elapsed

    await contender.open_topic("sends")
    await rounds("one", lambda: waiting(1))
    result["one_p50_ms"] = quantile(times, 0.5) * 1e3
    result["one_p99_ms"] = quantile(times, 0.99) * 1e3
    await _choose_linger(contender, lambda: waiting(SENDERS), result)
    await rounds("many", lambda: waiting(SENDERS))
    contender.linger = 0.0
    # Another topic: some servers read what was published one by one more slowly.
    await contender.open_topic("bulk")
    if contender.batches:
        await rounds("batched", batched)
    await _fill(contender, int(_BACKLOG * scale), _FILL_SECONDS * scale)
    if contender.consumes:
        await rounds("consume", consume)
    if contender.batches:
        await rounds("replay", replay)
    await _measure_tail(contender, max(0.5, _TAIL_SECONDS * scale), result)
    say(f"tail {result['tail_p50_ms']:.2f} / {result['tail_p99_ms']:.2f} ms")
    if with_restart and contender.restarts:
        await _fill(contender, int(_RESTART_MESSAGES * scale), 1e9)
        result["after_mib"] = resident_mib(contender.pids())
        await _measure_restart(contender, result)
        say(f"restart {result['restart_seconds']:.2f} s, lost {result['lost']}")
    else:
        result["after_mib"] = resident_mib(contender.pids())
    return result


async def _choose_linger(
    contender: Contender, work: Callable[[], Awaitable[float]], result: Result
) -> None:
    """Sets the linger time that gives the contender the highest rate."""
    rates: dict[float, float] = {}
    if contender.lingers:
        await work()
        for linger in contender.lingers:
            contender.linger = linger
            rates[linger] = await work()
        contender.linger = result["linger_ms"] = max(rates, key=lambda linger: rates[linger])


async def _fill(contender: Contender, messages: int, seconds: float) -> None:
    """Publishes until the topic has so many messages, or the time is over."""
    missing = messages - await contender.stored()
    if missing > 0:
        await contender.publish_many(_payloads(missing, seconds))


async def _measure_tail(contender: Contender, seconds: float, result: Result) -> None:
    count = max(50, int(TAIL_RATE * seconds))
    padding = bytes(MESSAGE_BYTES - _STAMP.size)
    times: list[float] = []
    loop = asyncio.get_running_loop()
    finished, ready = asyncio.Event(), asyncio.Event()

    def on_message(payload: bytes) -> None:
        (sent,) = _STAMP.unpack_from(payload)
        times.append((time.perf_counter_ns() - sent) / 1e6)
        if len(times) == count:
            loop.call_soon_threadsafe(finished.set)

    following = asyncio.ensure_future(contender.follow(on_message, ready))
    under_way: set[asyncio.Future[None]] = set()
    failed: asyncio.Future[None] = loop.create_future()

    def end(task: asyncio.Future[None]) -> None:
        under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            failed.set_exception(error)

    try:
        await _first(ready.wait(), following)
        began = loop.time()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / TAIL_RATE - loop.time()))
            stamped = _STAMP.pack(time.perf_counter_ns()) + padding
            task = asyncio.ensure_future(contender.publish(stamped))
            under_way.add(task)
            task.add_done_callback(end)
        await _first(finished.wait(), following, failed)
        await asyncio.gather(*under_way)
    finally:
        failed.cancel()
        # Repeated, because clients swallow a cancellation that comes together with an answer.
        while not following.done():
            following.cancel()
            await asyncio.wait({following}, timeout=0.5)
    result["tail_p50_ms"] = quantile(times, 0.5)
    result["tail_p99_ms"] = quantile(times, 0.99)


async def _first(waited: Awaitable[object], *others: asyncio.Future[None]) -> None:
    """Waits for the first; fails if one of the others ends before."""
    task = asyncio.ensure_future(waited)
    async with asyncio.timeout(_SETTLE_SECONDS):
        done, _ = await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
    if task not in done:
        task.cancel()
        done.pop().result()
        raise RuntimeError("the consumer has ended")


async def _measure_restart(contender: Contender, result: Result) -> None:
    before = await contender.stored()
    await contender.kill()
    began = time.perf_counter()
    await contender.start()
    await _publish_one(contender)
    result["restart_seconds"] = time.perf_counter() - began
    result["lost"] = before + 1 - await contender.stored()
    result["stored"] = before


async def _publish_one(contender: Contender) -> None:
    """Publishes a message; a server that listens may refuse it while it recovers."""
    deadline = time.monotonic() + _RESTART_SECONDS_MAX
    while True:
        try:
            return await contender.publish(bytes(MESSAGE_BYTES))
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.02)
