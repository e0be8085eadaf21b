"""The HTTP port, with a made-up broker behind it."""

import asyncio
import contextlib
import ssl

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from ister.broker.observe.http import Connections, make_application
from ister.broker.security.guard import Guard
from ister.broker.security.tls import ServerTls
from ister.clock import SystemClock
from ister.config import TlsConfig, load_config
from ister.metadata.memory import MemoryMetadata
from support.broker import run
from support.cases import each
from support.certificates import LOCAL_NAMES, Authority
from support.security import GuardRig


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
def test_what_is_answered(path, is_ready, status, text):
    application = make_application(Health(is_ready), Figures(), open_guard())
    assert run(asked(application, path))[:2] == (status, text)


def test_metrics_are_told():
    application = make_application(Health(), Figures(), open_guard())
    status, text, headers = run(asked(application, "/metrics"))
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


def test_connections_in_their_handshake_are_counted(tmp_path):
    """Goal: many that begin TLS and go no further; they are ended, and others get in."""
    authority = Authority("servers")
    cert_file, key_file = authority.issue("broker", names=LOCAL_NAMES).write(tmp_path, "broker")
    tls = ServerTls(TlsConfig(cert_file=cert_file, key_file=key_file), clock=SystemClock())

    async def scenario():
        runner = web.AppRunner(make_application(Health(), Figures(), open_guard()))
        await runner.setup()
        connections = Connections(runner, count_max=3)
        port = await connections.listen("127.0.0.1", 0, tls.http_context())
        halves = []
        try:
            for _ in range(8):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"\x16\x03\x01")
                halves.append((reader, writer))
            async with asyncio.timeout(9):  # less than a handshake may take
                for reader, _ in halves[:5]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
            context = ssl.create_default_context(cadata=authority.certificate.decode())
            async with (
                aiohttp.ClientSession(f"https://localhost:{port}") as session,
                session.get("/ready", ssl=context) as response,
            ):
                assert response.status == 200
            assert not halves[-1][0].at_eof()
        finally:
            for _, writer in halves:
                writer.close()
            await connections.close()
            await runner.cleanup()

    run(scenario())
