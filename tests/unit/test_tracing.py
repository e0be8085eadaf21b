"""Spans that nobody asked for cost nothing; those that cannot be made are said."""

import logging
import subprocess
import sys

import pytest

from ister import tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture(autouse=True)
def _off_again():
    yield
    tracing.stop()


async def handle(data, context):
    return data


def test_off_nothing_is_wrapped_and_nothing_is_loaded():
    assert not tracing.is_on()
    assert tracing.traced_call("a.B/C", handle) is handle
    with tracing.span("work", topic="/default/t") as nothing:
        assert nothing is None
    assert tracing.span("a") is tracing.span("b")
    script = (
        "import sys; import ister.broker.server, ister.tracing; ister.tracing.start('s', {});"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "True"},
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
    assert tracing.traced_call("a.B/C", handle) is not handle
    # Every client asks for it all the time.
    assert tracing.traced_call("danube.HealthCheck/HealthCheck", handle) is handle
    tracing.stop()
    assert not tracing.is_on()
    tracing.stop()


def test_an_error_goes_through_a_span():
    tracing.start("service", ENDPOINT)
    with pytest.raises(ValueError, match="no"), tracing.span("work"):
        raise ValueError("no")


def test_without_the_library_it_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING, logger="ister"):
        tracing.start("service", ENDPOINT)
    assert not tracing.is_on()
    assert "pip install 'ister[tracing]'" in caplog.text
