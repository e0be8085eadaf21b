"""What a broker reads to deliver, and what it holds for consumers that do not read.

    read amplification    bytes read from files and objects for each byte of a message delivered:
                          a backlog in each kind of subscription, and on redelivery
    stalled               memory with many subscriptions whose consumers take nothing

Owns: the measurements; a part of `benchmarks broker`. The bytes come from the broker's own
metrics; consumers are streams of `ister.Delivery`, which acknowledge what they are told to.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import grpc

from benchmarks.broker_abuse import resident_mib
from benchmarks.broker_servers import broker
from benchmarks.measurement import Run
from ister.client.aio import AsyncClient
from ister.wire import ister_api, stub

_MESSAGES: Final = 12_000
_MESSAGE_BYTES: Final = 8 * 1024
_SMALL_MESSAGES: Final = 50_000
_SMALL_BYTES: Final = 500
_REDELIVERED: Final = 1000
_KEYS: Final = 200
_CONSUMERS: Final = 4
_AMPLIFICATION_MAX: Final = 2.0
_STALLED: Final = 200
_STALLED_TOPICS: Final = 4
_STALLED_BYTES: Final = 64 * 1024 * 1024
_STALLED_MESSAGE_BYTES: Final = 32 * 1024
_BUDGET_MIB: Final = 256
_WAIT_SECONDS: Final = 120.0
_COUNTERS: Final = (
    "ister_wal_reader_stitch_file_bytes_total",
    "ister_cloud_reader_read_bytes_total",
)


def measure(run: Run) -> None:
    """Adds the figures to `run`."""
    with broker(run.path("reads")) as served:
        asyncio.run(_measure_reads(run, served))
    settings = {"ISTER_DISPATCH__MEMORY_BUDGET_MB": str(_BUDGET_MIB)}
    with broker(run.path("stalled"), **settings) as served:
        asyncio.run(_measure_stalled(run, served))


# -- read amplification ---------------------------------------------------------------------


async def _measure_reads(run: Run, served: dict[str, Any]) -> None:
    count = run.scaled(_MESSAGES, at_least=1500)
    await _fill(served["grpc"], "/default/large", count, _MESSAGE_BYTES)
    small = run.scaled(_SMALL_MESSAGES, at_least=6000)
    await _fill(served["grpc"], "/default/small", small, _SMALL_BYTES)
    async with grpc.aio.insecure_channel(served["grpc"]) as channel:
        for kind in ("exclusive", "failover", "shared", "key_shared"):
            consumers = 1 if kind in ("exclusive", "failover") else _CONSUMERS
            before = _bytes_read(served["http"])
            elapsed = await _drain(channel, "/default/large", kind, consumers, count)
            read = _bytes_read(served["http"]) - before
            _report(run, f"{count} x 8 KiB, {kind}", read / (count * _MESSAGE_BYTES))
            run.add(f"backlog of 8 KiB messages, {kind}", count / elapsed, "msg/s")
        for name, redeliver in (
            ("after a reconnect", _reconnect),
            ("after nacks of all", _nack_all),
            ("after nacks of every tenth", _nack_some),
        ):
            before = _bytes_read(served["http"])
            delivered = await redeliver(channel, small)
            read = _bytes_read(served["http"]) - before
            _report(run, f"redelivery of 500 B messages {name}", read / (delivered * _SMALL_BYTES))


def _report(run: Run, name: str, value: float) -> None:
    run.add(f"read amplification, {name}", value, "x", at_most=_AMPLIFICATION_MAX)


def _bytes_read(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_COUNTERS))


async def _fill(address: str, topic: str, count: int, size: int) -> None:
    """Publishes a backlog of keyed messages."""
    async with AsyncClient(address) as client, client.producer(topic, create=True) as producer:
        for number in range(count):
            head = b"%d " % number
            await producer.send(head.ljust(size, b"."), routing_key=f"key-{number % _KEYS}")
        await producer.flush()


class _Stream:
    """One consumer's stream."""

    def __init__(
        self, channel: grpc.aio.Channel, topic: str, subscription: str, kind: str, name: str
    ) -> None:
        self._requests: asyncio.Queue[ister_api.ConsumeRequest] = asyncio.Queue()
        opening = ister_api.OpenConsumer(
            topic=topic, subscription=subscription, consumer=name, kind=kind, start="earliest"
        )
        self._requests.put_nowait(ister_api.ConsumeRequest(open=opening))
        self.call = stub(channel, "ister.Delivery").Consume(self._written())

    async def _written(self) -> AsyncIterator[ister_api.ConsumeRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def ack(self, offsets: Sequence[int]) -> None:
        """Acknowledges messages."""
        self._requests.put_nowait(ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=offsets)))

    def nack(self, offset: int) -> None:
        """Has a message come again."""
        nack = ister_api.Nack(offset=offset, delay_ms=0)
        self._requests.put_nowait(ister_api.ConsumeRequest(nack=nack))

    async def receive(self, on_offsets: Callable[[list[int]], bool]) -> None:
        """Receives until `on_offsets`, which is told of each batch, has enough."""
        async for response in self.call:
            if response.WhichOneof("step") == "deliveries" and not on_offsets(
                [message.offset for message in response.deliveries.messages]
            ):
                return


@asynccontextmanager
async def _stream(
    channel: grpc.aio.Channel,
    topic: str,
    subscription: str,
    kind: str,
    name: str = "one",
) -> AsyncIterator[_Stream]:
    stream = _Stream(channel, topic, subscription, kind, name)
    try:
        yield stream
    finally:
        stream.call.cancel()


async def _drain(
    channel: grpc.aio.Channel, topic: str, kind: str, consumers: int, count: int
) -> float:
    """Receives and acknowledges a backlog; seconds."""
    left = set(range(count))
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = asyncio.Event()
    async with AsyncExitStack() as stack:

        async def consume(stream: _Stream) -> None:
            def take(offsets: list[int]) -> bool:
                stream.ack(offsets)
                left.difference_update(offsets)
                if not left:
                    done.set()
                return bool(left)

            await stream.receive(take)

        tasks = []
        for number in range(consumers):
            opened = _stream(channel, topic, kind, kind, f"c{number}")
            tasks.append(asyncio.create_task(consume(await stack.enter_async_context(opened))))
        async with asyncio.timeout(_WAIT_SECONDS):
            await done.wait()
        elapsed = loop.time() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return elapsed


def _until(received: list[int], count: int) -> Callable[[list[int]], bool]:
    def take(offsets: list[int]) -> bool:
        received.extend(offsets)
        return len(received) < count

    return take


async def _reconnect(channel: grpc.aio.Channel, count: int) -> int:
    """A consumer takes all it may have, leaves, and comes again."""
    delivered = 0
    for _ in range(3):
        received: list[int] = []
        async with (
            asyncio.timeout(_WAIT_SECONDS),
            _stream(channel, "/default/small", "reconnects", "exclusive") as stream,
        ):
            await stream.receive(_until(received, min(_REDELIVERED, count)))
        delivered += len(received)
    return delivered


async def _nack_all(channel: grpc.aio.Channel, count: int) -> int:
    return await _nack(channel, "nacks", min(_REDELIVERED, count), 1)


async def _nack_some(channel: grpc.aio.Channel, count: int) -> int:
    return await _nack(channel, "some", count, 10)


async def _nack(channel: grpc.aio.Channel, subscription: str, count: int, step: int) -> int:
    """Every so many messages are refused once, and acknowledged the second time."""
    seen: set[int] = set()
    left = set(range(count))
    delivered = 0
    async with (
        asyncio.timeout(_WAIT_SECONDS),
        _stream(channel, "/default/small", subscription, "shared") as stream,
    ):

        def take(offsets: list[int]) -> bool:
            nonlocal delivered
            delivered += len(offsets)
            refused = [one for one in offsets if one % step == 0 and one not in seen]
            seen.update(refused)
            for offset in refused:
                stream.nack(offset)
            taken = set(offsets) - set(refused)
            stream.ack(sorted(taken))
            left.difference_update(taken)
            return bool(left)

        await stream.receive(take)
    return delivered


# -- stalled subscriptions ------------------------------------------------------------------


async def _measure_stalled(run: Run, served: dict[str, Any]) -> None:
    count = run.scaled(_STALLED, at_least=20)
    for number in range(_STALLED_TOPICS):
        await _fill(
            served["grpc"],
            f"/default/stalled-{number}",
            run.scaled(_STALLED_BYTES, at_least=8 << 20) // _STALLED_MESSAGE_BYTES,
            _STALLED_MESSAGE_BYTES,
        )
    before = resident_mib(served["pid"])
    async with (
        grpc.aio.insecure_channel(
            served["grpc"], options=[("grpc.http2.lookahead_bytes", 65536)]
        ) as channel,
        AsyncExitStack() as stack,
    ):
        for number in range(count):
            topic = f"/default/stalled-{number % _STALLED_TOPICS}"
            # It is opened, and what it is sent is never looked at.
            opened = _stream(channel, topic, f"stalled-{number}", "exclusive")
            stream = await stack.enter_async_context(opened)
            await stream.call.read()
        highest = before
        for _ in range(20):
            await asyncio.sleep(0.25)
            highest = max(highest, resident_mib(served["pid"]))
        run.add(
            f"{count} stalled subscriptions: memory growth",
            highest - before,
            "MiB",
            at_most=float(_BUDGET_MIB),
            note=f"with a budget of {_BUDGET_MIB} MiB",
        )
        # One that reads gets its messages all the same.
        elapsed = await _drain(
            channel,
            "/default/stalled-0",
            "shared",
            1,
            run.scaled(_STALLED_BYTES, at_least=8 << 20) // _STALLED_MESSAGE_BYTES,
        )
    run.add(
        f"a backlog beside {count} stalled subscriptions",
        run.scaled(_STALLED_BYTES, at_least=8 << 20) / elapsed / (1 << 20),
        "MiB/s",
    )
