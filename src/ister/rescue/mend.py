"""Makes a lost or damaged object again, from another copy of its messages.

    local files ──────────┐
    other objects, runs ──┤
    the owner, by Flight ─┼─► frames, combined ─► new object ─► read back, checked ─► descriptor
    intact parts of it ───┘

Owns: the choice of a source; one new object for a range, or several, under unused names. Does not
own: what is wrong (`catalog_check`, `object_check`), the commit. May run twice.

Invariants:

- nothing is overwritten: a name has a random tag;
- every returned object was read back from the bucket and checked, frame by frame;
- an uploaded object comes back byte for byte (its checksum is on record), or as the owner's own
  files have it, or not at all. Objects of a fenced owner, and files of another topic of the same
  name, are not used;
- an object from which compaction removed messages is only replaced by a copy of the same bytes:
  every other source also has the removed messages;
- an object that may be collected at this moment is copied, and never named by a descriptor.

What a crash leaves: objects that no descriptor names.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from ister.base.clock import Clock
from ister.base.model import Codec, TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.names import TopicKeys, format_object_id, object_key, parse_object_id
from ister.bucket.object_maker import FrameSource, ObjectMaker
from ister.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES, FORMAT_PARQUET, ObjectDescriptor
from ister.format.frame import FrameBatch, NothingLeftError
from ister.format.records import TopicRecord
from ister.rescue.object_check import ObjectChecker
from ister.rescue.rebuild import copy_bytes, describe_object
from ister.topic.history import BucketLog
from ister.topic.stores import upload_settings

_log = logging.getLogger("ister.spark.jobs.object_repair")

LOCAL: Final = "local files"
BROKER: Final = "the broker"

KEPT_HINT: Final = (
    "compaction removed messages from it, which local files and older objects would bring back: "
    "restore the object from a copy of the bucket"
)
"""Hint for an object that only a copy of itself can replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRange:
    """Offsets that a topic should have, `start` to `end` (excluded). Pickled to a task."""

    topic: str
    epoch: int
    incarnation: str
    node: str
    """The node whose local files are the topic's."""
    start: int
    end: int | None
    """None if it is unknown; then `reach` is the highest known offset."""
    reach: int = 0
    old: ObjectDescriptor | None = None
    """The lost or damaged object; None if no descriptor has the offsets."""
    others: tuple[ObjectDescriptor, ...] = ()
    """Objects, and runs of express objects, that may have some of the offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """What was made. Pickled."""

    objects: tuple[ObjectDescriptor, ...] = ()
    """One object with exactly the old one's offsets, or several that fill a gap."""
    sources: tuple[str, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    """Offsets that no source has."""
    reason: str = ""
    """Why it is not repaired, if so."""
    hint: str | None = None
    """What to do about that."""
    has_local_files: bool = False


def epoch_floor(record: TopicRecord, end: int) -> int:
    """Returns the epoch below which objects with offsets before `end` are of a fenced owner."""
    return max((item.epoch for item in record.lineage if item.start < end), default=0)


def mend(history: BucketLog, damaged: DamagedRange, sources: Sequence[Source]) -> RepairResult:
    """Makes the objects that are missing, from the first sources that have their messages."""
    mender = _Mender(history, damaged, sources)
    result = mender.restore(damaged.old) if damaged.old is not None else mender.fill()
    return replace(result, has_local_files=any(source.name == LOCAL for source in sources))


# -- sources --------------------------------------------------------------------------------


class _NoSourceError(Exception):
    """No source has the frame of an offset; the reason is the last source's."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


class Frames(Protocol):
    """Reads frames of a range."""

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """Checked frames from `start` on, at least one, none at or after `end`."""
        ...

    def close(self) -> None:
        """Closes files. May be called twice."""
        ...


@dataclass(slots=True)
class Source:
    """A copy that may have the frames `start` up to, not including, `end`."""

    name: str
    start: int
    end: int
    frames: Frames
    owner: FrameSource | None = None
    """Plans objects; only the owner's own files do, here or by its broker."""


class _CombinedSource:
    """Frames of a range, each from the first source that has it; a `FrameSource`."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._codec: Codec | None = None
        self.used: dict[str, None] = {}

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """Returns `end`: the range is that of an object."""
        return end

    def arrived_ms(self, start: int, end: int) -> int | None:
        """Always None: copies have no arrival times."""
        return None

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """Fetches the frames from `start` on."""
        reason = "no copy was found"
        for source in self._sources:
            if not source.start <= start < source.end:
                continue
            try:
                batch = source.frames.fetch(start, min(end, source.end), bytes_max=bytes_max)
            except NothingLeftError:
                reason = f"{source.name} does not have it"
                continue
            except (CorruptDataError, NotFoundError, OffsetOutOfRangeError) as error:
                reason = f"{source.name}: {error.message}"
                continue
            except (UnavailableError, ConflictError, FencedError) as error:
                # A broker that lost ownership may have other messages.
                if source.name != BROKER:
                    raise
                reason = f"{source.name}: {error.message}"
                continue
            if batch.first_offset != start or self._codec not in (None, batch.codec):
                reason = f"{source.name} does not have it"
                continue
            self._codec = batch.codec
            self.used[source.name] = None
            return batch
        raise _NoSourceError(start, reason)

    def close(self) -> None:
        """Does nothing: the caller closes the sources."""


class _Pinned(Catalog):
    """A catalog of one object."""

    def __init__(self, keys: TopicKeys, described: ObjectDescriptor) -> None:
        self.keys = keys
        self._described = described

    def find(self, offset: int) -> ObjectDescriptor | None:
        return self._described if self._described.start <= offset else None

    def following(self, offset: int) -> ObjectDescriptor | None:
        return self._described if self._described.start >= offset else None


def object_source(history: BucketLog, keys: TopicKeys, described: ObjectDescriptor) -> Source:
    """An object, of which no more than its range has to be known."""
    reader = HistoryReader(
        _Pinned(keys, described),
        history.objects,
        settings=ReaderSettings(
            chunk_bytes=history.config.storage.cloud_reader.fetch_chunk_size, skips_damage=False
        ),
        clock=history.clock,
        metrics=history.metrics,
    )
    return Source(described.object_id, described.start, described.end, reader)


# -- the object -----------------------------------------------------------------------------


class _Mender:
    """Makes the objects of one damaged range."""

    def __init__(
        self, history: BucketLog, damaged: DamagedRange, sources: Sequence[Source]
    ) -> None:
        self._damaged = damaged
        self._sources = sources
        self._topic = TopicName.parse(damaged.topic)
        self._store = history.objects
        self._clock: Clock = history.clock
        self._settings = upload_settings(
            history.config.storage.uploader, history.config.storage.cloud.layout
        )
        self._maker = ObjectMaker(
            self._topic,
            self._store,
            settings=self._settings,
            clock=history.clock,
            metrics=history.metrics,
            pending_tag=secrets.token_hex(4),
        )
        self._checker = ObjectChecker(
            self._topic,
            self._store,
            chunk_bytes=history.config.storage.cloud_reader.fetch_chunk_size,
            index_every_messages=self._settings.index_every_messages,
            ahead=None,
            clock=history.clock,
            metrics=history.metrics,
        )

    # -- replacing an object ----------------------------------------------------------------

    def restore(self, old: ObjectDescriptor) -> RepairResult:
        """Makes an object with exactly the offsets of a lost or damaged one."""
        if old.kept:
            return self._restore_kept(old)
        local = next((source for source in self._sources if source.name == LOCAL), None)
        has_files = local is not None and local.start <= old.start and old.end <= local.end
        result = self._restore_from_frames(old) if has_files else RepairResult()
        if result.objects:
            return result
        for source in self._sources:
            made = self._copy(source, old.start, old.end, old=old, allows_kept=False)
            if made is not None:
                return RepairResult(objects=(made,), sources=(source.name,))
        return result if has_files else self._restore_from_frames(old)

    def _restore_kept(self, old: ObjectDescriptor) -> RepairResult:
        """Copies the same bytes from elsewhere, or from the object if it has all of them."""
        for source in self._sources:
            made = self._copy(source, old.start, old.end, old=old, allows_kept=True)
            if made is not None:
                return RepairResult(objects=(made,), sources=(source.name,))
        return RepairResult(
            reason="compaction removed messages from it, and there is no copy of the rest",
            hint=KEPT_HINT,
        )

    def _restore_from_frames(self, old: ObjectDescriptor) -> RepairResult:
        try:
            made, used = self._make(old.start, old.end)
        except _NoSourceError as error:
            return RepairResult(reason=f"offset {error.offset}: {error.reason}")
        except CorruptDataError as error:
            return RepairResult(reason=error.message)
        # The owner's messages are the topic, whatever the old descriptor said.
        is_the_owners = set(used) <= {LOCAL, BROKER}
        if not is_the_owners and (reason := self._differs(made, old)):
            self._discard(made.object_id)
            return RepairResult(reason=f"{', '.join(used)}: {reason}")
        # A repair must not postpone retention.
        made = replace(made, arrival_time_max=old.arrived_ms)
        return RepairResult(objects=(made,), sources=used)

    def _differs(self, made: ObjectDescriptor, old: ObjectDescriptor) -> str:
        """Returns why an object differs from the old one, as far as that can be told."""
        if old.kept:
            # Another compaction of the same range may have removed fewer messages, or more.
            if (made.kept, made.messages) != (old.kept, old.messages):
                return "other messages were removed from it"
            is_same = old.checksum in (None, made.checksum)
            return "" if is_same else f"its checksum is {made.checksum}, not {old.checksum}"
        name = parse_object_id(old.object_id)
        is_as_uploaded = old.format == FORMAT_EXPRESS or (
            name is not None and name.tag is None and old.format == FORMAT_FRAMES
        )
        if made.format != FORMAT_FRAMES or not is_as_uploaded or old.checksum is None:
            return ""
        if made.checksum == old.checksum:
            return ""
        return f"its checksum is {made.checksum}, and that of the object was {old.checksum}"

    # -- filling a gap ----------------------------------------------------------------------

    def fill(self) -> RepairResult:
        """Makes objects for a range that no descriptor has, one after the other."""
        damaged = self._damaged
        objects: list[ObjectDescriptor] = []
        used: dict[str, None] = {}
        lost: list[tuple[int, int]] = []
        reason = ""
        at = damaged.start
        while at < damaged.end if damaged.end is not None else at <= damaged.reach:
            try:
                made, sources = self._next(at)
            except _NoSourceError as error:
                reason = error.reason
                begin = error.offset
                if begin > at:
                    made, sources = self._make(at, begin)
                    objects.append(made)
                    used |= dict.fromkeys(sources)
                following = [s.start for s in self._sources if s.start > begin]
                upto = min(following, default=damaged.end or begin + 1)
                upto = upto if damaged.end is None else min(upto, damaged.end)
                lost.append((begin, upto))
                if damaged.end is None:
                    break
                at = upto
                continue
            objects.append(made)
            used |= dict.fromkeys(sources)
            at = made.end
        return RepairResult(
            objects=tuple(objects), sources=tuple(used), lost=tuple(lost), reason=reason
        )

    def _next(self, at: int) -> tuple[ObjectDescriptor, tuple[str, ...]]:
        """Makes the object that starts at an offset."""
        limit = self._damaged.end if self._damaged.end is not None else 1 << 63
        for source in self._sources:
            # Compacted objects first: other sources would bring removed messages back.
            name = parse_object_id(source.name)
            if name is None or name.tag is None or name.format != FORMAT_PARQUET:
                continue
            if made := self._copy_whole(source, at, limit, allows_kept=True):
                return made, (source.name,)
        for source in self._sources:
            if not source.start <= at < source.end:
                continue
            if source.owner is not None:
                with suppress(
                    CorruptDataError,
                    OffsetOutOfRangeError,
                    NotFoundError,
                    ConflictError,
                    FencedError,
                ):
                    return self._make(
                        at,
                        source.owner.plan(
                            at,
                            min(limit, source.end),
                            bytes_max=self._settings.object_bytes_max,
                            span_ms_max=self._settings.object_span_ms_max,
                        ),
                    )
            elif made := self._copy_whole(source, at, limit, allows_kept=False):
                return made, (source.name,)
        # Otherwise a part: as far as the longest source goes, but not into the next one.
        ends = [s.end for s in self._sources if s.start <= at < s.end and s.name != BROKER]
        starts = [s.start for s in self._sources if s.start > at]
        try:
            return self._make(at, min(max(ends, default=limit), limit, *starts))
        except _NoSourceError:
            # A compacted object records that messages were removed: better than nothing.
            for source in self._sources:
                if made := self._copy_whole(source, at, limit, allows_kept=True):
                    return made, (source.name,)
            raise

    def _copy_whole(
        self, source: Source, at: int, limit: int, *, allows_kept: bool
    ) -> ObjectDescriptor | None:
        """Copies an object that starts at an offset and ends within the damaged range."""
        if source.start != at or source.end > limit:
            return None
        return self._copy(source, at, source.end, old=None, allows_kept=allows_kept)

    # -- making -----------------------------------------------------------------------------

    def _make(self, start: int, end: int) -> tuple[ObjectDescriptor, tuple[str, ...]]:
        """Makes an object of frames; returns it and the names of its sources."""
        combined = _CombinedSource(self._sources)
        made = self._maker.make(
            combined,
            start,
            end,
            epoch=self._damaged.epoch,
            incarnation=self._damaged.incarnation,
            tag=secrets.token_hex(4),
        )
        self._verify(made)
        return made, tuple(combined.used)

    def _copy(
        self,
        source: Source,
        start: int,
        end: int,
        *,
        old: ObjectDescriptor | None,
        allows_kept: bool,
    ) -> ObjectDescriptor | None:
        """Copies another object with exactly these offsets; None if the copy is not good."""
        name = parse_object_id(source.name)
        itself = old if old is not None and source.name == old.object_id else None
        if name is None or (name.start, name.end) != (start, end):
            return None
        if itself is not None and (not itself.kept or itself.checksum is None):
            return None
        object_id = format_object_id(
            start,
            end,
            self._damaged.epoch,
            format=name.format,
            tag=secrets.token_hex(4),
            layout=self._settings.layout,
        )
        try:
            size_bytes = itself.size_bytes if itself is not None else None
            copy_bytes(
                self._store,
                object_key(self._topic, source.name),
                object_key(self._topic, object_id),
                limit=size_bytes,
                chunk_bytes=self._settings.chunk_bytes,
                concurrent_parts=self._settings.concurrent_parts,
            )
            # Describing the copy reads and checks every byte of it.
            made = describe_object(
                self._store,
                self._topic,
                object_id,
                replace(name, epoch=self._damaged.epoch),
                incarnation=self._damaged.incarnation,
                created_at=self._clock.now_ns() // 1_000_000_000,
            )
            reason = "messages were removed from it" if made.kept and not allows_kept else ""
            reason = reason or (self._differs(made, old) if old is not None else "")
        except (CorruptDataError, NotFoundError) as error:
            reason = error.message
        else:
            if not reason:
                return made if old is None else replace(made, arrival_time_max=old.arrived_ms)
        _log.info("copy failed verification", extra={"object": source.name, "reason": reason})
        self._discard(object_id)
        return None

    def _verify(self, made: ObjectDescriptor) -> None:
        """Reads a new object back."""
        for problem in self._checker.check(made).problems:
            self._discard(made.object_id)
            raise CorruptDataError(
                f"the new object is damaged: {problem.reason}",
                path=object_key(self._topic, made.object_id),
                offset=problem.offset,
                position=problem.position,
            )

    def _discard(self, object_id: str) -> None:
        """Removes an object that was made here and that no descriptor names."""
        try:
            self._store.delete(object_key(self._topic, object_id))
        except IsterError as error:
            _log.info("object not removed", extra={"object": object_id, "error": str(error)})
