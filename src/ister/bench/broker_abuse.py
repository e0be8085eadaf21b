"""What a stranger's calls cost a broker: memory while it refuses gzip bodies that inflate.

    the gzip bomb   four calls at once on each gRPC port, of half a megabyte that becomes 512 MiB

Owns: the measurement, and as much of HTTP/2 as it takes to send such a call: gRPC's own client
would need all of the 512 MiB to begin with. `measure` is a part of `ister bench broker`.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import zlib
from collections.abc import Iterable
from typing import Final

from ister import threads
from ister.bench.measurement import Run
from ister.limits import MIB

__all__ = ["gzip_bomb", "measure", "resident_mib", "send_call"]

_INFLATED_BYTES: Final = 512 * MIB
_CALLS: Final = 4
_METHODS: Final = (
    ("grpc", "/danube.Discovery/TopicLookup"),
    ("flight", "/arrow.flight.protocol.FlightService/DoAction"),
)
_GROWTH_MIB_MAX: Final = 100.0
_WAIT_SECONDS: Final = 60.0
_SAMPLE_SECONDS: Final = 0.01

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_WINDOW_BYTES: Final = 65_535
_FRAME_BYTES_MAX: Final = 16_384
_HEAD: Final = struct.Struct(">BHBBI")


def measure(run: Run, addresses: dict[str, str], pid: int) -> None:
    """Adds the figure to `run`.

    Args:
        run: Of `ister bench broker`.
        addresses: The ports of the broker that is measured, by their names.
        pid: Its process.
    """
    bomb = gzip_bomb(_INFLATED_BYTES)
    before = highest = resident_mib(pid)
    calls = [
        threads.start("ister-bench-bomb", send_call, addresses[port], method, bomb)
        for port, method in _METHODS
        for _ in range(_CALLS)
    ]
    for call in calls:
        while call.is_alive():
            call.join(_SAMPLE_SECONDS)
            highest = max(highest, resident_mib(pid))
    run.add(
        f"gzip bombs, {_CALLS} calls on each port, 512 MiB each: growth of memory",
        highest - before,
        "MiB",
        at_most=_GROWTH_MIB_MAX,
    )


def resident_mib(pid: int) -> float:
    """The memory that a process has at the moment."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def gzip_bomb(size_bytes: int) -> bytes:
    """So many zeros, as a compressed message of gRPC."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31, 9, zlib.Z_RLE)
    zeros = bytes(MIB)
    packed = b"".join(packer.compress(zeros) for _ in range(size_bytes // MIB)) + packer.flush()
    return struct.pack(">BI", 1, len(packed)) + packed


def send_call(address: str, method: str, message: bytes) -> str:
    """Makes a call with a message that is gzip already; how it has ended, in a word or two."""
    host, _, port = address.rpartition(":")
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-encoding": "gzip",
    }
    with socket.create_connection((host, int(port)), timeout=_WAIT_SECONDS) as connection:
        try:
            return _Call(connection).run(headers, message)
        except OSError as error:
            return f"the connection ended: {error}"


class _Call:
    """One call on a connection of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = connection.makefile("rb")
        self._lock = threading.Lock()
        self._windows = {0: _WINDOW_BYTES, 1: _WINDOW_BYTES}
        self._ended = ""

    def run(self, headers: dict[str, str], message: bytes) -> str:
        self._connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        self._connection.sendall(_frame(_HEADERS, _END_HEADERS, 1, _encode(headers.items())))
        position = 0
        while position < len(message) and not self._ended:
            room = min(_FRAME_BYTES_MAX, *self._windows.values(), len(message) - position)
            if not room:
                self._read()
                continue
            flags = _END_STREAM if position + room == len(message) else 0
            part = message[position : position + room]
            self._connection.sendall(_frame(_DATA, flags, 1, part))
            position += room
            self._windows = {stream: left - room for stream, left in self._windows.items()}
        while not self._ended:
            self._read()
        return self._ended

    def _read(self) -> None:
        """Takes one frame."""
        head = self._received.read(9)
        if len(head) < 9:
            self._ended = "closed"
            return
        high, low, kind, flags, stream = _HEAD.unpack(head)
        content = self._received.read(high << 16 | low)
        if kind == _WINDOW:
            step = struct.unpack(">I", content)[0]
            self._windows[stream] = self._windows.get(stream, 0) + step
        elif kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", content):
                if name == 4:  # the window that streams begin with
                    self._windows[1] += value - _WINDOW_BYTES
            self._connection.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._connection.sendall(_frame(_PING, _ACK, 0, content))
        elif kind == _GOAWAY:
            self._ended = "goaway"
        elif stream == 1 and kind == _RESET:
            self._ended = "reset"
        elif stream == 1 and flags & _END_STREAM:
            self._ended = "answered"


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return _HEAD.pack(len(content) >> 16, len(content) & 0xFFFF, kind, flags, stream) + content


def _encode(headers: Iterable[tuple[str, str]]) -> bytes:
    """Headers as HPACK's plain literals, which every server takes; none is longer than 126."""
    out = bytearray()
    for name, value in headers:
        out += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(out)
