"""Runs a test for many cases inside one collected test; the failing case is named in the error."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(
    names: str | Sequence[str], rows: Iterable[Any], ids: object = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but as a loop: one collected test, fixtures made once.

    Each case has its own directory in `tmp_path` and its own `monkeypatch`; other fixtures are
    shared. Stacked decorators give all combinations.
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

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            for number, (label, values) in enumerate(cases):
                own = dict(given)
                if "tmp_path" in own:
                    own["tmp_path"] = given["tmp_path"] / f"case-{number}"
                    own["tmp_path"].mkdir()
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    try:
                        test(**own, **values)
                    except BaseException as error:
                        error.add_note(f"case: {label or values}")
                        raise

        parameters = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([p for p in parameters if p.name not in keys])
        return run

    return decorate
