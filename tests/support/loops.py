"""Loops over cases inside one test, where each case gets directories and objects of its own.

    with case(text, number):            names the case if anything is raised within
        assert read(text) == number

    @making("tmp_path", "place")
    def fresh(path):
        return {"tmp_path": path, "place": Place(path / "data")}

    @each("format", FORMATS, fresh=fresh)
    def test_table_is_written(place, tmp_path, format): ...

Cases that leave nothing behind in fixtures use `support.cases.each`.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ister import failpoints


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
    """All combinations, as cases for `each`."""
    return list(itertools.product(*columns))


def making(*names: str) -> Callable[..., Any]:
    """Says which arguments a function for `each(fresh=…)` makes."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.makes = names
        return function

    return decorate


def each(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    *,
    fresh: Callable[[Path], Mapping[str, object]] | None = None,
) -> Callable[..., Any]:
    """Calls a test once per case with the case's values as its arguments `names`.

    `fresh` gets a directory of the case's own and makes arguments that replace fixtures;
    `monkeypatch` is undone after each case.
    """
    cases = list(cases)
    keys = (names,) if isinstance(names, str) else names
    made_here = set() if fresh is None else {*fresh.makes, "tmp_path"}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters

        def run(**fixtures: Any) -> None:
            for number, values in enumerate(cases):
                row = (values,) if isinstance(names, str) else values
                named = dict(zip(keys, row, strict=True))
                with case(named), ExitStack() as stack:
                    own = dict(fixtures)
                    if "monkeypatch" in own:
                        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
                    if fresh is not None:
                        directory = own.pop("tmp_path") / f"case-{number}"
                        directory.mkdir()
                        made = fresh(directory)
                        own |= {key: made[key] for key in parameters if key in made}
                        stack.callback(failpoints.disarm)
                    test(**own, **named)

        left = [p for name, p in parameters.items() if name not in keys and name not in made_here]
        if fresh is not None:
            left.append(inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__signature__ = inspect.Signature(left)
        return run

    return decorate
