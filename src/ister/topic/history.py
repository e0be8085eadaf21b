"""The stores of a log, read without owning anything: no lock, no local files, no broker.

    with ister.open_bucket("ister.yml") as history:
        table = history.topic("/default/orders").read_arrow().read_all()

Owns: the connections. Does not own: topics; their owners continue to write.

Only tiered messages are visible: committed objects, by their descriptors. The tail, which is what a
topic's owner has not uploaded yet, is not; reprs and results say so. Stores are opened when first
needed: a Spark task that knows its byte range of an object needs no metadata.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import datetime
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from ister.base import forks
from ister.base.clock import Clock, SystemClock
from ister.base.metrics import Metrics
from ister.base.model import Start, TopicName
from ister.base.notebook import render_table
from ister.base.partitions import partition_name
from ister.base.positions import to_milliseconds
from ister.bucket.catalog import Catalog, list_partitions
from ister.bucket.chunks import OBJECTS_AHEAD_MAX, FirstRange, ObjectPart, ObjectsAhead
from ister.bucket.directory import list_topics
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.membership import is_node_running
from ister.bucket.names import TopicKeys, object_key
from ister.config import CloudBackend, Config, OnDamage
from ister.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.format.arrow.text import Projection
from ister.format.crc import Buffer
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import TopicRecord, decode_topic
from ister.metadata.base import MetadataStore
from ister.objectstore.base import ObjectStore
from ister.objectstore.measured import MeasuredReads
from ister.objectstore.slices import with_slices
from ister.topic.arguments import as_offset
from ister.topic.columns import Decoders, Rows, read_part, read_range
from ister.topic.stores import open_metadata, open_objects
from ister.topic.table import TopicTable

_UNSEEN: Final = "without messages not yet uploaded; a broker or the log's own process has them"

COVERAGE: Final = b"ister.history"
"""Schema metadata key of what is read from a topic: which offsets, and what may be missing."""


class BucketLog:
    """The tiered messages of a log's topics, without the tails. Thread-safe.

    Made by `ister.open_bucket`.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        objects: ObjectStore | None = None,
        metadata: MetadataStore | None = None,
    ) -> None:
        """The stores that `config` names, or the ones given.

        Raises:
            ConfigError: The settings have no bucket that others could read.
        """
        if not config.storage.mode.has_bucket:
            raise ConfigError(
                f"a log in the mode {config.storage.mode} has no bucket",
                hint="storage.mode: wal_cloud, which is the default",
            )
        if config.storage.cloud.backend is CloudBackend.MEMORY and objects is None:
            raise ConfigError("a bucket in memory belongs to the process that has it")
        self.config = config
        self.metrics = Metrics()
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._objects = None if objects is None else with_slices(objects)
        self._metadata = metadata
        self._ahead: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._fork_error: ClosedError | None = None
        forks.register(self)

    # -- stores -----------------------------------------------------------------------------

    @property
    def objects(self) -> ObjectStore:
        """The object store."""
        with self._lock:
            self._check_open()
            if self._objects is None:
                self._objects = open_objects(self.config.storage, self.clock)
            return self._objects

    @property
    def metadata(self) -> MetadataStore:
        """The metadata store, to be read.

        Raises:
            UnavailableError: It does not answer.
            NotFoundError: There is none where the settings say.
        """
        with self._lock:
            self._check_open()
            if self._metadata is None:
                self._metadata = open_metadata(
                    self.config.storage.metadata, self.clock, read_only=True
                )
            return self._metadata

    @property
    def ahead(self) -> Executor | None:
        """The executor that prefetches chunks; None if prefetching is off."""
        if not self.config.storage.cloud_reader.read_ahead:
            return None
        with self._lock:
            self._check_open()
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(
                    OBJECTS_AHEAD_MAX, thread_name_prefix="ister-read-ahead"
                )
            return self._ahead

    def ahead_of(self, parts: Iterable[ObjectPart]) -> ObjectsAhead[Buffer] | None:
        """Prefetches parts that are going to be read in this order; None if that is off."""
        parts = list(parts)
        ahead = self.ahead
        if ahead is None or len(parts) < 2:
            return None
        chunk_bytes = self.config.storage.cloud_reader.fetch_chunk_size
        reads = MeasuredReads(self.objects, clock=self.clock, metrics=self.metrics)
        upcoming = ObjectsAhead(reads.view, ahead, bytes_max=chunk_bytes)
        keys = ((object_key(TopicName.parse(part.topic), part.object_id), part) for part in parts)
        ranges = (FirstRange.of_part(key, part, chunk_bytes) for key, part in keys)
        upcoming.expect(first for first in ranges if first is not None)
        return upcoming

    # -- topics -----------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return list_topics(self.metadata, self.config.storage.metadata.root_prefix)

    def partitions(self, name: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; none if there is none.

        Raises:
            TopicNameError: Not a name.
            UnavailableError: The metadata store does not answer.
        """
        parsed, prefix = TopicName.parse(name), self.config.storage.metadata.root_prefix
        found = self.metadata.get(TopicKeys(prefix, parsed).record)
        if found is not None and decode_topic(found.value, key=found.key).is_open:
            return [name]
        return [
            partition_name(name, number)
            for number in list_partitions(self.metadata, prefix, parsed)
        ]

    def topic(self, name: str) -> BucketTopic:
        """A topic, if it exists.

        Raises:
            TopicNameError: Not a name.
            NotFoundError: There is none.
            UnavailableError: The metadata store does not answer.
        """
        topic = BucketTopic(self, TopicName.parse(name))
        topic.record()
        return topic

    def close(self) -> None:
        """Closes the stores. May be called twice."""
        with self._lock:
            self._is_closed = True
            ahead, self._ahead = self._ahead, None
            metadata, self._metadata = self._metadata, None
            objects, self._objects = self._objects, None
        if ahead is not None:
            ahead.shutdown(wait=True, cancel_futures=True)
        if metadata is not None:
            metadata.close()
        if objects is not None:
            objects.close()

    def _after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; see `ister.base.forks`."""
        forks.reset_locks(self._lock)
        self._fork_error = error
        self._ahead = self._metadata = self._objects = None

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the history is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BucketLog {self.config.storage.cloud.root}, without messages not yet uploaded>"

    def _repr_html_(self) -> str:
        rows = []
        if not self._is_closed:
            topics = [self.topic(name) for name in self.topics()]
            rows = [[topic.name, topic.earliest, topic.tiered] for topic in topics]
        title = f"History {self.config.storage.cloud.root}"
        return render_table(title, ("topic", "earliest", "tiered"), rows, note=_UNSEEN)


class BucketTopic:
    """The tiered messages of one topic, without the tail. Thread-safe."""

    def __init__(self, history: BucketLog, name: TopicName, incarnation: str | None = None) -> None:
        """A topic by its name; with `incarnation`, only that topic of the name."""
        self._history = history
        self._name = name
        self._incarnation = incarnation
        self.name = str(name)

    # -- what it is -------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """What the metadata store knows about the topic, or about another one of its name."""
        history = self._history
        keys = TopicKeys(history.config.storage.metadata.root_prefix, self._name)
        return Catalog(history.metadata, keys, clock=history.clock, metrics=history.metrics)

    @property
    def clock(self) -> Clock:
        """The clock."""
        return self._history.clock

    def record(self) -> TopicRecord:
        """The topic's record.

        Raises:
            NotFoundError: It does not exist (any more).
            ConflictError: Another one has its name.
        """
        found = self.catalog.record()
        if found is None or not found[0].is_open:
            raise NotFoundError(f"topic {self.name} does not exist", topic=self.name)
        if self._incarnation not in (None, found[0].incarnation):
            raise ConflictError("the topic was deleted and made again", topic=self.name)
        return found[0]

    def is_away(self, record: TopicRecord) -> bool:
        """Whether no process has the topic open, and the node that wrote it last is not running.

        What it has not uploaded cannot be read then, unless its files are on this machine.
        """
        if not record.node or self.catalog.owner() is not None:
            return False
        prefix = self._history.config.storage.metadata.root_prefix
        return not is_node_running(self._history.metadata, prefix, record.node)

    @property
    def earliest(self) -> int:
        """The first offset in the bucket; where it will begin, if nothing is there yet."""
        first = self.catalog.first()
        if first is not None:
            return first.start
        record = self.record()
        return max(record.expired_before, record.lineage[0].start if record.lineage else 0)

    @property
    def tiered(self) -> int:
        """The first offset after the newest object."""
        last = self.catalog.last()
        return last.end if last is not None else self.earliest

    @property
    def is_sealed(self) -> bool:
        """Whether everything is tiered: the last owner has uploaded the tail and handed it over."""
        return self.catalog.sealed() is not None

    def descriptors(self, start: int, end: int) -> list[ObjectDescriptor]:
        """The objects with offsets in a range, ascending."""
        if start >= end:
            return []
        return [described for described, _ in self.catalog.descriptors(start, end)]

    def walk_descriptors(self, start: int, end: int) -> Iterator[ObjectDescriptor]:
        """Yields the objects with offsets in a range, ascending; reads their descriptors lazily."""
        if start < end:
            for described, _ in self.catalog.descriptors(start, end, is_partial=True):
                yield described

    def find_time(self, publish_time_ms: int, start: int, end: int) -> int | None:
        """The first offset in a range whose message was published at or after the time."""
        reader = self.reader()
        try:
            return reader.find_time(publish_time_ms, start=start, end=end)
        finally:
            reader.close()

    def reader(self) -> HistoryReader:
        """A careful reader of the topic's objects, frame by frame."""
        history = self._history
        if self._incarnation is not None:
            self.record()
        settings = history.config.storage.cloud_reader
        return HistoryReader(
            self.catalog,
            history.objects,
            settings=ReaderSettings(
                chunk_bytes=settings.fetch_chunk_size,
                ranged=settings.enable_ranged_reads,
                skips_damage=settings.on_damage is OnDamage.SKIP,
            ),
            clock=history.clock,
            metrics=history.metrics,
            ahead=history.ahead,
        )

    # -- reading ----------------------------------------------------------------------------

    def read_arrow(
        self,
        start: Start = "earliest",
        *,
        end: int | datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.RecordBatchReader:
        """The messages of a range as Arrow, read while it is consumed.

        What the topic's owner has not uploaded yet is not among them, unless the topic is sealed.
        The schema's metadata says so: `reader.schema.metadata[b"ister.history"]`.

        Args:
            start: `earliest`; `latest`, which is the end; an offset; or a point in time, which is
                the first message published then or later.
            end: The offset, or the point in time, before which to stop; everything that is tiered
                now by default.
            columns: Which ones, in this order; all of them by default. By name only: `text`, the
                payload as UTF-8, null where it is not.

        Raises:
            OffsetOutOfRangeError: The bucket does not have the offset.
            InvalidRequestError: An argument makes no sense, or there is no such column.
        """
        projection = Projection(columns)
        decoders = Decoders(self.name, projection.stored)
        self.record()
        earliest, tiered = self.earliest, self.tiered
        first = self._resolve("start", start, earliest, tiered)
        last = tiered if end is None else self._resolve("end", end, earliest, tiered)
        for offset in (first, last):
            if not earliest <= offset <= tiered:
                raise OffsetOutOfRangeError(
                    "the bucket does not have the offset",
                    topic=self.name,
                    offset=offset,
                    earliest=earliest,
                    next=tiered,
                )
        if first > last:
            raise InvalidRequestError(
                f"end {last} is before start {first}", topic=self.name, offset=first
            )
        batches = map(projection.apply, self._batches(first, last, decoders))
        said = f"offsets {first} to {last} of {self.name}"
        if not self.is_sealed:
            said = f"{said}, {_UNSEEN}"
        schema = projection.schema.with_metadata({COVERAGE: said})
        return pa.RecordBatchReader.from_batches(schema, batches)

    def table(
        self,
        start: Start = "earliest",
        *,
        end: int | datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> TopicTable:
        """A range as a table, for pandas, Polars, DuckDB and notebooks; see `read_arrow`."""
        return TopicTable(self.name, lambda: self.read_arrow(start, end=end, columns=columns))

    def _resolve(self, name: str, where: Start, earliest: int, tiered: int) -> int:
        if where == "earliest":
            return earliest
        if where == "latest":
            return tiered
        if isinstance(where, datetime):
            found = self.find_time(to_milliseconds(where), earliest, tiered)
            return tiered if found is None else found
        return as_offset(name, where)

    def _batches(self, start: int, end: int, decoders: Decoders) -> Iterator[pa.RecordBatch]:
        found = self.descriptors(start, end)
        upcoming = self._history.ahead_of(
            ObjectPart.overlapping(self.name, described, start, end) for described in found
        )
        try:
            for described in found:
                if described.start > start:
                    # A hole, unless the catalog has changed meanwhile: looking for it tells.
                    yield from _batches(self.read_range(start, min(end, described.start), decoders))
                    start = described.start
                if described.end > start:
                    part = ObjectPart.overlapping(self.name, described, start, end)
                    yield from _batches(self.read_part(part, decoders, upcoming))
                    start = min(end, described.end)
        finally:
            if upcoming is not None:
                upcoming.clear()
        if start < end:
            yield from _batches(self.read_range(start, end, decoders))

    def read_part(
        self, part: ObjectPart, decoders: Decoders, upcoming: ObjectsAhead[Buffer] | None = None
    ) -> Iterator[Rows]:
        """The messages of a part of an object; as `ister.topic.columns.read_part`."""
        history = self._history
        settings = history.config.storage.cloud_reader
        return read_part(
            history.objects,
            object_key(self._name, part.object_id),
            part,
            decoders,
            open_careful=self.reader,
            chunk_bytes=settings.fetch_chunk_size,
            ahead=history.ahead,
            clock=history.clock,
            metrics=history.metrics,
            upcoming=upcoming,
        )

    def read_range(self, start: int, end: int, decoders: Decoders) -> Iterator[Rows]:
        """The messages of a range, whichever objects hold them now."""
        chunk_bytes = self._history.config.storage.cloud_reader.fetch_chunk_size
        return read_range(self.reader, start, end, decoders, bytes_max=chunk_bytes)

    def __repr__(self) -> str:
        return f"<BucketTopic {self.name}, without messages not yet uploaded>"

    def _repr_html_(self) -> str:
        row = [self.earliest, self.tiered, self.is_sealed]
        note = "" if self.is_sealed else _UNSEEN
        headers = ("earliest", "tiered", "sealed")
        return render_table(f"History of {self.name}", headers, [row], note=note)


def _batches(found: Iterator[Rows]) -> Iterator[pa.RecordBatch]:
    """The batches that have rows."""
    for rows in found:
        if rows.batch.num_rows:
            yield rows.batch
