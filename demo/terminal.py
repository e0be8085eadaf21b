"""Shows the demo: steps and progress bars on a terminal, whole lines elsewhere; and its summary."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO

from demo.show import Show
from ister.base.clock import SystemClock
from ister.cli.output import console, format_bytes, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PLAIN_SECONDS: Final = 5.0
_INDENT: Final = "       "
_WIDTH_MAX: Final = 100


class Stage(Show, AbstractContextManager["Stage"], Protocol):
    """A show that gives the terminal back at its end."""


def open_stage(*, stderr: bool) -> Stage:
    """A stage on standard output, or on standard error."""
    file = sys.stderr if stderr else sys.stdout
    return _Terminal(stderr=stderr) if is_terminal(file) else _Lines(file)


class _Lines:
    """Whole lines, each once."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._number = 0
        self._clock = SystemClock()
        self._began = 0.0
        self._printed_at = 0.0
        self._bars: dict[str, tuple[str, float]] = {}

    def begin(self, title: str, about: str) -> None:
        """Says it."""
        self._number += 1
        self._bars.clear()
        self._began = self._printed_at = self._clock.monotonic()
        self._print(f"{self._number:2}  {title}: {about}")

    def bar(self, key: str, label: str, total: float) -> None:
        """Remembers it."""
        self._bars[key] = (label, total)

    def update(self, key: str, done: float, note: str | None = None) -> None:
        """Says it now and then, of the first bar."""
        now = self._clock.monotonic()
        if key == next(iter(self._bars), None) and now - self._printed_at >= _PLAIN_SECONDS:
            self._printed_at = now
            label, total = self._bars[key]
            self._print(f"    … {label}: {done:,.0f} of {total:,.0f}")

    def say(self, text: str) -> None:
        """Says it."""
        self._print(f"    ! {text}")

    def end(self, words: str) -> None:
        """Says what came of it, and how long it took."""
        self._print(f"    = {words} ({self._clock.monotonic() - self._began:.1f} s)")

    def leave_out(self, title: str, why: str) -> None:
        """Says it."""
        self._number += 1
        self._print(f"{self._number:2}  {title}: left out ({why})")

    def _print(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""


class _Terminal:
    """Lines for finished steps, and the progress bars of the current one."""

    def __init__(self, *, stderr: bool) -> None:
        self._console = console(stderr=stderr)
        self._number = 0
        self._clock = SystemClock()
        self._began = 0.0
        self._bars: Progress | None = None
        self._head: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}

    def begin(self, title: str, about: str) -> None:
        """Shows it, with something that moves."""
        from rich.progress import BarColumn, SpinnerColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as Bars  # noqa: PLC0415

        self._number += 1
        self._began = self._clock.monotonic()
        self._tasks.clear()
        bars = self._bars = Bars(
            TextColumn("{task.fields[lead]}"),
            SpinnerColumn(style="cyan", finished_text="[green]✓[/]"),
            TextColumn("{task.description}", markup=True),
            BarColumn(bar_width=34, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[amount]}", style="dim"),
            console=self._console,
            transient=True,
            refresh_per_second=10,
        )
        head = bars.add_task(f"[bold]{self._number:2}  {title}[/]", total=None, lead="", amount="")
        self._head = head
        self._console.print(f"[cyan]  ▸ {self._number:2}  [bold]{title}[/bold][/cyan]")
        self._print_wrapped(about, "dim")
        bars.remove_task(head)
        bars.start()

    def bar(self, key: str, label: str, total: float) -> None:
        """Shows a bar."""
        if self._bars is not None and key not in self._tasks:
            self._tasks[key] = self._bars.add_task(
                label, total=max(total, 1), lead="    ", amount=""
            )

    def update(self, key: str, done: float, note: str | None = None) -> None:
        """Moves it."""
        if self._bars is not None and key in self._tasks:
            self._bars.update(
                self._tasks[key], completed=done, amount=note if note else f"{done:,.0f}"
            )

    def say(self, text: str) -> None:
        """Shows a line that stays."""
        from rich.text import Text  # noqa: PLC0415

        style = "bold red" if text.startswith("kill") else "yellow"
        self._console.print(Text(f"{_INDENT}{text}", style=style))

    def end(self, words: str) -> None:
        """Takes the bars away, and shows what came of it."""
        self._stop()
        seconds = self._clock.monotonic() - self._began
        self._print_wrapped(f"{words}  [{seconds:.1f}\u00a0s]", "green", mark="✓")

    def leave_out(self, title: str, why: str) -> None:
        """Shows it."""
        from rich.markup import escape  # noqa: PLC0415

        self._number += 1
        self._console.print(f"[dim]  – {self._number:2}  {escape(title)}: left out[/dim]")
        self._print_wrapped(why, "yellow")

    def _print_wrapped(self, text: str, style: str, mark: str = "") -> None:
        from rich.text import Text  # noqa: PLC0415

        width = min(self._console.width, _WIDTH_MAX) - len(_INDENT)
        lead = f"     {mark} " if mark else _INDENT
        for number, line in enumerate(textwrap.wrap(text, max(20, width))):
            self._console.print(Text(f"{lead if number == 0 else _INDENT}{line}", style=style))

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the terminal back."""
        self._stop()


# -- the summary ----------------------------------------------------------------------------


def summarise(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures that matter, in words."""
    if "cluster" in figures:
        return _summarise_cluster(figures)
    traffic, chain = figures["traffic"], figures["chain"]
    latency, kill = traffic["latency"], traffic["kill"]
    rows = [
        ("messages", f"{figures['messages']:,} over {len(figures['topics'])} topics"),
        (
            "throughput",
            f"{traffic['in_per_second']:,.0f} msg/s in, {traffic['out_per_second']:,.0f} msg/s out",
        ),
        (
            "latency",
            (
                f"p50 {latency['steady']['p50']:.1f} ms, p99 {latency['steady']['p99']:.1f} ms "
                f"at {traffic['pace']:,.0f} msg/s"
            ),
        ),
        (
            "kill -9",
            (
                f"back after {kill['away_seconds']:.1f} s, {kill['pending']:,} messages were on "
                "their way"
            ),
        ),
        ("lost", f"{chain['lost']} of {chain['messages']:,} acknowledged messages"),
        ("delivered again", f"{chain['duplicates']:,} (at least once: after the kill, to be sure)"),
        ("read from 0", f"{chain['messages'] / chain['seconds']:,.0f} msg/s; {chain['words']}"),
    ]
    if "compact" in figures:
        report = figures["compact"]["topics"]
        before, after = (sum(one.get(name, 0) for one in report) for name in ("bytes", "new_bytes"))
        objects, merged = (
            sum(one.get(name, 0) for one in report) for name in ("objects", "merged")
        )
        rows.append(
            (
                "compaction",
                (
                    f"{objects} objects became {merged}, {format_bytes(before)} became "
                    f"{format_bytes(after)} (1 : {before / max(1, after):.1f})"
                ),
            )
        )
    for name, key, what in (
        ("SQL", "sql", "revenue of {} countries, orders joined with payments"),
        ("stream", "stream", "{} hourly windows"),
        ("Iceberg", "table", "the same sums in {} countries, read without Ister"),
    ):
        if key in figures:
            found = figures[key]
            rows.append((name, f"{what.format(len(found['rows']))}, {found['seconds']:.1f} s"))
    rows.append(("time", f"{figures['seconds']:.0f} s in all"))
    return rows


def _summarise_cluster(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    cluster, chain = figures["cluster"], figures["chain"]
    kill, rolling = cluster["kill"], cluster["rolling"]
    return [
        ("messages", f"{figures['messages']:,} over {len(figures['topics'])} topics, ack: tiered"),
        (
            "kill -9",
            (
                f"{kill['broker']} died; its topics had answers again after "
                f"{max(kill['pauses'].values(), default=0.0):.1f} s "
                f"(lease: {cluster['lease_seconds']} s)"
            ),
        ),
        (
            "rolling restart",
            (
                f"{rolling['seconds']:.0f} s; longest time without an answer "
                f"{max(one['pause'] for one in rolling['restarts']):.1f} s"
            ),
        ),
        ("lost", f"{chain['lost']} of {chain['messages']:,} acknowledged messages"),
        ("delivered again", f"{chain['duplicates']:,} (at least once: after the kill, to be sure)"),
        ("time", f"{figures['seconds']:.0f} s in all"),
    ]


def print_summary(figures: Mapping[str, Any], *, report: str) -> None:
    """The end of the demo, on standard output."""
    rows = summarise(figures)
    if not is_terminal(sys.stdout):
        print()
        for name, words in rows:
            print(f"{name:16} {words}")
        for one in figures["left_out"]:
            print(f"{'left out':16} {one['title']}: {one['why']}")
        for failure in figures["failures"]:
            print(f"{'FAILED':16} {failure}")
        print(f"{'report':16} {report}")
        return
    from rich import box  # noqa: PLC0415
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", justify="right", no_wrap=True)
    table.add_column()
    for name, words in rows:
        style = "bold green" if name == "lost" and words.startswith("0 ") else ""
        table.add_row(name, Text(words, style=style))
    for one in figures["left_out"]:
        table.add_row("left out", Text(f"{one['title']}: {one['why']}", style="yellow"))
    for failure in figures["failures"]:
        table.add_row("FAILED", Text(failure, style="bold red"))
    table.add_row("report", Text(report, style="underline"))
    is_ok = figures["ok"]
    title = "Nothing was lost" if is_ok else "Something is wrong"
    colour = "green" if is_ok else "red"
    shown = console()
    shown.print()
    shown.print(
        Panel(
            table,
            title=f"[bold {colour}]{title}[/]",
            border_style=colour,
            box=box.ROUNDED,
            padding=(1, 2),
            width=min(shown.width, _WIDTH_MAX + 6),
        )
    )
