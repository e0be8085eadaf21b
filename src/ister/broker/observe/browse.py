"""Shows some messages of a topic to people, from any position, decoded where possible.

Owns: where to begin, how many come, how each is shown. Does not own: reading (`ister.topic`),
schemas (`ister.broker.schemas`), permissions (callers ask the guard first).

Browsing moves no cursor and acknowledges nothing. Messages, bytes, time and concurrent requests are
bounded; an answer that a bound has cut short says from which offset to continue.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final

from ister.broker.observe.query_threads import QueryThreads
from ister.broker.schemas.decoding import DECODED_BYTES_MAX, decode_payload, parse_json
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.topics.topics import Topics
from ister.clock import Clock
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
from ister.limits import KIB, MIB
from ister.model import JsonObject, Start, StreamMessage
from ister.topic.message import Message
from ister.topic.topic import Topic
from ister.wire.errors import http_error

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 500
"""Messages in one answer."""

_PAYLOAD_BYTES_MAX: Final = 64 * KIB
_ANSWER_BYTES_MAX: Final = 4 * MIB
_READ_BYTES_MAX: Final = 32 * MIB
_READ_SECONDS_MAX: Final = 15.0
_DECODED_BYTES_MAX: Final = 2 * MIB
_AT_ONCE: Final = 4
_WAITING_MAX: Final = 32


class Browser:
    """See the module header. `read` is called on the broker's loop."""

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
    ) -> JsonObject:
        """Messages of a topic.

        Args:
            name: The topic.
            start: Where to begin; `latest` is the last `limit` of those before `end`.
            end: The offset before which to stop.
            limit: At most so many.
            takes: Returns whether a message is shown; called in a thread.

        Raises:
            InvalidRequestError: The topic keeps nothing, or has partitions; or a bound is wrong.
            OffsetOutOfRangeError: There is no such offset.
            CapacityError: Too many requests at once.
            NotFoundError: There is no such topic.
            UnavailableError: Another broker has it, or a store does not answer.
        """
        if not 1 <= limit <= LIMIT_MAX:
            raise InvalidRequestError(f"limit must be 1 to {LIMIT_MAX}, not {limit}")
        topic = (await self._topics.get(name)).topic
        if topic is None:
            raise InvalidRequestError(
                "the topic is not reliable: it stores no messages", topic=name
            )
        if self._waiting >= _WAITING_MAX:
            raise CapacityError("too many requests for messages", hint="retry in a moment")
        look = _Look(topic, self._schemas, limit, self._clock, self._ending, takes=takes)
        self._waiting += 1
        try:
            async with self._gate:
                if isinstance(start, datetime):
                    start = await self._topics.searches.start_of(topic, start)
                return await self._query_threads.run(look.read, start, end)
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
        takes: Callable[[Message], bool] | None = None,
    ) -> None:
        self._takes = takes
        self._topic = topic
        self._schemas = schemas
        self._clock = clock
        self._ending = ending
        self._until = clock.monotonic() + _READ_SECONDS_MAX
        self._messages = limit
        self._shown_bytes = _ANSWER_BYTES_MAX
        self._read_bytes = _READ_BYTES_MAX
        self._decoded_bytes = _DECODED_BYTES_MAX
        self._shown: list[JsonObject] = []
        self._at = 0
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
        """Returns messages from `start`, and the offset to continue at."""
        topic = self._topic
        visible = topic.visible
        until = visible if end is None else min(end, visible)
        if start == "latest":
            first = max(topic.earliest, until - self._messages)
        else:
            first = topic.resolve_start(start)
        self._at = first
        failure: IsterError | None = None
        try:
            next_offset = self._collect(first, until)
        except (CorruptDataError, OffsetOutOfRangeError) as error:
            failure = error
            next_offset = _behind(error, self._at)
        return {
            "topic": topic.name,
            "messages": self._shown,
            "next": next_offset,
            "earliest": topic.earliest,
            "end": visible,
            "error": None if failure is None else http_error(failure),
        }

    def _collect(self, first: int, until: int) -> int:
        """Reads until a bound is reached; returns the offset to continue at."""
        if first >= until:
            return first
        try:
            reader = self._topic.reader(first, end=until)
        except ClosedError as error:
            raise self._closed() from error
        at = first
        try:
            while not reader.is_at_end and self._has_room():
                if self._ending.is_set():
                    raise UnavailableError("the broker is shutting down")
                batch = reader.poll(self._messages, min(MIB, self._read_bytes))
                if not batch and reader.next_offset == at:
                    break
                for message in batch:
                    if not self._has_room():
                        return message.offset
                    self._read_bytes -= message.size_bytes
                    if self._takes is None or self._takes(message):
                        self._shown.append(self._show(message))
                    self._at = message.offset + 1
                at = reader.next_offset
        except ClosedError as error:
            raise self._closed() from error
        finally:
            reader.close()
        return at

    def _closed(self) -> UnavailableError:
        return UnavailableError("the topic was closed meanwhile", topic=self._topic.name)

    # -- one message ------------------------------------------------------------------------

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
        if offset >= self._topic.cache.start:
            return "cache"
        return "files" if offset >= self._topic.local_start else "bucket"

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
