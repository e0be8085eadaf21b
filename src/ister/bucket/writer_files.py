"""What the records of writers say: which staged files a batch has, which messages must not go.

The files are listed in the record, or in the manifest that the record names. Rows of a batch that
is not done are counted in the log, so that no job may remove one of them: `counted_from`.

Owns: what is read from a record. Does not own: its format (`ister.format.records`), what becomes of
the files, the batches (`ister.topic.batches`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ister.base.limits import MANIFEST_BYTES_MAX
from ister.bucket.catalog import Catalog
from ister.format.manifest import StagedFile, decode_manifest
from ister.format.records import WriterRecord, decode_writer
from ister.objectstore.base import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch of which rows may be in the topic, while its record does not say where."""

    writer: str
    batch: int
    counted_from: int
    """The offset from which on its rows are counted in the log."""


def find_open_batch(catalog: Catalog, incarnation: str) -> OpenBatch | None:
    """Returns the open batch that holds up most: messages from its offset on must not be removed.

    Read the descriptors of objects first. Later batches begin above all of those.
    """
    prefix = catalog.keys.writer("")
    found: OpenBatch | None = None
    for kept in catalog.store.range(prefix):
        record = decode_writer(kept.value, key=kept.key)
        if record.is_done or record.incarnation != incarnation:
            continue
        if found is None or record.end < found.counted_from:
            found = OpenBatch(
                writer=kept.key.removeprefix(prefix), batch=record.batch, counted_from=record.end
            )
    return found


def read_files(objects: ObjectStore, record: WriterRecord) -> tuple[StagedFile, ...]:
    """Returns the staged files of a batch that is not done, in the order of its rows.

    Raises:
        NotFoundError: The manifest is lost.
    """
    if record.files is not None:
        return record.files
    data = objects.read(record.manifest, 0, MANIFEST_BYTES_MAX)
    return decode_manifest(data, key=record.manifest)
