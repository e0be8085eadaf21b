"""Calls about a topic of another broker: sent on once, with the caller's own rights."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest

from ister import wire
from ister.base.clock import SystemClock
from ister.broker.cluster.members import Members
from ister.broker.cluster.peers import FORWARDED
from ister.broker.security.cluster_secret import read_secret
from ister.client import AsyncClient
from ister.client.core import receiver
from ister.errors import UnavailableError
from ister.wire import danube, danube_admin, ister_api
from tests.support.broker import a_record, eventually, several_brokers
from tests.support.broker_calls import Code, status
from tests.support.cases import each
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.memory_metadata import MemoryMetadata
from tests.support.security import allow, auth_settings, headers_of, sign

TOPIC = "/default/orders"
both_engines = each("engine", ["grpcio", "native"])


@asynccontextmanager
async def brokers(tmp_path, *names, settings=None, engine="grpcio"):
    own = (settings or {}).get("broker", {})
    tree = {**(settings or {}), "broker": {**own, "grpc": {"engine": engine}}}
    async with several_brokers(tmp_path, *names, settings=tree) as found:
        yield found


async def at(broker, topic=TOPIC, *, is_reliable=True):
    """Makes a broker have a topic."""
    await asyncio.to_thread(broker.cluster.assign, topic, broker.cluster.own.node, "test")
    return await broker.topics.get_or_create(topic, is_reliable=is_reliable)


@both_engines
async def test_any_broker_answers_for_a_topic(tmp_path, engine):
    async with brokers(tmp_path, "a", "b", engine=engine) as [(a, here, _), (_, there, _)]:
        topic = await at(a)
        for number in range(3):
            await topic.publish(a_record(b"%d" % number, topic=TOPIC))
        subscribed = danube.ConsumerRequest(
            topic_name=TOPIC, consumer_name="c", subscription="s", subscription_type=1
        )
        assert (
            await status(there.consumers.Subscribe(subscribed)) is Code.UNAVAILABLE
        )  # they follow
        await here.consumers.Subscribe(subscribed)
        name = ister_api.TopicName(topic=TOPIC)
        assert (await there.admin.DescribeTopic(name)).next == 3
        shown = json.loads((await there.admin.ShowTopic(name)).json)
        assert shown["watermarks"]["next"] == 3
        moved = await there.admin.Seek(
            ister_api.SeekRequest(topic=TOPIC, subscription="s", earliest=True)
        )
        assert moved.cursor == 0
        assert topic.subscriptions["s"].delivery.cursor == 0
        policies = await there.admin.SetTopicPolicies(
            ister_api.SetPoliciesRequest(name=TOPIC, policies='{"max_publish_rate": 7}')
        )
        assert json.loads(policies.policies)["max_publish_rate"] == 7
        assert topic.publish_rate.per_second == 7
        found = await there.topics.DescribeTopic(danube_admin.DescribeTopicRequest(name=TOPIC))
        assert found.broker_id == str(int(a.cluster.own.node, 16))
        request = danube_admin.SubscriptionRequest(topic=TOPIC, subscription="s")
        await there.topics.Unsubscribe(request)
        assert not topic.subscriptions
        # The other broker's status.
        assert await status(there.topics.Unsubscribe(request)) is Code.NOT_FOUND
        await there.topics.DeleteTopic(danube_admin.TopicRequest(name=TOPIC))
        assert TOPIC not in await a.topics.names.all()


@both_engines
async def test_call_that_was_sent_on_is_not_sent_on_again(tmp_path, engine):
    async with brokers(tmp_path, "a", "b", engine=engine) as [(a, _, _), (_, there, _)]:
        await at(a)
        forwarded = wire.Rpc("ister.Admin", "DescribeTopic")
        forwarded.path = f"/{FORWARDED}ister.Admin/DescribeTopic"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await forwarded.on(there.channel)(ister_api.TopicName(topic=TOPIC))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert a.cluster.own.broker_url in refused.value.details()


@both_engines
async def test_other_broker_judges_the_caller_itself(tmp_path, engine):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    started = brokers(tmp_path, "a", "b", settings=settings, engine=engine)
    async with started as [(a, _, _), (_, there, _)]:
        await at(a)
        await asyncio.to_thread(allow, a.guard.access, "ada", "consumer", topic=TOPIC)
        name = ister_api.TopicName(topic=TOPIC)

        def asked(who):
            return there.admin.DescribeTopic(name, metadata=headers_of(who))

        async def is_known():
            return await status(asked("ada")) is Code.OK

        await eventually(is_known)
        # Here they may, there they may not: the broker that has the topic decides.
        a.guard.access.allows = lambda *_, **__: False
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked("ada")
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "user:ada" in refused.value.details()


@both_engines
async def test_dead_letters_reach_a_topic_of_another_broker(tmp_path, engine):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    started = brokers(tmp_path, "a", "b", settings=settings, engine=engine)
    async with started as [(a, _, _), (b, there, _)]:
        letters = await at(a, "/default/letters")
        message = a_record(b"poison", topic="/default/letters", routing_key="k", schema_id=3)
        await b.topics._publish_dead_letter("/default/letters", message)
        assert letters.next_offset == 1
        found = next(iter(letters.topic.reader(0))).record
        assert (found.payload, found.routing_key) == (b"poison", "k")
        assert found.producer_name == message.producer_name
        # Requeueing is forwarded to the broker that has the letters, and publishes at the one
        # that has their source; a signature is good at every broker.
        source = await at(b)
        letter = a_record(b"again", attributes={"x-original-topic": TOPIC})
        await letters.publish(b.topics.signer.sign(letter, "/default/letters"))
        answer = await wire.stub(there.channel, "ister.DeadLetters").Requeue(
            ister_api.DeadLettersRequest(topic="/default/letters", start=1),
            metadata=headers_of("root"),
        )
        assert json.loads(answer.json)["done"] == 1
        assert next(iter(source.topic.reader(0))).payload == b"again"
        # Nobody else may: neither a caller with all rights nor one with a wrong secret.
        peers = wire.stub(there.channel, "ister.Peers")
        for header in (f"Bearer {sign('root')}", "Broker 00"):
            call = peers.PublishDeadLetter(
                ister_api.DeadLetter(topic=TOPIC), metadata=[("authorization", header)]
            )
            assert await status(call) in (Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)
        # And the secret is good for nothing else, whatever a super admin is called.
        secret = b.topics.peers._secret
        call = there.admin.DescribeTopic(
            ister_api.TopicName(topic=TOPIC), metadata=[("authorization", f"Broker {secret}")]
        )
        assert await status(call) is Code.PERMISSION_DENIED


async def test_partitions_are_created_and_deleted_wherever_they_are(tmp_path):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    started = brokers(tmp_path, "a", "b", settings=settings)
    async with started as [(a, _, _), (b, there, _)]:
        root = headers_of("root")
        names = [f"/default/many-part-{number}" for number in range(4)]
        for number, name in enumerate(names):
            node = (a, b)[number % 2].cluster.own.node
            await asyncio.to_thread(a.cluster.assign, name, node, "test")
        request = ister_api.CreateTopicRequest(topic="/default/many", partitions=4)
        made = await there.admin.CreateTopic(request, metadata=root)
        assert list(made.partitions) == names
        assert [topic.name for topic in a.topics.served] == names[2::-2]
        request = danube_admin.TopicRequest(name="/default/many")
        await there.topics.DeleteTopic(request, metadata=root)
        assert not a.topics.served
        assert not b.topics.served


@each("has_certificate", [False, True])
async def test_brokers_talk_by_tls(tmp_path, has_certificate):
    """Goal: calls go between brokers encrypted and verified; certificates are not passed on.

    A client that is known by its certificate alone is told to ask the other broker.
    """
    authority = Authority()
    issued = authority.issue("broker", names=LOCAL_NAMES)
    cert_file, key_file = issued.write(tmp_path, "broker")
    tls = {"cert_file": cert_file, "key_file": key_file, "ca_file": authority.write(tmp_path)}
    auth = auth_settings(tmp_path)
    if has_certificate:
        tls["client_auth"], auth["mtls_principal"] = "required", True
    settings = {"broker": {"tls": tls, "auth": auth}}

    def channel_to(listening):
        client = authority.issue("root", names=("root",)) if has_certificate else None
        credentials = grpc.ssl_channel_credentials(
            authority.certificate,
            client.key if client else None,
            client.certificate if client else None,
        )
        return grpc.aio.secure_channel(f"127.0.0.1:{listening.grpc}", credentials)

    async with brokers(tmp_path, "a", "b", settings=settings) as [(a, _, _), (b, _, there)]:
        letters = await at(a)
        async with channel_to(there) as channel:
            describe = wire.stub(channel, "ister.Admin").DescribeTopic
            name = ister_api.TopicName(topic=TOPIC)
            root = headers_of("root")
            assert (await describe(name, metadata=root)).topic == TOPIC
            if has_certificate:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await describe(name)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "look it up again" in refused.value.details()
        await b.topics._publish_dead_letter(TOPIC, a_record(topic=TOPIC))
        assert letters.next_offset == 1


def test_secret_is_one_for_all_brokers():
    store = MemoryMetadata(SystemClock())
    first = read_secret(store, root_prefix="/danube")
    assert len(bytes.fromhex(first)) == 32
    assert read_secret(store, root_prefix="/danube") == first
    assert read_secret(store, root_prefix="/other") != first


# -- a broker without its lease ---------------------------------------------------------------


def cut_off(broker, monkeypatch):
    """Ends a broker's lease: it cannot renew it, and the others see that it is gone."""
    membership = broker.cluster._stores.membership

    def fail():
        raise UnavailableError("the store does not answer")

    monkeypatch.setattr(membership, "renew", fail)
    membership.lease.revoke()


@asynccontextmanager
async def tiered_brokers(tmp_path, **auth):
    """Two brokers with short leases; the first has the topic, with `ack: tiered`."""
    storage = {
        "ack": "tiered",
        "cloud": {"root": str(tmp_path / "objects")},
        "metadata": {"path": str(tmp_path / "metadata.db"), "lease_ttl_seconds": 2},
        "uploader": {"engine": "embedded", "interval_seconds": 1},
    }
    tree = {"storage": storage, "broker": auth}
    async with several_brokers(tmp_path, "a", "b", settings=tree) as pair:
        await at(pair[0][0])
        await asyncio.to_thread(pair[0][0].cluster.brokers)
        yield pair


async def test_broker_without_its_lease_sends_clients_to_the_new_owner(tmp_path, monkeypatch):
    """With authentication: the brokers ask each other in their own names."""

    header = headers_of("root")
    request = danube.TopicLookupRequest(topic=TOPIC)
    async with tiered_brokers(tmp_path, auth=auth_settings(tmp_path)) as [
        (a, here, _),
        (b, there, _),
    ]:
        cut_off(a, monkeypatch)

        async def is_sent_on():
            found = await here.discovery.TopicLookup(request, metadata=header)
            return (found.response_type, found.connect_url) == (0, b.cluster.own.connect_url)

        await eventually(is_sent_on)
        listed = await here.discovery.TopicPartitions(request, metadata=header)
        assert listed.partitions == [TOPIC]
        await there.discovery.TopicLookup(request, metadata=header)
        assert b.topics.find_open(TOPIC)
        await eventually(lambda: not a.topics.served)
        assert await is_sent_on()
        name = ister_api.TopicName(topic=TOPIC)
        assert (await here.admin.DescribeTopic(name, metadata=header)).topic == TOPIC
        missing = danube.TopicLookupRequest(topic="/default/none")
        found = await here.discovery.TopicLookup(missing, metadata=header)
        assert found.connect_url == b.cluster.own.connect_url
        call = wire.stub(there.channel, "ister.Peers").FindOwners(
            ister_api.OwnTopicsRequest(topics=[TOPIC]), metadata=header
        )
        assert await status(call) is Code.PERMISSION_DENIED
        assert await a.topics.is_elsewhere(TOPIC)
        # It takes part again by itself.
        monkeypatch.undo()
        await eventually(lambda: a.cluster.is_leased)
        a.topics.stand_in.member = b.cluster.own  # as before the next check
        await at(a, "/default/own")
        assert not await a.topics.is_elsewhere("/default/own")
        await eventually(lambda: a.topics.stand_in.member is None)
        assert await is_sent_on()


async def test_clients_leave_a_broker_that_reaches_nobody(tmp_path, monkeypatch):
    """It cannot know who owns the topic; its clients reach the broker that does."""
    monkeypatch.setattr(receiver, "_SILENT_SECONDS", 0.2)

    async def fail(member, topics):
        raise UnavailableError("no route to host")

    async with tiered_brokers(tmp_path) as [(a, here, _), (b, _, _)]:
        addresses = [one.cluster.own.broker_url for one in (a, b)]
        async with AsyncClient(addresses) as client, client.producer(TOPIC) as producer:
            consumer = await client.consumer(TOPIC, "s")
            await producer.publish(b"0")
            assert (await consumer.receive(60)).payload == b"0"
            monkeypatch.setattr(a.topics.peers, "find_owners", fail)
            cut_off(a, monkeypatch)
            assert await producer.publish(b"1") == 1
            assert (await consumer.receive(60)).payload == b"1"
            call = here.discovery.TopicLookup(danube.TopicLookupRequest(topic=TOPIC))
            assert await status(call) is Code.UNAVAILABLE
            words = [one.words for one in a.health.checks() if one.name == "lease"]
            assert "no other broker responds" in words[0]
            await consumer.close()


async def test_clients_stay_while_no_broker_reaches_the_store(tmp_path, monkeypatch):
    """They would find nothing elsewhere, and Danube's clients give up after a few attempts."""

    async with tiered_brokers(tmp_path) as [(a, here, _), (b, _, _)]:
        topic = a.topics.find_open(TOPIC)
        # Cut off from the store, they do not see each other leave.
        known = {one.cluster.members: one.cluster.members.known_others for one in (a, b)}
        monkeypatch.setattr(Members, "known_others", property(known.__getitem__))
        for one in (b, a):
            cut_off(one, monkeypatch)
        for _ in range(3):
            await a.topics.check_lease()
        assert (a.topics.stand_in.member, a.topics.stand_in.is_isolated) == (None, False)
        assert a.topics.find_open(TOPIC) is topic
        found = await here.discovery.TopicLookup(danube.TopicLookupRequest(topic=TOPIC))
        assert found.response_type == 1
