"""`scrub` on Spark: planted faults are named, each and nothing else, and healed if they can be."""

import shutil

import pytest

from ister.format.frame import scan_frames
from ister.spark.jobs import scrub
from tests.integration.spark_topics import SparkPlace, fill, without_spark
from tests.support.scrub_faults import TOPIC, Patient, make_topic, named

OBJECTS = 50
EACH = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A topic of fifty objects, closed, with its local files."""
    return make_topic(tmp_path_factory.mktemp("whole") / "data", OBJECTS, EACH)


@pytest.fixture
def place(whole, tmp_path):
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "data")
    with without_spark():
        yield SparkPlace(tmp_path / "data")


@pytest.fixture
def patient(place):
    """The topic, to have faults planted in it."""
    patient = Patient(place.config, place.root / "objects")
    assert len(patient.descriptors()) == OBJECTS
    return patient


def plant(patient):
    """One fault of each kind that the issue names, and where they are."""
    every = patient.descriptors()
    flipped, short, gone, covered, forgotten = every[5], every[12], every[20], every[30], every[41]
    data = patient.path(flipped.object_id).read_bytes()
    position = scan_frames(data, expected_offset=flipped.start).starts[4] + 20
    patient.flip_bit(flipped, position)
    patient.truncate(short, short.size_bytes - 30)
    patient.lose(gone)
    patient.put(patient.overlap(covered, 5))
    patient.forget(forgotten)
    return [
        ("damaged", flipped.object_id, flipped.start + 4, flipped.start + 5),
        ("gap", None, forgotten.start, forgotten.end),
        ("missing", gone.object_id, gone.start, gone.end),
        ("overlap", patient.overlap(covered, 5).object_id, covered.start + 5, covered.end),
        ("truncated", short.object_id, short.end - 1, short.end),
    ]


def test_every_fault_is_named_and_nothing_else(spark, place, patient):
    planted = plant(patient)
    before = [path.name for path in sorted(patient.path("x").parent.iterdir())]
    report = scrub(spark, place.config)
    assert not report.ok
    assert named(report, "object", "start_offset", "next_offset") == planted
    assert len(report.errors) == len(planted)
    (topic,) = report.as_json()["topics"]
    assert topic["repaired"] == 0
    assert all(finding["repairable"] for finding in topic["findings"])
    (flipped,) = [item for item in topic["findings"] if item["kind"] == "damaged"]
    assert "crc mismatch" in flipped["reason"]
    data = patient.path(flipped["object"]).read_bytes()
    starts = scan_frames(data, expected_offset=flipped["offset"] - 4).starts
    assert len(starts) == 4, "the flipped bit is behind four whole frames"
    assert flipped["position"] == starts[-1] + (starts[1] - starts[0])
    assert [path.name for path in sorted(patient.path("x").parent.iterdir())] == before


def test_everything_is_healed_from_local_files(spark, place, patient):
    rows = patient.rows()
    planted = plant(patient)
    names = {item.name for item in patient.path("x").parent.iterdir()}
    report = scrub(spark, place.config, repair=True)
    assert report.ok, report.errors
    assert named(report, "object", "start_offset", "next_offset") == planted
    (topic,) = report.as_json()["topics"]
    assert topic["repaired"] == len(planted)
    assert all(finding["repaired"] for finding in topic["findings"])
    assert patient.rows() == rows
    every = patient.descriptors()
    assert [item.start for item in every] == [number * EACH for number in range(OBJECTS)]
    made = {item.object_id for item in every} - names
    assert len(made) == 4, "new objects have new names"
    again = scrub(spark, place.config)
    assert again.ok
    assert named(again) == []
    with place.open() as log:
        topic = log.topic(TOPIC)
        fill(topic, 3, first=OBJECTS * EACH)
        topic.upload()
        assert topic.watermarks.tiered == OBJECTS * EACH + 3
