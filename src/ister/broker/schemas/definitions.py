"""Reads a definition of any schema type, and compares two of them."""

from __future__ import annotations

from ister.broker.schemas.avro import read_avro
from ister.broker.schemas.definition import DEFINITION_BYTES_MAX, Definition
from ister.broker.schemas.primitives import BytesDefinition, StringDefinition, read_number
from ister.broker.schemas.protobuf import read_protobuf
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import CompatibilityMode, SchemaType, parse_schema_type


def read_definition(type_name: str, data: bytes) -> Definition:
    """Parses a definition."""
    schema_type = parse_schema_type(type_name)
    if len(data) > DEFINITION_BYTES_MAX:
        raise InvalidRequestError(
            f"the schema has {len(data)} bytes; the maximum is {DEFINITION_BYTES_MAX}"
        )
    match schema_type:
        case SchemaType.BYTES:
            return BytesDefinition()
        case SchemaType.STRING:
            return StringDefinition()
        case SchemaType.NUMBER:
            return read_number(type_name, data)
        case SchemaType.AVRO:
            return read_avro(data)
        case SchemaType.JSON_SCHEMA:
            # jsonschema is a tenth of a broker's start, and most brokers have no such schema.
            from ister.broker.schemas.json_schema import read_json_schema  # noqa: PLC0415

            return read_json_schema(data)
        case SchemaType.PROTOBUF:
            return read_protobuf(data)


def find_incompatibilities(old: Definition, new: Definition, mode: CompatibilityMode) -> list[str]:
    """Why `new` may not follow `old`; empty if it may."""
    if mode is CompatibilityMode.NONE or old.fingerprint == new.fingerprint:
        return []
    if old.schema_type is not new.schema_type:
        return [f"the subject has the type {old.schema_type}, not {new.schema_type}"]
    problems = new.breaks(old)
    if mode in (CompatibilityMode.BACKWARD, CompatibilityMode.FULL):
        problems += [f"backward: {reason}" for reason in new.cannot_read(old)]
    if mode in (CompatibilityMode.FORWARD, CompatibilityMode.FULL):
        problems += [f"forward: {reason}" for reason in old.cannot_read(new)]
    return problems
