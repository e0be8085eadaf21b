"""Errors of `ister.errors` on the wire: as gRPC statuses, and as JSON in a status's text.

    status ─► error      `error_of`: what a call to a broker ended with
    error ─► JSON text   `encode_error`: Flight's statuses are few, so their text has the error
    JSON text ─► error   `decode_error`, `received_error`

`ister.broker.rpc.handlers` chooses the statuses of other calls.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from ister import errors
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    DiskError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    MessageTooLargeError,
    NoAnswerError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
    WaitsForDiskError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    import grpc

# -- JSON -----------------------------------------------------------------------------------

# gRPC carries the text of an error in headers, more than once, and a peer may refuse headers of
# more than 8 KiB in all.
_ERROR_BYTES_MAX: Final = 2000
_MARK: Final = '{"code":'
_CUT: Final = "..."

_CLASSES: Final[dict[str, type[IsterError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, IsterError)
}
_FIELDS: Final = {"topic": str, "offset": int, "path": str, "position": int, "hint": str}
_MORE_FIELDS: Final[dict[type[IsterError], dict[str, type]]] = {
    OffsetOutOfRangeError: {"earliest": int, "next": int},
    DataGapError: {"start": int, "end": int},
    DiskError: {"errno": int},
    WaitsForDiskError: {"node": str, "known_end": int},
    NoAnswerError: {"address": str, "reason": str},
}


def encode_error(error: BaseException) -> str:
    """Encodes an error as JSON, for the text of a Flight error.

    An exception that is not one of `ister.errors` is a bug of the server and becomes an
    InvariantError. Long texts are cut, as gRPC limits them.
    """
    if not isinstance(error, IsterError):
        error = InvariantError(f"the server failed: {type(error).__name__}: {error}")
    kind = _kind_of(error)
    content: dict[str, object] = {"code": kind.__name__, "message": error.message}
    for name in (*_FIELDS, *_MORE_FIELDS.get(kind, ())):
        value = getattr(error, name)
        if value is not None:
            content[name] = value
    for name in ("message", "hint", "path", "topic"):
        excess = len(_dump_error(content)) - _ERROR_BYTES_MAX
        if excess > 0 and name in content:
            content[name] = _shortened(str(content[name]), excess)
    return _dump_error(content)


def _shortened(text: str, excess: int) -> str:
    """Cuts a text so that its JSON gets shorter by `excess` characters, or empty."""
    wanted = len(_dump_error(text)) - excess - len(_CUT)
    # A character takes one to twelve of them.
    lengths = range(min(len(text), _ERROR_BYTES_MAX) + 1)
    fitting = bisect_right(lengths, wanted, key=lambda length: len(_dump_error(text[:length])))
    return text[: max(0, fitting - 1)] + _CUT


def _dump_error(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def carries_error(text: str) -> bool:
    """Whether a text contains an error that `encode_error` has written."""
    return _MARK in text


def decode_error(text: str) -> IsterError:
    """Decodes the error in a text.

    Returns an UnavailableError with the text if it contains no error that this Ister knows.
    """
    try:
        content, _ = json.JSONDecoder().raw_decode(text, text.index(_MARK))
    except (ValueError, RecursionError):
        return UnavailableError(f"the server failed: {text.partition(chr(10))[0]}")
    message, code = content.get("message"), content.get("code")
    if not isinstance(message, str):
        message = "the server failed"
    known = {
        name: content[name] for name, kind in _FIELDS.items() if type(content.get(name)) is kind
    }
    found = _CLASSES.get(code) if isinstance(code, str) else None
    kinds = _MORE_FIELDS.get(found, {}) if found else {}
    more = {
        name: content[name] if type(content.get(name)) is kind else None
        for name, kind in kinds.items()
    }
    is_whole = found is DiskError or None not in more.values()
    if found is None or not is_whole:
        return UnavailableError(f"{message} [{code}]", **known)
    # Not by the constructor: some classes compose their hint, and this one has arrived as it is.
    error = found.__new__(found)
    IsterError.__init__(error, message, **known)
    for name, value in more.items():
        setattr(error, name, value)
    return error


def _kind_of(error: IsterError) -> type[IsterError]:
    """Returns the nearest class of the error that is in `ister.errors`."""
    return next(kind for kind in type(error).__mro__ if kind in _CLASSES.values())


def http_error(error: IsterError) -> dict[str, str | int | None]:
    """Returns an error as the HTTP API has it."""
    return {"code": error.code, "error": error.message, "hint": error.hint}


# -- statuses -------------------------------------------------------------------------------

_STATUSES: Final[dict[str, type[IsterError]]] = {
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
BROKER_FAILED: Final = "the broker failed"
"""How the text of INTERNAL starts if a broker has a bug; otherwise the connection has failed."""
ANSWERED: Final = (("ister-answered", "1"),)
"""The trailing metadata of each status that a broker chose: UNAVAILABLE may also mean that the
connection failed."""
LOST_STATUS: Final = "Internal error from Core"
"""What grpcio says if a write fails before the status arrives that the broker ended a call with."""
# How gRPC says why it cannot connect; what is before it says that it cannot.
_LAST_ERROR: Final = "last error: "
# How gRPC refuses a message for its size.
_TOO_LARGE: Final = "message larger than max"


def error_of(error: grpc.aio.AioRpcError, address: str, topic: str | None = None) -> IsterError:
    """Returns the error that a call to a broker ended with."""
    text = str(error.details() or "")
    if carries_error(text):
        return received_error(text)
    name: str = error.code().name
    text = text.partition(" gRPC client debug context")[0].partition("\n")[0]
    if name == "INTERNAL" and text.startswith(BROKER_FAILED):
        return InvariantError(f"{address}: {text}", topic=topic, hint="see the broker's log")
    if name == "RESOURCE_EXHAUSTED" and is_too_large(text):
        return MessageTooLargeError(f"{address}: {text}", topic=topic)
    kind = _STATUSES.get(name)
    if name == "UNAVAILABLE" and is_answer(error):
        return UnavailableError(text or name, topic=topic)
    if kind is WaitTimeoutError and not is_answer(error):
        return NoAnswerError(address, "time-out", topic=topic)
    if kind is None:
        return NoAnswerError(address, text.rpartition(_LAST_ERROR)[2] or name, topic=topic)
    if kind is OffsetOutOfRangeError:
        # The status does not carry the range; the text has it.
        out = kind.__new__(kind)
        IsterError.__init__(out, text, topic=topic)
        vars(out).update(earliest=-1, next=-1)
        return out
    return kind(text or f"{address} refused the call", topic=topic)


def is_too_large(text: str) -> bool:
    """Whether gRPC refused a message for its size: sending it again does not help."""
    return _TOO_LARGE in text


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether a broker chose the status, and not the connection to it."""
    return any(key == ANSWERED[0][0] for key, _ in error.trailing_metadata() or ())


def received_error(text: str) -> IsterError:
    """Decodes the error that a broker has sent, for a client that retries."""
    error = decode_error(text)
    if isinstance(error, ClosedError):
        # A topic that is closed on the broker; this client is not closed.
        return UnavailableError(error.message, topic=error.topic)
    return error
