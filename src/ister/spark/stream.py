"""The stream read: a query's position, and how far its next micro-batch goes.

Owns: the calls that Spark makes on the driver, in one process per query. Does not own: the offset
value and what counts as loss (`offsets`), limits and partitions (`planner`), reading (`read_task`).

Invariants, each of which Spark leaves to the source:

- a batch's messages follow from its end offset alone (`from` in it), so that a failed batch is
  repeated unchanged, also the first one under `startingOffsets=latest`;
- the same position is the same JSON text, so that an idle query makes no batches;
- an idle query asks the stores a few times a second, not eighty: `latestOffset` waits if there is
  nothing new, for a quarter of a second or as long as the last look took; if the trigger's interval
  keeps Spark from calling again at once, it looks once and does not wait;
- a store that does not respond for a while ends no query;
- batches are contiguous: each begins where the last one ended.

Before 4.2 Spark asks for the end of the next batch without saying where it starts. The reader then
keeps the position itself: the end of the last batch that Spark planned or was told of. A restarted
query tells its position first, by planning from its last end to that same end, in every version;
there is nothing to read in between, whatever `from` says. If it asks for an end before that, there
is no checkpoint, and the position is the initial one.

`minMessagesPerTrigger` holds a micro-batch back. The time since the last one is known to this
process only: a query that was just started takes what is there, as Kafka's source does, so that
restarts never add to the delay. `availableNow` waits for nothing.

`commit` lags one batch behind, and may come only when the query restarts: it moves the cursor of
the option `subscription`, which holds retention, and nothing else. The position itself is in
Spark's checkpoint.

What a crash leaves: Spark's checkpoint, with the position to continue from. Start options apply
only without one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from ister.base.clock import SystemClock
from ister.base.retry import retry_unavailable
from ister.bucket.catalog import Catalog
from ister.errors import (
    ConflictError,
    DataGapError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.records import Progress, decode_progress, encode_progress
from ister.metadata.base import MetadataStore, Put, RevisionIs
from ister.metadata.transact import transact, unchanged
from ister.spark.batch import REACH_REMEDY, START_REMEDY, TopicReader
from ister.spark.compat import (
    SPARK_VERSION,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from ister.spark.location import LogLocation
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.offsets import StreamOffset, TopicOffset, advance, check_loss
from ister.spark.options import ReadOptions
from ister.spark.planner import limit_bytes, limit_messages
from ister.topic.history import BucketTopic
from ister.topic.stores import open_metadata

_log = logging.getLogger("ister.spark.stream")

_POLL_SECONDS: Final = 0.25
_HOLD_SECONDS: Final = 60.0
_ATTEMPTS: Final = 3


class StreamReader(TopicReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. One instance plans on the driver, others read in tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._resolves: OffsetResolver | None = None
        self._initial: StreamOffset | None = None
        self._position: dict[str, object] | None = None
        self._frozen: dict[str, Head] | None = None
        self._seen: dict[str, Head] = {}
        self._seen_at = -float("inf")
        self._pause = _POLL_SECONDS
        self._idle_at = float("inf")
        self._held_at = -float("inf")
        self._triggered_at = -float("inf")
        self._warned: set[str] = set()
        self._is_first_batch = True

    # -- positions --------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, object]:  # noqa: N802 - here and below: Spark's names
        """Returns where a query without a checkpoint starts; the same at every call."""
        if self._initial is None:
            resolver = self._resolver()
            # The end that `availableNow` froze is also where `latest` is.
            must_exist = self._options.fail_on_data_loss
            found = self._frozen or retry_unavailable(lambda: resolver.heads(must_exist=must_exist))
            self._options.check_topics(found)
            self._remember(found)
            self._initial = retry_unavailable(
                lambda: StreamOffset(
                    {name: self._begin(resolver, head) for name, head in found.items()}
                )
            )
            self._hold(self._initial)
        return self._initial.to_dict()

    def _begin(self, resolver: OffsetResolver, head: Head) -> TopicOffset:
        offset = resolver.resolve(
            head,
            "startingOffsets",
            self._options.starting_offsets.of(head.topic),
            time_ms=self._options.start_time_ms(head.topic),
            must_match=self._options.time_must_match,
            remedy=START_REMEDY,
        )
        return TopicOffset(
            incarnation=head.incarnation, epoch=head.epoch, offset=offset, start=offset
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit of the options; if both are given, `latestOffset` applies both."""
        if self._options.max_messages_per_trigger is not None:
            return ReadMaxRows(self._options.max_messages_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.min_messages_per_trigger is not None:
            return ReadMinRows(self._options.min_messages_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Freezes the end: the query reads what exists now, and stops."""
        resolver = self._resolver()
        found = retry_unavailable(lambda: resolver.heads(catches_up=True, must_exist=False))
        if self._options.include_unreachable_tail:
            for head in found.values():
                # The query would end before it has read what exists now.
                head.check_reach(remedy=REACH_REMEDY)
        self._frozen = found
        self._remember(found)

    def latestOffset(  # noqa: N802
        self, start: dict[str, object] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, object]:
        """Returns the end of the next micro-batch; `start` itself if there is nothing new.

        Spark before 4.2 passes no arguments: the start is then the reader's own position, and the
        limits are those of the options.
        """
        if start is None:
            start = self._position if self._position is not None else self.initialOffset()
            self._position = self._find_end(start, None)
            if self._is_first_batch:
                self._is_first_batch = False
                self._warn_of_limit(StreamOffset.from_dict(self._position))
            return self._position
        return self._find_end(start, limit)

    def _warn_of_limit(self, end: StreamOffset) -> None:
        """Warns if a query that Spark ends after this micro-batch leaves messages unread.

        Spark before 4.2 does not tell a reader which trigger the query has.
        """
        is_limited = isinstance(self.getDefaultReadLimit(), ReadMaxRows | ReadMaxBytes)
        if is_limited and any(
            name in end.topics and end.topics[name].offset < head.end
            for name, head in self._seen.items()
        ):
            _log.warning(
                "the first batch ends at its limit; with trigger(availableNow=True), Spark %s "
                "reads one batch only: run the query again for the rest",
                SPARK_VERSION,
            )

    def _find_end(self, start: dict[str, object], limit: ReadLimit | None) -> dict[str, object]:
        previous = StreamOffset.from_dict(start)
        # Spark waits out the trigger's interval between two calls that find nothing.
        is_paced = self._now() - self._idle_at >= _POLL_SECONDS
        if is_paced:
            self._seen_at = -float("inf")
        end = self._advance(previous, limit)
        if end is previous and self._frozen is None:
            if self._now() - self._held_at >= _HOLD_SECONDS:
                self._hold(previous)
            if not is_paced:
                self._wait_for_next_read()
                end = self._advance(previous, limit)
        self._idle_at = self._now() if end is previous else float("inf")
        return start if end is previous else end.to_dict()

    def _advance(self, previous: StreamOffset, limit: ReadLimit | None) -> StreamOffset:
        try:
            return self._advance_in(self._heads(), previous, limit)
        except (DataGapError, NotFoundError):
            if not self._refresh():
                raise
            # Messages expired or a topic was deleted after the last look.
            return self._advance_in(self._heads(), previous, limit)

    def _advance_in(
        self, found: dict[str, Head], previous: StreamOffset, limit: ReadLimit | None
    ) -> StreamOffset:
        checked, warnings = check_loss(previous, found, fails=self._options.fail_on_data_loss)
        for warning in warnings:
            if warning not in self._warned:
                _log.warning("data loss: %s", warning)
        # Found at every look, until a message after the loss moves the checkpoint.
        self._warned = set(warnings)
        starts = {
            name: checked.topics[name].offset if name in checked.topics else head.earliest
            for name, head in found.items()
        }
        ends = {name: head.end for name, head in found.items()}
        if not isinstance(limit, ReadAllAvailable):
            if self._waits_for_more(starts, ends):
                return previous
            ends = self._limit(found, starts, ends)
        end = advance(checked, found, ends)
        # Nothing new after the lost data: the checkpoint stays until there is.
        if end is checked:
            return previous
        self._triggered_at = self._now()
        return end

    def _waits_for_more(self, starts: Mapping[str, int], ends: Mapping[str, int]) -> bool:
        """Whether a micro-batch is held back until there are more messages, or time has passed."""
        least = self._options.min_messages_per_trigger
        if least is None or self._frozen is not None:
            return False
        if self._now() - self._triggered_at >= self._options.max_trigger_delay_ms / 1000:
            return False
        return sum(max(0, end - starts[name]) for name, end in ends.items()) < least

    def _limit(
        self, found: Mapping[str, Head], starts: Mapping[str, int], ends: dict[str, int]
    ) -> dict[str, int]:
        options = self._options
        if options.max_messages_per_trigger is not None:
            ends = limit_messages(starts, ends, options.max_messages_per_trigger)
        if options.max_bytes_per_trigger is not None:
            most, wanted = options.max_bytes_per_trigger, ends
            ends = ends | retry_unavailable(lambda: self._limit_bytes(found, starts, wanted, most))
        return ends

    def _limit_bytes(
        self,
        found: Mapping[str, Head],
        starts: Mapping[str, int],
        ends: Mapping[str, int],
        max_bytes: int,
    ) -> dict[str, int]:
        """Reads descriptors only as far as the batch goes, however much is pending."""
        resolver = self._resolver()
        ranges = [
            resolver.range_of(head, starts[name], ends[name], is_partial=True)
            for name, head in found.items()
            if starts[name] < ends[name]
        ]
        return limit_bytes(ranges, max_bytes)

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """Returns the topics' ends: `latestOffset` in a query's progress, to compute its lag."""
        if not self._seen:
            return None
        return StreamOffset(
            {
                name: TopicOffset(
                    incarnation=head.incarnation,
                    epoch=head.epoch,
                    offset=head.end,
                    start=head.end,
                )
                for name, head in self._seen.items()
            }
        ).to_dict()

    # -- the topics -------------------------------------------------------------------------

    def _resolver(self) -> OffsetResolver:
        # Kept, because it reads much less when it is used again.
        if self._resolves is None:
            self._resolves = super()._resolver()
        return self._resolves

    def _heads(self) -> dict[str, Head]:
        """Returns what topics hold: frozen, cached, or read again."""
        if self._frozen is not None:
            return self._frozen
        if self._now() - self._seen_at >= self._pause:
            resolver = self._resolver()
            began = self._now()
            found = retry_unavailable(lambda: resolver.heads(must_exist=False))
            # Reading thousands of topics takes a while: at most half the time.
            self._pause = max(_POLL_SECONDS, self._now() - began)
            self._remember(found)
        return self._seen

    def _refresh(self) -> bool:
        """Reads the topics again; returns whether they changed. A frozen end stays."""
        resolver = self._resolver()
        resolver.forget()
        before = self._frozen if self._frozen is not None else self._seen
        found = retry_unavailable(lambda: resolver.heads(must_exist=False))
        if self._frozen is not None:
            found = self._frozen = {
                name: replace(head, end=max(head.earliest, self._frozen[name].end))
                for name, head in found.items()
                if name in self._frozen
            }
        self._remember(found)
        return found != before

    def _remember(self, found: dict[str, Head]) -> None:
        self._seen, self._seen_at = found, self._now()

    def _wait_for_next_read(self) -> None:
        threading.Event().wait(max(0.0, self._seen_at + self._pause - self._now()))

    def _now(self) -> float:
        return SystemClock.monotonic()

    # -- a micro-batch ----------------------------------------------------------------------

    def partitions(
        self, start: dict[str, object], end: dict[str, object]
    ) -> Sequence[InputPartition]:
        """The plan of the micro-batch that ends at `end`; see the module header about `start`."""
        if start == end:
            if self._position not in (None, end):
                raise UnsupportedOperationError(
                    "Spark asked for the end of a batch before it told the query's position",
                    hint="set spark.sql.streaming.triggerAvailableNowWrapper.enabled to false, or "
                    "use Spark 4.2 or later",
                )
            self._position = end
            return []
        batch = StreamOffset.from_dict(end)
        self._check_contiguous(StreamOffset.from_dict(start), batch)
        self._position = end
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            try:
                return retry_unavailable(lambda: self._plan(batch))
            except (DataGapError, NotFoundError):
                # Retention or a deletion may have come between the look and the plan.
                if not attempts:
                    raise
                self._resolver().forget()

    def _check_contiguous(self, start: StreamOffset, batch: StreamOffset) -> None:
        if not start.ranges() or not self._options.fail_on_data_loss:
            return  # the end of the first batch has its start; losses may be skipped
        for name, place in batch.topics.items():
            before = start.topics.get(name)
            if before is None or before.incarnation != place.incarnation:
                continue
            if before.offset != place.start:
                raise ConflictError(
                    f"the batch begins at {place.start}, and the last one ended at {before.offset}",
                    topic=name,
                    offset=before.offset,
                    hint="failOnDataLoss=false runs the batch as it is",
                )

    def _plan(self, batch: StreamOffset) -> Sequence[InputPartition]:
        resolver = self._resolver()
        wanted_ranges = batch.ranges()
        found = resolver.heads(must_exist=False, only=wanted_ranges)
        if any(end > found[name].end for name, (_, end) in wanted_ranges.items() if name in found):
            # The end was read when the owner knew more than its checkpoint shows yet.
            found = resolver.heads(must_exist=False, only=wanted_ranges, catches_up=True)
        ranges = []
        for name, wanted in wanted_ranges.items():
            kept = self._clip(batch.topics[name], name, wanted, found.get(name))
            if kept is not None:
                ranges.append(resolver.range_of(found[name], *kept))
        return self._partitions(ranges, found.values())

    def _clip(
        self, place: TopicOffset, name: str, wanted: tuple[int, int], head: Head | None
    ) -> tuple[int, int] | None:
        """Returns the part of a batch's range that still exists; None if the topic is gone."""
        start, end = wanted
        kept = 0
        if head is not None and head.incarnation == place.incarnation:
            kept, given_up = head.end, head.given_up_from(place.epoch)
            if given_up is not None and given_up < end:
                kept = min(kept, given_up)
            elif kept < end and head.is_cut:
                raise UnavailableError(
                    f"messages of the batch are on the disk of node {head.node}, which is not "
                    "running",
                    topic=name,
                    offset=kept,
                    hint="start that node; the query continues when it is started again",
                )
        if kept < end:
            self._lose(
                ConflictError(
                    "the topic was deleted, or lost messages, after the batch was planned",
                    topic=name,
                    offset=max(start, kept),
                    hint="failOnDataLoss=false continues without them; if includeTail was "
                    "turned off meanwhile, turn it on for this batch",
                )
            )
        if head is None or kept <= start:
            return None
        end = min(end, kept)
        if start < head.earliest:
            self._lose(
                DataGapError(
                    "messages of the batch are no longer kept; failOnDataLoss=false continues "
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
        _log.warning("messages skipped", extra={"error": str(error)})

    def commit(self, end: dict[str, object]) -> None:
        """Moves the cursors, if there are any: everything before `end` was processed."""
        self._hold(StreamOffset.from_dict(end))

    def _hold(self, reached: StreamOffset) -> None:
        self._held_at = self._now()
        if self._options.subscription is None:
            return
        try:
            _hold_cursors(self._task.place, self._options.subscription, reached)
        except IsterError as error:
            # The checkpoint is authoritative; the next batch moves the cursor again.
            _log.warning("cursor not moved", extra={"error": str(error)})


# -- cursors: copies of the position, one batch behind, which hold retention -----------------------


def _hold_cursors(place: LogLocation, subscription: str, progress: StreamOffset) -> None:
    """Moves the subscription's cursor in each topic forward to the stream's position.

    It is written only if neither it nor the topic's record has changed since they were read, so
    that a deleted topic gets none.
    """
    history = place.history()
    store = open_metadata(history.config.storage.metadata, history.clock)
    try:
        for name, reached in progress.topics.items():
            try:
                topic = history.topic(name)
            except NotFoundError:
                continue  # deleted: needs no cursor
            _hold_cursor(store, topic, subscription, reached.offset, reached.incarnation)
    finally:
        store.close()


def _hold_cursor(
    store: MetadataStore, topic: BucketTopic, subscription: str, offset: int, incarnation: str
) -> None:
    catalog: Catalog = topic.catalog
    key = catalog.keys.progress(subscription)

    def attempt() -> bool | None:
        record = catalog.record()
        if record is None or record[0].incarnation != incarnation or not record[0].is_open:
            return True
        if store.get(f"{catalog.keys.subscriptions}{subscription}/options") is not None:
            raise ConflictError(
                f"{subscription!r} is a subscription of a broker's consumers",
                topic=str(catalog.keys.topic),
                hint="choose another name: a stream would skip their messages",
            )
        found = store.get(key)
        known = decode_progress(found.value, key=key) if found is not None else None
        reached = offset
        if known is not None and known.incarnation == incarnation:
            reached = max(offset, known.offset)
        more = known.more if known is not None else {}
        now_ms = topic.clock.now_ns() // 1_000_000
        wanted = Progress(offset=reached, timestamp=now_ms, incarnation=incarnation, more=more)
        same_topic = RevisionIs(catalog.keys.record, record[1])
        compares = [unchanged(key, found), same_topic]
        revision = store.transact(compares, [Put(key, encode_progress(wanted))])
        return None if revision is None else True

    transact(attempt, ConflictError("the cursor keeps changing", path=key))
