"""What an operator does: topics, subscriptions, namespaces, brokers, roles, schemas, dead letters.

Owns: calls of ister.Admin, ister.DeadLetters, danube_admin and danube_schema. Does not own: what a
call is allowed to do and what it changes, which brokers decide; what is returned (`descriptions`).

Any broker takes a call, or it goes to the broker that has the topic, and is repeated until one
answers. One that was carried out and whose answer was lost is not an error when it is repeated.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, ParamSpec, TypeAlias, TypeVar, cast

from ister import wire
from ister.base.model import AckLevel, Codec, JsonObject, Start, TopicName
from ister.base.positions import to_milliseconds
from ister.client.core.network import Network
from ister.client.descriptions import (
    BindingDescription,
    LetterFilter,
    RegisteredSchema,
    RoleDescription,
    Schema,
    SchemaVersion,
    SubjectDescription,
    SubscriptionDescription,
    TopicDescription,
)
from ister.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    topic_not_found,
)
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from ister.topic.arguments import as_timeout
from ister.wire.views import (
    BalanceJson,
    BrokerJson,
    ClusterJson,
    DeadLetterCountJson,
    DeadLetterJson,
    DrainJson,
    RebalanceJson,
    ResolvedJson,
    TakeOverJson,
    TopicJson,
)

_BACKOFFS: Final = (Backoff.FIXED, Backoff.EXPONENTIAL)
_POISONS: Final = (PoisonPolicy.DEAD_LETTER, PoisonPolicy.BLOCK, PoisonPolicy.DROP)
# A topic is uploaded before it moves; a drained broker uploads all of its topics.
_MOVE_SECONDS: Final = 120.0
_DRAIN_SECONDS: Final = 600.0
# A broker works on dead letters for some seconds, and may wait for uploads of the last messages.
_LETTER_SECONDS: Final = 60.0
_PAGE: Final = 100
_ALL: Final = LetterFilter()

_Args = ParamSpec("_Args")
_Calls = TypeVar("_Calls")
_Result = TypeVar("_Result")
_PLAIN: Final = {"str": str, "int": int, "bool": bool, "float": float, "None": type(None)}

if TYPE_CHECKING:
    _Rpc: TypeAlias = wire.Rpc[wire.ister_api.DeadLettersRequest, wire.ister_api.Document]


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
class AsyncAdmin:
    """Calls for operators; `AsyncClient.admin`, and with `Client.admin` for programs that block.

    All of them raise an `IsterError` if they are refused, or if no broker has answered in time.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def __repr__(self) -> str:
        return f"<AsyncAdmin {self._network!r}>"

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
        """
        names = await self._partitions(topic)
        if names != [topic]:
            return _topic(wire.ister_api.TopicDescription(topic=topic, partitions=names))
        request = wire.ister_api.TopicName(topic=topic)
        return _topic(
            await self._network.call(wire.services.Admin.DescribeTopic, request, topic=topic)
        )

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
        """
        names = await self._partitions(topic)
        if names != [topic]:
            return {"topic": topic, "parent": None, "partitions": names}
        request = wire.ister_api.TopicName(topic=topic)
        answer = await self._network.call(wire.services.Admin.ShowTopic, request, topic=topic)
        view: TopicJson = json.loads(answer.json)
        return view

    async def partitions(self, topic: str) -> list[str]:
        """Returns the topic itself, or its partitions in order; empty if it does not exist."""
        return await self._network.partitions(topic)

    async def delete_topic(self, topic: str) -> None:
        """Deletes a topic for good, with all its partitions, messages and subscriptions.

        Raises:
            NotFoundError: There is none.
            ConflictError: It is a partition, which cannot be deleted alone.
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
        """
        for name in await self._partitions(topic):
            request = wire.danube_admin.TopicRequest(name=name)
            await self._network.call(wire.services.TopicAdmin.UnloadTopic, request, topic=name)

    async def set_topic_policies(self, topic: str, policies: Mapping[str, int]) -> dict[str, int]:
        """Replaces a topic's own policies (see `broker.policies`); returns those in force.

        Raises:
            NotFoundError: There is no such topic.
            InvalidRequestError: There is no such bound.
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
        """The names of all namespaces."""
        found = await self._network.call(
            wire.services.BrokerAdmin.ListNamespaces, wire.danube_admin.Empty()
        )
        return list(found.namespaces)

    async def create_namespace(self, name: str) -> None:
        """Creates a namespace.

        Raises:
            AlreadyExistsError: There is one of that name.
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
        """
        request = wire.danube_admin.NamespaceRequest(name=name)
        await self._network.call(
            wire.services.NamespaceAdmin.DeleteNamespace, request, done_before=NotFoundError
        )

    # -- brokers -----------------------------------------------------------------------------------

    async def brokers(self) -> list[BrokerJson]:
        """All brokers that are up, the one that answers first.

        Each with its addresses, state, zone, version, load, and whether it leads;
        `ister.wire.views` names the fields.
        """
        answer = await self._network.call(
            wire.services.Admin.ShowBrokers, wire.ister_api.InfoRequest()
        )
        brokers: list[BrokerJson] = json.loads(answer.json)["brokers"]
        return brokers

    async def cluster(self) -> ClusterJson:
        """Brokers, leader, balance, moves under way, and topics that wait for a disk."""
        answer = await self._network.call(
            wire.services.Admin.ShowCluster, wire.ister_api.InfoRequest()
        )
        found: ClusterJson = json.loads(answer.json)
        return found

    async def move_topic(self, topic: str, to: str) -> None:
        """Moves a topic to another broker; returns when it is there.

        Producers and consumers follow by themselves. Nothing is lost.

        Args:
            topic: Its name; all partitions of a partitioned one.
            to: The node of the broker; `brokers` lists them.

        Raises:
            NotFoundError: There is no such topic, or no such broker.
            ConflictError: The broker takes no topics.
        """
        for name in await self._partitions(topic):
            request = wire.ister_api.MoveTopicRequest(topic=name, to=to)
            await self._network.call(
                wire.services.Admin.MoveTopic, request, answer_within=_MOVE_SECONDS
            )

    async def take_over(self, topic: str, *, confirm: bool = False) -> TakeOverJson:
        """Continues a topic whose newest messages are on a lost disk, and gives those up.

        Args:
            topic: The topic, or one partition of a partitioned topic.
            confirm: Whether to do it; if False, only returns what would be given up.

        Returns:
            What is given up: messages from `offset` on that only the disk of `node` has.

        Raises:
            NotFoundError: There is no such topic.
            ConflictError: A broker has it, or its last broker is up: there is nothing to take over.
        """
        names = await self._partitions(topic)
        if names != [topic]:
            raise InvalidRequestError(
                f"{topic} is a partitioned topic with {len(names)} partitions",
                topic=topic,
                hint=f"name one of them, such as {names[0]}",
            )
        request = wire.ister_api.TakeOverRequest(topic=topic, confirm=confirm)
        found = await self._network.call(
            wire.services.Admin.TakeOverTopic, request, answer_within=_MOVE_SECONDS
        )
        return {
            "topic": found.topic,
            "node": found.node,
            "offset": found.offset,
            "done": found.done,
        }

    async def drain_broker(self, broker: str, *, timeout: float | None = None) -> DrainJson:
        """Makes a broker hand its topics over to others, and take no new ones.

        Args:
            broker: The node of the broker; `brokers` lists them.
            timeout: Seconds after which no further topic is handed over; None for no limit.

        Raises:
            NotFoundError: There is no such broker.
            ConflictError: There is no other broker that takes topics.
        """
        _check_broker(broker)
        timeout = as_timeout(timeout)
        request = wire.ister_api.DrainBrokerRequest(
            broker=broker, timeout_seconds=0 if timeout is None else max(1, int(timeout))
        )
        answer = await self._network.call(
            wire.services.Admin.DrainBroker, request, answer_within=_DRAIN_SECONDS
        )
        found: DrainJson = json.loads(answer.json)
        return found

    async def activate_broker(self, broker: str) -> None:
        """Makes a broker take topics again.

        Raises:
            NotFoundError: There is no such broker.
        """
        _check_broker(broker)
        request = wire.ister_api.BrokerName(broker=broker)
        await self._network.call(wire.services.Admin.ActivateBroker, request)

    async def balance(self) -> BalanceJson:
        """How evenly the load is spread over the brokers that take topics."""
        answer = await self._network.call(
            wire.services.Admin.ShowBalance, wire.ister_api.InfoRequest()
        )
        found: BalanceJson = json.loads(answer.json)
        return found

    async def rebalance(self, *, dry_run: bool = False) -> RebalanceJson:
        """Asks the leader to move topics to even out the load; returns the moves at once.

        Nothing moves if the load is even, and no topic that has just moved.

        Args:
            dry_run: Only plan the moves.
        """
        request = wire.ister_api.RebalanceRequest(dry_run=dry_run)
        answer = await self._network.call(wire.services.Admin.Rebalance, request)
        found: RebalanceJson = json.loads(answer.json)
        return found

    # -- roles -------------------------------------------------------------------------------------

    async def roles(self) -> list[RoleDescription]:
        """All roles, by name, with their permissions.

        Raises:
            PermissionDeniedError: The caller may not manage the cluster.
        """
        found = await self._network.call(
            wire.services.SecurityAdmin.ListRoles, wire.danube_admin.Empty()
        )
        return sorted(
            (
                RoleDescription(
                    name=one.name,
                    permissions=tuple(map(_permission, one.permissions)),
                    is_system=one.system,
                )
                for one in found.roles
            ),
            key=lambda role: role.name,
        )

    async def bindings(self) -> list[BindingDescription]:
        """All bindings, by principal. Admins that the broker's settings name have none.

        Raises:
            PermissionDeniedError: The caller may not manage the cluster.
        """
        found = await self._network.call(
            wire.services.SecurityAdmin.ListAllBindings, wire.danube_admin.Empty()
        )
        return sorted(
            (
                BindingDescription(
                    id=one.id,
                    principal=f"{_kind(one.principal_type)}:{one.principal_name}",
                    roles=tuple(one.role_names),
                    scope=one.scope,
                    resource=one.resource_name,
                )
                for one in found.bindings
            ),
            key=lambda binding: (binding.principal, binding.scope, binding.resource, binding.id),
        )

    async def grant_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """Grants a role to a principal: on a topic, in a namespace, or for the cluster.

        Args:
            principal: A user's name, or `service:NAME` for an API key or a program.
            role: `admin`, `producer`, `consumer`, or a custom role.
            topic: On this topic alone.
            namespace: In this namespace alone.

        Raises:
            NotFoundError: There is no such role.
        """
        kind, name = _principal(principal)
        scope, resource = _scope(topic, namespace)
        request = wire.danube_admin.CreateBindingRequest(
            binding=wire.danube_admin.BindingDefinition(
                id=_binding_id(kind, name, role),
                principal_type=kind,
                principal_name=name,
                role_names=[role],
                scope=scope,
                resource_name=resource,
            )
        )
        await self._network.call(wire.services.SecurityAdmin.CreateBinding, request)

    async def revoke_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """Revokes a role that `grant_role` gave with the same arguments.

        Raises:
            NotFoundError: The role was not granted.
        """
        kind, name = _principal(principal)
        scope, resource = _scope(topic, namespace)
        request = wire.danube_admin.DeleteBindingRequest(
            scope=scope, resource_name=resource, binding_id=_binding_id(kind, name, role)
        )
        await self._network.call(
            wire.services.SecurityAdmin.DeleteBinding, request, done_before=NotFoundError
        )

    # -- schemas -----------------------------------------------------------------------------------

    async def schema_subjects(self) -> list[SubjectDescription]:
        """All subjects, by name."""
        found = await self._network.call(
            wire.services.SchemaRegistry.ListSubjects, wire.danube_schema.ListSubjectsRequest()
        )
        return [
            SubjectDescription(
                subject=one.subject,
                schema_type=one.schema_type,
                latest_version=one.latest_version,
                compatibility=one.compatibility_mode,
                schema_id=one.schema_id,
                tags=tuple(one.tags),
            )
            for one in found.subjects
        ]

    async def schema_versions(self, subject: str) -> list[SchemaVersion]:
        """The versions of a subject, the oldest first.

        Raises:
            NotFoundError: There is no such subject.
        """
        found = await self._network.call(
            wire.services.SchemaRegistry.ListVersions,
            wire.danube_schema.ListVersionsRequest(subject=subject),
        )
        return [
            SchemaVersion(
                version=one.version,
                schema_id=one.schema_id,
                created_at=one.created_at,
                created_by=one.created_by,
                description=one.description,
                fingerprint=one.fingerprint,
            )
            for one in found.versions
        ]

    async def schema(self, subject: str, version: int | None = None) -> Schema:
        """A version of a subject; the latest by default.

        Raises:
            NotFoundError: There is no such subject or version.
        """
        registry = wire.services.SchemaRegistry
        found = await self._network.call(
            registry.GetLatestSchema, wire.danube_schema.GetLatestSchemaRequest(subject=subject)
        )
        if version is not None and version != found.version:
            # A subject's versions share its id.
            request = wire.danube_schema.GetSchemaRequest(
                schema_id=found.schema_id, version=version
            )
            found = await self._network.call(registry.GetSchema, request)
        return Schema(
            subject=found.subject,
            schema_type=found.schema_type,
            definition=found.schema_definition,
            tags=tuple(found.tags),
            compatibility=found.compatibility_mode,
            version=found.version,
            schema_id=found.schema_id,
            created_at=found.created_at,
            created_by=found.created_by,
            description=found.description,
            fingerprint=found.fingerprint,
        )

    async def register_schema(
        self,
        subject: str,
        definition: bytes,
        *,
        schema_type: str,
        description: str = "",
        tags: Sequence[str] = (),
    ) -> RegisteredSchema:
        """Adds a version to a subject, unless it has this definition already.

        Args:
            subject: Its name; a topic's name for the schema of that topic.
            definition: Avro or JSON Schema as JSON, a protobuf descriptor set, and so on.
            schema_type: `avro`, `json_schema`, `protobuf`, `string`, `number` or `bytes`.
            description: Free text about the version.
            tags: Free-form labels.

        Raises:
            InvalidRequestError: The definition cannot be read.
            ConflictError: It is not compatible with the latest version.
        """
        request = wire.danube_schema.RegisterSchemaRequest(
            subject=subject,
            schema_type=schema_type,
            schema_definition=definition,
            description=description,
            tags=tags,
        )
        found = await self._network.call(wire.services.SchemaRegistry.RegisterSchema, request)
        return RegisteredSchema(
            subject=subject,
            version=found.version,
            schema_id=found.schema_id,
            is_new=found.is_new_version,
            fingerprint=found.fingerprint,
        )

    async def check_schema(
        self, subject: str, definition: bytes, *, schema_type: str, mode: str | None = None
    ) -> list[str]:
        """Returns why a definition cannot be the next version of a subject; empty if it can.

        `mode` is a compatibility mode in place of the subject's own.

        Raises:
            NotFoundError: There is no such subject.
            InvalidRequestError: The definition cannot be read.
        """
        request = wire.danube_schema.CheckCompatibilityRequest(
            subject=subject,
            new_schema_definition=definition,
            schema_type=schema_type,
            compatibility_mode=mode,
        )
        found = await self._network.call(wire.services.SchemaRegistry.CheckCompatibility, request)
        return list(found.errors)

    async def set_compatibility(self, subject: str, mode: str) -> None:
        """Sets how new versions of a subject must be compatible.

        Raises:
            NotFoundError: There is no such subject.
            InvalidRequestError: There is no such mode.
        """
        request = wire.danube_schema.SetCompatibilityModeRequest(
            subject=subject, compatibility_mode=mode
        )
        await self._network.call(wire.services.SchemaRegistry.SetCompatibilityMode, request)

    # -- dead letters ------------------------------------------------------------------------------

    async def count_dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, limit: int = 0
    ) -> DeadLetterCountJson:
        """Counts the pending dead letters of a dead-letter topic, by where they come from.

        Args:
            topic: The dead-letter topic; a plain one, or a partition.
            which: Only these.
            limit: Stop after so many; 0 for the broker's limit. `end` in the answer is the offset
                behind the last one that was counted.

        Raises:
            NotFoundError: There is no such topic.
        """
        rpc = wire.services.DeadLetters.Count
        return cast("DeadLetterCountJson", await self._ask(rpc, _request(topic, which, limit)))

    async def dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, limit: int = 0
    ) -> AsyncIterator[DeadLetterJson]:
        """The pending dead letters of a dead-letter topic, in order; at most `limit`, unless 0.

        Raises:
            NotFoundError: There is no such topic.
        """
        start: int | None = 0
        shown = 0
        while start is not None and (not limit or shown < limit):
            request = _request(topic, which, min(limit - shown, _PAGE) if limit else _PAGE)
            request.start = start
            page = await self._ask(wire.services.DeadLetters.Show, request)
            for one in cast("list[DeadLetterJson]", page["messages"]):
                shown += 1
                yield one
            start = cast("int | None", page["next"])

    async def show_dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, limit: int = 50
    ) -> list[DeadLetterJson]:
        """Like `dead_letters`, but returns a list.

        Raises:
            As `dead_letters`.
        """
        return [one async for one in self.dead_letters(topic, which, limit=limit)]

    async def requeue_dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, to: str = ""
    ) -> ResolvedJson:
        """Publishes dead letters to the topic that they failed in, as the original messages.

        At least once: letters that were published when a broker crashed, and not recorded as
        resolved, are published again by the next call.

        Args:
            topic: The dead-letter topic; a plain one, or a partition.
            which: Only these.
            to: Another topic for all of them.

        Returns:
            How many were published, and those that failed and stay pending.

        Raises:
            NotFoundError: There is no such topic.
        """
        request = _request(topic, which)
        request.to = to
        return await self._resolve(wire.services.DeadLetters.Requeue, request)

    async def drop_dead_letters(self, topic: str, which: LetterFilter = _ALL) -> ResolvedJson:
        """Marks dead letters as resolved without publishing them. The topic keeps the messages.

        Raises:
            NotFoundError: There is no such topic.
        """
        return await self._resolve(wire.services.DeadLetters.Drop, _request(topic, which))

    async def _resolve(self, rpc: _Rpc, request: wire.ister_api.DeadLettersRequest) -> ResolvedJson:
        done: ResolvedJson = {"topic": request.topic, "done": 0, "failed": []}
        while True:
            found = cast("ResolvedJson", await self._ask(rpc, request))
            done["done"] += found["done"]
            done["failed"] += found["failed"]
            following = found.get("next")
            if following is None:
                return done
            request.start = following

    async def _ask(self, rpc: _Rpc, request: wire.ister_api.DeadLettersRequest) -> JsonObject:
        answer = await self._network.call(
            rpc, request, topic=request.topic, answer_within=_LETTER_SECONDS
        )
        found: JsonObject = json.loads(answer.json)
        return found

    # -- inside ------------------------------------------------------------------------------------

    async def _partitions(self, topic: str) -> list[str]:
        names = await self._network.partitions(topic)
        if not names:
            raise topic_not_found(topic)
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


def _check_broker(broker: str) -> None:
    # An empty name is the broker that is asked, whichever that is.
    if not broker:
        raise InvalidRequestError("broker is empty", hint="pass a node; `brokers` lists them")


def _permission(text: str) -> str:
    """A permission in our words: Danube spells `ManageTopic`."""
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in text).lstrip("_")


def _kind(text: str) -> str:
    return text.lower().removesuffix("_account")


def _principal(text: str) -> tuple[str, str]:
    kind, separator, name = text.partition(":")
    return (kind, name) if separator else ("user", text)


def _scope(topic: str | None, namespace: str | None) -> tuple[str, str]:
    if topic is not None and namespace is not None:
        raise InvalidRequestError("pass topic or namespace, not both")
    if topic is not None:
        return "topic", str(TopicName.parse(topic))
    return ("cluster", "") if namespace is None else ("namespace", namespace)


def _binding_id(kind: str, name: str, role: str) -> str:
    """Returns the binding's id, derived from its arguments, so that it can be revoked."""
    return hashlib.sha256(f"{kind}\n{name}\n{role}".encode()).hexdigest()[:16]


def _request(topic: str, which: LetterFilter, limit: int = 0) -> wire.ister_api.DeadLettersRequest:
    return wire.ister_api.DeadLettersRequest(
        topic=topic,
        offsets=[bound for pair in which.offsets for bound in pair],
        reason=which.reason,
        source_topic=which.source_topic,
        source_subscription=which.source_subscription,
        end=which.end,
        limit=limit,
    )
