"""Options of commands that print messages: filters and output format.

Owns: `--format`, `--delimiter`, `--null`, `--json`, and the filters `--key`, `--attribute`,
`--where` and `--contains`. Does not own: what filters match (`ister.base.message_filter`),
templates (`templates`), output (`messages_out`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from ister.base.message_filter import Condition, MessageFilter, Pattern, parse_attribute
from ister.cli.command import add_json_argument
from ister.cli.messages_out import FORMATS, Received, formatter, printable
from ister.cli.templates import is_template, parse_template
from ister.errors import InvalidRequestError

_T = TypeVar("_T")

FILTER_HELP: Final = """\
filter syntax:
  All filters have to match; of several --key, one has to. In --key and --attribute, * stands for
  any characters and ? for one; \\* and \\? are literal.
  --where compares values in JSON payloads: a path, one of == != < <= > >= ~, and a number, a
  quoted text, true, false or null. ~ means contains. Conditions are joined by `and` and `or`.
      --where 'user.id == 7 and items[0].sku ~ "A-"'
  A missing field is null. A payload that is not JSON matches no condition."""
"""How filters are written, for the help of commands."""


class Filters:
    """The filters of a command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.filter = MessageFilter(
            keys=tuple(options.keys),
            attributes=tuple(options.attributes),
            conditions=tuple(options.where),
            contains=options.contains.encode(errors="surrogateescape"),
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """Those that were given."""
        return cls(options)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the filters."""
        group = parser.add_argument_group("filters")
        group.add_argument(
            "-k",
            "--key",
            dest="keys",
            metavar="PATTERN",
            action="append",
            default=[],
            type=Pattern.parse,
            help="only messages with this routing key; * and ? are wildcards; repeatable",
        )
        group.add_argument(
            "--attribute",
            dest="attributes",
            metavar="NAME=PATTERN",
            action="append",
            default=[],
            type=_checked(parse_attribute),
            help="only messages with this attribute; NAME alone for any value; repeatable",
        )
        group.add_argument(
            "--where",
            metavar="CONDITION",
            action="append",
            default=[],
            type=_checked(Condition.parse),
            help="only messages whose JSON payload matches, such as 'user.id == 7'; repeatable",
        )
        group.add_argument(
            "--contains",
            metavar="TEXT",
            default="",
            help="only messages whose payload contains this text",
        )


def _checked(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """An argparse type: errors of `parse` become usage errors."""

    def parsed(text: str) -> _T:
        try:
            return parse(text)
        except InvalidRequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def is_match(wanted: MessageFilter, message: Received) -> bool:
    """Whether a message matches a filter."""
    return wanted.matches(
        key=message.routing_key, attributes=message.attributes, payload=message.payload
    )


class Format:
    """How a command prints messages."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._format: str = options.format
        self._is_json: bool = options.json
        # Arguments may be any bytes; Python decodes those that are not UTF-8 as surrogates.
        text: str = options.delimiter or "\n"
        self._delimiter = b"\0" if options.null else text.encode(errors="surrogateescape")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """What was given."""
        return cls(options)

    def formatter(self, *, is_terminal: bool) -> Callable[[Received], bytes]:
        """Returns a function that formats a message, with its delimiter.

        `is_terminal`: control characters in messages are shown as numbers.
        """
        if self._is_json or not is_template(self._format):
            return formatter(
                self._format,
                is_json=self._is_json,
                delimiter=self._delimiter,
                is_terminal=is_terminal,
            )
        rendered = parse_template(self._format, printable if is_terminal else bytes)
        return lambda message: rendered(message) + self._delimiter

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds `--format`, `--json` and the delimiters."""
        group = parser.add_argument_group("output")
        group.add_argument(
            "--format",
            metavar="FORMAT",
            type=_checked(_parse_format),
            default="payload",
            help="payload: unchanged bytes (default); full: topic, offset, time, producer, key, "
            "attributes and payload, separated by tabs; hex: payload as hexadecimal digits; or a "
            "template such as '{offset} {key} {payload}'",
        )
        ends = group.add_mutually_exclusive_group()
        ends.add_argument(
            "--delimiter", metavar="TEXT", help="separator after each message (default: newline)"
        )
        ends.add_argument(
            "-0", "--null", action="store_true", help="separate messages by a zero byte"
        )
        add_json_argument(group, "print one JSON object per line, with all fields")


def _parse_format(text: str) -> str:
    if is_template(text):
        parse_template(text, bytes)
    elif text not in FORMATS:
        raise InvalidRequestError(
            f"unknown format {text!r}: use {', '.join(FORMATS)} or a template such as "
            "'{offset} {key} {payload}'"
        )
    return text


def matching(wanted: MessageFilter, messages: Sequence[Received]) -> Sequence[Received]:
    """The messages that match, in their order."""
    return [one for one in messages if is_match(wanted, one)] if wanted else messages
