"""The owner of a log's topics as a Flight server, for tests: the broker's, without a broker.

`FlightServer` is a gRPC server with the broker's Flight service and nothing else, on a loop in a
thread of its own. `FlightTopics` serves an open log with it, and counts what it is asked for:

    with ister.open(directory) as log, FlightTopics(log) as server:
        FlightClient(server.address)

`FlightProcess` serves a directory, or an `ister.yml`, from a process of its own that can be killed,
stopped and started again at the same port. It is `python -m tests.servers.flight <directory>`: it
prints its address as one line and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Self

import grpc

import ister
from ister.broker.flight.broker_source import FlightLimits
from ister.broker.flight.service import PUBLISH, READ, FlightService, message_bytes_max
from ister.broker.topics.time_searches import TimeSearches
from ister.errors import NotFoundError
from ister.topic.dedup import SequencedTopics
from ister.topic.log import Log
from tests.servers.ports import free_port

__all__ = [
    "PUBLISH",
    "READ",
    "FlightProcess",
    "FlightServer",
    "FlightTopics",
    "LogSource",
    "cut_connections",
]


def cut_connections(port: int) -> None:
    """Ends the connections of a server in this process, as a network does."""
    for name in os.listdir("/proc/self/fd"):
        # What is no socket, or was closed meanwhile, is passed over.
        with suppress(OSError, IndexError, TypeError):
            descriptor = os.dup(int(name))
            try:
                end = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            with end:
                is_listening = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if end.getsockname()[1] == port and not is_listening:
                    end.shutdown(socket.SHUT_RDWR)


class _OpenAccess:
    """All callers may do everything."""

    name = ""

    def caller(self):
        return self

    def check(self, permission, *, topic=None):
        pass

    def allows(self, permission, *, topic=None):
        return True


class FlightServer:
    """Serves topics on a loopback port from the moment it is made until `close`."""

    def __init__(self, source, *, port=0, interceptors=(), tls=None, **service) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._is_closed = False
        self.port = self._call(self._start(source, port, interceptors, tls, service))

    async def _start(self, source, port, interceptors, tls, service) -> int:
        self.service = FlightService(source, **{"access": _OpenAccess()} | service)
        size_max = message_bytes_max(
            service.get("limits") or FlightLimits(), source.config.storage.max_message_size
        )
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=[
                ("grpc.max_receive_message_length", size_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self.service.add_to(self._server)
        address = f"127.0.0.1:{port}"
        if tls is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, tls.grpc_credentials())
        await self._server.start()
        return bound

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def streams(self) -> int:
        """Reads and publishes under way."""
        return self.service.streams

    def close(self, grace_seconds: float = 5.0) -> None:
        """Ends as the broker does. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True

        async def end():
            await self.service.close(grace_seconds)
            await self._server.stop(None)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LogSource:
    """The topics of a log in this process."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sequenced = SequencedTopics()
        self.config = log.config
        self.searches = TimeSearches(log.metrics)

    def open(self, name, *, creator=None, ack=None, codec=None):
        try:
            topic = self._log.topic(name)
        except NotFoundError:
            if creator is None:
                raise
            topic = self._log.topic(name, create=True, ack=ack, codec=codec)
        return self._sequenced.get(topic)

    def names(self):
        return self._log.topics()

    def append_staged(self, name, staged, principal, is_gone):
        return self._log.append_staged(name, staged)

    def admit(self, topic, batch, *, producer, principal, is_gone):
        """Admits everything."""

    def admits_at_once(self, topic, *, producer, principal):
        return True

    def count_appended(self, topic, batch):
        """Does nothing."""

    def publishing(self, topic, producer):
        return nullcontext()


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
        # One that no client's connection may take while the server is away.
        self._port = port or free_port()
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.flight", self._source, "--port", str(self._port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
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
    parser = argparse.ArgumentParser(prog="python -m tests.servers.flight")
    parser.add_argument("source", help="a directory for data, or an ister.yml")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with ister.open(arguments.source) as log, FlightTopics(log, port=arguments.port) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
