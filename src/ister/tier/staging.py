"""Staged rows that nobody finishes any more: which of them may go.

A staged file is needed while a batch that was begun and not finished names it in its manifest.
Anything else is a leftover once it is older than the grace period, which is longer than any job is
given between staging its first row and its commit.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from ister.clock import Clock
from ister.errors import NotFoundError
from ister.format.manifest import decode_manifest
from ister.format.records import decode_writer
from ister.limits import MANIFEST_BYTES_MAX
from ister.metadata.base import Delete, RevisionIs
from ister.objectstore.base import ObjectStore
from ister.tier.names import staging_prefix
from ister.tier.ownership import OwnedTopic

__all__ = ["JOB_PREFIX", "sweep_staging"]

JOB_PREFIX: Final = "job-"
"""What the names of writers begin with that write one batch: nobody asks for it again later."""


def sweep_staging(
    owned: OwnedTopic, objects: ObjectStore, *, grace_seconds: float, clock: Clock
) -> list[str]:
    """Removes old staged files that no unfinished batch needs, and forgets old jobs.

    Returns:
        The files' keys.

    Raises:
        FencedError: Somebody else owns the topic.
        UnavailableError: A store does not answer.
        CorruptDataError: A writer's record or manifest cannot be read; nothing is removed then.
    """
    keys = owned.catalog.keys
    now = clock.now_ns() / 1e9
    needed: set[str] = set()
    for found in owned.catalog.store.range(keys.writer("")):
        record = decode_writer(found.value, key=found.key)
        is_job = found.key.startswith(keys.writer(JOB_PREFIX))
        if is_job and now - record.updated_at > grace_seconds:
            # Done, or dead in the middle of its commit: nobody asks for it again.
            owned.transact([RevisionIs(found.key, found.revision)], [Delete(found.key)])
        elif not record.is_done:
            needed.add(record.manifest)
            with suppress(NotFoundError):
                data = objects.read(record.manifest, 0, MANIFEST_BYTES_MAX)
                needed.update(file.key for file in decode_manifest(data, key=record.manifest))
    removed: list[str] = []
    for info in list(objects.list(staging_prefix(keys.topic))):
        is_old = info.modified_at is not None and now - info.modified_at > grace_seconds
        if is_old and info.key not in needed:
            owned.check()
            objects.delete(info.key)
            removed.append(info.key)
    return removed
