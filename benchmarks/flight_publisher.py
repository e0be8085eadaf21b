"""A program that publishes by Arrow Flight with pyarrow's own client, for benchmarks and tests.

One stream of rows to the owner of a topic: sent as they come, answered in order.

    with publishing(client, "/default/orders", schema, on_ack=print) as publisher:
        publisher.write(batch)          # returns when there is room, not when it is answered

Owns: the stream, the bound on what is not answered, and whether an answer is the one that is due.
Does not own: retries. A stream that has failed stays so: `unanswered` says which batches have to
be sent again, under the same sequences, by another one; what is known of them is not doubled.

Two threads do it, one sends and one takes the answers: Flight's calls know no deadline. One that
hangs is left alone, and ends with the connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias

from ister.base import forks, threads
from ister.base.limits import MIB
from ister.base.model import AckLevel
from ister.errors import (
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.wire.contract import PutAck, PutBatch, PutOpen
from ister.wire.errors import carries_error, decode_error

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import flight

    from ister.client.flight import FlightClient

_UNANSWERED_BYTES_MAX: Final = 32 * MIB
# Threads that have to be left alone are waited for so long.
_END_SECONDS: Final = 1.0

Stream: TypeAlias = "tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]"


def publishing(
    client: FlightClient,
    topic: str,
    schema: pa.Schema,
    *,
    producer: str | None = None,
    epoch: int = 0,
    create: bool = False,
    ack: AckLevel | None = None,
    first_sequence: int = 0,
    on_ack: Callable[[PutAck], None] | None = None,
    unanswered_bytes_max: int = _UNANSWERED_BYTES_MAX,
    timeout_seconds: float | None = None,
) -> Publisher:
    """Opens a stream of rows to a topic; what is wrong shows when rows are written."""
    opened = PutOpen(topic=topic, producer=producer, epoch=epoch, create=create, ack=ack)
    return Publisher(
        topic=topic,
        schema=schema,
        open_stream=lambda: client.put(opened, schema),
        translate=lambda error: client.translate(error, topic),
        first_sequence=first_sequence,
        on_ack=on_ack,
        unanswered_bytes_max=unanswered_bytes_max,
        timeout_seconds=timeout_seconds or client.timeout_seconds,
    )


class Unanswered(NamedTuple):
    """A batch that was written and not answered."""

    sequence: int
    batch: pa.RecordBatch


class _Item(NamedTuple):
    sequence: int
    rows: int
    size_bytes: int
    batch: pa.RecordBatch


class Publisher:
    """See the module header. Thread-safe. Made by `publishing`."""

    def __init__(
        self,
        *,
        topic: str,
        schema: pa.Schema,
        open_stream: Callable[[], Stream],
        translate: Callable[[Exception], IsterError],
        first_sequence: int = 0,
        on_ack: Callable[[PutAck], None] | None = None,
        unanswered_bytes_max: int = _UNANSWERED_BYTES_MAX,
        timeout_seconds: float,
    ) -> None:
        """Begins; the stream is opened meanwhile.

        Args:
            topic: Where the rows go.
            schema: Of every batch.
            open_stream: Gives Flight's writer and reader.
            translate: Makes an error of ours out of one of the transport.
            first_sequence: Of the first row, unless `write` says otherwise.
            on_ack: Called with each answer, in order, by one thread; must not block for long.
            unanswered_bytes_max: How much may be on its way.
            timeout_seconds: How long to wait for an answer that makes room.
        """
        self.topic = topic
        self.schema = schema
        self._open_stream = open_stream
        self._translate = translate
        self._on_ack = on_ack
        self._bytes_max = unanswered_bytes_max
        self._timeout = timeout_seconds
        self._changed = threading.Condition()
        self._next_sequence = first_sequence
        self._to_send: deque[_Item] = deque()
        self._unanswered: deque[_Item] = deque()
        self._unanswered_bytes = 0
        self._answered = 0
        self._is_ending = False
        self._is_over = False  # the server has said its last word
        self._failure: IsterError | None = None
        self._acks: threading.Thread | None = None
        self._sender = threads.start("ister-publish", self._send_all)
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Makes a forked child's copy unusable; the parent sends what is still buffered."""
        forks.reset_locks(self._changed)
        self._failure, self._is_ending = error, True

    # -- for callers ------------------------------------------------------------------------

    def write(
        self,
        batch: pa.RecordBatch,
        sequence: int | None = None,
        timeout_seconds: float | None = None,
    ) -> int:
        """Sends rows as soon as there is room for them.

        Args:
            batch: The rows, at least one; do not change them before they are answered.
            sequence: The first row's; the one after the last batch's by default.
            timeout_seconds: How long to wait for room; the publisher's timeout by default.

        Returns:
            The sequence of the first row.

        Raises:
            InvalidRequestError: The batch has no rows, or other columns than the stream.
            UnavailableError: There was no answer in time, and so no room. The batch was not sent,
                and may be written again.
            ClosedError: The publisher is closed.
            IsterError: The stream has failed, and why.
        """
        if not batch.schema.equals(self.schema):
            raise InvalidRequestError("the batch has other columns than the stream")
        if not batch.num_rows:
            raise InvalidRequestError("the batch has no rows")
        with self._changed:
            size = batch.nbytes

            def has_room() -> bool:
                is_alone = not self._unanswered_bytes
                return (
                    self._failure is not None
                    or self._is_ending
                    or is_alone
                    or self._unanswered_bytes + size <= self._bytes_max
                )

            self._wait(has_room, timeout_seconds)
            self._check()
            if self._is_ending:
                raise ClosedError("the publisher is closed", topic=self.topic)
            if sequence is None:
                sequence = self._next_sequence
            item = _Item(sequence, batch.num_rows, size, batch)
            self._next_sequence = sequence + batch.num_rows
            self._to_send.append(item)
            self._unanswered.append(item)
            self._unanswered_bytes += size
            self._changed.notify_all()
        return sequence

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Waits until everything written is answered.

        Raises:
            UnavailableError: No answer came for the timeout.
            IsterError: The stream has failed, and why.
        """
        with self._changed:
            self._wait(lambda: self._failure is not None or not self._unanswered, timeout_seconds)
            self._check()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Waits until everything written is answered, and ends. May be called twice.

        Raises:
            As `flush`; it is closed all the same.
        """
        try:
            with self._changed:
                is_closed = self._is_ending
            if not is_closed:
                self.flush(timeout_seconds)
        finally:
            self.abort()

    def abort(self) -> None:
        """Ends without waiting for answers; `unanswered` says what they were for."""
        with self._changed:
            self._is_ending = True
            self._to_send.clear()
            self._changed.notify_all()
        self._sender.join(_END_SECONDS)
        acks = self._acks
        if acks is not None and acks is not threading.current_thread():
            acks.join(_END_SECONDS)

    @property
    def failure(self) -> IsterError | None:
        """Why the stream has failed; None if it has not."""
        return self._failure

    @property
    def unanswered(self) -> list[Unanswered]:
        """What was written and is not answered, in order. Whether it is in the topic is unknown."""
        with self._changed:
            return [Unanswered(item.sequence, item.batch) for item in self._unanswered]

    @property
    def next_sequence(self) -> int:
        """The sequence of the next row."""
        return self._next_sequence

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    def _wait(self, until: Callable[[], bool], timeout_seconds: float | None) -> None:
        """Waits, as long as answers come within the timeout; the condition's lock is held."""
        timeout = self._timeout if timeout_seconds is None else timeout_seconds
        while not until():
            answered = self._answered
            if (
                not self._changed.wait_for(lambda: until() or self._answered > answered, timeout)  # noqa: B023
                and self._answered == answered
            ):
                raise WaitTimeoutError(
                    f"no answer for {timeout} seconds",
                    topic=self.topic,
                    hint="wait longer, or abort",
                )

    # -- the threads ------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            writer, reader = self._open_stream()
        except Exception as error:  # noqa: BLE001 - raised again where rows are written
            self._fail(self._translate(error))
            return
        self._acks = threads.start("ister-publish-acks", self._take_all, reader)
        try:
            while (item := self._next()) is not None:
                metadata = PutBatch(sequence=item.sequence).to_json()
                writer.write_with_metadata(item.batch, metadata)
            writer.done_writing()
            self._acks.join()
        except Exception as error:  # noqa: BLE001
            # The server has often said why before, in an answer that is still to be read.
            self._acks.join(_END_SECONDS)
            self._fail(self._translate(error))
        try:
            writer.close()
        except Exception as error:  # noqa: BLE001
            self._fail(self._translate(error))
        with self._changed:
            is_owing = bool(self._unanswered) and not self._is_ending
        if is_owing:
            self._fail(UnavailableError("the stream has ended early", topic=self.topic))

    def _next(self) -> _Item | None:
        """What to send next; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._to_send or self._is_ending or self._is_over or self._failure is not None
                )
            )
            if self._failure is not None or self._is_over or not self._to_send:
                return None
            return self._to_send.popleft()

    def _take_all(self, reader: flight.FlightMetadataReader) -> None:
        try:
            while (answer := reader.read()) is not None:
                self._take(answer.to_pybytes())
        except IsterError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001
            self._fail(self._translate(error))
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _take(self, answer: bytes) -> None:
        text = answer.decode("utf-8", "replace")
        if carries_error(text):
            raise decode_error(text)
        try:
            ack = PutAck.from_json(answer)
        except InvalidRequestError as error:
            raise self._strange(f"something else: {error.message}") from error
        with self._changed:
            due = self._unanswered[0] if self._unanswered else None
            if due is None or ack.sequence != due.sequence or ack.end - ack.start < due.rows:
                raise self._strange("something that was not asked")
        if self._on_ack is not None:
            try:
                self._on_ack(ack)
            except Exception as error:
                raise InvariantError(f"on_ack failed: {type(error).__name__}") from error
        with self._changed:
            self._unanswered.popleft()
            self._unanswered_bytes -= due.size_bytes
            self._answered += 1
            self._changed.notify_all()

    def _strange(self, what: str) -> CorruptDataError:
        return CorruptDataError(f"the server answers with {what}", topic=self.topic)

    def _fail(self, failure: IsterError) -> None:
        with self._changed:
            if self._failure is None and not (self._is_ending and not self._unanswered):
                self._failure = failure
            self._changed.notify_all()

    # -- the end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __repr__(self) -> str:
        return f"<Publisher {self.topic} next_sequence={self._next_sequence}>"
