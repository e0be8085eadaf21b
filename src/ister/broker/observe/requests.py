"""Reads paths and bodies of requests to the HTTP API."""

from __future__ import annotations

import json
from typing import Final

from aiohttp import web

from ister.errors import InvalidRequestError
from ister.limits import KIB
from ister.model import JsonObject

_BODY_BYTES_MAX: Final = 64 * KIB


def topic_of(request: web.Request) -> str:
    """The topic that a path names."""
    return f"/{request.match_info['namespace']}/{request.match_info['topic']}"


async def read_body(request: web.Request) -> JsonObject:
    """The JSON object of a request.

    Raises:
        InvalidRequestError: It is too large, not a JSON object, or not valid Unicode.
    """
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
