"""What a subscription stores besides its cursor: acknowledged ranges, and failures so far.

Bounded: ranges and failures beyond the bounds are left out, the highest first. Those messages are
delivered again, or are tried more often.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from ister.base.structs import known
from ister.errors import CorruptDataError
from ister.subscription.floor import AckFloor

_log = logging.getLogger("ister.subscription.saved_state")

_FAILURES_MAX: Final = 1_000
_REASON_BYTES_MAX: Final = 128 * 1024

SavedState: TypeAlias = Mapping[str, object]
"""As stored, a JSON object."""
Failures: TypeAlias = dict[int, tuple[int, str | None]]
"""The number of failures and the last reason, by offset."""


class _Saved(msgspec.Struct):
    floor: int
    failed: list[tuple[int, int, str | None]] = []


def encode_saved(floor: AckFloor, failures: Failures) -> dict[str, object]:
    """Returns the state as it is stored."""
    kept = sorted(failures)[:_FAILURES_MAX]
    room = _REASON_BYTES_MAX
    failed: list[list[object]] = []
    for offset in kept:
        count, reason = failures[offset]
        room -= len(json.dumps(reason))
        failed.append([offset, count, reason if room >= 0 else None])
    end = max(floor.saved_end, kept[-1] + 1 if kept else 0)
    return {**floor.to_json(), "end": end, "failed": failed}


def decode_saved(saved: SavedState, cursor: int, end: int | None) -> tuple[AckFloor, Failures]:
    """Reads stored state; nothing is acknowledged above the cursor if it cannot be used.

    It is not used if it is damaged, or the cursor was put back behind it: messages are delivered
    twice then, and none is lost.

    `cursor`: the first offset that is not acknowledged.
    `end`: the log's end, if known: offsets from there on will be given to other messages.
    """
    unknown: tuple[AckFloor, Failures] = AckFloor(cursor), {}
    try:
        floor = AckFloor.from_json(saved, floor=cursor)
        stored = msgspec.convert(saved, known(_Saved), strict=False)
    except (CorruptDataError, msgspec.ValidationError) as error:
        _log.error("damaged subscription state is ignored", extra={"error": str(error)})
        return unknown
    if stored.floor > cursor or (end is not None and end < cursor):
        return unknown
    if end is not None:
        floor.clip(end)
    return floor, {
        offset: (count, reason)
        for offset, count, reason in stored.failed
        if count > 0 and not floor.is_acked(offset) and (end is None or offset < end)
    }
