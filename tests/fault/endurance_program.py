"""A program of the endurance run: producers, or consumers, of both clients, in one process.

    python -m fault.endurance_program producers ADDRESS FILE SEED
    python -m fault.endurance_program residents ADDRESS FILE SEED
    python -m fault.endurance_program guests    ADDRESS FILE SEED

Two topics have four producers each (two of ister.client, two of danube-client, one of which does
not count its messages), and a subscription of every kind. Each place for a consumer is taken by one
after the other, of one client or the other, which stay for some seconds and leave in order or
without a word. `residents` makes the subscriptions, and moves them back now and then; `guests` are
there to be stopped and killed by the runner.

Every step is appended to FILE before it is made, one write(2) each, so that a kill takes no record
of what others may have seen: see `endurance_judge`. Prints a line when it is at work. No seeks are
made after SIGUSR1. Ends on SIGTERM: producers when everything that they sent is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import grpc
from danube import DispatchStrategy, ProducerOptions, SubType

from fault.broker_load import quick_session
from fault.endurance_judge import EXCLUSIVE, FAILOVER, KEY_SHARED, SHARED
from fault.oracle import identify, payload_of
from ister.client import AsyncClient, AsyncSentMessage
from ister.errors import InvariantError, IsterError, WaitTimeoutError
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy

TOPICS = ("/default/left", "/default/right")
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


RESIDENTS = tuple(
    Place(topic, kind)
    for topic, kinds in zip(
        TOPICS,
        (
            (EXCLUSIVE, FAILOVER, SHARED, SHARED, KEY_SHARED, KEY_SHARED),
            (FAILOVER, SHARED, SHARED, KEY_SHARED, KEY_SHARED),
        ),
        strict=True,
    )
    for kind in kinds
)
GUESTS = (
    *(Place(topic, kind) for topic in TOPICS for kind in (FAILOVER, SHARED, KEY_SHARED)),
    Place(TOPICS[1], EXCLUSIVE),
)


class Program:
    """What all of them share: the file of records, the two clients and the signal to end."""

    def __init__(self, address: str, path: str, seed: str) -> None:
        self.address = address
        self.seed = seed
        self.client = AsyncClient(address)
        self.ending = asyncio.Event()
        self.is_calm = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(self, kind: str, *what: object) -> int:
        at = time.monotonic_ns()
        os.write(self._file, json.dumps((kind, at, *what)).encode() + b"\n")
        return at

    def chance(self, *of: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *of))))

    async def pause(self, seconds: float) -> None:
        """Waits so long, or until it is to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), seconds)


# -- producers ------------------------------------------------------------------------------


async def produce(program: Program) -> None:
    async with asyncio.TaskGroup() as group:
        for number, topic in enumerate(TOPICS):
            for which in range(2):
                group.create_task(_produce_ister(program, topic, f"i{number}{which}"))
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

    async with program.client.producer(topic, name=name) as producer:
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
    session = quick_session(program.address)
    builder = session.client.new_producer().with_topic(topic).with_name(name)
    builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
    builder.with_options(ProducerOptions(base_backoff_ms=50, max_backoff_ms=200))
    producer = builder.build()
    await _until_it_works(producer.create)
    program.record("producer", topic, name, is_counted)
    number = 0
    while not program.ending.is_set():
        key = f"key-{chance.randrange(_KEYS)}"
        attributes = {"ister-sequence": str(number)} if is_counted else {}
        payload = payload_of(f"{name}.{number}")
        program.record("send", topic, name, number, key)
        await _until_it_works(
            lambda p=payload, a=attributes, k=key: producer.send_with_key(p, a, k)
        )
        program.record("sent", topic, name, number, None)
        number += 1
        await program.pause(chance.expovariate(1 / _PAUSE_SECONDS))
    await producer.close()
    await session.close()


async def _until_it_works(call: Any) -> None:
    while True:
        try:
            await call()
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


# -- consumers ------------------------------------------------------------------------------


async def consume(program: Program, places: tuple[Place, ...], who: str) -> None:
    async with asyncio.TaskGroup() as group:
        for number, place in enumerate(places):
            group.create_task(_fill(program, place, f"{who}-{os.getpid()}-{number}"))


async def _fill(program: Program, place: Place, name: str) -> None:
    """One consumer after the other."""
    chance = program.chance(name)
    visit = 0
    while not program.ending.is_set():
        visit += 1
        work = chance.choice((_consume_ister, _consume_danube))
        until = time.monotonic() + chance.uniform(*_STAY_SECONDS)
        try:
            await work(program, place, f"{name}-{visit}", until, chance)
        except (IsterError, grpc.aio.AioRpcError) as error:
            # The one before it may still count as connected; or the broker is away.
            if _is_a_bug(error):
                raise
            print(f"{place.kind} {name}: {error}", file=sys.stderr, flush=True)
            await program.pause(_RETRY_SECONDS)


def _is_a_bug(error: IsterError | grpc.aio.AioRpcError) -> bool:
    if isinstance(error, IsterError):
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
    session = quick_session(program.address)
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
    for topic in TOPICS:
        for kind in _KINDS:
            consumer = await program.client.consumer(
                topic, kind, kind=kind, start="earliest", create=True
            )
            await consumer.close()
            await program.client.set_failure_policy(topic, kind, policy)
            program.record("subscribed", topic, kind, kind)


async def seek(program: Program) -> None:
    """Moves a subscription back now and then, never past what it has not acknowledged."""
    chance = program.chance("seek")
    client = program.client
    while True:
        await program.pause(chance.uniform(*_SEEK_SECONDS))
        if program.ending.is_set() or program.is_calm:
            return
        topic, kind = chance.choice(TOPICS), chance.choice(list(_KINDS))
        cursor = (await client.describe_subscription(topic, kind)).cursor
        target = max(0, cursor - chance.randrange(_SEEK_MESSAGES_MAX))
        began = program.record("seek", topic, kind, target)
        await client.seek(topic, kind, to=target)
        program.record("sought", topic, kind, target, began)


async def main(role: str, address: str, path: str, seed: str) -> None:
    program = Program(address, path, seed)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, program.ending.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(program, "is_calm", True))
    if role == "residents":
        await subscribe(program)
    print("at work", flush=True)
    if role == "producers":
        await produce(program)
    elif role == "guests":
        await consume(program, GUESTS, "guest")
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(program, RESIDENTS, "resident"))
            group.create_task(seek(program))
    await program.client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
