"""When a cursor is to be written: some time after it moved, or at once when it moved far.

Owns: that decision. Does not own: the write, the cursor, clocks (times are seconds, given with each
call). Not thread-safe.

What is at stake: the messages acknowledged since the last write are delivered again after a crash.
"""

from __future__ import annotations

from ister.errors import InvalidRequestError


class ProgressPlan:
    """When the next write of one subscription's progress is due.

    `flush_interval_seconds`: A change is written at most so long after it happened.
    `min_offset_delta`: A cursor that has moved so many messages is written at once.
    `version`: of the rest of the state, as the store has it.
    """

    def __init__(
        self,
        flush_interval_seconds: float,
        min_offset_delta: int,
        *,
        cursor: int | None = None,
        version: int = 0,
    ) -> None:
        if not flush_interval_seconds >= 0:
            raise InvalidRequestError("progress_flush_interval_seconds must not be negative")
        if min_offset_delta < 1:
            raise InvalidRequestError("progress_min_offset_delta must be at least 1")
        self._interval = flush_interval_seconds
        self._delta = min_offset_delta
        self._stored = (cursor, version)
        self._latest = (cursor, version)
        self._due: float | None = None
        self._not_before = float("-inf")

    @property
    def is_dirty(self) -> bool:
        """Whether there is anything to write, such as at shutdown, when it is not awaited."""
        return self._due is not None

    def update(self, cursor: int, now: float, *, version: int = 0) -> None:
        """Records where the cursor is now.

        `cursor`: the first offset that is not acknowledged.
        `version`: another number when what is saved beside the cursor has changed
        (`Delivery.version`).
        """
        latest = (cursor, version)
        if latest == self._latest:
            return
        self._latest = latest
        stored = self._stored
        if (
            self._due is None
            or latest == stored
            or stored[0] is None
            or abs(cursor - stored[0]) >= self._delta
        ):
            self._plan(now)
        # Else it is due already, and not later than this change would be.

    def is_due(self, now: float) -> bool:
        """Whether it is time to write."""
        deadline = self.deadline()
        return deadline is not None and deadline <= now

    def deadline(self) -> float | None:
        """When it is time to write; None if nothing has changed."""
        return None if self._due is None else max(self._due, self._not_before)

    def written(self, cursor: int, now: float, *, version: int | None = None) -> None:
        """The store has this now. Later changes are still to be written.

        `version`: of the state that was written; as latest last if not given.
        """
        self._stored = (cursor, self._latest[1] if version is None else version)
        self._not_before = float("-inf")
        self._due = None
        self._plan(now)

    def failed(self, now: float, retry_seconds: float) -> None:
        """The write failed; it is due again after a while."""
        self._not_before = now + retry_seconds

    def _plan(self, now: float) -> None:
        if self._latest == self._stored:
            self._due = None
            return
        cursor, stored = self._latest[0], self._stored[0]
        # Either way: a cursor that was put back by a seek is as far from the stored one.
        is_far = cursor is None or stored is None or abs(cursor - stored) >= self._delta
        due = now if is_far else now + self._interval
        self._due = due if self._due is None else min(self._due, due)
