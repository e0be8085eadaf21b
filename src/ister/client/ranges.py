"""Ranges of a topic, read through its brokers without a subscription: from the bucket to the tail.

    client.read_arrow ┐                    ┌ locate ─► the owner of each partition
    client.table      ┼► TopicRanges ──────┤
    client.reader     ┘                    └ Flight do_get ─► record batches

Owns: which ranges are requested from which broker, and failover: if a broker becomes unavailable,
reading continues after the last message returned, at the topic's current owner. Does not own: the
connection (`ister.client.flight`).

What is durable is read: up to the last synced message, or in a topic with `ack: tiered` the last
one in the bucket, so that no message that was returned is taken back by a crash. There is no
cursor, and nothing to acknowledge. A range that does not follow ends where the topic ended when it
was opened.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self, cast

from ister.base.clock import SystemClock
from ister.base.model import AckLevel, Start
from ister.base.positions import to_milliseconds
from ister.base.retry import backoff_seconds, can_retry
from ister.base.serializers import AnySerializer, Json, Serializer, find_serializer
from ister.client.messages import TopicMessage
from ister.errors import InvalidRequestError, IsterError, OffsetOutOfRangeError
from ister.topic.arguments import as_offset, as_timeout
from ister.wire.contract import RangeTicket, TopicStatus

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.client.flight import FlightClient

_log = logging.getLogger("ister.client")

_PAUSES: Final = (0.05, 2.0)
# A reader that waits for new messages asks for them this often.
_POLLS: Final = (0.02, 0.5)
# Where partitions take turns, after this many messages.
_TURN_MESSAGES: Final = 20_000
# Failures are logged if they last longer.
_SILENT_SECONDS: Final = 5.0
_COLUMNS: Final = (
    "offset",
    "publish_time",
    "producer_name",
    "payload",
    "attributes",
    "routing_key",
    "schema_id",
    "schema_version",
)

OpenRanges = Callable[[Sequence[str]], "TopicRanges"]
"""Resolves a range, of which these columns are read."""
Locate = Callable[[str], list[tuple[str, str]]]
"""The topics behind a name, and the Flight address of the broker that has each."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """A range of one topic or partition."""

    topic: str
    address: str
    incarnation: str
    next: int
    end: int | None
    """Where it ends; None for never."""

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.next >= self.end


class TopicRanges:
    """One range of a topic, or of each of its partitions. Used by one thread at a time."""

    def __init__(
        self,
        topic: str,
        start: Start,
        end: int | datetime | None,
        columns: Sequence[str],
        *,
        locate: Locate,
        open_flight: Callable[[str], FlightClient],
        timeout: float | None,
        follow: bool = False,
        last: int | None = None,
    ) -> None:
        """Resolves the range; nothing is read yet.

        Args:
            topic: The topic's name.
            start: Where each partition begins.
            end: Where each ends; the current end if None.
            columns: What is read of each message, the offset among them.
            locate: Finds the brokers.
            open_flight: Connects to one.
            timeout: How long brokers may be unavailable; None for ever.
            follow: Goes on with new messages.
            last: Begin so many messages before the end, instead of at `start`.

        Raises:
            InvalidRequestError: An offset in a partitioned topic, or messages that are in memory
                only.
            NotFoundError: There is no such topic.
            OffsetOutOfRangeError: The topic does not have the offset `start`.
            IsterError: It is refused, or no broker has answered in time.
        """
        self._topic = topic
        self._columns = tuple(columns)
        self._locate = locate
        self._open_flight = open_flight
        self._timeout = timeout
        self._follows = follow
        self._clients: dict[str, FlightClient] = {}
        self._failures = 0
        self._failing_since: float | None = None
        self._is_reported = False
        self._retry_at: float | None = None
        while True:
            try:
                self._parts = self._resolve(start, end, last)
                self._recovered()
                break
            except IsterError as error:
                self._failed(error)
                self.wait(_PAUSES[1])

    @property
    def positions(self) -> dict[str, int]:
        """The offset of the next message, by topic or partition."""
        return {part.topic: part.next for part in self._parts}

    def batches(self, *, turns: bool = False) -> Generator[tuple[str, pa.RecordBatch] | None]:
        """The messages in the order of offsets, with their topic or partition.

        None comes if there is nothing to return at the moment: call `wait` before going on. With
        `turns`, partitions take turns; else they come one after the other.

        Raises:
            IsterError: The topic was deleted, messages are not there any more, or no broker has
                answered in time. Batches that were returned before are valid.
        """
        try:
            while not all(part.is_done for part in self._parts):
                is_any = False
                try:
                    if self._retry_at is not None:
                        self._find_again()
                    for part in self._parts:
                        for batch in self._read(part, turns=turns):
                            is_any = True
                            yield part.topic, batch
                    self._recovered()
                except IsterError as error:
                    self._failed(error)
                    is_any = False
                while not is_any and not all(part.is_done for part in self._parts):
                    yield None
                    if self._retry_at is None or SystemClock.monotonic() >= self._retry_at:
                        break
        finally:
            self.close()

    def wait(self, seconds: float, *, stop: threading.Event | None = None) -> None:
        """Waits for a retry or for new messages, but no longer than `seconds`."""
        if self._retry_at is not None:
            seconds = min(seconds, max(self._retry_at - SystemClock.monotonic(), 0))
        (stop or threading.Event()).wait(seconds)

    def close(self) -> None:
        """Ends the connections. May be called twice."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _flight(self, address: str) -> FlightClient:
        found = self._clients.get(address)
        if found is None:
            found = self._clients[address] = self._open_flight(address)
        return found

    # -- the range --------------------------------------------------------------------------

    def _resolve(self, start: Start, end: int | datetime | None, last: int | None) -> list[_Part]:
        found = self._locate(self._topic)
        for name, value in (("start", start), ("end", end)):
            if isinstance(value, int) and len(found) > 1:
                raise InvalidRequestError(
                    f"{name}={value}: {self._topic} is partitioned, and each partition has "
                    "offsets of its own",
                    hint=f"use a time, or read one of them: {found[0][0]}",
                )
        return [self._part(name, address, start, end, last) for name, address in found]

    def _part(
        self, name: str, address: str, start: Start, end: int | datetime | None, last: int | None
    ) -> _Part:
        flight = self._flight(address)
        status = flight.watermarks([name])[name]
        is_in_memory = status.earliest == status.readable < status.next
        if status.ack is AckLevel.MEMORY and is_in_memory and not self._follows:
            raise InvalidRequestError(
                f"none of the messages of {name} is durable, and only durable ones are read",
                topic=name,
                hint="its ack level is memory: receive them with a subscription",
            )
        if last is not None:
            first = max(status.earliest, status.readable - last)
        else:
            first = _offset_at(flight, status, start, "start")
        until = status.readable if end is None else _offset_at(flight, status, end, "end")
        if until < first and end is not None and not isinstance(end, datetime):
            raise InvalidRequestError(f"end {end} is before start {first}", topic=name)
        return _Part(
            topic=name,
            address=address,
            incarnation=status.incarnation,
            next=first,
            end=None if self._follows else min(until, status.readable),
        )

    def _read(self, part: _Part, *, turns: bool) -> Iterator[pa.RecordBatch]:
        if part.is_done:
            return
        flight, end = self._flight(part.address), part.end
        if end is None:
            status = flight.watermarks([part.topic])[part.topic]
            end = status.readable
            # Messages that retention removed in all tiers meanwhile are skipped.
            part.next = max(part.next, status.earliest)
        if turns and len(self._parts) > 1:
            end = min(end, part.next + _TURN_MESSAGES)
        if part.next >= end:
            return
        ticket = RangeTicket(
            topic=part.topic,
            incarnation=part.incarnation,
            start=part.next,
            end=end,
            columns=self._columns,
        )
        with closing(cast("Generator[pa.RecordBatch]", flight.read(ticket))) as batches:
            for batch in batches:
                self._recovered()
                part.next = batch["offset"][-1].as_py() + 1
                yield batch
        part.next = end

    # -- failover -------------------------------------------------------------------------

    def _recovered(self) -> None:
        self._failures, self._failing_since, self._retry_at = 0, None, None
        self._is_reported = False

    def _failed(self, error: IsterError) -> None:
        """Sets the time of a retry; raises if it cannot help or the timeout has passed."""
        now = SystemClock.monotonic()
        self.close()
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        is_late = self._timeout is not None and self._failures and now - since >= self._timeout
        if is_late or not can_retry(error):
            raise error
        if now - since >= _SILENT_SECONDS and not self._is_reported:
            self._is_reported = True
            _log.warning("reading is retried", extra={"topic": self._topic, "error": str(error)})
        self._failures += 1
        first, most = _PAUSES
        self._retry_at = now + backoff_seconds(self._failures, first=first, most=most)

    def _find_again(self) -> None:
        """Locates the topic again: another broker may have it by now."""
        found = dict(self._locate(self._topic))
        for part in self._parts:
            part.address = found.get(part.topic, part.address)
        self._retry_at = None


def _offset_at(flight: FlightClient, status: TopicStatus, where: Start, name: str) -> int:
    """Resolves a position to an offset; as `end`, it may lie behind the end of the topic."""
    if isinstance(where, str) and where in ("earliest", "latest"):
        return status.earliest if where == "earliest" else status.next
    if isinstance(where, datetime):
        wanted, found = to_milliseconds(where), None
        # An empty topic needs no search.
        if status.earliest < status.readable:
            found = flight.find_time(status.topic, wanted, status.earliest, status.readable)
        return status.readable if found is None else found
    offset = as_offset(name, where)
    if name == "start" and not status.earliest <= offset <= status.next:
        raise OffsetOutOfRangeError(
            "offset out of range",
            earliest=status.earliest,
            next=status.next,
            topic=status.topic,
            offset=offset,
        )
    return offset


class ArrowRead:
    """One range of a topic as record batches of some columns. Used by one thread at a time."""

    def __init__(
        self,
        topic: str,
        start: Start,
        end: int | datetime | None,
        columns: Sequence[str] | None,
        *,
        locate: Locate,
        open_flight: Callable[[str], FlightClient],
        timeout: float | None,
    ) -> None:
        """Resolves the range, as `TopicRanges` does; nothing is read yet.

        Raises:
            InvalidRequestError: There is no such column, or as `TopicRanges`.
        """
        from ister.format.arrow.text import Projection  # noqa: PLC0415 - pyarrow is an extra

        # Offsets tell where to continue after a failure.
        self._projection = Projection(columns, reads=["offset"])
        self._ranges = TopicRanges(
            topic,
            start,
            end,
            self._projection.stored,
            locate=locate,
            open_flight=open_flight,
            timeout=timeout,
        )

    @property
    def schema(self) -> pa.Schema:
        """The requested columns."""
        return self._projection.schema

    def batches(self) -> Generator[pa.RecordBatch]:
        """The messages, partition by partition; as `TopicRanges.batches`."""
        with closing(self._ranges.batches()) as batches:
            for found in batches:
                if found is None:
                    self._ranges.wait(_PAUSES[1])
                else:
                    yield self._projection.apply(found[1])


class Reader:
    """Reads a topic without a subscription. Made by `Client.reader`.

    It keeps no position at the broker, and there is nothing to acknowledge. Only durable messages
    are read. Used by one thread at a time; `stop` may be called by any.
    """

    def __init__(
        self, topic: str, open_ranges: OpenRanges, serializer: AnySerializer | None = None
    ) -> None:
        self.topic = topic
        """The topic that is read."""
        self._serializer = None if serializer is None else find_serializer(serializer)
        self._stopped = threading.Event()
        self._ranges = open_ranges(_COLUMNS)
        self._batches = self._ranges.batches(turns=True)

    @property
    def positions(self) -> dict[str, int]:
        """The offset of the next message, of the topic or of each of its partitions."""
        return self._ranges.positions

    def read(self, timeout: float | None = None) -> list[TopicMessage]:
        """Returns the next messages, as many as come at once.

        Args:
            timeout: How many seconds to wait for one; None to wait forever.

        Returns:
            No messages after the timeout, at the end of a reader that does not follow, and once it
            is stopped or closed.

        Raises:
            IsterError: The topic was deleted, messages are not there any more, or no broker has
                answered in time.
        """
        timeout = as_timeout(timeout)
        give_up_at = None if timeout is None else SystemClock.monotonic() + timeout
        pause, most = _POLLS
        while not self._stopped.is_set():
            try:
                found = next(self._batches)
            except StopIteration:
                self._stopped.set()
                break
            if found is not None:
                return list(_messages(*found, self._serializer))
            left = most if give_up_at is None else give_up_at - SystemClock.monotonic()
            if left <= 0:
                break
            self._ranges.wait(min(pause, left), stop=self._stopped)
            pause = min(2 * pause, most)
        return []

    @property
    def is_done(self) -> bool:
        """Whether it is stopped, closed, or at its end."""
        return self._stopped.is_set()

    def __iter__(self) -> Iterator[TopicMessage]:
        while not self._stopped.is_set():
            yield from self.read()

    def stop(self) -> None:
        """Ends `for` and `read` after the messages that were read; from any thread."""
        self._stopped.set()

    def close(self) -> None:
        """Ends the reader and its connections. May be called twice."""
        self._stopped.set()
        self._batches.close()
        self._ranges.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        positions = self.positions
        shown = positions.get(self.topic, positions)
        return f"<{type(self).__name__} {self.topic} next={shown}>"


def _messages(
    topic: str, batch: pa.RecordBatch, serializer: Serializer[Json] | None
) -> Iterator[TopicMessage]:
    at = _COLUMNS.index("publish_time")
    columns = [batch.column(name) for name in _COLUMNS]
    columns[at] = columns[at].cast("int64")
    for offset, time, producer, payload, attributes, *rest in zip(
        *(one.to_pylist() for one in columns), strict=True
    ):
        yield TopicMessage(
            topic,
            offset,
            payload,
            time // 1000,
            producer or "",
            dict(attributes or ()),
            *rest,
            serializer=serializer,
        )
