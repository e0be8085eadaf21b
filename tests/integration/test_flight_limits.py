"""What strangers can do by Flight's port: send what inflates or is too large, connect and idle."""

import contextlib
import os
import socket
import threading
import time
import urllib.request

import pytest

pytest.importorskip("pyarrow")

import grpc
import pyarrow as pa
from pyarrow import flight

from benchmarks.broker_abuse import gzip_bomb, resident_mib, send_call
from benchmarks.flight_publisher import publishing
from ister import wire
from ister.base.limits import MIB
from ister.client.flight import FlightClient
from ister.errors import InvalidRequestError, MessageTooLargeError
from ister.wire import danube
from ister.wire.contract import Action
from ister.wire.errors import decode_error
from tests.servers.broker import BrokerProcess
from tests.support.danube import connect, run

TOPIC = "/default/orders"
SCHEMA = pa.schema([("payload", pa.binary())])
SERVICE = "/arrow.flight.protocol.FlightService"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
FILES_MAX = 1024


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with BrokerProcess(tmp_path_factory.mktemp("limits"), files_max=FILES_MAX) as broker:
        yield broker


@contextlib.contextmanager
def growth_below(broker, mib):
    """Memory while the block runs, watched."""
    before, is_over, highest = resident_mib(broker.pid), threading.Event(), [0.0]

    def watch():
        while not is_over.wait(0.01):
            highest.append(resident_mib(broker.pid))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()
    assert max(highest) - before < mib


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["DoAction", "DoGet", "DoPut", "Handshake", "ListActions"])
def test_bodies_that_inflate_cost_nothing(broker, method):
    """Goal: four calls at once, of 256 MiB each when they are inflated, that nobody vouches for."""
    bomb = gzip_bomb(256 * MIB)
    with growth_below(broker, 100):
        calls = [
            threading.Thread(
                target=send_call, args=(address, f"{SERVICE}/{method}", bomb), daemon=True
            )
            for address in (broker.flight, broker.address)
            for _ in range(2)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join(60)
            assert not call.is_alive()


def test_messages_over_the_limits_are_refused(broker):
    """A batch of rows may be larger than other requests; both have their limit."""
    rows = pa.record_batch([pa.array([bytes(9 * MIB)] * 3, pa.binary())], schema=SCHEMA)
    with FlightClient(broker.flight) as client:
        with publishing(client, TOPIC, SCHEMA, producer="p", create=True) as publisher:
            publisher.write(rows)
            publisher.flush()
        too_large = pa.record_batch([pa.array([bytes(9 * MIB)] * 5, pa.binary())], schema=SCHEMA)
        publisher = publishing(client, TOPIC, SCHEMA, producer="q")
        publisher.write(too_large)
        with pytest.raises(MessageTooLargeError):
            publisher.close()
    with flight.connect(f"grpc://{broker.flight}") as raw:
        with pytest.raises(flight.FlightServerError) as caught:
            list(raw.do_action(flight.Action(Action.WATERMARKS, bytes(20 * MIB))))
        assert isinstance(decode_error(str(caught.value)), InvalidRequestError)

    async def send():
        async with grpc.aio.insecure_channel(
            broker.flight, options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            lookup = wire.stub(channel, "danube.Discovery").TopicLookup
            request = danube.TopicLookupRequest(topic="/default/" + "x" * (13 * MIB))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await lookup(request, timeout=30)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(send())


def open_files(broker):

    return len(os.listdir(f"/proc/{broker.pid}/fd"))


@pytest.mark.parametrize("first", [b"", PREFACE], ids=["silent", "greeting"])
def test_idle_connections_leave_room_for_others(broker, first):
    """Goal: 1,100 connections, more than there are descriptors; topics and clients have theirs."""
    opened = []
    try:
        for _ in range(1100):
            with contextlib.suppress(OSError):
                one = socket.create_connection(_place(broker.flight), timeout=60)
                opened.append(one)
                one.sendall(first)
        deadline = time.monotonic() + 60
        while open_files(broker) > 0.8 * FILES_MAX and time.monotonic() < deadline:
            time.sleep(0.05)
        assert open_files(broker) <= 0.8 * FILES_MAX
        with urllib.request.urlopen(f"http://{broker.http}/ready", timeout=60) as answer:
            assert answer.status == 200

        async def publish():
            async with connect(broker, own_connection=True) as session:
                for number in range(20):
                    producer = await session.producer(f"/default/room-{len(first)}-{number}")
                    await producer.send(b"x")

        run(publish())
    finally:
        for one in opened:
            one.close()


def _place(address):
    host, _, port = address.rpartition(":")
    return host, int(port)
