"""The pipeline's jobs on topics that were adopted from Danube, with tasks in this process."""

import os

import pytest

import ister
from ister.cli.main import main
from ister.spark.jobs.compact_job import compact
from ister.spark.jobs.gc_job import gc
from ister.spark.jobs.scrubbing import scrub
from tests.integration.spark_topics import SparkPlace, without_spark
from tests.support.danube_files import (
    BODY_OF_LAYOUT,
    TOPIC,
    DanubeBucket,
    danube_frames,
    messages_of,
)
from tests.support.grace import without_least_grace
from tests.support.spark_here import SparkHere

LAYOUTS = pytest.mark.parametrize("layout", ["0.5", "0.6.2", "0.9"])
SPARK = SparkHere()


class Stage:
    """A data directory whose bucket is Danube's."""

    def __init__(self, root):
        self.place = SparkPlace(root, cloud={"layout": "segments", "orphan_grace_minutes": 0})
        self.bucket = DanubeBucket(root / "objects")

    def recover(self):
        return main(["recover", "--config", str(self.place.config)])

    def records(self):
        with self.place.open() as log:
            return [message.record for message in log.topic(TOPIC).read()]

    def rows(self):
        """The rows that a table of the topic has, without a broker."""
        with ister.open_bucket(str(self.place.config)) as history:
            return history.topic(TOPIC).read_arrow().read_all().to_pylist()

    def ids(self):
        with ister.open_bucket(str(self.place.config)) as history:
            return [d.object_id for d, _ in history.topic(TOPIC).catalog.descriptors()]

    def findings(self, **settings):
        return scrub(SPARK, str(self.place.config), **settings).topics[TOPIC]["findings"]


@pytest.fixture
def stage(tmp_path):
    with without_spark():
        yield Stage(tmp_path / "data")


@LAYOUTS
def test_adopted_topic_is_a_table_and_is_found_sound(stage, layout):
    for start in range(0, 40, 10):
        stage.bucket.put(layout, start, start + 10)
    assert stage.recover() == 0
    wanted = messages_of(0, 40, BODY_OF_LAYOUT[layout])
    rows = stage.rows()
    assert [row["offset"] for row in rows] == list(range(40))
    for name in ("payload", "producer_name", "schema_id", "schema_version", "routing_key"):
        assert [row[name] for row in rows] == [getattr(message, name) for message in wanted]
    assert [dict(row["attributes"]) for row in rows] == [message.attributes for message in wanted]
    assert stage.findings() == []


@LAYOUTS
@pytest.mark.parametrize("format", ["dnb1", "parquet"])
def test_compaction_replaces_danubes_objects_and_collection_removes_them(stage, layout, format):
    old = [stage.bucket.put(layout, start, start + 10) for start in range(0, 40, 10)]
    spare = stage.bucket.put(layout, 0, 10) if layout != "0.5" else None
    assert stage.recover() == (0 if spare is None else 1)
    before = stage.records()
    config = str(stage.place.config)
    settings = {"target_mb": 1, "min_objects": 2, "grace_minutes": 0}
    with without_least_grace():
        compact(SPARK, config, format=format, **settings)
    (merged,) = stage.ids()
    assert merged.startswith("segments/data-0-1" if format == "dnb1" else "data-0-39-")
    assert stage.records() == before
    assert [found["kind"] for found in stage.findings()] == ["orphan"] * (spare is not None)
    for path in old:
        if path.exists():
            os.utime(path, (0, 0))
    gc(SPARK, config)
    # One was left out when the topic was adopted: it is not Ister's to delete.
    left = [path for path in (*old, spare) if path is not None and path.exists()]
    assert len(left) == (0 if spare is None else 1)
    assert stage.records() == before == messages_of(0, 40, BODY_OF_LAYOUT[layout])


def test_torn_segment_is_found_and_replaced_by_its_whole_frames(stage):
    stage.bucket.put("0.9", 0, 10)
    data = danube_frames(messages_of(10, 20, "0.12"))
    torn = stage.bucket.put("0.9", 10, 20, data=data[:-20])
    assert stage.recover() == 1
    assert {finding["object"] for finding in stage.findings()} == {f"segments/{torn.name}"}
    stage.findings(repair=True)
    # The torn one is still there, and Ister did not create it.
    assert [(found["kind"], found["object"]) for found in stage.findings()] == [
        ("orphan", f"segments/{torn.name}")
    ]
    assert stage.records() == messages_of(0, 19, "0.12")
    assert torn.read_bytes() == data[:-20]
