"""Flight's service: what clients ask for, found, allowed, counted and answered.

    gRPC's server ─► the guard ─► FlightService ─► threads: reads, publish, actions

Owns: the calls, who may make which, how many streams there are, and their end: those under way are
given a while, then they are cancelled. Does not own: the server and its limits
(`ister.broker.server`), topics (`source`), what is done with them (`reads`, `publish`).

Columns are read, checked and made in threads of this service, one at most for each call; the loop
passes their bytes on, and appends small batches itself. A read takes a thread only while its next
batch is being made, so a client that takes its time holds none.

A caller's rights are checked before a topic is looked for, so that the answer does not tell
whether it exists, and again while a stream runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import pyarrow as pa

from ister.broker.counters import Calls
from ister.broker.flight.failures import explain
from ister.broker.flight.ipc import read_batch, read_schema
from ister.broker.flight.publish import Publishing, check_schema
from ister.broker.flight.reads import (
    check_incarnation,
    check_owner,
    check_range,
    frames_schema,
    plan_upload,
    range_schema,
    read_frames,
    read_range,
    status_of,
)
from ister.broker.flight.source import (
    Access,
    Caller,
    FlightLimits,
    OpenAccess,
    TopicSource,
)
from ister.broker.rpc import streaming_handler
from ister.broker.security.rights import Permission
from ister.client.contract import (
    Action,
    AppendStaged,
    FindTime,
    FoundTime,
    FramesTicket,
    PlanUpload,
    PutOpen,
    RangeTicket,
    TopicNames,
    WatermarksRequest,
    encode_appended,
    encode_settings,
    parse_ticket,
)
from ister.client.flight_data import FlightData, decode_fields, encode_data, encode_fields
from ister.errors import (
    CapacityError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.limits import ENVELOPE_SIZE_BYTES_MAX, KIB
from ister.topic.sequences import SequencedTopic

__all__ = ["PUBLISH", "READ", "SERVICE", "FlightService", "message_bytes_max"]

SERVICE: Final = "arrow.flight.protocol.FlightService"
READ: Final = "read"
PUBLISH: Final = "publish"
"""What reads and publishes are counted as; actions are counted by their own names."""

_GRACE_SECONDS: Final = 5.0
# Beside those of streams.
_ACTION_THREADS: Final = 64
# What a batch has around its columns.
_HEADER_BYTES: Final = 256 * KIB

_Answer = TypeVar("_Answer")
_IsGone = Callable[[], bool]


def message_bytes_max(limits: FlightLimits, message_size_max: int) -> int:
    """How large a message of gRPC may be, where a topic's messages may be that large."""
    return _batch_bytes_max(limits, message_size_max) + _HEADER_BYTES


def _batch_bytes_max(limits: FlightLimits, message_size_max: int) -> int:
    return max(limits.batch_bytes_max, message_size_max + ENVELOPE_SIZE_BYTES_MAX)


class FlightService:
    """The service. Belongs to the loop that it serves on."""

    def __init__(
        self,
        source: TopicSource,
        *,
        access: Access | None = None,
        limits: FlightLimits | None = None,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        """Prepares it; `add_to` has a server use it.

        Args:
            source: The topics.
            access: Who may do what; everybody everything by default.
            limits: Bounds.
            on_call: Told what is asked for, by its name.
        """
        self._source = source
        self._access = access or OpenAccess()
        self._limits = limits or FlightLimits()
        self._on_call = on_call or (lambda what: None)
        self._streams = _Streams(self._limits)
        self._threads = ThreadPoolExecutor(
            self._limits.streams_max + _ACTION_THREADS, thread_name_prefix="ister-flight"
        )
        self._under_way: set[asyncio.Task[Any]] = set()
        self._publishing: set[Publishing] = set()
        self._lock = threading.Lock()
        self._is_ending = False
        self._actions: dict[str, Callable[[Caller, bytes, _IsGone], list[bytes]]] = {
            Action.WATERMARKS: self._watermarks,
            Action.TOPICS: self._topics,
            Action.FIND_TIME: self._find_time,
            Action.APPEND_STAGED: self._append_staged,
            Action.PLAN_UPLOAD: self._plan_upload,
            Action.STORAGE: self._storage,
        }

    def add_to(self, server: grpc.aio.Server, calls: Calls | None = None) -> None:
        """Has a server answer Flight's calls; `calls` counts them."""
        calls = calls or Calls()
        methods: dict[str, tuple[Any, bool]] = {
            "DoGet": (self.do_get, False),
            "DoPut": (self.do_put, True),
            "DoAction": (self.do_action, False),
            "ListActions": (self.list_actions, False),
        }
        for name, is_stream in _UNSUPPORTED.items():
            methods[name] = (partial(_refuse, name), is_stream)
        handlers = {}
        for name, (call, is_stream) in methods.items():
            make = (
                grpc.stream_stream_rpc_method_handler
                if is_stream
                else grpc.unary_stream_rpc_method_handler
            )
            handler = streaming_handler(
                call,
                bytes,
                f"{SERVICE}/{name}",
                is_stream=is_stream,
                counters=calls.of(SERVICE, name),
                explain=explain,
            )
            handlers[name] = make(handler)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    @property
    def streams(self) -> int:
        """Reads and publishes under way."""
        return self._streams.count

    # -- the end ----------------------------------------------------------------------------

    async def close(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """Ends: new calls are refused, those under way may take so long, publishers are told.

        Topics may be closed afterwards: no thread of this service uses them any more.
        """
        with self._lock:
            self._is_ending = True
            publishing = list(self._publishing)
        for one in publishing:
            one.stop(_ending())
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=grace_seconds)
        for task in list(self._under_way):
            task.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    @contextmanager
    def _counted(self, what: str) -> Iterator[Caller]:
        """A call under way, and who makes it."""
        task = asyncio.current_task()
        if self._is_ending or task is None:
            raise _ending()
        self._on_call(what)
        self._under_way.add(task)
        try:
            yield self._access.caller()
        finally:
            self._under_way.discard(task)

    async def _run(self, function: Callable[..., _Answer], *args: Any) -> _Answer:  # noqa: ANN401
        return await asyncio.wrap_future(self._threads.submit(function, *args))

    # -- reads ------------------------------------------------------------------------------

    async def do_get(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
        """The messages of a range."""
        with self._counted(READ) as caller:
            asked = parse_ticket(bytes(_fields(request).get(1, b"")))
            caller.check(Permission.CONSUME, topic=asked.topic)
            release = self._streams.take(caller.name)
            batches = self._batches(asked, caller)
            making = self._threads.submit(next, batches, None)
            try:
                while (data := await asyncio.wrap_future(making)) is not None:
                    yield data
                    del data  # it is gRPC's by now, and the next one needs room
                    making = self._threads.submit(next, batches, None)
            finally:
                # Not before the thread is out of it; and in a thread, as there are files to close.
                making.add_done_callback(lambda _: self._close(batches, release))

    def _close(self, batches: Generator[bytes], release: Callable[[], None]) -> None:
        def close() -> None:
            try:
                batches.close()
            finally:
                release()

        try:
            self._threads.submit(close)
        except RuntimeError:  # the service ends
            close()

    def _batches(self, asked: RangeTicket | FramesTicket, caller: Caller) -> Generator[bytes]:
        topic = self._source.open(asked.topic).topic
        check_incarnation(topic, asked.incarnation)
        allowed = partial(caller.check, Permission.CONSUME, topic=asked.topic)
        if isinstance(asked, FramesTicket):
            check_owner(topic, asked)
            schema = frames_schema(topic)
            batches = read_frames(topic, asked, allowed)
        else:
            check_range(topic, asked.start, asked.end)
            schema = range_schema(topic, asked)
            batches = read_range(topic, asked, allowed, schema)
        yield encode_data(schema.serialize())
        for batch in batches:
            yield encode_data(batch.serialize())

    async def do_action(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
        """The answers to one of `Action`."""
        fields = _fields(request)
        name = bytes(fields.get(1, b"")).decode("utf-8", "replace")
        with self._counted(name) as caller:
            left = threading.Event()
            answer = self._actions.get(name)
            if answer is None:
                raise InvalidRequestError(
                    f"there is no action {name!r}", hint=f"one of: {', '.join(Action)}"
                )
            try:
                answers = await self._run(answer, caller, bytes(fields.get(2, b"")), left.is_set)
            finally:
                left.set()
            for item in answers:
                yield encode_fields((1, item))

    async def list_actions(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
        """The names of the actions."""
        for action in Action:
            yield encode_fields((1, action.encode()), (2, action.name.encode()))

    def _watermarks(self, caller: Caller, body: bytes, _: _IsGone) -> list[bytes]:
        request = WatermarksRequest.from_json(body)
        if len(request.topics) > self._limits.topics_max:
            raise InvalidRequestError(
                f"the watermarks of {len(request.topics)} topics",
                hint=f"at most {self._limits.topics_max} at once",
            )
        for name in request.topics:
            caller.check(Permission.LOOKUP, topic=name)
        return [status_of(self._source.open(name).topic).to_json() for name in request.topics]

    def _topics(self, caller: Caller, body: bytes, _: _IsGone) -> list[bytes]:
        names = self._source.names()
        seen = tuple(name for name in names if caller.allows(Permission.LOOKUP, topic=name))
        return [TopicNames(topics=seen).to_json()]

    def _find_time(self, caller: Caller, body: bytes, is_gone: _IsGone) -> list[bytes]:
        asked = FindTime.from_json(body)
        caller.check(Permission.CONSUME, topic=asked.topic)
        topic = self._source.open(asked.topic).topic
        check_range(topic, asked.start, asked.end)
        found = self._source.searches.run_blocking(
            lambda on_read: topic.find_time(
                asked.publish_time_ms, asked.start, asked.end, on_read=on_read
            ),
            caller=caller.name,
            is_gone=is_gone,
        )
        return [FoundTime(offset=found).to_json()]

    def _plan_upload(self, caller: Caller, body: bytes, _: _IsGone) -> list[bytes]:
        asked = PlanUpload.from_json(body)
        caller.check(Permission.CONSUME, topic=asked.topic)
        topic = self._source.open(asked.topic).topic
        check_incarnation(topic, asked.incarnation)
        return [plan_upload(topic, asked).to_json()]

    def _storage(self, caller: Caller, body: bytes, _: _IsGone) -> list[bytes]:
        # Whoever may see a topic may know where its data is; others need the right to all of them.
        if not any(caller.allows(Permission.LOOKUP, topic=name) for name in self._source.names()):
            caller.check(Permission.LOOKUP)
        return [encode_settings(self._source.config)]

    # -- publishes --------------------------------------------------------------------------

    def _append_staged(self, caller: Caller, body: bytes, is_gone: _IsGone) -> list[bytes]:
        asked = AppendStaged.from_json(body)
        caller.check(Permission.PRODUCE, topic=asked.topic)
        self._source.open(asked.topic, create=asked.create, ack=asked.ack, codec=asked.codec)
        appended = self._source.append_staged(asked.topic, asked.staged, caller.name, is_gone)
        return [encode_appended(appended)]

    async def do_put(
        self,
        requests: AsyncIterator[bytes],
        context: Any,  # noqa: ANN401
    ) -> AsyncIterator[bytes]:
        """Takes rows, and gives the answers to them."""
        with self._counted(PUBLISH) as caller:
            first = await anext(requests, None)
            data = _data(first if first is not None else b"")
            if len(data.header) > _HEADER_BYTES:
                raise InvalidRequestError(
                    f"a schema of {len(data.header)} bytes", hint=f"at most {_HEADER_BYTES}"
                )
            opened = PutOpen.from_json(data.command or b"")
            caller.check(Permission.PRODUCE, topic=opened.topic)
            schema = read_schema(data)
            check_schema(schema)
            release = self._streams.take(caller.name)
            try:
                topic = await self._run(self._open_to_publish, opened)
                who: dict[str, Any] = {"producer": opened.producer, "principal": caller.name}
                publishing = Publishing(
                    topic,
                    opened,
                    read=partial(_read_rows, schema=schema, bytes_max=self._batch_bytes_max),
                    run=self._run,
                    limits=self._limits,
                    batch_bytes_max=self._batch_bytes_max,
                    admit=partial(self._source.admit, **who),
                    admits_at_once=partial(self._source.admits_at_once, **who),
                    note=self._source.note,
                    still_allowed=partial(caller.check, Permission.PRODUCE, topic=opened.topic),
                )
                with self._listed(publishing), self._source.publishing(topic):
                    taking = asyncio.create_task(publishing.take_all(requests))
                    try:
                        async for answer in publishing.answers():
                            yield encode_fields((1, answer))
                    finally:
                        taking.cancel()
                        await asyncio.gather(taking, return_exceptions=True)
            finally:
                release()

    @property
    def _batch_bytes_max(self) -> int:
        return _batch_bytes_max(self._limits, self._source.config.storage.max_message_size)

    def _open_to_publish(self, opened: PutOpen) -> SequencedTopic:
        topic = self._source.open(opened.topic, create=opened.create, ack=opened.ack)
        topic.prepare()
        return topic

    @contextmanager
    def _listed(self, publishing: Publishing) -> Iterator[None]:
        with self._lock:
            self._publishing.add(publishing)
            is_ending = self._is_ending
        if is_ending:
            publishing.stop(_ending())
        try:
            yield
        finally:
            with self._lock:
                self._publishing.discard(publishing)


class _Streams:
    """Counts streams under way, and refuses more than there may be. Thread-safe."""

    def __init__(self, limits: FlightLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._by_caller: Counter[str] = Counter()

    @property
    def count(self) -> int:
        with self._lock:
            return self._by_caller.total()

    def take(self, caller: str) -> Callable[[], None]:
        """Counts one more; returns what ends it.

        Raises:
            CapacityError: There are too many.
        """
        limits = self._limits
        with self._lock:
            is_one_too_many = self._by_caller.total() >= limits.streams_max or (
                caller != "" and self._by_caller[caller] >= limits.streams_per_caller_max
            )
            if is_one_too_many:
                raise CapacityError(
                    "too many streams at once", hint="end some, or come again in a while"
                )
            self._by_caller[caller] += 1
        return partial(self._release, caller)

    def _release(self, caller: str) -> None:
        with self._lock:
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


# Whether their requests are streams.
_UNSUPPORTED: Final = {
    "Handshake": True,
    "ListFlights": False,
    "GetFlightInfo": False,
    "PollFlightInfo": False,
    "GetSchema": False,
    "DoExchange": True,
}


async def _refuse(name: str, _request: Any, _context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
    yield _unsupported(name)


def _unsupported(name: str) -> bytes:
    raise UnsupportedOperationError(
        f"{name} is not supported",
        hint="credentials go into the header 'authorization' of each call",
    )


def _fields(request: bytes) -> dict[int, memoryview]:
    try:
        return decode_fields(request)
    except ValueError as error:
        raise InvalidRequestError(f"the request is not a message of this call: {error}") from error


def _read_rows(
    message: bytes, *, schema: pa.Schema, bytes_max: int
) -> tuple[pa.RecordBatch | None, bytes]:
    """The batch of a message, if it has one, and what came with it."""
    data = _data(message)
    return read_batch(data, schema, bytes_max=bytes_max), bytes(data.metadata)


def _data(message: bytes) -> FlightData:
    try:
        return FlightData(message)
    except ValueError as error:
        raise InvalidRequestError(f"the request is not a message of this call: {error}") from error


def _ending() -> IsterError:
    return UnavailableError("the server ends", hint="connect again, and send what is not answered")
