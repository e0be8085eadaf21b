"""Which local files of a topic may be removed, by age and by size: the rules, without I/O.

A file goes only if all of these hold:

- it is rotated, and every offset in it is tiered, where there is a bucket;
- every subscription that is active has read it;
- a limit allows it: it is older than `time_minutes`, or the topic's files take more than `size_mb`;
- or, if floors are set in place of limits, both do: it is older than `min_minutes`, and the topic's
  files take more than `min_bytes`; a floor that is not set allows every file;
- every file before it goes too.

A file's age is the time since it was last written, which is when its newest message arrived. A file
of unknown age counts as new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from ister.base.clock_guard import newest_arrivals
from ister.base.limits import MIB
from ister.config import WalRetentionConfig
from ister.errors import NotFoundError
from ister.wal.log import Wal

_MINUTE_MS = 60_000


NO_FLOOR: Final = 1 << 64


class ActiveFloor(Protocol):
    """Returns the lowest offset that a subscription still needs; `NO_FLOOR` without one."""

    def __call__(self, *, include_inactive: bool) -> int:
        """Considers active subscriptions, or all of them."""
        ...


def no_floor(*, include_inactive: bool) -> int:
    """The `ActiveFloor` of a topic without subscriptions."""
    return NO_FLOOR


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFile:
    """A WAL file as retention sees it."""

    first_offset: int
    size_bytes: int
    modified_ms: int | None


def list_files(wal: Wal) -> list[RetentionFile]:
    """A log's files, in the order of their offsets."""
    directory = wal.directory
    if directory is None:
        return []
    found: list[RetentionFile] = []
    for file in wal.files:
        modified_ms: int | None = 0
        try:
            size = directory.log_size(file.seq)
        except NotFoundError:
            size = 0  # Removed by hand: nothing to keep.
        else:
            modified_ms = directory.fs.modified_ms(directory.log_path(file.seq))
        found.append(
            RetentionFile(first_offset=file.first_offset, size_bytes=size, modified_ms=modified_ms)
        )
    return found


def plan_trim(
    files: Sequence[RetentionFile],
    retention: WalRetentionConfig,
    *,
    safe_before: int,
    now_ms: int,
    is_clock_trusted: bool = True,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
) -> int | None:
    """The offset below which files have to go; None if none has to.

    Args:
        files: Ascending; the last one is the active file.
        retention: The limits, or the floors.
        safe_before: Everything below this offset may be removed.
        now_ms: The time.
        is_clock_trusted: Whether ages can be told. If not, no file is old.
        correct_ms: Corrects times that were recorded while the clock was wrong.
    """
    has_floors = retention.has_floors
    minutes = retention.min_minutes if has_floors else retention.time_minutes
    size_mb = retention.size_mb
    most = retention.min_bytes if has_floors else None if size_mb is None else size_mb * MIB
    kept = sum(file.size_bytes for file in files)
    before: int | None = None
    arrived = newest_arrivals(
        [None if (ms := file.modified_ms) is None else correct_ms(ms) for file in files], now_ms
    )
    for (file, following), arrived_ms in zip(pairwise(files), arrived, strict=False):
        if following.first_offset > safe_before:
            break
        is_old = (
            minutes is not None
            and is_clock_trusted
            and arrived_ms is not None
            and now_ms - arrived_ms > minutes * _MINUTE_MS
        )
        is_above = most is not None and kept > most
        if has_floors:
            may_go = (is_old or minutes is None) and (is_above or most is None)
        else:
            may_go = is_old or is_above
        if not may_go:
            break
        before = following.first_offset
        kept -= file.size_bytes
    return before
