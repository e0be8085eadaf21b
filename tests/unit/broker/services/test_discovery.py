"""danube.StorageService: which objects a topic consists of, for those who read the bucket."""

import asyncio

import grpc
import pytest

from ister.wire import danube
from support.broker import a_broker, a_record, run
from support.cases import each

NAME = "/default/orders"


async def listed(services, topic=NAME, after=0):
    answer = await services.storage.ListSegmentDescriptors(
        danube.ListSegmentDescriptorsRequest(topic=topic, after_offset=after)
    )
    return [(one.start_offset, one.end_offset) for one in answer.segments]


def test_objects_are_listed_from_the_first_one_on(tmp_path):
    """Danube never lists the object that begins at 0: it asks for starts above the offset."""

    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            topic = await broker.topics.get_or_create(NAME, is_reliable=True)
            assert await listed(services) == []
            for _ in range(3):
                for _ in range(10):
                    await topic.publish(a_record())
                await asyncio.to_thread(topic.topic.upload)
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

    run(scenario())


@each(
    ("topic", "status"),
    [
        ("/default/nowhere", grpc.StatusCode.NOT_FOUND),
        ("nowhere", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_is_not_there_is_said(tmp_path, topic, status):
    async def scenario():
        async with a_broker(tmp_path) as (_, services, _):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await listed(services, topic)
            assert refused.value.code() is status

    run(scenario())


def test_broker_without_a_bucket_says_so(tmp_path):
    async def scenario():
        async with a_broker(tmp_path, mode="local_only") as (broker, services, _):
            await broker.topics.get_or_create(NAME, is_reliable=True)
            with pytest.raises(grpc.aio.AioRpcError, match="no bucket"):
                await listed(services)

    run(scenario())
