"""How much memory a broker uses for messages on their way to consumers, and who gives some back.

    subscription ─ set ─► Share ─┐
    subscription ─ set ─► Share ─┼─► Budget ─ over ─► shed: the idle and the largest first
    non-reliable ─ set ─► Share ─┘

Owns: the sum, and who is asked. Does not own: the messages; whoever has a share lets go of its own.

Rules:

- everybody takes what it needs while less than half of the budget is used. From there on
  `allowance` is an equal part of one half for each that holds something: nobody is left without;
- beyond the budget those that nobody takes from give back first, then the largest, until a quarter
  is free. A reliable subscription reads its messages again; a non-reliable one drops them;
- what cannot be given back, such as the one message that is being written to a stream, may go over.

Of the broker's loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from ister.limits import MIB

__all__ = ["Budget", "Share", "machine_memory_bytes"]

_PART_OF_MACHINE: Final = 8
_BYTES_MIN: Final = 64 * MIB
_CGROUP: Final = "/sys/fs/cgroup"


class Budget:
    """The memory of one broker for messages that are being delivered.

    Args:
        bytes_max: How much; None for an eighth of what the machine, or this process's control
            group, has.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        if bytes_max is None:
            bytes_max = max(_BYTES_MIN, machine_memory_bytes() // _PART_OF_MACHINE)
        self.bytes_max = bytes_max
        self.used = 0
        """Bytes in all shares."""
        self.released = 0
        """How often somebody was asked to give back, so far."""
        self._holders = 0
        self._shed_above = bytes_max
        self._shares: set[Share] = set()
        self._is_shedding = False

    @property
    def allowance(self) -> int:
        """How much one share should have at most, now."""
        if self.used <= self.bytes_max // 2:
            return self.bytes_max
        return self.bytes_max // (2 * max(1, self._holders))

    def share(self, shed: Callable[[], None]) -> Share:
        """A new share, with nothing in it; `shed` is called to have it give back what it can."""
        made = Share(self, shed)
        self._shares.add(made)
        return made

    def note(self, share: Share, used: int) -> None:
        """Records the new size of a share; beyond the budget, has others give back."""
        self.used += used - share.used
        self._holders += (used > 0) - (share.used > 0)
        share.used = used
        if self.used <= self.bytes_max:
            self._shed_above = self.bytes_max
        elif self.used > self._shed_above and not self._is_shedding:
            self._shed()

    def leave(self, share: Share) -> None:
        """A share is given up."""
        self.note(share, 0)
        self._shares.discard(share)

    def _shed(self) -> None:
        self._is_shedding = True
        try:
            enough = self.bytes_max - self.bytes_max // 4
            for share in sorted(
                self._shares, key=lambda one: (one.is_idle, one.releasable), reverse=True
            ):
                if self.used <= enough:
                    break
                if share.releasable > 0:
                    self.released += 1
                    share.shed()
        finally:
            self._is_shedding = False
        # What is left cannot be given back. Asking again for every message would only cost time.
        self._shed_above = max(self.bytes_max, self.used + self.bytes_max // 8)


class Share:
    """What one subscription, or one consumer of a non-reliable one, holds."""

    __slots__ = ("_budget", "_is_closed", "fixed", "is_idle", "shed", "used")

    def __init__(self, budget: Budget, shed: Callable[[], None]) -> None:
        self._budget = budget
        self.shed = shed
        self.used = 0
        self.fixed = 0
        """How much of it cannot be given back."""
        self._is_closed = False
        self.is_idle = False
        """Whether nobody has taken anything from it for a while."""

    @property
    def allowance(self) -> int:
        """How much it should have at most, now."""
        return self._budget.allowance

    @property
    def releasable(self) -> int:
        """How much `shed` gives back."""
        return self.used - self.fixed

    def set(self, used: int, *, fixed: int = 0) -> None:
        """It has so many bytes now, of which `fixed` cannot be given back."""
        self.fixed = fixed
        if used != self.used and not self._is_closed:
            self._budget.note(self, used)

    def close(self) -> None:
        """It is empty, and stays so."""
        self._is_closed = True
        self._budget.leave(self)


def machine_memory_bytes() -> int:
    """The memory that this process may use: the machine's, or less if a control group says so."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limit_files():
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():  # not `max`
            found = min(found, int(text))
    return found


def _limit_files() -> list[str]:
    """Where the limits of this process's control groups may be, of both versions."""
    files = [f"{_CGROUP}/memory.max", f"{_CGROUP}/memory/memory.limit_in_bytes"]
    for controllers, path in _own_groups():
        root, name = (
            (_CGROUP, "memory.max")
            if not controllers
            else (f"{_CGROUP}/memory", "memory.limit_in_bytes")
        )
        if controllers and "memory" not in controllers.split(","):
            continue
        above = path
        while above not in ("", "/"):
            files.append(f"{root}{above}/{name}")
            above = os.path.dirname(above)
    return files


def _own_groups() -> list[tuple[str, str]]:
    """The control groups of this process: controllers, none for version 2, and the path."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = [line.split(":", 2) for line in lines]
    return [(fields[1], fields[2]) for fields in found if len(fields) == 3]
