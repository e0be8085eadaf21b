"""Ister in the process itself, by `ister.open`: no server, no network."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable

import ister
from benchmarks.peers.contender import Contender, Facts, Quota, chunked
from benchmarks.peers.ister_broker import Broker, level

_CHUNK = 1000


class IsterOpen(Contender):
    """A topic that this process owns; its memory is this process's, payloads included."""

    consumes = False
    # The process cannot be killed and go on measuring.
    restarts = False
    _log: ister.Log | None = None

    def facts(self) -> Facts:
        return Facts(
            server=f"{Broker.name}, `ister.open`, in process",
            client="none: `Topic.append` and `Topic.aio` on uvloop",
            durability=f"`wait` for the level `{level(is_synced=self.is_synced)}`",
            settings=f"the defaults, uploads to a directory included; batched: `append_many` of "
            f"{_CHUNK:,}",
            consuming="has no subscriptions; replay: `Topic.read`",
            caveats=["`ister.open` runs in the client's process, without a network."],
        )

    async def start(self) -> None:
        self._log = ister.open(str(self.directory / "data"))

    async def open_topic(self, name: str) -> None:
        ack = level(is_synced=self.is_synced)
        self._topic = self._log.topic(f"/default/{name}", create=True, ack=ack)

    async def stop(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    async def kill(self) -> None:
        raise NotImplementedError

    def pids(self) -> list[int]:
        return [os.getpid()]

    async def publish(self, payload: bytes) -> None:
        topic = self._topic
        await topic.aio.wait(await topic.aio.append(payload))

    async def publish_waiting(self, payloads: Iterable[bytes], senders: int) -> list[float]:
        if senders > 1:
            return await super().publish_waiting(payloads, senders)
        times = []
        append, wait, clock = self._topic.append, self._topic.wait, time.perf_counter
        for payload in payloads:
            began = clock()
            wait(append(payload))
            times.append(clock() - began)
        return times

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        topic = self._topic
        offsets = range(0)
        for chunk in chunked(payloads, _CHUNK):
            offsets = await topic.aio.append_many(chunk)
        if offsets:
            await topic.aio.wait(offsets[-1])

    async def consume(self, name: str, quota: Quota) -> None:
        raise NotImplementedError

    async def replay(self, quota: Quota) -> None:
        await asyncio.to_thread(self._replay, quota)

    def _replay(self, quota: Quota) -> None:
        with self._topic.reader("earliest", end=quota.messages) as reader:
            quota.begin()
            while True:
                payloads = [message.payload for message in reader.next_batch(timeout=30)]
                if not quota.take(len(payloads)):
                    return

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        reader = self._topic.aio.reader("latest")
        ready.set()
        try:
            while True:
                for message in await reader.next_batch():
                    on_message(message.payload)
        finally:
            reader.close()

    async def stored(self) -> int:
        return self._topic.watermarks.next
