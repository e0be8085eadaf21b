"""What a stranger's calls cost a broker: memory while it refuses gzip bodies that inflate.

    the gzip bomb   four calls at once on each gRPC port, of half a megabyte that becomes 512 MiB

Owns: the measurement, and a call in many frames: gRPC's own client would need all of the 512 MiB to
begin with. `measure` is a part of `benchmarks broker`.
"""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from typing import Final

from benchmarks import http2
from benchmarks.http2 import encode_headers, frame
from benchmarks.measurement import Run, status_kib
from ister.base import threads
from ister.base.limits import KIB, MIB

_INFLATED_BYTES: Final = 512 * MIB
_CALLS: Final = 4
_METHODS: Final = (
    ("grpc", "/danube.Discovery/TopicLookup"),
    ("flight", "/arrow.flight.protocol.FlightService/DoAction"),
)
_GROWTH_MIB_MAX: Final = 100.0
_WAIT_SECONDS: Final = 60.0
_SAMPLE_SECONDS: Final = 0.01
_HEAD: Final = struct.Struct(">BHBBI")


def measure(run: Run, addresses: dict[str, str], pid: int) -> None:
    """Adds the figure to `run`.

    Args:
        run: Of `benchmarks broker`.
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
    """The resident memory of a process."""
    return status_kib("VmRSS", pid) / KIB


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
        self._windows = {0: http2.WINDOW_BYTES, 1: http2.WINDOW_BYTES}
        self._ended = ""

    def run(self, headers: dict[str, str], message: bytes) -> str:
        self._connection.sendall(http2.PREFACE + frame(http2.SETTINGS, 0, 0))
        self._connection.sendall(
            frame(http2.HEADERS, http2.END_HEADERS, 1, encode_headers(headers.items()))
        )
        position = 0
        while position < len(message) and not self._ended:
            room = min(http2.FRAME_BYTES_MAX, *self._windows.values(), len(message) - position)
            if not room:
                self._read()
                continue
            flags = http2.END_STREAM if position + room == len(message) else 0
            part = message[position : position + room]
            self._connection.sendall(frame(http2.DATA, flags, 1, part))
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
        if kind == http2.WINDOW:
            step = struct.unpack(">I", content)[0]
            self._windows[stream] = self._windows.get(stream, 0) + step
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            for name, value in struct.iter_unpack(">HI", content):
                if name == http2.INITIAL_WINDOW:
                    self._windows[1] += value - http2.WINDOW_BYTES
            self._connection.sendall(frame(http2.SETTINGS, http2.ACK, 0))
        elif kind == http2.PING and not flags & http2.ACK:
            self._connection.sendall(frame(http2.PING, http2.ACK, 0, content))
        elif kind == http2.GOAWAY:
            self._ended = "goaway"
        elif stream == 1 and kind == http2.RESET:
            self._ended = "reset"
        elif stream == 1 and flags & http2.END_STREAM:
            self._ended = "answered"
