"""Messages of ranges for Kafka's consumers, and the offsets of ends and times.

    read what is there ─► enough, or waited long enough? ─► answer
            ▲                       │
            └── something visible ◄─┘

Owns: what a Fetch and a ListOffsets are answered with, and the readers of a connection. Does not
own: batches (`records`), reading (`ister.topic.reader`), searches for a time
(`ister.broker.topics.time_searches`).

A fetch without messages waits for the partitions that it asks for, and holds nothing but their
waiters. At least one message is answered, however large it is. Sessions of fetches are not offered:
each request names its partitions. What compaction has left out is left out of the batches.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kio.schema.errors import ErrorCode

from ister.base.limits import KIB
from ister.base.model import Codec
from ister.broker.kafka.protocol import Entity, KafkaError, Request, code_of
from ister.broker.kafka.records import (
    NO_HEADERS,
    TIME_MAX,
    Record,
    Stored,
    encode_batch,
    to_record,
)
from ister.broker.kafka.topics import KafkaTopics, log_of
from ister.broker.security.guard import current_principal
from ister.broker.security.principal import ANONYMOUS
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.time_searches import OnRead
from ister.errors import IsterError, OffsetOutOfRangeError
from ister.format.message import Suffix, decode_suffix, split
from ister.topic.message import Message, stored_body
from ister.topic.reader import Reader
from ister.topic.topic import Topic

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
_MESSAGES_MAX: Final = 8192
_READERS_MAX: Final = 1024
_SUFFIXES_MAX: Final = 1024
_SUFFIX_BYTES_MAX: Final = 512
# Sizes below it are one byte.
_SHORT_KEY: Final = 0xFB
# So long batches are made before others have a turn on the loop.
_TURN_BYTES: Final = 256 * KIB
_WAIT_SECONDS_MAX: Final = 60.0
# Each step of the search for the newest time finds a later one.
_STEPS_MAX: Final = 1000


class RecordDecoder:
    """Makes records of stored messages; what many messages have in common is decoded once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._identity = b""
        self._suffixes: dict[bytes, Suffix] = {}
        # The suffix of messages without a key and attributes.
        self._plain = b""
        # What comes before the key in the suffix of messages with a key and no attributes.
        self._before_key = b""

    def records(self, messages: Iterable[Message]) -> list[tuple[int, Record]]:
        """The records of messages, each with its offset.

        Raises:
            CorruptDataError: A message cannot be decoded.
        """
        found: list[tuple[int, Record]] = []
        codec = self._codec
        for message in messages:
            body = stored_body(message)
            if body is None:
                record = message.record
                stored = Stored(
                    record.payload, record.publish_time, record.routing_key, record.attributes
                )
                found.append((message.offset, to_record(stored)))
                continue
            buffer, start, end, _ = body
            _, self._identity, payload_at, payload_end, time, suffix_at = split(
                buffer, start, end, codec, self._identity
            )
            data = buffer[suffix_at:end]
            payload = buffer[payload_at:payload_end]
            if data == self._plain and time <= TIME_MAX:
                found.append((message.offset, Record(time, None, payload, NO_HEADERS)))
                continue
            before = self._before_key
            size = len(data) - len(before) - 1
            if before and 0 <= size < _SHORT_KEY and data.startswith(before) and time <= TIME_MAX:
                key = data[-size:] if size else b""
                if data[len(before)] == size and key.isascii():
                    found.append((message.offset, Record(time, key, payload, NO_HEADERS)))
                    continue
            suffix = self._suffix(data)
            stored = Stored(payload, time, suffix.routing_key, suffix.attributes)
            found.append((message.offset, to_record(stored)))
        return found

    def _suffix(self, data: bytes) -> Suffix:
        found = self._suffixes.get(data)
        if found is None:
            found = decode_suffix(data, self._codec)
            if len(data) <= _SUFFIX_BYTES_MAX:
                if len(self._suffixes) >= _SUFFIXES_MAX:
                    self._suffixes.clear()
                self._suffixes[data] = found
            if found.routing_key is None and not found.attributes:
                self._plain = data
            if self._codec is Codec.BINCODE2 and found.routing_key and not found.attributes:
                key = found.routing_key.encode()
                if len(key) < _SHORT_KEY:
                    self._before_key = data[: -len(key) - 1]
        return found


class _OpenReader:
    """A reader of one partition, and what makes records of its messages."""

    def __init__(self, topic: Topic, offset: int) -> None:
        self.topic = topic
        self.core: Reader = topic.reader(offset)
        self.decoder = RecordDecoder(topic.codec)


class Readers:
    """The readers of one connection: a consumer goes on where it was."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _OpenReader] = OrderedDict()

    def at(self, topic: Topic, offset: int) -> _OpenReader:
        """A reader of a topic at an offset.

        Raises:
            OffsetOutOfRangeError: The topic has no such offset.
        """
        found = self._open.pop(topic.name, None)
        if found is not None and (found.topic is not topic or found.core.is_closed):
            found.core.close()
            found = None
        if found is None:
            found = _OpenReader(topic, offset)
        elif found.core.next_offset != offset:
            try:
                found.core.seek(offset)
            except BaseException:
                found.core.close()
                raise
        self._open[topic.name] = found
        while len(self._open) > _READERS_MAX:
            self._open.popitem(last=False)[1].core.close()
        return found

    def close(self) -> None:
        """Closes all of them."""
        while self._open:
            self._open.popitem()[1].core.close()


@dataclass(slots=True)
class _Wanted:
    """A partition of a fetch, and what was found of it."""

    number: int
    offset: int
    bytes_max: int
    code: ErrorCode = ErrorCode.none
    topic: ServedTopic | None = None
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def is_open(self) -> bool:
        return self.topic is not None and self.code is ErrorCode.none

    def fail(self, error: IsterError) -> None:
        self.code = code_of(error)


class Fetching:
    """Serves Fetch and ListOffsets."""

    def __init__(self, names: KafkaTopics) -> None:
        self._names = names
        self._reads = names.topics.budget.reads
        self._bytes_max = names.topics.config.broker.kafka.max_fetch_bytes

    # -- fetch ------------------------------------------------------------------------------

    async def fetch(self, request: Request, readers: Readers) -> Entity:
        """Answers a Fetch: with what is there, or with what comes within the time it may take."""
        body = request.body
        if getattr(body, "session_id", 0):
            return request.make(
                "FetchResponse", error_code=ErrorCode.fetch_session_id_not_found, responses=()
            )
        wanted = [(topic, [self._wanted(one) for one in topic.partitions]) for topic in body.topics]
        for topic, partitions in wanted:
            await self._open(topic, partitions)
        every = [one for _, partitions in wanted for one in partitions]
        await self._collect(every, body, readers)
        return request.make(
            "FetchResponse",
            error_code=ErrorCode.none,
            responses=tuple(
                request.make(
                    "FetchableTopicResponse",
                    topic=getattr(topic, "topic", None),
                    topic_id=getattr(topic, "topic_id", None),
                    partitions=tuple(_answer(request, one) for one in partitions),
                )
                for topic, partitions in wanted
            ),
        )

    def _wanted(self, asked: Entity) -> _Wanted:
        bytes_max = min(self._bytes_max, max(0, asked.partition_max_bytes))
        return _Wanted(asked.partition, asked.fetch_offset, bytes_max)

    async def _open(self, topic: Entity, partitions: Sequence[_Wanted]) -> None:
        """Finds the partitions of a topic."""
        try:
            names, name = self._names, getattr(topic, "topic", None)
            path = await names.path_of_id(topic.topic_id) if name is None else names.path_of(name)
            self._names.check(Permission.CONSUME, path)
        except IsterError as error:
            for one in partitions:
                one.fail(error)
            return
        for one in partitions:
            try:
                one.topic = await self._names.open(path, one.number)
            except IsterError as error:
                one.fail(error)

    async def _collect(self, every: Sequence[_Wanted], body: Entity, readers: Readers) -> None:
        loop = asyncio.get_running_loop()
        seconds = min(_WAIT_SECONDS_MAX, max(0.0, body.max_wait.total_seconds()))
        deadline = loop.time() + seconds
        left = min(self._bytes_max, max(1, body.max_bytes))
        total = 0
        while True:
            for one in every:
                # The first message is answered even if it is larger than it may be.
                room = min(left - total, one.bytes_max - one.size)
                if one.is_open and (room > 0 or not total):
                    total += await self._read(one, max(1, room), readers)
            has_failed = any(one.code is not ErrorCode.none for one in every)
            if total >= body.min_bytes or has_failed or total >= left:
                return
            if (remaining := deadline - loop.time()) <= 0:
                return
            await _wait_for_any(every, remaining)

    async def _read(self, one: _Wanted, room: int, readers: Readers) -> int:
        """Reads what there is of a partition, in at most so many bytes; returns their number."""
        topic = one.topic
        assert topic is not None  # noqa: S101 - for mypy: it is open
        try:
            log = log_of(topic)
            if topic.is_closed:
                # It was given up meanwhile: another broker may have it.
                raise KafkaError(ErrorCode.not_leader_or_follower)
            if not one.parts and one.offset > log.next_offset:
                raise KafkaError(ErrorCode.offset_out_of_range)
            if one.offset >= log.visible:
                return 0
            opened = readers.at(log, one.offset)
            core = opened.core
            messages = core.poll_cache(_MESSAGES_MAX, room)
            if not messages:
                async with self._reads:
                    messages = await asyncio.to_thread(core.poll, _MESSAGES_MAX, room)
            one.offset = core.next_offset
            if not messages:
                return 0
            records = opened.decoder.records(messages)
        except IsterError as error:
            if not one.parts:
                one.fail(error)
            return 0
        batch = encode_batch(records)
        one.parts.append(batch)
        one.size += len(batch)
        counters = topic.counters
        counters.messages_out += len(records)
        counters.bytes_out += sum(len(record.value or b"") for _, record in records)
        if len(batch) > _TURN_BYTES:
            await asyncio.sleep(0)
        return len(batch)

    # -- offsets ----------------------------------------------------------------------------

    async def list_offsets(self, request: Request) -> Entity:
        """Answers ListOffsets: the first offset, the end, or the one of a time."""
        found = [
            (topic.name, [await self._place(topic.name, one) for one in topic.partitions])
            for topic in request.body.topics
        ]
        kinds = ("ListOffsetsTopicResponse", "ListOffsetsPartitionResponse")
        return request.make("ListOffsetsResponse", topics=request.by_topic(*kinds, found))

    async def _place(self, name: str, asked: Entity) -> dict[str, Entity]:
        code, offset, timestamp = ErrorCode.none, -1, -1
        try:
            path = self._names.path_of(name)
            self._names.check(Permission.CONSUME, path)
            served = await self._names.open(path, asked.partition_index)
            offset, timestamp = await self._find(log_of(served), asked.timestamp)
        except IsterError as error:
            code = code_of(error)
        return {
            "partition_index": asked.partition_index,
            "error_code": code,
            "timestamp": timestamp,
            "offset": offset,
        }

    async def _find(self, topic: Topic, asked: int) -> tuple[int, int]:
        """An offset and its time; -1 and -1 if there is none of that time."""
        if asked == LATEST:
            return topic.visible, -1
        if asked == EARLIEST:
            return topic.earliest, -1
        if asked < MAX_TIMESTAMP:
            raise KafkaError(ErrorCode.unsupported_version, "there is no such place in a topic")
        principal = current_principal()
        return await self._names.topics.searches.run(
            lambda on_read: (
                _find_newest(topic, on_read)
                if asked == MAX_TIMESTAMP
                else _find_time(topic, asked, on_read)
            ),
            caller="" if principal is ANONYMOUS else str(principal),
        )


def _answer(request: Request, one: _Wanted) -> Entity:
    high = start = -1
    if one.topic is not None:
        log = log_of(one.topic)
        high, start = log.visible, log.earliest
    return request.make(
        "PartitionData",
        partition_index=one.number,
        error_code=one.code,
        high_watermark=high,
        last_stable_offset=high,
        log_start_offset=start,
        aborted_transactions=None,
        records=b"".join(one.parts),
    )


async def _wait_for_any(every: Iterable[_Wanted], seconds: float) -> None:
    """Waits until one of the partitions has something more, or the time is over."""
    waiting: list[asyncio.Future[None]] = []
    for one in every:
        if one.topic is None or one.code is not ErrorCode.none or one.size >= one.bytes_max:
            continue
        log = log_of(one.topic)
        passed = log.aio.hub(log.wal.levels.visible_level, is_patient=True).passed(one.offset)
        if passed is None:
            break
        waiting.append(passed)
    else:
        if not waiting:
            await asyncio.sleep(seconds)
            return
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                if future.done() and not future.cancelled():
                    future.exception()  # the next read says it
                else:
                    future.cancel()
        return
    for future in waiting:
        future.cancel()


def _find_time(topic: Topic, time_ms: int, on_read: OnRead | None) -> tuple[int, int]:
    """The first message published at or after a time, and its time."""
    start, end = topic.earliest, topic.visible
    found = topic.find_time(time_ms, start, end, on_read=on_read) if start < end else None
    return (-1, -1) if found is None else (found, _time_at(topic, found))


def _find_newest(topic: Topic, on_read: OnRead | None) -> tuple[int, int]:
    """The first message of those with the latest time, and that time."""
    start, end = topic.earliest, topic.visible
    if start >= end:
        return -1, -1
    newest = _time_at(topic, end - 1)
    for _ in range(_STEPS_MAX):
        later = topic.find_time(newest + 1, start, end, on_read=on_read)
        if later is None or (found := _time_at(topic, later)) <= newest:
            break
        newest = found
    return _find_time(topic, newest, on_read)


def _time_at(topic: Topic, offset: int) -> int:
    """The time of a message, or of the one after it if compaction has left it out."""
    with topic.reader(offset) as reader:
        messages = reader.poll(1)
        if not messages:
            raise OffsetOutOfRangeError(
                "the message is gone",
                earliest=topic.earliest,
                next=topic.next_offset,
                topic=topic.name,
                offset=offset,
            )
        record = messages[0].record
    stored = Stored(record.payload, record.publish_time, record.routing_key, record.attributes)
    return to_record(stored).timestamp
