"""The HTTP port, with a made-up broker behind it; and metrics as Prometheus reads them."""

import re

import pytest
from aiohttp.test_utils import TestClient, TestServer

from broker_rig import run
from ister.broker.http import format_metrics, make_application
from ister.broker.security.guard import Guard
from ister.clock import SystemClock
from ister.config import load_config
from ister.metadata.memory import MemoryMetadata
from ister.metrics import METRICS, Metrics
from security_rig import GuardRig

# A line of Prometheus' text form, version 0.0.4.
_SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{quantile="[0-9.]+"\})? (-?[0-9.e+-]+|NaN)')


class Health:
    def __init__(self, is_ready=True):
        self.is_ready = is_ready

    def report(self):
        return {"ready": self.is_ready, "reasons": [] if self.is_ready else ["not yet"]}


async def asked(application, path, **more):
    async with TestClient(TestServer(application)) as client:
        response = await client.get(path, **more)
        return response.status, await response.text(), response.headers


def open_guard():
    return Guard.open(load_config(None, {}), MemoryMetadata(), clock=SystemClock())


@pytest.mark.parametrize(
    ("path", "is_ready", "status", "text"),
    [
        ("/live", False, 200, "live\n"),
        ("/ready", False, 503, "not ready\n"),
        ("/ready", True, 200, "ready\n"),
        ("/health", True, 200, '{"ready": true, "reasons": []}'),
        ("/health", False, 503, '{"ready": false, "reasons": ["not yet"]}'),
        ("/nothing", True, 404, "404: Not Found"),
    ],
)
def test_what_is_answered(path, is_ready, status, text):
    application = make_application(Health(is_ready), Metrics(), open_guard())
    assert run(asked(application, path))[:2] == (status, text)


def test_metrics_are_told():
    metrics = Metrics()
    metrics.count("broker.messages_in_total", 7)
    status, text, headers = run(
        asked(make_application(Health(), metrics, open_guard()), "/metrics")
    )
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert "\nister_broker_messages_in_total 7\n" in text


def test_metrics_need_the_right_to_look_once_there_are_rights(tmp_path):
    with GuardRig(tmp_path) as rig:
        rig.allow("alice", "admin")

        def ask(path, **more):
            application = make_application(Health(), Metrics(), rig.guard)
            return run(asked(application, path, **more))[0]

        assert ask("/metrics") == 401
        assert ask("/metrics", headers=rig.bearer("bob")) == 403
        assert ask("/metrics", headers=rig.bearer("alice")) == 200
        # Whoever starts brokers need not say who they are.
        assert ask("/live") == ask("/ready") == 200


# -- Prometheus' text form --------------------------------------------------------------------


def filled():
    """Metrics, each with a value."""
    metrics = Metrics()
    for metric in METRICS:
        if metric.kind == "counter":
            metrics.count(metric.name, 3)
        elif metric.kind == "histogram":
            for value in (0.001, 0.5, 2.0):
                metrics.observe(metric.name, value)
        else:
            metrics.register_gauge(metric.name, lambda: 5)
    return metrics


def test_every_metric_is_there_with_its_type_and_its_help():
    lines = format_metrics(filled()).splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE "))
    helps = {line.split()[2] for line in lines if line.startswith("# HELP ")}
    names = {"ister_" + metric.name.replace(".", "_") for metric in METRICS}
    assert set(types) == helps == names
    assert set(types.values()) <= {"counter", "gauge", "summary"}


def test_every_line_is_one_that_prometheus_reads():
    text = format_metrics(filled())
    assert text.endswith("\n")
    seen = set()
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.match(r"# (HELP|TYPE) [a-zA-Z_:][a-zA-Z0-9_:]* .+", line), line
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample, line
        float(sample[3])
        assert (sample[1], sample[2]) not in seen, f"twice: {line}"
        seen.add((sample[1], sample[2]))
    assert len(seen) > len(METRICS)


def test_prometheus_own_parser_reads_it():
    parser = pytest.importorskip("prometheus_client.parser")
    families = {f.name: f for f in parser.text_string_to_metric_families(format_metrics(filled()))}
    messages = families["ister_broker_messages_in"]
    assert messages.type == "counter"
    assert [sample.value for sample in messages.samples] == [3.0]
    summaries = [f for f in families.values() if f.type == "summary"]
    assert summaries
    for family in summaries:
        counts = [s.value for s in family.samples if s.name.endswith("_count")]
        quantiles = [s.labels["quantile"] for s in family.samples if "quantile" in s.labels]
        assert counts == [3.0]
        assert quantiles[:2] == ["0.5", "0.99"]
