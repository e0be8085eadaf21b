"""Topics of several brokers that one Spark application works on, and who checks what it has done.

`PipelineWorld` sends numbered messages by the real client, and knows which were acknowledged. What
Spark reads is compared with that; what it has written is read without Spark: from the bucket, or
from the broker that has the topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from ister.client import Client
from ister.client.flight import FlightClient
from ister.spark import location
from ister.wire.contract import RangeTicket
from tests.servers.cluster import BrokerCluster
from tests.support.exports import read_table
from tests.support.waiting import eventually

__all__ = ["PipelineWorld", "Rows", "exported", "rows_of"]

Rows = dict[str, dict[int, bytes]]
"""Payloads by topic and offset."""


class PipelineWorld:
    """See the module header. Use as a context manager.

    Args:
        cluster: The brokers, running, which upload nothing themselves.
        config: The settings that Spark has.
        name: The namespace of all topics is this world's own.
    """

    def __init__(self, cluster: BrokerCluster, config: str, name: str) -> None:
        self.cluster = cluster
        self.config = config
        self.namespace = name
        self.client = Client(cluster.addresses)
        self.acked: Rows = {}
        self._sent: dict[str, int] = {}

    def __enter__(self) -> PipelineWorld:
        self.client.admin.create_namespace(self.namespace)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        # Jobs share connections for as long as their process lives.
        location._close_all()

    # -- topics -----------------------------------------------------------------------------

    def topic(self, name: str, *, at: int | None = None, ack: str = "synced") -> str:
        """Makes a topic, and has it at a broker."""
        topic = f"/{self.namespace}/{name}"
        self.client.admin.create_topic(topic, ack=ack)
        self.acked.setdefault(topic, {})
        if at is not None:
            self.move(topic, at)
        return topic

    def move(self, topic: str, at: int) -> None:
        """Moves a topic to a broker."""
        self.client.admin.move_topic(topic, self.node(at))

    def node(self, number: int) -> str:
        """The node of a broker, as its directory has it."""
        return (self.cluster.brokers[number].data / "wal" / ".node").read_text().strip()

    def send(self, *topics: str, count: int) -> None:
        """Sends messages to each of the topics; returns when all are acknowledged."""
        with_answers = []
        producers = [self.client.producer(topic) for topic in topics]
        try:
            for producer, topic in zip(producers, topics, strict=True):
                for _ in range(count):
                    number = self._sent[topic] = self._sent.get(topic, 0) + 1
                    payload = f"{topic} {number}".encode()
                    with_answers.append((topic, payload, producer.send(payload)))
            for topic, payload, answer in with_answers:
                self.acked[topic][answer.result()] = payload
        finally:
            for producer in producers:
                producer.close()

    def wait_until_nobody_has(self, *topics: str) -> None:
        """Waits until the lease of topics' broker has ended."""
        with self.cluster.open_bucket() as history:
            for topic in topics:
                eventually(
                    lambda name=topic: history.topic(name).catalog.owner() is None,
                    "the lease of a dead broker ends",
                )

    # -- what is there, without Spark -------------------------------------------------------

    def in_bucket(self, *topics: str) -> Rows:
        """What the bucket has."""
        return {
            topic: {offset: payload for offset, payload, _ in self.cluster.read_history(topic)}
            for topic in topics
        }

    def at_brokers(self, *topics: str) -> Rows:
        """What the topics' brokers have, asked one by one."""
        found: Rows = {}
        owners = self.cluster.owners(topics)
        for topic in topics:
            number = owners[topic]
            assert number is not None, f"nobody has {topic}"
            with FlightClient(self.cluster.brokers[number].flight) as client:
                status = client.watermarks([topic])[topic]
                ticket = RangeTicket(
                    topic=topic,
                    incarnation=status.incarnation,
                    start=status.earliest,
                    end=status.synced,
                    columns=("offset", "payload"),
                )
                found[topic] = {
                    row["offset"]: row["payload"]
                    for batch in client.read(ticket)
                    for row in batch.to_pylist()
                }
        return found

    def sent_to(self, *topics: str) -> Rows:
        """What was acknowledged."""
        return {topic: dict(self.acked[topic]) for topic in topics}

    # -- Spark ------------------------------------------------------------------------------

    def load(self, spark: SparkSession, *topics: str, **options: Any) -> DataFrame:
        """A batch of topics."""
        place = {"config": self.config, "topic": ",".join(topics)}
        return spark.read.format("ister").options(**place, **options).load()

    def read(self, spark: SparkSession, *topics: str, **options: Any) -> Rows:
        """What a batch read sees."""
        found = rows_of(
            self.load(spark, *topics, **options)
            .select("topic", "offset", "payload")
            .toArrow()
            .to_pylist()
        )
        return {topic: found.get(topic, {}) for topic in topics}


def rows_of(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Rows by topic and offset; none of them twice."""
    found: Rows = {}
    for row in rows:
        of_topic = found.setdefault(row["topic"], {})
        assert row["offset"] not in of_topic, f"twice: {row['topic']} {row['offset']}"
        of_topic[row["offset"]] = row["payload"]
    return found


def exported(root: Path, *topics: str) -> Rows:
    """What the Parquet tables of an export have, read without Spark."""
    return {
        topic: rows_of(read_table(root, "parquet", topic.rpartition("/")[2]).to_pylist())[topic]
        for topic in topics
    }
