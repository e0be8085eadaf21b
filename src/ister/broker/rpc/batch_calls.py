"""Calls that arrive together and are handled together.

A method of a service may have a second form that takes many calls, `Name_batch(calls)`. It does
exactly one of three things with each call: answers it, refuses it, or defers it to the method's
ordinary form, which may wait. Calls that wait for the disk are answered later: it returns them as
`Appended`, for each of which the engine chooses which thread commits.

Owns: the interface of such a call. Does not own: how a call arrives and how its answer leaves (the
engines).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from ister.broker.security.guard import Caller


class BatchCall(ABC):
    """One call of a batch. Thread-safe."""

    __slots__ = ("arrived", "caller", "data")

    def __init__(self, data: bytes, caller: Caller | None, arrived: float) -> None:
        self.data = data
        """The serialized request."""
        self.caller = caller
        """The authenticated caller; None if authentication is off."""
        self.arrived = arrived
        """When the call was taken, in `time.monotonic` seconds."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Ends the call with the status of an error."""

    @abstractmethod
    def defer(self) -> None:
        """Leaves the call to the method's ordinary form, on the loop."""

    def answer(self, answer: bytes) -> None:
        """Answers the call."""
        self.answer_all([self], [answer])

    @staticmethod
    @abstractmethod
    def answer_all(calls: Sequence[BatchCall], answers: Sequence[bytes]) -> None:
        """Answers calls of one method that arrived by the same engine."""


class Appended(Protocol):
    """Calls whose messages were appended to a topic, and are answered once these are durable.

    Exactly one of its methods is called, once.
    """

    def wait(self) -> None:
        """Commits in this thread, or waits for the one that does, and answers the calls."""
        ...

    def notify(self) -> None:
        """Has the calls answered by whichever thread commits; does not block."""
        ...
