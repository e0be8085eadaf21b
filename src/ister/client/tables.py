"""A topic as Arrow data, read through its broker: from the bucket to the tail.

    client.read_arrow ─► locate ─► the owner of each partition ─ Flight do_get ─► record batches

Owns: which ranges are requested from which broker, and failover: if a broker becomes unavailable,
reading continues after the last message returned, at the topic's current owner. Does not own: the
connection (`ister.client.flight`).

A range is fixed when it is opened. It ends with the last durable message: the last synced one, or
in a topic with `ack: tiered` the last one in the bucket. There is no cursor, and nothing to
acknowledge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, cast

from ister.base.clock import SystemClock
from ister.base.model import AckLevel, Start
from ister.base.positions import to_milliseconds
from ister.base.retry import backoff_seconds, can_retry
from ister.errors import InvalidRequestError, IsterError, OffsetOutOfRangeError
from ister.topic.arguments import as_offset
from ister.wire.contract import RangeTicket, TopicStatus

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.client.flight import FlightClient

_PAUSES: Final = (0.05, 2.0)

Locate = Callable[[str], list[tuple[str, str]]]
"""The topics behind a name, and the Flight address of the broker that has each."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """A range of one topic or partition."""

    topic: str
    address: str
    incarnation: str
    next: int
    end: int


class ArrowRead:
    """One range of a topic, or of each of its partitions. Used by one thread at a time."""

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
        """Resolves the range; nothing is read yet.

        Raises:
            InvalidRequestError: There is no such column, an offset in a partitioned topic, or
                messages that are in memory only.
            NotFoundError: There is no such topic.
            OffsetOutOfRangeError: The topic does not have the offset `start`.
            IsterError: It is refused, or no broker has answered in time.
        """
        from ister.format.arrow.text import Projection  # noqa: PLC0415 - pyarrow is an extra

        # Offsets tell where to continue after a failure.
        self._projection = Projection(columns, reads=["offset"])
        self._topic = topic
        self._locate = locate
        self._open_flight = open_flight
        self._timeout = timeout
        self._clients: dict[str, FlightClient] = {}
        self._failures = 0
        self._give_up_at: float | None = None
        while True:
            try:
                self._parts = self._resolve(start, end)
                break
            except IsterError as error:
                self.close()
                self._pause(error)

    @property
    def schema(self) -> pa.Schema:
        """The requested columns."""
        return self._projection.schema

    def batches(self) -> Generator[pa.RecordBatch]:
        """The messages, partition by partition, in the order of offsets.

        Raises:
            IsterError: The topic was deleted, messages are not there any more, or no broker has
                answered in time. Batches that were returned before are valid.
        """
        try:
            for part in self._parts:
                while part.next < part.end:
                    try:
                        yield from self._read(part)
                    except IsterError as error:
                        self._pause(error)
                        self._find_again()
        finally:
            self.close()

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

    def _resolve(self, start: Start, end: int | datetime | None) -> list[_Part]:
        found = self._locate(self._topic)
        for name, value in (("start", start), ("end", end)):
            if isinstance(value, int) and len(found) > 1:
                raise InvalidRequestError(
                    f"{name}={value}: {self._topic} is partitioned, and each partition has "
                    "offsets of its own",
                    hint=f"use a time, or read one of them: {found[0][0]}",
                )
        parts = []
        for name, address in found:
            flight = self._flight(address)
            status = flight.watermarks([name])[name]
            if status.ack is AckLevel.MEMORY and status.earliest == status.readable < status.next:
                raise InvalidRequestError(
                    f"none of the messages of {name} is durable, and only durable ones are read",
                    topic=name,
                    hint="its ack level is memory: receive them with a subscription",
                )
            first = _offset_at(flight, status, start, "start")
            last = status.readable if end is None else _offset_at(flight, status, end, "end")
            if last < first and end is not None and not isinstance(end, datetime):
                raise InvalidRequestError(f"end {end} is before start {first}", topic=name)
            parts.append(
                _Part(
                    topic=name,
                    address=address,
                    incarnation=status.incarnation,
                    next=first,
                    end=min(last, status.readable),
                )
            )
        return parts

    def _read(self, part: _Part) -> Iterator[pa.RecordBatch]:
        ticket = RangeTicket(
            topic=part.topic,
            incarnation=part.incarnation,
            start=part.next,
            end=part.end,
            columns=self._projection.stored,
        )
        batches = self._flight(part.address).read(ticket)
        with closing(cast("Generator[pa.RecordBatch]", batches)):
            for batch in batches:
                self._failures, self._give_up_at = 0, None
                part.next = batch["offset"][-1].as_py() + 1
                yield self._projection.apply(batch)
        part.next = part.end

    # -- failover -------------------------------------------------------------------------

    def _pause(self, error: IsterError) -> None:
        """Waits before a retry; raises if a retry cannot help or the timeout has passed."""
        now = SystemClock.monotonic()
        if self._timeout is not None and self._give_up_at is None:
            self._give_up_at = now + self._timeout
        if not can_retry(error) or (self._give_up_at is not None and now >= self._give_up_at):
            raise error
        self._failures += 1
        first, most = _PAUSES
        threading.Event().wait(backoff_seconds(self._failures, first=first, most=most))

    def _find_again(self) -> None:
        """Locates the topic again: another broker may have it by now."""
        self.close()
        while True:
            try:
                found = dict(self._locate(self._topic))
                break
            except IsterError as error:
                self._pause(error)
        for part in self._parts:
            part.address = found.get(part.topic, part.address)


def _offset_at(flight: FlightClient, status: TopicStatus, where: Start, name: str) -> int:
    """Resolves a position to an offset; as `end`, it may lie behind the end of the topic."""
    if isinstance(where, str) and where in ("earliest", "latest"):
        return status.earliest if where == "earliest" else status.readable
    if isinstance(where, datetime):
        wanted, found = to_milliseconds(where), None
        # An empty topic needs no search.
        if status.earliest < status.readable:
            found = flight.find_time(status.topic, wanted, status.earliest, status.readable)
        return status.readable if found is None else found
    offset = as_offset(name, where)
    if name == "start" and not status.earliest <= offset <= status.readable:
        raise OffsetOutOfRangeError(
            "offset out of range",
            earliest=status.earliest,
            next=status.readable,
            topic=status.topic,
            offset=offset,
        )
    return offset
