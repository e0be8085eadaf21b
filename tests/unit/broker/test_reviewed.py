"""What went wrong once: a client that gives up, a store that is slow or away, a policy that changes
in between. Each of these was a fault, and each test names the promise that it broke.

A whole broker on this loop, asked over gRPC, so that what is promised is promised to clients. A
store is slowed down by holding a call of it until the test says so: nothing here depends on who is
faster.
"""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import pytest

from broker_rig import Services, a_broker, a_record, eventually, run, some_topics
from ister.broker import reading, wire
from ister.broker import server as server_module
from ister.broker import topics as topics_module
from ister.broker.producers import producer_id
from ister.broker.wire import danube, danube_admin, ister_api
from ister.errors import UnavailableError
from ister.limits import ENVELOPE_SIZE_BYTES_MAX, MIB
from ister.metadata.memory import MemoryMetadata
from ister.model import TopicName
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.tier.merge import merge_objects
from ister.topic.sequences import SequencedTopic
from ister.topic.topic import Topic
from security_rig import auth_settings, sign

NAME, PARSED = "/default/t", TopicName.parse("/default/t")
DEAD = "/default/dead"
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
Code = grpc.StatusCode
REFUSALS = {
    Code.INVALID_ARGUMENT,
    Code.FAILED_PRECONDITION,
    Code.PERMISSION_DENIED,
    Code.ALREADY_EXISTS,
    Code.UNAVAILABLE,
}
AT_ONCE = {"base_redelivery_delay_ms": 0, "max_redelivery_delay_ms": 0, "backoff": "fixed"}
# Long enough for what goes wrong to go wrong, where nothing tells that it has gone right.
MOMENT = 0.4


@pytest.fixture(autouse=True)
def _brokers_end_quickly(monkeypatch):
    """Nobody else has a call on its way to these brokers."""
    monkeypatch.setattr(server_module, "_LAST_SECONDS", 0.0)


class Held:
    """A call that waits in its thread until the test lets it go on.

    Args:
        real: What is called then.
        count: How many calls are held; later ones go straight through.
        is_stale: Call first, then wait: what is returned is old by then.
    """

    def __init__(self, real, *, count=1, is_stale=False):
        self._real = real
        self._left = count
        self._is_stale = is_stale
        self.begun = threading.Event()
        self.done = threading.Event()
        self._go_on = threading.Event()
        self.calls = 0
        self.was_in_time = True

    def __call__(self, *args, **more):
        self.calls += 1
        if self._left <= 0:
            return self._real(*args, **more)
        self._left -= 1
        try:
            answer = self._real(*args, **more) if self._is_stale else None
            self.begun.set()
            # On the loop nobody could ever let it go on.
            self.was_in_time = self._go_on.wait(5)
            return answer if self._is_stale else self._real(*args, **more)
        finally:
            self.done.set()

    async def is_reached(self):
        await eventually(self.begun.is_set)

    def go_on(self):
        self._go_on.set()

    async def is_done(self):
        await eventually(self.done.is_set)


def away(*args, **more):
    raise UnavailableError("the store is away")


class Noting:
    """A stream that notes the ids of what it delivers, for acknowledgements."""

    def __init__(self, stream, ids, consumer=None):
        self._stream = stream
        self._ids = ids
        self._consumer = consumer

    def __getattr__(self, name):
        return getattr(self._stream, name)

    async def read(self):
        found = await self._stream.read()
        if isinstance(found, danube.StreamMessage):
            self._ids[found.msg_id.topic_offset] = found.msg_id.broker_addr
        elif isinstance(found, ister_api.ConsumeResponse):
            for one in found.deliveries.messages:
                self._ids[one.offset] = f"#{self._consumer:x}.{one.token:016x}"
        return found


class Client:
    """What clients of one topic say to a broker."""

    ids = {}  # noqa: RUF012 - of all of them: they acknowledge what others got
    """By offset, the newest."""

    def __init__(self, services, topic=NAME):
        self.services = services
        self.topic = topic

    async def producer(self, name="p", *, is_reliable=True):
        """Registers a producer; what sends its messages."""
        created = await self.services.producers.CreateProducer(
            danube.ProducerRequest(
                request_id=1,
                topic_name=self.topic,
                producer_name=name,
                dispatch_strategy=int(is_reliable),
            )
        )

        def send(payload=b"x", *, key=None, timeout=20, id=created.producer_id, by=name, **attrs):
            return self.services.producers.SendMessage(
                danube.StreamMessage(
                    request_id=1,
                    msg_id=danube.MsgID(producer_id=id, topic_name=self.topic),
                    payload=payload,
                    publish_time=1,
                    producer_name=by,
                    routing_key=key,
                    attributes={name.replace("_", "-"): text for name, text in attrs.items()},
                ),
                timeout=timeout,
            )

        return send

    async def subscribe(self, consumer="c", *, kind=EXCLUSIVE, filters=(), name="s"):
        answer = await self.services.consumers.Subscribe(
            danube.ConsumerRequest(
                request_id=1,
                topic_name=self.topic,
                consumer_name=consumer,
                subscription=name,
                subscription_type=kind,
                key_filters=list(filters),
            )
        )
        return answer.consumer_id

    def receive(self, consumer):
        stream = self.services.consumers.ReceiveMessages(
            danube.ReceiveRequest(request_id=1, consumer_id=consumer)
        )
        return Noting(stream, self.ids)

    def id_of(self, offset):
        return danube.MsgID(
            topic_name=self.topic, topic_offset=offset, broker_addr=self.ids.get(offset, "")
        )

    async def ack(self, *offsets, name="s"):
        for offset in offsets:
            await self.services.consumers.Ack(
                danube.AckRequest(
                    request_id=1,
                    msg_id=self.id_of(offset),
                    subscription_name=name,
                )
            )

    async def nack(self, offset, name="s"):
        await self.services.consumers.Nack(
            danube.NackRequest(
                request_id=1,
                msg_id=self.id_of(offset),
                subscription_name=name,
                reason="bad",
            )
        )

    async def consume(self, services=None, **opening):
        """An open stream of Ister's own."""
        stream = (services or self.services).delivery.Consume()
        opening = {"subscription": "s", "consumer": "c", "kind": "exclusive", **opening}
        await stream.write(
            ister_api.ConsumeRequest(
                open=ister_api.OpenConsumer(topic=self.topic, start="earliest", **opening)
            )
        )
        opened = await stream.read()
        assert opened.WhichOneof("step") == "opened"
        return Noting(stream, self.ids, opened.opened.consumer_id)

    async def settle(self):
        """What was said before on this connection has been heard."""
        for _ in range(3):
            await self.services.admin.Info(ister_api.InfoRequest())
            await asyncio.sleep(0.01)

    async def give_up(self, call):
        call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call
        await self.settle()


async def read(stream, count, *, within=20):
    """The next messages of a stream."""
    got = []
    async with asyncio.timeout(within):
        while len(got) < count:
            message = await stream.read()
            assert message is not grpc.aio.EOF, f"the stream ended after {len(got)} of {count}"
            got.append(message)
    return got


async def offsets(stream, count):
    return [message.msg_id.topic_offset for message in await read(stream, count)]


async def status(call):
    """What a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


async def until_ok(make_call):
    """Does what clients do: UNAVAILABLE is tried again."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await make_call()
            except grpc.aio.AioRpcError as error:
                if error.code() is not Code.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.02)


@asynccontextmanager
async def a_slow_reader(listening):
    """Services on a connection that takes little in advance of what is read."""
    services = Services.__new__(Services)
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{listening.grpc}",
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)],
    )
    services.channel = channel
    services.consumers = wire.stub(channel, "danube.ConsumerService")
    services.delivery = wire.stub(channel, "ister.Delivery")
    services.admin = wire.stub(channel, "ister.Admin")
    try:
        yield services
    finally:
        await channel.close()


def subscription_of(broker, name="s", topic=NAME):
    return broker.topics.find_open(topic).subscription(name)


def kept(topics, name="s", topic=NAME):
    """A subscription as the store has it: its cursor, and all that is acknowledged up to 100."""
    incarnation = topics.find_open(topic).incarnation if topics.find_open(topic) else ""
    stored = topics.store.load(TopicName.parse(topic), incarnation).get(name)
    if stored is None:
        return None
    acked = set(range(stored.cursor))
    for start, end in (stored.saved or {}).get("acked", ()):
        acked.update(range(start, end))
    return stored.cursor, acked


def records_of(broker, topic):
    """All messages of a topic; none if it is not there."""
    served = broker.topics.find_open(topic)
    if served is None or served.topic is None:
        return []
    return [message.record for message in served.topic.read(0, end=served.topic.wal.visible)]


# -- consumers get what is theirs ---------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "zz-*"], ids=["new", "with another key before"])
def test_a_consumer_that_has_subscribed_and_has_no_stream_yet_loses_nothing(tmp_path, before):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            one = await client.subscribe("one", kind=KEY_SHARED, filters=["eu-*"])
            stream = client.receive(one)
            await eventually(lambda: subscription_of(broker).attached)
            if before is not None:
                await client.subscribe("two", kind=KEY_SHARED, filters=[before])
            two = await client.subscribe("two", kind=KEY_SHARED, filters=["us-*"])
            await send(b"for two", key="us-1")
            await send(b"for one", key="eu-1")
            # By now the one before it has been decided about.
            assert [m.payload for m in await read(stream, 1)] == [b"for one"]
            assert subscription_of(broker).delivery.cursor == 0
            assert [m.payload for m in await read(client.receive(two), 1)] == [b"for two"]

    run(scenario())


@asynccontextmanager
async def danubes(client, consumer):
    """Danube's stream of a consumer; what gives the next offsets."""
    stream = client.receive(consumer)

    async def more():
        return await offsets(stream, 1)

    try:
        yield more
    finally:
        stream.cancel()


@asynccontextmanager
async def isters(client, consumer):
    """The same of Ister's own."""
    stream = await client.consume()

    async def more():
        [answer] = await read(stream, 1)
        return [message.offset for message in answer.deliveries.messages]

    try:
        yield more
    finally:
        stream.cancel()


@pytest.mark.parametrize("streaming", [danubes, isters])
def test_what_was_never_written_to_a_stream_has_not_failed(tmp_path, streaming):
    """A consumer that is paused is not given up message by message, unseen."""
    policy = FailurePolicy(max_redelivery_count=0, ack_timeout_ms=100, poison="drop", **AT_ONCE)
    count = 40

    async def scenario():
        async with (
            a_broker(tmp_path, mode="memory") as (broker, services, listening),
            a_slow_reader(listening) as slow,
        ):
            client, paused = Client(services), Client(slow)
            send = await client.producer()
            consumer = await client.subscribe()
            subscription = subscription_of(broker)
            await subscription.set_policy(policy)
            await asyncio.gather(*(send(b"x" * 300_000) for _ in range(count)))
            async with streaming(paused, consumer) as more:
                assert (await more())[0] == 0
                await asyncio.sleep(0.6)  # six times as long as a consumer has
            await eventually(lambda: not subscription.attached)
            given_up = subscription.delivery.cursor
            assert given_up < 15, "messages count as failed that nobody has seen"
            seen = set()
            async with streaming(client, consumer) as more:
                while not seen >= set(range(given_up, count)):
                    found = await more()
                    seen.update(found)
                    await client.ack(*found)
            await eventually(lambda: subscription.delivery.cursor == count)

    run(scenario())


@pytest.mark.parametrize("streaming", [danubes, isters])
def test_after_a_seek_nothing_from_before_it_comes_first(tmp_path, streaming, monkeypatch):
    # Much is on its way at once.
    monkeypatch.setattr(reading, "_AHEAD_BYTES_MIN", 16 * MIB)

    async def scenario():
        async with (
            a_broker(tmp_path, mode="memory") as (broker, services, listening),
            a_slow_reader(listening) as slow,
        ):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe()
            await asyncio.gather(*(send(b"x" * 150_000) for _ in range(80)))
            subscription = subscription_of(broker)
            async with streaming(Client(slow), consumer) as more:
                first = await more()
                await eventually(lambda: subscription.delivery.stats().in_flight > 30)
                await services.admin.Seek(
                    ister_api.SeekRequest(topic=NAME, subscription="s", offset=50)
                )
                got = []
                while len(got) < 20:
                    got += await more()
            # What had left the broker before cannot be called back.
            late = [offset for offset in got if offset < 50]
            assert late == list(range(len(first), len(first) + len(late)))
            assert len(late) < 16, f"came before what was sought: {late}"
            assert got[len(late) :] == list(range(50, 50 + len(got) - len(late)))

    run(scenario())


def test_a_stream_that_is_refused_leaves_nobody_attached(tmp_path):
    async def scenario():
        settings = {"broker": {"limits": {"max_connections": 1}}}
        async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
            client, other = Client(services), Client(services, "/default/u")
            await client.producer()
            await other.producer()
            late, quick = await client.subscribe(), await other.subscribe()
            topics, go_on, is_asked = broker.topics, asyncio.Event(), asyncio.Event()
            real = topics.get

            async def slow(name):
                if name == NAME:  # as one that has to be opened first
                    is_asked.set()
                    await go_on.wait()
                return await real(name)

            topics.get = slow
            stream = client.receive(late)
            with suppress(TimeoutError):
                await asyncio.wait_for(is_asked.wait(), 2)
            taken = other.receive(quick)
            await eventually(lambda: subscription_of(broker, topic="/default/u").attached)
            go_on.set()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await read(stream, 1)
            assert refused.value.code() is Code.RESOURCE_EXHAUSTED
            topics.get = real
            assert subscription_of(broker).attached == []
            taken.cancel()
            await eventually(lambda: not subscription_of(broker, topic="/default/u").attached)
            # And the place is free for the one that was refused.
            again = client.receive(late)
            await eventually(lambda: subscription_of(broker).attached == [late])
            again.cancel()

    run(scenario())


def test_nothing_is_held_where_nothing_is_owed(tmp_path):
    async def scenario():
        settings = {"broker": {"consumer_grace_seconds": 1}}
        async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            one = await client.subscribe("one", kind=KEY_SHARED, filters=["eu-*"])
            two = await client.subscribe("two", kind=KEY_SHARED, filters=["us-*"])
            stays, goes = client.receive(one), client.receive(two)
            subscription = subscription_of(broker)
            await eventually(lambda: len(subscription.attached) == 2)
            goes.cancel()
            await eventually(lambda: subscription.attached == [one])
            for number in range(5):
                await send(b"x" * 1000, key=f"us-{number}")
            await eventually(lambda: subscription.reading.held_bytes > 5000)
            # Its consumer does not come back: they are passed over.
            await eventually(lambda: subscription.delivery.cursor == 5)
            assert subscription.reading.held_bytes == 0
            assert subscription.reading.held == {}
            stays.cancel()

    run(scenario())


# -- damage, dead letters -----------------------------------------------------------------------


SKIPPING = {"storage": {"cloud_reader": {"on_damage": "skip"}}}


def damage(directory, *numbers):
    """Turns a bit of some messages' objects over."""
    for number in numbers:
        damaged = 0
        for path in directory.rglob("*.dnb1"):
            content = bytearray(path.read_bytes())
            if (at := content.find(b"m%03d" % number)) >= 0:
                content[at + 10] ^= 0xFF
                path.write_bytes(content)
                damaged += 1
        assert damaged == 1


def test_damage_that_may_be_skipped_is_passed_over_and_reading_goes_on(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, SKIPPING) as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe(kind=SHARED)
            for number in range(20):
                await send(b"m%03d" % number * 50)
            await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
            damage(tmp_path, 10)
            topic = (await broker.topics.get(NAME)).topic
            readable = [message.offset for message in topic.read(0)]
            assert 10 not in readable
            assert {0, 19} <= set(readable)
            stream = client.receive(consumer)
            assert await offsets(stream, len(readable)) == readable
            await client.ack(*readable)
            assert subscription_of(broker).delivery.cursor == 20
            assert subscription_of(broker).lag == 0
            # What is new comes too.
            await send(b"new")
            assert await offsets(stream, 1) == [20]

    run(scenario())


def thin_out(topic, *kept):
    """Does what compaction does that keeps the latest of each key; these are the latest."""
    pa = pytest.importorskip("pyarrow")
    compute = pytest.importorskip("pyarrow.compute")
    owned, objects = topic.tier.owned, topic.tier._tiers.objects
    old = list(owned.catalog.descriptors())
    new = merge_objects(
        PARSED,
        [described for described, _ in old],
        store=objects,
        settings=SimpleNamespace(chunk_bytes=65_536, concurrent_parts=1, index_every_messages=10),
        format="parquet",
        epoch=owned.epoch,
        incarnation=owned.record.incarnation,
        tag="00000001",
        created_at=1,
        survives=lambda batch: compute.is_in(batch["offset"], pa.array(kept, pa.int64())),
    )
    assert owned.swap(old, new, until=0)


def test_messages_that_compaction_took_are_no_loss(tmp_path, caplog):
    """Goal: cursors pass over holes; nobody is told of damage, and nobody waits."""
    policy = FailurePolicy(max_redelivery_count=5, **AT_ONCE)

    async def scenario():
        async with a_broker(tmp_path, {}) as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe(kind=SHARED)
            for number in range(20):
                await send(b"m%03d" % number * 50)
            await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
            await (await broker.topics.get(NAME)).subscription("s").set_policy(policy)
            topic = (await broker.topics.get(NAME)).topic
            await asyncio.to_thread(thin_out, topic, 3, 4, 11, 19)
            assert [message.offset for message in topic.read(0)] == [3, 4, 11, 19]
            stream = client.receive(consumer)
            assert await offsets(stream, 4) == [3, 4, 11, 19]
            await client.ack(3, 11, 19)
            assert subscription_of(broker).delivery.cursor == 4
            # It is there again, and so is what is new.
            await client.nack(4)
            assert await offsets(stream, 1) == [4]
            await client.ack(4)
            await eventually(lambda: subscription_of(broker).delivery.cursor == 20)
            assert subscription_of(broker).lag == 0
            await send(b"new")
            assert await offsets(stream, 1) == [20]

    run(scenario())
    assert "left out" not in caplog.text
    assert "damage" not in caplog.text


def test_damage_of_a_message_that_comes_again_does_not_bring_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_KEPT_BYTES_MAX", 0)
    policy = FailurePolicy(max_redelivery_count=5, **AT_ONCE)

    async def scenario():
        async with a_broker(tmp_path, SKIPPING) as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe(kind=SHARED)
            for number in range(20):
                await send(b"m%03d" % number * 50)
            await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
            await (await broker.topics.get(NAME)).subscription("s").set_policy(policy)
            stream = client.receive(consumer)
            await read(stream, 20)
            damage(tmp_path, 10, 19)
            readable = {message.offset for message in broker.topics.find_open(NAME).topic.read(0)}
            assert not readable & {10, 19}
            for offset in (10, 19, 5):
                await client.nack(offset)
            [again] = await read(stream, 1)
            assert (again.msg_id.topic_offset, again.payload[:4]) == (5, b"m005")
            await client.ack(*readable)
            # What nobody can read is owed to nobody.
            await eventually(lambda: subscription_of(broker).delivery.cursor == 20)

    run(scenario())


def test_a_dead_letter_is_published_whatever_its_attributes_take(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe(kind=KEY_SHARED)
            subscription = subscription_of(broker)
            await subscription.set_policy(
                FailurePolicy(
                    max_redelivery_count=0, poison="dead_letter", dead_letter_topic=DEAD, **AT_ONCE
                )
            )
            await send(b"big", key="k", large="x" * (ENVELOPE_SIZE_BYTES_MAX - 100))
            await send(b"next", key="k")
            stream = client.receive(consumer)
            [first] = await read(stream, 1)
            await client.nack(first.msg_id.topic_offset)
            # Nothing of its key waits for it any more.
            assert [m.payload for m in await read(stream, 1)] == [b"next"]
            [letter] = records_of(broker, DEAD)
            assert letter.payload == b"big"
            assert letter.attributes["x-original-topic"] == NAME
            assert letter.attributes["x-original-topic-offset"] == "0"
            usual = {
                "x-original-topic",
                "x-original-subscription",
                "x-original-topic-offset",
                "x-original-producer-id",
                "x-original-broker-addr",
                "x-poison-policy",
                "x-delivery-attempt",
                "x-failure-reason",
            }
            left_out = "large" not in letter.attributes
            assert not left_out or letter.attributes.keys() - usual, "nothing says what is missing"

    run(scenario())


def test_a_topic_that_keeps_nothing_takes_no_dead_letters(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe()
            await Client(services, DEAD).producer(is_reliable=False)
            request = danube_admin.SetSubscriptionFailurePolicyRequest(
                topic=NAME,
                subscription="s",
                failure_policy=danube_admin.SubscriptionFailurePolicy(
                    ack_timeout_ms=30_000, poison_policy=0, dead_letter_topic=DEAD
                ),
            )
            assert await status(services.topics.SetSubscriptionFailurePolicy(request)) in {
                Code.INVALID_ARGUMENT,
                Code.FAILED_PRECONDITION,
            }
            # One that has become such a topic since: the message stays.
            request.failure_policy.dead_letter_topic = "/default/later"
            await services.topics.SetSubscriptionFailurePolicy(request)
            await Client(services, "/default/later").producer(is_reliable=False)
            await send(b"poison")
            await read(client.receive(consumer), 1)
            await client.nack(0)
            subscription = subscription_of(broker)
            await client.settle()
            await eventually(lambda: not subscription._tasks)
            assert subscription.delivery.cursor == 0
            assert subscription.delivery.holds(0)

    run(scenario())


def test_a_message_is_not_lost_when_the_policy_changes_before_its_dead_letter(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client = Client(services)
            send = await client.producer()
            consumer = await client.subscribe()
            subscription = subscription_of(broker)
            await subscription.set_policy(
                FailurePolicy(
                    max_redelivery_count=0, poison="dead_letter", dead_letter_topic=DEAD, **AT_ONCE
                )
            )
            await send(b"poison")
            await read(client.receive(consumer), 1)
            now = asyncio.get_running_loop().time()
            subscription.nack(0, delay_ms=None, reason="bad")
            # Nobody else runs in between: its dead letter is decided, and not begun.
            subscription.delivery.set_policy(
                FailurePolicy(max_redelivery_count=0, poison="block", **AT_ONCE), now=now
            )
            await eventually(lambda: not subscription._tasks)
            letters = [record.payload for record in records_of(broker, DEAD)]
            stats = subscription.delivery.stats()
            assert letters == [b"poison"] or stats.blocked == 0, stats

    run(scenario())


# -- cursors ------------------------------------------------------------------------------------


@asynccontextmanager
async def with_a_cursor(tmp_path, mode, *, cursor, saved):
    """Topics and a store that say more than the log has: ten messages, or none in memory."""
    metadata = None if mode == "wal_cloud" else MemoryMetadata()
    async with some_topics(tmp_path, mode=mode, metadata=metadata) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True)
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", ())
        for number in range(10):
            await topic.publish(a_record(b"%d" % number))
        topics.store.save_cursor(
            PARSED,
            "s",
            cursor=cursor,
            saved=saved,
            incarnation=topic.incarnation,
            owned=topic.owned,
            force=True,
        )
        # Nothing of its own is written at the end.
        await topic.close(None, flush=False)
    async with some_topics(tmp_path, mode=mode, metadata=metadata) as topics:
        yield topics
    if metadata is not None:
        metadata.close()


BEYOND = [
    pytest.param(15, {}, id="cursor"),
    pytest.param(9, {"floor": 9, "acked": [[12, 15]], "failed": [], "end": 15}, id="acknowledged"),
]


@pytest.mark.parametrize(("cursor", "saved"), BEYOND)
@pytest.mark.parametrize("mode", ["memory", "local_only", "wal_cloud"])
def test_what_is_beyond_the_log_is_put_back_before_the_topic_is_served(
    tmp_path, mode, cursor, saved
):
    async def scenario():
        async with with_a_cursor(tmp_path, mode, cursor=cursor, saved=saved) as topics:
            topic = await topics.get_or_create(NAME, is_reliable=True)
            end = topic.topic.wal.next
            assert end == (0 if mode == "memory" else 10)
            # At once: a crash from here on leaves what the store has.
            at, acked = kept(topics)
            assert at <= end
            assert acked <= set(range(end)), "messages that there are not are acknowledged"
            outbox = topic.subscription("s").attach(1, ())
            for number in range(end, 20):
                assert await topic.publish(a_record(b"new")) == number
            got = set()
            async with asyncio.timeout(20):
                while not got >= set(range(end, 20)):
                    got.update(offset for offset, _ in await outbox.take(20))

    run(scenario())


@pytest.mark.parametrize(("cursor", "saved"), BEYOND)
@pytest.mark.parametrize("mode", ["local_only", "wal_cloud"])
def test_a_topic_is_not_served_while_its_cursors_cannot_be_put_back(
    tmp_path, monkeypatch, mode, cursor, saved
):
    async def scenario():
        async with with_a_cursor(tmp_path, mode, cursor=cursor, saved=saved) as topics:
            metadata = topics.records._metadata
            real = metadata.transact

            def transact(compares, operations):
                if any("/subscriptions/" in operation.key for operation in operations):
                    away()
                return real(compares, operations)

            with monkeypatch.context() as patch:
                patch.setattr(metadata, "transact", transact)
                with pytest.raises(UnavailableError):
                    await topics.get(NAME)
                assert topics.find_open(NAME) is None
            assert (await topics.get(NAME)).topic.wal.next == 10
            at, acked = kept(topics)
            assert at <= 10
            assert acked <= set(range(10))

    run(scenario())


def test_acknowledgements_are_kept_although_an_earlier_write_was_slow(tmp_path):
    async def scenario():
        settings = {"dispatch": {"progress_min_offset_delta": 1}}
        async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
            client, store = Client(services), broker.topics.store
            send = await client.producer()
            consumer = await client.subscribe(kind=SHARED)
            for _ in range(20):
                await send()
            await read(client.receive(consumer), 20)
            store.save_cursor = held = Held(store.save_cursor)
            await client.ack(0)
            await held.is_reached()
            await client.ack(*range(5, 15))
            ending = asyncio.create_task(broker.topics.close())
            await asyncio.wait({ending}, timeout=MOMENT)
            held.go_on()
            await ending
            await held.is_done()
            assert kept(broker.topics) == (1, {0, *range(5, 15)})

    run(scenario())


def test_acknowledgements_after_the_last_cursor_are_not_confirmed(tmp_path):
    async def scenario():
        async with (
            a_broker(tmp_path) as (broker, services, listening),
            a_slow_reader(listening) as slow,
        ):
            client = Client(services)
            send = await client.producer()
            stream = await client.consume(slow)
            for _ in range(30):
                await send(b"x" * 200_000)
            batch = await stream.read()
            given = [message.offset for message in batch.deliveries.messages]
            assert given
            # The stream waits for its reader, and the topic ends meanwhile.
            ending = asyncio.create_task(broker.topics.unload(NAME))
            await asyncio.wait({ending}, timeout=2)
            await stream.write(ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=given)))
            await Client(slow).settle()
            confirmed = []
            with suppress(grpc.aio.AioRpcError):
                async with asyncio.timeout(20):
                    while (answer := await stream.read()) is not grpc.aio.EOF:
                        if answer.WhichOneof("step") == "acked":
                            confirmed += answer.acked.offsets
            await ending
            again = await broker.topics.get(NAME)
            floor = again.subscription("s").delivery
            lost = [one for one in confirmed if one >= floor.cursor]
            assert not lost, "confirmed, and forgotten"

    run(scenario())


def test_what_is_refused_is_not_confirmed(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (_, services, _):
            client = Client(services)
            send = await client.producer()
            stream = await client.consume()
            await send()
            await read(stream, 1)
            for asked in ([10**6], [10**6, 0]):
                await stream.write(ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=asked)))
            confirmed = []
            with suppress(grpc.aio.AioRpcError):  # it may as well be told so
                while 0 not in confirmed:
                    [answer] = await read(stream, 1)
                    confirmed += answer.acked.offsets
            assert set(confirmed) <= {0}

    run(scenario())


# -- a client gives up ----------------------------------------------------------------------------


def test_a_deletion_that_nobody_waits_for_harms_no_later_topic(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client, store = Client(services), broker.topics.store
            send = await client.producer()
            await client.subscribe()
            await send(b"old")
            store.delete_all = held = Held(store.delete_all)
            call = services.topics.DeleteTopic(danube_admin.TopicRequest(name=NAME))
            await held.is_reached()
            await client.give_up(call)

            async def begin_anew():
                await until_ok(client.producer)
                await until_ok(client.subscribe)

            beginning = asyncio.create_task(begin_anew())
            await asyncio.wait({beginning}, timeout=MOMENT)
            held.go_on()
            await held.is_done()
            await beginning
            await (await client.producer())(b"new")
        async with a_broker(tmp_path) as (broker, services, _):
            client = Client(services)
            assert [record.payload for record in records_of(broker, NAME)] == [b"new"]
            assert list(broker.topics.find_open(NAME).subscriptions) == ["s"]
            stream = client.receive(await client.subscribe())
            assert [m.payload for m in await read(stream, 1)] == [b"new"]

    run(scenario())


def test_a_deletion_that_nobody_waits_for_is_carried_to_its_end(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client, topics, schemas = Client(services), broker.topics, broker.schemas
            await client.producer()
            consumer = await client.subscribe()
            await asyncio.to_thread(schemas.register, "orders", "string", b"")
            await asyncio.to_thread(schemas.bind_producer, NAME, "orders")
            topics.store.delete_all = held = Held(topics.store.delete_all)
            call = services.topics.DeleteTopic(danube_admin.TopicRequest(name=NAME))
            await held.is_reached()
            await client.give_up(call)
            held.go_on()
            await held.is_done()
            await eventually(lambda: topics.consumers.find(consumer) is None, within=5)
            assert await topics.names() == set()
            # The next topic of the name begins without a schema.
            await eventually(lambda: schemas.topic_config(NAME) is None, within=5)
            assert await status(client.subscribe()) is Code.NOT_FOUND

    run(scenario())


def test_a_broker_that_ends_carries_a_deletion_to_its_end_first(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client, topics = Client(services), broker.topics
            await client.producer()
            await client.subscribe()
            topics.store.delete_all = held = Held(topics.store.delete_all)
            call = services.topics.DeleteTopic(danube_admin.TopicRequest(name=NAME))
            await held.is_reached()
            await client.give_up(call)
            ending = asyncio.create_task(broker.stop())
            await asyncio.wait({ending}, timeout=MOMENT)
            held.go_on()
            await ending
            await held.is_done()
        async with a_broker(tmp_path) as (broker, _, _):
            assert await broker.topics.names() == set()

    run(scenario())


def test_a_deletion_of_partitions_that_nobody_waits_for_takes_all_of_them(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client, topics = Client(services, "/default/o"), broker.topics
            await services.topics.CreatePartitionedTopic(
                danube_admin.PartitionedTopicRequest(
                    base_name="/default/o", partitions=3, dispatch_strategy=1
                )
            )
            topics.store.delete_all = held = Held(topics.store.delete_all)
            call = services.topics.DeleteTopic(danube_admin.TopicRequest(name="/default/o"))
            await held.is_reached()
            await client.give_up(call)
            held.go_on()
            await held.is_done()
            await eventually(lambda: not topics.log.topics(), within=5)
            assert topics.served == []

    run(scenario())


def test_an_unload_that_nobody_waits_for_is_carried_to_its_end(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client, topics = Client(services), broker.topics
            send = await client.producer()
            consumer = await client.subscribe()
            for _ in range(10):
                await send()
            stream = client.receive(consumer)
            await read(stream, 10)
            sealed, real = [], topics.log.seal

            def seal(name):
                sealed.append(name)
                return real(name)

            topics.log.seal = seal
            topics.store.save_cursor = held = Held(topics.store.save_cursor)
            await client.ack(*range(10))
            call = services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
            await held.is_reached()
            await client.give_up(call)
            # Somebody wants the topic meanwhile.
            sending = asyncio.create_task(until_ok(lambda: send(b"new")))
            await asyncio.wait({sending}, timeout=MOMENT)
            held.go_on()
            await held.is_done()
            await eventually(lambda: sealed == [NAME], within=5)
            await sending
            again = await topics.get(NAME)
            assert again.topic.wal.next == 11
            assert again.subscription("s").delivery.cursor == 10

    run(scenario())


def test_a_seek_that_nobody_waits_for_is_carried_to_its_end(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client, store = Client(services), broker.topics.store
            send = await client.producer()
            await client.subscribe()
            for _ in range(10):
                await send()
            store.save_cursor = held = Held(store.save_cursor)
            call = services.admin.Seek(
                ister_api.SeekRequest(topic=NAME, subscription="s", offset=7)
            )
            await held.is_reached()
            await client.give_up(call)
            held.go_on()
            await held.is_done()
            subscription = subscription_of(broker)
            await eventually(lambda: subscription.delivery.cursor == 7, within=5)
            assert kept(broker.topics)[0] == 7

    run(scenario())


def test_an_unsubscribe_that_nobody_waits_for_is_carried_to_its_end(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client, store = Client(services), broker.topics.store
            send = await client.producer()
            await client.subscribe()
            store.delete = held = Held(store.delete)
            call = services.topics.Unsubscribe(
                danube_admin.SubscriptionRequest(topic=NAME, subscription="s")
            )
            await held.is_reached()
            await client.give_up(call)
            held.go_on()
            await held.is_done()
            topic = broker.topics.find_open(NAME)
            await eventually(lambda: not topic.subscriptions, within=5)
            # The name is free again, for whom- and whatever.
            await send(b"before")
            stream = client.receive(await client.subscribe("another", kind=SHARED))
            await send(b"after")
            assert [m.payload for m in await read(stream, 1)] == [b"after"]

    run(scenario())


# -- a store that is away -------------------------------------------------------------------------


def test_a_subscription_that_could_not_be_removed_works(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client, store = Client(services), broker.topics.store
            send = await client.producer()
            await client.subscribe()
            await send(b"before")
            real, store.delete = store.delete, away
            request = danube_admin.SubscriptionRequest(topic=NAME, subscription="s")
            assert await status(services.topics.Unsubscribe(request)) is Code.UNAVAILABLE
            store.delete = real
            stream = client.receive(await client.subscribe())
            await send(b"after")
            assert [m.payload for m in await read(stream, 2)] == [b"before", b"after"]
            await client.ack(0, 1)
            assert subscription_of(broker).delivery.cursor == 2
            stream.cancel()
            await eventually(lambda: not subscription_of(broker).attached)
            await services.topics.Unsubscribe(request)
            assert kept(broker.topics) is None

    run(scenario())


def test_a_topic_stays_here_while_its_cursors_cannot_be_written(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client, store = Client(services), broker.topics.store
            send = await client.producer()
            consumer = await client.subscribe()
            for _ in range(10):
                await send()
            await read(client.receive(consumer), 10)
            await client.ack(*range(10))
            real, store.save_cursor = store.save_cursor, away
            request = danube_admin.TopicRequest(name=NAME)
            assert await status(services.topics.UnloadTopic(request)) is Code.UNAVAILABLE
            # It can be used, and has forgotten nothing.
            await send(b"while the store is away")
            assert subscription_of(broker).delivery.cursor == 10
            store.save_cursor = real
            stream = client.receive(consumer)
            assert await offsets(stream, 1) == [10]
            await client.ack(10)
            await services.topics.UnloadTopic(request)
            again = await broker.topics.get(NAME)
            assert again.subscription("s").delivery.cursor == 11

    run(scenario())


@pytest.mark.parametrize("is_reliable", [True, False])
def test_who_subscribes_to_a_topic_that_is_unloaded_is_subscribed_or_told(tmp_path, is_reliable):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client, topics = Client(services), broker.topics
            await client.producer(is_reliable=is_reliable)
            topics.store.create = held = Held(topics.store.create)
            subscribing = asyncio.create_task(status(client.subscribe()))
            await held.is_reached()

            async def move():
                await topics.unload(NAME)
                await topics.get(NAME)

            moving = asyncio.create_task(move())
            await asyncio.wait({moving}, timeout=MOMENT)
            held.go_on()
            answer = await subscribing
            await moving
            if answer is Code.OK:
                assert list((await topics.get(NAME)).subscriptions) == ["s"]
            else:
                assert answer is Code.UNAVAILABLE
            # Whoever is told comes again.
            consumer = await until_ok(client.subscribe)
            stream = client.receive(consumer)
            await eventually(lambda: subscription_of(broker).attached)
            await (await client.producer(is_reliable=is_reliable))(b"first")
            assert [m.payload for m in await read(stream, 1)] == [b"first"]

    run(scenario())


# -- names and partitions -------------------------------------------------------------------------


async def partitioned_during_a_listing(broker, services):
    """A topic gets further partitions while all names are listed for somebody else."""
    topics = broker.topics
    await Client(services, "/default/o-part-0").producer()
    topics.log.topics = held = Held(topics.log.topics, is_stale=True)
    asking = asyncio.ensure_future(partitions(services, "/default/other"))
    await held.is_reached()
    making = asyncio.ensure_future(
        topics.create_partitioned("/default/o", 3, is_reliable=True, is_growing=True)
    )
    await asyncio.wait({making}, timeout=MOMENT)
    held.go_on()
    await asking
    await making


async def partitions(services, name):
    answer = await services.discovery.TopicPartitions(
        danube.TopicLookupRequest(request_id=1, topic=name)
    )
    return list(answer.partitions)


def test_partitions_that_were_made_are_all_told(tmp_path, monkeypatch):
    monkeypatch.setattr(topics_module, "_LOOK_SECONDS", 0.0, raising=False)

    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            await partitioned_during_a_listing(broker, services)
            monkeypatch.setattr(topics_module, "_LOOK_SECONDS", 1.0, raising=False)
            wanted = [f"/default/o-part-{number}" for number in range(3)]
            assert await partitions(services, "/default/o") == wanted

    run(scenario())


def test_a_deletion_takes_all_partitions(tmp_path, monkeypatch):
    monkeypatch.setattr(topics_module, "_LOOK_SECONDS", 0.0, raising=False)

    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            await partitioned_during_a_listing(broker, services)
            monkeypatch.setattr(topics_module, "_LOOK_SECONDS", 1.0, raising=False)
            await services.topics.DeleteTopic(danube_admin.TopicRequest(name="/default/o"))
            assert await broker.topics.names() == set()
            assert await partitions(services, "/default/o") == []

    run(scenario())


@pytest.mark.parametrize("is_reliable", [True, False])
def test_a_topic_and_its_partition_made_at_once_are_one_of_them(tmp_path, is_reliable):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            topics = broker.topics
            both = threading.Barrier(2)

            def together(real):
                def call(*args, **more):
                    if more.get("create", True):
                        with suppress(threading.BrokenBarrierError):
                            both.wait(MOMENT)
                    return real(*args, **more)

                return call

            topics.log.topic = together(topics.log.topic)
            topics.records.create_topic = together(topics.records.create_topic)
            plain, partition = Client(services, "/default/x"), Client(services, "/default/x-part-0")
            answers = await asyncio.gather(
                status(plain.producer(is_reliable=is_reliable)),
                status(partition.producer(is_reliable=is_reliable)),
            )
            assert sorted(answers, key=lambda code: code.value[0]) == [
                Code.OK,
                Code.ALREADY_EXISTS,
            ]
            assert len(await topics.names()) == 1

    run(scenario())


def test_a_topic_is_not_made_again_with_another_ack_level(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (_, services, _):
            create, request = services.admin.CreateTopic, ister_api.CreateTopicRequest
            made = await create(request(topic=NAME, ack="synced"))
            assert made.ack == "synced"
            assert await status(create(request(topic=NAME, ack="tiered"))) in {
                Code.ALREADY_EXISTS,
                Code.FAILED_PRECONDITION,
                Code.INVALID_ARGUMENT,
                Code.ABORTED,
            }
            # As it is, or without a wish, it is there.
            for ack in ("synced", ""):
                assert (await create(request(topic=NAME, ack=ack))).ack == "synced"

    run(scenario())


# -- publishing -----------------------------------------------------------------------------------


def test_clients_that_give_up_take_nothing_of_a_rate(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            send = await Client(services).producer()
            await broker.topics.set_topic_policies(NAME, {"max_publish_rate": 5})
            ends = await asyncio.gather(*(status(send(timeout=0.5)) for _ in range(60)))
            # Twelve seconds' worth of messages was given up, by them or by the broker.
            assert ends.count(Code.OK) < 20
            assert ends.count(Code.DEADLINE_EXCEEDED) > 10
            assert await status(send(b"later", timeout=5)) is Code.OK
            assert records_of(broker, NAME)[-1].payload == b"later"
            assert len(records_of(broker, NAME)) < 30

    run(scenario())


def test_a_large_batch_does_not_keep_others_from_a_topic_with_a_rate(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import flight  # noqa: PLC0415 - an extra

    from ister.client.contract import PutBatch, PutOpen  # noqa: PLC0415

    def put(port, begun):
        rows = pa.record_batch({"payload": pa.array([b"x"] * 2000, pa.binary())})
        opened = PutOpen(topic=NAME, producer="bulk", epoch=1).to_json()
        with flight.connect(f"grpc://127.0.0.1:{port}") as connection:
            writer, _ = connection.do_put(flight.FlightDescriptor.for_command(opened), rows.schema)
            for number in range(2):
                writer.write_with_metadata(rows, PutBatch(sequence=2000 * number).to_json())
            begun.set()
            with suppress(pa.ArrowException, OSError):
                writer.close()

    async def scenario():
        begun = threading.Event()
        async with a_broker(tmp_path, mode="memory") as (broker, services, listening):
            send = await Client(services).producer()
            await broker.topics.set_topic_policies(NAME, {"max_publish_rate": 10})
            putting = asyncio.get_running_loop().run_in_executor(None, put, listening.flight, begun)
            await eventually(begun.is_set)
            # It takes minutes at this rate, and others have their turn meanwhile.
            await asyncio.sleep(MOMENT)
            assert await status(send(b"other", timeout=5)) is Code.OK
        await putting

    run(scenario())


def test_numbered_messages_that_are_sent_together_are_all_taken(tmp_path, monkeypatch):
    def overtaken(real, *, before):
        """The first call is as slow as lets a second one overtake it, if one can."""
        calls, other = [], threading.Event()

        def call(topic, *args, **more):
            calls.append(topic)
            if len(calls) > 1:
                try:
                    return real(topic, *args, **more)
                finally:
                    other.set()
            if before:
                other.wait(MOMENT)
            answer = real(topic, *args, **more)
            if not before:
                other.wait(MOMENT)
            return answer

        return call

    for name, before in (("prepare", False), ("append_record", True)):
        real = getattr(SequencedTopic, name)
        monkeypatch.setattr(SequencedTopic, name, overtaken(real, before=before))

    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            for topic in (NAME, *(f"/default/t{number}" for number in range(10))):
                send = await Client(services, topic).producer()
                answers = await asyncio.gather(
                    *(status(send(b"%d" % n, ister_sequence=str(n))) for n in range(8))
                )
                assert answers == [Code.OK] * 8
                payloads = [record.payload for record in records_of(broker, topic)]
                assert payloads == [b"%d" % n for n in range(8)]

    run(scenario())


def test_a_deep_look_back_for_an_old_sequence_keeps_nobody_else_waiting(tmp_path, monkeypatch):
    monkeypatch.setitem(SequencedTopic.__init__.__kwdefaults__, "scan_messages", 10)
    held = []

    def holding(real):
        def call(*args, **more):
            if held:
                held.pop()()
            return real(*args, **more)

        return call

    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            client = Client(services)
            send, plain = await client.producer(), await client.producer("plain")
            numbered = await client.producer("numbered")
            for number in range(5):
                await send(b"%d" % number, ister_sequence=str(number))
            for _ in range(20):
                await plain()
            await send(b"5", ister_sequence="5")
            await services.topics.UnloadTopic(danube_admin.TopicRequest(name=NAME))
            await send(b"6", ister_sequence="6")
            assert broker.topics.find_open(NAME).topic.wal.next == 27
            look = Held(lambda: None)
            held.append(look)
            for name in ("read", "read_arrow"):
                monkeypatch.setattr(Topic, name, holding(getattr(Topic, name)))
            looking = asyncio.ensure_future(status(send(b"1", ister_sequence="1")))
            await look.is_reached()
            assert look.was_in_time, "the loop waited for the log to be looked through"
            # Others publish to the topic, and nobody waits for those who have to.
            others = asyncio.ensure_future(status(numbered(b"0", ister_sequence="0")))
            await plain(b"meanwhile", timeout=3)
            await client.settle()
            look.go_on()
            # It is in: it was found, and is not appended again.
            assert await looking is Code.OK
            assert await others is Code.OK
            assert look.was_in_time
            payloads = [record.payload for record in records_of(broker, NAME)]
            assert payloads.count(b"1") == 1

    run(scenario())


def test_nobody_publishes_under_the_id_or_the_name_of_another_producer(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="memory") as (broker, services, _):
            client = Client(services)
            shop, _ = await client.producer("shop"), await client.producer("evil")
            await shop(b"1", ister_sequence="0", ister_producer_epoch="7")
            for owner, by in (("evil", "shop"), ("shop", "evil"), ("evil", "")):
                answer = await status(
                    shop(
                        b"evil",
                        id=producer_id(NAME, owner),
                        by=by,
                        ister_sequence="0",
                        ister_producer_epoch="4294967295",
                    )
                )
                assert answer in REFUSALS
            await shop(b"2", ister_sequence="1", ister_producer_epoch="7")
            assert [record.payload for record in records_of(broker, NAME)] == [b"1", b"2"]

    run(scenario())


# -- rights -------------------------------------------------------------------------------------


def test_health_tells_nothing_to_those_without_rights(tmp_path):
    def metadata(name):
        return [("authorization", f"Bearer {sign(name)}")]

    async def scenario():
        settings = {"broker": {"auth": auth_settings(tmp_path)}}
        async with a_broker(tmp_path, settings, mode="memory") as (_, services, _):
            root, nobody = metadata("root"), metadata("nobody")
            created = await services.producers.CreateProducer(
                danube.ProducerRequest(
                    request_id=1, topic_name=NAME, producer_name="p", dispatch_strategy=1
                ),
                metadata=root,
            )
            subscribed = await services.consumers.Subscribe(
                danube.ConsumerRequest(topic_name=NAME, consumer_name="c", subscription="s"),
                metadata=root,
            )

            async def ask(client, id, who):
                request = danube.HealthCheckRequest(request_id=1, client=client, id=id)
                try:
                    return (await services.health.HealthCheck(request, metadata=who)).status
                except grpc.aio.AioRpcError as error:
                    return error.code(), error.details()

            for client, known in ((0, created.producer_id), (1, subscribed.consumer_id)):
                assert await ask(client, known, root) == 0
                assert await ask(client, known + 1, root) == 1
                assert await ask(client, known, nobody) == await ask(client, known + 1, nobody)

    run(scenario())
