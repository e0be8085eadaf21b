"""The public API of a topic, in process: what each call gives, refuses and leaves alone."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

import ister
from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX
from ister.base.model import AckLevel, Codec, MessageId, StreamMessage, TopicState
from ister.errors import (
    ClosedError,
    ConflictError,
    DirectoryLockedError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    TopicNameError,
    WaitTimeoutError,
)
from tests.support.cases import case, each
from tests.support.machine import (
    NAME,
    ROOT,
    Calls,
    Gate,
    Machine,
    ManualClock,
    NoThreads,
    Task,
    eventually,
    numbered,
    payloads,
    waiting,
)
from tests.support.memory_fs import SimulatedCrash

SMALL = {"cache_capacity": 4, "rotate_max_bytes": 4096, "stream_chunk_size": 64 * 1024}
EPOCH = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture
def topic(machine):
    """A new topic with the defaults."""
    return machine.topic()


@pytest.fixture
def in_memory():
    """A topic of a log that keeps nothing on disk, with room for four messages."""
    with ister.open({"storage": {"mode": "memory", "wal": {"cache_capacity": 4}}}) as log:
        yield log.topic(NAME, create=True)


def _at(seconds):
    return EPOCH + timedelta(seconds=seconds)


# -- appending ----------------------------------------------------------------------------------


def test_payloads_are_decoded_as_text_and_json(in_memory):
    for payload in (b'{"a": 1}', "ü".encode(), b"\xff"):
        in_memory.append(payload)
    data, text, rest = in_memory.read(end=3)
    assert (data.json(), data.text(), text.text()) == ({"a": 1}, '{"a": 1}', "ü")
    for decode, offset in ((rest.text, 2), (text.json, 1)):
        with pytest.raises(InvalidRequestError) as caught:
            decode()
        assert caught.value.offset == offset


def test_record_keeps_every_field_and_gets_its_offset(machine):
    """Goal: an empty field and a missing one are told apart, and a refused record has no offset."""
    full = StreamMessage(
        request_id=2**64 - 1,
        msg_id=MessageId(
            producer_id=77, topic_name="/a/b", broker_addr="10.0.0.1:6650", topic_offset=5
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
    sent = [
        replace(full, **changes)
        for changes in (
            {},
            {"subscription_name": None},
            {"subscription_name": ""},
            {"payload": b"", "publish_time": 0},
            {"attributes": {}},
            {"schema_id": None, "schema_version": None, "routing_key": None},
            {"schema_id": 0, "schema_version": 0, "routing_key": ""},
        )
    ]
    topic = machine.topic(storage={"max_message_size": 1024})
    for refused, error in (
        (replace(full, payload=b"x" * 1025), MessageTooLargeError),
        (replace(full, request_id=-1), InvalidRequestError),
    ):
        with pytest.raises(error):
            topic.appender.append_record(refused)
    assert [topic.appender.append_record(message) for message in sent] == list(range(len(sent)))
    topic.flush()
    stamped = [
        replace(message, msg_id=replace(message.msg_id, topic_offset=offset))
        for offset, message in enumerate(sent)
    ]
    assert [message.record for message in topic.read()] == stamped
    machine.kill()
    assert [message.record for message in machine.reopened().read()] == stamped


@pytest.mark.parametrize("codec", list(Codec))
def test_every_field_comes_back(machine, codec):
    topic = machine.topic(storage={"codec": codec})
    fields = {"attributes": {"k": "v", "ü": ""}, "producer_name": "shop"}
    if codec is not Codec.BINCODE1:
        fields |= {"routing_key": "eu-1", "schema_version": 3, "schema_id": 2**40}
    topic.append(b"\0payload", publish_time=_at(1.234), **fields)
    topic.append(b"")
    full, plain = topic.read()
    assert (full.offset, full.payload, full.publish_time) == (0, b"\0payload", _at(1.234))
    assert {name: getattr(full, name) for name in fields} == fields
    assert (plain.offset, plain.payload, dict(plain.attributes)) == (1, b"", {})
    assert (plain.producer_name, plain.routing_key, plain.schema_id) == ("", None, None)
    assert full.record.msg_id.topic_name == NAME
    assert full != plain
    assert full == next(topic.read())


@pytest.mark.parametrize(
    "payload", [b"ab", bytearray(b"ab"), memoryview(b"xaby")[1:3]], ids=["bytes", "array", "view"]
)
def test_any_kind_of_bytes_is_a_payload(topic, payload):
    topic.append(payload)
    topic.append_many([payload])
    if isinstance(payload, bytearray):
        payload[:] = b"zz"
    assert payloads(topic.read()) == [b"ab", b"ab"]


def test_publish_time_is_now_by_default(machine):
    topic = machine.topic(clock=ManualClock(now_ms=1_234_567_890_123))
    topic.append(b"a")
    topic.append_many([b"b"])
    assert [m.publish_time_ms for m in topic.read()] == [1_234_567_890_123] * 2


def test_appends_from_many_threads_get_offsets_without_holes(machine):
    """Goal: each offset once, batches in one piece, every reader the same order.

    Method: threads that append one by one and in batches at the same time.
    """
    topic = machine.topic(**SMALL)
    batches = {}

    def work(name):
        for number in range(50):
            if name % 2:
                batches[name, number] = topic.append_many(
                    [b"%d-%d-%d" % (name, number, part) for part in range(5)]
                )
            else:
                topic.append(b"%d-%d" % (name, number))

    tasks = [Task(work, name) for name in range(6)]
    for task in tasks:
        task.result()
    assert topic.flush() == 3 * 50 * 5 + 3 * 50
    got = payloads(topic.read())
    for (name, number), offsets in batches.items():
        assert len(offsets) == 5
        assert [got[offset] for offset in offsets] == [
            b"%d-%d-%d" % (name, number, part) for part in range(5)
        ]
    for name in (0, 2, 4):
        own = [p for p in got if p.startswith(b"%d-" % name)]
        assert own == [b"%d-%d" % (name, number) for number in range(50)]


def test_empty_batch_is_an_empty_range(topic):
    topic.append(b"a")
    assert topic.append_many([]) == range(1, 1)
    assert topic.watermarks.next == 1


_BAD_APPENDS = {
    InvalidRequestError: [
        *({"payload": bad} for bad in ("text", None, 7)),
        *({"attributes": bad} for bad in ({"k": 1}, {1: "v"}, {"k": None}, [("k", "v")], 0)),
        *({"routing_key": bad} for bad in (5, b"k")),
        *({"producer_name": bad} for bad in ([], None, "\ud800")),
        *({"schema_id": bad} for bad in (-1, 2**64, "1")),
        {"schema_version": 2**32},
        *({"publish_time": bad} for bad in (datetime(2024, 1, 1), -1, 2**62, True, "now")),
        {"publish_time": datetime(1969, 12, 31, tzinfo=UTC)},
    ],
    MessageTooLargeError: [
        {"payload": bytes(1025)},
        {"attributes": {"k": "v" * ENVELOPE_SIZE_BYTES_MAX}},
        {"producer_name": "p" * (ENVELOPE_SIZE_BYTES_MAX + 1)},
    ],
    TypeError: [{"atributes": {}}],
}


@pytest.mark.parametrize("is_batch", [False, True], ids=["append", "append_many"])
def test_bad_append_is_refused_and_changes_nothing(machine, is_batch):
    topic = machine.topic(storage={"max_message_size": 1024})
    topic.append(b"good")
    for error, rows in _BAD_APPENDS.items():
        for row in rows:
            fields = {"payload": b"p", **row}
            payload = fields.pop("payload")
            call = topic.append_many if is_batch else topic.append
            with case(row), pytest.raises(error) as refused:
                call([b"fine", payload, b"fine"] if is_batch else payload, **fields)
            assert type(refused.value) is error
            assert topic.watermarks.next == 1
    assert topic.append(bytes(1024)) == 1
    assert payloads(topic.read()) == [b"good", bytes(1024)]


@pytest.mark.parametrize("fields", [{"routing_key": "k"}, {"schema_id": 1}, {"schema_version": 1}])
def test_field_that_the_codec_lacks_is_refused(machine, fields):
    topic = machine.topic(storage={"codec": "bincode1"})
    with pytest.raises(InvalidRequestError):
        topic.append(b"a", **fields)
    assert topic.watermarks.next == 0


# -- waiting ------------------------------------------------------------------------------------


def test_watermarks_follow_the_message(machine):
    topic = machine.topic(scheduler=NoThreads())
    offset = topic.append(b"a")
    assert topic.watermarks == ister.Watermarks(trimmed=0, tiered=0, synced=0, written=0, next=1)
    topic.wait(offset, "memory")
    topic.wait(offset, "written")
    assert topic.watermarks == ister.Watermarks(trimmed=0, tiered=0, synced=0, written=1, next=1)
    topic.wait(offset)
    assert topic.watermarks == ister.Watermarks(trimmed=0, tiered=0, synced=1, written=1, next=1)


def test_publish_returns_once_the_message_is_at_its_level(machine):
    topic = machine.topic(scheduler=NoThreads())
    assert topic.publish(b"a", level="written", routing_key="k") == 0
    assert (topic.watermarks.written, topic.watermarks.synced) == (1, 0)
    assert topic.publish(b"b") == 1
    assert topic.watermarks.synced == 2
    assert [(m.payload, m.routing_key) for m in topic.read("earliest")] == [
        (b"a", "k"),
        (b"b", None),
    ]


@pytest.mark.parametrize("arguments", [{"level": "tiered"}, {"level": "SYNCED"}, {"timeout": "1"}])
def test_publish_that_cannot_wait_as_asked_appends_nothing(topic, arguments):
    with pytest.raises(InvalidRequestError):
        topic.publish(b"a", **arguments)
    with pytest.raises(InvalidRequestError):
        asyncio.run(topic.aio.publish(b"a", **arguments))
    assert topic.watermarks.next == 0


def test_flush_of_nothing_returns_the_watermark(topic):
    assert topic.flush() == 0
    topic.append_many([b"a", b"b"])
    assert topic.flush() == 2
    assert topic.flush() == 2


@pytest.mark.parametrize("offset", [2, 100, -1])
def test_wait_for_an_offset_that_no_message_has_is_refused(topic, offset):
    topic.append_many([b"a", b"b"])
    with pytest.raises(OffsetOutOfRangeError) as refused:
        topic.wait(offset)
    assert (refused.value.offset, refused.value.next) == (offset, 2)


@pytest.mark.parametrize("level", ["tiered", "fsynced", "", "SYNCED", 3])
def test_level_that_cannot_be_reached_is_refused(topic, level):
    topic.append(b"a")
    with pytest.raises(InvalidRequestError):
        topic.wait(0, level)


# -- start positions ----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["cache", "files"])
def test_start_positions(machine, settings):
    topic = machine.topic(**settings)
    sent = numbered(40, size=300)
    for payload in sent:
        topic.append(payload)
    assert payloads(topic.read()) == sent
    assert payloads(topic.read("earliest")) == sent
    for start in (0, 1, 17, 39):
        assert payloads(topic.read(start)) == sent[start:]
    assert payloads(topic.read(40)) == []
    assert payloads(topic.read("latest")) == []
    assert payloads(topic.read(10, end=13)) == sent[10:13]
    assert payloads(topic.read(10, end=10)) == []
    assert payloads(topic.read(38, end=1000)) == sent[38:]


def test_latest_is_what_is_appended_after_the_call(topic):
    topic.append(b"before")
    latest = topic.read("latest", follow=True, timeout=5)
    topic.append_many([b"after", b"more"])
    assert [next(latest).payload, next(latest).payload] == [b"after", b"more"]
    latest.close()


def test_read_without_follow_ends_at_what_was_appended_before_the_call(topic):
    topic.append(b"before")
    reading = topic.read()
    topic.append(b"after")
    assert payloads(reading) == [b"before"]


def test_read_without_follow_does_not_end_early_at_a_timeout(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")
    committer = Task(topic.wait, topic.append(b"a"))
    gate.wait_reached()
    reading = Task(lambda: payloads(topic.read(timeout=0.02)))
    reading.join(0.2)
    gate.open()
    committer.result()
    with suppress(WaitTimeoutError):
        assert reading.result() == [b"a"]


def test_follow_waits_and_stops_after_the_timeout(topic):
    topic.append(b"a")
    tail = Task(lambda: payloads(topic.read(follow=True, timeout=0.3)))
    eventually(lambda: waiting(topic, AckLevel.SYNCED) == 1)
    topic.append(b"b")
    assert tail.result() == [b"a", b"b"]


def test_follow_with_an_end_stops_there(topic):
    tail = Task(lambda: payloads(topic.read(follow=True, end=3)))
    for payload in (b"a", b"b", b"c", b"d"):
        topic.append(payload)
    assert tail.result() == [b"a", b"b", b"c"]


_TIMES = [10, 20, 20, 5, 30, 30, 25, 40]
_START_TIMES = {0: 0, 9.999: 0, 10: 0, 11: 1, 20: 1, 20.001: 4, 40: 7, 40.001: 8}


@pytest.mark.parametrize("where", ["cache", "rotated", "reopened", "memory"])
def test_start_by_time_is_the_first_message_then_or_later(machine, where):
    """Goal: the first offset whose publish time is not before the start, also when times go back.

    Method: messages of 2 KiB in files of two, or all in the cache, or in a log in memory.
    """
    log = machine.open(**{} if where == "cache" else {"rotate_max_bytes": 4096})
    if where == "memory":
        log = machine.open(storage={"mode": "memory"}, dir=None)
    topic = log.topic(NAME, create=True)
    assert topic.reader(_at(0)).next_offset == 0
    for time in _TIMES:
        topic.append(b"x" * 2000, publish_time=_at(time))
        topic.flush()
    if where == "reopened":
        machine.kill()
        topic = machine.reopened(rotate_max_bytes=4096)
    for seconds, expected in _START_TIMES.items():
        for zone in (UTC, timezone(timedelta(hours=5))):
            with case(seconds, zone), topic.reader(_at(seconds).astimezone(zone)) as reader:
                assert reader.next_offset == expected
        assert [m.offset for m in topic.read(_at(seconds))] == [*range(expected, len(_TIMES))]


def test_start_by_time_over_many_index_blocks_agrees_with_a_scan(machine):
    """Goal: indexes and files passed over hide no message.

    Method: 200 messages of 40 KiB in files of 1 MiB with times that jump; every start compared
    with what a plain scan finds, before and after a restart without indexes.
    """
    topic = machine.topic(rotate_max_bytes=1 << 20, cache_capacity=1)
    times = [(number * 7919) % 101 + number for number in range(200)]
    for time in times:
        topic.append(bytes(40_000), publish_time=_at(time))
        topic.flush()
    assert len(topic.wal.files) > 4

    def check():
        for start in range(-1, max(times) + 2, 9):
            wanted = next((o for o, time in enumerate(times) if time >= start), 200)
            assert topic.reader(_at(start)).next_offset == wanted, start

    check()
    path = topic.wal.directory.path
    machine.kill()
    for name in machine.fs.list_directory(path):
        if name.endswith(".idx"):
            machine.remove(f"{path}/{name}")
    topic = machine.reopened(rotate_max_bytes=1 << 20, cache_capacity=1)
    check()


_BAD_READS = [
    *({"start": bad} for bad in (-1, True, 1.0, None, "first", datetime(2024, 1, 1))),
    {"start": datetime(1960, 1, 1, tzinfo=UTC)},
    {"start": 2, "end": 1},
    *({"end": bad} for bad in (-1, True, "latest")),
]


def test_bad_read_is_refused_at_the_call(topic):
    topic.append_many([b"a", b"b"])
    for call in (topic.read, topic.reader):
        for arguments in _BAD_READS:
            with case(arguments), pytest.raises(InvalidRequestError) as refused:
                call(**arguments)
            assert type(refused.value) is InvalidRequestError
        for start in (3, 2**64):
            with case(start), pytest.raises(OffsetOutOfRangeError) as gone:
                call(start)
            assert (gone.value.earliest, gone.value.next) == (0, 2)
            assert "0 up to, not including, 2" in str(gone.value)
    assert not topic.readers


# -- visibility ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ack", "is_seen"), [("memory", True), ("written", True), ("synced", False)]
)
def test_level_of_a_topic_decides_when_readers_see_a_message(machine, ack, is_seen):
    topic = machine.topic(ack=ack)
    machine.fs.before = gate = Gate("sync")
    reader = topic.reader()
    offset = topic.append(b"a")
    if ack == "memory":
        assert payloads(reader.poll()) == [b"a"]
        reader.seek(0)
    committer = Task(topic.wait, offset, "synced")
    gate.wait_reached()
    assert topic.watermarks.written == 1
    assert payloads(reader.next_batch(timeout=0.05)) == ([b"a"] if is_seen else [])
    gate.open()
    committer.result()


def test_memory_topic_overtaken_before_it_is_written_is_read_from_the_file(machine):
    topic = machine.topic(ack="memory", cache_capacity=2)
    topic.append_many(numbered(10))
    assert payloads(topic.read()) == numbered(10)


# -- readers ------------------------------------------------------------------------------------


def test_many_readers_at_different_positions_do_not_disturb_each_other(machine):
    topic = machine.topic(**SMALL)
    sent = numbered(120, size=200)
    tasks = [
        Task(lambda start=start: payloads(topic.read(start, follow=True, end=120)))
        for start in [0] * 10
    ]
    for number, payload in enumerate(sent):
        topic.append(payload)
        if number % 10 == 9:
            topic.flush()
            tasks.append(Task(lambda s=number: payloads(topic.read(s, follow=True, end=120))))
    topic.flush()
    for task in tasks[:10]:
        assert task.result() == sent
    for place, task in enumerate(tasks[10:]):
        assert task.result() == sent[place * 10 + 9 :]
    assert payloads(topic.read()) == sent
    assert not topic.readers
    metrics = topic._metrics.snapshot()
    assert metrics["wal.reader.stitch_file_bytes"] > 0
    assert metrics["wal_reader.rotated_files_accessed"] > 0


def test_reader_overtaken_by_the_cache_falls_back_to_files(machine):
    topic = machine.topic(**SMALL)
    reader = topic.reader()
    topic.append(b"0")
    assert payloads(reader.next_batch()) == [b"0"]
    for payload in numbered(30, first=1, size=300):
        topic.append(payload)
    topic.flush()
    assert reader.next_offset < topic.cache.start
    got = []
    while reader.next_offset < 31:
        got += payloads(reader.next_batch(timeout=1))
    assert got == numbered(30, first=1, size=300)


def test_reader_holds_one_open_file_and_gives_it_back(machine):
    topic = machine.topic(**SMALL, scheduler=NoThreads())
    for payload in numbered(60, size=300):
        topic.append(payload)
        topic.flush()
    topic.wal.committer.release_file()
    assert machine.fs.open_files == 0
    readers = [topic.reader() for _ in range(3)]
    most = 0
    for reader in readers:
        while reader.next_offset < 60:
            reader.next_batch(max_messages=7, timeout=1)
            most = max(most, machine.fs.open_files)
    assert most <= len(readers)
    for reader in readers:
        reader.close()
    assert machine.fs.open_files == 0


@pytest.mark.parametrize("size", [100, 65_520 - 60, 70_000, 300_000], ids=str)
def test_frames_and_chunks_need_not_fit(machine, size):
    """Goal: frames cut by a chunk, as large as one and larger come out whole and once."""
    topic = machine.topic(stream_chunk_size=64 * 1024, cache_capacity=1)
    count = 12 if size > 1000 else 3000
    sent = numbered(count, size=size)
    for payload in sent:
        topic.append(payload)
    topic.flush()
    assert payloads(topic.read()) == sent
    reader = topic.reader(count // 2)
    batch = payloads(reader.next_batch(max_messages=3))
    assert 1 <= len(batch) <= 3
    assert batch == sent[count // 2 : count // 2 + len(batch)]


@pytest.mark.parametrize("source", ["cache", "files"])
def test_batches_keep_their_bounds(machine, source):
    topic = machine.topic(cache_capacity=1 if source == "files" else 1000)
    sent = numbered(100, size=1000)
    topic.append_many(sent)
    topic.flush()
    reader = topic.reader()
    assert payloads(reader.next_batch(max_messages=3)) == sent[:3]
    assert payloads(reader.next_batch(max_bytes=1)) == sent[3:4]
    some = reader.next_batch(max_bytes=5000)
    assert 1 <= len(some) <= 5
    reader.seek(0)
    assert payloads(reader.next_batch(max_messages=1)) == sent[:1]


def test_batch_of_no_messages_is_refused(topic):
    topic.append(b"a")
    topic.flush()
    for count in (0, -1):
        with pytest.raises(InvalidRequestError):
            topic.reader().next_batch(count)


def test_seek_moves_a_reader_and_refuses_what_is_not_there(machine):
    topic = machine.topic(**SMALL)
    sent = numbered(30, size=300)
    topic.append_many(sent)
    topic.flush()
    reader = topic.reader()
    for place in (20, 3, 0, 29):
        reader.seek(place)
        assert reader.next_batch(max_messages=1)[0].payload == sent[place]
    for place in (31, -1):
        with pytest.raises(OffsetOutOfRangeError):
            reader.seek(place)
    assert reader.next_offset == 30


def test_trim_under_a_reader_is_told_with_the_range(machine):
    """Goal: a reader whose next message is gone says so, and another goes on.

    Method: two readers in a file that is trimmed, the second one behind it.
    """
    topic = machine.topic(**SMALL)
    for payload in numbered(60, size=300):
        topic.append(payload)
        topic.flush()
    late, early = topic.reader(), topic.reader(50)
    late.next_batch(max_messages=1)
    topic.wal.trim(45)
    with pytest.raises(OffsetOutOfRangeError) as gone:
        list(late)
    assert gone.value.offset < gone.value.earliest == topic.earliest
    assert gone.value.next == 60
    late.seek(topic.earliest)
    assert late.next_batch(max_messages=1)[0].offset == topic.earliest
    assert early.next_batch(max_messages=1)[0].offset == 50


def test_close_from_another_thread_wakes_a_blocked_reader(topic):
    reader = topic.reader()
    blocked = Task(reader.next_batch)
    eventually(lambda: waiting(topic, AckLevel.SYNCED) == 1)
    reader.close()
    assert isinstance(blocked.error(), ClosedError)
    reader.close()
    with pytest.raises(ClosedError):
        reader.next_batch()
    topic.wait(topic.append(b"a"))


def test_close_during_a_read_of_a_file_leaves_no_handle(machine):
    """Goal: a reader closed from another thread while it opens its file leaks nothing."""
    topic = machine.topic(**SMALL)
    topic.append_many(numbered(30, size=300))
    topic.flush()
    topic.wal.committer.release_file()
    reader = topic.reader()
    machine.fs.before = gate = Gate("open_read")
    reading = Task(reader.next_batch)
    gate.wait_reached()
    reader.close()
    gate.open()
    reading.join(5)
    eventually(lambda: not topic.wal.committer.has_open_file or topic.wal.committer.release_file())
    assert machine.fs.open_files == 0


def test_polling_an_idle_topic_leaves_nothing_behind(topic):
    reader = topic.reader()
    for _ in range(300):
        assert reader.next_batch(timeout=0.0001) == []
    assert waiting(topic, AckLevel.SYNCED) < 100


def test_readers_may_come_and_go_while_somebody_counts_them(topic):
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for reader in [topic.reader() for _ in range(50)]:
                reader.close()

    tasks = [Task(churn) for _ in range(2)]
    try:
        for _ in range(1500):
            topic._metrics.snapshot()
            topic.readers  # noqa: B018
    finally:
        stop.set()
    for task in tasks:
        task.result()


# -- closed, missing, conflicting ---------------------------------------------------------------


def test_closed_topic_refuses_everything_and_may_be_closed_again(topic):
    topic.append(b"a")
    reader = topic.reader()
    topic.close()
    topic.close()
    assert topic.state is TopicState.CLOSED
    for use in (
        lambda: topic.append(b"b"),
        lambda: topic.append_many([b"b"]),
        reader.next_batch,
        reader.poll,
        topic.read,
    ):
        with pytest.raises(ClosedError):
            use()
    assert topic.watermarks.next == 1


def test_closed_log_refuses_topics_and_may_be_closed_again(machine):
    log = machine.open()
    topic = log.topic(NAME, create=True)
    log.close()
    log.close()
    for use in (
        lambda: log.topic(NAME),
        lambda: log.topic("/default/new", create=True),
        log.topics,
        lambda: topic.append(b"a"),
        topic.read,
    ):
        with pytest.raises(ClosedError):
            use()
    assert repr(log) == "<Log /data closed>"


def test_topic_is_one_object_and_opens_again_after_close(machine):
    log = machine.open()
    topic = log.topic(NAME, create=True)
    assert log.topic(NAME) is topic
    assert log.topic(NAME, create=True, ack="synced", codec="bincode2") is topic
    topic.append(b"a")
    with topic:
        pass
    again = log.topic(NAME)
    assert again is not topic
    assert payloads(again.read()) == [b"a"]
    assert again.append(b"b") == 1


@pytest.mark.parametrize("end_life", [Machine.kill, Machine.cut_power], ids=["kill", "power cut"])
def test_deletion_that_a_crash_has_interrupted_leaves_the_topic_or_none(end_life):
    """Goal: without a bucket too, a topic is whole or gone after a crash at any step."""
    outcomes = set()
    for at in range(1, 60):
        with Machine() as machine:
            topic = machine.topic(rotate_max_bytes=4096)
            for payload in numbered(12, size=900):
                topic.append(payload)
            topic.flush()
            steps = iter(range(1, at))

            def crash(kind, path, steps=steps):
                if next(steps, None) is None:
                    raise SimulatedCrash

            machine.fs.before = crash
            is_done = False
            try:
                machine._logs[-1].delete(NAME)
                is_done = True
            except SimulatedCrash:
                pass
            end_life(machine)
            machine.fs.before = lambda kind, path: None
            names = machine.open().topics()
            outcomes.add((is_done, len(names)))
            if names:
                topic = machine._logs[-1].topic(NAME)
                assert topic.state is TopicState.OPEN, at
                assert payloads(topic.read()) == numbered(12, size=900), at
            else:
                assert machine.fs.list_directory(f"{ROOT}/default") == [], at
        if is_done:
            break
    assert outcomes == {(False, 1), (False, 0), (True, 0)}


def test_missing_topic_is_not_made_by_looking(machine):
    log = machine.open()
    with pytest.raises(NotFoundError):
        log.topic(NAME)
    assert log.topics() == []
    log.topic(NAME, create=True)
    log.topic("/other/b", create=True)
    assert log.topics() == [NAME, "/other/b"]


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "reopened"])
def test_topic_asked_for_with_other_properties_stays_as_it_is(machine, is_open):
    topic = machine.topic()
    topic.append(b"a")
    log = machine._logs[-1]
    if not is_open:
        log.close()
        log = machine.open()
    for error, arguments in (
        (ConflictError, {"ack": "written"}),
        (ConflictError, {"codec": "bincode1"}),
        (InvalidRequestError, {"ack": "tiered"}),
        (InvalidRequestError, {"ack": "never"}),
        (InvalidRequestError, {"codec": "json"}),
    ):
        with case(arguments), pytest.raises(error) as refused:
            log.topic(NAME, create=True, **arguments)
        assert type(refused.value) is error
    topic = log.topic(NAME)
    assert (topic.ack, topic.codec) == (AckLevel.SYNCED, Codec.BINCODE2)
    assert payloads(topic.read()) == [b"a"]


def test_name_that_differs_in_case_alone_is_refused(machine):
    log = machine.open()
    log.topic(NAME, create=True)
    for twin in ("/default/Orders", "/Default/orders", "/DEFAULT/other"):
        with pytest.raises(TopicNameError, match="in case alone"):
            log.topic(twin, create=True)
        with pytest.raises(NotFoundError):
            log.topic(twin)
    assert log.topics() == [NAME]


@each("name", ["/LOCK/a", "/lock/a"])
def test_every_valid_name_can_be_made(tmp_path, name):
    with ister.open(tmp_path) as log:
        log.topic(name, create=True)


def test_second_log_on_a_directory_is_refused(tmp_path):
    with ister.open(tmp_path) as log:
        log.topic(NAME, create=True).append(b"a")
        with pytest.raises(DirectoryLockedError):
            ister.open(tmp_path)
    with ister.open(tmp_path) as log:
        assert payloads(log.topic(NAME).read()) == [b"a"]


def test_log_in_a_directory_comes_back_and_stray_files_are_no_topics(tmp_path):
    root = tmp_path / "new" / "deep"
    with ister.open(root) as log:
        log.topic(NAME, create=True).append_many(numbered(100, size=5000))
    (root / "wal" / "README").write_text("not a namespace")
    (root / "wal" / "default" / "a.txt").write_text("not a topic")
    with ister.open(str(root)) as log:
        assert payloads(log.topic(NAME).read()) == numbered(100, size=5000)
        assert log.topics() == [NAME]


# -- in memory ----------------------------------------------------------------------------------


def test_log_in_memory_keeps_what_the_cache_keeps(in_memory):
    topic = in_memory
    assert topic.ack is AckLevel.MEMORY
    topic.append_many(numbered(10))
    assert payloads(topic.read()) == numbered(4, first=6)
    assert topic.earliest == 6
    with pytest.raises(OffsetOutOfRangeError) as gone:
        topic.read(5)
    assert (gone.value.earliest, gone.value.next, gone.value.offset) == (6, 10, 5)
    assert topic.flush() == 0
    topic.wait(9)
    assert topic.watermarks.next == 10


def test_reader_that_memory_has_left_behind_is_told(in_memory):
    reader = in_memory.reader()
    in_memory.append_many(numbered(10))
    with pytest.raises(OffsetOutOfRangeError) as gone:
        reader.next_batch(timeout=1)
    assert (gone.value.earliest, gone.value.next, gone.value.offset) == (6, 10, 0)


def test_reader_of_a_log_in_memory_is_woken(in_memory):
    readers = [Task(in_memory.reader("latest").next_batch, timeout=60) for _ in range(5)]
    eventually(lambda: waiting(in_memory, AckLevel.MEMORY) == 5)
    in_memory.append(b"a")
    assert [payloads(task.result()) for task in readers] == [[b"a"]] * 5


@pytest.mark.parametrize("level", ["written", "synced", "tiered"])
def test_log_in_memory_promises_nothing_more(in_memory, level):
    in_memory.append(b"a")
    with pytest.raises(InvalidRequestError):
        in_memory.wait(0, level)
    with ister.open() as log, pytest.raises(InvalidRequestError):
        log.topic(NAME, create=True, ack=level)


# -- odds and ends ------------------------------------------------------------------------------


def test_what_a_topic_says_of_itself(topic):
    topic.append(b"a" * 40)
    assert repr(topic) == f"<Topic {NAME} open next=1 ack=synced>"
    message = next(topic.read())
    assert repr(message).startswith("Message(offset=0, payload=b'aaaa")
    assert "size_bytes=40" in repr(message)
    assert len({message, next(topic.read())}) == 1


def test_failing_file_system_at_open_is_a_typed_error(machine):
    machine.fs.before = Calls(fail=lambda kind, path: OSError(5, "no"))
    with pytest.raises(IsterError):
        machine.open()
