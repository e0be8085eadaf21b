"""The plan of a replay: which messages, in which chunks; saved once, so that it does not change.

    request ─► name ─► plan, in the metadata store ─► chunk after chunk, each a batch of its own
                        {source, range, chunks}         writer `replay-<id>`, batch = number

Owns: a replay's name, its chunks, and the plan's JSON. Does not own: which chunks are done; that is
recorded with the target topic (`ister.topic.batches`).

A killed replay is run again by the same command, perhaps with other settings, on a topic that has
grown, been tiered and been compacted meanwhile: the plan keeps its chunks. That is why `latest`
means the end of the topic when the replay first started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Annotated, Final, TypeAlias

import msgspec

from ister.base.positions import to_milliseconds
from ister.base.structs import known
from ister.errors import CorruptDataError, InvalidRequestError, UnsupportedVersionError
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


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The range and chunks of a replay, as they are stored."""

    version: int = _VERSION
    source: str
    incarnation: str
    """The source's incarnation."""
    target: str
    transform: str
    start: _Count = msgspec.field(name="start_offset")
    end: _Count = msgspec.field(name="next_offset")
    sizes: tuple[_Positive, ...] = msgspec.field(name="chunks")
    """How many offsets each chunk has; empty once the replay is done."""
    size_bytes: _Count = msgspec.field(name="bytes")
    """Approximate size of what is read."""
    done: str | None = None
    """The incarnation of the target once it has everything."""
    messages: _Count = 0
    """Number of messages written, once it is done."""
    asked: tuple[str, str]
    """Start and end as they were requested."""

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Half-open ranges of the source, in order."""
        return list(pairwise(accumulate(self.sizes, initial=self.start)))

    def finish(self, *, incarnation: str, messages: int) -> ReplayPlan:
        """Returns the plan of a finished replay, without its chunks."""
        return msgspec.structs.replace(self, sizes=(), done=incarnation, messages=messages)

    def find_differences(
        self, *, source: str, incarnation: str, transform: str, start: Where, end: Where
    ) -> list[str]:
        """Describes how a request differs from the plan of its name."""
        found: list[str] = []
        if self.source != source:
            found.append(f"its source is {self.source}, not {source}")
        elif self.incarnation != incarnation:
            found.append(f"its source was a topic {source} that was deleted since")
        if self.transform != transform:
            found.append(f"its transform is {_shorten(self.transform)}, not {_shorten(transform)}")
        for what, place, planned, asked, text in zip(
            ("starts at", "ends at"),
            (start, end),
            (self.start, self.end),
            self.asked,
            asked_range(start, end),
            strict=True,
        ):
            if place != planned if isinstance(place, int) else asked != text:
                shown = f"{planned}" if asked == str(planned) else f"{planned} ({asked})"
                found.append(f"it {what} {shown}, not {text}")
        return found

    def encode(self) -> bytes:
        """Encodes the plan as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes, *, key: str) -> ReplayPlan:
        """Decodes a plan."""
        try:
            version = msgspec.json.decode(data, type=known(_Version)).version
            if version != _VERSION:
                raise UnsupportedVersionError(
                    f"the replay's plan has the version {version}",
                    path=key,
                    hint="finish the replay with the newer Ister that started it",
                )
            made = msgspec.json.decode(data, type=known(cls))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptDataError(f"not a replay's plan: {error}", path=key) from error
        if made.sizes and made.start + sum(made.sizes) != made.end:
            raise CorruptDataError("the chunks of a replay's plan are not its range", path=key)
        return made


class _Version(msgspec.Struct):
    version: object


def name_replay(
    *, source: str, incarnation: str, target: str, transform: str, start: Where, end: Where
) -> str:
    """Returns the default name of a replay: the same for the same request."""
    texts = (source, incarnation, target, transform, _text(start), _text(end))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:20]


def asked_range(start: Where, end: Where) -> tuple[str, str]:
    """Returns a requested range as a plan records it."""
    return _text(start) or "earliest", _text(end) or "latest"


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
    """The offsets that are meant, half open."""
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


def cut_chunks(found: TopicRange, *, chunk_bytes: int | None) -> tuple[int, ...]:
    """Returns how many offsets each chunk of a range has; empty for an empty range.

    `chunk_bytes` is the approximate size of a chunk; None makes one chunk.
    """
    if found.start >= found.end:
        return ()
    if chunk_bytes is None:
        return (found.end - found.start,)
    starts = [part.slices[0].start for part in plan([found], split_bytes=chunk_bytes)]
    most = -(-len(starts) // _CHUNKS_MAX)
    return tuple(after - before for before, after in pairwise((*starts[::most], found.end)))
