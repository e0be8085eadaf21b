"""The data source `ister`: what Spark finds behind `format("ister")`.

Owns: which reader or writer a call gets. Spark creates this class in several processes, several
times, so it only checks options; stores are opened when there is something to read.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from ister.errors import IsterError
from ister.extras import missing_extra
from ister.spark.compat import HAS_PUSHDOWN, require_spark
from ister.spark.options import ReadOptions, WriteOptions

if TYPE_CHECKING:
    from ister.spark.batch import BatchReader
    from ister.spark.sink import BatchWriter, StreamWriter
    from ister.spark.stream import StreamReader


class IsterDataSource(DataSource):
    """The data source `ister`: topics as tables and streams."""

    @classmethod
    def name(cls) -> str:
        """Returns the format's name."""
        return "ister"

    def schema(self) -> StructType:
        """Returns the columns of a row, or those that the option `columns` names.

        Called by `load()`, so that invalid options are refused there, not at the first row.
        """
        try:
            options = ReadOptions.parse(self.options, is_streaming=False)
        except IsterError as error:
            try:
                options = ReadOptions.parse(self.options, is_streaming=True)
            except IsterError:
                raise error from None
        _check_version(options)
        schema: StructType = _load("rows").row_schema(options.columns)
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


def _check_version(options: ReadOptions) -> None:
    if options.pushdown:
        require_spark("4.1", "the option pushdown", is_met=HAS_PUSHDOWN)


def _load(name: str) -> ModuleType:
    """Imports a module of this package when it is needed."""
    try:
        return importlib.import_module(f"ister.spark.{name}")
    except ImportError as error:
        raise missing_extra("the data source ister", "spark", error) from error
