"""Moves that meet other moves, and what is refused for a topic whose broker is down."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from ister.bucket.members import Member
from ister.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from ister.subscription.policy import SubscriptionKind
from tests.support.broker import a_record, eventually, some_topics

NAME = "/default/t"


def add_brokers(topics, *nodes):
    """Entries of brokers that do nothing."""
    for node in nodes:
        url = f"http://{node}:1"
        member = Member(node=node, broker_url=url, connect_url=url, flight_url="")
        topics.log.stores.metadata.put(
            f"/danube/cluster/brokers/{node}", msgspec.json.encode(member)
        )
    topics.cluster.members.expire()


async def test_a_move_ends_when_a_later_one_replaces_it(tmp_path):
    async with some_topics(tmp_path) as topics:
        await topics.get_or_create(NAME, is_reliable=True)
        add_brokers(topics, "b", "c")
        move = asyncio.create_task(topics.move(NAME, "b"))
        await eventually(lambda: topics.find_open(NAME) is None and not topics._moving)
        topics.cluster.assign(NAME, "c", "moved")
        with pytest.raises(ConflictError, match="assigned to the broker c meanwhile"):
            await move
        move = asyncio.create_task(topics.move(NAME, "b"))
        await eventually(lambda: topics.cluster.assigned_node(NAME) == "b")
        topics.cluster.forget(NAME)
        with pytest.raises(ConflictError, match="deleted meanwhile"):
            await move


async def test_a_move_to_the_broker_that_has_the_topic_cancels_one_that_waits(tmp_path):
    async with some_topics(tmp_path) as topics:
        await topics.get_or_create(NAME, is_reliable=True)
        own = topics.cluster.own.node
        add_brokers(topics, "b")
        await topics.move(NAME, own)
        assert topics.cluster.assigned_node(NAME) is None
        topics.cluster.assign(NAME, "b", "moved")
        assert topics.cluster.assignment_changes().leaves == {NAME: "b"}
        await topics.move(NAME, own)
        assert topics.cluster.assignment_changes().leaves == {}
        assert topics.cluster.assigned_node(NAME) == own


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_topic_that_is_deleted_while_it_is_moved_is_not_called_corrupt(
    tmp_path, monkeypatch, is_deleted
):
    async with some_topics(tmp_path) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=True)
        add_brokers(topics, "b")

        def prepare_seal():
            if is_deleted:
                del topics._served[NAME]
            raise CorruptDataError("no object holds the offset")

        monkeypatch.setattr(topic.topic.bucket, "prepare_seal", prepare_seal)
        with pytest.raises(NotFoundError if is_deleted else CorruptDataError):
            await topics.unload(NAME, to="b")


@asynccontextmanager
async def survivor(directory):
    """The topics of a broker beside one that has ended with messages on its disk alone."""
    stores = {
        "storage": {
            "cloud": {"root": str(directory / "objects")},
            "metadata": {"path": str(directory / "metadata.db")},
        }
    }
    async with some_topics(directory / "a", stores) as topics:
        await topics.get_or_create("/default/n", is_reliable=False)
        topic = await topics.get_or_create(NAME, is_reliable=True)
        await topic.subscribe("s", SubscriptionKind.EXCLUSIVE, "c", ())
        await topic.publish(a_record(b"on this disk alone"))
    async with some_topics(directory / "b", stores) as topics:
        yield topics


async def test_a_topic_whose_broker_is_down_is_not_deleted_in_part(tmp_path):
    async with survivor(tmp_path) as topics:
        assert (await topics.get(NAME)).is_read_only
        with pytest.raises(UnavailableError, match="waits for the disk"):
            await topics.delete(NAME)
        topic = await topics.get(NAME)
        assert topic.is_read_only
        assert topic.subscription("s").name == "s"
        assert "s" in topics.store.load(topic.parsed, topic.incarnation)
        await topics.take_over(NAME)
        await topics.delete(NAME)
        assert NAME not in await topics.names.all()


async def test_a_topic_without_a_log_has_nothing_to_take_over(tmp_path):
    async with survivor(tmp_path) as topics:
        with pytest.raises(ConflictError, match="not reliable"):
            await topics.find_lost_tail("/default/n")
        with pytest.raises(NotFoundError):
            await topics.find_lost_tail("/default/none")
