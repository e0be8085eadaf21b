"""Messages as Arrow: the same as read one by one, from every tier, whatever is damaged."""

import gc
import itertools
import weakref
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ister
from ister.base.extras import missing_extra
from ister.base.model import COLUMNS, Codec, MessageId, StreamMessage
from ister.errors import (
    ClosedError,
    ConfigError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.format.arrow.schema import HIDDEN, arrow_schema
from ister.topic import append as append_module
from tests.support.cases import each
from tests.support.machine import NoThreads, Task, numbered
from tests.support.stores import NAME, Site, as_row

TEXT = str(NAME)
ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 4}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def a_topic(site, disk="a", *, codec=None, take_over=False, storage=None, **wal):
    log = site.open(
        disk,
        scheduler=NoThreads(),
        storage={"cloud_reader": {"read_ahead": False}, **(storage or {})},
        **{**ROTATE, **wal},
    )
    topic = log.topic(TEXT, create=True, codec=codec, take_over=take_over)
    topic.log = log
    return topic


def a_memory_topic(**settings):
    log = ister.open({"storage": {"mode": "memory", **settings}})
    topic = log.topic(TEXT, create=True)
    topic.log = log
    return topic


def rows_of(topic, start="earliest", end=None, columns=(*COLUMNS, *HIDDEN)):
    """The rows as `read` has them."""
    return [
        {name: row[name] for name in columns} for row in map(as_row, topic.read(start, end=end))
    ]


def arrow_rows(topic, *args, **named):
    table = topic.read_arrow(*args, **{"columns": (*COLUMNS, *HIDDEN), **named}).read_all()
    table.validate(full=True)
    return table.to_pylist()


def same(topic, *args, **named):
    """Both ways of reading give the same, and something."""
    rows = arrow_rows(topic, *args, **named)
    assert rows == rows_of(topic, *args, **named)
    return len(rows)


def fill(topic, count, *, size=200):
    for payload in numbered(count, first=topic.watermarks.next, size=size):
        topic.append(payload, attributes={"n": str(len(payload))}, routing_key="k")
        topic.flush()


def trim(topic, before=None):
    topic.upload()
    topic.wal.trim(topic.watermarks.tiered if before is None else before)


# -- the same as read ---------------------------------------------------------------------------

_NAMES = st.text(max_size=6)
_FIELDS = st.fixed_dictionaries(
    {
        "payload": st.binary(max_size=40) | st.binary(min_size=300, max_size=300),
        "publish_time": st.integers(0, 253_402_300_799_999),
        "producer_name": _NAMES,
        "attributes": st.dictionaries(_NAMES, _NAMES, max_size=3),
        "request_id": st.integers(0, 2**64 - 1),
        "producer_id": st.integers(0, 2**64 - 1),
        "schema_id": st.none() | st.integers(0, 2**64 - 1),
        "schema_version": st.none() | st.integers(0, 2**32 - 1),
        "routing_key": st.none() | _NAMES,
    }
)
_STEPS = st.lists(
    st.lists(_FIELDS, min_size=1, max_size=12)
    | st.sampled_from(["upload", "trim", "reopen", "move"]),
    min_size=1,
    max_size=8,
)


def a_record(fields, codec):
    if codec is Codec.BINCODE1:
        fields = {**fields, "schema_id": None, "schema_version": None, "routing_key": None}
    fields = dict(fields)
    identity = MessageId(producer_id=fields.pop("producer_id"), topic_name=TEXT)
    return StreamMessage(msg_id=identity, subscription_name=None, **fields)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    steps=_STEPS,
    codec=st.sampled_from(list(Codec)),
    columns=st.none()
    | st.lists(st.sampled_from((*COLUMNS, *HIDDEN)), unique=True, min_size=1, max_size=5),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted), max_size=4),
)
def test_arrow_has_what_read_has_wherever_it_lies(steps, codec, columns, ranges):
    """Goal: field by field the same, from bucket, files and both, in ranges and projections."""
    with Site() as site:
        disks = itertools.count()
        disk = f"disk-{next(disks)}"
        topic = a_topic(site, disk, codec=codec)
        for step in steps:
            if step == "upload":
                topic.upload()
            elif step == "trim":
                trim(topic)
            elif step == "reopen":
                topic.log.close()
                topic = a_topic(site, disk)
            elif step == "move":
                topic.log.seal(TEXT)
                topic.log.close()
                disk = f"disk-{next(disks)}"
                topic = a_topic(site, disk)
            else:
                for fields in step:
                    topic.appender.append_record(a_record(fields, codec))
                topic.flush()
        assert same(topic) == topic.watermarks.next
        names = tuple(columns) if columns is not None else COLUMNS
        for low, high in [(0.0, 1.0), *ranges]:
            start, end = (int(share * topic.watermarks.next) for share in (low, high))
            found = topic.read_arrow(start, end=end, columns=columns).read_all()
            assert found.schema.equals(arrow_schema(columns))
            assert found.to_pylist() == rows_of(topic, start, end, names)


@settings(deadline=None, max_examples=40)
@given(batches=st.lists(st.lists(_FIELDS, max_size=10), max_size=5), capacity=st.integers(1, 60))
def test_arrow_has_what_read_has_in_memory_alone(batches, capacity):
    topic = a_memory_topic(wal={"cache_capacity": capacity})
    try:
        for batch in batches:
            for fields in batch:
                topic.appender.append_record(a_record(fields, topic.codec))
        assert same(topic) == min(capacity, topic.watermarks.next)
        start = topic.earliest
        end = topic.watermarks.next
        middle = (start + end) // 2
        same(topic, middle)
        same(topic, start, end=middle)
    finally:
        topic.log.close()


def test_message_that_has_left_the_memory_is_an_error():
    topic = a_memory_topic(wal={"cache_capacity": 10})
    topic.append_many(numbered(5))
    reader = topic.read_arrow(0)
    topic.append_many(numbered(20))
    with pytest.raises(OffsetOutOfRangeError):
        reader.read_all()
    topic.log.close()


def test_rows_without_columns_are_still_counted(site):
    topic = a_topic(site)
    fill(topic, 10)
    assert sum(batch.num_rows for batch in topic.read_arrow(columns=[])) == 10


def test_arguments_are_those_of_read(site):
    topic = a_topic(site)
    for number in range(20):
        topic.append(b"%d" % number, publish_time=1000 + number)
    same(topic, 5)
    same(topic, 5, end=5)
    same(topic, 5, end=15)
    same(topic, "earliest", end=1000)
    assert same(topic, EPOCH + timedelta(milliseconds=1015)) == 5
    assert same(topic, "latest") == 0
    for start, end, error in [
        (21, None, OffsetOutOfRangeError),
        (7, 3, InvalidRequestError),
        (-1, None, InvalidRequestError),
        ("soon", None, InvalidRequestError),
        (0, "x", InvalidRequestError),
    ]:
        with pytest.raises(error):
            topic.read_arrow(start, end=end)
    with pytest.raises(InvalidRequestError, match="unknown column 'value'"):
        topic.read_arrow(columns=["value"])
    assert topic.readers == []


def test_waiting_for_what_does_not_become_visible_has_an_end(site):
    topic = a_topic(site)
    topic.append(b"never synced: nobody commits here")
    site.disk().before = lambda kind, path: (_ for _ in ()).throw(OSError(5, "broken"))
    reader = Task(topic.read_arrow, timeout=0.0)
    assert isinstance(reader.error(), (WaitTimeoutError, UnavailableError))


def test_unread_part_of_a_batch_is_not_lost_between_two_ways_of_reading(site):
    """`next_frames` goes on where `next_batch` has stopped, in the middle of a chunk too."""
    topic = a_topic(site, cache_capacity=1)
    fill(topic, 60)
    reader = topic.reader(end=60)
    found = [message.offset for message in reader.next_batch(7)]
    while (frames := reader.next_frames(500)) is not None:
        found += range(frames.first_offset, frames.next_offset)
        found += [message.offset for message in reader.poll(3)]
    assert found == list(range(60))
    reader.close()
    with pytest.raises(ClosedError):
        reader.next_frames()


def test_next_frames_does_not_wait(site):
    topic = a_topic(site)
    reader = topic.reader()
    assert reader.next_frames() is None
    topic.append(b"not visible yet")
    assert reader.next_frames() is None
    topic.flush()
    assert reader.next_frames().next_offset == 1
    assert reader.next_frames() is None
    reader.close()


# -- readers end --------------------------------------------------------------------------------


def test_reader_is_closed_at_the_end(site):
    topic = a_topic(site)
    fill(topic, 30)
    reader = topic.read_arrow()
    assert len(topic.readers) == 1
    for _ in reader:
        pass
    assert topic.readers == []


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["before the first batch", "after a batch"])
@pytest.mark.parametrize("how", ["close", "forget"])
def test_reader_is_closed_when_the_consumer_stops_early(site, where, how):
    topic = a_topic(site, storage={"uploader": {"max_object_bytes": 4096}})
    fill(topic, 100)
    trim(topic, 50)
    reader = topic.read_arrow()
    if where == "after a batch":
        assert reader.read_next_batch().num_rows < 100
    if how == "close":
        reader.close()
    del reader
    gc.collect()
    assert topic.readers == []
    assert topic.log.metrics.snapshot()["wal_reader.active_readers"] == 0


def test_reader_is_closed_after_an_error(site):
    topic = a_topic(site)
    fill(topic, 10)
    reader = topic.read_arrow()
    site.disk().before = lambda kind, path: (_ for _ in ()).throw(OSError(5, "broken"))
    with pytest.raises(UnavailableError):
        reader.read_all()
    site.disk().before = lambda kind, path: None
    assert topic.readers == []


def test_topic_that_is_closed_ends_its_readers(site):
    topic = a_topic(site)
    fill(topic, 100)
    reader = topic.read_arrow()
    reader.read_next_batch()
    topic.close()
    with pytest.raises(ClosedError):
        reader.read_all()


def test_batches_do_not_hold_on_to_the_reader(site):
    topic = a_topic(site)
    fill(topic, 10)
    reader = topic.read_arrow()
    held = weakref.ref(topic.readers[0])
    table = reader.read_all()
    del reader
    gc.collect()
    assert held() is None
    assert table.num_rows == 10


# -- without the library ------------------------------------------------------------------------


def test_missing_library_is_said_with_what_to_install(site, monkeypatch):
    topic = a_topic(site)

    def missing(name):
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.setattr(append_module.importlib, "import_module", missing)
    for call in (topic.read_arrow, lambda: topic.append_arrow(None)):
        with pytest.raises(ConfigError, match="needs pyarrow") as caught:
            call()
        assert "ister[arrow]" in caught.value.hint


def test_extra_that_is_missing_is_named():
    error = missing_extra("this", "spark", ImportError("x", name="pyspark"))
    assert error.message == "this needs pyspark, which is not installed"
    assert error.hint == "pip install 'ister[spark]'"


@each("name", [None, "ister", "ister.format.arrow.schema"])
def test_import_that_fails_for_another_reason_is_not_about_an_extra(name):
    with pytest.raises(ImportError, match="broken"):
        missing_extra("this", "spark", ImportError("broken", name=name))


def test_pandas_polars_and_duckdb_take_it_as_it_is(site):
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    pytest.importorskip("pandas")
    topic = a_topic(site)
    fill(topic, 30)
    assert len(topic.read_arrow().read_pandas()) == 30
    assert polars.from_arrow(topic.read_arrow().read_all()).height == 30
    reader = topic.read_arrow(10, columns=["offset", "payload"])
    assert isinstance(reader, pa.RecordBatchReader)
    assert duckdb.sql('select count(*), min("offset") from reader').fetchall() == [(20, 10)]
