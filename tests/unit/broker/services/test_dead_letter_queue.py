"""Dead letters for operators, at a real broker: count, show, requeue, drop, and who may."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import grpc
import pytest

from ister import wire
from ister.base import failpoints
from ister.broker.dispatch.dead_letters import LetterSigner
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from ister.wire import ister_api
from tests.support.broker import a_broker, a_record, eventually, take
from tests.support.security import allow, auth_settings, headers_of

SOURCE, DEAD = "/default/orders", "/default/orders-dead"


def calls_of(services):
    return wire.stub(services.channel, "ister.DeadLetters")


async def asked(call, metadata=(), **fields):
    answer = await call(ister_api.DeadLettersRequest(topic=DEAD, **fields), metadata=metadata)
    return json.loads(answer.json)


def a_letter(payload, *, topic=SOURCE, subscription="billing", reason="no stock", **more):
    attributes = {
        "x-original-topic": topic,
        "x-original-subscription": subscription,
        "x-original-topic-offset": "7",
        "x-original-producer-id": "1",
        "x-original-broker-addr": "http://b:1",
        "x-dead-letter-hops": "1",
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": "3",
        "x-failure-reason": reason,
        **more,
    }
    return a_record(payload, topic=DEAD, attributes=attributes, routing_key="k")


async def filled(broker, *letters):
    source = await broker.topics.get_or_create(SOURCE, is_reliable=True)
    dead = await broker.topics.get_or_create(DEAD, is_reliable=True)
    for letter in letters:
        is_letter = "x-original-topic" in letter.attributes
        await dead.publish(broker.topics.signer.sign(letter, DEAD) if is_letter else letter)
    return source, dead


def payloads(topic):
    return [message.payload for message in topic.topic.read("earliest")]


async def test_a_message_that_failed_is_requeued_as_it_was(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        source = await broker.topics.get_or_create(SOURCE, is_reliable=True)
        consumer = await source.subscribe("billing", SubscriptionKind.EXCLUSIVE, "c", ())
        dispatch = source.subscription("billing")
        await dispatch.set_policy(
            FailurePolicy(
                max_redelivery_count=0, poison=PoisonPolicy.DEAD_LETTER, dead_letter_topic=DEAD
            )
        )
        outbox = dispatch.attach(consumer.id, ())
        sent = a_record(b"bad", topic=SOURCE, attributes={"a": "1"}, routing_key="k")
        await source.publish(sent)
        await take(outbox, 1)
        dispatch.nack(0, delay_ms=None, reason="no stock")
        await eventually(lambda: dispatch.delivery.cursor == 1)
        dispatch.detach(outbox)
        calls = calls_of(services)
        found = await asked(calls.Count)
        assert (found["pending"], found["selected"], found["is_partial"]) == (1, 1, False)
        assert found["groups"] == [
            {
                "source_topic": SOURCE,
                "source_subscription": "billing",
                "count": 1,
                "first_offset": 0,
                "oldest": sent.publish_time,
                "newest": sent.publish_time,
                "unverified": 0,
                "reasons": {"no stock": 1},
            }
        ]
        [shown] = (await asked(calls.Show))["messages"]
        assert shown["attributes"] == {"a": "1"}
        assert shown["dead_letter"] == {
            "topic": SOURCE,
            "subscription": "billing",
            "offset": 0,
            "attempt": 1,
            "reason": "no stock",
            "hops": 1,
            "dropped_attributes": 0,
            "is_verified": True,
        }
        found = await asked(calls.Requeue)
        assert found == {"topic": DEAD, "done": 1, "failed": [], "next": None}
        [_, again] = source.topic.read("earliest")
        record = again.record
        assert replace(record, msg_id=sent.msg_id, request_id=1) == sent
        # Resolved: a second run finds nothing, and nobody else sees it as pending.
        assert (await asked(calls.Requeue))["done"] == 0
        assert (await asked(calls.Count))["pending"] == 0
        assert (await asked(calls.Show))["messages"] == []
        assert source.next_offset == 2


async def test_letters_are_selected_by_offset_reason_and_source_and_stay_resolved(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        source, _ = await filled(
            broker,
            a_letter(b"0"),
            a_letter(b"1", reason="Timed out"),
            a_letter(b"2", subscription="mail"),
            a_letter(b"3"),
            a_letter(b"4", topic="/default/others"),
            a_letter(b"5"),
        )
        calls = calls_of(services)
        assert (await asked(calls.Drop, reason="timed"))["done"] == 1
        assert (await asked(calls.Requeue, source_subscription="mail"))["done"] == 1
        found = await asked(calls.Count, limit=2)
        # The end bounds a later call to what was counted.
        assert (found["pending"], found["selected"], found["end"]) == (4, 2, 4)
        assert found["is_partial"]
        assert (await asked(calls.Requeue, offsets=[3, 4, 5, 6]))["done"] == 2
        found = await asked(calls.Count, source_topic="/default/others")
        assert (found["pending"], found["selected"]) == (2, 1)
        assert payloads(source) == [b"2", b"3", b"5"]
    async with a_broker(tmp_path) as (broker, services, _):
        calls = calls_of(services)
        shown = await asked(calls.Show, limit=1)
        assert [one["offset"] for one in shown["messages"]] == [0]
        shown = await asked(calls.Show, start=shown["next"])
        assert [one["offset"] for one in shown["messages"]] == [4]
        assert (await asked(calls.Requeue, end=4))["done"] == 1
        assert payloads(await broker.topics.get(SOURCE))[-1] == b"0"


async def test_a_crash_after_publishing_leaves_letters_pending(tmp_path):
    """At least once: what was published and not recorded is published again, and then no more."""

    async with a_broker(tmp_path) as (broker, services, _):
        source, _ = await filled(broker, a_letter(b"0"), a_letter(b"1"))
        calls = calls_of(services)

        def crash():
            raise OSError("crash")

        failpoints.arm("broker.after_requeue", crash)
        try:
            with pytest.raises(grpc.aio.AioRpcError):
                await asked(calls.Requeue)
        finally:
            failpoints.disarm()
        assert payloads(source) == [b"0", b"1"]
        assert (await asked(calls.Count))["pending"] == 2
        assert (await asked(calls.Requeue))["done"] == 2
        assert (await asked(calls.Requeue))["done"] == 0
        assert payloads(source) == [b"0", b"1", b"0", b"1"]


async def test_what_cannot_be_requeued_stays_pending(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        source, _ = await filled(
            broker, a_letter(b"0", topic="/default/gone"), a_record(b"1"), a_letter(b"2")
        )
        calls = calls_of(services)
        found = await asked(calls.Requeue)
        assert found["done"] == 1
        errors = {one["offset"]: one["code"] for one in found["failed"]}
        assert errors == {0: "NOT_FOUND", 1: "INVALID_ARGUMENT"}
        assert broker.topics.find_open("/default/gone") is None
        assert (await asked(calls.Count))["pending"] == 2
        with pytest.raises(grpc.aio.AioRpcError, match="their own topic"):
            await asked(calls.Requeue, to=DEAD)
        assert (await asked(calls.Requeue, to=SOURCE))["done"] == 2
        assert payloads(source) == [b"2", b"0", b"1"]


async def test_a_letter_that_no_broker_has_written_is_not_believed(tmp_path):
    """Goal: whoever may produce to a dead-letter topic must not publish elsewhere by way of it."""

    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        source, dead = await filled(broker, a_letter(b"genuine"))
        signer = broker.topics.signer
        letter = a_letter(b"forged", producer_name="till")
        signed = signer.sign(letter, DEAD)
        for forged in (
            letter,
            replace(signed, payload=b"other"),
            replace(signed, producer_name="root"),
            replace(signed, attributes={**signed.attributes, "x-original-topic": "/a/b"}),
            signer.sign(letter, SOURCE),
            LetterSigner("another secret").sign(letter, DEAD),
        ):
            await dead.publish(forged)
        calls = calls_of(services)
        groups = (await asked(calls.Count))["groups"]
        assert [(one["count"], one["unverified"]) for one in groups] == [(1, 1), (6, 5)]
        shown = (await asked(calls.Show))["messages"]
        assert [one["dead_letter"]["is_verified"] for one in shown] == [True, *[False] * 6]
        found = await asked(calls.Requeue)
        assert (found["done"], len(found["failed"])) == (1, 6)
        assert payloads(source) == [b"genuine"]
        # An operator who has looked at it may name a topic; the producer's name is not taken.
        assert (await asked(calls.Requeue, offsets=[1, 2], to=SOURCE))["done"] == 1
        [_, message] = source.topic.read("earliest")
        assert (message.payload, message.producer_name) == (b"forged", "")


async def test_more_letters_than_a_call_takes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("ister.broker.services.dead_letter_queue._BATCH", 2)
    monkeypatch.setattr("ister.broker.services.dead_letter_queue._LETTERS_MAX", 4)
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        source, _ = await filled(broker, *(a_letter(b"%d" % n) for n in range(5)))
        calls = calls_of(services)
        found = await asked(calls.Requeue)
        assert (found["done"], found["next"]) == (4, 4)
        found = await asked(calls.Requeue, start=found["next"])
        assert (found["done"], found["next"]) == (1, None)
        assert payloads(source) == [b"0", b"1", b"2", b"3", b"4"]


async def test_requeueing_needs_the_dead_letter_topic_and_the_topic_that_letters_go_to(tmp_path):
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    async with a_broker(tmp_path, settings) as (broker, services, _):
        source, _ = await filled(broker, a_letter(b"0"))
        calls = calls_of(services)

        async def grant(name, role, topic):
            await asyncio.to_thread(allow, broker.guard.access, name, role, topic=topic)

        async def refused(call, who):
            try:
                return await asked(call, headers_of(who))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                return None

        await grant("reader", "consumer", DEAD)
        await grant("manager", "admin", DEAD)
        assert await refused(calls.Show, "nobody") is None
        assert (await refused(calls.Show, "reader"))["messages"]
        assert await refused(calls.Requeue, "reader") is None
        assert await refused(calls.Drop, "reader") is None
        assert await refused(calls.Requeue, "manager") is None
        assert source.next_offset == 0
        await grant("manager", "producer", SOURCE)
        assert (await refused(calls.Requeue, "manager"))["done"] == 1


async def test_the_same_by_http(tmp_path):
    async with (
        a_broker(tmp_path, mode="memory") as (broker, _, listening),
        aiohttp.ClientSession(
            f"http://127.0.0.1:{listening.http}", headers={"X-Ister-Action": "yes"}
        ) as session,
    ):
        source, _ = await filled(broker, *(a_letter(b"%d" % n) for n in range(4)))
        path = "/api/topics/default/orders-dead/dead-letters"

        async def sent(method, rest="", **more):
            async with session.request(method, path + rest, **more) as answer:
                return answer.status, await answer.json()

        _, found = await sent("GET", "?limit=2&reason=stock")
        assert [one["text"] for one in found["messages"]] == ["0", "1"]
        status, found = await sent("POST", "/requeue", json={"offsets": [[1, 3]]})
        assert (status, found["count"]) == (200, 2)
        assert found["done"] == "2 messages requeued"
        _, found = await sent("POST", "/drop", json={"end": 1})
        assert found["done"] == "1 message dropped"
        _, found = await sent("GET", "/count")
        assert found["pending"] == 1
        for wrong in ({"offsets": [3]}, {"offsets": 3}, {"start": -1}, {"reason": 7}):
            status, found = await sent("POST", "/drop", json=wrong)
            assert (status, found["code"]) == (400, "INVALID_ARGUMENT"), wrong
        assert payloads(source) == [b"1", b"2"]
