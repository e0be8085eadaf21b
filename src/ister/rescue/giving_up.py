"""Gives up the offsets of a topic that no tier has any more, so that it continues after them.

    local files ─► read all ┐
    objects ─► check all    ┴► lost offsets ─► recorded permanently ─► the topic opens

Owns: which offsets are lost, and the order of the steps. Does not own: the confirmation
(`ister.cli.repair`), what local files still have (`ister.rescue.local_log`).

Offsets are never used again: the log continues at or above every offset that any file, checkpoint,
object or cursor names.

Without a bucket, the record `wal.gaps` says which offsets are gone (commit point). With a bucket,
every lost or damaged object is replaced by one with the messages that are still readable, and gaps
between objects are filled by such objects. Then the messages that only local files have are
uploaded, with empty objects for those that the files have lost: the bucket has everything that is
left, and the local files are set aside. Files that were set aside earlier, such as an older copy
that was put back, are read for what lost objects had. Each object is a commit of its own and can be
repeated: a crash leaves fewer offsets to give up, never others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import NamedTuple

from ister.base import failpoints
from ister.base.model import Codec, TopicState
from ister.bucket.catalog import Catalog
from ister.bucket.check import load_archives, verify_content
from ister.bucket.claim import ClaimCheck
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.merge import Writer, write_object
from ister.bucket.names import format_object_id, object_key
from ister.bucket.ownership import OwnedTopic
from ister.errors import CorruptDataError, InvalidRequestError, NotFoundError
from ister.format.descriptor import FORMAT_PARQUET, KEPT_READABLE, ObjectDescriptor
from ister.format.frame import FrameBatch, NothingLeftError
from ister.format.offset_ranges import merge_ranges, missing_from
from ister.format.records import TopicRecord
from ister.rescue.local_log import NO_FILES, JudgedLog, give_up, judge_log
from ister.rescue.repair import abandoned, held
from ister.topic.reconcile import aside_path, set_aside
from ister.topic.stores import Stores, upload_settings
from ister.topic.topic import Topic
from ister.wal.directory import WalDirectory
from ister.wal.reader import WalReader
from ister.wal.snapshot import SnapshotSettings, WalSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What a topic has lost for good."""

    ranges: tuple[tuple[int, int], ...]
    """The first offset of each range, and the offset after its last one."""
    next_offset: int
    """Where the topic continues."""

    def __str__(self) -> str:
        """The offsets in words; empty if nothing is lost."""
        listed = ", ".join(
            f"{start} up to, not including, {end}"
            if start < end
            else f"from {start} on, if newer files had any"
            for start, end in self.ranges
        )
        return f"the offsets {listed}, and continues at {self.next_offset}" if listed else ""


def give_up_lost(
    topic: Topic, stores: Stores | None, *, at_least: int, is_dry: bool, retire: Callable[[], None]
) -> GivenUp:
    """Gives up what no tier has; `retire` closes the topic after its local files have changed.

    `topic`: the topic, which no other thread opens or ends meanwhile.
    `stores`: the stores of its log; None without a bucket.
    `at_least`: the topic continues at this offset or a later one.
    `is_dry`: only return what would be given up.

    Raises:
        UnavailableError: A store does not answer; what was given up so far is given up.
    """
    directory = topic.wal.directory
    if directory is None:
        raise InvalidRequestError("this log is in memory only", topic=topic.name)
    with held(topic):
        judged = judge_log(directory, topic.name)
        if stores is None or topic.bucket is None:
            return _give_up_local(topic, directory, judged, at_least, is_dry=is_dry, retire=retire)
        owned = topic.bucket.owned
        files = [_Files(directory, judged), *_set_aside_files(directory, topic.name, owned.record)]
        both = _BothTiers(files, owned.catalog, topic.codec, stores)
        return both.run(topic, owned, at_least, is_dry=is_dry, retire=retire)


def foresee_lost(
    catalog: Catalog, stores: Stores, seen: ClaimCheck, directory: WalDirectory, *, at_least: int
) -> GivenUp:
    """What `give_up_lost` would give up of a topic that only a take-over opens; changes nothing.

    `seen`: the check before that take-over.
    `directory`: the topic's.
    """
    known = seen.view.known
    codec = known.codec if known is not None else stores.storage.codec
    name = str(catalog.keys.topic)
    judged = judge_log(directory, name)
    older = _set_aside_files(directory, name, known)
    last = catalog.last()
    tiered = max(one.end for one in (*seen.found, last)) if last is not None else 0
    if not seen.is_current or judged.next_offset < tiered:
        # A take-over sets them aside.
        older = [*_older_files(directory, name, known), *older]
        judged = NO_FILES
    next_offset = max(judged.next_offset, at_least, tiered)
    both = _BothTiers([_Files(directory, judged), *older], catalog, codec, stores)
    lost = both.find_lost(tiered, next_offset)
    if tiered == next_offset:  # nothing tells where the newer files ended
        lost.append((next_offset, next_offset))
    return GivenUp(ranges=tuple(lost), next_offset=next_offset)


def _give_up_local(
    topic: Topic,
    directory: WalDirectory,
    judged: JudgedLog,
    at_least: int,
    *,
    is_dry: bool,
    retire: Callable[[], None],
) -> GivenUp:
    next_offset = max(judged.next_offset, topic.wal.next, at_least)
    known = merge_ranges(topic.wal.gaps)
    lost = [
        new for gap in judged.lost(judged.start, next_offset) for new in missing_from(known, *gap)
    ]
    if not is_dry and (lost or topic.state is TopicState.QUARANTINED):
        with abandoned(topic, retire):
            give_up(directory, judged, next_offset)
    return GivenUp(ranges=tuple(lost), next_offset=next_offset)


class _Files(NamedTuple):
    """Local files of a topic, and what they have."""

    directory: WalDirectory
    judged: JudgedLog


def _set_aside_files(
    directory: WalDirectory, topic: str, record: TopicRecord | None
) -> list[_Files]:
    """The files of a topic that were set aside, and still have messages of it."""
    fs = directory.fs
    paths = takewhile(fs.exists, (aside_path(directory.path, number) for number in count(1)))
    return [one for path in paths for one in _older_files(WalDirectory(fs, path), topic, record)]


def _older_files(directory: WalDirectory, topic: str, record: TopicRecord | None) -> list[_Files]:
    """An older copy of a topic's files, up to where a later owner continued; or nothing."""
    state = directory.load_state()
    if state is None or record is None or state.incarnation != record.incarnation:
        return []
    if state.epoch not in {entry.epoch for entry in record.lineage}:
        return []
    judged = judge_log(directory, topic)
    starts = [entry.start for entry in record.lineage if entry.epoch > state.epoch]
    end = min([judged.next_offset, *starts])
    whole = tuple((first, min(last, end)) for first, last in judged.whole if first < end)
    return [_Files(directory, replace(judged, whole=whole))]


class _BothTiers:
    """Gives up the lost offsets of a topic with a bucket."""

    def __init__(
        self, files: Sequence[_Files], catalog: Catalog, codec: Codec, stores: Stores
    ) -> None:
        """`files`: the topic's, and behind them older copies."""
        self._sources = files
        self._judged = files[0].judged
        self._catalog = catalog
        self._codec = codec
        self._stores = stores
        self._settings = upload_settings(stores.storage.uploader, stores.storage.cloud.layout)
        self._lost: list[tuple[int, int]] = []

    def find_lost(self, tiered: int, next_offset: int) -> list[tuple[int, int]]:
        """What would be given up, if the bucket has messages up to `tiered`."""
        self._replace_objects(None)
        return merge_ranges([*self._lost, *self._judged.lost(tiered, next_offset)])

    def run(
        self,
        topic: Topic,
        owned: OwnedTopic,
        at_least: int,
        *,
        is_dry: bool,
        retire: Callable[[], None],
    ) -> GivenUp:
        cursors = [
            one.progress.offset
            for one in owned.catalog.subscriptions()
            if one.progress.incarnation in ("", owned.record.incarnation)
        ]
        judged = self._judged
        end = max(judged.next_offset, topic.wal.next, owned.start, at_least, *cursors)
        if is_dry:
            return GivenUp(ranges=tuple(self.find_lost(owned.tiered, end)), next_offset=end)
        self._replace_objects(owned)
        # Everything below `tiered` is in the bucket, or was given up there.
        local_lost = judged.lost(owned.tiered, end)
        self._lost += local_lost
        if local_lost or topic.state is TopicState.QUARANTINED:
            with abandoned(topic, retire):
                self._upload_rest(owned, end)
                set_aside(
                    self._sources[0].directory,
                    "what it has is in the bucket, and what it lost was given up",
                    owned,
                    end,
                )
        return GivenUp(ranges=tuple(merge_ranges(self._lost)), next_offset=end)

    # -- objects ----------------------------------------------------------------------------

    def _replace_objects(self, owned: OwnedTopic | None) -> None:
        """Replaces objects that are lost or damaged, and fills gaps between them.

        Without `owned`, only counts what is lost.
        """
        first = self._catalog.first()
        at = first.start if first is not None else 0
        for described, revision in list(self._catalog.descriptors()):
            if described.start > at:
                made = self._salvage(at, described.start, None, owned)
                if made is not None and owned is not None:
                    owned.insert(made)
            at = described.end
            if self._is_whole(described):
                continue
            made = self._salvage(described.start, described.end, described, owned)
            if made is not None and owned is not None:
                owned.replace(described, made, revision)
                failpoints.reach("repair.after_commit")

    def _is_whole(self, described: ObjectDescriptor) -> bool:
        key = object_key(self._catalog.keys.topic, described.object_id)
        try:
            verify_content(
                self._stores.objects, key, described, chunk_bytes=self._settings.chunk_bytes
            )
        except (NotFoundError, CorruptDataError):
            return False
        return True

    def _salvage(
        self,
        start: int,
        end: int,
        described: ObjectDescriptor | None,
        owned: OwnedTopic | None,
    ) -> ObjectDescriptor | None:
        """Writes an object with what can be read of a range; counts the rest as lost.

        Returns None without `owned`.
        """
        frames = self._frames(start, end, described)
        if owned is None:
            for _ in frames:
                pass
            return None
        kept = described.kept if described is not None else ""
        return self._write(owned, start, end, frames, kept)

    def _frames(
        self, start: int, end: int, described: ObjectDescriptor | None
    ) -> Iterator[FrameBatch]:
        """The frames of a range that a tier still has, in order; counts the others as lost."""
        is_compacted = described is not None and bool(described.kept)
        # Not from local files, which may still have messages that compaction removed.
        sources = () if is_compacted else self._sources
        for part_start, part_end, source in _split(start, end, sources):
            if source is not None:
                yield from self._local_frames(source, part_start, part_end)
            elif described is not None:
                yield from self._object_frames(part_start, part_end)
            else:
                self._lost.append((part_start, part_end))

    def _local_frames(self, source: _Files, start: int, end: int) -> Iterator[FrameBatch]:
        with closing(self._open(source)) as files:
            while start < end:
                batch = files.fetch(start, end, bytes_max=self._settings.read_bytes)
                yield batch
                start = batch.next_offset

    def _object_frames(self, start: int, end: int) -> Iterator[FrameBatch]:
        history = HistoryReader(
            self._catalog,
            self._stores.objects,
            settings=ReaderSettings(chunk_bytes=self._settings.chunk_bytes, skips_damage=True),
            clock=self._stores.clock,
            metrics=self._stores.metrics,
        )
        with closing(history):
            while start < end:
                damaged, batch = history.damage_left_out, None
                try:
                    batch = history.fetch(start, end, bytes_max=self._settings.read_bytes)
                    found = batch.first_offset
                except NothingLeftError as nothing:
                    found = min(nothing.next_offset, end)
                except NotFoundError:
                    # Without even the topic's manifest, readers do not pass over the object.
                    self._lost.append((start, end))
                    return
                if history.damage_left_out > damaged:
                    self._lost.append((start, found))
                start = found
                if batch is not None:
                    yield batch
                    start = batch.next_offset

    # -- messages that only local files have ------------------------------------------------

    def _upload_rest(self, owned: OwnedTopic, next_offset: int) -> None:
        """Uploads what only local files have, and empty objects for what they have lost."""
        uploader = self._stores.uploader(owned, lambda: False)
        missing = self._judged.lost(owned.tiered, next_offset)
        with closing(self._open(self._sources[0])) as files:
            for start, end in _alternate(missing, owned.tiered, next_offset):
                if (start, end) in missing:
                    owned.commit(self._write(owned, start, end, iter(()), KEPT_READABLE))
                    failpoints.reach("repair.after_commit")
                    continue
                while owned.tiered < end:
                    uploader.upload(files, max(start, owned.tiered), end)

    def _open(self, source: _Files) -> WalReader:
        """A reader of the local files that were judged, in the order of their offsets."""
        judged = source.judged
        snapshot = WalSnapshot(
            settings=SnapshotSettings(str(self._catalog.keys.topic), self._codec),
            directory=source.directory,
            files=judged.files,
            synced=judged.next_offset,
            active_seq=-1,
            synced_position=0,
        )
        return WalReader(
            snapshot,
            chunk_bytes=self._settings.read_bytes,
            metrics=self._stores.metrics,
            clock=self._stores.clock,
        )

    def _write(
        self, owned: OwnedTopic, start: int, end: int, frames: Iterator[FrameBatch], kept: str
    ) -> ObjectDescriptor:
        """Writes a Parquet object that covers a range of offsets, with `frames` as its messages."""
        load_archives()  # raises an error that names the extra if it is missing
        from ister.format.archive_writer import ArchiveWriter  # noqa: PLC0415 - needs pyarrow, an extra

        topic = self._catalog.keys.topic

        def write(writer: Writer) -> Callable[..., ObjectDescriptor]:
            archive = ArchiveWriter(writer, topic=str(topic), codec=owned.record.codec)
            known = len(self._lost)
            for batch in frames:
                archive.write_frames(batch)
            has_lost = len(self._lost) > known
            written = archive.finish(
                start=start, end=end, kept=kept or (KEPT_READABLE if has_lost else "")
            )
            describe: Callable[..., ObjectDescriptor] = written.describe
            return describe

        described = write_object(
            topic,
            format_object_id(
                start, end, owned.epoch, format=FORMAT_PARQUET, tag=secrets.token_hex(4)
            ),
            write,
            store=self._stores.objects,
            settings=self._settings,
            epoch=owned.epoch,
            incarnation=owned.record.incarnation,
            created_at=self._stores.clock.now_ns() // 1_000_000_000,
        )
        failpoints.reach("repair.after_object")
        return described


def _split(
    start: int, end: int, sources: Sequence[_Files]
) -> Iterator[tuple[int, int, _Files | None]]:
    """Splits a range by the first of the sources that has a part; None if none has it."""
    if not sources:
        yield start, end, None
        return
    missing = sources[0].judged.lost(start, end)
    for part in _alternate(missing, start, end):
        if part in missing:
            yield from _split(*part, sources[1:])
        else:
            yield *part, sources[0]


def _alternate(parts: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Splits a range into `parts` and what is between them, ascending."""
    for part, part_end in parts:
        if start < part:
            yield start, part
        yield part, part_end
        start = part_end
    if start < end:
        yield start, end
