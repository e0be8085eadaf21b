"""Talking to brokers: publishing, consuming, administration; blocking and with asyncio.

    from ister.client import Client, AsyncClient

    sync.Client ─► loop thread ─┐                     ┌ Flight do_put     batches with sequences
    aio.AsyncClient ────────────┴► the same core ─────┤ ister.Delivery    messages and acks
                                                      └ ister.Admin, danube_admin

`messages` has what a consumer gets, `options` how a client reaches brokers, `admin`,
`cluster_admin`, `rights`, `schemas` and `dead_letters` the calls for operators. Besides, for Arrow data: `flight` reads ranges, `publisher`
publishes tables, `frames` fetches a topic's frames for an upload.

Nothing is loaded before it is asked for: gRPC and pyarrow are an extra, `ister[client]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ister.client.admin import SubscriptionDescription, TopicDescription
    from ister.client.aio import AsyncClient, AsyncConsumer, AsyncProducer, AsyncSentMessage
    from ister.client.dead_letters import LetterFilter
    from ister.client.messages import ReceivedMessage
    from ister.client.options import TlsOptions
    from ister.client.rights import BindingDescription, RoleDescription
    from ister.client.schemas import RegisteredSchema, Schema, SchemaVersion, SubjectDescription
    from ister.client.sync import Client, Consumer, Producer, SentMessage

__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncSentMessage",
    "BindingDescription",
    "Client",
    "Consumer",
    "LetterFilter",
    "Producer",
    "ReceivedMessage",
    "RegisteredSchema",
    "RoleDescription",
    "Schema",
    "SchemaVersion",
    "SentMessage",
    "SubjectDescription",
    "SubscriptionDescription",
    "TlsOptions",
    "TopicDescription",
]

_HOMES: Final = {
    "AsyncClient": "aio",
    "AsyncConsumer": "aio",
    "AsyncProducer": "aio",
    "AsyncSentMessage": "aio",
    "BindingDescription": "rights",
    "Client": "sync",
    "Consumer": "sync",
    "LetterFilter": "dead_letters",
    "Producer": "sync",
    "ReceivedMessage": "messages",
    "RegisteredSchema": "schemas",
    "RoleDescription": "rights",
    "Schema": "schemas",
    "SchemaVersion": "schemas",
    "SentMessage": "sync",
    "SubjectDescription": "schemas",
    "SubscriptionDescription": "admin",
    "TlsOptions": "options",
    "TopicDescription": "admin",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
