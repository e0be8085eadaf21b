"""Links lead somewhere, and every picture is shown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.doc_runner.pages import ROOT, find_pages

PAGES = [*find_pages(), ROOT / "CHANGELOG.md"]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def without_code(text: str) -> str:
    """The text, without what is shown as it is."""
    text = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`x`", text)


def anchors(path: Path) -> set[str]:
    """The headings of a page as links name them."""
    found: set[str] = set()
    text = re.sub(
        r"^ *(`{3,}|~{3,}).*?^ *\1 *$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
        slug = re.sub(r"[\s]+", "-", plain)
        number = 0
        while (name := slug if not number else f"{slug}_{number}") in found:
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    for target in _LINK.findall(without_code(path.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path}: {target}"
        assert file.is_relative_to(ROOT), f"{path}: {target} is outside of the project"
        if ROOT / "docs" in path.parents:
            assert ROOT / "docs" in file.parents, f"{path}: {target} is outside of the site"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path}: {target}"


def test_pages_have_links():
    """The test before this one looks at what is found: without any, it would pass."""
    targets = [one for path in PAGES for one in _LINK.findall(without_code(path.read_text()))]
    assert sum("://" not in target for target in targets) > 100


def pictures() -> list[Path]:
    return sorted((ROOT / "docs" / "images").glob("*"))


@pytest.mark.parametrize("path", pictures(), ids=lambda path: path.name)
def test_every_picture_is_shown_on_a_page(path):
    shown = [page for page in find_pages() if path.name in page.read_text()]
    assert shown, f"no page shows {path.name}"


def test_drawings_are_whole_and_fetch_nothing():
    drawings = [path for path in pictures() if path.suffix == ".svg"]
    assert drawings
    for path in drawings:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        # An address that a text shows is not fetched.
        assert not re.search(r"(?:href|src)\s*=|url\((?!#)|@import|<script", path.read_text()), path
