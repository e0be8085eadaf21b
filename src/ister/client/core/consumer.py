"""A consumer: the messages of a topic, or of all its partitions, in one inbox.

Owns: the inbox, what is asked of the broker at the beginning, partitions that are new. Does not
own: the way from the broker (`receivers`).

`try_take`, `ack` and `nack` may be called by any thread, `stop` by a signal handler too; all else
belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

from ister import wire
from ister.base.limits import MIB
from ister.base.model import Start
from ister.base.positions import format_position
from ister.base.serializers import AnySerializer, find_serializer
from ister.client.core.batches import check_text
from ister.client.core.network import Network
from ister.client.core.receiver import Receiver, ReceiverOptions
from ister.client.messages import ReceivedMessage
from ister.errors import (
    ClosedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NotFoundError,
    WaitTimeoutError,
)
from ister.subscription.policy import SubscriptionKind
from ister.topic.arguments import as_timeout

_log = logging.getLogger("ister.client.core.consumer")

Post = Callable[[Callable[[], object]], object]

_BYTES_PER_RECEIVER_MIN: Final = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Options of a consumer, checked when created.

    Raises:
        InvalidRequestError: A value makes no sense; names it.
    """

    topic: str
    subscription: str
    name: str | None = None
    kind: SubscriptionKind | str = SubscriptionKind.EXCLUSIVE
    start: Start = "earliest"
    key_filters: Sequence[str] = ()
    create: bool = False
    serializer: AnySerializer | None = None
    buffer_bytes: int = 32 * MIB
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_text("subscription", self.subscription)
        if self.name is not None:
            check_text("name", self.name)
        if not isinstance(self.kind, str) or self.kind not in list(SubscriptionKind):
            raise InvalidRequestError(
                f"there is no kind of subscription {self.kind!r}",
                hint=f"one of: {', '.join(SubscriptionKind)}",
            )
        format_position(self.start)
        if isinstance(self.key_filters, str) or not isinstance(self.key_filters, Collection):
            raise InvalidRequestError("key_filters must be a list of strings")
        for one in self.key_filters:
            check_text("a key filter", one)
        if not isinstance(self.buffer_bytes, int | float) or not self.buffer_bytes > 0:
            raise InvalidRequestError(f"buffer_bytes must be at least 1, not {self.buffer_bytes!r}")
        # So that a Decimal, for example, is a float from here on.
        object.__setattr__(self, "timeout", as_timeout(self.timeout, is_positive=True))
        if self.serializer is not None:
            find_serializer(self.serializer)


class ConsumerCore:
    """See the module header."""

    def __init__(self, network: Network, options: ConsumerOptions, *, post: Post) -> None:
        self.topic = options.topic
        self.subscription = options.subscription
        self.name = options.name or f"ister-{secrets.token_hex(8)}"
        self._network = network
        self._options = options
        self._serializer = (
            None if options.serializer is None else find_serializer(options.serializer)
        )
        self._post = post
        self._lock = threading.Lock()
        self.arrived = threading.Condition(self._lock)
        """Notified when there may be a message, or the consumer ended."""
        self._arrival_waiters: list[asyncio.Future[None]] = []
        self._inbox: deque[ReceivedMessage] = deque()
        self._receivers: dict[str, Receiver] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._confirmed = asyncio.Event()
        self._failure: IsterError | None = None
        self._is_open = False
        self._is_stopped = False
        self._is_closed = False

    # -- life -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Subscribes, to all partitions.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._network.partitions(self.topic)
        if not names and self._options.create:
            request = wire.ister_api.CreateTopicRequest(topic=self.topic)
            await self._network.call(wire.services.Admin.CreateTopic, request)
            names = [self.topic]
        if not names:
            raise NotFoundError(f"topic {self.topic} does not exist", topic=self.topic)
        self._add(names)
        try:
            for receiver in self._receivers.values():
                await receiver.opened
        except BaseException:
            await self._abort()
            raise
        self._is_open = True
        if names != [self.topic]:
            self._spawn(self._find_partitions())

    def _add(self, names: Sequence[str]) -> None:
        options = self._options
        share = options.buffer_bytes // max(1, len(names))
        settings = ReceiverOptions(
            subscription=options.subscription,
            consumer=self.name,
            kind=str(options.kind),
            start=format_position(options.start),
            key_filters=tuple(options.key_filters),
            buffer_bytes=min(options.buffer_bytes, max(share, _BYTES_PER_RECEIVER_MIN)),
            timeout=options.timeout,
            serializer=self._serializer,
        )
        for name in names:
            receiver = self._receivers[name] = Receiver(self, self._network, name, settings)
            self._spawn(self._run(receiver))

    def _spawn(self, work: Coroutine[object, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, receiver: Receiver) -> None:
        error: IsterError | None = None
        try:
            await receiver.run()
        except IsterError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - raised where a message is awaited
            _log.exception("consuming has failed", extra={"topic": receiver.topic})
            error = InvariantError(f"the client has failed: {failure!r}", topic=receiver.topic)
        if error is not None and not self._is_open and not receiver.opened.done():
            receiver.opened.set_exception(error)
        else:
            receiver.opened.cancel()
            self._failure = self._failure or error
        self._wake()
        self._confirmed.set()

    async def _find_partitions(self) -> None:
        """Adds partitions that were created later."""
        while True:
            names = await self._network.grown_partitions(self.topic, self._receivers)
            self._add([name for name in names if name not in self._receivers])

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until the broker has confirmed every acknowledgement.

        Raises:
            WaitTimeoutError: It takes longer; sending continues.
            IsterError: The consumer has failed.
        """
        timeout = as_timeout(timeout)
        receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.flushes += 1
            receiver.wake()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._confirmed.clear()
                    with self._lock:
                        if all(receiver.is_settled for receiver in self._receivers.values()):
                            return
                    if self._failure is not None:
                        raise self._failure.again()
                    await self._confirmed.wait()
        except TimeoutError:
            raise WaitTimeoutError(
                f"acknowledgements were not confirmed within {timeout} seconds", topic=self.topic
            ) from None
        finally:
            for receiver in receivers:
                receiver.flushes -= 1

    async def settled(self, message: ReceivedMessage) -> None:
        """Waits until the broker has confirmed the ack of one message, or was sent its nack.

        Raises:
            ClosedError: The consumer was closed before.
            IsterError: The consumer has failed.
        """
        receiver = self._receiver_of(message)
        receiver.flushes += 1
        receiver.wake()
        try:
            while True:
                self._confirmed.clear()
                with self._lock:
                    if not receiver.is_pending(message.offset):
                        return
                if self._failure is not None:
                    raise self._failure.again()
                if not self._tasks:
                    raise ClosedError("the consumer is closed", topic=self.topic)
                await self._confirmed.wait()
        finally:
            receiver.flushes -= 1

    def stop(self) -> None:
        """Hands out no more messages; they can still be acknowledged. Takes no lock."""
        self._is_stopped = True
        self._post(self._wake)

    async def close(self, timeout: float | None = None) -> None:
        """Waits until every acknowledgement is confirmed, and ends. May be called twice.

        What was received and not acknowledged is delivered again, to whoever comes next.

        Raises:
            WaitTimeoutError: They were not in time; it is closed all the same.
        """
        with self._lock:
            self._is_closed = self._is_stopped = True
        self._wake()
        try:
            if self._failure is None:
                await self.flush(timeout)
            for receiver in self._receivers.values():
                receiver.end()
        finally:
            await self._abort()

    async def _abort(self) -> None:
        with self._lock:
            self._is_closed = True
            self._inbox.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for receiver in self._receivers.values():
            if receiver.opened.done() and not receiver.opened.cancelled():
                receiver.opened.exception()  # seen
        self._wake()
        self._confirmed.set()

    # -- messages ---------------------------------------------------------------------------

    def lock(self) -> threading.Lock:
        """As `Inbox.lock`."""
        return self._lock

    def deliver(self, messages: list[ReceivedMessage]) -> None:
        """As `Inbox.deliver`."""
        if messages:
            with self._lock:
                self._inbox.extend(messages)
            self._wake()

    def progressed(self) -> None:
        """As `Inbox.progressed`."""
        self._confirmed.set()

    def try_take(self) -> ReceivedMessage | None:
        """Returns the next message; None if none has arrived.

        Raises:
            ClosedError: The consumer is closed.
            IsterError: There will be no more, and why.
        """
        with self._lock:
            return self.try_take_locked()

    def try_take_locked(self) -> ReceivedMessage | None:
        """Like `try_take`, with the lock held."""
        if self._is_stopped:
            how = "closed" if self._is_closed else "stopped"
            raise ClosedError(f"the consumer is {how}", topic=self.topic)
        inbox = self._inbox
        while inbox:
            message = inbox.popleft()
            receiver = message.receiver
            if receiver.take(message):
                if receiver.needs_loop():
                    self._post(receiver.wake)
                return message
        if self._is_closed:
            raise ClosedError("the consumer is closed", topic=self.topic)
        if self._failure is not None:
            raise self._failure.again()
        return None

    async def wait_for_message(self) -> None:
        """Returns when there may be a message, or the consumer ended."""
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._inbox or self._is_stopped or self._is_closed or self._failure is not None:
                return
            self._arrival_waiters.append(waiter)
        try:
            await waiter
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._arrival_waiters.remove(waiter)

    def _wake(self) -> None:
        with self._lock:
            waiters, self._arrival_waiters = self._arrival_waiters, []
            self.arrived.notify_all()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def ack(self, message: ReceivedMessage) -> None:
        """Acknowledges a message; sent to the broker soon, until it confirms it.

        Raises:
            InvalidRequestError: The message is another consumer's.
            ClosedError: The consumer is closed.
        """
        receiver = self._receiver_of(message)
        with self._lock:
            self._check_open()
            is_asleep = receiver.ack(message)
        if is_asleep:
            self._post(receiver.wake)

    def nack(
        self, message: ReceivedMessage, *, delay: float | None = None, reason: str | None = None
    ) -> None:
        """Rejects a message, so that it is redelivered.

        Raises:
            InvalidRequestError: The message is another consumer's, or the delay is invalid.
            ClosedError: The consumer is closed.
        """
        receiver = self._receiver_of(message)
        if delay is not None and not (isinstance(delay, int | float) and 0 <= delay < 1e9):
            raise InvalidRequestError(f"delay must be 0 to 1e9 seconds, not {delay!r:.80}")
        if reason is not None:
            check_text("reason", reason)
        delay_ms = None if delay is None else round(delay * 1000)
        with self._lock:
            self._check_open()
            is_asleep = receiver.nack(message, delay_ms, reason)
        if is_asleep:
            self._post(receiver.wake)

    def _receiver_of(self, message: ReceivedMessage) -> Receiver:
        if not isinstance(message, ReceivedMessage):
            raise InvalidRequestError(
                f"message must be one that this consumer received, not {type(message).__name__}"
            )
        receiver = message.receiver
        if self._receivers.get(receiver.topic) is not receiver:
            raise InvalidRequestError(
                "the message belongs to another consumer", topic=message.topic
            )
        return receiver

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the consumer is closed", topic=self.topic)
