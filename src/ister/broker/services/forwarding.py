"""Forwards calls about a topic to the broker that has it, so that any broker answers them.

Owns: which services forward calls, and the wrappers of their methods. Does not own: the calls to
other brokers (`ister.broker.cluster.peers`).

Messages are not forwarded: producers, consumers and Flight look the topic up and connect to its
broker.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message

from ister.broker.cluster.peers import Peers, forwarded, may_forward
from ister.broker.rpc.handlers import Answer, Context
from ister.broker.rpc.methods import UnaryCall, Wrap
from ister.broker.topics.topics import ElsewhereError

FORWARDING: Final = frozenset(
    {
        "danube.Discovery",
        "danube_admin.BrokerAdmin",
        "danube_admin.TopicAdmin",
        "danube_schema.SchemaRegistry",
        "ister.Admin",
        "ister.DeadLetters",
    }
)
"""The services whose unary calls are forwarded."""


def forwarding(peers: Peers) -> Wrap:
    """Returns a wrapper for methods: calls that another broker has to serve are forwarded."""

    def wrap(path: str, call: UnaryCall) -> UnaryCall:
        async def call_here_or_there(request: Message, context: Context) -> Answer:
            try:
                return await call(request, context)
            except ElsewhereError as error:
                if not may_forward():
                    raise
                member, topic, timeout = error.member, error.topic, error.timeout_seconds
            data: bytes = request.SerializeToString()
            return await peers.relay(member, path, data, topic=topic, timeout=timeout)

        return call_here_or_there

    return wrap


def receiving(_path: str, call: UnaryCall) -> UnaryCall:
    """Wraps a method that serves forwarded calls: they are not forwarded again."""

    async def call_here(request: Message, context: Context) -> Answer:
        with forwarded():
            return await call(request, context)

    return call_here
