"""Errors on the wire: as JSON in a text, and as gRPC statuses."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("grpc")

import grpc

from ister import errors
from ister.base.retry import can_retry
from ister.broker.rpc.handlers import status_of
from ister.errors import (
    CapacityError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    DiskError,
    FencedError,
    InvariantError,
    IsterError,
    NoAnswerError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitsForDiskError,
    WaitTimeoutError,
)
from ister.wire.errors import (
    ANSWERED,
    carries_error,
    decode_error,
    encode_error,
    error_of,
    received_error,
)

TOPIC = "/default/orders"
EXAMPLES = settings(max_examples=150, deadline=None, print_blob=True)


# -- JSON -------------------------------------------------------------------------------------


def an_error(kind):
    """An error of any class."""
    if kind is OffsetOutOfRangeError:
        return kind("no such offset", earliest=5, next=9, topic=TOPIC, offset=17)
    if kind is DataGapError:
        return kind("a hole", start=5, end=9, topic=TOPIC)
    if kind is DiskError:
        return kind("the disk failed", errno=28, path="/data/wal.log")
    if kind is WaitsForDiskError:
        return kind("it waits", node="n1", topic=TOPIC, offset=7, hint="start it")
    if kind is NoAnswerError:
        return kind("b:6650", "Connection refused", topic=TOPIC, within=10, hint="start it")
    return kind("it failed", topic=TOPIC, offset=7, path="a/b", position=3, hint="wait")


KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, IsterError)
]


def test_error_of_every_class_arrives_with_all_it_carries():
    surroundings = [
        ("", ""),
        ("Flight returned internal error, with message: ", ". Detail: Failed"),
        ("", '. Detail: Failed. gRPC client debug context: UNKNOWN:{"code":"X"}. Client context'),
    ]
    for kind in KINDS:
        for before, after in surroundings:
            sent = an_error(kind)
            text = before + encode_error(sent) + after
            assert carries_error(text)
            arrived = decode_error(text)
            assert type(arrived) is kind
            assert vars(arrived) == vars(sent), kind
            assert str(arrived) == str(sent)


@EXAMPLES
@given(message=st.text(max_size=30), hint=st.none() | st.text(max_size=30))
def test_text_of_an_error_arrives_as_it_was(message, hint):
    sent = CorruptDataError(message, hint=hint, offset=0)
    assert vars(decode_error(encode_error(sent))) == vars(sent)


def test_class_that_is_not_of_the_tree_arrives_as_the_nearest_one_that_is():
    class LocalError(CorruptDataError):
        pass

    assert type(decode_error(encode_error(LocalError("x", offset=3)))) is CorruptDataError


def test_mistake_of_the_server_is_not_blamed_on_the_call():
    arrived = decode_error(encode_error(ZeroDivisionError("division by zero")))
    assert type(arrived) is InvariantError
    assert "ZeroDivisionError: division by zero" in arrived.message


def test_long_error_is_cut_to_what_a_header_takes():
    for error in (
        CorruptDataError("m" * 10_000, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError("ä" * 10_000, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError('"\0' * 10_000, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError("\U0001f600" * 300, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError("short", topic=TOPIC, offset=3, hint="h" * 10_000),
        CorruptDataError("m" * 5000, topic="t" * 5000, offset=3, hint="h" * 5000, path="p" * 5000),
    ):
        check_cut(error)


def check_cut(error):
    text = encode_error(error)
    assert len(text.encode()) <= 2000
    arrived = decode_error(text)
    assert type(arrived) is CorruptDataError
    assert arrived.offset == 3
    for name in ("message", "topic", "hint", "path"):
        sent, got = getattr(error, name), getattr(arrived, name)
        assert got == sent or sent.startswith(got.removesuffix("..."))
    if error.hint == "read on":
        assert (arrived.topic, arrived.hint) == (TOPIC, "read on")
        assert arrived.message.startswith(error.message[:10])


def test_text_without_a_known_error_means_that_the_server_does_not_answer():
    for text in (
        "",
        "failed to connect to all addresses",
        "Socket closed\nTraceback (most recent call last):",
        '{"code":',
        '{"code":"NotFoundError","message":"cut sho',
        '{"code":' + "[" * 100_000,
        '{"code":"NewerError","message":"x","offset":3}',
        '{"code":"check","message":"x"}',
        '{"code":"__doc__","message":"x"}',
        '{"code":["NotFoundError"],"message":"x"}',
        '{"code":{},"message":{}}',
        '{"code":"DataGapError","message":"x","start":1}',
        '{"code":"OffsetOutOfRangeError","message":"x","earliest":"1","next":true}',
    ):
        arrived = decode_error(text)
        assert type(arrived) is UnavailableError, text[:80]
        assert arrived.message
        assert "\n" not in arrived.message


def test_fields_of_a_known_error_that_make_no_sense_are_left_out():
    arrived = decode_error(
        '{"code":"NotFoundError","message":7,"topic":[],"offset":"x","hint":{},"position":true}'
    )
    assert type(arrived) is errors.NotFoundError
    assert (arrived.topic, arrived.offset, arrived.hint, arrived.position) == (None,) * 4


# -- statuses ---------------------------------------------------------------------------------


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


def test_what_a_broker_raises_comes_out_as_it_was():
    for error in (
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
    ):
        found = error_of(Failed(status_of(error), str(error), ANSWERED), "b:1")
        assert type(found) is type(error)
        assert found.retriable == error.retriable


def test_flights_errors_are_in_their_text():
    text = f"Flight error: {encode_error(FencedError('moved', topic='/default/t'))}. Detail: x"
    assert type(error_of(Failed(grpc.StatusCode.INTERNAL, text), "b:1")) is FencedError


def test_a_broker_that_failed_is_told_from_a_connection_that_did():
    internal = grpc.StatusCode.INTERNAL
    assert type(error_of(Failed(internal, "the broker failed [12ab]"), "b:1")) is InvariantError
    assert type(error_of(Failed(internal, "RST_STREAM"), "b:1")) is NoAnswerError
    late = grpc.StatusCode.DEADLINE_EXCEEDED
    assert type(error_of(Failed(late, "Deadline Exceeded"), "b:1")) is NoAnswerError
    assert type(error_of(Failed(late, "not yet", ANSWERED), "b:1")) is WaitTimeoutError


def test_what_is_tried_again():
    assert can_retry(UnavailableError("x"))
    assert can_retry(CapacityError("x"))
    assert can_retry(FencedError("x"))
    closed_there = received_error(encode_error(errors.ClosedError("the topic is closed")))
    assert can_retry(closed_there)
    assert not can_retry(errors.ClosedError("the client is closed"))
    assert not can_retry(ConflictError("x"))
    assert not can_retry(errors.DiskError("x", errno=5))
    assert not can_retry(NotFoundError("x"))


def test_what_a_broker_says_is_told_from_a_connection_that_fails():
    status = grpc.StatusCode.UNAVAILABLE
    said = error_of(Failed(status, "the topic was moved", ANSWERED), "b:1", "/default/t")
    assert (type(said), said.message) == (UnavailableError, "the topic was moved")
    assert can_retry(said)
    failed = error_of(Failed(status, "Socket closed"), "b:1", "/default/t")
    assert failed.message == "b:1 does not answer: Socket closed"
