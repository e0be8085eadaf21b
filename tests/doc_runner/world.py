"""A network of its own for the pages: ports that documents name are free in it.

A process holds a network namespace with nothing but loopback in it; whoever is started through
`World.enter` is inside. Where namespaces are not permitted the ports have to be free.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PORTS = (6650, 6651, 9040)

_HOLD = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    name = struct.pack("16sH14s", b"lo", 0, bytes(14))
    flags, = struct.unpack_from("H", fcntl.ioctl(any_socket, 0x8913, name), 16)
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", flags | 1, bytes(14)))
print("up", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class World:
    """Where pages are run.

    Attributes:
        enter: What a command line begins with, to be inside.
        is_private: Whether it has a network of its own.
    """

    enter: tuple[str, ...] = ()
    is_private: bool = False


@contextmanager
def new_world() -> Iterator[World]:
    """A network of its own if that is permitted, else the machine's."""
    for unshare, nsenter in (
        (("unshare", "--net"), ("nsenter",)),
        (
            ("unshare", "--user", "--map-root-user", "--net"),
            ("nsenter", "--user", "--preserve-credentials"),
        ),
    ):
        try:
            holder = subprocess.Popen(
                [*unshare, "--", sys.executable, "-I", "-c", _HOLD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except FileNotFoundError:
            break
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() == "up\n":
                enter = (*nsenter, "--target", str(holder.pid), "--net", "--")
                yield World(enter=enter, is_private=True)
                return
        finally:
            holder.stdin.close()
            holder.stdout.close()
            holder.wait(timeout=60)
    yield World()


def busy_ports() -> list[int]:
    """Which of the documents' ports somebody uses."""
    busy = []
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                busy.append(port)
    return busy
