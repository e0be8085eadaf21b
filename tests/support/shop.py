"""A small shop that uses a broker: a process of its own that publishes, subscribes and stays.

    python shop.py HOST:PORT [--traffic]

It fills the topics, says `filled`, and keeps its consumers connected until its standard input ends.
With `--traffic` it goes on to publish and consume meanwhile, as a shop on a busy day does.

/default/orders has everything: a part that only the bucket has, files, a cache, messages that are
not uploaded, and a subscription of each kind, one of which is blocked.
"""

from __future__ import annotations

import io
import json
import math
import random
import sys
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import fastavro
import grpc

from ister import wire
from ister.client import Client
from ister.errors import IsterError
from ister.subscription.policy import FailurePolicy
from ister.wire import danube, danube_schema, ister_api

HOSTILE = '<script>document.body.dataset.hacked = "yes"</script><img src=x onerror="alert(1)">'
ODDITIES: list[tuple[bytes, dict[str, str]]] = [
    (HOSTILE.encode(), {"<b>name</b>": "<i>value</i>"}),
    (json.dumps({"text": "</pre><script>alert(2)</script>", "n": [1, 2]}).encode(), {}),
    (bytes(range(256)), {}),
    (b"", {}),
    ("Grüße aus Köln \N{SNOWMAN}\nzweite Zeile".encode(), {}),
    (b"x" * 100_000, {}),
    (b"{not json", {}),
]
"""What /default/oddities holds, in the order of offsets."""

_PAYMENT = {
    "type": "record",
    "name": "Payment",
    "fields": [
        {"name": "order", "type": "long"},
        {"name": "method", "type": {"type": "enum", "name": "Method", "symbols": ["card", "bank"]}},
        {"name": "cents", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
_GOODS = ["lamp", "kettle", "notebook", "umbrella", "chair", "teapot", "blanket", "clock"]
_TOWNS = ["Ulm", "Passau", "Linz", "Wien", "Bratislava", "Budapest", "Novi Sad", "Galati"]


class Till:
    """Publishes as Danube's clients do, one message a call: those stay in the topic's cache."""

    def __init__(self, channel: grpc.Channel, topic: str) -> None:
        self._stub = wire.stub(channel, "danube.ProducerService")
        self.topic = topic
        created = self._stub.CreateProducer(
            danube.ProducerRequest(
                request_id=1,
                producer_name="till",
                topic_name=topic,
                dispatch_strategy=danube.DispatchStrategy.Reliable,
            )
        )
        self._id = created.producer_id

    def send(self, payload: bytes, *, routing_key: str, attributes: dict[str, str]) -> None:
        self._stub.SendMessage(
            danube.StreamMessage(
                request_id=2,
                msg_id=danube.MsgID(producer_id=self._id, topic_name=self.topic),
                payload=payload,
                publish_time=time.time_ns() // 1_000_000,
                producer_name="till",
                routing_key=routing_key,
                attributes=attributes,
            )
        )

    def flush(self) -> None:
        """Nothing waits."""


class Shop:
    """See the module header."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._random = random.Random(7)
        self._stack = stack
        self._client = stack.enter_context(Client(address))
        self._channel = stack.enter_context(grpc.insecure_channel(address))
        self._ended = threading.Event()
        self._orders = 0
        self._schema_id = 0
        self._workers: list[threading.Thread] = []

    # -- what is published ------------------------------------------------------------------

    def order(self) -> bytes:
        self._orders += 1
        items = [
            {
                "sku": self._random.choice(_GOODS),
                "quantity": self._random.randint(1, 4),
                "cents": self._random.randint(300, 9000),
            }
            for _ in range(self._random.randint(1, 3))
        ]
        return json.dumps(
            {
                "order": self._orders,
                "customer": self.customer(),
                "placed_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "town": self._random.choice(_TOWNS),
                "items": items,
                "total_cents": sum(item["quantity"] * item["cents"] for item in items),
            }
        ).encode()

    def customer(self) -> str:
        return f"customer-{self._random.randint(1, 40):02}"

    def payment(self) -> bytes:
        file = io.BytesIO()
        record = {
            "order": self._random.randint(1, 4000),
            "method": self._random.choice(["card", "bank"]),
            "cents": self._random.randint(300, 60_000),
            "note": None,
        }
        fastavro.schemaless_writer(file, _PAYMENT, record)
        return file.getvalue()

    def view(self) -> bytes:
        return json.dumps(
            {"page": f"/shop/{self._random.choice(_GOODS)}", "visitor": self.customer()}
        ).encode()

    def send(self, producer: Any, count: int) -> None:
        topic = producer.topic
        for _ in range(count):
            if topic == "/default/orders":
                key = self.customer()
                producer.send(self.order(), routing_key=key, attributes={"source": "web"})
            elif topic == "/default/payments":
                producer.send(self.payment(), schema_id=self._schema_id, schema_version=1)
            else:
                producer.send(self.view(), routing_key=self.customer())
        producer.flush()

    # -- the topics -------------------------------------------------------------------------

    def fill(self) -> None:
        client = self._client
        client.admin.create_namespace("shop")
        self._register()
        for topic in ("/default/orders", "/default/payments", "/shop/page-views"):
            client.admin.create_topic(topic)
        client.admin.create_topic("/default/stock", partitions=3)
        admin = wire.stub(self._channel, "ister.Admin")
        admin.CreateTopic(ister_api.CreateTopicRequest(topic="/shop/prices", non_reliable=True))
        registry = wire.stub(self._channel, "danube_schema.SchemaRegistry")
        registry.ConfigureTopicSchema(
            danube_schema.ConfigureTopicSchemaRequest(
                topic_name="/default/payments", schema_subject="payment", validation_policy="warn"
            )
        )
        with client.producer("/default/oddities", name="tester", create=True) as producer:
            for payload, attributes in ODDITIES:
                producer.publish(payload, attributes=attributes)
        with client.producer("/default/orders", name="checkout") as producer:
            self.send(producer, 2500)
        # All of it is in the bucket then, and nothing of it on disk.
        client.admin.unload_topic("/default/orders")
        for topic, name, count in (
            ("/default/orders", "checkout", 1250),
            ("/default/payments", "cashier", 900),
            ("/shop/page-views", "web", 1200),
            ("/default/stock", "warehouse", 300),
        ):
            with client.producer(topic, name=name) as producer:
                self.send(producer, count)
        self.send(Till(self._channel, "/default/orders"), 250)

    def _register(self) -> None:
        registry = wire.stub(self._channel, "danube_schema.SchemaRegistry")
        answer = registry.RegisterSchema(
            danube_schema.RegisterSchemaRequest(
                subject="payment",
                schema_type="avro",
                schema_definition=json.dumps(_PAYMENT).encode(),
            )
        )
        self._schema_id = answer.schema_id

    # -- the subscriptions ------------------------------------------------------------------

    def subscribe(self) -> None:
        orders = "/default/orders"
        self._block("mailer", orders)
        self._consumer(orders, "reports", kind="exclusive", start="earliest").close()
        for name, kind, start, takes in (
            ("billing", "exclusive", "earliest", None),
            ("archive", "failover", "latest", None),
            ("archive", "failover", "latest", None),
            ("search-index", "shared", 3000, 200),
            ("search-index", "shared", 3000, 200),
        ):
            self._work(self._consumer(orders, name, kind=kind, start=start), takes)
        self._work(self._consumer("/default/payments", "ledger", start="earliest"), None)
        # Nothing of it fails while it is looked at.
        patient = FailurePolicy(ack_timeout_ms=3_600_000)
        self._client.admin.set_failure_policy(orders, "search-index", patient)
        for worker in self._workers:
            worker.start()

    def _consumer(self, topic: str, subscription: str, **options: Any) -> Any:
        number = len(self._workers) + 1
        return self._client.consumer(
            topic, subscription, name=f"{subscription}-{number}", **options
        )

    def _block(self, subscription: str, topic: str) -> None:
        """A subscription with a message that failed once too often."""
        consumer = self._consumer(topic, subscription, kind="key_shared", start=3400)
        self._stack.callback(consumer.close)
        policy = FailurePolicy(max_redelivery_count=0, base_redelivery_delay_ms=0)
        self._client.admin.set_failure_policy(topic, subscription, policy)
        consumer.nack(consumer.receive(60), reason="no such address")
        consumer.flush()

    def _work(self, consumer: Any, takes: int | None) -> None:
        """A consumer that takes so many messages and then no more; None for all of them."""

        def work() -> None:
            left = takes
            while not self._ended.is_set():
                if left == 0:
                    self._ended.wait()
                    break
                try:
                    consumer.ack(consumer.receive(0.5))
                except IsterError:
                    continue
                left = None if left is None else left - 1
            consumer.close()

        self._workers.append(threading.Thread(target=work))

    # -- a busy day -------------------------------------------------------------------------

    def trade(self) -> None:
        """Publishes on, more at some times than at others, until it ends."""
        producers: list[tuple[Any, int]] = [
            (self._stack.enter_context(self._client.producer(topic, name=name)), most)
            for topic, name, most in (
                ("/default/payments", "cashier", 18),
                ("/shop/page-views", "web", 55),
                ("/default/stock", "warehouse", 9),
            )
        ]

        producers.append((Till(self._channel, "/default/orders"), 30))

        def trade() -> None:
            begun = time.monotonic()
            while not self._ended.wait(0.25):
                at = time.monotonic() - begun
                for number, (producer, most) in enumerate(producers):
                    busy = 0.6 + 0.4 * math.sin(at / (17 + 6 * number))
                    self.send(producer, max(1, int(most * busy * self._random.uniform(0.8, 1.0))))

        self._workers.append(threading.Thread(target=trade))
        self._workers[-1].start()

    def end(self) -> None:
        self._ended.set()
        for worker in self._workers:
            worker.join()


def main() -> None:
    address, *more = sys.argv[1:]
    with ExitStack() as stack:
        shop = Shop(address, stack)
        shop.fill()
        shop.subscribe()
        stack.callback(shop.end)
        if "--traffic" in more:
            shop.trade()
        print("filled", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
