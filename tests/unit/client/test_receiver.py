"""A consumer's way from one topic, against a broker that is played: what is said, and when."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

from ister.base import retry
from ister.client.core.consumer import ConsumerCore, ConsumerOptions
from ister.client.core.network import Route
from ister.errors import (
    ClosedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.wire import ister_api

TOPIC = "/default/t"


class Stream:
    """One stream, as the broker sees it."""

    def __init__(self, network):
        self._network = network
        self.answers = asyncio.Queue()
        self.acks = []
        self.tokens = []
        self.nacks = []
        self.received = []
        self.opening = None
        self.confirms = True
        self.is_ended = asyncio.Event()

    # The client's side.

    async def write(self, request):
        if self.is_ended.is_set():
            raise UnavailableError("the stream has ended")
        step = request.WhichOneof("step")
        if step == "open":
            self.opening = request.open
            self._network.streams.put_nowait(self)
            if self._network.refusal is not None:
                self.answers.put_nowait(self._network.refusal)
                return
            opened = ister_api.Opened(incarnation=self._network.incarnation)
            self.answers.put_nowait(ister_api.ConsumeResponse(opened=opened))
        elif step == "acks":
            self.acks.append(list(request.acks.offsets))
            self.tokens.append(list(request.acks.tokens))
            if self.confirms:
                self.answers.put_nowait(ister_api.ConsumeResponse(acked=request.acks))
        elif step == "received":
            self.received.append(request.received)
        else:
            self.nacks.append(request.nack)

    async def read(self):
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def done_writing(self):
        self.answers.put_nowait(None)

    def cancel(self):
        self.is_ended.set()

    # The broker's side.

    def deliver(self, *offsets, attempt=1, size=10):
        messages = [
            ister_api.Delivered(
                offset=offset, payload=b"x" * size, attempt=attempt, token=1000 + offset
            )
            for offset in offsets
        ]
        self.answers.put_nowait(
            ister_api.ConsumeResponse(deliveries=ister_api.Deliveries(messages=messages))
        )

    def fail(self, error=None):
        self.is_ended.set()
        self.answers.put_nowait(error or UnavailableError("the broker has gone"))

    @property
    def acked(self):
        return [offset for offsets in self.acks for offset in offsets]


class Network:
    timeout = None
    can_renew_token = False

    def __init__(self):
        self.streams = asyncio.Queue()
        self.refusal = None
        self.incarnation = "one"
        self.names = [TOPIC]

    async def locate(self, topic):
        return Route("broker:1")

    async def partitions(self, topic):
        return self.names

    def channel_for_stream(self, address):
        def stream_stream(path, **codecs):
            assert path == "/ister.Delivery/Consume"
            return lambda metadata: Stream(self)

        return SimpleNamespace(stream_stream=stream_stream)

    def stream_ended(self, address):
        pass

    def record_failure(self, route, error):
        pass

    def headers(self, route):
        return ()

    async def answered(self, waiting, address, topic):
        return await waiting


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(retry, "_CLIENT_PAUSES", (0.0, 0.0))


def run(scenario, **options):
    async def all_of_it():
        network = Network()
        settings = {"topic": TOPIC, "subscription": "s", **options}
        core = ConsumerCore(
            network,
            ConsumerOptions(**settings),
            post=lambda wake: asyncio.get_running_loop().call_soon(wake),
        )
        await core.open()
        try:
            await scenario(core, network, await network.streams.get())
        finally:
            await core.close(5)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


async def receive(core):
    while (message := core.try_take()) is None:
        await core.wait_for_message()
    return message


async def take(core, count):
    return [await receive(core) for _ in range(count)]


async def eventually(is_so):
    while not is_so():
        await asyncio.sleep(0.005)


async def nothing_comes(core):
    await asyncio.sleep(0.05)
    assert core.try_take() is None


def test_what_a_broker_is_asked_for():
    async def scenario(core, network, stream):
        opening = stream.opening
        assert (opening.topic, opening.subscription, opening.kind) == (TOPIC, "s", "key_shared")
        assert (opening.start, list(opening.key_filters)) == ("17", ["a*", "b?"])
        assert opening.consumer == core.name == "me"

    run(scenario, name="me", kind="key_shared", start=17, key_filters=["a*", "b?"])


def test_acknowledgements_linger_while_some_are_not_confirmed():
    async def scenario(core, network, stream):
        stream.confirms = False
        stream.deliver(0, 1, 2)
        for message in await take(core, 3):
            core.ack(message)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert stream.acked == [0, 1, 2], "not for ever"
        with pytest.raises(WaitTimeoutError):
            await core.flush(0.05)
        stream.answers.put_nowait(
            ister_api.ConsumeResponse(acked=ister_api.Acks(offsets=[0, 1, 2]))
        )
        await core.flush(5)

    run(scenario)


@pytest.mark.usefixtures("quick")
def test_what_was_not_confirmed_is_said_again_first():
    async def scenario(core, network, stream):
        stream.confirms = False
        stream.deliver(0, 1, 2, 3)
        held = await take(core, 3)
        core.ack(held[0])
        core.ack(held[1])
        await asyncio.sleep(0.05)
        assert stream.acked == [0, 1]
        stream.fail()
        stream = await network.streams.get()
        stream.deliver(0, 1, 2, 3)
        assert (await receive(core)).offset == 3, "the others it has, or had"
        core.ack(held[2])
        await core.flush(5)
        assert stream.acked[:2] == [0, 1]
        assert sorted(stream.acked) == [0, 1, 2]
        await nothing_comes(core)

    run(scenario)


@pytest.mark.usefixtures("quick")
def test_what_was_not_handed_out_comes_by_the_next_stream():
    async def scenario(core, network, stream):
        stream.deliver(0, 1, 2, 3)
        assert (await receive(core)).offset == 0
        stream.fail()
        stream = await network.streams.get()
        await nothing_comes(core)
        stream.deliver(1, 2, 3, 4)
        assert [message.offset for message in await take(core, 4)] == [1, 2, 3, 4]

    run(scenario)


@pytest.mark.usefixtures("quick")
def test_another_attempt_is_handed_out_even_if_the_program_has_the_one_before():
    async def scenario(core, network, stream):
        stream.deliver(0)
        await receive(core)
        stream.deliver(0, attempt=2)
        assert (await receive(core)).attempt == 2
        stream.fail()
        stream = await network.streams.get()
        stream.deliver(0, attempt=3)
        assert (await receive(core)).attempt == 3
        # Only once, and not for what comes again by the same stream, as after a seek.
        stream.deliver(0)
        assert (await receive(core)).attempt == 1

    run(scenario)


@pytest.mark.usefixtures("quick")
def test_a_nack_is_said_once_and_not_if_the_message_comes_again_anyway():
    async def scenario(core, network, stream):
        stream.deliver(0, 1)
        held = await take(core, 2)
        core.nack(held[0], delay=1.5, reason="why")
        await asyncio.sleep(0.05)
        [nack] = stream.nacks
        assert (nack.offset, nack.delay_ms, nack.reason) == (0, 1500, "why")
        stream.fail()
        stream = await network.streams.get()
        core.nack(held[1])
        stream.deliver(1)
        assert (await receive(core)).offset == 1
        assert stream.nacks == []

    run(scenario)


@pytest.mark.usefixtures("quick")
def test_receipts_go_back_with_acknowledgements_by_the_next_stream_too(quick):
    async def scenario(core, network, first):
        first.confirms = False
        first.deliver(0, 1)
        for message in await take(core, 2):
            core.ack(message)
        await eventually(lambda: first.acked == [0, 1])
        first.fail()
        second = await network.streams.get()
        await core.flush(20)
        assert second.acks == [[0, 1]]
        assert second.tokens == [[1000, 1001]]

    run(scenario)


def test_acknowledgements_that_are_refused_are_settled(caplog):
    async def scenario(core, network, stream):
        stream.confirms = False
        stream.deliver(0)
        [message] = await take(core, 1)
        core.ack(message)
        await eventually(lambda: stream.acked == [0])
        refused = ister_api.Acks(offsets=[0])
        stream.answers.put_nowait(ister_api.ConsumeResponse(refused=refused))
        await core.flush(20)
        assert "refused acknowledgements" in caplog.text

    run(scenario)


def test_the_broker_is_told_what_the_program_holds_and_not_what_it_has_acknowledged(quick):
    async def scenario(core, network, stream):
        assert stream.opening.reports_received
        stream.deliver(*range(20))
        for message in await take(core, 3):
            core.ack(message)
        await core.flush(20)
        held = await take(core, 4)
        await eventually(lambda: stream.received == [6])
        core.ack(held[0])
        [message] = await take(core, 1)
        await eventually(lambda: stream.received == [6, 7])
        # What comes again by another stream was received by the one before.
        stream.fail()
        second = await network.streams.get()
        second.deliver(*range(4, 20))
        await eventually(lambda: second.received == [7])
        assert [message.offset for message in await take(core, 1)] == [8]
        core.ack(message)

    run(scenario)


def test_another_topic_of_the_same_name_begins_anew():
    async def scenario(core, network, stream):
        stream.confirms = False
        stream.deliver(0, 1)
        [first, _] = await take(core, 2)
        core.ack(first)
        network.incarnation = "two"
        stream.fail()
        stream = await network.streams.get()
        stream.deliver(0, 1)
        assert [message.offset for message in await take(core, 2)] == [0, 1]
        assert stream.acked == []

    run(scenario)


def test_a_program_that_does_not_take_stops_the_stream():
    async def scenario(core, network, stream):
        for offset in range(20):
            stream.deliver(offset, size=1000)
        await asyncio.sleep(0.05)
        assert 10 <= stream.answers.qsize() < 20
        await take(core, 20)
        assert stream.answers.empty()

    run(scenario, buffer_bytes=5000)


async def test_opening_says_what_is_wrong():
    network = Network()
    options = ConsumerOptions(topic=TOPIC, subscription="s")
    post = asyncio.get_running_loop().call_soon
    network.refusal = InvalidRequestError("no name")
    with pytest.raises(InvalidRequestError):
        await ConsumerCore(network, options, post=post).open()
    network.names = []
    with pytest.raises(NotFoundError):
        await ConsumerCore(network, options, post=post).open()


@pytest.mark.usefixtures("quick")
def test_when_the_time_is_over_the_consumer_fails():
    async def scenario(core, network, stream):
        network.refusal = UnavailableError("nobody is there")
        stream.fail()
        with pytest.raises(UnavailableError):
            await receive(core)

    run(scenario, timeout=0.1)


async def test_all_partitions_are_merged():
    network = Network()
    network.names = [f"{TOPIC}-part-{number}" for number in range(3)]
    core = ConsumerCore(
        network,
        ConsumerOptions(topic=TOPIC, subscription="s"),
        post=asyncio.get_running_loop().call_soon,
    )
    await core.open()
    streams = [await network.streams.get() for _ in range(3)]
    for stream in streams:
        stream.deliver(0, 1)
    found = await take(core, 6)
    assert sorted({message.topic for message in found}) == network.names
    for message in found:
        core.ack(message)
    await core.close(5)
    assert [sorted(stream.acked) for stream in streams] == [[0, 1]] * 3
    with pytest.raises(ClosedError):
        core.try_take()
    with pytest.raises(ClosedError):
        core.ack(found[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "both"},
        {"start": "middle"},
        {"start": -1},
        {"key_filters": "a*"},
        {"buffer_bytes": 0},
        {"timeout": 0},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(InvalidRequestError):
        ConsumerOptions(topic=TOPIC, subscription="s", **wrong)
