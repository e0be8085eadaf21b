"""The stores that topics share: who this node is, claims, manifests, deletions, probes."""

import random
import re
import threading
from contextlib import suppress

import pytest

from ister.base.clock import SystemClock
from ister.base.model import TopicState
from ister.bucket.names import manifest_key, object_key
from ister.bucket.topic_manifest import load_manifest
from ister.errors import ClosedError, ConflictError, FencedError, NotFoundError, UnavailableError
from ister.objectstore.base import Capabilities
from ister.topic.node import NODE_NAME, Node
from tests.support.cases import each
from tests.support.crash import Crash, crashing
from tests.support.machine import ROOT, Disk, NoThreads, Task, eventually, fill, numbered, payloads
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash
from tests.support.memory_store import MemoryObjectStore
from tests.support.stores import NAME, TTL_SECONDS, Site, calm, silent

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"
NODE = f"{ROOT}/{NODE_NAME}"
ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 1}
KEEP_NOTHING = {"retention": {"time_minutes": 0, "size_mb": 0}}


@pytest.fixture
def live_site():
    """With the machine's own clock, for threads."""
    with Site(clock=SystemClock()) as site:
        yield site


def opened(site, disk="a", **settings):
    return site.open(disk, scheduler=NoThreads(), **settings)


def lose_directory(site, disk="a"):
    fs = site.disk(disk)
    for name in fs.list_directory(PATH):
        fs.remove(f"{PATH}/{name}")
    fs.remove_directory(PATH)
    fs.sync_directory(PATH.rpartition("/")[0])


# -- who this is --------------------------------------------------------------------------------


def a_root():
    fs = MemoryFileSystem()
    fs.make_directories(ROOT)
    return fs


def is_identity(node):
    return re.fullmatch("[0-9a-f]{16}", node) is not None


def test_identity_is_made_once_and_kept():
    fs = a_root()
    node = Node(fs, ROOT).id
    assert is_identity(node)
    assert [Node(fs, ROOT).id for _ in range(3)] == [node] * 3
    for seed in range(5):
        fs.crash(random.Random(seed))
        assert Node(fs, ROOT).id == node
    assert fs.open_files == 0


def test_every_directory_is_another_node():
    assert len({Node(a_root(), ROOT).id for _ in range(20)}) == 20


@each("seed", range(6))
def test_crash_while_the_identity_is_made_leaves_none_or_a_whole_one(seed):
    steps = 0
    for at in range(1, 20):
        fs = a_root()
        fs.before = crash = Crash(at)
        try:
            Node(fs, ROOT)
        except SimulatedCrash:
            steps += 1
        else:
            break
        if seed:
            fs.crash(random.Random(100 * seed + at))
        else:
            fs.kill()
        node = Node(fs, ROOT).id
        assert is_identity(node), crash.step
        assert Node(fs, ROOT).id == node
        fs.crash(random.Random(seed))
        assert Node(fs, ROOT).id == node, "it was used, so it has to stay"
    assert steps >= 4


@each(
    "data",
    [b"", b"\0" * 17, b"0123456789abcde\n", b"0123456789abcdef0\n", b"x" * 5000, b"\xff" * 16],
    ids=["empty", "zeros", "short", "long", "huge", "not text"],
)
def test_file_that_is_no_identity_is_replaced_by_one(data):
    fs = a_root()
    Disk(fs).create(NODE, data)
    node = Node(fs, ROOT).id
    assert is_identity(node)
    assert Node(fs, ROOT).id == node


@each("data", [b"0123456789abcdef", b"0123456789abcdef\n", b" 0123456789abcdef\r\n"])
def test_identity_is_read_with_or_without_an_end_of_line(data):
    fs = a_root()
    Disk(fs).create(NODE, data)
    assert Node(fs, ROOT).id == "0123456789abcdef"


# -- what may be claimed ------------------------------------------------------------------------


@pytest.mark.parametrize("tiered", [0, 7])
def test_lost_directory_of_the_node_that_wrote_last_is_refused(site, tiered):
    log = opened(site)
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, tiered)
    topic.upload()
    fill(topic, 3)
    log.close()
    lose_directory(site)
    record = site.catalog().record()
    log = opened(site)
    for create in (False, True):
        with pytest.raises(ConflictError) as refused:
            log.topic(TEXT, create=create)
        assert (refused.value.topic, refused.value.offset) == (TEXT, tiered)
        assert f"take_over=True continues from offset {tiered}" in refused.value.hint
    assert site.catalog().record() == record, "nothing was claimed"
    assert not site.disk().exists(PATH), "nothing was made that hides the loss"
    topic = log.topic(TEXT, take_over=True)
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, tiered)
    assert topic.append(b"on") == tiered
    topic.upload()
    assert payloads(topic.read()) == [*sent, b"on"]
    log.close()
    assert payloads(opened(site).topic(TEXT).read()) == [*sent, b"on"]


def test_directory_that_has_lost_all_but_its_name_is_lost(site):
    log = opened(site)
    fill(log.topic(TEXT, create=True), 3)
    log.close()
    lose_directory(site)
    site.disk().make_directories(PATH)
    with pytest.raises(ConflictError, match="files are gone"):
        opened(site).topic(TEXT)


def test_directory_with_its_mark_alone_is_a_topic_without_messages(site):
    log = opened(site)
    log.topic(TEXT, create=True)
    site.kill(log)
    fs = site.disk()
    for name in fs.list_directory(PATH):
        if name != "wal.origin":
            fs.remove(f"{PATH}/{name}")
    topic = opened(site).topic(TEXT)
    assert (topic.state, topic.watermarks.next) == (TopicState.OPEN, 0)


def test_topic_of_another_node_is_refused_without_a_trace(site):
    log = opened(site)
    fill(log.topic(TEXT, create=True), 3)
    record = site.catalog().record()
    other = opened(site, "b")
    for take_over in (False, True):
        with pytest.raises(ConflictError, match="open on node"):
            other.topic(TEXT, take_over=take_over)
    site.kill(log)
    site.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(ConflictError, match="not handed it over"):
        other.topic(TEXT)
    assert site.catalog().record() == record
    assert not site.disk("b").exists(PATH)


def test_topic_that_does_not_exist_leaves_no_directory(site):
    log = opened(site)
    with pytest.raises(NotFoundError):
        log.topic(TEXT)
    assert not site.disk().exists(PATH)
    assert log.topics() == []


def test_mark_is_durable_before_the_claim(site):
    log = opened(site)
    fs = site.disk()
    seen = []

    def look(kind, key):
        if kind == "transact" and key == site.catalog().keys.record:
            directory = fs._directory(PATH)
            seen.append((sorted(directory.entries), sorted(directory.durable)))

    site.metadata.before = look
    log.topic(TEXT, create=True)
    site.metadata.before = calm
    assert seen[0] == (["wal.origin"], ["wal.origin"])


def test_topic_that_could_not_be_opened_is_not_kept_by_its_lease(site):
    """Goal: a claim that led to nothing is not renewed for ever."""
    log = opened(site)
    fill(log.topic(TEXT, create=True), 3)
    log.close()
    log = opened(site)

    def fail(kind, path):
        if kind == "open_read" and path.endswith(".log"):
            raise OSError(5, "injected")

    site.disk().before = fail
    with pytest.raises(UnavailableError):
        log.topic(TEXT)
    site.disk().before = calm
    site.clock.advance(TTL_SECONDS + 1)
    log.stores.membership.renew()
    assert site.catalog().owner() is None
    assert payloads(log.topic(TEXT).read()) == numbered(3)


# -- manifests ----------------------------------------------------------------------------------


def test_new_topic_has_a_manifest_that_says_what_it_is(site):
    log = opened(site)
    topic = log.topic(TEXT, create=True, ack="written", codec="bincode1")
    manifest = load_manifest(site.objects, NAME)
    record = site.catalog().record()[0]
    assert (manifest.ack, manifest.codec) == (topic.ack, topic.codec)
    assert (manifest.incarnation, manifest.created_at) == (record.incarnation, record.created_at)
    log.close()
    calls = len(site.objects.calls)
    opened(site).topic(TEXT, create=True)
    assert ("put", manifest_key(NAME)) not in site.objects.calls[calls:], "it is written once"


def test_manifest_that_cannot_be_written_does_not_keep_a_topic_from_being_made(site, caplog):
    def fail(kind, key):
        if kind == "put":
            raise UnavailableError("silent")

    site.objects.before = fail
    topic = opened(site).topic(TEXT, create=True)
    assert topic.append(b"x") == 0
    topic.flush()
    assert "manifest not saved" in caplog.messages
    assert load_manifest(site.objects, NAME) is None


def test_topic_whose_history_nobody_knows_is_refused_before_anything_is_made(site):
    log = opened(site)
    topic = log.topic(TEXT, create=True)
    fill(topic, 3)
    topic.upload()
    log.close()
    site.metadata.delete_prefix("/danube/")
    other = opened(site, "b")
    with pytest.raises(ConflictError, match="bucket has objects") as refused:
        other.topic(TEXT, create=True)
    assert "ister recover" in refused.value.hint
    assert site.catalog().record() is None
    assert not site.disk("b").exists(PATH)
    assert other.topics() == []


# -- deletion -----------------------------------------------------------------------------------


def a_topic_to_delete(site):
    log = opened(site, **ROTATE)
    topic = log.topic(TEXT, create=True)
    for _ in range(3):
        fill(topic, 5, size=900)
        topic.upload()
    fill(topic, 2)
    site.metadata.put(site.catalog().keys.progress("billing"), b'{"offset":3,"timestamp":0}')
    log.topic("/default/other", create=True)
    return log


def check_deleted(site, log):
    """Nothing of the topic is left but its epoch, and it can be made again, empty."""
    keys = site.catalog().keys
    assert [key for key in site.bucket_keys() if "/orders/" in key] == []
    assert site.metadata.range(keys.storage) == []
    assert site.metadata.range(keys.subscriptions) == []
    record = site.catalog().record()[0]
    assert record.state == "deleted"
    assert log.topics() == ["/default/other"]
    with pytest.raises(NotFoundError):
        log.topic(TEXT)
    with pytest.raises(NotFoundError):
        log.delete(TEXT)
    topic = log.topic(TEXT, create=True)
    assert (topic.watermarks.next, payloads(topic.read())) == (0, [])
    assert topic.bucket.owned.epoch > record.epoch
    assert topic.bucket.owned.record.incarnation != record.incarnation
    assert topic.append(b"new") == 0
    topic.upload()
    assert site.ranges() == [(0, 1)]


def test_deleted_topic_leaves_nothing_but_its_epoch(site):
    log = a_topic_to_delete(site)
    log.delete(TEXT)
    assert not site.disk().exists(PATH)
    check_deleted(site, log)


def test_deletion_while_the_bucket_is_silent_is_gone_on_with_in_the_same_process(site):
    log = a_topic_to_delete(site)
    deleted = []

    def fail(kind, key):
        if kind == "delete":
            deleted.append(key)
            if len(deleted) == 2:
                raise UnavailableError("silent")

    site.objects.before = fail
    with pytest.raises(UnavailableError):
        log.delete(TEXT)
    with pytest.raises(NotFoundError):
        log.topic(TEXT)
    log.delete(TEXT)
    site.objects.before = calm
    check_deleted(site, log)


def test_deletion_does_not_wait_for_the_lease_of_the_process_that_began_it(site):
    log = a_topic_to_delete(site)
    with crashing("tier.after_mark_deleting"):
        log.delete(TEXT)
    site.kill(log)
    assert site.catalog().owner() is not None
    log = opened(site)
    log.delete(TEXT)
    assert site.catalog().owner() is None


def test_slow_deletion_deletes_a_topic_that_was_made_since_whole(live_site):
    log = live_site.open()
    log.topic(TEXT, create=True)
    real, has_it, may_go = log.topic, threading.Event(), threading.Event()

    def slow(name, **options):
        topic = real(name, **options)
        if threading.current_thread().name == "slow" and not has_it.is_set():
            has_it.set()
            may_go.wait(60)
        return topic

    log.topic = slow
    deleting = threading.Thread(target=lambda: log.delete(TEXT), name="slow")
    deleting.start()
    assert has_it.wait(60)
    log.delete(TEXT)
    log.topic(TEXT, create=True)
    may_go.set()
    deleting.join(60)
    # It was asked to delete the name, and deletes the topic that has it now, whole.
    assert log.topics() == []


def test_upload_under_way_publishes_nothing_into_a_deleted_topic(live_site):
    log = live_site.open()
    topic = log.topic(TEXT, create=True)
    fill(topic, 10)
    is_under_way, may_go = threading.Event(), threading.Event()

    def before(kind, key):
        if kind == "close" and not is_under_way.is_set():
            is_under_way.set()
            may_go.wait(60)

    live_site.objects.before = before
    uploading = Task(topic.bucket.uploads.upload)
    assert is_under_way.wait(60)
    deleting = Task(log.delete, TEXT)
    may_go.set()
    with suppress(FencedError, ClosedError):
        uploading.result()
    deleting.result()
    live_site.objects.before = calm
    again = log.topic(TEXT, create=True)
    assert (again.earliest, again.wal.next, payloads(again.read())) == (0, 0, [])


# -- probes -------------------------------------------------------------------------------------


class ProbedStore(MemoryObjectStore):
    """A bucket that notes what it is asked about leftovers, and may refuse to answer."""

    def __init__(self, **switches):
        super().__init__(**switches)
        self.ages = []
        self.error = None

    def remove_stale_parts(self, older_than_seconds):
        self.ages.append(older_than_seconds)
        if self.error is not None:
            raise self.error
        return 0


@pytest.mark.parametrize("conditional_create", [True, False])
@pytest.mark.parametrize("supports_copy", [True, False])
def test_probe_notes_what_the_bucket_can_do(site, conditional_create, supports_copy):
    site.objects = ProbedStore(conditional_create=conditional_create, supports_copy=supports_copy)
    stores = opened(site).stores
    assert stores.capabilities is None
    stores.probe()
    assert stores.capabilities == Capabilities(
        conditional_create=conditional_create, copy=supports_copy
    )


@pytest.mark.parametrize(("grace_minutes", "seconds"), [(0, 3600), (30, 3600), (600, 36000)])
def test_probe_removes_leftovers_that_nobody_has_touched_for_long(site, grace_minutes, seconds):
    site.objects = ProbedStore()
    stores = opened(site, storage={"cloud": {"orphan_grace_minutes": grace_minutes}}).stores
    stores.probe()
    assert site.objects.ages == [seconds]


def test_probe_of_a_silent_bucket_is_only_told(site, caplog):
    log = opened(site)
    site.objects.probe = silent
    log.stores.probe()
    assert log.stores.capabilities is None
    (record,) = [r for r in caplog.records if "cannot be used" in r.message]
    assert (record.levelname, record.store) == ("ERROR", site.objects.location)
    assert "silent" in record.error
    topic = log.topic(TEXT, create=True)
    assert topic.append(b"x") == 0
    topic.flush()


def test_leftovers_that_cannot_be_removed_do_not_take_away_what_is_known(site, caplog):
    site.objects = ProbedStore()
    site.objects.error = UnavailableError("silent")
    stores = opened(site).stores
    stores.probe()
    assert stores.capabilities == Capabilities(conditional_create=True, copy=True)
    assert any("cannot be used" in message for message in caplog.messages)


# -- objects that are missing while local files have them ---------------------------------------


def several_objects(site, *, parts=4, **settings):
    log = opened(site, **ROTATE, **KEEP_NOTHING, **settings)
    topic = log.topic(TEXT, create=True)
    sent = []
    for _ in range(parts):
        sent += fill(topic, 5, size=900)
        topic.upload()
    return log, topic, sent


def names_of(site):
    return [described.object_id for described, _ in site.catalog().descriptors()]


def test_check_of_whole_objects_finds_and_reads_nothing(site):
    _, topic, _ = several_objects(site)
    calls = len(site.objects.calls)
    assert topic.bucket.check_recent() == []
    assert {kind for kind, _ in site.objects.calls[calls:]} == {"stat"}
    assert len(site.objects.calls) == calls + 4


@pytest.mark.parametrize("lost", [[1], [0, 2, 3]], ids=["one", "several"])
def test_lost_object_is_uploaded_again_and_nothing_else_is_read(site, lost):
    _, topic, sent = several_objects(site)
    names, keys = names_of(site), [site.key(5 * number) for number in lost]
    data = [site.objects.read(key, 0, 1 << 20) for key in keys]
    for key in keys:
        site.objects.drop(key)
    calls, reads = len(site.objects.calls), len(site.objects.reads)
    assert topic.bucket.check_recent() == [names[number] for number in lost]
    assert len(site.objects.reads) == reads
    written = {key for kind, key in site.objects.calls[calls:] if kind in ("open_writer", "close")}
    keys = [site.key(5 * number) for number in lost]
    assert written == set(keys)
    assert [site.objects.read(key, 0, 1 << 20) for key in keys] == data
    assert payloads(topic.read()) == sent
    assert topic.bucket.check_recent() == []
    assert topic.bucket.repair_objects().objects == []


def test_object_that_is_deleted_with_its_topic_is_not_lost(site, caplog):
    """Goal: a check that runs when the topic is deleted neither reports nor uploads anything."""
    log, topic, _ = several_objects(site)
    bucket = topic.bucket
    descriptors = list(site.catalog().descriptors())

    def delete(kind, key):
        site.objects.before = calm
        log.delete(TEXT)

    # As the background does, which has found the descriptors before the topic was deleted.
    bucket.owned.catalog.descriptors = lambda start: iter(descriptors)
    site.objects.before = delete
    with pytest.raises(ClosedError):
        bucket.check_recent()
    assert "lost" not in caplog.text
    found = map(str, site.objects.keys())
    assert not [key for key in found if key.startswith(object_key(NAME, ""))]


@pytest.mark.parametrize("change", [-1, 1])
def test_object_of_another_size_is_uploaded_again(site, change):
    _, topic, _ = several_objects(site)
    name, key = names_of(site)[2], site.key(12)
    data = site.objects.read(key, 0, 1 << 20)
    site.objects.put(key, data[:-1] if change < 0 else data + b"\0")
    assert topic.bucket.check_recent() == [name]
    assert site.objects.read(site.key(12), 0, 1 << 20) == data


def test_objects_that_local_files_no_longer_have_whole_are_not_looked_at(site):
    log = opened(site, **ROTATE, **KEEP_NOTHING)
    topic = log.topic(TEXT, create=True)
    for _ in range(4):
        fill(topic, 7, size=900)
        topic.upload()
    site.pass_time(log, 60)
    topic.bucket.retention.trim()
    assert 21 < topic.watermarks.trimmed < 28
    fill(topic, 7, size=900)
    topic.upload()
    for offset in (0, 21):
        site.objects.drop(site.key(offset))
    calls = len(site.objects.calls)
    assert topic.bucket.check_recent() == []
    assert site.objects.calls[calls:] == [("stat", site.key(28))]


def test_silent_bucket_is_an_error_of_the_check_alone(site):
    _, topic, sent = several_objects(site)
    site.objects.before = silent
    with pytest.raises(UnavailableError):
        topic.bucket.check_recent()
    site.objects.before = calm
    assert topic.append(b"on") == 20
    topic.flush()
    assert payloads(topic.read()) == [*sent, b"on"]


def test_lost_object_is_missed_by_itself_when_the_topic_is_opened(site):
    log, _, sent = several_objects(site)
    log.close()
    key = site.key(7)
    site.objects.drop(key)
    log = site.open(background=True, **ROTATE)
    topic = log.topic(TEXT)
    eventually(lambda: site.key(7) != key)
    assert payloads(topic.read()) == sent
    assert topic.bucket.repair_objects().errors == []


# -- the end ------------------------------------------------------------------------------------


def test_closed_stores_give_the_topics_to_whoever_comes_next(site):
    log = opened(site)
    log.topic(TEXT, create=True)
    log.close()
    assert site.catalog().owner() is None
    log.stores.close()


def test_metadata_store_that_does_not_answer_gives_the_directory_back(site):
    site.metadata.before = silent
    with pytest.raises(UnavailableError):
        opened(site)
    site.metadata.before = calm
    assert opened(site).topic(TEXT, create=True).watermarks.next == 0


def test_memory_of_uploads_is_given_back(site):
    log, topic, _ = several_objects(site)
    assert log.stores.upload_memory_bytes == 0
    fill(topic, 3)
    held = []
    site.objects.before = lambda kind, key: (
        held.append(log.stores.upload_memory_bytes) if kind == "write" else None
    )
    topic.upload()
    assert min(held) > 0
    assert log.stores.upload_memory_bytes == 0
    fill(topic, 3)
    site.objects.before = lambda kind, key: silent() if kind == "write" else None
    with pytest.raises(UnavailableError):
        topic.upload()
    assert log.stores.upload_memory_bytes == 0
