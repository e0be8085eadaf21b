"""The guard in front of a real HTTP server."""

import asyncio
import contextlib

import aiohttp
from aiohttp import web

from ister.broker.security.guard import current_principal
from ister.broker.security.http_guard import http_guard
from ister.broker.security.rights import Permission
from tests.support.cases import each


@contextlib.asynccontextmanager
async def serving(guard, *, tls=None):
    async def who(_request):
        return web.Response(text=str(current_principal()))

    async def manage(_request):
        guard.check(current_principal(), Permission.MANAGE_BROKER)
        return web.Response(text="done")

    async def fail(_request):
        raise RuntimeError("a mistake of ours")

    app = web.Application(middlewares=[http_guard(guard)])
    app.router.add_get("/ready", who)
    app.router.add_get("/who", who)
    app.router.add_get("/fail", fail)
    app.router.add_post("/manage", manage)
    runner = web.AppRunner(app)
    await runner.setup()
    context = None if tls is None else tls.http_context()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield f"{'http' if tls is None else 'https'}://localhost:{port}"
    finally:
        await runner.cleanup()


async def test_open_paths_alone_need_nothing(rig):
    async with serving(rig.guard) as url, aiohttp.ClientSession(url) as session:
        for path, status in (
            ("/ready", 200),
            ("/who", 401),
            ("/ready/", 401),
            ("/ready/../who", 401),
            ("/none", 401),
            ("/%72eady", 200),
        ):
            async with session.get(path) as response:
                assert response.status == status, path
                if status == 401:
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert (await response.json())["code"] == "UNAUTHENTICATED"


async def test_caller_is_known(rig):
    key = rig.api_key("loader")

    async with serving(rig.guard) as url, aiohttp.ClientSession(url) as session:
        for headers, answer in (
            (rig.bearer("alice"), "user:alice"),
            ({"X-Api-Key": key}, "service:loader"),
        ):
            async with session.get("/who", headers=headers) as response:
                assert await response.text() == answer
        for headers in (
            {"Authorization": "Bearer nonsense"},
            {"X-Danube-Internal-Broker": "broker-1"},
            [("Authorization", f"Bearer {key}"), ("Authorization", f"Bearer {key}")],
        ):
            async with session.get("/who", headers=headers) as response:
                assert response.status == 401
                assert key not in await response.text()


async def test_right_is_needed(rig):
    rig.allow("alice", "producer")

    rig.guard.access.close()
    async with serving(rig.guard) as url, aiohttp.ClientSession(url) as session:
        for name, status in (("alice", 403), ("root", 200)):
            async with session.post("/manage", headers=rig.bearer(name)) as response:
                assert response.status == status
        rig.clock.advance(60)
        async with session.post("/manage", headers=rig.bearer("alice")) as response:
            assert response.status == 503, "the rights are too old to be relied upon"
    assert [line["outcome"] for line in rig.audited()] == ["denied", "allowed"]


@each(
    "head",
    [
        b"Authorization: Bearer CANARY\x01\x02",
        b"Authorization: Bearer CANARY" + b"x" * 9000,
        b"Authorization CANARY",
        b"Auth\x00orization: CANARY",
    ],
)
async def test_bytes_that_are_not_http_are_not_logged(rig, caplog, head):
    """aiohttp would log them, with the headers in them."""

    async with serving(rig.guard) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /who HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert "CANARY" not in caplog.text
    assert not caplog.records


async def test_mistake_in_a_handler_is_logged(rig, caplog):
    async with (
        serving(rig.guard) as url,
        aiohttp.ClientSession(url) as session,
        session.get("/fail", headers=rig.bearer("alice")) as response,
    ):
        assert response.status == 500
    assert "a mistake of ours" in caplog.text
