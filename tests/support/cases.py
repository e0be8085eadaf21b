"""Runs a test for many cases inside one collected test; the failing case is named in the error.

@each("text, number", [("1", 1), ("2", 2)])
def test_number_is_read(text, number): ...

@making("place")
def fresh(path):
    return {"place": Place(path / "data")}

@each("format", FORMATS, fresh=fresh)
def test_table_is_written(place, tmp_path, format): ...

with case(text, number):            names the case if anything is raised within
    assert read(text) == number
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ister.base import failpoints
from tests.support.waiting import run_test


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Adds the values of a case to whatever is raised within, as a note below the traceback."""
    try:
        yield
    except BaseException as error:
        shown = ", ".join(repr(value) for value in values)
        error.add_note(f"case: {shown[:2000]}")
        raise


def product(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations, as rows for `each`."""
    return list(itertools.product(*columns))


def making(*names: str) -> Callable[..., Any]:
    """Names the arguments that a function for `each(fresh=…)` makes."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.makes = names
        return function

    return decorate


def each(
    names: str | Sequence[str],
    rows: Iterable[Any],
    ids: object = None,
    *,
    fresh: Callable[[Path], Mapping[str, object]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but as a loop: one collected test, fixtures made once.

    Each case has its own directory in `tmp_path`, its own `monkeypatch` and an empty `caplog`;
    other fixtures are shared. Stacked decorators give all combinations. No rows are an error.

    Args:
        names: The arguments that a row has values for.
        rows: The cases: a tuple each, or a value if there is one name.
        ids: Names of the cases.
        fresh: Gets a case's directory and makes arguments that replace fixtures (`making`).
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    labels = list(ids) if isinstance(ids, Iterable) else []
    cases = []
    for number, row in enumerate(rows):
        label = labels[number] if number < len(labels) else None
        if hasattr(row, "marks"):  # a pytest.param
            label, row = row.id, row.values  # noqa: PLW2901
        elif len(keys) == 1:
            row = (row,)  # noqa: PLW2901
        cases.append((label, dict(zip(keys, row, strict=True))))
    if not cases:
        raise ValueError(f"each({names!r}) has no rows: the test would pass without running")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        made_here = set() if fresh is None else {*fresh.makes}  # type: ignore[attr-defined]

        @functools.wraps(test)
        def run(**given: Any) -> None:
            for number, (label, values) in enumerate(cases):
                own = dict(given)
                if "tmp_path" in own:
                    own["tmp_path"] = given["tmp_path"] / f"case-{number}"
                    own["tmp_path"].mkdir()
                if "caplog" in own:
                    own["caplog"].clear()
                with case(label or values), pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    try:
                        if fresh is not None:
                            made = fresh(own["tmp_path"])
                            own |= {name: made[name] for name in made_here if name in parameters}
                            if "tmp_path" not in parameters:
                                del own["tmp_path"]
                        run_test(test, {**own, **values})
                    finally:
                        if fresh is not None:
                            failpoints.disarm()

        left = [p for name, p in parameters.items() if name not in keys and name not in made_here]
        if fresh is not None and "tmp_path" not in {p.name for p in left}:
            left.append(inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        run.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return run

    return decorate
