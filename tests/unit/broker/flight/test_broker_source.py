"""Where Flight's threads meet the loop: topics found and made, bounds and schemas of rows."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from ister.broker.flight import broker_source as module
from ister.broker.flight.broker_source import BrokerSource
from ister.errors import InvalidRequestError, NotFoundError, UnavailableError
from tests.support.broker import some_topics
from tests.support.waiting import eventually_async

NAME = "/default/t"


class Schemas:
    """A registry that has an opinion on one topic."""

    def __init__(self, checked=()):
        self.checked = set(checked)
        self.seen = []

    def is_unchecked(self, topic):
        return topic not in self.checked

    def check_message(self, topic, *, schema_id, schema_version, payload):
        self.seen.append((topic, schema_id, schema_version, payload))
        if payload == b"bad":
            raise InvalidRequestError("does not fit")


def rows(*payloads, **columns):
    return pa.record_batch({"payload": pa.array(payloads, pa.binary()), **columns})


def admit(source, topic, batch):
    source.admit(topic, batch, producer=None, principal="", is_gone=lambda: False)


@asynccontextmanager
async def a_source(tmp_path, *, mode="memory", schemas=None):
    """A source, its topics, and `call`, which does something in a thread, as Flight does."""
    async with some_topics(tmp_path, mode=mode, schemas=schemas or Schemas()) as topics:

        async def call(function, *args, **more):
            return await asyncio.wait_for(asyncio.to_thread(function, *args, **more), 60)

        yield BrokerSource(topics, asyncio.get_running_loop()), topics, call


async def test_a_topic_is_found_or_made_on_the_loop(tmp_path):
    async with a_source(tmp_path, mode="local_only") as (source, topics, call):
        with pytest.raises(NotFoundError):
            await call(source.open, NAME)
        made = await call(source.open, NAME, creator=object(), ack="written", codec="bincode1")
        served = topics.find_open(NAME)
        assert made is served.sequenced
        assert (served.topic.ack, served.topic.codec) == ("written", "bincode1")
        assert await call(source.open, NAME, creator=object()) is made
        assert source.names() == [NAME]
        assert source.config is topics.config
        # One that is open is found without the loop, which is blocked here.
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(source.open, NAME).result(60) is made


async def test_a_topic_without_a_log_is_refused(tmp_path):
    async with a_source(tmp_path) as (source, topics, call):
        await topics.get_or_create(NAME, is_reliable=False)
        with pytest.raises(InvalidRequestError, match="not reliable"):
            await call(source.open, NAME)
        assert source.names() == []


async def test_rows_wait_for_the_rate(tmp_path):
    async with a_source(tmp_path) as (source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await topics.set_topic_policies(NAME, {"max_publish_rate": 100})
        loop = asyncio.get_running_loop()
        start = loop.time()
        for _ in range(6):
            await call(admit, source, topic, rows(*[b"x"] * 10))
        assert loop.time() - start > 0.3
        # Those that wait are told of the end.
        waiting = asyncio.create_task(call(admit, source, topic, rows(*[b"x"] * 100_000)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        source.end()
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting


async def test_rows_for_a_topic_that_was_opened_again_have_to_come_again(tmp_path):
    async with a_source(tmp_path, mode="wal_cloud") as (source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await call(admit, source, topic, rows(b"x"))
        await topics.unload(NAME)
        with pytest.raises(UnavailableError, match="reopened"):
            await call(admit, source, topic, rows(b"x"))
        again = await call(source.open, NAME)
        with pytest.raises(UnavailableError, match="reopened"):
            await call(admit, source, topic, rows(b"x"))
        await call(admit, source, again, rows(b"x"))


async def test_a_topic_that_takes_too_long_to_open_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_SECONDS", 0.05)

    async with a_source(tmp_path) as (source, topics, call):
        cancelled = []

        async def slow(name):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.append(name)
                raise

        topics.get = slow
        with pytest.raises(UnavailableError, match="in time"):
            await call(source.open, NAME)
        await eventually_async(lambda: cancelled == [NAME])
