"""Errors of a command, for programs and for people, in the same words everywhere.

An error that is about a range of offsets names it: a gap does by itself, an object by its name.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ister.cli.look import print_error
from ister.errors import DataGapError, InvariantError, IsterError
from ister.tier.names import parse_object_id

__all__ = ["answer", "error_as_json", "print_errors", "print_json"]

_TEXT_MAX: Final = 2000


def error_as_json(error: IsterError) -> dict[str, Any]:
    """The fields of an error: `code, message, topic, offset`, and where it is."""
    start, end = _range_of(error) or (None, None)
    return {
        "code": error.code,
        "message": error.message,
        "topic": error.topic,
        "offset": error.offset,
        "start_offset": start,
        "next_offset": end,
        "path": error.path,
        "position": error.position,
        "hint": error.hint,
    }


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
    """The text of an error, with what to do said for a shell instead of a program."""
    for said, meant in (
        ("create=True makes it", ""),
        ("take_over=True", "`ister repair --take-over`"),
    ):
        text = text.replace(said, meant)
    return text


def print_json(fields: Mapping[str, Any]) -> None:
    """One object on one line."""
    print(json.dumps(fields))


def answer(
    work: Callable[[], int], *, as_json: bool, on_error: Callable[[IsterError], Mapping[str, Any]]
) -> int:
    """Runs a command; where it fails before it could print, its JSON holds the error.

    So it does for our own faults and for those of libraries; tracebacks go to standard error.

    Args:
        work: The command; returns the exit code, after printing.
        as_json: Whether JSON was asked for.
        on_error: The JSON for an error.

    Raises:
        IsterError: As `work` does: `main` shows it.
    """
    try:
        return work()
    except BrokenPipeError:
        raise  # nobody reads what is printed
    except Exception as error:
        is_expected = isinstance(error, IsterError) and not isinstance(error, InvariantError)
        if not as_json:
            raise
        print_json(on_error(error if isinstance(error, IsterError) else _unexpected(error)))
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
        name = parse_object_id(error.path.rpartition("/")[2])
        if name is not None:
            return name.start, name.end
    return None
