"""A log without local files: `storage.mode: bucket`."""

import threading

import pytest

from ister.base.clock import SystemClock
from ister.base.limits import KIB, MIB
from ister.base.model import AckLevel
from ister.errors import CapacityError, InvalidRequestError, UnavailableError
from tests.support.cases import each
from tests.support.machine import NoThreads, Task, eventually, numbered, payloads
from tests.support.stores import NAME, TTL_SECONDS, Site

TEXT = str(NAME)


@pytest.fixture
def live():
    """A site on the machine's clock, for logs with threads."""
    with Site(clock=SystemClock()) as site:
        yield site


def opened(site, **settings):
    """A new process with the topic."""
    log = site.open_diskless(**settings)
    return log, log.topic(TEXT, create=True)


def acked(topic, count, *, size=0):
    """Appends messages and has them acknowledged."""
    sent = numbered(count, first=topic.next_offset, size=size)
    for payload in sent:
        topic.append(payload)
    topic.upload()
    topic.wait(topic.next_offset - 1)
    return sent


# -- levels -------------------------------------------------------------------------------------


def test_messages_are_acknowledged_and_visible_when_they_are_tiered(site):
    _, topic = opened(site)
    assert topic.ack is AckLevel.TIERED
    assert topic.append(b"a") == 0
    topic.wal.wait(0, AckLevel.SYNCED)
    assert (topic.watermarks.synced, topic.visible) == (1, 0)
    topic.upload()
    topic.wait(0)
    assert (topic.watermarks.tiered, topic.visible) == (1, 1)
    assert payloads(topic.read()) == [b"a"]


@each("level", ["memory", "written", "synced"])
def test_topic_of_another_level_is_refused(site, level):
    log = site.open_diskless()
    with pytest.raises(InvalidRequestError, match="cannot be") as refused:
        log.topic(TEXT, create=True, ack=level)
    assert "storage.mode is 'bucket'" in refused.value.message
    assert "use ack='tiered'" in refused.value.hint
    assert log.topics() == []


def test_wait_for_another_level_is_refused(site):
    _, topic = opened(site)
    topic.append(b"a")
    for level in ("memory", "written", "synced"):
        with pytest.raises(InvalidRequestError, match=f"cannot be {level}"):
            topic.wait(0, level)


def test_existing_topic_of_another_level_is_refused_and_stays_as_it_is(site):
    log = site.open()
    log.topic(TEXT, create=True, ack="synced").append(b"a")
    log.seal(TEXT)
    before = site.catalog().record()
    with pytest.raises(InvalidRequestError, match="the topic's ack level is synced"):
        site.open_diskless().topic(TEXT)
    assert site.catalog().record() == before
    assert payloads(site.open("b").topic(TEXT).read()) == [b"a"]


def test_flush_makes_messages_tiered(live):
    _, topic = opened(live, background=True)
    for end, timeout in ((1, None), (2, 30.0)):
        topic.append(b"a")
        topic.flush(timeout)
        assert topic.tiered == end


# -- identity and fail-over ---------------------------------------------------------------------


def test_every_process_is_a_node_of_its_own_and_leaves_no_key(site):
    first, second = site.open_diskless(), site.open_diskless()
    assert first.stores.membership.node != second.stores.membership.node
    first.close()
    second.close()
    assert [one.key for one in site.metadata.range("/danube/cluster/")] == ["/danube/cluster/store"]


def test_topic_that_stopped_continues_from_the_bucket(site):
    log, topic = opened(site)
    sent = acked(topic, 10)
    topic.append(b"never acknowledged")
    topic.wal.wait(10, AckLevel.SYNCED)
    topic.close()
    again = log.topic(TEXT)
    assert again is not topic
    assert (again.next_offset, payloads(again.read())) == (10, sent)
    acked(again, 1)
    assert site.ranges() == [(0, 10), (10, 11)]


def test_topic_that_has_left_takes_no_memory(site):
    log, topic = opened(site)
    empty = log.room.memory.used_bytes
    other = log.topic("/default/other", create=True)
    acked(topic, 100, size=100)
    acked(other, 100, size=100)
    assert log.room.memory.used_bytes > empty + 20_000
    site.objects.reads.clear()
    log.seal(TEXT)
    assert site.objects.reads == [], "nothing is read back"
    log.delete("/default/other")
    assert log.room.memory.used_bytes < empty


def test_retention_leaves_files_in_memory_alone(site):
    log, topic = opened(site, retention={"time_minutes": 0, "size_mb": 0})
    acked(topic, 10)
    topic.rotate()
    site.clock.advance(3600)
    assert log.trim(TEXT) == 0
    assert topic.local_start == 0


# -- memory -------------------------------------------------------------------------------------


def test_uploaded_messages_stay_in_memory_up_to_half_of_it(site):
    log, topic = opened(site, cache_capacity=1)
    sent = acked(topic, 100, size=KIB)
    assert log.room.memory.free() == 0
    site.objects.reads.clear()
    assert payloads(topic.read()) == sent
    assert site.objects.reads == [], "read from memory"


def test_uploaded_files_are_dropped_beyond_that_and_read_from_the_bucket(site):
    log, topic = opened(site, cache_capacity=1)
    sent = []
    for _ in range(8):
        sent += acked(topic, 100, size=KIB)
    assert log.room.memory.is_pressed()
    assert log.room.memory.free() > 0
    assert log.room.memory.used_bytes <= MIB // 2
    assert topic.local_start > 0
    assert payloads(topic.read()) == sent


def test_topic_under_load_gives_back_what_is_tiered_of_its_active_file(site):
    """Its last file is never wholly tiered: it is rotated, so that the next round drops it."""
    log, topic = opened(site, cache_capacity=1)
    others = [log.topic(f"/default/t{number}", create=True) for number in range(15)]
    for one in [topic, *others]:
        acked(one, 40, size=KIB)
        one.wal.wait(one.append(b"x"), AckLevel.SYNCED)
    assert log.room.memory.is_pressed()
    assert log.room.memory.free() == 0, "no file is wholly tiered"
    for one in [topic, *others]:
        one.append(b"y")
        one.upload()
        one.wal.wait(one.append(b"z"), AckLevel.SYNCED)
    log.room.memory.free()
    assert log.room.memory.used_bytes <= MIB // 2
    assert all((one.tiered, one.synced) == (42, 43) for one in others)


def test_producers_wait_while_the_bucket_does_not_answer_and_memory_stays_bounded(live):
    gate = threading.Event()

    def before(kind, key):
        if kind in ("put", "open_writer", "write", "close") and not gate.is_set():
            raise UnavailableError("the bucket is down")

    live.objects.before = before
    log = live.open_diskless(background=True)
    topics = [log.topic(f"/default/t{number}", create=True) for number in range(4)]
    sent = {topic.name: [] for topic in topics}

    def produce(topic):
        for payload in numbered(600, size=4 * KIB):
            topic.append(payload)
            sent[topic.name].append(payload)

    tasks = [Task(lambda topic=topic: produce(topic)) for topic in topics]
    eventually(lambda: log.room.memory.is_full, "appends are held")
    counts = None

    def settled():
        nonlocal counts
        before, counts = counts, [len(payloads) for payloads in sent.values()]
        return counts == before

    eventually(settled, "producers wait", every=0.3)
    assert sum(counts) < 4 * 600
    # The write that crosses the limit, and what the buffers had.
    assert log.room.memory.used_bytes < MIB + 4 * 128 * KIB + 64 * KIB
    assert all(topic.visible == 0 for topic in topics), "nothing is acknowledged"
    gate.set()
    for task in tasks:
        task.result()
    for topic in topics:
        topic.wait(topic.next_offset - 1)
        assert payloads(topic.read()) == sent[topic.name]
    assert log.metrics.counted("memory.full_total") >= 1
    eventually(lambda: not log.room.memory.is_full, "the hold ends")
    eventually(lambda: log.room.memory.used_bytes <= MIB // 2, "what is uploaded is dropped")


def test_policy_refuse_refuses(site):
    log, topic = opened(site, buffer_full="refuse", scheduler=NoThreads())
    while not log.room.memory.is_full:
        topic.wal.wait(topic.append(bytes(KIB)), AckLevel.SYNCED)
    with pytest.raises(CapacityError, match="bytes in memory wait for their upload") as refused:
        topic.append(b"a")
    assert "storage.bucket.memory_max_bytes" in refused.value.hint
    other = log.topic("/default/other", create=True)
    with pytest.raises(CapacityError):
        other.append(b"a")
    topic.upload()
    log.room.memory.free()
    topic.append(b"a")
    other.append(b"a")


def test_memory_of_a_topic_that_was_lost_is_given_back(site):
    """Another node has it: nothing in memory will ever be uploaded from here."""
    log, topic = opened(site)
    for payload in numbered(700, size=KIB):
        topic.append(payload)
    topic.wal.wait(699, AckLevel.SYNCED)
    assert log.room.memory.is_pressed()
    site.clock.advance(TTL_SECONDS + 1)
    other = site.open_diskless()
    assert other.topic(TEXT).next_offset == 0
    log.stores.membership.renew()
    assert topic.has_stopped
    log.room.memory.free()
    assert not log.room.memory.is_pressed()
