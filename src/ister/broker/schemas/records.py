"""What the registry keeps in the metadata store: keys, and the JSON of its records.

    <root>/schemas/<subject>/metadata          which versions there are; changes go by its revision
    <root>/schemas/<subject>/versions/<n>      a version: never changed, its number never used again
    <root>/schemas/_global/next_schema_id      the id that the next subject gets
    <root>/schemas/_index/by_id/<id>           the subject of an id
    <root>/schemas/_topics/<ns>/<topic>        what a topic wants of its messages

Owns: names and encodings. A subject stands in a key with its slashes as %2F (subjects are often
named after topics), and its first underscore as %5F, so that none is taken for one of ours.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from urllib.parse import quote

from ister.broker.schemas.kinds import CompatibilityMode, SchemaType, ValidationPolicy
from ister.errors import CorruptDataError, InvalidRequestError
from ister.model import TopicName

__all__ = [
    "SchemaKeys",
    "SubjectRecord",
    "TopicConfig",
    "VersionEntry",
    "VersionRecord",
    "check_subject",
]

_SUBJECT_CHARACTERS_MAX: Final = 255


def check_subject(subject: str) -> None:
    """Refuses what is no name for a subject.

    Raises:
        InvalidRequestError: It is empty, too long, or has characters that cannot be seen.
    """
    if not 0 < len(subject) <= _SUBJECT_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"a schema subject of {len(subject)} characters",
            hint=f"it has 1 to {_SUBJECT_CHARACTERS_MAX}",
        )
    if not subject.isprintable() or subject != subject.strip():
        raise InvalidRequestError(f"the schema subject {subject!r} has characters that do not show")


class SchemaKeys:
    """Every key of the registry."""

    def __init__(self, root_prefix: str) -> None:
        self.root = f"{root_prefix}/schemas/"
        self.next_id = f"{self.root}_global/next_schema_id"
        self.ids = f"{self.root}_index/by_id/"
        self.topics = f"{self.root}_topics/"

    def subject(self, subject: str) -> str:
        """The key of a subject's record."""
        return f"{self._of(subject)}metadata"

    def version(self, subject: str, version: int) -> str:
        """The key of a version."""
        return f"{self._of(subject)}versions/{version}"

    def id(self, schema_id: int) -> str:
        """The key that says whose an id is."""
        return f"{self.ids}{schema_id}"

    def topic(self, topic: TopicName) -> str:
        """The key of what a topic wants."""
        return f"{self.topics}{topic.namespace}/{topic.topic}"

    def topic_of(self, key: str) -> str:
        """The topic of such a key, as `/namespace/topic`."""
        return f"/{key.removeprefix(self.topics)}"

    def _of(self, subject: str) -> str:
        name = quote(subject, safe="")
        return f"{self.root}{f'%5F{name[1:]}' if name.startswith('_') else name}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEntry:
    """A version, as its subject's record lists it."""

    version: int
    schema_type: SchemaType
    fingerprint: str
    token: str = ""
    """Of the call that made it: whose answer was lost finds its own work by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRecord:
    """A subject and the versions that it has. Its id stays even if none is left."""

    schema_id: int
    subject: str
    compatibility_mode: CompatibilityMode = CompatibilityMode.BACKWARD
    versions: tuple[VersionEntry, ...] = ()
    """Ascending."""
    next_version: int = 1

    def latest(self) -> VersionEntry | None:
        """The newest version, if there is one."""
        return self.versions[-1] if self.versions else None

    def find(self, version: int) -> VersionEntry | None:
        """A version, if it is there."""
        return next((entry for entry in self.versions if entry.version == version), None)

    def find_fingerprint(self, fingerprint: str) -> VersionEntry | None:
        """The version that is the same schema, if one is."""
        return next((entry for entry in self.versions if entry.fingerprint == fingerprint), None)

    def with_version(self, entry: VersionEntry) -> Self:
        """With one more."""
        return replace(
            self, versions=(*self.versions, entry), next_version=max(entry.version, 0) + 1
        )

    def without_version(self, version: int) -> Self:
        """With one less; its number is not given again."""
        left = tuple(entry for entry in self.versions if entry.version != version)
        return replace(self, versions=left)

    def to_json(self) -> bytes:
        """The record."""
        return _dump(
            id=self.schema_id,
            subject=self.subject,
            compatibility_mode=self.compatibility_mode,
            next_version=self.next_version,
            versions=[
                {
                    "version": entry.version,
                    "schema_type": entry.schema_type,
                    "fingerprint": entry.fingerprint,
                    "token": entry.token,
                }
                for entry in self.versions
            ],
        )

    @classmethod
    def from_json(cls, data: bytes, *, key: str) -> Self:
        """Reads the record.

        Raises:
            CorruptDataError: It is none.
        """
        try:
            value = json.loads(data)
            return cls(
                schema_id=int(value["id"]),
                subject=str(value["subject"]),
                compatibility_mode=CompatibilityMode(value["compatibility_mode"]),
                next_version=int(value["next_version"]),
                versions=tuple(
                    VersionEntry(
                        version=int(entry["version"]),
                        schema_type=SchemaType(entry["schema_type"]),
                        fingerprint=str(entry["fingerprint"]),
                        token=str(entry.get("token", "")),
                    )
                    for entry in value["versions"]
                ),
            )
        except (ValueError, TypeError, LookupError) as error:
            raise CorruptDataError("a schema subject's record is damaged", path=key) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A version with all that was said of it."""

    version: int
    schema_type: SchemaType
    definition: bytes
    """As it was registered."""
    fingerprint: str
    type_name: str = ""
    """What the type was called: `int64` says more than `number`."""
    description: str = ""
    created_at: int = 0
    """Seconds since the Unix epoch."""
    created_by: str = ""
    tags: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """The record."""
        return _dump(
            version=self.version,
            schema_type=self.schema_type,
            type_name=self.type_name,
            definition=base64.b64encode(self.definition).decode(),
            fingerprint=self.fingerprint,
            description=self.description,
            created_at=self.created_at,
            created_by=self.created_by,
            tags=list(self.tags),
        )

    @classmethod
    def from_json(cls, data: bytes, *, key: str) -> Self:
        """Reads the record.

        Raises:
            CorruptDataError: It is none.
        """
        try:
            value = json.loads(data)
            return cls(
                version=int(value["version"]),
                schema_type=SchemaType(value["schema_type"]),
                type_name=str(value.get("type_name", "")),
                definition=base64.b64decode(value["definition"], validate=True),
                fingerprint=str(value["fingerprint"]),
                description=str(value["description"]),
                created_at=int(value["created_at"]),
                created_by=str(value["created_by"]),
                tags=tuple(str(tag) for tag in value["tags"]),
            )
        except (ValueError, TypeError, LookupError, binascii.Error) as error:
            raise CorruptDataError("a schema version's record is damaged", path=key) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """What a topic wants of its messages."""

    subject: str
    policy: ValidationPolicy = ValidationPolicy.WARN
    checks_payload: bool = False
    """Whether payloads are looked into, and not only their schema ids."""

    def to_json(self) -> bytes:
        """The record."""
        return _dump(
            subject=self.subject,
            validation_policy=self.policy,
            enable_payload_validation=self.checks_payload,
        )

    @classmethod
    def from_json(cls, data: bytes, *, key: str) -> Self:
        """Reads the record.

        Raises:
            CorruptDataError: It is none.
        """
        try:
            value = json.loads(data)
            return cls(
                subject=str(value["subject"]),
                policy=ValidationPolicy(value["validation_policy"]),
                checks_payload=bool(value["enable_payload_validation"]),
            )
        except (ValueError, TypeError, LookupError) as error:
            raise CorruptDataError("a topic's schema setting is damaged", path=key) from error


def _dump(**fields: Any) -> bytes:  # noqa: ANN401 - JSON
    return json.dumps(fields, separators=(",", ":")).encode()
