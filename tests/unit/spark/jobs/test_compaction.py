"""The half of compaction on the driver: plans, swaps, refusals, collection; tasks run here."""

import os
from dataclasses import replace

import pyarrow as pa
import pytest

import ister
from ister.base import failpoints
from ister.base.model import StreamMessage
from ister.bucket.ownership import OwnedTopic
from ister.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.format.descriptor import encode_descriptor
from ister.format.records import WriterRecord, encode_writer
from ister.metadata.base import Delete, Put
from ister.spark.jobs.compact_job import CompactSettings
from ister.topic.dedup import SequencedTopic, sequenced_producer_id
from tests.integration.spark_topics import (
    PUBLISHED_MS,
    expire_before,
    rows_of,
    without_spark,
)
from tests.support.builders import flip_byte
from tests.support.cases import case
from tests.support.spark_stage import A, Stage, upload

B = "/default/b"


@pytest.fixture
def stage(tmp_path):
    with without_spark():
        yield Stage(tmp_path)


def topic_of(report, name=A):
    return report.topics[name]


# -- what it does -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dnb1", "parquet"])
def test_topic_has_the_same_rows_in_fewer_objects(stage, kind):
    rows = stage.fill(A, 6)
    before = stage.descriptors()
    report = stage.compact(format=kind)
    assert report.ok
    assert stage.rows() == rows
    [merged] = stage.descriptors()
    assert (merged.start, merged.end, merged.messages, merged.format) == (0, 240, 240, kind)
    assert merged.kept == ""
    assert topic_of(report) == {
        "topic": A,
        "objects": 6,
        "merged": 1,
        "bytes": sum(described.size_bytes for described in before),
        "new_bytes": merged.size_bytes,
    }


def test_more_objects_than_a_transaction_takes_are_merged_in_one_run(stage):
    rows = stage.fill(A, 140, each=1)
    report = stage.compact()
    assert len(stage.ids()) == 1
    assert stage.rows() == rows
    assert topic_of(report)["merged"] == 3  # a hundred, forty, and both of them


def test_merged_object_is_as_old_as_its_newest_part(stage):
    """Goal: merging does not keep messages for longer than retention would."""
    with stage.place.open() as log:
        topic = log.topic(A, create=True)
        upload(topic, 4)
        for number, (described, revision) in enumerate(topic.bucket.owned.catalog.descriptors()):
            aged = replace(described, created_at=1_700_000_000 + number)
            assert topic.bucket.owned.replace(described, aged, revision)
    stage.compact()
    assert [described.created_at for described in stage.descriptors()] == [1_700_000_003]


@pytest.mark.parametrize("counted_from", [0, 40, 60, 120])
def test_messages_that_may_be_rows_of_an_open_batch_stay(stage, counted_from):
    """Goal: the rows of a batch that is not done are counted in the log, and so not removed."""
    with stage.place.open() as log:
        topic = log.topic(A, create=True)
        for _ in range(3):
            for _ in range(40):
                topic.append(b"x", routing_key="k")
            topic.upload()
        owned = topic.bucket.owned
        record = WriterRecord(
            batch=7,
            is_done=False,
            start=0,
            end=counted_from,
            rows=9,
            manifest="m",
            epoch=1,
            incarnation=owned.record.incarnation,
            updated_at=0,
        )
        key = owned.catalog.keys.writer("query")
        owned.catalog.store.put(key, encode_writer(record))
    report = stage.compact(format="parquet", keep="latest-per-key", min_objects=100)
    whole = counted_from // 40
    assert len(stage.rows()) == (1 if whole == 3 else 120 - whole * 40)
    said = topic_of(report).get("waits", "")
    assert ("batch 7 of the writer query" in said) == (counted_from < 120)
    with stage.place.open() as log:
        owned = log.topic(A).bucket.owned
        owned.catalog.store.put(key, encode_writer(replace(record, is_done=True)))
    stage.compact(format="parquet", keep="latest-per-key", min_objects=100)
    assert len(stage.rows()) == 1


def test_sequences_of_producers_outlive_compaction(stage):
    """Goal: what a producer sends again is known, although newer values have replaced it.

    `p` sends five messages, of which the last two are not answered, `q` one; other messages
    with the same keys come after them. Then the topic has another owner, without local files.
    """
    with stage.place.open() as log:
        topic = log.topic(A, create=True)
        sequenced = SequencedTopic(topic)

        def send(producer, sequence, *, epoch=0):
            message = StreamMessage(payload=b"%d" % sequence, routing_key="k")
            return sequenced.append_record(
                message, producer=producer, epoch=epoch, sequence=sequence
            )

        sent = {("p", number): send("p", number) for number in range(3)}
        sent["q", 0] = send("q", 0)
        sent |= {("p", number): send("p", number) for number in (3, 4)}
        send("r", 0, epoch=1)
        for number in range(5):
            # A row of a batch, whose id is any number, also one like a producer's.
            identity = sequenced_producer_id("other", 0) if number == 0 else (1 << 64) - 1
            row = pa.record_batch({"payload": [b"newer"], "routing_key": ["k"]})
            topic.append_arrow(row, producer_id=identity)
        topic.upload()
        topic.append(b"other", routing_key="other")
        log.seal(A)
    report = stage.compact(format="parquet", keep="latest-per-key", min_objects=100)
    assert topic_of(report)["removed_messages"] == 8
    assert len(stage.rows()) == 5
    with stage.place.open() as log:
        sequenced = SequencedTopic(log.topic(A))
        for number in (4, 3, 2, 0):
            assert send("p", number) == sent["p", number]
        assert send("q", 0) == sent["q", 0]
        with pytest.raises(ConflictError, match="replaced"):
            send("r", 0)
        with pytest.raises(ConflictError, match="left out"):
            send("p", 6)
        assert send("p", 5) == send("p", 5) == 13


def test_dry_run_says_what_would_be_done_and_changes_nothing(stage):
    stage.fill(A, 6)
    stage.fill(B, 1)
    size = sum(described.size_bytes for described in stage.descriptors())
    before = stage.everything()
    report = stage.compact(dry_run=True)
    assert stage.everything() == before
    assert report.as_json()["topics"] == [
        {"topic": A, "objects": 6, "merged": 1, "bytes": size},
        {"topic": B, "objects": 0, "merged": 0, "bytes": 0},
    ]


def test_tombstone_never_goes_before_what_it_stands_for(stage, monkeypatch):
    """Goal: a value does not come back because a swap of an earlier group was refused."""
    with stage.place.open() as log:
        topic = log.topic(A, create=True)
        for payload in (b"value", b"other", b""):
            for number in range(10):
                topic.append(payload, routing_key=f"{number}", publish_time=PUBLISHED_MS)
            topic.flush()
            topic.upload()
        rows = rows_of(topic)
    original, refused = OwnedTopic.swap, []

    def swap(self, old, new, **arguments):
        if new.start == 10 and not refused:
            refused.append(new)
            return False
        return original(self, old, new, **arguments)

    monkeypatch.setattr(OwnedTopic, "swap", swap)
    settings = {"format": "parquet", "keep": "latest-per-key", "min_objects": 50}
    report = stage.compact(**settings)
    # The first group lost its values, the second was refused: the third keeps its tombstones.
    assert stage.rows() == rows[10:]
    assert (report.ok, topic_of(report)["skipped"]) == (True, 2)
    assert stage.compact(**settings).total("removed_messages") == 20
    assert stage.rows() == []
    assert [(d.end, d.messages) for d in stage.descriptors()][-1] == (30, 0)


# -- beside others ------------------------------------------------------------------------------


def test_swap_is_refused_when_an_object_has_expired_meanwhile(stage):
    with stage.place.open() as log:
        topic = log.topic(A, create=True)
        upload(topic, 6)
        topic.bucket.retention.trim()
        rows = rows_of(topic)

        def expire():
            failpoints.disarm()
            expire_before(log, topic, 80)

        failpoints.arm("pipeline.before_commit", expire)
        report = stage.compact()
        assert report.ok
        assert topic_of(report)["skipped"] == 1
        # Planned again, with what is left.
        assert [(d.start, d.end) for d in stage.descriptors()] == [(80, 240)]
        assert rows_of(topic) == rows[80:]
        assert topic.earliest == 80
    # What was merged in vain is gone.
    assert [name for name in stage.stored() if "-c" in name] == stage.ids()


def test_group_whose_objects_are_gone_is_planned_again(stage):
    """Goal: expiry that comes while a task reads is not a failure."""
    with stage.place.open() as log:
        topic = log.topic(A, create=True)
        upload(topic, 6)
        topic.bucket.retention.trim()

        def expire():
            failpoints.disarm()
            expire_before(log, topic, 80)

        failpoints.arm("pipeline.after_plan", expire)
        report = stage.compact()
    assert report.ok
    assert topic_of(report)["skipped"] == 1
    assert [(d.start, d.end) for d in stage.descriptors()] == [(80, 240)]


def test_two_runs_at_once_merge_everything_once(stage):
    rows = stage.fill(A, 6)

    def other():
        failpoints.disarm()
        assert stage.compact(format="dnb1").total("merged") == 1

    failpoints.arm("pipeline.before_commit", other)
    report = stage.compact(format="dnb1")
    assert report.ok
    assert (topic_of(report)["merged"], topic_of(report)["skipped"]) == (0, 1)
    assert stage.rows() == rows
    assert [name for name in stage.stored() if "-c" in name] == stage.ids()


def test_objects_that_share_offsets_are_left_alone(stage):
    """Goal: a topic that needs repair is not made worse, and loses no message for good."""
    stage.fill(A, 4)
    first = stage.descriptors()[0]
    with stage.place.open() as log:
        owned = log.topic(A).bucket.owned
        wider = replace(first, end=first.end + 1)
        key = owned.catalog.keys.descriptor(first.start)
        owned.transact([], [Put(key, encode_descriptor(wider))])
    report = stage.compact(format="parquet", keep="latest-per-key")
    assert [error["code"] for error in report.errors] == [CorruptDataError.code]
    assert "scrub" in report.errors[0]["hint"]
    assert stage.compact().ok
    assert [(d.start, d.end) for d in stage.descriptors()] == [(0, 41), (40, 80), (80, 160)]


def test_topic_that_changes_hands_is_planned_again(stage):
    rows = stage.fill(A, 4)

    def take():
        failpoints.disarm()
        with stage.place.open() as log:
            log.topic(A)

    failpoints.arm("pipeline.before_commit", take)
    report = stage.compact()
    assert report.ok
    assert topic_of(report)["skipped"] == 1
    [merged] = stage.descriptors()
    assert merged.epoch == 2
    assert stage.rows() == rows


def test_job_without_its_lease_changes_nothing(stage):
    stage.fill(A, 4)
    before = stage.descriptors()

    def lose():
        with ister.open_bucket(stage.place.config) as history:
            keys = [i.key for i in history.metadata.range("/danube/pipeline/jobs/")]
        assert keys
        with stage.place.open() as log:
            log.stores.metadata.transact([], [Delete(key) for key in keys])

    failpoints.arm("pipeline.before_commit", lose)
    with pytest.raises(ister.IsterError, match="lease"):
        stage.compact()
    assert stage.descriptors() == before


def test_merged_object_that_is_gone_is_not_committed(stage):
    rows = stage.fill(A, 4)
    before = stage.ids()

    def remove():
        for object_id in stage.stored():
            if "-c" in object_id:
                stage.path(object_id).unlink()

    failpoints.arm("pipeline.before_commit", remove)
    report = stage.compact()
    assert [error["code"] for error in report.errors] == [NotFoundError.code]
    assert stage.ids() == before
    assert stage.rows() == rows


def test_merged_object_that_waited_too_long_is_not_committed(tmp_path):
    """Goal: what somebody may collect at any moment never becomes part of a topic."""
    with without_spark():
        stage = Stage(tmp_path, cloud={"orphan_grace_minutes": 60})
        stage.fill(A, 4)
        before = stage.ids()

        def grow_old():
            for object_id in stage.stored():
                if "-c" in object_id:
                    path = stage.path(object_id)
                    long_ago = path.stat().st_mtime - 45 * 60
                    os.utime(path, (long_ago, long_ago))

        failpoints.arm("pipeline.before_commit", grow_old)
        report = stage.compact()
        assert "orphan_grace_minutes" in report.errors[0]["hint"]
        assert (stage.ids(), stage.stored()) == (before, sorted(before))


# -- failures -----------------------------------------------------------------------------------


def test_damaged_topic_fails_alone_and_stays_as_it_was(stage):
    stage.fill(A, 4)
    rows = stage.fill(B, 4)
    ids = stage.ids(A)
    flip_byte(stage.path(ids[2]), 100)
    report = stage.compact()
    assert not report.ok
    assert [(e["code"], e["topic"]) for e in report.errors] == [(CorruptDataError.code, A)]
    assert (stage.ids(A), sorted(stage.stored(A))) == (ids, sorted(ids))
    assert len(stage.ids(B)) == 1
    assert stage.rows(B) == rows


def test_topic_that_cannot_be_searched_for_its_keys_stays_as_it_was(stage):
    stage.fill(A, 4)
    ids = stage.ids(A)
    flip_byte(stage.path(ids[2]), 100)
    report = stage.compact(format="parquet", keep="latest-per-key")
    assert [(e["code"], e["topic"]) for e in report.errors] == [(CorruptDataError.code, A)]
    assert (stage.ids(A), stage.stored(A)) == (ids, sorted(ids))


def test_commit_whose_outcome_is_unknown_leaves_the_merged_object(stage, monkeypatch):
    stage.fill(A, 4)

    def swap(self, old, new, **arguments):
        raise UnavailableError("no answer")

    monkeypatch.setattr(OwnedTopic, "swap", swap)
    report = stage.compact()
    assert [error["code"] for error in report.errors] == [UnavailableError.code]
    assert len(stage.stored()) == 5


def test_object_that_a_lost_answer_has_committed_is_not_removed(stage, monkeypatch):
    rows = stage.fill(A, 4)
    original = OwnedTopic.swap

    def swap(self, old, new, **arguments):
        assert original(self, old, new, **arguments)
        return False

    monkeypatch.setattr(OwnedTopic, "swap", swap)
    stage.compact()
    assert set(stage.ids()) <= set(stage.stored())
    assert stage.rows() == rows


def test_settings_that_make_no_sense_are_refused():
    for wrong in [
        {"format": "csv"},
        {"keep": "some"},
        {"keep": "latest-per-key"},
        {"target_mb": 0},
        {"target_mb": 4096},
        {"min_objects": 0},
        {"min_objects": 101},
        {"grace_minutes": -1},
        {"tombstone_hours": -1},
        {"zstd_level": 0},
        {"zstd_level": 23},
    ]:
        with case(wrong), pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            CompactSettings(**wrong)
