"""danube_admin: what Danube's tools ask about brokers and namespaces."""

import json

import grpc
import pytest

from ister.wire import danube_admin, ister_api
from support.broker import a_broker, run
from support.cases import each

NAME = "/shop/orders"


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


def test_brokers_and_what_there_is_nothing_of(tmp_path):
    async def scenario():
        async with a_broker(tmp_path) as (broker, services, _):
            node = broker.cluster.own.node
            found = await services.brokers.ListBrokers(danube_admin.Empty())
            assert [(one.broker_id, one.broker_status) for one in found.brokers] == [
                (node, "active")
            ]
            for broker_id, is_own in (("", True), (node, True), ("another", False)):
                answer = await services.brokers.ActivateBroker(
                    danube_admin.ActivateBrokerRequest(broker_id=broker_id)
                )
                assert answer.success is is_own
            for call, request in (
                (services.brokers.GetLeaderBroker, danube_admin.Empty()),
                (services.brokers.GetClusterBalance, danube_admin.ClusterBalanceRequest()),
                (services.brokers.TriggerRebalance, danube_admin.RebalanceRequest()),
                (services.cluster.ClusterStatus, danube_admin.Empty()),
                (services.cluster.AddNode, danube_admin.AddNodeRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario())
