"""The client for programs that block.

    with Client("127.0.0.1:6650") as client:
        with client.producer("/default/orders", name="shop", create=True) as producer:
            sent = producer.send(b"...")                # waits for room, not for the broker
            offset = sent.result()                      # the broker has it
        with client.consumer("/default/orders", "billing", start="earliest") as consumer:
            for message in consumer:
                consumer.ack(message)

A wrapper of `aio.AsyncClient`, whose event loop runs in a thread that ends with the client.
Messages are accepted, taken and acknowledged without going through the loop. Thread-safe.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, cast

from ister.base import forks
from ister.base.clock import SystemClock
from ister.base.model import Start
from ister.base.serializers import JSON, AnySerializer
from ister.client.admin import AsyncAdmin
from ister.client.aio import (
    AsyncClient,
    AsyncConsumer,
    AsyncProducer,
    ConsumerView,
    ProducerView,
    SendOptions,
    check_limit,
    outgoing,
    shown_sent,
)
from ister.client.core.batches import Batch
from ister.client.core.producer import Outgoing, ProducerCore
from ister.client.loop_thread import STEP_SECONDS, LoopThread, wait_in_steps
from ister.client.messages import ReceivedMessage
from ister.client.options import TlsOptions, Token
from ister.client.ranges import ArrowRead, Reader, TopicRanges
from ister.errors import ClosedError, IsterError, WaitTimeoutError
from ister.topic.arguments import as_timeout
from ister.topic.table import TopicTable

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("ister.client")

# How long a `with` block that ends with an error waits for acknowledgements.
_ERROR_EXIT_SECONDS: Final = 5.0
_monotonic = SystemClock.monotonic

_Result = TypeVar("_Result")
_Async = TypeVar("_Async", AsyncProducer, AsyncConsumer)
_Blocking = TypeVar("_Blocking", "Producer", "Consumer")
_Args = ParamSpec("_Args")


class SentMessage:
    """A message that was accepted; like a future of its offset."""

    __slots__ = ("_batch", "_core", "_row", "_thread")

    def __init__(self, thread: LoopThread, core: ProducerCore, batch: Batch, row: int) -> None:
        self._thread = thread
        self._core = core
        self._batch = batch
        self._row = row

    @property
    def topic(self) -> str:
        """The topic, or the partition, that the message goes to."""
        return self._batch.topic

    def done(self) -> bool:
        """Whether the message is acknowledged or has failed."""
        return self._batch.is_done

    def result(self, timeout: float | None = None) -> int:
        """Waits until the broker has acknowledged the message, and returns its offset.

        Raises:
            WaitTimeoutError: It was not in time; the message stays accepted.
            IsterError: It was given up, and why.
        """
        timeout = as_timeout(timeout)
        if not self._batch.is_done:
            self._wait(timeout)
        return self._core.outcome(self._batch, self._row)

    def exception(self, timeout: float | None = None) -> IsterError | None:
        """Waits, and returns the message's error; None once it is acknowledged.

        Raises:
            WaitTimeoutError: Neither was in time.
        """
        timeout = as_timeout(timeout)
        if not self._batch.is_done:
            self._wait(timeout)
        try:
            self._core.outcome(self._batch, self._row)
        except IsterError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[SentMessage], object]) -> None:
        """Calls a function with this once it is done; immediately if it is done already.

        It is called by the client's own thread: it must be quick, and not wait for the client.
        """

        def call() -> None:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - a caller's mistake must not end the client
                _log.exception("a callback failed", extra={"topic": self.topic})

        if not self._core.when_done(self._batch, call):
            call()

    def __repr__(self) -> str:
        return shown_sent(self, self._core, self._batch, self._row)

    def _wait(self, timeout: float | None) -> None:
        self._thread.check_process()
        if self._thread.is_current:
            raise self._thread.would_hang()
        done = threading.Event()
        if self._core.when_done(self._batch, done.set) and not wait_in_steps(done.wait, timeout):
            self._core.forget(self._batch, done.set)
            raise WaitTimeoutError(
                f"the message was not acknowledged within {timeout} seconds", topic=self.topic
            )


class Producer(ProducerView):
    """Publishes to a topic. Made by `Client.producer`."""

    def __init__(self, client: Client, thread: LoopThread, producer: AsyncProducer) -> None:
        super().__init__(producer._core)  # noqa: SLF001
        self._client = client
        self._thread = thread
        self._async = producer

    def send(self, payload: object, **options: Unpack[SendOptions]) -> SentMessage:
        """Accepts a message; blocks while `max_pending_bytes` are pending.

        Args:
            payload: The message body, as bytes; with a serializer, any value that it takes.
            **options: See `SendOptions`.

        Raises:
            InvalidRequestError: The payload, an attribute or the key has the wrong type.
            CapacityError: There was no room in time.
            ClosedError: The producer is closed.
            IsterError: The producer has failed and publishes nothing any more.
        """
        return self._accept(
            outgoing(self._core.serialize(payload), options), options.get("timeout")
        )

    def send_json(self, value: object, **options: Unpack[SendOptions]) -> SentMessage:
        """Accepts a message whose payload is a value as JSON; ignores the serializer.

        Args:
            value: What JSON can express: a dict, a list, a dataclass, a pydantic model, …
            **options: As for `send`.

        Raises:
            InvalidRequestError: The value cannot be encoded as JSON.
            As `send`.
        """
        return self._accept(outgoing(JSON.serialize(value), options), options.get("timeout"))

    def _accept(self, message: Outgoing, timeout: float | None) -> SentMessage:
        self._thread.check_process()
        core, timeout = self._core, as_timeout(timeout)
        accepted = core.try_send(*message)
        if accepted is None:
            if self._thread.is_current:
                raise core.full(0)
            give_up_at = None if timeout is None else _monotonic() + timeout
            while (accepted := core.try_send(*message)) is None:
                left = None if give_up_at is None else give_up_at - _monotonic()
                if left is not None and left <= 0:
                    raise core.full(timeout)
                with core.room:
                    # In short waits: room may have come before this one begins.
                    core.room.wait(STEP_SECONDS if left is None else min(left, STEP_SECONDS))
        return SentMessage(self._thread, core, *accepted)

    def publish(self, payload: object, **options: Unpack[SendOptions]) -> int:
        """Sends a message like `send`, waits until it is acknowledged, and returns its offset."""
        return self.send(payload, **options).result()

    def publish_json(self, value: object, **options: Unpack[SendOptions]) -> int:
        """Like `publish`, with a value as JSON."""
        return self.send_json(value, **options).result()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all messages accepted so far are acknowledged.

        Raises:
            WaitTimeoutError: It takes longer; the messages stay accepted.
            IsterError: A message failed whose error was not raised yet.
        """
        self._thread.run(self._async.flush(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Flushes and closes the producer. May be called twice.

        Raises:
            As `flush`. The producer is closed anyway; unacknowledged messages are given up.
        """
        timeout = as_timeout(timeout)
        if self._client.left(self):
            self._thread.run(self._async.close(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(_ERROR_EXIT_SECONDS)
        except IsterError as failure:
            _log.warning("unacknowledged messages were given up", extra={"error": str(failure)})


class Consumer(ConsumerView):
    """Receives a topic's messages. Made by `Client.consumer`.

    A message that is not acknowledged is delivered again: after the subscription's ack timeout, or
    to the next consumer when this one is closed.
    """

    def __init__(self, client: Client, thread: LoopThread, consumer: AsyncConsumer) -> None:
        super().__init__(consumer._core)  # noqa: SLF001
        self._client = client
        self._thread = thread
        self._async = consumer

    def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """Returns the next message.

        Raises:
            WaitTimeoutError: No message came in time.
            ClosedError: The consumer is stopped or closed.
            IsterError: The consumer has failed and receives nothing any more.
        """
        self._thread.check_process()
        core, timeout = self._core, as_timeout(timeout)
        give_up_at = None if timeout is None else _monotonic() + timeout
        with core.arrived:
            while (message := core.try_take_locked()) is None:
                left = STEP_SECONDS if give_up_at is None else give_up_at - _monotonic()
                if left <= 0:
                    raise WaitTimeoutError(f"no message for {timeout} seconds", topic=self.topic)
                core.arrived.wait(min(left, STEP_SECONDS))
        return message

    def messages(
        self, *, limit: int | None = None, timeout: float | None = None
    ) -> Iterator[ReceivedMessage]:
        """Yields messages as they arrive, until the consumer is stopped or closed.

        Args:
            limit: Stop after this many messages.
            timeout: Stop when no message arrives for this many seconds.

        Raises:
            IsterError: The consumer has failed and receives nothing any more.
        """
        given = 0
        check_limit(limit)
        while limit is None or given < limit:
            self._thread.check_process()
            try:
                message = self.receive(timeout)
            except (WaitTimeoutError, ClosedError):
                return
            yield message
            given += 1

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return self.messages()

    def ack(self, message: ReceivedMessage) -> None:
        """Acknowledges a message; acks are sent in the background, and `flush` waits for them.

        Raises:
            InvalidRequestError: Another consumer received the message.
            ClosedError: The consumer is closed.
        """
        self._thread.check_process()
        self._core.ack(message)

    def nack(
        self, message: ReceivedMessage, *, delay: float | None = None, reason: str | None = None
    ) -> None:
        """Rejects a message: it is delivered again, by the subscription's failure policy.

        Args:
            message: A message that could not be processed.
            delay: Seconds until the redelivery, at least; by default the subscription's.
            reason: Stored with the message if it goes to a dead-letter topic.

        Raises:
            InvalidRequestError: Another consumer received the message, or the delay is invalid.
            ClosedError: The consumer is closed.
        """
        self._thread.check_process()
        self._core.nack(message, delay=delay, reason=reason)

    def stop(self) -> None:
        """Ends `for` and `receive` after the current message; from any thread or signal handler.

        Messages that were received can still be acknowledged. For a graceful shutdown:

            signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
            for message in consumer: ...
        """
        # The loop is closed if the client is.
        with contextlib.suppress(RuntimeError):
            self._core.stop()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the broker has confirmed every acknowledgement.

        Raises:
            WaitTimeoutError: It takes longer; the client keeps sending them.
            IsterError: The consumer has failed.
        """
        self._thread.run(self._async.flush(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Flushes and closes the consumer. May be called twice.

        Raises:
            WaitTimeoutError: Acknowledgements were not confirmed in time. The consumer is closed
                anyway, and those messages may be delivered again.
        """
        timeout = as_timeout(timeout)
        if self._client.left(self):
            self._thread.run(self._async.close(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(IsterError):
            self.close(_ERROR_EXIT_SECONDS)


def _blocking(
    method: Callable[Concatenate[AsyncAdmin, _Args], Coroutine[object, None, _Result]],
) -> Callable[Concatenate[Admin, _Args], _Result]:
    """Makes a method of `Admin` of a coroutine method of `AsyncAdmin`."""

    @functools.wraps(method)
    def call(self: Admin, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        return self._run(method(self._admin, *args, **kwargs))

    return call


class Admin:
    """Calls for operators; `Client.admin`.

    All of them raise an `IsterError` if they are refused, or if no broker has answered in time.
    """

    def __init__(self, client: Client, admin: AsyncAdmin) -> None:
        self._run = client._run  # noqa: SLF001 - a part of it
        self._admin = admin

    def __repr__(self) -> str:
        return repr(self._admin).replace("AsyncAdmin", "Admin")

    create_topic = _blocking(AsyncAdmin.create_topic)
    grow_topic = _blocking(AsyncAdmin.grow_topic)
    describe_topic = _blocking(AsyncAdmin.describe_topic)
    list_topics = _blocking(AsyncAdmin.list_topics)
    show_topic = _blocking(AsyncAdmin.show_topic)
    brokers = _blocking(AsyncAdmin.brokers)
    cluster = _blocking(AsyncAdmin.cluster)
    drain_broker = _blocking(AsyncAdmin.drain_broker)
    activate_broker = _blocking(AsyncAdmin.activate_broker)
    balance = _blocking(AsyncAdmin.balance)
    rebalance = _blocking(AsyncAdmin.rebalance)
    partitions = _blocking(AsyncAdmin.partitions)
    delete_topic = _blocking(AsyncAdmin.delete_topic)
    unload_topic = _blocking(AsyncAdmin.unload_topic)
    move_topic = _blocking(AsyncAdmin.move_topic)
    take_over = _blocking(AsyncAdmin.take_over)
    set_topic_policies = _blocking(AsyncAdmin.set_topic_policies)
    release_producer = _blocking(AsyncAdmin.release_producer)
    subscriptions = _blocking(AsyncAdmin.subscriptions)
    describe_subscription = _blocking(AsyncAdmin.describe_subscription)
    seek = _blocking(AsyncAdmin.seek)
    unsubscribe = _blocking(AsyncAdmin.unsubscribe)
    failure_policy = _blocking(AsyncAdmin.failure_policy)
    set_failure_policy = _blocking(AsyncAdmin.set_failure_policy)
    set_max_unacked_messages = _blocking(AsyncAdmin.set_max_unacked_messages)
    restrict_subscription = _blocking(AsyncAdmin.restrict_subscription)
    namespaces = _blocking(AsyncAdmin.namespaces)
    create_namespace = _blocking(AsyncAdmin.create_namespace)
    delete_namespace = _blocking(AsyncAdmin.delete_namespace)
    grant_role = _blocking(AsyncAdmin.grant_role)
    revoke_role = _blocking(AsyncAdmin.revoke_role)
    roles = _blocking(AsyncAdmin.roles)
    bindings = _blocking(AsyncAdmin.bindings)
    schema_subjects = _blocking(AsyncAdmin.schema_subjects)
    schema_versions = _blocking(AsyncAdmin.schema_versions)
    schema = _blocking(AsyncAdmin.schema)
    register_schema = _blocking(AsyncAdmin.register_schema)
    check_schema = _blocking(AsyncAdmin.check_schema)
    set_compatibility = _blocking(AsyncAdmin.set_compatibility)
    count_dead_letters = _blocking(AsyncAdmin.count_dead_letters)
    show_dead_letters = _blocking(AsyncAdmin.show_dead_letters)
    requeue_dead_letters = _blocking(AsyncAdmin.requeue_dead_letters)
    drop_dead_letters = _blocking(AsyncAdmin.drop_dead_letters)


def _opening(
    method: Callable[Concatenate[AsyncClient, _Args], _Async],
    make: Callable[[Client, LoopThread, _Async], _Blocking],
) -> Callable[Concatenate[Client, _Args], _Blocking]:
    """Makes a method of `Client` that opens what a method of `AsyncClient` returns."""

    @functools.wraps(method)
    def call(self: Client, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Blocking:
        return self._join(make, method(self._aio, *args, **kwargs))

    returns = cast("type", make).__name__
    # What `help` shows: the arguments are the same, the result is not.
    vars(call)["__signature__"] = inspect.signature(method).replace(return_annotation=returns)
    return call


async def _opened(one: AsyncProducer | AsyncConsumer) -> None:
    await one


class Client:
    """A connection to brokers. Thread-safe."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: Token | None = None,
        tls: TlsOptions | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Makes a client; it connects when it is first used.

        Args:
            address: `host:port` of a broker, or several separated by commas; any that responds
                leads to the others.
            token: A bearer token or an API key; or a function that returns a fresh one whenever
                something is opened, for tokens that expire.
            tls: True, or the certificates to use; False or None for no encryption, unless the
                address starts with `https://`.
            timeout: How many seconds brokers may be unreachable until calls, messages and
                consumers fail; `math.inf` to retry forever. By default calls fail after 10 s,
                and messages and consumers are retried forever.

        Raises:
            ConfigError: The extra `ister[client]` is not installed, or a file cannot be read.
            InvalidRequestError: An address or the timeout is invalid.
        """
        self._aio = AsyncClient(address, token=token, tls=tls, timeout=timeout)
        self._lock = threading.Lock()
        self._open: set[Producer | Consumer] = set()
        self._is_closed = False
        self._thread = LoopThread()
        self._aio._post = self._thread.post  # noqa: SLF001
        self.admin = Admin(self, self._aio.admin)
        """Calls for operators."""
        forks.register(self)

    def _after_fork(self, _error: ClosedError) -> None:
        """Closes a forked child's copy; see `ister.base.forks`."""
        forks.reset_locks(self._lock)
        self._is_closed = True
        self._open = set()

    # -- publishing and consuming -----------------------------------------------------------

    producer = _opening(AsyncClient.producer, Producer)
    consumer = _opening(AsyncClient.consumer, Consumer)

    def _join(
        self, make: Callable[[Client, LoopThread, _Async], _Blocking], opening: _Async
    ) -> _Blocking:
        """Opens a producer or consumer; it is closed with the client."""
        self._run(_opened(opening))
        one = make(self, self._thread, opening)
        with self._lock:
            self._open.add(one)
        return one

    def left(self, one: Producer | Consumer) -> bool:
        """Forgets a producer or consumer that is being closed; False if it was closed before."""
        with self._lock:
            was_open = one in self._open
            self._open.discard(one)
        return was_open

    def topics(self, namespace: str = "default") -> list[str]:
        """The names of the topics of a namespace, partitions among them.

        Raises:
            NotFoundError: There is no such namespace.
            IsterError: It is refused, or no broker has answered in time.
        """
        return self._run(self._aio.topics(namespace))

    # -- without a subscription -------------------------------------------------------------

    def read_arrow(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        end: int | datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.RecordBatchReader:
        """Reads a range of a topic as Arrow record batches, including what is not uploaded yet.

        There is no subscription and nothing to acknowledge. Partitions are read one after the
        other; the column `topic` says which. Batches are fetched while they are consumed.

        Args:
            topic: Topic name; all partitions of a partitioned topic.
            start: `earliest`, `latest`, an offset, or a time with its time zone.
            end: The offset or the time before which to stop; by default, and at the latest, what
                is durable at the time of the call.
            columns: As for `Topic.read_arrow`, `text` among them.

        Raises:
            InvalidRequestError: There is no such column, an offset in a partitioned topic, or
                messages that are in memory only.
            NotFoundError: There is no such topic.
            OffsetOutOfRangeError: The topic does not have the offset `start`.
            IsterError: It is refused, or no broker responded in time.
        """
        import pyarrow as pa  # noqa: PLC0415 - an extra

        network = self._aio._network  # noqa: SLF001
        read = ArrowRead(
            topic,
            start,
            end,
            columns,
            locate=self._locate,
            open_flight=network.open_flight,
            timeout=network.timeout,
        )
        return pa.RecordBatchReader.from_batches(read.schema, read.batches())

    def table(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        end: int | datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> TopicTable:
        """A range of a topic as a table, for pandas, Polars, DuckDB and notebooks.

        Each use reads the range again. Arguments are those of `read_arrow`.
        """
        return TopicTable(topic, lambda: self.read_arrow(topic, start, end=end, columns=columns))

    def reader(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        follow: bool = True,
        last: int | None = None,
        serializer: AnySerializer | None = None,
        timeout: float | None = None,
    ) -> Reader:
        """Reads a topic without a subscription: there is no position to keep, nothing to ack.

            for message in client.reader("/default/orders", follow=False): ...

        Args:
            topic: Topic name; all partitions of a partitioned topic, in turns.
            start: `earliest`, `latest`, an offset, or a time with its time zone.
            follow: Wait for new messages; if False, stop at the current end.
            last: Begin with the last messages instead, so many of each partition.
            serializer: Decodes `message.value`: `json`, `text`, `bytes`, or a `Serializer`.
            timeout: Overrides the client's timeout.

        Raises:
            InvalidRequestError: An offset in a partitioned topic, or, without `follow`, messages
                that are in memory only.
            NotFoundError: There is no such topic.
            OffsetOutOfRangeError: The topic does not have the offset `start`.
            IsterError: It is refused, or no broker responded in time.
        """
        network = self._aio._network  # noqa: SLF001

        def open_ranges(columns: Sequence[str]) -> TopicRanges:
            return TopicRanges(
                topic,
                start,
                None,
                columns,
                locate=self._locate,
                open_flight=network.open_flight,
                timeout=network.timeout if timeout is None else as_timeout(timeout),
                follow=follow,
                last=last,
            )

        return Reader(topic, open_ranges, serializer)

    def _locate(self, topic: str) -> list[tuple[str, str]]:
        return self._run(self._aio._network.locate_flight(topic))  # noqa: SLF001

    def _run(self, work: Coroutine[object, None, _Result]) -> _Result:
        if self._is_closed:
            work.close()
            self._thread.check_process()
            raise ClosedError("the client is closed")
        return self._thread.run(work)

    # -- the end ----------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Closes all producers and consumers, then the connections. May be called twice.

        Args:
            timeout: Seconds that each of them may take to flush; None to wait forever.

        Raises:
            As `Producer.close` and `Consumer.close`; everything is closed anyway.
        """
        if self._thread.is_current:
            raise self._thread.would_hang()
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            still_open = list(self._open)
        failure: IsterError | None = None
        try:
            for one in still_open:
                try:
                    one.close(timeout)
                except IsterError as error:
                    failure = failure or error
            if not was_closed:
                self._thread.run(self._aio.close())
        finally:
            self._thread.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(IsterError):
            self.close(_ERROR_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._aio._network!r}>"  # noqa: SLF001
