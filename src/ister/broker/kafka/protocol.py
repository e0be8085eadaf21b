"""Kafka's requests and answers as bytes, the APIs that are served, and errors as Kafka's codes.

    size · header (api key, version, correlation id, client id) · body

Owns: which versions of which APIs are offered, and the table of errors. Does not own: the layout of
requests and answers, which is kio's, generated from Kafka's own schemas.

Nothing is offered that is not served: clients look at the offer and do without, or say so.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from io import BytesIO
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_origin

from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    DiskError,
    FencedError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    TopicNameError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
    WaitTimeoutError,
)

NO_TIME: Final = timedelta(0)
Entity: TypeAlias = Any
"""A part of a request or an answer, of one of kio's classes."""

_PREFIX: Final = struct.Struct(">hhi")


class ApiKey(IntEnum):
    """The APIs that are served, by their numbers."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    INIT_PRODUCER_ID = 22
    DESCRIBE_CONFIGS = 32
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44
    OFFSET_DELETE = 47
    DESCRIBE_CLUSTER = 60


VERSIONS: Final[dict[ApiKey, tuple[int, int]]] = {
    ApiKey.PRODUCE: (3, 11),
    ApiKey.FETCH: (4, 16),
    ApiKey.LIST_OFFSETS: (1, 7),
    ApiKey.METADATA: (0, 12),
    ApiKey.OFFSET_COMMIT: (2, 9),
    ApiKey.OFFSET_FETCH: (1, 8),
    ApiKey.FIND_COORDINATOR: (0, 4),
    ApiKey.JOIN_GROUP: (0, 9),
    ApiKey.HEARTBEAT: (0, 4),
    ApiKey.LEAVE_GROUP: (0, 5),
    ApiKey.SYNC_GROUP: (0, 5),
    ApiKey.DESCRIBE_GROUPS: (0, 5),
    ApiKey.LIST_GROUPS: (0, 4),
    ApiKey.SASL_HANDSHAKE: (0, 1),
    ApiKey.API_VERSIONS: (0, 4),
    ApiKey.CREATE_TOPICS: (2, 7),
    ApiKey.DELETE_TOPICS: (1, 6),
    ApiKey.INIT_PRODUCER_ID: (0, 4),
    ApiKey.DESCRIBE_CONFIGS: (1, 4),
    ApiKey.SASL_AUTHENTICATE: (0, 2),
    ApiKey.CREATE_PARTITIONS: (0, 3),
    ApiKey.DELETE_GROUPS: (0, 2),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    ApiKey.OFFSET_DELETE: (0, 0),
    ApiKey.DESCRIBE_CLUSTER: (0, 1),
}
"""The oldest and the newest version of each API that is served."""

BEFORE_LOGIN: Final = frozenset(
    {ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}
)
"""What is answered to callers that are not authenticated yet."""


class MalformedError(Exception):
    """A request that is none: its connection is closed."""


class KafkaError(IsterError):
    """A refusal with one of Kafka's codes, where no error of Ister's stands for it."""

    def __init__(self, kafka: ErrorCode, message: str = "") -> None:
        super().__init__(message or kafka.name.replace("_", " "))
        self.kafka = kafka


class _Schema(NamedTuple):
    """One version of an API."""

    read_header: Callable[[Any, int], tuple[Any, int]]
    read_body: Callable[[Any, int], tuple[Any, int]]
    write_header: Callable[[BytesIO, Any], None]
    write_body: Callable[[BytesIO, Any], None]
    answer_header: type[Any]
    classes: ModuleType
    """The classes that answers are made of."""


@lru_cache(maxsize=512)
def _schema(key: int, version: int) -> _Schema:
    request: Any = load_request_schema(key, version)
    answer: Any = load_response_schema(key, version)
    return _Schema(
        read_header=entity_reader(request.__header_schema__),
        read_body=entity_reader(request),
        write_header=entity_writer(answer.__header_schema__),
        write_body=entity_writer(answer),
        answer_header=answer.__header_schema__,
        classes=load_payload_module(key, version, EntityType.response),
    )


@lru_cache(maxsize=2048)
def _fields(kind: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


@lru_cache(maxsize=2048)
def _checked_fields(kind: Entity) -> tuple[tuple[str, bool, bool], ...]:
    """The fields of a class to look at for nulls: name, whether it may be null, is it a tuple."""
    found = []
    for one in dataclasses.fields(kind):
        parts = (one.type, *get_args(one.type))
        may_be_null = any(part is type(None) for part in parts)
        is_tuple = any(get_origin(part) is tuple for part in parts)
        has_own = any(map(dataclasses.is_dataclass, _leaves(one.type)))
        if has_own or not may_be_null:
            found.append((one.name, may_be_null, is_tuple and has_own))
    return tuple(found)


def _leaves(kind: object) -> list[object]:
    inner = get_args(kind)
    return [leaf for part in inner for leaf in _leaves(part)] if inner else [kind]


def _check_nulls(entity: Entity) -> None:
    """Refuses nulls where Kafka's schema has none: kio reads them everywhere.

    Raises:
        MalformedError: There is one.
    """
    kind: Entity = type(entity)
    for name, may_be_null, is_nested in _checked_fields(kind):
        value = getattr(entity, name)
        if value is None:
            if not may_be_null:
                raise MalformedError(f"{name} is null")
        elif is_nested:
            for one in value:
                _check_nulls(one)


class Request:
    """A request of a client, and the means to answer it in its version."""

    __slots__ = ("_schema", "body", "client_id", "correlation", "key", "size", "version")

    def __init__(self, frame: bytes) -> None:
        """Reads a request without its size.

        Raises:
            MalformedError: It cannot be read, or it is of an API that is not served.
        """
        if len(frame) < _PREFIX.size:
            raise MalformedError("a request without a header")
        key, version, self.correlation = _PREFIX.unpack_from(frame)
        try:
            self.key = ApiKey(key)
        except ValueError:
            raise MalformedError(f"the API {key} is not offered") from None
        oldest, newest = VERSIONS[self.key]
        self.version = version
        self.size = len(frame)
        self.client_id = ""
        self.body: Any = None
        if not oldest <= version <= newest:
            if self.key is not ApiKey.API_VERSIONS:
                raise MalformedError(f"version {version} of {self.key.name} is not offered")
            # As Kafka does: clients begin with their newest version.
            self._schema = _schema(key, 0)
            return
        self._schema = schema = _schema(key, version)
        try:
            header, size = schema.read_header(frame, 0)
            self.client_id = header.client_id or ""
            # Bytes behind it are left alone, as Kafka does: librdkafka sends some.
            self.body, _ = schema.read_body(frame, size)
        except Exception as error:  # whatever kio raises for bytes that are none
            raise MalformedError(f"a {self.key.name} request cannot be read") from error
        _check_nulls(self.body)

    @property
    def is_readable(self) -> bool:
        """Whether its version is one that is served; else it is answered with version 0."""
        return self.body is not None

    def make(self, kind: str, /, **fields: Entity) -> Entity:
        """A part of the answer in the request's version: without the fields that it lacks."""
        made: Entity = getattr(self._schema.classes, kind)
        known = _fields(made)
        if "throttle_time" in known:
            fields.setdefault("throttle_time", NO_TIME)
        return made(**{field: value for field, value in fields.items() if field in known})

    def many(self, kind: str, found: Iterable[Mapping[str, Entity]]) -> tuple[Entity, ...]:
        """Parts of one class."""
        return tuple(self.make(kind, **fields) for fields in found)

    def by_topic(
        self,
        topic: str,
        partition: str,
        found: Iterable[tuple[str, Iterable[Mapping[str, Entity]]]],
    ) -> tuple[Entity, ...]:
        """Topics with their partitions, of these two classes."""
        return tuple(
            self.make(topic, name=name, partitions=self.many(partition, partitions))
            for name, partitions in found
        )

    def encode(self, answer: Entity) -> bytes:
        """An answer with its size and header."""
        schema, file = self._schema, BytesIO()
        file.write(b"\0\0\0\0")
        schema.write_header(file, schema.answer_header(correlation_id=self.correlation))
        schema.write_body(file, answer)
        data = file.getbuffer()
        struct.pack_into(">i", data, 0, len(data) - 4)
        del data
        return file.getvalue()


# -- errors ---------------------------------------------------------------------------------

_CODES: Final[tuple[tuple[type[IsterError], ErrorCode], ...]] = (
    # The first that fits; so special ones come before general ones.
    (TopicNameError, ErrorCode.invalid_topic_exception),
    (MessageTooLargeError, ErrorCode.message_too_large),
    (UnsupportedOperationError, ErrorCode.unsupported_for_message_format),
    (InvalidRequestError, ErrorCode.invalid_request),
    (NotFoundError, ErrorCode.unknown_topic_or_partition),
    (OffsetOutOfRangeError, ErrorCode.offset_out_of_range),
    (PermissionDeniedError, ErrorCode.topic_authorization_failed),
    (UnauthenticatedError, ErrorCode.sasl_authentication_failed),
    (AlreadyExistsError, ErrorCode.topic_already_exists),
    (FencedError, ErrorCode.not_leader_or_follower),
    (ConflictError, ErrorCode.not_leader_or_follower),
    (WaitTimeoutError, ErrorCode.request_timed_out),
    (DiskError, ErrorCode.kafka_storage_error),
    (CapacityError, ErrorCode.kafka_storage_error),
    (CorruptDataError, ErrorCode.kafka_storage_error),
    (ClosedError, ErrorCode.not_leader_or_follower),
    (UnavailableError, ErrorCode.not_leader_or_follower),
)


def code_of(error: Exception) -> ErrorCode:
    """Kafka's code for an error; clients retry those that pass by themselves."""
    if isinstance(error, KafkaError):
        return error.kafka
    return next(
        (code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.unknown_server_error
    )
