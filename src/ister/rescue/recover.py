"""Rebuilds lost metadata from the bucket: `ister recover`.

Owns: which topics, and moving a damaged SQLite file aside. Does not own: rebuilding one topic
(`ister.rescue.rebuild`), output (`ister.cli.recover`).

A topic that the metadata store knows is left unchanged, and an error of one topic does not stop the
others. What a crash leaves: topics that are whole, topics that are not known yet, and possibly a
metadata file that was moved aside; the next run does the rest.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.express import find_runs
from ister.bucket.identity import BucketIdentity
from ister.bucket.names import TOPICS_PREFIX, TopicKeys
from ister.config import MetadataBackend, MetadataConfig, StorageConfig
from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NotFoundError,
)
from ister.fs.local import LocalFileSystem
from ister.metadata.base import MetadataStore
from ister.metadata.memory import MemoryMetadata
from ister.objectstore.base import ObjectStore
from ister.rescue.rebuild import TopicReport, find_topics, rebuild_topic
from ister.topic.stores import open_metadata
from ister.wal.directory import LOCK_NAME

_LOOKED_AT_MAX: Final = 100_000
_DAMAGED_SUFFIX: Final = ".damaged-"
_SQLITE_SUFFIXES: Final = ("", "-wal", "-shm")
"""The database first: SQLite drops a log that it finds beside a new, empty database, so a crash in
between leaves nothing that SQLite would apply."""


@contextmanager
def lock_log(root: str) -> Iterator[None]:
    """Keeps other processes from opening the log.

    Raises:
        DirectoryLockedError: Another process has it open.
    """
    fs = LocalFileSystem()
    fs.make_directories(root)
    lock = fs.lock(f"{root}/{LOCK_NAME}")
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataFound:
    """How the metadata store was found."""

    location: str
    state: str
    """`ok`, `missing` or `damaged`."""
    set_aside: str | None = None
    """Where a damaged file is now."""


class Recovery:
    """Rebuilds the metadata of topics that the metadata store does not know.

    Raises:
        ConflictError: The bucket is not the one of the metadata store.
        IsterError: The metadata store cannot be opened.
    """

    def __init__(
        self, storage: StorageConfig, store: ObjectStore, *, clock: Clock, dry_run: bool
    ) -> None:
        self._storage = storage
        self._store = store
        self._is_dry = dry_run
        self._clock = clock
        self._metadata, self.metadata_found = self._open_metadata()
        try:
            root_prefix = storage.metadata.root_prefix
            BucketIdentity(store, self._metadata, root_prefix=root_prefix).verify()
        except BaseException:
            self._metadata.close()
            raise
        self.errors: list[IsterError] = []
        """Of objects that belong to no single topic."""
        self._found = find_topics(store, on_stray=self._report_stray)
        if not self._found:
            self._look_elsewhere()
        self._runs = find_runs(store, on_damage=self.errors.append)

    def close(self) -> None:
        self._metadata.close()

    def _report_stray(self, key: str) -> None:
        self.errors.append(
            InvalidRequestError("object not taken: its key is not that of a topic", path=key)
        )

    def _look_elsewhere(self) -> None:
        """Reports objects that are not where topics are: the root is probably wrong."""
        for info in islice(self._store.list(""), _LOOKED_AT_MAX):
            if info.key.endswith(".dnb1") and not info.key.startswith(TOPICS_PREFIX):
                self.errors.append(
                    InvalidRequestError(
                        f"object not taken: it is not below {TOPICS_PREFIX}",
                        path=info.key,
                        hint="set storage.cloud.root to the prefix above storage/topics",
                    )
                )
                return

    def topics(self, wanted: Iterable[TopicName] = ()) -> dict[TopicName, int]:
        """The topics of these names, or all in the bucket, with their numbers of objects."""
        names = sorted(set(wanted) or self._found, key=str)
        return {name: self._count(name) for name in names}

    def _count(self, name: TopicName) -> int:
        return len(self._found.get(name, ())) + len(self._runs.by_topic.get(name, ()))

    def recover(self, name: TopicName, *, on_object: Callable[[int], None]) -> TopicReport:
        """Rebuilds one topic; its errors are in the result."""
        report = TopicReport(topic=str(name))
        keys = TopicKeys(self._storage.metadata.root_prefix, name)
        try:
            if self._metadata.get(keys.record) is not None:
                # Asked before the objects are read, which may take hours.
                catalog = Catalog(self._metadata, keys, clock=self._clock, metrics=Metrics())
                report.objects = [described for described, _ in catalog.descriptors()]
                report.status = "known"
                on_object(self._count(name))
            elif name in self._found:
                report = rebuild_topic(
                    self._store,
                    self._metadata,
                    keys,
                    self._found[name],
                    runs=self._runs.runs_of(name),
                    clock=self._clock,
                    dry_run=self._is_dry,
                    layout=self._storage.cloud.layout,
                    on_object=lambda: on_object(1),
                )
                report.errors += [
                    DataGapError(
                        "no object holds the offset", start=start, end=end, topic=report.topic
                    )
                    for start, end in report.gaps
                ]
            else:
                report.errors.append(self._not_found(name))
        except InvariantError:
            raise
        except IsterError as error:
            report.errors.append(error)
        for failure in report.errors:
            failure.topic = failure.topic or report.topic
        return report

    def _not_found(self, name: TopicName) -> NotFoundError:
        near = difflib.get_close_matches(str(name), [str(topic) for topic in self._found])
        return NotFoundError(
            "the bucket has no objects of this topic",
            topic=str(name),
            path=self._store.location,
            hint=f"did you mean {', '.join(near)}?"
            if near
            else "omit the name to recover all topics",
        )

    # -- metadata ---------------------------------------------------------------------------

    def _open_metadata(self) -> tuple[MetadataStore, MetadataFound]:
        """The metadata store; a new one where the old one is missing or damaged."""
        config = self._storage.metadata
        is_file = config.backend is MetadataBackend.SQLITE
        location = config.path or ", ".join(config.endpoints)
        is_missing = is_file and not os.path.exists(config.path or "")
        state = "missing" if is_missing else "ok"
        try:
            opened = open_metadata(config, self._clock, read_only=self._is_dry)
        except NotFoundError:
            if not self._is_dry:
                raise
            # Nothing is known, as in an empty store.
            return MemoryMetadata(self._clock), MetadataFound(location=location, state="missing")
        except CorruptDataError:
            if not is_file:
                raise
            if self._is_dry:
                empty = MemoryMetadata(self._clock)
                return empty, MetadataFound(location=location, state="damaged")
            aside = _set_aside(config)
            opened = open_metadata(config, self._clock)
            return opened, MetadataFound(location=location, state="damaged", set_aside=aside)
        return opened, MetadataFound(location=location, state=state)


def _set_aside(config: MetadataConfig) -> str:
    """Takes a damaged SQLite file, and what belongs to it, out of the way; returns where to."""
    fs = LocalFileSystem()
    path = os.path.abspath(config.path or "")
    number = 1
    while any(fs.exists(f"{path}{_DAMAGED_SUFFIX}{number}{suffix}") for suffix in _SQLITE_SUFFIXES):
        number += 1
    aside = f"{path}{_DAMAGED_SUFFIX}{number}"
    for suffix in _SQLITE_SUFFIXES:
        # Named as SQLite expects them, so that they can still be opened by hand.
        if fs.exists(path + suffix):
            fs.rename(path + suffix, aside + suffix)
    fs.sync_directory(os.path.dirname(path))
    return aside
