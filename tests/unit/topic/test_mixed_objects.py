"""A topic of objects in both formats, whole and with holes: every reader gives the same."""

import os
import random
from dataclasses import replace

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.compute as pc  # noqa: E402

from ister.base.model import COLUMNS  # noqa: E402
from ister.bucket.chunks import ObjectPart  # noqa: E402
from ister.bucket.names import TopicKeys  # noqa: E402
from ister.config import load_config  # noqa: E402
from ister.format.arrow.schema import HIDDEN  # noqa: E402
from ister.format.descriptor import encode_descriptor  # noqa: E402
from ister.spark.planner import TopicRange, plan  # noqa: E402
from ister.topic.columns import Decoders  # noqa: E402
from ister.topic.history import BucketLog  # noqa: E402
from tests.support.cases import each  # noqa: E402
from tests.support.machine import NoThreads, numbered  # noqa: E402
from tests.support.stores import NAME, PREFIX, UPLOADS, Site, merged  # noqa: E402

TEXT = str(NAME)
SMALL = {
    "uploader": {"max_object_bytes": 4096, "index_every_messages": 3},
    "cloud_reader": {"fetch_chunk_size": 65_536, "read_ahead": False},
}
SETTINGS = replace(UPLOADS, chunk_bytes=64 * 1024, index_every_messages=3)
COUNT = 600
SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else range(6)


def seen(messages):
    return [(message.offset, message.payload) for message in messages]


def a_history(site, storage):
    config = load_config({"storage": {**storage, "wal": {"dir": "/nowhere"}}}, {})
    return BucketLog(config, clock=site.clock, objects=site.objects, metadata=site.metadata)


def mix(site, rng):
    """Merges runs of objects as compaction might; returns the offsets that are left."""
    keys = TopicKeys(PREFIX, NAME)
    left = set(range(COUNT))
    for _ in range(rng.randrange(1, 5)):
        objects = [described for described, _ in site.catalog().descriptors()]
        first = rng.randrange(len(objects))
        run = objects[first : first + rng.randrange(1, 6)]
        is_thin = rng.random() < 0.5
        is_parquet = is_thin or any(item.kept for item in run) or rng.random() < 0.7
        gone = (
            set(rng.sample(range(COUNT), rng.choice([3, COUNT // 2, COUNT]))) if is_thin else set()
        )

        def survives(batch, gone=gone):
            return pc.invert(pc.is_in(batch.column("offset"), pa.array(sorted(gone), pa.int64())))

        new = merged(
            site.objects,
            run,
            settings=SETTINGS,
            format="parquet" if is_parquet else "dnb1",
            tag=f"{rng.randrange(1 << 32):08x}",
            survives=survives if is_thin else None,
            row_group_bytes=rng.choice([1000, 8000, 1 << 20]),
        )
        for described in run:
            site.metadata.delete(keys.descriptor(described.start))
        site.metadata.put(keys.descriptor(new.start), encode_descriptor(new))
        left -= {offset for offset in gone if new.start <= offset < new.end}
    return sorted(left)


@each("seed", SEEDS)
def test_every_reader_gives_what_is_there(seed):
    """Goal: formats and holes change nothing about any message, for whoever reads.

    Replay one with SEED=… and this test's name.
    """
    print(f"SEED={seed}")
    rng = random.Random(seed)
    with Site() as site:
        log = site.open("a", scheduler=NoThreads(), storage=SMALL)
        topic = log.topic(TEXT, create=True)
        for number, payload in enumerate(numbered(COUNT, first=0, size=100)):
            topic.append(
                payload,
                publish_time=1000 + 10 * number,
                routing_key=f"k{number % 7}" if number % 3 else None,
                attributes={"a": str(number)},
            )
        topic.upload()
        every = (*COLUMNS, *HIDDEN)
        rows = topic.read_arrow(columns=every).read_all().to_pylist()
        messages = seen(topic.read())
        log.seal(TEXT)
        log.close()
        left = mix(site, rng)
        rows = [rows[offset] for offset in left]
        messages = [messages[offset] for offset in left]

        # A machine that has no files: everything comes from the bucket.
        cloud_reader = {**SMALL.get("cloud_reader", {}), "read_ahead": rng.random() < 0.7}
        storage = {**SMALL, "cloud_reader": cloud_reader}
        log = site.open("b", scheduler=NoThreads(), storage=storage)
        topic = log.topic(TEXT)
        assert seen(topic.read()) == messages
        for _ in range(5):
            start = rng.randrange(COUNT)
            end = rng.randrange(start, COUNT + 1)
            wanted = [item for item in messages if start <= item[0] < end]
            assert seen(topic.read(start, end=end)) == wanted
            table = topic.read_arrow(start, end=end, columns=every).read_all()
            assert table.to_pylist() == [row for row in rows if start <= row["offset"] < end]
        # What is new follows.
        with topic.reader(left[-1] if left else 0) as reader:
            found = seen(reader.poll())
            topic.append(b"new")
            topic.flush()
            for _ in range(10):
                found += seen(reader.poll())
        assert [offset for offset, _ in found] == [*left[-1:], COUNT]
        log.close()

        history = a_history(site, storage)
        found = history.topic(TEXT)
        for _ in range(5):
            start = rng.randrange(COUNT)
            end = rng.randrange(start, COUNT + 1)
            columns = rng.choice([every, ("payload",), ("offset", "attributes"), ()])
            table = found.read_arrow(start, end=end, columns=columns).read_all()
            wanted = [row for row in rows if start <= row["offset"] < end]
            assert table.num_rows == len(wanted)
            assert (
                table.to_pylist()
                == [{name: row[name] for name in columns} for row in wanted if columns]
                or not columns
            )
            time = 1000 + 10 * start
            later = [offset for offset in left if offset >= start]
            assert found.find_time(time, 0, COUNT) == (later[0] if later else None)
        check_plan(history, left, rng)
        history.close()


def check_plan(history, left, rng):
    """Reads the topic in the parts that Spark's tasks would."""
    topic = history.topic(TEXT)
    start = rng.randrange(COUNT)
    asked = TopicRange(
        topic=TEXT,
        incarnation=topic.record().incarnation,
        start=start,
        end=COUNT,
        tiered=COUNT,
        descriptors=topic.descriptors(start, COUNT),
        tail_bytes=0,
    )
    offsets = []
    for partition in plan([asked], split_bytes=rng.choice([2000, 10_000])):
        upcoming = history.ahead_of(partition.slices)
        for item in partition.slices:
            assert isinstance(item, ObjectPart)
            reached = item.start
            for rows in topic.read_part(item, Decoders(TEXT, ("offset",)), upcoming):
                offsets += rows.batch["offset"].to_pylist()
                assert rows.next_offset >= reached
                reached = rows.next_offset
            # A task knows that it is done, holes or not.
            assert reached == item.end
    assert offsets == [offset for offset in left if offset >= start]


def test_a_parquet_object_that_is_gone_or_damaged_is_read_with_care():
    with Site() as site:
        log = site.open("a", scheduler=NoThreads(), storage=SMALL)
        topic = log.topic(TEXT, create=True)
        for payload in numbered(COUNT, first=0, size=100):
            topic.append(payload)
        topic.upload()
        log.close()
        objects = [described for described, _ in site.catalog().descriptors()]
        keys = TopicKeys(PREFIX, NAME)

        def merge(kind, tag):
            options = {"format": kind, "tag": tag, "row_group_bytes": 4000}
            new = merged(site.objects, objects, settings=SETTINGS, **options)
            for described in objects:
                site.metadata.delete(keys.descriptor(described.start))
            site.metadata.put(keys.descriptor(0), encode_descriptor(new))
            return new

        archive = merge("parquet", "00000001")
        part = ObjectPart.overlapping(TEXT, archive, 3, COUNT - 3)
        merge("dnb1", "00000002")
        found = a_history(site, SMALL).topic(TEXT)
        key = f"storage/topics{TEXT}/objects/{archive.object_id}"
        data = bytearray(site.objects.read(key, 0, 1 << 30))
        data[len(data) // 2] ^= 1
        site.objects.put(key, bytes(data))
        for _ in range(2):
            offsets = []
            for rows in found.read_part(part, Decoders(TEXT, ("offset", "payload"))):
                offsets += rows.batch["offset"].to_pylist()
            assert offsets == list(range(3, COUNT - 3))
            site.objects.delete(key)
