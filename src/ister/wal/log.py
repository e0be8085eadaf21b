"""A topic's write-ahead log.

    LogState (`wal.state`) ◄── GroupCommit (`wal.commit`) ◄── Wal: append, trim, rotate, close

Owns: offsets, the bounded buffer, commits, waiters, the state of the writer. Does not own: files
(`writer`), threads (`scheduler`), the cache and message bodies (`ister.topic`), and the upload of
synced messages: the uploader reports `tiered`.

Invariants:

- offsets are given out under `lock`, one after the other, in the order of the frames;
- `trimmed ≤ tiered ≤ synced ≤ written ≤ next`, each only ever rises;
- one thread at a time writes: the holder of the commit lock;
- a waiter is called only after its watermark is true, and an error reaches every waiter.

What a crash leaves: every frame below `synced`; frames above it perhaps, never with a hole that a
reader would not notice; see `ister.wal.recovery`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from ister.base import failpoints, forks
from ister.base.model import TopicState
from ister.errors import CapacityError, ClosedError, DiskError, IsterError
from ister.wal.checkpointer import Checkpointer
from ister.wal.commit import GroupCommit
from ister.wal.signals import check_wait, shielded
from ister.wal.writer import WalWriter

_T = TypeVar("_T")

_log = logging.getLogger("ister.wal.log")


class Wal(GroupCommit):
    """One topic's log; see the module header. Thread-safe."""

    def admit(self, size_bytes: int) -> None:
        """Waits until an append is allowed, or refuses it. `lock` is held; no offset is taken yet.

        Raises:
            CapacityError: The buffer is full and the policy is to refuse, or the disk is full.
            ClosedError: The log was closed, or its writer stopped.
            CorruptDataError: The log is quarantined.
        """
        while True:
            if self._refusal is not None:
                self._metrics.count("wal.append_refused")
                raise self._refusal()
            if self._holds:
                for hold in self._holds.values():
                    if self._refuses(hold):
                        self._metrics.count("wal.append_refused")
                        raise hold.reason()
                for hold in self._holds.values():
                    if hold.on_append is not None:
                        hold.on_append()
                if _is_on_loop():
                    self._metrics.count("wal.append_refused")
                    raise _on_loop(hold.reason())
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

    def fill_cache(self, end: int) -> None:
        """Hands the messages before `end` over to the cache; `lock` is held.

        Call this first after taking the lock to read the cache.
        """
        self.repair()
        # Without files the cache is the log, and its limits apply from the first read on.
        if end > self.buffer.sealed_end or self._writer is None:
            self.buffer.seal()

    # -- checkpoint, rotation and trim ---------------------------------------------------------

    def save_checkpoint(self, *, is_synced: bool = True, with_term: bool = False) -> bool:
        """Replaces the checkpoint by one for this moment; durable on return if `is_synced`.

        Args:
            is_synced: Whether to sync it.
            with_term: Whether it has to say who owns the topic now, even if nothing else changed.

        Returns:
            Whether the stored one says who owns the topic now, durably.

        Raises:
            IsterError: It could not be replaced; the old one stands.
        """
        if self._checkpointer is None:
            return False
        return self._checkpointer.save(is_synced=is_synced, with_term=with_term)

    def rotate(self) -> bool:
        """Syncs everything appended so far and rotates the active file.

        Returns:
            False if the active file is empty, and nothing changes.

        Raises:
            CapacityError, DiskError: The commit failed, or the next file cannot be created; the
                active one stays in use.
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
        first (the commit point), so a crash in the middle leaves files that the next trim removes.

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
                checkpointer.update(self.synced)
        try:
            self._save_with_reserve(checkpointer)
        except IsterError:
            with self._committing(), self._sync_lock:
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

        Returns:
            False if the files hold something that is not in the bucket, or the disk is full.
        """
        if not writer.files or not (self.tiered or 0) >= self.written == self.synced <= before:
            return False
        if writer.seq != writer.files[-1].seq:
            return True  # already rotated, and nothing was written since
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
            BaseException: The exception that `work` raised.
        """
        self.check_reentry()
        check_wait()
        return shielded(work, "ister-call") if self._schedule.is_interruptible() else work()

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
                return  # another thread closed it
            if self._writer is not None and not was_quarantined:
                try:
                    self._commit(sync=True)
                except IsterError as error:
                    failure = error
            with self.lock:
                if self.state is not TopicState.FAILED:
                    self._state = TopicState.CLOSED
                self._refuse(self._closed_error)
                everyone = self._take_all_waiters()
                self._wake_room_waiters()
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

    def _close_failed(self) -> None:
        """Closes a log whose writer stopped; raises the error if no call has got it yet."""
        # The thread that found the failure records it on disk with this lock held; the directory
        # must not be given to another process before that.
        with self._commit_lock:
            with self.lock:
                if self._state is TopicState.CLOSED:
                    return
                self._state = TopicState.CLOSED
            self._close_file_quietly(wait=True)
        if self.failure is not None and not self._is_failure_told and self.synced < self.next:
            raise self.failure.again()

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
        with self._commit_lock:
            with self.lock:
                self._is_closing = True
                self._state = TopicState.CLOSED
                self._refuse(self._closed_error)
                everyone = self._take_all_waiters()
                self._wake_room_waiters()
            self._close_file_quietly(wait=True)
        if self._checkpointer is not None:
            self._checkpointer.end()
        for waiter in everyone:
            waiter.finish(self._closed_error())

    def after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; the parent writes the buffer."""
        forks.reset_locks(self.lock, self._commit_lock, self._sync_lock, self._ending)
        self._fork_error = error
        self._state = TopicState.CLOSED
        self._refuse(self._closed_error)


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
