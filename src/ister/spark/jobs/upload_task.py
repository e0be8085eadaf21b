"""What a task of `tier` does: one object out of a range of a topic's frames.

    owner's files on this machine ─┐
    owner's broker, by Flight ─────┴─► frames ─► object ─► descriptor, for the driver to commit

Owns: where the frames come from when the task runs. Does not own: the range, how an object is made
(`ister.tier.object_maker`), whether it ever becomes part of its topic.

What a crash leaves: an object, or parts of one, that no descriptor names.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ister.client.frames import BrokerFrames
from ister.clock import SystemClock
from ister.errors import CorruptDataError, UnavailableError
from ister.format.descriptor import ObjectDescriptor
from ister.model import TopicName
from ister.spark.jobs.report import error_as_fields
from ister.spark.place import Place
from ister.spark.workers import compile_for
from ister.tier.egress import EgressLimit
from ister.tier.object_maker import FrameSource, ObjectMaker
from ister.topic.local_tail import LocalTail
from ister.topic.tiers import upload_settings

__all__ = ["MadeObject", "UploadItem", "find_files", "make_object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadItem:
    """An object to be made. Pickled."""

    topic: str
    start: int
    end: int
    size_bytes: int
    """About."""
    epoch: int
    incarnation: str
    node: str
    """Whose files have its frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeObject:
    """What a task has made: an object that is complete and belongs to nothing yet. Pickled."""

    descriptor: ObjectDescriptor
    place: tuple[int, int] | None
    """Where its frames end: the number of the local file, and the byte in it."""
    damage: Mapping[str, Any] | None = None
    """Why it ends before it should."""


@lru_cache(maxsize=4)
def _egress(bytes_per_second: float) -> EgressLimit:
    """The upload limit of this worker process, which runs one task at a time."""
    return EgressLimit(bytes_per_second, clock=SystemClock())


def make_object(place: Place, item: UploadItem, *, task_count: int = 1) -> MadeObject:
    """Makes one object. Harmless when done twice.

    Args:
        place: The log.
        item: The object.
        task_count: Number of tasks that run in parallel; they share
            `uploader.max_bytes_per_second`.

    Raises:
        CorruptDataError: Its first frame is damaged, or the object is not what was written.
        UnavailableError: Neither this machine nor the broker has the frames, or a store does not
            answer.
    """
    compile_for(item.size_bytes)
    history = place.history()
    settings = upload_settings(place.config.storage.uploader)
    rate = place.config.storage.uploader.max_bytes_per_second
    maker = ObjectMaker(
        TopicName.parse(item.topic),
        history.objects,
        settings=settings,
        clock=history.clock,
        metrics=history.metrics,
        pending_tag=secrets.token_hex(4),
        egress=None if rate is None else _egress(rate / task_count),
    )
    make = partial(maker.make, epoch=item.epoch, incarnation=item.incarnation)
    with _frames_of(place, item) as source:
        damage: CorruptDataError | None = None
        try:
            made = make(source, item.start, item.end)
        except CorruptDataError as error:
            if error.offset is None or not item.start < error.offset < item.end:
                raise
            # What lies before the damage is whole, and all the more worth a second copy.
            damage = error
            end = source.plan(
                item.start,
                error.offset,
                bytes_max=settings.object_bytes_max,
                span_ms_max=settings.object_span_ms_max,
            )
            made = make(source, item.start, end)
        return MadeObject(
            descriptor=made,
            place=getattr(source, "place", None),
            damage=None if damage is None else error_as_fields(damage),
        )


@contextmanager
def _frames_of(place: Place, item: UploadItem) -> Iterator[FrameSource]:
    """The owner's files, if they are on this machine, or the owner itself."""
    source: FrameSource | None = None
    local = find_files(place, item.topic, item.node, item.incarnation)
    if local is not None:
        opened = local.source(chunk_bytes=place.config.storage.uploader.stream_chunk_size // 2)
        if opened is not None:
            files, snapshot = opened
            if snapshot.trimmed <= item.start and item.end <= snapshot.synced:
                source = files
            else:
                files.close()
    if source is None:
        client = place.flight()
        if client is None:
            raise UnavailableError(
                "the topic's files are not on this machine, or do not have the offsets",
                topic=item.topic,
                offset=item.start,
                hint="give the address of the topic's broker to serve them",
            )
        source = BrokerFrames(client, item.topic, item.incarnation, item.epoch)
    try:
        yield source
    finally:
        source.close()


def find_files(place: Place, topic: str, node: str, incarnation: str) -> LocalTail | None:
    """A topic's local files, if they are on this machine; as `LocalTail.find`."""
    history = place.history()
    return LocalTail.find(
        place.config.storage.wal.dir,
        TopicName.parse(topic),
        node,
        incarnation,
        clock=history.clock,
        metrics=history.metrics,
    )
