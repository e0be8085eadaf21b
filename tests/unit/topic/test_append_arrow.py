"""Rows of Arrow as messages: the same as appended one by one, for every reader."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ister
from ister import kernels
from ister.base.limits import INDEX_STRIDE_BYTES, MIB
from ister.base.model import AckLevel, Codec, TopicState
from ister.errors import CapacityError, ClosedError, InvalidRequestError, MessageTooLargeError
from ister.format.payloads import Payloads
from tests.support.clock import ManualClock
from tests.support.machine import NAME, Machine, NoThreads, Task, numbered, payloads

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOW_MS = 1_700_000_000_000


def a_topic(machine, *, codec=None, ack=None, **settings):
    settings = {"clock": ManualClock(now_ms=NOW_MS), "scheduler": NoThreads(), **settings}
    return machine.open(**settings).topic(NAME, create=True, codec=codec, ack=ack)


def a_batch(rows):
    """Payloads as a record batch."""
    return pa.record_batch({"payload": pa.array(rows, pa.binary())})


def records(topic, start="earliest"):
    return [message.record for message in topic.read(start)]


# -- the same as append -------------------------------------------------------------------------

_NAMES = st.text(max_size=6)
_ROWS = st.fixed_dictionaries(
    {
        "payload": st.binary(max_size=50),
        "producer_name": st.none() | _NAMES,
        "publish_time": st.none() | st.integers(0, 253_402_300_799_999),
        "attributes": st.none() | st.dictionaries(_NAMES, _NAMES, max_size=3),
        "routing_key": st.none() | _NAMES,
        "schema_id": st.none() | st.integers(0, 2**64 - 1),
        "schema_version": st.none() | st.integers(0, 2**32 - 1),
    }
)
_TYPES = {
    "payload": pa.binary(),
    "producer_name": pa.string(),
    "publish_time": pa.timestamp("ms", tz="UTC"),
    "attributes": pa.map_(pa.string(), pa.string()),
    "routing_key": pa.string(),
    "schema_id": pa.uint64(),
    "schema_version": pa.uint32(),
}
_BINCODE1_COLUMNS = ("payload", "producer_name", "publish_time", "attributes")


def as_batch(rows, columns):
    def value(row, name):
        found = row[name]
        return list(found.items()) if name == "attributes" and found is not None else found

    return pa.RecordBatch.from_arrays(
        [pa.array([value(row, name) for row in rows], _TYPES[name]) for name in columns],
        names=list(columns),
    )


def append_each(topic, rows, columns):
    for row in rows:
        given = {name: row[name] for name in columns if row[name] is not None}
        topic.append(given.pop("payload"), **given)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    parts=st.lists(st.tuples(st.booleans(), st.lists(_ROWS, max_size=12)), max_size=5),
    codec=st.sampled_from(list(Codec)),
    extra=st.sets(st.sampled_from(sorted(_TYPES))),
)
def test_rows_are_the_messages_that_append_makes_of_them(parts, codec, extra):
    """Goal: the same records, however rows and single messages are mixed, in both codecs."""
    possible = _TYPES if codec is Codec.BINCODE2 else _BINCODE1_COLUMNS
    columns = [name for name in possible if name == "payload" or name in extra]
    with Machine() as one, Machine() as other:
        mixed, single = a_topic(one, codec=codec), a_topic(other, codec=codec)
        for is_arrow, rows in parts:
            append_each(single, rows, columns)
            if is_arrow:
                first = mixed.watermarks.next
                offsets = mixed.append_arrow(as_batch(rows, columns))
                assert offsets == range(first, first + len(rows))
            else:
                append_each(mixed, rows, columns)
        # Rows are numbered within their batch; messages that come alone are not.
        assert [replace(record, request_id=0) for record in records(mixed)] == records(single)
        assert mixed.watermarks.next == sum(len(rows) for _, rows in parts)


def test_topic_and_offset_of_the_rows_are_passed_over(machine):
    topic = a_topic(machine)
    topic.append_many(numbered(3))
    table = topic.read_arrow().read_all()
    (batch,) = table.to_batches()
    assert topic.append_arrow(batch) == range(3, 6)
    first, second = records(topic)[:3], records(topic)[3:]
    assert [r.payload for r in first] == [r.payload for r in second]
    assert [r.msg_id.topic_offset for r in second] == [3, 4, 5]
    assert [r.publish_time for r in first] == [r.publish_time for r in second]


def test_rows_carry_the_ids_they_are_given(machine):
    topic = a_topic(machine)
    topic.append_arrow(a_batch([b"x", b"y"]), producer_id=2**64 - 1, first_request_id=41)
    topic.append_arrow(a_batch([b"z"]))
    found = [(r.msg_id.producer_id, r.request_id) for r in records(topic)]
    assert found == [(2**64 - 1, 41), (2**64 - 1, 42), (0, 0)]


def test_slice_of_a_batch_is_its_rows(machine):
    topic = a_topic(machine)
    rows = [{"payload": b"%d" % n, "attributes": {"n": str(n)}} for n in range(10)]
    batch = as_batch(rows, ["payload", "attributes"])
    topic.append_arrow(batch.slice(3, 4))
    found = [(r.payload, dict(r.attributes)) for r in records(topic)]
    assert found == [(b"%d" % n, {"n": str(n)}) for n in range(3, 7)]


# -- what is refused ----------------------------------------------------------------------------


def with_column(name, values, kind=None):
    rows = pa.array([b"fine"] * len(values), pa.binary())
    return pa.RecordBatch.from_arrays([rows, pa.array(values, kind)], names=["payload", name])


MAP = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(pa.record_batch({"value": [b"x"]}), id="no payload"),
        pytest.param(pa.record_batch({"payload": [b"x"], "value": [1]}), id="unknown column"),
        pytest.param(a_batch([b"x", None]), id="null payload"),
        pytest.param(pa.record_batch({"payload": [1, 2]}), id="payload of numbers"),
        pytest.param(with_column("publish_time", [1, -1], pa.timestamp("ms")), id="before 1970"),
        pytest.param(with_column("publish_time", [1, 2]), id="time of numbers"),
        pytest.param(with_column("producer_name", [b"x", b"\xff"]), id="name of bytes"),
        pytest.param(with_column("schema_version", [1, 2**40]), id="version too large"),
        pytest.param(with_column("attributes", ["x"]), id="attributes of text"),
        pytest.param(
            with_column("attributes", [[], [("a", "b"), ("a", "c")]], MAP), id="attribute twice"
        ),
        pytest.param(with_column("attributes", [[("a", None)]], MAP), id="attribute null"),
        pytest.param(a_batch([b"fine"] * 20 + [b"x" * 2000]), id="payload too large"),
        pytest.param(with_column("routing_key", ["", "k" * (2 * MIB)]), id="key too large"),
    ],
)
def test_batch_that_cannot_be_taken_whole_leaves_nothing(machine, batch):
    topic = a_topic(machine, storage={"max_message_size": 1024})
    topic.append(b"before")
    with pytest.raises(InvalidRequestError):
        topic.append_arrow(batch)
    assert topic.watermarks.next == 1
    assert topic.append(b"after") == 1
    assert payloads(topic.read()) == [b"before", b"after"]


def test_field_that_the_codec_does_not_have_is_refused(machine):
    topic = a_topic(machine, codec=Codec.BINCODE1)
    with pytest.raises(InvalidRequestError):
        topic.append_arrow(with_column("routing_key", [None, "k"]))
    assert topic.watermarks.next == 0


@pytest.mark.parametrize("ids", [{"producer_id": -1}, {"first_request_id": 2**64 - 1}])
def test_ids_that_do_not_fit_are_refused(machine, ids):
    topic = a_topic(machine)
    with pytest.raises(InvalidRequestError):
        topic.append_arrow(a_batch([b"x", b"y"]), **ids)
    assert topic.watermarks.next == 0


def test_too_large_is_an_error_of_its_own(machine):
    topic = a_topic(machine, storage={"max_message_size": 10})
    with pytest.raises(MessageTooLargeError, match="row 1"):
        topic.append_arrow(a_batch([b"x", b"y" * 11]))


def test_closed_topic_takes_nothing(machine):
    topic = a_topic(machine)
    topic.close()
    with pytest.raises(ClosedError):
        topic.append_arrow(a_batch([b"x"]))


def test_full_buffer_refuses_where_that_is_the_policy(machine):
    topic = a_topic(machine, buffer_max_bytes=1 * MIB, buffer_full="refuse")
    big = a_batch([b"x" * 1000] * 800)
    topic.append_arrow(big)
    with pytest.raises(CapacityError):
        topic.append_arrow(big)
    assert topic.watermarks.next == 800
    topic.flush()
    assert topic.append_arrow(big) == range(800, 1600)
    topic.flush()
    # A batch that is larger than the buffer is taken when that is empty.
    assert len(topic.append_arrow(a_batch([b"x" * 1000] * 3000))) == 3000
    topic.flush()
    assert len(payloads(topic.read())) == 4600


# -- readers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ack", ["memory", "written", "synced"])
def test_follower_sees_every_row_at_every_level(machine, ack):
    topic = machine.topic(ack=ack)
    count = 3000

    def follow():
        found = []
        for message in topic.read(follow=True, timeout=5.0):
            found.append(message.payload)
            if len(found) == count:
                return found
        return found

    follower = Task(follow)
    sent = numbered(count)
    rng = random.Random(3)
    at = 0
    while at < count:
        rows = sent[at : at + rng.randint(1, 200)]
        at += len(rows)
        if rng.random() < 0.5:
            topic.append_arrow(a_batch(rows))
        else:
            topic.append_many(rows)
    assert follower.result() == sent


def test_readers_at_the_tail_read_rows_from_the_cache(machine):
    """Batches of rows neither empty the cache nor go past it: no reader touches a file."""
    topic = a_topic(machine, cache_capacity=1000)
    topic.append_many(numbered(10))
    topic.flush()
    readers = [topic.reader(), topic.reader()]
    found = [payloads(reader.poll_cache(5)) for reader in readers]
    for first in range(10, 100, 10):
        topic.append_arrow(a_batch(numbered(10, first=first)))
        topic.append_many(numbered(2, first=first + 10))
        topic.flush()
        for payload, reader in zip(found, readers, strict=True):
            while batch := reader.poll_cache(4):
                payload.extend(payloads(batch))
    assert found == [payloads(topic.read())] * 2
    for reader in readers:
        reader.close()


def test_reader_behind_a_batch_over_the_capacity_reads_files(machine):
    topic = a_topic(machine, cache_capacity=8)
    topic.append_many(numbered(4))
    topic.flush()
    reader = topic.reader()
    found = payloads(reader.poll_cache(2))
    topic.append_arrow(a_batch(numbered(50, first=4)))
    topic.flush()
    assert (topic.cache.start, topic.cache.end) == (46, 54)
    while batch := reader.poll(7):
        found += payloads(batch)
    assert found == numbered(54)
    assert payloads(topic.reader(50).poll_cache()) == numbered(4, first=50)
    reader.close()


def test_time_is_found_among_rows(machine):
    topic = a_topic(machine)
    times = [1000 + n for n in range(100)]
    batch = pa.record_batch(
        {"payload": numbered(100), "publish_time": pa.array(times, pa.timestamp("ms"))}
    )
    topic.append_arrow(batch)
    topic.flush()
    assert topic.reader(EPOCH + timedelta(milliseconds=1042)).next_offset == 42


# -- in memory alone ----------------------------------------------------------------------------


def test_log_in_memory_keeps_the_newest_rows():
    tree = {"storage": {"mode": "memory", "wal": {"cache_capacity": 20}}}
    with ister.open(tree) as log:
        topic = log.topic(NAME, create=True)
        topic.append_arrow(a_batch(numbered(50)))
        assert topic.earliest == 30
        assert payloads(topic.read()) == numbered(20, first=30)


# -- files --------------------------------------------------------------------------------------


def test_many_rows_have_index_entries_and_rotate(machine):
    """Rows of many MiB: files end near their limit, and an offset is found without a scan."""
    topic = a_topic(machine, rotate_max_bytes=2 * MIB, cache_capacity=10)
    sent = numbered(12_000, size=1000)
    for at in range(0, len(sent), 3000):
        topic.append_arrow(a_batch(sent[at : at + 3000]))
        topic.flush()
    files = topic.wal.files
    assert len(files) >= 3
    sizes = [len(machine.read(topic.wal.directory.log_path(file.seq))) for file in files]
    for file, size in zip(files[:-1], sizes, strict=False):
        entries = topic.wal.directory.load_index(file.seq)
        assert len(entries) >= size // (3 * INDEX_STRIDE_BYTES)
        assert [entry.offset for entry in entries] == sorted({entry.offset for entry in entries})
    assert payloads(topic.read()) == sent
    machine.fs.before = (reads := Reads())
    assert payloads(topic.read(7000, end=7002)) == sent[7000:7002]
    assert reads.count <= 8
    machine.fs.before = lambda kind, path: None
    topic.wal.save_checkpoint()
    machine.kill()
    topic = machine.reopened(scheduler=NoThreads(), rotate_max_bytes=2 * MIB)
    assert topic.watermarks.next == 12_000
    assert payloads(topic.read(11_990)) == sent[11_990:]


class Reads:
    """Counts reads of log files."""

    def __init__(self):
        self.count = 0

    def __call__(self, kind, path):
        self.count += kind == "read" and path.endswith(".log")


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_were_waited_for_survive_a_power_cut(machine, seed):
    """Goal: what is left is a gapless beginning of what was sent, with all that was synced."""
    rng = random.Random(seed)
    topic = a_topic(machine, rotate_max_bytes=4096)
    sent, durable = [], 0
    for turn in range(30):
        rows = numbered(rng.randint(1, 20), first=1000 * turn, size=rng.choice((0, 50)))
        if rng.random() < 0.6:
            topic.append_arrow(a_batch(rows))
        else:
            topic.append_many(rows)
        sent += rows
        choice = rng.random()
        if choice < 0.4:
            topic.wait(len(sent) - 1)
            durable = len(sent)
        elif choice < 0.7:
            topic.wait(len(sent) - 1, AckLevel.WRITTEN)
    machine.cut_power(seed)
    topic = machine.reopened(clock=ManualClock(), scheduler=NoThreads(), rotate_max_bytes=4096)
    assert topic.state is TopicState.OPEN
    found = payloads(topic.read())
    assert found == sent[: len(found)]
    assert len(found) >= durable
    assert topic.append_arrow(a_batch([b"on"])) == range(len(found), len(found) + 1)
    topic.flush()
    assert payloads(topic.read(len(found))) == [b"on"]


def test_threads_that_append_rows_do_not_mix_them(machine):
    """Goal: the rows of a batch follow each other without another message in between."""
    topic = machine.topic()

    def produce(name):
        for number in range(20):
            topic.append_arrow(a_batch([b"%s-%d-%d" % (name, number, row) for row in range(25)]))
            topic.append(b"%s-single" % name)

    producers = [Task(produce, name) for name in (b"a", b"b", b"c")]
    for producer in producers:
        producer.result()
    topic.flush()
    found = payloads(topic.read())
    assert len(found) == 3 * 20 * 26
    rows = [payload for payload in found if not payload.endswith(b"single")]
    at = 0
    while at < len(found):
        if found[at].endswith(b"single"):
            at += 1
            continue
        name, number, row = found[at].split(b"-")
        assert row == b"0"
        assert found[at : at + 25] == [b"%s-%s-%d" % (name, number, n) for n in range(25)]
        at += 25
    assert len(rows) == len(set(rows)) == 1500


# -- payloads alone ------------------------------------------------------------------------------


def plain_rows(count):
    texts = [b"%d" % number for number in range(count)]
    column = pa.array(texts, pa.binary())
    _, offsets, data = column.buffers()
    return texts, Payloads.of(memoryview(offsets), 4, memoryview(data), count)


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("codec", list(Codec))
def test_payloads_alone_are_stored_as_rows_of_arrow_are(machine, codec, count):
    kernels.load()
    topic = a_topic(machine, codec=codec)
    texts, rows = plain_rows(count)
    ids = {"producer_id": 2**64 - 1, "first_request_id": 41, "producer_name": "someone"}
    assert topic.appender.append_payloads(rows, **ids) == range(count)
    assert topic.append_arrow(a_batch(texts), **ids) == range(count, 2 * count)
    found = records(topic)
    for first, second in zip(found[:count], found[count:], strict=True):
        offset = first.msg_id.topic_offset + count
        assert replace(first, msg_id=replace(first.msg_id, topic_offset=offset)) == second


def test_payloads_are_encoded_again_if_another_message_was_first(machine, monkeypatch):
    """Goal: offsets follow each other, though rows are encoded before the lock is taken."""
    kernels.load()
    topic = a_topic(machine)
    texts, rows = plain_rows(100)
    accept = type(topic.appender)._accept

    def late(self, size, put):
        monkeypatch.undo()
        topic.append(b"first")
        return accept(self, size, put)

    monkeypatch.setattr(type(topic.appender), "_accept", late)
    assert topic.appender.append_payloads(rows) == range(1, 101)
    assert [record.payload for record in records(topic)] == [b"first", *texts]
    assert [record.msg_id.topic_offset for record in records(topic)] == list(range(101))


@pytest.mark.parametrize("count", [11, 100])
def test_payload_that_is_too_large_is_refused_with_its_batch(machine, count):
    kernels.load()
    topic = a_topic(machine, storage={"max_message_size": 1})
    _, rows = plain_rows(count)
    with pytest.raises(MessageTooLargeError):
        topic.appender.append_payloads(rows)
    assert topic.watermarks.next == 0
