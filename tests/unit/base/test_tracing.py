"""Spans that nobody asked for cost nothing; those that cannot be made are said."""

import io
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from ister.base import logs, tracing
from tests.servers.collector import Collector
from tests.support.cases import each

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture(autouse=True)
def _off_again():
    """A thread that goes on trying to send spans would be in the way of later tests."""
    yield
    tracing.stop()
    left = [one.name for one in threading.enumerate() if one.name.startswith("Otel")]
    assert not left


async def call(request, context):
    return request


def test_off_nothing_is_wrapped_and_nothing_is_loaded():
    assert not tracing.is_on()
    assert tracing.traced_call("a.B/C", call, None) is call
    with tracing.span("work", topic="/default/t") as nothing:
        assert nothing is None
    assert tracing.span("a") is tracing.span("b")
    script = (
        "import sys; import ister.broker.server; from ister.base import tracing;"
        "tracing.start('s', {});"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@each(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": " True"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_SERVICE_NAME": "mine"},
    ],
)
def test_it_stays_off_unless_there_is_somewhere_to_send_spans_to(environment):
    tracing.start("service", environment)
    assert not tracing.is_on()


def test_it_is_on_with_an_endpoint_and_off_when_it_ends():
    tracing.start("service", ENDPOINT)
    assert tracing.is_on()
    tracing.start("another", ENDPOINT)
    assert tracing.traced_call("a.B/C", call, None) is not call
    # Every client asks for it all the time.
    assert tracing.traced_call("danube.HealthCheck/HealthCheck", call, None) is call
    tracing.stop()
    assert not tracing.is_on()
    tracing.stop()


@each(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": ""},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "console, otlp"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "false"},
    ],
)
def test_it_is_on_where_there_is(environment):
    tracing.start("service", environment)
    assert tracing.is_on()


def test_variables_that_make_no_sense_are_said_and_harm_nobody(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")  # less than a batch
    with caplog.at_level(logging.WARNING, logger="ister"):
        tracing.start("service", ENDPOINT)
    assert not tracing.is_on()
    assert "no traces are sent" in caplog.text


def test_a_protocol_that_is_not_spoken_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="ister"):
        tracing.start("service", {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert "spans are sent as http/protobuf" in caplog.text


def test_complaints_are_in_our_log_and_seldom():
    written = io.StringIO()
    logs.configure(stream=written)
    tracing.start("service", ENDPOINT)
    for number in range(3):
        logging.getLogger("opentelemetry.exporter").warning("no answer %d", number)
    (line,) = written.getvalue().splitlines()
    assert json.loads(line)["event"] == "no answer 0"
    tracing.stop()
    complaints = logging.getLogger("opentelemetry")
    assert (complaints.handlers, complaints.propagate) == ([], True)


def test_an_error_goes_through_a_span(monkeypatch):
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        tracing.start("service", os.environ)
        with pytest.raises(ValueError, match="no"), tracing.span("work"):
            raise ValueError("no")
        tracing.stop()
        (span,) = collector.named("work")
    assert span.status.code == span.status.STATUS_CODE_ERROR


def test_without_the_library_it_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING, logger="ister"):
        tracing.start("service", ENDPOINT)
    assert not tracing.is_on()
    assert "pip install 'ister[tracing]'" in caplog.text
