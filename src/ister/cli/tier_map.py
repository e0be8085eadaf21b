"""A topic's tiers drawn to scale in characters: bucket, files, cache, watermarks and cursors.

    bucket  ▚▚▚▚▚▚▚▚▚▚▌████████▌███████▌
    files                     ████████████████████████
    cache                                        █████
            └─────────┴─────────┴─────────┴──────────┘
            0         10,000    20,000    30,000
    tiered                              ▲              25,000
    next                                             ▲ 38,000
    billing      ▲                                      4,100

Owns: where things stand and which characters they are made of. Does not own: what is known about
the topic (the topic view, as `ister topics describe --json` prints it), or printing.

All rows share one axis from the earliest offset to the next one, and every position is rounded
down to a column, so nothing is wrong by more than one. A column is full if all of its offsets are
there; one that has some of them has a shade, and is never empty. Many small objects in a column
are one block: where objects are wide enough, half a column is left between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from ister.wire.views import TopicJson

WIDTH_MIN: Final = 40

_SCALE_MIN: Final = 8
_LABEL_MAX: Final = 20
_CURSORS_MAX: Final = 30
_MARKS: Final = ("trimmed", "tiered", "synced", "written", "next")
# Columns that an object needs for half of the last one to be left empty.
_SPLIT_COLUMNS: Final = 2
_TICK_COLUMNS: Final = 12
_STYLES: Final = {"bucket": "cyan", "files": "green", "cache": "yellow"}


class Span(NamedTuple):
    """Some characters that look alike."""

    text: str
    style: str
    """A style of `rich`; empty for none."""


Line = tuple[Span, ...]
"""A line of the drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Characters:
    """The characters of a drawing."""

    full: str
    full_split: str
    parquet: str
    parquet_split: str
    shades: tuple[str, str, str]
    gap: str
    pointer: str
    axis: tuple[str, str, str, str]
    """Its left end, the line, a tick, its right end."""
    cut: str


_UNICODE: Final = _Characters(
    full="█",
    full_split="▌",
    parquet="▚",
    parquet_split="▘",
    shades=("░", "▒", "▓"),
    gap="·",
    pointer="▲",
    axis=("└", "─", "┴", "┘"),
    cut="…",
)
_ASCII: Final = _Characters(
    full="#",
    full_split="|",
    parquet="P",
    parquet_split="|",
    shades=(":", "-", "="),
    gap=".",
    pointer="^",
    axis=("+", "-", "+", "+"),
    cut="~",
)


class Piece(NamedTuple):
    """Offsets that lie together: an object, a file, the cache."""

    start: int
    end: int
    is_parquet: bool = False
    messages: int | None = None
    """How many of its offsets have messages; None for all."""
    span: int = 1
    """How many it has, on the axis and beyond."""


def draw(view: TopicJson, width: int, *, ascii: bool = False) -> list[str]:
    """The drawing, as lines that are no longer than `width`.

    A terminal of fewer than 40 columns is taken for 40. `ascii` uses no other characters than those
    of ASCII.
    """
    lines = draw_spans(view, width, ascii=ascii)
    return ["".join(span.text for span in line).rstrip() for line in lines]


def draw_spans(view: TopicJson, width: int, *, ascii: bool = False) -> list[Line]:
    """As `draw`, with the colours."""
    characters = _ASCII if ascii else _UNICODE
    if view.get("partitions"):
        return [_plain(f"{len(view['partitions'])} partitions, each with tiers of its own")]
    marks = view.get("watermarks")
    if marks is None or view.get("is_reliable") is False:
        return [_plain("no tiers: this topic keeps no messages")]
    axis = _Axis.of(view, max(width, WIDTH_MIN), characters)
    return [*_tiers(view, axis), *axis.lines(), *_pointers(view, axis), *_legend(view, axis)]


def column_of(offset: int, start: int, end: int, columns: int) -> int:
    """The column in which an offset stands on an axis from `start` up to `end`.

    The end itself, and what lies beyond, stands in the last column.
    """
    span = max(end - start, 1)
    return max(0, min((offset - start) * columns // span, columns - 1))


# -- the axis -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    start: int
    end: int
    columns: int
    label_columns: int
    number_columns: int
    characters: _Characters

    @classmethod
    def of(cls, view: TopicJson, width: int, characters: _Characters) -> _Axis:
        marks = view["watermarks"]
        start = view.get("earliest") or 0
        end = max(marks["next"], start)
        cursors = [sub["name"] for sub in view.get("subscriptions") or ()]
        labels = [*_MARKS, "bucket", "files", "cache", *cursors[:_CURSORS_MAX]]
        label_columns = min(max(map(len, labels)), _LABEL_MAX)
        number_columns = len(f"{max([end, *cursors_of(view).values()]):,}")
        columns = width - label_columns - 2 - number_columns - 1
        return cls(
            start=start,
            end=end,
            columns=max(columns, _SCALE_MIN),
            label_columns=label_columns,
            number_columns=number_columns,
            characters=characters,
        )

    @property
    def is_empty(self) -> bool:
        return self.start == self.end

    @property
    def is_sparse(self) -> bool:
        """Whether there are fewer offsets than columns."""
        return self.end - self.start < self.columns

    def column(self, offset: int) -> int:
        return column_of(offset, self.start, self.end, self.columns)

    def offsets(self, column: int) -> tuple[int, int]:
        """The offsets that stand in a column, half open; all of them are in exactly one."""
        span = self.end - self.start
        first = self.start + -(-column * span // self.columns)
        return first, self.start + -(-(column + 1) * span // self.columns)

    def label(self, text: str) -> str:
        if len(text) > self.label_columns:
            text = text[: self.label_columns - 1] + self.characters.cut
        return text.ljust(self.label_columns) + "  "

    def lines(self) -> Iterator[Line]:
        """The axis, and the numbers below it."""
        left, line, tick, right = self.characters.axis
        cells = [left, *line * (self.columns - 2), right]
        numbers = [" "] * (self.columns + self.number_columns + 1)
        free_from = 0
        for offset in self._ticks():
            at = self.column(offset)
            text = f"{offset:,}"
            # Numbers stand under their ticks, and one that has no room is left out.
            if at < free_from or at + len(text) > len(numbers):
                continue
            if 0 < at < self.columns - 1:
                cells[at] = tick
            numbers[at : at + len(text)] = text
            free_from = at + len(text) + 2
        indent = self.label("")
        yield (Span(indent, ""), Span("".join(cells), "dim"))
        yield (Span((indent + "".join(numbers)).rstrip(), "dim"),)

    def _ticks(self) -> Iterable[int]:
        """Round numbers, a few of them, and the beginning."""
        if self.is_empty:
            return (self.start,)
        count = max(self.columns // _TICK_COLUMNS, 1)
        step = _round_up((self.end - self.start) // count or 1)
        first = -(-(self.start + 1) // step) * step
        return (self.start, *range(first, self.end + 1, step))


def _round_up(number: int) -> int:
    """The next 1, 2 or 5 with zeros behind it."""
    power: int = 10 ** (len(str(number)) - 1)
    return next(step * power for step in (1, 2, 5, 10) if step * power >= number)


# -- rows -----------------------------------------------------------------------------------


def _tiers(view: TopicJson, axis: _Axis) -> Iterator[Line]:
    for tier, pieces in pieces_of(view).items():
        cells = _cells(pieces, axis)
        yield (Span(axis.label(tier), "bold"), *_styled(cells, _STYLES[tier], axis.characters))


def pieces_of(view: TopicJson) -> dict[str, list[Piece]]:
    """What each tier has of a topic: bucket, files, cache."""
    return {"bucket": _objects(view), "files": _files(view), "cache": _cache(view)}


def _objects(view: TopicJson) -> list[Piece]:
    # `end_offset` of a descriptor is the last offset, as Danube's is.
    return [
        Piece(
            one["start_offset"],
            one["end_offset"] + 1,
            one.get("format") == "parquet",
            # Objects that a broker reports as one may have gaps between them.
            one["messages"] if one.get("merged_objects") else None,
        )
        for one in view.get("objects") or ()
    ]


def _files(view: TopicJson) -> list[Piece]:
    return [
        Piece(start, end)
        for one in view.get("files") or ()
        if (start := one.get("first_offset")) is not None
        if (end := one.get("next_offset")) is not None
    ]


def _cache(view: TopicJson) -> list[Piece]:
    cache = view.get("cache")
    if not cache or cache.get("start") is None:
        return []
    return [Piece(cache["start"], cache["next"])]


def _cells(pieces: Sequence[Piece], axis: _Axis) -> str:
    """One character for each column."""
    pieces = _apart(pieces, axis)
    if not pieces:
        return ""
    starts = [piece.start for piece in pieces]
    begin, end = starts[0], pieces[-1].end
    span, columns = axis.end - axis.start, axis.columns
    first = axis.column(begin)
    # Where an offset takes several columns, the last one has all of its own.
    last = max(axis.column(end - 1), (end - axis.start) * columns // span - 1)
    cells = [" "] * first
    for column in range(first, last + 1):
        low, high = axis.offsets(column)
        if low == high:
            low = axis.start + column * span // columns
            high = low + 1
        # The two ends are not holes: a shade means that something is missing between.
        cells.append(_cell(pieces, starts, max(low, begin), min(high, end), axis.characters))
    return "".join(_split(cells, pieces, axis))


def _apart(pieces: Iterable[Piece], axis: _Axis) -> list[Piece]:
    """What of the pieces is on the axis, in order, each offset once.

    Objects overlap while some are being merged.
    """
    apart: list[Piece] = []
    reached = axis.start
    for piece in sorted(pieces, key=lambda one: (one.start, -one.end)):
        start, end = max(piece.start, reached), min(piece.end, axis.end)
        if start < end:
            apart.append(piece._replace(start=start, end=end, span=piece.end - piece.start))
            reached = end
    return apart


def _cell(
    pieces: Sequence[Piece], starts: Sequence[int], low: int, high: int, characters: _Characters
) -> str:
    """Returns the share of the offsets `low` to `high` that is stored."""
    covered = parquet = 0
    at = max(bisect_right(starts, low) - 1, 0)
    while at < len(pieces) and pieces[at].start < high:
        piece = pieces[at]
        here = max(0, min(piece.end, high) - max(piece.start, low))
        if piece.messages is not None and here:
            here = max(here * piece.messages // piece.span, 1)
        covered += here
        parquet += here if piece.is_parquet else 0
        at += 1
    if not covered:
        return characters.gap
    if covered < high - low:
        return characters.shades[min(covered * 3 // (high - low), 2)]
    return characters.parquet if 2 * parquet > covered else characters.full


def _split(cells: list[str], pieces: Sequence[Piece], axis: _Axis) -> list[str]:
    """Leaves half a column between pieces that are wide enough."""
    characters = axis.characters
    split = {characters.full: characters.full_split, characters.parquet: characters.parquet_split}
    for piece, following in pairwise(pieces):
        border = axis.column(following.start)
        if axis.offsets(border)[0] == following.start or axis.is_sparse:
            border -= 1  # it has the column for itself
        is_wide = border - axis.column(piece.start) + 1 >= _SPLIT_COLUMNS
        if is_wide:
            cells[border] = split.get(cells[border], cells[border])
    return cells


def _styled(cells: str, style: str, characters: _Characters) -> Iterator[Span]:
    parquet = characters.parquet + characters.parquet_split.replace(characters.full_split, "")
    run, kind = "", ""
    for cell in cells:
        if cell == characters.gap:
            now = "red"
        elif cell in parquet:
            now = "magenta"
        else:
            now = style
        if now != kind and run:
            yield Span(run, kind)
            run = ""
        run, kind = run + cell, now
    if run:
        yield Span(run, kind)


# -- pointers -------------------------------------------------------------------------------


def cursors_of(view: TopicJson) -> dict[str, int]:
    """Where subscriptions are, if that is known; the one that is farthest behind first."""
    found = {
        one["name"]: cursor
        for one in view.get("subscriptions") or ()
        if (cursor := one.get("cursor")) is not None
    }
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def _pointers(view: TopicJson, axis: _Axis) -> Iterator[Line]:
    marks = view["watermarks"]
    for name in _MARKS:
        yield _pointer(axis, name, marks[name], "bold")
    cursors = cursors_of(view)
    for name in list(cursors)[:_CURSORS_MAX]:
        yield _pointer(axis, name, cursors[name], "blue")
    if len(cursors) > _CURSORS_MAX:
        yield _plain(f"and {len(cursors) - _CURSORS_MAX} subscriptions farther on")


def _pointer(axis: _Axis, label: str, offset: int, style: str) -> Line:
    at = axis.column(offset)
    number = f"{offset:,}".rjust(axis.number_columns)
    after = " " * (axis.columns - at - 1)
    return (
        Span(axis.label(label), "blue" if style == "blue" else ""),
        Span(" " * at + axis.characters.pointer, style),
        Span(f"{after} {number}", ""),
    )


def _legend(view: TopicJson, axis: _Axis) -> Iterator[Line]:
    """The legend of the characters in use that need an explanation."""
    characters = axis.characters
    if axis.is_empty:
        yield _plain("no messages yet" if not axis.end else "no messages any more")
        return
    shown = {cell for pieces in pieces_of(view).values() for cell in _cells(pieces, axis)}
    words = []
    if shown & {characters.parquet, characters.parquet_split} and any(
        p.is_parquet for p in _objects(view)
    ):
        words.append(f"{characters.parquet} parquet")
    if shown & set(characters.shades):
        words.append(f"{''.join(characters.shades)} partly there")
    if characters.gap in shown:
        words.append(f"{characters.gap} gap")
    # Below the axis, or from the left where that is too narrow.
    text = "  ".join(words)
    indent = axis.label("") if len(text) <= axis.columns + axis.number_columns else ""
    if words:
        yield (Span(indent + text, "dim"),)


def _plain(text: str) -> Line:
    return (Span(text, ""),)
