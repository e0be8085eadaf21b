"""S3 servers for tests: rclone, which ignores conditions, and moto, which honours them.

Each is a process of its own on a free loopback port, in a directory that is removed with it. A
server is ended by its process id when the block ends, however it ends.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .ports import free_port

ACCESS_KEY = "LONGKEY1234"
SECRET_KEY = "LONGSECRET12345"
BUCKET = "history"
_START_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """Where a server listens, and what opens a store on it."""

    name: str
    port: int
    bucket: str = BUCKET
    directory: str = field(repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, *, endpoint: str | None = None) -> dict[str, str]:
        """The `storage.cloud.options` for this server, or for a proxy in front of it."""
        return {
            "endpoint": endpoint or self.endpoint,
            "region": "us-east-1",
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
        }


@contextmanager
def rclone_server() -> Iterator[S3Server]:
    """`rclone serve s3` over a directory. Verifies signatures; ignores `If-None-Match`."""
    binary = Path(sys.executable).parent / "rclone"
    with server_directory("rclone") as directory:
        data = Path(directory, "data")
        (data / BUCKET).mkdir(parents=True)
        # Neither the user's configuration nor their cache is touched.
        environment = {
            **os.environ,
            "RCLONE_CONFIG": f"{directory}/rclone.conf",
            "RCLONE_CACHE_DIR": f"{directory}/cache",
        }
        with server_process(
            lambda port: [
                str(binary),
                *("serve", "s3", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
                *("--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off", str(data)),
            ],
            directory=directory,
            environment=environment,
        ) as port:
            yield S3Server(name="rclone", port=port, directory=str(data))


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """The moto server, with an empty bucket. Honours conditions; verifies no signatures."""
    with (
        server_directory("moto") as directory,
        server_process(
            lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            directory=directory,
            environment={**os.environ, "TMPDIR": directory},
        ) as port,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("PUT", f"/{BUCKET}")
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200, f"moto did not make a bucket: {reply.status}"
        finally:
            connection.close()
        yield S3Server(name="moto", port=port, directory=directory)


@contextmanager
def server_directory(name: str) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix=f"ister-{name}-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def server_process(command, *, directory: str, environment: dict[str, str]) -> Iterator[int]:
    """Runs a server until the block ends; yields its port once it answers there."""
    for attempt in range(3):
        port = free_port()
        log = Path(directory, f"log-{attempt}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment,
            )
        try:
            if _answers(process, port):
                yield port
                return
        finally:
            # Nothing of theirs is kept, so there is no reason to let them finish in order.
            process.kill()
            process.wait()
        # Someone else took the port in between; another one will do.
    raise RuntimeError(f"{command(port)[0]} did not start: {log.read_text(errors='replace')}")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except OSError:
            time.sleep(0.05)
        else:
            return True
        finally:
            connection.close()
    return False
