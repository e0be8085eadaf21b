"""Draws what `stats` has counted: a page that needs nothing but itself, or a PNG.

Owns: the drawings. Does not own: the numbers.

The page has no script and asks nobody for anything; it follows the reader's choice of light or
dark, every drawing has a text for those who cannot see it, and its numbers are in a table below it.
A PNG needs matplotlib, which is no part of Ister.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from ister.errors import ConfigError, DiskError, InvalidRequestError, NotFoundError
from ister.limits import GIB, KIB, MIB

__all__ = ["Chart", "charts_of", "check_plot", "render_html", "save_plot"]

_PAGES: Final = (".html", ".htm")
_PICTURES: Final = (".png",)
_BARS_MAX: Final = 30
_HOURS_MAX: Final = 240
_WIDTH: Final = 860
_LABEL_WIDTH: Final = 220
_VALUE_WIDTH: Final = 150
_BAR_HEIGHT: Final = 22
_COLUMNS_HEIGHT: Final = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One drawing: a bar for each label."""

    title: str
    about: str
    """In a sentence, for those who do not see it."""
    label: str
    """What the labels are."""
    unit: str
    """What is counted: `messages` or `bytes`."""
    bars: Sequence[tuple[str, int]]
    is_upright: bool = False
    """Columns beside each other, for what goes on in time; else bars below each other."""


def check_plot(path: str) -> None:
    """Makes sure that a plot can be drawn into a file, before anything is counted.

    Raises:
        InvalidRequestError: Its name has another ending.
        ConfigError: matplotlib is missing.
        NotFoundError: There is no such directory.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in (*_PAGES, *_PICTURES):
        raise InvalidRequestError(
            f"a plot named {os.path.basename(path)}", hint="end it with .html or .png"
        )
    if ending in _PICTURES:
        _load_matplotlib()
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise NotFoundError("there is no such directory", path=directory)


def save_plot(path: str, report: Mapping[str, Any]) -> None:
    """Draws a report into a file.

    Args:
        path: Ends with `.html` or `.png`.
        report: Of `stats`, as JSON has it.

    Raises:
        DiskError: The file cannot be written. Else as `check_plot`.
    """
    check_plot(path)
    is_page = os.path.splitext(path)[1].lower() in _PAGES
    data = render_html(report).encode() if is_page else _render_png(charts_of(report))
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise DiskError(
            f"the plot cannot be written: {error.strerror}", errno=error.errno, path=path
        ) from error


# -- what is drawn --------------------------------------------------------------------------


def charts_of(report: Mapping[str, Any]) -> list[Chart]:
    """The drawings of a report."""
    totals = report.get("totals") or {}
    topics = [topic for topic in report["topics"] if "messages" in topic]
    span, hours = _by_time(totals.get("hours", ()))
    return [
        _bars(
            "Messages per topic",
            "topic",
            "messages",
            [(topic["topic"], topic["messages"]) for topic in topics],
        ),
        _bars(
            "Payload bytes per topic",
            "topic",
            "bytes",
            [(topic["topic"], topic["bytes"]) for topic in topics],
        ),
        Chart(
            title=f"Messages per {span}",
            about=f"Messages by the {span} in which they were published, of all topics; "
            f"{_extremes(hours)}",
            label=span,
            unit="messages",
            bars=hours,
            is_upright=True,
        ),
        _bars(
            "Messages per producer",
            "producer",
            "messages",
            [
                *(
                    (item["producer"] or "(no name)", item["messages"])
                    for item in totals["producers"]
                ),
                *_rest(totals["other_producers"]),
            ]
            if totals
            else [],
            is_sorted=True,
        ),
        Chart(
            title="Messages by payload size",
            about="How many messages have a payload of which size, of all topics.",
            label="bytes, from",
            unit="messages",
            bars=_by_size(totals.get("sizes", ())),
            is_upright=True,
        ),
    ]


def _bars(
    title: str,
    label: str,
    unit: str,
    bars: Sequence[tuple[str, int]],
    *,
    is_sorted: bool = False,
) -> Chart:
    if not is_sorted:
        bars = sorted(bars, key=lambda bar: (-bar[1], bar[0]))
        if len(bars) > _BARS_MAX:
            rest = bars[_BARS_MAX:]
            bars = [*bars[:_BARS_MAX], (f"{len(rest)} others", sum(value for _, value in rest))]
    return Chart(
        title=title, about=f"{title}; {_extremes(bars)}", label=label, unit=unit, bars=bars
    )


def _extremes(bars: Sequence[tuple[str, int]]) -> str:
    if not bars:
        return "there are none."
    most = max(bars, key=lambda bar: bar[1])
    return f"{len(bars)} in all, the most in {most[0]}: {most[1]:,}."


def _rest(rest: Mapping[str, Any]) -> list[tuple[str, int]]:
    if not rest["messages"]:
        return []
    count = f"{rest['producers']} others" if rest["is_exact"] else "others"
    return [(count, rest["messages"])]


def _by_time(hours: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, int]]]:
    """Messages by the hour, by the day or by the month, whichever can be drawn; with the gaps."""
    if not hours:
        return "hour", []
    known = [
        (
            datetime.strptime(item["hour"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC),
            item["messages"],
        )
        for item in hours
    ]
    first, last = known[0][0], known[-1][0]
    all_hours = int((last - first).total_seconds()) // 3600 + 1
    if all_hours <= _HOURS_MAX:
        counts = {int((time - first).total_seconds()) // 3600: count for time, count in known}
        base = int(first.timestamp())
        return "hour", [
            (
                datetime.fromtimestamp(base + at * 3600, UTC).strftime("%Y-%m-%d %H:00"),
                counts.get(at, 0),
            )
            for at in range(all_hours)
        ]
    span, form = ("day", "%Y-%m-%d") if all_hours <= 24 * _HOURS_MAX else ("month", "%Y-%m")
    merged: dict[str, int] = {}
    for time, count in known:
        merged[time.strftime(form)] = merged.get(time.strftime(form), 0) + count
    return span, list(merged.items())


def _by_size(sizes: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Messages by the power of two that their size reaches; with those that none has."""
    counts = {item["below_bytes"]: item["messages"] for item in sizes}
    if not counts:
        return []
    first, last = (bound.bit_length() for bound in (min(counts), max(counts)))
    return [
        (
            "0" if bits == 1 else _short_bytes(1 << (bits - 2)),
            counts.get(1 << (bits - 1), 0),
        )
        for bits in range(first, last + 1)
    ]


def _short_bytes(size: int) -> str:
    for unit, name in ((GIB, "G"), (MIB, "M"), (KIB, "K")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return str(size)


def _short(value: int, unit: str) -> str:
    if unit == "bytes":
        return f"{_short_bytes(value)}B" if value >= KIB else f"{value} B"
    for size, name in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if value >= size:
            return f"{value / (1000 if name == 'k' else size):.3g} {name}"
    return f"{value}"


# -- the page -------------------------------------------------------------------------------

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #57606a; --line: #d8dee4;
  --paper: #ffffff; --bar: #2f6f9f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9aa4ae; --line: #30363d;
  --paper: #0d1117; --bar: #6cb0de; } }
body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p, summary { color: var(--dim); } figure { margin: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg text.dim { fill: var(--dim); font-size: 12px; }
svg rect { fill: var(--bar); } svg line { stroke: var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; }
td.number, th.number { text-align: right; }
.scroll { overflow-x: auto; }
""".strip()


def render_html(report: Mapping[str, Any]) -> str:
    """A report as a page."""
    charts = charts_of(report)
    totals = report.get("totals") or {}
    sections = "\n".join(_section(number, chart) for number, chart in enumerate(charts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Messages in {len(report["topics"])} topics</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>Messages in {len(report["topics"])} topics</h1>
<p>{escape(_summary(totals))}</p>
{_topics_table(report["topics"])}
{sections}
</body>
</html>
"""


def _summary(totals: Mapping[str, Any]) -> str:
    if not totals.get("messages"):
        return "There are no messages."
    parts = [
        f"{totals['messages']:,} messages with {_short(totals['bytes'], 'bytes')} of payload",
        f"published from {totals['first_publish_time']} to {totals['last_publish_time']}",
    ]
    ratio = totals["compression"]["ratio"]
    if ratio is not None:
        parts.append(f"{totals['compression']['codec']} makes payloads {ratio:g} times smaller")
    return "; ".join(parts) + "."


def _topics_table(topics: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for topic in topics:
        keys, compression = topic.get("keys") or {}, topic.get("compression") or {}
        about = "" if keys.get("is_exact", True) else "about "
        rows.append(
            (
                topic["topic"],
                f"{topic.get('messages', 0):,}",
                _short(topic.get("bytes", 0), "bytes"),
                f"{topic.get('objects', 0):,}",
                f"{about}{keys.get('distinct', 0):,}",
                f"{compression['ratio']:g}" if compression.get("ratio") else "-",
                topic.get("first_publish_time") or "-",
                topic.get("last_publish_time") or "-",
            )
        )
    titles = ("topic", "messages", "payload", "objects", "keys", "zstd ratio", "first", "last")
    return _table(titles, rows, numbers=range(1, 6))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    def cells(opened: str, closed: str, values: Sequence[str]) -> str:
        found = []
        for at, value in enumerate(values):
            style = ' class="number"' if at in numbers else ""
            found.append(f"<{opened}{style}>{escape(value)}</{closed}>")
        return "".join(found)

    head = cells('th scope="col"', "th", titles)
    body = "\n".join(f"<tr>{cells('td', 'td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _section(number: int, chart: Chart) -> str:
    if not chart.bars:
        return f"<section><h2>{escape(chart.title)}</h2>\n<p>Nothing to show.</p></section>"
    drawing = _draw_columns(number, chart) if chart.is_upright else _draw_bars(number, chart)
    rows = [(name, f"{value:,}") for name, value in chart.bars]
    table = _table((chart.label, chart.unit), rows, numbers=(1,))
    return (
        f"<section><h2>{escape(chart.title)}</h2>\n<figure>{drawing}</figure>\n"
        f"<details><summary>The numbers</summary>{table}</details></section>"
    )


def _open_svg(number: int, chart: Chart, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="title-{number} about-{number}">'
        f'<title id="title-{number}">{escape(chart.title)}</title>'
        f'<desc id="about-{number}">{escape(chart.about)}</desc>'
    )


def _draw_bars(number: int, chart: Chart) -> str:
    most = max((value for _, value in chart.bars), default=0) or 1
    room = _WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    parts = [_open_svg(number, chart, len(chart.bars) * _BAR_HEIGHT + 26)]
    for at, (name, value) in enumerate(chart.bars):
        top = at * _BAR_HEIGHT
        width = max(room * value / most, 1.0 if value else 0.0)
        shown = name if len(name) <= 30 else f"{name[:29]}…"
        parts.append(
            f'<text x="{_LABEL_WIDTH - 8}" y="{top + 15}" text-anchor="end">{escape(shown)}</text>'
            f'<rect x="{_LABEL_WIDTH}" y="{top + 3}" width="{width:.1f}" '
            f'height="{_BAR_HEIGHT - 6}" rx="2"><title>{escape(name)}: {value:,}</title></rect>'
            f'<text class="dim" x="{_LABEL_WIDTH + width + 6:.1f}" y="{top + 15}">'
            f"{_short(value, chart.unit)}</text>"
        )
    bottom = len(chart.bars) * _BAR_HEIGHT + 18
    parts.append(
        f'<text class="dim" x="{_LABEL_WIDTH - 8}" y="{bottom}" text-anchor="end">'
        f'{escape(chart.label)}</text><text class="dim" x="{_LABEL_WIDTH}" y="{bottom}">'
        f"{escape(chart.unit)}</text></svg>"
    )
    return "".join(parts)


def _draw_columns(number: int, chart: Chart) -> str:
    most = max((value for _, value in chart.bars), default=0) or 1
    left, top, bottom = 70, 14, _COLUMNS_HEIGHT - 46
    room, height = _WIDTH - left - 10, bottom - top
    step = room / len(chart.bars)
    parts = [_open_svg(number, chart, _COLUMNS_HEIGHT)]
    for tick in sorted({0, most // 2, most}):
        y = bottom - height * tick / most
        parts.append(
            f'<line x1="{left}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="dim" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_short(tick, chart.unit)}</text>"
        )
    # As many labels as fit beside each other.
    longest = max(len(name) for name, _ in chart.bars) * 7 + 16
    every = max(-(-len(chart.bars) // max(int(room // longest), 1)), 1)
    width = min(step * 0.8, 60.0)
    for at, (name, value) in enumerate(chart.bars):
        size = max(height * value / most, 1.0 if value else 0.0)
        middle = left + (at + 0.5) * step
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{bottom - size:.1f}" width="{width:.1f}" '
            f'height="{size:.1f}"><title>{escape(name)}: {value:,}</title></rect>'
        )
        if at % every == 0:
            place = min(max(middle, left), _WIDTH - longest / 2)
            parts.append(
                f'<text class="dim" x="{place:.1f}" y="{bottom + 18}" '
                f'text-anchor="middle">{escape(name)}</text>'
            )
    parts.append(
        f'<text class="dim" x="{left + room / 2:.0f}" y="{_COLUMNS_HEIGHT - 6}" '
        f'text-anchor="middle">{escape(chart.label)} ({escape(chart.unit)} upwards)</text></svg>'
    )
    return "".join(parts)


# -- the picture ----------------------------------------------------------------------------


def _load_matplotlib() -> tuple[Any, Any]:
    try:
        figure = importlib.import_module("matplotlib.figure")
        canvas = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise ConfigError(
            "a plot as PNG needs matplotlib, which is not installed",
            hint="pip install matplotlib; a plot named .html needs nothing",
        ) from error
    return figure, canvas


def _render_png(charts: Sequence[Chart]) -> bytes:
    import io  # noqa: PLC0415

    module, canvas = _load_matplotlib()
    drawn = [chart for chart in charts if chart.bars]
    figure = module.Figure(figsize=(11, 3.6 * max(len(drawn), 1)), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    for number, chart in enumerate(drawn):
        axes = figure.add_subplot(len(drawn), 1, number + 1)
        names, values = zip(*chart.bars, strict=True)
        places = range(len(names))
        axes.set_title(chart.title)
        if chart.is_upright:
            axes.bar(places, values)
            every = max(-(-len(names) // 10), 1)
            axes.set_xticks(list(places)[::every], list(names)[::every], rotation=20, ha="right")
            axes.set_xlabel(chart.label)
            axes.set_ylabel(chart.unit)
        else:
            axes.barh(places, values)
            axes.set_yticks(list(places), list(names))
            axes.invert_yaxis()
            axes.set_xlabel(chart.unit)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()
