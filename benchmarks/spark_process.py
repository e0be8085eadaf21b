"""A process with Spark for a benchmark: started, heard and ended.

    benchmark ── run_process ──► python -m <module> … ── open_session ──► JVM ──► Python workers
              ◄── a result per line ── hand_over

Owns: the process, its session, and what it uses of the processors. Does not own: what it measures.

Spark runs in a process of its own so that no session of the benchmark's is touched. It ends with
the benchmark, however that ends, and its JVM with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final, NamedTuple, TextIO

from pyspark.sql import SparkSession

from benchmarks.measurement import Result, Run, stopwatch
from ister.errors import ConfigError, InvariantError, UnavailableError

_SHOWN_LINES: Final = 5


def check_java(command: str) -> None:
    """Makes sure that there is a JVM.

    Raises:
        ConfigError: There is none.
    """
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if program is None or not os.access(program, os.X_OK):
        raise ConfigError(
            f"{command} needs Java, and there is none",
            path=program,
            hint="install Java 17 or later; JAVA_HOME may say where it is",
        )


# -- in the benchmark's process -------------------------------------------------------------


def run_process(run: Run, module: str, *arguments: str) -> Iterator[Result]:
    """The results of a process with Spark, as they come.

    Args:
        run: Whose directory the process may use.
        module: Run as its main one; hands its results over with `hand_over`.
        arguments: For it.

    Raises:
        UnavailableError: It failed; the error has the end of what it said.
    """
    said = run.path("spark.log")
    temporary = run.path("tmp")
    os.mkdir(temporary)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": temporary,
    }
    with (
        open(said, "w", encoding="utf-8") as log,
        subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=run.directory,
            env=environment,
        ) as child,
    ):
        try:
            if child.stdout is None:
                raise InvariantError("the process has an output")
            for line in child.stdout:
                yield Result(**json.loads(line))
            child.wait()
        finally:
            child.kill()
    if child.returncode != 0:
        with open(said, encoding="utf-8", errors="replace") as log:
            # Neither Python's nor the JVM's stack: what both say at their end.
            lines = [line.rstrip() for line in log if not line[:1].isspace()]
        raise UnavailableError(
            "the process with Spark failed: " + " | ".join(lines[-_SHOWN_LINES:])
        )


# -- in the process with Spark --------------------------------------------------------------


@contextmanager
def results_output() -> Iterator[TextIO]:
    """Where results go, and nothing else does; and this process ends with its parent."""
    # Only results go where results go, whatever the JVM prints.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        end_with_parent()
        yield output


def hand_over(run: Run, output: TextIO) -> None:
    """Gives the benchmark's process the results that there are."""
    for result in run.results:
        print(json.dumps(asdict(result)), file=output, flush=True)
    run.results.clear()


def end_with_parent() -> None:
    """Ends this process with the one that started it; the JVM then ends with this one."""

    def wait() -> None:
        os.read(0, 1)  # nothing is ever written: this is its end
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


@contextmanager
def open_session(
    name: str, directory: str, conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session on two cores with a JVM of its own, which has ended when the block has.

    Args:
        name: Of the application.
        directory: The run's.
        conf: Settings of Spark, over ours.
    """
    temporary = os.path.join(directory, "tmp")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={temporary}",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": temporary,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **(conf or {}),
    }
    builder = SparkSession.builder.master("local[2]").appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - it alone knows the JVM's process
    try:
        spark.sparkContext.setLogLevel("ERROR")
        yield spark
    finally:
        spark.stop()
        gateway.shutdown()
        # The JVM ends with its standard input, and removes its files before.
        gateway.proc.stdin.close()
        gateway.proc.wait()


def time_work(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of all processors together, in this process and all below it."""
    before, elapsed = cpu_seconds(), stopwatch()
    work()
    seconds = elapsed()
    return seconds, cpu_seconds() - before


def cpu_seconds() -> float:
    """What this process and all below it have used, with those that have ended."""
    processes = read_processes()
    waiting, total = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        total += processes[pid].ticks if pid in processes else 0
        waiting += [below for below, process in processes.items() if process.parent == pid]
    return total / os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A process of this machine."""

    name: str
    parent: int
    ticks: int
    """Of processor time, with that of its children that have ended."""


def read_processes() -> dict[int, Process]:
    """All processes of this machine."""
    found: dict[int, Process] = {}
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                # A name may have spaces and brackets in it.
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        found[int(pid)] = Process(name, int(fields[1]), sum(map(int, fields[11:15])))
    return found
