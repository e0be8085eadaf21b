"""Records where topics' local files end, to detect files that are an older copy or missing.

    <wal.dir>/.heads      the durable end of each topic, up to a minute old

Owns: that file, and reading the state of a topic's directory before it is opened (`read_local`).
Does not own: the comparison with the topic's record (`ister.bucket.claim`), recovery.

The file is written once a minute if something changed, and when the log is closed. It is not synced
and may be missing: then only the other stores say where the files ended. What a crash leaves: the
previous file, or a damaged one, which counts as missing.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.bucket.claim import Head, LocalFiles
from ister.bucket.terms import Term
from ister.errors import IsterError, NotFoundError
from ister.format.checkpoint import WalState
from ister.format.crc import crc32
from ister.format.frame import Corrupt
from ister.format.frame_walk import scan_file
from ister.fs.base import FileSystem
from ister.fs.whole_files import read_file, write_file
from ister.topic.topic import Topic
from ister.wal.directory import WalDirectory
from ister.wal.recovery import Damage, Recovered

_log = logging.getLogger("ister.topic.heads")

HEADS_NAME: Final = ".heads"
_SAVE_SECONDS: Final = 60.0
_BYTES_MAX: Final = 256 * MIB


class Heads:
    """The durable ends of a log's topics. Thread-safe."""

    def __init__(
        self, fs: FileSystem, root: str | None, *, topics: Callable[[], list[Topic]], clock: Clock
    ) -> None:
        """Reads the file below `root`; None keeps no file."""
        self._fs = fs
        self._path = f"{root}/{HEADS_NAME}" if root is not None else None
        self._topics = topics
        self._clock = clock
        self._lock = threading.Lock()
        self._heads = self._load()
        self._save_at = clock.monotonic() + _SAVE_SECONDS

    def get(self, topic: str) -> Head | None:
        """The recorded end of a topic's files; None if none was recorded."""
        return self._heads.get(topic)

    def check(self) -> None:
        """Records the ends of the open topics, if a minute has passed."""
        now = self._clock.monotonic()
        if now >= self._save_at:
            self._save_at = now + _SAVE_SECONDS
            self.save()

    def save(self) -> None:
        """Records the ends of the open topics, if they have changed."""
        with self._lock:
            before = dict(self._heads)
            for topic in self._topics():
                wal = topic.wal
                if wal.directory is not None and not wal.damage:
                    settings = wal.settings
                    self._heads[topic.name] = Head(settings.incarnation, settings.epoch, wal.synced)
            if self._heads != before:
                self._save()

    def expect(self, topic: str, head: Head) -> None:
        """Records where a topic has to continue, before it is taken over from older files."""
        with self._lock:
            self._heads[topic] = head
            self._save()

    def forget(self, topic: str) -> None:
        """Forgets a topic whose files are about to be removed on purpose."""
        with self._lock:
            if self._heads.pop(topic, None) is not None:
                self._save()

    def _load(self) -> dict[str, Head]:
        if self._path is None:
            return {}
        with suppress(NotFoundError, ValueError, TypeError):
            crc, _, data = read_file(self._fs, self._path, _BYTES_MAX).partition(b" ")
            if int(crc, 16) == crc32(data):
                return {topic: Head(*values) for topic, values in json.loads(data).items()}
        return {}

    def _save(self) -> None:
        if self._path is None:
            return
        data = json.dumps(self._heads, separators=(",", ":")).encode()
        try:
            write_file(
                self._fs, f"{self._path}.tmp", b"%08x %s" % (crc32(data), data), is_synced=False
            )
            self._fs.rename(f"{self._path}.tmp", self._path)
        except IsterError as error:
            _log.warning("ends of topics not recorded", extra={"error": str(error)})


def read_local(directory: WalDirectory, head: Head | None) -> LocalFiles:
    """Reads the state of a topic's local directory, without its messages."""
    if directory.is_blank():
        return LocalFiles(head=head)
    state, seqs = directory.load_state(), directory.log_seqs()
    uploader = directory.load_uploader()
    return LocalFiles(
        is_there=True,
        is_new=directory.is_new(),
        is_marked=directory.is_marked(),
        has_checkpoint=state is not None,
        has_log=state is not None or bool(seqs),
        incarnation=state.incarnation if state is not None else "",
        term=Term(state.epoch, state.claim) if state is not None and state.epoch else None,
        start=state.checkpoint.start_offset if state is not None else 0,
        synced=state.synced if state is not None else 0,
        end=partial(_read_end, directory, state, seqs),
        uploaded_end=uploader.last_committed_offset + 1 if uploader is not None else 0,
        head=head,
    )


def _read_end(directory: WalDirectory, state: WalState | None, seqs: list[int]) -> int | None:
    """The offset after the last whole message; None if damage comes before it."""
    for seq in reversed(seqs):
        is_known = state is not None and state.checkpoint.file_seq == seq
        with directory.open_log(seq) as file:
            scan = scan_file(
                file,
                position=state.synced_position if is_known and state is not None else 0,
                expected_offset=state.synced if is_known and state is not None else None,
            )
        if isinstance(scan.stop, Corrupt):
            return None
        if scan.next_offset is not None:
            return scan.next_offset
    return state.synced if state is not None else 0


def compare_with_head(
    recovered: Recovered, directory: WalDirectory, head: Head | None
) -> Recovered:
    """Adds damage if the files of a log without a bucket end before their recorded end."""
    if head is None or recovered.damage or recovered.next_offset >= head.end:
        return recovered
    damage = Damage(
        path=directory.path,
        position=0,
        offset=recovered.next_offset,
        reason=f"the offsets {recovered.next_offset} up to, not including, {head.end} are missing: "
        "the files are an older copy, or some were removed",
    )
    return replace(recovered, damage=(damage,))
