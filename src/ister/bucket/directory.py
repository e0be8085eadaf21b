"""Reads the metadata of many topics at once.

    records, owners             whole prefixes, in pages, as of one revision each
    pointers, seals             by key, a hundred in a request

Owns: a cache of decoded values, valid until their keys change. Does not own: the metadata of one
topic (`catalog`), and changes to it.

Reading thousands of topics takes about one request per hundred topics. Descriptors are never read
here: there is one for each object, of up to 64 KiB. A topic's `tiered` is in the pointer to its
newest descriptor (`CurrentPointer.end`), which every commit writes in the same transaction. If
Danube or an older Ister wrote the pointer, `Catalog.last` returns it.

Everything read here may be outdated. Changes are made by transactions that require the record to be
unchanged (`ister.bucket.ownership`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ister.base.model import TopicName
from ister.bucket.names import TopicKeys
from ister.errors import CorruptDataError, TopicNameError
from ister.format.records import (
    CurrentPointer,
    OwnerRecord,
    SealedState,
    TopicRecord,
    decode_owner,
    decode_pointer,
    decode_sealed,
    decode_topic,
)
from ister.metadata.base import KeyValue, MetadataStore

_RECORDS: Final = "/topics"
_OWNERS: Final = "/cluster/owners"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Read(Generic[_Value]):
    """A decoded value and the revision of its key."""

    value: _Value
    revision: int
    """The key's revision; a different one means that the key has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicEntry:
    """A topic that exists."""

    name: str
    revision: int
    """The revision of its record."""
    record: TopicRecord | None
    """None if it cannot be decoded; `error` says why."""
    error: CorruptDataError | None = None
    owner: OwnerRecord | None = None
    """The process that has it open for writing."""


class TopicDirectory:
    """All topics of a metadata store. Used by one thread at a time."""

    def __init__(self, store: MetadataStore, root_prefix: str) -> None:
        self._store = store
        self._root = root_prefix
        self._known: dict[str, tuple[int, TopicEntry]] = {}
        self._keys: dict[str, TopicKeys] = {}
        self.entries: dict[str, TopicEntry] = {}
        """What `read` returned last."""
        self.reads = 0
        """How often `read` was called."""

    def read(self) -> dict[str, TopicEntry]:
        """Reads the records and owners of all topics that exist, by name: two ranges."""
        # Records first, so that a topic that is claimed in between shows its owner.
        records = _range(self._store, self._root + _RECORDS, self._known)
        owners = _range(self._store, self._root + _OWNERS, self._known)
        found: dict[str, TopicEntry] = {}
        for name, item in records.items():
            owner = owners.get(name)
            # Decoding takes longer than reading, so values with known revisions are kept.
            mark = owner.revision if owner is not None else 0
            known = self._known.get(name)
            if known is None or known[1].revision != item.revision or known[0] != mark:
                known = self._known[name] = (mark, _entry(name, item, owner))
            if known[1].record is None or known[1].record.is_open:
                found[name] = known[1]
        for gone in self._known.keys() - records.keys():
            del self._known[gone]
            self._keys.pop(gone, None)
        self.entries, self.reads = found, self.reads + 1
        return found

    def records(self, names: Iterable[str]) -> dict[str, Read[TopicRecord]]:
        """Reads the records of some topics, deleted ones included; leaves unreadable ones out."""
        return self._get(names, lambda keys: keys.record, decode_topic)

    def pointers(self, names: Iterable[str]) -> dict[str, Read[CurrentPointer]]:
        """Reads the pointers to the newest objects of topics; leaves unreadable ones out."""
        return self._get(names, lambda keys: keys.current, decode_pointer)

    def seals(self, names: Iterable[str]) -> dict[str, Read[SealedState]]:
        """Reads the seals of topics; only topics that were handed over and not claimed have one."""
        return self._get(names, lambda keys: keys.sealed, decode_sealed)

    def _get(
        self,
        names: Iterable[str],
        key_of: Callable[[TopicKeys], str],
        decode: Callable[..., _Value | None],
    ) -> dict[str, Read[_Value]]:
        wanted = {key_of(self._keys_of(name)): name for name in names}
        values: dict[str, Read[_Value]] = {}
        if not wanted:
            return values
        for item in self._store.get_many(list(wanted)).values():
            # Opening the topic reports the damage.
            with suppress(CorruptDataError):
                value = decode(item.value, key=item.key)
                if value is not None:
                    values[wanted[item.key]] = Read(value, item.revision)
        return values

    def _keys_of(self, name: str) -> TopicKeys:
        keys = self._keys.get(name)
        if keys is None:
            keys = self._keys[name] = TopicKeys(self._root, TopicName.parse(name))
        return keys


def list_topics(store: MetadataStore, root_prefix: str) -> list[str]:
    """The names of all topics that exist, sorted."""
    return sorted(name for name, exists in list_records(store, root_prefix).items() if exists)


def list_records(store: MetadataStore, root_prefix: str) -> dict[str, bool]:
    """The names of all topics that have a record, and whether each exists (or was deleted)."""
    names: dict[str, bool] = {}
    for name, item in _range(store, root_prefix + _RECORDS).items():
        entry = _entry(name, item, None)
        # A record that cannot be read counts as existing; opening the topic reports the damage.
        names[name] = entry.record is None or entry.record.is_open
    return names


def read_records(store: MetadataStore, root_prefix: str) -> dict[str, TopicRecord]:
    """The records of all topics that exist and can be read, by topic."""
    entries = (_entry(*one, None) for one in _range(store, root_prefix + _RECORDS).items())
    return {
        entry.name: entry.record
        for entry in entries
        if entry.record is not None and entry.record.is_open
    }


def read_owners(store: MetadataStore, root_prefix: str) -> dict[str, str]:
    """The node that has each topic open, by topic."""
    found: dict[str, str] = {}
    for name, item in _range(store, root_prefix + _OWNERS).items():
        with suppress(CorruptDataError):
            found[name] = decode_owner(item.value, key=item.key).node
    return found


def _range(store: MetadataStore, prefix: str, known: Container[str] = ()) -> dict[str, KeyValue]:
    """The keys of topics below a prefix, by topic; names in `known` are not parsed again."""
    found: dict[str, KeyValue] = {}
    for item in store.range(f"{prefix}/"):
        name = item.key.removeprefix(prefix)
        # An invalid key must not block the others.
        with suppress(TopicNameError):
            if name not in known:
                TopicName.parse(name)
            found[name] = item
    return found


def _entry(name: str, item: KeyValue, owner: KeyValue | None) -> TopicEntry:
    owned: OwnerRecord | None = None
    if owner is not None:
        with suppress(CorruptDataError):
            owned = decode_owner(owner.value, key=owner.key)
    try:
        record = decode_topic(item.value, key=item.key)
    except CorruptDataError as error:
        return TopicEntry(name=name, revision=item.revision, record=None, error=error, owner=owned)
    return TopicEntry(name=name, revision=item.revision, record=record, owner=owned)
