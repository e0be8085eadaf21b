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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ister.base.clock import Clock
from ister.base.guarded_lock import GuardedLock
from ister.base.limits import (
    APPEND_CHUNK_BYTES,
    IDLE_FILE_SECONDS,
    LAZY_WRITE_SECONDS,
    MIB,
    SLOW_SYNC_SECONDS,
    SLOW_SYNC_SHOWN_SECONDS,
    STALL_RETRY_SECONDS,
    WRITE_BYTES_MAX,
)
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, TopicState
from ister.errors import CapacityError, ClosedError, IsterError, check
from ister.wal.buffer import AppendBuffer, Chunk
from ister.wal.checkpointer import Checkpointer
from ister.wal.gate import AppendGate
from ister.wal.levels import Levels
from ister.wal.settings import WalSettings
from ister.wal.waiters import Waiter
from ister.wal.writer import SyncFailedError, WalWriter

_log = logging.getLogger("ister.wal.log")

# With this much in the buffer, a write is worth it although no call waits.
_KICK_BYTES = MIB
# Waking a thread costs microseconds: an append wakes a few readers, and `run` the others.
_INLINE_WAKES_MAX = 2


class LogScheduler(Protocol):
    """Runs logs on background threads. The submits return at once, also under a lock."""

    def submit(self, log: Committer) -> None:
        """Has `log.run()` called soon."""
        ...

    def submit_upkeep(self, log: Committer) -> None:
        """Has `log.run_upkeep()` called soon, by a thread that does not call `run`."""
        ...

    def submit_at(self, log: Committer, when: float) -> None:
        """Has `log.on_timer(when)` called at `when`, in `Clock.monotonic` seconds."""
        ...

    def is_interruptible(self) -> bool:
        """Whether signal handlers may interrupt the calling thread, which must not change files.

        Always False for a scheduler without threads that could commit instead.
        """
        ...


class LogListener(Protocol):
    """What a log reports to those that keep, upload and make room for its messages."""

    def on_sealed(self, chunk: Chunk) -> None:
        """Takes the next messages, which it may keep; `lock` is held."""
        ...

    def on_repaired(self, sealed_end: int, sealed: Sequence[Chunk]) -> None:
        """Learns what was sealed, after an interrupted append was repaired; `lock` is held."""
        ...

    def on_synced(self) -> None:
        """Learns that `synced` has advanced; must not block."""
        ...

    def on_tier_wanted(self) -> None:
        """Learns that a call other than a reader's waits for `tiered`; must not block."""
        ...

    def on_disk_full(self) -> bool:
        """Makes space for work that frees more; returns whether there was any to be had."""
        ...

    def may_retry(self) -> bool:
        """Whether a write that failed on a full disk may be retried now."""
        ...


class Committer:
    """Writes and syncs one log; see the module header. Thread-safe."""

    def __init__(
        self,
        *,
        writer: WalWriter | None,
        checkpointer: Checkpointer | None,
        buffer: AppendBuffer,
        levels: Levels,
        gate: AppendGate,
        settings: WalSettings,
        listener: LogListener,
        schedule: LogScheduler,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Without a writer nothing is committed, and readers at the tail are woken all the same."""
        self.writer = writer
        """Changed only under the commit lock."""
        self.checkpointer = checkpointer
        self.buffer = buffer
        self.levels = levels
        self.gate = gate
        self.settings = settings
        self.lock = buffer.lock
        self._listener = listener
        self._schedule = schedule
        self._clock = clock
        self._metrics = metrics
        self.commit_lock = GuardedLock()
        self.sync_lock = GuardedLock()
        self.is_closing = False
        """Whether the log is being closed: the last commit is tried on a full disk, too."""
        self.synced_bytes_total = 0
        """Bytes synced so far by this writer."""
        self._inflight: list[Chunk] = []
        # Whether a waiting thread commits its own messages.
        self._has_turn = False
        # The number of waiters that the last sync has woken.
        self._woken_count = 0
        self._is_scheduled = False
        # Whether a thread does upkeep or is about to, and up to which offset and position in which
        # file it has to sync.
        self._has_upkeep = False
        self._lazy_sync: tuple[int, int, int] | None = None
        # When the running sync began; when the last slow one ended, and how long it took.
        self._sync_began: float | None = None
        self._slow_sync = (-math.inf, 0.0)
        # Whether `run` has to wake more readers at the tail.
        self._has_crowd = False
        self._timer_at = math.inf
        self._is_lazy_armed = False
        self._unsynced_since = 0.0
        self._unwritten_since = 0.0
        self._stalled_until = 0.0
        self._stall_cause = CapacityError("the disk is full")
        self._active_at = clock.monotonic()

    @property
    def has_open_file(self) -> bool:
        """Whether the writer has its file open."""
        return self.writer is not None and self.writer.is_open

    @property
    def slow_sync_seconds(self) -> float:
        """How long the running sync has taken, or a recent one took; 0 if that is not long."""
        now, began = self._clock.monotonic(), self._sync_began
        if began is not None and now - began >= SLOW_SYNC_SECONDS:
            return now - began
        ended, seconds = self._slow_sync
        return seconds if now - ended < SLOW_SYNC_SHOWN_SECONDS else 0.0

    # -- after appends -------------------------------------------------------------------------

    def attend(self) -> None:
        """Seals a full chunk, wakes readers and has a thread commit; `lock` is held.

        `push` calls this only when `attention_at` is reached.
        """
        self.buffer.seal_if_full()
        tail = self.levels.waiters[AckLevel.MEMORY]
        if tail and not self._has_crowd and tail.wake_passed(self.buffer.next, _INLINE_WAKES_MAX):
            self._has_crowd = True
            if not self._is_scheduled:
                self._submit()
        if self.writer is None:
            self._set_attention()
            return
        if not self._is_scheduled and (
            self.buffer.pending_bytes >= _KICK_BYTES
            or self.levels.is_wanted(AckLevel.WRITTEN)
            or self.levels.is_wanted(AckLevel.SYNCED)
        ):
            # A running commit looks for new messages at its end; a second thread would only
            # wait for it.
            if not self.commit_lock.locked():
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
        """Decides when `push` calls `attend` next."""
        waiters, buffer = self.levels.waiters, self.buffer
        if waiters[AckLevel.MEMORY]:
            buffer.attention_at = 0
        elif self._is_scheduled or self.commit_lock.locked():
            # A commit is on its way, and looks for new messages at its end.
            buffer.attention_at = buffer.chunk_base + APPEND_CHUNK_BYTES
        elif waiters[AckLevel.WRITTEN] or waiters[AckLevel.SYNCED] or not self._is_lazy_armed:
            buffer.attention_at = 0
        else:
            buffer.attention_at = buffer.chunk_base + APPEND_CHUNK_BYTES

    def make_room(self) -> None:
        """Waits until the buffer has shrunk; writes it itself if no other thread does.

        Called with `lock` held; releases it meanwhile.
        """
        if self._schedule.is_interruptible():
            if not self._is_scheduled:
                self._submit()
        elif self.commit_lock.acquire(blocking=False):
            self.lock.release()
            try:
                self.commit(sync=False)
            except IsterError:
                # From here on `_refusal` answers appends, with the reason.
                _log.debug("commit by an appender failed", exc_info=True)
            finally:
                self._release_commit()
                self.lock.acquire()
            return
        self.gate.wait(timeout=STALL_RETRY_SECONDS)

    def _is_write_wanted(self) -> bool:
        """Whether to write before the timer: for waiters, for room, or because there is much."""
        pending = self.buffer.pending_bytes
        return (
            self.levels.is_wanted(AckLevel.WRITTEN)
            or pending >= _KICK_BYTES
            or (bool(self.gate.waiting) and pending > 0)
        )

    # -- interrupts ----------------------------------------------------------------------------

    def clean_up_interrupt(self) -> None:
        """Releases the lock and repairs the state after an interrupted call.

        See `ister.wal.signals`.
        """
        if self.gate.holds_lock:
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
        self._listener.on_repaired(self.buffer.sealed_end, self.buffer.sealed)
        # Waiters may not have been woken and a timer not been set; `run` does both.
        self._is_lazy_armed = False
        self._timer_at = math.inf
        self.buffer.attention_at = 0
        self._schedule.submit(self)
        self.buffer.is_changing = False

    # -- commits by waiting threads --------------------------------------------------------------

    def expect(self, waiter: Waiter) -> None:
        """Has a thread commit what `waiter`, which was enlisted, waits for; `lock` is held."""
        self._set_attention()
        if (
            waiter.offset < self.buffer.next
            and not self._is_scheduled
            and not self.commit_lock.locked()
        ):
            self._submit()

    def try_commit(self, offset: int, level: AckLevel) -> bool:
        """Commits in the calling thread, unless another thread is committing.

        Returns whether the watermark of `level` has passed `offset`. If not, another thread is
        committing, or signal handlers may interrupt this one: `enlist` a waiter.

        Raises:
            CapacityError: The disk is full. The message stays in the buffer, is not durable, and is
                written when there is room again.
            DiskError: The write or the sync failed; whether the message is stored is unknown.
            ClosedError: The log was closed before.
        """
        if self.levels.watermark(level) > offset:
            return True
        if self._schedule.is_interruptible() or not self.commit_lock.acquire(blocking=False):
            return False
        had_open_file = self.has_open_file
        self._has_turn = True
        try:
            self._gather()
            return self._commit_up_to(offset, level)
        finally:
            has_opened_file = not had_open_file and self.has_open_file
            self._has_turn = False
            self._release_commit()
            if has_opened_file:
                # The scheduler's thread counts the file: this one must not sync those of others.
                with self.lock:
                    if not self._is_scheduled:
                        self._submit()

    def _gather(self) -> None:
        """Lets the threads that the last sync has woken append, so that they share the next sync.

        Without it the first of them would sync its message alone, and the others after it. There
        is no timer: it returns when nothing was appended since the last check.
        """
        for _ in range(self._woken_count - 1):
            seen = self.buffer.next
            self._clock.sleep(0)
            if self.buffer.next == seen:
                return

    def _commit_up_to(self, offset: int, level: AckLevel) -> bool:
        """Commits in the thread that has the turn; returns as `try_commit`."""
        try:
            if self.levels.watermark(level) > offset:
                return True
            self.commit(sync=level is AckLevel.SYNCED)
        except CapacityError:
            if self.levels.watermark(level) > offset:
                return True
            raise
        except IsterError:
            self.gate.is_failure_told = True
            raise
        return self.levels.watermark(level) > offset

    # -- commit --------------------------------------------------------------------------------

    def run(self) -> None:
        """Commits and maintains what is due. Called by the scheduler's threads."""
        with self.lock:
            self.repair()
            self._is_scheduled = self._has_crowd = False
            tail = self.levels.waiters[AckLevel.MEMORY].take_passed(self.buffer.next)
        for waiter in tail:
            waiter.finish(None)
        if self.writer is None or self.gate.state in (TopicState.CLOSED, TopicState.FAILED):
            return
        if not self.commit_lock.acquire(blocking=False):
            # Its holder looks for more at the end. The checkpoint does not need the lock, and
            # must not wait until no producer commits for itself.
            self._plan_upkeep()
            return
        try:
            self._commit_what_is_due()
            if self._sync_is_due():
                self._lazy_sync = (self.levels.written, self.writer.position, self.writer.seq)
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
        while self.gate.state in (TopicState.OPEN, TopicState.STALLED):
            if self.gate.state is TopicState.STALLED and now < self._stalled_until:
                return
            with self.lock:
                sync = self.levels.is_wanted(AckLevel.SYNCED)
                is_lazy_write_due = (
                    self.buffer.pending_bytes > 0
                    and now - self._unwritten_since >= LAZY_WRITE_SECONDS
                )
                write = (
                    is_lazy_write_due
                    or self._is_write_wanted()
                    or self.gate.state is TopicState.STALLED
                )
            if not (write or sync):
                return
            self.commit(sync=sync)
            if self._sync_is_due() and not self._has_upkeep:
                return  # another thread syncs beside the next commit

    def _sync_is_due(self) -> bool:
        """Whether the unsynced bytes are as old or as many as the settings allow."""
        writer = self.writer
        if writer is None or writer.unsynced_bytes == 0 or self.gate.state is not TopicState.OPEN:
            return False
        return (
            writer.unsynced_bytes >= self.settings.fsync_max_batch_bytes
            or self._clock.monotonic() - self._unsynced_since
            >= self.settings.fsync_interval_seconds
        )

    def commit(self, *, sync: bool) -> None:
        """Writes what is in the buffer and, if asked to, syncs. The commit lock is held.

        Raises:
            CapacityError: The disk is full; the frames stay in memory for the next try.
            DiskError: The writer has stopped.
        """
        writer = self.writer
        check(writer is not None, "only a log with files commits")
        if writer is None or self.gate.state in (TopicState.CLOSED, TopicState.FAILED):
            raise (
                self.gate.failure.again()
                if self.gate.failure is not None
                else self.gate.closed_error()
            )
        if self.gate.state is TopicState.STALLED and not (
            self.is_closing or self._listener.may_retry()
        ):
            self._stall(self._stall_cause)
            raise self.gate.stalled_error(self._stall_cause)
        try:
            self._write_buffer(writer)
            if sync:
                self._sync(writer)
        except SyncFailedError as error:
            self.fail(error)
            raise
        except CapacityError as error:
            self._sync_what_is_written(writer)
            self._stall(error)
            raise
        except BaseException as error:
            self.fail(error)
            raise
        if self.gate.state is TopicState.STALLED:
            self._resume()

    def _sync_what_is_written(self, writer: WalWriter) -> None:
        """Makes what is written durable, although the disk is full."""
        try:
            self._sync(writer)
        except SyncFailedError as error:
            self.fail(error)
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
                self.rotate(writer, group[0].first_offset)
            started = self._clock.monotonic()
            if writer.unsynced_bytes == 0:
                self._unsynced_since = started
            writer.write(group)
            elapsed = self._clock.monotonic() - started
            del self._inflight[: len(group)]
            check(group[-1].end_offset > self.levels.written, "written only ever rises")
            # Set without the lock: only the holder of the commit lock changes these, and waiting
            # for a lock that a busy producer keeps taking costs a turn at the interpreter lock.
            # `enlist` checks the watermark again after adding a waiter: either the check below
            # finds the waiter, or `enlist` finds the new watermark.
            self.levels.written = group[-1].end_offset
            self.buffer.mark_written(size)
            if self.levels.waiters[AckLevel.WRITTEN] or self.gate.waiting:
                with self.lock:
                    passed = self.levels.waiters[AckLevel.WRITTEN].take_passed(self.levels.written)
                    self.gate.wake()
                for waiter in passed:
                    waiter.finish(None)
            self._metrics.observe("wal.writer_flush_latency_ms", elapsed * 1000)
            self._metrics.count("wal.writer_flush_bytes", size)
        self._active_at = self._clock.monotonic()

    def rotate(self, writer: WalWriter, next_offset: int) -> bool:
        """Begins a new file after the old one was synced. False if it cannot be created."""
        with self.sync_lock:
            if not writer.rotate(next_offset):
                return False
            if self.checkpointer is not None:
                self.checkpointer.update(self.levels.synced)
        if self.checkpointer is not None:
            self.checkpointer.save_quietly()
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
        with self.sync_lock:
            self._sync_and_publish(writer, self.levels.written, writer.position)

    def _sync_lazily(self, writer: WalWriter) -> None:
        """Syncs what no call waits for, up to where `run` found it due.

        Without the commit lock, so that it does not hold up the writer: at full speed a disk syncs
        slower than the page cache takes bytes. A sync that already runs goes at least as far, since
        it began under the commit lock after `run` had it.
        """
        wanted, self._lazy_sync = self._lazy_sync, None
        if wanted is None or not self.sync_lock.acquire(blocking=False):
            return
        target, position, seq = wanted
        failure: SyncFailedError | None = None
        try:
            # Under the lock no file is ended, and what was ended has been synced.
            if (
                self.gate.state is TopicState.OPEN
                and seq == writer.seq
                and target > self.levels.synced
            ):
                self._sync_and_publish(writer, target, position)
        except SyncFailedError as error:
            failure = error
        finally:
            self.sync_lock.release()
        if failure is not None:
            # The writer refuses every sync from here on, so no waiter is misled meanwhile.
            with self.commit_lock:
                self.fail(failure)

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
        if self.checkpointer is not None:
            self.checkpointer.update(target)
        with self.lock:
            check(self.levels.synced <= target, "synced only ever rises")
            self.levels.synced = target
            passed = self.levels.waiters[AckLevel.SYNCED].take_passed(target)
        for waiter in passed:
            waiter.finish(None)
        self._woken_count = len(passed)
        if len(passed) == 1 and not self._has_turn:
            # A single waiter goes first: it needs the interpreter lock, which this thread would
            # otherwise keep until its bookkeeping is done. A thread that commits its own messages
            # goes first itself.
            self._clock.sleep(0)
        self._listener.on_synced()
        self._metrics.observe("wal.writer_sync_latency_ms", elapsed * 1000)

    def _release_commit(self) -> None:
        """Releases the commit lock, and has new messages committed too."""
        self.commit_lock.release()
        with self.lock:
            if self.gate.state not in (TopicState.OPEN, TopicState.STALLED):
                return
            if (
                not self._is_scheduled
                and self.gate.state is TopicState.OPEN
                and (self.levels.is_wanted(AckLevel.SYNCED) or self._is_write_wanted())
            ):
                self._submit()
            else:
                self._arm_lazy_write()
                self._arm_timer(self._next_due())
            self._set_attention()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Holds the commit lock for work that is not a commit."""
        self.commit_lock.acquire()
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
        with self.commit_lock:
            if self.gate.state is not TopicState.CLOSED:
                self.fail(error)

    # -- failures ------------------------------------------------------------------------------

    def _stall(self, error: CapacityError) -> None:
        """Refuses appends and fails waiters because the disk is full; sets a timer to retry."""
        with self.lock:
            is_new = self.gate.state is not TopicState.STALLED
            self.gate.state = TopicState.STALLED
            self._stall_cause = error
            self.gate.refuse(lambda: self.gate.stalled_error(error))
            self._stalled_until = self._clock.monotonic() + STALL_RETRY_SECONDS
            everyone = [
                waiter
                for level in (AckLevel.WRITTEN, AckLevel.SYNCED)
                for waiter in self.levels.waiters[level].take_impatient(self.buffer.next)
            ]
            self.gate.wake()
            self._timer_at = math.inf
            self._arm_timer(self._stalled_until)
        if is_new:
            self._metrics.count("wal.writer_stalls")
            _log.error("writing stalled", extra={"topic": self.settings.topic, "error": str(error)})
        for waiter in everyone:
            waiter.finish(self.gate.stalled_error(error))

    def _resume(self) -> None:
        with self.lock:
            self.gate.state = TopicState.OPEN
            if self.is_closing:
                return
            self.gate.accept()
        _log.info("writing resumed", extra={"topic": self.settings.topic})

    def fail(self, error: BaseException) -> None:
        """Stops the writer for good and fails all waiters."""
        if isinstance(error, IsterError):
            failure = error
        else:
            failure = ClosedError(f"the writer stopped: {error!r}", topic=self.settings.topic)
        failure.topic = self.settings.topic
        with self.lock:
            # A failed sync after a failed write still matters: even what was written before may
            # be lost.
            is_known = self.gate.state is TopicState.FAILED
            if is_known and (
                not isinstance(error, SyncFailedError)
                or isinstance(self.gate.failure, SyncFailedError)
            ):
                return
            self.gate.state = TopicState.FAILED
            self.gate.failure = failure
            self.gate.refuse(self.gate.closed_error)
            everyone = self.levels.take_all()
            self.gate.is_failure_told = self.gate.is_failure_told or bool(everyone)
            self.buffer.discard()
            self.gate.wake()
        self._inflight.clear()
        writer = self.writer
        if writer is not None and isinstance(error, Exception):
            self._metrics.count("wal.writer_failures")
            _log.error(
                "writer stopped",
                extra={
                    "topic": self.settings.topic,
                    "error": str(error),
                    "offset": self.levels.synced,
                },
            )
            if isinstance(error, SyncFailedError) and self.checkpointer is not None:
                self.checkpointer.record_poison()
        for waiter in everyone:
            waiter.finish(failure.again())
        self.close_file_quietly(wait=False)

    def close_file_quietly(self, *, wait: bool) -> None:
        """Closes the file of a stopped writer, unless a running sync still uses it."""
        if self.writer is None or not self.sync_lock.acquire(blocking=wait):
            return
        try:
            self.writer.close_file()
        except IsterError:
            _log.warning("close failed", extra={"topic": self.settings.topic})
        finally:
            self.sync_lock.release()

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
        writer = self.writer
        if writer is None:
            return math.inf
        due = math.inf
        # A running commit sets the timer at its end. One for a time in the past would wake threads
        # that can do nothing, again and again until then.
        if not self.commit_lock.locked():
            if self.gate.state is TopicState.STALLED:
                return self._stalled_until
            if self.buffer.pending_bytes:
                return self._unwritten_since + LAZY_WRITE_SECONDS
            if writer.unsynced_bytes and not self.sync_lock.locked():
                due = self._unsynced_since + self.settings.fsync_interval_seconds
        return math.inf if self._has_upkeep else min(due, self._upkeep_due_at(writer))

    def _upkeep_due_at(self, writer: WalWriter) -> float:
        """When the checkpoint has to be saved, or else an idle file to be closed."""
        due = math.inf if self.checkpointer is None else self.checkpointer.due_at()
        # Those cases set the timer when they end, and until then the file stays open.
        is_busy = writer.unsynced_bytes or self._inflight or self.commit_lock.locked()
        if math.isinf(due) and writer.is_open and not is_busy:
            due = self._active_at + IDLE_FILE_SECONDS
        return due

    def _plan_upkeep(self) -> None:
        """Has upkeep done when it is due, and sets the next timer."""
        writer = self.writer
        with self.lock:
            if writer is not None and self.gate.state in (TopicState.OPEN, TopicState.STALLED):
                is_due = self._lazy_sync or self._clock.monotonic() >= self._upkeep_due_at(writer)
                if is_due and not self._has_upkeep:
                    self._has_upkeep = True
                    self._schedule.submit_upkeep(self)
                self._arm_timer(self._next_due())
            self._set_attention()

    def run_upkeep(self) -> None:
        """Does what no call waits for. Called by the scheduler's threads for upkeep."""
        try:
            if self.writer is not None:
                self._sync_lazily(self.writer)
            saver = self.checkpointer
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
        writer = self.writer
        if writer is None or not writer.is_open or not self.commit_lock.acquire(blocking=False):
            return False
        try:
            if sync and writer.unsynced_bytes and self.gate.state is TopicState.OPEN:
                self._sync_what_is_written(writer)
            if writer.unsynced_bytes or self._inflight:
                return False
            with self.sync_lock:
                writer.close_file()
            return True
        finally:
            self._release_commit()
