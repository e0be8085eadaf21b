"""How far a log has come at each ack level, and who waits for more.

    tiered ≤ synced ≤ written ≤ next, each only ever rises

Owns: the watermarks and their waiters. Does not own: what makes one rise: `written` and `synced`
belong to the holder of the commit lock (`ister.wal.commit`), `tiered` to the bucket's side,
`next` to the buffer. `written` is set without `lock`; a waiter that enlists checks it twice.
"""

from __future__ import annotations

from ister.base.model import AckLevel
from ister.errors import IsterError, check
from ister.wal.buffer import AppendBuffer
from ister.wal.waiters import Waiter, Waiters


class Levels:
    """The watermarks of one log; see the module header."""

    def __init__(self, buffer: AppendBuffer, *, ack: AckLevel, end: int) -> None:
        """Begins with everything below `end` written and synced, and no bucket.

        `buffer`: has `next`, and the lock.
        """
        self._buffer = buffer
        self._lock = buffer.lock
        self._ack = ack
        self.written = end
        self.synced = end
        self.tiered: int | None = None
        """The end of what committed descriptors cover; None for a log without a bucket."""
        self.waiters = {level: Waiters() for level in AckLevel}
        self._tiering_end: IsterError | None = None

    def watermark(self, level: AckLevel) -> int:
        """The first offset that has not reached `level`."""
        if level is AckLevel.MEMORY:
            return self._buffer.next
        if level is AckLevel.TIERED:
            return self.tiered or 0
        return self.written if level is AckLevel.WRITTEN else self.synced

    @property
    def visible(self) -> int:
        """The end of what readers may see: the watermark of `visible_level`."""
        ack = self._ack
        if ack is AckLevel.MEMORY:
            return self._buffer.next
        if ack is AckLevel.TIERED and self.tiered is not None:
            return self.tiered
        return self.written if ack is AckLevel.WRITTEN else self.synced

    @property
    def visible_level(self) -> AckLevel:
        """The topic's level: another node may continue a `tiered` topic from what is tiered.

        Without a bucket, no message becomes tiered, and a topic of that level shows what is synced.
        """
        return self.local_level if self.tiered is None else self._ack

    @property
    def local_level(self) -> AckLevel:
        """The topic's level, or `synced` if that is `tiered`: as far as local files go."""
        return AckLevel.SYNCED if self._ack is AckLevel.TIERED else self._ack

    def is_wanted(self, level: AckLevel) -> bool:
        """Whether a call waits for a level of an offset that has been given out."""
        return self.waiters[level].wants(self._buffer.next)

    @property
    def is_tiered_wanted(self) -> bool:
        """Whether a call waits for `tiered`; readers that wait for what comes next do not count."""
        return self.waiters[AckLevel.TIERED].has_impatient()

    def add(self, waiter: Waiter, level: AckLevel) -> bool:
        """Enlists a waiter, unless its offset has passed; `lock` is held."""
        if level is AckLevel.TIERED and self._tiering_end is not None:
            raise self._tiering_end.again()
        self.waiters[level].add(waiter)
        if self.watermark(level) > waiter.offset:
            # `written` moves without the lock: it may have moved after the first check, when
            # the writing thread found no waiter.
            waiter.is_done = True
            return False
        return True

    def take_all(self) -> list[Waiter]:
        """Removes and returns all waiters; `lock` is held."""
        return [waiter for waiters in self.waiters.values() for waiter in waiters.take_all()]

    def advance_tiered(self, tiered: int) -> None:
        """Raises `tiered`: committed descriptors cover everything below it."""
        with self._lock:
            check(tiered <= self.synced, "only what is synced becomes tiered")
            if self.tiered is not None and tiered <= self.tiered:
                return
            self.tiered = tiered
            waiters = self.waiters[AckLevel.TIERED]
            waiters.wake_passed(tiered, len(waiters))

    def end_tiering(self, error: IsterError) -> None:
        """Fails all present and future waits for `tiered` with `error`."""
        with self._lock:
            self._tiering_end = error
            everyone = self.waiters[AckLevel.TIERED].take_all()
        for waiter in everyone:
            waiter.finish(error.again())
