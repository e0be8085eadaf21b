"""Commands as typed functions: arguments from the signature, help from the docstring.

    TOPICS = Group("topics", "list, describe, create, delete and move topics", examples=(…))

    @command(TOPICS, "delete", "rm", failed={"ok": False}, echo=["topic"])
    def delete_topic(broker: Broker, topic: Topic, *, yes: Yes = False) -> Shown:
        '''Delete a topic and all its messages.

Examples:
            ister topics delete /default/orders --yes
        '''

A parameter is an argument, one behind `*` an option; `Annotated[type, Arg("help")]` says what it is
for. A class with `add_arguments` and `from_options` is a set of options, such as the broker. The
docstring has the line for the list of commands, the description, and examples.

A command returns what is shown (`Shown`), or an exit code if it has printed by itself. `--json`
prints one object: that of the record, or of the error, with the fields that `failed` and `echo`
name. Does not own: the layout of help and wrong usage (`parser`), how tables look (`output`).
"""

from __future__ import annotations

import argparse
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Annotated, Any, Final, Protocol, TypeAlias, TypeVar, cast

from ister.cli.errors_out import answer, print_errors, print_json
from ister.cli.output import Subparsers, add_command, confirm, print_facts, print_table
from ister.cli.parser import Parser
from ister.errors import IsterError

_EXAMPLES: Final = "Examples:"


class UsageError(Exception):
    """Arguments that contradict each other: exit code 2, with the message."""


class DeclinedError(Exception):
    """The user did not confirm; standard error says so. Exit code 1."""


# -- records ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below their titles; `empty` is printed if there are none."""

    titles: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str | None = None
    empty: str = ""

    def show(self) -> None:
        """Prints it."""
        if self.rows or not self.empty:
            print_table(self.titles, self.rows, title=self.title)
        else:
            print(self.empty)


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, a line each."""

    facts: Mapping[str, object]
    title: str | None = None

    def show(self) -> None:
        """Prints it."""
        print_facts(self.facts, title=self.title)


Part: TypeAlias = Table | Facts | str | Callable[[], None]
"""Something that is printed for people: a call prints by itself."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command found or did: for programs, and for people."""

    json: Mapping[str, object]
    parts: Sequence[Part] | Part = ()
    ok: bool = True
    """Whether the exit code is 0."""
    errors: Sequence[IsterError] = field(default=(), kw_only=True)
    """Printed on standard error, with JSON too."""

    def show(self, *, is_json: bool) -> int:
        """Prints it; returns the exit code."""
        if is_json:
            print_json(self.json)
        else:
            parts = self.parts
            for part in parts if isinstance(parts, list | tuple) else (cast("Part", parts),):
                if isinstance(part, str):
                    print(part)
                elif isinstance(part, Table | Facts):
                    part.show()
                else:
                    part()
        print_errors(self.errors)
        return 0 if self.ok else 1


def confirmed(question: str, *, yes: bool) -> None:
    """Asks before something that cannot be taken back.

    Raises:
        DeclinedError: It is not confirmed, or there is no terminal to ask on.
    """
    if not confirm(question, is_confirmed=yes):
        raise DeclinedError


# -- arguments --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arg:
    """What an argument is for, and how it is read."""

    help: str
    metavar: str | None = None
    parse: Callable[[str], object] | None = None
    _: KW_ONLY
    flags: tuple[str, ...] = ()
    """Other names, such as `-n`; a long one first replaces the parameter's."""
    choices: Sequence[str] = ()
    group: str = ""
    """The part of the help that it is in."""
    one_of: str = ""
    """Only one of those with this word may be given; one has to be if it ends with `!`."""


class Options(Protocol):
    """A set of options that many commands have."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds them to a parser."""
        ...

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Options:
        """The values that were given."""
        ...


Yes = Annotated[bool, Arg("skip the confirmation")]
DryRun = Annotated[bool, Arg("show what would be done; change nothing")]


def add_json_argument(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, help: str = "print one JSON object"
) -> None:
    """Adds `--json`, and `-o json` for fingers that know it."""
    parser.add_argument("--json", action="store_true", help=help)
    parser.add_argument("-o", dest="json", action=_OutputFormat, help=argparse.SUPPRESS)


class _OutputFormat(argparse.Action):
    """`-o json`; `-o text` and `-o table` are the default."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(
            option_strings, dest, metavar="FORMAT", default=False, choices=_FORMATS, help=help
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values == "json")


_FORMATS: Final = ("json", "text", "table")
_Function = TypeVar("_Function", bound=Callable[..., "Shown | int"])


class _Command:
    """One function, and how it is called."""

    def __init__(
        self,
        function: Callable[..., Shown | int],
        names: tuple[str, ...],
        *,
        notes: str | None,
        json: str,
        failed: Mapping[str, object] | None,
        echo: Mapping[str, str] | Sequence[str],
    ) -> None:
        self.function = function
        self.names = names
        self._notes = notes
        self._json = json
        self._failed = failed
        self._echo = echo if isinstance(echo, Mapping) else dict(zip(echo, echo, strict=True))

    def add_to(self, commands: Subparsers) -> None:
        """Adds it to the parser."""
        summary, description, examples = _read_docstring(inspect.getdoc(self.function) or "")
        parser = add_command(
            commands,
            self.names[0],
            help=summary,
            description=description or None,
            examples=examples,
            notes=self._notes,
        )
        for alias in self.names[1:]:
            commands.choices[alias] = parser
        hints = typing.get_type_hints(self.function, include_extras=True)
        signature = inspect.signature(self.function)
        places = _Places(parser)
        sets: dict[str, type[Options]] = {}
        wanted: list[str] = []
        for name, parameter in signature.parameters.items():
            kind, arg = _unwrapped(hints[name])
            if hasattr(kind, "add_arguments"):
                sets[name] = cast("type[Options]", kind)
            elif arg is not None:
                places.add(name, parameter, kind, arg)
                wanted.append(name)
        if self._json:
            add_json_argument(parser, self._json)
        for one in sets.values():
            one.add_arguments(parser)
        takes_json = "json" in signature.parameters

        def run(options: argparse.Namespace) -> int:
            values = {name: getattr(options, name) for name in wanted}
            if takes_json:
                values["json"] = options.json
            return self._run(parser, options, values, sets)

        parser.set_defaults(run=run)

    def _run(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        values: dict[str, object],
        sets: Mapping[str, type[Options]],
    ) -> int:
        def work() -> int:
            given = {name: one.from_options(options) for name, one in sets.items()}
            try:
                found = self.function(**values, **given)
            except UsageError as error:
                parser.error(str(error))
            except DeclinedError:
                return 1
            return found if isinstance(found, int) else found.show(is_json=options.json)

        if self._failed is None:
            return work()
        echo = {shown: values[name] for shown, name in self._echo.items()}
        return answer(options, work, {**self._failed, **echo})


class Group:
    """A command with sub-commands, such as `ister topics`."""

    def __init__(
        self,
        name: str,
        summary: str,
        *,
        description: str | None = None,
        examples: Sequence[str],
        notes: str | None = None,
        metavar: str = "ACTION",
    ) -> None:
        self._name = name
        self._summary = summary
        self._description = description
        self._examples = examples
        self._notes = notes
        self._metavar = metavar
        self._commands: list[_Command] = []
        self.moved: dict[str, str] = {}
        """Names that sub-commands had once, each with what to use."""

    def include(self, one: _Command) -> None:
        """Adds a sub-command, behind the others."""
        self._commands.append(one)

    def register(self, commands: Subparsers) -> None:
        """Adds the group to the parser."""
        parser = add_command(
            commands,
            self._name,
            help=self._summary,
            description=self._description,
            examples=self._examples,
            notes=self._notes,
        )
        actions = parser.add_subparsers(metavar=self._metavar, required=True)
        cast("Parser", parser).moved = self.moved
        for one in self._commands:
            one.add_to(actions)


def command(
    group: Group | None,
    *names: str,
    notes: str | None = None,
    json: str = "print one JSON object",
    failed: Mapping[str, object] | None = None,
    echo: Mapping[str, str] | Sequence[str] = (),
) -> Callable[[_Function], _Function]:
    """Makes a command of a function.

    Args:
        group: The command that it is a part of; None for `register_command`.
        *names: Its name, and aliases, which the help does not list.
        notes: More text below the options of the help.
        json: What `--json` prints, for the help; empty if there is no such option.
        failed: Fields of the JSON object of an error; None if errors are never printed as JSON.
        echo: Arguments that are fields of that object as well, or the fields with the arguments.
    """

    def decorate(function: _Function) -> _Function:
        made = _Command(function, names, notes=notes, json=json, failed=failed, echo=echo)
        if group is not None:
            group.include(made)
        vars(function)["command"] = made
        return function

    return decorate


def register_command(function: Callable[..., Shown | int]) -> Callable[[Subparsers], None]:
    """The `register` of a module that has one command."""
    return cast("_Command", vars(function)["command"]).add_to


# -- signatures -------------------------------------------------------------------------------


class _Places:
    """The groups of a parser, made when they are needed."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self._exclusive: dict[str, argparse._MutuallyExclusiveGroup] = {}

    def add(self, name: str, parameter: inspect.Parameter, kind: object, arg: Arg) -> None:
        """Adds the argument of a parameter."""
        place: argparse._ActionsContainer = self._parser
        if arg.group:
            if arg.group not in self._groups:
                self._groups[arg.group] = self._parser.add_argument_group(arg.group)
            place = self._groups[arg.group]
        if arg.one_of:
            if arg.one_of not in self._exclusive:
                self._exclusive[arg.one_of] = place.add_mutually_exclusive_group(
                    required=arg.one_of.endswith("!")
                )
            place = self._exclusive[arg.one_of]
        has_default = parameter.default is not inspect.Parameter.empty
        inner, is_list = _inner(kind)
        more: dict[str, Any] = {"help": arg.help}
        if inner is bool:
            more |= _switch(parameter.default)
        else:
            more |= {"metavar": arg.metavar, "type": arg.parse or _TYPES.get(inner)}
            if arg.choices or (isinstance(inner, type) and issubclass(inner, Enum)):
                more["choices"] = list(arg.choices or cast("type[Enum]", inner))
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            own = () if arg.flags and arg.flags[0].startswith("--") else (_flag(name),)
            flags = sorted(
                dict.fromkeys((*arg.flags, *own)), key=lambda flag: flag.startswith("--")
            )
            if is_list:
                more["action"] = "append"
            if inner is not bool:
                more["required"] = not has_default
                more["default"] = list(parameter.default) if is_list else parameter.default
            if not has_default:
                more.pop("default", None)
            place.add_argument(*flags, dest=name, **more)
            return
        if is_list:
            more["nargs"] = "*"
        elif has_default:
            more |= {"nargs": "?", "default": parameter.default}
        place.add_argument(name, **more)


_TYPES: Final[Mapping[object, Callable[[str], object]]] = {int: int}


def _flag(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"


def _switch(default: object) -> dict[str, object]:
    if default is False:
        return {"action": "store_true"}
    return {"action": argparse.BooleanOptionalAction, "default": default}


def _unwrapped(hint: object) -> tuple[object, Arg | None]:
    """The type of a parameter, and what is said about it."""
    if typing.get_origin(hint) is not Annotated:
        return hint, None
    kind, *more = typing.get_args(hint)
    return kind, next((one for one in more if isinstance(one, Arg)), None)


def _inner(kind: object) -> tuple[object, bool]:
    """The type of one value, and whether there may be several."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind, *_) = (one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) in (list, tuple, Sequence):
        return typing.get_args(kind)[0], True
    return kind, False


def _read_docstring(text: str) -> tuple[str, str, tuple[str, ...]]:
    """The line about a command, its description, and its examples."""
    body, _, below = text.partition(_EXAMPLES)
    first, _, rest = body.strip().partition("\n\n")
    first = " ".join(first.split()).removesuffix(".")
    paragraphs = [" ".join(one.split()) for one in rest.strip().split("\n\n") if one.strip()]
    examples: list[str] = []
    for line in inspect.cleandoc(below).splitlines():
        if examples and examples[-1].endswith("\\"):
            examples[-1] += f"\n{line.strip()}"
        elif line.strip():
            examples.append(line.strip())
    return f"{first[:1].lower()}{first[1:]}", "\n\n".join(paragraphs), tuple(examples)
