"""The part of the HTTP API that is about dead letters.

    GET  /api/topics/{ns}/{topic}/dead-letters
    GET  /api/topics/{ns}/{topic}/dead-letters/count
    POST /api/topics/{ns}/{topic}/dead-letters/requeue
    POST /api/topics/{ns}/{topic}/dead-letters/drop

    start, end, limit, reason, source, subscription    in the query or in the body
    offsets: [[0, 5], [7, 8]], to                      in the body

Owns: parameters. Does not own: paths and errors (`api`), rights
(`ister.broker.services.dead_letters`), what is done (`ister.broker.topics.dead_letter_queue`). What
another broker has to do is forwarded to it, with the caller's credentials.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from aiohttp import web

from ister.base.model import JsonObject
from ister.broker.observe.cluster_api import ask_other
from ister.broker.observe.requests import read_body, topic_of
from ister.broker.observe.views import Views
from ister.broker.services.dead_letters import DeadLetterCalls
from ister.broker.topics.open_topics import ElsewhereError
from ister.errors import InvalidRequestError
from ister.wire import Rpc, ister_api, services

_OFFSET_MAX: Final = (1 << 63) - 1
_TEXTS: Final = {
    "reason": "reason",
    "source": "source_topic",
    "subscription": "source_subscription",
    "to": "to",
}
_NUMBERS: Final = ("start", "end", "limit")

_Request = ister_api.DeadLettersRequest
_Call = Callable[[_Request], Awaitable[JsonObject]]


class Context(Protocol):
    """What the handlers use."""

    @property
    def views(self) -> Views:
        """The broker's views."""
        ...

    @property
    def dead_letters(self) -> DeadLetterCalls:
        """The calls, with their rights."""
        ...


class DeadLetterApi:
    """Handles HTTP requests about dead letters. Used on the broker's loop."""

    def __init__(self, served: Callable[[], Context]) -> None:
        self._served = served

    async def show(self, request: web.Request) -> JsonObject:
        """Pending letters, with their origin and reason."""
        served = self._served()
        asked = _parse(topic_of(request), request.query)
        return await self._call(served.dead_letters.show, services.DeadLetters.Show, asked)

    async def count(self, request: web.Request) -> JsonObject:
        """Pending letters by the subscription that they come from."""
        served = self._served()
        asked = _parse(topic_of(request), request.query)
        return await self._call(served.dead_letters.count, services.DeadLetters.Count, asked)

    async def requeue(self, request: web.Request) -> JsonObject:
        """Publishes letters to the topic that they failed in."""
        served = self._served()
        asked = _parse(topic_of(request), await read_body(request))
        rpc = services.DeadLetters.Requeue
        return _said("requeued", await self._call(served.dead_letters.requeue, rpc, asked))

    async def drop(self, request: web.Request) -> JsonObject:
        """Resolves letters without publishing them."""
        served = self._served()
        asked = _parse(topic_of(request), await read_body(request))
        rpc = services.DeadLetters.Drop
        return _said("dropped", await self._call(served.dead_letters.drop, rpc, asked))

    async def _call(
        self, call: _Call, rpc: Rpc[_Request, ister_api.Document], asked: _Request
    ) -> JsonObject:
        try:
            return await call(asked)
        except ElsewhereError as error:
            answer = await ask_other(self._served().views, error, rpc, asked)
            found: JsonObject = json.loads(answer.json)
            return found


def _said(verb: str, found: JsonObject) -> JsonObject:
    """The answer to a change; as elsewhere, `done` is a sentence."""
    failed = found["failed"]
    text = f"{found['done']} message{'' if found['done'] == 1 else 's'} {verb}"
    if isinstance(failed, list) and failed:
        text += f"; {len(failed)} failed and stay pending: {failed[0]['error']}"
    return {**found, "done": text, "count": found["done"]}


def _parse(topic: str, given: Mapping[str, object]) -> _Request:
    asked = _Request(topic=topic)
    for name, field in _TEXTS.items():
        text = given.get(name) or ""
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must be a string")
        setattr(asked, field, text)
    for name in _NUMBERS:
        setattr(asked, name, _whole(name, given.get(name) or 0))
    ranges = given.get("offsets") or []
    if not isinstance(ranges, list):
        raise InvalidRequestError("offsets must be a list", hint="such as [[0, 5], [7, 8]]")
    for one in ranges:
        if not isinstance(one, list) or len(one) != 2:
            raise InvalidRequestError("offsets must be pairs", hint="such as [[0, 5], [7, 8]]")
        asked.offsets.extend(_whole("offsets", bound) for bound in one)
    return asked


def _whole(name: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 19:
        value = int(value)
    high = (1 << 32) - 1 if name == "limit" else _OFFSET_MAX
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise InvalidRequestError(f"{name} must be a whole number, not {str(value)[:40]!r}")
    return value
