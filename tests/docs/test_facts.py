"""What documents say is so: references follow from the code, commands and settings exist."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from ister.cli.main import make_parser
from ister.config import load_config
from tests.doc_runner.pages import ROOT, Block, find_pages, read_page
from tests.sim import (
    fork_world,
    test_clone_world,
    test_cluster_world,
    test_disk_world,
    test_restore_planted_bugs,
)
from tests.sim import test_express_planted_bugs as in_express_objects
from tests.sim import test_planted_bugs as in_the_log
from tests.sim import test_tier_planted_bugs as in_the_tiers
from tests.support.cases import case
from tools import reference

PAGES = find_pages()
_ROOTS = {"broker", "storage", "dispatch", "pipeline"}


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_reference_is_up_to_date(name):
    page = ROOT / "docs" / "reference" / name
    wanted = reference.render(name)
    assert page.read_text() == wanted, "run `python -m tools.reference`"


def commands_in(text: str) -> list[str]:
    """Every `ister …` command line of a page: in blocks, and in backquotes."""
    text = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"(?:^|[|;&(] ?|\$\(|\bexec )\s*(?:\$ )?(ister [^\n]*)", text, re.MULTILINE)
    found += re.findall(r"`(ister [^`\n]+)`", text)
    return found


def words_of(line: str) -> list[str] | None:
    """The arguments of a command line; None if it is no command but words about one."""
    line = re.split(r"\s(?:#|\||>|<|&|;|2>|·)", f"{line} ", maxsplit=1)[0]
    try:
        words = shlex.split(line)[1:]
    except ValueError:
        return None
    return [word for word in words if word not in {"…", "..."}]


parser = cache(make_parser)


def takes(words: list[str]) -> str | None:
    """Why the parser does not take a command line; None if it does."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser().parse_args(words)
    except SystemExit as ending:
        if ending.code in (0, None):
            return None
        return said.getvalue()
    return None


def names_command(words: list[str]) -> bool:
    """Whether it is nothing but the name of a command."""
    at = parser()
    for word in words:
        if word not in at.commands:
            return False
        at = at.commands[word]
    return True


_MISSING = re.compile(
    r"the following arguments are required|one of the arguments|expected one argument|needs"
)
_STAND_IN = dict.fromkeys(("TOPIC", "T"), "/default/orders")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_command_lines_are_ones_that_the_parser_takes(path):
    """Whole commands in blocks; in the middle of a sentence arguments may be left out."""
    page = read_page(path)
    for block in page.blocks:
        if block.language not in {"sh", "bash", "console", "text"}:
            continue
        for line in commands_in(block.text):
            words = words_of(line)
            is_synopsis = path.name == "cli.md" and len(block.text.splitlines()) == 1
            if words is None or is_synopsis:
                continue
            assert (problem := takes(words)) is None, f"{path}:{block.line}: {line}\n{problem}"
    prose = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in re.findall(r"`(ister [^`\n]+)`", prose):
        words = words_of(re.sub(r"\[[^\]]*\]", "", line).replace("|", " | "))
        words = [_STAND_IN.get(word, word) for word in words or ()]
        problem = None if names_command(words) else takes(words)
        assert problem is None or _MISSING.search(problem), f"{path}: {line}\n{problem}"


def test_pages_have_command_lines():
    """The test before this one looks at what is found: without any, it would pass."""
    assert sum(len(commands_in(path.read_text())) for path in PAGES) > 300


def test_a_command_that_does_not_exist_is_noticed():
    assert takes(["topics", "no-such"]) is not None
    assert takes(["serve", "--no-such"]) is not None
    assert takes(["serve", "--port", "7650"]) is None
    assert commands_in("echo x | ister produce /a/b --key 'c d' # e") == [
        "ister produce /a/b --key 'c d' # e"
    ]
    assert words_of("ister produce /a/b --key 'c d' # e") == ["produce", "/a/b", "--key", "c d"]


def blocks_in(*languages: str) -> list[tuple[Path, Block]]:
    """The blocks of all pages in some languages, with their pages."""
    found = [
        (path, block)
        for path in PAGES
        for block in read_page(path).blocks
        if block.language in languages
    ]
    assert found, f"no page has a block in {languages}"
    return found


def test_settings_in_yaml_blocks_are_taken():
    checked = 0
    for path, block in blocks_in("yaml", "yml"):
        tree = yaml.safe_load(block.text)
        if not isinstance(tree, dict) or not set(tree) <= _ROOTS:
            continue
        names = set(re.findall(r"\$\{(\w+)", block.text))
        # A part of a file: what it leaves out is set elsewhere.
        environment = {"ISTER_STORAGE__WAL__DIR": "./data/wal"}
        with case(path, block.line):
            load_config(tree, environment | dict.fromkeys(names, "127.0.0.1"))
        checked += 1
    assert checked > 10


def test_json_blocks_are_json():
    for path, block in blocks_in("json"):
        with case(path, block.line):
            json.loads(block.text)


def test_planted_bugs_are_counted_right():
    # Two of the tiers' have tests of their own.
    counts = (
        len(in_the_log.BY_CRASHES) + len(in_the_log.BY_FAULTS),
        len(in_the_tiers.BY_WORLDS) + 2,
        len({*in_express_objects.PLANTS, *in_express_objects.BY_SITUATIONS}),
        len(test_disk_world.PLANTED),
        len(test_clone_world.PLANTS),
        len(fork_world.PLANTED),
        len(test_cluster_world.PLANTS),
        len(test_restore_planted_bugs.PLANTS),
    )
    log, stores, express, disks, copies, forks, clusters, restores = counts
    said = (
        f"{sum(counts)} bugs put in on purpose are each caught: {log} in the log, {stores} in the "
        f"tiers, {express} in express objects, {disks} on full disks, {copies} with copied disks, "
        f"{forks} with forks, {clusters} in clusters, {restores} with restores"
    )
    assert said in (ROOT / "docs" / "TESTING.md").read_text()
