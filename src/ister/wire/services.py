"""Every RPC, by service, with the types of its messages. Written by `make protos`."""

from __future__ import annotations

from ister.wire.protos import Rpc, danube, danube_admin, danube_schema, ister_api

__all__ = [
    "Admin",
    "BrokerAdmin",
    "ClusterAdmin",
    "ConsumerService",
    "DeadLetters",
    "Delivery",
    "Discovery",
    "HealthCheck",
    "NamespaceAdmin",
    "Peers",
    "ProducerService",
    "SchemaRegistry",
    "SecurityAdmin",
    "StorageService",
    "TopicAdmin",
]


class ProducerService:
    """danube.ProducerService."""

    CreateProducer = Rpc[danube.ProducerRequest, danube.ProducerResponse]("danube.ProducerService", "CreateProducer")
    SendMessage = Rpc[danube.StreamMessage, danube.MessageResponse]("danube.ProducerService", "SendMessage")


class ConsumerService:
    """danube.ConsumerService."""

    Subscribe = Rpc[danube.ConsumerRequest, danube.ConsumerResponse]("danube.ConsumerService", "Subscribe")
    ReceiveMessages = Rpc[danube.ReceiveRequest, danube.StreamMessage]("danube.ConsumerService", "ReceiveMessages")
    Ack = Rpc[danube.AckRequest, danube.AckResponse]("danube.ConsumerService", "Ack")
    Nack = Rpc[danube.NackRequest, danube.NackResponse]("danube.ConsumerService", "Nack")


class Discovery:
    """danube.Discovery."""

    TopicLookup = Rpc[danube.TopicLookupRequest, danube.TopicLookupResponse]("danube.Discovery", "TopicLookup")
    TopicPartitions = Rpc[danube.TopicLookupRequest, danube.TopicPartitionsResponse]("danube.Discovery", "TopicPartitions")


class HealthCheck:
    """danube.HealthCheck."""

    HealthCheck = Rpc[danube.HealthCheckRequest, danube.HealthCheckResponse]("danube.HealthCheck", "HealthCheck")


class StorageService:
    """danube.StorageService."""

    ListSegmentDescriptors = Rpc[danube.ListSegmentDescriptorsRequest, danube.ListSegmentDescriptorsResponse]("danube.StorageService", "ListSegmentDescriptors")


class SchemaRegistry:
    """danube_schema.SchemaRegistry."""

    RegisterSchema = Rpc[danube_schema.RegisterSchemaRequest, danube_schema.RegisterSchemaResponse]("danube_schema.SchemaRegistry", "RegisterSchema")
    GetSchema = Rpc[danube_schema.GetSchemaRequest, danube_schema.GetSchemaResponse]("danube_schema.SchemaRegistry", "GetSchema")
    GetLatestSchema = Rpc[danube_schema.GetLatestSchemaRequest, danube_schema.GetSchemaResponse]("danube_schema.SchemaRegistry", "GetLatestSchema")
    ListVersions = Rpc[danube_schema.ListVersionsRequest, danube_schema.ListVersionsResponse]("danube_schema.SchemaRegistry", "ListVersions")
    CheckCompatibility = Rpc[danube_schema.CheckCompatibilityRequest, danube_schema.CheckCompatibilityResponse]("danube_schema.SchemaRegistry", "CheckCompatibility")
    DeleteSchemaVersion = Rpc[danube_schema.DeleteSchemaVersionRequest, danube_schema.DeleteSchemaVersionResponse]("danube_schema.SchemaRegistry", "DeleteSchemaVersion")
    SetCompatibilityMode = Rpc[danube_schema.SetCompatibilityModeRequest, danube_schema.SetCompatibilityModeResponse]("danube_schema.SchemaRegistry", "SetCompatibilityMode")
    ConfigureTopicSchema = Rpc[danube_schema.ConfigureTopicSchemaRequest, danube_schema.ConfigureTopicSchemaResponse]("danube_schema.SchemaRegistry", "ConfigureTopicSchema")
    UpdateTopicValidationPolicy = Rpc[danube_schema.UpdateTopicValidationPolicyRequest, danube_schema.UpdateTopicValidationPolicyResponse]("danube_schema.SchemaRegistry", "UpdateTopicValidationPolicy")
    GetTopicSchemaConfig = Rpc[danube_schema.GetTopicSchemaConfigRequest, danube_schema.GetTopicSchemaConfigResponse]("danube_schema.SchemaRegistry", "GetTopicSchemaConfig")
    ListSubjects = Rpc[danube_schema.ListSubjectsRequest, danube_schema.ListSubjectsResponse]("danube_schema.SchemaRegistry", "ListSubjects")


class BrokerAdmin:
    """danube_admin.BrokerAdmin."""

    ListBrokers = Rpc[danube_admin.Empty, danube_admin.BrokerListResponse]("danube_admin.BrokerAdmin", "ListBrokers")
    GetLeaderBroker = Rpc[danube_admin.Empty, danube_admin.BrokerResponse]("danube_admin.BrokerAdmin", "GetLeaderBroker")
    ListNamespaces = Rpc[danube_admin.Empty, danube_admin.NamespaceListResponse]("danube_admin.BrokerAdmin", "ListNamespaces")
    UnloadBroker = Rpc[danube_admin.UnloadBrokerRequest, danube_admin.UnloadBrokerResponse]("danube_admin.BrokerAdmin", "UnloadBroker")
    ActivateBroker = Rpc[danube_admin.ActivateBrokerRequest, danube_admin.ActivateBrokerResponse]("danube_admin.BrokerAdmin", "ActivateBroker")
    GetClusterBalance = Rpc[danube_admin.ClusterBalanceRequest, danube_admin.ClusterBalanceResponse]("danube_admin.BrokerAdmin", "GetClusterBalance")
    TriggerRebalance = Rpc[danube_admin.RebalanceRequest, danube_admin.RebalanceResponse]("danube_admin.BrokerAdmin", "TriggerRebalance")


class ClusterAdmin:
    """danube_admin.ClusterAdmin."""

    ClusterStatus = Rpc[danube_admin.Empty, danube_admin.ClusterStatusResponse]("danube_admin.ClusterAdmin", "ClusterStatus")
    AddNode = Rpc[danube_admin.AddNodeRequest, danube_admin.AddNodeResponse]("danube_admin.ClusterAdmin", "AddNode")
    PromoteNode = Rpc[danube_admin.PromoteNodeRequest, danube_admin.PromoteNodeResponse]("danube_admin.ClusterAdmin", "PromoteNode")
    RemoveNode = Rpc[danube_admin.RemoveNodeRequest, danube_admin.RemoveNodeResponse]("danube_admin.ClusterAdmin", "RemoveNode")


class NamespaceAdmin:
    """danube_admin.NamespaceAdmin."""

    GetNamespaceTopics = Rpc[danube_admin.NamespaceRequest, danube_admin.TopicListResponse]("danube_admin.NamespaceAdmin", "GetNamespaceTopics")
    GetNamespacePolicies = Rpc[danube_admin.NamespaceRequest, danube_admin.PolicyResponse]("danube_admin.NamespaceAdmin", "GetNamespacePolicies")
    CreateNamespace = Rpc[danube_admin.NamespaceRequest, danube_admin.NamespaceResponse]("danube_admin.NamespaceAdmin", "CreateNamespace")
    DeleteNamespace = Rpc[danube_admin.NamespaceRequest, danube_admin.NamespaceResponse]("danube_admin.NamespaceAdmin", "DeleteNamespace")


class TopicAdmin:
    """danube_admin.TopicAdmin."""

    ListNamespaceTopics = Rpc[danube_admin.NamespaceRequest, danube_admin.TopicInfoListResponse]("danube_admin.TopicAdmin", "ListNamespaceTopics")
    ListBrokerTopics = Rpc[danube_admin.BrokerRequest, danube_admin.TopicInfoListResponse]("danube_admin.TopicAdmin", "ListBrokerTopics")
    CreateTopic = Rpc[danube_admin.NewTopicRequest, danube_admin.TopicResponse]("danube_admin.TopicAdmin", "CreateTopic")
    CreatePartitionedTopic = Rpc[danube_admin.PartitionedTopicRequest, danube_admin.TopicResponse]("danube_admin.TopicAdmin", "CreatePartitionedTopic")
    DeleteTopic = Rpc[danube_admin.TopicRequest, danube_admin.TopicResponse]("danube_admin.TopicAdmin", "DeleteTopic")
    UnloadTopic = Rpc[danube_admin.TopicRequest, danube_admin.TopicResponse]("danube_admin.TopicAdmin", "UnloadTopic")
    ListSubscriptions = Rpc[danube_admin.TopicRequest, danube_admin.SubscriptionListResponse]("danube_admin.TopicAdmin", "ListSubscriptions")
    Unsubscribe = Rpc[danube_admin.SubscriptionRequest, danube_admin.SubscriptionResponse]("danube_admin.TopicAdmin", "Unsubscribe")
    SetSubscriptionFailurePolicy = Rpc[danube_admin.SetSubscriptionFailurePolicyRequest, danube_admin.SubscriptionResponse]("danube_admin.TopicAdmin", "SetSubscriptionFailurePolicy")
    GetSubscriptionFailurePolicy = Rpc[danube_admin.GetSubscriptionFailurePolicyRequest, danube_admin.GetSubscriptionFailurePolicyResponse]("danube_admin.TopicAdmin", "GetSubscriptionFailurePolicy")
    DescribeTopic = Rpc[danube_admin.DescribeTopicRequest, danube_admin.DescribeTopicResponse]("danube_admin.TopicAdmin", "DescribeTopic")
    SetSubscriptionDispatchConfig = Rpc[danube_admin.SetSubscriptionDispatchConfigRequest, danube_admin.SubscriptionResponse]("danube_admin.TopicAdmin", "SetSubscriptionDispatchConfig")
    GetSubscriptionDispatchConfig = Rpc[danube_admin.GetSubscriptionDispatchConfigRequest, danube_admin.GetSubscriptionDispatchConfigResponse]("danube_admin.TopicAdmin", "GetSubscriptionDispatchConfig")


class SecurityAdmin:
    """danube_admin.SecurityAdmin."""

    CreateRole = Rpc[danube_admin.CreateRoleRequest, danube_admin.CreateRoleResponse]("danube_admin.SecurityAdmin", "CreateRole")
    GetRole = Rpc[danube_admin.GetRoleRequest, danube_admin.GetRoleResponse]("danube_admin.SecurityAdmin", "GetRole")
    ListRoles = Rpc[danube_admin.Empty, danube_admin.ListRolesResponse]("danube_admin.SecurityAdmin", "ListRoles")
    DeleteRole = Rpc[danube_admin.DeleteRoleRequest, danube_admin.DeleteRoleResponse]("danube_admin.SecurityAdmin", "DeleteRole")
    CreateBinding = Rpc[danube_admin.CreateBindingRequest, danube_admin.CreateBindingResponse]("danube_admin.SecurityAdmin", "CreateBinding")
    GetBinding = Rpc[danube_admin.GetBindingRequest, danube_admin.GetBindingResponse]("danube_admin.SecurityAdmin", "GetBinding")
    ListBindings = Rpc[danube_admin.ListBindingsRequest, danube_admin.ListBindingsResponse]("danube_admin.SecurityAdmin", "ListBindings")
    ListAllBindings = Rpc[danube_admin.Empty, danube_admin.ListBindingsResponse]("danube_admin.SecurityAdmin", "ListAllBindings")
    DeleteBinding = Rpc[danube_admin.DeleteBindingRequest, danube_admin.DeleteBindingResponse]("danube_admin.SecurityAdmin", "DeleteBinding")


class Delivery:
    """ister.Delivery."""

    Consume = Rpc[ister_api.ConsumeRequest, ister_api.ConsumeResponse]("ister.Delivery", "Consume")


class Admin:
    """ister.Admin."""

    Info = Rpc[ister_api.InfoRequest, ister_api.InfoResponse]("ister.Admin", "Info")
    CreateTopic = Rpc[ister_api.CreateTopicRequest, ister_api.TopicDescription]("ister.Admin", "CreateTopic")
    DescribeTopic = Rpc[ister_api.TopicName, ister_api.TopicDescription]("ister.Admin", "DescribeTopic")
    DeletePartition = Rpc[ister_api.TopicName, ister_api.InfoRequest]("ister.Admin", "DeletePartition")
    SetTopicPolicies = Rpc[ister_api.SetPoliciesRequest, ister_api.PoliciesResponse]("ister.Admin", "SetTopicPolicies")
    SetNamespacePolicies = Rpc[ister_api.SetPoliciesRequest, ister_api.PoliciesResponse]("ister.Admin", "SetNamespacePolicies")
    ReleaseProducer = Rpc[ister_api.ProducerName, ister_api.ReleasedProducer]("ister.Admin", "ReleaseProducer")
    DescribeSubscription = Rpc[ister_api.SubscriptionName, ister_api.SubscriptionDescription]("ister.Admin", "DescribeSubscription")
    Seek = Rpc[ister_api.SeekRequest, ister_api.SubscriptionDescription]("ister.Admin", "Seek")
    RestrictSubscription = Rpc[ister_api.RestrictSubscriptionRequest, ister_api.SubscriptionDescription]("ister.Admin", "RestrictSubscription")
    ListTopics = Rpc[ister_api.ListTopicsRequest, ister_api.Document]("ister.Admin", "ListTopics")
    ShowTopic = Rpc[ister_api.TopicName, ister_api.Document]("ister.Admin", "ShowTopic")
    ShowBrokers = Rpc[ister_api.InfoRequest, ister_api.Document]("ister.Admin", "ShowBrokers")
    ShowCluster = Rpc[ister_api.InfoRequest, ister_api.Document]("ister.Admin", "ShowCluster")
    ShowOwnTopics = Rpc[ister_api.OwnTopicsRequest, ister_api.Document]("ister.Admin", "ShowOwnTopics")
    MoveTopic = Rpc[ister_api.MoveTopicRequest, ister_api.Document]("ister.Admin", "MoveTopic")
    TakeOverTopic = Rpc[ister_api.TakeOverRequest, ister_api.TakeOverResponse]("ister.Admin", "TakeOverTopic")
    DrainBroker = Rpc[ister_api.DrainBrokerRequest, ister_api.Document]("ister.Admin", "DrainBroker")
    ActivateBroker = Rpc[ister_api.BrokerName, ister_api.Document]("ister.Admin", "ActivateBroker")
    ShowBalance = Rpc[ister_api.InfoRequest, ister_api.Document]("ister.Admin", "ShowBalance")
    Rebalance = Rpc[ister_api.RebalanceRequest, ister_api.Document]("ister.Admin", "Rebalance")


class DeadLetters:
    """ister.DeadLetters."""

    Count = Rpc[ister_api.DeadLettersRequest, ister_api.Document]("ister.DeadLetters", "Count")
    Show = Rpc[ister_api.DeadLettersRequest, ister_api.Document]("ister.DeadLetters", "Show")
    Requeue = Rpc[ister_api.DeadLettersRequest, ister_api.Document]("ister.DeadLetters", "Requeue")
    Drop = Rpc[ister_api.DeadLettersRequest, ister_api.Document]("ister.DeadLetters", "Drop")


class Peers:
    """ister.Peers."""

    PublishDeadLetter = Rpc[ister_api.DeadLetter, ister_api.InfoRequest]("ister.Peers", "PublishDeadLetter")
    FindOwners = Rpc[ister_api.OwnTopicsRequest, ister_api.Document]("ister.Peers", "FindOwners")
