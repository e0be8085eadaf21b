"""Every setting as a list: what it is about, its default and its bounds, for people to read.

Owns: the walk over the tree of `ister.config`; the example file; how settings are shown without
what is secret. Does not own: the settings themselves, their sentences (both are in
`ister.config`), or how documents and commands lay them out.

Everything here follows from the tree: a setting that is added there is here by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from textwrap import wrap
from typing import Any, Final

import yaml

from ister.config import Config
from ister.limits import GIB, KIB, MIB

__all__ = [
    "Section",
    "Setting",
    "example",
    "masked",
    "sections",
    "settings",
    "value_of",
]

_VARIABLE_PREFIX: Final = "ISTER_"
_MASK: Final = "***"
_OPTIONS_SHOWN: Final = frozenset({"endpoint", "region"})
"""Options of a store that say where it is; all others may be somebody's secret."""
_USER_IN_ADDRESS: Final = re.compile(r"(?<=://)[^/@\s]+@")
_WIDTH: Final = 96
_DATA_DEFAULT: Final = "./ister-data/wal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    path: str
    """Its key, such as `storage.wal.dir`."""
    default: Any
    """As it is written in YAML: a text, a number, true or false, None, a list or a mapping."""
    kind: str
    """`text`, `number`, `switch` (true or false), `choice`, `list` (of texts) or `mapping`."""
    choices: tuple[str, ...]
    """What it may be, if it is a choice."""
    says: str
    """What it is about: a sentence, with Markdown's backquotes."""
    low: int | None
    """A number's least value."""
    high: int | None
    """A number's largest value."""
    is_optional: bool
    """Whether it may be null."""
    is_secret: bool
    """Whether it is never shown."""

    @property
    def variable(self) -> str:
        """The environment variable that overrides it."""
        return _VARIABLE_PREFIX + self.path.upper().replace(".", "__")

    @property
    def shown_default(self) -> str:
        """Its default for people: sizes in their units, nothing as `none`."""
        if self.default is None or self.default in ([], {}):
            return "none"
        if isinstance(self.default, list):
            return ", ".join(self.default)
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, int) and self.path.endswith(("_bytes", "_size")):
            return _size(self.default)
        return str(self.default)

    @property
    def bounds(self) -> str:
        """What it may be, in words; empty if that goes without saying."""
        if self.choices:
            return ", ".join(self.choices)
        is_size = self.path.endswith(("_bytes", "_size"))
        low, high = (
            None if bound is None else _size(bound) if is_size else str(bound)
            for bound in (self.low, self.high)
        )
        if low is not None and high is not None:
            return f"{low} to {high}"
        return f"at least {low}" if low is not None else f"at most {high}" if high else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Settings that belong together."""

    path: str
    """Their common key, such as `storage.wal`."""
    says: str
    """What they are about."""


def settings() -> list[Setting]:
    """Every setting, in the order of the tree."""
    return [item for item in _walk(Config, "") if isinstance(item, Setting)]


def sections() -> list[Section]:
    """Every section, in the order of the tree."""
    return [item for item in _walk(Config, "") if isinstance(item, Section)]


def value_of(config: Config, path: str) -> Any:  # noqa: ANN401 - of any kind
    """What a setting is, as it is written in YAML.

    Args:
        config: Where to look.
        path: The setting's key; it has to exist.
    """
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return _plain(value)


def masked(setting: Setting, value: Any) -> Any:  # noqa: ANN401 - of any kind
    """A setting's value as it may be shown: nothing of it that is secret.

    Args:
        setting: Which one.
        value: What it is.
    """
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
    for item in _walk(Config, ""):
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


def _walk(kind: type, prefix: str) -> Iterator[Setting | Section]:
    """A section comes before its settings, and simple ones before sections below."""
    below: list[tuple[str, Any]] = []
    for item in fields(kind):
        factory = item.default_factory
        default = item.default if factory is MISSING else factory()
        path = f"{prefix}{item.name}"
        if is_dataclass(default):
            below.append((path, type(default)))
            continue
        is_number = bool(item.metadata["is_number"])
        yield Setting(
            path=path,
            default=_plain(default),
            kind=_kind(default, is_number=is_number),
            choices=tuple(type(default)) if isinstance(default, StrEnum) else (),
            says=item.metadata["says"],
            low=item.metadata["low"],
            high=item.metadata["high"],
            is_optional=default is None or is_number,
            is_secret=item.metadata["is_secret"],
        )
    for path, kind_below in below:
        # A section's sentence stands in its class: "`storage.wal`: messages in local files."
        says = " ".join((kind_below.__doc__ or "").partition(": ")[2].split())
        yield Section(path=path, says=f"{says[:1].upper()}{says[1:]}")
        yield from _walk(kind_below, f"{path}.")


def _kind(default: object, *, is_number: bool) -> str:
    if isinstance(default, StrEnum):
        return "choice"
    if isinstance(default, bool):
        return "switch"
    if isinstance(default, tuple):
        return "list"
    if isinstance(default, Mapping):
        return "mapping"
    return "number" if is_number or isinstance(default, int) else "text"


def _plain(value: Any) -> Any:  # noqa: ANN401 - of any kind
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


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


def _size(value: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value and value % unit == 0:
            return f"{value // unit} {name}"
    return str(value)


def _without_user(text: str) -> str:
    # People put credentials into addresses.
    return _USER_IN_ADDRESS.sub(f"{_MASK}@", text)
