"""What a forked child does with the objects of its parent: nothing, and it says so.

`os.fork`, and `multiprocessing` with the start method `fork`, copy a process with one thread. The
copy has every object of the parent, locks in the state that other threads held them in, and the
same descriptors: unlocking a file, writing to a socket or ending an SQLite connection there would
be done to the parent. So each object with such things registers itself, and in the child it
refuses every call, closes as if it were closed already, and touches nothing.

Owns: the list of these objects, and the call in the child. Does not own: what each of them drops.

A fork by C code that does not tell Python is not noticed.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakSet

from ister.errors import ClosedError

__all__ = ["GRPC", "Inherited", "Library", "in_child", "leak", "register", "renew"]

_log = logging.getLogger("ister.forks")

_HINT: Final = "fork first and open afterwards, or use the start method spawn"


class Inherited(Protocol):
    """Something that a forked child must not use."""

    def _after_fork(self, error: ClosedError) -> None:
        """Has every later call refused with `error`. In the child, on its only thread."""
        ...


_objects: WeakSet[Inherited] = WeakSet()
_calls: Final[list[Callable[[], None]]] = []
_forking_process = 0


def register(inherited: Inherited) -> None:
    """Has `_after_fork` called in children that are forked from now on, while the object lives."""
    _objects.add(inherited)


def in_child(call: Callable[[], None]) -> None:
    """Has a function called in every forked child; for what modules keep."""
    _calls.append(call)


def renew(*locks: Any) -> None:  # noqa: ANN401 - locks and conditions have no type in common
    """Unlocks locks whose holders, if any, do not exist in this child."""
    for lock in locks:
        lock._at_fork_reinit()  # noqa: SLF001 - as the standard library does with its own


def leak(*objects: object) -> None:
    """Keeps objects from ever being finalized, even when the interpreter ends.

    For what would talk to the parent's peers, or change the parent's files, when it is dropped.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


class Library:
    """A library whose own threads do not exist in a forked child, where its calls would hang."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._users = 0
        self._user: int | None = None
        in_child(self._after_fork)

    def use(self) -> None:
        """Notes a use of the library, until `release`.

        Raises:
            ClosedError: The process that this one was forked from did.
        """
        if self._user is not None:
            raise ClosedError(
                f"{self._name} does not work in this process ({os.getpid()}): it was in use when "
                f"process {self._user} forked",
                hint=_HINT,
            )
        self._users += 1

    def release(self) -> None:
        """Notes the end of a use; without one its threads may run on."""
        self._users -= 1

    def _after_fork(self) -> None:
        if self._users and self._user is None:
            self._user = _forking_process


GRPC: Final = Library("gRPC")


def _before() -> None:
    global _forking_process  # noqa: PLW0603 - one fork at a time
    _forking_process = os.getpid()


def _after_in_child() -> None:
    global _objects
    inherited, _objects = list(_objects), WeakSet()
    error = ClosedError(
        f"opened by process {_forking_process}, and this is a fork of it (process {os.getpid()})",
        hint=_HINT,
    )
    for one in inherited:
        try:
            one._after_fork(error)  # noqa: SLF001 - not for users of these objects
        except Exception:  # noqa: BLE001 - the others have to be told all the same
            _log.exception("an object is not safe after a fork", extra={"object": repr(type(one))})
    for call in _calls:
        call()


os.register_at_fork(before=_before, after_in_child=_after_in_child)
