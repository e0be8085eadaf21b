"""What callers pass, checked in one place."""

import pytest

from ister.errors import InvalidRequestError
from ister.topic.arguments import as_bytes, as_offset
from support.cases import each


@each("given", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_of_any_kind_are_bytes(given):
    found = as_bytes(given)
    assert (type(found), found) == (bytes, b"x")


@each("given", ["x", 7, None, [b"x"]])
def test_something_else_is_no_payload(given):
    with pytest.raises(InvalidRequestError, match=f"not {type(given).__name__}") as caught:
        as_bytes(given)
    assert (caught.value.hint is not None) is isinstance(given, str)


@each("given", [0, 1, 2**63])
def test_offset_is_a_whole_number(given):
    assert as_offset("start", given) == given


@each("given", [-1, True, 1.0, "1", None])
def test_something_else_is_no_offset_and_the_argument_is_named(given):
    with pytest.raises(InvalidRequestError, match="end"):
        as_offset("end", given)
