"""Writes the pages of `docs/reference` that follow from the code.

    python -m tools.reference            writes what has changed
    python -m tools.reference --check    writes nothing; exit code 1 if a page is out of date

Owns: how settings, commands, metrics and the Python API are laid out as pages. Does not own: a
sentence of them; all of those are in the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ister.base.metrics import LEFT_OUT, METRICS
from ister.broker.http.api import ROUTES
from ister.cli.main import make_parser
from ister.cli.parser import Parser, walk_commands
from ister.config.aliases import ALIASES
from ister.config.reference import sections, settings
from ister.errors import IsterError
from tools.broker_operations import operations

_ROOT: Final = Path(__file__).resolve().parent.parent
_REFERENCE: Final = _ROOT / "docs" / "reference"
_NOTE: Final = "<!-- Made by `python -m tools.reference` from the code: edit the code instead. -->"

_MODULES: Final = {
    "ister": "Topics in this process: no broker, no Spark.",
    "ister.client": "Programs that talk to a broker: `pip install '.[client]'`.",
    "ister.testing": "A broker for the tests of your program: `pip install '.[broker,client]'`.",
    "ister.spark": "Topics as tables and streams: `pip install '.[spark]'`.",
    "ister.spark.jobs": "The jobs of the pipeline, as functions.",
}

_CONFIG_TEXT: Final = """\
One YAML file has all of them; each has a default. `${NAME}` in a value is an environment variable,
`${NAME:-text}` one with a default. Every setting can be given by an environment variable of its
own: `ISTER_STORAGE__WAL__DIR` is `storage.wal.dir`. An unknown key is refused, with the nearest one
that exists; a key that is set twice is refused, with both lines.

What an unquoted value means is up to its setting: `no` is false for a switch, and a name where a
name belongs; `1_000` is a number; `0100` and `1:30` are not. An option of a backend that is `yes`,
`no`, `on` or `off` has to be quoted, or written as `true` or `false`. `~` or `~user` at the start
of a path is a home directory.

`ister config example` prints a file with all settings and what they mean, `ister config check` says
what is wrong with one, and `ister config show` what is in force."""

_ALIASES_TEXT: Final = """\
Keys of Danube's design documents that are spelled differently here
([the documents' words](../howto/danube-words.md)). A key and its setting together are refused,
except where an environment variable overrides the file. `ister config check` and `show` say what a
key became."""

_CLI_TEXT: Final = """\
Exit codes: 0 done, 1 failed (or damage was found), 2 wrong usage. Errors go to standard error and
say what to do. With `--json` a command prints one JSON object, or one a line where it follows
something; fields are added and never renamed. Colours and tables are for terminals; `NO_COLOR` is
respected."""

_METRICS_TEXT: Final = """\
`http://127.0.0.1:9040/metrics` has them in Prometheus' text form. In a process without a broker,
`log.metrics.snapshot()` gives those that have a name in the last column. What to watch is in
[Monitor](../howto/monitoring.md), and what to do when an alarm rings in
[Alarms](../operations/alarms.md).

Names end with their unit, in Prometheus' base units: `_seconds`, `_bytes`; counters end with
`_total`. Names that begin with `danube_` are those of Danube's broker, so that its dashboards work;
three of them are in milliseconds (`_ms`). In process, names and units are those of the last
column."""

_PERMISSIONS_TEXT: Final = """\
What a caller needs, with `broker.auth.mode: token`. The HTTP paths lead to the operations beside
them, which check, audit and forward to the broker that has the topic. A permission on a namespace
holds for its topics, and one on the cluster for everything. Whoever may use or manage a topic may
look it up. A subscription that is restricted can be used and changed by its principals alone.
Flight asks for `consume` to read a topic, for `produce` to write to it, and for `lookup` to ask
where it ends."""

_PYTHON_TEXT: Final = """\
The names on this page, and no others, are what programs may rely on. Every error is an
`ister.IsterError`."""

_ERRORS_TEXT: Final = """\
Chosen by what the caller has to do. Each has a `code`, whether it is `retriable`, where it happened
(`topic`, `offset`, `path`, `position`) and a `hint`."""


# -- settings --------------------------------------------------------------------------------


def config_page() -> str:
    """Every setting."""
    lines = [
        "# Settings",
        "",
        _CONFIG_TEXT,
    ]
    found = settings()
    for section in sections():
        own = [one for one in found if one.path.rpartition(".")[0] == section.path]
        lines += ["", f"## {section.path}", "", section.says]
        if own:
            lines += ["", "| key | default | may be | what it is |", "|---|---|---|---|"]
        for one in own:
            lines.append(
                f"| `{one.path}` | {_cell(one.shown_default)} | {_cell(one.bounds)} | {one.says} |"
            )
    lines += ["", "## Other names", "", _ALIASES_TEXT, "", "| key | setting |", "|---|---|"]
    for alias in ALIASES:
        value = f"`{alias.setting}`"
        if alias.prefix:
            value += f", behind `{alias.prefix}`"
        if alias.backend is not None:
            value += f", with the backend `{alias.backend}`"
        lines.append(f"| `{alias.key}` | {value} |")
    return _page(lines)


# -- commands --------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command."""
    parser = make_parser()
    lines = [
        "# Commands",
        "",
        _CLI_TEXT,
    ]
    for command in walk_commands(parser):
        if command is parser:
            continue
        name = _name(command)
        lines += ["", f"{'#' * (name.count(' ') + 1)} {name}", ""]
        lines += ["```text", _synopsis(command), "```", ""]
        lines += [_markdown(_plain(command.description))] if command.description else []
        rows = [one for one in command.arguments if one.help != argparse.SUPPRESS]
        rows = [one for one in rows if not isinstance(one, argparse._HelpAction)]  # noqa: SLF001
        if rows:
            lines += ["", "| argument | what it is |", "|---|---|"]
        lines += [f"| {_invocation(one)} | {_cell(_help(one))} |" for one in rows]
        if command.epilog:
            lines += ["", "```text", _plain(command.epilog).strip("\n"), "```"]
    return _page(lines)


def _name(command: Parser) -> str:
    """`ister topics list`, without the arguments of the commands above it."""
    return " ".join(word for word in command.prog.split() if word.islower())


def _synopsis(command: Parser) -> str:
    words = [_name(command)]
    own = [one for one in command.arguments if one.help != argparse.SUPPRESS]
    if any(one.option_strings and not isinstance(one, argparse._HelpAction) for one in own):  # noqa: SLF001
        words.append("[OPTIONS]")
    words += [_positional(one) for one in own if not one.option_strings]
    if command.commands:
        words.append("COMMAND …")
    return " ".join(words)


def _positional(action: argparse.Action) -> str:
    name = _metavar(action)
    return {"?": f"[{name}]", "*": f"[{name} …]", "+": f"{name} …"}.get(str(action.nargs), name)


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is not None:
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_positional(action)}`"
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _help(action: argparse.Action) -> str:
    text = _plain(action.help or "")
    if "%(" in text:
        text = text % {**vars(action), "prog": "ister"}
    return text.replace("%%", "%")


# -- metrics ---------------------------------------------------------------------------------


def metrics_page() -> str:
    """Every metric."""
    lines = [
        "# Metrics",
        "",
        _METRICS_TEXT,
    ]
    for scope, title, says in (
        ("broker", "Of the broker", "Names that Danube's broker has mean the same here."),
        ("log", "Of the log", "Files, uploads and readers of the process."),
    ):
        lines += ["", f"## {title}", "", says, ""]
        lines += [
            "| metric | kind | unit | labels | meaning | in process |",
            "|---|---|---|---|---|---|",
        ]
        for metric in METRICS:
            if metric.scope == scope:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                name = f"`{metric.name}`" if scope == "log" else ""
                lines.append(
                    f"| `{metric.exposed}` | {metric.kind} | {metric.exposed_unit} | {labels} | "
                    f"{_cell(metric.description)} | {name} |"
                )
    lines += ["", "## Left out", "", "Metrics of Danube's broker that have no equivalent here:", ""]
    lines += ["| metric | why |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(why)} |" for name, why in LEFT_OUT]
    return _page(lines)


# -- permissions -----------------------------------------------------------------------------


def permissions_page() -> str:
    """What every operation of the broker needs, by gRPC and by HTTP."""
    paths: dict[str, list[str]] = {}
    own = []
    for route in ROUTES:
        path = f"`{route.method} {route.path}`"
        if isinstance(route.needs, str):
            own.append(f"| {path} | {route.needs} |")
        else:
            paths.setdefault(route.needs.path[1:], []).append(path)
    lines = ["# Permissions", "", _PERMISSIONS_TEXT, ""]
    lines += ["| operation (gRPC) | HTTP | needs |", "|---|---|---|"]
    lines += [
        f"| `{path}` | {', '.join(paths.get(path, ()))} | {need.words} |"
        for path, need in operations()
    ]
    lines += ["", "## HTTP alone", "", "| path | needs |", "|---|---|", *own]
    return _page(lines)


# -- the Python API --------------------------------------------------------------------------


def python_page() -> str:
    """Every public name."""
    lines = [
        "# Python API",
        "",
        _PYTHON_TEXT,
    ]
    for module_name, says in _MODULES.items():
        module = importlib.import_module(module_name)
        lines += ["", f"## {module_name}", "", says]
        errors: list[type[IsterError]] = []
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, IsterError):
                errors.append(value)
            elif inspect.isclass(value):
                lines += _class(module_name, name, value)
            elif callable(value):
                lines += ["", f"### {module_name}.{name}", "", *_callable(name, value)]
        if errors:
            lines += _errors(errors)
    return _page(lines)


def _errors(errors: Sequence[type[IsterError]]) -> list[str]:
    lines = [
        "",
        "### Errors",
        "",
        _ERRORS_TEXT,
        "",
        "| error | is a | code | retriable | when |",
        "|---|---|---|---|---|",
    ]
    for error in errors:
        base = error.__mro__[1].__name__
        first = _cell(" ".join(_first_paragraph(error).split()))
        retriable = "yes" if error.retriable else "no"
        lines.append(f"| `{error.__name__}` | `{base}` | `{error.code}` | {retriable} | {first} |")
    return lines


def _class(module: str, name: str, kind: type) -> list[str]:
    lines = ["", f"### {module}.{name}", ""]
    if issubclass(kind, enum.Enum):
        values = ", ".join(f"`{item.value}`" for item in kind)
        return [*lines, _first_paragraph(kind), "", f"One of {values}."]
    if "__init__" in vars(kind) and not dataclasses.is_dataclass(kind) and kind.__doc__:
        lines += [
            "```text",
            f"{name}{_signature(kind.__init__)}".removesuffix(" -> None"),
            "```",
            "",
        ]
    lines += _docstring(kind)
    fields = _fields(kind)
    if fields:
        lines += ["", "| attribute | what it is |", "|---|---|"]
        lines += [f"| `{field}` | {_cell(text)} |" for field, text in fields]
    for member_name, member in _members(kind):
        lines += ["", f"#### {name}.{member_name}", "", *_callable(member_name, member)]
    return lines


def _fields(kind: type) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if dataclasses.is_dataclass(kind):
        found += [
            (one.name, str(one.type)) for one in dataclasses.fields(kind) if one.name[0] != "_"
        ]
    for name, value in _own(kind):
        if isinstance(value, property):
            found.append((name, " ".join(_first_paragraph(value).split())))
    return found


def _members(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in _own(kind):
        member = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(member) and member.__doc__:
            yield name, member


def _own(kind: type) -> Iterator[tuple[str, Any]]:
    """Public members of a class and of its bases of this project, each once."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("ister"):
            continue
        for name, value in vars(base).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, value


def _callable(name: str, value: Callable[..., Any]) -> list[str]:
    prefix = "async " if inspect.iscoroutinefunction(value) else ""
    return ["```text", f"{prefix}{name}{_signature(value)}", "```", "", *_docstring(value)]


def _signature(value: Callable[..., Any]) -> str:
    """As it stands in the source: the same under every version of Python."""
    signature = inspect.signature(value)
    parts: list[str] = []
    is_keyword = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        text = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, is_keyword = f"*{text}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty or returns is None else f" -> {_annotation(returns)}"
    line = f"({', '.join(parts)}){arrow}"
    if len(line) <= 80:
        return line
    inner = "".join(f"    {part},\n" for part in parts)
    return f"(\n{inner}){arrow}"


def _annotation(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def _default(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "…" if " at 0x" in text else text


def _docstring(value: object) -> list[str]:
    text = inspect.getdoc(value) or ""
    return _google(text).splitlines()


_HEADING: Final = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note):$")


def _google(text: str) -> str:
    """A docstring as Markdown: its sections become lists, what is indented stays as it is."""
    out: list[str] = []
    section = ""
    is_code = False
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            section = heading[1]
            out += ["", f"**{section}**", ""]
            continue
        if section and (not line or line.startswith(" ")):
            out += _item(line, section)
            continue
        section = ""
        if line.startswith("    ") and not is_code:
            out += ["", "```text"]
            is_code = True
        elif is_code and line and not line.startswith("    "):
            out += ["```", ""]
            is_code = False
        out.append(line.removeprefix("    ") if is_code else _markdown(line))
    if is_code:
        out.append("```")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip("\n")


def _item(line: str, section: str) -> list[str]:
    named = re.match(r"^    (\*{0,2}[\w.]+)(?: \([^)]*\))?: (.*)$", line)
    if named and section not in {"Returns", "Yields"}:
        return [f"- `{named[1]}`: {_markdown(named[2])}"]
    if not line.strip():
        return []
    text = _markdown(line.strip())
    if section in {"Returns", "Yields", "Note"}:
        return [text]
    return [f"  {text}"]


# -- all of it -------------------------------------------------------------------------------


def _first_paragraph(value: object) -> str:
    return _markdown((inspect.getdoc(value) or "").split("\n\n")[0])


def _plain(text: str) -> str:
    """Without what only terminals show."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _markdown(text: str) -> str:
    """Text in which an angle bracket is one."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else piece.replace("<", "&lt;").replace("*", "\\*")
        for piece in pieces
    )


def _cell(text: str) -> str:
    return _markdown(" ".join(text.split())).replace("|", "\\|")


def _page(lines: Sequence[str]) -> str:
    head, *rest = lines
    text = "\n".join([head, "", _NOTE, *rest]) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "config.md": config_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
    "permissions.md": permissions_page,
    "python-api.md": python_page,
}


def render(name: str) -> str:
    """A page as it has to be."""
    return PAGES[name]()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pages that follow from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is old")
    options = parser.parse_args(arguments)
    old = [
        name
        for name in PAGES
        if not (_REFERENCE / name).exists() or (_REFERENCE / name).read_text() != render(name)
    ]
    for name in old:
        sys.stdout.write(f"{name} is out of date\n" if options.check else f"{name} is written\n")
        if not options.check:
            (_REFERENCE / name).write_text(render(name))
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
