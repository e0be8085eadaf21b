"""Places in a topic, in the words of the protocol."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from ister.broker.services.delivery import _parse_start
from ister.client.starts import format_start, milliseconds_of
from ister.errors import InvalidRequestError

MOMENT = datetime(2026, 1, 31, 12, 30, 15, 250_000, tzinfo=UTC)


@pytest.mark.parametrize("start", ["earliest", "latest", 0, 7, (1 << 63) - 1, MOMENT])
def test_a_broker_reads_what_a_client_writes(start):
    assert _parse_start(format_start(start)) == start


def test_a_time_is_the_same_in_every_zone():
    elsewhere = MOMENT.astimezone(timezone(timedelta(hours=-9, minutes=-30)))
    assert format_start(elsewhere) == format_start(MOMENT) == f"@{milliseconds_of(MOMENT)}"


@pytest.mark.parametrize(
    "start",
    ["", "now", "7", -1, True, 1.5, None, datetime(2026, 1, 31), datetime(1969, 1, 1, tzinfo=UTC)],
)
def test_a_client_refuses_what_is_no_place(start):
    with pytest.raises(InvalidRequestError):
        format_start(start)


@pytest.mark.parametrize(
    "text",
    ["now", "-1", "@", "@@7", "@-1", "@1.5", "7@", "٣", "@9" * 12, "9" * 20, "@" + "9" * 5000],
)
def test_a_broker_refuses_what_is_no_place(text):
    with pytest.raises(InvalidRequestError):
        _parse_start(text)


def test_a_time_that_no_calendar_has_is_refused():
    with pytest.raises(InvalidRequestError, match="is no time"):
        _parse_start("@" + "9" * 18)
