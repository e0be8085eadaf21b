"""Examines an object in Parquet, one row group at a time, read-only.

A damaged row group is one bad range; without a footer, the whole file is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ister.bucket.names import ObjectName
from ister.errors import CorruptDataError
from ister.format.archive import ArchiveReader, RowGroup
from ister.format.descriptor import FORMAT_PARQUET
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import decode_message
from ister.fs.base import File
from ister.rescue.examine_files import BadRange, FileSurvey, FrameLine, Kind, Listing


@dataclass(slots=True, kw_only=True)
class ArchiveSurvey(FileSurvey):
    """What one object in Parquet holds. `frames` counts the messages that are there."""

    format: str = FORMAT_PARQUET
    kept: str = ""
    """Which messages of the range are there; empty for all of them."""


def survey_archive(
    file: File, *, name: str, topic: str, expected: ObjectName | None, listing: Listing
) -> ArchiveSurvey:
    """Examines the rows of an object in Parquet; like `ister.rescue.examine_files.survey_frames`.

    A listed message has the position of its row group, and the size of its frame.

    Raises:
        NotFoundError: There is no such object.
        UnsupportedVersionError: A newer Ister wrote it.
        IsterError: It cannot be read.
    """
    entry = ArchiveSurvey(name=name, path=file.path, topic=topic, bytes=file.size())
    if expected is not None:
        entry.first_offset, entry.next_offset = expected.start, expected.end
    try:
        archive = ArchiveReader(file.read_at, entry.bytes, path=file.path)
    except CorruptDataError as error:
        _note(entry, error.message, 0, entry.bytes, entry.first_offset, entry.next_offset)
        return entry
    entry.topic = entry.topic or archive.topic
    entry.codec, entry.kept = archive.codec, archive.kept
    entry.first_offset, entry.next_offset = archive.start, archive.end
    times = [group.publish_time_min for group in archive.row_groups]
    entry.publish_time_min = min((time for time in times if time is not None), default=None)
    times = [group.publish_time_max for group in archive.row_groups]
    entry.publish_time_max = max((time for time in times if time is not None), default=None)
    for number, group in enumerate(archive.row_groups):
        try:
            _survey_group(archive, number, group, entry, listing)
        except CorruptDataError as error:
            _note(
                entry,
                error.message,
                group.position,
                group.end_position,
                group.first_offset,
                group.next_offset,
            )
    if expected is not None and (archive.start, archive.end) != (expected.start, expected.end):
        reason = (
            f"the name says {expected.start} up to {expected.end}, "
            f"the footer {archive.start} up to {archive.end}"
        )
        _note(entry, reason, 0, entry.bytes, expected.start, None)
    return entry


def _survey_group(
    archive: ArchiveReader, number: int, group: RowGroup, entry: ArchiveSurvey, listing: Listing
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
                    position=group.position,
                    size=end - start,
                    publish_time=message.publish_time,
                    producer=message.producer_name,
                )
            )


def _note(  # noqa: PLR0917
    entry: ArchiveSurvey,
    reason: str,
    position: int,
    end_position: int,
    offset: int | None,
    end_offset: int | None,
) -> None:
    entry.damage.append(
        BadRange(
            position=position,
            end_position=end_position,
            offset=offset,
            end_offset=end_offset,
            reason=reason,
            kind=Kind.DAMAGE,
        )
    )
