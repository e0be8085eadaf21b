"""Talking to brokers: publishing, consuming, administration; blocking and with asyncio.

    from ister.client import Client, AsyncClient

    sync.Client ─► loop_thread ─┐                     ┌ Flight do_put     batches with sequences
    aio.AsyncClient ────────────┴► the same core ─────┤ ister.Delivery    messages and acks
                                                      └ ister.Admin, danube_admin

`messages` has what a consumer gets, `options` how a client reaches brokers, `tls_probe` whether a
port that does not answer wants TLS; `admin`, `cluster_admin`, `rights`, `schemas` and
`dead_letters` the calls for operators. Besides, for Arrow data: `ranges` reads topics, `flight`
ranges of one, `frames` fetches a topic's frames for an upload.

Nothing is loaded before it is asked for: gRPC and pyarrow are an extra, `ister[client]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ister.base.serializers import JsonSerializer, Serializer
    from ister.client.admin import SubscriptionDescription, TopicDescription
    from ister.client.aio import (
        AsyncClient,
        AsyncConsumer,
        AsyncProducer,
        AsyncReader,
        AsyncSentMessage,
    )
    from ister.client.dead_letters import LetterFilter
    from ister.client.messages import ReceivedMessage, TopicMessage
    from ister.client.options import TlsOptions
    from ister.client.ranges import Reader
    from ister.client.rights import BindingDescription, RoleDescription
    from ister.client.schemas import RegisteredSchema, Schema, SchemaVersion, SubjectDescription
    from ister.client.sync import Client, Consumer, Producer, SentMessage
    from ister.topic.table import AsyncTopicTable, TopicTable

__all__ = [
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
    "AsyncClient": "ister.client.aio",
    "AsyncConsumer": "ister.client.aio",
    "AsyncProducer": "ister.client.aio",
    "AsyncReader": "ister.client.aio",
    "AsyncSentMessage": "ister.client.aio",
    "AsyncTopicTable": "ister.topic.table",
    "BindingDescription": "ister.client.rights",
    "Client": "ister.client.sync",
    "Consumer": "ister.client.sync",
    "JsonSerializer": "ister.base.serializers",
    "LetterFilter": "ister.client.dead_letters",
    "Producer": "ister.client.sync",
    "Reader": "ister.client.ranges",
    "ReceivedMessage": "ister.client.messages",
    "RegisteredSchema": "ister.client.schemas",
    "RoleDescription": "ister.client.rights",
    "Schema": "ister.client.schemas",
    "SchemaVersion": "ister.client.schemas",
    "SendOptions": "ister.client.aio",
    "SentMessage": "ister.client.sync",
    "Serializer": "ister.base.serializers",
    "SubjectDescription": "ister.client.schemas",
    "SubscriptionDescription": "ister.client.admin",
    "TlsOptions": "ister.client.options",
    "TopicDescription": "ister.client.admin",
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
