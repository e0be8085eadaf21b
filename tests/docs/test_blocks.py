"""Every command and every piece of Python that a document shows is run, as it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from tests.doc_runner.pages import ROOT, SHELL, find_pages, read_page
from tests.doc_runner.run import Outcome
from tests.doc_runner.summary import OUTCOME
from tests.support.scale import nightly, scaled

PAGES = [path for path in find_pages() if read_page(path).runs()]
# The first page that a reader follows; the others are for the night.
_EVERYBODY = {ROOT / "README.md"}
# Pages that say that they go on from another one: run after it, in its directory, and alone.
_NEXT = {ROOT / "README.md": scaled((), (ROOT / "docs" / "start.md",))}
# Several times what the longest page takes on a machine that is busy with something else.
_PAGE_SECONDS = 900


@pytest.mark.timeout(_PAGE_SECONDS + 60)
@pytest.mark.parametrize(
    "path",
    [path if path in _EVERYBODY else nightly(path) for path in PAGES],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_blocks_of_a_page_run_as_written(path, stage, record_property):
    pages = (path, *_NEXT.get(path, ()))
    environment = {
        **os.environ,
        "DOCS_WORLD": "inside",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [
            *stage.world.enter,
            *(sys.executable, "-m", "tests.doc_runner", "--json", "--together"),
            *("--interpreter", stage.interpreter, *map(str, pages)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PAGE_SECONDS,
        check=False,
    )
    assert done.stdout, done.stderr
    # With DOCS_SHOW there is more than outcomes in between.
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"page": ')]
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    # What is run a second time is not counted a second time.
    record_property(OUTCOME, asdict(outcomes[0]))
    for outcome in outcomes:
        assert outcome.failure is None, outcome.failure
    assert done.returncode == 0, done.stderr
    assert len(outcomes) == len(pages)
    if skipped := [one for outcome in outcomes for one in outcome.skipped]:
        pytest.skip("; ".join(skipped))
    for page, outcome in zip(pages, outcomes, strict=True):
        assert outcome.ran + len(outcome.elsewhere) == len(read_page(page).runs())


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
