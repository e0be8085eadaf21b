"""A topic's directory: the names in it, and how its checkpoint is replaced.

    wal.log  wal.1.log  wal.2.log …     frames; the highest number is the active file
    wal.idx  wal.1.idx  wal.2.idx …     the sparse index of each, once it has two entries
    wal.origin                          empty, made with the directory; where not even this is,
                                        files were lost
    wal.ckpt                            the checkpoint, a hint
    uploader.ckpt                       how far uploads have come at least; may be missing
    wal.gaps                            offsets that were given up, where there are any
    wal.ckpt.tmp  wal.4.log.tmp         what was being written when a crash came; ignored
    wal.3.log.cut-4096                  bytes cut off a tail without a checkpoint to judge them by

Owns: file names, both directions, and the atomic replacement of small files. Does not own: what
is in them.

Replacing the checkpoint: write the new one beside it, sync that, rename it over the old one, sync
the directory. The rename is the commit point; a crash leaves the old one or the new one, and
possibly a `.tmp` that the next replacement overwrites. The first checkpoint of a topic is not
synced if the metadata store has all that it says: a power cut may leave none, or a damaged one,
which counts as none.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress
from typing import Final

from ister.base import failpoints
from ister.base.limits import CHECKPOINT_BYTES_MAX, INDEX_ENTRIES_MAX
from ister.errors import NotFoundError
from ister.format.checkpoint import (
    UploaderCheckpoint,
    WalState,
    decode_uploader_checkpoint,
    decode_wal_checkpoint,
    encode_uploader_checkpoint,
    encode_wal_checkpoint,
)
from ister.format.gaps import Gaps, decode_gaps, encode_gaps
from ister.format.sparse_index import INDEX_ENTRY_SIZE, IndexEntry, decode_index, encode_index
from ister.fs.base import File, FileSystem
from ister.fs.whole_files import file_size, read_file, replace_file, write_file

CHECKPOINT_NAME: Final = "wal.ckpt"
UPLOADER_CHECKPOINT_NAME: Final = "uploader.ckpt"
GAPS_NAME: Final = "wal.gaps"
ORIGIN_NAME: Final = "wal.origin"
LOCK_NAME: Final = ".lock"
"""Above all topics; a dot, so that no namespace can have the name."""
_LOG_NAME: Final = re.compile(r"wal(?:\.([1-9][0-9]{0,17}))?\.log")


def format_log_name(seq: int) -> str:
    """The name of the file number `seq`."""
    return f"wal.{seq}.log" if seq else "wal.log"


def parse_log_name(name: str) -> int | None:
    """The number of a file by its name, or None if it is not a log file."""
    match = _LOG_NAME.fullmatch(name)
    if match is None:
        return None
    return int(match.group(1)) if match.group(1) else 0


class WalDirectory:
    """One topic's directory on a file system."""

    def __init__(self, fs: FileSystem, path: str, *, durable: set[str] | None = None) -> None:
        """A directory at `path`, which need not exist.

        `durable`: directories of namespaces that this process has synced, with their parents;
        shared by all topics of a log, so that only the first topic syncs them.
        """
        self.fs = fs
        self.path = path
        self._namespace = path.rpartition("/")[0]
        self._durable = durable if durable is not None else set()
        self._is_marked = False

    def log_path(self, seq: int) -> str:
        """Where the file number `seq` lies."""
        return f"{self.path}/{format_log_name(seq)}"

    def log_size(self, seq: int) -> int:
        """The size of the file number `seq` in bytes."""
        return file_size(self.fs, self.log_path(seq))

    def index_path(self, seq: int) -> str:
        """Where the index of the file number `seq` lies."""
        return f"{self.path}/wal.{seq}.idx" if seq else f"{self.path}/wal.idx"

    @property
    def checkpoint_path(self) -> str:
        """Where the checkpoint lies."""
        return f"{self.path}/{CHECKPOINT_NAME}"

    def make(self) -> None:
        """Makes the directory where missing; its name is durable on return."""
        if self._is_marked:
            self._is_marked = False  # just created and synced
        elif self.fs.exists(self.path):
            self.sync()
        else:
            self._make()

    def _make(self) -> None:
        namespace = self._namespace
        is_durable = namespace in self._durable
        try:
            self.fs.make_directories(self.path, within=namespace if is_durable else None)
        except BaseException:
            # The directory may have been created and not synced: the next `make` syncs it.
            self._durable.discard(namespace)
            raise
        self._durable.add(namespace)

    def is_blank(self) -> bool:
        """Whether nothing is here, not even a mark: the files were lost, or never made."""
        try:
            return not self.fs.list_directory(self.path)
        except NotFoundError:
            return True

    def is_new(self) -> bool:
        """Whether the mark is all that is here."""
        return self.fs.list_directory(self.path) == [ORIGIN_NAME]

    def is_marked(self) -> bool:
        """Whether the mark is here: without it, files were lost."""
        return self.fs.exists(f"{self.path}/{ORIGIN_NAME}")

    def mark(self) -> None:
        """Makes the directory, marked so that its loss can be told; durable on return."""
        self._make()
        self.fs.create(f"{self.path}/{ORIGIN_NAME}").close()
        self.fs.sync_directory(self.path)
        self._is_marked = True

    def sync(self) -> None:
        """Returns once the names in the directory, and its own name, are durable."""
        self.fs.sync_directory(self.path)
        namespace = self._namespace
        if namespace not in self._durable:
            self.fs.sync_directory(namespace)
            self.fs.sync_directory(namespace.rpartition("/")[0])
            self._durable.add(namespace)

    def begin_rename(self) -> None:
        """Makes the next `make` sync the parents again: the directory is about to be renamed."""
        self._durable.discard(self._namespace)
        self._is_marked = False

    def log_seqs(self) -> list[int]:
        """The numbers of the log files here, ascending."""
        seqs = (parse_log_name(name) for name in self.fs.list_directory(self.path))
        return sorted(seq for seq in seqs if seq is not None)

    def open_log(self, seq: int) -> closing[File]:
        """Opens the file number `seq` for reading, until the end of the `with` statement.

        Raises:
            NotFoundError: It is not there, or was trimmed meanwhile.
        """
        return closing(self.fs.open_read(self.log_path(seq)))

    def make_log(self, seq: int) -> File:
        """Makes the file number `seq`; its name is durable after `sync_names`."""
        file = self.fs.create(self.log_path(seq))
        failpoints.reach("wal.after_create_file")
        return file

    def sync_names(self) -> None:
        """Returns once the names in the directory are durable."""
        self.fs.sync_directory(self.path)
        failpoints.reach("wal.after_sync_directory")

    def remove_log(self, seq: int) -> None:
        """Removes a file and its index; durable on return, so that files go in their order."""
        for path in (self.log_path(seq), self.index_path(seq)):
            with suppress(NotFoundError):
                self.fs.remove(path)
        self.fs.sync_directory(self.path)

    def load_state(self) -> WalState | None:
        """The checkpoint, or None if there is none or it is damaged."""
        data = self._load(self.checkpoint_path)
        return None if data is None else decode_wal_checkpoint(data)

    def save_state(self, state: WalState, *, is_synced: bool = True) -> None:
        """Replaces the checkpoint; durable on return if `is_synced`."""
        data = encode_wal_checkpoint(state)
        self._replace(self.checkpoint_path, data, "wal", is_synced=is_synced)

    def load_uploader(self) -> UploaderCheckpoint | None:
        """Returns a lower bound of what is uploaded; None if it is missing or damaged."""
        data = self._load(f"{self.path}/{UPLOADER_CHECKPOINT_NAME}")
        return None if data is None else decode_uploader_checkpoint(data)

    def save_uploader(self, checkpoint: UploaderCheckpoint) -> None:
        """Replaces the uploader's checkpoint, without a sync: a power cut may take it."""
        path = f"{self.path}/{UPLOADER_CHECKPOINT_NAME}"
        self._replace(path, encode_uploader_checkpoint(checkpoint), "tier", is_synced=False)

    def load_gaps(self) -> Gaps | None:
        """Which offsets were given up; None if none were, or if the record is damaged."""
        data = self._load(f"{self.path}/{GAPS_NAME}")
        return None if data is None else decode_gaps(data)

    def save_gaps(self, gaps: Gaps) -> None:
        """Replaces the record of offsets that were given up; durable on return."""
        replace_file(self.fs, f"{self.path}/{GAPS_NAME}", encode_gaps(gaps))

    def _load(self, path: str) -> bytes | None:
        """A small file whole, or None if it is missing or too large to be one."""
        try:
            data = read_file(self.fs, path, CHECKPOINT_BYTES_MAX + 1)
        except NotFoundError:
            return None
        return data if len(data) <= CHECKPOINT_BYTES_MAX else None

    def _replace(self, path: str, data: bytes, who: str, *, is_synced: bool = True) -> None:
        temporary = f"{path}.tmp"
        write_file(self.fs, temporary, data, is_synced=is_synced)
        failpoints.reach(f"{who}.before_checkpoint_rename")
        self.fs.rename(temporary, path)
        if is_synced:
            self.fs.sync_directory(self.path)
        failpoints.reach(f"{who}.after_checkpoint")

    def load_index(self, seq: int) -> list[IndexEntry]:
        """The index of the file number `seq`, as far as it is whole; empty if there is none."""
        bytes_max = INDEX_ENTRIES_MAX * INDEX_ENTRY_SIZE
        try:
            return decode_index(read_file(self.fs, self.index_path(seq), bytes_max))
        except NotFoundError:
            return []

    def save_index(self, seq: int, entries: list[IndexEntry], *, start: int) -> None:
        """Writes the entries from number `start` on; the earlier ones are there already.

        Not synced: an index that a crash took is built again.
        """
        path = self.index_path(seq)
        file = self.fs.create(path) if start == 0 else self.fs.open(path)
        try:
            file.write_at(start * INDEX_ENTRY_SIZE, [encode_index(entries[start:])])
        finally:
            file.close()
