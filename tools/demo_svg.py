"""Makes docs/images/demo.svg, an animation of the demo's terminal, from a real run of it.

    python -m tools.demo_svg                   runs the demo (Spark: needs Java), draws it
    python -m tools.demo_svg --record FILE     also keeps what the terminal was sent, with times
    python -m tools.demo_svg --replay FILE     draws that again, without running anything

Owns: reading a terminal's bytes, and the drawing. Does not own: what the demo prints.

Every line of the picture is a line that the demo printed, in its order; pauses are shortened. Of
each step, its title and its result are shown, and what it says in between (the kill); not its
description. The picture begins with the whole, stays a while, and then plays: a viewer without
animation, or a reader who prefers reduced motion, sees the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from dataclasses import dataclass, field
from fcntl import ioctl
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

TARGET: Final = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.svg"
COLUMNS: Final = 92
_ROWS: Final = 50
_TITLE: Final = "The terminal of python -m demo: steps, a kill -9 of the broker, and the results"

# Seconds of the animation: how long the whole stands, and between two lines.
_HOLD: Final = 6.0
_PAUSE_MAX: Final = 1.4
_PAUSE_MIN: Final = 0.25

_CHAR: Final = 8.4
_LINE: Final = 19
_MARGIN: Final = 18
_BAR: Final = 30
_COLOURS: Final = {31: "r", 32: "g", 33: "y", 36: "c"}


@dataclass(frozen=True)
class Style:
    """How a character is shown."""

    colour: str = ""
    is_bold: bool = False
    is_dim: bool = False

    def apply(self, codes: str) -> Style:
        """Returns the style after a sequence `ESC [ codes m`."""
        style = self
        for code in [int(one) for one in codes.split(";") if one.isdigit()] or [0]:
            if code == 0:
                style = Style()
            elif code == 1:
                style = Style(style.colour, True, style.is_dim)
            elif code == 2:
                style = Style(style.colour, style.is_bold, True)
            elif code in _COLOURS:
                style = Style(_COLOURS[code], style.is_bold, style.is_dim)
        return style

    @property
    def names(self) -> str:
        """Its classes in the drawing."""
        return " ".join(filter(None, (self.colour, "b" * self.is_bold, "d" * self.is_dim)))


@dataclass
class Row:
    """A row of the screen, and when it last changed."""

    cells: list[tuple[str, Style]] = field(default_factory=list)
    at: float = 0.0

    @property
    def text(self) -> str:
        """Its characters."""
        return "".join(char for char, _ in self.cells).rstrip()


class Screen:
    """What a terminal shows that is sent these bytes; as much of one as rich makes use of."""

    _TOKENS: Final = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|(\r)|(\n)|([^\x1b])")

    def __init__(self) -> None:
        self.rows = [Row()]
        self._row = self._column = 0
        self._style = Style()

    def feed(self, text: str, at: float) -> None:
        """Shows what was sent at a time."""
        for found in self._TOKENS.finditer(text):
            codes, command, is_return, is_newline, char = found.groups()
            if command == "m":
                self._style = self._style.apply(codes)
            elif command == "A":
                self._row = max(0, self._row - int(codes or 1))
            elif command == "K":
                del self.rows[self._row].cells[0 if codes == "2" else self._column :]
            elif is_return:
                self._column = 0
            elif is_newline:
                self._row, self._column = self._row + 1, 0
                if self._row == len(self.rows):
                    self.rows.append(Row())
            elif char:
                self._put(char, at)

    def _put(self, char: str, at: float) -> None:
        row = self.rows[self._row]
        row.cells += [(" ", Style())] * (self._column - len(row.cells))
        row.cells[self._column : self._column + 1] = [(char, self._style)]
        row.at = at
        self._column += 1


def record(command: list[str]) -> list[tuple[float, str]]:
    """Runs a command in a terminal; returns what it sent, each piece with its time."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        os.execvp(command[0], command)  # noqa: S606 - the demo itself
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, COLUMNS, 0, 0))
    began = time.monotonic()
    pieces: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the end of a terminal
            break
        if not data:
            break
        rest += data
        # A character of several bytes may come in two pieces.
        text = rest.decode("utf-8", errors="ignore")
        if text.encode() == rest or len(rest) > 65536:
            pieces.append((time.monotonic() - began, text))
            rest = b""
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit("".join(text for _, text in pieces)[-4000:])
    return pieces


def choose(rows: list[Row]) -> list[Row]:
    """The rows of the picture: no descriptions of steps, no empty rows but one in a row."""
    chosen: list[Row] = []
    for row in rows:
        styles = {style for char, style in row.cells if not char.isspace()}
        if styles and all(style.is_dim and not style.colour for style in styles):
            continue
        if row.text or (chosen and chosen[-1].text):
            chosen.append(row)
    while chosen and not chosen[-1].text:
        chosen.pop()
    return chosen


def without_path(row: Row, directory: str) -> Row:
    """The row with the checkout's own path as `.`, and as wide as before."""
    at = "".join(char for char, _ in row.cells).find(f"{directory}/")
    if at < 0:
        return row
    style = row.cells[at][1]
    end = at + len(directory)
    # A frame's right side stays where it is.
    padding = [(" ", Style())] * (len(directory) - 1)
    cells = [*row.cells[:at], (".", style), *row.cells[end:-1], *padding, row.cells[-1]]
    return Row(cells, row.at)


def draw(rows: list[Row], prompt: str = "$ python -m demo") -> str:
    """The rows as an animated SVG."""
    head = Row([(char, Style("", True)) for char in prompt], 0.0)
    rows = [head, *rows]
    times = [0.0]
    for before, row in pairwise(rows):
        pause = min(_PAUSE_MAX, max(_PAUSE_MIN, row.at - before.at)) if row.text else 0.0
        times.append(times[-1] + pause)
    whole = _HOLD + times[-1] + 0.5
    width = round(COLUMNS * _CHAR + 2 * _MARGIN)
    height = _BAR + _LINE * len(rows) + 2 * _MARGIN
    frames, lines = [], []
    for number, (row, at) in enumerate(zip(rows, times, strict=True)):
        if not row.text:
            continue
        shown = 100 * (_HOLD + at) / whole
        held = 100 * _HOLD / whole
        name = f"k{number}"
        if number:
            frames.append(
                f"@keyframes {name}{{0%,{held:.2f}%{{opacity:1}}{held + 0.01:.2f}%,"
                f"{shown:.2f}%{{opacity:0}}{min(100.0, shown + 0.01):.2f}%,to{{opacity:1}}}}"
            )
        style = f' style="animation-name:{name}"' if number else ""
        y = _BAR + _MARGIN + _LINE * number + 14
        lines.append(f'<text x="{_MARGIN}" y="{y}"{style}>{_spans(row)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><title>{_TITLE}</title><style>'
        "rect{fill:#12171d}circle{fill:#3a444f}"
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "fill:#d5dce4;white-space:pre}"
        ".c{fill:#5cc8d7}.g{fill:#5fd38d}.y{fill:#e5c07b}.r{fill:#ff7b86}.b{font-weight:700}"
        ".d{fill:#9aa5b1}"
        "@media (prefers-reduced-motion:no-preference){text{animation-duration:"
        f"{whole:.1f}s;animation-iteration-count:infinite;animation-timing-function:step-end}}}}"
        f"{''.join(frames)}</style>"
        f'<rect width="{width}" height="{height}" rx="9"/>'
        + "".join(f'<circle cx="{_MARGIN + 8 + 20 * n}" cy="20" r="6"/>' for n in range(3))
        + "".join(lines)
        + "</svg>\n"
    )


def _spans(row: Row) -> str:
    """A row's text, in spans of one style; each stands where the terminal had it."""
    spans: list[str] = []
    at = 0
    cells = row.cells[: len(row.text)]
    while at < len(cells):
        style = cells[at][1]
        end = next((n for n in range(at, len(cells)) if cells[n][1] != style), len(cells))
        text = "".join(char for char, _ in cells[at:end])
        lead = len(text) - len(text.lstrip())
        if text.strip():
            x = _MARGIN + (at + lead) * _CHAR
            # As wide as on the terminal, whatever font the viewer has.
            length = len(text.strip()) * _CHAR
            names = f' class="{style.names}"' if style.names else ""
            place = f'x="{x:.1f}" textLength="{length:.1f}"{names}'
            spans.append(f"<tspan {place}>{escape(text.strip())}</tspan>")
        at = end
    return "".join(spans)


def main() -> None:
    """Runs or replays the demo, and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep the terminal's bytes")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="draw a recording")
    options = parser.parse_args()
    if options.replay:
        pieces = json.loads(options.replay.read_text())
    else:
        pieces = record([sys.executable, "-m", "demo"])
    if options.record:
        options.record.write_text(json.dumps(pieces))
    screen = Screen()
    for at, text in pieces:
        screen.feed(text, at)
    rows = [without_path(row, str(TARGET.parents[2])) for row in screen.rows]
    TARGET.write_text(draw(choose(rows)))


if __name__ == "__main__":
    main()
