"""danube_admin: brokers, namespaces, topics and subscriptions, in the words of Danube's tools.

Rights on namespaces and topics are asked for per call. Calls of Danube's own clustering, which
there is nothing of here, are UNIMPLEMENTED. Policies take effect at once, also on streams that are
open.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, NoReturn, Protocol

import grpc
from google.protobuf.message import Message

from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.rpc.handlers import Refused
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.services.consumer import KINDS
from ister.broker.topics.served_topic import AnySubscription
from ister.broker.topics.tasks import run_to_completion
from ister.broker.topics.topics import Topics
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    UnsupportedOperationError,
)
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from ister.wire import danube_admin

_BACKOFFS: Final = (Backoff.FIXED, Backoff.EXPONENTIAL)
_POISONS: Final = (PoisonPolicy.DEAD_LETTER, PoisonPolicy.BLOCK, PoisonPolicy.DROP)
_WINDOW_MAX: Final = 100_000


class _OfSubscription(Protocol):
    """A request about a subscription."""

    topic: str
    subscription: str


class _Service:
    def __init__(self, topics: Topics, guard: Guard) -> None:
        self._topics = topics
        self._guard = guard

    def _check(self, permission: Permission, **on: str) -> None:
        self._guard.check(current_principal(), permission, **on)

    async def _visible(self, namespace: str) -> list[str]:
        """The topics of a namespace that the caller may see.

        Raises:
            NotFoundError: There is no such namespace, and the caller may know that.
        """
        caller = current_principal()
        try:
            names = await self._topics.topics_of(namespace)
        except NotFoundError:
            if self._guard.allows(caller, Permission.LOOKUP, namespace=namespace):
                raise
            return []  # as of one that exists
        return self._guard.visible(caller, names)


class BrokerAdminService(_Service):
    """Serves what is asked about brokers."""

    async def ListBrokers(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.BrokerListResponse:
        """All brokers that are up."""
        self._check(Permission.MANAGE_BROKER)
        brokers = await asyncio.to_thread(self._topics.cluster.brokers)
        return danube_admin.BrokerListResponse(
            brokers=[
                danube_admin.BrokerInfo(
                    broker_id=one.node,
                    broker_addr=one.broker_url,
                    broker_role="broker",
                    admin_addr=one.broker_url,
                    broker_status="active",
                )
                for one in brokers
            ]
        )

    async def ListNamespaces(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.NamespaceListResponse:
        """All namespaces that the caller may see topics of."""
        names = await self._topics.namespaces()
        caller = current_principal()
        return danube_admin.NamespaceListResponse(
            namespaces=[
                name
                for name in names
                if self._guard.allows(caller, Permission.LOOKUP, namespace=name)
            ]
        )

    async def UnloadBroker(
        self, request: danube_admin.UnloadBrokerRequest, context: object
    ) -> danube_admin.UnloadBrokerResponse:
        """Hands all topics of this broker over to others."""
        self._check(Permission.MANAGE_BROKER)
        if request.broker_id not in ("", self._topics.cluster.own.node):
            raise NotFoundError("a broker unloads only its own topics; ask the other broker")
        brokers = await asyncio.to_thread(self._topics.cluster.brokers)
        if len(brokers) < 2:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, "there is no other broker to take the topics"
            )
        include, exclude = set(request.namespaces_include), set(request.namespaces_exclude)
        names = [
            topic.name
            for topic in self._topics.served
            if (not include or topic.parsed.namespace in include)
            and topic.parsed.namespace not in exclude
        ]
        failed: list[str] = []
        if not request.dry_run:
            for name in names:
                try:
                    await self._topics.unload(name)
                except IsterError:
                    failed.append(name)
        done = 0 if request.dry_run else len(names) - len(failed)
        return danube_admin.UnloadBrokerResponse(
            started=not request.dry_run,
            total=len(names),
            succeeded=done,
            failed=len(failed),
            pending=len(names) - done - len(failed),
            failed_topics=failed,
        )

    async def ActivateBroker(
        self, request: danube_admin.ActivateBrokerRequest, context: object
    ) -> danube_admin.ActivateBrokerResponse:
        """A broker that is up is active."""
        self._check(Permission.MANAGE_BROKER)
        is_own = request.broker_id in ("", self._topics.cluster.own.node)
        return danube_admin.ActivateBrokerResponse(success=is_own)

    async def _refuse(self, request: Message, context: object) -> NoReturn:
        raise UnsupportedOperationError(
            "brokers have no leader that would know, and topics are moved by unloading them",
            hint="each broker lists its own topics: ListBrokerTopics",
        )

    GetLeaderBroker = _refuse
    GetClusterBalance = _refuse
    TriggerRebalance = _refuse


class ClusterAdminService:
    """Answers for a cluster that has no members of its own: the metadata store has."""

    async def _refuse(self, request: Message, context: object) -> NoReturn:
        raise UnsupportedOperationError(
            "brokers have no consensus of their own", hint="see the metadata store's tools"
        )

    ClusterStatus = _refuse
    AddNode = _refuse
    PromoteNode = _refuse
    RemoveNode = _refuse


class NamespaceAdminService(_Service):
    """Serves what is asked about namespaces."""

    async def GetNamespaceTopics(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.TopicListResponse:
        """The topics of a namespace that the caller may see."""
        return danube_admin.TopicListResponse(topics=await self._visible(request.name))

    async def GetNamespacePolicies(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.PolicyResponse:
        """The policies of a namespace's topics."""
        self._check(Permission.MANAGE_NAMESPACE, namespace=request.name)
        policies = await self._topics.namespace_policies(request.name)
        return danube_admin.PolicyResponse(policies=policies.to_json())

    async def CreateNamespace(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.NamespaceResponse:
        """Creates a namespace."""
        self._check(Permission.MANAGE_NAMESPACE, namespace=request.name)
        await self._topics.create_namespace(request.name)
        return danube_admin.NamespaceResponse(success=True)

    async def DeleteNamespace(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.NamespaceResponse:
        """Removes a namespace without topics."""
        self._check(Permission.MANAGE_NAMESPACE, namespace=request.name)
        try:
            await self._topics.delete_namespace(request.name)
        except ConflictError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        return danube_admin.NamespaceResponse(success=True)


class TopicAdminService(_Service):
    """Serves what is asked about topics and subscriptions."""

    def __init__(self, topics: Topics, guard: Guard, schemas: SchemaRegistry) -> None:
        super().__init__(topics, guard)
        self._schemas = schemas

    async def ListNamespaceTopics(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.TopicInfoListResponse:
        """The topics of a namespace that the caller may see."""
        return self._list(await self._visible(request.name))

    async def ListBrokerTopics(
        self, request: danube_admin.BrokerRequest, context: object
    ) -> danube_admin.TopicInfoListResponse:
        """The topics that this broker has open."""
        if request.broker_id not in ("", self._topics.cluster.own.node):
            raise NotFoundError("a broker lists only its own topics; ask the other broker")
        return self._list([topic.name for topic in self._topics.served])

    def _list(self, names: list[str]) -> danube_admin.TopicInfoListResponse:
        infos = []
        for name in self._guard.visible(current_principal(), names):
            topic = self._topics.find_open(name)
            infos.append(
                danube_admin.TopicInfo(
                    name=name,
                    broker_id=self._topics.cluster.own.node if topic is not None else "",
                    delivery="" if topic is None else _delivery(is_reliable=topic.is_reliable),
                )
            )
        return danube_admin.TopicInfoListResponse(topics=infos)

    async def CreateTopic(
        self, request: danube_admin.NewTopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Makes a topic."""
        self._check(Permission.MANAGE_TOPIC, topic=request.name)
        await self._topics.get_or_create(
            request.name,
            is_reliable=request.dispatch_strategy == danube_admin.DispatchStrategy.Reliable,
            is_implied=False,
        )
        await self._bind(request, [request.name])
        return danube_admin.TopicResponse(success=True)

    async def CreatePartitionedTopic(
        self, request: danube_admin.PartitionedTopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Makes a topic of so many partitions."""
        self._check(Permission.MANAGE_TOPIC, topic=request.base_name)
        names = await self._topics.create_partitioned(
            request.base_name,
            request.partitions,
            is_reliable=request.dispatch_strategy == danube_admin.DispatchStrategy.Reliable,
        )
        await self._bind(request, names)
        return danube_admin.TopicResponse(success=True)

    async def _bind(
        self,
        request: danube_admin.NewTopicRequest | danube_admin.PartitionedTopicRequest,
        names: list[str],
    ) -> None:
        if request.HasField("schema_subject") and request.schema_subject:
            for name in names:
                try:
                    await asyncio.to_thread(
                        self._schemas.bind_producer, name, request.schema_subject
                    )
                except ConflictError as error:
                    raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error

    async def DeleteTopic(
        self, request: danube_admin.TopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Deletes a topic for good, or all partitions of one."""
        self._check(Permission.MANAGE_TOPIC, topic=request.name)
        await run_to_completion(self._delete(request.name))
        return danube_admin.TopicResponse(success=True)

    async def _delete(self, name: str) -> None:
        names = await self._topics.partitions(name)
        await self._topics.delete(name)
        for one in names:
            await asyncio.to_thread(self._schemas.forget_topic, one)

    async def UnloadTopic(
        self, request: danube_admin.TopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Hands a topic over, so that any broker may have it."""
        self._check(Permission.MANAGE_TOPIC, topic=request.name)
        await self._topics.unload(request.name)
        return danube_admin.TopicResponse(success=True)

    async def DescribeTopic(
        self, request: danube_admin.DescribeTopicRequest, context: object
    ) -> danube_admin.DescribeTopicResponse:
        """What a topic is."""
        self._check(Permission.LOOKUP, topic=request.name)
        topic = await self._topics.get(request.name)
        described = danube_admin.DescribeTopicResponse(
            name=topic.name,
            subscriptions=sorted(topic.subscriptions),
            broker_id=self._topics.cluster.own.node,
            delivery=_delivery(is_reliable=topic.is_reliable),
        )
        found = await asyncio.to_thread(self._schemas.topic_config, topic.name)
        if found is not None and found.subject:
            described.schema_subject = found.subject
            with suppress(NotFoundError):  # all versions of it were deleted
                latest = await asyncio.to_thread(self._schemas.latest, found.subject)
                described.schema_id = latest.schema_id
                described.schema_version = latest.version
                described.schema_type = latest.schema_type
                described.compatibility_mode = latest.compatibility_mode
        return described

    async def ListSubscriptions(
        self, request: danube_admin.TopicRequest, context: object
    ) -> danube_admin.SubscriptionListResponse:
        """The names of a topic's subscriptions, each once."""
        self._check(Permission.LOOKUP, topic=request.name)
        topic = await self._topics.get(request.name)
        return danube_admin.SubscriptionListResponse(subscriptions=sorted(topic.subscriptions))

    async def Unsubscribe(
        self, request: danube_admin.SubscriptionRequest, context: object
    ) -> danube_admin.SubscriptionResponse:
        """Removes a subscription without consumers."""
        self._check(Permission.MANAGE_TOPIC, topic=request.topic)
        topic = await self._topics.get(request.topic)
        self._check_use(topic.subscription(request.subscription), topic.name)
        try:
            await topic.unsubscribe(request.subscription)
        except ConflictError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        return danube_admin.SubscriptionResponse(success=True)

    async def SetSubscriptionFailurePolicy(
        self, request: danube_admin.SetSubscriptionFailurePolicyRequest, context: object
    ) -> danube_admin.SubscriptionResponse:
        """Changes what happens to messages that fail; in force at once."""
        self._check(Permission.MANAGE_TOPIC, topic=request.topic)
        subscription = await self._reliable(request)
        self._check_use(subscription, request.topic)
        policy = _parse_policy(request.failure_policy)
        if policy.dead_letter_topic == request.topic:
            raise InvalidRequestError("a topic cannot be its own dead-letter topic")
        if policy.dead_letter_topic is not None:
            # The broker publishes there on behalf of the caller.
            self._check(Permission.PRODUCE, topic=policy.dead_letter_topic)
            found = self._topics.find_open(policy.dead_letter_topic)
            if found is not None and not found.is_reliable:
                raise InvalidRequestError(
                    "the dead-letter topic is not reliable: it stores no messages"
                )
        await subscription.set_policy(policy)
        return danube_admin.SubscriptionResponse(success=True)

    async def GetSubscriptionFailurePolicy(
        self, request: danube_admin.GetSubscriptionFailurePolicyRequest, context: object
    ) -> danube_admin.GetSubscriptionFailurePolicyResponse:
        """What happens to messages that fail."""
        self._check(Permission.LOOKUP, topic=request.topic)
        subscription = await self._reliable(request)
        policy = subscription.stored.policy
        return danube_admin.GetSubscriptionFailurePolicyResponse(
            failure_policy=danube_admin.SubscriptionFailurePolicy(
                max_redelivery_count=policy.max_redelivery_count,
                ack_timeout_ms=policy.ack_timeout_ms,
                base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
                max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
                backoff_strategy=_BACKOFFS.index(policy.backoff),
                dead_letter_topic=policy.dead_letter_topic,
                poison_policy=_POISONS.index(policy.poison),
            ),
            subscription_type=KINDS.index(subscription.kind),
        )

    async def SetSubscriptionDispatchConfig(
        self, request: danube_admin.SetSubscriptionDispatchConfigRequest, context: object
    ) -> danube_admin.SubscriptionResponse:
        """Changes how many messages a consumer may have unacknowledged; in force at once."""
        self._check(Permission.MANAGE_TOPIC, topic=request.topic)
        subscription = await self._reliable(request)
        self._check_use(subscription, request.topic)
        window = request.dispatch_config.max_unacked_messages
        if not 1 <= window <= _WINDOW_MAX:
            raise InvalidRequestError(f"max_unacked_messages is from 1 to {_WINDOW_MAX}")
        await subscription.set_window(window)
        return danube_admin.SubscriptionResponse(success=True)

    async def GetSubscriptionDispatchConfig(
        self, request: danube_admin.GetSubscriptionDispatchConfigRequest, context: object
    ) -> danube_admin.GetSubscriptionDispatchConfigResponse:
        """How many messages a consumer may have unacknowledged."""
        self._check(Permission.LOOKUP, topic=request.topic)
        subscription = await self._reliable(request)
        return danube_admin.GetSubscriptionDispatchConfigResponse(
            dispatch_config=danube_admin.SubscriptionDispatchConfig(
                max_unacked_messages=subscription.window
            )
        )

    def _check_use(self, subscription: AnySubscription, topic: str) -> None:
        self._guard.check_subscription(current_principal(), subscription, topic=topic)

    async def _reliable(self, request: _OfSubscription) -> Dispatcher:
        topic = await self._topics.get(request.topic)
        subscription = topic.subscription(request.subscription)
        if not isinstance(subscription, Dispatcher):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, f"topic {topic.name} is not reliable"
            )
        return subscription


def _delivery(*, is_reliable: bool) -> str:
    return "Reliable" if is_reliable else "NonReliable"


def _parse_policy(message: danube_admin.SubscriptionFailurePolicy) -> FailurePolicy:
    if not 0 <= message.backoff_strategy < len(_BACKOFFS):
        raise InvalidRequestError(f"there is no backoff strategy {message.backoff_strategy}")
    if not 0 <= message.poison_policy < len(_POISONS):
        raise InvalidRequestError(f"there is no poison policy {message.poison_policy}")
    return FailurePolicy(
        max_redelivery_count=message.max_redelivery_count,
        ack_timeout_ms=message.ack_timeout_ms,
        base_redelivery_delay_ms=message.base_redelivery_delay_ms,
        max_redelivery_delay_ms=message.max_redelivery_delay_ms,
        backoff=_BACKOFFS[message.backoff_strategy],
        poison=_POISONS[message.poison_policy],
        dead_letter_topic=message.dead_letter_topic or None,
    )
