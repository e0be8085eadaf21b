"""Removes express objects that no topic needs any more.

    list ─► which processes run ─► footers ─► descriptors and records of the topics ─► delete

An express object is removed as a whole, when none of its runs is needed. A run is needed

- while a descriptor of its topic names it, or one that was replaced lately did (`retired`);
- if an object that has its messages, too, is not in the bucket, which may have been rolled back;
- if the metadata store may be older than the run: it does not have the topic or the epoch, its
  descriptors have a hole there, or the run continues the topic and no later owner has committed.

A process that still runs removes its own objects: it knows which of them it is about to commit. No
other process can commit them (`express.commit_runs` requires the lease under which they were
written), so objects of a process whose lease has ended are final. The order matters: an object that
was listed before its process was found to have ended is committed by then, or never will be. So
leases, not clocks, decide which messages are needed; the grace period is for readers.

One process at a time does this, by a leased key. What a crash leaves: objects that the next
collection removes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.express import read_footer
from ister.bucket.fence import Fence
from ister.bucket.names import EXPRESS_PREFIX, TopicKeys, whole_object_key
from ister.errors import CorruptDataError, IsterError, NotFoundError, UnsupportedVersionError
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor, is_express_name
from ister.format.express import ExpressRun
from ister.format.records import TopicRecord, decode_node_process, decode_retired
from ister.metadata.base import MetadataStore
from ister.objectstore.base import ObjectInfo, ObjectStore

_log = logging.getLogger("ister.bucket.express_collection")

_BATCH: Final = 256
"""Objects whose runs are looked up together: each topic costs a few reads per batch."""
_LEASE_SECONDS: Final = 30.0


@dataclass(slots=True)
class ExpressCollection:
    """What a collection has found and removed."""

    removed: list[str] = field(default_factory=list)
    """Keys; with a dry run, those that would be removed."""
    removed_bytes: int = 0
    kept: int = 0
    """Objects that are needed, within the grace period, or of a process that runs."""
    errors: list[IsterError] = field(default_factory=list)
    """Errors of objects that cannot be read; these objects are kept."""


def collect_express(
    objects: ObjectStore,
    metadata: MetadataStore,
    root_prefix: str,
    *,
    grace_seconds: float,
    clock: Clock,
    metrics: Metrics,
    process: str | None = None,
    is_under_way: Callable[[str], bool] = lambda key: False,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
    dry_run: bool = False,
) -> ExpressCollection:
    """Removes the express objects that no topic needs.

    `grace_seconds`: the grace period: how long an object is kept for its readers in any case.
    `process`: the caller's process, if it writes express objects: its own are collected, too.
    `is_under_way`: whether the caller is writing or committing the object with this key.
    `correct_ms`: corrects times that were recorded while the clock was wrong.

    Raises:
        ConflictError: Another process is doing this.
        FencedError: It took too long, and another process may be doing this.
        UnavailableError: A store does not answer; objects that were not checked stay.
    """
    fence = Fence.take(
        metadata,
        f"{root_prefix}/cluster/express",
        id=secrets.token_hex(8),
        about={"job": "collect express objects"},
        ttl_seconds=_LEASE_SECONDS,
        clock=clock,
    )
    try:
        found = ExpressCollection()
        collector = _Collector(objects, metadata, root_prefix, fence, clock=clock, metrics=metrics)
        # In this order; see the module's header.
        listed = list(objects.list(EXPRESS_PREFIX))
        running = _running_processes(metadata, root_prefix) - {process}
        oldest_ms = (clock.now_ns() / 1e9 - grace_seconds) * 1000
        candidates = [
            info
            for info in listed
            if info.modified_at is not None
            and correct_ms(int(info.modified_at * 1000)) < oldest_ms
            and _process_of(info.key) not in (None, *running)
            and not is_under_way(info.key)
        ]
        found.kept = len(listed) - len(candidates)
        for at in range(0, len(candidates), _BATCH):
            for info in collector.unneeded(candidates[at : at + _BATCH], found):
                found.removed.append(info.key)
                found.removed_bytes += info.size
                if not dry_run:
                    fence.check()
                    objects.delete(info.key)
                    failpoints.reach("express.after_collect")
    finally:
        fence.release()
    if found.removed and not dry_run:
        metrics.count("cloud.orphans_removed", len(found.removed))
        _log.info(
            "express objects removed",
            extra={"objects": len(found.removed), "bytes": found.removed_bytes},
        )
    return found


def _process_of(key: str) -> str | None:
    """The process that wrote an express object; None if the key is not an express object's."""
    name = key.removeprefix(EXPRESS_PREFIX)
    return name.split("/")[1] if is_express_name(name) else None


def _running_processes(metadata: MetadataStore, root_prefix: str) -> set[str | None]:
    running: set[str | None] = set()
    for found in metadata.range(f"{root_prefix}/cluster/nodes/"):
        if found.key.endswith("/process"):
            running.add(decode_node_process(found.value, key=found.key).instance)
    return running


class _Collector:
    """Finds out which objects of a batch no topic needs."""

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        root_prefix: str,
        fence: Fence,
        *,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._objects = objects
        self._metadata = metadata
        self._root = root_prefix
        self._fence = fence
        self._renew_at = clock.boottime()
        self._clock = clock
        self._metrics = metrics
        self._there: set[str] = set()
        """Keys of objects that were found in the bucket."""

    def unneeded(
        self, batch: Sequence[ObjectInfo], found: ExpressCollection
    ) -> Iterator[ObjectInfo]:
        """The objects of a batch without a run that is needed; counts the others."""
        footers: dict[str, list[ExpressRun]] = {}
        for info in batch:
            self._keep()
            try:
                footers[info.key] = read_footer(self._objects, info)
            except NotFoundError:
                continue
            except (CorruptDataError, UnsupportedVersionError) as error:
                found.errors.append(error)
        by_topic: dict[TopicName, list[ObjectDescriptor]] = {}
        for runs in footers.values():
            for topic, run in runs:
                by_topic.setdefault(topic, []).append(run)
        needed: set[str] = set()
        for topic, descriptors in by_topic.items():
            self._keep()
            needed |= self._needed(topic, descriptors)
        for info in batch:
            has_run = any(run.object_id in needed for _, run in footers.get(info.key, ()))
            if info.key in footers and not has_run:
                yield info
            else:
                found.kept += 1

    def _keep(self) -> None:
        """Renews the lease when a third of its time is over: there may be thousands of topics."""
        if self._clock.boottime() >= self._renew_at:
            self._fence.renew()
            self._renew_at = self._clock.boottime() + _LEASE_SECONDS / 3

    def _is_there(self, topic: TopicName, described: ObjectDescriptor) -> bool:
        key = whole_object_key(topic, described.object_id)
        if key not in self._there:
            try:
                self._objects.stat(key)
            except NotFoundError:
                return False
            self._there.add(key)
        return True

    def _needed(self, topic: TopicName, runs: Sequence[ObjectDescriptor]) -> set[str]:
        keys = TopicKeys(self._root, topic)
        catalog = Catalog(self._metadata, keys, clock=self._clock, metrics=self._metrics)
        start, end = min(run.start for run in runs), max(run.end for run in runs)
        described = [one for one, _ in catalog.descriptors(start, end)]
        last = catalog.last()
        now = self._clock.now_ns() // 1_000_000_000
        kept = {one.object_id for one in described}
        # After the descriptors: a merge removes some of them and adds them here, at once.
        for found in self._metadata.range(keys.retired("")):
            with suppress(CorruptDataError):
                retired = decode_retired(found.value, key=found.key)
                if retired.until > now:
                    kept.update(retired.objects)
        record = catalog.record()
        if any(run.object_id not in kept for run in runs):
            # In a bucket that was rolled back, runs may be all that is left of what replaced them.
            described = [one for one in described if self._is_there(topic, one)]
        return {
            run.object_id
            for run in runs
            if is_needed(
                run,
                None if record is None else record[0],
                described=described,
                last=last,
                kept=kept,
            )
        }


def stays_by_age(
    described: ObjectDescriptor, *, now: float, grace_seconds: float, wanted_seconds: float
) -> bool:
    """Whether a replaced run is kept for its readers without a `retired` record.

    An express object is kept for `grace_seconds` in any case, and runs are replaced soon after they
    were written. So most swaps need no such record. There would be very many: one for each swap,
    with the names of up to a hundred runs, for the whole grace period.

    `wanted_seconds`: how long readers should have; half of it is enough.
    """
    stays_until = described.created_at + grace_seconds
    return described.format == FORMAT_EXPRESS and stays_until >= now + wanted_seconds / 2


def is_needed(
    run: ObjectDescriptor,
    record: TopicRecord | None,
    *,
    described: Sequence[ObjectDescriptor],
    last: ObjectDescriptor | None,
    kept: set[str],
) -> bool:
    """Whether a topic needs a run, or may need it.

    `record`: the topic's record; None if the metadata store does not have the topic.
    `described`: the topic's objects in the run's range that are in the bucket, ascending.
    `kept`: names of objects that have a descriptor, or that are kept for readers.
    """
    if record is None or run.epoch > record.epoch:
        return True  # the metadata store may be an older copy
    if not record.is_open:
        return False
    if run.incarnation != record.incarnation:
        # An earlier topic of this name, which was deleted; or a later one, whose owner a
        # rolled-back metadata store does not know.
        return run.epoch >= record.born > 0
    if run.object_id in kept:
        return True
    at = max(run.start, record.expired_before)
    for one in described:
        if one.start > at:
            break
        at = max(at, one.end)
    if at >= run.end:
        return False
    # What follows `at` is in a hole, or continues the topic.
    return last is None or at < last.end or last.epoch <= run.epoch
