"""The broker's own records in the metadata store: topics, namespaces, producer names.

    <root>/broker/topics/<ns>/<topic>   {"delivery": "reliable", "policies": {…}}
    <root>/namespaces/<ns>              {"policies": {…}}
    <root>/broker/producers/<ns>/<topic>/<name, percent-encoded>    {"principal": …, "at": seconds}
    <root>/broker/partitioned/<ns>/<topic>      when its creation by using its partitions began

Owns: these four kinds of records. Does not own: what a log keeps of a topic (`ister.bucket`), and
subscriptions (`ister.subscription.store`).

Every change compares with what was read before it. A missing record stands for the defaults: topics
that were created without a broker are reliable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, unquote

from ister.base.model import TopicName
from ister.base.partitions import PARTITION_INFIX, parse_partition
from ister.broker.followed import Followed
from ister.broker.policies import NAMES
from ister.errors import AlreadyExistsError, ConflictError, NotFoundError
from ister.metadata.base import Absent, KeyValue, MetadataStore, Put
from ister.metadata.transact import transact, unchanged

_log = logging.getLogger("ister.broker.topics.broker_records")

_NAMESPACES_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRecord:
    """Whether a topic is reliable, and its own policies."""

    is_reliable: bool = True
    policies: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRecord:
    """The owner of a producer name."""

    principal: str
    at: int
    """When it was last used, in Unix seconds, to a day."""


class BrokerRecords:
    """The broker's own records. Thread-safe; its calls block."""

    def __init__(self, metadata: MetadataStore, *, root_prefix: str) -> None:
        self._metadata = metadata
        self._topics = f"{root_prefix}/broker/topics/"
        self._producers = f"{root_prefix}/broker/producers/"
        self._partitioned = f"{root_prefix}/broker/partitioned/"
        self._namespaces = f"{root_prefix}/namespaces/"

    # -- topics -----------------------------------------------------------------------------

    def topic(self, name: TopicName) -> ServedRecord | None:
        """Returns the record of a topic; None if there is none."""
        found = self._metadata.get(self._key(name))
        return None if found is None else _decode_topic(found.value)

    def create_topic(self, name: TopicName, record: ServedRecord) -> ServedRecord:
        """Stores the record of a new topic, or returns the existing one unchanged."""

        def change(found: KeyValue | None) -> bytes | None:
            return _encode_topic(record) if found is None else None

        self._change(self._key(name), change)
        return self.topic(name) or record

    def set_topic_policies(self, name: TopicName, policies: Mapping[str, int]) -> None:
        """Replaces a topic's own policies."""

        def change(found: KeyValue | None) -> bytes:
            known = ServedRecord() if found is None else _decode_topic(found.value)
            return _encode_topic(ServedRecord(is_reliable=known.is_reliable, policies=policies))

        self._change(self._key(name), change)

    def delete_topic(self, name: TopicName) -> None:
        """Removes the record of a topic, and those of its producer names."""
        self._metadata.delete(self._key(name))
        for found in self._metadata.range(self._producer_key(name, "")):
            self._metadata.delete(found.key)
        partition = parse_partition(str(name))
        if partition is not None:
            self._metadata.delete(self._partitioned + partition[0][1:])

    def non_reliable(self) -> list[str]:
        """The names of all topics that have no log."""
        return [
            "/" + found.key.removeprefix(self._topics)
            for found in self._metadata.range(self._topics)
            if not _decode_topic(found.value).is_reliable
        ]

    def partitions_of(self, name: TopicName) -> list[int]:
        """The numbers of a topic's partitions that have no log."""
        prefix = f"{self._key(name)}{PARTITION_INFIX}"
        found: list[int] = []
        for item in self._metadata.range(prefix):
            partition = parse_partition("/" + item.key.removeprefix(self._topics))
            # Records of other topics have the same prefix: partitions of a partition, for example.
            is_own = partition is not None and partition[0] == str(name)
            if partition is not None and is_own and not _decode_topic(item.value).is_reliable:
                found.append(partition[1])
        return found

    def begin_partitions(self, name: TopicName, at: int) -> None:
        """Records when the partitions of a topic began to be created by using them."""
        self._change(self._partitioned + str(name)[1:], lambda _: b"%d" % at)

    def partitions_begun(self, name: TopicName) -> int | None:
        """When `begin_partitions` was called, in Unix seconds; None if it was not."""
        found = self._metadata.get(self._partitioned + str(name)[1:])
        return int(found.value) if found is not None and found.value.isdigit() else None

    def _key(self, name: TopicName) -> str:
        return f"{self._topics}{name.namespace}/{name.topic}"

    # -- producers' names -------------------------------------------------------------------

    def producer_names(self, topic: TopicName) -> dict[str, NameRecord]:
        """The owners of a topic's producer names."""
        prefix = self._producer_key(topic, "")
        return {
            unquote(found.key.removeprefix(prefix)): _decode_name(found.value)
            for found in self._metadata.range(prefix)
        }

    def claim_producer(self, topic: TopicName, name: str, principal: str, at: int) -> NameRecord:
        """Claims a name for a principal; returns its owner, which may be another principal."""
        record = NameRecord(principal=principal, at=at)

        def change(found: KeyValue | None) -> bytes | None:
            return _encode_name(record) if found is None else None

        key = self._producer_key(topic, name)
        self._change(key, change)
        found = self._metadata.get(key)
        return record if found is None else _decode_name(found.value)

    def refresh_producer(self, topic: TopicName, name: str, principal: str, at: int) -> None:
        """Records that a name is in use."""
        record = NameRecord(principal=principal, at=at)
        self._change(self._producer_key(topic, name), lambda _: _encode_name(record))

    def release_producer(self, topic: TopicName, name: str) -> None:
        """Releases a name."""
        self._metadata.delete(self._producer_key(topic, name))

    def _producer_key(self, topic: TopicName, name: str) -> str:
        return f"{self._producers}{topic.namespace}/{topic.topic}/{quote(name, safe='')}"

    # -- namespaces -------------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        """The names of namespaces that were created."""
        found = self._metadata.range(self._namespaces)
        return [item.key.removeprefix(self._namespaces) for item in found]

    def create_namespace(self, name: str) -> None:
        """Creates a namespace."""
        key = self._namespaces + name
        if self._metadata.transact([Absent(key)], [Put(key, b"{}")]) is None:
            raise AlreadyExistsError(f"namespace {name!r} already exists")

    def delete_namespace(self, name: str) -> None:
        """Removes a namespace."""
        if not self._metadata.delete(self._namespaces + name):
            raise NotFoundError(f"namespace {name!r} does not exist")

    def namespace_policies(self, name: str) -> dict[str, int]:
        """The policies of a namespace's topics."""
        found = self._metadata.get(self._namespaces + name)
        return {} if found is None else _policies_of(_decode(found.value))

    def policies_of_namespaces(self) -> dict[str, dict[str, int]]:
        """The policies of all namespaces that have a record."""
        return {
            item.key.removeprefix(self._namespaces): _policies_of(_decode(item.value))
            for item in self._metadata.range(self._namespaces)
        }

    def follow_namespaces(self, read: Callable[[bool], None]) -> Followed:
        """Calls `read` in a thread when a namespace may have changed, until that is closed."""
        return Followed(
            self._metadata,
            self._namespaces,
            read,
            thread="ister-namespaces",
            seconds=_NAMESPACES_SECONDS,
            log=_log,
            warning="the policies of namespaces cannot be read; the last known ones stay in force",
        )

    def set_namespace_policies(self, name: str, policies: Mapping[str, int]) -> None:
        """Replaces the policies of a namespace's topics."""
        value = json.dumps({"policies": dict(policies)}).encode()
        self._change(self._namespaces + name, lambda _: value)

    # -- changes ----------------------------------------------------------------------------

    def _change(self, key: str, change: Callable[[KeyValue | None], bytes | None]) -> None:
        def attempt() -> bool | None:
            found = self._metadata.get(key)
            value = change(found)
            if value is None:
                return True
            revision = self._metadata.transact([unchanged(key, found)], [Put(key, value)])
            return None if revision is None else True

        transact(attempt, ConflictError("the record keeps changing", path=key))


def _encode_topic(record: ServedRecord) -> bytes:
    delivery = "reliable" if record.is_reliable else "non_reliable"
    return json.dumps({"delivery": delivery, "policies": dict(record.policies)}).encode()


def _decode_topic(value: bytes) -> ServedRecord:
    content = _decode(value)
    return ServedRecord(
        is_reliable=content.get("delivery") != "non_reliable", policies=_policies_of(content)
    )


def _encode_name(record: NameRecord) -> bytes:
    return json.dumps({"principal": record.principal, "at": record.at}).encode()


def _decode_name(value: bytes) -> NameRecord:
    content = _decode(value)
    at = content.get("at")
    return NameRecord(
        principal=str(content.get("principal", "")), at=at if isinstance(at, int) else 0
    )


def _decode(value: bytes) -> dict[str, object]:
    try:
        content = json.loads(value)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _policies_of(content: Mapping[str, object]) -> dict[str, int]:
    # A newer broker may know others.
    policies = content.get("policies")
    known = policies if isinstance(policies, dict) else {}
    return {name: value for name, value in known.items() if name in NAMES and type(value) is int}
