"""The broker of the demo: `ister serve`, as a process that can be killed and started again.

Owns: the process, its settings and its ports. The first start takes free ports; later ones take
the same, so that clients find it again.

What a crash leaves: nothing, if `stop` is called in the end; the directory is the caller's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ister.base.limits import KIB, MIB
from ister.errors import InvariantError, UnavailableError

_SETTING: Final = re.compile(r"ISTER_\w+__|ISTER_CONFIG$|ISTER_FAILPOINTS$")
_END_SECONDS: Final = 20.0
_SHOWN_LINES: Final = 5


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where it listens, `host:port`."""

    grpc: str
    flight: str
    http: str


def make_settings(directory: str, *, wal: str, engine: str) -> dict[str, Any]:
    """The settings of the demo's broker: the defaults, with sizes for a day of a small shop.

    Args:
        directory: Where everything is.
        wal: The name of the directory of local files in it.
        engine: `spark` or `embedded`: where uploads run.
    """
    return {
        "storage": {
            "mode": "wal_cloud",
            "wal": {"dir": os.path.join(directory, wal), "rotate_max_bytes": 2 * MIB},
            "uploader": {
                "engine": engine,
                "interval_seconds": 1,
                "max_object_bytes": 512 * KIB,
                "max_batch_bytes": 1 * MIB,
            },
            "cloud": {"backend": "fs", "root": os.path.join(directory, "objects")},
            "metadata": {
                "backend": "sqlite",
                "path": os.path.join(directory, "metadata.db"),
                # A machine that is busy with a demo must not take its own broker for dead.
                "lease_ttl_seconds": 30,
            },
        },
        "dispatch": {"progress_flush_interval_seconds": 1},
    }


def clean_environment(given: Mapping[str, str]) -> dict[str, str]:
    """An environment without settings: those of the demo are in its file, and nowhere else.

    A variable such as `ISTER_STORAGE__WAL__DIR` would make it write into another log.
    """
    return {name: value for name, value in given.items() if not _SETTING.match(name)}


class BrokerProcess:
    """See the module header. Not thread-safe; `start` blocks until it is ready."""

    def __init__(
        self, directory: str, *, engine: str, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Prepares it; nothing is started.

        Args:
            directory: Where its data, its settings and its log go.
            engine: As of `make_settings`.
            metadata: Settings of a metadata store that it shares with the brokers in neighbouring
                directories, and of a bucket beside them; None for stores of its own.
        """
        self._directory = directory
        self._engine = engine
        self._metadata = metadata
        os.makedirs(directory, exist_ok=True)
        self._process: subprocess.Popen[str] | None = None
        self._ports = ("0", "0", "0")
        self._addresses: Addresses | None = None
        self.config = os.path.join(directory, "ister.yml")
        self.log = os.path.join(directory, "broker.log")
        self.configure(wal="wal")

    @property
    def addresses(self) -> Addresses:
        """Where it listens, once it has been started."""
        if self._addresses is None:
            raise InvariantError("the broker was never started")
        return self._addresses

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def configure(self, *, wal: str) -> None:
        """Writes the settings for the next start; JSON is YAML."""
        settings = make_settings(self._directory, wal=wal, engine=self._engine)
        if self._metadata is not None:
            bucket = os.path.join(os.path.dirname(self._directory), "objects")
            settings["storage"] |= {
                "ack": "tiered",
                "cloud": {"backend": "fs", "root": bucket},
                "metadata": dict(self._metadata),
            }
        with open(self.config, "w", encoding="utf-8") as file:
            json.dump(settings, file, indent=2)

    def start(self) -> Addresses:
        """Starts it; returns once every topic is recovered.

        Raises:
            UnavailableError: It did not start; with the end of what it said.
        """
        names = ("--port", "--flight-port", "--http-port")
        ports = [f"{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        command = ["-m", "ister.cli.main", "serve", "--config", self.config, "--json"]
        with open(self.log, "ab") as log:
            # A session of its own: Ctrl-C is for the demo, which ends the broker in order.
            process = self._process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, *command, "--log-level", "WARNING", *ports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=clean_environment(os.environ),
                start_new_session=True,
            )
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            process.wait()
            raise UnavailableError(f"the broker did not start: {self._last_words()}")
        ready = json.loads(line)
        self._addresses = Addresses(ready["grpc"], ready["flight"], ready["http"])
        self._ports = tuple(
            address.rpartition(":")[2]
            for address in (ready["grpc"], ready["flight"], ready["http"])
        )
        return self._addresses

    def kill(self) -> None:
        """SIGKILL: no warning, no clean-up, as when the power goes."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        self._reap(process)

    def stop(self) -> None:
        """Ends it in order. May be called twice."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        self._reap(process)

    def _reap(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._process = None

    def _last_words(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as log:
            lines = [line.strip() for line in log]
        return " | ".join(lines[-_SHOWN_LINES:]) or "it said nothing"
