"""The HTTP port: whether the broker is there, whether it is ready, and its metrics.

- `/live` is 200 while the process runs;
- `/ready` is 200 once every topic is recovered, and 503 before that and while it ends;
- `/health` is the same with reasons, as JSON;
- `/metrics` has all metrics in Prometheus' text form.
"""

from __future__ import annotations

import re
from typing import Any, Final, Protocol

from aiohttp import web

from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.http_guard import http_guard
from ister.broker.security.rights import Permission
from ister.metrics import METRICS, Metrics

__all__ = ["Health", "format_metrics", "make_application"]

_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")
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
