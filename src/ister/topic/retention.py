"""Which local files of a topic may go: the rules, without doing anything.

A file goes only if all of these hold:

- it is rotated, and every offset in it is tiered;
- every subscription that is active has read it;
- it is older than the time limit, or the topic's files take more than the size limit;
- every file before it goes too.

A file whose age is not known counts as new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ister.limits import MIB

__all__ = ["LocalFile", "plan_trim"]

_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A WAL file as retention sees it."""

    first_offset: int
    size_bytes: int
    modified_ms: int | None


def plan_trim(
    files: Sequence[LocalFile],
    *,
    safe_before: int,
    now_ms: int,
    time_minutes: int | None,
    size_mb: int | None,
) -> int | None:
    """The offset below which files have to go; None if none has to.

    Args:
        files: Ascending; the last one is the active file.
        safe_before: Below this everything is tiered and read by every active subscription.
        now_ms: The time.
        time_minutes: Files last written to so long ago go; None keeps them.
        size_mb: The oldest go until no more than this is left; None keeps them.
    """
    excess = sum(file.size_bytes for file in files)
    excess = excess - size_mb * MIB if size_mb is not None else 0
    before: int | None = None
    for file, following in pairwise(files):
        if following.first_offset > safe_before:
            break
        is_old = (
            time_minutes is not None
            and file.modified_ms is not None
            and now_ms - file.modified_ms > time_minutes * _MINUTE_MS
        )
        if not is_old and excess <= 0:
            break
        before = following.first_offset
        excess -= file.size_bytes
    return before
