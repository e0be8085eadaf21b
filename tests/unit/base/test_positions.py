"""Positions in a topic: every form that is read, written and refused."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from ister.base.positions import (
    EPOCH,
    PUBLISH_TIME_MS_MAX,
    format_position,
    format_time,
    parse_position,
    parse_time,
    time_of,
    to_milliseconds,
)
from ister.errors import InvalidRequestError
from tests.support.clock import ManualClock

NOON = datetime(2026, 1, 31, 12, 30, 15, 250_000, tzinfo=UTC)
ELSEWHERE = NOON.astimezone(timezone(timedelta(hours=-9, minutes=-30)))


def refuses(call, *arguments, **options):
    with pytest.raises(InvalidRequestError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_every_form_is_read():
    for text, expected in {
        "earliest": "earliest",
        "latest": "latest",
        "0": 0,
        str((1 << 63) - 1): (1 << 63) - 1,
        "2026-01-31T12:30:15.25Z": NOON,
        "2026-01-31T13:30:15.25+01:00": NOON,
        "@1500": EPOCH + timedelta(milliseconds=1500),
        "t:1500": EPOCH + timedelta(milliseconds=1500),
        "t:-1500": EPOCH - timedelta(milliseconds=1500),
        "t:1970-01-01T01:00:00+01:00": EPOCH,
        "t:1970-01-01T00:00:00": EPOCH,
    }.items():
        assert parse_position(text) == expected, text
    assert parse_position("1970-01-01T00:00", utc=True) == EPOCH


def test_anything_else_is_refused():
    texts = ["", "now", "-1", "7@", "1.5", "5w", "9" * 20, "1" * 40, "٣", "１", "²", "7d"]
    texts += ["@", "@@7", "@-1", "@1.5", "@9" * 12, "@" + "9" * 5000, "t:", "t:x", "t:" + "9" * 17]
    texts += ["@" + "9" * 18, "2026-01-31T12:00:00"]
    for text in texts:
        assert refuses(parse_position, text), text
    assert refuses(parse_position, "foo") == (
        "invalid position 'foo': use earliest, latest, an offset or a time"
    )
    assert "no time zone" in refuses(parse_position, "2026-01-31T12:00:00")


def test_ages_count_back_from_a_clock():
    clock = ManualClock()
    now = time_of(clock.now_ns() // 1_000_000)
    for text, seconds in {"90s": 90, "15m": 900, "2h": 7200, "7d": 7 * 86400}.items():
        assert parse_position(text, ages_from=clock) == now - timedelta(seconds=seconds), text
    for text in ("9999999999d", "999999999d", "5w", "d"):
        assert "7d" in refuses(parse_position, text, ages_from=clock), text


def test_a_broker_reads_what_a_client_writes():
    for position in ("earliest", "latest", 0, 7, (1 << 63) - 1, NOON):
        assert parse_position(format_position(position)) == position, position
    assert format_position(ELSEWHERE) == format_position(NOON) == f"@{to_milliseconds(NOON)}"
    for position in ("", "now", "7", -1, True, 1.5, None, datetime(2026, 1, 31)):
        assert refuses(format_position, position), position


def test_times_need_a_zone_unless_utc_is_assumed():
    assert parse_time("2026-01-31T12:30:15.25Z") == NOON
    assert parse_time("1970-01-01", utc=True) == EPOCH
    assert "no time zone" in refuses(parse_time, "1970-01-01")
    assert "invalid time 'noon'" in refuses(parse_time, "noon", utc=True)


def test_times_are_shown_in_utc_with_milliseconds():
    assert format_time(NOON) == format_time(ELSEWHERE) == "2026-01-31T12:30:15.250Z"
    assert format_time(to_milliseconds(NOON)) == "2026-01-31T12:30:15.250Z"
    assert format_time(0) == "1970-01-01T00:00:00.000Z"
    assert format_time(PUBLISH_TIME_MS_MAX) == "9999-12-31T23:59:59.999Z"
    assert format_time(PUBLISH_TIME_MS_MAX + 1) == str(PUBLISH_TIME_MS_MAX + 1)
    assert format_time(1 << 62) == str(1 << 62)


def test_milliseconds_and_times_convert_into_each_other():
    for given, expected in (
        (0, 0),
        (PUBLISH_TIME_MS_MAX, PUBLISH_TIME_MS_MAX),
        (EPOCH, 0),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 0),
        (datetime(1970, 1, 1, 0, 0, 1, 1999, tzinfo=UTC), 1001),
        (datetime.max.replace(tzinfo=UTC), PUBLISH_TIME_MS_MAX),
    ):
        assert to_milliseconds(given) == expected, given
    before = datetime(1969, 12, 31, tzinfo=UTC)
    for given in (
        -1,
        PUBLISH_TIME_MS_MAX + 1,
        True,
        1.5,
        "now",
        None,
        datetime(2024, 1, 1),
        before,
    ):
        assert refuses(to_milliseconds, given), given
    assert time_of(1_500).timestamp() == 1.5
    for milliseconds in (10**18, -(10**18), 2**63 - 1):
        assert refuses(time_of, milliseconds), milliseconds
