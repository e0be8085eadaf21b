"""A log's view of the pipeline: whether one has the lease."""

from ister.bucket.pipeline import PipelineKeys, PipelineWatch
from ister.errors import UnavailableError
from tests.support.stores import PREFIX, Cluster


def test_lease_is_looked_up_a_few_times_in_its_time():
    cluster = Cluster()
    watch = PipelineWatch(
        cluster.metadata, PipelineKeys(PREFIX), ttl_seconds=15, clock=cluster.clock
    )
    looks = []
    cluster.metadata.before = lambda kind, key: looks.append(key)
    for _ in range(100):
        watch.is_running()
        cluster.clock.advance(0.15)
    assert set(looks) == {"/danube/pipeline/lease"}
    assert 4 <= len(looks) <= 6


def test_silent_store_changes_nobodys_mind():
    cluster = Cluster()
    keys = PipelineKeys(PREFIX)
    watch = PipelineWatch(cluster.metadata, keys, ttl_seconds=15, clock=cluster.clock)
    assert not watch.is_running()
    cluster.metadata.put(keys.lease, b"{}")
    cluster.clock.advance(5)
    assert watch.is_running()

    def silent(kind, key):
        raise UnavailableError("silent")

    cluster.metadata.before = silent
    cluster.clock.advance(100)
    assert watch.is_running()
    cluster.metadata.before = lambda kind, key: None
    cluster.metadata.delete(keys.lease)
    assert watch.is_running()
    cluster.clock.advance(5)
    assert not watch.is_running()
