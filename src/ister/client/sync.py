"""The client for programs that block.

    with Client("127.0.0.1:6650") as client:
        with client.producer("/default/orders", name="shop", create=True) as producer:
            sent = producer.send(b"...")                # waits for room, not for the broker
            offset = sent.result()                      # the broker has it
        with client.consumer("/default/orders", "billing", start="earliest") as consumer:
            for message in consumer:
                consumer.ack(message)

The same client as `aio.AsyncClient`, on a loop in a thread of its own, which ends with the client.
Messages are accepted, taken and acknowledged without going through the loop. Thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from ister import forks, threads
from ister.client.admin import AdminCalls, SubscriptionDescription, TopicDescription
from ister.client.batches import Batch
from ister.client.consuming import ConsumerCore, ConsumerOptions
from ister.client.messages import ReceivedMessage
from ister.client.network import Network
from ister.client.options import TlsOptions, Token
from ister.client.producing import ProducerCore, ProducerOptions
from ister.clock import SystemClock
from ister.errors import ClosedError, InvalidRequestError, IsterError, WaitTimeoutError
from ister.limits import MIB
from ister.model import AckLevel, Codec, Start
from ister.subscription.policy import FailurePolicy, SubscriptionKind

__all__ = ["Client", "Consumer", "Producer", "SentMessage"]

_log = logging.getLogger("ister.client")

# What is not acknowledged when a block ends with an error is waited for so long.
_ERROR_EXIT_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.5
_monotonic = SystemClock.monotonic

Answer = TypeVar("Answer")
Opened = TypeVar("Opened", "Producer", "Consumer")


class _LoopThread:
    """A loop that runs in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle)
        self._fork_error: ClosedError | None = None
        self._thread = threads.start("ister-client", self._run)
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the event loop in a forked child: waking it would wake the parent's."""
        forks.leak(self._loop)
        self._fork_error = error

    def check_process(self) -> None:
        """Refuses calls of a forked child to its parent's client.

        Raises:
            ClosedError: This process is a fork of the one that opened the client.
        """
        if self._fork_error is not None:
            raise self._fork_error.again()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def post(self, wake: Callable[[], object]) -> None:
        """Has the loop call a function soon."""
        self._loop.call_soon_threadsafe(wake)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What a coroutine gives; raises what it raises."""
        if self._fork_error is not None:
            work.close()
            self.check_process()
        if self.is_current or self._loop.is_closed():
            work.close()
            if self.is_current:
                raise self.would_hang()
            raise ClosedError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            _wait_in_looks(done.wait)
            return future.result()
        except BaseException:
            # Interrupted: nobody waits for it any more.
            future.cancel()
            raise

    @staticmethod
    def would_hang() -> InvalidRequestError:
        return InvalidRequestError(
            "a callback must not wait for the client: it is called by the client's own thread"
        )

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        if self._fork_error is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def _wait_in_looks(wait: Callable[[float], bool], timeout: float | None = None) -> bool:
    """Waits for something; whether it came in time.

    Not in one go: a signal that comes just before the main thread begins to wait would not end
    that, and Ctrl-C would be for nothing until somebody presses it again.
    """
    give_up_at = None if timeout is None else _monotonic() + timeout
    while True:
        left = _LOOK_SECONDS if give_up_at is None else give_up_at - _monotonic()
        if wait(max(min(left, _LOOK_SECONDS), 0)):
            return True
        if left <= 0:
            return False


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC's loops in several threads wake each other for nothing, and say so as an error.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


class SentMessage:
    """A message that was accepted; like a future of its offset."""

    __slots__ = ("_batch", "_core", "_row", "_thread")

    def __init__(self, thread: _LoopThread, core: ProducerCore, batch: Batch, row: int) -> None:
        self._thread = thread
        self._core = core
        self._batch = batch
        self._row = row

    @property
    def topic(self) -> str:
        """Where it goes: the topic, or the partition of one."""
        return self._batch.topic

    def done(self) -> bool:
        """Whether it has an offset, or never will have one."""
        return self._batch.is_done

    def result(self, timeout: float | None = None) -> int:
        """Its offset, once the broker has acknowledged it.

        Raises:
            WaitTimeoutError: It was not in time; the message stays accepted.
            IsterError: It was given up, and why.
        """
        if not self._batch.is_done:
            self._wait(timeout)
        return self._core.outcome(self._batch, self._row)

    def exception(self, timeout: float | None = None) -> IsterError | None:
        """Why it was given up; None once it is acknowledged.

        Raises:
            WaitTimeoutError: Neither was in time.
        """
        if not self._batch.is_done:
            self._wait(timeout)
        try:
            self._core.outcome(self._batch, self._row)
        except IsterError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[SentMessage], object]) -> None:
        """Calls a function with this once it is done; at once if it is.

        It is called by the client's own thread: it must be quick, and not wait for the client.
        """

        def call() -> None:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - a caller's mistake must not end the client
                _log.exception("a callback failed", extra={"topic": self.topic})

        if not self._core.when_done(self._batch, call):
            call()

    def _wait(self, timeout: float | None) -> None:
        self._thread.check_process()
        if self._thread.is_current:
            raise self._thread.would_hang()
        done = threading.Event()
        if self._core.when_done(self._batch, done.set) and not _wait_in_looks(done.wait, timeout):
            self._core.forget(self._batch, done.set)
            raise WaitTimeoutError(
                f"the message was not acknowledged within {timeout} seconds", topic=self.topic
            )


class Producer:
    """Publishes to a topic. Made by `Client.producer`."""

    def __init__(self, client: Client, thread: _LoopThread, core: ProducerCore) -> None:
        self._client = client
        self._thread = thread
        self._core = core

    @property
    def topic(self) -> str:
        """Where messages go."""
        return self._core.topic

    @property
    def name(self) -> str:
        """Who they are from."""
        return self._core.name

    @property
    def pending_bytes(self) -> int:
        """Bytes of messages that are accepted and not acknowledged."""
        return self._core.pending_bytes

    def send(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
        timeout: float | None = None,
    ) -> SentMessage:
        """Accepts a message; blocks while too much is pending.

        Args:
            payload: The message.
            attributes: Goes with it.
            routing_key: Chooses the partition, and the consumer of a key-shared subscription.
            schema_id: The schema of the payload.
            schema_version: Its version.
            timeout: How long to wait for room; None for ever.

        Raises:
            InvalidRequestError: It is not a message.
            CapacityError: There was no room in time.
            ClosedError: The producer is closed.
            IsterError: Nothing can be published any more, and why.
        """
        self._thread.check_process()
        core = self._core
        accepted = core.try_send(payload, attributes, routing_key, schema_id, schema_version)
        if accepted is None:
            if self._thread.is_current:
                raise core.full(0)
            give_up_at = None if timeout is None else _monotonic() + timeout
            while (
                accepted := core.try_send(
                    payload, attributes, routing_key, schema_id, schema_version
                )
            ) is None:
                left = None if give_up_at is None else give_up_at - _monotonic()
                if left is not None and left <= 0:
                    raise core.full(timeout)
                with core.room:
                    # Not without a look now and then: room may have come before this waits.
                    core.room.wait(_LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS))
        return SentMessage(self._thread, core, *accepted)

    def publish(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
    ) -> int:
        """`send`, and wait: the offset of the message once it is acknowledged."""
        return self.send(
            payload,
            attributes=attributes,
            routing_key=routing_key,
            schema_id=schema_id,
            schema_version=schema_version,
        ).result()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until each message that was accepted so far is acknowledged.

        Raises:
            WaitTimeoutError: It takes longer; the messages stay accepted.
            IsterError: One has failed, and nobody was told yet.
        """
        self._thread.run(self._core.flush(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Flushes, and ends. May be called twice.

        Raises:
            As `flush`; it is closed all the same, and what is not acknowledged is given up.
        """
        if self._client.left(self):
            self._thread.run(self._core.close(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(_ERROR_EXIT_SECONDS)
        except IsterError as failure:
            _log.warning("messages were given up", extra={"error": str(failure)})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} name={self.name}>"


class Consumer:
    """Gets a topic's messages. Made by `Client.consumer`.

    What it gives and is never acknowledged comes again: after the ack timeout of the subscription,
    or to the next consumer when this one is closed.
    """

    def __init__(self, client: Client, thread: _LoopThread, core: ConsumerCore) -> None:
        self._client = client
        self._thread = thread
        self._core = core

    @property
    def topic(self) -> str:
        """Where messages come from."""
        return self._core.topic

    @property
    def subscription(self) -> str:
        """On whose behalf."""
        return self._core.subscription

    @property
    def name(self) -> str:
        """Which of the subscription's consumers."""
        return self._core.name

    def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """The next message.

        Raises:
            WaitTimeoutError: None came in time.
            ClosedError: The consumer is closed.
            IsterError: There will be no more, and why.
        """
        self._thread.check_process()
        core = self._core
        give_up_at = None if timeout is None else _monotonic() + timeout
        with core.arrived:
            while (message := core.try_take_locked()) is None:
                left = _LOOK_SECONDS if give_up_at is None else give_up_at - _monotonic()
                if left <= 0:
                    raise WaitTimeoutError(f"no message for {timeout} seconds", topic=self.topic)
                core.arrived.wait(min(left, _LOOK_SECONDS))
        return message

    def messages(
        self, *, limit: int | None = None, timeout: float | None = None
    ) -> Iterator[ReceivedMessage]:
        """Messages as they come, until the consumer is closed.

        Args:
            limit: Ends after so many.
            timeout: Ends when there is none for so many seconds.

        Raises:
            IsterError: There will be no more, and why.
        """
        given = 0
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
        """Says that a message is done with. The broker is told soon; `flush` waits for that.

        Raises:
            InvalidRequestError: The message is another consumer's.
            ClosedError: The consumer is closed.
        """
        self._thread.check_process()
        self._core.ack(message)

    def nack(
        self, message: ReceivedMessage, *, delay: float | None = None, reason: str | None = None
    ) -> None:
        """Has a message come again, by the rules of the subscription.

        Args:
            message: One that could not be dealt with.
            delay: After how many seconds at the earliest; the subscription's default.
            reason: Goes with it into a dead-letter topic.

        Raises:
            InvalidRequestError: The message is another consumer's, or the delay is none.
            ClosedError: The consumer is closed.
        """
        self._thread.check_process()
        self._core.nack(message, delay=delay, reason=reason)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the broker has confirmed every acknowledgement.

        Raises:
            WaitTimeoutError: It takes longer; they go on being sent.
            IsterError: The consumer has failed.
        """
        self._thread.run(self._core.flush(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Flushes, and ends. May be called twice.

        Raises:
            WaitTimeoutError: Acknowledgements were not confirmed in time; it is closed all the
                same, and those messages may come again.
        """
        if self._client.left(self):
            self._thread.run(self._core.close(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(IsterError):
            self.close(_ERROR_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} {self.subscription} name={self.name}>"


class Client:
    """Brokers, as far as they can be reached. Thread-safe."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: Token | None = None,
        tls: TlsOptions | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connects when it is first needed.

        Args:
            address: `host:port` of a broker, or several with commas between them; any one that
                answers leads to the others.
            token: A bearer token or an API key; or a function that gives one whenever something is
                opened, for tokens that expire.
            tls: True, or which certificates to use; False or None for none, unless the address
                begins with `https://`.
            timeout: How long brokers may be out of reach, in seconds, until calls, messages and
                consumers fail; None for ever.

        Raises:
            ConfigError: The extra `ister[client]` is not installed, or a file cannot be read.
            InvalidRequestError: An address or the timeout is none.
        """
        self._network = Network(address, token=token, tls=tls, timeout=timeout)
        self._admin = AdminCalls(self._network)
        self._lock = threading.Lock()
        self._open: set[Producer | Consumer] = set()
        self._is_closed = False
        self._thread = _LoopThread()
        forks.register(self)

    def _after_fork(self, _error: ClosedError) -> None:
        """Closes a forked child's copy; see `ister.forks`."""
        forks.reset_locks(self._lock)
        self._is_closed = True
        self._open = set()

    # -- publishing and consuming -----------------------------------------------------------

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        create: bool = False,
        ack: AckLevel | None = None,
        max_batch_messages: int = 1000,
        max_batch_bytes: int = 1 * MIB,
        linger_ms: float = 20.0,
        max_pending_bytes: int = 64 * MIB,
        timeout: float | None = None,
    ) -> Producer:
        """Publishes to a topic, each message once.

        A name belongs to one program at a time: the next one that publishes under it takes it
        over, and the one before is refused from then on.

        Args:
            topic: Where to; all partitions of a partitioned one, in turn or by routing key.
            name: Who publishes; one that nobody else has by default.
            create: Make the topic if it does not exist.
            ack: Its level then; the broker's default.
            max_batch_messages: Messages that go together, at the most.
            max_batch_bytes: The same in bytes; a larger message goes alone.
            linger_ms: How long a message waits for others while some are on their way.
            max_pending_bytes: How much may be accepted and not acknowledged.
            timeout: In place of the client's.

        Raises:
            InvalidRequestError: A value makes no sense.
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        options = ProducerOptions(
            topic=topic,
            name=name,
            create=create,
            ack=ack,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            linger_ms=linger_ms,
            max_pending_bytes=max_pending_bytes,
            timeout=self._network.timeout if timeout is None else timeout,
        )
        core = ProducerCore(self._network, options, post=self._thread.post)
        self._run(core.open())
        return self._joined(Producer(self, self._thread, core))

    def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        kind: SubscriptionKind | str = SubscriptionKind.EXCLUSIVE,
        start: Start = "latest",
        key_filters: Sequence[str] = (),
        create: bool = False,
        buffer_bytes: int = 32 * MIB,
        timeout: float | None = None,
    ) -> Consumer:
        """Gets the messages of a topic, each at least once.

        Args:
            topic: Where from; all partitions of a partitioned one.
            subscription: On whose behalf; made where it does not exist.
            name: Which of its consumers; one that nobody else has by default.
            kind: `exclusive`, `shared`, `failover` or `key_shared`.
            start: Where a new subscription begins: `earliest`, `latest`, an offset, or a point in
                time, with its time zone; one that is still to come is as `latest`.
            key_filters: Routing keys to take, with `*` and `?`; for `key_shared`.
            create: Make the topic if it does not exist.
            buffer_bytes: How much to have ready before it is asked for.
            timeout: In place of the client's.

        Raises:
            InvalidRequestError: A value makes no sense.
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        options = ConsumerOptions(
            topic=topic,
            subscription=subscription,
            name=name,
            kind=kind,
            start=start,
            key_filters=key_filters,
            create=create,
            buffer_bytes=buffer_bytes,
            timeout=self._network.timeout if timeout is None else timeout,
        )
        core = ConsumerCore(self._network, options, post=self._thread.post)
        self._run(core.open())
        return self._joined(Consumer(self, self._thread, core))

    def _joined(self, one: Opened) -> Opened:
        with self._lock:
            self._open.add(one)
        return one

    def left(self, one: Producer | Consumer) -> bool:
        """Something of this client is being closed; False if it was before."""
        with self._lock:
            was_open = one in self._open
            self._open.discard(one)
        return was_open

    # -- administration ---------------------------------------------------------------------

    def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 0,
        ack: AckLevel | str | None = None,
        codec: Codec | str | None = None,
    ) -> TopicDescription:
        """As `AdminCalls.create_topic`."""
        return self._run(
            self._admin.create_topic(topic, partitions=partitions, ack=ack, codec=codec)
        )

    def grow_topic(self, topic: str, partitions: int) -> list[str]:
        """As `AdminCalls.grow_topic`."""
        return self._run(self._admin.grow_topic(topic, partitions))

    def describe_topic(self, topic: str) -> TopicDescription:
        """As `AdminCalls.describe_topic`."""
        return self._run(self._admin.describe_topic(topic))

    def topics(self, namespace: str = "default") -> list[str]:
        """As `AdminCalls.topics`."""
        return self._run(self._admin.topics(namespace))

    def list_topics(
        self, namespace: str | None = None, *, with_partitions: bool = True
    ) -> list[dict[str, Any]]:
        """As `AdminCalls.list_topics`."""
        return self._run(self._admin.list_topics(namespace, with_partitions=with_partitions))

    def show_topic(self, topic: str) -> dict[str, Any]:
        """As `AdminCalls.show_topic`."""
        return self._run(self._admin.show_topic(topic))

    def brokers(self) -> list[dict[str, Any]]:
        """As `AdminCalls.brokers`."""
        return self._run(self._admin.brokers())

    def partitions(self, topic: str) -> list[str]:
        """As `AdminCalls.partitions`."""
        return self._run(self._admin.partitions(topic))

    def delete_topic(self, topic: str) -> None:
        """As `AdminCalls.delete_topic`."""
        self._run(self._admin.delete_topic(topic))

    def unload_topic(self, topic: str) -> None:
        """As `AdminCalls.unload_topic`."""
        self._run(self._admin.unload_topic(topic))

    def release_producer(self, topic: str, producer: str) -> str | None:
        """As `AdminCalls.release_producer`."""
        return self._run(self._admin.release_producer(topic, producer))

    def set_topic_policies(self, topic: str, policies: Mapping[str, int]) -> dict[str, Any]:
        """As `AdminCalls.set_topic_policies`."""
        return self._run(self._admin.set_topic_policies(topic, policies))

    def subscriptions(self, topic: str) -> list[str]:
        """As `AdminCalls.subscriptions`."""
        return self._run(self._admin.subscriptions(topic))

    def describe_subscription(self, topic: str, subscription: str) -> SubscriptionDescription:
        """As `AdminCalls.describe_subscription`."""
        return self._run(self._admin.describe_subscription(topic, subscription))

    def seek(self, topic: str, subscription: str, *, to: Start) -> None:
        """As `AdminCalls.seek`."""
        self._run(self._admin.seek(topic, subscription, to=to))

    def unsubscribe(self, topic: str, subscription: str) -> None:
        """As `AdminCalls.unsubscribe`."""
        self._run(self._admin.unsubscribe(topic, subscription))

    def failure_policy(self, topic: str, subscription: str) -> FailurePolicy:
        """As `AdminCalls.failure_policy`."""
        return self._run(self._admin.failure_policy(topic, subscription))

    def set_failure_policy(self, topic: str, subscription: str, policy: FailurePolicy) -> None:
        """As `AdminCalls.set_failure_policy`."""
        self._run(self._admin.set_failure_policy(topic, subscription, policy))

    def set_max_unacked_messages(self, topic: str, subscription: str, messages: int) -> None:
        """As `AdminCalls.set_max_unacked_messages`."""
        self._run(self._admin.set_max_unacked_messages(topic, subscription, messages))

    def restrict_subscription(
        self, topic: str, subscription: str, principals: Sequence[str] | None
    ) -> None:
        """As `AdminCalls.restrict_subscription`."""
        self._run(self._admin.restrict_subscription(topic, subscription, principals))

    def namespaces(self) -> list[str]:
        """As `AdminCalls.namespaces`."""
        return self._run(self._admin.namespaces())

    def create_namespace(self, name: str) -> None:
        """As `AdminCalls.create_namespace`."""
        self._run(self._admin.create_namespace(name))

    def delete_namespace(self, name: str) -> None:
        """As `AdminCalls.delete_namespace`."""
        self._run(self._admin.delete_namespace(name))

    def grant_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """As `AdminCalls.grant_role`."""
        self._run(self._admin.grant_role(principal, role, topic=topic, namespace=namespace))

    def revoke_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """As `AdminCalls.revoke_role`."""
        self._run(self._admin.revoke_role(principal, role, topic=topic, namespace=namespace))

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        if self._is_closed:
            work.close()
            self._thread.check_process()
            raise ClosedError("the client is closed")
        return self._thread.run(work)

    # -- the end ----------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Closes all producers and consumers, then the connections. May be called twice.

        Args:
            timeout: How long each of them may take to flush; None for ever.

        Raises:
            As `Producer.close` and `Consumer.close`; everything is closed all the same.
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
                self._thread.run(self._network.close())
        finally:
            self._thread.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(IsterError):
            self.close(_ERROR_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._network!r}>"
