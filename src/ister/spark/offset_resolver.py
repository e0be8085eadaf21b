"""Resolves the topics that options name, and where each of them begins and ends now.

    metadata: record, descriptors ─┐
    local files' checkpoint ───────┼─► Head: earliest ≤ tiered ≤ end
    owner's watermarks, by Flight ─┘

Owns: which topics the options name, where each begins and ends, and offsets by time. Does not own:
partitions (`planner`), what a stream has read (`offsets`). Runs on the driver.

`end` is what may be offered to Spark: everything below it is durable, and reads the same whenever a
task or a restarted query reads it again. That is `synced`, also where the topic's ack level is
lower: a power cut may undo what is merely written, and a micro-batch that is in a checkpoint must
not change. Where the level is `tiered`, it is `tiered`: another node may continue from there, so
such a topic has no tail.

The broker that has a topic is found in the metadata store, topic by topic (`owners`). No broker is
contacted if the bucket has everything: a topic that was handed over, rebuilt by `ister recover`, or
whose record shows it. If the node that has the tail is not running, and its files are not here, the
topic ends at `tiered` until the node is back, and a warning says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ister.errors import (
    ConflictError,
    DataGapError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    WaitsForDiskError,
)
from ister.format.records import TopicRecord
from ister.limits import KIB
from ister.model import AckLevel
from ister.partitions import base_of_partition, partition_name
from ister.spark.location import Place
from ister.spark.offsets import TopicHead
from ister.spark.option_values import OffsetWord
from ister.spark.options import ReadOptions
from ister.spark.owners import NOT_SERVED, Owner, ask, ask_first, find_owner, waits_for_disk
from ister.spark.planner import TopicRange
from ister.spark.read_task import TopicIdentity
from ister.topic.history import HistoryTopic
from ister.topic.local_tail import LocalTail
from ister.wire.contract import TopicStatus

_log = logging.getLogger("ister.spark.offset_resolver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(TopicHead):
    """What a topic holds now, and where: the bucket below `tiered`, the tail above."""

    topic: str
    node: str
    """The node whose local files are the topic's."""
    broker: str | None = None
    """The Flight address that has the tail, if it was asked for."""
    tiered: int
    tail_bytes: int
    """Estimated size of the tail."""

    @property
    def identity(self) -> TopicIdentity:
        """What a task needs to read this topic and no other of its name."""
        return TopicIdentity(self.incarnation, self.node, self.broker)

    @property
    def cut_error(self) -> WaitsForDiskError | None:
        """The error about messages that cannot be read; None if all can."""
        return waits_for_disk(self.topic, self.node, self.tiered) if self.is_cut else None


@dataclass(slots=True, kw_only=True)
class _TopicState:
    """A topic under examination."""

    topic: HistoryTopic
    record: TopicRecord
    local: LocalTail | None
    mark: tuple[int, int] | None = None


class OffsetResolver:
    """Resolves the topics and offsets of one set of options. Used by one thread at a time."""

    def __init__(self, place: Place, options: ReadOptions) -> None:
        self._place = place
        self._options = options

    def names(self, *, must_exist: bool) -> list[str]:
        """Returns the names of the topics that the options name now, sorted.

        The name of a partitioned topic stands for its partitions, `<name>-part-<n>`.

        Raises:
            NotFoundError: With `must_exist`: a topic does not exist, or none matches the pattern.
        """
        existing = self._place.history().topics()
        if self._options.topic_pattern is not None:
            matching = [name for name in existing if self._options.matches(name)]
            if must_exist and not matching:
                raise NotFoundError(
                    f"no topic matches topicPattern {self._options.topic_pattern!r}",
                    hint=_known(existing),
                )
            return matching
        if self._options.assigned:
            return self._assigned(set(existing), must_exist=must_exist)
        parts: dict[str, list[str]] = {}
        for name in existing:
            if (parent := base_of_partition(name)) is not None:
                parts.setdefault(parent, []).append(name)
        wanted: set[str] = set()
        for name in self._options.topics:
            found = [name] if name in existing else parts.get(name, [])
            if must_exist and not found:
                raise NotFoundError(
                    f"topic {name} does not exist", topic=name, hint=_known(existing)
                )
            wanted.update(found)
        return sorted(wanted)

    def _assigned(self, existing: set[str], *, must_exist: bool) -> list[str]:
        """Returns the partitions that the option `assign` names."""
        found: list[str] = []
        for topic, number in self._options.assigned:
            name = partition_name(topic, number)
            if name in existing:
                found.append(name)
            elif number == 0 and topic in existing:
                found.append(topic)
            elif must_exist:
                raise NotFoundError(
                    f"topic {topic} has no partition {number}",
                    topic=topic,
                    hint=_known(sorted(existing)),
                )
        return sorted(found)

    def heads(self, *, catches_up: bool = False, must_exist: bool = True) -> dict[str, Head]:
        """Returns what each topic holds now.

        Args:
            catches_up: Wait up to two seconds until the owner's checkpoint shows what was just
                synced: for a read that happens once.
            must_exist: Raise for topics that do not exist, instead of skipping them.

        Raises:
            NotFoundError: With `must_exist`: a topic does not exist.
            InvalidRequestError: A process on another machine that is not a broker has a topic's
                tail, and no broker is given.
            UnavailableError: A store or a topic's broker does not answer.
        """
        found: list[_TopicState] = []
        for name in self.names(must_exist=must_exist):
            try:
                found.append(self._find(name))
            except NotFoundError:
                if must_exist:
                    raise
        if catches_up:
            # Mark all of them first: the other checkpoints come while the first one is awaited.
            for item in found:
                if item.local is not None:
                    item.mark = item.local.mark()
        return {item.topic.name: self._head(item) for item in found}

    def _find(self, name: str) -> _TopicState:
        topic = self._place.history().topic(name)
        record = topic.record()
        local = None
        if self._has_tail(record):
            local = self._place.local_tail(name, record.node, record.incarnation)
        return _TopicState(topic=topic, record=record, local=local)

    def _has_tail(self, record: TopicRecord) -> bool:
        """Whether messages that are not in the bucket are to be read, if there are any."""
        return self._options.include_tail and record.ack is not AckLevel.TIERED

    def _head(self, item: _TopicState) -> Head:
        topic, record = item.topic, item.record
        snapshot = item.local.catch_up(item.mark) if item.local is not None else None
        asks = snapshot is None and self._has_tail(record)
        # Before the catalog, which then has everything that was in the bucket at the hand-over.
        is_sealed = asks and topic.catalog.sealed() is not None
        # After the snapshot: what was uploaded and trimmed meanwhile is in the catalog by now.
        first, last, _ = topic.catalog.ends()
        earliest = first.start if first is not None else topic.earliest
        tiered = last.end if last is not None else earliest
        end, is_cut, broker = tiered, False, None
        tail_bytes: int | None = None
        if snapshot is not None:
            if first is None:
                earliest = tiered = max(snapshot.trimmed, record.expired_before)
            end = max(tiered, snapshot.synced)
            tail_bytes = snapshot.measure(tiered, end)
        elif asks and not is_sealed and not record.is_whole(tiered):
            owner = find_owner(self._place, topic.name)
            if owner.addresses:
                broker, status = self._ask_owner(owner, record, topic.name)
                end = status.synced
                if first is None:
                    # Nothing is in the bucket: the owner knows where its files begin.
                    earliest, tiered = status.earliest, max(tiered, status.earliest)
                # A broker may serve the history of a topic that waits for another node's disk.
                is_cut = end <= tiered and topic.is_away(record)
            elif owner.waits is not None:
                is_cut = item.local is None
            elif item.local is None:
                raise InvalidRequestError(
                    NOT_SERVED,
                    topic=topic.name,
                    hint="set the option broker, or includeTail=false to read only the bucket",
                )
        if is_cut:
            _warn_cut(topic.name, record, tiered)
        if tail_bytes is None:
            # The size of these messages is unknown: assume that of those in the bucket.
            each = last.size_bytes // (last.end - last.start) if last is not None else KIB
            tail_bytes = each * (end - tiered)
        return Head(
            topic=topic.name,
            incarnation=record.incarnation,
            node=record.node,
            broker=broker,
            lineage=tuple((item.epoch, item.start) for item in record.lineage),
            earliest=earliest,
            tiered=tiered,
            end=max(end, tiered),
            tail_bytes=tail_bytes,
            is_cut=is_cut,
        )

    def _ask_owner(self, owner: Owner, record: TopicRecord, name: str) -> tuple[str, TopicStatus]:
        """Returns the address that has the topic, and the topic's watermarks."""
        address, status = ask_first(
            owner.addresses,
            lambda client: (client.address, client.watermarks([name])[name]),
            topic=name,
        )
        if status.incarnation != record.incarnation:
            raise ConflictError(
                "the broker has another topic of this name than the metadata store",
                topic=name,
                hint="check that the options config and broker name the same log",
            )
        return address, status

    # -- ranges -----------------------------------------------------------------------------

    def find_time(self, head: Head, publish_time_ms: int) -> int | None:
        """Returns the first offset published at or after a time; None if there is none."""
        topic, tiered = self._topic(head), head.tiered
        while True:
            found = None
            if head.earliest < tiered:
                found = topic.find_time(publish_time_ms, head.earliest, tiered)
            if found is not None or head.end <= tiered:
                return found
            record = topic.record()
            local = self._place.local_tail(head.topic, record.node, record.incarnation)
            if local is None:
                break
            try:
                return local.find_time(publish_time_ms, tiered, head.end)
            except OffsetOutOfRangeError:
                # Uploaded and trimmed meanwhile: look in the bucket again.
                moved = min(topic.tiered, head.end)
                if moved <= tiered:
                    raise
                tiered = moved
        return ask(
            self._place,
            head.topic,
            lambda client: client.find_time(
                head.topic, publish_time_ms, start=tiered, end=head.end
            ),
        )

    def resolve(
        self,
        head: Head,
        option: str,
        wanted: int | OffsetWord,
        *,
        time_ms: int | None = None,
        must_match: bool = False,
        remedy: str = "",
    ) -> int:
        """Resolves one end of a range in one topic.

        Args:
            head: The topic.
            option: The name of the option or argument, for errors.
            wanted: An offset, or an end of the topic.
            time_ms: Instead of it: the first message published at or after this time.
            must_match: Raise if no message is that new, instead of returning the end.
            remedy: What to do about messages that are no longer kept, for the error.

        Raises:
            OffsetOutOfRangeError: The offset is beyond the topic's end.
            DataGapError: The messages are no longer kept, and `failOnDataLoss` is set.
            InvalidRequestError: With `must_match`: no message is that new.
        """
        if time_ms is not None:
            found = self.find_time(head, time_ms)
            if found is None and must_match:
                raise InvalidRequestError(
                    f"no message was published at or after the starting time, {time_ms} ms",
                    topic=head.topic,
                    hint="startingOffsetsByTimestampStrategy=latest starts at the end",
                )
            return head.end if found is None else found
        if wanted == "earliest":
            return head.earliest
        if wanted == "latest":
            return head.end
        if wanted > head.end:
            raise OffsetOutOfRangeError(
                f"{option} is beyond the end",
                topic=head.topic,
                offset=wanted,
                earliest=head.earliest,
                next=head.end,
            )
        if wanted >= head.earliest:
            return wanted
        gone = DataGapError(
            f"{option} asks for messages that are no longer kept{remedy}",
            start=wanted,
            end=head.earliest,
            topic=head.topic,
        )
        if self._options.fail_on_data_loss:
            raise gone
        _log.warning("messages skipped", extra={"error": str(gone)})
        return head.earliest

    def range_of(self, head: Head, start: int, end: int, *, is_partial: bool = False) -> TopicRange:
        """Returns a range of a topic, with the objects that overlap it.

        With `is_partial` they are read while they are consumed, once: for one who may stop early.
        """
        topic = self._topic(head)
        read = topic.walk_descriptors if is_partial else topic.descriptors
        tiered = min(head.tiered, end)
        tail, whole_tail = end - max(start, head.tiered), head.end - head.tiered
        return TopicRange(
            topic=head.topic,
            incarnation=head.incarnation,
            start=start,
            end=end,
            tiered=max(tiered, start),
            descriptors=read(start, tiered),
            tail_bytes=head.tail_bytes * tail // whole_tail if tail > 0 and whole_tail > 0 else 0,
        )

    def _topic(self, head: Head) -> HistoryTopic:
        return self._place.history().topic(head.topic)


# Topics that a warning was logged for, as (incarnation, epoch): one warning for each.
_warned: set[tuple[str, int]] = set()


def _warn_cut(topic: str, record: TopicRecord, tiered: int) -> None:
    if (record.incarnation, record.epoch) not in _warned:
        _warned.add((record.incarnation, record.epoch))
        _log.warning(
            "node %s is not running: messages of %s from offset %d on may be on its disk, and are "
            "left out until it is",
            record.node,
            topic,
            tiered,
        )


def _known(existing: list[str]) -> str:
    if not existing:
        return "the log has no topics; check that the config is the right one"
    shown = ", ".join(existing[:10])
    more = f" and {len(existing) - 10} more" if existing[10:] else ""
    return f"existing topics: {shown}{more}"
