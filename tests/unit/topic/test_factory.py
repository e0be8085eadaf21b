"""Storage per topic under the names of the design: whole records, cursors, hand-over, the end."""

from contextlib import suppress
from dataclasses import replace

import pytest

from builders import a_message, frames
from ister.clock import ManualClock
from ister.config import load_config
from ister.errors import (
    ClosedError,
    ConflictError,
    DirectoryLockedError,
    FencedError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    TopicNameError,
    UnavailableError,
)
from ister.format.message import encode_message
from ister.fs.memory import MemoryFileSystem
from ister.model import AckLevel, Codec, MessageId, StreamMessage, TopicState
from ister.tier.cursors import load_progress
from ister.topic.factory import StartPosition, WalStorageFactory
from rig import ROOT, NoThreads, Task, numbered
from tier_rig import NAME, NOW_MS, TTL_SECONDS, Site

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"
OTHER = "/default/other"
ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 1}
KEEP_NOTHING = {"retention": {"time_minutes": 0, "size_mb": 0}}
FULL = StreamMessage(
    request_id=2**64 - 1,
    msg_id=MessageId(
        producer_id=77, topic_name="/default/from-afar", broker_addr="10.0.0.1:6650", topic_offset=5
    ),
    payload=b"\x00payload\xff" * 10,
    publish_time=1_760_745_600_123,
    producer_name="prödücer",
    subscription_name="sub",
    attributes={"k": "v", "": "empty", "ключ": "значение"},
    schema_id=2**63,
    schema_version=3,
    routing_key="key/1",
)


class Places:
    """Factories on machines that share a bucket and a metadata store."""

    def __init__(self):
        self.site = Site()
        self.factories = []

    def open(self, disk="a", *, storage=None, background=False, **wal):
        """A process; `wal` are settings below `storage.wal`."""
        tree = {"storage": {**(storage or {}), "wal": {"dir": ROOT, **wal}}}
        is_tiered = tree["storage"].get("mode", "wal_cloud") == "wal_cloud"
        stores = {"objects": self.site.objects, "metadata": self.site.metadata}
        factory = WalStorageFactory(
            load_config(tree, {}),
            clock=self.site.clock,
            fs=self.site.disk(disk),
            scheduler=NoThreads(),
            background=background,
            **(stores if is_tiered else {}),
        )
        self.factories.append((disk, factory))
        return factory

    def kill(self, factory):
        """Ends a process: nothing of it touches its disk again."""
        ((disk, _),) = [item for item in self.factories if item[1] is factory]
        self.factories.remove((disk, factory))
        self.site.disk(disk).kill()

    def close(self):
        """Closes what is open, with everything in order again."""
        self.site.metadata.before = self.site.objects.before = lambda kind, key: None
        for _, factory in self.factories:
            with suppress(IsterError):
                factory.shutdown()


@pytest.fixture
def places():
    places = Places()
    yield places
    places.close()


def fill(storage, count, *, size=0):
    sent = numbered(count, first=storage.topic.watermarks.next, size=size)
    for payload in sent:
        storage.append_message(TEXT, a_message(payload=payload))
        storage.flush(TEXT)
    return sent


def read(storage, start=0, *, count=1000):
    """What a stream has now."""
    with storage.create_reader(TEXT, StartPosition.at(start)) as stream:
        found = []
        while batch := stream.next_batch(count, timeout=0):
            found += batch
        return found


# -- records ------------------------------------------------------------------------------------


def test_record_keeps_every_field_and_gets_its_offset(places):
    storage = places.open().for_topic(TEXT)
    assert [storage.append_message(TEXT, FULL) for _ in range(3)] == [0, 1, 2]
    storage.flush(TEXT)
    assert read(storage) == [
        replace(FULL, msg_id=replace(FULL.msg_id, topic_offset=offset)) for offset in range(3)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"subscription_name": None},
        {"subscription_name": ""},
        {"payload": b""},
        {"attributes": {}},
        {"schema_id": None, "schema_version": None, "routing_key": None},
        {"schema_id": 0, "schema_version": 0, "routing_key": ""},
        {"publish_time": 0},
    ],
    ids=lambda changes: ",".join(f"{name}={value!r}" for name, value in changes.items()),
)
def test_nothing_and_none_are_told_apart(places, changes):
    storage = places.open().for_topic(TEXT)
    sent = replace(FULL, **changes)
    storage.append_message(TEXT, sent)
    storage.flush(TEXT)
    assert read(storage) == [replace(sent, msg_id=replace(FULL.msg_id, topic_offset=0))]


def test_records_are_the_same_from_memory_files_and_bucket(places):
    factory = places.open(**ROTATE, **KEEP_NOTHING)
    storage = factory.for_topic(TEXT)
    sent = [replace(FULL, payload=b"%d" % n + b"." * 900, request_id=n) for n in range(20)]
    for message in sent:
        storage.append_message(TEXT, message)
        storage.flush(TEXT)
    wanted = [
        replace(m, msg_id=replace(m.msg_id, topic_offset=offset)) for offset, m in enumerate(sent)
    ]
    assert read(storage) == wanted
    storage.topic.upload()
    places.site.clock.advance(60)
    factory.log.tiers.membership.renew()
    assert storage.topic.tier.trim() > 1
    assert read(storage) == wanted
    factory.shutdown()
    assert read(places.open(**ROTATE).for_topic(TEXT)) == wanted


def test_record_whose_own_offset_is_another_gets_that_of_its_frame(places):
    """Goal: files that others wrote number their messages by their frames."""
    fs = places.site.disk()
    fs.make_directories(PATH)
    file = fs.create(f"{PATH}/wal.log")
    bodies = [encode_message(a_message(topic_offset=999), Codec.BINCODE2) for _ in range(3)]
    file.write_at(0, [frames(0, bodies)])
    file.sync()
    file.close()
    storage = places.open(storage={"mode": "local_only"}).for_topic(TEXT)
    found = read(storage)
    assert [message.msg_id.topic_offset for message in found] == [0, 1, 2]
    assert found[1] == a_message(topic_offset=1)


def test_record_that_is_too_large_takes_no_offset(places):
    storage = places.open(storage={"max_message_size": 1024}).for_topic(TEXT)
    with pytest.raises(MessageTooLargeError):
        storage.append_message(TEXT, a_message(payload=b"x" * 1025))
    assert storage.append_message(TEXT, a_message(payload=b"x" * 1024)) == 0


def test_record_that_cannot_be_encoded_takes_no_offset(places):
    storage = places.open().for_topic(TEXT)
    with pytest.raises(InvalidRequestError):
        storage.append_message(TEXT, a_message(request_id=-1))
    assert storage.append_message(TEXT, a_message()) == 0


@pytest.mark.parametrize("level", ["written", "synced", AckLevel.SYNCED, None])
def test_wait_returns_when_the_record_has_reached_the_level(places, level):
    storage = places.open().for_topic(TEXT)
    offset = storage.append_message(TEXT, a_message())
    storage.wait(offset, level)
    assert storage.topic.watermarks.written == 1
    with pytest.raises(OffsetOutOfRangeError):
        storage.wait(offset + 1, level)


def test_flush_says_how_far_the_topic_is_durable(places):
    storage = places.open().for_topic(TEXT)
    assert storage.flush(TEXT) == 0
    for _ in range(3):
        storage.append_message(TEXT, a_message())
    assert storage.flush(TEXT) == 3


# -- streams ------------------------------------------------------------------------------------


def test_stream_from_an_offset_has_the_rest(places):
    storage = places.open().for_topic(TEXT)
    fill(storage, 10)
    assert [m.msg_id.topic_offset for m in read(storage, 7)] == [7, 8, 9]
    assert read(storage, 10) == []
    with pytest.raises(OffsetOutOfRangeError):
        read(storage, 11)


def test_stream_from_the_latest_has_what_is_appended_later(places):
    storage = places.open().for_topic(TEXT)
    fill(storage, 3)
    with storage.create_reader(TEXT, StartPosition.latest()) as stream:
        assert stream.next_batch(timeout=0) == []
        fill(storage, 1)
        (message,) = stream.next_batch(timeout=0)
        assert (message.msg_id.topic_offset, message.payload) == (3, b"3")


def test_stream_gives_as_many_as_are_asked_for(places):
    storage = places.open().for_topic(TEXT)
    fill(storage, 5)
    with storage.create_reader(TEXT, StartPosition.at(0)) as stream:
        assert [len(stream.next_batch(2, timeout=0)) for _ in range(4)] == [2, 2, 1, 0]


def test_stream_that_is_iterated_waits_at_the_tail(places):
    storage = places.open().for_topic(TEXT)
    fill(storage, 2)
    stream = storage.create_reader(TEXT, StartPosition.at(0))
    iterator = iter(stream)
    assert [next(iterator).payload, next(iterator).payload] == [b"0", b"1"]
    task = Task(next, iterator)
    task.join(0.05)
    assert task.is_running
    fill(storage, 1)
    assert task.result().payload == b"2"
    stream.close()


def test_closed_stream_is_told_and_wakes_who_waits(places):
    storage = places.open().for_topic(TEXT)
    stream = storage.create_reader(TEXT, StartPosition.latest())
    task = Task(stream.next_batch)
    task.join(0.05)
    assert task.is_running
    stream.close()
    assert isinstance(task.error(), ClosedError)
    with pytest.raises(ClosedError):
        stream.next_batch(timeout=0)
    assert stream.reader.is_closed


# -- one storage per topic ----------------------------------------------------------------------


def test_storage_of_a_topic_is_the_same_every_time(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    assert factory.for_topic(TEXT) is storage
    assert factory.for_topic(TEXT.removeprefix("/")) is storage
    assert factory.for_topic(OTHER) is not storage
    assert factory.log.topics() == [TEXT, OTHER]


def test_storage_of_a_topic_whose_writer_stopped_is_a_new_one(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    sent = fill(storage, 3)

    def fail(kind, path):
        if kind == "sync" and path.endswith(".log"):
            raise OSError(5, "injected")

    places.site.disk().before = fail
    with pytest.raises(UnavailableError):
        fill(storage, 1)
    places.site.disk().before = lambda kind, path: None
    assert storage.topic.state is TopicState.FAILED
    again = factory.for_topic(TEXT)
    assert again is not storage
    assert factory.for_topic(TEXT) is again
    assert [m.payload for m in read(again)][:3] == sent


def test_every_call_refuses_the_name_of_another_topic(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    factory.for_topic(OTHER)
    fill(storage, 1)
    calls = [
        lambda: storage.append_message(OTHER, a_message()),
        lambda: storage.create_reader(OTHER, StartPosition.at(0)),
        lambda: storage.ack_checkpoint(OTHER, 0),
        lambda: storage.checkpoint(OTHER),
        lambda: storage.flush(OTHER),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError) as refused:
            call()
        assert refused.value.topic == OTHER
        assert TEXT in refused.value.message
    assert storage.topic.watermarks.next == 1
    assert factory.for_topic(OTHER).topic.watermarks.next == 0


@pytest.mark.parametrize("name", ["", "/", "orders", "/a/b/c", "/default/or.ders", "//orders"])
def test_name_that_is_none_is_refused(places, name):
    factory = places.open()
    with pytest.raises(TopicNameError):
        factory.for_topic(name)
    assert factory.log.topics() == []


def test_topic_of_a_node_that_is_lost_is_taken_over_when_that_is_wished(places):
    factory = places.open("a")
    storage = factory.for_topic(TEXT)
    sent = fill(storage, 3)
    storage.topic.upload()
    fill(storage, 2)
    places.kill(factory)
    places.site.clock.advance(TTL_SECONDS + 1)
    other = places.open("b")
    with pytest.raises(ConflictError):
        other.for_topic(TEXT)
    storage = other.for_topic(TEXT, take_over=True)
    assert [m.payload for m in read(storage)] == sent
    assert storage.append_message(TEXT, a_message()) == 3


# -- cursors ------------------------------------------------------------------------------------


@pytest.fixture(params=["wal_cloud", "local_only"])
def storage(request, places):
    storage = places.open(storage={"mode": request.param}).for_topic(TEXT)
    fill(storage, 10)
    return storage


def test_cursor_is_the_first_offset_that_was_not_acknowledged(storage):
    assert storage.checkpoint(TEXT) is None
    assert storage.ack_checkpoint(TEXT, 0) == 1
    assert storage.checkpoint(TEXT) == 1
    assert storage.ack_checkpoint(TEXT, 9) == 10
    assert storage.checkpoint(TEXT) == 10


def test_cursor_moves_forward_alone(storage):
    found = [storage.ack_checkpoint(TEXT, offset) for offset in (4, 2, 0, 7, 7, 6)]
    assert found == [5, 5, 5, 8, 8, 8]
    assert storage.checkpoint(TEXT) == 8


def test_subscriptions_have_cursors_of_their_own(storage):
    storage.ack_checkpoint(TEXT, 3, "one")
    storage.ack_checkpoint(TEXT, 6, "two")
    found = {name: storage.checkpoint(TEXT, name) for name in ("one", "two", "checkpoint")}
    assert found == {"one": 4, "two": 7, "checkpoint": None}


@pytest.mark.parametrize("offset", [-1, 10, 11, 1 << 63])
def test_offset_that_does_not_exist_is_not_acknowledged(storage, offset):
    storage.ack_checkpoint(TEXT, 4)
    with pytest.raises(InvalidRequestError):
        storage.ack_checkpoint(TEXT, offset)
    assert storage.checkpoint(TEXT) == 5


def test_cursor_outlives_its_process(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    fill(storage, 10)
    storage.ack_checkpoint(TEXT, 4)
    places.kill(factory)
    storage = places.open().for_topic(TEXT)
    assert storage.checkpoint(TEXT) == 5
    assert storage.ack_checkpoint(TEXT, 2) == 5


def test_cursor_in_the_store_says_when_and_of_which_topic(places):
    site = places.site
    storage = places.open().for_topic(TEXT)
    fill(storage, 10)
    site.clock.advance(5)
    storage.ack_checkpoint(TEXT, 4, "billing")
    key = site.catalog().keys.progress("billing")
    progress = load_progress(site.metadata, key)
    assert (progress.offset, progress.timestamp) == (5, NOW_MS + 5000)
    assert progress.incarnation == storage.topic.tier.owned.record.incarnation
    site.clock.advance(5)
    storage.ack_checkpoint(TEXT, 1, "billing")
    assert load_progress(site.metadata, key).timestamp == NOW_MS + 10_000


def test_cursor_holds_back_local_files_that_it_has_yet_to_pass(places):
    factory = places.open(**ROTATE, **KEEP_NOTHING)
    storage = factory.for_topic(TEXT)
    fill(storage, 40, size=900)
    topic = storage.topic
    topic.upload()
    places.site.clock.advance(60)
    factory.log.tiers.membership.renew()
    storage.ack_checkpoint(TEXT, 2, "slow")
    storage.ack_checkpoint(TEXT, 39, "fast")
    assert topic.tier.trim() == 0
    storage.ack_checkpoint(TEXT, 17, "slow")
    assert topic.tier.trim() > 0
    assert 5 < topic.watermarks.trimmed <= 18
    held = topic.watermarks.trimmed
    # One that has not been heard of for long holds nothing back any more.
    places.site.clock.advance(3600)
    factory.log.tiers.membership.renew()
    assert topic.tier.trim() > 0
    assert topic.watermarks.trimmed > held


def test_subscription_that_acknowledges_the_same_again_stays_active(places):
    factory = places.open(**ROTATE, **KEEP_NOTHING)
    storage = factory.for_topic(TEXT)
    fill(storage, 40, size=900)
    storage.topic.upload()
    storage.ack_checkpoint(TEXT, 2, "slow")
    places.site.clock.advance(3600)
    factory.log.tiers.membership.renew()
    storage.ack_checkpoint(TEXT, 2, "slow")
    assert storage.topic.tier.trim() == 0


def test_silent_metadata_store_is_an_error_and_the_cursor_stays(places):
    storage = places.open().for_topic(TEXT)
    fill(storage, 10)
    storage.ack_checkpoint(TEXT, 4)

    def silent(kind, key):
        raise UnavailableError("silent")

    places.site.metadata.before = silent
    with pytest.raises(UnavailableError):
        storage.ack_checkpoint(TEXT, 8)
    with pytest.raises(UnavailableError):
        storage.checkpoint(TEXT)
    places.site.metadata.before = lambda kind, key: None
    assert storage.checkpoint(TEXT) == 5
    assert storage.ack_checkpoint(TEXT, 8) == 9


def test_owner_that_was_replaced_moves_no_cursor(places):
    """Goal: it knows offsets that its successor gives to other messages."""
    factory = places.open("a")
    storage = factory.for_topic(TEXT)
    fill(storage, 3)
    storage.topic.upload()
    fill(storage, 7)
    storage.ack_checkpoint(TEXT, 1)
    places.site.clock.advance(TTL_SECONDS + 1)
    other = places.open("b").for_topic(TEXT, take_over=True)
    for _ in range(2):
        with pytest.raises((FencedError, UnavailableError)):
            storage.ack_checkpoint(TEXT, 9)
        factory.log.tiers.membership.renew()
    assert other.checkpoint(TEXT) == 2


def test_owner_whose_lease_has_lapsed_moves_no_cursor_until_it_is_renewed(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    fill(storage, 3)
    storage.ack_checkpoint(TEXT, 0)
    places.site.clock.advance(TTL_SECONDS + 1)
    with pytest.raises(UnavailableError):
        storage.ack_checkpoint(TEXT, 2)
    assert storage.checkpoint(TEXT) == 1
    factory.log.tiers.membership.renew()
    assert storage.ack_checkpoint(TEXT, 2) == 3


def test_cursor_ahead_of_what_a_successor_has_is_put_back(places):
    factory = places.open("a")
    storage = factory.for_topic(TEXT)
    fill(storage, 3)
    storage.topic.upload()
    fill(storage, 7)
    assert storage.ack_checkpoint(TEXT, 9) == 10
    places.kill(factory)
    places.site.clock.advance(TTL_SECONDS + 1)
    other = places.open("b").for_topic(TEXT, take_over=True)
    assert other.checkpoint(TEXT) == 3
    assert other.append_message(TEXT, a_message()) == 3
    assert other.ack_checkpoint(TEXT, 3) == 4


# -- hand-over, deletion, the end ---------------------------------------------------------------


def test_sealed_topic_goes_on_elsewhere(places):
    factory = places.open("a")
    storage = factory.for_topic(TEXT)
    sent = fill(storage, 10)
    storage.append_message(TEXT, a_message(payload=b"last"))
    assert factory.flush_and_seal(TEXT) == 11
    with pytest.raises(ClosedError):
        storage.append_message(TEXT, a_message())
    assert not places.site.disk().exists(PATH)
    other = places.open("b").for_topic(TEXT)
    assert [m.payload for m in read(other)] == [*sent, b"last"]
    assert other.append_message(TEXT, a_message()) == 11


def test_sealed_topic_comes_back_in_another_storage(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    fill(storage, 3)
    assert factory.flush_and_seal(TEXT.removeprefix("/")) == 3
    again = factory.for_topic(TEXT)
    assert again is not storage
    assert again.append_message(TEXT, a_message()) == 3


def test_cursor_outlives_a_hand_over(places):
    factory = places.open("a")
    storage = factory.for_topic(TEXT)
    fill(storage, 10)
    storage.ack_checkpoint(TEXT, 4)
    factory.flush_and_seal(TEXT)
    assert places.open("b").for_topic(TEXT).checkpoint(TEXT) == 5


def test_seal_that_fails_hands_nothing_over_and_the_topic_goes_on(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    sent = fill(storage, 3)

    def silent(kind, key):
        raise UnavailableError("silent")

    places.site.objects.before = silent
    with pytest.raises(UnavailableError):
        factory.flush_and_seal(TEXT)
    places.site.objects.before = lambda kind, key: None
    assert places.site.catalog().sealed() is None
    storage = factory.for_topic(TEXT)
    assert [m.payload for m in read(storage)] == sent
    assert storage.append_message(TEXT, a_message()) == 3


def test_topic_that_does_not_exist_is_neither_sealed_nor_deleted(places):
    factory = places.open()
    with pytest.raises(NotFoundError):
        factory.flush_and_seal(TEXT)
    with pytest.raises(NotFoundError):
        factory.delete_storage(TEXT)
    assert factory.log.topics() == []


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
def test_deleted_topic_begins_anew_in_another_storage(places, mode):
    factory = places.open(storage={"mode": mode})
    storage = factory.for_topic(TEXT)
    fill(storage, 3)
    storage.ack_checkpoint(TEXT, 1)
    factory.delete_storage(TEXT.removeprefix("/"))
    with pytest.raises(ClosedError):
        storage.append_message(TEXT, a_message())
    assert not places.site.disk().exists(PATH)
    again = factory.for_topic(TEXT)
    assert again is not storage
    assert (read(again), again.checkpoint(TEXT)) == ([], None)
    assert again.append_message(TEXT, a_message()) == 0


def test_shutdown_makes_everything_durable_and_gives_the_topics_back(places):
    factory = places.open()
    storage = factory.for_topic(TEXT)
    for number in range(3):
        storage.append_message(TEXT, a_message(payload=b"%d" % number))
    stream = storage.create_reader(TEXT, StartPosition.latest())
    factory.shutdown()
    factory.shutdown()
    for call in (
        lambda: storage.append_message(TEXT, a_message()),
        lambda: stream.next_batch(timeout=0),
        lambda: factory.for_topic(TEXT),
    ):
        with pytest.raises(ClosedError):
            call()
    assert places.site.catalog().owner() is None
    assert [m.payload for m in read(places.open().for_topic(TEXT))] == [b"0", b"1", b"2"]


def test_factory_is_shut_down_at_the_end_of_its_block(places):
    with places.open() as factory:
        storage = factory.for_topic(TEXT)
        storage.append_message(TEXT, a_message())
        with pytest.raises(DirectoryLockedError):
            places.open()
    with pytest.raises(ClosedError):
        storage.append_message(TEXT, a_message())
    assert len(read(places.open().for_topic(TEXT))) == 1


def test_factory_in_memory_keeps_records_until_its_end():
    config = load_config({"storage": {"mode": "memory"}}, {})
    with WalStorageFactory(config, clock=ManualClock(), scheduler=NoThreads()) as factory:
        storage = factory.for_topic(TEXT)
        storage.append_message(TEXT, FULL)
        assert read(storage) == [replace(FULL, msg_id=replace(FULL.msg_id, topic_offset=0))]
        assert storage.ack_checkpoint(TEXT, 0) == 1


def test_factory_takes_the_machines_clock_by_default():
    config = load_config({"storage": {"mode": "local_only", "wal": {"dir": ROOT}}}, {})
    with WalStorageFactory(config, fs=MemoryFileSystem(), scheduler=NoThreads()) as factory:
        offset = factory.for_topic(TEXT).topic.append(b"x")
        assert factory.for_topic(TEXT).flush(TEXT) == offset + 1
        (message,) = read(factory.for_topic(TEXT))
        assert message.publish_time > NOW_MS
