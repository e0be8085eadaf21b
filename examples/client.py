"""Programs that publish and consume through a broker, which is restarted while they do.

Starts `ister serve`, publishes orders and consumes them on behalf of two subscriptions; one of the
consumers uses asyncio. The broker is killed and started again in between: every order is in the
topic once, and each subscription gets all of them.

    python examples/client.py [DIRECTORY]

Needs `pip install 'ister[broker,client]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from tempfile import TemporaryDirectory
from threading import Thread

from ister.client import AsyncClient, Client, Producer

TOPIC = "/default/orders"
SHOPS = ("eu-1", "eu-2", "us-1")
COUNT = 3000


class Broker:
    """`ister serve` as a process, on ports that stay the same when it is started again."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._ports = ["0", "0", "0"]
        self.address = ""
        self.start()

    def start(self) -> None:
        """Returns when it is ready."""
        names = ("--port", "--flight-port", "--http-port")
        ports = [f"{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ister.cli.main", "serve", "--json", "--log-level=ERROR"),
                *(f"--data-dir={self._directory}", *ports),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = json.loads(self._process.stdout.readline())
        self.address = ready["grpc"]
        self._ports = [ready[kind].rpartition(":")[2] for kind in ("grpc", "flight", "http")]

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.communicate()

    def stop(self) -> None:
        """As an operator would."""
        self._process.terminate()
        self._process.communicate()


def publish(producer: Producer, start: int, end: int) -> None:
    """Orders of a range of numbers."""
    for number in range(start, end):
        shop = SHOPS[number % 3]
        order = {"order": number, "shop": shop, "amount": number % 39 + 0.25}
        producer.send(json.dumps(order).encode(), attributes={"shop": shop}, routing_key=shop)


def count_by_shop(address: str, found: Counter[str]) -> None:
    """A program that blocks: each order counts once, however often it comes."""
    seen: set[int] = set()
    with (
        Client(address) as client,
        client.consumer(TOPIC, "statistics", start="earliest", create=True) as consumer,
    ):
        for message in consumer:
            if message.offset not in seen:
                seen.add(message.offset)
                found[message.attributes["shop"]] += 1
            consumer.ack(message)
            if len(seen) == COUNT:
                return


async def sum_amounts(address: str) -> float:
    """The same with asyncio; amounts by order, so that what comes twice is added once."""
    amounts: dict[int, float] = {}
    async with (
        AsyncClient(address) as client,
        client.consumer(TOPIC, "billing", kind="shared", start="earliest", create=True) as consumer,
    ):
        async for message in consumer:
            order = json.loads(message.payload)
            amounts[order["order"]] = order["amount"]
            consumer.ack(message)
            if len(amounts) == COUNT:
                break
    return sum(amounts.values())


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", help="where the data goes; a temporary one unless")
    with TemporaryDirectory() as temporary:
        broker = Broker(parser.parse_args().directory or temporary)
        try:
            run(broker)
        finally:
            broker.stop()


def run(broker: Broker) -> None:
    """Two consumers, a producer, and a crash."""
    by_shop: Counter[str] = Counter()
    sums: list[float] = []
    programs = [
        Thread(target=count_by_shop, args=(broker.address, by_shop)),
        Thread(target=lambda: sums.append(asyncio.run(sum_amounts(broker.address)))),
    ]
    for program in programs:
        program.start()
    with Client(broker.address) as client:
        with client.producer(TOPIC, name="till", create=True) as producer:
            publish(producer, 0, COUNT // 2)
            broker.kill()
            publish(producer, COUNT // 2, COUNT)
            broker.start()
        # The producer is closed: every order is acknowledged.
        for program in programs:
            program.join()
        topic = client.admin.describe_topic(TOPIC)
    print(f"{topic.next} orders in the topic, ack level {topic.ack}")
    for shop, orders in sorted(by_shop.items()):
        print(f"{shop}: {orders} orders")
    print(f"sum: {sums[0]:.2f}")


if __name__ == "__main__":
    main()
