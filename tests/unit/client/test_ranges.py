"""A range read by Flight, from brokers that go away meanwhile."""

import asyncio
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from ister.base.model import AckLevel, Codec
from ister.client.aio import AsyncReader
from ister.client.ranges import ArrowRead, Reader, TopicRanges
from ister.errors import ConflictError, InvalidRequestError, OffsetOutOfRangeError, UnavailableError
from ister.format.arrow.schema import arrow_schema
from ister.wire.contract import TopicStatus

TOPIC = "/default/t"


class Brokers:
    """Topics of some messages each, at addresses; what goes wrong is listed in `faults`."""

    def __init__(self, topics=(TOPIC,), *, count=10, ack=AckLevel.SYNCED, synced=None):
        self.topics = topics
        self.count = count
        self.ack = ack
        self.synced = count if synced is None else synced
        self.faults = []
        self.located = 0
        self.opened = []
        self.asked = []

    def locate(self, topic):
        assert topic == TOPIC
        self.located += 1
        return [(name, f"broker-{self.located}:1") for name in self.topics]

    def open(self, address):
        made = Flight(self, address)
        self.opened.append(made)
        return made

    def read(self, *args, timeout=30.0, **named):
        named = {"start": "earliest", "end": None, "columns": ["offset"], **named}
        return ArrowRead(TOPIC, **named, locate=self.locate, open_flight=self.open, timeout=timeout)

    def reader(self, *, start="earliest", timeout=30.0, **named):
        def open_ranges(columns):
            more = {"locate": self.locate, "open_flight": self.open, "timeout": timeout}
            return TopicRanges(TOPIC, start, None, columns, **more, **named)

        return Reader(TOPIC, open_ranges)


class Flight:
    def __init__(self, brokers, address):
        self.brokers = brokers
        self.address = address
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def watermarks(self, topics):
        self._fail("watermarks")
        count, synced = self.brokers.count, self.brokers.synced
        return {
            topic: TopicStatus(
                topic=topic,
                incarnation="i",
                earliest=0,
                trimmed=0,
                tiered=0,
                synced=synced,
                written=synced,
                next=count,
                codec=Codec.BINCODE2,
                ack=self.brokers.ack,
            )
            for topic in topics
        }

    def find_time(self, topic, milliseconds, start, end):
        return milliseconds if milliseconds < end else None

    def read(self, ticket):
        self.brokers.asked.append((self.address, ticket.topic, ticket.start, ticket.end))
        for offset in range(ticket.start, ticket.end, 2):
            self._fail(offset)
            rows = [
                {
                    "topic": ticket.topic,
                    "offset": one,
                    "payload": b"%d" % one,
                    "publish_time": datetime.fromtimestamp(one / 1000, UTC),
                }
                for one in range(offset, min(offset + 2, ticket.end))
            ]
            schema = arrow_schema(ticket.columns)
            yield pa.RecordBatch.from_pylist(
                [{name: row.get(name) for name in schema.names} for row in rows], schema
            )

    def _fail(self, where):
        if self.brokers.faults and self.brokers.faults[0][0] == where:
            raise self.brokers.faults.pop(0)[1]


def offsets(read):
    return [one for batch in read.batches() for one in batch["offset"].to_pylist()]


def test_reading_goes_on_at_another_broker():
    brokers = Brokers()
    brokers.faults = [(4, UnavailableError("gone")), (6, UnavailableError("gone again"))]
    assert offsets(brokers.read()) == list(range(10))
    assert brokers.asked == [
        ("broker-1:1", TOPIC, 0, 10),
        ("broker-2:1", TOPIC, 4, 10),
        ("broker-3:1", TOPIC, 6, 10),
    ]
    assert all(one.is_closed for one in brokers.opened)


def test_the_range_is_asked_for_again():
    brokers = Brokers()
    brokers.faults = [("watermarks", UnavailableError("gone"))]
    assert offsets(brokers.read(start=7)) == [7, 8, 9]
    assert brokers.located == 2
    assert all(one.is_closed for one in brokers.opened)


def test_what_cannot_be_retried_is_raised():
    brokers = Brokers()
    brokers.faults = [(4, ConflictError("deleted and made again"))]
    with pytest.raises(ConflictError):
        offsets(brokers.read())
    assert all(one.is_closed for one in brokers.opened)


def test_ranges():
    brokers = Brokers()
    at = datetime.fromtimestamp(0.003, UTC)
    assert offsets(brokers.read(start=at)) == [3, 4, 5, 6, 7, 8, 9]
    assert offsets(brokers.read(start=2, end=at)) == [2]
    assert offsets(brokers.read(start=datetime(2026, 1, 1, tzinfo=UTC))) == []
    assert offsets(brokers.read(start="latest")) == []
    assert offsets(brokers.read(start=8, end=100)) == [8, 9], "behind the end is the end"
    assert offsets(brokers.read(start=at, end=at)) == []
    with pytest.raises(InvalidRequestError):
        brokers.read(start=4, end=3)
    with pytest.raises(OffsetOutOfRangeError):
        brokers.read(start=11)
    with pytest.raises(InvalidRequestError) as caught:
        brokers.read(columns=["x"])
    assert caught.value.hint.endswith("text")


def test_columns():
    brokers = Brokers(count=2)
    batch = pa.Table.from_batches(brokers.read(columns=["text"]).batches())
    assert batch.to_pydict() == {"text": ["0", "1"]}
    assert [one.num_rows for one in brokers.read(columns=[]).batches()] == [2]
    with pytest.raises(InvalidRequestError):
        brokers.read(columns=["text", "text"])


def test_partitions_one_after_the_other():
    brokers = Brokers([f"{TOPIC}-part-0", f"{TOPIC}-part-1"], count=3)
    brokers.faults = [(2, UnavailableError("gone"))]
    read = brokers.read(columns=["topic", "offset"])
    found = [tuple(row.values()) for batch in read.batches() for row in batch.to_pylist()]
    assert found == [(name, offset) for name in brokers.topics for offset in range(3)]
    for named in ({"start": 1}, {"end": 1}):
        with pytest.raises(InvalidRequestError):
            brokers.read(**named)


def test_messages_in_memory_only_are_not_passed_over_in_silence():
    with pytest.raises(InvalidRequestError):
        Brokers(ack=AckLevel.MEMORY, synced=0).read()
    assert offsets(Brokers(ack=AckLevel.MEMORY, synced=4).read()) == [0, 1, 2, 3]
    assert offsets(Brokers(ack=AckLevel.MEMORY, count=0).read()) == []


# -- readers --------------------------------------------------------------------------------


def test_a_reader_ends_at_the_end_unless_it_follows():
    brokers = Brokers(count=3)
    with brokers.reader() as reader:
        assert [(one.topic, one.offset, one.publish_time_ms) for one in reader] == [
            (TOPIC, offset, offset) for offset in range(3)
        ]
        assert reader.is_done
        assert reader.read() == []
    brokers = Brokers(count=2)
    with brokers.reader(follow=True) as reader:
        assert [one.payload for one in reader.read()] == [b"0", b"1"]
        assert reader.read(timeout=0) == []
        assert not reader.is_done
        assert repr(reader) == f"<Reader {TOPIC} next=2>"
        brokers.count = brokers.synced = 4
        assert [one.offset for one in reader.read(timeout=30)] == [2, 3]
    assert all(one.is_closed for one in brokers.opened)


def test_where_a_reader_begins():
    for named, first in (
        ({"start": "latest"}, 10),
        ({"start": 4}, 4),
        ({"last": 3}, 7),
        ({"last": 30}, 0),
        ({"start": datetime.fromtimestamp(0.002, UTC)}, 2),
    ):
        reader = Brokers().reader(follow=True, **named)
        assert reader.positions == {TOPIC: first}, named
        reader.close()


def test_a_reader_goes_on_at_another_broker_and_can_be_stopped():
    brokers = Brokers()
    brokers.faults = [(4, UnavailableError("gone"))]
    with brokers.reader() as reader:
        assert [one.offset for one in reader] == list(range(10))
    assert [asked[2] for asked in brokers.asked] == [0, 4]
    reader = Brokers().reader(follow=True)
    for message in reader:
        if message.offset == 5:
            reader.stop()
    assert reader.is_done
    brokers = Brokers()
    brokers.faults = [(4, UnavailableError("gone"))] * 1000
    with pytest.raises(UnavailableError), brokers.reader(timeout=0.05) as reader:
        list(reader)


def test_partitions_take_turns():
    brokers = Brokers([f"{TOPIC}-part-0", f"{TOPIC}-part-1"], count=30_000)
    with brokers.reader() as reader:
        found = [message.topic for message in reader]
    assert len(found) == 60_000
    assert found.index(brokers.topics[1]) == 20_000


async def test_an_asynchronous_reader_is_opened_once():
    brokers, opened = Brokers(), []

    def open_reader():
        opened.append(brokers.reader())
        return opened[-1]

    reader = AsyncReader(TOPIC, open_reader)
    await asyncio.gather(reader.__aenter__(), reader.__aenter__())
    await reader.close()
    assert len(opened) == 1
