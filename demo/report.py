"""The report of the demo: one page that needs nothing but itself.

Owns: the page. Does not own: the figures it is made of (`play`), the drawings (`charts`).

It has no script and loads nothing, follows the reader's choice of light or dark, has a
text for every drawing and the numbers in tables, and can be printed. Whatever comes from messages
or errors is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from demo.charts import Band, Line, Mark, columns, histogram, lines, tier_map
from ister.limits import MIB

_COLOURS: Final = ("c1", "c2", "c3", "c4", "c5")
_SETTLED_SECONDS: Final = 0.5
_SMOOTHED: Final = 3
"""Samples over which a rate is taken."""
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
    ("keep this demo's broker and its dashboard", "ister demo --keep"),
)
_STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--soft:#f5f6f8;--ink:#1a1f26;--muted:#59636e;--rule:#dfe3e8;
--c1:#2f6bd8;--c2:#d2700f;--c3:#0f8a7c;--c4:#8350d6;--c5:#a8324a;--good:#0b7a4b;--bad:#c4232f;
--kill:#c4232f;--band:#c4232f1a}
@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--soft:#181e25;--ink:#e7ebf0;--muted:#9ba7b4;
--rule:#2b343e;--c1:#6ea4ff;--c2:#f0a050;--c3:#3fc4b3;--c4:#b795ff;--c5:#ff8095;--good:#4fd197;
--bad:#ff6b75;--kill:#ff6b75;--band:#ff6b7526}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1000px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:34px;line-height:1.15;margin:0 0 6px;letter-spacing:-.02em}
h2{font-size:21px;margin:52px 0 6px;letter-spacing:-.01em}
h3{font-size:15px;margin:26px 0 6px}
p{margin:6px 0 12px;max-width:74ch}.lead{color:var(--muted);font-size:17px}
.muted{color:var(--muted)}.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;
margin:26px 0 0}
.tile{background:var(--soft);border-radius:10px;padding:14px 16px}
.tile b{display:block;font-size:25px;line-height:1.2;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:13.5px}
figure{margin:14px 0 4px;background:var(--soft);border-radius:10px;padding:16px 18px 12px}
figcaption{color:var(--muted);font-size:13.5px;margin-top:8px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
fill:var(--muted)}
svg text.name{font-weight:600;font-size:13px;fill:var(--ink)}
.grid{stroke:var(--rule)}.axis{stroke:var(--muted)}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
line.mark{stroke:var(--muted);stroke-dasharray:3 3}line.kill{stroke:var(--kill);stroke-width:1.5}
svg text.kill{fill:var(--kill);font-weight:600}.band{fill:var(--band)}.track{fill:var(--rule)}
.cursor{fill:var(--ink)}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}
.bar.c1{fill:var(--c1)}.bar.c2{fill:var(--c2)}.bar.c3{fill:var(--c3)}.bar.c4{fill:var(--c4)}
.bar.c5{fill:var(--kill)}
.keys{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13.5px;color:var(--muted);margin:0 0 8px;
padding:0;list-style:none}
.keys i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
i.c1{background:var(--c1)}i.c2{background:var(--c2)}i.c3{background:var(--c3)}
i.c4{background:var(--c4)}i.c5{background:var(--kill)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14.5px;margin:10px 0}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--muted);font-weight:600;font-size:13px;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.meter{display:block;height:8px;border-radius:4px;background:var(--c1);min-width:2px;margin-top:8px}
td.m{width:34%}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--soft);border-radius:8px;padding:10px 14px;overflow-x:auto;margin:6px 0 14px;
white-space:pre-wrap;overflow-wrap:anywhere}
ol.seen{padding-left:26px}ol.seen li{margin:0 0 16px}ol.seen p{margin:2px 0 6px}
ol.seen .took{color:var(--muted);font-weight:400;font-size:13.5px;margin-left:8px}
.wrong{border-left:4px solid var(--bad);padding:4px 16px;margin:20px 0;background:var(--soft)}
.left{border-left:4px solid var(--c2);padding:4px 16px;margin:20px 0;background:var(--soft)}
footer{margin-top:56px;color:var(--muted);font-size:13.5px;border-top:1px solid var(--rule);
padding-top:14px}
@media (max-width:700px){.tiles{grid-template-columns:1fr 1fr}figure{overflow-x:auto}
svg{min-width:640px}}
@media print{main{max-width:none;padding:0}figure,tr,li{break-inside:avoid}h2,h3{break-after:avoid}
body{font-size:12px;-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def render(figures: Mapping[str, Any]) -> str:
    """The page, as HTML.

    Args:
        figures: What `Player.play` gives.
    """
    is_ok = not figures["failures"]
    title = "Nothing was lost" if is_ok else "Something is wrong"
    body = [
        f'<h1 class="{"good" if is_ok else "bad"}">{title}.</h1>',
        _lead(figures),
        _tiles(figures),
        _failures(figures),
        _left_out(figures),
        _traffic(figures),
        _proofs(figures),
        _tiers(figures),
        _results(figures),
        _seen(figures),
        (
            f"<footer>ister {escape(figures['version'])} · seed {figures['seed']} · "
            f"{escape(figures['started_at'])} · {escape(figures['machine'])} · "
            f"{figures['seconds']:.0f} seconds in all</footer>"
        ),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>ister demo: {title.lower()}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _lead(figures: Mapping[str, Any]) -> str:
    names = ", ".join(f"{one['messages']:,} {_short(one['topic'])}" for one in figures["topics"])
    return (
        '<p class="lead">A day of a small shop went through a broker on this machine: '
        f"{names}. In the middle of it the broker was killed with SIGKILL, and started again; "
        "later its disk was replaced by an empty one. Below is what producers, consumers and "
        "readers saw.</p>"
    )


def _tiles(figures: Mapping[str, Any]) -> str:
    traffic, chain = figures["traffic"], figures["chain"]
    steady, kill = traffic["latency"]["steady"], traffic["kill"]
    tiles = [
        (f"{chain['lost']:,}", f"lost, of {chain['messages']:,} acknowledged messages"),
        (f"{kill['away_seconds']:.1f} s", "from kill -9 to the next acknowledgement"),
        (f"{traffic['in_per_second']:,.0f}/s", "messages in, each durable before it is answered"),
        (f"{traffic['out_per_second']:,.0f}/s", "messages out, to four subscriptions"),
        (
            f"{steady['p50']:.1f} ms",
            f"publish to consumer, half of them; 99 %: {_ms(steady['p99'])}",
        ),
        (
            f"{chain['messages'] / chain['seconds']:,.0f}/s",
            "read back, from offset 0 to the newest",
        ),
    ]
    if "compact" in figures:
        before, after = _sum(figures["compact"], "bytes"), _sum(figures["compact"], "new_bytes")
        tiles.append((f"1 : {before / max(1, after):.1f}", "Parquet against what was uploaded"))
    tiles.append((f"{chain['duplicates']:,}", "delivered a second time, after the kill"))
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span>{escape(s)}</span></div>' for b, s in tiles)
        + "</div>"
    )


def _failures(figures: Mapping[str, Any]) -> str:
    if not figures["failures"]:
        return ""
    items = "".join(f"<li>{escape(failure)}</li>" for failure in figures["failures"])
    return f'<div class="wrong"><h3>Proofs that failed</h3><ul>{items}</ul></div>'


def _left_out(figures: Mapping[str, Any]) -> str:
    if not figures["left_out"]:
        return ""
    items = "".join(
        f"<li>{escape(one['title'])}: {escape(one['why'])}</li>" for one in figures["left_out"]
    )
    return f'<div class="left"><h3>Left out</h3><ul>{items}</ul></div>'


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
    rate_in, rate_out = _rates(samples, 1), _rates(samples, 2)
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
        + _figure(
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
        + _figure(
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
        + _figure(
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
    labels = [f"< {_ms(lows[1])}", *(f"≥ {_ms(low)}" for low in lows[1:])]
    return _figure(
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


def _rates(samples: Sequence[Sequence[float]], column: int) -> list[tuple[float, float]]:
    """Per second, over a few samples."""
    found = [(0.0, 0.0)]
    for number in range(_SMOOTHED, len(samples)):
        now, before = samples[number], samples[number - _SMOOTHED]
        seconds = now[0] - before[0]
        if seconds > 0:
            found.append(((now[0] + before[0]) / 2, (now[column] - before[column]) / seconds))
    return found


# -- proofs ---------------------------------------------------------------------------------


def _proofs(figures: Mapping[str, Any]) -> str:
    proofs, chain = figures["proofs"], figures["chain"]
    return (
        "<h2>The proof</h2>"
        "<p>Each acknowledgement names an offset. At the end every topic was read from offset 0 to "
        "its newest message, by the broker that had begun with an empty disk: "
        f"{escape(chain['words'])}. Every acknowledged message has to be there, once, at its "
        "offset.</p>"
        + _table(
            ("topic", "acknowledged", "found", "lost", "elsewhere", "twice", "gaps", ""),
            [
                (
                    one["topic"],
                    one["acknowledged"],
                    one["found"],
                    one["lost"],
                    one["misplaced"],
                    one["doubled"],
                    one["gaps"],
                    _verdict(one["ok"]),
                )
                for one in proofs["chain"]
            ],
        )
        + "<p>Every subscription has to get every message at least once, in the order that its "
        "type promises: by offset, or by key. What came again after the kill is counted. "
        f"{escape(str(figures['traffic']['switch']['consumer']))} left in the middle of the day, "
        "and the consumer that had stood by went on.</p>"
        + _table(
            ("subscription", "type", "messages", "missing", "again", "out of order", "got", ""),
            [
                (
                    f"{one['subscription']} of {_short(one['topic'])}",
                    one["type"],
                    one["messages"],
                    one["missing"],
                    one["duplicates"],
                    "any order" if one["type"] == "shared" else one["disordered"],
                    ", ".join(f"{count:,}" for _, count in sorted(one["consumers"].items())),
                    _verdict(one["ok"]),
                )
                for one in proofs["deliveries"]
            ],
        )
        + "<p>And every engine has to count what the shop has counted when it made the "
        "messages.</p>"
        + _table(
            ("sum", "by the shop", "found", ""),
            [
                (one["name"], one["expected"], one["found"], _verdict(one["ok"]))
                for one in proofs["sums"]
            ],
        )
    )


def _verdict(is_ok: bool) -> _Raw:
    return _Raw(f'<b class="{"good" if is_ok else "bad"}">{"holds" if is_ok else "fails"}</b>')


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
            f"{_count(objects, 'object')} of {_mib(size)} in the bucket, "
            f"{_mib(files)} in local files."
        )
        parts.append(f"<h3>{escape(one['title'])}</h3>")
        parts.append(
            _figure(shown, tier_map(one["topics"], about=f"{one['title']}: {words}"), words)
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
            + _table(
                ("country", "orders paid", "revenue", " "),
                [(row[0], row[1], _Money(row[2]), _Raw(_meter(row[2] / top))) for row in rows],
            )
        )
    if "stream" in figures:
        found = figures["stream"]
        parts.append(
            f"<h3>Structured streaming on Spark: {found['batches']} micro-batches</h3>"
            + _figure(
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
            f"<p>{_sum(report, 'messages'):,} rows in {_count(_sum(report, 'files'), 'file')} of "
            f"{_mib(_sum(report, 'bytes'))}, each order once however often it is exported. "
            f"{_euros(sum(row[2] for row in found['rows']))} were ordered, as the shop has "
            "counted.</p>"
        )
    return "".join(parts)


# -- what was seen --------------------------------------------------------------------------


def _seen(figures: Mapping[str, Any]) -> str:
    items = []
    for step in figures["steps"]:
        command = f"<pre>{escape(step['command'])}</pre>" if step["command"] else ""
        items.append(
            f"<li><b>{escape(step['title'])}</b><span class=took>{step['seconds']:.1f} s</span>"
            f'<p class="muted">{escape(step["about"])}</p><p>{escape(step["result"])}</p>'
            f"{command}</li>"
        )
    by_hand = "".join(
        f"<h3>{escape(title[:1].upper() + title[1:])}</h3><pre>{escape(command)}</pre>"
        for title, command in _COMMANDS
    )
    return (
        f'<h2>What you have just seen</h2><ol class="seen">{"".join(items)}</ol>'
        f"<h2>By hand</h2>{by_hand}"
    )


# -- parts ----------------------------------------------------------------------------------


class _Raw(str):
    """HTML, not text."""

    __slots__ = ()


class _Money(int):
    """Cents."""


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rows = [tuple(row) for row in rows]
    numeric = [
        bool(rows) and any(isinstance(row[number], int) for row in rows)
        for number in range(len(headers))
    ]
    head = "".join(
        f'<th scope="col"{" class=n" if is_number else ""}>{escape(name)}</th>'
        for name, is_number in zip(headers, numeric, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_kind(cell, is_number)}>{_cell(cell)}</td>"
            for cell, is_number in zip(row, numeric, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _kind(cell: object, is_number: bool) -> str:
    if isinstance(cell, _Raw) and "meter" in cell:
        return " class=m"
    return " class=n" if is_number else ""


def _cell(cell: object) -> str:
    if isinstance(cell, _Raw):
        return cell
    if isinstance(cell, _Money):
        return _euros(cell)
    return f"{cell:,}" if isinstance(cell, int) else escape(str(cell))


def _meter(share: float) -> str:
    return f'<span class="meter" style="width:{100 * share:.1f}%"></span>'


def _figure(keys: Sequence[tuple[str, str]], drawing: str, caption: str) -> str:
    items = "".join(f'<li><i class="{colour}"></i>{escape(name)}</li>' for name, colour in keys)
    legend = f'<ul class="keys">{items}</ul>' if items else ""
    return f"<figure>{legend}{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _sum(report: Mapping[str, Any], name: str) -> int:
    return sum(topic.get(name, 0) for topic in report["topics"])


def _short(topic: str) -> str:
    return escape(topic.rpartition("/")[2])


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def _mib(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def _euros(cents: int) -> str:
    return f"€\u00a0{cents / 100:,.2f}"


def _ms(value: float) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
