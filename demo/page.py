"""Parts of which the demo's reports are made: the frame of a page, tables, figures, proofs.

A page has no script and loads nothing, follows the reader's choice of light or dark, and can be
printed. Whatever comes from messages or errors is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from ister.base.limits import MIB

_SMOOTHED: Final = 3
"""Samples over which a rate is taken."""
_DOCUMENTS: Final = "https://github.com/ister-log/ister/blob/main/docs"
_READ_ON: Final = (
    ("Start: your own messages, a crash, a program", "start.md"),
    ("What each ack level survives", "concepts/topics.md"),
    ("Tiers: cache, local files, bucket", "concepts/tiers.md"),
    ("Subscriptions and delivery", "concepts/subscriptions.md"),
    ("Topics in Spark, and as Arrow", "SPARK.md"),
    ("Run several brokers", "howto/cluster.md"),
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
nav{margin:26px 0 0;font-size:14.5px}nav ol{display:flex;flex-wrap:wrap;gap:4px 22px;margin:4px 0 0;
padding:0;list-style:none}a{color:var(--c1)}h2 a{color:inherit;text-decoration:none}
h2 a:hover::after,h2 a:focus::after{content:" #";color:var(--muted)}
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


def frame(figures: Mapping[str, Any], body: Sequence[str]) -> str:
    """A whole page: the verdict, contents, the parts, and a footer."""
    is_ok = not figures["failures"]
    title = "Nothing was lost" if is_ok else "Something is wrong"
    head = f'<h1 class="{"good" if is_ok else "bad"}">{title}.</h1>'
    footer = (
        f"<footer>ister {escape(figures['version'])} · seed {figures['seed']} · "
        f"{escape(figures['started_at'])} · {escape(figures['machine'])} · "
        f"{figures['seconds']:.0f} seconds in all</footer>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>python -m demo: {title.lower()}</title><style>{_STYLE}</style></head>"
        f"<body><main>{head}{_with_contents(''.join(body) + _read_on())}{footer}</main></body>"
        "</html>\n"
    )


def _with_contents(body: str) -> str:
    """Gives every section a name, and lists them in front of the first one."""
    sections: list[tuple[str, str]] = []

    def name(heading: re.Match[str]) -> str:
        slug = re.sub(r"[^a-z]+", "-", heading[1].lower()).strip("-")
        sections.append((slug, heading[1]))
        return f'<h2 id="{slug}"><a href="#{slug}">{heading[1]}</a></h2>'

    body = re.sub(r"<h2>([^<]+)</h2>", name, body)
    items = "".join(f'<li><a href="#{slug}">{title}</a></li>' for slug, title in sections)
    contents = f'<nav aria-label="Contents"><b>Contents</b><ol>{items}</ol></nav>'
    before, heading, after = body.partition("<h2 ")
    return f"{before}{contents}{heading}{after}"


def _read_on() -> str:
    items = "".join(
        f'<li><a href="{_DOCUMENTS}/{page}">{escape(title)}</a></li>' for title, page in _READ_ON
    )
    return f"<h2>Read on</h2><ul>{items}</ul>"


def tiles(shown: Sequence[tuple[str, str]]) -> str:
    """Figures in large letters, each with what it is."""
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span>{escape(s)}</span></div>' for b, s in shown)
        + "</div>"
    )


class Raw(str):
    """HTML, not text."""

    __slots__ = ()


class Money(int):
    """Cents."""


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; columns with numbers are aligned to the right."""
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
    if isinstance(cell, Raw) and "meter" in cell:
        return " class=m"
    return " class=n" if is_number else ""


def _cell(cell: object) -> str:
    if isinstance(cell, Raw):
        return cell
    if isinstance(cell, Money):
        return euros(cell)
    return f"{cell:,}" if isinstance(cell, int) else escape(str(cell))


def meter(share: float) -> str:
    """A bar of a share of the width."""
    return f'<span class="meter" style="width:{100 * share:.1f}%"></span>'


def figure(keys: Sequence[tuple[str, str]], drawing: str, caption: str) -> str:
    """A drawing with its legend: names and colours."""
    items = "".join(f'<li><i class="{colour}"></i>{escape(name)}</li>' for name, colour in keys)
    legend = f'<ul class="keys">{items}</ul>' if items else ""
    return f"<figure>{legend}{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def euros(cents: int) -> str:
    """Cents as euros."""
    return f"€\u00a0{cents / 100:,.2f}"


def verdict(is_ok: bool) -> Raw:
    """Whether a proof holds."""
    return Raw(f'<b class="{"good" if is_ok else "bad"}">{"holds" if is_ok else "fails"}</b>')


def chain_table(proofs: Iterable[Mapping[str, Any]]) -> str:
    """What was found in each topic, against what was acknowledged."""
    return table(
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
                verdict(one["ok"]),
            )
            for one in proofs
        ],
    )


def delivery_table(proofs: Iterable[Mapping[str, Any]]) -> str:
    """What each subscription got."""
    return table(
        ("subscription", "type", "messages", "missing", "again", "out of order", "got", ""),
        [
            (
                f"{one['subscription']} of {short(one['topic'])}",
                one["type"],
                one["messages"],
                one["missing"],
                one["duplicates"],
                "any order" if one["type"] == "shared" else one["disordered"],
                ", ".join(f"{count:,}" for _, count in sorted(one["consumers"].items())),
                verdict(one["ok"]),
            )
            for one in proofs
        ],
    )


def failures(figures: Mapping[str, Any]) -> str:
    """The proofs that failed; empty if none did."""
    if not figures["failures"]:
        return ""
    items = "".join(f"<li>{escape(failure)}</li>" for failure in figures["failures"])
    return f'<div class="wrong"><h3>Proofs that failed</h3><ul>{items}</ul></div>'


def left_out(figures: Mapping[str, Any]) -> str:
    """The steps that were left out; empty if none were."""
    if not figures["left_out"]:
        return ""
    items = "".join(
        f"<li>{escape(one['title'])}: {escape(one['why'])}</li>" for one in figures["left_out"]
    )
    return f'<div class="left"><h3>Left out</h3><ul>{items}</ul></div>'


def rates(samples: Sequence[Sequence[float]], column: int) -> list[tuple[float, float]]:
    """Per second, over a few samples."""
    found = [(0.0, 0.0)]
    for number in range(_SMOOTHED, len(samples)):
        now, before = samples[number], samples[number - _SMOOTHED]
        seconds = now[0] - before[0]
        if seconds > 0:
            found.append(((now[0] + before[0]) / 2, (now[column] - before[column]) / seconds))
    return found


def short(topic: str) -> str:
    """A topic's name without its namespace."""
    return escape(topic.rpartition("/")[2])


def count(number: int, name: str) -> str:
    """A number of things."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / MIB:.1f} MiB"


def ms(value: float) -> str:
    """Milliseconds, or seconds."""
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def seen(figures: Mapping[str, Any], by_hand: Sequence[tuple[str, str]]) -> str:
    """The steps, and commands to try; each is what it does, and the command."""
    items = []
    for step in figures["steps"]:
        command = f"<pre>{escape(step['command'])}</pre>" if step["command"] else ""
        items.append(
            f"<li><b>{escape(step['title'])}</b><span class=took>{step['seconds']:.1f} s</span>"
            f'<p class="muted">{escape(step["about"])}</p><p>{escape(step["result"])}</p>'
            f"{command}</li>"
        )
    commands = "".join(
        f"<h3>{escape(title[:1].upper() + title[1:])}</h3><pre>{escape(command)}</pre>"
        for title, command in by_hand
    )
    return (
        f'<h2>What you have just seen</h2><ol class="seen">{"".join(items)}</ol>'
        f"<h2>By hand</h2>{commands}"
    )
