"""Which columns fit into which table."""

import pyarrow as pa
import pytest

from ister.errors import ConflictError
from ister.spark.tables.columns import dates_of, fit
from tests.support.cases import case

_UTC = pa.timestamp("us", tz="UTC")


def _fit(theirs: pa.DataType, ours: pa.DataType, *, nested: bool = True):
    schema, added = fit(
        pa.schema([("c", theirs)]), pa.schema([("c", ours)]), path="p", nested=nested
    )
    return schema.field("c").type, [item.name for item in added]


def test_types_that_go_together():
    for theirs, ours, file in [
        (pa.int64(), pa.int32(), pa.int64()),
        (pa.float64(), pa.int64(), pa.float64()),
        (pa.large_string(), pa.string(), pa.string()),
        (pa.binary_view(), pa.binary(), pa.binary()),
        (pa.timestamp("us", tz="+00:00"), _UTC, _UTC),
        (pa.timestamp("ns", tz="UTC"), _UTC, _UTC),
        (pa.large_list(pa.int64()), pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.map_(pa.large_string(), pa.string()), pa.map_(pa.string(), pa.string()), None),
        (pa.struct([("a", pa.int64()), ("b", pa.int64())]), pa.struct([("a", pa.int32())]), None),
    ]:
        with case(theirs, ours, file):
            found, added = _fit(theirs, ours)
            assert added == []
            if file is not None:
                assert found == file


def test_types_that_do_not():
    for theirs, ours in [
        (pa.int32(), pa.int64()),
        (pa.int64(), pa.float64()),
        (pa.string(), pa.int64()),
        (pa.int64(), pa.string()),
        (pa.timestamp("us"), _UTC),
        (pa.timestamp("ms", tz="UTC"), _UTC),
        (pa.date32(), _UTC),
        (pa.list_(pa.string()), pa.list_(pa.int64())),
        (pa.struct([("a", pa.string())]), pa.struct([("a", pa.int64())])),
        (pa.string(), pa.binary()),
    ]:
        with case(theirs, ours), pytest.raises(ConflictError, match="column c"):
            _fit(theirs, ours)


def test_new_fields_of_structs_are_columns_too():
    theirs, ours = pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int64())])
    assert _fit(pa.list_(theirs), pa.list_(ours))[1] == ["c"]
    with pytest.raises(ConflictError):
        _fit(theirs, ours, nested=False)


def test_days_are_those_of_utc():
    times = pa.array([0, 86_399_999_999, 86_400_000_000], pa.int64()).cast(_UTC)
    assert dates_of(times).to_pylist() == [0, 0, 1]
