"""The site is built without a warning, has every page, and asks no other machine for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import yaml

from tests.doc_runner.pages import ROOT

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", directory],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_in_the_menu_and_on_the_site(site):
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}

    def listed(items) -> set[str]:
        if isinstance(items, str):
            return {items}
        if isinstance(items, dict):
            items = list(items.values())
        return {page for item in items for page in listed(item)}

    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert listed(menu) == pages
    for page in pages:
        name = page.removesuffix(".md").removesuffix("index")
        assert (site / name / "index.html").exists(), page


def test_pages_load_nothing_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)"
        r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref=[\"']?([^\"'\s>]+)"
    )
    count = 0
    for page in site.rglob("*.html"):
        for one, other in loads.findall(page.read_text()):
            count += 1
            assert not urlsplit(one or other).netloc, f"{page.name} loads {one or other}"
    assert count
    for style in site.rglob("*.css"):
        for target in re.findall(r"url\(\s*[\"']?([^\"')]+)", style.read_text()):
            assert not urlsplit(target).netloc, f"{style.name} loads {target}"
