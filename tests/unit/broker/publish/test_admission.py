"""One admission for every way in: gRPC, rows by Flight, staged rows, dead letters."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.support.cases import each

pytest.importorskip("pyarrow")

import pyarrow as pa

from ister.broker.flight.broker_source import BrokerSource
from ister.broker.publish.admission import Admission, admission_of_message, admission_of_rows
from ister.bucket.names import staging_prefix
from ister.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.format.manifest import StagedFile
from ister.format.staged_rows import STAGED_SCHEMA, encode_block
from ister.topic.batches import StagedBatch
from tests.support.broker import some_topics
from tests.support.builders import a_message
from tests.support.machine import payloads

NAME = "/default/t"
SHOP, OTHER = "service:shop", "service:other"


class Schemas:
    """A registry that enforces a schema on the topic: payloads are not b"bad"."""

    def is_unchecked(self, topic):
        return topic != NAME

    def check_message(self, topic, *, schema_id, schema_version, payload):
        if payload == b"bad":
            raise InvalidRequestError("does not fit")


class Door:
    """Every way into one topic of a broker."""

    def __init__(self, topics, topic):
        self.topics = topics
        self.topic = topic
        self._source = BrokerSource(topics, asyncio.get_running_loop())
        self._batch = 0

    async def send(self, *texts, principal="", producer="p"):
        for text in texts:
            await self.topic.publish(
                a_message(payload=text, producer_name=producer), principal=principal
            )

    async def rows(self, *texts, principal="", producer="p", is_gone=lambda: False, **columns):
        batch = pa.record_batch({"payload": pa.array(texts, pa.binary()), **columns})
        await asyncio.to_thread(
            self._source.admit,
            self.topic.sequenced,
            batch,
            producer=None if columns else producer,
            principal=principal,
            is_gone=is_gone,
        )
        self.topic.topic.append_arrow(batch)

    async def named_rows(self, *texts, producer="p", **more):
        """Rows of a producer that does not number them: each says who it is from."""
        await self.rows(*texts, producer_name=[producer] * len(texts), **more)

    async def staged(self, *texts, principal="", producer="p", is_gone=lambda: False):
        """Rows in two files, as Spark's sink stages them."""
        objects = self.topics.log.stores.objects
        files = []
        for number, part in enumerate((texts[:1], texts[1:])):
            rows = pa.RecordBatch.from_pylist(
                [{"payload": text, "producer_name": producer} for text in part],
                schema=STAGED_SCHEMA,
            )
            header, body = encode_block(rows, "")
            data = header + bytes(body)
            key = f"{staging_prefix(self.topic.parsed, 'query', self._batch)}{number}.rows"
            objects.put(key, data)
            files.append(StagedFile(key=key, rows=len(part), size_bytes=len(data)))
        staged = StagedBatch(writer="query", batch=self._batch, files=tuple(files))
        self._batch += 1
        await asyncio.to_thread(self._source.append_staged, NAME, staged, principal, is_gone)

    def texts(self):
        self.topic.topic.flush()
        return payloads(self.topic.topic.read())


WAYS = ["send", "rows", "named_rows", "staged"]


@asynccontextmanager
async def doors(tmp_path, *, schemas=None, **policies):
    async with some_topics(tmp_path, mode="wal_cloud", schemas=schemas) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True)
        if policies:
            await topics.set_topic_policies(NAME, policies)
        yield Door(topics, topic)


@each("way", WAYS)
@each("error, bad", [(MessageTooLargeError, b"abcde"), (InvalidRequestError, b"bad")])
async def test_messages_that_do_not_fit_are_refused_whichever_way_they_come(
    tmp_path, way, error, bad
):
    async with doors(tmp_path, schemas=Schemas(), max_message_size=4) as door:
        enter = getattr(door, way)
        await enter(b"good", b"")
        with pytest.raises(error):
            await enter(*([bad] if way == "send" else [b"ok", bad]))
        assert door.texts() == [b"good", b""]


@each("way", WAYS)
async def test_names_of_others_are_refused_whichever_way_they_come(tmp_path, way):
    async with doors(tmp_path) as door:
        enter = getattr(door, way)
        await door.send(b"first", principal=SHOP, producer="shop")
        with pytest.raises(PermissionDeniedError, match="another principal"):
            await enter(b"forged", principal=OTHER, producer="shop")
        await enter(b"own", principal=OTHER, producer="other")
        await enter(b"second", principal=SHOP, producer="shop")
        assert door.texts() == [b"first", b"own", b"second"]


@each("way", ["named_rows", "staged"])
async def test_names_that_cannot_be_shown_are_refused_in_rows_too(tmp_path, way):
    async with doors(tmp_path) as door:
        with pytest.raises(InvalidRequestError, match="not printable"):
            await getattr(door, way)(b"x", principal=SHOP, producer="a\u202eb")
        assert door.texts() == []


@each("way", WAYS)
async def test_messages_wait_for_the_rate_whichever_way_they_come(tmp_path, way):
    async with doors(tmp_path, max_publish_rate=100) as door:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for _ in range(6):
            await getattr(door, way)(*[b"x"] * 10)
        assert loop.time() - start > 0.3
        assert len(door.texts()) == 60


@each("way", ["rows", "staged"])
async def test_nobody_waits_for_the_rate_whose_caller_has_left(tmp_path, way):
    """Goal: rows for hours, and a caller that leaves: the thread is free, and so is the rate."""

    async with doors(tmp_path, max_publish_rate=10) as door:
        await door.rows(*[b"x"] * 10)
        with pytest.raises(UnavailableError, match="has disconnected"):
            async with asyncio.timeout(60):
                await getattr(door, way)(*[b"x"] * 50_000, is_gone=lambda: True)
        async with asyncio.timeout(60):
            await door.send(b"y")


@each("way", ["send", "rows"])
async def test_name_is_free_once_it_is_released(tmp_path, way):
    async with doors(tmp_path) as door:
        await door.send(b"a", principal=SHOP, producer="shop")
        assert door.topic.names.release("shop") == SHOP
        await getattr(door, way)(b"b", principal=OTHER, producer="shop")
        with pytest.raises(PermissionDeniedError):
            await door.send(b"c", principal=SHOP, producer="shop")


async def test_dead_letters_are_let_in_under_whatever_name_and_schema(tmp_path):
    async with doors(tmp_path, schemas=Schemas(), max_message_size=10) as door:
        await door.send(b"first", principal=SHOP, producer="shop")
        await door.topic.publish(a_message(payload=b"bad", producer_name="shop"))
        with pytest.raises(MessageTooLargeError):
            await door.topic.publish(a_message(payload=b"x" * 11, producer_name="shop"))
        assert door.texts() == [b"first", b"bad"]


async def test_topic_without_bounds_reads_staged_rows_once(tmp_path, monkeypatch):
    async with doors(tmp_path) as door:
        seen = []
        monkeypatch.setattr(Admission, "check", lambda *args: seen.append(args))
        await door.staged(b"a", b"b")
        assert door.texts() == [b"a", b"b"]
        assert seen == []


def test_lots_say_what_is_in_them():
    message = admission_of_message(a_message(payload=b"abc", producer_name="p", schema_id=7))
    assert (message.count, message.producer, message.largest()) == (1, "p", 3)
    assert [record[0] for record in message.records()] == [7]
    rows = admission_of_rows(
        pa.record_batch({"payload": ["a", "bcd"], "producer_name": ["x", None]}), None
    )
    assert (rows.count, rows.producer, rows.largest(), list(rows.names())) == (2, None, 3, ["x"])
    assert list(rows.records()) == [(None, None, b"a"), (None, None, b"bcd")]
    none = pa.record_batch({"payload": pa.array([], pa.binary())})
    assert admission_of_rows(none, "p").largest() == 0
