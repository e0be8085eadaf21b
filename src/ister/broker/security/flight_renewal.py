"""A Flight server that takes new certificates by being started anew.

Flight reads certificates when it starts, and lets no second server listen on its port. So the old
one ends, with its usual grace for calls under way, and a new one starts on the same port. Clients
find the port closed for a moment, which they take for a broker that restarts: they come again.

Owns: when that happens. Does not own: the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ister.broker.security.tls import ServerTls
from ister.errors import ClosedError

__all__ = ["RenewedFlight"]

_log = logging.getLogger("ister.broker.security.flight_renewal")


class _Server(Protocol):
    @property
    def port(self) -> int: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=_Server)


class RenewedFlight(Generic[S]):
    """Keeps a Flight server's certificates fresh. Thread-safe; its calls block.

    Args:
        start: Makes a server that listens on a port, with the certificates as they are now.
        port: Where; 0 for any free one, which it then keeps.
        tls: The certificates; None if there are none to look after.
    """

    def __init__(self, start: Callable[[int], S], *, port: int, tls: ServerTls | None) -> None:
        self._start = start
        self._port = port
        self._tls = tls
        self._lock = threading.Lock()
        self._server: S | None = None
        self._serial = 0
        self._is_closed = False

    def start(self) -> S:
        """The first server; raises what starting it raises.

        Raises:
            ClosedError: It was closed before.
        """
        with self._lock:
            return self._start_server()

    def renew(self) -> None:
        """Starts the server anew if there are new certificates; raises nothing.

        One that could not be started is tried again with the next call.
        """
        with self._lock:
            if self._tls is None or self._is_closed:
                return
            if self._server is not None:
                if self._tls.material().serial == self._serial:
                    return
                self._server.close()
                self._server = None
            try:
                self._start_server()
            except Exception as error:  # noqa: BLE001 - whatever it is, the broker goes on
                _log.error("Flight could not be started anew", extra={"error": str(error)})

    def close(self) -> None:
        """Ends the server. May be called twice."""
        with self._lock:
            self._is_closed = True
            server, self._server = self._server, None
            if server is not None:
                server.close()

    def _start_server(self) -> S:
        if self._is_closed:
            raise ClosedError("the Flight server was closed")
        # Before the start: files that change meanwhile are then taken the next time.
        serial = 0 if self._tls is None else self._tls.material().serial
        server = self._start(self._port)
        self._server, self._serial, self._port = server, serial, server.port
        return server
