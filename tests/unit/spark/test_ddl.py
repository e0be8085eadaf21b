"""DDL without a JVM: what Spark makes of it, and errors that say what is wrong."""

import pytest

from ister.errors import InvalidRequestError
from ister.spark.ddl import parse_struct
from tests.support.cases import case

VALID = [
    "id BIGINT",
    "id: bigint",
    "`a b` STRING, `c``d` INT",
    "a BOOLEAN, b TINYINT, c SMALLINT, d INT, e LONG, f FLOAT, g DOUBLE, h DATE, i TIMESTAMP",
    "a BYTE, b SHORT, c INTEGER, d REAL, e BINARY, f TIMESTAMP_NTZ, g TIMESTAMP_LTZ",
    "amount DECIMAL(10, 2), plain DECIMAL, short DEC(5), n NUMERIC(4,4)",
    "tags ARRAY<STRING>, deep ARRAY<ARRAY<STRUCT<x: INT, y: ARRAY<DOUBLE>>>>",
    "m MAP<STRING, STRUCT<a INT, b STRING>>",
    "STRUCT<id: BIGINT, inner: STRUCT<a: INT>>",
    "id BIGINT NOT NULL COMMENT 'its', note STRING COMMENT \"text\"",
    "  date  DATE ,  2x INT ",
]
INVALID = {
    "": "the name of a field is missing at the end",
    "id": "a type is missing at the end",
    "id BIGNUM": "unknown type 'BIGNUM'",
    "id BIGINT note STRING": "unexpected 'note'",
    "id BIGINT,": "the name of a field is missing at the end",
    "id ARRAY<STRING": "'>' is missing at the end",
    "id ARRAY STRING": "'<' is missing before 'STRING'",
    "id MAP<STRING>": "',' is missing before '>'",
    "id BIGINT NOT": "NOT is not followed by NULL",
    "id BIGINT COMMENT x": "a comment in quotes is missing before 'x'",
    "id DECIMAL(39)": r"DECIMAL\(39, 0\) does not exist",
    "id DECIMAL(5, x)": "'x' is not a number",
    "id ; BIGINT": "unexpected '; BIGINT'",
    "STRUCT<id: BIGINT>, x INT": "unexpected ','",
}


def test_types_are_those_of_spark(spark):
    for text in VALID:
        with case(text):
            whole = text if text.startswith("STRUCT") else f"STRUCT<{text}>"
            expected = spark.range(0).selectExpr(f"CAST(NULL AS {whole}) AS c").schema["c"].dataType
            found = parse_struct("payloadSchema", text)
            assert found.simpleString() == expected.simpleString()
            assert [f.nullable for f in found] == [f.nullable for f in expected]


@pytest.mark.parametrize(("text", "reason"), INVALID.items())
def test_what_is_not_ddl(text, reason):
    with pytest.raises(InvalidRequestError, match=f"payloadSchema is not valid DDL: {reason}"):
        parse_struct("payloadSchema", text)
