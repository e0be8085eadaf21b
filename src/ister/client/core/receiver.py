"""Receives messages of one topic for a consumer, and sends its acknowledgements.

    broker ─ deliveries ─► the consumer's inbox ─► the program
       ▲                                              │
       └──── acks, together; confirmed ◄──────────────┘
             what was received, now and then

Owns: the stream of one topic, what the program holds, what it has acknowledged and the broker has
not confirmed. Does not own: the inbox, which all topics of a consumer share (`consumer`).

A stream that fails is followed by another, to whichever broker has the topic then. Then

- what was acknowledged and not confirmed is acknowledged again, before anything else;
- what is still in the inbox is dropped, because it is redelivered;
- what it has acknowledged so, and what the program holds, comes again too, and is not handed out a
  second time: the program acknowledges the one it has. Unless what it holds comes as another
  attempt, as after a nack or an ack timeout.

So one consumer sees a message twice only if it failed, if the program took and acknowledged nothing
for the ack timeout, or if a broker was killed before it wrote down an acknowledgement that it had
confirmed; others may see one that this one had when its stream broke.

If the program holds a message for a while, the client reports to the broker which one it received
last: the ack timeout of messages that wait in the inbox has not begun.

A consumer that does not take its messages stops the reading from the network once some bytes are
in the inbox, and the broker holds back what is not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ister import wire
from ister.base.retry import AsyncRetry
from ister.base.serializers import Json, Serializer
from ister.client.core.network import Network, Route
from ister.client.messages import ReceivedMessage
from ister.errors import (
    CorruptDataError,
    IsterError,
    NoAnswerError,
    UnauthenticatedError,
    UnavailableError,
)

if TYPE_CHECKING:
    _Call = wire.Stream[wire.ister_api.ConsumeRequest]

_log = logging.getLogger("ister.client.core.receiver")
_Result = TypeVar("_Result")

# Acknowledgements go when none is on its way, or after so long, or when there are so many.
_LINGER_SECONDS: Final = 0.02
_ACKS_MAX: Final = 1000
_OPEN_SECONDS: Final = 15.0
_VERDICT_SECONDS: Final = 2.0
# A broker that has sent nothing for one to two times as long has to say that it has the topic.
_SILENT_SECONDS: Final = 15.0
# How often received messages are reported. Most are acknowledged before that.
_REPORT_SECONDS: Final = 0.25
# What the program holds is redelivered within so long after a stream was opened.
_RESUME_SECONDS: Final = 30.0
_HELD_MAX: Final = 1 << 17
_ANY_ATTEMPT: Final = 1 << 32
# A stream that has lasted for so long has worked.
_STEADY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverOptions:
    """The request that opens a stream."""

    subscription: str
    consumer: str
    kind: str
    start: str
    key_filters: tuple[str, ...]
    buffer_bytes: int
    timeout: float | None
    serializer: Serializer[Json] | None = None


class Inbox(Protocol):
    """Where messages go."""

    def lock(self) -> threading.Lock:
        """Guards what the program and the loop both change."""
        ...

    def deliver(self, messages: list[ReceivedMessage]) -> None:
        """Takes messages; without the lock."""
        ...

    def progressed(self) -> None:
        """Called when acks were confirmed, or nacks sent or dropped; without the lock."""
        ...


class Receiver:
    """See the module header. Belongs to one loop, but for what is said to be under the lock."""

    def __init__(
        self, inbox: Inbox, network: Network, topic: str, options: ReceiverOptions
    ) -> None:
        self.topic = topic
        self.serializer = options.serializer
        """Decodes `ReceivedMessage.value`; None for payloads as they are."""
        self.life = 0
        """Which stream it is; what came by another one before is not handed out any more."""
        self.held: dict[int, int] = {}
        """Offsets that the program has and has not acknowledged, and which attempt they were;
        under the lock, as the next five."""
        self.waiting_bytes = 0
        """Bytes in the inbox."""
        self._received: int | None = None
        self._acks: list[tuple[int, int]] = []
        self._nacks: deque[wire.ister_api.Nack] = deque()
        self._unconfirmed: dict[int, int] = {}
        self._inbox = inbox
        self._lock = inbox.lock()
        self._network = network
        self._options = options
        self._retries = AsyncRetry(options.timeout)
        self._resumed: dict[int, int] = {}
        self._resumed_until = 0.0
        self._incarnation: str | None = None
        self._to_send = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_stalled = False
        # Whether nothing has come since the last check.
        self._is_silent = False
        self.is_asleep = False
        """Whether `wake` has to be called for an acknowledgement to go; under the lock."""
        self._is_reporting = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_ending = False
        self.flushes = 0
        """How many wait for confirmations, which come behind messages that wait for room."""

    # -- under the lock, by any thread ------------------------------------------------------

    def take(self, message: ReceivedMessage) -> bool:
        """Records that the program takes a message; False if it is from an earlier stream."""
        if message.life != self.life:
            return False
        self.waiting_bytes -= len(message.payload)
        self._received = message.offset
        held = self.held
        held[message.offset] = message.attempt
        if len(held) > _HELD_MAX:
            # The program never acknowledges; the oldest was redelivered long ago.
            del held[next(iter(held))]
        return True

    def needs_loop(self) -> bool:
        """Whether the loop has to be woken: to read on, or to report what was received."""
        is_needed = not self._is_reporting
        self._is_reporting = True
        if self._is_stalled and self.waiting_bytes <= self._options.buffer_bytes // 2:
            self._is_stalled = False
            is_needed = True
        return is_needed

    def ack(self, message: ReceivedMessage) -> bool:
        """Acknowledges a message; True if the loop has to be woken."""
        self.held.pop(message.offset, None)
        self._acks.append((message.offset, message.token))
        return self._rouse()

    def nack(self, message: ReceivedMessage, delay_ms: int | None, reason: str | None) -> bool:
        """Rejects a message; True if the loop has to be woken."""
        self.held.pop(message.offset, None)
        if self._resumed.pop(message.offset, None) is not None:
            return False  # the stream has failed; the next one redelivers it anyway
        self._nacks.append(
            wire.ister_api.Nack(offset=message.offset, delay_ms=delay_ms, reason=reason)
        )
        return self._rouse()

    def _rouse(self) -> bool:
        was_asleep, self.is_asleep = self.is_asleep, False
        return was_asleep

    @property
    def is_settled(self) -> bool:
        """Whether every acknowledgement is confirmed."""
        return not (self._acks or self._unconfirmed or self._nacks)

    def is_pending(self, offset: int) -> bool:
        """Whether the ack or nack of a message has to be sent or confirmed yet."""
        return (
            offset in self._unconfirmed
            or any(offset == one for one, _ in self._acks)
            or any(offset == nack.offset for nack in self._nacks)
        )

    # -- on the loop ------------------------------------------------------------------------

    def wake(self) -> None:
        """Wakes the stream: there is something to send, or room in the inbox."""
        self._to_send.set()
        self._has_room.set()

    def end(self) -> None:
        """Makes the stream end in order."""
        self._is_ending = True
        self.wake()

    async def run(self) -> None:
        """Receives until `end` is called.

        Raises:
            IsterError: Receiving failed for good.
        """
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            error: IsterError = UnavailableError("the stream has ended", topic=self.topic)
            try:
                await self._receive()
            except IsterError as failure:
                error = failure
            if self._is_ending:
                return
            self._lose_stream()
            if loop.time() - began > _STEADY_SECONDS:
                self._retries.reset()
            _log.debug("a stream has ended", extra={"topic": self.topic, "error": str(error)})
            if (
                isinstance(error, UnauthenticatedError)
                and self._network.can_renew_token
                and not self._retries.failures
            ):
                self._retries.failures += 1
                continue
            await self._retries.pause(error)

    def _lose_stream(self) -> None:
        with self._lock:
            self.life += 1
            self.waiting_bytes = 0
            self._resumed = dict(self.held)
            self._is_stalled = False
            self._received = None
            self._is_reporting = False
            self._nacks.clear()
            # The next stream sends them again first; the messages may still arrive.
            self._acks = [*sorted(self._unconfirmed.items()), *self._acks]
            self._resumed.update((offset, _ANY_ATTEMPT) for offset, _ in self._acks)
            self._unconfirmed.clear()
        self._inbox.progressed()  # those that wait for a nack

    async def _receive(self) -> None:
        """One stream, from its beginning to its end."""
        network = self._network
        route = await network.locate(self.topic)
        channel = network.channel_for_stream(route.address)
        call = wire.services.Delivery.Consume.open(channel, metadata=network.headers(route))
        try:
            await self._open(call, route)
            if not self.opened.done():
                self.opened.set_result(None)
            sending = asyncio.create_task(self._send_all(call, route))
            reading = asyncio.create_task(self._read_all(call, route))
            try:
                await self._watch(route, sending, reading)
            finally:
                for task in (sending, reading):
                    task.cancel()
                await asyncio.gather(sending, reading, return_exceptions=True)
        except IsterError as error:
            network.record_failure(route, error)
            raise
        finally:
            call.cancel()
            network.stream_ended(route.address)

    async def _open(self, call: _Call, route: Route) -> None:
        options, api = self._options, wire.ister_api
        request = api.ConsumeRequest(
            open=api.OpenConsumer(
                topic=self.topic,
                subscription=options.subscription,
                consumer=options.consumer,
                kind=options.kind,
                key_filters=options.key_filters,
                start=options.start,
                reports_received=True,
            )
        )
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                with contextlib.suppress(UnavailableError):  # reading raises the cause
                    await self._answered(call.write(request), route)
                answer = await self._answered(call.read(), route)
        except TimeoutError as error:
            raise NoAnswerError(route.address, topic=self.topic) from error
        if not isinstance(answer, api.ConsumeResponse):
            raise UnavailableError("the stream has ended early", topic=self.topic)
        if answer.WhichOneof("step") != "opened":
            raise CorruptDataError(
                "the broker's answer does not match the request", topic=self.topic
            )
        incarnation = answer.opened.incarnation
        if self._incarnation not in (None, incarnation):
            # Another topic of the same name: what is held and acknowledged was of the one before.
            with self._lock:
                self.held.clear()
                self._resumed.clear()
                self._acks.clear()
                self._nacks.clear()
        self._incarnation = incarnation
        self._resumed_until = asyncio.get_running_loop().time() + _RESUME_SECONDS

    async def _watch(
        self, route: Route, sending: asyncio.Task[None], reading: asyncio.Task[None]
    ) -> None:
        streams = {sending, reading}
        while not (
            await asyncio.wait(
                streams, timeout=_SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        )[0]:
            if self._is_silent:
                # There may be no messages; or the broker has lost the topic, and cannot know.
                await self._network.check_owner(route, self.topic, answer_within=_OPEN_SECONDS)
            self._is_silent = True
        if not reading.done():
            # Either everything is said and the broker ends it too, or why it failed comes now.
            await asyncio.wait({reading}, timeout=_VERDICT_SECONDS)
        if reading.done():
            reading.result()
        if sending.done():
            sending.result()

    async def _send_all(self, call: _Call, route: Route) -> None:
        loop = asyncio.get_running_loop()
        api = wire.ister_api
        said_at = 0.0
        report_at: float | None = None
        while True:
            with self._lock:
                self._to_send.clear()
                report_at, received = self._next_report(report_at, loop.time())
                acks = self._acks
                # Acknowledgements that come alone go at once, many go together.
                left = said_at + _LINGER_SECONDS - loop.time() if self._unconfirmed else 0.0
                is_due = bool(acks) and (left <= 0 or len(acks) >= _ACKS_MAX or self._is_ending)
                nacks, self._nacks = self._nacks, deque()
                if is_due:
                    self._acks = acks[_ACKS_MAX:]
                    acks = acks[:_ACKS_MAX]
                    self._unconfirmed.update(acks)
                # Those that linger have a timer, and more of them need no one to be woken.
                self.is_asleep = not acks
            if is_due:
                said_at = loop.time()
                offsets, tokens = zip(*acks, strict=True)
                request = api.ConsumeRequest(acks=api.Acks(offsets=offsets, tokens=tokens))
                await self._answered(call.write(request), route)
            for nack in nacks:
                await self._answered(call.write(api.ConsumeRequest(nack=nack)), route)
            if nacks:
                self._inbox.progressed()  # the broker does not confirm them
            if received is not None:
                await self._answered(call.write(api.ConsumeRequest(received=received)), route)
            if is_due or nacks or received is not None:
                continue
            if self._is_ending and self.is_settled:
                break
            times = [loop.time() + left] if acks and left > 0 else []
            times += [report_at] if report_at is not None else []
            timer = loop.call_at(min(times), self._to_send.set) if times else None
            try:
                await self._to_send.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        await self._answered(call.done_writing(), route)

    def _next_report(self, report_at: float | None, now: float) -> tuple[float | None, int | None]:
        """Returns when to report received messages, and which to report now; under the lock."""
        if self._received is None:
            self._is_reporting = False
            return None, None
        if report_at is None:
            self._is_reporting = True
            return now + _REPORT_SECONDS, None
        if now < report_at:
            return report_at, None
        received, self._received, self._is_reporting = self._received, None, False
        # What is acknowledged by now need not be reported.
        return None, received if received in self.held else None

    async def _read_all(self, call: _Call, route: Route) -> None:
        api = wire.ister_api
        while True:
            await self._wait_for_room()
            answer = await self._answered(call.read(), route)
            if not isinstance(answer, api.ConsumeResponse):
                return
            self._retries.reset()
            self._is_silent = False
            step = answer.WhichOneof("step")
            if step == "deliveries":
                self._deliver(answer.deliveries.messages)
            elif step == "acked":
                self._settle(answer.acked.offsets)
            elif step == "refused":
                # They are redelivered, if they exist.
                _log.warning(
                    "the broker refused acknowledgements of messages that it has not delivered",
                    extra={"topic": self.topic, "offsets": list(answer.refused.offsets[:10])},
                )
                self._settle(answer.refused.offsets)

    def _settle(self, offsets: Iterable[int]) -> None:
        """Records that the broker confirmed these acknowledgements."""
        with self._lock:
            for offset in offsets:
                self._unconfirmed.pop(offset, None)
            is_free = not self._unconfirmed
        if is_free:
            self._to_send.set()
        self._inbox.progressed()

    def _deliver(self, messages: Iterable[wire.ister_api.Delivered]) -> None:
        fresh = [ReceivedMessage(one, self, self.life) for one in messages]
        with self._lock:
            resumed = self._resumed
            if resumed and asyncio.get_running_loop().time() > self._resumed_until:
                resumed.clear()
            if resumed:
                arrived = fresh
                fresh = [one for one in arrived if one.attempt > resumed.pop(one.offset, 0)]
                known = [one.offset for one in arrived if one.offset in self.held]
                if known:
                    # The program has had it since the stream before.
                    self._received = known[-1]
                    self._to_send.set()
            self.waiting_bytes += sum(len(one.payload) for one in fresh)
        self._inbox.deliver(fresh)

    @property
    def _reads_on(self) -> bool:
        return self._is_ending or self.flushes > 0

    async def _wait_for_room(self) -> None:
        while True:
            self._has_room.clear()
            with self._lock:
                if self.waiting_bytes < self._options.buffer_bytes or self._reads_on:
                    return
                self._is_stalled = True
            await self._has_room.wait()

    async def _answered(self, waiting: Awaitable[_Result], route: Route) -> _Result:
        return await self._network.answered(waiting, route.address, self.topic)
