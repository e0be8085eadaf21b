"""Staged files with rows of several topics: which topics still need them, and their removal.

    file ─► footer: its topics ─► the writer's record in each ─► manifest: does it name the file?

A topic needs a file from the moment its batch is begun until it is done: then the record of the
file's writer in that topic names a manifest, and the manifest names the file. Before that nothing
names a file. So all files of a batch are kept until the youngest one is older than the grace
period, which is an hour at least, and tasks and drivers that take longer put a file there that
shows that they are at work (`StagingMark`). Owns: this search, these marks.
Does not own: the batches (`ister.topic.batches`), the removal of files by the driver that staged
them, which knows that all of its topics have answered (`ister.spark.row_staging`), staged files of
one topic (`orphans.sweep_staging`).

Several processes may do this at once. What a crash leaves: files that the next sweep removes.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ister.base import failpoints, threads
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.footers import read_end
from ister.bucket.names import (
    SHARED_STAGING_PREFIX,
    TopicKeys,
    parse_writer_of_key,
    shared_staging_prefix,
)
from ister.bucket.orphans import JOB_PREFIX, at_least, is_past
from ister.bucket.writer_files import read_files
from ister.errors import CorruptDataError, IsterError, NotFoundError, UnsupportedVersionError
from ister.format.records import decode_writer
from ister.format.staged_file import FOOTER, StagedSegment, decode_footer
from ister.metadata.base import MetadataStore
from ister.objectstore.base import ObjectInfo, ObjectStore

_log = logging.getLogger("ister.bucket.shared_staging")

_MARK: Final = ".alive"
_MARK_SECONDS: Final = 600.0


class StagingMark:
    """Keeps the staged files of a batch from being removed, from `start` until `end`.

    Every ten minutes a thread writes a small object beside the files.
    """

    def __init__(self, store: ObjectStore, writer: str, batch: int) -> None:
        self._store = store
        self._key = f"{shared_staging_prefix(writer, batch)}{secrets.token_hex(12)}{_MARK}"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threads.start("ister-staging", self._run)

    def end(self) -> None:
        """Ends the thread, and removes its object."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        is_there = False
        while not self._ended.wait(_MARK_SECONDS):
            try:
                self._store.put(self._key, b"")
                is_there = True
            except IsterError as error:
                _log.info("staged files not marked", extra={"error": str(error)})
        if is_there:
            with suppress(IsterError):
                self._store.delete(self._key)


def read_segments(store: ObjectStore, info: ObjectInfo) -> list[StagedSegment]:
    """Returns the segments of a staged file, by topic.

    Raises:
        CorruptDataError: It is not a staged file, or it is damaged.
    """
    return decode_footer(*read_end(store, info, FOOTER), path=info.key)


class StagedNeeds:
    """Finds out which staged files unfinished batches need. Not thread-safe.

    What it has read is cached: use a new one for each sweep.

    `jobs_before`: batches of jobs whose record is older than this time, in seconds since the epoch,
    are abandoned and need no files; None if no batch is abandoned.
    """

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        root_prefix: str,
        *,
        jobs_before: float | None = None,
    ) -> None:
        self._objects = objects
        self._metadata = metadata
        self._root = root_prefix
        self._jobs_before = jobs_before
        self._known: dict[tuple[str, str], frozenset[str]] = {}

    def has(self, info: ObjectInfo) -> bool:
        """Returns whether an unfinished batch of any topic needs a file.

        Raises:
            As `read_segments`; CorruptDataError also if a record or a manifest cannot be read.
        """
        writer = parse_writer_of_key(info.key)
        if writer is None:
            raise CorruptDataError("not a staged file that topics share", path=info.key)
        topics = {segment.topic for segment in read_segments(self._objects, info)}
        return any(info.key in self._needed(topic, writer) for topic in sorted(topics))

    def _needed(self, topic: str, writer: str) -> frozenset[str]:
        if (known := self._known.get((topic, writer))) is None:
            known = self._known[topic, writer] = self._read(topic, writer)
        return known

    def _read(self, topic: str, writer: str) -> frozenset[str]:
        key = TopicKeys(self._root, TopicName.parse(topic)).writer(writer)
        found = self._metadata.get(key)
        if found is None:
            return frozenset()
        record = decode_writer(found.value, key=key)
        is_over = (
            self._jobs_before is not None
            and writer.startswith(JOB_PREFIX)
            and record.updated_at < self._jobs_before
        )
        if record.is_done or is_over:
            return frozenset()
        with suppress(NotFoundError):
            return frozenset(file.key for file in read_files(self._objects, record))
        return frozenset()


def collect_shared_staging(
    objects: ObjectStore,
    metadata: MetadataStore,
    root_prefix: str,
    *,
    grace_seconds: float,
    clock: Clock,
    metrics: Metrics,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
    dry_run: bool = False,
) -> list[str]:
    """Removes old staged files that no unfinished batch of any topic needs.

    A file whose footer cannot be read is kept: its topics are not known. The grace period is at
    least `orphans.GRACE_SECONDS_MIN`, and counts from the youngest file of the same batch.

    Returns the keys of the removed files.

    Raises:
        UnavailableError: A store does not answer; files that were not checked stay.
    """
    oldest = clock.now_ns() / 1e9 - at_least(grace_seconds)
    needs = StagedNeeds(objects, metadata, root_prefix, jobs_before=oldest)
    removed: list[str] = []
    listed = list(objects.list(SHARED_STAGING_PREFIX))
    young = {_batch_of(info) for info in listed if not is_past(info, oldest, correct_ms)}
    for info in listed:
        if _batch_of(info) in young:
            continue
        try:
            if not info.key.endswith(_MARK) and needs.has(info):
                continue
        except NotFoundError:
            continue  # removed meanwhile
        except (CorruptDataError, UnsupportedVersionError) as error:
            _log.warning("staged file kept", extra={"path": info.key, "error": str(error)})
            continue
        removed.append(info.key)
        if not dry_run:
            objects.delete(info.key)
            failpoints.reach("tier.after_delete_object")
    if removed and not dry_run:
        metrics.count("cloud.orphans_removed", len(removed))
        _log.info("staged files removed", extra={"files": len(removed)})
    return removed


def _batch_of(info: ObjectInfo) -> str:
    return info.key.rpartition("/")[0]
