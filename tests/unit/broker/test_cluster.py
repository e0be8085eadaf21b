"""Brokers that share a metadata store: who is there, and who has a topic."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from ister.broker.cluster import Address, Cluster
from ister.config import load_config
from ister.errors import FencedError, UnavailableError
from ister.metadata.base import Absent
from ister.model import TopicName
from ister.topic.log import Log
from servers.broker import broker_settings

NAME = TopicName.parse("/default/t")


def address(node, **more):
    return Address(
        **{
            "node": node,
            "broker_url": f"http://{node}:1",
            "connect_url": f"http://{node}:1",
            "flight_url": f"grpc://{node}:2",
            **more,
        }
    )


def open_log(directory, name):
    """A log on stores that it shares with the others in a directory."""
    settings = {
        "storage": {
            "cloud": {"root": str(directory / "objects")},
            "metadata": {"path": str(directory / "metadata.db")},
        }
    }
    return Log(load_config(broker_settings(directory / name, settings), {}))


@pytest.fixture
def logs(tmp_path):
    with open_log(tmp_path, "a") as a, open_log(tmp_path, "b") as b:
        yield a, b


@pytest.fixture
def pair(logs):
    """Two brokers that know of each other."""
    clusters = [Cluster(address(log.tiers.membership.node), log.tiers) for log in logs]
    for cluster in clusters:
        cluster.join()
    return clusters


def test_a_proxied_broker_says_so():
    assert not address("a").is_proxied
    assert address("a", connect_url="http://proxy:1").is_proxied


def test_brokers_know_of_each_other(pair):
    a, b = pair
    assert {one.node for one in a.brokers()} == {a.own.node, b.own.node}
    assert {one.node: one for one in b.brokers()}[a.own.node] == a.own


def test_a_broker_that_leaves_is_not_listed(pair):
    a, b = pair
    b.leave()
    b.leave()
    assert a.brokers() == [a.own]


def test_an_entry_ends_with_the_lease(pair, logs):
    a, _ = pair
    logs[1].tiers.membership.lease.revoke()
    assert a.brokers() == [a.own]


def test_a_replaced_broker_leaves_the_entry_of_its_copy_alone(pair, logs):
    _, b = pair
    metadata, node = logs[1].tiers.metadata, b.own.node
    key, process = f"/danube/cluster/brokers/{node}", f"/danube/cluster/nodes/{node}/process"
    metadata.put(process, metadata.get(process).value.replace(b'"instance":"', b'"instance":"x'))
    other = metadata.get(key).value.replace(b"http", b"https")
    metadata.put(key, other)
    b.join()
    b.leave()
    assert metadata.get(key).value == other


def test_a_replaced_broker_sends_clients_to_the_process_that_replaced_it(pair, logs):
    """The copy has the same node, so that the owner's key alone does not tell them apart."""
    _, b = pair
    metadata, node = logs[1].tiers.metadata, b.own.node
    logs[1].topic(str(NAME), create=True)
    key, process = f"/danube/cluster/brokers/{node}", f"/danube/cluster/nodes/{node}/process"
    metadata.put(process, metadata.get(process).value.replace(b'"instance":"', b'"instance":"x'))
    copy = address(node, broker_url="http://copy:1", connect_url="http://copy:1")
    metadata.put(key, json.dumps(asdict(copy)).encode())
    with pytest.raises(FencedError):
        logs[1].tiers.membership.renew()
    assert b.owner(NAME) == copy
    assert copy in b.brokers()
    assert b.own not in b.brokers()
    metadata.delete(key)
    with pytest.raises(UnavailableError, match="not a broker"):
        b.owner(NAME)


def test_an_entry_that_was_lost_is_put_back(pair, logs):
    a, b = pair
    logs[0].tiers.metadata.delete(f"/danube/cluster/brokers/{b.own.node}")
    assert a.brokers() == [a.own]
    b.join()
    assert len(a.brokers()) == 2


def test_joining_again_writes_only_what_has_changed(pair, logs):
    a, _ = pair
    key = f"/danube/cluster/brokers/{a.own.node}"
    before = logs[0].tiers.metadata.get(key).revision
    a.join()
    assert logs[0].tiers.metadata.get(key).revision == before
    a.own = address(a.own.node, flight_url="grpc://elsewhere:3")
    a.join()
    assert {one.node: one for one in pair[1].brokers()}[a.own.node] == a.own


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b'{"node": "x"}', b"7"], ids=repr)
def test_an_entry_that_cannot_be_read_is_passed_over(pair, logs, value):
    logs[0].tiers.metadata.put("/danube/cluster/brokers/x", value)
    assert len(pair[0].brokers()) == 2


def test_the_owner_is_the_broker_that_has_the_topic_open(pair, logs):
    a, b = pair
    assert a.owner(NAME) is None
    logs[0].topic("/default/t", create=True)
    logs[1].topic("/default/t2", create=True)
    assert a.owner(NAME) is None
    assert b.owner(NAME) == a.own
    # Names are compared whole.
    assert a.owner(TopicName.parse("/default/t2")) == b.own
    assert b.owner(TopicName.parse("/default/t3")) is None


def test_a_topic_in_a_process_that_is_no_broker_cannot_be_asked_for(logs):
    a = Cluster(address(logs[0].tiers.membership.node), logs[0].tiers)
    logs[1].topic("/default/t", create=True)
    with pytest.raises(UnavailableError, match="not a broker"):
        a.owner(NAME)


def test_a_broker_alone_is_alone():
    own = address("local")
    cluster = Cluster(own, None)
    cluster.join()
    assert cluster.brokers() == [own]
    assert cluster.owner(NAME) is None
    cluster.leave()


def test_a_store_that_does_not_answer_does_not_end_the_broker(caplog):
    class Silent:
        def get(self, key):
            raise UnavailableError("gone")

        def transact(self, compares, operations):
            raise UnavailableError("gone")

    settings = load_config(None, {}).storage
    membership = SimpleNamespace(is_here=Absent("/process"))
    tiers = SimpleNamespace(storage=settings, metadata=Silent(), membership=membership)
    cluster = Cluster(address("a"), tiers)
    cluster.join()
    cluster.leave()
    assert [record.message for record in caplog.records] == [
        "broker entry not written; other brokers do not see this one",
        "broker entry not removed; it is listed until its lease expires",
    ]
