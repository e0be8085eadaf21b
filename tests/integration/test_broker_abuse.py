"""What clients must not do, done to a real broker, with others looking on.

Every storm has two witnesses. A bystander (`support.bystander`), a client in a process of its
own, is served all the time: no call of it fails, and none takes longer than a few seconds. And the
broker's memory, read from the kernel while the storm lasts, stays below a bound.

The bounds. A broker of these tests has some 150 MiB when nobody does anything. `QUIET_MIB` more is
for storms that leave nothing behind but garbage, which Python and the allocator give back late.
Storms of large messages have their own bound, which says what may be in memory at once.

What clients are told is looked at too: a refusal has a status that is not INTERNAL, and a text.

When all of it is over the broker ends within its ten seconds, with 0, and the next one has every
message that was acknowledged.
"""

import asyncio
import json
import os
import random
import socket
import sqlite3
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

pytest.importorskip("pyarrow")

from pyarrow import flight

from ister import wire
from ister.wire import danube, danube_admin, ister_api
from ister.wire.contract import RangeTicket
from tests.servers.broker import BrokerProcess
from tests.support.bystander import Bystander
from tests.support.danube import connect, eventually, run
from tests.support.scale import scaled

MORE = scaled(1, 5)
KIB, MIB = 1024, 1024 * 1024
U64 = 2**64 - 1
PATIENCE_SECONDS = scaled(60.0, 8.0)
"""How long a round of the bystander may take, four calls and a connection, on a busy machine."""
QUIET_MIB = 160
"""What a storm without large messages may add to the broker's memory."""

MESSAGE_MAX = 10 * MIB
CONNECTIONS_MAX = 400
TOPICS_MAX = 40

SETTINGS = {
    "broker": {
        "limits": {
            "max_connections": CONNECTIONS_MAX,
            "max_topics": TOPICS_MAX,
            # More than a message may have, so that the smaller bound is met first.
            "max_grpc_message_bytes": MESSAGE_MAX + MIB,
        }
    },
    "storage": {"max_message_size": MESSAGE_MAX},
}


# -- the broker and its witnesses -------------------------------------------------------------


class Abused(BrokerProcess):
    """A broker, its bystander, and what was acknowledged to anybody."""

    bystander: Bystander

    def __init__(self, directory, engine):
        super().__init__(directory, settings=SETTINGS, engine=engine)
        self.engine = engine
        self.acknowledged = defaultdict(list)

    @property
    def rss_mib(self):
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096 / MIB

    @property
    def files(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def place(self, port="grpc"):
        address = {"grpc": self.address, "flight": self.flight, "http": self.http}[port]
        host, _, number = address.rpartition(":")
        return host, int(number)


@pytest.fixture(scope="module")
def broker(tmp_path_factory, engine):
    with Abused(tmp_path_factory.mktemp("abused"), engine) as abused:
        abused.bystander = Bystander(abused)
        try:
            abused.bystander.wait(0.0, count=3)
            yield abused
        finally:
            abused.bystander.close()


class Storm:
    """A storm, judged when it is over: the bystander was served, memory stayed below the bound."""

    def __init__(self, broker, *, mib=QUIET_MIB):
        self.broker, self.mib = broker, mib
        self.is_over = threading.Event()
        self.watching = threading.Thread(target=self._watch, name="rss-watch")

    def _watch(self):
        while not self.is_over.wait(0.02):
            self.highest = max(self.highest, self.broker.rss_mib)

    def __enter__(self):
        self.began, self.before = time.monotonic(), self.broker.rss_mib
        self.highest = self.before
        self.watching.start()

    def __exit__(self, failed, *_):
        try:
            if failed is None:
                # One round at least that saw all of it, and one after it.
                self.broker.bystander.wait(time.monotonic())
        finally:
            self.is_over.set()
            self.watching.join()
        if failed is not None:
            return
        rounds = self.broker.bystander.rounds(self.began, time.monotonic())
        assert [one.error for one in rounds if one.error] == []
        slowest = max(one.took for one in rounds)
        assert slowest < PATIENCE_SECONDS, f"a round of the bystander took {slowest:.1f} s"
        grown = f"{self.before:.0f} MiB grew to {self.highest:.0f}, more than {self.mib}"
        assert self.highest - self.before < self.mib, grown

    async def __aenter__(self):
        self.__enter__()

    async def __aexit__(self, *how):
        await asyncio.to_thread(self.__exit__, *how)


@pytest.fixture
def session(broker):
    """A client with a connection of its own."""
    return connect(broker, own_connection=True)


async def outcome(call):
    """A call's status, and what was said."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()
    return "OK", ""


async def outcomes(calls):
    """How often each status came; a refusal without a word fails, and so does a fault of ours."""
    counts = Counter()
    for status, text in await asyncio.gather(*(outcome(call) for call in calls)):
        assert status == "OK" or text, f"{status} without a word why"
        assert status not in ("INTERNAL", "UNKNOWN"), text
        counts[status] += 1
    return counts


def own_channel(broker, **options):
    """A connection that is shared with nobody."""
    return grpc.aio.insecure_channel(
        broker.address, options=[("grpc.use_local_subchannel_pool", 1), *options.items()]
    )


async def register(session, topic, name="attacker", *, reliable=True):
    """A producer's id."""
    answer = await session.raw_producers.CreateProducer(
        danube.ProducerRequest(
            request_id=1, producer_name=name, topic_name=topic, dispatch_strategy=int(reliable)
        )
    )
    return answer.producer_id


def message(topic, producer, payload=b"x", *, name="attacker", **fields):
    return danube.StreamMessage(
        request_id=1,
        msg_id=danube.MsgID(topic_name=topic, producer_id=producer),
        payload=payload,
        producer_name=name,
        **fields,
    )


def subscribe_request(topic, subscription="sub", name="attacker", kind=0, filters=()):
    return danube.ConsumerRequest(
        request_id=1,
        topic_name=topic,
        subscription=subscription,
        consumer_name=name,
        subscription_type=kind,
        key_filters=filters,
    )


# -- HTTP/2 by hand ---------------------------------------------------------------------------

HEADERS, RST_STREAM, SETTINGS_FRAME, CONTINUATION = 1, 3, 4, 9
END_HEADERS = 4


def frame(kind, flags, stream, body=b""):
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS_FRAME, 0, 0)


def literal(name, value):
    """A header as HPACK has it, without any compression."""

    def text(value):
        assert len(value) < 127, "longer ones have another form"
        return bytes([len(value)]) + value.encode()

    return b"\0" + text(name) + text(value)


def headers(path):
    return b"".join(
        literal(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "x"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
    )


@contextmanager
def connections(broker, count, first=b"", port="grpc"):
    """So many connections, each of which says one thing and no more."""
    opened = []
    try:
        for _ in range(count):
            one = socket.create_connection(broker.place(port), timeout=60)
            opened.append(one)
            if first:
                one.sendall(first)
        yield opened
    finally:
        for one in opened:
            one.close()


def is_closed(one):
    """Whether the other side has ended a connection, whatever it said before."""
    one.setblocking(False)
    try:
        while one.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def watch_rounds(broker, count=5):
    """Has the bystander look at it for a while."""
    broker.bystander.wait(time.monotonic(), count=count)


# -- floods of connections --------------------------------------------------------------------


@pytest.mark.nightly
def test_connections_that_say_nothing(broker):
    """500 to gRPC, 100 to Flight, 200 to HTTP; those of gRPC are ended after ten seconds.

    So is a stream on a good connection that nobody ever opens.
    """

    async def wait():
        channel = own_channel(broker)
        stream = wire.stub(channel, "ister.Delivery").Consume()
        status, text = await outcome(stream.read())
        assert (status, "within 10 s" in text) == ("INVALID_ARGUMENT", True)
        await channel.close()

    with (
        Storm(broker),
        connections(broker, 500) as silent,
        connections(broker, 100, port="flight"),
        connections(broker, 200, port="http"),
    ):
        run(wait())
        deadline = time.monotonic() + 60
        while not all(map(is_closed, silent)):
            assert time.monotonic() < deadline, "silent connections stay open"
            time.sleep(0.5)
    run(eventually(lambda: broker.files < 100))


def test_more_connections_than_there_may_be_take_no_more_files(broker):
    """Twice `max_connections` is what gRPC takes; the rest is ended at once, and costs nothing."""
    with Storm(broker), connections(broker, 2 * CONNECTIONS_MAX + 300, PREFACE):
        watch_rounds(broker)
        run(eventually(lambda: broker.files < 2 * CONNECTIONS_MAX + 150))
    run(eventually(lambda: broker.files < 100))


def test_connections_that_open_http2_and_stall(broker):
    """300 of them: with a preface, with calls that never get a body, with part of a body."""
    begun = PREFACE + b"".join(
        frame(HEADERS, END_HEADERS, 1 + 2 * number, headers("/ister.Admin/Info"))
        for number in range(5)
    )
    # The message is announced with 9 MiB, and 60 KiB of it come.
    part = struct.pack(">BI", 0, 9 * MIB) + bytes(15 * 1024)
    partial = (
        PREFACE
        + frame(HEADERS, END_HEADERS, 1, headers("/danube.ProducerService/SendMessage"))
        + frame(0, 0, 1, part)
    )
    with (
        Storm(broker),
        connections(broker, 100, PREFACE),
        connections(broker, 100, begun),
        connections(broker, 100, partial),
    ):
        watch_rounds(broker, count=10)


def test_calls_that_are_reset_at_once(broker):
    """Thousands of calls, each taken back in the same breath: the "rapid reset" of HTTP/2."""
    asked = headers("/ister.Admin/Info")
    with Storm(broker), connections(broker, 2, PREFACE) as attackers:
        stream = 1
        for _ in range(100 * MORE):
            burst = b"".join(
                frame(HEADERS, END_HEADERS, stream + 2 * number, asked)
                + frame(RST_STREAM, 0, stream + 2 * number, struct.pack(">I", 8))
                for number in range(100)
            )
            stream += 200
            for one in attackers:
                with suppress(OSError):  # it may have been shown the door
                    one.settimeout(60)
                    one.sendall(burst)
                is_closed(one)
        watch_rounds(broker)


def test_headers_without_end(broker):
    """CONTINUATION after CONTINUATION: the connection ends long before memory does."""
    more = frame(CONTINUATION, 0, 1, literal("x-padding", "y" * 100) * 140)
    with Storm(broker), connections(broker, 20, PREFACE) as attackers:
        for one in attackers:
            one.settimeout(60)
            with suppress(OSError):
                one.sendall(frame(HEADERS, 0, 1, headers("/ister.Admin/Info")))
                for _ in range(200):
                    one.sendall(more)
        watch_rounds(broker)
        run(eventually(lambda: all(map(is_closed, attackers))))


# -- floods of calls --------------------------------------------------------------------------


@pytest.mark.nightly
async def test_thousands_of_calls_at_once(broker):
    """Whatever is too much is refused with a word, not cancelled."""

    async with Storm(broker):
        channels = [own_channel(broker) for _ in range(4)]
        stubs = [wire.stub(channel, "ister.Admin") for channel in channels]
        for stub in stubs:  # from here on they know how many calls a connection may have
            await stub.Info(ister_api.InfoRequest())
        counts = await outcomes(
            stubs[number % 4].Info(ister_api.InfoRequest()) for number in range(6000 * MORE)
        )
        # UNAVAILABLE is HTTP/2's refusal of a stream, of which nothing was done: to be tried again.
        assert set(counts) <= {"OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
        assert counts["OK"] >= 1000
        for channel in channels:
            await channel.close()


async def test_ever_new_consumers_with_long_filters(session, broker):
    """64 filters of 250 characters each: a subscription's record has a bound, the oldest go."""
    topic = "/default/long-filters"
    async with Storm(broker, mib=250):
        await session.create_topic(topic)
        for number in range(100):
            filters = [f"{one:02}{'*a' * 120}{number:05}" for one in range(64)]
            request = subscribe_request(topic, "keys", f"consumer {number}", 3, filters)
            assert await outcome(session.raw_consumers.Subscribe(request)) == ("OK", "")
        with closing(sqlite3.connect(broker.data / "metadata.db")) as store:
            asked = "SELECT max(length(value)) FROM entries WHERE instr(key, ?)"
            [[largest]] = store.execute(asked, (b"/long-filters/keys/",))
        assert 100 * KIB < largest < 300 * KIB, "1.6 MiB were told"
        await session.topics.DeleteTopic(danube_admin.TopicRequest(name=topic))


async def test_more_streams_than_there_may_be(broker):
    """Streams that were never opened count as well; places are free again when they end."""

    async with Storm(broker):
        channel = own_channel(broker)
        delivery = wire.stub(channel, "ister.Delivery")
        consumers = wire.stub(channel, "danube.ConsumerService")
        streams = [delivery.Consume() for _ in range(CONNECTIONS_MAX + 20)]
        told = Counter()

        async def listen(stream):
            try:
                await stream.read()
            except grpc.aio.AioRpcError as error:
                told[error.code().name, error.details()] += 1

        listening = [asyncio.create_task(listen(stream)) for stream in streams]
        await eventually(lambda: told.total() >= 20)
        [(status, text)] = told
        assert status == "RESOURCE_EXHAUSTED"
        assert "max_connections" in text
        # The same places as those of Danube's consumers, who are told a bit later.
        answer = consumers.ReceiveMessages(danube.ReceiveRequest(request_id=1, consumer_id=1))
        status, text = await outcome(answer.read())
        assert (status, "max_connections" in text) == ("RESOURCE_EXHAUSTED", True)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*listening, return_exceptions=True)

        async def is_free():
            answer = consumers.ReceiveMessages(danube.ReceiveRequest(request_id=1, consumer_id=1))
            return (await outcome(answer.read()))[0] == "UNAVAILABLE"  # there is no such consumer

        await eventually(is_free)
        await channel.close()


async def test_streams_that_are_opened_and_cancelled(session, broker):
    """A thousand times: no consumer stays, and nothing of them either."""
    topic = "/default/cancelled"

    async with Storm(broker):
        await session.send(topic, ["a message to be sent each time"])
        await session.raw_consumers.Subscribe(subscribe_request(topic, kind=1))
        await session.seek(topic, earliest=True)
        answer = await session.raw_consumers.Subscribe(subscribe_request(topic, kind=1))
        request = danube.ReceiveRequest(request_id=1, consumer_id=answer.consumer_id)

        async def cycle(number):
            stream = session.raw_consumers.ReceiveMessages(request)
            if number % 3 == 1:
                await asyncio.sleep(0.001)
            elif number % 3 == 2:
                with suppress(grpc.aio.AioRpcError, TimeoutError):
                    await asyncio.wait_for(stream.read(), 2)
            stream.cancel()

        for batch in range(10 * MORE):
            await asyncio.gather(*(cycle(number) for number in range(100)))
            if batch == 0:
                before = broker.rss_mib

        async def is_empty():
            return not (await session.describe(topic)).consumers

        await eventually(is_empty)
        assert broker.rss_mib - before < 40, "memory grows with every stream"


# -- requests that are too large, or none at all ----------------------------------------------


def test_messages_that_are_just_not_too_large(broker):
    """The largest payload, ten thousand attributes, numbers at their ends: taken, and given out."""
    topic = "/default/large"
    sent = [
        {"payload": b"x" * MESSAGE_MAX},
        {"attributes": {f"attribute {number}": str(number) for number in range(10_000)}},
        {"publish_time": U64, "schema_id": U64, "schema_version": 2**32 - 1},
        {"payload": b"", "routing_key": "\0\n\U0001f600", "attributes": {"": "", "\0": "\n"}},
    ]

    async def scenario():
        async with connect(broker, own_connection=True) as session:
            producer = await register(session, topic)
            for fields in sent:
                request = message(topic, producer, **fields)
                assert await outcome(session.raw_producers.SendMessage(request)) == ("OK", "")
                broker.acknowledged[topic].append(request.payload)
            found = await session.admin.DescribeTopic(ister_api.TopicName(topic=topic))
        assert await consumed(broker, topic, len(sent)) == broker.acknowledged[topic]
        return found.incarnation

    # The largest is there as it came, as it was read, and as gRPC and Flight send it, each of
    # which may make a copy.
    with Storm(broker, mib=350):
        incarnation = run(scenario())
        reader = flight.connect(f"grpc://{broker.flight}")
        asked = RangeTicket(topic=topic, incarnation=incarnation, start=0, end=len(sent))
        with reader:
            table = reader.do_get(flight.Ticket(asked.to_json())).read_all()
        assert table.column("payload").to_pylist() == broker.acknowledged[topic]


async def consumed(broker, topic, count, subscription="reader"):
    """The first messages of a topic, by Ister's own stream."""
    options = {"grpc.max_receive_message_length": 64 * MIB}
    channel = own_channel(broker, **options)
    stream = wire.stub(channel, "ister.Delivery").Consume()
    await stream.write(
        ister_api.ConsumeRequest(
            open=ister_api.OpenConsumer(
                topic=topic, subscription=subscription, consumer="reader", start="earliest"
            )
        )
    )
    payloads = []
    async with asyncio.timeout(60):
        while len(payloads) < count:
            answer = await stream.read()
            assert answer is not grpc.aio.EOF
            found = answer.deliveries.messages
            payloads += [one.payload for one in found]
            if found:
                acks = ister_api.Acks(offsets=[one.offset for one in found])
                await stream.write(ister_api.ConsumeRequest(acks=acks))
    stream.cancel()
    await channel.close()
    return payloads


# -- Ister's own stream -----------------------------------------------------------------------


async def test_streams_that_break_the_rules(session, broker):
    topic = "/default/rules"

    def opening(**fields):
        wanted = {"topic": topic, "subscription": "s", "consumer": "c", **fields}
        return ister_api.ConsumeRequest(open=ister_api.OpenConsumer(**wanted))

    def acks(*offsets):
        return ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=offsets))

    nack = ister_api.ConsumeRequest(nack=ister_api.Nack(offset=U64, delay_ms=U64))
    broken = {
        "acknowledgements first": [acks(1)],
        "a nack first": [nack],
        "nothing": [ister_api.ConsumeRequest()],
        "opened twice": [opening(), opening()],
        "10,001 acknowledgements": [opening(), acks(*range(10_001))],
        "an empty step": [opening(), ister_api.ConsumeRequest()],
        "no kind": [opening(kind="none of them")],
        "no start": [opening(start="-5")],
        "a start beyond": [opening(subscription="new", start="9" * 30)],
        "no name": [opening(subscription="../x")],
        "no topic": [opening(topic="/default/nobody-at-all")],
    }

    async with Storm(broker):
        await session.create_topic(topic)
        consume = wire.stub(session.channel, "ister.Delivery").Consume
        for what, requests in broken.items():
            stream = consume()
            status, text = "OK", ""
            try:
                for request in requests:
                    await stream.write(request)
                async with asyncio.timeout(60):
                    while await stream.read() is not grpc.aio.EOF:
                        pass
            except grpc.aio.AioRpcError as error:
                status, text = error.code().name, error.details()
            except asyncio.InvalidStateError:  # ended while we wrote
                status, text = (await stream.code()).name, await stream.details()
            assert status in ("INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND"), (what, status)
            assert text

        async def is_free():
            return not (await session.describe(topic, "s")).consumers

        await eventually(is_free)


@pytest.mark.nightly
async def test_endless_acknowledgements_of_a_client_that_does_not_read(session, broker):
    """Confirmations do not pile up: after some, the broker stops reading from it."""
    topic = "/default/endless"

    async with Storm(broker, mib=80):
        await session.create_topic(topic)
        stream = wire.stub(session.channel, "ister.Delivery").Consume()
        opened = ister_api.OpenConsumer(topic=topic, subscription="s", consumer="c")
        await stream.write(ister_api.ConsumeRequest(open=opened))
        nonsense = ister_api.ConsumeRequest(acks=ister_api.Acks(offsets=range(2**62, 2**62 + 9000)))
        sent, is_stuck = 0, False
        try:
            async with asyncio.timeout(3):
                while sent < 2000 * MORE:
                    await stream.write(nonsense)
                    sent += 1
        except TimeoutError:
            is_stuck = True
        assert is_stuck, "all of it was taken"
        assert (await session.describe(topic, "s")).cursor == 0
        stream.cancel()


# -- Flight and HTTP --------------------------------------------------------------------------


def test_http_requests_that_are_none(broker):
    def answer(request):
        with socket.create_connection(broker.place("http"), timeout=60) as one:
            with suppress(OSError):
                one.sendall(request)
            found = b""
            with suppress(OSError):
                while chunk := one.recv(65536):
                    found += chunk
            return found

    def status(request):
        return answer(request).split(b"\r\n")[0]

    close = b"Host: x\r\nConnection: close\r\n"
    with Storm(broker, mib=80):
        for path in (
            b"/nothing",
            b"/metrics/../../etc/passwd",
            b"/static/../../etc/passwd",
            b"/static/%2e%2e/pages.py",
            b"/" + b"x" * 4000,
        ):
            assert b" 404 " in status(b"GET " + path + b" HTTP/1.1\r\n" + close + b"\r\n")
        # By a name that is not this machine's, nothing is told.
        for path in (b"/api/overview", b"/api/topics/default/t/messages", b"/api/" + b"x" * 4000):
            assert b" 403 " in status(b"GET " + path + b" HTTP/1.1\r\n" + close + b"\r\n")
        for method in (b"POST", b"PUT", b"DELETE", b"PATCH"):
            assert b" 405 " in status(method + b" /health HTTP/1.1\r\n" + close + b"\r\n")
        for request in (
            b"GET /ready HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GARBAGE\r\n\r\n",
            random.Random(7).randbytes(5000) + b"\r\n\r\n",
            b"GET /ready HTTP/9.9\r\n\r\n",
            b"GET /ready HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET /ready HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            b"GET /ready HTTP/1.1\r\nX\nFORGED: 1\r\n\r\n",
        ):
            assert b" 400 " in status(request), request[:60]
        endless = b"".join(b"X-%d: y\r\n" % number for number in range(200_000))
        found = answer(b"GET /ready HTTP/1.1\r\n" + endless + close + b"\r\n")
        assert found[9:12] in (b"", b"400", b"431", b"200")
        body = b"POST /health HTTP/1.1\r\nContent-Length: 999999999\r\n" + close + b"\r\n"
        with socket.create_connection(broker.place("http"), timeout=60) as one:
            one.sendall(body)
            assert b" 405 " in one.recv(20)
            with suppress(OSError):
                for _ in range(32):
                    one.sendall(bytes(MIB))


@pytest.mark.nightly
def test_http_connections_that_take_their_time(broker):
    """Slow loris: 600 of them, a byte now and then. The oldest go; whoever asks is answered."""
    with Storm(broker, mib=80), connections(broker, 600, b"GET /re", port="http") as slow:
        for _ in range(3):
            for one in slow:
                with suppress(OSError):
                    one.send(b"x")
            with urllib.request.urlopen(f"http://{broker.http}/health", timeout=60) as answer:
                assert json.load(answer)["ready"]
            time.sleep(0.3)
        assert sum(map(is_closed, slow)) >= 300, "there is no bound"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{broker.http}/re", timeout=60)


# -- when it is over --------------------------------------------------------------------------


async def test_every_line_of_the_log_is_one_of_its_own(session, broker):
    """What clients said is inside of JSON, never a line; and nothing of it was a fault of ours."""
    names = ["\nFORGED", '"\nFORGED {"level":"ERROR"}', "\r\nFORGED", "\x1b[31mFORGED"]

    async with Storm(broker):
        for name in names:
            await outcome(register(session, f"/default/{name}"))
            await outcome(register(session, "/default/names", name))
            await outcome(register(session, "/default/names", f"p{name}"))
            producer = await register(session, "/default/names", f"p{names.index(name)}")
            sender = f"p{names.index(name)}"
            sent = message("/default/names", producer, name=sender, routing_key=name)
            assert await outcome(session.raw_producers.SendMessage(sent)) == ("OK", "")
            await outcome(session.raw_consumers.Subscribe(subscribe_request(name, name, name)))
    lines = broker.log.splitlines()
    for line in lines:
        assert "FORGED" not in line or line.startswith("{"), line
        # gRPC's own library writes lines of its own, which begin with the level and the date.
        assert line.startswith("{") or (line[:1] in "IWEF" and ".cc:" in line), line
        if line.startswith("{"):
            assert isinstance(json.loads(line), dict)
    assert [line for line in lines if "a call failed" in line] == []
    assert len(broker.log) < 2 * MIB, "anybody can fill the log"


@pytest.mark.nightly
def test_the_broker_ends_in_time_and_has_everything(broker):
    """The last test: SIGTERM under a storm, exit code 0, and a fresh start with every message."""
    broker.bystander.close()
    sent = broker.bystander.sent
    with (
        connections(broker, 100),
        connections(broker, 100, PREFACE),
        connections(broker, 50, port="flight"),
        connections(broker, 50, b"GET /re", port="http"),
    ):
        broker.stop()
    broker.start()

    async def look():
        assert sent > 0
        rounds = await consumed(broker, "/default/bystander", sent, subscription="afterwards")
        assert len(set(rounds)) == len(rounds) == sent
        for topic, payloads in broker.acknowledged.items():
            found = await consumed(broker, topic, len(payloads), subscription="afterwards")
            assert Counter(payloads) - Counter(found) == Counter(), topic

    run(look())
