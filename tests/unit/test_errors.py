"""The error tree: codes, what may be tried again, and what an error says."""

import inspect
import pickle
import re

import pytest

from ister import errors
from ister.errors import (
    ConflictError,
    DataGapError,
    DiskError,
    FencedError,
    InvariantError,
    IsterError,
    OffsetOutOfRangeError,
    check,
)
from tests.support.cases import each

# class: (parent, code, retriable, built-in)
_TREE = {
    "InvalidRequestError": ("IsterError", "INVALID_ARGUMENT", False, ValueError),
    "ConfigError": ("InvalidRequestError", "INVALID_ARGUMENT", False, ValueError),
    "TopicNameError": ("InvalidRequestError", "INVALID_ARGUMENT", False, ValueError),
    "MessageTooLargeError": ("InvalidRequestError", "INVALID_ARGUMENT", False, ValueError),
    "NotFoundError": ("IsterError", "NOT_FOUND", False, LookupError),
    "OffsetOutOfRangeError": ("IsterError", "OUT_OF_RANGE", False, LookupError),
    "PermissionDeniedError": ("IsterError", "PERMISSION_DENIED", False, Exception),
    "UnauthenticatedError": ("IsterError", "UNAUTHENTICATED", False, Exception),
    "ConflictError": ("IsterError", "ABORTED", False, Exception),
    "AlreadyExistsError": ("ConflictError", "ALREADY_EXISTS", False, Exception),
    "FencedError": ("IsterError", "ABORTED", False, Exception),
    "DirectoryLockedError": ("ConflictError", "ABORTED", False, Exception),
    "StoresDifferError": ("ConflictError", "ABORTED", False, Exception),
    "WaitsForDiskError": ("ConflictError", "ABORTED", False, Exception),
    "UnavailableError": ("IsterError", "UNAVAILABLE", True, Exception),
    "NoAnswerError": ("UnavailableError", "UNAVAILABLE", True, Exception),
    "CommitUnknownError": ("UnavailableError", "UNAVAILABLE", True, Exception),
    "DiskError": ("UnavailableError", "UNAVAILABLE", False, Exception),
    "WaitTimeoutError": ("UnavailableError", "UNAVAILABLE", True, TimeoutError),
    "CapacityError": ("IsterError", "RESOURCE_EXHAUSTED", True, Exception),
    "CorruptDataError": ("IsterError", "DATA_LOSS", False, Exception),
    "DataGapError": ("CorruptDataError", "DATA_LOSS", False, Exception),
    "UnsupportedOperationError": ("IsterError", "UNIMPLEMENTED", False, Exception),
    "UnsupportedVersionError": ("IsterError", "UNIMPLEMENTED", False, Exception),
    "ClosedError": ("IsterError", "UNAVAILABLE", False, Exception),
    "InvariantError": ("IsterError", "INTERNAL", False, Exception),
}


@each("name", _TREE)
def test_error_has_its_place_code_and_kind(name):
    parent, code, retriable, built_in = _TREE[name]
    kind = getattr(errors, name)
    assert kind.__bases__[0] is getattr(errors, parent)
    assert (kind.code, kind.retriable) == (code, retriable)
    assert issubclass(kind, built_in)
    assert inspect.getdoc(kind)


def test_tree_has_nothing_else():
    kinds = {n for n, o in vars(errors).items() if inspect.isclass(o) and issubclass(o, IsterError)}
    assert kinds == {*_TREE, "IsterError"}
    assert set(errors.__all__) == {*kinds, "check"}
    drawn = re.findall(r"(\w+Error)\b", errors.__doc__)
    assert {name for name in drawn if name != "OSError"} == kinds


@each(
    ("context", "text"),
    [
        ({}, "it broke"),
        ({"topic": "/a/b"}, "it broke (topic=/a/b)"),
        ({"offset": 0}, "it broke (offset=0)"),
        (
            {"topic": "/a/b", "offset": 5, "path": "/x/wal.log", "position": 0},
            "it broke (topic=/a/b, offset=5, path=/x/wal.log, position=0)",
        ),
        ({"hint": "look there"}, "it broke; look there"),
        ({"topic": "/a/b", "hint": "look there"}, "it broke (topic=/a/b); look there"),
    ],
)
def test_error_says_where_and_what_to_do(context, text):
    error = IsterError("it broke", **context)
    assert str(error) == text
    assert error.message == "it broke"
    for name, value in context.items():
        assert getattr(error, name) == value


@each("message, is_named", [("/a/b is full", True), ("/a/b-2 is full", False), ("/a/b/c.", False)])
def test_topic_is_added_unless_the_sentence_names_it(message, is_named):
    assert ("topic=/a/b" not in str(IsterError(message, topic="/a/b"))) is is_named


def test_offset_error_carries_the_range():
    error = OffsetOutOfRangeError("gone", earliest=3, next=9, topic="/a/b", offset=1)
    assert (error.earliest, error.next, error.offset) == (3, 9, 1)
    assert "3 up to, not including, 9" in str(error)


def test_gap_error_carries_the_range():
    error = DataGapError("a hole", start=3, end=9, topic="/a/b")
    assert (error.start, error.end, error.offset, error.topic) == (3, 9, 3, "/a/b")
    assert "3 up to, not including, 9" in str(error)


_FULL = [
    IsterError("it broke", topic="/a/b", offset=5, path="/x", position=7, hint="look there"),
    OffsetOutOfRangeError("gone", earliest=3, next=9, topic="/a/b", offset=1),
    DataGapError("a hole", start=3, end=9, topic="/a/b"),
    DiskError("write failed", errno=5, path="/x"),
]


@each("error", _FULL)
@each("way", ["again", "pickle"])
def test_error_travels_with_all_it_carries(error, way):
    twin = error.again() if way == "again" else pickle.loads(pickle.dumps(error))
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), vars(twin)) == (str(error), vars(error))


def test_disk_error_carries_the_number():
    error = DiskError("write failed", errno=5, path="/x")
    assert (error.errno, str(error)) == (5, "write failed (path=/x)")


def test_check_raises_what_an_assertion_would():
    check(True, "fine")
    with pytest.raises(InvariantError, match="not fine"):
        check(False, "not fine")


def test_fenced_is_not_a_conflict():
    """Goal: a handler that reads again and decides anew never gets "stop for good"."""
    assert not issubclass(FencedError, ConflictError)
    assert not FencedError.retriable
