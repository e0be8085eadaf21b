"""Offsets that no tier has are given up: the topic opens behind them, and nothing else is lost."""

import copy
import random
from contextlib import suppress
from functools import cache
from itertools import pairwise

import pytest

from ister.base.model import TopicState
from ister.bucket.listing import list_objects
from ister.errors import CorruptDataError, DataGapError, NotFoundError
from ister.format.frame import scan_frames
from ister.rescue.rebuild import rebuild_topic
from tests.support.cases import each
from tests.support.crash import Crash
from tests.support.machine import NAME, ROOT, Machine, NoThreads, fill, numbered, payloads
from tests.support.memory_fs import SimulatedCrash
from tests.support.scale import scaled
from tests.support.stores import Site, save_cursor

PATH = f"{ROOT}{NAME}"
COUNT = 40
PER_FILE = 5
SENT = numbered(COUNT, size=900)
SETTINGS = {"rotate_max_bytes": 4096, "cache_capacity": 1}


# -- without a bucket ---------------------------------------------------------------------------


def opened(machine, name=NAME, *, create=False):
    log = machine.open(scheduler=NoThreads(), **SETTINGS)
    return log, log.topic(name, create=create)


@cache
def a_disk():
    """Of a log in eight files of five messages, closed."""
    with Machine() as machine:
        fill(opened(machine, create=True)[1], COUNT, size=900)
    return machine.fs._root


def a_machine():
    machine = Machine()
    machine.fs._root = copy.deepcopy(a_disk())
    return machine


def path_of(seq, name=NAME):
    return f"{ROOT}{name}/wal.{seq}.log" if seq else f"{ROOT}{name}/wal.log"


def flip(machine, offset):
    path = path_of(offset // PER_FILE)
    machine.flip(path, machine.frame_starts(path)[offset % PER_FILE] + 40)


def lose(machine, *seqs):
    for seq in seqs:
        machine.remove(path_of(seq))


def cut(machine):
    """The last file as a backup has it that copied the checkpoint later."""
    machine.truncate(path_of(7), machine.frame_starts(path_of(7))[2])


def swap(machine):
    """The first two files have each other's names, and no checkpoint tells."""
    first, second = machine.read(path_of(0)), machine.read(path_of(1))
    machine.remove(f"{PATH}/wal.ckpt")
    for seq, data in ((0, second), (1, first)):
        lose(machine, seq)
        machine.create(path_of(seq), data)


HARM = {
    "a backup": (cut, [(37, 40)]),
    "a frame of the last file": (lambda machine: flip(machine, 36), [(36, 37)]),
    "a frame of another file": (lambda machine: flip(machine, 12), [(12, 13)]),
    "a first frame": (lambda machine: flip(machine, 15), [(15, 16)]),
    "the first file": (lambda machine: lose(machine, 0), [(0, 5)]),
    "files": (lambda machine: lose(machine, 3, 4), [(15, 25)]),
    "the last file": (lambda machine: lose(machine, 7), [(35, 40)]),
    "all files": (lambda machine: lose(machine, *range(8)), [(0, 40)]),
    "several": (
        lambda machine: (lose(machine, 2), flip(machine, 17), cut(machine)),
        [(10, 15), (17, 18), (37, 40)],
    ),
    "the order": (swap, []),
}
on_each_harm = each("harm", list(HARM))


def gave_up(machine, **options):
    """What the next process gives up."""
    log, _ = opened(machine)
    plan = log.give_up(NAME, **options)
    log.close()
    machine._logs.clear()
    return plan


def left(lost):
    return [SENT[n] for n in range(COUNT) if not any(start <= n < end for start, end in lost)]


def check_goes_on(machine, lost, *, next_offset=COUNT):
    """The topic has what is left, for this process and the next one, and takes messages."""
    log, topic = opened(machine)
    assert (topic.state, topic.damage) == (TopicState.OPEN, ())
    assert topic.watermarks.next == next_offset
    assert payloads(topic.read("earliest")) == left(lost)
    assert topic.append(b"next") == next_offset
    topic.flush()
    assert payloads(topic.read("earliest")) == [*left(lost), b"next"]
    log.close()
    log, topic = opened(machine)
    assert payloads(topic.read("earliest")) == [*left(lost), b"next"]
    for start, end in lost:
        if start >= topic.earliest:
            assert payloads(topic.read(start)) == [*left([(0, end), *lost]), b"next"]
    log.close()
    assert gave_up(machine, is_dry=True).ranges == ()


@on_each_harm
def test_log_continues_behind_what_it_has_lost(harm):
    damage, lost = HARM[harm]
    with a_machine() as machine:
        damage(machine)
        plan = gave_up(machine, is_dry=True)
        assert (list(plan.ranges), plan.next_offset) == (lost, COUNT)
        assert "wal.gaps" not in machine.fs.list_directory(PATH)
        assert gave_up(machine) == plan
        check_goes_on(machine, lost)


def test_whole_log_is_left_as_it_is():
    with a_machine() as machine:
        log, topic = opened(machine)
        assert log.give_up(NAME).ranges == ()
        assert log.topic(NAME) is topic
        assert "wal.gaps" not in machine.fs.list_directory(PATH)
        assert topic.append(b"next") == COUNT


def test_unreadable_bytes_may_have_been_messages_whose_offsets_are_not_used_again():
    """Goal: the checkpoint is up to a second old, and what follows it may have been read."""
    with a_machine() as machine:
        path = path_of(7)
        data = machine.read(path)
        starts = machine.frame_starts(path)
        garbage = random.Random(3).randbytes(len(data) - starts[2] + 500)
        machine.overwrite(path, starts[2], garbage)
        plan = gave_up(machine)
        assert plan.ranges[0][0] == 37
        assert plan.next_offset >= 37 + len(garbage) // 100
        check_goes_on(machine, [(37, 40)], next_offset=plan.next_offset)


def test_log_continues_at_or_above_an_offset_that_is_known_elsewhere():
    with a_machine() as machine:
        cut(machine)
        assert gave_up(machine, at_least=50).ranges == ((37, 50),)
        check_goes_on(machine, [(37, 40)], next_offset=50)


def test_file_of_another_topic_is_given_up_and_the_topic_keeps_its_own():
    with a_machine() as machine:
        log, topic = opened(machine, "/default/other", create=True)
        topic.append_many(numbered(50, size=900))
        log.close()
        machine._logs.clear()
        lose(machine, 2)
        machine.create(path_of(2), machine.read(path_of(0, "/default/other")))
        assert gave_up(machine).ranges == ((10, 15),)
        check_goes_on(machine, [(10, 15)])


def test_records_of_another_topic_are_not_a_file_of_it():
    """Goal: a program may append what it has read elsewhere; nothing of that is given up."""
    with a_machine() as machine:
        source, target = opened(machine)[1], machine._logs[-1].topic("/default/copy", create=True)
        for message in source.read():
            target.appender.append_record(message.record)
        target.flush()
        assert machine._logs[-1].give_up("/default/copy", is_dry=True).ranges == ()


def test_search_by_time_passes_over_what_was_given_up():
    with Machine() as machine:
        log, topic = opened(machine, create=True)
        for number, payload in enumerate(SENT):
            topic.append(payload, publish_time=1000 + number)
            topic.flush()
        log.close()
        machine._logs.clear()
        flip(machine, 12)
        log, _ = opened(machine)
        log.give_up(NAME)
        found = log.topic(NAME).find_time(1012, 10, COUNT)
        assert found == 13


def test_files_from_before_are_trimmed_like_others():
    with a_machine() as machine:
        flip(machine, 12)
        cut(machine)
        log, _ = opened(machine)
        log.give_up(NAME)
        topic = log.topic(NAME)
        topic.append(b"next")
        topic.flush()
        assert topic.wal.trim(38) == 7
        assert topic.earliest == 35
        log.close()
        machine._logs.clear()
        log, topic = opened(machine)
        assert topic.state is TopicState.OPEN
        assert payloads(topic.read()) == [*SENT[35:37], b"next"]
        assert topic.wal.trim(41) == 1
        log.close()
        machine._logs.clear()
        log, topic = opened(machine)
        assert (topic.state, topic.earliest, topic.watermarks.next) == (TopicState.OPEN, 40, 41)


def test_file_that_is_lost_after_that_is_damage():
    with a_machine() as machine:
        cut(machine)
        gave_up(machine)
        lose(machine, 4)
        assert opened(machine)[1].state is TopicState.QUARANTINED


@each("end_life", [Machine.kill, Machine.cut_power])
@each("harm", ["a backup", "several", "all files"])
def test_crash_at_any_step_is_followed_by_giving_up_the_same(harm, end_life):
    damage, lost = HARM[harm]
    is_done, at = False, 0
    while not is_done:
        at += 1
        with a_machine() as machine:
            damage(machine)
            log, _ = opened(machine)
            machine.fs.before = Crash(at)
            with suppress(SimulatedCrash):
                log.give_up(NAME)
                is_done = True
            machine.fs.before = lambda kind, path: None
            end_life(machine)
            assert set(gave_up(machine).ranges) <= set(lost), at
            check_goes_on(machine, lost)
    assert at > 5


# -- with a bucket ------------------------------------------------------------------------------

TIERED = 20


def site_opened(site, **settings):
    return site.open(scheduler=NoThreads(), **{**SETTINGS, **settings})


def a_site_log(site, **settings):
    """A log with the topic open: objects of five messages up to 20, the rest in local files."""
    log = site_opened(site, **settings)
    topic = log.topic(NAME, create=True)
    for _ in range(TIERED // PER_FILE):
        fill(topic, PER_FILE, size=900)
        topic.upload()
    fill(topic, COUNT - TIERED, size=900)
    return log


def a_cold_log(site):
    """A log of which all but the end is in the bucket alone."""
    log = a_site_log(site, retention={"time_minutes": 0, "size_mb": 0})
    log.topic(NAME).upload()
    site.pass_time(log, 60)
    assert log.topic(NAME).bucket.retention.trim() > 3
    return log


def check_site_goes_on(site, lost, *, next_offset=COUNT):
    """The topic has what is left, from both tiers and from the bucket alone."""
    log = site_opened(site)
    topic = log.topic(NAME)
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, next_offset)
    assert payloads(topic.read("earliest")) == left(lost)
    assert sum(batch.num_rows for batch in topic.read_arrow("earliest")) == len(left(lost))
    assert topic.append(b"next") == next_offset
    topic.upload()
    report = log.repair(NAME)
    assert (report.errors, report.objects) == ((), ())
    assert log.give_up(NAME, is_dry=True).ranges == ()
    log.close()
    topic = site.open("b").topic(NAME, take_over=True)
    assert payloads(topic.read("earliest")) == [*left(lost), b"next"]
    ranges = site.ranges()
    assert all(one[1] == other[0] for one, other in pairwise(ranges))


def lose_object(site):
    site.objects.drop(site.key(10))


def forget_object(site):
    lose_object(site)
    site.metadata.delete(site.catalog().keys.descriptor(10))


def flip_object(site):
    starts = scan_frames(site.objects.read(site.key(10), 0, 1 << 20), expected_offset=10).starts
    site.objects.corrupt(site.key(10), starts[2] + 40)


@pytest.mark.parametrize(
    ("damage", "lost"),
    [(lose_object, [(10, 15)]), (forget_object, [(10, 15)]), (flip_object, [(12, 13)])],
)
def test_object_that_is_lost_or_damaged_is_given_up(site, damage, lost):
    log = a_cold_log(site)
    damage(site)
    assert len(log.repair(NAME).errors) == 1
    plan = log.give_up(NAME, is_dry=True)
    assert (list(plan.ranges), plan.next_offset) == (lost, COUNT)
    with pytest.raises((NotFoundError, CorruptDataError, DataGapError)):
        payloads(log.topic(NAME).read())
    assert log.give_up(NAME) == plan
    assert payloads(log.topic(NAME).read()) == left(lost)
    log.close()
    check_site_goes_on(site, lost)


SITE_HARM = {
    "the end": (lambda site: cut(site.files()), [(37, 40)]),
    "a frame": (lambda site: flip(site.files(), 27), [(27, 28)]),
    "a file": (lambda site: lose(site.files(), 5), [(25, 30)]),
    "both tiers": (
        lambda site: (
            site.objects.drop(site.key(10)),
            flip(site.files(), 12),
            lose(site.files(), 6),
        ),
        [(12, 13), (30, 35)],
    ),
}


@each("harm", list(SITE_HARM))
def test_files_that_the_bucket_does_not_make_up_for_are_given_up(harm):
    damage, lost = SITE_HARM[harm]
    with Site() as site:
        log = a_site_log(site)
        log.close()
        damage(site)
        log = site_opened(site)
        assert log.repair(NAME).errors
        plan = log.give_up(NAME)
        assert (list(plan.ranges), plan.next_offset) == (lost, COUNT)
        log.close()
        check_site_goes_on(site, lost)


def test_topic_continues_behind_its_cursors(site):
    log = a_site_log(site)
    save_cursor(log.topic(NAME).bucket.owned, "sub", 45)
    log.close()
    cut(site.files())
    log = site_opened(site)
    assert log.give_up(NAME).ranges == ((37, 45),)
    log.close()
    check_site_goes_on(site, [(37, 40)], next_offset=45)


def test_catalog_rebuilt_from_the_bucket_knows_what_was_given_up(site):
    log = a_cold_log(site)
    lose_object(site)
    log.give_up(NAME)
    log.close()
    for found in site.metadata.range("/danube/storage/"):
        site.metadata.delete(found.key)
    site.metadata.delete(site.catalog().keys.record)
    rebuilt = rebuild_topic(
        site.objects,
        site.metadata,
        site.catalog().keys,
        [*list_objects(site.objects, site.catalog().keys.topic)],
        clock=site.clock,
        dry_run=False,
    )
    assert list(rebuilt.gaps) == []
    topic = site.open("b").topic(NAME, take_over=True)
    assert payloads(topic.read("earliest")) == left([(10, 15)])


def test_gap_from_before_there_was_a_bucket_becomes_part_of_it(site):
    """Goal: a topic with gaps gets a bucket; it opens read-only until the bucket knows of them."""
    log = site_opened(site, storage={"mode": "local_only"})
    fill(log.topic(NAME, create=True), COUNT, size=900)
    log.close()
    flip(site.files(), 12)
    log = site_opened(site, storage={"mode": "local_only"})
    log.give_up(NAME)
    log.close()
    log = site_opened(site)
    assert log.topic(NAME).state is TopicState.QUARANTINED
    assert log.give_up(NAME).ranges == ((12, 13),)
    log.close()
    check_site_goes_on(site, [(12, 13)])


def test_crash_at_any_step_with_a_bucket_is_followed_by_giving_up_the_same():
    damage, lost = SITE_HARM["both tiers"]
    is_done, at = False, 0
    while not is_done:
        at += scaled(3, 1)
        with Site() as site:
            a_site_log(site).close()
            damage(site)
            log = site_opened(site)
            log.topic(NAME)
            crash = Crash(at)
            crash.arm(site)
            with suppress(SimulatedCrash):
                log.give_up(NAME)
                is_done = True
            Crash.disarm(site)
            site.kill(log)
            try:
                log = site_opened(site)
                assert set(log.give_up(NAME).ranges) <= set(lost)
                log.close()
                check_site_goes_on(site, lost)
            except Exception as error:
                error.add_note(f"after a crash before step {at}: {crash.step}")
                raise
    assert at > 30
