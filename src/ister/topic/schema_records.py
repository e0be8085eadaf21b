"""The schema registry's keys and records in the metadata store, and how they are read.

    <root>/schemas/<subject>/metadata          the versions; every change compares its revision
    <root>/schemas/<subject>/versions/<n>      a version: immutable, its number is never reused
    <root>/schemas/_global/next_schema_id      the id of the next subject
    <root>/schemas/_index/by_id/<id>           the subject of an id
    <root>/schemas/_topics/<ns>/<topic>        what a topic requires of its messages

In a key, slashes of a subject are %2F (subjects are often named after topics) and a leading
underscore is %5F, so that no subject collides with the registry's own keys.

Owns: the records, and `read_topic_schema` for programs without a broker. Does not own: changes of
the registry (`ister.broker.schemas`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from ister.base.model import TopicName
from ister.base.partitions import base_of_partition
from ister.base.structs import known
from ister.errors import CorruptDataError, InvalidRequestError
from ister.metadata.base import MetadataStore
from ister.topic.schema_kinds import CompatibilityMode, SchemaType, ValidationPolicy

_SUBJECT_CHARACTERS_MAX: Final = 255


def check_subject(subject: str) -> None:
    """Checks the name of a subject.

    Raises:
        InvalidRequestError: It is empty, too long, or has characters that are not printable.
    """
    if not 0 < len(subject) <= _SUBJECT_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"a schema subject must have 1 to {_SUBJECT_CHARACTERS_MAX} characters, "
            f"not {len(subject)}"
        )
    if not subject.isprintable() or subject != subject.strip():
        raise InvalidRequestError(
            f"the schema subject {subject!r} has characters that are not printable"
        )


class SchemaKeys:
    """The keys of the registry."""

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
        """The key that maps an id to its subject."""
        return f"{self.ids}{schema_id}"

    def topic(self, topic: TopicName) -> str:
        """The key of a topic's schema settings."""
        return f"{self.topics}{topic.namespace}/{topic.topic}"

    def topic_of(self, key: str) -> str:
        """The topic of a key of `topic`, as `/namespace/topic`."""
        return f"/{key.removeprefix(self.topics)}"

    def _of(self, subject: str) -> str:
        name = quote(subject, safe="")
        return f"{self.root}{f'%5F{name[1:]}' if name.startswith('_') else name}/"


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record that is stored as JSON."""

    WHAT: ClassVar[str]

    def to_json(self) -> bytes:
        """The record as it is stored."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes, *, key: str) -> Self:
        """Parses a stored record."""
        try:
            return msgspec.json.decode(data, type=known(cls))
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptDataError(f"{cls.WHAT} is damaged: {error}", path=key) from error


class VersionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the list of its subject."""

    version: int
    schema_type: SchemaType
    fingerprint: str
    token: str = ""
    """Identifies the call that added it, so that a retry after a lost answer recognises it."""


class SubjectRecord(_Record, frozen=True, kw_only=True, rename={"schema_id": "id"}):
    """A subject and its versions. The id stays even if all versions are deleted."""

    WHAT: ClassVar[str] = "a schema subject's record"

    schema_id: int
    subject: str
    compatibility_mode: CompatibilityMode = CompatibilityMode.BACKWARD
    next_version: int = 1
    versions: tuple[VersionEntry, ...] = ()
    """In ascending order."""

    def latest(self) -> VersionEntry | None:
        """The newest version; None without versions."""
        return self.versions[-1] if self.versions else None

    def find(self, version: int) -> VersionEntry | None:
        """A version by its number."""
        return next((entry for entry in self.versions if entry.version == version), None)

    def find_fingerprint(self, fingerprint: str) -> VersionEntry | None:
        """A version by its fingerprint."""
        return next((entry for entry in self.versions if entry.fingerprint == fingerprint), None)

    def with_version(self, entry: VersionEntry) -> Self:
        """A copy with one more version."""
        return replace(
            self, versions=(*self.versions, entry), next_version=max(entry.version, 0) + 1
        )

    def without_version(self, version: int) -> Self:
        """A copy without a version, whose number is not reused."""
        left = tuple(entry for entry in self.versions if entry.version != version)
        return replace(self, versions=left)


class VersionRecord(_Record, frozen=True, kw_only=True):
    """A version with its definition."""

    WHAT: ClassVar[str] = "a schema version's record"

    version: int
    schema_type: SchemaType
    type_name: str = ""
    """The type as the client named it: `int64` says more than `number`."""
    definition: bytes
    """As registered; base64 in the record."""
    fingerprint: str
    description: str = ""
    created_at: int = 0
    """Seconds since the Unix epoch."""
    created_by: str = ""
    tags: tuple[str, ...] = ()


class TopicConfig(
    _Record,
    frozen=True,
    kw_only=True,
    rename={"policy": "validation_policy", "checks_payload": "enable_payload_validation"},
):
    """What a topic requires of its messages."""

    WHAT: ClassVar[str] = "a topic's schema setting"

    subject: str
    policy: ValidationPolicy = ValidationPolicy.WARN
    checks_payload: bool = False
    """Whether payloads are checked, and not only schema ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """The newest version of the schema that a topic's messages have."""

    subject: str
    version: int
    schema_type: SchemaType
    definition: bytes
    """As registered."""


def read_topic_schema(
    metadata: MetadataStore, root_prefix: str, topic: str
) -> RegisteredSchema | None:
    """Returns the registered schema of a topic or partition; None if there is none."""
    keys = SchemaKeys(root_prefix)
    for name in filter(None, (topic, base_of_partition(topic))):
        key = keys.topic(TopicName.parse(name))
        found = metadata.get(key)
        if found is not None:
            subject = TopicConfig.from_json(found.value, key=key).subject
            return _read_latest(metadata, keys, subject)
    return None


def _read_latest(
    metadata: MetadataStore, keys: SchemaKeys, subject: str
) -> RegisteredSchema | None:
    key = keys.subject(subject)
    found = metadata.get(key)
    latest = None if found is None else SubjectRecord.from_json(found.value, key=key).latest()
    if latest is None:
        return None
    key = keys.version(subject, latest.version)
    stored = metadata.get(key)
    if stored is None:
        return None  # deleted meanwhile
    version = VersionRecord.from_json(stored.value, key=key)
    return RegisteredSchema(
        subject=subject,
        version=version.version,
        schema_type=version.schema_type,
        definition=version.definition,
    )
