"""The search for the latest messages, step by step, without Spark: what each task does."""

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import ister
from ister.errors import CorruptDataError, NotFoundError
from ister.format.descriptor import ObjectDescriptor
from ister.spark.jobs import latest_per_key
from ister.spark.jobs.latest_per_key import (
    KeyedTopic,
    Latest,
    LatestOffsets,
    _assign,
    _bundle,
    _scan,
    _Search,
    _stage,
    find_latest,
)
from ister.spark.jobs.tasks import LocalRunner
from ister.spark.location import find_place
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace, without_spark

A, B = "/default/a", "/default/b"
HOUR_MS = 3_600_000


@pytest.fixture
def place(tmp_path):
    with without_spark():
        yield SparkPlace(tmp_path)


def fill(place, name, messages, *, uploads=3):
    """A topic of (key, payload, hours after the first), in so many objects."""
    with place.open() as log:
        topic = log.topic(name, create=True)
        size = -(-len(messages) // uploads)
        for at in range(0, len(messages), size):
            for key, payload, hours in messages[at : at + size]:
                topic.append(payload, routing_key=key, publish_time=PUBLISHED_MS + hours * HOUR_MS)
            topic.flush()
            topic.upload()


def search(place, names, *, before_hours=0, groups=None, run="compact-x"):
    with ister.open_bucket(place.config) as history:
        topics = []
        for name in names:
            topic = history.topic(name)
            objects = tuple(described for described, _ in topic.catalog.descriptors())
            topics.append(
                KeyedTopic(
                    name=name,
                    incarnation=topic.record().incarnation,
                    objects=objects,
                    groups=groups or tuple((d.start, d.end) for d in objects),
                )
            )
    return _Search(
        place=find_place(place.config),
        topics=tuple(topics),
        tombstones_before_us=(PUBLISHED_MS + before_hours * HOUR_MS) * 1000,
        producers_after_ms=0,
        run=run,
    )


def run(found):
    """All steps, with Spark's own ones in a few lines; the rows for the driver by group."""
    highest = {}
    for bundle in _bundle(found.topics):
        for batch in _scan(found, bundle):
            for row in batch.to_pylist():
                key = (row["topic"], row["key"], row["at"])
                highest[key] = max(highest.get(key, row["code"]), row["code"])
    rows = [
        {"topic": topic, "note": key if at == -2 else None, "at": at, "code": code}
        for (topic, key, at), code in highest.items()
        if at != -1 or code % 2 == 0
    ]
    random.Random(1).shuffle(rows)
    schema = pa.schema(
        [("topic", pa.int32()), ("note", pa.string()), ("at", pa.int64()), ("code", pa.int64())]
    )
    batches = [
        pa.RecordBatch.from_pylist(rows[at : at + 7], schema) for at in range(0, len(rows), 7)
    ]
    assigned = [row for batch in _assign(found, batches) for row in batch.to_pylist()]
    assigned.sort(key=lambda row: (row["number"], row["value"]))
    schema = pa.schema([("number", pa.int32()), ("value", pa.int64()), ("note", pa.string())])
    batches = [
        pa.RecordBatch.from_pylist(assigned[at : at + 5], schema)
        for at in range(0, len(assigned), 5)
    ]
    return {row["number"]: row for batch in _stage(found, batches) for row in batch.to_pylist()}


def staged(place, row):
    """The offsets in a staged file."""
    if row["path"] is None:
        return None
    data = (place.root / "objects" / row["path"]).read_bytes()
    return np.frombuffer(data, "<i8").tolist()


def test_highest_offset_of_each_key_stays_wherever_it_is(place):
    keys = ["a", "b", None, "a", "c", "", "b", None, "", "d", "d", "d"]
    fill(place, A, [(key, b"x", 0) for key in keys])
    found = run(search(place, [A]))
    assert [(row["keyed"], row["stay"]) for row in found.values()] == [(3, 1), (3, 2), (4, 2)]
    assert [staged(place, row) for row in found.values()] == [[3], [4, 6], [8, 11]]


def test_tombstone_goes_when_its_time_is_over(place):
    messages = [("a", b"x", 0), ("b", b"x", 0), ("a", b"", 1), ("b", b"", 5), ("c", b"", 1)]
    messages += [("c", b"x", 1), (None, b"", 0)]
    fill(place, A, messages, uploads=1)
    for hours, stay in ((2, [3, 5]), (1, [2, 3, 5]), (9, [5])):
        found = run(search(place, [A], before_hours=hours, groups=((0, len(messages)),)))
        assert staged(place, found[0]) == stay


def test_nothing_is_written_down_where_nothing_stays_or_all_does(place):
    fill(place, A, [("a", b"x", 0), ("b", b"x", 0), ("b", b"x", 0), ("a", b"x", 0)], uploads=2)
    found = run(search(place, [A]))
    assert [(row["keyed"], row["stay"], row["path"]) for row in found.values()] == [
        (2, 0, None),
        (2, 2, None),
    ]


def test_groups_are_told_apart_across_objects_and_topics(place):
    fill(place, A, [("k", b"x", 0)] * 4 + [("l", b"x", 0)] * 5)
    fill(place, B, [("k", b"x", 0)] * 9)
    found = search(place, [A, B], groups=((0, 6), (6, 9)))
    rows = run(found)
    assert [staged(place, rows[number]) for number in range(4)] == [[3], [8], None, [8]]
    assert [rows[number]["keyed"] for number in range(4)] == [6, 3, 6, 3]
    assert "default/a/compact-x/0-" in rows[0]["path"]
    assert "default/b/compact-x/3-" in rows[3]["path"]


def test_without_a_name_nothing_is_written(place):
    fill(place, A, [("k", b"x", 0)] * 9)
    rows = run(search(place, [A], run=None))
    assert [row["keyed"] - row["stay"] for row in rows.values()] == [3, 3, 2]
    assert place.staged_files() == []


def test_object_that_cannot_be_read_is_an_error_of_its_topic(place):
    fill(place, A, [("k", b"x", 0)] * 9)
    fill(place, B, [("k", b"x", 0)] * 9)
    found = search(place, [A, B])
    for path in (place.root / "objects").glob("storage/topics/default/a/objects/data-3-*"):
        path.unlink()
    rows = run(found)
    assert NotFoundError.code in rows[-1]["note"]
    assert -2 not in rows
    assert staged(place, rows[5]) == [8]


def test_object_with_fewer_messages_than_it_should_have_is_an_error(place):
    """Goal: a message that the search has not seen is never taken for a superseded one."""
    fill(place, A, [("k", b"x", 0)] * 9, uploads=1)
    found = search(place, [A])
    [described] = found.topics[0].objects
    wrong = replace(described, kept="latest-per-key", messages=10)
    found = replace(found, topics=(replace(found.topics[0], objects=(wrong,)),))
    assert CorruptDataError.code in run(found)[-1]["note"]


def test_many_keys_are_handed_over_in_pieces(place, monkeypatch):
    monkeypatch.setattr(latest_per_key, "_KEYS_AT_ONCE", 10)
    rng = random.Random(3)
    keys = [rng.choice("abcdefgh") for _ in range(300)]
    fill(place, A, [(key, b"x", 0) for key in keys], uploads=2)
    rows = run(search(place, [A]))
    last = sorted({key: offset for offset, key in enumerate(keys)}.values())
    assert (staged(place, rows[0]) or []) + (staged(place, rows[1]) or []) == last


# -- in this process ----------------------------------------------------------------------------


def find_here(place, found):
    return find_latest(
        LocalRunner(),
        found.place,
        found.topics,
        tombstones_before_ms=found.tombstones_before_us // 1000,
        now_ms=PUBLISHED_MS,
        run=found.run,
    )


def test_search_in_this_process_finds_the_same(place):
    """Goal: a dry run without Spark counts what Spark would, and names topics it cannot read."""
    rng = random.Random(4)
    keys = [rng.choice(["a", "b", "c", "d", None]) for _ in range(60)]
    fill(place, A, [(key, rng.choice([b"x", b""]), rng.randrange(4)) for key in keys])
    fill(place, B, [("k", b"x", 0)] * 9)
    found = search(place, [A, B], before_hours=2)
    rows = run(found)
    here = find_here(place, found)
    latest = [one for topic in here.latest for one in topic]
    assert [(one.keyed, one.stay) for one in latest] == [
        (rows[number]["keyed"], rows[number]["stay"]) for number in range(6)
    ]
    assert [staged(place, {"path": one.path}) for one in latest] == [
        staged(place, rows[number]) for number in range(6)
    ]
    assert here.errors == {}
    assert here.uncounted == frozenset()
    for path in (place.root / "objects").glob("storage/topics/default/a/objects/data-*"):
        path.unlink()
    broken = find_here(place, found)
    assert broken.errors[A]["code"] == NotFoundError.code
    assert [one.stay for one in broken.latest[1]] == [0, 0, 1]


def test_search_in_this_process_leaves_out_topics_that_are_too_large(place, monkeypatch):
    monkeypatch.setattr(latest_per_key, "_LOCAL_MESSAGES_MAX", 9)
    fill(place, A, [("k", b"x", 0)] * 9)
    fill(place, B, [("k", b"x", 0)] * 9)
    here = find_here(place, search(place, [A, B], run=None))
    assert here.uncounted == {B}
    assert sum(one.removed for one in here.latest[0]) == 8


# -- rewriting ----------------------------------------------------------------------------------


class Store:
    """One staged file, that gives a few bytes at a time."""

    def __init__(self, offsets):
        self._data = np.array(offsets, "<i8").tobytes()
        self.reads = 0

    def read(self, key, start, size):
        self.reads += 1
        return self._data[start : start + min(size, 24)]


def mask(latest, keys, first):
    batch = pa.record_batch(
        {
            "routing_key": pa.array(keys, pa.string()),
            "offset": pa.array(range(first, first + len(keys)), pa.int64()),
        }
    )
    return latest(batch).to_pylist()


def test_file_of_offsets_is_read_beside_the_messages():
    store = Store([1, 4, 5, 7, 9])
    latest = LatestOffsets(store, Latest(keyed=8, stay=5, path="p"))
    assert mask(latest, ["a", "b", None, "c"], 0) == [False, True, True, False]
    assert store.reads == 1
    assert mask(latest, [], 4) == []
    assert mask(latest, ["a", "b"], 4) == [True, True]
    assert mask(latest, [None, "d", "e", "f"], 6) == [True, True, False, True]
    latest.check(None)


def test_nothing_with_a_key_stays_without_a_file():
    latest = LatestOffsets(Store([]), Latest(keyed=2, stay=0, path=None))
    assert mask(latest, ["a", None, "b"], 0) == [False, True, False]
    latest.check(None)


def test_other_messages_than_were_searched_are_an_error():
    described = ObjectDescriptor(object_id="data-0-2.parquet", start=0, end=3, size_bytes=1)
    latest = LatestOffsets(Store([1]), Latest(keyed=2, stay=1, path="p"))
    mask(latest, ["a", "b", "c"], 0)
    with pytest.raises(CorruptDataError, match="messages with a key"):
        latest.check(described)


def test_file_that_is_too_short_is_an_error():
    latest = LatestOffsets(Store([1]), Latest(keyed=9, stay=2, path="p"))
    with pytest.raises(CorruptDataError, match="too short"):
        mask(latest, ["a"] * 9, 0)
