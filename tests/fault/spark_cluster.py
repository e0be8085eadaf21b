"""A real standalone Spark cluster on this machine, out of the package that pip has installed.

A master and workers, each a process of its own that can be killed with whatever it has started:

    with SparkCluster(directory) as cluster, SparkChild(directory, **cluster.driver()) as child:
        ...
        cluster.kill_worker(0)

Everything that they write is in the directory; everything that they start is ended by its id.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.fault.spark_child import spark_environment
from tests.servers.ports import free_port
from tests.support.processes import Process, end_with_parent, kill_session, of_session

__all__ = ["SparkCluster"]

_STARTING_SECONDS_MAX = 600.0
_ENDING_SECONDS_MAX = 60.0
_PAUSE_SECONDS = 0.05
_LOG_CHARACTERS = 3000

_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"

_CONF = {
    # One task at a time on each worker, and no memory but what little tests need.
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
    # Jobs begin when both workers take part, not when the first does.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    # Who has been killed is missed at once, by its connection; who hangs, soon.
    "spark.executor.heartbeatInterval": "2s",
    "spark.network.timeout": "60s",
    "spark.task.maxFailures": "4",
}


class SparkCluster:
    """A master, and workers of one core each; a context manager that none of it outlives.

    Args:
        directory: An existing one, for logs and leftovers.
        workers: How many to begin with.
    """

    def __init__(self, directory: Path, *, workers: int = 2) -> None:
        self._directory = directory
        self._environment = spark_environment(directory) | {
            "SPARK_DAEMON_MEMORY": "256m",
            # Of both sides: workers say that they live four times as often as that.
            "SPARK_DAEMON_JAVA_OPTS": "-Dspark.worker.timeout=60",
        }
        self._port = free_port()
        self._count = workers
        self._master: _Daemon | None = None
        self._workers: list[_Daemon] = []

    @property
    def url(self) -> str:
        """What a driver calls its master."""
        return f"spark://127.0.0.1:{self._port}"

    def driver(self, **conf: str) -> dict[str, Any]:
        """The arguments of a `SparkChild` that works here."""
        settings = {**_CONF, "spark.pyspark.python": sys.executable, **conf}
        return {"master": self.url, "conf": settings}

    # -- life and death -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            # All at once: a worker asks for its master until there is one.
            self._master = self._start(
                "master",
                "org.apache.spark.deploy.master.Master",
                ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"],
            )
            for _ in range(self._count):
                self.add_worker()
            # A job waits for the workers, but a driver does not wait for its master.
            self._master.wait_for(rf"Starting Spark master at {re.escape(self.url)}\b")
        except BaseException:
            self.close()
            raise
        return self

    def add_worker(self) -> int:
        """Starts one more; its number."""
        number = len(self._workers)
        home = self._directory / f"worker-{number}"
        worker = self._start(
            home.name,
            "org.apache.spark.deploy.worker.Worker",
            [
                *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"),
                *("--work-dir", str(home), self.url),
            ],
        )
        self._workers.append(worker)
        return number

    def _start(self, name: str, java_class: str, arguments: Sequence[str]) -> _Daemon:
        program = os.path.join(self._environment["SPARK_HOME"], "bin", "spark-class")
        log = self._directory / f"{name}.log"
        return _Daemon([program, java_class, *arguments], log, self._environment)

    def kill_worker(self, number: int) -> int:
        """Ends a worker with its executors and their Python; how many processes that were."""
        return self._workers[number].kill()

    def executors(self, number: int) -> list[Process]:
        """The JVMs that a worker has started for drivers."""
        processes = self._workers[number].processes()
        return [process for process in processes if _EXECUTOR in process.words]

    def wait_until_idle(self) -> None:
        """Returns when no executor is left: those of a driver that was killed end by themselves.

        Raises:
            AssertionError: They do not.
        """
        deadline = time.monotonic() + _ENDING_SECONDS_MAX
        while any(self.executors(number) for number in range(len(self._workers))):
            assert time.monotonic() < deadline, f"executors are left:\n{self.logs()}"
            time.sleep(_PAUSE_SECONDS)

    def logs(self) -> str:
        """The ends of all logs."""
        daemons = [self._master, *self._workers]
        return "\n".join(daemon.log_text() for daemon in daemons if daemon is not None)

    def close(self) -> None:
        """Ends everything. May be called twice."""
        for daemon in (*self._workers, self._master):
            if daemon is not None:
                daemon.kill()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Daemon:
    """A process of the cluster, in a session of its own."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._is_over = False
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call
            )

    def wait_for(self, pattern: str) -> None:
        """Returns when the log says so.

        Raises:
            AssertionError: It does not.
        """
        deadline = time.monotonic() + _STARTING_SECONDS_MAX
        while re.search(pattern, self._log.read_text(errors="replace")) is None:
            assert self._process.poll() is None, f"it has ended:\n{self.log_text()}"
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{self.log_text()}"
            time.sleep(_PAUSE_SECONDS)

    def processes(self) -> list[Process]:
        return [] if self._is_over else of_session(self._process.pid)

    def kill(self) -> int:
        """Ends it and whatever it has started; how many processes that were."""
        if self._is_over:
            return 0
        killed = kill_session(self._process.pid)
        # Its id is its own until here.
        self._process.wait()
        self._is_over = True
        return killed

    def log_text(self) -> str:
        return f"{self._log.name}:\n{self._log.read_text(errors='replace')[-_LOG_CHARACTERS:]}"
