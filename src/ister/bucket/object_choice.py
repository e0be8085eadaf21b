"""Which objects of a bucket make up a topic, by their names alone.

Owns: the choice. Does not own: whether objects are sound (`ister.rescue.rebuild`), names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from ister.bucket.names import ObjectName
from ister.format.descriptor import FORMAT_EXPRESS
from ister.format.offset_ranges import merge_ranges, overlaps


def choose_objects(
    names: Iterable[ObjectName], *, start: int | None = None, partial: Collection[ObjectName] = ()
) -> tuple[list[ObjectName], list[ObjectName], list[tuple[int, int]]]:
    """Which objects make up a topic, which do not, and where there are gaps.

    `start`: begin at this offset and stop at the first gap; by default, with the first object, over
    all gaps.
    `partial`: those that messages were left out of; taken only where nothing else has a range.
    """
    everything = sorted(
        names, key=lambda n: (n.start, n.end, n.epoch, n.tag or "", n.format, n.written_at or 0)
    )
    whole = _without_fenced([name for name in everything if name not in partial])
    needed = [name for name in everything if name in partial and not _tiles(whole, name)]
    by_start: dict[int, list[ObjectName]] = {}
    for name in _without_fenced([*whole, *needed]):
        by_start.setdefault(name.start, []).append(name)
    # How far a gapless history gets from each start, with how many offsets in partial objects, and
    # through which object.
    reach: dict[int, tuple[int, int, ObjectName]] = {}
    for begin in sorted(by_start, reverse=True):
        ways: list[tuple[int, int, ObjectName]] = []
        for name in by_start[begin]:
            far, thin, _ = reach.get(name.end, (name.end, 0, name))
            ways.append((far, thin + (name.end - begin if name in partial else 0), name))
        reach[begin] = max(
            ways,
            key=lambda way: (way[0], -way[1], way[2].end, way[2].tag or "", way[2].written_at or 0),
        )
    chosen: list[ObjectName] = []
    gaps: list[tuple[int, int]] = []
    starts = sorted(by_start)
    at = start if start is not None else (starts[0] if starts else 0)
    while True:
        while at in reach:
            chosen.append(reach[at][2])
            at = chosen[-1].end
        following = bisect_left(starts, at)
        if start is not None or following == len(starts):
            break
        gaps.append((at, starts[following]))
        at = starts[following]
    taken = set(chosen)
    return chosen, [name for name in everything if name not in taken], gaps


def _tiles(names: list[ObjectName], wanted: ObjectName) -> bool:
    """Whether some objects make up exactly the range of another one."""
    ends: dict[int, list[int]] = {}
    for name in names:
        if wanted.start <= name.start and name.end <= wanted.end:
            ends.setdefault(name.start, []).append(name.end)
    reached = {wanted.start}
    for begin in sorted(ends):
        if begin in reached:
            reached.update(ends[begin])
    return wanted.end in reached


def _without_fenced(names: list[ObjectName]) -> list[ObjectName]:
    """Leaves out objects that overlap one of a later epoch: their owner had been fenced.

    A merged object that is left out proves nothing about earlier epochs: it has messages of theirs.
    """
    kept: list[ObjectName] = []
    later: list[tuple[int, int]] = []  # what later epochs cover: disjoint, ascending
    for epoch in sorted({name.epoch for name in names}, reverse=True):
        group = [name for name in names if name.epoch == epoch]
        rest = {name for name in group if overlap(later, name)}
        kept += [name for name in group if name not in rest]
        later = merge_ranges(
            [*later, *ranges_of(n for n in group if not (n in rest and _is_merged(n)))]
        )
    return kept


def _is_merged(name: ObjectName) -> bool:
    return name.tag is not None and name.format != FORMAT_EXPRESS


def overlap(ranges: list[tuple[int, int]], name: ObjectName) -> bool:
    """Whether an object has an offset of some ranges."""
    return overlaps(ranges, name.start, name.end)


def ranges_of(names: Iterable[ObjectName]) -> list[tuple[int, int]]:
    """What objects cover: disjoint, ascending."""
    return merge_ranges((name.start, name.end) for name in names)
