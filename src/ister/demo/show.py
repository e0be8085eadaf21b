"""How the demo tells what it does, to whoever shows it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoShow", "Show"]


class Show(Protocol):
    """Shows steps and bars. Called on the demo's own thread."""

    def begin(self, title: str, about: str) -> None:
        """A step begins."""
        ...

    def bar(self, key: str, label: str, total: float) -> None:
        """Something with an end goes on within the step."""
        ...

    def update(self, key: str, done: float, note: str | None = None) -> None:
        """So much of it is done."""
        ...

    def say(self, text: str) -> None:
        """Something worth a line has happened."""
        ...

    def end(self, words: str) -> None:
        """The step is over; what came of it."""
        ...

    def leave_out(self, title: str, why: str) -> None:
        """A step is not done, and why."""
        ...


class NoShow:
    """Shows nothing."""

    def begin(self, title: str, about: str) -> None:
        """Shows nothing."""

    def bar(self, key: str, label: str, total: float) -> None:
        """Shows nothing."""

    def update(self, key: str, done: float, note: str | None = None) -> None:
        """Shows nothing."""

    def say(self, text: str) -> None:
        """Shows nothing."""

    def end(self, words: str) -> None:
        """Shows nothing."""

    def leave_out(self, title: str, why: str) -> None:
        """Shows nothing."""
