"""Kafka: its jars run by Java as one node that is broker and controller, confluent-kafka."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers import install
from benchmarks.peers.contender import Contender, Facts, Quota
from benchmarks.peers.processes import Server, StartError, free_port, try_port, until

_FETCH = 1000
_HEAP = ("-Xmx1G", "-Xms1G")


class Kafka(Contender):
    """A topic of one partition, one replica."""

    _server: Server | None = None
    _bulk: _Producer | None = None
    lingers = (0.0, 1.0, 5.0)

    def facts(self) -> Facts:
        return Facts(
            server=f"Kafka {install.KAFKA_VERSION}, KRaft, one node",
            client=f"confluent-kafka {confluent_kafka.__version__}",
            durability="`flush.messages=1`, `acks=all`"
            if self.is_synced
            else "`acks=all`, and no flush before the answer",
            settings=f"one partition; JVM {' '.join(_HEAP)}, as its start script has it; "
            "`linger.ms=0`, at 64 senders the best of 0, 1 and 5, batched 5, `batch.size` 1 MiB",
            consuming=f"`consume({_FETCH})` of an assigned partition, a commit after each; replay: "
            "the same without it",
            caveats=[
                "Kafka's 64 senders are 64 messages in flight; each answer sends the next one.",
                "In a trial, Kafka's restart took as long with a hundredth of the messages.",
            ],
        )

    async def start(self) -> None:
        jars = install.kafka_jars(self.cache)
        port, controller = free_port(), free_port()
        config = self.directory / "server.properties"
        config.write_text(
            "process.roles=broker,controller\n"
            "node.id=1\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\n"
            "controller.listener.names=CONTROLLER\n"
            f"controller.quorum.bootstrap.servers=127.0.0.1:{controller}\n"
            f"log.dirs={self.directory}/logs\n"
            "offsets.topic.replication.factor=1\n"
            "transaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\n"
            "group.initial.rebalance.delay.ms=0\n"
        )
        java = ["java", *_HEAP, "-cp", f"{jars}/*"]
        if not (self.directory / "logs").exists():
            cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
            tool = [*java, "kafka.tools.StorageTool", "format", "--standalone"]
            tool += ["-t", cluster, "-c", str(config)]
            formatting = Server(tool, self.directory / "log")
            if await asyncio.to_thread(formatting.process.wait):
                formatting.check()
        self._server = Server([*java, "kafka.Kafka", str(config)], self.directory / "log")
        self._address = f"127.0.0.1:{port}"
        await until(lambda: try_port(port), self._server)
        await until(lambda: asyncio.to_thread(self._ask), self._server)
        self._producers = {
            linger: _Producer(self, {**self._common(), "linger.ms": linger})
            for linger in self.lingers
        }
        self._bulk = _Producer(self, {**self._common(), "linger.ms": 5, "batch.size": 1 << 20})

    def _common(self) -> dict[str, Any]:
        return {"bootstrap.servers": self._address, "log_level": 0}

    def _ask(self) -> None:
        AdminClient(self._common()).list_topics(timeout=1)

    async def open_topic(self, name: str) -> None:
        self.topic = name
        await asyncio.to_thread(self._make_topic)

    def _make_topic(self) -> None:
        config = {"flush.messages": "1"} if self.is_synced else {}
        topic = NewTopic(self.topic, 1, 1, config=config)
        admin = AdminClient(self._common())
        admin.create_topics([topic])[self.topic].result(30)

    async def stop(self) -> None:
        if self._bulk is not None:
            for producer in (*self._producers.values(), self._bulk):
                producer.close()
        self._bulk = None
        if self._server is not None:
            self._server.kill()

    async def kill(self) -> None:
        await self.stop()

    def pids(self) -> list[int]:
        return [self._server.pid] if self._server is not None else []

    async def publish(self, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def answer(error: confluent_kafka.KafkaError | None, _message: object) -> None:
            loop.call_soon_threadsafe(_settle, answered, error)

        self._producers[self.linger].produce(payload, answer)
        await answered

    async def publish_waiting(self, payloads: Iterable[bytes], senders: int) -> list[float]:
        producer = self._producers[self.linger]
        return await asyncio.to_thread(producer.publish_waiting, payloads, senders)

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        await asyncio.to_thread(self._bulk.publish_many, payloads)

    def _consumer(self, group: str, offset: int) -> confluent_kafka.Consumer:
        consumer = confluent_kafka.Consumer(
            {**self._common(), "group.id": group, "enable.auto.commit": False}
        )
        consumer.assign([confluent_kafka.TopicPartition(self.topic, 0, offset)])
        return consumer

    def _commit_start(self, group: str) -> None:
        consumer = self._consumer(group, 0)
        start = confluent_kafka.TopicPartition(self.topic, 0, 0)
        try:
            consumer.commit(offsets=[start], asynchronous=False)
        finally:
            consumer.close()

    def _read(self, group: str, quota: Quota, *, is_acked: bool) -> None:
        consumer = self._consumer(group, 0)
        quota.begin()
        while True:
            messages = consumer.consume(_FETCH, timeout=30)
            for message in messages:
                if message.error():
                    raise confluent_kafka.KafkaException(message.error())
                message.value()
            goes_on = quota.take(len(messages))
            if is_acked:
                consumer.commit(message=messages[-1], asynchronous=goes_on)
            if not goes_on:
                break
        quota.end()
        consumer.close()

    async def consume(self, name: str, quota: Quota) -> None:
        # The coordinator of groups is made when it is first asked for.
        await until(lambda: asyncio.to_thread(self._commit_start, name), self._server)
        await asyncio.to_thread(self._read, name, quota, is_acked=True)

    async def replay(self, quota: Quota) -> None:
        await asyncio.to_thread(self._read, "replay", quota, is_acked=False)

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        over = threading.Event()

        def run() -> None:
            consumer = self._consumer("tail", confluent_kafka.OFFSET_END)
            # Its place at the end is looked up by the first poll.
            consumer.poll(1.0)
            loop.call_soon_threadsafe(ready.set)
            while not over.is_set():
                if (message := consumer.poll(0.1)) is not None and not message.error():
                    on_message(message.value())
                    consumer.commit(message=message, asynchronous=True)
            consumer.close()

        running = asyncio.ensure_future(asyncio.to_thread(run))
        try:
            await asyncio.shield(running)
        finally:
            over.set()
            await running

    async def stored(self) -> int:
        return await asyncio.to_thread(self._stored)

    def _stored(self) -> int:
        consumer = self._consumer("stored", 0)
        partition = confluent_kafka.TopicPartition(self.topic, 0)
        first, end = consumer.get_watermark_offsets(partition, timeout=30)
        consumer.close()
        return end - first


def _settle(answered: asyncio.Future[None], error: object) -> None:
    if answered.cancelled():
        return
    if error is None:
        answered.set_result(None)
    else:
        answered.set_exception(StartError(str(error)))


class _Producer:
    """A producer and the thread that its callbacks run in."""

    def __init__(self, kafka: Kafka, settings: dict[str, Any]) -> None:
        self._kafka = kafka
        self._producer = confluent_kafka.Producer(
            {**settings, "acks": "all", "queue.buffering.max.messages": 100_000}
        )
        self._is_open = True
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        while self._is_open:
            self._producer.poll(0.2)

    def close(self) -> None:
        self._is_open = False
        self._thread.join()

    def produce(self, payload: bytes, answer: Callable[..., None]) -> None:
        self._producer.produce(self._kafka.topic, payload, on_delivery=answer)

    def publish_waiting(self, payloads: Iterable[bytes], senders: int) -> list[float]:
        """Keeps so many messages under way: each answer sends the next one."""
        times: list[float] = []
        failures: list[object] = []
        shared = iter(payloads)
        clock = time.perf_counter
        left = senders
        finished = threading.Event()

        def send() -> None:
            nonlocal left
            payload = next(shared, None)
            if payload is None:
                left -= 1
                if left == 0:
                    finished.set()
                return
            began = clock()

            def answer(error: object, _message: object) -> None:
                if error is not None:
                    failures.append(error)
                times.append(clock() - began)
                send()

            self.produce(payload, answer)

        # All but the first message are sent by the thread of the callbacks.
        first = threading.Event()

        def begin(_error: object, _message: object) -> None:
            for _ in range(senders):
                send()
            first.set()

        self.produce(b"begin".ljust(1024), begin)
        first.wait()
        finished.wait()
        if failures:
            raise StartError(str(failures[0]))
        return times

    def publish_many(self, payloads: Iterable[bytes]) -> None:
        failures: list[object] = []

        def answer(error: object, _message: object) -> None:
            if error is not None:
                failures.append(error)

        for payload in payloads:
            while True:
                try:
                    self.produce(payload, answer)
                    break
                except BufferError:
                    time.sleep(0.001)
        self._producer.flush()
        if failures:
            raise StartError(str(failures[0]))
