"""Each contender of `make peers`, for a moment.

Those of other servers need what `make peers PEERS_CACHE=DIRECTORY` has installed there; without
that variable they are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import install
from benchmarks.peers.measure import CONTENDERS

ROOT = Path(__file__).parents[2]


def measured(name: str, durability: str, directory: Path) -> dict:
    python = sys.executable
    command = ["-m", "benchmarks.peers.measure", name, durability]
    command += ["--directory", str(directory), "--scale", "0.01", "--restart"]
    if not name.startswith("ister"):
        cache = os.environ.get("PEERS_CACHE")
        if not cache:
            pytest.skip("PEERS_CACHE is not set: `make peers PEERS_CACHE=DIRECTORY` installs peers")
        python = str(install.python_of(Path(cache)))
        command += ["--cache", cache]
    done = subprocess.run(
        [python, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "durability"),
    [("ister-flight", "synced"), *((name, "unsynced") for name in CONTENDERS)],
)
def test_contender_is_measured_and_loses_nothing(name, durability, tmp_path):
    result = measured(name, durability, tmp_path)
    if "missing" in result:
        pytest.skip(result["missing"])
    figures, facts = result["figures"], result["facts"]
    assert all(facts[key] for key in ("server", "client", "durability", "settings", "consuming"))
    rates = {name: found["value"] for name, found in figures.items() if isinstance(found, dict)}
    assert {"one", "many"} <= set(rates)
    assert all(value > 0 for value in rates.values())
    assert 0 < figures["tail_p50_ms"] <= figures["tail_p99_ms"]
    assert figures.get("lost", 0) == 0
    assert figures["idle_mib"] > 1
