"""Many producers and consumers on one broker: those that are idle keep no other from its work."""

import asyncio
import json
import os
import urllib.request
from contextlib import AsyncExitStack

import pytest

from ister.client import AsyncClient
from tests.servers.broker import BrokerProcess
from tests.support.danube import eventually, run
from tests.support.scale import nightly, scaled

TOPIC = "/default/crowd"
AT_ONCE = scaled(8, 50)


async def in_turns(function, items):
    """Calls a coroutine function for each item, some at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def call(item):
        async with gate:
            return await function(item)

    return await asyncio.gather(*map(call, items))


def health(broker):
    with urllib.request.urlopen(f"http://{broker.http}/health") as answer:
        checks = json.load(answer)["checks"]
    return next(one for one in checks if one["name"] == "streams")


def threads(broker):
    return len(os.listdir(f"/proc/{broker.pid}/task"))


# How many producers and consumers there are, and the broker's limit of streams.
@pytest.mark.parametrize(
    ("count", "limits"), [(16, {"max_flight_streams": 8}), nightly(1000, {}, id="1000")]
)
def test_idle_producers_and_consumers_are_all_served(tmp_path, count, limits):
    """Goal: each producer sends twice, with a pause between, and each message is delivered once.

    Method: by day, the limit is half of the producers: streams of idle ones are ended, and
    opened again. By night the limits are the default ones.
    """

    async def scenario(broker):
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(broker.address))
            found = []

            async def receive(consumer):
                async for message in consumer:
                    found.append(message.payload)
                    consumer.ack(message)

            async def open_consumer(_):
                consumer = client.consumer(TOPIC, subscription="s", kind="shared", start="earliest")
                return await stack.enter_async_context(consumer)

            async def open_producer(number):
                producer = client.producer(TOPIC, name=f"p{number}", create=True, timeout=60)
                return await stack.enter_async_context(producer)

            first = await open_producer(0)
            producers = [first, *await in_turns(open_producer, range(1, count))]
            consumers = await in_turns(open_consumer, range(count))
            reading = [asyncio.ensure_future(receive(one)) for one in consumers]
            sent = []

            async def send(number):
                payload = f"{number} {len(sent)}".encode()
                sent.append(payload)
                await (await producers[number].send(payload))

            for _ in range(2):
                await in_turns(send, range(count))
            await eventually(lambda: len(found) >= len(sent) == 2 * count)
            assert sorted(found) == sorted(sent)
            print(f"{count} of each: {threads(broker)} threads, {broker.rss_bytes() >> 20} MiB")
            await eventually(lambda: health(broker)["state"] == "ok")
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    with BrokerProcess(tmp_path, settings={"broker": {"limits": limits}}) as broker:
        run(scenario(broker), within=540)
