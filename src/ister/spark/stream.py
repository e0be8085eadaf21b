"""The stream read: where a query stands, how far its next micro-batch goes, what it may rely on.

Owns: the calls that Spark makes on the driver, in one process per query. Does not own: the offset
value and what counts as loss (`offsets`), limits and partitions (`planner`), reading (`reading`).

Invariants, each of which Spark leaves to the source:

- a batch's messages follow from its end offset alone (`from` in it), so that a batch that failed
  comes again the same, also the first one under `startingOffsets=latest`;
- the same place is the same JSON text, so that an idle query makes no batches;
- an idle query asks the stores a few times a second, not eighty: `latestOffset` waits when it has
  nothing new;
- a store that does not answer for a while ends no query.

`commit` lags one batch behind and may come only when the query starts again: it moves the cursor
of the option `subscription`, which holds retention back, and nothing else.

What a crash leaves: Spark's checkpoint, which says where to go on. Start options count only where
there is none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ister.clock import SystemClock
from ister.errors import (
    ConflictError,
    DataGapError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.spark.batch import PlannedPartition, in_schema
from ister.spark.cursors import hold_cursors
from ister.spark.heads import Head, Heads
from ister.spark.offsets import StreamOffset, TopicHead, TopicOffset, advance, check_loss
from ister.spark.options import ReadOptions
from ister.spark.patience import patiently
from ister.spark.place import find_place
from ister.spark.planner import limit_bytes, limit_messages, plan
from ister.spark.reading import ReadTask, TopicIdentity
from ister.spark.rows import arrow_schema_of, check_read_schema

__all__ = ["StreamReader"]

_log = logging.getLogger("ister.spark.stream")

_POLL_SECONDS: Final = 0.25
_HOLD_SECONDS: Final = 60.0
_ATTEMPTS: Final = 3


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. One instance plans on the driver, others read in tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._task = ReadTask(
            place=find_place(options.config, options.broker_location),
            columns=check_read_schema(schema, options.columns),
            fail_on_data_loss=options.fail_on_data_loss,
        )
        self._initial: StreamOffset | None = None
        self._frozen: dict[str, Head] | None = None
        self._seen: dict[str, Head] = {}
        self._seen_at = -float("inf")
        self._pause = _POLL_SECONDS
        self._held_at = -float("inf")
        self._warned: set[str] = set()

    # -- where ------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - here and below: Spark's names
        """Where a query without a checkpoint begins; the same at every call."""
        if self._initial is None:
            heads = self._heads()
            # The end that `availableNow` froze is also where `latest` is.
            must_exist = self._options.fail_on_data_loss
            found = self._frozen or patiently(lambda: heads.look(must_exist=must_exist))
            self._options.starting_offsets.check_known("startingOffsets", found)
            self._note(found)
            self._initial = patiently(
                lambda: StreamOffset(
                    {name: self._begin(heads, head) for name, head in found.items()}
                )
            )
            self._hold(self._initial)
        return self._initial.to_dict()

    def _begin(self, heads: Heads, head: Head) -> TopicOffset:
        time_ms = self._options.starting_timestamp_ms
        wanted = self._options.starting_offsets.of(head.topic)
        if time_ms is not None:
            found = heads.find_time(head, time_ms)
            offset = head.end if found is None else found
        elif wanted == "earliest":
            offset = head.earliest
        elif wanted == "latest":
            offset = head.end
        else:
            offset = self._check_start(head, wanted)
        return TopicOffset(
            incarnation=head.incarnation, epoch=_known(head).epoch, offset=offset, start=offset
        )

    def _check_start(self, head: Head, offset: int) -> int:
        if offset > head.end:
            raise OffsetOutOfRangeError(
                "startingOffsets is beyond the end",
                topic=head.topic,
                offset=offset,
                earliest=head.earliest,
                next=head.end,
            )
        if offset < head.earliest:
            gone = DataGapError(
                "startingOffsets asks for messages that are no longer kept; failOnDataLoss=false "
                "begins with the first one that is",
                start=offset,
                end=head.earliest,
                topic=head.topic,
            )
            if self._options.fail_on_data_loss:
                raise gone
            _log.warning("messages left out", extra={"error": str(gone)})
        return max(offset, head.earliest)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options say; both may be given, and `latestOffset` honours both."""
        if self._options.max_messages_per_trigger is not None:
            return ReadMaxRows(self._options.max_messages_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Freezes the end: what is there now is read, and then the query stops."""
        heads = self._heads()
        self._frozen = patiently(lambda: heads.look(catches_up=True, must_exist=False))
        self._note(self._frozen)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next micro-batch goes; `start` itself if there is nothing new."""
        previous = StreamOffset.from_dict(start)
        end = self._advance(previous, limit)
        if end is previous and self._frozen is None:
            if self._now() - self._held_at >= _HOLD_SECONDS:
                self._hold(previous)
            self._wait_for_next_look()
            end = self._advance(previous, limit)
        return start if end is previous else end.to_dict()

    def _advance(self, previous: StreamOffset, limit: ReadLimit) -> StreamOffset:
        try:
            return self._advance_in(self._look(), previous, limit)
        except (DataGapError, NotFoundError):
            if not self._refresh():
                raise
            # Retention or a deletion came after the last look: now it is known.
            return self._advance_in(self._look(), previous, limit)

    def _advance_in(
        self, found: dict[str, Head], previous: StreamOffset, limit: ReadLimit
    ) -> StreamOffset:
        known = {name: _known(head) for name, head in found.items()}
        checked, warnings = check_loss(previous, known, fails=self._options.fail_on_data_loss)
        for warning in warnings:
            if warning not in self._warned:
                _log.warning("data loss: %s", warning)
        # Found again at every look, until a message behind the loss moves the checkpoint.
        self._warned = set(warnings)
        starts = {
            name: checked.topics[name].offset if name in checked.topics else head.earliest
            for name, head in found.items()
        }
        ends = {name: head.end for name, head in found.items()}
        if not isinstance(limit, ReadAllAvailable):
            ends = self._limit(found, starts, ends)
        end = advance(checked, known, ends)
        # Past lost data, and nothing new behind it: the checkpoint stays until there is.
        return previous if end is checked else end

    def _limit(
        self, found: Mapping[str, Head], starts: Mapping[str, int], ends: dict[str, int]
    ) -> dict[str, int]:
        options = self._options
        if options.max_messages_per_trigger is not None:
            ends = limit_messages(starts, ends, options.max_messages_per_trigger)
        if options.max_bytes_per_trigger is not None:
            heads, most = self._heads(), options.max_bytes_per_trigger
            ranges = patiently(
                lambda: [
                    heads.range_of(head, starts[name], ends[name])
                    for name, head in found.items()
                    if starts[name] < ends[name]
                ]
            )
            ends = ends | limit_bytes(ranges, most)
        return ends

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Where the topics end: `latestOffset` in a query's progress. Lag is the difference."""
        if not self._seen:
            return None
        return StreamOffset(
            {
                name: TopicOffset(
                    incarnation=head.incarnation,
                    epoch=_known(head).epoch,
                    offset=head.end,
                    start=head.end,
                )
                for name, head in self._seen.items()
            }
        ).to_dict()

    # -- what is there ----------------------------------------------------------------------

    def _heads(self) -> Heads:
        return Heads(self._task.place, self._options)

    def _look(self) -> dict[str, Head]:
        """What topics hold: as frozen, as seen a moment ago, or asked anew."""
        if self._frozen is not None:
            return self._frozen
        if self._now() - self._seen_at >= self._pause:
            heads = self._heads()
            began = self._now()
            found = patiently(lambda: heads.look(must_exist=False))
            # A look at thousands of topics takes a while: not more than a fifth of the time.
            self._pause = max(_POLL_SECONDS, 4 * (self._now() - began))
            self._note(found)
        return self._seen

    def _refresh(self) -> bool:
        """Looks anew; whether something has changed. A frozen end stays where it is."""
        heads = self._heads()
        before = self._frozen if self._frozen is not None else self._seen
        found = patiently(lambda: heads.look(must_exist=False))
        if self._frozen is not None:
            found = self._frozen = {
                name: replace(head, end=max(head.earliest, self._frozen[name].end))
                for name, head in found.items()
                if name in self._frozen
            }
        self._note(found)
        return found != before

    def _note(self, found: dict[str, Head]) -> None:
        self._seen, self._seen_at = found, self._now()

    def _wait_for_next_look(self) -> None:
        threading.Event().wait(max(0.0, self._seen_at + self._pause - self._now()))

    def _now(self) -> float:
        return SystemClock.monotonic()

    # -- a micro-batch ----------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The plan of the micro-batch that ends at `end`; see the module header about `start`."""
        batch = StreamOffset.from_dict(end)
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            try:
                return patiently(lambda: self._plan(batch))
            except (DataGapError, NotFoundError):
                # Retention or a deletion may have come between the look and the plan.
                if not attempts:
                    raise

    def _plan(self, batch: StreamOffset) -> list[InputPartition]:
        heads = self._heads()
        found = heads.look(must_exist=False)
        if any(end > found[name].end for name, (_, end) in batch.ranges().items() if name in found):
            # Whoever told the end knew more than the owner's checkpoint does by now.
            found = heads.look(must_exist=False, catches_up=True)
        ranges = []
        for name, wanted in batch.ranges().items():
            kept = self._clip(batch.topics[name], name, wanted, found.get(name))
            if kept is not None:
                ranges.append(heads.range_of(found[name], *kept))
        planned = plan(
            ranges,
            split_bytes=self._options.split_bytes,
            min_partitions=self._options.min_partitions,
        )
        identities = {
            name: TopicIdentity(head.incarnation, head.node) for name, head in found.items()
        }
        return [PlannedPartition(partition, identities) for partition in planned]

    def _clip(
        self, place: TopicOffset, name: str, wanted: tuple[int, int], head: Head | None
    ) -> tuple[int, int] | None:
        """As much of a batch's range as there still is; None if the topic is gone.

        Raises:
            ConflictError, DataGapError: Something is gone, and that is a failure.
        """
        start, end = wanted
        is_gone = head is None or head.incarnation != place.incarnation
        if head is not None and not is_gone:
            given_up = _known(head).given_up_from(place.epoch)
            is_gone = given_up is not None and given_up < end
        if head is None or is_gone or head.end < end:
            self._lose(
                ConflictError(
                    "the topic was deleted, or lost messages, after the batch was planned",
                    topic=name,
                    offset=start,
                    hint="failOnDataLoss=false goes on without them; where includeTail was "
                    "turned off meanwhile, turn it on for this batch",
                )
            )
            if head is None or is_gone:
                return None
            end = min(end, head.end)
        if start < head.earliest:
            self._lose(
                DataGapError(
                    "messages of the batch are no longer kept; failOnDataLoss=false goes on "
                    "without them",
                    start=start,
                    end=min(end, head.earliest),
                    topic=name,
                )
            )
            start = head.earliest
        return min(start, end), end

    def _lose(self, error: IsterError) -> None:
        if self._options.fail_on_data_loss:
            raise error
        _log.warning("messages left out", extra={"error": str(error)})

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition. Called in a task."""
        if not isinstance(partition, PlannedPartition):
            return iter(())
        rows = self._task.read(partition.partition, partition.identities)
        return in_schema(rows, arrow_schema_of(self._schema))

    def commit(self, end: dict[str, Any]) -> None:
        """Everything before `end` was processed: moves the cursors, if there are any."""
        self._hold(StreamOffset.from_dict(end))

    def _hold(self, reached: StreamOffset) -> None:
        self._held_at = self._now()
        if self._options.subscription is None:
            return
        try:
            hold_cursors(self._task.place, self._options.subscription, reached)
        except IsterError as error:
            # The checkpoint is the truth; the cursor is moved again with the next batch.
            _log.warning("cursor not moved", extra={"error": str(error)})


def _known(head: Head) -> TopicHead:
    return TopicHead(
        incarnation=head.incarnation, earliest=head.earliest, end=head.end, lineage=head.lineage
    )
