"""Shows some messages of a topic to people, from any position, decoded where possible.

Owns: where to begin, how many come, how each is shown. Does not own: reading (`ister.topic`),
which messages a filter matches (`ister.base.message_filter`), schemas (`ister.broker.schemas`),
permissions (callers ask the guard first).

Browsing moves no cursor and acknowledges nothing. Messages, bytes, time and concurrent requests are
bounded; an answer that a bound has cut short says from which offset to continue. The newest
messages that match a filter are searched from the end, block by block.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

import msgspec

from ister.base.clock import Clock
from ister.base.limits import KIB, MIB
from ister.base.message_filter import NOT_JSON, MessageFilter
from ister.base.model import JsonObject, Start, StreamMessage
from ister.broker.observe.query_threads import QueryThreads
from ister.broker.schemas.decoding import DECODED_BYTES_MAX, decode_payload, parse_json
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.topics.topics import Topics
from ister.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    IsterError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.topic.message import Message
from ister.topic.topic import Topic
from ister.wire.errors import http_error

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 500
"""Messages in one answer."""
DOWNLOAD_MAX: Final = 10_000
"""Messages in one download."""

_PAYLOAD_BYTES_MAX: Final = 64 * KIB
_ANSWER_BYTES_MAX: Final = 4 * MIB
_DOWNLOAD_BYTES_MAX: Final = 16 * MIB
_READ_BYTES_MAX: Final = 32 * MIB
# A search from the end reads blocks of so many messages; the first is small, since the newest
# messages often match.
_BLOCK_FIRST: Final = 64
_BLOCK_MAX: Final = 8192
_BLOCK_BYTES: Final = 4 * MIB
_READ_SECONDS_MAX: Final = 15.0
_DECODED_BYTES_MAX: Final = 2 * MIB
_BATCH: Final = 500
_AT_ONCE: Final = 4
_WAITING_MAX: Final = 32

_Answer = TypeVar("_Answer")
_Shown = TypeVar("_Shown")


@dataclass(slots=True)
class Download:
    """Messages as lines of JSON."""

    lines: list[bytes] = field(default_factory=list)
    next: int = 0
    """The offset to continue at."""
    end: int = 0
    """The offset behind the last message of the topic."""


class Browser:
    """Reads some messages of a topic, and decodes them. Used on the broker's loop."""

    def __init__(
        self, topics: Topics, schemas: SchemaRegistry, query_threads: QueryThreads, *, clock: Clock
    ) -> None:
        self._topics = topics
        self._schemas = schemas
        self._query_threads = query_threads
        self._clock = clock
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._ending = threading.Event()

    def end(self) -> None:
        """Makes requests in progress end soon."""
        self._ending.set()

    async def read(
        self,
        name: str,
        *,
        start: Start = "latest",
        end: int | None = None,
        limit: int = LIMIT_DEFAULT,
        takes: Callable[[Message], bool] | None = None,
        wanted: MessageFilter | None = None,
    ) -> JsonObject:
        """Messages of a topic, by offset.

        Args:
            name: The topic.
            start: Where to begin; `latest` is the last `limit` of those before `end`.
            end: The offset before which to stop.
            limit: At most so many.
            takes: Returns whether a message is shown; called in a thread.
            wanted: Which messages are shown; all by default.

        Returns:
            `messages`, `first` and `next` (all messages from `first` to before `next` were looked
            at, `scanned` of them), `earliest`, `end`, `error`.

        Raises:
            InvalidRequestError: The topic keeps nothing, or has partitions; or a bound is wrong.
            OffsetOutOfRangeError: There is no such offset.
            CapacityError: Too many requests at once.
        """
        if not 1 <= limit <= LIMIT_MAX:
            raise InvalidRequestError(f"limit must be 1 to {LIMIT_MAX}, not {limit}")
        look = await self._look(
            name, limit, takes=takes, wanted=wanted, bytes_max=_ANSWER_BYTES_MAX
        )
        return await self._run(look, look.read, start, end)

    async def download(
        self,
        name: str,
        *,
        start: Start = "latest",
        end: int | None = None,
        limit: int = DOWNLOAD_MAX,
        wanted: MessageFilter | None = None,
    ) -> Download:
        """Messages of a topic as lines of JSON, with whole payloads; see `read`.

        The fields are those of `ister consume --json`, which `ister produce --json-lines` takes.

        Raises:
            CorruptDataError: A message cannot be read.
            As `read`.
        """
        if not 1 <= limit <= DOWNLOAD_MAX:
            raise InvalidRequestError(f"limit must be 1 to {DOWNLOAD_MAX}, not {limit}")
        look = await self._look(name, limit, wanted=wanted, bytes_max=_DOWNLOAD_BYTES_MAX)
        return await self._run(look, look.download, start, end)

    async def _look(
        self,
        name: str,
        limit: int,
        *,
        takes: Callable[[Message], bool] | None = None,
        wanted: MessageFilter | None = None,
        bytes_max: int,
    ) -> _Look:
        topic = (await self._topics.get(name)).topic
        if topic is None:
            raise InvalidRequestError(
                "the topic is not reliable: it stores no messages", topic=name
            )
        if self._waiting >= _WAITING_MAX:
            raise CapacityError("too many requests for messages", hint="retry in a moment")
        return _Look(
            topic,
            self._schemas,
            limit,
            self._clock,
            self._ending,
            takes=takes,
            wanted=wanted or None,
            bytes_max=bytes_max,
        )

    async def _run(
        self,
        look: _Look,
        work: Callable[[Start, int | None], _Answer],
        start: Start,
        end: int | None,
    ) -> _Answer:
        self._waiting += 1
        try:
            async with self._gate:
                if isinstance(start, datetime):
                    start = await self._topics.searches.start_of(look.topic, start)
                return await self._query_threads.run(work, start, end)
        finally:
            self._waiting -= 1


class _Look:
    """One request, and what is left of its bounds. Runs in a thread."""

    def __init__(
        self,
        topic: Topic,
        schemas: SchemaRegistry,
        limit: int,
        clock: Clock,
        ending: threading.Event,
        *,
        takes: Callable[[Message], bool] | None,
        wanted: MessageFilter | None,
        bytes_max: int,
    ) -> None:
        self.topic = topic
        self._takes = takes
        self._wanted = wanted
        self._schemas = schemas
        self._clock = clock
        self._ending = ending
        self._until = clock.monotonic() + _READ_SECONDS_MAX
        self._messages = limit
        self._shown_bytes = bytes_max
        self._read_bytes = _READ_BYTES_MAX
        self._decoded_bytes = _DECODED_BYTES_MAX
        self._scanned = 0
        self._reached = 0
        self._failure: IsterError | None = None
        self._definitions: dict[
            tuple[int, int | None], tuple[str, int, Definition] | IsterError | None
        ] = {}

    def _has_room(self) -> bool:
        return (
            self._messages > 0
            and self._shown_bytes > 0
            and self._read_bytes > 0
            and self._clock.monotonic() < self._until
        )

    def read(self, start: Start, end: int | None) -> JsonObject:
        """Returns messages from `start`, and the offsets that were looked at."""
        found, first, next_offset = self._select(start, end, self._show)
        failure = self._failure
        return {
            "topic": self.topic.name,
            "messages": found,
            "first": first,
            "next": next_offset,
            "scanned": self._scanned,
            "earliest": self.topic.earliest,
            "end": self.topic.visible,
            "error": None if failure is None else http_error(failure),
        }

    def download(self, start: Start, end: int | None) -> Download:
        """Returns messages from `start` as lines of JSON."""
        found, _, next_offset = self._select(start, end, self._line)
        if self._failure is not None:
            raise self._failure
        return Download(found, next_offset, self.topic.visible)

    def _select(
        self, start: Start, end: int | None, show: Callable[[Message], _Shown]
    ) -> tuple[list[_Shown], int, int]:
        """The messages, the first offset that was looked at, and the one to continue at."""
        topic, visible = self.topic, self.topic.visible
        until = visible if end is None else min(end, visible)
        if start == "latest" and self._is_filtered:
            newest, first = self._search_back(until)
            shown = []
            for message in newest:
                if not self._has_room():
                    # The oldest of them are left for the next request.
                    break
                shown.append(show(message))
            if len(shown) < len(newest):
                first = newest[len(shown)].offset + 1
            return shown[::-1], first, max(first, until)
        if start == "latest":
            first = max(topic.earliest, until - self._messages)
        else:
            first = topic.resolve_start(start)
        found: list[_Shown] = []
        at = first
        try:
            for message in self._messages_from(first, until, self._has_room):
                if not self._has_room():
                    return found, first, message.offset
                at = message.offset + 1
                self._read_bytes -= message.size_bytes
                self._scanned += 1
                if self._is_wanted(message):
                    found.append(show(message))
            return found, first, max(first, self._reached)
        except (CorruptDataError, OffsetOutOfRangeError) as error:
            self._failure = error
            return found, first, _behind(error, at)

    def _search_back(self, until: int) -> tuple[list[Message], int]:
        """The newest messages before `until` that match, newest first, and where it stopped."""
        found: list[Message] = []
        earliest, high, size = self.topic.earliest, until, _BLOCK_FIRST
        while high > earliest and len(found) < self._messages and self._has_room():
            low, read_before = max(earliest, high - size), self._read_bytes
            block = self._search_block(low, high)
            if block is None:
                break  # out of time: this block is left for the next request
            found += block[::-1]
            high = low
            # The next one is larger, unless its messages are.
            mean = max(1, (read_before - self._read_bytes) // size)
            size = max(1, min(2 * size, _BLOCK_MAX, _BLOCK_BYTES // mean))
        if len(found) > self._messages:
            del found[self._messages :]
            high = found[-1].offset
        return found, high

    def _search_block(self, low: int, high: int) -> list[Message] | None:
        found: list[Message] = []
        at = low
        while at < high:
            try:
                for message in self._messages_from(at, high, lambda: True):
                    at = message.offset + 1
                    self._read_bytes -= message.size_bytes
                    self._scanned += 1
                    if self._is_wanted(message):
                        found.append(message)
                    if self._clock.monotonic() >= self._until:
                        return None
                break
            except (CorruptDataError, OffsetOutOfRangeError) as error:
                self._failure = error
                at = _behind(error, at)
        return found

    def _messages_from(
        self, first: int, until: int, goes_on: Callable[[], bool]
    ) -> Iterator[Message]:
        """The messages of a range; `_reached` is the offset to continue at."""
        self._reached = first
        if first >= until:
            return
        try:
            reader = self.topic.reader(first, end=until)
        except ClosedError as error:
            raise self._closed() from error
        count = _BATCH if self._is_filtered else min(self._messages, _BATCH)
        try:
            while not reader.is_at_end and goes_on():
                if self._ending.is_set():
                    raise UnavailableError("the broker is shutting down")
                batch = reader.poll(count, MIB)
                if not batch and reader.next_offset == self._reached:
                    break
                yield from batch
                self._reached = reader.next_offset
        except ClosedError as error:
            raise self._closed() from error
        finally:
            reader.close()

    @property
    def _is_filtered(self) -> bool:
        return self._takes is not None or self._wanted is not None

    def _is_wanted(self, message: Message) -> bool:
        if self._takes is not None and not self._takes(message):
            return False
        if self._wanted is None:
            return True
        try:
            record = message.record
        except CorruptDataError:
            return self._wanted.matches(key=None, attributes={}, payload=message.body)
        decoded: object = NOT_JSON
        if self._wanted.conditions and record.schema_id is not None:
            decoded = self._decode(record.schema_id, record.schema_version, record.payload).get(
                "decoded", NOT_JSON
            )
        return self._wanted.matches(
            key=record.routing_key,
            attributes=record.attributes,
            payload=record.payload,
            decoded=decoded,
        )

    def _closed(self) -> UnavailableError:
        return UnavailableError("the topic was closed meanwhile", topic=self.topic.name)

    # -- one message ------------------------------------------------------------------------

    def _line(self, message: Message) -> bytes:
        """A message as a line of JSON."""
        record = message.record
        self._messages -= 1
        line: JsonObject = {
            "topic": self.topic.name,
            "offset": message.offset,
            "publish_time": record.publish_time,
            "producer_name": record.producer_name,
            "payload": _utf8(record.payload),
            "payload_base64": base64.b64encode(record.payload).decode(),
            "attributes": dict(record.attributes),
            "routing_key": record.routing_key,
        }
        if record.schema_id is not None:
            line |= {"schema_id": record.schema_id, "schema_version": record.schema_version}
        encoded = msgspec.json.encode(line) + b"\n"
        self._shown_bytes -= len(encoded)
        return encoded

    def _show(self, message: Message) -> JsonObject:
        misfit: str | None = None
        record: StreamMessage | None = None
        try:
            record = message.record
            payload = record.payload
        except CorruptDataError as error:
            # Its frame is whole, and another program wrote something else into it.
            payload, misfit = message.body, error.message
        cut = payload[: min(_PAYLOAD_BYTES_MAX, max(KIB, self._shown_bytes))]
        self._messages -= 1
        self._shown_bytes -= len(cut) + KIB
        is_cut = len(cut) < len(payload)
        text = _as_text(cut)
        view: JsonObject = {
            "offset": message.offset,
            "publish_time": None,
            "producer_name": None,
            "attributes": {},
            "routing_key": None,
            "schema": None,
            "size": len(payload),
            "tier": self._tier_of(message.offset),
            "payload_base64": base64.b64encode(cut).decode(),
            "is_cut": is_cut,
            "text": text,
            "json": None if is_cut or text is None else _as_json(cut),
            "decoded": None,
            "decode_error": misfit,
        }
        if record is not None:
            view |= {
                "publish_time": record.publish_time,
                "producer_name": record.producer_name,
                "attributes": dict(record.attributes),
                "routing_key": record.routing_key,
            }
            self._shown_bytes -= sum(len(k) + len(v) for k, v in record.attributes.items())
            if record.schema_id is not None:
                view |= self._decode(record.schema_id, record.schema_version, payload)
        return view

    def _tier_of(self, offset: int) -> str:
        if offset >= self.topic.cache.start:
            return "cache"
        return "files" if offset >= self.topic.local_start else "bucket"

    def _decode(self, schema_id: int, version: int | None, payload: bytes) -> JsonObject:
        """What the message's schema makes of it."""
        schema: JsonObject = {
            "id": schema_id,
            "subject": None,
            "version": version,
            "type": None,
        }
        found = self._find(schema_id, version)
        if found is None:
            return {"schema": schema, "decode_error": f"there is no schema with the id {schema_id}"}
        if isinstance(found, IsterError):
            return {"schema": schema, "decode_error": found.message}
        subject, number, definition = found
        kind = definition.schema_type.value
        schema |= {"subject": subject, "version": number, "type": kind}
        if len(payload) > min(DECODED_BYTES_MAX, self._decoded_bytes):
            return {"schema": schema, "decode_error": "it is too large to be decoded here"}
        self._decoded_bytes -= len(payload)
        try:
            return {"schema": schema, "decoded": decode_payload(definition, payload)}
        except IsterError as error:
            return {"schema": schema, "decode_error": error.message}

    def _find(
        self, schema_id: int, version: int | None
    ) -> tuple[str, int, Definition] | IsterError | None:
        key = schema_id, version
        if key not in self._definitions:
            try:
                self._definitions[key] = self._schemas.find_definition(schema_id, version)
            except IsterError as error:
                self._definitions[key] = error  # not asked for again for every message
        return self._definitions[key]


def _behind(error: IsterError, at: int) -> int:
    """Returns the offset behind what cannot be read at `at`."""
    if isinstance(error, DataGapError):
        return max(error.end, at + 1)
    if isinstance(error, OffsetOutOfRangeError):
        return max(error.earliest, at)
    return at + 1


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _as_text(data: bytes) -> str | None:
    """Decodes bytes as UTF-8; None if they are not. The last character may be incomplete."""
    for end in range(len(data), max(len(data) - 4, -1), -1):
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            continue
        return text if _is_readable(text) else None
    return None


def _is_readable(text: str) -> bool:
    return not any(ord(one) < 32 and one not in "\t\n\r\f\x1b" for one in text)


def _as_json(data: bytes) -> object:
    try:
        return parse_json(data)
    except (ValueError, IsterError):
        return None
