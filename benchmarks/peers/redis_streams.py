"""Redis Streams: Debian's redis-server, the client redis-py with hiredis."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Iterable

import redis
import redis.asyncio

from benchmarks.peers import install
from benchmarks.peers.contender import Contender, Facts, Quota, chunked
from benchmarks.peers.processes import Server, free_port, until

_FIELD = b"p"
_COUNT = 1000


class RedisStreams(Contender):
    """A stream with an append-only file."""

    _server: Server | None = None

    def facts(self) -> Facts:
        version = importlib.metadata.version
        return Facts(
            server=f"Redis Streams {self._version}",
            client=f"redis-py {version('redis')} with hiredis {version('hiredis')} on uvloop, a "
            "connection for each sender",
            durability=f"`appendonly yes`, `appendfsync {self._policy}`",
            settings=f'no snapshots (`save ""`); batched: pipelines of {_COUNT:,} XADD',
            consuming=f"XREADGROUP with COUNT {_COUNT:,}, one XACK for as many; replay: XRANGE "
            f"with COUNT {_COUNT:,}",
            caveats=["Redis holds the whole stream in memory; its reads never touch the disk."],
        )

    @property
    def _policy(self) -> str:
        return "always" if self.is_synced else "everysec"

    async def start(self) -> None:
        port = free_port()
        debian = install.debian_root(self.cache, "redis-server")
        command = [
            str(debian.program("usr/bin/redis-server")),
            *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.directory)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", self._policy),
        ]
        self._server = Server(command, self.directory / "log", environment=debian.environment)
        self._client = redis.asyncio.Redis(host="127.0.0.1", port=port, socket_timeout=60)
        await until(self._client.ping, self._server)
        self._version = (await self._client.info("server"))["redis_version"]

    async def open_topic(self, name: str) -> None:
        self.topic = name

    async def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            await self._client.aclose()

    async def kill(self) -> None:
        await self.stop()

    def pids(self) -> list[int]:
        return [self._server.pid] if self._server is not None else []

    async def publish(self, payload: bytes) -> None:
        await self._client.xadd(self.topic, {_FIELD: payload})

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        for chunk in chunked(payloads, _COUNT):
            async with self._client.pipeline(transaction=False) as pipeline:
                for payload in chunk:
                    pipeline.xadd(self.topic, {_FIELD: payload})
                await pipeline.execute()

    async def consume(self, name: str, quota: Quota) -> None:
        await self._client.xgroup_create(self.topic, name, id="0")
        quota.begin()
        while True:
            found = await self._client.xreadgroup(name, "one", {self.topic: ">"}, count=_COUNT)
            messages = _entries(found)
            await self._client.xack(self.topic, name, *(entry for entry, _ in messages))
            if not quota.take(len(messages)):
                break
        quota.end()
        await self._client.xgroup_destroy(self.topic, name)

    async def replay(self, quota: Quota) -> None:
        last = b"-"
        quota.begin()
        while True:
            messages = await self._client.xrange(self.topic, min=last, count=_COUNT)
            if not quota.take(len(messages)):
                return
            last = b"(" + messages[-1][0]

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        await self._client.xgroup_create(self.topic, "tail", id="$", mkstream=True)
        ready.set()
        while True:
            found = await self._client.xreadgroup(
                "tail", "one", {self.topic: ">"}, count=100, block=1000
            )
            messages = _entries(found)
            for _, fields in messages:
                on_message(fields[_FIELD])
            if messages:
                await self._client.xack(self.topic, "tail", *(entry for entry, _ in messages))

    async def stored(self) -> int:
        return await self._client.xlen(self.topic)


def _entries(found: object) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an answer for one stream, in either of the protocol's versions."""
    if not found:
        return []
    if isinstance(found, dict):
        (chunks,) = found.values()
        return [entry for chunk in chunks for entry in chunk]
    return found[0][1]
