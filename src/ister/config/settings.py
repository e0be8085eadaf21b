"""How settings are declared, and what the declarations say about each of them.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class WalConfig:
        \"\"\"`storage.wal`: messages in local files, where they are first.\"\"\"

        writer_threads: int = setting(4, low=1, high=64, says="Threads that write and sync.")

A section is a frozen dataclass whose docstring begins with its key; a field is a setting or another
section. The annotation is the setting's type, which `msgspec` checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Final, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from msgspec import Meta

from ister.base.limits import GIB, KIB, MIB

VARIABLE_PREFIX: Final = "ISTER_"

_Value = TypeVar("_Value")


class _Facts(TypedDict):
    says: str
    low: int | None
    high: int | None
    is_secret: bool
    is_path: bool


def setting(
    default: _Value,
    *,
    says: str,
    low: int | None = None,
    high: int | None = None,
    is_secret: bool = False,
    is_path: bool = False,
) -> _Value:
    """Declares a setting.

    Args:
        default: Its value unless set.
        says: What it is for, in a sentence for `ister config` and the reference.
        low: The least value of a number.
        high: The largest value of a number.
        is_secret: Never shown.
        is_path: A path, in which `~` is expanded.
    """
    facts = _Facts(says=says, low=low, high=high, is_secret=is_secret, is_path=is_path)
    if default == {}:
        return field(default_factory=type(default), repr=not is_secret, metadata={"facts": facts})
    return field(default=default, repr=not is_secret, metadata={"facts": facts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declared setting."""

    path: str
    """Its key, such as `storage.wal.dir`."""
    default: object
    """As written in YAML: a text, a number, a boolean, None, a list or a mapping."""
    kind: str
    """`text`, `number`, `switch` (true or false), `choice`, `list` (of texts) or `mapping`."""
    type: object
    """What `msgspec.convert` makes of a value."""
    choices: tuple[str, ...]
    """The values of a choice."""
    says: str
    """What it is for: a sentence, with Markdown's backquotes."""
    low: int | None
    """The least value of a number."""
    high: int | None
    """The largest value of a number."""
    is_optional: bool
    """Whether it may be null."""
    is_secret: bool
    """Whether it is never shown."""
    is_path: bool
    """Whether `~` is expanded."""

    @property
    def variable(self) -> str:
        """The environment variable that overrides it."""
        return VARIABLE_PREFIX + self.path.upper().replace(".", "__")

    @property
    def shown_default(self) -> str:
        """Its default in words: sizes with their units, `none` for nothing."""
        if self.default is None or self.default in ([], {}):
            return "none"
        if isinstance(self.default, list):
            return ", ".join(self.default)
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return self._show(self.default)

    @property
    def bounds(self) -> str:
        """Its allowed values in words; empty if every value of its kind is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"{self._show(self.low)} to {self._show(self.high)}"
        if self.low is not None:
            return f"at least {self._show(self.low)}"
        return f"at most {self._show(self.high)}" if self.high is not None else ""

    def _show(self, value: object) -> str:
        if isinstance(value, int) and self.path.endswith(("_bytes", "_size")):
            for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
                if value and value % unit == 0:
                    return f"{value // unit} {name}"
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Settings that belong together."""

    path: str
    """Their common key, such as `storage.wal`."""
    says: str
    """What they are for."""
    type: type
    """The dataclass that declares them."""


def children(section: type, path: str = "") -> Mapping[str, Setting | Section]:
    """The settings and sections directly below a section, by name."""
    return _children(section, path)


@cache
def _children(section: type, path: str) -> Mapping[str, Setting | Section]:
    hints = get_type_hints(section)
    found: dict[str, Setting | Section] = {}
    for item in fields(section):
        hint = hints[item.name]
        below = f"{path}.{item.name}" if path else item.name
        if isinstance(hint, type) and is_dataclass(hint):
            # A section's sentence stands in its docstring: "`storage.wal`: messages in files."
            says = " ".join((hint.__doc__ or "").partition(": ")[2].split())
            found[item.name] = Section(path=below, says=f"{says[:1].upper()}{says[1:]}", type=hint)
        elif facts := item.metadata.get("facts"):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            found[item.name] = _describe(below, hint, default, facts)
    return found


def _describe(path: str, hint: object, default: object, facts: _Facts) -> Setting:
    is_optional = NoneType in get_args(hint)
    base = next(one for one in get_args(hint) if one is not NoneType) if is_optional else hint
    choices: tuple[str, ...] = ()
    exact: object = base
    if isinstance(base, type) and issubclass(base, StrEnum):
        kind, choices = "choice", tuple(base)
    elif base is bool:
        kind = "switch"
    elif base is int:
        kind, exact = "number", Annotated[int, Meta(ge=facts["low"], le=facts["high"])]
    elif get_origin(base) is tuple:
        kind, exact = "list", tuple[Annotated[str, Meta(min_length=1)], ...]
    elif base is str:
        kind, exact = "text", Annotated[str, Meta(min_length=1, pattern=r"^[^\0]*$")]
    else:
        kind = "mapping"
    return Setting(
        path=path,
        default=to_plain(default),
        kind=kind,
        type=exact | None if is_optional else exact,  # type: ignore[operator]
        choices=choices,
        is_optional=is_optional,
        **facts,
    )


def to_plain(value: object) -> object:
    """A value as written in YAML."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
