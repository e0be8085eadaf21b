"""Slow consumers: programs that take longer for what was read ahead than the ack timeout.

    slow consumer    one message after the other, each acknowledged; messages / times handled

Owns: the measurement, a part of `benchmarks broker`. Both clients work at the same time, each with
a subscription of its own, the broker's default policy and the clients' defaults for reading ahead.
1.0 is what everybody expects: each message is handled once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from benchmarks.measurement import Run
from ister.client import AsyncClient, ReceivedMessage

_TOPIC: Final = "/default/bench-slow"
_MESSAGES: Final = 300
_SECONDS: Final = 0.2
# What comes again comes while others are handled, or soon after.
_SILENCE_SECONDS: Final = 5.0
_WAIT_SECONDS: Final = 60.0


async def measure(
    run: Run,
    address: str,
    client: Callable[[str], AbstractAsyncContextManager[Any]],
    consumer: Callable[[Any, str, str], AbstractAsyncContextManager[tuple[Any, Any]]],
) -> None:
    """Adds the figures to `run`.

    Args:
        run: Of `benchmarks broker`.
        address: The broker's gRPC port.
        client: Danube's client at an address.
        consumer: A consumer of that client, of a topic and by a subscription, and its queue.
    """
    count = run.scaled(_MESSAGES)
    async with (
        AsyncClient(address) as own,
        client(address) as danubes,
        own.consumer(_TOPIC, subscription="own", create=True) as mine,
        consumer(danubes, _TOPIC, "danubes") as (theirs, queue),
    ):
        async with own.producer(_TOPIC) as producer:
            for number in range(count):
                await producer.send(b"%d" % number)

        async def acknowledge(message: ReceivedMessage) -> None:
            mine.ack(message)

        handled = await asyncio.gather(
            _handle(mine.receive, acknowledge, count), _handle(queue.get, theirs.ack, count)
        )
    for name, times in zip(("ister.client", "Danube's client"), handled, strict=True):
        run.add(
            f"slow consumer, {name}: messages / times handled",
            len(set(times)) / len(times),
            "",
            at_least=1.0,
            note=f"{count} messages, {_SECONDS} s each",
        )


async def _handle(
    receive: Callable[[], Awaitable[Any]], ack: Callable[[Any], Awaitable[None]], count: int
) -> list[Any]:
    """What a program handles, one message after the other, until no more come."""
    handled: list[Any] = []
    while True:
        is_through = len(set(handled)) == count
        try:
            async with asyncio.timeout(_SILENCE_SECONDS if is_through else _WAIT_SECONDS):
                message = await receive()
        except TimeoutError:
            return handled
        handled.append(message.payload)
        await asyncio.sleep(_SECONDS)
        await ack(message)
