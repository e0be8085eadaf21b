"""How far a job has come, told to whoever wants to show it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """Shows how far a job has come. Called on the job's own thread."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """A part of the job begins; `unit` is `bytes`, `objects`, `messages` or the like."""
        ...

    def advance(self, amount: int, note: str = "") -> None:
        """So much more is done; `note` says what was done last."""
        ...

    def end(self) -> None:
        """The part has ended, well or not."""
        ...


class NoProgress:
    """Shows nothing."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """Shows nothing."""

    def advance(self, amount: int, note: str = "") -> None:
        """Shows nothing."""

    def end(self) -> None:
        """Shows nothing."""
