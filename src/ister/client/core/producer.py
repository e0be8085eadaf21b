"""A producer: messages are taken from any thread, put into batches, and sent by senders.

    send ─► route ─► the sender's open batch ─ full, or lingered ─► sealed ─► the sender

Owns: the bound on what is pending, batches, the callbacks when they are done, and the partitions of
the topic, also new ones. Does not own: the way to the broker (`senders`).

A batch goes out when nothing is on its way to its topic, or when it is full, or when its first
message has waited for `linger`: messages that come alone go at once, many go together.

`try_send`, `when_done` and `outcome` may be called by any thread; all else belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock, SystemClock
from ister.base.limits import MIB
from ister.base.model import AckLevel
from ister.base.partitions import partition_name, partition_of
from ister.base.serializers import AnySerializer, find_serializer
from ister.client.core.batches import Batch, as_payload, check_text, size_of
from ister.client.core.network import Network
from ister.client.core.sender import Sender, SleepState
from ister.errors import (
    CapacityError,
    ClosedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    WaitTimeoutError,
)
from ister.topic.arguments import as_number, as_timeout, parse_ack

_log = logging.getLogger("ister.client.core.producer")

_GOOD_BYE_SECONDS: Final = 2.0

Post = Callable[[Callable[[], object]], object]
"""Calls a function on the loop soon; may be called in any thread."""
Outgoing = tuple[bytes, Mapping[str, str] | None, str | None, int | None, int | None]
"""A message: payload, attributes, routing key, schema id, schema version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """Options of a producer, checked when created.

    Raises:
        InvalidRequestError: A value makes no sense; names it.
    """

    topic: str
    name: str | None = None
    create: bool = False
    ack: AckLevel | None = None
    max_batch_messages: int = 1000
    max_batch_bytes: int = 1 * MIB
    linger_ms: float = 20.0
    max_pending_bytes: int = 64 * MIB
    timeout: float | None = None
    serializer: AnySerializer | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_batch_messages", 1, 65_536),
            ("max_batch_bytes", 1, 16 * MIB),
            ("linger_ms", 0, 3_600_000),
            ("max_pending_bytes", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequestError(f"{name} must be a number, not {value!r}")
            if not low <= value <= high:
                raise InvalidRequestError(f"{name} must be from {low} to {high}, not {value}")
        if self.name is not None:
            check_text("name", self.name)
        if self.ack is not None:
            parse_ack(self.ack)
        if not isinstance(self.create, bool):
            raise InvalidRequestError(f"create must be True or False, not {self.create!r:.80}")
        # So that a Decimal, for example, is a float from here on.
        object.__setattr__(self, "timeout", as_timeout(self.timeout, is_positive=True))
        if self.serializer is not None:
            find_serializer(self.serializer)


def _serialize_by(serializer: AnySerializer | None) -> Callable[[object], bytes]:
    if serializer is None:
        return as_payload
    serialize = find_serializer(serializer).serialize
    return lambda value: as_payload(serialize(value))


class ProducerCore:
    """See the module header."""

    def __init__(
        self, network: Network, options: ProducerOptions, *, post: Post, clock: Clock | None = None
    ) -> None:
        self.topic = options.topic
        self.name = options.name or f"ister-{secrets.token_hex(8)}"
        self._network = network
        self._options = options
        self.serialize: Callable[[object], bytes] = _serialize_by(options.serializer)
        """The payload of a value; raises InvalidRequestError if that is not bytes."""
        self._post = post
        self._clock: Clock = clock or SystemClock()
        self._linger = options.linger_ms / 1000
        self._senders: list[Sender] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._growing: asyncio.Task[None] | None = None
        self._turn = 0
        self._lock = threading.Lock()
        self.room = threading.Condition(self._lock)
        """Notified when something is not pending any more, or never will be accepted."""
        self._room_waiters: list[asyncio.Future[None]] = []
        self._pending_bytes = 0
        self._undone: set[Batch] = set()
        self._failed: Batch | None = None
        self._is_closed = False

    # -- life -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Finds the topic, and sees that it can be published to.

        Raises:
            NotFoundError: The topic does not exist, and `create` is off.
            IsterError: It is refused, or no broker has answered in time.
        """
        options = self._options
        names = self._usable(await self._network.partitions(self.topic))
        if not names and not options.create:
            raise NotFoundError(
                f"topic {self.topic} does not exist",
                topic=self.topic,
                hint="pass create=True to create it",
            )
        await self._add(names or [self.topic])
        if names and names != [self.topic]:
            self._growing = asyncio.create_task(self._find_partitions())

    async def _add(self, names: Sequence[str]) -> None:
        """Begins to publish to more topics, once each of them can be published to."""
        options = self._options
        added = [
            Sender(
                self,
                self._network,
                topic=name,
                producer=self.name,
                create=options.create,
                ack=options.ack,
                timeout=options.timeout,
                clock=self._clock,
            )
            for name in names
        ]
        for sender in added:
            await sender.prepare()
        self._tasks += [asyncio.create_task(self._run(sender)) for sender in added]
        with self._lock:
            # All at once: which partition a key goes to depends on their number.
            self._senders = [*self._senders, *added]

    async def _find_partitions(self) -> None:
        """Publishes to partitions that were created later, too."""
        while True:
            known = [sender.topic for sender in self._senders]
            names = self._usable(await self._network.grown_partitions(self.topic, known))
            try:
                await self._add(names[len(known) :])
            except IsterError as error:
                _log.warning(
                    "cannot publish to new partitions",
                    extra={"topic": self.topic, "error": str(error)},
                )

    def _usable(self, names: Sequence[str]) -> list[str]:
        """The topic itself, or its partitions up to the first that is missing.

        Partitions are created from the last one down: until all are there, the old number counts.
        """
        if self.topic in names:
            return [self.topic]
        return [name for at, name in enumerate(names) if name == partition_name(self.topic, at)]

    async def _run(self, sender: Sender) -> None:
        try:
            await sender.run()
        finally:
            # Wake senders that wait for room, so that they raise.
            self._wake_room()

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until each message that was accepted so far has an offset or has failed.

        Raises:
            WaitTimeoutError: It takes longer; the messages stay accepted.
            IsterError: A message failed, and that was not reported yet.
        """
        timeout = as_timeout(timeout)
        done = asyncio.Event()
        left = 1

        def count_down() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done.set()

        with self._lock:
            batches = [batch for batch in self._undone if batch.when_done(count_down)]
            left += len(batches)
            self._seal_all()
        try:
            async with asyncio.timeout(timeout):
                count_down()
                await done.wait()
        except TimeoutError:
            raise WaitTimeoutError(
                f"messages were not acknowledged within {timeout} seconds", topic=self.topic
            ) from None
        finally:
            with self._lock:
                for batch in batches:
                    batch.forget(count_down)
        with self._lock:
            failed, self._failed = self._failed, None
            error = None if failed is None or failed.is_seen else failed.failure
        if error is not None:
            raise error.again()

    def _seal_all(self) -> None:
        """Sends open batches without lingering; the lock is held."""
        for sender in self._senders:
            if sender.open is not None:
                self._seal(sender)
                self._rouse(sender)

    async def close(self, timeout: float | None = None) -> None:
        """Waits until everything is acknowledged, and ends. May be called twice.

        Raises:
            As `flush`; it is closed all the same.
        """
        with self._lock:
            self._is_closed = True
        self._wake_room()
        try:
            if self._growing is not None:
                self._growing.cancel()
                await asyncio.wait({self._growing})
            await self.flush(timeout)
            for sender in self._senders:
                sender.end()
            if self._tasks:
                # Everything is acknowledged; the good-bye need not be answered.
                await asyncio.wait(self._tasks, timeout=_GOOD_BYE_SECONDS)
        finally:
            await self._abort()

    async def _abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        error = ClosedError(
            "the producer was closed; whether the message is in the topic is not known",
            topic=self.topic,
        )
        with self._lock:
            left = list(self._undone)
        for batch in left:
            with self._lock:
                callbacks = batch.give_up(error)
            self._finish(batch, callbacks)
        with self._lock:
            self._failed = None  # raised by the close

    # -- sending ----------------------------------------------------------------------------

    def try_send(
        self,
        payload: bytes,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
    ) -> tuple[Batch, int] | None:
        """Accepts a message: its batch and its row there; None if too much is pending.

        Raises:
            InvalidRequestError: It is not a message.
            ClosedError: The producer is closed.
            IsterError: Nothing can be published any more, and why.
        """
        size = size_of(payload, attributes, routing_key)
        if schema_id is not None:
            schema_id = as_number("schema_id", schema_id)
        if schema_version is not None:
            schema_version = as_number("schema_version", schema_version, most=(1 << 31) - 1)
        options = self._options
        with self._lock:
            sender = self._sender_for(routing_key)
            self._check(sender)
            pending = self._pending_bytes
            if pending and pending + size > options.max_pending_bytes:
                return None
            if routing_key is None:
                self._turn += 1
            batch = sender.open
            if batch is not None and batch.size_bytes + size > options.max_batch_bytes:
                self._seal(sender)
                self._rouse(sender)
                batch = None
            if batch is None:
                batch = sender.open = Batch(sender.topic)
                sender.opened_at = self._clock.monotonic()
                self._undone.add(batch)
            row = batch.add(
                payload,
                size,
                attributes=attributes,
                routing_key=routing_key,
                schema_id=schema_id,
                schema_version=schema_version,
            )
            self._pending_bytes = pending + size
            if row + 1 >= options.max_batch_messages:
                self._seal(sender)
                self._rouse(sender)
            elif sender.sleep_state is SleepState.IDLE:
                self._rouse(sender)
        return batch, row

    def _sender_for(self, routing_key: str | None) -> Sender:
        senders = self._senders
        if len(senders) == 1:
            return senders[0]
        if routing_key is None:
            return senders[self._turn % len(senders)]
        return senders[partition_of(routing_key, len(senders))]

    def _check(self, sender: Sender) -> None:
        if self._is_closed:
            raise ClosedError("the producer is closed", topic=self.topic)
        if sender.failure is not None:
            raise sender.failure.again()

    def _seal(self, sender: Sender) -> None:
        if sender.open is not None:
            sender.sealed.append(sender.open)
            sender.open = None

    def _rouse(self, sender: Sender) -> None:
        if sender.sleep_state is not SleepState.AWAKE:
            sender.sleep_state = SleepState.AWAKE
            self._post(sender.wake)

    async def wait_for_room(self) -> None:
        """Returns when less is pending."""
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self._undone or self._is_closed:
                return
            self._room_waiters.append(waiter)
        try:
            await waiter
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._room_waiters.remove(waiter)

    def full(self, timeout: float | None) -> CapacityError:
        """Returns the error of a send that waited too long."""
        return CapacityError(
            f"{self._pending_bytes} bytes are not acknowledged, after {timeout} seconds",
            topic=self.topic,
            hint="send less, or raise max_pending_bytes",
        )

    # -- for senders --------------------------------------------------------------------------

    def next_batch(self, sender: Sender, *, is_waiting: bool) -> Batch | float | None:
        """As `SendListener.next_batch`."""
        with self._lock:
            sender.sleep_state = SleepState.AWAKE
            if not sender.sealed and sender.open is not None:
                left = sender.opened_at + self._linger - self._clock.monotonic()
                if is_waiting and left > 0:
                    sender.sleep_state = SleepState.LINGERING
                    return left
                self._seal(sender)
            if sender.sealed:
                return sender.sealed.popleft()
            sender.sleep_state = SleepState.IDLE
            return None

    def placed(self, batch: Batch, first: int, rows: int, offset: int) -> None:
        """As `SendListener.placed`."""
        with self._lock:
            callbacks = batch.place(first, rows, offset)
        self._finish(batch, callbacks)

    def failed(self, batch: Batch, first: int, rows: int, error: IsterError) -> None:
        """As `SendListener.failed`."""
        with self._lock:
            callbacks = batch.fail(first, rows, error)
        self._finish(batch, callbacks)

    def _finish(self, batch: Batch, callbacks: Sequence[Callable[[], None]]) -> None:
        if not batch.is_done:
            return
        with self._lock:
            self._undone.discard(batch)
            self._pending_bytes -= batch.size_bytes
            if self._failed is None and batch.failure is not None:
                self._failed = batch
        self._wake_room()
        for callback in callbacks:
            callback()

    def _wake_room(self) -> None:
        with self._lock:
            waiters, self._room_waiters = self._room_waiters, []
            self.room.notify_all()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- results ----------------------------------------------------------------------------

    def when_done(self, batch: Batch, callback: Callable[[], None]) -> bool:
        """Calls a function on the loop once a batch is done; False if it is done already."""
        with self._lock:
            return batch.when_done(callback)

    def forget(self, batch: Batch, callback: Callable[[], None]) -> None:
        """Removes a callback."""
        with self._lock:
            batch.forget(callback)

    def outcome(self, batch: Batch, row: int) -> int:
        """The offset of a message of a batch that is done.

        Raises:
            IsterError: It has none, and why.
        """
        found = batch.outcome(row)
        if isinstance(found, IsterError):
            raise found.again()
        return found

    @property
    def pending_bytes(self) -> int:
        """Bytes of messages that are accepted and not acknowledged."""
        return self._pending_bytes
