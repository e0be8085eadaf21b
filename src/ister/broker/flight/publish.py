"""One stream of rows into a topic: appended as they come, answered when they are safe.

    a thread      read ─► check ─► append ─► pending
    ack thread                               pending ─► wait for the level ─► answer

Owns: the checks of what comes from the network, the order of answers, the bound on what is not
answered yet. Does not own: what becomes of a batch that comes twice (`ister.topic.sequences`).

Batches are answered in their order. The first that is refused ends the stream: what came before it
is answered, then the error is, and nothing that came after it is appended. A client that does not
take its answers is not read from any more.

A connection that ends, at whatever moment, leaves batches in the topic that were not answered. The
client sends them again, and they are known.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from ister import threads
from ister.broker.flight.failures import as_ister_error
from ister.broker.flight.source import FlightLimits
from ister.client.contract import PutAck, PutBatch, PutOpen, encode_error
from ister.errors import (
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.format.columnar import COLUMNS
from ister.topic.sequences import Appended, SequencedTopic, check_producer
from ister.tracing import span

__all__ = ["Publishing", "check_schema"]

# How often an idle stream, or one that waits for a disk, looks whether its client is still there.
_LOOK_SECONDS: Final = 1.0


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
        _refuse_dictionaries(field.name, field.type)


def _refuse_dictionaries(name: str, kind: pa.DataType) -> None:
    """They come as messages of their own, and grow without an end that could be seen here."""
    if pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        raise InvalidRequestError(
            f"column {name!r} is of the type {kind}", hint="send the values themselves"
        )
    for number in range(kind.num_fields):
        _refuse_dictionaries(name, kind.field(number).type)


class Rows(Protocol):
    """Where batches come from."""

    def read(self) -> tuple[pa.RecordBatch | None, bytes] | None:
        """The next batch, if there is one, and what came with it; None at the end. Blocks.

        Raises:
            InvalidRequestError: What came is no batch.
        """
        ...

    def end(self) -> None:
        """Has whoever waits for the next batch find the end. Thread-safe."""
        ...


class Answers(Protocol):
    """Where answers go to."""

    @property
    def is_closed(self) -> bool:
        """Whether the client is gone."""
        ...

    def write(self, message: bytes) -> None:
        """Sends an answer; waits for room.

        Raises:
            OSError: The client is gone.
        """
        ...


class _Pending(NamedTuple):
    sequence: int
    appended: Appended
    size_bytes: int


class Publishing:
    """See the module header. Made for one call."""

    def __init__(
        self,
        topic: SequencedTopic,
        opened: PutOpen,
        rows: Rows,
        answers: Answers,
        *,
        limits: FlightLimits,
        batch_bytes_max: int,
        admit: Callable[[SequencedTopic, pa.RecordBatch], None],
        still_allowed: Callable[[], None],
        note: Callable[[SequencedTopic, pa.RecordBatch], None] = lambda _topic, _batch: None,
    ) -> None:
        """Prepares a stream.

        Args:
            topic: Where the rows go.
            opened: What the client has said at the beginning.
            rows: The batches; read by one thread.
            answers: Takes the answers; used by one thread.
            limits: Bounds.
            batch_bytes_max: The most bytes of one batch.
            admit: Called with each batch before it is appended.
            still_allowed: Raises when the client's rights have ended.
            note: Called with rows that were appended, and had not been before.

        Raises:
            InvalidRequestError: The producer's name or epoch is none.
        """
        if opened.producer is not None:
            check_producer(opened.producer, opened.epoch)
        self._topic = topic
        self._opened = opened
        self._rows = rows
        self._answers = answers
        self._limits = limits
        self._batch_bytes_max = batch_bytes_max
        self._admit = admit
        self._still_allowed = still_allowed
        self._note = note
        self._changed = threading.Condition()
        self._pending: deque[_Pending] = deque()
        self._unacked_bytes = 0
        self._is_ended = False
        self._failure: IsterError | None = None

    def run(self) -> None:
        """Takes everything that comes.

        Raises:
            IsterError: Why the stream has ended before its end. The client was told.
        """
        acks = threads.start("ister-flight-acks", self._answer_all)
        try:
            self._take_all()
        except Exception as error:  # noqa: BLE001 - sent to the client
            # Without its traceback: that would keep the batch.
            self.stop(as_ister_error(error).with_traceback(None))
        finally:
            with self._changed:
                self._is_ended = True
                self._changed.notify_all()
            acks.join()
        if self._failure is not None:
            raise self._failure

    def stop(self, failure: IsterError) -> None:
        """Ends the stream: what is appended is answered, then the client is told why."""
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()
        self._rows.end()

    # -- rows come in -----------------------------------------------------------------------

    def _take_all(self) -> None:
        while (item := self._rows.read()) is not None:
            with self._changed:
                if self._failure is not None:
                    return
            self._still_allowed()
            self._take(*item)
            del item  # whoever is slow to answer does not keep the batch
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._failure is not None
                        or self._unacked_bytes < self._limits.unacked_bytes_max
                    )
                )

    def _take(self, batch: pa.RecordBatch | None, metadata: bytes) -> None:
        if batch is None or not metadata:
            raise InvalidRequestError(
                "rows without their sequence, or the other way round",
                hint="each batch carries the sequence of its first row",
            )
        sequence = PutBatch.from_json(metadata).sequence
        size = self._check(batch)
        self._admit(self._topic, batch)
        with span("append batch", topic=self._topic.topic.name, rows=batch.num_rows):
            appended = self._append(batch, sequence)
        if appended.known < batch.num_rows:
            self._note(self._topic, batch.slice(appended.known))
        with self._changed:
            self._pending.append(_Pending(sequence, appended, size))
            self._unacked_bytes += size
            self._changed.notify_all()

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
        if opened.producer is None:
            offsets = self._topic.topic.append_arrow(batch)
            return Appended(offsets.start, offsets.stop, 0)
        return self._topic.append_arrow(
            batch, producer=opened.producer, epoch=opened.epoch, sequence=sequence
        )

    # -- answers go out ---------------------------------------------------------------------

    def _answer_all(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._wait_for(item.appended.end - 1)
                self._answer(item)
            with self._changed:
                failure = self._failure
        except Exception as error:  # noqa: BLE001 - the client is told
            failure = as_ister_error(error)
            self.stop(failure)
        if failure is not None:
            self._write(encode_error(failure).encode())

    def _next(self) -> _Pending | None:
        """The batch to answer next; None at the end, which may be an error's."""
        with self._changed:
            while not self._pending:
                if self._is_ended or self._failure is not None:
                    return None
                if not self._changed.wait(_LOOK_SECONDS):
                    self._still_allowed()
            return self._pending[0]

    def _wait_for(self, offset: int) -> None:
        while True:
            try:
                self._topic.topic.wait(offset, timeout=_LOOK_SECONDS)
            except WaitTimeoutError:
                if self._answers.is_closed:
                    raise UnavailableError("the client is gone") from None
            else:
                return

    def _answer(self, item: _Pending) -> None:
        start, end, known = item.appended
        self._write(PutAck(sequence=item.sequence, start=start, end=end, known=known).to_json())
        with self._changed:
            self._pending.popleft()
            self._unacked_bytes -= item.size_bytes
            self._changed.notify_all()

    def _write(self, message: bytes) -> None:
        try:
            self._answers.write(message)
        except OSError as error:
            self.stop(UnavailableError(f"the client is gone: {error}"))
