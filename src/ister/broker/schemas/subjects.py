"""Subjects and their versions in the metadata store.

Every change of a subject is one transaction that compares the subject's revision, so brokers may
change it concurrently. Does not own: what definitions mean, and the cache.

Invariants: an id belongs to one subject for ever; a version's number is used once; a version exists
with its whole definition or not at all.

After a crash or a lost answer, a change is done or not done. The next attempt reads the outcome,
and recognises its own work by a token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from msgspec.structs import replace

from ister.broker.schemas.definition import Definition
from ister.errors import (
    ConflictError,
    CorruptDataError,
    NotFoundError,
)
from ister.metadata.base import Absent, Compare, Delete, MetadataStore, Operation, Put, RevisionIs
from ister.metadata.transact import transact
from ister.topic.schema_kinds import CompatibilityMode
from ister.topic.schema_records import (
    SchemaKeys,
    SubjectRecord,
    VersionEntry,
    VersionRecord,
    check_subject,
)

_ATTEMPTS: Final = 100
"""Many brokers may change one subject at a time."""
_VERSIONS_MAX: Final = 1000
"""The most versions of a subject, which are listed in one record."""

_Answer = TypeVar("_Answer")


def change_record(what: str, attempt: Callable[[], _Answer | None]) -> _Answer:
    """Calls `transact` with as many attempts as a record that many brokers change needs."""
    return transact(attempt, ConflictError(f"{what} keeps changing"), attempts=_ATTEMPTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The version that a registered definition is."""

    schema_id: int
    version: int
    is_new_version: bool
    fingerprint: str


class SubjectStore:
    """Subjects, read from the store by every call. Thread-safe."""

    def __init__(self, metadata: MetadataStore, keys: SchemaKeys) -> None:
        self._metadata = metadata
        self._keys = keys

    # -- reading ----------------------------------------------------------------------------

    def find(self, subject: str) -> SubjectRecord | None:
        """A subject, also one without versions; None if it does not exist."""
        check_subject(subject)
        return self._read(subject)[0]

    def get(self, subject: str) -> SubjectRecord:
        """A subject with at least one version."""
        record = self.find(subject)
        if record is None or not record.versions:
            raise _unknown(subject)
        return record

    def find_by_id(self, schema_id: int) -> SubjectRecord | None:
        """The subject with an id."""
        found = self._metadata.get(self._keys.id(schema_id))
        return None if found is None else self._read(found.value.decode())[0]

    def read_version(self, record: SubjectRecord, version: int) -> VersionRecord:
        """Reads a version that the subject lists."""
        key = self._keys.version(record.subject, version)
        found = self._metadata.get(key)
        if found is None:
            raise NotFoundError(f"schema subject {record.subject!r} has no version {version}")
        return VersionRecord.from_json(found.value, key=key)

    def list_subjects(self) -> list[SubjectRecord]:
        """All subjects with at least one version, by name."""
        names = [item.value.decode() for item in self._metadata.range(self._keys.ids)]
        records = [record for name in names if (record := self._read(name)[0]) is not None]
        return sorted((one for one in records if one.versions), key=lambda one: one.subject)

    # -- changes ----------------------------------------------------------------------------

    def register(
        self,
        subject: str,
        definition: Definition,
        version_record: Callable[[int], VersionRecord],
        find_problems: Callable[[SubjectRecord, VersionEntry], list[str]],
    ) -> Registered:
        """Adds a version, unless a version has the same fingerprint.

        The subject is created if it does not exist. `version_record` makes the record of a version
        number; `find_problems` says why the schema may not follow the latest version.

        Raises:
            ConflictError: It is not compatible, the subject has too many versions, or other
                changes keep coming first.
        """
        check_subject(subject)
        token = secrets.token_hex(8)

        def attempt() -> Registered | None:
            record, revision = self._read(subject)
            if record is None:
                return self._create(subject, definition, version_record, token)
            known = record.find_fingerprint(definition.fingerprint)
            if known is not None:
                return _registered(record, known, is_new=bool(known.token) and known.token == token)
            latest = record.latest()
            problems = [] if latest is None else find_problems(record, latest)
            if problems:
                raise ConflictError(
                    f"the schema is not {record.compatibility_mode} compatible with version "
                    f"{latest.version if latest else 0} of {subject!r}: {'; '.join(problems[:5])}",
                    hint="change the schema, or the subject's compatibility mode",
                )
            if len(record.versions) >= _VERSIONS_MAX:
                raise ConflictError(
                    f"schema subject {subject!r} has {_VERSIONS_MAX} versions, the maximum",
                    hint="delete old versions",
                )
            entry = _entry(record.next_version, definition, token)
            is_done = self._change(
                [RevisionIs(self._keys.subject(subject), revision)],
                [
                    Put(self._keys.subject(subject), record.with_version(entry).to_json()),
                    Put(
                        self._keys.version(subject, entry.version),
                        version_record(entry.version).to_json(),
                    ),
                ],
            )
            return _registered(record, entry, is_new=True) if is_done else None

        return change_record(f"schema subject {subject!r}", attempt)

    def set_mode(self, subject: str, mode: CompatibilityMode) -> SubjectRecord:
        """Sets the compatibility that new versions need."""
        return self._replace(subject, lambda record: (replace(record, compatibility_mode=mode), []))

    def delete_version(self, subject: str, version: int) -> SubjectRecord:
        """Deletes a version. The subject keeps its id, even without versions."""

        def change(record: SubjectRecord) -> tuple[SubjectRecord, list[Operation]]:
            if record.find(version) is None:
                raise NotFoundError(f"schema subject {subject!r} has no version {version}")
            removed: list[Operation] = [Delete(self._keys.version(subject, version))]
            return record.without_version(version), removed

        return self._replace(subject, change)

    # -- transactions -----------------------------------------------------------------------

    def _read(self, subject: str) -> tuple[SubjectRecord | None, int]:
        key = self._keys.subject(subject)
        found = self._metadata.get(key)
        if found is None:
            return None, 0
        return SubjectRecord.from_json(found.value, key=key), found.revision

    def _create(
        self,
        subject: str,
        definition: Definition,
        version_record: Callable[[int], VersionRecord],
        token: str,
    ) -> Registered | None:
        keys = self._keys
        counter = self._metadata.get(keys.next_id)
        compares: list[Compare] = [Absent(keys.subject(subject))]
        schema_id = 1
        if counter is None:
            compares.append(Absent(keys.next_id))
        else:
            compares.append(RevisionIs(keys.next_id, counter.revision))
            try:
                schema_id = int(counter.value)
            except ValueError as error:
                raise CorruptDataError(
                    "the counter of schema ids is damaged", path=keys.next_id
                ) from error
        # If the counter was lost, ids must still not be reused.
        compares.append(Absent(keys.id(schema_id)))
        if counter is None:
            taken = self._metadata.range(keys.ids)
            if taken:
                schema_id = max(int(item.key.removeprefix(keys.ids)) for item in taken) + 1
                compares[-1] = Absent(keys.id(schema_id))
        entry = _entry(1, definition, token)
        record = SubjectRecord(schema_id=schema_id, subject=subject).with_version(entry)
        is_done = self._change(
            compares,
            [
                Put(keys.subject(subject), record.to_json()),
                Put(keys.version(subject, 1), version_record(1).to_json()),
                Put(keys.next_id, str(schema_id + 1).encode()),
                Put(keys.id(schema_id), subject.encode()),
            ],
        )
        return _registered(record, entry, is_new=True) if is_done else None

    def _replace(
        self,
        subject: str,
        change: Callable[[SubjectRecord], tuple[SubjectRecord, list[Operation]]],
    ) -> SubjectRecord:
        check_subject(subject)
        wanted: SubjectRecord | None = None

        def attempt() -> SubjectRecord | None:
            nonlocal wanted
            record, revision = self._read(subject)
            if record is None or (not record.versions and record != wanted):
                raise _unknown(subject)
            if record == wanted:
                return record  # an attempt whose answer was lost succeeded
            wanted, operations = change(record)
            key = self._keys.subject(subject)
            is_done = self._change(
                [RevisionIs(key, revision)], [Put(key, wanted.to_json()), *operations]
            )
            return wanted if is_done else None

        return change_record(f"schema subject {subject!r}", attempt)

    def _change(self, compares: list[Compare], operations: list[Operation]) -> bool:
        return self._metadata.transact(compares, operations) is not None


def _entry(version: int, definition: Definition, token: str) -> VersionEntry:
    return VersionEntry(
        version=version,
        schema_type=definition.schema_type,
        fingerprint=definition.fingerprint,
        token=token,
    )


def _registered(record: SubjectRecord, entry: VersionEntry, *, is_new: bool) -> Registered:
    return Registered(
        schema_id=record.schema_id,
        version=entry.version,
        is_new_version=is_new,
        fingerprint=entry.fingerprint,
    )


def _unknown(subject: str) -> NotFoundError:
    return NotFoundError(f"schema subject {subject!r} not found", hint="register a schema first")
