"""A signal handler that raises, again and again, wherever a program is in a call of the library.

`make nightly` makes it 100,000 interrupts; `ISTER_STORM_SEED` replays one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scale import scaled

CHILD = Path(__file__).parents[1] / "support" / "storm_child.py"
INTERRUPTS = scaled(1_000, 100_000)
# A watchdog: nothing in the child waits for ever, so a child that takes this long hangs.
PATIENCE_SECONDS = scaled(240, 2400)


@pytest.mark.nightly
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
def test_storm_of_signals_hangs_loses_and_skips_nothing(tmp_path):
    seed = int(os.environ.get("ISTER_STORM_SEED") or random.randrange(1 << 32))
    print(f"replay: ISTER_STORM_SEED={seed} pytest {Path(__file__).name}")
    command = [sys.executable, "-X", "faulthandler", str(CHILD)]
    done = subprocess.run(
        [*command, str(tmp_path / "data"), str(INTERRUPTS), str(seed)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-4000:]}"
    report = json.loads(done.stdout)
    print(report)
    assert report["interrupts"] >= INTERRUPTS
    for kind in ("append", "many", "arrow", "record", "wait", "next", "close"):
        assert report[kind] > 0, f"{kind} was never interrupted"
