"""Sends a producer's messages to one topic: numbers them, retries, and collects answers.

    sealed batches ─► items ─ write ─► unanswered ─ answer ─► offsets
                        ▲                  │
                        └── stream fails ──┘   the same rows, under the same sequences, in order

Owns: the epoch and the sequences of a producer in one topic, the stream, what is not answered, and
when to try again. Does not own: filling batches and the bound on what is pending (`producer`).

A stream that fails is followed by another, to whichever broker has the topic then. Rows that were
in are answered with their first offsets: nothing is doubled, and nothing acknowledged is lost.

The epoch is the time of the first send, in seconds; the first sequence is the time in nanoseconds.
A program that is started again so has a higher epoch, replaces the one before it, and is never
taken for it: within the same second, or if the clock was set back, the broker refuses the first
batch, and the epoch is raised until it does not. A producer that was replaced is refused from then
on, and gives up.

A batch is refused as a whole. It is halved until the message at fault is found, which fails alone;
those after it take over its number, unless one of them may be in the topic already: then a new
epoch begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from ister.base.clock import Clock
from ister.base.model import AckLevel
from ister.base.retry import AsyncRetry, can_retry
from ister.client.core.batches import Batch
from ister.client.core.network import Network
from ister.client.core.put_stream import PutStream
from ister.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NoAnswerError,
    UnauthenticatedError,
    UnavailableError,
)
from ister.topic.dedup import EPOCH_MAX, EPOCH_STEP_MAX
from ister.wire.contract import PutAck, PutOpen
from ister.wire.errors import LOST_STATUS

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("ister.client.core.sender")

# A broker that does not answer for this long is probed. If that fails, the rows are sent again, to
# the broker that has the topic then.
_ANSWER_SECONDS: Final = 5.0
# A stream without rows is answered within this time.
_PROBE_SECONDS: Final = 30.0
# The answers usually hold the cause of a failed write; wait for them this long.
_VERDICT_SECONDS: Final = 2.0
# A stream without rows for this long is ended, and the next row opens another: a broker takes a
# limited number of streams.
_IDLE_SECONDS: Final = 10.0
_NANOSECONDS: Final = 1_000_000_000


class SendListener(Protocol):
    """Receives the results of messages."""

    def placed(self, batch: Batch, first: int, rows: int, offset: int) -> None:
        """Called when rows were appended."""
        ...

    def failed(self, batch: Batch, first: int, rows: int, error: IsterError) -> None:
        """Called when rows failed."""
        ...

    def next_batch(self, sender: Sender, *, is_waiting: bool) -> Batch | float | None:
        """What to send next; or seconds until there may be something; None for an open end.

        `is_waiting` says whether something is not answered yet.
        """
        ...


@dataclass(slots=True, eq=False)
class _Item:
    """Rows of a batch that go out together."""

    batch: Batch
    first: int
    rows: int
    sequence: int
    is_doubtful: bool = False
    """Whether it may be in the topic: it was sent, and the stream has failed."""

    def halves(self) -> tuple[_Item, _Item]:
        half = self.rows // 2
        return (
            _Item(self.batch, self.first, half, self.sequence, self.is_doubtful),
            _Item(
                self.batch,
                self.first + half,
                self.rows - half,
                self.sequence + half,
                self.is_doubtful,
            ),
        )


class SleepState(Enum):
    """What a sender that sleeps is to be woken for."""

    AWAKE = auto()
    IDLE = auto()
    """Any message."""
    LINGERING = auto()
    """A full batch."""


class Sender:
    """See the module header. Belongs to one loop."""

    def __init__(
        self,
        listener: SendListener,
        network: Network,
        *,
        topic: str,
        producer: str,
        create: bool,
        ack: AckLevel | None,
        timeout: float | None,
        clock: Clock,
    ) -> None:
        self.topic = topic
        self.open: Batch | None = None
        """The batch that is being filled; under the producer's lock, as the next three."""
        self.opened_at = 0.0
        self.sealed: deque[Batch] = deque()
        self.sleep_state = SleepState.AWAKE
        self._listener = listener
        self._network = network
        self._producer = producer
        self._create = create
        self._ack = ack
        self._retries = AsyncRetry(timeout)
        self._clock = clock
        now = clock.now_ns()
        self._epoch = min(now // _NANOSECONDS, EPOCH_MAX)
        self._epoch_step = 1
        self._next_sequence = now
        self._columns: frozenset[str] = frozenset()
        self._again: deque[_Item] = deque()
        self._unanswered: deque[_Item] = deque()
        self._answers = 0
        # Whether this epoch has been used: a conflict then means that another producer has it.
        self._is_established = False
        self._wake = asyncio.Event()
        self._is_ending = False
        self.failure: IsterError | None = None
        """The error that ended publishing, or None."""

    def wake(self) -> None:
        """Wakes the sender; on its loop."""
        self._wake.set()

    def end(self) -> None:
        """Ends the sender once everything is answered; on its loop."""
        self._is_ending = True
        self._wake.set()

    @property
    def epoch(self) -> int:
        """The producer epoch; a higher one fences lower ones."""
        return self._epoch

    # -- life -------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Checks that the topic exists, or creates it, and that publishing is allowed.

        Raises:
            IsterError: It is not, or no broker has answered in time.
        """
        while True:
            try:
                await self._probe()
            except IsterError as error:
                await self._pause(error)
            else:
                self._retries.reset()
                return

    async def _probe(self) -> None:
        """Opens a stream without rows: an error is then not caused by a row."""
        stream = await self._open_stream()
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await stream.done()
                while await stream.read() is not None:
                    pass
        except TimeoutError as error:
            raise NoAnswerError(stream.route.address, topic=self.topic) from error
        finally:
            stream.cancel()

    async def run(self) -> None:
        """Publishes until `end` is called, or publishing fails for good."""
        while self.failure is None:
            if not (self._again or await self._has_work()):
                return
            try:
                await self._publish()
            except IsterError as error:
                _log.debug("a stream has failed", extra={"topic": self.topic, "error": str(error)})
                try:
                    await self._recover(error)
                except IsterError as final:
                    self._give_up(final)
            except Exception as error:  # noqa: BLE001 - raised where an offset is awaited
                _log.exception("publishing has failed", extra={"topic": self.topic})
                self._fail(InvariantError(f"the client has failed: {error!r}", topic=self.topic))

    async def _has_work(self) -> bool:
        """Waits until there is something to send; False at the end."""
        item = await self._next()
        if item is None:
            return False
        self._again.appendleft(item)
        return True

    async def _recover(self, error: IsterError) -> None:
        """Gets ready to send again what is not answered.

        Raises:
            IsterError: It would not help, or the time is over.
        """
        # By their sequences: what was sent to learn an offset is before the rest.
        items = sorted((*self._unanswered, *self._again), key=lambda item: item.sequence)
        first_sent = self._unanswered[0] if self._unanswered else None
        was_sent = first_sent is not None
        self._unanswered.clear()
        self._again = deque(items)
        if isinstance(error, InvalidRequestError) and first_sent is not None:
            # Those before it are answered: it is this one that was refused.
            await self._refused(first_sent, error)
            return
        is_conflict = isinstance(error, ConflictError)
        if is_conflict and was_sent and not self._is_established:
            self._raise_epoch()
            return
        if was_sent and not is_conflict:
            self._is_established = True
            for item in items:
                item.is_doubtful = True
        await self._pause(error)

    async def _pause(self, error: IsterError) -> None:
        if (
            isinstance(error, UnauthenticatedError)
            and self._network.can_renew_token
            and not self._retries.failures
        ):
            # The token has expired; the next one has not. Not more than once in a row.
            self._retries.failures += 1
            return
        await self._retries.pause(error)

    def _raise_epoch(self) -> None:
        self._epoch += self._epoch_step
        # Not further: a broker refuses an epoch far above the last one.
        self._epoch_step = min(2 * self._epoch_step, EPOCH_STEP_MAX)
        if self._epoch > EPOCH_MAX:
            raise ConflictError("there is no higher epoch for this producer", topic=self.topic)

    async def _refused(self, item: _Item, error: InvalidRequestError) -> None:
        """Finds the refused message; fails all if none of them is.

        Raises:
            IsterError: The stream itself is refused.
        """
        if item.rows > 1:
            at = self._again.index(item)
            del self._again[at]
            for half in reversed(item.halves()):
                self._again.insert(at, half)
            return
        while True:
            try:
                await self._probe()
                break
            except InvalidRequestError:
                raise
            except IsterError as failure:
                await self._pause(failure)
        self._again.remove(item)
        self._listener.failed(item.batch, item.first, 1, error)
        later = [one for one in self._again if one.sequence > item.sequence]
        if item.is_doubtful or any(one.is_doubtful for one in later):
            self._begin_epoch()
        else:
            for one in later:
                one.sequence -= 1
            self._next_sequence -= 1

    def _begin_epoch(self) -> None:
        """Goes on after messages that were given up: their numbers would be missed."""
        self._epoch += 1

    def _give_up(self, error: IsterError) -> None:
        """Fails what is pending; for good, unless it is only the time that was over."""
        if not can_retry(error):
            self._fail(error)
            return
        self._drop_pending(error)
        self._begin_epoch()
        self._retries.reset()

    def _fail(self, error: IsterError) -> None:
        self.failure = error
        self._drop_pending(error)

    def _drop_pending(self, error: IsterError) -> None:
        items = sorted((*self._unanswered, *self._again), key=lambda item: item.sequence)
        self._unanswered.clear()
        self._again.clear()
        for item in items:
            self._listener.failed(item.batch, item.first, item.rows, error)
        # Sealed but never sent: given up with the rest, so that the order is kept.
        while isinstance(batch := self._listener.next_batch(self, is_waiting=False), Batch):
            self._listener.failed(batch, 0, batch.rows, error)

    # -- one stream -------------------------------------------------------------------------

    async def _open_stream(self) -> PutStream:
        network = self._network
        route = await network.locate(self.topic, or_home=self._create)
        try:
            address = await network.flight_address(route)
            opened = PutOpen(
                topic=self.topic,
                producer=self._producer,
                epoch=self._epoch,
                create=self._create,
                ack=self._ack,
            )
            stream = PutStream(network, route, address, opened, self._schema())
            try:
                await stream.open()
            except BaseException:
                stream.cancel()
                raise
        except IsterError as error:
            network.record_failure(route, error)
            raise
        return stream

    def _schema(self) -> pa.Schema:
        from ister.format.arrow.schema import arrow_schema  # noqa: PLC0415 - needs pyarrow, an extra

        return arrow_schema(("payload", *sorted(self._columns)))

    async def _publish(self) -> None:
        """Sends what there is over one stream, until columns are missing or the end."""
        for item in self._again:
            self._columns |= item.batch.columns
        stream = await self._open_stream()
        schema, columns = self._schema(), self._columns
        writing = asyncio.create_task(self._write_all(stream, schema, columns))
        reading = asyncio.create_task(self._read_all(stream))
        try:
            await self._watch(stream, writing, reading)
        except IsterError as error:
            self._network.record_failure(stream.route, error)
            raise
        finally:
            stream.cancel()
            for task in (writing, reading):
                task.cancel()
            await asyncio.gather(writing, reading, return_exceptions=True)

    async def _watch(
        self, stream: PutStream, writing: asyncio.Task[None], reading: asyncio.Task[None]
    ) -> None:
        """Waits for the end of a stream.

        Raises:
            IsterError: It has failed.
        """
        while not reading.done():
            answers = self._answers
            waiting = {reading} if writing.done() else {reading, writing}
            done, _ = await asyncio.wait(
                waiting, timeout=_ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if writing.done() and writing.exception() is not None:
                # The answers usually hold the cause.
                await asyncio.wait({reading}, timeout=_VERDICT_SECONDS)
                if reading.done() and LOST_STATUS in str(reading.exception()):
                    await self._probe()  # raises the cause, if it lasts
                break
            if not done and self._unanswered and answers == self._answers:
                # Slow, as a topic with a rate may be; or gone, and then this raises.
                await stream.check_broker()
        if reading.done():
            reading.result()
        if writing.done():
            writing.result()
        if self._unanswered:
            raise UnavailableError("the stream has ended early", topic=self.topic)
        # Else it was idle, and the broker needed the room: the next message opens another one.

    async def _write_all(
        self, stream: PutStream, schema: pa.Schema, columns: frozenset[str]
    ) -> None:
        while (item := await self._next(_IDLE_SECONDS)) is not None:
            if not item.batch.columns <= columns:
                # All batches of a stream have the same columns: the next stream has these too.
                self._again.appendleft(item)
                break
            batch = item.batch.to_arrow(schema, item.first, item.rows)
            self._unanswered.append(item)
            await stream.write(batch, item.sequence)
        await stream.done()

    async def _next(self, idle_seconds: float | None = None) -> _Item | None:
        """What to send next; None at the end, or if there is nothing for `idle_seconds`."""
        loop = asyncio.get_running_loop()
        idle_at = None if idle_seconds is None else loop.time() + idle_seconds
        while True:
            if self._again:
                return self._again.popleft()
            self._wake.clear()
            found = self._listener.next_batch(self, is_waiting=bool(self._unanswered))
            if isinstance(found, Batch):
                item = _Item(found, 0, found.rows, self._next_sequence)
                self._next_sequence += found.rows
                return item
            if found is None and self._is_ending:
                return None
            if found is None and idle_at is not None:
                if loop.time() >= idle_at:
                    if not self._unanswered:
                        return None
                    idle_at = loop.time() + _IDLE_SECONDS
                found = idle_at - loop.time()
            timer = None if found is None else loop.call_later(found, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _read_all(self, stream: PutStream) -> None:
        while (ack := await stream.read()) is not None:
            self._answered(ack)

    def _answered(self, ack: PutAck) -> None:
        due = self._unanswered[0] if self._unanswered else None
        if due is None or ack.sequence != due.sequence or ack.end - ack.start < due.rows:
            raise CorruptDataError(
                "the broker's answer does not match the request", topic=self.topic
            )
        self._unanswered.popleft()
        self._answers += 1
        self._is_established = True
        self._epoch_step = 1
        self._retries.reset()
        if ack.end - ack.start == due.rows:
            self._listener.placed(due.batch, due.first, due.rows, ack.start)
        else:
            # Known in parts, with others' messages between: smaller parts are asked for again.
            self._again.extendleft(reversed(due.halves()))
        if self._again or not self._unanswered:
            self._wake.set()
