"""`ister.client` against real brokers: what it promises, also when they are killed and moved."""

import asyncio
import functools
import json
import math
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import groupby

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")


from ister.base.partitions import partition_of
from ister.broker.security.minting import make_api_key
from ister.client import AsyncClient, Client, TlsOptions
from ister.client.core import network
from ister.client.flight import FlightClient
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    ConflictError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.wire.contract import RangeTicket
from tests.servers.broker import BrokerProcess
from tests.support.cases import each
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.example_runs import run_example
from tests.support.scale import scaled
from tests.support.security import auth_settings
from tests.support.waiting import eventually

PATIENCE = 60.0
KILLS = scaled(1, 3)


@pytest.fixture
def client(broker):
    with Client(broker.address, timeout=PATIENCE) as made:
        yield made


def payloads_in(broker, topic):
    """The topic's log, as Flight reads it."""
    with FlightClient(broker.flight) as flight:
        status = flight.watermarks([topic])[topic]
        ticket = RangeTicket(
            topic=topic,
            incarnation=status.incarnation,
            start=status.earliest,
            end=status.synced,
            columns=("offset", "payload"),
        )
        return [one for batch in flight.read(ticket) for one in batch["payload"].to_pylist()]


def numbered(number, name="m"):
    return [f"{name}-{one}".encode() for one in range(number)]


# -- publishing and consuming ---------------------------------------------------------------


def test_a_message_arrives_with_all_its_fields(client, topic):
    before = datetime.now(UTC) - timedelta(minutes=1)
    with client.producer(topic, name="till", create=True) as producer:
        sent = producer.send(b"payload", attributes={"a": "1", "ü": "ß"}, routing_key="key")
        assert sent.result() == 0
        assert sent.done()
        assert sent.exception() is None
        assert sent.topic == topic
        assert producer.publish(b"") == 1
    with client.consumer(topic, "s", start="earliest") as consumer:
        first, second = consumer.messages(limit=2)
        assert (first.topic, first.offset, first.payload) == (topic, 0, b"payload")
        assert first.attributes == {"a": "1", "ü": "ß"}
        assert (first.routing_key, first.producer_name, first.attempt) == ("key", "till", 1)
        assert (first.schema_id, first.schema_version) == (None, None)
        assert before < first.publish_time < datetime.now(UTC) + timedelta(minutes=1)
        assert (second.payload, second.attributes, second.routing_key) == (b"", {}, None)
        assert "payload" not in repr(first)


def test_many_messages_in_order_acknowledged_and_gone(client, topic):
    with client.producer(topic, create=True) as producer:
        sent = [producer.send(payload) for payload in numbered(20_000)]
        assert [one.result(PATIENCE) for one in sent] == list(range(20_000))
    with client.consumer(topic, "s", start="earliest") as consumer:
        found = []
        for message in consumer.messages(limit=20_000, timeout=PATIENCE):
            found.append(message.payload)
            consumer.ack(message)
    assert found == numbered(20_000)
    described = client.admin.describe_subscription(topic, "s")
    assert (described.cursor, described.lag, described.consumers) == (20_000, 0, ())
    with client.consumer(topic, "s") as consumer, pytest.raises(WaitTimeoutError):
        consumer.receive(0.3)


def test_many_threads_publish_through_one_producer(broker, client, topic):
    with client.producer(topic, create=True, max_batch_messages=50) as producer:
        found = {}

        def publish(name):
            sent = [(payload, producer.send(payload)) for payload in numbered(500, name)]
            found.update((payload, one.result(PATIENCE)) for payload, one in sent)

        threads = [threading.Thread(target=publish, args=(f"t{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    log = payloads_in(broker, topic)
    assert {payload: log.index(payload) for payload in found} == found
    for number in range(4):
        mine = [one for one in log if one.startswith(b"t%d-" % number)]
        assert mine == numbered(500, f"t{number}")


def test_a_done_callback_is_called(client, topic):
    with client.producer(topic, create=True) as producer:
        called = threading.Event()
        seen = []

        def callback(sent):
            seen.append(sent.result())
            with pytest.raises(InvalidRequestError):
                producer.flush()
            called.set()

        sent = producer.send(b"x")
        sent.add_done_callback(callback)
        assert called.wait(PATIENCE)
        sent.add_done_callback(lambda one: seen.append(one.result()))
        assert seen == [0, 0]


@each("bad", [Decimal("NaN"), math.nan, "1", [1]])
def test_something_else_than_a_number_is_refused_and_harms_nothing(broker, client, topic, bad):
    """Goal: a value that cannot be encoded does not end the producer and its other messages."""
    with (
        client.producer(topic, create=True) as producer,
        client.consumer(topic, "s", kind="shared") as consumer,
    ):
        sent = producer.send(b"x")
        for call in (
            lambda: Client(broker.address, timeout=bad),
            lambda: client.producer(topic, timeout=bad),
            lambda: client.consumer(topic, "t", timeout=bad),
            lambda: client.consumer(topic, "t", buffer_bytes=bad),
            lambda: producer.send(b"x", schema_id=bad),
            lambda: producer.send(b"x", schema_version=bad),
            lambda: producer.send_json(1, schema_id=bad),
            lambda: producer.send(b"x", timeout=bad),
            lambda: sent.result(bad),
            lambda: producer.flush(bad),
            lambda: producer.close(bad),
            lambda: consumer.receive(bad),
            lambda: next(consumer.messages(limit=bad)),
            lambda: consumer.flush(bad),
            lambda: consumer.close(bad),
            lambda: client.admin.create_topic(topic, partitions=bad),
            lambda: client.admin.drain_broker("b", timeout=bad),
        ):
            with pytest.raises(InvalidRequestError):
                call()
        assert sent.result(Decimal(PATIENCE)) == producer.publish(b"y") - 1
        for _ in range(2):
            message = consumer.receive(PATIENCE)
            with pytest.raises(InvalidRequestError):
                consumer.nack(message, delay=bad)
            consumer.ack(message)


def test_something_else_than_a_text_is_refused_by_name(client, topic):
    client.admin.create_topic(topic)
    for call, name in (
        (lambda: client.producer(topic, name=object()), "name"),
        (lambda: client.consumer(topic, 1), "subscription"),
        (lambda: client.consumer(topic, "s", key_filters=[1]), "key filter"),
        (lambda: client.admin.create_namespace(1), "name"),
        (lambda: client.admin.seek(topic, 1, to="earliest"), "subscription"),
        (lambda: client.admin.set_failure_policy(topic, "s", 1), "set_failure_policy"),
        (lambda: Client([1]), "address"),
        (lambda: Client(1), "address"),
        (lambda: Client("b:1", token=1), "token"),
        (lambda: Client("b:1", tls="yes"), "tls"),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            call()


def test_a_large_message(client, topic):
    with client.producer(topic, create=True) as producer:
        assert producer.publish(b"x" * 5_000_000) == 0
        with pytest.raises((MessageTooLargeError, InvalidRequestError)):
            producer.publish(b"x" * 60_000_000)
        assert producer.publish(b"y") == 1
    with client.consumer(topic, "s", start="earliest") as consumer:
        assert len(consumer.receive(PATIENCE).payload) == 5_000_000


def test_a_consumer_whose_buffer_is_full_is_heard(client, topic):
    """It reads nothing, so that confirmations wait; what it acknowledges counts nevertheless."""
    with client.producer(topic, create=True) as producer:
        for _ in range(1000):
            producer.send(bytes(20_000))
    with client.consumer(topic, "s", start="earliest", buffer_bytes=65_536) as consumer:
        for number in range(1, 61):
            consumer.ack(consumer.receive(timeout=PATIENCE))
            eventually(
                lambda end=number: client.admin.describe_subscription(topic, "s").cursor == end
            )


def test_an_exclusive_subscription_that_is_taken(client, topic):
    with client.consumer(topic, "s", create=True), pytest.raises(PermissionDeniedError):
        client.consumer(topic, "s")
    with pytest.raises(ConflictError):
        client.consumer(topic, "s", kind="shared")
    with client.consumer(topic, "s"):
        pass


# -- partitions -----------------------------------------------------------------------------


def test_partitions_are_published_to_by_turns_or_by_key(broker, client, topic):
    parts = [f"{topic}-part-{number}" for number in range(3)]
    client.admin.create_topic(topic, partitions=3)
    keys = [f"key-{number}" for number in range(40)]
    with client.producer(topic) as producer:
        for payload in numbered(30):
            producer.send(payload)
        sent = {key: producer.send(key.encode(), routing_key=key) for key in keys}
        producer.flush(PATIENCE)
    assert {key: one.topic for key, one in sent.items()} == {
        key: parts[partition_of(key, 3)] for key in keys
    }
    for part in parts:
        assert sum(one.startswith(b"m-") for one in payloads_in(broker, part)) == 10
    with client.consumer(topic, "s", start="earliest") as consumer:
        found = defaultdict(list)
        for message in consumer.messages(limit=70, timeout=PATIENCE):
            found[message.topic].append(message.payload)
            consumer.ack(message)
    assert set(found) == set(parts)
    for part in parts:
        assert found[part] == payloads_in(broker, part)
    assert client.admin.subscriptions(topic) == ["s"]
    client.admin.seek(topic, "s", to="earliest")
    with pytest.raises(InvalidRequestError):
        client.admin.seek(topic, "s", to=5)
    client.admin.seek(parts[1], "s", to=5)
    assert client.admin.describe_subscription(parts[1], "s").cursor == 5


def test_open_producers_and_consumers_use_new_partitions(broker, client, topic, monkeypatch):
    """Goal: each key goes to its old partition, and then to new ones, as partitions are added."""
    monkeypatch.setattr(network, "_PARTITIONS_SECONDS", 0.05)
    client.admin.create_topic(topic, partitions=2)
    keys = [f"key-{number}" for number in range(20)]
    sent = defaultdict(list)

    def has_moved():
        for key in keys:
            one = producer.send(b"%s %d" % (key.encode(), len(sent[key])), routing_key=key)
            one.result(PATIENCE)
            sent[key].append(one.topic)
        return all(sent[key][-1] == f"{topic}-part-{partition_of(key, 5)}" for key in keys)

    with client.producer(topic) as producer, client.consumer(topic, "s") as consumer:
        assert not has_moved()
        parts = client.admin.grow_topic(topic, 5)
        eventually(has_moved)
        received = defaultdict(list)
        for message in consumer.messages(limit=sum(map(len, sent.values())), timeout=PATIENCE):
            key, number = message.payload.decode().split()
            received[message.topic, key].append(int(number))
            consumer.ack(message)
    for key, topics in sent.items():
        # By the number of partitions that the producer knew: it only grows.
        ways = [parts[partition_of(key, count)] for count in range(2, 6)]
        steps = [one for one, _ in groupby(topics)]
        assert (steps[0], steps[-1]) == (ways[0], ways[-1])
        rest = iter(ways)
        assert all(step in rest for step in steps)
        assert sorted(n for part in parts for n in received[part, key]) == list(range(len(topics)))
    # Messages without a key go to all of them in turn.
    with client.producer(topic) as producer:
        assert {producer.send(b"").topic for _ in range(5)} == set(parts)


# -- administration -------------------------------------------------------------------------


def test_topics_and_brokers_are_shown_listed_and_deleted(client, broker, topic):
    for call in (client.admin.show_topic, client.admin.describe_topic, client.producer):
        with pytest.raises(NotFoundError):
            call(topic)
    with pytest.raises(NotFoundError):
        client.consumer(topic, "s")
    made = client.admin.create_topic(topic, ack="written")
    assert (made.topic, made.ack, made.next, made.partitions) == (topic, "written", 0, ())
    assert client.admin.create_topic(topic).incarnation == made.incarnation
    with pytest.raises(AlreadyExistsError):
        client.admin.create_topic(topic, partitions=2)
    with client.consumer(topic, "s", start="earliest"), client.producer(topic) as producer:
        producer.publish(b"a")
        view = client.admin.show_topic(topic)
        assert (view["topic"], view["ack"], view["producers"]) == (topic, "written", 1)
        assert [one["name"] for one in view["subscriptions"]] == ["s"]
    [listed] = [one for one in client.admin.list_topics("default") if one["topic"] == topic]
    assert (listed["watermarks"]["next"], "files" in listed) == (1, False)
    parted = f"{topic}-parted"
    client.admin.create_topic(parted, partitions=2)
    parts = client.admin.partitions(parted)
    assert client.admin.show_topic(parted)["partitions"] == parts
    names = [one["topic"] for one in client.admin.list_topics()]
    assert names == sorted(names)
    assert {topic, *parts} <= {*names} & {*client.topics()}
    folded = {one["topic"]: one for one in client.admin.list_topics(with_partitions=False)}
    assert folded[parted]["partitions"] == parts
    assert not set(parts) & set(folded)
    [one] = client.admin.brokers()
    assert (one["is_this"], one["broker_url"]) == (True, broker.url)
    with pytest.raises(ConflictError):
        client.admin.delete_topic(parts[1])
    for name in (topic, parted):
        client.admin.delete_topic(name)
        assert client.admin.partitions(name) == []
        with pytest.raises(NotFoundError):
            client.admin.delete_topic(name)


def test_subscriptions_and_namespaces_are_changed(client, topic):
    with client.consumer(topic, "s", start="earliest", create=True):
        with client.producer(topic) as producer:
            producer.publish(b"a")
            later = datetime.now(UTC) + timedelta(hours=1)
        [subscription] = client.admin.describe_topic(topic).subscriptions
        assert (subscription.subscription, subscription.lag) == ("s", 1)
        for to, cursor in (("latest", 1), (0, 0), (later, 1)):
            client.admin.seek(topic, "s", to=to)
            assert client.admin.describe_subscription(topic, "s").cursor == cursor
        with pytest.raises(ConflictError):
            client.admin.unsubscribe(topic, "s")
        client.admin.set_max_unacked_messages(topic, "s", 5)
        assert client.admin.describe_subscription(topic, "s").max_unacked_messages == 5
    with pytest.raises(InvalidRequestError):
        client.admin.seek(topic, "s", to="middle")
    client.admin.unload_topic(topic)
    client.admin.unsubscribe(topic, "s")
    assert client.admin.subscriptions(topic) == []
    client.admin.create_namespace("clients")
    with pytest.raises(AlreadyExistsError):
        client.admin.create_namespace("clients")
    assert "clients" in client.admin.namespaces()
    assert client.topics("clients") == []
    client.admin.delete_namespace("clients")
    with pytest.raises(NotFoundError):
        client.topics("clients")


# -- names and epochs -----------------------------------------------------------------------


def test_a_program_that_is_started_again_takes_the_name_over(broker, client, topic):
    with client.producer(topic, name="shop", create=True) as old:
        old.publish(b"1")
        with Client(broker.address) as restarted:
            # Within the same second, most likely: no message is taken for one of those before.
            for number in range(2, 6):
                with restarted.producer(topic, name="shop") as new:
                    assert new.publish(b"%d" % number) == number - 1
        with pytest.raises(ConflictError, match="replaced"):
            old.publish(b"zombie")
    assert payloads_in(broker, topic) == [b"1", b"2", b"3", b"4", b"5"]


# -- brokers that end -----------------------------------------------------------------------


class Load:
    """Publishes numbered messages until it is told to stop, and remembers what was acknowledged."""

    def __init__(self, client, topic, name):
        self.name = name
        self.acked = {}
        self.sent = 0
        self._client = client
        self._topic = topic
        self._ends = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            with self._client.producer(
                self._topic, name=self.name, max_batch_messages=50, max_pending_bytes=500_000
            ) as producer:
                while not self._ends.wait(0.0005):
                    number = self.sent
                    self.sent += 1
                    sent = producer.send(f"{self.name}-{number}".encode())
                    sent.add_done_callback(functools.partial(self._done, number))
        except IsterError as error:
            self._error = error

    def _done(self, number, sent):
        self.acked[number] = sent.result()

    def stop(self):
        self._ends.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self._error is None
        assert len(self.acked) == self.sent


class Taker:
    """Consumes and acknowledges until it is told to stop."""

    def __init__(self, consumer):
        self.seen = []
        self._consumer = consumer
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            for message in self._consumer.messages(timeout=0.2):
                self.seen.append((message.offset, message.payload))
                self._consumer.ack(message)

    def stop(self):
        self._ends.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def check_log(broker, topic, loads):
    """Each message is there once, in its producer's order, at the offset that it was told."""
    log = payloads_in(broker, topic)
    assert len(log) == len(set(log)), "no message twice"
    assert len(log) == sum(load.sent for load in loads)
    for load in loads:
        mine = [one for one in log if one.startswith(f"{load.name}-".encode())]
        assert mine == numbered(load.sent, load.name)
        for number, offset in load.acked.items():
            assert log[offset] == f"{load.name}-{number}".encode()
    return log


def test_a_broker_is_killed_under_load(tmp_path, topic):
    with BrokerProcess(tmp_path) as broker, Client(broker.address) as client:
        client.admin.create_topic(topic)
        consumer = client.consumer(topic, "s", start="earliest")
        loads = [Load(client, topic, name) for name in ("p", "q")]
        taker = Taker(consumer)
        for _ in range(KILLS):
            before = sum(len(load.acked) for load in loads)
            eventually(lambda b=before: sum(len(load.acked) for load in loads) > b + 300)
            time.sleep(0.05)
            broker.crash()
        before = sum(len(load.acked) for load in loads)
        eventually(lambda: sum(len(load.acked) for load in loads) > before + 300)
        for load in loads:
            load.stop()
        log = check_log(broker, topic, loads)
        eventually(lambda: len({offset for offset, _ in taker.seen}) == len(log))
        taker.stop()
        consumer.flush(PATIENCE)
        assert client.admin.describe_subscription(topic, "s").cursor == len(log)
        consumer.close()
        for offset, payload in taker.seen:
            assert log[offset] == payload
        # What comes twice was acknowledged after the cursor was last written, before a kill.
        assert len(taker.seen) - len(log) <= KILLS * 2000


def test_a_consumer_fails_when_the_time_is_over(tmp_path, topic):
    with BrokerProcess(tmp_path) as broker, Client(broker.address, timeout=5) as client:
        consumer = client.consumer(topic, "s", create=True)
        broker.kill()
        with pytest.raises(UnavailableError):
            consumer.receive(PATIENCE)
        with pytest.raises(UnavailableError):
            for _ in consumer:
                pass
        consumer.close()


def test_any_of_several_brokers_will_do(broker, topic):
    with (
        Client(f"127.0.0.1:1,{broker.address}") as client,
        client.producer(topic, create=True) as producer,
    ):
        assert producer.publish(b"x") == 0


# -- the end --------------------------------------------------------------------------------


def test_closing(broker, topic):
    client = Client(broker.address)
    producer = client.producer(topic, create=True, linger_ms=3_600_000)
    consumer = client.consumer(topic, "s", start="earliest")
    sent = [producer.send(payload) for payload in numbered(100)]
    ended = threading.Thread(target=lambda: [None for _ in consumer])
    ended.start()
    eventually(lambda: client.admin.describe_subscription(topic, "s").in_flight)
    client.close()
    client.close()
    ended.join(PATIENCE)
    assert not ended.is_alive(), "iteration ends with the consumer"
    assert [one.result(0) for one in sent] == list(range(100)), "close flushes"
    with pytest.raises(ClosedError):
        producer.send(b"x")
    with pytest.raises(ClosedError):
        consumer.receive()
    with pytest.raises(ClosedError):
        client.topics()
    producer.close()
    consumer.close()


def test_an_error_in_a_block_closes_all_the_same(broker, topic):
    def fail():
        with (
            Client(broker.address) as client,
            client.producer(topic, create=True) as producer,
            client.consumer(topic, "s", start="earliest") as consumer,
        ):
            producer.send(b"x")
            consumer.ack(consumer.receive(PATIENCE))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert payloads_in(broker, topic) == [b"x"]


def test_another_consumers_message_is_not_acknowledged(client, topic):
    with client.producer(topic, create=True) as producer:
        producer.publish(b"x")
    with (
        client.consumer(topic, "s", start="earliest") as one,
        client.consumer(topic, "t", start="earliest") as other,
    ):
        message = one.receive(PATIENCE)
        with pytest.raises(InvalidRequestError):
            other.ack(message)
        with pytest.raises(InvalidRequestError):
            one.nack(message, delay=-1)


# -- asyncio --------------------------------------------------------------------------------


def test_asyncio(broker, topic):
    async def scenario():
        async with AsyncClient(broker.address, timeout=PATIENCE) as client:
            async with client.producer(topic, create=True) as producer:
                sent = [await producer.send(payload) for payload in numbered(2000)]
                assert [await one for one in sent] == list(range(2000))
                assert await sent[0] == 0
                assert await producer.publish(b"last", routing_key="k") == 2000
            consumer = await client.consumer(topic, "s", start="earliest")
            async for message in consumer.messages(limit=2001, timeout=PATIENCE):
                consumer.ack(message)
            await consumer.flush(PATIENCE)
            assert (await client.admin.describe_subscription(topic, "s")).cursor == 2001
            waiting = asyncio.create_task(consumer.receive())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(WaitTimeoutError):
                await consumer.receive(0.05)
            await client.admin.seek(topic, "s", to=1999)
            found = [message.payload async for message in consumer.messages(limit=2)]
            assert found == [b"m-1999", b"last"]
            await consumer.close()
            assert [message async for message in consumer] == []
        with pytest.raises(ClosedError):
            await client.topics()

    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE))


def test_asyncio_waits_for_room_and_can_be_cancelled(tmp_path, topic):
    async def scenario(broker):
        async with AsyncClient(broker.address) as client:
            producer = await client.producer(topic, create=True, max_pending_bytes=50_000)
            await producer.publish(b"first")
            broker.pause()

            async def send_many():
                for _ in range(10_000):
                    await producer.send(b"x", timeout=0.1)

            try:
                with pytest.raises(CapacityError):
                    await send_many()
                waiting = asyncio.create_task(producer.send(b"never"))
                await asyncio.sleep(0.05)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                with pytest.raises(WaitTimeoutError):
                    await producer.flush(0.05)
            finally:
                broker.resume()
            await producer.close(PATIENCE)

    with BrokerProcess(tmp_path) as broker:
        asyncio.run(asyncio.wait_for(scenario(broker), 2 * PATIENCE))
        assert b"never" not in payloads_in(broker, topic)


def test_two_loops_and_a_blocking_client_in_one_process(broker, client, topic):
    async def scenario(name):
        async with AsyncClient(broker.address) as own, own.producer(topic, name=name) as producer:
            for payload in numbered(50, name):
                await producer.publish(payload)

    client.admin.create_topic(topic)
    threads = [threading.Thread(target=asyncio.run, args=(scenario(name),)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    with client.producer(topic, name="c") as producer:
        for payload in numbered(50, "c"):
            producer.publish(payload)
    for thread in threads:
        thread.join()
    assert sorted(payloads_in(broker, topic)) == sorted(
        payload for name in "abc" for payload in numbered(50, name)
    )


def test_the_example(tmp_path):
    printed = run_example("client.py", tmp_path / "data", home=tmp_path / "home")
    assert printed.splitlines() == [
        "3000 orders in the topic, ack level synced",
        "eu-1: 1000 orders",
        "eu-2: 1000 orders",
        "us-1: 1000 orders",
        f"sum: {sum(number % 39 + 0.25 for number in range(3000)):.2f}",
    ]


# -- security -------------------------------------------------------------------------------


def test_tokens_and_certificates(tmp_path, topic):
    authority = Authority("servers")
    cert_file, key_file = authority.issue("broker", names=LOCAL_NAMES).write(tmp_path, "broker")
    ca_file = authority.write(tmp_path, "servers")
    key, line = make_api_key("loader")
    auth = auth_settings(tmp_path, super_admins=["loader"])
    (tmp_path / "api-keys").write_text(f"{line}\n")
    tls = {"cert_file": cert_file, "key_file": key_file}
    with BrokerProcess(
        tmp_path / "broker", settings={"broker": {"tls": tls, "auth": auth}}
    ) as broker:
        trusted = TlsOptions(ca=ca_file)
        asked = []

        def fresh():
            asked.append(1)
            return key

        for token in (key, fresh):
            with Client(broker.address, token=token, tls=trusted) as client:
                with client.producer(topic, create=True) as producer:
                    producer.publish(b"x")
                with client.consumer(topic, f"s-{len(asked)}", start="earliest") as consumer:
                    assert consumer.receive(PATIENCE).payload == b"x"
                read = client.read_arrow(topic, columns=["text"]).read_all()
                assert set(read["text"].to_pylist()) == {"x"}
        assert len(asked) > 2
        with (
            Client(broker.address, token="ist_wrong", tls=trusted) as client,
            pytest.raises(UnauthenticatedError) as caught,
        ):
            client.producer(topic)
        assert "ist_wrong" not in str(caught.value)
        with (
            Client(broker.address, token=key, tls=True, timeout=1) as client,
            pytest.raises(UnavailableError),
        ):
            client.topics()
        assert key not in json.dumps(repr(Client)) + broker.log
