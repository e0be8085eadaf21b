"""Output of all commands: tables, errors, progress, help and questions.

Owns: how things are shown. Does not own: what is shown, JSON, the layout of help (`parser`).

On a terminal there are colours, rules and bars. Anywhere else the same words come as plain text,
whole lines that are never cut to a width, so that `grep` and `awk` find what people see. `NO_COLOR`
is respected. `rich` is loaded only when something is shown on a terminal: `ister --version` and
pipes do without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TextIO, TypeAlias

from ister.base.limits import KIB
from ister.cli.table import format_cell, format_table, is_number_column, plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task
    from rich.text import Text

__all__ = [
    "ProgressBar",
    "Subparsers",
    "add_command",
    "confirm",
    "console",
    "format_bytes",
    "format_span",
    "is_terminal",
    "print_error",
    "print_facts",
    "print_table",
    "progress",
]

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
"""What `add_subparsers` returns; argparse has no public name for it."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_BYTES: Final = "bytes"
_FIRST_COLUMN_SHARE_MAX: Final = 0.7
_COLUMN_MIN: Final = 5
_GOOD: Final = frozenset({"ok", "yes", "whole", "done", "repaired", "recovered"})
_BAD: Final = frozenset({"no", "damaged", "failed", "missing", "not repairable", "bad"})
"""Cells that are one of these words stand out; so do those that begin with it and a comma."""


def is_terminal(file: TextIO | None) -> bool:
    """Whether a file is a terminal that can show more than plain text; None (`>&-`) is not."""
    return file is not None and file.isatty() and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """Where things are shown: standard output, or standard error."""
    from rich.console import Console  # noqa: PLC0415 - costs 0.1 s, and pipes do without

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def add_command(
    commands: Subparsers,
    name: str,
    *,
    help: str,
    description: str | None = None,
    examples: Sequence[str] = (),
    notes: str | None = None,
) -> argparse.ArgumentParser:
    """Adds a command whose help ends with examples.

    Args:
        commands: The sub-parsers to add it to.
        name: Its name.
        help: One line, in lower case, for the list of commands.
        description: Some sentences for its own help; `help` by default.
        examples: Whole command lines; a long one continues after a backslash and a newline.
        notes: More text below the options, shown unchanged.
    """
    below = [] if notes is None else [notes.strip("\n")]
    if examples:
        lines = (f"  {line}".replace("\n", "\n      ") for line in examples)
        below.append("examples:\n" + "\n".join(lines))
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        # Percent signs would be taken for argparse's own; in other texts they are not.
        help=help.replace("%", "%%"),
        description=description or f"{help[:1].upper()}{help[1:]}.",
        epilog="\n\n".join(below) or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None
) -> None:
    """A table, on standard output. Numbers are aligned to the right, None is a dash."""
    headers = [header.upper() for header in headers]
    widths = [
        max((len(format_cell(row[at])) for row in rows), default=0) for at in range(len(headers))
    ]
    width = shutil.get_terminal_size().columns
    first_max = width * _FIRST_COLUMN_SHARE_MAX
    # Where there is no room for words, the terminal breaks the lines, not the words.
    needed = min(widths[0], first_max) + (len(headers) - 1) * _COLUMN_MIN
    if not is_terminal(sys.stdout) or needed > width:
        if title is not None:
            print(title)
        print(format_table(headers, rows))
        return
    from rich.table import Table  # noqa: PLC0415

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for number, header in enumerate(headers):
        table.add_column(
            header,
            justify="right" if is_number_column(rows, number) else "left",
            overflow="fold",
            # What a line is about stays in one piece, to be copied, where that leaves some room.
            no_wrap=number == 0 and widths[0] <= first_max,
        )
    for row in rows:
        table.add_row(*map(_cell, row))
    console().print(table)


def _cell(value: object) -> Text:
    """A cell on a terminal."""
    from rich.text import Text  # noqa: PLC0415

    text = format_cell(value)
    word = text.partition(",")[0].lower()
    style = ""
    if value is None:
        style = "dim"
    elif isinstance(value, str | bool) and word in _GOOD:
        style = "green"
    elif isinstance(value, str | bool) and word in _BAD:
        style = "bold red"
    # As text: a topic's name or an error may have brackets, which are no markup.
    return Text(text, style=style)


def print_facts(facts: Mapping[str, object], *, title: str | None = None) -> None:
    """Names and what they are, a line each, on standard output.

    They are in the order of the lines; None is a dash.
    """
    width = max(map(len, facts), default=0)
    if not is_terminal(sys.stdout):
        if title is not None:
            print(title)
        for name, value in facts.items():
            print(f"{name.ljust(width)}  {format_cell(value)}".rstrip())
        return
    from rich.text import Text  # noqa: PLC0415

    shown = console()
    if title is not None:
        shown.print(Text(title, style="bold"))
    for name, value in facts.items():
        shown.print(Text.assemble((f"{name.ljust(width)}  ", "dim"), _cell(value)))


def print_error(text: str, *, hint: str | None = None) -> None:
    """What went wrong, on standard error, and what to do about it."""
    # Errors quote names and values of others, which must not control a terminal.
    text = "\n".join(map(plain, text.split("\n")))
    hint = hint and "\n".join(map(plain, hint.split("\n")))
    if not is_terminal(sys.stderr):
        print(f"ister: {text}" + (f"; {hint}" if hint else ""), file=sys.stderr)
        return
    from rich.text import Text  # noqa: PLC0415

    shown = Text.assemble(("ister: ", "bold red"), text)
    if hint:
        shown.append("\n       ")
        shown.append(hint, style="yellow")
    console(stderr=True).print(shown)


class ProgressBar(Protocol):
    """The progress of something."""

    def advance(self, done: float = 1) -> None:
        """So much more is done."""
        ...

    def describe(self, text: str) -> None:
        """What is being done now."""
        ...


class _Silent:
    def advance(self, done: float = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


@contextmanager
def progress(
    description: str, total: float | None = None, *, unit: str | None = None
) -> Iterator[ProgressBar]:
    """A progress bar on standard error; nothing if that is not a terminal.

    Without `total` the bar has no end; with the unit `bytes` it shows sizes.
    """
    if not is_terminal(sys.stderr):
        yield _Silent()
        return
    from rich import progress as rich_progress  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Amount(rich_progress.ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_format_amount(task, unit), style="cyan")

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=28),
        Amount(),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(description, total=total)

        class Shown:
            def advance(self, done: float = 1) -> None:
                bars.advance(task, done)

            def describe(self, text: str) -> None:
                bars.update(task, description=text)

        yield Shown()


def _format_amount(task: Task, unit: str | None) -> str:
    """How much is done of how much, and how fast."""

    def shown(amount: float) -> str:
        return format_bytes(amount) if unit == _BYTES else f"{amount:,.0f}"

    text = shown(task.completed)
    if task.total is not None:
        text += f" of {shown(task.total)}"
    if unit is not None and unit != _BYTES:
        text += f" {unit}"
    return text if task.speed is None else f"{text}, {shown(task.speed)}/s"


def confirm(question: str, *, is_confirmed: bool) -> bool:
    """Asks before something that cannot be taken back.

    Args:
        question: What is about to happen.
        is_confirmed: `--yes` was given.

    Returns:
        Whether to continue; False if there is no terminal to ask on.
    """
    if is_confirmed:
        return True
    if not all(file is not None and file.isatty() for file in (sys.stdin, sys.stderr)):
        print_error("not confirmed", hint="pass --yes")
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def format_bytes(size: float | None) -> str:
    """A size for people, such as `12.3 MiB`; `?` if it is not known."""
    if size is None:
        return "?"
    for unit in _UNITS[:-1]:
        # What would be shown as 1024.0 is one of the next unit.
        if size < KIB - 0.05:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= KIB
    return f"{size:.1f} {_UNITS[-1]}"


def format_span(seconds: float) -> str:
    """A length of time for people, such as `3 min`."""
    if seconds < _MINUTE - 0.5:
        return f"{seconds:.0f} s"
    if seconds < _HOUR - _MINUTE / 2:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / _DAY:.1f} days"
