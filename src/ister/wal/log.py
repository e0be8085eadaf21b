"""A topic's write-ahead log: the append buffer, the watermarks, group commit.

    append ─► buffer (chunks of frames) ─► write ─► written ─► sync ─► synced
              `lock`, microseconds         `commit lock`, one thread at a time

Owns: offsets, the bounded buffer, who commits and when, waiters, the state of the writer. Does
not own: files (`writer`), threads (`scheduler`), the cache and message bodies (`ister.topic`), and
what becomes of synced messages: `tiered` is a watermark that it is told.

Invariants:

- offsets are given out under `lock`, one after the other, in the order of the frames;
- `trimmed ≤ tiered ≤ synced ≤ written ≤ next`, each only ever rises;
- one thread at a time writes: whoever holds the commit lock;
- nobody is told before the watermark is true, and an error reaches every waiter.

Who commits. A thread that waits commits by itself if nobody else is at it: no hop to another
thread, so a lone waiter pays a write and a sync. Except in the main thread, which a signal handler
can interrupt anywhere (`ister.wal.interrupts`): the scheduler's threads commit for it. Waiters that
arrive during a commit enlist, and their messages become the next batch: the sync in progress is the
batching window, without a timer. If waiters remain when a commit ends, the scheduler's threads
continue. Without waiters, bytes are written after `LAZY_WRITE_SECONDS` or when there is a megabyte,
and synced after `fsync_interval_ms` or `fsync_max_batch_bytes`.

What a crash leaves: every frame below `synced`; frames above it perhaps, never with a hole that a
reader would not notice; see `ister.wal.recovery`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ister import failpoints, forks
from ister.clock import Clock
from ister.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    DiskError,
    InvalidRequestError,
    IsterError,
    WaitTimeoutError,
    check,
)
from ister.limits import (
    APPEND_CHUNK_BYTES,
    IDLE_FILE_SECONDS,
    LAZY_WRITE_SECONDS,
    MIB,
    STALL_RETRY_SECONDS,
    WRITE_BYTES_MAX,
)
from ister.metrics import Metrics
from ister.model import AckLevel, Codec, TopicState
from ister.wal.buffer import AppendBuffer, Chunk, VolatileBuffer
from ister.wal.checkpointer import Checkpointer
from ister.wal.directory import WalDirectory
from ister.wal.interrupts import is_held, shielded
from ister.wal.recovery import Damage, Recovered, WalFile
from ister.wal.waiters import ThreadWaiter, Waiter, Waiters
from ister.wal.writer import SyncFailedError, WalWriter

__all__ = ["Schedule", "Wal", "WalSettings"]

_T = TypeVar("_T")

_log = logging.getLogger("ister.wal.log")

# With nobody waiting, this much in the buffer is worth a write before its time.
_KICK_BYTES = MIB
# Waking a thread costs microseconds; an appender wakes a few itself and leaves a crowd to others.
_INLINE_WAKES_MAX = 2


class Schedule(Protocol):
    """Runs logs on threads of its own. Both calls return at once and may be made under a lock."""

    def submit(self, log: Wal) -> None:
        """Has `log.run()` called soon."""
        ...

    def submit_at(self, log: Wal, when: float) -> None:
        """Has `log.on_timer(when)` called at `when`, in `Clock.monotonic` seconds."""
        ...

    def note_open_file(self, log: Wal) -> None:
        """The log has opened its file outside of `run`; not called under a lock."""
        ...

    def is_exposed(self) -> bool:
        """Whether signal handlers may interrupt the calling thread, which must not change files.

        Always False for a scheduler without threads that could commit instead.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WalSettings:
    """What a log is told about itself."""

    topic: str
    ack: AckLevel
    codec: Codec
    fsync_interval_seconds: float
    fsync_max_batch_bytes: int
    rotate_max_bytes: int
    rotate_max_seconds: float
    buffer_max_bytes: int
    blocks_when_full: bool
    incarnation: str = ""
    """Which topic of its name this is, where that can be told."""


class Wal:
    """One topic's log; see the module header. Thread-safe."""

    def __init__(
        self,
        *,
        directory: WalDirectory | None,
        recovered: Recovered,
        settings: WalSettings,
        schedule: Schedule,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Takes over what recovery found; without a directory the log keeps order and no bytes."""
        self.settings = settings
        buffer = VolatileBuffer if directory is None else AppendBuffer
        self.buffer = buffer(
            next_offset=recovered.next_offset,
            bytes_max=settings.buffer_max_bytes,
            on_attention=self._attend,
        )
        """Where appends go. Its lock guards the waiters too."""
        self.lock = self.buffer.lock
        self.written = recovered.next_offset
        self.synced = recovered.next_offset
        self.damage: tuple[Damage, ...] = recovered.damage
        self.failure: IsterError | None = None
        """Why the writer stopped."""
        self._is_failure_told = False
        self._state = TopicState.QUARANTINED if recovered.damage else TopicState.OPEN
        self._schedule = schedule
        self._clock = clock
        self._metrics = metrics
        self._writer: WalWriter | None = None
        self._checkpointer: Checkpointer | None = None
        if directory is not None:
            self._writer = WalWriter(
                directory,
                recovered,
                rotate_max_bytes=settings.rotate_max_bytes,
                rotate_max_seconds=settings.rotate_max_seconds,
                clock=clock,
                metrics=metrics,
            )
            self._checkpointer = Checkpointer(
                self._writer,
                topic=settings.topic,
                codec=settings.codec,
                ack=settings.ack,
                incarnation=settings.incarnation,
                synced=recovered.next_offset,
                stored=recovered.state,
                clock=clock,
                metrics=metrics,
            )
        else:
            self.written = self.synced = 0
        # What appends are answered with; None takes them.
        self._refusal: Callable[[], IsterError] | None = None
        # What keeps appends back for now, by reason, and whether they wait for its end.
        self._holds: dict[str, tuple[Callable[[], IsterError], bool]] = {}
        self.tiered: int | None = None
        """Covered by committed descriptors, as it was told; None for a log without a bucket."""
        self._tiering_end: IsterError | None = None
        self.on_tier_wanted: Callable[[], None] = lambda: None
        """Called when somebody waits for `tiered`; must not block."""
        self.on_disk_full: Callable[[], bool] = lambda: False
        """Called when work that frees space needs some itself; returns whether it freed any."""
        self.may_retry: Callable[[], bool] = lambda: True
        """Returns whether a write that failed on a full disk may be retried now."""
        self.on_synced: Callable[[], None] = lambda: None
        """Called after `synced` has advanced; must not block."""
        self.synced_bytes_total = 0
        """Bytes synced so far by this writer: what is new for an uploader is a difference."""
        if recovered.damage:
            self._refuse(self._quarantine_error)
        self._inflight: list[Chunk] = []
        # Group commit.
        self._commit_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        # Held while the log is being closed.
        self._ending = threading.Lock()
        self._room_waiters: set[ThreadWaiter] = set()
        self._room_callbacks: list[Callable[[], None]] = []
        self._is_scheduled = False
        # Whether readers at the tail are left to be woken by `run`.
        self._has_crowd = False
        self._timer_at = math.inf
        self._is_lazy_armed = False
        self._waiters = {
            AckLevel.MEMORY: Waiters(),
            AckLevel.WRITTEN: Waiters(),
            AckLevel.SYNCED: Waiters(),
            AckLevel.TIERED: Waiters(),
        }
        self._unsynced_since = 0.0
        self._unwritten_since = 0.0
        self._stalled_until = 0.0
        self._stall_cause = CapacityError("the disk is full")
        self._active_at = clock.monotonic()
        self._is_closing = False
        self._fork_error: ClosedError | None = None
        self.on_mend: Callable[[int], None] = lambda next_offset: None
        """Called with `next` after an interrupted append, with `lock` held."""

    # -- what it is -------------------------------------------------------------------------

    @property
    def state(self) -> TopicState:
        """Whether it takes appends, and why not."""
        return self._state

    @property
    def files(self) -> tuple[WalFile, ...]:
        """The local files, ascending."""
        return self._writer.files if self._writer is not None else ()

    @property
    def trimmed(self) -> int:
        """The first offset still in local files."""
        files = self.files
        return files[0].first_offset if files else self.synced

    @property
    def directory(self) -> WalDirectory | None:
        """Where the files are; None for a log in memory."""
        return self._writer.directory if self._writer is not None else None

    @property
    def writer(self) -> WalWriter | None:
        """For readers: the active file's index. Changed only under the commit lock."""
        return self._writer

    @property
    def visible(self) -> int:
        """What readers may see: the watermark of the topic's level, `synced` at the most."""
        ack = self.settings.ack
        if ack is AckLevel.MEMORY:
            return self.next
        return self.written if ack is AckLevel.WRITTEN else self.synced

    @property
    def visible_level(self) -> AckLevel:
        """The level whose watermark `visible` is."""
        ack = self.settings.ack
        return AckLevel.SYNCED if ack is AckLevel.TIERED else ack

    @property
    def next(self) -> int:
        """The offset that the next append gets."""
        return self.buffer.next

    @property
    def has_open_file(self) -> bool:
        """Whether the writer holds a handle."""
        return self._writer is not None and self._writer.is_open

    def watermark(self, level: AckLevel) -> int:
        """The first offset that has not reached `level`."""
        if level is AckLevel.MEMORY:
            return self.next
        if level is AckLevel.TIERED:
            return self.tiered or 0
        return self.written if level is AckLevel.WRITTEN else self.synced

    # -- append -----------------------------------------------------------------------------

    def admit(self, size_bytes: int) -> None:
        """Makes sure that an append may go on. Called with `lock` held, before an offset is taken.

        Raises:
            CapacityError: The buffer is full (and the policy is to refuse), or the disk is.
            ClosedError: The log was closed, or its writer stopped.
            CorruptDataError: The log is quarantined.
        """
        while True:
            if self._refusal is not None:
                self._metrics.count("wal.append_refused")
                raise self._refusal()
            if self._holds:
                for reason, waits in self._holds.values():
                    if not (waits and self.settings.blocks_when_full):
                        self._metrics.count("wal.append_refused")
                        raise reason()
                if _is_on_loop():
                    self._metrics.count("wal.append_refused")
                    raise _on_loop(reason())
                self._wait_for_room(timeout=None)
                continue
            if self.buffer.has_room(size_bytes):
                return
            if not self.settings.blocks_when_full:
                self._metrics.count("wal.append_refused")
                raise CapacityError(
                    f"the append buffer is full ({self.buffer.pending_bytes} bytes)",
                    topic=self.settings.topic,
                    hint="wait and try again, or raise storage.wal.buffer_max_bytes",
                )
            self._make_room()

    def _refuse(self, refusal: Callable[[], IsterError]) -> None:
        self._refusal = refusal
        self.buffer.is_refusing = True

    def _attend(self) -> None:
        """What `push` does not do every time: seal a chunk, wake readers, have someone commit.

        `lock` is held.
        """
        self.buffer.seal_if_full()
        tail = self._waiters[AckLevel.MEMORY]
        if tail and not self._has_crowd and tail.tell_passed(self.next, _INLINE_WAKES_MAX):
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
            # While a commit runs its own end looks for what came meanwhile; a second thread
            # would only wait for it.
            if not self._commit_lock.locked():
                self._submit()
        else:
            self._arm_lazy_write()
        self._set_attention()

    def _arm_lazy_write(self) -> None:
        """Has the buffer written after a while even if nobody asks for it.

        The alarm stays set when somebody did ask meanwhile: setting it wakes the thread that keeps
        time, which is too much for every message of a producer that waits for each.
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
        elif self._writer is None:
            buffer.attention_at = 1
        elif self._is_scheduled or self._commit_lock.locked():
            # A commit is on its way, and its end looks for what came meanwhile.
            buffer.attention_at = buffer.chunk_base + APPEND_CHUNK_BYTES
        elif waiters[AckLevel.WRITTEN] or waiters[AckLevel.SYNCED] or not self._is_lazy_armed:
            buffer.attention_at = 0
        else:
            buffer.attention_at = buffer.chunk_base + APPEND_CHUNK_BYTES

    def _make_room(self) -> None:
        """Waits until the buffer has shrunk; writes it itself if nobody else is at it.

        Called with `lock` held, and lets go of it meanwhile.
        """
        if self._schedule.is_exposed():
            if not self._is_scheduled:
                self._submit()
        elif self._commit_lock.acquire(blocking=False):
            self.lock.release()
            try:
                self._commit(sync=False)
            except IsterError:
                # Appends are answered by `_refusal` from here on, which says what happened.
                _log.debug("commit by an appender failed", exc_info=True)
            finally:
                self._release_commit()
                self.lock.acquire()
            return
        self._wait_for_room(timeout=STALL_RETRY_SECONDS)

    def _wait_for_room(self, *, timeout: float | None) -> None:
        """Waits until a blocked append should be retried.

        Called with `lock` held; releases it while waiting.
        """
        waiter = ThreadWaiter(self.next)
        try:
            self._room_waiters.add(waiter)
            self.lock.release()
            waiter.block(timeout)
        finally:
            self._room_waiters.discard(waiter)
        self.lock.acquire()

    def _is_room_wanted(self) -> bool:
        """Whether appends wait for buffer space that a write would free."""
        return bool(self._room_waiters) and self.buffer.pending_bytes > 0

    def notify_room(self, on_room: Callable[[], None]) -> bool:
        """Calls `on_room` once, in any thread, when a held append should be retried.

        It is called with `lock` held and must not block. For callers that cannot block in `admit`.

        Returns:
            False if appends are refused and do not wait: the caller has to raise the error.
        """
        with self.lock:
            if self._refusal is not None or not self.settings.blocks_when_full:
                return False
            if not all(waits for _, waits in self._holds.values()):
                return False
            if self._holds:
                self._room_callbacks.append(on_room)
            else:
                on_room()
            return True

    def _notify_room(self) -> None:
        """Wakes all blocked appends; `lock` is held."""
        for waiter in tuple(self._room_waiters):
            waiter.finish(None)
        self._room_waiters = set()
        callbacks, self._room_callbacks = self._room_callbacks, []
        for on_room in callbacks:
            on_room()

    def hold(self, name: str, reason: Callable[[], IsterError], *, waits: bool) -> None:
        """Keeps appends back until `unhold`.

        Args:
            name: Of the hold; a second one of the same name replaces it.
            reason: What an append is refused with.
            waits: Whether appends wait for its end, where the policy is to block, or are refused.
        """
        with self.lock:
            self._holds[name] = (reason, waits)
            self.buffer.is_refusing = True
            self._notify_room()

    def unhold(self, name: str) -> None:
        """Ends a hold; one that does not exist is fine."""
        if name not in self._holds:
            return  # the common case: called for every topic at every renewal of the lease
        with self.lock:
            if self._holds.pop(name, None) is not None:
                self.buffer.is_refusing = self._refusal is not None or bool(self._holds)
                self._notify_room()

    def end_tiering(self, error: IsterError) -> None:
        """Nothing more becomes tiered: tells those who wait for it, and those who come to."""
        with self.lock:
            self._tiering_end = error
            everyone = self._waiters[AckLevel.TIERED].take_all()
        for waiter in everyone:
            waiter.finish(error.again())

    def note_tiered(self, tiered: int) -> None:
        """Takes note that everything below `tiered` is covered by committed descriptors."""
        with self.lock:
            check(tiered <= self.synced, "only what is synced becomes tiered")
            if self.tiered is not None and tiered <= self.tiered:
                return
            self.tiered = tiered
            waiters = self._waiters[AckLevel.TIERED]
            waiters.tell_passed(tiered, len(waiters))

    # -- interrupts -------------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether this thread holds the lock: a signal handler has interrupted a call."""
        return is_held(self.lock)

    def settle(self) -> None:
        """Cleans up after an interrupted call: releases the lock and repairs the state.

        See `ister.wal.interrupts`.
        """
        if self.is_inside:
            self.lock.release()
        if self.buffer.is_changing:
            with self.lock:
                self.mend()

    def mend(self) -> None:
        """Repairs the state after an interrupted append; `lock` is held.

        Call this first after taking the lock to use the buffer or the cache: an exception from a
        signal handler may have interrupted an earlier repair.
        """
        if not self.buffer.is_changing:
            return
        self.buffer.mend()
        self.on_mend(self.next)
        # Waiters may not have been woken and a timer not been set; `run` does both.
        self._is_lazy_armed = False
        self._timer_at = math.inf
        self.buffer.attention_at = 0
        self._schedule.submit(self)
        self.buffer.is_changing = False

    # -- waiting ----------------------------------------------------------------------------

    def wait(self, offset: int, level: AckLevel, timeout: float | None = None) -> None:
        """Returns once the watermark of `level` has passed `offset`.

        Raises:
            WaitTimeoutError: It has not in `timeout` seconds; the message stays accepted.
            CapacityError: The disk is full. The message stays in the buffer, is not durable, and
                is written when there is room again.
            DiskError: The write or the sync failed; whether the message is stored is unknown.
            ClosedError: The log was closed before.
        """
        if self.watermark(level) > offset:
            return
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        if level is AckLevel.TIERED:
            self.wait(offset, AckLevel.SYNCED, timeout)
        while True:
            # Beyond `next` there is nothing to commit for: only an append can end the wait. With a
            # deadline the commit is left to others: a thread inside of a sync cannot give up.
            if (
                deadline is None
                and level is not AckLevel.TIERED
                and offset < self.next
                and not self._schedule.is_exposed()
                and self._try_commit_for(offset, level)
            ):
                return
            waiter = ThreadWaiter(offset)
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
        """Has `waiter` told when the watermark of `level` passes its offset.

        Returns:
            False, and the waiter is not enlisted, if it has passed already.

        Raises:
            IsterError: The log is closed, failed, or stalled, and will not get there.
        """
        if self.buffer.is_changing:
            self.check_outside()
        try:
            return self._enlist(waiter, level)
        except BaseException:
            self.settle()
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
                # `written` moves without the lock: it may have done so after the first look, and
                # whoever moved it may have found no waiter.
                waiter.is_done = True
                return False
            if level is AckLevel.TIERED:
                self.on_tier_wanted()
            self._set_attention()
            if (
                waiter.offset < self.next
                and not self._is_scheduled
                and not self._commit_lock.locked()
            ):
                self._submit()
            return True

    def _try_commit_for(self, offset: int, level: AckLevel) -> bool:
        """Commits on behalf of this thread; False if someone else is at it."""
        if level is AckLevel.MEMORY or not self._commit_lock.acquire(blocking=False):
            return False
        try:
            if self.watermark(level) > offset:
                return True
            had_open_file = self.has_open_file
            self._commit(sync=level is AckLevel.SYNCED)
        except CapacityError:
            if self.watermark(level) > offset:
                return True
            raise
        except IsterError:
            self._is_failure_told = True
            raise
        finally:
            self._release_commit()
        if not had_open_file:
            self._schedule.note_open_file(self)
        return self.watermark(level) > offset

    def _is_wanted(self, level: AckLevel) -> bool:
        return self._waiters[level].wants(self.next)

    # -- commit -----------------------------------------------------------------------------

    def run(self) -> None:
        """Does whatever is due. Called by the scheduler's threads."""
        with self.lock:
            self.mend()
            self._is_scheduled = self._has_crowd = False
            tail = self._waiters[AckLevel.MEMORY].take_passed(self.next)
        for waiter in tail:
            waiter.finish(None)
        if self._writer is None or self._state in (TopicState.CLOSED, TopicState.FAILED):
            return
        if not self._commit_lock.acquire(blocking=False):
            # Whoever holds it looks for more when done. The checkpoint does not need the lock, and
            # must not wait for a moment when no producer commits for itself.
            self._maintain()
            return
        lazy_sync: tuple[int, int] | None = None
        try:
            self._commit_what_is_due()
            lazy_sync = self._begin_lazy_sync(self._writer)
        except IsterError:
            # Every waiter has been told, and appends are refused from here on.
            _log.debug("commit failed", exc_info=True)
        finally:
            self._release_commit()
        if lazy_sync is not None:
            self._finish_lazy_sync(self._writer, *lazy_sync)
        self._maintain()

    def _commit_what_is_due(self) -> None:
        """Commits until nobody waits and little is left, or until a sync is due.

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
                    or self._is_wanted(AckLevel.WRITTEN)
                    or self.buffer.pending_bytes >= _KICK_BYTES
                    or self._is_room_wanted()
                    or self._state is TopicState.STALLED
                )
            if not (write or sync):
                return
            self._commit(sync=sync)
            if self._sync_is_due() and not self._sync_lock.locked():
                return  # to sync beside the next commit, which another thread takes on

    def _sync_is_due(self) -> bool:
        """Whether bytes have stayed unsynced for as long, or are as many, as the settings allow."""
        writer = self._writer
        if writer is None or writer.unsynced_bytes == 0:
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
        """On a full disk nothing more is written, and what is can still be made durable."""
        try:
            self._sync(writer)
        except SyncFailedError as error:
            self._fail(error)
            raise

    def _write_buffer(self, writer: WalWriter) -> None:
        with self.lock:
            self.mend()
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
            # for a lock that a hot producer keeps taking costs a turn at the interpreter lock.
            # Whoever enlists looks at the watermark once more afterwards, so it is either seen by
            # the look at the waiters below or sees the new watermark itself.
            self.written = group[-1].end_offset
            self.buffer.note_written(size)
            if self._waiters[AckLevel.WRITTEN] or self._room_waiters:
                with self.lock:
                    passed = self._waiters[AckLevel.WRITTEN].take_passed(self.written)
                    self._notify_room()
                for waiter in passed:
                    waiter.finish(None)
            self._metrics.observe("wal.writer_flush_latency_ms", elapsed * 1000)
            self._metrics.count("wal.writer_flush_bytes", size)
        self._active_at = self._clock.monotonic()

    def _rotate(self, writer: WalWriter, next_offset: int) -> bool:
        """Begins a new file; everything in the old one is synced. False if it cannot be made."""
        with self._sync_lock:
            if not writer.rotate(next_offset):
                return False
            if self._checkpointer is not None:
                self._checkpointer.note(self.synced)
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
        """Syncs for those who wait. The commit lock is held."""
        with self._sync_lock:
            self._sync_and_publish(writer, self.written, writer.position)

    def _begin_lazy_sync(self, writer: WalWriter) -> tuple[int, int] | None:
        """Takes the sync lock if a sync is due that nobody waits for. The commit lock is held.

        Such a sync runs after the commit lock has been let go, so that it does not hold up the
        writer: at full speed a disk syncs slower than the page cache takes bytes. Locks are always
        taken in this order, commit before sync.

        Returns:
            The offset and the position to sync up to.
        """
        if not self._sync_is_due() or self._state is not TopicState.OPEN:
            return None
        if not self._sync_lock.acquire(blocking=False):
            return None
        return self.written, writer.position

    def _finish_lazy_sync(self, writer: WalWriter, target: int, position: int) -> None:
        failure: SyncFailedError | None = None
        try:
            self._sync_and_publish(writer, target, position)
        except SyncFailedError as error:
            failure = error
        finally:
            self._sync_lock.release()
        if failure is not None:
            # The writer refuses every sync from here on, so nobody is told a lie meanwhile.
            with self._commit_lock:
                self._fail(failure)

    def _sync_and_publish(self, writer: WalWriter, target: int, position: int) -> None:
        """Makes what lies before `position`, which is the offset `target`, durable; says so."""
        started = self._clock.monotonic()
        self.synced_bytes_total += max(0, position - writer.synced_position)
        writer.sync(position)
        elapsed = self._clock.monotonic() - started
        self._unsynced_since = started
        if self._checkpointer is not None:
            self._checkpointer.note(target)
        with self.lock:
            check(self.synced <= target, "synced only ever rises")
            self.synced = target
            passed = self._waiters[AckLevel.SYNCED].take_passed(target)
        for waiter in passed:
            waiter.finish(None)
        if len(passed) == 1:
            # A lone waiter goes first: it needs the interpreter lock, which this thread would
            # otherwise keep until it has done its own bookkeeping.
            self._clock.sleep(0)
        self.on_synced()
        self._metrics.observe("wal.writer_sync_latency_ms", elapsed * 1000)

    def _release_commit(self) -> None:
        """Ends this thread's turn, and sees to it that what came meanwhile is committed too."""
        self._commit_lock.release()
        with self.lock:
            if self._state not in (TopicState.OPEN, TopicState.STALLED):
                return
            if (
                not self._is_scheduled
                and self._state is TopicState.OPEN
                and (
                    self._is_wanted(AckLevel.SYNCED)
                    or self._is_wanted(AckLevel.WRITTEN)
                    or self.buffer.pending_bytes >= _KICK_BYTES
                    or self._is_room_wanted()
                )
            ):
                self._submit()
            else:
                self._arm_lazy_write()
                self._arm_timer(self._next_due())
            self._set_attention()

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Holds the commit lock for something that is not a commit."""
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

    # -- time -------------------------------------------------------------------------------

    def _arm_timer(self, when: float) -> None:
        if when < self._timer_at:
            self._timer_at = when
            if not math.isinf(when):
                self._schedule.submit_at(self, when)

    def on_timer(self, when: float) -> None:
        """The scheduler's clock has reached the `when` of a `submit_at`."""
        with self.lock:
            if when != self._timer_at:
                return  # an earlier one has been set since
            self._timer_at = math.inf
            self._is_lazy_armed = False
            if not self._is_scheduled:
                self._is_scheduled = True
                self._schedule.submit(self)

    def _next_due(self) -> float:
        """When there is something to do without anybody asking; infinity if never."""
        writer = self._writer
        if writer is None:
            return math.inf
        if self._state is TopicState.STALLED:
            return self._stalled_until
        if self.buffer.pending_bytes:
            return self._unwritten_since + LAZY_WRITE_SECONDS
        due = math.inf
        if writer.unsynced_bytes and not self._sync_lock.locked():
            due = self._unsynced_since + self.settings.fsync_interval_seconds
        if self._checkpointer is not None:
            due = min(due, self._checkpointer.due_at())
        if math.isinf(due) and writer.is_open:
            due = self._active_at + IDLE_FILE_SECONDS
        return due

    def _maintain(self) -> None:
        """Saves the checkpoint when it is due, closes an idle file, and sets the next alarm."""
        now = self._clock.monotonic()
        if self._checkpointer is not None and now >= self._checkpointer.due_at():
            self._checkpointer.save_quietly()
        if now - self._active_at >= IDLE_FILE_SECONDS:
            self.release_file()
        with self.lock:
            if self._state in (TopicState.OPEN, TopicState.STALLED):
                self._arm_timer(self._next_due())
            self._set_attention()

    def release_file(self, *, sync: bool = False) -> bool:
        """Closes the writer's handle if nobody is writing and everything is synced, or can be."""
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

    # -- checkpoint and trim ----------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Replaces the checkpoint by one for this moment.

        Raises:
            IsterError: It could not be replaced; the old one stands.
        """
        if self._checkpointer is not None:
            self._checkpointer.save()

    def rotate(self) -> bool:
        """Syncs everything appended so far and rotates the active file.

        Returns:
            False if the active file is empty, and nothing changes.

        Raises:
            CapacityError, DiskError: The commit failed; or the next file cannot be created, and
                the active one stays in use.
        """
        writer = self._writer
        if writer is None:
            return False
        with self._committing():
            self._commit(sync=True)
            if writer.position == 0:
                return False
            try:
                is_rotated = self._rotate(writer, self.written)
            except BaseException as error:
                self._fail(error)
                raise
        if not is_rotated:
            raise DiskError(
                "cannot create the next file; the active one stays in use",
                errno=None,
                path=writer.directory.path,
            )
        return True

    def trim(self, before: int, *, whole: bool = False) -> int:
        """Removes files whose frames are all below `before`, oldest first.

        The active file stays, and so does every file until its successor has a synced frame:
        otherwise nothing local would prove what the next offset is. The checkpoint is replaced
        first (the commit point), so a crash in the middle leaves files that the next trim takes.

        Args:
            before: The first offset that stays.
            whole: Also remove the active file if everything written is synced, tiered and below
                `before`; the next offset is then known from the bucket. A new file follows.

        Returns:
            How many files were removed.

        Raises:
            IsterError: The checkpoint or a file could not be changed; nothing below is lost.
        """
        writer, checkpointer = self._writer, self._checkpointer
        if writer is None or checkpointer is None:
            return 0
        if self._refusal is not None and self._state is not TopicState.STALLED:
            raise self._refusal()
        with self._committing():
            if self._state not in (TopicState.OPEN, TopicState.STALLED):
                raise self._closed_error()
            count = self._count_trimmable(before)
            files = writer.files
            if whole and count + 1 >= len(files) and self._end_active_file(writer, before):
                count = len(files)
            if count == 0:
                return 0
            with self._sync_lock:
                writer.files = files[count:]
                checkpointer.note(self.synced)
        try:
            self._save_with_reserve(checkpointer)
        except IsterError:
            with self._committing(), self._sync_lock:
                writer.files = (*files[:count], *writer.files)
                checkpointer.note(self.synced)
            raise
        for file in files[:count]:
            writer.directory.remove_log(file.seq)
            failpoints.reach("wal.after_remove_file")
        self._metrics.count("wal.trimmed_files", count)
        _log.info(
            "trimmed",
            extra={"topic": self.settings.topic, "files": count, "offset": self.trimmed},
        )
        return count

    def next_trim(self, safe_before: int) -> int | None:
        """The `before` with which a `whole` trim removes one file; None if no file can be removed.

        Args:
            safe_before: Offsets from here on are kept.
        """
        files = self.files
        if not files:
            return None
        if len(files) > 1 and files[1].first_offset < self.synced:
            return files[1].first_offset if files[1].first_offset <= safe_before else None
        written = self.written
        is_tiered = (self.tiered or 0) >= written == self.synced
        has_frames = files[0].first_offset < written
        return written if is_tiered and has_frames and safe_before >= written else None

    def _count_trimmable(self, before: int) -> int:
        """The number of files that a trim removes: below `before`, and not the last synced one."""
        files = self.files
        count = 0
        while (
            count + 1 < len(files)
            and files[count + 1].first_offset <= before
            and files[count + 1].first_offset < self.synced
        ):
            count += 1
        return count

    def _end_active_file(self, writer: WalWriter, before: int) -> bool:
        """Begins a new file, so that all others may be removed; the commit lock is held.

        Returns:
            False if the files hold something that is not in the bucket, or the disk is full.
        """
        if not writer.files or not (self.tiered or 0) >= self.written == self.synced <= before:
            return False
        if writer.seq != writer.files[-1].seq:
            return True  # already rotated, and nothing written since
        with self._sync_lock:
            return writer.rotate(self.written) or (
                self.on_disk_full() and writer.rotate(self.written)
            )

    def _save_with_reserve(self, checkpointer: Checkpointer) -> None:
        try:
            checkpointer.save()
        except CapacityError:
            if not self.on_disk_full():
                raise
            checkpointer.save()

    # -- trouble and the end ----------------------------------------------------------------

    def _stall(self, error: CapacityError) -> None:
        """The disk is full: refuse appends, tell the waiters, and try again from time to time."""
        with self.lock:
            is_new = self._state is not TopicState.STALLED
            self._state = TopicState.STALLED
            self._stall_cause = error
            self._refuse(lambda: self._stalled_error(error))
            self._stalled_until = self._clock.monotonic() + STALL_RETRY_SECONDS
            everyone = [
                waiter
                for level in (AckLevel.WRITTEN, AckLevel.SYNCED)
                for waiter in self._waiters[level].take_impatient(self.next)
            ]
            self._notify_room()
            self._timer_at = math.inf
            self._arm_timer(self._stalled_until)
        if is_new:
            self._metrics.count("wal.writer_stalls")
            _log.error("writing stalled", extra={"topic": self.settings.topic, "error": str(error)})
        for waiter in everyone:
            waiter.finish(self._stalled_error(error))

    def _resume(self) -> None:
        with self.lock:
            self._state = TopicState.OPEN
            if self._is_closing:
                return
            self._refusal = None
            self.buffer.is_refusing = bool(self._holds)
            self._notify_room()
        _log.info("writing goes on", extra={"topic": self.settings.topic})

    def _fail(self, error: BaseException) -> None:
        """Stops the writer for good and tells everyone."""
        if isinstance(error, IsterError):
            failure = error
        else:
            failure = ClosedError(f"the writer stopped: {error!r}", topic=self.settings.topic)
        failure.topic = self.settings.topic
        with self.lock:
            # A sync that fails after a write did is news all the same: it means that even what was
            # written before may be gone.
            is_known = self._state is TopicState.FAILED
            if is_known and (
                not isinstance(error, SyncFailedError) or isinstance(self.failure, SyncFailedError)
            ):
                return
            self._state = TopicState.FAILED
            self.failure = failure
            self._refuse(self._closed_error)
            everyone = [w for waiters in self._waiters.values() for w in waiters.take_all()]
            self._is_failure_told = self._is_failure_told or bool(everyone)
            self.buffer.discard()
            self._notify_room()
        self._inflight.clear()
        writer = self._writer
        if writer is not None and isinstance(error, Exception):
            self._metrics.count("wal.writer_failures")
            _log.error(
                "writer stopped",
                extra={
                    "topic": self.settings.topic,
                    "error": str(error),
                    "offset": self.synced,
                },
            )
            if isinstance(error, SyncFailedError) and self._checkpointer is not None:
                self._checkpointer.record_poison()
        for waiter in everyone:
            waiter.finish(failure.again())
        self._close_file_quietly(wait=False)

    def after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; the parent writes the buffer."""
        forks.reset_locks(self.lock, self._commit_lock, self._sync_lock, self._ending)
        self._fork_error = error
        self._state = TopicState.CLOSED
        self._refuse(self._closed_error)

    def check_process(self) -> None:
        """Refuses calls of a forked child to its parent's log.

        Raises:
            ClosedError: This process is a fork of the one that opened the log.
        """
        if self._fork_error is not None:
            raise self._closed_error()

    def stop(self, error: Exception) -> None:
        """Stops the writer after an unexpected error, which is raised in all waiting calls."""
        with self._commit_lock:
            if self._state is not TopicState.CLOSED:
                self._fail(error)

    def _close_file_quietly(self, *, wait: bool) -> None:
        """Releases the handle of a writer that has stopped, unless a running sync still has it."""
        if self._writer is None or not self._sync_lock.acquire(blocking=wait):
            return
        try:
            self._writer.close_file()
        except IsterError:
            _log.warning("close failed", extra={"topic": self.settings.topic})
        finally:
            self._sync_lock.release()

    def close(self) -> None:
        """Commits what is left, saves the checkpoint and releases the file. May be called twice.

        If an exception from a signal handler ends the call, closing continues in the background;
        the next call waits for it.

        Raises:
            IsterError: The last commit failed; the log is closed all the same.
            InvalidRequestError: It was called by a signal handler that interrupted an append.
        """
        self.run_shielded(self._close_once)

    def run_shielded(self, work: Callable[[], _T]) -> _T:
        """Runs `work`, which changes or closes the log, where no signal handler can interrupt it.

        Raises:
            InvalidRequestError: It was called by a signal handler that interrupted an append.
            BaseException: The exception that `work` raised.
        """
        self.check_outside()
        return shielded(work, "ister-call") if self._schedule.is_exposed() else work()

    def check_outside(self) -> None:
        """Refuses a call that would wait for the append that a signal handler has interrupted.

        Raises:
            InvalidRequestError: This thread holds the lock: it is in the middle of an append.
        """
        if self.is_inside:
            raise InvalidRequestError(
                "called by a signal handler that interrupted an append to the same topic",
                topic=self.settings.topic,
                hint="set a flag or raise an exception in the handler, and make this call later",
            )

    def _close_once(self) -> None:
        with self._ending:
            self._close()

    def _close(self) -> None:
        with self.lock:
            state = self._state
            if state is TopicState.CLOSED:
                return
        if state is TopicState.FAILED:
            self._close_failed()
            return
        with self.lock:
            was_quarantined = self._state is TopicState.QUARANTINED
            self._is_closing = True
            self._refuse(self._closed_error)
        failure: IsterError | None = None
        with self._commit_lock:
            if self.state is TopicState.CLOSED:
                return  # another thread was quicker
            if self._writer is not None and not was_quarantined:
                try:
                    self._commit(sync=True)
                except IsterError as error:
                    failure = error
            with self.lock:
                if self.state is not TopicState.FAILED:
                    self._state = TopicState.CLOSED
                self._refuse(self._closed_error)
                everyone = [w for waiters in self._waiters.values() for w in waiters.take_all()]
                self._notify_room()
        for waiter in everyone:
            waiter.finish(self._closed_error())
        if self._writer is not None:
            with self._sync_lock:
                self._writer.close_file()
        if failure is not None:
            raise failure
        if not was_quarantined:
            self.save_checkpoint()
        if self._checkpointer is not None:
            self._checkpointer.end()

    def abandon(self) -> None:
        """Closes the log without writing anything more, not even the checkpoint.

        For whoever is about to change the files underneath; everything was flushed before.
        """
        with self._commit_lock:
            with self.lock:
                self._is_closing = True
                self._state = TopicState.CLOSED
                self._refuse(self._closed_error)
                everyone = [w for waiters in self._waiters.values() for w in waiters.take_all()]
                self._notify_room()
            self._close_file_quietly(wait=True)
        if self._checkpointer is not None:
            self._checkpointer.end()
        for waiter in everyone:
            waiter.finish(self._closed_error())

    def _close_failed(self) -> None:
        """Closes a log whose writer has stopped; says so if that cost messages and nobody knows."""
        # Whoever found the failure notes it on disk with this lock held; the directory must not be
        # given to another process before that.
        with self._commit_lock:
            with self.lock:
                if self._state is TopicState.CLOSED:
                    return
                self._state = TopicState.CLOSED
            self._close_file_quietly(wait=True)
        if self.failure is not None and not self._is_failure_told and self.synced < self.next:
            raise self.failure.again()

    @property
    def has_failed_sync(self) -> bool:
        """Whether what lies above `synced` may be in the page cache alone."""
        return self._writer is not None and self._writer.has_failed_sync

    def close_quietly(self) -> None:
        """Closes a log that could not be taken into use; its errors have been raised already."""
        try:
            self.close()
        except IsterError:
            _log.debug("close failed", exc_info=True)

    def _closed_error(self) -> IsterError:
        if self._fork_error is not None:
            told = self._fork_error.again()
            told.topic = self.settings.topic
            return told
        if self.failure is not None:
            self._is_failure_told = True
            error = ClosedError(
                f"the topic's writer stopped: {self.failure.message}",
                topic=self.settings.topic,
                offset=self.synced,
                path=self.failure.path,
                hint="open the topic again; what was acknowledged is recovered",
            )
            error.__cause__ = self.failure
            return error
        return ClosedError("the topic is closed", topic=self.settings.topic)

    def _stalled_error(self, cause: CapacityError) -> CapacityError:
        error = CapacityError(
            f"the topic cannot be written to: {cause.message}",
            topic=self.settings.topic,
            path=cause.path,
            hint="nothing acknowledged is lost; writing goes on when there is room",
        )
        error.__cause__ = cause
        return error

    def _quarantine_error(self) -> CorruptDataError:
        return self.damage[0].as_error(self.settings.topic)


def _is_on_loop() -> bool:
    """Whether the calling thread runs an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _on_loop(error: IsterError) -> IsterError:
    """Adds a hint to the error of a hold, for a caller that would block its event loop."""
    error.hint = f"`await topic.aio.append(…)` waits without blocking the event loop; {error.hint}"
    return error
