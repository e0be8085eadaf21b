"""Examines an express object: each of its runs, as far as its footer can be read."""

from __future__ import annotations

from ister.bucket.names import ObjectName
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor, parse_run_id
from ister.format.express import FOOTER, decode_footer
from ister.format.footer import TRAILER_BYTES
from ister.fs.base import File
from ister.rescue.examine_files import Listing, survey_frames
from ister.rescue.examine_object import ObjectSurvey, ReadOnlyFile


def survey_express(file: File, listing: Listing) -> list[ObjectSurvey]:
    """Compares each run of an express object with what the footer promises.

    Raises:
        CorruptDataError: It is not an express object, or its footer is damaged.
        UnsupportedVersionError: A newer Ister wrote it.
        IsterError: It cannot be read.
    """
    size = file.size()
    tail = file.read_at(max(0, size - TRAILER_BYTES), TRAILER_BYTES)
    place = FOOTER.find(tail, size, path=file.path)
    _, runs = decode_footer(file.read_at(place.position, place.length), place, path=file.path)
    surveys: list[ObjectSurvey] = []
    for topic, run in runs:
        promised = ObjectName(start=run.start, end=run.end, epoch=run.epoch, format=FORMAT_EXPRESS)
        found = survey_frames(
            _RunFile(file, run),
            name=run.object_id.rpartition("/")[2],
            topic=str(topic),
            expected=promised,
            listing=listing,
        )
        surveys.append(ObjectSurvey(found, promised, FORMAT_EXPRESS, ""))
    return surveys


class _RunFile(ReadOnlyFile):
    """A run of an object as a file that can be read."""

    def __init__(self, file: File, run: ObjectDescriptor) -> None:
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
