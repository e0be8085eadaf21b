"""From gRPC's statuses back to errors of `ister.errors`, in one place.

The other direction is `ister.broker.rpc`. Flight's errors carry one of ours as JSON in their text
(`ister.client.contract`).
"""

from __future__ import annotations

from typing import Any, Final

from ister.client.contract import carries_error, decode_error
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
    WaitTimeoutError,
)

__all__ = ["error_of", "is_too_large", "is_worth_a_retry", "told"]

_KINDS: Final[dict[str, type[IsterError]]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": NotFoundError,
    "OUT_OF_RANGE": OffsetOutOfRangeError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "ABORTED": ConflictError,
    "FAILED_PRECONDITION": ConflictError,
    "ALREADY_EXISTS": AlreadyExistsError,
    "RESOURCE_EXHAUSTED": CapacityError,
    "DATA_LOSS": CorruptDataError,
    "UNIMPLEMENTED": UnsupportedOperationError,
    "DEADLINE_EXCEEDED": WaitTimeoutError,
}
# How the broker begins when it has failed itself; any other INTERNAL is the connection's.
_BROKER_FAILED: Final = "the broker failed"
# What a broker sends with its refusals (`ister.broker.rpc`).
_ANSWERED: Final = "ister-answered"
# How gRPC itself refuses a message, before anybody has looked at it.
_TOO_LARGE: Final = "message larger than max"


def error_of(error: Any, address: str, topic: str | None = None) -> IsterError:  # noqa: ANN401
    """The error that a call to a broker has ended with.

    Args:
        error: gRPC's, with `code()` and `details()`.
        address: The broker's.
        topic: What the call was about.
    """
    text = str(error.details() or "")
    if carries_error(text):
        return told(text)
    name: str = error.code().name
    text = text.partition(" gRPC client debug context")[0].partition("\n")[0]
    if name == "INTERNAL" and text.startswith(_BROKER_FAILED):
        return InvariantError(f"{address}: {text}", topic=topic, hint="see the broker's log")
    if name == "RESOURCE_EXHAUSTED" and is_too_large(text):
        return MessageTooLargeError(f"{address}: {text}", topic=topic)
    kind = _KINDS.get(name)
    if name == "UNAVAILABLE" and _is_answer(error):
        is_named = topic is not None and topic in text
        return UnavailableError(text or name, topic=None if is_named else topic)
    if kind is None:
        return UnavailableError(f"{address} does not answer: {text or name}", topic=topic)
    if kind is OffsetOutOfRangeError:
        # The status does not say which offsets there are; the text does.
        out = kind.__new__(kind)
        IsterError.__init__(out, text, topic=topic)
        vars(out).update(earliest=-1, next=-1)
        return out
    if kind is WaitTimeoutError:
        text = f"{address} has not answered in time"
    is_named = topic is not None and topic in text
    return kind(text or f"{address} refuses the call", topic=None if is_named else topic)


def is_too_large(text: str) -> bool:
    """Whether gRPC has refused a message for its size: sending it again does not help."""
    return _TOO_LARGE in text


def _is_answer(error: Any) -> bool:  # noqa: ANN401
    """Whether a broker has said so itself, and not the connection to it."""
    return any(key == _ANSWERED for key, _ in error.trailing_metadata() or ())


def told(text: str) -> IsterError:
    """The error that a broker has sent as text."""
    error = decode_error(text)
    if isinstance(error, ClosedError):
        # Something is closed there; that is no reason to stop here.
        return UnavailableError(error.message, topic=error.topic)
    return error


def is_worth_a_retry(error: IsterError) -> bool:
    """Whether the same call may succeed later, perhaps at another broker."""
    # Fenced there: another broker has the topic, or is about to.
    return error.retriable or isinstance(error, FencedError)
