"""The process that has the topics of `ister bench topics`.

`python -m ister.bench.topics_process DIR COUNT` reads commands, one a line, and answers each with
one JSON line:

    create          makes the topics, with a message in each
    open            opens them
    append          appends to each, again and again until it is taken and synced
    settle          waits until everything is uploaded
    idle SECONDS    does nothing for so long
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from ister.bench.measurement import open_tiered_log, payloads, stopwatch
from ister.errors import ClosedError, FencedError, UnavailableError
from ister.topic.log import Log
from ister.topic.topic import Topic

__all__ = ["main"]

PARTS: Final = 5
"""Creating is measured in so many parts."""
LEASE_SECONDS: Final = 10
_MESSAGE_BYTES: Final = 100
_APPEND_THREADS: Final = 16
_RETRY_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 0.2


class _Topics:
    """All topics of a log, opened."""

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
        """Makes them; processor time of each part."""
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
        """Opens them; processor time since this process was started."""
        elapsed = stopwatch()
        self._topics = [self._log.topic(name) for name in self._names]
        return {"cpu_seconds": time.process_time(), "seconds": elapsed()}

    def append(self) -> dict[str, Any]:
        """Appends to each until it is taken."""
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
        while any(topic.tier is not None and topic.tier.lag_bytes for topic in self._topics):
            time.sleep(_SETTLE_SECONDS)
        return {}

    def idle(self, seconds: float) -> dict[str, Any]:
        """Does nothing; processor time spent meanwhile."""
        before, elapsed = time.process_time(), stopwatch()
        time.sleep(seconds)
        return {"cpu_seconds": time.process_time() - before, "seconds": elapsed()}


def main() -> None:
    """Answers commands until standard input ends."""
    topics = _Topics(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: Callable[..., dict[str, Any]] = getattr(topics, command)
        print(json.dumps(answer(*map(float, arguments))), flush=True)


if __name__ == "__main__":
    main()
