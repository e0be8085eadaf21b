"""`benchmarks broker`: clients on a broker, beside the same clients on an empty server.

    sends         one at a time, each answered when it is synced
    consuming     a backlog, without acknowledgements and with one for each message
    latency       from a send to the consumer, at a steady rate
    bulk          by Arrow Flight; see `broker_flight`
    slow          consumers that take their time; see `broker_slow`
    engines       what a message costs, for each engine of the gRPC port; see `broker_engines`
    idle          memory and processor time with many topics and consumers and nothing to do
    abuse         memory while calls are refused that would inflate; see `broker_abuse`
    reads         bytes read for each byte delivered, and what is held; see `broker_reads`

Owns: the measurements with Danube's own client. Broker, empty server and this client are three
processes, on as many cores as there are.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc

from benchmarks import broker_abuse, broker_engines, broker_flight, broker_reads
from benchmarks.broker_servers import bare_server, broker
from benchmarks.broker_slow import measure as measure_slow
from benchmarks.http2_client import cpu_seconds
from benchmarks.measurement import MESSAGE_BYTES, Run, median, payloads, quantile, stopwatch
from ister.base.extras import missing_extra
from ister.errors import UnavailableError
from ister.wire import ister_api, stub

if TYPE_CHECKING:
    from danube import Consumer, DanubeClient, Producer

    from ister.wire.danube_pb2 import StreamMessage

_TOPIC: Final = "/default/bench"
_ROUNDS: Final = 5
_SENDS: Final = 3000
_CONSUMED: Final = 20_000
_ACKED: Final = 4000
_RATE: Final = 500
_LATENCY_SECONDS: Final = 5
_LATENCY_ROUNDS: Final = 3
_IDLE_TOPICS: Final = 1000
_IDLE_CONSUMERS: Final = 200
_IDLE_SECONDS: Final = 10.0
_STAMP: Final = struct.Struct("<Q")
_WAIT_SECONDS: Final = 60.0


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    _need_client()
    consumed = run.scaled(_CONSUMED, at_least=1000)
    # A window over the backlog: without acknowledgements all of it is delivered.
    with (
        broker(
            run.path("data"), ISTER_DISPATCH__MAX_UNACKED_MESSAGES=str(min(100_000, 2 * consumed))
        ) as served,
        bare_server(consumed) as bare,
    ):
        asyncio.run(_measure(run, served["grpc"], bare["grpc"], consumed))
        broker_flight.measure(run, served["flight"])
    # Others: what was delivered above and never acknowledged would be delivered again meanwhile.
    with broker(run.path("latency")) as served, bare_server(0) as bare:
        asyncio.run(_measure_latency(run, served["grpc"], bare["grpc"]))
    broker_engines.measure(run)
    with broker(run.path("slow")) as served:
        asyncio.run(measure_slow(run, served["grpc"], _client, _consumer))
    with broker(run.path("idle")) as served:
        asyncio.run(_measure_idle(run, served["grpc"], served["pid"]))
    with broker(run.path("abuse")) as served:
        broker_abuse.measure(run, served, served["pid"])
    broker_reads.measure(run)


def _need_client() -> None:
    try:
        import danube  # noqa: F401, PLC0415 - Danube's client, for tests and benchmarks alone
    except ImportError as error:
        raise missing_extra("benchmarks broker", "dev", error) from error


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[DanubeClient]:
    from danube import DanubeClientBuilder  # noqa: PLC0415 - as above

    client = await DanubeClientBuilder().service_url(f"http://{address}").build()
    try:
        yield client
    finally:
        for connection in client.connection_manager._connections.values():  # noqa: SLF001
            # The client has no close of its own.
            await connection.channel.close()


@asynccontextmanager
async def _producer(client: DanubeClient, topic: str) -> AsyncIterator[Producer]:
    from danube import DispatchStrategy  # noqa: PLC0415 - as above

    producer = (
        client.new_producer()
        .with_topic(topic)
        .with_name("bench")
        .with_dispatch_strategy(DispatchStrategy.RELIABLE)
        .build()
    )
    await producer.create()
    try:
        yield producer
    finally:
        await producer.close()


@asynccontextmanager
async def _consumer(
    client: DanubeClient,
    topic: str,
    subscription: str,
    before: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[Consumer, asyncio.Queue[StreamMessage]]]:
    from danube import SubType  # noqa: PLC0415 - as above

    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("bench")
        .with_subscription(subscription)
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    if before is not None:
        await before()
    queue = await consumer.receive()
    try:
        yield consumer, queue
    finally:
        await consumer.close()


async def _measure(run: Run, served: str, bare: str, consumed: int) -> None:
    async with _client(served) as client, _client(bare) as bare_client:
        await _measure_sends(run, client, bare_client)
        await _fill(client, consumed)
        await _measure_consuming(run, client, served, bare_client, consumed)


async def _measure_sends(run: Run, client: DanubeClient, bare: DanubeClient) -> None:
    count = run.scaled(_SENDS, at_least=100)
    messages = payloads(count)
    rates: dict[str, list[float]] = {"broker": [], "bare": []}
    async with _producer(client, "/default/sends") as one, _producer(bare, "/default/sends") as two:
        for _ in range(_ROUNDS):
            for name, producer in (("broker", one), ("bare", two)):
                elapsed = stopwatch()
                for payload in messages:
                    await producer.send(payload)
                rates[name].append(count / elapsed())
    run.add(
        "acked sends, synced, 1 KiB, one at a time",
        median(rates["broker"]),
        "msg/s",
        limit=median(rates["bare"]),
        limit_name="the same client on an empty handler",
        at_least=0.5,
        on="ratio",
    )


async def _fill(client: DanubeClient, count: int) -> None:
    """Publishes a backlog, many sends at a time."""
    async with _producer(client, _TOPIC) as producer:
        messages = iter(payloads(count))

        async def send() -> None:
            for payload in messages:
                await producer.send(payload)

        await asyncio.gather(*(send() for _ in range(64)))


async def _measure_consuming(
    run: Run,
    client: DanubeClient,
    address: str,
    bare: DanubeClient,
    count: int,
) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        admin = stub(channel, "ister.Admin")

        async def rewind(subscription: str) -> None:
            await admin.Seek(
                ister_api.SeekRequest(topic=_TOPIC, subscription=subscription, earliest=True)
            )

        for name, part, is_acked, at_least in (
            ("consume", count, False, 0.5),
            ("consume, an ack for each", min(count, run.scaled(_ACKED, at_least=200)), True, 0.5),
        ):
            rates: dict[str, list[float]] = {"broker": [], "bare": []}
            for number in range(_ROUNDS):
                subscription = f"{name.split(',')[0]}-{is_acked}-{number}"
                rates["broker"].append(
                    await _consume(
                        client, subscription, part, is_acked, partial(rewind, subscription)
                    )
                )
                rates["bare"].append(await _consume(bare, "bench", part, is_acked, None))
            run.add(
                f"{name}, 1 KiB, Danube's client",
                median(rates["broker"]),
                "msg/s",
                limit=median(rates["bare"]),
                limit_name="the same client on a bare stream of the same messages"
                + (", acks answered by an empty handler" if is_acked else ""),
                at_least=at_least,
                on="ratio",
            )


async def _consume(
    client: DanubeClient,
    subscription: str,
    count: int,
    is_acked: bool,
    before: Callable[[], Awaitable[None]] | None,
) -> float:
    async with _consumer(client, _TOPIC, subscription, before) as (consumer, queue):
        await asyncio.wait_for(queue.get(), _WAIT_SECONDS)
        elapsed = stopwatch()
        for _ in range(count - 1):
            message = await queue.get()
            if is_acked:
                await consumer.ack(message)
        return (count - 1) / elapsed()


async def _measure_latency(run: Run, served: str, bare: str) -> None:
    times: dict[str, list[float]] = {"broker": [], "bare": []}
    async with _client(served) as client, _client(bare) as bare_client:
        for _ in range(_LATENCY_ROUNDS):
            for name, one in (("broker", client), ("bare", bare_client)):
                times[name] += await _delivery_times(one, 1 if run.is_quick else _LATENCY_SECONDS)
    for name, q, at_most in (("p50", 0.5, 5.0), ("p99", 0.99, 25.0)):
        run.add(
            f"publish to consumer at {_RATE} msg/s, {name}",
            quantile(times["broker"], q),
            "ms",
            limit=quantile(times["bare"], q),
            limit_name="the same client on a server that passes messages on and keeps nothing",
            at_most=at_most,
        )


async def _delivery_times(client: DanubeClient, seconds: int) -> list[float]:
    """From just before a send to the moment at which the consumer has the message, in ms."""
    count = _RATE * seconds
    topic = "/default/latency"
    padding = bytes(MESSAGE_BYTES - _STAMP.size)
    times: list[float] = []
    # Those that are done are let go of: a heap that grows makes the collector stop this client.
    under_way: set[asyncio.Future[object]] = set()

    failures: list[BaseException] = []

    def begin(work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        under_way.add(task)
        task.add_done_callback(end)

    def end(task: asyncio.Future[object]) -> None:
        under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)

    async with (
        _producer(client, topic) as producer,
        _consumer(client, topic, "latency") as (consumer, queue),
    ):

        async def receive() -> None:
            for _ in range(count):
                message = await queue.get()
                (sent,) = _STAMP.unpack_from(message.payload)
                times.append((time.perf_counter_ns() - sent) / 1e6)
                begin(consumer.ack(message))

        receiving = asyncio.ensure_future(receive())
        loop = asyncio.get_running_loop()
        started = loop.time()
        for number in range(count):
            await asyncio.sleep(max(0.0, started + number / _RATE - loop.time()))
            begin(producer.send(_STAMP.pack(time.perf_counter_ns()) + padding))
        try:
            await asyncio.wait_for(receiving, _WAIT_SECONDS)
        except TimeoutError as error:
            raise UnavailableError("messages are missing") from (failures or [error])[0]
        await asyncio.gather(*under_way)
    if failures:
        raise failures[0]
    return times


async def _measure_idle(run: Run, address: str, pid: int) -> None:
    topics = run.scaled(_IDLE_TOPICS, at_least=20)
    consumers = run.scaled(_IDLE_CONSUMERS, at_least=4)
    async with _client(address) as client, grpc.aio.insecure_channel(address) as channel:
        admin = stub(channel, "ister.Admin")
        for number in range(topics):
            await admin.CreateTopic(ister_api.CreateTopicRequest(topic=f"/default/idle-{number}"))
        held = [
            _consumer(client, f"/default/idle-{number % topics}", f"idle-{number}")
            for number in range(consumers)
        ]
        for one in held:
            await one.__aenter__()
        try:
            await asyncio.sleep(2.0)
            before, elapsed = cpu_seconds(pid), stopwatch()
            await asyncio.sleep(_IDLE_SECONDS if not run.is_quick else 1.0)
            share = 100 * (cpu_seconds(pid) - before) / elapsed()
            memory = broker_abuse.resident_mib(pid)
        finally:
            for one in held:
                await one.__aexit__(None, None, None)
    what = f"{topics} idle topics, {consumers} consumers"
    run.add(f"{what}: memory", memory, "MiB", at_most=600.0)
    run.add(f"{what}: processor", share, "% of a core", at_most=5.0)
