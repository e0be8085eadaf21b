"""Partitioned topics without a broker: never a plain topic beside them, and rows find theirs."""

import threading

import pyarrow as pa
import pytest

import ister
from ister.base.partitions import partition_of
from ister.errors import AlreadyExistsError, InvalidRequestError, NotFoundError
from ister.topic.partitioned import split_rows
from tests.support.machine import payloads

NAME = "/default/orders"
PARTS = [f"{NAME}-part-{number}" for number in range(3)]


@pytest.fixture(params=["memory", "local_only", "wal_cloud"])
def tree(request, tmp_path):
    mode = request.param
    if mode == "memory":
        return None
    if mode == "local_only":
        return {"storage": {"mode": mode, "wal": {"dir": str(tmp_path / "wal")}}}
    return str(tmp_path)


@pytest.fixture
def log(tree):
    with ister.open(tree) as log:
        yield log


def make_parts(log, names=PARTS):
    return [log.topic(name, create=True) for name in names]


def test_topic_is_not_made_over_its_partitions(log):
    parts = make_parts(log)
    for number in range(150):
        parts[number % 3].append(b"%d" % number)
    with pytest.raises(AlreadyExistsError, match="3 partitions"):
        log.topic(NAME, create=True)
    assert log.topics() == PARTS
    assert log.partitions(NAME) == PARTS


def test_topic_is_not_made_over_partitions_that_are_closed(tree, log):
    if tree is None:
        return  # nothing outlives a log in memory
    make_parts(log, PARTS[:2])
    log.close()
    with ister.open(tree) as again:
        with pytest.raises(AlreadyExistsError, match="2 partitions"):
            again.topic(NAME, create=True)
        assert again.topics() == PARTS[:2]


def test_partition_is_not_made_beside_a_plain_topic(log):
    log.topic(NAME, create=True)
    with pytest.raises(AlreadyExistsError, match="without partitions"):
        log.topic(PARTS[0], create=True)
    assert log.topics() == log.partitions(NAME) == [NAME]
    with pytest.raises(NotFoundError):
        log.partitioned(NAME)


def test_names_that_only_look_alike_are_free(log):
    names = [f"{NAME}-part-", f"{NAME}-part-01", f"{NAME}-part-1-part-0", NAME]
    for name in names:
        log.topic(name, create=True)
    assert log.topics() == sorted(names)


def test_name_is_free_once_the_partitions_are_deleted(log):
    make_parts(log)
    for name in PARTS:
        log.delete(name)
    log.topic(NAME, create=True)
    assert log.partitions(NAME) == [NAME]


def test_topic_and_partition_made_at_once_are_one_or_the_other(log):
    done = []

    def make(name):
        try:
            log.topic(name, create=True)
        except AlreadyExistsError:
            return
        done.append(name)

    for number in range(20):
        base = f"/default/race-{number}"
        done.clear()
        threads = [threading.Thread(target=make, args=(n,)) for n in (base, f"{base}-part-0")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 1


def test_published_message_is_durable_in_its_partition(log):
    make_parts(log)
    where, offset = log.partitioned(NAME).publish(b"x", routing_key="a")
    assert where.name == PARTS[partition_of("a", 3)]
    assert (where.watermarks.synced > offset) is (where.ack is not ister.AckLevel.MEMORY)
    with pytest.raises(InvalidRequestError):
        log.partitioned(NAME).publish(b"y", routing_key="a", level="best")
    assert where.watermarks.next == offset + 1


def test_messages_go_to_the_partition_of_their_key_and_in_turn_without_one(log):
    make_parts(log)
    topic = log.partitioned(NAME)
    for key in ("a", "b", "order-17", ""):
        where, offset = topic.append(b"x", routing_key=key)
        assert where.name == PARTS[partition_of(key, 3)]
        assert where.watermarks.next == offset + 1
    assert [topic.append(b"y")[0].name for _ in range(4)] == [*PARTS, PARTS[0]]
    topic.flush()
    with pytest.raises(InvalidRequestError, match="routing_key"):
        topic.append(b"x", routing_key=7)


def test_rows_go_to_the_partition_of_their_key(log):
    make_parts(log)
    keys = ["a", None, "b", "a", "", "order-17", None, "b"]
    rows = pa.record_batch(
        {"payload": [b"%d" % n for n in range(8)], "routing_key": pa.array(keys, pa.string())}
    )
    appended = log.partitioned(NAME).append_arrow(rows)
    assert sum(len(offsets) for _, offsets in appended) == 8
    for topic, offsets in appended:
        found = list(topic.read())
        assert [message.offset for message in found] == list(offsets)
        number = PARTS.index(topic.name)
        assert payloads(found) == sorted(payloads(found))
        for message in found:
            if message.routing_key is not None:
                assert partition_of(message.routing_key, 3) == number
    assert (
        sorted(p for name in PARTS for p in payloads(log.topic(name).read()))
        == rows["payload"].to_pylist()
    )


def test_same_rows_in_another_order_are_divided_alike():
    keys = [None if n % 3 else f"k{n % 7}" for n in range(100)]
    rows = pa.record_batch(
        {"payload": [b"p%d" % n for n in range(100)], "routing_key": pa.array(keys, pa.string())}
    )
    turned = rows.take(pa.array(range(99, -1, -1)))
    first = {number: set(part["payload"].to_pylist()) for number, part in split_rows(rows, 4)}
    second = {number: set(part["payload"].to_pylist()) for number, part in split_rows(turned, 4)}
    assert first == second
    assert sorted(first) == [0, 1, 2, 3]
