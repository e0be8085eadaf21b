"""One stream of rows into a topic: appended as they come, answered when they are safe.

    take_all   read ─► check ─► append ─► pending        small batches on the loop, large ones in
    answers                               pending ─► wait for the level ─► answer       a thread

Owns: the checks of what comes from the network, the order of answers, the bound on what is not
answered yet. Does not own: what becomes of a batch that comes twice (`ister.topic.sequences`).

Batches are answered in their order. The first that is refused ends the stream: what came before it
is answered, then the error is, and nothing that came after it is appended. A client that does not
take its answers is not read from any more.

Small batches stay on the loop: to hand one to a thread and back costs more than to append it, and
hundreds of them a second would have the threads wait for the interpreter lock.

A connection that ends, at whatever moment, leaves batches in the topic that were not answered. The
client sends them again, and they are known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from ister.broker.flight.failures import as_ister_error
from ister.broker.flight.source import FlightLimits
from ister.client.contract import PutAck, PutBatch, PutOpen, encode_error
from ister.errors import InvalidRequestError, IsterError, MessageTooLargeError
from ister.format.columnar import COLUMNS
from ister.limits import KIB
from ister.topic.sequences import Appended, SequencedTopic, check_producer
from ister.tracing import span

__all__ = ["Publishing", "check_schema"]

# How often a stream looks whether its client may still publish.
_LOOK_SECONDS: Final = 1.0
# What the loop takes itself: as it came and, if it was compressed, as it is then.
_SMALL_BYTES: Final = 32 * KIB
_SMALL_ROWS: Final = 1024
# What a batch takes up until it is answered, however small it is.
_PENDING_BYTES: Final = 1 * KIB
_REFERENCES: Final = (
    pa.types.is_dictionary,
    pa.types.is_run_end_encoded,
    pa.types.is_binary_view,
    pa.types.is_string_view,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def check_schema(schema: pa.Schema) -> None:
    """Refuses columns that no message has, before a row is read.

    Raises:
        InvalidRequestError: There are some, or `payload` is missing.
    """
    names = schema.names
    if len(names) > len(COLUMNS) or len(set(names)) < len(names) or not set(names) <= set(COLUMNS):
        raise InvalidRequestError(
            f"columns that a message does not have: {', '.join(map(repr, names[:20]))}",
            hint=f"each of these at most once: {', '.join(COLUMNS)}",
        )
    if "payload" not in names:
        raise InvalidRequestError("there is no column 'payload'")
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
            f"column {name!r} is of the type {kind}", hint="send the values themselves"
        )
    for number in range(kind.num_fields):
        _refuse_references(name, kind.field(number).type)


class _Pending(NamedTuple):
    sequence: int
    appended: Appended
    size_bytes: int


class Publishing:
    """See the module header. Made for one call; belongs to its loop."""

    def __init__(
        self,
        topic: SequencedTopic,
        opened: PutOpen,
        *,
        read: Callable[..., tuple[pa.RecordBatch | None, bytes]],
        run: Callable[..., Awaitable[Any]],
        limits: FlightLimits,
        batch_bytes_max: int,
        admit: Callable[..., None],
        admits_at_once: Callable[[SequencedTopic], bool],
        still_allowed: Callable[[], None],
        note: Callable[[SequencedTopic, pa.RecordBatch], None] = lambda _topic, _batch: None,
    ) -> None:
        """Prepares a stream.

        Args:
            topic: Where the rows go.
            opened: What the client has said at the beginning.
            read: Makes a batch, and what came with it, of a message and the most bytes that the
                batch may have; any thread may call it.
            run: Calls a function in a thread.
            limits: Bounds.
            batch_bytes_max: The most bytes of one batch.
            admit: Called with the topic, each batch before it is appended, and `is_gone`.
            admits_at_once: Whether the loop may call `admit`.
            still_allowed: Raises when the client's rights have ended.
            note: Called with rows that were appended, and had not been before.

        Raises:
            InvalidRequestError: The producer's name or epoch is none.
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
        self._note = note
        self._pending: deque[_Pending] = deque()
        self._unacked_bytes = 0
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_ended = False
        self._failure: IsterError | None = None

    def stop(self, failure: IsterError) -> None:
        """Ends the stream: what is appended is answered, then the client is told why."""
        if self._failure is None:
            self._failure = failure
        self._arrived.set()
        self._has_room.set()

    # -- rows come in -----------------------------------------------------------------------

    async def take_all(self, requests: AsyncIterator[bytes]) -> None:
        """Takes everything that comes, until the stream ends or is stopped."""
        ahead: asyncio.Future[bytes | None] | None = None
        watching = asyncio.create_task(self._watch())
        try:
            while self._failure is None:
                message = await (anext(requests, None) if ahead is None else ahead)
                ahead = None
                if message is None or self._failure is not None:
                    break
                self._still_allowed()
                item: _Pending | None = None
                if len(message) <= _SMALL_BYTES and self._admits_at_once(self._topic):
                    item = await self._take_here(message)
                if item is None:
                    # The next one comes over the network meanwhile.
                    ahead = asyncio.ensure_future(anext(requests, None))
                    item = await self._run(self._take, message)
                del message
                assert item is not None  # noqa: S101 - for mypy
                self._pending.append(item)
                self._unacked_bytes += item.size_bytes
                self._arrived.set()
                await self._wait_for_room()
        except Exception as error:  # noqa: BLE001 - sent to the client
            # Without its traceback: that would keep the batch.
            self.stop(as_ister_error(error).with_traceback(None))
        finally:
            watching.cancel()
            if ahead is not None:
                ahead.cancel()
            self._is_ended = True
            self._arrived.set()

    async def _watch(self) -> None:
        """Ends a stream whose client may not publish any more, also while it says nothing."""
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                self._still_allowed()
        except Exception as error:  # noqa: BLE001 - sent to the client
            self.stop(as_ister_error(error).with_traceback(None))

    async def _wait_for_room(self) -> None:
        while self._failure is None and self._unacked_bytes >= self._limits.unacked_bytes_max:
            self._has_room.clear()
            await self._has_room.wait()

    def _take(self, message: bytes) -> _Pending:
        """Checks and appends a batch, however long that takes. In any thread."""
        batch, metadata = self._read(message, bytes_max=self._batch_bytes_max)
        batch, sequence, size = self._open(batch, metadata)
        return self._noted(batch, sequence, size, self._append(batch, sequence))

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
        return self._noted(batch, sequence, size, appended)

    def _open(
        self, batch: pa.RecordBatch | None, metadata: bytes
    ) -> tuple[pa.RecordBatch, int, int]:
        """The rows of a message, checked and admitted; their sequence and their size."""
        if batch is None or not metadata:
            raise InvalidRequestError(
                "rows without their sequence, or the other way round",
                hint="each batch carries the sequence of its first row",
            )
        sequence = PutBatch.from_json(metadata).sequence
        size = self._check(batch)
        self._admit(self._topic, batch, is_gone=lambda: self._is_ended)
        return batch, sequence, size

    def _noted(
        self, batch: pa.RecordBatch, sequence: int, size: int, appended: Appended
    ) -> _Pending:
        if appended.known < batch.num_rows:
            self._note(self._topic, batch.slice(appended.known) if appended.known else batch)
        return _Pending(sequence, appended, size + _PENDING_BYTES)

    def _check(self, batch: pa.RecordBatch) -> int:
        """Refuses rows that are none, before anything else looks at them; returns their size."""
        rows = batch.num_rows
        if not 0 < rows <= self._limits.batch_rows_max:
            raise InvalidRequestError(
                f"a batch of {rows} rows", hint=f"1 up to {self._limits.batch_rows_max}"
            )
        # Of the buffers as they came: lengths inside of them are not to be believed yet.
        size: int = batch.get_total_buffer_size()
        if size > self._batch_bytes_max:
            raise MessageTooLargeError(
                f"a batch of {size} bytes", hint=f"at most {self._batch_bytes_max}"
            )
        try:
            batch.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidRequestError(f"a batch is not valid Arrow: {error}") from error
        return size

    def _append(self, batch: pa.RecordBatch, sequence: int) -> Appended:
        opened = self._opened
        with span("append batch", topic=self._topic.topic.name, rows=batch.num_rows):
            if opened.producer is None:
                offsets = self._topic.topic.append_arrow(batch)
                return Appended(offsets.start, offsets.stop, 0)
            return self._topic.append_arrow(
                batch, producer=opened.producer, epoch=opened.epoch, sequence=sequence
            )

    # -- answers go out ---------------------------------------------------------------------

    async def answers(self) -> AsyncIterator[bytes]:
        """The answers, as batches become safe; the last one is the error, if there is one.

        Raises:
            IsterError: Why the stream has ended before its end. The client was told.
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
                self._has_room.set()
        except Exception as error:  # noqa: BLE001 - the client is told
            self.stop(as_ister_error(error))
        if self._failure is not None:
            yield encode_error(self._failure).encode()
            raise self._failure
