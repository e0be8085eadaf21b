"""The search for the latest messages, with tasks in this process; on Spark: test_jobs_compact."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

import ister
from ister.errors import CorruptDataError, NotFoundError
from ister.format.descriptor import ObjectDescriptor
from ister.spark.jobs import latest_per_key
from ister.spark.jobs.latest_per_key import KeyedTopic, Latest, LatestOffsets, find_latest
from ister.spark.jobs.tasks import TaskRunner
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


def topic_of(place, name, *, groups=None):
    """A topic to be searched; `groups` are the ends of groups, by default that of each object."""
    with ister.open_bucket(place.config) as history:
        topic = history.topic(name)
        objects = [described for described, _ in topic.catalog.descriptors()]
        ends = groups or [described.end for described in objects]
        return KeyedTopic(
            name=name,
            incarnation=topic.record().incarnation,
            groups=tuple(
                tuple(one for one in objects if start <= one.start < end)
                for start, end in pairwise([0, *ends])
            ),
        )


def find(place, *topics, before_hours=0, run="compact-x"):
    return find_latest(
        TaskRunner(),
        find_place(place.config),
        topics,
        tombstones_before_ms=PUBLISHED_MS + before_hours * HOUR_MS,
        now_ms=PUBLISHED_MS,
        run=run,
    )


def counts(latest):
    return [(one.keyed, one.stay) for one in latest]


def staged(place, latest):
    """The offsets in a staged file."""
    if latest.path is None:
        return None
    data = (place.root / "objects" / latest.path).read_bytes()
    return np.frombuffer(data, "<i8").tolist()


def test_highest_offset_of_each_key_stays_wherever_it_is(place):
    keys = ["a", "b", None, "a", "c", "", "b", None, "", "d", "d", "d"]
    fill(place, A, [(key, b"x", 0) for key in keys])
    [latest] = find(place, topic_of(place, A)).latest
    assert counts(latest) == [(3, 1), (3, 2), (4, 2)]
    assert [staged(place, one) for one in latest] == [[3], [4, 6], [8, 11]]


def test_tombstone_goes_when_its_time_is_over(place):
    messages = [("a", b"x", 0), ("b", b"x", 0), ("a", b"", 1), ("b", b"", 5), ("c", b"", 1)]
    messages += [("c", b"x", 1), (None, b"", 0)]
    fill(place, A, messages, uploads=1)
    for hours, stay in ((2, [3, 5]), (1, [2, 3, 5]), (9, [5])):
        [[latest]] = find(place, topic_of(place, A), before_hours=hours).latest
        assert staged(place, latest) == stay


def test_nothing_is_written_down_where_nothing_stays_or_all_does(place):
    fill(place, A, [("a", b"x", 0), ("b", b"x", 0), ("b", b"x", 0), ("a", b"x", 0)], uploads=2)
    [latest] = find(place, topic_of(place, A)).latest
    assert counts(latest) == [(2, 0), (2, 2)]
    assert [one.path for one in latest] == [None, None]
    fill(place, B, [("k", b"x", 0)] * 9)
    [latest] = find(place, topic_of(place, B), run=None).latest
    assert [one.removed for one in latest] == [3, 3, 2]
    assert place.staged_files() == []


def test_groups_are_told_apart_across_objects_and_topics(place):
    fill(place, A, [("k", b"x", 0)] * 4 + [("l", b"x", 0)] * 5)
    fill(place, B, [("k", b"x", 0)] * 9)
    topics = [topic_of(place, name, groups=(6, 9)) for name in (A, B)]
    first, second = find(place, *topics).latest
    assert [staged(place, one) for one in (*first, *second)] == [[3], [8], None, [8]]
    assert [one.keyed for one in (*first, *second)] == [6, 3, 6, 3]
    assert "default/a/compact-x/0-" in first[0].path
    assert "default/b/compact-x/3-" in second[1].path


def test_object_that_cannot_be_read_is_an_error_of_its_topic(place):
    fill(place, A, [("k", b"x", 0)] * 9)
    fill(place, B, [("k", b"x", 0)] * 9)
    topics = [topic_of(place, name) for name in (A, B)]
    for path in (place.root / "objects").glob("storage/topics/default/a/objects/data-3-*"):
        path.unlink()
    found = find(place, *topics)
    assert {name: error["code"] for name, error in found.errors.items()} == {A: NotFoundError.code}
    assert found.uncounted == frozenset()
    assert staged(place, found.latest[1][2]) == [8]


def test_object_with_fewer_messages_than_it_should_have_is_an_error(place):
    """Goal: a message that the search has not seen is never taken for a superseded one."""
    fill(place, A, [("k", b"x", 0)] * 9, uploads=1)
    topic = topic_of(place, A)
    [[described]] = topic.groups
    wrong = replace(described, kept="latest-per-key", messages=10)
    found = find(place, replace(topic, groups=((wrong,),)))
    assert found.errors[A]["code"] == CorruptDataError.code


def test_many_keys_are_handed_over_in_pieces(place, monkeypatch):
    monkeypatch.setattr(latest_per_key, "_KEYS_AT_ONCE", 10)
    rng = random.Random(3)
    keys = [rng.choice("abcdefgh") for _ in range(300)]
    fill(place, A, [(key, b"x", 0) for key in keys], uploads=2)
    [latest] = find(place, topic_of(place, A)).latest
    last = sorted({key: offset for offset, key in enumerate(keys)}.values())
    assert [offset for one in latest for offset in staged(place, one) or []] == last


def test_search_in_this_process_leaves_out_topics_that_are_too_large(place, monkeypatch):
    monkeypatch.setattr(latest_per_key, "_LOCAL_MESSAGES_MAX", 9)
    fill(place, A, [("k", b"x", 0)] * 9)
    fill(place, B, [("k", b"x", 0)] * 9)
    here = find(place, topic_of(place, A), topic_of(place, B), run=None)
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
