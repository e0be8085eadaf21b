"""Moves subscriptions' cursors back to the end of a topic that lost messages.

A cursor is the first offset that a subscription has not acknowledged; `ister.subscription.store`
writes it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ister.bucket.ownership import OwnedTopic
from ister.errors import CommitUnknownError, ConflictError, CorruptDataError
from ister.format.records import decode_progress, encode_progress
from ister.metadata.base import Compare, MetadataStore, Put, RevisionIs
from ister.metadata.transact import transact

_log = logging.getLogger("ister.bucket.cursors")

DELIVERY: Final = "delivery"
"""The field beside a broker's cursor for what is acknowledged out of order above it. The first
offset after all that it speaks of is in its `end`."""


def clip_progress(
    store: MetadataStore, prefix: str, next_offset: int, *, owned: OwnedTopic | None = None
) -> list[str]:
    """Moves cursors that are ahead of a topic's end back to it; returns their keys.

    After a take-over, or a restore of older files, offsets from the end on are assigned again. A
    cursor that stayed ahead would skip the new messages; so would acknowledgements out of order.
    """
    clipped: list[str] = []

    def attempt() -> list[str] | None:
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
            if known.offset > next_offset or _reaches(known.more.get(DELIVERY), next_offset):
                more = {name: value for name, value in known.more.items() if name != DELIVERY}
                if DELIVERY in known.more:
                    more[DELIVERY] = {}
                clean = replace(known, offset=min(known.offset, next_offset), more=more)
                value = encode_progress(clean)
                is_changed = False
                with suppress(CommitUnknownError):  # the next attempt reads what has become of it
                    compare = RevisionIs(found.key, found.revision)
                    is_changed = _transact(store, owned, compare, Put(found.key, value))
                if is_changed:
                    clipped.append(found.key)
                is_done = is_done and is_changed
        return clipped if is_done else None

    return transact(attempt, ConflictError("the cursors keep changing", path=prefix))


def _reaches(delivery: object, next_offset: int) -> bool:
    """Whether acknowledgements reach `next_offset`, or cannot be read."""
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
