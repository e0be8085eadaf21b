"""The parent's side of `spark_process.py`: starts a Spark driver, tells it what to do, ends it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pyspark.find_spark_home import _find_spark_home

from tests.support.processes import Process, end_with_parent, kill_all, kill_session, of_session

__all__ = ["SparkChild", "spark_environment", "tell"]

_PROGRAM = str(Path(__file__).resolve().with_name("spark_process.py"))
_READ_BYTES = 1 << 16
_STARTING_SECONDS_MAX = 600.0
_ENDING_SECONDS_MAX = 60.0
_COMPLAINT_BYTES = 6000
_DAEMON = "pyspark.daemon"
_SOURCE = "pyspark.sql.streaming.python_streaming_source_runner"
# What it runs for a task, as opposed to a plan or a commit.
_TASKS = "pyspark.worker"

_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
}


def spark_environment(directory: Path) -> dict[str, str]:
    """For processes that run Java: what they leave when they are killed is in a directory."""
    strange = ("ISTER_", "SPARK_", "PYSPARK_", "JAVA_TOOL_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    leftovers = directory / "leftovers"
    leftovers.mkdir(exist_ok=True)
    return environment | {
        "SPARK_HOME": _find_spark_home(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(leftovers),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "TMPDIR": str(leftovers),
        # Started often and for a short while: the second compiler would never pay off.
        "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={leftovers} -XX:-UsePerfData "
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


def tell(request: Any, started: float, **figures: object) -> None:
    """Prints what a test has measured."""
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"test": request.node.name, **figures, "seconds": seconds}))


class SparkChild:
    """A driver and everything that it starts; a context manager that none of it outlives.

    Args:
        directory: An existing one, for what Spark leaves behind.
        master: Spark's.
        conf: More settings of the session.
        program: What it runs, if not `spark_process.py`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        master: str = "local[2,3]",
        conf: Mapping[str, str] | None = None,
        program: str = _PROGRAM,
    ) -> None:
        self.said: Counter[str] = Counter()
        """How many lines of each kind came."""
        self.last: dict[str, Any] = {}
        """What the last line of each kind said."""
        self._rest = b""
        self._complaints = (directory / f"driver-{time.monotonic_ns()}.log").open("w+b")
        settings = {"spark.master": master, **_CONF, **(conf or {})}
        self._process = subprocess.Popen(
            [sys.executable, program, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=spark_environment(directory),
            cwd=directory,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call
        )
        self.pid = self._process.pid

    # -- talking ------------------------------------------------------------------------------

    def tell(self, do: str, **command: object) -> None:
        """Has it begin something; what comes of it is heard later."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write((json.dumps({"do": do, **command}) + "\n").encode())
        stdin.flush()

    def ask(self, do: str, *, patience: float = 600.0, **command: object) -> dict[str, Any]:
        """Has it do something, and waits for that.

        Raises:
            AssertionError: It failed, or took too long.
        """
        self.tell(do, **command)
        return self.finished(patience)

    def finished(self, seconds: float) -> dict[str, Any]:
        """The figures of the command under way, once it has ended well.

        Raises:
            AssertionError: It failed, or took too long.
        """
        kind = self.hear("done", "failed", seconds=seconds)
        assert kind == "done", self.story()
        figures: dict[str, Any] = self.last["done"]
        return figures

    def hear(self, *kinds: str, seconds: float) -> str:
        """Takes lines until one of a kind comes, and returns which.

        Raises:
            AssertionError: None came in time, or the driver has ended.
        """
        kind = self.listen(*kinds, seconds=seconds)
        assert kind, f"none of {kinds} in {seconds} s: {self.story()}"
        return kind

    def listen(self, *kinds: str, seconds: float) -> str | None:
        """The same, and None if nothing came."""
        deadline = time.monotonic() + seconds
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                kind, value = json.loads(line)
                self.said[kind] += 1
                self.last[kind] = value
                if kind in kinds:
                    return str(kind)
                continue
            if not self._take(max(0.0, deadline - time.monotonic())):
                return None

    def _take(self, timeout: float) -> bool:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], timeout)[0]:
            return False
        data = os.read(stream.fileno(), _READ_BYTES)
        self._rest += data
        return bool(data)

    def ready(self) -> Self:
        """Returns when the session is there."""
        if not self.said["ready"]:
            self.hear("ready", seconds=_STARTING_SECONDS_MAX)
        return self

    # -- ending -------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """The driver, its JVM, and their Python workers."""
        return of_session(self.pid)

    def workers(self, *, only_tasks: bool) -> list[Process]:
        """Its Python workers: those of tasks, or those that plan, commit and look as well.

        A worker is a fork of a daemon; the daemon itself is none. One works alone: it asks the
        source of a stream for its end.
        """
        found = {process.pid: process for process in self.processes()}
        workers = []
        for process in found.values():
            parent = found.get(process.parent)
            is_fork = process.is_python(_DAEMON) and parent and parent.words == process.words
            is_task = is_fork and process.words[-1] == _TASKS
            if is_task or (not only_tasks and (is_fork or process.is_python(_SOURCE))):
                workers.append(process)
        return workers

    def kill(self) -> int:
        """Ends all of it at once, as a machine's death does; how many processes there were."""
        killed = kill_session(self.pid)
        self._process.wait()
        return killed

    def kill_jvm(self) -> None:
        """Ends the driver's JVM alone: its Python workers find out by themselves."""
        jvms = [process for process in self.processes() if process.is_java]
        assert kill_all(jvms) == 1, jvms

    def end(self, *, is_well: bool = True) -> None:
        """Lets it end by itself: nothing is left that would have to be killed.

        Args:
            is_well: Nothing was done to it.

        Raises:
            AssertionError: Something is left, or it ends with an error.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        deadline = time.monotonic() + _ENDING_SECONDS_MAX
        while running := self.processes():
            assert time.monotonic() < deadline, f"left behind: {running}"
            time.sleep(0.05)
        assert self._process.wait() == 0 or not is_well, self.complaints()

    def story(self) -> str:
        """What is known about it, for whoever wonders what went wrong."""
        return f"heard {self.said}\n{self.last.get('failed')}\n{self.complaints()}"

    def complaints(self) -> str:
        """The end of what it said on stderr."""
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - _COMPLAINT_BYTES))
        return self._complaints.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            # It may have been told something that it did not live to hear.
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
