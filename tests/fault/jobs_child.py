"""The parent's side of `jobs_process.py`: runs jobs, and has them die where they are told to."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.fault.spark_child import SparkChild

__all__ = ["Drivers", "JobsChild"]

_PROGRAM = str(Path(__file__).resolve().with_name("jobs_process.py"))
_JOB_SECONDS_MAX = 900.0
_ENDING_SECONDS_MAX = 600.0
_PAUSE_SECONDS = 0.05
_CRASHED = b"Python worker exited unexpectedly"


class JobsChild(SparkChild):
    """A driver of jobs; see `SparkChild`."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, program=_PROGRAM, **settings)

    def run(
        self, name: str, config: str, arguments: Mapping[str, object], **more: str
    ) -> dict[str, Any]:
        """A job from its beginning to its end.

        Raises:
            AssertionError: It raised, or did not end.
        """
        self.ready()
        command = {"name": name, "config": config, "arguments": dict(arguments), **more}
        return self.ask("job", patience=_JOB_SECONDS_MAX, **command)

    def die(
        self,
        name: str,
        config: str,
        arguments: Mapping[str, object],
        failpoints: str,
        *,
        is_machine: bool,
    ) -> None:
        """A job whose driver dies at a failpoint, and nothing of it is left.

        Args:
            name: The job's.
            config: Where it works.
            arguments: Its arguments.
            failpoints: For ISTER_FAILPOINTS.
            is_machine: Everything that the driver has started dies with it, at once; else it finds
                out by itself, and tasks may go on for a while.

        Raises:
            AssertionError: It did not die there.
        """
        self.ready()
        self.tell("job", name=name, config=config, arguments=dict(arguments), failpoints=failpoints)
        heard = self.listen("done", "failed", seconds=_JOB_SECONDS_MAX)
        assert heard is None, f"{failpoints} was not reached: {self.last.get(str(heard))}"
        assert self._death() == signal.SIGKILL, self.story()
        if not is_machine:
            deadline = time.monotonic() + _ENDING_SECONDS_MAX
            while left := self.processes():
                assert time.monotonic() < deadline, f"left behind: {left}"
                time.sleep(_PAUSE_SECONDS)
        self.kill()

    def pause(self, name: str, config: str, arguments: Mapping[str, object], point: str) -> None:
        """A job whose driver stops at a failpoint, and does not know that time goes on.

        Raises:
            AssertionError: It did not stop there.
        """
        self.ready()
        failpoints = f"{point}=pause@1"
        self.tell("job", name=name, config=config, arguments=dict(arguments), failpoints=failpoints)
        deadline = time.monotonic() + _JOB_SECONDS_MAX
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert self.listen("done", "failed", seconds=_PAUSE_SECONDS) is None, self.story()
            assert time.monotonic() < deadline, self.story()

    def resume(self) -> str:
        """Wakes it up; how its job has ended, `done` or `failed`."""
        os.kill(self.pid, signal.SIGCONT)
        return self.hear("done", "failed", seconds=_JOB_SECONDS_MAX)

    def _death(self) -> int | None:
        """The signal that it has died of, without asking for its id to be given away."""
        deadline = time.monotonic() + _ENDING_SECONDS_MAX
        while time.monotonic() < deadline:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_KILLED else None
            time.sleep(_PAUSE_SECONDS)
        return None

    def crashes(self) -> int:
        """How often Spark said that a Python process of a task has died."""
        return self._complaints_bytes().count(_CRASHED)

    def _complaints_bytes(self) -> bytes:
        self._complaints.seek(0)
        return self._complaints.read()


class Drivers:
    """One driver after the other: the next one starts as soon as one has died.

    Args:
        directory: An existing one, for what Spark leaves behind.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._child: JobsChild | None = None
        self._number = 0
        self.told: Counter[str] = Counter()

    @property
    def child(self) -> JobsChild:
        """The one that is there now."""
        if self._child is None:
            self._child = JobsChild(self._directory)
            self.told["drivers"] += 1
        return self._child

    def run(self, name: str, config: str, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Runs a job to its end; its report."""
        self.told["runs"] += 1
        report: dict[str, Any] = self.child.run(name, config, arguments)["report"]
        return report

    def kill_driver(
        self,
        name: str,
        config: str,
        arguments: Mapping[str, object],
        failpoints: str,
        *,
        is_machine: bool,
    ) -> None:
        """As `JobsChild.die`; the next driver is on its way when this returns."""
        self.child.die(name, config, arguments, failpoints, is_machine=is_machine)
        self.told["driver_kills"] += 1
        self.close()
        _ = self.child

    def kill_task(
        self, name: str, config: str, arguments: Mapping[str, object], failpoints: str
    ) -> tuple[dict[str, Any], bool]:
        """Runs a job to its end, of which one task's process dies.

        Returns:
            Its report, and whether that process came by the failpoint.
        """
        self._number += 1
        once = self._directory / f"once-{self._number}"
        child = self.child.ready()
        crashes = child.crashes()
        figures = child.run(name, config, arguments, task_failpoints=failpoints, once=str(once))
        self.told["runs"] += 1
        has_died = figures["failed_tasks"] > 0
        if has_died:
            assert once.exists(), "a task has failed by itself"
            assert child.crashes() > crashes, child.story()
            self.told["task_kills"] += 1
        return figures["report"], has_died

    def close(self) -> None:
        """Ends the driver that is there. May be called twice."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(BrokenPipeError):
                child.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
