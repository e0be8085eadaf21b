"""The memory budget of a broker for messages on their way to consumers.

    subscription ─ set ─► Share ─┐
    subscription ─ set ─► Share ─┼─► Budget ─ over ─► shed: the idle and the largest first
    non-reliable ─ set ─► Share ─┤
    streams ─ WriteQueue ────────┘

Owns: the sum, and which share has to release memory. Does not own: the messages; the owner of a
share releases its own. What streams are writing cannot be released, so a write that does not fit
waits (`write_queue`).

Rules:

- while less than half of the budget is used, a share may hold as much as it needs. Beyond that,
  `allowance` is an equal part of one half of the budget for each share that is not empty;
- when the budget is used up, idle shares release their memory first, then the largest, until a
  quarter of the budget is free. A reliable subscription reads its messages again later; a
  non-reliable one drops them.

Used only on the broker's loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from ister.base.limits import MIB
from ister.broker.dispatch.write_queue import WriteQueue

_PART_OF_MACHINE: Final = 8
_BYTES_MIN: Final = 64 * MIB
# A read may have a message of the largest size, of `storage.max_message_size` by default.
_READ_BYTES: Final = 32 * MIB
_READS_MIN: Final = 2
_CGROUP: Final = "/sys/fs/cgroup"


class Budget:
    """The memory of one broker for messages that are being delivered.

    Args:
        bytes_max: The budget; None for an eighth of the memory of the machine, or of this
            process's control group.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        if bytes_max is None:
            bytes_max = max(_BYTES_MIN, machine_memory_bytes() // _PART_OF_MACHINE)
        self.bytes_max = bytes_max
        self.used = 0
        """Bytes in all shares."""
        self.released = 0
        """How many times a share had to release memory."""
        self.reads = asyncio.Semaphore(max(_READS_MIN, bytes_max // _READ_BYTES))
        """For reads of files and objects, whose size is known when they are done."""
        self.writes = WriteQueue(bytes_max, self._count)
        """What streams are writing; a part of `used`."""
        self._holders = 0
        self._shed_above = bytes_max
        self._shares: set[Share] = set()
        self._is_shedding = False

    @property
    def allowance(self) -> int:
        """The most bytes that one share should hold now."""
        if self.used <= self.bytes_max // 2:
            return self.bytes_max
        return self.bytes_max // (2 * max(1, self._holders))

    def share(self, shed: Callable[[], None]) -> Share:
        """Makes an empty share; `shed` is called when it has to release what it can."""
        made = Share(self, shed)
        self._shares.add(made)
        return made

    def record(self, share: Share, used: int) -> None:
        """Records the new size of a share; beyond the budget, has shares release memory."""
        self._holders += (used > 0) - (share.used > 0)
        change, share.used = used - share.used, used
        self._count(change)

    def _count(self, change: int) -> None:
        self.used += change
        if self.used <= self.bytes_max:
            self._shed_above = self.bytes_max
        elif self.used > self._shed_above and not self._is_shedding:
            self._shed()

    def leave(self, share: Share) -> None:
        """Removes a share."""
        self.record(share, 0)
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
        # What is left cannot be released. Trying again for every message would only cost time.
        self._shed_above = max(self.bytes_max, self.used + self.bytes_max // 8)


class Share:
    """What one subscription, or one consumer of a non-reliable one, holds."""

    __slots__ = ("_budget", "_is_closed", "fixed", "is_idle", "shed", "used")

    def __init__(self, budget: Budget, shed: Callable[[], None]) -> None:
        self._budget = budget
        self.shed = shed
        self.used = 0
        self.fixed = 0
        """Bytes of `used` that cannot be released."""
        self._is_closed = False
        self.is_idle = False
        """Whether no consumer has taken anything from it for a while."""

    @property
    def allowance(self) -> int:
        """The most bytes that it should hold now."""
        return self._budget.allowance

    @property
    def releasable(self) -> int:
        """Bytes that `shed` releases."""
        return self.used - self.fixed

    def set(self, used: int, *, fixed: int = 0) -> None:
        """Sets the bytes that it holds, of which `fixed` cannot be released."""
        self.fixed = fixed
        if used != self.used and not self._is_closed:
            self._budget.record(self, used)

    def close(self) -> None:
        """Empties it for good."""
        self._is_closed = True
        self._budget.leave(self)


def machine_memory_bytes() -> int:
    """The memory of the machine, or of this process's control group if that is less."""
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
