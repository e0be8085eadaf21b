"""Copies of a node's disk beside each other, by seeds; and bugs that these worlds have to catch."""

from __future__ import annotations

import pytest

import ister.bucket.membership
from ister.bucket.membership import Membership
from ister.bucket.ownership import OwnedTopic
from ister.metadata.base import Absent, Put
from tests.sim.clone_world import run_seed
from tests.sim.known_seeds import Plant, catch, plants_of
from tests.support.scale import first_seed, scaled

RUNS = scaled(50, 10_000)
SEEDS_MAX = 4000


@pytest.mark.sim
@pytest.mark.timeout(6000)
def test_copies_of_a_disk_lose_nothing_that_was_acknowledged() -> None:
    """Goal: whatever is copied, started, stopped and paused, one process at a time has a node.

    Method: worlds from consecutive seeds, beginning with `first_seed`, which is printed.
    """
    first = first_seed()
    acks = copies = refused = replaced = regained = 0
    for seed in range(first, first + RUNS):
        world = run_seed(seed)
        acks += world.acks
        copies += world.copies
        refused += world.refused
        replaced += world.replaced
        regained += world.regained
    print(
        f"{RUNS} worlds from seed {first}: {acks} acknowledged, {copies} copies, {refused} "
        f"refused, {replaced} replaced, {regained} back after a pause"
    )
    assert min(copies, refused, replaced, regained) > RUNS // 2
    assert acks > RUNS


def a_copy_joins_at_once(patch: pytest.MonkeyPatch) -> None:
    def wait_for_turn(self: Membership, known):
        return self._store.get(self._key), self._store.get(self._latest_key)

    patch.setattr(Membership, "_wait_for_turn", wait_for_turn)


def older_copies_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ister.bucket.membership, "_is_older", lambda known, latest: False)


def a_renewal_does_not_compare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_read_key", lambda self: self._store.get(self._key))
    patch.setattr(ister.bucket.membership, "_is_older", lambda known, latest: False)


def a_replaced_process_comes_back(patch: pytest.MonkeyPatch) -> None:
    """It looks who is there now, and not who was there meanwhile."""

    def rejoin(self: Membership):
        lease = self._store.grant_lease(self._ttl)
        self._read_key()
        self._store.transact([Absent(self._key)], [Put(self._key, self._value, lease)])
        return lease

    patch.setattr(Membership, "_rejoin", rejoin)


def a_batch_ignores_a_topic_that_was_taken(patch: pytest.MonkeyPatch) -> None:
    def reclaim(self: Membership, topics, lease) -> None:
        for topic in topics:
            topic.regain(lease)

    patch.setattr(Membership, "_reclaim_some", reclaim)


def a_batch_does_not_compare_the_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        OwnedTopic, "reassertion", lambda self, lease: ([self._is_kept()], self._owner_put(lease))
    )


def topics_count_before_they_are_back(patch: pytest.MonkeyPatch) -> None:
    """With the new lease, and not with their owner key."""
    real = Membership._reclaim

    def reclaim(self: Membership) -> None:
        lapsed = [topic for topic in self._owned.values() if topic.lease is not self.lease]
        for topic in lapsed:
            topic.lease = self.lease
        real(self)

    patch.setattr(Membership, "_reclaim", reclaim)


PLANTS = plants_of(__name__)


@pytest.mark.sim
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_worlds_of_copies_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch("clone", plant, monkeypatch, run_seed, SEEDS_MAX)
