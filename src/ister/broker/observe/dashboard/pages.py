"""Serves the dashboard's files: `/` and `/static/<name>`.

Owns: which files there are, their content types and headers. Does not own: what the pages show
(`/api` does), who may see it (the guard of `/api`).

The files hold no data, so they need no credentials: `OPEN_PATHS` says so to the HTTP guard, each
path exactly as written. All of them are read once and kept; nothing of a request ever becomes a
path on disk. The content security policy lets a page load and call only what the broker itself
serves, and refuses text as HTML (`require-trusted-types-for`): names and payloads, which anybody
may have written, stay text.

Browsers ask again each time and get 304 while nothing has changed: after an upgrade no page is made
of files of two versions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from aiohttp import web

_INDEX: Final = "index.html"
_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""What a page may do."""

_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file as it is sent."""

    content: bytes
    content_type: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """Every file of the dashboard by its name."""
    found: dict[str, _File] = {}
    for entry in resources.files("ister.broker.observe.dashboard").joinpath("static").iterdir():
        content_type = _TYPES.get(entry.name.rpartition(".")[2])
        if content_type is not None and entry.is_file():
            content = entry.read_bytes()
            found[entry.name] = _File(
                content=content,
                content_type=content_type,
                etag=hashlib.sha256(content).hexdigest()[:32],
            )
    return found


OPEN_PATHS: Final = frozenset({"/", *(f"/static/{name}" for name in _files())})
"""Paths that need no credentials; see the module header."""


def add_pages(application: web.Application) -> None:
    """Adds the dashboard's routes."""

    async def index(request: web.Request) -> web.Response:
        return _answer(request, _INDEX)

    async def static(request: web.Request) -> web.Response:
        return _answer(request, request.match_info["name"])

    application.add_routes([web.get("/", index), web.get("/static/{name}", static)])


def _answer(request: web.Request, name: str) -> web.Response:
    file = _files().get(name)
    if file is None:
        return web.Response(text="File not found.\n", status=404, headers=_HEADERS)
    asked = request.if_none_match or ()
    if any(tag.value in (file.etag, "*") for tag in asked):
        answer = web.Response(status=304, headers=_HEADERS)
    else:
        answer = web.Response(
            body=file.content, content_type=file.content_type, charset="utf-8", headers=_HEADERS
        )
    answer.etag = file.etag
    return answer
