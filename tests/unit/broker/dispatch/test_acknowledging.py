"""Acknowledgements count for what this subscription of this topic has delivered, and for no more.

Both protocols: Danube's, where a message's id comes back as it was sent, and Ister's own stream.
"""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from ister.broker.dispatch.cursor_writer import CursorWriter
from ister.broker.rpc.handlers import ConsumerSlots
from ister.broker.security.guard import Caller, current_caller
from ister.broker.security.principal import ANONYMOUS
from ister.broker.services.consumer import ConsumerService
from ister.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, UnavailableError
from ister.subscription.policy import FailurePolicy
from ister.subscription.progress import ProgressPlan
from ister.wire import danube, ister_api
from tests.support.broker import a_broker, eventually
from tests.support.cases import each

NAME = "/default/t"
SHARED = 1


class World:
    """A broker's services as its clients use them."""

    def __init__(self, broker, services):
        self.broker = broker
        self.services = services

    @property
    def dispatch(self):
        return self.broker.topics.find_open(NAME).subscription("s")

    @property
    def refused(self):
        return self.broker.topics.log.metrics.snapshot()["subscription.acks_refused_total"]

    async def make_topic(self):
        await self.services.admin.CreateTopic(ister_api.CreateTopicRequest(topic=NAME))

    async def publish(self, count):
        created = await self.services.producers.CreateProducer(
            danube.ProducerRequest(topic_name=NAME, producer_name="p", dispatch_strategy=1)
        )
        for number in range(count):
            await self.services.producers.SendMessage(
                danube.StreamMessage(
                    msg_id=danube.MsgID(
                        producer_id=created.producer_id,
                        topic_name=NAME,
                        broker_addr="http://127.0.0.1:6650",
                    ),
                    payload=b"%d" % number,
                    producer_name="p",
                )
            )

    async def subscribe(self, consumer="c"):
        """A stream of a consumer of Danube's."""
        answer = await self.services.consumers.Subscribe(
            danube.ConsumerRequest(
                topic_name=NAME, consumer_name=consumer, subscription="s", subscription_type=SHARED
            )
        )
        return self.services.consumers.ReceiveMessages(
            danube.ReceiveRequest(consumer_id=answer.consumer_id)
        )

    async def ack(self, id):
        await self.services.consumers.Ack(danube.AckRequest(msg_id=id, subscription_name="s"))

    async def nack(self, id):
        await self.services.consumers.Nack(danube.NackRequest(msg_id=id, subscription_name="s"))

    async def refuses(self, id):
        """Whether an acknowledgement is refused, and counted."""
        before = self.refused
        with pytest.raises(grpc.aio.AioRpcError, match="has delivered no such message"):
            await self.ack(id)
        return self.refused == before + 1

    async def consume(self, consumer="c"):
        """A stream of Ister's own."""
        stream = self.services.delivery.Consume()
        opening = ister_api.OpenConsumer(
            topic=NAME, subscription="s", consumer=consumer, kind="shared", start="earliest"
        )
        await stream.write(ister_api.ConsumeRequest(open=opening))
        assert (await stream.read()).WhichOneof("step") == "opened"
        return stream


class Call:
    """A call of a batch, and what became of it."""

    def __init__(self, request, caller=None):
        self.data = request if isinstance(request, bytes) else request.SerializeToString()
        self.caller = caller
        self.outcome = None

    def refuse(self, error):
        assert self.outcome is None
        self.outcome = error

    def defer(self):
        assert self.outcome is None
        self.outcome = "deferred"

    @staticmethod
    def answer_all(calls, answers):
        for call, answer in zip(calls, answers, strict=True):
            assert call.outcome is None
            call.outcome = danube.AckResponse.FromString(answer).request_id


async def delivered(stream, count):
    """Offsets and tokens of messages that come by a stream of Ister's own."""
    found = []
    while len(found) < count:
        answer = await stream.read()
        found += [(one.offset, one.token) for one in answer.deliveries.messages]
    return found


async def answers(stream, acks):
    """What becomes of acknowledgements: offsets that count, and offsets that do not."""
    offsets, tokens = zip(*acks, strict=True)
    request = ister_api.Acks(offsets=offsets, tokens=[one for one in tokens if one is not None])
    await stream.write(ister_api.ConsumeRequest(acks=request))
    taken, refused = [], []
    while len(taken) + len(refused) < len(set(offsets)):
        answer = await stream.read()
        taken += answer.acked.offsets
        refused += answer.refused.offsets
    return sorted(taken), sorted(refused)


@each("mode", ["memory", "local_only", "wal_cloud"])
async def test_acks_of_a_topic_that_was_deleted_lose_nothing_of_the_new_one(tmp_path, mode):
    """Goal: 10 of 10 messages of a topic that was made again are delivered, whatever is acked."""

    async with a_broker(tmp_path, mode=mode) as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        stream = await world.subscribe()
        await world.publish(10)
        old = [(await stream.read()).msg_id for _ in range(10)]
        own = await world.consume("other")
        stream.cancel()
        tokens = await delivered(own, 10)
        own.cancel()
        await broker.topics.delete(NAME)
        await world.make_topic()
        stream = await world.subscribe()
        await world.publish(10)
        first = await stream.read()
        own = await world.consume("other")
        for one in old:
            assert await world.refuses(one)
        assert await answers(own, tokens) == ([], list(range(10)))
        assert world.dispatch.delivery.cursor == 0
        own.cancel()
        new = [first, *[await stream.read() for _ in range(9)]]
        assert sorted({one.msg_id.topic_offset for one in new}) == list(range(10))
        stream.cancel()


async def test_made_up_ids_are_refused_and_counted(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        stream = await world.subscribe()
        await world.publish(3)
        ids = [(await stream.read()).msg_id for _ in range(3)]
        assert ids[0].broker_addr.startswith("http://127.0.0.1:6650#")
        for one in (
            danube.MsgID(topic_name=NAME, topic_offset=0),
            danube.MsgID(topic_name=NAME, topic_offset=0, broker_addr="http://127.0.0.1:6650"),
            danube.MsgID(topic_name=NAME, topic_offset=1, broker_addr=ids[0].broker_addr),
            danube.MsgID(topic_name=NAME, topic_offset=2**64 - 1, broker_addr="#1.0" + "0" * 15),
        ):
            assert await world.refuses(one)
        await world.ack(ids[1])
        own = await world.consume("other")
        await world.publish(1)
        # Shared: one of the two gets it; whoever has it not has no receipt.
        made_up = [(0, 0), (2, 12345), (10**6, 1)]
        assert await answers(own, made_up) == ([], [0, 2, 10**6])
        assert await answers(own, [(0, None), (99, None)]) == ([], [0, 99])
        assert world.refused == 4 + 3 + 2
        await world.ack(ids[0])
        await world.ack(ids[2])
        assert world.dispatch.delivery.cursor == 3
        stream.cancel()
        own.cancel()


async def test_acks_that_come_together_are_answered_as_if_alone(tmp_path, monkeypatch):
    """Goal: one pump for all of a subscription, and each call has the outcome that it would have
    had alone."""

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        stream = await world.subscribe()
        await world.publish(100)
        ids = [(await stream.read()).msg_id for _ in range(100)]
        pumps = []
        pump = world.dispatch._pump
        monkeypatch.setattr(world.dispatch, "_pump", lambda: (pumps.append(1), pump()))
        service = ConsumerService(broker.topics, broker.guard, ConsumerSlots(1))

        def call(id, number, name="s"):
            return Call(danube.AckRequest(request_id=number, msg_id=id, subscription_name=name))

        elsewhere = danube.MsgID(topic_name="/default/other", topic_offset=0)
        made_up = danube.MsgID(topic_name=NAME, topic_offset=0)
        calls = [
            *[call(one, number) for number, one in enumerate(ids[:99])],
            call(ids[0], 2**64 - 1),
            call(made_up, 5),
            call(ids[99], 6, "another"),
            call(elsewhere, 7),
            Call(danube.AckRequest(subscription_name="s")),
            Call(b"\xff"),
        ]
        service.Ack_batch(calls)
        outcomes = [one.outcome for one in calls]
        assert outcomes[:99] == list(range(99))
        assert outcomes[99] == 2**64 - 1
        assert outcomes[102] == "deferred"
        for outcome, kind, text in zip(
            outcomes[100:102] + outcomes[103:],
            (InvalidRequestError, NotFoundError, InvalidRequestError, InvalidRequestError),
            ("no such message", "no subscription", "no msg_id", "cannot be decoded"),
            strict=True,
        ):
            assert isinstance(outcome, kind)
            assert text in str(outcome)
        assert pumps == [1]
        assert world.refused == 1
        assert world.dispatch.delivery.cursor == 99
        assert len(world.dispatch.prefetcher.kept) == 1
        service.Ack_batch([call(made_up, 1)])
        await world.dispatch.close(None)
        late = [call(ids[99], 1), call(ids[98], 2)]
        service.Ack_batch(late)
        assert all(isinstance(one.outcome, UnavailableError) for one in late)
        stream.cancel()


async def test_acks_that_come_together_are_each_judged_by_their_caller(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        stream = await world.subscribe()
        await world.publish(2)
        ids = [(await stream.read()).msg_id for _ in range(2)]
        callers = []

        class Judge:
            """Refuses everybody but one caller."""

            def check(self, principal, permission, *, topic):
                callers.append(current_caller())
                if current_caller() is not allowed:
                    raise PermissionDeniedError("no")

            def check_subscription(self, principal, subscription, *, topic):
                assert current_caller() is allowed

        allowed, spy = (
            Caller(broker.guard, ANONYMOUS, peer="", action="Ack", is_stream=False)
            for _ in range(2)
        )
        service = ConsumerService(broker.topics, Judge(), ConsumerSlots(1))
        calls = [
            Call(danube.AckRequest(request_id=9, msg_id=one, subscription_name="s"), caller)
            for one, caller in ((ids[0], spy), (ids[1], allowed), (ids[0], None))
        ]
        service.Ack_batch(calls)
        assert callers == [spy, allowed, None]
        assert [type(call.outcome) for call in calls] == [
            PermissionDeniedError,
            int,
            PermissionDeniedError,
        ]
        assert world.dispatch.delivery.cursor == 0
        stream.cancel()


async def test_acks_without_tokens_count_for_what_the_consumer_has(tmp_path):
    """Clients of an earlier version know nothing of tokens."""

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        await world.publish(2)
        own = await world.consume()
        await delivered(own, 2)
        assert await answers(own, [(0, None), (1, None)]) == ([0, 1], [])
        assert world.dispatch.delivery.cursor == 2
        own.cancel()


@each("mode", ["local_only", "wal_cloud"])
async def test_acks_of_what_was_delivered_before_a_restart_count(tmp_path, mode):
    async with a_broker(tmp_path, mode=mode) as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        await world.publish(4)
        own = await world.consume()
        tokens = await delivered(own, 4)
        own.cancel()
        await eventually(lambda: not world.dispatch.attached)
        stream = await world.subscribe("other")
        ids = [(await stream.read()).msg_id for _ in range(4)]
        stream.cancel()
    async with a_broker(tmp_path, mode=mode) as (broker, services, _):
        world = World(broker, services)
        # Nothing was delivered by this broker.
        await world.ack(ids[0])
        own = await world.consume()
        assert await answers(own, tokens[1:]) == ([1, 2, 3], [])
        assert world.dispatch.delivery.cursor == 4
        assert world.refused == 0
        own.cancel()


async def test_a_nack_counts_only_from_the_consumer_that_has_the_message(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        world = World(broker, services)
        await world.make_topic()
        first = await world.subscribe("first")
        await world.publish(1)
        old = (await first.read()).msg_id
        await world.dispatch.set_policy(FailurePolicy(max_redelivery_count=0, poison="drop"))
        first.cancel()
        await eventually(lambda: not world.dispatch.attached)
        second = await world.subscribe("second")
        current = (await second.read()).msg_id
        own = await world.consume("third")
        for made_up in (old, danube.MsgID(topic_name=NAME, topic_offset=0)):
            await world.nack(made_up)
        await own.write(ister_api.ConsumeRequest(nack=ister_api.Nack(offset=0)))
        await answers(own, [(5, None)])  # behind the nack
        assert world.dispatch.counters.nacks == 0
        assert world.dispatch.delivery.cursor == 0
        await world.nack(current)
        assert world.dispatch.counters.nacks == 1
        assert world.dispatch.delivery.cursor == 1
        second.cancel()
        own.cancel()


async def test_cursor_is_written_once_when_an_ack_and_the_timer_find_it_due():
    """Goal: a cursor costs the metadata store one write per interval, however acks arrive.

    Method: the timer is set; before it fires, two acknowledgements find the write due.
    """

    written = []
    delivery = SimpleNamespace(cursor=0, version=0, saved=dict)
    cursor = CursorWriter(
        SimpleNamespace(name=NAME, bucket=None),
        SimpleNamespace(name="s", incarnation="", cursor=0),
        delivery=delivery,
        store=SimpleNamespace(save_cursor=lambda *_, cursor, **__: written.append(cursor)),
        plan=ProgressPlan(0.01, 1000, cursor=0),
        on_fenced=lambda: None,
    )
    delivery.cursor = delivery.version = 1
    now = asyncio.get_running_loop().time()
    cursor.update(now)
    timer = cursor._timer
    cursor.update(now + 1)
    cursor.update(now + 1)
    await eventually(lambda: cursor._timer is not timer and not cursor._tasks)
    assert written == [1]
    delivery.cursor = delivery.version = 2
    cursor.update(asyncio.get_running_loop().time())
    await eventually(lambda: written == [1, 2])
    await asyncio.gather(*cursor.cancel())
