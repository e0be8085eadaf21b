"""Which columns the payloads of a topic become in an export.

    a given JSON Schema ─────────────► the same columns for every topic
    `registry`: that of each topic ──► columns of each topic; a table has those of all its topics

Owns: where the schema of a topic comes from, and the columns of a table with several topics. Does
not own: the mapping of a schema to columns (`ister.spark.tables.json_schema`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ister.errors import ConflictError, InvalidRequestError, NotFoundError
from ister.spark.jobs.job import Job
from ister.spark.tables.base import PUBLISH_DATE, Layout
from ister.spark.tables.columns import ENVELOPE, ENVELOPE_WITHOUT_PAYLOAD
from ister.spark.tables.json_schema import Member, columns_of, load_schema
from ister.topic.schema_kinds import SchemaType
from ister.topic.schema_records import read_topic_schema

if TYPE_CHECKING:
    from ister.spark.jobs.export_job import ExportSettings

REGISTRY: Final = "registry"
"""The value of `schema` that stands for the registered schema of each topic."""


@dataclass(frozen=True, slots=True)
class PayloadSchema:
    """The columns that payloads become."""

    id: str
    """Dead letters are recorded under it."""
    members: tuple[Member, ...]

    @property
    def columns(self) -> pa.Schema:
        """The columns of an exported row."""
        typed = [(member.column, member.kind.type) for member in self.members]
        return pa.schema([*ENVELOPE_WITHOUT_PAYLOAD, *pa.schema(typed)])


class PayloadSchemas:
    """Finds the schema of each topic of a round."""

    def __init__(self, job: Job, settings: ExportSettings) -> None:
        """Reads the given schema."""
        self._job = job
        self._is_registry = settings.schema == REGISTRY
        self._given: PayloadSchema | None = None
        if settings.schema is not None and not self._is_registry:
            self._given = _read(load_schema(settings.schema))

    @property
    def is_typed(self) -> bool:
        """Whether payloads become columns, and those that do not fit dead letters."""
        return self._is_registry or self._given is not None

    def of(self, topic: str) -> PayloadSchema | None:
        """Returns the schema of a topic's payloads; None if they stay as they are."""
        if not self._is_registry:
            return self._given
        root_prefix = self._job.place.config.storage.metadata.root_prefix
        found = read_topic_schema(self._job.store, root_prefix, topic)
        if found is None:
            raise NotFoundError(
                "the topic has no registered schema",
                topic=topic,
                hint="set the topic's schema subject, or select topics that have one with --topics",
            )
        if found.schema_type is not SchemaType.JSON_SCHEMA:
            raise InvalidRequestError(
                f"the topic's schema {found.subject!r} is of the type {found.schema_type}; "
                "only a JSON Schema can become columns",
                topic=topic,
                hint="export the topic without --schema, with the payload as one column",
            )
        try:
            return _read(json.loads(found.definition))
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the topic's schema {found.subject!r} is not JSON: {error}", topic=topic
            ) from error


def _read(schema: Mapping[str, object]) -> PayloadSchema:
    canonical = json.dumps(schema, sort_keys=True).encode()
    return PayloadSchema(hashlib.sha256(canonical).hexdigest()[:16], columns_of(schema))


def add_columns(known: pa.Schema, schema: PayloadSchema | None, *, topic: str) -> pa.Schema:
    """Adds the columns of a topic to those of a table, and returns all."""
    wanted = ENVELOPE if schema is None else schema.columns
    by_name = {item.name.casefold(): item for item in known}
    for item in wanted:
        other = by_name.setdefault(item.name.casefold(), item)
        if (other.name, other.type) != (item.name, item.type):
            raise ConflictError(
                f"the column {item.name} is {item.type} in this topic, and {other.name} is "
                f"{other.type} in another topic of the same table",
                topic=topic,
                hint="export each topic into a table of its own, with {topic} in --to",
            )
    return pa.schema(list(by_name.values()))


def layout_of(layout: Layout, columns: Sequence[str]) -> Layout:
    """Returns the layout of the files of one topic, which have no columns of other topics."""
    own = {*columns, PUBLISH_DATE}
    schema = pa.schema([item for item in layout.schema if item.name in own])
    return Layout(schema=schema, by_date=layout.by_date)
