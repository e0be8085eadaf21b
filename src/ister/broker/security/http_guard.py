"""The guard in front of every HTTP request.

Paths that say nothing but whether the broker is there are open, because those who ask (load
balancers, orchestrators) have no credentials. Everything else is authenticated; the handler runs
with the caller as the current one. Errors of `ister.errors` about who calls and what they may do
become 401, 403 and 503, as JSON.

Bytes that are not HTTP get 400 from aiohttp, which would also log them, headers and all: anybody
could fill the log, and credentials with a typo would stand in it. Those records are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from aiohttp.typedefs import Middleware

from ister.broker.security.authentication import collect_headers
from ister.broker.security.guard import Guard, entered
from ister.errors import (
    IsterError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from ister.wire.errors import http_error

OPEN_PATHS: Final = frozenset({"/live", "/ready", "/health"})

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def http_guard(guard: Guard, *, open_paths: Collection[str] = OPEN_PATHS) -> Middleware:
    """A middleware for `aiohttp.web.Application`.

    `open_paths` need no credentials, exactly as written.
    """
    server_logger.addFilter(_is_ours)

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path in open_paths:
            return await handler(request)
        peer, action = request.remote or "", f"http/{request.method} {request.path}"
        try:
            try:
                headers = collect_headers(request.headers.items())
            except UnauthenticatedError as error:
                guard.record_refused_login(error, peer=peer, action=action)
                raise
            certificate = _certificate(request) if guard.takes_certificates else None
            caller = guard.enter(headers, certificate=certificate, peer=peer, action=action)
            with entered(caller):
                return await handler(request)
        except UnauthenticatedError as error:
            return _answer(error, 401, {"WWW-Authenticate": "Bearer"})
        except PermissionDeniedError as error:
            return _answer(error, 403)
        except UnavailableError as error:
            return _answer(error, 503)

    return check


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an aiohttp log record is about the server, not about a malformed request."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


def _answer(
    error: IsterError, status: int, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    return web.json_response(http_error(error), status=status, headers=headers)


def _certificate(request: web.Request) -> bytes | None:
    """The client certificate that the connection was opened with, in DER."""
    transport = request.transport
    connection = transport.get_extra_info("ssl_object") if transport is not None else None
    return None if connection is None else connection.getpeercert(binary_form=True)
