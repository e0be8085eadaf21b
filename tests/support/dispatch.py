"""One subscription over a log whose reads are counted, and consumers that take what they get.

    async with counted_log() as place:
        place.fill_keys(1000, size=500)
        dispatch = place.open("shared", window=100)
        consumers = Consumers(dispatch, [1, 2])
        await consumers.take(lambda: dispatch.delivery.cursor == 1000)
        assert place.bytes_read < 2 * consumers.bytes

The log has files in memory (and a bucket, if asked for) and caches one message, so that everything
that a subscription does not hold is read from there.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.broker.dispatch.dead_letters import LetterSigner
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.policies import Rate
from ister.subscription.policy import Backoff, FailurePolicy, SubscriptionKind
from ister.subscription.progress import ProgressPlan
from ister.subscription.store import SubscriptionStore
from tests.support.broker import broker_tasks, broker_timers, eventually
from tests.support.machine import Machine
from tests.support.memory_metadata import MemoryMetadata
from tests.support.stores import Site

NAME = "/default/t"
QUICK = FailurePolicy(base_redelivery_delay_ms=0, max_redelivery_delay_ms=0, backoff=Backoff.FIXED)


class Place:
    """A topic and a store, and what is read for its subscriptions."""

    def __init__(self, topic) -> None:
        self.topic = topic
        self.store = SubscriptionStore(MemoryMetadata(), root_prefix="/danube", clock=SystemClock())
        self.metrics = Metrics()
        self.budget = Budget(1 << 30)
        self._made = []

    def fill_bucket(self, count, *, size):
        """Appends messages of which only a few stay in local files."""
        for _ in range(10):
            self.fill_keys(count // 10, size=size)
            self.topic.upload()
        self.site.clock.advance(1)
        self.topic.bucket.retention.trim()
        assert self.topic.wal.trimmed >= count * 8 // 10

    def fill_keys(self, count, *, size, keys=50):
        """Appends messages of so many keys in turn."""
        for number in range(count):
            payload = (b"%d" % number).ljust(size, b".")
            self.topic.append(payload, routing_key=f"k{number % keys}")
        self.topic.flush()

    def open(self, kind, *, window, policy=QUICK, name="s", **more):
        """A subscription from the beginning on."""
        parsed = TopicName.parse(self.topic.name)
        stored = self.store.load(parsed, "").get(name) or self.store.create(
            parsed,
            name,
            kind=SubscriptionKind(kind),
            cursor=0,
            incarnation="",
            owned=None,
            policy=policy,
        )
        made = Dispatcher(
            self.topic,
            stored,
            store=self.store,
            budget=self.budget,
            window=window,
            plan=ProgressPlan(3600.0, 10**9),
            rate=Rate(0),
            grace_seconds=3600.0,
            publish_dead_letter=None,
            signer=LetterSigner("secret"),
            on_fenced=lambda: None,
            metrics=self.metrics,
            **more,
        )
        self._made.append(made)
        return made

    def count(self, name):
        """One of the log's counters."""
        return self.topic._metrics.snapshot()[name]

    @property
    def bytes_read(self):
        """From files and objects, so far."""
        return self.count("wal.reader.stitch_file_bytes") + self.count(
            "cloud_reader.bytes_read_total"
        )

    async def close(self):
        """Ends the subscriptions, which leave nothing behind."""
        for one in self._made:
            one.delivery.validate_state()
            await one.close(None, flush=False)
        await eventually(lambda: broker_tasks() == [])
        assert broker_timers() == []


@asynccontextmanager
async def counted_log(*, is_tiered=False):
    """A place for subscriptions; with `is_tiered`, one that has a bucket."""
    if is_tiered:
        with Site() as site:
            log = site.open(
                storage={"uploader": {"engine": "none"}},
                retention={"time_minutes": 0},
                rotate_max_bytes=4096,
                cache_capacity=1,
            )
            place = Place(log.topic(NAME, create=True))
            place.site, place.log = site, log
            try:
                yield place
            finally:
                await place.close()
    else:
        with Machine() as machine:
            place = Place(machine.topic(NAME, ack="written", cache_capacity=1))
            try:
                yield place
            finally:
                await place.close()


def ack(dispatch, offset, *, attempt=1):
    """Acknowledges a message as the consumer that has it, or as the first one."""
    holders = [one for one in dispatch.attached if dispatch.delivery.is_with(one, offset)]
    consumer = [*holders, *dispatch.attached, 1][0]
    stamped = dispatch.receipts.stamp("", consumer, offset, attempt)
    _, [refusal] = dispatch.ack_by_ids([(offset, stamped)])
    if refusal is not None:
        raise refusal


class Consumers:
    """Consumers of a subscription: they take what they get, and answer as they are told."""

    def __init__(self, dispatch, ids, filters=()):
        self.dispatch = dispatch
        self.outboxes = {one: dispatch.attach(one, filters) for one in ids}
        self.received = []
        """Consumer, offset and attempt of each message."""
        self.bytes = 0

    @property
    def offsets(self):
        """Of all that came, in the order in which they came."""
        return [offset for _, offset, _ in self.received]

    async def take(self, until, *, answer=lambda offset, attempt: True):
        """Receives until `until` says so.

        What `answer` says of an offset and its attempt: True is an ack, False a nack, None neither.
        """
        tasks = [asyncio.ensure_future(self._serve(one, answer)) for one in self.outboxes.values()]
        try:
            await eventually(until)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, outbox, answer):
        while True:
            items = await outbox.take(32)
            count = len(items)
            try:
                while items:
                    for message, attempt in await self.dispatch.next_messages(outbox, items):
                        self._receive(outbox.consumer, message, attempt, answer)
                    outbox.memory.written()
            finally:
                self.dispatch.written(outbox, count)

    def _receive(self, consumer, message, attempt, answer):
        offset = message.offset
        self.received.append((consumer, offset, attempt))
        self.bytes += message.size_bytes
        said = answer(offset, attempt)
        if said:
            ack(self.dispatch, offset, attempt=attempt)
        elif said is not None:
            self.dispatch.nack(offset, delay_ms=None, reason="again")

    def leave(self):
        """Ends all streams."""
        for outbox in self.outboxes.values():
            self.dispatch.detach(outbox)
