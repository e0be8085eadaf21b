"""`scrub` with tasks in this process: every fault, every repair, every point to die at."""

import json
import os
import random
import shutil
import zlib
from dataclasses import replace

import pyarrow as pa
import pytest

from ister.base import failpoints
from ister.bucket.merge import merge_objects
from ister.bucket.names import format_object_id
from ister.config import load_config
from ister.format.frame import decode_frame, encode_frame, scan_frames
from ister.format.records import RetiredObjects, encode_current, encode_retired
from ister.objectstore.opendal_store import OpendalStore
from ister.rescue.catalog_check import find_superfluous
from ister.rescue.mend import DamagedRange, epoch_floor
from ister.spark.jobs import scrubbing
from ister.spark.jobs.scrubbing import repair_range, scrub
from ister.spark.location import place_of
from ister.topic.history import BucketLog
from ister.topic.stores import upload_settings
from tests.integration.spark_topics import SparkPlace, fill, without_spark
from tests.servers.flight import FlightTopics
from tests.support.scale import scaled
from tests.support.scrub_faults import TOPIC, Patient, make_topic, named
from tests.support.spark_here import killed_at

OBJECTS = 12
EACH = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A topic of twelve objects, closed, with its local files."""
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
    return Patient(place.config, place.root / "objects")


def plant(patient):
    """A fault of each kind."""
    every = patient.descriptors()
    patient.flip_bit(every[2], every[2].size_bytes // 2)
    patient.truncate(every[4], every[4].size_bytes - 30)
    patient.lose(every[6])
    patient.put(patient.overlap(every[8], 5))
    patient.forget(every[10])


def grow_old(path):
    """An object was written two days ago."""
    status = path.stat()
    os.utime(path, (status.st_atime - 172_800, status.st_mtime - 172_800))


# -- ranges -------------------------------------------------------------------------------------


def test_what_is_superfluous():
    assert find_superfluous([]) == set()
    assert find_superfluous([(0, 5), (5, 9), (12, 20)]) == set()
    assert find_superfluous([(0, 5), (2, 5), (5, 9)]) == {2}
    assert find_superfluous([(0, 5), (3, 7), (5, 9)]) == {3}
    assert find_superfluous([(0, 9), (2, 4), (4, 9)]) == {2, 4}
    assert find_superfluous([(0, 5), (3, 9)]) == set(), "each has offsets that the other has not"
    assert find_superfluous([(0, 5), (3, 9), (9, 10), (20, 25), (21, 22)]) == {21}


def test_objects_of_an_owner_that_was_fenced_are_no_copies():
    class Record:
        lineage = (
            type("L", (), {"epoch": 1, "start": 0}),
            type("L", (), {"epoch": 4, "start": 100}),
        )

    assert epoch_floor(Record, 100) == 1
    assert epoch_floor(Record, 101) == 4


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_files", [True, False])
def test_the_first_and_the_last_descriptor_come_back(spark, place, patient, has_files):
    rows = patient.rows()
    every = patient.descriptors()
    patient.forget(every[0])
    patient.forget(every[-1])
    config = place.config if has_files else place.elsewhere
    report = scrub(spark, config)
    assert named(report, "start_offset", "next_offset") == [
        ("gap", 0, every[0].end),
        ("gap", every[-1].start, None),
    ]
    repaired = scrub(spark, config, repair=True)
    assert repaired.ok, repaired.errors
    assert named(scrub(spark, config)) == []
    assert patient.rows() == rows


def test_whole_object_of_another_topic_is_not_taken_for_the_right_one(spark, place, patient):
    """Its frames are whole and have the right offsets; only the checksum tells."""
    rows = patient.rows()
    described = patient.descriptors()[2]
    path = patient.path(described.object_id)
    other = path.read_bytes()
    frames = scan_frames(other, expected_offset=described.start)
    foreign = b"".join(
        encode_frame(offset, b"\x05" + decode_frame(other, at).body[1:])
        for offset, at in enumerate(frames.starts, described.start)
    )
    path.write_bytes(foreign)
    (finding,) = scrub(spark, place.elsewhere, repair=True).topics[TOPIC]["findings"]
    assert not finding["repaired"]
    assert "another copy is needed to tell" in finding["reason"]
    assert path.read_bytes() == foreign
    repaired = scrub(spark, place.config, repair=True)
    assert repaired.ok, repaired.errors
    assert patient.rows() == rows


def test_faults_are_told_although_the_topic_keeps_changing(spark, place, patient, monkeypatch):
    every = patient.descriptors()
    patient.flip_bit(every[2], every[2].size_bytes // 2)
    check = scrubbing._check

    def check_while_somebody_writes(job, scrubs):
        key = patient.keys.descriptor(every[4].start)
        job.store.put(key, job.store.get(key).value)
        check(job, scrubs)

    monkeypatch.setattr(scrubbing, "_check", check_while_somebody_writes)
    report = scrub(spark, place.elsewhere)
    assert not report.ok
    assert named(report, "object") == [("damaged", every[2].object_id)]


def test_wrong_descriptors_are_made_anew(spark, place, patient):
    rows = patient.rows()
    every = patient.descriptors()
    patient.put(replace(every[1], size_bytes=every[1].size_bytes - 7))
    patient.put(replace(every[3], publish_time_max=1))
    offset, position = every[5].offset_index[-1]
    patient.put(replace(every[5], offset_index=(every[5].offset_index[0], (offset, position + 1))))
    patient.put(replace(every[7], end=every[7].end - 2, messages=EACH - 2))
    patient.point(every[9].start)
    report = scrub(spark, place.elsewhere)
    assert named(report, "start_offset") == sorted(
        [
            *(("wrong_descriptor", every[at].start) for at in (1, 3, 5)),
            ("gap", every[7].end - 2),
            ("pointer", None),
            ("wrong_descriptor", every[7].start),
        ],
        key=lambda item: (item[0], item[1] or 0),
    )
    repaired = scrub(spark, place.elsewhere, repair=True)
    assert repaired.ok, repaired.errors
    assert named(scrub(spark, place.elsewhere)) == []
    assert patient.rows() == rows
    assert [patient.stored(every[at].start) for at in (1, 2, 3, 5, 7)] == [
        every[at] for at in (1, 2, 3, 5, 7)
    ]


def test_a_dry_run_reads_no_object_and_changes_nothing(spark, place, patient):
    plant(patient)
    every = patient.descriptors()
    report = scrub(spark, place.config, dry_run=True, repair=True)
    assert [kind for (kind,) in named(report)] == ["gap", "overlap"]
    (topic,) = report.as_json()["topics"]
    assert topic["objects"] == len(every)
    assert patient.descriptors() == every


@pytest.mark.parametrize(
    "point",
    [
        "pipeline.after_plan",
        "scrub.before_repair",
        "pipeline.before_commit",
        "pipeline.after_commit",
        "scrub.after_repair",
    ],
)
def test_a_repair_that_was_killed_is_run_again(spark, place, patient, point):
    rows = patient.rows()
    plant(patient)
    with killed_at(point):
        scrub(spark, place.config, repair=True)
    assert scrub(spark, place.config, repair=True).ok
    assert named(scrub(spark, place.config)) == []
    assert patient.rows() == rows


# -- other objects ------------------------------------------------------------------------------


def test_orphans_are_a_note_and_those_on_their_way_are_none(spark, place, patient):
    every = patient.descriptors()
    old = [
        format_object_id(0, 24, 1, tag="aaaaaaaa"),
        "data-500-pending-1.dnb1",
        "who-knows.txt",
        format_object_id(0, 36, 1, tag="bbbbbbbb"),
        format_object_id(0, 12, 99),
    ]
    for name in [*old, format_object_id(0, 12, 1, tag="cccccccc")]:
        patient.path(name).write_bytes(b"x")
    for name in old:
        grow_old(patient.path(name))
    with patient.metadata() as store:
        retired = RetiredObjects(objects=(old[3],), until=1 << 40)
        store.put(patient.keys.retired(every[0].object_id), encode_retired(retired))
    report = scrub(spark, place.config)
    assert report.ok
    assert named(report, "object") == [("orphan", name) for name in sorted(old[:3])]
    (topic,) = report.as_json()["topics"]
    assert topic["unnamed"] == {
        "foreign": 1,
        "later": 1,
        "left over": 1,
        "pending": 1,
        "retired": 1,
        "young": 1,
    }
    assert topic["faults"] == 0
    repaired = scrub(spark, place.config, repair=True)
    assert named(repaired, "object") == named(report, "object"), "orphans are left alone"


def test_staged_leftovers_are_a_note(spark, place, patient):
    left = place.root / "objects" / "staging" / "default" / "orders" / "job-1" / "0" / "file"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"rows")
    assert named(scrub(spark, place.config)) == []
    grow_old(left)
    report = scrub(spark, place.config)
    assert report.ok
    assert named(report) == [("staged",)]


# -- repairs ------------------------------------------------------------------------------------


def test_an_object_that_is_only_similar_is_no_copy(spark, place, patient):
    """The copy has other messages under the same offsets: its checksum is another one."""
    every = patient.descriptors()
    copy = patient.copy(every[5])
    other = bytearray(patient.path(copy).read_bytes())
    start = other.index(b"........")
    other[start] = ord("!")
    length = int.from_bytes(other[8:12], "little")
    other[12:16] = zlib.crc32(bytes(other[16 : 16 + length])).to_bytes(4, "little")
    patient.path(copy).write_bytes(other)
    patient.lose(every[5])
    report = scrub(spark, place.elsewhere, repair=True)
    assert not report.ok
    (finding,) = report.as_json()["topics"][0]["findings"]
    assert (finding["kind"], finding["repaired"]) == ("missing", False)
    assert patient.stored(every[5].start) == every[5]


def test_parts_of_several_sources_make_one_object(spark, place, patient):
    """The frame that one copy lacks is in the other."""
    rows = patient.rows()
    described = patient.descriptors()[5]
    patient.copy(described)
    copy = format_object_id(described.start, described.end, 1, tag="0123abcd")
    patient.flip_bit(described, described.size_bytes - 20)
    patient.flip_bit(replace(described, object_id=copy), 40)
    report = scrub(spark, place.elsewhere, repair=True)
    assert report.ok, report.errors
    assert patient.rows() == rows


def test_a_damaged_local_frame_is_not_uploaded(spark, place, patient):
    described = patient.descriptors()[0]
    patient.lose(described)
    logs = (place.root / "wal" / "default" / "orders").glob("wal*.log")
    log = min(logs, key=lambda path: (len(path.name), path.name))
    data = bytearray(log.read_bytes())
    data[40] ^= 1
    log.write_bytes(data)
    names = set(os.listdir(patient.path("x").parent))
    report = scrub(spark, place.config, repair=True)
    assert [error["offset"] for error in report.errors] == [0]
    assert set(os.listdir(patient.path("x").parent)) == names


def test_a_gap_is_filled_as_far_as_local_files_reach(spark, place, patient):
    """Objects and their descriptors are lost, and the oldest local files are trimmed."""
    every = patient.descriptors()
    for described in every[2:9]:
        patient.forget(described)
        patient.lose(described)
    files = place.root / "wal" / "default" / "orders"
    logs = sorted(files.glob("wal*.log"), key=lambda path: (len(path.name), path.name))
    assert len(logs) > 2
    with place.open() as log:
        topic = log.topic(TOPIC)
        first = topic.wal.files[1].first_offset
        topic.wal.trim(first)
    assert every[2].start < first < every[8].end
    report = scrub(spark, place.config, repair=True)
    (topic,) = report.as_json()["topics"]
    assert topic["lost"] == [[every[2].start, first]]
    again = scrub(spark, place.config)
    assert named(again, "start_offset", "next_offset") == [("gap", every[2].start, first)]


def test_a_descriptor_that_cannot_be_read(spark, place, patient):
    rows = patient.rows()
    described = patient.descriptors()[5]
    patient.put_bytes(described.start, b"{not json")
    report = scrub(spark, place.elsewhere)
    assert named(report, "start_offset", "next_offset") == [
        ("unreadable_descriptor", described.start, described.end)
    ]
    assert scrub(spark, place.elsewhere, repair=True).ok
    assert named(scrub(spark, place.elsewhere)) == []
    assert patient.rows() == rows


def test_a_descriptor_under_the_wrong_key(spark, place, patient):
    rows = patient.rows()
    every = patient.descriptors()
    patient.put(every[3], key=patient.keys.descriptor(every[7].start + 1))
    report = scrub(spark, place.elsewhere)
    assert named(report, "object") == [("misplaced_descriptor", every[3].object_id)]
    assert scrub(spark, place.elsewhere, repair=True).ok
    assert patient.descriptors() == every
    assert patient.rows() == rows


def test_descriptors_that_both_are_needed_stay(spark, place, patient):
    """Neither has all offsets of the other: nothing may be removed."""
    every = patient.descriptors()
    patient.put(replace(every[3], end=every[4].end - 2, messages=22))
    before = patient.descriptors()
    report = scrub(spark, place.elsewhere)
    assert ("overlap", every[4].start) in named(report, "start_offset")
    assert ("wrong_descriptor", every[3].start) in named(report, "start_offset")
    assert patient.descriptors() == before
    assert scrub(spark, place.elsewhere, repair=True).ok
    assert patient.descriptors() == every


def test_a_covered_descriptor_stays_while_the_others_are_not_whole(spark, place, patient):
    every = patient.descriptors()
    patient.put(patient.overlap(every[3], 5))
    patient.lose(every[3])
    report = scrub(spark, place.elsewhere, repair=True)
    outcome = {item["kind"]: item["repaired"] for item in report.as_json()["topics"][0]["findings"]}
    assert outcome == {"missing": False, "overlap": False}
    assert scrub(spark, place.config, repair=True).ok
    assert [item.start for item in patient.descriptors()] == [item.start for item in every]


def test_the_pointer_goes_with_a_descriptor_that_is_removed(spark, place, patient):
    every = patient.descriptors()
    covered = patient.overlap(every[-1], 5)
    patient.put(covered)
    patient.point(covered.start)
    assert scrub(spark, place.config, repair=True).ok
    assert patient.descriptors() == every
    with patient.metadata() as store:
        found = json.loads(store.get(patient.keys.current).value)
    assert int(found["start"]) == every[-1].start


def test_pointer_with_a_wrong_end_is_put_right(spark, place, patient):
    """Otherwise nobody would look for what is missing behind it."""
    last = patient.descriptors()[-1]
    with patient.metadata() as store:
        store.put(patient.keys.current, encode_current(last.start, last.end + 5))
    assert named(scrub(spark, place.config)) == [("pointer",)]
    assert scrub(spark, place.config, repair=True).ok
    with patient.metadata() as store:
        found = json.loads(store.get(patient.keys.current).value)
    assert (int(found["start"]), found["next_offset"]) == (last.start, last.end)


def test_a_damaged_archive_is_made_again(spark, place, patient):
    """Of a merged object in Parquet the originals are still there, or the local files are."""
    rows = patient.rows()
    every = patient.descriptors()
    config = load_config(place.config)
    with BucketLog(config) as history:
        merged = merge_objects(
            patient.name,
            every[2:5],
            store=history.objects,
            settings=upload_settings(config.storage.uploader),
            format="parquet",
            epoch=1,
            incarnation=every[0].incarnation,
            tag="0123abcd",
            created_at=1,
        )
    for described in every[2:5]:
        patient.forget(described)
    patient.put(merged)
    assert named(scrub(spark, place.elsewhere)) == []
    assert patient.rows() == rows
    patient.flip_bit(merged, 300)
    report = scrub(spark, place.elsewhere)
    assert named(report, "object") == [("damaged", merged.object_id)]
    assert scrub(spark, place.elsewhere, repair=True).ok
    assert patient.rows() == rows
    patient.put(merged)
    for described in every[2:5]:
        patient.lose(described)
    assert scrub(spark, place.config, repair=True).ok
    assert patient.rows() == rows


# -- objects that messages were left out of -----------------------------------------------------


def keep_some(place, patient, every, left_out, tag="0123abcd"):
    """The object that compaction makes of others, without the messages of some offsets."""
    config = load_config(place.config)
    with BucketLog(config) as history:
        return merge_objects(
            patient.name,
            every,
            store=history.objects,
            settings=upload_settings(config.storage.uploader),
            format="parquet",
            epoch=1,
            incarnation=every[0].incarnation,
            tag=tag,
            created_at=1,
            survives=lambda batch: pa.array([o.as_py() not in left_out for o in batch["offset"]]),
        )


@pytest.fixture
def originals(patient):
    """Objects with all messages, which stay in the bucket."""
    return patient.descriptors()[2:5]


@pytest.fixture
def kept(place, patient, originals):
    """An object without some of its messages, in the place of those."""
    made = keep_some(place, patient, originals, {30, 31})
    for described in originals:
        patient.forget(described)
    patient.put(made)
    assert made.kept
    return made


def offsets_of(patient):
    return [row["offset"] for row in patient.rows()]


@pytest.mark.parametrize("fault", ["damaged", "lost"])
def test_messages_that_were_left_out_do_not_come_back(
    spark, place, patient, originals, kept, fault
):
    """Local files and the objects it was made of have them all: none of these is a copy."""
    # Nor is what an earlier compaction of the same offsets has made, which left out less.
    keep_some(place, patient, originals, {30}, tag="0123abce")
    if fault == "lost":
        patient.lose(kept)
    else:
        patient.flip_bit(kept, 300)
    report = scrub(spark, place.config, repair=True)
    assert not report.ok
    (error,) = report.errors
    assert "copy of the bucket" in error["hint"]
    assert "not repaired" in error["message"]
    assert patient.stored(kept.start) == kept
    (finding,) = report.as_json()["topics"][0]["findings"]
    assert (finding["repaired"], finding["repairable"]) == (False, False)


def test_a_copy_of_what_was_left_heals(spark, place, patient, kept):
    rows = patient.rows()
    assert not {30, 31} & {row["offset"] for row in rows}
    again = keep_some(place, patient, [kept], set(), tag="0123abce")
    assert again.checksum == kept.checksum, "nothing but the name differs"
    patient.flip_bit(kept, 300)
    assert scrub(spark, place.config, repair=True).ok
    made = patient.stored(kept.start)
    assert (made.kept, made.checksum) == (kept.kept, kept.checksum)
    assert made.object_id not in (kept.object_id, again.object_id)
    assert patient.rows() == rows


@pytest.mark.parametrize("extra", [b"", b"rubbish"], ids=["read wrongly once", "with more behind"])
def test_an_object_that_has_all_of_itself_heals_itself(place, patient, kept, extra):
    path = patient.path(kept.object_id)
    path.write_bytes(path.read_bytes() + extra)
    damaged = DamagedRange(
        topic=TOPIC,
        epoch=1,
        incarnation=kept.incarnation,
        node="nobody",
        start=kept.start,
        end=kept.end,
        old=kept,
    )
    repaired = repair_range(place_of(load_config(place.config)), damaged)
    (made,) = repaired.objects
    assert made.object_id != kept.object_id
    assert (made.kept, made.checksum, made.messages) == (kept.kept, kept.checksum, kept.messages)
    patient.put(made)
    assert not {30, 31} & set(offsets_of(patient))


def test_what_changes_under_the_scrub_is_no_fault(spark, place, patient, monkeypatch):
    """An object goes while it is checked, because retention has taken it."""
    every = patient.descriptors()
    real, gone = OpendalStore.stat, []

    def stat(self, key):
        if key.endswith(every[0].object_id) and not gone:
            gone.append(key)
            patient.forget(every[0])
            patient.lose(every[0])
            with patient.metadata() as store:
                found = json.loads(store.get(patient.keys.record).value)
                found["expired_before"] = every[0].end
                store.put(patient.keys.record, json.dumps(found).encode())
        return real(self, key)

    monkeypatch.setattr(OpendalStore, "stat", stat)
    report = scrub(spark, place.config)
    assert gone
    assert report.ok, report.errors
    assert named(report) == []


def test_a_job_without_its_lease_changes_nothing(spark, place, patient):
    plant(patient)
    every = patient.descriptors()
    points = []

    def lose_lease():
        with patient.metadata() as store:
            for found in store.range("/danube/pipeline/jobs/"):
                store.delete(found.key)
        points.append(1)

    failpoints.arm("pipeline.before_commit", lose_lease)
    try:
        report = scrub(spark, place.config, repair=True)
    finally:
        failpoints.disarm()
    assert points
    assert not report.ok
    assert patient.descriptors() == every
    assert scrub(spark, place.config, repair=True).ok


def test_a_live_owner_goes_on(spark, place, patient):
    """The log is open while it is repaired; its uploads go on, and it reads everything."""
    with place.open() as log:
        topic = log.topic(TOPIC)
        rows = [message.payload for message in topic.read()]
        plant(patient)
        assert scrub(spark, place.config, repair=True).ok
        fill(topic, 5, first=OBJECTS * EACH)
        topic.upload()
        topic.bucket.retention.trim()
        assert [message.payload for message in topic.read()][: len(rows)] == rows
    assert named(scrub(spark, place.config)) == []


def test_the_owner_gives_what_is_not_on_this_machine(spark, place, patient):
    """Local files are elsewhere, and their owner serves them by Flight."""
    rows = patient.rows()
    with place.open() as log, FlightTopics(log) as server:
        log.topic(TOPIC)
        plant(patient)
        lost = patient.descriptors()[3]
        patient.forget(lost)
        patient.lose(lost)
        seen = scrub(spark, place.elsewhere, broker=server.address)
        assert all(item["repairable"] for item in seen.as_json()["topics"][0]["findings"])
        report = scrub(spark, place.elsewhere, broker=server.address, repair=True)
        assert report.ok, report.errors
        reasons = [item["reason"] for item in report.as_json()["topics"][0]["findings"]]
        assert any("the broker" in reason for reason in reasons)
    assert named(scrub(spark, place.elsewhere)) == []
    assert patient.rows() == rows


def test_a_broker_that_does_not_answer_is_no_source(spark, place, patient):
    described = patient.descriptors()[3]
    patient.lose(described)
    report = scrub(spark, place.elsewhere, broker="127.0.0.1:1", repair=True)
    assert [error["code"] for error in report.errors] == ["DATA_LOSS"]


def test_what_is_about_to_expire_is_no_gap(spark, place, patient):
    """Retention was killed between its record and the last of its descriptors."""
    every = patient.descriptors()
    with patient.metadata() as store:
        found = json.loads(store.get(patient.keys.record).value)
        found["expired_before"] = every[4].start
        store.put(patient.keys.record, json.dumps(found).encode())
    for described in (every[0], every[2]):
        patient.forget(described)
        patient.lose(described)
    assert named(scrub(spark, place.config)) == []


def test_the_newest_descriptor_cannot_be_read(spark, place, patient):
    """Nobody can act for such a topic: it is said, and nothing is changed."""
    described = patient.descriptors()[-1]
    patient.put_bytes(described.start, b"{not json")
    report = scrub(spark, place.config, repair=True)
    assert named(report, "start_offset") == [("unreadable_descriptor", described.start)]
    assert not report.ok
    with patient.metadata() as store:
        assert store.get(patient.keys.descriptor(described.start)).value == b"{not json"


@pytest.mark.parametrize("seed", range(scaled(2, 12)))
def test_whatever_is_wrong_comes_right_with_local_files(spark, place, patient, seed):
    """Replay: pytest tests/unit/spark/jobs/test_scrubbing.py -k "comes_right and <seed>" """
    rng = random.Random(seed)
    rows, every = patient.rows(), patient.descriptors()
    hurt = rng.sample(every, rng.randrange(1, len(every)))
    for described in hurt:
        fault = rng.choice(("flip", "cut", "lose", "forget", "forget and lose", "cover", "lie"))
        if fault == "flip":
            for _ in range(rng.randrange(1, 4)):
                patient.flip_bit(described, rng.randrange(described.size_bytes))
        elif fault == "cut":
            patient.truncate(described, rng.randrange(described.size_bytes))
        elif fault in ("lose", "forget and lose"):
            patient.lose(described)
        if fault in ("forget", "forget and lose"):
            patient.forget(described)
        elif fault == "cover":
            patient.put(patient.overlap(described, rng.randrange(1, EACH)))
        elif fault == "lie":
            lie = rng.choice(({"size_bytes": 1}, {"checksum": "crc32:00000000"}, {"messages": 1}))
            patient.put(replace(described, **lie))
    # Without its newest descriptor and the pointer to it, a topic just ends earlier.
    if rng.random() < 0.3 and patient.descriptors()[-1].end == every[-1].end:
        patient.point(rng.choice(every).start)
    report = scrub(spark, place.config, repair=True)
    assert report.ok, report.errors
    assert named(scrub(spark, place.config)) == []
    assert patient.rows() == rows
    assert scrub(spark, place.elsewhere).ok
