"""The schema registry: subjects with versions, and the schemas that topics require.

    register, get, latest, versions, subjects, delete_version       subjects and their versions
    check_compatibility, set_compatibility_mode                     rules for new versions
    configure_topic, update_policy, topic_config, forget_topic      settings of a topic
    bind_producer, is_unchecked, check_message                      publishing

Does not own: how subjects change (`subjects`), what is held in memory (`cache`), what definitions
mean (`definitions`), gRPC.

Everything is in the metadata store, and any broker may change it. `check_message` runs for every
message, so it uses the cache. If the store does not answer and the cache does not know the schema,
a topic that warns accepts the message, and a topic that enforces raises `UnavailableError`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias

from msgspec.structs import replace

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.broker.schemas.cache import SchemaCache, version_number
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.definitions import find_incompatibilities, read_definition
from ister.broker.schemas.subjects import Registered, SubjectStore, change_record
from ister.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.metadata.base import MetadataStore, Put
from ister.metadata.transact import unchanged
from ister.topic.schema_kinds import CompatibilityMode, SchemaType, ValidationPolicy
from ister.topic.schema_records import (
    SchemaKeys,
    SubjectRecord,
    TopicConfig,
    VersionEntry,
    VersionRecord,
)

_log = logging.getLogger("ister.broker.schemas")

_TopicChange: TypeAlias = Callable[[TopicConfig | None], TopicConfig]

_DESCRIPTION_CHARACTERS_MAX: Final = 4096
_CREATOR_CHARACTERS_MAX: Final = 256
_TAGS_MAX: Final = 64
_TAG_CHARACTERS_MAX: Final = 256
_WARNING_SECONDS: Final = 10.0
"""How often a topic's mismatches are logged."""


class _Mismatch(NamedTuple):
    """Why a message does not match: a label for metrics, and a text."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchema:
    """A version of a subject."""

    schema_id: int
    subject: str
    version: int
    schema_type: SchemaType
    definition: bytes
    """As registered."""
    fingerprint: str
    description: str
    created_at: int
    """Seconds since the Unix epoch."""
    created_by: str
    tags: tuple[str, ...]
    compatibility_mode: CompatibilityMode


class SchemaRegistry:
    """The registry of a broker. Thread-safe; calls wait for the metadata store. Must be closed.

    Changes by other brokers are seen after `refresh_seconds` at the latest.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        *,
        root_prefix: str,
        clock: Clock,
        refresh_seconds: float = 5.0,
    ) -> None:
        self._metadata = metadata
        self._clock = clock
        self._keys = SchemaKeys(root_prefix)
        self._subjects = SubjectStore(metadata, self._keys)
        self._lock = threading.Lock()
        self._warned: dict[str, tuple[float, int]] = {}
        self._mismatches = 0
        self._checked: dict[str, Counter[str]] = {}
        self._cache = SchemaCache(
            metadata, self._keys, self._subjects, clock=clock, refresh_seconds=refresh_seconds
        )

    def close(self) -> None:
        """Stops following the store. May be called twice."""
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- subjects ---------------------------------------------------------------------------

    def register(
        self,
        subject: str,
        schema_type: str,
        definition: bytes,
        *,
        description: str = "",
        created_by: str = "",
        tags: Sequence[str] = (),
    ) -> Registered:
        """Adds a version to a subject, which is created if it does not exist.

        A schema with the fingerprint of an existing version stays that version.

        Raises:
            InvalidRequestError: A name, the type or the definition is invalid.
            ConflictError: The schema is not compatible with the latest version.
        """
        _check_lengths(description, created_by, tags)
        parsed = read_definition(schema_type, definition)

        def version_record(version: int) -> VersionRecord:
            return VersionRecord(
                version=version,
                schema_type=parsed.schema_type,
                type_name=schema_type.lower(),
                definition=definition,
                fingerprint=parsed.fingerprint,
                description=description,
                created_at=self._clock.now_ns() // 1_000_000_000,
                created_by=created_by,
                tags=tuple(tags),
            )

        def find_problems(record: SubjectRecord, latest: VersionEntry) -> list[str]:
            if record.compatibility_mode is CompatibilityMode.NONE:
                return []
            old = self._cache.definition(record, latest.version)
            return find_incompatibilities(old, parsed, record.compatibility_mode)

        try:
            registered = self._subjects.register(subject, parsed, version_record, find_problems)
        finally:
            self._cache.forget_missing()
        self._cache.set_record(registered.schema_id, None)
        if registered.is_new_version:
            _log.info(
                "schema registered",
                extra={
                    "subject": subject,
                    "schema_id": registered.schema_id,
                    "version": registered.version,
                },
            )
        return registered

    def get(self, schema_id: int, version: int | None = None) -> StoredSchema:
        """A version of the subject with an id; the latest one without a number."""
        record = self._subjects.find_by_id(schema_id)
        if record is None or not record.versions:
            raise NotFoundError(f"schema id {schema_id} not found")
        return self._stored(record, version)

    def latest(self, subject: str) -> StoredSchema:
        """The latest version of a subject."""
        return self._stored(self._subjects.get(subject), None)

    def find_id(self, subject: str) -> int | None:
        """The id of a subject, also of one without versions; None if it does not exist."""
        record = self._subjects.find(subject)
        return None if record is None else record.schema_id

    def versions(self, subject: str) -> list[StoredSchema]:
        """All versions of a subject, in ascending order."""
        record = self._subjects.get(subject)
        found = []
        for entry in record.versions:
            with suppress(NotFoundError):  # deleted meanwhile
                found.append(self._stored(record, entry.version))
        return found

    def subjects(self) -> list[StoredSchema]:
        """The latest version of every subject that has one, by name."""
        found = []
        for record in self._subjects.list_subjects():
            with suppress(NotFoundError):  # deleted meanwhile
                found.append(self._stored(record, None))
        return found

    def check_compatibility(
        self,
        subject: str,
        schema_type: str,
        definition: bytes,
        mode: CompatibilityMode | None = None,
    ) -> list[str]:
        """Why a schema cannot be the next version; empty if it can.

        `mode` is the compatibility to check; that of the subject by default.
        """
        parsed = read_definition(schema_type, definition)
        record = self._subjects.get(subject)
        old = self._cache.definition(record, record.versions[-1].version)
        return find_incompatibilities(old, parsed, mode or record.compatibility_mode)

    def set_compatibility_mode(self, subject: str, mode: CompatibilityMode) -> None:
        """Sets the compatibility that new versions of a subject need."""
        record = self._subjects.set_mode(subject, mode)
        self._cache.set_record(record.schema_id, record)

    def delete_version(self, subject: str, version: int) -> None:
        """Deletes a version; neither its number nor the subject's id is reused.

        Messages that refer to it stay, but their schema can no longer be looked up.
        """
        record = self._subjects.delete_version(subject, version)
        self._cache.set_record(record.schema_id, record)
        self._cache.drop_definition(record.schema_id, version)

    def find_definition(
        self, schema_id: int, version: int | None
    ) -> tuple[str, int, Definition] | None:
        """The subject, version and definition that a message refers to; None if unknown."""
        record = self._cache.record(schema_id, version)
        number = version_number(record, version)
        if record is None or number is None:
            return None
        try:
            return record.subject, number, self._cache.definition(record, number)
        except NotFoundError:  # deleted meanwhile
            return None

    # -- topics -----------------------------------------------------------------------------

    def topic_config(self, topic: str) -> TopicConfig | None:
        """The schema settings of a topic; None if it has none."""
        key = self._keys.topic(TopicName.parse(topic))
        found = self._metadata.get(key)
        return None if found is None else TopicConfig.from_json(found.value, key=key)

    def topic_subjects(self) -> list[tuple[str, str]]:
        """All topics that have a subject, each with it. Never waits."""
        return [(topic, config.subject) for topic, config in self._cache.configs.items()]

    def configure_topic(
        self, topic: str, subject: str, policy: ValidationPolicy, *, checks_payload: bool
    ) -> TopicConfig:
        """Replaces the schema settings of a topic."""
        self._subjects.get(subject)
        wanted = TopicConfig(subject=subject, policy=policy, checks_payload=checks_payload)
        return self._change_topic(topic, lambda _: wanted)

    def update_policy(
        self, topic: str, policy: ValidationPolicy, *, checks_payload: bool
    ) -> TopicConfig:
        """Sets what happens to messages that do not match."""

        def change(known: TopicConfig | None) -> TopicConfig:
            if known is None:
                raise ConflictError(
                    f"topic {topic} has no schema subject",
                    topic=topic,
                    hint="configure one, or create a producer with one",
                )
            return replace(known, policy=policy, checks_payload=checks_payload)

        return self._change_topic(topic, change)

    def forget_topic(self, topic: str) -> None:
        """Removes the settings of a deleted topic."""
        name = TopicName.parse(topic)
        try:
            self._metadata.delete(self._keys.topic(name))
        finally:
            self._cache.set_config(str(name), None)

    def bind_producer(
        self,
        topic: str,
        subject: str,
        *,
        pinned_version: int | None = None,
        min_version: int | None = None,
    ) -> StoredSchema:
        """Accepts a producer that writes with a subject's schema, and returns that schema.

        The first such producer sets the topic's subject, with the policy `warn`.

        `pinned_version` is the version that the producer writes with, the latest by default, and
        `min_version` the lowest acceptable one.

        Raises:
            ConflictError: The topic has another subject, or there is no such subject or version.
        """
        record = self._subjects.find(subject)
        latest = None if record is None else record.latest()
        if record is None or latest is None:
            raise ConflictError(
                f"schema subject {subject!r} not found",
                topic=topic,
                hint="register a schema first",
            )
        number = latest.version if pinned_version is None else pinned_version
        if record.find(number) is None or (min_version is not None and number < min_version):
            wanted = min_version if pinned_version is None else pinned_version
            raise ConflictError(
                f"schema subject {subject!r} has no version {wanted}; its latest is "
                f"{latest.version}",
                topic=topic,
            )

        def change(known: TopicConfig | None) -> TopicConfig:
            if known is None:
                return TopicConfig(subject=subject)
            if known.subject != subject:
                raise ConflictError(
                    f"topic {topic} has the schema subject {known.subject!r}",
                    topic=topic,
                    hint="use that subject, or configure the topic with another one",
                )
            return known

        self._change_topic(topic, change)
        return self._stored(record, number)

    def is_unchecked(self, topic: str) -> bool:
        """Whether messages of a topic need no check. Never waits."""
        config = self._cache.configs.get(topic)
        return config is None or config.policy is ValidationPolicy.NONE

    def check_message(
        self, topic: str, *, schema_id: int | None, schema_version: int | None, payload: bytes
    ) -> None:
        """Checks a message before it is appended.

        Waits for the store only for a schema that no earlier message used.

        Raises:
            InvalidRequestError: The topic enforces its schema, and the message does not match.
            UnavailableError: The topic enforces its schema, and the store does not answer.
        """
        config = self._cache.configs.get(topic)
        if config is None or config.policy is ValidationPolicy.NONE:
            return
        is_enforced = config.policy is ValidationPolicy.ENFORCE
        try:
            mismatch = self._find_mismatch(config, schema_id, schema_version, payload)
        except (UnavailableError, CorruptDataError):
            if is_enforced:
                raise
            return
        with self._lock:
            checked = self._checked.setdefault(topic, Counter())
            checked["ok" if mismatch is None else mismatch.kind] += 1
            if mismatch is None:
                return
            self._mismatches += 1
        if is_enforced:
            raise InvalidRequestError(
                f"the message does not match the topic's schema: {mismatch.text}", topic=topic
            )
        self._warn(topic, mismatch.text)

    def checked(self) -> dict[str, dict[str, int]]:
        """The number of checked messages by topic, then by "ok" or the kind of mismatch."""
        configs = self._cache.configs
        with self._lock:
            for counts in (self._checked, self._warned):
                for topic in [topic for topic in counts if topic not in configs]:
                    del counts[topic]
            return {topic: dict(counts) for topic, counts in self._checked.items()}

    def count_mismatches(self) -> int:
        """The number of messages that did not match, warned of or refused."""
        return self._mismatches

    def refresh(self) -> None:
        """Reads the settings and subjects from the store now; the registry does so by itself."""
        self._cache.refresh()

    # -- internals --------------------------------------------------------------------------

    def _find_mismatch(
        self, config: TopicConfig, schema_id: int | None, version: int | None, payload: bytes
    ) -> _Mismatch | None:
        if schema_id is None:
            return _Mismatch(
                "missing_schema_id",
                f"it has no schema id, and the topic's subject is {config.subject!r}",
            )
        record = self._cache.record(schema_id, version)
        if record is None:
            return _Mismatch("unknown_schema_id", f"schema id {schema_id} not found")
        if record.subject != config.subject:
            return _Mismatch(
                "other_subject",
                f"its schema has the subject {record.subject!r}, not {config.subject!r}",
            )
        number = version_number(record, version)
        if number is None:
            return _Mismatch(
                "unknown_version", f"the subject {record.subject!r} has no version {version}"
            )
        if not config.checks_payload:
            return None
        text = self._cache.definition(record, number).check(payload)
        return None if text is None else _Mismatch("payload", text)

    def _warn(self, topic: str, reason: str) -> None:
        now = self._clock.monotonic()
        with self._lock:
            last, not_logged = self._warned.get(topic, (now - _WARNING_SECONDS, 0))
            is_due = now - last >= _WARNING_SECONDS
            self._warned[topic] = (now, 0) if is_due else (last, not_logged + 1)
        if is_due:
            _log.warning(
                "message does not match its topic's schema",
                extra={"topic": topic, "reason": reason, "not_logged": not_logged},
            )

    def _stored(self, record: SubjectRecord, version: int | None) -> StoredSchema:
        number = version_number(record, version)
        if number is None:
            raise NotFoundError(f"schema subject {record.subject!r} has no version {version}")
        found = self._subjects.read_version(record, number)
        return StoredSchema(
            schema_id=record.schema_id,
            subject=record.subject,
            version=found.version,
            schema_type=found.schema_type,
            definition=found.definition,
            fingerprint=found.fingerprint,
            description=found.description,
            created_at=found.created_at,
            created_by=found.created_by,
            tags=found.tags,
            compatibility_mode=record.compatibility_mode,
        )

    def _change_topic(self, topic: str, change: _TopicChange) -> TopicConfig:
        name = TopicName.parse(topic)
        key = self._keys.topic(name)

        def attempt() -> TopicConfig | None:
            found = self._metadata.get(key)
            known = None if found is None else TopicConfig.from_json(found.value, key=key)
            wanted = change(known)
            if wanted == known:
                return wanted
            done = self._metadata.transact([unchanged(key, found)], [Put(key, wanted.to_json())])
            return None if done is None else wanted

        config = change_record(f"the schema setting of {topic}", attempt)
        self._cache.set_config(str(name), config)
        return config


def _check_lengths(description: str, created_by: str, tags: Sequence[str]) -> None:
    for what, text, most in (
        ("description", description, _DESCRIPTION_CHARACTERS_MAX),
        ("created_by", created_by, _CREATOR_CHARACTERS_MAX),
        *(("tag", tag, _TAG_CHARACTERS_MAX) for tag in tags),
    ):
        if len(text) > most:
            raise InvalidRequestError(
                f"a {what} must have at most {most} characters, not {len(text)}"
            )
    if len(tags) > _TAGS_MAX:
        raise InvalidRequestError(f"a schema must have at most {_TAGS_MAX} tags, not {len(tags)}")
