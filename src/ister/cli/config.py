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

from ister.base.clock import SystemClock
from ister.cli.config_check import (
    Connection,
    describe_places,
    find_deeper_problems,
    try_connections,
)
from ister.cli.errors_out import answer, print_json
from ister.cli.location import CONFIG_VARIABLE, DATA_DEFAULT, check_config_name
from ister.cli.output import (
    Subparsers,
    add_command,
    confirm,
    console,
    is_terminal,
    print_error,
    print_facts,
    print_table,
)
from ister.config import Config, Examined, Origin, Problem, examine_config, find_line, load_config
from ister.config.reference import example, masked, settings, value_of
from ister.config.settings import Setting
from ister.errors import ConfigError
from ister.topic.stores import open_identity


def register(commands: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "config",
        help="check and show settings, print an example",
        description="Settings come from the environment (`ISTER_…` variables), the config "
        "file and the defaults, in this order of precedence.",
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
        help="find the problems of a config file",
        description="Reports every problem of a config file and of the `ISTER_…` variables "
        "with its line, its key and the nearest valid key. If there is none, shows the "
        "directories, stores and addresses in use. Exit code 1 if there is a problem.",
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
        help="also connect to the disk, the bucket and the metadata store; leaves nothing behind",
    )
    check.set_defaults(run=_check)

    show = add_command(
        actions,
        "show",
        help="show the settings in force and where each comes from",
        description="Shows every setting and whether it comes from the environment, the file "
        "or the defaults. Secrets are redacted.",
        examples=(
            "ister config show ister.yml",
            "ister config show ister.yml --only-changed",
            "ister config show --data ./ister-data --json",
        ),
    )
    _add_place(show)
    show.add_argument(
        "--only-changed", action="store_true", help="leave out settings with their default value"
    )
    show.set_defaults(run=_show)

    sample = add_command(
        actions,
        "example",
        help="print a config file with every setting and its default",
        description="Prints a config file with every setting, its description, its allowed "
        "values and its default. The file can be used unchanged.",
        examples=("ister config example > ister.yml", "ister config example --json"),
    )
    sample.add_argument(
        "--json", action="store_true", help="print the settings as one JSON object instead of YAML"
    )
    sample.set_defaults(run=_example)

    bucket = add_command(
        actions,
        "bucket",
        help="show the bucket's id, or accept another bucket",
        description="Shows the id of the bucket and the one that the metadata store expects. "
        "Brokers start only if they are equal. Exit code 1 if they are not.",
        examples=("ister config bucket ister.yml", "ister config bucket ister.yml --accept --yes"),
    )
    _add_place(bucket)
    bucket.add_argument(
        "--accept",
        action="store_true",
        help="make this bucket the one that the metadata store expects; stop all brokers first",
    )
    bucket.add_argument("--yes", action="store_true", help="skip the confirmation")
    bucket.set_defaults(run=_bucket)


def _add_place(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _source(options: argparse.Namespace) -> str:
    """The config file or the directory that is meant.

    Raises:
        ConfigError: A file is meant, and its name is not that of one.
    """
    if options.data is not None:
        return os.path.join(options.data, "")
    file: str | None = options.file or options.config or os.environ.get(CONFIG_VARIABLE) or None
    return DATA_DEFAULT if file is None else check_config_name(file)


# -- check ----------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    return answer(
        options, lambda: _check_source(options), {"ok": False, "source": None, "problems": []}
    )


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
                "aliases": [asdict(alias) for alias in examined.aliases],
                "places": places,
                "connections": [asdict(item) for item in connections],
            }
        )
    else:
        _print_check(source, problems, examined, places, connections)
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


def _show(options: argparse.Namespace) -> int:
    return answer(
        options, lambda: _show_source(options), {"source": None, "aliases": [], "settings": []}
    )


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
                "aliases": [asdict(alias) for alias in examined.aliases],
                "settings": [
                    {"key": setting.path, "value": value, "from": origin.value}
                    for setting, value, origin in shown
                ],
            }
        )
        return 0
    if not shown:
        print("all settings have their defaults")
        _print_aliases(examined)
        return 0
    rows = [(setting.path, _in_words(value), origin.value) for setting, value, origin in shown]
    print_table(("setting", "value", "from"), rows)
    _print_aliases(examined)
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


def _in_words(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False) if value else None
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- bucket ---------------------------------------------------------------------------------


def _bucket(options: argparse.Namespace) -> int:
    return answer(options, lambda: _show_bucket(options), {"source": None, "accepted": False})


def _show_bucket(options: argparse.Namespace) -> int:
    source = _source(options)
    storage = load_config(source).storage
    if not storage.mode.has_bucket:
        raise ConfigError(f"storage.mode {storage.mode.value} has no bucket", path=source)
    with open_identity(storage, SystemClock(), read_only=not options.accept) as identity:
        if not options.accept:
            found, recorded = identity.read()
        elif confirm(
            f"Make {identity.location} the bucket of this metadata store?", is_confirmed=options.yes
        ):
            found = recorded = identity.accept()
        else:
            return 1
    is_ok = recorded is None or (found is not None and found.id == recorded.id)
    if options.json:
        print_json(
            {
                "source": source,
                "ok": is_ok,
                "accepted": options.accept,
                "bucket": identity.location,
                "id": found.id if found is not None else None,
                "expected": recorded.id if recorded is not None else None,
            }
        )
    else:
        unknown = "recorded when a broker starts" if is_ok else "missing"
        print_facts(
            {
                "bucket": identity.location,
                "its id": found.id if found is not None else unknown,
                "expected": f"{recorded.id} ({recorded.location})" if recorded else unknown,
            }
        )
    return 0 if is_ok else 1


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
