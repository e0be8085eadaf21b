"""A pipeline beside a broker, as `ister serve --pipeline` starts it: a process, started again.

    broker is ready ─► ister pipeline run ─► it dies ─► a pause ─► ister pipeline run …
    broker ends ─► SIGTERM, and SIGKILL if that is not enough

Owns: the process. Does not own: what it does; it holds the pipeline's lease like any other.

A process of its own: Spark's JVM and its workers take memory and time that a broker must not wait
for. If it dies, the broker uploads itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ister.config import Config
from ister.errors import ConfigError
from ister.retry import backoff_seconds

_log = logging.getLogger("ister.cli.pipeline")

_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS_MAX: Final = 60.0
# A pipeline that ran for this long did not fail because of its start.
_HEALTHY_SECONDS: Final = 60.0
_END_SECONDS: Final = 8.0


def check_requirements(config: Config) -> None:
    """Finds out before the broker starts that there can be no pipeline.

    Raises:
        ConfigError: PySpark or Java is missing, or the log has no bucket.
    """
    if not config.storage.mode.has_bucket:
        raise ConfigError(
            f"a pipeline needs a bucket, but storage.mode is {config.storage.mode}",
            hint="storage.mode: wal_cloud, or serve without --pipeline",
        )
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError(
            "--pipeline needs pyspark, which is not installed", hint="pip install 'ister[spark]'"
        )
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    if shutil.which(java) is None:
        raise ConfigError(
            f"--pipeline needs Java 17 or later; not found: {java}",
            hint="install it, or set JAVA_HOME to where it is",
        )


def make_command(place: Sequence[str], flight: str, *, is_encrypted: bool) -> list[str]:
    """The command line of the pipeline.

    `place` are the arguments that say where the log is, `flight` is where the broker's Flight
    listens, `host:port`.
    """
    host, _, port = flight.rpartition(":")
    if host in ("0.0.0.0", "[::]"):  # noqa: S104 - what it listens on, not where it is
        host = "127.0.0.1"
    scheme = "grpc+tls://" if is_encrypted else "grpc://"
    return [
        sys.executable,
        "-m",
        "ister.cli.main",
        "pipeline",
        "run",
        *place,
        "--broker",
        f"{scheme}{host}:{port}",
        "--master",
        "local[*]",
        "--ends-with-parent",
    ]


class PipelineBeside:
    """See the module header. Belongs to the loop that `start` runs on."""

    def __init__(self, command: Sequence[str], *, pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._command = list(command)
        self._pause = pause_seconds
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        """Starts it, and again whenever it ends."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ends it. May be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    # Standard output belongs to the broker.
                    stdout=asyncio.subprocess.DEVNULL,
                )
                self.starts += 1
                _log.info("pipeline started", extra={"pid": self._process.pid})
                code: int | str = await self._process.wait()
            except OSError as error:
                code = error.strerror or type(error).__name__
            failures = 0 if loop.time() - began > _HEALTHY_SECONDS else failures + 1
            pause = backoff_seconds(failures + 1, first=self._pause, most=_PAUSE_SECONDS_MAX)
            _log.warning(
                "the pipeline ended; restarting it",
                extra={"code": code, "pause_seconds": round(pause, 1)},
            )
            await asyncio.sleep(pause)
