"""The part of the HTTP API that is about the cluster.

    GET  /api/cluster                            brokers, leader, load, moves, topics that wait
    POST /api/cluster/rebalance                  {"dry_run": bool}
    POST /api/brokers/{node}/drain, /activate
    POST /api/topics/{ns}/{topic}/move           {"to": node}
    POST /api/topics/{ns}/{topic}/take-over      {"confirm": bool}

Owns: parameters and answers. Does not own: paths and errors (`api`), what is done
(`ister.broker.topics.cluster_control`). What another broker has to do is forwarded to it, with the
caller's credentials.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web
from google.protobuf.message import Message

from ister.base.model import JsonObject
from ister.broker.cluster.peers import may_forward
from ister.broker.observe.cluster_view import (
    describe_drain,
    describe_rebalance,
    describe_take_over,
)
from ister.broker.observe.requests import read_body, topic_of
from ister.broker.observe.views import Views
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.open_topics import ElsewhereError
from ister.errors import InvalidRequestError
from ister.wire import Rpc, ister_api, services
from ister.wire.views import ClusterJson

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


async def ask_other(
    views: Views, error: ElsewhereError, rpc: Rpc[_Request, _Response], request: _Request
) -> _Response:
    """Forwards a call to the broker that an error names; returns its answer.

    Raises:
        ElsewhereError: The call cannot be forwarded.
        IsterError: The broker's error, or that it does not answer.
    """
    peers = views.topics.peers
    if peers is None or not may_forward():
        raise error
    timeout = error.timeout_seconds
    return await peers.call(error.member, rpc, request, topic=error.topic, timeout=timeout)


class ClusterApi:
    """Handles HTTP requests about the cluster. Used on the broker's loop."""

    def __init__(self, guard: Guard, views: Callable[[], Views]) -> None:
        self._guard = guard
        self._views = views

    def _check(self, permission: Permission, **on: str) -> None:
        self._guard.check(current_principal(), permission, **on)

    async def cluster(self, request: web.Request) -> ClusterJson:
        """Brokers, leader, balance, moves under way, and topics that wait for a disk."""
        self._check(Permission.LOOKUP)
        found, caller = await self._views().cluster(), current_principal()
        found["rights"] = {
            "brokers": self._guard.allows(caller, Permission.MANAGE_BROKER),
            "topics": self._guard.allows(caller, Permission.MANAGE_TOPIC),
        }
        return found

    async def rebalance(self, request: web.Request) -> JsonObject:
        """Moves topics to even out the load, or plans that."""
        self._check(Permission.MANAGE_BROKER)
        dry_run, views = await _flag(request, "dry_run"), self._views()
        try:
            moves = await views.control.rebalance(dry_run=dry_run)
            found: JsonObject = {**describe_rebalance(moves, dry_run=dry_run)}
        except ElsewhereError as error:
            asked = ister_api.RebalanceRequest(dry_run=dry_run)
            answer = await ask_other(views, error, services.Admin.Rebalance, asked)
            found = json.loads(answer.json)
        count = len(found["moves"]) if isinstance(found["moves"], list) else 0
        verb = "would move" if dry_run else "are moving"
        return {"done": f"{count} topics {verb}", **found}

    async def drain(self, request: web.Request) -> JsonObject:
        """Makes a broker hand its topics over and take no new ones."""
        self._check(Permission.MANAGE_BROKER)
        await read_body(request)
        node, views = request.match_info["node"], self._views()
        try:
            found: JsonObject = {**describe_drain(await views.control.drain(node))}
        except ElsewhereError as error:
            asked = ister_api.DrainBrokerRequest(broker=node)
            answer = await ask_other(views, error, services.Admin.DrainBroker, asked)
            found = json.loads(answer.json)
        text = f"broker {node} is draining: {found['moved']} of {found['total']} topics"
        return {"done": f"{text} were handed over", **found}

    async def activate(self, request: web.Request) -> JsonObject:
        """Makes a broker take topics again."""
        self._check(Permission.MANAGE_BROKER)
        await read_body(request)
        node, views = request.match_info["node"], self._views()
        try:
            await views.control.activate(node)
        except ElsewhereError as error:
            asked = ister_api.BrokerName(broker=node)
            await ask_other(views, error, services.Admin.ActivateBroker, asked)
        return {"done": f"broker {node} takes topics", "node": node, "state": "active"}

    async def move(self, request: web.Request) -> JsonObject:
        """Moves a topic to another broker."""
        name = topic_of(request)
        self._check(Permission.MANAGE_TOPIC, topic=name)
        to = (await read_body(request)).get("to")
        if not isinstance(to, str) or not to:
            raise InvalidRequestError("to must be the node of a broker", hint='such as {"to": "…"}')
        target = await self._views().control.move(name, to)
        return {"done": f"{name} is at broker {target.node}", "topic": name, "node": target.node}

    async def take_over(self, request: web.Request) -> JsonObject:
        """Takes over a topic; without `confirm`, only says what that would give up."""
        name = topic_of(request)
        self._check(Permission.MANAGE_TOPIC, topic=name)
        confirm = await _flag(request, "confirm")
        found = await self._views().control.take_over(name, confirm=confirm)
        what = (
            f"messages at offset {found.offset} and later that only the disk of node "
            f"{found.node} has"
        )
        text = f"{name} was taken over; given up: {what}"
        if not confirm:
            text = f"nothing was done; a take-over of {name} would give up {what}"
        # `done` is what has happened, in words, as in all answers to changes.
        return {**describe_take_over(found, done=confirm), "is_done": confirm, "done": text}


async def _flag(request: web.Request, name: str) -> bool:
    value = (await read_body(request)).get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false")
    return value
