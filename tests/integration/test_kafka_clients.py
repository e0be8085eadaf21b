"""Kafka's clients, unmodified, against a broker in a process of its own.

Each row is a client library: what it sends in must come out, for itself and for the others.
"""

import asyncio
import itertools
import re
import runpy
import threading
import time
import uuid
import warnings

import aiokafka
import confluent_kafka
import confluent_kafka.admin
import pytest

from ister.client import Client
from tests.servers.broker import BrokerProcess
from tests.support.example_runs import EXAMPLES
from tests.support.scale import scaled
from tests.support.waiting import PATIENCE_SECONDS, eventually

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


@pytest.mark.parametrize(
    ("client", "compression"),
    [
        (client, compression)
        for client in PRODUCERS
        for compression in COMPRESSIONS
        # For these, kafka-python needs libraries that nothing else here does.
        if (client, compression) not in {("kafka-python", "snappy"), ("kafka-python", "lz4")}
    ],
)
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
    with Client(broker.address) as client:
        with client.producer(name, name="shop") as producer:
            producer.send(b"by ister", routing_key="eu-2", attributes={"c": "d"})
            producer.flush()
        with client.consumer(name, subscription="s", start="earliest") as consumer:
            found = [
                (message.payload, message.routing_key, dict(message.attributes))
                for message in consumer.messages(limit=2, timeout=PATIENCE_SECONDS)
            ]
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
        bootstrap_servers=broker.kafka, max_request_size=40 << 20, enable_idempotence=False
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


# -- groups ---------------------------------------------------------------------------------------


def group_of_confluent(address, topic, group, count, instance=None):
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            **({} if instance is None else {"group.instance.id": instance}),
        }
    )
    consumer.subscribe([topic])
    found = []
    end_at = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count and time.monotonic() < end_at:
        for one in consumer.consume(count - len(found), timeout=0.5):
            assert one.error() is None
            found.append(one.value())
    consumer.commit(asynchronous=False)
    consumer.close()
    return found


def group_of_aiokafka(address, topic, group, count):
    async def read():
        async with aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=address,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer:
            found = []
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(found) < count:
                    records = await consumer.getmany(timeout_ms=500, max_records=count - len(found))
                    found += [one.value for lot in records.values() for one in lot]
            await consumer.commit()
            return found

    return asyncio.run(read())


def group_of_kafka_python(address, topic, group, count):
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=address,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    found = []
    end_at = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count and time.monotonic() < end_at:
        for lot in consumer.poll(500, max_records=count - len(found)).values():
            found += [one.value for one in lot]
    consumer.commit()
    consumer.close()
    return found


GROUPS = {
    "confluent": group_of_confluent,
    "aiokafka": group_of_aiokafka,
    "kafka-python": group_of_kafka_python,
}


def test_a_group_goes_on_where_it_has_committed_whatever_its_client(broker, topic):
    sent = [str(number).encode() for number in range(90)]
    produce_confluent(broker.kafka, topic, [(None, value, []) for value in sent], "none")
    found = []
    for client in ("confluent", "aiokafka", "kafka-python"):
        found += GROUPS[client](broker.kafka, topic, f"group-{topic}", 30)
    assert found == sent


def test_what_was_committed_survives_the_death_of_the_broker(tmp_path, topic):
    with BrokerProcess(tmp_path) as own:
        sent = [str(number).encode() for number in range(60)]
        produce_confluent(own.kafka, topic, [(None, value, []) for value in sent], "none")
        found = group_of_confluent(own.kafka, topic, "g", 30)
        own.crash()
        found += group_of_confluent(own.kafka, topic, "g", 30)
        assert found == sent
        assert "Traceback" not in own.log


@pytest.mark.nightly
def test_an_idempotent_producer_loses_and_doubles_nothing_when_the_broker_is_killed(
    tmp_path, topic
):
    with BrokerProcess(tmp_path) as own:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": own.kafka,
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 600_000,
                "queue.buffering.max.messages": 2000,
                "reconnect.backoff.max.ms": 500,
            }
        )
        told, failed, sent, sent_count = [], [], itertools.count(), []
        stopping = threading.Event()

        def on_delivery(error, message):
            (failed if error is not None else told).append(message.value())

        def send():
            number = next(sent)
            while not stopping.is_set():
                try:
                    producer.produce(topic, str(number).encode(), on_delivery=on_delivery)
                except BufferError:  # the broker is away
                    producer.poll(0.1)
                else:
                    number = next(sent)
                    producer.poll(0.0005)
            sent_count.append(number)

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(scaled(2, 20)):
            before = len(told)
            eventually(lambda before=before: len(told) >= before + 300)
            own.crash()
        stopping.set()
        sender.join()
        assert producer.flush(PATIENCE_SECONDS) == 0
        [count] = sent_count
        assert failed == []
        found = [one[1] for one in consume_confluent(own.kafka, topic, count)]
        assert found == [str(number).encode() for number in range(count)]
        assert "Traceback" not in own.log


@pytest.mark.nightly
def test_members_share_partitions_and_take_over_those_of_others(broker, topic):
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.kafka})
    admin.create_topics([confluent_kafka.admin.NewTopic(topic, 6)])[topic].result()
    settings = {
        "bootstrap.servers": broker.kafka,
        "group.id": f"group-{topic}",
        "auto.offset.reset": "earliest",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": 6000,
    }
    members = [confluent_kafka.Consumer(settings) for _ in range(3)]
    for member in members:
        member.subscribe([topic])

    def shares(among):
        for member in members:
            member.poll(0.1)
        return sorted(len(one.assignment()) for one in among)

    def wait_for(wanted, among):
        end_at = time.monotonic() + PATIENCE_SECONDS
        while shares(among) != wanted:
            assert time.monotonic() < end_at, shares(among)

    wait_for([2, 2, 2], members)
    described = admin.describe_consumer_groups([f"group-{topic}"])[f"group-{topic}"].result()
    assert described.state.name == "STABLE"
    assert len(described.members) == 3
    members.pop().close()
    wait_for([3, 3], members)
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.delete_consumer_groups([f"group-{topic}"])[f"group-{topic}"].result()
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.NON_EMPTY_GROUP
    while members:
        members.pop().close()
    admin.delete_consumer_groups([f"group-{topic}"])[f"group-{topic}"].result()
    listed = admin.list_consumer_groups().result()
    assert f"group-{topic}" not in {one.group_id for one in listed.valid}


def test_a_static_member_that_is_started_again_keeps_its_partitions(broker, topic):
    produce_confluent(broker.kafka, topic, [(None, b"1", []), (None, b"2", [])], "none")
    group = f"group-{topic}"
    assert group_of_confluent(broker.kafka, topic, group, 1, instance="one") == [b"1"]
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.kafka})
    [member] = admin.describe_consumer_groups([group])[group].result().members
    assert member.group_instance_id == "one"
    assert group_of_confluent(broker.kafka, topic, group, 1, instance="one") == [b"2"]
    # The session of a static member lasts: the group is still the same.
    [again] = admin.describe_consumer_groups([group])[group].result().members
    assert again.group_instance_id == "one"
    assert again.member_id != member.member_id


# -- administration -------------------------------------------------------------------------------


def test_topics_are_made_grown_described_and_deleted(broker, topic):
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.kafka})
    new = confluent_kafka.admin.NewTopic(topic, 2, config={"max.message.bytes": "1000"})
    admin.create_topics([new])[topic].result()
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.create_topics([new])[topic].result()
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS
    assert len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 2
    admin.create_partitions([confluent_kafka.admin.NewPartitions(topic, 3)])[topic].result()
    assert len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 3

    resource = confluent_kafka.admin.ConfigResource("topic", topic)
    configs = admin.describe_configs([resource])[resource].result()
    assert configs["max.message.bytes"].value == "1000"
    assert configs["cleanup.policy"].value == "delete"
    resource.add_incremental_config(
        confluent_kafka.admin.ConfigEntry(
            "max.message.bytes",
            "2000",
            incremental_operation=confluent_kafka.admin.AlterConfigOpType.SET,
        )
    )
    admin.incremental_alter_configs([resource])[resource].result()
    configs = admin.describe_configs([resource])[resource].result()
    assert configs["max.message.bytes"].value == "2000"

    compacted = confluent_kafka.admin.NewTopic(
        f"{topic}-c", 1, config={"cleanup.policy": "compact"}
    )
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.create_topics([compacted])[f"{topic}-c"].result()
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.INVALID_CONFIG
    assert len(admin.describe_cluster().result().nodes) == 1

    old = admin.describe_topics(confluent_kafka.TopicCollection([topic]))[topic].result().topic_id
    admin.delete_topics([topic])[topic].result()
    assert topic not in admin.list_topics(timeout=30).topics
    admin.create_topics([confluent_kafka.admin.NewTopic(topic, 1)])[topic].result()
    new = admin.describe_topics(confluent_kafka.TopicCollection([topic]))[topic].result().topic_id
    assert str(old) != str(new)


@pytest.mark.parametrize("name", ["with.dot", "t-part-0", "x" * 121, "a/b/c"])
def test_names_that_no_topic_can_have_are_refused(broker, name):
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.kafka})
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.create_topics([confluent_kafka.admin.NewTopic(name, 1)])[name].result()
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.TOPIC_EXCEPTION


def test_the_example_runs(broker, capsys):
    example = runpy.run_path(str(EXAMPLES / "kafka_clients.py"))
    example["main"](["--broker", broker.address, "--kafka", broker.kafka])
    printed = capsys.readouterr().out
    counts = [int(found) for found in re.findall(r"^member-\d: (\d+) orders$", printed, re.M)]
    assert len(counts) == 2
    assert all(counts)
    assert sum(counts) == 400
    assert "Ister's client: 400 orders" in printed
