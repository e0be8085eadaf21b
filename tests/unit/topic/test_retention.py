"""Which local files may go: each rule alone and together."""

from hypothesis import given
from hypothesis import strategies as st

from ister.limits import MIB
from ister.topic.retention import RetentionFile, plan_trim
from support.cases import each

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


def planned(found, *, safe=1 << 60, time=None, size=None):
    return plan_trim(found, safe_before=safe, now_ms=NOW, time_minutes=time, size_mb=size)


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
    limits = {"safe_before": 1 << 60, "now_ms": NOW, "time_minutes": 1, "size_mb": None}
    assert plan_trim(found, **limits) == 10
    assert plan_trim(found, **limits, correct_ms=lambda time_ms: NOW) is None


def test_no_files_are_no_plan():
    assert planned([], time=0, size=0) is None


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
