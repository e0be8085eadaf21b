"""The state of a topic's log: watermarks, the buffer, waiters, and whether appends are accepted.

Owns: the fields that `ister.wal.commit` and `ister.wal.log` change, the holds that keep appends
back, and the errors of a log that is closed, failed, stalled or quarantined.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ister.base.clock import Clock
from ister.base.limits import SLOW_SYNC_SECONDS, SLOW_SYNC_SHOWN_SECONDS, STALL_RETRY_SECONDS
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, TopicState
from ister.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    check,
)
from ister.format.frame_encoder import FrameEncoder
from ister.wal.buffer import AppendBuffer, Chunk, VolatileBuffer
from ister.wal.checkpointer import Checkpointer
from ister.wal.directory import WalDirectory
from ister.wal.recovery import Damage, Recovered, WalFile
from ister.wal.settings import WalSettings
from ister.wal.signals import GuardedLock, is_held
from ister.wal.waiters import ThreadWaiter, Waiter, Waiters
from ister.wal.writer import SyncFailedError, WalWriter

if TYPE_CHECKING:
    from ister.wal.commit import GroupCommit

_log = logging.getLogger("ister.wal.log")


class LogScheduler(Protocol):
    """Runs logs on background threads. The submits return at once, also under a lock."""

    def submit(self, log: GroupCommit) -> None:
        """Has `log.run()` called soon."""
        ...

    def submit_upkeep(self, log: GroupCommit) -> None:
        """Has `log.run_upkeep()` called soon, by a thread that does not call `run`."""
        ...

    def submit_at(self, log: GroupCommit, when: float) -> None:
        """Has `log.on_timer(when)` called at `when`, in `Clock.monotonic` seconds."""
        ...

    def is_interruptible(self) -> bool:
        """Whether signal handlers may interrupt the calling thread, which must not change files.

        Always False for a scheduler without threads that could commit instead.
        """
        ...


class _Hold(NamedTuple):
    """What keeps appends back; the fields are the arguments of `hold`."""

    reason: Callable[[], IsterError]
    waits: bool
    on_append: Callable[[], None] | None


class LogState:
    """The state of one log; see the module header."""

    def __init__(
        self,
        *,
        directory: WalDirectory | None,
        recovered: Recovered,
        settings: WalSettings,
        schedule: LogScheduler,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Continues from recovery's result; without a directory, nothing is stored on disk."""
        self.settings = settings
        buffer = VolatileBuffer if directory is None else AppendBuffer
        self.buffer = buffer(
            next_offset=recovered.next_offset,
            bytes_max=settings.buffer_max_bytes,
            on_attention=self._attend,
            encoder=FrameEncoder(topic_name=settings.topic, codec=settings.codec),
        )
        """Where appends go. Its lock guards the waiters too."""
        self.lock = self.buffer.lock
        self.written = recovered.next_offset
        self.synced = recovered.next_offset
        self.damage: tuple[Damage, ...] = recovered.damage
        self.gaps = recovered.gaps
        """Offsets that were given up: (start, end) of each range, ascending."""
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
            self._writer = WalWriter(directory, recovered, settings, clock=clock, metrics=metrics)
            self._checkpointer = Checkpointer(
                self._writer, recovered, settings, clock=clock, metrics=metrics
            )
        else:
            self.written = self.synced = 0
        # Creates the error of refused appends; None accepts them.
        self._refusal: Callable[[], IsterError] | None = None
        # What keeps appends back for now, by name.
        self._holds: dict[str, _Hold] = {}
        self.tiered: int | None = None
        """The end of what committed descriptors cover; None for a log without a bucket."""
        self._tiering_end: IsterError | None = None
        self.on_tier_wanted: Callable[[], None] = lambda: None
        """Called when a call other than a reader's waits for `tiered`; must not block."""
        self.on_disk_full: Callable[[], bool] = lambda: False
        """Called when work that frees space needs some itself; returns whether it freed any."""
        self.may_retry: Callable[[], bool] = lambda: True
        """Returns whether a write that failed on a full disk may be retried now."""
        self.on_synced: Callable[[], None] = lambda: None
        """Called after `synced` has advanced; must not block."""
        self.synced_bytes_total = 0
        """Bytes synced so far by this writer."""
        if recovered.damage:
            self._refuse(self._quarantine_error)
        self._inflight: list[Chunk] = []
        # Group commit.
        self._commit_lock = GuardedLock()
        self._sync_lock = GuardedLock()
        # Between `take_turn` and `end_turn`: that a thread commits its own messages, and whether
        # the log had an open file before.
        self._has_turn = False
        self._had_open_file = False
        # The number of waiters that the last sync has woken.
        self._woken_count = 0
        # Held while the log is being closed.
        self._ending = threading.Lock()
        self._room_waiters: set[ThreadWaiter] = set()
        self._room_callbacks: list[Callable[[], None]] = []
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
        self._waiters = {level: Waiters() for level in AckLevel}
        self._unsynced_since = 0.0
        self._unwritten_since = 0.0
        self._stalled_until = 0.0
        self._stall_cause = CapacityError("the disk is full")
        self._active_at = clock.monotonic()
        self._is_closing = False
        self._fork_error: ClosedError | None = None
        self.on_repaired: Callable[[], None] = lambda: None
        """Called after the buffer was repaired, with `lock` held."""

    def _attend(self) -> None:
        """Called by the buffer when `attention_at` is reached; see `GroupCommit`."""
        raise NotImplementedError

    def _arm_timer(self, when: float) -> None:
        """Has `on_timer` called at `when`, if it would not be called before; see `GroupCommit`."""
        raise NotImplementedError

    # -- properties ----------------------------------------------------------------------------

    @property
    def state(self) -> TopicState:
        """Whether appends are accepted, and why not."""
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
        """The writer, whose index readers use. Changed only under the commit lock."""
        return self._writer

    @property
    def is_volatile(self) -> bool:
        """Whether messages are in memory alone."""
        return self._writer is None

    @property
    def visible(self) -> int:
        """The end of what readers may see: the watermark of `visible_level`."""
        ack = self.settings.ack
        if ack is AckLevel.MEMORY:
            return self.next
        if ack is AckLevel.TIERED and self.tiered is not None:
            return self.tiered
        return self.written if ack is AckLevel.WRITTEN else self.synced

    @property
    def visible_level(self) -> AckLevel:
        """The topic's level: another node may continue a `tiered` topic from what is tiered.

        Without a bucket, no message becomes tiered, and a topic of that level shows what is synced.
        """
        return self.local_level if self.tiered is None else self.settings.ack

    @property
    def local_level(self) -> AckLevel:
        """The topic's level, or `synced` if that is `tiered`: as far as local files go."""
        ack = self.settings.ack
        return AckLevel.SYNCED if ack is AckLevel.TIERED else ack

    @property
    def next(self) -> int:
        """The offset that the next append gets."""
        return self.buffer.next

    @property
    def has_open_file(self) -> bool:
        """Whether the writer has its file open."""
        return self._writer is not None and self._writer.is_open

    @property
    def file_bytes(self) -> int:
        """The size of the local files together."""
        return self._writer.file_bytes if self._writer is not None else 0

    @property
    def is_tiered_wanted(self) -> bool:
        """Whether a call waits for `tiered`; readers that wait for what comes next do not count."""
        return self._waiters[AckLevel.TIERED].has_impatient()

    @property
    def has_failed_sync(self) -> bool:
        """Whether frames above `synced` may exist in the page cache only."""
        return self._writer is not None and self._writer.has_failed_sync

    @property
    def slow_sync_seconds(self) -> float:
        """How long the running sync has taken, or a recent one took; 0 if that is not long."""
        now, began = self._clock.monotonic(), self._sync_began
        if began is not None and now - began >= SLOW_SYNC_SECONDS:
            return now - began
        ended, seconds = self._slow_sync
        return seconds if now - ended < SLOW_SYNC_SHOWN_SECONDS else 0.0

    def watermark(self, level: AckLevel) -> int:
        """The first offset that has not reached `level`."""
        if level is AckLevel.MEMORY:
            return self.next
        if level is AckLevel.TIERED:
            return self.tiered or 0
        return self.written if level is AckLevel.WRITTEN else self.synced

    # -- holding appends back ------------------------------------------------------------------

    def hold(
        self,
        name: str,
        reason: Callable[[], IsterError],
        *,
        waits: bool,
        on_append: Callable[[], None] | None = None,
    ) -> None:
        """Keeps appends back until `unhold`.

        A second hold with the same name replaces it; `reason` creates the error of a refused
        append. With `waits`, appends wait for its end if the policy is to block; otherwise they are
        refused. With `on_append`, they wait whatever the policy is: it is called when an append
        begins to wait, with `lock` held, and has the hold ended soon without blocking itself.
        """
        with self.lock:
            self._holds[name] = _Hold(reason, waits, on_append)
            self.buffer.is_refusing = True
            self._wake_room_waiters()

    def unhold(self, name: str) -> None:
        """Ends a hold, if it exists."""
        if name not in self._holds:
            return  # the common case: called for every topic at every renewal of the lease
        with self.lock:
            if self._holds.pop(name, None) is not None:
                self.buffer.is_refusing = self._refusal is not None or bool(self._holds)
                self._wake_room_waiters()

    def notify_room(self, on_room: Callable[[], None]) -> bool:
        """Calls `on_room` once, in any thread, when a held append should be retried.

        It is called with `lock` held and must not block. For callers that cannot block in `admit`.

        Returns:
            False if appends are refused and do not wait: the caller has to raise the error.
        """
        with self.lock:
            if self._refusal is not None:
                return False
            if not self._holds:
                if self.settings.blocks_when_full:
                    on_room()
                return self.settings.blocks_when_full
            if any(self._refuses(hold) for hold in self._holds.values()):
                return False
            self._room_callbacks.append(on_room)
            return True

    def _refuses(self, hold: _Hold) -> bool:
        """Whether appends are refused, instead of waiting for the end of a hold."""
        return hold.on_append is None and not (hold.waits and self.settings.blocks_when_full)

    def _wake_room_waiters(self) -> None:
        """Wakes all blocked appends; `lock` is held."""
        for waiter in tuple(self._room_waiters):
            waiter.finish(None)
        self._room_waiters = set()
        callbacks, self._room_callbacks = self._room_callbacks, []
        for on_room in callbacks:
            on_room()

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

    def _refuse(self, refusal: Callable[[], IsterError]) -> None:
        self._refusal = refusal
        self.buffer.is_refusing = True

    # -- the tiered watermark ------------------------------------------------------------------

    def end_tiering(self, error: IsterError) -> None:
        """Fails all present and future waits for `tiered` with `error`."""
        with self.lock:
            self._tiering_end = error
            everyone = self._waiters[AckLevel.TIERED].take_all()
        for waiter in everyone:
            waiter.finish(error.again())

    def advance_tiered(self, tiered: int) -> None:
        """Raises `tiered`: committed descriptors cover everything below it."""
        with self.lock:
            check(tiered <= self.synced, "only what is synced becomes tiered")
            if self.tiered is not None and tiered <= self.tiered:
                return
            self.tiered = tiered
            waiters = self._waiters[AckLevel.TIERED]
            waiters.wake_passed(tiered, len(waiters))

    # -- failures ------------------------------------------------------------------------------

    def _stall(self, error: CapacityError) -> None:
        """Refuses appends and fails waiters because the disk is full; sets a timer to retry."""
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
            self._wake_room_waiters()
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
            self._wake_room_waiters()
        _log.info("writing resumed", extra={"topic": self.settings.topic})

    def _fail(self, error: BaseException) -> None:
        """Stops the writer for good and fails all waiters."""
        if isinstance(error, IsterError):
            failure = error
        else:
            failure = ClosedError(f"the writer stopped: {error!r}", topic=self.settings.topic)
        failure.topic = self.settings.topic
        with self.lock:
            # A failed sync after a failed write still matters: even what was written before may
            # be lost.
            is_known = self._state is TopicState.FAILED
            if is_known and (
                not isinstance(error, SyncFailedError) or isinstance(self.failure, SyncFailedError)
            ):
                return
            self._state = TopicState.FAILED
            self.failure = failure
            self._refuse(self._closed_error)
            everyone = self._take_all_waiters()
            self._is_failure_told = self._is_failure_told or bool(everyone)
            self.buffer.discard()
            self._wake_room_waiters()
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

    def _take_all_waiters(self) -> list[Waiter]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters.take_all()]

    def _close_file_quietly(self, *, wait: bool) -> None:
        """Closes the file of a stopped writer, unless a running sync still uses it."""
        if self._writer is None or not self._sync_lock.acquire(blocking=wait):
            return
        try:
            self._writer.close_file()
        except IsterError:
            _log.warning("close failed", extra={"topic": self.settings.topic})
        finally:
            self._sync_lock.release()

    def check_process(self) -> None:
        """Refuses calls in a forked child.

        Raises:
            ClosedError: This process is a fork of the one that opened the log.
        """
        if self._fork_error is not None:
            raise self._closed_error()

    @property
    def holds_lock(self) -> bool:
        """Whether this thread holds `lock`, because a signal handler interrupted a call."""
        return is_held(self.lock)

    def check_reentry(self) -> None:
        """Refuses a call by a signal handler or a finalizer that interrupted one of this topic.

        It would wait forever, or find the state half changed.

        Raises:
            InvalidRequestError: This thread holds the lock.
        """
        if self.holds_lock:
            raise InvalidRequestError(
                "called by a signal handler or a finalizer (__del__) that interrupted a call to "
                "the same topic",
                topic=self.settings.topic,
                hint="set a flag or raise an exception there, and make this call later",
            )

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
            hint="nothing acknowledged is lost; writing resumes when there is room",
        )
        error.__cause__ = cause
        return error

    def _quarantine_error(self) -> CorruptDataError:
        return self.damage[0].as_error(self.settings.topic)
