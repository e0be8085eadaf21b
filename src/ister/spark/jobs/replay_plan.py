"""The plan of a replay: which messages, in which chunks; saved once, so that it does not change.

    request ─► name ─► plan, in the metadata store ─► chunk after chunk, each a batch of its own
                        {source, range, boundaries}     writer `replay-<id>`, batch = number

Owns: a replay's name, its chunks, and the plan's JSON. Does not own: which chunks are done; that is
recorded with the target topic (`ister.topic.batches`).

A killed replay is run again by the same command, perhaps with other settings, on a topic that has
grown, been tiered and been compacted meanwhile: the plan keeps its chunks. That is why `latest`
means the end of the topic when the replay first started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Annotated, Final, TypeAlias

import msgspec

from ister.base.positions import to_milliseconds
from ister.base.structs import known
from ister.errors import (
    CorruptDataError,
    InvalidRequestError,
    UnsupportedVersionError,
)
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.option_values import OffsetWord
from ister.spark.planner import TopicRange, plan
from ister.topic.arguments import as_offset

Where = int | datetime | str | None
"""An end of a range: an offset, a time, `earliest` or `latest`."""

_VERSION: Final = 1
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0)]
_WORDS: Final[Mapping[str, OffsetWord]] = {"earliest": "earliest", "latest": "latest"}
# A plan is one value of the metadata store, which takes 1 MiB.
_CHUNKS_MAX: Final = 20_000
_SHOWN_MAX: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The range and chunks of a replay."""

    source: str
    incarnation: str
    """The source's incarnation."""
    target: str
    transform: str
    start: int
    end: int
    boundaries: tuple[int, ...]
    """The start of each chunk, and the end of the last one; empty once the replay is done."""
    bytes: int
    """Approximate size of what is read."""
    done: str | None = None
    """The incarnation of the target once it has everything."""
    messages: int = 0
    """Number of messages written, once it is done."""
    asked: tuple[str, str] | None = None
    """Start and end as they were requested; None if unknown."""

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Half-open ranges of the source, in order."""
        return list(zip(self.boundaries, self.boundaries[1:], strict=False))


def name_replay(
    *, source: str, incarnation: str, target: str, transform: str, start: Where, end: Where
) -> str:
    """Returns the default name of a replay: the same for the same request."""
    texts = (source, incarnation, target, transform, _text(start), _text(end))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:20]


def asked_range(start: Where, end: Where) -> tuple[str, str]:
    """Returns a requested range as a plan records it."""
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
    """Describes how a request differs from the plan of its name."""
    found: list[str] = []
    if made.source != source:
        found.append(f"its source is {made.source}, not {source}")
    elif made.incarnation != incarnation:
        found.append(f"its source was a topic {source} that was deleted since")
    if made.transform != transform:
        found.append(f"its transform is {_shorten(made.transform)}, not {_shorten(transform)}")
    for what, number, place, planned in (
        ("starts at", 0, start, made.start),
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
        return f"time {to_milliseconds(place)}"
    return "" if place is None else str(place)


def resolve_range(
    resolver: OffsetResolver, head: Head, start: Where, end: Where
) -> tuple[int, int]:
    """The offsets that are meant, half open.

    Raises:
        InvalidRequestError: A place makes no sense, or the range is reversed.
        OffsetOutOfRangeError: It is beyond the topic's end.
        DataGapError: Messages are asked for that are no longer kept.
    """
    first = _resolve(resolver, head, "start", "earliest" if start is None else start)
    last = _resolve(resolver, head, "end", "latest" if end is None else end)
    if first > last:
        if isinstance(start, datetime) or isinstance(end, datetime):
            return first, first  # times need not rise with offsets: nothing lies between the two
        raise InvalidRequestError(
            f"the range is reversed: it starts at {first} and ends at {last}", topic=head.topic
        )
    return first, last


def _resolve(resolver: OffsetResolver, head: Head, name: str, where: int | datetime | str) -> int:
    if isinstance(where, datetime):
        return resolver.resolve(head, name, "latest", time_ms=to_milliseconds(where))
    word = _WORDS.get(where) if isinstance(where, str) else None
    return resolver.resolve(head, name, word if word is not None else as_offset(name, where))


def cut_chunks(found: TopicRange, *, chunk_bytes: int, is_whole: bool = False) -> tuple[int, ...]:
    """Returns the start of each chunk of a range, and its end; empty for an empty range.

    `chunk_bytes` is the approximate size of a chunk; `is_whole` makes one chunk, because the range
    cannot be divided.
    """
    if found.start >= found.end:
        return ()
    if is_whole:
        return (found.start, found.end)
    partitions = plan([found], split_bytes=chunk_bytes)
    starts = [part.slices[0].start for part in partitions]
    most = -(-len(starts) // _CHUNKS_MAX)
    return (*starts[::most], found.end)


class _StoredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it is stored: boundaries as distances, which are short."""

    version: int
    source: str
    incarnation: str
    target: str
    transform: str
    start_offset: _Count
    next_offset: _Count
    chunks: tuple[_Positive, ...]
    bytes: _Count
    done: str | None
    messages: _Count
    asked: tuple[str, str] | None = None


class _Version(msgspec.Struct):
    version: object


def encode_plan(made: ReplayPlan) -> bytes:
    """Encodes a plan as JSON."""
    return msgspec.json.encode(
        _StoredPlan(
            version=_VERSION,
            source=made.source,
            incarnation=made.incarnation,
            target=made.target,
            transform=made.transform,
            start_offset=made.start,
            next_offset=made.end,
            chunks=tuple(after - before for before, after in pairwise(made.boundaries)),
            bytes=made.bytes,
            done=made.done,
            messages=made.messages,
            asked=made.asked,
        )
    )


def decode_plan(data: bytes, *, key: str) -> ReplayPlan:
    """Decodes a plan.

    Raises:
        CorruptDataError: It is invalid.
        UnsupportedVersionError: A newer Ister wrote it.
    """
    try:
        version = msgspec.json.decode(data, type=known(_Version)).version
        if version != _VERSION:
            raise UnsupportedVersionError(
                f"the replay's plan has the version {version}",
                path=key,
                hint="finish the replay with the newer Ister that started it",
            )
        stored = msgspec.json.decode(data, type=known(_StoredPlan))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptDataError(f"not a replay's plan: {error}", path=key) from error
    boundaries = tuple(accumulate(stored.chunks, initial=stored.start_offset))
    if stored.chunks and boundaries[-1] != stored.next_offset:
        raise CorruptDataError("the chunks of a replay's plan are not its range", path=key)
    return ReplayPlan(
        source=stored.source,
        incarnation=stored.incarnation,
        target=stored.target,
        transform=stored.transform,
        start=stored.start_offset,
        end=stored.next_offset,
        boundaries=boundaries if stored.chunks else (),
        bytes=stored.bytes,
        done=stored.done,
        messages=stored.messages,
        asked=stored.asked,
    )


def finish(made: ReplayPlan, *, incarnation: str, messages: int) -> ReplayPlan:
    """Returns the plan of a finished replay, without its chunks."""
    return replace(made, boundaries=(), done=incarnation, messages=messages)
