"""Kafka's clients with a broker of Ister's: nothing changes but the address.

confluent-kafka publishes orders with keys and headers, two members of a consumer group share the
partitions, and Ister's own client reads the same messages.

    python examples/kafka_clients.py [DIRECTORY]

starts a broker. With `--broker HOST:PORT --kafka HOST:PORT` it uses a broker of yours.

Needs `pip install 'ister[broker,client,kafka]' confluent-kafka`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from ister.client import Client
from ister.testing import run_broker

TOPIC = "kafka-orders"
PARTITIONS = 4
COUNT = 400
PATIENCE_SECONDS = 120


def publish(kafka: str) -> None:
    """Makes the topic, and publishes the orders with a key each."""
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result()
    producer = Producer({"bootstrap.servers": kafka, "enable.idempotence": True})
    for number in range(COUNT):
        producer.produce(
            TOPIC,
            key=f"customer-{number % 10}",
            value=f"order {number}".encode(),
            headers=[("source", b"shop")],
        )
    producer.flush()


def consume(kafka: str) -> Counter[str]:
    """Two members of a group share the orders; how many each has got."""
    settings = {"bootstrap.servers": kafka, "group.id": "billing", "auto.offset.reset": "earliest"}
    members = {f"member-{number}": Consumer(settings) for number in range(2)}
    for member in members.values():
        member.subscribe([TOPIC])
    done: Counter[str] = Counter()
    end_at = time.monotonic() + PATIENCE_SECONDS
    # Both join before anything is counted, so that each has its part.
    while not all(len(member.assignment()) == PARTITIONS // 2 for member in members.values()):
        if time.monotonic() > end_at:
            raise TimeoutError("the members have not found each other")
        for member in members.values():
            member.poll(0.1)
    for member in members.values():
        for place in member.assignment():
            place.offset = 0
            member.seek(place)
    while done.total() < COUNT and time.monotonic() < end_at:
        for name, member in members.items():
            done[name] += sum(not one.error() for one in member.consume(100, timeout=0.2))
    for member in members.values():
        member.commit(asynchronous=False)
        member.close()
    return done


def read_with_ister(address: str) -> Counter[str]:
    """The same messages, as Ister's own client sees them: how many of each key."""
    found: Counter[str] = Counter()
    with Client(address) as client:
        for number in range(PARTITIONS):
            topic = f"/default/{TOPIC}-part-{number}"
            with client.consumer(topic, subscription="audit", start="earliest") as consumer:
                for message in consumer.messages(timeout=1):
                    found[str(message.routing_key)] += message.attributes["source"] == "shop"
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Kafka's clients with a broker of Ister's.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    parser.add_argument("--broker", metavar="HOST:PORT", help="a broker that runs already")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="its port for Kafka's clients")
    options = parser.parse_args(arguments)
    with (
        run_broker(directory=options.directory)
        if options.broker is None
        else nullcontext() as broker
    ):
        kafka = options.kafka or broker.kafka
        publish(kafka)
        for name, count in sorted(consume(kafka).items()):
            print(f"{name}: {count} orders")
        print(f"Ister's client: {read_with_ister(options.broker or broker.address).total()} orders")


if __name__ == "__main__":
    main()
