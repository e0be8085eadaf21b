"""danube_admin: what Danube's tools ask about brokers and namespaces."""

import asyncio
import json

import grpc
import pytest

from ister.broker.topics.cluster_control import broker_number
from ister.wire import danube_admin, ister_api
from tests.support.broker import a_broker, eventually
from tests.support.broker_calls import Code, status
from tests.support.cases import each

NAME = "/shop/orders"


async def test_namespaces_their_topics_and_bounds(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        await services.namespaces.CreateNamespace(danube_admin.NamespaceRequest(name="shop"))
        found = await services.brokers.ListNamespaces(danube_admin.Empty())
        assert set(found.namespaces) == {"default", "system", "shop"}
        await broker.topics.get_or_create(NAME, is_reliable=True)
        await broker.topics.get_or_create("/default/other", is_reliable=False)
        listed = await services.topics.ListNamespaceTopics(
            danube_admin.NamespaceRequest(name="shop")
        )
        node = broker.cluster.own.node
        assert [(one.name, one.broker_id, one.delivery) for one in listed.topics] == [
            (NAME, str(int(node, 16)), "Reliable")
        ]
        await services.admin.SetNamespacePolicies(
            ister_api.SetPoliciesRequest(name="shop", policies='{"max_publish_rate": 7}')
        )
        # In force at once, for topics that are open as for those to come.
        assert broker.topics.find_open(NAME).publish_rate.per_second == 7
        answer = await services.namespaces.GetNamespacePolicies(
            danube_admin.NamespaceRequest(name="shop")
        )
        assert json.loads(answer.policies)["max_publish_rate"] == 7
        assert broker.topics.find_open("/default/other").publish_rate.per_second == 0
        for call in (
            services.namespaces.GetNamespacePolicies,
            services.namespaces.GetNamespaceTopics,
        ):
            assert await status(call(danube_admin.NamespaceRequest(name="no"))) is Code.NOT_FOUND


async def test_a_topic_of_the_other_strategy_exists_already(tmp_path):
    reliable, other = (
        danube_admin.DispatchStrategy.Reliable,
        danube_admin.DispatchStrategy.NonReliable,
    )
    async with a_broker(tmp_path) as (_, services, _listening):

        def create(strategy):
            return services.topics.CreateTopic(
                danube_admin.NewTopicRequest(name="/default/t", dispatch_strategy=strategy)
            )

        def partitioned(strategy):
            return services.topics.CreatePartitionedTopic(
                danube_admin.PartitionedTopicRequest(
                    base_name="/default/p", partitions=2, dispatch_strategy=strategy
                )
            )

        for call in (create, partitioned):
            assert (await call(reliable)).success
            assert (await call(reliable)).success
            assert await status(call(other)) is Code.ALREADY_EXISTS


@each("mode", ["memory", "local_only", "wal_cloud"])
async def test_one_broker_answers_as_a_cluster_of_one(tmp_path, mode):
    async with a_broker(tmp_path, mode=mode) as (broker, services, _):
        node = broker.cluster.own.node
        assert broker_number("0" * 16) == 1  # 0 is no broker to Danube's tools
        number = int(node, 16) if mode == "wal_cloud" else 1
        await broker.topics.get_or_create("/default/t", is_reliable=True)
        if mode == "wal_cloud":
            await eventually(lambda: broker.cluster.leadership.is_leader)
        found = await services.brokers.ListBrokers(danube_admin.Empty())
        assert [(one.broker_id, one.broker_role, one.broker_status) for one in found.brokers] == [
            (str(number), "leader", "active")
        ]
        leader = await services.brokers.GetLeaderBroker(danube_admin.Empty())
        assert leader.leader == str(number)
        for broker_id in ("", str(number), node if mode == "wal_cloud" else ""):
            answer = await services.brokers.ActivateBroker(
                danube_admin.ActivateBrokerRequest(broker_id=broker_id)
            )
            assert answer.success
            listed = await services.topics.ListBrokerTopics(
                danube_admin.BrokerRequest(broker_id=broker_id)
            )
            assert [one.name for one in listed.topics] == ["/default/t"]
        for call, request in (
            (services.brokers.ActivateBroker, danube_admin.ActivateBrokerRequest),
            (services.brokers.UnloadBroker, danube_admin.UnloadBrokerRequest),
            (services.topics.ListBrokerTopics, danube_admin.BrokerRequest),
        ):
            assert await status(call(request(broker_id="another"))) is Code.NOT_FOUND
        unload = services.brokers.UnloadBroker(danube_admin.UnloadBrokerRequest())
        assert await status(unload) is Code.FAILED_PRECONDITION
        assert broker.cluster.own.is_active
        balance = await services.brokers.GetClusterBalance(danube_admin.ClusterBalanceRequest())
        assert (balance.coefficient_of_variation, balance.broker_count) == (0, 1)
        assert (balance.mean_load, balance.max_load, balance.min_load) == (1, 1, 1)
        [load] = balance.brokers
        assert (load.broker_id, load.topic_count) == (number, 1)
        assert not load.is_overloaded
        assert not load.is_underloaded
        assert balance.assignment_strategy == "fair"
        moves = await services.brokers.TriggerRebalance(danube_admin.RebalanceRequest())
        assert (moves.success, moves.moves_executed) == (True, 0)
        await check_members(services, number)


async def check_members(services, number):
    """The calls about Danube's consensus: one broker is its own leader and the only voter."""
    cluster = services.cluster
    found = await cluster.ClusterStatus(danube_admin.Empty())
    assert (found.leader_id, found.self_node_id, found.voters) == (number, number, [number])
    assert (found.current_term, found.last_applied, found.learners) == (0, 0, [])
    assert found.raft_addr.startswith("http")
    add, promote = danube_admin.AddNodeRequest, danube_admin.PromoteNodeRequest
    for call, request in ((cluster.AddNode, add), (cluster.PromoteNode, promote)):
        answer = await call(request(node_id=number))
        assert answer.success, answer.message
    answer = await cluster.AddNode(add(node_id=number + 1))
    assert not answer.success
    assert "start it" in answer.message
    assert await status(cluster.PromoteNode(promote(node_id=number + 1))) is Code.NOT_FOUND
    answer = await cluster.RemoveNode(danube_admin.RemoveNodeRequest(node_id=number))
    assert not answer.success
    assert "stop it" in answer.message
    answer = await cluster.RemoveNode(danube_admin.RemoveNodeRequest(node_id=number + 1))
    assert answer.success


async def test_partition_is_not_deleted_alone(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        await broker.topics.create_partitioned("/default/o", 3, is_reliable=True)
        names = await broker.topics.names.all()
        for name in names:
            call = services.topics.DeleteTopic(danube_admin.TopicRequest(name=name))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert refused.value.details().endswith("delete /default/o")
        assert await broker.topics.names.all() == names
        await services.topics.DeleteTopic(danube_admin.TopicRequest(name="/default/o"))
        assert await broker.topics.names.all() == set()


async def test_partitions_are_deleted_one_by_one_by_their_own_call(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        await broker.topics.create_partitioned("/default/o", 2, is_reliable=True)
        await broker.topics.get_or_create("/default/plain", is_reliable=True)
        delete = services.admin.DeletePartition
        plain = delete(ister_api.TopicName(topic="/default/plain"))
        assert await status(plain) is Code.INVALID_ARGUMENT
        await delete(ister_api.TopicName(topic="/default/o-part-1"))
        assert await broker.topics.names.all() == {"/default/o-part-0", "/default/plain"}
        missing = delete(ister_api.TopicName(topic="/default/o-part-1"))
        assert await status(missing) is Code.NOT_FOUND


async def test_description_of_a_topic_has_its_compatibility_mode_in_upper_case(tmp_path):
    async with a_broker(tmp_path, mode="memory") as (broker, services, _):
        registered = await asyncio.to_thread(
            broker.schemas.register, "orders", "json_schema", b'{"type": "object"}'
        )
        await services.topics.CreateTopic(
            danube_admin.NewTopicRequest(
                name="/default/t", schema_subject="orders", dispatch_strategy=1
            )
        )
        found = await services.topics.DescribeTopic(
            danube_admin.DescribeTopicRequest(name="/default/t")
        )
        assert (found.broker_id, found.delivery) == ("1", "Reliable")
        assert (found.schema_subject, found.schema_version) == ("orders", 1)
        assert found.schema_id == registered.schema_id
        assert found.compatibility_mode == "BACKWARD"
