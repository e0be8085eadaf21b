"""The type of a JSON payload: from DDL, a JSON Schema, or the schema registry.

    payloadSchema = 'id BIGINT, note STRING'   DDL, which Spark parses
                    '{"type": "object", …}'    a JSON Schema, or a Spark schema in JSON
                    registry                   the newest version of the topic's schema

Owns: how the option `payloadSchema` becomes a type. Does not own: the registry, whose records are
read here and written by brokers (`docs/FORMAT.md` has their keys); which values fit (`row_shape`).
Runs on the driver. Only `registry` does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ister.errors import CorruptDataError, InvalidRequestError, NotFoundError
from ister.model import TopicName
from ister.partitions import base_of_partition
from ister.retry import retry_unavailable
from ister.spark.location import Place, find_place
from ister.spark.offset_resolver import OffsetResolver
from ister.spark.options import PayloadFormat, ReadOptions
from ister.spark.tables.json_schema import Form, Member, ValueType, columns_of

_REGISTRY: Final = "registry"
_JSON_SCHEMA: Final = "json_schema"
_TYPES: Final[dict[Form, DataType]] = {
    "string": StringType(),
    "integer": LongType(),
    "number": DoubleType(),
    "boolean": BooleanType(),
    "time": TimestampType(),
    "date": DateType(),
    "json": StringType(),
}


class _TopicSetting(msgspec.Struct, frozen=True):
    """What a topic requires of its messages: of that, the subject."""

    subject: str


class _VersionNumber(msgspec.Struct, frozen=True):
    version: int


class _Subject(msgspec.Struct, frozen=True):
    """A subject: of that, its versions, in ascending order."""

    versions: tuple[_VersionNumber, ...] = ()


class _Version(msgspec.Struct, frozen=True):
    """A version with its definition."""

    schema_type: str
    definition: bytes


def payload_type(options: ReadOptions) -> DataType | str | None:
    """Returns the type of the column `payload`, or its DDL; None for binary.

    Raises:
        InvalidRequestError: There is no schema for JSON, or it is not one of an object.
        NotFoundError: With `registry`: a topic does not exist, or has no schema.
        UnavailableError: With `registry`: the metadata store does not respond.
    """
    if options.payload_format is PayloadFormat.TEXT:
        return StringType()
    if options.payload_format is not PayloadFormat.JSON:
        return None
    text = options.payload_schema
    if text is None:
        raise InvalidRequestError(
            "payloadFormat is json, and payloadSchema is not set",
            hint="DDL such as 'id BIGINT, note STRING', a JSON Schema, or registry",
        )
    if text.lower() == _REGISTRY:
        place = find_place(options.config, options.brokers)
        return retry_unavailable(lambda: _registered_type(place, options))
    if text.startswith("{"):
        return _json_type(text)
    return text if text.lower().startswith("struct<") else f"STRUCT<{text}>"


def find_json_schema(place: Place, topic: str) -> dict[str, object]:
    """Returns the newest version of a topic's schema in the registry, a JSON Schema.

    Args:
        place: The log.
        topic: A topic, or a partition of one.

    Raises:
        NotFoundError: The topic has no schema.
        InvalidRequestError: Its schema is not a JSON Schema.
        UnavailableError: The metadata store does not respond.
    """
    history = place.history()
    root = f"{history.config.storage.metadata.root_prefix}/schemas/"
    setting = None
    for name in (topic, base_of_partition(topic)):
        if name is not None and setting is None:
            parsed = TopicName.parse(name)
            setting = _load(
                place, f"{root}_topics/{parsed.namespace}/{parsed.topic}", _TopicSetting
            )
    if setting is None:
        raise NotFoundError(
            "the topic has no schema in the registry",
            topic=topic,
            hint="set payloadSchema to DDL, or to a JSON Schema",
        )
    name = quote(setting.subject, safe="")
    subject_root = f"{root}{f'%5F{name[1:]}' if name.startswith('_') else name}/"
    subject = _load(place, f"{subject_root}metadata", _Subject)
    newest = subject.versions[-1].version if subject is not None and subject.versions else None
    version = (
        _load(place, f"{subject_root}versions/{newest}", _Version) if newest is not None else None
    )
    if version is None:
        raise NotFoundError(f"the schema subject {setting.subject!r} has no version", topic=topic)
    if version.schema_type != _JSON_SCHEMA:
        raise InvalidRequestError(
            f"the topic's schema is {version.schema_type}, not a JSON Schema",
            topic=topic,
            hint="from_avro_payload(df, schema) reads Avro",
        )
    schema: dict[str, object] = json.loads(version.definition)
    return schema


_Record = TypeVar("_Record", _TopicSetting, _Subject, _Version)


def _load(place: Place, key: str, kind: type[_Record]) -> _Record | None:
    found = place.history().metadata.get(key)
    if found is None:
        return None
    try:
        return msgspec.json.decode(found.value, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptDataError(f"a record of the registry is damaged: {error}", path=key) from error


def _registered_type(place: Place, options: ReadOptions) -> StructType:
    names = OffsetResolver(place, options).names(must_exist=True)
    topics = sorted({base_of_partition(name) or name for name in names})
    found = {topic: struct_of(find_json_schema(place, topic)) for topic in topics}
    first = topics[0]
    for topic in topics:
        if found[topic] != found[first]:
            raise InvalidRequestError(
                f"{first} and {topic} have different schemas",
                hint="read them one by one, or set payloadSchema to a schema for both",
            )
    return found[first]


def _json_type(text: str) -> StructType:
    try:
        schema = json.loads(text)
        if isinstance(schema, Mapping) and schema.get("type") == "struct":
            return StructType.fromJson(dict(schema))
    except (ValueError, KeyError, RecursionError) as error:
        raise InvalidRequestError(f"payloadSchema is not a schema in JSON: {error}") from error
    return struct_of(schema)


def struct_of(schema: Mapping[str, object]) -> StructType:
    """Returns the Spark type of a JSON Schema's objects.

    Raises:
        InvalidRequestError: It is not the schema of an object with properties.
    """
    return _struct(columns_of(schema, taken=frozenset()))


def _struct(members: tuple[Member, ...]) -> StructType:
    return StructType(
        [StructField(member.property, _spark_type(member.kind)) for member in members]
    )


def _spark_type(kind: ValueType) -> DataType:
    if kind.form == "array" and kind.item is not None:
        return ArrayType(_spark_type(kind.item))
    return _struct(kind.members) if kind.form == "object" else _TYPES[kind.form]
