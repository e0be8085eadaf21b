"""Counting messages: against plain Python, in one go and in parts."""

import random
from collections import Counter

import pyarrow as pa

from ister.positions import format_time
from ister.spark.jobs.topic_stats import (
    KEYS_EXACT_MAX,
    PRODUCERS_MAX,
    SAMPLE_BYTES,
    TopicStats,
    take_sample,
)
from tests.support.cases import case

_US = 1_000_000
_SCHEMA = pa.schema(
    {
        "publish_time": pa.timestamp("us", "UTC"),
        "producer_name": pa.string(),
        "payload": pa.binary(),
        "routing_key": pa.string(),
    }
)


def batch_of(rows):
    """A record batch of (time in microseconds, producer, payload, key)."""
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def some_rows(rng, count):
    """Messages of a few hours, producers, sizes and keys."""
    begin = 1_700_000_000 * _US
    return [
        (
            begin + rng.randrange(10 * 3600 * _US),
            rng.choice(("", "a", "b", "ключ")),
            bytes(rng.choice((0, 1, 2, 3, 4, 7, 8, 1023, 1024, 5000))),
            rng.choice((None, "k", "l", f"k{rng.randrange(50)}")),
        )
        for _ in range(count)
    ]


def test_the_same_as_plain_python_however_it_is_divided():
    for seed in range(5):
        with case(seed):
            rng = random.Random(seed)
            rows = some_rows(rng, 400)
            parts, at = [], 0
            while at < len(rows):
                size = rng.randrange(1, 90)
                part = TopicStats()
                part.add(batch_of(rows[at : at + size // 2]))
                part.add(batch_of(rows[at + size // 2 : at + size]))
                parts.append(part)
                at += size
            rng.shuffle(parts)
            found = TopicStats()
            for part in parts:
                found.merge(part)
            said = found.as_json()
            assert said["messages"] == len(rows)
            assert said["bytes"] == sum(len(row[2]) for row in rows)
            assert said["first_publish_time"] == format_time(min(row[0] for row in rows) // 1000)
            assert said["last_publish_time"] == format_time(max(row[0] for row in rows) // 1000)
            by_hour = Counter(row[0] // (3600 * _US) for row in rows)
            assert {item["hour"]: item["messages"] for item in said["hours"]} == {
                format_time(hour * 3600 * 1000): count for hour, count in by_hour.items()
            }
            assert sum(item["bytes"] for item in said["hours"]) == said["bytes"]
            by_producer = Counter(row[1] for row in rows)
            assert {item["producer"]: item["messages"] for item in said["producers"]} == by_producer
            assert [item["messages"] for item in said["producers"]] == sorted(
                by_producer.values(), reverse=True
            )
            by_bits = Counter(len(row[2]).bit_length() for row in rows)
            assert {
                (item["from_bytes"], item["below_bytes"]): item["messages"]
                for item in said["sizes"]
            } == {((1 << bits) >> 1, 1 << bits): count for bits, count in by_bits.items()}
            keys = [row[3] for row in rows if row[3] is not None]
            assert said["keys"] == {
                "messages": len(keys),
                "distinct": len(set(keys)),
                "is_exact": True,
            }


def test_a_size_is_counted_where_it_belongs():
    for size in [0, 1, 2, 3, 4, 255, 256, 2**20 - 1, 2**20]:
        with case(size):
            found = TopicStats()
            found.add(batch_of([(0, "p", bytes(size), None)]))
            (item,) = found.as_json()["sizes"]
            assert item["from_bytes"] <= size < item["below_bytes"]


def test_many_keys_are_estimated_and_parts_add_up():
    count = 20 * KEYS_EXACT_MAX
    found = TopicStats()
    for start in range(0, count, 4096):
        part = TopicStats()
        # Every key twice, in two parts.
        numbers = range(start // 2, start // 2 + 4096)
        part.add(batch_of([(0, "p", b"", f"key-{number}") for number in numbers]))
        found.merge(part)
    keys = found.as_json()["keys"]
    distinct = count // 2 + 2048
    assert not keys["is_exact"]
    assert abs(keys["distinct"] - distinct) < 0.1 * distinct
    assert len(found.key_hashes) == KEYS_EXACT_MAX


def test_producers_beyond_the_twentieth_are_the_rest():
    found = TopicStats()
    found.add(batch_of([(0, f"p{number:02}", b"x", None) for number in range(25)] * 2))
    said = found.as_json()
    assert len(said["producers"]) == 20
    assert said["other_producers"] == {
        "producers": 5,
        "messages": 10,
        "bytes": 10,
        "is_exact": True,
    }


def test_very_many_producers_take_no_memory_for_each():
    found = TopicStats()
    for start in range(0, 5 * PRODUCERS_MAX, 1000):
        rows = [(0, f"p{number}", b"x", None) for number in range(start, start + 1000)]
        found.add(batch_of([*rows, (0, "heavy", b"x", None), (0, "heavy", b"x", None)]))
    said = found.as_json()
    assert len(found.producers) <= 2 * PRODUCERS_MAX
    assert said["producers"][0]["producer"] == "heavy"
    assert not said["other_producers"]["is_exact"]
    listed = sum(item["messages"] for item in said["producers"])
    assert listed + said["other_producers"]["messages"] == said["messages"]


def sampled(*batches):
    """The numbers of a sample of batches."""
    found, sample = TopicStats(), bytearray()
    for batch in batches:
        take_sample(batch, sample)
    found.add_sample(sample)
    return found.as_json()["compression"]


def test_compression_is_measured():
    rng = random.Random(1)
    same = sampled(*[batch_of([(0, "p", b"abc" * 1000, None)] * 5)] * 2)
    noise = sampled(batch_of([(0, "p", rng.randbytes(3000), None) for _ in range(10)]))
    assert same["ratio"] > 20
    assert 0.9 < noise["ratio"] <= 1.01
    assert same["sample_bytes"] == 30_000


def test_a_sample_is_bounded():
    payload = bytes(SAMPLE_BYTES // 2 + 1)
    assert sampled(batch_of([(0, "p", payload, None)] * 5))["sample_bytes"] == 2 * len(payload)


def test_nothing_at_all():
    found = TopicStats()
    found.add(batch_of([]))
    found.add_sample(b"")
    said = found.as_json()
    assert (said["messages"], said["hours"], said["sizes"]) == (0, [], [])
    assert said["compression"]["ratio"] is None
    assert said["first_publish_time"] is None
