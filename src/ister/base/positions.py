"""Positions in a topic and times: parsing, formatting, and the lag of a position.

    position = "earliest" | "latest" | offset | time | "@" milliseconds | "t:" time | age
    time     = ISO 8601 with a time zone          2026-01-31T12:00:00Z
    age      = number and s, m, h or d            90s, 15m, 2h, 7d   (command line only)

`@` is the form of the wire protocol. `t:` is the form of the HTTP API, where milliseconds and times
without a zone (UTC) are also allowed; the command line takes these as well. Messages carry whole
milliseconds since 1970. Times for people are in UTC: `2026-01-31T12:00:00.000Z` (`format_time`).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from ister.base.clock import Clock
from ister.base.model import Start
from ister.errors import InvalidRequestError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
PUBLISH_TIME_MS_MAX: Final = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)

_OFFSET: Final = re.compile(r"[0-9]{1,19}")
_MILLISECONDS: Final = re.compile(r"-?[0-9]{1,19}")
_AGE: Final = re.compile(r"([0-9]{1,9})([smhd])")
_AGE_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SHOWN_CHARACTERS: Final = 40
_TIME_HINT: Final = "write it as 2026-01-31T12:00:00Z"


def parse_position(text: str, *, ages_from: Clock | None = None, utc: bool = False) -> Start:
    """Parses a position; see the module header for its forms.

    Args:
        text: What a user wrote, or a client sent.
        ages_from: Allows ages such as 7d, counted back from this clock's time.
        utc: Takes times without a zone as UTC.

    Raises:
        InvalidRequestError: It is not a position.
    """
    if text in ("earliest", "latest"):
        return "earliest" if text == "earliest" else "latest"
    if _OFFSET.fullmatch(text) and int(text) < 1 << 63:
        return int(text)
    if text[:1] == "@" and _OFFSET.fullmatch(text, 1):
        return time_of(int(text[1:]))
    if text.startswith("t:"):
        time = text.removeprefix("t:")
        if _MILLISECONDS.fullmatch(time):
            return time_of(int(time))
        return parse_time(time, utc=True)
    if ages_from is not None and (age := _AGE.fullmatch(text)):
        now = datetime.fromtimestamp(ages_from.now_ns() // 1_000_000_000, UTC)
        try:
            return now - timedelta(**{_AGE_UNITS[age[2]]: int(age[1])})
        except OverflowError as error:
            raise _invalid(text, ages=True) from error
    try:
        time_found = datetime.fromisoformat(text)
    except ValueError as error:
        raise _invalid(text, ages=ages_from is not None) from error
    return _with_zone(time_found, text, utc=utc)


def _invalid(text: str, *, ages: bool) -> InvalidRequestError:
    forms = "earliest, latest, an offset or a time"
    if ages:
        forms = (
            "earliest, latest, an offset, a time such as 2026-01-31T12:00:00Z, @MILLISECONDS, or "
            "an age such as 7d"
        )
    return InvalidRequestError(f"invalid position {text[:_SHOWN_CHARACTERS]!r}: use {forms}")


def parse_time(text: str, *, utc: bool = False) -> datetime:
    """Parses an ISO 8601 time.

    Args:
        text: Such as 2026-01-31T12:00:00Z.
        utc: Takes a time without a zone as UTC; otherwise it is refused.

    Raises:
        InvalidRequestError: It is not a time, or has no zone.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"invalid time {text[:_SHOWN_CHARACTERS]!r}", hint=_TIME_HINT
        ) from error
    return _with_zone(found, text, utc=utc)


def _with_zone(time: datetime, text: str, *, utc: bool) -> datetime:
    if time.tzinfo is None:
        if not utc:
            raise InvalidRequestError(
                f"time {text!r} has no time zone", hint="end it with Z for UTC, or with +01:00"
            )
        return time.replace(tzinfo=UTC)
    return time


def format_position(position: Start) -> str:
    """A position in the wire protocol's form, which `parse_position` reads.

    Raises:
        InvalidRequestError: It is not a position.
    """
    if isinstance(position, datetime):
        return f"@{to_milliseconds(position)}"
    is_word = isinstance(position, str) and position in ("earliest", "latest")
    if is_word or (type(position) is int and position >= 0):
        return str(position)
    raise InvalidRequestError(
        f"invalid position {position!r}: use earliest, latest, an offset or a time"
    )


def time_of(milliseconds: int) -> datetime:
    """The time that is `milliseconds` after 1970.

    Raises:
        InvalidRequestError: It is outside of the calendar.
    """
    try:
        return EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError as error:
        raise InvalidRequestError(
            f"invalid time {milliseconds}", hint="use milliseconds since 1970"
        ) from error


def format_time(time: datetime | float) -> str:
    """A time as texts, logs and tables have it: `2026-01-31T12:00:00.000Z`.

    Args:
        time: With a zone, or milliseconds since 1970. Milliseconds outside of the calendar are
            returned as a number.
    """
    if isinstance(time, int | float):
        milliseconds = int(time)
        try:
            time = EPOCH + timedelta(milliseconds=milliseconds)
        except OverflowError:
            return str(milliseconds)
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_milliseconds(time: datetime | int) -> int:
    """A time, or milliseconds already, as milliseconds since 1970, rounded down.

    Raises:
        InvalidRequestError: It has no time zone, or no message can have it.
    """
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise InvalidRequestError(
                f"time {time} has no time zone", hint="use datetime.now(UTC), for example"
            )
        milliseconds = (time - EPOCH) // timedelta(milliseconds=1)
    elif isinstance(time, int) and not isinstance(time, bool):
        milliseconds = time
    else:
        raise InvalidRequestError(
            f"invalid time {time!r}: use a datetime or milliseconds since 1970"
        )
    if not 0 <= milliseconds <= PUBLISH_TIME_MS_MAX:
        raise InvalidRequestError(f"time {time!r} is outside of 1970 to 9999")
    return milliseconds


def lag_of(cursor: int, *, earliest: int, end: int) -> int:
    """Returns how many messages there are from a cursor to the end of a topic.

    Those before `earliest`, which retention has deleted, do not count: nobody will receive them.
    """
    return max(0, end - max(cursor, earliest))
