"""A program of the endurance run: producers, or consumers, of both clients, in one process.

    python -m fault.endurance_program producers OPTIONS FILE SEED
    python -m fault.endurance_program residents OPTIONS FILE SEED
    python -m fault.endurance_program guests    OPTIONS FILE SEED

Each topic has four producers (two of ister.client, two of danube-client, one of which does not
count its messages), and a subscription of every kind. Each place for a consumer is taken by one
after the other, of one client or the other, which stay for some seconds and leave in order or
without a word. `residents` makes the topics and subscriptions, and moves subscriptions back now and
then; `guests` are there to be stopped and killed by the runner. OPTIONS is an `Options` as JSON.

danube-client looks a topic up at the broker that had it last. Where that one is gone for good, a
program has to make a client anew: these do, at a broker chosen at random, when a call has failed.

Every step is appended to FILE before it is made, one write(2) each, so that a kill takes no record
of what others may have seen: see `endurance_judge`. Prints a line when it is at work. No seeks are
made after SIGUSR1. Ends on SIGTERM: producers when everything that they sent is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import grpc
from danube import DispatchStrategy, Producer, ProducerOptions, SubType
from danube.errors import DanubeError

from ister.client import AsyncClient, AsyncSentMessage
from ister.errors import InvariantError, IsterError, WaitTimeoutError
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from tests.support.broker_load import quick_session
from tests.support.danube import Danube
from tests.support.endurance_judge import EXCLUSIVE, FAILOVER, KEY_SHARED, SHARED
from tests.support.oracle import identify, payload_of

_KINDS = {
    EXCLUSIVE: SubType.EXCLUSIVE,
    SHARED: SubType.SHARED,
    FAILOVER: SubType.FAILOVER,
    KEY_SHARED: SubType.KEY_SHARED,
}
_KEYS = 16
_PAUSE_SECONDS = 1 / 15
"""Between two messages of a producer, on average."""
_STAY_SECONDS = (2.0, 20.0)
_NACK_CHANCE = 0.02
_SEEK_SECONDS = (4.0, 12.0)
_SEEK_MESSAGES_MAX = 3000
_RETRY_SECONDS = 0.1
_CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """A place for a consumer of a subscription, which has the name of its kind."""

    topic: str
    kind: str


def resident_places(topics: Sequence[str]) -> list[Place]:
    """Places of consumers that stay; every other topic has its exclusive one elsewhere."""
    shared = (SHARED, SHARED, KEY_SHARED, KEY_SHARED)
    kinds = ((EXCLUSIVE, FAILOVER, *shared), (FAILOVER, *shared))
    return [Place(topic, kind) for at, topic in enumerate(topics) for kind in kinds[at % 2]]


def guest_places(topics: Sequence[str]) -> list[Place]:
    """Places of consumers that are stopped and killed."""
    kinds = ((FAILOVER, SHARED, KEY_SHARED), (FAILOVER, SHARED, KEY_SHARED, EXCLUSIVE))
    return [Place(topic, kind) for at, topic in enumerate(topics) for kind in kinds[at % 2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the programs of a run have in common.

    Args:
        addresses: Where brokers are.
        topics: Names of the topics.
        ack: Their ack level; the broker's default if it is None.
        has_danube: Whether there are programs of danube-client; else all are of ister.client.
        has_seeks: Whether subscriptions are moved back.
        timeout: How long ister.client's producers try to send before they fail, in seconds.
    """

    addresses: Sequence[str]
    topics: Sequence[str] = ("/default/left", "/default/right")
    ack: str | None = None
    has_danube: bool = True
    has_seeks: bool = True
    timeout: float | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        return cls(**json.loads(text))


class Program:
    """What all of them share: the file of records, the two clients and the signal to end."""

    def __init__(self, options: Options, path: str, seed: str) -> None:
        self.options = options
        self.seed = seed
        self.client = AsyncClient(options.addresses, timeout=math.inf)
        self.ending = asyncio.Event()
        self.is_calm = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(self, kind: str, *what: object) -> int:
        at = time.monotonic_ns()
        os.write(self._file, json.dumps((kind, at, *what)).encode() + b"\n")
        return at

    def chance(self, *of: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *of))))

    def session(self, chance: random.Random) -> Danube:
        """Danube's client, which knows of one broker to begin with."""
        return quick_session(chance.choice(self.options.addresses))

    async def pause(self, seconds: float) -> None:
        """Waits so long, or until it is to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), seconds)


# -- producers ------------------------------------------------------------------------------


async def produce(program: Program) -> None:
    async with asyncio.TaskGroup() as group:
        for number, topic in enumerate(program.options.topics):
            for which in range(2):
                group.create_task(_produce_ister(program, topic, f"i{number}{which}"))
                if program.options.has_danube:
                    group.create_task(
                        _produce_danube(program, topic, f"d{number}{which}", is_counted=which == 1)
                    )


async def _produce_ister(program: Program, topic: str, name: str) -> None:
    chance = program.chance(name)
    pending: deque[tuple[int, AsyncSentMessage]] = deque()
    is_over = False

    async def collect() -> None:
        while pending or not is_over:
            if not pending:
                await asyncio.sleep(0.01)
                continue
            number, sent = pending[0]
            program.record("sent", topic, name, number, await sent)
            pending.popleft()

    timeout = program.options.timeout
    async with program.client.producer(topic, name=name, timeout=timeout) as producer:
        program.record("producer", topic, name, True)
        collecting = asyncio.create_task(collect())
        number = 0
        while not program.ending.is_set():
            key = f"key-{chance.randrange(_KEYS)}"
            program.record("send", topic, name, number, key)
            sent = await producer.send(payload_of(f"{name}.{number}"), routing_key=key)
            pending.append((number, sent))
            number += 1
            await program.pause(chance.expovariate(1 / _PAUSE_SECONDS))
        is_over = True
        await collecting


async def _produce_danube(program: Program, topic: str, name: str, *, is_counted: bool) -> None:
    chance = program.chance(name)
    line = _DanubeLine(program, topic, name)
    await line.use(lambda _: _nothing())
    program.record("producer", topic, name, is_counted)
    number = 0
    while not program.ending.is_set():
        key = f"key-{chance.randrange(_KEYS)}"
        attributes = {"ister-sequence": str(number)} if is_counted else {}
        payload = payload_of(f"{name}.{number}")
        program.record("send", topic, name, number, key)
        await line.use(lambda made, p=payload, a=attributes, k=key: made.send_with_key(p, a, k))
        program.record("sent", topic, name, number, None)
        number += 1
        await program.pause(chance.expovariate(1 / _PAUSE_SECONDS))
    await line.close()


async def _nothing() -> None:
    """The call of a line that has only to be open."""


class _DanubeLine:
    """A producer of danube-client that is made anew at any broker when a call has failed."""

    def __init__(self, program: Program, topic: str, name: str) -> None:
        self._program = program
        self._chance = program.chance(name, "line")
        self._topic = topic
        self._name = name
        self._session: Danube | None = None
        self._producer: Producer | None = None

    async def use(self, call: Callable[[Producer], Awaitable[object]]) -> None:
        """Makes the call until it works."""
        while True:
            try:
                if self._producer is None:
                    await self._open()
                await call(self._producer)
                return
            except (grpc.aio.AioRpcError, DanubeError) as error:
                if _is_a_bug(error):
                    raise
                if len(self._program.options.addresses) > 1:
                    await self.close()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _open(self) -> None:
        if self._session is None:
            self._session = self._program.session(self._chance)
        builder = self._session.client.new_producer().with_topic(self._topic).with_name(self._name)
        builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
        builder.with_options(ProducerOptions(base_backoff_ms=50, max_backoff_ms=200))
        made = builder.build()
        await made.create()
        self._producer = made

    async def close(self) -> None:
        producer, session = self._producer, self._session
        self._producer = self._session = None
        if producer is not None:
            await producer.close()
        if session is not None:
            await session.close()


# -- consumers ------------------------------------------------------------------------------


async def consume(program: Program, places: Sequence[Place], who: str) -> None:
    async with asyncio.TaskGroup() as group:
        for number, place in enumerate(places):
            group.create_task(_fill(program, place, f"{who}-{os.getpid()}-{number}"))


async def _fill(program: Program, place: Place, name: str) -> None:
    """One consumer after the other."""
    chance = program.chance(name)
    visit = 0
    while not program.ending.is_set():
        visit += 1
        is_danube = chance.random() < 0.5 and program.options.has_danube
        work = _consume_danube if is_danube else _consume_ister
        until = time.monotonic() + chance.uniform(*_STAY_SECONDS)
        try:
            await work(program, place, f"{name}-{visit}", until, chance)
        except (IsterError, grpc.aio.AioRpcError, DanubeError) as error:
            # The one before it may still count as connected; or the broker is away.
            if _is_a_bug(error):
                raise
            print(f"{place.kind} {name}: {error}", file=sys.stderr, flush=True)
            await program.pause(_RETRY_SECONDS)


def _is_a_bug(error: IsterError | grpc.aio.AioRpcError | DanubeError) -> bool:
    if not isinstance(error, grpc.aio.AioRpcError):
        return isinstance(error, InvariantError)
    return error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


async def _consume_ister(
    program: Program, place: Place, name: str, until: float, chance: random.Random
) -> None:
    topic, kind = place.topic, place.kind
    consumer = await program.client.consumer(
        topic, kind, name=name, kind=kind, timeout=_CALL_SECONDS
    )
    program.record("join", topic, kind, name)
    try:
        while not program.ending.is_set() and (left := until - time.monotonic()) > 0:
            try:
                message = await consumer.receive(min(left, 1.0))
            except WaitTimeoutError:
                continue
            key = message.routing_key or ""
            program.record("got", topic, kind, name, message.offset, identify(message.payload), key)
            if chance.random() < _NACK_CHANCE:
                program.record("nack", topic, kind, message.offset)
                consumer.nack(message)
            else:
                program.record("ack", topic, kind, message.offset)
                consumer.ack(message)
    finally:
        is_orderly = chance.random() < 0.5
        with contextlib.suppress(WaitTimeoutError):
            await consumer.close(_CALL_SECONDS if is_orderly else 0.0)
        program.record("leave", topic, kind, name)


async def _consume_danube(
    program: Program, place: Place, name: str, until: float, chance: random.Random
) -> None:
    topic, kind = place.topic, place.kind
    session = program.session(chance)
    try:
        made = await session.subscribe(topic, name, subscription=kind, kind=_KINDS[kind])
        queue = await made.receive()
        program.record("join", topic, kind, name)
        while not program.ending.is_set() and (left := until - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(queue.get(), min(left, 1.0))
            except TimeoutError:
                continue
            offset = message.msg_id.topic_offset
            program.record(
                "got", topic, kind, name, offset, identify(message.payload), message.routing_key
            )
            with contextlib.suppress(grpc.aio.AioRpcError):  # it comes again
                if chance.random() < _NACK_CHANCE:
                    program.record("nack", topic, kind, offset)
                    await made.nack(message, reason="not today")
                else:
                    program.record("ack", topic, kind, offset)
                    await made.ack(message)
    finally:
        await session.close()
        program.record("leave", topic, kind, name)


# -- subscriptions --------------------------------------------------------------------------


async def subscribe(program: Program) -> None:
    """Makes topics and subscriptions. No message counts as poison, however often it comes."""
    policy = FailurePolicy(
        max_redelivery_count=1_000_000,
        ack_timeout_ms=30_000,
        base_redelivery_delay_ms=20,
        max_redelivery_delay_ms=100,
        backoff=Backoff.FIXED,
        poison=PoisonPolicy.BLOCK,
    )
    for topic in program.options.topics:
        await program.client.admin.create_topic(topic, ack=program.options.ack)
        for kind in _KINDS:
            consumer = await program.client.consumer(topic, kind, kind=kind, start="earliest")
            await consumer.close()
            await program.client.admin.set_failure_policy(topic, kind, policy)
            program.record("subscribed", topic, kind, kind)


async def seek(program: Program) -> None:
    """Moves a subscription back now and then, never past what it has not acknowledged."""
    chance = program.chance("seek")
    client = program.client
    while True:
        await program.pause(chance.uniform(*_SEEK_SECONDS))
        if program.ending.is_set() or program.is_calm:
            return
        topic, kind = chance.choice(program.options.topics), chance.choice(list(_KINDS))
        cursor = (await client.admin.describe_subscription(topic, kind)).cursor
        target = max(0, cursor - chance.randrange(_SEEK_MESSAGES_MAX))
        began = program.record("seek", topic, kind, target)
        await client.admin.seek(topic, kind, to=target)
        program.record("sought", topic, kind, target, began)


async def main(role: str, text: str, path: str, seed: str) -> None:
    program = Program(Options.decode(text), path, seed)
    topics = program.options.topics
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, program.ending.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(program, "is_calm", True))
    if role == "residents":
        await subscribe(program)
    print("at work", flush=True)
    if role == "producers":
        await produce(program)
    elif role == "guests":
        await consume(program, guest_places(topics), "guest")
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(program, resident_places(topics), "resident"))
            if program.options.has_seeks:
                group.create_task(seek(program))
    await program.client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
