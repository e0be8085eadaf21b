"""What differs between the Spark versions that Ister supports: 4.0, 4.1, 4.2 and 4.3.

Owns: substitutes for names that only some versions have; the Arrow types of Spark's types, for
which PySpark has no public function. Does not own: what readers and writers do.

Other modules of `ister.spark` import from here what only some versions have, and otherwise use
public names of PySpark alone. What came when:

    4.1  filter pushdown; `arrow_udf`
    4.2  limits of a stream (`latestOffset` with a start), several batches of `availableNow`

A reader or writer can inherit from the substitute of a missing class; a Spark without the class
does not call its methods. Before 4.2 Spark calls `latestOffset` without a start, and
`ister.spark.stream` keeps the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyspark
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know it by
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ister.errors import ConfigError, UnsupportedOperationError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "HAS_LIMITS",
    "HAS_PUSHDOWN",
    "SPARK_VERSION",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema_of",
    "arrow_type_of",
    "require_spark",
    "with_arrow_column",
]

SPARK_VERSION: Final = pyspark.__version__

try:
    from pyspark.sql import datasource
except ImportError as error:
    raise ConfigError(
        f'format("ister") and the jobs need Spark 4.0 or later; this is Spark {SPARK_VERSION}',
        hint="older versions can read what `ister pipeline export` writes, and Parquet objects of "
        "compacted topics: spark.read.parquet",
    ) from error

HAS_PUSHDOWN: Final = hasattr(datasource.DataSourceReader, "pushFilters")
"""Whether Spark can push filters down to a reader."""

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS = True
    """Whether Spark passes a start and a limit to `latestOffset`."""
except ImportError:
    from dataclasses import dataclass

    HAS_LIMITS = False

    class ReadLimit:  # type: ignore[no-redef]
        """How much a micro-batch reads."""

    @dataclass
    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """No limit: everything that is there."""

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """A limit: at most `max_rows` messages."""

        max_rows: int

    @dataclass
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """A limit: at most `max_bytes` bytes."""

        max_bytes: int

    @dataclass
    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        """A minimum: at least `min_rows` messages."""

        min_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A stream reader that can freeze its end."""


if hasattr(datasource, "DataSourceStreamArrowWriter"):
    DataSourceStreamArrowWriter = datasource.DataSourceStreamArrowWriter
else:

    class DataSourceStreamArrowWriter(  # type: ignore[no-redef, misc] # another `commit`
        datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter
    ):
        """A streaming writer that takes Arrow batches.

        Spark 4.0 passes them to every `DataSourceArrowWriter`, a streaming one included.
        """


def require_spark(version: str, what: str, *, is_met: bool) -> None:
    """Raises an error if this version of Spark lacks a feature.

    Args:
        version: The first version that has the feature.
        what: The feature, as the subject of a sentence.
        is_met: Whether this version has it.
    """
    if not is_met:
        raise UnsupportedOperationError(
            f"{what} needs Spark {version} or later; this is Spark {SPARK_VERSION}"
        )


# -- Arrow ----------------------------------------------------------------------------------------

_ARROW: Final[dict[type[DataType], pa.DataType]] = {
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us", tz="UTC"),
    TimestampNTZType: pa.timestamp("us"),
    NullType: pa.null(),
}


def arrow_type_of(kind: DataType) -> pa.DataType:
    """Returns the Arrow type in which Spark exchanges a Spark type; timestamps are in UTC."""
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, ArrayType):
        return pa.list_(_field("element", kind.elementType, nullable=kind.containsNull))
    if isinstance(kind, MapType):
        return pa.map_(
            _field("key", kind.keyType, nullable=False),
            _field("value", kind.valueType, nullable=kind.valueContainsNull),
        )
    if isinstance(kind, StructType):
        return pa.struct(list(arrow_schema_of(kind)))
    found = _ARROW.get(type(kind))
    if found is None:
        raise UnsupportedOperationError(f"{kind.simpleString()} has no Arrow type in Ister")
    return found


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema in which Spark exchanges rows."""
    return pa.schema(
        [_field(field.name, field.dataType, nullable=field.nullable) for field in schema.fields]
    )


def _field(name: str, kind: DataType, *, nullable: bool) -> pa.Field:
    return pa.field(name, arrow_type_of(kind), nullable=nullable)


# -- functions over Arrow arrays ------------------------------------------------------------------

_ARGUMENTS: Final = "__ister_arguments"


def with_arrow_column(
    df: DataFrame,
    name: str,
    function: Callable[..., pa.Array],
    kind: DataType,
    *arguments: Column,
) -> DataFrame:
    """Adds a column that a function computes from Arrow arrays, a batch at a time.

    Spark 4.0 has no `arrow_udf`. There `mapInArrow` computes the column, which reads every column
    of `df` and loses its watermark.

    Args:
        df: The rows, of a batch or a stream.
        name: The new column's name, which no column of `df` has.
        function: Called in tasks with an array for each argument; returns one of the same length.
        kind: The type of the column.
        *arguments: The columns to pass to the function.
    """
    if hasattr(F, "arrow_udf"):
        return df.withColumn(name, F.arrow_udf(function, kind)(*arguments))
    packed = df.withColumn(
        _ARGUMENTS, F.struct(*(argument.alias(f"_{at}") for at, argument in enumerate(arguments)))
    )
    result = arrow_type_of(kind)

    def compute(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            values = function(*batch.column(_ARGUMENTS).flatten())
            names = [*batch.schema.names[:-1], name]
            yield pa.RecordBatch.from_arrays([*batch.columns[:-1], values.cast(result)], names)

    return packed.mapInArrow(compute, StructType([*df.schema.fields, StructField(name, kind)]))
