"""Errors of a command, for programs and for people, in the same words everywhere.

An error that is about a range of offsets names it: a gap does by itself, an object by its name.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from ister.base.model import JsonObject
from ister.cli.output import print_error
from ister.errors import DataGapError, InvariantError, IsterError

_TEXT_MAX: Final = 2000


def error_as_json(error: IsterError) -> JsonObject:
    """The fields of an error: `code, message, topic, offset`, and where it is."""
    start, end = _range_of(error) or (None, None)
    fields = error.to_dict("topic", "offset", "path", "position")
    return {**fields, "start_offset": start, "next_offset": end}


def print_errors(errors: Iterable[IsterError]) -> None:
    """Each error on standard error: a line, and on a terminal one more with what to do."""
    for error in errors:
        where = _range_of(error)
        # A gap has its range in its hint already.
        is_named = where is None or isinstance(error, DataGapError)
        prefix = "" if is_named or where is None else f"offsets {where[0]} up to {where[1]}: "
        text, hint = str(error), error.hint
        if hint:
            text = text.removesuffix(f"; {hint}")
            hint = in_shell_words(hint) or None
        print_error(f"{prefix}{in_shell_words(text)}", hint=hint)


def in_shell_words(text: str) -> str:
    """The text of an error, with hints for a shell instead of a program."""
    for said, meant in (
        ("pass create=True to create it", ""),
        ("take_over=True", "`ister repair --take-over`"),
        ("pass tls=True, or TlsOptions(ca=...)", "pass --tls, or --ca-file FILE"),
        ("connect without tls", "leave out --tls and --ca-file"),
    ):
        text = text.replace(said, meant)
    return text


def print_json(fields: Mapping[str, object]) -> None:
    """One object on one line."""
    print(json.dumps(fields))


def answer(
    options: argparse.Namespace,
    work: Callable[[], int],
    facts: Mapping[str, object] = MappingProxyType({}),
) -> int:
    """Runs a command; with --json, an error that it raises is printed as JSON.

    Unexpected errors are printed too, and their tracebacks go to standard error.

    `work` returns the exit code, after printing; `facts` are the other fields of the JSON object of
    an error.

    Raises:
        IsterError: As `work` does: `main` shows it.
    """
    try:
        return work()
    except BrokenPipeError:
        raise  # the reader of the output is gone
    except Exception as error:
        is_expected = isinstance(error, IsterError) and not isinstance(error, InvariantError)
        if not options.json:
            raise
        shown = error if isinstance(error, IsterError) else _unexpected(error)
        print_json({**facts, "errors": [error_as_json(shown)]})
        if is_expected:
            raise
        traceback.print_exc()
        return 1


def _unexpected(error: Exception) -> IsterError:
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    # Libraries put whole stacks into their errors.
    return InvariantError(text[:_TEXT_MAX])


def _range_of(error: IsterError) -> tuple[int, int] | None:
    """The offsets that an error is about, where that is more than one."""
    if isinstance(error, DataGapError):
        return error.start, error.end
    if error.path is not None:
        from ister.rescue.examine_object import offsets_of  # noqa: PLC0415 - only after an error

        return offsets_of(error.path)
    return None
