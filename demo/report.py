"""The report of the demo: one page that needs nothing but itself.

Owns: what the page says. Does not own: the figures it is made of (`play`), the drawings (`charts`),
the parts of a page (`page`). It has a text for every drawing, and the numbers in tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from demo.charts import Band, Line, Mark, columns, histogram, lines, tier_map
from demo.page import (
    Money,
    Raw,
    chain_table,
    count,
    delivery_table,
    euros,
    failures,
    figure,
    frame,
    left_out,
    meter,
    mib,
    ms,
    rates,
    seen,
    short,
    table,
    tiles,
    verdict,
)

_COLOURS: Final = ("c1", "c2", "c3", "c4", "c5")
_SETTLED_SECONDS: Final = 0.5
_COMMANDS: Final = (
    ("run a broker of your own", "ister serve"),
    (
        "publish and consume",
        (
            "echo hello | ister produce /default/greetings\n"
            "ister consume /default/greetings --subscription me --from earliest --limit 1"
        ),
    ),
    ("see where a topic is, to scale", "ister topics describe /default/greetings"),
    ("keep this demo's broker and its dashboard", "python -m demo --keep"),
)


def render(figures: Mapping[str, Any]) -> str:
    """The page, as HTML.

    Args:
        figures: What `Player.play` gives.
    """
    return frame(
        figures,
        [
            _lead(figures),
            _tiles(figures),
            failures(figures),
            left_out(figures),
            _traffic(figures),
            _proofs(figures),
            _tiers(figures),
            _results(figures),
            seen(figures, _COMMANDS),
        ],
    )


def _lead(figures: Mapping[str, Any]) -> str:
    names = ", ".join(f"{one['messages']:,} {short(one['topic'])}" for one in figures["topics"])
    return (
        '<p class="lead">A day of a small shop went through a broker on this machine: '
        f"{names}. In the middle of it the broker was killed with SIGKILL, and started again; "
        "later its disk was replaced by an empty one. Below is what producers, consumers and "
        "readers saw.</p>"
    )


def _tiles(figures: Mapping[str, Any]) -> str:
    traffic, chain = figures["traffic"], figures["chain"]
    steady, kill = traffic["latency"]["steady"], traffic["kill"]
    shown = [
        (f"{chain['lost']:,}", f"lost, of {chain['messages']:,} acknowledged messages"),
        (f"{kill['away_seconds']:.1f} s", "from kill -9 to the next acknowledgement"),
        (f"{traffic['in_per_second']:,.0f}/s", "messages in, each durable before it is answered"),
        (f"{traffic['out_per_second']:,.0f}/s", "messages out, to four subscriptions"),
        (
            f"{steady['p50']:.1f} ms",
            f"publish to consumer, half of them; 99 %: {ms(steady['p99'])}",
        ),
        (
            f"{chain['messages'] / chain['seconds']:,.0f}/s",
            "read back, from offset 0 to the newest",
        ),
    ]
    if "compact" in figures:
        before, after = _sum(figures["compact"], "bytes"), _sum(figures["compact"], "new_bytes")
        shown.append((f"1 : {before / max(1, after):.1f}", "Parquet against what was uploaded"))
    shown.append((f"{chain['duplicates']:,}", "delivered a second time, after the kill"))
    return tiles(shown)


# -- traffic --------------------------------------------------------------------------------


def _traffic(figures: Mapping[str, Any]) -> str:
    traffic = figures["traffic"]
    samples, kill = traffic["samples"], traffic["kill"]
    names = [one["name"] for one in traffic["subscriptions"]]
    marks = [
        Mark(traffic["live_from"], "steady pace from here"),
        Mark(kill["at"], "kill -9", "kill"),
    ]
    bands = [Band(kill["at"], kill["back_at"] or kill["at"], "no acknowledgement")]
    rate_in, rate_out = rates(samples, 1), rates(samples, 2)
    lag = [
        Line(name, _COLOURS[number], [(one[0], float(one[3][name])) for one in samples])
        for number, name in enumerate(names)
    ]
    return (
        "<h2>Traffic, and the kill</h2>"
        f"<p>{traffic['bulk_messages']:,} messages went in as quickly as producers could send "
        f"them, then {traffic['live_messages']:,} at a steady {traffic['pace']:,.0f} a second. "
        f"When the broker was killed, {kill['pending']:,} messages were on their way; it was ready "
        f"again {(kill['ready_at'] or kill['at']) - kill['at']:.1f} seconds later. Clients "
        "reconnected by themselves and sent unacknowledged messages again, under the same "
        "numbers, so that none of it is in the log twice.</p>"
        + figure(
            [("acknowledged", "c1"), ("delivered", "c2")],
            lines(
                [Line("acknowledged", "c1", rate_in), Line("delivered", "c2", rate_out)],
                about="Messages a second over time, acknowledged and delivered; both fall to zero "
                f"at {kill['at']:.1f} seconds, when the broker was killed, for "
                f"{kill['away_seconds']:.1f} seconds.",
                marks=marks,
                bands=bands,
            ),
            "Messages a second. The red band is from the kill to the next acknowledgement.",
        )
        + figure(
            [("acknowledged", "c1"), ("delivered", "c2")],
            lines(
                [Line("acknowledged", "c1", rate_in), Line("delivered", "c2", rate_out)],
                about="The rates from the steady phase on.",
                marks=marks[1:],
                bands=bands,
                start=traffic["live_from"] + _SETTLED_SECONDS,
            ),
            "From the steady phase on: the backlog of the kill is delivered at once when the "
            "broker is back.",
        )
        + figure(
            [(name, _COLOURS[number]) for number, name in enumerate(names)],
            lines(
                lag,
                about="Messages that are acknowledged and not delivered yet, by subscription, over "
                "time.",
                marks=marks,
                bands=bands,
                is_logarithmic=True,
            ),
            "Lag: acknowledged, and not with the subscription yet. Each line of the scale is ten "
            "times the one below.",
        )
        + _latency(traffic)
    )


def _latency(traffic: Mapping[str, Any]) -> str:
    steady, killed = traffic["latency"]["steady"], traffic["latency"]["killed"]
    lows = [low for low, _ in steady["histogram"]]
    layers = [
        ("at the steady pace", "c1", [count for _, count in steady["histogram"]]),
        ("around the kill", "c5", [count for _, count in killed["histogram"]]),
    ]
    totals = [first + second for first, second in zip(layers[0][2], layers[1][2], strict=True)]
    last = max((number for number, count in enumerate(totals) if count), default=0) + 1
    labels = [f"< {ms(lows[1])}", *(f"≥ {ms(low)}" for low in lows[1:])]
    return figure(
        [(name, colour) for name, colour, _ in layers],
        histogram(
            [(name, colour, counts[:last]) for name, colour, counts in layers],
            labels[:last],
            about=f"How long messages took from a producer to a consumer: half of them "
            f"{steady['p50']:.1f} milliseconds or less, 99 of 100 {steady['p99']:.1f} or less. "
            f"Those around the kill had to wait for the broker, {killed['max'] / 1000:.1f} seconds "
            "at the most.",
        ),
        f"Latency from a send to its receipt: {steady['count']:,} deliveries at the steady pace, "
        f"{killed['count']:,} around the kill, which had to wait for the broker to be back.",
    )


# -- proofs ---------------------------------------------------------------------------------


def _proofs(figures: Mapping[str, Any]) -> str:
    proofs, chain = figures["proofs"], figures["chain"]
    return (
        "<h2>The proof</h2>"
        "<p>Each acknowledgement names an offset. At the end every topic was read from offset 0 to "
        "its newest message, by the broker that had begun with an empty disk: "
        f"{escape(chain['words'])}. Every acknowledged message has to be there, once, at its "
        "offset.</p>"
        + chain_table(proofs["chain"])
        + "<p>Every subscription has to get every message at least once, in the order that its "
        "type promises: by offset, or by key. What came again after the kill is counted. "
        f"{escape(str(figures['traffic']['switch']['consumer']))} left in the middle of the day, "
        "and the consumer that had stood by went on.</p>"
        + delivery_table(proofs["deliveries"])
        + "<p>And every engine has to count what the shop has counted when it made the "
        "messages.</p>"
        + table(
            ("sum", "by the shop", "found", ""),
            [
                (one["name"], one["expected"], one["found"], verdict(one["ok"]))
                for one in proofs["sums"]
            ],
        )
    )


# -- tiers ----------------------------------------------------------------------------------


def _tiers(figures: Mapping[str, Any]) -> str:
    keys = [
        ("objects as uploaded", "c1"),
        ("objects in Parquet", "c3"),
        ("local files", "c2"),
        ("memory", "c4"),
    ]
    parts = [
        (
            "<h2>Where the messages are</h2><p>Each row is a tier, from offset 0 on the left; all "
            "topics have the same scale, and each block is an object or a file. Triangles are the "
            "subscriptions' cursors. Readers never see the seams.</p>"
        )
    ]
    for one in figures["tier_maps"]:
        formats = {item["format"] for view in one["topics"] for item in view["objects"]}
        drawn = {
            "c1": bool(formats - {"parquet"}),
            "c2": True,
            "c3": "parquet" in formats,
            "c4": any((view["cache"] or {}).get("messages") for view in one["topics"]),
        }
        shown = [(name, colour) for name, colour in keys if drawn[colour]]
        objects = sum(len(view["objects"]) for view in one["topics"])
        size = sum(item["size"] for view in one["topics"] for item in view["objects"])
        files = sum(file["bytes"] for view in one["topics"] for file in view["files"])
        words = (
            f"{count(objects, 'object')} of {mib(size)} in the bucket, {mib(files)} in local files."
        )
        parts.append(f"<h3>{escape(one['title'])}</h3>")
        parts.append(
            figure(shown, tier_map(one["topics"], about=f"{one['title']}: {words}"), words)
        )
    return "".join(parts)


# -- results --------------------------------------------------------------------------------


def _results(figures: Mapping[str, Any]) -> str:
    parts: list[str] = []
    if "sql" in figures:
        rows = figures["sql"]["rows"]
        top = max(row[2] for row in rows)
        parts.append(
            "<h2>What the shop has earned</h2><h3>Batch SQL on Spark, orders joined with payments"
            f"</h3><pre>{escape(figures['sql']['query'])}</pre>"
            + table(
                ("country", "orders paid", "revenue", " "),
                [(row[0], row[1], Money(row[2]), Raw(meter(row[2] / top))) for row in rows],
            )
        )
    if "stream" in figures:
        found = figures["stream"]
        parts.append(
            f"<h3>Structured streaming on Spark: {found['batches']} micro-batches</h3>"
            + figure(
                [],
                columns(
                    [(f"{hour:02d}", cents / 100) for hour, _, cents in found["rows"]],
                    unit="euros",
                    about="Euros ordered in each hour of the day.",
                ),
                "Euros ordered, by the hour of the day.",
            )
        )
    if "table" in figures:
        found = figures["table"]
        report = found["export"]
        parts.append(
            f"<h3>An Iceberg table, read by pyiceberg and {escape(found['engine'])}</h3>"
            f"<p>{_sum(report, 'messages'):,} rows in {count(_sum(report, 'files'), 'file')} of "
            f"{mib(_sum(report, 'bytes'))}, each order once however often it is exported. "
            f"{euros(sum(row[2] for row in found['rows']))} were ordered, as the shop has "
            "counted.</p>"
        )
    return "".join(parts)


def _sum(report: Mapping[str, Any], name: str) -> int:
    return sum(topic.get(name, 0) for topic in report["topics"])
