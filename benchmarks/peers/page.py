"""Makes docs/BENCHMARKS.md and its plot from the results of a run.

Owns: the text and the tables. Everything that the page says about a contender comes from the run:
figures, versions, settings, caveats, and why one is missing. Who is ahead is computed from the same
figures. Does not own: measuring, writing files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.peers.cases import ROUNDS
from benchmarks.peers.statistics import median


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender at one durability: its result, or why there is none."""

    name: str
    """Of `measure.CONTENDERS`."""
    title: str
    """What the tables call it."""
    durability: str
    facts: dict[str, Any] | None = None
    figures: dict[str, Any] | None = None
    missing: str = ""

    @property
    def is_ister(self) -> bool:
        return self.name.startswith("ister")

    @property
    def is_ranked(self) -> bool:
        """Whether it is compared with others: it was measured, and it is a server."""
        return self.figures is not None and self.name != "ister-open"

    def value(self, case: str) -> float | None:
        """The figure of a case: messages a second, seconds, milliseconds or MiB."""
        found = (self.figures or {}).get(case)
        return found["value"] if isinstance(found, dict) else found


_DURABILITIES = ("synced", "unsynced")
_RATES = {
    "one": "one at a time",
    "many": "64 at once",
    "batched": "batched",
    "consume": "consume, acked",
    "replay": "replay",
}
_TIMES = {"tail_p50_ms": "tail p50", "tail_p99_ms": "tail p99"}
_NONE = "–"
_LOAD_MAX = 1.0


def _digits(value: float | None, digits: int = 3) -> str:
    """Formats a number with that many significant digits, and commas."""
    if value is None:
        return _NONE
    if value == 0:
        return "0"
    size = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    places = max(0, digits - size)
    rounded = round(value, digits - size)
    return f"{rounded:,.{places}f}"


# -- who is ahead ---------------------------------------------------------------------------


def ahead(rows: Iterable[Row], durability: str, case: str) -> tuple[Row, list[tuple[Row, float]]]:
    """Returns the best of Ister's servers in a case, and each peer ahead of it with its factor.

    Raises:
        LookupError: No server of Ister has that figure.
    """
    is_time = case not in _RATES
    having = [
        (row, value)
        for row in rows
        if row.is_ranked and row.durability == durability
        if (value := row.value(case)) is not None
    ]
    ours = [pair for pair in having if pair[0].is_ister]
    if not ours:
        raise LookupError(case)
    best, mark = (min if is_time else max)(ours, key=lambda pair: pair[1])
    factors = [
        (row, mark / value if is_time else value / mark)
        for row, value in having
        if not row.is_ister
    ]
    return best, sorted((pair for pair in factors if pair[1] > 1), key=lambda pair: -pair[1])


def _standing(rows: Sequence[Row]) -> list[str]:
    lines = ["| case | Ister's best | peers ahead of it |", "|---|---|---|"]
    cases = [(durability, case) for durability in _DURABILITIES for case in (*_RATES, *_TIMES)]
    cases += [("unsynced", "restart_seconds"), ("unsynced", "idle_mib")]
    names = {**_RATES, **_TIMES, "restart_seconds": "restart", "idle_mib": "memory, idle"}
    for durability, case in cases:
        try:
            best, peers = ahead(rows, durability, case)
        except LookupError:
            continue
        said = ", ".join(f"{row.title} ({factor:.1f} ×)" for row, factor in peers) or "none"
        after = "" if case in ("restart_seconds", "idle_mib") else f", {durability}"
        lines.append(
            f"| {names[case]}{after} | {best.title}: {_digits(best.value(case))} | {said} |"
        )
    return lines


# -- the page -------------------------------------------------------------------------------


def _figures_table(rows: Sequence[Row], durability: str) -> list[str]:
    head = [*(f"{name}, msg/s" for name in _RATES.values()), "tail p50 / p99, ms"]
    lines = [f"| | {' | '.join(head)} |", "|---|" + "--:|" * len(head)]
    for row in rows:
        if row.durability != durability:
            continue
        if row.figures is None:
            lines.append(f"| {row.title} | missing: {row.missing} |" + " |" * (len(head) - 1))
            continue
        cells = [_digits(row.value(case)) for case in _RATES]
        cells[0] += f" (p50 {_digits(row.value('one_p50_ms'), 2)} ms)"
        cells.append(" / ".join(_digits(row.value(case), 2) for case in _TIMES))
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return lines


def _restart_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| | restart, s | messages stored | lost by `kill -9` | memory idle, MiB | after, MiB |",
        "|---|" + "--:|" * 5,
    ]
    for row in rows:
        if row.durability == "unsynced" and row.figures is not None:
            lost = row.value("lost")
            cells = [
                _digits(row.value("restart_seconds"), 2),
                _NONE if lost is None else f"{row.value('stored'):,}",
                _NONE if lost is None else f"{lost:,}",
                _digits(row.value("idle_mib")),
                _digits(row.value("after_mib")),
            ]
            lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return lines


def _settings_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| server | client | synced | unsynced | settings | consuming |", "|" + "---|" * 6]
    for name in dict.fromkeys(row.name for row in rows):
        both = {row.durability: row for row in rows if row.name == name}
        facts = [row.facts for row in both.values() if row.facts is not None]
        if not facts:
            continue
        durabilities = [
            (row.facts["durability"] if row.facts is not None else row.missing)
            if (row := both.get(durability)) is not None
            else _NONE
            for durability in _DURABILITIES
        ]
        first = facts[0]
        cells = [first["server"], first["client"], *durabilities]
        lines.append(f"| {' | '.join([*cells, first['settings'], first['consuming']])} |")
    return lines


def _spreads(rows: Iterable[Row]) -> list[float]:
    return [
        found["spread"]
        for row in rows
        for found in (row.figures or {}).values()
        if isinstance(found, dict)
    ]


_TEMPLATE = """\
# Benchmarks

Ister compared with NATS JetStream, Redis Streams, RabbitMQ Streams and Kafka: on one machine, in
one run, with messages of 1 KiB, each server with its usual Python client. `make peers` repeats the
measurements and writes this page: it downloads the peers, runs them on the loopback interface and
removes them again.

- Machine: {system}.
- Run: {date}, {minutes:.0f} minutes, load average {load[0]:.2f} at the start and {load[1]:.2f} at
  the end.
- Disk: a loop that writes 1 KiB and calls fdatasync reaches {bare} syncs a second, p50 {bare_p50}
  ms; the better of one run before and one after all others. That is the bound for one sender that
  waits, as long as the disk stays as fast as it was then.
{noise}

![Messages a second](images/peers.svg)

## Answered after the sync

A publish is answered once the message survives power loss. Ister's ack level is `synced`, its
default.

{synced}

## Answered before the sync

A publish is answered before the message is synced: the peers' defaults, and Ister's ack level
`written`, which survives `kill -9` but not power loss.

{unsynced}

## Restart and memory

The server is killed with `kill -9` when its topic holds 1 GiB; restart is the time from starting it
again to the answer to the next publish. Memory is the resident memory of all of the server's
processes: just started, and after all cases of the run that answers before the sync.

{restart}

## Who is ahead

Ister's best server in each case, and every peer that is ahead of it. `ister.open` is left out,
because it crosses no network.

{standing}

## Versions and settings

{settings}

## What is measured, and caveats

- One at a time: one sender, which waits for each answer. 64 at once: 64 senders in one process,
  each of which waits for its own answer before it sends again; a client may combine what its
  senders send at the same moment. Batched: as fast as the client can, until everything is answered.
- Consume, acked: a backlog in a new subscription, until the last acknowledgement is sent. What an
  acknowledgement is differs between servers; see the column "consuming" above. Replay: the same
  backlog without acknowledgements.
- Tail: the latency from just before a publish to a consumer in the same process, at 500 messages a
  second.
- Client and server share the machine's cores, and most clients are written in Python: in many cases
  the client is the bottleneck. Other clients, message sizes and machines give other figures;
  replication is not measured.
- Every server runs with its defaults, except for the settings in the table. Ister also uploads its
  history to a directory on the same disk, as it does by default; no peer does that.
{caveats}
"""


def page(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Returns the Markdown of docs/BENCHMARKS.md.

    Args:
        rows: All results, Ister's first.
        machine: `system`, `date`, `load` (at the start, at the end), `minutes`, `scale`, and
            `bare_per_second` and `bare_p50_ms` of a loop that writes and syncs.
    """
    caveats = [caveat for row in rows if row.facts for caveat in row.facts["caveats"]]
    return _TEMPLATE.format(
        **machine,
        bare=_digits(machine["bare_per_second"]),
        bare_p50=_digits(machine["bare_p50_ms"], 2),
        noise="\n".join(_noise(rows, machine)),
        synced="\n".join(_figures_table(rows, "synced")),
        unsynced="\n".join(_figures_table(rows, "unsynced")),
        restart="\n".join(_restart_table(rows)),
        standing="\n".join(_standing(rows)),
        settings="\n".join(_settings_table(rows)),
        caveats="\n".join(f"- {caveat}" for caveat in dict.fromkeys(caveats)),
    )


def _noise(rows: Sequence[Row], machine: dict[str, Any]) -> list[str]:
    lines = []
    if spreads := _spreads(rows):
        lines.append(
            f"- Noise: a rate is the median of {ROUNDS} rounds, which differ by "
            f"{100 * median(spreads):.0f} % (median of all figures), at most by "
            f"{100 * max(spreads):.0f} %.\n  Smaller differences between rows mean nothing."
        )
    if machine["load"][0] > _LOAD_MAX:
        lines.append("- **The machine was busy with other work: do not quote these figures.**")
    if machine["scale"] != 1:
        share = f"{machine['scale']:g}"
        lines.append(f"- **A trial at {share} of the full size: do not quote these figures.**")
    return lines


# -- the plot -------------------------------------------------------------------------------

_PANELS = (
    ("one", "synced", "one at a time, synced"),
    ("many", "synced", "64 at once, synced"),
    ("batched", "synced", "batched, synced"),
    ("replay", "unsynced", "replay"),
)
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #333 } .title { font-weight: 600 }
.ister { fill: #00897b } .peer { fill: #90a4ae }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .peer { fill: #607d8b } }"""
_WIDTH, _LABEL, _BAR, _STEP, _GAP = 760, 250, 16, 22, 46


def plot(rows: Sequence[Row]) -> str:
    """Returns an SVG with a panel of bars for each of the main cases, in messages a second."""
    parts: list[str] = []
    y = 0
    for case, durability, title in _PANELS:
        bars = [
            (row, value)
            for row in rows
            if row.is_ranked and row.durability == durability
            if (value := row.value(case)) is not None
        ]
        bars.sort(key=lambda bar: -bar[1])
        y += _GAP - _STEP
        parts.append(f'<text class="title" x="0" y="{y}">{escape(title)}, messages a second</text>')
        y += 10
        for row, value in bars:
            length = (_WIDTH - _LABEL - 90) * value / bars[0][1]
            kind = "ister" if row.is_ister else "peer"
            name = row.title.replace("`", "")
            parts += [
                f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
                f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{length:.1f}" height="{_BAR}"/>',
                f'<text x="{_LABEL + length + 6:.1f}" y="{y + 12}">{_digits(value)}</text>',
            ]
            y += _STEP
        y += _STEP
    title = "Messages a second of Ister and its peers; the tables have the same figures"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" role="img" '
        f'aria-labelledby="title">\n<title id="title">{title}</title>\n<style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
