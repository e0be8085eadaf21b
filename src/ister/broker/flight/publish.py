"""One stream of rows into a topic: appended as they arrive, answered at the ack level.

    take_all   read ─┬─► check ─► append ─┬─► pending        a small batch, on the loop
                     └─► queue ─► thread ─┘                  others, and what comes behind them
    answers    pending ─► wait for the level ─► answer

Owns: the checks of rows from the network, the order of answers, the bounds on what is not appended
and not answered yet. Does not own: deduplication of batches (`ister.topic.dedup`).

Batches are appended and answered in their order. The first refused batch ends the stream: earlier
ones are answered, then the error is sent, and no later one is appended. While a client does not
read its answers, nothing more is read from it.

Small batches stay on the loop: to hand one to a thread and back costs more than to append it, and
hundreds of them a second would have the threads wait for the interpreter lock. Of large ones, some
wait in the queue, so that the network and the thread do not wait for each other; one call of the
thread takes all that it finds there.

A connection may end at any moment, and leaves batches in the topic that were not answered. The
client sends them again, and they are recognised as duplicates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from ister import kernels
from ister.base.limits import KIB, MANY_ROWS, MIB
from ister.base.model import COLUMNS
from ister.base.tracing import span
from ister.broker.flight.broker_source import FlightLimits
from ister.broker.flight.failures import as_ister_error
from ister.errors import InvalidRequestError, IsterError, MessageTooLargeError
from ister.format.payloads import Payloads
from ister.topic.dedup import Appended, SequencedTopic, check_producer
from ister.wire.contract import PutAck, PutBatch, PutOpen
from ister.wire.errors import encode_error

# A producer that has sent nothing for so long may be idle for longer.
_IDLE_SECONDS: Final = 1.0
# How often a stream looks whether its client may still publish.
_LOOK_SECONDS: Final = 1.0
# What the loop takes itself: as it came and, if it was compressed, as it is then.
_SMALL_BYTES: Final = 32 * KIB
_SMALL_ROWS: Final = 1024
# What a batch takes up in the queue, and until it is answered, however small it is.
_PENDING_BYTES: Final = 1 * KIB
# While less than this waits to be appended, more is read: the size of two batches or so.
_QUEUED_BYTES: Final = 2 * MIB
_REFERENCES: Final = (
    pa.types.is_dictionary,
    pa.types.is_run_end_encoded,
    pa.types.is_binary_view,
    pa.types.is_string_view,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def check_schema(schema: pa.Schema) -> None:
    """Refuses columns that no message has, before a row is read."""
    names = schema.names
    if len(names) > len(COLUMNS) or len(set(names)) < len(names) or not set(names) <= set(COLUMNS):
        raise InvalidRequestError(
            f"unknown or repeated columns: {', '.join(map(repr, names[:20]))}",
            hint=f"use each of these at most once: {', '.join(COLUMNS)}",
        )
    if "payload" not in names:
        raise InvalidRequestError("the column 'payload' is missing")
    for field in schema:
        _refuse_references(field.name, field.type)


def _refuse_references(name: str, kind: pa.DataType) -> None:
    """Refuses types whose values are not what the buffers hold, one after the other.

    Dictionaries come as messages of their own, and grow without an end that could be seen here. The
    rows of a view, and those of a run, may all be the same bytes: a megabyte is sent, and terabytes
    are to be appended.
    """
    if isinstance(kind, pa.BaseExtensionType) or any(is_one(kind) for is_one in _REFERENCES):
        raise InvalidRequestError(
            f"column {name!r} has the unsupported type {kind}", hint="send plain values"
        )
    for number in range(kind.num_fields):
        _refuse_references(name, kind.field(number).type)


_Result = TypeVar("_Result")

Rows: TypeAlias = "pa.RecordBatch | Payloads"
"""Rows as they came: payloads alone, which were checked, or any other batch."""


class Run(Protocol):
    """Calls a function in a thread."""

    def __call__(self, function: Callable[..., _Result], *args: object) -> Awaitable[_Result]: ...


class _Pending(NamedTuple):
    sequence: int
    appended: Appended
    size_bytes: int
    queued_bytes: int = 0
    """What its message took up in the queue, if it was there."""


class Publishing:
    """See the module header. Made for one call; belongs to its loop."""

    def __init__(
        self,
        topic: SequencedTopic,
        opened: PutOpen,
        *,
        read: Callable[..., tuple[Rows | None, bytes]],
        run: Run,
        limits: FlightLimits,
        batch_bytes_max: int,
        admit: Callable[..., None],
        admits_at_once: Callable[[SequencedTopic], bool],
        still_allowed: Callable[[], None],
        on_appended: Callable[[SequencedTopic, Rows], None] = lambda _topic, _rows: None,
    ) -> None:
        """Prepares a stream.

        `read` makes a batch, and what came with it, of a message and the most bytes that the batch
        may have; any thread may call it. `run` calls a function in a thread. `admit` is called with
        the topic, each batch before it is appended, and `is_gone`; the loop may call it if
        `admits_at_once`. `still_allowed` raises when the client's rights have ended. `on_appended`
        is called with rows that were appended, and had not been before.
        """
        if opened.producer is not None:
            check_producer(opened.producer, opened.epoch)
        self._topic = topic
        self._opened = opened
        self._read = read
        self._run = run
        self._limits = limits
        self._batch_bytes_max = batch_bytes_max
        self._admit = admit
        self._admits_at_once = admits_at_once
        self._still_allowed = still_allowed
        self._on_appended = on_appended
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._working: asyncio.Future[None] | None = None
        self._taken: deque[_Pending] = deque()
        self._pending: deque[_Pending] = deque()
        self._unacked_bytes = 0
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_ended = False
        self._is_taking = False
        self._failure: IsterError | None = None
        self.idle_since = self._loop.time()
        """When it last received or answered something."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, being appended or not answered, for a second at least."""
        return (
            not (self._pending or self._queue or self._taken or self._is_taking)
            and self._working is None
            and self._loop.time() - self.idle_since >= _IDLE_SECONDS
        )

    def finish(self) -> None:
        """Ends an idle stream in order: its producer opens another when it sends again."""
        self._is_ended = True
        self._arrived.set()

    def stop(self, failure: IsterError) -> None:
        """Ends the stream: answers what was appended, then sends the error to the client."""
        if self._failure is None:
            self._failure = failure
        self._arrived.set()
        self._has_room.set()

    # -- rows come in -----------------------------------------------------------------------

    async def take_all(self, requests: AsyncIterator[bytes]) -> None:
        """Takes everything that comes, until the stream ends or is stopped."""
        watching = asyncio.create_task(self._watch())
        try:
            while self._failure is None:
                message = await anext(requests, None)
                if message is None or self._failure is not None:
                    break
                self._is_taking = True
                self._still_allowed()
                is_small = len(message) <= _SMALL_BYTES and self._working is None
                item = None
                if is_small and self._admits_at_once(self._topic):
                    item = await self._take_here(message)
                if item is not None:
                    self._hand_on(item)
                else:
                    self._queue_up(message)
                del message
                await self._wait_for_room()
                self._is_taking = False
            await self._end_work()
        except Exception as error:  # noqa: BLE001 - sent to the client
            await self._end_work()
            # Without its traceback: that would keep the batch.
            self.stop(as_ister_error(error).with_traceback(None))
        finally:
            watching.cancel()
            self._queue.clear()
            self._is_ended = True
            self._arrived.set()

    def _hand_on(self, item: _Pending) -> None:
        """Adds an appended batch to those that are answered once they are durable."""
        self._pending.append(item)
        self._unacked_bytes += item.size_bytes
        self._arrived.set()

    async def _watch(self) -> None:
        """Ends a stream once its client may not publish any more, also while it is idle."""
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                self._still_allowed()
        except Exception as error:  # noqa: BLE001 - sent to the client
            self.stop(as_ister_error(error).with_traceback(None))

    async def _wait_for_room(self) -> None:
        while self._failure is None and (
            self._queued_bytes >= _QUEUED_BYTES
            or self._unacked_bytes + self._queued_bytes >= self._limits.unacked_bytes_max
        ):
            self._has_room.clear()
            await self._has_room.wait()

    # -- in a thread --------------------------------------------------------------------------

    def _queue_up(self, message: bytes) -> None:
        self._queue.append(message)
        self._queued_bytes += len(message) + _PENDING_BYTES
        if self._working is None:
            self._begin_work()

    def _begin_work(self) -> None:
        self._working = asyncio.ensure_future(self._run(self._work))
        self._working.add_done_callback(self._after_work)

    def _work(self) -> None:
        """Decodes and appends queued batches until the queue is empty. In a thread."""
        while self._queue and self._failure is None:
            message = self._queue.popleft()
            item = self._take(message)._replace(queued_bytes=len(message) + _PENDING_BYTES)
            del message
            self._taken.append(item)
            if len(self._taken) == 1:
                with suppress(RuntimeError):  # the loop has ended, and the stream with it
                    self._loop.call_soon_threadsafe(self._hand_on_taken)

    def _hand_on_taken(self) -> None:
        while self._taken:
            item = self._taken.popleft()
            self._queued_bytes -= item.queued_bytes
            self._hand_on(item)
        self._has_room.set()

    def _after_work(self, work: asyncio.Future[None]) -> None:
        """Called on the loop when the thread ends: the queue was empty, or a batch is refused."""
        self._working = None
        self._hand_on_taken()
        error = None if work.cancelled() else work.exception()
        if isinstance(error, Exception):
            self.stop(as_ister_error(error).with_traceback(None))
        elif self._queue and self._failure is None:
            self._begin_work()  # a batch arrived as the thread ended

    async def _end_work(self) -> None:
        """Waits until nothing is queued any more."""
        while self._working is not None:
            await asyncio.wait([self._working])  # `_after_work` was called by then

    def _take(self, message: bytes) -> _Pending:
        """Checks and appends a batch, however long that takes. In any thread."""
        batch, metadata = self._read(message, bytes_max=self._batch_bytes_max)
        batch, sequence, size = self._open(batch, metadata)
        return self._record_appended(batch, sequence, size, self._append(batch, sequence))

    # -- on the loop ----------------------------------------------------------------------------

    async def _take_here(self, message: bytes) -> _Pending | None:
        """Like `_take`, on the loop; a thread helps where it would have to wait.

        Returns:
            None if there is more in the batch than its message is large: it is for `_take`.
        """
        try:
            found, metadata = self._read(message, bytes_max=_SMALL_BYTES)
        except MessageTooLargeError:
            return None
        if found is not None and found.num_rows > _SMALL_ROWS:
            return None
        batch, sequence, size = self._open(found, metadata)
        opened = self._opened
        appended = None
        if opened.producer is not None:
            with span("append batch", topic=self._topic.topic.name, rows=batch.num_rows):
                appended = self._topic.try_append_arrow(
                    batch, producer=opened.producer, epoch=opened.epoch, sequence=sequence
                )
        if appended is None:
            appended = await self._run(self._append, batch, sequence)
        return self._record_appended(batch, sequence, size, appended)

    def _open(self, batch: Rows | None, metadata: bytes) -> tuple[Rows, int, int]:
        """The rows of a message, checked and admitted; their sequence and their size."""
        if batch is None or not metadata:
            raise InvalidRequestError(
                "a batch without a sequence, or a sequence without a batch",
                hint="send the sequence of its first row with each batch",
            )
        sequence = PutBatch.from_json(metadata).sequence
        size = self._check(batch)
        self._admit(self._topic, batch, is_gone=lambda: self._is_ended)
        return batch, sequence, size

    def _record_appended(
        self, batch: Rows, sequence: int, size: int, appended: Appended
    ) -> _Pending:
        if appended.known < batch.num_rows:
            self._on_appended(self._topic, batch.slice(appended.known) if appended.known else batch)
        return _Pending(sequence, appended, size + _PENDING_BYTES)

    def _check(self, batch: Rows) -> int:
        """Refuses invalid rows before they are used; returns their size."""
        rows = batch.num_rows
        if not 0 < rows <= self._limits.batch_rows_max:
            raise InvalidRequestError(
                f"a batch must have 1 to {self._limits.batch_rows_max} rows, not {rows}"
            )
        if rows >= MANY_ROWS:
            kernels.request()  # without waiting: the next batches are faster
        # Of the buffers as they came: lengths inside of them are not to be believed yet.
        size: int = (
            batch.size_bytes if isinstance(batch, Payloads) else batch.get_total_buffer_size()
        )
        if size > self._batch_bytes_max:
            raise MessageTooLargeError(
                f"a batch must have at most {self._batch_bytes_max} bytes, not {size}"
            )
        if not isinstance(batch, Payloads):
            try:
                batch.validate(full=True)
            except (pa.ArrowException, ValueError) as error:
                raise InvalidRequestError(f"a batch is not valid Arrow: {error}") from error
        return size

    def _append(self, batch: Rows, sequence: int) -> Appended:
        opened, topic = self._opened, self._topic.topic
        with span("append batch", topic=topic.name, rows=batch.num_rows):
            if opened.producer is None:
                offsets = (
                    topic.appender.append_payloads(batch)
                    if isinstance(batch, Payloads)
                    else topic.append_arrow(batch)
                )
                return Appended(offsets.start, offsets.stop, 0)
            return self._topic.append_arrow(
                batch, producer=opened.producer, epoch=opened.epoch, sequence=sequence
            )

    # -- answers go out ---------------------------------------------------------------------

    async def answers(self) -> AsyncIterator[bytes]:
        """The answers, as batches become safe; the last one is the error, if there is one.

        Raises:
            IsterError: Why the stream ended early. The client received it.
        """
        pending = self._pending
        try:
            while pending or not (self._is_ended or self._failure is not None):
                if not pending:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                start, end, known = pending[0].appended
                await self._topic.topic.aio.wait(end - 1)
                ack = PutAck(sequence=pending[0].sequence, start=start, end=end, known=known)
                yield ack.to_json()
                self._unacked_bytes -= pending.popleft().size_bytes
                self.idle_since = self._loop.time()
                self._has_room.set()
        except Exception as error:  # noqa: BLE001 - sent to the client
            self.stop(as_ister_error(error))
        if self._failure is not None:
            yield encode_error(self._failure).encode()
            raise self._failure
