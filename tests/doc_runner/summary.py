"""What was run of the documents, and what was only checked, for those who wonder.

Outcomes come with the reports of tests: those may have run in another process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.doc_runner.run import Outcome

OUTCOME = "outcome of a page"
"""The property of a test that has one."""


def summarize(reports: Iterable[Any]) -> list[str]:
    """The lines to print; none if no page was run."""
    outcomes = [
        Outcome(**value)
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == OUTCOME
    ]
    if not outcomes:
        return []
    outcomes.sort(key=lambda one: one.page)
    checked = [command for outcome in outcomes for command in outcome.checked]
    names = sorted({command[0] for command in checked})
    notes = (
        note
        for outcome in outcomes
        for note in (*outcome.skipped, *(f"{one} (run there)" for one in outcome.elsewhere))
    )
    blocks, commands = sum(one.ran for one in outcomes), sum(one.commands for one in outcomes)
    return [
        f"{blocks} blocks of {len(outcomes)} pages were run, with {commands} lines of commands",
        f"{len(checked)} commands were only checked, not run: {', '.join(names) or 'none'}",
        *(f"not run here: {note}" for note in notes),
    ]
