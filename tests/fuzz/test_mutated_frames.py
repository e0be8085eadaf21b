"""Runs the mutations of `mutate_frames.py`: a fixed seed, and one that is new every time.

ISTER_FUZZ_SEED replaces the new seed, ISTER_FUZZ_COUNT the number of mutants of each run.
"""

import os
import random

import pytest

from tests.fuzz.mutate_frames import run
from tests.support.scale import scaled

COUNT = int(os.environ.get("ISTER_FUZZ_COUNT", scaled("10000", "1000000")))
NEW_SEED = int(os.environ.get("ISTER_FUZZ_SEED", random.SystemRandom().getrandbits(32)))


# Room for a million mutants on a slow core.
@pytest.mark.timeout(60 + COUNT // 1000)
@pytest.mark.parametrize("seed", [pytest.param(1, id="fixed"), pytest.param(NEW_SEED, id="new")])
def test_mutated_frames_are_refused_or_whole(seed):
    """Every mutant is checked by `run`; here, that the run as a whole was worth something."""
    print(f"replay: python tests/fuzz/mutate_frames.py --seed {seed} --count {COUNT}")
    outcome = run(COUNT, seed)
    print(outcome)
    assert outcome.mutants == COUNT
    # By chance there is one in four billion; several would mean that the mutations make them.
    assert len(outcome.collisions) <= 1, outcome.collisions
    if COUNT >= 10_000:
        # The mutants reach every result, or the run proves nothing.
        assert outcome.frames_found > COUNT // 2
        assert outcome.bodies_decoded > COUNT // 20
        assert set(outcome.refused) == {
            "need more",
            "zero length",
            "length over limit",
            "offset mismatch",
            "crc mismatch",
        }
