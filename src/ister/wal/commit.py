"""Group commit: which thread writes and syncs a log, and when.

    append ─► buffer (chunks of frames) ─► write ─► written ─► sync ─► synced
              `lock`, microseconds         `commit lock`, one thread at a time

A thread that waits for its message commits itself if no other thread does: without a hop to another
thread, a single waiter pays for one write and one sync. The exception is the main thread, which a
signal handler can interrupt anywhere (`ister.wal.signals`): the scheduler's threads commit for
it. Waiters that arrive during a commit enlist, and their messages become the next batch: the
running sync is the batching window, without a timer; after it, threads that were woken together may
append before the first of them commits. If waiters remain when a commit ends, the scheduler's
threads continue. Without waiters, bytes are written after `LAZY_WRITE_SECONDS` or from a megabyte
on, and synced after `fsync_interval_ms` or `fsync_max_batch_bytes`.

What no call waits for is upkeep: those syncs, the checkpoint, idle files. Other threads of the
scheduler do it, at most one for a log, and a second thread that finds the commit lock taken does
not wait for it. So a log whose disk is slow holds one thread that commits and one for upkeep.

Locks are taken in this order: commit lock, sync lock, `lock`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from ister.base.limits import (
    APPEND_CHUNK_BYTES,
    IDLE_FILE_SECONDS,
    LAZY_WRITE_SECONDS,
    MIB,
    SLOW_SYNC_SECONDS,
    STALL_RETRY_SECONDS,
    WRITE_BYTES_MAX,
)
from ister.base.model import AckLevel, TopicState
from ister.errors import CapacityError, IsterError, WaitTimeoutError, check
from ister.wal.buffer import Chunk
from ister.wal.state import LogState
from ister.wal.waiters import ThreadWaiter, Waiter
from ister.wal.writer import SyncFailedError, WalWriter

_log = logging.getLogger("ister.wal.log")

# With this much in the buffer, a write is worth it although no call waits.
_KICK_BYTES = MIB
# Waking a thread costs microseconds: an append wakes a few readers, and `run` the others.
_INLINE_WAKES_MAX = 2


class GroupCommit(LogState):
    """The committing half of a log; see the module header. Thread-safe."""

    # -- after appends -------------------------------------------------------------------------

    def _attend(self) -> None:
        """Seals a full chunk, wakes readers and has a thread commit; `lock` is held.

        `push` calls this only when `attention_at` is reached.
        """
        self.buffer.seal_if_full()
        tail = self._waiters[AckLevel.MEMORY]
        if tail and not self._has_crowd and tail.wake_passed(self.next, _INLINE_WAKES_MAX):
            self._has_crowd = True
            if not self._is_scheduled:
                self._submit()
        if self._writer is None:
            self._set_attention()
            return
        if not self._is_scheduled and (
            self.buffer.pending_bytes >= _KICK_BYTES
            or self._is_wanted(AckLevel.WRITTEN)
            or self._is_wanted(AckLevel.SYNCED)
        ):
            # A running commit looks for new messages at its end; a second thread would only
            # wait for it.
            if not self._commit_lock.locked():
                self._submit()
        else:
            self._arm_lazy_write()
        self._set_attention()

    def _arm_lazy_write(self) -> None:
        """Has the buffer written after `LAZY_WRITE_SECONDS` even if no call waits for it.

        The timer stays set if a call waits meanwhile: setting it wakes the timer thread, which
        costs too much for every message of a producer that waits for each.
        """
        if self.buffer.pending_bytes and not self._is_lazy_armed:
            self._is_lazy_armed = True
            self._unwritten_since = self._clock.monotonic()
            self._arm_timer(self._unwritten_since + LAZY_WRITE_SECONDS)

    def _set_attention(self) -> None:
        """Decides when `push` calls `_attend` next."""
        waiters, buffer = self._waiters, self.buffer
        if waiters[AckLevel.MEMORY]:
            buffer.attention_at = 0
        elif self._is_scheduled or self._commit_lock.locked():
            # A commit is on its way, and looks for new messages at its end.
            buffer.attention_at = buffer.chunk_base + APPEND_CHUNK_BYTES
        elif waiters[AckLevel.WRITTEN] or waiters[AckLevel.SYNCED] or not self._is_lazy_armed:
            buffer.attention_at = 0
        else:
            buffer.attention_at = buffer.chunk_base + APPEND_CHUNK_BYTES

    def _make_room(self) -> None:
        """Waits until the buffer has shrunk; writes it itself if no other thread does.

        Called with `lock` held; releases it meanwhile.
        """
        if self._schedule.is_interruptible():
            if not self._is_scheduled:
                self._submit()
        elif self._commit_lock.acquire(blocking=False):
            self.lock.release()
            try:
                self._commit(sync=False)
            except IsterError:
                # From here on `_refusal` answers appends, with the reason.
                _log.debug("commit by an appender failed", exc_info=True)
            finally:
                self._release_commit()
                self.lock.acquire()
            return
        self._wait_for_room(timeout=STALL_RETRY_SECONDS)

    def _is_wanted(self, level: AckLevel) -> bool:
        return self._waiters[level].wants(self.next)

    def _is_write_wanted(self) -> bool:
        """Whether to write before the timer: for waiters, for room, or because there is much."""
        pending = self.buffer.pending_bytes
        return (
            self._is_wanted(AckLevel.WRITTEN)
            or pending >= _KICK_BYTES
            or (bool(self._room_waiters) and pending > 0)
        )

    # -- interrupts ----------------------------------------------------------------------------

    def clean_up_interrupt(self) -> None:
        """Releases the lock and repairs the state after an interrupted call.

        See `ister.wal.signals`.
        """
        if self.holds_lock:
            self.lock.release()
        if self.buffer.is_changing:
            with self.lock:
                self.repair()

    def repair(self) -> None:
        """Repairs the state after an interrupted append; `lock` is held.

        Call this first after taking the lock to use the buffer: an exception from a signal handler
        may have interrupted an earlier repair.
        """
        if not self.buffer.is_changing:
            return
        self.buffer.rebuild()
        self.on_repaired()
        # Waiters may not have been woken and a timer not been set; `run` does both.
        self._is_lazy_armed = False
        self._timer_at = math.inf
        self.buffer.attention_at = 0
        self._schedule.submit(self)
        self.buffer.is_changing = False

    # -- waiting -------------------------------------------------------------------------------

    def wait(
        self,
        offset: int,
        level: AckLevel,
        timeout: float | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        """Returns once the watermark of `level` has passed `offset`.

        With `is_patient`, a wait for `tiered` takes uploads as they come.

        Raises:
            WaitTimeoutError: It did not pass in `timeout` seconds; the message stays accepted.
            CapacityError: The disk is full. The message stays in the buffer, is not durable, and
                is written when there is room again.
            DiskError: The write or the sync failed; whether the message is stored is unknown.
            ClosedError: The log was closed before.
        """
        if self.watermark(level) > offset:
            return
        self.check_reentry()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        if level is AckLevel.TIERED:
            self.wait(offset, AckLevel.SYNCED, timeout)
        while True:
            # At or above `next` only an append can end the wait. With a deadline, other threads
            # commit: a thread inside of a sync cannot give up.
            if (
                deadline is None
                and level is not AckLevel.TIERED
                and offset < self.next
                and self.try_commit(offset, level)
            ):
                return
            waiter = ThreadWaiter(offset, is_patient=is_patient)
            try:
                if not self.enlist(waiter, level):
                    return
                remaining = None if deadline is None else deadline - self._clock.monotonic()
                if not waiter.block(remaining) and self.watermark(level) <= offset:
                    raise WaitTimeoutError(
                        f"offset not {level} after {timeout} s",
                        topic=self.settings.topic,
                        offset=offset,
                    )
            finally:
                waiter.is_done = True
            if waiter.error is not None:
                raise waiter.error
            return

    def enlist(self, waiter: Waiter, level: AckLevel) -> bool:
        """Has `waiter` called when the watermark of `level` passes its offset.

        Returns:
            False, and the waiter is not enlisted, if it has passed already.

        Raises:
            IsterError: The log is closed, failed, or stalled.
        """
        self.check_reentry()
        try:
            return self._enlist(waiter, level)
        except BaseException:
            self.clean_up_interrupt()
            raise

    def _enlist(self, waiter: Waiter, level: AckLevel) -> bool:
        with self.lock:
            if self.watermark(level) > waiter.offset:
                return False
            if self._refusal is not None and self._state is not TopicState.STALLED:
                if self._state is not TopicState.QUARANTINED:
                    self._is_failure_told = True
                    raise self.failure.again() if self.failure is not None else self._refusal()
                if waiter.offset < self.next:
                    raise self._refusal()
            if level is AckLevel.TIERED and self._tiering_end is not None:
                raise self._tiering_end.again()
            self._waiters[level].add(waiter)
            if self.watermark(level) > waiter.offset:
                # `written` moves without the lock: it may have moved after the first check, when
                # the writing thread found no waiter.
                waiter.is_done = True
                return False
            if level is AckLevel.TIERED and not waiter.is_patient:
                self.on_tier_wanted()
            self._set_attention()
            if (
                waiter.offset < self.next
                and not self._is_scheduled
                and not self._commit_lock.locked()
            ):
                self._submit()
            return True

    def try_commit(self, offset: int, level: AckLevel) -> bool:
        """Commits in the calling thread, unless another thread is committing.

        Args:
            offset: An appended offset.
            level: `written` or `synced`.

        Returns:
            Whether the watermark of `level` has passed `offset`. If not, another thread is
            committing, or signal handlers may interrupt this one: `enlist` a waiter.

        Raises:
            CapacityError: The disk is full. The message stays in the buffer, is not durable, and
                is written when there is room again.
            DiskError: The write or the sync failed; whether the message is stored is unknown.
            ClosedError: The log was closed before.
        """
        if self.watermark(level) > offset:
            return True
        if not self.take_turn():
            return False
        try:
            self._gather()
            return self.commit_in_turn(offset, level)
        finally:
            self.end_turn()

    def _gather(self) -> None:
        """Lets the threads that the last sync has woken append, so that they share the next sync.

        Without it the first of them would sync its message alone, and the others after it. There
        is no timer: it returns when nothing was appended since the last check.
        """
        for _ in range(self._woken_count - 1):
            seen = self.next
            self._clock.sleep(0)
            if self.next == seen:
                return

    def take_turn(self) -> bool:
        """Makes the calling thread the one that commits, until `end_turn`.

        For a thread that appends and then commits its own messages: no other thread is woken to
        commit meanwhile.

        Returns:
            False if another thread is committing, or signal handlers may interrupt this one.
        """
        if self._schedule.is_interruptible() or not self._commit_lock.acquire(blocking=False):
            return False
        self._has_turn = True
        self._had_open_file = self.has_open_file
        return True

    def commit_in_turn(self, offset: int, level: AckLevel) -> bool:
        """Like `try_commit`, between `take_turn` and `end_turn`."""
        try:
            if self.watermark(level) > offset:
                return True
            self._commit(sync=level is AckLevel.SYNCED)
        except CapacityError:
            if self.watermark(level) > offset:
                return True
            raise
        except IsterError:
            self._is_failure_told = True
            raise
        return self.watermark(level) > offset

    def end_turn(self) -> None:
        """Ends the turn of the calling thread; other threads commit what was appended meanwhile."""
        has_opened_file = not self._had_open_file and self.has_open_file
        self._has_turn = False
        self._release_commit()
        if has_opened_file:
            # The scheduler's thread counts the file: this one must not sync those of other topics.
            with self.lock:
                if not self._is_scheduled:
                    self._submit()

    # -- commit --------------------------------------------------------------------------------

    def run(self) -> None:
        """Commits and maintains what is due. Called by the scheduler's threads."""
        with self.lock:
            self.repair()
            self._is_scheduled = self._has_crowd = False
            tail = self._waiters[AckLevel.MEMORY].take_passed(self.next)
        for waiter in tail:
            waiter.finish(None)
        if self._writer is None or self._state in (TopicState.CLOSED, TopicState.FAILED):
            return
        if not self._commit_lock.acquire(blocking=False):
            # Its holder looks for more at the end. The checkpoint does not need the lock, and
            # must not wait until no producer commits for itself.
            self._plan_upkeep()
            return
        try:
            self._commit_what_is_due()
            if self._sync_is_due():
                self._lazy_sync = (self.written, self._writer.position, self._writer.seq)
        except IsterError:
            # Every waiter has the error, and appends are refused from here on.
            _log.debug("commit failed", exc_info=True)
        finally:
            self._release_commit()
        self._plan_upkeep()

    def _commit_what_is_due(self) -> None:
        """Commits until no call waits and little is left, or until a sync is due.

        The commit lock is held.
        """
        now = self._clock.monotonic()
        while self._state in (TopicState.OPEN, TopicState.STALLED):
            if self._state is TopicState.STALLED and now < self._stalled_until:
                return
            with self.lock:
                sync = self._is_wanted(AckLevel.SYNCED)
                is_lazy_write_due = (
                    self.buffer.pending_bytes > 0
                    and now - self._unwritten_since >= LAZY_WRITE_SECONDS
                )
                write = (
                    is_lazy_write_due
                    or self._is_write_wanted()
                    or self._state is TopicState.STALLED
                )
            if not (write or sync):
                return
            self._commit(sync=sync)
            if self._sync_is_due() and not self._has_upkeep:
                return  # another thread syncs beside the next commit

    def _sync_is_due(self) -> bool:
        """Whether the unsynced bytes are as old or as many as the settings allow."""
        writer = self._writer
        if writer is None or writer.unsynced_bytes == 0 or self._state is not TopicState.OPEN:
            return False
        return (
            writer.unsynced_bytes >= self.settings.fsync_max_batch_bytes
            or self._clock.monotonic() - self._unsynced_since
            >= self.settings.fsync_interval_seconds
        )

    def _commit(self, *, sync: bool) -> None:
        """Writes what is in the buffer and, if asked to, syncs. The commit lock is held.

        Raises:
            CapacityError: The disk is full; the frames stay in memory for the next try.
            DiskError: The writer has stopped.
        """
        writer = self._writer
        check(writer is not None, "only a log with files commits")
        if writer is None or self._state in (TopicState.CLOSED, TopicState.FAILED):
            raise self.failure.again() if self.failure is not None else self._closed_error()
        if self._state is TopicState.STALLED and not (self._is_closing or self.may_retry()):
            self._stall(self._stall_cause)
            raise self._stalled_error(self._stall_cause)
        try:
            self._write_buffer(writer)
            if sync:
                self._sync(writer)
        except SyncFailedError as error:
            self._fail(error)
            raise
        except CapacityError as error:
            self._sync_what_is_written(writer)
            self._stall(error)
            raise
        except BaseException as error:
            self._fail(error)
            raise
        if self._state is TopicState.STALLED:
            self._resume()

    def _sync_what_is_written(self, writer: WalWriter) -> None:
        """Makes what is written durable, although the disk is full."""
        try:
            self._sync(writer)
        except SyncFailedError as error:
            self._fail(error)
            raise

    def _write_buffer(self, writer: WalWriter) -> None:
        with self.lock:
            self.repair()
            taken = self.buffer.take()
            self._set_attention()
        self._inflight += taken
        while self._inflight:
            group = self._next_group()
            size = sum(chunk.size_bytes for chunk in group)
            if writer.rotation_is_due():
                self._sync(writer)
                self._rotate(writer, group[0].first_offset)
            started = self._clock.monotonic()
            if writer.unsynced_bytes == 0:
                self._unsynced_since = started
            writer.write(group)
            elapsed = self._clock.monotonic() - started
            del self._inflight[: len(group)]
            check(group[-1].end_offset > self.written, "written only ever rises")
            # Set without the lock: only the holder of the commit lock changes these, and waiting
            # for a lock that a busy producer keeps taking costs a turn at the interpreter lock.
            # `enlist` checks the watermark again after adding a waiter: either the check below
            # finds the waiter, or `enlist` finds the new watermark.
            self.written = group[-1].end_offset
            self.buffer.mark_written(size)
            if self._waiters[AckLevel.WRITTEN] or self._room_waiters:
                with self.lock:
                    passed = self._waiters[AckLevel.WRITTEN].take_passed(self.written)
                    self._wake_room_waiters()
                for waiter in passed:
                    waiter.finish(None)
            self._metrics.observe("wal.writer_flush_latency_ms", elapsed * 1000)
            self._metrics.count("wal.writer_flush_bytes", size)
        self._active_at = self._clock.monotonic()

    def _rotate(self, writer: WalWriter, next_offset: int) -> bool:
        """Begins a new file after the old one was synced. False if it cannot be created."""
        with self._sync_lock:
            if not writer.rotate(next_offset):
                return False
            if self._checkpointer is not None:
                self._checkpointer.update(self.synced)
        if self._checkpointer is not None:
            self._checkpointer.save_quietly()
        return True

    def _next_group(self) -> list[Chunk]:
        """The chunks for one write: at least one, at most about `WRITE_BYTES_MAX`."""
        group = [self._inflight[0]]
        size = group[0].size_bytes
        for chunk in self._inflight[1:]:
            size += chunk.size_bytes
            if size > WRITE_BYTES_MAX:
                break
            group.append(chunk)
        return group

    def _sync(self, writer: WalWriter) -> None:
        """Syncs for waiting calls. The commit lock is held."""
        with self._sync_lock:
            self._sync_and_publish(writer, self.written, writer.position)

    def _sync_lazily(self, writer: WalWriter) -> None:
        """Syncs what no call waits for, up to where `run` found it due.

        Without the commit lock, so that it does not hold up the writer: at full speed a disk syncs
        slower than the page cache takes bytes. A sync that already runs goes at least as far, since
        it began under the commit lock after `run` had it.
        """
        wanted, self._lazy_sync = self._lazy_sync, None
        if wanted is None or not self._sync_lock.acquire(blocking=False):
            return
        target, position, seq = wanted
        failure: SyncFailedError | None = None
        try:
            # Under the lock no file is ended, and what was ended has been synced.
            if self._state is TopicState.OPEN and seq == writer.seq and target > self.synced:
                self._sync_and_publish(writer, target, position)
        except SyncFailedError as error:
            failure = error
        finally:
            self._sync_lock.release()
        if failure is not None:
            # The writer refuses every sync from here on, so no waiter is misled meanwhile.
            with self._commit_lock:
                self._fail(failure)

    def _sync_and_publish(self, writer: WalWriter, target: int, position: int) -> None:
        """Makes frames below `target`, up to `position` in the file, durable; wakes waiters."""
        started = self._sync_began = self._clock.monotonic()
        self.synced_bytes_total += max(0, position - writer.synced_position)
        try:
            writer.sync(position)
        finally:
            self._sync_began = None
            elapsed = self._clock.monotonic() - started
            if elapsed >= SLOW_SYNC_SECONDS:
                self._slow_sync = (started + elapsed, elapsed)
        self._unsynced_since = started
        if self._checkpointer is not None:
            self._checkpointer.update(target)
        with self.lock:
            check(self.synced <= target, "synced only ever rises")
            self.synced = target
            passed = self._waiters[AckLevel.SYNCED].take_passed(target)
        for waiter in passed:
            waiter.finish(None)
        self._woken_count = len(passed)
        if len(passed) == 1 and not self._has_turn:
            # A single waiter goes first: it needs the interpreter lock, which this thread would
            # otherwise keep until its bookkeeping is done. A thread that commits its own messages
            # goes first itself.
            self._clock.sleep(0)
        self.on_synced()
        self._metrics.observe("wal.writer_sync_latency_ms", elapsed * 1000)

    def _release_commit(self) -> None:
        """Releases the commit lock, and has new messages committed too."""
        self._commit_lock.release()
        with self.lock:
            if self._state not in (TopicState.OPEN, TopicState.STALLED):
                return
            if (
                not self._is_scheduled
                and self._state is TopicState.OPEN
                and (self._is_wanted(AckLevel.SYNCED) or self._is_write_wanted())
            ):
                self._submit()
            else:
                self._arm_lazy_write()
                self._arm_timer(self._next_due())
            self._set_attention()

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Holds the commit lock for work that is not a commit."""
        self._commit_lock.acquire()
        try:
            yield
        finally:
            self._release_commit()

    def _submit(self) -> None:
        # In this order: an exception from a signal handler in between must not leave a log that is
        # marked as scheduled and is not in the queue.
        self._schedule.submit(self)
        self._is_scheduled = True

    def stop(self, error: Exception) -> None:
        """Stops the writer after an unexpected error, which is raised in all waiting calls."""
        with self._commit_lock:
            if self._state is not TopicState.CLOSED:
                self._fail(error)

    # -- time ----------------------------------------------------------------------------------

    def _arm_timer(self, when: float) -> None:
        if when < self._timer_at:
            self._timer_at = when
            if not math.isinf(when):
                self._schedule.submit_at(self, when)

    def on_timer(self, when: float) -> None:
        """Schedules the log; called at the time of a `submit_at`."""
        with self.lock:
            if when != self._timer_at:
                return  # an earlier one has been set since
            self._timer_at = math.inf
            self._is_lazy_armed = False
            if not self._is_scheduled:
                self._is_scheduled = True
                self._schedule.submit(self)

    def _next_due(self) -> float:
        """When `run` has work although no call waits; infinity if never."""
        writer = self._writer
        if writer is None:
            return math.inf
        due = math.inf
        # A running commit sets the timer at its end. One for a time in the past would wake threads
        # that can do nothing, again and again until then.
        if not self._commit_lock.locked():
            if self._state is TopicState.STALLED:
                return self._stalled_until
            if self.buffer.pending_bytes:
                return self._unwritten_since + LAZY_WRITE_SECONDS
            if writer.unsynced_bytes and not self._sync_lock.locked():
                due = self._unsynced_since + self.settings.fsync_interval_seconds
        return math.inf if self._has_upkeep else min(due, self._upkeep_due_at(writer))

    def _upkeep_due_at(self, writer: WalWriter) -> float:
        """When the checkpoint has to be saved, or else an idle file to be closed."""
        due = math.inf if self._checkpointer is None else self._checkpointer.due_at()
        # Those cases set the timer when they end, and until then the file stays open.
        is_busy = writer.unsynced_bytes or self._inflight or self._commit_lock.locked()
        if math.isinf(due) and writer.is_open and not is_busy:
            due = self._active_at + IDLE_FILE_SECONDS
        return due

    def _plan_upkeep(self) -> None:
        """Has upkeep done when it is due, and sets the next timer."""
        writer = self._writer
        with self.lock:
            if writer is not None and self._state in (TopicState.OPEN, TopicState.STALLED):
                is_due = self._lazy_sync or self._clock.monotonic() >= self._upkeep_due_at(writer)
                if is_due and not self._has_upkeep:
                    self._has_upkeep = True
                    self._schedule.submit_upkeep(self)
                self._arm_timer(self._next_due())
            self._set_attention()

    def run_upkeep(self) -> None:
        """Does what no call waits for. Called by the scheduler's threads for upkeep."""
        try:
            if self._writer is not None:
                self._sync_lazily(self._writer)
            saver = self._checkpointer
            if saver is not None and self._clock.monotonic() >= saver.due_at():
                saver.save_quietly()
            if self._clock.monotonic() - self._active_at >= IDLE_FILE_SECONDS:
                self.release_file()
        finally:
            # Its end sets the timer for what has become due meanwhile.
            self._has_upkeep = False
        self._plan_upkeep()

    def release_file(self, *, sync: bool = False) -> bool:
        """Closes the writer's file if no thread writes and everything is synced; returns whether.

        `sync` first syncs what is not synced.
        """
        writer = self._writer
        if writer is None or not writer.is_open or not self._commit_lock.acquire(blocking=False):
            return False
        try:
            if sync and writer.unsynced_bytes and self._state is TopicState.OPEN:
                self._sync_what_is_written(writer)
            if writer.unsynced_bytes or self._inflight:
                return False
            with self._sync_lock:
                writer.close_file()
            return True
        finally:
            self._release_commit()
