"""The report of the demo with three brokers.

Owns: what the page says. Does not own: the figures it is made of (`cluster`), the parts of a page
(`page`).
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from demo.charts import Line, Mark, lines
from demo.page import (
    chain_table,
    delivery_table,
    failures,
    figure,
    frame,
    rates,
    seen,
    short,
    table,
    tiles,
)

_COMMANDS: Final = (
    ("see the brokers of a cluster", "ister brokers list"),
    ("move a topic", "ister topics move /default/orders --to NODE"),
    ("restart a broker without a failed send", "kill -TERM PID"),
    ("keep this demo's brokers and their dashboards", "python -m demo --cluster --keep"),
)


def render_cluster(figures: Mapping[str, Any]) -> str:
    """The page, as HTML.

    Args:
        figures: What `ClusterPlayer.play` gives.
    """
    cluster = figures["cluster"]
    return frame(
        figures,
        [
            (
                '<p class="lead">A day of a small shop went through three brokers on this machine, '
                f"which share {escape(cluster['metadata'])} and a bucket; every topic has "
                "<code>ack: tiered</code>. One broker was killed with SIGKILL, and the others took "
                "its topics. Then all three were restarted in turn.</p>"
            ),
            _tiles(figures),
            failures(figures),
            _traffic(cluster),
            _owners(cluster),
            _proofs(figures),
            seen(figures, _COMMANDS),
        ],
    )


def _tiles(figures: Mapping[str, Any]) -> str:
    cluster, chain = figures["cluster"], figures["chain"]
    pause = max(cluster["kill"]["pauses"].values(), default=0.0)
    restart = max(one["pause"] for one in cluster["rolling"]["restarts"])
    return tiles(
        [
            (f"{chain['lost']:,}", f"lost, of {chain['messages']:,} acknowledged messages"),
            (
                f"{pause:.1f} s",
                (
                    "from kill -9 to the next acknowledgement by another broker; "
                    f"the lease was {cluster['lease_seconds']} s"
                ),
            ),
            (f"{restart:.1f} s", "longest time without an answer during the three restarts"),
            (f"{chain['duplicates']:,}", "delivered a second time"),
        ]
    )


def _traffic(cluster: Mapping[str, Any]) -> str:
    samples = cluster["samples"]
    series = [
        Line("acknowledged", "c1", rates(samples, 1)),
        Line("delivered", "c2", rates(samples, 2)),
    ]
    marks = [
        Mark(at, text, "kill" if text.startswith("kill") else "mark")
        for at, text in cluster["marks"]
    ]
    return (
        "<h2>Traffic, the kill and the restarts</h2>"
        "<p>Producers and consumers got no notice: they looked their topics up again, and sent "
        "unacknowledged messages again under the same numbers.</p>"
        + figure(
            [("acknowledged", "c1"), ("delivered", "c2")],
            lines(
                series,
                about="Messages per second over time, all topics, acknowledged and delivered.",
                marks=marks,
            ),
            "Messages per second, all topics. Topics of the other brokers continue meanwhile.",
        )
        + table(
            ("event", "topic", "no answer for"),
            [
                (f"kill -9 {cluster['kill']['broker']}", topic, f"{pause:.1f} s")
                for topic, pause in cluster["kill"]["pauses"].items()
            ]
            + [
                (f"restart of {one['broker']}", "all topics", f"{one['pause']:.1f} s at the most")
                for one in cluster["rolling"]["restarts"]
            ],
        )
    )


def _owners(cluster: Mapping[str, Any]) -> str:
    titles = [one["title"] for one in cluster["owners"]]
    topics = list(cluster["owners"][0]["topics"]) if cluster["owners"] else []
    return "<h2>Which broker has which topic</h2>" + table(
        ("topic", *titles),
        [(short(topic), *(one["topics"][topic] for one in cluster["owners"])) for topic in topics],
    )


def _proofs(figures: Mapping[str, Any]) -> str:
    proofs = figures["proofs"]
    return (
        "<h2>The proof</h2>"
        "<p>Each acknowledgement names an offset. At the end every topic was read from offset 0 to "
        "its newest message: every acknowledged message has to be there, once, at its offset.</p>"
        + chain_table(proofs["chain"])
        + "<p>Every subscription has to get every message at least once, in order.</p>"
        + delivery_table(proofs["deliveries"])
    )
