"""Servers as child processes: starting and ending them, their ports, their memory.

Each server leads a session of its own, so that its whole process tree can be ended, and nothing
else. Its output goes to a file in its directory; the error of a server that does not start has the
end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOG_TAIL = 2000
_END_SECONDS = 20.0


class StartError(Exception):
    """A server did not start, or ended by itself."""


class Server:
    """A child process and its descendants."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=directory,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def check(self) -> None:
        """Raises StartError if the process has ended."""
        if self.process.poll() is not None:
            tail = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
            raise StartError(f"ended with {self.process.returncode}: {tail}")

    def terminate(self) -> None:
        """Sends SIGTERM, waits for a while, and then kills the whole tree."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills the whole tree, as `kill -9` does. May be called twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def try_port(port: int) -> None:
    """Connects to a port and lets go of it again.

    Clients wait for a second or more after a refused connection; this does not.

    Raises:
        OSError: Nobody listens.
    """
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


async def until(
    attempt: Callable[[], Awaitable[object]], server: Server, *, seconds: float = 120.0
) -> None:
    """Repeats `attempt` until it raises nothing.

    Raises:
        StartError: The server has ended, or it takes too long.
    """
    deadline = time.monotonic() + seconds
    while True:
        server.check()
        try:
            await attempt()
        except Exception as error:
            if time.monotonic() > deadline:
                raise StartError(f"not ready after {seconds:g} seconds: {error!r}") from error
            await asyncio.sleep(0.02)
        else:
            return


def resident_mib(pids: Sequence[int]) -> float:
    """The resident memory of processes and all of their descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    pages, waiting = 0, list(pids)
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, ())
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * _PAGE_BYTES / (1 << 20)
