"""Which messages of a topic are the latest of their keys: found by Spark, told to whoever rewrites.

    object ─► (key, group, offset), the last of each key ─┐
    object ─► …                                           ├─► GROUP BY key: the highest of each
    object ─► …                                           ┘        │
    staging/…/compact-<id>/… ◄── offsets, sorted ◄── shuffle by group of objects

Owns: the search, and files with the offsets that stay, one a group, in the bucket's staging area.
Does not own: which objects are rewritten, the rewriting, the commit.

A message without a routing key always stays. Of those with the same key the one with the highest
offset stays, unless it is a tombstone (an empty payload) that was published before a given time.
And of each producer that numbers its messages the newest one stays, whatever its key: the topic's
owner tells from it whether a message comes again (`ister.topic.dedup`). A producer without a
message in an object of the last day has been silent for too long.

Only keys and offsets leave the Python workers: two numbers and a key for each key of a part of an
object, then a number for each message that stays. Memory: a task holds one chunk of messages and a
bounded table of keys; Spark's aggregation and sorting spill to disk; a rewriting task goes through
its file of offsets beside the messages, a piece at a time. So the number of keys is bounded by
disks alone.

What a crash leaves: files in the staging area, which are removed when they are old.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Final, TypeAlias, TypedDict, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ister.base.limits import MIB
from ister.base.model import TopicName
from ister.bucket.chunks import ObjectPart
from ister.bucket.names import staging_prefix
from ister.errors import CorruptDataError, InvariantError, IsterError
from ister.format.descriptor import ObjectDescriptor
from ister.objectstore.base import ObjectStore, ObjectWriter
from ister.spark.jobs.job_report import ErrorFields, error_as_fields
from ister.spark.jobs.tasks import SparkRunner, TaskRunner, map_tasks
from ister.spark.location import LogLocation
from ister.topic.columns import Decoders
from ister.topic.dedup import epoch_in, find_sequenced
from ister.topic.history import BucketTopic

STAGED_PREFIX: Final = "compact-"
"""What the names begin with under which offsets are staged."""

_TASK_BYTES: Final = 32 * MIB
_KEYS_AT_ONCE: Final = 1 << 17
_STAGED_CHUNK_BYTES: Final = 1 * MIB
_OFFSET_BYTES: Final = 8

# Kinds of rows: the highest code of a key, the newest offset of a producer, how many messages of
# an object have a key, and an object that could not be read. A code is twice an offset, and one
# more if the message goes. The number of a group rises with its offsets: the highest of both are
# those of one message.
_KEYED: Final = 0
_PRODUCER: Final = 1
_COUNT: Final = 2
_FAILED: Final = 3
_PRODUCER_MS: Final = 24 * 3_600_000
_PRODUCED_BY: Final = ["producer_name", "producer_id"]

# Tombstones whose time is over do not stay.
_STAYS: Final = f"kind != {_KEYED} OR code % 2 = 0"
_VALUE: Final = f"CASE WHEN kind < {_COUNT} THEN code DIV 2 ELSE -1 - code END AS value"
_NOTE: Final = f"CASE WHEN kind = {_FAILED} THEN key END AS note"
# A dry run without Spark holds the keys of a topic in memory.
_LOCAL_MESSAGES_MAX: Final = 5_000_000

_FOUND: Final = "topic int, key string, kind int, number int, code long"
_FOUND_ARROW: Final = pa.schema(
    [
        ("topic", pa.int32()),
        ("key", pa.string()),
        ("kind", pa.int32()),
        ("number", pa.int32()),
        ("code", pa.int64()),
    ]
)
_STAGED: Final = "number int, keyed long, stay long, path string, note string"
_STAGED_ARROW: Final = pa.schema(
    [
        ("number", pa.int32()),
        ("keyed", pa.int64()),
        ("stay", pa.int64()),
        ("path", pa.string()),
        ("note", pa.string()),
    ]
)


_Part: TypeAlias = tuple[int, int, ObjectDescriptor]
"""The numbers of a topic and a group, and one of the group's objects."""


class _StagedRow(TypedDict):
    number: int
    keyed: int
    stay: int
    path: str | None
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedTopic:
    """A topic to be searched."""

    name: str
    incarnation: str
    groups: tuple[tuple[ObjectDescriptor, ...], ...]
    """All objects in the bucket, ascending, in the groups of which is to be known what stays;
    without indexes, which are not needed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """What stays of a range. Pickled."""

    keyed: int
    """Messages with a key."""
    stay: int
    """How many of them stay."""
    path: str | None
    """The key of the staged file with their offsets; None if all of them stay, or none."""

    @property
    def removed(self) -> int:
        """How many messages go."""
        return self.keyed - self.stay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The parameters of every task. Pickled."""

    place: LogLocation
    topics: tuple[tuple[str, str], ...]
    """The name and incarnation of each topic."""
    bases: tuple[int, ...]
    """The number of each topic's first group."""
    tombstones_before_us: int
    producers_after_ms: int
    """Objects that are older than this have no message of a producer that may send one again."""
    run: str | None
    """Under which name to stage; None to count only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search."""

    latest: list[list[Latest]]
    """What stays of each group of each topic."""
    errors: dict[str, ErrorFields]
    """Topics that could not be read, as a report has it: nothing may be removed from those."""
    uncounted: frozenset[str]
    """Topics that were not searched: they have too many messages for a dry run."""


def find_latest(
    runner: TaskRunner,
    place: LogLocation,
    topics: Sequence[KeyedTopic],
    *,
    tombstones_before_ms: int,
    now_ms: int,
    run: str | None,
) -> Found:
    """Searches topics for the messages that stay.

    Args:
        runner: Where to search. A runner without Spark searches up to 5 million messages in all.
        place: Where the objects are.
        topics: Which ones.
        tombstones_before_ms: Tombstones published before this go.
        now_ms: The time.
        run: Under which name offsets are staged, unlike any other run's; None to count only.
    """
    search = _Search(
        place=place,
        topics=tuple((topic.name, topic.incarnation) for topic in topics),
        bases=tuple(accumulate((len(topic.groups) for topic in topics[:-1]), initial=0)),
        tombstones_before_us=tombstones_before_ms * 1000,
        producers_after_ms=now_ms - _PRODUCER_MS,
        run=run,
    )
    parts = [
        (number, base + at, described)
        for number, (base, topic) in enumerate(zip(search.bases, topics, strict=False))
        for at, group in enumerate(topic.groups)
        for described in group
    ]
    uncounted: frozenset[str] = frozenset()
    rows: list[_StagedRow] = []
    if not isinstance(runner, SparkRunner):
        uncounted = _beyond(topics, _LOCAL_MESSAGES_MAX)
        for number, topic in enumerate(topics):
            if topic.name not in uncounted:
                rows += _search_here(search, [part for part in parts if part[0] == number])
    elif parts:
        rows = _search_on_spark(runner, search, parts)
    errors: dict[str, ErrorFields] = {}
    by_number: dict[int, Latest] = {}
    for row in rows:
        if row["note"] is not None:
            errors[topics[-1 - row["number"]].name] = json.loads(row["note"])
        else:
            by_number[row["number"]] = Latest(
                keyed=row["keyed"], stay=row["stay"], path=row["path"]
            )
    nothing = Latest(keyed=0, stay=0, path=None)
    latest = [
        [by_number.get(base + at, nothing) for at in range(len(topic.groups))]
        for base, topic in zip(search.bases, topics, strict=True)
    ]
    return Found(latest=latest, errors=errors, uncounted=uncounted)


def _search_on_spark(
    runner: TaskRunner, search: _Search, parts: Sequence[_Part]
) -> list[_StagedRow]:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - an extra

    files = max(1, min(parts[-1][1] + 1, 4 * runner.slots))
    with runner.described("ister compact: keys") as spark:
        rows = (
            map_tasks(spark, partial(_scan, search), _bundle(parts), _FOUND)
            .groupBy("topic", "key", "kind")
            .agg(F.max("number").alias("number"), F.max("code").alias("code"))
            .where(_STAYS)
            .selectExpr("number", _VALUE, _NOTE)
            .repartition(files, "number")
            .sortWithinPartitions("number", "value")
            .mapInArrow(partial(_stage, search), _STAGED)
            .collect()
        )
    return [cast("_StagedRow", row.asDict()) for row in rows]


def _search_here(search: _Search, parts: Sequence[_Part]) -> Iterator[_StagedRow]:
    """Searches a topic in this process; memory grows with its keys."""
    found = pa.Table.from_batches(_scan(search, parts), _FOUND_ARROW)
    highest = found.group_by(["topic", "key", "kind"], use_threads=False).aggregate(
        [("number", "max"), ("code", "max")]
    )
    kind, code = highest["kind"], highest["code_max"]
    is_offset, none = pc.less(kind, _COUNT), pa.scalar(None, pa.string())
    rows = pa.table(
        {
            "number": highest["number_max"],
            "value": pc.if_else(is_offset, pc.shift_right(code, 1), pc.subtract(-1, code)),
            "note": pc.if_else(pc.equal(kind, _FAILED), highest["key"], none),
        }
    ).filter(pc.or_(pc.not_equal(kind, _KEYED), pc.equal(pc.bit_wise_and(code, 1), 0)))
    rows = rows.sort_by([("number", "ascending"), ("value", "ascending")]).combine_chunks()
    for staged in _stage(search, rows.to_batches()):
        yield from cast("list[_StagedRow]", staged.to_pylist())


def _beyond(topics: Sequence[KeyedTopic], limit: int) -> frozenset[str]:
    """Returns the topics that are beyond a total of `limit` messages."""
    found: set[str] = set()
    for topic in topics:
        limit -= sum(item.end - item.start for group in topic.groups for item in group)
        if limit < 0:
            found.add(topic.name)
    return frozenset(found)


def _bundle(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Divides objects among tasks: small ones together."""
    tasks: list[list[_Part]] = []
    room = 0
    for part in parts:
        if not tasks or room <= 0:
            tasks.append([])
            room = _TASK_BYTES
        tasks[-1].append(part)
        room -= part[2].size_bytes
    return tasks


# -- in a task: the keys of objects ---------------------------------------------------------


def _scan(search: _Search, parts: Sequence[_Part]) -> Iterator[pa.RecordBatch]:
    """Scans objects; an error becomes a row."""
    for topic, number, described in parts:
        found = partial(_found, topic, number)
        try:
            for kind, keys, codes in _scan_object(search, *search.topics[topic], described):
                yield found(kind, keys, codes)
        except InvariantError:
            raise
        except IsterError as error:
            note = json.dumps(error_as_fields(error))
            yield _found(topic, -1 - topic, _FAILED, pa.array([note]), pa.array([0], pa.int64()))


def _scan_object(
    search: _Search, topic: str, incarnation: str, described: ObjectDescriptor
) -> Iterator[tuple[int, pa.Array, pa.Array]]:
    """The highest offset of each key in an object, and how many messages have a key."""
    columns = ["offset", "routing_key"]
    earliest_us = (described.publish_time_min or 0) * 1000
    can_expire = earliest_us < search.tombstones_before_us
    if can_expire:
        columns += ["publish_time", "payload"]
    arrived_ms = described.arrived_ms
    if has_producers := arrived_ms is None or arrived_ms >= search.producers_after_ms:
        columns += ["producer_id", "producer_name"]
    newest: dict[str, int] = {}
    rows = keyed = waiting = 0
    tables: list[pa.Table] = []
    part = ObjectPart.overlapping(topic, described, described.start, described.end)
    reader = BucketTopic(search.place.history(), TopicName.parse(topic), incarnation)
    for found in reader.read_part(part, Decoders(topic, columns)):
        batch = found.batch
        rows += batch.num_rows
        keyed += batch.num_rows - batch.column("routing_key").null_count
        tables.append(_codes(batch, search.tombstones_before_us if can_expire else None))
        waiting += batch.num_rows
        if has_producers:
            newest |= _newest(batch)
        if waiting >= _KEYS_AT_ONCE:
            yield from _highest(tables)
            tables, waiting = [], 0
    expected = described.messages if described.kept else described.end - described.start
    if rows != expected:
        # A message that is not seen here must not be taken for one that is not the latest.
        raise CorruptDataError(
            f"{rows} messages in an object of {expected}",
            topic=topic,
            path=described.object_id,
            offset=described.start,
            hint="`ister pipeline scrub` says what is wrong with it",
        )
    yield from _highest(tables)
    if newest:
        codes = pa.array([2 * offset for offset in newest.values()], pa.int64())
        yield _PRODUCER, pa.array(newest, pa.string()), codes
    yield _COUNT, pa.array([described.object_id]), pa.array([keyed], pa.int64())


def _newest(batch: pa.RecordBatch) -> dict[str, int]:
    """The highest offset of each producer that numbers its messages, of those with a key."""
    is_sequenced = find_sequenced(batch.column("producer_id"))
    rows = batch.filter(pc.and_(is_sequenced, batch.column("routing_key").is_valid()))
    if not rows.num_rows:
        return {}
    table = pa.table({name: rows.column(name) for name in (*_PRODUCED_BY, "offset")})
    highest = table.group_by(_PRODUCED_BY, use_threads=False).aggregate([("offset", "max")])
    newest: dict[str, int] = {}
    for row in highest.to_pylist():
        # A batch of Spark's has any id, also one that looks like a producer's.
        if epoch_in(row["producer_id"], row["producer_name"]) is not None:
            newest[row["producer_name"]] = max(
                newest.get(row["producer_name"], -1), row["offset_max"]
            )
    return newest


def _codes(batch: pa.RecordBatch, tombstones_before_us: int | None) -> pa.Table:
    """Key and code of each message with a key: twice the offset, and one if it is to go."""
    code = pc.multiply(batch.column("offset"), 2)
    if tombstones_before_us is not None:
        is_empty = pc.equal(pc.binary_length(batch.column("payload")), 0)
        is_old = pc.less(batch.column("publish_time").cast(pa.int64()), tombstones_before_us)
        code = pc.add(code, pc.and_(is_empty, is_old).cast(pa.int64()))
    keys = batch.column("routing_key")
    table = pa.table({"key": keys, "code": code})
    return table if not keys.null_count else table.filter(keys.is_valid())


def _highest(tables: Sequence[pa.Table]) -> Iterator[tuple[int, pa.Array, pa.Array]]:
    table = pa.concat_tables(tables) if tables else None
    if table is None or not table.num_rows:
        return
    highest = table.group_by("key", use_threads=False).aggregate([("code", "max")])
    for batch in highest.to_batches():
        yield _KEYED, batch.column("key"), batch.column("code_max")


def _found(topic: int, number: int, kind: int, keys: pa.Array, codes: pa.Array) -> pa.RecordBatch:
    def every(value: int) -> pa.Array:
        return pa.repeat(pa.scalar(value, pa.int32()), len(codes))

    return pa.RecordBatch.from_arrays(
        [every(topic), keys, every(kind), every(number), codes], schema=_FOUND_ARROW
    )


# -- in a task: the offsets of a group, staged ----------------------------------------------


def _stage(search: _Search, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Writes what stays of each group, of which the rows come together and sorted."""
    group: _StagedGroup | None = None
    try:
        for batch in batches:
            numbers = np.asarray(batch.column("number"))
            values = np.asarray(batch.column("value"))
            cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1), len(numbers)]
            for begin, end in pairwise(cuts):
                if begin == end:
                    continue
                number = int(numbers[begin])
                if number < 0:
                    yield _staged(number, note=batch.column("note")[begin].as_py())
                    continue
                if group is None or group.number != number:
                    if group is not None:
                        yield group.finish()
                    group = _StagedGroup(search, number)
                group.add(values[begin:end])
        if group is not None:
            yield group.finish()
    finally:
        if group is not None:
            group.abort()


class _StagedGroup:
    """The offsets of one group on their way into a file."""

    def __init__(self, search: _Search, number: int) -> None:
        self.number = number
        self._search = search
        self._keyed = 0
        self._stay = 0
        self._last = -1
        self._path: str | None = None
        self._writer: ObjectWriter | None = None

    def add(self, values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Takes the next values: how many keys an object has, or an offset that stays."""
        counts = values[values < 0]
        self._keyed += int((-1 - counts).sum())
        offsets = values[values >= 0]
        # One may be the latest of its key and its producer's newest.
        offsets = offsets[np.diff(offsets, prepend=self._last) > 0]
        self._last = int(offsets[-1]) if len(offsets) else self._last
        self._stay += len(offsets)
        if not len(offsets) or self._search.run is None:
            return
        if self._writer is None:
            topic = bisect_right(self._search.bases, self.number) - 1
            name = TopicName.parse(self._search.topics[topic][0])
            # Of its own for every attempt: one that Spark has given up on may still be writing.
            self._path = (
                f"{staging_prefix(name, self._search.run)}{self.number}-{secrets.token_hex(4)}"
            )
            self._writer = self._search.place.history().objects.open_writer(
                self._path, chunk_bytes=_STAGED_CHUNK_BYTES, concurrent_parts=2
            )
        self._writer.write(offsets.astype("<i8").tobytes())

    def finish(self) -> pa.RecordBatch:
        """Completes the file, unless it is not needed; returns the result for the driver."""
        is_needed = self._keyed != self._stay
        if self._writer is not None and is_needed:
            self._writer.close()
        return _staged(
            self.number,
            keyed=self._keyed,
            stay=self._stay,
            path=self._path if is_needed else None,
        )

    def abort(self) -> None:
        """Gives up what is not complete."""
        if self._writer is not None:
            self._writer.abort()


def _staged(
    number: int, *, keyed: int = 0, stay: int = 0, path: str | None = None, note: str | None = None
) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"number": number, "keyed": keyed, "stay": stay, "path": path, "note": note}],
        schema=_STAGED_ARROW,
    )


# -- in a task that rewrites ----------------------------------------------------------------


class LatestOffsets:
    """Says which rows of a group stay; is given each of its batches once, in order."""

    def __init__(self, store: ObjectStore, latest: Latest) -> None:
        self._store = store
        self._latest = latest
        self._position = 0
        self._window = np.empty(0, np.int64)
        self._keyed = 0
        self._stay = 0

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """A mask of the rows that stay."""
        has_key = np.asarray(batch.column("routing_key").is_valid())
        offsets = np.asarray(batch.column("offset"))
        is_latest = np.zeros(len(offsets), bool)
        if len(offsets):
            self._reach(int(offsets[-1]))
            at = np.searchsorted(self._window, offsets)
            inside = at < len(self._window)
            is_latest[inside] = self._window[at[inside]] == offsets[inside]
            self._window = self._window[self._window > offsets[-1]]
        self._keyed += int(has_key.sum())
        self._stay += int(is_latest.sum())
        return pa.array(~has_key | is_latest)

    def check(self, described: ObjectDescriptor) -> None:
        """Makes sure that exactly those messages stayed that were found to, when all have come."""
        found, expected = (self._keyed, self._stay), (self._latest.keyed, self._latest.stay)
        if found != expected:
            raise CorruptDataError(
                f"(messages with a key, of them the latest) are {found}, and were {expected}",
                path=described.object_id,
                offset=described.start,
                hint="run the job again",
            )

    def _reach(self, offset: int) -> None:
        """Reads on until what is known goes up to an offset, or the file ends."""
        path = self._latest.path
        while (
            path is not None
            and self._position < self._latest.stay * _OFFSET_BYTES
            and (not len(self._window) or self._window[-1] < offset)
        ):
            data = self._store.read(path, self._position, _STAGED_CHUNK_BYTES)
            if not data or len(data) % _OFFSET_BYTES:
                raise CorruptDataError(
                    "the list of the latest messages is too short", path=path, hint="run it again"
                )
            self._position += len(data)
            self._window = np.concatenate([self._window, np.frombuffer(data, "<i8")])
