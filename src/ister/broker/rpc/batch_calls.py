"""Calls that arrive together and are handled together.

A method of a service may have a second form that takes many calls: `Name_batch(calls)`, called on
the broker's loop, or `Name_direct(calls, blocking)`, called by any thread. It does exactly one of
three things with each call: answers it, refuses it, or defers it to the method's ordinary form,
which may wait.

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


class Blocking(Protocol):
    """Lets a `Name_direct` block its thread while it syncs the disk."""

    def begin(self) -> bool:
        """Asks to block the calling thread; if True, `end` has to be called."""
        ...

    def end(self) -> None:
        """Ends the permission that `begin` gave."""
        ...
