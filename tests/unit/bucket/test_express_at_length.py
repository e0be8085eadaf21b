"""Express objects of many topics, and stores that take their time."""

import pytest

from tests.support.stores import Cluster
from tests.unit.bucket.test_express import Node
from tests.unit.bucket.test_express_collection import collect, keys, pass_time


@pytest.fixture
def cluster():
    return Cluster()


def test_collection_that_takes_longer_than_its_lease_is_finished(cluster):
    """Goal: with thousands of topics, a batch takes longer than the lease without renewals."""
    node = Node(cluster, 30)
    node.make([5] * 30).put(cluster.objects)
    node.write([6] * 30)
    pass_time(cluster, node)
    own = node.membership.instance

    def take_time(kind, key):
        if kind != "renew":
            cluster.clock.advance(1)

    cluster.metadata.before = take_time
    assert len(collect(cluster, process=own).removed) == 1
    assert len(keys(cluster)) == 1
