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
left, and the local files are set aside. Each object is a commit of its own and can be repeated: a
crash leaves fewer offsets to give up, never others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from ister.base import failpoints
from ister.base.model import TopicState
from ister.bucket.check import load_archives, verify_content
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.merge import Writer, write_object
from ister.bucket.names import format_object_id, object_key
from ister.bucket.ownership import OwnedTopic
from ister.errors import CorruptDataError, InvalidRequestError, NotFoundError
from ister.format.descriptor import FORMAT_PARQUET, KEPT_READABLE, ObjectDescriptor
from ister.format.frame import FrameBatch, NothingLeftError
from ister.format.offset_ranges import merge_ranges, missing_from
from ister.rescue.local_log import JudgedLog, give_up, judge_log
from ister.rescue.repair import abandoned, held
from ister.topic.reconcile import set_aside
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
        both = _BothTiers(topic, judged, topic.bucket.owned, stores, at_least)
        return both.run(directory, is_dry=is_dry, retire=retire)


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


class _BothTiers:
    """Gives up the lost offsets of a topic with a bucket."""

    def __init__(
        self, topic: Topic, judged: JudgedLog, owned: OwnedTopic, stores: Stores, at_least: int
    ) -> None:
        self._topic = topic
        self._judged = judged
        self._owned = owned
        self._stores = stores
        self._settings = upload_settings(stores.storage.uploader, stores.storage.cloud.layout)
        cursors = [
            one.progress.offset
            for one in owned.catalog.subscriptions()
            if one.progress.incarnation in ("", owned.record.incarnation)
        ]
        self._next = max(judged.next_offset, topic.wal.next, owned.start, at_least, *cursors)
        self._lost: list[tuple[int, int]] = []

    def run(self, directory: WalDirectory, *, is_dry: bool, retire: Callable[[], None]) -> GivenUp:
        self._replace_objects(is_dry=is_dry)
        # Everything below this is in the bucket, or was given up there.
        start = self._owned.tiered
        local_lost = self._judged.lost(start, self._next)
        self._lost += local_lost
        if not is_dry and (local_lost or self._topic.state is TopicState.QUARANTINED):
            with abandoned(self._topic, retire):
                self._upload_rest()
                set_aside(
                    directory,
                    "what it has is in the bucket, and what it lost was given up",
                    self._owned,
                    self._next,
                )
        return GivenUp(ranges=tuple(merge_ranges(self._lost)), next_offset=self._next)

    # -- objects ----------------------------------------------------------------------------

    def _replace_objects(self, *, is_dry: bool) -> None:
        """Replaces objects that are lost or damaged, and fills gaps between them."""
        owned = self._owned
        first = owned.catalog.first()
        at = first.start if first is not None else 0
        for described, revision in list(owned.catalog.descriptors()):
            if described.start > at:
                made = self._salvage(at, described.start, None, is_dry=is_dry)
                if made is not None:
                    owned.insert(made)
            at = described.end
            if self._is_whole(described):
                continue
            made = self._salvage(described.start, described.end, described, is_dry=is_dry)
            if made is not None:
                owned.replace(described, made, revision)
                failpoints.reach("repair.after_commit")

    def _is_whole(self, described: ObjectDescriptor) -> bool:
        key = object_key(self._owned.catalog.keys.topic, described.object_id)
        try:
            verify_content(
                self._stores.objects, key, described, chunk_bytes=self._settings.chunk_bytes
            )
        except (NotFoundError, CorruptDataError):
            return False
        return True

    def _salvage(
        self, start: int, end: int, described: ObjectDescriptor | None, *, is_dry: bool
    ) -> ObjectDescriptor | None:
        """Writes an object with what can be read of a range; counts the rest as lost.

        Returns None in a dry run.
        """
        frames = self._frames(start, end, described)
        if is_dry:
            for _ in frames:
                pass
            return None
        return self._write(start, end, frames, described.kept if described is not None else "")

    def _frames(
        self, start: int, end: int, described: ObjectDescriptor | None
    ) -> Iterator[FrameBatch]:
        """The frames of a range that a tier still has, in order; counts the others as lost."""
        is_compacted = described is not None and bool(described.kept)
        # Not from local files, which may still have messages that compaction removed.
        missing = [(start, end)] if is_compacted else self._judged.lost(start, end)
        for part in _alternate(missing, start, end):
            if part not in missing:
                yield from self._local_frames(*part)
            elif described is not None:
                yield from self._object_frames(*part)
            else:
                self._lost.append(part)

    def _local_frames(self, start: int, end: int) -> Iterator[FrameBatch]:
        with closing(self._files()) as files:
            while start < end:
                batch = files.fetch(start, end, bytes_max=self._settings.read_bytes)
                yield batch
                start = batch.next_offset

    def _object_frames(self, start: int, end: int) -> Iterator[FrameBatch]:
        history = HistoryReader(
            self._owned.catalog,
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

    def _upload_rest(self) -> None:
        """Uploads what only local files have, and empty objects for what they have lost."""
        owned, uploader = self._owned, self._stores.uploader(self._owned, lambda: False)
        missing = self._judged.lost(owned.tiered, self._next)
        with closing(self._files()) as files:
            for start, end in _alternate(missing, owned.tiered, self._next):
                if (start, end) in missing:
                    owned.commit(self._write(start, end, iter(()), KEPT_READABLE))
                    failpoints.reach("repair.after_commit")
                    continue
                while owned.tiered < end:
                    uploader.upload(files, max(start, owned.tiered), end)

    def _files(self) -> WalReader:
        """A reader of the local files that were judged, in the order of their offsets."""
        wal, judged = self._topic.wal, self._judged
        snapshot = WalSnapshot(
            settings=SnapshotSettings(self._topic.name, self._topic.codec),
            directory=wal.directory,
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
        self, start: int, end: int, frames: Iterator[FrameBatch], kept: str
    ) -> ObjectDescriptor:
        """Writes a Parquet object that covers a range of offsets, with `frames` as its messages."""
        load_archives()  # raises an error that names the extra if it is missing
        from ister.format.archive_writer import ArchiveWriter  # noqa: PLC0415 - needs pyarrow, an extra

        owned, topic = self._owned, self._owned.catalog.keys.topic

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


def _alternate(parts: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Splits a range into `parts` and what is between them, ascending."""
    for part, part_end in parts:
        if start < part:
            yield start, part
        yield part, part_end
        start = part_end
    if start < end:
        yield start, end
