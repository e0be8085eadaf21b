"""Each status of gRPC becomes the error that the broker had raised."""

import pytest

pytest.importorskip("grpc")

import grpc

from ister import errors
from ister.broker.rpc import ANSWERED, status_of
from ister.client.contract import encode_error
from ister.client.statuses import error_of, is_worth_a_retry, told
from ister.errors import (
    CapacityError,
    ConflictError,
    FencedError,
    InvariantError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitTimeoutError,
)


class Failed:
    def __init__(self, code, details, trailing=None):
        self._code = code
        self._details = details
        self._trailing = trailing

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailing


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_status_is_an_error_of_ours(status):
    error = error_of(Failed(status, "why"), "b:1", "/default/t")
    assert isinstance(error, errors.IsterError)
    assert "why" in str(error) or isinstance(error, WaitTimeoutError)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("no"),
        NotFoundError("no"),
        OffsetOutOfRangeError("no", earliest=1, next=2, topic="/default/t", offset=0),
        errors.PermissionDeniedError("no"),
        errors.UnauthenticatedError("no"),
        ConflictError("no"),
        errors.AlreadyExistsError("no"),
        UnavailableError("no"),
        CapacityError("no"),
        errors.CorruptDataError("no"),
        errors.UnsupportedOperationError("no"),
    ],
)
def test_what_a_broker_raises_comes_out_as_it_was(error):
    found = error_of(Failed(status_of(error), str(error)), "b:1")
    assert type(found) is type(error)
    assert found.retriable == error.retriable


def test_flights_errors_are_in_their_text():
    text = f"Flight error: {encode_error(FencedError('moved', topic='/default/t'))}. Detail: x"
    assert type(error_of(Failed(grpc.StatusCode.INTERNAL, text), "b:1")) is FencedError


def test_a_broker_that_failed_is_told_from_a_connection_that_did():
    internal = grpc.StatusCode.INTERNAL
    assert type(error_of(Failed(internal, "the broker failed [12ab]"), "b:1")) is InvariantError
    assert type(error_of(Failed(internal, "RST_STREAM"), "b:1")) is UnavailableError


def test_what_is_tried_again():
    assert is_worth_a_retry(UnavailableError("x"))
    assert is_worth_a_retry(CapacityError("x"))
    assert is_worth_a_retry(FencedError("x"))
    closed_there = told(encode_error(errors.ClosedError("the topic is closed")))
    assert is_worth_a_retry(closed_there)
    assert not is_worth_a_retry(errors.ClosedError("the client is closed"))
    assert not is_worth_a_retry(ConflictError("x"))
    assert not is_worth_a_retry(errors.DiskError("x", errno=5))
    assert not is_worth_a_retry(NotFoundError("x"))


def test_what_a_broker_says_is_told_from_a_connection_that_fails():
    status = grpc.StatusCode.UNAVAILABLE
    said = error_of(Failed(status, "the topic was moved", ANSWERED), "b:1", "/default/t")
    assert (type(said), said.message) == (UnavailableError, "the topic was moved")
    assert is_worth_a_retry(said)
    failed = error_of(Failed(status, "Socket closed"), "b:1", "/default/t")
    assert failed.message == "b:1 does not answer: Socket closed"
