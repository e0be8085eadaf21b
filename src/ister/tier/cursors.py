"""Subscriptions' cursors in the metadata store: each only ever moves forward.

A cursor is the first offset that a subscription has not acknowledged. It is written in a
transaction of the topic's owner, with a compare on what was read: an owner that was replaced cannot
move it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from ister.errors import CommitUnknownError, ConflictError, CorruptDataError
from ister.format.records import Progress, decode_progress, encode_progress
from ister.metadata.base import Absent, Compare, MetadataStore, Put, RevisionIs
from ister.tier.ownership import OwnedTopic

__all__ = ["DELIVERY", "clip_progress", "load_progress", "save_progress"]

_log = logging.getLogger("ister.tier.cursors")

DELIVERY: Final = "delivery"
"""The field beside a broker's cursor for what is acknowledged out of order above it. The first
offset after all that it speaks of is in its `end`."""

_ATTEMPTS: Final = 5


def load_progress(store: MetadataStore, key: str) -> Progress | None:
    """A cursor, or None if there is none."""
    found = store.get(key)
    return None if found is None else decode_progress(found.value, key=key)


def clip_progress(
    store: MetadataStore, prefix: str, next_offset: int, *, owned: OwnedTopic | None = None
) -> list[str]:
    """Puts cursors back that are ahead of a topic's end, under a claim; returns their keys.

    After a take-over, or a restore of older files, offsets behind the end are given out again: a
    cursor that stays ahead would pass over the messages that get them, and so would what is
    acknowledged out of order above a cursor.
    """
    clipped: list[str] = []
    for _ in range(_ATTEMPTS):
        is_done = True
        for found in store.range(prefix):
            if not found.key.endswith("/progress"):
                continue
            try:
                known = decode_progress(found.value, key=found.key)
            except CorruptDataError as error:
                # One bad cursor must not keep the topic from its users.
                _log.error("unreadable cursor", extra={"error": str(error)})
                continue
            if known.offset > next_offset or _speaks_of(known.more.get(DELIVERY), next_offset):
                more = {name: value for name, value in known.more.items() if name != DELIVERY}
                if DELIVERY in known.more:
                    more[DELIVERY] = {}
                clean = replace(known, offset=min(known.offset, next_offset), more=more)
                value = encode_progress(clean)
                compare = RevisionIs(found.key, found.revision)
                try:
                    is_changed = _transact(store, owned, compare, Put(found.key, value))
                except CommitUnknownError:
                    is_changed = False  # the next round reads what has become of it
                if is_changed:
                    clipped.append(found.key)
                is_done = is_done and is_changed
        if is_done:
            return clipped
    raise ConflictError("the cursors keep changing", path=prefix)


def save_progress(owned: OwnedTopic, subscription: str, progress: Progress) -> Progress:
    """Moves a cursor forward; one that is further already stays, with the newer timestamp.

    A cursor of a topic of the same name that was deleted does not count.

    Returns:
        What the store has now.

    Raises:
        FencedError: Somebody else owns the topic.
        ConflictError: Others keep changing it.
        UnavailableError: The store does not answer.
    """
    key = owned.catalog.keys.progress(subscription)
    for _ in range(_ATTEMPTS):
        found = owned.catalog.store.get(key)
        wanted = progress
        compare: Compare = Absent(key)
        if found is not None:
            compare = RevisionIs(key, found.revision)
            known = decode_progress(found.value, key=key)
            if known.incarnation == progress.incarnation:
                wanted = Progress(
                    offset=max(known.offset, progress.offset),
                    timestamp=max(known.timestamp, progress.timestamp),
                    incarnation=progress.incarnation,
                    more={**known.more, **progress.more},
                )
        try:
            if owned.transact([compare], [Put(key, encode_progress(wanted))]):
                return wanted
        except CommitUnknownError:
            # The next round reads what has become of it.
            continue
    raise ConflictError("the cursor keeps changing", path=key)


def _speaks_of(delivery: Any, next_offset: int) -> bool:  # noqa: ANN401 - as it was stored
    """Whether something is said about offsets from `next_offset` on, or cannot be understood."""
    if not delivery:
        return False
    end = delivery.get("end") if isinstance(delivery, dict) else None
    return not isinstance(end, int) or end > next_offset


def _transact(
    store: MetadataStore, owned: OwnedTopic | None, compare: Compare, operation: Put
) -> bool:
    if owned is not None:
        return owned.transact([compare], [operation])
    return store.transact([compare], [operation]) is not None
