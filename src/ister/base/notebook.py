"""HTML for notebooks: what `_repr_html_` returns.

Owns: the markup, and that everything in it is escaped: names, keys and payloads come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

_CELL_CHARACTERS_MAX: Final = 200


def render_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[object]], *, note: str = ""
) -> str:
    """A table with a title above it and a note below it.

    Args:
        title: What the table is about.
        headers: The names of its columns.
        rows: Values of any type; numbers are aligned to the right, long texts are cut.
        note: What the table does not show.
    """
    from html import escape  # noqa: PLC0415 - its table of entities is slow to load

    head = "".join(f"<th>{escape(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(_cell(value, escape) for value in row)}</tr>" for row in rows)
    below = f"<div><em>{escape(note)}</em></div>" if note else ""
    return (
        f"<div><strong>{escape(title)}</strong></div>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def _cell(value: object, escape: Callable[[str], str]) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align: right">{value}</td>'
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    if len(text) > _CELL_CHARACTERS_MAX:
        text = text[:_CELL_CHARACTERS_MAX] + "…"
    return f'<td style="text-align: left">{escape(text)}</td>'
