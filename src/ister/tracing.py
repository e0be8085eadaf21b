"""Spans for OpenTelemetry, where there is a collector to send them to.

Owns: whether there are spans, how they are made and where they go. Does not own: which work is one;
whoever does the work says so with `span` or `traced_call`.

Off unless `start` finds OpenTelemetry's own variables in the environment. Off, no library is
loaded, calls of the broker are not wrapped, and a `span` is a comparison. Nothing that is done for
each message of a batch or a stream is a span.

A collector that does not answer costs spans, and nothing else: they wait in a bounded queue of
OpenTelemetry's, and a thread of its own sends them. A crash loses those that are not sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, Final

__all__ = ["is_on", "span", "start", "stop", "traced_call"]

_log = logging.getLogger("ister.tracing")

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Asked by every client every few seconds: nobody wants to see those.
_UNTRACED: Final = frozenset({"danube.HealthCheck/HealthCheck"})
_STOP_SECONDS: Final = 2.0
_NOTHING: Final = nullcontext()

_Handler = Callable[[bytes, Any], Awaitable[Any]]


class _Tracing:
    """What there is while spans are made. Everything in it is OpenTelemetry's, and has no types."""

    def __init__(self, service: str, environment: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanKind  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        about = {"service.version": version("ister")}
        if not environment.get("OTEL_SERVICE_NAME"):
            about["service.name"] = service
        self.provider: Any = TracerProvider(resource=Resource.create(about))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer: Any = self.provider.get_tracer("ister", version("ister"))
        self.server: Any = SpanKind.SERVER
        self.extract: Any = TraceContextTextMapPropagator().extract


_tracing: _Tracing | None = None


def is_on() -> bool:
    """Whether spans are made."""
    return _tracing is not None


def start(service: str, environment: Mapping[str, str]) -> None:
    """Makes spans from now on, if the environment says where they go.

    Args:
        service: What this process is called, unless the environment has a name for it.
        environment: That of the process. OpenTelemetry's libraries look at the same variables, and
            take sampling, headers, timeouts and attributes from them.
    """
    global _tracing  # noqa: PLW0603 - of this process
    is_wanted = (
        any(environment.get(name) for name in _ENDPOINTS)
        and environment.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
        and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"
    )
    if not is_wanted or _tracing is not None:
        return
    try:
        _tracing = _Tracing(service, environment)
    except ImportError as error:
        # The variables may be meant for other programs: no reason not to start.
        _log.warning(
            "no traces are sent: pip install 'ister[tracing]'", extra={"error": str(error)}
        )


def stop() -> None:
    """Sends what is left, for as long as a collector takes that answers; spans are off then."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is None:
        return
    # It would try for half a minute to reach a collector that is not there.
    ending = threading.Thread(target=tracing.provider.shutdown, daemon=True)
    ending.start()
    ending.join(_STOP_SECONDS)


def span(name: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Work that takes a while, for the time of the block; an error that ends it is noted."""
    if _tracing is None:
        return _NOTHING
    about = {f"ister.{key}": value for key, value in attributes.items()}
    work: AbstractContextManager[object] = _tracing.tracer.start_as_current_span(
        name, attributes=about
    )
    return work


def traced_call(where: str, handle: _Handler) -> _Handler:
    """A handler of gRPC whose calls are spans, below those of callers; itself if spans are off."""
    if _tracing is None or where in _UNTRACED:
        return handle
    tracing = _tracing
    service, _, method = where.partition("/")
    about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

    async def handle_traced(data: bytes, context: Any) -> Any:  # noqa: ANN401 - gRPC has no types
        caller = tracing.extract(dict(context.invocation_metadata() or ()))
        with tracing.tracer.start_as_current_span(
            where, context=caller, kind=tracing.server, attributes=about
        ):
            return await handle(data, context)

    return handle_traced
