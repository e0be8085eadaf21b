r"""Selects messages by key, attributes and content, and finds values in JSON payloads.

Owns: what a pattern, a path and a condition are, and which messages they match. Does not own:
reading, decoding by schemas, options of commands and parameters of the HTTP API.

    pattern   = text with `*` for any characters and `?` for one; `\*`, `\?` and `\\` are literal
    path      = "." | ["."] step { "." name | "[" number "]" | "[" string "]" }
    condition = comparison { ("and" | "or") comparison }       `and` binds tighter than `or`
    comparison = path ("==" | "!=" | "<" | "<=" | ">" | ">=" | "~") value
    value     = number | "text" | 'text' | true | false | null

    user.id == 7        items[0].sku == "A-1"        note ~ "late" and total >= 100

`.` is the whole payload. A missing field is null. `<`, `<=`, `>` and `>=` compare numbers with
numbers and texts with texts, and are false otherwise. `~` means that a text contains a text, or a
list contains a value. A payload that is not JSON matches no condition, `!=` included.

Patterns and conditions are case-sensitive. Nothing here is evaluated as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, TypeGuard

from ister.errors import InvalidRequestError

_Scalar: TypeAlias = bool | int | float | str | None

NOT_JSON: Final = object()
"""What `parse_payload` returns for a payload that is not JSON."""

_OPERATORS: Final = ("==", "!=", "<=", ">=", "<", ">", "~")
_OPERATORS_SHOWN: Final = "==, !=, <, <=, >, >= or ~"
_SIGNS: Final[Mapping[str, tuple[int, ...]]] = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}
_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[^\W\d][\w-]*")
_INDEX: Final = re.compile(r"-?[0-9]{1,9}")
_LITERAL: Final = re.compile(
    r"(?:-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?|true|false|null)(?![\w.])"
)
_JOIN: Final = re.compile(r"(?:and|or)(?!\w)")
_CHARACTERS_MAX: Final = 4096


# -- payloads and paths ---------------------------------------------------------------------


def parse_payload(payload: bytes) -> object:
    """A payload as a JSON value; `NOT_JSON` if it is not JSON."""
    try:
        return json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return NOT_JSON


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True, slots=True)
class JsonPath:
    """Where a value is in a JSON document: names of fields and numbers of items."""

    steps: tuple[str | int, ...]

    @classmethod
    def parse(cls, text: str) -> JsonPath:
        """Parses a path such as `user.id`, `items[0].sku` or `["a b"]`; `.` is the whole document.

        Raises:
            InvalidRequestError: It is not a path.
        """
        scanner = _Scanner(text, "path")
        path = scanner.path()
        if not scanner.is_at_end:
            scanner.fail("unexpected")
        return path

    def find(self, document: object) -> object:
        """The value in a document; None if there is no such field or item."""
        for step in self.steps:
            if isinstance(step, str):
                document = document.get(step) if isinstance(document, dict) else None
            elif isinstance(document, list) and -len(document) <= step < len(document):
                document = document[step]
            else:
                return None
        return document


class _Scanner:
    """Reads paths and values from a text; its errors say where they are."""

    def __init__(self, text: str, what: str) -> None:
        if len(text) > _CHARACTERS_MAX:
            raise InvalidRequestError(
                f"{what} of {len(text)} characters; at most {_CHARACTERS_MAX} are allowed"
            )
        self._text = text
        self._what = what
        self._at = 0
        self._skip_space()

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def fail(self, problem: str, *, hint: str | None = None) -> NoReturn:
        rest = self._text[self._at :]
        where = f"{rest[:20]!r} at character {self._at + 1}" if rest else "the end"
        raise InvalidRequestError(
            f"invalid {self._what} {self._text!r}: {problem} {where}", hint=hint
        )

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = self._at if found is None else found.end()

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _take_text(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def path(self) -> JsonPath:
        steps: list[str | int] = []
        has_dot = self._take_text(".")
        name = self._take(_NAME)
        if name is not None:
            steps.append(name)
        while True:
            if self._take_text("["):
                steps.append(self._bracket())
            elif steps and self._take_text("."):
                name = self._take(_NAME)
                if name is None:
                    self.fail("expected a field name, not", hint='other names: ["a b"]')
                steps.append(name)
            else:
                break
        if not steps and not has_dot:
            self.fail("expected a field such as user.id, not")
        self._skip_space()
        return JsonPath(tuple(steps))

    def _bracket(self) -> str | int:
        step: str | int
        index = self._take(_INDEX)
        if index is not None:
            step = int(index)
        else:
            quoted = self._string()
            if quoted is None:
                self.fail('expected a number or a "name" in brackets, not')
            step = quoted
        if not self._take_text("]"):
            self.fail("expected ], not")
        return step

    def operator(self) -> str:
        for one in _OPERATORS:
            if self._take_text(one):
                self._skip_space()
                return one
        is_single = self._text.startswith("=", self._at)
        hint = "use == to compare" if is_single else None
        return self.fail(f"expected {_OPERATORS_SHOWN}, not", hint=hint)

    def value(self) -> _Scalar:
        literal = self._take(_LITERAL)
        value: _Scalar = self._string() if literal is None else json.loads(literal)
        if literal is None and value is None:
            self.fail("expected a value, not", hint='values are 7, "text", true, false and null')
        self._skip_space()
        return value

    def _string(self) -> str | None:
        quote = self._text[self._at : self._at + 1]
        if quote not in ('"', "'"):
            return None
        end = self._at + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if self._text[end] == "\\" else 1
        if end >= len(self._text):
            self.fail("quoted text is not terminated:")
        inner = self._text[self._at + 1 : end]
        if quote == "'":
            inner = inner.replace("\\'", "'").replace('"', '\\"')
        try:
            value = json.loads(f'"{inner}"', strict=False)
        except ValueError:
            self.fail("invalid escape in")
        self._at = end + 1
        return str(value)

    def join(self) -> str | None:
        found = self._take(_JOIN)
        self._skip_space()
        return found


# -- conditions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Comparison:
    path: JsonPath
    operator: str
    value: _Scalar

    def holds(self, document: object) -> bool:
        found = self.path.find(document)
        if self.operator == "==":
            return _equal(found, self.value)
        if self.operator == "!=":
            return not _equal(found, self.value)
        if self.operator == "~":
            if isinstance(found, str):
                return isinstance(self.value, str) and self.value in found
            return isinstance(found, list) and any(_equal(one, self.value) for one in found)
        return _compare(found, self.value) in _SIGNS[self.operator]


def _compare(left: object, right: object) -> int | None:
    """-1, 0 or 1 for two numbers or two texts; None for anything else."""
    if isinstance(left, str) and isinstance(right, str):
        return (left > right) - (left < right)
    if _is_number(left) and _is_number(right):
        return (left > right) - (left < right)
    return None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(left: object, right: object) -> bool:
    # In Python, True == 1.
    return isinstance(left, bool) == isinstance(right, bool) and left == right


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a JSON document; see the module header."""

    text: str
    _alternatives: tuple[tuple[_Comparison, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parses a condition such as `user.id == 7 and note ~ "late"`.

        Raises:
            InvalidRequestError: It is not a condition; the message says where.
        """
        scanner = _Scanner(text, "condition")
        alternatives: list[list[_Comparison]] = [[]]
        while True:
            comparison = _Comparison(scanner.path(), scanner.operator(), scanner.value())
            alternatives[-1].append(comparison)
            if scanner.is_at_end:
                return cls(text, tuple(map(tuple, alternatives)))
            join = scanner.join()
            if join is None:
                scanner.fail("expected and, or, or the end, not")
            if join == "or":
                alternatives.append([])

    def holds(self, document: object) -> bool:
        """Whether it is true of a document."""
        return document is not NOT_JSON and any(
            all(one.holds(document) for one in every) for every in self._alternatives
        )


# -- messages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text with wildcards; see the module header."""

    text: str
    _compiled: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """A pattern of any text; there are no invalid ones."""
        parts = [""]
        characters = iter(text)
        for one in characters:
            if one == "*":
                parts.append("")
            elif one == "?":
                parts[-1] += "."
            elif one == "\\":
                following = next(characters, "")
                parts[-1] += re.escape(
                    following if following and following in "*?\\" else one + following
                )
            else:
                parts[-1] += re.escape(one)
        first, *middle, last = parts if len(parts) > 1 else (*parts, None)
        # Atomic groups do not backtrack, so the time is bounded.
        between = "".join(f"(?>.*?{part})" for part in middle if part)
        end = "" if last is None else f".*{last}"
        return cls(text, re.compile(f"{first}{between}{end}", re.DOTALL))

    def matches(self, text: str | None) -> bool:
        """Whether a text matches as a whole; None never does."""
        return text is not None and self._compiled.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which messages to show. All parts have to match; an empty part matches every message."""

    keys: tuple[Pattern, ...] = ()
    """Routing keys; one of them has to match."""
    attributes: tuple[tuple[str, Pattern | None], ...] = ()
    """Names and values; None for any value. Each of them has to match."""
    conditions: tuple[Condition, ...] = ()
    """About the payload as JSON. Each of them has to hold."""
    contains: bytes = b""
    """Bytes that the payload contains."""

    @classmethod
    def parse(
        cls,
        *,
        keys: Iterable[str] = (),
        attributes: Iterable[str] = (),
        where: Iterable[str] = (),
        contains: str = "",
    ) -> MessageFilter:
        """Parses a filter from texts, as users write them.

        Args:
            keys: Patterns of routing keys.
            attributes: `NAME=PATTERN`, or `NAME` for any value.
            where: Conditions on JSON payloads.
            contains: A text that the payload contains as UTF-8.

        Raises:
            InvalidRequestError: One of them is invalid.
        """
        return cls(
            keys=tuple(map(Pattern.parse, keys)),
            attributes=tuple(map(parse_attribute, attributes)),
            conditions=tuple(map(Condition.parse, where)),
            contains=contains.encode(errors="surrogateescape"),
        )

    def __bool__(self) -> bool:
        """Whether it can reject any message."""
        return bool(self.keys or self.attributes or self.conditions or self.contains)

    def matches(
        self,
        *,
        key: str | None,
        attributes: Mapping[str, str],
        payload: bytes,
        decoded: object = NOT_JSON,
    ) -> bool:
        """Whether a message matches.

        Args:
            key: Its routing key.
            attributes: Its attributes.
            payload: Its bytes.
            decoded: The payload as JSON values, where a schema has decoded it; otherwise the
                payload itself is read as JSON.
        """
        if self.keys and not any(pattern.matches(key) for pattern in self.keys):
            return False
        for name, pattern in self.attributes:
            if name not in attributes:
                return False
            if pattern is not None and not pattern.matches(attributes[name]):
                return False
        if self.contains and self.contains not in payload:
            return False
        if not self.conditions:
            return True
        document = parse_payload(payload) if decoded is NOT_JSON else decoded
        return all(condition.holds(document) for condition in self.conditions)


def parse_attribute(text: str) -> tuple[str, Pattern | None]:
    """Parses `NAME=PATTERN`, or `NAME`, which any value matches.

    Raises:
        InvalidRequestError: There is no name.
    """
    name, equals, value = text.partition("=")
    if not name:
        raise InvalidRequestError(f"invalid attribute filter {text!r}: use NAME=VALUE or NAME")
    return name, Pattern.parse(value) if equals else None
