"""Three brokers without disks (`storage.mode: bucket`) under load: any of them may die, be stopped
or be restarted, and comes back as another node.

Runs and judge are those of `test_cluster`.
"""

import pytest

from tests.fault.test_cluster import report
from tests.servers.broker import lay_over
from tests.servers.cluster import BrokerCluster
from tests.support.cluster_run import CLUSTER_SETTINGS, ClusterRun, faults_of
from tests.support.scale import scaled
from tests.support.writer_child import new_seed, say_replay

KILLS = scaled(4, 40)
PAUSES = scaled(1, 10)
RESTARTS = scaled(1, 3)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_brokers_without_disks_lose_nothing(tmp_path, request):
    """Goal: what was acknowledged survives every process that had it; order and sequences hold.

    Method: kills, stops and rolling restarts under programs of both clients, with little memory.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    settings = {}
    lay_over(settings, CLUSTER_SETTINGS)
    diskless = {"mode": "bucket", "wal": {"dir": None}, "bucket": {"memory_max_bytes": 8 << 20}}
    lay_over(settings, {"storage": diskless})
    faults = faults_of(seed, kills=KILLS, pauses=PAUSES, restarts=RESTARTS)
    with BrokerCluster(tmp_path / "cluster", settings=settings) as cluster:
        summary = ClusterRun(cluster, tmp_path / "run", seed, faults).run()
        for broker in cluster.brokers:
            files = sorted(path.name for path in broker.directory.rglob("*"))
            assert files == ["broker.log", "ister.yml"]
    report("diskless cluster", summary)
    assert summary["kills"] == KILLS
    assert summary["received_again"] > 0, "kills with nothing under way prove nothing"
