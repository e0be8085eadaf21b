"""The HTTP port, with a made-up broker behind it."""

import asyncio
import contextlib
import gc
import socket
import ssl
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from ister.base.clock import SystemClock
from ister.broker.http.port import Connections, make_application
from ister.broker.security.guard import Guard
from ister.broker.security.tls import ServerTls
from ister.config import ClientAuth, TlsConfig, load_config
from tests.support.broker import run
from tests.support.cases import each
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata
from tests.support.security import GuardRig
from tests.support.waiting import eventually_async


class Health:
    def __init__(self, is_ready=True):
        self.is_ready = is_ready

    @property
    def reasons(self):
        return [] if self.is_ready else ["not yet", "nor soon"]

    def report(self, *, names):
        return {"ready": self.is_ready, "names": names}


class Figures:
    async def text(self):
        return "ister_broker_messages_in_total 7\n"


async def asked(application, path, **more):
    async with TestClient(TestServer(application)) as client:
        response = await client.get(path, **more)
        return response.status, await response.text(), response.headers


def open_guard():
    return Guard.open(load_config(None, {}), MemoryMetadata(), clock=SystemClock())


@each(
    ("path", "is_ready", "status", "text"),
    [
        ("/live", False, 200, "live\n"),
        ("/ready", False, 503, "not ready: not yet; nor soon\n"),
        ("/ready", True, 200, "ready\n"),
        ("/health", True, 200, '{"ready": true, "names": true}'),
        ("/health", False, 503, '{"ready": false, "names": true}'),
        ("/nothing", True, 404, "404: Not Found"),
    ],
)
async def test_what_is_answered(path, is_ready, status, text):
    application = make_application(Health(is_ready), Figures(), open_guard())
    assert (await asked(application, path))[:2] == (status, text)


async def test_metrics_are_told():
    application = make_application(Health(), Figures(), open_guard())
    status, text, headers = await asked(application, "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert text == "ister_broker_messages_in_total 7\n"


def test_metrics_need_the_right_to_look_once_there_are_rights(tmp_path):
    with GuardRig(tmp_path) as rig:
        rig.allow("alice", "admin")

        def ask(path, **more):
            application = make_application(Health(), Figures(), rig.guard)
            return run(asked(application, path, **more))[0]

        assert ask("/metrics") == 401
        assert ask("/metrics", headers=rig.bearer("bob")) == 403
        assert ask("/metrics", headers=rig.bearer("alice")) == 200
        # Whoever starts brokers need not say who they are, and learns no topic's name.
        assert ask("/live") == ask("/ready") == 200
        application = make_application(Health(), Figures(), rig.guard)
        told = run(asked(application, "/health"))[1]
        assert told == '{"ready": true, "names": false}'


SERVERS = Authority("servers")


@contextlib.asynccontextmanager
async def listening(directory, clock=None, **more):
    """The port with TLS: the `Connections`, and where they are."""
    cert_file, key_file = SERVERS.issue("broker", names=LOCAL_NAMES).write(directory, "broker")
    config = TlsConfig(cert_file=cert_file, key_file=key_file, **more)
    tls = ServerTls(config, clock=clock or SystemClock())
    runner = web.AppRunner(make_application(Health(), Figures(), open_guard()))
    await runner.setup()
    connections = Connections(runner, count_max=3)
    port = await connections.listen("127.0.0.1", 0, tls.http_context)
    try:
        yield connections, port
    finally:
        await connections.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serving(handler, **options):
    """The port, with one path of its own; its address."""
    application = make_application(Health(), Figures(), open_guard())
    application.router.add_post("/live/work", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    connections = Connections(runner, **options)
    try:
        yield await connections.listen("127.0.0.1", 0)
    finally:
        await connections.close()
        await runner.cleanup()


_POST = b"POST /live/work HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"


async def test_a_whole_request_is_answered_however_long_it_takes():
    """Others that are open meanwhile are closed: idle ones, and those with half a request."""

    done = asyncio.Event()

    async def work(request):
        body = await request.read()
        await done.wait()
        return web.Response(body=body)

    async with serving(work, seconds=3.0) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for (_, writer), said in zip(
            opened, (_POST % (5, b"whole"), _POST % (5, b"ha"), b""), strict=True
        ):
            writer.write(said)
        (served, _), *others = opened
        async with asyncio.timeout(60):
            for reader, _ in others:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not served.at_eof()
        done.set()
        assert (await served.readuntil(b"whole")).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


async def test_a_connection_is_as_old_as_its_last_answer():
    async def work(request):
        return web.Response(body=await request.read())

    async with serving(work, seconds=3.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        loop = asyncio.get_running_loop()
        end = loop.time() + 5.0
        while loop.time() < end:
            writer.write(_POST % (2, b"on"))
            assert (await reader.readuntil(b"\r\n\r\non")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_room_is_made_at_the_cost_of_connections_without_a_request():
    begun, done = asyncio.Event(), asyncio.Event()

    async def work(request):
        begun.set()
        await done.wait()
        return web.Response(text="done")

    async with serving(work, count_max=2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_POST % (1, b"x"))
        await begun.wait()
        idle, writer_of_idle = await asyncio.open_connection("127.0.0.1", port)
        late, writer_of_late = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await idle.read() == b""
        done.set()
        assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        assert not late.at_eof()
        for one in (writer, writer_of_idle, writer_of_late):
            one.close()


async def test_connections_in_their_handshake_are_counted(tmp_path):
    """Goal: many that begin TLS and go no further; they are ended, and others get in."""

    async with listening(tmp_path) as (_, port), contextlib.AsyncExitStack() as ends:
        halves = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            ends.callback(writer.close)
            writer.write(b"\x16\x03\x01")
            halves.append(reader)
        async with asyncio.timeout(9):  # less than a handshake may take
            for reader in halves[:5]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        context = ssl.create_default_context(cadata=SERVERS.certificate.decode())
        async with (
            aiohttp.ClientSession(f"https://localhost:{port}") as session,
            session.get("/ready", ssl=context) as response,
        ):
            assert response.status == 200
        assert not halves[-1].at_eof()


@each("said", [b"", b"GET / HTTP/1.1\r\n\r\n"])
async def test_failed_handshakes_keep_no_memory(tmp_path, said):
    """Goal: 256 KiB each, and it was for the garbage collector to find them."""

    def kept():
        return [one for one in gc.get_objects() if isinstance(one, asyncio.sslproto.SSLProtocol)]

    gc.collect()
    gc.disable()
    try:
        async with listening(tmp_path) as (connections, port):
            for _ in range(5):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                writer.close()
            await eventually_async(lambda: not connections._handshakes and not kept())
    finally:
        gc.enable()


def _ask(port, context, session=None):
    """Asks for `/live`; returns the TLS session and whether it was resumed."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
            raise ConnectionError("no answer")
        return connection.session, connection.session_reused


@each("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_session_of_a_removed_authority_is_not_resumed(tmp_path, version):
    old, new = Authority("old clients"), Authority("new clients")
    context = ssl.create_default_context(cadata=SERVERS.certificate.decode())
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(*old.issue("client").write(tmp_path, "client"))
    clock = ManualClock(now_ms=int(time.time() * 1000))
    mutual = {"ca_file": old.write(tmp_path), "client_auth": ClientAuth.REQUIRED}

    async with listening(tmp_path, clock, **mutual) as (_, port):
        session, _ = await asyncio.to_thread(_ask, port, context)
        clock.advance(1)
        session, is_resumed = await asyncio.to_thread(_ask, port, context, session)
        assert not is_resumed
        new.write(tmp_path)
        clock.advance(1)
        with pytest.raises(OSError):
            await asyncio.to_thread(_ask, port, context, session)
