"""A topic that a stream copies into another one, and the judge of the copy.

    producer ─► /fault/a ─► Spark ─► /fault/b

Each message of A says in its payload which offset it has; the copy says in its attribute `source`
which offset it was read from. So B alone tells what is missing, doubled, changed or out of order.

With keys, B is compacted and expires beside the copy (`Copy.tidy`): the judge knows what was in B
before that, and which messages may be gone.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import yaml

import ister
from ister.spark.jobs.compact_job import compact
from ister.topic.log import Log
from ister.topic.topic import Topic
from tests.support.grace import without_least_grace
from tests.support.spark_here import SparkHere

__all__ = ["A", "B", "Copy", "payload_of"]

A, B = "/fault/a", "/fault/b"

_PAYLOAD_BYTES = 400
_LOCK_SECONDS_MAX = 60.0


def settings(directory: Path, **sections: Mapping[str, object]) -> dict:
    """A tree of settings: small files and objects, and no upload that happens by itself.

    Args:
        directory: Where everything is.
        sections: More keys below `storage.wal`, `storage.uploader`, and so on.
    """
    tree: dict[str, dict] = {
        "wal": {
            "dir": str(directory / "wal"),
            "rotate_max_bytes": 65536,
            "retention": {"size_mb": 0},
        },
        "uploader": {"engine": "none", "max_object_bytes": 131072, "index_every_messages": 50},
        "cloud": {"root": str(directory / "objects")},
        "metadata": {"path": str(directory / "metadata.db")},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return {"storage": tree}


def payload_of(offset: int, size: int = _PAYLOAD_BYTES) -> bytes:
    """What the message of an offset says."""
    return f"{offset}:".encode().ljust(size, b"abcdefgh"[offset % 8 : offset % 8 + 1])


def publish(topic: Topic, count: int, *, size: int, keys: int = 0) -> None:
    """Messages that say their offsets; durable, and seen by other processes on return."""
    first = topic.watermarks.next
    for offset in range(first, first + count):
        key = f"key {offset % keys}" if keys else None
        topic.append(payload_of(offset, size), routing_key=key)
    topic.flush()
    topic.wal.save_checkpoint()


class _Producer:
    """A thread that appends, uploads and trims by chance."""

    def __init__(self, topic: Topic, seed: str, *, size: int, keys: int) -> None:
        self._topic = topic
        self._size = size
        self._keys = keys
        self._chance = random.Random(seed)
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._before = topic.watermarks.next
        self._thread = threading.Thread(target=self._run, name="producer")
        self._thread.start()

    def wait_for(self, count: int) -> None:
        """Returns when so many more messages are there."""
        goal = self._topic.watermarks.next + count
        while self._topic.watermarks.next < goal:
            assert self._failure is None, self._failure
            assert not self._is_over.wait(0.05)

    def stop(self) -> int:
        """How many messages it has appended."""
        self._is_over.set()
        self._thread.join()
        assert self._failure is None, self._failure
        return self._topic.watermarks.next - self._before

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._chance.uniform(0.1, 0.3)):
                count = self._chance.randint(10, 100)
                publish(self._topic, count, size=self._size, keys=self._keys)
                if self._chance.random() < 0.1:
                    self._topic.upload()
                    self._topic.bucket.retention.trim()
        except BaseException as error:
            self._failure = error


class Copy:
    """Both topics, their directories and the stream's checkpoint.

    Args:
        directory: An existing one.
        is_one_log: Both topics are of one log, which the sink has to itself while it commits;
            else the producer keeps its own open.
        payload_bytes: Of each message.
        keys: How many keys the messages have; without any, none has one.
        sections: More settings of both logs, below `storage`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        is_one_log: bool = False,
        payload_bytes: int = _PAYLOAD_BYTES,
        keys: int = 0,
        **sections: Mapping[str, object],
    ) -> None:
        self.is_one_log = is_one_log
        self.payload_bytes = payload_bytes
        self.keys = keys
        self._seen: dict[int, tuple[int, bytes, str | None]] = {}
        """What was in B when it was tidied: offset, source, payload, key; another's source is
        -1."""
        self.sent = 0
        """How many messages A has."""
        homes = {A: directory / "a", B: directory / ("a" if is_one_log else "b")}
        self.configs: dict[str, str] = {}
        for topic, home in homes.items():
            home.mkdir(exist_ok=True)
            self.configs[topic] = _write(home / "ister.yml", settings(home, **sections))
        self._home = homes[B]
        self._producer: _Producer | None = None
        self._checkpoint = str(directory / "checkpoint")

    @property
    def config(self) -> str:
        """Of B's log."""
        return self.configs[B]

    def source(self, **more: str) -> dict[str, str]:
        """Options of a read of A."""
        return {"config": self.configs[A], "topic": A} | more

    def sink(self, **more: str) -> dict[str, str]:
        """Options of a write to B."""
        return {"config": self.configs[B], "topic": B} | more

    def stream(
        self, *, limit: int, place: Mapping[str, str] | None = None, **sink: str
    ) -> dict[str, object]:
        """The arguments of the command `stream`.

        Args:
            limit: Messages in a micro-batch.
            place: Options that say where both topics are, if not in the directories here.
            sink: More options of the sink.
        """
        limits = {
            "startingOffsets": "earliest",
            "maxMessagesPerTrigger": str(limit),
            # Two files in each commit, so that it can die between them.
            "minPartitions": "2",
        }
        return {
            "source": self.source(**limits, **(place or {})),
            "sink": self.sink(**sink, **(place or {})),
            "checkpoint": self._checkpoint,
        }

    def remote_config(self) -> str:
        """B's log for a machine that has its bucket and its metadata, and no local files."""
        elsewhere = settings(self._home, wal={"dir": str(self._home / "elsewhere")})
        return _write(self._home / "remote.yml", elsewhere)

    # -- the producer -------------------------------------------------------------------------

    def produce(self, count: int, *, uploads: bool = False) -> None:
        """Appends to A, as an owner that comes and goes: a commit may have the log just now."""
        with self._open(self.configs[A]) as log:
            topic = log.topic(A, create=True)
            publish(topic, count, size=self.payload_bytes, keys=self.keys)
            if uploads:
                topic.upload()
                topic.bucket.retention.trim()
        self.sent += count

    def produce_more(self, count: int) -> None:
        """Appends to A whoever has it open."""
        if self._producer is None:
            self.produce(count)
        else:
            self._producer.wait_for(count)

    def _open(self, config: str) -> Log:
        deadline = time.monotonic() + _LOCK_SECONDS_MAX
        while True:
            try:
                return ister.open(config)
            except ister.DirectoryLockedError:
                assert time.monotonic() < deadline, "somebody keeps the log"
            time.sleep(0.01)

    @contextmanager
    def producing(self, seed: str) -> Iterator[None]:
        """Appends to A all the while, and has it move into the bucket now and then.

        Nothing happens meanwhile if there is one log only: call `produce` in between.
        """
        if self.is_one_log:
            yield
            return
        with ister.open(self.configs[A]) as log:
            topic = log.topic(A, create=True)
            self._producer = _Producer(topic, seed, size=self.payload_bytes, keys=self.keys)
            try:
                yield
            finally:
                self.stop_producing()

    def stop_producing(self) -> None:
        """From here on A stays as it is. May be called twice."""
        if self._producer is not None:
            self.sent += self._producer.stop()
            self._producer = None

    # -- the judge ----------------------------------------------------------------------------

    def judge(self, *, is_over: bool = True) -> dict[str, int]:
        """Every message of A is in B once, as it was and in A's order; the figures.

        Args:
            is_over: Nothing is under way, so that the last one is there, too.

        Raises:
            AssertionError: It is not so.
        """
        with self._open(self.config) as log:
            there = self._read(log)
            earliest = log.topic(B).earliest
        last = {key: at for at, (_, _, key) in there.items()}
        for at, (_, _, key) in self._seen.items():
            is_replaced = key is not None and last.get(key, -1) > at
            assert at in there or is_replaced or at < earliest, f"B has lost its offset {at}"
        everything = sorted((self._seen | there).items())
        copies = [(source, payload) for _, (source, payload, _) in everything if source >= 0]
        return self.compare(copies, is_over=is_over)

    def _read(self, log: Log) -> dict[int, tuple[int, bytes, str | None]]:
        """What B has: source, payload and key by offset."""
        there = {
            message.offset: (
                int(message.attributes.get("source", -1)),
                bytes(message.payload),
                message.routing_key,
            )
            for message in log.topic(B).read("earliest")
        }
        changed = [at for at in there.keys() & self._seen.keys() if there[at] != self._seen[at]]
        assert not changed, f"other messages at {changed[:9]}"
        return there

    def tidy(self, chance: random.Random) -> dict[str, int]:
        """What happens to B beside the copy: another producer, uploads, retention, compaction.

        Both topics have a log of their own.
        """
        told = {"expired": 0, "removed": 0}
        retention = {"retention": {"size_mb": 1}} if chance.random() < 0.5 else {}
        tidying = _write(self._home / "tidying.yml", settings(self._home, cloud=retention))
        with self._open(tidying) as log:
            if B not in log.topics():
                return told
            topic = log.topic(B)
            if chance.random() < 0.7:
                for number in range(self.keys):
                    topic.append(b"newer", routing_key=f"key {number}")
                topic.flush()
            self._seen |= self._read(log)
            topic.upload()
            if chance.random() < 0.7:
                topic.bucket.retention.collect_orphans()
            topic.bucket.retention.trim()
            told["expired"] = topic.bucket.retention.expire()
        by_key = chance.random() < 0.7
        report = compact(
            SparkHere(),
            self.config,
            topics=[B],
            format="parquet" if by_key else chance.choice(["dnb1", "parquet"]),
            keep="latest-per-key" if by_key else "all",
            min_objects=2,
            grace_minutes=0,
        )
        assert report.ok, report.errors
        told["removed"] = int(str(report.topics[B].get("removed_messages", 0)))
        return told

    def save_checkpoint(self) -> Path:
        """A copy of the checkpoint, while no query uses it."""
        backup = Path(f"{self._checkpoint}-{time.monotonic_ns()}")
        shutil.copytree(self._checkpoint, backup)
        return backup

    def restore_checkpoint(self, backup: Path) -> None:
        """Puts a copy in the place of the checkpoint."""
        shutil.rmtree(self._checkpoint)
        shutil.copytree(backup, self._checkpoint)

    def compare(
        self, messages: Sequence[tuple[int, bytes]], *, is_over: bool = True, is_sorted: bool = True
    ) -> dict[str, int]:
        """The same for offsets and payloads, however they were read."""
        offsets = [offset for offset, _ in messages]
        often = Counter(offsets)
        wanted = set(range(self.sent if is_over else max(offsets, default=-1) + 1))
        size = self.payload_bytes
        wrong = {
            "missing": len(wanted - set(often)),
            "duplicates": sum(often.values()) - len(often),
            "strange": len(set(often) - wanted),
            "changed": sum(payload != payload_of(offset, size) for offset, payload in messages),
            "out_of_order": sum(a > b for a, b in pairwise(offsets)) if is_sorted else 0,
        }
        assert not any(wrong.values()), f"{wrong} of {len(wanted)} messages"
        found = {name: wrong[name] for name in ("missing", "duplicates")}
        return {"messages": len(messages), **found}

    def sweep(self) -> int:
        """What deaths have left in the bucket is swept when it is old; how many files that was.

        Raises:
            AssertionError: Something stays.
        """
        tree = settings(self._home, cloud={"orphan_grace_minutes": 0})
        with ister.open(tree) as log, without_least_grace():
            # A file's time is not finer than this, and "old" begins now.
            time.sleep(0.02)
            bucket = log.topic(B).bucket
            swept = len(bucket.retention.collect_orphans()) + len(
                bucket.retention.collect_shared_staging()
            )
        left = [path for path in (self._home / "objects" / "staging").rglob("*") if path.is_file()]
        assert not left, f"staged files that nobody removes: {left}"
        return swept


def _write(path: Path, tree: dict) -> str:
    path.write_text(yaml.safe_dump(tree))
    return str(path)
