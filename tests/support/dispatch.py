"""Subscriptions of one topic, and consumers that take what they get.

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
from ister.config import load_config
from ister.subscription.policy import Backoff, FailurePolicy, SubscriptionKind
from ister.subscription.progress import ProgressPlan
from ister.subscription.store import SubscriptionStore
from ister.topic.log import Log
from tests.support.broker import broker_tasks, broker_timers, eventually
from tests.support.machine import Machine
from tests.support.memory_metadata import MemoryMetadata
from tests.support.stores import Site

NAME = "/default/t"
QUICK = FailurePolicy(base_redelivery_delay_ms=0, max_redelivery_delay_ms=0, backoff=Backoff.FIXED)


class SlowStore(SubscriptionStore):
    """A store whose cursors can be refused, held back and looked at."""

    def __init__(self):
        super().__init__(MemoryMetadata(), root_prefix="/danube", clock=SystemClock())
        self.written = []
        self.error = None
        self.before_options = lambda: None
        self.before_cursor = lambda: None

    def save_cursor(self, topic, name, *, cursor, **more):
        """Does so, unless it is refused."""
        self.before_cursor()
        if self.error is not None:
            raise self.error
        at = super().save_cursor(topic, name, cursor=cursor, **more)
        self.written.append(at)
        return at

    def save_options(self, topic, stored, *, owned):
        """Does so, after what comes before it."""
        self.before_options()
        super().save_options(topic, stored, owned=owned)


class Place:
    """A topic, a store, and what subscriptions of them do."""

    def __init__(self, topic) -> None:
        self.topic = topic
        self.parsed = TopicName.parse(topic.name)
        self.store = SlowStore()
        self.metrics = Metrics()
        self.budget = Budget(1 << 30)
        self.letters = []
        self.letter_error = None
        self.fenced = []
        self._made = []

    def fill(self, count, *, size=0, **more):
        """Appends messages that begin with their offsets."""
        for number in range(self.topic.wal.next, self.topic.wal.next + count):
            self.topic.append(b"%d" % number + b"." * size, **more)
        if self.topic.ack != "memory":
            self.topic.flush()

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

    async def publish_dead_letter(self, name, message):
        """Keeps it, unless that is to fail."""
        if self.letter_error is not None:
            raise self.letter_error
        self.letters.append((name, message))

    def serve(self, count, *, size=0, **more):
        """Messages, a subscription of them, and what is on its way to its consumer 1."""
        self.fill(count, size=size)
        dispatch = self.open(**more)
        return dispatch, dispatch.attach(1, ())

    def open(
        self,
        kind="exclusive",
        *,
        cursor=0,
        window=100,
        policy=QUICK,
        interval=3600.0,
        delta=10**9,
        rate=0,
        grace=3600.0,
        name="s",
    ):
        """The subscription as the next broker begins it."""
        stored = self.store.load(self.parsed, "").get(name) or self.store.create(
            self.parsed,
            name,
            kind=SubscriptionKind(kind),
            cursor=cursor,
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
            plan=ProgressPlan(interval, delta),
            rate=Rate(rate),
            grace_seconds=grace,
            publish_dead_letter=self.publish_dead_letter,
            signer=LetterSigner("secret"),
            on_fenced=lambda: self.fenced.append(True),
            metrics=self.metrics,
        )
        self._made.append(made)
        return made

    def count(self, name):
        """One of the log's counters."""
        return self.topic._metrics.snapshot()[name]

    def counted(self, name):
        """One of the subscription's counters."""
        return self.metrics.snapshot()[f"subscription.{name}"]

    @property
    def kept(self):
        """The cursor that the store has."""
        return self.store.load(self.parsed, "")["s"].cursor

    @property
    def bytes_read(self):
        """From files and objects, so far."""
        return self.count("wal.reader.stitch_file_bytes") + self.count(
            "cloud_reader.bytes_read_total"
        )

    async def close(self):
        """Ends the subscriptions, which leave nothing behind."""
        for one in self._made:
            if not one._is_closed:
                one.delivery.validate_state()
            await one.close(None, flush=False)
        await eventually(lambda: broker_tasks() == [])
        assert broker_timers() == []


@asynccontextmanager
async def in_memory():
    """A place on a log that is in memory alone."""
    with Log(load_config(None, {})) as log:
        place = Place(log.topic(NAME, create=True))
        try:
            yield place
        finally:
            await place.close()


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
            place.machine = machine
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
