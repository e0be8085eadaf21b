"""Mixed load for a long time: nothing is missing, and memory, files and threads stay flat.

    python -m tests.soak --seconds 600 --seed 1

One process appends to topics of every ack level, follows each of them, replays them, rotates and
trims them, polls an idle one, and closes and opens the log every few seconds, with and without
load. Ends with one JSON line; the exit code says whether all of it held.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import ister
from tests.support.oracle import settings_of

LEVELS = {"/soak/memory": "memory", "/soak/written": "written", "/soak/synced": "synced"}
IDLE = "/soak/idle"
PRODUCERS_PER_TOPIC = 2
MESSAGES_PER_SECOND = 1500
"""Per producer: a load, not a benchmark."""
KEPT_MESSAGES = 5000
"""Per topic, behind the slowest follower."""

RSS_GROWTH_BYTES_MAX = 24 << 20
"""Between the middle third and the last third of the run. Allocators breathe by some megabytes."""
FD_GROWTH_MAX = 8
OBJECTS_MAX = 500
"""Of one type of ours at any moment, messages aside."""
MESSAGES_MAX = 20_000
"""In caches (256 a topic) and in the batches of readers (4096 each)."""
_WARM_UP = 1 / 3


class Soak:
    """The run: its threads, what they have seen, what went wrong."""

    def __init__(self, directory: Path, seconds: float, seed: int) -> None:
        self._directory = directory
        self._seconds = seconds
        self._seed = seed
        self._settings = settings_of(
            str(directory / "main"),
            rotate_max_bytes=256 * 1024,
            fsync_interval_ms=200,
            cache_capacity=256,
            stream_chunk_size=64 * 1024,
        )
        self._log = ister.open(self._settings)
        self._is_open = threading.Event()
        self._is_loaded = threading.Event()
        self._stop = threading.Event()
        self._at = dict.fromkeys([*LEVELS, IDLE], 0)
        """Where the follower of each topic is."""
        self._rss: list[tuple[float, int]] = []
        self._fds: list[int] = []
        self._threads: list[int] = []
        self._objects: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    # -- threads ------------------------------------------------------------------------------

    def run(self) -> dict[str, object]:
        """Runs for the time given and returns the summary."""
        self._open_topics()
        workers: list[Callable[[], None]] = [lambda: self._poll_idle(IDLE)]
        for name in LEVELS:
            workers.append(lambda name=name: self._follow(name))
            workers += [
                lambda name=name, number=number: self._produce(name, number)
                for number in range(PRODUCERS_PER_TOPIC)
            ]
        threads = [
            threading.Thread(target=self._guarded, args=(worker,), daemon=True)
            for worker in workers
        ]
        self._is_open.set()
        self._is_loaded.set()
        for thread in threads:
            thread.start()
        chance = random.Random(self._seed)
        started = time.monotonic()
        reopen_at = started + chance.uniform(1, 4)
        trim_at = started + 1
        while time.monotonic() < started + self._seconds and not self.failures:
            self._stop.wait(0.25)
            now = time.monotonic()
            self._sample(now - started)
            if now >= trim_at:
                self._trim()
                self._replay(chance)
                trim_at = now + 1
            if now >= reopen_at:
                self._count_objects()
                self._reopen(under_load=chance.random() < 0.5)
                reopen_at = now + chance.uniform(1, 4)
        self._is_loaded.clear()
        self._drain()
        self._stop.set()
        self._is_open.set()
        for thread in threads:
            thread.join(timeout=60)
            if thread.is_alive():
                self._fail("a thread does not end")
        self._log.close()
        return self._summary(time.monotonic() - started)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            self._stop.set()

    def _fail(self, what: str) -> None:
        self.failures.append(what)

    def _topic(self, name: str) -> ister.Topic:
        """The topic, once the log is open."""
        while True:
            self._is_open.wait()
            try:
                return self._log.topic(name)
            except ister.ClosedError:
                if self._stop.is_set():
                    raise
                time.sleep(0.005)

    def _produce(self, name: str, number: int) -> None:
        """Numbered messages at a steady rate. A message refused by a closing log is sent again."""
        chance = random.Random(f"{self._seed}/{name}/{number}")
        sequence = 0
        while not self._stop.is_set():
            if not self._is_loaded.wait(timeout=0.1):
                continue
            burst = chance.randint(1, 40)
            pause_at = chance.randrange(burst)
            topic = self._topic(name)
            try:
                offset = -1
                for at in range(burst):
                    if at == pause_at:
                        # In the middle, so that a closing log is met with the topic in hand.
                        time.sleep(burst / MESSAGES_PER_SECOND)
                    filler = b"." * chance.randrange(300)
                    offset = topic.append(f"{number}|{sequence}|".encode() + filler)
                    sequence += 1
                    self.counts["appended"] += 1
                if chance.random() < 0.7:
                    topic.wait(offset)
                    self.counts["waits"] += 1
            except ister.ClosedError:
                self.counts["closed under load"] += 1

    def _follow(self, name: str) -> None:
        """Every message of a topic, in order, across every closing of the log."""
        expected = dict.fromkeys(range(PRODUCERS_PER_TOPIC), 0)
        while not self._stop.is_set():
            topic = self._topic(name)
            try:
                with topic.reader(self._at[name]) as reader:
                    while not self._stop.is_set():
                        for message in reader.next_batch(timeout=0.1):
                            if message.offset != self._at[name]:
                                raise AssertionError(
                                    f"{name}: {message.offset} after {self._at[name] - 1}"
                                )
                            producer, sequence, _ = message.payload.split(b"|", 2)
                            if int(sequence) != expected[int(producer)]:
                                raise AssertionError(
                                    f"{name}@{message.offset}: producer {int(producer)} sent "
                                    f"{int(sequence)}, expected {expected[int(producer)]}"
                                )
                            expected[int(producer)] += 1
                            self._at[name] += 1
                            self.counts["followed"] += 1
            except ister.ClosedError:
                self.counts["followers closed"] += 1

    def _poll_idle(self, name: str) -> None:
        """A reader that asks a thousand times a second and never gets anything."""
        while not self._stop.is_set():
            try:
                with self._topic(name).reader("latest") as reader:
                    while not self._stop.is_set():
                        if reader.next_batch(timeout=0.001):
                            raise AssertionError("a message in a topic that nobody appends to")
                        self.counts["idle polls"] += 1
            except ister.ClosedError:
                pass

    # -- the log ------------------------------------------------------------------------------

    def _open_topics(self) -> None:
        for name, level in LEVELS.items():
            self._log.topic(name, create=True, ack=level)
        self._log.topic(IDLE, create=True)

    def _reopen(self, *, under_load: bool) -> None:
        """Closes the log under everyone's hands and opens it again: it ends where it ended."""
        if not under_load:
            self._is_loaded.clear()
            time.sleep(0.1)
            self._is_open.clear()
        topics = {name: self._log.topic(name) for name in LEVELS}
        self._log.close()
        ends = {name: topic.watermarks.next for name, topic in topics.items()}
        log = ister.open(self._settings)
        for name, end in ends.items():
            found = log.topic(name).watermarks
            if not found.next == found.synced == end:
                self._fail(f"{name} ended at {end} and is opened at {found}")
        self._log = log
        self._is_open.set()
        self._is_loaded.set()
        self.counts["reopens"] += 1

    def _trim(self) -> None:
        for name in LEVELS:
            before = self._at[name] - KEPT_MESSAGES
            if before > 0:
                self.counts["trimmed files"] += self._log.topic(name).wal.trim(before)

    def _replay(self, chance: random.Random) -> None:
        """Reads one topic from its beginning: from files, whatever the cache holds."""
        name = chance.choice(list(LEVELS))
        topic = self._log.topic(name)
        expected = topic.earliest
        for message in topic.read("earliest", end=topic.watermarks.synced):
            if message.offset != expected:
                self._fail(f"{name}: replayed {message.offset} where {expected} should be")
                return
            expected += 1
            self.counts["replayed"] += 1

    def _drain(self) -> None:
        """Waits until the followers have seen everything."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.failures:
            time.sleep(0.2)
            ends = {name: self._log.topic(name).watermarks.next for name in LEVELS}
            if all(self._at[name] == end for name, end in ends.items()):
                return
        if not self.failures:
            self._fail("the followers did not reach the end")

    # -- resources ----------------------------------------------------------------------------

    def _sample(self, elapsed: float) -> None:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        self._rss.append((elapsed, pages * os.sysconf("SC_PAGE_SIZE")))
        self._fds.append(len(os.listdir("/proc/self/fd")))
        self._threads.append(len(os.listdir("/proc/self/task")))

    def _count_objects(self) -> None:
        """How many objects of each of our types there are at most."""
        gc.collect()
        found = Counter(
            type(thing).__name__
            for thing in gc.get_objects()
            if str(type(thing).__module__).startswith("ister.")
        )
        self._objects |= found

    def _summary(self, seconds: float) -> dict[str, object]:
        count = len(self._rss)
        middle = slice(int(count * _WARM_UP), int(count * 2 / 3))
        last = slice(int(count * 2 / 3), count)
        rss = [size for _, size in self._rss]
        growth = 0
        slope = 0.0
        if count >= 12:
            growth = int(statistics.median(rss[last]) - statistics.median(rss[middle]))
            warm = self._rss[int(count * _WARM_UP) :]
            slope = statistics.linear_regression(*zip(*warm, strict=True)).slope
            self._check_flat("RSS bytes", growth, RSS_GROWTH_BYTES_MAX)
            for what, samples in (("open files", self._fds), ("threads", self._threads)):
                self._check_flat(what, max(samples[last]) - max(samples[middle]), FD_GROWTH_MAX)
        for kind, most in self._objects.items():
            limit = (
                MESSAGES_MAX if kind in ("Message", "StreamMessage", "MessageId") else OBJECTS_MAX
            )
            self._check_flat(f"objects of type {kind}", most, limit)
        threads_left = [t.name for t in threading.enumerate() if t.name.startswith("ister-")]
        if threads_left:
            self._fail(f"threads left behind: {threads_left}")
        return {
            "soak": "ok" if not self.failures else "failed",
            "seconds": round(seconds, 1),
            "seed": self._seed,
            **dict(self.counts),
            "rss_mib": [round(min(rss) / 2**20, 1), round(max(rss) / 2**20, 1)],
            "rss_growth_mib": round(growth / 2**20, 2),
            "rss_slope_kib_per_s": round(slope / 1024, 2),
            "open_files": [min(self._fds), max(self._fds)],
            "threads": [min(self._threads), max(self._threads)],
            "objects_most": dict(self._objects.most_common(4)),
            "failures": self.failures,
        }

    def _check_flat(self, what: str, growth: float, limit: float) -> None:
        if growth > limit:
            self._fail(f"{what}: {growth}, at most {limit}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"replay: python -m tests.soak --seconds {options.seconds:g} --seed {seed}", flush=True)
    with TemporaryDirectory(prefix="ister-soak-") as directory:
        summary = Soak(Path(directory), options.seconds, seed).run()
    print(json.dumps(summary))
    return 0 if summary["soak"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
