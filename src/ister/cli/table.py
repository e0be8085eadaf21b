"""Plain tables for people: columns as wide as their widest cell, numbers to the right.

What is shown often comes from others, such as the reason of a dead letter: a cell is one line, and
cannot control a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence


def format_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows below their titles; None is shown as `-`, a column of numbers stands right."""
    cells = [[format_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    is_number = [is_number_column(rows, at) for at in range(len(titles))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in (titles, *cells)
    ]
    return "\n".join(lines)


def is_number_column(rows: Sequence[Sequence[object]], at: int) -> bool:
    """Whether a column is one of numbers, and stands right; None may be among them."""
    cells = [row[at] for row in rows if row[at] is not None]
    return bool(cells) and all(
        isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells
    )


def format_cell(value: object) -> str:
    """A cell for people; None is shown as `-`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return plain(str(value))


def plain(text: str) -> str:
    """A text on one line, which cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
