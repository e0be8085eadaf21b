"""Calls of a real broker's HTTP API, as the dashboard makes them.

async with an_api(tmp_path) as (broker, page):
    await filled(broker)
    assert (await page.found("topics/default/t"))["watermarks"]["next"] == 20
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import aiohttp

from tests.support.broker import a_broker, a_record
from tests.support.security import allow, sign

T = "/default/t"
ACTION = {"X-Ister-Action": "yes"}
"""The header of requests that change something."""


class Page:
    """Calls of the API, as a page makes them."""

    def __init__(self, session):
        self.session = session

    async def get(self, path, **more):
        async with self.session.get(f"/api/{path}", **more) as response:
            content = await response.json()
            if response.status != 200:
                assert set(content) >= {"code", "error", "hint"}
            return response.status, content

    async def found(self, path, **more):
        status, content = await self.get(path, **more)
        assert status == 200, content
        return content

    async def post(self, path, body=None, **more):
        more.setdefault("headers", ACTION)
        async with self.session.post(f"/api/{path}", json=body or {}, **more) as response:
            return response.status, await response.json()


@asynccontextmanager
async def an_api(directory, settings=None, *, mode="wal_cloud"):
    async with (
        a_broker(directory, settings, mode=mode) as (broker, _, listening),
        aiohttp.ClientSession(f"http://127.0.0.1:{listening.http}") as session,
    ):
        yield broker, Page(session)


async def filled(broker, name=T, payloads=None, **fields):
    topic = await broker.topics.get_or_create(name, is_reliable=True)
    for payload in payloads if payloads is not None else [b"%d" % n for n in range(20)]:
        await topic.publish(a_record(payload, topic=name, **fields))
    return topic


class Callers:
    """People with rights, and their tokens."""

    def __init__(self, broker):
        self._access = broker.guard.access

    def allow(self, name, role, topic=""):
        allow(self._access, name, role, topic=topic or None)

    @staticmethod
    def of(name):
        return {"Authorization": f"Bearer {sign(name)}"}
