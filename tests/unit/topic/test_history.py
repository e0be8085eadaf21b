"""A log's bucket read by anybody, without a lock, a broker or local files."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ister
from ister import api
from ister.base.model import COLUMNS, Codec
from ister.bucket.chunks import ObjectPart
from ister.bucket.names import object_key
from ister.config import load_config
from ister.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    DataGapError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    TopicNameError,
    UnavailableError,
)
from ister.format.arrow.schema import HIDDEN
from ister.format.descriptor import encode_descriptor
from ister.topic.columns import Decoders
from ister.topic.history import BucketLog, BucketTopic
from tests.support.cases import each
from tests.support.machine import NoThreads, numbered
from tests.support.stores import NAME, Site, merged

TEXT = str(NAME)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SMALL = {
    "uploader": {"max_object_bytes": 4096, "index_every_messages": 3},
    "cloud_reader": {"fetch_chunk_size": 65_536, "read_ahead": False},
}


def a_topic(site, disk="a", *, codec=None, storage=SMALL, **wal):
    log = site.open(disk, scheduler=NoThreads(), storage=storage, **wal)
    topic = log.topic(TEXT, create=True, codec=codec)
    topic.log = log
    return topic


def a_history(site, **storage):
    """The site's stores, through other eyes."""
    tree = {"storage": {**SMALL, **storage, "wal": {"dir": "/nowhere"}}}
    return BucketLog(
        load_config(tree, {}), clock=site.clock, objects=site.objects, metadata=site.metadata
    )


def fill(topic, count, *, size=200):
    first = topic.watermarks.next
    for number, payload in enumerate(numbered(count, first=first, size=size), first):
        topic.append(
            payload, publish_time=1000 + 10 * number, routing_key="k", attributes={"a": "b"}
        )


def offsets(reader):
    return [row["offset"] for row in reader.read_all().select(["offset"]).to_pylist()]


def drain(reader, found):
    for batch in reader:
        found += batch.to_pylist()


def rows_of(topic, start=0, end=None):
    return topic.read_arrow(start, end=end, columns=(*COLUMNS, *HIDDEN)).read_all().to_pylist()


def history_rows(history, *args, **named):
    topic = history.topic(TEXT)
    named = {"columns": (*COLUMNS, *HIDDEN), **named}
    return topic.read_arrow(*args, **named).read_all().to_pylist()


# -- a real directory ---------------------------------------------------------------------------


def test_bucket_is_read_while_somebody_writes_and_when_nobody_does(tmp_path):
    """Goal: neither the lock nor the local files nor a broker are needed."""
    with ister.open(tmp_path) as log:
        topic = log.topic(TEXT, create=True)
        fill(topic, 10)
        topic.upload()
        fill(topic, 5)
        topic.flush()
        with ister.open_bucket(tmp_path) as history:
            assert history.topics() == [TEXT]
            found = history.topic(TEXT)
            assert (found.earliest, found.tiered) == (0, 10)
            assert offsets(found.read_arrow()) == list(range(10))
            topic.upload()
            assert offsets(found.read_arrow()) == list(range(15))
            fill(topic, 1)
    with ister.open_bucket(str(tmp_path)) as history:
        expected = 15 if history.topic(TEXT).tiered == 15 else 16
        assert offsets(history.topic(TEXT).read_arrow()) == list(range(expected))
        with ister.open(tmp_path) as log:
            assert len(list(log.topic(TEXT).read())) == 16


def test_place_without_a_log_is_said_to_have_none(tmp_path):
    with ister.open_bucket(tmp_path / "nothing") as history, pytest.raises(IsterError):
        history.topic(TEXT)
    assert not (tmp_path / "nothing").exists()


def test_stores_are_opened_when_they_are_needed(tmp_path):
    with ister.open(tmp_path) as log:
        topic = log.topic(TEXT, create=True)
        fill(topic, 10)
        topic.upload()
        described = topic.bucket.owned.last
        key = object_key(NAME, described.object_id)
    with ister.open_bucket(tmp_path) as history:
        assert (history._metadata, history._objects) == (None, None)
        assert history.objects.stat(key).size == described.size_bytes
        assert history._metadata is None
    history.close()
    for store in ("objects", "metadata", "ahead"):
        with pytest.raises(ClosedError):
            getattr(history, store)


@each(
    "storage",
    [
        {"mode": "memory"},
        {"mode": "local_only", "wal": {"dir": "x"}},
        {"cloud": {"backend": "memory"}},
    ],
    ids=["memory", "local_only", "bucket in memory"],
)
def test_log_without_a_bucket_has_no_history(storage):
    with pytest.raises(ConfigError):
        ister.open_bucket({"storage": storage})


def test_missing_library_is_said_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ister.topic.history", None)
    monkeypatch.setattr(
        api, "missing_extra", lambda what, extra, error: ConfigError(f"{what} needs it", hint=extra)
    )
    with pytest.raises(ConfigError, match="needs it") as caught:
        ister.open_bucket(tmp_path)
    assert caught.value.hint == "arrow"


# -- what is there ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 15), min_size=1, max_size=5),
    codec=st.sampled_from(list(Codec)),
    chunk=st.sampled_from([65_536, 1 << 20]),
    ahead=st.booleans(),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted), max_size=4),
    columns=st.none() | st.lists(st.sampled_from((*COLUMNS, *HIDDEN)), unique=True, max_size=4),
)
def test_history_has_what_the_topic_has(sizes, codec, chunk, ahead, ranges, columns):
    """Goal: objects of any size and number, both codecs, ranges and projections: the same rows."""
    with Site() as site:
        topic = a_topic(site, codec=codec)
        for count in sizes:
            for number in range(count):
                topic.append(b"%d" % number * (number * 37 % 300), attributes={"k": "v"})
            topic.upload()
        total = sum(sizes)
        reading = {"cloud_reader": {"fetch_chunk_size": chunk, "read_ahead": ahead}}
        with a_history(site, **reading) as history:
            assert history_rows(history) == rows_of(topic)
            seen = history.topic(TEXT)
            for low, high in ranges:
                start, end = int(low * total), int(high * total)
                expected = topic.read_arrow(start, end=end, columns=columns).read_all()
                found = seen.read_arrow(start, end=end, columns=columns).read_all()
                assert found.schema.equals(expected.schema)
                assert found.num_rows == expected.num_rows == end - start
                assert found.to_pylist() == expected.to_pylist()


def test_range_fetches_what_it_needs_and_little_more(site):
    topic = a_topic(site, storage={"uploader": {"index_every_messages": 10}})
    fill(topic, 500, size=1000)
    topic.upload()
    reading = {"cloud_reader": {"fetch_chunk_size": 65_536, "read_ahead": False}}

    def fetched(start, end):
        with a_history(site, **reading) as history:
            assert offsets(history.topic(TEXT).read_arrow(start, end=end)) == list(
                range(start, end)
            )
            return history.metrics.snapshot()["cloud_reader.bytes_read_total"]

    whole = fetched(0, 500)
    size = site.catalog().first().size_bytes
    assert whole == size
    assert fetched(250, 500) < 0.55 * size
    assert fetched(400, 420) < 0.07 * size
    assert fetched(499, 500) < 0.05 * size
    with a_history(site, **reading) as history:
        assert offsets(history.topic(TEXT).read_arrow(5, end=5)) == []
        assert history.metrics.snapshot().get("cloud_reader.bytes_read_total", 0) == 0


def test_topics_are_listed_and_names_checked(site):
    topic = a_topic(site)
    topic.log.topic("/default/another", create=True)
    with a_history(site) as history:
        assert history.topics() == ["/default/another", TEXT]
        with pytest.raises(NotFoundError, match="topic /default/none does not exist"):
            history.topic("/default/none")
        with pytest.raises(TopicNameError):
            history.topic("orders")
        topic.log.delete("/default/another")
        assert history.topics() == [TEXT]
        with pytest.raises(NotFoundError):
            history.topic("/default/another")


def test_another_topic_of_the_name_is_not_taken_for_the_one_meant(site):
    """Goal: offsets that were planned with one topic do not get messages of the next."""
    topic = a_topic(site)
    fill(topic, 30)
    topic.upload()
    with a_history(site) as history:
        old = history.topic(TEXT).record().incarnation
        seen, any_of_the_name = BucketTopic(history, NAME, old), history.topic(TEXT)
        assert (seen.earliest, seen.tiered, seen.find_time(1100, 0, 30)) == (0, 30, 10)
        assert offsets(seen.read_arrow()) == list(range(30))
        topic.log.delete(TEXT)
        for call in (seen.record, lambda: any_of_the_name.earliest, any_of_the_name.read_arrow):
            with pytest.raises(NotFoundError):
                call()
        topic.log.topic(TEXT, create=True).append_many([b"of the new one"] * 30)
        topic.log.topic(TEXT).upload()
        decoders = Decoders(TEXT, ["offset"])
        for call in (
            seen.record,
            seen.reader,
            lambda: seen.find_time(0, 0, 30),
            lambda: list(seen.read_range(0, 30, decoders)),
        ):
            with pytest.raises(ConflictError, match="deleted and made again") as caught:
                call()
            assert caught.value.topic == TEXT
        assert any_of_the_name.record().incarnation != old
        assert offsets(any_of_the_name.read_arrow()) == list(range(30))


@pytest.mark.parametrize("is_alike", [True, False], ids=["alike", "different"])
def test_part_of_an_object_that_went_with_its_topic_is_not_read_from_the_next_one(site, is_alike):
    """Even where the next one's messages have the same offsets, times and sizes."""
    topic = a_topic(site, storage={})
    fill(topic, 30)
    topic.upload()
    with a_history(site) as history:
        seen = BucketTopic(history, NAME, history.topic(TEXT).record().incarnation)
        (described,) = seen.descriptors(0, 30)
        part = ObjectPart.overlapping(TEXT, described, 0, 30)
        topic.log.delete(TEXT)
        fill(topic.log.topic(TEXT, create=True), 30, size=200 if is_alike else 77)
        topic.log.topic(TEXT).upload()
        assert history.topic(TEXT).tiered == 30
        with pytest.raises(ConflictError, match="deleted and made again"):
            list(seen.read_part(part, Decoders(TEXT, ["payload"])))


def test_bucket_whose_beginning_has_expired_begins_later(site):
    topic = a_topic(site)
    fill(topic, 60)
    topic.upload()
    gone = [described for described, _ in site.catalog().descriptors()][:-1]
    topic.bucket.owned.expire(gone)
    begin = gone[-1].end
    with a_history(site) as history:
        seen = history.topic(TEXT)
        assert (seen.earliest, seen.tiered) == (begin, 60)
        assert offsets(seen.read_arrow()) == list(range(begin, 60))
        with pytest.raises(OffsetOutOfRangeError) as caught:
            seen.read_arrow(begin - 1)
        assert (caught.value.earliest, caught.value.next) == (begin, 60)


def test_descriptors_are_those_of_the_range(site):
    topic = a_topic(site)
    fill(topic, 60)
    topic.upload()
    ranges = site.ranges()
    assert len(ranges) > 3
    with a_history(site) as history:
        seen = history.topic(TEXT)
        assert [(d.start, d.end) for d in seen.descriptors(0, 60)] == ranges
        low, high = ranges[1]
        assert [(d.start, d.end) for d in seen.descriptors(low, high)] == [ranges[1]]
        assert seen.descriptors(7, 7) == []


# -- by time ------------------------------------------------------------------------------------


def at(milliseconds):
    return EPOCH + timedelta(milliseconds=milliseconds)


def test_points_in_time_are_found(site):
    topic = a_topic(site)
    fill(topic, 60)
    topic.upload()
    with a_history(site) as history:
        seen = history.topic(TEXT)
        assert seen.find_time(0, 0, 60) == 0
        assert seen.find_time(1300, 0, 60) == 30
        assert seen.find_time(1301, 0, 60) == 31
        assert seen.find_time(1300, 40, 60) == 40
        assert seen.find_time(1300, 0, 30) is None
        assert seen.find_time(5000, 0, 60) is None
        assert offsets(seen.read_arrow(at(1300))) == list(range(30, 60))
        assert offsets(seen.read_arrow(at(1295), end=at(1310))) == [30]
        assert offsets(seen.read_arrow(end=at(1000))) == []
        assert offsets(seen.read_arrow(at(9000))) == []
        assert offsets(seen.read_arrow(10, end=at(1200))) == list(range(10, 20))
        assert offsets(seen.read_arrow("latest")) == []
        with pytest.raises(InvalidRequestError, match="before start"):
            seen.read_arrow(at(1300), end=at(1200))


@pytest.mark.parametrize(
    ("start", "end", "error"),
    [
        (31, None, OffsetOutOfRangeError),
        (0, 31, OffsetOutOfRangeError),
        (20, 10, InvalidRequestError),
        (-1, None, InvalidRequestError),
        (0, -1, InvalidRequestError),
        (True, None, InvalidRequestError),
        ("soon", None, InvalidRequestError),
        (1.5, None, InvalidRequestError),
        (datetime(2024, 1, 1), None, InvalidRequestError),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(site, start, end, error):
    topic = a_topic(site)
    fill(topic, 30)
    topic.upload()
    with a_history(site) as history:
        seen = history.topic(TEXT)
        with pytest.raises(error):
            seen.read_arrow(start, end=end)
        with pytest.raises(InvalidRequestError, match="unknown column"):
            seen.read_arrow(columns=["value"])


# -- what changes under a read ------------------------------------------------------------------


def a_cold_bucket(site, count=60, **settings):
    topic = a_topic(site, **settings)
    fill(topic, count)
    topic.upload()
    return topic


def test_missing_beginning_of_a_range_is_an_error(site):
    """The first object is forgotten between looking at the range and reading it."""
    a_cold_bucket(site)
    start, end = site.ranges()[0]
    with a_history(site) as history:
        reader = history.topic(TEXT).read_arrow(columns=["offset"])
        site.metadata.delete(site.catalog().keys.descriptor(start))
        with pytest.raises(DataGapError) as caught:
            reader.read_all()
    assert (caught.value.start, caught.value.end) == (start, end)


def test_parts_of_an_object_are_read_without_metadata(site):
    """What a task of Spark does: it was told which bytes of which object to read."""
    topic = a_cold_bucket(site)
    expected = rows_of(topic)
    described = site.catalog().find(20)
    part = ObjectPart.overlapping(TEXT, described, 20, described.end)
    with a_history(site) as history:
        seen = history.topic(TEXT)

        def refuse(kind, key):
            raise UnavailableError("the metadata store was asked")

        site.metadata.before = refuse
        decoders = Decoders(TEXT, (*COLUMNS, *HIDDEN))
        rows = list(seen.read_part(part, decoders))
        site.metadata.before = lambda kind, key: None
    assert [row for item in rows for row in item.batch.to_pylist()] == expected[20 : described.end]
    assert rows[-1].next_offset == described.end


def test_part_of_an_archive_that_is_gone_or_damaged_is_looked_up_again(site):
    """A task was told of an archive that is damaged, or has been replaced by frames since."""
    a_cold_bucket(site, 200)
    objects = [described for described, _ in site.catalog().descriptors()]
    keys = site.catalog().keys

    def merge(kind, tag):
        made = merged(site.objects, objects, format=kind, tag=tag, row_group_bytes=4000)
        for described in objects:
            site.metadata.delete(keys.descriptor(described.start))
        site.metadata.put(keys.descriptor(0), encode_descriptor(made))
        return made

    archive = merge("parquet", "00000001")
    part = ObjectPart.overlapping(TEXT, archive, 3, 197)
    merge("dnb1", "00000002")
    key = object_key(NAME, archive.object_id)
    site.objects.corrupt(key, archive.size_bytes // 2)
    with a_history(site) as history:
        seen = history.topic(TEXT)
        for _ in range(2):
            rows = seen.read_part(part, Decoders(TEXT, ("offset", "payload")))
            found = [offset for item in rows for offset in item.batch["offset"].to_pylist()]
            assert found == list(range(3, 197))
            site.objects.delete(key)


# -- threads and the end ------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False])
def test_history_that_is_closed_under_a_read_says_so(site, ahead):
    topic = a_topic(site, storage={})
    fill(topic, 300, size=2000)
    topic.upload()
    reading = {"cloud_reader": {"fetch_chunk_size": 65_536, "read_ahead": ahead}}
    history = a_history(site, **reading)
    reader = history.topic(TEXT).read_arrow(columns=["offset"])
    found = reader.read_next_batch().to_pylist()
    history.close()
    history.close()
    try:
        drain(reader, found)
    except IsterError as error:
        assert isinstance(error, (ClosedError, UnavailableError)), error
    # Or it ends well: what was under way may be finished.
    assert [row["offset"] for row in found] == list(range(len(found)))


# -- what it does not see -----------------------------------------------------------------------


def test_history_says_what_it_does_not_see(site):
    topic = a_topic(site)
    fill(topic, 10)
    topic.upload()
    fill(topic, 5)
    topic.flush()
    with a_history(site) as history:
        found = history.topic(TEXT)
        for shown in (repr(history), repr(found), history._repr_html_(), found._repr_html_()):
            assert "without messages not yet uploaded" in shown
        said = found.read_arrow().schema.metadata[b"ister.history"].decode()
        assert said.startswith(f"offsets 0 to 10 of {TEXT}, without messages not yet uploaded")
        assert found.read_arrow().read_all().schema.metadata, "the table has it, too"
        assert not found.is_sealed
    assert "are not visible" in ister.open_bucket.__doc__


def test_history_of_a_sealed_topic_is_whole(site):
    topic = a_topic(site)
    fill(topic, 10)
    topic.log.seal(TEXT)
    with a_history(site) as history:
        found = history.topic(TEXT)
        assert found.is_sealed
        assert found.read_arrow().schema.metadata == {
            b"ister.history": b"offsets 0 to 10 of %s" % TEXT.encode()
        }
        assert "without" not in found._repr_html_()


def test_text_is_null_where_a_payload_is_not_utf8(site):
    topic = a_topic(site)
    payloads = [b"a", b"\xff", "ü".encode(), b"", b"\xed\xa0\x80", b"\xf0\x9f\x8c\x8a"]
    topic.append_many(payloads)
    topic.flush()
    expected = ["a", None, "ü", "", None, "🌊"]
    local = topic.read_arrow(columns=["text", "offset"])
    assert local.schema.names == ["text", "offset"]
    assert local.read_all()["text"].to_pylist() == expected
    topic.upload()
    with a_history(site) as history:
        table = history.topic(TEXT).table(0, columns=["text", "payload"]).to_arrow()
    assert table.to_pydict() == {"text": expected, "payload": payloads}
