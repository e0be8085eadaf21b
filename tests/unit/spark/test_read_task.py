"""What a task prepares before it reads."""

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from ister.config import load_config
from ister.limits import MIB
from ister.spark import read_task, workers
from ister.spark.batch import PlannedPartition, read_rows
from ister.spark.location import place_of
from ister.spark.planner import Partition
from ister.spark.read_task import ReadTask


@pytest.mark.parametrize(
    ("cloud", "prefetches"),
    [({"backend": "fs"}, False), ({"backend": "s3", "root": "s3://bucket"}, True)],
)
def test_files_are_not_prefetched(tmp_path, cloud, prefetches):
    config = load_config(
        {"storage": {"wal": {"dir": str(tmp_path / "wal")}, "cloud": cloud}},
        {},
    )
    place = place_of(config)
    assert (place.history().ahead is not None) is prefetches
    assert place.config.storage.cloud_reader.read_ahead


def test_a_task_keeps_buffers_and_loads_the_compiled_loops(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(read_task, "keep_buffers", lambda: calls.append("buffers"))
    monkeypatch.setattr(
        workers.kernels, "load", lambda timeout: calls.append(("loops", timeout is not None))
    )
    place = place_of(load_config({"storage": {"wal": {"dir": str(tmp_path / "wal")}}}, {}))
    task = ReadTask(place=place, columns=("offset",), fail_on_data_loss=True)
    monkeypatch.setattr(Partition, "bytes", property(lambda partition: partition.weight))
    for weight in (MIB, 64 * MIB):
        assert not list(task.read(Partition(number=0, slices=(), weight=weight), {}))
    # A wait with an end: the first process on a machine compiles for long.
    assert calls == ["buffers", "buffers", ("loops", True)]


@pytest.mark.parametrize("nullable", [True, False])
def test_batch_with_sparks_schema_is_handed_over_as_it_is(nullable):
    batch = pa.record_batch({"offset": pa.array([1, 2], pa.int64())})

    class Task:
        def read(self, partition, identities):
            yield batch

    planned = PlannedPartition(Partition(number=0, slices=(), weight=0), {})
    schema = StructType([StructField("offset", LongType(), nullable=nullable)])
    (found,) = read_rows(Task(), planned, schema)
    assert (found is batch) is nullable
    assert found.schema.field("offset").nullable is nullable
    assert found.column(0).to_pylist() == [1, 2]
