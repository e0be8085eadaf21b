"""Two brokers with disks of their own that share a metadata store and a bucket.

A topic is at one of them at a time. The real client finds it wherever it is, and goes with it when
it moves: offsets go on, cursors and attempts too. Files that a killed broker left behind are waited
for: the other one serves what is in the bucket, and nobody answers for the rest.
"""

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("danube")

import grpc

import ister
from ister.base.clock import SystemClock
from ister.client import AsyncClient
from ister.errors import ConflictError
from ister.metadata.sqlite import SqliteMetadata
from ister.wire import danube, danube_admin, ister_api
from tests.servers.broker import BrokerProcess, broker_settings
from tests.support.danube import (
    connect,
    eventually,
    numbered,
    offsets,
    refused,
    run,
    texts,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
REDIRECT, CONNECT = 0, 1


def start_pair(stack, directory, *, lease_ttl_seconds, **broker):
    """Two brokers, running, with shared stores; `broker` are settings below `broker`."""
    settings = {
        "broker": broker,
        "storage": {
            "cloud": {"root": str(directory / "objects")},
            "metadata": {
                "path": str(directory / "metadata.db"),
                "lease_ttl_seconds": lease_ttl_seconds,
            },
        },
        "dispatch": {"progress_flush_interval_seconds": 1},
    }
    return [
        stack.enter_context(BrokerProcess(directory / name, settings=settings))
        for name in ("a", "b")
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with ExitStack() as stack:
        yield start_pair(stack, tmp_path_factory.mktemp("pair"), lease_ttl_seconds=30)


async def lookup(session, topic):
    """Kind of answer and address."""
    found = await session.discovery.TopicLookup(
        danube.TopicLookupRequest(request_id=3, topic=topic)
    )
    assert found.request_id == 3
    assert found.connect_url == found.broker_url
    return found.response_type, found.broker_url


async def send_until_taken(producer, payload):
    """As a program does that goes on when its client has given up."""
    while True:
        try:
            await producer.send(payload.encode())
        except grpc.aio.AioRpcError as error:
            assert error.code() is UNAVAILABLE, error
            await asyncio.sleep(0.1)
        else:
            return


async def place(session, topic, broker):
    """Makes a topic, and has it at a broker: which one it is made at is the leader's choice."""
    await session.create_topic(topic)
    nodes = await session.admin.ShowBrokers(ister_api.InfoRequest())
    [node] = [
        one["node"] for one in json.loads(nodes.json)["brokers"] if one["broker_url"] == broker.url
    ]
    await session.admin.MoveTopic(ister_api.MoveTopicRequest(topic=topic, to=node))


def stored_cursor(directory, topic, subscription):
    """The cursor that a broker's death leaves."""
    with closing(SqliteMetadata(str(directory / "metadata.db"), clock=SystemClock())) as store:
        found = store.get(f"/danube/subscriptions{topic}/{subscription}/progress")
    return None if found is None else json.loads(found.value)["offset"]


async def next_offset(session, topic):
    return (await session.admin.DescribeTopic(ister_api.TopicName(topic=topic))).next


# -- where a topic is -------------------------------------------------------------------------


async def test_a_look_up_sends_clients_to_the_owner_by_the_whole_name(pair, topic):
    a, b = pair
    async with connect(a) as at_a, connect(b) as at_b:
        await place(at_a, topic, a)
        await place(at_a, f"{topic}2", b)
        for session, name, answer in (
            (at_a, topic, (CONNECT, a.url)),
            (at_b, topic, (REDIRECT, a.url)),
            (at_b, f"{topic}2", (CONNECT, b.url)),
            (at_a, f"{topic}2", (REDIRECT, b.url)),
        ):
            assert await lookup(session, name) == answer
        # A name that is the beginning of both is none.
        for session in (at_a, at_b):
            assert await refused(lookup(session, topic[:-1])) is grpc.StatusCode.NOT_FOUND
            assert await session.partitions(topic) == [topic]


async def test_a_topic_that_the_other_one_has_just_made_is_found_at_once(pair, topic):
    """Danube's client takes no answer for none, and does not ask again."""

    async with connect(pair[0]) as at_a, connect(pair[1]) as at_b:
        for kind in ("plain", "loose", "parts"):
            name = f"{topic}-{kind}"
            # It has just looked, and there was none.
            assert await at_b.partitions(name) == []
            made = [name]
            if kind == "parts":
                made = [f"{name}-part-{number}" for number in range(3)]
                await at_a.producer(name, partitions=3)
            else:
                await at_a.create_topic(name, reliable=kind == "plain")
            assert await at_b.partitions(name) == made


async def test_a_topic_is_not_served_by_the_other_one(pair, topic):
    """Whoever comes to the wrong one is told to look it up again, whatever they want."""

    a, b = pair
    async with connect(a) as at_a, connect(b) as at_b:
        await place(at_b, topic, a)
        await at_a.send(topic, numbered(3))
        for call in (
            at_b.raw_producers.CreateProducer(
                danube.ProducerRequest(topic_name=topic, producer_name="p", dispatch_strategy=1)
            ),
            at_b.raw_consumers.Subscribe(
                danube.ConsumerRequest(topic_name=topic, consumer_name="c", subscription="s")
            ),
            at_b.raw_producers.SendMessage(
                danube.StreamMessage(
                    msg_id=danube.MsgID(producer_id=1, topic_name=topic), producer_name="p"
                )
            ),
            at_b.raw_consumers.Ack(
                danube.AckRequest(msg_id=danube.MsgID(topic_name=topic), subscription_name="s")
            ),
        ):
            assert await refused(call) is UNAVAILABLE
        assert await next_offset(at_a, topic) == 3
        # The real client, which looks first, works through either.
        await at_b.send(topic, numbered(2, 3))
        inbox = await at_b.consumer(topic, attached=False)
        await eventually(lambda: at_a.describe(topic))
        await at_a.seek(topic, earliest=True)
        assert texts(await inbox.take(5)) == numbered(5)


# -- moves ------------------------------------------------------------------------------------


@pytest.mark.nightly
async def test_a_moved_topic_continues_its_offsets(pair, topic):
    """10 sent, 5 acknowledged, unloaded, 8 more: 5 to 17 come from the other one, each once."""

    a, b = pair
    async with connect(a) as at_a, connect(b) as at_b:
        await place(at_a, topic, a)
        producer = await at_a.producer(topic)
        inbox = await at_a.consumer(topic)
        for payload in numbered(10):
            await producer.send(payload.encode())
        first = await inbox.take(10, ack=False)
        assert offsets(first) == list(range(10))
        await inbox.ack(*first[:5])
        await at_a.unload(topic)
        # The producer was made at the one and heals to the other, by itself.
        for payload in numbered(8, 10):
            await asyncio.wait_for(producer.send(payload.encode()), 60)
        assert await lookup(at_a, topic) == (REDIRECT, b.url)
        assert await lookup(at_b, topic) == (CONNECT, b.url)
        rest = await inbox.take(13)
        assert offsets(rest) == list(range(5, 18))
        assert texts(rest) == numbered(13, 5)
        await inbox.expect_silence()
        await at_b.wait_for_cursor(topic, 18)
        assert await next_offset(at_b, topic) == 18


@pytest.mark.nightly
async def test_a_moved_topic_delivers_the_unacknowledged_message_first(pair, topic):
    a, b = pair
    async with connect(b) as at_b, connect(a) as at_a:
        await place(at_a, topic, b)
        producer = await at_b.producer(topic)
        inbox = await at_b.consumer(topic)
        await at_b.set_window(topic, 4)
        for payload in numbered(10):
            await producer.send(payload.encode())
        await inbox.take(3)
        assert offsets([await inbox.one()]) == [3]
        # 4, 5, 6 are in the window, and with the client already.
        assert offsets(await inbox.take(3, ack=False)) == [4, 5, 6]
        await at_b.unload(topic)
        for payload in numbered(5, 10):
            await asyncio.wait_for(producer.send(payload.encode()), 60)
        rest = await inbox.take(12)
        assert offsets(rest) == [3, *range(4, 15)]
        assert texts(rest) == numbered(12, 3)
        await inbox.expect_silence()
        # The window has moved along.
        assert (await at_a.describe(topic)).max_unacked_messages == 4
        assert await lookup(at_b, topic) == (REDIRECT, a.url)


async def test_offsets_never_repeat_however_often_a_topic_moves(pair, topic):
    async with connect(pair[0]) as at_a, connect(pair[1]) as at_b:
        sessions = [at_a, at_b]
        await place(at_b, topic, pair[0])
        for turn in range(4):
            here, there = sessions[turn % 2], sessions[(turn + 1) % 2]
            await here.send(topic, numbered(5, 5 * turn), name=f"producer-{turn}")
            assert await next_offset(here, topic) == 5 * (turn + 1)
            await here.unload(topic)
            assert (await lookup(here, topic))[0] == REDIRECT
            assert (await lookup(there, topic))[0] == CONNECT
        inbox = await at_a.consumer(topic)
        await at_a.seek(topic, earliest=True)
        messages = await inbox.take(20)
        assert offsets(messages) == list(range(20))
        assert texts(messages) == numbered(20)


# -- going for good, and coming back ----------------------------------------------------------


def test_the_files_of_a_killed_broker_are_waited_for(tmp_path):
    """What it had acknowledged is on its disk alone: the other one serves what is in the bucket."""

    async def scenario(a, b):
        name, other = "/default/t", "/default/t2"
        async with connect(b) as at_b:
            await place(at_b, name, a)
            producer = await at_b.producer(name)
            inbox = await at_b.consumer(name, attached=False)
            for payload in numbered(10):
                await producer.send(payload.encode())
            messages = await inbox.take(10, ack=False)
            await inbox.ack(*messages[:4])
            await eventually(lambda: stored_cursor(tmp_path, name, "sub") == 4)
            a.kill()

            async def is_here():
                try:
                    return await lookup(at_b, name) == (CONNECT, b.url)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is UNAVAILABLE, error
                    return False

            await eventually(is_here)
            # Nothing of it is in the bucket yet: no history, and no sends.
            sent = await at_b.admin.DescribeTopic(ister_api.TopicName(topic=name))
            assert (sent.tiered, sent.next) == (0, 0)
            create = danube.ProducerRequest(
                topic_name=name, producer_name="p2", dispatch_strategy=1
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await at_b.raw_producers.CreateProducer(create)
            assert caught.value.code() is UNAVAILABLE
            assert "waits for the disk of node" in caught.value.details()
            # It is not gone, only out of reach; others are served.
            assert await at_b.partitions(name) == [name]
            await at_b.send(other, numbered(1))
            # A client of the other one that keeps trying gets through once it is back.
            sending = asyncio.create_task(send_until_taken(producer, "message 10"))
            await asyncio.to_thread(a.start)
            await asyncio.wait_for(sending, 60)
            assert await lookup(at_b, name) == (REDIRECT, a.url)
            async with connect(a) as at_a:
                assert await next_offset(at_a, name) == 11
                reader = await at_a.consumer(name, "reader", subscription="all")
                await at_a.seek(name, "all", earliest=True)
                assert texts(await reader.take(11)) == numbered(11)
                # Its own consumer goes on where it was.
                assert offsets(await inbox.take(7)) == list(range(4, 11))

    with ExitStack() as stack:
        run(scenario(*start_pair(stack, tmp_path, lease_ttl_seconds=4)))


@pytest.mark.nightly
def test_a_tail_is_given_up_after_a_while_if_the_settings_say_so(tmp_path):
    async def scenario(a, b):
        name = "/default/t"
        async with connect(b) as at_b:
            await place(at_b, name, a)
            await at_b.send(name, numbered(3))
            a.kill()
            producer = await at_b.producer(f"{name}2")
            await producer.send(b"others are served")

            async def is_taken():
                try:
                    await at_b.send(name, numbered(1), name="later")
                except grpc.aio.AioRpcError as error:
                    assert error.code() is UNAVAILABLE, error
                    return False
                return True

            await eventually(is_taken)
            assert await lookup(at_b, name) == (CONNECT, b.url)
            # Nothing was uploaded before the broker died.
            assert await next_offset(at_b, name) >= 1

    with ExitStack() as stack:
        pair = start_pair(
            stack,
            tmp_path,
            lease_ttl_seconds=2,
            cluster={"failover": {"give_up_tail_after_seconds": 1}},
        )
        run(scenario(*pair))


# -- brokers that were replaced ---------------------------------------------------------------


def test_idle_consumers_follow_a_topic_that_was_taken_over(tmp_path):
    """Their broker, which stood still meanwhile, sends them on, although it has no message."""

    async def scenario(a, b):
        name = "/default/t"
        async with connect(a) as at_a, AsyncClient(a.address) as client:
            await place(at_a, name, a)
            inbox = await at_a.consumer(name)
            own = await client.consumer(name, "own")
            a.pause()
            try:
                await asyncio.to_thread(b.stop)
                settings = broker_settings(b.directory, b.settings)
                await eventually(lambda: asyncio.to_thread(take_over, settings, name))
                await asyncio.to_thread(b.start)
            finally:
                a.resume()
            async with connect(b) as at_b:
                await at_b.send(name, numbered(3))
                assert texts(await inbox.take(3)) == numbered(3)
                await at_b.wait_for_cursor(name, 3)
                received = [await own.receive(timeout=60) for _ in range(3)]
                assert [one.payload.decode() for one in received] == numbered(3)

    with ExitStack() as stack:
        run(scenario(*start_pair(stack, tmp_path, lease_ttl_seconds=2)))


def take_over(settings, name):
    """Whether it could be done: the owner's lease has to end first."""
    with ister.open(settings) as log:
        try:
            log.topic(name, take_over=True)
        except ConflictError:
            return False
        return True


@pytest.mark.nightly
def test_clients_follow_a_copy_that_replaced_their_broker(tmp_path):
    """A snapshot is started at another address while its original stands still."""

    async def scenario(original, copy):
        name = "/default/t"
        async with connect(original) as session:
            producer = await session.producer(name)
            inbox = await session.consumer(name)
            original.pause()
            try:
                # The native engine has a socket there, which cannot be copied.
                shutil.copytree(original.data, copy.data, ignore=shutil.ignore_patterns("*.sock"))
                await asyncio.to_thread(copy.start)
            finally:
                original.resume()
            await eventually(lambda: "replaced" in health(original)["lease"]["words"])
            assert "goes on by itself" not in health(original)["lease"]["hint"]
            assert await lookup(session, name) == (REDIRECT, copy.url)
            listed = await session.brokers.ListBrokers(danube_admin.Empty())
            assert [one.broker_addr for one in listed.brokers] == [copy.url]
            for payload in numbered(2):
                await asyncio.wait_for(send_until_taken(producer, payload), 60)
            assert texts(await inbox.take(2)) == numbered(2)

    with ExitStack() as stack:
        original, copy = start_pair(stack, tmp_path, lease_ttl_seconds=2)
        copy.stop()
        shutil.rmtree(copy.data)
        run(scenario(original, copy))


def health(broker):
    """The checks of `/health`, by name."""
    try:
        with urllib.request.urlopen(f"http://{broker.http}/health", timeout=30) as answer:
            report = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            report = json.load(error)
    return {check["name"]: check for check in report["checks"]}
