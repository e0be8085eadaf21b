"""Reading a topic without a subscription: no cursor, nothing that the broker has to remember.

Owns: which ranges are requested from which broker. Does not own: the connection
(`ister.client.flight`), output.

What is synced is read (in a topic with `ack: tiered`, what is in the bucket), so a message that was
shown is never taken back by a crash. A broker that
goes away is waited for, or the topic's new broker is found; reading continues with the first
message that has not come out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, cast

from ister.base.clock import SystemClock
from ister.base.model import Start
from ister.base.positions import to_milliseconds
from ister.cli.connection import ReaderAddress, explained, locate_readers, open_reader
from ister.cli.interrupts import Interrupts
from ister.cli.messages_out import Received
from ister.errors import InvalidRequestError, IsterError, OffsetOutOfRangeError, UnavailableError
from ister.wire.contract import RangeTicket, TopicStatus

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.client.flight import FlightClient

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
# Partitions take turns after this many messages.
_TURN_MESSAGES: Final = 20_000
_PAUSE_FIRST: Final = 0.02
_PAUSE_MOST: Final = 0.5


@dataclass(slots=True, kw_only=True)
class _Place:
    """How far one topic, or one partition, has been read."""

    topic: str
    flight: FlightClient
    incarnation: str
    next: int
    end: int | None
    """Where to stop; None for never."""

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.next >= self.end


def read_topic(
    options: argparse.Namespace,
    interrupts: Interrupts,
    *,
    start: Start,
    is_following: bool,
    timeout: float | None,
    on_idle: Callable[[], None] = lambda: None,
) -> Iterator[list[Received]]:
    """The messages of a topic, or of all its partitions, some at a time.

    Args:
        options: Of the command: where the broker is, and `topic`.
        interrupts: What ends it.
        start: Where to begin.
        is_following: Wait for new messages; otherwise stop at the current end.
        timeout: Stop after this many seconds without a message.
        on_idle: Called about twice a second while there is nothing; what it raises ends it.

    Raises:
        InvalidRequestError: An offset in a partitioned topic.
        OffsetOutOfRangeError: There is no such offset.
        IsterError: It is refused, or no broker has answered in time.
    """
    reader = _Reader(options, interrupts, timeout, on_idle)
    try:
        yield from reader.read(start, is_following=is_following)
    finally:
        reader.close()


class _Reader:
    def __init__(
        self,
        options: argparse.Namespace,
        interrupts: Interrupts,
        timeout: float | None,
        on_idle: Callable[[], None],
    ) -> None:
        self._options = options
        self._topic = str(options.topic)
        self._interrupts = interrupts
        self._timeout = timeout
        self._on_idle = on_idle
        self._clock = SystemClock()
        self._clients: dict[str, FlightClient] = {}
        self._places: list[_Place] = []
        self._failing_since: float | None = None

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def read(self, start: Start, *, is_following: bool) -> Iterator[list[Received]]:
        self._places = self._locate(start, is_following=is_following)
        pause, quiet_since = _PAUSE_FIRST, self._clock.monotonic()
        while not self._interrupts.wait(0):
            is_any = False
            for place in self._places:
                for batch in self._turn(place):
                    is_any = True
                    yield batch
                    if self._interrupts.wait(0):
                        return
            now = self._clock.monotonic()
            if all(place.is_done for place in self._places):
                return
            if is_any:
                pause, quiet_since = _PAUSE_FIRST, now
                continue
            if self._timeout is not None and now - quiet_since >= self._timeout:
                return
            self._on_idle()
            left = _PAUSE_MOST if self._timeout is None else quiet_since + self._timeout - now
            self._interrupts.wait(min(pause, max(left, 0.001)))
            pause = min(pause * 2, _PAUSE_MOST)

    # -- where it is ------------------------------------------------------------------------

    def _locate(self, start: Start, *, is_following: bool) -> list[_Place]:
        found = _located(self._options, self._topic, start)
        places = []
        with explained(self._options):
            for one in found:
                flight = self._client(one.flight)
                status = flight.watermarks([one.topic])[one.topic]
                places.append(
                    _Place(
                        topic=one.topic,
                        flight=flight,
                        incarnation=status.incarnation,
                        next=_resolve(flight, status, start),
                        end=None if is_following else status.readable,
                    )
                )
        return places

    def _client(self, address: str) -> FlightClient:
        if address not in self._clients:
            self._clients[address] = open_reader(self._options, address)
        return self._clients[address]

    def _find_again(self) -> None:
        """Locates topics again: another broker may serve them by now."""
        self.close()
        found = {one.topic: one.flight for one in locate_readers(self._options, self._topic)}
        for place in self._places:
            if place.topic in found:
                place.flight = self._client(found[place.topic])

    # -- reading ----------------------------------------------------------------------------

    def _turn(self, place: _Place) -> Iterator[list[Received]]:
        """Some messages of one place, if there are any."""
        if place.is_done:
            return
        try:
            with explained(self._options):
                yield from self._read_range(place)
            self._failing_since = None
        except UnavailableError as error:
            self._failed(error)

    def _read_range(self, place: _Place) -> Iterator[list[Received]]:
        status = place.flight.watermarks([place.topic])[place.topic]
        end = status.readable if place.end is None else min(status.readable, place.end)
        if len(self._places) > 1:
            end = min(end, place.next + _TURN_MESSAGES)
        # Messages that retention removed in all tiers meanwhile are skipped.
        place.next = max(place.next, status.earliest)
        if place.next >= end:
            return
        ticket = RangeTicket(
            topic=place.topic,
            incarnation=place.incarnation,
            start=place.next,
            end=end,
            columns=_COLUMNS,
        )
        batches = cast("Generator[pa.RecordBatch, None, None]", place.flight.read(ticket))
        with closing(batches):
            for batch in batches:
                received = _received(place.topic, batch)
                yield received
                place.next = received[-1].offset + 1
        place.next = end

    def _failed(self, error: IsterError) -> None:
        """Locates the topic again; waits until a broker answers."""
        while True:
            now = self._clock.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= self._options.retry_for:
                raise error
            self._on_idle()
            if self._interrupts.wait(_PAUSE_MOST):
                return
            try:
                self._find_again()
            except UnavailableError as again:
                error = again
            else:
                return


def resolve_starts(options: argparse.Namespace, topic: str, start: Start) -> dict[str, int]:
    """Resolves a position to an offset in a topic, or in each of its partitions.

    Args:
        options: Of the command: where the broker is.
        topic: The topic.
        start: The position.

    Raises:
        InvalidRequestError: An offset in a partitioned topic.
        OffsetOutOfRangeError: There is no such offset.
        IsterError: It is refused, or no broker has answered in time.
    """
    found = _located(options, topic, start)
    offsets = {}
    with explained(options):
        for one in found:
            flight = open_reader(options, one.flight)
            with closing(flight):
                offsets[one.topic] = _resolve(
                    flight, flight.watermarks([one.topic])[one.topic], start
                )
    return offsets


def _located(options: argparse.Namespace, topic: str, start: Start) -> list[ReaderAddress]:
    found = locate_readers(options, topic)
    if isinstance(start, int) and len(found) > 1:
        raise InvalidRequestError(
            f"{topic} is partitioned, and each partition has offsets of its own",
            hint=f"name one of them: {found[0].topic}",
        )
    return found


def _resolve(flight: FlightClient, status: TopicStatus, start: Start) -> int:
    if start == "earliest":
        return status.earliest
    if start == "latest":
        return status.next
    if isinstance(start, datetime):
        # No time is before the first message, so a topic without one needs no search.
        found = None
        if status.earliest < status.readable:
            found = flight.find_time(
                status.topic, to_milliseconds(start), status.earliest, status.readable
            )
        return status.readable if found is None else found
    offset = int(start)
    if not status.earliest <= offset <= status.next:
        raise OffsetOutOfRangeError(
            "offset out of range",
            earliest=status.earliest,
            next=status.next,
            topic=status.topic,
            offset=offset,
        )
    return offset


def _received(topic: str, batch: pa.RecordBatch) -> list[Received]:
    columns = {name: batch.column(name) for name in _COLUMNS}
    times = columns["publish_time"].cast("int64").to_pylist()
    rows = zip(
        columns["offset"].to_pylist(),
        times,
        columns["producer_name"].to_pylist(),
        columns["payload"].to_pylist(),
        columns["attributes"].to_pylist(),
        columns["routing_key"].to_pylist(),
        columns["schema_id"].to_pylist(),
        columns["schema_version"].to_pylist(),
        strict=True,
    )
    return [
        Received(topic, offset, when // 1000, name or "", payload, dict(more or ()), key, sid, ver)
        for offset, when, name, payload, more, key, sid, ver in rows
    ]
