"""Which neighbours among a topic's objects are worth merging: descriptors in, groups out.

    ▪▪▪▪▪▪ ■ ▪▪ ▪▪▪▪▪▪▪▪▪▪▪▪ ■ ▪▪▪▪▪▪▪▪  ▪▪▪▪▪
    └ one ┘    └──── one ───┘   └ one ┘  └ one, behind a hole

Owns: the choice. Does not own: reading, writing, committing. Does no I/O.

Invariants: a group is a run of objects that follow each other without a hole, of one codec, at most
`objects_max` of them and about `target_bytes` at most; no object is in two groups; groups ascend.

Runs of express objects are always worth it, few or many, large or small: they are in objects that
topics share, which Danube's tools do not read and which stay until all their runs are replaced.

Of the others, an object of half the target's size is large enough and left alone. One that is
several times as large as all the others of its group together is left out of it: rewriting it for
the sake of a few small ones would be done again and again as the topic grows. So a message is
rewritten a number of times that grows with the logarithm of the target's size, not with the number
of uploads.

Planning again and again comes to an end: every merge leaves fewer objects, and what is in the
wanted format is never rewritten alone. Where more tiny objects follow each other than one
transaction can replace, that takes a few rounds; the job does them all, so that a run right after
it finds nothing to do.

The size of an object in Parquet is that of its messages, as far as its row groups tell it: the file
is smaller, and how much smaller is not known before it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ister.base.limits import MIB
from ister.errors import check
from ister.format.descriptor import FORMAT_EXPRESS, FORMAT_FRAMES, FORMAT_PARQUET, ObjectDescriptor

OBJECTS_MAX: Final = 100
"""Objects of a group: their descriptors are replaced in one transaction."""

# The least bytes of messages in a row group of an archive, but for its last one.
_ROW_GROUP_BYTES: Final = 8 * MIB
# How much smaller Parquet often is than frames.
_COMPRESSION: Final = 4
# An object this many times as large as the rest of its group is not rewritten with it.
_DOMINANCE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Limits and format of merged objects."""

    format: str
    """`dnb1` or `parquet`. With `parquet`, objects of frames are rewritten even if there is
    nothing to merge them with, unless they are among the newest few."""
    target_bytes: int
    min_objects: int
    """Fewer neighbours than this are not worth it."""
    objects_max: int = OBJECTS_MAX


@dataclass(frozen=True, slots=True)
class MergeGroup:
    """Objects that are merged into one."""

    objects: tuple[ObjectDescriptor, ...]

    @property
    def start(self) -> int:
        """The first offset."""
        return self.objects[0].start

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.objects[-1].end

    @property
    def size_bytes(self) -> int:
        """The number of bytes to read."""
        return sum(described.size_bytes for described in self.objects)


def plan_compaction(
    descriptors: Sequence[ObjectDescriptor], settings: PlanSettings
) -> list[MergeGroup]:
    """The groups of objects to merge, ascending.

    `descriptors`: all of the topic's, ascending.
    """
    check(settings.format in (FORMAT_FRAMES, FORMAT_PARQUET), f"the format {settings.format!r}")
    check(
        settings.min_objects >= 1 and 1 < settings.objects_max <= OBJECTS_MAX,
        "a merge of at least one object, and of no more than a transaction can replace",
    )
    planner = _Planner(settings, newest=descriptors[-1] if descriptors else None)
    return [MergeGroup(tuple(group)) for run in _runs(descriptors) for group in planner.plan(run)]


def weigh(described: ObjectDescriptor, format: str) -> int:
    """About how many bytes an object's messages take in the target format.

    Of one in Parquet that stays so, this is the least that it can be; of one that becomes frames,
    what they are likely to take.
    """
    if described.format != FORMAT_PARQUET:
        return described.size_bytes
    if format == FORMAT_FRAMES and described.uncompressed_bytes is not None:
        return max(described.size_bytes, described.uncompressed_bytes)
    groups = len(described.offset_index)
    least = max(described.size_bytes, (groups - 1) * _ROW_GROUP_BYTES)
    if format == FORMAT_PARQUET:
        return least
    return max(least, min(described.size_bytes * _COMPRESSION, groups * _ROW_GROUP_BYTES))


def _runs(descriptors: Sequence[ObjectDescriptor]) -> Iterator[list[ObjectDescriptor]]:
    """Objects that follow each other and have the same codec.

    Objects that share offsets with a neighbour are skipped: `scrub` repairs them.
    """
    shared: set[int] = set()
    furthest = 0
    for number, described in enumerate(descriptors):
        if described.start < descriptors[furthest].end and number:
            shared |= {furthest, number}
        if described.end > descriptors[furthest].end:
            furthest = number
    run: list[ObjectDescriptor] = []
    for number, described in enumerate(descriptors):
        if run and (described.start != run[-1].end or described.codec != run[-1].codec):
            yield run
            run = []
        if number in shared or not described.completed:
            if run:
                yield run
                run = []
            continue
        run.append(described)
    if run:
        yield run


class _Planner:
    """Plans runs of one topic."""

    def __init__(self, settings: PlanSettings, *, newest: ObjectDescriptor | None) -> None:
        self._settings = settings
        self._newest = newest

    def plan(self, run: Sequence[ObjectDescriptor]) -> Iterator[list[ObjectDescriptor]]:
        """The groups within a run."""
        small: list[ObjectDescriptor] = []
        for described in run:
            if self._is_mergeable(described):
                small.append(described)
                continue
            yield from self._fill(small)
            small = []
            if self._is_foreign(described):
                yield [described]
        yield from self._fill(small)

    def _weigh(self, described: ObjectDescriptor) -> int:
        return weigh(described, self._settings.format)

    def _is_mergeable(self, described: ObjectDescriptor) -> bool:
        if described.kept and self._settings.format == FORMAT_FRAMES:
            return False  # frames have no holes
        return self._weigh(described) < self._settings.target_bytes // 2

    def _is_foreign(self, described: ObjectDescriptor) -> bool:
        """Whether an object has to be rewritten because it is not in the wanted format.

        Of objects of the topic, only towards Parquet: what is in Parquet is read as well, and
        takes less room.
        """
        if described.format == FORMAT_EXPRESS:
            return True
        return self._settings.format == FORMAT_PARQUET and described.format == FORMAT_FRAMES

    def _fill(self, small: Sequence[ObjectDescriptor]) -> Iterator[list[ObjectDescriptor]]:
        """Small neighbours, from left to right, into groups of about the target's size."""
        group: list[ObjectDescriptor] = []
        room = 0
        for described in small:
            weight = self._weigh(described)
            if group and (weight > room or len(group) == self._settings.objects_max):
                yield from self._choose(group)
                group = []
            if not group:
                room = self._settings.target_bytes
            group.append(described)
            room -= weight
        yield from self._choose(group)

    def _choose(self, group: list[ObjectDescriptor]) -> Iterator[list[ObjectDescriptor]]:
        """The group, or its parts around an object that dominates it, if a merge is worthwhile."""
        pending = [group] if group else []
        while pending:
            group = pending.pop()
            weights = [self._weigh(described) for described in group]
            largest = max(weights)
            if len(group) > 1 and largest > _DOMINANCE * (sum(weights) - largest):
                at = weights.index(largest)
                pending += [part for part in (group[at + 1 :], [group[at]], group[:at]) if part]
            elif self._is_worth_it(group):
                yield group

    def _is_worth_it(self, group: Sequence[ObjectDescriptor]) -> bool:
        if len(group) >= max(2, self._settings.min_objects):
            return True
        if not any(self._is_foreign(described) for described in group):
            return False
        if any(described.format == FORMAT_EXPRESS for described in group):
            return True
        # The newest few get neighbours soon; those in between never do.
        return self._settings.min_objects == 1 or group[-1] is not self._newest
