"""`ister config check|show|example`: settings, looked at before something is run with them.

Owns: arguments, output, exit code. Does not own: what settings mean and say (`ister.config`,
`ister.config_reference`), the checks (`config_check`).

Exit code 1 means that the settings cannot be used, or that a store does not answer. Nothing secret
is ever shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from ister.cli.config_check import (
    Connection,
    describe_places,
    find_deeper_problems,
    try_connections,
)
from ister.cli.look import (
    add_command,
    console,
    is_terminal,
    print_error,
    print_facts,
    print_table,
)
from ister.cli.report import answer, error_as_json, print_json
from ister.config import Config, Examined, Origin, Problem, examine_config, find_line
from ister.config_reference import Setting, example, masked, settings, value_of
from ister.errors import ConfigError, IsterError

__all__ = ["register"]

_DATA_DEFAULT: Final = "./ister-data"
_VARIABLE: Final = "ISTER_CONFIG"
_SUFFIXES: Final = (".yml", ".yaml")


def register(commands: Any) -> None:  # noqa: ANN401 - argparse's sub-parsers have no public type
    """Adds the command."""
    parser = add_command(
        commands,
        "config",
        help="check, show and explain settings",
        description="Settings come from a config file, from `ISTER_…` variables of the "
        "environment, and from defaults, in this order of who wins: environment, file, default.",
        examples=(
            "ister config check ister.yml --connect",
            "ister config show --only-changed",
            "ister config example > ister.yml",
        ),
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    check = add_command(
        actions,
        "check",
        help="find what is wrong with a config file",
        description="Finds every problem of a config file and of the `ISTER_…` variables, with "
        "the line, the key, and the nearest key that exists; says where things will be if "
        "there is none. Exit code 1 if there is a problem.",
        examples=(
            "ister config check ister.yml",
            "ister config check ister.yml --connect",
            "ister config check --json",
        ),
    )
    _add_place(check)
    check.add_argument(
        "--connect",
        action="store_true",
        help="also try the disk, the bucket and the metadata store; leaves nothing behind",
    )
    check.set_defaults(run=_check)

    show = add_command(
        actions,
        "show",
        help="the settings in force, and where each comes from",
        description="Shows every setting after file and environment, and whether it comes from "
        "one of them or is the default. Secrets are never shown.",
        examples=(
            "ister config show ister.yml",
            "ister config show ister.yml --only-changed",
            "ister config show --data ./ister-data --json",
        ),
    )
    _add_place(show)
    show.add_argument("--only-changed", action="store_true", help="leave out what has its default")
    show.set_defaults(run=_show)

    sample = add_command(
        actions,
        "example",
        help="a config file with every setting and its default",
        description="Prints a config file with every setting, what it is about, what it may be, "
        "and its default. It can be used as it is.",
        examples=("ister config example > ister.yml", "ister config example --json"),
    )
    sample.add_argument(
        "--json", action="store_true", help="the settings as one JSON object, not as YAML"
    )
    sample.set_defaults(run=_example)


def _add_place(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help=f"the config file, an ister.yml (default: ${_VARIABLE} if set, else the settings "
        f"for {_DATA_DEFAULT})",
    )
    place.add_argument("--config", metavar="FILE", help="the config file, as FILE")
    place.add_argument("--data", metavar="DIR", help="the settings for this data directory")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _source(options: argparse.Namespace) -> str:
    """The config file or the directory that is meant.

    Raises:
        ConfigError: A file is meant, and its name is not that of one.
    """
    if options.data is not None:
        return os.path.join(options.data, "")
    file: str | None = options.file or options.config or os.environ.get(_VARIABLE) or None
    if file is None:
        return _DATA_DEFAULT
    if not file.endswith(_SUFFIXES):
        raise ConfigError(
            "a config file has a name that ends with .yml or .yaml",
            path=file,
            hint="--data names a directory",
        )
    return file


# -- check ----------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    def failed(error: IsterError) -> Mapping[str, Any]:
        return {"ok": False, "source": None, "problems": [], "errors": [error_as_json(error)]}

    return answer(lambda: _check_source(options), as_json=options.json, on_error=failed)


def _check_source(options: argparse.Namespace) -> int:
    source = _source(options)
    examined = examine_config(source)
    problems = list(examined.problems)
    if examined.config is not None:
        problems += find_deeper_problems(examined.config)
    places = describe_places(examined.config) if examined.config and not problems else {}
    connections: list[Connection] = []
    if options.connect and examined.config is not None and not problems:
        connections += try_connections(examined.config)
    is_ok = not problems and all(item.is_ok for item in connections)
    if options.json:
        print_json(
            {
                "ok": is_ok,
                "source": source,
                "problems": [
                    {**asdict(problem), "line": find_line(problem.key, examined.lines)}
                    for problem in problems
                ],
                "places": places,
                "connections": [asdict(item) for item in connections],
            }
        )
    else:
        _print_check(source, problems, examined.lines, places, connections)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print_error(f"{source}: {count}")
    elif not is_ok:
        failures = [item.name for item in connections if not item.is_ok]
        print_error(f"{source}: does not work: {', '.join(failures)}")
    return 0 if is_ok else 1


def _print_check(
    source: str,
    problems: Sequence[Problem],
    lines: Mapping[str, int | None],
    places: Mapping[str, str],
    connections: Sequence[Connection],
) -> None:
    if problems:
        for problem in problems:
            _print_problem(problem, source, find_line(problem.key, lines))
        return
    print_facts(places, title=f"{source}: the settings can be used")
    if connections:
        print()
        print_table(
            ("tried", "result", "what was found"),
            [(item.name, "ok" if item.is_ok else "failed", item.says) for item in connections],
        )
        for item in connections:
            if item.hint is not None:
                print(f"{item.name}: {item.hint}")


def _print_problem(problem: Problem, source: str, line: int | None) -> None:
    """A line in the form of compilers, which editors know; on a terminal, what to do below."""
    where = source if line is None else f"{source}:{line}"
    hint = f"did you mean {problem.near!r}?" if problem.near else problem.hint
    message = problem.message.removesuffix(f" ({source})")
    if not is_terminal(sys.stdout):
        print(f"{where}: {message}" + (f"; {hint}" if hint else ""))
        return
    from rich.text import Text  # noqa: PLC0415 - only on a terminal

    shown = Text.assemble((f"{where}: ", "bold"), (message, "red"))
    if hint:
        shown.append(f"\n    {hint}", style="yellow")
    console().print(shown)


# -- show -----------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    def failed(error: IsterError) -> Mapping[str, Any]:
        return {"source": None, "settings": [], "errors": [error_as_json(error)]}

    return answer(lambda: _show_source(options), as_json=options.json, on_error=failed)


def _show_source(options: argparse.Namespace) -> int:
    source = _source(options)
    examined = examine_config(source)
    config = examined.config
    if config is None:
        first, more = examined.problems[0], len(examined.problems) - 1
        raise ConfigError(
            first.message + (f", and {more} more" if more else ""),
            hint=f"`ister config check {source}` shows all of it",
        )
    shown = [
        (setting, masked(setting, value_of(config, setting.path)), _origin(setting, examined))
        for setting in settings()
    ]
    if options.only_changed:
        shown = [item for item in shown if _is_changed(item[0], config, item[2])]
    if options.json:
        print_json(
            {
                "source": source,
                "settings": [
                    {"key": setting.path, "value": value, "from": origin.value}
                    for setting, value, origin in shown
                ],
            }
        )
        return 0
    if not shown:
        print("every setting has its default")
        return 0
    rows = [
        (setting.path, _in_words(setting, value), origin.value) for setting, value, origin in shown
    ]
    print_table(("setting", "value", "from"), rows)
    return 0


def _origin(setting: Setting, examined: Examined) -> Origin:
    """Where a setting comes from; of a mapping, whether any of its entries was overridden."""
    origins = examined.origins
    below = {origin for path, origin in origins.items() if path.startswith(f"{setting.path}.")}
    if Origin.ENVIRONMENT in below:
        return Origin.ENVIRONMENT
    return origins.get(setting.path, Origin.DEFAULT)


def _is_changed(setting: Setting, config: Config, origin: Origin) -> bool:
    return origin is not Origin.DEFAULT and value_of(config, setting.path) != setting.default


def _in_words(setting: Setting, value: Any) -> str | None:  # noqa: ANN401 - of any kind
    if value is None:
        return None
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False) if value else None
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- example --------------------------------------------------------------------------------


def _example(options: argparse.Namespace) -> int:
    if options.json:
        print_json(
            {
                "settings": [
                    {
                        "key": setting.path,
                        "default": setting.default,
                        "kind": setting.kind,
                        "choices": list(setting.choices),
                        "low": setting.low,
                        "high": setting.high,
                        "is_optional": setting.is_optional,
                        "is_secret": setting.is_secret,
                        "says": setting.says,
                        "variable": setting.variable,
                    }
                    for setting in settings()
                ]
            }
        )
    else:
        print(example(), end="")
    return 0
