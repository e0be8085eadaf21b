"""The broker with many topics, many consumers and much coming and going.

Figures are of the broker's process, from `/proc`. They hold for the machine that the tests run on,
with room for a busy one.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("danube")

from tests.servers.broker import BrokerProcess
from tests.support.danube import (
    FAILOVER,
    collect,
    connect,
    run,
    texts,
)

MIB = 1024 * 1024
TOPICS = 1000
CONSUMERS = 200
RSS_MAX = 600 * MIB
IDLE_CPU_MAX = 0.05
# 40 calls a second, for which a gRPC server that does nothing takes 4 % of a core.
CHECKED_CPU_MAX = 0.10
IDLE_SECONDS = 10.0
LOOKS = 6
# At once, on a busy machine; pings that find out by themselves would take over 20 s.
PROMOTION_SECONDS = 10.0
HANG_SECONDS = 35.0

# A consumer in a process of its own that can be killed: says when it has a message, and keeps it.
CONSUMER = """
import asyncio, sys
from danube import DanubeClientBuilder, SubType

async def main(url, topic):
    client = await DanubeClientBuilder().service_url(url).build()
    consumer = (
        client.new_consumer().with_topic(topic).with_consumer_name("active")
        .with_subscription("sub").with_subscription_type(SubType.FAILOVER).build()
    )
    await consumer.subscribe()
    queue = await consumer.receive()
    print("ready", flush=True)
    message = await queue.get()
    print(message.payload.decode(), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.mark.nightly
def test_a_thousand_idle_topics_and_two_hundred_consumers_take_little(tmp_path):
    """Goal: what is idle costs next to nothing, and all of it works when it is needed.

    Method: every topic has had a message, and uploads run as by default. Every consumer is a client
    of its own, with its own connection. They are looked at as they are, and without the health
    checks that they send every five seconds. What others do on this machine at the same time makes
    it look worse, so the best of some looks counts.
    """
    names = [f"/default/idle-{number}" for number in range(TOPICS)]

    async def share_of_a_core(broker, limit):
        looks = []
        while not looks or (looks[-1] > limit and len(looks) < LOOKS):
            began, used = time.monotonic(), broker.cpu_seconds()
            await asyncio.sleep(IDLE_SECONDS)
            looks.append((broker.cpu_seconds() - used) / (time.monotonic() - began))
        return min(looks)

    async def scenario(broker, stack):
        session = await stack.enter_async_context(connect(broker))
        gate = asyncio.Semaphore(32)

        async def fill(name):
            async with gate:
                producer = await session.producer(name)
                await producer.send(b"first")
                await producer.close()

        await asyncio.gather(*map(fill, names))
        inboxes = []
        for number in range(CONSUMERS):
            client = await stack.enter_async_context(connect(broker, own_connection=True))
            inboxes.append(await client.consumer(names[number * 5], f"consumer-{number}"))
        checked = await share_of_a_core(broker, CHECKED_CPU_MAX)
        for inbox in inboxes:
            for part in inbox.consumer._consumers.values():
                part._health_task.cancel()
        idle = await share_of_a_core(broker, IDLE_CPU_MAX)
        rss = broker.rss_bytes()
        print(
            f"{TOPICS} topics, {CONSUMERS} consumers: {rss / MIB:.0f} MiB, "
            f"{idle:.1%} of a core, {checked:.1%} with their health checks"
        )
        # They are all there: one message each, to all of them.
        for number in range(CONSUMERS):
            await session.send(names[number * 5], ["wake up"], name="waker")
        taken = await collect(inboxes, CONSUMERS)
        assert all(texts(part) == ["wake up"] for part in taken)
        assert rss <= RSS_MAX
        assert idle <= IDLE_CPU_MAX
        assert checked <= CHECKED_CPU_MAX

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            await scenario(broker, stack)

    with BrokerProcess(tmp_path, settings={"storage": {"uploader": {"engine": "auto"}}}) as broker:
        run(main(), within=240)
        broker.stop()


async def test_failover_promotes_when_the_active_consumer_leaves(session, topic):
    producer = await session.producer(topic)
    active = await session.consumer(topic, "active", kind=FAILOVER)
    standby = await session.consumer(topic, "standby", kind=FAILOVER)
    await producer.send(b"one")
    await active.one()
    began = time.monotonic()
    await active.close()
    assert texts(await standby.take(1)) == ["one"]
    assert time.monotonic() - began < PROMOTION_SECONDS


@pytest.mark.parametrize(
    ("how", "within"),
    [
        (signal.SIGKILL, PROMOTION_SECONDS),
        # Its connection stays, and answers nothing: pings find that out.
        pytest.param(signal.SIGSTOP, HANG_SECONDS, marks=pytest.mark.nightly),
    ],
    ids=["killed", "hanging"],
)
async def test_failover_promotes_when_the_process_of_the_active_consumer_is(
    session, broker, topic, how, within
):
    producer = await session.producer(topic)
    process = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, broker.url, topic],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        await session.wait_attached(topic, "active")
        standby = await session.consumer(topic, "standby", kind=FAILOVER)
        await producer.send(b"one")
        assert await asyncio.to_thread(process.stdout.readline) == "one\n"
        began = time.monotonic()
        process.send_signal(how)
        assert texts(await standby.take(1, within=2 * within)) == ["one"]
        assert time.monotonic() - began < within
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.nightly
async def test_one_connection_carries_hundreds_of_consumers(session, topic):
    """Danube's client has one connection for everything; its streams must not use it up."""
    count = 300

    producer = await session.producer(topic)
    inboxes = await asyncio.gather(
        *(
            session.consumer(topic, f"c{number}", subscription=f"s{number}")
            for number in range(count)
        )
    )
    async with asyncio.timeout(60):
        await producer.send(b"one")
    taken = await collect(inboxes, count)
    assert all(texts(part) == ["one"] for part in taken)
