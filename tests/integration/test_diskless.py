"""Brokers without a disk (`storage.mode: bucket`), on a real etcd and a real S3.

Where tests may mount, their file system is read-only. Their working directory, home and temporary
directory are empty, and stay so. What a killed one had
acknowledged is in the bucket, and another process goes on from there.
"""

import asyncio
import json
import os
import stat
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest
import yaml

from ister.base.limits import KIB, MIB
from ister.client import AsyncClient
from ister.errors import InvalidRequestError
from tests.servers.broker import BrokerProcess
from tests.servers.etcd import EtcdServer
from tests.servers.fault_proxy import Action, FaultProxy
from tests.servers.s3 import rclone_server
from tests.support.danube import SHARED, connect, numbered, run, texts
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

TOPIC = "/default/orders"
LEASE_SECONDS = 3
MEMORY = 8 * MIB


@pytest.fixture(scope="module")
def stores():
    with EtcdServer() as etcd, rclone_server() as s3:
        yield etcd, s3


@pytest.fixture
def rig(tmp_path, stores):
    """Makes brokers that share a bucket and etcd's keys below a prefix of their own."""
    etcd, s3 = stores
    with FaultProxy(s3.port) as proxy:
        yield Rig(tmp_path, etcd, s3, proxy)


class Rig:
    """See the fixture."""

    def __init__(self, directory: Path, etcd, s3, proxy: FaultProxy) -> None:
        self.proxy = proxy
        prefix = uuid.uuid4().hex[:12]
        self.storage = {
            "mode": "bucket",
            "wal": {"dir": None},
            "bucket": {"memory_max_bytes": MEMORY},
            "uploader": {"engine": "auto"},
            "cloud": {
                "backend": "s3",
                "root": f"s3://{s3.bucket}/{prefix}",
                "options": s3.options(endpoint=proxy.endpoint),
                "call_timeout_seconds": 5,
            },
            "metadata": {
                "backend": "etcd",
                "endpoints": [etcd.endpoint],
                "root_prefix": f"/{prefix}",
                "lease_ttl_seconds": LEASE_SECONDS,
            },
        }
        self._directory = directory
        self.empty = directory / "empty"
        self.empty.mkdir()
        self.config = directory / "ister.yml"
        self.config.write_text(yaml.safe_dump({"storage": self.storage}))

    def broker(self, name: str = "a") -> BrokerProcess:
        """A broker that finds no directory but an empty one."""
        return BrokerProcess(
            self._directory / name,
            settings={
                "storage": self.storage,
                "dispatch": {"progress_flush_interval_seconds": 1},
            },
            environment={
                **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(self.empty)),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            working_directory=self.empty,
            is_read_only=True,
        )

    def run(self, *arguments: str) -> str:
        """What an `ister` command prints."""
        command = [sys.executable, "-m", "ister.cli.main", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout


def written_files(pid: int) -> list[str]:
    """The regular files that a process has open for writing, without its output."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            is_file = stat.S_ISREG(entry.stat().st_mode)
            flags = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split()
        except FileNotFoundError:
            continue  # closed meanwhile
        is_writable = int(flags[flags.index("flags:") + 1], 8) & os.O_ACCMODE != os.O_RDONLY
        if is_file and is_writable and int(entry.name) > 2:
            found.append(os.readlink(entry))
    return found


async def publish(client, payloads, topic=TOPIC, name="writer"):
    async with client.producer(topic, name=name, timeout=PATIENCE_SECONDS) as producer:
        return await asyncio.gather(*(producer.publish(one.encode()) for one in payloads))


async def get(broker, path):
    def ask():
        with urllib.request.urlopen(f"http://{broker.http}{path}") as answer:
            return json.loads(answer.read())

    return await asyncio.to_thread(ask)


def test_broker_keeps_no_file(rig):
    """Goal: topics, subscriptions, Flight, admin calls and the HTTP API work, and nothing is kept.

    Method: everything is used with an empty directory for all that a process may write to; then
    that directory, the one of the broker and the broker's open files are looked at.
    """

    async def scenario(broker):
        async with connect(broker) as session, AsyncClient(broker.address) as client:
            await session.create_topic(TOPIC)
            inbox = await session.consumer(TOPIC, kind=SHARED)
            await session.send(TOPIC, numbered(20))
            assert texts(await inbox.take(20)) == numbered(20)
            await inbox.close()
            with pytest.raises(InvalidRequestError, match="cannot be synced"):
                await client.admin.create_topic("/default/synced", ack="synced")
            described = await client.admin.describe_topic(TOPIC)
            assert (described.ack, described.tiered, described.next) == ("tiered", 20, 20)
            await publish(client, numbered(20, 20))
            checks = {one["name"]: one for one in (await get(broker, "/health"))["checks"]}
            assert checks["memory"]["state"] == "ok", checks
            assert "disk" not in checks
            overview = await get(broker, "/api/overview")
            assert (overview["broker"]["mode"], overview["disk"]) == ("bucket", None)

    with rig.broker() as broker:
        run(scenario(broker))
        assert written_files(broker.pid) == []
        # Read by Flight.
        address = ("--broker", broker.address)
        assert rig.run("consume", TOPIC, *address, "--limit", "40").splitlines() == numbered(40)
        broker.stop()
        assert sorted(path.name for path in broker.directory.rglob("*")) == [
            "broker.log",
            "ister.yml",
        ]
    assert list(rig.empty.iterdir()) == []
    # Without a broker: from the bucket and etcd alone.
    assert "40" in rig.run("topics", "describe", TOPIC, "--config", str(rig.config))
    assert "whole" in rig.run("repair", "--config", str(rig.config))
    assert "bucket" in rig.run("config", "check", str(rig.config))


def test_killed_broker_loses_nothing_that_was_acknowledged(rig):
    """Goal: the next process, with a new identity, continues the topic; nothing is stored twice.

    Method: a producer with sequences and a subscription use two brokers; the owner is killed.
    """

    async def scenario(brokers):
        addresses = [broker.address for broker in brokers]
        async with AsyncClient(addresses) as client:
            await client.admin.create_topic(TOPIC)
            await publish(client, numbered(50))
            async with (
                client.consumer(TOPIC, "reader", start="earliest") as consumer,
                client.producer(TOPIC, name="writer", timeout=PATIENCE_SECONDS) as producer,
            ):
                sends = [
                    asyncio.ensure_future(producer.publish(one.encode()))
                    for one in numbered(100, 50)
                ]
                await sends[0]
                owner = await owner_of(client, brokers)
                await asyncio.to_thread(owner.kill)
                await asyncio.gather(*sends)
                found = []
                while len(found) < 150:
                    message = await consumer.receive(PATIENCE_SECONDS)
                    consumer.ack(message)
                    if message.payload not in found:
                        found.append(message.payload)
                assert found == [one.encode() for one in numbered(150)]
            described = await client.admin.describe_topic(TOPIC)
            assert described.next == 150, "numbered messages are stored once"
            return owner

    with rig.broker("a") as first, rig.broker("b") as second:
        owner = run(scenario([first, second]))
        # And after both: a process that has never seen the topic.
        (second if owner is first else first).kill()
        owner.start()

        async def after():
            async with AsyncClient(owner.address) as client:
                await publish(client, ["the last"], name="other")

        run(after())
        shown = rig.run("consume", TOPIC, "--broker", owner.address, "--limit", "151")
        assert shown.splitlines() == [*numbered(150), "the last"]


async def owner_of(client, brokers):
    described = await client.admin.show_topic(TOPIC)
    url = described["owner"]["broker_url"]
    return next(broker for broker in brokers if url.endswith(broker.address))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_bucket_that_hangs_holds_producers_and_nothing_grows(rig):
    """Goal: with no answer from the bucket, nothing is acknowledged, lost or piled up.

    Method: eight topics, sixteen times the memory in messages, and PUTs that are never answered.
    """
    topics = [f"/default/t{number}" for number in range(8)]
    payloads = [str(number).rjust(64 * KIB) for number in range(256)]
    acked = []

    async def produce(client, topic):
        async with client.producer(topic, name=topic[9:], timeout=PATIENCE_SECONDS) as producer:
            slots = asyncio.Semaphore(32)

            async def send(payload):
                async with slots:
                    await producer.publish(payload.encode())
                    acked.append(topic)

            await asyncio.gather(*map(send, payloads))

    async def scenario(broker):
        async with AsyncClient(broker.address) as client:
            for topic in topics:
                await client.admin.create_topic(topic)
                await publish(client, ["warm"], topic)
            rig.proxy.add(Action.HANG, method="PUT", count=None)
            load = asyncio.gather(*(produce(client, topic) for topic in topics))
            await eventually_async(lambda: is_held(broker), "producers are not held", every=0.2)
            before = await asyncio.to_thread(broker.rss_bytes)
            for _ in range(20):
                await asyncio.sleep(0.25)
                assert broker.rss_bytes() - before < 64 * MIB, "memory grows"
            assert not acked, "a message was acknowledged without the bucket"
            rig.proxy.clear()
            await load
            assert len(acked) == len(topics) * len(payloads)
            for topic in topics:
                described = await client.admin.describe_topic(topic)
                assert described.next == described.tiered == len(payloads) + 1
            await eventually_async(lambda: is_small(broker), "uploaded messages stay in memory")

    async def metrics(broker):
        def ask():
            with urllib.request.urlopen(f"http://{broker.http}/metrics") as answer:
                return answer.read().decode()

        lines = (await asyncio.to_thread(ask)).splitlines()
        return {
            name: float(value)
            for name, value in (
                line.rsplit(" ", 1) for line in lines if line.startswith("ister_memory_")
            )
        }

    async def is_held(broker):
        return (await metrics(broker))["ister_memory_is_full"] == 1

    async def is_small(broker):
        return (await metrics(broker))["ister_memory_used_bytes"] <= MEMORY // 2

    with rig.broker() as broker:
        run(scenario(broker))


@pytest.mark.nightly
def test_spark_reads_and_writes_topics_of_a_broker_without_a_disk(rig, spark):
    """Goal: the source, the sink and a stream need the broker's addresses and the stores alone."""
    options = {"config": str(rig.config), "topic": TOPIC}
    with rig.broker() as broker:

        async def scenario():
            async with AsyncClient(broker.address) as client:
                await client.admin.create_topic(TOPIC)
                await publish(client, numbered(100))

        run(scenario())
        options["broker"] = f"grpc://{broker.flight}"

        def read():
            rows = spark.read.format("ister").options(**options).load().orderBy("offset")
            return [bytes(row.payload).decode() for row in rows.select("payload").collect()]

        assert read() == numbered(100)
        more = spark.createDataFrame([(one,) for one in numbered(20, 100)], "payload string")
        more.coalesce(1).write.format("ister").mode("append").options(**options).save()
        assert read() == numbered(120)
        broker.kill()
        assert read() == numbered(120), "the bucket has everything: no broker is needed"
