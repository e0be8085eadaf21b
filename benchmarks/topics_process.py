"""The process that `benchmarks topics` measures.

`python -m benchmarks.topics_process DIR COUNT` reads one command per line from standard input, and
writes one line of JSON for each:

    create          creates the topics, with one message in each
    open            opens all topics
    append          appends to each topic and syncs, retrying until that succeeds
    settle          waits until everything is uploaded
    idle SECONDS    sleeps
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks.measurement import open_tiered_log, payloads, stopwatch
from ister.errors import ClosedError, FencedError, UnavailableError
from ister.topic.log import Log
from ister.topic.topic import Topic

PARTS: Final = 5
"""Number of parts in which creation is measured."""
LEASE_SECONDS: Final = 10
_MESSAGE_BYTES: Final = 100
_APPEND_THREADS: Final = 16
_RETRY_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 0.2


class _Topics:
    """The topics of one log; each method is a command."""

    def __init__(self, directory: str, count: int) -> None:
        self._log: Log = open_tiered_log(
            directory,
            {
                "cloud": {"backend": "fs", "root": os.path.join(directory, "bucket")},
                "metadata": {
                    "backend": "sqlite",
                    "path": os.path.join(directory, "metadata.db"),
                    "lease_ttl_seconds": LEASE_SECONDS,
                },
            },
        )
        self._names = [f"/bench/topic-{number:05d}" for number in range(count)]
        self._topics: list[Topic] = []
        (self._payload,) = payloads(1, _MESSAGE_BYTES)

    def create(self) -> dict[str, Any]:
        """Creates the topics; returns the CPU time of each part."""
        spent: list[float] = []
        each = len(self._names) // PARTS
        for part in range(PARTS):
            before = time.process_time()
            for name in self._names[part * each : (part + 1) * each]:
                topic = self._log.topic(name, create=True)
                topic.append(self._payload)
                topic.flush()
            spent.append(time.process_time() - before)
        return {"cpu_seconds": spent}

    def open(self) -> dict[str, Any]:
        """Opens the topics; returns the CPU time since the process started."""
        elapsed = stopwatch()
        self._topics = [self._log.topic(name) for name in self._names]
        return {"cpu_seconds": time.process_time(), "seconds": elapsed()}

    def append(self) -> dict[str, Any]:
        """Appends a message to each topic, retrying until it is synced."""
        before, elapsed = time.process_time(), stopwatch()
        with ThreadPoolExecutor(_APPEND_THREADS) as pool:
            self._topics = list(pool.map(self._append, self._topics))
        return {"cpu_seconds": time.process_time() - before, "seconds": elapsed()}

    def _append(self, topic: Topic) -> Topic:
        while True:
            try:
                topic.append(self._payload)
                topic.flush()
            except (FencedError, ClosedError):
                topic = self._log.topic(topic.name)
            except UnavailableError:
                time.sleep(_RETRY_SECONDS)
            else:
                return topic

    def settle(self) -> dict[str, Any]:
        """Waits until everything is uploaded."""
        while any(
            topic.bucket is not None and topic.bucket.uploads.lag_bytes for topic in self._topics
        ):
            time.sleep(_SETTLE_SECONDS)
        return {}

    def idle(self, seconds: float) -> dict[str, Any]:
        """Sleeps; returns the CPU time that background threads used meanwhile."""
        before, elapsed = time.process_time(), stopwatch()
        time.sleep(seconds)
        return {"cpu_seconds": time.process_time() - before, "seconds": elapsed()}


def main() -> None:
    """Runs commands until standard input ends."""
    topics = _Topics(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: Callable[..., dict[str, Any]] = getattr(topics, command)
        print(json.dumps(answer(*map(float, arguments))), flush=True)


if __name__ == "__main__":
    main()
