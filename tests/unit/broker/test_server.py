"""A whole broker on this loop: ready when it is, ends in order, leaves nothing behind."""

import asyncio
import json
import socket
import threading
from contextlib import closing, suppress

import aiohttp
import grpc
import pytest

from ister import kernels
from ister.base import failpoints
from ister.broker.server import Broker, Listening
from ister.broker.topics.topics import Topics
from ister.errors import ConfigError, DirectoryLockedError, UnavailableError
from ister.topic.log import Log
from ister.wire import danube, danube_admin, ister_api
from tests.servers.ports import free_port
from tests.support.broker import Services, a_broker, eventually, settings_of
from tests.support.broker_calls import Client, Code, status
from tests.support.cases import each

NAME = "/default/t"


def free_ports():
    return {name: free_port() for name in ("grpc", "flight", "http")}


def is_free(port):
    with closing(socket.socket()) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            one.bind(("127.0.0.1", port))
            return True
        return False


def our_threads():
    """All but the one that loads the compiled loops, which is the process's."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("ister-") and name != "ister-kernels"]


async def assert_nothing_left(directory, ports):
    """A broker that did not start has left no thread and no port, and the next one starts."""
    assert our_threads() == []
    assert all(is_free(port) for port in ports.values())
    async with a_broker(directory, {"broker": {"ports": ports}}) as (broker, _, listening):
        assert broker.is_ready
        assert listening.grpc == ports["grpc"]


async def get(port, path):
    """Status and text of a page; None while nobody listens."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, await response.text()
        except aiohttp.ClientConnectorError:
            return None


async def until(call, wanted):
    """Waits until an awaited call has a wanted answer."""
    async with asyncio.timeout(60):
        while (answer := await call()) != wanted:
            await asyncio.sleep(0.01)
    return answer


async def publish(services, *payloads):
    send = await Client(services).producer()
    for payload in payloads or (b"x",):
        await send(payload)


# -- ready ------------------------------------------------------------------------------------


async def test_it_is_ready_when_every_topic_is_recovered_and_not_before(tmp_path, monkeypatch):
    ports = free_ports()

    async with a_broker(tmp_path) as (_, services, _):
        await publish(services)
    go_on, real = asyncio.Event(), Topics.open_all

    async def slow(topics):
        await go_on.wait()
        await real(topics)

    monkeypatch.setattr(Topics, "open_all", slow)
    broker = Broker(settings_of(tmp_path, {"broker": {"ports": ports}}))
    starting = asyncio.create_task(broker.start())
    services = Services(ports["grpc"])
    try:
        await until(lambda: get(ports["http"], "/live"), (200, "live\n"))
        assert await get(ports["http"], "/ready") == (503, "not ready: recovering topics\n")
        status, text = await get(ports["http"], "/health")
        assert status == 503
        assert json.loads(text)["reasons"] == ["recovering topics"]
        # Whoever connects is not served before.
        call = services.admin.Info(ister_api.InfoRequest(), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert not starting.done()
        go_on.set()
        listening = await asyncio.wait_for(starting, 60)
        assert (listening.grpc, listening.flight, listening.http) == tuple(ports.values())
        assert await get(ports["http"], "/ready") == (200, "ready\n")
        assert [topic.name for topic in broker.topics.served] == [NAME]
        await services.channel.close()
        services = Services(ports["grpc"])
        answer = await services.admin.Info(ister_api.InfoRequest(), timeout=60)
        assert answer.broker_url == f"http://127.0.0.1:{ports['grpc']}"
    finally:
        await services.channel.close()
        await broker.stop()
    assert await get(ports["http"], "/live") is None


async def test_loops_are_compiled_from_the_start_on_but_after_it(tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr(kernels, "prepare", lambda: prepared.append(broker.is_ready))
    broker = Broker(settings_of(tmp_path))
    await broker.start()
    await broker.stop()
    assert prepared == [True]


async def test_a_namespace_that_is_missing_is_told_as_danube_does(tmp_path):
    async with a_broker(tmp_path) as (_, services, _):
        assert await status(Client(services, "/nowhere/t").producer()) is Code.UNAVAILABLE
        call = services.topics.CreateTopic(danube_admin.NewTopicRequest(name="/nowhere/t"))
        assert await status(call) is Code.NOT_FOUND


async def test_its_health_has_reasons(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, services, listening):
        await publish(services)
        await services.topics.CreateTopic(danube_admin.NewTopicRequest(name="/default/n"))
        status, text = await get(listening.http, "/health")
        report = json.loads(text)
        assert status == 200
        checks = {check["name"]: check for check in report.pop("checks")}
        # The disk of whoever runs the tests may be full.
        report.pop("state"), report.pop("words")
        assert report == {
            "ready": True,
            "reasons": [],
            "topics": {"open": 2},
            "ack": "synced",
            "auth": "none",
            "tls": False,
        }
        assert checks["ready"]["state"] == checks["topics"]["state"] == "ok"
        membership = type(broker.topics.log.stores.membership)
        with monkeypatch.context() as patch:
            patch.setattr(membership, "is_valid", property(lambda _: False))
            status, text = await get(listening.http, "/health")
            assert status == 503
            assert json.loads(text)["reasons"] == ["the lease in the metadata store has expired"]
            assert (await get(listening.http, "/ready"))[0] == 503
        assert (await get(listening.http, "/ready"))[0] == 200


# -- ports and addresses ----------------------------------------------------------------------


@each("taken", ["grpc", "flight", "http"])
async def test_a_port_that_is_taken_is_told_and_nothing_is_left_running(tmp_path, taken):
    ports = free_ports()

    broker = Broker(settings_of(tmp_path, {"broker": {"ports": ports}}))
    with socket.create_server(("127.0.0.1", ports[taken])):
        with pytest.raises(UnavailableError, match=str(ports[taken])) as refused:
            await broker.start()
        assert refused.value.hint
        assert not broker.is_ready
    await assert_nothing_left(tmp_path, ports)


async def test_a_directory_that_another_has_is_told(tmp_path):
    async with a_broker(tmp_path):
        other = Broker(settings_of(tmp_path))
        with pytest.raises(DirectoryLockedError):
            await other.start()
        await other.stop()
    assert our_threads() == []


@each("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_beyond_this_machine_without_auth_needs_a_flag(tmp_path, host):
    with pytest.raises(ConfigError, match="allow_insecure"):
        Broker(settings_of(tmp_path, {"broker": {"host": host}}))
    assert not (tmp_path / "data").exists()
    Broker(settings_of(tmp_path, {"broker": {"host": host, "allow_insecure": True}}))


async def test_on_all_addresses_with_the_flag(tmp_path):
    settings = {"broker": {"host": "0.0.0.0", "allow_insecure": True}}
    async with a_broker(tmp_path, settings, mode="memory") as (_, services, listening):
        answer = await services.admin.Info(ister_api.InfoRequest(), timeout=60)
        # An address that clients can use.
        assert answer.broker_url == f"http://127.0.0.1:{listening.grpc}"
        assert answer.flight_url == f"grpc://127.0.0.1:{listening.flight}"
        assert (await get(listening.http, "/ready"))[0] == 200


async def test_what_clients_are_told_can_be_set(tmp_path):
    advertised = {
        "broker_url": "http://broker-1:6650",
        "connect_url": "http://proxy:6650",
        "flight_url": "grpc://broker-1:6651",
    }
    settings = {"broker": {"advertised": advertised}}
    async with a_broker(tmp_path, settings) as (_, services, _):
        await publish(services)
        found = await services.discovery.TopicLookup(
            danube.TopicLookupRequest(request_id=5, topic=NAME)
        )
        assert (found.request_id, found.response_type, found.proxy) == (5, 1, True)
        assert found.broker_url == "http://broker-1:6650"
        assert found.connect_url == "http://proxy:6650"
        answer = await services.admin.Info(ister_api.InfoRequest())
        assert answer.flight_url == "grpc://broker-1:6651"


def test_addresses_as_text():
    assert Listening(host="127.0.0.1", grpc=1, flight=2, http=3).to_json() == {
        "grpc": "127.0.0.1:1",
        "flight": "127.0.0.1:2",
        "http": "127.0.0.1:3",
    }
    assert Listening(host="::1", grpc=1, flight=2, http=3).to_json()["grpc"] == "[::1]:1"


# -- modes ------------------------------------------------------------------------------------


@each("mode", ["memory", "local_only", "wal_cloud"])
async def test_cursors_and_ids_survive_a_restart_where_messages_do(tmp_path, mode):
    async with a_broker(tmp_path, mode=mode) as (broker, services, _):
        client = Client(services)
        await publish(services, b"0")
        consumer = await client.subscribe()
        await publish(services, b"1", b"2", b"3")
        stream = client.receive(consumer)
        first = await stream.read()
        assert (first.payload, first.msg_id.topic_offset) == (b"1", 1)
        await client.ack(1)
        stream.cancel()
    async with a_broker(tmp_path, mode=mode) as (broker, services, _):
        if mode == "memory":
            assert broker.topics.served == []
            return
        # By the id alone, as Danube's client comes back.
        stream = Client(services).receive(consumer)
        assert [(await stream.read()).payload for _ in range(2)] == [b"2", b"3"]
        stream.cancel()


async def test_in_memory_nothing_is_written(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (_, services, listening):
        await publish(services)
        _, text = await get(listening.http, "/health")
        assert json.loads(text)["ack"] == "memory"
    assert list(tmp_path.iterdir()) == []


# -- the end ----------------------------------------------------------------------------------


async def test_it_may_be_stopped_twice_and_without_a_start(tmp_path):
    broker = Broker(settings_of(tmp_path))
    await broker.stop()
    broker = Broker(settings_of(tmp_path))
    await broker.start()
    await asyncio.gather(broker.stop(), broker.stop())
    await broker.stop()
    assert not broker.is_ready
    assert our_threads() == []


async def test_what_is_under_way_is_answered_and_what_comes_later_is_told(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, services, listening):
        await publish(services)
        stream = Client(services).receive(await Client(services).subscribe())
        reading = asyncio.ensure_future(stream.read())
        topic = broker.topics.find_open(NAME)
        await eventually(lambda: topic.subscription("s").attached)
        inside, go_on = asyncio.Event(), asyncio.Event()
        real = topic.publish

        async def slow(message, **more):
            inside.set()
            await go_on.wait()
            return await real(message, **more)

        monkeypatch.setattr(topic, "publish", slow)
        monkeypatch.setattr(broker.topics.admission, "is_immediate", lambda *of: False)
        sending = asyncio.create_task(publish(services, b"last"))
        await inside.wait()
        stopping = asyncio.create_task(broker.stop())
        await eventually(lambda: broker._gate.is_closed)
        assert await status(services.admin.Info(ister_api.InfoRequest())) is Code.UNAVAILABLE
        code, text = await get(listening.http, "/health")
        assert (code, json.loads(text)["reasons"]) == (503, ["the broker is shutting down"])
        go_on.set()
        await asyncio.wait_for(sending, 60)
        # Its stream gets it, and then ends with what makes clients come again.
        assert (await reading).payload == b"last"
        assert await status(stream.read()) is Code.UNAVAILABLE
        await asyncio.wait_for(stopping, 60)
    async with a_broker(tmp_path) as (broker, _, _):
        assert broker.topics.find_open(NAME).topic.wal.next == 2


async def test_a_call_that_does_not_end_does_not_hold_it_up(tmp_path, monkeypatch):
    settings = {"broker": {"drain_seconds": 1}}
    async with a_broker(tmp_path, settings, mode="memory") as (broker, services, _):
        await publish(services)
        inside = asyncio.Event()

        async def hang(message, **more):
            inside.set()
            await asyncio.sleep(600)

        monkeypatch.setattr(broker.topics.find_open(NAME), "publish", hang)
        monkeypatch.setattr(broker.topics.admission, "is_immediate", lambda *of: False)
        sending = asyncio.create_task(publish(services))
        await inside.wait()
        loop = asyncio.get_running_loop()
        start = loop.time()
        await broker.stop()
        assert loop.time() - start < 8
        assert await status(sending) is not Code.OK


# -- a start that does not get to its end -----------------------------------------------------


@each("step", ["Log", "open_all", "_join"])
async def test_a_start_that_is_given_up_leaves_nothing(tmp_path, monkeypatch, step):
    """Cancelled at each step, as `ister serve` does on SIGTERM."""
    ports = free_ports()

    reached = asyncio.Event()
    loop = asyncio.get_running_loop()
    go_on = threading.Event()
    if step == "Log":

        def slow_log(*args, **more):
            loop.call_soon_threadsafe(reached.set)
            go_on.wait(60)
            return Log(*args, **more)

        monkeypatch.setattr("ister.broker.server.Log", slow_log)
    else:

        async def hang(*_):
            reached.set()
            await asyncio.sleep(600)

        owner = Topics if step == "open_all" else Broker
        monkeypatch.setattr(owner, step, hang)
    broker = Broker(settings_of(tmp_path, {"broker": {"ports": ports}}))
    starting = asyncio.create_task(broker.start())
    await asyncio.wait_for(reached.wait(), 60)
    starting.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(starting), 60)
    await broker.stop()
    monkeypatch.undo()
    await assert_nothing_left(tmp_path, ports)


async def test_a_start_that_fails_at_the_last_moment_leaves_nothing(tmp_path):
    ports = free_ports()

    def fail():
        raise UnavailableError("at the last moment")

    failpoints.arm("broker.before_ready", fail)
    broker = Broker(settings_of(tmp_path, {"broker": {"ports": ports}}))
    with pytest.raises(UnavailableError, match="last moment"):
        await broker.start()
    failpoints.disarm()
    await assert_nothing_left(tmp_path, ports)
