"""What a task of `tier` does: makes one object of a range of a topic's frames.

    owner's files on this machine ─┐
    the owner, by Flight ──────────┴─► frames ─► object ─► descriptor, for the driver to commit

Owns: where the frames come from. Does not own: the range, how an object is made
(`ister.bucket.object_maker`), the commit.

What a crash leaves: an object, or parts of one, that no descriptor names.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.egress import EgressLimit
from ister.bucket.object_maker import FrameSource, ObjectMaker
from ister.client.frames import BrokerFrames
from ister.errors import CorruptDataError
from ister.format.descriptor import ObjectDescriptor
from ister.spark.jobs.job_report import ErrorFields, error_as_fields
from ister.spark.location import LogLocation
from ister.spark.owners import connect
from ister.spark.workers import compile_for
from ister.topic.stores import upload_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadItem:
    """An object to make. Pickled."""

    topic: str
    start: int
    end: int
    size_bytes: int
    """Estimated."""
    epoch: int
    incarnation: str
    node: str
    """The node whose files have its frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeObject:
    """A complete object that is not committed yet. Pickled."""

    descriptor: ObjectDescriptor
    place: tuple[int, int] | None
    """Where its frames end: number of the local file, and byte in it."""
    damage: ErrorFields | None = None
    """Why it is shorter than planned."""


@lru_cache(maxsize=4)
def _egress(bytes_per_second: float) -> EgressLimit:
    """The upload limit of this worker process, which runs one task at a time."""
    return EgressLimit(bytes_per_second, clock=SystemClock())


def make_object(place: LogLocation, item: UploadItem, *, task_count: int = 1) -> MadeObject:
    """Makes one object. May run twice.

    `task_count` tasks run in parallel, and share `uploader.max_bytes_per_second`.

    Raises:
        CorruptDataError: Its first frame is damaged, or the object differs from what was written.
        UnavailableError: Neither this machine nor the topic's broker has the frames, or a store
            does not respond.
    """
    compile_for(item.size_bytes)
    history = place.history()
    settings = upload_settings(place.config.storage.uploader, place.config.storage.cloud.layout)
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
            # What comes before the damage is intact, and needs a second copy all the more.
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
def _frames_of(place: LogLocation, item: UploadItem) -> Iterator[FrameSource]:
    """Opens the owner's files, if they are on this machine, or asks the owner for them."""
    source: FrameSource | None = None
    local = place.local_tail(item.topic, item.node, item.incarnation)
    if local is not None:
        opened = local.source(chunk_bytes=place.config.storage.uploader.stream_chunk_size // 2)
        if opened is not None:
            files, snapshot = opened
            if snapshot.trimmed <= item.start and item.end <= snapshot.synced:
                source = files
            else:
                files.close()
    if source is None:
        client = connect(place, item.topic)
        source = BrokerFrames(client, item.topic, item.incarnation, item.epoch)
    try:
        yield source
    finally:
        source.close()
