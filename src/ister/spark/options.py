"""Options of `format("ister")`: checks the texts that Spark passes, and converts them to values.

Owns: the names and defaults of all options, and which of them go together. Does not own: the forms
of values (`option_values`); what exists (topics, offsets, files); nothing here does I/O, so a wrong
option is refused before anything is opened.

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
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final, Literal, Self, TypeVar

from ister.base.model import COLUMNS, AckLevel, Codec
from ister.base.partitions import base_of_partition, partition_name
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
    as_offset_word,
    as_offsets,
    as_pattern,
    as_seconds,
    as_size,
    as_split_bytes,
    as_subscription,
    as_text,
    as_time_ms,
    as_times,
    as_topic,
    as_word,
    check_order,
    refuse_twice,
    refuse_word,
)

COMMIT_TIMEOUT_SECONDS_DEFAULT: Final = 60.0
"""How long a sink waits for the log's lock, or for the broker."""

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


READ_OPTIONS: Final[Mapping[str, str]] = {
    "topic": "topics to read: /namespace/topic names, separated by commas",
    "topicPattern": "Python regular expression that matches whole topic names",
    "assign": "partitions to read, as JSON of partition numbers per topic; a topic without "
    "partitions has partition 0",
    "config": "path of an ister.yml or of a data directory; load(path) sets it, too",
    "broker": "Flight addresses of brokers, host:port, separated by commas (default: those in the "
    "metadata store)",
    "startingOffsets": "earliest, latest, or JSON of an offset per topic or per "
    "topic and partition (default: earliest for a batch, latest for a stream)",
    "endingOffsets": "latest, or JSON as for startingOffsets, not included (batch only; "
    "default: latest)",
    "startingTimestamp": "start at the first message published at or after this time: "
    "milliseconds since the epoch, or ISO-8601 with a zone",
    "endingTimestamp": "end before the first message published at or after this time (batch only)",
    "startingOffsetsByTimestamp": "JSON of a time per topic, or per topic and partition, as for "
    "startingTimestamp, which takes precedence",
    "endingOffsetsByTimestamp": "JSON of a time per topic, or per topic and partition, as for "
    "endingTimestamp, which takes precedence (batch only)",
    "startingOffsetsByTimestampStrategy": "if no message is that new: error, or latest to start at "
    "the end (default: error with startingOffsetsByTimestamp, latest with startingTimestamp)",
    "maxMessagesPerTrigger": "maximum messages in a micro-batch, over all topics (stream only)",
    "maxBytesPerTrigger": "approximate bytes in a micro-batch, over all topics (stream only)",
    "minMessagesPerTrigger": "wait for this many messages, over all topics, before a micro-batch "
    "(stream only)",
    "maxTriggerDelay": "how long to wait for minMessagesPerTrigger, such as 30s or 15m (stream "
    "only; default: 15m)",
    "minPartitions": "minimum number of partitions, if the indexes allow it",
    "splitBytes": "approximate bytes in a partition, before compression (default: up to 64 MiB)",
    "columns": "columns to read, separated by commas (default: all)",
    "includeHeaders": "add a column headers: the attributes in the form of Kafka's headers "
    "(default: false)",
    "payloadFormat": "format of payloads: binary, text (UTF-8, as a string), or json (as a struct; "
    "see payloadSchema) (default: the one for the type of payload in a given schema, or binary)",
    "payloadSchema": "fields of a JSON payload: DDL such as 'id BIGINT, note STRING', a JSON "
    "Schema, or registry for the topic's schema in the schema registry",
    "payloadErrors": "what to do with a payload that is not valid text or JSON: null, column "
    "(null, with the reason in a column payload_error), or fail (default: null)",
    "pushdown": "let Spark push filters down; for a DataFrame that is scanned once (batch only; "
    "default: false)",
    "failOnDataLoss": "fail if messages to read are gone; otherwise log a warning and continue "
    "(default: true)",
    "includeTail": "also read what is not in the bucket yet (default: true)",
    "includeUnreachableTail": "fail if the newest messages of a topic cannot be read, because they "
    "are on the disk of a node that is not running; with false, read the others (default: true)",
    "subscription": "subscription whose cursor follows the stream, so that local files are kept "
    "until they are read (stream only)",
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
    "writer": "stream: name under which micro-batches are counted (default: the query's id)",
    "replayedBatch": "stream: what to do if a micro-batch that is in the topic comes again with "
    "other rows: warn or error (default: warn)",
}
"""The options of a write, each with a description."""

ALIASES: Final[Mapping[str, str]] = {
    "subscribe": "topic",
    "subscribePattern": "topicPattern",
    "maxOffsetsPerTrigger": "maxMessagesPerTrigger",
    "minOffsetsPerTrigger": "minMessagesPerTrigger",
}
"""Names of Spark's Kafka source that mean the same as ours, for a read."""

_STREAM_ONLY: Final = frozenset(
    {
        "maxMessagesPerTrigger",
        "maxBytesPerTrigger",
        "minMessagesPerTrigger",
        "maxTriggerDelay",
        "subscription",
        "writer",
        "replayedBatch",
    }
)
_STREAM_SPELLINGS: Final = {name.lower() for name in _STREAM_ONLY} | {
    alias.lower() for alias, name in ALIASES.items() if name in _STREAM_ONLY
}
_BATCH_ONLY: Final = frozenset(
    {"endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "pushdown"}
)

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
        """Checks the options of a read, as Spark passes them: text, with names in any case.

        Raises:
            InvalidRequestError: An option is unknown, missing, misplaced or invalid.
            TopicNameError: `topic`, or JSON of offsets, has an invalid topic name.
        """
        given = _Given(options, direction="reading", is_streaming=is_streaming)
        topics, pattern = given.topics("topic"), given.get("topicPattern", as_pattern)
        assigned = given.get("assign", as_assigned) or ()
        given.check_one_of("topic", "topicPattern", "assign")
        config, brokers = given.place()
        starting = given.end_of_range(
            "startingOffsets",
            topics,
            default="latest" if is_streaming else "earliest",
            refused=None if is_streaming else "latest",
        )
        ending = given.end_of_range("endingOffsets", topics, default="latest", refused="earliest")
        check_order(starting, ending)
        starting_ms = given.get("startingTimestamp", as_time_ms)
        ending_ms = given.get("endingTimestamp", as_time_ms)
        if starting_ms is not None and ending_ms is not None and starting_ms > ending_ms:
            raise InvalidRequestError(
                f"startingTimestamp ({starting_ms} ms) is after endingTimestamp ({ending_ms} ms)"
            )
        times = given.times("startingOffsetsByTimestamp", topics)
        strategy = given.get("startingOffsetsByTimestampStrategy", partial(as_word, TimeStrategy))
        if strategy is None and starting_ms is None and any(times.names()):
            strategy = TimeStrategy.ERROR
        payload_format, payload_schema, payload_errors = given.payload()
        return cls(
            is_streaming=is_streaming,
            topics=topics,
            topic_pattern=pattern,
            assigned=assigned,
            config=config,
            brokers=brokers,
            starting_offsets=starting,
            ending_offsets=ending,
            starting_timestamp_ms=starting_ms,
            ending_timestamp_ms=ending_ms,
            starting_times=times,
            ending_times=given.times("endingOffsetsByTimestamp", topics),
            time_must_match=strategy is TimeStrategy.ERROR,
            max_messages_per_trigger=given.get("maxMessagesPerTrigger", as_count),
            max_bytes_per_trigger=given.get("maxBytesPerTrigger", as_size),
            min_messages_per_trigger=given.get("minMessagesPerTrigger", as_count),
            max_trigger_delay_ms=given.trigger_delay_ms(),
            min_partitions=given.get("minPartitions", as_count),
            split_bytes=given.get("splitBytes", as_split_bytes),
            columns=given.get("columns", as_columns),
            include_headers=given.flag("includeHeaders", default=False),
            payload_format=payload_format,
            payload_schema=payload_schema,
            payload_errors=payload_errors,
            pushdown=given.flag("pushdown", default=False),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            include_tail=given.flag("includeTail", default=True),
            include_unreachable_tail=given.flag("includeUnreachableTail", default=True),
            subscription=given.get("subscription", as_subscription),
        )

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
        """Checks that the topics for which there are offsets or times were found.

        Raises:
            InvalidRequestError: One was not.
        """
        self.starting_offsets.check_known("startingOffsets", topics)
        self.ending_offsets.check_known("endingOffsets", topics)
        self.starting_times.check_known("startingOffsetsByTimestamp", topics)
        self.ending_times.check_known("endingOffsetsByTimestamp", topics)

    def matches(self, topic: str) -> bool:
        """Returns whether a topic is one of those to read."""
        if self.topic_pattern is None:
            return topic in self.topics
        return re.fullmatch(self.topic_pattern, topic) is not None


class ReplayedBatch(StrEnum):
    """What to do with a micro-batch that comes again with other rows than those in the topic."""

    WARN = "warn"
    ERROR = "error"


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
    writer: str | None = None
    """The name under which micro-batches are counted; None for the query's id."""
    replayed_batch: ReplayedBatch = ReplayedBatch.WARN

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
            ack=given.get("ack", partial(as_word, AckLevel)),
            codec=given.get("codec", partial(as_word, Codec)),
            producer_name=given.get("producerName", as_text),
            commit_timeout_seconds=given.get("commitTimeoutSeconds", as_seconds)
            or COMMIT_TIMEOUT_SECONDS_DEFAULT,
            writer=given.get("writer", _as_writer),
            replayed_batch=given.get("replayedBatch", partial(as_word, ReplayedBatch))
            or ReplayedBatch.WARN,
        )


def _as_writer(name: str, text: str) -> str:
    """The name of a writer that is a stream."""
    from ister.topic.batches import check_writer_name  # noqa: PLC0415 - pyarrow

    check_writer_name(text)
    if text.startswith((JOB_PREFIX, REPLAY_PREFIX)):
        raise InvalidRequestError(
            f"{name} is {text!r}", hint=f"names with {JOB_PREFIX} and {REPLAY_PREFIX} are for jobs"
        )
    return text


_Value = TypeVar("_Value")


def has_stream_options(options: Mapping[str, str]) -> bool:
    """Whether one of the options is for a stream only."""
    given = {name.lower() for name in options}
    return not given.isdisjoint(_STREAM_SPELLINGS)


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
        if is_reading:
            spellings |= {alias.lower(): name for alias, name in ALIASES.items()}
        other_spellings = {name.lower(): name for name in others}
        self._texts: dict[str, str] = {}
        self._spelled: dict[str, str] = {}
        proper = {name.lower(): name for name in (*known, _PATH, *ALIASES)}
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
            called = proper[lowered]
            if name in _STREAM_ONLY and not is_streaming:
                raise InvalidRequestError(
                    f"the option {called} is not for a batch",
                    hint="it belongs to a stream, "
                    f"{'spark.readStream' if is_reading else 'df.writeStream'}",
                )
            if name in _BATCH_ONLY and is_streaming:
                raise InvalidRequestError(
                    f"the option {name} is not for a stream",
                    hint="it belongs to a batch, spark.read",
                )
            if name in self._texts:
                other = self._spelled[name]
                raise InvalidRequestError(
                    f"the option {name} is given twice"
                    if other == called
                    else f"both {other} and {called} are given",
                    hint=None if other == called else "they mean the same: set one",
                )
            if not isinstance(text, str) or not text.strip():
                raise InvalidRequestError(
                    f"the option {called} is empty", hint="omit it, or set a value"
                )
            self._texts[name], self._spelled[name] = text.strip(), called

    def get(self, name: str, convert: Callable[[str, str], _Value]) -> _Value | None:
        """Returns the value of an option; None if it was not given."""
        text = self._texts.get(name)
        return None if text is None else convert(self._spelled[name], text)

    def check_one_of(self, *names: str) -> None:
        """Checks that exactly one of several options is given."""
        found = [self._spelled[name] for name in names if name in self._texts]
        if len(found) == 1:
            return
        if not self._texts:
            raise InvalidRequestError("no option is given", hint=_TABLE_HINT)
        raise InvalidRequestError(
            f"both {' and '.join(found[:2])} are given" if found else "no topic is given",
            hint=f"set one of {', '.join(names)}",
        )

    def flag(self, name: str, *, default: bool) -> bool:
        found = self.get(name, as_flag)
        return default if found is None else found

    def place(self) -> tuple[str | None, tuple[str, ...]]:
        """Returns the config and the brokers; at least one is given."""
        config, path = self.get("config", as_text), self.get(_PATH, as_text)
        if config is not None and path is not None:
            raise InvalidRequestError(
                "both config and path are given",
                hint="load(path) and save(path) mean the same as the option config: set one",
            )
        brokers = self.get("broker", as_brokers) or ()
        if not self._texts:
            raise InvalidRequestError("no option is given", hint=_TABLE_HINT)
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
        called = self._spelled[name]
        names = tuple(as_topic(called, item) for item in text.split(","))
        refuse_twice(called, names)
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
        word = as_offset_word(text)
        if word is not None:
            refuse_word(name, word, refused)
            return OffsetsOption(otherwise=word)
        found = as_offsets(name, text)
        _check_named(name, found, topics)
        for values in (found.by_topic, found.by_partition):
            for topic, offset in values.items():
                refuse_word(name, offset, refused, topic=_name_of(topic))
        return OffsetsOption(
            otherwise=default, by_topic=found.by_topic, by_partition=found.by_partition
        )

    def times(self, name: str, topics: tuple[str, ...]) -> TimesOption:
        """Returns `startingOffsetsByTimestamp` or `endingOffsetsByTimestamp`."""
        found = self.get(name, as_times)
        if found is None:
            return ByTopic()
        _check_named(name, found, topics)
        return found

    def trigger_delay_ms(self) -> int:
        """Returns `maxTriggerDelay`, which needs a minimum to wait for."""
        found = self.get("maxTriggerDelay", as_duration_ms)
        if found is not None and "minMessagesPerTrigger" not in self._texts:
            raise InvalidRequestError(
                "maxTriggerDelay is given without minMessagesPerTrigger",
                hint="it is how long a micro-batch waits for that many messages",
            )
        return TRIGGER_DELAY_MS_DEFAULT if found is None else found

    def payload(self) -> tuple[PayloadFormat | None, str | None, PayloadErrors]:
        """Returns `payloadFormat`, `payloadSchema` and `payloadErrors`."""
        form = self.get("payloadFormat", partial(as_word, PayloadFormat))
        schema = self.get("payloadSchema", as_text)
        if schema is not None and form is None:
            form = PayloadFormat.JSON
        if schema is not None and form is not PayloadFormat.JSON:
            raise InvalidRequestError(
                f"payloadSchema is given, and payloadFormat is {form}",
                hint="set payloadFormat to json, or omit payloadSchema",
            )
        errors = self.get("payloadErrors", partial(as_word, PayloadErrors))
        if errors is not None and form is PayloadFormat.BINARY:
            raise InvalidRequestError(
                "payloadErrors is given, and payloadFormat is binary",
                hint="set payloadFormat to text or json, or omit payloadErrors",
            )
        return form, schema, errors or PayloadErrors.NULL


def _check_named(name: str, found: ByTopic[_Value], topics: tuple[str, ...]) -> None:
    """Raises an error if JSON names a topic that the option `topic` does not."""
    for topic in found.topics():
        # The name of a partitioned topic stands for its partitions.
        if topics and topic not in topics and base_of_partition(topic) not in topics:
            raise InvalidRequestError(
                f"{name} names a topic that is not in the option topic",
                topic=topic,
                hint=f"the option topic names {', '.join(topics)}",
            )


def _name_of(topic: str | tuple[str, int]) -> str:
    return topic if isinstance(topic, str) else partition_name(*topic)


def _unknown(spelling: str, known: Mapping[str, str]) -> InvalidRequestError:
    lowered = spelling.lower()
    spellings = {name.lower(): name for name in known}
    near = difflib.get_close_matches(lowered, spellings, n=1)
    foreign = _FOREIGN_NAMES.get(lowered)
    if foreign is not None and (not foreign.startswith(_CALLS_IT) or foreign.split()[-1] in known):
        hint = foreign
    elif lowered.startswith(_KAFKA):
        hint = _KAFKA_HINT
    elif lowered in _SPARKS_OWN:
        hint = "it belongs to a streaming query: df.writeStream.option(...)"
    elif near:
        hint = f"did you mean {spellings[near[0]]}?"
    else:
        hint = f"known: {', '.join(known)}"
    return InvalidRequestError(f"unknown option {spelling!r}", hint=hint)
