"""danube_admin: brokers, namespaces, topics and subscriptions, in the words of Danube's tools.

Rights on namespaces and topics are asked for per call. Policies take effect at once, also on open
streams.

A broker's id is a number here, in texts as well: Danube's tools read it as one. It is the value of
the 16 hexadecimal digits of the broker's node, which is its name everywhere else; requests may have
either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol

import grpc

from ister.base.model import TopicName
from ister.base.partitions import base_of_partition
from ister.broker.cluster.peers import is_forwarded
from ister.broker.operations import checks, conflicts_refused, needs
from ister.broker.rpc.handlers import Refused
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.services.consumer import KINDS
from ister.broker.topics.cluster_control import ClusterControl, broker_id, broker_number
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.errors import (
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from ister.wire import danube_admin

_BACKOFFS: Final = (Backoff.FIXED, Backoff.EXPONENTIAL)
_POISONS: Final = (PoisonPolicy.DEAD_LETTER, PoisonPolicy.BLOCK, PoisonPolicy.DROP)
_WINDOW_MAX: Final = 100_000
_PARALLEL_MAX: Final = 64


class _OfSubscription(Protocol):
    """A request about a subscription."""

    topic: str
    subscription: str


class _Service:
    def __init__(self, topics: Topics, guard: Guard) -> None:
        self._topics = topics
        self.guard = guard

    def _check(self, permission: Permission, **on: str) -> None:
        self.guard.check(current_principal(), permission, **on)

    async def _visible(self, namespace: str) -> list[str]:
        """The topics of a namespace that the caller may see."""
        caller = current_principal()
        try:
            names = await self._topics.names.of_namespace(namespace)
        except NotFoundError:
            if self.guard.allows(caller, Permission.LOOKUP, namespace=namespace):
                raise
            return []  # as of one that exists
        return self.guard.visible(caller, names)


class BrokerAdminService(_Service):
    """Serves what is asked about brokers."""

    def __init__(self, topics: Topics, guard: Guard, control: ClusterControl) -> None:
        super().__init__(topics, guard)
        self._control = control

    @needs(Permission.LOOKUP)
    async def ListBrokers(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.BrokerListResponse:
        """All brokers that are up."""
        brokers = await asyncio.to_thread(self._topics.cluster.brokers)
        leader: str | None = None
        with suppress(UnavailableError):
            leader = await self._control.leader()
        return danube_admin.BrokerListResponse(
            brokers=[
                danube_admin.BrokerInfo(
                    broker_id=broker_id(one.node),
                    broker_addr=one.broker_url,
                    broker_role="leader" if one.node == leader else "follower",
                    admin_addr=one.broker_url,
                    metrics_addr=one.http_url,
                    broker_status=one.state.value,
                )
                for one in brokers
            ]
        )

    @needs(Permission.LOOKUP)
    async def GetLeaderBroker(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.BrokerResponse:
        """The leader: the broker that assigns topics."""
        return danube_admin.BrokerResponse(leader=broker_id(await self._control.leader()))

    @checks("`lookup` on each namespace")
    async def ListNamespaces(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.NamespaceListResponse:
        """All namespaces that the caller may see topics of."""
        names = await self._topics.names.namespaces()
        caller = current_principal()
        return danube_admin.NamespaceListResponse(
            namespaces=[
                name
                for name in names
                if self.guard.allows(caller, Permission.LOOKUP, namespace=name)
            ]
        )

    @needs(Permission.MANAGE_BROKER)
    async def UnloadBroker(
        self, request: danube_admin.UnloadBrokerRequest, context: object
    ) -> danube_admin.UnloadBrokerResponse:
        """Makes a broker hand its topics over to others.

        Without namespaces, it also takes no new ones until it is activated.
        """
        include, exclude = set(request.namespaces_include), set(request.namespaces_exclude)

        def is_wanted(name: TopicName) -> bool:
            return (not include or name.namespace in include) and name.namespace not in exclude

        with conflicts_refused():
            drained = await self._control.drain(
                request.broker_id,
                is_wanted=is_wanted if include or exclude else None,
                at_once=min(request.max_parallel, _PARALLEL_MAX),
                timeout=request.timeout_seconds or None,
                dry_run=request.dry_run,
            )
        return danube_admin.UnloadBrokerResponse(
            started=not request.dry_run,
            total=drained.total,
            succeeded=drained.moved,
            failed=len(drained.failed),
            pending=drained.pending,
            failed_topics=drained.failed,
        )

    @needs(Permission.MANAGE_BROKER)
    async def ActivateBroker(
        self, request: danube_admin.ActivateBrokerRequest, context: object
    ) -> danube_admin.ActivateBrokerResponse:
        """Makes a broker take topics again."""
        await self._control.activate(request.broker_id)
        return danube_admin.ActivateBrokerResponse(success=True)

    @needs(Permission.LOOKUP)
    async def GetClusterBalance(
        self, request: danube_admin.ClusterBalanceRequest, context: object
    ) -> danube_admin.ClusterBalanceResponse:
        """How evenly the load is spread over the brokers that take topics."""
        balance, counts = await self._control.balance()
        margin = balance.mean * self._control.threshold
        return danube_admin.ClusterBalanceResponse(
            coefficient_of_variation=balance.variation,
            mean_load=balance.mean,
            max_load=max(balance.loads.values(), default=0.0),
            min_load=min(balance.loads.values(), default=0.0),
            std_deviation=balance.deviation,
            broker_count=len(balance.loads),
            brokers=[
                danube_admin.BrokerLoadInfo(
                    broker_id=broker_number(node),
                    load=load,
                    topic_count=counts.get(node, 0),
                    is_overloaded=load > balance.mean + margin,
                    is_underloaded=load < balance.mean - margin,
                )
                for node, load in balance.loads.items()
            ],
            assignment_strategy=self._control.strategy.value,
        )

    @needs(Permission.MANAGE_BROKER)
    async def TriggerRebalance(
        self, request: danube_admin.RebalanceRequest, context: object
    ) -> danube_admin.RebalanceResponse:
        """Moves topics to even out the load, or only plans that."""
        moves = await self._control.rebalance(dry_run=request.dry_run, moves_max=request.max_moves)
        return danube_admin.RebalanceResponse(
            success=True,
            moves_executed=0 if request.dry_run else len(moves),
            proposed_moves=[
                danube_admin.ProposedMove(
                    topic_name=move.topic,
                    from_broker=broker_number(move.source),
                    to_broker=broker_number(move.target),
                    estimated_load=move.load,
                    reason="rebalance",
                )
                for move in moves
            ],
        )


class ClusterAdminService(_Service):
    """Answers Danube's calls about its consensus: here, the brokers that are up are its members.

    Brokers join when they start and leave when they stop, so nothing is changed by a call: it
    succeeds if what it asks for is so already.
    """

    def __init__(self, topics: Topics, guard: Guard, control: ClusterControl) -> None:
        super().__init__(topics, guard)
        self._control = control

    @needs(Permission.MANAGE_CLUSTER)
    async def ClusterStatus(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.ClusterStatusResponse:
        """The brokers that are up, as voters, and the leader; 0 while there is none.

        There is neither a term nor a log, so these are 0.
        """
        members = await self._members()
        leader = 0
        with suppress(UnavailableError):
            leader = broker_number(await self._control.leader())
        return danube_admin.ClusterStatusResponse(
            leader_id=leader,
            voters=members,
            self_node_id=broker_number(self._topics.cluster.own.node),
            # Danube's tool passes it on to AddNode.
            raft_addr=self._topics.cluster.own.broker_url,
        )

    @needs(Permission.MANAGE_CLUSTER)
    async def AddNode(
        self, request: danube_admin.AddNodeRequest, context: object
    ) -> danube_admin.AddNodeResponse:
        """Tells whether a broker is a member."""
        is_done, text = await self._find(request.node_id)
        return danube_admin.AddNodeResponse(success=is_done, node_id=request.node_id, message=text)

    @needs(Permission.MANAGE_CLUSTER)
    async def PromoteNode(
        self, request: danube_admin.PromoteNodeRequest, context: object
    ) -> danube_admin.PromoteNodeResponse:
        """Tells whether a broker is a member: all of them are voters.

        NOT_FOUND for one that is not: Danube's tool ends with 0 after any response.
        """
        is_member, text = await self._find(request.node_id)
        if not is_member:
            raise NotFoundError(text)
        return danube_admin.PromoteNodeResponse(success=True, message=text)

    @needs(Permission.MANAGE_CLUSTER)
    async def RemoveNode(
        self, request: danube_admin.RemoveNodeRequest, context: object
    ) -> danube_admin.RemoveNodeResponse:
        """Tells whether a broker has left."""
        is_member, _ = await self._find(request.node_id)
        text = (
            f"the broker {request.node_id} is up: unload it and stop it, and it leaves the cluster"
            if is_member
            else f"the broker {request.node_id} is not a member"
        )
        return danube_admin.RemoveNodeResponse(success=not is_member, message=text)

    async def _members(self) -> list[int]:
        members = await asyncio.to_thread(self._topics.cluster.brokers)
        return sorted(broker_number(one.node) for one in members)

    async def _find(self, number: int) -> tuple[bool, str]:
        """Whether a broker is a member, and what to do if it is not."""
        if number in await self._members():
            return True, f"the broker {number} is a member: brokers join when they start"
        return False, (
            f"the broker {number} is not a member: start it with this cluster's bucket and "
            "metadata store, and it joins"
        )


class NamespaceAdminService(_Service):
    """Serves what is asked about namespaces."""

    @checks("`lookup` on each topic")
    async def GetNamespaceTopics(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.TopicListResponse:
        """The topics of a namespace that the caller may see."""
        return danube_admin.TopicListResponse(topics=await self._visible(request.name))

    @needs(Permission.MANAGE_NAMESPACE, namespace="name")
    async def GetNamespacePolicies(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.PolicyResponse:
        """The policies of a namespace's topics."""
        policies = await self._topics.names.namespace_policies(request.name)
        return danube_admin.PolicyResponse(policies=policies.to_json())

    @needs(Permission.MANAGE_NAMESPACE, namespace="name")
    async def CreateNamespace(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.NamespaceResponse:
        """Creates a namespace."""
        await self._topics.names.create_namespace(request.name)
        return danube_admin.NamespaceResponse(success=True)

    @needs(Permission.MANAGE_NAMESPACE, namespace="name")
    async def DeleteNamespace(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.NamespaceResponse:
        """Removes a namespace without topics."""
        with conflicts_refused():
            await self._topics.names.delete_namespace(request.name)
        return danube_admin.NamespaceResponse(success=True)


class TopicAdminService(_Service):
    """Serves what is asked about topics and subscriptions."""

    def __init__(
        self, topics: Topics, guard: Guard, schemas: SchemaRegistry, control: ClusterControl
    ) -> None:
        super().__init__(topics, guard)
        self._schemas = schemas
        self._control = control

    @checks("`lookup` on each topic")
    async def ListNamespaceTopics(
        self, request: danube_admin.NamespaceRequest, context: object
    ) -> danube_admin.TopicInfoListResponse:
        """The topics of a namespace that the caller may see."""
        names = await self._visible(request.name)
        owners = await asyncio.to_thread(self._topics.cluster.owners)
        return await self._list(names, owners)

    @checks("`lookup` on each topic")
    async def ListBrokerTopics(
        self, request: danube_admin.BrokerRequest, context: object
    ) -> danube_admin.TopicInfoListResponse:
        """The topics that a broker has open and the caller may see."""
        node = (await self._control.find(request.broker_id)).node
        if node == self._topics.cluster.own.node:
            names, owners = [topic.name for topic in self._topics.served], {}
        else:
            owners = await asyncio.to_thread(self._topics.cluster.owners)
            names = sorted(name for name, owner in owners.items() if owner == node)
        return await self._list(self.guard.visible(current_principal(), names), owners)

    async def _list(
        self, names: list[str], owners: Mapping[str, str]
    ) -> danube_admin.TopicInfoListResponse:
        """Topics, with the brokers that have them; `owners` has those of other brokers."""
        away = [name for name in names if self._topics.find_open(name) is None]
        unlogged = (
            set(await asyncio.to_thread(self._topics.records.non_reliable)) if away else set()
        )
        infos = []
        for name in names:
            topic = self._topics.find_open(name)
            is_reliable = name not in unlogged if topic is None else topic.is_reliable
            node = owners.get(name) if topic is None else self._topics.cluster.own.node
            infos.append(
                danube_admin.TopicInfo(
                    name=name,
                    broker_id=broker_id(node) if node is not None else "",
                    delivery=_delivery(is_reliable=is_reliable),
                )
            )
        return danube_admin.TopicInfoListResponse(topics=infos)

    @needs(Permission.MANAGE_TOPIC, topic="name")
    async def CreateTopic(
        self, request: danube_admin.NewTopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Makes a topic."""
        await self._topics.get_or_create(
            request.name,
            is_reliable=request.dispatch_strategy == danube_admin.DispatchStrategy.Reliable,
            is_implied=False,
            is_exact=True,
            check_growth=lambda base: self._check(Permission.MANAGE_TOPIC, topic=base),
        )
        await self._bind(request, [request.name])
        return danube_admin.TopicResponse(success=True)

    @needs(Permission.MANAGE_TOPIC, topic="base_name")
    async def CreatePartitionedTopic(
        self, request: danube_admin.PartitionedTopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Makes a topic of so many partitions."""
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
        for name in names if request.schema_subject else ():
            with conflicts_refused():
                await asyncio.to_thread(self._schemas.bind_producer, name, request.schema_subject)

    @needs(Permission.MANAGE_TOPIC, topic="name")
    async def DeleteTopic(
        self, request: danube_admin.TopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Deletes a topic for good, with all its partitions; not a partition alone."""
        base = base_of_partition(request.name)
        # Another broker, which deletes all of them, has this one delete its own.
        if base is not None and not is_forwarded():
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"Cannot delete individual partition {request.name}; delete {base}",
            )
        await self._topics.delete(request.name)
        return danube_admin.TopicResponse(success=True)

    @needs(Permission.MANAGE_TOPIC, topic="name")
    async def UnloadTopic(
        self, request: danube_admin.TopicRequest, context: object
    ) -> danube_admin.TopicResponse:
        """Hands a topic over, so that any broker may have it."""
        await self._topics.unload(request.name)
        return danube_admin.TopicResponse(success=True)

    @needs(Permission.LOOKUP, topic="name")
    async def DescribeTopic(
        self, request: danube_admin.DescribeTopicRequest, context: object
    ) -> danube_admin.DescribeTopicResponse:
        """What a topic is."""
        topic = await self._topics.get(request.name)
        described = danube_admin.DescribeTopicResponse(
            name=topic.name,
            subscriptions=sorted(topic.subscriptions),
            broker_id=broker_id(self._topics.cluster.own.node),
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
                # Upper case here, and only here, as Danube's broker has it.
                described.compatibility_mode = latest.compatibility_mode.upper()
        return described

    @needs(Permission.LOOKUP, topic="name")
    async def ListSubscriptions(
        self, request: danube_admin.TopicRequest, context: object
    ) -> danube_admin.SubscriptionListResponse:
        """The names of a topic's subscriptions, each once."""
        topic = await self._topics.get(request.name)
        return danube_admin.SubscriptionListResponse(subscriptions=sorted(topic.subscriptions))

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def Unsubscribe(
        self, request: danube_admin.SubscriptionRequest, context: object
    ) -> danube_admin.SubscriptionResponse:
        """Removes a subscription without consumers."""
        topic = await self._topics.get(request.topic)
        self._check_use(topic, request.subscription)
        with conflicts_refused():
            await topic.unsubscribe(request.subscription)
        return danube_admin.SubscriptionResponse(success=True)

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def SetSubscriptionFailurePolicy(
        self, request: danube_admin.SetSubscriptionFailurePolicyRequest, context: object
    ) -> danube_admin.SubscriptionResponse:
        """Changes what happens to messages that fail; in force at once.

        The policy of a subscription that does not exist is stored, and in force when it does.
        """
        topic = await self._reliable(request)
        self._check_use(topic, request.subscription)
        policy = decode_policy(request.failure_policy)
        if policy.dead_letter_topic == request.topic:
            raise InvalidRequestError("a topic cannot be its own dead-letter topic")
        if policy.dead_letter_topic is not None:
            # The broker publishes there on behalf of the caller.
            self._check(Permission.PRODUCE, topic=policy.dead_letter_topic)
        await topic.configure(request.subscription, policy=policy)
        return danube_admin.SubscriptionResponse(success=True)

    @needs(Permission.LOOKUP, topic="topic")
    async def GetSubscriptionFailurePolicy(
        self, request: danube_admin.GetSubscriptionFailurePolicyRequest, context: object
    ) -> danube_admin.GetSubscriptionFailurePolicyResponse:
        """What happens to messages that fail."""
        settings = await (await self._reliable(request)).settings(request.subscription)
        return danube_admin.GetSubscriptionFailurePolicyResponse(
            failure_policy=encode_policy(settings.policy),
            # Danube's answer for one that does not exist is 0, too.
            subscription_type=KINDS.index(settings.kind) if settings.kind is not None else 0,
        )

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def SetSubscriptionDispatchConfig(
        self, request: danube_admin.SetSubscriptionDispatchConfigRequest, context: object
    ) -> danube_admin.SubscriptionResponse:
        """Changes how many messages a consumer may have unacknowledged; in force at once.

        That of a subscription that does not exist is stored, and in force when it does.
        """
        topic = await self._reliable(request)
        self._check_use(topic, request.subscription)
        window = request.dispatch_config.max_unacked_messages
        if not 1 <= window <= _WINDOW_MAX:
            raise InvalidRequestError(f"max_unacked_messages is from 1 to {_WINDOW_MAX}")
        await topic.configure(request.subscription, window=window)
        return danube_admin.SubscriptionResponse(success=True)

    @needs(Permission.LOOKUP, topic="topic")
    async def GetSubscriptionDispatchConfig(
        self, request: danube_admin.GetSubscriptionDispatchConfigRequest, context: object
    ) -> danube_admin.GetSubscriptionDispatchConfigResponse:
        """How many messages a consumer may have unacknowledged."""
        settings = await (await self._reliable(request)).settings(request.subscription)
        return danube_admin.GetSubscriptionDispatchConfigResponse(
            dispatch_config=danube_admin.SubscriptionDispatchConfig(
                max_unacked_messages=settings.window
            )
        )

    def _check_use(self, topic: ServedTopic, name: str) -> None:
        """Refuses a caller that may not use a subscription; one that does not exist is free."""
        found = topic.subscriptions.get(name)
        if found is not None:
            self.guard.check_subscription(current_principal(), found, topic=topic.name)

    async def _reliable(self, request: _OfSubscription) -> ServedTopic:
        topic = await self._topics.get(request.topic)
        if not topic.is_reliable:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, f"topic {topic.name} is not reliable"
            )
        return topic


def _delivery(*, is_reliable: bool) -> str:
    return "Reliable" if is_reliable else "NonReliable"


def encode_policy(policy: FailurePolicy) -> danube_admin.SubscriptionFailurePolicy:
    """A failure policy in the protocol's words."""
    return danube_admin.SubscriptionFailurePolicy(
        max_redelivery_count=policy.max_redelivery_count,
        ack_timeout_ms=policy.ack_timeout_ms,
        base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
        max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
        backoff_strategy=_BACKOFFS.index(policy.backoff),
        dead_letter_topic=policy.dead_letter_topic,
        poison_policy=_POISONS.index(policy.poison),
    )


def decode_policy(message: danube_admin.SubscriptionFailurePolicy) -> FailurePolicy:
    """A failure policy of the protocol."""
    if not 0 <= message.backoff_strategy < len(_BACKOFFS):
        raise InvalidRequestError(
            f"invalid backoff_strategy {message.backoff_strategy}: use 0 (fixed) or 1 (exponential)"
        )
    if not 0 <= message.poison_policy < len(_POISONS):
        raise InvalidRequestError(
            f"invalid poison_policy {message.poison_policy}: "
            "use 0 (dead letter), 1 (block) or 2 (drop)"
        )
    return FailurePolicy(
        max_redelivery_count=message.max_redelivery_count,
        ack_timeout_ms=message.ack_timeout_ms,
        base_redelivery_delay_ms=message.base_redelivery_delay_ms,
        max_redelivery_delay_ms=message.max_redelivery_delay_ms,
        backoff=_BACKOFFS[message.backoff_strategy],
        poison=_POISONS[message.poison_policy],
        dead_letter_topic=message.dead_letter_topic or None,
    )
