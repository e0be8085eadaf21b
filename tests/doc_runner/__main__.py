"""`python -m tests.doc_runner PAGE …`: in a network of its own, if the machine permits that."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.doc_runner.pages import ROOT
from tests.doc_runner.run import main
from tests.doc_runner.world import new_world

if os.environ.get("DOCS_WORLD") == "inside":
    sys.exit(main())
with new_world() as world:
    environment = {**os.environ, "DOCS_WORLD": "inside", "PYTHONPATH": str(ROOT)}
    sys.exit(
        subprocess.run(
            [*world.enter, sys.executable, "-m", "tests.doc_runner", *sys.argv[1:]],
            env=environment,
            check=False,
        ).returncode
    )
