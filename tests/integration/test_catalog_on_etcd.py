"""A long history in a real etcd: what a lookup costs does not grow with it.

Counted, not timed: the keys that etcd walks over (its answers say how many lie in the range that
was asked for, whatever the limit) and the bytes it sends.
"""

import pytest

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys
from ister.format.descriptor import encode_descriptor
from ister.format.records import encode_current
from ister.metadata.base import Put
from ister.metadata.etcd import EtcdMetadata
from tests.servers.etcd import EtcdServer
from tests.support.stores import NAME, PREFIX, a_descriptor

SMALL, LARGE = 1_000, 20_000
LENGTH = 1_000
KEYS = TopicKeys(PREFIX, NAME)

LOOKUPS = {
    "first": lambda catalog, count: catalog.first(),
    "last": lambda catalog, count: catalog.last(),
    "find": lambda catalog, count: catalog.find(count * LENGTH // 2 + 7),
    "following": lambda catalog, count: catalog.following(count * LENGTH // 2),
    "ends": lambda catalog, count: catalog.ends(),
}


class CountedStore(EtcdMetadata):
    """Notes what etcd walks over and sends."""

    keys = sent_bytes = 0

    def _read(self, action, method, request):
        answer = super()._read(action, method, request)
        self.keys += answer.count
        self.sent_bytes += answer.ByteSize()
        return answer

    def cost(self, action):
        """What an action costs, in keys and bytes."""
        keys, sent_bytes = self.keys, self.sent_bytes
        action()
        return self.keys - keys, self.sent_bytes - sent_bytes


@pytest.fixture
def store():
    with EtcdServer() as server:
        store = CountedStore([server.endpoint], clock=SystemClock())
        yield store
        store.close()


def a_catalog(store):
    return Catalog(store, KEYS, clock=SystemClock(), metrics=Metrics())


def fill(store, start, end):
    for at in range(start, end, 100):
        objects = [a_descriptor(n * LENGTH, (n + 1) * LENGTH) for n in range(at, at + 100)]
        puts = [Put(KEYS.descriptor(d.start), encode_descriptor(d)) for d in objects]
        store.transact([], [*puts, Put(KEYS.current, encode_current(objects[-1].start))])


@pytest.mark.nightly
def test_lookups_among_20000_objects_cost_what_they_do_among_1000(store):
    fill(store, 0, SMALL)
    costs = {}
    for count in (SMALL, LARGE):
        fill(store, 0 if count == SMALL else SMALL, count)
        for name, lookup in LOOKUPS.items():
            found = lookup(a_catalog(store), count)
            assert found is not None
            costs[name, count] = store.cost(lambda: lookup(a_catalog(store), count))  # noqa: B023
    for name in LOOKUPS:
        few, many = costs[name, SMALL], costs[name, LARGE]
        assert many[0] <= min(2 * few[0], 64), (name, few, many)
        assert many[1] <= 2 * few[1], (name, few, many)

    # A whole history costs each descriptor once or twice, walked over or read one by one.
    keys, sent_bytes = store.cost(lambda: list(a_catalog(store).descriptors()))
    assert keys <= 2 * LARGE
    one = len(encode_descriptor(a_descriptor(0, LENGTH))) + 150
    assert sent_bytes <= 2 * LARGE * one

    catalog = a_catalog(store)

    def read_on():
        at = 0
        while at < 2_000 * LENGTH:
            at = catalog.find(at).end

    keys, _ = store.cost(read_on)
    assert keys <= 2 * 2_000 + 64
