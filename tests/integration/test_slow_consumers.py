"""Programs that need longer for what their client reads ahead than the ack timeout.

The timeout is shorter than the default, and so is what a program needs for one message; the ratio
is what counts. A pause of the machine may not be longer than the timeout.
"""

import asyncio
from itertools import count

import pytest

pytest.importorskip("danube")

from ister.client import AsyncClient
from tests.support.danube import EXCLUSIVE, SHARED

TIMEOUT_MS = 4000
MESSAGES = 120
SECONDS = 0.08
_numbers = count()


@pytest.fixture
def topic():
    return f"/default/slow-{next(_numbers)}"


async def handle(receive, ack):
    """The payloads that a program handles, one after the other, until it has all of them."""
    handled = []
    while len(set(handled)) < MESSAGES:
        message = await asyncio.wait_for(receive(), 60)
        handled.append(message.payload)
        await asyncio.sleep(SECONDS)
        await ack(message)
    return handled


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED], ids=["exclusive", "shared"])
async def test_a_slow_program_handles_each_message_once(session, broker, topic, kind):
    """Goal: nothing that waits in a client counts as unanswered, so nothing comes twice."""

    async with (
        AsyncClient(broker.address) as client,
    ):
        await session.create_topic(topic)
        danubes = await session.consumer(topic, kind=kind)
        name = "exclusive" if kind is EXCLUSIVE else "shared"
        async with client.consumer(topic, subscription="own", kind=name) as consumer:
            for subscription in ("sub", "own"):
                await session.set_failure_policy(
                    topic, subscription=subscription, ack_timeout_ms=TIMEOUT_MS
                )
            await session.send(topic, [f"{number}" for number in range(MESSAGES)])

            async def ack(message):
                consumer.ack(message)

            handled = await asyncio.gather(
                handle(consumer.receive, ack), handle(danubes.queue.get, danubes.ack)
            )
            expected = [b"%d" % number for number in range(MESSAGES)]
            assert handled == [expected, expected]
            # What had been sent again would come before it.
            await session.send(topic, ["end"], name="last")
            assert (await consumer.receive(60)).payload == b"end"
            assert (await asyncio.wait_for(danubes.queue.get(), 60)).payload == b"end"


@pytest.mark.nightly
async def test_a_slow_program_handles_each_message_of_all_partitions_once(session, topic):
    """Danube's client has one queue for all partitions, and it is filled with one of them first."""

    producer = await session.producer(topic, partitions=3)
    for number in range(MESSAGES):
        await producer.send(b"%d" % number)
    inbox = await session.consumer(topic)
    for partition in inbox.ids:
        await session.set_failure_policy(partition, ack_timeout_ms=TIMEOUT_MS // 3)
        await session.seek(partition, earliest=True)
    handled = await handle(inbox.queue.get, inbox.ack)
    assert sorted(handled, key=int) == [b"%d" % number for number in range(MESSAGES)]
    for partition in inbox.ids:
        await session.wait_for_cursor(partition, MESSAGES // 3)


async def test_what_a_program_does_not_take_goes_to_others(session, broker, topic):
    """A consumer that reads ahead and then does nothing keeps nobody from its messages."""

    async with AsyncClient(broker.address) as client:
        await session.create_topic(topic)
        async with client.consumer(topic, subscription="s", kind="shared") as stuck:
            await session.send(topic, [f"{number}" for number in range(20)])
            first = await stuck.receive(60)
            await session.set_failure_policy(topic, subscription="s", ack_timeout_ms=4000)
            async with client.consumer(topic, subscription="s", kind="shared") as other:
                found = set()
                while len(found) < 20:
                    message = await other.receive(60)
                    # Of all but the one that the program took nobody says that they failed.
                    assert message.attempt == 1 or message.payload == first.payload
                    found.add(message.payload)
                    other.ack(message)
                await session.wait_for_cursor(topic, 20, "s")
