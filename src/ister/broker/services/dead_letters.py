"""ister.DeadLetters: dead letters for operators.

Owns: rights, requests and responses. Does not own: what is done
(`ister.broker.services.dead_letter_queue`).
"""

from __future__ import annotations

import json
from typing import Final

from ister.base.model import JsonObject, TopicName
from ister.broker.observe.browse import LIMIT_DEFAULT
from ister.broker.operations import needs
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.services.dead_letter_queue import DeadLetterQueue, Selection
from ister.errors import InvalidRequestError
from ister.wire import ister_api

_RANGES_MAX: Final = 1_000

_Request = ister_api.DeadLettersRequest


class DeadLetterService:
    """The RPCs, by their names on the wire. Used on the broker's loop."""

    def __init__(self, queue: DeadLetterQueue, guard: Guard) -> None:
        self._queue = queue
        self.guard = guard

    @needs(Permission.CONSUME, topic="topic")
    async def Count(self, request: _Request, context: object) -> ister_api.Document:
        """Counts pending letters by the subscription that they come from."""
        found = await self._queue.count(request.topic, _selection(request), limit=request.limit)
        return _document(found)

    @needs(Permission.CONSUME, topic="topic")
    async def Show(self, request: _Request, context: object) -> ister_api.Document:
        """Shows pending letters with their origin and reason."""
        limit = request.limit or LIMIT_DEFAULT
        return _document(await self._queue.show(request.topic, _selection(request), limit=limit))

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def Requeue(self, request: _Request, context: object) -> ister_api.Document:
        """Publishes letters to the topic that they failed in, and resolves them."""
        to = str(TopicName.parse(request.to)) if request.to else ""
        if to == request.topic:
            raise InvalidRequestError("letters cannot be requeued to their own topic", topic=to)
        found = await self._queue.requeue(
            request.topic,
            _selection(request),
            to=to,
            check=lambda target: self.guard.check(
                current_principal(), Permission.PRODUCE, topic=target
            ),
        )
        return _document(found)

    @needs(Permission.MANAGE_TOPIC, topic="topic")
    async def Drop(self, request: _Request, context: object) -> ister_api.Document:
        """Resolves letters without publishing them."""
        return _document(await self._queue.drop(request.topic, _selection(request)))


def _document(found: JsonObject) -> ister_api.Document:
    return ister_api.Document(json=json.dumps(found))


def _selection(request: _Request) -> Selection:
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
