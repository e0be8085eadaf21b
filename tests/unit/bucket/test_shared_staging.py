"""Staged files with rows of several topics: removed when no topic needs them, and not before."""

import pytest

from ister.base.model import TopicName
from ister.bucket import shared_staging
from ister.bucket.names import TopicKeys, shared_staging_prefix, staging_prefix
from ister.bucket.orphans import JOB_PREFIX
from ister.bucket.shared_staging import StagedNeeds, collect_shared_staging
from ister.errors import CorruptDataError, UnavailableError
from ister.format.manifest import StagedFile, encode_manifest
from ister.format.records import WriterRecord, encode_writer
from ister.format.staged_file import FOOTER, StagedSegment, encode_footer
from tests.support.machine import eventually
from tests.support.stores import PREFIX

GRACE = 3600
WRITER = "query-1"
A, B = "/default/a", "/default/b"


def sweep(cluster, *, grace_seconds=GRACE, dry_run=False):
    return collect_shared_staging(
        cluster.objects,
        cluster.metadata,
        PREFIX,
        grace_seconds=grace_seconds,
        clock=cluster.clock,
        metrics=cluster.metrics,
        dry_run=dry_run,
    )


def put_file(cluster, name="x", *, topics=(A, B), writer=WRITER, batch=0):
    """A staged file with a few bytes for each topic; its key."""
    key = f"{shared_staging_prefix(writer, batch)}{name}.rows"
    segments = [StagedSegment(topic, 4 * at, 4, 1) for at, topic in enumerate(topics)]
    end = 4 * len(segments)
    cluster.objects.put(key, b"rows" * len(segments) + encode_footer(segments, end))
    return key


def begin(cluster, topic, key, *, writer=WRITER, batch=0, is_done=False):
    """A topic's batch as a crash leaves it."""
    name = TopicName.parse(topic)
    manifest = f"{staging_prefix(name, writer, batch)}manifest-1.json"
    files = [StagedFile(key=key, rows=1, size_bytes=4, position=0)]
    cluster.objects.put(manifest, encode_manifest(files))
    record = WriterRecord(
        batch=batch,
        is_done=is_done,
        start=0,
        end=1,
        rows=1,
        manifest=manifest,
        epoch=1,
        incarnation="i",
        updated_at=cluster.clock.now_ns() // 1_000_000_000,
    )
    cluster.metadata.put(TopicKeys(PREFIX, name).writer(writer), encode_writer(record))


def shared(cluster):
    return [key for key in map(str, cluster.objects.keys()) if "shared.files" in key]


def test_file_that_nobody_asked_for_goes_after_its_grace_period(cluster):
    key = put_file(cluster)
    cluster.clock.advance(GRACE)
    young = put_file(cluster, "young", batch=1)
    assert sweep(cluster) == []
    cluster.clock.advance(1)
    assert sweep(cluster, dry_run=True) == [key]
    assert shared(cluster) == sorted([key, young])
    assert sweep(cluster) == [key]
    assert shared(cluster) == [young]


def test_file_stays_while_another_one_of_its_batch_is_young(cluster):
    """Goal: the first task of a long write is not robbed before the last one is done."""
    keys = [put_file(cluster)]
    cluster.clock.advance(GRACE + 1)
    keys.append(put_file(cluster, "y"))
    assert sweep(cluster) == []
    cluster.clock.advance(GRACE + 1)
    assert sweep(cluster) == keys


def test_mark_keeps_the_files_of_its_batch_until_it_ends(cluster, monkeypatch):
    """Goal: a task that computes for hours before its first row counts as well."""
    monkeypatch.setattr(shared_staging, "_MARK_SECONDS", 0.001)
    key = put_file(cluster)
    mark = shared_staging.StagingMark(cluster.objects, WRITER, 0)
    mark.start()
    eventually(lambda: len(shared(cluster)) == 2)
    cluster.clock.advance(10 * GRACE)
    there = cluster.objects.stat(next(one for one in shared(cluster) if one != key))
    eventually(lambda: cluster.objects.stat(there.key).modified_at > there.modified_at)
    assert sweep(cluster) == []
    mark.end()
    assert shared(cluster) == [key]
    assert sweep(cluster) == [key]


def test_mark_that_a_killed_task_left_goes(cluster):
    key = f"{shared_staging_prefix(WRITER, 0)}x.alive"
    cluster.objects.put(key, b"")
    cluster.clock.advance(GRACE + 1)
    assert sweep(cluster) == [key]


def test_grace_period_of_none_is_an_hour(cluster):
    put_file(cluster)
    cluster.clock.advance(GRACE)
    assert sweep(cluster, grace_seconds=0) == []
    cluster.clock.advance(1)
    assert len(sweep(cluster, grace_seconds=0)) == 1


def test_file_stays_until_the_last_topic_is_done(cluster):
    key = put_file(cluster)
    begin(cluster, A, key, is_done=True)
    begin(cluster, B, key)
    cluster.clock.advance(1000 * GRACE)
    assert sweep(cluster) == []
    begin(cluster, B, key, is_done=True)
    assert sweep(cluster) == [key]


def test_file_of_an_earlier_attempt_goes_although_the_batch_is_begun(cluster):
    first, second = put_file(cluster, "first"), put_file(cluster, "second")
    begin(cluster, A, second)
    cluster.clock.advance(2 * GRACE)
    assert sweep(cluster) == [first]


def test_batch_of_another_writer_needs_nothing(cluster):
    key = put_file(cluster, writer="query-2")
    begin(cluster, A, put_file(cluster))
    cluster.clock.advance(2 * GRACE)
    assert sweep(cluster) == [key]


def test_job_that_died_in_its_commit_needs_its_file_for_a_while(cluster):
    """Goal: nobody asks again for a batch of a job, so that its file goes at last."""
    job = f"{JOB_PREFIX}1"
    key = put_file(cluster, writer=job)
    cluster.clock.advance(2 * GRACE)
    begin(cluster, A, key, writer=job)
    assert sweep(cluster) == []
    cluster.clock.advance(2 * GRACE)
    assert sweep(cluster) == [key]


def test_batch_without_its_manifest_needs_nothing(cluster):
    key = put_file(cluster)
    begin(cluster, A, key)
    cluster.objects.drop(f"{staging_prefix(TopicName.parse(A), WRITER, 0)}manifest-1.json")
    cluster.clock.advance(2 * GRACE)
    assert sweep(cluster) == [key]


@pytest.mark.parametrize("data", [b"", b"something else", FOOTER.encode(b"[]", 0)])
def test_file_that_cannot_be_read_stays_and_holds_up_no_other(cluster, data):
    broken = f"{shared_staging_prefix(WRITER, 0)}a.rows"
    cluster.objects.put(broken, data)
    key = put_file(cluster)
    cluster.clock.advance(2 * GRACE)
    assert sweep(cluster) == [key]
    assert shared(cluster) == [broken]


def test_record_that_cannot_be_read_keeps_the_file(cluster):
    key = put_file(cluster)
    cluster.metadata.put(TopicKeys(PREFIX, TopicName.parse(B)).writer(WRITER), b"{")
    cluster.clock.advance(2 * GRACE)
    assert sweep(cluster) == []
    assert shared(cluster) == [key]


def test_store_that_does_not_answer_removes_nothing(cluster, monkeypatch):
    put_file(cluster)
    cluster.clock.advance(2 * GRACE)

    def fail(*_):
        raise UnavailableError("no answer")

    monkeypatch.setattr(cluster.metadata, "get", fail)
    with pytest.raises(UnavailableError):
        sweep(cluster)
    assert len(shared(cluster)) == 1


def test_other_objects_are_refused(cluster):
    key = f"{staging_prefix(TopicName.parse(A), WRITER, 0)}x.rows"
    cluster.objects.put(key, b"x")
    with pytest.raises(CorruptDataError, match="topics share"):
        StagedNeeds(cluster.objects, cluster.metadata, PREFIX).has(cluster.objects.stat(key))
