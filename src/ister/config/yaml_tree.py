"""Parses YAML into a tree of strings, without guessing types.

Owns: how YAML becomes a tree, with the line of every key, and which YAML is refused. Does not own:
which keys exist and what values mean (`ister.config`).

YAML 1.1 guesses types: `0100` is 64, `1:30` is 90, `no` is false, `3.10` is 3.1, and the last of
two equal keys wins silently. Here an unquoted value (a plain scalar) stays a string, of the type
`Plain`, which the setting's type then interprets. A duplicate key is refused. Anchors, aliases and
`<<` work, within limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import yaml

from ister.base.limits import MIB
from ister.errors import ConfigError

Tree: TypeAlias = Mapping[str, object]
"""Values, lists and trees by key."""

TEXT_BYTES_MAX: Final = MIB
"""The largest text that `parse_yaml` accepts."""
_VALUES_MAX: Final = 20_000
"""Limit on the values of a tree, aliases expanded: a few lines can expand to billions."""
_DEPTH_MAX: Final = 32

_NULL: Final = "tag:yaml.org,2002:null"
_MERGE: Final = "tag:yaml.org,2002:merge"
_TAGS: Final = frozenset(
    {_NULL, _MERGE, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))}
)


class Plain(str):
    """An unquoted value (a plain scalar); the type of its setting decides what it means."""

    __slots__ = ()


@dataclass(slots=True)
class YamlTree:
    """A parsed YAML text."""

    tree: dict[str, object] = field(default_factory=dict)
    """Mappings, lists, strings (`Plain` if unquoted) and None."""
    lines: dict[str, int] = field(default_factory=dict)
    """The line of every key, from 1 on, by its dotted path."""
    problems: list[tuple[str, ConfigError]] = field(default_factory=list)
    """Duplicate keys."""


def parse_yaml(text: str) -> YamlTree:
    """Parses a YAML text.

    Raises:
        ConfigError: It is not valid YAML, is no mapping, or uses an unsupported feature.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        parsed = YamlTree()
        found = None if node is None else _Builder(parsed).build(node, "", 0)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {_where_and_what(error)}") from error
    except RecursionError as error:
        raise ConfigError("not valid YAML: nested too deeply") from error
    if isinstance(found, dict):
        parsed.tree = found
    elif found is not None:
        raise ConfigError("not a tree of keys")
    return parsed


class _Loader(yaml.SafeLoader):
    """Resolves only null and `<<`; every other unquoted value stays a string."""

    yaml_implicit_resolvers: Final = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (_NULL, _MERGE)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Builder:
    """Builds the tree from YAML's nodes, which are a graph if there are aliases."""

    def __init__(self, parsed: YamlTree) -> None:
        self._parsed = parsed
        self._count = 0

    def build(self, node: yaml.Node, path: str, depth: int) -> object:
        self._count += 1
        if self._count > _VALUES_MAX:
            raise _refusal(f"aliases expand to more than {_VALUES_MAX} values", node)
        if depth > _DEPTH_MAX:
            raise _refusal(f"nested more than {_DEPTH_MAX} levels deep", node)
        if node.tag not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise _refusal(f"the tag {tag} is not supported", node)
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, path, depth + 1) for item in node.value]
        if node.tag == _NULL:
            return None
        is_quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        return str(node.value) if is_quoted else Plain(node.value)

    def _build_mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, object]:
        tree: dict[str, object] = {}
        seen: dict[str, int] = {}
        # `<<` comes first, so that the mapping's own keys override merged ones, with their lines.
        for key_node, value in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal("a key has to be a scalar", key_node)
            key, line = str(key_node.value), key_node.start_mark.line + 1
            below = f"{path}.{key}" if path else key
            if key in seen:
                text = f"{below} is set twice: on line {seen[key]} and on line {line}"
                self._parsed.problems.append((below, ConfigError(text, hint="remove one of them")))
            seen.setdefault(key, line)
            if key_node.tag == _MERGE:
                tree |= self._build_merged(value, path, depth)
            else:
                self._parsed.lines[below] = line
                tree[key] = self.build(value, below, depth + 1)
        return tree

    def _build_merged(self, node: yaml.Node, path: str, depth: int) -> dict[str, object]:
        tree: dict[str, object] = {}
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        # The first mapping of a list takes precedence.
        for part in reversed(parts):
            if not isinstance(part, yaml.MappingNode):
                raise _refusal("<< takes a mapping, or a list of mappings", part)
            tree |= self._build_mapping(part, path, depth + 1)
        return tree


def _refusal(text: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _where_and_what(error: Exception) -> str:
    """The position and the reason of a YAML error, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).partition("\n")[0]
    what = getattr(error, "problem", None) or getattr(error, "context", None) or "it ends early"
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
