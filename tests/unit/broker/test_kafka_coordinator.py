"""Committed offsets of Kafka's groups: where they are, who may write them, what they hold."""

import json

import pytest

from ister.base.model import TopicName
from ister.broker.kafka.protocol import ApiKey
from ister.errors import ConflictError
from ister.subscription.policy import SubscriptionKind
from ister.topic.retention import NO_FLOOR
from tests.support.broker import a_broker, a_record
from tests.support.kafka import raw

NAME = "/default/t-part-0"
NOT_COORDINATOR, NON_EMPTY, UNKNOWN_TOPIC = 16, 68, 3


async def a_topic(broker, count=10):
    await broker.topics.create_partitioned("/default/t", 1, is_reliable=True)
    topic = await broker.topics.get(NAME)
    for _ in range(count):
        await topic.publish(a_record(topic=NAME))
    return topic


async def commit(client, offset, *, group="g", topic="t", partition=0, metadata="m"):
    """The code of a commit by somebody who is no member."""
    answer = await client.ask(
        ApiKey.OFFSET_COMMIT,
        8,
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        name=topic,
        partition_index=partition,
        committed_offset=offset,
        committed_leader_epoch=-1,
        committed_metadata=metadata,
    )
    return answer.topics[0].partitions[0].error_code


async def committed(client, group="g"):
    """What a group has committed: offsets and metadata, by topic and partition."""
    answer = await client.ask(ApiKey.OFFSET_FETCH, 8, group_id=group, topics=None)
    [found] = answer.groups
    assert found.error_code == 0
    return {
        (topic.name, one.partition_index): (one.committed_offset, one.metadata)
        for topic in found.topics
        for one in topic.partitions
    }


def record_of(broker, group="g"):
    store = broker.topics.log.stores.metadata
    root = broker.config.storage.metadata.root_prefix
    key = f"{root}/cluster/groups/{group}"
    return store, key, json.loads(store.get(key).value)


async def test_a_commit_is_stored_and_survives_the_broker(tmp_path):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        await a_topic(broker)
        assert await commit(client, 4, metadata="größe") == 0
        assert await commit(client, 7) == 0
        # Back is legal, as it is in Kafka.
        assert await commit(client, 3, metadata="x" * 4096) == 0
        assert await commit(client, 3, metadata="x" * 4097) == 12
        assert await commit(client, 5, topic="missing") == UNKNOWN_TOPIC
        assert await commit(client, 5, partition=1) == UNKNOWN_TOPIC
        first = record_of(broker)[2]
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        assert await committed(client) == {("t", 0): (3, "x" * 4096)}
        second = record_of(broker)[2]
        assert second["topics"] == first["topics"] == [NAME]
        assert second["epoch"] == first["epoch"] + 1


async def test_a_replaced_coordinator_commits_nothing(tmp_path):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        await a_topic(broker)
        assert await commit(client, 4) == 0
        store, key, record = record_of(broker)
        store.put(
            key, json.dumps({**record, "node": "other", "epoch": record["epoch"] + 1}).encode()
        )
        assert await commit(client, 9) == NOT_COORDINATOR
        cursors = broker.topics.store.group_cursors(
            TopicName.parse(NAME), broker.topics.find_open(NAME).incarnation
        )
        assert cursors["g"].cursor == 4
        # The other one is not up: this broker claims the group again.
        assert await commit(client, 5) == 0
        assert record_of(broker)[2]["epoch"] == record["epoch"] + 2


async def test_committed_offsets_hold_retention_while_they_are_fresh(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        topic = await a_topic(broker)
        assert topic.topic.active_floor(include_inactive=True) == NO_FLOOR
        assert await commit(client, 4) == 0
        assert await commit(client, 6, group="other") == 0
        assert topic.topic.active_floor(include_inactive=False) == 4
        monkeypatch.setattr(topic._context, "retention_grace_seconds", -3600.0)
        assert topic.topic.active_floor(include_inactive=False) == NO_FLOOR
        assert topic.topic.active_floor(include_inactive=True) == 4


async def test_offsets_of_a_topic_that_was_made_again_do_not_count(tmp_path):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        await a_topic(broker)
        assert await commit(client, 4) == 0
        await broker.topics.delete("/default/t")
        await a_topic(broker)
        assert await committed(client) == {}
        assert await commit(client, 2) == 0
        assert await committed(client) == {("t", 0): (2, "m")}


async def test_a_group_and_a_subscription_cannot_have_one_name(tmp_path):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        topic = await a_topic(broker)
        assert await commit(client, 4) == 0
        with pytest.raises(ConflictError):
            await topic.subscribe("g", SubscriptionKind.SHARED, "c", ())
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", ())
        assert await commit(client, 4, group="s") != 0
        # Opening it again leaves both as they are.
        await topic.flush()
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        topic = await broker.topics.get(NAME)
        assert list(topic.subscriptions) == ["s"]
        assert await committed(client) == {("t", 0): (4, "m")}


async def test_groups_without_members_are_deleted_with_their_offsets(tmp_path):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        topic = await a_topic(broker)
        assert await commit(client, 4) == 0
        assert await commit(client, 4, group="other") == 0
        listed = await client.ask(ApiKey.LIST_GROUPS, 4, states_filter=())
        assert {(one.group_id, one.group_state) for one in listed.groups} == {
            ("g", "Empty"),
            ("other", "Empty"),
        }
        deleted = await client.ask(ApiKey.DELETE_GROUPS, 2, groups_names=("g", "unknown"))
        assert [one.error_code for one in deleted.results] == [0, 69]
        assert list(broker.topics.store.group_cursors(topic.parsed, topic.incarnation)) == ["other"]
        assert await committed(client, "g") == {}
        gone = await client.ask(
            ApiKey.OFFSET_DELETE, 0, group_id="other", name="t", partition_index=0
        )
        assert (gone.error_code, gone.topics[0].partitions[0].error_code) == (0, 0)
        assert await committed(client, "other") == {}


async def test_a_topics_description_has_its_groups(tmp_path):
    async with a_broker(tmp_path) as (broker, _, listening), raw(listening) as client:
        topic = await a_topic(broker)
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        assert await commit(client, 4) == 0
        view = await broker.views._whole(topic)
        shown = {(one.name, one.type, one.cursor, one.lag) for one in view.subscriptions}
        assert shown == {("s", "shared", 0, 10), ("g", "kafka", 4, 6)}
        assert view.subscriptions_total == 2
