"""Examines one stored object, read-only: a local file, or a key of a bucket.

Owns: finding it, and choosing between frames, Parquet and the runs of an express object. Does not
own: walking frames (`examine_files`), comparing an object with its descriptor (`object_check`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ister.bucket.check import ObjectFile, load_archives
from ister.bucket.names import (
    EXPRESS_PREFIX,
    TOPICS_PREFIX,
    ObjectName,
    parse_danube_id,
    parse_object_id,
    parse_topic_of_key,
)
from ister.errors import CorruptDataError, InvalidRequestError, NotFoundError
from ister.format.crc import crc32
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    FORMAT_FRAMES,
    FORMAT_PARQUET,
    ObjectDescriptor,
    is_express_name,
    parse_run_id,
)
from ister.format.express import FOOTER, decode_footer
from ister.format.footer import TRAILER_BYTES
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.frame_walk import Readable
from ister.format.message import decode_message
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.objectstore.base import ObjectStore
from ister.rescue.examine_files import FileSurvey, FrameLine, Listing, examine_frames

__all__ = [
    "ObjectFile",
    "ObjectSurvey",
    "examine_express",
    "examine_object",
    "offsets_of",
    "open_local",
    "open_named",
    "walk_archive",
]

if TYPE_CHECKING:
    from ister.format.archive import ArchiveReader, RowGroup

_PARQUET_MAGIC: Final = b"PAR1"
_SECONDS_MIN: Final = 10**9


@dataclass(slots=True, kw_only=True)
class ObjectSurvey(FileSurvey):
    """What an object holds, beside what its name promises.

    Of one in Parquet, `frames` counts the messages that are there, and a listed message has the
    position of its row group.
    """

    promised: ObjectName | None = None
    format: str = FORMAT_FRAMES
    kept: str = ""
    """Which messages of the range the object has; empty for all of them."""


def offsets_of(path: str) -> tuple[int, int] | None:
    """The range of offsets that the name of an object promises; None if it is not such a name."""
    name = _parse_path(path)
    return None if name is None else (name.start, name.end)


def open_local(path: str) -> File:
    """An object that is a local file; close it."""
    return LocalFileSystem().open_read(path)


def open_named(store: ObjectStore, key_or_name: str) -> ObjectFile:
    """An object of a log's bucket, by its key, or by its name if only one topic has such a one.

    Raises:
        NotFoundError: No topic has an object of this name.
        InvalidRequestError: Several have.
    """
    if is_express_name(key_or_name) or parse_run_id(key_or_name) is not None:
        key_or_name = EXPRESS_PREFIX + key_or_name
    is_key = key_or_name.startswith((TOPICS_PREFIX, EXPRESS_PREFIX))
    return ObjectFile(store, key_or_name if is_key else _find_key(store, key_or_name))


def _find_key(store: ObjectStore, name: str) -> str:
    """The key of the only object of that name, in whichever topic."""
    keys = [info.key for info in store.list(TOPICS_PREFIX) if info.key.endswith(f"/{name}")]
    if not keys:
        raise NotFoundError(
            f"no file and no object {name!r} found",
            path=store.location,
            hint="list the objects of a topic with `ister topics describe --json`",
        )
    if len(keys) > 1:
        raise InvalidRequestError(
            f"{len(keys)} topics have an object {name!r}",
            path=store.location,
            hint=f"give its key, one of: {', '.join(keys)}",
        )
    return keys[0]


def examine_object(file: Readable, listing: Listing) -> ObjectSurvey:
    """Examines an object in the format that its name says, or else its first bytes."""
    name = file.path.rpartition("/")[2]
    at = file.path.find(TOPICS_PREFIX)
    topic = str((parse_topic_of_key(file.path[at:]) if at >= 0 else None) or "")
    expected = _parse_path(file.path)
    entry = ObjectSurvey(name=name, path=file.path, topic=topic, promised=expected)
    is_parquet = (
        expected.format == FORMAT_PARQUET if expected else file.read_at(0, 4) == _PARQUET_MAGIC
    )
    if is_parquet:
        entry.format = FORMAT_PARQUET
        _examine_archive(file, entry, listing)
        return entry
    examine_frames(file, entry, expected, listing)
    if expected is not None and parse_danube_id(name) and _ends_elsewhere(entry, expected):
        entry.promised = None  # the number in the name is no offset: Danube 0.6.2 or later wrote it
        entry.damage.clear()
    return entry


def _examine_archive(file: Readable, entry: ObjectSurvey, listing: Listing) -> None:
    """Examines an object in Parquet, one row group at a time.

    A damaged row group is one bad range; without a footer, the whole file is.
    """
    expected, entry.bytes = entry.promised, file.size()
    if expected is not None:
        entry.first_offset, entry.next_offset = expected.start, expected.end
    try:
        archive: ArchiveReader = load_archives().ArchiveReader(
            file.read_at, entry.bytes, path=file.path
        )
    except CorruptDataError as error:
        entry.note(error.message, (0, entry.bytes), entry.first_offset, entry.next_offset)
        return
    entry.topic = entry.topic or archive.topic
    entry.codec, entry.kept = archive.codec, archive.kept
    entry.first_offset, entry.next_offset = archive.start, archive.end
    groups = archive.row_groups
    entry.publish_time_min = min(
        (one.publish_time_min for one in groups if one.publish_time_min is not None), default=None
    )
    entry.publish_time_max = max(
        (one.publish_time_max for one in groups if one.publish_time_max is not None), default=None
    )
    for number, group in enumerate(groups):
        try:
            _examine_group(archive, number, group.position, entry, listing)
        except CorruptDataError as error:
            positions = group.position, group.end_position
            entry.note(error.message, positions, group.first_offset, group.next_offset)
    if expected is not None and (archive.start, archive.end) != (expected.start, expected.end):
        reason = (
            f"the name says {expected.start} up to {expected.end}, "
            f"the footer {archive.start} up to {archive.end}"
        )
        entry.note(reason, (0, entry.bytes), expected.start, None)


def _examine_group(
    archive: ArchiveReader, number: int, position: int, entry: ObjectSurvey, listing: Listing
) -> None:
    frames = archive.restore(number)
    entry.frames += len(frames.offsets)
    ends = [*frames.starts[1:], len(frames.data)]
    for offset, start, end in zip(frames.offsets, frames.starts, ends, strict=True):
        if not listing.remaining:
            return
        if offset >= listing.start_offset:
            message = decode_message(frames.data[start + FRAME_HEADER_SIZE : end], archive.codec)
            listing.remaining -= 1
            entry.listed.append(
                FrameLine(
                    offset=offset,
                    position=position,
                    size=end - start,
                    publish_time=message.publish_time,
                    producer=message.producer_name,
                )
            )


def walk_archive(
    archive: ArchiveReader, file: Readable, on_damage: Callable[[RowGroup, CorruptDataError], None]
) -> int:
    """Reads every byte of an archive and decodes every row group; returns the checksum of all."""
    crc, position, size = 0, 0, file.size()
    for number, group in enumerate(archive.row_groups):
        crc = crc32(file.read_at(position, group.position - position), crc)
        fetched = archive.fetch(number)
        for piece in fetched.pieces:
            crc = crc32(piece, crc)
        position = group.end_position
        try:
            archive.decode(number, fetched)
        except CorruptDataError as error:
            on_damage(group, error)
    return crc32(file.read_at(position, size - position), crc)


def examine_express(file: Readable, listing: Listing) -> list[ObjectSurvey]:
    """Compares each run of an express object with what the footer promises.

    Raises:
        CorruptDataError: It is not an express object, or its footer is damaged.
    """
    size = file.size()
    tail = file.read_at(max(0, size - TRAILER_BYTES), TRAILER_BYTES)
    place = FOOTER.find(tail, size, path=file.path)
    _, runs = decode_footer(file.read_at(place.position, place.length), place, path=file.path)
    surveys: list[ObjectSurvey] = []
    for topic, run in runs:
        promised = ObjectName(start=run.start, end=run.end, epoch=run.epoch, format=FORMAT_EXPRESS)
        part = _Run(file, run)
        entry = ObjectSurvey(
            name=run.object_id.rpartition("/")[2],
            path=part.path,
            topic=str(topic),
            promised=promised,
            format=FORMAT_EXPRESS,
        )
        examine_frames(part, entry, promised, listing)
        surveys.append(entry)
    return surveys


class _Run:
    """A run of an express object as a file that can be read."""

    def __init__(self, file: Readable, run: ObjectDescriptor) -> None:
        place = parse_run_id(run.object_id)
        self._file = file
        self._position = 0 if place is None else place.position
        self._size = run.size_bytes
        self.path = f"{file.path}@{self._position}+{self._size}"

    def read_at(self, position: int, size: int) -> bytes:
        size = min(size, self._size - position)
        return self._file.read_at(self._position + position, size) if size > 0 else b""

    def size(self) -> int:
        return self._size


def _parse_path(path: str) -> ObjectName | None:
    """What the name of an object says, in the folder that it is in."""
    folder, _, name = path.rpartition("/")
    is_segment = folder.rpartition("/")[2] == "segments"
    return parse_object_id(f"segments/{name}" if is_segment else name) or parse_object_id(
        f"segments/{name}"
    )


def _ends_elsewhere(found: FileSurvey, expected: ObjectName) -> bool:
    """Whether whole frames begin where a name says and end elsewhere, at what may be a time."""
    return (
        expected.end - 1 >= _SECONDS_MIN
        and found.first_offset == expected.start
        and len(found.damage) == 1
        and found.damage[0].position == found.bytes == found.damage[0].end_position
    )
