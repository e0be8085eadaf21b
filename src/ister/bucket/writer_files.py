"""The staged files of a writer's batch: in its record, or in the manifest that the record names.

Owns: where the list is. Does not own: its format (`ister.format.manifest`), what becomes of the
files.
"""

from __future__ import annotations

from ister.format.manifest import StagedFile, decode_manifest
from ister.format.records import WriterRecord
from ister.limits import MANIFEST_BYTES_MAX
from ister.objectstore.base import ObjectStore


def read_files(objects: ObjectStore, record: WriterRecord) -> tuple[StagedFile, ...]:
    """Returns the staged files of a batch that is not done, in the order of its rows.

    Raises:
        NotFoundError: The manifest is lost.
        CorruptDataError: It is damaged.
        UnsupportedVersionError: A newer Ister wrote it.
        UnavailableError: The store does not answer.
    """
    if record.files is not None:
        return record.files
    data = objects.read(record.manifest, 0, MANIFEST_BYTES_MAX)
    return decode_manifest(data, key=record.manifest)
