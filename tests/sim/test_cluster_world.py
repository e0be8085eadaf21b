"""Brokers that move topics, by seeds; and bugs that these worlds have to catch."""

from __future__ import annotations

import pytest

from ister.base.model import TopicName
from ister.broker.cluster import leader
from ister.broker.cluster.assignments import Assignments
from ister.broker.cluster.cluster import Cluster
from ister.broker.cluster.leader import Leader, Leadership
from ister.broker.cluster.placement import Move, Placement
from ister.bucket.ownership import OwnedTopic
from ister.format.records import OwnerRecord, TopicRecord, encode_owner
from ister.metadata.base import Absent, Put
from ister.topic.log import Log
from ister.topic.uploads import TopicUploads, UploadResult
from tests.sim.cluster_world import run_seed
from tests.sim.known_seeds import Plant, catch, plants_of
from tests.sim.world import find_break
from tests.support.scale import first_seed, scaled

RUNS = scaled(125, 20_000)
DISKLESS_RUNS = scaled(40, 5000)
TURNS = scaled(25, 60)
SEEDS_MAX = 1000


@pytest.mark.sim
@pytest.mark.timeout(6000)
def test_brokers_that_move_topics_lose_nothing_and_settle() -> None:
    """Goal: whatever fails, one broker at a time has a topic, and in the end one has each.

    Method: worlds from consecutive seeds, beginning with `first_seed`, which is printed.
    """
    first = first_seed()
    acks = created = handed_over = changes = leaders = drains = moves = waiting = taken = 0
    for seed in range(first, first + RUNS):
        world = run_seed(seed, turns=TURNS)
        acks += world.acks
        created += world.created
        handed_over += world.handed_over
        changes += world.failed_over
        leaders += world.elections
        drains += world.drains
        moves += world.rebalanced
        waiting += world.waiting
        taken += world.taken_over
    print(
        f"{RUNS} worlds from seed {first}: {acks} acknowledged, {created} topics, {handed_over} "
        f"handed over, {changes} changes of owner, {leaders} leaders, {drains} drains, {moves} "
        f"rebalanced, {waiting} wait for a disk, {taken} taken over"
    )
    assert min(acks, created, changes, leaders) > RUNS
    assert handed_over > RUNS // 2
    assert min(drains, moves) > RUNS // 4
    assert min(waiting, taken) > RUNS // 250


@pytest.mark.sim
@pytest.mark.timeout(3000)
def test_brokers_without_disks_lose_nothing_and_settle() -> None:
    """Goal: what was acknowledged outlives every process that had it.

    Method: the same worlds; most brokers keep no files, so each of their ends loses all of them.
    """
    first = first_seed()
    acks = changes = waiting = 0
    for seed in range(first, first + DISKLESS_RUNS):
        world = run_seed(seed, turns=TURNS, diskless=True)
        acks += world.acks
        changes += world.failed_over
        waiting += world.waiting
    print(f"{DISKLESS_RUNS} worlds from seed {first}: {acks} acknowledged, {changes} owners")
    assert min(acks, changes) > DISKLESS_RUNS
    assert waiting == 0, "no topic waits for a disk"


def messages_are_acknowledged_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    def upload(self: TopicUploads, **_: object) -> UploadResult:
        start = self._wal.tiered or 0
        self._wal.levels.advance_tiered(self._wal.synced)
        return UploadResult(start=start, end=self._wal.synced)

    patch.setattr(TopicUploads, "upload", upload)


@pytest.mark.sim
def test_worlds_without_disks_catch_an_early_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    messages_are_acknowledged_before_the_commit(monkeypatch)
    seed = find_break(range(SEEDS_MAX), lambda seed: run_seed(seed, turns=TURNS, diskless=True))
    print(f"caught by seed {seed}")
    assert seed is not None


def a_leader_is_believed_too_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "holds", Absent("/never"))


def a_claim_takes_no_proof(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TopicRecord, "is_whole", lambda self, tiered: True)


def a_move_seals_what_was_uploaded_when_it_began(patch: pytest.MonkeyPatch) -> None:
    """What was appended since is removed with the local files."""

    def seal(self: Log, name: str, *, assured: object = None) -> int:
        with self._exclusively(name) as topic:
            owned: OwnedTopic = topic.bucket.owned
            topic.close()
            self._unlist(topic)
            with topic.bucket.ended():
                self._stores.membership.remove(owned)
                owned.seal(owned.tiered)
            self._remove_files(TopicName.parse(name))
            return owned.tiered

    patch.setattr(Log, "seal", seal)


def an_owner_key_without_a_log_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    def put_owner(self: Cluster, stores, topic, lease) -> bool:
        value = encode_owner(OwnerRecord(node=self.own.node, epoch=0))
        stores.metadata.transact(
            [stores.membership.is_here], [Put(stores.keys(topic).owner, value, lease)]
        )
        return True

    patch.setattr(Cluster, "_put_owner", put_owner)


def a_sweep_ignores_owners(patch: pytest.MonkeyPatch) -> None:
    """Topics are placed again, wherever they are."""

    def sweep(self: Leader) -> list[str]:
        records = leader.read_records(self._store, self._root)
        known = {topic: revision for topic, (_, revision) in self._assignments.all().items()}
        placement = self._placement(self._members.read(), {})
        chosen = {topic: placement.choose(topic) for topic in reversed(records)}
        wanted = {
            topic: self._assignment(node, "swept")
            for topic, node in chosen.items()
            if node is not None
        }
        return self._assignments.assign_all(
            wanted,
            known={topic: known[topic] for topic in wanted if topic in known},
            condition=self._leadership.holds,
        )

    patch.setattr(Leader, "sweep", sweep)


def a_drain_forgets_a_topic(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(Placement):
        def choose(self, topic: str, *, exclude=()) -> str | None:
            return None if topic.endswith("3") else super().choose(topic, exclude=exclude)

    def placement(self: Cluster) -> Placement:
        others = self.others()
        counts = {one.node: one.load.topics for one in others}
        return Forgetful(others, counts, self.config.strategy)

    patch.setattr(Cluster, "placement", placement)


def a_rebalance_without_cooldown_never_settles(patch: pytest.MonkeyPatch) -> None:
    """One topic more is reason enough, and one that has just moved may move again."""

    def plan(self: Leader, moves_max: int, *, has_cooldown: bool = False) -> list[Move]:
        owned: dict[str, list[str]] = {
            one.node: [] for one in self._members.read() if one.is_active
        }
        for topic, node in self._owners().items():
            owned.setdefault(node, []).append(topic)
        ordered = sorted(owned, key=lambda node: len(owned[node]))
        if len(owned[ordered[-1]]) == len(owned[ordered[0]]):
            return []
        topic = owned[ordered[-1]][-1]
        return [Move(topic=topic, source=ordered[-1], target=ordered[0], load=1.0)]

    patch.setattr(Leader, "plan", plan)


def requests_are_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Assignments, "withdraw", lambda self, topic: None)


def assignments_in_vain_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "_kept", lambda self, assigned, owners, live: {})


# The one has a test of its own.
PLANTS = plants_of(__name__, but=(messages_are_acknowledged_before_the_commit,))


@pytest.mark.sim
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_worlds_of_brokers_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch("cluster", plant, monkeypatch, lambda seed: run_seed(seed, turns=TURNS), SEEDS_MAX)
