"""danube.StorageService: which objects a topic consists of, for those who read the bucket."""

import asyncio
import re
import struct
import time
import zlib

import grpc
import pytest

from ister.base.model import Codec
from ister.format.message import decode_message
from ister.wire import danube
from tests.support.broker import a_broker, a_record
from tests.support.broker_calls import Code, status
from tests.support.cases import each

NAME = "/default/orders"


async def listed(services, topic=NAME, after=0):
    answer = await services.storage.ListSegmentDescriptors(
        danube.ListSegmentDescriptorsRequest(topic=topic, after_offset=after)
    )
    return [(one.start_offset, one.end_offset) for one in answer.segments]


async def upload(broker, times=1):
    """Publishes ten messages and uploads them, so many times."""
    topic = await broker.topics.get_or_create(NAME, is_reliable=True)
    for _ in range(times):
        for _ in range(10):
            await topic.publish(a_record())
        await asyncio.to_thread(topic.topic.upload)
    return topic


async def test_objects_are_listed_from_the_first_one_on(tmp_path):
    """Danube never lists the object that begins at 0: it asks for starts above the offset."""

    async with a_broker(tmp_path) as (broker, services, _):
        await broker.topics.get_or_create(NAME, is_reliable=True)
        assert await listed(services) == []
        await upload(broker, 3)
        assert await listed(services) == [(0, 9), (10, 19), (20, 29)]
        # A reader that has come to the end of one gets the next ones, and one that stopped
        # inside of one gets the rest of it.
        assert await listed(services, after=9) == [(10, 19), (20, 29)]
        assert await listed(services, after=12) == [(10, 19), (20, 29)]
        assert await listed(services, after=29) == []
        answer = await services.storage.ListSegmentDescriptors(
            danube.ListSegmentDescriptorsRequest(topic=NAME)
        )
        path = next(tmp_path.rglob(answer.segments[0].segment_id))
        assert path.stat().st_size == answer.segments[0].size
        assert answer.segments[0].created_at > 0


def danubes_messages(root, segment_id):
    """What Danube's reader makes of a segment: whole frames, by the name in the answer."""
    path = root / "storage/topics/default/orders/segments" / segment_id
    data, found = path.read_bytes(), []
    while data:
        offset, length, crc = struct.unpack_from("<QII", data)
        body, data = data[16 : 16 + length], data[16 + length :]
        assert zlib.crc32(body) == crc
        found.append((offset, body))
    return found


async def test_segments_are_where_danube_looks_for_them(tmp_path):
    settings = {"storage": {"cloud": {"layout": "segments"}}}
    async with a_broker(tmp_path, settings) as (broker, services, _):
        topic = await upload(broker, 3)
        answer = await services.storage.ListSegmentDescriptors(
            danube.ListSegmentDescriptorsRequest(topic=NAME)
        )
        root = next(tmp_path.rglob("objects"))
        for number, segment in enumerate(answer.segments):
            assert re.fullmatch(r"data-[0-9]+-[0-9]+\.dnb1", segment.segment_id)
            found = danubes_messages(root, segment.segment_id)
            offsets = [offset for offset, _ in found]
            assert offsets == list(range(10 * number, 10 * number + 10))
            assert (segment.start_offset, segment.end_offset) == (offsets[0], offsets[-1])
            assert segment.size == sum(16 + len(body) for _, body in found)
            assert abs(segment.created_at - time.time()) < 3600
            stored = [message.record for message in topic.topic.read()]
            bodies = [decode_message(body, Codec.BINCODE2) for _, body in found]
            assert bodies == stored[offsets[0] : offsets[-1] + 1]
        assert len(answer.segments) == 3


async def test_messages_that_danube_cannot_read_are_never_skipped(tmp_path):
    """Goal: a sidecar goes on behind the last offset it was told of; so the list ends before."""

    for layout in ("segments", "objects", "segments"):
        settings = {"storage": {"cloud": {"layout": layout}}}
        async with a_broker(tmp_path, settings) as (broker, services, _):
            await upload(broker)
    async with a_broker(tmp_path, settings) as (_, services, _):
        assert await listed(services) == [(0, 9)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await listed(services, after=9)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "ask for segments after 19" in refused.value.details()
        assert await listed(services, after=19) == [(20, 29)]
        assert await listed(services, after=29) == []


@each("topic, code", [("/default/nowhere", Code.NOT_FOUND), ("nowhere", Code.INVALID_ARGUMENT)])
async def test_what_is_not_there_is_said(tmp_path, topic, code):
    async with a_broker(tmp_path) as (_, services, _):
        assert await status(listed(services, topic)) is code


async def test_broker_without_a_bucket_says_so(tmp_path):
    async with a_broker(tmp_path, mode="local_only") as (broker, services, _):
        await broker.topics.get_or_create(NAME, is_reliable=True)
        with pytest.raises(grpc.aio.AioRpcError, match="no bucket"):
            await listed(services)
