"""`scrub` on Spark: planted faults are named, each and nothing else, and healed if they can be."""

import shutil

import pytest

from ister.format.frame import scan_frames
from ister.spark.jobs import scrub
from tests.integration.spark_topics import SparkPlace, fill, without_spark
from tests.support.scrub_faults import TOPIC, Patient

OBJECTS = 50
EACH = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A topic of fifty objects, closed, with its local files."""
    place = SparkPlace(tmp_path_factory.mktemp("whole") / "data")
    with place.open() as log:
        topic = log.topic(TOPIC, create=True)
        for number in range(OBJECTS):
            fill(topic, EACH, first=number * EACH)
            topic.upload()
    return place.root


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


def named(report, *fields):
    """What was found, in short: (kind, …)."""
    (topic,) = report.as_json()["topics"]
    return sorted(
        (finding["kind"], *(finding[name] for name in fields)) for finding in topic["findings"]
    )


@pytest.mark.nightly
def test_a_sound_topic_has_no_findings(spark, place, patient):
    report = scrub(spark, place.config)
    assert report.ok
    (topic,) = report.as_json()["topics"]
    assert topic["findings"] == []
    described = patient.descriptors()
    assert topic["objects"] == OBJECTS
    assert topic["messages"] == OBJECTS * EACH
    assert topic["bytes"] == sum(item.size_bytes for item in described)
    assert patient.descriptors() == described


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


def test_without_local_files_what_cannot_be_healed_is_said(spark, place, patient):
    every = patient.descriptors()
    rows = patient.rows()
    saved = every[12]
    patient.copy(saved)
    planted = plant(patient)
    report = scrub(spark, place.elsewhere, repair=True)
    assert named(report, "object", "start_offset", "next_offset") == planted
    (topic,) = report.as_json()["topics"]
    outcome = {finding["kind"]: finding["repaired"] for finding in topic["findings"]}
    assert outcome == {
        "damaged": False,
        "gap": True,
        "missing": False,
        "overlap": True,
        "truncated": True,
    }
    flipped, gone = every[5].start + 4, every[20]
    assert topic["lost"] == [[flipped, flipped + 1], [gone.start, gone.end]]
    assert sorted(error["offset"] for error in report.errors) == [flipped, gone.start]
    assert all("no copy has the offsets" in error["hint"] for error in report.errors)
    again = scrub(spark, place.elsewhere)
    assert named(again, "start_offset") == [("damaged", flipped), ("missing", gone.start)]
    # With the files back, the rest heals.
    assert scrub(spark, place.config, repair=True).ok
    assert patient.rows() == rows
