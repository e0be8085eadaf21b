"""Where a subscription begins or goes on, in the words of the protocol."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from ister.errors import InvalidRequestError
from ister.model import Start

__all__ = ["format_start", "milliseconds_of"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def milliseconds_of(time: datetime) -> int:
    """A publish time.

    Raises:
        InvalidRequestError: It has no time zone, or no message can have it.
    """
    if time.tzinfo is None:
        raise InvalidRequestError(f"{time} is a time without a time zone")
    if time < _EPOCH:
        raise InvalidRequestError(f"{time} is before 1970")
    return (time - _EPOCH) // timedelta(milliseconds=1)


def format_start(start: Start) -> str:
    """Where a new subscription begins.

    Raises:
        InvalidRequestError: It is no place in a topic.
    """
    if isinstance(start, datetime):
        return f"@{milliseconds_of(start)}"
    if start in ("earliest", "latest") or (type(start) is int and start >= 0):
        return str(start)
    raise InvalidRequestError(
        f"a subscription cannot start at {start!r}", hint="earliest, latest, an offset or a time"
    )
