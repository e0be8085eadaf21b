"""A gRPC client that costs less than the servers it measures: HTTP/2 frames on plain sockets.

    loop = Loop()
    connection = loop.connect("127.0.0.1:6650")
    method = Method("/danube.ProducerService/SendMessage")
    answer = loop.ask(connection, method, request)             # makes a call and waits for it
    connection.call(method, request, on_end=print)             # makes a call; a later turn ends it
    loop.turn(0.1)

gRPC's Python client takes more CPU time for a call than the broker does; this one takes about as
much as a Go client. One thread serves all connections; the frames of a turn are written at once.

Owns: frames, the part of HPACK that they need, flow control in both directions, statuses. The
client asks for a header table of size 0, so that equal trailers are equal bytes: those of a call
that went well are decoded once and compared from then on. A call that does not end with status 0,
a stream that is reset and a connection that ends are errors, raised from `turn`.

Does not own: TLS, compression, messages of more than 16 KiB in a request, trailers that are
continued in a second frame (they are refused), deadlines.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Self

from ister.errors import InvalidRequestError, UnavailableError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW: Final = 4
"""The number of the setting SETTINGS_INITIAL_WINDOW_SIZE."""
WINDOW_BYTES: Final = 65_535
"""The window of a new connection or stream, unless settings say otherwise."""
FRAME_BYTES_MAX: Final = 16_384

_REFUSED: Final = 7
_HEADER_TABLE_SIZE, _STREAMS_MAX = 1, 3
# The largest window that HTTP/2 allows; it is renewed when half of it is used.
_OWN_WINDOW: Final = (1 << 31) - 1
_RECEIVED_AT_ONCE: Final = 1 << 18
_WAIT_SECONDS: Final = 60.0

# Length and kind are one number: a length has 24 bits, and the kind follows.
_HEAD: Final = struct.Struct(">IBI")
_DATA_HEAD: Final = struct.Struct(">IBIBI")
_SIZED: Final = struct.Struct(">BI")
_NUMBER: Final = struct.Struct(">I")
_SETTING: Final = struct.Struct(">HI")

# HPACK's code is canonical: the symbols of each length, in order, are all of it that text needs.
_SYMBOLS: Final = (
    (5, "012aceiost"),
    (6, " %-./3456789=A_bdfghlmnpru"),
    (7, ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, "&*,;XZ"),
    (10, '!"()?'),
    (11, "'+|"),
    (12, "#>"),
    (13, "\0$@[]~"),
    (14, "^}"),
    (15, "<`{"),
)


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Returns a frame."""
    return _HEAD.pack(len(content) << 8 | kind, flags, stream) + content


# -- headers --------------------------------------------------------------------------------


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encodes headers as plain HPACK literals of at most 126 bytes, which every server accepts."""
    out = bytearray()
    for name, value in headers:
        out += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(out)


def decode_headers(block: bytes) -> dict[str, str]:
    """The headers that a server has sent; those whose names are in HPACK's table have none here.

    Raises:
        InvalidRequestError: It refers to a header that was sent before, against what it was asked.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            index, at = _integer(block, at, 7)
            _check_static(index)
            continue
        if first & 0xE0 == 0x20:
            _, at = _integer(block, at, 5)  # the size of the table, which is 0
            continue
        index, at = _integer(block, at, 6 if first & 0x40 else 4)
        _check_static(index)
        name = ""
        if not index:
            name, at = _text(block, at)
        value, at = _text(block, at)
        if name:
            found[name] = value
    return found


def _check_static(index: int) -> None:
    if index > 61:
        raise InvalidRequestError(f"header {index} is not in HPACK's table, and no other was used")


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not block[at - 1] & 0x80:
            return value, at


def _text(block: bytes, at: int) -> tuple[str, int]:
    is_packed = block[at] & 0x80
    size, at = _integer(block, at, 7)
    content = block[at : at + size]
    return (_unpacked(content) if is_packed else content.decode("latin-1")), at + size


def _codes() -> dict[tuple[int, int], str]:
    codes: dict[tuple[int, int], str] = {}
    code, before = 0, 5
    for length, symbols in _SYMBOLS:
        code <<= length - before
        before = length
        for symbol in symbols:
            codes[length, code] = symbol
            code += 1
    return codes


_CODES: Final = _codes()


def _unpacked(content: bytes) -> str:
    out: list[str] = []
    code = length = 0
    for byte in content:
        for bit in range(7, -1, -1):
            code, length = code << 1 | byte >> bit & 1, length + 1
            if (symbol := _CODES.get((length, code))) is not None:
                out.append(symbol)
                code = length = 0
    return "".join(out)


# -- calls ----------------------------------------------------------------------------------


class Method:
    """A method, with the encoded headers that all of its calls share."""

    def __init__(self, path: str) -> None:
        self.path = path
        block = encode_headers(
            (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
            )
        )
        self._head = frame(HEADERS, END_HEADERS, 0, block)[:5]
        self._block = block

    def frames(self, stream: int, message: bytes) -> bytes:
        """Returns the frames of a call whose request is one message."""
        size = len(message)
        data = _DATA_HEAD.pack((size + 5) << 8 | DATA, END_STREAM, stream, 0, size)
        return b"".join((self._head, _NUMBER.pack(stream), self._block, data, message))


class _Call:
    """One call in progress."""

    __slots__ = ("body", "message", "method", "on_end", "on_message")

    def __init__(
        self,
        method: Method,
        message: bytes,
        on_end: Callable[[bytes], None],
        on_message: Callable[[bytes], None] | None,
    ) -> None:
        self.method = method
        self.message = message
        self.on_end = on_end
        self.on_message = on_message
        self.body = b""


class Connection:
    """One connection; made by `Loop.connect`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_WAIT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self.fd: Final = self._socket.fileno()
        self.is_ready = False
        """Whether the server's settings have arrived; calls wait for them."""
        self._stream = 1
        self._calls: dict[int, _Call] = {}
        self._held: deque[_Call] = deque()
        self._rest = b""
        self._out: list[bytes] = [
            PREFACE,
            frame(
                SETTINGS,
                0,
                0,
                _SETTING.pack(_HEADER_TABLE_SIZE, 0) + _SETTING.pack(INITIAL_WINDOW, _OWN_WINDOW),
            ),
            frame(WINDOW, 0, 0, _NUMBER.pack(_OWN_WINDOW - WINDOW_BYTES)),
        ]
        self._window = WINDOW_BYTES
        self._stream_window = WINDOW_BYTES
        self._streams_max = 1 << 31
        # Bytes received since a window was renewed, by stream; 0 is the connection.
        self._received: dict[int, int] = {0: 0}
        self._trailers: set[bytes] = set()

    @property
    def calls(self) -> int:
        """The number of calls in progress, and of those that wait for the server's windows."""
        return len(self._calls) + len(self._held)

    def call(
        self,
        method: Method,
        message: bytes,
        on_end: Callable[[bytes], None],
        on_message: Callable[[bytes], None] | None = None,
    ) -> None:
        """Makes a call; it is written when the turn ends, or by `flush`.

        Args:
            method: Which one.
            message: The request, of less than 16 KiB.
            on_end: Gets the answer's message, which is b"" for a stream. It may make calls.
            on_message: Gets the messages of a stream as they come; a unary call has none.
        """
        if len(message) + 5 > min(FRAME_BYTES_MAX, self._stream_window):
            raise InvalidRequestError(f"a request of {len(message)} bytes does not fit in a frame")
        self._held.append(_Call(method, message, on_end, on_message))
        self._send_held()

    def _send_held(self) -> None:
        while self._held and self.is_ready and len(self._calls) < self._streams_max:
            call = self._held[0]
            size = len(call.message) + 5
            if size > self._window:
                return
            self._held.popleft()
            self._window -= size
            self._calls[self._stream] = call
            if call.on_message is not None:
                self._received[self._stream] = 0
            self._out.append(call.method.frames(self._stream, call.message))
            self._stream += 2

    def flush(self) -> bool:
        """Writes what is queued; returns whether all of it was written."""
        if not self._out:
            return True
        data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
        self._out.clear()
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise UnavailableError(f"the connection ended: {error.strerror}") from error
        if sent < len(data):
            self._out.append(data[sent:])
        return sent == len(data)

    def receive(self) -> None:
        """Reads and handles what has arrived.

        Raises:
            UnavailableError: A call failed, or the connection ended.
        """
        try:
            data = self._socket.recv(_RECEIVED_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            raise UnavailableError(f"the connection ended: {error.strerror}") from error
        if not data:
            raise UnavailableError("the connection ended: the server has closed it")
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= 9:
            size, flags, stream = _HEAD.unpack_from(data, at)
            kind, stop = size & 0xFF, at + 9 + (size >> 8)
            if stop > end:
                break
            content = data[at + 9 : stop]
            if kind == DATA:
                self._take_data(stream, flags, content)
            elif kind == HEADERS:
                if flags & END_STREAM:
                    self._end(stream, flags, content)
            else:
                self._control(kind, flags, stream, content)
            at = stop
        self._rest = data[at:]

    def _take_data(self, stream: int, flags: int, content: bytes) -> None:
        if flags:
            raise UnavailableError(f"a server's frame has flags {flags}: trailers have to follow")
        self._renew(0, len(content))
        call = self._calls[stream]
        call.body += content
        if call.on_message is None:
            return
        self._renew(stream, len(content))
        body, at = call.body, 0
        while len(body) - at >= 5:
            _, size = _SIZED.unpack_from(body, at)
            if len(body) - at - 5 < size:
                break
            call.on_message(body[at + 5 : at + 5 + size])
            at += 5 + size
        call.body = body[at:]

    def _renew(self, stream: int, size: int) -> None:
        used = self._received[stream] + size
        if used > _OWN_WINDOW // 2:
            self._out.append(frame(WINDOW, 0, stream, _NUMBER.pack(used)))
            used = 0
        self._received[stream] = used

    def _end(self, stream: int, flags: int, block: bytes) -> None:
        call = self._calls.pop(stream)
        if block not in self._trailers:
            if flags != END_STREAM | END_HEADERS:
                raise UnavailableError(f"trailers with flags {flags} are not understood")
            headers = decode_headers(block)
            if headers.get("grpc-status") != "0":
                status = headers.get("grpc-status", "none")
                message = headers.get("grpc-message", "")
                raise UnavailableError(f"{call.method.path}: status {status}: {message}")
            self._trailers.add(block)
        self._received.pop(stream, None)
        if self._held:
            self._send_held()
        call.on_end(call.body[5:])

    def _control(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == WINDOW:
            if stream == 0:
                self._window += _NUMBER.unpack(content)[0]
        elif kind == SETTINGS and not flags & ACK:
            for name, value in _SETTING.iter_unpack(content):
                if name == INITIAL_WINDOW:
                    self._stream_window = value
                elif name == _STREAMS_MAX:
                    self._streams_max = value
            self.is_ready = True
            self._out.append(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, 0, content))
        elif kind == GOAWAY:
            raise UnavailableError(f"the server ends the connection: {content[4:]!r}")
        elif kind == RESET:
            (code,) = _NUMBER.unpack(content)
            if code != _REFUSED:
                raise UnavailableError(f"the server has reset a call: {code}")
            # The server did not process it, and gRPC's clients make it again: a server counts a
            # call for a moment longer than its client does. It is retried when another one ends.
            self._held.appendleft(self._calls.pop(stream))
            if self._calls:
                return
        if self._held:
            self._send_held()

    def close(self) -> None:
        """Closes the connection and drops its calls."""
        self._socket.close()


class Loop:
    """Serves the connections of one thread; a context manager that closes them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._blocked: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._connections.values():
            connection.close()
        self._epoll.close()

    def connect(self, address: str) -> Connection:
        """Connects, and waits for the server's settings."""
        connection = Connection(address)
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)
        self.flush(connection)
        while not connection.is_ready:
            self.turn(_WAIT_SECONDS)
        return connection

    def turn(self, seconds: float | None = None) -> None:
        """Waits until something arrives, for at most `seconds`, and handles it.

        Raises:
            UnavailableError: A call failed, or nothing has come for a minute while none was given.
        """
        if seconds is not None:
            # epoll counts in milliseconds; select, on epoll itself, in microseconds.
            select.select((self._epoll,), (), (), max(0.0, seconds))
        events = self._epoll.poll(_WAIT_SECONDS if seconds is None else 0)
        if not events and seconds is None:
            raise UnavailableError(f"the server has not answered for {_WAIT_SECONDS:.0f} s")
        for fd, event in events:
            connection = self._connections[fd]
            if event & ~select.EPOLLOUT:
                connection.receive()
            self.flush(connection)

    def flush(self, connection: Connection) -> None:
        """Writes what a connection has queued, now or as soon as there is room."""
        is_blocked = not connection.flush()
        if is_blocked != (connection.fd in self._blocked):
            (self._blocked.add if is_blocked else self._blocked.discard)(connection.fd)
            self._epoll.modify(
                connection.fd, select.EPOLLIN | (select.EPOLLOUT if is_blocked else 0)
            )

    def ask(self, connection: Connection, method: Method, message: bytes) -> bytes:
        """Makes one call and waits for its answer.

        Raises:
            UnavailableError: It failed.
        """
        answers: list[bytes] = []
        connection.call(method, message, answers.append)
        self.flush(connection)
        while not answers:
            self.turn()
        return answers[0]
