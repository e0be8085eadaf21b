"""Repairs the topics of a log that no other process has open: `ister repair`.

Owns: keeping the lease meanwhile, which topics are this node's, what taking a topic over loses and
what is given up, and that a sealed topic is sealed again. Does not own: repairing one topic
(`Log.repair`, `Log.give_up`), output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ister.base import threads
from ister.base.clock import SystemClock
from ister.base.model import TopicName, TopicState
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys
from ister.config import MetadataBackend
from ister.errors import (
    CorruptDataError,
    InvariantError,
    IsterError,
    NotFoundError,
    WaitsForDiskError,
)
from ister.fs.local import LocalFileSystem
from ister.rescue.examine_files import BadRange, FileSurvey, Kind, survey
from ister.rescue.giving_up import GivenUp
from ister.topic.log import Log
from ister.topic.stores import Stores, metadata_of, open_metadata
from ister.wal.directory import WalDirectory


@dataclass(slots=True, kw_only=True)
class TopicRepair:
    """What was found in one topic, and what was done."""

    topic: str
    status: str = "failed"
    """`whole`, `repaired`, `damaged`; `failed` if it could not be read; `skipped` if another node
    owns it."""
    local_frames: int | None = None
    objects: list[str] = field(default_factory=list)
    gives_up: GivenUp | None = None
    errors: list[IsterError] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRange:
    """Offsets that were assigned by a node whose disk is lost, and are not in the bucket."""

    start: int
    known_end: int
    """A subscription acknowledged messages up to here. There may be more."""

    def __str__(self) -> str:
        text = f"all offsets from {self.start} on"
        if self.known_end > self.start:
            return f"{text}; of these, {self.start} up to {self.known_end} were consumed"
        return text


@contextmanager
def keep_lease(log: Log) -> Iterator[None]:
    """Renews the log's lease in the background: a repair may take longer than it lasts."""
    stores = log.stores
    if stores is None:
        yield
        return
    stopping = threading.Event()

    def keep() -> None:
        while not stopping.wait(log.config.storage.metadata.lease_ttl_seconds / 3):
            # A failed renewal is harmless: every transaction checks the ownership of its topic,
            # and the next renewal puts the owner keys back.
            with threads.guard("ister-repair-lease"), suppress(IsterError):
                stores.membership.renew()

    thread = threads.start("ister-repair-lease", keep)
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def find_lost(log: Log, name: TopicName) -> LostRange | None:
    """What a topic loses when it is taken over; None if nothing."""
    stores = _stores(log)
    catalog = stores.catalog(name)
    record = catalog.record()
    if record is None or not record[0].lineage or catalog.sealed() is not None:
        return None
    path = _path(log, name)
    has_files = path is not None and not WalDirectory(LocalFileSystem(), path).is_blank()
    if has_files and _is_of_node(catalog, stores.membership.node):
        return None
    last = catalog.last()
    tiered = 0 if last is None else last.end
    cursors = [one.progress.offset for one in catalog.subscriptions()]
    return LostRange(start=tiered, known_end=max(cursors, default=tiered))


def find_given_up(log: Log, name: TopicName) -> GivenUp:
    """What a topic would give up; changes nothing.

    Raises:
        As `Log.give_up`.
    """
    with _sealed_again(log, name):
        return log.give_up(str(name), at_least=_highest_cursor(log, name), is_dry=True)


def try_repair(
    log: Log,
    name: TopicName,
    *,
    take_over: bool,
    content: bool,
    is_named: bool,
    gives_up: bool = False,
) -> TopicRepair:
    """Repairs one topic; its errors are in the result.

    Args:
        log: Opened without background work.
        name: The topic.
        take_over: Take it from a node whose disk is lost.
        content: Read objects and files whole.
        is_named: Also repair a topic that another node wrote last.
        gives_up: Give up what no tier has.
    """
    row = TopicRepair(topic=str(name))
    try:
        if gives_up:
            _give_up(log, name, row)
        else:
            _repair(log, name, row, take_over=take_over, content=content, is_named=is_named)
    except InvariantError:
        raise
    except IsterError as error:
        row.errors.append(error)
    for found in row.errors:
        found.topic = found.topic or row.topic
    return row


def _repair(
    log: Log, name: TopicName, row: TopicRepair, *, take_over: bool, content: bool, is_named: bool
) -> None:
    stores = _stores(log)
    catalog = stores.catalog(name)
    if not is_named and not _is_ours(log, catalog, stores.membership.node):
        row.status = "skipped"
        return
    with _sealed_again(log, name):
        if take_over:
            log.topic(row.topic, take_over=True)
        repaired = log.repair(row.topic, content=content)
        row.local_frames, row.objects = repaired.local_frames, list(repaired.objects)
        row.errors += repaired.errors
        if content and log.topic(row.topic).state is not TopicState.QUARANTINED:
            # Opening a log reads its end alone; damage further up is found by reading everything.
            path = _path(log, name)
            row.errors += _local_damage(path) if path is not None else []
    if row.errors:
        row.status = "damaged"
    elif row.local_frames is not None or row.objects:
        row.status = "repaired"
    else:
        row.status = "whole"


def _give_up(log: Log, name: TopicName, row: TopicRepair) -> None:
    """Repairs what can be repaired, gives up the rest, and checks that nothing is left to do."""
    with _sealed_again(log, name):
        if log.stores is not None:
            try:
                repaired = log.repair(row.topic)
                row.local_frames, row.objects = repaired.local_frames, list(repaired.objects)
            except WaitsForDiskError as error:
                if not error.known_end:
                    raise
                # Only giving up opens it: its files are older than what is known of them.
        row.gives_up = log.give_up(row.topic, at_least=_highest_cursor(log, name))
        if log.stores is not None:
            row.errors += log.repair(row.topic).errors
        row.errors += [one.as_error(row.topic) for one in log.topic(row.topic).damage]
    is_changed = row.gives_up.ranges or row.objects or row.local_frames is not None
    row.status = "damaged" if row.errors else "repaired" if is_changed else "whole"


@contextmanager
def _sealed_again(log: Log, name: TopicName) -> Iterator[None]:
    """Seals a topic again that was sealed: opening it removes the seal.

    Without the seal another node cannot open the topic.
    """
    is_sealed = log.stores is not None and log.stores.catalog(name).sealed() is not None
    try:
        yield
    finally:
        if is_sealed:
            log.seal(str(name))


def _highest_cursor(log: Log, name: TopicName) -> int:
    """The highest cursor that a broker of a log without a bucket has stored; 0 if there is none.

    With a bucket, the topic's catalog has the cursors.
    """
    settings = metadata_of(log.config.storage)
    if log.stores is not None or settings.backend is MetadataBackend.MEMORY:
        return 0
    clock = SystemClock()
    try:
        store = open_metadata(settings, clock, read_only=True)
    except NotFoundError:
        return 0  # no broker was ever started here
    try:
        keys = TopicKeys(settings.root_prefix, name)
        catalog = Catalog(store, keys, clock=clock, metrics=log.metrics)
        return max((one.progress.offset for one in catalog.subscriptions()), default=0)
    finally:
        store.close()


def _stores(log: Log) -> Stores:
    if log.stores is None:
        raise InvariantError("a log with a bucket has stores")
    return log.stores


def _path(log: Log, name: TopicName) -> str | None:
    """The directory of a topic; None in a log without local files."""
    directory = log.config.storage.wal.dir
    if directory is None:
        return None
    return f"{os.path.abspath(directory)}/{name.namespace}/{name.topic}"


def _is_ours(log: Log, catalog: Catalog, node: str) -> bool:
    """Whether a topic is repaired although it was not named.

    Each process without local files is a new node, so it repairs all topics without an owner.
    """
    return catalog.owner() is None if log.is_diskless else _is_of_node(catalog, node)


def _is_of_node(catalog: Catalog, node: str) -> bool:
    """Whether a topic was last written by this node, or by none that is known."""
    found = catalog.record()
    return found is None or not found[0].lineage or found[0].lineage[-1].node == node


def _local_damage(path: str) -> list[CorruptDataError]:
    if not LocalFileSystem().exists(path):
        return []
    return [
        _as_error(file, bad)
        for file in survey(path).files
        for bad in file.damage
        if bad.kind is Kind.DAMAGE
    ]


def _as_error(file: FileSurvey, bad: BadRange) -> CorruptDataError:
    upto = f" up to {bad.end_offset}" if bad.end_offset is not None else ""
    offsets = f", offsets {bad.offset}{upto}" if bad.offset is not None else ""
    return CorruptDataError(
        f"local file is damaged: {bad.reason}{offsets}",
        topic=file.topic,
        offset=bad.offset,
        path=file.path,
        position=bad.position,
        hint="readers use the bucket's copy of these messages if it has one",
    )
