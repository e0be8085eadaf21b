"""Every command and every piece of Python that a document shows is run, as it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from doc_runner.pages import ROOT, SHELL, find_pages, read_page
from doc_runner.run import Outcome

PAGES = [path for path in find_pages() if read_page(path).runs()]
# Several times what the longest page takes on a machine that is busy with something else.
_PAGE_SECONDS = 420


@pytest.mark.timeout(_PAGE_SECONDS + 60)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_of_a_page_run_as_written(path, stage):
    environment = {
        **os.environ,
        "DOCS_WORLD": "inside",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    done = subprocess.run(
        [
            *stage.world.enter,
            *(sys.executable, "-m", "doc_runner", "--json"),
            *("--interpreter", stage.interpreter, str(path)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PAGE_SECONDS,
        check=False,
    )
    assert done.stdout, done.stderr
    outcome = Outcome(**json.loads(done.stdout.splitlines()[-1]))
    stage.outcomes.append(outcome)
    assert outcome.failure is None, outcome.failure
    assert done.returncode == 0, done.stderr
    if outcome.skipped:
        pytest.skip("; ".join(outcome.skipped))
    assert outcome.ran + len(outcome.elsewhere) == len(read_page(path).runs())


@pytest.mark.parametrize("path", find_pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_have_a_language_and_shell_blocks_parse(path):
    for block in read_page(path).blocks:
        assert block.language, f"{path}:{block.line}: a block without a language"
        if block.language in SHELL:
            text = "".join(
                line.removeprefix("$ ") if block.language == "console" else line
                for line in block.text.splitlines(keepends=True)
                if block.language != "console" or line.startswith("$ ")
            )
            done = subprocess.run(
                ["bash", "-n"], input=text, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{path}:{block.line}: {done.stderr}"
