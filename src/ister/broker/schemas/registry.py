"""The schema registry: subjects with versions, and topics that hold their messages to them.

    register, get, latest, versions, subjects, delete_version       subjects and their versions
    check_compatibility, set_compatibility_mode                     what a new version owes
    configure_topic, update_policy, topic_config, forget_topic      what a topic wants
    bind_producer, is_unchecked, check_message                      what happens while publishing

Owns: the answers, and what is remembered of the store. Does not own: how subjects change
(`subjects`), what definitions mean (`definitions`), and gRPC.

Everything is in the metadata store, and any broker may change it. `check_message` is asked for
every message, so the settings of all topics are held in memory, and the subjects that messages
name. A thread keeps them up: it is woken by a watch, and looks by itself every few seconds, because
a watch is only a hint. What this registry changes itself it sees at once. While the store does not
answer, what was known stays.

A message that cannot be judged because the store does not answer is accepted by a topic that only
warns, and put off (`UnavailableError`) by one that enforces.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self, TypeAlias

from ister import threads
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.definitions import find_incompatibilities, read_definition
from ister.broker.schemas.kinds import CompatibilityMode, SchemaType, ValidationPolicy
from ister.broker.schemas.records import (
    SchemaKeys,
    SubjectRecord,
    TopicConfig,
    VersionEntry,
    VersionRecord,
)
from ister.broker.schemas.subjects import Registered, SubjectStore
from ister.clock import Clock
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.metadata.base import Absent, Compare, KeyValue, MetadataStore, Put, RevisionIs
from ister.model import TopicName

__all__ = ["SchemaRegistry", "StoredSchema", "SubjectSummary"]

_log = logging.getLogger("ister.broker.schemas")

_TopicChange: TypeAlias = Callable[[TopicConfig | None], TopicConfig]

_ATTEMPTS: Final = 100
_DESCRIPTION_CHARACTERS_MAX: Final = 4096
_CREATOR_CHARACTERS_MAX: Final = 256
_TAGS_MAX: Final = 64
_TAG_CHARACTERS_MAX: Final = 256
_DEFINITIONS_HELD: Final = 128
_SUBJECTS_HELD: Final = 1024
_MISSING_HELD: Final = 4096
_MISSING_SECONDS: Final = 1.0
"""How long an id that does not exist is not asked for again."""
_WARNING_SECONDS: Final = 10.0
"""How often a topic's misfits are logged."""
_REFRESH_PAUSE_SECONDS: Final = 0.05
"""The least time between two looks at the store, however much changes there."""


class _Misfit(NamedTuple):
    """Why a message does not fit: one of a few kinds, and in words."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchema:
    """A version of a subject, with all that is known of it."""

    schema_id: int
    subject: str
    version: int
    schema_type: SchemaType
    definition: bytes
    """As it was registered."""
    fingerprint: str
    description: str
    created_at: int
    """Seconds since the Unix epoch."""
    created_by: str
    tags: tuple[str, ...]
    compatibility_mode: CompatibilityMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSummary:
    """A subject in a list of them."""

    schema_id: int
    subject: str
    schema_type: SchemaType
    latest_version: int
    compatibility_mode: CompatibilityMode
    tags: tuple[str, ...]


class SchemaRegistry:
    """The registry of a broker. Thread-safe. Calls wait for the metadata store.

    Reads the settings of all topics when it is made. Has to be closed.

    Args:
        metadata: Where everything is kept.
        root_prefix: What all keys begin with.
        clock: Tells when a version was made.
        refresh_seconds: How old what is held in memory may become at most.
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
        self._refresh_seconds = refresh_seconds
        self._keys = SchemaKeys(root_prefix)
        self._subjects = SubjectStore(metadata, self._keys)
        self._lock = threading.Lock()
        self._configs: dict[str, TopicConfig] = {}
        """By topic. Replaced as a whole, never changed, so that it is read without the lock."""
        self._changes = 0
        """Made by this registry: a look at the store from before one does not undo it."""
        self._held: dict[int, SubjectRecord] = {}
        self._definitions: OrderedDict[tuple[int, int], Definition] = OrderedDict()
        self._missing: dict[tuple[int, int | None], float] = {}
        self._warned: dict[str, tuple[float, int]] = {}
        self._misfits = {ValidationPolicy.WARN: 0, ValidationPolicy.ENFORCE: 0}
        self._checked: dict[str, Counter[str]] = {}
        self._is_closed = False
        self._wake = threading.Event()
        self._watch = metadata.watch(self._keys.root, self._on_change)
        try:
            self.refresh()
            self._thread = threads.start("ister-schemas", self._keep_up)
        except BaseException:
            self._watch.close()
            raise

    def close(self) -> None:
        """Ends the watching. May be called twice."""
        self._is_closed = True
        self._wake.set()
        self._watch.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

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
        """Adds a version to a subject, and the subject if it is new.

        The same schema, however it is written, stays the version that it is.

        Raises:
            InvalidRequestError: A name, the type or the definition is wrong.
            ConflictError: The schema is not compatible with the latest version.
            UnavailableError: The store does not answer.
        """
        _check_remarks(description, created_by, tags)
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
            old = self._definition(record, latest.version)
            return find_incompatibilities(old, parsed, record.compatibility_mode)

        try:
            registered = self._subjects.register(subject, parsed, version_record, find_problems)
        finally:
            self._forget_missing()
        self._hold(registered.schema_id, None)
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
        """A version of the subject with an id; the latest one unless told.

        Raises:
            NotFoundError: There is no such id or version.
        """
        record = self._subjects.find_by_id(schema_id)
        if record is None or not record.versions:
            raise NotFoundError(f"there is no schema with the id {schema_id}")
        return self._stored(record, version)

    def latest(self, subject: str) -> StoredSchema:
        """The latest version of a subject.

        Raises:
            NotFoundError: There is none.
        """
        return self._stored(self._subjects.get(subject), None)

    def find_id(self, subject: str) -> int | None:
        """The id of a subject, whether or not a version of it is left."""
        record = self._subjects.find(subject)
        return None if record is None else record.schema_id

    def versions(self, subject: str) -> list[StoredSchema]:
        """All versions of a subject, the oldest first.

        Raises:
            NotFoundError: There are none.
        """
        record = self._subjects.get(subject)
        found = []
        for entry in record.versions:
            with suppress(NotFoundError):  # removed while we read
                found.append(self._stored(record, entry.version))
        return found

    def subjects(self) -> list[SubjectSummary]:
        """All subjects that have a version, by name."""
        summaries = []
        for record in self._subjects.list_subjects():
            with suppress(NotFoundError):  # removed while we read
                latest = self._stored(record, None)
                summaries.append(
                    SubjectSummary(
                        schema_id=record.schema_id,
                        subject=record.subject,
                        schema_type=latest.schema_type,
                        latest_version=latest.version,
                        compatibility_mode=record.compatibility_mode,
                        tags=latest.tags,
                    )
                )
        return summaries

    def check_compatibility(
        self,
        subject: str,
        schema_type: str,
        definition: bytes,
        mode: CompatibilityMode | None = None,
    ) -> list[str]:
        """Why a schema could not be the next version; empty if it could.

        Args:
            subject: The subject.
            schema_type: The type of the schema.
            definition: The schema.
            mode: What it would owe to the latest version; what the subject says by default.

        Raises:
            NotFoundError: There is no such subject.
            InvalidRequestError: The type or the definition is wrong.
        """
        parsed = read_definition(schema_type, definition)
        record = self._subjects.get(subject)
        old = self._definition(record, record.versions[-1].version)
        return find_incompatibilities(old, parsed, mode or record.compatibility_mode)

    def set_compatibility_mode(self, subject: str, mode: CompatibilityMode) -> None:
        """Sets what new versions of a subject owe to the latest one.

        Raises:
            NotFoundError: There is no such subject.
        """
        record = self._subjects.set_mode(subject, mode)
        self._hold(record.schema_id, record)

    def delete_version(self, subject: str, version: int) -> None:
        """Removes a version for good; neither its number nor the subject's id is given again.

        Messages that name it stay as they are, and nobody can look their schema up.

        Raises:
            NotFoundError: There is no such subject or version.
        """
        record = self._subjects.delete_version(subject, version)
        self._hold(record.schema_id, record)
        with self._lock:
            self._definitions.pop((record.schema_id, version), None)

    def validate(self, schema_id: int, version: int | None, payload: bytes) -> None:
        """Checks a payload against a version; the latest one without a number.

        Raises:
            NotFoundError: There is no such id or version.
            InvalidRequestError: The payload does not fit.
        """
        record = self._record(schema_id, version)
        number = _number(record, version)
        if record is None or number is None:
            raise NotFoundError(f"there is no schema with the id {schema_id} and that version")
        reason = self._definition(record, number).check(payload)
        if reason is not None:
            raise InvalidRequestError(f"the payload does not fit its schema: {reason}")

    def find_definition(
        self, schema_id: int, version: int | None
    ) -> tuple[str, int, Definition] | None:
        """The subject, the version and the schema that a message names; None if there is none.

        Raises:
            UnavailableError: The store does not answer.
        """
        record = self._record(schema_id, version)
        number = _number(record, version)
        if record is None or number is None:
            return None
        try:
            return record.subject, number, self._definition(record, number)
        except NotFoundError:  # removed meanwhile
            return None

    # -- topics -----------------------------------------------------------------------------

    def topic_config(self, topic: str) -> TopicConfig | None:
        """What a topic wants of its messages; None if nobody has said.

        Raises:
            TopicNameError: The name is none.
        """
        key = self._keys.topic(TopicName.parse(topic))
        found = self._metadata.get(key)
        return None if found is None else TopicConfig.from_json(found.value, key=key)

    def configure_topic(
        self, topic: str, subject: str, policy: ValidationPolicy, *, checks_payload: bool
    ) -> TopicConfig:
        """Sets what a topic wants, whatever it wanted before.

        Raises:
            NotFoundError: There is no such subject.
            TopicNameError: The name is none.
        """
        self._subjects.get(subject)
        wanted = TopicConfig(subject=subject, policy=policy, checks_payload=checks_payload)
        return self._change_topic(topic, lambda _: wanted)

    def update_policy(
        self, topic: str, policy: ValidationPolicy, *, checks_payload: bool
    ) -> TopicConfig:
        """Sets what happens to messages that do not fit.

        Raises:
            ConflictError: The topic has no subject.
            TopicNameError: The name is none.
        """

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
        """Forgets what a topic wanted: it was deleted.

        Raises:
            TopicNameError: The name is none.
        """
        name = TopicName.parse(topic)
        try:
            self._metadata.delete(self._keys.topic(name))
        finally:
            self._set_config(str(name), None)

    def bind_producer(
        self,
        topic: str,
        subject: str,
        *,
        pinned_version: int | None = None,
        min_version: int | None = None,
    ) -> StoredSchema:
        """Takes on a producer that writes with a subject's schema.

        The first one fixes the topic's subject. From then on misfits are warned of.

        Args:
            topic: The topic.
            subject: The subject.
            pinned_version: The version that it writes with.
            min_version: It writes with the latest one, which has to be at least this.

        Returns:
            The schema that it writes with.

        Raises:
            ConflictError: The topic has another subject, or there is no such subject or version.
            TopicNameError: The name is none.
        """
        record = self._subjects.find(subject)
        latest = None if record is None else record.latest()
        if record is None or latest is None:
            raise ConflictError(
                f"the schema subject {subject!r} was not found",
                topic=topic,
                hint="register a schema first",
            )
        number = latest.version if pinned_version is None else pinned_version
        if record.find(number) is None or (min_version is not None and number < min_version):
            wanted = min_version if pinned_version is None else pinned_version
            raise ConflictError(
                f"the schema subject {subject!r} has no version {wanted}, its latest is "
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
                    hint="use that one, or have the topic configured",
                )
            return known

        self._change_topic(topic, change)
        return self._stored(record, number)

    def is_unchecked(self, topic: str) -> bool:
        """Whether all messages fit, so that there is nothing to ask. Never waits."""
        config = self._configs.get(topic)
        return config is None or config.policy is ValidationPolicy.NONE

    def check_message(
        self, topic: str, *, schema_id: int | None, schema_version: int | None, payload: bytes
    ) -> None:
        """Judges a message that is about to be appended.

        Waits for the store only for a schema that no message has named so far.

        Raises:
            InvalidRequestError: The topic enforces its schema, and the message does not fit.
            UnavailableError: The topic enforces its schema, and the store does not answer.
        """
        config = self._configs.get(topic)
        if config is None or config.policy is ValidationPolicy.NONE:
            return
        is_enforced = config.policy is ValidationPolicy.ENFORCE
        try:
            reason = self._find_misfit(config, schema_id, schema_version, payload)
        except (UnavailableError, CorruptDataError):
            if is_enforced:
                raise
            return
        with self._lock:
            checked = self._checked.setdefault(topic, Counter())
            checked["ok" if reason is None else reason.kind] += 1
            if reason is None:
                return
            self._misfits[config.policy] += 1
        if is_enforced:
            raise InvalidRequestError(
                f"the message does not fit the topic's schema: {reason.words}", topic=topic
            )
        self._warn(topic, reason.words)

    def checked(self) -> dict[str, dict[str, int]]:
        """Messages held against a schema so far: topic, then "ok" or why not, then how many."""
        with self._lock:
            return {topic: dict(counts) for topic, counts in self._checked.items()}

    def misfits(self) -> dict[str, int]:
        """Messages so far that did not fit: those warned of, and those refused."""
        with self._lock:
            return {
                "warned": self._misfits[ValidationPolicy.WARN],
                "refused": self._misfits[ValidationPolicy.ENFORCE],
            }

    # -- judging ----------------------------------------------------------------------------

    def _find_misfit(
        self, config: TopicConfig, schema_id: int | None, version: int | None, payload: bytes
    ) -> _Misfit | None:
        if schema_id is None:
            return _Misfit(
                "missing_schema_id",
                f"it has no schema id, and the topic's subject is {config.subject!r}",
            )
        record = self._record(schema_id, version)
        if record is None:
            return _Misfit("unknown_schema_id", f"there is no schema with the id {schema_id}")
        if record.subject != config.subject:
            return _Misfit(
                "other_subject",
                f"its schema is of the subject {record.subject!r}, not {config.subject!r}",
            )
        number = _number(record, version)
        if number is None:
            return _Misfit(
                "unknown_version", f"the subject {record.subject!r} has no version {version}"
            )
        if not config.checks_payload:
            return None
        words = self._definition(record, number).check(payload)
        return None if words is None else _Misfit("payload", words)

    def _warn(self, topic: str, reason: str) -> None:
        now = self._clock.monotonic()
        with self._lock:
            last, passed_over = self._warned.get(topic, (now - _WARNING_SECONDS, 0))
            is_due = now - last >= _WARNING_SECONDS
            self._warned[topic] = (now, 0) if is_due else (last, passed_over + 1)
        if is_due:
            _log.warning(
                "a message does not fit its topic's schema",
                extra={"topic": topic, "reason": reason, "not_logged": passed_over},
            )

    def _record(self, schema_id: int, version: int | None) -> SubjectRecord | None:
        """The subject of an id, from memory if it is known to have the version."""
        record = self._held.get(schema_id)
        if record is not None and _number(record, version) is not None:
            return record
        now = self._clock.monotonic()
        missing = schema_id, version
        if self._missing.get(missing, now) > now:
            return record
        changes = self._changes
        record = self._subjects.find_by_id(schema_id)
        with self._lock:
            if _number(record, version) is None:
                if len(self._missing) >= _MISSING_HELD:
                    self._missing.clear()
                self._missing[missing] = now + _MISSING_SECONDS
            if record is not None and changes == self._changes:
                if len(self._held) >= _SUBJECTS_HELD:
                    self._held.clear()
                self._held[schema_id] = record
        return record

    def _definition(self, record: SubjectRecord, version: int) -> Definition:
        key = record.schema_id, version
        with self._lock:
            known = self._definitions.get(key)
            if known is not None:
                self._definitions.move_to_end(key)
                return known
        stored = self._subjects.read_version(record, version)
        definition = read_definition(stored.type_name or stored.schema_type, stored.definition)
        with self._lock:
            self._definitions[key] = definition
            while len(self._definitions) > _DEFINITIONS_HELD:
                self._definitions.popitem(last=False)
        return definition

    def _stored(self, record: SubjectRecord, version: int | None) -> StoredSchema:
        number = _number(record, version)
        if number is None:
            raise NotFoundError(f"the schema subject {record.subject!r} has no version {version}")
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

    # -- what is held in memory -------------------------------------------------------------

    def refresh(self) -> None:
        """Looks at the store now. The registry does so by itself.

        Raises:
            UnavailableError: The store does not answer; what was known stays.
        """
        changes = self._changes
        configs = {}
        for found in self._metadata.range(self._keys.topics):
            config = self._read_config(found)
            if config is not None:
                configs[self._keys.topic_of(found.key)] = config
        held = {}
        for schema_id, record in list(self._held.items()):
            now_there = self._subjects.find(record.subject)
            if now_there is not None:
                held[schema_id] = now_there
        with self._lock:
            self._missing.clear()
            if changes == self._changes:
                self._configs, self._held = configs, held
            else:
                self._wake.set()  # what was read may be from before a change of our own
            for topic in [topic for topic in self._warned if topic not in configs]:
                del self._warned[topic]
            for topic in [topic for topic in self._checked if topic not in configs]:
                del self._checked[topic]

    def _read_config(self, found: KeyValue) -> TopicConfig | None:
        try:
            return TopicConfig.from_json(found.value, key=found.key)
        except CorruptDataError as error:
            # One bad record must not keep all topics from what they want.
            _log.error("unreadable schema setting", extra={"error": str(error)})
            return self._configs.get(self._keys.topic_of(found.key))

    def _on_change(self, key: str) -> None:
        self._wake.set()

    def _keep_up(self) -> None:
        is_answering = True
        pause = threading.Event()
        while True:
            self._wake.wait(self._refresh_seconds)
            if self._is_closed:
                return
            self._wake.clear()
            try:
                self.refresh()
            except IsterError as error:
                if is_answering and not self._is_closed:
                    _log.warning(
                        "schema settings cannot be read; the last ones known hold",
                        extra={"error": str(error)},
                    )
                is_answering = False
            except Exception as error:  # noqa: BLE001 - the last known settings stay in use
                threads.record("ister-schemas", error)
            else:
                is_answering = True
            pause.wait(_REFRESH_PAUSE_SECONDS)

    def _hold(self, schema_id: int, record: SubjectRecord | None) -> None:
        """Takes note of a change of our own; without a record the next message reads it."""
        with self._lock:
            self._changes += 1
            self._missing.clear()
            if record is None:
                self._held.pop(schema_id, None)
            elif schema_id in self._held:
                self._held[schema_id] = record

    def _forget_missing(self) -> None:
        with self._lock:
            self._missing.clear()

    def _set_config(self, topic: str, config: TopicConfig | None) -> None:
        with self._lock:
            self._changes += 1
            configs = dict(self._configs)
            if config is None:
                configs.pop(topic, None)
            else:
                configs[topic] = config
            self._configs = configs

    def _change_topic(self, topic: str, change: _TopicChange) -> TopicConfig:
        name = TopicName.parse(topic)
        key = self._keys.topic(name)
        lost: CommitUnknownError | None = None
        for _ in range(_ATTEMPTS):
            found = self._metadata.get(key)
            known = None if found is None else TopicConfig.from_json(found.value, key=key)
            wanted = change(known)
            if wanted == known:
                self._set_config(str(name), wanted)
                return wanted
            compare: Compare = Absent(key)
            if found is not None:
                compare = RevisionIs(key, found.revision)
            try:
                if self._metadata.transact([compare], [Put(key, wanted.to_json())]) is not None:
                    self._set_config(str(name), wanted)
                    return wanted
            except CommitUnknownError as error:
                if lost is not None:
                    raise
                lost = error  # the next round reads what has become of it
        raise ConflictError(f"the schema setting of {topic} keeps changing", topic=topic)


def _number(record: SubjectRecord | None, version: int | None) -> int | None:
    """The version that is meant, if it is there."""
    entry = None
    if record is not None:
        entry = record.latest() if version is None else record.find(version)
    return None if entry is None else entry.version


def _check_remarks(description: str, created_by: str, tags: Sequence[str]) -> None:
    for what, text, most in (
        ("description", description, _DESCRIPTION_CHARACTERS_MAX),
        ("created_by", created_by, _CREATOR_CHARACTERS_MAX),
        *(("tag", tag, _TAG_CHARACTERS_MAX) for tag in tags),
    ):
        if len(text) > most:
            raise InvalidRequestError(
                f"a {what} of {len(text)} characters", hint=f"it has at most {most}"
            )
    if len(tags) > _TAGS_MAX:
        raise InvalidRequestError(f"{len(tags)} tags", hint=f"a schema has at most {_TAGS_MAX}")
