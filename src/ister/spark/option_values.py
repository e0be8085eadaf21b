"""Values of options: texts as numbers, sizes, times, durations, offsets and words.

Owns: the syntax of values, their bounds, and the error texts. Does not own: which
options there are, and what they are for (`options`). Nothing here does I/O.

A function `as_…` takes the option's name, for errors, and its text.

Sizes are a number of bytes, or a number and one of `k`, `m`, `g`, `t` (also `kb`, `KiB`, …), in
powers of 1024 as everywhere in Spark.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from ister.base.limits import KIB
from ister.base.model import COLUMNS, TopicName
from ister.base.partitions import base_of_partition, parse_partition, partition_name
from ister.base.positions import EPOCH, parse_time
from ister.client.flight import parse_brokers
from ister.errors import InvalidRequestError, TopicNameError

SPLIT_BYTES_MIN: Final = 64 * KIB
"""Below this, the cost of a task dominates."""

HEADERS: Final = "headers"
"""The column of `includeHeaders`: the attributes, in the form of Kafka's headers."""

PAYLOAD_ERROR: Final = "payload_error"
"""The column that says why a payload is null."""

READABLE_COLUMNS: Final = (*COLUMNS, HEADERS, PAYLOAD_ERROR)
"""The columns that a read can have: those of a message, and two derived ones."""

OffsetWord: TypeAlias = Literal["earliest", "latest"]
"""An end of a topic."""

_WORDS: Final[Mapping[str, OffsetWord]] = {"earliest": "earliest", "latest": "latest"}
_NUMBERS_OF_WORDS: Final[Mapping[int, OffsetWord]] = {-2: "earliest", -1: "latest"}

_OFFSET_MAX: Final = 2**63 - 1  # Spark's `offset` column is a long
_TIME_MS_MAX: Final = 253_402_300_799_999  # 9999-12-31, the last day that a datetime has
_COUNT_MAX: Final = 2**31 - 1  # Spark counts partitions and rows of a batch in ints
_TIMEOUT_SECONDS_MAX: Final = 86_400
_DURATION_MS_MAX: Final = 30 * 86_400_000

_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_PARTITION: Final = re.compile(r"0|[1-9][0-9]{0,5}")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
# Numbers that are times before 1973 in milliseconds, and after 1973 in seconds.
_SECONDS_MEANT: Final = range(10**8, 10**11)
_SUBSCRIPTION: Final = re.compile(r"[A-Za-z0-9_-]{1,120}")

_Word = TypeVar("_Word", bound=StrEnum)
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class ByTopic(Generic[_Value]):
    """Values of JSON by topic, or by topic and partition as the Kafka source has them."""

    by_topic: Mapping[str, _Value] = field(default_factory=dict)
    """`{"/default/orders": 5}`; an entry for a partitioned topic applies to its partitions."""
    by_partition: Mapping[tuple[str, int], _Value] = field(default_factory=dict)
    """`{"/default/orders": {"0": 5}}`; a topic without partitions has the partition 0."""

    def find(self, topic: str) -> _Value | None:
        """Returns the value for a topic or partition; None if there is none."""
        if topic in self.by_topic:
            return self.by_topic[topic]
        parsed = parse_partition(topic)
        for key in ((topic, 0), parsed):
            if key is not None and key in self.by_partition:
                return self.by_partition[key]
        return self.by_topic.get(parsed[0]) if parsed is not None else None

    def names(self) -> Iterator[str]:
        """Yields the topics and partitions that have a value."""
        yield from self.by_topic
        for topic, number in self.by_partition:
            yield partition_name(topic, number)

    def check_named(self, option: str, topics: Collection[str]) -> None:
        """Checks that JSON names no other topics than the option `topic`, if that is given."""
        for topic in (*self.by_topic, *(name for name, _ in self.by_partition)):
            # The name of a partitioned topic stands for its partitions.
            if topics and topic not in topics and base_of_partition(topic) not in topics:
                raise InvalidRequestError(
                    f"{option} names a topic that is not in the option topic",
                    topic=topic,
                    hint=f"the option topic names {', '.join(topics)}",
                )

    def check_known(self, option: str, topics: Iterable[str]) -> None:
        """Checks that all named topics and partitions were found."""
        found = set(topics)
        known = found | {base for topic in found if (base := base_of_partition(topic)) is not None}
        missing = [topic for topic in self.by_topic if topic not in known]
        missing += [
            partition_name(topic, number)
            for topic, number in self.by_partition
            if partition_name(topic, number) not in found and (number or topic not in found)
        ]
        if missing:
            raise InvalidRequestError(
                f"{option} names a topic that is not read",
                topic=missing[0],
                hint=f"topics read: {', '.join(sorted(known)) or 'none'}",
            )


@dataclass(frozen=True, kw_only=True)
class OffsetsOption(ByTopic["int | OffsetWord"]):
    """`startingOffsets` or `endingOffsets`."""

    otherwise: OffsetWord | None = None
    """For topics that the JSON does not name; None until `options` has set the default."""

    def of(self, topic: str) -> int | OffsetWord:
        """Returns the value for a topic, or for the topic that it is a partition of."""
        found = self.find(topic)
        return found if found is not None else self.otherwise or "earliest"


TimesOption: TypeAlias = ByTopic[int]
"""`startingOffsetsByTimestamp` or `endingOffsetsByTimestamp`, in milliseconds."""


def refuse_twice(name: str, items: Iterable[str]) -> None:
    """Raises an error if a list names something twice."""
    seen: set[str] = set()
    for item in items:
        if item in seen:
            raise InvalidRequestError(f"{name} names {item} twice")
        seen.add(item)


def check_order(starting: OffsetsOption, ending: OffsetsOption) -> None:
    """Raises an error if a topic's range ends before it starts."""
    for topic in starting.names():
        start, end = starting.of(topic), ending.of(topic)
        if isinstance(start, int) and isinstance(end, int) and start > end:
            raise InvalidRequestError(
                f"startingOffsets ({start}) is after endingOffsets ({end})", topic=topic
            )


def as_text(_: str, text: str) -> str:
    """The text itself."""
    return text


def as_topics(name: str, text: str) -> tuple[str, ...]:
    """Names of topics, separated by commas."""
    names = tuple(as_topic(name, item) for item in text.split(","))
    refuse_twice(name, names)
    return names


def as_topic(name: str, text: str) -> str:
    """The name of a topic."""
    try:
        return str(TopicName.parse(text.strip()))
    except TopicNameError as error:
        hint = error.hint
        if "/" not in text and text.strip():
            hint = f"a topic's name has a namespace, such as '/default/{text.strip()}'"
        raise TopicNameError(f"{name}: {error.message}", hint=hint) from error


def as_pattern(name: str, text: str) -> str:
    """A regular expression, as text."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequestError(
            f"{name} is not a regular expression: {error}",
            hint="for example '/default/orders-.*'; the syntax is that of Python's re, not Java's",
        ) from error
    return text


def as_flag(name: str, text: str) -> bool:
    """`true` or `false`."""
    flag = {"true": True, "false": False}.get(text.lower())
    if flag is None:
        raise InvalidRequestError(f"{name} is {text!r}", hint="either true or false")
    return flag


def _quantity(
    pattern: str, units: Mapping[str, int], least: int, most: int, hint: str
) -> Callable[[str, str], int]:
    """A whole number and perhaps a unit, within bounds."""
    form = re.compile(pattern, re.IGNORECASE)

    def convert(name: str, text: str) -> int:
        match = form.fullmatch(text)
        found = int(match[1]) * units[(match[2] or "").lower()] if match else least - 1
        if not least <= found <= most:
            raise InvalidRequestError(f"{name} is {text!r}", hint=hint)
        return found

    return convert


_SIZE: Final = r"([0-9]{1,18})\s*(?:([kmgt]?)(?:i?b)?)"
_SIZE_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION_UNITS: Final = {
    "": 1,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}

as_count: Final = _quantity(
    "([0-9]{1,18})()", {"": 1}, 1, _COUNT_MAX, f"a whole number from 1 to {_COUNT_MAX}"
)
"""A number from 1 on."""

as_size: Final = _quantity(
    _SIZE, _SIZE_UNITS, 1, _OFFSET_MAX, "a number of bytes, such as 1048576, 512k or 64MiB"
)
"""A number of bytes."""

as_split_bytes: Final = _quantity(
    _SIZE,
    _SIZE_UNITS,
    SPLIT_BYTES_MIN,
    _OFFSET_MAX,
    f"at least {SPLIT_BYTES_MIN} bytes, such as 512k or 64MiB",
)
"""A number of bytes that is enough for a task."""

as_duration_ms: Final = _quantity(
    r"([0-9]{1,15})\s*(ms|s|m|min|h|d)?",
    _DURATION_UNITS,
    0,
    _DURATION_MS_MAX,
    "a time such as 0s, 500ms, 30s, 15m or 1h, at most 30d",
)
"""A duration such as `15m`, in milliseconds, which are also the default unit as in Spark."""


def as_seconds(name: str, text: str) -> float:
    """A number of seconds."""
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= _TIMEOUT_SECONDS_MAX:
        raise InvalidRequestError(
            f"{name} is {text!r}",
            hint=f"a number of seconds above 0, at most {_TIMEOUT_SECONDS_MAX}",
        )
    return seconds


FOREIGN_COLUMNS: Final = {"value": "payload", "key": "routing_key", "timestamp": "publish_time"}
"""Columns of Spark's Kafka source, and what they are called here."""


def as_columns(name: str, text: str) -> tuple[str, ...]:
    """Names of columns, separated by commas."""
    columns = tuple(item.strip().lower() for item in text.split(","))
    for column in columns:
        if column not in READABLE_COLUMNS:
            near = difflib.get_close_matches(column, READABLE_COLUMNS, n=1)
            better = FOREIGN_COLUMNS.get(column) or next(iter(near), None)
            hint = f"did you mean {better}?" if better else f"known: {', '.join(READABLE_COLUMNS)}"
            raise InvalidRequestError(f"{name} names an unknown column {column!r}", hint=hint)
    refuse_twice(name, columns)
    return columns


def as_subscription(name: str, text: str) -> str:
    """The name of a subscription."""
    if _SUBSCRIPTION.fullmatch(text) is None:
        raise InvalidRequestError(
            f"{name} is {text!r}", hint="use 1 to 120 ASCII letters, digits, '_' and '-'"
        )
    return text


def as_brokers(name: str, text: str) -> tuple[str, ...]:
    """Flight addresses, separated by commas."""
    try:
        brokers = parse_brokers(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{name}: {error.message}",
            hint="host:port, such as 127.0.0.1:6651, perhaps after grpc:// or grpc+tls://; "
            "several are separated by commas",
        ) from error
    refuse_twice(name, brokers)
    return brokers


def as_word(kind: type[_Word], name: str, text: str) -> _Word:
    """A word of an enumeration."""
    try:
        return kind(text.lower())
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} is {text!r}", hint=f"one of: {', '.join(kind)}"
        ) from error


def as_time_ms(name: str, text: str) -> int:
    """A time in milliseconds since the epoch, rounded up.

    A start and an end both mean the first message published at or after the time. Publish times are
    whole milliseconds, so rounding up does not change which message that is.
    """
    if _DIGITS.fullmatch(text):
        time_ms = int(text)
    else:
        try:
            parsed = parse_time(text)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{name}: {error.message}",
                hint="use milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z",
            ) from error
        time_ms = -((EPOCH - parsed) // timedelta(milliseconds=1))
    if _DIGITS.fullmatch(text) and time_ms in _SECONDS_MEANT:
        raise InvalidRequestError(
            f"{name} is {text!r}, which is {EPOCH + timedelta(milliseconds=time_ms):%Y-%m-%d} "
            "in milliseconds",
            hint=f"use milliseconds: {time_ms * 1000} if it is in seconds",
        )
    if not 0 <= time_ms <= _TIME_MS_MAX:
        raise InvalidRequestError(
            f"{name} is {text!r}",
            hint="use a time between 1970 and 9999; a bare number counts milliseconds, not "
            "microseconds or nanoseconds",
        )
    return time_ms


# -- JSON by topic --------------------------------------------------------------------------------


def as_offsets(name: str, text: str) -> OffsetsOption:
    """`earliest`, `latest`, or offsets by topic, or by topic and partition."""
    if (word := _WORDS.get(text.lower())) is not None:
        return OffsetsOption(otherwise=word)
    found = _as_values(name, text, _as_offset, hint=_OFFSETS_HINT)
    return OffsetsOption(by_topic=found.by_topic, by_partition=found.by_partition)


def as_times(name: str, text: str) -> TimesOption:
    """Times by topic, or by topic and partition, in milliseconds."""
    return _as_values(name, text, _as_topic_time, hint=_TIMES_HINT)


def as_assigned(name: str, text: str) -> tuple[tuple[str, int], ...]:
    """Partitions: `{"/default/orders": [0, 1]}` as pairs of topic and number."""
    found: list[tuple[str, int]] = []
    for topic, numbers in _as_members(name, text, hint=_ASSIGN_HINT):
        if not isinstance(numbers, list) or isinstance(numbers, _Pairs) or not numbers:
            raise InvalidRequestError(
                f"{name} has {numbers!r} for a topic", topic=topic, hint=_ASSIGN_HINT
            )
        found += [(topic, _as_partition(name, topic, number)) for number in numbers]
    if not found:
        raise InvalidRequestError(f"{name} is {text!r}", hint=_ASSIGN_HINT)
    refuse_twice(name, [partition_name(topic, number) for topic, number in found])
    return tuple(found)


_OFFSETS_HINT: Final = (
    'earliest, latest, or JSON of offsets by topic, such as {"/default/orders": 23}'
)
_TIMES_HINT: Final = (
    'JSON of milliseconds by topic, such as {"/default/orders": 1767225600000}, or by partition, '
    'such as {"/default/orders": {"0": 1767225600000}}'
)
_ASSIGN_HINT: Final = 'JSON of partitions by topic, such as {"/default/orders": [0, 1]}'


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object, in order."""


def _as_values(
    name: str, text: str, convert: Callable[[str, str, object], _Value], *, hint: str
) -> ByTopic[_Value]:
    by_topic: dict[str, _Value] = {}
    by_partition: dict[tuple[str, int], _Value] = {}
    for topic, value in _as_members(name, text, hint=hint):
        if isinstance(value, _Pairs):
            refuse_twice(f"{name} of {topic}", [number for number, _ in value])
            for number, one in value:
                by_partition[topic, _as_partition(name, topic, number)] = convert(name, topic, one)
        else:
            by_topic[topic] = convert(name, topic, value)
    return ByTopic(by_topic=by_topic, by_partition=by_partition)


def _as_members(name: str, text: str, *, hint: str) -> list[tuple[str, object]]:
    try:
        # Pairs, because a dict would hide a topic that is named twice.
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is {text!r}", hint=hint) from error
    if not isinstance(pairs, _Pairs):
        raise InvalidRequestError(f"{name} is {text!r}", hint=hint)
    topics = [as_topic(name, topic) for topic, _ in pairs]
    refuse_twice(name, topics)
    return [(topic, value) for topic, (_, value) in zip(topics, pairs, strict=True)]


def _as_partition(name: str, topic: str, number: object) -> int:
    if isinstance(number, bool) or _PARTITION.fullmatch(str(number)) is None:
        raise InvalidRequestError(
            f"{name} has the partition {number!r}",
            topic=topic,
            hint="use a partition's number, from 0",
        )
    return int(str(number))


def _as_offset(name: str, topic: str, value: object) -> int | OffsetWord:
    if isinstance(value, str):
        word = _WORDS.get(value.strip().lower())
        if word is not None:
            return word
    elif isinstance(value, int) and not isinstance(value, bool):
        if value in _NUMBERS_OF_WORDS:
            return _NUMBERS_OF_WORDS[value]
        if 0 <= value <= _OFFSET_MAX:
            return value
    raise InvalidRequestError(
        f"{name} has {value!r} for a topic",
        topic=topic,
        hint="use an offset, earliest (or -2), or latest (or -1)",
    )


def _as_topic_time(name: str, topic: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequestError(
            f"{name} has {value!r} for a topic", topic=topic, hint=_TIMES_HINT
        )
    return as_time_ms(name, str(value))
