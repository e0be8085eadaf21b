"""A broker on the stores of a cluster: metadata in a real etcd, objects in a real S3.

What is special there is that calls take milliseconds, that leases end, and that cursors, ids and
brokers' addresses live in etcd: the rest is the same code as on SQLite and a directory.
"""

import uuid

import pytest

pytest.importorskip("danube")

from tests.servers.broker import BrokerProcess
from tests.servers.etcd import EtcdServer
from tests.servers.s3 import rclone_server
from tests.support.danube import SHARED, connect, eventually, numbered, offsets, run, texts

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def stores():
    with EtcdServer() as etcd, rclone_server() as s3:
        yield etcd, s3


@pytest.fixture
def settings(stores):
    etcd, s3 = stores
    prefix = uuid.uuid4().hex[:12]
    return {
        "storage": {
            "uploader": {"engine": "embedded", "interval_seconds": 1},
            "cloud": {
                "backend": "s3",
                "root": f"s3://{s3.bucket}/{prefix}",
                "options": s3.options(),
            },
            "metadata": {
                "backend": "etcd",
                "endpoints": [etcd.endpoint],
                "root_prefix": f"/{prefix}",
            },
        }
    }


def test_everything_is_there_after_a_kill(tmp_path, settings):
    """Goal: what was acknowledged is read on, ids and cursors are known again."""

    async def before(broker):
        async with connect(broker) as session:
            await session.create_topic(TOPIC)
            inbox = await session.consumer(TOPIC, kind=SHARED)
            await session.send(TOPIC, numbered(20))
            assert texts(await inbox.take(20)) == numbered(20)
            ids = inbox.ids
            await inbox.close()
            return ids

    async def after(broker, ids):
        async with connect(broker) as session:
            inbox = await session.consumer(TOPIC, kind=SHARED)
            assert inbox.ids == ids
            got = await inbox.take(20, ack=True)
            assert sorted(offsets(got)) == list(range(20))
            await session.send(TOPIC, numbered(1, start=20), name="another")
            assert texts(await inbox.take(1)) == numbered(1, start=20)

    with BrokerProcess(tmp_path, settings=settings) as broker:
        ids = run(before(broker))
        broker.kill()
        broker.start()
        run(after(broker, ids))


def test_topic_moves_to_another_broker(tmp_path, settings):
    """Goal: after an unload the other broker delivers what was not acknowledged, once each."""

    async def owner_of(one, other):
        """The two brokers, the one that got the topic first."""
        async with connect(one) as session:
            await session.create_topic(TOPIC)
            found = await session.client.lookup_service.handle_lookup(one.url, TOPIC)
            return (one, other) if found.broker_url == one.url else (other, one)

    async def scenario(one, other):
        one, other = await owner_of(one, other)
        async with connect(one) as first:
            inbox = await first.consumer(TOPIC)
            await first.send(TOPIC, numbered(10))
            await inbox.take(5, ack=True)
            await first.unload(TOPIC)
            await inbox.close()

            async def redirected():
                found = await first.client.lookup_service.handle_lookup(one.url, TOPIC)
                return found.broker_url == other.url

            await eventually(redirected)
        async with connect(other) as second:
            inbox = await second.consumer(TOPIC)
            await second.send(TOPIC, numbered(8, start=10))
            assert offsets(await inbox.take(13, ack=True)) == list(range(5, 18))
            await inbox.expect_silence()

    with (
        BrokerProcess(tmp_path / "one", settings=settings) as one,
        BrokerProcess(tmp_path / "other", settings=settings) as other,
    ):
        run(scenario(one, other))
