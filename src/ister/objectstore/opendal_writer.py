"""An object that is being written through opendal."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ister.base.limits import MIB
from ister.errors import ClosedError, IsterError, NotFoundError, UnavailableError
from ister.format.crc import Buffer
from ister.objectstore.staged_files import StagedFiles

if TYPE_CHECKING:
    import opendal

_Result = TypeVar("_Result")

_SYNC_BYTES: Final = 16 * MIB
"""On a directory, this much of an object is synced at a time while the rest is still written."""


class _WriterStore(Protocol):
    """What a writer needs of its store; see `OpendalStore`."""

    def attempt(self, action: str, key: str, call: Callable[[], _Result]) -> _Result: ...

    def begin_sync(self, staged: str) -> Future[None] | None: ...

    def path(self, key: str) -> str: ...


class OpendalWriter:
    """An object that is being written; its file is released as soon as it can only do harm."""

    def __init__(
        self,
        store: _WriterStore,
        key: str,
        file: opendal.file.File,
        *,
        files: StagedFiles | None,
        staged: str | None,
        chunk_bytes: int,
    ) -> None:
        self._store = store
        self._key = key
        self._file: opendal.file.File | None = file
        self._files = files
        self._staged = staged
        self._chunk_bytes = chunk_bytes
        self._error: IsterError | None = None
        self._is_complete = False
        self._unsynced_bytes = 0
        self._syncing: Future[None] | None = None

    def __repr__(self) -> str:
        return f"<writer of {self._store.path(self._key)}>"

    def write(self, data: Buffer) -> None:
        file = self._open_file("write")
        if isinstance(data, bytes) and len(data) <= self._chunk_bytes:
            self._attempt("write", lambda: file.write(data))
            self._sync_early(len(data))
            return
        # opendal takes bytes and copies them: piece by piece there is never more than a chunk.
        view = memoryview(data)
        for start in range(0, len(view), self._chunk_bytes):
            piece = bytes(view[start : start + self._chunk_bytes])
            self._attempt("write", partial(file.write, piece))
            self._sync_early(len(piece))

    def close(self) -> None:
        if self._is_complete:
            return
        file = self._open_file("close")
        self._attempt("complete", lambda: self._complete(file))
        self._is_complete = True
        self._file = None

    def abort(self) -> None:
        if self._file is not None:
            self._give_up()

    def _give_up(self) -> None:
        # Closing the file would complete the object; without a reference it stops.
        self._file = None
        self._discard()

    def _sync_early(self, size: int) -> None:
        """Has the disk begin with what was written; one sync at a time."""
        self._unsynced_bytes += size
        # opendal makes the file with its first chunk, and holds the next ones for a while.
        if self._staged is None or self._unsynced_bytes < max(_SYNC_BYTES, 2 * self._chunk_bytes):
            return
        if self._syncing is not None:
            if not self._syncing.done():
                return
            self._attempt("sync", self._syncing.result)
        self._unsynced_bytes = 0
        self._syncing = self._store.begin_sync(self._staged)

    def _complete(self, file: opendal.file.File) -> None:
        if self._syncing is not None:
            # The kernel tells an error of the disk once: to this sync, and to no later one.
            self._syncing.result()
        file.close()
        if self._files is not None and self._staged is not None:
            self._files.publish(self._staged, self._key)
            self._staged = None

    def _attempt(self, action: str, call: Callable[[], object]) -> None:
        try:
            self._store.attempt(action, self._key, call)
        except BaseException as error:
            self._give_up()
            if isinstance(error, NotFoundError) and _is_gone_upload(error):
                # opendal repeated Complete, and the first one had already done it.
                mapped = UnavailableError(error.message, path=error.path)
                self._error = mapped.again()
                raise mapped from error
            if isinstance(error, IsterError):
                # Without its traceback, whose frames would keep the file.
                self._error = error.again()
            raise

    def _discard(self) -> None:
        if self._files is not None and self._staged is not None:
            self._files.discard(self._staged)
            self._staged = None

    def _open_file(self, action: str) -> opendal.file.File:
        if self._error is not None:
            raise self._error.again()
        if self._file is None:
            raise ClosedError(
                f"{action} failed: the writer is closed", path=self._store.path(self._key)
            )
        return self._file


def _is_gone_upload(error: NotFoundError) -> bool:
    return "NoSuchUpload" in error.message
