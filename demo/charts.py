"""SVG drawings of the report: lines, histograms and tier maps.

Colours are classes (`c1` … `c5`, `kill`) that the page defines for light and dark. Every drawing
and every part of a map has a text for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from ister.cli.tier_map import cursors_of, pieces_of
from ister.wire.views import TopicJson

_WIDTH: Final = 920
_LEFT: Final = 64
_RIGHT: Final = 14
_TOP: Final = 30
_BOTTOM: Final = 34
_LABEL_ROOM: Final = 128
_ROW: Final = 15
_ROW_GAP: Final = 4
_TOPIC_GAP: Final = 24
_TIER_COLOURS: Final = {"bucket": "c1", "files": "c2", "cache": "c4"}


@dataclass(frozen=True, slots=True)
class Line:
    """Something over time."""

    name: str
    colour: str
    """A class."""
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment."""

    at: float
    text: str
    colour: str = "mark"


@dataclass(frozen=True, slots=True)
class Band:
    """A span of time."""

    start: float
    end: float
    text: str


def lines(
    series: Sequence[Line],
    *,
    about: str,
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
    height: int = 260,
    start: float = 0.0,
    is_logarithmic: bool = False,
) -> str:
    """Lines over seconds.

    Args:
        series: What is drawn.
        about: Text for screen readers.
        marks: Moments that matter.
        bands: Spans of time that matter.
        height: In pixels.
        start: The first second that is shown.
        is_logarithmic: Each step of the scale is ten times the one below.
    """
    series = [
        Line(one.name, one.colour, [point for point in one.points if point[0] >= start])
        for one in series
    ]
    end = max((x for one in series for x, _ in one.points), default=start + 1.0) or 1.0
    top = max((y for one in series for _, y in one.points), default=1.0) or 1.0
    ticks = _log_ticks(top) if is_logarithmic else _ticks(top)
    top = max(top, ticks[-1])
    low, width = height - _BOTTOM, _WIDTH - _LEFT - _RIGHT

    def at_x(x: float) -> float:
        return _LEFT + width * (x - start) / max(end - start, 1e-9)

    def at_y(y: float) -> float:
        share = math.log10(1 + y) / math.log10(1 + top) if is_logarithmic else y / top
        return low - (low - _TOP) * share

    parts = [_band(band, at_x, low) for band in bands]
    parts += [_grid_line(tick, at_y(tick)) for tick in ticks]
    parts += _time_axis(start, end, at_x, low)
    for one in series:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline class="line {one.colour}" points="{path}"/>')
    for number, mark in enumerate(mark for mark in marks if mark.at >= start):
        x, y = at_x(mark.at), 12 + 13 * (number % 2)
        is_late = x > _WIDTH * 2 / 3
        parts.append(
            f'<line class="{mark.colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 3}" y2="{low}"/>'
            f'<text class="{mark.colour}" x="{x + (-5 if is_late else 5):.1f}" y="{y}" '
            f'text-anchor="{"end" if is_late else "start"}">{escape(mark.text)}</text>'
        )
    return _svg(height, about, parts)


def _grid_line(tick: float, y: float) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" '
        f'text-anchor="end">{_short(tick)}</text>'
    )


def _band(band: Band, at_x: Callable[[float], float], low: float) -> str:
    x, end = at_x(band.start), at_x(band.end)
    return (
        f'<rect class="band" x="{x:.1f}" y="{_TOP}" width="{max(1.0, end - x):.1f}" '
        f'height="{low - _TOP}"><title>{escape(band.text)}</title></rect>'
    )


def _time_axis(start: float, end: float, at_x: Callable[[float], float], low: float) -> list[str]:
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{low}" y2="{low}"/>']
    parts += [
        f'<text class="tick" x="{at_x(tick):.1f}" y="{low + 18}" text-anchor="middle">'
        f"{tick:g} s</text>"
        for tick in _ticks(end, about=8 if start == 0 else 24)
        if start <= tick <= end
    ]
    return parts


def histogram(
    stacks: Sequence[tuple[str, str, Sequence[int]]],
    labels: Sequence[str],
    *,
    about: str,
    height: int = 240,
) -> str:
    """Columns, one on top of the other.

    Args:
        stacks: Name, class and heights of each layer, from the bottom.
        labels: Below the columns.
        about: Text for screen readers.
        height: In pixels.
    """
    count = len(labels)
    totals = [sum(layer[2][number] for layer in stacks) for number in range(count)]
    top: float = max([*totals, 1])
    ticks = _ticks(top, about=4)
    top = max(top, ticks[-1])
    low, width = height - _BOTTOM, (_WIDTH - _LEFT - _RIGHT) / max(1, count)
    scale = (low - _TOP) / top
    parts = [_grid_line(tick, low - tick * scale) for tick in ticks]
    for number, label in enumerate(labels):
        x, y = _LEFT + number * width, float(low)
        for name, colour, heights in stacks:
            size = heights[number] * scale
            if not heights[number]:
                continue
            y -= size
            parts.append(
                f'<rect class="bar {colour}" x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" '
                f'height="{max(size, 0.8):.1f}"><title>{escape(label)}: {heights[number]:,} '
                f"{escape(name)}</title></rect>"
            )
        parts.append(
            f'<text class="tick" x="{x + width / 2:.1f}" y="{low + 18}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{low}" y2="{low}"/>')
    return _svg(height, about, parts)


def columns(
    values: Sequence[tuple[str, float]], *, unit: str, about: str, height: int = 220
) -> str:
    """One column for each label."""
    return histogram(
        [(unit, "c1", [round(value) for _, value in values])],
        [label for label, _ in values],
        about=about,
        height=height,
    )


# -- tier maps ------------------------------------------------------------------------------


def tier_map(topics: Sequence[TopicJson], *, about: str) -> str:
    """Where the messages of topics are, all to one scale of offsets.

    Args:
        topics: Views, as the broker gives them.
        about: Text for screen readers.
    """
    longest = max((view["watermarks"]["next"] for view in topics), default=1) or 1
    scale = (_WIDTH - _LABEL_ROOM - 90) / longest
    parts: list[str] = []
    y = 18
    for view in topics:
        parts.append(_topic_rows(view, y, scale))
        y += 3 * (_ROW + _ROW_GAP) + _TOPIC_GAP
    return _svg(y - _TOPIC_GAP + 10, about, parts)


def _topic_rows(view: TopicJson, y: float, scale: float) -> str:
    end = view["watermarks"]["next"]
    name = view["topic"].rpartition("/")[2]
    parts = [f'<text class="name" x="0" y="{y + _ROW - 3}">{escape(name)}</text>']
    for number, (tier, pieces) in enumerate(pieces_of(view).items()):
        row = y + number * (_ROW + _ROW_GAP)
        parts.append(
            f'<text class="tick" x="{_LABEL_ROOM - 10}" y="{row + _ROW - 4}" text-anchor="end">'
            f'{tier}</text><rect class="track" x="{_LABEL_ROOM}" y="{row}" '
            f'width="{max(1.0, end * scale):.1f}" height="{_ROW}" rx="2"/>'
        )
        drawn = [piece for piece in pieces if piece.end > piece.start]
        for piece in drawn:
            colour = "c3" if piece.is_parquet else _TIER_COLOURS[tier]
            what = "parquet object" if piece.is_parquet else tier
            parts.append(
                f'<rect class="bar {colour}" x="{_LABEL_ROOM + piece.start * scale:.1f}" y="{row}" '
                f'width="{max(1.5, (piece.end - piece.start) * scale - 1):.1f}" height="{_ROW}" '
                f'rx="2"><title>{what}: offsets {piece.start:,} up to {piece.end:,}</title></rect>'
            )
        if count := sum(piece.end - piece.start for piece in drawn):
            parts.append(
                f'<text class="tick" x="{_LABEL_ROOM + end * scale + 8:.1f}" y="{row + _ROW - 4}">'
                f"{count:,}</text>"
            )
    # A triangle above the rows, where each subscription is.
    for subscription, cursor in cursors_of(view).items():
        parts.append(
            f'<path class="cursor" d="M{_LABEL_ROOM + cursor * scale:.1f},{y - 1} l-4,-7 h8 z">'
            f"<title>{escape(subscription)}: {cursor:,}</title></path>"
        )
    return "".join(parts)


# -- scales ---------------------------------------------------------------------------------


def _ticks(top: float, *, about: int = 5) -> list[float]:
    """Round numbers from 0 to `top` and a bit more."""
    if top <= 0:
        return [0.0]
    step = 10 ** math.floor(math.log10(top / about))
    step = next(step * factor for factor in (1, 2, 5, 10) if top / (step * factor) <= about)
    return [number * step for number in range(math.ceil(top / step) + 1)]


def _log_ticks(top: float) -> list[float]:
    return [0.0, *(10.0**power for power in range(max(1, math.ceil(math.log10(top + 1))) + 1))]


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _svg(height: float, about: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(about)}">'
        f"{''.join(parts)}</svg>"
    )
