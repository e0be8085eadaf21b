"""The process with Spark, as the demo sees it: one session for all of its work.

    demo ── {"do": "tier", …} ──► python -m demo.lake_worker ──► JVM ──► Python workers
         ◄── {"progress": …} … {"result": …} ──

Owns: the process, what may be asked of it, and what is missing for it to start. Does not own: what
it does (`lake_worker`).

Spark needs seconds to start, so the process is started early and asked late. It ends with the demo,
however that ends, and its JVM and workers with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from demo.serving import clean_environment
from ister.errors import UnavailableError

READY_NAME: Final = "ready"
"""The file that says that the session is there."""

_JAVA_MIN: Final = 17
_JAVA_SECONDS: Final = 20.0
_END_SECONDS: Final = 20.0
_SHOWN_LINES: Final = 6


def find_missing() -> list[str]:
    """What is not installed, and Spark needs; each with what to install. Empty if it can start."""
    missing: list[str] = []
    if importlib.util.find_spec("pyspark") is None:
        missing.append("PySpark: pip install 'ister[spark]'")
    java = _find_java()
    version = _java_version(java) if java is not None else None
    if java is None:
        missing.append("Java 17 or later: apt install openjdk-17-jre-headless, or set JAVA_HOME")
    elif version is not None and version < _JAVA_MIN:
        missing.append(f"Java 17 or later: {java} is Java {version}; set JAVA_HOME to a later one")
    return missing


def _find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which(os.path.join(home, "bin", "java") if home else "java")


def _java_version(java: str) -> int | None:
    """Its major version; None if it does not tell."""
    try:
        said = subprocess.run(  # noqa: S603 - the Java that Spark would start
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_SECONDS, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found.group(1)) if found is not None else None


class Lake:
    """See the module header. Not thread-safe."""

    def __init__(self, directory: str, config: str) -> None:
        """Starts the process; its session comes up in the background.

        Args:
            directory: Where it may write; there is one of that name.
            config: The broker's `ister.yml`.
        """
        self.log = os.path.join(directory, "spark.log")
        self._ready = os.path.join(directory, READY_NAME)
        temporary = os.path.join(directory, "tmp")
        os.makedirs(temporary, exist_ok=True)
        environment = {
            **clean_environment(os.environ),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TMPDIR": temporary,
        }
        with open(self.log, "wb") as log:
            # A session of its own: Ctrl-C is for the demo, which ends this in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "demo.lake_worker", directory, config],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )

    @property
    def is_settled(self) -> bool:
        """Whether it has started, or never will."""
        return os.path.exists(self._ready) or self._process.poll() is not None

    def ask(
        self,
        work: str,
        on_progress: Callable[[str, float, float], None] | None = None,
        **arguments: object,
    ) -> dict[str, Any]:
        """Has something done; returns what came of it.

        Args:
            work: What; a function of `lake_worker`.
            on_progress: Called with what is being done, how much of it is done, and of how much.
            arguments: For it.

        Raises:
            UnavailableError: It failed, or the process has ended; with what it said.
        """
        child = self._process
        assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018 - for mypy
        try:
            child.stdin.write(json.dumps({"do": work, **arguments}) + "\n")
            child.stdin.flush()
            for line in child.stdout:
                answer = json.loads(line)
                if "result" in answer:
                    result: dict[str, Any] = answer["result"]
                    return result
                if "error" in answer:
                    raise UnavailableError(
                        f"{work} on Spark failed: {answer['error']}", hint=f"more in {self.log}"
                    )
                if on_progress is not None:
                    on_progress(answer["progress"], answer["done"], answer["total"])
        except BrokenPipeError:
            pass
        raise UnavailableError(f"the process with Spark has ended: {self._last_words()}")

    def close(self, patience_seconds: float = _END_SECONDS) -> None:
        """Ends it, with its JVM. May be called twice.

        Args:
            patience_seconds: How long it may take to end by itself.
        """
        child = self._process
        with suppress(OSError, ValueError):
            if child.stdin is not None:
                child.stdin.close()  # that is what it ends by
        try:
            child.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            # It is the head of its session: the JVM goes with it.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if child.stdout is not None:
            child.stdout.close()

    def _last_words(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as log:
            lines = [line.rstrip() for line in log if line.strip() and not line[:1].isspace()]
        return " | ".join(lines[-_SHOWN_LINES:]) or "it said nothing"
