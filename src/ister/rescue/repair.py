"""Restores what one tier of a topic has lost from the other one, and `ister repair` around it.

First objects that are lost, damaged or missing are uploaded again, as far as local files have their
offsets. Then damaged local files, and those of another topic, are replaced, if the bucket is whole
there: what it holds is served from it, and what it does not is copied into a new file. Frames that
both have are compared.

Owns: repairing one topic under its claim; for a log that no other process has open, keeping the
lease meanwhile, which topics are this node's, what taking a topic over loses, and that a sealed
topic is sealed again. Does not own: what is given up (`giving_up`), files (`local_log`), output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ister.base import threads
from ister.base.clock import SystemClock
from ister.base.model import TopicName, TopicState
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys
from ister.config import MetadataBackend
from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvariantError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.format.frame import FrameBatch, NothingLeftError
from ister.fs.local import LocalFileSystem
from ister.rescue.examine_files import Kind, survey
from ister.rescue.local_log import judge_log, rewrite_log
from ister.topic.bucket_link import TopicBucket
from ister.topic.reconcile import divergence
from ister.topic.stores import Stores, metadata_of, open_metadata
from ister.wal.directory import WalDirectory
from ister.wal.reader import WalReader

if TYPE_CHECKING:
    from ister.rescue.giving_up import GivenUp
    from ister.topic.log import Log
    from ister.topic.topic import Topic


@dataclass(slots=True, kw_only=True)
class Repaired:
    """What was found in one topic, and what was done."""

    topic: str
    status: str = field(default="failed", compare=False)
    """`whole`, `repaired`, `damaged`; `failed` if it could not be read; `skipped` if another node
    owns it."""
    local_frames: int | None = None
    """Frames copied into a new local file; None if the local files were in order."""
    objects: tuple[str, ...] = ()
    """Objects uploaded again."""
    gives_up: GivenUp | None = None
    """What was given up, if that was asked for."""
    errors: tuple[IsterError, ...] = ()
    """What cannot be repaired."""

    @property
    def is_whole(self) -> bool:
        """Whether the topic is in order now."""
        return not self.errors

    def judge(self) -> None:
        """Says in a word what was found and done."""
        has_lost = self.gives_up is not None and self.gives_up.ranges
        is_changed = has_lost or self.objects or self.local_frames is not None
        self.status = "damaged" if self.errors else "repaired" if is_changed else "whole"


def repair_topic(
    topic: Topic, stores: Stores, *, content: bool, retire: Callable[[], None]
) -> Repaired:
    """Repairs both tiers of a topic that no other thread opens or ends meanwhile.

    `content`: read everything, not only names and sizes of objects.
    """
    bucket = topic.bucket
    if bucket is None:
        raise InvariantError("a topic of a log with stores has a bucket", topic=topic.name)
    found = bucket.repair_objects(content=content)
    errors = list(found.errors)
    rewritten: int | None = None
    damage = _local_damage(topic, bucket, content=content)
    if damage is None and content:
        damage = _find_foreign(topic, bucket.owned.tiered, errors)
        if damage is None:
            errors += _compare(topic, stores)
    if damage is not None and any(end > topic.local_start for _, end in found.bad):
        # Local files may hold the only copy of something: they stay as they are.
        errors.append(damage)
    elif damage is not None:
        try:
            with held(topic), abandoned(topic, retire):
                rewritten = rewrite_log(
                    topic.wal,
                    max(bucket.owned.tiered, bucket.owned.start),
                    chunk_bytes=stores.storage.wal.stream_chunk_size,
                    clock=stores.clock,
                    metrics=stores.metrics,
                )
        except (CorruptDataError, NotFoundError, OffsetOutOfRangeError) as error:
            errors.append(error)
    repaired = Repaired(
        topic=topic.name, local_frames=rewritten, objects=tuple(found.objects), errors=tuple(errors)
    )
    repaired.judge()
    return repaired


def _local_damage(topic: Topic, bucket: TopicBucket, *, content: bool) -> IsterError | None:
    if topic.state is TopicState.QUARANTINED:
        return topic.damage[0].as_error(topic.name)
    return bucket.find_local_damage() if content else None


def _find_foreign(topic: Topic, tiered: int, errors: list[IsterError]) -> IsterError | None:
    """A local file of another topic, if the bucket has its offsets; else adds the error.

    Returns the damage that is repaired by using the bucket's copy; None if there is none.
    """
    directory = topic.wal.directory
    found = judge_log(directory, topic.name).foreign if directory is not None else ()
    is_elsewhere = all(file.ranges[-1][1] <= tiered for file in found)
    for file in found:
        error = CorruptDataError(
            f"the local file is one of the topic {file.topic}",
            topic=topic.name,
            offset=file.ranges[0][0],
            path=file.path,
            hint="put the topic's own file in its place, or give its messages up with "
            "`ister repair --give-up`",
        )
        if is_elsewhere:
            return error
        errors.append(error)
    return None


def _compare(topic: Topic, stores: Stores) -> list[IsterError]:
    """Compares the frames that both tiers have; the error of the first that differs, if any."""
    bucket, wal = topic.bucket, topic.wal
    first = bucket.owned.catalog.first() if bucket is not None else None
    if bucket is None or first is None or wal.directory is None:
        return []
    start, end = max(wal.trimmed, first.start), min(bucket.owned.tiered, wal.synced)
    chunk_bytes = stores.storage.wal.stream_chunk_size
    files = WalReader(wal, chunk_bytes=chunk_bytes, metrics=stores.metrics, clock=stores.clock)
    with closing(stores.reader(bucket.owned.catalog)) as history, closing(files):
        while start < end:
            try:
                there = history.fetch(start, end, bytes_max=chunk_bytes)
                here = files.fetch(there.first_offset, there.next_offset, bytes_max=chunk_bytes)
            except NothingLeftError as nothing:
                start = nothing.next_offset
                continue
            except (CorruptDataError, NotFoundError, DataGapError, OffsetOutOfRangeError):
                break  # found before, and told, or trimmed meanwhile
            frames = zip(_frames(there), _frames(here), strict=False)
            for offset, (one, other) in enumerate(frames, there.first_offset):
                if one != other:
                    return [divergence(topic.name, offset, wal.directory.path)]
            start = min(there.next_offset, here.next_offset)
    return []


def _frames(batch: FrameBatch) -> Iterator[bytes]:
    for start, end in zip(batch.starts, [*batch.starts[1:], batch.end], strict=True):
        yield batch.chunk[start:end]


@contextmanager
def held(topic: Topic) -> Iterator[None]:
    """Refuses appends meanwhile; what was accepted before is synced."""
    topic.wal.gate.hold(
        "repair",
        lambda: UnavailableError("the topic is being repaired", topic=topic.name),
        waits=False,
    )
    try:
        if topic.state is TopicState.OPEN:
            topic.flush()
        yield
    finally:
        topic.wal.gate.unhold("repair")


@contextmanager
def abandoned(topic: Topic, retire: Callable[[], None]) -> Iterator[None]:
    """Abandons the local files, which are replaced meanwhile; closes the topic after."""
    try:
        # From here on nothing of this log may touch the files.
        with topic.bucket.ended() if topic.bucket is not None else nullcontext():
            topic.wal.abandon()
        yield
    finally:
        retire()


# -- topics of a log that no other process has open ---------------------------------------------


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
    """What a topic would give up; changes nothing."""
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
) -> Repaired:
    """Repairs one topic; its errors are in the result.

    `is_named`: also repair a topic that another node wrote last.
    `gives_up`: give up what no tier has.
    """
    row = Repaired(topic=str(name))
    try:
        if gives_up:
            _give_up(log, name, row)
        else:
            _repair(log, name, row, take_over=take_over, content=content, is_named=is_named)
    except InvariantError:
        raise
    except IsterError as error:
        row.status = "failed"
        row.errors += (error,)
    for found in row.errors:
        found.topic = found.topic or row.topic
    return row


def _repair(
    log: Log, name: TopicName, row: Repaired, *, take_over: bool, content: bool, is_named: bool
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
        row.local_frames, row.objects = repaired.local_frames, repaired.objects
        row.errors += repaired.errors
        if content and log.topic(row.topic).state is not TopicState.QUARANTINED:
            # Opening a log reads its end alone; damage further up is found by reading everything.
            path = _path(log, name)
            row.errors += tuple(_examine_files(path) if path is not None else ())
    row.judge()


def _give_up(log: Log, name: TopicName, row: Repaired) -> None:
    """Repairs what can be repaired, gives up the rest, and checks that nothing is left to do."""
    with _sealed_again(log, name):
        if log.stores is not None:
            try:
                repaired = log.repair(row.topic)
                row.local_frames, row.objects = repaired.local_frames, repaired.objects
            except WaitsForDiskError as error:
                if not error.known_end:
                    raise
                # Only giving up opens it: its files are older than what is known of them.
        row.gives_up = log.give_up(row.topic, at_least=_highest_cursor(log, name))
        if log.stores is not None:
            row.errors += log.repair(row.topic).errors
        row.errors += tuple(one.as_error(row.topic) for one in log.topic(row.topic).damage)
    row.judge()


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


def _examine_files(path: str) -> Iterator[CorruptDataError]:
    """An error for each damaged range of a topic's local files."""
    files = survey(path).files if LocalFileSystem().exists(path) else ()
    for file in files:
        for bad in file.damage:
            if bad.kind is not Kind.DAMAGE:
                continue
            upto = f" up to {bad.end_offset}" if bad.end_offset is not None else ""
            offsets = f", offsets {bad.offset}{upto}" if bad.offset is not None else ""
            yield CorruptDataError(
                f"local file is damaged: {bad.reason}{offsets}",
                topic=file.topic,
                offset=bad.offset,
                path=file.path,
                position=bad.position,
                hint="readers use the bucket's copy of these messages if it has one",
            )
