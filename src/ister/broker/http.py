"""The HTTP port: whether the broker is there, whether it is ready, and its metrics.

- `/live` is 200 while the process runs;
- `/ready` is 200 once every topic is recovered, and 503 before that and while it ends;
- `/health` is the same with reasons, as JSON;
- `/metrics` has all metrics in Prometheus' text form.

Those who ask are few and quick. So connections are few as well: the oldest goes when there are too
many, and each goes after a while, whatever it is doing. One that sends a byte now and then harms
nobody.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from typing import Any, Final, Protocol

from aiohttp import web

from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.http_guard import http_guard
from ister.broker.security.rights import Permission
from ister.metrics import METRICS, Metrics

__all__ = ["Connections", "Health", "format_metrics", "make_application"]

_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")
CONNECTIONS_MAX: Final = 256
CONNECTION_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 5.0
_QUANTILES: Final = {"p50": "0.5", "p99": "0.99", "p999": "0.999"}


class Health(Protocol):
    """What the port tells."""

    @property
    def is_ready(self) -> bool:
        """Whether clients should come."""
        ...

    def report(self) -> dict[str, Any]:
        """How things are, with reasons."""
        ...


def make_application(health: Health, metrics: Metrics, guard: Guard) -> web.Application:
    """What the port serves."""

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def ready(_: web.Request) -> web.Response:
        is_ready = health.is_ready
        return web.Response(text="ready\n" if is_ready else "not ready\n", status=_status(is_ready))

    async def report(_: web.Request) -> web.Response:
        return web.json_response(health.report(), status=_status(health.is_ready))

    async def show_metrics(_: web.Request) -> web.Response:
        guard.check(current_principal(), Permission.LOOKUP)
        return web.Response(text=format_metrics(metrics), content_type="text/plain")

    application = web.Application(middlewares=[http_guard(guard)])
    application.add_routes(
        [
            web.get("/live", live),
            web.get("/ready", ready),
            web.get("/health", report),
            web.get("/metrics", show_metrics),
        ]
    )
    return application


class Connections:
    """The port itself, with few connections that do not last; see the module header."""

    def __init__(
        self,
        runner: web.AppRunner,
        *,
        count_max: int = CONNECTIONS_MAX,
        seconds: float = CONNECTION_SECONDS,
    ) -> None:
        """Serves what `runner` has been set up with.

        Args:
            runner: Set up already; its clean-up comes after `close`.
            count_max: One more than this ends the oldest.
            seconds: How long a connection lasts.
        """
        server = runner.server
        assert server is not None  # noqa: S101 - for mypy: it has been set up
        self._server = server
        self._count_max = count_max
        self._seconds = seconds
        self._since: dict[Any, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self._listening: asyncio.Server | None = None

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None = None) -> int:
        """Listens; returns the port.

        Raises:
            OSError: The port is taken.
        """
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._accept, host, port, ssl=context)
        self._looking = loop.create_task(self._look())
        found: int = self._listening.sockets[0].getsockname()[1]
        return found

    def _accept(self) -> Any:  # noqa: ANN401 - a protocol of aiohttp's
        connections = self._server.connections
        for oldest in connections[: max(0, len(connections) - self._count_max + 1)]:
            oldest.force_close()
        accepted = self._server()
        self._since[accepted] = asyncio.get_running_loop().time()
        return accepted

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._seconds))
            now, since = loop.time(), self._since
            self._since = {one: since.get(one, now) for one in self._server.connections}
            for one, begun in self._since.items():
                if begun + self._seconds < now:
                    one.force_close()

    async def close(self) -> None:
        """Accepts nobody any more; those connected are the runner's."""
        if self._listening is not None:
            self._listening.close()
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking


def _status(is_ready: bool) -> int:
    return 200 if is_ready else 503


def format_metrics(metrics: Metrics) -> str:
    """All metrics in Prometheus' text form."""
    values = metrics.snapshot()
    lines: list[str] = []
    for metric in METRICS:
        value = values.get(metric.name)
        if value is None:
            continue
        name = "ister_" + _NAME.sub("_", metric.name)
        kind = "summary" if metric.kind == "histogram" else metric.kind
        lines.append(f"# HELP {name} {metric.description} ({metric.unit})")
        lines.append(f"# TYPE {name} {kind}")
        if isinstance(value, dict):
            for key, quantile in _QUANTILES.items():
                if key in value:
                    lines.append(f'{name}{{quantile="{quantile}"}} {value[key]}')
            lines.append(f"{name}_count {value.get('count', 0)}")
        else:
            lines.append(f"{name} {value}")
    return "\n".join(lines) + "\n"
