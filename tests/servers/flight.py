"""The owner of a log's topics as a Flight server, for tests: the broker's, without a broker.

`FlightTopics` serves an open log from this process, and counts what it is asked for:

    with ister.open(directory) as log, FlightTopics(log) as server:
        FlightClient(server.address)

`FlightProcess` serves a directory, or an `ister.yml`, from a process of its own that can be killed,
stopped and started again at the same port. It is `python -m servers.flight <directory>`, which
prints its address as one line and ends with its standard input.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Self

import ister
from ister.broker.flight.server import PUBLISH, READ, FlightServer
from ister.broker.flight.source import FlightLimits, LogSource
from ister.topic.log import Log

__all__ = ["PUBLISH", "READ", "FlightProcess", "FlightTopics"]


class FlightTopics:
    """A log, served on a loopback port until the block ends.

    Args:
        log: An open one.
        port: Where to listen; any free one by default.
        limits: Bounds.
    """

    def __init__(self, log: Log, *, port: int = 0, limits: FlightLimits | None = None) -> None:
        self.calls: Counter[str] = Counter()
        """How often the server was asked for what; reads and publishes have names of their own."""
        self._lock = threading.Lock()
        self.server = FlightServer(LogSource(log), port=port, limits=limits, on_call=self._count)

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def address(self) -> str:
        return self.server.address

    def close(self) -> None:
        """Waits for the calls under way, and ends. May be called twice."""
        self.server.close(grace_seconds=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, what: str) -> None:
        with self._lock:
            self.calls[what] += 1


class FlightProcess:
    """The same in a process of its own.

    Args:
        source: A directory for data or the path of an `ister.yml`.
        port: Where to listen; any free one by default, and the same one when it is started again.
    """

    def __init__(self, source: str | os.PathLike[str], *, port: int = 0) -> None:
        self._source = os.fspath(source)
        self._port = port
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servers.flight", self._source, "--port", str(self._port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.stop()
            raise RuntimeError(f"the server of {self._source} did not start")
        self._port = int(self.address.rpartition(":")[2])

    def pause(self) -> None:
        """It keeps its connections and answers nothing any more."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self) -> None:
        """Ends it in order: the log is closed."""
        if self._process is not None:
            self._process.stdin.close()
            self._reap()

    def _reap(self) -> None:
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever state it is in: nobody looks at it any more.
        self.kill()


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m servers.flight")
    parser.add_argument("source", help="a directory for data, or an ister.yml")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with ister.open(arguments.source) as log, FlightTopics(log, port=arguments.port) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
