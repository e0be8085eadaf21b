"""Which local files may go: each rule alone and together."""

from itertools import takewhile

from hypothesis import assume, given
from hypothesis import strategies as st

from ister.base.limits import MIB
from ister.config import WalRetentionConfig
from ister.topic.retention import RetentionFile, plan_trim
from tests.support.cases import each

NOW = 1_700_000_000_000
MINUTE = 60_000


def files(*ages_minutes, size_mb=1):
    """Files of ten messages each that were last written so long ago; None if nobody knows."""
    return [
        RetentionFile(
            first_offset=number * 10,
            size_bytes=size_mb * MIB,
            modified_ms=None if age is None else NOW - age * MINUTE,
        )
        for number, age in enumerate(ages_minutes)
    ]


def planned(found, *, safe=1 << 60, time=None, size=None, **more):
    limits = WalRetentionConfig(time_minutes=time, size_mb=size)
    return plan_trim(found, limits, safe_before=safe, now_ms=NOW, **more)


def floored(found, *, minutes=None, size=None, safe=1 << 60, **more):
    """The plan by floors; the limits, which would remove everything, do not apply."""
    floors = WalRetentionConfig(time_minutes=0, size_mb=0, min_minutes=minutes, min_bytes=size)
    return plan_trim(found, floors, safe_before=safe, now_ms=NOW, **more)


def test_everything_stays_without_limits():
    assert planned(files(10**6, 10**6, 10**6)) is None


@each(("minutes", "expected"), [(0, 30), (9, 30), (10, 20), (19, 20), (20, 10), (30, None)])
def test_files_older_than_the_limit_go(minutes, expected):
    assert planned(files(30, 20, 10, 0), time=minutes) == expected


def test_active_file_stays_however_old_and_large():
    assert planned(files(10**6), time=0, size=0) is None
    assert planned(files(10**6, 10**6, size_mb=100), time=0, size=0) == 10


def test_nothing_goes_behind_one_that_stays():
    assert planned(files(5, 60, 60, 60), time=30) is None
    assert planned(files(60, 5, 60, 60), time=30) == 10


@each(("size", "expected"), [(0, 30), (1, 30), (2, 20), (3, 10), (4, None), (10, None)])
def test_oldest_go_until_the_rest_fits(size, expected):
    assert planned(files(3, 2, 1, 0), size=size) == expected


def test_what_goes_by_time_counts_for_the_size():
    assert planned(files(60, 2, 1, 0), time=30, size=3) == 10
    assert planned(files(60, 2, 1, 0), time=30, size=2) == 20


@each(("safe", "expected"), [(0, None), (9, None), (10, 10), (19, 10), (20, 20), (35, 30)])
def test_file_with_an_offset_that_is_not_safe_stays(safe, expected):
    assert planned(files(60, 60, 60, 60), safe=safe, time=1) == expected
    assert planned(files(60, 60, 60, 60), safe=safe, size=0) == expected


def test_file_of_unknown_age_counts_as_new():
    assert planned(files(None, 60, 60), time=1) is None
    assert planned(files(60, None, 60), time=1) == 10
    assert planned(files(None, None, None), size=1) == 20


def test_file_written_in_the_future_is_as_old_as_what_follows_it():
    assert planned(files(-60, 60, 60), time=61) is None
    assert planned(files(-60, 60, 60), time=59) == 20
    assert planned(files(-60, -60, -60), time=1) is None


def test_file_written_under_a_clock_that_was_behind_is_as_new_as_what_precedes_it():
    assert planned(files(5, 10**6, 0), time=5) is None


def test_time_recorded_under_a_wrong_clock_is_corrected():
    found = files(10**6, 0)
    assert planned(found, time=1) == 10
    assert planned(found, time=1, correct_ms=lambda time_ms: NOW) is None


def test_without_a_trusted_clock_no_file_is_old():
    found = files(10**6, 10**6, 0)
    assert planned(found, time=1, is_clock_trusted=False) is None
    assert planned(found, time=1, size=2, is_clock_trusted=False) == 10
    assert floored(found, minutes=1, size=0, is_clock_trusted=False) is None
    assert floored(found, size=2 * MIB, is_clock_trusted=False) == 10


def test_no_files_are_no_plan():
    assert planned([], time=0, size=0) is None
    assert floored([], minutes=0, size=0) is None


# -- floors: min_minutes and min_bytes ----------------------------------------------------------


@each(("minutes", "expected"), [(0, 30), (9, 30), (10, 20), (19, 20), (20, 10), (30, None)])
def test_files_younger_than_the_floor_stay_however_large_the_log_is(minutes, expected):
    assert floored(files(30, 20, 10, 0), minutes=minutes) == expected
    assert floored(files(30, 20, 10, 0), minutes=minutes, size=0) == expected


@each(("kept", "expected"), [(0, 30), (1, 30), (2, 20), (3, 10), (4, None), (10, None)])
def test_files_stay_while_the_log_is_not_above_the_floor_however_old_they_are(kept, expected):
    assert floored(files(3, 2, 1, 0), size=kept * MIB) == expected
    assert floored(files(3, 2, 1, 0), size=kept * MIB, minutes=0) == expected


def test_floor_in_bytes_is_exact():
    assert floored(files(60, 60, 60), size=3 * MIB) is None
    assert floored(files(60, 60, 60), size=3 * MIB - 1) == 10
    assert floored(files(60, 60, 60), size=2 * MIB) == 10


def test_floor_in_minutes_is_exact_to_the_millisecond():
    (first, *rest) = files(60, 0)
    just = [RetentionFile(first_offset=0, size_bytes=1, modified_ms=first.modified_ms - 1), *rest]
    assert floored([first, *rest], minutes=60) is None
    assert floored(just, minutes=60) == 10


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 100), st.integers(0, 5)), max_size=8),
    st.integers(0, 90),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 20 * MIB),
)
def test_floors_remove_the_files_that_every_floor_allows_and_no_other(shapes, safe, minutes, size):
    found = [
        RetentionFile(
            first_offset=number * 10,
            size_bytes=megabytes * MIB,
            modified_ms=None if age is None else NOW - age * MINUTE,
        )
        for number, (age, megabytes) in enumerate(shapes)
    ]
    assume(minutes is not None or size is not None)

    def may_go(number):
        # A file is as new as the newest before it.
        written = [file.modified_ms for file in found[: number + 1] if file.modified_ms is not None]
        has_age = found[number].modified_ms is not None
        return (
            found[number + 1].first_offset <= safe
            and (minutes is None or (has_age and NOW - max(written) > minutes * MINUTE))
            and (size is None or sum(file.size_bytes for file in found[number:]) > size)
        )

    count = len(list(takewhile(may_go, range(len(found) - 1))))
    expected = found[count].first_offset if count else None
    assert floored(found, minutes=minutes, size=size, safe=safe) == expected


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 100), st.integers(0, 5)), max_size=8),
    st.integers(0, 90),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 20),
)
def test_plan_is_a_file_boundary_that_is_safe_and_never_the_end(shapes, safe, time, size):
    found = [
        RetentionFile(
            first_offset=number * 10,
            size_bytes=megabytes * MIB,
            modified_ms=None if age is None else NOW - age * MINUTE,
        )
        for number, (age, megabytes) in enumerate(shapes)
    ]
    before = planned(found, safe=safe, time=time, size=size)
    if before is None:
        return
    assert before <= safe
    assert before in [file.first_offset for file in found[1:]]
    # The last one that goes does so by a rule of its own.
    last = max((f for f in found if f.first_offset < before), key=lambda f: f.first_offset)
    kept = sum(f.size_bytes for f in found if f.first_offset >= last.first_offset)
    is_old = time is not None and last.modified_ms is not None
    is_old = is_old and NOW - last.modified_ms > time * MINUTE
    assert is_old or (size is not None and kept > size * MIB)
