"""What an operator does with topics, subscriptions, namespaces and rights.

Calls of ister.Admin and danube_admin.

Calls go to the broker that has the topic, and are repeated until it answers. One that was carried
out and whose answer was lost is not an error when it is repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ister.client.network import Network
from ister.client.starts import milliseconds_of
from ister.errors import AlreadyExistsError, InvalidRequestError, NotFoundError
from ister.model import AckLevel, Codec, Start, TopicName
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy

__all__ = ["AdminCalls", "SubscriptionDescription", "TopicDescription"]

_BACKOFFS: Final = (Backoff.FIXED, Backoff.EXPONENTIAL)
_POISONS: Final = (PoisonPolicy.DEAD_LETTER, PoisonPolicy.BLOCK, PoisonPolicy.DROP)
_ADMIN: Final = "ister.Admin"
_TOPICS: Final = "danube_admin.TopicAdmin"
_SECURITY: Final = "danube_admin.SecurityAdmin"
_NAMESPACES: Final = "danube_admin.NamespaceAdmin"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDescription:
    """Where a subscription is, and what holds it up."""

    topic: str
    subscription: str
    kind: str
    cursor: int
    """The first offset that is not acknowledged."""
    lag: int
    """Messages from the cursor to the end."""
    in_flight: int
    waiting: int
    """Messages that come again, now or later."""
    blocked: int | None
    """The offset that stops the subscription; None if it is not stopped."""
    consumers: tuple[str, ...]
    active: str | None
    """The consumer that gets the messages of an exclusive or failover subscription."""
    max_unacked_messages: int
    principals: tuple[str, ...] | None = None
    """Those who may use it; None for all who may consume the topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """How far a topic has come, and who uses it. The watermarks are those of `ister.Watermarks`."""

    topic: str
    partitions: tuple[str, ...]
    """Empty unless it is a partitioned topic; then the rest says nothing, and theirs does."""
    is_reliable: bool
    ack: str
    codec: str
    incarnation: str
    earliest: int
    trimmed: int
    tiered: int
    synced: int
    written: int
    next: int
    producers: int
    subscriptions: tuple[SubscriptionDescription, ...]
    policies: Mapping[str, Any] = field(default_factory=dict)


class AdminCalls:
    """See the module header. Belongs to the network's loop."""

    def __init__(self, network: Network) -> None:
        self._network = network

    # -- topics -----------------------------------------------------------------------------

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 0,
        ack: AckLevel | str | None = None,
        codec: Codec | str | None = None,
    ) -> TopicDescription:
        """Makes a topic, unless it is there.

        Args:
            topic: Its name.
            partitions: Not 0 makes so many topics, with `-part-0`, `-part-1`, ... behind the name.
            ack: What an acknowledged message survives; the broker's default.
            codec: How messages are encoded; the broker's default.

        Raises:
            AlreadyExistsError: There is one of that name that is partitioned, and this is not to
                be; or the other way round; or it has another number of partitions.
            IsterError: It is refused, or no broker has answered in time.
        """
        TopicName.parse(topic)
        if not 0 <= partitions < 1 << 32:
            raise InvalidRequestError(f"{partitions} partitions")
        request = self._api.CreateTopicRequest(
            topic=topic,
            partitions=partitions,
            ack=str(ack) if ack is not None else "",
            codec=str(codec) if codec is not None else "",
        )
        return _topic(await self._network.call(_ADMIN, "CreateTopic", request))

    async def grow_topic(self, topic: str, partitions: int) -> list[str]:
        """Adds partitions to a partitioned topic; returns all of them.

        Which partition a routing key goes to depends on the number of partitions. Messages of one
        key that are published before and after may be in two partitions, and consumers may get
        them out of order.

        Args:
            topic: Its name.
            partitions: The new number. New ones have the ack level and codec of the first.

        Raises:
            NotFoundError: There is no such partitioned topic.
            AlreadyExistsError: It has more partitions.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names == [topic]:
            raise NotFoundError(f"{topic} is a topic without partitions", topic=topic)
        first = await self.describe_topic(names[0])
        request = self._api.CreateTopicRequest(
            topic=topic,
            partitions=partitions,
            ack=first.ack,
            codec=first.codec,
            non_reliable=not first.is_reliable,
            grow=True,
        )
        grown = await self._network.call(_ADMIN, "CreateTopic", request)
        return list(grown.partitions)

    async def describe_topic(self, topic: str) -> TopicDescription:
        """How far a topic has come, and who uses it.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names != [topic]:
            return _topic(self._api.TopicDescription(topic=topic, partitions=names))
        request = self._api.TopicName(topic=topic)
        return _topic(await self._network.call(_ADMIN, "DescribeTopic", request, topic=topic))

    async def topics(self, namespace: str = "default") -> list[str]:
        """The names of the topics of a namespace, partitions among them.

        Raises:
            NotFoundError: There is no such namespace.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = self._danube.NamespaceRequest(name=namespace)
        found = await self._network.call(_NAMESPACES, "GetNamespaceTopics", request)
        return list(found.topics)

    async def list_topics(
        self, namespace: str | None = None, *, with_partitions: bool = True
    ) -> list[dict[str, Any]]:
        """The topics that this client may know of, in short, by their names.

        Each is as `show_topic` has it, but for files, objects, policies and schema: of those there
        are the numbers alone (`files_total`, `objects_bytes`, ...). What another broker than the
        one that answers has is described by what the stores say about it.

        Args:
            namespace: Only those of one; all by default.
            with_partitions: Whether partitions are listed one by one; else those that they are
                parts of are, with the names in `partitions` and nothing else.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            request = self._api.ListTopicsRequest(
                namespace=namespace or "", with_partitions=with_partitions, after=after
            )
            answer = await self._network.call(_ADMIN, "ListTopics", request)
            page = json.loads(answer.json)
            found += page["topics"]
            after = page["next"] or ""
            if not after:
                return found

    async def show_topic(self, topic: str) -> dict[str, Any]:
        """All about a topic: tiers, watermarks, rates, subscriptions, policies, schema.

        The same dictionary as that of the HTTP API and of `ister topics describe --json`. Of a
        partitioned topic, the names in `partitions` and nothing else.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names != [topic]:
            return {"topic": topic, "parent": None, "partitions": names}
        request = self._api.TopicName(topic=topic)
        answer = await self._network.call(_ADMIN, "ShowTopic", request, topic=topic)
        view: dict[str, Any] = json.loads(answer.json)
        return view

    async def brokers(self) -> list[dict[str, Any]]:
        """All brokers that are up, the one that answers first.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        answer = await self._network.call(_ADMIN, "ShowBrokers", self._api.InfoRequest())
        brokers: list[dict[str, Any]] = json.loads(answer.json)["brokers"]
        return brokers

    async def partitions(self, topic: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; none if there is none.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        return await self._network.partitions(topic)

    async def delete_topic(self, topic: str) -> None:
        """Deletes a topic for good, with all its partitions, messages and subscriptions.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = self._danube.TopicRequest(name=name)
            await self._network.call(
                _TOPICS, "DeleteTopic", request, topic=name, done_before=NotFoundError
            )

    async def unload_topic(self, topic: str) -> None:
        """Has the broker of a topic hand it over, to another one where there is one.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = self._danube.TopicRequest(name=name)
            await self._network.call(_TOPICS, "UnloadTopic", request, topic=name)

    async def set_topic_policies(self, topic: str, policies: Mapping[str, int]) -> dict[str, Any]:
        """Replaces a topic's own bounds, by the names of `broker.policies`; those in force.

        Raises:
            NotFoundError: There is no such topic.
            InvalidRequestError: There is no such bound.
            IsterError: It is refused, or no broker has answered in time.
        """
        in_force: dict[str, Any] = {}
        for name in await self._partitions(topic):
            request = self._api.SetPoliciesRequest(name=name, policies=json.dumps(dict(policies)))
            found = await self._network.call(_ADMIN, "SetTopicPolicies", request, topic=name)
            in_force = json.loads(found.policies)
        return in_force

    async def release_producer(self, topic: str, producer: str) -> str | None:
        """Releases a producer name: it then belongs to the principal that uses it next.

        Args:
            topic: The topic; all partitions of a partitioned one.
            producer: The producer's name.

        Returns:
            The principal that it belonged to; None if the name was not claimed.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        owner = None
        for name in await self._partitions(topic):
            request = self._api.ProducerName(topic=name, producer=producer)
            found = await self._network.call(_ADMIN, "ReleaseProducer", request, topic=name)
            owner = found.principal or owner
        return owner

    # -- subscriptions ----------------------------------------------------------------------

    async def subscriptions(self, topic: str) -> list[str]:
        """The names of a topic's subscriptions, or of its partitions'.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        found: set[str] = set()
        for name in await self._partitions(topic):
            request = self._danube.TopicRequest(name=name)
            answer = await self._network.call(_TOPICS, "ListSubscriptions", request, topic=name)
            found.update(answer.subscriptions)
        return sorted(found)

    async def describe_subscription(self, topic: str, subscription: str) -> SubscriptionDescription:
        """Where a subscription is, and what holds it up.

        Raises:
            NotFoundError: There is none; or the topic is partitioned, and this asks for one.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = self._api.SubscriptionName(topic=topic, subscription=subscription)
        return _subscription(
            await self._network.call(_ADMIN, "DescribeSubscription", request, topic=topic)
        )

    async def seek(self, topic: str, subscription: str, *, to: Start) -> None:
        """Has a subscription go on from elsewhere, for all its consumers.

        Consumers that are connected may still hand out some messages that they had got before.

        Args:
            topic: The topic; a partitioned one, unless it is to an offset.
            subscription: Its name.
            to: An offset, a point in time, `earliest` or `latest`.

        Raises:
            NotFoundError: There is no such topic or subscription.
            OffsetOutOfRangeError: There is no such offset.
            InvalidRequestError: An offset in a partitioned topic, or no place at all.
            IsterError: It is refused, or no broker has answered in time.
        """
        where: dict[str, Any]
        if to in ("earliest", "latest"):
            where = {str(to): True}
        elif isinstance(to, datetime):
            where = {"publish_time_ms": milliseconds_of(to)}
        elif isinstance(to, int) and not isinstance(to, bool) and 0 <= to < 1 << 63:
            where = {"offset": to}
        else:
            raise InvalidRequestError(
                f"a subscription cannot go to {to!r}", hint="an offset, a time, earliest or latest"
            )
        names = await self._partitions(topic)
        if "offset" in where and names != [topic]:
            raise InvalidRequestError(
                "each partition has offsets of its own", topic=topic, hint="seek in one of them"
            )
        for name in names:
            request = self._api.SeekRequest(topic=name, subscription=subscription, **where)
            await self._network.call(_ADMIN, "Seek", request, topic=name)

    async def unsubscribe(self, topic: str, subscription: str) -> None:
        """Removes a subscription without consumers.

        Raises:
            NotFoundError: There is none.
            ConflictError: It has consumers.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = self._danube.SubscriptionRequest(topic=name, subscription=subscription)
            await self._network.call(
                _TOPICS, "Unsubscribe", request, topic=name, done_before=NotFoundError
            )

    async def failure_policy(self, topic: str, subscription: str) -> FailurePolicy:
        """What happens to messages that fail.

        Raises:
            NotFoundError: There is no such topic or subscription.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = self._danube.GetSubscriptionFailurePolicyRequest(
            topic=topic, subscription=subscription
        )
        found = await self._network.call(
            _TOPICS, "GetSubscriptionFailurePolicy", request, topic=topic
        )
        policy = found.failure_policy
        return FailurePolicy(
            max_redelivery_count=policy.max_redelivery_count,
            ack_timeout_ms=policy.ack_timeout_ms,
            base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
            max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
            backoff=_BACKOFFS[policy.backoff_strategy],
            poison=_POISONS[policy.poison_policy],
            dead_letter_topic=policy.dead_letter_topic or None,
        )

    async def set_failure_policy(
        self, topic: str, subscription: str, policy: FailurePolicy
    ) -> None:
        """Changes what happens to messages that fail, from now on.

        Raises:
            NotFoundError: There is no such topic or subscription.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = self._danube.SetSubscriptionFailurePolicyRequest(
                topic=name,
                subscription=subscription,
                failure_policy=self._danube.SubscriptionFailurePolicy(
                    max_redelivery_count=policy.max_redelivery_count,
                    ack_timeout_ms=policy.ack_timeout_ms,
                    base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
                    max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
                    backoff_strategy=_BACKOFFS.index(policy.backoff),
                    poison_policy=_POISONS.index(policy.poison),
                    dead_letter_topic=policy.dead_letter_topic,
                ),
            )
            await self._network.call(_TOPICS, "SetSubscriptionFailurePolicy", request, topic=name)

    async def set_max_unacked_messages(self, topic: str, subscription: str, messages: int) -> None:
        """Changes how many messages each consumer may have and not have acknowledged.

        Raises:
            NotFoundError: There is no such topic or subscription.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = self._danube.SetSubscriptionDispatchConfigRequest(
                topic=name,
                subscription=subscription,
                dispatch_config=self._danube.SubscriptionDispatchConfig(
                    max_unacked_messages=messages
                ),
            )
            await self._network.call(_TOPICS, "SetSubscriptionDispatchConfig", request, topic=name)

    async def restrict_subscription(
        self, topic: str, subscription: str, principals: Sequence[str] | None
    ) -> None:
        """Restricts who may consume, acknowledge, seek, change and remove a subscription.

        Principals with `manage_namespace` always may. Streams of others end within a second.

        Args:
            topic: The topic, or a partitioned one.
            subscription: Its name.
            principals: `user:NAME` or `service:NAME` (a name alone is a user); None removes the
                restriction: all who may consume the topic may use the subscription.

        Raises:
            NotFoundError: There is no such topic or subscription.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = self._api.RestrictSubscriptionRequest(
                topic=name,
                subscription=subscription,
                principals=principals or (),
                unrestricted=principals is None,
            )
            await self._network.call(_ADMIN, "RestrictSubscription", request, topic=name)

    # -- namespaces -------------------------------------------------------------------------

    async def namespaces(self) -> list[str]:
        """The names of all namespaces.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        found = await self._network.call(
            "danube_admin.BrokerAdmin", "ListNamespaces", self._danube.Empty()
        )
        return list(found.namespaces)

    async def create_namespace(self, name: str) -> None:
        """Makes a namespace.

        Raises:
            AlreadyExistsError: There is one of that name.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = self._danube.NamespaceRequest(name=name)
        await self._network.call(
            _NAMESPACES, "CreateNamespace", request, done_before=AlreadyExistsError
        )

    async def delete_namespace(self, name: str) -> None:
        """Removes a namespace without topics.

        Raises:
            NotFoundError: There is none.
            ConflictError: It has topics.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = self._danube.NamespaceRequest(name=name)
        await self._network.call(_NAMESPACES, "DeleteNamespace", request, done_before=NotFoundError)

    # -- rights -----------------------------------------------------------------------------

    async def grant_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """Gives a role to somebody: on a topic, in a namespace, or for everything.

        Args:
            principal: A user's name, or `service:NAME` for an API key or a program.
            role: `admin`, `producer`, `consumer`, or one that was made.
            topic: On this topic alone.
            namespace: In this namespace alone.

        Raises:
            NotFoundError: There is no such role.
            IsterError: It is refused, or no broker has answered in time.
        """
        kind, name = _principal(principal)
        scope, resource = _scope(topic, namespace)
        request = self._danube.CreateBindingRequest(
            binding=self._danube.BindingDefinition(
                id=_binding_id(kind, name, role),
                principal_type=kind,
                principal_name=name,
                role_names=[role],
                scope=scope,
                resource_name=resource,
            )
        )
        await self._network.call(_SECURITY, "CreateBinding", request)

    async def revoke_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """Revokes a role that `grant_role` gave with the same arguments.

        Raises:
            NotFoundError: The role was not granted.
            IsterError: It is refused, or no broker has answered in time.
        """
        kind, name = _principal(principal)
        scope, resource = _scope(topic, namespace)
        request = self._danube.DeleteBindingRequest(
            scope=scope, resource_name=resource, binding_id=_binding_id(kind, name, role)
        )
        await self._network.call(_SECURITY, "DeleteBinding", request, done_before=NotFoundError)

    # -- inside -----------------------------------------------------------------------------

    @property
    def _api(self) -> Any:  # noqa: ANN401 - protobuf's messages have no types
        return self._network.wire.ister_api

    @property
    def _danube(self) -> Any:  # noqa: ANN401
        return self._network.wire.danube_admin

    async def _partitions(self, topic: str) -> list[str]:
        names = await self._network.partitions(topic)
        if not names:
            raise NotFoundError(f"there is no topic {topic}", topic=topic)
        return names


def _principal(text: str) -> tuple[str, str]:
    kind, separator, name = text.partition(":")
    return (kind, name) if separator else ("user", text)


def _scope(topic: str | None, namespace: str | None) -> tuple[str, str]:
    if topic is not None and namespace is not None:
        raise InvalidRequestError("a role is given on a topic or in a namespace, not both")
    if topic is not None:
        return "topic", str(TopicName.parse(topic))
    return ("cluster", "") if namespace is None else ("namespace", namespace)


def _binding_id(kind: str, name: str, role: str) -> str:
    """The same for the same three, so that it can be taken back."""
    return hashlib.sha256(f"{kind}\n{name}\n{role}".encode()).hexdigest()[:16]


def _topic(found: Any) -> TopicDescription:  # noqa: ANN401
    return TopicDescription(
        topic=found.topic,
        partitions=tuple(found.partitions),
        is_reliable=found.reliable,
        ack=found.ack,
        codec=found.codec,
        incarnation=found.incarnation,
        earliest=found.earliest,
        trimmed=found.trimmed,
        tiered=found.tiered,
        synced=found.synced,
        written=found.written,
        next=found.next,
        producers=found.producers,
        subscriptions=tuple(_subscription(one) for one in found.subscriptions),
        policies=json.loads(found.policies) if found.policies else {},
    )


def _subscription(found: Any) -> SubscriptionDescription:  # noqa: ANN401
    return SubscriptionDescription(
        topic=found.topic,
        subscription=found.subscription,
        kind=found.kind,
        cursor=found.cursor,
        lag=found.lag,
        in_flight=found.in_flight,
        waiting=found.waiting,
        blocked=found.blocked if found.HasField("blocked") else None,
        consumers=tuple(found.consumers),
        active=found.active or None,
        max_unacked_messages=found.max_unacked_messages,
        principals=tuple(found.principals) if found.restricted else None,
    )
