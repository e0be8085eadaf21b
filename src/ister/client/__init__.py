"""Talking to brokers: publishing, consuming, administration; blocking and with asyncio.

    from ister.client import Client, AsyncClient

    sync.Client ─► loop_thread ─┐                     ┌ Flight do_put     batches with sequences
    aio.AsyncClient ────────────┴► the same core ─────┤ ister.Delivery    messages and acks
                                                      └ ister.Admin, danube_admin

`messages` has what a consumer gets, `options` how a client reaches brokers, `tls_probe` whether a
port that does not answer wants TLS; `admin` has the calls for operators,
which return `descriptions`. Besides, for Arrow data: `ranges` reads topics, `flight`
ranges of one, `frames` fetches a topic's frames for an upload.

Nothing is loaded before it is asked for: gRPC and pyarrow are an extra, `ister[client]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ister.base.serializers import JsonSerializer, Serializer
    from ister.client.admin import AsyncAdmin
    from ister.client.aio import (
        AsyncClient,
        AsyncConsumer,
        AsyncProducer,
        AsyncReader,
        AsyncSentMessage,
    )
    from ister.client.descriptions import (
        BindingDescription,
        LetterFilter,
        RegisteredSchema,
        RoleDescription,
        Schema,
        SchemaVersion,
        SubjectDescription,
        SubscriptionDescription,
        TopicDescription,
    )
    from ister.client.messages import ReceivedMessage, TopicMessage
    from ister.client.options import TlsOptions
    from ister.client.ranges import Reader
    from ister.client.sync import Admin, Client, Consumer, Producer, SentMessage
    from ister.topic.table import AsyncTopicTable, TopicTable

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncReader",
    "AsyncSentMessage",
    "AsyncTopicTable",
    "BindingDescription",
    "Client",
    "Consumer",
    "JsonSerializer",
    "LetterFilter",
    "Producer",
    "Reader",
    "ReceivedMessage",
    "RegisteredSchema",
    "RoleDescription",
    "Schema",
    "SchemaVersion",
    "SendOptions",
    "SentMessage",
    "Serializer",
    "SubjectDescription",
    "SubscriptionDescription",
    "TlsOptions",
    "TopicDescription",
    "TopicMessage",
    "TopicTable",
]

_HOMES: Final = {
    "Admin": "ister.client.sync",
    "AsyncAdmin": "ister.client.admin",
    "AsyncClient": "ister.client.aio",
    "AsyncConsumer": "ister.client.aio",
    "AsyncProducer": "ister.client.aio",
    "AsyncReader": "ister.client.aio",
    "AsyncSentMessage": "ister.client.aio",
    "AsyncTopicTable": "ister.topic.table",
    "BindingDescription": "ister.client.descriptions",
    "Client": "ister.client.sync",
    "Consumer": "ister.client.sync",
    "JsonSerializer": "ister.base.serializers",
    "LetterFilter": "ister.client.descriptions",
    "Producer": "ister.client.sync",
    "Reader": "ister.client.ranges",
    "ReceivedMessage": "ister.client.messages",
    "RegisteredSchema": "ister.client.descriptions",
    "RoleDescription": "ister.client.descriptions",
    "Schema": "ister.client.descriptions",
    "SchemaVersion": "ister.client.descriptions",
    "SendOptions": "ister.client.aio",
    "SentMessage": "ister.client.sync",
    "Serializer": "ister.base.serializers",
    "SubjectDescription": "ister.client.descriptions",
    "SubscriptionDescription": "ister.client.descriptions",
    "TlsOptions": "ister.client.options",
    "TopicDescription": "ister.client.descriptions",
    "TopicMessage": "ister.client.messages",
    "TopicTable": "ister.topic.table",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
