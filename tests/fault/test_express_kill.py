"""kill -9 of a process whose topics share express objects, with and without its disk.

Topics have the ack level `tiered`: what was acknowledged is in the bucket, whichever of the points
around an express object, its commits, re-sorting or a collection the process died at. So every
other time its disk is lost as well, and another node claims the topics.
"""

import json
import random
import shutil
import signal
from contextlib import suppress

import pytest

import ister
from ister.base.failpoints import FAILPOINTS
from ister.bucket.names import EXPRESS_PREFIX
from tests.support.oracle import History
from tests.support.scale import nightly, scaled
from tests.support.tier_checks import check_catalog, memory_directory, read_bucket, tier_settings
from tests.support.waiting import eventually
from tests.support.writer_child import WriterChild, new_seed, say_replay

TIERED = frozenset({"tiered"})
SWAPS = ["tier.before_swap", "tier.after_swap"]
POINTS = [*sorted(point for point in FAILPOINTS if point.startswith("express.")), *SWAPS]
PATIENCE_SECONDS = 120.0
ACKS = 12
TOPICS = 4


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


class Series:
    """Processes one after the other, on machines that come and go, over one bucket."""

    def __init__(self, directory, seed: int) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.seed = seed
        self.chance = random.Random(f"{seed}/express")
        self.history = History()
        self.lost_disks = 0
        self.did: dict[str, int] = {}
        self._lives = 0
        self._node = 0

    @property
    def settings(self) -> dict:
        """Short times: everything is re-sorted and collected as soon as it may be."""
        return tier_settings(
            self.directory,
            node=f"node-{self._node}",
            ack="tiered",
            uploader={"express": {"linger_ms": 5, "max_bytes": 65536, "resort_seconds": 1}},
            cloud={"orphan_grace_minutes": 0},
            metadata={"lease_ttl_seconds": 2},
        )

    def child(self, failpoints: str | None = None) -> WriterChild:
        """The next process."""
        self._lives += 1
        return WriterChild(
            self.settings,
            self.history,
            failpoints=failpoints,
            mode="share",
            topics=TOPICS,
            session=f"c{self._lives}",
            seed=self.seed,
            tiered_share=1.0,
            pause_ms=2,
        )

    def note(self, child: WriterChild) -> None:
        """Takes in what a process has done; errors are none of its business."""
        # On a busy machine a lease of two seconds may end before it is renewed.
        told = {name.rpartition(":")[2] for name in child.errors}
        assert told <= {"UnavailableError"}, child.errors
        for what, count in child.did.items():
            self.did[what] = self.did.get(what, 0) + count

    def lose_disk(self) -> None:
        """The machine is gone, and another one takes its place."""
        shutil.rmtree(self.directory / f"node-{self._node}")
        self._node += 1
        self.lost_disks += 1

    def check(self) -> None:
        """Opens the log, which may have to wait for the lease, and compares all topics."""
        with ister.open(self.settings) as log:
            for name in self.history.topics():
                topic = claim(log, name)
                assert not topic.damage, topic.damage
                topic.flush()
                if topic.wal.next:
                    topic.wait(topic.wal.next - 1, timeout=60)
                found = [(m.offset, m.payload) for m in topic.read("earliest")]
                report = self.history.check(name, found, survives=TIERED, first=topic.earliest)
                assert report.is_clean, str(report)
                assert found == list(read_bucket(topic)), "the bucket has something else"
                check_catalog(topic)


def claim(log: ister.Log, name: str) -> ister.Topic:
    """Opens a topic as soon as the lease of its last owner has ended."""

    def opened() -> ister.Topic | None:
        with suppress(ister.ConflictError):
            return log.topic(name, create=True)
        return None

    return eventually(opened, f"{name} has an owner still", every=0.05)


def kill_at(series: Series, point: str, *, loses_disk: bool) -> None:
    """A process that dies at a point, and what is there afterwards."""
    visit = series.chance.randint(1, 3)
    with series.child(f"{point}=kill@{visit}") as child:
        assert not child.listen(PATIENCE_SECONDS), f"{point} was not reached {visit} times"
        assert child.ended() == -signal.SIGKILL, child.complaints()
    series.note(child)
    if loses_disk:
        series.lose_disk()
    series.check()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", range(3))
def test_kill_at_every_failpoint_loses_nothing_acknowledged(tmp_path, request, group):
    """Goal: each point is reached, and after a death at it nothing acknowledged is missing.

    Method: a third of the points, one after the other over the same bucket; every other time the
    disk is lost as well. By night in six directories, and each point both ways.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    for number in range(scaled(1, 6)):
        series = Series(tmp_path / str(number), seed + number)
        for at, point in enumerate(POINTS[group::3]):
            for loses_disk in scaled([at % 2 == 0], [True, False]):
                kill_at(series, point, loses_disk=loses_disk)
        assert series.lost_disks
        # How many depends on the machine: a process that dies at its first visit has few.
        assert series.history.acks


def kill_cycles(series: Series, cycles: int) -> None:
    """Processes that are each killed at a random moment; now and then their disk is lost."""
    for cycle in range(cycles):
        with series.child() as child:
            assert child.listen(PATIENCE_SECONDS, until="ready"), child.complaints()
            if cycle % 2 == 0:
                child.listen_for(lambda: has_done_all(child), "two of everything")
            child.listen(series.chance.uniform(0.1, 1.5))
            assert child.kill() == -signal.SIGKILL, child.complaints()
        series.note(child)
        if series.chance.random() < 0.3:
            series.lose_disk()
        # Now and then the next process has to cope by itself.
        if series.chance.random() < 0.5 or cycle == cycles - 1:
            series.check()


def has_done_all(child: WriterChild) -> bool:
    """Whether a process has acknowledged some messages, re-sorted and collected twice."""
    return child.lines["ack"] >= ACKS and min(child.did["resort"], child.did["collect"]) >= 2


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("cycles", "rounds"), [(4, 1), nightly(20, 10)])
def test_repeated_kill_loses_nothing_acknowledged(tmp_path, request, cycles, rounds):
    """Goal: nothing acknowledged is lost, doubled or changed by kill -9, with or without the disk.

    Method: processes that produce into four topics, re-sort, collect, trim and read, each killed
    after 0.1 to 1.5 s; every other one only when it has done two of everything.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    for number in range(rounds):
        series = Series(tmp_path / str(number), seed + number)
        kill_cycles(series, cycles)
        assert series.history.acks >= ACKS * cycles // 2, "hardly anything was acknowledged"
        assert series.did.get("resort", 0) >= cycles, "hardly anything was re-sorted"
        assert series.did.get("collect", 0) >= cycles, "hardly anything was collected"
        told = {"seed": seed + number, "acked": series.history.acks, "disks": series.lost_disks}
        print(json.dumps({"test": "kill -9 with express objects", **told, **series.did}))


def test_garbage_of_killed_processes_goes(tmp_path, request):
    """Goal: when the processes are gone, only what a descriptor names is left."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    series = Series(tmp_path, seed)
    for point in ("express.after_put", "express.before_commit"):
        kill_at(series, point, loses_disk=False)
    with ister.open(series.settings) as log:
        names = set()
        for name in series.history.topics():
            topic = claim(log, name)
            # A later owner's object has its offsets; until then the catalog may be an older copy.
            topic.wait(topic.append(b"last"), timeout=60)
            catalog = topic.bucket.owned.catalog
            names |= {d.object_id.partition("@")[0] for d, _ in catalog.descriptors()}

        def is_clean():
            # A process may have been killed in the middle of a collection, which holds this one up.
            log._background._express.collect()
            there = {info.key for info in log.stores.objects.list(EXPRESS_PREFIX)}
            return {key.removeprefix(EXPRESS_PREFIX) for key in there} <= names

        eventually(is_clean, "objects that no descriptor names are left", every=0.1)
