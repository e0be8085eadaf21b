"""The frames of a topic whose files are on another machine, as an upload reads them.

    make an object: fetch, fetch, … ─► one Flight stream for the whole range

Owns: one stream under way. Does not own: the connection (`ister.client.flight`), the plan of the
range: that is asked for before (`FlightClient.plan_upload`).

Invariant: every frame is of the owner of one epoch. Another one, before it or after it, may have
given out the same offsets to other messages.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from ister.client.flight import FlightClient
from ister.errors import UnavailableError
from ister.format.frame import FrameBatch
from ister.wire.contract import FramesTicket, PlanUpload


class BrokerFrames:
    """A `ister.bucket.object_maker.FrameSource`. Used by one thread at a time."""

    def __init__(self, client: FlightClient, topic: str, incarnation: str, epoch: int) -> None:
        self._client = client
        self._topic = topic
        self._incarnation = incarnation
        self._epoch = epoch
        self._stream: Generator[FrameBatch, None, None] | None = None
        self._next = self._end = -1

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """Where a range from `start` on has to end to stay within the limits of an object."""
        planned = self._client.plan_upload(
            PlanUpload(
                topic=self._topic,
                incarnation=self._incarnation,
                epoch=self._epoch,
                start=start,
                bytes_max=bytes_max,
                span_ms_max=span_ms_max,
                objects_max=1,
            )
        )
        return min(end, planned.objects[0][0]) if planned.objects else end

    def arrived_ms(self, start: int, end: int) -> int | None:
        """Always None: the owner does not send arrival times."""
        return None

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """Frames from `start` on, as many as the owner has sent at once.

        Raises:
            As `FlightClient.frames`.
        """
        if self._stream is None or (self._next, self._end) != (start, end):
            self.close()
            ticket = FramesTicket(
                topic=self._topic,
                start=start,
                end=end,
                incarnation=self._incarnation,
                epoch=self._epoch,
            )
            self._stream = cast("Generator[FrameBatch, None, None]", self._client.frames(ticket))
            self._end = end
        try:
            batch = next(self._stream)
        except StopIteration:
            raise UnavailableError(
                "the answer ended before the range did", topic=self._topic, offset=start
            ) from None
        self._next = batch.next_offset
        return batch

    def close(self) -> None:
        """Ends the stream. May be called twice."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
