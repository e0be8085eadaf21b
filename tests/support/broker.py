"""The parts of a broker without its ports, and a whole one on this loop, as unit tests use them.

    async def test_something(tmp_path):
        async with some_topics(tmp_path) as topics:
            topic = await topics.get_or_create("/default/t", is_reliable=True)

`some_topics` is a log with the broker's topics above it, `a_broker` is all of a broker on free
ports. Both are on the loop of the test, end with their block, and see to it that they leave no
task behind. Nothing is uploaded or trimmed unless a test has it done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from ister import wire
from ister.base.clock import SystemClock
from ister.base.model import MessageId, StreamMessage
from ister.broker.cluster.cluster import Cluster
from ister.broker.dispatch.outbox import Outbox
from ister.broker.server import Broker, Listening
from ister.broker.topics.topics import Topics
from ister.bucket.members import Member
from ister.config import Config, load_config
from ister.metadata.base import MetadataStore
from ister.topic.log import Log
from tests.servers.broker import broker_settings
from tests.support.memory_metadata import MemoryMetadata
from tests.support.waiting import PATIENCE_SECONDS, TEST_TASK, run
from tests.support.waiting import eventually_async as eventually

__all__ = [
    "PATIENCE_SECONDS",
    "Services",
    "a_broker",
    "a_record",
    "broker_tasks",
    "broker_timers",
    "eventually",
    "run",
    "settings_of",
    "several_brokers",
    "some_topics",
    "take",
]

T = TypeVar("T")


def a_record(
    payload: bytes = b"x", *, topic: str = "/default/t", name: str = "producer", **fields: Any
) -> StreamMessage:
    """A message as it comes from a client."""
    return StreamMessage(
        request_id=1,
        msg_id=MessageId(producer_id=7, topic_name=topic, broker_addr="http://b:1"),
        payload=payload,
        publish_time=1_760_745_600_000,
        producer_name=name,
        **fields,
    )


async def take(outbox: Outbox[T], count: int, *, within: float = PATIENCE_SECONDS) -> list[T]:
    """The next `count` items of an outbox; none of them counts as written."""
    taken: list[T] = []
    async with asyncio.timeout(within):
        while len(taken) < count:
            items = await outbox.take(count - len(taken))
            assert items, f"the stream ended after {len(taken)} of {count}"
            taken += items
    return taken


def broker_tasks() -> list[asyncio.Task[Any]]:
    """Tasks of this loop beside the test's own."""
    return [
        task
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task() and task.get_name() != TEST_TASK
    ]


def broker_timers() -> list[asyncio.TimerHandle]:
    """What this loop is going to call of ours."""
    return [
        handle
        for handle in asyncio.get_running_loop()._scheduled
        if not handle.cancelled() and handle._callback.__module__.startswith("ister.")
    ]


def settings_of(
    directory: Path, settings: Mapping[str, Any] | None = None, *, mode: str = "wal_cloud"
) -> Config:
    """Settings with free ports and data in a directory."""
    tree = broker_settings(directory, {"storage": {"mode": mode}})
    if mode != "wal_cloud":
        del tree["storage"]["uploader"]
    if mode == "memory":
        tree["storage"] = {"mode": mode}
    if mode == "bucket":
        stores = {"cloud": {"backend": "memory"}, "metadata": {"backend": "memory"}}
        tree["storage"] = {"mode": mode, **stores}
    for key, value in (settings or {}).items():
        part = tree.setdefault(key, {})
        for name, content in value.items():
            if isinstance(content, Mapping) and isinstance(part.get(name), dict):
                part[name] = {**part[name], **content}
            else:
                part[name] = content
    return load_config(tree, {})


@asynccontextmanager
async def some_topics(
    directory: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    mode: str = "wal_cloud",
    metadata: MetadataStore | None = None,
    schemas: Any = None,
) -> AsyncIterator[Topics]:
    """The topics of a broker without ports, on a log of its own.

    Args:
        directory: Where data goes.
        settings: What differs from the defaults, as a tree.
        mode: `storage.mode`; without a bucket the metadata is in memory.
        metadata: Another store than that.
        schemas: What messages are held against; none by default.
    """
    config, clock = settings_of(directory, settings, mode=mode), SystemClock()
    log = await asyncio.to_thread(Log, config, clock=clock)
    own = None
    try:
        if metadata is None and log.stores is None:
            own = MemoryMetadata(clock)
        store = metadata or own or log.stores.metadata
        node = log.stores.membership.node if log.stores is not None else "local"
        address = Member(
            node=node, broker_url="http://a:1", connect_url="http://a:1", flight_url=""
        )
        topics = Topics(
            log,
            store,
            Cluster(address, log.stores, config=config.broker.cluster, clock=clock),
            config=config,
            clock=clock,
            secret="secret",
            schemas=schemas,
        )
        try:
            yield topics
        finally:
            await topics.close()
    finally:
        await asyncio.to_thread(log.close)
        if own is not None:
            own.close()


class Services:
    """Stubs of every service of a broker, on one channel."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.producers = wire.stub(self.channel, "danube.ProducerService")
        self.consumers = wire.stub(self.channel, "danube.ConsumerService")
        self.discovery = wire.stub(self.channel, "danube.Discovery")
        self.health = wire.stub(self.channel, "danube.HealthCheck")
        self.storage = wire.stub(self.channel, "danube.StorageService")
        self.topics = wire.stub(self.channel, "danube_admin.TopicAdmin")
        self.namespaces = wire.stub(self.channel, "danube_admin.NamespaceAdmin")
        self.brokers = wire.stub(self.channel, "danube_admin.BrokerAdmin")
        self.cluster = wire.stub(self.channel, "danube_admin.ClusterAdmin")
        self.delivery = wire.stub(self.channel, "ister.Delivery")
        self.admin = wire.stub(self.channel, "ister.Admin")


@asynccontextmanager
async def a_broker(
    directory: Path, settings: Mapping[str, Any] | None = None, *, mode: str = "wal_cloud"
) -> AsyncIterator[tuple[Broker, Services, Listening]]:
    """A whole broker on this loop, with stubs for it."""
    broker = Broker(settings_of(directory, settings, mode=mode))
    listening = await broker.start()
    services = Services(listening.grpc)
    try:
        yield broker, services, listening
    finally:
        await services.channel.close()
        await broker.stop()


@asynccontextmanager
async def several_brokers(
    directory: Path, *names: str, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[list[tuple[Broker, Services, Listening]]]:
    """Brokers that share a metadata store and a bucket, as `a_broker` gives each of them."""
    stores = {
        "cloud": {"root": str(directory / "objects")},
        "metadata": {"path": str(directory / "metadata.db")},
    }
    tree = {"storage": stores, **(settings or {})}
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(a_broker(directory / name, tree)) for name in names]
