"""Reads settings from a mapping, a YAML file or a directory, and from the environment.

`${NAME}` in a value is replaced by the environment variable of that name (`${NAME:-text}` has a
default), and `ISTER_STORAGE__WAL__DIR` overrides `storage.wal.dir`. An unknown key is refused, with
the nearest one that exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from ister.config.aliases import ALIASES, UsedAlias, name_as_given, replace_aliases
from ister.config.checks import complete, find_contradictions
from ister.config.settings import VARIABLE_PREFIX
from ister.config.tree import Config
from ister.config.values import FromEnvironment, Refusal, build_section, expand_home
from ister.config.yaml_tree import TEXT_BYTES_MAX, Tree, YamlTree, parse_yaml
from ister.errors import ConfigError

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | None"

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_YAML_SUFFIXES: Final = (".yml", ".yaml")


class Origin(StrEnum):
    """Where a setting's value comes from."""

    DEFAULT = "default"
    FILE = "file"
    """The config file, or the mapping."""
    DIRECTORY = "directory"
    """The data directory that was named in place of a file."""
    ENVIRONMENT = "environment"
    """An `ISTER_…` variable; `${NAME}` in a file counts as the file's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that settings cannot be used with."""

    key: str | None
    """The setting concerned; None if it is the whole file."""
    message: str
    hint: str | None
    near: str | None = None
    """The key that was perhaps meant, where `key` does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What `examine_config` found."""

    config: Config | None
    """The settings; None if there are problems."""
    problems: tuple[Problem, ...]
    origins: Mapping[str, Origin]
    """Of every setting that was named somewhere; all others have their defaults."""
    lines: Mapping[str, int | None] = field(default_factory=dict)
    """The line of each key in the config file; None where the environment overrides it."""
    aliases: tuple[UsedAlias, ...] = ()
    """Keys that are other names of settings, and what they became."""


def load_config(source: ConfigSource, environment: Mapping[str, str] | None = None) -> Config:
    """Loads settings from a mapping, a file, a directory or nothing.

    Args:
        source: A mapping of the tree; the path of a `.yml` file; a directory for data (logs go to
            `wal` inside of it, objects to `objects`, metadata to `metadata.db`); or None, which
            keeps everything in memory.
        environment: Where `${NAME}` and `ISTER_…` are looked up; the process's by default.

    Raises:
        ConfigError: A key is unknown or given twice, a value is of the wrong kind or out of
            bounds, or two of them contradict each other. Names the key, and the line in a file.
    """
    examined, errors = _examine(source, environment)
    if examined.config is None:
        key, error, _ = errors[0]
        if (line := find_line(key, examined.lines)) is not None and error.path is None:
            error.path = f"{_path_of(source)}:{line}"
        raise error
    return examined.config


def examine_config(source: ConfigSource, environment: Mapping[str, str] | None = None) -> Examined:
    """Like `load_config`, but finds all problems instead of raising the first."""
    try:
        return _examine(source, environment)[0]
    except ConfigError as error:  # the source cannot be read at all
        problem = _describe(None, error, None)
        return Examined(config=None, problems=(problem,), origins={})


_Refused: TypeAlias = tuple[str | None, ConfigError, str | None]


def _examine(
    source: ConfigSource, environment: Mapping[str, str] | None
) -> tuple[Examined, list[_Refused]]:
    environment = os.environ if environment is None else environment
    read = _read_tree(source)
    refused: list[_Refused] = [(key, problem, None) for key, problem in read.problems]
    given_as: dict[str, str] = {}

    def refuse(key: str | None, error: ConfigError, near: str | None = None) -> None:
        name_as_given(error, given_as)
        refused.append((key, error, near))

    _apply_environment(read.tree, environment, refuse)
    aliases = replace_aliases(
        read.tree, lambda value: _expand(value, environment, "", _ignore), refuse
    )
    given_as |= {one.setting: one.key for one in aliases if one.setting is not None}
    is_directory = not isinstance(source, Mapping | None) and not _is_yaml(_path_of(source))
    origins = dict(_origins(read.tree, "", Origin.DIRECTORY if is_directory else Origin.FILE))
    tree = _expand_tree(read.tree, environment, "", refuse)
    config = build_section(Config, tree, "", refuse, [alias.key for alias in ALIASES])
    config.storage.cloud.given_as.update(given_as)
    # A refused value left its default behind: contradictions with that default are not news.
    doubtful = {key for key, _, _ in refused} | {near for _, _, near in refused}
    for keys, contradiction in find_contradictions(config, tree):
        if not doubtful & set(keys):
            refuse(keys[0], contradiction)
    lines = _lines(read, environment)
    lines |= {setting: lines.get(key) for setting, key in given_as.items()}
    examined = Examined(
        config=None if refused else complete(config, tree),
        problems=tuple(_describe(*one) for one in refused),
        origins=origins,
        lines=lines,
        aliases=tuple(aliases),
    )
    return examined, refused


def _describe(key: str | None, error: ConfigError, near: str | None) -> Problem:
    message = error.message if error.path is None else f"{error.message} ({error.path})"
    return Problem(key=key, message=message, hint=error.hint, near=near)


def find_line(key: str | None, lines: Mapping[str, int | None]) -> int | None:
    """The line of a key in a config file; for a missing key, the line of its section."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


def _read_tree(source: ConfigSource) -> YamlTree:
    if source is None:
        return YamlTree({"storage": {"mode": "memory"}})
    if isinstance(source, Mapping):
        return YamlTree(_copy(source))
    path = _path_of(source)
    if _is_yaml(path):
        return _read_yaml(path)
    return YamlTree({"storage": {"wal": {"dir": os.path.join(path, "wal")}}})


def _lines(read: YamlTree, environment: Mapping[str, str]) -> dict[str, int | None]:
    """The line of each key; None for those that the environment overrides."""
    return {**read.lines, **dict.fromkeys(".".join(keys) for _, keys in _overrides(environment))}


def _origins(tree: Tree, prefix: str, named: Origin) -> Iterator[tuple[str, Origin]]:
    """Of every value in a tree that the environment was applied to."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield path, named
            yield from _origins(value, f"{path}.", named)
        elif value is not None or not _is_null_by_default(path):
            is_override = isinstance(value, FromEnvironment)
            yield path, Origin.ENVIRONMENT if is_override else named


def _is_null_by_default(path: str) -> bool:
    value: object = Config()
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is None


def _is_yaml(path: str) -> bool:
    return path.endswith(_YAML_SUFFIXES)


def _path_of(source: object) -> str:
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"cannot open {source!r}",
            hint="a directory, the path of an ister.yml, a mapping, or nothing",
        )
    return expand_home(path)


def _copy(tree: Tree) -> dict[str, object]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _read_yaml(path: str) -> YamlTree:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file is not valid UTF-8: {error}", path=path) from error
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigError(f"the config file is larger than {TEXT_BYTES_MAX} bytes", path=path)
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"the config file is {error.message}", path=path) from error


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Environment variables that override settings, each with the path of its key."""
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and "__" in name:
            yield name, name.removeprefix(VARIABLE_PREFIX).lower().split("__")


def _apply_environment(
    tree: dict[str, object], environment: Mapping[str, str], refuse: Refusal
) -> None:
    for name, (*parents, last) in _overrides(environment):
        node = tree
        for parent in parents:
            child = node.get(parent)
            if child is None:
                child = node[parent] = {}
            if not isinstance(child, dict):
                text = f"{name} goes below {parent!r}, which is a single value"
                refuse(".".join((*parents, last)), ConfigError(text))
                break
            node = child
        else:
            node[last] = FromEnvironment(environment[name])


def _expand_tree(
    tree: Tree, environment: Mapping[str, str], path: str, refuse: Refusal
) -> dict[str, object]:
    """Replaces the references to variables in all values of a tree."""
    return {
        key: _expand(value, environment, f"{path}.{key}" if path else str(key), refuse)
        for key, value in tree.items()
    }


def _ignore(key: str | None, error: ConfigError, near: str | None = None) -> None:
    """Takes an error that is refused elsewhere."""


def _expand(value: object, environment: Mapping[str, str], key: str, refuse: Refusal) -> object:
    if isinstance(value, dict):
        return _expand_tree(value, environment, key, refuse)
    if isinstance(value, list | tuple):
        return [_expand(item, environment, key, refuse) for item in value]
    if not isinstance(value, str) or _REFERENCE.search(value) is None:
        return value

    def value_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        found: str | None = environment.get(name, default)
        if found is None:
            refuse(key, ConfigError(f"{key}: the environment has no variable {name}"))
            return match[0]
        return found

    return FromEnvironment(_REFERENCE.sub(value_of, value))
