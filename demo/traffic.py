"""Producers and consumers of the demo, and what they saw.

    day       a backlog as quick as it goes, then a steady pace, in which the broker is killed
    evening   the last messages, on the broker that has taken over

Owns: producers and consumers, the pace, the moment of the kill, and the notes: which
message was acknowledged at which offset, what each subscription got, when, and how late. Does not
own: the broker's process (`serving`), or what the notes prove (`proof`).

Everybody is a client of `ister.client` on one loop, in this process, so that the clock of a send is
that of its receipt. Clients are not told of the kill: they reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import importlib.util
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from demo.proof import Acknowledged, Received
from demo.serving import BrokerProcess
from demo.shop import CLICKS, ORDERS, PAYMENTS, TOPICS, Event, Shop, parse_id
from demo.show import Show
from ister.client import AsyncClient, AsyncConsumer, AsyncProducer, AsyncSentMessage
from ister.errors import ClosedError, IsterError, UnavailableError

BULK_SHARE: Final = 0.80
LIVE_SHARE: Final = 0.15
_LIVE_SECONDS_MIN: Final = 4.0
_LIVE_SECONDS_MAX: Final = 10.0
_PACE: Final = 1000.0
_PACE_MIN: Final = 100.0
# Of what consumers can take: a pace that they keep up with.
_PACE_SHARE: Final = 0.25
_SWITCH_AT: Final = 0.2
_KILL_AT: Final = 0.4
_PRODUCERS: Final = {ORDERS: 2, PAYMENTS: 1, CLICKS: 3}
_SAMPLE_SECONDS: Final = 0.2
_COLLECT_SECONDS: Final = 0.01
_TICK_SECONDS: Final = 0.01
_YIELD_EVERY: Final = 100
_QUIET_SECONDS: Final = 15.0
_DRAIN_SECONDS: Final = 90.0
_CALL_SECONDS: Final = 60.0
# With at most this lag, the backlog of the kill is consumed.
_LAG_SMALL: Final = 150
_DANUBE_MESSAGES: Final = 100


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A subscription of the demo."""

    name: str
    topic: str
    kind: str
    consumers: int


SUBSCRIPTIONS: Final = (
    Subscribed("ledger", PAYMENTS, "exclusive", 1),
    Subscribed("risk", PAYMENTS, "failover", 2),
    Subscribed("warehouse", ORDERS, "key_shared", 3),
    Subscribed("recommendations", CLICKS, "shared", 3),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """How things were at a moment."""

    at: float
    """Seconds since the day began."""
    acknowledged: int
    received: int
    lag: dict[str, int]
    """Acknowledged and not received, by subscription."""
    pending: int
    """Sent and not acknowledged."""

    @property
    def waiting(self) -> int:
        """All that has yet to come."""
        return self.pending + sum(self.lag.values())


@dataclass(slots=True)
class Kill:
    """The broker's end, and its return; seconds since the day began."""

    at: float = 0.0
    ready_at: float | None = None
    back_at: float | None = None
    """When a producer got its first answer again."""
    caught_up_at: float = 0.0
    """When consumers had what had waited meanwhile."""
    pending: int = 0
    """Messages that were on their way and not acknowledged when it was killed."""

    @property
    def away_seconds(self) -> float:
        """From the kill to the first answer."""
        return (self.back_at or self.at) - self.at


@dataclass(slots=True)
class _Lane:
    producer: AsyncProducer
    pending: deque[tuple[int, AsyncSentMessage]] = field(default_factory=deque)


class Traffic:
    """See the module header. Belongs to one loop at a time."""

    def __init__(self, broker: BrokerProcess, shop: Shop, show: Show) -> None:
        """Nothing is sent yet."""
        self._broker = broker
        self._show = show
        truth = shop.truth
        first, second = self._cuts(len(shop.events))
        self.bulk = shop.events[:first]
        self.live = shop.events[first:second]
        self.tail = shop.events[second:]
        self.acknowledged = {topic: Acknowledged(topic, truth.messages[topic]) for topic in TOPICS}
        self.received = {one.name: Received(one.topic, one.name, one.kind) for one in SUBSCRIPTIONS}
        self.samples: list[Sample] = []
        self.kill: Kill | None = None
        self.switched_at: float | None = None
        self.switched_from: str | None = None
        self.bulk_seconds = 0.0
        self.live_from = 0.0
        self.day_seconds = 0.0
        self.drained_per_second = 0.0
        self.pace = 0.0
        self.steady_ms = array("d")
        """From a send to its receipt, at the steady pace."""
        self.killed_ms = array("d")
        """The same of messages that were on their way when the broker was killed, or while it was
        away."""
        self.by_danube = 0
        self._sent_at = {topic: array("d", bytes(8 * truth.messages[topic])) for topic in TOPICS}
        self._timed_from = dict.fromkeys(TOPICS, 1 << 62)
        self._timed: list[tuple[float, float]] = []
        self._lanes: dict[str, list[_Lane]] = {}
        self._began = 0.0
        self._is_paused = False

    @property
    def producers(self) -> int:
        """How many there are."""
        return sum(_PRODUCERS.values())

    @staticmethod
    def _cuts(count: int) -> tuple[int, int]:
        return int(count * BULK_SHARE), int(count * (BULK_SHARE + LIVE_SHARE))

    # -- the parts of the day ---------------------------------------------------------------

    async def day(self, is_quiet: Callable[[], bool] = lambda: True) -> None:
        """Publishes the backlog and the steady part, with the kill in it.

        Returns when every subscription has everything.

        Args:
            is_quiet: Whether the machine has nothing else to do: the steady part waits for that,
                as latencies are those of this machine.

        Raises:
            IsterError: Something gave up.
        """
        show = self._show
        async with self._everybody(sampled=True) as consumers:
            show.bar("in", "published, acknowledged", len(self.bulk) + len(self.live))
            for one in SUBSCRIPTIONS:
                total = sum(e.topic == one.topic for e in (*self.bulk, *self.live))
                show.bar(one.name, f"{one.name} ({one.kind} × {one.consumers})", total)
            await asyncio.gather(
                *(
                    self._send_all(
                        lane, [event for event in self.bulk if self._lane(event) is lane]
                    )
                    for lanes in self._lanes.values()
                    for lane in lanes
                )
            )
            await self._settled(len(self.bulk))
            self.bulk_seconds = self._now()
            await self._drained()
            delivered = sum(one.unique for one in self.received.values())
            self.drained_per_second = delivered / self._now()
            await self._wait_until_quiet(is_quiet)
            await self._send_live(consumers)
            await self._settled(len(self.bulk) + len(self.live))
            await self._drained()
            self.day_seconds = self._now()
        self._sort_latencies()

    async def evening(self) -> None:
        """Publishes the rest, some of it with Danube's own client; returns when it has come.

        Raises:
            IsterError: Something gave up.
        """
        events = list(self.tail)
        theirs: list[Event] = []
        if importlib.util.find_spec("danube") is not None:
            for topic in (CLICKS, PAYMENTS):
                last = [event for event in events if event.topic == topic]
                theirs += last[-min(_DANUBE_MESSAGES, len(last) // 2) :]
        taken = {(event.topic, event.id) for event in theirs}
        self._show.bar("in", "published, acknowledged", len(events))
        before = sum(one.count for one in self.acknowledged.values())
        async with self._everybody(sampled=False, bar_from=before):
            for event in events:
                if (event.topic, event.id) not in taken:
                    await self._send(event)
            if theirs:
                self.by_danube = await self._send_as_danube(theirs)
            await self._settled(before + len(events))
            await self._drained()

    async def _wait_until_quiet(self, is_quiet: Callable[[], bool]) -> None:
        """Waits for that, with the clock of the day stopped; not for long: it may never be."""
        began = self._now()
        self._is_paused = True
        while not is_quiet() and self._now() < began + _QUIET_SECONDS:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_SAMPLE_SECONDS)
        self._began += self._now() - began
        self._is_paused = False

    # -- producers --------------------------------------------------------------------------

    async def _send_all(self, lane: _Lane, events: Sequence[Event]) -> None:
        for number, event in enumerate(events):
            await self._send(event, lane)
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _send(
        self, event: Event, lane: _Lane | None = None, due: float | None = None
    ) -> None:
        """Sends an event; its clock starts when it was due, however late this comes."""
        lane = lane or self._lane(event)
        self._sent_at[event.topic][event.id] = due or asyncio.get_running_loop().time()
        sent = await lane.producer.send(event.payload, routing_key=event.key)
        lane.pending.append((event.id, sent))

    async def _send_live(self, consumers: dict[str, list[AsyncConsumer]]) -> None:
        """Sends at a pace, and lets happen what is to happen meanwhile."""
        events = self.live
        loop = asyncio.get_running_loop()
        deliveries = sum(self.received[one.name].unique for one in SUBSCRIPTIONS)
        per_message = deliveries / max(1, len(self.bulk))
        able = _PACE_SHARE * self.drained_per_second / max(per_message, 0.1)
        seconds = min(max(len(events) / _PACE, _LIVE_SECONDS_MIN), _LIVE_SECONDS_MAX)
        self.pace = max(min(len(events) / seconds, able), _PACE_MIN)
        for event in reversed(events):
            self._timed_from[event.topic] = event.id
        began = loop.time()
        self.live_from = began - self._began
        happening: list[asyncio.Future[None]] = []
        number = 0
        while number < len(events):
            due = min(len(events), int((loop.time() - began) * self.pace) + 1)
            for at in range(number, due):
                await self._send(events[at], due=began + at / self.pace)
            number = due
            progress = number / len(events)
            # Beside the sending, which keeps its pace.
            if progress >= _SWITCH_AT and len(happening) < 1:
                happening.append(asyncio.ensure_future(self._switch(consumers)))
            if progress >= _KILL_AT and len(happening) < 2:
                happening.append(asyncio.ensure_future(self._kill()))
            await asyncio.sleep(_TICK_SECONDS)
        await asyncio.gather(*happening)

    async def _switch(self, consumers: dict[str, list[AsyncConsumer]]) -> None:
        """Takes the active consumer of the failover subscription away."""
        one = next(one for one in SUBSCRIPTIONS if one.kind == "failover")
        got = self.received[one.name].by_consumer
        active = max(consumers[one.name], key=lambda consumer: got.get(consumer.name, 0))
        self.switched_at, self.switched_from = self._now(), active.name
        consumers[one.name].remove(active)
        await active.close(_CALL_SECONDS)
        self._show.say(f"{active.name} of {one.name} leaves; the one that stood by takes over")

    async def _kill(self) -> None:
        note = self.kill = Kill()
        note.pending = self._pending()
        note.at = self._now()
        pid = self._broker.pid
        await asyncio.to_thread(self._broker.kill)
        self._show.say(f"kill -9 {pid}: the broker is gone, {note.pending:,} messages on their way")
        await asyncio.to_thread(self._broker.start)
        note.ready_at = self._now()

    async def _send_as_danube(self, events: Sequence[Event]) -> int:
        """Sends with Danube's own client, as any program written for Danube does."""
        from danube import DanubeClientBuilder, DispatchStrategy  # noqa: PLC0415 - not required

        loop = asyncio.get_running_loop()
        address = self._broker.addresses.grpc
        client = await DanubeClientBuilder().service_url(f"http://{address}").build()
        try:
            for topic in {event.topic: None for event in events}:
                producer = (
                    client.new_producer()
                    .with_topic(topic)
                    .with_name("shop-danube")
                    .with_dispatch_strategy(DispatchStrategy.RELIABLE)
                    .build()
                )
                await producer.create()
                for event in (event for event in events if event.topic == topic):
                    self._sent_at[topic][event.id] = loop.time()
                    await producer.send(event.payload)
                    # Its answer is a number of its own: not the offset.
                    self.acknowledged[topic].add(event.id, None)
                await producer.close()
        finally:
            for connection in client.connection_manager._connections.values():  # noqa: SLF001
                # The client has no close of its own.
                await connection.channel.close()
        return len(events)

    def _lane(self, event: Event) -> _Lane:
        """The producer of an event: one for each key, so that its order is kept."""
        lanes = self._lanes[event.topic]
        return lanes[crc32(event.key.encode()) % len(lanes)]

    async def _collect(self) -> None:
        """Notes what is acknowledged, for as long as it is not cancelled."""
        while True:
            for lanes in self._lanes.values():
                for lane in lanes:
                    await self._collect_lane(lane)
            await asyncio.sleep(_COLLECT_SECONDS)

    async def _collect_lane(self, lane: _Lane) -> None:
        pending = lane.pending
        if not pending or not pending[0][1].done():
            return
        promised = self.acknowledged[lane.producer.topic]
        while pending and pending[0][1].done():
            number, sent = pending.popleft()
            promised.add(number, await sent)
        kill = self.kill
        if kill is not None and kill.ready_at is not None and kill.back_at is None:
            kill.back_at = self._now()
            self._show.say(f"clients are back, {kill.away_seconds:.1f} seconds after the kill")

    async def _settled(self, count: int) -> None:
        """Waits until this many messages are acknowledged."""
        await self._until(
            lambda: sum(one.count for one in self.acknowledged.values()) >= count,
            "messages were not acknowledged",
        )

    # -- consumers --------------------------------------------------------------------------

    async def _consume(self, consumer: AsyncConsumer, received: Received) -> None:
        loop = asyncio.get_running_loop()
        sent_at, first = self._sent_at[received.topic], self._timed_from
        topic, name, number = received.topic, consumer.name, 0
        async for message in consumer:
            if received.add(name, message.offset, message.routing_key):
                found = parse_id(message.payload)
                if found >= first[topic]:
                    self._timed.append((sent_at[found], loop.time()))
            try:
                consumer.ack(message)
            except ClosedError:
                return  # it was sent away; the message comes again, to another one
            number += 1
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _drained(self) -> None:
        """Waits until every subscription has all that is acknowledged; the proof says, if not."""
        with suppress(UnavailableError):
            await self._until(
                lambda: all(
                    one.unique >= self.acknowledged[one.topic].count
                    for one in self.received.values()
                ),
                "messages were not delivered",
            )

    async def _until(self, is_done: Callable[[], bool], otherwise: str) -> None:
        loop = asyncio.get_running_loop()
        newest, moved_at = -1, loop.time()
        while not is_done():
            progress = sum(one.count for one in self.acknowledged.values()) + sum(
                one.unique for one in self.received.values()
            )
            if progress != newest:
                newest, moved_at = progress, loop.time()
            if loop.time() - moved_at > _DRAIN_SECONDS:
                raise UnavailableError(f"{otherwise}: nothing has moved for {_DRAIN_SECONDS:.0f} s")
            for task in self._watched:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    task.result()
            await asyncio.sleep(_COLLECT_SECONDS)

    # -- everybody --------------------------------------------------------------------------

    @asynccontextmanager
    async def _everybody(
        self, *, sampled: bool, bar_from: int = 0
    ) -> AsyncIterator[dict[str, list[AsyncConsumer]]]:
        """All producers and consumers, connected; closed at the end."""
        address = self._broker.addresses.grpc
        self._watched: list[asyncio.Task[None]] = []
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(address, timeout=_CALL_SECONDS))
            for topic in TOPICS:
                await client.admin.create_topic(topic)
            consumers: dict[str, list[AsyncConsumer]] = {}
            for one in SUBSCRIPTIONS:
                consumers[one.name] = [
                    await client.consumer(
                        one.topic,
                        one.name,
                        name=f"{one.name}-{number + 1}",
                        kind=one.kind,
                        start="earliest",
                    )
                    for number in range(one.consumers)
                ]
            self._lanes = {
                topic: [
                    _Lane(await client.producer(topic, name=f"shop-{topic[9:]}-{number + 1}"))
                    for number in range(count)
                ]
                for topic, count in _PRODUCERS.items()
            }
            if sampled:
                self._began = asyncio.get_running_loop().time()
            tasks = self._watched
            tasks += [
                asyncio.create_task(self._consume(consumer, self.received[name]))
                for name, group in consumers.items()
                for consumer in group
            ]
            tasks.append(asyncio.create_task(self._collect()))
            tasks.append(asyncio.create_task(self._sample(sampled=sampled, bar_from=bar_from)))
            try:
                yield consumers
                for group in consumers.values():
                    for consumer in group:
                        await consumer.close(_CALL_SECONDS)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, IsterError):
                    raise result

    async def _sample(self, *, sampled: bool, bar_from: int) -> None:
        show = self._show
        while True:
            acknowledged = sum(one.count for one in self.acknowledged.values())
            lag = {
                one.subscription: max(0, self.acknowledged[one.topic].count - one.unique)
                for one in self.received.values()
            }
            if sampled and not self._is_paused:
                received = sum(one.unique + one.duplicates for one in self.received.values())
                self.samples.append(
                    Sample(self._now(), acknowledged, received, lag, self._pending())
                )
                for name, one in self.received.items():
                    show.update(name, one.unique)
            show.update("in", acknowledged - bar_from)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _pending(self) -> int:
        return sum(len(lane.pending) for lanes in self._lanes.values() for lane in lanes)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    def _sort_latencies(self) -> None:
        """Separates messages that the kill delayed from the others."""
        kill = self.kill
        if kill is not None:
            back_at = kill.back_at or kill.at
            kill.caught_up_at = next(
                (
                    sample.at
                    for sample in self.samples
                    if sample.at > back_at and sample.waiting <= _LAG_SMALL
                ),
                self.day_seconds,
            )
        for sent, got in self._timed:
            # It was on its way at some time between the kill and the end of its backlog.
            is_touched = (
                kill is not None
                and sent - self._began <= kill.caught_up_at
                and got - self._began >= kill.at
            )
            (self.killed_ms if is_touched else self.steady_ms).append((got - sent) * 1000)
        self._timed.clear()
