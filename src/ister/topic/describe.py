"""The description of a topic: one set of fields for HTTP, gRPC, the dashboard and the command line.

A broker fills a `TopicView` from memory and its stores (`broker.observe.views`); without a broker
it is filled from files and stores (`topic.offline`). A field that one of the two cannot know is
None, or UNSET, which leaves it out of the JSON. Fields are added, never renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, cast

import msgspec
from msgspec import UNSET, UnsetType

from ister.base.model import JsonObject, Watermarks
from ister.base.partitions import base_of_partition
from ister.format.descriptor import ObjectDescriptor, count_messages, encode_descriptor
from ister.wire.views import TopicJson

__all__ = [
    "NO_WATERMARKS",
    "SubscriptionView",
    "TopicView",
    "UploadLag",
    "count_messages",
    "describe_descriptor",
    "shorten",
]

NO_WATERMARKS: Final = Watermarks(trimmed=0, tiered=0, synced=0, written=0, next=0)
_INDEX_FIELDS: Final = ("offset_index", "publish_time_index")
_LONG_FIELDS: Final = ("files", "objects", "policies", "schema", "history")


class SubscriptionView(msgspec.Struct, kw_only=True):
    """A subscription of a topic; fields that only a broker knows are None without one."""

    name: str
    type: str | None
    cursor: int | None = None
    lag: int | None = None
    in_flight: int | None = None
    waiting: int | None = None
    blocked: int | None = None
    blocked_reason: str | None = None
    consumers: list[str] = []
    consumers_total: int | UnsetType = UNSET
    active: str | None = None
    max_unacked_messages: int | None = None
    failure_policy: Mapping[str, object] | None = None
    principals: list[str] | UnsetType | None = UNSET


class UploadLag(msgspec.Struct):
    """What is not in the bucket yet."""

    messages: int = 0
    bytes: int = 0


class TopicView(msgspec.Struct, kw_only=True):
    """A topic as JSON has it."""

    topic: str
    is_here: bool | UnsetType = UNSET
    """Whether the broker that was asked serves the topic."""
    is_reliable: bool = True
    mode: str | None = None
    ack: str | None = None
    codec: str | None = None
    incarnation: str | None = None
    epoch: int | None = None
    state: str | None = None
    created_at: int | UnsetType | None = UNSET
    owner: Mapping[str, object] | None = None
    sealed: Mapping[str, object] | UnsetType | None = UNSET
    earliest: int = 0
    watermarks: Watermarks = NO_WATERMARKS
    path: str | UnsetType | None = UNSET
    is_local_current: bool | UnsetType | None = UNSET
    files: list[JsonObject] | UnsetType = UNSET
    objects: list[JsonObject] | UnsetType = UNSET
    files_total: int = 0
    files_bytes: int = 0
    objects_total: int = 0
    objects_bytes: int = 0
    is_counted: bool | UnsetType = UNSET
    """Whether all objects were counted."""
    cache: Mapping[str, int] | None = None
    producers: int | None = None
    policies: Mapping[str, object] | UnsetType = UNSET
    schema: Mapping[str, object] | UnsetType | None = UNSET
    rates: Mapping[str, float] | None = None
    upload_lag: UploadLag = msgspec.field(default_factory=UploadLag)
    subscriptions: list[SubscriptionView] = []
    subscriptions_total: int | UnsetType = UNSET
    damage: list[JsonObject] = []
    errors: list[JsonObject] = []
    history: Mapping[str, object] | UnsetType = UNSET

    def to_json(self) -> TopicJson:
        """The fields for JSON, with the topic that a partition belongs to."""
        fields: TopicJson = msgspec.to_builtins(self)
        return {**fields, "parent": base_of_partition(self.topic), "partitions": []}


def shorten(fields: TopicJson) -> TopicJson:
    """A topic's fields without the long ones; the totals of files and objects stay."""
    short = {name: value for name, value in fields.items() if name not in _LONG_FIELDS}
    return cast("TopicJson", short)


def describe_descriptor(described: ObjectDescriptor) -> JsonObject:
    """An object's descriptor as it is stored, without its indexes, which may be long."""
    fields = cast("JsonObject", json.loads(encode_descriptor(described)))
    return {name: value for name, value in fields.items() if name not in _INDEX_FIELDS}
