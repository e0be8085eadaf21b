"""What a read task does: reads a partition's slices, in order, as record batches.

    slice of an object ─► that object's bytes ─┐
    slice of the tail ──► local files ─────────┼─► decoder ─► batches with Spark's schema
                          bucket, if moved ────┤
                          owner by Flight ─────┘

Owns: the source of each offset when the task runs, which may differ from the plan: an object may
have been compacted, the tail uploaded and trimmed, the topic moved to another broker, messages
expired. Does not own: the plan.

The plan names the broker that has the tail. If it does not answer, the topic's owner is looked up
again, for as long as a broker may take to come back: the tail is in the bucket or on its disk.

Invariant: a task returns exactly the offsets of the plan, in order, also if data moved meanwhile,
except for those that compaction removed. An offset that no source has ends the task with
`DataGapError`, which names the range, unless `failOnDataLoss` is false: then it is skipped with a
warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import pyarrow as pa

from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.chunks import ObjectPart, ObjectsAhead
from ister.client.flight import FlightClient
from ister.errors import (
    ConflictError,
    CorruptDataError,
    DataGapError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.crc import Buffer
from ister.spark.location import LogLocation, client_of
from ister.spark.owners import ask_first, check_has, find_owner, is_down
from ister.spark.planner import Partition, Slice
from ister.spark.workers import compile_for, keep_buffers, spare_collector
from ister.topic.columns import Decoders, Rows, decode_frames
from ister.topic.history import BucketTopic
from ister.wire.contract import RangeTicket

_log = logging.getLogger("ister.spark.read_task")

# Loading the compiled loops takes less; while another process compiles them, Python's will do.
_LOAD_SECONDS: Final = 5.0
_ROUNDS: Final = 6
_PAUSE_SECONDS: Final = 0.5
# How long to wait for a broker that is down, or for a topic that is on its way to another one.
_OWNER_SECONDS: Final = 60.0

_Source: TypeAlias = Callable[[int], Iterator[Rows]]


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """The incarnation of a topic, and its last owner when the read was planned."""

    incarnation: str
    node: str
    broker: str | None = None
    """The owner's Flight address; None if it was not needed for the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
    """What all tasks of a read share. Pickled."""

    place: LogLocation
    columns: tuple[str, ...]
    fail_on_data_loss: bool

    def read(
        self, partition: Partition, identities: dict[str, TopicIdentity]
    ) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a partition.

        Raises:
            DataGapError: Messages are gone, and `fail_on_data_loss` is set.
            CorruptDataError: A frame is damaged in all sources.
            UnavailableError: A store or the broker does not respond.
        """
        keep_buffers()
        compile_for(partition.bytes, timeout=_LOAD_SECONDS)
        decoders: dict[str, Decoders] = {}
        upcoming = self.place.history().ahead_of(
            part for part in partition.slices if isinstance(part, ObjectPart)
        )
        try:
            for part in partition.slices:
                found = decoders.get(part.topic)
                if found is None:
                    found = decoders[part.topic] = Decoders(part.topic, self.columns)
                yield from _SliceReader(self, part, identities[part.topic], found, upcoming).read()
        finally:
            if upcoming is not None:
                upcoming.clear()
        spare_collector()


class _SliceReader:
    """Reads one slice, from whichever source has the next offset."""

    def __init__(
        self,
        task: ReadTask,
        part: Slice,
        identity: TopicIdentity,
        decoders: Decoders,
        upcoming: ObjectsAhead[Buffer] | None,
    ) -> None:
        self._task = task
        self._part = part
        self._end = part.end
        self._identity = identity
        self._decoders = decoders
        self._upcoming = upcoming
        self._history = task.place.history()
        self._name = TopicName.parse(part.topic)
        self._last: IsterError | None = None
        self._planned_broker = identity.broker
        self._waits_for_owner = False

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yields the slice's rows; tries each source in turn, as far as it has them."""
        position = self._part.start
        pause = threading.Event()
        fruitless, waits_until = 0, 0.0
        sources = self._sources()
        while position < self._end:
            before = position
            self._waits_for_owner = False
            for source in sources:
                try:
                    for rows in source(position):
                        position = rows.next_offset
                        if rows.batch.num_rows:
                            yield rows.batch
                except (
                    UnavailableError,
                    NotFoundError,
                    DataGapError,
                    OffsetOutOfRangeError,
                    CorruptDataError,
                    ConflictError,
                    FencedError,
                ) as error:
                    # Another source may have it.
                    self._last = error
                if position > before:
                    break
            if position > before:
                fruitless, self._last = 0, None
                # The planned object has changed: look the offset up.
                sources = self._sources()[1:] if self._is_of_object else sources
                continue
            position = self._pass_expired(position)
            if position > before:
                continue
            # An offset may be moving from one source to another.
            fruitless += 1
            if fruitless == 1:
                waits_until = SystemClock.monotonic() + _OWNER_SECONDS
            has_time = self._waits_for_owner and SystemClock.monotonic() < waits_until
            if isinstance(self._last, CorruptDataError) or (fruitless >= _ROUNDS and not has_time):
                raise self._nobody_has(position)
            pause.wait(_PAUSE_SECONDS)

    @property
    def _is_of_object(self) -> bool:
        return isinstance(self._part, ObjectPart)

    def _sources(self) -> list[_Source]:
        if self._is_of_object:
            return [self._from_object, self._from_bucket, self._from_files, self._from_broker]
        return [self._from_files, self._from_bucket, self._from_broker]

    def _from_object(self, start: int) -> Iterator[Rows]:
        """Reads the object that the plan names, without metadata."""
        part = self._part
        if not isinstance(part, ObjectPart) or start != part.start:
            return iter(())
        return self._topic().read_part(part, self._decoders, self._upcoming)

    def _from_bucket(self, start: int) -> Iterator[Rows]:
        """Reads the objects that have the offsets now."""
        topic = self._topic()
        topic.record()
        tiered = topic.tiered
        if start < tiered:
            yield from topic.read_range(start, min(self._end, tiered), self._decoders)

    def _from_files(self, start: int) -> Iterator[Rows]:
        """Reads the owner's files, if they are on this machine."""
        local = self._task.place.local_tail(
            self._part.topic, self._identity.node, self._identity.incarnation
        )
        if local is None:
            return
        chunk_bytes = self._history.config.storage.wal.stream_chunk_size
        for frames in local.frames(start, self._end, chunk_bytes=chunk_bytes):
            yield from decode_frames(frames, self._decoders)

    def _from_broker(self, start: int) -> Iterator[Rows]:
        """Reads from the broker that the plan names; on a retry, from the topic's owner now."""
        planned, self._planned_broker = self._planned_broker, None
        is_tail = not self._is_of_object
        try:
            if planned is None:
                topic = self._part.topic
                owner = find_owner(self._task.place, topic)
                if is_tail and owner.waits is not None:
                    raise is_down(owner.waits)
                if not owner.addresses:
                    # A broker that had the tail may be about to register again.
                    self._waits_for_owner = is_tail and self._identity.broker is not None
                    return
                client = ask_first(owner.addresses, partial(check_has, topic=topic), topic=topic)
            else:
                client = client_of(planned)
            yield from self._read_from(client, start)
        except (UnavailableError, FencedError):
            self._waits_for_owner = is_tail
            raise

    def _read_from(self, client: FlightClient, start: int) -> Iterator[Rows]:
        wanted = list(self._task.columns)
        # Always with offsets: compaction may have removed messages.
        asked = wanted if "offset" in wanted else [*wanted, "offset"]
        ticket = RangeTicket(
            topic=self._part.topic,
            start=start,
            end=self._end,
            columns=tuple(asked),
            incarnation=self._identity.incarnation,
        )
        for batch in client.read(ticket):
            start = batch.column("offset")[-1].as_py() + 1
            yield Rows(batch.select(wanted), start)
        if start < self._end:
            # Compaction removed the rest; otherwise the client would have raised an error.
            empty = pa.RecordBatch.from_pylist([], self._decoders.schema)
            yield Rows(empty, self._end)

    def _topic(self) -> BucketTopic:
        """Returns the planned topic, without asking the metadata store."""
        return BucketTopic(self._history, self._name, self._identity.incarnation)

    # -- lost messages ----------------------------------------------------------------------

    def _pass_expired(self, position: int) -> int:
        """Returns the next offset that retention has not deleted, at or after `position`."""
        try:
            topic = self._topic()
            topic.record()
            earliest = topic.earliest
        except ConflictError:
            if self._task.fail_on_data_loss:
                raise
            _log.warning("deleted topic skipped", extra={"topic": self._part.topic})
            return self._end
        except (UnavailableError, NotFoundError) as error:
            self._last = self._last or error
            return position
        if earliest <= position:
            return position
        gone = DataGapError(
            "the messages expired after the read was planned",
            start=position,
            end=min(earliest, self._end),
            topic=self._part.topic,
        )
        if self._task.fail_on_data_loss:
            raise gone
        _log.warning("messages skipped", extra={"error": str(gone)})
        return gone.end

    def _nobody_has(self, position: int) -> IsterError:
        if self._last is not None:
            return self._last
        return UnavailableError(
            "neither the bucket, local files nor the topic's broker have the offset",
            topic=self._part.topic,
            offset=position,
            hint="includeTail=false reads only the bucket",
        )
