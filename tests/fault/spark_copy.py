"""A topic that a stream copies into another one, and the judge of the copy.

    producer ─► /fault/a ─► Spark ─► /fault/b

Each message of A says in its payload which offset it has; the copy says in its attribute `source`
which offset it was read from. So B alone tells what is missing, doubled, changed or out of order.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import yaml

import ister
from ister.topic.log import Log
from ister.topic.topic import Topic

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


def publish(topic: Topic, count: int, *, size: int) -> None:
    """Messages that say their offsets; durable, and seen by other processes on return."""
    first = topic.watermarks.next
    topic.append_many(payload_of(offset, size) for offset in range(first, first + count))
    topic.flush()
    topic.wal.save_checkpoint()


class _Producer:
    """A thread that appends, uploads and trims by chance."""

    def __init__(self, topic: Topic, seed: str, *, size: int) -> None:
        self._topic = topic
        self._size = size
        self._chance = random.Random(seed)
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._before = topic.watermarks.next
        self._thread = threading.Thread(target=self._run, name="producer")
        self._thread.start()

    def stop(self) -> int:
        """How many messages it has appended."""
        self._is_over.set()
        self._thread.join()
        assert self._failure is None, self._failure
        return self._topic.watermarks.next - self._before

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._chance.uniform(0.1, 0.3)):
                publish(self._topic, self._chance.randint(10, 100), size=self._size)
                if self._chance.random() < 0.1:
                    self._topic.upload()
                    self._topic.tier.trim()
        except BaseException as error:
            self._failure = error


class Copy:
    """Both topics, their directories and the stream's checkpoint.

    Args:
        directory: An existing one.
        is_one_log: Both topics are of one log, which the sink has to itself while it commits;
            else the producer keeps its own open.
        payload_bytes: Of each message.
        sections: More settings of both logs, below `storage`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        is_one_log: bool = False,
        payload_bytes: int = _PAYLOAD_BYTES,
        **sections: Mapping[str, object],
    ) -> None:
        self.is_one_log = is_one_log
        self.payload_bytes = payload_bytes
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
            publish(topic, count, size=self.payload_bytes)
            if uploads:
                topic.upload()
                topic.tier.trim()
        self.sent += count

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
            self._producer = _Producer(topic, seed, size=self.payload_bytes)
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
            copies = [
                (int(message.attributes["source"]), bytes(message.payload))
                for message in log.topic(B).read("earliest")
            ]
        return self.compare(copies, is_over=is_over)

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
        with ister.open(settings(self._home, cloud={"orphan_grace_minutes": 0})) as log:
            # A file's time is not finer than this, and "old" begins now.
            time.sleep(0.02)
            tier = log.topic(B).tier
            swept = len(tier.collect_orphans()) + len(tier.collect_shared_staging())
        left = [path for path in (self._home / "objects" / "staging").rglob("*") if path.is_file()]
        assert not left, f"staged files that nobody removes: {left}"
        return swept


def _write(path: Path, tree: dict) -> str:
    path.write_text(yaml.safe_dump(tree))
    return str(path)
