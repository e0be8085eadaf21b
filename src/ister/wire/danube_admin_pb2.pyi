from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DispatchStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    NonReliable: _ClassVar[DispatchStrategy]
    Reliable: _ClassVar[DispatchStrategy]

class SubscriptionBackoffStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    Fixed: _ClassVar[SubscriptionBackoffStrategy]
    Exponential: _ClassVar[SubscriptionBackoffStrategy]

class SubscriptionPoisonPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    DeadLetter: _ClassVar[SubscriptionPoisonPolicy]
    Block: _ClassVar[SubscriptionPoisonPolicy]
    Drop: _ClassVar[SubscriptionPoisonPolicy]
NonReliable: DispatchStrategy
Reliable: DispatchStrategy
Fixed: SubscriptionBackoffStrategy
Exponential: SubscriptionBackoffStrategy
DeadLetter: SubscriptionPoisonPolicy
Block: SubscriptionPoisonPolicy
Drop: SubscriptionPoisonPolicy

class RoleDefinition(_message.Message):
    name: str
    permissions: _containers.RepeatedScalarFieldContainer[str]
    system: bool
    def __init__(self, name: _Optional[str] = ..., permissions: _Optional[_Iterable[str]] = ..., system: _Optional[bool] = ...) -> None: ...

class CreateRoleRequest(_message.Message):
    role: RoleDefinition
    def __init__(self, role: _Optional[_Union[RoleDefinition, _Mapping[str, object]]] = ...) -> None: ...

class CreateRoleResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class GetRoleRequest(_message.Message):
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRoleResponse(_message.Message):
    role: RoleDefinition
    def __init__(self, role: _Optional[_Union[RoleDefinition, _Mapping[str, object]]] = ...) -> None: ...

class ListRolesResponse(_message.Message):
    roles: _containers.RepeatedCompositeFieldContainer[RoleDefinition]
    def __init__(self, roles: _Optional[_Iterable[_Union[RoleDefinition, _Mapping[str, object]]]] = ...) -> None: ...

class DeleteRoleRequest(_message.Message):
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteRoleResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class BindingDefinition(_message.Message):
    id: str
    principal_type: str
    principal_name: str
    role_names: _containers.RepeatedScalarFieldContainer[str]
    scope: str
    resource_name: str
    def __init__(self, id: _Optional[str] = ..., principal_type: _Optional[str] = ..., principal_name: _Optional[str] = ..., role_names: _Optional[_Iterable[str]] = ..., scope: _Optional[str] = ..., resource_name: _Optional[str] = ...) -> None: ...

class CreateBindingRequest(_message.Message):
    binding: BindingDefinition
    def __init__(self, binding: _Optional[_Union[BindingDefinition, _Mapping[str, object]]] = ...) -> None: ...

class CreateBindingResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class GetBindingRequest(_message.Message):
    scope: str
    resource_name: str
    binding_id: str
    def __init__(self, scope: _Optional[str] = ..., resource_name: _Optional[str] = ..., binding_id: _Optional[str] = ...) -> None: ...

class GetBindingResponse(_message.Message):
    binding: BindingDefinition
    def __init__(self, binding: _Optional[_Union[BindingDefinition, _Mapping[str, object]]] = ...) -> None: ...

class ListBindingsRequest(_message.Message):
    scope: str
    resource_name: str
    def __init__(self, scope: _Optional[str] = ..., resource_name: _Optional[str] = ...) -> None: ...

class ListBindingsResponse(_message.Message):
    bindings: _containers.RepeatedCompositeFieldContainer[BindingDefinition]
    def __init__(self, bindings: _Optional[_Iterable[_Union[BindingDefinition, _Mapping[str, object]]]] = ...) -> None: ...

class DeleteBindingRequest(_message.Message):
    scope: str
    resource_name: str
    binding_id: str
    def __init__(self, scope: _Optional[str] = ..., resource_name: _Optional[str] = ..., binding_id: _Optional[str] = ...) -> None: ...

class DeleteBindingResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class Empty(_message.Message):
    def __init__(self) -> None: ...

class NamespaceRequest(_message.Message):
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class NamespaceResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class NewTopicRequest(_message.Message):
    name: str
    schema_subject: str
    dispatch_strategy: DispatchStrategy
    def __init__(self, name: _Optional[str] = ..., schema_subject: _Optional[str] = ..., dispatch_strategy: _Optional[_Union[DispatchStrategy, str, int]] = ...) -> None: ...

class TopicRequest(_message.Message):
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class TopicResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class PartitionedTopicRequest(_message.Message):
    base_name: str
    partitions: int
    schema_subject: str
    dispatch_strategy: DispatchStrategy
    def __init__(self, base_name: _Optional[str] = ..., partitions: _Optional[int] = ..., schema_subject: _Optional[str] = ..., dispatch_strategy: _Optional[_Union[DispatchStrategy, str, int]] = ...) -> None: ...

class SubscriptionRequest(_message.Message):
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class SubscriptionResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class SubscriptionFailurePolicy(_message.Message):
    max_redelivery_count: int
    ack_timeout_ms: int
    base_redelivery_delay_ms: int
    max_redelivery_delay_ms: int
    backoff_strategy: SubscriptionBackoffStrategy
    dead_letter_topic: str
    poison_policy: SubscriptionPoisonPolicy
    def __init__(self, max_redelivery_count: _Optional[int] = ..., ack_timeout_ms: _Optional[int] = ..., base_redelivery_delay_ms: _Optional[int] = ..., max_redelivery_delay_ms: _Optional[int] = ..., backoff_strategy: _Optional[_Union[SubscriptionBackoffStrategy, str, int]] = ..., dead_letter_topic: _Optional[str] = ..., poison_policy: _Optional[_Union[SubscriptionPoisonPolicy, str, int]] = ...) -> None: ...

class SetSubscriptionFailurePolicyRequest(_message.Message):
    topic: str
    subscription: str
    failure_policy: SubscriptionFailurePolicy
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., failure_policy: _Optional[_Union[SubscriptionFailurePolicy, _Mapping[str, object]]] = ...) -> None: ...

class GetSubscriptionFailurePolicyRequest(_message.Message):
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class GetSubscriptionFailurePolicyResponse(_message.Message):
    failure_policy: SubscriptionFailurePolicy
    subscription_type: int
    def __init__(self, failure_policy: _Optional[_Union[SubscriptionFailurePolicy, _Mapping[str, object]]] = ..., subscription_type: _Optional[int] = ...) -> None: ...

class SubscriptionDispatchConfig(_message.Message):
    max_unacked_messages: int
    def __init__(self, max_unacked_messages: _Optional[int] = ...) -> None: ...

class SetSubscriptionDispatchConfigRequest(_message.Message):
    topic: str
    subscription: str
    dispatch_config: SubscriptionDispatchConfig
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., dispatch_config: _Optional[_Union[SubscriptionDispatchConfig, _Mapping[str, object]]] = ...) -> None: ...

class GetSubscriptionDispatchConfigRequest(_message.Message):
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class GetSubscriptionDispatchConfigResponse(_message.Message):
    dispatch_config: SubscriptionDispatchConfig
    def __init__(self, dispatch_config: _Optional[_Union[SubscriptionDispatchConfig, _Mapping[str, object]]] = ...) -> None: ...

class BrokerListResponse(_message.Message):
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerInfo]
    def __init__(self, brokers: _Optional[_Iterable[_Union[BrokerInfo, _Mapping[str, object]]]] = ...) -> None: ...

class BrokerInfo(_message.Message):
    broker_id: str
    broker_addr: str
    broker_role: str
    admin_addr: str
    metrics_addr: str
    broker_status: str
    def __init__(self, broker_id: _Optional[str] = ..., broker_addr: _Optional[str] = ..., broker_role: _Optional[str] = ..., admin_addr: _Optional[str] = ..., metrics_addr: _Optional[str] = ..., broker_status: _Optional[str] = ...) -> None: ...

class BrokerResponse(_message.Message):
    leader: str
    def __init__(self, leader: _Optional[str] = ...) -> None: ...

class NamespaceListResponse(_message.Message):
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespaces: _Optional[_Iterable[str]] = ...) -> None: ...

class TopicListResponse(_message.Message):
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ...) -> None: ...

class TopicInfo(_message.Message):
    name: str
    broker_id: str
    delivery: str
    def __init__(self, name: _Optional[str] = ..., broker_id: _Optional[str] = ..., delivery: _Optional[str] = ...) -> None: ...

class TopicInfoListResponse(_message.Message):
    topics: _containers.RepeatedCompositeFieldContainer[TopicInfo]
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicInfo, _Mapping[str, object]]]] = ...) -> None: ...

class BrokerRequest(_message.Message):
    broker_id: str
    def __init__(self, broker_id: _Optional[str] = ...) -> None: ...

class PolicyResponse(_message.Message):
    policies: str
    def __init__(self, policies: _Optional[str] = ...) -> None: ...

class SubscriptionListResponse(_message.Message):
    subscriptions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, subscriptions: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeTopicRequest(_message.Message):
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DescribeTopicResponse(_message.Message):
    name: str
    subscriptions: _containers.RepeatedScalarFieldContainer[str]
    broker_id: str
    delivery: str
    schema_subject: str
    schema_id: int
    schema_version: int
    schema_type: str
    compatibility_mode: str
    def __init__(self, name: _Optional[str] = ..., subscriptions: _Optional[_Iterable[str]] = ..., broker_id: _Optional[str] = ..., delivery: _Optional[str] = ..., schema_subject: _Optional[str] = ..., schema_id: _Optional[int] = ..., schema_version: _Optional[int] = ..., schema_type: _Optional[str] = ..., compatibility_mode: _Optional[str] = ...) -> None: ...

class UnloadBrokerRequest(_message.Message):
    broker_id: str
    max_parallel: int
    namespaces_include: _containers.RepeatedScalarFieldContainer[str]
    namespaces_exclude: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    timeout_seconds: int
    def __init__(self, broker_id: _Optional[str] = ..., max_parallel: _Optional[int] = ..., namespaces_include: _Optional[_Iterable[str]] = ..., namespaces_exclude: _Optional[_Iterable[str]] = ..., dry_run: _Optional[bool] = ..., timeout_seconds: _Optional[int] = ...) -> None: ...

class UnloadBrokerResponse(_message.Message):
    started: bool
    total: int
    succeeded: int
    failed: int
    pending: int
    failed_topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, started: _Optional[bool] = ..., total: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., pending: _Optional[int] = ..., failed_topics: _Optional[_Iterable[str]] = ...) -> None: ...

class ActivateBrokerRequest(_message.Message):
    broker_id: str
    reason: str
    def __init__(self, broker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ActivateBrokerResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class ClusterBalanceRequest(_message.Message):
    def __init__(self) -> None: ...

class ClusterBalanceResponse(_message.Message):
    coefficient_of_variation: float
    mean_load: float
    max_load: float
    min_load: float
    std_deviation: float
    broker_count: int
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerLoadInfo]
    assignment_strategy: str
    def __init__(self, coefficient_of_variation: _Optional[float] = ..., mean_load: _Optional[float] = ..., max_load: _Optional[float] = ..., min_load: _Optional[float] = ..., std_deviation: _Optional[float] = ..., broker_count: _Optional[int] = ..., brokers: _Optional[_Iterable[_Union[BrokerLoadInfo, _Mapping[str, object]]]] = ..., assignment_strategy: _Optional[str] = ...) -> None: ...

class BrokerLoadInfo(_message.Message):
    broker_id: int
    load: float
    topic_count: int
    is_overloaded: bool
    is_underloaded: bool
    def __init__(self, broker_id: _Optional[int] = ..., load: _Optional[float] = ..., topic_count: _Optional[int] = ..., is_overloaded: _Optional[bool] = ..., is_underloaded: _Optional[bool] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    dry_run: bool
    max_moves: int
    def __init__(self, dry_run: _Optional[bool] = ..., max_moves: _Optional[int] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    success: bool
    moves_executed: int
    proposed_moves: _containers.RepeatedCompositeFieldContainer[ProposedMove]
    error_message: str
    def __init__(self, success: _Optional[bool] = ..., moves_executed: _Optional[int] = ..., proposed_moves: _Optional[_Iterable[_Union[ProposedMove, _Mapping[str, object]]]] = ..., error_message: _Optional[str] = ...) -> None: ...

class ProposedMove(_message.Message):
    topic_name: str
    from_broker: int
    to_broker: int
    estimated_load: float
    reason: str
    def __init__(self, topic_name: _Optional[str] = ..., from_broker: _Optional[int] = ..., to_broker: _Optional[int] = ..., estimated_load: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ClusterStatusResponse(_message.Message):
    leader_id: int
    current_term: int
    last_applied: int
    voters: _containers.RepeatedScalarFieldContainer[int]
    learners: _containers.RepeatedScalarFieldContainer[int]
    self_node_id: int
    raft_addr: str
    def __init__(self, leader_id: _Optional[int] = ..., current_term: _Optional[int] = ..., last_applied: _Optional[int] = ..., voters: _Optional[_Iterable[int]] = ..., learners: _Optional[_Iterable[int]] = ..., self_node_id: _Optional[int] = ..., raft_addr: _Optional[str] = ...) -> None: ...

class AddNodeRequest(_message.Message):
    addr: str
    node_id: int
    def __init__(self, addr: _Optional[str] = ..., node_id: _Optional[int] = ...) -> None: ...

class AddNodeResponse(_message.Message):
    success: bool
    node_id: int
    message: str
    def __init__(self, success: _Optional[bool] = ..., node_id: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PromoteNodeRequest(_message.Message):
    node_id: int
    def __init__(self, node_id: _Optional[int] = ...) -> None: ...

class PromoteNodeResponse(_message.Message):
    success: bool
    message: str
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class RemoveNodeRequest(_message.Message):
    node_id: int
    def __init__(self, node_id: _Optional[int] = ...) -> None: ...

class RemoveNodeResponse(_message.Message):
    success: bool
    message: str
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...
