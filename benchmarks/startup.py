"""`benchmarks startup`: CPU time of `import ister`, of `ister --help` and of the first use.

The limit of each figure is an interpreter that does nothing. CPU time, not wall time: a busy
machine changes it little. Each process runs several times in turn, and the least is taken:
everything that disturbs a run adds to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Final

from benchmarks.measurement import Run, take_turns

_ROUNDS: Final = 20
_IMPORT_MS_MAX: Final = 150.0
_HELP_MS_MAX: Final = 200.0

_PROCESSES: Final[dict[str, tuple[tuple[str, ...], float | None]]] = {
    "import": (("-c", "import ister"), _IMPORT_MS_MAX),
    "open": (("-c", "import ister; ister.open"), None),
    "help": (("-m", "ister", "--help"), _HELP_MS_MAX),
    "command_help": (("-m", "ister", "dlq", "list", "--help"), None),
}
_NOTES: Final = {
    "open": "what `ister.open` needs is loaded when it is first used",
    "command_help": "`ister dlq list --help`: a command that talks to a broker",
}


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    work = {name: partial(_cpu_ms, arguments) for name, (arguments, _) in _PROCESSES.items()}
    taken = take_turns(
        max(3, run.scaled(_ROUNDS)), {"nothing": partial(_cpu_ms, ("-c", "pass")), **work}
    )
    least = {name: min(figures) for name, figures in taken.items()}
    for name, (_, most) in _PROCESSES.items():
        run.add(
            f"{name}_cpu",
            least[name],
            "ms",
            limit=least["nothing"],
            limit_name="an interpreter that does nothing",
            at_most=most,
            note=_NOTES.get(name),
        )


def _cpu_ms(arguments: tuple[str, ...]) -> float:
    """The CPU time of a process, and of nothing else that this one has started."""
    child = subprocess.Popen(  # noqa: S603
        [sys.executable, *arguments], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, child.args)
    return (usage.ru_utime + usage.ru_stime) * 1000
