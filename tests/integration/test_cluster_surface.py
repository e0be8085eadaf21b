"""Three brokers as operators and clients see them: Danube's admin calls, the CLI, the client.

Real processes that share a metadata store and a bucket. Each part starts from whatever the one
before has left: topics are named by their tests, and brokers that are drained are activated again.
"""

import asyncio
import json
from contextlib import ExitStack

import grpc
import pytest

from ister import wire
from ister.cli.main import main
from ister.client import AsyncClient, Client
from ister.errors import ConflictError, NotFoundError
from ister.subscription.policy import FailurePolicy, PoisonPolicy
from ister.wire import danube, danube_admin, ister_api
from tests.servers.broker import BrokerProcess
from tests.support.waiting import eventually, eventually_async

LEASE_SECONDS = 10


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trio")
    settings = {
        "storage": {
            "cloud": {"root": str(directory / "objects")},
            "metadata": {
                "path": str(directory / "metadata.db"),
                "lease_ttl_seconds": LEASE_SECONDS,
            },
        },
        "broker": {"cluster": {"zone": "here"}},
    }
    with ExitStack() as stack:
        yield [
            stack.enter_context(BrokerProcess(directory / name, settings=settings))
            for name in ("a", "b", "c")
        ]


@pytest.fixture
def run(trio, capsys):
    def call(*arguments, at=0):
        code = main([*arguments, "--broker", trio[at].address])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture
def client(trio):
    with Client(",".join(one.address for one in trio), timeout=30) as made:
        yield made


def nodes(client):
    """The nodes of all brokers, by address."""
    return {one["broker_url"].partition("://")[2]: one["node"] for one in client.admin.brokers()}


def owner(client, topic):
    return client.admin.show_topic(topic)["owner"]["node"]


def asked(broker, service, rpc, request):
    """Calls one broker, by the protocol alone."""
    with grpc.insecure_channel(broker.address) as channel:
        return getattr(wire.stub(channel, service), rpc)(request, timeout=60)


def status(broker, service, rpc, request):
    with pytest.raises(grpc.RpcError) as refused:
        asked(broker, service, rpc, request)
    return refused.value.code().name


def test_brokers_leader_and_load(trio, client, run):
    found = client.admin.brokers()
    assert len(found) == 3
    eventually(lambda: sum(one["is_leader"] for one in client.admin.brokers()) == 1)
    assert {one["state"] for one in found} == {"active"}
    assert {one["zone"] for one in found} == {"here"}
    assert all(one["version"] and one["http_url"] for one in found)
    assert set(found[0]["load"]) >= {"topics", "messages_in", "bytes_out", "cpu"}
    leaders = set()
    # Danube's tools know brokers by numbers.
    by_address = {address: int(node, 16) for address, node in nodes(client).items()}
    numbers = set(by_address.values())
    for broker in trio:
        listed = asked(broker, "danube_admin.BrokerAdmin", "ListBrokers", danube_admin.Empty())
        assert {int(one.broker_id) for one in listed.brokers} == numbers
        roles = {one.broker_role: one.broker_id for one in listed.brokers}
        answer = asked(broker, "danube_admin.BrokerAdmin", "GetLeaderBroker", danube_admin.Empty())
        assert answer.leader == roles["leader"]
        leaders.add(answer.leader)
        state = asked(broker, "danube_admin.ClusterAdmin", "ClusterStatus", danube_admin.Empty())
        assert set(state.voters) == numbers
        assert state.self_node_id == by_address[broker.address]
        assert str(state.leader_id) == answer.leader
        for number in numbers:
            request = danube_admin.AddNodeRequest(node_id=number)
            assert asked(broker, "danube_admin.ClusterAdmin", "AddNode", request).success
    assert len(leaders) == 1
    code, out, _ = run("brokers", "list", "--json")
    assert code == 0
    assert {one["node"] for one in json.loads(out)["brokers"]} == set(nodes(client).values())
    code, out, _ = run("brokers", "list")
    assert code == 0
    assert "LEADER" in out


def test_move_from_any_broker_to_any(trio, client, run, topic):
    """Goal: the topic goes where it is sent, with messages and cursors; every broker says so."""
    by_address = nodes(client)
    client.admin.create_topic(topic)
    with client.producer(topic) as producer, client.consumer(topic, "s") as consumer:
        producer.send(b"0")
        assert consumer.receive(timeout=60).payload == b"0"
        for number, target in enumerate((2, 0, 1), 1):
            to = by_address[trio[target].address]
            at = (target + 1) % 3
            code, out, _ = run("topics", "move", topic, "--to", to, "--json", at=at)
            assert (code, json.loads(out)["to"]) == (0, to)
            assert owner(client, topic) == to
            producer.send(b"%d" % number)
            assert consumer.receive(timeout=60).payload == b"%d" % number
    for broker in trio:
        described = asked(
            broker,
            "danube_admin.TopicAdmin",
            "DescribeTopic",
            danube_admin.DescribeTopicRequest(name=topic),
        )
        assert described.broker_id == str(int(to, 16))
        listed = asked(
            broker,
            "danube_admin.TopicAdmin",
            "ListNamespaceTopics",
            danube_admin.NamespaceRequest(name="default"),
        )
        assert {one.name: one.broker_id for one in listed.topics}[topic] == str(int(to, 16))
        for spelled in (to, str(int(to, 16))):
            of_one = asked(
                broker,
                "danube_admin.TopicAdmin",
                "ListBrokerTopics",
                danube_admin.BrokerRequest(broker_id=spelled),
            )
            assert topic in [one.name for one in of_one.topics]
    # Real figures, at whichever broker they are asked for.
    for at in range(3):
        code, out, _ = run("topics", "list", "--json", "--short", at=at)
        views = {one["topic"]: one for one in json.loads(out)["topics"]}
        assert views[topic]["watermarks"]["next"] == 4
    code, _, err = run("topics", "move", topic, "--to", "nobody")
    assert code == 1
    assert "broker nobody does not exist" in err
    with pytest.raises(NotFoundError):
        client.admin.move_topic("/default/no-such-topic", to)


def test_drained_broker_has_no_topics_until_it_is_activated(trio, client, run, topic):
    by_address = nodes(client)
    node = by_address[trio[1].address]
    client.admin.create_topic(topic)
    client.admin.move_topic(topic, node)
    dry = asked(
        trio[0],
        "danube_admin.BrokerAdmin",
        "UnloadBroker",
        danube_admin.UnloadBrokerRequest(broker_id=node, dry_run=True),
    )
    assert not dry.started
    assert (dry.succeeded, dry.failed) == (0, 0)
    assert dry.total == dry.pending >= 1
    moved = 0

    def is_drained():
        nonlocal moved
        code, out, err = run("brokers", "drain", node, "--json")  # asked for at another broker
        drained = json.loads(out)
        moved += drained["moved"]
        assert "draining" in err
        return (code, drained["failed"], drained["pending"]) == (0, [], 0)

    def state():
        return {one["node"]: one["state"] for one in client.admin.brokers()}[node]

    try:
        eventually(is_drained)
        # Those of other tests come and go.
        assert moved >= 1
        eventually(lambda: state() == "draining")
        assert owner(client, topic) != node
        code, _, err = run("topics", "move", topic, "--to", node)
        assert code == 1
        assert "draining" in err
    finally:
        code, out, _ = run("brokers", "activate", node, "--json")
    assert (code, json.loads(out)["state"]) == (0, "active")
    eventually(lambda: state() == "active")
    client.admin.move_topic(topic, node)
    # Danube's words for the same, for topics of one namespace alone: it takes topics meanwhile.
    unloaded = asked(
        trio[2],
        "danube_admin.BrokerAdmin",
        "UnloadBroker",
        danube_admin.UnloadBrokerRequest(
            broker_id=str(int(node, 16)), namespaces_include=["system"], timeout_seconds=30
        ),
    )
    assert (unloaded.started, unloaded.total) == (True, 0)
    assert state() == "active"
    assert owner(client, topic) == node
    missing = danube_admin.UnloadBrokerRequest(broker_id="nobody")
    assert status(trio[0], "danube_admin.BrokerAdmin", "UnloadBroker", missing) == "NOT_FOUND"


def test_balance_and_rebalance(trio, client, run, topic):
    by_address = nodes(client)
    node = by_address[trio[0].address]
    names = [f"{topic}-{number}" for number in range(6)]
    for name in names:
        client.admin.create_topic(name)
        client.admin.move_topic(name, node)
    balance = client.admin.balance()
    assert {one["node"] for one in balance["brokers"]} == set(by_address.values())
    assert balance["variation"] > balance["threshold"]
    same = asked(
        trio[2],
        "danube_admin.BrokerAdmin",
        "GetClusterBalance",
        danube_admin.ClusterBalanceRequest(),
    )
    assert same.broker_count == 3
    assert same.coefficient_of_variation == pytest.approx(balance["variation"], abs=0.01)
    assert [one.broker_id for one in same.brokers if one.is_overloaded] == [int(node, 16)]
    code, out, _ = run("brokers", "balance")
    assert code == 0
    assert "coefficient of variation" in out
    plans = []
    for at in range(3):  # whoever is asked, the leader plans
        code, out, _ = run("brokers", "rebalance", "--dry-run", "--json", at=at)
        assert code == 0
        plans.append(json.loads(out)["moves"])
    assert plans[0] == plans[1] == plans[2] != []
    assert {one["from"] for one in plans[0]} == {node}
    assert client.admin.balance()["variation"] == balance["variation"]
    planned = asked(
        trio[1],
        "danube_admin.BrokerAdmin",
        "TriggerRebalance",
        danube_admin.RebalanceRequest(dry_run=True, max_moves=1),
    )
    assert (planned.success, planned.moves_executed, len(planned.proposed_moves)) == (True, 0, 1)
    moves = client.admin.rebalance()["moves"]
    assert moves

    def have_moved():
        return all(owner(client, one["topic"]) == one["to"] for one in moves)

    eventually(have_moved)
    assert client.admin.balance()["variation"] < balance["variation"]


def test_partitions_on_all_brokers(trio, client, topic):
    client.admin.create_topic(topic, partitions=6)
    names = client.admin.partitions(topic)
    assert len(names) == 6
    # Where the leader places them depends on what other tests have left behind.
    everybody = sorted(nodes(client).values())
    for number, name in enumerate(names):
        if owner(client, name) != (node := everybody[number % 3]):
            client.admin.move_topic(name, node)
    assert {owner(client, name) for name in names} == set(everybody)
    assert (
        asked(trio[0], "ister.Admin", "DescribeTopic", ister_api.TopicName(topic=topic)).partitions
        == names
    )
    asked(trio[1], "danube_admin.TopicAdmin", "DeleteTopic", danube_admin.TopicRequest(name=topic))
    for broker in trio:
        found = asked(
            broker,
            "danube_admin.NamespaceAdmin",
            "GetNamespaceTopics",
            danube_admin.NamespaceRequest(name="default"),
        )
        assert not set(names) & set(found.topics)


def test_dead_letters_go_to_the_broker_that_has_their_topic(trio, client, topic):
    by_address = nodes(client)
    letters = f"{topic}-letters"
    client.admin.create_topic(topic)
    client.admin.create_topic(letters)
    client.admin.move_topic(topic, by_address[trio[0].address])
    client.admin.move_topic(letters, by_address[trio[1].address])
    with client.consumer(topic, "s") as consumer, client.producer(topic) as producer:
        client.admin.set_failure_policy(
            topic,
            "s",
            FailurePolicy(
                max_redelivery_count=0,
                base_redelivery_delay_ms=0,
                poison=PoisonPolicy.DEAD_LETTER,
                dead_letter_topic=letters,
            ),
        )
        producer.send(b"poison", routing_key="k")
        consumer.nack(consumer.receive(timeout=60))
        with client.consumer(letters, "l", start="earliest") as reader:
            letter = reader.receive(timeout=60)
            assert letter.payload == b"poison"
            assert letter.attributes["x-original-topic"] == topic
            reader.ack(letter)
    assert client.admin.describe_subscription(topic, "s").cursor == 1


def test_client_passes_over_brokers_that_are_gone_or_hang(trio, topic):
    """Goal: one address that answers is enough, wherever it stands in the list."""
    silent, closed = trio[0], "127.0.0.1:1"

    async def scenario():
        async with AsyncClient(f"{closed},{trio[1].address}", timeout=30) as first:
            await first.admin.create_topic(topic)
            by_address = {
                one["broker_url"].partition("://")[2]: one["node"]
                for one in await first.admin.brokers()
            }
            await first.admin.move_topic(topic, by_address[trio[1].address])
        async with AsyncClient(f"{silent.address},{trio[1].address}", timeout=60) as client:
            await client.admin.describe_topic(topic)  # the connection to the first one is open
            silent.pause()
            try:
                described = await client.admin.describe_topic(topic)
                assert described.topic == topic
            finally:
                silent.resume()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_client_that_knew_one_broker_goes_on_with_the_others(trio, topic):
    """Goal: look-ups teach a client where other brokers are; they answer when its own is gone."""

    async def scenario():
        async with AsyncClient(trio[0].address, timeout=60) as client:
            await client.admin.create_topic(topic)
            nodes = {
                one["broker_url"].partition("://")[2]: one["node"]
                for one in await client.admin.brokers()
            }
            await client.admin.move_topic(topic, nodes[trio[1].address])
            async with client.producer(topic) as producer:
                await producer.send(b"0")
            trio[0].stop()
            try:
                async with client.producer(topic) as producer:
                    await producer.send(b"1")
                assert (await client.admin.describe_topic(topic)).next == 2
            finally:
                trio[0].start()

            async def is_back():
                return len(await client.admin.brokers()) == 3

            await eventually_async(is_back)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_take_over_of_a_lost_disk_says_what_it_gives_up(trio, client, run, topic):
    by_address = nodes(client)
    node = by_address[trio[2].address]
    client.admin.create_topic(topic)
    client.admin.move_topic(topic, node)
    with client.producer(topic) as producer:
        for number in range(5):
            producer.send(b"%d" % number)
    code, _, err = run("topics", "take-over", topic, "--yes")
    assert code == 1
    assert "is up" in err
    with pytest.raises(ConflictError):
        client.admin.take_over(topic)
    trio[2].kill()
    try:

        def is_gone():
            return len(client.admin.brokers()) == 2

        eventually(is_gone)
        code, out, err = run("topics", "take-over", topic, "--json")
        assert code == 1
        lost = json.loads(out)
        assert (lost["ok"], lost["done"], lost["node"], lost["offset"]) == (False, False, node, 0)
        assert "offset 0 and later" in err
        waiting = client.admin.cluster()["waiting"]
        assert (topic, node, 0) in [(one["topic"], one["node"], one["offset"]) for one in waiting]
        code, out, _ = run("topics", "take-over", topic, "--yes", "--json")
        taken = json.loads(out)
        assert (code, taken["done"], taken["offset"]) == (0, True, 0)
        assert client.admin.describe_topic(topic).next == 0
        assert owner(client, topic) == by_address[trio[0].address]
    finally:
        trio[2].start()


def test_lookups_name_the_proxy(tmp_path, topic):
    """Goal: clients behind a proxy get its address, and the broker that it has to find."""
    settings = {"broker": {"advertised": {"connect_url": "http://proxy.example:6650"}}}
    with BrokerProcess(tmp_path, settings=settings) as broker:
        asked(broker, "ister.Admin", "CreateTopic", ister_api.CreateTopicRequest(topic=topic))
        found = asked(
            broker, "danube.Discovery", "TopicLookup", danube.TopicLookupRequest(topic=topic)
        )
        assert (found.proxy, found.connect_url) == (True, "http://proxy.example:6650")
        assert found.broker_url == broker.url
