"""Every setting as a list: what it is about, its default and its bounds, for people to read.

Owns: the walk over the tree of `ister.config`; the example file; how settings are shown without
what is secret. Does not own: the settings themselves, their sentences (both are in
`ister.config`), or how documents and commands lay them out.

Everything here follows from the tree: settings that are added there appear here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Final

import yaml

from ister.base.limits import KIB
from ister.config.settings import Section, Setting, children, to_plain
from ister.config.tree import Config

_MASK: Final = "***"
_OPTIONS_SHOWN: Final = frozenset({"endpoint", "region"})
"""Options of a store that say where it is; all others may be secrets."""
_USER_IN_ADDRESS: Final = re.compile(r"(?<=://)[^/@\s]+@")
_WIDTH: Final = 96
_DATA_DEFAULT: Final = "./ister-data/wal"


def settings() -> list[Setting]:
    """Every setting, in the order of the tree."""
    return [item for item in _walk(Config) if isinstance(item, Setting)]


def sections() -> list[Section]:
    """Every section, in the order of the tree."""
    return [item for item in _walk(Config) if isinstance(item, Section)]


def value_of(config: Config, path: str) -> object:
    """What a setting is, as it is written in YAML.

    `path` is the setting's key, which has to exist.
    """
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return to_plain(value)


def masked(setting: Setting, value: object) -> object:
    """A setting's value as it may be shown: nothing of it that is secret."""
    if isinstance(value, Mapping):
        return {
            name: _without_user(text) if name in _OPTIONS_SHOWN else _MASK
            for name, text in value.items()
        }
    if value is not None and setting.is_secret:
        return _MASK
    if isinstance(value, list):
        return [_without_user(item) for item in value]
    return _without_user(value) if isinstance(value, str) else value


def example() -> str:
    """A config file with every setting, its default and its sentence.

    It loads to the settings of `ister serve` without arguments.
    """
    lines = [
        "# Every setting of Ister with its default. Keep what you change, drop the rest.",
        "# ${NAME} in a value is an environment variable, ${NAME:-text} one with a default;",
        "# ISTER_STORAGE__WAL__DIR overrides storage.wal.dir, and so for every key.",
    ]
    for item in _walk(Config):
        depth = item.path.count(".")
        indent = "  " * depth
        name = item.path.rpartition(".")[2]
        if isinstance(item, Section):
            if depth < 2:
                lines.append("")
            lines += _comment(item.says, indent)
            lines.append(f"{indent}{name}:")
            continue
        lines += _comment(item.says, indent)
        lines.append(f"{indent}{name}: {_in_yaml(item)}")
    return "\n".join(lines) + "\n"


def _walk(section: type, path: str = "") -> Iterator[Setting | Section]:
    """Settings before sections; a section before what is below it."""
    found = children(section, path).values()
    yield from (item for item in found if isinstance(item, Setting))
    for item in found:
        if isinstance(item, Section):
            yield item
            yield from _walk(item.type, item.path)


def _comment(text: str, indent: str) -> list[str]:
    width = _WIDTH - len(indent) - 2
    lines = wrap(text.replace("`", ""), width, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def _in_yaml(setting: Setting) -> str:
    """A default, and beside it what else it may be."""
    # Without a directory nothing works that is kept, and `ister serve` takes this one.
    value = _DATA_DEFAULT if setting.path == "storage.wal.dir" else setting.default
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=4096)
    text = text.removesuffix("\n").removesuffix("\n...")
    beside = []
    if isinstance(value, int) and value >= KIB and setting.shown_default != str(value):
        beside.append(setting.shown_default)
    if setting.choices:
        beside.append(" | ".join(setting.choices))
    elif setting.high is not None:
        beside.append(setting.bounds)
    return f"{text}  # {'; '.join(beside)}" if beside else text


def _without_user(text: str) -> str:
    # People put credentials into addresses.
    return _USER_IN_ADDRESS.sub(f"{_MASK}@", text)
