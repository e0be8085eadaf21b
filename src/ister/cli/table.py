"""Plain tables for people: columns as wide as their widest cell, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_table"]


def format_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows below their titles; None is shown as `-`, a column of numbers stands right."""
    cells = [[_format_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    is_number = [
        all(isinstance(row[at], int | float | None) for row in rows) for at in range(len(titles))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in (titles, *cells)
    ]
    return "\n".join(lines)


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
