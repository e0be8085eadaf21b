"""The plan of a replay: which messages, in which chunks; written down once, so that it stays.

    request ─► name ─► plan, in the metadata store ─► chunk after chunk, each a batch of its own
                        {source, range, boundaries}     writer `replay-<id>`, batch = number

Owns: a replay's name, its chunks, and the plan's JSON. Does not own: what has been done of it,
which is remembered with the target topic (`ister.topic.batches`).

A replay that was killed is run again by the same command, perhaps with other settings, on a topic
that has grown, been tiered and been compacted meanwhile: the plan keeps its chunks the same. That
is why `latest` means the end of the topic when the replay was first begun.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnsupportedVersionError,
)
from ister.spark.heads import Head, Heads
from ister.spark.planner import TopicRange, plan
from ister.topic.arguments import as_milliseconds, as_offset

__all__ = [
    "ReplayPlan",
    "Where",
    "asked_range",
    "cut_chunks",
    "decode_plan",
    "encode_plan",
    "find_differences",
    "finish",
    "name_replay",
    "parse_place",
    "resolve_range",
]

Where = int | datetime | str | None
"""Where a range begins or ends: an offset, a point in time, `earliest`, `latest`."""

_VERSION: Final = 1
_WORDS: Final = ("earliest", "latest")
# A plan is one value of the metadata store, which takes 1 MiB.
_CHUNKS_MAX: Final = 20_000
_SHOWN_MAX: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a replay consists of."""

    source: str
    incarnation: str
    """Of the source."""
    target: str
    transform: str
    start: int
    end: int
    boundaries: tuple[int, ...]
    """Where chunks begin, and the end of the last one; empty once it is done."""
    bytes: int
    """About how much there is to read."""
    done: str | None = None
    """The incarnation of the target that has all of it."""
    messages: int = 0
    """How many messages the target got, once it is done."""
    asked: tuple[str, str] | None = None
    """Where it was to begin and to end, as it was asked for; None if that is not known."""

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Half-open ranges of the source, by number."""
        return list(zip(self.boundaries, self.boundaries[1:], strict=False))


def name_replay(
    *, source: str, incarnation: str, target: str, transform: str, start: Where, end: Where
) -> str:
    """The default name of a replay: the same for the same request."""
    texts = (source, incarnation, target, transform, _text(start), _text(end))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:20]


def asked_range(start: Where, end: Where) -> tuple[str, str]:
    """A range as a plan remembers that it was asked for."""
    return _text(start) or "earliest", _text(end) or "latest"


def find_differences(
    made: ReplayPlan,
    *,
    source: str,
    incarnation: str,
    transform: str,
    start: Where,
    end: Where,
) -> list[str]:
    """What a request wants otherwise than the plan of its name, in words."""
    found: list[str] = []
    if made.source != source:
        found.append(f"its source is {made.source}, not {source}")
    elif made.incarnation != incarnation:
        found.append(f"its source was a topic {source} that has been deleted since")
    if made.transform != transform:
        found.append(f"its transform is {_shorten(made.transform)}, not {_shorten(transform)}")
    for what, number, place, planned in (
        ("begins at", 0, start, made.start),
        ("ends at", 1, end, made.end),
    ):
        text = asked_range(start, end)[number]
        if isinstance(place, int):
            is_same = place == planned
        else:
            is_same = made.asked is None or made.asked[number] == text
        if not is_same:
            asked = made.asked[number] if made.asked is not None else ""
            known = f"{planned}" if asked in ("", str(planned)) else f"{planned} ({asked})"
            found.append(f"it {what} {known}, not {text}")
    return found


def _shorten(text: str) -> str:
    # By both ends: long queries differ anywhere, and often at their end.
    half = _SHOWN_MAX // 2
    return repr(text if len(text) <= _SHOWN_MAX else f"{text[:half]} … {text[-half:]}")


def _text(place: Where) -> str:
    if isinstance(place, datetime):
        return f"time {as_milliseconds(place)}"
    return "" if place is None else str(place)


def parse_place(text: str) -> int | datetime | str:
    """An offset, `earliest`, `latest`, or a point in time, from a command line.

    Raises:
        InvalidRequestError: It is none of these.
    """
    if text in _WORDS:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"{text!r} is neither an offset nor a point in time",
            hint="12345, earliest, latest, or 2026-01-31T12:00:00Z",
        ) from error
    as_milliseconds(moment)
    return moment


def resolve_range(heads: Heads, head: Head, start: Where, end: Where) -> tuple[int, int]:
    """The offsets that are meant, half open.

    Raises:
        InvalidRequestError: A place makes no sense, or the range is reversed.
        OffsetOutOfRangeError: It is beyond the topic's end.
        DataGapError: Messages are asked for that are no longer kept.
    """
    first = _resolve(heads, head, "start", start, otherwise=head.earliest)
    last = _resolve(heads, head, "end", end, otherwise=head.end)
    if first > last:
        if isinstance(start, datetime) or isinstance(end, datetime):
            return first, first  # times need not rise with offsets: nothing lies between the two
        raise InvalidRequestError(
            f"the range is reversed: it begins at {first} and ends at {last}", topic=head.topic
        )
    return first, last


def _resolve(heads: Heads, head: Head, name: str, place: Where, *, otherwise: int) -> int:
    if place is None:
        return otherwise
    if isinstance(place, str) and place in _WORDS:
        return head.earliest if place == "earliest" else head.end
    if isinstance(place, datetime):
        found = heads.find_time(head, as_milliseconds(place))
        return head.end if found is None else found
    offset = as_offset(name, place)
    if offset > head.end:
        raise OffsetOutOfRangeError(
            f"{name} is beyond the end",
            topic=head.topic,
            offset=offset,
            earliest=head.earliest,
            next=head.end,
        )
    if offset < head.earliest:
        raise DataGapError(
            "messages are asked for that are no longer kept",
            start=offset,
            end=head.earliest,
            topic=head.topic,
        )
    return offset


def cut_chunks(found: TopicRange, *, chunk_bytes: int, is_whole: bool = False) -> tuple[int, ...]:
    """Where the chunks of a range begin, and its end; nothing for an empty range.

    Args:
        found: The range, with the objects that it lies in.
        chunk_bytes: About how many bytes a chunk has.
        is_whole: It cannot be divided: one chunk.
    """
    if found.start >= found.end:
        return ()
    if is_whole:
        return (found.start, found.end)
    partitions = plan([found], split_bytes=chunk_bytes)
    starts = [part.slices[0].start for part in partitions]
    most = -(-len(starts) // _CHUNKS_MAX)
    return (*starts[::most], found.end)


def encode_plan(made: ReplayPlan) -> bytes:
    """The plan's JSON: boundaries as distances, which are short."""
    distances = [
        after - before for before, after in zip(made.boundaries, made.boundaries[1:], strict=False)
    ]
    return json.dumps(
        {
            "version": _VERSION,
            "source": made.source,
            "incarnation": made.incarnation,
            "target": made.target,
            "transform": made.transform,
            "start_offset": made.start,
            "next_offset": made.end,
            "chunks": distances,
            "bytes": made.bytes,
            "done": made.done,
            "messages": made.messages,
            "asked": made.asked,
        },
        separators=(",", ":"),
    ).encode()


def decode_plan(data: bytes, *, key: str) -> ReplayPlan:
    """Reads a plan.

    Raises:
        CorruptDataError: It is something else.
        UnsupportedVersionError: A newer Ister wrote it.
    """
    try:
        fields: Mapping[str, object] = json.loads(data)
        if fields["version"] != _VERSION:
            raise UnsupportedVersionError(
                f"a replay's plan of version {fields['version']}",
                path=key,
                hint="finish the replay with the newer Ister that began it",
            )
        distances = [_number(each) for each in _list(fields["chunks"])]
        start = _number(fields["start_offset"])
        boundaries = [start]
        for distance in distances:
            boundaries.append(boundaries[-1] + distance)
        done = fields["done"]
        asked = fields.get("asked")
        if asked is not None:
            asked_start, asked_end = map(str, _list(asked))
        made = ReplayPlan(
            source=str(fields["source"]),
            incarnation=str(fields["incarnation"]),
            target=str(fields["target"]),
            transform=str(fields["transform"]),
            start=start,
            end=_number(fields["next_offset"]),
            boundaries=tuple(boundaries) if distances else (),
            bytes=_number(fields["bytes"]),
            done=str(done) if done is not None else None,
            messages=_number(fields["messages"]),
            asked=(asked_start, asked_end) if asked is not None else None,
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptDataError(f"not a replay's plan: {error!r}", path=key) from error
    if made.boundaries and (
        made.boundaries[-1] != made.end or any(distance <= 0 for distance in distances)
    ):
        raise CorruptDataError("a replay's plan whose chunks are not its range", path=key)
    return made


def finish(made: ReplayPlan, *, incarnation: str, messages: int) -> ReplayPlan:
    """The plan of a replay that is done: its chunks need not be known any more."""
    return replace(made, boundaries=(), done=incarnation, messages=messages)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number")
    return value


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value
