"""Runs the pipeline of `ister up` and `ister serve --pipeline` as a child process of the broker.

    broker is ready ─► ister pipeline run ─► it dies ─► a pause ─► ister pipeline run …
    broker stops ─► SIGTERM, then SIGKILL after a while; then the JVM, if it still runs

Owns: the process, its Spark settings, and which of its output is shown. Does not own: the pipeline,
which takes the lease like any other.

The pipeline is a process because a broker must not wait for Spark's JVM and workers. If it dies,
the broker uploads. It has a process group of its own, so Ctrl-C reaches only the broker, which
stops the pipeline first and then uploads the last messages.

What a crash of the broker leaves: the pipeline, for a few seconds. It ends when its parent is gone
(`--ends-with-parent`), and the JVM when its standard input is closed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Final

from ister.base import logs, threads
from ister.base.retry import backoff_seconds
from ister.config import CloudBackend, Config, MetadataBackend
from ister.errors import ConfigError

_log = logging.getLogger("ister.cli.pipeline")

STARTING: Final = "starting Spark in the background…"
RUNNING: Final = "running"
_STANDBY: Final = "standing by: another pipeline holds the lease"
_STATES: Final = {logs.PIPELINE_STARTED: RUNNING, logs.PIPELINE_STANDBY: _STANDBY}

_JAVA_MIN: Final = 17
_MASTER: Final = "local[2]"
_CONF: Final = {
    # Keeps memory low for days: the heap shrinks when it is not needed, and the first-tier JIT
    # compiler is enough for a driver whose work is done by Python.
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-Xms64m -XX:+UseSerialGC -XX:MinHeapFreeRatio=20 "
    "-XX:MaxHeapFreeRatio=40 -XX:TieredStopAtLevel=1",
    "spark.sql.shuffle.partitions": "4",
    # Idle Python workers: no more than the number of tasks that run at once.
    "spark.python.factory.idleWorkerMaxPoolSize": "2",
}

_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS_MAX: Final = 60.0
# A pipeline that ran for this long did not fail because of its start.
_HEALTHY_SECONDS: Final = 60.0
_END_SECONDS: Final = 8.0
_JVM_END_SECONDS: Final = 4.0
_POLL_SECONDS: Final = 0.05
_LINE_BYTES_MAX: Final = 65536
_ERROR_MAX: Final = 300


def find_obstacle(config: Config) -> ConfigError | None:
    """Returns why no pipeline can run here (PySpark, Java or the bucket is missing), or None."""
    storage = config.storage
    if not storage.mode.has_bucket:
        return ConfigError(
            f"storage.mode is {storage.mode}, which has no bucket",
            hint="set storage.mode: wal_cloud",
        )
    if storage.cloud.backend is CloudBackend.MEMORY or (
        storage.metadata.backend is MetadataBackend.MEMORY
    ):
        return ConfigError(
            "the bucket or the metadata store is in memory",
            hint="use storage.cloud.backend fs or s3, and storage.metadata.backend sqlite or etcd",
        )
    if importlib.util.find_spec("pyspark") is None:
        return ConfigError("pyspark is not installed", hint="pip install 'ister[spark]'")
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    hint = f"install Java {_JAVA_MIN} or later, or set JAVA_HOME"
    path = shutil.which(java)
    if path is None:
        return ConfigError(f"Java not found: {java}", hint=hint)
    version = _java_version(path)
    if version is not None and version < _JAVA_MIN:
        return ConfigError(f"Java {version} is too old: {path}", hint=hint)
    return None


def _java_version(path: str) -> int | None:
    """Reads the major version from Java's file `release`; None if it cannot be read."""
    release = os.path.join(os.path.dirname(os.path.realpath(path)), "..", "release")
    try:
        with open(release, encoding="utf-8", errors="replace") as file:
            found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found is not None else None


def make_command(
    place: Sequence[str], flight: str, config: Config, *, log_level: str = "INFO"
) -> list[str]:
    """Returns the command line of the pipeline.

    `place` are the arguments that locate the log, `flight` is the broker's Flight address,
    `host:port`. Spark settings in the config override the ones here.
    """
    host, _, port = flight.rpartition(":")
    if host in ("0.0.0.0", "[::]"):  # noqa: S104 - what it listens on, not where it is
        host = "127.0.0.1"
    scheme = "grpc+tls://" if config.broker.tls.cert_file is not None else "grpc://"
    given = config.pipeline.conf
    conf = [f"--conf={name}={value}" for name, value in _CONF.items() if name not in given]
    return [
        *(sys.executable, "-m", "ister.cli.main", "pipeline", "run", *place),
        *("--broker", f"{scheme}{host}:{port}", "--master", _MASTER, *conf),
        # At least INFO, the level of the events that show its state.
        *("--json", "--log-level", "DEBUG" if log_level == "DEBUG" else "INFO"),
        *("--ends-with-parent", str(os.getpid())),
    ]


class PipelineBeside:
    """Runs the pipeline as a child process, and restarts it. Thread-safe."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        show_state: Callable[[str], None] = lambda state: None,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        """Takes the command line of the pipeline.

        `show_state` is called with each new state, such as `running`, on a thread of this object.
        """
        self._command = list(command)
        self._show_state = show_state
        self._pause = pause_seconds
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: str | None = None
        """The last output of the process that may say why it ended."""
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The process id; None if the process does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        """Starts the pipeline, and restarts it whenever it ends."""
        self._thread = threads.start("ister-pipeline-beside", self._keep)

    def stop(self) -> None:
        """Stops the pipeline, and waits until it and its JVM have ended. May be called twice."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        failures = 0
        self._show_state(STARTING)
        while not self._stopping.is_set():
            began = time.monotonic()
            self._error = None
            code = self._run()
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - began > _HEALTHY_SECONDS else failures + 1
            pause = backoff_seconds(failures + 1, first=self._pause, most=_PAUSE_SECONDS_MAX)
            _log.warning(
                "the pipeline ended; the broker uploads until it is back",
                extra={"code": code, "error": self._error, "pause_seconds": round(pause, 1)},
            )
            self._stopping.wait(pause)

    def _run(self) -> int | str:
        """Runs the process once; returns its exit code, or why it did not start."""
        with self._lock:
            # Under the lock: either `stop` sees the process, or this sees the stop.
            if self._stopping.is_set():
                return 0
            try:
                process = self._process = subprocess.Popen(  # noqa: S603 - this program
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return error.strerror or type(error).__name__
            self.starts += 1
        output = process.stdout
        assert output is not None  # noqa: S101 - a pipe was asked for
        reader = threads.start("ister-pipeline-output", self._read, output)
        code = process.wait()
        # The JVM and its workers should end with it; none may be left beside those of a restart.
        _end_group(process.pid)
        reader.join(_POLL_SECONDS * 20)
        return code

    # -- output -----------------------------------------------------------------------------

    def _read(self, output: IO[bytes]) -> None:
        with output:
            while line := output.readline(_LINE_BYTES_MAX):
                # Goes on after any error: a pipe that is not read would block the pipeline.
                with threads.guard("ister-pipeline-output"):
                    self._take(line.decode(errors="replace").strip())

    def _take(self, line: str) -> None:
        """Handles a line: a record of the pipeline's log, its report, or output of Spark."""
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            if line:
                self._error = line[:_ERROR_MAX]
                _log.debug("output of the pipeline", extra={"line": line})
        elif errors := record.get("errors"):
            self._error = str(errors[0].get("message"))[:_ERROR_MAX]
        elif (event := record.get("event")) in _STATES:
            self._error = None  # Spark's output during the start does not explain a later end
            self._show_state(_STATES[event])
        elif event is not None:
            level = logging.getLevelNamesMapping().get(str(record.get("level")), logging.INFO)
            fields = {
                name: value
                for name, value in record.items()
                if name not in ("time", "level", "target", "event")
            }
            logging.getLogger(str(record.get("target"))).log(level, event, extra=fields)


def _end_group(group: int) -> None:
    """Ends what is left of a process group whose first process has ended."""
    pause = threading.Event()
    deadline = time.monotonic() + _JVM_END_SECONDS
    while _has_processes(group):
        is_late = time.monotonic() >= deadline
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL if is_late else signal.SIGTERM)
        if is_late:
            break
        pause.wait(_POLL_SECONDS)
    # As process 1 of a container, this process has to collect what its children left.
    with suppress(ChildProcessError):
        os.waitpid(-group, os.WNOHANG)


def _has_processes(group: int) -> bool:
    """Returns whether a process of a group runs; zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError, IndexError):
            if entry.isdigit():
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    state, _, own_group = file.read().rpartition(")")[2].split()[:3]
                if int(own_group) == group and state not in "ZX":
                    return True
    return False
