"""The broker with many topics, many consumers and much coming and going.

Figures are of the broker's process, from `/proc`. They hold for the machine that the tests run on,
with room for a busy one.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict

import pytest

pytest.importorskip("danube")

from tests.servers.broker import BrokerProcess
from tests.support.danube import (
    FAILOVER,
    KEY_SHARED,
    SHARED,
    collect,
    connect,
    eventually,
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

KEYS = 50
WORKERS = 5
MESSAGES_PER_KEY = 24
# Three times as many as there usually are until everything was published.
CHANGES_MAX = 150

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


class Keys:
    """What workers did with the messages of each key, and what they may be given next.

    Messages of a key are numbered from 0. A number may come when all before it are done, and not
    once it is surely done: its acknowledgement was answered.
    """

    def __init__(self):
        self.done = defaultdict(int)
        self.acknowledged = defaultdict(int)
        self.first_seen = defaultdict(list)
        self.deliveries = Counter()

    def delivered(self, worker, key, number):
        assert number <= self.done[key], (
            f"{worker} got {number} of {key} while {self.done[key]} is not done"
        )
        assert number >= self.acknowledged[key], (
            f"{worker} got {number} of {key} though it was acknowledged"
        )
        if number not in self.first_seen[key]:
            self.first_seen[key].append(number)
        self.deliveries[worker] += 1


@pytest.mark.nightly
def test_keys_keep_their_order_while_consumers_come_and_go(broker, topic):
    """Goal: 50 keys, 5 consumers that leave and join at random, and every key in order.

    Method: workers take their time at random, and are cut off wherever they are. What a cut-off
    worker had may come again; nothing may come too early, and nothing that is surely done.
    """
    seed = int(os.environ.get("ISTER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"replay: ISTER_SEED={seed} pytest tests/integration/test_broker_scale.py -k keys_keep")
    dice = random.Random(seed)
    keys = Keys()

    async def work(name, inbox):
        pace = random.Random(dice.random())
        while True:
            message = await inbox.queue.get()
            key, number = message.routing_key, int(message.payload)
            keys.delivered(name, key, number)
            await asyncio.sleep(pace.random() * 0.01)
            keys.done[key] = max(keys.done[key], number + 1)
            await inbox.ack(message)
            keys.acknowledged[key] = max(keys.acknowledged[key], number + 1)

    async def publish(session):
        producer = await session.producer(topic)
        order = [f"key-{n}" for n in range(KEYS)] * MESSAGES_PER_KEY
        dice.shuffle(order)
        numbers = Counter()
        for key in order:
            await producer.send_with_key(str(numbers[key]).encode(), None, key)
            numbers[key] += 1
            # So that it takes some seconds, on whatever machine.
            await asyncio.sleep(0.002)

    async def scenario():
        async with connect(broker) as session:
            await session.create_topic(topic)
            workers = {}

            async def join(number):
                name = f"worker-{number}"
                inbox = await session.consumer(topic, name, kind=KEY_SHARED)
                workers[number] = inbox, asyncio.create_task(work(name, inbox))

            async def leave(number):
                inbox, task = workers.pop(number)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await inbox.close()

            await join(0)
            publishing = asyncio.create_task(publish(session))
            for number in range(1, WORKERS):
                await join(number)

            def is_done():
                for _, task in workers.values():
                    if task.done():
                        task.result()
                if publishing.done():
                    publishing.result()
                # Not by the acknowledgements that were answered: one of a worker that was cut off
                # meanwhile counts for the broker, and nothing comes again.
                return publishing.done() and not missing()

            def missing():
                names = (f"key-{n}" for n in range(KEYS))
                return {k: keys.done[k] for k in names if keys.done[k] != MESSAGES_PER_KEY}

            changes = 0
            while not is_done() and changes < CHANGES_MAX:
                await asyncio.sleep(dice.random() * 0.12)
                number = dice.randrange(WORKERS)
                if number not in workers:
                    await join(number)
                elif len(workers) > 1:
                    await leave(number)
                changes += 1
            # From here on nobody comes or goes, so on whatever machine the end is near.
            deadline = time.monotonic() + 60
            while not is_done():
                assert time.monotonic() < deadline, f"not all came: {missing()}"
                await asyncio.sleep(0.05)
            # Those who are still there have to get what others did not acknowledge.
            await session.wait_for_cursor(topic, KEYS * MESSAGES_PER_KEY)
            for number in list(workers):
                await leave(number)
            for n in range(KEYS):
                assert keys.first_seen[f"key-{n}"] == list(range(MESSAGES_PER_KEY))
            print(
                f"{changes} changes, {sum(keys.deliveries.values())} deliveries: {keys.deliveries}"
            )
            assert changes >= 8
            assert len(keys.deliveries) > 2

    run(scenario(), within=300)


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


@pytest.mark.nightly
def test_a_burst_through_many_consumers_of_a_queue_is_delivered_once(broker, topic):
    """200 consumers on one queue: each message to one of them, and to none twice."""

    async def scenario():
        async with connect(broker) as session:
            producer = await session.producer(topic)
            inboxes = await asyncio.gather(
                *(session.consumer(topic, f"c{number}", kind=SHARED) for number in range(CONSUMERS))
            )
            await eventually(lambda: all_attached(session, topic))
            payloads = [str(number) for number in range(1000)]
            for start in range(0, 1000, 100):
                batch = payloads[start : start + 100]
                await asyncio.gather(*(producer.send(text.encode()) for text in batch))
            taken = await collect(inboxes, 1000)
            assert Counter(text for part in taken for text in texts(part)) == Counter(payloads)

    async def all_attached(session, topic):
        return len((await session.describe(topic)).consumers) == CONSUMERS

    run(scenario())
