"""One of two brokers loses etcd, and nothing else: its clients have to leave it.

Real brokers, a real etcd and both clients, which go on all the time. The broker that is cut off
still answers, so nothing but its own words tells clients to look elsewhere.
"""

import asyncio
import contextlib
import itertools
import json
import time
import urllib.error
import urllib.request
from collections import Counter

import grpc
import pytest

from ister.bucket.directory import read_owners
from ister.client import AsyncClient, Client
from ister.errors import IsterError
from tests.servers.cluster import BrokerCluster, Link
from tests.servers.etcd import Cable
from tests.support.danube import connect, run
from tests.support.scale import nightly, scaled
from tests.support.waiting import eventually, eventually_async

TOPIC = "/default/orders"
AWAY, STAND_IN = 0, 1
LEASE_SECONDS = 5
SERVED_SECONDS = scaled(20.0, 5.0)
"""How long clients may be without a broker beyond the lease; by night, what is promised."""
PAUSE_SECONDS = 0.05
ENOUGH = 5


class Program:
    """A program that sends and receives all the time, and writes down when."""

    def __init__(self, name):
        self.name = name
        self.acked = []
        self.received = []
        self.failures = 0

    @property
    def series(self):
        return {
            f"{self.name} sends": [at for at, _ in self.acked],
            f"{self.name} receives": [at for at, _ in self.received],
        }

    async def send_all(self, send):
        for number in itertools.count():
            text = f"{self.name} {number}"
            await send(text.encode())
            self.acked.append((time.monotonic(), text))
            await asyncio.sleep(PAUSE_SECONDS)

    async def receive_all(self, receive):
        while True:
            payload = await receive()
            self.received.append((time.monotonic(), payload.decode()))

    def danube_send(self, producer):
        async def send(payload):
            while True:
                try:
                    return await producer.send(payload)
                except grpc.aio.AioRpcError as error:
                    # As a program does that goes on when its client has given up.
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                    self.failures += 1

        return send


def danube_receive(inbox):
    async def receive():
        message = await inbox.queue.get()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await inbox.ack(message)
        return message.payload

    return receive


def ister_receive(consumer):
    async def receive():
        message = await consumer.receive()
        consumer.ack(message)
        return message.payload

    return receive


def returned_after(times, since):
    """Seconds from `since` to the end of the longest pause."""
    after = [since, *(at for at in times if at > since)]
    return max((later - earlier, later - since) for earlier, later in itertools.pairwise(after))[1]


def health(broker):
    """The checks of `/health`, by name."""
    try:
        with urllib.request.urlopen(f"http://{broker.http}/health", timeout=30) as answer:
            report = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            report = json.load(error)
    return {check["name"]: check for check in report["checks"]}


class Scenario:
    """The cluster, the programs of both clients, and rounds of cuts."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.programs = [Program("ister"), Program("danube")]
        self.figures = {}
        self.away = ""
        """The node of the broker that is cut off."""

    async def run(self, cuts):
        cluster = self.cluster
        async with contextlib.AsyncExitStack() as stack:
            self.history = stack.enter_context(cluster.open_bucket())
            client = await stack.enter_async_context(AsyncClient(cluster.addresses))
            danube = await stack.enter_async_context(connect(cluster.brokers[AWAY]))
            await client.admin.create_topic(TOPIC)
            await self.bring_back(client)
            ours, theirs = self.programs
            producer = await stack.enter_async_context(client.producer(TOPIC))
            consumer = await client.consumer(TOPIC, "ister", start="earliest")
            stack.push_async_callback(consumer.close)
            inbox = await danube.consumer(TOPIC, subscription="danube")
            tasks = [
                asyncio.create_task(work)
                for work in (
                    ours.send_all(producer.publish),
                    ours.receive_all(ister_receive(consumer)),
                    theirs.send_all(theirs.danube_send(await danube.producer(TOPIC))),
                    theirs.receive_all(danube_receive(inbox)),
                )
            ]
            try:
                for number, how in enumerate(cuts):
                    await self.progress()
                    await self.cut(client, f"{number} {how.__name__}", how)
                for sending in tasks[::2]:
                    sending.cancel()
                await asyncio.wait(tasks[::2])
                await eventually_async(self.has_received_everything)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in tasks:
                assert task.cancelled(), task.exception()

    async def progress(self):
        """Waits until each program has sent and received some more."""
        since = time.monotonic()

        def has_progressed():
            return all(
                sum(at > since for at in times[-ENOUGH:]) == ENOUGH
                for program in self.programs
                for times in program.series.values()
            )

        await eventually_async(has_progressed, lambda: f"stuck: {self.figures}")

    async def cut(self, client, name, how):
        cluster, began = self.cluster, time.monotonic()
        cluster.cut(AWAY, Link.ETCD, how)

        # Whoever looks the topic up makes a broker open it, so that only the clients do.
        prefix = self.history.config.storage.metadata.root_prefix

        async def is_owned():
            owners = await asyncio.to_thread(read_owners, self.history.metadata, prefix)
            return owners.get(TOPIC, self.away) != self.away

        try:
            await eventually_async(is_owned)
            self.figures[name] = figures = {"owned": round(time.monotonic() - began, 1)}
            await self.progress()
            for program in self.programs:
                for what, times in program.series.items():
                    figures[what] = round(returned_after(times, began), 1)
            await self.meet_newcomers(figures)
            checks = await asyncio.to_thread(health, cluster.brokers[AWAY])
            assert "lease has expired" in checks["lease"]["words"]
            assert cluster.addresses[STAND_IN] in checks["lease"]["words"]
        finally:
            cluster.heal(AWAY, Link.ETCD)
        healed = time.monotonic()
        await self.bring_back(client)
        figures["back"] = round(time.monotonic() - healed, 1)
        late = {k: v for k, v in figures.items() if v > LEASE_SECONDS + SERVED_SECONDS}
        assert not late, (name, late, figures)

    async def meet_newcomers(self, figures):
        """Clients that begin now, and reach the broker first that is cut off."""
        began = time.monotonic()
        async with AsyncClient(self.cluster.addresses) as client:
            async with client.producer(TOPIC) as producer:
                await producer.send(b"new")
            async with await client.consumer(TOPIC, "new", start="earliest") as consumer:
                await consumer.receive()
        figures["new ister client"] = round(time.monotonic() - began, 1)
        began = time.monotonic()
        async with connect(self.cluster.brokers[AWAY]) as danube:
            await (await danube.producer(TOPIC, "new")).send(b"new")
            await danube.subscribe(TOPIC, "new", subscription="new-danube")
        figures["new danube client"] = round(time.monotonic() - began, 1)

    async def bring_back(self, client):
        """Moves the topic to the broker that is cut off next; it has to be known to the others."""
        address = f"http://{self.cluster.addresses[AWAY]}"

        async def is_back():
            nodes = {one["broker_url"]: one["node"] for one in await client.admin.brokers()}
            with contextlib.suppress(IsterError):
                if address in nodes:
                    self.away = nodes[address]
                    await client.admin.move_topic(TOPIC, self.away)
                    return True
            return False

        await eventually_async(is_back)
        owners = await asyncio.to_thread(self.cluster.owners, [TOPIC], AWAY)
        assert owners == {TOPIC: AWAY}

    def has_received_everything(self):
        acked = {text for program in self.programs for _, text in program.acked}
        return all(acked <= {text for _, text in program.received} for program in self.programs)

    def judge(self):
        """Nothing acknowledged is lost; the messages of Ister's client are there once, in order."""
        stored = [payload.decode() for _, payload, _ in self.cluster.read_history(TOPIC)]
        ours, theirs = ([text for _, text in program.acked] for program in self.programs)
        mine = [text for text in stored if text.startswith(ours[0].split()[0])]
        assert mine[: len(ours)] == ours
        assert max(Counter(mine).values()) == 1
        assert set(theirs) <= set(stored)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([Cable.swallow], id="one"),
        nightly([Cable.cut, Cable.refuse, Cable.swallow] * 10, id="30"),
    ],
)
def test_clients_leave_a_broker_that_has_lost_etcd(tmp_path, cuts):
    """Goal: clients are served again within the lease and 5 s; nothing is lost, or doubled.

    Method: etcd is cut off, each time until all clients are served and new ones too; then the
    broker has to take part again, without a restart. Prints the seconds.
    """
    settings = {"storage": {"ack": "tiered"}}
    with BrokerCluster(
        tmp_path, brokers=2, etcd_nodes=1, lease_seconds=LEASE_SECONDS, settings=settings
    ) as cluster:
        scenario = Scenario(cluster)
        try:
            run(scenario.run(cuts), within=800)
            scenario.judge()
        finally:
            for name, figures in scenario.figures.items():
                print(name, json.dumps(figures))
            print({program.name: program.failures for program in scenario.programs})


@pytest.mark.nightly
def test_broker_that_has_lost_etcd_ends_soon(tmp_path):
    """Goal: what it would release has ended with its lease: it need not wait for etcd."""
    settings = {"storage": {"ack": "tiered"}}
    with BrokerCluster(tmp_path, brokers=2, etcd_nodes=1, settings=settings) as cluster:
        with Client(cluster.addresses) as client, client.producer(TOPIC, create=True) as producer:
            producer.publish(b"x")
        broker = cluster.brokers[AWAY]
        cluster.cut(AWAY, Link.ETCD)
        eventually(lambda: "expired" in health(broker)["lease"]["words"])
        broker.stop(within=30)
