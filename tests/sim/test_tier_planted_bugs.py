"""Bugs planted into the tiers on purpose, each of which the simulation has to catch.

Each entry breaks one rule of uploading, owning, retention or reading in the way real systems have
broken it. Proof that the worlds of `tier_world` can fail, and that a situation of
`test_tier_crashes` can.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

import ister.bucket.object_maker
import ister.bucket.orphans
import ister.bucket.ownership
import ister.bucket.upload
import ister.topic.bucket_link
import ister.topic.opening
import ister.topic.reconcile
import ister.topic.retention
from ister.base.clock_guard import ClockGuard
from ister.base.model import AckLevel
from ister.bucket.catalog import Catalog
from ister.bucket.claim import _Claimant
from ister.bucket.membership import Membership
from ister.bucket.names import format_object_id, object_key, objects_prefix
from ister.bucket.object_maker import ObjectSummary
from ister.bucket.ownership import OwnedTopic
from ister.bucket.upload import Uploader
from ister.config import WalRetentionConfig
from ister.errors import CommitUnknownError, ConflictError, UnavailableError
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import TopicRecord
from ister.metadata.base import Absent
from ister.topic.bucket_link import TopicBucket
from ister.topic.idle_mark import IdleMark
from ister.topic.log import Log
from ister.topic.node_clock import NodeClock
from ister.topic.reader import Reader
from ister.topic.reconcile import remove_directory
from ister.topic.retention import Retention, list_files, plan_trim
from ister.topic.stores import Stores
from ister.topic.topic import Topic
from ister.topic.uploads import TopicUploads, UploadResult
from ister.wal.directory import WalDirectory
from ister.wal.levels import Levels
from tests.sim.known_seeds import Plant, catch, plants_of
from tests.sim.test_tier_crashes import collect_late
from tests.sim.tier_world import run_seed
from tests.sim.world import BrokenPromiseError, find_break
from tests.support.memory_metadata import MemoryMetadata
from tests.support.scale import nightly
from tests.support.stores import Cluster, Pipeline, a_descriptor

SEEDS_MAX = 3000
TURNS = 80
_RECORDS = "/danube/topics/"


def commit_without_comparing_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """Whoever changes anything but the record does not require the record that it knows."""
    real = MemoryMetadata.transact

    def transact(self: MemoryMetadata, compares, operations):
        if not any(operation.key.startswith(_RECORDS) for operation in operations):
            compares = [c for c in compares if not c.key.startswith(_RECORDS)]
        return real(self, compares, operations)

    patch.setattr(MemoryMetadata, "transact", transact)


def claim_without_a_new_epoch(patch: pytest.MonkeyPatch) -> None:
    real = _Claimant.next_record

    def next_record(self: _Claimant, view, seen):
        record = real(self, view, seen)
        return replace(record, epoch=view.known.epoch) if view.known is not None else record

    patch.setattr(_Claimant, "next_record", next_record)


def descriptor_before_object(patch: pytest.MonkeyPatch) -> None:
    def upload(self: Uploader, source, start, synced):
        if start >= synced:
            return None
        settings = self._settings
        end = source.plan(
            start,
            synced,
            bytes_max=settings.object_bytes_max,
            span_ms_max=settings.object_span_ms_max,
        )
        summary = ObjectSummary(start, index_every_messages=settings.index_every_messages)
        while summary.end < end:
            summary.add(source.fetch(summary.end, end, bytes_max=settings.read_bytes))
        owned = self._owned
        described = summary.describe(
            format_object_id(start, end, owned.epoch),
            epoch=owned.epoch,
            incarnation=owned.record.incarnation,
            created_at=self._clock.now_ns() // 1_000_000_000,
            etag=None,
        )
        owned.commit(described)
        self._make_object(source, start, end)
        return described

    patch.setattr(Uploader, "upload", upload)


def tiered_is_told_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real = TopicUploads._upload

    def upload(self: TopicUploads, is_crowded, **options):
        self._wal.levels.advance_tiered(self._wal.synced)
        return real(self, is_crowded, **options)

    patch.setattr(TopicUploads, "_upload", upload)


def lost_answers_are_taken_for_success(patch: pytest.MonkeyPatch) -> None:
    real = OwnedTopic._change

    def change(self: OwnedTopic, compares, operations, *, is_done=None):
        try:
            return real(self, compares, operations, is_done=is_done and (lambda: True))
        except CommitUnknownError:
            return None

    patch.setattr(OwnedTopic, "_change", change)


def a_failed_commit_is_only_logged(patch: pytest.MonkeyPatch) -> None:
    real = OwnedTopic.commit

    def commit(self: OwnedTopic, descriptor) -> None:
        try:
            real(self, descriptor)
        except UnavailableError:
            self.last = descriptor

    patch.setattr(OwnedTopic, "commit", commit)


def upload_of_what_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    def upload(self: Topic):
        if self.wal.next:
            self.wal.wait(self.wal.next - 1, AckLevel.WRITTEN)
        with self.bucket.uploads.lock:
            return self.bucket.uploads._upload(lambda: False, is_paced=True)

    real = TopicUploads._upload

    def upload_written(self: TopicUploads, is_crowded, **options):
        levels = self._wal.levels
        synced, levels.synced = levels.synced, levels.written
        try:
            return real(self, is_crowded, **options)
        finally:
            levels.synced = synced

    patch.setattr(TopicUploads, "_upload", upload_written)
    patch.setattr(Topic, "upload", upload)


def trim_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    def trim(self: Retention) -> int:
        before = plan_trim(
            list_files(self._wal),
            WalRetentionConfig(time_minutes=0, size_mb=0),
            safe_before=self._wal.synced,
            now_ms=self._clock.now_ns() // 1_000_000,
        )
        return 0 if before is None else self._wal.trim(before)

    patch.setattr(Retention, "trim", trim)


def trim_without_a_look_at_the_object(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TopicBucket, "assure", lambda self, start, end, assured=None: None)


def trim_looks_at_the_size_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ister.topic.bucket_link, "verify_content", _verify_size)


def _verify_size(store, key, descriptor, *, chunk_bytes) -> None:
    store.stat(key)


def the_checkpoint_is_trusted_over_the_catalog(patch: pytest.MonkeyPatch) -> None:
    def next_start(self: TopicUploads) -> int:
        checkpoint = self._wal.directory.load_uploader()
        return self._wal.trimmed if checkpoint is None else checkpoint.last_committed_offset + 1

    patch.setattr(TopicUploads, "_next_start", next_start)


def garbage_collection_asks_nobody(patch: pytest.MonkeyPatch) -> None:
    """What the catalog does not name goes, whoever owns the topic and is about to commit it."""

    def collect(
        owned: OwnedTopic, store, *, grace_seconds, clock, metrics, has_jobs, correct_ms
    ) -> list[str]:
        prefix = objects_prefix(owned.catalog.keys.topic)
        oldest = clock.now_ns() / 1e9 - grace_seconds
        named = {described.object_id for described, _ in owned.catalog.descriptors()}
        found = [
            info.key.removeprefix(prefix)
            for info in store.list(prefix)
            if info.modified_at < oldest
        ]
        for object_id in found:
            if object_id not in named:
                store.delete(prefix + object_id)
        return found

    patch.setattr(ister.topic.retention, "collect_orphans", collect)


def garbage_collection_goes_by_epoch(patch: pytest.MonkeyPatch) -> None:
    """Objects of earlier owners are taken for garbage."""
    real = ister.bucket.orphans._is_garbage

    def is_garbage(owned: OwnedTopic, object_id: str) -> bool:
        name = ister.bucket.orphans.parse_object_id(object_id)
        return real(owned, object_id) or (name is not None and name.epoch < owned.epoch)

    patch.setattr(ister.bucket.orphans, "_is_garbage", is_garbage)


def lookups_begin_at_the_next_object(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "find", lambda self, offset: self.following(offset))


def seal_before_the_upload(patch: pytest.MonkeyPatch) -> None:
    """The seal is committed, and the files go, whatever the bucket holds."""
    real = Log.seal

    def seal(self: Log, name: str) -> int:
        bucket = self.topic(name).bucket
        bucket.uploads.upload = lambda: UploadResult(start=0, end=0)
        return real(self, name)

    patch.setattr(Log, "seal", seal)
    patch.setattr(ister.bucket.ownership, "check", lambda condition, message: None)


def files_that_are_set_aside_are_removed(patch: pytest.MonkeyPatch) -> None:
    def remove(directory: WalDirectory, reason: str) -> str:
        remove_directory(directory.fs, directory.path)
        directory.mark()
        return directory.path

    for module in (ister.topic.opening, ister.topic.reconcile):
        patch.setattr(module, "set_aside", remove)


def old_files_are_taken_for_the_topic(patch: pytest.MonkeyPatch) -> None:
    """Another node has written since, and the files here are used all the same."""
    for module in (ister.topic.opening, ister.topic.reconcile):
        patch.setattr(module, "set_aside", lambda directory, reason: directory.path)


def readers_jump_over_what_is_not_local(patch: pytest.MonkeyPatch) -> None:
    real = Reader._fetch

    def fetch(self: Reader, start: int, readable: int, max_bytes: int):
        start = min(max(start, self._wal.trimmed), readable - 1)
        return real(self, start, readable, max_bytes)

    patch.setattr(Reader, "_fetch", fetch)


def acknowledged_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TopicBucket, "check_owner", lambda self: None)


def object_names_without_the_epoch(patch: pytest.MonkeyPatch) -> None:
    def format_object_id(start: int, end: int, epoch: int, **more: object) -> str:
        return f"data-{start}-0.dnb1"

    for module in (ister.bucket.upload, ister.bucket.object_maker):
        patch.setattr(module, "format_object_id", format_object_id)


def retention_takes_from_the_middle(patch: pytest.MonkeyPatch) -> None:
    def plan(descriptors, *, now_ms, time_minutes, size_mb, correct_ms):
        return list(descriptors)[1:-1]

    patch.setattr(ister.topic.retention, "plan_expiry", plan)


def objects_expire_before_their_descriptors(patch: pytest.MonkeyPatch) -> None:
    def expire(owned: OwnedTopic, store, expired, *, metrics) -> int:
        for described in expired:
            store.delete(object_key(owned.catalog.keys.topic, described.object_id))
        if expired:
            owned.expire(expired)
        return len(expired)

    patch.setattr(ister.topic.retention, "expire", expire)


def a_deletion_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnedTopic, "mark_deleting", lambda self: None)


def a_deletion_leaves_the_objects(patch: pytest.MonkeyPatch) -> None:
    def delete(self: Stores, name, owned, remove_files) -> None:
        if owned is not None:
            owned.mark_deleting()
            remove_files()
            owned.finish_delete()

    patch.setattr(Stores, "delete", delete)


# -- somebody acts in the owner's name ------------------------------------------------------


def a_lost_lease_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A pipeline goes on although its lease has ended."""
    real = MemoryMetadata.transact

    def transact(self: MemoryMetadata, compares, operations):
        kept = [c for c in compares if "/pipeline/" not in c.key or isinstance(c, Absent)]
        return real(self, kept, operations)

    patch.setattr(MemoryMetadata, "transact", transact)


def a_swap_forgets_the_pointer(patch: pytest.MonkeyPatch) -> None:
    real = MemoryMetadata.transact

    def transact(self: MemoryMetadata, compares, operations):
        if any("/retired/" in operation.key for operation in operations):
            operations = [o for o in operations if not o.key.endswith("/cur")]
        return real(self, compares, operations)

    patch.setattr(MemoryMetadata, "transact", transact)


def a_swap_leaves_the_last_one(patch: pytest.MonkeyPatch) -> None:
    real = OwnedTopic.swap
    patch.setattr(
        OwnedTopic, "swap", lambda self, old, new, **more: real(self, old[:-1], new, **more)
    )
    patch.setattr(ister.bucket.ownership, "check", lambda holds, what: None)


def a_commit_does_not_look_at_the_pointer(patch: pytest.MonkeyPatch) -> None:
    real = MemoryMetadata.transact

    def transact(self: MemoryMetadata, compares, operations):
        if any("/objects/0" in o.key for o in operations):
            compares = [c for c in compares if not c.key.endswith("/cur")]
        return real(self, compares, operations)

    patch.setattr(MemoryMetadata, "transact", transact)


def a_successors_objects_are_taken_for_ones_own(patch: pytest.MonkeyPatch) -> None:
    """An owner that was fenced believes that a pipeline has uploaded for it."""

    def resync(self: OwnedTopic) -> None:
        self._current_revision = self._read_current()
        self.first, self.last = self.catalog.first(), self.catalog.last()

    patch.setattr(OwnedTopic, "_resync", resync)


# -- the clock ------------------------------------------------------------------------------


def age_is_told_by_producers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ObjectDescriptor, "arrived_ms", property(lambda self: self.publish_time_max))


def a_step_of_the_clock_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClockGuard, "check", lambda self: None)


def a_step_while_nobody_runs_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeClock, "_load", lambda self: None)


def a_lease_lasts_while_the_machine_is_suspended(patch: pytest.MonkeyPatch) -> None:
    def is_valid(self: Membership | OwnedTopic) -> bool:
        return self.lease is not None and self._clock.monotonic() < self.lease.valid_until

    patch.setattr(Membership, "is_valid", property(is_valid))
    patch.setattr(OwnedTopic, "is_leased", property(is_valid))


def garbage_is_old_by_a_stepped_clock(patch: pytest.MonkeyPatch) -> None:
    """Trim and expiry look at the clock, and garbage collection does not."""
    real = Retention.collect_orphans

    def collect(self: Retention) -> list[str]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(NodeClock, "check", lambda self: None)
            return real(self)

    patch.setattr(Retention, "collect_orphans", collect)


def times_of_a_clock_that_was_behind_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClockGuard, "correct", lambda self, time_ms: time_ms)


def a_claim_needs_no_proof(patch: pytest.MonkeyPatch) -> None:
    """A lease that has ended is taken for the end of what its owner knew."""
    patch.setattr(TopicRecord, "is_whole", lambda self, tiered: True)


def a_claim_believes_the_mark_of_an_older_owner(patch: pytest.MonkeyPatch) -> None:
    """The mark stays in the record over a claim, and counts there."""

    def is_whole(self: TopicRecord, tiered: int) -> bool:
        return self.ack is AckLevel.TIERED or (
            self.acked_end is not None and self.acked_end <= tiered
        )

    real = _Claimant.next_record

    def next_record(self: _Claimant, view, seen):
        record = real(self, view, seen)
        if view.known is None or not view.known.is_open:
            return record
        return replace(record, acked_end=view.known.acked_end)

    patch.setattr(TopicRecord, "is_whole", is_whole)
    patch.setattr(_Claimant, "next_record", next_record)


def a_take_over_forgets_the_cursors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ister.topic.opening, "clip_progress", lambda *_, **__: [])


def readers_see_what_is_not_tiered(patch: pytest.MonkeyPatch) -> None:
    """As before topics with the level `tiered` could move by themselves."""

    def visible(self: Levels) -> int:
        return self.watermark(self.local_level)

    patch.setattr(Levels, "visible", property(visible))


def a_mark_outlives_the_next_append(patch: pytest.MonkeyPatch) -> None:
    """Appends go on at once, and the mark is left to be removed some time later."""

    def clear(self: IdleMark) -> None:
        self.is_set = False
        self._wal.gate.unhold("idle")

    patch.setattr(IdleMark, "clear", clear)


def a_mark_does_not_look_at_what_was_accepted(patch: pytest.MonkeyPatch) -> None:
    def set_mark(self: IdleMark) -> bool:
        if not self.is_set:
            self.is_set = True
            self._owned.set_acked_end(self._wal.tiered)
        return True

    patch.setattr(IdleMark, "set", set_mark)


# The two have tests of their own.
BY_WORLDS = plants_of(
    __name__, but=(garbage_collection_asks_nobody, a_commit_does_not_look_at_the_pointer)
)


# Many worlds pass before one comes by these.
RARE: list[Plant] = [
    age_is_told_by_producers,
    garbage_is_old_by_a_stepped_clock,
    a_successors_objects_are_taken_for_ones_own,
    the_checkpoint_is_trusted_over_the_catalog,
]


@pytest.mark.sim
@pytest.mark.parametrize(
    "plant",
    [nightly(plant) if plant in RARE else plant for plant in BY_WORLDS],
    ids=lambda plant: plant.__name__,
)
def test_worlds_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(
        "tier",
        plant,
        monkeypatch,
        lambda seed: run_seed(seed, turns=TURNS, shares=False),
        SEEDS_MAX,
    )


@pytest.mark.sim
def test_tier_worlds_catch_a_merge_without_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """One world in two thousand comes by this, so the way there is written down."""
    commit_behind_a_merge()
    a_commit_does_not_look_at_the_pointer(monkeypatch)
    with pytest.raises(BrokenPromiseError):
        commit_behind_a_merge()


def commit_behind_a_merge() -> None:
    """A pipeline commits for an owner and merges the newest; then the owner commits what it knew.

    Raises:
        BrokenPromiseError: Two descriptors have the same offsets.
    """
    cluster = Cluster()
    owner = cluster.claim("a")
    owner.commit(a_descriptor(0, 3, epoch=owner.epoch))
    job = Pipeline(cluster).acting()
    job.commit(a_descriptor(3, 5, epoch=owner.epoch))
    found = list(cluster.catalog().descriptors())
    assert job.swap(found, a_descriptor(0, 5, object_id="data-0-4-c01234567.dnb1"), until=2**40)
    with suppress(ConflictError):
        owner.commit(a_descriptor(3, 7, epoch=owner.epoch))
    ranges = [(described.start, described.end) for described, _ in cluster.catalog().descriptors()]
    if any(before[1] != after[0] for before, after in pairwise(ranges)):
        raise BrokenPromiseError(f"descriptors: {ranges}")


@pytest.mark.sim
def test_a_late_collection_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage_collection_asks_nobody(monkeypatch)
    number = find_break(range(1, 100), collect_late)
    print(f"garbage_collection_asks_nobody: caught at operation {number}")
    assert number is not None
