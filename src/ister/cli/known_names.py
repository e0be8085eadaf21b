"""Names of topics, subscriptions and other things, for the completion of a command line.

Owns: where names come from, and which of them a shell may be given. Does not own: the scripts of
shells (`completion`).

The broker is the one that the command line names, as far as it is written, or the default one. A
command with `--data` or `--config` has the names of that directory; so has one that names no broker
while `./ister-data` exists and no broker answers. Completion never fails: if nothing answers within
a second, there are no names.

Names come from others, and shells evaluate what they are given: names that would need quotes are
left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from ister.base.model import TopicName
from ister.base.partitions import base_of_partition
from ister.cli.connection import add_broker_arguments, connected, names_broker
from ister.cli.contexts import load_contexts
from ister.cli.location import DATA_DEFAULT, add_place_arguments, load_place, wal_root
from ister.errors import InvariantError, IsterError, NotFoundError, TopicNameError

if TYPE_CHECKING:
    from ister.client import Client

KINDS: Final = ("topics", "subscriptions", "namespaces", "subjects", "contexts")
"""Kinds of names."""

_ANSWER_SECONDS: Final = 1.0
# Bash splits words at these.
_BREAKS: Final = frozenset(":=@")


def known_names(kind: str, line: str, prefix: str) -> list[str]:
    """The names that can complete a command line.

    Args:
        kind: One of `KINDS`.
        line: The command line, up to the cursor.
        prefix: The beginning of the name.
    """
    try:
        found = _found(kind, line)
    except (IsterError, OSError, _UnusableError):
        return []
    return sorted({name for name in found if name.startswith(prefix) and _is_plain(name)})


def _found(kind: str, line: str) -> Iterable[str]:
    if kind == "contexts":
        return load_contexts().by_name
    options, rest = _Lenient.parse(_words_of(line))
    if options.data or options.config:
        return _stored(options, kind, rest)
    return _asked(options, kind, rest)


class _UnusableError(Exception):
    """The command line is invalid; the command itself will report it."""


class _Lenient(argparse.ArgumentParser):
    """Finds the broker and the directory on a line, whatever else is there."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        parser = cls(add_help=False, allow_abbrev=False)
        add_place_arguments(parser)
        add_broker_arguments(parser)
        options, rest = parser.parse_known_args(list(words))
        options.retry_for = options.answer_within = _ANSWER_SECONDS
        return options, rest

    def error(self, message: str) -> NoReturn:
        raise _UnusableError(message)


def _words_of(line: str) -> list[str]:
    """The words of the command that the cursor is in, without the word that is being written."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    with suppress(ValueError):  # a quote that is still open
        for word in lexer:
            if word and not set(word) - set("|&;()"):
                words = []
            else:
                words.append(word)
    if words and not line[-1:].isspace():
        words.pop()
    return words[1:]


def _is_plain(name: str) -> bool:
    return shlex.quote(name) == name and not name.startswith("-") and not _BREAKS & set(name)


# -- where they come from -------------------------------------------------------------------


def _asked(options: argparse.Namespace, kind: str, rest: Sequence[str]) -> Iterable[str]:
    try:
        with connected(options) as client:
            return _names_at(client, kind, rest)
    except InvariantError:
        raise
    except IsterError:
        if names_broker(options) or not os.path.isdir(DATA_DEFAULT):
            raise
        return _stored(options, kind, rest)


def _names_at(client: Client, kind: str, rest: Sequence[str]) -> Iterable[str]:
    if kind == "subscriptions":
        topic = _topic_in(rest)
        return [] if topic is None else client.admin.subscriptions(str(topic))
    if kind == "subjects":
        return [one.subject for one in client.admin.schema_subjects()]
    namespaces = client.admin.namespaces()
    if kind == "namespaces":
        return namespaces
    found: list[str] = []
    for namespace in namespaces:
        with suppress(NotFoundError):  # deleted meanwhile
            found += client.topics(namespace)
    return _with_parents(found)


def _stored(options: argparse.Namespace, kind: str, rest: Sequence[str]) -> Iterable[str]:
    from ister.cli.stored_topics import describe_topic, describe_topics, to_json  # noqa: PLC0415

    if kind == "subjects":
        return []  # brokers alone know them
    storage = load_place(options).storage
    root = wal_root(storage)
    if kind == "subscriptions":
        topic = _topic_in(rest)
        if topic is None:
            return []
        return [
            one["name"] for one in to_json(describe_topic(storage, root, topic))["subscriptions"]
        ]
    names = [to_json(facts)["topic"] for facts in describe_topics(storage, root)]
    if kind == "namespaces":
        return [TopicName.parse(name).namespace for name in names]
    return _with_parents(names)


def _with_parents(names: Iterable[str]) -> list[str]:
    """Topics, partitions, and the topics that they are partitions of."""
    return [one for name in names for one in (name, base_of_partition(name)) if one is not None]


def _topic_in(words: Iterable[str]) -> TopicName | None:
    """The topic that a line names."""
    for word in words:
        if word.startswith("/"):
            with suppress(TopicNameError):
                return TopicName.parse(word)
    return None
