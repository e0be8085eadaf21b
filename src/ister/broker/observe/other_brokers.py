"""Asks other brokers to describe their topics.

Owns: one call to each other broker, however many of its topics are wanted, with a short deadline.
Does not own: descriptions from the stores, which replace those of brokers that do not answer
(`views`).

The other brokers decide what the caller may see.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Final

from ister.base.model import TopicName
from ister.broker.cluster.peers import may_forward
from ister.broker.topics.topics import Topics
from ister.bucket.members import Member
from ister.errors import IsterError
from ister.wire import ister_api, services
from ister.wire.views import TopicJson

_log = logging.getLogger("ister.broker.observe.other_brokers")

_ANSWER_SECONDS: Final = 2.0


class OtherBrokers:
    """Describes topics of other brokers. Used on the broker's loop."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def describe(self, names: Iterable[str]) -> dict[str, TopicJson]:
        """Short descriptions by topic; without topics that no other broker describes."""
        if self._topics.peers is None or not may_forward():
            return {}
        cluster = self._topics.cluster
        try:
            owners = await asyncio.to_thread(cluster.owners)
            members = await asyncio.to_thread(cluster.members.recent)
        except IsterError:
            return {}
        wanted: dict[str, list[str]] = {}
        for name in names:
            node = owners.get(name)
            if node is not None and node != cluster.own.node:
                wanted.setdefault(node, []).append(name)
        asked = [(one, wanted[one.node]) for one in members if one.node in wanted]
        found: dict[str, TopicJson] = {}
        for told in await asyncio.gather(*(self._ask(*one) for one in asked)):
            found |= told
        return found

    async def _ask(self, member: Member, names: list[str]) -> dict[str, TopicJson]:
        assert self._topics.peers is not None  # noqa: S101 - for mypy
        request = ister_api.OwnTopicsRequest(topics=names)
        try:
            answer = await self._topics.peers.call(
                member, services.Admin.ShowOwnTopics, request, timeout=_ANSWER_SECONDS
            )
            views: list[TopicJson] = json.loads(answer.json)["topics"]
        except (IsterError, ValueError, KeyError) as error:
            _log.info(
                "another broker did not describe its topics",
                extra={"broker": member.node, "error": str(error)},
            )
            return {}
        return {view["topic"]: _away(view) for view in views}

    async def topic(self, name: str) -> TopicJson | None:
        """A topic with all fields; None if no other broker describes it."""
        if self._topics.peers is None or not may_forward():
            return None
        try:
            member = await asyncio.to_thread(self._topics.cluster.owner, TopicName.parse(name))
            if member is None:
                return None
            answer = await self._topics.peers.call(
                member,
                services.Admin.ShowTopic,
                ister_api.TopicName(topic=name),
                timeout=_ANSWER_SECONDS,
            )
            view: TopicJson = json.loads(answer.json)
        except (IsterError, ValueError) as error:
            _log.info(
                "another broker did not describe its topic",
                extra={"topic": name, "error": str(error)},
            )
            return None
        return _away(view)


def _away(view: TopicJson) -> TopicJson:
    view["is_here"] = False
    return view
