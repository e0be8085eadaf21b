"""Spans for OpenTelemetry, where there is a collector to send them to.

Owns: whether there are spans, how they are made and where they go. Does not own: which work is one;
whoever does the work says so with `span` or `traced_call`.

Off unless `start` finds OpenTelemetry's own variables in the environment. Off, nothing of it is
loaded, calls of the broker are not wrapped, and a `span` is a comparison. Nothing that is done for
each message of a batch or a stream is a span.

A collector that does not answer costs spans, and a warning a minute: they wait in a bounded queue
of OpenTelemetry's, and a thread of its own sends them. A crash loses those that are not sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, TypeVar

from ister.errors import IsterError

if TYPE_CHECKING:
    import grpc
    from opentelemetry.trace import Status

_log = logging.getLogger("ister.tracing")

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
# Sent by every client every few seconds: not worth a span.
_UNTRACED: Final = frozenset({"danube.HealthCheck/HealthCheck"})
_STOP_SECONDS: Final = 2.0
_COMPLAINT_SECONDS: Final = 60.0
_NOTHING: Final = nullcontext()

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class _RateLimit(logging.Filter):
    """Lets a complaint through now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this one is let through."""
        if record.created < self._next_at:
            return False
        self._next_at = record.created + _COMPLAINT_SECONDS
        return True


class _Tracing:
    """What there is while spans are made; all of it is OpenTelemetry's."""

    def __init__(self, service: str) -> None:
        from importlib.metadata import version  # noqa: PLC0415 - slow, and not needed otherwise

        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.propagate import extract  # noqa: PLC0415 - an extra, as all of these
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

        about = Resource({"service.version": version("ister")}).merge(Resource.create())
        if str(about.attributes.get("service.name", "")).startswith("unknown_service"):
            about = about.merge(Resource({"service.name": service}))
        # Its own end of the process would wait for a collector that does not answer.
        self.provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self.provider.get_tracer("ister", version("ister"))
        self.server = SpanKind.SERVER
        self.extract = extract
        self._status, self._failed = Status, StatusCode.ERROR

    def failed(self, text: str) -> Status:
        """The status of work that failed."""
        return self._status(self._failed, text)


_tracing: _Tracing | None = None


def is_on() -> bool:
    """Whether spans are made."""
    return _tracing is not None


def start(service: str, environment: Mapping[str, str]) -> None:
    """Makes spans from now on, if the environment says where they go.

    Args:
        service: What this process is called, unless the environment has a name for it.
        environment: That of the process. OpenTelemetry's libraries look at the same variables.
    """
    global _tracing  # noqa: PLW0603 - of this process
    if _tracing is not None or not is_wanted(environment):
        return
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        _log.warning(f"spans are sent as {_PROTOCOL}", extra={"wanted": protocol})
    try:
        _tracing = _Tracing(service)
    except ImportError as error:
        # The variables may be meant for other programs: no reason not to start.
        _log.warning(
            "no traces are sent: pip install 'ister[tracing]'", extra={"error": str(error)}
        )
        return
    except Exception as error:  # noqa: BLE001 - what its libraries make of its variables
        _log.warning("no traces are sent", extra={"error": str(error)})
        return
    _take_complaints()


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Returns whether the environment turns tracing on, with an endpoint for spans."""
    exporters = (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")
    return (
        any(environment.get(name) for name in _ENDPOINTS)
        and "otlp" in (exporter.strip() for exporter in exporters)
        and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
    )


def _take_complaints() -> None:
    """Has OpenTelemetry's own log go where ours goes, in the same form, and not too often."""
    complaints, ours = logging.getLogger("opentelemetry"), logging.getLogger("ister")
    if ours.handlers and not complaints.handlers:
        seldom = _RateLimit()
        for handler in ours.handlers:
            complaints.addHandler(_ForwardingHandler(handler, seldom))
        complaints.propagate = False


class _ForwardingHandler(logging.Handler):
    """Gives records to another handler, those that a filter lets through."""

    def __init__(self, handler: logging.Handler, let_through: logging.Filter) -> None:
        super().__init__(logging.WARNING)
        self._handler = handler
        self.addFilter(let_through)

    def emit(self, record: logging.LogRecord) -> None:
        """Hands one on."""
        self._handler.handle(record)


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
    complaints = logging.getLogger("opentelemetry")
    for handler in [one for one in complaints.handlers if isinstance(one, _ForwardingHandler)]:
        complaints.removeHandler(handler)
        complaints.propagate = True


def span(name: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Work that takes a while, for the time of the block; an error that ends it is noted."""
    if _tracing is None:
        return _NOTHING
    about = {f"ister.{key}": value for key, value in attributes.items()}
    work: AbstractContextManager[object] = _tracing.tracer.start_as_current_span(
        name, attributes=about
    )
    return work


def traced_call(
    where: str,
    call: Callable[[_Request, grpc.aio.ServicerContext], Awaitable[_Answer]],
    status_of: Callable[[IsterError], grpc.StatusCode],
) -> Callable[[_Request, grpc.aio.ServicerContext], Awaitable[_Answer]]:
    """A method of a service whose calls are spans, below those of callers; itself if spans are off.

    Args:
        where: Its service and its name.
        call: The method: of a request and gRPC's context.
        status_of: gRPC's status for what it raises.
    """
    if _tracing is None or where in _UNTRACED:
        return call
    tracing = _tracing
    service, _, method = where.partition("/")
    about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

    async def call_traced(request: _Request, context: grpc.aio.ServicerContext) -> _Answer:
        caller = tracing.extract(dict(context.invocation_metadata() or ()))
        with tracing.tracer.start_as_current_span(
            where,
            context=caller,
            kind=tracing.server,
            attributes=about,
            record_exception=False,
            set_status_on_exception=False,
        ) as work:
            try:
                return await call(request, context)
            except IsterError as error:
                # A refusal is an answer: its reason says it all.
                status = status_of(error)
                work.set_attribute("rpc.grpc.status_code", status.value[0])
                work.set_status(tracing.failed(f"{status.name}: {error.message}"))
                raise
            except Exception as error:
                work.record_exception(error)
                work.set_status(tracing.failed(type(error).__name__))
                raise

    return call_traced
