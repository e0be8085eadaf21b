"""Data directories with topics for Spark, and what a read of them should yield.

    place = SparkPlace(tmp_path)
    with place.open() as log:
        topic = log.topic("/default/a", create=True)
        …
        expected = rows_of(topic)
    spark.read.format("ister").option("config", place.config)…

A row is a `Row`, field by field what the core reader yields. Nothing happens by itself in these
directories: uploads and trims run when a test asks for them.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import yaml
from pyspark.sql.types import (
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import ister
from ister.base.model import Codec, MessageId, StreamMessage, TopicName
from ister.bucket.names import STAGING_PREFIX, object_key
from ister.bucket.retention import expire
from ister.config import load_config
from ister.format.descriptor import ObjectDescriptor
from ister.spark import IsterDataSource
from ister.spark.batch import BatchReader
from ister.spark.compat import arrow_schema_of
from ister.spark.location import LogLocation, _close_all
from ister.topic.log import Log
from ister.topic.message import Message
from ister.topic.topic import Topic
from tests.support.grace import without_least_grace

PUBLISHED_MS = 1_700_000_000_000
"""When the first message of a topic with rising times was published."""

_TEXTS = ("", "k", "ключ", "鍵 🗝", "a'b\"c\\d", "\x00\n\t", "x" * 300)
_SCHEMA_IDS = (None, 0, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
_SCHEMA_VERSIONS = (None, 0, 3, 2**31 - 1, 2**31, 2**32 - 1)
_TIMES_MS = (0, 1, PUBLISHED_MS, 253_402_300_799_999, 253_402_300_800_000, 2**62)


class Row(NamedTuple):
    """A row of `format("ister")`, with all its columns."""

    topic: str
    offset: int
    publish_time: datetime
    producer_name: str
    payload: bytes
    attributes: dict[str, str]
    routing_key: str | None
    schema_id: int | None
    schema_version: int | None


def row_of(topic: str, message: Message) -> Row:
    """A message as Spark should show it: unsigned integers of Danube's in Spark's signed ones."""
    return Row(
        topic,
        message.offset,
        message.publish_time,
        message.producer_name,
        message.payload,
        dict(message.attributes),
        message.routing_key,
        _signed(message.schema_id, 64),
        _signed(message.schema_version, 32),
    )


def _signed(value: int | None, bits: int) -> int | None:
    if value is None or value < 1 << (bits - 1):
        return value
    return value - (1 << bits)


def rows_of(topic: Topic) -> list[Row]:
    """Everything in a topic, as the core reader yields it."""
    return [row_of(topic.name, message) for message in topic.read()]


def rows_in(table: pa.Table | Iterable[pa.RecordBatch]) -> list[Row]:
    """The rows of what Spark, or a reader without Spark, returned; with all columns."""
    batches = table.to_batches() if isinstance(table, pa.Table) else table
    return [
        Row(**{**fields, "attributes": dict(fields["attributes"])})
        for batch in batches
        for fields in batch.to_pylist()
    ]


class SparkPlace:
    """A data directory with its `ister.yml`.

    Args:
        root: An empty directory.
        storage: Settings below `storage`, by section.
    """

    def __init__(self, root: Path, **storage) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._storage = {
            **storage,
            "wal": {
                "dir": str(root / "wal"),
                "rotate_max_bytes": 4096,
                "retention": {"time_minutes": None, "size_mb": 0},
                **storage.get("wal", {}),
            },
            "uploader": {
                "engine": "none",
                "max_object_bytes": 16 * 1024,
                "index_every_messages": 10,
                **storage.get("uploader", {}),
            },
            "cloud": {
                "backend": "fs",
                "root": str(root / "objects"),
                **storage.get("cloud", {}),
            },
            "metadata": {"path": str(root / "metadata.db"), **storage.get("metadata", {})},
        }
        self.config = self._save("ister.yml", self._storage)

    def _save(self, name: str, storage: dict) -> str:
        path = self.root / name
        path.write_text(yaml.safe_dump({"storage": storage}))
        return str(path)

    @property
    def elsewhere(self) -> str:
        """The settings of a machine with the same stores, and without the topics' files."""
        wal = {**self._storage["wal"], "dir": str(self.root / "elsewhere" / "wal")}
        return self._save("elsewhere.yml", {**self._storage, "wal": wal})

    def open(self) -> Log:
        """The log, owned by this process until it is closed."""
        return ister.open(self.config)

    def fill(self, name: str, count: int, *, uploaded: int = 0, **fields) -> list[Row]:
        """A topic with `count` messages, of which so many are in the bucket; its rows."""
        with self.open() as log:
            topic = log.topic(name, create=True)
            if uploaded:
                fill(topic, uploaded, **fields)
                topic.upload()
            fill(topic, count - uploaded, first=uploaded, **fields)
            return rows_of(topic)

    def payloads(self, name: str) -> list[bytes]:
        """The payloads in a topic."""
        with self.open() as log:
            return [message.payload for message in log.topic(name).read()]

    def topics(self) -> list[str]:
        """The topics that exist; none where nobody has opened the log yet."""
        if not (self.root / "metadata.db").exists():
            return []
        with ister.open_bucket(self.config) as history:
            return history.topics()

    def staged_files(self) -> list[str]:
        """What tasks have staged and nobody has removed."""
        with ister.open_bucket(self.config) as history:
            return [info.key for info in history.objects.list(STAGING_PREFIX)]

    def sweep(self, name: str) -> None:
        """What the topic's owner does once in a while; set `cloud.orphan_grace_minutes` to 0."""
        with self.open() as log, without_least_grace():
            log.topic(name).bucket.retention.collect_orphans()
            log.topic(name).bucket.retention.collect_shared_staging()


# -- topics -------------------------------------------------------------------------------------


def fill(topic: Topic, count: int, *, first: int = 0, size: int = 60, step_ms: int = 1000) -> range:
    """Numbered messages of about `size` bytes, published one second after the other; durable."""
    for number in range(first, first + count):
        topic.append(
            b"%d" % number + b"." * size,
            publish_time=PUBLISHED_MS + number * step_ms,
            producer_name="p",
            attributes={"n": str(number)},
        )
        if number % 50 == 49:
            topic.flush()  # a file of its own, once it is large enough
    topic.flush()
    return range(first, first + count)


def fill_randomly(
    topic: Topic, rng: random.Random, count: int, *, has_odd_times: bool = True
) -> None:
    """Messages with anything in them that the topic's codec has; durable.

    Odd times are those that no calendar has: they do not come out as they went in.
    """
    times = _TIMES_MS if has_odd_times else _TIMES_MS[:-2]
    for _ in range(count):
        has_all = topic.codec is Codec.BINCODE2
        fields = {
            "payload": _payload(rng),
            "attributes": {
                rng.choice(_TEXTS): rng.choice(_TEXTS) for _ in range(rng.choice((0, 0, 1, 3)))
            },
            "routing_key": rng.choice((None, *_TEXTS)) if has_all else None,
            "producer_name": rng.choice(_TEXTS),
            "schema_id": rng.choice(_SCHEMA_IDS) if has_all else None,
            "schema_version": rng.choice(_SCHEMA_VERSIONS) if has_all else None,
        }
        if rng.random() < 0.3:
            # As it comes over a wire: with fields that Spark does not show, and any time.
            topic.appender.append_record(
                StreamMessage(
                    request_id=rng.getrandbits(64),
                    msg_id=MessageId(
                        producer_id=rng.getrandbits(64), topic_name=topic.name, broker_addr="b:1"
                    ),
                    publish_time=rng.choice(times),
                    subscription_name=rng.choice((None, "s")),
                    **fields,
                )
            )
        else:
            topic.append(publish_time=PUBLISHED_MS + rng.randrange(10**9), **fields)
        if rng.random() < 0.1:
            topic.flush()
    topic.flush()


def _payload(rng: random.Random) -> bytes:
    size = rng.choice((0, 1, rng.randrange(400), 5000))
    return rng.choice((rng.randbytes(size), ("größer, 更大 🐘" * (size // 20)).encode()))


def objects_of(topic: Topic) -> list[ObjectDescriptor]:
    """A topic's objects, oldest first."""
    return [described for described, _ in topic.bucket.owned.catalog.descriptors()]


def expire_before(log: Log, topic: Topic, offset: int) -> int:
    """Bucket and files lose what lies before an offset, by whole objects; the new earliest."""
    topic.bucket.retention.trim()
    expired = [described for described in objects_of(topic) if described.end <= offset]
    expire(topic.bucket.owned, log.stores.objects, expired, metrics=log.metrics)
    return topic.earliest


def remove_object(log: Log, topic: Topic, described: ObjectDescriptor) -> None:
    """An object is lost."""
    log.stores.objects.delete(object_key(TopicName.parse(topic.name), described.object_id))


# -- reads without Spark ------------------------------------------------------------------------


class ReadHere:
    """A batch read in this process, with Spark's steps and without Spark.

    Plans when it is made; `rows` reads. What is fetched from objects is counted.
    """

    def __init__(self, *, schema=None, filters=(), **options: str) -> None:
        source = IsterDataSource(options)
        self._schema = schema if schema is not None else source.schema()
        self.reader: BatchReader = source.reader(self._schema)
        if filters:
            self.left = list(self.reader.pushFilters(list(filters)))
        self.place: LogLocation = self.reader._task.place
        self.partitions = self.reader.partitions()

    def batches(self) -> list[pa.RecordBatch]:
        """What tasks would hand to Spark, in the order of partitions."""
        return [batch for one in self.partitions for batch in self.reader.read(one)]

    def rows(self) -> list[Row]:
        """The same as rows; for a read of all columns."""
        return rows_in(self.batches())

    def fetched_bytes(self) -> int:
        """What reading fetches from the bucket."""
        before = self._counted()
        self.batches()
        return self._counted() - before

    def _counted(self) -> int:
        return self.place.history().metrics.snapshot()["cloud_reader.bytes_read_total"]


_WRITTEN = {
    "payload": StringType(),
    "topic": StringType(),
    "routing_key": StringType(),
    "attributes": MapType(StringType(), StringType()),
    "publish_time": TimestampType(),
    "schema_version": LongType(),
}


class WriteHere:
    """A batch write in this process, with Spark's steps and without Spark.

    Args:
        columns: Of the rows, in their order.
        options: Of the write.
    """

    def __init__(self, columns: Iterable[str], **options: str) -> None:
        schema = StructType([StructField(name, _WRITTEN[name]) for name in columns])
        self._arrow = arrow_schema_of(schema)
        self._writer = IsterDataSource(options).writer(schema, overwrite=False)

    def run(self, *tasks: list[tuple]) -> None:
        """Stages the rows of each task, two at a time, and commits; or aborts, and raises."""
        messages: list = [None] * len(tasks)
        try:
            for number, rows in enumerate(tasks):
                messages[number] = self._writer.write(self._batches(rows))
                messages[number].partition = number
            self._writer.commit(messages)
        except Exception:
            self._writer.abort(messages)
            raise

    def _batches(self, rows: list[tuple]) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(rows), 2):
            columns = zip(*rows[at : at + 2], strict=True)
            arrays = [pa.array(c, f.type) for c, f in zip(columns, self._arrow, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._arrow)


@contextmanager
def without_spark() -> Iterator[None]:
    """Closes, at the end, what reads and writes in this process share."""
    try:
        yield
    finally:
        _close_all()


class Elsewhere:
    """A log that tells clients of another `wal.dir`: one that is not on their machine."""

    def __init__(self, log: Log, config: str) -> None:
        self._log = log
        self.config = load_config(config)

    def __getattr__(self, name: str):
        return getattr(self._log, name)


EXPRESS = {"engine": "embedded", "express": {"linger_ms": 1, "resort_seconds": 3600}}
"""Settings of an uploader whose topics with `ack: tiered` have runs, which stay as they are."""


def fill_runs(topic: Topic, *sizes: int, first: int = 0) -> None:
    """So many messages at a time, each time as one run or a few in express objects."""
    for size in sizes:
        fill(topic, size, first=first)
        first += size
        topic.wait(first - 1, timeout=60)


def upload_of(topic: Topic, start: int, end: int) -> tuple[ObjectDescriptor, bytes]:
    """What the embedded uploader makes of a range: the descriptor and the bytes of the object."""
    bucket = topic.bucket
    source = bucket.uploads.open_files()
    try:
        made = bucket.uploads.uploader._make_object(source, start, end)
    finally:
        source.close()
    key = object_key(TopicName.parse(topic.name), made.object_id)
    data = bucket._stores.objects.read(key, 0, 1 << 30)
    bucket._stores.objects.delete(key)
    return made, data
