"""ister.DeadLetters: dead letters for operators, with permission checks.

    Count, Show      consume the dead-letter topic
    Requeue          manage the dead-letter topic, and produce to the topic that letters go to
    Drop             manage the dead-letter topic

Owns: rights, requests and responses. Does not own: what is done
(`ister.broker.topics.dead_letter_queue`). `DeadLetterCalls` has the same calls for the HTTP API.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final

from ister.base.model import JsonObject, TopicName
from ister.broker.observe.browse import LIMIT_DEFAULT
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.dead_letter_queue import DeadLetterQueue, Selection
from ister.errors import InvalidRequestError
from ister.wire import ister_api

_RANGES_MAX: Final = 1_000


class DeadLetterCalls:
    """The calls with permission checks, for gRPC and HTTP. Used on the broker's loop."""

    def __init__(self, queue: DeadLetterQueue, guard: Guard) -> None:
        self._queue = queue
        self._guard = guard

    def _check(self, permission: Permission, topic: str) -> None:
        self._guard.check(current_principal(), permission, topic=topic)

    async def count(self, request: ister_api.DeadLettersRequest) -> JsonObject:
        """Counts pending letters."""
        self._check(Permission.CONSUME, request.topic)
        return await self._queue.count(request.topic, _selection(request), limit=request.limit)

    async def show(self, request: ister_api.DeadLettersRequest) -> JsonObject:
        """Shows pending letters."""
        self._check(Permission.CONSUME, request.topic)
        limit = request.limit or LIMIT_DEFAULT
        return await self._queue.show(request.topic, _selection(request), limit=limit)

    async def requeue(self, request: ister_api.DeadLettersRequest) -> JsonObject:
        """Publishes letters to the topic that they failed in."""
        self._check(Permission.MANAGE_TOPIC, request.topic)
        to = str(TopicName.parse(request.to)) if request.to else ""
        if to == request.topic:
            raise InvalidRequestError("letters cannot be requeued to their own topic", topic=to)
        return await self._queue.requeue(
            request.topic,
            _selection(request),
            to=to,
            check=lambda target: self._check(Permission.PRODUCE, target),
        )

    async def drop(self, request: ister_api.DeadLettersRequest) -> JsonObject:
        """Resolves letters without publishing them."""
        self._check(Permission.MANAGE_TOPIC, request.topic)
        return await self._queue.drop(request.topic, _selection(request))


class DeadLetterService:
    """The gRPC service of `DeadLetterCalls`."""

    def __init__(self, calls: DeadLetterCalls) -> None:
        self._calls = calls

    async def Count(
        self, request: ister_api.DeadLettersRequest, context: object
    ) -> ister_api.Document:
        """Counts pending letters by the subscription that they come from."""
        return await _document(self._calls.count, request)

    async def Show(
        self, request: ister_api.DeadLettersRequest, context: object
    ) -> ister_api.Document:
        """Shows pending letters with their origin and reason."""
        return await _document(self._calls.show, request)

    async def Requeue(
        self, request: ister_api.DeadLettersRequest, context: object
    ) -> ister_api.Document:
        """Publishes letters to the topic that they failed in, and resolves them."""
        return await _document(self._calls.requeue, request)

    async def Drop(
        self, request: ister_api.DeadLettersRequest, context: object
    ) -> ister_api.Document:
        """Resolves letters without publishing them."""
        return await _document(self._calls.drop, request)


async def _document(
    call: Callable[[ister_api.DeadLettersRequest], Awaitable[JsonObject]],
    request: ister_api.DeadLettersRequest,
) -> ister_api.Document:
    return ister_api.Document(json=json.dumps(await call(request)))


def _selection(request: ister_api.DeadLettersRequest) -> Selection:
    offsets = list(request.offsets)
    if len(offsets) % 2 or len(offsets) > 2 * _RANGES_MAX:
        raise InvalidRequestError(
            f"offsets must be pairs, {_RANGES_MAX} at most", topic=request.topic
        )
    return Selection(
        ranges=tuple(zip(offsets[::2], offsets[1::2], strict=True)),
        reason=request.reason,
        topic=request.source_topic,
        subscription=request.source_subscription,
        start=request.start,
        end=request.end or None,
    )
