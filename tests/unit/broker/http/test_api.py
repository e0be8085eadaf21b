"""The HTTP API of a real broker: what it tells, what it does, and whom it refuses."""

import asyncio
import base64
import io
import json
from types import SimpleNamespace

import fastavro
import pytest

from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.broker.http.api import Api, _is_own_host, _is_same, _own_hosts, status_of
from ister.bucket.fence import Fence
from ister.bucket.pipeline import PipelineKeys, read_requests
from ister.config import load_config
from ister.errors import (
    CapacityError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.subscription.policy import SubscriptionKind
from tests.support.broker import a_record
from tests.support.http_api import ACTION, Callers, T, an_api, filled
from tests.support.security import auth_settings

N, P = "/default/n", "/default/p"


# -- looking --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only", "memory"])
async def test_everything_can_be_looked_at(tmp_path, mode):
    async with an_api(tmp_path, mode=mode) as (broker, page):
        await filled(broker)
        await broker.history.sample()
        found = await page.found("overview")
        assert found["broker"]["node"] == broker.cluster.own.node
        assert found["health"]["ready"] is True
        assert found["health"]["state"] in ("ok", "attention", "bad")
        assert found["totals"]["messages"] == 20
        assert found["totals"]["topics"] == 1
        assert found["auth"] == {"mode": "none", "principal": "anonymous:anonymous"}
        assert len(found["history"]["points"][-1]) == 6
        assert (found["disk"] is None) == (mode == "memory")
        if mode != "memory":
            assert found["disk"]["used_by_wal_bytes"] == found["totals"]["files_bytes"] > 0
            assert found["disk"]["free_bytes"] > 0
        assert found["pipeline"]["is_running"] is False
        [listed] = (await page.found("topics"))["topics"]
        assert (listed["topic"], listed["watermarks"]["next"]) == (T, 20)
        view = await page.found("topics/default/t")
        assert view["rights"] == {"consume": True, "produce": True, "manage": True}
        assert view["history"]["every_seconds"] == 2.0
        for window, seconds in (("5m", 2.0), ("1h", 20.0), ("1d", 480.0)):
            for path in ("overview", "topics/default/t"):
                history = (await page.found(f"{path}?window={window}"))["history"]
                assert (history["window"], history["every_seconds"]) == (window, seconds)
        assert len((await page.found("overview?window=1d"))["history"]["points"]) == 1
        assert (await page.found("brokers"))["brokers"] == found["brokers"]
        async with page.session.get("/metrics") as response:
            assert "ister_broker_messages_in_total 20" in await response.text()
        assert (await page.found("pipeline"))["words"] == found["pipeline"]["words"]
        for path, status in {
            "topics/default/none": 404,
            "topics/default/none/messages": 404,
            "nothing": 404,
            "topics/default": 404,
            "topics/default/a%2Fb": 400,
            "topics?limit=x": 400,
            "overview?window=1w": 400,
            "topics/default/t/messages?where=id": 400,
            "topics/default/t/messages?start=middle": 400,
            "topics/default/t/messages?start=21": 400,
            "topics/default/t/messages?start=t:yesterday": 400,
        }.items():
            assert (await page.get(path))[0] == status, path


async def test_the_last_hour_is_told(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        await filled(broker)
        await broker.history.sample()
        await filled(broker)
        await broker.history.sample()
        hour = (await page.found("overview?window=1h"))["history"]["points"]
        assert sum(one[1] for one in hour) > 0
        # Its own load is that of now; it tells others only from time to time.
        [one] = (await page.found("cluster"))["brokers"]
        assert one["load"]["messages_in"] == broker.history.all_rates.as_json()["messages_in"]
        assert one["load"]["messages_in"] > 0
        assert (await page.found("topics/default/t?window=1h"))["history"]["points"]


async def test_answers_are_for_this_page_alone(tmp_path):
    async with (
        an_api(tmp_path, mode="memory") as (_, page),
        page.session.get("/api/brokers") as response,
    ):
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.content_type == "application/json"
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_before_the_topics_are_there():
    guard = SimpleNamespace(check=lambda *a, **k: None)
    api = Api(guard, load_config(None, {}).broker)
    with pytest.raises(UnavailableError):
        await api._brokers(None)


# -- messages -------------------------------------------------------------------------------


async def test_messages_from_anywhere(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        topic = await broker.topics.get_or_create(T, is_reliable=True)
        for number in range(20):
            await topic.publish(
                a_record(
                    json.dumps({"n": number}).encode(),
                    routing_key="k" if number % 2 else None,
                    attributes={"number": str(number)},
                )
            )
        path = "topics/default/t/messages"
        found = await page.found(path)
        assert [one["offset"] for one in found["messages"]] == list(range(20))
        assert (found["next"], found["earliest"], found["end"]) == (20, 0, 20)
        one = found["messages"][3]
        assert one["json"] == {"n": 3}
        assert one["text"] == '{"n": 3}'
        assert base64.b64decode(one["payload_base64"]) == b'{"n": 3}'
        assert (one["size"], one["is_cut"], one["tier"]) == (8, False, "cache")
        assert (one["routing_key"], one["attributes"]) == ("k", {"number": "3"})
        assert one["publish_time"] == 1_760_745_600_000

        async def offsets(query):
            found = await page.found(f"{path}?{query}")
            return [one["offset"] for one in found["messages"]], found["next"]

        assert await offsets("limit=2") == ([18, 19], 20)
        assert await offsets("start=earliest&limit=2") == ([0, 1], 2)
        assert await offsets("start=5&limit=2") == ([5, 6], 7)
        assert await offsets("start=5&end=6") == ([5], 6)
        assert await offsets("start=latest&end=10&limit=3") == ([7, 8, 9], 10)
        assert await offsets("start=20") == ([], 20)
        assert await offsets("start=t:0&limit=1") == ([0], 1)
        assert await offsets("start=t:2020-01-01T00:00:00Z&limit=1") == ([0], 1)
        assert await offsets("start=t:2100-01-01") == ([], 20)
        # Nobody's cursor has moved, and nobody has subscribed.
        assert not topic.subscriptions
        status, refusal = await page.get(f"{path}?start=99")
        assert (status, refusal["earliest"], refusal["next"]) == (400, 0, 20)
        await broker.topics.unload(T)
        found = await page.found(f"{path}?limit=1")
        assert found["messages"][0]["tier"] == "bucket"
        assert found["messages"][0]["json"] == {"n": 19}


async def test_messages_that_are_large_or_odd(tmp_path, monkeypatch):
    monkeypatch.setattr("ister.broker.observe.browse._ANSWER_BYTES_MAX", 256 * 1024)

    async with an_api(tmp_path) as (broker, page):
        large = b"\xc3\xa4" * (100 * 1024)
        payloads = [b"\x00\x01", b"", "öl".encode(), b"NaN", b"[" * 5000, large]
        await filled(broker, payloads=[*payloads, *[large] * 10])
        path = "topics/default/t/messages?start=earliest"
        found = await page.found(path)
        shown = found["messages"]
        assert [one["text"] for one in shown[:4]] == [None, "", "öl", "NaN"]
        assert [one["json"] for one in shown[:5]] == [None] * 5
        assert (shown[5]["is_cut"], shown[5]["size"]) == (True, len(large))
        assert len(base64.b64decode(shown[5]["payload_base64"])) == 64 * 1024
        assert set(shown[5]["text"]) == {"ä"}
        # The answer is bounded, and says where to go on.
        assert 6 < found["next"] == shown[-1]["offset"] + 1 < 16
        more = await page.found(f"topics/default/t/messages?start={found['next']}")
        assert more["messages"][0]["offset"] == found["next"]
        assert len((await page.found(f"{path}&limit=100000000"))["messages"]) == len(shown)


async def test_messages_by_their_schema(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        schema = {"type": "record", "name": "O", "fields": [{"name": "id", "type": "long"}]}
        made = broker.schemas.register("orders", "avro", json.dumps(schema).encode())
        data = io.BytesIO()
        fastavro.schemaless_writer(data, fastavro.parse_schema(schema), {"id": 7})
        topic = await broker.topics.get_or_create(T, is_reliable=True)
        broker.schemas.bind_producer(T, "orders")
        for payload, number, version in [
            (data.getvalue(), made.schema_id, made.version),
            (b"\xff\xff", made.schema_id, made.version),
            (b"x", 12345, 1),
            (b"x", made.schema_id, 99),
        ]:
            await topic.publish(a_record(payload, schema_id=number, schema_version=version))
        shown = (await page.found("topics/default/t/messages"))["messages"]
        good, bad, unknown, newer = shown
        assert good["decoded"] == {"id": 7}
        assert good["decode_error"] is None
        assert good["schema"] == {
            "id": made.schema_id,
            "subject": "orders",
            "version": 1,
            "type": "avro",
        }
        assert bad["decoded"] is None
        assert "does not match" in bad["decode_error"]
        assert "no schema" in unknown["decode_error"]
        assert newer["decoded"] is None
        assert newer["decode_error"]
        view = await page.found("topics/default/t")
        assert (view["schema"]["subject"], view["schema"]["type"]) == ("orders", "avro")


async def test_messages_beside_damage(tmp_path):
    """What is damaged is said, and what lies before and behind it can be looked at."""

    settings = {"storage": {"wal": {"cache_capacity": 4}}}
    async with an_api(tmp_path, settings, mode="local_only") as (broker, page):
        topic = await filled(broker, payloads=[b"m" * 100] * 10)
        await asyncio.to_thread(topic.topic.flush)
        [path] = (tmp_path / "data" / "wal" / "default" / "t").glob("wal*.log")
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 0xFF
        path.write_bytes(data)
        found = await page.found("topics/default/t/messages?start=0&limit=10")
        before = len(found["messages"])
        assert before < 6
        assert found["error"]["code"] == "DATA_LOSS"
        assert found["next"] == before + 1
        found = await page.found("topics/default/t/messages?start=6")
        assert [one["offset"] for one in found["messages"]] == [6, 7, 8, 9]


async def test_topics_without_messages_to_look_at(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        await broker.topics.get_or_create(N, is_reliable=False)
        await broker.topics.create_partitioned(P, 2, is_reliable=True)
        status, refusal = await page.get("topics/default/n/messages")
        assert (status, refusal["code"]) == (400, "INVALID_ARGUMENT")
        status, refusal = await page.get("topics/default/p/messages")
        assert status == 400
        assert f"{P}-part-0" in refusal["hint"]
        assert (await page.found("topics/default/p"))["partitions"] == [
            f"{P}-part-0",
            f"{P}-part-1",
        ]
        assert (await page.post("topics/default/p/unload"))[0] == 400


# -- doing ----------------------------------------------------------------------------------


async def test_seek(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        topic = await filled(broker)
        await topic.subscribe("s", SubscriptionKind.EXCLUSIVE, "c", (), "earliest")
        path = "topics/default/t/subscriptions/s/seek"
        for to, offset in [("latest", 20), (7, 7), ("earliest", 0), ("5", 5), ("t:0", 0)]:
            status, done = await page.post(path, {"to": to})
            assert status == 200, done
            assert done["offset"] == done["subscription"]["cursor"] == offset
            assert str(offset) in done["done"]
        for to in (None, -1, 21, "middle", True, [1], 1.5):
            assert (await page.post(path, {"to": to}))[0] == 400, to
        assert (await page.post(path.replace("/s/", "/none/"), {"to": 1}))[0] == 404
        assert (await page.post("topics/default/no/subscriptions/s/seek", {"to": 1}))[0] == 404
        assert topic.subscription("s").delivery.cursor == 0


async def test_requests_to_the_pipeline(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        await filled(broker)
        store = broker.topics.log.stores.metadata
        keys = PipelineKeys(broker.config.storage.metadata.root_prefix)
        status, refusal = await page.post("pipeline/requests", {"job": "scrub"})
        assert status == 409
        assert "ister pipeline run" in refusal["hint"]
        fence = Fence.take(
            store,
            keys.lease,
            id="x",
            about={"job": "run", "host": "h"},
            ttl_seconds=30,
            clock=SystemClock(),
        )
        status, done = await page.post("pipeline/requests", {"job": "scrub", "topics": [T]})
        assert status == 200
        assert T in done["done"]
        [request] = read_requests(store, keys)
        assert (request.job, request.topics) == ("scrub", (T,))
        assert request.by == "anonymous:anonymous"
        found = await page.found("pipeline")
        assert (found["is_running"], found["words"]) == (True, "A pipeline runs on h.")
        assert found["requests"]["scrub"]["state"] == "waiting"
        for body in (
            {},
            {"job": "rm -rf"},
            {"job": 1},
            {"job": "scrub", "topics": T},
            {"job": "scrub", "topics": []},
            {"job": "scrub", "topics": ["none"]},
        ):
            assert (await page.post("pipeline/requests", body))[0] == 400, body
        # Two requests become one, and who asks second is told of no topics but their own.
        other = {"job": "scrub", "topics": ["/default/other"]}
        status, done = await page.post("pipeline/requests", other)
        assert status == 200
        assert T not in json.dumps(done)
        assert done["request"]["topics"] == ["/default/other"]
        [request] = read_requests(store, keys)
        assert request.topics == ("/default/other", T)
        fence.release()
    async with an_api(tmp_path / "memory", mode="memory") as (_, page):
        assert (await page.post("pipeline/requests", {"job": "scrub"}))[0] == 409


# -- pages of others ------------------------------------------------------------------------


async def test_a_name_that_points_here_learns_no_names(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        broker.topics.unopened["/default/secret"] = "it is damaged"

        async def told(host):
            headers = {"Host": host}
            async with page.session.get("/health", headers=headers) as response:
                return await response.text()

        assert "/default/secret" in await told("localhost")
        found = await told("evil.example")
        assert "cannot be opened: 1 topic" in found
        assert "secret" not in found


async def test_pages_of_others_do_nothing(tmp_path):
    async with an_api(tmp_path) as (broker, page):
        await filled(broker)
        url, path = str(page.session._base_url).rstrip("/"), "topics/default/t/unload"
        for headers in (
            {},
            {"X-Ister-Action": "no"},
            {**ACTION, "Origin": "http://evil.example"},
            {**ACTION, "Origin": "null"},
            {**ACTION, "Origin": url.replace("127.0.0.1", "127.0.0.2")},
            {**ACTION, "Origin": f"{url[:-1]}1" if url[-1] != "1" else f"{url[:-1]}2"},
            {**ACTION, "Sec-Fetch-Site": "cross-site"},
            {**ACTION, "Host": "evil.example"},
        ):
            status, refusal = await page.post(path, headers=headers)
            assert (status, refusal["code"]) == (403, "PERMISSION_DENIED"), headers
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            async with page.session.post(
                f"/api/{path}", data=b"{}", headers={**ACTION, "Content-Type": kind}
            ) as response:
                assert response.status == 400
        for body in (b"no", b"[]", b'{"a": ' * 20_000, b" " * 100_000):
            async with page.session.post(
                f"/api/{path}", data=body, headers={**ACTION, "Content-Type": "application/json"}
            ) as response:
                assert response.status == 400
        assert broker.topics.find_open(T) is not None
        # Names that were made to point here get nothing either.
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9040"):
            status, _ = await page.get("topics/default/t/messages", headers={"Host": host})
            assert status == 403, host
            async with page.session.get("/metrics", headers={"Host": host}) as response:
                assert (response.status, "ister_" in await response.text()) == (403, False)
        assert (await page.get("brokers", headers={"Host": "localhost:1"}))[0] == 200
        assert (await page.get("brokers", headers={"Host": "[::1]:9040"}))[0] == 200
        assert (await page.post(path, headers={**ACTION, "Origin": url}))[0] == 200


def test_hosts_and_origins():
    config = load_config(
        {
            "storage": {"mode": "memory"},
            "broker": {"advertised": {"broker_url": "https://Broker.example:6650"}},
        },
        {},
    ).broker
    hosts = _own_hosts(config)
    assert _is_own_host("broker.example:9040", hosts)
    assert _is_own_host("broker.example.", hosts)
    assert _is_own_host("10.0.0.1", hosts)
    for host in ("", "example", "xbroker.example", "broker.example.evil", "[::1", "a:b:c"):
        assert not _is_own_host(host, hosts), host
    assert _is_same("https://broker.example", "broker.example")
    assert _is_same("https://broker.example", "broker.example:443")
    assert _is_same("http://[::1]:9040", "[::1]:9040")
    for origin in ("https://broker.example:1", "ftp://broker.example", "null", "", "https://["):
        assert not _is_same(origin, "broker.example"), origin


def test_statuses():
    assert status_of(NotFoundError("x")) == 404
    assert status_of(InvalidRequestError("x")) == 400
    assert status_of(ConflictError("x")) == 409
    assert status_of(FencedError("x")) == 503
    assert status_of(UnavailableError("x")) == 503
    assert status_of(CapacityError("x")) == 503
    assert status_of(CorruptDataError("x")) == 500


# -- rights ---------------------------------------------------------------------------------


async def test_rights(tmp_path):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    async with an_api(tmp_path, settings) as (broker, page):
        topic = await filled(broker)
        await filled(broker, "/default/secret")
        await topic.subscribe("s", SubscriptionKind.EXCLUSIVE, "c", (), "earliest")
        callers = Callers(broker)
        callers.allow("reader", "consumer", T)
        callers.allow("boss", "admin")
        seek, boss = "topics/default/t/subscriptions/s/seek", {**callers.of("boss"), **ACTION}
        assert (await page.post(seek, {"to": 3}, headers=boss))[0] == 200
        assert topic.subscription("s").delivery.cursor == 3
        assert (await page.get("topics/default/t/messages", headers=callers.of("nobody")))[0] == 403

        reader = callers.of("reader")
        found = await page.found("overview", headers=reader)
        assert found["totals"]["topics"] == 1
        assert found["disk"] is None
        assert found["auth"] == {"mode": "token", "principal": "user:reader"}
        assert found["rights"] == {"create": False, "brokers": False}
        assert "secret" not in json.dumps(found)
        found = await page.found("topics", headers=reader)
        assert [one["topic"] for one in found["topics"]] == [T]
        assert found["total"] == 1
        assert (await page.found("topics", headers=callers.of("nobody")))["topics"] == []
        view = await page.found("topics/default/t", headers=reader)
        assert view["rights"] == {"consume": True, "produce": False, "manage": False}
        # A request for everything needs a right to everything.
        status, _ = await page.post(
            "pipeline/requests", {"job": "scrub"}, headers={**reader, **ACTION}
        )
        assert status == 403
        # Whoever says who they are may come by any name.
        headers = {**callers.of("boss"), "Host": "broker.example"}
        assert (await page.get("brokers", headers=headers))[0] == 200
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    done = [one for one in lines if "seek" in one["action"] and one["outcome"] == "allowed"]
    assert [one["principal"] for one in done] == ["user:boss"]
    assert done[0]["action"].startswith("http/POST /api/topics/default/t/")
    assert TopicName.parse(T).topic in done[0]["resource"]
    assert any(one["outcome"] == "denied" and "messages" in one["action"] for one in lines)
