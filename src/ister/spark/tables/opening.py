"""Which table an export means: names, places, catalogs.

    to = "./lake/{namespace}/{topic}"       Parquet, Delta: a directory or an address
    to = "{namespace}.{topic}"              Iceberg: a table of the catalog
    to = "./lake/{topic}"                   Iceberg: a warehouse with a SQL catalog in it

Owns: how `to`, `catalog` and `storage_options` become a table. Does not own: tables.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.config import CloudBackend, Config, TableFormat
from ister.errors import InvalidRequestError
from ister.objectstore.store_errors import redact
from ister.spark.tables.base import Table
from ister.spark.tables.delta import DeltaTable
from ister.spark.tables.iceberg import IcebergTable
from ister.spark.tables.parquet_directory import ParquetDirectory
from ister.spark.tables.targets import check_address, local_path, storage_of

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_]")
_LETTERS: Final = "_dead_letters"
_FIELDS: Final = {"namespace", "topic"}

_ICEBERG_OPTIONS: Final = {
    "endpoint": "s3.endpoint",
    "region": "s3.region",
    "access_key": "s3.access-key-id",
    "access_key_id": "s3.access-key-id",
    "secret_key": "s3.secret-access-key",
    "secret_access_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """Where tables are."""

    config: Config
    format: TableFormat
    catalog: Mapping[str, str] | None = field(default=None, repr=False)
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)


def table_name(to: str, topic: str, format: TableFormat) -> str:
    """The table of a topic: `to` with the topic's names in it."""
    # An address may have credentials in it.
    shown = redact(to, ())
    try:
        parts = [part for part in string.Formatter().parse(to) if part[1] is not None]
    except ValueError as error:
        raise InvalidRequestError(f"{shown!r} is not a table: {error}") from error
    for _, field_name, specification, conversion in parts:
        if field_name not in _FIELDS or specification or conversion:
            raise InvalidRequestError(
                f"{shown!r} is not a table: there is no {{{field_name}}}"
                if field_name not in _FIELDS
                else f"{shown!r} is not a table: {{{field_name}}} stands alone in its braces",
                hint="{namespace} and {topic} stand for a topic's names",
            )
    name = TopicName.parse(topic)
    namespace, short = name.namespace, name.topic
    if format is TableFormat.ICEBERG:
        # As SQL has names.
        namespace, short = (_NOT_IN_NAMES.sub("_", part) for part in (namespace, short))
    return to.format(namespace=namespace, topic=short)


def dead_letters_name(table: str, given: str | None) -> str:
    """The table of a table's dead letters."""
    return given if given is not None else table.rstrip("/") + _LETTERS


def open_table(name: str, place: TablePlace, *, clock: Clock) -> Table:
    """The table of a name; nothing is asked of it yet."""
    if not name.strip():
        raise InvalidRequestError("the table has no name", hint="pass to=…, or --to")
    if place.format is TableFormat.ICEBERG:
        return _iceberg(name, place)
    storage = storage_of(name, place.storage_options, place.config.storage.cloud)
    if place.format is TableFormat.DELTA:
        return DeltaTable(storage, clock=clock)
    return ParquetDirectory(storage, clock=clock)


def _iceberg(name: str, place: TablePlace) -> IcebergTable:
    properties = dict(place.catalog or {})
    if "/" in name or os.sep in name:
        # A path: the folder is the warehouse.
        check_address(name)
        warehouse, _, name = name.rstrip("/").rpartition("/")
        properties.setdefault("warehouse", warehouse or "/")
    if "." not in name:
        name = f"default.{name}"
    if not all(name.split(".")):
        raise InvalidRequestError(
            f"{name!r} is not a table", hint="<namespace>.<table>, or <warehouse>/<table>"
        )
    if not {"type", "uri", "py-catalog-impl"} & set(properties):
        properties = _sql_catalog(properties, place)
    elif (directory := local_path(properties.get("warehouse", "x://"))) is not None:
        properties["warehouse"] = f"file://{directory}"
    if properties.get("warehouse", "").startswith("s3://"):
        given = place.storage_options
        cloud = place.config.storage.cloud
        if given is None:
            given = cloud.options if cloud.backend is CloudBackend.S3 else {}
        for option, value in given.items():
            if option in _ICEBERG_OPTIONS:
                properties.setdefault(_ICEBERG_OPTIONS[option], value)
    return IcebergTable(name, properties)


def _sql_catalog(properties: Mapping[str, str], place: TablePlace) -> dict[str, str]:
    """A catalog in SQLite, in a directory; beside it the tables' files."""
    storage = place.config.storage
    base = os.path.dirname(os.path.abspath(storage.metadata.path or storage.wal.dir or "."))
    warehouse = properties.get("warehouse", os.path.join(base, "warehouse"))
    directory = local_path(warehouse)
    if directory is None:
        raise InvalidRequestError(
            "a warehouse in a bucket needs a catalog that is named",
            hint="catalog properties type and uri: type=rest, uri=https://…",
        )
    return {
        **properties,
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}",
    }
