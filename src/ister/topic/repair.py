"""Restores what one tier of a topic has lost from the other one.

First objects that are lost, damaged or missing are uploaded again, as far as local files have their
offsets. Then damaged local files are replaced, if the bucket is whole there: what it holds is
served from it, and what it does not is copied into a new file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ister.clock import Clock
from ister.errors import (
    CorruptDataError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.metrics import Metrics
from ister.model import TopicState
from ister.topic.bucket_link import TopicTier
from ister.topic.topic import Topic
from ister.wal.repair import rewrite_log


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
    topic: Topic,
    tier: TopicTier,
    *,
    content: bool,
    chunk_bytes: int,
    clock: Clock,
    metrics: Metrics,
    retire: Callable[[], None],
) -> Repaired:
    """Repairs both tiers of a topic that no other thread opens or ends meanwhile.

    Args:
        topic: The topic.
        tier: Its bucket side.
        content: Read everything, not only names and sizes of objects.
        chunk_bytes: How much of the local files to read at once.
        clock: The clock.
        metrics: Where reads are counted.
        retire: Closes the topic, after its local files were replaced.
    """
    found = tier.repair_objects(content=content)
    errors = list(found.errors)
    rewritten: int | None = None
    damage = _local_damage(topic, tier, content=content)
    if damage is not None and any(end > topic.local_start for _, end in found.bad):
        # Local files may hold the only copy of something: they stay as they are.
        errors.append(damage)
    elif damage is not None:
        try:
            with _retiring(topic, tier, retire):
                rewritten = rewrite_log(
                    topic.wal,
                    max(tier.owned.tiered, tier.owned.start),
                    chunk_bytes=chunk_bytes,
                    clock=clock,
                    metrics=metrics,
                )
        except (CorruptDataError, NotFoundError, OffsetOutOfRangeError) as error:
            errors.append(error)
    return Repaired(
        topic=topic.name,
        local_frames=rewritten,
        objects=tuple(found.objects),
        errors=tuple(errors),
    )


def _local_damage(topic: Topic, tier: TopicTier, *, content: bool) -> IsterError | None:
    if topic.state is TopicState.QUARANTINED:
        return topic.damage[0].as_error(topic.name)
    return tier.find_local_damage() if content else None


@contextmanager
def _retiring(topic: Topic, tier: TopicTier, retire: Callable[[], None]) -> Iterator[None]:
    """Syncs and abandons the local files, which are replaced meanwhile; closes the topic after."""
    topic.wal.hold(
        "repair",
        lambda: UnavailableError("the topic is being repaired", topic=topic.name),
        waits=False,
    )
    try:
        if topic.state is TopicState.OPEN:
            topic.flush()
        # From here on nothing of this log may touch the files.
        with tier.ended():
            topic.wal.abandon()
        yield
    finally:
        topic.wal.unhold("repair")
        retire()
