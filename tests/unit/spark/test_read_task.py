"""What a task prepares before it reads."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from ister.base.limits import MIB
from ister.bucket.chunks import OBJECTS_AHEAD_MAX, ObjectPart
from ister.config import load_config
from ister.spark import read_task, workers
from ister.spark.batch import PlannedPartition, read_rows
from ister.spark.location import place_of
from ister.spark.planner import Partition
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.topic.history import BucketLog
from tests.support.machine import NoThreads
from tests.support.stores import Site, SlowReads
from tests.support.streams import A, publish


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


def test_objects_of_a_task_are_fetched_at_the_same_time():
    """Goal: a task of many small objects does not wait for each of them."""
    storage = {
        "uploader": {"max_object_bytes": 4096, "index_every_messages": 3},
        "cloud_reader": {"fetch_chunk_size": 65_536, "read_ahead": True},
    }
    with Site() as site:
        log = site.open("a", scheduler=NoThreads(), storage=storage)
        topic = log.topic(A, create=True)
        publish(topic, 150, size=200)
        topic.upload()
        tree = {"storage": {**storage, "wal": {"dir": "/nowhere"}}}
        with BucketLog(
            load_config(tree, {}), clock=site.clock, objects=site.objects, metadata=site.metadata
        ) as history:
            incarnation = history.topic(A).record().incarnation
            slices = tuple(
                ObjectPart.overlapping(A, one, 0, 150)
                for one in history.topic(A).descriptors(0, 150)
            )
            assert len(slices) > OBJECTS_AHEAD_MAX + 1
            task = ReadTask(
                place=SimpleNamespace(history=lambda: history),
                columns=("offset", "payload"),
                fail_on_data_loss=True,
            )
            slow = SlowReads(site.objects, OBJECTS_AHEAD_MAX + 1)
            found = task.read(
                Partition(number=0, slices=slices, weight=1), {A: TopicIdentity(incarnation, "a")}
            )
            rows = [row for batch in found for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(150))
    assert slow.most == OBJECTS_AHEAD_MAX + 1


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
