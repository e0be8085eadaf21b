"""Bulk publishing is measured against a bare server, quickly here."""

import pytest

pytest.importorskip("pyarrow")

from ister.bench import broker_flight
from ister.bench.measurement import Run
from ister.config import load_config
from ister.topic.log import Log
from servers.flight import PUBLISH, FlightTopics


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
    rate, p50, p99 = run.results
    assert (rate.unit, rate.target, rate.target_on) == ("msg/s", 200_000, "value")
    assert rate.value > 0
    assert rate.limit > 0
    assert rate.met is not None
    assert 0 < p50.value <= p99.value
    assert list(tmp_path.iterdir()) == []
