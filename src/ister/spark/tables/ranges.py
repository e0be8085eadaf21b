"""Ranges of offsets, and which of them a table has.

    {"version": 1, "topics": {"/default/a": {"<incarnation>": {"epoch": 2, "ranges": [[0, 90]]}}},
     "row": ["/default/a", 80]}

Owns: the record that a table keeps in its own commits, of half-open ranges. Does not own: where a
table keeps it; how ranges are merged (`format.offset_ranges`).

Invariant: ranges ascend, do not touch each other, and none is empty. An offset is added to a table
once: adding it again is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias, TypeVar

import msgspec

from ister.base.structs import known
from ister.errors import ConflictError, CorruptDataError, UnsupportedVersionError
from ister.format.offset_ranges import merge_ranges, missing_from

Ranges: TypeAlias = tuple[tuple[int, int], ...]

_VERSION: Final = 1
_SHOWN: Final = 3


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the same offsets as ranges that ascend and do not touch."""
    return tuple(merge_ranges((start, end) for start, end in ranges if start < end))


def subtract(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets in `one` that are not in `other`."""
    return tuple(left for start, end in one for left in missing_from(other, start, end))


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets in both."""
    return subtract(one, subtract(one, other))


def count(ranges: Ranges) -> int:
    """Returns the number of offsets."""
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Covered:
    """What a table has of one topic."""

    epoch: int
    """The newest epoch of the topic's lineage when the last range was added."""
    ranges: Ranges

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", normalise(self.ranges))


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a table has of all topics: by name, then by incarnation."""

    topics: Mapping[str, Mapping[str, Covered]] = field(default_factory=dict)
    row: tuple[str, int] | None = None
    """The topic and offset of a row that the newest commit with rows has added. If the table's
    history is lost, a table that has this row has the others, too."""
    before: Coverage | None = field(default=None, compare=False)
    """What the table had before it was rolled back, if it was, and nothing was added since."""

    def of(self, topic: str, incarnation: str) -> Ranges:
        """Returns the ranges of one topic that the table has."""
        found = self.topics.get(topic, {}).get(incarnation)
        return () if found is None else found.ranges

    def shown(self) -> str:
        """Formats the ranges of all topics for people; long lists are cut."""
        found = [
            f"{topic} {show(covered.ranges)}"
            for topic, known in self.topics.items()
            for covered in known.values()
        ]
        return ", ".join(found[:_SHOWN]) + (" …" if len(found) > _SHOWN else "")

    def undone(self, topic: str, incarnation: str) -> Ranges:
        """Returns the ranges of one topic that the table had before it was rolled back."""
        if self.before is None:
            return ()
        return subtract(self.before.of(topic, incarnation), self.of(topic, incarnation))

    def epoch_of(self, topic: str, incarnation: str) -> int | None:
        """Returns the epoch of the table's rows of one topic; None if it has none."""
        found = self.topics.get(topic, {}).get(incarnation)
        return None if found is None else found.epoch

    def other_incarnations(self, topic: str, incarnation: str) -> list[str]:
        """Returns deleted topics of the same name of which the table has rows."""
        known = self.topics.get(topic, {})
        return [name for name in known if name != incarnation]

    def add_all(self, items: Iterable[tuple[str, str, int, Ranges]]) -> Coverage:
        """Returns the coverage with ranges added: topic, incarnation, epoch and ranges of each.

        Raises:
            ConflictError: It has some of them already; names the topic.
        """
        topics = dict(self.topics)
        for topic, incarnation, epoch, ranges in items:
            twice = intersect(Coverage(topics).of(topic, incarnation), ranges)
            if twice:
                raise ConflictError(
                    f"the table has offsets of {topic} already: {show(twice)}",
                    topic=topic,
                    offset=twice[0][0],
                    hint="another export was faster; run it again to add what is missing",
                )
            known = dict(topics.get(topic, {}))
            own = known.get(incarnation, Covered(0, ())).ranges
            known[incarnation] = Covered(epoch, (*own, *ranges))
            topics[topic] = known
        return Coverage(topics, self.row)

    def to_json(self) -> str:
        """Encodes the record of all topics."""
        return _encode(_TableRecord(version=_VERSION, topics=self.topics, row=self.row))

    @classmethod
    def from_json(cls, text: str | bytes, *, path: str) -> Self:
        """Decodes the record of all topics."""
        record = _decode(text, _TableRecord, path)
        return cls(record.topics, record.row)

    def topic_to_json(self, topic: str) -> str:
        """Encodes the record of one topic, for tables that keep one for each."""
        return _encode(_TopicRecord(version=_VERSION, incarnations=self.topics[topic]))

    @classmethod
    def from_topics(
        cls, texts: Mapping[str, str], *, row: tuple[str, int] | None = None, path: str
    ) -> Self:
        """Decodes the records of single topics, by their names."""
        return cls(
            {
                topic: _decode(text, _TopicRecord, path).incarnations
                for topic, text in texts.items()
            },
            row,
        )


@dataclass(frozen=True, slots=True)
class _Version:
    version: int


@dataclass(frozen=True, slots=True)
class _TableRecord(_Version):
    topics: Mapping[str, Mapping[str, Covered]]
    row: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class _TopicRecord(_Version):
    incarnations: Mapping[str, Covered]


_Record = TypeVar("_Record", _TableRecord, _TopicRecord)


def _encode(record: _Version) -> str:
    # Deterministic: topics and incarnations are sorted.
    return msgspec.json.encode(record, order="deterministic").decode()


def _decode(text: str | bytes, kind: type[_Record], path: str) -> _Record:
    try:
        version = msgspec.json.decode(text, type=known(_Version)).version
        if version == _VERSION:
            return msgspec.json.decode(text, type=known(kind))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            f"the table's record of its offsets is invalid: {error}",
            path=path,
            hint="another program changed it; export into another table",
        ) from error
    raise UnsupportedVersionError(
        f"the table's offsets have the version {version}, and this Ister knows {_VERSION}",
        path=path,
        hint="export with the Ister that wrote it, or with a newer one",
    )


def show(ranges: Ranges) -> str:
    """Formats ranges for people; long lists are cut."""
    shown = ", ".join(f"{start} up to {end}" for start, end in ranges[:_SHOWN])
    return shown + (" …" if len(ranges) > _SHOWN else "")
