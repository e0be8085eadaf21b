"""The order in which the processes of a test run take files."""

from pathlib import Path

from tests.support.schedule import _LONGEST, _in_turn

ROOT = Path(__file__).resolve().parents[2]


def test_longest_files_begin_and_those_that_wait_and_compute_take_turns():
    waiting = ["tests/fault/test_a.py", "tests/integration/test_b.py"]
    computing = ["tests/sim/test_c.py", "tests/unit/test_d.py", "tests/unit/test_e.py"]
    first, second = _LONGEST[:2]
    assert _in_turn([*computing, second, *waiting, first]) == [
        *(first, second),
        *(waiting[0], computing[0], waiting[1], computing[1], computing[2]),
    ]


def test_longest_files_exist():
    assert [path for path in _LONGEST if not (ROOT / path).is_file()] == []
