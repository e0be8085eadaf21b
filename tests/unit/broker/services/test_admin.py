"""danube_admin: what Danube's tools ask about brokers and namespaces."""

import json

import grpc
import pytest

from ister.wire import danube_admin, ister_api
from support.broker import a_broker, eventually, run
from support.cases import each

NAME = "/shop/orders"


async def status(call):
    """The status that a call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code().name


def test_namespaces_their_topics_and_bounds(tmp_path):
    async def scenario():
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
                (NAME, node, "Reliable")
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

    run(scenario())


@each("call", ["GetNamespacePolicies", "GetNamespaceTopics"])
def test_namespace_that_is_none_is_not_found(tmp_path, call):
    async def scenario():
        async with a_broker(tmp_path) as (_, services, _):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(services.namespaces, call)(danube_admin.NamespaceRequest(name="no"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario())


def test_one_broker_answers_as_a_cluster_of_one(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            node = broker.cluster.own.node
            await broker.topics.get_or_create("/default/t", is_reliable=True)
            await eventually(lambda: broker.cluster.leadership.is_leader)
            found = await services.brokers.ListBrokers(danube_admin.Empty())
            assert [
                (one.broker_id, one.broker_role, one.broker_status) for one in found.brokers
            ] == [(node, "leader", "active")]
            leader = await services.brokers.GetLeaderBroker(danube_admin.Empty())
            assert leader.leader == node
            for broker_id in ("", node, str(int(node, 16))):
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
                assert await status(call(request(broker_id="another"))) == "NOT_FOUND"
            unload = services.brokers.UnloadBroker(danube_admin.UnloadBrokerRequest())
            assert await status(unload) == "FAILED_PRECONDITION"
            assert broker.cluster.own.is_active
            balance = await services.brokers.GetClusterBalance(danube_admin.ClusterBalanceRequest())
            assert (balance.coefficient_of_variation, balance.broker_count) == (0, 1)
            assert (balance.mean_load, balance.max_load, balance.min_load) == (1, 1, 1)
            [load] = balance.brokers
            assert (load.broker_id, load.topic_count) == (int(node, 16), 1)
            assert not load.is_overloaded
            assert not load.is_underloaded
            assert balance.assignment_strategy == "fair"
            moves = await services.brokers.TriggerRebalance(danube_admin.RebalanceRequest())
            assert (moves.success, moves.moves_executed) == (True, 0)
            for call, request in (
                (services.cluster.ClusterStatus, danube_admin.Empty()),
                (services.cluster.AddNode, danube_admin.AddNodeRequest()),
            ):
                assert await status(call(request)) == "UNIMPLEMENTED"

    run(scenario())


@each("mode", ["memory", "local_only"])
def test_broker_without_a_bucket_answers_as_a_cluster_of_one(tmp_path, mode):
    async def scenario():
        async with a_broker(tmp_path, mode=mode) as (broker, services, _):
            await broker.topics.get_or_create("/default/t", is_reliable=True)
            found = await services.brokers.ListBrokers(danube_admin.Empty())
            assert [(one.broker_role, one.broker_status) for one in found.brokers] == [
                ("leader", "active")
            ]
            balance = await services.brokers.GetClusterBalance(danube_admin.ClusterBalanceRequest())
            assert (balance.coefficient_of_variation, balance.mean_load) == (0, 1)
            moves = await services.brokers.TriggerRebalance(danube_admin.RebalanceRequest())
            assert (moves.success, moves.moves_executed) == (True, 0)
            unload = services.brokers.UnloadBroker(danube_admin.UnloadBrokerRequest())
            assert await status(unload) == "FAILED_PRECONDITION"

    run(scenario())
