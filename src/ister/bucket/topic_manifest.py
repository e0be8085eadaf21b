"""The small object that describes a topic: from it and the objects, metadata is rebuilt.

A crash leaves the manifest that was there, or the new one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from ister.base.limits import MIB
from ister.base.model import AckLevel, Codec, TopicName
from ister.bucket.names import manifest_key
from ister.errors import NotFoundError
from ister.format.records import TopicRecord
from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.bucket.rebuild")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The small object that describes a topic."""

    ack: AckLevel
    codec: Codec
    incarnation: str
    created_at: int


def save_manifest(store: ObjectStore, topic: TopicName, manifest: Manifest) -> None:
    """Writes the manifest of a topic, replacing the one that is there."""
    fields = {
        "topic": str(topic),
        "ack": manifest.ack,
        "codec": manifest.codec,
        "incarnation": manifest.incarnation,
        "created_at": manifest.created_at,
    }
    store.put(manifest_key(topic), json.dumps(fields).encode())


def load_manifest(store: ObjectStore, topic: TopicName) -> Manifest | None:
    """The manifest of a topic; None if there is none, or it is damaged."""
    try:
        fields = json.loads(store.read(manifest_key(topic), 0, MIB))
        return Manifest(
            ack=AckLevel(fields["ack"]),
            codec=Codec(fields["codec"]),
            incarnation=str(fields["incarnation"]),
            created_at=int(fields["created_at"]),
        )
    except NotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        _log.warning("the topic's manifest is damaged", extra={"topic": str(topic)})
        return None


def has_manifest(store: ObjectStore, topic: TopicName) -> bool:
    """Whether a topic has a manifest, damaged or not: its deletion removes it."""
    try:
        store.stat(manifest_key(topic))
    except NotFoundError:
        return False
    return True


def manifest_of(record: TopicRecord) -> Manifest:
    """The manifest of a topic with this record."""
    return Manifest(
        ack=record.ack,
        codec=record.codec,
        incarnation=record.incarnation,
        created_at=record.created_at,
    )
