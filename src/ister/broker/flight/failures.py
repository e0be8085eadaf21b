"""Errors on their way to a client: a Flight error whose text is the error in JSON.

The kind of the Flight error is for programs that do not know the contract. What is no error of
`ister.errors` is a mistake of ours: it is logged here, and the client is told no more than that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyarrow import flight

from ister.client.contract import encode_error
from ister.errors import InvariantError, IsterError

__all__ = ["as_flight_error", "as_ister_error", "sent"]

_log = logging.getLogger("ister.broker.flight")

_KINDS: Final = {
    "UNAUTHENTICATED": flight.FlightUnauthenticatedError,
    "PERMISSION_DENIED": flight.FlightUnauthorizedError,
    "UNAVAILABLE": flight.FlightUnavailableError,
    "INTERNAL": flight.FlightInternalError,
}


@contextmanager
def sent() -> Iterator[None]:
    """Has errors sent to the client."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        raise as_flight_error(as_ister_error(error)) from error


def as_ister_error(error: Exception) -> IsterError:
    """The error as one of ours."""
    if isinstance(error, IsterError):
        return error
    _log.error("a call failed", exc_info=error)
    return InvariantError(f"the server failed: {type(error).__name__}", hint="see the server's log")


def as_flight_error(error: IsterError) -> Exception:
    """What to raise for the client to get it."""
    kind = _KINDS.get(error.code, flight.FlightServerError)
    made: Exception = kind(encode_error(error))
    return made
