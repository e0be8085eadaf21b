"""A topic's write-ahead log.

    append ─► gate (may it?) ─► buffer ─► committer (write, sync) ─► levels (who waits?)

Owns: what of these belongs to one log, trims, its end. Does not own: files (`writer`), threads
(`scheduler`), the cache and message bodies (`ister.topic`), and the upload of synced messages: the
uploader reports `tiered`. What happens to the log is reported to one `LogListener`.

Invariants:

- offsets are given out under `lock`, one after the other, in the order of the frames;
- `trimmed ≤ tiered ≤ synced ≤ written ≤ next`, each only ever rises;
- one thread at a time writes: the holder of the commit lock;
- a waiter is called only after its watermark is true, and an error reaches every waiter.

What a crash leaves: every frame below `synced`; frames above it perhaps, never with a hole that a
reader would not notice; see `ister.wal.recovery`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from ister.base import failpoints, forks
from ister.base.clock import Clock
from ister.base.guarded_lock import check_wait
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, TopicState
from ister.errors import CapacityError, ClosedError, DiskError, IsterError, WaitTimeoutError
from ister.format.frame_encoder import FrameEncoder
from ister.wal.buffer import AppendBuffer, VolatileBuffer
from ister.wal.checkpointer import Checkpointer
from ister.wal.commit import Committer, LogListener, LogScheduler
from ister.wal.directory import WalDirectory
from ister.wal.gate import AppendGate
from ister.wal.levels import Levels
from ister.wal.recovery import Recovered, WalFile
from ister.wal.settings import WalSettings
from ister.wal.signals import shielded
from ister.wal.waiters import ThreadWaiter, Waiter
from ister.wal.writer import WalWriter

_T = TypeVar("_T")

_log = logging.getLogger("ister.wal.log")


class Wal:
    """One topic's log; see the module header. Thread-safe."""

    def __init__(
        self,
        *,
        directory: WalDirectory | None,
        recovered: Recovered,
        settings: WalSettings,
        listener: LogListener,
        schedule: LogScheduler,
        clock: Clock,
        metrics: Metrics,
        visible_level: AckLevel | None = None,
    ) -> None:
        """Continues from recovery's result.

        `directory`: where its files are; None stores nothing on disk.
        `visible_level`: the level at which readers see messages; the topic's by default.
        """
        self.settings = settings
        self.damage = recovered.damage
        self.gaps = recovered.gaps
        """Offsets that were given up: (start, end) of each range, ascending."""
        kind = VolatileBuffer if directory is None else AppendBuffer
        self.buffer = kind(
            next_offset=recovered.next_offset,
            bytes_max=settings.buffer_max_bytes,
            on_attention=self._attend,
            on_sealed=listener.on_sealed,
            encoder=FrameEncoder(topic_name=settings.topic, codec=settings.codec),
        )
        """Where appends go. Its lock guards the waiters too."""
        self.lock = self.buffer.lock
        self.levels = Levels(
            self.buffer, ack=visible_level or settings.ack, end=recovered.next_offset
        )
        """The watermarks, and who waits for them."""
        self.gate = AppendGate(
            self.buffer, self.levels, settings, damage=recovered.damage, metrics=metrics
        )
        """Whether appends are accepted."""
        self.writer: WalWriter | None = None
        """Has the index that readers use. Changes only under the commit lock."""
        self._checkpointer: Checkpointer | None = None
        if directory is not None:
            self.writer = WalWriter(directory, recovered, settings, clock=clock, metrics=metrics)
            self._checkpointer = Checkpointer(
                self.writer, recovered, settings, clock=clock, metrics=metrics
            )
        self.committer = Committer(
            writer=self.writer,
            checkpointer=self._checkpointer,
            buffer=self.buffer,
            levels=self.levels,
            gate=self.gate,
            settings=settings,
            listener=listener,
            schedule=schedule,
            clock=clock,
            metrics=metrics,
        )
        """Writes and syncs it."""
        self._listener = listener
        self._schedule = schedule
        self._clock = clock
        self._metrics = metrics
        # Held while the log is being closed.
        self._ending = threading.Lock()

    # -- what it is ----------------------------------------------------------------------------

    @property
    def state(self) -> TopicState:
        """Whether appends are accepted, and why not."""
        return self.gate.state

    @property
    def failure(self) -> IsterError | None:
        """Why the writer stopped."""
        return self.gate.failure

    @property
    def files(self) -> tuple[WalFile, ...]:
        """The local files, ascending."""
        return self.writer.files if self.writer is not None else ()

    @property
    def file_mark(self) -> tuple[int, int, int]:
        """The number of local files, the last one's number, and the offset that they end at.

        Cheap to get; differs whenever the files do.
        """
        files = self.files
        return len(files), files[-1].seq if files else 0, self.written

    @property
    def file_bytes(self) -> int:
        """The size of the local files together."""
        return self.writer.file_bytes if self.writer is not None else 0

    @property
    def directory(self) -> WalDirectory | None:
        """Where the files are; None for a log in memory."""
        return self.writer.directory if self.writer is not None else None

    @property
    def is_volatile(self) -> bool:
        """Whether messages are in memory alone."""
        return self.writer is None and self.levels.tiered is None

    @property
    def has_failed_sync(self) -> bool:
        """Whether frames above `synced` may exist in the page cache only."""
        return self.writer is not None and self.writer.has_failed_sync

    @property
    def next(self) -> int:
        """The offset that the next append gets."""
        return self.buffer.next

    @property
    def written(self) -> int:
        """The first offset that is not in a file."""
        return self.levels.written

    @property
    def synced(self) -> int:
        """The first offset that is not durable."""
        return self.levels.synced

    @property
    def tiered(self) -> int | None:
        """The end of what committed descriptors cover; None for a log without a bucket."""
        return self.levels.tiered

    @property
    def trimmed(self) -> int:
        """The first offset still in local files."""
        files = self.files
        return files[0].first_offset if files else self.levels.synced

    @property
    def visible(self) -> int:
        """The end of what readers may see."""
        return self.levels.visible

    # -- appending -----------------------------------------------------------------------------

    def _attend(self) -> None:
        self.committer.attend()

    def admit(self, size_bytes: int) -> None:
        """Waits until an append is allowed, or refuses it. `lock` is held; no offset is taken yet.

        Raises:
            CapacityError: The buffer is full and the policy is to refuse, or the disk is full.
            ClosedError: The log was closed, or its writer stopped.
            CorruptDataError: The log is quarantined.
        """
        while True:
            self.gate.enter()
            if self.buffer.has_room(size_bytes):
                return
            if not self.settings.blocks_when_full:
                self._metrics.count("wal.append_refused")
                raise CapacityError(
                    f"the append buffer is full ({self.buffer.pending_bytes} bytes)",
                    topic=self.settings.topic,
                    hint="wait and try again, or raise storage.wal.buffer_max_bytes",
                )
            self.committer.make_room()

    def fill_cache(self, end: int) -> None:
        """Hands the messages before `end` over to the cache; `lock` is held.

        Call this first after taking the lock to read the cache.
        """
        self.committer.repair()
        # Without files the cache is the log, and its limits apply from the first read on.
        if end > self.buffer.sealed_end or self.writer is None:
            self.buffer.seal()

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
            CapacityError: The disk is full. The message stays in the buffer, is not durable, and is
                written when there is room again.
            DiskError: The write or the sync failed; whether the message is stored is unknown.
            ClosedError: The log was closed before.
        """
        if self.levels.watermark(level) > offset:
            return
        self.gate.check_reentry()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        if level is AckLevel.TIERED:
            self.wait(offset, AckLevel.SYNCED, timeout)
        while True:
            # At or above `next` only an append can end the wait. With a deadline, other threads
            # commit: a thread inside of a sync cannot give up.
            if (
                deadline is None
                and level is not AckLevel.TIERED
                and offset < self.buffer.next
                and self.committer.try_commit(offset, level)
            ):
                return
            waiter = ThreadWaiter(offset, is_patient=is_patient)
            try:
                if not self.enlist(waiter, level):
                    return
                remaining = None if deadline is None else deadline - self._clock.monotonic()
                if not waiter.block(remaining) and self.levels.watermark(level) <= offset:
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

        Returns False, and the waiter is not enlisted, if it has passed already.

        Raises:
            IsterError: The log is closed, failed, or stalled.
        """
        self.gate.check_reentry()
        try:
            return self._enlist(waiter, level)
        except BaseException:
            self.committer.clean_up_interrupt()
            raise

    def _enlist(self, waiter: Waiter, level: AckLevel) -> bool:
        gate = self.gate
        with self.lock:
            if self.levels.watermark(level) > waiter.offset:
                return False
            if gate.refusal is not None and gate.state is not TopicState.STALLED:
                if gate.state is not TopicState.QUARANTINED:
                    gate.is_failure_told = True
                    raise gate.failure.again() if gate.failure is not None else gate.refusal()
                if waiter.offset < self.buffer.next:
                    raise gate.refusal()
            if not self.levels.add(waiter, level):
                return False
            if level is AckLevel.TIERED and not waiter.is_patient:
                self._listener.on_tier_wanted()
            self.committer.expect(waiter)
            return True

    # -- checkpoint, rotation and trim ---------------------------------------------------------

    def save_checkpoint(self, *, is_synced: bool = True, with_term: bool = False) -> bool:
        """Replaces the checkpoint by one for this moment; durable on return if `is_synced`.

        `with_term`: whether it has to say who owns the topic now, even if nothing else changed.
        Returns whether the stored one says who owns the topic now, durably.

        Raises:
            IsterError: It could not be replaced; the old one stands.
        """
        if self._checkpointer is None:
            return False
        return self._checkpointer.save(is_synced=is_synced, with_term=with_term)

    def rotate(self) -> bool:
        """Syncs everything appended so far and rotates the active file.

        Returns False if the active file is empty, and nothing changes.

        Raises:
            CapacityError, DiskError: The commit failed, or the next file cannot be created; the
                active one stays in use.
        """
        writer = self.writer
        if writer is None:
            return False
        with self.committer.committing():
            self.committer.commit(sync=True)
            if writer.position == 0:
                return False
            try:
                is_rotated = self.committer.rotate(writer, self.written)
            except BaseException as error:
                self.committer.fail(error)
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
        first (the commit point), so a crash in the middle leaves files that the next trim removes.

        `whole`: also remove the active file if everything written is synced, tiered and below
        `before`; the next offset is then known from the bucket. A new file follows.
        Returns how many files were removed.

        Raises:
            IsterError: The checkpoint or a file could not be changed; nothing below is lost.
        """
        writer, checkpointer = self.writer, self._checkpointer
        if writer is None or checkpointer is None:
            return 0
        if self.gate.refusal is not None and self.gate.state is not TopicState.STALLED:
            raise self.gate.refusal()
        with self.committer.committing():
            if self.gate.state not in (TopicState.OPEN, TopicState.STALLED):
                raise self.gate.closed_error()
            count = self._count_trimmable(before)
            files = writer.files
            if whole and count + 1 >= len(files) and self._end_active_file(writer, before):
                count = len(files)
            if count == 0:
                return 0
            with self.committer.sync_lock:
                writer.files = files[count:]
                checkpointer.update(self.synced)
        try:
            self._save_with_reserve(checkpointer)
        except IsterError:
            with self.committer.committing(), self.committer.sync_lock:
                writer.files = (*files[:count], *writer.files)
                checkpointer.update(self.synced)
            raise
        for file in files[:count]:
            writer.directory.remove_log(file.seq)
            failpoints.reach("wal.after_remove_file")
        self._metrics.count("wal.trimmed_files", count)
        _log.log(
            self.settings.routine_level,
            "trimmed",
            extra={"topic": self.settings.topic, "files": count, "offset": self.trimmed},
        )
        return count

    def next_trim(self, safe_before: int) -> int | None:
        """The `before` with which a `whole` trim removes one file; None if no file can be removed.

        Offsets from `safe_before` on are kept.
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

        Returns False if the files hold something that is not in the bucket, or the disk is full.
        """
        if not writer.files or not (self.tiered or 0) >= self.written == self.synced <= before:
            return False
        if writer.seq != writer.files[-1].seq:
            return True  # already rotated, and nothing was written since
        with self.committer.sync_lock:
            return writer.rotate(self.written) or (
                self._listener.on_disk_full() and writer.rotate(self.written)
            )

    def _save_with_reserve(self, checkpointer: Checkpointer) -> None:
        try:
            checkpointer.save()
        except CapacityError:
            if not self._listener.on_disk_full():
                raise
            checkpointer.save()

    # -- closing -------------------------------------------------------------------------------

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
        """
        self.gate.check_reentry()
        check_wait()
        return shielded(work, "ister-call") if self._schedule.is_interruptible() else work()

    def _close_once(self) -> None:
        with self._ending:
            self._close()

    def _close(self) -> None:
        with self.lock:
            state = self.gate.state
            if state is TopicState.CLOSED:
                return
        if state is TopicState.FAILED:
            self._close_failed()
            return
        with self.lock:
            was_quarantined = self.gate.state is TopicState.QUARANTINED
            self.committer.is_closing = True
            self.gate.refuse(self.gate.closed_error)
        failure: IsterError | None = None
        with self.committer.commit_lock:
            if self.gate.state is TopicState.CLOSED:
                return  # another thread closed it
            if self.writer is not None and not was_quarantined:
                try:
                    self.committer.commit(sync=True)
                except IsterError as error:
                    failure = error
            with self.lock:
                self.gate.close()
                everyone = self.levels.take_all()
        for waiter in everyone:
            waiter.finish(self.gate.closed_error())
        if self.writer is not None:
            with self.committer.sync_lock:
                self.writer.close_file()
        if failure is not None:
            raise failure
        if not was_quarantined:
            self.save_checkpoint()
        if self._checkpointer is not None:
            self._checkpointer.end()

    def _close_failed(self) -> None:
        """Closes a log whose writer stopped; raises the error if no call has got it yet."""
        # The thread that found the failure records it on disk with this lock held; the directory
        # must not be given to another process before that.
        with self.committer.commit_lock:
            with self.lock:
                if self.gate.state is TopicState.CLOSED:
                    return
                self.gate.state = TopicState.CLOSED
            self.committer.close_file_quietly(wait=True)
        if (
            self.gate.failure is not None
            and not self.gate.is_failure_told
            and self.synced < self.next
        ):
            raise self.gate.failure.again()

    def close_quietly(self) -> None:
        """Closes a log that could not be opened completely; its errors were raised already."""
        try:
            self.close()
        except IsterError:
            _log.debug("close failed", exc_info=True)

    def abandon(self) -> None:
        """Closes the log without writing anything more, not even the checkpoint.

        For callers that are about to change the files; everything was flushed before.
        """
        with self.committer.commit_lock:
            with self.lock:
                self.committer.is_closing = True
                self.gate.state = TopicState.CLOSED
                self.gate.refuse(self.gate.closed_error)
                everyone = self.levels.take_all()
                self.gate.wake()
            self.committer.close_file_quietly(wait=True)
        if self._checkpointer is not None:
            self._checkpointer.end()
        for waiter in everyone:
            waiter.finish(self.gate.closed_error())

    def after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; the parent writes the buffer."""
        forks.reset_locks(
            self.lock, self.committer.commit_lock, self.committer.sync_lock, self._ending
        )
        self.gate.after_fork(error)


class ReadOnlyLog(Wal):
    """A log without local files: all of its messages are in the bucket, and nothing is appended.

    For a topic whose newest messages are on another node's disk. Its watermarks are one offset, the
    end of what the bucket has; readers wait for that to rise.
    """

    def __init__(
        self,
        *,
        end: int,
        settings: WalSettings,
        listener: LogListener,
        schedule: LogScheduler,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        super().__init__(
            directory=None,
            recovered=Recovered(next_offset=end),
            settings=settings,
            listener=listener,
            schedule=schedule,
            clock=clock,
            metrics=metrics,
            visible_level=AckLevel.TIERED,
        )
        self.levels.tiered = end

    def advance(self, end: int) -> None:
        """Raises all watermarks, because the bucket has more, and wakes readers."""
        with self.lock:
            if end <= self.levels.synced:
                return
            self.buffer.skip_to(end)
            self.levels.written = self.levels.synced = end
        self.levels.advance_tiered(end)
