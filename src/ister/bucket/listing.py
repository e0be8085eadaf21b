"""Lists the objects of a topic, in whichever folder they are.

Owns: which keys below a topic's prefix are those of objects. Does not own: names
(`ister.bucket.names`), runs in express objects.
"""

from __future__ import annotations

from collections.abc import Iterator

from ister.base.model import TopicName
from ister.bucket.names import objects_prefix, segments_prefix, topic_prefix
from ister.objectstore.base import ObjectInfo, ObjectStore


def list_objects(store: ObjectStore, topic: TopicName) -> Iterator[ObjectInfo]:
    """Everything in a topic's folders `objects/` and `segments/`, foreign files included."""
    folders = (objects_prefix(topic), segments_prefix(topic))
    # One listing: its only other key is the manifest's.
    return (info for info in store.list(topic_prefix(topic)) if info.key.startswith(folders))
