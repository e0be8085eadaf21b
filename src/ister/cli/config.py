"""`ister config check|show|example|bucket`: checks, shows and explains settings.

Owns: arguments, output, exit code. Does not own: settings (`ister.config`),
the checks (`config_check`).

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
from typing import Annotated, Self

from ister.base.clock import SystemClock
from ister.cli.command import Arg, Facts, Group, Shown, Table, Yes, command, confirmed
from ister.cli.config_check import (
    Connection,
    describe_places,
    find_deeper_problems,
    try_connections,
)
from ister.cli.location import CONFIG_VARIABLE, DATA_DEFAULT, check_config_name
from ister.cli.output import console, is_terminal, print_facts, print_table
from ister.config import Config, Examined, Origin, Problem, examine_config, find_line, load_config
from ister.config.reference import example, masked, settings, value_of
from ister.config.settings import Setting
from ister.errors import ConfigError
from ister.topic.stores import open_identity

CONFIG = Group(
    "config",
    "check and show settings, print an example",
    description="Settings come from the environment (`ISTER_…` variables), the config file and the "
    "defaults, in this order of precedence.",
    examples=(
        "ister config check ister.yml --connect",
        "ister config show --only-changed",
        "ister config example > ister.yml",
    ),
)
register = CONFIG.register


class Source:
    """The config file or the directory whose settings are meant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file: str | None = options.file or options.config
        self._data: str | None = options.data

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the file, `--config` and `--data`."""
        place = parser.add_mutually_exclusive_group()
        place.add_argument(
            "file",
            metavar="FILE",
            nargs="?",
            help=f"config file (default: ${CONFIG_VARIABLE} if set, "
            f"else the settings for {DATA_DEFAULT})",
        )
        place.add_argument("--config", metavar="FILE", help="the config file, as FILE")
        place.add_argument("--data", metavar="DIR", help="the settings for this data directory")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """The one that was named."""
        return cls(options)

    @property
    def path(self) -> str:
        """Where the settings come from; a directory ends with a slash.

        Raises:
            ConfigError: A file is meant, and its name is not that of one.
        """
        if self._data is not None:
            return os.path.join(self._data, "")
        file = self._file or os.environ.get(CONFIG_VARIABLE) or None
        return DATA_DEFAULT if file is None else check_config_name(file)


# -- check ----------------------------------------------------------------------------------


@command(CONFIG, "check", failed={"ok": False, "source": None, "problems": []})
def check(
    source: Source,
    *,
    connect: Annotated[
        bool,
        Arg("also connect to the disk, the bucket and the metadata store; leaves nothing behind"),
    ] = False,
) -> Shown:
    """Find the problems of a config file.

    Reports every problem of a config file and of the `ISTER_…` variables with its line, its key and
    the nearest valid key. If there is none, shows the directories, stores and addresses in use.
    Exit code 1 if there is a problem.

    Examples:
        ister config check ister.yml
        ister config check ister.yml --connect
        ister config check --json
    """
    path = source.path
    examined = examine_config(path)
    problems = list(examined.problems)
    if examined.config is not None:
        problems += find_deeper_problems(examined.config)
    places = describe_places(examined.config) if examined.config and not problems else {}
    connections: list[Connection] = []
    if connect and examined.config is not None and not problems:
        connections += try_connections(examined.config)
    errors = []
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        errors = [ConfigError(f"{path}: {count}")]
    elif failures := [item.name for item in connections if not item.is_ok]:
        errors = [ConfigError(f"{path}: does not work: {', '.join(failures)}")]
    return Shown(
        {
            "ok": not errors,
            "source": path,
            "problems": [
                {**asdict(problem), "line": find_line(problem.key, examined.lines)}
                for problem in problems
            ],
            "aliases": [asdict(alias) for alias in examined.aliases],
            "places": places,
            "connections": [asdict(item) for item in connections],
        },
        lambda: _print_check(path, problems, examined, places, connections),
        not errors,
        errors=errors,
    )


def _print_check(
    source: str,
    problems: Sequence[Problem],
    examined: Examined,
    places: Mapping[str, str],
    connections: Sequence[Connection],
) -> None:
    if problems:
        for problem in problems:
            _print_problem(problem, source, find_line(problem.key, examined.lines))
        return
    print_facts(places, title=f"{source}: the settings can be used")
    _print_aliases(examined)
    if connections:
        print()
        print_table(
            ("tried", "result", "what was found"),
            [(item.name, "ok" if item.is_ok else "failed", item.says) for item in connections],
        )
        for item in connections:
            if item.hint is not None:
                print(f"{item.name}: {item.hint}")


def _print_aliases(examined: Examined) -> None:
    """Prints what keys that are other names of settings became."""
    if examined.aliases:
        print()
        rows = [(one.key, one.setting or f"not used: {one.reason}") for one in examined.aliases]
        print_table(("given", "read as"), rows)


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


@command(CONFIG, "show", failed={"source": None, "aliases": [], "settings": []})
def show(
    source: Source,
    *,
    only_changed: Annotated[bool, Arg("leave out settings with their default value")] = False,
) -> Shown:
    """Show the settings in force and where each comes from.

    Shows every setting and whether it comes from the environment, the file or the defaults. Secrets
    are redacted.

    Examples:
        ister config show ister.yml
        ister config show ister.yml --only-changed
        ister config show --data ./ister-data --json
    """
    path = source.path
    examined = examine_config(path)
    config = examined.config
    if config is None:
        first, more = examined.problems[0], len(examined.problems) - 1
        raise ConfigError(
            first.message + (f", and {more} more" if more else ""),
            hint=f"`ister config check {path}` shows all of it",
        )
    shown = [
        (setting, masked(setting, value_of(config, setting.path)), _origin(setting, examined))
        for setting in settings()
    ]
    if only_changed:
        shown = [item for item in shown if _is_changed(item[0], config, item[2])]
    rows = [(setting.path, _in_words(value), origin.value) for setting, value, origin in shown]
    table = Table(("setting", "value", "from"), rows, empty="all settings have their defaults")
    return Shown(
        {
            "source": path,
            "aliases": [asdict(alias) for alias in examined.aliases],
            "settings": [
                {"key": setting.path, "value": value, "from": origin.value}
                for setting, value, origin in shown
            ],
        },
        [table, lambda: _print_aliases(examined)],
    )


def _origin(setting: Setting, examined: Examined) -> Origin:
    """Where a setting comes from; of a mapping, whether any of its entries was overridden."""
    origins = examined.origins
    below = {origin for path, origin in origins.items() if path.startswith(f"{setting.path}.")}
    if Origin.ENVIRONMENT in below:
        return Origin.ENVIRONMENT
    return origins.get(setting.path, Origin.DEFAULT)


def _is_changed(setting: Setting, config: Config, origin: Origin) -> bool:
    return origin is not Origin.DEFAULT and value_of(config, setting.path) != setting.default


def _in_words(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False) if value else None
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- bucket ---------------------------------------------------------------------------------


@command(CONFIG, "bucket", failed={"source": None, "accepted": False})
def bucket(
    source: Source,
    *,
    accept: Annotated[
        bool,
        Arg("make this bucket the one that the metadata store expects; stop all brokers first"),
    ] = False,
    yes: Yes = False,
) -> Shown:
    """Show the bucket's id, or accept another bucket.

    Shows the id of the bucket and the one that the metadata store expects. Brokers start only if
    they are equal. Exit code 1 if they are not.

    Examples:
        ister config bucket ister.yml
        ister config bucket ister.yml --accept --yes
    """
    path = source.path
    storage = load_config(path).storage
    if not storage.mode.has_bucket:
        raise ConfigError(f"storage.mode {storage.mode.value} has no bucket", path=path)
    with open_identity(storage, SystemClock(), read_only=not accept) as identity:
        if accept:
            confirmed(f"Make {identity.location} the bucket of this metadata store?", yes=yes)
            identity.accept()
        found, recorded = identity.read()
    found_id = found.id if found is not None else None
    is_ok = recorded is None or found_id == recorded.id
    unknown = "recorded when a broker starts" if is_ok else "missing"
    return Shown(
        {
            "source": path,
            "ok": is_ok,
            "accepted": accept,
            "bucket": identity.location,
            "id": found_id,
            "expected": recorded.id if recorded is not None else None,
        },
        Facts(
            {
                "bucket": identity.location,
                "its id": found_id or unknown,
                "expected": f"{recorded.id} ({recorded.location})" if recorded else unknown,
            }
        ),
        is_ok,
    )


# -- example --------------------------------------------------------------------------------


@command(CONFIG, "example", json="print the settings as one JSON object instead of YAML")
def print_example() -> Shown:
    """Print a config file with every setting and its default.

    Prints a config file with every setting, its description, its allowed values and its default.
    The file can be used unchanged.

    Examples:
        ister config example > ister.yml
        ister config example --json
    """
    names = ("default", "kind", "low", "high", "is_optional", "is_secret", "says", "variable")
    found = [
        {
            "key": setting.path,
            "choices": list(setting.choices),
            **{name: getattr(setting, name) for name in names},
        }
        for setting in settings()
    ]
    return Shown({"settings": found}, lambda: print(example(), end=""))
