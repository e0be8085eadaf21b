"""Kafka's clients with two brokers: topics move, a broker ends, groups go on.

Both brokers are on the loop of the test and share a metadata store and a bucket; the clients are in
threads, and know the address of one broker only.
"""

import asyncio
import threading
import time
import uuid
from contextlib import AsyncExitStack, asynccontextmanager

import confluent_kafka
import confluent_kafka.admin
import pytest

from ister.broker.server import Broker
from tests.support.broker import eventually, settings_of
from tests.support.waiting import PATIENCE_SECONDS

PARTITIONS = 4


@asynccontextmanager
async def a_pair(directory):
    """Two brokers, and the addresses of their ports for Kafka's clients."""
    stores = {
        "cloud": {"root": str(directory / "objects")},
        "metadata": {"path": str(directory / "metadata.db"), "lease_ttl_seconds": 30},
    }
    async with AsyncExitStack() as stack:
        brokers, addresses = [], []
        for name in ("a", "b"):
            broker = Broker(settings_of(directory / name, {"storage": stores}))
            listening = await broker.start()
            stack.push_async_callback(broker.stop)
            brokers.append(broker)
            addresses.append(f"127.0.0.1:{listening.kafka}")
        for broker in brokers:
            await asyncio.to_thread(broker.cluster.members.read)
        yield brokers, addresses


def make_topic(address, name):
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": address})
    admin.create_topics([confluent_kafka.admin.NewTopic(name, PARTITIONS)])[name].result()
    return admin


def leaders(admin, topic):
    found = admin.list_topics(topic, timeout=PATIENCE_SECONDS).topics[topic].partitions
    return {number: one.leader for number, one in found.items()}


class Sender(threading.Thread):
    """Produces numbers to all partitions until it is told to stop."""

    def __init__(self, address, topic):
        super().__init__()
        self.sent = 0
        self.told, self.failed = [], []
        self._topic = topic
        self._stopping = threading.Event()
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": address,
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 300_000,
            }
        )

    def run(self):
        while not self._stopping.is_set():
            self._producer.produce(
                self._topic,
                str(self.sent).encode(),
                partition=self.sent % PARTITIONS,
                on_delivery=self._deliver,
            )
            self.sent += 1
            self._producer.poll(0.005)
        self._producer.flush(PATIENCE_SECONDS)

    def _deliver(self, error, message):
        (self.told if error is None else self.failed).append(message)

    def finish(self):
        self._stopping.set()
        self.join()


def read_all(address, topic, count):
    """Everything in a topic, in the order of offsets of each partition."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "reader"})
    consumer.assign([confluent_kafka.TopicPartition(topic, one, 0) for one in range(PARTITIONS)])
    found = [[] for _ in range(PARTITIONS)]
    end_at = time.monotonic() + PATIENCE_SECONDS
    while sum(map(len, found)) < count and time.monotonic() < end_at:
        for one in consumer.consume(500, timeout=1.0):
            assert one.error() is None
            found[one.partition()].append(int(one.value()))
    # Nothing comes behind it.
    assert consumer.consume(1, timeout=2.0) == []
    consumer.close()
    return found


@pytest.mark.nightly
async def test_an_idempotent_producer_follows_topics_that_move(tmp_path):
    topic = f"t-{uuid.uuid4().hex[:8]}"
    async with a_pair(tmp_path) as (brokers, addresses):
        admin = await asyncio.to_thread(make_topic, addresses[0], topic)
        nodes = {broker.cluster.own.kafka_id: broker for broker in brokers}
        assert len(nodes) == 2
        for address in addresses:
            asked = confluent_kafka.admin.AdminClient({"bootstrap.servers": address})
            found = await asyncio.to_thread(asked.list_topics, timeout=60)
            assert {one.id for one in found.brokers.values()} == set(nodes)
        sender = Sender(addresses[0], topic)
        sender.start()
        try:
            for number in range(PARTITIONS):
                before = len(sender.told)
                await eventually(lambda before=before: len(sender.told) > before + 50)
                old = (await asyncio.to_thread(leaders, admin, topic))[number]
                [new] = set(nodes) - {old}
                target = nodes[new].cluster.own.node
                await nodes[new].topics.move(f"/default/{topic}-part-{number}", target)
                assert (await asyncio.to_thread(leaders, admin, topic))[number] == new
            before = len(sender.told)
            await eventually(lambda: len(sender.told) > before + 50)
        finally:
            await asyncio.to_thread(sender.finish)
        assert sender.failed == []
        found = await asyncio.to_thread(read_all, addresses[1], topic, sender.sent)
        assert found == [list(range(one, sender.sent, PARTITIONS)) for one in range(PARTITIONS)]


async def test_a_group_goes_on_when_its_coordinator_ends(tmp_path):
    topic = f"t-{uuid.uuid4().hex[:8]}"
    async with a_pair(tmp_path) as (brokers, addresses):
        await asyncio.to_thread(make_topic, addresses[0], topic)
        producer = confluent_kafka.Producer({"bootstrap.servers": ",".join(addresses)})

        def send(start, count):
            for number in range(start, start + count):
                producer.produce(topic, str(number).encode(), partition=number % PARTITIONS)
            assert producer.flush(PATIENCE_SECONDS) == 0

        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": ",".join(addresses),
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 10_000,
            }
        )

        def receive(count):
            found, end_at = [], time.monotonic() + PATIENCE_SECONDS
            while len(found) < count and time.monotonic() < end_at:
                lot = consumer.consume(count - len(found), timeout=1.0)
                found += [int(one.value()) for one in lot if one.error() is None]
            return sorted(found)

        def commit():
            end_at = time.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    consumer.commit(asynchronous=False)
                except confluent_kafka.KafkaException:
                    assert time.monotonic() < end_at
                    consumer.poll(0.2)  # it joins again
                else:
                    return

        consumer.subscribe([topic])
        await asyncio.to_thread(send, 0, 40)
        assert await asyncio.to_thread(receive, 40) == list(range(40))
        await asyncio.to_thread(commit)
        [holder] = [one for one in brokers if one._kafka.report()["groups"]]
        [other] = [one for one in brokers if one is not holder]
        await holder.stop()
        await asyncio.to_thread(send, 40, 40)
        # Nothing that was committed comes again, and nothing is left out.
        assert await asyncio.to_thread(receive, 40) == list(range(40, 80))
        await asyncio.to_thread(commit)
        assert other._kafka.report()["groups"] == 1
        await asyncio.to_thread(consumer.close)
