"""The part of the HTTP API that changes things: requests become operations, answers become words.

Owns: parameters and answers. Does not own: paths and errors (`api`), what is done and who may do it
(`ister.broker.operations`: these handlers call the methods that gRPC serves, here or at the broker
that has the topic, with the caller's credentials). Messages are published here, and not forwarded.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from typing import Final, Protocol, TypeVar

from aiohttp import web
from google.protobuf.message import Message

from ister.base.clock import Clock
from ister.base.model import JsonObject, MessageId, Start, StreamMessage, TopicName
from ister.base.partitions import partition_of
from ister.base.positions import parse_position, to_milliseconds
from ister.broker.http.requests import read_body, topic_of
from ister.broker.observe.subscriptions import describe_subscription
from ister.broker.observe.views import Views
from ister.broker.policies import NAMES
from ister.broker.publish.producers import producer_id
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.services.admin import decode_policy, encode_policy
from ister.broker.topics.topics import ElsewhereError
from ister.bucket.pipeline import PipelineKeys, request_job
from ister.errors import AlreadyExistsError, ConflictError, InvalidRequestError, NotFoundError
from ister.metadata.base import MetadataStore
from ister.subscription.policy import FailurePolicy
from ister.wire import Rpc, danube_admin, ister_api, services

PRODUCER_NAME: Final = "dashboard"
"""The producer of messages that are published here."""

_PARTITIONS_MAX: Final = 1000
_ATTRIBUTES_MAX: Final = 100
_TOPICS_ASKED_MAX: Final = 1001
_GONE_CHECK_SECONDS: Final = 1.0
_OFFSET_MAX: Final = (1 << 63) - 1
_TEXTS: Final = {
    "reason": "reason",
    "source": "source_topic",
    "subscription": "source_subscription",
    "to": "to",
}
_NUMBERS: Final = ("start", "end", "limit")

_Letters = ister_api.DeadLettersRequest
_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_T = TypeVar("_T")


class ChangesContext(Protocol):
    """What the handlers use."""

    @property
    def views(self) -> Views:
        """The broker's views."""
        ...

    @property
    def metadata(self) -> MetadataStore:
        """The metadata store."""
        ...

    @property
    def clock(self) -> Clock:
        """The broker's clock."""
        ...

    async def call(self, rpc: Rpc[_Request, _Response], request: _Request) -> _Response:
        """Runs an operation for the current caller, here or at another broker."""
        ...


class Changes:
    """Handles HTTP requests that change something. Used on the broker's loop."""

    def __init__(self, guard: Guard, served: Callable[[], ChangesContext]) -> None:
        self._guard = guard
        self._served = served

    async def _call(self, rpc: Rpc[_Request, _Response], request: _Request) -> _Response:
        return await self._served().call(rpc, request)

    async def _document(
        self, rpc: Rpc[_Request, ister_api.Document], request: _Request
    ) -> JsonObject:
        found: JsonObject = json.loads((await self._call(rpc, request)).json)
        return found

    def _require(self, permission: Permission, topic: str | None = None) -> None:
        """Refuses a caller before the request tells anything; the operation checks, and audits."""
        if not self._guard.allows(current_principal(), permission, topic=topic):
            self._guard.check(current_principal(), permission, topic=topic)

    async def _partitions(self, name: str) -> list[str]:
        """The partitions of a topic; the topic itself if it has none."""
        topics = self._served().views.topics
        return [name] if topics.find_open(name) is not None else await topics.names.partitions(name)

    async def _existing(self, name: str) -> list[str]:
        """As `_partitions`, of a topic that the caller may manage."""
        self._require(Permission.MANAGE_TOPIC, name)
        found = await self._partitions(name)
        if not found:
            raise NotFoundError(f"topic {name} does not exist", topic=name)
        return found

    # -- topics -----------------------------------------------------------------------------

    async def create(self, request: web.Request) -> JsonObject:
        """Creates a topic, plain or partitioned."""
        body = await read_body(request)
        name = str(TopicName.parse(_text(body, "topic")))
        self._require(Permission.MANAGE_TOPIC, name)
        partitions = _whole(body, "partitions", high=_PARTITIONS_MAX)
        if await self._partitions(name):
            raise AlreadyExistsError(f"topic {name} already exists; unchanged", topic=name)
        await self._call(
            services.Admin.CreateTopic,
            ister_api.CreateTopicRequest(
                topic=name,
                partitions=partitions,
                ack=_text(body, "ack"),
                codec=_text(body, "codec"),
                non_reliable=body.get("is_reliable") is False,
            ),
        )
        what = f" with {partitions} partition{'' if partitions == 1 else 's'}" if partitions else ""
        return {"done": f"topic {name} was created{what}", "topic": name}

    async def delete(self, request: web.Request) -> JsonObject:
        """Deletes a topic with all its messages; `confirm` must be its name."""
        name = topic_of(request)
        if (await read_body(request)).get("confirm") != name:
            raise InvalidRequestError(
                f"not confirmed: deleting {name} deletes all its messages",
                hint=f'send {{"confirm": "{name}"}}',
            )
        await self._call(services.TopicAdmin.DeleteTopic, danube_admin.TopicRequest(name=name))
        return {"done": f"topic {name} was deleted", "topic": name}

    async def set_policies(self, request: web.Request) -> JsonObject:
        """Changes a topic's own limits: a number sets one, null inherits it again."""
        name, body = topic_of(request), await read_body(request)
        existing = await self._existing(name)
        if not body or not body.keys() <= set(NAMES):
            raise InvalidRequestError(
                f"policies are numbers or null, by name: {', '.join(NAMES)}",
                hint='such as {"max_publish_rate": 1000}',
            )
        in_force: JsonObject = {}
        for one in existing:
            own = {**await self._served().views.own_policies(one), **body}
            text = json.dumps({key: value for key, value in own.items() if value is not None})
            answer = await self._call(
                services.Admin.SetTopicPolicies,
                ister_api.SetPoliciesRequest(name=one, policies=text),
            )
            in_force = json.loads(answer.policies)
        return {"done": f"policies of {name} were changed", "policies": in_force}

    async def set_namespace_policies(self, request: web.Request) -> JsonObject:
        """Replaces the limits of a namespace's topics, at all brokers."""
        namespace, body = request.match_info["namespace"], await read_body(request)
        asked = ister_api.SetPoliciesRequest(name=namespace, policies=json.dumps(body))
        await self._call(services.Admin.SetNamespacePolicies, asked)
        return {"done": f"policies of namespace {namespace} were changed", "policies": body}

    async def unload(self, request: web.Request) -> JsonObject:
        """Hands a topic over to another broker, or closes it."""
        self._require(Permission.MANAGE_TOPIC, topic_of(request))
        views = self._served().views
        topics, name = views.topics, await plain_topic(views, request)
        await read_body(request)
        asked = danube_admin.TopicRequest(name=name)
        try:
            is_reliable = (await topics.get(name)).is_reliable
        except ElsewhereError as error:
            await self._call(services.TopicAdmin.UnloadTopic, asked)
            return {"done": f"{name} was unloaded by broker {error.member.broker_url}"}
        await self._call(services.TopicAdmin.UnloadTopic, asked)
        if topics.log.stores is None or not is_reliable:
            what = "it is closed until it is used again"
        elif len(await views.brokers()) > 1:
            what = "it is in the bucket, and assigned to another broker"
        else:
            what = "it is in the bucket; this broker opens it again when it is used"
        return {"done": f"{name} was unloaded: {what}"}

    async def move(self, request: web.Request) -> JsonObject:
        """Moves a topic to another broker."""
        name = topic_of(request)
        self._require(Permission.MANAGE_TOPIC, name)
        to = (await read_body(request)).get("to")
        if not isinstance(to, str) or not to:
            raise InvalidRequestError("to must be the node of a broker", hint='such as {"to": "…"}')
        asked = ister_api.MoveTopicRequest(topic=name, to=to)
        node = (await self._document(services.Admin.MoveTopic, asked))["node"]
        return {"done": f"{name} is at broker {node}", "topic": name, "node": node}

    async def take_over(self, request: web.Request) -> JsonObject:
        """Takes over a topic; without `confirm`, only says what that would give up."""
        name = topic_of(request)
        self._require(Permission.MANAGE_TOPIC, name)
        confirm = await _flag(request, "confirm")
        asked = ister_api.TakeOverRequest(topic=name, confirm=confirm)
        found = await self._call(services.Admin.TakeOverTopic, asked)
        what = (
            f"messages at offset {found.offset} and later that only the disk of node "
            f"{found.node} has"
        )
        text = f"{name} was taken over; given up: {what}"
        if not confirm:
            text = f"nothing was done; a take-over of {name} would give up {what}"
        # `done` is what has happened, in words, as in all answers to changes.
        content: JsonObject = {"topic": name, "node": found.node, "offset": found.offset}
        return {**content, "is_done": confirm, "done": text}

    # -- subscriptions ----------------------------------------------------------------------

    async def seek(self, request: web.Request) -> JsonObject:
        """Moves a subscription's cursor."""
        self._require(Permission.MANAGE_TOPIC, topic_of(request))
        views = self._served().views
        name, subscription = await plain_topic(views, request), request.match_info["subscription"]
        asked = _seek(name, subscription, (await read_body(request)).get("to"))
        found = await _while_connected(request, self._call(services.Admin.Seek, asked))
        told: JsonObject = {
            "done": f"subscription {subscription} continues at offset {found.cursor}",
            "offset": found.cursor,
        }
        topic = views.topics.find_open(name)
        if topic is not None:
            told["subscription"] = describe_subscription(topic.subscription(subscription))
        return told

    async def set_failure_policy(self, request: web.Request) -> JsonObject:
        """Changes what happens to messages that fail; omitted fields are unchanged."""
        name, subscription = topic_of(request), request.match_info["subscription"]
        body = await read_body(request)
        for one in await self._existing(name):
            known = await self._call(
                services.TopicAdmin.GetSubscriptionFailurePolicy,
                danube_admin.GetSubscriptionFailurePolicyRequest(
                    topic=one, subscription=subscription
                ),
            )
            before = decode_policy(known.failure_policy).to_json()
            unknown = body.keys() - before.keys()
            if unknown:
                raise InvalidRequestError(
                    f"unknown field {min(unknown)!r}", hint=f"use one of: {', '.join(before)}"
                )
            policy = FailurePolicy.from_json({**before, **body})
            await self._call(
                services.TopicAdmin.SetSubscriptionFailurePolicy,
                danube_admin.SetSubscriptionFailurePolicyRequest(
                    topic=one, subscription=subscription, failure_policy=encode_policy(policy)
                ),
            )
        return {"done": f"failure policy of {subscription} was changed"}

    async def unsubscribe(self, request: web.Request) -> JsonObject:
        """Deletes a subscription without consumers; `confirm` must be its name."""
        name, subscription = topic_of(request), request.match_info["subscription"]
        if (await read_body(request)).get("confirm") != subscription:
            raise InvalidRequestError(
                f"not confirmed: deleting subscription {subscription} deletes its position",
                hint=f'send {{"confirm": "{subscription}"}}',
            )
        await self._call(
            services.TopicAdmin.Unsubscribe,
            danube_admin.SubscriptionRequest(topic=name, subscription=subscription),
        )
        return {"done": f"subscription {subscription} was deleted"}

    # -- messages ---------------------------------------------------------------------------

    async def publish(self, request: web.Request) -> JsonObject:
        """Publishes a message; answered when it has reached the topic's ack level."""
        name, body = topic_of(request), await read_body(request)
        self._guard.check(current_principal(), Permission.PRODUCE, topic=name)
        key = _text(body, "key") or None
        served = self._served()
        topics = served.views.topics
        partitions = await self._partitions(name)
        if partitions and partitions != [name]:
            count = len(partitions)
            name = partitions[secrets.randbelow(count) if key is None else partition_of(key, count)]
        topic = await topics.get(name)
        principal = str(current_principal()) if self._guard.is_on else ""
        producer = _producer(principal)
        await topics.admission.claim(topic, producer, principal)
        offset = await topic.publish(
            StreamMessage(
                request_id=0,
                msg_id=MessageId(
                    producer_id=producer_id(name, producer),
                    topic_name=name,
                    broker_addr=topics.cluster.own.broker_url,
                ),
                payload=_payload(body),
                publish_time=served.clock.now_ns() // 1_000_000,
                producer_name=producer,
                attributes=_attributes(body),
                routing_key=key,
            ),
            principal=principal,
        )
        if not topic.is_reliable:
            return {"done": f"published to {name}, which keeps no messages", "topic": name}
        return {"done": f"published to {name} at offset {offset}", "topic": name, "offset": offset}

    # -- dead letters -----------------------------------------------------------------------

    async def requeue(self, request: web.Request) -> JsonObject:
        """Publishes letters to the topic that they failed in."""
        asked = parse_letters(topic_of(request), await read_body(request))
        return _said("requeued", await self._document(services.DeadLetters.Requeue, asked))

    async def drop(self, request: web.Request) -> JsonObject:
        """Resolves letters without publishing them."""
        asked = parse_letters(topic_of(request), await read_body(request))
        return _said("dropped", await self._document(services.DeadLetters.Drop, asked))

    # -- the cluster ------------------------------------------------------------------------

    async def rebalance(self, request: web.Request) -> JsonObject:
        """Moves topics to even out the load, or plans that."""
        self._require(Permission.MANAGE_BROKER)
        dry_run = await _flag(request, "dry_run")
        asked = ister_api.RebalanceRequest(dry_run=dry_run)
        found = await self._document(services.Admin.Rebalance, asked)
        count = len(found["moves"]) if isinstance(found["moves"], list) else 0
        return {"done": f"{count} topics {'would move' if dry_run else 'are moving'}", **found}

    async def drain(self, request: web.Request) -> JsonObject:
        """Makes a broker hand its topics over and take no new ones."""
        self._require(Permission.MANAGE_BROKER)
        await read_body(request)
        node = request.match_info["node"]
        asked = ister_api.DrainBrokerRequest(broker=node)
        found = await self._document(services.Admin.DrainBroker, asked)
        text = f"broker {node} is draining: {found['moved']} of {found['total']} topics"
        return {"done": f"{text} were handed over", **found}

    async def activate(self, request: web.Request) -> JsonObject:
        """Makes a broker take topics again."""
        self._require(Permission.MANAGE_BROKER)
        await read_body(request)
        node = request.match_info["node"]
        await self._call(services.Admin.ActivateBroker, ister_api.BrokerName(broker=node))
        return {"done": f"broker {node} takes topics", "node": node, "state": "active"}

    # -- the pipeline and the clock ---------------------------------------------------------

    async def request_job(self, request: web.Request) -> JsonObject:
        """Asks the pipeline for a job."""
        body = await read_body(request)
        job, topics = body.get("job"), body.get("topics")
        if topics is None:
            self._guard.check(current_principal(), Permission.MANAGE_BROKER)
        elif not isinstance(topics, list) or not all(isinstance(one, str) for one in topics):
            raise InvalidRequestError("topics must be a list of names, or null for all topics")
        else:
            topics = [str(TopicName.parse(topic)) for topic in topics[:_TOPICS_ASKED_MAX]]
            for topic in topics:
                self._guard.check(current_principal(), Permission.MANAGE_TOPIC, topic=topic)
        if not isinstance(job, str):
            raise InvalidRequestError("job must be a name", hint='such as {"job": "compact"}')
        served = self._served()
        storage = served.views.topics.config.storage
        if not storage.mode.has_bucket:
            raise ConflictError(
                f"no pipeline: storage.mode is {storage.mode.value}, which has no bucket",
                hint="set storage.mode to wal_cloud",
            )
        asked = await served.views.query_threads.run(
            request_job,
            served.metadata,
            PipelineKeys(storage.metadata.root_prefix),
            job,
            by=str(current_principal()),
            topics=topics,
            clock=served.clock,
        )
        # Others may have requested topics that the caller may not see.
        told = {**asked.as_json(), "topics": topics if asked.topics is not None else None}
        which = "" if topics is None else f" of {', '.join(topics[:3])}"
        more = len(topics or ()) - 3
        which += f" and {more} more topics" if more > 0 else ""
        return {
            "done": f"requested {job}{which}; the pipeline starts it as soon as it can",
            "request": {**told, "job": job, "state": "waiting"},
        }

    async def confirm_clock(self, request: web.Request) -> JsonObject:
        """Trusts the clock again after a step."""
        self._guard.check(current_principal(), Permission.MANAGE_BROKER)
        await read_body(request)
        served = self._served()
        step = await served.views.query_threads.run(served.views.topics.log.confirm_clock)
        if step is None:
            return {"done": "nothing to confirm: the clock is trusted", "seconds": None}
        return {
            "done": "clock confirmed; deletion by age resumes",
            "seconds": round(step.seconds),
        }


async def plain_topic(views: Views, request: web.Request) -> str:
    """The topic of a request that must name a single topic."""
    name, topics = topic_of(request), views.topics
    if topics.find_open(name) is None:
        partitions = await topics.names.partitions(name)
        if partitions and partitions != [name]:
            raise InvalidRequestError(
                f"{name} is a partitioned topic with {len(partitions)} partitions",
                topic=name,
                hint=f"name one of them, such as {partitions[0]}",
            )
    return name


async def _while_connected(request: web.Request, work: Coroutine[object, object, _T]) -> _T:
    """Does something that may take long for as long as the caller waits for it."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_GONE_CHECK_SECONDS))[0]:
            if request.transport is None:
                task.cancel()
        return task.result()
    finally:
        task.cancel()


def _producer(principal: str) -> str:
    """The producer of messages that are published here; a name belongs to one principal."""
    return f"{PRODUCER_NAME} {principal}" if principal else PRODUCER_NAME


# -- parts of requests ----------------------------------------------------------------------


def _text(body: Mapping[str, object], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string")
    return value


def _whole(body: Mapping[str, object], name: str, *, high: int) -> int:
    value = body.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from 0 to {high}")
    return value


def _payload(body: Mapping[str, object]) -> bytes:
    encoded, text = body.get("payload_base64"), body.get("payload")
    if encoded is None:
        if not isinstance(text, str):
            raise InvalidRequestError(
                "payload must be a string", hint="use payload_base64 for binary data"
            )
        return text.encode()
    try:
        return base64.b64decode(encoded if isinstance(encoded, str) else b"?", validate=True)
    except ValueError as error:
        raise InvalidRequestError("payload_base64 is not valid base64") from error


def _attributes(body: Mapping[str, object]) -> dict[str, str]:
    found = body.get("attributes") or {}
    if (
        not isinstance(found, dict)
        or len(found) > _ATTRIBUTES_MAX
        or not all(isinstance(value, str) for value in found.values())
    ):
        raise InvalidRequestError(
            f"attributes must be an object of at most {_ATTRIBUTES_MAX} strings",
            hint='such as {"source": "web"}',
        )
    return found


async def _flag(request: web.Request, name: str) -> bool:
    value = (await read_body(request)).get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false")
    return value


def _parse_to(to: object) -> Start:
    if isinstance(to, int) and not isinstance(to, bool) and 0 <= to < 1 << 63:
        return to
    if isinstance(to, str):
        return parse_position(to)
    raise InvalidRequestError(
        "invalid `to`: use earliest, latest, an offset, or a time such as t:2026-01-31T12:00:00Z"
    )


def _seek(topic: str, subscription: str, to: object) -> ister_api.SeekRequest:
    start, asked = _parse_to(to), ister_api.SeekRequest(topic=topic, subscription=subscription)
    if isinstance(start, int):
        asked.offset = start
    elif isinstance(start, datetime):
        asked.publish_time_ms = to_milliseconds(start)
    elif start == "earliest":
        asked.earliest = True
    else:
        asked.latest = True
    return asked


def _said(verb: str, found: JsonObject) -> JsonObject:
    """The answer to a change; as elsewhere, `done` is a sentence."""
    failed = found["failed"]
    text = f"{found['done']} message{'' if found['done'] == 1 else 's'} {verb}"
    if isinstance(failed, list) and failed:
        text += f"; {len(failed)} failed and stay pending: {failed[0]['error']}"
    return {**found, "done": text, "count": found["done"]}


def parse_letters(topic: str, given: Mapping[str, object]) -> _Letters:
    """The request about dead letters that a query or a body stands for."""
    asked = _Letters(topic=topic)
    for name, field in _TEXTS.items():
        text = given.get(name) or ""
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must be a string")
        setattr(asked, field, text)
    for name in _NUMBERS:
        setattr(asked, name, _offset(name, given.get(name) or 0))
    ranges = given.get("offsets") or []
    if not isinstance(ranges, list):
        raise InvalidRequestError("offsets must be a list", hint="such as [[0, 5], [7, 8]]")
    for one in ranges:
        if not isinstance(one, list) or len(one) != 2:
            raise InvalidRequestError("offsets must be pairs", hint="such as [[0, 5], [7, 8]]")
        asked.offsets.extend(_offset("offsets", bound) for bound in one)
    return asked


def _offset(name: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 19:
        value = int(value)
    high = (1 << 32) - 1 if name == "limit" else _OFFSET_MAX
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise InvalidRequestError(f"{name} must be a whole number, not {str(value)[:40]!r}")
    return value
