"""Re-sorts express runs: one object of frames replaces neighbouring runs of a topic.

    n/p/17.dnbx@0+4100 ────┐
    n/p/18.dnbx@880+4100 ──┼─► frames, checked ─► data-0-299-c1f0a2b3c.dnb1 ─► read back ─► swap
    n/p/19.dnbx@96+8200 ───┘

Owns: which runs go together, their frames, the new object, its swap by the topic's owner. Does not
own: when it happens and for which topic (`ister.topic.resorting`), how an object is made
(`object_maker`). A pipeline plans the same groups and makes the objects in tasks (`merge`).

The new object has the bytes and the index of an upload of the range. Its name has a random tag,
like that of a merged object, for two reasons:

- another engine, a task that Spark has given up, or a later attempt may write the same range at the
  same time. If they used the same name, the one that commits second would delete the committed
  object when it removes its own; so would a collection of orphans that has listed an earlier
  attempt;
- metadata recovery trusts an object without a tag by its name, and reads a tagged one first. An
  unfinished object without a tag would hide the runs.

Every frame and every run's checksum is checked, from local files and from the bucket: the new
object has what was acknowledged. Its arrival time is that of its newest run, so retention is not
postponed.

Invariants: an object is read back before its swap. The swap is one transaction, so a topic has
either the runs or the object. It requires the lease that this process had before it wrote the
object: after that lease has ended, the object may have been collected as an orphan.

What a crash leaves: an object that no descriptor names.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from ister.base import failpoints
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.check import verify_content
from ister.bucket.compaction_plan import OBJECTS_MAX
from ister.bucket.merge import find_newest_arrival, read_frames
from ister.bucket.names import object_key
from ister.bucket.object_maker import ObjectMaker, UploadSettings
from ister.bucket.ownership import OwnedTopic
from ister.errors import (
    CorruptDataError,
    InvariantError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor
from ister.format.frame import FrameBatch
from ister.metadata.base import Compare
from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.bucket.resort")

_SETTLED: Final = 16
"""After this many objects in a row that are not runs, older objects are not searched."""
_WINDOW: Final = 64
_GROWTH: Final = 4


class RunGroup(NamedTuple):
    """Runs that become one object."""

    runs: tuple[ObjectDescriptor, ...]
    is_due: bool
    """Whether no other run can join them, or they have waited long enough."""

    @property
    def size_bytes(self) -> int:
        """Size of the new object."""
        return sum(run.size_bytes for run in self.runs)


def plan_resort(
    descriptors: Iterable[ObjectDescriptor],
    settings: UploadSettings,
    *,
    is_due: Callable[[ObjectDescriptor], bool],
) -> Iterator[RunGroup]:
    """Yields groups of runs, oldest first, each within the limits of one object.

    `descriptors`: A topic's, ascending; read only as far as groups are consumed.
    `is_due`: whether a run has waited long enough; called with the oldest run of the last group.
    """
    group: list[ObjectDescriptor] = []
    size = 0

    def is_full(following: ObjectDescriptor) -> bool:
        return (
            following.format != FORMAT_EXPRESS
            or following.start != group[-1].end
            or following.codec != group[-1].codec
            or len(group) == OBJECTS_MAX
            or size + following.size_bytes > settings.object_bytes_max
            or (following.created_at - group[0].created_at) * 1000 > settings.object_span_ms_max
        )

    for described in descriptors:
        if group and is_full(described):
            yield RunGroup(tuple(group), True)
            group, size = [], 0
        if described.format == FORMAT_EXPRESS:
            group.append(described)
            size += described.size_bytes
    if group:
        is_filled = len(group) == OBJECTS_MAX or size >= settings.object_bytes_max
        yield RunGroup(tuple(group), is_filled or is_due(group[0]))


def find_first_run(catalog: Catalog, last: ObjectDescriptor | None) -> int | None:
    """The start of the oldest run of a topic, searched from the newest object; None without runs.

    Runs are re-sorted oldest first, so the search ends after a few objects in a row that are not
    runs. `ister pipeline compact` finds runs before these, because it reads all descriptors.
    """
    if last is None:
        return None
    found: int | None = None
    end, width, settled = last.end, (last.end - last.start) * _WINDOW, 0
    while end > 0 and settled < _SETTLED:
        begin = max(0, end - width)
        objects = [
            (described.start, described.format == FORMAT_EXPRESS)
            for described, _ in catalog.descriptors(begin, end)
        ]
        first = next((at for at, (_, is_run) in enumerate(objects) if is_run), None)
        if first is None:
            settled += len(objects)
        else:
            found, settled = objects[first][0], first
        # An object may begin before the window.
        end = min(begin, objects[0][0]) if objects else begin
        width *= _GROWTH
    return found


def resort(
    owned: OwnedTopic,
    old: Sequence[tuple[ObjectDescriptor, int]],
    *,
    maker: ObjectMaker,
    store: ObjectStore,
    local: Callable[[], Iterator[FrameBatch]] | None,
    chunk_bytes: int,
    until: int,
    stays: Callable[[ObjectDescriptor], bool],
    presence: Compare,
) -> ObjectDescriptor | None:
    """Replaces runs by one object of frames.

    `old`: the runs, ascending, each with its key's revision.
    `local`: reads and checks the runs' frames from local files; None if these do not have them.
    `presence`: `Membership.presence`, from before this call.
    Returns the object; None if the topic's objects have changed meanwhile.

    Raises:
        CorruptDataError: A run is damaged, or the new object is not what was written.
        NotFoundError: A run is lost.
        UnavailableError: A store does not answer; the swap may have happened.
    """
    topic, runs = owned.catalog.keys.topic, [described for described, _ in old]
    failpoints.reach("express.before_resort")
    made: ObjectDescriptor | None = None
    if local is not None:
        try:
            made = _make(owned, runs, local(), maker=maker, store=store, chunk_bytes=chunk_bytes)
        except (CorruptDataError, NotFoundError, OffsetOutOfRangeError) as error:
            _log.info(
                "local files unusable; reading runs from the bucket",
                extra={"topic": owned.topic, "error": str(error)},
            )
    if made is None:
        frames = bucket_frames(topic, runs, store=store, chunk_bytes=chunk_bytes)
        made = _make(owned, runs, frames, maker=maker, store=store, chunk_bytes=chunk_bytes)
    failpoints.reach("express.after_resort")
    if not owned.swap(old, made, until=until, also=[presence], stays=stays):
        there = owned.catalog.find(made.start)
        if there is None or there.object_id != made.object_id:
            _discard(store, topic, made)
        return None
    _log.info(
        "runs re-sorted",
        extra={
            "topic": owned.topic,
            "object": made.object_id,
            "runs": len(runs),
            "bytes": made.size_bytes,
        },
    )
    return made


def _make(
    owned: OwnedTopic,
    runs: Sequence[ObjectDescriptor],
    frames: Iterator[FrameBatch],
    *,
    maker: ObjectMaker,
    store: ObjectStore,
    chunk_bytes: int,
) -> ObjectDescriptor:
    topic = owned.catalog.keys.topic
    made = maker.make(
        _Source(frames),
        runs[0].start,
        runs[-1].end,
        epoch=owned.epoch,
        incarnation=owned.record.incarnation,
        tag=secrets.token_hex(4),
        arrived_ms=find_newest_arrival(runs),
    )
    try:
        # Exhausting the iterator compares the checksum of the last run.
        if next(frames, None) is not None:
            raise InvariantError("runs have more frames than offsets")
        # Once the express objects are removed, this object is the only copy.
        key = object_key(topic, made.object_id)
        verify_content(store, key, made, chunk_bytes=chunk_bytes)
    except (CorruptDataError, NotFoundError):
        _discard(store, topic, made)
        raise
    return replace(made, created_at=max(run.created_at for run in runs))


def _discard(store: ObjectStore, topic: TopicName, made: ObjectDescriptor) -> None:
    """Removes an object that was not committed; its name is used by no other object."""
    with suppress(IsterError):  # else it is collected
        store.delete(object_key(topic, made.object_id))


class _Source:
    """The frames of runs; a `FrameSource`."""

    def __init__(self, frames: Iterator[FrameBatch]) -> None:
        self._frames = frames

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """Returns `end`: the range is that of the runs."""
        return end

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """The next frames."""
        return next(self._frames)

    def arrived_ms(self, start: int, end: int) -> int | None:
        """Always None: descriptors have the arrival times."""
        return None

    def close(self) -> None:
        """Does nothing."""


def bucket_frames(
    topic: TopicName, runs: Sequence[ObjectDescriptor], *, store: ObjectStore, chunk_bytes: int
) -> Iterator[FrameBatch]:
    """The frames of runs, from the bucket.

    Raises:
        CorruptDataError: A run is damaged; `path` is its key.
        NotFoundError: A run is lost; `path` is its key.
    """
    for run in runs:
        if run.codec is None:
            raise InvariantError(f"run without a codec: {run.object_id}")
        try:
            yield from read_frames(topic, run, run.codec, store=store, chunk_bytes=chunk_bytes)
        except (CorruptDataError, NotFoundError) as error:
            error.path = object_key(topic, run.object_id)
            raise
