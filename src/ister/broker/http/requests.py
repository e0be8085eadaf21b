"""Reads paths and bodies of requests to the HTTP API, and sends downloads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final

from aiohttp import web

from ister.base.limits import KIB
from ister.base.model import JsonObject
from ister.errors import CapacityError, InvalidRequestError

_BODY_BYTES_MAX: Final = 64 * KIB
_CHUNK_BYTES: Final = 256 * KIB
_DOWNLOADS_MAX: Final = 8
_DOWNLOAD_SECONDS: Final = 300.0


def topic_of(request: web.Request) -> str:
    """The topic that a path names."""
    return f"/{request.match_info['namespace']}/{request.match_info['topic']}"


async def read_body(request: web.Request) -> JsonObject:
    """The JSON object of a request."""
    data = b""
    async for chunk in request.content.iter_chunked(16 * KIB):
        data += chunk
        if len(data) > _BODY_BYTES_MAX:
            raise InvalidRequestError(f"the request has more than {_BODY_BYTES_MAX} bytes")
    try:
        content = json.loads(data or b"{}")
        if b"\\u" in data:  # half of a surrogate pair can be escaped, and is no character
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the request is not valid Unicode") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("the request is not JSON") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("the request must be a JSON object")
    return content


class Downloads:
    """Sends long answers as fast as they are read. Used on the broker's loop.

    What is not sent yet is in memory, so the number of downloads and their time are limited.
    """

    def __init__(self) -> None:
        self._running = 0

    async def send(
        self,
        request: web.Request,
        read: Callable[[], Awaitable[tuple[list[bytes], Mapping[str, str]]]],
    ) -> web.StreamResponse:
        """Sends the lines that `read` returns, with their headers.

        Raises:
            CapacityError: Too many downloads at once.
            As `read`.
        """
        if self._running >= _DOWNLOADS_MAX:
            raise CapacityError("too many downloads", hint="retry in a moment")
        self._running += 1
        try:
            lines, headers = await read()
            response = web.StreamResponse(headers=headers)
            response.content_length = sum(map(len, lines))
            try:
                async with asyncio.timeout(_DOWNLOAD_SECONDS):
                    await response.prepare(request)
                    for chunk in _chunks(lines):
                        await response.write(chunk)
                    await response.write_eof()
            except (ConnectionError, TimeoutError):
                # The reader is gone or too slow; it sees that the content is short.
                if request.transport is not None:
                    request.transport.abort()
            return response
        finally:
            self._running -= 1


def _chunks(lines: list[bytes]) -> Iterator[bytes]:
    """The lines in larger parts; each is released when it was taken."""
    lines.reverse()
    while lines:
        part = [lines.pop()]
        size = len(part[0])
        while lines and size + len(lines[-1]) <= _CHUNK_BYTES:
            size += len(lines[-1])
            part.append(lines.pop())
        yield b"".join(part)
