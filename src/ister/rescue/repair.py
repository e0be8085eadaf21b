"""Restores what one tier of a topic has lost from the other one.

First objects that are lost, damaged or missing are uploaded again, as far as local files have their
offsets. Then damaged local files, and those of another topic, are replaced, if the bucket is whole
there: what it holds is served from it, and what it does not is copied into a new file. Frames that
both have are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

from ister.base.model import TopicState
from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvariantError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.frame import FrameBatch, NothingLeftError
from ister.rescue.local_log import judge_log, rewrite_log
from ister.topic.bucket_link import TopicBucket
from ister.topic.reconcile import divergence
from ister.topic.stores import Stores
from ister.topic.topic import Topic
from ister.wal.reader import WalReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair has done to one topic."""

    topic: str
    local_frames: int | None
    """Frames copied into a new local file; None if the local files were in order."""
    objects: tuple[str, ...]
    """Objects uploaded again."""
    errors: tuple[IsterError, ...]
    """What cannot be repaired."""

    @property
    def is_whole(self) -> bool:
        """Whether the topic is in order now."""
        return not self.errors


def repair_topic(
    topic: Topic, stores: Stores, *, content: bool, retire: Callable[[], None]
) -> Repaired:
    """Repairs both tiers of a topic that no other thread opens or ends meanwhile.

    Args:
        topic: The topic, which has a bucket.
        stores: The stores of its log.
        content: Read everything, not only names and sizes of objects.
        retire: Closes the topic, after its local files were replaced.
    """
    bucket = topic.bucket
    if bucket is None:
        raise InvariantError("a topic of a log with stores has a bucket", topic=topic.name)
    found = bucket.repair_objects(content=content)
    errors = list(found.errors)
    rewritten: int | None = None
    damage = _local_damage(topic, bucket, content=content)
    if damage is None and content:
        damage = _find_foreign(topic, bucket.owned.tiered, errors)
        if damage is None:
            errors += _compare(topic, stores)
    if damage is not None and any(end > topic.local_start for _, end in found.bad):
        # Local files may hold the only copy of something: they stay as they are.
        errors.append(damage)
    elif damage is not None:
        try:
            with held(topic), abandoned(topic, retire):
                rewritten = rewrite_log(
                    topic.wal,
                    max(bucket.owned.tiered, bucket.owned.start),
                    chunk_bytes=stores.storage.wal.stream_chunk_size,
                    clock=stores.clock,
                    metrics=stores.metrics,
                )
        except (CorruptDataError, NotFoundError, OffsetOutOfRangeError) as error:
            errors.append(error)
    return Repaired(
        topic=topic.name,
        local_frames=rewritten,
        objects=tuple(found.objects),
        errors=tuple(errors),
    )


def _local_damage(topic: Topic, bucket: TopicBucket, *, content: bool) -> IsterError | None:
    if topic.state is TopicState.QUARANTINED:
        return topic.damage[0].as_error(topic.name)
    return bucket.find_local_damage() if content else None


def _find_foreign(topic: Topic, tiered: int, errors: list[IsterError]) -> IsterError | None:
    """A local file of another topic, if the bucket has its offsets; else adds the error.

    Returns:
        The damage that is repaired by using the bucket's copy; None if there is none.
    """
    directory = topic.wal.directory
    found = judge_log(directory, topic.name).foreign if directory is not None else ()
    is_elsewhere = all(file.ranges[-1][1] <= tiered for file in found)
    for file in found:
        error = CorruptDataError(
            f"the local file is one of the topic {file.topic}",
            topic=topic.name,
            offset=file.ranges[0][0],
            path=file.path,
            hint="put the topic's own file in its place, or give its messages up with "
            "`ister repair --give-up`",
        )
        if is_elsewhere:
            return error
        errors.append(error)
    return None


def _compare(topic: Topic, stores: Stores) -> list[IsterError]:
    """Compares the frames that both tiers have; the error of the first that differs, if any."""
    bucket, wal = topic.bucket, topic.wal
    first = bucket.owned.catalog.first() if bucket is not None else None
    if bucket is None or first is None or wal.directory is None:
        return []
    start, end = max(wal.trimmed, first.start), min(bucket.owned.tiered, wal.synced)
    chunk_bytes = stores.storage.wal.stream_chunk_size
    files = WalReader(wal, chunk_bytes=chunk_bytes, metrics=stores.metrics, clock=stores.clock)
    with closing(stores.reader(bucket.owned.catalog)) as history, closing(files):
        while start < end:
            try:
                there = history.fetch(start, end, bytes_max=chunk_bytes)
                here = files.fetch(there.first_offset, there.next_offset, bytes_max=chunk_bytes)
            except NothingLeftError as nothing:
                start = nothing.next_offset
                continue
            except (CorruptDataError, NotFoundError, DataGapError, OffsetOutOfRangeError):
                break  # found before, and told, or trimmed meanwhile
            frames = zip(_frames(there), _frames(here), strict=False)
            for offset, (one, other) in enumerate(frames, there.first_offset):
                if one != other:
                    return [divergence(topic.name, offset, wal.directory.path)]
            start = min(there.next_offset, here.next_offset)
    return []


def _frames(batch: FrameBatch) -> Iterator[bytes]:
    for start, end in zip(batch.starts, [*batch.starts[1:], batch.end], strict=True):
        yield batch.chunk[start:end]


@contextmanager
def held(topic: Topic) -> Iterator[None]:
    """Refuses appends meanwhile; what was accepted before is synced."""
    topic.wal.gate.hold(
        "repair",
        lambda: UnavailableError("the topic is being repaired", topic=topic.name),
        waits=False,
    )
    try:
        if topic.state is TopicState.OPEN:
            topic.flush()
        yield
    finally:
        topic.wal.gate.unhold("repair")


@contextmanager
def abandoned(topic: Topic, retire: Callable[[], None]) -> Iterator[None]:
    """Abandons the local files, which are replaced meanwhile; closes the topic after."""
    try:
        # From here on nothing of this log may touch the files.
        with topic.bucket.ended() if topic.bucket is not None else nullcontext():
            topic.wal.abandon()
        yield
    finally:
        retire()
