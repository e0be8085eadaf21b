"""The endurance run, for a minute: see `tests/endurance.py`."""

import pytest

from tests.endurance import Endurance
from tests.support.writer_child import new_seed


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["grpcio", "native"])
def test_broker_that_is_killed_every_8_seconds_loses_and_reorders_nothing(tmp_path, engine):
    seed = new_seed()
    print(f"replay: python -m tests.endurance --seconds 60 --seed {seed} --engine {engine}")
    summary = Endurance(tmp_path, 60, seed, engine).run()
    assert summary["endurance"] == "ok", summary
    assert summary["kills"] >= 3, "hardly anything was disturbed"
    assert summary["received_again"] > 0, "kills with nothing under way prove nothing"
