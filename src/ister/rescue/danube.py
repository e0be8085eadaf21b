"""Objects that Danube wrote, recognised by what is in them.

Danube's names from 0.6.2 on do not say where an object ends, and its descriptors are in a metadata
store that Ister does not read. So an object's range is that of its frames, found by walking them
from the first to the last.

Owns: examining one such object; comparing two that have the same offsets; copying a part of one;
what is reported about those that are not taken. Does not own: which objects make up a topic
(`ister.rescue.rebuild`).

A torn object (its last frame is not whole) is described up to its last whole frame. Of one that is
damaged in its midst, the descriptor has all offsets and no checksum: readers report the damage.
Bodies have to be messages: a file of other contents is not taken.

What a crash leaves: nothing, or a copy that no descriptor names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from ister.base.limits import MIB
from ister.base.model import Codec, Layout, TopicName
from ister.bucket.check import ObjectFile, read_batches, recognise_first
from ister.bucket.names import (
    DanubeName,
    ObjectName,
    format_object_id,
    object_id_of,
    object_key,
    parse_danube_id,
    parse_object_id,
    parse_pending_epoch,
)
from ister.bucket.object_maker import ObjectSummary
from ister.errors import ConflictError, CorruptDataError, IsterError, NotFoundError
from ister.format.crc import crc32
from ister.format.descriptor import FORMAT_FRAMES, ObjectDescriptor
from ister.format.frame import Corrupt, FrameBatch
from ister.format.frame_walk import BadBytes, FrameWalk
from ister.format.offset_ranges import merge_ranges, missing_from, overlaps
from ister.objectstore.base import ObjectInfo, ObjectStore

_CHUNK_BYTES: Final = 4 * MIB
_INDEX_EVERY: Final = 1000
_SUFFIX: Final = f".{FORMAT_FRAMES}"
_DANUBE_PENDING: Final = f"-pending{_SUFFIX}"
# Unix seconds that a name may have: from 2001 to 2286.
_SECONDS: Final = range(10**9, 10**10)
_EPOCH: Final = 1
"""Danube has no epochs: its objects count as those of a topic's first owner."""


class Adoption:
    """The objects of one topic that Danube may have written. Used by one thread at a time.

    `is_danubes`: whether Ister has never had the topic: then the names that both give are Danube's.
    """

    def __init__(
        self, store: ObjectStore, topic: TopicName, *, incarnation: str, is_danubes: bool
    ) -> None:
        self._store = store
        self._topic = topic
        self._incarnation = incarnation
        self._is_danubes = is_danubes
        self.described: dict[ObjectName, ObjectDescriptor] = {}
        """Descriptors of the objects that were recognised by their frames."""
        self.foreign: list[str] = []
        """Ids of files that are not objects of the topic."""
        self.errors: list[IsterError] = []

    def sort(
        self, objects: Iterable[ObjectInfo], *, on_object: Callable[[], None]
    ) -> dict[ObjectName, ObjectInfo]:
        """Names objects: those of Ister by their names, Danube's by their frames."""
        named: dict[ObjectName, ObjectInfo] = {}
        for info in objects:
            object_id = object_id_of(self._topic, info.key)
            name, danube = parse_object_id(object_id), parse_danube_id(object_id)
            if name is not None and (name.epoch > _EPOCH or name.tag is not None):
                self._is_danubes = False
            if name is not None and (danube is None or danube.number not in _SECONDS):
                named[name] = info
            elif danube is not None:
                found = self._examine(info, danube, name)
                on_object()
                if found is not None:
                    named.setdefault(found, info)
                    if named[found] is not info:
                        self._leave_out(info.key, "an object with the same name and offsets exists")
                        self.foreign.append(object_id)
            else:
                self.foreign.append(object_id)
                if object_id.endswith(_DANUBE_PENDING):
                    self._leave_out(info.key, "an upload that was never finished")
                elif object_id.endswith(_SUFFIX) and parse_pending_epoch(object_id) is None:
                    self._leave_out(info.key, "its name is not that of an object")
        return named

    def _examine(
        self, info: ObjectInfo, danube: DanubeName, name: ObjectName | None
    ) -> ObjectName | None:
        """The name of an object by its frames; None if there are none.

        One that may end where its name says is Danube's only if it is whole and ends elsewhere.
        """
        try:
            found = examine(self._store, self._topic, info, danube, incarnation=self._incarnation)
        except NotFoundError:
            return None
        except CorruptDataError as error:
            if name is not None:
                return name
            self._leave_out(info.key, error.message)
            self.foreign.append(object_id_of(self._topic, info.key))
            return None
        if name is not None and (found.damage is not None or found.name.end == name.end):
            return name
        if found.damage is not None:
            self.errors.append(found.damage)
        self.described[found.name] = found.described
        return found.name

    def complete(
        self,
        taken: list[ObjectDescriptor],
        rest: Iterable[tuple[str, ObjectDescriptor | None]],
        *,
        layout: Layout,
        dry_run: bool,
    ) -> list[str]:
        """Adds the offsets that only objects of Danube have that were left out.

        `taken`: the topic's objects; copies are added.
        Returns the ids of the copies.
        """
        copied: list[str] = []
        found_by_frames = {described.object_id for described in self.described.values()}
        for object_id, described in rest:
            if not self._is_danubes and object_id not in found_by_frames:
                continue
            key = object_key(self._topic, object_id)
            if described is None:
                self._leave_out(key, "it is damaged, and other objects have its offsets")
                continue
            others = [one for one in taken if overlaps([(one.start, one.end)], *_range(described))]
            wrong = [one for one in others if not self._agrees(one, described)]
            missing = missing_from(merge_ranges(map(_range, taken)), *_range(described))
            for start, end in missing:
                try:
                    copy = copy_part(
                        self._store,
                        self._topic,
                        described,
                        start,
                        end,
                        layout=layout,
                        dry_run=dry_run,
                    )
                except CorruptDataError as error:
                    self.errors.append(error)
                    continue
                taken.append(copy)
                copied.append(copy.object_id)
            taken.sort(key=lambda one: one.start)
            if wrong:
                self._leave_out(key, f"{wrong[0].object_id} has other messages at its offsets")
            elif not missing:
                self._leave_out(key, f"{others[0].object_id} has its messages")
        return copied

    def _agrees(self, one: ObjectDescriptor, other: ObjectDescriptor) -> bool:
        return have_same_frames(self._store, self._topic, one, other)

    def _leave_out(self, key: str, reason: str) -> None:
        self.errors.append(
            ConflictError(f"object not taken: {reason}", topic=str(self._topic), path=key)
        )


def _range(described: ObjectDescriptor) -> tuple[int, int]:
    return described.start, described.end


class DanubeObject(NamedTuple):
    """An object that Danube wrote, described by its frames."""

    name: ObjectName
    described: ObjectDescriptor
    damage: CorruptDataError | None
    """What is wrong with it, if it is torn or damaged."""


def examine(
    store: ObjectStore, topic: TopicName, info: ObjectInfo, named: DanubeName, *, incarnation: str
) -> DanubeObject:
    """Reads an object whole and describes what is in it.

    Raises:
        CorruptDataError: It does not begin with a whole frame of a message: nothing can be taken.
    """
    bad: list[BadBytes] = []
    summary: ObjectSummary | None = None

    def note(found: BadBytes) -> bool:
        bad.append(found)
        return summary is not None

    file = ObjectFile(store, info.key, info.size)
    walk = FrameWalk(file, expected_offset=None, chunk_bytes=_CHUNK_BYTES, on_damage=note)
    codec: Codec | None = None
    for chunk, _, scan in walk:
        if bad:
            continue  # behind damage, only where frames end is wanted
        first = (scan.next_offset or 0) - len(scan.starts)
        codec = codec or recognise_first(chunk, scan, first)
        if codec is None:
            break
        summary = summary or ObjectSummary(first, index_every_messages=_INDEX_EVERY)
        summary.add(FrameBatch(chunk, scan.starts, scan.end, first, codec))
    if file.size() != info.size:
        raise CorruptDataError(
            "the object has changed since it was listed", path=info.key, position=walk.end
        )
    if summary is None:
        reason = walk.stop.reason if isinstance(walk.stop, Corrupt) else "it is too short"
        raise CorruptDataError(
            f"not an object of messages: {reason}", topic=str(topic), path=info.key, position=0
        )
    described = summary.describe(
        object_id_of(topic, info.key),
        epoch=_EPOCH,
        incarnation=incarnation,
        created_at=named.number if named.number in _SECONDS else int(info.modified_at or 0),
        etag=info.etag,
    )
    damage: CorruptDataError | None = None
    if bad:
        stop, position = bad[0].stop, bad[0].position
        end = walk.next_offset if walk.frames > summary.end - summary.start else None
        reason = str(stop.reason) if isinstance(stop, Corrupt) else "a torn frame"
        damage = CorruptDataError(
            f"damaged object: {reason}; {info.size - position} bytes from here on "
            + ("are not whole frames" if end is None else f"are read up to offset {end}"),
            topic=str(topic),
            path=info.key,
            position=position,
            offset=summary.end,
        )
        if end is not None:
            described = replace(
                described,
                end=end,
                messages=end - described.start,
                size_bytes=info.size,
                checksum=None,
                publish_time_min=None,
                publish_time_max=None,
                publish_time_index=(),
            )
    name = ObjectName(
        start=described.start, end=described.end, epoch=_EPOCH, written_at=named.number
    )
    return DanubeObject(name, described, damage)


def read_part(
    store: ObjectStore, topic: TopicName, described: ObjectDescriptor, start: int, end: int
) -> Iterator[FrameBatch]:
    """The frames of an object with the offsets `start` up to, not including, `end`.

    Raises:
        CorruptDataError: A frame up to there is damaged.
    """
    key = object_key(topic, described.object_id)
    at, position = described.position_before(start)
    walk = FrameWalk(
        ObjectFile(store, key),
        position=position,
        expected_offset=at,
        end_offset=end,
        chunk_bytes=_CHUNK_BYTES,
    )
    try:
        for batch in read_batches(walk, end, path=key, codec=described.codec):
            skipped = start - batch.first_offset
            if skipped <= 0:
                yield batch
            elif skipped < len(batch.starts):
                yield replace(
                    batch, starts=batch.starts[skipped:], first_offset=batch.first_offset + skipped
                )
    except CorruptDataError as error:
        error.topic = str(topic)
        raise


def have_same_frames(
    store: ObjectStore, topic: TopicName, one: ObjectDescriptor, other: ObjectDescriptor
) -> bool:
    """Whether two objects have the same messages at the offsets that both have.

    Objects of other formats than frames, and damaged ones, count as different.
    """
    start, end = max(one.start, other.start), min(one.end, other.end)
    sums: list[int] = []
    for described in (one, other):
        crc = 0
        if described.format != FORMAT_FRAMES:
            return False
        try:
            for batch in read_part(store, topic, described, start, end):
                crc = crc32(memoryview(batch.chunk)[batch.starts[0] : batch.end], crc)
        except CorruptDataError:
            return False
        sums.append(crc)
    return sums[0] == sums[1]


def copy_part(
    store: ObjectStore,
    topic: TopicName,
    described: ObjectDescriptor,
    start: int,
    end: int,
    *,
    layout: Layout,
    dry_run: bool,
) -> ObjectDescriptor:
    """Copies some offsets of an object into one of its own; does not commit it.

    A copy that was made before is written again, with the same bytes.

    `dry_run`: write nothing; the descriptor is that of the copy all the same.

    Raises:
        CorruptDataError: A frame up to there is damaged.
    """
    tag = f"{crc32(described.object_id.encode()):08x}"
    object_id = format_object_id(start, end, _EPOCH, tag=tag, layout=layout)
    key = object_key(topic, object_id)
    summary = ObjectSummary(start, index_every_messages=_INDEX_EVERY)
    parts = read_part(store, topic, described, start, end)
    etag: str | None = None
    if dry_run:
        for batch in parts:
            summary.add(batch)
    else:
        writer = store.open_writer(key, chunk_bytes=2 * _CHUNK_BYTES, concurrent_parts=2)
        try:
            for batch in parts:
                writer.write(summary.add(batch))
            writer.close()
        finally:
            writer.abort()
        etag = store.stat(key).etag
    return summary.describe(
        object_id,
        epoch=_EPOCH,
        incarnation=described.incarnation,
        created_at=described.created_at,
        etag=etag,
    )
