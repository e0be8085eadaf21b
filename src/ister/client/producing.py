"""A producer: messages are taken from any thread, put into batches, and sent by lanes.

    send ─► route ─► the lane's open batch ─ full, or lingered ─► sealed ─► the lane

Owns: the bound on what is pending, batches, and who is told when they are done. Does not own: the
way to the broker (`lanes`).

A batch goes out when nothing is on its way to its topic, or when it is full, or when its first
message has waited for `linger`: messages that come alone go at once, many go together.

`try_send`, `when_done` and `outcome` may be called by any thread; all else belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ister.client.batches import Batch, as_payload, size_of
from ister.client.lanes import Doze, Lane
from ister.client.network import Network
from ister.clock import Clock, SystemClock
from ister.errors import (
    CapacityError,
    ClosedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    WaitTimeoutError,
)
from ister.limits import MIB
from ister.model import AckLevel
from ister.partitions import partition_of

__all__ = ["ProducerCore", "ProducerOptions"]

_GOOD_BYE_SECONDS: Final = 2.0

Post = Callable[[Callable[[], object]], object]
"""Has the loop call a function soon, from wherever messages are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """How a producer publishes. Checked when it is made.

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

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_batch_messages", 1, 65_536),
            ("max_batch_bytes", 1, 16 * MIB),
            ("linger_ms", 0, 3_600_000),
            ("max_pending_bytes", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequestError(f"{name} is {value!r}", hint="a number")
            if not low <= value <= high:
                raise InvalidRequestError(f"{name} is {value}", hint=f"from {low} up to {high}")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidRequestError(f"a timeout of {self.timeout} seconds")


class ProducerCore:
    """See the module header."""

    def __init__(
        self,
        network: Network,
        options: ProducerOptions,
        *,
        post: Post,
        clock: Clock | None = None,
    ) -> None:
        self.topic = options.topic
        self.name = options.name or f"ister-{secrets.token_hex(8)}"
        self._network = network
        self._options = options
        self._post = post
        self._clock: Clock = clock or SystemClock()
        self._linger = options.linger_ms / 1000
        self._lanes: list[Lane] = []
        self._tasks: list[asyncio.Task[None]] = []
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
            NotFoundError: There is none, and it is not to be made.
            IsterError: It is refused, or no broker has answered in time.
        """
        options = self._options
        names = await self._network.partitions(self.topic)
        if not names and not options.create:
            raise NotFoundError(
                f"there is no topic {self.topic}", topic=self.topic, hint="create=True makes it"
            )
        self._lanes = [
            Lane(
                self,
                self._network,
                topic=name,
                producer=self.name,
                create=options.create,
                ack=options.ack,
                timeout=options.timeout,
                clock=self._clock,
            )
            for name in names or [self.topic]
        ]
        for lane in self._lanes:
            await lane.prepare()
        self._tasks = [asyncio.create_task(self._run(lane)) for lane in self._lanes]

    async def _run(self, lane: Lane) -> None:
        try:
            await lane.run()
        finally:
            # Those that wait for room in vain are told.
            self._wake_room()

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until each message that was accepted so far has an offset or has failed.

        Raises:
            WaitTimeoutError: It takes longer; the messages stay accepted.
            IsterError: One has failed, and nobody was told yet.
        """
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
        """Has open batches go without lingering; the lock is held."""
        for lane in self._lanes:
            if lane.open is not None:
                self._seal(lane)
                self._rouse(lane)

    async def close(self, timeout: float | None = None) -> None:
        """Waits until everything is acknowledged, and ends. May be called twice.

        Raises:
            As `flush`; it is closed all the same.
        """
        with self._lock:
            self._is_closed = True
        self._wake_room()
        try:
            await self.flush(timeout)
            for lane in self._lanes:
                lane.end()
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
            self._failed = None  # whoever closes it is told

    # -- sending ----------------------------------------------------------------------------

    def try_send(
        self,
        payload: bytes | bytearray | memoryview,
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
        payload = as_payload(payload)
        size = size_of(payload, attributes, routing_key)
        options = self._options
        with self._lock:
            lane = self._lane_for(routing_key)
            self._check(lane)
            pending = self._pending_bytes
            if pending and pending + size > options.max_pending_bytes:
                return None
            if routing_key is None:
                self._turn += 1
            batch = lane.open
            if batch is not None and batch.size_bytes + size > options.max_batch_bytes:
                self._seal(lane)
                self._rouse(lane)
                batch = None
            if batch is None:
                batch = lane.open = Batch(lane.topic)
                lane.opened_at = self._clock.monotonic()
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
                self._seal(lane)
                self._rouse(lane)
            elif lane.doze is Doze.IDLE:
                self._rouse(lane)
        return batch, row

    def _lane_for(self, routing_key: str | None) -> Lane:
        lanes = self._lanes
        if len(lanes) == 1:
            return lanes[0]
        if routing_key is None:
            return lanes[self._turn % len(lanes)]
        return lanes[partition_of(routing_key, len(lanes))]

    def _check(self, lane: Lane) -> None:
        if self._is_closed:
            raise ClosedError("the producer is closed", topic=self.topic)
        if lane.failure is not None:
            raise lane.failure.again()

    def _seal(self, lane: Lane) -> None:
        if lane.open is not None:
            lane.sealed.append(lane.open)
            lane.open = None

    def _rouse(self, lane: Lane) -> None:
        if lane.doze is not Doze.AWAKE:
            lane.doze = Doze.AWAKE
            self._post(lane.wake)

    async def wait_for_room(self) -> None:
        """Returns when something that was pending is not so any more."""
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
        """What a send ends with that has waited for too long."""
        return CapacityError(
            f"{self._pending_bytes} bytes are not acknowledged, after {timeout} seconds",
            topic=self.topic,
            hint="send less, or allow more by max_pending_bytes",
        )

    # -- for lanes --------------------------------------------------------------------------

    def next_batch(self, lane: Lane, *, is_waiting: bool) -> Batch | float | None:
        """As `Settler.next_batch`."""
        with self._lock:
            lane.doze = Doze.AWAKE
            if not lane.sealed and lane.open is not None:
                left = lane.opened_at + self._linger - self._clock.monotonic()
                if is_waiting and left > 0:
                    lane.doze = Doze.LINGERING
                    return left
                self._seal(lane)
            if lane.sealed:
                return lane.sealed.popleft()
            lane.doze = Doze.IDLE
            return None

    def placed(self, batch: Batch, first: int, rows: int, offset: int) -> None:
        """As `Settler.placed`."""
        with self._lock:
            callbacks = batch.place(first, rows, offset)
        self._finish(batch, callbacks)

    def failed(self, batch: Batch, first: int, rows: int, error: IsterError) -> None:
        """As `Settler.failed`."""
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
        """Has a function be called on the loop once a batch is done; False if it is."""
        with self._lock:
            return batch.when_done(callback)

    def forget(self, batch: Batch, callback: Callable[[], None]) -> None:
        """Does not call it after all."""
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
