"""`benchmarks topics`: the cost of thousands of topics in one process.

    creating    CPU time per topic, the last fifth compared with the first
    opening     CPU time until every topic is open after kill -9
    idle        CPU time while no topic is used
    a pause     longer than the lease (SIGSTOP, SIGCONT), until every topic accepts an append

The topics are in a separate process (`topics_process`), with metadata in SQLite and a bucket in a
directory. CPU time is that of all its threads; elapsed time would mostly measure how long the disk
takes to sync.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from benchmarks.measurement import Run, stopwatch
from benchmarks.topics_process import LEASE_SECONDS, PARTS
from ister.errors import UnavailableError

_TOPICS: Final = 5000
_PAUSE_SECONDS: Final = 20.0
_IDLE_SECONDS: Final = 10.0
_QUICK_SECONDS: Final = 1.0
_GROWTH_MAX: Final = 1.3
_READY_SECONDS_MAX: Final = 10.0
_IDLE_PERCENT_MAX: Final = 2.0
_BACK_SECONDS_MAX: Final = 10.0


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    topics = run.scaled(_TOPICS)
    directory = run.path("topics")
    run.say(f"creating {topics} topics")
    with _Child.start(directory, topics) as child:
        created: list[float] = child.ask("create")["cpu_seconds"]
    each = topics // PARTS
    run.add(
        f"creating one of {topics} topics, the last {each}",
        1000 * created[-1] / each,
        "ms of CPU",
        limit=1000 * created[0] / each,
        limit_name=f"the first {each}",
        at_most=_GROWTH_MAX,
        on="ratio",
        note=", ".join(f"{1000 * spent / each:.2f}" for spent in created),
    )
    run.say(f"opening {topics} topics")
    with _Child.start(directory, topics) as child:
        opened = child.ask("open")
        run.add(
            f"{topics} topics ready after kill -9",
            opened["cpu_seconds"],
            "s of CPU",
            limit=sum(created),
            limit_name="creating them",
            at_most=_READY_SECONDS_MAX,
            note=f"{opened['seconds']:.1f} s elapsed",
        )
        child.ask("append")
        run.say("waiting for uploads")
        child.ask("settle")
        _measure_idle(run, child, topics)
        _measure_pause(run, child, topics)


def _measure_idle(run: Run, child: _Child, topics: int) -> None:
    idle = child.ask(f"idle {_QUICK_SECONDS if run.is_quick else _IDLE_SECONDS}")
    run.add(
        f"{topics} idle topics",
        100 * idle["cpu_seconds"] / idle["seconds"],
        "% of a core",
        limit=100.0,
        limit_name="a core",
        at_most=_IDLE_PERCENT_MAX,
    )


def _measure_pause(run: Run, child: _Child, topics: int) -> None:
    before = child.ask("append")["seconds"]
    child.ask("settle")
    pause = _QUICK_SECONDS if run.is_quick else _PAUSE_SECONDS
    run.say(f"pausing for {pause:g} s")
    child.pause(pause)
    elapsed = stopwatch()
    child.ask("append")
    run.add(
        f"{topics} topics back after a pause of {pause:g} s",
        elapsed(),
        "s",
        limit=before,
        limit_name="an append to each before",
        at_most=_BACK_SECONDS_MAX,
        note=f"until each has accepted an append; the lease lasts {LEASE_SECONDS} s",
    )


class _Child:
    """The process that opens the topics (`topics_process`)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, directory: str, topics: int) -> Iterator[_Child]:
        """Starts the process, and kills it on exit."""
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "benchmarks.topics_process", directory, str(topics)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            process.communicate()

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and returns its result.

        Raises:
            UnavailableError: The process has ended; its standard error says why.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # noqa: S101, PT018 - for mypy
        stdin.write(f"{command}\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise UnavailableError(f"the process ended during the command {command!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pause(self, seconds: float) -> None:
        """Suspends the process for this long."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)
