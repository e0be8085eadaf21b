"""Changes of topics over HTTP: what they do, what they refuse, and to whom."""

import asyncio
import base64
import json

import aiohttp
import pytest

from ister.base.partitions import partition_of
from ister.broker.http import requests
from ister.subscription.policy import SubscriptionKind
from tests.support.broker import a_record
from tests.support.cases import each
from tests.support.http_api import T, an_api, filled


async def test_topics_are_created_and_deleted(tmp_path):
    async with an_api(tmp_path) as (_, page):
        status, found = await page.post("topics", {"topic": T, "ack": "written"})
        assert (status, found["done"]) == (200, f"topic {T} was created")
        assert (await page.found("topics/default/t"))["ack"] == "written"
        status, found = await page.post("topics", {"topic": T})
        assert (status, found["error"]) == (409, f"topic {T} already exists; unchanged")
        parts = {"topic": "/default/p", "partitions": 3}
        assert (await page.post("topics", parts))[0] == 200
        listed = (await page.found("topics?fold=yes"))["topics"]
        assert [one["topic"] for one in listed] == ["/default/p", T]
        assert [one["topic"] for one in listed[0]["topics"]] == [
            f"/default/p-part-{number}" for number in range(3)
        ]
        assert len((await page.found("topics"))["topics"]) == 4
        described = await page.found("topics/default/p")
        assert [one["watermarks"]["next"] for one in described["topics"]] == [0, 0, 0]
        for wrong in (
            {"topic": "no"},
            {"topic": "/default/x", "partitions": -1},
            {"topic": "/default/x", "ack": "perhaps"},
            {"topic": 7},
            {"topic": "/default/x", "ack": "\ud800"},
        ):
            assert (await page.post("topics", wrong))[0] == 400, wrong
        assert (await page.post("topics", {"topic": "/nowhere/x"}))[0] == 404
        # Only with its name.
        status, found = await page.post("topics/default/p/delete", {})
        assert status == 400
        assert "/default/p" in found["hint"]
        status, _ = await page.post("topics/default/p/delete", {"confirm": "/default/p"})
        assert status == 200
        part = "/default/q-part-1"
        await page.post("topics", {"topic": "/default/q", "partitions": 2})
        status, found = await page.post(f"topics{part}/delete", {"confirm": part})
        # Danube's tests look for these words.
        assert (status, "Cannot delete individual partition" in found["error"]) == (409, True)
        assert (await page.get("topics/default/p"))[0] == 404
        status, _ = await page.post("topics/default/p/delete", {"confirm": "/default/p"})
        assert status == 404


@each("mode", ["local_only", "memory"])
async def test_a_topic_that_nobody_else_can_have_is_closed_if_that_keeps_it(tmp_path, mode):
    async with an_api(tmp_path, mode=mode) as (broker, page):
        await filled(broker)
        status, _ = await page.post("topics/default/t/unload")
        assert (status, broker.topics.find_open(T) is None) == (
            (409, False) if mode == "memory" else (200, True)
        )


async def test_messages_are_published(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        await filled(broker, payloads=[])
        path = "topics/default/t/publish"
        body = {"payload": '{"id": 1}', "key": "k", "attributes": {"source": "web"}}
        status, found = await page.post(path, body)
        assert (status, found["done"]) == (200, f"published to {T} at offset 0")
        binary = base64.b64encode(b"\0\xff").decode()
        assert (await page.post(path, {"payload_base64": binary}))[1]["offset"] == 1
        shown = (await page.found("topics/default/t/messages"))["messages"]
        assert [one["size"] for one in shown] == [9, 2]
        assert shown[0]["json"] == {"id": 1}
        assert (shown[0]["routing_key"], shown[0]["attributes"]) == ("k", {"source": "web"})
        assert shown[0]["producer_name"] == "dashboard"
        for wrong in (
            {},
            {"payload": 7},
            {"payload": "x", "attributes": {"a": 1}},
            {"payload": "x", "attributes": ["a"]},
            {"payload_base64": "?"},
        ):
            assert (await page.post(path, wrong))[0] == 400, wrong
        await page.post("topics", {"topic": "/default/p", "partitions": 4})
        for key in ("a", "b"):
            body = {"payload": key, "key": key}
            _, found = await page.post("topics/default/p/publish", body)
            assert found["topic"] == f"/default/p-part-{partition_of(key, 4)}"
        assert (await page.post("topics/default/p/publish", {"payload": "x"}))[0] == 200
        status, found = await page.post("topics/default/none/publish", {"payload": "x"})
        assert status == 404


async def test_policies_are_set_and_inherited_again(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        topic = await filled(broker)
        path = "topics/default/t/policies"
        status, found = await page.post(path, {"max_publish_rate": 50})
        assert (status, found["policies"]["max_publish_rate"]) == (200, 50)
        await page.post(path, {"max_message_size": 1000})
        view = await page.found("topics/default/t")
        assert view["own_policies"] == {"max_publish_rate": 50, "max_message_size": 1000}
        assert topic.policies.max_publish_rate == 50
        await page.post(path, {"max_publish_rate": None})
        assert (await page.found("topics/default/t"))["own_policies"] == {"max_message_size": 1000}
        assert topic.policies.max_publish_rate == 0
        for wrong in ({}, {"max": 1}, {"max_publish_rate": -1}, {"max_publish_rate": "x"}):
            assert (await page.post(path, wrong))[0] == 400, wrong


async def test_subscriptions_get_policies_and_are_deleted(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        topic = await filled(broker)
        await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        path = "topics/default/t/subscriptions/s"
        body = {"poison": "dead_letter", "dead_letter_topic": "/default/dead"}
        assert (await page.post(f"{path}/policy", body))[0] == 200
        await page.post(f"{path}/policy", {"max_redelivery_count": 2})
        [view] = (await page.found("topics/default/t"))["subscriptions"]
        policy = view["failure_policy"]
        assert policy["max_redelivery_count"] == 2
        assert (policy["poison"], policy["dead_letter_topic"]) == ("dead_letter", "/default/dead")
        # The topic of dead letters knows whose they are.
        await page.post("topics", {"topic": "/default/dead"})
        dead = await page.found("topics/default/dead")
        assert dead["dead_letters_of"] == [{"topic": T, "subscription": "s"}]
        assert (await page.found("topics/default/t"))["dead_letters_of"] == []
        for wrong in ({"poisonous": 1}, {"poison": "x"}, {"dead_letter_topic": T}):
            assert (await page.post(f"{path}/policy", wrong))[0] == 400, wrong
        assert (await page.post(f"{path}/delete", {}))[0] == 400
        assert (await page.post(f"{path}/delete", {"confirm": "s"}))[0] == 200
        assert (await page.found("topics/default/t"))["subscriptions"] == []
        assert (await page.post(f"{path}/delete", {"confirm": "s"}))[0] == 404


# -- messages that match --------------------------------------------------------------------


async def published(broker, count=300):
    topic = await filled(broker, payloads=[])
    for number in range(count):
        payload = json.dumps({"id": number, "name": f"n{number % 7}"}).encode()
        await topic.publish(
            a_record(
                payload,
                topic=T,
                routing_key=f"key-{number % 10}",
                attributes={"source": "web" if number % 2 else "shop"},
            )
        )
    return topic


async def test_messages_are_filtered(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        await published(broker)

        async def offsets(query):
            found = await page.found(f"topics/default/t/messages?{query}")
            return [one["offset"] for one in found["messages"]], found

        # The newest that match, found from the end, by offset.
        got, found = await offsets("key=key-3&limit=4")
        assert got == [263, 273, 283, 293]
        assert (found["first"], found["next"]) == (263, 300)
        got, _ = await offsets(f"key=key-3&limit=4&end={found['first']}")
        assert got == [223, 233, 243, 253]
        got, found = await offsets("where=id+%3D%3D+5")
        assert (got, found["first"], found["scanned"]) == ([5], 0, 300)
        assert (await offsets("attribute=source%3Dweb&key=key-2"))[0] == []
        assert (await offsets("attribute=source%3Dw*&limit=3"))[0] == [295, 297, 299]
        assert (await offsets("contains=%22id%22%3A%20123"))[0] == [123]
        # Forward, and where to continue.
        got, found = await offsets("start=earliest&key=key-3&key=key-4&limit=3")
        assert (got, found["next"]) == ([3, 4, 13], 14)
        assert (await offsets("start=14&key=key-3&key=key-4&limit=3"))[0] == [14, 23, 24]


async def test_a_search_that_is_cut_short_says_where_to_continue(tmp_path, monkeypatch):
    monkeypatch.setattr("ister.broker.observe.browse._READ_BYTES_MAX", 4096)

    async with an_api(tmp_path) as (broker, page):
        await published(broker)
        found = {"first": 300}
        asked = []
        while found["first"]:
            path = f"topics/default/t/messages?where=id+%3D%3D+5&end={found['first']}"
            found = await page.found(path)
            asked.append(found["first"])
            assert asked == sorted(set(asked), reverse=True)
        assert len(asked) > 1
        assert [one["offset"] for one in found["messages"]] == [5]


async def test_messages_are_downloaded_as_lines_of_json(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        topic = await published(broker, 20)
        large = b"x" * 100_000
        await topic.publish(a_record(large, topic=T))
        await topic.publish(a_record(b"\xff", topic=T))
        path = "/api/topics/default/t/messages/download"
        async with page.session.get(f"{path}?start=earliest") as response:
            lines = [json.loads(one) for one in (await response.text()).splitlines()]
            headers = response.headers
        assert headers["Content-Type"] == "application/x-ndjson; charset=utf-8"
        assert headers["Content-Disposition"] == 'attachment; filename="default-t.jsonl"'
        assert headers["X-Ister-Next"] == headers["X-Ister-Messages"] == "22"
        assert [one["offset"] for one in lines] == list(range(22))
        assert lines[3]["routing_key"] == "key-3"
        assert json.loads(lines[3]["payload"])["id"] == 3
        # Whole, unlike on a page.
        assert lines[20]["payload"] == large.decode()
        assert (lines[21]["payload"], lines[21]["payload_base64"]) == (None, "/w==")
        async with page.session.get(f"{path}?key=key-1&limit=1") as response:
            assert json.loads(await response.text())["offset"] == 11
        async with page.session.get(f"{path}?where=bad") as response:
            assert response.status == 400


async def test_a_slow_reader_of_a_download_does_not_fill_the_memory(tmp_path, monkeypatch):
    """What is not read stays out of the socket's buffer; further downloads are refused."""
    monkeypatch.setattr(requests, "_DOWNLOADS_MAX", 1)

    async with an_api(tmp_path) as (broker, page):
        await filled(broker, payloads=[b"x" * (1 << 20)] * 6)
        path = "/api/topics/default/t/messages/download?start=earliest"
        async with page.session.get(path) as slow:
            status, found = await page.get(path.removeprefix("/api/"))
            assert (status, found["error"]) == (503, "too many downloads")
            lines = (await slow.read()).splitlines()
            assert [json.loads(line)["offset"] for line in lines] == list(range(6))
            assert slow.headers["X-Ister-Next"] == "6"
        monkeypatch.setattr(requests, "_DOWNLOAD_SECONDS", 0.05)
        async with page.session.get(path) as slow:
            monkeypatch.setattr(requests, "_DOWNLOAD_SECONDS", 60.0)
            while True:
                async with page.session.get(path) as other:
                    if other.status == 200:
                        assert len((await other.read()).splitlines()) == 6
                        break
                await asyncio.sleep(0.01)
            with pytest.raises(aiohttp.ClientError):
                await slow.read()
