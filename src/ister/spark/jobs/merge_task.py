"""What a task of `compact` does: one new object out of several adjacent ones.

Owns: how the merge is called. Does not own: which objects go together, the merging itself
(`ister.bucket.merge`), whether the new object ever becomes part of its topic.

What a crash leaves: an object that no descriptor names.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ister.base.model import Layout, TopicName
from ister.bucket.merge import merge_objects
from ister.bucket.names import object_key
from ister.errors import IsterError
from ister.format.descriptor import ObjectDescriptor
from ister.spark.location import LogLocation
from ister.spark.workers import compile_for

if TYPE_CHECKING:
    from ister.spark.jobs.latest_per_key import Latest


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeItem:
    """Objects that become one. Pickled to a task."""

    number: int
    topic: str
    epoch: int
    incarnation: str
    objects: tuple[ObjectDescriptor, ...]
    latest: Latest | None
    """What stays; None for everything."""

    @property
    def size_bytes(self) -> int:
        """How much is read."""
        return sum(described.size_bytes for described in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergeSettings:
    """How merged objects are read and written: as uploads are."""

    chunk_bytes: int
    concurrent_parts: int
    index_every_messages: int
    layout: Layout


def merge(place: LogLocation, format: str, zstd_level: int, item: MergeItem) -> ObjectDescriptor:
    """Makes one object of several; no descriptor names it yet.

    Raises:
        CorruptDataError: An object is damaged, or was changed since it was searched.
        NotFoundError: An object is gone.
        UnavailableError: The store does not respond.
    """
    compile_for(item.size_bytes)
    history = place.history()
    uploader = place.config.storage.uploader
    topic = TopicName.parse(item.topic)
    survives = None
    if item.latest is not None:
        from ister.spark.jobs.latest_per_key import LatestOffsets  # noqa: PLC0415 - numpy

        survives = LatestOffsets(history.objects, item.latest)
    made = merge_objects(
        topic,
        item.objects,
        store=history.objects,
        settings=_MergeSettings(
            chunk_bytes=uploader.stream_chunk_size,
            concurrent_parts=uploader.concurrent_parts,
            index_every_messages=uploader.index_every_messages,
            layout=place.config.storage.cloud.layout,
        ),
        format=format,
        epoch=item.epoch,
        incarnation=item.incarnation,
        # Unique to the attempt: one that Spark has given up on may still be writing.
        tag=secrets.token_hex(4),
        # As old as the newest part: merging does not make messages younger for retention.
        created_at=max(described.created_at for described in item.objects),
        survives=survives,
        zstd_level=zstd_level,
    )
    if survives is not None:
        try:
            survives.check(made)
        except IsterError:
            history.objects.delete(object_key(topic, made.object_id))
            raise
    return made
