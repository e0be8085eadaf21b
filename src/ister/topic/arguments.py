"""Checks payloads, offsets, ack levels and codecs that callers pass."""

from __future__ import annotations

from ister.errors import InvalidRequestError
from ister.model import AckLevel, Codec


def as_bytes(payload: object) -> bytes:
    """A payload as bytes.

    Raises:
        InvalidRequestError: It is something else.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise InvalidRequestError(
        f"payload must be bytes, not {type(payload).__name__}",
        hint="use .encode()" if isinstance(payload, str) else None,
    )


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


def parse_ack(level: AckLevel | str) -> AckLevel:
    """An ack level by its name.

    Raises:
        InvalidRequestError: There is no such level.
    """
    try:
        return AckLevel(level)
    except ValueError as error:
        raise InvalidRequestError(
            f"there is no ack level {level!r}", hint=f"one of: {', '.join(AckLevel)}"
        ) from error


def check_ack(level: AckLevel, *, has_bucket: bool, has_files: bool, is_diskless: bool) -> AckLevel:
    """The level, if a log with or without a bucket and files can reach it.

    Args:
        level: The level.
        has_bucket: Whether messages go to a bucket.
        has_files: Whether they are in files.
        is_diskless: Whether these files are in memory, on their way to the bucket.

    Raises:
        InvalidRequestError: It cannot.
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
    """A codec by its name.

    Raises:
        InvalidRequestError: There is no such codec.
    """
    try:
        return Codec(codec)
    except ValueError as error:
        raise InvalidRequestError(
            f"there is no codec {codec!r}", hint=f"one of: {', '.join(Codec)}"
        ) from error
