"""Stores that are put back to older states, by seeds; and bugs that these worlds have to catch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim import clone_world, cluster_world, tier_world
from tests.sim.restores import Restores
from tests.support.scale import first_seed, scaled

RUNS = {
    "tier": scaled(45, 2000),
    "clone": scaled(15, 1000),
    "cluster": scaled(40, 2000),
}
TURNS = 60
RUN_SEED: dict[str, Callable[..., object]] = {
    "tier": tier_world.run_seed,
    "clone": clone_world.run_seed,
    "cluster": cluster_world.run_seed,
}


def run(world: str, seed: int) -> Restores:
    """One world in which stores are put back."""
    return RUN_SEED[world](seed, turns=TURNS, restores=True).restores


@pytest.mark.sim
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("world", RUNS)
def test_stores_that_are_put_back_lose_nothing_silently(world: str) -> None:
    """Goal: an older store is noticed, and nothing acknowledged is lost without an error.

    Method: worlds from consecutive seeds, beginning with `first_seed`, which is printed.
    """
    first = first_seed()
    acks = events = refusals = accepted = 0
    for seed in range(first, first + RUNS[world]):
        restores = run(world, seed)
        acks += restores.acks_after
        events += restores.events
        refusals += restores.refusals
        accepted += restores.accepted
    print(
        f"{RUNS[world]} worlds from seed {first}: {events} times put back, {acks} acknowledged "
        f"after it, {refusals} refused, {accepted} accepted"
    )
    assert acks > RUNS[world]
    assert events > RUNS[world] // 2
