"""A topic's facts as the dictionary that describes a topic everywhere.

The fields are those that brokers give (`ister.broker.views`), found out without one; what only a
broker knows is None. Fields are added, never renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from ister.cli.report import error_as_json
from ister.cli.topic_survey import LogFile, TopicFacts
from ister.format.descriptor import ObjectDescriptor, encode_descriptor
from ister.partitions import base_of_partition

__all__ = ["ack_of", "codec_of", "shorten", "view_of"]

_INDEX_FIELDS: Final = ("offset_index", "publish_time_index")
_LONG_FIELDS: Final = ("files", "objects", "policies", "schema", "history")


def view_of(facts: TopicFacts, *, with_index: bool = False) -> dict[str, Any]:
    """All about a topic.

    Args:
        facts: What was found out.
        with_index: With the objects' indexes, which may be long.
    """
    record, local, marks = facts.record, facts.local, facts.watermarks
    files = local.files if local is not None else []
    is_reliable = facts.served.is_reliable if facts.served is not None else True
    return {
        "topic": facts.topic,
        "parent": base_of_partition(facts.topic),
        "partitions": [],
        "is_reliable": is_reliable,
        "mode": None,
        "ack": ack_of(facts),
        "codec": codec_of(facts),
        "epoch": record.epoch if record is not None else None,
        "incarnation": record.incarnation if record is not None else None,
        "state": record.state if record is not None else None,
        "created_at": record.created_at if record is not None else None,
        "owner": {**asdict(facts.owner), "broker_url": None} if facts.owner is not None else None,
        "sealed": asdict(facts.sealed) if facts.sealed is not None else None,
        "earliest": _earliest(facts),
        "watermarks": asdict(marks),
        "path": local.path if local is not None else None,
        "is_local_current": local.is_current if local is not None else None,
        "files": [
            {**asdict(file), "is_active": number == len(files)}
            for number, file in enumerate(files, 1)
        ],
        "objects": [_object_as_json(item, with_index=with_index) for item in facts.objects],
        "files_total": len(files),
        "files_bytes": sum(file.bytes for file in files),
        "objects_total": len(facts.objects),
        "objects_bytes": sum(item.size_bytes for item in facts.objects),
        "cache": None,
        "producers": None,
        "policies": dict(facts.served.policies) if facts.served is not None else {},
        "schema": None,
        "rates": None,
        "upload_lag": {
            "messages": marks.next - marks.tiered,
            "bytes": _bytes_from(files, marks.tiered) if marks.next > marks.tiered else 0,
        },
        "subscriptions": _subscriptions(facts),
        "damage": [],
        "errors": [error_as_json(error) for error in facts.errors],
    }


def shorten(view: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what may be long; of files and objects there are the numbers."""
    return {name: value for name, value in view.items() if name not in _LONG_FIELDS}


def ack_of(facts: TopicFacts) -> str | None:
    """The topic's ack level, if it is known."""
    if facts.record is not None:
        return facts.record.ack
    state = facts.local.state if facts.local is not None else None
    return state.ack if state is not None else None


def codec_of(facts: TopicFacts) -> str | None:
    """The topic's codec, if it is known."""
    if facts.record is not None:
        return facts.record.codec
    state = facts.local.state if facts.local is not None else None
    return state.codec if state is not None else None


def _earliest(facts: TopicFacts) -> int:
    """The first offset that some tier has; the next one if there is none."""
    firsts = [facts.objects[0].start] if facts.objects else []
    if facts.local is not None and facts.local.is_current:
        known = [file.first_offset for file in facts.local.files if file.first_offset is not None]
        firsts += known[:1]
    return min([*firsts, facts.watermarks.next])


def _bytes_from(files: Sequence[LogFile], offset: int) -> int:
    """About how many bytes the messages from an offset on take in the files."""
    size = 0
    for file in files:
        first, end = file.first_offset, file.next_offset
        if first is None or end is None or end <= max(first, offset):
            continue
        size += file.bytes * (end - max(first, offset)) // (end - first)
    return size


def _object_as_json(described: ObjectDescriptor, *, with_index: bool) -> dict[str, Any]:
    """The descriptor as it is stored."""
    fields: dict[str, Any] = json.loads(encode_descriptor(described))
    if not with_index:
        for name in _INDEX_FIELDS:
            fields.pop(name, None)
    return fields


def _subscriptions(facts: TopicFacts) -> list[dict[str, Any]]:
    cursors: dict[str, int | None] = dict.fromkeys(facts.stored)
    cursors |= {one.name: one.progress.offset for one in facts.subscriptions}
    found: list[dict[str, Any]] = []
    for name, cursor in sorted(cursors.items()):
        stored = facts.stored.get(name)
        lag = None if cursor is None else max(0, facts.watermarks.next - cursor)
        found.append(
            {
                "name": name,
                "type": stored.kind.value if stored is not None else None,
                "cursor": cursor,
                "lag": lag,
                "in_flight": None,
                "waiting": None,
                "blocked": None,
                "blocked_reason": None,
                "consumers": [],
                "active": None,
                "max_unacked_messages": stored.window if stored is not None else None,
                "failure_policy": stored.policy.to_json() if stored is not None else None,
            }
        )
    return found
