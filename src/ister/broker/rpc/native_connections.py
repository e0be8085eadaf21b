"""Limits the connections of the native engine, which has no limits of its own.

The engine accepts connections in Rust and gives out no handles. But its sockets are files of this
process: a thread lists them once a second, and closes those that are too many, silent or idle.

    too many    the newest beyond `count_max` are closed; the list is read at once when so many
                files were opened since the last time that there may be too many
    silent      closed if the HTTP/2 preface has not arrived within `silent_seconds`
    idle        asked to close (GOAWAY) if nothing has arrived for `idle_seconds`, and closed if
                they stay; a client with calls in progress answers the engine's pings: it is not
                idle

Owns: closing connections of one listening port. Does not own: calls and their limits, pings.

Invariants: only a TCP socket whose local port is the listening one is ever written to or ended, and
only through a duplicate of its descriptor that was checked after it was made. So a descriptor that
was closed and given to another file meanwhile is left alone. No duplicate outlives its check: it
would keep a connection open that the engine has closed.

Nothing here outlives the process.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ister.base import threads
from ister.base.clock import Clock, SystemClock

_FILES: Final = "/proc/self/fd"
_THREAD: Final = "ister-rpc-connections"
_SCAN_SECONDS: Final = 1.0
_PROBE_SECONDS: Final = 0.1
# A client that got a GOAWAY may still have a call on its way; pings come more often than this.
_LEAVE_SECONDS: Final = 30.0
# Descriptors kept for when the process has no others: listing takes one, a duplicate another.
_SPARES: Final = 3

# The preface of HTTP/2 and an empty SETTINGS frame: the least that a client can begin with.
_OPENING_BYTES: Final = 24 + 9
# GOAWAY for the highest stream id: the client finishes its calls and opens no more here.
_GOAWAY: Final = struct.pack(">I", 8)[1:] + struct.pack(">BBIII", 7, 0, 0, 2**31 - 1, 0)

# Of the kernel's `struct tcp_info`: `tcpi_last_data_recv` in milliseconds, `tcpi_bytes_received`.
_TCP_INFO_BYTES: Final = 136
_LAST_RECEIVED: Final = struct.Struct("@52xI")
_RECEIVED: Final = struct.Struct("@128xQ")


@dataclass(slots=True)
class _Connection:
    inode: int
    check_at: float
    is_leaving: bool = False


class ConnectionLimits:
    """Closes connections of one port that are too many, silent or idle. Linux only."""

    def __init__(
        self,
        port: int,
        *,
        count_max: int,
        silent_seconds: float = 10.0,
        idle_seconds: float = 60.0,
        leave_seconds: float = _LEAVE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Limits the connections that were accepted on `port`, once `start` is called.

        Args:
            port: The listening port.
            count_max: The most connections.
            silent_seconds: Time in which a connection has to send the HTTP/2 preface.
            idle_seconds: Time without a byte after which a connection gets a GOAWAY.
            leave_seconds: Time without a byte after which one that got a GOAWAY is closed. Longer
                than the time between the engine's pings.
            clock: Measures these times.
        """
        self._port = port
        self._count_max = count_max
        self._silent_seconds = silent_seconds
        self._idle_seconds = idle_seconds
        self._leave_seconds = leave_seconds
        self._clock: Clock = clock or SystemClock()
        self._connections: dict[int, _Connection] = {}
        # Sockets of this process that are not connections of the port: descriptor to inode.
        self._others: dict[int, int] = {}
        # The lowest free descriptor at which there may be too many connections.
        self._scan_from = 0
        self._spares: list[int] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def count(self) -> int:
        """Connections that the last scan found."""
        return len(self._connections)

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threads.start(_THREAD, self._watch)

    def close(self) -> None:
        """Ends the thread; connections stay open."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        scan_at = 0.0
        try:
            while not self._ending.wait(_PROBE_SECONDS):
                with threads.guard(_THREAD):
                    now = self._clock.monotonic()
                    if now >= scan_at or self._may_be_too_many():
                        scan_at = now + _SCAN_SECONDS
                        self.scan()
        finally:
            self._release_spares()

    def _may_be_too_many(self) -> bool:
        """Whether so many files were opened since the last scan that `count_max` may be passed.

        A new file gets the lowest free descriptor, so every lower one is open.
        """
        while len(self._spares) < _SPARES:
            try:
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break
        try:
            lowest = os.dup(self._spares[0])
        except (OSError, IndexError):
            self._release_spares()
            return True
        os.close(lowest)
        return lowest >= self._scan_from

    def _release_spares(self) -> None:
        while self._spares:
            os.close(self._spares.pop())

    def scan(self) -> None:
        """Checks every connection that is new or due, and closes those beyond a limit."""
        now = self._clock.monotonic()
        files = os.listdir(_FILES)
        sockets = {}
        for fd in map(int, files):
            with suppress(OSError):  # closed meanwhile
                found = os.fstat(fd)
                if stat.S_ISSOCK(found.st_mode):
                    sockets[fd] = found.st_ino
        known = {fd: one for fd, one in self._connections.items() if sockets.get(fd) == one.inode}
        others = {fd: inode for fd, inode in self._others.items() if sockets.get(fd) == inode}
        for fd in sorted(sockets.keys() - known.keys() - others.keys()):
            inode = sockets[fd]
            with suppress(OSError):  # closed meanwhile, or out of descriptors: the next scan tries
                if self._is_connection(fd, inode):
                    known[fd] = _Connection(inode, check_at=now + self._silent_seconds)
                else:
                    others[fd] = inode
        self._connections, self._others = known, others
        excess = list(known)[self._count_max :]
        for fd in excess:
            self._shut_down(fd)
        for fd, one in list(known.items()):
            if now >= one.check_at:
                self._check(fd, one, now)
        self._scan_from = len(files) - len(excess) + self._count_max - len(known)

    def _is_connection(self, fd: int, inode: int) -> bool:
        with _duplicate(fd, inode) as one:
            return (
                one.family in (socket.AF_INET, socket.AF_INET6)
                and one.type == socket.SOCK_STREAM
                and one.getsockname()[1] == self._port
                and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            )

    def _check(self, fd: int, connection: _Connection, now: float) -> None:
        """Closes a connection, or sets when it is checked again."""
        with suppress(OSError), _duplicate(fd, connection.inode) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            quiet = _LAST_RECEIVED.unpack_from(info)[0] / 1000
            if _RECEIVED.unpack_from(info)[0] < _OPENING_BYTES:
                self._shut_down(fd)
            elif connection.is_leaving:
                if quiet >= self._leave_seconds:
                    self._shut_down(fd)
                connection.check_at = now + self._leave_seconds
            elif quiet >= self._idle_seconds:
                # Nothing is half written: pings would have found out a client that does not read.
                one.send(_GOAWAY, socket.MSG_DONTWAIT)
                connection.is_leaving = True
                connection.check_at = now + self._leave_seconds
            else:
                connection.check_at = now + self._idle_seconds - quiet

    def _shut_down(self, fd: int) -> None:
        """Shuts a connection down; the engine notices that and closes its descriptor."""
        connection = self._connections.pop(fd)
        with suppress(OSError), _duplicate(fd, connection.inode) as one:
            one.shutdown(socket.SHUT_RDWR)


def _duplicate(fd: int, inode: int) -> socket.socket:
    """Returns a socket on a duplicate of a descriptor."""
    duplicate = os.dup(fd)
    if os.fstat(duplicate).st_ino != inode:
        os.close(duplicate)
        raise OSError(f"descriptor {fd} is another file by now")
    return socket.socket(fileno=duplicate)
