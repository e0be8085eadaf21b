"""Options of `format("ister")`: checks the texts that Spark passes, and converts them to values.

Owns: the names, defaults, bounds and error texts of all options. Does not own: what exists (topics,
offsets, files); nothing here does I/O, so a wrong option is refused before anything is opened.

Names are those of Spark's Kafka source where it has one. Spark passes options as lower-case text
and ignores misspelt ones; so names are compared without regard to case, errors use the proper
spelling, and an option that is unknown, empty, or of the other direction or mode is refused. The
results can be pickled: Spark sends them to its workers.

Sizes are a number of bytes, or a number and one of `k`, `m`, `g`, `t` (also `kb`, `KiB`, …), in
powers of 1024 as everywhere in Spark.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Final, Literal, Self, TypeAlias, TypeVar

from ister.client.flight import parse_brokers
from ister.errors import InvalidRequestError, TopicNameError
from ister.limits import KIB
from ister.model import COLUMNS, AckLevel, Codec, TopicName
from ister.partitions import base_of_partition
from ister.positions import EPOCH, parse_time

"""A task costs 40-80 ms before it reads a byte; reading this much takes about a second."""

SPLIT_BYTES_MIN: Final = 64 * KIB
"""Below this, the cost of a task dominates."""

COMMIT_TIMEOUT_SECONDS_DEFAULT: Final = 60.0
"""How long a sink waits for the log's lock, or for the broker."""

OffsetWord: TypeAlias = Literal["earliest", "latest"]
"""An end of a topic."""

READ_OPTIONS: Final[Mapping[str, str]] = {
    "topic": "topics to read: /namespace/topic names, separated by commas",
    "topicPattern": "regular expression that matches whole topic names",
    "config": "path of an ister.yml or of a data directory; load(path) sets it, too",
    "broker": "Flight addresses of brokers, host:port, separated by commas (default: those in the "
    "metadata store)",
    "startingOffsets": "earliest, latest, or JSON of an offset per topic "
    "(default: earliest for a batch, latest for a stream)",
    "endingOffsets": "latest, or JSON of an offset per topic, not included (batch only; "
    "default: latest)",
    "startingTimestamp": "start at the first message published at or after this time: "
    "milliseconds since the epoch, or ISO-8601 with a zone",
    "endingTimestamp": "end before the first message published at or after this time (batch only)",
    "maxMessagesPerTrigger": "maximum messages in a micro-batch, over all topics (stream only)",
    "maxBytesPerTrigger": "approximate bytes in a micro-batch, over all topics (stream only)",
    "minPartitions": "minimum number of partitions, if the indexes allow it",
    "splitBytes": "approximate bytes in a partition, before compression (default: up to 64 MiB)",
    "columns": "columns to read, separated by commas (default: all)",
    "pushdown": "let Spark push filters down; for a DataFrame that is scanned once (batch only; "
    "default: false)",
    "failOnDataLoss": "fail if messages to read are gone; otherwise log a warning and continue "
    "(default: true)",
    "includeTail": "also read what is not in the bucket yet (default: true)",
    "subscription": "subscription whose cursor shows the stream's position and holds retention "
    "(stream only)",
}
"""The options of a read, each with a description."""

WRITE_OPTIONS: Final[Mapping[str, str]] = {
    "topic": "topic to write to; takes precedence over a column `topic`",
    "config": "path of an ister.yml or of a data directory; save(path) sets it, too",
    "broker": "Flight addresses of brokers, host:port, separated by commas (default: those in the "
    "metadata store)",
    "createTopics": "create topics that do not exist (default: true)",
    "ack": "ack level of created topics: memory, written, synced or tiered",
    "codec": "codec of created topics: bincode2 or bincode1",
    "producerName": "producer name for rows without one",
    "commitTimeoutSeconds": "how long to wait for the log's lock or the broker (default: 60)",
}
"""The options of a write, each with a description."""

_STREAM_ONLY: Final = frozenset({"maxMessagesPerTrigger", "maxBytesPerTrigger", "subscription"})
_BATCH_ONLY: Final = frozenset({"endingOffsets", "endingTimestamp", "pushdown"})

# What `load(path)` and `save(path)` set.
_PATH: Final = "path"

# Spark passes its own settings of a streaming query to the sink, too.
_SPARKS_OWN: Final = frozenset(
    {
        "checkpointlocation",
        "queryname",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
    }
)

# Names in other connectors, in lower case.
_FOREIGN_NAMES: Final[Mapping[str, str]] = {
    "assign": "topic",
    "subscribe": "topic",
    "topics": "topic",
    "subscribepattern": "topicPattern",
    "topicspattern": "topicPattern",
    "kafka.bootstrap.servers": "broker",
    "service.url": "broker",
    "maxoffsetspertrigger": "maxMessagesPerTrigger",
    "maxrowspertrigger": "maxMessagesPerTrigger",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "predefinedsubscription": "subscription",
    "kafka.group.id": "subscription",
}

_WORDS: Final[Mapping[str, OffsetWord]] = {"earliest": "earliest", "latest": "latest"}
_NUMBERS_OF_WORDS: Final[Mapping[int, OffsetWord]] = {-2: "earliest", -1: "latest"}

_OFFSET_MAX: Final = 2**63 - 1  # Spark's `offset` column is a long
_TIME_MS_MAX: Final = 253_402_300_799_999  # 9999-12-31, the last day that a datetime has
_COUNT_MAX: Final = 2**31 - 1  # Spark counts partitions and rows of a batch in ints
_TIMEOUT_SECONDS_MAX: Final = 86_400

_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(?:([kmgt]?)(?:i?b)?)", re.IGNORECASE)
_SIZE_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SUBSCRIPTION: Final = re.compile(r"[A-Za-z0-9_-]{1,120}")

_Word = TypeVar("_Word", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsOption:
    """`startingOffsets` or `endingOffsets`."""

    otherwise: OffsetWord
    """For topics that are not in `by_topic`."""
    by_topic: Mapping[str, int | OffsetWord] = field(default_factory=dict)
    """For topics that the JSON names."""

    def of(self, topic: str) -> int | OffsetWord:
        """Returns the value for a topic, or for the topic that it is a partition of."""
        parent = base_of_partition(topic) or topic
        return self.by_topic.get(topic, self.by_topic.get(parent, self.otherwise))

    def check_known(self, option: str, topics: Iterable[str]) -> None:
        """Checks that all named topics were found.

        Raises:
            InvalidRequestError: One was not.
        """
        known = set(topics)
        known |= {parent for topic in known if (parent := base_of_partition(topic)) is not None}
        for topic in self.by_topic:
            if topic not in known:
                raise InvalidRequestError(
                    f"{option} names a topic that is not read",
                    topic=topic,
                    hint=f"topics read: {', '.join(sorted(known)) or 'none'}",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a batch or a stream reads, and how."""

    is_streaming: bool
    topics: tuple[str, ...] = ()
    """The names in `topic`; empty if there is a pattern."""
    topic_pattern: str | None = None
    """A regular expression; see `matches`."""
    config: str | None = None
    brokers: tuple[str, ...] = ()
    """The Flight addresses in `broker`, each with a scheme."""
    starting_offsets: OffsetsOption
    ending_offsets: OffsetsOption
    starting_timestamp_ms: int | None = None
    """Takes precedence over `starting_offsets`."""
    ending_timestamp_ms: int | None = None
    """Takes precedence over `ending_offsets`."""
    max_messages_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    """A soft limit; if both are given, both apply."""
    min_partitions: int | None = None
    split_bytes: int | None = None
    """None: the default, and less where that leaves a small cluster idle."""
    columns: tuple[str, ...] | None = None
    """None for all, or for those of the user's schema."""
    pushdown: bool = False
    fail_on_data_loss: bool = True
    include_tail: bool = True
    subscription: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_streaming: bool) -> Self:
        """Checks the options of a read, as Spark passes them: text, with names in any case.

        Raises:
            InvalidRequestError: An option is unknown, missing, misplaced or invalid.
            TopicNameError: `topic`, or JSON of offsets, has an invalid topic name.
        """
        given = _Given(options, direction="reading", is_streaming=is_streaming)
        topics = given.topics("topic")
        pattern = given.get("topicPattern", _as_pattern)
        if bool(topics) == (pattern is not None):
            raise InvalidRequestError(
                "both topic and topicPattern are given" if topics else "no topic is given",
                hint="set the option topic, or topicPattern",
            )
        config, brokers = given.place()
        starting = given.end_of_range(
            "startingOffsets",
            topics,
            default="latest" if is_streaming else "earliest",
            refused=None if is_streaming else "latest",
        )
        ending = given.end_of_range("endingOffsets", topics, default="latest", refused="earliest")
        _check_order(starting, ending)
        starting_ms = given.timestamp("startingTimestamp", instead_of="startingOffsets")
        ending_ms = given.timestamp("endingTimestamp", instead_of="endingOffsets")
        if starting_ms is not None and ending_ms is not None and starting_ms > ending_ms:
            raise InvalidRequestError(
                f"startingTimestamp ({starting_ms} ms) is after endingTimestamp ({ending_ms} ms)"
            )
        return cls(
            is_streaming=is_streaming,
            topics=topics,
            topic_pattern=pattern,
            config=config,
            brokers=brokers,
            starting_offsets=starting,
            ending_offsets=ending,
            starting_timestamp_ms=starting_ms,
            ending_timestamp_ms=ending_ms,
            max_messages_per_trigger=given.get("maxMessagesPerTrigger", _as_count),
            max_bytes_per_trigger=given.get("maxBytesPerTrigger", _as_size),
            min_partitions=given.get("minPartitions", _as_count),
            split_bytes=given.get("splitBytes", _as_split_bytes),
            columns=given.get("columns", _as_columns),
            pushdown=given.flag("pushdown", default=False),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            include_tail=given.flag("includeTail", default=True),
            subscription=given.get("subscription", _as_subscription),
        )

    def matches(self, topic: str) -> bool:
        """Returns whether a topic is one of those to read."""
        if self.topic_pattern is None:
            return topic in self.topics
        return re.fullmatch(self.topic_pattern, topic) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Where a batch or a stream is written to, and how."""

    is_streaming: bool
    topic: str | None = None
    """The topic of all rows; None if the column `topic` names it."""
    config: str | None = None
    brokers: tuple[str, ...] = ()
    """The Flight addresses in `broker`, each with a scheme."""
    create_topics: bool = True
    ack: AckLevel | None = None
    codec: Codec | None = None
    """Of created topics, as `ack`; None for the config's."""
    producer_name: str | None = None
    commit_timeout_seconds: float = COMMIT_TIMEOUT_SECONDS_DEFAULT
    """How long to wait for the lock of the log, or for the broker."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_streaming: bool) -> Self:
        """Checks the options of a write, as Spark passes them: text, with names in any case.

        Options that Spark itself adds for a streaming query are ignored.

        Raises:
            InvalidRequestError: An option is unknown, missing, misplaced or invalid.
            TopicNameError: `topic` is an invalid topic name.
        """
        given = _Given(options, direction="writing", is_streaming=is_streaming)
        topics = given.topics("topic")
        if len(topics) > 1:
            raise InvalidRequestError(
                f"topic names {len(topics)} topics, and a row is written to one",
                hint="omit the option, and name the topic of each row in a column `topic`",
            )
        config, brokers = given.place()
        return cls(
            is_streaming=is_streaming,
            topic=topics[0] if topics else None,
            config=config,
            brokers=brokers,
            create_topics=given.flag("createTopics", default=True),
            ack=given.get("ack", partial(_as_word, AckLevel)),
            codec=given.get("codec", partial(_as_word, Codec)),
            producer_name=given.get("producerName", _as_text),
            commit_timeout_seconds=given.get("commitTimeoutSeconds", _as_seconds)
            or COMMIT_TIMEOUT_SECONDS_DEFAULT,
        )


_Value = TypeVar("_Value")


class _Given:
    """The given options, by their proper names; checks the names."""

    def __init__(
        self,
        options: Mapping[str, str],
        *,
        direction: Literal["reading", "writing"],
        is_streaming: bool,
    ) -> None:
        is_reading = direction == "reading"
        known = READ_OPTIONS if is_reading else WRITE_OPTIONS
        others = WRITE_OPTIONS if is_reading else READ_OPTIONS
        spellings = {name.lower(): name for name in (*known, _PATH)}
        other_spellings = {name.lower(): name for name in others}
        self._texts: dict[str, str] = {}
        for spelling, text in options.items():
            lowered = spelling.lower()
            name = spellings.get(lowered)
            if name is None:
                if is_streaming and not is_reading and lowered in _SPARKS_OWN:
                    continue
                if lowered in other_spellings:
                    raise InvalidRequestError(
                        f"the option {other_spellings[lowered]} is not for {direction}",
                        hint=f"it belongs to {'writing' if is_reading else 'reading'}",
                    )
                raise _unknown(spelling, known)
            if name in _STREAM_ONLY and not is_streaming:
                raise InvalidRequestError(
                    f"the option {name} is not for a batch",
                    hint="it belongs to a stream, spark.readStream",
                )
            if name in _BATCH_ONLY and is_streaming:
                raise InvalidRequestError(
                    f"the option {name} is not for a stream",
                    hint="it belongs to a batch, spark.read",
                )
            if name in self._texts:
                raise InvalidRequestError(f"the option {name} is given twice")
            if not isinstance(text, str) or not text.strip():
                raise InvalidRequestError(
                    f"the option {name} is empty", hint="omit it, or set a value"
                )
            self._texts[name] = text.strip()

    def get(self, name: str, convert: Callable[[str, str], _Value]) -> _Value | None:
        """Returns the value of an option; None if it was not given."""
        text = self._texts.get(name)
        return None if text is None else convert(name, text)

    def flag(self, name: str, *, default: bool) -> bool:
        found = self.get(name, _as_flag)
        return default if found is None else found

    def place(self) -> tuple[str | None, tuple[str, ...]]:
        """Returns the config and the brokers; at least one is given."""
        config, path = self.get("config", _as_text), self.get(_PATH, _as_text)
        if config is not None and path is not None:
            raise InvalidRequestError(
                "both config and path are given",
                hint="load(path) and save(path) mean the same as the option config: set one",
            )
        brokers = self.get("broker", _as_brokers) or ()
        if config is None and path is None and not brokers:
            raise InvalidRequestError(
                "neither config nor broker is given",
                hint="config names an ister.yml or a data directory, broker a host:port",
            )
        return config if config is not None else path, brokers

    def topics(self, name: str) -> tuple[str, ...]:
        text = self._texts.get(name)
        if text is None:
            return ()
        names = tuple(_as_topic(name, item) for item in text.split(","))
        _refuse_twice(name, names)
        return names

    def end_of_range(
        self,
        name: str,
        topics: tuple[str, ...],
        *,
        default: OffsetWord,
        refused: OffsetWord | None,
    ) -> OffsetsOption:
        """Returns `startingOffsets` or `endingOffsets`; topics missing in JSON get the default."""
        text = self._texts.get(name)
        if text is None:
            return OffsetsOption(otherwise=default)
        word = _WORDS.get(text.lower())
        if word is not None:
            _refuse_word(name, word, refused)
            return OffsetsOption(otherwise=word)
        by_topic = _as_offsets(name, text)
        for topic, offset in by_topic.items():
            # The name of a partitioned topic stands for its partitions.
            if topics and topic not in topics and base_of_partition(topic) not in topics:
                raise InvalidRequestError(
                    f"{name} names a topic that is not in the option topic",
                    topic=topic,
                    hint=f"it reads {', '.join(topics)}",
                )
            _refuse_word(name, offset, refused, topic=topic)
        return OffsetsOption(otherwise=default, by_topic=by_topic)

    def timestamp(self, name: str, *, instead_of: str) -> int | None:
        if name in self._texts and instead_of in self._texts:
            raise InvalidRequestError(
                f"both {name} and {instead_of} are given",
                hint="set one of them",
            )
        return self.get(name, _as_time_ms)


def _unknown(spelling: str, known: Mapping[str, str]) -> InvalidRequestError:
    lowered = spelling.lower()
    spellings = {name.lower(): name for name in known}
    foreign = _FOREIGN_NAMES.get(lowered)
    near = difflib.get_close_matches(lowered, spellings, n=1)
    if foreign in known:
        hint = f"Ister calls it {foreign}"
    elif near:
        hint = f"did you mean {spellings[near[0]]}?"
    else:
        hint = f"known: {', '.join(known)}"
    return InvalidRequestError(f"unknown option {spelling!r}", hint=hint)


def _refuse_twice(name: str, items: Iterable[str]) -> None:
    seen: set[str] = set()
    for item in items:
        if item in seen:
            raise InvalidRequestError(f"{name} names {item} twice")
        seen.add(item)


def _refuse_word(
    name: str, value: int | OffsetWord, refused: OffsetWord | None, *, topic: str | None = None
) -> None:
    if refused is not None and value == refused:
        raise InvalidRequestError(
            f"{name} of a batch cannot be {refused}", topic=topic, hint="there is nothing to read"
        )


def _check_order(starting: OffsetsOption, ending: OffsetsOption) -> None:
    for topic in starting.by_topic:
        start, end = starting.of(topic), ending.of(topic)
        if isinstance(start, int) and isinstance(end, int) and start > end:
            raise InvalidRequestError(
                f"startingOffsets ({start}) is after endingOffsets ({end})", topic=topic
            )


def _as_text(_: str, text: str) -> str:
    return text


def _as_topic(name: str, text: str) -> str:
    try:
        return str(TopicName.parse(text.strip()))
    except TopicNameError as error:
        raise TopicNameError(f"{name}: {error.message}", hint=error.hint) from error


def _as_pattern(name: str, text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequestError(
            f"{name} is not a regular expression: {error}",
            hint="for example '/default/orders-.*'",
        ) from error
    return text


def _as_flag(name: str, text: str) -> bool:
    flag = {"true": True, "false": False}.get(text.lower())
    if flag is None:
        raise InvalidRequestError(f"{name} is {text!r}", hint="either true or false")
    return flag


def _as_count(name: str, text: str) -> int:
    count = int(text) if _DIGITS.fullmatch(text) else 0
    if not 1 <= count <= _COUNT_MAX:
        raise InvalidRequestError(
            f"{name} is {text!r}", hint=f"a whole number from 1 to {_COUNT_MAX}"
        )
    return count


def _as_size(name: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _SIZE_UNITS[match[2].lower()] if match else 0
    if not 1 <= size <= _OFFSET_MAX:
        raise InvalidRequestError(
            f"{name} is {text!r}", hint="a number of bytes, such as 1048576, 512k or 64MiB"
        )
    return size


def _as_split_bytes(name: str, text: str) -> int:
    size = _as_size(name, text)
    if size < SPLIT_BYTES_MIN:
        raise InvalidRequestError(
            f"{name} is {size}", hint=f"at least {SPLIT_BYTES_MIN}: each task has a cost"
        )
    return size


def _as_seconds(name: str, text: str) -> float:
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= _TIMEOUT_SECONDS_MAX:
        raise InvalidRequestError(
            f"{name} is {text!r}",
            hint=f"a number of seconds above 0, at most {_TIMEOUT_SECONDS_MAX}",
        )
    return seconds


def _as_columns(name: str, text: str) -> tuple[str, ...]:
    columns = tuple(item.strip().lower() for item in text.split(","))
    for column in columns:
        if column not in COLUMNS:
            near = difflib.get_close_matches(column, COLUMNS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COLUMNS)}"
            raise InvalidRequestError(f"{name} names an unknown column {column!r}", hint=hint)
    _refuse_twice(name, columns)
    return columns


def _as_subscription(name: str, text: str) -> str:
    if _SUBSCRIPTION.fullmatch(text) is None:
        raise InvalidRequestError(
            f"{name} is {text!r}", hint="it has 1 to 120 ASCII letters, digits, '_' and '-'"
        )
    return text


def _as_brokers(name: str, text: str) -> tuple[str, ...]:
    try:
        brokers = parse_brokers(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{name} is {text!r}",
            hint="host:port, such as 127.0.0.1:6651, perhaps after grpc:// or grpc+tls://; "
            "several are separated by commas",
        ) from error
    _refuse_twice(name, brokers)
    return brokers


def _as_word(kind: type[_Word], name: str, text: str) -> _Word:
    try:
        return kind(text.lower())
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} is {text!r}", hint=f"one of: {', '.join(kind)}"
        ) from error


def _as_time_ms(name: str, text: str) -> int:
    """Milliseconds since the epoch, of a time between two of them the later one.

    Both ends mean the first message published at or after the time, and messages know
    milliseconds: rounding up keeps that meaning.
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
    if not 0 <= time_ms <= _TIME_MS_MAX:
        raise InvalidRequestError(
            f"{name} is {text!r}",
            hint="it lies between 1970 and 9999, and a bare number counts milliseconds",
        )
    return time_ms


def _as_offsets(name: str, text: str) -> dict[str, int | OffsetWord]:
    try:
        # Pairs, because a dict would hide a topic that is named twice.
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is {text!r}", hint=_OFFSETS_HINT) from error
    if not isinstance(pairs, _Pairs):
        raise InvalidRequestError(f"{name} is {text!r}", hint=_OFFSETS_HINT)
    topics = [_as_topic(name, topic) for topic, _ in pairs]
    _refuse_twice(name, topics)
    return {
        topic: _as_offset(name, topic, value)
        for topic, (_, value) in zip(topics, pairs, strict=True)
    }


_OFFSETS_HINT: Final = (
    'earliest, latest, or JSON of offsets by topic, such as {"/default/orders": 23}'
)


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object, in order."""


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
    if isinstance(value, _Pairs):
        hint = f'name partitions as topics: {{"{topic}": 23}}'
    else:
        hint = "an offset from 0 on, -2 or earliest, -1 or latest"
    raise InvalidRequestError(f"{name} has {value!r} for a topic", topic=topic, hint=hint)
