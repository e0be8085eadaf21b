"""`benchmarks chain`: a reader goes from the bucket through files and cache to the live tail.

A topic is written, uploaded and trimmed, so that its beginning is in the bucket alone. A producer
then goes on at a steady pace, uploads and trimming go on beside it, and a reader starts at offset
0. It is timed until it has everything that is visible, and follows the producer for a while. Every
message carries its offset, so that one which is missing, comes twice or out of order is noticed;
that the reader did go through every tier is checked by the log's own counters.

The limit is plain reading of the objects' files in chunks, with a crc32 over every byte, beside the
same producer. A figure of its own is the replay of as many messages from local files alone: what is
slower than that is the price of the bucket. The sides take turns. The bucket is a directory, and
everything is in the page cache.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.measurement import (
    COPY_BYTES,
    GIB,
    MESSAGE_BYTES,
    TOPIC,
    Run,
    median,
    open_log,
    open_tiered_log,
    quantile,
    stopwatch,
)
from ister import kernels
from ister.base.limits import MIB
from ister.base.model import TopicName
from ister.bucket.names import object_key
from ister.config import CloudReaderConfig
from ister.errors import InvariantError, UnavailableError, check
from ister.format.crc import crc32
from ister.format.frame import FRAME_HEADER_SIZE
from ister.topic.bucket_link import TopicBucket
from ister.topic.log import Log
from ister.topic.message import Message
from ister.topic.topic import Topic

_HISTORY_BYTES: Final = GIB // 2
_LOCAL_BYTES: Final = 128 * MIB
"""What trimming leaves of the files."""
_FILE_BYTES: Final = 16 * MIB
_ROUNDS: Final = 3
_LIVE_MESSAGES: Final = 20_000
_LOT: Final = 100
_LOT_SECONDS: Final = 0.005
"""The producer's pace: some 20 MB/s, which a reader that catches up is faster than."""
_TRIM_SECONDS: Final = 0.25
_FIRST_READS: Final = 50
_OVERDUE_SECONDS: Final = 120.0

_STAMP: Final = struct.Struct("<Q")
_PADDING: Final = bytes(MESSAGE_BYTES - _STAMP.size)


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    size_bytes = run.scaled(_HISTORY_BYTES)
    count = size_bytes // MESSAGE_BYTES
    run.need_disk(6 * size_bytes)
    is_compiled = kernels.load()
    with open_log(run.path("local")) as local_log, _open(run) as log, ExitStack() as stack:
        run.say("writing and uploading")
        local = local_log.topic(TOPIC, create=True)
        _fill(local, count)
        topic = log.topic(TOPIC, create=True)
        bucket = _tier_of(topic)
        _fill(topic, count)
        topic.upload()
        bucket.retention.trim()
        check(topic.local_start > 0, "the beginning of the topic is in the bucket alone")
        first_times, first_limits = _time_first_messages(
            run, topic, run.scaled(_FIRST_READS, at_least=5)
        )
        stack.enter_context(_Activity(topic))
        rounds: list[_Round] = []
        limits: list[float] = []
        replays: list[float] = []
        for _ in range(_ROUNDS):
            limits.append(_read_objects(run, bucket))
            replays.append(_replay(local))
            rounds.append(_follow_chain(log, topic, run.scaled(_LIVE_MESSAGES)))
    _add_results(run, rounds, limits, replays, is_compiled=is_compiled)
    run.add(
        "first message from the bucket, p50",
        quantile(first_times, 0.5) * 1000,
        "ms",
        limit=quantile(first_limits, 0.5) * 1000,
        limit_name="opening the object's file and reading its first chunk",
        note=f"{len(first_times)} readers at offset 0, each with a look-up and a chunk; p99 "
        f"{quantile(first_times, 0.99) * 1000:.1f} ms, "
        f"limit's p99 {quantile(first_limits, 0.99) * 1000:.1f} ms",
    )


def _open(run: Run) -> Log:
    return open_tiered_log(
        run.directory,
        {
            "wal": {
                "rotate_max_bytes": run.scaled(_FILE_BYTES, at_least=MIB),
                "retention": {"size_mb": run.scaled(_LOCAL_BYTES // MIB, at_least=4)},
            },
            "uploader": {"interval_seconds": 1},
            "cloud": {"root": run.path("objects")},
            "metadata": {"path": run.path("metadata.db")},
        },
    )


def _tier_of(topic: Topic) -> TopicBucket:
    if topic.bucket is None:
        raise InvariantError("the topic has a bucket")
    return topic.bucket


# -- what goes on meanwhile -----------------------------------------------------------------


def _payloads(first: int, count: int) -> list[bytes]:
    return [_STAMP.pack(offset) + _PADDING for offset in range(first, first + count)]


def _fill(topic: Topic, count: int) -> None:
    for first in range(0, count, MIB // MESSAGE_BYTES):
        topic.append_many(_payloads(first, min(MIB // MESSAGE_BYTES, count - first)))
    topic.flush()


class _Activity:
    """A producer and a trimmer, each a thread; uploads are the log's own. Runs while entered."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._tier = _tier_of(topic)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True)
            for work in (self._produce, self._trim)
        ]

    def __enter__(self) -> _Activity:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the benchmark ends
            self._failure = error

    def _produce(self) -> None:
        first = self._topic.watermarks.next
        while not self._stopping.wait(_LOT_SECONDS):
            offsets = self._topic.append_many(_payloads(first, _LOT))
            check(offsets.start == first, "there is one producer")
            first += _LOT

    def _trim(self) -> None:
        while not self._stopping.wait(_TRIM_SECONDS):
            self._tier.retention.trim()


# -- the reader -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """One reader's way from offset 0."""

    caught_up: int
    """How many messages it had read when it had everything that was visible."""
    seconds: float
    """How long that took."""
    frame_bytes: float
    delivered: int
    """All messages that it read, each once and in order."""
    trimmed: int
    """Offsets that left the local files meanwhile."""
    tiered: int
    """Offsets that reached the bucket meanwhile."""

    @property
    def messages_rate(self) -> float:
        return self.caught_up / self.seconds

    @property
    def rate(self) -> float:
        return self.messages_rate * self.frame_bytes / 1e6


def _follow_chain(log: Log, topic: Topic, live_messages: int) -> _Round:
    before, counters = topic.watermarks, log.metrics.snapshot()
    elapsed = stopwatch()
    with topic.reader(0) as reader:
        size_bytes = 0
        while reader.next_offset < topic.visible:
            batch = reader.next_batch(timeout=_OVERDUE_SECONDS)
            size_bytes += _check(batch, reader.next_offset)
            _check_time(elapsed())
        caught_up, seconds = reader.next_offset, elapsed()
        # Live, and until uploads and trimming have both done something beside this reader.
        while (
            reader.next_offset < caught_up + live_messages
            or topic.watermarks.trimmed == before.trimmed
            or topic.watermarks.tiered == before.tiered
        ):
            batch = reader.next_batch(timeout=_OVERDUE_SECONDS)
            _check(batch, reader.next_offset)
            _check_time(elapsed())
        delivered = reader.next_offset
    after = topic.watermarks
    changed = log.metrics.snapshot()
    # Whether it also came by the files depends on how quickly trimming follows; it is measured as
    # it comes.
    for name in ("reader.history_entered_total", "wal.reader.stitch_cache_items"):
        check(changed[name] != counters[name], f"the reader went through the tiers: {name}")
    return _Round(
        caught_up=caught_up,
        seconds=seconds,
        frame_bytes=size_bytes / caught_up,
        delivered=delivered,
        trimmed=after.trimmed - before.trimmed,
        tiered=after.tiered - before.tiered,
    )


def _check(batch: Sequence[Message], next_offset: int) -> int:
    """Makes sure that a batch is what comes next, up to `next_offset`; returns its size."""
    expected = next_offset - len(batch)
    size_bytes = 0
    for message in batch:
        if message.offset != expected:
            raise InvariantError(f"{message.offset} came where {expected} should")
        expected += 1
        size_bytes += message.size_bytes
    for message in (*batch[:1], *batch[-1:]):
        if _STAMP.unpack_from(message.payload)[0] != message.offset:
            raise InvariantError(f"the message at {message.offset} is another one")
    return size_bytes + len(batch) * FRAME_HEADER_SIZE


def _check_time(seconds: float) -> None:
    if seconds > _OVERDUE_SECONDS:
        raise UnavailableError("the reader did not come to the tail, or uploads stand still")


def _replay(topic: Topic) -> float:
    """MB/s of a reader over local files."""
    elapsed = stopwatch()
    size_bytes = 0
    with topic.reader(0, end=topic.watermarks.next) as reader:
        while batch := reader.next_batch():
            size_bytes += _check(batch, reader.next_offset)
    return size_bytes / 1e6 / elapsed()


# -- limits ---------------------------------------------------------------------------------


def _object_paths(run: Run, bucket: TopicBucket) -> list[str]:
    name = TopicName.parse(TOPIC)
    return [
        os.path.join(run.path("objects"), object_key(name, described.object_id))
        for described, _ in bucket.owned.catalog.descriptors()
    ]


def _read_objects(run: Run, bucket: TopicBucket) -> float:
    """MB/s of plain reading."""
    elapsed = stopwatch()
    total = 0
    for path in _object_paths(run, bucket):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while chunk := os.read(fd, COPY_BYTES):
                crc32(chunk)
                total += len(chunk)
        finally:
            os.close(fd)
    return total / 1e6 / elapsed()


def _time_first_messages(run: Run, topic: Topic, count: int) -> tuple[list[float], list[float]]:
    """Seconds until a reader at offset 0 has a message, and until a plain one has its chunk."""
    times: list[float] = []
    limits: list[float] = []
    path = _object_paths(run, _tier_of(topic))[0]
    size = CloudReaderConfig().fetch_chunk_size
    for _ in range(count):
        elapsed = stopwatch()
        with topic.reader(0) as reader:
            (message,) = reader.next_batch(1)
            times.append(elapsed())
        check(message.offset == 0, "a topic begins at 0")
        elapsed = stopwatch()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.read(fd, size)
        finally:
            os.close(fd)
        limits.append(elapsed())
    return times, limits


def _add_results(
    run: Run,
    rounds: Sequence[_Round],
    limits: Sequence[float],
    replays: Sequence[float],
    *,
    is_compiled: bool,
) -> None:
    rates = [found.rate for found in rounds]
    limit = median(limits)
    limit_name = f"reading the objects' files in chunks of {COPY_BYTES} bytes, with crc32"
    run.add(
        "from offset 0 to the live tail, 1 KiB messages",
        median(rates),
        "MB/s",
        limit=limit,
        limit_name=limit_name,
        note=f"median of {_ROUNDS} rounds, {min(rates):.0f} to {max(rates):.0f} "
        f"(limit {min(limits):.0f} to {max(limits):.0f}), beside a producer, uploads and trimming; "
        f"scan {'compiled' if is_compiled else 'in Python'}",
    )
    run.add(
        "from offset 0 to the live tail, messages",
        median([found.messages_rate for found in rounds]),
        "messages/s",
        limit=limit * 1e6 / rounds[0].frame_bytes,
        limit_name=limit_name,
    )
    run.add(
        "replay of as many messages from local files alone",
        median(replays),
        "MB/s",
        limit=limit,
        limit_name=limit_name,
        note=f"median of {_ROUNDS} rounds, {min(replays):.0f} to {max(replays):.0f}",
    )
    last = rounds[-1]
    run.add(
        "messages that came once, in order",
        last.delivered,
        "messages",
        limit=last.delivered,
        limit_name="offsets from 0 to where the reader ended",
        at_least=1.0,
        on="ratio",
        note=f"meanwhile {last.tiered} offsets were uploaded and {last.trimmed} left the files",
    )
