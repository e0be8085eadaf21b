"""Errors as the client gets them: a gRPC status whose text is the error in JSON.

The status is for programs that do not parse the text; pyarrow raises a Flight error by it. An
exception that is not one of `ister.errors` is a bug of the broker: it is logged here, and the
client gets no details.
"""

from __future__ import annotations

import logging
from typing import Final

import grpc

from ister.errors import InvariantError, IsterError
from ister.wire.errors import encode_error

_log = logging.getLogger("ister.broker.flight")

_STATUSES: Final = {
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "UNIMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}


def explain(error: Exception, where: str = "") -> tuple[grpc.StatusCode, str]:
    """Returns the status and text that a client gets for an error of the call `where`."""
    told = as_ister_error(error, where)
    # pyarrow's error for servers that refuse something.
    return _STATUSES.get(told.code, grpc.StatusCode.UNKNOWN), encode_error(told)


def as_ister_error(error: Exception, where: str = "") -> IsterError:
    """The error as one of ours."""
    if isinstance(error, IsterError):
        return error
    _log.error("a call failed", exc_info=error, extra={"call": where})
    return InvariantError(f"the server failed: {type(error).__name__}", hint="see the server's log")
