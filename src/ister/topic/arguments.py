"""What callers pass for payloads, offsets and points in time, checked once for all ways in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ister.errors import InvalidRequestError

__all__ = ["PUBLISH_TIME_MS_MAX", "as_bytes", "as_milliseconds", "as_offset"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PUBLISH_TIME_MS_MAX = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)


def as_bytes(payload: object) -> bytes:
    """A payload as bytes.

    Raises:
        InvalidRequestError: It is something else.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise InvalidRequestError(
        f"a payload is bytes, not {type(payload).__name__}",
        hint="encode text first: text.encode()" if isinstance(payload, str) else None,
    )


def as_offset(name: str, value: object) -> int:
    """An offset that a caller gave for the argument `name`.

    Raises:
        InvalidRequestError: It is not a whole number from 0 on.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"{name} cannot be {value!r}",
            hint="an offset is a whole number; a start may also be 'earliest', 'latest' or a "
            "datetime",
        )
    if value < 0:
        raise InvalidRequestError(f"{name} is {value}; offsets begin at 0")
    return value


def as_milliseconds(moment: datetime | int) -> int:
    """A point in time in milliseconds since the Unix epoch.

    Raises:
        InvalidRequestError: It has no time zone, or no message can have it.
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidRequestError(
                "a point in time needs a time zone", hint="datetime.now(UTC), for example"
            )
        milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    elif isinstance(moment, int) and not isinstance(moment, bool):
        milliseconds = moment
    else:
        raise InvalidRequestError(f"{moment!r} is neither a datetime nor milliseconds")
    if not 0 <= milliseconds <= PUBLISH_TIME_MS_MAX:
        raise InvalidRequestError(f"the time {moment!r} is before 1970 or too far ahead")
    return milliseconds
