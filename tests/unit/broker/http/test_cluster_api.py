"""The HTTP API of several brokers: what each says of the cluster, and does for the others."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from ister.subscription.policy import SubscriptionKind
from tests.support.broker import a_record, eventually, several_brokers
from tests.support.http_api import Page

T = "/default/t"
PATH = "topics/default/t"


@asynccontextmanager
async def pages(tmp_path, *names, **broker):
    """The API of several brokers."""
    async with (
        several_brokers(tmp_path, *names, settings={"broker": broker}) as found,
        AsyncExitStack() as stack,
    ):
        made = []
        for one, _, listening in found:
            session = aiohttp.ClientSession(f"http://127.0.0.1:{listening.http}")
            made.append(Page(await stack.enter_async_context(session)))
            made[-1].broker, made[-1].node = one, one.cluster.own.node
        yield made


async def at(page):
    """A topic with a message, at one broker."""
    await asyncio.to_thread(page.broker.cluster.assign, T, page.node, "test")
    topic = await page.broker.topics.get_or_create(T, is_reliable=True)
    await topic.publish(a_record(topic=T))
    return topic


async def test_every_broker_describes_the_cluster(tmp_path):
    async with pages(tmp_path, "a", "b", cluster={"zone": "west"}) as [a, b]:
        await at(a)

        async def is_led():
            return (await b.get("cluster"))[1]["leader"] is not None

        await eventually(is_led)
        for page in (a, b):
            status, found = await page.get("cluster")
            assert status == 200
            assert [one["is_this"] for one in found["brokers"]] == [True, False]
            by_node = {one["node"]: one for one in found["brokers"]}
            assert by_node[a.node]["topics"] == 1
            assert by_node[b.node]["topics"] == 0
            assert sum(one["is_leader"] for one in found["brokers"]) == 1
            for one in found["brokers"]:
                assert (one["state"], one["zone"]) == ("active", "west")
                assert one["version"]
                assert one["load"].keys() >= {"topics", "cpu", "upload_lag_bytes"}
            assert found["balance"]["variation"] == 1.0
            assert (found["moves"], found["waiting"]) == ([], [])
            assert found["rights"] == {"brokers": True, "topics": True}


async def test_broker_alone_is_a_cluster(tmp_path):
    async with pages(tmp_path, "a") as [a]:
        status, found = await a.get("cluster")
        assert (status, len(found["brokers"])) == (200, 1)
        assert found["balance"]["variation"] == 0
        status, refusal = await a.post(f"brokers/{a.node}/drain")
        assert (status, a.broker.cluster.own.is_active) == (409, True)
        assert "no other broker" in refusal["error"]


async def test_topics_are_changed_at_another_broker(tmp_path):
    """Goal: changes are forwarded with their rights; messages are not, and the owner is named."""

    async with pages(tmp_path, "a", "b") as [a, b]:
        topic = await at(a)
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        status, found = await b.post(f"{PATH}/policies", {"max_publish_rate": 70})
        assert (status, found["policies"]["max_publish_rate"]) == (200, 70)
        assert topic.policies.max_publish_rate == 70
        path = f"{PATH}/subscriptions/s"
        assert (await b.post(f"{path}/policy", {"max_redelivery_count": 3}))[0] == 200
        assert topic.subscription("s").stored.policy.max_redelivery_count == 3
        status, found = await b.post(f"{PATH}/publish", {"payload": "x"})
        assert (status, found["owner"]["node"]) == (409, a.node)
        assert (await b.post(f"{path}/delete", {"confirm": "s"}))[0] == 200
        assert topic.subscriptions == {}
        assert (await b.post(f"{PATH}/delete", {"confirm": T}))[0] == 200
        assert a.broker.topics.find_open(T) is None
        status, found = await b.post("topics", {"topic": "/default/parts", "partitions": 4})
        assert status == 200, found
        assert len((await a.get("topics/default/parts"))[1]["topics"]) == 4


async def test_limits_of_a_namespace_hold_at_every_broker(tmp_path):
    async with pages(tmp_path, "a", "b") as [a, b]:
        topic, path = await at(a), "namespaces/default/policies"
        for rate in (70, 0):
            body = {"max_publish_rate": rate} if rate else {}
            assert (await b.post(path, body))[0] == 200
            await eventually(lambda rate=rate: topic.publish_rate.per_second == rate)
            assert (await a.get(path))[1]["policies"]["max_publish_rate"] == rate
        assert (await b.post("namespaces/none/policies", {}))[0] == 404


async def test_actions_at_another_broker(tmp_path):
    """Goal: each is asked for at one broker and done by the other, or said to be impossible."""

    async with pages(tmp_path, "a", "b") as [a, b]:
        topic = await at(a)
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", ())
        status, done = await b.post(f"{PATH}/subscriptions/s/seek", {"to": "latest"})
        assert (status, done["offset"]) == (200, 1)
        assert topic.subscriptions["s"].delivery.cursor == 1
        status, refusal = await b.post(f"{PATH}/subscriptions/no/seek", {"to": 0})
        assert (status, refusal["code"]) == (404, "NOT_FOUND")
        status, done = await a.post(f"{PATH}/move", {"to": b.node})
        assert (status, done["node"]) == (200, b.node)
        await eventually(lambda: b.broker.topics.find_open(T) is not None)
        status, done = await a.post(f"brokers/{b.node}/drain")
        assert (status, done["moved"], done["failed"]) == (200, 1, [])
        assert b.broker.cluster.own.state == "draining"

        async def is_at_a():
            return (await b.get(PATH))[1]["owner"] == {
                "node": a.node,
                "broker_url": a.broker.cluster.own.broker_url,
            }

        await eventually(is_at_a)
        status, refusal = await a.post(f"{PATH}/move", {"to": b.node})
        assert (status, "draining" in refusal["error"]) == (409, True)
        status, done = await a.post(f"brokers/{b.node}/activate")
        assert (status, b.broker.cluster.own.state) == (200, "active")
        status, done = await b.post(f"{PATH}/unload")
        assert status == 200
        await eventually(lambda: b.broker.topics.find_open(T) is not None)
        for page in (a, b):
            status, done = await page.post("cluster/rebalance", {"dry_run": True})
            assert (status, done["moves"], done["dry_run"]) == (200, [], True)
        status, refusal = await a.post(f"{PATH}/take-over", {"confirm": True})
        assert (status, "is up" in refusal["error"]) == (409, True)
        for path, body in (
            (f"{PATH}/move", {}),
            (f"{PATH}/move", {"to": 7}),
            (f"{PATH}/take-over", {"confirm": "yes"}),
            ("cluster/rebalance", {"dry_run": 1}),
        ):
            assert (await a.post(path, body))[0] == 400
        assert (await a.post("brokers/nobody/drain"))[0] == 404
