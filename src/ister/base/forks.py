"""Makes objects unusable in a forked child, so that it cannot disturb its parent.

`os.fork`, and `multiprocessing` with the start method `fork`, copy a process with one thread. The
child has a copy of every object of the parent, locks that threads of the parent held, and the same
file descriptors: unlocking a file, writing to a socket or closing an SQLite connection in the child
would affect the parent. So objects that hold such resources register here. In the child, each of
them raises `ClosedError` from every call, can be closed without effect, and leaves its resources
alone.

Owns: the registered objects, and the call in the child. Does not own: what each object abandons.

A fork by C code that bypasses Python's fork hooks is not detected.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakSet

from ister.errors import ClosedError

_log = logging.getLogger("ister.forks")

HINT: Final = "fork first and open afterwards, or use the start method spawn"


class Inherited(Protocol):
    """An object that a forked child must not use."""

    def _after_fork(self, error: ClosedError) -> None:
        """Makes every later call raise `error`. Called in the child, on its only thread."""
        ...


_objects: WeakSet[Inherited] = WeakSet()
_calls: Final[list[Callable[[], None]]] = []
_forking_process = 0


def register(inherited: Inherited) -> None:
    """Calls `_after_fork` in every child forked from now on; keeps a weak reference."""
    _objects.add(inherited)


def call_in_child(call: Callable[[], None]) -> None:
    """Calls a function in every forked child; for the state of modules."""
    _calls.append(call)


def reset_locks(*locks: Any) -> None:  # noqa: ANN401 - locks and conditions have no common type
    """Unlocks locks in a forked child, where the threads that held them do not exist."""
    for lock in locks:
        lock._at_fork_reinit()  # noqa: SLF001 - the standard library does this with its own locks


def leak(*objects: object) -> None:
    """Prevents objects from ever being finalized, even at interpreter exit.

    For objects whose finalizer would write to the parent's connections or files.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


class Library:
    """A library that cannot be used after a fork: its threads are missing, and calls would hang."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._users = 0
        self._user: int | None = None
        call_in_child(self._after_fork)

    def use(self) -> None:
        """Counts a use of the library, until `release`.

        Raises:
            ClosedError: The parent process was using the library when it forked.
        """
        if self._user is not None:
            raise ClosedError(
                f"{self._name} cannot be used in process {os.getpid()}: its parent, process "
                f"{self._user}, was using it when it forked",
                hint=HINT,
            )
        self._users += 1

    def release(self) -> None:
        """Ends a use of the library."""
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
        f"opened by process {_forking_process}; cannot be used in its forked child, "
        f"process {os.getpid()}",
        hint=HINT,
    )
    for one in inherited:
        try:
            one._after_fork(error)  # noqa: SLF001 - not for users of these objects
        except Exception:  # noqa: BLE001 - the other objects still have to be made unusable
            _log.exception(
                "cannot disable an object after a fork", extra={"object": repr(type(one))}
            )
    for call in _calls:
        call()


os.register_at_fork(before=_before, after_in_child=_after_in_child)
