"""Ister's broker through `ister.client`: publishing by Arrow Flight, acknowledgements by gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from benchmarks.peers.contender import Contender, Facts, Quota
from benchmarks.peers.ister_broker import Broker, level, version
from ister.client import AsyncClient
from ister.client.flight import FlightClient
from ister.wire.contract import RangeTicket

_COLUMNS = ("offset", "payload")


class IsterFlight(Contender):
    """One `AsyncClient`."""

    lingers = (0.0, 1.0, 5.0)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._broker = Broker(self.directory)
        self._client: AsyncClient | None = None

    def facts(self) -> Facts:
        return Facts(
            server=f"{self._broker.name}, `ister.client`",
            client=f"`AsyncClient` on uvloop, pyarrow {version('pyarrow')}",
            durability=f"ack level `{level(is_synced=self.is_synced)}`",
            settings="the defaults, uploads to a directory included; `linger_ms=0`, at 64 senders "
            "the best of 0, 1 and 5, batched the default",
            consuming="exclusive subscription, an ack for each message, all confirmed at the end; "
            "replay: `FlightClient.read`, each payload as `bytes`",
        )

    async def start(self) -> None:
        await self._broker.start()
        self._client = AsyncClient(self._broker.grpc, timeout=60)
        if self.topic:
            await self._open_producers()

    async def open_topic(self, name: str) -> None:
        self.topic = f"/default/{name}"
        await self._broker.make_topic(self.topic, level(is_synced=self.is_synced))
        await self._open_producers()

    async def _open_producers(self) -> None:
        self._producers = {
            linger: await self._client.producer(self.topic, linger_ms=linger)
            for linger in self.lingers
        }
        self._bulk = await self._client.producer(self.topic)

    async def stop(self) -> None:
        await self._leave()
        await asyncio.to_thread(self._broker.stop)

    async def kill(self) -> None:
        self._broker.kill()
        await self._leave()

    async def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await asyncio.gather(client.close(0.1), return_exceptions=True)

    def pids(self) -> list[int]:
        return self._broker.pids()

    async def publish(self, payload: bytes) -> None:
        await self._producers[self.linger].publish(payload)

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            await self._bulk.send(payload)
        await self._bulk.flush()

    async def consume(self, name: str, quota: Quota) -> None:
        async with self._client.consumer(self.topic, name, start="earliest") as consumer:
            quota.begin()
            async for message in consumer:
                consumer.ack(message)
                if not quota.take(1):
                    break
            await consumer.flush()
            quota.end()
        await self._client.admin.unsubscribe(self.topic, name)

    async def replay(self, quota: Quota) -> None:
        await asyncio.to_thread(self._replay, quota)

    def _replay(self, quota: Quota) -> None:
        with FlightClient(self._broker.flight) as client:
            status = client.watermarks([self.topic])[self.topic]
            ticket = RangeTicket(
                topic=self.topic,
                incarnation=status.incarnation,
                start=0,
                end=min(quota.messages, status.synced),
                columns=_COLUMNS,
            )
            quota.begin()
            for batch in client.read(ticket):
                if not quota.take(len(batch.column("payload").to_pylist())):
                    return

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        async with self._client.consumer(self.topic, "tail", start="latest") as consumer:
            ready.set()
            async for message in consumer:
                on_message(message.payload)
                consumer.ack(message)

    async def stored(self) -> int:
        return await self._broker.stored(self.topic)
