"""A client of the process that owns a topic, by Arrow Flight.

    with FlightClient("127.0.0.1:6651") as client:
        status = client.watermarks(["/default/orders"])["/default/orders"]
        ticket = RangeTicket(topic=status.topic, incarnation=status.incarnation,
                             start=status.tiered, end=status.readable)
        for batch in client.read(ticket): ...

Owns: the connection, deadlines, and whether an answer is what was asked for. Does not own: the
messages (`ister.wire.contract`), and retries: a call that failed with an UnavailableError may be
repeated by whoever made it, and a read goes on from the first offset that has not come out.

Nothing that comes out of `read` is taken on trust: the columns are those asked for, every batch is
validated, and offsets follow each other from the first to the last. Of `frames`, every frame is
checked by its crc. pyarrow is an extra, and is loaded when a client is made.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Self, TypeVar

from ister.base import forks, threads
from ister.base.extras import missing_extra
from ister.base.model import AckLevel, Codec, JsonObject
from ister.client.options import shown_address
from ister.client.tls_probe import find_tls_mismatch
from ister.errors import (
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NoAnswerError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.frame import FrameBatch, scan_frames
from ister.wire.contract import (
    FRAMES_COLUMN,
    HOLES,
    Action,
    AppendStaged,
    FindTime,
    FoundTime,
    FramesTicket,
    PlanUpload,
    PutOpen,
    RangeTicket,
    TopicNames,
    TopicStatus,
    UploadPlanned,
    WatermarksRequest,
    decode_appended,
)
from ister.wire.errors import carries_error, is_too_large, received_error
from ister.wire.settings import decode_settings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import flight

    from ister.topic.batches import AppendedBatch, StagedBatch

_ADDRESS: Final = re.compile(
    r"(?:(?P<scheme>grpc|grpc\+tcp|grpc\+tls)://)?"
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})"
)
_PORT_MAX: Final = 65535
_TIMEOUT_SECONDS: Final = 30.0
# Batches that wait for the consumer of a read.
_AHEAD: Final = 1
# A thread that has to be left alone is waited for so long.
_END_SECONDS: Final = 1.0
_OPTIONS: Final = [
    # A server that was restarted is found again soon: unless told, gRPC waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection whose other end has vanished ends at last, and with it a read that was given up.
    # More often than every five minutes servers take for an attack.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

_Answer = TypeVar("_Answer")


class FlightClient:
    """A connection to the owner of topics. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = _TIMEOUT_SECONDS,
        token: str | None = None,
        tls_ca: bytes | None = None,
        tls_cert: bytes | None = None,
        tls_key: bytes | None = None,
        server_name: str | None = None,
    ) -> None:
        """Connects when it is first needed.

        Args:
            address: `host:port`, or with `grpc://` or, encrypted, `grpc+tls://` before it.
            timeout_seconds: How long a call may take, and a read may go without a batch.
            token: A JWT or an API key, for a broker with authentication.
            tls_ca: Who signs the server's certificate, PEM; those that the system trusts if not
                given.
            tls_cert: The client's own certificate, PEM, for brokers that ask for one.
            tls_key: Its key, PEM.
            server_name: The name in the server's certificate, if it is not the address's.

        Raises:
            ConfigError: pyarrow is not installed.
            InvalidRequestError: That is not an address.
        """
        try:
            import pyarrow  # noqa: PLC0415 - an extra
            from pyarrow import flight  # noqa: PLC0415

            from ister.format.arrow.schema import arrow_schema  # noqa: PLC0415
        except ImportError as error:
            raise missing_extra("reading from a topic's owner", "arrow", error) from error
        if not timeout_seconds > 0:
            raise InvalidRequestError(f"timeout must be above 0 seconds, not {timeout_seconds}")
        self.address = address
        self.timeout_seconds = timeout_seconds
        self._arrow, self._flight = pyarrow, flight
        self._arrow_schema: Callable[[tuple[str, ...] | None], pa.Schema] = arrow_schema
        self._errors = (flight.FlightError, pyarrow.ArrowException, OSError)
        tls = {
            "tls_root_certs": tls_ca,
            "cert_chain": tls_cert,
            "private_key": tls_key,
            "override_hostname": server_name,
        }
        more = {name: value for name, value in tls.items() if value is not None}
        self._client = flight.FlightClient(_as_location(address), generic_options=_OPTIONS, **more)
        self._headers = (
            [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
        )
        self._is_closed = False
        self._fork_error: ClosedError | None = None
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the parent's connection without closing it; see `ister.base.forks`."""
        forks.leak(self._client)
        self._fork_error = error

    # -- calls ------------------------------------------------------------------------------

    def watermarks(
        self, topics: Iterable[str], *, timeout_seconds: float | None = None
    ) -> dict[str, TopicStatus]:
        """Returns the watermarks of topics.

        Args:
            topics: Their names.
            timeout_seconds: How long it may take; the client's timeout by default.

        Raises:
            NotFoundError: One does not exist.
            UnavailableError: The server does not answer.
        """
        request = WatermarksRequest(topics=tuple(topics))
        answers = self._call(Action.WATERMARKS, request.to_json(), timeout_seconds=timeout_seconds)
        found = [self._decoded(TopicStatus.from_json, answer) for answer in answers]
        if [status.topic for status in found] != list(request.topics):
            raise self._strange("statuses of other topics")
        return {status.topic: status for status in found}

    def topics(self) -> list[str]:
        """The names of all topics, sorted.

        Raises:
            UnavailableError: The server does not answer.
        """
        answer = self._ask(Action.TOPICS, b"")
        return sorted(self._decoded(TopicNames.from_json, answer).topics)

    def find_time(self, topic: str, publish_time_ms: int, start: int, end: int) -> int | None:
        """The first offset in a range whose message was published at or after the time.

        Raises:
            NotFoundError: There is no such topic.
            OffsetOutOfRangeError: The range is not all there.
            UnavailableError: The server does not answer.
        """
        request = FindTime(topic=topic, publish_time_ms=publish_time_ms, start=start, end=end)
        answer = self._ask(Action.FIND_TIME, request.to_json(), topic=topic)
        found = self._decoded(FoundTime.from_json, answer).offset
        if found is not None and not start <= found < end:
            raise self._strange(f"offset {found} in the range {start} up to {end}")
        return found

    def append_staged(
        self,
        topic: str,
        staged: StagedBatch,
        *,
        create: bool = False,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
        timeout_seconds: float | None = None,
    ) -> AppendedBatch:
        """Makes the owner append a staged batch; as `Log.append_staged`, so it may be repeated.

        Args:
            topic: Where to.
            staged: The rows.
            create: Make the topic if it does not exist, with the following two.
            ack: Its ack level.
            codec: Its codec.
            timeout_seconds: How long it may take; the client's timeout by default.

        Raises:
            InvalidRequestError: A file is not one of this topic's staged ones, or as below.
            UnavailableError: The server does not answer; whether the batch is in is not known.
            As `Log.topic` and `Log.append_staged`.
        """
        request = AppendStaged(topic=topic, staged=staged, create=create, ack=ack, codec=codec)
        answer = self._ask(
            Action.APPEND_STAGED, request.to_json(), topic=topic, timeout_seconds=timeout_seconds
        )
        return self._decoded(decode_appended, answer)

    def plan_upload(self, asked: PlanUpload) -> UploadPlanned:
        """Which objects an upload of a topic would make now.

        Raises:
            NotFoundError: There is no such topic.
            ConflictError: The topic is not the one of that incarnation, or the server not its owner
                of that epoch.
            FencedError: The server was its owner once.
            DataGapError: The owner's files begin after `start`.
            UnavailableError: The server does not answer, or is not sure that it still is the owner.
        """
        answer = self._ask(Action.PLAN_UPLOAD, asked.to_json(), topic=asked.topic)
        planned = self._decoded(UploadPlanned.from_json, answer)
        at = planned.start
        for end, _ in planned.objects:
            if not at < end <= planned.synced:
                raise self._strange(f"an object from {at} up to {end}", topic=asked.topic)
            at = end
        if asked.start not in (None, planned.start) or len(planned.objects) > asked.objects_max:
            raise self._strange("another plan", topic=asked.topic)
        return planned

    def storage(self) -> JsonObject:
        """The settings of the server's stores, for `ister.load_config`; without credentials.

        Raises:
            UnavailableError: The server does not answer.
        """
        return self._decoded(decode_settings, self._ask(Action.STORAGE, b""))

    def _ask(
        self,
        action: Action,
        body: bytes,
        *,
        topic: str | None = None,
        timeout_seconds: float | None = None,
    ) -> bytes:
        """The answer to an action that has exactly one."""
        answers = self._call(action, body, topic=topic, timeout_seconds=timeout_seconds)
        if len(answers) != 1:
            raise self._strange(f"{len(answers)} answers to {action}")
        return answers[0]

    def _call(
        self,
        action: Action,
        body: bytes,
        *,
        topic: str | None = None,
        timeout_seconds: float | None = None,
    ) -> list[bytes]:
        self._check_open()
        options = self._options(timeout_seconds or self.timeout_seconds)
        with self._translated(topic):
            results = self._client.do_action(self._flight.Action(str(action), body), options)
            return [result.body.to_pybytes() for result in results]

    def _options(self, timeout_seconds: float | None = None) -> flight.FlightCallOptions:
        return self._flight.FlightCallOptions(timeout=timeout_seconds, headers=self._headers)

    # -- reading ----------------------------------------------------------------------------

    def read(self, ticket: RangeTicket) -> Iterator[pa.RecordBatch]:
        """The messages of a range, in order, while they arrive.

        What has come out is right, also when an error follows: a caller that asks again begins at
        the first offset that it has not seen. Close the iterator to stop before the end.

        Raises:
            InvalidRequestError: There is no such column.
            NotFoundError: There is no such topic.
            ConflictError: The topic is not the one of that incarnation.
            OffsetOutOfRangeError: The range is not wholly stored and synced.
            UnavailableError: The server does not answer, or has ended before the end of the range:
                also where messages were left out on purpose after it had begun.
            CorruptDataError: A message is damaged, or the answer is not what was asked for.
        """
        self._check_open()
        return self._read(ticket, self._arrow_schema(ticket.columns))

    def _read(self, ticket: RangeTicket, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        next_offset, has_holes = ticket.start, False
        stream = _Stream(lambda: self._open(ticket, schema))
        try:
            while True:
                with self._translated(ticket.topic):
                    batch = stream.take(self.timeout_seconds)
                if batch is None:
                    break
                has_holes = has_holes or HOLES in (batch.schema.metadata or {})
                next_offset = self._check_batch(batch, ticket, next_offset, has_holes=has_holes)
                if batch.num_rows:
                    yield batch.replace_schema_metadata(None) if has_holes else batch
        finally:
            stream.close()
        # Where messages were left out on purpose, the last of the range may be among them.
        if next_offset < ticket.end and not has_holes:
            raise self._ended_early(ticket, next_offset)

    def _ended_early(self, ticket: RangeTicket | FramesTicket, offset: int) -> UnavailableError:
        return UnavailableError(
            f"the answer ended before offset {ticket.end}",
            topic=ticket.topic,
            offset=offset,
            hint="retry from this offset",
        )

    def frames(self, ticket: FramesTicket) -> Iterator[FrameBatch]:
        """The messages of a range as they are stored, in order, while they arrive; each checked.

        Close the iterator to stop before the end.

        Raises:
            NotFoundError: There is no such topic.
            ConflictError: The topic is not the one of that incarnation, or the server not its owner
                of that epoch.
            FencedError: The server was its owner once.
            OffsetOutOfRangeError: Not all of the range is in the owner's files and synced.
            UnavailableError: The server does not answer, is not sure that it still is the owner,
                or has ended before the end of the range.
            CorruptDataError: A frame is damaged, or the answer is not what was asked for.
        """
        self._check_open()
        return self._frames(ticket)

    def _frames(self, ticket: FramesTicket) -> Iterator[FrameBatch]:
        next_offset = ticket.start
        stream = _Stream(lambda: self._open(ticket, None))
        try:
            while True:
                with self._translated(ticket.topic):
                    batch = stream.take(self.timeout_seconds)
                if batch is None:
                    break
                for frames in self._decode_frames(batch, ticket, next_offset):
                    next_offset = frames.next_offset
                    yield frames
        finally:
            stream.close()
        if next_offset < ticket.end:
            raise self._ended_early(ticket, next_offset)

    def _decode_frames(
        self, batch: pa.RecordBatch, ticket: FramesTicket, start: int
    ) -> Iterator[FrameBatch]:
        codec = self._codec_of(batch.schema, ticket)
        self._validate(batch, ticket.topic)
        for row in batch.column(0):
            data = row.as_py() or b""
            scan = scan_frames(data, expected_offset=start, end_offset=ticket.end)
            if not scan.starts or scan.end != len(data):
                raise self._strange("damaged frames", topic=ticket.topic, offset=start)
            frames = FrameBatch(data, scan.starts, scan.end, start, codec)
            start = frames.next_offset
            yield frames

    def _validate(self, batch: pa.RecordBatch, topic: str) -> None:
        try:
            batch.validate(full=True)
        except self._errors as error:
            raise self._strange(f"a broken batch: {error}", topic=topic) from error

    def _codec_of(self, schema: pa.Schema, ticket: FramesTicket) -> Codec:
        name = (schema.metadata or {}).get(b"codec", b"").decode(errors="replace")
        try:
            return Codec(name)
        except ValueError as error:
            raise self._strange(f"the codec {name!r}", topic=ticket.topic) from error

    def _open(
        self, ticket: RangeTicket | FramesTicket, schema: pa.Schema | None
    ) -> flight.FlightStreamReader:
        """Requests a range, without a deadline, which would also limit the caller."""
        reader = self._client.do_get(self._flight.Ticket(ticket.to_json()), self._options())
        is_expected = (
            reader.schema.equals(schema)
            if schema is not None
            else reader.schema.names == [FRAMES_COLUMN] and str(reader.schema.types[0]) == "binary"
        )
        if not is_expected:
            reader.cancel()
            raise self._strange("other columns", topic=ticket.topic)
        return reader

    def _check_batch(
        self, batch: pa.RecordBatch, ticket: RangeTicket, start: int, *, has_holes: bool
    ) -> int:
        """Makes sure that a batch is what was asked for; the first offset that comes after it."""
        self._validate(batch, ticket.topic)
        if batch.num_rows > ticket.end - start:
            raise self._strange(f"offsets from {ticket.end} on", topic=ticket.topic)
        end: int = start + batch.num_rows
        if "offset" not in batch.schema.names or not batch.num_rows:
            return end
        offsets = batch["offset"]
        if not _ascends(offsets, start, by_one=not has_holes):
            raise self._strange("other offsets", topic=ticket.topic, offset=start)
        end = offsets[-1].as_py() + 1
        if end > ticket.end:
            raise self._strange(f"offsets from {ticket.end} on", topic=ticket.topic)
        return end

    # -- publishing -------------------------------------------------------------------------

    def put(
        self, opened: PutOpen, schema: pa.Schema
    ) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
        """Opens a stream of rows to a topic: Flight's own writer, and the reader of answers.

        Producers of `ister.client` use a stream that can be cancelled (`core.put_stream`).

        Raises:
            ClosedError: The client is closed.
        """
        self._check_open()
        descriptor = self._flight.FlightDescriptor.for_command(opened.to_json())
        writer, reader = self._client.do_put(descriptor, schema, self._options())
        return writer, reader

    # -- errors -----------------------------------------------------------------------------

    @contextmanager
    def _translated(self, topic: str | None = None) -> Iterator[None]:
        """Turns errors of the transport, and those that the server has sent, into ours."""
        try:
            yield
        except self._errors as error:
            raise self.translate(error, topic) from error

    def translate(self, error: Exception, topic: str | None = None) -> IsterError:
        """The error of ours that an error of the transport stands for."""
        text = str(error)
        if carries_error(text):
            return received_error(text)
        if self._is_closed:
            return ClosedError("the client is closed", topic=topic)
        text = text.partition(" gRPC client debug context")[0].partition("\n")[0]
        flight = self._flight
        if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
            return PermissionDeniedError(f"{self.address} refuses the call: {text}", topic=topic)
        if is_too_large(text):
            return MessageTooLargeError(f"{self.address}: {text}", topic=topic)
        if isinstance(error, flight.FlightTimedOutError | TimeoutError):
            return NoAnswerError(
                self.address, "time-out", topic=topic, hint="retry, or allow more time"
            )
        if isinstance(error, flight.FlightServerError):
            return UnavailableError(f"{self.address} failed: {text}", topic=topic)
        if isinstance(error, self._arrow.ArrowNotImplementedError):
            return UnsupportedOperationError(f"{self.address} refuses the call: {text}")
        if not isinstance(error, flight.FlightError | OSError):
            return self._strange(f"an error: {text}", topic=topic)
        scheme, _, address = _as_location(self.address).partition("://")
        mismatch = find_tls_mismatch(address, is_encrypted=scheme == "grpc+tls")
        if mismatch is not None:
            return mismatch
        return NoAnswerError(
            self.address,
            text,
            topic=topic,
            hint="check that the server runs and can be reached, then retry",
        )

    def _strange(
        self, what: str, *, topic: str | None = None, offset: int | None = None
    ) -> CorruptDataError:
        return CorruptDataError(
            f"{self.address} answers with {what}",
            topic=topic,
            offset=offset,
            hint="check that an Ister server of this version listens there",
        )

    def _decoded(self, decode: Callable[[bytes], _Answer], answer: bytes) -> _Answer:
        try:
            return decode(answer)
        except InvalidRequestError as error:
            raise self._strange(f"something else: {error.message}") from error

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the connection. May be called twice."""
        self._is_closed = True
        if self._fork_error is None:
            self._client.close()

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the client is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FlightClient {self.address}>"


class _Stream:
    """A read under way, whose batches can be waited for with a deadline.

    Neither the first answer nor a batch can be, in pyarrow: a thread takes them, and one that hangs
    is left alone. It ends with the connection.
    """

    def __init__(self, open_reader: Callable[[], flight.FlightStreamReader]) -> None:
        self._open_reader = open_reader
        self._waiting: queue.Queue[pa.RecordBatch | Exception | None] = queue.Queue(_AHEAD)
        self._lock = threading.Lock()
        self._reader: flight.FlightStreamReader | None = None
        self._is_closed = False
        self._thread = threads.start("ister-flight-read", self._run)

    def take(self, timeout_seconds: float) -> pa.RecordBatch | None:
        """The next batch; None at the end.

        Raises:
            TimeoutError: No batch arrived in time.
            Exception: Whatever the transport has raised.
        """
        try:
            item = self._waiting.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Ends the read, wherever it is."""
        with self._lock:
            self._is_closed = True
            reader = self._reader
        if reader is not None:
            reader.cancel()
        # The thread may be about to put one more batch there; it looks before it puts another.
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            reader = self._open_reader()
            with self._lock:
                self._reader = reader
                is_closed = self._is_closed
            if is_closed:
                reader.cancel()
                return
            for chunk in reader:
                if chunk.data is not None and not self._put(chunk.data):
                    return
        except Exception as error:  # noqa: BLE001 - raised again where the batches are taken
            self._put(error)
        else:
            self._put(None)

    def _put(self, item: pa.RecordBatch | Exception | None) -> bool:
        with self._lock:
            if self._is_closed:
                return False
        self._waiting.put(item)
        return True


def parse_brokers(text: str | None) -> tuple[str, ...]:
    """Splits Flight addresses at commas, and adds the scheme where it is missing.

    Raises:
        InvalidRequestError: One is not an address.
    """
    return () if text is None else tuple(_as_location(part.strip()) for part in text.split(","))


def _as_location(address: str) -> str:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) <= _PORT_MAX:
        raise InvalidRequestError(
            f"invalid Flight address {shown_address(address)}",
            hint="use HOST:PORT, with grpc:// or grpc+tls:// before it if needed",
        )
    return f"{match['scheme'] or 'grpc'}://{match['host']}:{match['port']}"


def _ascends(offsets: pa.Array, start: int, *, by_one: bool) -> bool:
    """Whether offsets ascend from `start` on; `by_one`: without leaving any out."""
    import pyarrow.compute as pc  # noqa: PLC0415 - an extra

    if offsets.null_count or offsets[0].as_py() < start:
        return False
    steps = pc.subtract(offsets.slice(1), offsets.slice(0, len(offsets) - 1))
    if by_one:
        return bool(offsets[0].as_py() == start and pc.all(pc.equal(steps, 1), min_count=0).as_py())
    return bool(pc.all(pc.greater(steps, 0), min_count=0).as_py())
