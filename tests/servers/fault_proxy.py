"""An HTTP/1.1 proxy that misbehaves by rule, in front of an S3 server.

Requests are forwarded byte for byte, with their Host header, so signatures still verify: a client
is given the proxy's address as its endpoint and signs for that. One connection carries one
request: whatever a rule does to it concerns that request alone.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

_CHUNK_BYTES = 64 * 1024


class Action(StrEnum):
    """What happens to a request. All but the last seven never reach the server."""

    SLOW_DOWN = "503 SlowDown"
    INTERNAL_ERROR = "500 InternalError"
    DENIED = "403 AccessDenied"
    OK_WITH_ERROR = "200 with an error in its body"
    RESET = "reset in the middle of the request"
    HANG = "no answer at all"
    LOST_REPLY = "done by the server, and the connection is reset before the answer"
    TRUNCATED = "half of the body, then the end"
    CORRUPTED = "one bit of the body is another one"
    DRIP = "the body byte by byte, with pauses"
    DELAY = "forwarded after a pause"
    NO_BODY = "the head of the answer, and then nothing, with the connection open"
    PASS = "forwarded"


@dataclass
class Rule:
    """Applies `action` to the next `count` requests whose method and path match.

    Rules are tried in their order; the first one that matches and is not used up wins. A path is
    matched with its query string.
    """

    action: Action
    method: str = ".*"
    path: str = ".*"
    count: int | None = 1
    """None: to all of them."""
    skip: int = 0
    """How many matching requests pass first."""
    seconds: float = 0.0
    """The pause of `DELAY`, and between two bytes of `DRIP`."""
    hits: int = 0


@dataclass(frozen=True)
class Request:
    """A request that came in, and what was done with it."""

    method: str
    path: str
    action: Action
    headers: dict[str, str]
    body_bytes: int


class FaultProxy:
    """The proxy; a context manager. `rules` may change while it runs."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = ("127.0.0.1", upstream_port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self.rules: list[Rule] = []
        self.requests: list[Request] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def add(self, action: Action, **settings: object) -> Rule:
        """Puts a rule behind those that there are."""
        rule = Rule(action, **settings)
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forgets all rules and requests."""
        with self._lock:
            self.rules.clear()
            self.requests.clear()

    def count(self, method: str = ".*", path: str = ".*") -> int:
        """How many requests of that kind came in."""
        with self._lock:
            return sum(
                1
                for request in self.requests
                if re.fullmatch(method, request.method) and re.search(path, request.path)
            )

    def __enter__(self) -> FaultProxy:
        self._start(self._accept)
        return self

    def __exit__(self, *details: object) -> None:
        self._stopping.set()
        # Closing a socket wakes nobody who waits in accept; shutting it down does.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    # -- inside -----------------------------------------------------------------------------

    def _start(self, target, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.settimeout(30)
            self._start(self._serve_and_close, client)

    def _serve_and_close(self, client: socket.socket) -> None:
        with self._lock:
            self._open.add(client)
        try:
            self._serve(client)
        except OSError:
            # The client left, or the server did; either is for the client to notice.
            pass
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()

    def _serve(self, client: socket.socket) -> None:
        head, rest = _read_head(client)
        if head is None:
            return
        method, path, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ", 2)
        headers = _headers(head)
        size = int(headers.get("content-length", "0"))
        rule = self._match(method, path)
        action = rule.action if rule else Action.PASS
        with self._lock:
            self.requests.append(Request(method, path, action, headers, size))
        if action is Action.RESET:
            _reset(client)
            return
        body = bytearray(rest)
        while len(body) < size:
            data = client.recv(min(_CHUNK_BYTES, size - len(body)))
            if not data:
                return
            body += data
        if action is Action.HANG:
            self._wait_for_the_end(client)
            return
        refusal = _REFUSALS.get(action)
        if refusal is not None:
            client.sendall(_answer(*refusal, is_head=method == "HEAD"))
            return
        if action is Action.DELAY and rule is not None:
            self._stopping.wait(rule.seconds)
        answer_head, answer = self._forward(head, bytes(body))
        self._reply(client, rule, answer_head, answer)

    def _reply(self, client: socket.socket, rule: Rule | None, head: bytes, answer: bytes) -> None:
        action = rule.action if rule else Action.PASS
        if action is Action.LOST_REPLY:
            _reset(client)
        elif action is Action.TRUNCATED:
            client.sendall(head + answer[: len(answer) // 2])
        elif action is Action.CORRUPTED:
            damaged = bytearray(answer)
            damaged[len(damaged) // 2] ^= 1
            client.sendall(head + damaged)
        elif action is Action.NO_BODY:
            client.sendall(head)
            self._wait_for_the_end(client)
        elif action is Action.DRIP and rule is not None:
            client.sendall(head)
            for position in range(len(answer)):
                if self._stopping.wait(rule.seconds):
                    return
                client.sendall(answer[position : position + 1])
        else:
            client.sendall(head + answer)

    def _match(self, method: str, path: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                if not re.fullmatch(rule.method, method) or not re.search(rule.path, path):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    return None
                if rule.count is None or rule.hits < rule.count:
                    rule.hits += 1
                    return rule
        return None

    def _forward(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """The server's answer, as its head and its body."""
        lines = [
            line
            for line in head.split(b"\r\n")[:-2]
            if not line.lower().startswith((b"connection:", b"expect:"))
        ]
        with socket.create_connection(self._upstream, timeout=30) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            answer = bytearray()
            while data := server.recv(_CHUNK_BYTES):
                answer += data
        end = answer.index(b"\r\n\r\n") + 4
        return bytes(answer[:end]), bytes(answer[end:])

    def _wait_for_the_end(self, client: socket.socket) -> None:
        client.settimeout(None)
        with suppress(OSError):
            client.recv(1)


_REFUSALS = {
    Action.SLOW_DOWN: (503, "Slow Down", "SlowDown", "Please reduce your request rate."),
    Action.INTERNAL_ERROR: (500, "Internal Server Error", "InternalError", "We met an error."),
    Action.DENIED: (403, "Forbidden", "AccessDenied", "Access Denied"),
    Action.OK_WITH_ERROR: (200, "OK", "InternalError", "We met an error. Please try again."),
}


def _answer(status: int, reason: str, code: str, message: str, *, is_head: bool) -> bytes:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>"
        "<RequestId>1</RequestId></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if is_head else head + body


def _read_head(client: socket.socket) -> tuple[bytes | None, bytes]:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        more = client.recv(_CHUNK_BYTES)
        if not more:
            return None, b""
        data += more
    end = data.index(b"\r\n\r\n") + 4
    return bytes(data[:end]), bytes(data[end:])


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def _reset(client: socket.socket) -> None:
    """Ends a connection with RST instead of an orderly end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
