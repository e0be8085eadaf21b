"""`benchmarks append`: what accepting 1 KiB messages costs, and what making them durable costs.

    append, memory     against a loop that only builds the same frames
    append, uploading  against the same without a bucket
    append, synced     against a plain pwritev + fdatasync of the same bytes in the same batches

Owns: the measurement. Does not own: the write path it measures. Ack level `memory` for the first
part, one topic, one thread; single calls are timed at a steady 20,000 a second, which is what the
targets are stated for, and at full speed, where a call now and then meets the writer's turn at the
interpreter lock.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import ister
from benchmarks.measurement import (
    MESSAGE_BYTES,
    TOPIC,
    Run,
    median,
    open_log,
    payloads,
    quantile,
    stopwatch,
    take_turns,
    warm_page_cache,
)
from ister.base.limits import APPEND_CHUNK_BYTES, KIB, MIB
from ister.base.model import AckLevel, Codec
from ister.format.crc import Buffer, crc32
from ister.format.frame import FRAME_HEADER_SIZE, pack_header
from ister.format.message import BodyEncoder
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.topic.log import Log
from ister.topic.topic import Topic

_ROUNDS: Final = 5
"""Medians of five: one round that met another process's turn does not count."""
_MESSAGES_PER_ROUND: Final = 200_000
"""Half a second and 200 MiB: many times what any buffer holds."""
_RATE_TARGET: Final = 400_000.0
_RATE_RATIO_TARGET: Final = 0.6
_MESSAGES_UPLOADING: Final = 1_000_000
"""Seconds: uploads begin a quarter of a second after the first messages."""
_UPLOADING_ROUNDS: Final = 4
_UPLOADING_RATIO_TARGET: Final = 0.8
_P99_TARGET_US: Final = 25.0
_P999_TARGET_US: Final = 200.0
_PACE_PER_SECOND: Final = 20_000
_PACED_CALLS: Final = 60_000
"""Three seconds: 60 calls lie above the p99.9."""
_PRODUCERS: Final = 64
_SYNCED_SECONDS: Final = 1.5
"""Per round: thousands of syncs."""
_SYNCED_BYTES: Final = 512 * MIB
"""About what the fastest round writes. Touched before Ister's turn and before the bare one, so that
neither writes into memory that the other one has made the host provide."""
_SYNCED_RATIO_TARGET: Final = 0.7
_MANY: Final = 16
_LONE_WAITS: Final = 2000
_LONE_BLOCK: Final = 100
"""Lone waits of Ister and bare ones take turns in blocks, so that both see the same disk."""
_LONE_RATIO_TARGET: Final = 1.5


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    _measure_memory(run)
    _measure_uploading(run)
    _measure_synced(run)
    _measure_lone_waiter(run)


# -- memory ---------------------------------------------------------------------------------


def _measure_memory(run: Run) -> None:
    count = run.scaled(_MESSAGES_PER_ROUND)
    messages = payloads(count)
    run.say("warming the page cache")
    warm_page_cache(run, (_ROUNDS + 2) * count * MESSAGE_BYTES * 11 // 10)
    builder = _FrameBuilder()
    with open_log(run.path("memory")) as log:
        topic = log.topic(TOPIC, create=True)
        rates: list[float] = []
        bare_rates: list[float] = []
        for _ in range(_ROUNDS):
            bare_rates.append(count / _time_calls(builder.build, messages))
            rates.append(count / _time_calls(topic.append, messages))
            topic.flush()
        bare = median(bare_rates)
        run.add(
            "append 1 KiB, memory, one thread",
            median(rates),
            "msg/s",
            limit=bare,
            limit_name="a loop that only builds the same frames",
            at_least=min(_RATE_TARGET, _RATE_RATIO_TARGET * bare),
            note=f"median of {_ROUNDS} rounds, "
            f"{min(rates):,.0f} to {max(rates):,.0f}; the target is the lower of "
            f"{_RATE_TARGET:,.0f} and {_RATE_RATIO_TARGET} of the limit",
        )
        _measure_latency(run, topic, builder, messages)


def _measure_uploading(run: Run) -> None:
    messages = payloads(run.scaled(_MESSAGES_UPLOADING))
    shares: list[float] = []
    directory = run.path("uploading")

    def append_to(open_it: Callable[[str], Log]) -> float:
        with open_it(directory) as log:
            topic = log.topic(TOPIC, create=True)
            rate = len(messages) / _time_calls(topic.append, messages)
            if topic.bucket is not None:
                shares.append(topic.watermarks.tiered / len(messages))
        shutil.rmtree(directory)
        return rate

    found = take_turns(
        _UPLOADING_ROUNDS,
        {"plain": lambda: append_to(open_log), "uploading": lambda: append_to(ister.open)},
    )
    rates, plain = found["uploading"], found["plain"]
    run.add(
        "append 1 KiB, the default settings, uploads going on",
        median(rates),
        "msg/s",
        limit=median(plain),
        limit_name="the same without a bucket, at the level memory",
        at_least=_UPLOADING_RATIO_TARGET,
        on="ratio",
        note=f"{_UPLOADING_ROUNDS} rounds, {min(rates):,.0f} to {max(rates):,.0f}; "
        f"{median(shares):.0%} of the messages were uploaded meanwhile",
    )


def _measure_latency(
    run: Run, topic: Topic, builder: _FrameBuilder, messages: Sequence[bytes]
) -> None:
    paced = payloads(run.scaled(_PACED_CALLS))
    for speed, times, bare, has_target in (
        ("20,000 msg/s", _pace(topic.append, paced), _pace(builder.build, paced), True),
        ("saturated", _saturate(topic.append, messages), _saturate(builder.build, messages), False),
    ):
        topic.flush()
        for label, q, target in (
            ("p50", 0.5, None),
            ("p99", 0.99, _P99_TARGET_US),
            ("p99.9", 0.999, _P999_TARGET_US),
        ):
            run.add(
                f"append() call {label}, memory, {speed}",
                quantile(times, q) / 1000,
                "us",
                limit=quantile(bare, q) / 1000,
                limit_name=f"building the same frame, {speed}, {label}",
                at_most=target if has_target else None,
            )


class _FrameBuilder:
    """Builds the frames that `append` builds, and does nothing else with them."""

    def __init__(self) -> None:
        encoder = BodyEncoder(Codec.BINCODE2)
        head, number = encoder.head(0, 0, TOPIC, ""), encoder.number
        tail = encoder.tail("", "", {}, schema_id=None, schema_version=None, routing_key=None)
        parts: list[bytes] = []
        offset = size = 0
        length, length_of, join = b"", -1, b"".join
        # A time of these days takes a tag and eight bytes.
        pack_time = struct.Struct("<BQ").pack

        def build(payload: bytes) -> None:
            nonlocal offset, size, length, length_of
            if len(payload) != length_of:
                length_of = len(payload)
                length = number(length_of)
            now = pack_time(0xFD, time.time_ns() // 1_000_000)
            body = join((head, number(offset), length, payload, now, tail))
            parts.append(pack_header(offset, len(body), crc32(body)))
            parts.append(body)
            offset += 1
            size += FRAME_HEADER_SIZE + len(body)
            if size >= APPEND_CHUNK_BYTES:
                parts.clear()
                size = 0

        self.build: Callable[[bytes], None] = build


def _time_calls(call: Callable[[bytes], object], messages: Sequence[bytes]) -> float:
    elapsed = stopwatch()
    for message in messages:
        call(message)
    return elapsed()


def _saturate(call: Callable[[bytes], object], messages: Sequence[bytes]) -> list[float]:
    """Nanoseconds per call, one after the other."""
    clock = time.perf_counter_ns
    times: list[float] = []
    note = times.append
    for message in messages:
        started = clock()
        call(message)
        note(clock() - started)
    return times


def _pace(call: Callable[[bytes], object], messages: Sequence[bytes]) -> list[float]:
    """Nanoseconds per call at a steady rate; each waits for its time and late ones follow on."""
    clock = time.perf_counter_ns
    interval = 1_000_000_000 // _PACE_PER_SECOND
    times: list[float] = []
    note = times.append
    due = clock()
    for message in messages:
        due += interval
        while (started := clock()) < due:
            time.sleep(0)  # lets go of the interpreter lock: the writer has its turn here
        call(message)
        note(clock() - started)
    return times


# -- synced ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Trace:
    """The sizes of the writes between syncs, in order, and the time that both took."""

    batches: list[list[int]] = field(default_factory=lambda: [[]])
    seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        return sum(map(sum, self.batches))


class _TracedFile:
    """A file that notes what is written and when it is synced."""

    def __init__(self, file: File, trace: _Trace) -> None:
        self._file = file
        self._trace = trace
        self.path = file.path
        self.read_at = file.read_at
        self.size = file.size
        self.truncate = file.truncate
        self.allocate = file.allocate
        self.close = file.close

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        elapsed = stopwatch()
        self._file.write_at(position, buffers)
        self._trace.seconds += elapsed()
        self._trace.batches[-1].append(sum(map(len, buffers)))

    def sync(self) -> None:
        elapsed = stopwatch()
        self._file.sync()
        self._trace.seconds += elapsed()
        self._trace.batches.append([])


class _TracedFileSystem(LocalFileSystem):
    """The local file system; writes to log files are noted in `trace`."""

    def __init__(self) -> None:
        self.trace = _Trace()

    def open(self, path: str) -> File:
        return self._traced(super().open(path))

    def create(self, path: str) -> File:
        return self._traced(super().create(path))

    def _traced(self, file: File) -> File:
        return _TracedFile(file, self.trace) if file.path.endswith(".log") else file


def _measure_synced(run: Run) -> None:
    seconds = _SYNCED_SECONDS / (10 if run.is_quick else 1)
    for label, produce, per_wait in (
        (f"{_PRODUCERS} threads", _produce_by_threads, 1),
        (f"{_PRODUCERS} asyncio tasks", _produce_by_tasks, 1),
        (f"{_PRODUCERS} threads, {_MANY} messages per wait", _produce_by_threads, _MANY),
        (f"{_PRODUCERS} asyncio tasks, {_MANY} messages per wait", _produce_by_tasks, _MANY),
    ):
        rates: list[float] = []
        ratios: list[float] = []
        busy: list[float] = []
        sizes: list[float] = []
        for number in range(2 if run.is_quick else _ROUNDS):
            fs = _TracedFileSystem()
            directory = run.path(f"synced {label} {number}")
            warm_page_cache(run, run.scaled(_SYNCED_BYTES))
            with open_log(directory, fs=fs) as log:
                topic = log.topic(TOPIC, create=True, ack="synced")
                trace = fs.trace
                elapsed = stopwatch()
                messages = produce(topic, seconds, per_wait)
                took = elapsed()
                batches = [batch for batch in trace.batches if batch]
            shutil.rmtree(directory)
            warm_page_cache(run, run.scaled(_SYNCED_BYTES))
            bare = _write_bare(run.path("bare"), batches)
            rates.append(messages / took)
            ratios.append(bare / took)
            busy.append(trace.seconds / took)
            sizes.append(trace.size_bytes / len(batches))
        # The median of the ratios, each of one round: batch sizes differ from round to round.
        rate, ratio = median(rates), median(ratios)
        run.add(
            f"synced, 1 KiB, {label}",
            rate,
            "msg/s",
            limit=rate / ratio,
            limit_name="pwritev + fdatasync of the same bytes in the same batches",
            at_least=_SYNCED_RATIO_TARGET,
            on="ratio",
            note=f"{median(sizes) / KIB:.0f} KiB per sync; writes and syncs, and the wait for the "
            f"interpreter lock behind them, take {median(busy):.0%} of the time",
        )


def _produce_by_threads(topic: Topic, seconds: float, per_wait: int) -> int:
    """So many threads append and wait until the time is over; returns how many messages."""
    counts = [0] * _PRODUCERS
    messages = payloads(per_wait)
    deadline = time.perf_counter() + seconds

    def produce(number: int) -> None:
        # Once at least: on a busy machine a thread may begin after the time is over.
        while not counts[number] or time.perf_counter() < deadline:
            topic.wait(_append(topic, messages), AckLevel.SYNCED)
            counts[number] += per_wait

    threads = [threading.Thread(target=produce, args=(at,)) for at in range(_PRODUCERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def _produce_by_tasks(topic: Topic, seconds: float, per_wait: int) -> int:
    """The same with tasks on one loop."""
    messages = payloads(per_wait)
    deadline = time.perf_counter() + seconds

    async def produce() -> int:
        count = 0
        while not count or time.perf_counter() < deadline:
            await topic.aio.wait(_append(topic, messages), AckLevel.SYNCED)
            count += per_wait
        return count

    async def produce_all() -> int:
        return sum(await asyncio.gather(*(produce() for _ in range(_PRODUCERS))))

    return asyncio.run(produce_all())


def _append(topic: Topic, messages: list[bytes]) -> int:
    """Appends the messages; returns the last one's offset."""
    if len(messages) == 1:
        return topic.append(messages[0])
    return topic.append_many(messages)[-1]


def _write_bare(path: str, batches: Sequence[Sequence[int]]) -> float:
    """Writes and syncs batches of these sizes into a new file; returns the seconds it took."""
    largest = max((size for batch in batches for size in batch), default=0)
    source = memoryview(os.urandom(largest))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        position = 0
        elapsed = stopwatch()
        for batch in batches:
            for size in batch:
                position += os.pwritev(fd, [source[:size]], position)
            os.fdatasync(fd)
        return elapsed()
    finally:
        os.close(fd)
        os.unlink(path)


def _measure_lone_waiter(run: Run) -> None:
    times: list[float] = []
    bare: list[float] = []
    message = payloads(1)[0]
    clock = time.perf_counter_ns
    fs = _TracedFileSystem()
    path = run.path("bare")
    with open_log(run.path("lone"), fs=fs) as log:
        topic = log.topic(TOPIC, create=True, ack="synced")
        topic.wait(topic.append(message))
        frame = bytes(fs.trace.batches[-2][-1])
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            position = 0
            for _ in range(max(1, run.scaled(_LONE_WAITS) // _LONE_BLOCK)):
                for _ in range(_LONE_BLOCK):
                    started = clock()
                    topic.wait(topic.append(message), AckLevel.SYNCED)
                    times.append((clock() - started) / 1000)
                for _ in range(_LONE_BLOCK):
                    started = clock()
                    position += os.pwrite(fd, frame, position)
                    os.fdatasync(fd)
                    bare.append((clock() - started) / 1000)
        finally:
            os.close(fd)
    run.add(
        "append and wait for synced, 1 KiB, one waiter, p50",
        quantile(times, 0.5),
        "us",
        limit=quantile(bare, 0.5),
        limit_name="pwrite + fdatasync of the same bytes, p50",
        at_most=_LONE_RATIO_TARGET,
        on="ratio",
        note=f"p99 {quantile(times, 0.99):.0f} us, limit's p99 {quantile(bare, 0.99):.0f} us",
    )
