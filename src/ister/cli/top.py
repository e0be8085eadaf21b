"""`ister top`: rates, lag, blocked subscriptions and upload lag of all topics, live.

Owns: what is asked for, the columns, their order, and the keys. Does not own: the numbers, which
brokers compute (`ister.client` asks them); lines of plain text (`table`).

On a terminal the view fills the screen and is replaced every interval; columns are left out from
the right where it is narrow. Anywhere else, snapshots follow each other. While no broker answers,
the last numbers stay, with their age; the first request has to succeed.

Rates are those of the last ten seconds or so, as brokers measure them. Lag is that of the
subscription that is furthest behind.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from ister.base.clock import Clock, SystemClock
from ister.base.model import JsonObject
from ister.base.positions import format_time
from ister.cli.command import Arg, command, register_command
from ister.cli.connection import Broker, parse_count, parse_seconds
from ister.cli.errors_out import error_as_json, print_json
from ister.cli.interrupts import Interrupts
from ister.cli.output import console, format_bytes, format_span, is_terminal
from ister.cli.table import format_table
from ister.errors import IsterError, UnavailableError

if TYPE_CHECKING:
    from rich.text import Text

    from ister.wire.views import TopicJson

_INTERVAL_SECONDS: Final = 2.0
_INTERVAL_MIN: Final = 0.1
_TOPIC_CHARACTERS_MIN: Final = 12
_EMPTY: Final = "no topics yet; create one with `ister produce /default/NAME`"


# -- numbers --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class TopicLoad:
    """What the view shows of one topic."""

    topic: str
    messages_in: float = 0.0
    bytes_in: float = 0.0
    messages_out: float = 0.0
    bytes_out: float = 0.0
    lag: int = 0
    subscriptions: int = 0
    blocked: int = 0
    upload_lag_messages: int = 0
    upload_lag_bytes: int = 0
    state: str = ""
    """Empty if it is open."""


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    """The name for `--sort`."""
    header: str
    value: Callable[[TopicLoad], float | str]
    show: Callable[[TopicLoad], str]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _bytes_rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


# In a narrow terminal, the last columns are left out first.
_COLUMNS: Final = (
    _Column("in", "IN/S", lambda one: one.messages_in, lambda one: _rate(one.messages_in)),
    _Column("out", "OUT/S", lambda one: one.messages_out, lambda one: _rate(one.messages_out)),
    _Column("lag", "LAG", lambda one: one.lag, lambda one: f"{one.lag:,}"),
    _Column("blocked", "BLOCKED", lambda one: one.blocked, lambda one: f"{one.blocked:,}"),
    _Column(
        "upload-lag",
        "NOT UPLOADED",
        lambda one: one.upload_lag_bytes,
        lambda one: format_bytes(one.upload_lag_bytes),
    ),
    _Column(
        "bytes-in", "BYTES IN", lambda one: one.bytes_in, lambda one: _bytes_rate(one.bytes_in)
    ),
    _Column(
        "bytes-out", "BYTES OUT", lambda one: one.bytes_out, lambda one: _bytes_rate(one.bytes_out)
    ),
    _Column("state", "STATE", lambda one: one.state, lambda one: one.state),
)
SORTS: Final = ("topic", *(column.name for column in _COLUMNS))
"""Values of `--sort`."""


def measure(views: Iterable[TopicJson], *, by_partition: bool) -> list[TopicLoad]:
    """The numbers of topics, from what `Admin.list_topics` returns.

    Partitions are added up as their topic, unless `by_partition`.
    """
    loads: dict[str, TopicLoad] = {}
    lags: dict[str, dict[str, int]] = {}
    blocked: dict[str, set[str]] = {}
    for view in views:
        name = view["topic"] if by_partition else view.get("parent") or view["topic"]
        load = loads.setdefault(name, TopicLoad(topic=name))
        rates = view.get("rates") or {}
        load.messages_in += rates.get("messages_in", 0.0)
        load.bytes_in += rates.get("bytes_in", 0.0)
        load.messages_out += rates.get("messages_out", 0.0)
        load.bytes_out += rates.get("bytes_out", 0.0)
        behind = view.get("upload_lag") or {}
        load.upload_lag_messages += behind.get("messages", 0)
        load.upload_lag_bytes += behind.get("bytes", 0)
        state = view.get("state")
        if state not in (None, "open"):
            load.state = str(state)
        for one in view.get("subscriptions") or ():
            of = lags.setdefault(name, {})
            of[one["name"]] = of.get(one["name"], 0) + (one["lag"] or 0)
            if one["blocked_reason"]:
                blocked.setdefault(name, set()).add(one["name"])
    for name, load in loads.items():
        found = lags.get(name, {})
        load.lag = max(found.values(), default=0)
        load.subscriptions = len(found)
        load.blocked = len(blocked.get(name, ()))
    return list(loads.values())


def sort_loads(
    loads: Iterable[TopicLoad], by: str, *, is_reversed: bool = False
) -> list[TopicLoad]:
    """Sorts topics by a column: names and states alphabetically, numbers in descending order."""
    ordered = sorted(loads, key=lambda one: one.topic)
    column = next((one for one in _COLUMNS if one.name == by), None)
    if column is not None:
        # Topics that are not open come first: an empty state is the smallest text.
        ordered.sort(key=column.value, reverse=True)
    return ordered[::-1] if is_reversed else ordered


def _total(loads: Iterable[TopicLoad]) -> TopicLoad:
    """The totals over all topics; the lag is the largest one."""
    total = TopicLoad(topic="")
    for one in loads:
        total.messages_in += one.messages_in
        total.bytes_in += one.bytes_in
        total.messages_out += one.messages_out
        total.bytes_out += one.bytes_out
        total.lag = max(total.lag, one.lag)
        total.subscriptions += one.subscriptions
        total.blocked += one.blocked
        total.upload_lag_messages += one.upload_lag_messages
        total.upload_lag_bytes += one.upload_lag_bytes
    return total


def _as_json(one: TopicLoad) -> JsonObject:
    return {
        "rates": {
            "messages_in": round(one.messages_in, 2),
            "bytes_in": round(one.bytes_in, 2),
            "messages_out": round(one.messages_out, 2),
            "bytes_out": round(one.bytes_out, 2),
        },
        "lag": one.lag,
        "subscriptions": one.subscriptions,
        "blocked": one.blocked,
        "upload_lag": {"messages": one.upload_lag_messages, "bytes": one.upload_lag_bytes},
    }


# -- the command ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """Which topics are shown, and in which order at first."""

    sort: str = "in"
    is_reversed: bool = False
    by_partition: bool = False
    limit: int | None = None


@command(
    None, "top", json="print each snapshot as a line with one JSON object", failed={"topics": []}
)
def top(
    broker: Broker,
    *,
    sort: Annotated[
        str, Arg(f"column to sort by: {', '.join(SORTS)} (default: in)", "COLUMN", choices=SORTS)
    ] = "in",
    reverse: Annotated[bool, Arg("reverse the order")] = False,
    namespace: Annotated[str | None, Arg("only topics of this namespace", "NAME")] = None,
    partitions: Annotated[bool, Arg("show partitions instead of their topics")] = False,
    limit: Annotated[int | None, Arg("show at most this many topics", "N", parse_count)] = None,
    interval: Annotated[
        float,
        Arg(
            f"time between two snapshots (default: {_INTERVAL_SECONDS:g})", "SECONDS", parse_seconds
        ),
    ] = _INTERVAL_SECONDS,
    once: Annotated[bool, Arg("print one snapshot and exit")] = False,
    json: bool,
) -> int:
    """Show rates, lag, blocked subscriptions and upload lag of all topics, live.

    Shows the load of all topics on all brokers of a cluster: messages and bytes per second in and
    out, the largest lag of a subscription, blocked subscriptions, and bytes that are not uploaded
    yet. Keys: q quits, s sorts by the next column, r reverses the order. If the output is not a
    terminal, snapshots are printed one after the other.

    Examples:
        ister top
        ister top --sort lag --interval 5
        ister top --once --json
    """
    with broker.connect() as client, Interrupts() as interrupts:

        def ask() -> list[TopicJson]:
            with interrupts.breaking():
                return client.admin.list_topics(namespace)

        selection = Selection(sort, reverse, partitions, limit)
        view = View(ask, selection, broker.address, SystemClock(), is_json=json)
        try:
            view.refresh()
            view.check()
            if once:
                view.print()
            elif not json and is_terminal(sys.stdout):
                _live(view, interrupts, interval)
            else:
                _repeat(view, interrupts, interval)
        except KeyboardInterrupt:
            pass  # how the command is ended
    return 0


register = register_command(top)


def _repeat(view: View, interrupts: Interrupts, interval: float) -> None:
    while True:
        view.print()
        sys.stdout.flush()
        if interrupts.wait(max(interval, _INTERVAL_MIN)):
            return
        view.refresh()


class View:
    """The last numbers, their order, and the last error."""

    def __init__(
        self,
        ask: Callable[[], list[TopicJson]],
        selection: Selection,
        broker: str,
        clock: Clock,
        *,
        is_json: bool = False,
    ) -> None:
        """`ask` returns the topics of the brokers; `broker` is the address that is shown."""
        self._ask = ask
        self._selection = selection
        self._broker = broker
        self._is_json = is_json
        self._clock = clock
        self._loads: list[TopicLoad] | None = None
        self._measured_ms = 0
        self._error: IsterError | None = None
        self._printed = 0
        self.sort: str = selection.sort
        self.is_reversed: bool = selection.is_reversed

    def refresh(self) -> None:
        """Requests the numbers again; keeps the last ones if no broker answers."""
        try:
            self._loads = measure(self._ask(), by_partition=self._selection.by_partition)
        except UnavailableError as error:
            self._error = error
        else:
            self._error = None
            self._measured_ms = self._clock.now_ns() // 1_000_000

    def check(self) -> None:
        """Raises the error of the last refresh, if it failed.

        Raises:
            UnavailableError: No broker answered.
        """
        if self._error is not None:
            raise self._error

    @property
    def _ordered(self) -> list[TopicLoad]:
        loads = sort_loads(self._loads or (), self.sort, is_reversed=self.is_reversed)
        return loads[: self._selection.limit]

    def next_sort(self) -> None:
        """Sorts by the next column."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    # -- output -----------------------------------------------------------------------------

    def print(self) -> None:
        """Prints a snapshot: plain text, or one JSON object."""
        if self._is_json:
            loads = self._loads or ()
            content: JsonObject = {
                "time": format_time(self._measured_ms),
                "broker": self._broker,
                "total": {"topics": len(loads), **_as_json(_total(loads))},
                "topics": [
                    {"topic": one.topic, **_as_json(one), "state": one.state or "open"}
                    for one in self._ordered
                ],
            }
            if self._error is not None:
                content["errors"] = [error_as_json(self._error)]
            print_json(content)
            return
        if self._printed:
            print()
        self._printed += 1
        for line in self.lines(width=None):
            print(line)

    def lines(self, *, width: int | None, height: int | None = None) -> list[str]:
        """The view as lines: a head, a state that matters, and the table.

        Args:
            width: Columns of the terminal; None for as many as it takes.
            height: Lines of the terminal; None for as many as it takes.
        """
        lines = [_cut(line, width) for line in (*self._head(), *self._states())]
        lines.append("")
        ordered = self._ordered
        if not ordered:
            if self._loads is not None:
                lines.append(_cut(_EMPTY, width))
            return lines
        room = len(ordered) if height is None else max(height - len(lines) - 1, 1)
        shown = ordered[:room]
        if len(shown) < len(ordered) and room > 1:
            shown = shown[:-1]
        lines += self._table(shown, width)
        if len(shown) < len(ordered):
            lines.append(_cut(f"… {len(ordered) - len(shown):,} more topics", width))
        return lines

    def _head(self) -> Iterator[str]:
        loads = self._loads or ()
        total = _total(loads)
        topics = f"{len(loads):,} topic{'' if len(loads) == 1 else 's'}"
        yield f"broker {self._broker}  {topics}  {format_time(self._measured_ms)}"
        yield (
            f"in {_rate(total.messages_in)}/s ({_bytes_rate(total.bytes_in)})  "
            f"out {_rate(total.messages_out)}/s ({_bytes_rate(total.bytes_out)})  "
            f"blocked {total.blocked}  not uploaded {format_bytes(total.upload_lag_bytes)}"
        )

    def _states(self) -> Iterator[str]:
        if self._error is None:
            return
        age = (self._clock.now_ns() // 1_000_000 - self._measured_ms) / 1000
        yield f"{self._error.message}; these numbers are {format_span(age)} old; retrying"

    def _table(self, loads: Sequence[TopicLoad], width: int | None) -> list[str]:
        longest = max(len("TOPIC"), *(len(one.topic) for one in loads))
        columns = [
            one for one in _COLUMNS if one.name != "state" or any(one.state for one in loads)
        ]
        widths = {one.name: _width(one, loads) for one in columns}
        # The sort column is always shown.
        columns.sort(key=lambda one: one.name != self.sort)
        room = longest
        while width is not None and columns:
            taken = sum(2 + widths[column.name] for column in columns)
            room = min(longest, width - taken)
            if room >= min(longest, _TOPIC_CHARACTERS_MIN) or len(columns) == 1:
                break
            columns.pop()
        columns.sort(key=_COLUMNS.index)
        titles = ["TOPIC", *(_aligned(one, self._title(one), widths) for one in columns)]
        rows = [
            (
                _shorten(load.topic, max(room, 1)),
                *(_aligned(one, one.show(load), widths) for one in columns),
            )
            for load in loads
        ]
        return [_cut(line, width) for line in format_table(titles, rows).split("\n")]

    def _title(self, column: _Column) -> str:
        return f"{column.header}*" if column.name == self.sort else column.header


def _width(column: _Column, loads: Sequence[TopicLoad]) -> int:
    # One more for the sort mark.
    return max(len(column.header) + 1, *(len(column.show(one)) for one in loads))


def _aligned(column: _Column, text: str, widths: Mapping[str, int]) -> str:
    return text if column.name == "state" else text.rjust(widths[column.name])


def _shorten(topic: str, width: int) -> str:
    """The end of a long name: topics of one namespace begin alike."""
    return topic if len(topic) <= width else f"…{topic[len(topic) - width + 1 :]}"


def _cut(line: str, width: int | None) -> str:
    line = line.rstrip()
    return line if width is None or len(line) <= width else f"{line[: max(width - 1, 0)]}…"


# -- live -----------------------------------------------------------------------------------


def _live(view: View, interrupts: Interrupts, interval: float) -> None:
    from rich.live import Live  # noqa: PLC0415

    clock = SystemClock()
    interval = max(interval, _INTERVAL_MIN)
    with (
        _keys(interrupts) as wait_for_key,
        Live(console=console(), screen=True, auto_refresh=False) as live,
    ):
        due = clock.monotonic() + interval
        while not interrupts.is_set:
            live.update(_drawn(view), refresh=True)
            key = wait_for_key(max(due - clock.monotonic(), 0))
            if key in ("q", "Q", "\x03", "\x04"):
                return
            if key == "s":
                view.next_sort()
            elif key == "r":
                view.is_reversed = not view.is_reversed
            if clock.monotonic() >= due:
                view.refresh()
                due = clock.monotonic() + interval


def _drawn(view: View) -> Text:
    from rich.text import Text  # noqa: PLC0415

    size = shutil.get_terminal_size()
    text = Text(no_wrap=True, overflow="crop")
    lines = view.lines(width=size.columns, height=size.lines - 1)
    title = lines.index("") + 1 if "" in lines else 0
    for number, line in enumerate(lines):
        style = "bold" if number == 0 else "dim" if number == title else ""
        if 1 < number < title - 1:
            style = "bold red"
        text.append(f"{line}\n", style=style)
    text.append(_cut("q quit  s sort  r reverse", size.columns), style="dim")
    return text


@contextmanager
def _keys(interrupts: Interrupts) -> Iterator[Callable[[float], str]]:
    """A function that waits for a key for some seconds; it returns "" if none came."""
    if not sys.stdin.isatty():

        def wait_alone(seconds: float) -> str:
            interrupts.wait(seconds)
            return ""

        yield wait_alone
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        # Keys are read one at a time, without echo; Ctrl-C is still a signal.
        tty.setcbreak(fd)

        def wait(seconds: float) -> str:
            ready, _, _ = select.select([fd, interrupts.fd], [], [], seconds)
            # The end of the input is not a key, and must not be polled again.
            return (os.read(fd, 1).decode(errors="replace") or "q") if fd in ready else ""

        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
