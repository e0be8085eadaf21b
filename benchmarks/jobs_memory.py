"""How far the driver of a job and Spark's Python workers grow.

    driver ─► JVM ─► pyspark's daemon ─► workers

Owns: nothing; reads `/proc`, and sets the kernel's peaks back. Growth counts from what a process
had when the watch began, with libraries loaded, to the peak of a job: memory that an earlier one
has left behind hides nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from benchmarks.spark_process import read_processes
from ister.base.limits import KIB

_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a job took at its peak, in MiB beyond what was there before the first one."""

    driver_mib: float
    worker_mib: float
    """Of the worker that grew most."""
    workers: int
    jvm_mib: float
    """All of it: its heap is as large as it may be, whatever a job does."""


class MemoryWatch:
    """Made when all libraries are loaded, in the driver as in the workers. Used by one thread."""

    def __init__(self) -> None:
        self._driver = os.getpid()
        self._driver_before = _read(self._driver)["VmRSS"]
        self._before = {pid: _read(pid).get("VmRSS", 0) for pid in _find()[1]}
        self._peaks: dict[int, int] = {}
        self._stop = threading.Event()

    def measure(self, work: Callable[[], object]) -> Growth:
        """Does something and watches."""
        workers = _find()[1]
        for pid in (self._driver, *workers):
            # Since Linux 4.0, "5" sets the peak back to what is resident now.
            with suppress(OSError), open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as peak:
                peak.write("5")
        self._peaks = {}
        self._stop.clear()
        looking = threading.Thread(target=self._look, name="bench-memory", daemon=True)
        looking.start()
        try:
            work()
        finally:
            self._stop.set()
            looking.join()
        # One that was started meanwhile has loaded what the others had before.
        usual = min(self._before.values(), default=0)
        grown = [peak - self._before.get(pid, usual) for pid, peak in self._peaks.items()]
        driver = _read(self._driver)["VmHWM"] - self._driver_before
        return Growth(
            driver_mib=max(0, driver) / KIB,
            worker_mib=max([0, *grown]) / KIB,
            workers=len(grown),
            jvm_mib=sum(_read(pid).get("VmRSS", 0) for pid in _find()[0]) / KIB,
        )

    def _look(self) -> None:
        """Workers may end at any time; their last peak that was seen counts."""
        is_last = False
        while True:
            for pid in _find()[1]:
                if peak := _read(pid).get("VmHWM"):
                    self._peaks[pid] = max(peak, self._peaks.get(pid, 0))
            if is_last:
                return
            is_last = self._stop.wait(_LOOK_SECONDS)


def _read(pid: int) -> dict[str, int]:
    """What the kernel tells of a process's memory, in KiB; nothing if it has ended."""
    found: dict[str, int] = {}
    with (
        suppress(OSError, ValueError),
        open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status,
    ):
        for line in status:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0])
    return found


def _find() -> tuple[list[int], list[int]]:
    """The JVMs of this process, and their Python workers.

    A daemon is between them, which forks workers and does no work itself.
    """
    processes = read_processes()

    def below(parents: list[int]) -> list[int]:
        return [pid for pid, process in processes.items() if process.parent in parents]

    jvms = [pid for pid in below([os.getpid()]) if processes[pid].name == "java"]
    return jvms, below(below(jvms))
