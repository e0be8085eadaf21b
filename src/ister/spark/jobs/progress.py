"""Reports the progress of a job."""

from __future__ import annotations

from typing import Protocol


class JobProgress(Protocol):
    """Receives the progress of a job. Called on the job's own thread."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """Starts a phase; `unit` is `bytes`, `objects`, `messages` or the like."""
        ...

    def advance(self, amount: int, note: str = "") -> None:
        """Adds to what is done; `note` says what was done last."""
        ...

    def end(self) -> None:
        """Ends the phase, whether it succeeded or not."""
        ...


class NoProgress:
    """Shows no progress."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """Does nothing."""

    def advance(self, amount: int, note: str = "") -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""
