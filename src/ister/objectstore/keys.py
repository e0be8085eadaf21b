"""Which keys an object may have, the same on every store.

A key that one backend takes and another changes would make two objects one, or one unreachable:
opendal trims blanks around a key and folds empty parts, a file system gives `.` and `..` a
meaning. Refused here, such a key never gets as far.
"""

from __future__ import annotations

from typing import Final

from ister.errors import InvalidRequestError

STAGING_FOLDER: Final = ".tmp"
"""Where the `fs` backend keeps objects under way: no key begins with it, no listing shows it."""

_KEY_BYTES_MAX: Final = 1024
"""What S3, GCS and Azure allow."""


def check_key(key: str) -> None:
    """Raises unless `key` means the same object on every store.

    Raises:
        InvalidRequestError: It does not.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidRequestError(f"an object's key has an empty, `.` or `..` part: {key!r}")
    if parts[0] == STAGING_FOLDER:
        raise InvalidRequestError(f"keys below `{STAGING_FOLDER}/` are the store's own: {key!r}")
    if key != key.strip() or not key.isprintable():
        raise InvalidRequestError(
            f"an object's key has blanks around it or unprintable characters: {key!r}"
        )
    if len(key.encode()) > _KEY_BYTES_MAX:
        raise InvalidRequestError(f"an object's key is over {_KEY_BYTES_MAX} bytes: {key[:80]!r}…")


def check_prefix(prefix: str) -> None:
    """Raises unless `prefix` is empty or names a folder.

    Raises:
        InvalidRequestError: It does neither.
    """
    if not prefix:
        return
    if not prefix.endswith("/"):
        raise InvalidRequestError(f"the prefix of a listing ends with `/`: {prefix!r}")
    check_key(prefix[:-1])


def check_range(start: int, size: int) -> None:
    """Raises unless both are zero or more.

    Raises:
        InvalidRequestError: One is not.
    """
    if start < 0 or size < 0:
        raise InvalidRequestError(f"a range begins and ends at zero or later: {start}, {size}")
