"""A producer's way to one topic, against a broker that fails in every way: each message once."""

import asyncio
import random

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

from ister.base import retry
from ister.base.retry import AsyncRetry
from ister.client.core import network as network_module
from ister.client.core import sender as sender_module
from ister.client.core.network import Network
from ister.client.core.producer import ProducerCore, ProducerOptions
from ister.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.topic.dedup import Sequences
from ister.wire.contract import PutAck
from tests.support.clock import ManualClock
from tests.support.waiting import eventually_async

TOPIC = "/default/t"


class FakeTopic:
    """A topic as a broker keeps it: what was appended, and the table of its producers."""

    def __init__(self):
        self.log = []
        self.sequences = Sequences()
        self.streams = 0
        self.batches = []
        self.plan = lambda topic, batch: None
        self.refuse_stream = None
        self.is_down = False
        self.checks = 0

    def append(self, payloads, opened, sequence):
        # Each partition has a table of its own.
        producer = f"{opened.topic} {opened.producer}"
        verdict = self.sequences.judge(producer, opened.epoch, sequence, len(payloads))
        known = verdict.known
        start = verdict.start if known else len(self.log)
        if known < len(payloads):
            rest = payloads[known:]
            self.sequences.record(
                producer, opened.epoch, sequence + known, len(self.log), len(rest)
            )
            self.log.extend(rest)
            end = len(self.log)
        else:
            end = verdict.end
        return PutAck(sequence=sequence, start=start, end=end, known=known)

    def append_foreign(self):
        self.log.append(None)

    @property
    def published(self):
        return [payload for payload in self.log if payload is not None]


class RefusingTopic(FakeTopic):
    """One whose schema does not take `bad`."""

    def append(self, payloads, opened, sequence):
        if b"bad" in payloads:
            raise InvalidRequestError("no schema")
        return super().append(payloads, opened, sequence)


class FakeNetwork:
    timeout = None
    can_renew_token = False

    def __init__(self, topic):
        self.topic = topic
        self.known = [TOPIC]

    async def locate(self, topic, *, or_home=False):
        if self.topic.is_down:
            raise UnavailableError("nobody is there")
        return "broker"

    async def flight_address(self, route):
        return "flight"

    def record_failure(self, route, error):
        pass

    async def partitions(self, topic):
        return self.known

    grown_partitions = Network.grown_partitions


class FakeStream:
    """What `PutStream` is; a plan decides what becomes of each batch."""

    def __init__(self, network, route, address, opened, schema):
        self._topic = network.topic
        self.route = route
        self._opened = opened
        self._schema = schema
        self._answers = asyncio.Queue()
        self._failure = None

    async def open(self):
        self._topic.streams += 1
        if self._topic.refuse_stream is not None:
            self._fail(self._topic.refuse_stream)

    async def write(self, batch, sequence):
        await asyncio.sleep(0)
        assert batch.schema.equals(self._schema)
        if self._failure is not None:
            raise UnavailableError("the stream has ended")
        payloads = batch["payload"].to_pylist()
        self._topic.batches.append((sequence, payloads))
        step = self._topic.plan(self._topic, payloads)
        try:
            if step == "lost before":
                raise UnavailableError("the connection broke")
            if step == "half":
                self._topic.append(payloads[: len(payloads) // 2 or 1], self._opened, sequence)
                raise UnavailableError("the connection broke")
            ack = self._topic.append(payloads, self._opened, sequence)
            if step == "slow":
                asyncio.get_running_loop().call_later(0.3, self._answers.put_nowait, ack)
                return
            if step == "silent":
                return
            if step == "lost after":
                raise UnavailableError("the connection broke")
            if isinstance(step, Exception):
                raise step
        except Exception as error:
            self._fail(error)
        else:
            self._answers.put_nowait(ack)

    def _fail(self, error):
        self._failure = error
        self._answers.put_nowait(error)

    async def read(self):
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def done(self):
        if self._failure is None:
            self._answers.put_nowait(None)

    async def check_broker(self):
        self._topic.checks += 1
        if self._topic.is_down:
            raise UnavailableError("the broker is gone")

    def cancel(self):
        pass


@pytest.fixture
def topic(monkeypatch):
    monkeypatch.setattr(sender_module, "PutStream", FakeStream)

    async def pause(self, error):
        before = self._failed_at
        await real_pause(self, error)
        assert before is None or self._failed_at is not None

    real_pause = AsyncRetry.pause
    monkeypatch.setattr(retry, "_CLIENT_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(AsyncRetry, "pause", pause)
    return FakeTopic()


async def producing(topic, scenario, *, clock=None, **options):
    core = ProducerCore(
        FakeNetwork(topic),
        ProducerOptions(topic=TOPIC, name="p", **options),
        post=lambda wake: asyncio.get_running_loop().call_soon(wake),
        clock=clock,
    )
    await core.open()
    try:
        return await scenario(core)
    finally:
        await core.close(5)


def run(topic, scenario, **options):
    return asyncio.run(asyncio.wait_for(producing(topic, scenario, **options), 60))


async def offset_of(core, sent):
    batch, row = sent
    done = asyncio.Event()
    if core.when_done(batch, done.set):
        await done.wait()
    return core.outcome(batch, row)


def numbered(count):
    return [f"m{number}".encode() for number in range(count)]


def test_a_message_that_comes_alone_goes_at_once_and_many_go_together(topic):
    async def scenario(core):
        await offset_of(core, core.try_send(b"alone"))
        for payload in numbered(1000):
            core.try_send(payload)
        await core.flush()

    run(topic, scenario, linger_ms=60_000, max_batch_messages=300)
    sizes = [len(payloads) for _, payloads in topic.batches]
    assert sizes[0] == 1
    assert max(sizes) == 300
    assert len(sizes) <= 6


async def test_partitions_count_once_those_before_them_are_there(topic, monkeypatch):
    """They are created from the last one down, and a key's partition depends on their number."""
    monkeypatch.setattr(network_module, "_PARTITIONS_SECONDS", 0)
    parts = [f"{TOPIC}-part-{number}" for number in range(4)]

    network = FakeNetwork(topic)
    network.known = [parts[0], parts[1], parts[3]]
    core = ProducerCore(
        network,
        ProducerOptions(topic=TOPIC, name="p"),
        post=lambda wake: asyncio.get_running_loop().call_soon(wake),
    )

    def used():
        return {core.try_send(b"x", None, f"key-{number}")[0].topic for number in range(30)}

    await core.open()
    assert used() == set(parts[:2])
    network.known = parts
    await eventually_async(lambda: used() == set(parts))
    await core.close(5)
    network.known = parts[1:]
    with pytest.raises(NotFoundError):
        await core.open()


def test_an_idle_stream_is_ended_and_the_next_message_opens_another(topic, monkeypatch):
    monkeypatch.setattr(sender_module, "_IDLE_SECONDS", 0.01)
    ended = []
    done = FakeStream.done

    async def record(stream):
        ended.append(stream)
        await done(stream)

    monkeypatch.setattr(FakeStream, "done", record)

    async def scenario(core):
        for number in range(3):
            before = len(ended)
            core.try_send(b"%d" % number)
            await core.flush()
            while len(ended) == before:
                await asyncio.sleep(0.001)

    run(topic, scenario)
    assert topic.published == [b"0", b"1", b"2"]
    assert topic.streams >= 3


def test_a_batch_has_so_many_bytes_and_a_larger_message_goes_alone(topic):
    async def scenario(core):
        for size in (10, 10, 5000, 10, 10):
            core.try_send(b"x" * size)
        await core.flush()

    run(topic, scenario, max_batch_bytes=1000)
    assert [[len(one) for one in payloads] for _, payloads in topic.batches] == [
        [10, 10],
        [5000],
        [10, 10],
    ]


def test_a_broker_that_is_slow_is_waited_for(topic, monkeypatch):
    monkeypatch.setattr(sender_module, "_ANSWER_SECONDS", 0.05)
    topic.plan = lambda topic, batch: "slow"

    async def scenario(core):
        return await send_one(core, b"x")

    assert run(topic, scenario) == 0
    assert topic.checks >= 2
    assert topic.streams == 2, "one to look, one to publish"


def test_a_broker_that_is_gone_without_a_word_is_not(topic, monkeypatch):
    monkeypatch.setattr(sender_module, "_ANSWER_SECONDS", 0.05)
    steps = iter(["silent"])
    topic.plan = lambda topic, batch: next(steps, None)

    async def scenario(core):
        asyncio.get_running_loop().call_later(0.2, setattr, topic, "is_down", True)
        asyncio.get_running_loop().call_later(0.4, setattr, topic, "is_down", False)
        return await send_one(core, b"x")

    assert run(topic, scenario) == 0
    assert topic.published == [b"x"]
    assert topic.streams == 3


def test_a_program_that_is_started_again_takes_the_name_over(topic):
    clock = ManualClock()
    for payload in (b"a", b"b", b"c"):
        # The second start is within the same second, the third after the clock was set back.
        asyncio.run(producing(topic, lambda core, p=payload: send_one(core, p), clock=clock))
        clock.jump_wall(-1 if payload == b"a" else -100_000)
    assert topic.published == [b"a", b"b", b"c"]


async def send_one(core, payload):
    return await offset_of(core, core.try_send(payload))


def test_a_producer_that_was_replaced_gives_up(topic):
    clock = ManualClock()

    async def scenario(old):
        await send_one(old, b"old")
        clock.advance(2)
        await producing(topic, lambda new: send_one(new, b"new"), clock=clock)
        with pytest.raises(ConflictError):
            await send_one(old, b"zombie")
        with pytest.raises(ConflictError):
            old.try_send(b"zombie")

    run(topic, scenario, clock=clock)
    assert topic.published == [b"old", b"new"]


def test_a_producer_that_was_replaced_before_its_first_answer_does_not_double_anything(topic):
    clock = ManualClock()
    steps = iter(["lost after", "newer"])

    def plan(topic, batch):
        step = next(steps, None)
        if step == "newer":
            topic.sequences.record(f"{TOPIC} p", clock.now_ns() // 10**9 + 5, 0, len(topic.log))
        return step

    topic.plan = plan

    async def scenario(old):
        with pytest.raises(ConflictError):
            await send_one(old, b"old")

    run(topic, scenario, clock=clock)
    assert topic.published == [b"old"]


@pytest.mark.parametrize("bad", [0, 7, 49])
def test_a_message_that_is_refused_fails_alone(topic, bad):
    refusing = RefusingTopic()
    payloads = numbered(50)
    payloads[bad] = b"bad"

    async def scenario(core):
        sent = [core.try_send(payload) for payload in payloads]
        return await asyncio.gather(*(offset_of(core, one) for one in sent), return_exceptions=True)

    found = run(refusing, scenario, max_batch_messages=20)
    assert isinstance(found.pop(bad), InvalidRequestError)
    assert found == list(range(49))
    assert refusing.published == [payload for payload in payloads if payload != b"bad"]


def test_a_refused_message_after_doubtful_ones_loses_none(topic):
    refusing = RefusingTopic()
    steps = iter(["lost after", "lost after", "lost before"])
    refusing.plan = lambda topic, batch: next(steps, None)

    async def scenario(core):
        sent = [core.try_send(payload) for payload in (b"a", b"b", b"bad", b"c", b"d")]
        return await asyncio.gather(*(offset_of(core, one) for one in sent), return_exceptions=True)

    found = run(refusing, scenario, max_batch_messages=1)
    assert isinstance(found[2], InvalidRequestError)
    assert refusing.published == [b"a", b"b", b"c", b"d"]


def test_a_stream_that_is_refused_fails_everything(topic):
    async def scenario(core):
        await send_one(core, b"first")
        topic.refuse_stream = InvalidRequestError("the topic is not reliable")
        topic.plan = lambda topic, batch: "lost before"
        sent = [core.try_send(payload) for payload in numbered(20)]
        for one in sent:
            with pytest.raises(InvalidRequestError):
                await offset_of(core, one)
        with pytest.raises(InvalidRequestError):
            core.try_send(b"more")

    run(topic, scenario)
    assert topic.published == [b"first"]


def test_opening_says_what_is_wrong(topic):
    topic.refuse_stream = InvalidRequestError("the topic is not reliable")
    with pytest.raises(InvalidRequestError):
        run(topic, lambda core: send_one(core, b"x"))


def test_when_the_time_is_over_messages_fail_and_later_ones_go_on(topic):
    async def scenario(core):
        await send_one(core, b"first")
        topic.plan = lambda topic, batch: "lost before"
        topic.is_down = True
        sent = [core.try_send(payload) for payload in numbered(5)]
        for one in sent:
            with pytest.raises(UnavailableError):
                await offset_of(core, one)
        topic.plan = lambda topic, batch: None
        topic.is_down = False
        return await send_one(core, b"last")

    assert run(topic, scenario, timeout=0.2) == 1
    assert topic.published == [b"first", b"last"]


def test_flush_tells_of_a_failure_that_nobody_has_seen(topic):
    async def scenario(core):
        topic.is_down = True
        sent = core.try_send(b"x")
        with pytest.raises(UnavailableError):
            await core.flush()
        await core.flush()  # said once
        other = core.try_send(b"y")
        with pytest.raises(UnavailableError):
            await offset_of(core, other)
        await core.flush()  # known already
        with pytest.raises(UnavailableError):
            await offset_of(core, sent)

    run(topic, scenario, timeout=0.1)


def test_columns_are_added_when_a_message_needs_them(topic):
    async def scenario(core):
        await send_one(core, b"a")
        plain = topic.streams
        batch, row = core.try_send(b"b", {"colour": "red"}, "key", 7, 2)
        await offset_of(core, (batch, row))
        await send_one(core, b"c")
        return topic.streams - plain

    assert run(topic, scenario) == 1
    assert topic.published == [b"a", b"b", b"c"]


def test_what_is_pending_is_bounded_and_room_comes_back(topic):
    async def scenario(core):
        accepted = 0
        while core.try_send(b"x" * 1000) is not None:
            accepted += 1
        assert accepted < 100
        assert core.pending_bytes <= 50_000
        waiting = asyncio.create_task(core.wait_for_room())
        await asyncio.wait_for(waiting, 60)
        await core.flush()
        assert core.pending_bytes == 0
        assert core.try_send(b"y" * 200_000) is not None, "alone, a message of any size goes"

    run(topic, scenario, max_pending_bytes=50_000)


def test_close_gives_up_what_takes_too_long(topic):
    async def scenario(core):
        topic.is_down = True
        sent = core.try_send(b"x")
        with pytest.raises(WaitTimeoutError):
            await core.close(0.1)
        with pytest.raises(ClosedError):
            await offset_of(core, sent)
        with pytest.raises(ClosedError):
            core.try_send(b"y")
        assert core.pending_bytes == 0

    run(topic, scenario)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_each_message_is_there_once_in_order(topic, seed):
    chance = random.Random(seed)
    print(f"seed {seed}: pytest tests/unit/client/test_sender.py -k 'whatever and {seed}'")

    def plan(topic, batch):
        if chance.random() < 0.3:
            topic.append_foreign()
        roll = chance.random()
        if roll < 0.15:
            return "lost before"
        if roll < 0.3:
            return "lost after"
        if roll < 0.4:
            return "half"
        return CapacityError("full") if roll < 0.45 else None

    topic.plan = plan

    async def scenario(core):
        sent = []
        for payload in numbered(300):
            sent.append((payload, core.try_send(payload)))
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        return [(payload, await offset_of(core, one)) for payload, one in sent]

    found = run(topic, scenario, max_batch_messages=chance.choice([1, 3, 20]))
    assert topic.published == numbered(300)
    for payload, offset in found:
        assert topic.log[offset] == payload
