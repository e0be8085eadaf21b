"""Calls about dead letters: count, show, requeue, drop.

Owns: calls of ister.DeadLetters, and continuing those that one call does not finish. Does not own:
what a dead letter is, and which are pending: the broker of the dead-letter topic keeps that.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from ister import wire
from ister.base.model import JsonObject
from ister.client.core.network import Network
from ister.wire.views import DeadLetterCountJson, DeadLetterJson, ResolvedJson

# A broker works on a call for some seconds, and may wait for uploads of the last messages.
_ANSWER_SECONDS: Final = 60.0
_PAGE: Final = 100

if TYPE_CHECKING:
    _Rpc: TypeAlias = wire.Rpc[wire.ister_api.DeadLettersRequest, wire.ister_api.Document]


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Selects dead letters; all conditions have to match."""

    offsets: Sequence[tuple[int, int]] = ()
    """Ranges, each from its first offset up to, not including, its second; all if empty."""
    reason: str = ""
    """Text in the reason, case-insensitive."""
    source_topic: str = ""
    """The topic in which it failed."""
    source_subscription: str = ""
    end: int = 0
    """Only letters before this offset; 0 for all."""


_ALL: Final = LetterFilter()


class DeadLetterCalls:
    """Counts, shows, requeues and drops dead letters. Belongs to the network's loop."""

    _network: Network

    async def count_dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, limit: int = 0
    ) -> DeadLetterCountJson:
        """Counts the pending dead letters of a dead-letter topic, by where they come from.

        Args:
            topic: The dead-letter topic; a plain one, or a partition.
            which: Only these.
            limit: Stop after so many; 0 for the broker's limit. `end` in the answer is the offset
                behind the last one that was counted.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        rpc = wire.services.DeadLetters.Count
        return cast("DeadLetterCountJson", await self._ask(rpc, _request(topic, which, limit)))

    async def dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, limit: int = 0
    ) -> AsyncIterator[DeadLetterJson]:
        """The pending dead letters of a dead-letter topic, in order; at most `limit`, unless 0.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        start: int | None = 0
        shown = 0
        while start is not None and (not limit or shown < limit):
            request = _request(topic, which, min(limit - shown, _PAGE) if limit else _PAGE)
            request.start = start
            page = await self._ask(wire.services.DeadLetters.Show, request)
            for one in cast("list[DeadLetterJson]", page["messages"]):
                shown += 1
                yield one
            start = cast("int | None", page["next"])

    async def show_dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, limit: int = 50
    ) -> list[DeadLetterJson]:
        """Like `dead_letters`, but returns a list.

        Raises:
            As `dead_letters`.
        """
        return [one async for one in self.dead_letters(topic, which, limit=limit)]

    async def requeue_dead_letters(
        self, topic: str, which: LetterFilter = _ALL, *, to: str = ""
    ) -> ResolvedJson:
        """Publishes dead letters to the topic that they failed in, as the original messages.

        At least once: letters that were published when a broker crashed, and not recorded as
        resolved, are published again by the next call.

        Args:
            topic: The dead-letter topic; a plain one, or a partition.
            which: Only these.
            to: Another topic for all of them.

        Returns:
            How many were published, and those that failed and stay pending.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = _request(topic, which)
        request.to = to
        return await self._resolve(wire.services.DeadLetters.Requeue, request)

    async def drop_dead_letters(self, topic: str, which: LetterFilter = _ALL) -> ResolvedJson:
        """Marks dead letters as resolved without publishing them. The topic keeps the messages.

        Raises:
            NotFoundError: There is no such topic.
            IsterError: It is refused, or no broker has answered in time.
        """
        return await self._resolve(wire.services.DeadLetters.Drop, _request(topic, which))

    async def _resolve(self, rpc: _Rpc, request: wire.ister_api.DeadLettersRequest) -> ResolvedJson:
        done: ResolvedJson = {"topic": request.topic, "done": 0, "failed": []}
        while True:
            found = cast("ResolvedJson", await self._ask(rpc, request))
            done["done"] += found["done"]
            done["failed"] += found["failed"]
            following = found.get("next")
            if following is None:
                return done
            request.start = following

    async def _ask(self, rpc: _Rpc, request: wire.ister_api.DeadLettersRequest) -> JsonObject:
        answer = await self._network.call(
            rpc, request, topic=request.topic, answer_within=_ANSWER_SECONDS
        )
        found: JsonObject = json.loads(answer.json)
        return found


def _request(topic: str, which: LetterFilter, limit: int = 0) -> wire.ister_api.DeadLettersRequest:
    return wire.ister_api.DeadLettersRequest(
        topic=topic,
        offsets=[bound for pair in which.offsets for bound in pair],
        reason=which.reason,
        source_topic=which.source_topic,
        source_subscription=which.source_subscription,
        end=which.end,
        limit=limit,
    )
