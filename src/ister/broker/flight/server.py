"""The Flight server: what clients ask for, found, allowed, counted and answered.

Owns: the port, who may call what, how many streams there are, and the end: calls under way are
given a while, then their connections are cut. Does not own: topics (`source`), what is done with
them (`reads`, `publish`).

A caller's rights are checked before a topic is looked for, so that the answer does not tell
whether it exists, and again while a stream runs.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from pyarrow import flight

from ister import threads
from ister.broker.flight.failures import sent
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
from ister.errors import (
    CapacityError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.limits import ENVELOPE_SIZE_BYTES_MAX
from ister.topic.topic import Topic

__all__ = ["PUBLISH", "READ", "FlightServer"]

READ: Final = "read"
PUBLISH: Final = "publish"
"""What reads and publishes are counted as; actions are counted by their own names."""

_GRACE_SECONDS: Final = 5.0
# Connections are cut again for those that came in meanwhile.
_CUT_SECONDS: Final = 0.5


class FlightServer:
    """Serves topics on a port from the moment it is made until `close`."""

    def __init__(
        self,
        source: TopicSource,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: Mapping[str, Any] | None = None,
        access: Access | None = None,
        limits: FlightLimits | None = None,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        """Listens.

        Args:
            source: The topics.
            host: The address to listen on.
            port: Any free one if it is 0.
            tls: As `ServerTls.flight_options` gives it; without, nothing is encrypted.
            access: Who may do what; everybody everything by default.
            limits: Bounds.
            on_call: Told what is asked for, by its name, from many threads.

        Raises:
            UnavailableError: The port is not free, or the certificates are none.
        """
        self._host = host
        try:
            self._service = _Service(
                source,
                location=f"grpc{'+tls' if tls else ''}://{_in_url(host)}:{port}",
                tls=tls or {},
                access=access or OpenAccess(),
                limits=limits or FlightLimits(),
                on_call=on_call or (lambda what: None),
            )
        except (pa.ArrowException, OSError) as error:
            raise UnavailableError(
                f"the Flight server cannot listen on {host}:{port}: {error}",
                hint="see that the port is free and the certificates are PEM texts",
            ) from error
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._service.port
        return port

    @property
    def address(self) -> str:
        """The same as `host:port`."""
        return f"{_in_url(self._host)}:{self.port}"

    @property
    def streams(self) -> int:
        """Reads and publishes under way."""
        return self._service.streams.count

    def close(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """Ends: new calls are refused, those under way may take so long, publishers are told.

        May be called twice.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            # Returns when the last call has ended, and cannot be told to hurry.
            ending = threads.start("ister-flight-end", self._service.shutdown)
            self._service.stop_publishing()
            ending.join(grace_seconds)
            while ending.is_alive():
                _cut_connections(self.port)
                ending.join(_CUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FlightServer {self.address}>"


class _Service(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """What Flight calls, on its threads."""

    def __init__(
        self,
        source: TopicSource,
        *,
        location: str,
        tls: Mapping[str, Any],
        access: Access,
        limits: FlightLimits,
        on_call: Callable[[str], None],
    ) -> None:
        self._source = source
        self._access = access
        self._limits = limits
        self._on_call = on_call
        self.streams = _Streams(limits)
        self._publishing: set[Publishing] = set()
        self._lock = threading.Lock()
        self._is_ending = False
        self._actions: dict[str, Callable[[Caller, bytes], list[bytes]]] = {
            Action.WATERMARKS: self._watermarks,
            Action.TOPICS: self._topics,
            Action.APPEND_STAGED: self._append_staged,
            Action.PLAN_UPLOAD: self._plan_upload,
            Action.STORAGE: self._storage,
        }
        # It serves from here on.
        super().__init__(location, middleware=dict(access.middleware), **tls)

    # -- reads ------------------------------------------------------------------------------

    def do_get(self, context: Any, ticket: Any) -> Any:  # noqa: ANN401
        self._on_call(READ)
        with sent():
            caller = self._access.caller(context)
            asked = parse_ticket(ticket.ticket)
            caller.check(Permission.CONSUME, topic=asked.topic)
            topic = self._source.open(asked.topic).topic
            check_incarnation(topic, asked.incarnation)
            if isinstance(asked, FramesTicket):
                check_owner(topic, asked)
                schema = frames_schema(topic)
            else:
                check_range(topic, asked.start, asked.end)
                schema = range_schema(topic, asked)
            return flight.GeneratorStream(schema, self._batches(topic, asked, caller, schema))

    def _batches(
        self,
        topic: Topic,
        asked: RangeTicket | FramesTicket,
        caller: Caller,
        schema: pa.Schema,
    ) -> Iterator[pa.RecordBatch]:
        with sent(), self.streams.one_of(caller.name):
            allowed = partial(caller.check, Permission.CONSUME, topic=asked.topic)
            if isinstance(asked, FramesTicket):
                yield from read_frames(topic, asked, allowed)
            else:
                yield from read_range(topic, asked, allowed, schema)

    def do_action(self, context: Any, action: Any) -> Any:  # noqa: ANN401
        self._on_call(action.type)
        with sent():
            caller = self._access.caller(context)
            data = action.body.to_pybytes()
            if action.type == Action.FIND_TIME:
                return [
                    flight.Result(item)
                    for item in self._find_time(caller, data, context.is_cancelled)
                ]
            answer = self._actions.get(action.type)
            if answer is None:
                raise InvalidRequestError(
                    f"there is no action {action.type!r}", hint=f"one of: {', '.join(Action)}"
                )
            return [flight.Result(item) for item in answer(caller, data)]

    def list_actions(self, context: Any) -> Any:  # noqa: ANN401
        return [(str(action), action.name) for action in Action]

    def _watermarks(self, caller: Caller, body: bytes) -> list[bytes]:
        request = WatermarksRequest.from_json(body)
        if len(request.topics) > self._limits.topics_max:
            raise InvalidRequestError(
                f"the watermarks of {len(request.topics)} topics",
                hint=f"at most {self._limits.topics_max} at once",
            )
        for name in request.topics:
            caller.check(Permission.LOOKUP, topic=name)
        return [status_of(self._source.open(name).topic).to_json() for name in request.topics]

    def _topics(self, caller: Caller, body: bytes) -> list[bytes]:
        names = self._source.names()
        seen = tuple(name for name in names if caller.allows(Permission.LOOKUP, topic=name))
        return [TopicNames(topics=seen).to_json()]

    def _find_time(self, caller: Caller, body: bytes, is_gone: Callable[[], bool]) -> list[bytes]:
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

    def _plan_upload(self, caller: Caller, body: bytes) -> list[bytes]:
        asked = PlanUpload.from_json(body)
        caller.check(Permission.CONSUME, topic=asked.topic)
        topic = self._source.open(asked.topic).topic
        check_incarnation(topic, asked.incarnation)
        return [plan_upload(topic, asked).to_json()]

    def _storage(self, caller: Caller, body: bytes) -> list[bytes]:
        # Whoever may see a topic may know where its data is; others need the right to all of them.
        if not any(caller.allows(Permission.LOOKUP, topic=name) for name in self._source.names()):
            caller.check(Permission.LOOKUP)
        return [encode_settings(self._source.config)]

    # -- publishes --------------------------------------------------------------------------

    def _append_staged(self, caller: Caller, body: bytes) -> list[bytes]:
        asked = AppendStaged.from_json(body)
        caller.check(Permission.PRODUCE, topic=asked.topic)
        self._source.open(asked.topic, create=asked.create, ack=asked.ack, codec=asked.codec)
        return [encode_appended(self._source.append_staged(asked.topic, asked.staged, caller.name))]

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ANN401
        self._on_call(PUBLISH)
        with sent():
            caller = self._access.caller(context)
            opened = PutOpen.from_json(descriptor.command or b"")
            caller.check(Permission.PRODUCE, topic=opened.topic)
            check_schema(reader.schema)
            with self.streams.one_of(caller.name):
                topic = self._source.open(opened.topic, create=opened.create, ack=opened.ack)
                publishing = Publishing(
                    topic,
                    opened,
                    writer,
                    limits=self._limits,
                    message_bytes_max=(
                        self._source.config.storage.max_message_size + ENVELOPE_SIZE_BYTES_MAX
                    ),
                    admit=partial(
                        self._source.admit, producer=opened.producer, principal=caller.name
                    ),
                    note=self._source.note,
                    still_allowed=partial(caller.check, Permission.PRODUCE, topic=opened.topic),
                    is_cancelled=context.is_cancelled,
                )
                with self._listed(publishing), self._source.publishing(topic):
                    publishing.run(reader)

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

    def stop_publishing(self) -> None:
        """Tells all publishers that the server ends."""
        with self._lock:
            self._is_ending = True
            under_way = list(self._publishing)
        for publishing in under_way:
            publishing.stop(_ending())


class _Streams:
    """Counts streams under way, and refuses more than there may be."""

    def __init__(self, limits: FlightLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._by_caller: Counter[str] = Counter()

    @property
    def count(self) -> int:
        with self._lock:
            return self._by_caller.total()

    @contextmanager
    def one_of(self, caller: str) -> Iterator[None]:
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
        try:
            yield
        finally:
            with self._lock:
                self._by_caller[caller] -= 1
                if not self._by_caller[caller]:
                    del self._by_caller[caller]


def _ending() -> IsterError:
    return UnavailableError("the server ends", hint="connect again, and send what is not answered")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _cut_connections(port: int) -> None:
    """Ends the connections of a server in this process; Flight has no call for that."""
    for name in os.listdir("/proc/self/fd"):
        # What is no socket, or was closed meanwhile, is passed over.
        with suppress(OSError, IndexError, TypeError):
            descriptor = os.dup(int(name))
            try:
                end = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            with end:
                is_listening = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if end.getsockname()[1] == port and not is_listening:
                    end.shutdown(socket.SHUT_RDWR)
