"""A consumer: the messages of a topic, or of all its partitions, in one inbox.

Owns: the inbox, what is asked of the broker at the beginning, partitions that are new. Does not
own: the way from the broker (`intakes`).

`try_take`, `ack` and `nack` may be called by any thread; all else belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ister.client.intakes import Intake, IntakeOptions
from ister.client.messages import ReceivedMessage
from ister.client.network import Network
from ister.client.starts import format_start
from ister.errors import (
    ClosedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NotFoundError,
    WaitTimeoutError,
)
from ister.limits import MIB
from ister.model import Start
from ister.subscription.policy import SubscriptionKind

__all__ = ["ConsumerCore", "ConsumerOptions"]

_log = logging.getLogger("ister.client.consuming")

Post = Callable[[Callable[[], object]], object]

_PARTITIONS_SECONDS: Final = 30.0
_BYTES_PER_INTAKE_MIN: Final = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """How a consumer consumes. Checked when it is made.

    Raises:
        InvalidRequestError: A value makes no sense; names it.
    """

    topic: str
    subscription: str
    name: str | None = None
    kind: SubscriptionKind | str = SubscriptionKind.EXCLUSIVE
    start: Start = "latest"
    key_filters: Sequence[str] = ()
    create: bool = False
    buffer_bytes: int = 32 * MIB
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in list(SubscriptionKind):
            raise InvalidRequestError(
                f"there is no kind of subscription {self.kind!r}",
                hint=f"one of: {', '.join(SubscriptionKind)}",
            )
        format_start(self.start)
        if isinstance(self.key_filters, str):
            raise InvalidRequestError("key_filters is a list of texts")
        if not self.buffer_bytes > 0:
            raise InvalidRequestError(f"buffer_bytes is {self.buffer_bytes}")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidRequestError(f"a timeout of {self.timeout} seconds")


class ConsumerCore:
    """See the module header."""

    def __init__(self, network: Network, options: ConsumerOptions, *, post: Post) -> None:
        self.topic = options.topic
        self.subscription = options.subscription
        self.name = options.name or f"ister-{secrets.token_hex(8)}"
        self._network = network
        self._options = options
        self._post = post
        self._lock = threading.Lock()
        self.arrived = threading.Condition(self._lock)
        """Notified when there may be a message, or never will be one."""
        self._arrival_waiters: list[asyncio.Future[None]] = []
        self._inbox: deque[ReceivedMessage] = deque()
        self._intakes: dict[str, Intake] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._confirmed = asyncio.Event()
        self._failure: IsterError | None = None
        self._is_open = False
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
            request = self._network.wire.ister_api.CreateTopicRequest(topic=self.topic)
            await self._network.call("ister.Admin", "CreateTopic", request)
            names = [self.topic]
        if not names:
            raise NotFoundError(f"there is no topic {self.topic}", topic=self.topic)
        self._add(names)
        try:
            for intake in self._intakes.values():
                await intake.opened
        except BaseException:
            await self._abort()
            raise
        self._is_open = True
        if names != [self.topic]:
            self._spawn(self._find_partitions())

    def _add(self, names: Sequence[str]) -> None:
        options = self._options
        share = options.buffer_bytes // max(1, len(names))
        settings = IntakeOptions(
            subscription=options.subscription,
            consumer=self.name,
            kind=str(options.kind),
            start=format_start(options.start),
            key_filters=tuple(options.key_filters),
            buffer_bytes=min(options.buffer_bytes, max(share, _BYTES_PER_INTAKE_MIN)),
            timeout=options.timeout,
        )
        for name in names:
            intake = self._intakes[name] = Intake(self, self._network, name, settings)
            self._spawn(self._run(intake))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, intake: Intake) -> None:
        error: IsterError | None = None
        try:
            await intake.run()
        except IsterError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - told to whoever waits for a message
            _log.exception("consuming has failed", extra={"topic": intake.topic})
            error = InvariantError(f"the client has failed: {failure!r}", topic=intake.topic)
        if error is not None and not self._is_open and not intake.opened.done():
            intake.opened.set_exception(error)
        else:
            intake.opened.cancel()
            self._failure = self._failure or error
        self._wake()
        self._confirmed.set()

    async def _find_partitions(self) -> None:
        """Takes in partitions that were added later."""
        while True:
            await asyncio.sleep(_PARTITIONS_SECONDS)
            try:
                names = await self._network.partitions(self.topic)
            except IsterError:
                continue  # the streams tell, if it matters
            self._add([name for name in names if name not in self._intakes])

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until the broker has confirmed every acknowledgement.

        Raises:
            WaitTimeoutError: It takes longer; they go on being sent.
            IsterError: The consumer has failed.
        """
        intakes = list(self._intakes.values())
        for intake in intakes:
            intake.flushes += 1
            intake.wake()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._confirmed.clear()
                    with self._lock:
                        if all(intake.is_settled for intake in self._intakes.values()):
                            return
                    if self._failure is not None:
                        raise self._failure.again()
                    await self._confirmed.wait()
        except TimeoutError:
            raise WaitTimeoutError(
                f"acknowledgements were not confirmed within {timeout} seconds", topic=self.topic
            ) from None
        finally:
            for intake in intakes:
                intake.flushes -= 1

    async def close(self, timeout: float | None = None) -> None:
        """Waits until every acknowledgement is confirmed, and ends. May be called twice.

        What was received and not acknowledged is delivered again, to whoever comes next.

        Raises:
            WaitTimeoutError: They were not in time; it is closed all the same.
        """
        with self._lock:
            self._is_closed = True
        self._wake()
        try:
            if self._failure is None:
                await self.flush(timeout)
            for intake in self._intakes.values():
                intake.end()
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
        for intake in self._intakes.values():
            if intake.opened.done() and not intake.opened.cancelled():
                intake.opened.exception()  # seen
        self._wake()

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
        """The next message; None if there is none at the moment.

        Raises:
            ClosedError: The consumer is closed.
            IsterError: There will be no more, and why.
        """
        with self._lock:
            return self.try_take_locked()

    def try_take_locked(self) -> ReceivedMessage | None:
        """The same with the lock held."""
        inbox = self._inbox
        while inbox:
            message = inbox.popleft()
            intake = message.intake
            if intake.take(message):
                if intake.needs_loop():
                    self._post(intake.wake)
                return message
        if self._is_closed:
            raise ClosedError("the consumer is closed", topic=self.topic)
        if self._failure is not None:
            raise self._failure.again()
        return None

    async def wait_for_message(self) -> None:
        """Returns when there may be a message, or never will be one."""
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._inbox or self._is_closed or self._failure is not None:
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
        """Says that a message is done with; told to the broker soon, until it has confirmed it.

        Raises:
            InvalidRequestError: The message is another consumer's.
            ClosedError: The consumer is closed.
        """
        intake = self._intake_of(message)
        with self._lock:
            self._check_open()
            is_asleep = intake.ack(message)
        if is_asleep:
            self._post(intake.wake)

    def nack(
        self, message: ReceivedMessage, *, delay: float | None = None, reason: str | None = None
    ) -> None:
        """Has a message come again.

        Raises:
            InvalidRequestError: The message is another consumer's, or the delay is none.
            ClosedError: The consumer is closed.
        """
        intake = self._intake_of(message)
        if delay is not None and not 0 <= delay < 1e9:
            raise InvalidRequestError(f"a delay of {delay} seconds")
        delay_ms = None if delay is None else round(delay * 1000)
        with self._lock:
            self._check_open()
            is_asleep = intake.nack(message, delay_ms, reason)
        if is_asleep:
            self._post(intake.wake)

    def _intake_of(self, message: ReceivedMessage) -> Intake:
        intake = message.intake
        if self._intakes.get(intake.topic) is not intake:
            raise InvalidRequestError("the message is another consumer's", topic=message.topic)
        return intake

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the consumer is closed", topic=self.topic)
