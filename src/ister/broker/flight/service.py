"""Flight's service: checks the caller's rights, finds the topic, counts the call, answers it.

    gRPC's server ─► the guard ─► FlightService ─► threads: reads, publish, actions

Owns: the calls, which right each needs, the number of streams, and their end: at shutdown, calls
under way are cancelled after a grace period. Does not own: the server and its limits
(`ister.broker.server`), topics (`source`), reading and publishing (`reads`, `publish`).

Batches are decoded, checked and encoded in threads of this service, at most one for each call; the
loop passes their bytes on, and appends small batches itself. A read uses a thread only while its
next batch is being encoded, so a slow client holds none.

A caller's rights are checked before the topic is looked up, so that the answer does not reveal
whether it exists, and again while a stream is open.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, TypedDict, TypeVar

import grpc
import pyarrow as pa

from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX, KIB
from ister.broker.counters import Calls
from ister.broker.flight.broker_source import (
    BrokerSource,
    FlightAccess,
    FlightCaller,
    FlightLimits,
)
from ister.broker.flight.failures import explain
from ister.broker.flight.ipc import PlainRows, read_batch, read_schema
from ister.broker.flight.publish import Publishing, Rows, check_schema
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
from ister.broker.rpc.handlers import streaming_handler
from ister.broker.security.rights import Permission
from ister.errors import (
    CapacityError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.topic.dedup import SequencedTopic
from ister.wire.contract import (
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
    parse_ticket,
)
from ister.wire.flight_data import FlightData, decode_fields, encode_data, encode_fields
from ister.wire.settings import encode_settings, has_local_stores

SERVICE: Final = "arrow.flight.protocol.FlightService"
READ: Final = "read"
PUBLISH: Final = "publish"
"""The names under which reads and publishes are counted; actions are counted by their own names."""

_GRACE_SECONDS: Final = 5.0
# In addition to one thread for each stream.
_ACTION_THREADS: Final = 64
# The parts of a batch that are not columns.
_HEADER_BYTES: Final = 256 * KIB

_Answer = TypeVar("_Answer")
_IsGone = Callable[[], bool]


def message_bytes_max(limits: FlightLimits, message_size_max: int) -> int:
    """The largest gRPC message, if a topic's messages may have `message_size_max` bytes."""
    return _batch_bytes_max(limits, message_size_max) + _HEADER_BYTES


def _batch_bytes_max(limits: FlightLimits, message_size_max: int) -> int:
    return max(limits.batch_bytes_max, message_size_max + ENVELOPE_SIZE_BYTES_MAX)


class FlightService:
    """The Flight service. Used on the loop that it serves on."""

    def __init__(
        self,
        source: BrokerSource,
        *,
        access: FlightAccess,
        limits: FlightLimits | None = None,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        """Prepares the service; `add_to` adds it to a server.

        `on_call` is called with the name of each call.
        """
        self._source = source
        self._access = access
        self._limits = limits or FlightLimits()
        self._on_call = on_call or (lambda what: None)
        self._streams = _Streams(self._limits)
        self._threads = ThreadPoolExecutor(
            self._limits.streams_max + _ACTION_THREADS, thread_name_prefix="ister-flight"
        )
        self._under_way: set[asyncio.Task[object]] = set()
        self._publishing: set[Publishing] = set()
        self._lock = threading.Lock()
        self._is_ending = False
        self._actions: dict[str, Callable[[FlightCaller, bytes, _IsGone], list[bytes]]] = {
            Action.WATERMARKS: self._watermarks,
            Action.TOPICS: self._topics,
            Action.FIND_TIME: self._find_time,
            Action.APPEND_STAGED: self._append_staged,
            Action.PLAN_UPLOAD: self._plan_upload,
            Action.STORAGE: self._storage,
        }

    def add_to(self, server: grpc.aio.Server, calls: Calls | None = None) -> None:
        """Adds Flight's calls to a server; `calls` counts them."""
        calls = calls or Calls()
        methods: dict[str, tuple[Callable[..., AsyncIterator[bytes]], bool]] = {
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
                counters=calls.of(SERVICE, name),
                explain=explain,
            )
            handlers[name] = make(handler)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    @property
    def streams(self) -> int:
        """Reads and publishes under way."""
        return self._streams.count

    @property
    def busy_streams(self) -> int:
        """Streams that are not idle, and so would not be ended to make room for others."""
        return self._streams.busy

    @property
    def streams_max(self) -> int:
        """The most reads and publishes at once."""
        return self._limits.streams_max

    @property
    def streams_refused(self) -> int:
        """Reads and publishes that were refused because there were too many."""
        return self._streams.refused

    # -- the end ----------------------------------------------------------------------------

    async def close(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """Refuses new calls, and ends those under way within the grace period.

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
    def _counted(self, what: str) -> Iterator[FlightCaller]:
        """Counts a call under way; yields its caller."""
        task = asyncio.current_task()
        if self._is_ending or task is None:
            raise _ending()
        self._on_call(what)
        self._under_way.add(task)
        try:
            yield self._access.caller()
        finally:
            self._under_way.discard(task)

    async def _run(self, function: Callable[..., _Answer], *args: object) -> _Answer:
        return await asyncio.wrap_future(self._threads.submit(function, *args))

    # -- reads ------------------------------------------------------------------------------

    async def do_get(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        """The messages of a range."""
        with self._counted(READ) as caller:
            asked = parse_ticket(bytes(_fields(request).get(1, b"")))
            caller.check(Permission.CONSUME, topic=asked.topic)
            release = partial(self._streams.release, self._streams.take(caller.name))
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

    def _batches(self, asked: RangeTicket | FramesTicket, caller: FlightCaller) -> Generator[bytes]:
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

    async def do_action(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        """The answers to one of `Action`."""
        fields = _fields(request)
        name = bytes(fields.get(1, b"")).decode("utf-8", "replace")
        with self._counted(name) as caller:
            left = threading.Event()
            answer = self._actions.get(name)
            if answer is None:
                raise InvalidRequestError(
                    f"unknown action {name!r}", hint=f"use one of: {', '.join(Action)}"
                )
            try:
                answers = await self._run(answer, caller, bytes(fields.get(2, b"")), left.is_set)
            finally:
                left.set()
            for item in answers:
                yield encode_fields((1, item))

    async def list_actions(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        """The names of the actions, and what they do."""
        for action in Action:
            yield encode_fields((1, action.encode()), (2, _DESCRIPTIONS[action].encode()))

    def _watermarks(self, caller: FlightCaller, body: bytes, _: _IsGone) -> list[bytes]:
        request = WatermarksRequest.from_json(body)
        if len(request.topics) > self._limits.topics_max:
            raise InvalidRequestError(
                f"too many topics: {len(request.topics)}",
                hint=f"request at most {self._limits.topics_max} at once",
            )
        for name in request.topics:
            caller.check(Permission.LOOKUP, topic=name)
        return [status_of(self._source.open(name).topic).to_json() for name in request.topics]

    def _topics(self, caller: FlightCaller, body: bytes, _: _IsGone) -> list[bytes]:
        names = self._source.names()
        seen = tuple(name for name in names if caller.allows(Permission.LOOKUP, topic=name))
        return [TopicNames(topics=seen).to_json()]

    def _find_time(self, caller: FlightCaller, body: bytes, is_gone: _IsGone) -> list[bytes]:
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

    def _plan_upload(self, caller: FlightCaller, body: bytes, _: _IsGone) -> list[bytes]:
        asked = PlanUpload.from_json(body)
        caller.check(Permission.CONSUME, topic=asked.topic)
        topic = self._source.open(asked.topic).topic
        check_incarnation(topic, asked.incarnation)
        return [plan_upload(topic, asked).to_json()]

    def _storage(self, caller: FlightCaller, body: bytes, _: _IsGone) -> list[bytes]:
        # A caller that may see any topic may know where its data is; others need the permission.
        if not any(caller.allows(Permission.LOOKUP, topic=name) for name in self._source.names()):
            caller.check(Permission.LOOKUP)
        config, shows_paths = self._source.config, caller.allows(Permission.MANAGE_BROKER)
        if not shows_paths and has_local_stores(config):
            caller.check(Permission.MANAGE_BROKER)
        return [encode_settings(config, shows_paths=shows_paths)]

    # -- publishes --------------------------------------------------------------------------

    def _append_staged(self, caller: FlightCaller, body: bytes, is_gone: _IsGone) -> list[bytes]:
        asked = AppendStaged.from_json(body)
        caller.check(Permission.PRODUCE, topic=asked.topic)
        creator = caller if asked.create else None
        self._source.open(asked.topic, creator=creator, ack=asked.ack, codec=asked.codec)
        appended = self._source.append_staged(asked.topic, asked.staged, caller.name, is_gone)
        return [encode_appended(appended)]

    async def do_put(
        self,
        requests: AsyncIterator[bytes],
        context: object,
    ) -> AsyncIterator[bytes]:
        """Appends rows, and answers each batch."""
        with self._counted(PUBLISH) as caller:
            first = await anext(requests, None)
            data = _data(first if first is not None else b"")
            if len(data.header) > _HEADER_BYTES:
                raise InvalidRequestError(
                    f"a schema must have at most {_HEADER_BYTES} bytes, not {len(data.header)}"
                )
            opened = PutOpen.from_json(data.command or b"")
            caller.check(Permission.PRODUCE, topic=opened.topic)
            schema = read_schema(data)
            check_schema(schema)
            slot = self._streams.take(caller.name)
            try:
                topic = await self._run(self._open_to_publish, opened, caller)
                who = _Publisher(producer=opened.producer, principal=caller.name)
                publishing = Publishing(
                    topic,
                    opened,
                    read=partial(_read_rows, schema=schema, plain=PlainRows(schema)),
                    run=self._run,
                    limits=self._limits,
                    batch_bytes_max=self._batch_bytes_max,
                    admit=partial(self._source.admit, **who),
                    admits_at_once=partial(self._source.admits_at_once, **who),
                    on_appended=self._source.count_appended,
                    still_allowed=partial(caller.check, Permission.PRODUCE, topic=opened.topic),
                )
                slot.publishing = publishing
                with (
                    self._listed(publishing),
                    self._source.publishing(topic, opened.producer),
                ):
                    taking = asyncio.create_task(publishing.take_all(requests))
                    try:
                        async for answer in publishing.answers():
                            yield encode_fields((1, answer))
                    finally:
                        taking.cancel()
                        await asyncio.gather(taking, return_exceptions=True)
            finally:
                self._streams.release(slot)

    @property
    def _batch_bytes_max(self) -> int:
        return _batch_bytes_max(self._limits, self._source.config.storage.max_message_size)

    def _open_to_publish(self, opened: PutOpen, caller: FlightCaller) -> SequencedTopic:
        creator = caller if opened.create else None
        topic = self._source.open(opened.topic, creator=creator, ack=opened.ack)
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


class _Publisher(TypedDict):
    producer: str | None
    principal: str


class _Slot:
    """A stream under way."""

    __slots__ = ("caller", "publishing")

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.publishing: Publishing | None = None
        """What it publishes; None for a read, and before its topic is open."""

    @property
    def idle(self) -> Publishing | None:
        """What it publishes, if it is idle: ending it loses nothing."""
        publishing = self.publishing
        return publishing if publishing is not None and publishing.is_idle else None


class _Streams:
    """Counts streams under way, and refuses more than there may be. Thread-safe.

    Before a stream is refused, that of the producer that has been idle for longest is ended; the
    producer opens another when it sends again.
    """

    def __init__(self, limits: FlightLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._slots: dict[_Slot, None] = {}
        self._by_caller: Counter[str] = Counter()
        self.refused = 0

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> int:
        with self._lock:
            return sum(slot.idle is None for slot in self._slots)

    def take(self, caller: str) -> _Slot:
        """Counts one more stream; `release` ends that."""
        limits = self._limits
        with self._lock:
            of_caller = self._by_caller[caller] if caller else 0
            if of_caller >= limits.streams_per_caller_max:
                self._make_room(
                    [slot for slot in self._slots if slot.caller == caller],
                    f"{caller} has {of_caller} Flight streams",
                    f"max_flight_streams_per_principal is {limits.streams_per_caller_max}",
                )
            if len(self._slots) >= limits.streams_max:
                self._make_room(
                    list(self._slots),
                    f"{len(self._slots)} Flight streams are open",
                    f"max_flight_streams is {limits.streams_max}",
                )
            slot = _Slot(caller)
            self._slots[slot] = None
            self._by_caller[caller] += 1
        return slot

    def _make_room(self, slots: list[_Slot], words: str, limit: str) -> None:
        idle = [(one, slot) for slot in slots if (one := slot.idle) is not None]
        if not idle:
            self.refused += 1
            raise CapacityError(
                words, hint=f"close some streams, retry later, or raise broker.limits.{limit}"
            )
        publishing, slot = min(idle, key=lambda one: one[0].idle_since)
        publishing.finish()
        self._remove(slot)

    def release(self, slot: _Slot) -> None:
        """Counts one stream less, unless it was ended to make room."""
        with self._lock:
            if slot in self._slots:
                self._remove(slot)

    def _remove(self, slot: _Slot) -> None:
        del self._slots[slot]
        self._by_caller[slot.caller] -= 1
        if not self._by_caller[slot.caller]:
            del self._by_caller[slot.caller]


_DESCRIPTIONS: Final = {
    Action.WATERMARKS: "the watermarks of topics",
    Action.TOPICS: "the names of all topics that the caller may see",
    Action.FIND_TIME: "the first offset of a range published at or after a time",
    Action.APPEND_STAGED: "append rows that were staged in the bucket",
    Action.PLAN_UPLOAD: "the objects that an upload of a topic would make",
    Action.STORAGE: "the settings of the stores, without credentials",
}

# The other calls of Flight; whether their requests are streams.
_UNSUPPORTED: Final = {
    "Handshake": True,
    "ListFlights": False,
    "GetFlightInfo": False,
    "PollFlightInfo": False,
    "GetSchema": False,
    "DoExchange": True,
}


async def _refuse(name: str, _request: object, _context: object) -> AsyncIterator[bytes]:
    yield _unsupported(name)


def _unsupported(name: str) -> bytes:
    hint = (
        "credentials go into the header 'authorization' of each call"
        if name == "Handshake"
        else "the calls are DoGet, DoPut, DoAction and ListActions"
    )
    raise UnsupportedOperationError(f"{name} is not supported", hint=hint)


def _fields(request: bytes) -> dict[int, memoryview]:
    try:
        return decode_fields(request)
    except ValueError as error:
        raise InvalidRequestError(
            f"the request cannot be decoded as this method's message: {error}"
        ) from error


def _read_rows(
    message: bytes, *, schema: pa.Schema, plain: PlainRows, bytes_max: int
) -> tuple[Rows | None, bytes]:
    """The rows of a message, if it has any, and its application metadata."""
    data = _data(message)
    rows: Rows | None = plain.read(data)
    if rows is None:
        rows = read_batch(data, schema, bytes_max=bytes_max)
    return rows, bytes(data.metadata)


def _data(message: bytes) -> FlightData:
    try:
        return FlightData(message)
    except ValueError as error:
        raise InvalidRequestError(
            f"the request cannot be decoded as this method's message: {error}"
        ) from error


def _ending() -> IsterError:
    return UnavailableError(
        "the broker is shutting down", hint="reconnect, and send again what was not answered"
    )
