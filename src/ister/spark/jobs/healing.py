"""Makes the object again that a topic has lost, from whoever still has its messages.

    local files ──────────┐
    other objects ────────┤
    the owner, by Flight ─┼─► patchwork of frames ─► new object ─► read back, checked ─► descriptor
    what is whole of it ──┘

Owns: one new object for a range, or several, under names that nobody has used before. Does not own:
what is wrong (`topic_survey`, `object_check`), the commit. Runs in a task; harmless when done
twice.

Invariants:

- nothing is written over: a name has a random tag;
- what is returned was read back from the bucket and checked, frame by frame;
- an object that was uploaded once comes back byte for byte (or as the owner's own files have it),
  or not at all: its checksum is on
  record. Objects of an owner that had been fenced, and files of another topic of the same name, are
  no source;
- in the place of an object that messages were left out of on purpose comes nothing but a copy of
  the same bytes: whoever else has its offsets has messages, too, that were removed for good;
- an object that somebody may be collecting at this moment is copied, and never named by a
  descriptor itself.

What a crash leaves: objects that no descriptor names.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from ister.client.frames import BrokerFrames
from ister.clock import Clock
from ister.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.descriptor import FORMAT_FRAMES, FORMAT_PARQUET, ObjectDescriptor
from ister.format.frame import FrameBatch
from ister.format.records import TopicRecord
from ister.model import Codec, TopicName
from ister.spark.place import Place
from ister.tier.catalog import Catalog
from ister.tier.names import ObjectName, TopicKeys, format_object_id, object_key, parse_object_id
from ister.tier.object_maker import FrameSource, ObjectMaker
from ister.tier.reader import HistoryReader, NothingLeftError, ReaderSettings
from ister.tier.rebuild import describe_object
from ister.tier.verify import verify_object
from ister.topic.history import History
from ister.topic.local_tail import LocalTail
from ister.topic.tiers import upload_settings

__all__ = ["KEPT_HINT", "Healed", "Wound", "epoch_floor", "heal"]

_log = logging.getLogger("ister.spark.jobs.healing")

_LOCAL: Final = "local files"
_BROKER: Final = "the broker"

KEPT_HINT: Final = (
    "compaction has left messages out of it, which local files and older objects would bring back: "
    "put the object back from a copy of the bucket"
)
"""What to do about an object that only a copy of itself can replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """Offsets that a topic should have: `start` up to, not including, `end`. Pickled to a task."""

    topic: str
    epoch: int
    incarnation: str
    node: str
    """Whose local files are the topic's."""
    start: int
    end: int | None
    """None where only one thing is known: that `reach` has to be among them."""
    reach: int = 0
    old: ObjectDescriptor | None = None
    """The object that is lost or damaged; None where no descriptor has the offsets."""
    others: tuple[tuple[str, int], ...] = ()
    """Objects that may have some of them: names and sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """What was made. Pickled."""

    objects: tuple[ObjectDescriptor, ...] = ()
    """One with exactly the old one's offsets; or as many as there were to be made."""
    sources: tuple[str, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    """Offsets that nobody has."""
    reason: str = ""
    """Why it is not healed, where it is not."""
    hint: str | None = None
    """What somebody can do about that."""
    has_local_files: bool = False


def epoch_floor(record: TopicRecord, end: int) -> int:
    """The epoch below which objects with offsets before `end` are of an owner that was fenced."""
    return max((item.epoch for item in record.lineage if item.start < end), default=0)


def heal(place: Place, wound: Wound) -> Healed:
    """Makes what is missing.

    Raises:
        UnavailableError: A store does not answer.
        PermissionDeniedError: A store refuses.
    """
    with _sources(place, wound) as sources:
        healer = _Healer(place.history(), wound, sources)
        healed = healer.restore(wound.old) if wound.old is not None else healer.fill()
        return replace(healed, has_local_files=any(source.name == _LOCAL for source in sources))


# -- who has it -----------------------------------------------------------------------------


class _NobodyHasError(Exception):
    """No source has the frame of an offset, and why the last one does not."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


@dataclass(slots=True)
class _Source:
    """Somebody who may have frames of a range."""

    name: str
    start: int
    end: int
    frames: FrameSource


class _Patchwork:
    """Frames of a range, each from the first source that has it; a `FrameSource`."""

    def __init__(self, sources: list[_Source]) -> None:
        self._sources = sources
        self._codec: Codec | None = None
        self.used: dict[str, None] = {}

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """All of it: the range is that of an object."""
        return end

    def arrived_ms(self, start: int, end: int) -> int | None:
        """Always None: copies have no arrival times."""
        return None

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """The frames that follow."""
        reason = "no copy of it was found"
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
                # A broker that is not the owner any more has other messages.
                if source.name != _BROKER:
                    raise
                reason = f"{source.name}: {error.message}"
                continue
            if batch.first_offset != start or self._codec not in (None, batch.codec):
                reason = f"{source.name} does not have it"
                continue
            self._codec = batch.codec
            self.used[source.name] = None
            return batch
        raise _NobodyHasError(start, reason)

    def close(self) -> None:
        """Sources are closed by whoever opened them."""


class _Pinned(Catalog):
    """A catalog of one object."""

    def __init__(self, keys: TopicKeys, described: ObjectDescriptor) -> None:
        self.keys = keys
        self._described = described

    def find(self, offset: int) -> ObjectDescriptor | None:
        return self._described if self._described.start <= offset else None

    def following(self, offset: int) -> ObjectDescriptor | None:
        return self._described if self._described.start >= offset else None


@contextmanager
def _sources(place: Place, wound: Wound) -> Iterator[list[_Source]]:
    """Everybody who may have some of it, the best ones first."""
    history, name = place.history(), TopicName.parse(wound.topic)
    end = wound.end if wound.end is not None else 1 << 63
    found: list[_Source] = []
    try:
        local = LocalTail.find(
            place.config.storage.wal.dir,
            name,
            wound.node,
            wound.incarnation,
            clock=history.clock,
            metrics=history.metrics,
        )
        chunk_bytes = upload_settings(place.config.storage.uploader).read_bytes
        opened = None
        if local is not None:
            with suppress(UnavailableError):  # no checkpoint: what in them is durable is not known
                opened = local.source(chunk_bytes=chunk_bytes)
        if opened is not None:
            source, snapshot = opened
            found.append(_Source(_LOCAL, snapshot.trimmed, snapshot.synced, source))
        keys = TopicKeys(place.config.storage.metadata.root_prefix, name)
        for object_id, size_bytes in wound.others:
            parsed = parse_object_id(object_id)
            if parsed is not None and parsed.start < end and wound.start < parsed.end:
                described = _undescribed(object_id, size_bytes, parsed)
                found.append(_object_source(history, keys, described))
        client = place.flight()
        if client is not None:
            broker = BrokerFrames(client, wound.topic, wound.incarnation, wound.epoch)
            found.append(_Source(_BROKER, 0, 1 << 63, broker))
        if wound.old is not None:
            # Last: what is still whole of the object itself.
            found.append(_object_source(history, keys, wound.old))
        yield found
    finally:
        for item in found:
            item.frames.close()


def _undescribed(object_id: str, size_bytes: int, name: ObjectName) -> ObjectDescriptor:
    """A descriptor by an object's name alone."""
    return ObjectDescriptor(
        object_id=object_id,
        start=name.start,
        end=name.end,
        size_bytes=size_bytes,
        format=name.format,
        messages=name.end - name.start,
    )


class _ObjectFrames:
    """The frames of one object; a `FrameSource`."""

    def __init__(self, reader: HistoryReader) -> None:
        self._reader = reader

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """All of it."""
        return end

    def arrived_ms(self, start: int, end: int) -> int | None:
        """Always None: the object's descriptor has the arrival time."""
        return None

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """As `HistoryReader.fetch`."""
        return self._reader.fetch(start, end, bytes_max=bytes_max)

    def close(self) -> None:
        """Drops what the reader holds."""
        self._reader.close()


def _object_source(history: History, keys: TopicKeys, described: ObjectDescriptor) -> _Source:
    reader = HistoryReader(
        _Pinned(keys, described),
        history.objects,
        settings=ReaderSettings(
            chunk_bytes=history.config.storage.cloud_reader.fetch_chunk_size, skips_damage=False
        ),
        clock=history.clock,
        metrics=history.metrics,
    )
    return _Source(described.object_id, described.start, described.end, _ObjectFrames(reader))


# -- the object -----------------------------------------------------------------------------


class _Healer:
    """Makes objects for one wound."""

    def __init__(self, history: History, wound: Wound, sources: list[_Source]) -> None:
        self._wound = wound
        self._sources = sources
        self._topic = TopicName.parse(wound.topic)
        self._store = history.objects
        self._clock: Clock = history.clock
        self._settings = upload_settings(history.config.storage.uploader)
        self._chunk_bytes = history.config.storage.cloud_reader.fetch_chunk_size
        self._maker = ObjectMaker(
            self._topic,
            self._store,
            settings=self._settings,
            clock=history.clock,
            metrics=history.metrics,
            pending_tag=secrets.token_hex(4),
        )

    # -- in the place of another one --------------------------------------------------------

    def restore(self, old: ObjectDescriptor) -> Healed:
        """An object with exactly the offsets of another one."""
        if old.kept:
            return self._restore_kept(old)
        local = next((source for source in self._sources if source.name == _LOCAL), None)
        has_files = local is not None and local.start <= old.start and old.end <= local.end
        healed = self._restore_from_frames(old) if has_files else Healed()
        if healed.objects:
            return healed
        for source in self._sources:
            made = self._copy(source, old.start, old.end, old=old, allows_kept=False)
            if made is not None:
                return Healed(objects=(made,), sources=(source.name,))
        return healed if has_files else self._restore_from_frames(old)

    def _restore_kept(self, old: ObjectDescriptor) -> Healed:
        """The same bytes from elsewhere, or from the object itself if it has all of them."""
        for source in self._sources:
            made = self._copy(source, old.start, old.end, old=old, allows_kept=True)
            if made is not None:
                return Healed(objects=(made,), sources=(source.name,))
        return Healed(
            reason="messages were left out of it, and there is no copy of what was left",
            hint=KEPT_HINT,
        )

    def _restore_from_frames(self, old: ObjectDescriptor) -> Healed:
        try:
            made, used = self._make(old.start, old.end)
        except _NobodyHasError as error:
            return Healed(reason=f"offset {error.offset}: {error.reason}")
        except CorruptDataError as error:
            return Healed(reason=error.message)
        # What the owner itself has is the topic, whatever a descriptor said about it.
        is_the_owners = set(used) <= {_LOCAL, _BROKER}
        if not is_the_owners and (reason := self._differs(made, old)):
            self._discard(made.object_id)
            return Healed(reason=f"{', '.join(used)}: {reason}")
        return Healed(objects=(made,), sources=used)

    def _differs(self, made: ObjectDescriptor, old: ObjectDescriptor) -> str:
        """Why an object is not the one that another was, if that can be told."""
        if old.kept:
            # Another compaction of the same range may have left out less, or more.
            if (made.kept, made.messages) != (old.kept, old.messages):
                return "other messages were left out of it"
            is_same = old.checksum in (None, made.checksum)
            return "" if is_same else f"it has the checksum {made.checksum}, not {old.checksum}"
        name = parse_object_id(old.object_id)
        is_as_uploaded = name is not None and name.tag is None and old.format == FORMAT_FRAMES
        if made.format != FORMAT_FRAMES or not is_as_uploaded or old.checksum is None:
            return ""
        if made.checksum == old.checksum:
            return ""
        return f"what is there has the checksum {made.checksum}, and the object had {old.checksum}"

    # -- where there is none ----------------------------------------------------------------

    def fill(self) -> Healed:
        """Objects for a range that no descriptor has, one after the other."""
        wound = self._wound
        objects: list[ObjectDescriptor] = []
        used: dict[str, None] = {}
        lost: list[tuple[int, int]] = []
        reason = ""
        at = wound.start
        while at < wound.end if wound.end is not None else at <= wound.reach:
            try:
                made, sources = self._next(at)
            except _NobodyHasError as error:
                reason = error.reason
                begin = error.offset
                if begin > at:
                    made, sources = self._make(at, begin)
                    objects.append(made)
                    used |= dict.fromkeys(sources)
                following = [s.start for s in self._sources if s.start > begin]
                upto = min(following, default=wound.end or begin + 1)
                upto = upto if wound.end is None else min(upto, wound.end)
                lost.append((begin, upto))
                if wound.end is None:
                    break
                at = upto
                continue
            objects.append(made)
            used |= dict.fromkeys(sources)
            at = made.end
        return Healed(objects=tuple(objects), sources=tuple(used), lost=tuple(lost), reason=reason)

    def _next(self, at: int) -> tuple[ObjectDescriptor, tuple[str, ...]]:
        """The object that begins at an offset."""
        limit = self._wound.end if self._wound.end is not None else 1 << 63
        for source in self._sources:
            # First of all what compaction has made: from anybody else, messages that it has left
            # out would come back.
            name = parse_object_id(source.name)
            if name is None or name.tag is None or name.format != FORMAT_PARQUET:
                continue
            if made := self._copy_whole(source, at, limit, allows_kept=True):
                return made, (source.name,)
        for source in self._sources:
            if not source.start <= at < source.end:
                continue
            if source.name in (_LOCAL, _BROKER):
                with suppress(
                    CorruptDataError,
                    OffsetOutOfRangeError,
                    NotFoundError,
                    ConflictError,
                    FencedError,
                ):
                    return self._make(at, self._plan(source, at, limit))
            elif made := self._copy_whole(source, at, limit, allows_kept=False):
                return made, (source.name,)
        # A part of something, then: as far as the longest one goes, and not into the next one.
        ends = [s.end for s in self._sources if s.start <= at < s.end and s.name != _BROKER]
        starts = [s.start for s in self._sources if s.start > at]
        try:
            return self._make(at, min(max(ends, default=limit), limit, *starts))
        except _NobodyHasError:
            # One that messages were left out of says so: better than nothing.
            for source in self._sources:
                if made := self._copy_whole(source, at, limit, allows_kept=True):
                    return made, (source.name,)
            raise

    def _plan(self, source: _Source, at: int, limit: int) -> int:
        return source.frames.plan(
            at,
            min(limit, source.end),
            bytes_max=self._settings.object_bytes_max,
            span_ms_max=self._settings.object_span_ms_max,
        )

    def _copy_whole(
        self, source: _Source, at: int, limit: int, *, allows_kept: bool
    ) -> ObjectDescriptor | None:
        """A copy of an object that begins at an offset and ends within the wound."""
        if source.start != at or source.end > limit:
            return None
        return self._copy(source, at, source.end, old=None, allows_kept=allows_kept)

    # -- making -----------------------------------------------------------------------------

    def _make(self, start: int, end: int) -> tuple[ObjectDescriptor, tuple[str, ...]]:
        """An object of frames; and who had them."""
        patchwork = _Patchwork(self._sources)
        made = self._maker.make(
            patchwork,
            start,
            end,
            epoch=self._wound.epoch,
            incarnation=self._wound.incarnation,
            tag=secrets.token_hex(4),
        )
        self._verify(made)
        return made, tuple(patchwork.used)

    def _copy(
        self,
        source: _Source,
        start: int,
        end: int,
        *,
        old: ObjectDescriptor | None,
        allows_kept: bool,
    ) -> ObjectDescriptor | None:
        """A copy of another object with exactly these offsets; None if it is not a good one."""
        name = parse_object_id(source.name)
        itself = old if old is not None and source.name == old.object_id else None
        if name is None or (name.start, name.end) != (start, end):
            return None
        if itself is not None and (not itself.kept or itself.checksum is None):
            return None
        object_id = format_object_id(
            start, end, self._wound.epoch, format=name.format, tag=secrets.token_hex(4)
        )
        try:
            size_bytes = itself.size_bytes if itself is not None else None
            self._copy_bytes(source.name, object_id, size_bytes)
            # Of the copy: every byte of it is read and checked.
            made = describe_object(
                self._store,
                self._topic,
                object_id,
                replace(name, epoch=self._wound.epoch),
                incarnation=self._wound.incarnation,
                created_at=self._clock.now_ns() // 1_000_000_000,
            )
            reason = "messages were left out of it" if made.kept and not allows_kept else ""
            reason = reason or (self._differs(made, old) if old is not None else "")
        except (CorruptDataError, NotFoundError) as error:
            reason = error.message
        else:
            if not reason:
                return made if old is None else replace(made, arrival_time_max=old.arrived_ms)
        _log.info("not a good copy", extra={"object": source.name, "reason": reason})
        self._discard(object_id)
        return None

    def _copy_bytes(self, source_id: str, target_id: str, size_bytes: int | None) -> None:
        """Copies an object, or so much of it from its beginning."""
        source, target = (object_key(self._topic, item) for item in (source_id, target_id))
        if size_bytes is None:
            with suppress(UnsupportedOperationError):
                self._store.copy(source, target)
                return
        limit = 1 << 63 if size_bytes is None else size_bytes
        writer = self._store.open_writer(
            target,
            chunk_bytes=self._settings.chunk_bytes,
            concurrent_parts=self._settings.concurrent_parts,
        )
        try:
            position = 0
            while position < limit:
                size = min(self._settings.read_bytes, limit - position)
                chunk = self._store.read(source, position, size)
                if not chunk:
                    break
                writer.write(chunk)
                position += len(chunk)
            writer.close()
        finally:
            writer.abort()

    def _verify(self, made: ObjectDescriptor) -> None:
        """Reads an object back.

        Raises:
            CorruptDataError: It is not what was written.
        """
        key = object_key(self._topic, made.object_id)
        for finding in verify_object(
            self._store, key, made, chunk_bytes=self._chunk_bytes, topic=self._wound.topic
        ):
            self._discard(made.object_id)
            raise CorruptDataError(
                f"the new object is damaged: {finding.reason}",
                path=key,
                offset=finding.offset,
                position=finding.position,
            )

    def _discard(self, object_id: str) -> None:
        """Removes an object that this one has made, and that nobody else knows of."""
        try:
            self._store.delete(object_key(self._topic, object_id))
        except IsterError as error:
            _log.info("left over", extra={"object": object_id, "error": str(error)})
