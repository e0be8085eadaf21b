"""What a message costs is measured for each engine, quickly here. No times are judged."""

import importlib.util

import pytest

pytest.importorskip("grpc")

from benchmarks import broker_engines, broker_servers, http2_client
from benchmarks.broker_servers import bare_server, why_not
from benchmarks.measurement import Run
from ister.errors import UnavailableError

FIGURES = {
    # name: target, what it is on
    "64 sends at once, synced": {"grpcio": (0.75, "ratio"), "native": (0.6, "ratio")},
    "64 sends at once, synced, in all": {"native": (12_000, "value")},
    "64 sends at once, synced, beside batches": {"native": (None, None)},
    "64 sends at once, synced: broker CPU a send": {
        "grpcio": (300, "value"),
        "native": (90, "value"),
    },
    "one send at a time, synced: p50": {"grpcio": (None, None), "native": (0.45, "value")},
    "one send at a time, synced: broker CPU a send": {
        "grpcio": (None, None),
        "native": (250, "value"),
    },
    "one send at a time, memory: p50": {"grpcio": (1.4, "ratio"), "native": (1.4, "ratio")},
    "one send at a time, memory: broker CPU a send": {
        "grpcio": (None, None),
        "native": (None, None),
    },
    **{
        f"one send at a time, {level}: {figure}": {"grpcio": (None, None), "native": (None, None)}
        for level in ("written", "tiered")
        for figure in ("p50", "broker CPU a send")
    },
    **{
        f"one send at a time, {level}: p99": {"grpcio": (None, None), "native": (None, None)}
        for level in ("memory", "written", "synced", "tiered")
    },
    "consume, an ack for each, 16 under way": {"grpcio": (None, None), "native": (None, None)},
    "consume, an ack for each, 16 under way: broker CPU a message": {
        "grpcio": (None, None),
        "native": (120, "value"),
    },
    "send, deliver and ack at 1000 msg/s, synced: p50": {
        "grpcio": (1.5, "value"),
        "native": (1.5, "value"),
    },
    "send, deliver and ack at 1000 msg/s, synced: p99": {
        "grpcio": (6, "value"),
        "native": (6, "value"),
    },
    "send, deliver and ack at 1000 msg/s, synced: broker CPU a message": {
        "grpcio": (800, "value"),
        "native": (350, "value"),
    },
    "send, deliver and ack at 5000 msg/s, synced: held": {"native": (4950, "value")},
}


@pytest.mark.nightly
@pytest.mark.parametrize("engine", broker_servers.ENGINES)
def test_quick_run_has_every_figure_beside_its_limit(engine, tmp_path, monkeypatch):
    if (reason := why_not(engine)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(broker_engines, "ENGINES", (engine,))
    with Run.begin("broker", str(tmp_path), is_quick=True) as run:
        broker_engines.measure(run)
    found = {result.name: result for result in run.results}
    expected = {
        f"{engine}: {name}": by_engine[engine]
        for name, by_engine in FIGURES.items()
        if engine in by_engine
    }
    assert {name: (one.target, one.target_on) for name, one in found.items()} == expected
    for result in run.results:
        assert result.value > 0
        # Processor time has steps of 10 ms: a quick run of a cheap handler may have none.
        assert result.limit > 0 or result.unit == "us"
    assert run.skipped == []


def test_engine_that_is_missing_is_skipped_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_engines, "ENGINES", ("native",))
    monkeypatch.setattr(broker_engines, "why_not", lambda engine: "it is not here")
    with Run.begin("broker", str(tmp_path), is_quick=True) as run:
        broker_engines.measure(run)
    assert run.as_json()["skipped"] == [{"name": "native: all figures", "why": "it is not here"}]
    assert run.results == []


def test_package_that_is_missing_is_the_reason(monkeypatch):
    monkeypatch.setattr(broker_servers, "load_config", lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pygrpc-native is not installed" in why_not("native")
    assert why_not("grpcio") is None


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["grpcio", "native"])
def test_empty_handlers_serve_every_workload(engine):
    if engine == "native":
        pytest.importorskip("pygrpc_native")
    with bare_server(100, engine) as bare:
        address, pid = bare["grpc"], bare["pid"]
        assert http2_client.send(address, producers=3, count=50, warm_up=0, pid=pid).count == 50
        # Only the prepared messages, and all of them.
        assert http2_client.consume(address, count=100, fill=False).count == 100
        found = http2_client.flow(address, rate=1000, seconds=0.1, topic="/default/other")
        assert len(found.times_ms) == 100


def test_batches_are_answered():
    pytest.importorskip("pygrpc_native")
    with bare_server(0, "native-batches") as bare:
        assert http2_client.send(bare["grpc"], producers=8, count=50, warm_up=0).count == 50


def test_server_that_does_not_start_is_an_error(capfd):
    with pytest.raises(UnavailableError, match="did not start"), bare_server(0, "none"):
        pass
    assert "none" in capfd.readouterr().err
