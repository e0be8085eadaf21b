"""`gc` with tasks in this process: what goes, what stays, who else is at it, and crashes.

What has to be there is checked without the code of the job: the descriptors are read as JSON from
the metadata store, and each has to have its file with its size.
"""

import os

import pytest

from ister.base import failpoints
from ister.base.model import TopicName
from ister.bucket.names import (
    TopicKeys,
    shared_staging_prefix,
    staging_prefix,
)
from ister.bucket.pipeline import PipelineKeys
from ister.bucket.trust import TRUST_PREFIX
from ister.errors import ConflictError, IsterError
from ister.format.staged_file import StagedSegment, encode_footer
from ister.spark.jobs.job import open_job
from tests.integration.spark_topics import without_spark
from tests.support.cases import case
from tests.support.spark_here import killed_at
from tests.support.spark_stage import SPARK, A, Stage

B = "/default/b"
KEYS = PipelineKeys("/danube")
HOUR = 3600


@pytest.fixture(autouse=True)
def _clean():
    with without_spark():
        yield
    failpoints.disarm()


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def age(path, seconds):
    found = path.stat()
    os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


# -- orphans ------------------------------------------------------------------------------------


def test_objects_that_were_merged_go_and_the_topic_stays(stage):
    stage.merge(A)
    stage.merge(B)
    rows = stage.rows()
    report = stage.gc()
    assert report.ok, report.errors
    assert report.job == "gc"
    for name in (A, B):
        assert report.topics[name]["orphans"] == 4
        assert stage.stored(name) == stage.named(name)
    assert stage.rows() == rows
    again = stage.gc()
    assert again.ok
    assert again.topics[A] == {"topic": A, "objects": 1, "expired": 0, "orphans": 0, "staged": 0}


def test_dry_run_tells_the_same_and_changes_nothing(stage):
    stage.merge()
    before = stage.everything()
    told = stage.gc(dry_run=True)
    assert stage.everything() == before
    done = stage.gc()
    assert told.topics == done.topics
    assert (told.dry_run, told.topics[A]["orphans"]) == (True, 4)


def test_replaced_objects_stay_for_an_hour_whatever_the_grace(stage):
    """Readers may have planned to read them."""
    stage.fill()
    stage.compact(grace_minutes=0)
    stage.clock.advance(HOUR - 60)
    assert stage.gc_at().topics[A]["orphans"] == 0
    stage.clock.advance(120)
    assert stage.gc_at().topics[A]["orphans"] == 4


def test_nothing_goes_while_the_metadata_store_is_distrusted(stage):
    """Goal: after a rollback, what the catalog does not name may be the only copy."""
    stage.merge()
    with stage.metadata() as store:
        seen = f"{TRUST_PREFIX}{store.get('/danube/cluster/store').value.decode()}.json"
    before = stage.stored()
    (stage.place.root / "objects" / seen).write_text('{"revision": 1000000}')
    report = stage.gc()
    assert [error["code"] for error in report.errors] == [ConflictError.code]
    assert stage.stored() == before


def test_young_objects_stay_while_other_jobs_run(stage):
    stage.merge()
    with open_job("compact", SPARK, stage.place.config):
        assert stage.gc().topics[A]["orphans"] == 0
        assert len(stage.stored()) == 5
    assert stage.gc().topics[A]["orphans"] == 4


# -- retention ----------------------------------------------------------------------------------


def test_objects_expire_by_age(tmp_path):
    stage = Stage(tmp_path, cloud={"retention": {"time_minutes": 60}})
    stage.fill()
    rows = stage.rows()
    assert stage.gc_at().topics[A]["expired"] == 0
    stage.clock.advance(2 * HOUR)
    told = stage.gc_at(dry_run=True)
    assert told.topics[A]["expired"] == 3
    assert stage.rows() == rows
    report = stage.gc_at()
    assert report.ok, report.errors
    assert report.topics[A]["expired"] == 3
    # The newest one always stays: it shows where the topic ends.
    assert stage.stored() == stage.named()
    assert len(stage.named()) == 1
    assert stage.rows() == rows[120:]
    with stage.place.open() as log:
        assert log.topic(A).next_offset == 160


def test_clock_that_is_not_trusted_deletes_nothing_by_age(tmp_path):
    stage = Stage(tmp_path, cloud={"retention": {"time_minutes": 60}})
    stage.merge(B)
    stage.fill(A)
    stage.clock.advance(1)
    before = {name: stage.stored(name) for name in (A, B)}
    with case("the first run has nothing to compare with"):
        assert stage.gc_at(dry_run=True).ok
        with stage.metadata() as store:
            assert store.get(KEYS.clock) is None
    # What the first run collects is young by its clock.
    stage.clock.jump_wall(-3 * HOUR * 1000)
    assert stage.gc_at().ok
    assert {name: stage.stored(name) for name in (A, B)} == before
    stage.clock.jump_wall(6 * HOUR * 1000)
    for _ in range(2):
        report = stage.gc_at()
        assert [error["code"] for error in report.errors] == ["UNAVAILABLE"]
        assert "--confirm-clock" in report.errors[0]["hint"]
        assert {name: stage.stored(name) for name in (A, B)} == before
        assert "stale_uploads" not in report.more
    report = stage.gc_at(confirm_clock=True)
    assert report.ok
    assert report.topics[A]["expired"] == 3
    assert report.topics[B]["orphans"] == 4
    assert stage.gc_at().ok


def test_staged_files_and_unfinished_uploads_go(stage):
    stage.fill()
    objects = stage.place.root / "objects"
    staged = objects / staging_prefix(TopicName.parse(A), "job-1", 0) / "rows.arrow"
    part = objects / ".tmp" / "left"
    for path in (staged, part):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        age(path, 2 * HOUR)
    told = stage.gc(dry_run=True)
    assert (told.topics[A]["staged"], "stale_uploads" in told.more) == (1, False)
    assert staged.exists()
    assert part.exists()
    report = stage.gc()
    assert (report.topics[A]["staged"], report.more["stale_uploads"]) == (1, 1)
    assert not staged.exists()
    assert not part.exists()


# -- staged files, unfinished uploads, express objects ---------------------------------------------


def test_staged_files_that_topics_share_go(stage):
    stage.fill()
    segments = [StagedSegment(A, 0, 4, 1), StagedSegment(B, 4, 4, 1)]
    shared = stage.place.root / "objects" / shared_staging_prefix("query", 0) / "x.rows"
    shared.parent.mkdir(parents=True)
    shared.write_bytes(b"rowsrows" + encode_footer(segments, 8))
    age(shared, 2 * HOUR)
    assert stage.gc(dry_run=True).more["shared_staged_files"] == 1
    assert "shared_staged_files" not in stage.gc(topics="*").more, "topics were named"
    assert shared.exists()
    assert stage.gc().more["shared_staged_files"] == 1
    assert not shared.exists()


def test_express_objects_that_no_topic_needs_go(tmp_path):
    stage = Stage(tmp_path, ack="tiered", uploader={"engine": "embedded"})
    with stage.place.open() as log:
        for name in (A, B):
            topic = log.topic(name, create=True)
            topic.wait(topic.append(b"x"), "tiered")
    shared = stage.place.root / "objects" / "storage" / "express"
    before = sorted(path for path in shared.rglob("*") if path.is_file())
    assert before
    report = stage.gc()
    assert report.ok, report.errors
    assert report.more["express_objects"] == 0
    assert sorted(path for path in shared.rglob("*") if path.is_file()) == before
    with stage.place.open() as log:
        for name in (A, B):
            log.delete(name)
    told = stage.gc(dry_run=True)
    assert told.more["express_objects"] == len(before)
    assert all(path.exists() for path in before)
    assert stage.gc(topics="*").more.get("express_objects") is None, "topics were named"
    assert stage.gc().more["express_objects"] == len(before)
    assert not [path for path in shared.rglob("*") if path.is_file()]


# -- others -------------------------------------------------------------------------------------


def test_topic_that_a_process_has_open_is_left_to_it(stage):
    stage.merge(A)
    stage.merge(B)
    with stage.place.open() as log:
        topic = log.topic(A)
        report = stage.gc()
        assert report.more["open_topics"] == 1
        assert list(report.topics) == [B]
        assert len(stage.stored(A)) == 5
        assert len(topic.bucket.retention.collect_orphans()) == 4
    assert stage.stored(B) == stage.named(B)


@pytest.mark.parametrize(
    "point", ["pipeline.after_plan", "pipeline.before_commit", "tier.after_delete_object"]
)
def test_topic_that_is_opened_in_the_middle_is_left_alone(tmp_path, point):
    stage = Stage(tmp_path)
    stage.merge()
    rows = stage.rows()
    logs = []

    def open_it():
        if not logs:
            logs.append(stage.place.open())
            logs[0].topic(A)

    failpoints.arm(point, open_it)
    try:
        report = stage.gc()
        failpoints.disarm()
        assert report.ok, report.errors
        assert "opened the topic" in report.topics[A]["skipped"]
        gone = 1 if point == "tier.after_delete_object" else 0
        assert len(stage.stored()) == 5 - gone
        assert len(logs[0].topic(A).bucket.retention.collect_orphans()) == 4 - gone
    finally:
        for log in logs:
            log.close()
    assert stage.stored() == stage.named()
    assert stage.rows() == rows


def test_one_runs_at_a_time(stage):
    stage.merge()
    with open_job("gc", SPARK, stage.place.config, exclusive=lambda keys: keys.gc):
        with pytest.raises(ConflictError, match="another gc job is running"):
            stage.gc()
        assert stage.gc(dry_run=True).topics[A]["orphans"] == 4
    assert len(stage.stored()) == 5


def test_lease_that_is_lost_ends_the_job(stage):
    stage.merge()

    def lose():
        with stage.metadata() as store:
            store.delete(KEYS.gc)

    failpoints.arm("pipeline.before_commit", lose)
    with pytest.raises(IsterError, match="lease"):
        stage.gc()
    assert len(stage.stored()) == 5


def test_topic_that_cannot_be_examined_is_an_error_and_others_go_on(stage):
    stage.merge(A)
    stage.merge(B)
    keys = TopicKeys("/danube", TopicName.parse(A))
    with stage.metadata() as store:
        value = store.get(keys.descriptor(0)).value
        store.put(keys.descriptor(0), b"?")
    report = stage.gc()
    assert not report.ok
    assert [error["topic"] for error in report.errors] == [A]
    assert len(stage.stored(A)) == 5
    assert report.topics[B]["orphans"] == 4
    with stage.metadata() as store:
        store.put(keys.descriptor(0), value)
        record = store.get(keys.record).value
        store.put(keys.record, b"?")
    report = stage.gc()
    assert [error["topic"] for error in report.errors] == [A]
    with stage.metadata() as store:
        store.put(keys.record, record)
    assert stage.gc().topics[A]["orphans"] == 4


# -- crashes ------------------------------------------------------------------------------------


STEPS = {
    "pipeline.after_lease": 1,
    "pipeline.after_plan": 1,
    "pipeline.before_commit": 2,
    "tier.after_expire": 2,
    "tier.after_delete_object": 10,
    "pipeline.after_commit": 2,
    "pipeline.before_report": 1,
}


@pytest.mark.parametrize(
    ("point", "visit"),
    [(point, visit) for point, most in STEPS.items() for visit in {1, most}],
)
def test_killed_anywhere_nothing_live_is_gone_and_the_next_run_completes_it(tmp_path, point, visit):
    stage = Stage(tmp_path, cloud={"retention": {"time_minutes": 60}})
    for name in (A, B):
        stage.merge(name)
        stage.fill(name, uploads=2)
    rows = {name: stage.rows(name) for name in (A, B)}
    stage.clock.advance(2 * HOUR)
    with killed_at(point, visit):
        stage.gc_at()
    for name in (A, B):
        assert set(stage.named(name)) <= set(stage.stored(name))
        left = stage.rows(name)
        assert left == rows[name][-len(left) :]
        assert len(left) >= 40, "the newest object stays"
    report = stage.gc_at()
    assert report.ok, report.errors
    for name in (A, B):
        assert stage.stored(name) == stage.named(name)
        assert stage.rows(name) == rows[name][-40:]
