"""ister.Admin: what an operator does that Danube's protocol has no words for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from ister import __version__
from ister.base.model import AckLevel, Codec, Start, TopicName
from ister.base.partitions import base_of_partition
from ister.base.positions import time_of
from ister.broker.observe.cluster_view import (
    describe_balance,
    describe_drain,
    describe_rebalance,
)
from ister.broker.observe.subscriptions import describe_subscription
from ister.broker.observe.views import Views, list_topics
from ister.broker.operations import checks, needs
from ister.broker.policies import parse_overrides
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.principal import spell_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import AnySubscription, ServedTopic
from ister.broker.topics.topics import Topics
from ister.errors import InvalidRequestError
from ister.wire import ister_api

_PAGE_DEFAULT: Final = 100
_PRINCIPALS_MAX: Final = 100
# An answer has to fit into a message of gRPC.
_PAGE_MAX: Final = 200
_OWN_TOPICS_MAX: Final = 1000


class IsterAdminService:
    """Serves operators, and gives clients the addresses of the other ports."""

    def __init__(self, topics: Topics, guard: Guard, views: Views) -> None:
        self._topics = topics
        self.guard = guard
        self._views = views

    def _check(self, permission: Permission, **on: str) -> None:
        self.guard.check(current_principal(), permission, **on)

    @checks("nothing: whoever is authenticated may ask")
    async def Info(self, request: ister_api.InfoRequest, context: object) -> ister_api.InfoResponse:
        """This broker's version, node and addresses."""
        own = self._topics.cluster.own
        return ister_api.InfoResponse(
            version=__version__,
            broker_url=own.broker_url,
            flight_url=own.flight_url,
            node=own.node,
        )

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def CreateTopic(
        self, request: ister_api.CreateTopicRequest, context: object
    ) -> ister_api.TopicDescription:
        """Creates a topic, plain or partitioned, with an ack level and a codec."""
        try:
            ack = AckLevel(request.ack) if request.ack else None
            codec = Codec(request.codec) if request.codec else None
        except ValueError as error:
            raise InvalidRequestError(
                str(error), hint=f"ack: {', '.join(AckLevel)}; codec: {', '.join(Codec)}"
            ) from error
        is_reliable = not request.non_reliable
        if request.partitions:
            await self._topics.create_partitioned(
                request.topic,
                request.partitions,
                is_reliable=is_reliable,
                ack=ack,
                codec=codec,
                is_growing=request.grow,
            )
        else:
            await self._topics.get_or_create(
                request.topic,
                is_reliable=is_reliable,
                ack=ack,
                codec=codec,
                is_implied=False,
                is_exact=True,
                check_growth=lambda base: self._check(Permission.MANAGE_TOPIC, topic=base),
            )
        return await self._describe(request.topic)

    @needs(Permission.LOOKUP, topic="topic")
    async def DescribeTopic(
        self, request: ister_api.TopicName, context: object
    ) -> ister_api.TopicDescription:
        """A topic's watermarks, producers and subscriptions."""
        return await self._describe(request.topic)

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def DeletePartition(
        self, request: ister_api.TopicName, context: object
    ) -> ister_api.InfoRequest:
        """Deletes a partition of a topic whose other partitions the caller deletes, too."""
        if base_of_partition(request.topic) is None:
            raise InvalidRequestError(f"{request.topic} is not a partition", topic=request.topic)
        await self._topics.delete(request.topic)
        return ister_api.InfoRequest()

    async def _describe(self, name: str) -> ister_api.TopicDescription:
        partitions = await self._topics.names.partitions(name)
        if partitions and partitions != [name]:
            return ister_api.TopicDescription(topic=name, partitions=partitions)
        topic = await self._topics.get(name)
        described = ister_api.TopicDescription(
            topic=name,
            reliable=topic.is_reliable,
            incarnation=topic.incarnation,
            producers=topic.count_producers(asyncio.get_running_loop().time()),
            subscriptions=[describe(topic, one) for one in topic.subscriptions.values()],
            policies=topic.policies.to_json(),
        )
        core = topic.topic
        if core is not None:
            marks = core.watermarks
            described.ack, described.codec = core.ack.value, core.codec.value
            described.earliest = core.earliest
            described.trimmed, described.tiered = marks.trimmed, marks.tiered
            described.synced, described.written = marks.synced, marks.written
            described.next = marks.next
        return described

    @checks("`lookup` on each topic")
    async def ListTopics(
        self, request: ister_api.ListTopicsRequest, context: object
    ) -> ister_api.Document:
        """Topics in short, a page of those that the caller may know of."""
        found = await list_topics(
            self._views,
            self.guard,
            namespace=request.namespace,
            after=request.after,
            limit=min(request.limit or _PAGE_DEFAULT, _PAGE_MAX),
            with_partitions=request.with_partitions,
        )
        return await self._document(found)

    @needs(Permission.LOOKUP, topic="topic")
    async def ShowTopic(self, request: ister_api.TopicName, context: object) -> ister_api.Document:
        """All about a topic, from the broker that has it."""
        return await self._document(await self._views.topic(request.topic, opens=True))

    @needs(Permission.LOOKUP)
    async def ShowBrokers(
        self, request: ister_api.InfoRequest, context: object
    ) -> ister_api.Document:
        """All brokers that are up."""
        return await self._document({"brokers": await self._views.brokers(is_new=True)})

    @checks("`lookup` on each topic")
    async def ShowOwnTopics(
        self, request: ister_api.OwnTopicsRequest, context: object
    ) -> ister_api.Document:
        """Describes topics in short: those that are open here and that the caller may see."""
        if len(request.topics) > _OWN_TOPICS_MAX:
            raise InvalidRequestError(f"at most {_OWN_TOPICS_MAX} topics")
        names = self.guard.visible(current_principal(), request.topics)
        return await self._document({"topics": await self._views.own_topics(names)})

    # -- the cluster ------------------------------------------------------------------------

    @needs(Permission.LOOKUP)
    async def ShowCluster(
        self, request: ister_api.InfoRequest, context: object
    ) -> ister_api.Document:
        """Brokers, leader, balance, moves under way, and topics that wait for a disk."""
        return await self._document(await self._views.cluster())

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def MoveTopic(
        self, request: ister_api.MoveTopicRequest, context: object
    ) -> ister_api.Document:
        """Moves a topic to another broker, whichever broker has it."""
        to = await self._views.control.move(request.topic, request.to)
        return await self._document(
            {"topic": request.topic, "node": to.node, "broker_url": to.broker_url}
        )

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def TakeOverTopic(
        self, request: ister_api.TakeOverRequest, context: object
    ) -> ister_api.TakeOverResponse:
        """Takes over a topic; without `confirm`, only says what that would give up."""
        given_up = await self._views.control.take_over(request.topic, confirm=request.confirm)
        return ister_api.TakeOverResponse(
            topic=given_up.topic,
            node=given_up.node,
            offset=given_up.offset,
            done=request.confirm,
        )

    @needs(Permission.MANAGE_BROKER)
    async def DrainBroker(
        self, request: ister_api.DrainBrokerRequest, context: object
    ) -> ister_api.Document:
        """Makes a broker hand its topics over and take no new ones."""
        drained = await self._views.control.drain(
            request.broker, timeout=request.timeout_seconds or None
        )
        return await self._document(describe_drain(drained))

    @needs(Permission.MANAGE_BROKER)
    async def ActivateBroker(
        self, request: ister_api.BrokerName, context: object
    ) -> ister_api.Document:
        """Makes a broker take topics again."""
        found = await self._views.control.activate(request.broker)
        return await self._document({"node": found.node, "state": found.state.value})

    @needs(Permission.LOOKUP)
    async def ShowBalance(
        self, request: ister_api.InfoRequest, context: object
    ) -> ister_api.Document:
        """How evenly the load is spread over the brokers."""
        return await self._document(await describe_balance(self._views.control))

    @needs(Permission.MANAGE_BROKER)
    async def Rebalance(
        self, request: ister_api.RebalanceRequest, context: object
    ) -> ister_api.Document:
        """Makes the leader move topics to even out the load, or only plan that."""
        moves = await self._views.control.rebalance(
            dry_run=request.dry_run, moves_max=request.max_moves
        )
        return await self._document(describe_rebalance(moves, dry_run=request.dry_run))

    async def _document(self, content: Mapping[str, object]) -> ister_api.Document:
        return ister_api.Document(json=await self._views.query_threads.run(json.dumps, content))

    @needs(Permission.MANAGE_TOPIC, topic="name")
    async def SetTopicPolicies(
        self, request: ister_api.SetPoliciesRequest, context: object
    ) -> ister_api.PoliciesResponse:
        """Replaces a topic's own policies."""
        policies = parse_overrides(request.policies)
        in_force = await self._topics.set_topic_policies(request.name, policies)
        return ister_api.PoliciesResponse(policies=in_force.to_json())

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def ReleaseProducer(
        self, request: ister_api.ProducerName, context: object
    ) -> ister_api.ReleasedProducer:
        """Frees a producer's name: the next principal that uses it owns it."""
        topic = await self._topics.get(request.topic)
        owner = await asyncio.to_thread(topic.names.release, request.producer)
        return ister_api.ReleasedProducer(principal=owner or "")

    @needs(Permission.MANAGE_NAMESPACE, namespace="name")
    async def SetNamespacePolicies(
        self, request: ister_api.SetPoliciesRequest, context: object
    ) -> ister_api.PoliciesResponse:
        """Replaces the policies of a namespace's topics."""
        policies = parse_overrides(request.policies)
        await self._topics.names.set_namespace_policies(request.name, policies)
        return ister_api.PoliciesResponse(policies=request.policies)

    @needs(Permission.LOOKUP, topic="topic")
    async def DescribeSubscription(
        self, request: ister_api.SubscriptionName, context: object
    ) -> ister_api.SubscriptionDescription:
        """Describes a subscription: cursor, lag, and what blocks it."""
        topic = await self._topics.get(request.topic)
        return describe(topic, topic.subscription(request.subscription))

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def Seek(
        self, request: ister_api.SeekRequest, context: object
    ) -> ister_api.SubscriptionDescription:
        """Moves a subscription's cursor."""
        topic = await self._topics.get(request.topic)
        subscription = topic.reliable_subscription(request.subscription)
        self.guard.check_subscription(current_principal(), subscription, topic=topic.name)
        to = request.WhichOneof("to")
        start: Start
        if to == "offset":
            start = request.offset
        elif to == "publish_time_ms":
            start = time_of(request.publish_time_ms)
        elif to in ("earliest", "latest") and getattr(request, to):
            start = to
        else:
            raise InvalidRequestError("seek needs an offset, a time, earliest or latest")
        offset = await self._topics.searches.start_of(subscription.topic, start)
        await subscription.seek(offset)
        return describe(topic, subscription)

    @checks("`manage_namespace` on the topic's namespace")
    async def RestrictSubscription(
        self, request: ister_api.RestrictSubscriptionRequest, context: object
    ) -> ister_api.SubscriptionDescription:
        """Changes the principals that may use a subscription; needs `manage_namespace`."""
        name = TopicName.parse(request.topic)
        principals = None
        if not request.unrestricted:
            if len(request.principals) > _PRINCIPALS_MAX:
                raise InvalidRequestError(f"at most {_PRINCIPALS_MAX} principals")
            principals = tuple(sorted({spell_principal(one) for one in request.principals}))
        self.guard.check(
            current_principal(),
            Permission.MANAGE_NAMESPACE,
            namespace=name.namespace,
            detail=f"subscription {request.subscription} of {name}: "
            + ("unrestricted" if principals is None else ", ".join(principals) or "nobody"),
        )
        topic = await self._topics.get(request.topic)
        return describe(topic, await topic.restrict(request.subscription, principals))


def describe(
    topic: ServedTopic, subscription: AnySubscription
) -> ister_api.SubscriptionDescription:
    """A subscription in the protocol's words, with all of its consumers."""
    view = describe_subscription(subscription, consumers_max=len(subscription.attached))
    return ister_api.SubscriptionDescription(
        topic=topic.name,
        subscription=view.name,
        kind=view.type,
        consumers=view.consumers,
        restricted=subscription.principals is not None,
        principals=subscription.principals,
        cursor=view.cursor,
        lag=view.lag,
        in_flight=view.in_flight,
        waiting=view.waiting,
        max_unacked_messages=view.max_unacked_messages,
        blocked=view.blocked,
        active=view.active,
    )
