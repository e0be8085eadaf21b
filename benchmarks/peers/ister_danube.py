"""Ister's broker through Danube's own client: one unary gRPC call for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError
from typing import Any, ClassVar

from danube import DanubeClientBuilder, DispatchStrategy, SubType

from benchmarks.peers.contender import Contender, Facts, MissingError, Quota
from benchmarks.peers.ister_broker import Broker, level, version
from ister.client import AsyncClient

_ACKERS = 64


class IsterDanube(Contender):
    """The engine `grpcio`."""

    batches = False
    restarts = False
    engine = "grpcio"
    package = "grpcio"
    environment: ClassVar[dict[str, str]] = {}

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._broker = Broker(self.directory, **self.environment)

    def facts(self) -> Facts:
        return Facts(
            server=f"{self._broker.name}, Danube's client, engine `{self.engine}`",
            client=f"danube-client {version('danube-client')} on uvloop",
            durability=f"ack level `{level(is_synced=self.is_synced)}`",
            settings=f"engine `{self.engine}` ({self.package} {version(self.package)}), otherwise "
            "the defaults",
            consuming=f"exclusive subscription, an ack for each message, {_ACKERS} acks in flight",
            caveats=["Danube's client has no batches and no replay."],
        )

    async def start(self) -> None:
        await self._broker.start()
        address = f"http://{self._broker.grpc}"
        self._client = await DanubeClientBuilder().service_url(address).build()

    async def open_topic(self, name: str) -> None:
        self.topic = f"/default/{name}"
        await self._broker.make_topic(self.topic, level(is_synced=self.is_synced))
        self._producer = (
            self._client.new_producer()
            .with_topic(self.topic)
            .with_name("bench")
            .with_dispatch_strategy(DispatchStrategy.RELIABLE)
            .build()
        )
        await self._producer.create()

    async def stop(self) -> None:
        await asyncio.to_thread(self._broker.stop)

    async def kill(self) -> None:
        self._broker.kill()

    def pids(self) -> list[int]:
        return self._broker.pids()

    async def publish(self, payload: bytes) -> None:
        await self._producer.send(payload)

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        """Fills the backlog, by the client that can."""
        async with (
            AsyncClient(self._broker.grpc) as client,
            client.producer(self.topic) as producer,
        ):
            for payload in payloads:
                await producer.send(payload)

    async def _subscribe(self, name: str, *, from_start: bool) -> tuple[Any, Any]:
        consumer = (
            self._client.new_consumer()
            .with_topic(self.topic)
            .with_consumer_name("bench")
            .with_subscription(name)
            .with_subscription_type(SubType.EXCLUSIVE)
            .build()
        )
        await consumer.subscribe()
        if from_start:
            async with AsyncClient(self._broker.grpc) as client:
                await client.admin.seek(self.topic, name, to="earliest")
        return consumer, await consumer.receive()

    async def consume(self, name: str, quota: Quota) -> None:
        consumer, queue = await self._subscribe(name, from_start=True)
        quota.begin()
        is_over = False

        async def work() -> None:
            nonlocal is_over
            while not is_over:
                message = await queue.get()
                await consumer.ack(message)
                is_over = not quota.take(1) or is_over

        ackers = [asyncio.ensure_future(work()) for _ in range(_ACKERS)]
        await asyncio.wait(ackers, return_when=asyncio.FIRST_COMPLETED)
        quota.end()
        for acker in ackers:
            acker.cancel()
        await asyncio.gather(*ackers, return_exceptions=True)
        await consumer.close()

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        consumer, queue = await self._subscribe("tail", from_start=False)
        ready.set()
        under_way: set[asyncio.Future[None]] = set()
        try:
            while True:
                message = await queue.get()
                on_message(message.payload)
                task = asyncio.ensure_future(consumer.ack(message))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        finally:
            await asyncio.gather(*under_way, return_exceptions=True)
            await consumer.close()

    async def stored(self) -> int:
        return await self._broker.stored(self.topic)


class IsterDanubeNative(IsterDanube):
    """The engine `native`."""

    engine = "native"
    package = "pygrpc-native"
    environment: ClassVar[dict[str, str]] = {"ISTER_BROKER__GRPC__ENGINE": "native"}

    async def start(self) -> None:
        try:
            version(self.package)
        except PackageNotFoundError as error:
            raise MissingError(f"{self.package} is not installed") from error
        await super().start()
