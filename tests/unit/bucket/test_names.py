"""Names in the bucket and in the metadata store, both directions."""

import re

from hypothesis import given
from hypothesis import strategies as st

from ister.base.model import Layout, TopicName
from ister.bucket.names import (
    STAGING_PREFIX,
    TOPICS_PREFIX,
    ObjectName,
    TopicKeys,
    format_object_id,
    format_pending_id,
    manifest_key,
    object_id_of,
    object_key,
    objects_prefix,
    parse_danube_id,
    parse_epoch,
    parse_object_id,
    parse_topic_of_key,
    segment_name,
    staging_prefix,
)
from tests.support.cases import each

NAME = TopicName(namespace="default", topic="orders")
_OFFSETS = st.integers(0, 2**64 - 2)


@given(_OFFSETS, st.integers(1, 10**6), st.integers(1, 2**63))
def test_object_name_comes_back_as_it_was(start, count, epoch):
    name = parse_object_id(format_object_id(start, start + count, epoch))
    assert name == ObjectName(start=start, end=start + count, epoch=epoch)


@each(
    ("start", "end", "epoch", "text"),
    [
        (0, 1, 1, "data-0-0.dnb1"),
        (1000, 5001, 1, "data-1000-5000.dnb1"),
        (1000, 5001, 2, "data-1000-5000-2.dnb1"),
    ],
)
def test_name_of_the_first_owner_is_danubes_and_later_ones_have_the_epoch(start, end, epoch, text):
    assert format_object_id(start, end, epoch) == text


@given(
    _OFFSETS,
    st.integers(1, 10**10),
    st.integers(1, 10**10 - 1),
    st.none() | st.integers(0, 2**32 - 1).map("{:08x}".format),
)
def test_name_of_a_segment_comes_back_as_it_was(start, count, epoch, tag):
    text = format_object_id(start, start + count, epoch, tag=tag, layout=Layout.SEGMENTS)
    assert re.fullmatch(r"segments/data-[0-9]+-[0-9]+\.dnb1", text)
    name = parse_object_id(text)
    assert name == ObjectName(start=start, end=start + count, epoch=epoch, tag=tag)
    assert parse_epoch(text) == epoch
    assert parse_danube_id(text) is None
    assert object_id_of(NAME, object_key(NAME, text)) == text
    assert segment_name(text) == text.removeprefix("segments/")


@each(
    ("object_id", "name"),
    [
        ("data-0-1790000000.dnb1", (0, 1790000000)),  # 0.6.2 to 0.8
        ("data-2000000000-1790000000.dnb1", (2000000000, 1790000000)),
        ("segments/data-0-1790000000.dnb1", (0, 1790000000)),  # since 0.9
        ("segments/data-5-7.dnb1", (5, 7)),
    ],
)
def test_names_with_danubes_seconds_promise_no_end(object_id, name):
    assert parse_object_id(object_id) is None
    assert parse_epoch(object_id) == 0
    assert parse_danube_id(object_id) == name


def test_end_that_may_be_a_time_is_an_end_if_the_object_may_have_so_many_messages():
    name = parse_object_id("data-1790000000-1790000999.dnb1")
    assert (name.start, name.end) == (1790000000, 1790001000)


def test_parquet_is_never_a_segment():
    text = format_object_id(0, 10, 1, format="parquet", tag="0123abcd", layout=Layout.SEGMENTS)
    assert text == "data-0-9-c0123abcd.parquet"
    assert segment_name(text) is None


@each(
    "text",
    [
        "",
        "cur",
        "data-5-4.dnb1",
        "data-05-7.dnb1",
        "data-5-07.dnb1",
        "data-5-7-0.dnb1",
        "data-5-7-01.dnb1",
        "data--5-7.dnb1",
        "data-5.dnb1",
        "data-5-7.dnb2",
        "data-5-7.dnb1.tmp",
        "data-5-7.dnb1\n",
        "data-1٣-70.dnb1",
        "data-1-7٣.dnb1",
        "xdata-5-7.dnb1",
        format_pending_id(5, 1),
        format_pending_id(5, 7),
    ],
)
def test_foreign_and_pending_names_are_none_of_ours(text):
    assert parse_object_id(text) is None


def test_keys_of_a_topic_lie_below_its_own_prefix():
    assert objects_prefix(NAME) == "storage/topics/default/orders/objects/"
    assert object_key(NAME, "x.dnb1") == "storage/topics/default/orders/objects/x.dnb1"
    assert manifest_key(NAME) == "storage/topics/default/orders/topic.json"


@each("key", [object_key(NAME, "data-0-0.dnb1"), manifest_key(NAME)])
def test_topic_of_a_key_is_found(key):
    assert parse_topic_of_key(key) == NAME


@each(
    "key",
    [
        "storage/topics/default/orders",
        "storage/topics/default",
        "storage/topics/a b/orders/objects/x",
        "storage/topics/default/or.ders/objects/x",
        "storage/other/default/orders/objects/x",
        "default/orders/objects/x",
        "",
    ],
)
def test_key_of_no_topic_has_none(key):
    assert parse_topic_of_key(key) is None


def test_staged_rows_lie_apart_from_objects_by_topic_writer_and_batch():
    assert staging_prefix(NAME) == "staging/default/orders/"
    assert staging_prefix(NAME, "query-1") == "staging/default/orders/query-1/"
    assert staging_prefix(NAME, "query-1", 12) == "staging/default/orders/query-1/12/"
    assert staging_prefix(NAME, "query-1", 0) == "staging/default/orders/query-1/0/"
    assert not staging_prefix(NAME).startswith(TOPICS_PREFIX)
    assert staging_prefix(NAME).startswith(STAGING_PREFIX)
    assert parse_topic_of_key(staging_prefix(NAME, "query-1", 12) + "part") is None


def test_staging_of_a_topic_does_not_cover_one_with_a_longer_name():
    longer = TopicName(namespace="default", topic="orders2")
    assert not staging_prefix(longer).startswith(staging_prefix(NAME))
    assert not staging_prefix(NAME, "q", 12).startswith(staging_prefix(NAME, "q", 1))
    assert not staging_prefix(NAME, "q2").startswith(staging_prefix(NAME, "q"))


# -- metadata keys ------------------------------------------------------------------------------


def test_metadata_keys_are_danubes():
    keys = TopicKeys("/danube", NAME)
    assert keys.record == "/danube/topics/default/orders"
    assert keys.owner == "/danube/cluster/owners/default/orders"
    assert keys.objects == "/danube/storage/topics/default/orders/objects/"
    assert keys.current == "/danube/storage/topics/default/orders/objects/cur"
    assert keys.session == "/danube/storage/topics/default/orders/upload/session"
    assert keys.sealed == "/danube/storage/topics/default/orders/state"
    assert keys.progress("s") == "/danube/subscriptions/default/orders/s/progress"
    assert keys.writer("q") == "/danube/storage/topics/default/orders/writers/q"


def test_writers_are_removed_with_their_topic_and_taken_for_nothing_else():
    keys = TopicKeys("/danube", NAME)
    assert keys.writer("q").startswith(keys.storage)
    assert keys.writer("q").startswith(keys.writer(""))
    for other in (keys.objects, keys.current, keys.session, keys.sealed):
        assert not keys.writer("q").startswith(other)
        assert not other.startswith(keys.writer(""))


@given(_OFFSETS, _OFFSETS)
def test_descriptor_keys_sort_as_their_offsets_do(one, other):
    keys = TopicKeys("/danube", NAME)
    assert (keys.descriptor(one) < keys.descriptor(other)) == (one < other)


def test_descriptors_end_before_the_pointer():
    keys = TopicKeys("/danube", NAME)
    assert keys.descriptor(2**64 - 1) < keys.objects_end < keys.current


@each("attribute", ["objects", "storage", "subscriptions"])
def test_prefixes_of_a_topic_do_not_cover_one_with_a_longer_name(attribute):
    longer = TopicKeys("/danube", TopicName(namespace="default", topic="orders2"))
    prefix = getattr(TopicKeys("/danube", NAME), attribute)
    for name in ("objects", "storage", "subscriptions", "current", "session", "sealed"):
        assert not getattr(longer, name).startswith(prefix)


@each(
    ("name", "text"),
    [
        ((0, 10, 1, "dnb1", None), "data-0-9.dnb1"),
        ((0, 10, 1, "parquet", "0123abcd"), "data-0-9-c0123abcd.parquet"),
        ((0, 10, 7, "dnb1", "0123abcd"), "data-0-9-7-c0123abcd.dnb1"),
        ((5, 6, 12, "parquet", "ffffffff"), "data-5-5-12-cffffffff.parquet"),
    ],
)
def test_names_of_merged_objects(name, text):
    start, end, epoch, kind, tag = name
    assert format_object_id(start, end, epoch, format=kind, tag=tag) == text
    assert parse_object_id(text) == ObjectName(
        start=start, end=end, epoch=epoch, format=kind, tag=tag
    )
    assert parse_epoch(text) == epoch


@each(
    "text",
    [
        "data-0-9-c0123abc.parquet",
        "data-0-9-c0123ABCD.parquet",
        "data-0-9-c0123abcd-2.parquet",
        "data-0-9-1-c0123abcd.parquet",
        "data-0-9c0123abcd.parquet",
        "data-0-9.orc",
        "data-9-0-c0123abcd.parquet",
        "data-0-pending-2.parquet",
    ],
)
def test_what_is_no_name_of_a_merged_object(text):
    assert parse_object_id(text) is None
    assert parse_epoch(text) == 0
