"""Kafka's clients, unmodified, against a broker in a process of its own.

Each row is a client library: what it sends in must come out, for itself and for the others.
"""

import asyncio
import time
import uuid
import warnings

import aiokafka
import confluent_kafka
import pytest

import ister.client
from tests.servers.broker import BrokerProcess
from tests.support.waiting import PATIENCE_SECONDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # how it reads its own files
    import kafka

pytestmark = pytest.mark.filterwarnings("ignore:read_text is deprecated:DeprecationWarning")

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS = [
    (b"a key", b"a value", []),
    (None, b"without a key", []),
    (b"", b"an empty key is a key", []),
    (b"deleted", None, []),
    (b"k", b"", [("trace", b"1"), ("trace", b"2"), ("empty", b""), ("null", None)]),
    (b"\xff\x00\xfe", bytes(range(256)), [("bytes", b"\xff\xfe")]),
    ("schlüssel".encode(), b"x" * 5000, [("größe", b"ein Wert")]),
    (b"k", b"forged", [("kafka.null-value", b"1"), ("kafka.key", b"AA==")]),
]
# kafka-python refuses to send headers without a value.
SENDABLE = [
    (key, value, [one for one in headers if one[1] is not None]) for key, value, headers in RECORDS
]
TIME_MS = 1_760_745_600_123


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with BrokerProcess(tmp_path_factory.mktemp("kafka")) as found:
        yield found
        assert "Traceback" not in found.log


@pytest.fixture
def topic():
    return f"t-{uuid.uuid4().hex[:12]}"


# -- what each library calls it -------------------------------------------------------------------


def produce_confluent(address, topic, records, compression, partition=0):
    told = []
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "compression.type": compression, "linger.ms": 20}
    )
    for key, value, headers in records:
        producer.produce(
            topic,
            key=key,
            value=value,
            headers=headers,
            timestamp=TIME_MS,
            partition=partition,
            on_delivery=lambda error, message: told.append((error, message.offset())),
        )
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert [error for error, _ in told if error is not None] == []
    return [offset for _, offset in told]


def produce_aiokafka(address, topic, records, compression, partition=0):
    async def send():
        async with aiokafka.AIOKafkaProducer(
            bootstrap_servers=address,
            compression_type=None if compression == "none" else compression,
            enable_idempotence=True,
        ) as producer:
            sent = [
                await producer.send(
                    topic,
                    value,
                    key=key,
                    headers=headers,
                    timestamp_ms=TIME_MS,
                    partition=partition,
                )
                for key, value, headers in records
            ]
            return [(await one).offset for one in sent]

    return asyncio.run(send())


def produce_kafka_python(address, topic, records, compression, partition=0):
    producer = kafka.KafkaProducer(
        bootstrap_servers=address,
        compression_type=None if compression == "none" else compression,
        linger_ms=20,
    )
    sent = [
        producer.send(
            topic, value, key=key, headers=headers, timestamp_ms=TIME_MS, partition=partition
        )
        for key, value, headers in records
    ]
    producer.flush(PATIENCE_SECONDS)
    offsets = [one.get(PATIENCE_SECONDS).offset for one in sent]
    producer.close()
    return offsets


def consume_confluent(address, topic, count, partition=0):
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "unused"})
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
    found = []
    end_at = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count and time.monotonic() < end_at:
        for one in consumer.consume(count - len(found), timeout=1.0):
            assert one.error() is None
            found.append((one.key(), one.value(), one.headers() or [], one.timestamp()[1]))
    consumer.close()
    return found


def consume_aiokafka(address, topic, count, partition=0):
    async def read():
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=address)
        await consumer.start()
        consumer.assign([aiokafka.TopicPartition(topic, partition)])
        await consumer.seek_to_beginning()
        found = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found) < count:
                one = await consumer.getone()
                found.append((one.key, one.value, list(one.headers), one.timestamp))
        await consumer.stop()
        return found

    return asyncio.run(read())


def consume_kafka_python(address, topic, count, partition=0):
    consumer = kafka.KafkaConsumer(bootstrap_servers=address)
    consumer.assign([kafka.TopicPartition(topic, partition)])
    consumer.seek_to_beginning()
    found = []
    end_at = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count and time.monotonic() < end_at:
        for records in consumer.poll(1000).values():
            found += [(one.key, one.value, list(one.headers), one.timestamp) for one in records]
    consumer.close()
    return found


PRODUCERS = {
    "confluent": produce_confluent,
    "aiokafka": produce_aiokafka,
    "kafka-python": produce_kafka_python,
}
CONSUMERS = {
    "confluent": consume_confluent,
    "aiokafka": consume_aiokafka,
    "kafka-python": consume_kafka_python,
}


# -- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", PRODUCERS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_records_come_out_as_they_went_in(broker, topic, client, compression):
    sent = (SENDABLE if client == "kafka-python" else RECORDS) * 3
    assert PRODUCERS[client](broker.kafka, topic, sent, compression) == list(range(len(sent)))
    wanted = [(*one, TIME_MS) for one in sent]
    readers = CONSUMERS if compression == "none" else ("confluent",)
    for reader in readers:
        assert CONSUMERS[reader](broker.kafka, topic, len(sent)) == wanted, reader


def test_a_topic_has_the_same_messages_at_every_door(broker, topic):
    produce_confluent(broker.kafka, topic, [(b"eu-1", b"by kafka", [("a", b"b")])], "none")
    name = f"/default/{topic}-part-0"
    with ister.client.connect(broker.address) as client:
        with client.producer(name) as producer:
            producer.send(b"by ister", routing_key="eu-2", attributes={"c": "d"}).result()
        with client.consumer(name, "s", start="earliest") as consumer:
            found = []
            for message in consumer:
                found.append((message.payload, message.routing_key, dict(message.attributes)))
                if len(found) == 2:
                    break
    assert found == [(b"by kafka", "eu-1", {"a": "b"}), (b"by ister", "eu-2", {"c": "d"})]
    read = [one[:3] for one in consume_confluent(broker.kafka, topic, 2)]
    assert read == [
        (b"eu-1", b"by kafka", [("a", b"b")]),
        (b"eu-2", b"by ister", [("c", b"d")]),
    ]


# -- places ---------------------------------------------------------------------------------------


def test_offsets_of_ends_and_times(broker, topic):
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.kafka})
    for number in range(10):
        producer.produce(topic, b"x", timestamp=TIME_MS + 1000 * number)
    assert producer.flush(PATIENCE_SECONDS) == 0
    place = confluent_kafka.TopicPartition(topic, 0)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker.kafka, "group.id": "unused"})
    assert consumer.get_watermark_offsets(place) == (0, 10)

    def offset_at(time_ms):
        asked = confluent_kafka.TopicPartition(topic, 0, time_ms)
        return consumer.offsets_for_times([asked])[0].offset

    assert offset_at(TIME_MS + 4500) == 5
    assert offset_at(0) == 0
    assert offset_at(TIME_MS + 10_000) == confluent_kafka.OFFSET_END
    consumer.close()
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.kafka})
    newest = admin.list_offsets({place: confluent_kafka.admin.OffsetSpec.max_timestamp()})
    assert newest[place].result().offset == 9


def test_a_consumer_waits_for_what_comes(broker, topic):
    async def follow():
        async with (
            aiokafka.AIOKafkaProducer(bootstrap_servers=broker.kafka) as producer,
            aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=broker.kafka) as consumer,
        ):
            await consumer.seek_to_end()
            began = time.monotonic()
            for number in range(20):
                await producer.send_and_wait(topic, str(number).encode())
                async with asyncio.timeout(PATIENCE_SECONDS):
                    assert (await consumer.getone()).value == str(number).encode()
            return time.monotonic() - began

    # Not as long as that many fetches would wait.
    assert asyncio.run(follow()) < 20 * 0.5


def test_acks_0_is_not_answered_and_arrives(broker, topic):
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.kafka, "acks": "0"})
    for number in range(100):
        producer.produce(topic, str(number).encode())
    assert producer.flush(PATIENCE_SECONDS) == 0
    found = consume_confluent(broker.kafka, topic, 100)
    assert [one[1] for one in found] == [str(number).encode() for number in range(100)]


def test_a_message_that_is_too_large_is_refused_and_the_connection_stays(broker, topic):
    producer = kafka.KafkaProducer(
        bootstrap_servers=broker.kafka, max_request_size=40 << 20, buffer_memory=80 << 20
    )
    with pytest.raises(kafka.errors.MessageSizeTooLargeError):
        producer.send(topic, b"x" * (11 << 20)).get(PATIENCE_SECONDS)
    assert producer.send(topic, b"x" * (9 << 20)).get(PATIENCE_SECONDS).offset == 0
    producer.close()
    [(_, value, _, _)] = consume_confluent(broker.kafka, topic, 1)
    assert len(value) == 9 << 20


def test_transactions_are_refused_at_once(broker):
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.kafka, "transactional.id": "mine"}
    )
    began = time.monotonic()
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        producer.init_transactions(60)
    code = confluent_kafka.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert refused.value.args[0].code() == code
    assert time.monotonic() - began < 30


def test_metadata_names_topics_and_ids(broker, topic):
    produce_confluent(broker.kafka, topic, [(None, b"x", [])], "none")
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.kafka})
    found = admin.list_topics(timeout=PATIENCE_SECONDS)
    assert topic in found.topics
    [leader] = {one.leader for one in found.topics[topic].partitions.values()}
    host, _, port = broker.kafka.rpartition(":")
    assert (found.brokers[leader].host, found.brokers[leader].port) == (host, int(port))
    described = admin.describe_topics(confluent_kafka.TopicCollection([topic]))[topic].result()
    assert str(described.topic_id) != "AAAAAAAAAAAAAAAAAAAAAA"
