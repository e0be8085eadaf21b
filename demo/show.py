"""The interface through which the demo shows its progress."""

from __future__ import annotations

from typing import Protocol


class Show(Protocol):
    """Shows steps and progress bars. Called on the demo's own thread."""

    def begin(self, title: str, about: str) -> None:
        """A step begins."""
        ...

    def bar(self, key: str, label: str, total: float) -> None:
        """Adds a progress bar to the step."""
        ...

    def update(self, key: str, done: float, note: str | None = None) -> None:
        """Moves a progress bar."""
        ...

    def say(self, text: str) -> None:
        """Shows one line."""
        ...

    def end(self, words: str) -> None:
        """The step is over, with this result."""
        ...

    def leave_out(self, title: str, why: str) -> None:
        """A step is skipped."""
        ...
