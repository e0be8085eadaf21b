"""A data directory that a Spark stream reads, and Spark's part of a stream without Spark."""

import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

import ister
from ister.bucket.catalog import Subscription
from ister.bucket.retention import expire
from ister.spark.batch import PlannedPartition
from ister.spark.compat import ReadLimit
from ister.spark.offsets import StreamOffset
from ister.spark.options import ReadOptions
from ister.spark.rows import row_schema
from ister.spark.stream import StreamReader
from ister.topic.log import Log
from ister.topic.topic import Topic

A, B, C = "/default/a", "/default/b", "/default/c"

COLUMNS = "topic,offset,payload"

_STORAGE = {
    # Small files, and nothing that happens by itself.
    "wal": {"rotate_max_bytes": 4096, "retention": {"time_minutes": None, "size_mb": 0}},
    "uploader": {"engine": "none", "index_every_messages": 5},
}


class Row(NamedTuple):
    """A message as a query gets it."""

    topic: str
    offset: int
    payload: bytes


class Home:
    """A data directory with its `ister.yml`, and what an owner does in it.

    Args:
        path: An existing directory.
        storage: Settings below `storage`, by section.
    """

    def __init__(self, path: Path, **storage: dict) -> None:
        self.path = path
        self.config = str(path / "ister.yml")
        tree = {key: dict(value) for key, value in _STORAGE.items()}
        for section, settings in storage.items():
            tree[section] = {**tree.get(section, {}), **settings}
        tree["wal"]["dir"] = str(path / "wal")
        self._storage = tree
        self._write(self.config, tree)

    def _write(self, path: str, storage: dict) -> None:
        Path(path).write_text(yaml.safe_dump({"storage": storage}))

    def remote_config(self) -> str:
        """The settings of a machine that has the bucket and the metadata, and no files."""
        path = str(self.path / "remote.yml")
        storage = {
            **self._storage,
            "wal": {"dir": str(self.path / "elsewhere" / "wal")},
            "cloud": {"root": str(self.path / "objects")},
            "metadata": {"path": str(self.path / "metadata.db")},
        }
        self._write(path, storage)
        return path

    def open(self) -> Log:
        """The log, whose owner is this process until it is closed."""
        return ister.open(self.config)

    def second_node(self) -> "Home":
        """Another node of the same log, with files of its own."""
        (self.path / "second").mkdir()
        return Home(
            self.path / "second",
            cloud={"root": str(self.path / "objects")},
            metadata={"path": str(self.path / "metadata.db")},
        )

    def append(
        self, name: str = A, count: int = 1, *, upload: bool = False, size: int = 0
    ) -> range:
        """Messages appended by an owner that comes and goes; their offsets."""
        with self.open() as log:
            offsets = publish(log.topic(name, create=True), count, size=size)
            if upload:
                log.topic(name).upload()
            return offsets

    def delete(self, name: str = A) -> None:
        """A topic deleted by an owner that comes and goes."""
        with self.open() as log:
            log.delete(name)

    def age_out(self, before: int, name: str = A) -> None:
        """Everything below an offset is gone in both tiers: an object and a file begin there."""
        with self.open() as log:
            topic = log.topic(name)
            topic.bucket.retention.trim()
            owned = topic.bucket.owned
            old = [found for found, _ in owned.catalog.descriptors() if found.end <= before]
            expire(owned, log.stores.objects, old, metrics=log.metrics)
            assert topic.earliest == before, "an object and a file begin there"

    def read(self, name: str) -> list[ister.Message]:
        """Everything in a topic."""
        with self.open() as log:
            return list(log.topic(name).read())

    def metadata(self) -> dict[str, bytes]:
        """Everything in the metadata store, by key."""
        with ister.open_bucket(self.config) as history:
            return {found.key: found.value for found in history.metadata.range("/")}

    def objects(self) -> set[str]:
        """The paths of all files in the bucket."""
        root = self.path / "objects"
        return {
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }

    def staged(self) -> set[str]:
        """Those that are rows on their way into a topic."""
        return {path for path in self.objects() if path.startswith("staging/")}

    def subscriptions(self, name: str = A) -> list[Subscription]:
        """The cursors of a topic."""
        with ister.open_bucket(self.config) as history:
            return history.topic(name).catalog.subscriptions()

    def cursor(self, subscription: str, name: str = A) -> int | None:
        """Where a subscription stands in a topic; None if it has no cursor there."""
        found = {item.name: item.progress.offset for item in self.subscriptions(name)}
        return found.get(subscription)


def payload_of(name: str, offset: int) -> bytes:
    """The payload of the message that has an offset in a topic."""
    return f"{name}#{offset}".encode()


def publish(topic: Topic, count: int, *, size: int = 0) -> range:
    """Messages that say what they are, durable and visible to other processes on return.

    Args:
        topic: Where to.
        count: How many.
        size: How many bytes each has beside its payload.
    """
    first = topic.watermarks.next
    offsets = range(first, first + count)
    payloads = [payload_of(topic.name, offset) for offset in offsets]
    topic.append_many(payloads, attributes={"padding": "." * size} if size else None)
    topic.flush()
    topic.wal.save_checkpoint()
    return offsets


def rows_of(name: str, offsets: Iterable[int]) -> list[Row]:
    """The rows that `publish` has made."""
    return [Row(name, offset, payload_of(name, offset)) for offset in offsets]


def a_reader(home: Home | None, /, **options: str | None) -> StreamReader:
    """A reader as the data source makes it; of topic A unless told."""
    config = home.config if home is not None else None
    given = {"config": config, "columns": COLUMNS, **options}
    if "topicPattern" not in given:
        given.setdefault("topic", A)
    given = {name: value for name, value in given.items() if value is not None}
    parsed = ReadOptions.parse(given, is_streaming=True)
    return StreamReader(parsed, row_schema(parsed.columns))


class Query:
    """What Spark does with a reader: the order of its calls, its checkpoint and its equality.

    Offsets cross as JSON text, the reader of tasks is another one than that of the driver, and
    partitions are pickled. The first batch is always made, also without a message in it; a batch
    that is done is told to the source when the next one is made. `restart` is the next process
    with the same checkpoint.
    """

    def __init__(self, make: Callable[..., StreamReader], **options: str | None) -> None:
        self._make = make
        self.offsets: list[str] = []
        """The ends of all batches that were planned: Spark's directory `offsets`."""
        self.finished = 0
        """How many batches are done: Spark's directory `commits`."""
        self.rows: list[Row] = []
        """Those of all batches that are done."""
        self._options = options
        self._begin()

    def _begin(self) -> None:
        self.driver = self._make(**self._options)
        self._tasks = pickle.dumps(self._make(**self._options))
        self._limit: ReadLimit | None = None
        self._initial: str | None = None
        if self.offsets:
            # How Spark tells a source where the checkpoint stands.
            last = self.offsets[-1]
            assert self.driver.partitions(json.loads(last), json.loads(last)) == []

    def restart(self, **options: str | None) -> None:
        """The query ends wherever it is, and is started again, with other options if given."""
        self._options = {**self._options, **options}
        self._begin()

    def resolve_start(self) -> dict[str, int]:
        """Where a query without a checkpoint begins, by topic."""
        offset = StreamOffset.from_json_text(self._start_of(0))
        return {topic: place.offset for topic, place in offset.topics.items()}

    # -- one batch ----------------------------------------------------------------------------

    def plan(self, limit: ReadLimit | None = None) -> bool:
        """Writes down where the next batch ends; False if there is none."""
        number = len(self.offsets)
        assert self.finished == number, "the last batch has to be done first"
        end = self._ask_for_end(number, limit)
        start = self._start_of(number)
        if end == start and number > 0:
            return False
        self.offsets.append(end)
        if number > 0:
            self.driver.commit(json.loads(self.offsets[number - 1]))
        return True

    def collect(self) -> list[Row]:
        """The rows of the batch that was planned last; may be called again, as tasks may."""
        number = len(self.offsets) - 1
        start, end = json.loads(self._start_of(number)), json.loads(self.offsets[number])
        if number == 0:
            self.driver.initialOffset()
        partitions = pickle.loads(pickle.dumps(list(self.driver.partitions(start, end))))
        assert all(isinstance(part, PlannedPartition) for part in partitions)
        tasks = pickle.loads(self._tasks)
        return [
            Row(*values)
            for part in partitions
            for batch in tasks.read(part)
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        ]

    def finish(self, rows: list[Row]) -> None:
        """Notes that the batch is done."""
        self.finished = len(self.offsets)
        self.rows += rows

    def run(self, limit: ReadLimit | None = None) -> list[Row]:
        """A whole trigger: the rows of its batch; nothing if there is none."""
        if not self._is_planned(limit):
            return []
        rows = self.collect()
        self.finish(rows)
        return rows

    def drain(self) -> list[list[Row]]:
        """Triggers until there is nothing new: the rows of each batch that has some."""
        batches: list[list[Row]] = []
        while self._is_planned(None):
            batches.append(self.run())
        return [rows for rows in batches if rows]

    def available_now(self) -> list[list[Row]]:
        """A whole run with that trigger, in a process of its own."""
        self.restart()
        self.driver.prepareForTriggerAvailableNow()
        return self.drain()

    def _ask_for_end(self, number: int, limit: ReadLimit | None) -> str:
        if limit is None:
            limit = self._limit = self._limit or self.driver.getDefaultReadLimit()
        start = json.loads(self._start_of(number))
        return json.dumps(self.driver.latestOffset(start, limit))

    def _is_planned(self, limit: ReadLimit | None) -> bool:
        return self.finished < len(self.offsets) or self.plan(limit)

    def _start_of(self, number: int) -> str:
        if number > 0:
            return self.offsets[number - 1]
        if self._initial is None:
            self._initial = json.dumps(self.driver.initialOffset())
        return self._initial


class OlderQuery(Query):
    """What Spark before 4.2 does: it passes neither a start nor a limit."""

    def _ask_for_end(self, number: int, limit: ReadLimit | None) -> str:
        assert limit is None, "Spark has none"
        return json.dumps(self.driver.latestOffset())

    def available_now(self) -> list[list[Row]]:
        """A whole run: one batch at most."""
        self.restart()
        return [rows for rows in [self.run()] if rows]


def offsets_of(rows: Iterable[Row], name: str = A) -> list[int]:
    """The offsets of a topic's rows, in their order."""
    return [row.offset for row in rows if row.topic == name]


def incarnation_of(home: Home, name: str = A) -> str:
    """Which topic of its name it is now."""
    with ister.open_bucket(home.config) as history:
        return history.topic(name).record().incarnation
