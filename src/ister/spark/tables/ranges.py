"""Ranges of offsets, and which of them a table has.

    {"version": 1, "topics": {"/default/a": {"<incarnation>": {"epoch": 2, "ranges": [[0, 90]]}}}}

Owns: the algebra of half-open ranges, and the record that a table keeps in its own commits. Does
not own: where a table keeps it.

Invariant: ranges ascend, do not touch each other, and none is empty. An offset is added to a table
once: adding it again is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from ister.errors import ConflictError, CorruptDataError, UnsupportedVersionError

__all__ = [
    "ANY_INCARNATION",
    "Coverage",
    "Covered",
    "Ranges",
    "count",
    "intersect",
    "normalise",
    "ranges_of_offsets",
    "subtract",
    "union",
]

Ranges: TypeAlias = tuple[tuple[int, int], ...]

_VERSION: Final = 1

ANY_INCARNATION: Final = "*"
"""Ranges of a topic whose incarnation is not known any more: they count for each."""


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same offsets as ranges that ascend and do not touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def union(one: Ranges, other: Ranges) -> Ranges:
    """The offsets in either."""
    return normalise((*one, *other))


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """The offsets in both."""
    found: list[tuple[int, int]] = []
    at = 0
    for start, end in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        beyond = at
        while beyond < len(other) and other[beyond][0] < end:
            found.append((max(start, other[beyond][0]), min(end, other[beyond][1])))
            beyond += 1
    return tuple(found)


def subtract(one: Ranges, other: Ranges) -> Ranges:
    """The offsets in `one` that are not in `other`."""
    found: list[tuple[int, int]] = []
    for start, end in one:
        at = start
        for gone_start, gone_end in intersect(((start, end),), other):
            if at < gone_start:
                found.append((at, gone_start))
            at = gone_end
        if at < end:
            found.append((at, end))
    return tuple(found)


def count(ranges: Ranges) -> int:
    """How many offsets."""
    return sum(end - start for start, end in ranges)


def ranges_of_offsets(offsets: Iterable[int]) -> Ranges:
    """Single offsets as ranges."""
    found: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if found and offset <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], offset + 1))
        else:
            found.append((offset, offset + 1))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Covered:
    """What a table has of one topic."""

    epoch: int
    """The newest of the topic's lineage when the last of it came."""
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a table has of all topics: by name, then by incarnation."""

    topics: Mapping[str, Mapping[str, Covered]] = field(default_factory=dict)

    def of(self, topic: str, incarnation: str) -> Ranges:
        """The ranges of one topic that the table has."""
        known = self.topics.get(topic, {})
        ranges: Ranges = ()
        for name in (incarnation, ANY_INCARNATION):
            if name in known:
                ranges = union(ranges, known[name].ranges)
        return ranges

    def epoch_of(self, topic: str, incarnation: str) -> int | None:
        """The epoch of what the table has of one topic; None if it has nothing."""
        found = self.topics.get(topic, {}).get(incarnation)
        return None if found is None else found.epoch

    def other_incarnations(self, topic: str, incarnation: str) -> list[str]:
        """Topics of the same name, deleted since, that the table has rows of."""
        known = self.topics.get(topic, {})
        return [name for name in known if name not in (incarnation, ANY_INCARNATION)]

    def add(self, topic: str, incarnation: str, epoch: int, ranges: Ranges) -> Coverage:
        """What the table has once these ranges are in it.

        Raises:
            ConflictError: It has some of them already.
        """
        before = self.of(topic, incarnation)
        twice = intersect(before, ranges)
        if twice:
            raise ConflictError(
                f"the table has offsets of {topic} already: {_show(twice)}",
                topic=topic,
                offset=twice[0][0],
                hint="another export was faster; run it again, which adds what is missing",
            )
        known = dict(self.topics.get(topic, {}))
        own = known.get(incarnation, Covered(0, ())).ranges
        known[incarnation] = Covered(epoch, union(own, ranges))
        return Coverage({**self.topics, topic: known})

    def to_json(self) -> str:
        """The record of all topics."""
        topics = {topic: _to_fields(known) for topic, known in sorted(self.topics.items())}
        return json.dumps({"version": _VERSION, "topics": topics}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, *, path: str) -> Self:
        """Reads the record of all topics.

        Raises:
            UnsupportedVersionError: A newer Ister wrote it.
            CorruptDataError: It is none.
        """
        fields = _load(text, path)
        try:
            return cls({str(t): _from_fields(known) for t, known in fields["topics"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(error, path) from error

    def topic_to_json(self, topic: str) -> str:
        """The record of one topic, for tables that keep one for each."""
        fields = {"version": _VERSION, "incarnations": _to_fields(self.topics[topic])}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_topics(cls, texts: Mapping[str, str], *, path: str) -> Self:
        """Reads the records of single topics, by their names.

        Raises:
            UnsupportedVersionError: A newer Ister wrote one.
            CorruptDataError: One is none.
        """
        topics: dict[str, dict[str, Covered]] = {}
        for topic, text in texts.items():
            fields = _load(text, path)
            try:
                topics[topic] = _from_fields(fields["incarnations"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _corrupt(error, path) from error
        return cls(topics)


def _to_fields(known: Mapping[str, Covered]) -> dict[str, Any]:
    return {
        name: {"epoch": found.epoch, "ranges": [list(item) for item in found.ranges]}
        for name, found in sorted(known.items())
    }


def _from_fields(fields: Mapping[str, Any]) -> dict[str, Covered]:
    return {
        str(name): Covered(
            int(found["epoch"]), normalise((int(a), int(b)) for a, b in found["ranges"])
        )
        for name, found in fields.items()
    }


def _load(text: str | bytes, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
        version = int(fields["version"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt(error, path) from error
    if version != _VERSION:
        raise UnsupportedVersionError(
            f"the table's offsets have the version {version}, and this Ister knows {_VERSION}",
            path=path,
            hint="export with the Ister that wrote it, or with a newer one",
        )
    return dict(fields)


def _corrupt(error: Exception, path: str) -> CorruptDataError:
    return CorruptDataError(
        f"what the table says about its offsets makes no sense: {error!r}",
        path=path,
        hint="somebody changed it; export into another table",
    )


def _show(ranges: Ranges) -> str:
    shown = ", ".join(f"{start} up to {end}" for start, end in ranges[:3])
    return shown + (" …" if len(ranges) > 3 else "")
