"""Several brokers as real processes, with a three-node etcd and an S3 server: any of them may die.

Runs under load are `cluster_run`'s: programs of both clients, faults from a seed, and the judge of
the endurance runs. The other tests look at what a run cannot show: what happens to topics whose
messages are on a dead broker's disk alone, and to many topics at once.

All tests of this file share one cluster, and each begins with all of it running.
"""

import asyncio
import json
import time
from collections import Counter

import grpc
import pytest

from ister.client import AsyncClient
from ister.errors import UnavailableError, WaitTimeoutError
from ister.wire import danube
from tests.servers.cluster import BrokerCluster, Link
from tests.support.cluster_run import (
    BUSY_SECONDS,
    CLUSTER_SETTINGS,
    TOPICS,
    ClusterRun,
    Fault,
    faults_of,
)
from tests.support.danube import connect, numbered, run, texts
from tests.support.endurance_program import Options
from tests.support.scale import IS_NIGHTLY, scaled
from tests.support.waiting import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.writer_child import new_seed, say_replay

KILLS = scaled(2, 100)
KILL_TOPICS = scaled(2, 3)
RESTARTS = scaled(1, 5)
ROLLING = scaled(2, 12)
"""Topics under a rolling restart."""
MANY = 1000
ASSIGNED_SECONDS = 10.0
"""How long many topics may take until each has a broker, once all brokers are ready."""
TAKEN_SECONDS = 10.0
"""How long those of a dead broker may take beyond its lease."""
HISTORY, TAIL = 20, 10
"""Messages in the bucket, and those that are on the owner's disk alone."""
SILENCE_SECONDS = 0.5
CALLS_AT_ONCE = 16


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with BrokerCluster(tmp_path_factory.mktemp("cluster"), settings=CLUSTER_SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared):
    shared.restore()
    return shared


def report(test, summary):
    """Prints the figures, and fails if something was wrong."""
    print(json.dumps({"test": test, **summary}))
    assert summary["endurance"] == "ok", summary["failures"]


# -- runs under load --------------------------------------------------------------------------


@pytest.mark.timeout(3000)
def test_kills_of_brokers_lose_nothing_and_topics_go_on_elsewhere(cluster, tmp_path, request):
    """Goal: `ack: tiered` survives any broker, and its topics are away for a lease and 5 s at most.

    Method: brokers are killed at random, some come back at once, most when all topics are served.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    options = Options(addresses=cluster.addresses, topics=TOPICS[:KILL_TOPICS], ack="tiered")
    faults = faults_of(seed, kills=KILLS)
    summary = ClusterRun(cluster, tmp_path, seed, faults, options=options).run()
    report("cluster kills", summary)
    assert summary["kills"] == KILLS
    # A few kills may all come when nothing is under way.
    if IS_NIGHTLY:
        assert summary["received_again"] > 0, "kills with nothing under way prove nothing"
    moved = summary["served again after kills (s)"]["count"]
    assert moved >= max(KILLS // 6, 1), "hardly a topic had to be served by another broker"


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "counts",
    [{"pauses": 20}, {"etcd_kills": 10}, {"cuts": 10}],
    ids=lambda counts: next(iter(counts)),
)
def test_other_faults_lose_nothing_either(tmp_path, request, counts):
    """Goal: stopped brokers, etcd without its leader and cut connections lose nothing.

    Method: the same load and judge. A stopped broker and one that is cut off from etcd for longer
    than its lease are alive when others have their topics.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    with BrokerCluster(
        tmp_path / "cluster", settings=CLUSTER_SETTINGS, has_client_cables="cuts" in counts
    ) as cluster:
        faults = faults_of(seed, **counts)
        summary = ClusterRun(cluster, tmp_path / "run", seed, faults).run()
    report("cluster faults", summary)
    assert sum(summary.get(str(fault), 0) for fault in Fault) == len(faults)
    cuts = counts.get("cuts", 0)
    assert summary.get("cuts felt", 0) >= cuts, "most cuts have stopped nothing: they prove nothing"


@pytest.mark.timeout(900)
def test_rolling_restart_fails_no_send(cluster, tmp_path, request):
    """Goal: SIGTERM hands topics over: no send fails, nothing is lost, the pause is short.

    Method: each broker is stopped and started under producers that give up after some seconds.
    `synced`: what a broker does not hand over would wait for its disk.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    options = Options(
        addresses=cluster.addresses,
        topics=[f"/default/rolling-{number}" for number in range(ROLLING)],
        ack="synced",
        has_danube=False,
        has_seeks=False,
        timeout=PATIENCE_SECONDS / 2,
    )
    faults = [Fault.RESTART] * RESTARTS
    summary = ClusterRun(cluster, tmp_path, seed, faults, options=options).run()
    report("rolling restart", summary)
    assert summary["restarts"] == RESTARTS * len(cluster.brokers)


# -- topics whose messages are on one disk ----------------------------------------------------


async def fill(cluster, client, *topics):
    """`synced` topics with history in the bucket and a tail on their owner's disk; the owners.

    Subscription `before` has acknowledged half of the history.
    """
    for topic in topics:
        await client.admin.create_topic(topic, ack="synced")
        await publish(client, topic, numbered(HISTORY))
        await eventually_async(lambda t=topic: is_tiered(client, t), "not all in the bucket")
        consumer = await client.consumer(topic, "before", start="earliest")
        for _ in range(HISTORY // 2):
            consumer.ack(await consumer.receive(PATIENCE_SECONDS))
        await consumer.close()
        await eventually_async(
            lambda t=topic: cluster.stored_cursor(t, "before") == HISTORY // 2,
            "the cursor is not written",
            every=0.2,
        )
    owners = cluster.owners(topics)
    assert None not in owners.values(), owners
    for owner in set(owners.values()):
        # From now on nothing of it gets into the bucket.
        cluster.cut(owner, Link.BUCKET)
    for topic in topics:
        await publish(client, topic, numbered(TAIL, HISTORY))
    return list(owners.values())


async def publish(client, topic, payloads):
    async with client.producer(topic, name="filler", timeout=PATIENCE_SECONDS) as producer:
        for payload in payloads:
            await producer.publish(payload.encode())


async def is_tiered(client, topic):
    found = await client.admin.describe_topic(topic)
    return found.tiered == found.next


async def read_all(client, topic, subscription, count, *, start="earliest"):
    """What a consumer gets: so many messages, and then nothing."""
    async with client.consumer(topic, subscription, start=start, timeout=PATIENCE_SECONDS) as one:
        found = []
        for _ in range(count):
            message = await one.receive(PATIENCE_SECONDS)
            one.ack(message)
            found.append((message.offset, message.payload.decode()))
        try:
            late = await one.receive(SILENCE_SECONDS)
        except WaitTimeoutError:
            return found
        raise AssertionError(f"after {count} messages offset {late.offset} came, too")


async def refusal(cluster, number, topic):
    """What is said to a send, where a broker's look-up leads, once the owner's lease has ended."""
    said = []

    async def says():
        try:
            async with connect(cluster.brokers[number], own_connection=True) as session:
                await send_raw(cluster, session, topic)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            said.append(error.details())
            return error.details() if "disk" in error.details() else None
        raise AssertionError("a message was taken although the owner is dead")

    return await eventually_async(says, lambda: f"disk is in none of {said[-3:]}", every=0.1)


async def send_raw(cluster, session, topic):
    """Looks a topic up and sends a message there, each with one call."""
    found = await session.discovery.TopicLookup(danube.TopicLookupRequest(topic=topic))
    named = cluster.number_of(found.broker_url)
    if named not in cluster.alive():
        return await session.raw_producers.CreateProducer(_producer(topic))  # its lease holds
    async with connect(cluster.brokers[named], own_connection=True) as owner:
        made = await owner.raw_producers.CreateProducer(_producer(topic))
        name = danube.MsgID(producer_id=made.producer_id, topic_name=topic)
        message = danube.StreamMessage(msg_id=name, payload=b"refused", producer_name="refused")
        return await owner.raw_producers.SendMessage(message)


def _producer(topic):
    return danube.ProducerRequest(topic_name=topic, producer_name="refused", dispatch_strategy=1)


def names_of(broker):
    """What a sentence may call a broker: its addresses and the identity of its node."""
    node = (broker.data / "wal" / ".node").read_text().strip()
    return (broker.address, node, node[:8])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_history_of_a_dead_brokers_synced_topic_is_read_everywhere(cluster, tmp_path):
    """Goal: what is in the bucket is delivered by the others, sends are refused with the reason.

    Method: the owner dies with a tail that no bucket has. Later it comes back with its disk.
    """
    topic = "/default/waits"
    whole = list(enumerate(numbered(HISTORY + TAIL)))

    async def scenario():
        async with AsyncClient(cluster.addresses) as client:
            [owner] = await fill(cluster, client, topic)
            dead = cluster.brokers[owner]
            await asyncio.to_thread(dead.kill)
            for number in cluster.alive():
                says = await refusal(cluster, number, topic)
                assert any(name in says for name in names_of(dead)), says
                assert "wait" in says, says
                # By this broker alone: a client that knows of no other.
                async with AsyncClient(cluster.addresses[number]) as one:
                    found = await read_all(one, topic, f"new-{number}", HISTORY)
                    assert found == whole[:HISTORY]
                    listed = {row["topic"]: row for row in await one.admin.list_topics()}
                    assert listed[topic]["watermarks"]["tiered"] == HISTORY
                    with pytest.raises(UnavailableError, match="disk"):
                        async with one.producer(topic, timeout=2.0) as producer:
                            await producer.publish(b"refused")
            # A subscription that there was goes on, and its cursor moves.
            found = await read_all(client, topic, "before", HISTORY // 2)
            assert found == whole[HISTORY // 2 : HISTORY]

            await eventually_async(
                lambda: cluster.stored_cursor(topic, "before") == HISTORY,
                "the cursor has not moved",
                every=0.2,
            )
            # Danube's client, too.
            async with connect(cluster.brokers[cluster.alive()[0]], own_connection=True) as other:
                inbox = await other.consumer(topic, subscription="danube", attached=False)
                await client.admin.seek(topic, "danube", to="earliest")
                assert texts(await inbox.take(HISTORY)) == numbered(HISTORY)
            cluster.heal(owner, Link.BUCKET)
            await asyncio.to_thread(dead.start)
            async with client.producer(topic, name="after", timeout=PATIENCE_SECONDS) as producer:
                sent = await producer.send(b"message 30")
                assert await sent == HISTORY + TAIL
            found = await read_all(client, topic, "all", HISTORY + TAIL + 1)
            assert found == [*whole, (HISTORY + TAIL, "message 30")]
            found = await read_all(client, topic, "before", TAIL + 1)
            assert [offset for offset, _ in found] == list(range(HISTORY, HISTORY + TAIL + 1))

    run(scenario(), within=500)


# -- many topics ------------------------------------------------------------------------------


async def on_all(topics, work):
    """Does the work on each topic, some at a time."""
    gate = asyncio.Semaphore(CALLS_AT_ONCE)

    async def one(topic):
        async with gate:
            await work(topic)

    await asyncio.gather(*map(one, topics))


async def send_to(client, topic):
    async with client.producer(topic, timeout=PATIENCE_SECONDS) as producer:
        await producer.publish(b"still there")


def await_owners(cluster, topics, limit, what):
    """The broker of each topic, once each says so itself, and how long that took."""
    since = time.monotonic()
    found = {}

    def all_owned():
        missing = [topic for topic in topics if topic not in found]
        answers = cluster.owners(missing)
        found.update({topic: owner for topic, owner in answers.items() if owner is not None})
        return len(found) == len(topics)

    eventually(
        all_owned,
        lambda: f"{what}: {len(topics) - len(found)} of {len(topics)} topics have no broker",
        within=limit + BUSY_SECONDS,
    )
    return found, time.monotonic() - since


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_many_topics_have_a_broker_soon_after_a_start_and_after_a_kill(cluster):
    """Goal: topics are assigned in 10 s; those of a dead broker within its lease and 10 s.

    Method: new topics are spread over all brokers; all brokers are killed, and started again at
    once; then one is killed. A broker is believed only about itself, and each topic then
    acknowledges a message.
    """
    topics = [f"/default/many-{number}" for number in range(MANY)]
    figures = {"test": "many topics", "topics": MANY, "brokers": len(cluster.brokers)}

    async def create_all():
        async with AsyncClient(cluster.addresses) as client:
            await on_all(topics, lambda topic: client.admin.create_topic(topic, ack="tiered"))

    async def send_all(names):
        async with AsyncClient(cluster.addresses) as client:
            await on_all(names, lambda topic: send_to(client, topic))

    def timed(name, work):
        began = time.monotonic()
        run(work, within=600)
        figures[name] = round(time.monotonic() - began, 2)

    timed("created_seconds", create_all())
    timed("first_sent_seconds", send_all(topics))
    counts = Counter(cluster.owners(topics).values())
    figures["topics_per_broker"] = sorted(counts.values())
    for broker in cluster.brokers:
        broker.kill()
    began = time.monotonic()
    cluster.start_all()
    figures["ready_seconds"] = round(time.monotonic() - began, 2)
    owners, took = await_owners(cluster, topics, ASSIGNED_SECONDS, "after the start")
    figures["assigned_seconds"] = round(took, 2)
    [(victim, _)] = Counter(owners.values()).most_common(1)
    lost = [topic for topic, owner in owners.items() if owner == victim]
    cluster.brokers[victim].kill()
    limit = cluster.lease_seconds + TAKEN_SECONDS
    _, took = await_owners(cluster, lost, limit, "after the kill")
    figures |= {"taken": len(lost), "taken_seconds": round(took, 2), "limit": limit}
    timed("sent_seconds", send_all(lost))
    print(json.dumps(figures))
    assert set(counts) == set(range(len(cluster.brokers))), f"not one for each topic: {counts}"
    assert max(counts.values()) <= MANY / 2, f"one broker has most of them: {counts}"
