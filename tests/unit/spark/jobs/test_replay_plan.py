"""A replay's name, its range and its chunks."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnsupportedVersionError,
)
from ister.spark.jobs import replay_plan
from ister.spark.jobs.replay_plan import (
    ReplayPlan,
    cut_chunks,
    name_replay,
    resolve_range,
)
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.planner import TopicRange
from tests.support.cases import case

A, B = "/default/a", "/default/b"
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
PLAN = ReplayPlan(
    source=A,
    incarnation="i",
    target=B,
    transform="m:f",
    start=10,
    end=40,
    sizes=(15, 14, 1),
    size_bytes=3000,
    asked=("earliest", "latest"),
)
REQUEST = {
    "source": A,
    "incarnation": "i",
    "target": B,
    "transform": "m:f",
    "start": 3,
    "end": None,
}


def tail_of(start, end, size_bytes):
    return TopicRange(
        topic=A,
        incarnation="i",
        start=start,
        end=end,
        tiered=start,
        descriptors=(),
        tail_bytes=size_bytes,
    )


# -- the name -----------------------------------------------------------------------------------


def test_name_is_that_of_the_request():
    assert name_replay(**REQUEST) == name_replay(**REQUEST)
    others = [
        {"source": "/default/c"},
        {"incarnation": "j"},
        {"target": "/default/c"},
        {"transform": "m:g"},
        {"start": 4},
        {"start": None},
        {"end": "latest"},
        {"end": NOON},
    ]
    names = {name_replay(**{**REQUEST, **other}) for other in others}
    assert len(names | {name_replay(**REQUEST)}) == len(others) + 1


# -- the range ----------------------------------------------------------------------------------


class Times(OffsetResolver):
    """Message n was published n seconds after noon."""

    def __init__(self):
        super().__init__(None, SimpleNamespace(fail_on_data_loss=True))

    def find_time(self, head, publish_time_ms):
        offset = max((publish_time_ms - int(NOON.timestamp() * 1000)) // 1000, head.earliest)
        return offset if offset < head.end else None


HEAD = Head(
    topic=A,
    incarnation="i",
    node="n",
    lineage=((1, 0),),
    earliest=10,
    tiered=50,
    end=100,
    tail_bytes=0,
)


def test_ranges():
    for start, end, expected in [
        (None, None, (10, 100)),
        ("earliest", "latest", (10, 100)),
        ("latest", None, (100, 100)),
        (20, 30, (20, 30)),
        (NOON + timedelta(seconds=20), NOON + timedelta(seconds=30), (20, 30)),
        (NOON + timedelta(seconds=500), None, (100, 100)),
        (NOON + timedelta(seconds=30), NOON + timedelta(seconds=20), (30, 30)),
    ]:
        with case(start, end, expected):
            assert resolve_range(Times(), HEAD, start, end) == expected


def test_ranges_that_are_none():
    for start, end, error in [
        (9, None, DataGapError),
        (None, 101, OffsetOutOfRangeError),
        (30, 20, InvalidRequestError),
        ("noon", None, InvalidRequestError),
        (True, None, InvalidRequestError),
    ]:
        with case(start, end, error), pytest.raises(error):
            resolve_range(Times(), HEAD, start, end)


# -- chunks -------------------------------------------------------------------------------------


def test_chunks_are_the_range_without_a_gap():
    sizes = cut_chunks(tail_of(100, 1100, 100_000), chunk_bytes=9_000)
    assert sum(sizes) == 1000
    assert min(sizes) > 0
    assert 11 <= len(sizes) <= 13
    assert cut_chunks(tail_of(100, 1100, 100_000), chunk_bytes=9_000) == sizes
    assert cut_chunks(tail_of(5, 50, 10_000), chunk_bytes=None) == (45,)
    assert cut_chunks(tail_of(5, 5, 0), chunk_bytes=1) == ()


def test_plan_does_not_outgrow_the_metadata_store(monkeypatch):
    monkeypatch.setattr(replay_plan, "_CHUNKS_MAX", 10)
    sizes = cut_chunks(tail_of(0, 95, 95), chunk_bytes=1)
    assert len(sizes) <= 10
    assert sum(sizes) == 95


def test_chunks_of_a_plan():
    assert PLAN.chunks == [(10, 25), (25, 39), (39, 40)]
    assert PLAN.finish(incarnation="t", messages=7).chunks == []


# -- the plan's JSON ----------------------------------------------------------------------------


WRITTEN = (
    b'{"version":1,"source":"/default/a","incarnation":"i","target":"/default/b",'
    b'"transform":"m:f","start_offset":10,"next_offset":40,"chunks":[15,14,1],"bytes":3000,'
    b'"done":null,"messages":0,"asked":["earliest","latest"]}'
)


def test_plan_is_read_as_it_was_written():
    """A replay goes on after an update."""
    assert PLAN.encode() == WRITTEN
    for plan in [PLAN, PLAN.finish(incarnation="t", messages=7), replace(PLAN, sizes=())]:
        with case(plan):
            assert ReplayPlan.decode(plan.encode(), key="k") == plan


# -- the same name ------------------------------------------------------------------------------

SAME = {"source": A, "incarnation": "i", "transform": "m:f", "start": None, "end": None}


def test_what_another_request_of_the_same_name_wants():
    for change, told in [
        ({}, None),
        ({"start": "earliest", "end": "latest"}, None),
        ({"start": 10, "end": 40}, None),
        ({"source": "/default/c"}, "/default/c"),
        ({"incarnation": "j"}, "deleted"),
        ({"transform": "m:g"}, "m:g"),
        ({"transform": "sql SELECT 1"}, "SELECT 1"),
        ({"start": 11}, "starts at 10 (earliest), not 11"),
        ({"end": 39}, "ends at 40 (latest), not 39"),
        ({"end": NOON}, "not time"),
        ({"start": "latest"}, "not latest"),
    ]:
        with case(change, told):
            found = PLAN.find_differences(**{**SAME, **change})
            assert len(found) == (told is not None)
            assert told is None or told in found[0]


def test_plan_that_was_damaged():
    for old, new in [
        (b"[15,14,1]", b"[15,14,2]"),
        (b"[15,14,1]", b"[15,15,-0]"),
        (b"[15,14,1]", b"[15,0,15]"),
        (b"[15,14,1]", b'"x"'),
        (b'"start_offset":10', b'"start_offset":true'),
        (b'"target"', b'"tarjet"'),
        (b"{", b""),
    ]:
        with case(old, new):
            data = WRITTEN
            assert old in data
            with pytest.raises(CorruptDataError, match="plan") as failure:
                ReplayPlan.decode(data.replace(old, new, 1), key="the key")
            assert failure.value.path == "the key"


def test_plan_of_a_newer_version():
    with pytest.raises(UnsupportedVersionError):
        ReplayPlan.decode(WRITTEN.replace(b'"version":1', b'"version":2'), key="k")
