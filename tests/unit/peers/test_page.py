"""The page of `make peers`: its figures, who is ahead in them, and what is missing."""

from xml.etree import ElementTree

from benchmarks.peers.page import Row, ahead, page, plot
from tests.support.cases import each

MACHINE = {
    "system": "2 cores",
    "date": "2026-01-31",
    "load": (0.25, 1.5),
    "minutes": 12.3,
    "scale": 1,
    "bare_per_second": 5123.4,
    "bare_p50_ms": 0.171,
}
FACTS = {
    "server": "Server 1.2.3",
    "client": "client 4.5.6",
    "durability": "`sync: yes`",
    "settings": "as it comes",
    "consuming": "one by one",
    "caveats": ["It is held in memory."],
}


def figures(**changed: float) -> dict:
    rates = dict.fromkeys(("one", "many", "batched", "consume", "replay"), 1000.0)
    rates.update({case: value for case, value in changed.items() if case in rates})
    others = {case: value for case, value in changed.items() if case not in rates}
    return {
        **{case: {"value": value, "spread": 0.1} for case, value in rates.items()},
        "one_p50_ms": 0.2,
        "tail_p50_ms": 0.5,
        "tail_p99_ms": 2.0,
        "idle_mib": 20.0,
        "after_mib": 200.0,
        "restart_seconds": 1.5,
        "lost": 0,
        "stored": 1 << 20,
        **others,
    }


def row(name: str, durability: str = "synced", **changed: float) -> Row:
    return Row(
        name=name,
        title=name.title(),
        durability=durability,
        facts=FACTS,
        figures=figures(**changed),
    )


def test_peers_that_are_ahead_are_named_with_how_far():
    rows = [
        row("ister-flight", many=2000),
        row("ister-danube", many=900),
        row("kafka", many=5000),
        row("redis", many=1999),
        row("nats", many=2400),
    ]
    best, peers = ahead(rows, "synced", "many")
    assert best.name == "ister-flight"
    assert [(peer.name, factor) for peer, factor in peers] == [("kafka", 2.5), ("nats", 1.2)]
    text = page(rows, MACHINE)
    assert "| 64 at once, synced | Ister-Flight: 2,000 | Kafka (2.5 ×), Nats (1.2 ×) |" in text


@each("case", ["tail_p50_ms", "restart_seconds", "idle_mib", "one_p50_ms"])
def test_of_times_and_memory_the_smaller_is_ahead(case):
    rows = [row("ister-flight", **{case: 4.0}), row("redis", **{case: 2.0}), row("nats")]
    rows[2].figures[case] = 5.0
    best, peers = ahead(rows, "synced", case)
    assert (best.name, [(peer.name, factor) for peer, factor in peers]) == (
        "ister-flight",
        [("redis", 2.0)],
    )


def test_what_has_no_network_to_cross_is_not_ranked():
    rows = [row("ister-open", many=99_000), row("ister-flight", many=10), row("kafka", many=20)]
    best, peers = ahead(rows, "synced", "many")
    assert (best.name, [peer.name for peer, _ in peers]) == ("ister-flight", ["kafka"])
    assert "99,000" not in plot(rows)
    assert "99,000" in page(rows, MACHINE)


def test_page_and_plot_are_made_of_whatever_was_measured():
    gone = Row(name="kafka", title="Kafka", durability="synced", missing="mvn is not installed")
    rows = [row("ister-flight"), row("redis", "unsynced", restart_seconds=12.345, lost=17), gone]
    text = page(rows, MACHINE)
    assert "| Kafka | missing: mvn is not installed |" in text
    assert "| Redis | 12 | 1,048,576 | 17 | 20.0 | 200 |" in text
    assert "do not quote" not in text
    for change in ({"scale": 0.05}, {"load": (3.2, 1.0)}):
        assert "do not quote" in page(rows, {**MACHINE, **change})
    assert "Kafka" not in plot(rows)
    ElementTree.fromstring(plot(rows))
