"""The part of the HTTP API that changes topics and subscriptions, and publishes messages.

    POST /api/topics                                        create
    POST /api/topics/{ns}/{topic}/delete                    {"confirm": name}
    POST /api/topics/{ns}/{topic}/publish                   one message
    POST /api/topics/{ns}/{topic}/policies                  limits
    POST /api/topics/{ns}/{topic}/subscriptions/{s}/policy  failure policy
    POST /api/topics/{ns}/{topic}/subscriptions/{s}/delete

Owns: parameters and answers. Does not own: paths and errors (`api`), what is done and who may do it
(`ister.broker.services`, the services of gRPC, which these handlers call). What another broker has
to do is forwarded to it, with the caller's credentials; messages are not.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from aiohttp import web
from google.protobuf.message import Message

from ister.base.clock import Clock
from ister.base.model import JsonObject, MessageId, StreamMessage, TopicName
from ister.base.partitions import partition_of
from ister.broker.observe.cluster_api import ask_other
from ister.broker.observe.requests import read_body, topic_of
from ister.broker.observe.views import Views
from ister.broker.policies import NAMES
from ister.broker.publish.producers import producer_id
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.services.admin import decode_policy, encode_policy
from ister.broker.topics.open_topics import ElsewhereError
from ister.errors import AlreadyExistsError, InvalidRequestError
from ister.subscription.policy import FailurePolicy
from ister.wire import Rpc, danube_admin, ister_api, services

PRODUCER_NAME: Final = "dashboard"
"""The producer of messages that are published here."""

_PARTITIONS_MAX: Final = 1000
_ATTRIBUTES_MAX: Final = 100

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class TopicApiContext(Protocol):
    """What the handlers use."""

    @property
    def views(self) -> Views:
        """The broker's views."""
        ...

    @property
    def clock(self) -> Clock:
        """The broker's clock."""
        ...

    async def call(self, rpc: Rpc[_Request, _Response], request: _Request) -> _Response:
        """Calls a service of this broker on behalf of the current caller."""
        ...


class TopicApi:
    """Handles HTTP requests that change topics. Used on the broker's loop."""

    def __init__(self, guard: Guard, served: Callable[[], TopicApiContext]) -> None:
        self._guard = guard
        self._served = served

    async def _call(self, rpc: Rpc[_Request, _Response], request: _Request) -> _Response:
        """Calls a service here, or at the broker that has the topic."""
        served = self._served()
        try:
            return await served.call(rpc, request)
        except ElsewhereError as error:
            return await ask_other(served.views, error, rpc, request)

    async def _partitions(self, name: str) -> list[str]:
        """The partitions of a topic; the topic itself if it has none."""
        topics = self._served().views.topics
        return [name] if topics.find_open(name) is not None else await topics.partitions(name)

    # -- topics -----------------------------------------------------------------------------

    async def create(self, request: web.Request) -> JsonObject:
        """Creates a topic, plain or partitioned."""
        body = await read_body(request)
        name = str(TopicName.parse(_text(body, "topic")))
        self._guard.check(current_principal(), Permission.MANAGE_TOPIC, topic=name)
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
        self._guard.check(current_principal(), Permission.MANAGE_TOPIC, topic=name)
        if not body or not body.keys() <= set(NAMES):
            raise InvalidRequestError(
                f"policies are numbers or null, by name: {', '.join(NAMES)}",
                hint='such as {"max_publish_rate": 1000}',
            )
        in_force: JsonObject = {}
        for one in await self._partitions(name):
            own = {**await self._served().views.own_policies(one), **body}
            text = json.dumps({key: value for key, value in own.items() if value is not None})
            answer = await self._call(
                services.Admin.SetTopicPolicies,
                ister_api.SetPoliciesRequest(name=one, policies=text),
            )
            in_force = json.loads(answer.policies)
        return {"done": f"policies of {name} were changed", "policies": in_force}

    # -- subscriptions ----------------------------------------------------------------------

    async def set_failure_policy(self, request: web.Request) -> JsonObject:
        """Changes what happens to messages that fail; omitted fields are unchanged."""
        name, subscription = topic_of(request), request.match_info["subscription"]
        body = await read_body(request)
        for one in await self._partitions(name):
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
