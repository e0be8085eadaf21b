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
topic ends at `tiered` until the node is back, and a warning says so. With its files here, it ends
where their checkpoint does, if the owner died before it recorded what it had synced. Such a topic
is cut: reads that end refuse it (`Head.check_reach`), and streams wait.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ister.base.limits import KIB
from ister.base.model import AckLevel, TopicName
from ister.base.partitions import base_of_partition, partition_name
from ister.bucket.directory import TopicDirectory
from ister.bucket.membership import is_node_running
from ister.bucket.names import TopicKeys
from ister.errors import (
    ConflictError,
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.format.descriptor import decode_descriptor
from ister.format.records import TopicRecord
from ister.metadata.base import MetadataStore
from ister.spark.location import LogLocation
from ister.spark.offsets import TopicHead
from ister.spark.option_values import OffsetWord
from ister.spark.options import ReadOptions
from ister.spark.owners import NOT_SERVED, ask, ask_first, ask_members, find_owner, waits_for_disk
from ister.spark.planner import TopicRange
from ister.spark.read_task import TopicIdentity
from ister.topic.history import BucketTopic
from ister.topic.local_tail import LocalTail, WalSnapshot
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
        return waits_for_disk(self.topic, self.node, self.end) if self.is_cut else None

    def check_reach(self, end: object = None, *, remedy: str = "") -> None:
        """Checks that a read leaves out no messages that cannot be read now.

        Args:
            end: Where the read ends; anything but an offset means all messages.
            remedy: What else can be done about it, for the error.
        """
        error = self.cut_error
        if error is not None and not (isinstance(end, int) and end <= self.end):
            error.hint = f"{error.hint}{remedy}"
            raise error


@dataclass(slots=True, kw_only=True)
class _TopicState:
    """A topic under examination."""

    name: str
    record: TopicRecord
    owner: str | None
    """The node that has it open."""
    local: LocalTail | None = None
    mark: tuple[int, int] | None = None
    snapshot: WalSnapshot | None = None
    asks: bool = False
    """Whether messages that are not in the bucket may be at a broker."""
    start: int | None = None
    """Where its oldest object begins; None without objects."""
    newest: int | None = None
    """Where its newest object begins."""
    earliest: int = 0
    tiered: int = 0
    served: tuple[str, TopicStatus] | None = None
    """The address of the broker that has the topic, and its answer."""
    is_cut: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the topic, and no other of its name."""
        return self.name, self.record.incarnation

    @property
    def floor(self) -> int:
        """Where its history begins according to its record."""
        lineage = self.record.lineage
        return max(self.record.expired_before, lineage[0].start if lineage else 0)


class _First(NamedTuple):
    """The oldest object of a topic, and what it was looked for with."""

    expired_before: int
    pointer: int | None
    """The revision of the pointer to the newest object."""
    start: int | None
    """None if there was no object."""

    def holds(self, expired_before: int, pointer: int | None) -> bool:
        """Whether it is still the oldest object; uploads do not change that, expiry does."""
        if expired_before != self.expired_before:
            return False
        return self.start is not None or pointer == self.pointer


class OffsetResolver:
    """Resolves the topics and offsets of one set of options. Used by one thread at a time.

    A resolver that is used again reads what may have changed, in a number of requests that rises
    by one for about a hundred topics. What seldom changes is kept: see `forget`.
    """

    def __init__(self, place: LogLocation, options: ReadOptions) -> None:
        self._place = place
        self._options = options
        self._directory: tuple[MetadataStore, TopicDirectory] | None = None
        # By topic and incarnation, as far as they are known.
        self._firsts: dict[tuple[str, str], _First] = {}
        self._message_bytes: dict[tuple[str, str], int] = {}

    def __reduce__(self) -> tuple[type[OffsetResolver], tuple[LogLocation, ReadOptions]]:
        return OffsetResolver, (self._place, self._options)

    def forget(self) -> None:
        """Forgets where histories begin: for a caller that finds messages missing."""
        self._firsts.clear()

    def names(self, *, must_exist: bool) -> list[str]:
        """Returns the names of the topics that the options name now, sorted.

        The name of a partitioned topic stands for its partitions, `<name>-part-<n>`.

        Raises:
            NotFoundError: With `must_exist`: a topic does not exist, or none matches the pattern.
        """
        return self._names(sorted(self._read_directory().read()), must_exist=must_exist)

    def _names(self, existing: list[str], *, must_exist: bool) -> list[str]:
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

    def heads(
        self,
        *,
        catches_up: bool = False,
        must_exist: bool = True,
        only: Container[str] | None = None,
    ) -> dict[str, Head]:
        """Returns what each topic holds now.

        Args:
            catches_up: Wait up to two seconds until the owner's checkpoint shows what was just
                synced: for a read that happens once. A topic whose owner died before that is cut.
            must_exist: Raise for topics that do not exist, instead of skipping them.
            only: Leave out other topics than these.

        Raises:
            NotFoundError: With `must_exist`: a topic does not exist.
            CorruptDataError: A topic's record cannot be read.
            InvalidRequestError: A process on another machine that is not a broker has a topic's
                tail, and no broker is given.
            UnavailableError: A store or a topic's broker does not answer; or, with `catches_up`,
                an owner's checkpoint does not show what its files have.
        """
        directory = self._read_directory()
        entries = directory.read()
        found: list[_TopicState] = []
        for name in self._names(sorted(entries), must_exist=must_exist):
            if only is None or name in only:
                entry = entries[name]
                if entry.record is None:
                    raise entry.error or CorruptDataError("the record is invalid", topic=name)
                owner = entry.owner.node if entry.owner is not None else None
                found.append(_TopicState(name=name, record=entry.record, owner=owner))
        self._read_files(found, catches_up=catches_up)
        # Before the pointers, which then have everything that was in the bucket at the hand-over.
        seals = directory.seals(item.name for item in found if item.asks)
        # After the files: what was uploaded and trimmed meanwhile is in the bucket by now.
        self._read_ends(directory, found)
        for item in found:
            item.is_cut = item.is_cut and not item.record.is_whole(item.tiered)
        self._ask_brokers(
            [
                item
                for item in found
                if item.asks and item.name not in seals and not item.record.is_whole(item.tiered)
            ]
        )
        self._read_sizes(item for item in found if item.served is not None)
        return {item.name: self._head(item) for item in found}

    def _read_directory(self) -> TopicDirectory:
        """Returns the directory of the log's topics, which keeps what it has decoded."""
        store = self._place.history().metadata
        if self._directory is None or self._directory[0] is not store:
            root = self._place.config.storage.metadata.root_prefix
            self._directory = store, TopicDirectory(store, root)
        return self._directory[1]

    def _read_files(self, found: list[_TopicState], *, catches_up: bool) -> None:
        for item in found:
            record = item.record
            # With `tiered`, the bucket has everything that may be read.
            item.asks = self._options.include_tail and record.ack is not AckLevel.TIERED
            if item.asks:
                item.local = self._place.local_tail(item.name, record.node, record.incarnation)
                if item.local is not None and catches_up:
                    # Mark all of them first: the other checkpoints come while one is awaited.
                    item.mark = item.local.mark()
        since: float | None = None
        for item in found:
            if item.local is None:
                continue
            item.snapshot = item.local.catch_up(item.mark, since=since)
            item.asks = item.snapshot is None
            if item.snapshot is None or item.mark is None or item.snapshot.covers(item.mark):
                continue
            # The others have had as much time as this one.
            since = -float("inf")
            if item.owner is not None:
                raise UnavailableError(
                    "the topic's owner has written messages that it has not recorded as durable",
                    topic=item.name,
                    offset=item.snapshot.synced,
                    hint="if it was killed, open the topic again where it is written",
                )
            item.is_cut = True

    def _read_ends(self, directory: TopicDirectory, found: list[_TopicState]) -> None:
        """Reads where the objects of topics begin and end."""
        pointers = directory.pointers(item.name for item in found)
        unknown: dict[str, _TopicState] = {}
        for item in found:
            pointer, known = pointers.get(item.name), self._firsts.get(item.key)
            revision = pointer.revision if pointer is not None else None
            is_known = known is not None and known.holds(item.record.expired_before, revision)
            item.start = known.start if known is not None and is_known else None
            if pointer is not None and pointer.value.end is not None:
                item.newest, item.tiered = pointer.value.start, pointer.value.end
            elif item.start is not None or not is_known:
                # Without objects there is none; but it may also be damaged, or another program's.
                last = self._topic(*item.key).catalog.last()
                if last is not None:
                    item.newest, item.tiered = last.start, last.end
            if not is_known:
                self._firsts[item.key] = _First(item.record.expired_before, revision, None)
                if item.newest is not None:
                    unknown[self._keys(item.name).descriptor(item.floor)] = item
        # Objects are contiguous: the oldest one begins where nothing is missing.
        oldest = self._store.get_many(list(unknown)) if unknown else {}
        for key, item in unknown.items():
            item.start = item.floor
            if key not in oldest:
                first = self._topic(*item.key).catalog.first()
                item.start = first.start if first is not None else None
            self._firsts[item.key] = self._firsts[item.key]._replace(start=item.start)
        for item in found:
            item.earliest = item.floor if item.start is None else item.start
            item.tiered = item.earliest if item.start is None else max(item.tiered, item.start)

    def _ask_brokers(self, asking: list[_TopicState]) -> None:
        """Asks the brokers of topics where their tails end."""
        nodes = {item.name: item.owner or item.record.node for item in asking}
        asked, errors = ask_members(self._place, nodes) if asking else ({}, {})
        for error in errors.values():
            raise error
        running: dict[str, bool] = {}
        for item in asking:
            item.served, node = asked[item.name], item.record.node
            if item.served is None and item.owner is None and node and not self._place.brokers:
                if node not in running:
                    root = self._place.config.storage.metadata.root_prefix
                    running[node] = is_node_running(self._store, root, node)
                item.is_cut = not running[node] and item.local is None
            if item.served is None and not item.is_cut:
                self._find_broker(item)
            if item.served is not None and item.served[1].incarnation != item.record.incarnation:
                raise ConflictError(
                    "the broker has another topic of this name than the metadata store",
                    topic=item.name,
                    hint="check that the options config and broker name the same log",
                )

    def _find_broker(self, item: _TopicState) -> None:
        """Asks the broker that has one topic now, if there is one."""
        name, owner = item.name, find_owner(self._place, item.name)
        if owner.addresses:
            item.served = ask_first(
                owner.addresses,
                lambda client: (client.address, client.watermarks([name])[name]),
                topic=name,
            )
        elif owner.waits is not None:
            item.is_cut = item.local is None
        elif item.local is None:
            raise InvalidRequestError(
                NOT_SERVED,
                topic=name,
                hint="set the option broker, or includeTail=false to read only the bucket",
            )

    def _read_sizes(self, served: Iterable[_TopicState]) -> None:
        """Reads how large messages are in the bucket, where it is not known."""
        unknown = {
            self._keys(item.name).descriptor(item.newest): item
            for item in served
            if item.newest is not None and item.key not in self._message_bytes
        }
        found = self._store.get_many(list(unknown)) if unknown else {}
        for key, item in unknown.items():
            if key in found:
                last = decode_descriptor(found[key].value, key=key)
                self._message_bytes[item.key] = last.size_bytes // (last.end - last.start)

    def _head(self, item: _TopicState) -> Head:
        record, snapshot = item.record, item.snapshot
        earliest, end, tiered, broker = item.earliest, item.tiered, item.tiered, None
        is_cut = item.is_cut
        tail_bytes: int | None = None
        if snapshot is not None:
            if item.start is None:
                earliest = tiered = max(snapshot.trimmed, record.expired_before)
            end = max(tiered, snapshot.synced)
            tail_bytes = snapshot.measure(tiered, end)
        elif item.served is not None:
            broker, status = item.served
            end = status.synced
            if item.start is None:
                # Nothing is in the bucket: the owner knows where its files begin.
                earliest, tiered = status.earliest, max(tiered, status.earliest)
            # A broker may serve the history of a topic that waits for another node's disk.
            is_cut = end <= tiered and item.owner is None and self._topic(*item.key).is_away(record)
        if is_cut:
            _warn_cut(item.name, record, max(end, tiered))
        if tail_bytes is None:
            # The size of these messages is unknown: assume that of those in the bucket.
            tail_bytes = self._message_bytes.get(item.key, KIB) * max(0, end - tiered)
        return Head(
            topic=item.name,
            incarnation=record.incarnation,
            node=record.node,
            broker=broker,
            lineage=tuple((one.epoch, one.start) for one in record.lineage),
            earliest=earliest,
            tiered=tiered,
            end=max(end, tiered),
            tail_bytes=tail_bytes,
            is_cut=is_cut,
        )

    @property
    def _store(self) -> MetadataStore:
        return self._place.history().metadata

    def _keys(self, name: str) -> TopicKeys:
        return TopicKeys(self._place.config.storage.metadata.root_prefix, TopicName.parse(name))

    # -- ranges -----------------------------------------------------------------------------

    def find_time(self, head: Head, publish_time_ms: int) -> int | None:
        """Returns the first offset published at or after a time; None if there is none."""
        topic, tiered = self._topic(head.topic, head.incarnation), head.tiered
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

        With `is_partial` their descriptors are read lazily, and only once: for a caller that may
        stop early.
        """
        topic = self._topic(head.topic, head.incarnation)
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

    def _topic(self, name: str, incarnation: str) -> BucketTopic:
        """Returns a topic without reading its record."""
        return BucketTopic(self._place.history(), TopicName.parse(name), incarnation)


# Topics that a warning was logged for, as (incarnation, epoch): one warning for each.
_warned: set[tuple[str, int]] = set()


def _warn_cut(topic: str, record: TopicRecord, end: int) -> None:
    if (record.incarnation, record.epoch) not in _warned:
        _warned.add((record.incarnation, record.epoch))
        _log.warning(
            "node %s is not running: messages of %s from offset %d on may be on its disk, and are "
            "left out until it is",
            record.node,
            topic,
            end,
        )


def _known(existing: list[str]) -> str:
    if not existing:
        return "the log has no topics; check that the config is the right one"
    shown = ", ".join(existing[:10])
    more = f" and {len(existing) - 10} more" if existing[10:] else ""
    return f"existing topics: {shown}{more}"
