"""A topic repaired while it is in use: each tier from the other one, and never at its expense."""

from contextlib import suppress
from itertools import pairwise

import pytest

from ister.base.model import TopicState
from ister.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    NotFoundError,
    StoresDifferError,
    UnavailableError,
)
from ister.format.frame import scan_frames
from ister.rescue.repair import Repaired
from tests.support.crash import Crash
from tests.support.machine import ROOT, NoThreads, Task, fill, numbered, payloads
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import NAME, TTL_SECONDS, Site, calm, silent

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"
PER_FILE = 5
TIERED = 20
COUNT = 32
SENT = numbered(COUNT, size=900)
# Files with the offsets 0 to 4, 5 to 9, and so on up to 30 and 31; objects of 5 messages, to 19.
SETTINGS = {"rotate_max_bytes": 4096, "cache_capacity": 1}
KEEP_NOTHING = {"retention": {"time_minutes": 0, "size_mb": 0}}
WHOLE = Repaired(topic=TEXT, local_frames=None, objects=(), errors=())


def opened(site, **settings):
    return site.open(scheduler=NoThreads(), **{**SETTINGS, **settings})


def a_log(site, *, count=COUNT, **settings):
    """A log with the topic open; the last messages of it are in local files alone."""
    log = opened(site, **settings)
    topic = log.topic(TEXT, create=True)
    for number, payload in enumerate(SENT[:count]):
        topic.append(payload)
        topic.flush()
        if number < TIERED and number % PER_FILE == PER_FILE - 1:
            topic.upload()
    return log


def reopened(site, log, **settings):
    log.close()
    return opened(site, **settings)


def name_of(seq):
    return f"wal.{seq}.log" if seq else "wal.log"


def content(site):
    return site.files().content(PATH)


def logs_of(found):
    return {name: data for name, data in found.items() if name.endswith(".log")}


def flip(site, offset):
    """Damages the local frame of an offset for good."""
    path = f"{PATH}/{name_of(offset // PER_FILE)}"
    start = site.files().frame_starts(path)[offset % PER_FILE]
    site.files().flip(path, start + 40)


def forget(site, offset):
    """Loses an object together with its descriptor."""
    site.objects.drop(site.key(offset))
    site.metadata.delete(site.catalog().keys.descriptor(offset))


def lose_file(site, seq):
    for name in (name_of(seq), name_of(seq).replace(".log", ".idx")):
        if site.disk().exists(f"{PATH}/{name}"):
            site.files().remove(f"{PATH}/{name}")


def harm(site, offset, how="lost"):
    """Harms the object that holds an offset."""
    key = site.key(offset)
    data = site.objects.read(key, 0, 1 << 20)
    if how == "lost":
        site.objects.drop(key)
    elif how == "flipped":
        site.objects.corrupt(key, len(data) // 2)
    else:
        site.objects.put(key, {"cut": data[:-7], "longer": data + b"\0", "empty": b""}[how])
    return data


def check_whole(site, log, *, sent=SENT):
    """Everything can be read, from either tier, the next message is taken, and nothing is bad."""
    topic = log.topic(TEXT)
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, len(sent))
    assert payloads(topic.read()) == sent
    assert topic.append(b"next") == len(sent)
    topic.upload()
    assert log.repair(TEXT) == WHOLE
    ranges = site.ranges()
    assert ranges[0][0] == 0
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    log.close()
    # The bucket alone has everything, too.
    other = site.open("b")
    topic = other.topic(TEXT, take_over=True)
    assert payloads(topic.read()) == [*sent, b"next"]


# -- nothing to do ------------------------------------------------------------------------------


def test_whole_topic_is_left_as_it_is(site):
    log = a_log(site)
    topic = log.topic(TEXT)
    before, keys = content(site), site.bucket_keys()
    report = log.repair(TEXT)
    assert report == WHOLE
    assert report.is_whole
    assert log.topic(TEXT) is topic
    assert (content(site), site.bucket_keys()) == (before, keys)
    check_whole(site, log)


def test_topic_that_was_never_uploaded_is_whole(site):
    log = opened(site)
    topic = log.topic(TEXT, create=True)
    assert log.repair(TEXT) == WHOLE
    topic.append(b"x")
    assert log.repair(TEXT) == WHOLE
    assert payloads(topic.read()) == [b"x"]


def test_topic_that_does_not_exist_is_not_repaired(site):
    with pytest.raises(NotFoundError):
        opened(site).repair(TEXT)


def test_log_without_a_bucket_is_not_repaired(site):
    log = opened(site, storage={"mode": "local_only"})
    log.topic(TEXT, create=True)
    with pytest.raises(InvalidRequestError):
        log.repair(TEXT)


def test_topic_that_another_node_owns_is_not_repaired(site):
    log = a_log(site)
    harm(site, 7)
    site.kill(log)
    site.clock.advance(TTL_SECONDS + 1)
    site.open("b").topic(TEXT, take_over=True)
    keys = site.bucket_keys()
    with pytest.raises(ConflictError):
        opened(site).repair(TEXT)
    assert site.bucket_keys() == keys


# -- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "flipped", "cut", "longer", "empty"])
def test_bad_object_is_uploaded_again_from_local_files(site, how):
    log = a_log(site)
    name = site.catalog().find(7).object_id
    files = content(site)
    data = harm(site, 7, how)
    log = reopened(site, log)
    report = log.repair(TEXT)
    assert (report.objects, report.local_frames, report.errors) == ((name,), None, ())
    assert site.objects.read(site.key(7), 0, 1 << 20) == data
    assert logs_of(content(site)) == logs_of(files)
    check_whole(site, log)


@pytest.mark.parametrize(("bytes_max", "count"), [(1 << 27, 1), (4096, 3)])
def test_gap_between_descriptors_is_filled_from_local_files(site, bytes_max, count):
    log = a_log(site)
    forget(site, 5)
    forget(site, 10)
    log = reopened(site, log, storage={"uploader": {"max_object_bytes": bytes_max}})
    report = log.repair(TEXT)
    assert report.is_whole
    assert len(report.objects) == count
    made = site.catalog().descriptors(5, 15)
    assert all(described.size_bytes <= bytes_max for described, _ in made)
    assert all(site.catalog().find(offset).end > offset for offset in range(TIERED))
    check_whole(site, log)


def cold(site):
    """A log of which all but the end is in the bucket alone."""
    log = a_log(site, **KEEP_NOTHING)
    log.topic(TEXT).upload()
    site.pass_time(log, 60)
    assert log.topic(TEXT).bucket.retention.trim() > 3
    return log


@pytest.mark.parametrize("loss", [harm, forget])
def test_loss_that_no_local_file_makes_up_for_is_told_with_its_range(site, loss):
    log = cold(site)
    loss(site, 10)
    before = content(site)
    report = log.repair(TEXT)
    assert not report.is_whole
    (error,) = report.errors
    assert (type(error), error.start, error.end) == (DataGapError, 10, 15)
    assert (report.objects, report.local_frames) == ((), None)
    assert content(site) == before
    topic = log.topic(TEXT)
    assert payloads(topic.read(0, end=10)) == SENT[:10]
    assert payloads(topic.read(15)) == SENT[15:]
    assert topic.append(b"next") == COUNT


def test_quick_repair_looks_at_sizes_and_reads_nothing(site):
    log = a_log(site)
    harm(site, 2, "flipped")
    harm(site, 7, "cut")
    flip(site, 12)
    name = site.catalog().find(7).object_id
    reads = len(site.objects.reads)
    report = log.repair(TEXT, content=False)
    assert (report.objects, report.local_frames, report.errors) == ((name,), None, ())
    assert len(site.objects.reads) == reads
    report = log.repair(TEXT)
    assert (len(report.objects), report.is_whole) == (1, True)


# -- local files --------------------------------------------------------------------------------


def test_damage_in_a_rotated_file_is_replaced_by_what_the_bucket_does_not_have(site):
    log = a_log(site)
    flip(site, 12)
    before = logs_of(content(site))
    log = reopened(site, log)
    assert log.topic(TEXT).state is TopicState.OPEN
    report = log.repair(TEXT)
    assert (report.local_frames, report.objects, report.errors) == (COUNT - TIERED, (), ())
    after = content(site)
    assert {f"{name}.aside": data for name, data in before.items()}.items() <= after.items()
    (left,) = logs_of(after).values()
    assert left == b"".join(before[name_of(seq)] for seq in range(4, 7))
    check_whole(site, log)


def test_topic_that_was_appended_to_goes_on_after_its_repair(site):
    """Goal: what the old writer still knows does not get into the way of the new files."""
    log = a_log(site)
    topic = log.topic(TEXT)
    flip(site, 12)
    topic.append(b"not flushed")
    assert log.repair(TEXT).local_frames == COUNT - TIERED + 1
    assert (log.topic(TEXT).state, log.topic(TEXT).damage) == (TopicState.OPEN, ())
    check_whole(site, log, sent=[*SENT, b"not flushed"])


@pytest.mark.parametrize("file", [0, 1, 3])
def test_file_that_is_missing_is_made_up_for_by_the_bucket(site, file):
    log = a_log(site)
    log.close()
    lose_file(site, file)
    log = opened(site)
    assert log.topic(TEXT).state is TopicState.QUARANTINED
    assert log.repair(TEXT).local_frames == COUNT - TIERED
    check_whole(site, log)


@pytest.mark.parametrize("offset", [TIERED, TIERED + 1], ids=["first", "second"])
def test_quarantined_end_that_the_bucket_has_is_repaired(site, offset):
    """Goal: whichever frame of the last file is damaged, those behind it are whole."""
    log = a_log(site, count=TIERED + 2)
    topic = log.topic(TEXT)
    topic.upload()
    topic.append(SENT[TIERED + 2])
    log.close()
    flip(site, offset)
    log = opened(site)
    assert log.topic(TEXT).state is TopicState.QUARANTINED
    report = log.repair(TEXT)
    assert (report.local_frames, report.errors) == (1, ())
    check_whole(site, log, sent=SENT[: TIERED + 3])


def test_quarantined_end_that_is_nowhere_else_is_told_and_nothing_is_rewritten(site):
    log = a_log(site)
    log.close()
    flip(site, COUNT - 1)
    before = content(site)
    log = opened(site)
    report = log.repair(TEXT)
    (error,) = report.errors
    assert isinstance(error, CorruptDataError)
    assert error.offset == COUNT - 1
    assert report.local_frames is None
    topic = log.topic(TEXT)
    assert topic.state is TopicState.QUARANTINED
    assert payloads(topic.read(0, end=COUNT - 1)) == SENT[: COUNT - 1]
    log.close()
    assert content(site) == before


def test_damage_behind_what_the_bucket_has_is_told_and_nothing_is_rewritten(site):
    log = a_log(site)
    flip(site, 22)
    log = reopened(site, log)
    before = logs_of(content(site))
    report = log.repair(TEXT)
    (error,) = report.errors
    assert (error.offset, report.local_frames) == (22, None)
    assert logs_of(content(site)) == before
    topic = log.topic(TEXT)
    assert payloads(topic.read(0, end=22)) == SENT[:22]
    assert payloads(topic.read(23)) == SENT[23:]
    assert topic.append(b"next") == COUNT
    topic.flush()
    assert payloads(topic.read(30)) == [*SENT[30:], b"next"]


# -- both tiers ---------------------------------------------------------------------------------


def test_damage_in_both_tiers_in_different_ranges_is_repaired_objects_first(site):
    log = a_log(site)
    flip(site, 12)
    harm(site, 7)
    log = reopened(site, log)
    log.topic(TEXT)
    order = []
    site.objects.after = lambda kind, key: order.append("bucket") if kind == "close" else None

    def note(kind, path):
        if kind == "rename" and path == f"{PATH}/wal.log":
            order.append("files")

    site.disk().before = note
    report = log.repair(TEXT)
    site.disk().before = calm
    assert order == ["bucket", "files"]
    assert (len(report.objects), report.local_frames, report.errors) == (1, COUNT - TIERED, ())
    check_whole(site, log)


@pytest.mark.parametrize("how", ["lost", "flipped"])
def test_damage_in_both_tiers_in_the_same_range_is_told_and_nothing_is_rewritten(site, how):
    log = a_log(site)
    flip(site, 12)
    key, data = site.key(12), harm(site, 12, how)
    log = reopened(site, log)
    before = logs_of(content(site))
    report = log.repair(TEXT)
    assert report.local_frames is None
    assert not report.is_whole
    ranges = [(e.start, e.end) for e in report.errors if isinstance(e, DataGapError)]
    assert ranges == [(10, 15)]
    assert logs_of(content(site)) == before
    topic = log.topic(TEXT)
    assert payloads(topic.read(0, end=12)) == SENT[:12]
    assert payloads(topic.read(13)) == SENT[13:]
    site.objects.put(key, data)
    report = log.repair(TEXT)
    assert (report.local_frames, report.errors) == (COUNT - TIERED, ())
    check_whole(site, log)


def test_range_that_both_tiers_have_lost_keeps_the_only_copy_of_another(site):
    """Goal: local files go aside only if the bucket is whole wherever they are in use."""
    log = a_log(site)
    flip(site, 2)
    harm(site, 2)
    harm(site, 17)
    log = reopened(site, log)
    report = log.repair(TEXT)
    assert len(report.objects) == 1
    assert (report.local_frames, report.is_whole) == (None, False)
    assert payloads(log.topic(TEXT).read(5)) == SENT[5:]


# -- files that are not the topic's -----------------------------------------------------------


def write_over(site, seq, data):
    lose_file(site, seq)
    site.files().create(f"{PATH}/{name_of(seq)}", data)


def a_log_beside_another(site):
    """A log with two topics that have the same offsets in each file."""
    log = a_log(site)
    fill(log.topic("/default/other", create=True), COUNT, size=902)
    log.close()
    return {seq: site.files().read(f"{ROOT}/default/other/{name_of(seq)}") for seq in range(7)}


def test_file_of_another_topic_is_replaced_by_what_the_bucket_has(site):
    files = a_log_beside_another(site)
    write_over(site, 2, files[2])
    log = opened(site)
    assert log.topic(TEXT).state is TopicState.OPEN, "nothing but the names tells"
    report = log.repair(TEXT)
    assert (report.local_frames, report.errors) == (COUNT - TIERED, ())
    check_whole(site, log)


def test_file_of_another_topic_that_the_bucket_does_not_have_is_told(site):
    files = a_log_beside_another(site)
    write_over(site, 5, files[5])
    log = opened(site)
    report = log.repair(TEXT)
    assert report.local_frames is None
    (error,) = report.errors
    assert (error.offset, error.path) == (25, f"{PATH}/{name_of(5)}")
    assert "/default/other" in error.message


def test_frames_that_differ_between_the_tiers_are_told(site):
    """Goal: a local file of another copy of the topic is not taken for the topic's own."""
    with Site() as elsewhere:
        log = opened(elsewhere)
        topic = log.topic(TEXT, create=True)
        for payload in numbered(COUNT, first=1000, size=900):
            topic.append(payload)
            topic.flush()
        log.close()
        data = elsewhere.files().read(f"{PATH}/{name_of(2)}")
    a_log(site).close()
    write_over(site, 2, data)
    log = opened(site)
    report = log.repair(TEXT)
    assert report.local_frames is None
    (error,) = report.errors
    assert (type(error), error.offset) == (StoresDifferError, 10)


# -- damage that is left out by configuration ---------------------------------------------------


@pytest.mark.timeout(5)
def test_read_that_ends_behind_a_message_that_is_left_out_ends(site):
    """Goal: the end lies in the middle of an object, and nothing whole is left before it."""
    log = cold(site)
    log = reopened(site, log, storage={"cloud_reader": {"on_damage": "skip"}})
    topic = log.topic(TEXT)
    key = site.key(7)
    starts = scan_frames(site.objects.read(key, 0, 1 << 20), expected_offset=5).starts
    site.objects.corrupt(key, starts[2] + 40)
    assert payloads(topic.read(0, end=8)) == SENT[:7]
    assert payloads(topic.read(0, end=9)) == [*SENT[:7], SENT[8]]


# -- while it is in use -------------------------------------------------------------------------


class During:
    """Does something in the middle of the rewriting, once."""

    def __init__(self, site, action):
        self.site, self.action, self.results = site, action, []
        site.disk().before = self

    def __call__(self, kind, path):
        if kind == "rename" and path == f"{PATH}/wal.log":
            self.site.disk().before = calm
            self.results.append(self.action())


def test_append_during_a_repair_is_refused_or_there_afterwards(site):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    topic.append_many([b"m%03d" % number * 50 for number in range(40)])
    topic.flush()
    topic.upload()
    topic.append_many([b"n%03d" % number for number in range(20)])
    topic.flush()
    site.files().overwrite(f"{PATH}/wal.log", 300, b"\xaa")
    unhold, acked = topic.wal.gate.unhold, []

    def unhold_and_append(name):
        unhold(name)
        try:
            offset = topic.append(b"acked")
            topic.wait(offset)
        except (UnavailableError, ClosedError):
            return
        acked.append(offset)

    topic.wal.gate.unhold = unhold_and_append
    report = log.repair(TEXT)
    assert (report.local_frames, report.errors) == (20, ())
    topic = log.topic(TEXT)
    assert topic.state is TopicState.OPEN
    assert acked == []
    assert topic.append(b"next") == 60
    assert sum(1 for _ in topic.read(0)) == 61


def test_topic_asked_for_in_the_middle_is_the_repaired_one(site):
    log = a_log(site)
    old = log.topic(TEXT)
    flip(site, 12)
    tasks = []

    def ask():
        tasks.append(Task(log.topic, TEXT))
        tasks[0].join(0.05)
        return tasks[0].is_running

    during = During(site, ask)
    log.repair(TEXT)
    assert during.results == [True]
    topic = tasks[0].result()
    assert topic is not old
    assert topic is log.topic(TEXT)
    with pytest.raises(ClosedError):
        old.append(b"to nobody")
    check_whole(site, log)


def test_reader_in_the_middle_gets_what_is_right_or_is_told(site):
    log = a_log(site)
    topic = log.topic(TEXT)
    flip(site, 12)
    readers = [topic.reader(start) for start in (0, 8, 12, 19, 20, 27)]
    for reader in readers:
        reader.next_batch(1)

    def read():
        found = []
        for reader in readers:
            start = reader.next_offset
            try:
                batch = payloads(reader.poll(3))
            except (ClosedError, NotFoundError):
                assert reader.next_offset == start
                batch = []
            found.append((start, batch))
        return found

    during = During(site, read)
    log.repair(TEXT)
    (found,) = during.results
    for start, batch in found:
        assert batch == SENT[start : start + len(batch)]
    for reader in readers:
        with pytest.raises(ClosedError):
            reader.next_batch(1)
        again = log.topic(TEXT).reader(reader.next_offset)
        assert payloads(again.next_batch(1)) == [SENT[reader.next_offset]]
        again.close()


def test_reader_that_waits_at_the_tail_is_told_of_the_repair(site):
    log = a_log(site)
    topic = log.topic(TEXT)
    flip(site, 12)
    reader = topic.reader("latest")
    task = Task(reader.next_batch)
    task.join(0.05)
    assert task.is_running
    log.repair(TEXT)
    assert isinstance(task.error(), ClosedError)
    assert reader.next_offset == COUNT


# -- when it fails ------------------------------------------------------------------------------


def test_bucket_that_is_silent_ends_the_repair_and_not_the_topic(site):
    log = a_log(site)
    flip(site, 12)
    before = logs_of(content(site))
    site.objects.before = silent
    with pytest.raises(UnavailableError):
        log.repair(TEXT)
    site.objects.before = calm
    assert logs_of(content(site)) == before
    assert log.topic(TEXT).append(b"next") == COUNT
    log.topic(TEXT).flush()
    assert log.repair(TEXT).is_whole
    check_whole(site, log, sent=[*SENT, b"next"])


def test_crash_at_any_step_is_followed_by_a_repair_that_ends_the_same():
    at, is_done = 0, False
    while not is_done:
        at += 1
        with Site() as site:
            log = a_log(site)
            harm(site, 7)
            flip(site, 12)
            crash = Crash(at)
            crash.arm(site)
            with suppress(SimulatedCrash):
                log.repair(TEXT)
                is_done = True
            Crash.disarm(site)
            site.kill(log)
            try:
                log = opened(site)
                assert payloads(log.topic(TEXT).read(TIERED)) == SENT[TIERED:]
                report = log.repair(TEXT)
                assert report.is_whole
                check_whole(site, log)
            except Exception as error:
                error.add_note(f"after a crash before step {at}: {crash.step}")
                raise
    assert at > 30
