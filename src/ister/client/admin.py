"""What an operator does with topics, subscriptions and namespaces.

Calls of ister.Admin and danube_admin. Those about brokers are in `cluster_admin`, rights in
`rights`, schemas in `schemas`, dead letters in `dead_letters`.

Calls go to the broker that has the topic, and are repeated until it answers. One that was carried
out and whose answer was lost is not an error when it is repeated.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, ParamSpec, TypeVar

from ister import wire
from ister.base.model import AckLevel, Codec, Start, TopicName
from ister.base.notebook import render_table
from ister.base.positions import to_milliseconds
from ister.client.cluster_admin import ClusterCalls
from ister.client.dead_letters import DeadLetterCalls
from ister.client.rights import RightsCalls
from ister.client.schemas import SchemaCalls
from ister.errors import AlreadyExistsError, InvalidRequestError, IsterError, NotFoundError
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from ister.wire.views import TopicJson

_BACKOFFS: Final = (Backoff.FIXED, Backoff.EXPONENTIAL)
_POISONS: Final = (PoisonPolicy.DEAD_LETTER, PoisonPolicy.BLOCK, PoisonPolicy.DROP)

_Args = ParamSpec("_Args")
_Calls = TypeVar("_Calls")
_Result = TypeVar("_Result")
_PLAIN: Final = {"str": str, "int": int, "bool": bool, "float": float, "None": type(None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDescription:
    """Position and state of a subscription, and what blocks it."""

    topic: str
    subscription: str
    kind: str
    cursor: int
    """The first offset that is not acknowledged."""
    lag: int
    """Messages from the cursor to the end."""
    in_flight: int
    waiting: int
    """Messages that are pending redelivery."""
    blocked: int | None
    """The offset that stops the subscription; None if it is not stopped."""
    consumers: tuple[str, ...]
    active: str | None
    """The consumer that gets the messages of an exclusive or failover subscription."""
    max_unacked_messages: int
    principals: tuple[str, ...] | None = None
    """Principals that may use it; None for all that may consume the topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """Watermarks of a topic (see `ister.Watermarks`), its producers and subscriptions."""

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
    policies: Mapping[str, int] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        headers = ("ack", "earliest", "trimmed", "tiered", "synced", "written", "next", "producers")
        shown = render_table(
            f"Topic {self.topic}", headers, [[getattr(self, name) for name in headers]]
        )
        columns = ("subscription", "kind", "cursor", "lag", "in_flight", "waiting", "blocked")
        rows = [[getattr(one, name) for name in columns] for one in self.subscriptions]
        return shown + render_table("Subscriptions", columns, rows) if rows else shown


def _refusing_misfits(method: Callable[_Args, Awaitable[_Result]]) -> Callable[_Args, object]:
    """Makes a call raise InvalidRequestError for an argument that no request can carry."""

    @functools.wraps(method)
    async def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        work = method(*args, **kwargs)
        try:
            return await work
        except IsterError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            signature = inspect.signature(method)
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                wanted = str(signature.parameters[name].annotation)
                kinds = [_PLAIN.get(kind) for kind in wanted.split(" | ")]
                if all(kinds) and not any(isinstance(value, kind) for kind in kinds if kind):
                    raise InvalidRequestError(
                        f"{name} must be {wanted}, not {value!r:.80}"
                    ) from error
            raise InvalidRequestError(f"{method.__name__}: invalid argument: {error}") from error

    return call


def _checked(calls: type[_Calls]) -> type[_Calls]:
    for name, method in inspect.getmembers(calls, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            setattr(calls, name, _refusing_misfits(method))
    return calls


@_checked
class AdminCalls(ClusterCalls, RightsCalls, SchemaCalls, DeadLetterCalls):
    """See the module header. Belongs to the network's loop."""

    # -- topics -----------------------------------------------------------------------------

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 0,
        ack: AckLevel | str | None = None,
        codec: Codec | str | None = None,
    ) -> TopicDescription:
        """Creates a topic, unless it exists.

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
            raise InvalidRequestError(f"invalid number of partitions: {partitions}")
        request = wire.ister_api.CreateTopicRequest(
            topic=topic,
            partitions=partitions,
            ack=str(ack) if ack is not None else "",
            codec=str(codec) if codec is not None else "",
        )
        return _topic(await self._network.call(wire.services.Admin.CreateTopic, request))

    async def grow_topic(self, topic: str, partitions: int) -> list[str]:
        """Adds partitions to a partitioned topic; returns all of them.

        Which partition a routing key goes to depends on the number of partitions. Messages of one
        key that are published before and after may be in two partitions, and consumers may get
        them out of order. Open producers and consumers use the new ones within 30 seconds.

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
        request = wire.ister_api.CreateTopicRequest(
            topic=topic,
            partitions=partitions,
            ack=first.ack,
            codec=first.codec,
            non_reliable=not first.is_reliable,
            grow=True,
        )
        grown = await self._network.call(wire.services.Admin.CreateTopic, request)
        return list(grown.partitions)

    async def describe_topic(self, topic: str) -> TopicDescription:
        """Returns a topic's watermarks, producers and subscriptions.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names != [topic]:
            return _topic(wire.ister_api.TopicDescription(topic=topic, partitions=names))
        request = wire.ister_api.TopicName(topic=topic)
        return _topic(
            await self._network.call(wire.services.Admin.DescribeTopic, request, topic=topic)
        )

    async def topics(self, namespace: str = "default") -> list[str]:
        """The names of the topics of a namespace, partitions among them.

        Raises:
            NotFoundError: There is no such namespace.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_admin.NamespaceRequest(name=namespace)
        found = await self._network.call(wire.services.NamespaceAdmin.GetNamespaceTopics, request)
        return list(found.topics)

    async def list_topics(
        self, namespace: str | None = None, *, with_partitions: bool = True
    ) -> list[TopicJson]:
        """Returns short descriptions of the topics that this client may see, by name.

        Each is as `show_topic` has it, but for files, objects, policies and schema: of those there
        are the numbers alone (`files_total`, `objects_bytes`, ...). Each broker describes its own
        topics; those of a broker that does not answer are described by what the stores have.

        Args:
            namespace: Only those of one; all by default.
            with_partitions: Whether partitions are listed one by one; else those that they are
                parts of are, with the names in `partitions` and nothing else.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        found: list[TopicJson] = []
        after = ""
        while True:
            request = wire.ister_api.ListTopicsRequest(
                namespace=namespace or "", with_partitions=with_partitions, after=after
            )
            answer = await self._network.call(wire.services.Admin.ListTopics, request)
            page = json.loads(answer.json)
            found += page["topics"]
            after = page["next"] or ""
            if not after:
                return found

    async def show_topic(self, topic: str) -> TopicJson:
        """Describes a topic: tiers, watermarks, rates, subscriptions, policies, schema.

        The same dictionary as that of the HTTP API and of `ister topics describe --json`;
        `ister.wire.views` names its fields. Of a partitioned topic, the names in `partitions` and
        nothing else.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names != [topic]:
            return {"topic": topic, "parent": None, "partitions": names}
        request = wire.ister_api.TopicName(topic=topic)
        answer = await self._network.call(wire.services.Admin.ShowTopic, request, topic=topic)
        view: TopicJson = json.loads(answer.json)
        return view

    async def partitions(self, topic: str) -> list[str]:
        """Returns the topic itself, or its partitions in order; empty if it does not exist.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        return await self._network.partitions(topic)

    async def delete_topic(self, topic: str) -> None:
        """Deletes a topic for good, with all its partitions, messages and subscriptions.

        Raises:
            NotFoundError: There is none.
            ConflictError: It is a partition, which cannot be deleted alone.
            IsterError: It is refused, or no broker has answered in time.
        """
        names = await self._partitions(topic)
        if names == [topic]:
            # The broker refuses to delete a partition.
            await self._network.call(
                wire.services.TopicAdmin.DeleteTopic,
                wire.danube_admin.TopicRequest(name=topic),
                topic=topic,
                done_before=NotFoundError,
            )
            return
        # Each at its own broker: that cannot forward a caller's certificate to the others.
        for name in names:
            await self._network.call(
                wire.services.Admin.DeletePartition,
                wire.ister_api.TopicName(topic=name),
                topic=name,
                done_before=NotFoundError,
            )

    async def unload_topic(self, topic: str) -> None:
        """Makes the broker of a topic hand it over to another broker, if there is one.

        Raises:
            NotFoundError: There is none.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = wire.danube_admin.TopicRequest(name=name)
            await self._network.call(wire.services.TopicAdmin.UnloadTopic, request, topic=name)

    async def set_topic_policies(self, topic: str, policies: Mapping[str, int]) -> dict[str, int]:
        """Replaces a topic's own policies (see `broker.policies`); returns those in force.

        Raises:
            NotFoundError: There is no such topic.
            InvalidRequestError: There is no such bound.
            IsterError: It is refused, or no broker has answered in time.
        """
        in_force: dict[str, int] = {}
        for name in await self._partitions(topic):
            request = wire.ister_api.SetPoliciesRequest(
                name=name, policies=json.dumps(dict(policies))
            )
            found = await self._network.call(
                wire.services.Admin.SetTopicPolicies, request, topic=name
            )
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
            request = wire.ister_api.ProducerName(topic=name, producer=producer)
            found = await self._network.call(
                wire.services.Admin.ReleaseProducer, request, topic=name
            )
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
            request = wire.danube_admin.TopicRequest(name=name)
            answer = await self._network.call(
                wire.services.TopicAdmin.ListSubscriptions, request, topic=name
            )
            found.update(answer.subscriptions)
        return sorted(found)

    async def describe_subscription(self, topic: str, subscription: str) -> SubscriptionDescription:
        """Returns the position and state of a subscription, and what blocks it.

        Raises:
            NotFoundError: There is none; or the topic is partitioned, and this asks for one.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.ister_api.SubscriptionName(topic=topic, subscription=subscription)
        return _subscription(
            await self._network.call(wire.services.Admin.DescribeSubscription, request, topic=topic)
        )

    async def seek(self, topic: str, subscription: str, *, to: Start) -> None:
        """Moves a subscription to another position, for all its consumers.

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
        request = wire.ister_api.SeekRequest(subscription=subscription)
        if to == "earliest":
            request.earliest = True
        elif to == "latest":
            request.latest = True
        elif isinstance(to, datetime):
            request.publish_time_ms = to_milliseconds(to)
        elif isinstance(to, int) and not isinstance(to, bool) and 0 <= to < 1 << 63:
            request.offset = to
        else:
            raise InvalidRequestError(
                f"invalid position {to!r}", hint="use an offset, a time, earliest or latest"
            )
        names = await self._partitions(topic)
        if isinstance(to, int) and names != [topic]:
            raise InvalidRequestError(
                "each partition has offsets of its own", topic=topic, hint="seek in one of them"
            )
        for name in names:
            request.topic = name
            await self._network.call(wire.services.Admin.Seek, request, topic=name)

    async def unsubscribe(self, topic: str, subscription: str) -> None:
        """Removes a subscription without consumers.

        Raises:
            NotFoundError: There is none.
            ConflictError: It has consumers.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = wire.danube_admin.SubscriptionRequest(topic=name, subscription=subscription)
            await self._network.call(
                wire.services.TopicAdmin.Unsubscribe, request, topic=name, done_before=NotFoundError
            )

    async def failure_policy(self, topic: str, subscription: str) -> FailurePolicy:
        """Returns the failure policy of a subscription, or the one that is stored for it.

        Raises:
            NotFoundError: There is no such topic or subscription.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_admin.GetSubscriptionFailurePolicyRequest(
            topic=topic, subscription=subscription
        )
        found = await self._network.call(
            wire.services.TopicAdmin.GetSubscriptionFailurePolicy, request, topic=topic
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
        """Changes the failure policy of a subscription; of one to come, it is stored for it.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = wire.danube_admin.SetSubscriptionFailurePolicyRequest(
                topic=name,
                subscription=subscription,
                failure_policy=wire.danube_admin.SubscriptionFailurePolicy(
                    max_redelivery_count=policy.max_redelivery_count,
                    ack_timeout_ms=policy.ack_timeout_ms,
                    base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
                    max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
                    backoff_strategy=_BACKOFFS.index(policy.backoff),
                    poison_policy=_POISONS.index(policy.poison),
                    dead_letter_topic=policy.dead_letter_topic,
                ),
            )
            await self._network.call(
                wire.services.TopicAdmin.SetSubscriptionFailurePolicy, request, topic=name
            )

    async def set_max_unacked_messages(self, topic: str, subscription: str, messages: int) -> None:
        """Changes the maximum of unacknowledged messages per consumer.

        That of a subscription that does not exist yet is stored for it.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = wire.danube_admin.SetSubscriptionDispatchConfigRequest(
                topic=name,
                subscription=subscription,
                dispatch_config=wire.danube_admin.SubscriptionDispatchConfig(
                    max_unacked_messages=messages
                ),
            )
            await self._network.call(
                wire.services.TopicAdmin.SetSubscriptionDispatchConfig, request, topic=name
            )

    async def restrict_subscription(
        self, topic: str, subscription: str, principals: Sequence[str] | None
    ) -> None:
        """Restricts a subscription to some principals.

        Principals with `manage_namespace` always may. Streams of others end within a second.

        Args:
            topic: The topic, or a partitioned one.
            subscription: Its name.
            principals: `user:NAME` or `service:NAME` (a name alone is a user); None removes the
                restriction: all that may consume the topic may use the subscription.

        Raises:
            NotFoundError: There is no such topic or subscription.
            IsterError: It is refused, or no broker has answered in time.
        """
        for name in await self._partitions(topic):
            request = wire.ister_api.RestrictSubscriptionRequest(
                topic=name,
                subscription=subscription,
                principals=principals or (),
                unrestricted=principals is None,
            )
            await self._network.call(wire.services.Admin.RestrictSubscription, request, topic=name)

    # -- namespaces -------------------------------------------------------------------------

    async def namespaces(self) -> list[str]:
        """The names of all namespaces.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        found = await self._network.call(
            wire.services.BrokerAdmin.ListNamespaces, wire.danube_admin.Empty()
        )
        return list(found.namespaces)

    async def create_namespace(self, name: str) -> None:
        """Creates a namespace.

        Raises:
            AlreadyExistsError: There is one of that name.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_admin.NamespaceRequest(name=name)
        await self._network.call(
            wire.services.NamespaceAdmin.CreateNamespace, request, done_before=AlreadyExistsError
        )

    async def delete_namespace(self, name: str) -> None:
        """Removes a namespace without topics.

        Raises:
            NotFoundError: There is none.
            ConflictError: It has topics.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_admin.NamespaceRequest(name=name)
        await self._network.call(
            wire.services.NamespaceAdmin.DeleteNamespace, request, done_before=NotFoundError
        )

    # -- inside -----------------------------------------------------------------------------

    async def _partitions(self, topic: str) -> list[str]:
        names = await self._network.partitions(topic)
        if not names:
            raise NotFoundError(f"topic {topic} does not exist", topic=topic)
        return names


def _topic(found: wire.ister_api.TopicDescription) -> TopicDescription:
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


def _subscription(found: wire.ister_api.SubscriptionDescription) -> SubscriptionDescription:
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
