"""The demo with three brokers: pauses are measured, its report shows them, and SQLite will do."""

from demo.cluster import _Topic
from demo.cluster_report import render_cluster
from demo.etcd import SharedMetadata
from demo.serving import BrokerProcess
from demo.terminal import summarise
from ister.config import load_config

_EVIL = '<script>alert("1")</script>'


def figures(**more):
    """As a small demo would give them."""
    return {
        "version": "9.9.9",
        "seed": 7,
        "started_at": "2026-03-20T10:00:00+00:00",
        "machine": "2 cores",
        "messages": 3000,
        "seconds": 61.4,
        "topics": [{"topic": "/default/orders"}],
        "steps": [],
        "left_out": [],
        "failures": [],
        "chain": {"messages": 3000, "seconds": 1.0, "lost": 0, "duplicates": 42},
        "proofs": {"chain": [], "deliveries": [], "sums": []},
        "cluster": {
            "metadata": "etcd",
            "lease_seconds": 4,
            "owners": [{"title": _EVIL, "topics": {"/default/orders": "broker-2"}}],
            "kill": {"broker": "broker-2", "pauses": {"/default/orders": 4.75}},
            "rolling": {
                "seconds": 12.0,
                "restarts": [{"broker": "broker-1", "seconds": 3.0, "pause": 0.625}],
            },
            "samples": [[at / 5, 100 * at, 90 * at] for at in range(20)],
            "marks": [[1.0, "kill -9 broker-2"]],
        },
    } | more


def test_the_report_has_the_figures_and_escapes_them():
    page = render_cluster(figures())
    for words in ("Nothing was lost", "4.8 s", "the lease was 4 s", "0.6 s", "kill -9 broker-2"):
        assert words in page, words
    assert _EVIL not in page
    assert "<svg" in page
    assert "Something is wrong" in render_cluster(figures(failures=["3 lost"]))


def test_the_summary_is_about_the_brokers():
    rows = dict(summarise(figures()))
    assert rows["lost"] == "0 of 3,000 acknowledged messages"
    assert "4.8 s" in rows["kill -9"]
    assert "0.6 s" in rows["rolling restart"]


def test_a_pause_is_a_time_in_which_a_message_waits():
    topic = _Topic("/default/orders", 10)
    topic.begin_pause(0.0)
    topic.record_send(5.0)
    topic.record_answer(6.0)
    assert topic.pause == 1.0, "nothing was asked before"
    topic.record_send(7.0)
    topic.record_send(8.0)
    topic.record_answer(10.0)
    topic.record_answer(10.5)
    assert topic.pause == 3.0
    topic.begin_pause(20.0)
    assert topic.pause == 0.0


def test_without_etcd_brokers_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("demo.etcd.find_etcd", lambda: None)
    shared = SharedMetadata(str(tmp_path))
    assert shared.name == "SQLite"
    settings = shared.start()
    shared.stop()
    configs = []
    for name in ("broker-1", "broker-2"):
        broker = BrokerProcess(str(tmp_path / name), engine="embedded", metadata=settings)
        configs.append(load_config(broker.config).storage)
    one, two = configs
    assert one.metadata == two.metadata
    assert one.cloud == two.cloud
    assert one.wal.dir != two.wal.dir
    assert one.ack == "tiered"
