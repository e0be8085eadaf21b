"""Programs that use a broker with Danube's own client while somebody kills it.

`Load` has four producers and six subscriptions on two topics, and tells a `DeliveryHistory` all
that they do and see:

    /default/left    plain, numbered    exclusive · shared by two · exclusive that nacks at random
    /default/right   plain, numbered    failover of two · key-shared by three · one slow and late

Every message has a key. The programs do what careful ones do: a send is repeated until it is
answered, an ack that failed is repeated or left alone, and the client is used as it comes. What is
wrapped are single methods of its objects, so that every call is seen. What is set, for most, is how
soon they try again. Brokers here hardly live longer than the second and more that producers and
channels pause; and consumers, which do not pause at all, would take a processor from a broker that
starts. One producer and some consumers are left with what is usual.

`Lives` is the broker: the same directory and ports, one process after the other.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from danube import Consumer, DispatchStrategy, Producer, ProducerOptions, SubType

import ister
from tests.servers.broker import BrokerProcess, broker_settings
from tests.support.danube import Danube
from tests.support.delivery_history import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    DeliveryHistory,
    Entry,
    Stream,
)
from tests.support.oracle import payload_of
from tests.support.scale import scaled

__all__ = ["FLUSH_SECONDS", "LEFT", "RIGHT", "Lives", "Load", "quick_session", "read_logs"]

LEFT, RIGHT = "/default/left", "/default/right"
FLUSH_SECONDS = 1.0
"""How often the broker writes cursors: as often as it can be told to."""
WRITE_SECONDS = scaled(30.0, 3.0)
"""How late a write may be on two busy cores; by day, wherever the tests run."""
SETTINGS = {
    "storage": {"wal": {"rotate_max_bytes": 16384}},
    "dispatch": {
        "max_unacked_messages": 40,
        "progress_flush_interval_seconds": int(FLUSH_SECONDS),
        "progress_min_offset_delta": 25,
    },
}
_KINDS = {
    EXCLUSIVE: SubType.EXCLUSIVE,
    SHARED: SubType.SHARED,
    FAILOVER: SubType.FAILOVER,
    KEY_SHARED: SubType.KEY_SHARED,
}
_KEYS = 8
_REOPEN_SECONDS = 0.02
_PATIENCE_SECONDS = 200.0
"""More than the two minutes that a channel of gRPC may pause when it was refused often enough."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A subscription and what its consumers do."""

    name: str
    topic: str
    kind: str
    consumers: int = 1
    nack_chance: float = 0.0
    is_slow: bool = False


PLANS = (
    Plan("alone", LEFT, EXCLUSIVE),
    Plan("pair", LEFT, SHARED, 2),
    Plan("nacking", LEFT, EXCLUSIVE, nack_chance=0.1),
    Plan("standby", RIGHT, FAILOVER, 2),
    Plan("keyed", RIGHT, KEY_SHARED, 3, nack_chance=0.02),
    Plan("slow", RIGHT, SHARED, is_slow=True),
)
LATE = Plan("late", LEFT, EXCLUSIVE)
"""One more, which is made while the others are at work."""


class Lives:
    """One broker after the other in the same place, each with its own failpoints."""

    def __init__(
        self,
        directory: Path,
        history: DeliveryHistory,
        settings: Mapping[str, Any] = SETTINGS,
    ) -> None:
        self.directory = directory
        self.history = history
        self.settings = dict(settings)
        self._process = BrokerProcess(directory, settings=settings)
        self.address = ""
        self._ready_at = 0.0

    async def launch(
        self, *, failpoint: str | None = None, kill_after: float | None = None
    ) -> bool:
        """Starts the next one; whether it got as far as being ready.

        Args:
            failpoint: Where it dies by itself, for ISTER_FAILPOINTS.
            kill_after: It is killed after so many seconds, if it is not ready by then.
        """
        if self.address:
            self._process = self._next_process(failpoint)
        self.history.launched()
        began = self.history.now()
        starting = asyncio.ensure_future(asyncio.to_thread(self._process.start))
        if kill_after is not None:
            await asyncio.wait([starting], timeout=kill_after)
            if not starting.done():
                os.kill(self._process.pid, signal.SIGKILL)
        try:
            await starting
        except RuntimeError as error:
            may_die = failpoint is not None or kill_after is not None
            if not may_die or "did not start" not in str(error):
                raise
            self.history.killed(began)
            return False
        self.address = self._process.address
        self._ready_at = self.history.now()
        return True

    def _next_process(self, failpoint: str | None) -> BrokerProcess:
        """Like the one before and at its ports, but with a failpoint of its own."""
        before = self._process
        ports = {
            name: int(address.rpartition(":")[2])
            for name, address in (
                ("grpc", before.address),
                ("flight", before.flight),
                ("http", before.http),
            )
        }
        made = BrokerProcess(
            self.directory,
            settings={**self.settings, "broker": {"ports": ports}},
            environment={"ISTER_FAILPOINTS": failpoint} if failpoint else {},
        )
        made.address, made.flight, made.http = before.address, before.flight, before.http
        return made

    @property
    def log(self) -> str:
        """What all of them wrote."""
        return self._process.log

    async def kill(self) -> None:
        """SIGKILL, unless it is dead already."""
        since = self.history.now()
        await asyncio.to_thread(self._process.kill)
        self.history.killed(since)

    async def wait_for_death(self, seconds: float) -> bool:
        """Waits for it to die by itself; whether it did."""
        seen_alive = self._ready_at
        deadline = self.history.now() + seconds
        while True:
            since = self.history.now()
            if not self._process.is_running:
                await asyncio.to_thread(self._process.kill)
                self.history.killed(seen_alive)
                return True
            seen_alive = since
            if since >= deadline:
                return False
            await asyncio.sleep(0.02)

    async def stop(self) -> float:
        """SIGTERM: it has to end with 0 in time. How long it took."""
        since = self.history.now()
        await asyncio.to_thread(self._process.stop)
        self.history.stopped(since)
        return self.history.now() - since

    def end(self) -> None:
        """Whatever state it is in: nobody looks at it any more."""
        self._process.kill()


def read_logs(directory: Path, settings: Mapping[str, Any] = SETTINGS) -> dict[str, list[Entry]]:
    """Both topics as the core reads them, with no broker in between."""
    tree = broker_settings(directory, settings)
    del tree["broker"]
    with ister.open(tree) as log:
        read = {}
        for name in (LEFT, RIGHT):
            topic = log.topic(name)
            assert not topic.damage, f"{name} is quarantined: {topic.damage}"
            read[name] = [
                Entry(message.offset, message.payload, message.record.routing_key or "")
                for message in topic.read("earliest")
            ]
        return read


def quick_session(address: str) -> Danube:
    """Danube's client with a connection of its own that is tried again soon after a failure."""
    session = Danube(address, own_connection=True)
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 200),
    ]

    def connect(url: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(url.removeprefix("http://"), options=options)

    session.client.connection_manager._create_channel = connect
    return session


class Load:
    """The producers and consumers. Use as an asynchronous context manager."""

    def __init__(
        self,
        lives: Lives,
        history: DeliveryHistory,
        seed: int,
        *,
        pause_seconds: float = 0.012,
        more_producers: int = 0,
        is_strict: bool = True,
    ) -> None:
        self.lives = lives
        self.history = history
        self.seed = seed
        self.errors: Counter[str] = Counter()
        """What calls ended with, by status."""
        self.wrong: list[str] = []
        """What programs that only retry UNAVAILABLE could not have dealt with."""
        self._pause = pause_seconds
        self._more_producers = more_producers
        self._is_strict = is_strict
        self._plans = list(PLANS)
        self._is_ending = False
        self._sessions: list[Danube] = []
        self._as_it_comes: Danube | None = None
        self._consumers: list[Consumer] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        quick, slow = self._session(is_quick=True), self._session(is_quick=True)
        as_it_comes = self._as_it_comes = self._session(is_quick=False)
        producers = [
            await self._producer(session, name, topic, is_sequenced=is_sequenced)
            for session, name, topic, is_sequenced in (
                (quick, "p0", LEFT, False),
                (quick, "p1", LEFT, True),
                (as_it_comes, "p2", RIGHT, False),
                (quick, "p3", RIGHT, True),
                *((quick, f"q{n}", LEFT, n % 2 == 1) for n in range(self._more_producers)),
            )
        ]
        for plan in self._plans:
            for number in range(plan.consumers):
                # The last of several consumers has the client with gRPC's own pauses.
                session = slow if plan.is_slow else as_it_comes if number else quick
                await self._consumer(session, plan, f"{plan.name}-{number}")
        for made in producers:
            self._producing.append(asyncio.create_task(self._produce(*made)))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._producing, *self._consuming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for consumer in self._consumers:
            consumer._shutdown.set()
        await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        for session in self._sessions:
            await session.close()

    def _session(self, *, is_quick: bool) -> Danube:
        address = self.lives.address
        made = quick_session(address) if is_quick else Danube(address, own_connection=True)
        self._sessions.append(made)
        return made

    async def subscribe_late(self) -> None:
        """Makes one more subscription, which gets what is sent from then on."""
        await self._consumer(self._sessions[0], LATE, f"{LATE.name}-0")
        self._plans.append(LATE)

    def check_alive(self) -> None:
        """Fails if a program has ended, or if its calls ended in a way that it cannot deal with."""
        for task in (*self._producing, *self._consuming):
            if task.done() and not task.cancelled():
                task.result()
        assert not (self._is_strict and self.wrong), self.wrong[:5]

    async def wait_for_answers(self, count: int, seconds: float) -> bool:
        """Waits until so many further sends are answered; whether they were."""
        target, deadline = self.history.answers + count, self.history.now() + seconds
        while self.history.answers < target:
            if self.history.now() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    # -- producers --------------------------------------------------------------------------

    async def _producer(
        self, session: Danube, name: str, topic: str, *, is_sequenced: bool
    ) -> tuple[Producer, str, bool]:
        builder = session.client.new_producer().with_topic(topic).with_name(name)
        builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
        if session is not self._as_it_comes:
            builder.with_options(ProducerOptions(base_backoff_ms=50, max_backoff_ms=200))
        producer = builder.build()
        session._producers.append(producer)
        await producer.create()
        self.history.producer(name, topic, is_sequenced=is_sequenced)
        [part] = producer._producers
        part.send = self._watched_send(part.send)
        return producer, name, is_sequenced

    def _watched_send(self, send: Any) -> Any:
        async def watched(data: bytes, *arguments: Any) -> int:
            attempt = self.history.attempt(data.partition(b"|")[0].decode())
            try:
                answer = await send(data, *arguments)
            except BaseException:
                self.history.failed(attempt)
                raise
            self.history.answered(attempt)
            return answer

        return watched

    async def _produce(self, producer: Producer, name: str, is_sequenced: bool) -> None:
        chance = random.Random(f"{self.seed}/{name}")
        number = 0
        while not self._is_ending:
            message_id, key = f"{name}.{number}", f"key-{chance.randrange(_KEYS)}"
            attributes = {"ister-sequence": str(number)} if is_sequenced else {"kind": "plain"}
            self.history.send(name, message_id, key)
            while True:
                try:
                    await producer.send_with_key(payload_of(message_id), attributes, key)
                    break
                except grpc.aio.AioRpcError as error:
                    # The client gave up; it does when it cannot register anew.
                    self._note(f"send {message_id}", error)
                    await asyncio.sleep(0.1)
            number += 1
            await asyncio.sleep(chance.expovariate(1 / self._pause))

    def _note(self, what: str, error: grpc.aio.AioRpcError) -> None:
        self.errors[f"{what.partition(' ')[0]} {error.code().name}"] += 1
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            self.wrong.append(f"{what}: {error.code().name} {error.details()}")

    # -- consumers --------------------------------------------------------------------------

    async def _consumer(self, session: Danube, plan: Plan, name: str) -> None:
        builder = session.client.new_consumer().with_topic(plan.topic).with_consumer_name(name)
        builder.with_subscription(plan.name).with_subscription_type(_KINDS[plan.kind])
        consumer = builder.build()
        await consumer.subscribe()
        if name.endswith("-0"):
            self.history.subscription(plan.name, plan.topic, plan.kind)
        if plan.nack_chance and name.endswith("-0"):
            await session.set_failure_policy(
                plan.topic, subscription=plan.name, retries=100, delay_ms=20, max_delay_ms=100
            )
        [part] = consumer._consumers.values()
        pause = 0.0 if session is self._as_it_comes else _REOPEN_SECONDS
        part.receive = self._watched_receive(part.receive, plan.name, name, pause)
        self._consumers.append(consumer)
        queue = await consumer.receive()
        work = self._consume_slowly if plan.is_slow else self._consume
        self._consuming.append(asyncio.create_task(work(consumer, queue, plan, name)))

    def _watched_receive(self, receive: Any, subscription: str, consumer: str, pause: float) -> Any:
        stream: Stream | None = None

        async def watched() -> _WatchedStream:
            nonlocal stream
            if stream is not None and not stream.deliveries:
                await asyncio.sleep(pause)
            stream = self.history.opening(subscription, consumer)
            return _WatchedStream(await receive(), stream, self.history)

        return watched

    async def _consume(
        self, consumer: Consumer, queue: asyncio.Queue[Any], plan: Plan, name: str
    ) -> None:
        chance = random.Random(f"{self.seed}/{name}")
        while True:
            message = await queue.get()
            if chance.random() < plan.nack_chance:
                await self._nack(consumer, plan, message)
            else:
                await self._ack(consumer, plan, message, chance)

    async def _consume_slowly(
        self, consumer: Consumer, queue: asyncio.Queue[Any], plan: Plan, name: str
    ) -> None:
        """Takes some messages, thinks about them, and acknowledges them in any order."""
        chance = random.Random(f"{self.seed}/{name}")
        while True:
            some = [await queue.get()]
            while not queue.empty() and len(some) < 60:
                some.append(queue.get_nowait())
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            chance.shuffle(some)
            for message in some:
                await self._ack(consumer, plan, message, chance)

    async def _ack(
        self, consumer: Consumer, plan: Plan, message: Any, chance: random.Random
    ) -> None:
        while True:
            ack = self.history.ack(plan.name, message.msg_id.topic_offset)
            try:
                await consumer.ack(message)
            except grpc.aio.AioRpcError as error:
                self._note(f"ack {plan.name}@{message.msg_id.topic_offset}", error)
                if chance.random() < 0.5:
                    return  # it comes again: the broker died with it
                await asyncio.sleep(0.1)
            else:
                self.history.acked(ack)
                return

    async def _nack(self, consumer: Consumer, plan: Plan, message: Any) -> None:
        nack = self.history.nack(plan.name, message.msg_id.topic_offset)
        try:
            await consumer.nack(message, reason="not today")
        except grpc.aio.AioRpcError as error:
            self._note(f"nack {plan.name}@{message.msg_id.topic_offset}", error)
        finally:
            self.history.nacked(nack)

    # -- the end ----------------------------------------------------------------------------

    async def finish(self) -> None:
        """No new messages; returns when every subscription has acknowledged everything."""
        self._is_ending = True
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await asyncio.gather(*self._producing)
        lags: dict[str, str] = {}
        session = self._session(is_quick=True)
        deadline = self.history.now() + _PATIENCE_SECONDS
        while True:
            self.check_alive()
            for plan in self._plans:
                answer = await session.describe(plan.topic, plan.name)
                lags[plan.name] = str(answer) if answer.lag else ""
            if not any(lags.values()):
                return
            assert self.history.now() < deadline, f"not delivered: {lags}\n{self.lives.log[-3000:]}"
            await asyncio.sleep(0.1)


class _WatchedStream:
    """A stream of messages that tells the history about each as it comes."""

    def __init__(self, call: Any, stream: Stream, history: DeliveryHistory) -> None:
        self._messages = call.__aiter__()
        self._stream = stream
        self._history = history

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._messages.__anext__()
        except BaseException:
            self._history.closed(self._stream)
            raise
        self._history.delivered(
            self._stream, message.msg_id.topic_offset, message.payload, message.routing_key
        )
        return message
