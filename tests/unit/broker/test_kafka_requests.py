"""Kafka's port under requests of every kind: offered ones, others, and bytes that are none."""

import asyncio
import contextlib
import random
import struct
from datetime import timedelta
from pathlib import Path

import pytest

from ister.base import threads
from ister.broker.kafka import server
from ister.broker.kafka.protocol import VERSIONS, ApiKey, MalformedError, Request
from tests.support.broker import a_broker, eventually
from tests.support.kafka import frame, raw
from tests.support.scale import scaled
from tests.support.security import auth_settings

QUICK = {
    "max_wait": timedelta(0),
    "coordinator_keys": ("g",),
    "groups_names": ("g",),
    "acks": -1,
    "transactional_id": None,
}
LOGIN = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)


@pytest.fixture
def failures(monkeypatch):
    """Exceptions of the broker that are defects."""
    found = []
    monkeypatch.setattr(threads, "record", lambda *args, **_: found.append(args))
    return found


async def test_every_offered_version_of_every_api_is_served(tmp_path, failures):
    async with a_broker(tmp_path) as (_, _, listening):
        async with raw(listening) as client:
            offered = await client.ask(ApiKey.API_VERSIONS, 4)
        found = {one.api_key: (one.min_version, one.max_version) for one in offered.api_keys}
        assert found == {key.value: versions for key, versions in VERSIONS.items()}
        for key, (oldest, newest) in VERSIONS.items():
            for version in range(oldest, newest + 1):
                async with raw(listening) as client:
                    await client.ask(key, version, **QUICK)
                    # And with topics and groups that exist by now.
                    await client.ask(key, version, **QUICK)
    assert failures == []


async def test_an_unknown_version_of_api_versions_is_answered_with_version_0(tmp_path):
    async with a_broker(tmp_path) as (_, _, listening), raw(listening) as client:
        client.writer.write(struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 99, 5, -1))
        answer = await client.answer(ApiKey.API_VERSIONS, 0, 5)
        assert answer.error_code == 35
        assert len(answer.api_keys) == len(VERSIONS)
        assert (await client.ask(ApiKey.API_VERSIONS, 0)).error_code == 0


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", 3) + b"abc",
        struct.pack(">ihhih", 10, 24, 0, 1, -1),  # transactions
        struct.pack(">ihhih", 10, 3, 99, 1, -1),
        struct.pack(">ihhih", 10, 3, 12, 1, 2000),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_request_ends_its_connection_alone(tmp_path, failures, data):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as other:
        async with raw(listening) as client:
            client.writer.write(data)
            assert await client.receive() is None
        assert (await other.ask(ApiKey.METADATA, 12, topics=None)).topics == ()
        await eventually(lambda: broker._kafka.port.connections == 1)
        assert broker._kafka.port.malformed == 1
        assert broker._kafka.port.memory.used == 0
    assert failures == []


async def test_answers_come_in_the_order_of_requests(tmp_path):
    async with a_broker(tmp_path) as (_, _, listening), raw(listening) as client:
        for number in range(200):
            key = (ApiKey.METADATA, ApiKey.API_VERSIONS, ApiKey.FIND_COORDINATOR)[number % 3]
            client.writer.write(frame(key, 2, number, **QUICK, topics=None))
        for number in range(200):
            data = await client.receive()
            assert struct.unpack_from(">i", data)[0] == number


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A request with a few bytes changed, cut, or repeated; its size says what there is."""
    body = bytearray(data[4:])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(8, len(body)) if len(body) > 8 else len(body) - 1
        choice = rng.randrange(5)
        if choice == 0:
            body[at] = rng.randrange(256)
        elif choice == 1:
            body[at : at + 4] = rng.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff" * 9))
        elif choice == 2:
            del body[at:]
        elif choice == 3:
            body[at:at] = body[at : at + rng.randint(1, 20)]
        else:
            body[at] ^= 1 << rng.randrange(8)
    return bytes(body)


@pytest.mark.parametrize("key", VERSIONS)
def test_mutated_requests_are_read_or_refused(key):
    rng = random.Random(key.value)
    oldest, newest = VERSIONS[key]
    frames = [frame(key, version, **QUICK) for version in range(oldest, newest + 1)]
    before = peak_bytes()
    for _ in range(scaled(500, 100_000)):
        with contextlib.suppress(MalformedError):
            Request(mutated(rng, rng.choice(frames)))
    # No length field alone allocates what it says.
    assert peak_bytes() - before < 256 << 20


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel says nothing about memory")


async def test_mutated_requests_leave_the_broker_serving(tmp_path, failures):
    rng = random.Random(7)
    frames = [
        frame(key, version, **QUICK)
        for key, versions in VERSIONS.items()
        if key not in LOGIN
        for version in versions
    ]
    async with a_broker(tmp_path) as (broker, _, listening):
        for _ in range(scaled(150, 20_000)):
            async with raw(listening) as client:
                body = mutated(rng, rng.choice(frames))
                client.writer.write(struct.pack(">i", len(body)) + body)
                # An answer, the end of the connection, or a request that may wait.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await client.receive()
        async with raw(listening) as client:
            assert (await client.ask(ApiKey.API_VERSIONS, 3)).error_code == 0
        await eventually(lambda: broker._kafka.port.connections == 0)
        await eventually(lambda: broker._kafka.port.memory.used == 0)
    assert failures == []


# -- limits ---------------------------------------------------------------------------------------


async def test_one_connection_too_many_is_closed(tmp_path):
    settings = {"broker": {"kafka": {"max_connections": 2}}}
    async with (
        a_broker(tmp_path, settings) as (broker, _, listening),
        raw(listening) as one,
        raw(listening) as two,
    ):
        assert (await one.ask(ApiKey.API_VERSIONS, 0)).error_code == 0
        assert (await two.ask(ApiKey.API_VERSIONS, 0)).error_code == 0
        async with raw(listening) as three:
            assert await three.receive() is None
        assert broker._kafka.port.refused == 1
        one.writer.transport.abort()
        await eventually(lambda: broker._kafka.port.connections == 1)
        async with raw(listening) as three:
            assert (await three.ask(ApiKey.API_VERSIONS, 0)).error_code == 0


async def test_idle_connections_and_half_requests_end(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_STALL_SECONDS", 1.0)
    settings = {"broker": {"kafka": {"idle_seconds": 2}}}
    async with (
        a_broker(tmp_path, settings) as (broker, _, listening),
        raw(listening) as idle,
        raw(listening) as slow,
    ):
        slow.writer.write(struct.pack(">i", 1000) + b"x" * 500)
        await eventually(lambda: broker._kafka.port.memory.used == 504)
        assert await slow.receive() is None
        assert await idle.receive() is None
        await eventually(lambda: broker._kafka.port.memory.used == 0)


async def test_a_large_size_is_believed_only_as_its_bytes_come(tmp_path):
    async with (
        a_broker(tmp_path) as (broker, _, listening),
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(50):
            client = await stack.enter_async_context(raw(listening))
            client.writer.write(struct.pack(">i", 60 << 20) + b"x")
        await eventually(lambda: broker._kafka.port.memory.used == 50 * 5)


async def test_too_much_in_flight_is_read_one_after_the_other(tmp_path):
    settings = {"broker": {"kafka": {"max_bytes_in_flight": 1 << 20, "max_request_bytes": 8 << 20}}}
    big = frame(
        ApiKey.PRODUCE, 9, transactional_id=None, acks=-1, records=b"x" * (4 << 20), index=0
    )
    async with a_broker(tmp_path, settings) as (broker, _, listening):
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(raw(listening)) for _ in range(4)]
            for client in clients:
                client.writer.write(big)
            for client in clients:
                answer = await client.answer(ApiKey.PRODUCE, 9, 1)
                [topic] = answer.responses
                assert topic.partition_responses[0].error_code == 2
        await eventually(lambda: broker._kafka.port.memory.used == 0)


# -- before authentication ------------------------------------------------------------------------


async def test_nothing_is_answered_before_authentication_but_how_to(tmp_path, failures):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    async with a_broker(tmp_path, settings) as (_, _, listening):
        for key, (_, newest) in VERSIONS.items():
            async with raw(listening) as client:
                if key in (ApiKey.API_VERSIONS, *LOGIN):
                    await client.ask(key, newest)
                    continue
                client.writer.write(frame(key, newest, **QUICK))
                assert await client.receive() is None
        async with raw(listening) as client:
            client.writer.write(struct.pack(">i", 65 << 10))
            assert await client.receive() is None
    assert failures == []


async def test_a_client_that_does_not_read_its_answers_is_cut_off_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_STALL_SECONDS", 2.0)
    async with (
        a_broker(tmp_path) as (broker, _, listening),
        raw(listening) as client,
        raw(listening) as other,
    ):
        await broker.topics.create_partitioned("/default/t", 1, is_reliable=True)
        topic = await broker.topics.get("/default/t-part-0")
        for _ in range(4):
            topic.topic.append(bytes(4 << 20))
        await topic.topic.aio.wait(3)
        client.writer.transport.pause_reading()
        asked = {"topic": "t", "partition": 0, "fetch_offset": 0, "session_id": 0, "min_bytes": 1}
        sizes = {"max_bytes": 1 << 30, "partition_max_bytes": 1 << 30}
        for number in range(50):
            client.writer.write(frame(ApiKey.FETCH, 11, number, **QUICK, **asked, **sizes))
        await eventually(lambda: broker._kafka.port.memory.used > 1 << 20)
        # It is not asked for more than one answer at a time.
        assert broker._kafka.port.memory.used < 64 << 20
        assert (await other.ask(ApiKey.API_VERSIONS, 3)).error_code == 0
        await eventually(lambda: broker._kafka.port.connections == 1)
        await eventually(lambda: broker._kafka.port.memory.used == 0)
