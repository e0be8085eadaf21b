"""Partitioned topics: names and partitions while others are created and deleted."""

import asyncio
import threading
from contextlib import suppress

from ister.broker.topics import names as names_module
from ister.wire import danube, danube_admin, ister_api
from tests.support.broker import a_broker
from tests.support.broker_calls import MOMENT, NAME, Client, Code, Held, status
from tests.support.cases import each


async def partitioned_during_a_listing(broker, services):
    """A topic gets further partitions while all names are listed for somebody else."""
    topics = broker.topics
    await Client(services, "/default/o-part-0").producer()
    topics.log.topics = held = Held(topics.log.topics, is_stale=True)
    asking = asyncio.ensure_future(partitions(services, "/default/other"))
    await held.is_reached()
    making = asyncio.ensure_future(
        topics.create_partitioned("/default/o", 3, is_reliable=True, is_growing=True)
    )
    await asyncio.wait({making}, timeout=MOMENT)
    held.go_on()
    await asking
    await making


async def partitions(services, name):
    answer = await services.discovery.TopicPartitions(
        danube.TopicLookupRequest(request_id=1, topic=name)
    )
    return list(answer.partitions)


async def test_partitions_that_were_made_are_all_told(tmp_path, monkeypatch):
    monkeypatch.setattr(names_module, "_LOOK_SECONDS", 0.0)

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        await partitioned_during_a_listing(broker, services)
        monkeypatch.setattr(names_module, "_LOOK_SECONDS", 1.0)
        wanted = [f"/default/o-part-{number}" for number in range(3)]
        assert await partitions(services, "/default/o") == wanted


async def test_a_deletion_takes_all_partitions(tmp_path, monkeypatch):
    monkeypatch.setattr(names_module, "_LOOK_SECONDS", 0.0)

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        await partitioned_during_a_listing(broker, services)
        monkeypatch.setattr(names_module, "_LOOK_SECONDS", 1.0)
        await services.topics.DeleteTopic(danube_admin.TopicRequest(name="/default/o"))
        assert await broker.topics.names.all() == set()
        assert await partitions(services, "/default/o") == []


@each("is_reliable", [True, False])
async def test_a_topic_and_its_partition_made_at_once_are_one_of_them(tmp_path, is_reliable):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        topics = broker.topics
        both = threading.Barrier(2)

        def together(real):
            def call(*args, **more):
                if more.get("create", True):
                    with suppress(threading.BrokenBarrierError):
                        both.wait(MOMENT)
                return real(*args, **more)

            return call

        topics.log.topic = together(topics.log.topic)
        topics.records.create_topic = together(topics.records.create_topic)
        plain, partition = Client(services, "/default/x"), Client(services, "/default/x-part-0")
        answers = await asyncio.gather(
            status(plain.producer(is_reliable=is_reliable)),
            status(partition.producer(is_reliable=is_reliable)),
        )
        assert sorted(answers, key=lambda code: code.value[0]) == [Code.OK, Code.ALREADY_EXISTS]
        assert len(await topics.names.all()) == 1


async def test_a_topic_is_not_made_again_with_another_ack_level(tmp_path):
    async with a_broker(tmp_path) as (_, services, _):
        create, request = services.admin.CreateTopic, ister_api.CreateTopicRequest
        made = await create(request(topic=NAME, ack="synced"))
        assert made.ack == "synced"
        assert await status(create(request(topic=NAME, ack="tiered"))) in {
            Code.ALREADY_EXISTS,
            Code.FAILED_PRECONDITION,
            Code.INVALID_ARGUMENT,
            Code.ABORTED,
        }
        # As it is, or without a wish, it is there.
        for ack in ("synced", ""):
            assert (await create(request(topic=NAME, ack=ack))).ack == "synced"
