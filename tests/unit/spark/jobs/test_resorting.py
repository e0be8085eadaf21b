"""Express runs on the pipeline's side: what `compact`, `resort` and `scrub` make of them."""

from dataclasses import replace

import pytest

import ister
from ister.base.clock import SystemClock
from ister.bucket.names import EXPRESS_PREFIX
from ister.config import load_config
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES
from ister.spark.jobs.compact_job import compact, resort_topics
from ister.spark.jobs.job import open_job
from ister.spark.jobs.scrubbing import scrub
from ister.spark.jobs.service import scheduled_jobs
from tests.integration.spark_topics import (
    EXPRESS,
    SparkPlace,
    fill,
    fill_runs,
    objects_of,
    rows_in,
    rows_of,
    without_spark,
)
from tests.support.scrub_faults import Patient
from tests.support.spark_here import SparkHere, killed_at

A = "/default/a"
RESORT_SECONDS = EXPRESS["express"]["resort_seconds"]


class Later(SystemClock):
    """A clock on which runs are old enough."""

    def now_ns(self):
        return super().now_ns() + RESORT_SECONDS * 1_000_000_000


@pytest.fixture
def place(tmp_path):
    with without_spark():
        yield SparkPlace(tmp_path / "data", uploader=EXPRESS)


@pytest.fixture
def log(place):
    with place.open() as log:
        yield log


@pytest.fixture
def topic(log):
    """A topic with four runs at least."""
    topic = log.topic(A, create=True, ack="tiered")
    fill_runs(topic, 1, 30, 2, 7)
    return topic


def history_rows(place):
    """What the bucket has of the topic."""
    with ister.open_bucket(place.config) as history:
        return rows_in(history.topic(A).read_arrow().read_all())


def formats(topic):
    return {described.format for described in objects_of(topic)}


# -- compact ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dnb1", "parquet"])
def test_compact_leaves_no_runs(place, topic, kind):
    rows, runs = rows_of(topic), objects_of(topic)
    assert formats(topic) == {FORMAT_EXPRESS}
    report = compact(SparkHere(), place.config, format=kind)
    assert report.ok, report.errors
    [made] = objects_of(topic)
    assert (made.start, made.end, made.format) == (0, 40, kind)
    assert made.arrived_ms == runs[-1].arrived_ms
    assert rows_of(topic) == rows == history_rows(place)
    assert compact(SparkHere(), place.config, format=kind).total("merged") == 0
    # Fewer than `min_objects`, and the newest: a run is worth it all the same.
    fill_runs(topic, 1, first=40)
    assert compact(SparkHere(), place.config, format=kind).total("merged") == 1
    assert FORMAT_EXPRESS not in formats(topic)
    assert rows_of(topic) == history_rows(place)


def test_runs_are_merged_with_small_objects_around_them(place, topic):
    fill(topic, 5, first=40)
    topic.wait(44, timeout=60)
    compact(SparkHere(), place.config)
    fill_runs(topic, 3, first=45)
    rows = rows_of(topic)
    assert compact(SparkHere(), place.config, min_objects=2).ok
    assert formats(topic) == {FORMAT_FRAMES}
    assert rows == history_rows(place)


@pytest.mark.parametrize(
    "name", ["compact.after_part", "compact.after_object", "tier.before_swap", "tier.after_swap"]
)
def test_compact_that_dies_leaves_a_topic_that_reads_the_same(place, topic, name):
    rows, runs = rows_of(topic), objects_of(topic)
    with killed_at(name):
        compact(SparkHere(), place.config)
    ranges = [(described.start, described.end) for described in objects_of(topic)]
    assert ranges in ([(0, 40)], [(run.start, run.end) for run in runs])
    assert rows_of(topic) == rows == history_rows(place)
    assert compact(SparkHere(), place.config).ok
    assert [(d.start, d.end, d.format) for d in objects_of(topic)] == [(0, 40, FORMAT_FRAMES)]
    assert rows_of(topic) == rows == history_rows(place)


# -- resort -------------------------------------------------------------------------------------


def resort(config, clock=None):
    """What `run` does now and then."""
    with open_job("resort", SparkHere(), config, clock=clock) as job:
        resort_topics(job)
    assert job.report.ok, job.report.errors
    return job.report


def test_resort_takes_what_is_due(place, log, topic):
    ordinary = log.topic("/default/ordinary", create=True)
    fill(ordinary, 5)
    ordinary.upload()
    rows, before = rows_of(topic), objects_of(topic)
    assert resort(place.config).total("merged") == 0
    assert objects_of(topic) == before
    report = resort(place.config, Later())
    assert list(report.topics) == [A]
    assert report.total("merged") == 1
    assert formats(topic) == {FORMAT_FRAMES}
    assert rows_of(topic) == rows == history_rows(place)
    assert resort(place.config, Later()).total("merged") == 0


def test_run_re_sorts_as_often_as_the_setting_says():
    def config(**uploader):
        return load_config({"storage": {"uploader": uploader, "wal": {"dir": "/x"}}}, {})

    job = scheduled_jobs(config(express={"resort_seconds": 77}))[0]
    assert (job.name, job.every_seconds) == ("resort", 77)
    assert "resort" not in {job.name for job in scheduled_jobs(config(engine="embedded"))}


# -- scrub and stats ----------------------------------------------------------------------------


@pytest.fixture
def patient(place):
    """The topic, closed, to have faults planted in it."""
    with place.open() as log:
        topic = log.topic(A, create=True, ack="tiered")
        fill_runs(topic, 1, 30, 2, 7)
    return Patient(place.config, place.root / "objects", A)


def express_file(place, run):
    """The file that a run's express object is."""
    return place.root / "objects" / EXPRESS_PREFIX / run.object_id.partition("@")[0]


def found_by(report):
    return sorted({finding["kind"] for finding in report.topics[A]["findings"]})


def test_scrub_finds_nothing_wrong_with_runs(place, patient):
    report = scrub(SparkHere(), place.config)
    assert report.ok, report.errors
    assert report.topics[A]["messages"] == 40
    assert compact(SparkHere(), place.config).ok
    report = scrub(SparkHere(), place.config)
    assert (report.ok, report.topics[A]["findings"]) == (True, [])


def harm(place, patient, how):
    run = patient.descriptors()[1]
    path = express_file(place, run)
    data = bytearray(path.read_bytes())
    position = int(run.object_id.partition("@")[2].partition("+")[0])
    if how == "lost":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: position + run.size_bytes // 2])
    else:
        data[position + run.size_bytes // 2] ^= 1
        path.write_bytes(data)
    return run


@pytest.mark.parametrize(
    ("how", "kind"), [("lost", "missing"), ("cut", "truncated"), ("flipped", "damaged")]
)
def test_bad_run_is_repaired_from_local_files_or_reported(place, patient, how, kind):
    rows = patient.rows()
    run = harm(place, patient, how)
    report = scrub(SparkHere(), place.elsewhere)
    assert not report.ok
    assert found_by(report) == [kind]
    assert not any(finding["repairable"] for finding in report.topics[A]["findings"])
    assert not scrub(SparkHere(), place.elsewhere, repair=True).ok
    assert scrub(SparkHere(), place.config, repair=True).ok
    [found] = [d for d in patient.descriptors() if d.start == run.start]
    assert (found.end, found.format, found.arrived_ms) == (run.end, FORMAT_FRAMES, run.arrived_ms)
    assert patient.rows() == rows
    assert scrub(SparkHere(), place.elsewhere).ok


def test_wrong_descriptor_of_a_run_is_corrected(place, patient):
    run = patient.descriptors()[1]
    patient.put(replace(run, offset_index=((run.start, 3),), publish_time_index=(0,)))
    report = scrub(SparkHere(), place.elsewhere, repair=True)
    assert report.ok, report.errors
    found = patient.descriptors()[1]
    assert replace(found, offset_index=(), publish_time_index=()) == replace(
        run, offset_index=(), publish_time_index=()
    )
    assert scrub(SparkHere(), place.elsewhere).ok


def test_forgotten_run_is_found_in_its_express_object(place, patient):
    rows = patient.rows()
    patient.forget(patient.descriptors()[1])
    assert scrub(SparkHere(), place.elsewhere, repair=True).ok
    assert patient.rows() == rows


def test_bad_object_is_restored_from_the_runs_that_it_replaced(place, patient):
    rows = patient.rows()
    assert compact(SparkHere(), place.config).ok
    [made] = patient.descriptors()
    patient.flip_bit(made, made.size_bytes // 2)
    assert scrub(SparkHere(), place.elsewhere, repair=True).ok
    assert patient.rows() == rows
    assert patient.descriptors()[0].arrived_ms == made.arrived_ms
