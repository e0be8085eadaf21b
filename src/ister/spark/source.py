"""The data source `ister`: what Spark finds behind `format("ister")`.

Owns: which reader or writer a call gets. Spark creates this class in several processes, several
times, so it only checks options; stores are opened when there is something to read.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from ister.base.extras import missing_extra
from ister.errors import IsterError, UnsupportedOperationError
from ister.spark.compat import HAS_PUSHDOWN, require_spark
from ister.spark.options import (
    ALIASES,
    READ_OPTIONS,
    WRITE_OPTIONS,
    ReadOptions,
    WriteOptions,
    has_stream_options,
)

if TYPE_CHECKING:
    from ister.spark.batch import BatchReader
    from ister.spark.sink import BatchWriter, StreamWriter
    from ister.spark.stream import StreamReader


# What Spark adds to the options of a table when it is created.
_PROVIDER: Final = "provider"


class IsterDataSource(DataSource):
    """The data source `ister`: topics as tables and streams."""

    @classmethod
    def name(cls) -> str:
        """Returns the format's name."""
        return "ister"

    def schema(self) -> StructType | str:
        """Returns the schema of a read: all columns of a message, or those that options name.

        It is DDL, for Spark to parse, if the option `payloadSchema` is.

        Called by `load()`, so that invalid options are refused there, not at the first row; and by
        `CREATE TABLE`, whose options Spark passes here only, and not to a reader.
        """
        if _PROVIDER in self.options:
            _check_table(self.options)
            table: StructType = _load("rows").row_schema(None)
            return table
        # Spark does not say which it is; if neither fits, the more likely one explains.
        is_streaming = has_stream_options(self.options)
        try:
            options = ReadOptions.parse(self.options, is_streaming=is_streaming)
        except IsterError as error:
            try:
                options = ReadOptions.parse(self.options, is_streaming=not is_streaming)
            except IsterError:
                raise error from None
        _check_version(options)
        payload = _load("payload_schema").payload_type(options)
        comment = None
        if not options.include_unreachable_tail:
            comment = _load("batch").unreachable_comment(options)
        schema: StructType | str = _load("rows").read_schema(options, payload, comment)
        return schema

    def reader(self, schema: StructType) -> BatchReader:
        """Returns the reader for `spark.read`."""
        options = ReadOptions.parse(self.options, is_streaming=False)
        _check_version(options)
        kind = _load("pushdown").PushdownReader if options.pushdown else _load("batch").BatchReader
        reader: BatchReader = kind(options, schema)
        return reader

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - here: Spark's names
        """Returns the reader for `spark.readStream`."""
        options = ReadOptions.parse(self.options, is_streaming=True)
        reader: StreamReader = _load("stream").StreamReader(options, schema)
        return reader

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Returns the writer for `df.write`."""
        options = WriteOptions.parse(self.options, is_streaming=False)
        writer: BatchWriter = _load("sink").BatchWriter(options, schema, overwrite=overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Returns the writer for `df.writeStream`."""
        options = WriteOptions.parse(self.options, is_streaming=True)
        writer: StreamWriter = _load("sink").StreamWriter(options, schema, overwrite=overwrite)
        return writer


def _check_table(options: Mapping[str, str]) -> None:
    """Refuses a table with options, which Spark would not pass to its readers."""
    known = {name.lower() for name in (*READ_OPTIONS, *ALIASES, *WRITE_OPTIONS)}
    given = sorted(name for name in map(str.lower, options) if name in known)
    if given:
        raise UnsupportedOperationError(
            f"Spark does not pass options of a table to a Python source: {', '.join(given)}",
            hint="create the table without OPTIONS, and set them in the query: SELECT * FROM t "
            "WITH (config = './data', topic = '/default/orders'), or in a view; "
            "ister.spark.register_views(spark, config) creates a view for each topic",
        )


def _check_version(options: ReadOptions) -> None:
    if options.pushdown:
        require_spark("4.1", "the option pushdown", is_met=HAS_PUSHDOWN)


def _load(name: str) -> ModuleType:
    """Imports a module of this package when it is needed."""
    try:
        return importlib.import_module(f"ister.spark.{name}")
    except ImportError as error:
        raise missing_extra("the data source ister", "spark", error) from error
