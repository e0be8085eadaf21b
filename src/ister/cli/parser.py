"""The parser of all commands: the layout of help, and hints after wrong usage.

Owns: the layout of help, errors of usage. Does not own: the commands (`main`), other output
(`output`).

Wrong usage ends with exit code 2 and one sentence on standard error, with the nearest known word
where there is one, or the command that shows the usage. A command that is given without its
sub-command shows its help. Help has colours on a terminal; `rich-argparse` is loaded for that
alone.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn, TextIO

from ister.cli.output import is_terminal, print_error
from ister.errors import ConfigError

_EXIT_USAGE: Final = 2
_PATHS: Final = ("DIR", "FILE", "PATH", "TABLE", "URL-or-PATH")
"""Metavars of the arguments that are paths."""
_NEAR: Final = 0.65
"""How similar words have to be: `health` is not `auth`, and `--tail` is not `--tls`."""
_WIDTH_MAX: Final = 110
_WIDTH_MIN: Final = 40
_HELP_POSITION_MAX: Final = 26


class Parser(argparse.ArgumentParser):
    """See the module header. Parsers of sub-commands are of this class by themselves.

    Args:
        groups: Of the parser of all commands: title and names, in the order of the help; commands
            that are in none come last.
        options: All others are argparse's.
    """

    def __init__(
        self,
        *,
        groups: Mapping[str, Sequence[str]] | None = None,
        **options: Any,  # noqa: ANN401 - argparse's own
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)
        self.groups = groups
        self.moved: Mapping[str, str] = {}
        """Sub-commands of the past, each with what to use."""
        self._given: list[str] = []
        self._positionals.title = "arguments"

    @property
    def commands(self) -> dict[str, Parser]:
        """The sub-commands by name, without aliases; empty if there are none."""
        action = self._sub_commands()
        shown = [] if action is None else action._choices_actions  # noqa: SLF001 - argparse's
        return {item.dest: action.choices[item.dest] for item in shown if action is not None}

    @property
    def arguments(self) -> list[argparse.Action]:
        """Its arguments and options, in the order of the help; not its sub-commands."""
        return [item for item in self._actions if item is not self._sub_commands()]

    def summary(self, name: str) -> str:
        """The line about a sub-command in this parser's help."""
        action = self._sub_commands()
        shown = [] if action is None else action._choices_actions  # noqa: SLF001 - argparse's
        return next((item.help or "" for item in shown if item.dest == name), "")

    # -- help -------------------------------------------------------------------------------

    def print_help(self, file: TextIO | None = None) -> None:  # type: ignore[override]
        """Shows the help, in colours where `file` is a terminal."""
        file = sys.stdout if file is None else file
        file.write(self._format_help(file))

    def format_help(self) -> str:
        """The help as plain text."""
        return self._format_help(None)

    def _format_help(self, file: TextIO | None) -> str:
        width = _width(file)
        if file is not None and is_terminal(file):
            formatter = _rich_formatter(self.prog, width, file)
        else:
            formatter = _plain_formatter(self.prog, width)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(_filled(self.description or "", width))
        for title, actions in self._sections():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _sections(self) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        """What the help lists: sub-commands in their groups, arguments, options."""
        commands = self._sub_commands()
        if commands is not None:
            shown = {item.dest: item for item in commands._choices_actions}  # noqa: SLF001
            groups = self.groups or {"commands": tuple(shown)}
            for title, names in groups.items():
                yield title, [shown.pop(name) for name in names if name in shown]
            if shown:
                yield "others", list(shown.values())
        for group in self._action_groups:
            # The sub-commands stand above, one by one.
            actions = [item for item in group._group_actions if item is not commands]  # noqa: SLF001
            if actions:
                yield group.title, actions

    # -- wrong usage ------------------------------------------------------------------------

    def error(self, message: str) -> NoReturn:
        """Ends the process after wrong usage.

        Raises:
            SystemExit: With 2.
        """
        commands = self._sub_commands()
        if commands is not None and message.endswith(f"required: {commands.metavar}"):
            self._refuse_options(item for item in self._given if self._is_unknown(item))
            self.print_help(sys.stderr)
            raise SystemExit(_EXIT_USAGE)
        self.refuse(message)

    def refuse(self, message: str, *, hint: str | None = None) -> NoReturn:
        """Ends the process after wrong usage, with what to do about it.

        Raises:
            SystemExit: With 2.
        """
        print_error(message, hint=hint or f"`{self.prog} --help` shows its usage")
        raise SystemExit(_EXIT_USAGE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses; what is left over is wrong usage already here, where it is known of what."""
        self._given = sys.argv[1:] if args is None else list(args)
        # `-0` would have argparse take `-1` for an option, and complain that a number is missing.
        self._has_negative_number_optionals.clear()
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse_options(unknown)
            self.refuse(f"unexpected argument {unknown[0]!r}")
        self._expand_paths(parsed)
        return parsed, unknown

    def _expand_paths(self, parsed: argparse.Namespace) -> None:
        """Expands `~` in paths; shells do not expand it in `--data=~/x`."""
        for action in self.arguments:
            value = getattr(parsed, action.dest, None)
            if action.metavar in _PATHS and isinstance(value, str) and value.startswith("~"):
                from ister.config import expand_home  # noqa: PLC0415 - takes a while

                try:
                    setattr(parsed, action.dest, expand_home(value))
                except ConfigError as error:
                    self.refuse(error.message, hint=error.hint)

    def _refuse_options(self, unknown: Iterable[str]) -> None:
        """Ends the process if an option is among what is not known."""
        for item in unknown:
            if item.startswith("-") and item != "-":
                name = item.partition("=")[0]
                known = [text for text in self._option_string_actions if text.startswith("--")]
                self.refuse(f"unknown option {name}", hint=_nearest(name, known))

    def _is_unknown(self, item: str) -> bool:
        return item.partition("=")[0] not in self._option_string_actions

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Argparse's check of choices, with the nearest one."""
        choices = action.choices
        if choices is None or value in choices:
            return
        known = [str(choice) for choice in choices]
        near = _nearest(str(value), known)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - has no public name
            self.refuse(
                f"unknown command {f'{self.prog} {value}'!r}",
                hint=self.moved.get(str(value)) or near or f"known: {', '.join(self.commands)}",
            )
        name = "/".join(action.option_strings) or action.metavar or action.dest
        self.refuse(f"{name}: {value!r} is not one of {', '.join(known)}", hint=near)

    def _sub_commands(self) -> argparse._SubParsersAction[Parser] | None:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - has no public name
                return action
        return None


def walk_commands(parser: Parser) -> Iterator[Parser]:
    """A parser and those of all its sub-commands, in the order of the help."""
    yield parser
    for command in parser.commands.values():
        yield from walk_commands(command)


def _nearest(word: str, known: Iterable[str]) -> str | None:
    by_text = {one.lstrip("-"): one for one in known}
    near = difflib.get_close_matches(word.lstrip("-"), by_text, n=1, cutoff=_NEAR)
    return f"did you mean {by_text[near[0]]!r}?" if near else None


def _width(file: TextIO | None) -> int:
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if not width and file is not None and is_terminal(file):
        width = os.get_terminal_size(file.fileno()).columns
    # Lines that are much longer are hard to read, however wide the terminal is.
    return max(min(width or _WIDTH_MAX, _WIDTH_MAX), _WIDTH_MIN) - 2


def _filled(text: str, width: int) -> str:
    """Paragraphs as wide as the help; argparse would leave the lines of an epilog's form alone."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in paragraphs)


def _plain_formatter(prog: str, width: int) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=_HELP_POSITION_MAX, width=width
    )


def _rich_formatter(prog: str, width: int, file: TextIO) -> argparse.HelpFormatter:
    # Imported late: these take a tenth of a second.
    from rich.console import Console  # noqa: PLC0415
    from rich.theme import Theme  # noqa: PLC0415
    from rich_argparse import RawDescriptionRichHelpFormatter  # noqa: PLC0415

    class Formatter(RawDescriptionRichHelpFormatter):
        group_name_formatter = str
        # Brackets are brackets: `local[*]`, `ister[spark]`.
        help_markup = False
        text_markup = False
        highlights: ClassVar = [
            *RawDescriptionRichHelpFormatter.highlights,
            r"(?m)^(?P<groups>[a-z ]+:)$",
            r"(?m)^ +(?P<prog>ister(?: [a-z]+)*)(?= |$)",
        ]
        styles: ClassVar = {
            **RawDescriptionRichHelpFormatter.styles,
            "argparse.groups": "bold",
            "argparse.prog": "bold cyan",
            "argparse.metavar": "green",
        }

    return Formatter(
        prog,
        max_help_position=_HELP_POSITION_MAX,
        width=width,
        console=Console(file=file, theme=Theme(Formatter.styles), width=width + 2),
    )
