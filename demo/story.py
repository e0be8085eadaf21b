"""What every demo is made of: steps that are shown and timed, proofs, and figures.

Owns: the figures, one dictionary of plain values, which the summary, `--json` and the report are
made of. Does not own: how they are shown, or what the steps do.

A step that fails ends the demo. A proof that fails does not: the rest is worth seeing, and the
figures say what is wrong.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import ister
from demo.show import Show
from ister.base.clock import Clock, SystemClock
from ister.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is wanted of the demo."""

    directory: str
    """An empty one; all data goes there."""
    messages: int = 120_000
    seed: int = 7
    uses_spark: bool = True


@dataclass(slots=True)
class Step:
    """A step under way."""

    words: str = ""
    command: str | None = None

    def end(self, words: str) -> None:
        """What came of it."""
        self.words = words


class Story:
    """The steps and figures of a demo. Used once."""

    def __init__(self, plan: Plan, show: Show, clock: Clock | None = None) -> None:
        """Makes the directory.

        Raises:
            InvalidRequestError: The directory has something in it.
        """
        if os.path.isdir(plan.directory) and os.listdir(plan.directory):
            raise InvalidRequestError(
                f"{plan.directory} is not empty",
                path=plan.directory,
                hint="--data names a directory that is new or empty",
            )
        os.makedirs(plan.directory, exist_ok=True)
        self._plan = plan
        self._show = show
        self._clock = clock or SystemClock()
        self.figures: dict[str, Any] = {
            "ok": False,
            "version": ister.__version__,
            "seed": plan.seed,
            "started_at": datetime.fromtimestamp(self._clock.now_ns() // 10**9, UTC).isoformat(),
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, "
            f"{platform.system()} {platform.machine()}",
            "steps": [],
            "left_out": [],
            "missing": [],
            "proofs": {"chain": [], "deliveries": [], "sums": []},
            "failures": [],
        }

    @contextmanager
    def _step(self, title: str, about: str) -> Iterator[Step]:
        step = Step()
        self._show.begin(title, about)
        began = self._clock.monotonic()
        yield step
        self.figures["steps"].append(
            {
                "title": title,
                "about": about,
                "seconds": self._clock.monotonic() - began,
                "result": step.words,
                "command": step.command,
            }
        )
        self._show.end(step.words)

    def _leave_out(self, title: str, why: str | None = None) -> None:
        why = why or "; ".join(self.figures["missing"])
        self.figures["left_out"].append({"title": title, "why": why})
        self._show.leave_out(title, why)

    def _note(self, failure: str) -> None:
        if failure:
            self.figures["failures"].append(failure)

    def _check(self, name: str, expected: object, found: object) -> None:
        """Compares a sum with the shop's own."""
        is_ok = expected == found
        self.figures["proofs"]["sums"].append(
            {
                "name": name,
                "ok": is_ok,
                "expected": sum(expected.values()) if isinstance(expected, dict) else expected,
                "found": sum(found.values()) if isinstance(found, dict) else found,
            }
        )
        if not is_ok:
            self._note(f"{name}: the shop has {expected}, and {found} was found")
