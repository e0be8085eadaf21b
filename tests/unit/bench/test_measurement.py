"""How results are judged, and what the shared parts of benchmarks give."""

import pytest

from benchmarks.measurement import Run, file_paths, payloads, quantile, spread, take_turns
from ister.errors import UnavailableError


@pytest.fixture
def run(tmp_path):
    with Run.begin("example", str(tmp_path), is_quick=False) as run:
        yield run


def test_target_is_on_the_value_or_on_the_ratio(run):
    for target, met in [
        ({"at_least": 10}, True),
        ({"at_least": 10.1}, False),
        ({"at_most": 10}, True),
        ({"at_most": 9.9}, False),
        ({"at_least": 0.5, "on": "ratio"}, True),
        ({"at_least": 0.6, "on": "ratio"}, False),
        ({"at_most": 0.5, "on": "ratio"}, True),
        ({}, None),
    ]:
        run.add("x", 10, "s", limit=20, **target)
        result = run.results[-1]
        assert result.met is met, target
        assert result.ratio == 0.5, target


def test_result_without_a_limit_has_no_ratio(run):
    run.add("x", 10, "s", at_least=0.5, on="ratio")
    assert (run.results[0].ratio, run.results[0].met) == (None, None)


def test_what_was_not_measured_is_in_the_output(run):
    run.skip("x", "no such thing")
    assert run.as_json()["skipped"] == [{"name": "x", "why": "no such thing"}]


def test_quantile_is_one_of_the_values():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, q) for q in (0, 0.5, 0.99, 1)] == [1.0, 3.0, 5.0, 5.0]


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("wal.10.log", "wal.log", "wal.2.log", "wal.idx"):
        (tmp_path / name).touch()
    names = [path.rpartition("/")[2] for path in file_paths(str(tmp_path))]
    assert names == ["wal.log", "wal.2.log", "wal.10.log"]


def test_payloads_are_as_many_and_as_large_as_asked():
    assert [len(payload) for payload in payloads(3, 7)] == [7, 7, 7]
    assert len(payloads(1000)) == 1000


def test_directory_goes_even_after_an_error(tmp_path):
    def fail():
        with Run.begin("x", str(tmp_path), is_quick=True) as run:
            (tmp_path / run.path("file")).touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_an_error(tmp_path):
    with (
        pytest.raises(UnavailableError, match="--dir"),
        Run.begin("x", str(tmp_path / "none"), is_quick=True),
    ):
        pass


def test_sides_take_turns_in_both_orders():
    order = []
    found = take_turns(
        2, {"a": lambda: order.append("a") or 1.0, "b": lambda: order.append("b") or 2.0}
    )
    assert order == ["a", "b", "b", "a"]
    assert found == {"a": [1.0, 1.0], "b": [2.0, 2.0]}


def test_spread_is_the_least_and_the_most():
    assert spread([3.0, 1.25, 2.0]) == "1.25 to 3"
