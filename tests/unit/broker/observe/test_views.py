"""Topics as dictionaries: open here, handed over, of another broker; with and without a bucket."""

import asyncio
import json

import pytest

from ister.base.model import TopicName
from ister.broker.observe.subscriptions import describe_subscription
from ister.errors import NotFoundError, TopicNameError, UnavailableError
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.wire import ister_api
from tests.support.broker import a_broker, a_record, eventually, several_brokers

T, N, P = "/default/t", "/default/n", "/default/p"
FIELDS = {
    *("topic", "parent", "partitions", "is_here", "is_reliable", "ack", "codec", "incarnation"),
    "mode",
    *("epoch", "state", "owner", "earliest", "watermarks", "cache", "producers", "rates"),
    *("upload_lag", "subscriptions", "subscriptions_total", "damage", "errors"),
    *("files_total", "files_bytes", "objects_total", "objects_bytes"),
}
WHOLE = FIELDS | {"files", "objects", "is_counted", "policies", "schema", "history"}


async def filled(broker, name=T, count=20):
    topic = await broker.topics.get_or_create(name, is_reliable=True)
    for number in range(count):
        await topic.publish(a_record(b"%d" % number, topic=name))
    return topic


async def subscribed(topic, name, kind=SubscriptionKind.EXCLUSIVE, start="earliest"):
    await topic.subscribe(name, kind, "c", (), start)
    return topic.subscription(name)


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only", "memory"])
async def test_a_topic_that_is_open_here(tmp_path, mode):
    async with a_broker(tmp_path, mode=mode) as (broker, _, _):
        topic = await filled(broker)
        await subscribed(topic, "s")
        view = await broker.views.topic(T)
        assert set(view) == WHOLE
        json.dumps(view, allow_nan=False)
        assert (view["topic"], view["state"], view["partitions"]) == (T, "open", [])
        assert view["owner"]["broker_url"] == broker.cluster.own.broker_url
        assert view["watermarks"]["next"] == 20
        assert view["cache"]["next"] == 20
        assert view["cache"]["messages"] == 20
        assert [one["name"] for one in view["subscriptions"]] == ["s"]
        assert view["subscriptions"][0]["lag"] == 20
        if mode == "memory":
            assert view["files"] == view["objects"] == []
            assert view["ack"] == "memory"
            return
        [file] = view["files"]
        assert (file["first_offset"], file["next_offset"], file["is_active"]) == (0, 20, True)
        assert file["bytes"] == view["files_bytes"] > 0
        if mode == "local_only":
            assert view["objects"] == []
            assert view["upload_lag"] == {"messages": 0, "bytes": 0}
            return
        assert view["upload_lag"]["messages"] == 20
        assert view["upload_lag"]["bytes"] > 0
        await asyncio.to_thread(topic.topic.upload)
        view = await broker.views.topic(T)
        [described] = view["objects"]
        assert (described["start_offset"], described["end_offset"]) == (0, 19)
        assert "offset_index" not in described
        assert view["objects_bytes"] == described["size"]
        assert view["upload_lag"] == {"messages": 0, "bytes": 0}
        assert view["watermarks"]["tiered"] == 20


async def test_topics_that_are_something_else(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        views = broker.views
        await broker.topics.create_partitioned(P, 2, is_reliable=True)
        lossy = await broker.topics.get_or_create(N, is_reliable=False)
        await lossy.publish(a_record(topic=N))
        view = await views.topic(N)
        assert set(view) == WHOLE
        assert (view["is_reliable"], view["ack"], view["cache"]) == (False, None, None)
        assert view["earliest"] == view["watermarks"]["next"] == 1
        parts = [f"{P}-part-0", f"{P}-part-1"]
        assert await views.topic(P) == {"topic": P, "parent": None, "partitions": parts}
        assert (await views.topic(parts[1]))["parent"] == P
        with pytest.raises(NotFoundError):
            await views.topic("/default/none")
        with pytest.raises(TopicNameError):
            await views.topic("none")


async def test_a_look_leaves_a_topic_that_was_handed_over_where_it_is(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        topic = await filled(broker)
        await subscribed(topic, "s")
        await broker.topics.unload(T)
        view = await broker.views.topic(T)
        assert set(view) == WHOLE
        assert (view["state"], view["owner"], view["is_here"]) == ("sealed", None, False)
        assert view["watermarks"] == dict.fromkeys(view["watermarks"], 20)
        assert [one["end_offset"] for one in view["objects"]] == [19]
        [subscription] = view["subscriptions"]
        assert (subscription["name"], subscription["lag"]) == ("s", 20)
        [listed] = await broker.views.topics_listed([T])
        assert set(listed) == FIELDS
        assert listed["objects_total"] == 1
        assert broker.topics.find_open(T) is None
        # Whoever wants it from its owner makes it somebody's.
        document = await services.admin.ShowTopic(ister_api.TopicName(topic=T))
        view = json.loads(document.json)
        assert (view["state"], view["is_here"]) == ("open", True)


async def test_a_topic_of_another_broker(tmp_path):
    async with several_brokers(tmp_path, "a", "b") as [(first, _, _), (second, _, _)]:
        own = first.cluster.own
        await asyncio.to_thread(first.cluster.assign, T, own.node, "test")
        topic = await filled(first)
        await asyncio.to_thread(topic.topic.upload)
        await topic.publish(a_record())
        await subscribed(topic, "s")
        # The broker that has it is asked, for one topic and for a page of them.
        view = await second.views.topic(T)
        assert view["owner"] == {"node": own.node, "broker_url": own.broker_url}
        assert (view["is_here"], view["state"], view["errors"]) == (False, "open", [])
        marks = view["watermarks"]
        assert (marks["tiered"], marks["next"]) == (20, 21)
        [listed] = await second.views.topics_listed([T])
        assert listed["watermarks"] == marks
        assert (listed["is_here"], listed["owner"]) == (False, view["owner"])

        async def silent(*_arguments, **_more):
            raise UnavailableError("no answer")

        # If it does not answer, what is in the stores has to do.
        second.topics.peers.call = silent
        view = await second.views.topic(T)
        assert view["owner"] == {"node": own.node, "broker_url": own.broker_url}
        assert (view["is_here"], view["state"], view["rates"]) == (False, "open", None)
        assert view["watermarks"]["tiered"] == 20
        assert own.broker_url in view["errors"][0]["message"]
        assert second.topics.find_open(T) is None
        with pytest.raises(UnavailableError):
            await second.views.topic(T, opens=True)
        [listed] = await second.views.topics_listed([T])
        assert listed["owner"] == view["owner"]
        brokers = await second.views.brokers()
        assert [one["is_this"] for one in brokers] == [True, False]
        assert [one["topics"] for one in brokers] == [0, 1]


async def test_a_store_that_does_not_answer_leaves_what_is_in_memory(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, _, _):
        await filled(broker)
        store = broker.topics.log.stores.metadata

        def silent(*arguments, **more):
            raise UnavailableError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(store, "range", silent)
            patch.setattr(store, "get", silent)
            view = await broker.views.topic(T)
            assert view["watermarks"]["next"] == 20
            assert view["objects"] == []
            assert {one["code"] for one in view["errors"]} == {"UNAVAILABLE"}
            [listed] = await broker.views.topics_listed([T])
            assert listed["watermarks"]["next"] == 20
            overview = await broker.views.overview(None)
            assert overview["pipeline"]["is_running"] is None
            assert [one["is_this"] for one in overview["brokers"]] == [True]


async def test_what_holds_a_subscription_up(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        topic = await filled(broker, count=3)
        one = await subscribed(topic, "s")
        view = describe_subscription(one)
        assert (view.cursor, view.lag, view.consumers) == (0, 3, [])
        assert view.blocked_reason == "no consumer is connected"
        assert view.failure_policy["poison"] == "block"
        await one.set_policy(FailurePolicy(max_redelivery_count=0, base_redelivery_delay_ms=0))
        await one.set_window(2)
        [known] = one.stored.consumers.values()
        outbox = one.attach(known.id, ())
        sent = [(await outbox.take(1))[0] for _ in range(2)]
        for offset, _ in sent:
            assert await one.next_message(outbox, offset) is not None
            one.written(outbox, 1)
        view = describe_subscription(one)
        assert (view.consumers, view.active, view.in_flight) == (["c"], "c", 2)
        assert "2 unacknowledged" in view.blocked_reason
        one.nack(0, delay_ms=None, reason="bad")
        await eventually(lambda: describe_subscription(one).blocked == 0)
        assert "offset 0 failed too often" in describe_subscription(one).blocked_reason
        one.detach(outbox)


async def test_lists_come_in_pages_and_can_be_folded(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        for number in range(5):
            await filled(broker, f"/default/t{number}", 1)
        await broker.topics.create_partitioned(P, 11, is_reliable=True)

        async def listed(**request):
            answer = await services.admin.ListTopics(ister_api.ListTopicsRequest(**request))
            return json.loads(answer.json)

        found = await listed(with_partitions=True)
        assert found["total"] == len(found["topics"]) == 16
        assert found["next"] is None
        assert set(found["topics"][-1]) == FIELDS
        found = await listed()
        names = [one["topic"] for one in found["topics"]]
        assert names == [P, *(f"/default/t{number}" for number in range(5))]
        assert found["topics"][0]["partitions"] == [f"{P}-part-{n}" for n in range(11)]
        pages, after = [], ""
        while True:
            page = await listed(after=after, limit=4)
            pages += [one["topic"] for one in page["topics"]]
            if not page["next"]:
                break
            after = page["next"]
        assert pages == names
        assert (await listed(namespace="system"))["topics"] == []


async def test_a_page_is_no_larger_than_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr("ister.broker.observe.views._PAGE_BYTES_MAX", 3000)

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        for number in range(8):
            await filled(broker, f"/default/t{number}", 1)
        found, after = [], ""
        while True:
            answer = await services.admin.ListTopics(ister_api.ListTopicsRequest(after=after))
            page = json.loads(answer.json)
            assert 1 <= len(page["topics"]) < 8
            found += page["topics"]
            if not page["next"]:
                break
            after = page["next"]
        assert [one["topic"] for one in found] == [f"/default/t{n}" for n in range(8)]


async def test_policies_of_a_topic_that_is_not_open(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        await filled(broker)
        await broker.topics.set_topic_policies(T, {"max_publish_rate": 7})
        await broker.topics.unload(T)
        view = await broker.views.topic(T)
        assert view["policies"]["max_publish_rate"] == 7
        assert broker.topics.names.policies_of(TopicName.parse(T)).max_publish_rate == 7
