"""Opening a topic over two tiers: which of them is right, and what becomes of the other one."""

import copy
import random

import pytest

from ister.base.model import TopicState
from ister.bucket.names import TopicKeys, object_key, terms_prefix
from ister.errors import (
    CapacityError,
    ConflictError,
    CorruptDataError,
    FencedError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.format.frame import scan_frames
from ister.format.records import encode_topic
from ister.rescue.rebuild import find_topics, rebuild_topic
from ister.topic.node import INSTANCES_NAME
from ister.topic.reconcile import finish_set_aside, measure_backlog, remove_directory, set_aside
from ister.wal.directory import WalDirectory
from ister.wal.log import Wal
from ister.wal.recovery import recover
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.crash import Crash, crashing
from tests.support.machine import ROOT, Disk, NoThreads, fill, numbered, payloads
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash
from tests.support.stores import NAME, PREFIX, TTL_SECONDS, Site, calm, silent

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"
FILE = f"{PATH}/wal.log"
PARENT = PATH.rpartition("/")[0]
ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 1}
KEEP_NOTHING = {"retention": {"time_minutes": 0, "size_mb": 0}}


def content(site, path=PATH):
    return site.files().content(path)


def logs_of(found):
    return {name: data for name, data in found.items() if name.endswith(".log")}


def aside(fs):
    """The directories that were set aside."""
    return [
        f"{PARENT}/{name}"
        for name in fs.list_directory(PARENT)
        if name.startswith(f"{NAME.topic}.aside")
    ]


def looked_at(site, calls):
    """The keys that were asked for in the bucket since, but for the metadata store's revision."""
    keys = {key for _, key in site.objects.calls[calls:]}
    return {key for key in keys if not key.startswith("storage/metadata/")}


def snapshot(site, disk="a"):
    return copy.deepcopy(site.disk(disk)._root)


def restore(site, root, disk="a", *, is_confirmed=False):
    """Puts an older copy in the place of the files; confirmed as an operator would."""
    site.disk(disk)._root = copy.deepcopy(root)
    if is_confirmed:
        site.disk(disk).remove(f"{ROOT}/{INSTANCES_NAME}")


# -- another node has written since -------------------------------------------------------------


def overtaken(site, of_b=5):
    """Ten messages in the bucket, three on the disk of `a` alone, and more by `b`."""
    log = site.open("a")
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    topic.upload()
    fill(topic, 3, tag=b"given up ")
    site.kill(log)
    other = site.open("b")
    site.pass_time(other, TTL_SECONDS + 1)
    topic = other.topic(TEXT, take_over=True)
    assert topic.watermarks.next == 10
    sent += fill(topic, of_b, tag=b"of b ")
    return other, sent


@pytest.mark.parametrize("of_b", [5, 0], ids=["overtaken", "given up"])
def test_files_that_another_node_has_overtaken_are_set_aside_whole(site, of_b):
    """Goal: an old disk that comes back adds nothing, even under offsets that are still free."""
    other, sent = overtaken(site, of_b)
    before, end = content(site), 10 + of_b
    assert other.seal(TEXT) == end
    topic = site.open("a").topic(TEXT)
    (where,) = aside(site.disk())
    assert content(site, where) == before
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, end)
    assert payloads(topic.read()) == sent
    assert topic.append(b"on") == end
    topic.upload()
    assert payloads(topic.read()) == [*sent, b"on"]
    assert site.ranges()[-1] == (end, end + 1)


# -- behind the bucket --------------------------------------------------------------------------


def test_files_restored_from_an_older_copy_are_set_aside_if_an_operator_says_so(site):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    log.close()
    older = snapshot(site)
    log = site.open()
    topic = log.topic(TEXT)
    sent += fill(topic, 10)
    topic.upload()
    log.close()
    restore(site, older, is_confirmed=True)
    before = logs_of(content(site))
    log = site.open()
    with pytest.raises(WaitsForDiskError, match="end at offset 10, but had reached offset 20"):
        log.topic(TEXT)
    topic = log.topic(TEXT, take_over=True)
    (where,) = aside(site.disk())
    assert logs_of(content(site, where)) == before
    assert (topic.state, topic.watermarks.next, topic.watermarks.tiered) == (
        TopicState.OPEN,
        20,
        20,
    )
    sent += fill(topic, 2)
    topic.upload()
    assert payloads(topic.read()) == sent
    assert site.ranges()[-1] == (20, 22)
    site.kill(log)
    site.disk().crash(random.Random(7))
    topic = site.open().topic(TEXT)
    assert topic.append(b"on") == 22
    topic.flush()
    assert payloads(topic.read()) == [*sent, b"on"]


def test_older_copy_of_the_files_is_refused_until_confirmed(site):
    """Goal: a restored backup does not give out offsets again that were acknowledged since."""
    log = site.open()
    fill(log.topic(TEXT, create=True), 10)
    older = snapshot(site)
    fill(log.topic(TEXT), 10)  # acknowledged, and in these files alone
    log.close()
    newest = snapshot(site)
    restore(site, older)
    with pytest.raises(ConflictError, match="older copy") as refused:
        site.open()
    assert ".instances" in refused.value.hint
    restore(site, newest)
    log = site.open()
    assert log.topic(TEXT).watermarks.next == 20
    log.close()
    restore(site, older, is_confirmed=True)
    assert site.open().topic(TEXT).watermarks.next == 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_written", [False, True])
def test_new_topic_is_the_same_without_its_first_checkpoint(site, seed, is_written):
    """Goal: that checkpoint is not synced, because the metadata store has what it says."""
    log = site.open(scheduler=NoThreads())
    topic = log.topic(TEXT, create=True, ack="written", codec="bincode1")
    sent = fill(topic, 5) if is_written else []
    assert (
        WalDirectory(site.disk(), PATH).load_state().incarnation
        == topic.bucket.owned.record.incarnation
    )
    site.kill(log)
    site.disk().crash(random.Random(seed))
    topic = site.open().topic(TEXT)
    assert (topic.ack, topic.codec, topic.state) == ("written", "bincode1", TopicState.OPEN)
    assert topic.append(b"on") == len(sent)
    topic.flush()
    assert payloads(topic.read()) == [*sent, b"on"]


def test_files_that_end_where_the_bucket_does_stay(site):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    topic.upload()
    log.close()
    calls = len(site.objects.calls)
    topic = site.open().topic(TEXT)
    assert aside(site.disk()) == []
    assert topic.watermarks.trimmed == 0
    assert looked_at(site, calls) == {terms_prefix(NAME)}
    assert payloads(topic.read()) == sent


@pytest.mark.parametrize("at", ["first frame", "last frame"])
def test_damage_only_where_the_bucket_has_it_is_set_aside(site, at):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    topic.upload()
    log.close()
    whole = site.files().read(FILE)
    site.files().flip(FILE, 30 if at == "first frame" else len(whole) - 5)
    damaged = logs_of(content(site))
    topic = site.open().topic(TEXT)
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, 10)
    (where,) = aside(site.disk())
    assert logs_of(content(site, where)) == damaged
    sent += fill(topic, 2)
    assert payloads(topic.read()) == sent


def test_damage_that_the_bucket_does_not_have_is_quarantined_and_stays(site):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    topic.upload()
    fill(topic, 5)
    log.close()
    key = site.catalog().keys.progress("billing")
    site.metadata.put(key, b'{"offset":15,"timestamp":0}')
    site.files().flip(FILE, len(site.files().read(FILE)) - 5)
    before = content(site)
    log = site.open()
    topic = log.topic(TEXT)
    assert topic.state is TopicState.QUARANTINED
    assert topic.damage[0].offset == 14
    with pytest.raises(CorruptDataError):
        topic.append(b"x")
    assert payloads(topic.read(0, end=14))[:10] == sent
    assert b'"offset":15' in site.metadata.get(key).value, "it may be there after the repair"
    log.close()
    assert content(site) == before
    assert aside(site.disk()) == []


@pytest.mark.parametrize("size", [1, 2048, None], ids=["a byte", "many frames", "all the rest"])
def test_messages_behind_damage_that_the_bucket_does_not_have_are_not_given_up(site, size):
    """Goal: acknowledged frames above `tiered`, behind damage below it, keep their offsets."""
    sent = [b"m%d" % number for number in range(1000)]
    log = site.open()
    topic = log.topic(TEXT, create=True)
    topic.append_many(sent[:500])
    topic.flush()
    topic.upload()
    topic.append_many(sent[500:])
    topic.flush()
    site.kill(log)
    data = site.files().read(FILE)
    at = data.find((498).to_bytes(8, "little"))
    garbage = b"\xaa" * (size or len(data) - at)
    site.files().overwrite(FILE, at + (20 if size == 1 else 0), garbage)
    topic = site.open().topic(TEXT)
    assert topic.state is TopicState.QUARANTINED
    assert site.disk().list_directory(PARENT) == [NAME.topic]
    if size is not None:
        assert topic.wal.next == 1000
        assert payloads(topic.read(990)) == sent[990:]


def test_cursors_ahead_of_what_is_left_are_put_back(site):
    other, _ = overtaken(site)
    keys = site.catalog().keys
    for name, offset in {"behind": 4, "ahead": 99}.items():
        site.metadata.put(keys.progress(name), b'{"offset":%d,"timestamp":0}' % offset)
    other.seal(TEXT)
    site.open("a").topic(TEXT)
    found = {s.name: s.progress.offset for s in site.catalog().subscriptions()}
    assert found == {"behind": 4, "ahead": 15}


# -- who owns it ------------------------------------------------------------------------------


def test_two_owners_of_one_epoch_are_told_apart(site):
    """Goal: an older copy of the metadata was restored, and another node claimed from it."""
    log_a = site.open("a")
    log_a.topic(TEXT, create=True)
    log_a.close()
    older = site.catalog().record()[0]
    log_a = site.open("a")
    a = log_a.topic(TEXT)
    a.append_many([b"a"] * 5)
    a.flush()
    keys = a.bucket.owned.catalog.keys
    site.metadata.put(keys.record, encode_topic(older))
    site.metadata.delete(keys.owner)
    b = site.open("b").topic(TEXT, take_over=True)
    assert b.bucket.owned.epoch == a.bucket.owned.epoch
    b.append_many([b"b"] * 3)
    b.flush()
    b.upload()
    with pytest.raises(FencedError):
        a.upload()
    assert site.ranges() == [(0, 3)]


def test_unreadable_record_of_one_topic_leaves_the_others_their_lease(site):
    log = site.open()
    a, b = log.topic("/default/a", create=True), log.topic("/default/b", create=True)
    site.metadata.put(a.bucket.owned.catalog.keys.record, b'{"epoch": 7, "ack": "replicated"}')
    site.clock.advance(60)
    log.stores.membership.renew()
    b.wait(b.append(b"x"))
    with pytest.raises(FencedError):
        a.wait(a.append(b"x"))


# -- objects that the catalog has forgotten -----------------------------------------------------


def forgetful(site, *, parts=4, keep=1):
    """A topic of which local files have only the end, with a catalog that knows `keep` objects."""
    log = site.open(**ROTATE, **KEEP_NOTHING)
    topic = log.topic(TEXT, create=True)
    sent = []
    for _ in range(parts):
        sent += fill(topic, 10, size=500)
        topic.upload()
    site.clock.advance(60)
    log.stores.membership.renew()
    topic.bucket.retention.trim()
    trimmed = topic.watermarks.trimmed
    assert trimmed > 10 * (parts - 1)
    log.close()
    keys = site.catalog().keys
    ids = [described.object_id for described, _ in site.catalog().descriptors()]
    for number in range(keep, parts):
        site.metadata.delete(keys.descriptor(10 * number))
    if keep:
        site.metadata.put(keys.current, b'{"start":"%020d"}' % (10 * (keep - 1)))
    else:
        site.metadata.delete(keys.current)
    return sent, [object_key(NAME, object_id) for object_id in ids], trimmed


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_objects_that_continue_the_catalog_are_adopted(site, keep):
    sent, _, _ = forgetful(site, keep=keep)
    before = [described for described, _ in site.catalog().descriptors()]
    topic = site.open().topic(TEXT)
    assert (topic.state, topic.watermarks.tiered) == (TopicState.OPEN, 40)
    assert site.ranges() == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert [d for d, _ in site.catalog().descriptors()][:keep] == before
    assert topic.append(b"on") == 40
    topic.upload()
    assert payloads(topic.read()) == [*sent, b"on"]
    assert topic.bucket.repair_objects().errors == []


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_adoption_ends_at_the_first_object_that_is_not_whole(site, how):
    sent, ids, trimmed = forgetful(site)
    data = site.objects.read(ids[2], 0, 1 << 20)
    if how == "lost":
        site.objects.drop(ids[2])
    else:
        site.objects.corrupt(ids[2], 100)
    log = site.open()
    assert log.topic(TEXT).state is TopicState.QUARANTINED
    log.close()
    log = site.open()
    topic = log.topic(TEXT)
    assert topic.state is TopicState.QUARANTINED
    assert site.ranges() == [(0, 10), (10, 20)]
    (damage,) = topic.damage
    assert damage.offset == 20
    assert f"20 up to, not including, {trimmed}" in damage.reason
    assert payloads(topic.read(0, end=20)) == sent[:20]
    assert payloads(topic.read(trimmed)) == sent[trimmed:]
    with pytest.raises(CorruptDataError) as refused:
        topic.append(b"x")
    assert refused.value.offset == 20
    with pytest.raises(CorruptDataError) as gap:
        list(topic.read(15))
    assert (gap.value.start, gap.value.end) == (20, trimmed)
    log.close()
    site.objects.put(ids[2], data)
    topic = site.open().topic(TEXT)
    assert (topic.state, payloads(topic.read())) == (TopicState.OPEN, sent)


def test_local_files_that_reach_back_far_enough_need_no_adoption(site):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    topic.upload()
    sent += fill(topic, 10)
    topic.upload()
    log.close()
    keys = site.catalog().keys
    site.metadata.delete(keys.descriptor(10))
    site.metadata.put(keys.current, b'{"start":"%020d"}' % 0)
    calls = len(site.objects.calls)
    topic = site.open().topic(TEXT)
    assert looked_at(site, calls) == {terms_prefix(NAME)}
    assert (topic.state, topic.watermarks.tiered) == (TopicState.OPEN, 10)
    topic.upload()
    assert site.ranges() == [(0, 10), (10, 20)]
    assert payloads(topic.read()) == sent


def test_bucket_that_is_silent_while_objects_are_looked_for_opens_nothing(site):
    """Goal: a hole is not told before it is known to be one."""
    sent, _, _ = forgetful(site)
    before = content(site)
    log = site.open()
    site.objects.before = silent
    with pytest.raises(UnavailableError):
        log.topic(TEXT)
    site.objects.before = calm
    assert content(site) == before
    assert payloads(log.topic(TEXT).read()) == sent


# -- two histories under the same offsets -------------------------------------------------------


def rebuild(site):
    """The metadata of the topic, from the bucket alone."""
    site.metadata.delete_prefix("/danube/")
    objects = find_topics(site.objects)[NAME]
    report = rebuild_topic(
        site.objects,
        site.metadata,
        TopicKeys(PREFIX, NAME),
        objects,
        clock=site.clock,
        dry_run=False,
    )
    assert report.status == "recovered"


def diverged(site, *, of_a, of_b):
    """Five messages that both nodes have; then `of_a` on the disk of a, `of_b` in the bucket."""
    log = site.open("a")
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 5)
    topic.upload()
    fill(topic, of_a, tag=b"of a ")
    log.close()
    other = site.open("b")
    topic = other.topic(TEXT, take_over=True)
    sent += fill(topic, of_b, tag=b"of b ")
    topic.upload()
    other.close()
    rebuild(site)
    return sent


@pytest.mark.parametrize(("of_a", "differ_at"), [(3, 7), (9, 11)], ids=["shorter", "longer"])
def test_files_with_other_messages_than_the_bucket_are_refused(site, of_a, differ_at):
    """Goal: which of two histories is read must not depend on whether files were trimmed."""
    sent = diverged(site, of_a=of_a, of_b=7)
    before = content(site)
    log = site.open("a")
    with pytest.raises(ConflictError, match="different messages") as refused:
        log.topic(TEXT)
    assert (refused.value.offset, refused.value.path) == (differ_at, PATH)
    assert content(site) == before
    assert aside(site.disk()) == []
    log.close()
    # A person moves away what is not wanted, and says so.
    fs = site.disk()
    fs.rename(PATH, f"{ROOT}/kept")
    fs.sync_directory(PARENT)
    topic = site.open("a").topic(TEXT, take_over=True)
    assert topic.watermarks.next == 12
    assert payloads(topic.read()) == sent


def test_files_with_the_beginning_of_what_the_bucket_has_are_set_aside(site):
    """Goal: the same messages, only fewer, are no conflict."""
    sent = diverged(site, of_a=0, of_b=7)
    topic = site.open("a").topic(TEXT)
    assert len(aside(site.disk())) == 1
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, 12)
    assert payloads(topic.read()) == sent


@pytest.mark.timeout(5)
@pytest.mark.parametrize("on_damage", ["error", "skip", None])
def test_damaged_or_lost_object_is_no_witness_against_local_files(site, on_damage):
    diverged(site, of_a=3, of_b=7)
    key = site.key(7)
    storage = {}
    if on_damage is None:
        site.objects.drop(key)
    else:
        scan = scan_frames(site.objects.read(key, 0, 1 << 20), expected_offset=5)
        site.objects.corrupt(key, scan.starts[2] + 30)
        storage = {"cloud_reader": {"on_damage": on_damage}}
    topic = site.open("a", storage=storage).topic(TEXT)
    (where,) = aside(site.disk())
    assert b"of a" in content(site, where)["wal.log"]
    assert topic.watermarks.next == 12


def test_files_that_end_with_a_rotation_are_compared_all_the_same(site):
    """Goal: the index of a file that is complete ends behind its last frame."""
    log = site.open("a", scheduler=NoThreads(), **ROTATE)
    topic = log.topic(TEXT, create=True)
    fill(topic, 5, size=900)
    topic.append(b"of a, and never written")
    with crashing("wal.before_write"):
        topic.flush()
    site.kill(log)
    assert site.disk().exists(f"{PATH}/wal.1.log")
    other = site.open("b")
    site.pass_time(other, TTL_SECONDS + 1)
    topic = other.topic(TEXT, take_over=True)
    fill(topic, 7, tag=b"of b ")
    topic.upload()
    other.close()
    rebuild(site)
    with pytest.raises(ConflictError, match="different messages") as refused:
        site.open("a").topic(TEXT)
    assert refused.value.offset == 4


# -- setting aside ------------------------------------------------------------------------------


OLD = {"wal.log": b"frames", "wal.ckpt": b"where they end", "wal.origin": b""}
KINDS = frozenset(
    {"create", "rename", "sync_directory", "make_directory", "remove", "remove_directory"}
)


def a_directory():
    """A topic's directory with files, all durable."""
    fs = MemoryFileSystem()
    fs.make_directories(PATH)
    for name, data in OLD.items():
        Disk(fs).create(f"{PATH}/{name}", data)
    return fs, WalDirectory(fs, PATH)


def crashes(action, make=a_directory):
    """A disk and its directory after a crash at each step of `action`, one after the other."""
    fs, directory = make()
    fs.before = count = Crash(0, KINDS)
    action(directory)
    assert count.seen > 1
    for at in range(1, count.seen + 1):
        fs, directory = make()
        fs.before = step = Crash(at, KINDS)
        with pytest.raises(SimulatedCrash):
            action(directory)
        yield fs, directory, f"before step {at}: {step.step}"


def put_aside(directory):
    return set_aside(directory, "a test")


def test_every_directory_set_aside_has_a_name_of_its_own():
    fs, directory = a_directory()
    found = {put_aside(directory) for _ in range(3)}
    assert len(found) == 3
    assert sorted(found) == sorted(aside(fs))


def test_names_of_what_is_set_aside_are_no_topics(site):
    log = site.open()
    fill(log.topic(TEXT, create=True), 1)
    log.close()
    put_aside(WalDirectory(site.disk(), PATH))
    site.disk().make_directories(f"{PATH}.fresh")
    assert site.open().topics() == [TEXT]


def test_crash_while_setting_aside_never_looks_like_a_loss():
    """Goal: a topic whose directory is gone is refused, and this one's is not.

    And the old files are all that is left of messages that were not tiered: they stay, whatever
    comes between the two renames. Without a seed, the process is killed; else the power is cut.
    """
    seen = set()
    for seed in (None, *range(30)):
        for fs, directory, step in crashes(put_aside):
            fs.kill() if seed is None else fs.crash(random.Random(seed))
            seen.add(Disk(fs).content(PATH) == OLD if fs.exists(PATH) else None)
            finish_set_aside(directory)
            assert not directory.is_blank(), step
            assert Disk(fs).content(PATH) in (OLD, {"wal.origin": b""}), step
            assert not fs.exists(f"{PATH}.fresh"), step
            fs.kill() if seed is None else fs.crash(random.Random(seed))
            assert not directory.is_blank(), step
            assert [Disk(fs).content(path) for path in (PATH, *aside(fs))].count(OLD) == 1, step
    assert seen == {True, False, None}


def interrupted():
    """As `set_aside` leaves it when it is interrupted between its two renames."""
    fs, directory = a_directory()
    with crashing("tier.after_set_aside"):
        put_aside(directory)
    fs.kill()
    assert not fs.exists(PATH)
    return fs, directory


def left_over():
    """As it leaves it when it is interrupted before the first one."""
    fs, directory = a_directory()
    WalDirectory(fs, f"{PATH}.fresh").mark()
    return fs, directory


@each("state", [interrupted, left_over])
def test_killed_while_finishing_the_next_one_finishes(state):
    fs, _ = state()
    wanted = {"wal.origin": b""} if state is interrupted else OLD
    kept = [Disk(fs).content(path) for path in aside(fs)]
    for fs, directory, step in crashes(finish_set_aside, make=state):
        fs.kill()
        finish_set_aside(directory)
        assert Disk(fs).content(PATH) == wanted, step
        assert not fs.exists(f"{PATH}.fresh"), step
        assert [Disk(fs).content(path) for path in aside(fs)] == kept, step


def test_half_made_directory_gets_its_mark_when_it_takes_its_place():
    fs, directory = interrupted()
    fs.remove(f"{PATH}.fresh/wal.origin")
    finish_set_aside(directory)
    assert Disk(fs).content(PATH) == {"wal.origin": b""}


def test_nothing_to_finish_changes_nothing():
    fs, directory = a_directory()
    fs.before = count = Crash(0, KINDS)
    finish_set_aside(directory)
    assert count.seen == 0
    assert Disk(fs).content(PATH) == OLD
    fs.before = lambda kind, path: None
    remove_directory(fs, PATH)
    finish_set_aside(directory)
    assert not fs.exists(PATH)


# -- removing -----------------------------------------------------------------------------------


def test_directory_whose_removal_was_interrupted_is_removed_by_the_next_one():
    def remove(directory):
        remove_directory(directory.fs, directory.path)

    for seed in range(5):
        for number, (fs, _, step) in enumerate(crashes(remove)):
            if seed:
                fs.crash(random.Random(100 * seed + number))
            else:
                fs.kill()
            remove_directory(fs, PATH)
            assert not fs.exists(PATH), step
    fs, _ = a_directory()
    remove_directory(fs, PATH)
    fs.crash(random.Random(0))
    assert not fs.exists(PATH)


# -- what waits for its upload ------------------------------------------------------------------


def backlog(tiered):
    """Three files with the offsets 0 to 4, 5 to 9 and 10 to 11."""
    with Site(clock=ManualClock()) as site:
        log = site.open(storage={"mode": "local_only"}, **ROTATE)
        topic = log.topic(TEXT, create=True)
        fill(topic, 12, size=900)
        assert [file.first_offset for file in topic.wal.files] == [0, 5, 10]
        log.close()
        directory = WalDirectory(site.disk(), PATH)
        sizes = [len(site.files().read(directory.log_path(s))) for s in directory.log_seqs()]
        handles = site.disk().open_files
        found = measure_backlog(directory, recover(directory), tiered)
        assert site.disk().open_files == handles
        return found, sizes


@each(("tiered", "files"), [(0, 3), (4, 3), (5, 2), (9, 2), (10, 1), (11, 1), (12, 0), (99, 0)])
def test_backlog_counts_the_files_that_are_not_tiered_whole(tiered, files):
    found, sizes = backlog(tiered)
    assert found == sum(sizes[len(sizes) - files :])


def test_backlog_of_an_empty_log_is_nothing():
    fs = MemoryFileSystem()
    directory = WalDirectory(fs, PATH)
    assert measure_backlog(directory, recover(directory), 0) == 0


def test_lag_after_opening_is_what_waits(site):
    log = site.open(**ROTATE)
    topic = log.topic(TEXT, create=True)
    fill(topic, 12, size=900)
    log.close()
    log = site.open(**ROTATE)
    topic = log.topic(TEXT)
    directory = WalDirectory(site.disk(), PATH)
    sizes = [len(site.files().read(directory.log_path(s))) for s in directory.log_seqs()]
    assert topic.bucket.uploads.lag_bytes == sum(sizes)
    topic.upload()
    assert topic.bucket.uploads.lag_bytes == 0


def test_topic_that_was_handed_over_to_a_full_disk_can_be_opened_elsewhere(site, monkeypatch):
    """The claim has consumed the seal: without it, everyone would wait for a disk with nothing."""
    first = site.open("a")
    first.topic(TEXT, create=True).append_many(numbered(3))
    first.seal(TEXT)

    def fail(_wal, **_options):
        raise CapacityError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Wal, "save_checkpoint", fail)
        with pytest.raises(CapacityError):
            site.open("b").topic(TEXT)
    sealed, _ = site.catalog().sealed()
    assert sealed.next_offset == 3
    again = first.topic(TEXT)
    assert payloads(again.read()) == numbered(3)
    assert again.append(b"x") == 3
