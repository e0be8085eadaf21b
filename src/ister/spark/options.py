"""Options of `format("ister")`: checks the texts that Spark passes, and converts them to values.

Owns: the table of all options, and which of them go together. Does not own: the forms of values
(`option_values`); what exists (topics, offsets, files); nothing here does I/O, so a wrong option is
refused before anything is opened.

An option that Spark's Kafka source has, too, has the same name here, or accepts that name as an
alias (`ALIASES`). Spark passes options as lower-case text and ignores misspelt ones; so names are
compared without regard to case, errors use the proper spelling, and an option that is unknown,
empty, or of the other direction or mode is refused. The results can be pickled: Spark sends them to
its workers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self

from ister.base.model import COLUMNS, AckLevel, Codec
from ister.base.partitions import partition_name
from ister.bucket.orphans import JOB_PREFIX, REPLAY_PREFIX
from ister.errors import InvalidRequestError
from ister.spark.option_values import (
    HEADERS,
    PAYLOAD_ERROR,
    ByTopic,
    OffsetsOption,
    OffsetWord,
    TimesOption,
    as_assigned,
    as_brokers,
    as_columns,
    as_count,
    as_duration_ms,
    as_flag,
    as_offsets,
    as_pattern,
    as_seconds,
    as_size,
    as_split_bytes,
    as_subscription,
    as_text,
    as_time_ms,
    as_times,
    as_topics,
    as_word,
    check_order,
)

TRIGGER_DELAY_MS_DEFAULT: Final = 15 * 60_000
"""How long a stream waits for `minMessagesPerTrigger`, as with Kafka."""


class PayloadFormat(StrEnum):
    """How the column `payload` is read."""

    BINARY = "binary"
    TEXT = "text"
    JSON = "json"


class PayloadErrors(StrEnum):
    """What to do with a payload that is not valid text or JSON."""

    NULL = "null"
    COLUMN = "column"
    FAIL = "fail"


class TimeStrategy(StrEnum):
    """Where to start if no message is as new as the starting time."""

    ERROR = "error"
    LATEST = "latest"


class ReplayedBatch(StrEnum):
    """What to do with a micro-batch that comes again with other rows than those in the topic."""

    WARN = "warn"
    ERROR = "error"


def _as_writer(name: str, text: str) -> str:
    """The name of a writer that is a stream."""
    from ister.topic.batches import check_writer_name  # noqa: PLC0415 - pyarrow

    check_writer_name(text)
    if text.startswith((JOB_PREFIX, REPLAY_PREFIX)):
        raise InvalidRequestError(
            f"{name} is {text!r}", hint=f"names with {JOB_PREFIX} and {REPLAY_PREFIX} are for jobs"
        )
    return text


# -- the table; docs/SPARK.md says what each of them means ----------------------------------------


class _Option(NamedTuple):
    name: str
    field: str
    """The field of `ReadOptions` or `WriteOptions`."""
    convert: Callable[[str, str], object]
    """From the name, for errors, and the text."""
    only: Literal["batch", "stream"] | None = None


_READ: Final = (
    _Option("topic", "topics", as_topics),
    _Option("topicPattern", "topic_pattern", as_pattern),
    _Option("assign", "assigned", as_assigned),
    _Option("config", "config", as_text),
    _Option("broker", "brokers", as_brokers),
    _Option("startingOffsets", "starting_offsets", as_offsets),
    _Option("endingOffsets", "ending_offsets", as_offsets, "batch"),
    _Option("startingTimestamp", "starting_timestamp_ms", as_time_ms),
    _Option("endingTimestamp", "ending_timestamp_ms", as_time_ms, "batch"),
    _Option("startingOffsetsByTimestamp", "starting_times", as_times),
    _Option("endingOffsetsByTimestamp", "ending_times", as_times, "batch"),
    _Option("startingOffsetsByTimestampStrategy", "strategy", partial(as_word, TimeStrategy)),
    _Option("maxMessagesPerTrigger", "max_messages_per_trigger", as_count, "stream"),
    _Option("maxBytesPerTrigger", "max_bytes_per_trigger", as_size, "stream"),
    _Option("minMessagesPerTrigger", "min_messages_per_trigger", as_count, "stream"),
    _Option("maxTriggerDelay", "max_trigger_delay_ms", as_duration_ms, "stream"),
    _Option("minPartitions", "min_partitions", as_count),
    _Option("splitBytes", "split_bytes", as_split_bytes),
    _Option("columns", "columns", as_columns),
    _Option("includeHeaders", "include_headers", as_flag),
    _Option("payloadFormat", "payload_format", partial(as_word, PayloadFormat)),
    _Option("payloadSchema", "payload_schema", as_text),
    _Option("payloadErrors", "payload_errors", partial(as_word, PayloadErrors)),
    _Option("pushdown", "pushdown", as_flag, "batch"),
    _Option("failOnDataLoss", "fail_on_data_loss", as_flag),
    _Option("includeTail", "include_tail", as_flag),
    _Option("includeUnreachableTail", "include_unreachable_tail", as_flag),
    _Option("subscription", "subscription", as_subscription, "stream"),
)
_WRITE: Final = (
    _Option("topic", "topics", as_topics),
    _Option("config", "config", as_text),
    _Option("broker", "brokers", as_brokers),
    _Option("createTopics", "create_topics", as_flag),
    _Option("ack", "ack", partial(as_word, AckLevel)),
    _Option("codec", "codec", partial(as_word, Codec)),
    _Option("producerName", "producer_name", as_text),
    _Option("commitTimeoutSeconds", "commit_timeout_seconds", as_seconds),
    _Option("writer", "writer", _as_writer, "stream"),
    _Option("replayedBatch", "replayed_batch", partial(as_word, ReplayedBatch), "stream"),
)

READ_OPTIONS: Final = tuple(one.name for one in _READ)
WRITE_OPTIONS: Final = tuple(one.name for one in _WRITE)

ALIASES: Final[Mapping[str, str]] = {
    "subscribe": "topic",
    "subscribePattern": "topicPattern",
    "maxOffsetsPerTrigger": "maxMessagesPerTrigger",
    "minOffsetsPerTrigger": "minMessagesPerTrigger",
}
"""Names of Spark's Kafka source that mean the same as ours, for a read."""

# What `load(path)` and `save(path)` set.
_PATH: Final = _Option("path", "path", as_text)

# Spark passes its own settings of a streaming query to the sink, too.
_SPARKS_OWN: Final = frozenset(
    {
        "checkpointlocation",
        "queryname",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
    }
)

# Names in other connectors, in lower case, and what to do instead.
_FOREIGN_NAMES: Final[Mapping[str, str]] = {
    "topics": "Ister calls it topic",
    "topicspattern": "Ister calls it topicPattern",
    "service.url": "Ister calls it broker",
    "maxrowspertrigger": "Ister calls it maxMessagesPerTrigger",
    "predefinedsubscription": "Ister calls it subscription",
    "maxrecordsperpartition": "use splitBytes, which limits the bytes that a task reads",
    "groupidprefix": "a stream's position is in its checkpoint; subscription shows it to others",
    "kafka.group.id": "a stream's position is in its checkpoint; subscription shows it to others",
    "kafka.bootstrap.servers": "Ister does not read from Kafka's brokers: set config (a data "
    "directory or an ister.yml) or broker (host:port of an Ister broker)",
}
_CALLS_IT: Final = "Ister calls it"
_KAFKA: Final = "kafka."
_TABLE_HINT: Final = (
    "Spark does not pass the options of a table; set them in the query: SELECT * FROM t WITH "
    "(config = './data', topic = '/default/orders'), INSERT INTO t WITH (...) SELECT ..."
)
_KAFKA_HINT: Final = (
    "it configures Kafka's client, which Ister does not use: stores and limits are in the file "
    "that config names, credentials in the environment (ISTER_TOKEN, ISTER_TLS_CA)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a batch or a stream reads, and how."""

    is_streaming: bool
    topics: tuple[str, ...] = ()
    """The names in `topic`; empty if there is a pattern."""
    topic_pattern: str | None = None
    """A regular expression; see `matches`."""
    assigned: tuple[tuple[str, int], ...] = ()
    """Topics and numbers of partitions, instead of `topics` and a pattern."""
    config: str | None = None
    brokers: tuple[str, ...] = ()
    """The Flight addresses in `broker`, each with a scheme."""
    starting_offsets: OffsetsOption
    ending_offsets: OffsetsOption
    starting_timestamp_ms: int | None = None
    """Takes precedence over `starting_offsets`."""
    ending_timestamp_ms: int | None = None
    """Takes precedence over `ending_offsets`."""
    starting_times: TimesOption = field(default_factory=ByTopic)
    """Take precedence over `starting_offsets`, but not over `starting_timestamp_ms`."""
    ending_times: TimesOption = field(default_factory=ByTopic)
    time_must_match: bool = False
    """Whether to fail if no message is as new as the starting time, or else start at the end."""
    max_messages_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    """A soft limit; if both are given, both apply."""
    min_messages_per_trigger: int | None = None
    max_trigger_delay_ms: int = TRIGGER_DELAY_MS_DEFAULT
    """How long a stream waits for `min_messages_per_trigger`."""
    min_partitions: int | None = None
    split_bytes: int | None = None
    """None: the default, or less if that would leave a small cluster partly idle."""
    columns: tuple[str, ...] | None = None
    """None for all, or for those of the user's schema."""
    include_headers: bool = False
    payload_format: PayloadFormat | None = None
    """None: binary, or what the user's schema says."""
    payload_schema: str | None = None
    """DDL, a JSON Schema, or `registry`."""
    payload_errors: PayloadErrors = PayloadErrors.NULL
    pushdown: bool = False
    fail_on_data_loss: bool = True
    include_tail: bool = True
    include_unreachable_tail: bool = True
    """Whether a read that ends fails if messages cannot be read, or else leaves them out."""
    subscription: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_streaming: bool) -> Self:
        """Checks the options of a read, as Spark passes them: text, with names in any case."""
        given = _Given(options, _READ, is_streaming=is_streaming)
        values, topics = given.values, given.values.get("topics", ())
        given.check_one_of("topics", "topic_pattern", "assigned")
        given.check_place()
        starting = given.end_of_range(
            "starting_offsets",
            default="latest" if is_streaming else "earliest",
            refused=None if is_streaming else "latest",
        )
        ending = given.end_of_range("ending_offsets", default="latest", refused="earliest")
        for name in ("starting_offsets", "ending_offsets", "starting_times", "ending_times"):
            if name in given.called:
                values[name].check_named(given.called[name], topics)
        check_order(starting, ending)
        first_ms, last_ms = values.get("starting_timestamp_ms"), values.get("ending_timestamp_ms")
        if first_ms is not None and last_ms is not None and first_ms > last_ms:
            raise InvalidRequestError(
                f"startingTimestamp ({first_ms} ms) is after endingTimestamp ({last_ms} ms)"
            )
        by_default = TimeStrategy.LATEST
        if first_ms is None and any(values.get("starting_times", ByTopic[int]()).names()):
            by_default = TimeStrategy.ERROR
        values["time_must_match"] = values.pop("strategy", by_default) is TimeStrategy.ERROR
        if "max_trigger_delay_ms" in values and "min_messages_per_trigger" not in values:
            raise InvalidRequestError(
                "maxTriggerDelay is given without minMessagesPerTrigger",
                hint="it is how long a micro-batch waits for that many messages",
            )
        if "payload_schema" in values:
            form = values.setdefault("payload_format", PayloadFormat.JSON)
            if form is not PayloadFormat.JSON:
                raise InvalidRequestError(
                    f"payloadSchema is given, and payloadFormat is {form}",
                    hint="set payloadFormat to json, or omit payloadSchema",
                )
        if "payload_errors" in values and values.get("payload_format") is PayloadFormat.BINARY:
            raise InvalidRequestError(
                "payloadErrors is given, and payloadFormat is binary",
                hint="set payloadFormat to text or json, or omit payloadErrors",
            )
        return cls(is_streaming=is_streaming, **values)

    @property
    def all_columns(self) -> tuple[str, ...] | None:
        """The columns, with those that other options add; None for those of a message."""
        names = list(self.columns or COLUMNS)
        added = [HEADERS] if self.include_headers else []
        added += [PAYLOAD_ERROR] if self.payload_errors is PayloadErrors.COLUMN else []
        names += [name for name in added if name not in names]
        return None if self.columns is None and not added else tuple(names)

    @property
    def has_range(self) -> bool:
        """Whether options narrow the range of offsets or times."""
        return (
            self.starting_timestamp_ms is not None
            or self.ending_timestamp_ms is not None
            or self.pushdown
            or any(
                any(given.names())
                for given in (
                    self.starting_offsets,
                    self.ending_offsets,
                    self.starting_times,
                    self.ending_times,
                )
            )
        )

    def start_time_ms(self, topic: str) -> int | None:
        """Returns the publish time at which a topic starts; None if offsets say where."""
        given = self.starting_timestamp_ms
        return self.starting_times.find(topic) if given is None else given

    def end_time_ms(self, topic: str) -> int | None:
        """Returns the publish time before which a topic ends; None if offsets say where."""
        given = self.ending_timestamp_ms
        return self.ending_times.find(topic) if given is None else given

    def check_topics(self, topics: Collection[str]) -> None:
        """Checks that the topics for which there are offsets or times were found."""
        self.starting_offsets.check_known("startingOffsets", topics)
        self.ending_offsets.check_known("endingOffsets", topics)
        self.starting_times.check_known("startingOffsetsByTimestamp", topics)
        self.ending_times.check_known("endingOffsetsByTimestamp", topics)

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
    commit_timeout_seconds: float = 60.0
    """How long to wait for the lock of the log, or for the broker."""
    writer: str | None = None
    """The name under which micro-batches are counted; None for the query's id."""
    replayed_batch: ReplayedBatch = ReplayedBatch.WARN

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_streaming: bool) -> Self:
        """Checks the options of a write, as Spark passes them: text, with names in any case.

        Options that Spark itself adds for a streaming query are ignored.
        """
        given = _Given(options, _WRITE, is_streaming=is_streaming)
        topics = given.values.pop("topics", (None,))
        if len(topics) > 1:
            raise InvalidRequestError(
                f"topic names {len(topics)} topics, and a row is written to one",
                hint="omit the option, and name the topic of each row in a column `topic`",
            )
        given.check_place()
        return cls(is_streaming=is_streaming, topic=topics[0], **given.values)


def has_stream_options(options: Mapping[str, str]) -> bool:
    """Whether one of the options is for a stream only."""
    known = {one.name for one in (*_READ, *_WRITE) if one.only == "stream"}
    known |= {alias for alias, name in ALIASES.items() if name in known}
    return not {name.lower() for name in known}.isdisjoint(name.lower() for name in options)


class _Given:
    """The given options, by the names of their fields; checks the options' names."""

    def __init__(
        self, options: Mapping[str, str], known: tuple[_Option, ...], *, is_streaming: bool
    ) -> None:
        self.values: dict[str, Any] = {}
        self.called: dict[str, str] = {}
        """The name that was given, in its proper spelling."""
        is_reading = known is _READ
        aliases = ALIASES if is_reading else {}
        by_name = {one.name: one for one in (*known, _PATH)}
        spellings = {name.lower(): name for name in (*by_name, *aliases)}
        for spelling, text in options.items():
            called = spellings.get(spelling.lower())
            if called is None:
                if is_streaming and not is_reading and spelling.lower() in _SPARKS_OWN:
                    continue
                raise _unknown(spelling, known)
            option = by_name[aliases.get(called, called)]
            if option.only == "stream" and not is_streaming:
                raise InvalidRequestError(
                    f"the option {called} is not for a batch",
                    hint="it belongs to a stream, "
                    f"{'spark.readStream' if is_reading else 'df.writeStream'}",
                )
            if option.only == "batch" and is_streaming:
                raise InvalidRequestError(
                    f"the option {called} is not for a stream",
                    hint="it belongs to a batch, spark.read",
                )
            other = self.called.get(option.field)
            if other is not None:
                raise InvalidRequestError(
                    f"the option {called} is given twice"
                    if other == called
                    else f"both {other} and {called} are given",
                    hint=None if other == called else "they mean the same: set one",
                )
            if not isinstance(text, str) or not text.strip():
                raise InvalidRequestError(
                    f"the option {called} is empty", hint="omit it, or set a value"
                )
            self.called[option.field] = called
            self.values[option.field] = option.convert(called, text.strip())

    def check_one_of(self, *fields: str) -> None:
        """Checks that exactly one of several options is given."""
        found = [self.called[name] for name in fields if name in self.called]
        if len(found) == 1:
            return
        self._check_any()
        raise InvalidRequestError(
            f"both {' and '.join(found[:2])} are given" if found else "no topic is given",
            hint="set one of topic, topicPattern, assign",
        )

    def _check_any(self) -> None:
        if not self.called:
            raise InvalidRequestError("no option is given", hint=_TABLE_HINT)

    def check_place(self) -> None:
        """Checks that at least one of config and brokers is given; `path` is the config."""
        self._check_any()
        path = self.values.pop(_PATH.field, None)
        if path is not None:
            if "config" in self.values:
                raise InvalidRequestError(
                    "both config and path are given",
                    hint="load(path) and save(path) mean the same as the option config: set one",
                )
            self.values["config"] = path
        if self.values.keys().isdisjoint(("config", "brokers")):
            raise InvalidRequestError(
                "neither config nor broker is given",
                hint="config names an ister.yml or a data directory, broker a host:port",
            )

    def end_of_range(
        self, name: str, *, default: OffsetWord, refused: OffsetWord | None
    ) -> OffsetsOption:
        """Completes `startingOffsets` or `endingOffsets`; topics missing in JSON get the default.

        `earliest` or `latest` is refused where it makes a batch empty.
        """
        found: OffsetsOption = self.values.get(name, OffsetsOption())
        words = [(None, found.otherwise), *found.by_topic.items()]
        words += [(partition_name(*key), value) for key, value in found.by_partition.items()]
        for topic, value in words:
            if refused is not None and value == refused:
                raise InvalidRequestError(
                    f"{self.called[name]} of a batch cannot be {refused}",
                    topic=topic,
                    hint="the batch would be empty; use an offset, or omit the option",
                )
        if found.otherwise is None:
            found = replace(found, otherwise=default)
        self.values[name] = found
        return found


def _unknown(spelling: str, known: tuple[_Option, ...]) -> InvalidRequestError:
    lowered = spelling.lower()
    is_reading = known is _READ
    for one in _WRITE if is_reading else _READ:
        if one.name.lower() == lowered:
            here, there = ("reading", "writing") if is_reading else ("writing", "reading")
            return InvalidRequestError(
                f"the option {one.name} is not for {here}", hint=f"it belongs to {there}"
            )
    spellings = {one.name.lower(): one.name for one in known}
    near = difflib.get_close_matches(lowered, spellings, n=1)
    foreign = _FOREIGN_NAMES.get(lowered)
    if foreign is not None and (
        not foreign.startswith(_CALLS_IT) or foreign.split()[-1] in spellings.values()
    ):
        hint = foreign
    elif lowered.startswith(_KAFKA):
        hint = _KAFKA_HINT
    elif lowered in _SPARKS_OWN:
        hint = "it belongs to a streaming query: df.writeStream.option(...)"
    elif near:
        hint = f"did you mean {spellings[near[0]]}?"
    else:
        hint = f"known: {', '.join(spellings.values())}"
    return InvalidRequestError(f"unknown option {spelling!r}", hint=hint)
