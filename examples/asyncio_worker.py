"""Workers with asyncio that end gracefully: no order is lost, none is interrupted.

Three workers share a subscription. An order that fails is rejected, and comes again. SIGTERM, as an
orchestrator sends it, or Ctrl-C ends the workers after the order that each is at; what was
prefetched goes to the next workers.

    python examples/asyncio_worker.py [DIRECTORY]

starts a broker, publishes orders, and sends SIGTERM to itself when all are done. With
`--broker HOST:PORT` it uses a broker of yours.

Needs `pip install 'ister[broker,client]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

from ister.client import AsyncClient, AsyncConsumer
from ister.testing import run_broker

TOPIC = "/default/worker-orders"
COUNT = 60
WORKERS = 3


async def publish(client: AsyncClient) -> None:
    """Publishes the orders; the block ends when all are acknowledged."""
    async with client.producer(TOPIC, serializer="json", create=True) as producer:
        for number in range(COUNT):
            await producer.send({"order": number}, routing_key=f"customer-{number % 7}")


async def process(order: dict[str, int], attempt: int) -> None:
    """Does the work: every tenth order fails at first."""
    await asyncio.sleep(0.001)
    if order["order"] % 10 == 0 and attempt == 1:
        raise RuntimeError("the payment service is busy")


async def work(name: str, consumer: AsyncConsumer, done: Counter[str]) -> None:
    """One worker: ends when its consumer is stopped."""
    async for message in consumer:
        try:
            await process(message.value, message.attempt)
        except RuntimeError as error:
            consumer.nack(message, delay=0.01, reason=str(error))
            done["failed"] += 1
        else:
            consumer.ack(message)  # or await it, to know that the broker has it
            done[name] += 1
        if sum(done.values()) - done["failed"] == COUNT:
            signal.raise_signal(signal.SIGTERM)  # all are done; an orchestrator would send it


async def run(address: str) -> Counter[str]:
    """Publishes orders, and runs workers until SIGTERM or Ctrl-C."""
    done: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    async with AsyncClient(address, timeout=30) as client, asyncio.TaskGroup() as workers:
        consumers = [
            await client.consumer(TOPIC, "billing", kind="shared", serializer="json", create=True)
            for _ in range(WORKERS)
        ]
        for which in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(which, lambda: [one.stop() for one in consumers])
        for number, consumer in enumerate(consumers):
            workers.create_task(work(f"worker-{number}", consumer, done))
        await publish(client)
    for which in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(which)
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Workers with asyncio that end gracefully.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    parser.add_argument("--broker", metavar="HOST:PORT", help="a broker that runs already")
    options = parser.parse_args(arguments)
    with (
        run_broker(directory=options.directory)
        if options.broker is None
        else nullcontext() as broker
    ):
        done = asyncio.run(run(options.broker or broker.address))
    for name, count in sorted(done.items()):
        print(f"{name}: {count} orders")


if __name__ == "__main__":
    main()
