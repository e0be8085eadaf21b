"""Converts the values of a tree into settings.

The type of a setting decides what an unquoted value means: `no` is false for a boolean and the text
`no` for a name. `msgspec` checks types and bounds; this module words the errors.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec

from ister.config.settings import Section, Setting, children
from ister.config.yaml_tree import Plain
from ister.errors import ConfigError

_WHOLE_NUMBER: Final = re.compile(
    r"[+-]?(0|[1-9][0-9]{0,17}|[1-9][0-9]{0,2}(_[0-9]{3}){1,5}|0x[0-9A-Fa-f]{1,15})"
)
_ODD_NUMBER: Final = re.compile(r"[+-]?[0-9][0-9_:]*")
"""Octal (`0100`) and base 60 (`1:30`): YAML parsers do not agree about these numbers."""
_BOOLEANS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}
_SWITCHES: Final = ("true", "false")

_Section = TypeVar("_Section")


class FromEnvironment(Plain):
    """A value from an environment variable."""

    __slots__ = ()


class Refusal(Protocol):
    """Takes an error: raises it, or collects it with others."""

    def __call__(self, key: str | None, error: ConfigError, near: str | None = None) -> None: ...


def build_section(
    kind: type[_Section], tree: object, path: str, refuse: Refusal, aliases: Iterable[str] = ()
) -> _Section:
    """Builds a section and all below it; what is refused keeps its default.

    Args:
        kind: The dataclass of the section.
        tree: Its values.
        path: Its key.
        refuse: Takes the errors.
        aliases: Other names of settings, as suggestions for unknown keys.
    """
    if not isinstance(tree, Mapping):
        text = f"{path or 'the config'} must be a tree of keys, not {tree!r}"
        refuse(path or None, ConfigError(text))
        return kind()
    known = children(kind, path)
    values: dict[str, object] = {}
    for key, value in tree.items():
        below = f"{path}.{key}" if path else str(key)
        item = known.get(str(key))
        if item is None:
            refuse_unknown(path, str(key), known, refuse, aliases)
        elif isinstance(item, Section):
            below_it = {} if value is None else value
            values[str(key)] = build_section(item.type, below_it, below, refuse, aliases)
        else:
            try:
                values[str(key)] = _convert(value, item)
            except ConfigError as error:
                refuse(below, error)
    return kind(**values)


def refuse_unknown(
    path: str, name: str, known: Iterable[str], refuse: Refusal, aliases: Iterable[str] = ()
) -> None:
    """Refuses a name in a section, with the nearest one that exists."""
    prefix = f"{path}." if path else ""
    others = (key.removeprefix(prefix).split(".")[0] for key in aliases if key.startswith(prefix))
    nearest = difflib.get_close_matches(name, [*known, *others], n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
    error = ConfigError(f"unknown key {prefix + name!r}", hint=hint)
    refuse(prefix + name, error, prefix + nearest[0] if nearest else None)


def _convert(value: object, setting: Setting) -> object:
    if setting.kind == "mapping":
        return _as_options(value, setting.path)
    given = _interpret(value, setting)
    try:
        found: object = msgspec.convert(given, setting.type)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # a lone surrogate
        raise _refusal(value, given, setting) from error
    return expand_home(found) if setting.is_path and isinstance(found, str) else found


def _interpret(value: object, setting: Setting) -> object:
    """What an unquoted value, a path or a list with commas means for a setting."""
    if setting.kind == "list":
        items = value.split(",") if isinstance(value, str) else () if value is None else value
        if not isinstance(items, list | tuple):
            return items
        texts = [_as_text(item, setting.path) for item in items]
        return [text.strip() if isinstance(text, str) else text for text in texts]
    if setting.kind == "text":
        return _as_text(value, setting.path)
    if isinstance(value, Plain):
        if setting.kind == "number" and _WHOLE_NUMBER.fullmatch(value):
            return int(value, base=0)
        words = _BOOLEANS if _is_unquoted(value) else _SWITCHES
        if setting.kind == "switch" and value.lower() in words:
            return _BOOLEANS[value.lower()]
    # msgspec takes whole floats for integers, and wants texts to be exactly `str`.
    return repr(value) if isinstance(value, float) else _as_str(value)


def _as_str(value: object) -> object:
    return str(value) if isinstance(value, str) else value


def _as_text(value: object, path: str) -> object:
    if isinstance(value, Plain) and _is_unquoted(value) and value.lower() in _SWITCHES:
        raise ConfigError(
            f"{path} must be a text, not {value}", hint=f'write "{value}" if you mean the text'
        )
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return _as_str(value)


def _refusal(value: object, given: object, setting: Setting) -> ConfigError:
    path = setting.path
    if setting.kind == "choice":
        return ConfigError(f"{path} is {value!r}", hint=f"one of: {', '.join(setting.choices)}")
    if setting.kind == "number" and isinstance(given, int) and not isinstance(given, bool):
        low, high = setting.low, setting.high
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        return ConfigError(f"{path} is {given}", hint=f"it must be {wanted}")
    if setting.kind == "number" and isinstance(value, Plain) and _ODD_NUMBER.fullmatch(value):
        return ConfigError(
            f"{path} must be a whole number, not {value!r}",
            hint="use a decimal number without leading zeros or colons",
        )
    shown = type(value).__name__ if setting.is_secret else repr(value)
    return ConfigError(f"{path} must be {_WANTED[setting.kind]}, not {shown}")


_WANTED: Final = {
    "list": "a list of texts",
    "number": "a whole number",
    "switch": "true or false",
    "text": "a non-empty text",
}


def _is_unquoted(value: object) -> bool:
    """Whether a value is from a file and has no quotes there."""
    return isinstance(value, Plain) and not isinstance(value, FromEnvironment)


def _as_options(value: object, path: str) -> dict[str, str]:
    """Options of a backend, which the backend interprets."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be a tree of keys")
    options: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping | list | tuple):
            raise ConfigError(f"{path}.{key} must be a single value")
        if item is not None:
            options[str(key)] = _as_option(item, f"{path}.{key}")
    return options


def _as_option(value: object, path: str) -> str:
    text = str(value)
    lower = text.lower()
    if isinstance(value, bool):
        return lower
    if not _is_unquoted(value) or lower not in _BOOLEANS:
        return text
    if lower in _SWITCHES:
        return lower
    raise ConfigError(
        f"{path} is {text} without quotes, which is a boolean to some YAML parsers and a "
        "text to others",
        hint=f'write {str(_BOOLEANS[lower]).lower()}, or "{text}" in quotes',
    )


def expand_home(path: str) -> str:
    """Replaces `~` or `~user` at the start of a path by the home directory.

    Raises:
        ConfigError: There is no such user, or the home directory is unknown.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path:
        user = path.partition("/")[0]
        raise ConfigError(
            f"cannot expand {path!r}: the home directory {user!r} is unknown",
            hint=f"use an absolute path, or ./{user} for a directory of that name",
        )
    return expanded
