"""Links lead somewhere, pictures are there, and nothing is fetched from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.doc_runner.pages import ROOT, find_pages

PAGES = [*find_pages(), ROOT / "CHANGELOG.md"]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_AUTOLINK = re.compile(r"<(https?://[^>\s]+)>|(?<![`\w(\"'=])(https?://\w[^\s)>\"'`|]+)")
# This machine, and names that stand for somebody's own.
_HOSTS = {
    "127.0.0.1",
    "localhost",
    "id.example",
    # Homes of well-known projects.
    "spark.apache.org",
    "iceberg.apache.org",
    "delta.io",
    "prometheus.io",
    "grafana.com",
    "etcd.io",
    "duckdb.org",
    "docs.astral.sh",
}


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_known_hosts_are_named(path):
    text = without_code(path.read_text())
    links = [link for link in _LINK.findall(text) if "://" in link]
    links += [one or other for one, other in _AUTOLINK.findall(text)]
    for link in links:
        assert urlsplit(link).hostname in _HOSTS, f"{path}: {link}"


def pictures() -> list[Path]:
    return sorted((ROOT / "docs" / "images").glob("*"))


@pytest.mark.parametrize("path", pictures(), ids=lambda path: path.name)
def test_every_picture_is_shown_on_a_page(path):
    shown = [page for page in find_pages() if path.name in page.read_text()]
    assert shown, f"no page shows {path.name}"


@pytest.mark.parametrize(
    "path", [path for path in pictures() if path.suffix == ".svg"], ids=lambda path: path.name
)
def test_drawings_are_whole_have_a_title_and_fetch_nothing(path):
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    title = root.find(f"{space}title")
    assert title is not None
    assert title.text
    allowed = {f"{space}{name}" for name in ("script", "image", "foreignObject", "use")}
    assert not [one.tag for one in root.iter() if one.tag in allowed]
    # An address that a text shows is not fetched.
    assert not re.search(r"(?:href|src)\s*=|url\((?!#)|@import", path.read_text())
