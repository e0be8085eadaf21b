"""Checks payloads, offsets, numbers, timeouts, ack levels and codecs that callers pass."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from operator import index

from ister.base.model import AckLevel, Codec
from ister.errors import InvalidRequestError


def as_bytes(payload: object) -> bytes:
    """A payload as bytes."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise InvalidRequestError(
        f"payload must be bytes, not {type(payload).__name__}",
        hint="use .encode()" if isinstance(payload, str) else None,
    )


def as_payloads(payloads: object) -> list[bytes]:
    """Payloads as bytes.

    Raises:
        InvalidRequestError: They are not an iterable of bytes.
    """
    if not isinstance(payloads, Iterable):
        raise InvalidRequestError(
            f"payloads must be an iterable of bytes, not {type(payloads).__name__}"
        )
    return [p if type(p) is bytes else as_bytes(p) for p in payloads]


def as_offset(name: str, value: object) -> int:
    """Checks an offset that a caller passed as the argument `name`.

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


def as_number(name: str, value: object, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """Checks a whole number that a caller passed as the argument `name`.

    Raises:
        InvalidRequestError: It is not a whole number, or not within the limits.
    """
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r:.80}") from None
    if not least <= number <= most:
        raise InvalidRequestError(f"{name} must be from {least} to {most}")
    return int(number)


def as_timeout(timeout: object, *, is_positive: bool = False) -> float | None:
    """A timeout in seconds; None, without an end, also for one that no clock can measure.

    Raises:
        InvalidRequestError: It is not a number; or is not above 0, with `is_positive`.
    """
    if timeout is None:
        return None
    seconds = math.nan
    if hasattr(type(timeout), "__float__"):  # texts have none
        try:
            seconds = float(timeout)  # type: ignore[arg-type]
        except OverflowError:
            seconds = math.inf if timeout > 0 else -math.inf  # type: ignore[operator]
        except (TypeError, ValueError):
            pass
    if math.isnan(seconds):
        raise InvalidRequestError(f"timeout must be a number of seconds, not {timeout!r:.80}")
    if is_positive and seconds <= 0:
        raise InvalidRequestError(f"timeout must be above 0 seconds, not {seconds}")
    return None if seconds > threading.TIMEOUT_MAX / 2 else seconds


def parse_ack(level: AckLevel | str) -> AckLevel:
    """An ack level by its name."""
    try:
        return AckLevel(level)
    except ValueError as error:
        raise InvalidRequestError(
            f"there is no ack level {level!r}", hint=f"one of: {', '.join(AckLevel)}"
        ) from error


def check_ack(level: AckLevel, *, has_bucket: bool, has_files: bool, is_diskless: bool) -> AckLevel:
    """The level, if a log with or without a bucket and files can reach it.

    `is_diskless`: whether these files are in memory, on their way to the bucket.
    """
    if is_diskless and level is not AckLevel.TIERED:
        raise InvalidRequestError(
            f"the ack level cannot be {level}: storage.mode is 'bucket', so messages are kept only "
            "in the bucket",
            hint="use ack='tiered'; lower levels need local files (storage.mode 'wal_cloud')",
        )
    if level is AckLevel.TIERED and not has_bucket:
        raise InvalidRequestError("this log has no object store, so nothing becomes tiered")
    if level is not AckLevel.MEMORY and not has_files:
        raise InvalidRequestError(
            f"this log is in memory, so nothing becomes {level}",
            hint="open a directory, or use ack='memory'",
        )
    return level


def parse_codec(codec: Codec | str) -> Codec:
    """A codec by its name."""
    try:
        return Codec(codec)
    except ValueError as error:
        raise InvalidRequestError(
            f"there is no codec {codec!r}", hint=f"one of: {', '.join(Codec)}"
        ) from error
