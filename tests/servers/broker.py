"""The broker for tests: a process of its own.

`BrokerProcess` is a real `ister serve` with a data directory of its own. It can be killed, stopped,
paused and started again, always at the same ports:

    with BrokerProcess(tmp_path) as broker:
        client = DanubeClientBuilder().service_url(broker.url)
        broker.kill()
        broker.start()

The broker's log is `broker.log` in the directory, all lives of it one after the other. Nothing is
uploaded or trimmed unless the settings say so: there is no bucket in most of these tests.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from tests.support.scale import scaled

from .ports import free_port

READY_SECONDS = 120.0
"""How long a broker may take until it answers, on a machine that is busy with other things."""
STOP_SECONDS = scaled(60.0, 10.0)
"""How long a broker may take to end after SIGTERM. By night, what is promised."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_READ_ONLY = [
    *("unshare", "--mount", "sh", "-ec"),
    'mount --bind / /; mount -o remount,ro,bind /; exec "$@"',
    "sh",
]
T = TypeVar("T")

_PORTS = ("grpc", "flight", "http")


def broker_settings(
    directory: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    ports: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The tree of an `ister.yml` with its data below `directory`; `settings` are laid over it."""
    tree: dict[str, Any] = {
        "storage": {
            "wal": {"dir": str(Path(directory) / "data" / "wal")},
            "uploader": {"engine": "none"},
        },
        "broker": {"ports": {name: (ports or {}).get(name, 0) for name in _PORTS}},
    }
    lay_over(tree, settings or {})
    return tree


class BrokerProcess:
    """`ister serve` in a process of its own.

    Args:
        directory: Where the data, the `ister.yml` and the log of the process are.
        settings: What differs from the default settings, as a tree.
        environment: Variables of the process beside those of this one.
        files_max: How many file descriptors it may have; as many as this one by default.
        engine: What serves gRPC; as the settings say by default.
        working_directory: That of the process; this one's by default.
        is_read_only: Whether the process can write to no file system, only to its output. It takes
            the right to mount; without it, this changes nothing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        files_max: int | None = None,
        engine: str | None = None,
        working_directory: Path | None = None,
        is_read_only: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._working_directory = working_directory
        self.settings: dict[str, Any] = {}
        lay_over(self.settings, settings or {})
        if engine is not None:
            lay_over(self.settings, {"broker": {"grpc": {"engine": engine}}})
        self._environment = dict(environment or {})
        self._prefix = (
            [] if files_max is None else ["sh", "-c", f'ulimit -n {files_max}; exec "$@"', "sh"]
        )
        if is_read_only and subprocess.run([*_READ_ONLY, "true"], check=False).returncode == 0:
            self._prefix += _READ_ONLY
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        """Where gRPC is, as host:port. The same for all lives of the broker."""
        self.flight = ""
        self.http = ""

    @property
    def url(self) -> str:
        """What Danube's client calls the service URL."""
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the broker wrote to standard error so far."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def failed_calls(self) -> list[str]:
        """What the log has of calls that ended with an error of the broker's own: defects."""
        return [line for line in self.log.splitlines() if "a call failed" in line]

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when it is ready."""
        if self.is_running:
            raise RuntimeError("the broker runs already")
        self.directory.mkdir(parents=True, exist_ok=True)
        # The next life listens where this one did, as a service on a real machine does.
        self._ports = self._ports or {name: free_port() for name in _PORTS}
        config = self.directory / "ister.yml"
        config.write_text(
            yaml.safe_dump(broker_settings(self.directory, self.settings, self._ports))
        )
        command = [sys.executable, "-m", "ister.cli.main", "serve", f"--config={config}", "--json"]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._working_directory,
                env={**os.environ, **self._environment},
            )
        try:
            ready = self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        self.address, self.flight, self.http = (ready.get(name) or "" for name in _PORTS)

    def stop(self, *, within: float = STOP_SECONDS) -> None:
        """SIGTERM. It has to end in time, with 0.

        Raises:
            AssertionError: It did not.
        """
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the broker took more than {within} s to end\n{self._log_tail()}"
            ) from None
        self._reap()
        assert code == 0, f"the broker ended with {code}\n{self._log_tail()}"

    def kill(self) -> None:
        """SIGKILL: what a crash leaves. Does nothing if it has ended already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reap()

    def restart(self) -> None:
        """`stop`, then `start`."""
        self.stop()
        self.start()

    def crash(self) -> None:
        """`kill`, then `start`."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """It keeps its connections and answers nothing any more."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._running().send_signal(signal.SIGCONT)

    # -- what it takes ----------------------------------------------------------------------

    def rss_bytes(self) -> int:
        """The memory that it has now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel says nothing about the broker's memory")

    def cpu_seconds(self) -> float:
        """Processor time that it has used since it started, of user and kernel."""
        # The name of the program, in brackets, may hold spaces; the fields come behind it.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever state it is in: nobody looks at it any more.
        self.kill()

    # -- inside -----------------------------------------------------------------------------

    @property
    def _log_path(self) -> Path:
        return self.directory / "broker.log"

    def _log_tail(self) -> str:
        return self.log[-4000:]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the broker does not run")
        return self._process

    def _wait_until_ready(self) -> dict[str, Any]:
        """The ready line. Lines before it, if any, are somebody else's."""
        output = self._running().stdout
        deadline = time.monotonic() + READY_SECONDS
        held = b""
        while True:
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([output], [], [], wait)[0]:
                raise RuntimeError(
                    f"the broker was not ready after {READY_SECONDS} s\n{self._log_tail()}"
                )
            chunk = os.read(output.fileno(), 65536)
            if not chunk:
                raise RuntimeError(f"the broker did not start\n{self._log_tail()}")
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and event.get("event") == "ready":
                    return event

    def _reap(self) -> None:
        self._process.stdout.close()
        self._process = None


def lay_over(tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            lay_over(tree[key], value)
        elif isinstance(value, Mapping):
            tree[key] = {}
            lay_over(tree[key], value)
        else:
            tree[key] = value
