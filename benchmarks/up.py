"""`benchmarks up`: time to start and to stop `ister up`, memory and CPU time of its pipeline.

    ister up ─► driver ─► JVM ─► pyspark's daemon ─► workers

Idle: all messages are tiered, the first compaction and the first scrub are done, and Spark has
ended the workers that it did not need for a minute. A quick run does not wait for that minute.
Memory is resident memory, so what processes share is counted in each of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from benchmarks.flight_publisher import publishing
from benchmarks.measurement import Run, status_kib, stopwatch
from benchmarks.spark_process import read_processes
from ister.base.limits import KIB
from ister.client.flight import FlightClient
from ister.errors import UnavailableError, check

_TOPICS: Final = 10
_MESSAGES: Final = 100
_IDLE_SECONDS: Final = 60
_WAIT_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.2
_PORTS: Final = ("--port=0", "--flight-port=0", "--http-port=0")


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    seconds = stopwatch()
    with (
        open(run.path("log"), "wb") as log,
        subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "ister.cli.main", "up", "--json", *_PORTS],
            cwd=run.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as up,
    ):
        try:
            assert up.stdout is not None  # noqa: S101 - a pipe was asked for
            ready = json.loads(up.stdout.readline() or "{}")
            if ready.get("pipeline") != "starting":
                raise UnavailableError("ister up does not run a pipeline here; it needs Java")
            run.add("until the broker serves", seconds(), "s")
            _wait(lambda: '"state": "running"' in _read(run.path("log")), "the pipeline runs")
            run.add("until the pipeline runs", seconds(), "s")
            _publish(ready["flight"])
            _wait(lambda: _is_tiered(ready["flight"]), "all messages are tiered")
            _measure_idle(run, up.pid)
            seconds = stopwatch()
            up.send_signal(signal.SIGINT)
            check(up.wait() == 0, "it ends with 0")
            run.add("from Ctrl-C until both have ended", seconds(), "s", at_most=15)
        finally:
            up.kill()


def _measure_idle(run: Run, up: int) -> None:
    [pipeline] = _children(up)
    [jvm] = _children(pipeline, "java")
    _wait(lambda: bool(_below(jvm)), "Spark has had something to do")
    if not run.is_quick:
        run.say("waiting until Spark's workers have ended")
        _wait(lambda: not any(map(_children, _children(jvm))), "Spark's workers have ended")
    pids = {"driver": [pipeline], "JVM": [jvm], "Python daemon": _below(jvm)}
    before = {name: _ticks(group) for name, group in pids.items()}
    elapsed = stopwatch()
    time.sleep(run.scaled(_IDLE_SECONDS))
    passed = elapsed() * os.sysconf("SC_CLK_TCK")
    shares = {name: (_ticks(group) - before[name]) / passed for name, group in pids.items()}
    sizes = {
        name: sum(status_kib("VmRSS", pid) for pid in group) / KIB for name, group in pids.items()
    }
    run.add(
        "memory of the idle pipeline",
        sum(sizes.values()),
        "MiB",
        at_most=768,
        note=", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
    )
    run.add(
        "CPU time of the idle pipeline",
        100 * sum(shares.values()),
        "% of a core",
        at_most=5,
        note=", ".join(f"{name} {100 * share:.2f}" for name, share in shares.items()),
    )


def _publish(flight: str) -> None:
    rows = pa.record_batch({"payload": pa.array([b"x" * 100] * _MESSAGES, pa.binary())})
    with FlightClient(flight) as client:
        for number in range(_TOPICS):
            name = f"/default/topic-{number}"
            with publishing(client, name, rows.schema, create=True) as stream:
                stream.write(rows)
                stream.flush()


def _is_tiered(flight: str) -> bool:
    with FlightClient(flight) as client:
        found = client.watermarks([f"/default/topic-{number}" for number in range(_TOPICS)])
    return all(marks.tiered == _MESSAGES for marks in found.values())


def _children(pid: int, name: str = "python") -> list[int]:
    return [
        other
        for other, process in read_processes().items()
        if process.parent == pid and process.name.startswith(name)
    ]


def _below(pid: int) -> list[int]:
    children = _children(pid)
    return [*children, *(found for child in children for found in _below(child))]


def _ticks(pids: list[int]) -> int:
    processes = read_processes()
    return sum(processes[pid].ticks for pid in pids if pid in processes)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _wait(condition: Callable[[], bool], what: str) -> None:
    elapsed = stopwatch()
    while not condition():
        if elapsed() > _WAIT_SECONDS:
            raise UnavailableError(f"after {_WAIT_SECONDS:.0f} s it is not so that {what}")
        time.sleep(_LOOK_SECONDS)
