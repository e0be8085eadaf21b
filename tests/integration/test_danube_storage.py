"""Danube's scenarios of its storage, on a directory with SQLite and on S3 with etcd.

Danube's `shared_fs` is the bucket in a directory here, its `cloud_native` the one in S3. Most of
its scenarios, and of the faults that were found in it, are shown by the tests of single modules, as
the tables in docs/TESTING.md say: here is what wants real stores, several nodes or a real disk.
"""

import os
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from ister.base.model import MessageId, StreamMessage, TopicName
from ister.bucket.names import object_key
from ister.config import load_config
from ister.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from ister.format.frame import scan_frames
from ister.topic.log import Log
from tests.servers.etcd import EtcdServer
from tests.servers.s3 import rclone_server
from tests.support.builders import flip_byte, measured_allocation
from tests.support.cases import each
from tests.support.machine import PATIENCE_SECONDS, Task, eventually, numbered, payloads
from tests.support.scale import nightly
from tests.support.stores import Site

TOPIC = "/default/orders"
KIB = 1024
MIB = 1024 * KIB


@pytest.fixture(scope="module")
def s3():
    with rclone_server() as server:
        yield server


@pytest.fixture(scope="module")
def etcd():
    with EtcdServer() as server:
        yield server


class Place:
    """A bucket and a metadata store, and the nodes that share them, each with its own `wal.dir`."""

    def __init__(self, directory: Path, *, s3=None, etcd=None) -> None:
        self.directory = directory
        self._prefix = uuid.uuid4().hex[:12]
        self._s3, self._etcd = s3, etcd
        self._stack = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self._stack.close()

    def settings(self, name, *, uploads=False, **sections):
        cloud = {"backend": "fs", "root": str(self.directory / "bucket")}
        if self._s3 is not None:
            root = f"s3://{self._s3.bucket}/{self._prefix}"
            cloud = {"backend": "s3", "root": root, "options": self._s3.options()}
        metadata = {"backend": "sqlite", "path": str(self.directory / "metadata.db")}
        if self._etcd is not None:
            metadata = {"backend": "etcd", "endpoints": [self._etcd.endpoint]}
        engine = "embedded" if uploads else "none"
        tree = {
            "wal": {"dir": str(self.directory / name), "rotate_max_bytes": 4096},
            "uploader": {"engine": engine, "interval_seconds": 1, "max_object_bytes": 64 * KIB},
            "cloud": cloud,
            "metadata": {**metadata, "root_prefix": f"/{self._prefix}"},
        }
        return {"storage": {key: {**tree[key], **sections.pop(key, {})} for key in tree} | sections}

    def node(self, name="one", **sections):
        """A node's process; uploads run only when a test asks for them, unless `uploads` is set."""
        return self._stack.enter_context(Log(load_config(self.settings(name, **sections), {})))

    def files(self, node="one", topic=TOPIC):
        return self.directory / node / topic.removeprefix("/")

    def logs(self, node="one", topic=TOPIC):
        found = self.files(node, topic).glob("wal*.log")
        return sorted(found, key=lambda path: (len(path.name), path.name))


@pytest.fixture(params=["fs+sqlite", nightly("s3+sqlite"), nightly("fs+etcd"), "s3+etcd"])
def place(request, tmp_path):
    """Each pair of stores in turn, with a prefix of its own."""
    names = [name for name in request.param.split("+") if name in ("s3", "etcd")]
    with Place(tmp_path, **{name: request.getfixturevalue(name) for name in names}) as place:
        yield place


@pytest.fixture
def here(tmp_path):
    """A directory for a bucket, and SQLite."""
    with Place(tmp_path) as place:
        yield place


def fill(topic, sent, *, every=None):
    """Appends and waits until all is durable; each `every` messages become one write."""
    for number, payload in enumerate(sent, 1):
        offset = topic.append(payload)
        if every is not None and number % every == 0:
            topic.wait(offset)
    topic.flush()


def take(reader, count):
    """The next messages of a reader, exactly so many; waits for those that are to come."""
    found = []
    while len(found) < count:
        batch = reader.next_batch(count - len(found), timeout=PATIENCE_SECONDS)
        assert batch, f"{len(found)} messages came, and not {count}"
        found += batch
    return found


def offsets(messages):
    return [message.offset for message in messages]


def catalog(log, name=TOPIC):
    return log.stores.catalog(TopicName.parse(name))


def tiered_offsets(log, name=TOPIC):
    """The offsets in a topic's objects, read from the objects themselves."""
    found = []
    for described, _ in catalog(log, name).descriptors():
        key = object_key(TopicName.parse(name), described.object_id)
        data = log.stores.objects.read(key, 0, described.size_bytes + 1)
        scan = scan_frames(data, expected_offset=described.start)
        assert (scan.end, scan.next_offset) == (described.size_bytes, described.end)
        found += range(described.start, described.end)
    return found


# -- on every pair of stores --------------------------------------------------------------------


def test_owners_in_a_row_keep_every_offset_once(place):
    """Of an empty topic, with an owner that writes nothing, and the first owner again."""
    sent = []
    for name, count in (("one", 0), ("two", 7), ("three", 0), ("four", 40), ("one", 3)):
        log = place.node(name)
        topic = log.topic(TOPIC, create=True)
        end = len(sent)
        starts = [*sorted({0, end // 3, end}), "latest"]
        readers = {start: topic.reader(start) for start in starts}
        assert readers["latest"].next_batch(timeout=0) == []
        new = numbered(count, first=end, size=500)
        fill(topic, new[:-1])
        if new:  # a seal waits for what is not durable yet
            assert topic.append(new[-1]) == end + count - 1
            topic.flush()
        sent += new
        for start, reader in readers.items():
            begin = end if start == "latest" else start
            found = take(reader, len(sent) - begin)
            assert offsets(found) == list(range(begin, len(sent)))
            assert payloads(found) == sent[begin:]
        assert log.seal(TOPIC) == len(sent)
        assert tiered_offsets(log) == list(range(len(sent)))
        assert not place.files(name).exists()
        log.close()


def test_messages_are_read_from_bucket_files_and_cache_and_on_to_the_live_tail(place):
    """Each with its offset in the stored record, whatever the producer put there."""
    log = place.node(wal={"cache_capacity": 40, "retention": {"time_minutes": 0}})
    topic = log.topic(TOPIC, create=True)
    stranger = MessageId(producer_id=7, topic_name="elsewhere", topic_offset=999)
    sent = numbered(80, size=100) + numbered(40, first=80)
    for number, payload in enumerate(sent):
        topic.appender.append_record(
            StreamMessage(payload=payload, publish_time=1 + number, msg_id=stranger)
        )
        if number in (39, 79, 119):
            topic.flush()
        if number == 39:
            topic.upload()
    eventually(topic.bucket.retention.trim, "the first file is a millisecond old")
    assert (topic.watermarks.trimmed, topic.cache.start) == (40, 80)
    with topic.reader(0) as reader, topic.reader("latest") as latest:
        found = take(reader, 120)
        assert payloads(found) == sent
        assert [message.record.msg_id.topic_offset for message in found] == list(range(120))
        assert {message.record.msg_id.producer_id for message in found} == {7}
        counted = log.metrics.snapshot()
        assert counted["reader.history_entered_total"] == counted["reader.handoffs_total"] == 1
        began = time.thread_time()
        assert reader.next_batch(timeout=0.3) == [], "it is at the end"
        assert time.thread_time() - began < 0.1, "a reader that waits sleeps"
        fill(topic, [b"more"])
        assert payloads(take(reader, 1)) == payloads(take(latest, 1)) == [b"more"]
    opened = log.metrics.snapshot()["cloud_reader.objects_opened_total"]
    assert offsets(topic.read(40)) == list(range(40, 121))
    assert log.metrics.snapshot()["cloud_reader.objects_opened_total"] == opened


def test_topics_with_different_loads_are_written_read_and_uploaded_at_once(place):
    """None has a message of another; what becomes of one concerns no other."""
    log = place.node(uploads=True, wal={"cache_capacity": 16})
    loads = {
        # What is sent, and how many messages a write.
        "/default/small": (numbered(200), 20),
        "/default/large": ([b"%d" % number + os.urandom(MIB) for number in range(3)], 1),
        "/sales/orders": ([b"sales " + one for one in numbered(40)], 8),
        "/audit/orders": ([b"audit " + one for one in numbered(40)], 8),
    }

    def work(name):
        sent, every = loads[name]
        topic = log.topic(name, create=True)
        with topic.reader(0) as first, topic.reader(0) as second:
            readers = [Task(take, reader, len(sent)) for reader in (first, second)]
            fill(topic, sent, every=every)
            topic.wait(len(sent) - 1, "tiered")
            return [payloads(reader.result()) for reader in readers]

    for name, task in {name: Task(work, name) for name in loads}.items():
        sent, _ = loads[name]
        assert task.result() == [sent, sent]
        assert payloads(log.topic(name).read()) == sent
        assert tiered_offsets(log, name) == list(range(len(sent)))
    log.delete("/sales/orders")
    assert list(log.stores.objects.list("storage/topics/sales/orders/")) == []
    assert tiered_offsets(log, "/audit/orders") == list(range(40))


def test_delete_removes_objects_descriptors_seal_and_local_files(place):
    """First of a sealed topic that nobody has open, then of one that its next owner has."""
    one, two = place.node("one"), place.node("two")
    for is_open in (False, True):
        fill(one.topic(TOPIC, create=True), numbered(3))
        one.seal(TOPIC)
        assert catalog(one).sealed() is not None
        if is_open:
            topic = two.topic(TOPIC)
            fill(topic, numbered(2, first=3))
            topic.upload()
        two.delete(TOPIC)
        assert list(two.stores.objects.list("storage/topics/default/orders/")) == []
        assert two.stores.metadata.range(catalog(two).keys.storage) == []
        assert catalog(two).sealed() is None
        assert not place.files("two").exists()
        with pytest.raises(NotFoundError):
            two.topic(TOPIC)
    again = two.topic(TOPIC, create=True)
    assert again.append(b"anew") == 0


def test_durable_storage_without_a_wal_directory_is_refused(here):
    settings = here.settings("one")
    del settings["storage"]["wal"]["dir"]
    with pytest.raises(ConfigError):
        Log(load_config(settings, {}))


def test_local_topic_is_sealed_and_replayed_whole(tmp_path):
    """A seal keeps the files, as nothing else has them."""
    config = load_config({"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}, {})
    with Log(config) as log:
        fill(log.topic(TOPIC, create=True), numbered(3))
        assert log.seal(TOPIC) == 3
    with Log(config) as log:
        assert log.topic(TOPIC).append(b"3") == 3
        assert payloads(log.topic(TOPIC).read()) == numbered(4)


# -- files and memory ---------------------------------------------------------------------------


def three_files(topic):
    """200 messages: 100 in the first file, 50 in the second, 50 in the active one."""
    for count in (100, 50, 50):
        topic.append_many(numbered(count, first=topic.wal.next, size=100))
        topic.flush()
    assert [file.first_offset for file in topic.wal.files] == [0, 100, 150]


def test_append_at_the_turn_to_live_is_seen_without_another_one(here):
    topic = here.node(ack="memory").topic(TOPIC, create=True)
    with topic.reader(0) as reader:
        for number in range(300):
            reading = Task(take, reader, 1)
            topic.append(b"%d" % number)
            assert payloads(reading.result()) == [b"%d" % number]


def test_torn_bytes_at_the_end_of_one_file_hide_no_later_file(here):
    topic = here.node(wal={"cache_capacity": 1}).topic(TOPIC, create=True)
    three_files(topic)
    whole = here.logs()[1].read_bytes()
    with here.logs()[0].open("ab") as file:
        file.write(whole[: len(whole) // 3])
    assert offsets(topic.read(0)) == list(range(200))
    topic.upload()
    assert topic.watermarks.tiered == 200


def test_crc_mismatch_costs_no_memory_and_hides_nothing_behind_it(here):
    wal = {"rotate_max_bytes": 64 * MIB, "cache_capacity": 1, "stream_chunk_size": 64 * KIB}
    topic = here.node(wal=wal).topic(TOPIC, create=True)
    fill(topic, numbered(400, size=10 * KIB))
    (log,) = here.logs()
    flip_byte(log, log.read_bytes().index(b"5....") + 100)
    with topic.reader(0) as reader:
        assert offsets(take(reader, 5)) == list(range(5))
        with measured_allocation() as allocation:
            for _ in range(20):
                with pytest.raises(CorruptDataError) as caught:
                    reader.next_batch(timeout=0)
                assert caught.value.offset == 5
        assert allocation.peak_bytes < MIB
        assert reader.held_bytes <= 64 * KIB
    assert offsets(topic.read(6)) == list(range(6, 400))


def test_sparse_index_leads_to_an_offset_without_reading_the_file(here):
    log = here.node(wal={"rotate_max_bytes": 64 * MIB, "cache_capacity": 1})
    topic = log.topic(TOPIC, create=True)
    fill(topic, numbered(800, size=10_000))
    with topic.reader(700) as reader:
        assert payloads(take(reader, 1)) == numbered(1, first=700, size=10_000)
    assert log.metrics.snapshot()["wal.reader.stitch_file_bytes"] < 5 * MIB


def test_trim_passes_over_a_file_that_is_missing(here):
    """Its messages come from the bucket."""
    wal = {"cache_capacity": 1, "retention": {"time_minutes": 5}}
    topic = here.node(wal=wal).topic(TOPIC, create=True)
    three_files(topic)
    topic.upload()
    for path in here.logs():
        an_hour_ago = path.stat().st_mtime - 3600
        os.utime(path, (an_hour_ago, an_hour_ago))
    here.logs()[0].unlink()
    assert offsets(topic.read(0)) == list(range(200))
    topic.bucket.retention.trim()
    assert [path.name for path in here.logs()] == ["wal.2.log"]
    assert topic.watermarks.trimmed == 150


def test_upload_takes_chunks_and_not_whole_files_of_memory(here):
    uploader = {"stream_chunk_size": 64 * KIB, "max_object_bytes": 64 * MIB}
    log = here.node(wal={"rotate_max_bytes": 64 * MIB}, uploader=uploader)
    topic = log.topic(TOPIC, create=True)
    fill(topic, [os.urandom(100_000) for _ in range(160)])
    with measured_allocation() as allocation:
        topic.upload()
    ((described, _),) = catalog(log).descriptors()
    assert described.size_bytes > 15 * MIB
    assert allocation.peak_bytes < 8 * MIB


# -- what is stored and cannot be used ----------------------------------------------------------


@each("error", [UnavailableError, CorruptDataError])
def test_seal_that_cannot_be_read_does_not_begin_the_topic_at_zero(error):
    with Site() as site:
        one = site.open("one")
        fill(one.topic(TOPIC, create=True), numbered(3))
        one.seal(TOPIC)
        keys = site.catalog().keys
        kept = site.metadata.get(keys.sealed).value

        def before(kind, name):
            # A claim reads the record, the owner and the seal with one request.
            if kind == "get_many" and name == keys.record:
                raise UnavailableError("injected")

        two = site.open("two")
        if error is CorruptDataError:
            site.metadata.put(keys.sealed, b"garbage")
        else:
            site.metadata.before = before
        with pytest.raises(error):
            two.topic(TOPIC)
        site.metadata.before = lambda kind, name: None
        site.metadata.put(keys.sealed, kept)
        assert two.topic(TOPIC).append(b"3") == 3
