"""A stream's offset: the value that Spark keeps in a query's checkpoint.

    {"version": 1, "topics": {"/default/a":
        {"incarnation": "…", "epoch": 4, "offset": 123, "from": 90}}}

    {"version": 2, "topics": {…}, "unchanged": "<base64>"}

Owns: this value, how it advances, what counts as lost data, and how far behind a query is. Does not
own: finding out where topics stand; limits; what to do with warnings.

`offset` is exclusive: the next message to read. `from` is where the micro-batch that ends here
begins, so an end offset alone says which messages its batch has:

    batch = [end.topics[t].start, end.topics[t].offset)  for each topic t

The start that Spark passes beside it is not used for that. Spark does not keep the first start of
a query: where the first batch fails, the restarted query would resolve `latest` again and lose what
came between.

Spark compares offsets as texts, so the text is canonical: keys in the order above, topics sorted.
A stream without news gives back the very offset that it was asked with, and never the same place
with another `from`. The incarnation tells a topic from one of the same name that was deleted and
made again; the epoch tells whose messages were read: where a later owner had to go on from a lower
offset, because a disk was lost, other messages have the offsets that the stream has passed.

Spark writes the whole offset down for each micro-batch, and gives a restarted query nothing else: a
topic without a message in the batch cannot be left out. If there are many of them, they are in
`unchanged`: JSON of incarnation, epoch and offset by topic, compressed. A thousand take a quarter
of the space then. Offsets of both versions are read; without many unchanged topics, version 1 is
written.

A crash leaves what Spark has written; a batch that was planned and not finished comes
again with the same end, and so with the same messages.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, NoReturn, Self

import msgspec

from ister.base.model import TopicName
from ister.base.positions import lag_of
from ister.errors import (
    ConflictError,
    DataGapError,
    InvalidRequestError,
    TopicNameError,
    UnsupportedVersionError,
    check,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

_VERSION: Final = 1
_PACKED_VERSION: Final = 2
_PACKED: Final = "unchanged"
# Fewer unchanged topics than this stay readable.
_PACKED_MIN: Final = 20
_FIELDS: Final = ("incarnation", "epoch", "offset", "from")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOffset:
    """Where a stream stands in one topic."""

    incarnation: str
    epoch: int
    """The lineage's newest, when this was made."""
    offset: int
    """The next message to read."""
    start: int
    """Where the micro-batch begins that ends at `offset`; `from` in JSON."""

    def __post_init__(self) -> None:
        check(0 <= self.start <= self.offset, f"not a topic's offset: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicHead:
    """What a topic holds now: `earliest` up to, not including, `end`."""

    incarnation: str
    earliest: int
    end: int
    lineage: tuple[tuple[int, int], ...] = ()
    """(epoch, start) of each change of owner: from `start` on its messages are that owner's."""
    is_cut: bool = False
    """Whether messages from `end` on may be on the disk of a node that is not running."""

    @property
    def epoch(self) -> int:
        """Of the last change."""
        return self.lineage[-1][0] if self.lineage else 0

    def given_up_from(self, epoch: int) -> int | None:
        """The lowest offset that was given out again after `epoch`; None if none was."""
        return min((start for newer, start in self.lineage if newer > epoch), default=None)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Where a stream stands in all of its topics; see the module header."""

    topics: Mapping[str, TopicOffset]
    """By name, sorted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "topics", dict(sorted(self.topics.items())))

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The micro-batch that ends here: (start, end) of each topic that has messages in it."""
        return {
            topic: (place.start, place.offset)
            for topic, place in self.topics.items()
            if place.start < place.offset
        }

    def to_dict(self) -> dict[str, object]:
        """What Spark is given, with keys in the canonical order."""
        unchanged = {
            topic: (place.incarnation, place.epoch, place.offset)
            for topic, place in self.topics.items()
            if place.start == place.offset
        }
        if len(unchanged) < _PACKED_MIN:
            unchanged = {}
        found: dict[str, object] = {
            "version": _PACKED_VERSION if unchanged else _VERSION,
            "topics": {
                topic: dict(
                    zip(
                        _FIELDS,
                        (place.incarnation, place.epoch, place.offset, place.start),
                        strict=True,
                    )
                )
                for topic, place in self.topics.items()
                if topic not in unchanged
            },
        }
        if unchanged:
            text = json.dumps(unchanged, separators=(",", ":"))
            found[_PACKED] = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        return found

    def to_json_text(self) -> str:
        """The text that Spark writes down and compares."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, value: object) -> Self:
        """Reads what Spark gives back.

        Raises:
            UnsupportedVersionError: Another version of Ister wrote the checkpoint.
            InvalidRequestError: The checkpoint is not one of this source.
        """
        version = value.get("version") if isinstance(value, dict) else None
        if isinstance(version, bool) or not isinstance(version, int):
            _refuse("it has no version")
        if version not in (_VERSION, _PACKED_VERSION):
            raise UnsupportedVersionError(
                f"the checkpoint has an offset of version {version}, and this Ister knows "
                f"versions {_VERSION} and {_PACKED_VERSION}",
                hint="run the query with the Ister that wrote it, or with a newer one",
            )
        try:
            if version == _PACKED_VERSION:
                packed = msgspec.convert(value, _Packed)
                topics = _unpack(packed.unchanged) | packed.topics
            else:
                topics = msgspec.convert(value, _Plain).topics
            return cls({topic: _topic_offset(topic, place) for topic, place in topics.items()})
        except (ValueError, zlib.error, RecursionError, TopicNameError) as error:
            _refuse(str(error), error)

    @classmethod
    def from_json_text(cls, text: str) -> Self:
        """Reads the text of an offset."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            _refuse(f"it is no JSON: {error}", error)
        return cls.from_dict(value)


def advance(
    previous: StreamOffset, heads: Mapping[str, TopicHead], ends: Mapping[str, int]
) -> StreamOffset:
    """The next end of a stream: `previous` itself if there is nothing new.

    Each topic goes on where it stood, a topic that is new from its earliest message, and one that
    is not in `heads` stays where it is. Look for losses first: see `check_loss`.

    A topic that is not in `ends` stays where it is.
    """
    topics: dict[str, TopicOffset] = {}
    for topic, place in previous.topics.items():
        end = max(ends.get(topic, place.offset), place.offset)
        # A topic without news is in the batch with an empty range, not with that of its last batch.
        epoch = max(place.epoch, heads[topic].epoch) if topic in heads else place.epoch
        topics[topic] = replace(place, epoch=epoch, offset=end, start=place.offset)
    for topic, head in heads.items():
        if topic not in topics:
            end = max(ends.get(topic, head.earliest), head.earliest)
            topics[topic] = TopicOffset(
                incarnation=head.incarnation, epoch=head.epoch, offset=end, start=head.earliest
            )
    following = StreamOffset(topics)
    return following if has_news(previous, following) else previous


def has_news(previous: StreamOffset, end: StreamOffset) -> bool:
    """Whether a batch that ends at `end` has messages that `previous` had not.

    Without any, Spark has to be given back its own offset, or it makes an empty batch for the
    difference. So a stream that skipped lost data reports it to Spark with its next message.
    """
    return any(previous.topics.get(topic) != end.topics[topic] for topic in end.ranges())


def check_loss(
    previous: StreamOffset, heads: Mapping[str, TopicHead], *, fails: bool
) -> tuple[StreamOffset, list[str]]:
    """Looks for messages that the stream was to read and cannot any more.

    That is where a topic was deleted, where it was deleted and made again (another incarnation),
    where a later owner went on from a lower offset after a disk was lost, where messages aged out
    before they were read, and where the topic ends before the offset that the stream has come to.

    Args:
        previous: Where the stream stands.
        heads: What topics hold now.
        fails: The option `failOnDataLoss`.

    Returns:
        Where to go on, which is `previous` itself where nothing is lost, and a warning for each
        loss. A deleted topic is left out; should it come back, it is new.

    Raises:
        DataGapError: Messages aged out, and `fails` is set.
        ConflictError: Any other loss, and `fails` is set.
    """
    topics = dict(previous.topics)
    warnings: list[str] = []
    for topic, place in previous.topics.items():
        head = heads.get(topic)
        loss = _find_loss(place, head)
        if loss is None:
            continue
        if fails:
            remedy = f"failOnDataLoss=false {loss.remedy}"
            if loss.has_aged_out and loss.offset is not None:
                raise DataGapError(
                    f"{loss.what}; {remedy}", start=place.offset, end=loss.offset, topic=topic
                )
            raise ConflictError(loss.what, topic=topic, offset=place.offset, hint=remedy)
        warnings.append(f"{topic}, offset {place.offset}: {loss.what}; the stream {loss.remedy}")
        if head is None or loss.offset is None:
            del topics[topic]
        else:
            topics[topic] = TopicOffset(
                incarnation=head.incarnation,
                epoch=head.epoch,
                offset=loss.offset,
                start=loss.offset,
            )
    return (StreamOffset(topics) if warnings else previous), warnings


class _Loss(NamedTuple):
    what: str
    remedy: str
    """What the stream does if it goes on."""
    offset: int | None
    """Where it goes on; None if the topic is left out."""
    has_aged_out: bool = False


def _find_loss(place: TopicOffset, head: TopicHead | None) -> _Loss | None:
    """Returns what a stream that stands at `place` has lost; None if nothing."""
    if head is None:
        return _Loss(
            "the topic was deleted, or the options do not name it any more",
            "leaves the topic out",
            None,
        )
    if head.incarnation != place.incarnation:
        return _Loss(
            "the topic was deleted and made again",
            f"reads the new one from its earliest message, {head.earliest}, on",
            head.earliest,
        )
    given_up = head.given_up_from(place.epoch)
    if given_up is not None and given_up < place.offset:
        offset = max(given_up, head.earliest)
        return _Loss(
            f"a disk was lost, and the topic's new owner went on from {given_up}: other messages "
            f"have the offsets up to {place.offset}, which the stream has passed",
            f"goes back to {offset}",
            offset,
        )
    if place.offset < head.earliest:
        return _Loss(
            f"the messages {place.offset} up to, not including, {head.earliest} aged out before "
            "the stream read them",
            f"continues at message {head.earliest}",
            head.earliest,
            has_aged_out=True,
        )
    if place.offset > head.end and not head.is_cut:
        return _Loss(
            f"the topic ends at {head.end}, and the stream had come to {place.offset}: the "
            "messages between are gone, and their offsets will be used again",
            f"continues at {head.end}",
            head.end,
        )
    return None


_Number = Annotated[int, msgspec.Meta(ge=0)]


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"start": "from"}):
    """A `TopicOffset` as it is stored."""

    incarnation: str
    epoch: _Number
    offset: _Number
    start: _Number


class _Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    topics: dict[str, _Place]


class _Packed(_Plain, frozen=True, forbid_unknown_fields=True):
    unchanged: str


def _topic_offset(topic: str, place: _Place) -> TopicOffset:
    TopicName.parse(topic)
    if place.start > place.offset:
        raise ValueError(f"{topic} goes from {place.start} to {place.offset}")
    return TopicOffset(
        incarnation=place.incarnation, epoch=place.epoch, offset=place.offset, start=place.start
    )


def _unpack(packed: str) -> dict[str, _Place]:
    """Returns unchanged topics in the form of the others."""
    text = zlib.decompress(base64.b64decode(packed, validate=True))
    unchanged = msgspec.json.decode(text, type=dict[str, tuple[str, _Number, _Number]])
    return {
        topic: _Place(incarnation, epoch, offset, offset)
        for topic, (incarnation, epoch, offset) in unchanged.items()
    }


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise InvalidRequestError(
        f"the checkpoint's offset is not one of this source: {reason}",
        hint="use a separate checkpointLocation for the query",
    ) from cause


# -- lag: how far a query is behind, from the progress that Spark reports --------------------------


@dataclass(frozen=True, slots=True)
class OffsetsBehind:
    """How many messages a source of a query has not read, by topic or partition."""

    by_topic: Mapping[str, int]

    @property
    def total(self) -> int:
        """Unread messages of all topics."""
        return sum(self.by_topic.values())

    @property
    def max(self) -> int:
        """Unread messages of the topic with the most; Kafka's `maxOffsetsBehindLatest`."""
        return max(self.by_topic.values(), default=0)

    @property
    def min(self) -> int:
        """Unread messages of the topic with the fewest; Kafka's `minOffsetsBehindLatest`."""
        return min(self.by_topic.values(), default=0)

    @property
    def avg(self) -> float:
        """Average number of unread messages of a topic; Kafka's `avgOffsetsBehindLatest`."""
        return self.total / len(self.by_topic) if self.by_topic else 0.0


def offsets_behind(
    progress: StreamingQueryProgress | Mapping[str, object] | str | None,
) -> list[OffsetsBehind | None]:
    """Returns how many messages each source of `format("ister")` in a query has not read.

    Args:
        progress: `query.lastProgress`, `event.progress` of a listener, or its JSON; or None, as
            before the first micro-batch.

    Returns:
        An entry for each such source, in the order of the query's sources; none for None. An entry
        is None if the progress does not say where the topics end, as before Spark 4.2.
    """
    found: list[OffsetsBehind | None] = []
    for source in _sources(progress):
        end, latest = _reported(source.get("endOffset")), _reported(source.get("latestOffset"))
        if end is None:
            continue
        if latest is None:
            found.append(None)
            continue
        behind = {
            name: lag_of(
                end.topics[name].offset if name in end.topics else 0,
                earliest=0,  # the progress does not say where a topic begins
                end=place.offset,
            )
            for name, place in latest.topics.items()
        }
        found.append(OffsetsBehind(behind))
    return found


def _sources(
    progress: StreamingQueryProgress | Mapping[str, object] | str | None,
) -> list[Mapping[str, object]]:
    if progress is None:
        return []
    text = progress if isinstance(progress, str) else getattr(progress, "json", None)
    value = json.loads(text) if isinstance(text, str) else progress
    sources = value.get("sources") if isinstance(value, Mapping) else None
    if not isinstance(sources, list):
        return []
    return [source for source in sources if isinstance(source, Mapping)]


def _reported(value: object) -> StreamOffset | None:
    """Parses an offset of `format("ister")`; None if another source wrote it."""
    try:
        if isinstance(value, str):
            return StreamOffset.from_json_text(value)
        return StreamOffset.from_dict(value)
    except InvalidRequestError:
        return None
