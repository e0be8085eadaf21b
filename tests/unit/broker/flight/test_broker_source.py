"""Where Flight's threads meet the loop: topics found and made, bounds and schemas of rows."""

import asyncio
import threading

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from ister.broker.flight import broker_source as module
from ister.broker.flight.broker_source import BrokerSource
from ister.errors import InvalidRequestError, MessageTooLargeError, NotFoundError, UnavailableError
from tests.support.broker import run, some_topics
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


def with_source(tmp_path, scenario, settings=None, *, mode="memory", schemas=None):
    """Runs a scenario in which `call` does something in a thread, as Flight does."""

    async def around():
        async with some_topics(
            tmp_path, settings, mode=mode, schemas=schemas or Schemas()
        ) as topics:
            source = BrokerSource(topics, asyncio.get_running_loop())

            async def call(function, *args, **more):
                return await asyncio.wait_for(asyncio.to_thread(function, *args, **more), 60)

            await scenario(source, topics, call)

    run(around())


def test_a_topic_is_found_or_made_on_the_loop(tmp_path):
    async def scenario(source, topics, call):
        with pytest.raises(NotFoundError):
            await call(source.open, NAME)
        made = await call(source.open, NAME, creator=object())
        served = topics.find_open(NAME)
        assert made is served.sequenced
        assert await call(source.open, NAME) is made
        assert await call(source.open, NAME, creator=object()) is made
        assert source.names() == [NAME]
        assert source.config is topics.config

    with_source(tmp_path, scenario)


def test_an_open_topic_is_found_without_the_loop(tmp_path):
    async def scenario(source, topics, call):
        made = await call(source.open, NAME, creator=object())
        found = []
        thread = threading.Thread(target=lambda: found.append(source.open(NAME)))
        thread.start()
        thread.join(60)  # the loop is blocked here
        assert found == [made]

    with_source(tmp_path, scenario)


def test_a_new_topic_has_the_wanted_ack_level_and_codec(tmp_path):
    async def scenario(source, topics, call):
        await call(source.open, NAME, creator=object(), ack="written", codec="bincode1")
        topic = topics.find_open(NAME).topic
        assert (topic.ack, topic.codec) == ("written", "bincode1")

    with_source(tmp_path, scenario, mode="local_only")


def test_a_topic_without_a_log_is_refused(tmp_path):
    async def scenario(source, topics, call):
        await topics.get_or_create(NAME, is_reliable=False)
        with pytest.raises(InvalidRequestError, match="not reliable"):
            await call(source.open, NAME)
        assert source.names() == []

    with_source(tmp_path, scenario)


def test_rows_over_the_size_are_refused(tmp_path):
    async def scenario(source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await topics.set_topic_policies(NAME, {"max_message_size": 3})
        await call(admit, source, topic, rows(b"abc", b""))
        with pytest.raises(MessageTooLargeError):
            await call(admit, source, topic, rows(b"abc", b"abcd"))

    with_source(tmp_path, scenario)


def test_rows_wait_for_the_rate(tmp_path):
    async def scenario(source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await topics.set_topic_policies(NAME, {"max_publish_rate": 100})
        loop = asyncio.get_running_loop()
        start = loop.time()
        for _ in range(6):
            await call(admit, source, topic, rows(*[b"x"] * 10))
        assert loop.time() - start > 0.3

    with_source(tmp_path, scenario)


def test_rows_that_wait_are_told_of_the_end(tmp_path):
    async def scenario(source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await topics.set_topic_policies(NAME, {"max_publish_rate": 1})
        waiting = asyncio.create_task(call(admit, source, topic, rows(*[b"x"] * 1000)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        source.end()
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting

    with_source(tmp_path, scenario)


def test_rows_for_a_topic_that_was_opened_again_have_to_come_again(tmp_path):
    async def scenario(source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await call(admit, source, topic, rows(b"x"))
        await topics.unload(NAME)
        with pytest.raises(UnavailableError, match="reopened"):
            await call(admit, source, topic, rows(b"x"))
        again = await call(source.open, NAME)
        with pytest.raises(UnavailableError, match="reopened"):
            await call(admit, source, topic, rows(b"x"))
        await call(admit, source, again, rows(b"x"))

    with_source(tmp_path, scenario, mode="wal_cloud")


def test_rows_are_checked_against_the_topics_schema(tmp_path):
    schemas = Schemas([NAME])

    async def scenario(source, topics, call):
        topic = await call(source.open, NAME, creator=object())
        await call(admit, source, topic, rows(b"a", schema_id=pa.array([7], pa.uint64())))
        assert schemas.seen == [(NAME, 7, None, b"a")]
        with pytest.raises(InvalidRequestError, match="does not fit"):
            await call(admit, source, topic, rows(b"good", b"bad"))
        # One without a schema pays nothing for it.
        schemas.checked.clear()
        schemas.seen.clear()
        await call(admit, source, topic, rows(b"bad"))
        assert schemas.seen == []

    with_source(tmp_path, scenario, schemas=schemas)


def test_a_topic_that_takes_too_long_to_open_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_SECONDS", 0.05)

    async def scenario(source, topics, call):
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

    with_source(tmp_path, scenario)
