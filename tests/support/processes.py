"""The processes of a session: whatever a process has started, and what those have started.

A process that is started with a session of its own gives it to all its descendants, also to those
that make process groups of their own (as PySpark's workers do) and to those whose parent has died.
So they can be found and ended by their ids, and nobody else's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "end_with_parent", "kill_all", "kill_session", "of_session"]

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

_ENDING_SECONDS_MAX = 30.0
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One that runs, as the kernel shows it."""

    pid: int
    parent: int
    words: tuple[str, ...]
    """Its command line."""

    @property
    def is_java(self) -> bool:
        return Path(self.words[0]).name == "java"

    def is_python(self, module: str) -> bool:
        """Whether it is `python -m MODULE`, or was forked from that."""
        return module in self.words


def end_with_parent() -> None:
    """Has the calling process killed when its parent dies: for a test that does not live to do it.

    What such a process has started is not, and has to see for itself that it is alone: a driver's
    JVM, executors and Python workers do.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def of_session(session: int) -> list[Process]:
    """Those that run. One that has died and that nobody has asked about is none of them."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, parent, _, of, *_ = (
                Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            )
            if int(of) != session or state in "ZX":
                continue
            words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        found.append(Process(int(name), int(parent), tuple(words.rstrip("\0").split("\0"))))
    return found


def kill_all(processes: list[Process]) -> int:
    """Sends SIGKILL to each that still runs; how many did."""
    killed = 0
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed += 1
    return killed


def kill_session(session: int) -> int:
    """Ends a session as a power cut would; how many processes it had.

    The leader's id stays its own until somebody waits for it, so do that afterwards.

    Raises:
        AssertionError: Some of them do not end.
    """
    deadline = time.monotonic() + _ENDING_SECONDS_MAX
    killed: set[int] = set()
    while running := of_session(session):
        assert time.monotonic() < deadline, f"still running: {running}"
        kill_all(running)
        killed.update(process.pid for process in running)
        time.sleep(_PAUSE_SECONDS)
    return len(killed)
