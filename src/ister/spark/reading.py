"""What a read task does: a partition's slices, in order, as record batches.

    slice of an object ─► that object's bytes ─┐
    slice of the tail ──► local files ─────────┼─► decoder ─► batches with Spark's schema
                          bucket, if moved ────┤
                          broker by Flight ────┘

Owns: where each offset comes from when the task runs, which may be another place than when it was
planned: an object may have been compacted, the tail uploaded and trimmed, messages expired. Does
not own: the plan.

Invariant: exactly the offsets of the plan come out, in order, whatever moved meanwhile, but for
those that were left out of an object on purpose, which are no loss; an offset
that nobody has any more ends the task with `DataGapError`, which names the range, unless
`failOnDataLoss` is false: then it is left out with a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from ister.client.contract import RangeTicket
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
from ister.model import TopicName
from ister.spark.place import Place
from ister.spark.planner import ObjectSlice, Partition, Slice
from ister.spark.workers import spare_collector
from ister.tier.chunks import ObjectPart
from ister.topic.columns import Decoders, Rows, decode_frames
from ister.topic.history import HistoryTopic
from ister.topic.local_tail import LocalTail

__all__ = ["ReadTask", "TopicIdentity"]

_log = logging.getLogger("ister.spark.reading")

_ROUNDS: Final = 6
_PAUSE_SECONDS: Final = 0.5

_Source: TypeAlias = Callable[[int], Iterator[Rows]]


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Which topic of its name one is, and who wrote it last when the read was planned."""

    incarnation: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
    """What the driver tells every task besides its partition. Pickled."""

    place: Place
    columns: tuple[str, ...]
    fail_on_data_loss: bool

    def read(
        self, partition: Partition, identities: dict[str, TopicIdentity]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a partition.

        Raises:
            DataGapError: Messages are gone, and that is a failure.
            CorruptDataError: A frame is damaged, wherever it is.
            UnavailableError: A store or the broker does not answer.
        """
        decoders: dict[str, Decoders] = {}
        for part in partition.slices:
            found = decoders.get(part.topic)
            if found is None:
                found = decoders[part.topic] = Decoders(part.topic, self.columns)
            yield from _SliceReader(self, part, identities[part.topic], found).read()
        spare_collector()


class _SliceReader:
    """The reading of one slice: where it has come to, and who may have what comes next."""

    def __init__(
        self, task: ReadTask, part: Slice, identity: TopicIdentity, decoders: Decoders
    ) -> None:
        self._task = task
        self._part = part
        self._end = part.end
        self._identity = identity
        self._decoders = decoders
        self._history = task.place.history()
        self._name = TopicName.parse(part.topic)
        self._last: IsterError | None = None

    def read(self) -> Iterator[pa.RecordBatch]:
        """The slice's rows; each source is asked in turn, for as far as it has them."""
        position = self._part.start
        pause = threading.Event()
        fruitless = 0
        sources = self._sources()
        while position < self._end:
            before = position
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
                # What moved once is looked for anew.
                sources = self._sources()[1:] if self._is_of_object else sources
                continue
            position = self._pass_expired(position)
            if position > before:
                continue
            # An offset may be on its way from one source to another.
            fruitless += 1
            if fruitless >= _ROUNDS or isinstance(self._last, CorruptDataError):
                raise self._nobody_has(position)
            pause.wait(_PAUSE_SECONDS)

    @property
    def _is_of_object(self) -> bool:
        return isinstance(self._part, ObjectSlice)

    def _sources(self) -> list[_Source]:
        if self._is_of_object:
            return [self._from_object, self._from_bucket, self._from_files, self._from_broker]
        return [self._from_files, self._from_bucket, self._from_broker]

    def _from_object(self, start: int) -> Iterator[Rows]:
        """The object that the plan names: needs no metadata."""
        part = self._part
        if not isinstance(part, ObjectSlice) or start != part.start:
            return iter(())
        wanted = ObjectPart(
            object_id=part.object_id,
            codec=part.codec,
            start=part.start,
            end=part.end,
            index_offset=part.index_offset,
            position=part.position,
            end_position=part.end_position,
            boundaries=part.boundaries,
            format=part.format,
            object_bytes=part.size_bytes,
        )
        return self._topic().read_part(wanted, self._decoders)

    def _from_bucket(self, start: int) -> Iterator[Rows]:
        """Whatever objects hold the offsets now."""
        topic = self._topic()
        topic.record()
        tiered = topic.tiered
        if start < tiered:
            yield from topic.read_range(start, min(self._end, tiered), self._decoders)

    def _from_files(self, start: int) -> Iterator[Rows]:
        """The owner's files, if they are on this machine."""
        local = LocalTail.find(
            self._history.config.storage.wal.dir,
            self._name,
            self._identity.node,
            self._identity.incarnation,
            clock=self._history.clock,
            metrics=self._history.metrics,
        )
        if local is None:
            return
        chunk_bytes = self._history.config.storage.wal.stream_chunk_size
        for frames in local.frames(start, self._end, chunk_bytes=chunk_bytes):
            yield from decode_frames(frames, self._decoders)

    def _from_broker(self, start: int) -> Iterator[Rows]:
        client = self._task.place.flight()
        if client is None:
            return
        wanted = list(self._task.columns)
        # With offsets in any case: messages may have been left out on purpose.
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
            # The rest was left out, or the client would have complained.
            empty = pa.RecordBatch.from_pylist([], self._decoders.schema)
            yield Rows(empty, self._end)

    def _topic(self) -> HistoryTopic:
        """The topic that was planned; the metadata store is asked only where it is needed."""
        return HistoryTopic(self._history, self._name, self._identity.incarnation)

    # -- what is gone -----------------------------------------------------------------------

    def _pass_expired(self, position: int) -> int:
        """Where to go on if retention has taken what comes next; `position` if it has not.

        Raises:
            DataGapError: It has, and that is a failure.
        """
        try:
            topic = self._topic()
            topic.record()
            earliest = topic.earliest
        except ConflictError:
            if self._task.fail_on_data_loss:
                raise
            _log.warning("a topic that is gone is left out", extra={"topic": self._part.topic})
            return self._end
        except (UnavailableError, NotFoundError) as error:
            self._last = self._last or error
            return position
        if earliest <= position:
            return position
        gone = DataGapError(
            "retention took the messages after the read was planned",
            start=position,
            end=min(earliest, self._end),
            topic=self._part.topic,
        )
        if self._task.fail_on_data_loss:
            raise gone
        _log.warning("messages left out", extra={"error": str(gone)})
        return gone.end

    def _nobody_has(self, position: int) -> IsterError:
        if self._last is not None:
            return self._last
        hint = "; no broker is given" if self._task.place.broker is None else ""
        return UnavailableError(
            f"neither the bucket nor local files have the offset{hint}",
            topic=self._part.topic,
            offset=position,
            hint="the option broker names who serves what is not in the bucket yet; "
            "includeTail=false reads the bucket alone",
        )
