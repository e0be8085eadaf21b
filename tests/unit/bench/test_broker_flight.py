"""Bulk publishing is measured against a bare server, quickly here."""

import pytest

pytest.importorskip("pyarrow")

from benchmarks import broker_flight
from benchmarks.measurement import Run
from ister.config import load_config
from ister.topic.log import Log
from tests.servers.flight import PUBLISH, FlightTopics


def test_bulk_publishing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_flight, "_ROUNDS", 1)
    with (
        Log(load_config(None, {})) as log,
        FlightTopics(log) as server,
        Run.begin("broker", str(tmp_path), is_quick=True) as run,
    ):
        log.topic(broker_flight._TOPIC, create=True)
        broker_flight.measure(run, server.address)
        assert server.calls == {PUBLISH: 3}
    p50, p99, rate = run.results
    assert (rate.unit, rate.target, rate.target_on) == ("msg/s", 0.6, "ratio")
    assert [(one.target, one.target_on) for one in (p50, p99)] == [(2, "ratio"), (5, "ratio")]
    assert rate.value > 0
    assert rate.limit > 0
    assert rate.met is not None
    assert 0 < p50.value <= p99.value
    assert list(tmp_path.iterdir()) == []
