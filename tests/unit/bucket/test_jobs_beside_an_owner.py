"""What jobs beside an owner must not do to it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ister.base.model import AckLevel
from ister.bucket.merge import merge_objects
from ister.bucket.names import object_key
from ister.bucket.orphans import collect_orphans
from ister.errors import CorruptDataError
from ister.topic import bucket_link
from tests.support.cases import each
from tests.support.stores import (
    NAME,
    UPLOADS,
    Cluster,
    Frames,
    KeptMetadata,
    Pipeline,
    Site,
    read_all,
)

DAY = 24 * 3600


def merge(store, objects, acting, *, kind="dnb1", tag="00000001", survives=None):
    return merge_objects(
        NAME,
        objects,
        store=store,
        settings=UPLOADS,
        format=kind,
        epoch=acting.epoch,
        incarnation=acting.record.incarnation,
        tag=tag,
        created_at=1,
        survives=survives,
    )


def damage(store, key, position=50):
    data = bytearray(store.read(key, 0, 1 << 30))
    data[position] ^= 1
    store.put(key, bytes(data))


def collect(cluster, owned, *, has_jobs=False):
    return collect_orphans(
        owned,
        cluster.objects,
        grace_seconds=DAY,
        clock=cluster.clock,
        metrics=cluster.metrics,
        has_jobs=lambda: has_jobs,
    )


@each("is_known", [False, True], ids=["by its age", "by the job's key"])
def test_object_that_a_job_makes_again_is_not_taken_for_the_old_one(is_known):
    """A killed job's leftover is listed; then the next job makes it again, under the same name."""
    cluster = Cluster()
    frames = Frames([b"m%d" % number for number in range(20)])
    owner = cluster.filled(frames, 10)
    acting = cluster.outside(cluster.fence(ttl_seconds=1e9))
    maker = cluster.maker()
    incarnation = owner.record.incarnation
    maker.make(frames, 10, 20, epoch=1, incarnation=incarnation)
    cluster.clock.advance(DAY + 3600)
    made = []

    def again(kind, key):
        if kind == "list" and not made:
            made.append(maker.make(frames, 10, 20, epoch=1, incarnation=incarnation))

    cluster.objects.after = again
    removed = collect(cluster, owner, has_jobs=is_known)
    assert removed == []
    acting.commit(made[0])
    assert len(read_all(cluster.reader(), 10, 20)) == 10


def test_leftover_ahead_of_the_topic_stays_while_a_job_runs():
    cluster = Cluster()
    frames = Frames([b"m%d" % number for number in range(20)])
    owner = cluster.filled(frames, 10)
    maker = cluster.maker()
    left = maker.make(frames, 10, 20, epoch=1, incarnation=owner.record.incarnation)
    cluster.clock.advance(DAY + 3600)

    assert collect(cluster, owner, has_jobs=True) == []
    assert collect(cluster, owner, has_jobs=False) == [left.object_id]


@each("kind", ["dnb1", "parquet"])
def test_merged_object_is_read_back_before_it_replaces_anything(kind):
    cluster = Cluster()
    owner = cluster.filled(Frames([b"m%d" % number * 50 for number in range(20)]), 10, 20)
    objects = [described for described, _ in cluster.catalog().descriptors()]

    def flip(operation, key):
        if operation == "close" and "-c" in key:
            cluster.objects.after = lambda operation, key: None
            damage(cluster.objects, key, 100)

    cluster.objects.after = flip
    with pytest.raises(CorruptDataError, match="checksum"):
        merge(cluster.objects, objects, owner, kind=kind)


def a_trimmable_topic(site):
    settings = {"retention": {"time_minutes": 1}, "rotate_max_bytes": 4096}
    log = site.open("a", **settings)
    topic = log.topic(str(NAME), create=True)
    for part in range(3):
        for number in range(10):
            topic.append(b"m%d-%d" % (part, number) * 300)
        topic.wait(part * 10 + 9, AckLevel.SYNCED)
        topic.bucket.uploads.upload()
    site.clock.advance(3600)
    log.stores.membership.renew()
    return topic


def test_object_that_takes_the_place_of_others_during_a_trim_is_checked_too(monkeypatch):
    with Site() as site:
        topic = a_trimmable_topic(site)
        sent = [message.payload for message in topic.read(0)]
        acting = Pipeline(site).acting()
        old = list(site.catalog().descriptors(0, 20))
        made = merge(site.objects, [described for described, _ in old], acting)
        damage(site.objects, object_key(NAME, made.object_id))
        verify, swapped = bucket_link.verify_content, []

        def swap_and_verify(*arguments, **more):
            if not swapped:
                swapped.append(acting.swap(old, made, until=0))
            return verify(*arguments, **more)

        monkeypatch.setattr(bucket_link, "verify_content", swap_and_verify)
        assert topic.bucket.retention.trim() > 0
        assert swapped == [True]
        topic.bucket.retention.collect_orphans()
        reader = topic.bucket.history()
        assert len(read_all(reader, 0, topic.wal.trimmed)) == topic.wal.trimmed
        reader.close()
        assert [message.payload for message in topic.read(0)] == sent


def test_merged_object_that_the_catalog_is_too_old_for_is_kept():
    """An older copy of the metadata was put back: the merged object has more than it knows."""
    cluster = Cluster()
    frames = Frames([b"m%d" % number * 50 for number in range(40)])
    owner = cluster.filled(frames, 10, 20)
    backup = {found.key: found.value for found in cluster.metadata.range("/")}
    for end in (30, 40):
        cluster.uploader(owner).upload(frames, end - 10, end)
    acting = cluster.outside(cluster.fence(ttl_seconds=1e9))
    old = list(cluster.catalog().descriptors())
    made = merge(cluster.objects, [described for described, _ in old], owner)
    assert acting.swap(old, made, until=0)
    owner.refresh()
    cluster.clock.advance(10 * DAY)

    collect(cluster, owner)
    cluster.metadata = KeptMetadata(cluster.clock)
    for key, value in backup.items():
        if "owners" not in key:
            cluster.metadata.put(key, value)
    restored = cluster.claim("a")
    cluster.clock.advance(10 * DAY)
    collect(cluster, restored)
    assert cluster.objects.stat(cluster.key(made.object_id)).size == made.size_bytes


def test_repair_does_not_bring_back_what_compaction_left_out():
    with Site() as site:
        topic = a_trimmable_topic(site)
        acting = Pipeline(site).acting()
        old = list(site.catalog().descriptors(0, 10))
        made = merge(
            site.objects,
            [described for described, _ in old],
            acting,
            kind="parquet",
            survives=lambda batch: pa.array([n.as_py() != 5 for n in batch.column("offset")]),
        )
        assert acting.swap(old, made, until=0)
        damage(site.objects, object_key(NAME, made.object_id), 200)
        report = topic.bucket.repair_objects()
        assert report.objects == []
        assert report.bad == [(0, 10)]
        assert site.catalog().find(0) == made
        with pytest.raises(CorruptDataError):
            topic.bucket.retention.trim()
        assert topic.wal.trimmed == 0
