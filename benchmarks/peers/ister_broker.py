"""`ister serve` as a child process, for the contenders that talk to it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import ister
from benchmarks.peers.processes import Server, StartError, until
from ister.client import AsyncClient

_ANY_PORTS = ("--port", "0", "--flight-port", "0", "--http-port", "0")


def version(package: str) -> str:
    """The version of an installed package."""
    return importlib.metadata.version(package)


def level(*, is_synced: bool) -> str:
    """The ack level of a durability."""
    return "synced" if is_synced else "written"


class Broker:
    """A broker with its default settings, on a directory."""

    name = f"Ister {ister.__version__}"

    def __init__(self, directory: Path, **environment: str) -> None:
        self._directory = directory
        self._environment = environment
        self._server: Server | None = None
        self.grpc = self.flight = ""

    async def start(self) -> None:
        """Starts it and waits until it serves.

        Raises:
            StartError: It does not.
        """
        ready = self._directory / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ister.cli.main", "serve", "--json", *_ANY_PORTS]
        command += ["--data-dir", str(self._directory / "data"), "--log-level", "ERROR"]
        self._server = Server(command, ready, environment=self._environment)

        async def read() -> None:
            lines = ready.read_text().splitlines(keepends=True)
            said = [line for line in lines if line.startswith("{") and line.endswith("\n")]
            if not said:
                raise StartError("it does not say where it listens")
            addresses = json.loads(said[0])
            self.grpc, self.flight = addresses["grpc"], addresses["flight"]

        await until(read, self._server)

    def stop(self) -> None:
        """Ends it and lets it tidy up."""
        if self._server is not None:
            self._server.terminate()

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        if self._server is not None:
            self._server.kill()

    def pids(self) -> list[int]:
        """Its process."""
        return [self._server.pid] if self._server is not None else []

    async def stored(self, topic: str) -> int:
        """How many messages a topic has."""
        async with AsyncClient(self.grpc, timeout=60) as client:
            return (await client.admin.describe_topic(topic)).next

    async def make_topic(self, topic: str, ack: str) -> None:
        """Makes a topic of an ack level."""
        async with AsyncClient(self.grpc, timeout=60) as client:
            await client.admin.create_topic(topic, ack=ack)
