"""The HTTP port: liveness, readiness, health and metrics.

- `/live` is 200 while the process runs;
- `/ready` is 200 once every topic is recovered, and 503 before that and while it ends, with why;
- `/health` is the same with everything that was looked at, as JSON. It is open to everybody, so
  with auth on it names no topic, nor where it is asked for by a name that is not this broker's;
- `/metrics` has all metrics in Prometheus' text form (`observe.prometheus`). With auth off, it
  is refused to whoever asks for it by a name that is not this broker's, like `/api`;
- `/api` is what the dashboard is made of (`ister.broker.http.api`), and `/` the dashboard itself.

Connections are few: beyond the limit the oldest is closed, and one that has sent no whole request
for a while is closed as well, so a slow client harms no other. A request that is whole is answered,
however long that takes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

from aiohttp import web

from ister.base import threads
from ister.broker.http.api import Api
from ister.broker.observe.dashboard import OPEN_PATHS as PAGE_PATHS
from ister.broker.observe.dashboard import add_pages
from ister.broker.observe.health import BrokerHealth
from ister.broker.observe.prometheus import PrometheusMetrics
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.http_guard import OPEN_PATHS, http_guard
from ister.broker.security.rights import Permission

CONNECTIONS_MAX: Final = 256
REQUEST_SECONDS: Final = 60.0
"""Time in which a whole request has to come, from the connection or the answer before it."""
_CLOSE_CHECK_SECONDS: Final = 5.0
_HANDSHAKE_SECONDS: Final = 10.0
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def make_application(
    health: BrokerHealth, metrics: PrometheusMetrics, guard: Guard, api: Api | None = None
) -> web.Application:
    """What the port serves; without an API, no dashboard either."""

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def ready(_: web.Request) -> web.Response:
        if health.is_ready:
            return web.Response(text="ready\n")
        return web.Response(text=f"not ready: {'; '.join(health.reasons)}\n", status=503)

    async def report(request: web.Request) -> web.Response:
        # DNS rebinding: a page of another site may have made its name point here.
        is_asked_here = api is None or api.is_for_us(request)
        report = health.report(names=is_asked_here and not guard.is_on)
        return web.json_response(report, status=200 if report["ready"] else 503)

    async def show_metrics(request: web.Request) -> web.Response:
        if api is not None:
            api.check_host(request)
        guard.check(current_principal(), Permission.LOOKUP)
        text = await metrics.text()
        response = web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})
        # Thousands of series are some megabytes, and much alike.
        response.enable_compression()
        return response

    open_paths = OPEN_PATHS if api is None else OPEN_PATHS | PAGE_PATHS
    application = web.Application(middlewares=[_count_in, http_guard(guard, open_paths=open_paths)])
    application[_REQUESTS], application[_SINCE] = {}, {}
    application.add_routes(
        [
            web.get("/live", live),
            web.get("/ready", ready),
            web.get("/health", report),
            web.get("/metrics", show_metrics),
        ]
    )
    if api is not None:
        api.add_routes(application)
        add_pages(application)
    return application


_REQUESTS: Final[web.AppKey[dict[web.RequestHandler, web.Request]]] = web.AppKey("requests")
"""The request that each connection has made, and that is not answered yet."""
_SINCE: Final[web.AppKey[dict[web.RequestHandler, float]]] = web.AppKey("since")
"""Since when a connection has made no whole request, by the loop's clock."""


@web.middleware
async def _count_in(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    requests = request.app[_REQUESTS]
    requests[request.protocol] = request
    try:
        return await handler(request)
    finally:
        del requests[request.protocol]
        request.app[_SINCE][request.protocol] = asyncio.get_running_loop().time()


class Connections:
    """The port itself, with few connections that do not last; see the module header."""

    def __init__(
        self,
        runner: web.AppRunner,
        *,
        count_max: int = CONNECTIONS_MAX,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Serves what `runner` has been set up with, an application of `make_application`.

        `runner` is set up already, and cleaned up after `close`. One connection more than
        `count_max` ends the oldest.
        """
        server = runner.server
        assert server is not None  # noqa: S101 - for mypy: it has been set up
        assert runner.app is not None  # noqa: S101 - for mypy: as above
        self._server = server
        self._requests, self._since = runner.app[_REQUESTS], runner.app[_SINCE]
        self._count_max = count_max
        self._seconds = seconds
        # Connections in their TLS handshake, the oldest first: aiohttp does not know them yet.
        self._handshakes: dict[asyncio.Transport, asyncio.Task[None]] = {}
        self._closing_overdue: asyncio.Task[None] | None = None
        self._listening: asyncio.Server | None = None

    async def listen(
        self, host: str, port: int, make_context: Callable[[], ssl.SSLContext] | None = None
    ) -> int:
        """Listens; returns the port.

        `make_context` makes the context of each connection; None for plaintext.
        """
        loop = asyncio.get_running_loop()
        accept: Callable[[], asyncio.Protocol] = self._accept
        if make_context is not None:
            accept = partial(_Handshake, partial(self._greet, make_context))
        self._listening = await loop.create_server(accept, host, port)
        self._closing_overdue = loop.create_task(self._close_overdue())
        found: int = self._listening.sockets[0].getsockname()[1]
        return found

    def _make_room(self) -> None:
        """Ends the oldest connections, so that there may be one more."""
        connections = self._server.connections
        excess = len(connections) + len(self._handshakes) - self._count_max + 1
        # Connections whose handshake is not complete are ended first.
        unknown = list(self._handshakes)[: max(0, excess)]
        for transport in unknown:
            del self._handshakes[transport]
            transport.abort()
        oldest = sorted(connections, key=self._is_served)
        for one in oldest[: max(0, excess - len(unknown))]:
            one.force_close()

    def _is_served(self, connection: web.RequestHandler) -> bool:
        """Whether a connection has sent a whole request, which is not answered yet."""
        request = self._requests.get(connection)
        return request is not None and request.content.is_eof()

    def _accept(self) -> web.RequestHandler:
        self._make_room()
        accepted = self._server()
        self._since[accepted] = asyncio.get_running_loop().time()
        return accepted

    def _greet(
        self, make_context: Callable[[], ssl.SSLContext], transport: asyncio.Transport
    ) -> None:
        self._make_room()
        shaking = asyncio.get_running_loop().create_task(
            self._shake_hands(transport, make_context())
        )
        self._handshakes[transport] = shaking

    async def _shake_hands(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        accepted = self._server()
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                transport,
                accepted,
                context,
                server_side=True,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
            if encrypted is not None and not transport.is_closing():
                self._since[accepted] = loop.time()
                accepted.connection_made(encrypted)
        except (OSError, TimeoutError) as error:
            # The traceback and the future that `start_tls` awaits refer to each other, and they
            # keep a buffer of 256 KiB until the garbage collector finds them.
            error.__traceback__ = None
        finally:
            self._handshakes.pop(transport, None)

    async def _close_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_CLOSE_CHECK_SECONDS, self._seconds))
            now = loop.time()
            with threads.guard("ister-http"):
                there = self._server.connections
                for gone in self._since.keys() - there:
                    del self._since[gone]
                for one in there:
                    is_overdue = self._since.setdefault(one, now) + self._seconds < now
                    if is_overdue and not self._is_served(one):
                        one.force_close()

    async def close(self) -> None:
        """Stops listening; the runner closes open connections."""
        if self._listening is not None:
            self._listening.close()
        for transport in list(self._handshakes):
            transport.abort()
        if self._closing_overdue is not None:
            self._closing_overdue.cancel()
            with suppress(asyncio.CancelledError):
                await self._closing_overdue


class _Handshake(asyncio.Protocol):
    """A connection before its TLS handshake; announces itself, and reads nothing."""

    def __init__(self, greet: Callable[[asyncio.Transport], None]) -> None:
        self._greet = greet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for mypy: it is TCP
        transport.pause_reading()
        self._greet(transport)
