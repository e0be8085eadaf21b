"""Read, decide, change if nothing else came first; otherwise once more.

Owns: how often a change of records is attempted, and what a lost answer means. Does not own: what
an attempt reads and decides; changes under an owner's epoch (`ister.bucket.ownership`).

A lost answer is never repeated blindly: the next attempt reads what has become of the change, so
an attempt must recognise its own work, or be harmless when it is done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ister.errors import CommitUnknownError, IsterError
from ister.metadata.base import Absent, Compare, KeyValue, RevisionIs

_Answer = TypeVar("_Answer")

ATTEMPTS: Final = 5
"""Each fails only if another change succeeded meanwhile, or if its answer was lost."""


def unchanged(key: str, found: KeyValue | None) -> Compare:
    """Holds while a key is as it was read."""
    return Absent(key) if found is None else RevisionIs(key, found.revision)


def transact(
    attempt: Callable[[], _Answer | None], error: IsterError, *, attempts: int = ATTEMPTS
) -> _Answer:
    """Calls `attempt` until it returns an answer; None means that its compares failed.

    Raises:
        IsterError: `error`, if other changes keep coming first.
        CommitUnknownError: Answers keep being lost.
    """
    lost: CommitUnknownError | None = None
    lost_count = 0
    for _ in range(attempts):
        try:
            answer = attempt()
        except CommitUnknownError as unknown:
            lost, lost_count = unknown, lost_count + 1
            if lost_count == ATTEMPTS:
                raise
            continue
        if answer is not None:
            return answer
    raise error from lost
