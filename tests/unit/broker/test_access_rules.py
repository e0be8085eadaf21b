"""What callers may not learn, may not use, and may not have too much of."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import grpc
import pytest

from ister.base.metrics import Metrics
from ister.broker.security.principal_limits import PrincipalLimit
from ister.broker.security.rights import Permission, Role
from ister.broker.topics import topics as topics_module
from ister.client import Client
from ister.errors import AlreadyExistsError, CapacityError, PermissionDeniedError
from ister.wire import danube, danube_admin, ister_api
from tests.support.broker import a_broker, a_record, eventually
from tests.support.cases import each
from tests.support.security import allow, auth_settings, headers_of, sign

TOPIC = "/shop/orders"
both_engines = each("engine", ["grpcio", "native"])


@asynccontextmanager
async def guarded(tmp_path, limits=None, engine="grpcio", **rights):
    """A broker with auth, a topic with a subscription, and callers with roles on it."""
    settings = {
        "broker": {
            "auth": auth_settings(tmp_path),
            "limits": limits or {},
            "grpc": {"engine": engine},
        }
    }
    async with a_broker(tmp_path, settings) as (broker, services, listening):
        if "shop" not in await broker.topics.names.namespaces():
            await broker.topics.names.create_namespace("shop")
        topic = await broker.topics.get_or_create(TOPIC, is_reliable=True)
        if not topic.next_offset:
            await topic.publish(a_record())
        for name, roles in rights.items():
            for role in roles.split():
                place = {"namespace": "shop"} if role == "admin" else {"topic": TOPIC}
                await asyncio.to_thread(allow, broker.guard.access, name, role, **place)
        yield broker, services, listening


async def outcome(call):
    """The status and text that a call ends with; OK if it does not fail."""
    try:
        if hasattr(call, "read"):
            await call.read()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()
    return "OK", ""


# -- what they may not learn --------------------------------------------------------------------


@both_engines
async def test_whoever_may_know_of_a_namespace_is_told_that_there_is_none(tmp_path, engine):
    async with guarded(tmp_path, engine=engine, ada="consumer") as (_broker, services, _):
        listing = services.namespaces.GetNamespaceTopics
        shop, nowhere = (danube_admin.NamespaceRequest(name=name) for name in ("shop", "nowhere"))
        assert list((await listing(shop, metadata=headers_of("ada"))).topics) == [TOPIC]
        assert list((await listing(shop, metadata=headers_of("root"))).topics) == [TOPIC]
        assert (await outcome(listing(nowhere, metadata=headers_of("root"))))[0] == "NOT_FOUND"
        assert (await outcome(listing(nowhere, metadata=headers_of("ada"))))[0] == "OK"


# -- what they may not use ----------------------------------------------------------------------


RIGHTS = {"boss": "admin", "billing": "consumer", "spy": "consumer manager"}


async def with_manager_role(broker):
    role = Role(name="manager", permissions=frozenset({Permission.MANAGE_TOPIC}))
    await asyncio.to_thread(broker.guard.access.create_role, role)


def subscribing(services, who, name="billing"):
    return services.consumers.Subscribe(
        danube.ConsumerRequest(
            topic_name=TOPIC, consumer_name=who, subscription=name, subscription_type=1
        ),
        metadata=headers_of(who),
    )


def restricting(services, who, *principals, lift=False):
    return services.admin.RestrictSubscription(
        ister_api.RestrictSubscriptionRequest(
            topic=TOPIC, subscription="billing", principals=principals, unrestricted=lift
        ),
        metadata=headers_of(who),
    )


def uses(services, listening, who, consumer):
    """Every way to use the subscription `billing`, by name."""
    subscription = {"topic": TOPIC, "subscription": "billing"}
    ack = danube.MsgID(topic_name=TOPIC, topic_offset=0)
    who = headers_of(who)
    opened = ister_api.ConsumeRequest(
        open=ister_api.OpenConsumer(kind="shared", consumer="mine", **subscription)
    )
    admin = danube_admin
    return {
        "subscribe": lambda: services.consumers.Subscribe(
            danube.ConsumerRequest(
                topic_name=TOPIC, consumer_name="x", subscription="billing", subscription_type=1
            ),
            metadata=who,
        ),
        "receive": lambda: services.consumers.ReceiveMessages(
            danube.ReceiveRequest(consumer_id=consumer), metadata=who
        ),
        "ack": lambda: services.consumers.Ack(
            danube.AckRequest(msg_id=ack, subscription_name="billing"), metadata=who
        ),
        "nack": lambda: services.consumers.Nack(
            danube.NackRequest(msg_id=ack, subscription_name="billing"), metadata=who
        ),
        "consume": lambda: services.delivery.Consume(iter([opened]), metadata=who),
        "seek": lambda: services.admin.Seek(
            ister_api.SeekRequest(earliest=True, **subscription), metadata=who
        ),
        "policy": lambda: services.topics.SetSubscriptionFailurePolicy(
            admin.SetSubscriptionFailurePolicyRequest(**subscription), metadata=who
        ),
        "window": lambda: services.topics.SetSubscriptionDispatchConfig(
            admin.SetSubscriptionDispatchConfigRequest(**subscription), metadata=who
        ),
        "unsubscribe": lambda: services.topics.Unsubscribe(
            admin.SubscriptionRequest(**subscription), metadata=who
        ),
    }


@asynccontextmanager
async def restricted(tmp_path, engine="grpcio"):
    async with guarded(tmp_path) as (broker, services, listening):
        await with_manager_role(broker)
    async with guarded(tmp_path, engine=engine, **RIGHTS) as (broker, services, listening):
        consumer = (await subscribing(services, "billing")).consumer_id
        await restricting(services, "boss", "user:billing")
        yield broker, services, listening, consumer


async def test_a_restricted_subscription_is_used_by_its_principals_alone(tmp_path):
    """Goal: whoever may consume and manage the topic may not touch the subscription."""

    async with restricted(tmp_path) as (broker, services, listening, consumer):
        for name, use in uses(services, listening, "spy", consumer).items():
            status, text = await outcome(use())
            assert status == "PERMISSION_DENIED", (name, status, text)
            assert "may not use subscription billing" in text, name
        headers = {"Authorization": f"Bearer {sign('spy')}", "X-Ister-Action": "yes"}
        base = f"http://127.0.0.1:{listening.http}"
        async with aiohttp.ClientSession(base, headers=headers) as session:
            path = "/api/topics/shop/orders/subscriptions/billing/seek"
            async with session.post(path, json={"to": "earliest"}) as answer:
                assert answer.status == 403
        assert "billing" in broker.topics.find_open(TOPIC).subscriptions
        await broker.topics.find_open(TOPIC).publish(a_record())
        mine = uses(services, listening, "billing", consumer)
        for name in ("subscribe", "receive", "ack"):
            call = mine[name]()
            assert (await outcome(call))[0] != "PERMISSION_DENIED", name
            if hasattr(call, "cancel"):
                call.cancel()
        # Other subscriptions are everybody's, and a restriction is not the topic managers'.
        assert (await outcome(subscribing(services, "spy", "other")))[0] == "OK"
        assert (await outcome(restricting(services, "spy", lift=True)))[0] == ("PERMISSION_DENIED")
        wrong = await outcome(restricting(services, "boss", "robot:x"))
        assert wrong[0] == "INVALID_ARGUMENT"
        await restricting(services, "boss", lift=True)
        assert (await outcome(subscribing(services, "spy")))[0] == "OK"


async def test_a_restriction_outlasts_a_restart_and_can_be_seen(tmp_path):
    async with restricted(tmp_path):
        pass
    async with guarded(tmp_path) as (broker, services, listening):
        found = broker.topics.find_open(TOPIC).subscriptions["billing"]
        assert (found.principals, found.stored.created_by) == (("user:billing",), "user:billing")
        assert (await outcome(subscribing(services, "spy")))[0] == "PERMISSION_DENIED"

        def described():
            with Client(f"127.0.0.1:{listening.grpc}", token=sign("boss")) as client:
                shown = client.admin.show_topic(TOPIC)["subscriptions"]
                client.admin.restrict_subscription(TOPIC, "billing", ["service:shop", "ada"])
                return shown, client.admin.describe_subscription(TOPIC, "billing")

        shown, one = await asyncio.to_thread(described)
        assert shown[0]["principals"] == ["user:billing"]
        assert one.principals == ("service:shop", "user:ada")


@pytest.mark.nightly
@both_engines
async def test_a_restriction_ends_the_streams_of_others(tmp_path, engine):
    async with restricted(tmp_path, engine) as (broker, services, _listening, consumer):
        await broker.topics.find_open(TOPIC).publish(a_record())
        stream = services.consumers.ReceiveMessages(
            danube.ReceiveRequest(consumer_id=consumer), metadata=headers_of("billing")
        )
        await stream.read()
        await restricting(services, "boss", "user:else")
        async with asyncio.timeout(60):
            status, text = await outcome(stream)
        assert (status, "may not use" in text) == ("PERMISSION_DENIED", True)


# -- what they may not have too much of ---------------------------------------------------------


def test_a_limit_counts_by_principal():
    metrics = Metrics()
    limit = PrincipalLimit("things", 2, metrics, setting="a.setting")
    with limit.taken("a"), limit.taken("a"):
        with pytest.raises(CapacityError, match="a already has 2 things"):
            limit.check("a")
        limit.check("b")
        limit.check("")
    assert limit.of("a") == 0
    limit.check("a")
    assert metrics.snapshot()["broker.principal_limit_refusals_total"] == 1


async def test_a_principal_has_so_many_subscriptions(tmp_path):
    limits = {"max_subscriptions_per_principal": 2}

    async with guarded(tmp_path, limits, ada="consumer", bob="consumer") as (_, services, _):
        for name in ("one", "two"):
            assert (await outcome(subscribing(services, "ada", name)))[0] == "OK"
        status, text = await outcome(subscribing(services, "ada", "three"))
        assert status == "PERMISSION_DENIED"
        assert "broker.limits.max_subscriptions_per_principal" in text
        # Those that exist, and those of others, are none of it.
        assert (await outcome(subscribing(services, "ada", "two")))[0] == "OK"
        assert (await outcome(subscribing(services, "bob", "three")))[0] == "OK"
    # They count after a restart, and no longer once they are removed.
    async with guarded(tmp_path, limits) as (_, services, _):
        assert (await outcome(subscribing(services, "ada", "four")))[0] == "PERMISSION_DENIED"
        await services.topics.Unsubscribe(
            danube_admin.SubscriptionRequest(topic=TOPIC, subscription="one"),
            metadata=headers_of("root"),
        )
        assert (await outcome(subscribing(services, "ada", "four")))[0] == "OK"


async def test_anonymous_callers_are_one_principal_for_subscriptions_alone(tmp_path):
    limits = {
        "max_subscriptions_per_principal": 2,
        "max_consumers_per_principal": 1,
        "max_streams_per_principal": 1,
    }
    async with a_broker(tmp_path, {"broker": {"limits": limits}}) as (broker, services, _):
        await broker.topics.names.create_namespace("shop")
        topic = await broker.topics.get_or_create(TOPIC, is_reliable=True)
        await topic.publish(a_record())
        streams = []
        for name in ("one", "two"):
            found = await services.consumers.Subscribe(
                danube.ConsumerRequest(topic_name=TOPIC, consumer_name="c", subscription=name)
            )
            request = danube.ReceiveRequest(consumer_id=found.consumer_id)
            streams.append(services.consumers.ReceiveMessages(request))
        third = danube.ConsumerRequest(topic_name=TOPIC, consumer_name="c", subscription="three")
        status, _ = await outcome(services.consumers.Subscribe(third))
        assert status == "PERMISSION_DENIED"
        await eventually(
            lambda: sum(len(one.attached) for one in topic.subscriptions.values()) == 2
        )
        for stream in streams:
            stream.cancel()


async def test_ids_tell_nothing_to_those_without_rights(tmp_path):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    async with a_broker(tmp_path, settings, mode="memory") as (_, services, _):
        root, nobody = headers_of("root"), headers_of("nobody")
        created = await services.producers.CreateProducer(
            danube.ProducerRequest(topic_name="/default/t", producer_name="p", dispatch_strategy=1),
            metadata=root,
        )
        subscribed = await services.consumers.Subscribe(
            danube.ConsumerRequest(topic_name="/default/t", consumer_name="c", subscription="s"),
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
        known, unknown = [
            await outcome(
                services.consumers.ReceiveMessages(
                    danube.ReceiveRequest(consumer_id=subscribed.consumer_id + more),
                    metadata=nobody,
                )
            )
            for more in (0, 1)
        ]
        assert known == unknown


async def test_partitions_are_added_by_those_who_may_grow_the_topic(tmp_path, monkeypatch):
    """Goal: one partition more, and most keys go to another one; `produce` is not enough."""
    parts = "/shop/parts"

    async with guarded(tmp_path) as (broker, services, listening):
        await broker.topics.create_partitioned(parts, 3, is_reliable=True)
        for name, role, topic in (
            ("alice", "producer", parts),
            ("bob", "producer", "/shop/new"),
            ("bob", "admin", f"{parts}-part-8"),
            ("ada", "admin", parts),
        ):
            await asyncio.to_thread(allow, broker.guard.access, name, role, topic=topic)

        def produce(name, topic, number):
            return services.producers.CreateProducer(
                danube.ProducerRequest(
                    topic_name=f"{topic}-part-{number}", producer_name=name, dispatch_strategy=1
                ),
                metadata=headers_of(name),
            )

        def put(name, number):
            with (
                Client(f"127.0.0.1:{listening.grpc}", token=sign(name)) as client,
                client.producer(f"{parts}-part-{number}", create=True) as producer,
            ):
                producer.send(b"x")

        for number in (3, 8):
            assert (await outcome(produce("alice", parts, number)))[0] == "PERMISSION_DENIED"
            with pytest.raises(PermissionDeniedError):
                await asyncio.to_thread(put, "alice", number)
        new = danube_admin.NewTopicRequest(name=f"{parts}-part-8", dispatch_strategy=1)
        other = ister_api.CreateTopicRequest(topic=f"{parts}-part-8")
        for create, request, who, status in (
            (services.topics.CreateTopic, new, "bob", "PERMISSION_DENIED"),
            (services.admin.CreateTopic, other, "bob", "PERMISSION_DENIED"),
            (services.admin.CreateTopic, other, "ada", "ALREADY_EXISTS"),
        ):
            assert (await outcome(create(request, metadata=headers_of(who))))[0] == status
        with pytest.raises(AlreadyExistsError, match="3 partitions"):
            await broker.topics.get_or_create(f"{parts}-part-3", is_reliable=True, is_implied=False)
        assert len(await broker.topics.names.partitions(parts)) == 3
        await asyncio.to_thread(put, "ada", 3)
        assert (await outcome(produce("ada", parts, 4)))[0] == "OK"
        far = await outcome(produce("bob", "/shop/new", 1024))
        assert far[0] == "INVALID_ARGUMENT", "with a number as high as that, it had holes for ever"
        # Danube's clients create a topic by using its partitions, in any order.
        for number in (1, 0, 2):
            assert (await outcome(produce("bob", "/shop/new", number)))[0] == "OK"
        monkeypatch.setattr(topics_module, "_PARTITIONS_SECONDS", 0)
        assert (await outcome(produce("bob", "/shop/new", 3)))[0] == "PERMISSION_DENIED"
        assert len(await broker.topics.names.partitions("/shop/new")) == 3
