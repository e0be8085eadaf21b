"""Calls about the schema registry: subjects, their versions, compatibility.

Owns: calls of danube_schema.SchemaRegistry for operators. Does not own: which versions are
compatible, which the broker decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ister import wire
from ister.client.core.network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectDescription:
    """A subject of the registry: schemas of one kind of message, version by version."""

    subject: str
    schema_type: str
    latest_version: int
    compatibility: str
    """How a new version must be compatible: `none`, `backward`, `forward` or `full`."""
    schema_id: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaVersion:
    """A version of a subject, without its definition."""

    version: int
    schema_id: int
    created_at: int
    """Unix seconds."""
    created_by: str
    description: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema(SchemaVersion):
    """A version of a subject, with its definition."""

    subject: str
    schema_type: str
    definition: bytes
    tags: tuple[str, ...]
    compatibility: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """The version that a definition has in its subject."""

    subject: str
    version: int
    schema_id: int
    is_new: bool
    """Whether it was added; an existing definition keeps its version."""
    fingerprint: str


class SchemaCalls:
    """Reads and changes the schema registry. Belongs to the network's loop."""

    _network: Network

    async def schema_subjects(self) -> list[SubjectDescription]:
        """All subjects, by name.

        Raises:
            IsterError: It is refused, or no broker has answered in time.
        """
        found = await self._network.call(
            wire.services.SchemaRegistry.ListSubjects, wire.danube_schema.ListSubjectsRequest()
        )
        return [
            SubjectDescription(
                subject=one.subject,
                schema_type=one.schema_type,
                latest_version=one.latest_version,
                compatibility=one.compatibility_mode,
                schema_id=one.schema_id,
                tags=tuple(one.tags),
            )
            for one in found.subjects
        ]

    async def schema_versions(self, subject: str) -> list[SchemaVersion]:
        """The versions of a subject, the oldest first.

        Raises:
            NotFoundError: There is no such subject.
            IsterError: It is refused, or no broker has answered in time.
        """
        found = await self._network.call(
            wire.services.SchemaRegistry.ListVersions,
            wire.danube_schema.ListVersionsRequest(subject=subject),
        )
        return [
            SchemaVersion(
                version=one.version,
                schema_id=one.schema_id,
                created_at=one.created_at,
                created_by=one.created_by,
                description=one.description,
                fingerprint=one.fingerprint,
            )
            for one in found.versions
        ]

    async def schema(self, subject: str, version: int | None = None) -> Schema:
        """A version of a subject; the latest by default.

        Raises:
            NotFoundError: There is no such subject or version.
            IsterError: It is refused, or no broker has answered in time.
        """
        registry = wire.services.SchemaRegistry
        found = await self._network.call(
            registry.GetLatestSchema, wire.danube_schema.GetLatestSchemaRequest(subject=subject)
        )
        if version is not None and version != found.version:
            # A subject's versions share its id.
            request = wire.danube_schema.GetSchemaRequest(
                schema_id=found.schema_id, version=version
            )
            found = await self._network.call(registry.GetSchema, request)
        return Schema(
            subject=found.subject,
            schema_type=found.schema_type,
            definition=found.schema_definition,
            tags=tuple(found.tags),
            compatibility=found.compatibility_mode,
            version=found.version,
            schema_id=found.schema_id,
            created_at=found.created_at,
            created_by=found.created_by,
            description=found.description,
            fingerprint=found.fingerprint,
        )

    async def register_schema(
        self,
        subject: str,
        definition: bytes,
        *,
        schema_type: str,
        description: str = "",
        tags: Sequence[str] = (),
    ) -> RegisteredSchema:
        """Adds a version to a subject, unless it has this definition already.

        Args:
            subject: Its name; a topic's name for the schema of that topic.
            definition: Avro or JSON Schema as JSON, a protobuf descriptor set, and so on.
            schema_type: `avro`, `json_schema`, `protobuf`, `string`, `number` or `bytes`.
            description: Free text about the version.
            tags: Free-form labels.

        Raises:
            InvalidRequestError: The definition cannot be read.
            ConflictError: It is not compatible with the latest version.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_schema.RegisterSchemaRequest(
            subject=subject,
            schema_type=schema_type,
            schema_definition=definition,
            description=description,
            tags=tags,
        )
        found = await self._network.call(wire.services.SchemaRegistry.RegisterSchema, request)
        return RegisteredSchema(
            subject=subject,
            version=found.version,
            schema_id=found.schema_id,
            is_new=found.is_new_version,
            fingerprint=found.fingerprint,
        )

    async def check_schema(
        self, subject: str, definition: bytes, *, schema_type: str, mode: str | None = None
    ) -> list[str]:
        """Returns why a definition cannot be the next version of a subject; empty if it can.

        `mode` is a compatibility mode in place of the subject's own.

        Raises:
            NotFoundError: There is no such subject.
            InvalidRequestError: The definition cannot be read.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_schema.CheckCompatibilityRequest(
            subject=subject,
            new_schema_definition=definition,
            schema_type=schema_type,
            compatibility_mode=mode,
        )
        found = await self._network.call(wire.services.SchemaRegistry.CheckCompatibility, request)
        return list(found.errors)

    async def set_compatibility(self, subject: str, mode: str) -> None:
        """Sets how new versions of a subject must be compatible.

        Raises:
            NotFoundError: There is no such subject.
            InvalidRequestError: There is no such mode.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_schema.SetCompatibilityModeRequest(
            subject=subject, compatibility_mode=mode
        )
        await self._network.call(wire.services.SchemaRegistry.SetCompatibilityMode, request)
