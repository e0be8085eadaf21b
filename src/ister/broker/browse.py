"""A look at messages, for people: some of them, from anywhere in a topic, decoded where possible.

Owns: where to begin, how many come, how each is shown. Does not own: reading (`ister.topic`),
schemas (`ister.broker.schemas`), who may look (callers ask the guard first).

A look moves no cursor and acknowledges nothing. It is bounded: by messages, by bytes, by time, and
by how many are under way at once; an answer that a bound has cut short says where to go on.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from datetime import UTC, datetime
from typing import Any, Final

from ister.broker.lookers import Lookers
from ister.broker.schemas.decoding import DECODED_BYTES_MAX, decode_payload, parse_json
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.topics import Topics, start_at_time
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
from ister.model import Start, StreamMessage
from ister.topic.message import Message
from ister.topic.topic import Topic

__all__ = ["LIMIT_DEFAULT", "LIMIT_MAX", "Browser", "parse_start"]

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
_TEXT_MARK: Final = "t:"


def parse_start(text: str) -> Start:
    """Where to begin: `earliest`, `latest`, an offset, or `t:` and a point in time.

    A point in time is as ISO 8601 has it, in UTC unless it says otherwise, or milliseconds since
    1970.

    Raises:
        InvalidRequestError: It is none of these.
    """
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.startswith(_TEXT_MARK):
        return _parse_time(text.removeprefix(_TEXT_MARK))
    if text.isascii() and text.isdecimal() and len(text) <= 19:
        return int(text)
    raise InvalidRequestError(
        f"{text[:40]!r} is no place in a topic",
        hint="an offset, earliest, latest, or a time as t:2026-01-31T12:00:00Z",
    )


def _parse_time(text: str) -> datetime:
    number = text.removeprefix("-")
    if number.isascii() and number.isdecimal() and len(number) <= 17:
        return start_at_time(int(text))
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"{text[:40]!r} is no time", hint="as in 2026-01-31T12:00:00Z, or milliseconds"
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


class Browser:
    """See the module header. `read` is called on the broker's loop."""

    def __init__(
        self, topics: Topics, schemas: SchemaRegistry, lookers: Lookers, *, clock: Clock
    ) -> None:
        self._topics = topics
        self._schemas = schemas
        self._lookers = lookers
        self._clock = clock
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._ending = threading.Event()

    def end(self) -> None:
        """Has looks under way end soon."""
        self._ending.set()

    async def read(
        self,
        name: str,
        *,
        start: Start = "latest",
        end: int | None = None,
        limit: int = LIMIT_DEFAULT,
    ) -> dict[str, Any]:
        """Messages of a topic.

        Args:
            name: The topic.
            start: Where to begin; `latest` is the last `limit` of those before `end`.
            end: The offset before which to stop.
            limit: At most so many.

        Raises:
            InvalidRequestError: The topic keeps nothing, or has partitions; or a bound is wrong.
            OffsetOutOfRangeError: There is no such offset.
            CapacityError: Too many look at once.
            NotFoundError: There is no such topic.
            UnavailableError: Another broker has it, or a store does not answer.
        """
        if not 1 <= limit <= LIMIT_MAX:
            raise InvalidRequestError(f"{limit} messages", hint=f"1 to {LIMIT_MAX} at once")
        topic = (await self._topics.get(name)).topic
        if topic is None:
            raise InvalidRequestError(
                "the topic is not reliable: it keeps no messages to look at", topic=name
            )
        if self._waiting >= _WAITING_MAX:
            raise CapacityError("too many look at messages", hint="come again in a moment")
        look = _Look(topic, self._schemas, limit, self._clock, self._ending)
        self._waiting += 1
        try:
            async with self._gate:
                if isinstance(start, datetime):
                    start = await self._topics.searches.start_of(topic, start)
                return await self._lookers.run(look.read, start, end)
        finally:
            self._waiting -= 1


class _Look:
    """One look, and what is left of its bounds. In a thread."""

    def __init__(
        self,
        topic: Topic,
        schemas: SchemaRegistry,
        limit: int,
        clock: Clock,
        ending: threading.Event,
    ) -> None:
        self._topic = topic
        self._schemas = schemas
        self._clock = clock
        self._ending = ending
        self._until = clock.monotonic() + _READ_SECONDS_MAX
        self._messages = limit
        self._shown_bytes = _ANSWER_BYTES_MAX
        self._read_bytes = _READ_BYTES_MAX
        self._decoded_bytes = _DECODED_BYTES_MAX
        self._shown: list[dict[str, Any]] = []
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

    def read(self, start: Start, end: int | None) -> dict[str, Any]:
        """Messages from `start` on, and where to go on."""
        topic = self._topic
        visible = topic.wal.visible
        until = visible if end is None else min(end, visible)
        if start == "latest":
            first = max(topic.earliest, until - self._messages)
        else:
            first = topic.resolve_start(start)
        failure: IsterError | None = None
        try:
            next_offset = self._collect(first, until)
        except (CorruptDataError, OffsetOutOfRangeError) as error:
            # What lies before it, and behind it, can be looked at all the same.
            failure = error
            next_offset = _behind(error, self._shown[-1]["offset"] + 1 if self._shown else first)
        return {
            "topic": topic.name,
            "messages": self._shown,
            "next": next_offset,
            "earliest": topic.earliest,
            "end": visible,
            "error": None
            if failure is None
            else {"code": failure.code, "error": failure.message, "hint": failure.hint},
        }

    def _collect(self, first: int, until: int) -> int:
        """Reads until a bound is reached; the offset to go on from."""
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
                    raise UnavailableError("the broker is ending")
                batch = reader.poll(self._messages, min(MIB, self._read_bytes))
                if not batch and reader.next_offset == at:
                    break
                for message in batch:
                    if not self._has_room():
                        return message.offset
                    self._shown.append(self._show(message))
                at = reader.next_offset
        except ClosedError as error:
            raise self._closed() from error
        finally:
            reader.close()
        return at

    def _closed(self) -> UnavailableError:
        return UnavailableError("the topic was closed meanwhile", topic=self._topic.name)

    # -- one message ------------------------------------------------------------------------

    def _show(self, message: Message) -> dict[str, Any]:
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
        self._read_bytes -= message.size_bytes
        self._shown_bytes -= len(cut) + KIB
        is_cut = len(cut) < len(payload)
        text = _as_text(cut)
        view: dict[str, Any] = {
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
        return "files" if offset >= self._topic.wal.trimmed else "bucket"

    def _decode(self, schema_id: int, version: int | None, payload: bytes) -> dict[str, Any]:
        """What the message's schema makes of it."""
        schema: dict[str, Any] = {
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
    """Where to go on behind what cannot be read at `at`."""
    if isinstance(error, DataGapError):
        return max(error.end, at + 1)
    if isinstance(error, OffsetOutOfRangeError):
        return max(error.earliest, at)
    return at + 1


def _as_text(data: bytes) -> str | None:
    """Bytes as text; None if they are none. The last character may be cut off."""
    for end in range(len(data), max(len(data) - 4, -1), -1):
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            continue
        return text if _is_readable(text) else None
    return None


def _is_readable(text: str) -> bool:
    return not any(ord(one) < 32 and one not in "\t\n\r\f\x1b" for one in text)


def _as_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return parse_json(data)
    except (ValueError, IsterError):
        return None
