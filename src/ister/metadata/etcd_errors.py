"""What a failed call to etcd proves, and our error for it."""

from __future__ import annotations

from enum import Enum
from typing import Final

from ister.errors import (
    CapacityError,
    ConfigError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
)

_NOT_PROPOSED: Final = (
    "failed to connect to all addresses",
    "etcdserver: no leader",
    "etcdserver: rpc not supported for learner",
)
_TOKEN_TOO_OLD: Final = ("invalid auth token", "revision of auth store is old")
_CREDENTIALS: Final = ("authentication failed", "user name is empty", "user name not found")


class NotConnectedError(Exception):
    """Nothing was sent."""


class StreamEndedError(Exception):
    """A stream ended before its answer."""


class CompactedError(Exception):
    """The revision of the first page was compacted; the range is read again."""


class FailureOutcome(Enum):
    """What a failure says about the change."""

    NOT_PROPOSED = "another endpoint may do it"
    TOKEN = "not done: log in again"  # noqa: S105 - no secret
    REFUSED = "an answer"
    UNKNOWN = "it may have been done"


_REFUSING: Final = frozenset(
    {
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED",
        "DATA_LOSS",
    }
)


def judge(error: Exception) -> FailureOutcome:
    """What the failure of a call proves about it."""
    if isinstance(error, NotConnectedError):
        return FailureOutcome.NOT_PROPOSED
    text = describe(error)
    if any(part in text for part in _TOKEN_TOO_OLD):
        return FailureOutcome.TOKEN
    if any(part in text for part in _NOT_PROPOSED):
        return FailureOutcome.NOT_PROPOSED
    return FailureOutcome.REFUSED if _code(error) in _REFUSING else FailureOutcome.UNKNOWN


def map_refusal(error: Exception, action: str, verdict: FailureOutcome) -> Exception | None:
    """Our error for an answer of etcd's that says no; None for what is not an answer."""
    if verdict not in (FailureOutcome.REFUSED, FailureOutcome.TOKEN):
        return None
    code, text = _code(error), describe(error)
    message = f"{action}: {text}"
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or verdict is FailureOutcome.TOKEN:
        return PermissionDeniedError(message)
    if any(part in text for part in _CREDENTIALS):
        return PermissionDeniedError(message)
    if "database space exceeded" in text:
        return CapacityError(
            message, hint="compact and defragment etcd, raise its quota, disarm its alarm"
        )
    if code == "RESOURCE_EXHAUSTED" or "too large" in text:
        return CapacityError(message)
    if code == "NOT_FOUND":
        return NotFoundError(message)
    if "compacted" in text:
        return CompactedError(message)
    if code == "DATA_LOSS":
        return CorruptDataError(message)
    if code == "UNIMPLEMENTED":
        return ConfigError(message, hint="the endpoint must be an etcd of version 3")
    return InvalidRequestError(message)


def _code(error: Exception) -> str:
    code = getattr(error, "code", None)
    return str(code().name) if callable(code) else ""


def describe(error: Exception) -> str:
    """The status and the text of a failure."""
    details = getattr(error, "details", None)
    said = details() if callable(details) else str(error)
    return f"{_code(error)} {said}".strip() or type(error).__name__
