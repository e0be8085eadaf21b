"""Garbage in the bucket: objects that crashes, fenced owners and failed deletions left behind.

Objects that are listed in the bucket and not in the catalog are removed after a grace period. The
catalog is read again right before each removal. These objects are kept:

- those of a later epoch than the caller's: a successor may be about to commit them;
- those of unknown age;
- those that a merged object has replaced, until the time that the merge has set: they may still be
  read;
- those in a hole of the catalog: their descriptors may be restored;
- those whose messages a named object has, too, that is not in the bucket: it may have been rolled
  back to before a merge;
- those with names that Ister does not give: files of others, and objects that Danube wrote. Of the
  latter, those go that belonged to the topic and that a merged object has replaced.

One owner does this for its topic (`collect_orphans`); a job does it for topics that no process has
open (`collect_unowned`), and keeps more. Parts of uploads that never completed are invisible to a
listing: `ister.objectstore` aborts them, or a lifecycle rule of the bucket does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.listing import list_objects
from ister.bucket.names import (
    ObjectName,
    format_pending_id,
    object_id_of,
    object_key,
    parse_danube_id,
    parse_object_id,
    parse_pending_epoch,
    parse_pending_start,
    staging_prefix,
    whole_object_key,
)
from ister.bucket.ownership import OwnedTopic
from ister.bucket.writer_files import read_files
from ister.errors import NotFoundError
from ister.format.descriptor import parse_run_id
from ister.format.records import decode_retired, decode_writer
from ister.metadata.base import Delete, RevisionIs
from ister.objectstore.base import ObjectInfo, ObjectStore

_log = logging.getLogger("ister.bucket.orphans")


def collect_orphans(
    owned: OwnedTopic,
    store: ObjectStore,
    *,
    grace_seconds: float,
    clock: Clock,
    metrics: Metrics,
    has_jobs: Callable[[], bool] = lambda: False,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
    keeps: Callable[[str], bool] = lambda object_id: False,
    dry_run: bool = False,
) -> list[str]:
    """Removes objects of the topic that no descriptor names.

    `grace_seconds`: how long an object without a descriptor is kept.
    `has_jobs`: whether jobs may be making objects in this owner's name: objects at or after the
    topic's end are kept then.
    `correct_ms`: corrects times that were recorded while the clock was wrong.

    Raises:
        UnavailableError: A store does not answer; objects that were not checked stay.
    """
    topic = owned.catalog.keys.topic
    oldest = clock.now_ns() / 1e9 - grace_seconds
    session = owned.session()
    under_way = (
        (session.object_id, format_pending_id(session.start, session.epoch))
        # A session of an earlier owner is over; commits of express objects do not end it.
        if session is not None and session.epoch >= owned.epoch
        else ()
    )
    now = clock.now_ns() // 1_000_000_000
    if not dry_run:
        _forget_retired(owned, store, now)
    removed: list[str] = []
    listed = list(list_objects(store, topic))
    there = {object_id_of(topic, info.key) for info in listed}
    for info in listed:
        object_id = object_id_of(topic, info.key)
        if object_id in under_way or not is_past(info, oldest, correct_ms):
            continue
        # In this order: a merge between the two questions shows in the second one.
        if (
            _is_garbage(owned, object_id)
            and object_id not in _retired(owned, now)
            and not (_is_ahead(owned, object_id) and has_jobs())
            and _is_still_past(store, info.key, oldest, correct_ms)
            and not keeps(object_id)
            and not _is_successor_lost(owned, store, there, object_id)
        ):
            removed.append(object_id)
            if not dry_run:
                owned.check()
                store.delete(info.key)
                failpoints.reach("tier.after_delete_object")
    if removed and not dry_run:
        metrics.count("cloud.orphans_removed", len(removed))
        _log.info("orphans removed", extra={"topic": owned.topic, "objects": removed})
    return removed


def collect_unowned(
    owned: OwnedTopic,
    store: ObjectStore,
    *,
    grace_seconds: float,
    clock: Clock,
    metrics: Metrics,
    correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
    dry_run: bool = False,
) -> list[str]:
    """Removes objects of a topic that no process has open, and that no descriptor names.

    Unlike `collect_orphans`, it does not rely on an owner that has compared the catalog with the
    bucket and its files. An object is kept unless each of its offsets has expired, or is in a named
    object that is in the bucket. So lost or outdated metadata deletes no messages.

    `owned`: the topic, in the name of its last owner (`ister.bucket.claim.act_outside`).
    `grace_seconds`: how long an object without a descriptor is kept.
    `correct_ms`: corrects times that were recorded while the clock was wrong.
    """
    topic = owned.catalog.keys.topic
    # Listed before the catalog is read: what it names later counts as absent.
    there = {object_id_of(topic, info.key) for info in list_objects(store, topic)}
    return collect_orphans(
        owned,
        store,
        grace_seconds=grace_seconds,
        clock=clock,
        metrics=metrics,
        correct_ms=correct_ms,
        keeps=lambda object_id: not _is_held(owned, store, there, object_id),
        dry_run=dry_run,
    )


def _is_held(owned: OwnedTopic, store: ObjectStore, there: set[str], object_id: str) -> bool:
    """Whether the topic has all messages of an object without it, or they have expired."""
    name = parse_object_id(object_id)
    if name is None:
        start = parse_pending_start(object_id)
        return start is not None and start < owned.tiered
    at = max(name.start, owned.record.expired_before)
    for described, _ in owned.catalog.descriptors(at, name.end):
        if described.start > at or not is_there(
            store, owned.catalog.keys.topic, there, described.object_id
        ):
            return False
        at = max(at, described.end)
    return at >= name.end


def _is_successor_lost(
    owned: OwnedTopic, store: ObjectStore, there: set[str], object_id: str
) -> bool:
    """Whether the bucket lacks an object that has messages of this one, which it has replaced."""
    name = parse_object_id(object_id)
    return name is not None and any(
        not is_there(store, owned.catalog.keys.topic, there, described.object_id)
        for described, _ in owned.catalog.descriptors(name.start, name.end)
    )


def is_there(store: ObjectStore, topic: TopicName, there: set[str], object_id: str) -> bool:
    """Whether a named object is in the bucket; `there` are those of the topic that were listed."""
    if object_id not in there and parse_run_id(object_id) is not None:
        with suppress(NotFoundError):
            store.stat(whole_object_key(topic, object_id))
            there.add(object_id)
    return object_id in there


def _retired(owned: OwnedTopic, now: int) -> set[str]:
    """The replaced objects that are still kept."""
    kept: set[str] = set()
    for found in owned.catalog.store.range(owned.catalog.keys.retired("")):
        retired = decode_retired(found.value, key=found.key)
        if retired.until > now:
            kept.update(retired.objects)
    return kept


def _forget_retired(owned: OwnedTopic, store: ObjectStore, now: int) -> None:
    """Deletes the records of replaced objects that are not kept any more.

    A crash between the end of a record and that of its objects leaves objects without a descriptor.
    Objects that Danube wrote are deleted before their record: without it they are foreign files.
    """
    topic = owned.catalog.keys.topic
    for found in owned.catalog.store.range(owned.catalog.keys.retired("")):
        retired = decode_retired(found.value, key=found.key)
        if retired.until <= now:
            for object_id in retired.objects:
                if parse_object_id(object_id) is None and parse_danube_id(object_id) is not None:
                    owned.check()
                    store.delete(object_key(topic, object_id))
                    failpoints.reach("tier.after_delete_object")
            owned.transact([RevisionIs(found.key, found.revision)], [Delete(found.key)])


def is_past(info: ObjectInfo, oldest: float, correct_ms: Callable[[int], int]) -> bool:
    """Whether an object is known to be older than a time, in seconds."""
    return info.modified_at is not None and correct_ms(int(info.modified_at * 1000)) < oldest * 1000


def _is_ahead(owned: OwnedTopic, object_id: str) -> bool:
    """Whether an object could be the next one that a job commits."""
    name = parse_object_id(object_id)
    return name is None or name.start >= owned.tiered


def _is_still_past(
    store: ObjectStore, key: str, oldest: float, correct_ms: Callable[[int], int]
) -> bool:
    """Whether an object is still as old as listed: a job may have written it again meanwhile."""
    try:
        return is_past(store.stat(key), oldest, correct_ms)
    except NotFoundError:
        return False


def _is_garbage(owned: OwnedTopic, object_id: str) -> bool:
    name = parse_object_id(object_id)
    if name is None:
        # A pending object's upload is over, unless it is the one of the session.
        pending = parse_pending_epoch(object_id)
        return pending is not None and pending <= owned.epoch
    if name.epoch > owned.epoch:
        return False
    described = owned.catalog.find(name.start)
    if described is not None and described.object_id == object_id:
        return False
    if name.tag is not None and not _is_covered(owned, name):
        # A merged object with more than the catalog has: the catalog is older than it.
        return False
    is_held = described is not None and name.start < described.end
    # Offsets in the midst of the topic that no descriptor has: one was lost, and this may be the
    # object that it named.
    return is_held or not owned.record.expired_before <= name.start < owned.tiered


def _is_covered(owned: OwnedTopic, name: ObjectName) -> bool:
    """Whether the catalog has all offsets of an object, or they have expired."""
    at = max(name.start, owned.record.expired_before)
    for described, _ in owned.catalog.descriptors(at, name.end):
        if described.start > at:
            return False
        at = max(at, described.end)
    return at >= name.end


GRACE_SECONDS_MIN: Final = 3600
"""How long staged files, and files that jobs make or replace, are kept whatever the grace period
is: nothing in the metadata store names them before their commit, and readers may have planned to
read what was replaced."""
JOB_PREFIX: Final = "job-"
"""Prefix of the names of writers that write one batch, which is never asked for again."""
REPLAY_PREFIX: Final = "replay-"
"""Prefix of the names of writers that are replays."""


def at_least(grace_seconds: float) -> float:
    """Returns a grace period, or `GRACE_SECONDS_MIN` if that is longer."""
    return max(grace_seconds, GRACE_SECONDS_MIN)


def sweep_staging(
    owned: OwnedTopic,
    objects: ObjectStore,
    *,
    grace_seconds: float,
    clock: Clock,
    dry_run: bool = False,
) -> list[str]:
    """Removes old staged files that no unfinished batch needs, and forgets old jobs.

    The grace period is at least `GRACE_SECONDS_MIN`.

    Raises:
        CorruptDataError: A writer's record or manifest cannot be read; nothing is removed then.
    """
    keys = owned.catalog.keys
    now = clock.now_ns() / 1e9
    grace_seconds = at_least(grace_seconds)
    left = find_stale_staging(owned.catalog, objects, now=now, grace_seconds=grace_seconds)
    if not dry_run:
        for found in owned.catalog.store.range(keys.writer(JOB_PREFIX)):
            if now - decode_writer(found.value, key=found.key).updated_at > grace_seconds:
                owned.transact([RevisionIs(found.key, found.revision)], [Delete(found.key)])
        for info in left:
            owned.check()
            objects.delete(info.key)
            failpoints.reach("tier.after_delete_object")
    return [info.key for info in left]


def find_stale_staging(
    catalog: Catalog, objects: ObjectStore, *, now: float, grace_seconds: float
) -> list[ObjectInfo]:
    """The staged files of a topic that are old, and that no unfinished batch needs.

    The batch of an old job needs none: it is done, or its job was killed during its commit, and it
    is never asked for again.

    Raises:
        CorruptDataError: A writer's record or manifest cannot be read.
    """
    keys = catalog.keys
    needed: set[str] = set()
    for found in catalog.store.range(keys.writer("")):
        record = decode_writer(found.value, key=found.key)
        is_job = found.key.startswith(keys.writer(JOB_PREFIX))
        if not record.is_done and not (is_job and now - record.updated_at > grace_seconds):
            needed.add(record.manifest)
            with suppress(NotFoundError):
                needed.update(file.key for file in read_files(objects, record))
    return [
        info
        for info in list(objects.list(staging_prefix(keys.topic)))
        if info.modified_at is not None
        and now - info.modified_at > grace_seconds
        and info.key not in needed
    ]
