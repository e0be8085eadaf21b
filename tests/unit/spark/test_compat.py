"""What differs between Spark versions. The suites on each are run by `test_spark_versions`."""

import subprocess
import sys

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - as everywhere
from pyspark.sql import types as t

import ister.spark
from ister.errors import UnsupportedOperationError
from ister.spark.compat import (
    HAS_LIMITS,
    arrow_schema_of,
    arrow_type_of,
    require_spark,
    with_arrow_column,
)
from tests.support.cases import each

_INNER = t.StructType([t.StructField("y", t.DateType(), nullable=False)])
EVERYTHING = t.StructType(
    [
        t.StructField("text", t.StringType(), nullable=False),
        t.StructField("blob", t.BinaryType()),
        t.StructField("yes", t.BooleanType()),
        t.StructField("byte", t.ByteType()),
        t.StructField("short", t.ShortType()),
        t.StructField("int", t.IntegerType()),
        t.StructField("long", t.LongType()),
        t.StructField("float", t.FloatType()),
        t.StructField("double", t.DoubleType()),
        t.StructField("money", t.DecimalType(20, 4)),
        t.StructField("day", t.DateType()),
        t.StructField("time", t.TimestampType()),
        t.StructField("wall", t.TimestampNTZType()),
        t.StructField("void", t.NullType()),
        t.StructField("list", t.ArrayType(t.LongType(), containsNull=False)),
        t.StructField("map", t.MapType(t.StringType(), t.DoubleType(), valueContainsNull=False)),
        t.StructField("nested", t.StructType([t.StructField("x", t.ArrayType(_INNER))])),
    ]
)


def test_arrow_types_are_those_that_spark_has():
    if not HAS_LIMITS:
        pytest.skip("before 4.2 its function takes no time zone")
    conversions = pytest.importorskip("pyspark.sql.pandas.types")
    assert arrow_schema_of(EVERYTHING).equals(
        conversions.to_arrow_schema(EVERYTHING, timezone="UTC")
    )
    assert not arrow_schema_of(EVERYTHING).field("text").nullable


@each("kind", [t.DayTimeIntervalType(), t.ArrayType(t.DayTimeIntervalType())])
def test_type_that_messages_do_not_have_is_refused(kind):
    with pytest.raises(UnsupportedOperationError, match="interval day to second has no Arrow type"):
        arrow_type_of(kind)


def test_what_a_version_cannot_do_is_refused_with_the_one_that_can():
    require_spark("4.1", "it", is_met=True)
    with pytest.raises(UnsupportedOperationError, match=r"^it needs Spark 4\.1 or later; this is"):
        require_spark("4.1", "it", is_met=False)


@pytest.mark.parametrize("is_4_0", [False, True])
def test_column_of_arrow_arrays_is_the_same_in_every_version(spark, monkeypatch, is_4_0):
    if is_4_0:
        monkeypatch.delattr(F, "arrow_udf", raising=False)
    kind = t.StructType([t.StructField("sum", t.LongType()), t.StructField("name", t.StringType())])

    def function(left, right, names):
        rows = zip(left.to_pylist(), right.to_pylist(), names.to_pylist(), strict=True)
        found = [None if name is None else {"sum": a + b, "name": name} for a, b, name in rows]
        return pa.array(found, arrow_type_of(kind))

    frame = spark.createDataFrame([(1, 2, "a"), (3, 4, None)], "l long, r long, name string")
    added = with_arrow_column(frame, "new", function, kind, F.col("l"), F.col("r"), F.col("name"))
    assert added.schema.names == ["l", "r", "name", "new"]
    assert added.schema["new"].dataType == kind
    found = [(row.l, row.name, row.new and tuple(row.new)) for row in added.collect()]
    assert found == [(1, "a", (3, "a")), (3, None, None)]


_WITHOUT_SOURCES = """
import sys
import pyspark.sql
import pyspark.sql.datasource
pyspark.__version__ = "3.5.7"
sys.modules["pyspark.sql.datasource"] = None
del pyspark.sql.datasource
from ister.errors import ConfigError
import ister.spark
from ister.spark.jobs.session import open_session

def run_job():
    with open_session("local[1]"):
        pass

for call in (lambda: ister.spark.register(None), lambda: ister.spark.from_json_payload, run_job):
    try:
        call()
    except ConfigError as error:
        print(error)
"""


def test_spark_without_data_sources_is_refused_with_what_works_there():
    """As 3.5 is, which has no `pyspark.sql.datasource`."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_SOURCES], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert "need Spark 4.0 or later; this is Spark 3.5.7" in line
        assert "spark.read.parquet" in line


def test_format_that_spark_has_found_by_itself_may_be_registered_again():
    """Spark 4.0 refuses a name that is known; other errors are not hidden."""

    class Session:
        def __init__(self, condition):
            self.dataSource = self
            self.condition = condition

        def register(self, source):
            raise AnalysisException("refused", errorClass=self.condition, messageParameters={})

        def createDataFrame(self, rows, schema):  # noqa: N802 - Spark's name
            pass

    ister.spark.register(Session("DATA_SOURCE_ALREADY_EXISTS"))
    with pytest.raises(AnalysisException):
        ister.spark.register(Session("SOMETHING_ELSE"))
