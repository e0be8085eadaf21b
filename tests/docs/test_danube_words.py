"""What the page of the documents' words names here exists."""

from __future__ import annotations

import re

import pytest

import ister
from ister.config.aliases import ALIASES
from ister.config.reference import settings
from tests.doc_runner.pages import ROOT

PAGE = ROOT / "docs" / "howto" / "danube-words.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_page_has_every_other_name_of_a_setting(page):
    for alias in ALIASES:
        parts = alias.key.removeprefix("storage.").removesuffix(".*")
        assert f"`{parts}" in page, alias.key


def test_settings_of_the_page_exist(page):
    """A key in the right column is a setting, its section, or an option of a store."""
    known = {setting.path.removeprefix("storage.") for setting in settings()}
    sections = {path.rpartition(".")[0] for path in known}
    roots = {path.partition(".")[0] for path in known if "." in path}
    rows = re.findall(r"^\|.*\|(.*)\|$", page, re.MULTILINE)
    named = {
        name.removeprefix("storage.")
        for row in rows
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`?", row)
        if name.removeprefix("storage.").partition(".")[0] in roots
    }
    assert named
    for name in named:
        is_option = name.startswith("cloud.options.")
        is_file = name in {"wal.log", "wal.idx", "wal.ckpt", "uploader.ckpt"}
        assert name in known | sections or is_option or is_file, name


def test_files_and_names_of_the_page_exist(page):
    package = ROOT / "src" / "ister"
    paths = re.findall(r"`([a-z_]+/[\w/]+\.py)`", page)
    assert paths
    for path in paths:
        assert (package / path).exists(), path
    for name, path in re.findall(r"`(\w+)` \(`([a-z_/]+\.py)`\)", page):
        text = (package / path).read_text()
        assert re.search(rf"^(?:class|def) {name}\b", text, re.MULTILINE), f"{path}: {name}"
    members = re.findall(r"`(Topic|Log)\.(\w+)", page)
    assert members
    for kind, name in members:
        assert hasattr(getattr(ister, kind), name), f"{kind}.{name}"
