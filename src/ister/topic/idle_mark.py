"""The mark of an idle topic: its record says that the bucket has everything.

    idle for a while ─► appends held ─► acked_end in the record ─► an append ─► removed ─► accepted

Another node may claim a topic with this mark once its owner's lease has ended
(`TopicRecord.is_whole`). So while the record has it, no message is accepted: the first append waits
for one transaction that removes it.

Owns: the mark and the hold on appends. Does not own: threads and when it is called (`background`).

What a crash leaves: a mark that is true. It is set after appends are held and everything accepted
is found in the bucket, and the hold ends after it was removed. Where an answer was lost, the mark
counts as set; removing it changes the record, so that a late transaction cannot set it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ister.base.model import AckLevel, TopicState
from ister.bucket.ownership import OwnedTopic
from ister.errors import CapacityError
from ister.wal.log import Wal

_HOLD = "idle"


class IdleMark:
    """The mark of one topic. Thread-safe."""

    def __init__(
        self, wal: Wal, owned: OwnedTopic, *, after_seconds: float, on_append: Callable[[], None]
    ) -> None:
        """The mark of a topic that is idle `after_seconds` without an append.

        `on_append` is called when an append waits for `clear`, with the log's lock held, and must
        not block.
        """
        self._wal = wal
        self._owned = owned
        self._after = after_seconds
        self._changing = threading.Lock()
        self._next = -1
        self._idle_since = 0.0
        self.is_set = False
        """Whether the record has the mark, or may have it."""
        self.is_clearing = False
        """Whether `clear` is about to be called; set by `background`."""
        self._on_append = on_append

    def is_due(self, now: float) -> bool:
        """Whether the topic has been idle for long enough; called now and then."""
        wal = self._wal
        if wal.next != self._next or wal.next != wal.tiered:
            self._next, self._idle_since = wal.next, now
            return False
        # A topic with the level `tiered` needs no mark.
        return (
            not self.is_set
            and wal.settings.ack is not AckLevel.TIERED
            and now - self._idle_since >= self._after
        )

    def set(self) -> bool:
        """Sets the mark if everything is in the bucket; returns whether it did.

        Raises:
            UnavailableError: The metadata store does not answer; the mark counts as set.
        """
        wal, owned = self._wal, self._owned
        with self._changing:
            if self.is_set or wal.state is not TopicState.OPEN or wal.next != wal.tiered:
                return False
            if owned.is_fenced or not owned.is_leased:
                return False
            wal.gate.hold(_HOLD, self._held_error, waits=True, on_append=self._on_append)
            # An append may have been accepted before the hold; from here on none is.
            end = wal.next
            if end != wal.tiered:
                wal.gate.unhold(_HOLD)
                return False
            self.is_set = True
            owned.set_acked_end(end)
            return True

    def clear(self) -> None:
        """Removes the mark; then appends are accepted again.

        Raises:
            UnavailableError: The metadata store does not answer; appends stay held.
        """
        with self._changing:
            if self.is_set:
                self._owned.set_acked_end(None)
                self.is_set = False
                self._wal.gate.unhold(_HOLD)

    def _held_error(self) -> CapacityError:
        return CapacityError(
            "the topic was idle, and its record is being changed",
            topic=self._owned.topic,
            hint="appends resume when the metadata store has answered",
        )
