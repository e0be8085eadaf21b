"""What callers pass, checked in one place."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from ister.errors import InvalidRequestError
from ister.topic.arguments import PUBLISH_TIME_MS_MAX, as_bytes, as_milliseconds, as_offset


@pytest.mark.parametrize("given", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_of_any_kind_are_bytes(given):
    found = as_bytes(given)
    assert (type(found), found) == (bytes, b"x")


@pytest.mark.parametrize("given", ["x", 7, None, [b"x"]])
def test_something_else_is_no_payload(given):
    with pytest.raises(InvalidRequestError, match=f"not {type(given).__name__}") as caught:
        as_bytes(given)
    assert (caught.value.hint is not None) is isinstance(given, str)


@pytest.mark.parametrize("given", [0, 1, 2**63])
def test_offset_is_a_whole_number(given):
    assert as_offset("start", given) == given


@pytest.mark.parametrize("given", [-1, True, 1.0, "1", None])
def test_something_else_is_no_offset_and_the_argument_is_named(given):
    with pytest.raises(InvalidRequestError, match="end"):
        as_offset("end", given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (PUBLISH_TIME_MS_MAX, PUBLISH_TIME_MS_MAX),
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 0),
        (datetime(1970, 1, 1, 0, 0, 1, 1999, tzinfo=UTC), 1001),
        (datetime.max.replace(tzinfo=UTC), PUBLISH_TIME_MS_MAX),
    ],
)
def test_points_in_time_are_milliseconds(given, expected):
    assert as_milliseconds(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        -1,
        PUBLISH_TIME_MS_MAX + 1,
        True,
        1.5,
        "now",
        None,
        datetime(2024, 1, 1),
        datetime(1969, 12, 31, tzinfo=UTC),
    ],
    ids=str,
)
def test_something_else_is_no_point_in_time(given):
    with pytest.raises(InvalidRequestError):
        as_milliseconds(given)
