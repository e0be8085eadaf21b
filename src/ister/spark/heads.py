"""What topics hold now, from the driver's point of view: which ones, from where to where.

    metadata: record, descriptors ─┐
    local files' checkpoint ───────┼─► Head: earliest ≤ tiered ≤ end
    broker's watermarks ───────────┘

Owns: which topics the options mean, where each begins and ends, and offsets by time. Does not own:
partitions (`planner`), what a stream has read (`offsets`).

`end` is what may be offered to Spark: everything below it is durable and will read the same
whenever a task, or a restarted query, reads it again. That is `synced`, whatever the topic's ack
level: what is merely written may be taken back by a power cut, and a micro-batch that is in a
checkpoint must not change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ister.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.format.records import TopicRecord
from ister.limits import KIB
from ister.model import TopicName
from ister.partitions import base_of_partition
from ister.spark.options import ReadOptions
from ister.spark.place import Place
from ister.spark.planner import TopicRange
from ister.topic.history import HistoryTopic
from ister.topic.local_tail import LocalTail

__all__ = ["Head", "Heads"]

_log = logging.getLogger("ister.spark.heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One topic: offsets `earliest` up to, not including, `end` can be read."""

    topic: str
    incarnation: str
    node: str
    """Whose local files are the topic's."""
    lineage: tuple[tuple[int, int], ...]
    """(epoch, start) of each change of owner."""
    earliest: int
    tiered: int
    """What lies below is in the bucket; what lies above is the tail."""
    end: int
    tail_bytes: int
    """About how many bytes the tail has."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """A topic that is being looked at."""

    topic: HistoryTopic
    record: TopicRecord
    local: LocalTail | None
    mark: tuple[int, int] | None = None


class Heads:
    """The topics that options mean. Used by one thread at a time, on the driver."""

    def __init__(self, place: Place, options: ReadOptions) -> None:
        self._place = place
        self._options = options

    # -- which ------------------------------------------------------------------------------

    def names(self, *, must_exist: bool) -> list[str]:
        """The topics that the options mean now, sorted.

        A name that is no topic stands for its partitions, `<name>-part-<n>`.

        Raises:
            NotFoundError: With `must_exist`: one of them, or all that a pattern could match, do
                not exist.
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
        parts: dict[str, list[str]] = {}
        for name in existing:
            if (parent := base_of_partition(name)) is not None:
                parts.setdefault(parent, []).append(name)
        wanted: set[str] = set()
        for name in self._options.topics:
            found = [name] if name in existing else parts.get(name, [])
            if must_exist and not found:
                raise NotFoundError(f"there is no topic {name}", topic=name, hint=_known(existing))
            wanted.update(found)
        return sorted(wanted)

    # -- from where to where ----------------------------------------------------------------

    def look(self, *, catches_up: bool = False, must_exist: bool = True) -> dict[str, Head]:
        """What each topic holds now.

        Args:
            catches_up: Wait up to two seconds for what was just synced to show in the owner's
                checkpoint: for a read that happens once.
            must_exist: Raise for topics that do not exist, instead of leaving them out.

        Raises:
            NotFoundError: With `must_exist`: a topic does not exist.
            InvalidRequestError: A topic's tail is on another machine, and no broker is given.
            UnavailableError: A store or the broker does not answer.
        """
        found: list[_Found] = []
        for name in self.names(must_exist=must_exist):
            try:
                found.append(self._find(name))
            except NotFoundError:
                if must_exist:
                    raise
        if catches_up:
            # All of them first: the owner's checkpoints then come while the first one is awaited.
            for item in found:
                if item.local is not None:
                    item.mark = item.local.mark()
        return {item.topic.name: self._look_at(item) for item in found}

    def _find(self, name: str) -> _Found:
        topic = self._place.history().topic(name)
        record = topic.record()
        local = self._local(name, record) if self._options.include_tail else None
        return _Found(topic=topic, record=record, local=local)

    def _look_at(self, item: _Found) -> Head:
        topic, record = item.topic, item.record
        snapshot = item.local.catch_up(item.mark) if item.local is not None else None
        # After the snapshot: what was uploaded and trimmed meanwhile is in the catalog by now.
        first, last, _ = topic.catalog.ends()
        earliest = first.start if first is not None else topic.earliest
        tiered = last.end if last is not None else earliest
        end = tiered
        tail_bytes: int | None = None
        if snapshot is not None:
            if first is None:
                earliest = tiered = max(snapshot.trimmed, record.expired_before)
            end = max(tiered, snapshot.synced)
            tail_bytes = snapshot.measure(tiered, end)
        elif self._options.include_tail and topic.catalog.sealed() is None:
            if self._place.broker is not None:
                earliest, tiered, end = self._ask_broker(topic.name, record, earliest, tiered)
            elif item.local is None:
                raise InvalidRequestError(
                    "what is not in the bucket yet is on another machine",
                    topic=topic.name,
                    hint="give the option broker, or includeTail=false to read the bucket alone",
                )
        if tail_bytes is None:
            # Nobody says how large its messages are: like those in the bucket, or a guess.
            each = last.size_bytes // (last.end - last.start) if last is not None else KIB
            tail_bytes = each * (end - tiered)
        return Head(
            topic=topic.name,
            incarnation=record.incarnation,
            node=record.node,
            lineage=tuple((item.epoch, item.start) for item in record.lineage),
            earliest=earliest,
            tiered=tiered,
            end=max(end, tiered),
            tail_bytes=tail_bytes,
        )

    def _ask_broker(
        self, name: str, record: TopicRecord, earliest: int, tiered: int
    ) -> tuple[int, int, int]:
        client = self._place.flight()
        if client is None:
            return earliest, tiered, tiered
        status = client.watermarks([name])[name]
        if status.incarnation != record.incarnation:
            raise ConflictError(
                "the broker has another topic of this name than the metadata store",
                topic=name,
                hint="do the options config and broker name the same place?",
            )
        if tiered == earliest:
            # Nothing is in the bucket: the broker knows where its files begin.
            return status.earliest, max(tiered, status.earliest), status.synced
        return earliest, tiered, status.synced

    def _local(self, name: str, record: TopicRecord) -> LocalTail | None:
        history = self._place.history()
        return LocalTail.find(
            history.config.storage.wal.dir,
            TopicName.parse(name),
            record.node,
            record.incarnation,
            clock=history.clock,
            metrics=history.metrics,
        )

    # -- ranges -----------------------------------------------------------------------------

    def find_time(self, head: Head, publish_time_ms: int) -> int | None:
        """The first offset of a topic whose message was published at or after a time."""
        topic, tiered = self._topic(head), head.tiered
        while True:
            found = None
            if head.earliest < tiered:
                found = topic.find_time(publish_time_ms, head.earliest, tiered)
            if found is not None or head.end <= tiered:
                return found
            local = self._local(head.topic, topic.record())
            if local is None:
                break
            try:
                return local.find_time(publish_time_ms, tiered, head.end)
            except OffsetOutOfRangeError:
                # Uploaded and trimmed meanwhile: the bucket has more than it had.
                moved = min(topic.tiered, head.end)
                if moved <= tiered:
                    raise
                tiered = moved
        client = self._place.flight()
        if client is None:
            return None
        return client.find_time(head.topic, publish_time_ms, start=tiered, end=head.end)

    def range_of(self, head: Head, start: int, end: int) -> TopicRange:
        """A range of a topic, with the objects that it lies in."""
        tiered = min(head.tiered, end)
        tail, whole_tail = end - max(start, head.tiered), head.end - head.tiered
        return TopicRange(
            topic=head.topic,
            incarnation=head.incarnation,
            start=start,
            end=end,
            tiered=max(tiered, start),
            descriptors=self._topic(head).descriptors(start, tiered),
            tail_bytes=head.tail_bytes * tail // whole_tail if tail > 0 and whole_tail > 0 else 0,
        )

    def _topic(self, head: Head) -> HistoryTopic:
        return self._place.history().topic(head.topic)


def _known(existing: list[str]) -> str:
    if not existing:
        return "there are no topics at this place: is it the right config?"
    shown = ", ".join(existing[:10])
    return f"there are {shown}" + (f" and {len(existing) - 10} more" if existing[10:] else "")
