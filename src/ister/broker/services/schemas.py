"""danube_schema.SchemaRegistry: schemas, their versions, and what topics want of their messages.

Danube answers INTERNAL to most things that go wrong. Here a definition or type that cannot be read
is INVALID_ARGUMENT, a schema that is not compatible FAILED_PRECONDITION, what is not there
NOT_FOUND. The permission to look up any topic includes reading schemas: consumers need them to
decode messages. A subject that is named after a topic needs the permission to manage that topic's
schema; all other subjects need it for the whole cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ister.base.model import TopicName
from ister.broker.operations import checks, conflicts_refused, needs
from ister.broker.schemas.registry import SchemaRegistry, StoredSchema
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.topics import Topics
from ister.errors import NotFoundError, TopicNameError
from ister.topic.schema_kinds import ValidationPolicy, parse_mode, parse_policy
from ister.wire import danube_schema


class SchemaService:
    """Answers for the registry. Whatever waits for the store does so on another thread."""

    def __init__(self, schemas: SchemaRegistry, topics: Topics, guard: Guard) -> None:
        self._schemas = schemas
        self._topics = topics
        self.guard = guard

    # -- subjects ---------------------------------------------------------------------------

    @checks("`manage_schema` on the topic of the subject's name, or in the cluster")
    async def RegisterSchema(
        self, request: danube_schema.RegisterSchemaRequest, context: object
    ) -> danube_schema.RegisterSchemaResponse:
        """Adds a version to a subject, unless it is one already."""
        self._check_manage(request.subject)
        with conflicts_refused():
            registered = await asyncio.to_thread(
                self._schemas.register,
                request.subject,
                request.schema_type,
                request.schema_definition,
                description=request.description,
                created_by=request.created_by,
                tags=tuple(request.tags),
            )
        return danube_schema.RegisterSchemaResponse(
            schema_id=registered.schema_id,
            version=registered.version,
            is_new_version=registered.is_new_version,
            fingerprint=registered.fingerprint,
        )

    @checks("`lookup` or `manage_schema` on a topic that has the subject, or in the cluster")
    async def GetSchema(
        self, request: danube_schema.GetSchemaRequest, context: object
    ) -> danube_schema.GetSchemaResponse:
        """A version by its subject's id; the latest one without a number."""
        version = request.version if request.HasField("version") else None
        try:
            found = await asyncio.to_thread(self._schemas.get, request.schema_id, version)
        except NotFoundError:
            await self._check_read(None)
            raise
        await self._check_read(found.subject)
        return _answer(found)

    @checks("`lookup` or `manage_schema` on a topic that has the subject, or in the cluster")
    async def GetLatestSchema(
        self, request: danube_schema.GetLatestSchemaRequest, context: object
    ) -> danube_schema.GetSchemaResponse:
        """The latest version of a subject."""
        await self._check_read(request.subject)
        return _answer(await asyncio.to_thread(self._schemas.latest, request.subject))

    @checks("`lookup` or `manage_schema` on a topic that has the subject, or in the cluster")
    async def ListVersions(
        self, request: danube_schema.ListVersionsRequest, context: object
    ) -> danube_schema.ListVersionsResponse:
        """All versions of a subject, the oldest first."""
        await self._check_read(request.subject)
        found = await asyncio.to_thread(self._schemas.versions, request.subject)
        return danube_schema.ListVersionsResponse(
            versions=[
                danube_schema.SchemaVersionInfo(
                    version=one.version,
                    created_at=one.created_at,
                    created_by=one.created_by,
                    description=one.description,
                    fingerprint=one.fingerprint,
                    schema_id=one.schema_id,
                )
                for one in found
            ]
        )

    @checks("`lookup` or `manage_schema` on a topic that has the subject, or in the cluster")
    async def ListSubjects(
        self, request: danube_schema.ListSubjectsRequest, context: object
    ) -> danube_schema.ListSubjectsResponse:
        """All subjects that the caller may read, by name."""
        self.guard.check_anywhere(current_principal(), Permission.LOOKUP)
        found = await asyncio.to_thread(self._schemas.subjects)
        is_readable = await asyncio.to_thread(self._readable)
        return danube_schema.ListSubjectsResponse(
            subjects=[
                danube_schema.SubjectSummary(
                    subject=one.subject,
                    schema_type=one.schema_type,
                    latest_version=one.version,
                    compatibility_mode=one.compatibility_mode,
                    schema_id=one.schema_id,
                    tags=one.tags,
                )
                for one in found
                if is_readable(one.subject)
            ]
        )

    @checks("`lookup` or `manage_schema` on a topic that has the subject, or in the cluster")
    async def CheckCompatibility(
        self, request: danube_schema.CheckCompatibilityRequest, context: object
    ) -> danube_schema.CheckCompatibilityResponse:
        """Whether a schema could be the next version, and why not."""
        await self._check_read(request.subject)
        mode = None
        if request.HasField("compatibility_mode"):
            mode = parse_mode(request.compatibility_mode)
        problems = await asyncio.to_thread(
            self._schemas.check_compatibility,
            request.subject,
            request.schema_type,
            request.new_schema_definition,
            mode,
        )
        return danube_schema.CheckCompatibilityResponse(is_compatible=not problems, errors=problems)

    @checks("`manage_schema` on the topic of the subject's name, or in the cluster")
    async def SetCompatibilityMode(
        self, request: danube_schema.SetCompatibilityModeRequest, context: object
    ) -> danube_schema.SetCompatibilityModeResponse:
        """Sets what new versions of a subject owe to the latest one."""
        self._check_manage(request.subject)
        mode = parse_mode(request.compatibility_mode)
        with conflicts_refused():
            await asyncio.to_thread(self._schemas.set_compatibility_mode, request.subject, mode)
        return danube_schema.SetCompatibilityModeResponse(
            success=True, message=f"new versions of {request.subject} are checked: {mode}"
        )

    @checks("`manage_schema` on the topic of the subject's name, or in the cluster")
    async def DeleteSchemaVersion(
        self, request: danube_schema.DeleteSchemaVersionRequest, context: object
    ) -> danube_schema.DeleteSchemaVersionResponse:
        """Removes a version for good."""
        self._check_manage(request.subject)
        with conflicts_refused():
            await asyncio.to_thread(self._schemas.delete_version, request.subject, request.version)
        return danube_schema.DeleteSchemaVersionResponse(
            success=True, message=f"version {request.version} of {request.subject} is deleted"
        )

    # -- topics -----------------------------------------------------------------------------

    @needs(Permission.MANAGE_SCHEMA, topic="topic_name")
    async def ConfigureTopicSchema(
        self, request: danube_schema.ConfigureTopicSchemaRequest, context: object
    ) -> danube_schema.ConfigureTopicSchemaResponse:
        """Sets a topic's subject, and what happens to messages that do not fit it."""
        policy = parse_policy(request.validation_policy)
        topic = await self._topics.get(request.topic_name)
        with conflicts_refused():
            config = await asyncio.to_thread(
                self._schemas.configure_topic,
                topic.name,
                request.schema_subject,
                policy,
                checks_payload=request.enable_payload_validation,
            )
        return danube_schema.ConfigureTopicSchemaResponse(
            success=True, message=f"{topic.name} has the subject {config.subject}: {config.policy}"
        )

    @needs(Permission.MANAGE_SCHEMA, topic="topic_name")
    async def UpdateTopicValidationPolicy(
        self, request: danube_schema.UpdateTopicValidationPolicyRequest, context: object
    ) -> danube_schema.UpdateTopicValidationPolicyResponse:
        """Sets what happens to messages that do not fit a topic's subject."""
        policy = parse_policy(request.validation_policy)
        topic = await self._topics.get(request.topic_name)
        with conflicts_refused():
            await asyncio.to_thread(
                self._schemas.update_policy,
                topic.name,
                policy,
                checks_payload=request.enable_payload_validation,
            )
        return danube_schema.UpdateTopicValidationPolicyResponse(
            success=True, message=f"{topic.name}: {policy}"
        )

    @needs(Permission.LOOKUP, topic="topic_name")
    async def GetTopicSchemaConfig(
        self, request: danube_schema.GetTopicSchemaConfigRequest, context: object
    ) -> danube_schema.GetTopicSchemaConfigResponse:
        """The schema settings of a topic; the subject is empty if there are none."""
        topic = await self._topics.get(request.topic_name)
        config = await asyncio.to_thread(self._schemas.topic_config, topic.name)
        if config is None:
            # What a topic starts with as soon as it has a subject.
            return danube_schema.GetTopicSchemaConfigResponse(
                validation_policy=ValidationPolicy.WARN
            )
        return danube_schema.GetTopicSchemaConfigResponse(
            schema_subject=config.subject,
            validation_policy=config.policy,
            enable_payload_validation=config.checks_payload,
            schema_id=await asyncio.to_thread(self._schemas.find_id, config.subject) or 0,
        )

    # -- rights -----------------------------------------------------------------------------

    async def _check_read(self, subject: str | None) -> None:
        """Refuses callers that may not read a subject, whether it exists or not."""
        if subject is not None and not self._readable()(subject):
            # Another broker may have just set the subject of a topic.
            await asyncio.to_thread(self._schemas.refresh)
        if subject is None or not self._readable()(subject):
            self.guard.check(current_principal(), Permission.LOOKUP)

    def _readable(self) -> Callable[[str], bool]:
        """Tells which subjects the caller may read.

        Those named after a topic that the caller may see, and those that such topics have; all for
        callers that may see all topics.
        """
        principal = current_principal()

        def allows(topic: str | None) -> bool:
            return any(
                self.guard.allows(principal, permission, topic=topic)
                for permission in (Permission.LOOKUP, Permission.MANAGE_SCHEMA)
            )

        if allows(None):
            return lambda _: True
        used = {subject for topic, subject in self._schemas.topic_subjects() if allows(topic)}
        return lambda subject: subject in used or allows(subject)

    def _check_manage(self, subject: str) -> None:
        principal = current_principal()
        try:
            topic = TopicName.parse(subject)
        except TopicNameError:
            self.guard.check(principal, Permission.MANAGE_SCHEMA, detail=subject)
        else:
            self.guard.check(principal, Permission.MANAGE_SCHEMA, topic=topic)


def _answer(found: StoredSchema) -> danube_schema.GetSchemaResponse:
    return danube_schema.GetSchemaResponse(
        schema_id=found.schema_id,
        version=found.version,
        subject=found.subject,
        schema_type=found.schema_type,
        schema_definition=found.definition,
        description=found.description,
        created_at=found.created_at,
        created_by=found.created_by,
        tags=found.tags,
        fingerprint=found.fingerprint,
        compatibility_mode=found.compatibility_mode,
    )
