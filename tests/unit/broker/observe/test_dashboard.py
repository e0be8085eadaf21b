"""The dashboard's files as the HTTP port serves them."""

import asyncio
import re
from importlib import resources
from pathlib import Path

import aiohttp
from aiohttp import web

from ister.broker.observe import health
from ister.broker.observe.dashboard import OPEN_PATHS, add_pages
from ister.broker.security.http_guard import http_guard
from tests.support.cases import each
from tests.support.security import GuardRig

STATIC = resources.files("ister.broker.observe.dashboard").joinpath("static")
DOCS = Path(__file__).resolve().parents[4] / "docs"
NAMES = sorted(entry.name for entry in STATIC.iterdir())


def fetch(*paths, guard=None, headers=None):
    """Answers as (status, headers, content), in the order of the paths."""

    async def scenario():
        guards = [] if guard is None else [http_guard(guard, open_paths=OPEN_PATHS)]
        application = web.Application(middlewares=guards)
        add_pages(application)
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            found = []
            async with aiohttp.ClientSession(headers=headers) as session:
                for path in paths:
                    async with session.get(f"http://{host}:{port}{path}") as answer:
                        found.append((answer.status, answer.headers, await answer.read()))
            return found
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def test_every_file_is_served_as_what_it_is():
    answers = dict(zip(NAMES, fetch(*(f"/static/{name}" for name in NAMES)), strict=True))
    kinds = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    for name, (status, headers, content) in answers.items():
        assert status == 200, name
        assert headers["Content-Type"].split(";")[0] == kinds[name.rpartition(".")[2]]
        assert content == STATIC.joinpath(name).read_bytes()


def test_the_index_is_at_the_root():
    ((status, headers, content),) = fetch("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert content == STATIC.joinpath("index.html").read_bytes()


@each("path", ["/", "/static/app.js", "/static/style.css", "/static/none.js"])
def test_headers_let_pages_do_little(path):
    ((_, headers, _),) = fetch(path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-cache"


def test_what_has_not_changed_is_not_sent_again():
    ((_, headers, _),) = fetch("/static/app.js")
    ((status, again, content),) = fetch(
        "/static/app.js", headers={"If-None-Match": headers["ETag"]}
    )
    assert (status, content) == (304, b"")
    assert again["ETag"] == headers["ETag"]
    ((status, _, content),) = fetch("/static/app.js", headers={"If-None-Match": '"older"'})
    assert status == 200
    assert content


@each(
    "path", ["/static/../pages.py", "/static/%2e%2e%2fpages.py", "/static/nothing.js", "/static/"]
)
def test_nothing_else_is_served(path):
    ((status, _, content),) = fetch(path)
    assert status == 404
    assert b"import" not in content


def test_the_files_need_no_credentials_and_nothing_else_is_open(tmp_path):
    with GuardRig(tmp_path) as rig:
        answers = fetch("/", "/static/app.js", "/static/none.js", guard=rig.guard)
    assert [status for status, _, _ in answers] == [200, 200, 401]
    assert {"/"} | {f"/static/{name}" for name in NAMES} == OPEN_PATHS


@each("name", [name for name in NAMES if name.endswith(".js")])
def test_scripts_make_no_markup_of_data(name):
    text = STATIC.joinpath(name).read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in text, word
    # Only the theme and the window of charts are kept; a credential never.
    if name not in ("settings.js", "theme.js"):
        assert "localStorage" not in text
    else:
        assert "credential" not in text.lower()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_the_index_has_nothing_inline_and_nothing_from_elsewhere():
    text = STATIC.joinpath("index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert "<style" not in text
    assert not re.search(r"\s(style|on\w+)=", text)
    assert "://" not in text
    linked = re.findall(r'(?:src|href)="static/([^"]+)"', text)
    assert linked
    assert set(linked) <= set(NAMES)


def test_modules_import_only_what_there_is():
    for name in NAMES:
        if name.endswith(".js"):
            text = STATIC.joinpath(name).read_text()
            for imported in re.findall(r'from "\./([^"]+)"', text):
                assert imported in NAMES, f"{name} imports {imported}"


def test_every_check_has_a_way_to_what_to_do():
    """Goal: a new check, or an alarm that is renamed, is noticed in the runbook of the pages."""
    source = Path(health.__file__).read_text()
    checks = set(re.findall(r'name="(\w+)"', source))
    text = STATIC.joinpath("runbook.js").read_text()
    entries = dict(re.findall(r"^  (\w+): \{\n(.*?)^  \},", text, re.M | re.S))
    assert set(entries) == checks
    headings = set(re.findall(r"^### (\w+)", (DOCS / "operations" / "alarms.md").read_text(), re.M))
    for name, entry in entries.items():
        alarms = re.findall(r"Ister\w+", re.search(r"alarms: \[(.*?)\]", entry)[1])
        assert alarms, name
        assert set(alarms) <= headings, name
        assert "meaning: " in entry
        assert "steps: " in entry
