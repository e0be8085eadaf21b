"""A topic's metadata from its bucket alone: which objects, and what is written about them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.model import AckLevel, Codec, TopicName
from ister.bucket.names import ObjectName, manifest_key, object_key
from ister.errors import AlreadyExistsError, ConflictError, CorruptDataError
from ister.objectstore.base import ObjectInfo
from ister.rescue.rebuild import (
    Manifest,
    choose_objects,
    describe_object,
    find_continuation,
    find_topics,
    load_manifest,
    rebuild_topic,
    save_manifest,
)
from tests.support.cases import each
from tests.support.crash import crash_on
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import KIB, NAME, Cluster, Frames, calm, frames_of, merged, read_all


def name(start, end, epoch=1):
    return ObjectName(start=start, end=end, epoch=epoch)


# -- which objects ------------------------------------------------------------------------------

# The objects of a bucket; those of the topic; those left out; gaps.
CHOICES = {
    "none": ([], [], [], []),
    "objects that follow each other": (
        [(10, 20), (0, 10), (20, 25)],
        [(0, 10), (10, 20), (20, 25)],
        [],
        [],
    ),
    "a topic may begin anywhere": ([(70, 80), (80, 81)], [(70, 80), (80, 81)], [], []),
    "the owner of epoch 1 went on after epoch 2 had begun at 10": (
        [(0, 10), (10, 20), (10, 15, 2), (15, 30, 2)],
        [(0, 10), (10, 15, 2), (15, 30, 2)],
        [(10, 20)],
        [],
    ),
    "a fenced owner's object that reaches further": (
        [(0, 10), (10, 100), (10, 15, 2)],
        [(0, 10), (10, 15, 2)],
        [(10, 100)],
        [],
    ),
    "a repaired object in the place of the old one": (
        [(0, 10), (10, 20), (20, 30), (10, 20, 4)],
        [(0, 10), (10, 20, 4), (20, 30)],
        [(10, 20)],
        [],
    ),
    "a cycle was given up after its upload, and the next one was planned differently": (
        [(0, 10), (0, 14), (10, 20), (20, 40)],
        [(0, 10), (10, 20), (20, 40)],
        [(0, 14)],
        [],
    ),
    "of two from one offset the one that gets further": (
        [(0, 10), (0, 14), (14, 20)],
        [(0, 14), (14, 20)],
        [(0, 10)],
        [],
    ),
    "the longer one of two last ones": (
        [(0, 10), (10, 12), (10, 15)],
        [(0, 10), (10, 15)],
        [(10, 12)],
        [],
    ),
    "gaps are told and read over": (
        [(0, 10), (15, 20), (30, 31)],
        [(0, 10), (15, 20), (30, 31)],
        [],
        [(10, 15), (20, 30)],
    ),
}


@each("what", CHOICES)
def test_objects_that_make_up_a_topic(what):
    names, yes, no, gaps = CHOICES[what]
    found = choose_objects([name(*item) for item in names])
    assert found == ([name(*item) for item in yes], [name(*item) for item in no], gaps)


def test_merged_object_that_is_left_out_excludes_nothing():
    """Goal: one that was never committed overlaps what a later owner has merged, and what precedes.

    Left out with it, the oldest messages would be lost.
    """
    names = [
        name(0, 1, 3),
        replace(name(0, 4, 4), tag="00000001"),
        replace(name(1, 4, 7), tag="00000002"),
    ]
    assert choose_objects(names) == ([names[0], names[2]], [names[1]], [])


def test_continuation_begins_at_its_offset_and_ends_at_the_first_gap():
    names = [name(10, 20), name(20, 25), name(30, 40)]
    assert choose_objects(names, start=10) == (names[:2], names[2:], [])
    assert choose_objects([name(11, 20)], start=10)[0] == []


_NAMES = st.lists(
    st.builds(
        lambda start, size, epoch: name(start, start + size, epoch),
        st.integers(0, 30),
        st.integers(1, 10),
        st.integers(1, 4),
    ),
    max_size=12,
    unique=True,
)


@given(_NAMES)
@settings(max_examples=300)
def test_choice_is_a_history_and_leaves_nothing_uncounted(names):
    yes, no, gaps = choose_objects(names)
    assert sorted([*yes, *no], key=repr) == sorted(names, key=repr)
    for one, other in pairwise(yes):
        assert one.end <= other.start
        assert (one.end == other.start) != ((one.end, other.start) in gaps)
    for picked in yes:
        assert not any(
            rival.epoch > picked.epoch and rival.start < picked.end and picked.start < rival.end
            for rival in names
        )


# -- one object ---------------------------------------------------------------------------------


@pytest.fixture
def cluster():
    return Cluster()


def payloads(count, size=50):
    return [b"%d." % number + b"x" * size for number in range(count)]


def described(cluster, end):
    key = f"data-0-{end - 1}.dnb1"
    return describe_object(cluster.objects, NAME, key, name(0, end), incarnation="", created_at=0)


@pytest.mark.parametrize("codec", list(Codec))
def test_object_is_described_as_its_uploader_did(cluster, codec):
    frames = Frames(payloads(3500), first=100, codec=codec, times=range(5000, 8500))
    owned = cluster.claim("a", codec=codec)
    uploaded = cluster.uploader(owned, index_every_messages=1000).upload(frames, 100, 3600)
    found = describe_object(
        cluster.objects,
        NAME,
        uploaded.object_id,
        name(100, 3600),
        incarnation=uploaded.incarnation,
        created_at=uploaded.created_at,
    )
    assert found == uploaded
    assert len(found.offset_index) == 4


def test_object_with_a_message_larger_than_a_chunk_is_described(cluster):
    frames = Frames([b"a", b"b" * (5 * 1024 * KIB), b"c"])
    cluster.filled(frames, 3)
    found = described(cluster, 3)
    assert (found.messages, found.size_bytes) == (3, len(frames.between(0, 3)))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[1:],
        lambda data: data[:30] + b"?" + data[31:],
        lambda data: b"",
    ],
    ids=["cut", "longer", "shifted", "changed", "empty"],
)
def test_object_with_other_bytes_than_its_name_says_is_damaged(cluster, change):
    cluster.filled(Frames(payloads(10)), 10)
    cluster.objects.put(cluster.key("data-0-9.dnb1"), change(cluster.object_bytes("data-0-9.dnb1")))
    with pytest.raises(CorruptDataError) as refused:
        described(cluster, 10)
    assert refused.value.path == cluster.key("data-0-9.dnb1")


# -- what continues a topic ---------------------------------------------------------------------


def test_continuation_is_found_up_to_the_first_that_is_not_whole(cluster):
    frames = Frames(payloads(50))
    owned = cluster.filled(frames, 10, 20, 30, 40, 50)
    uploaded = [d for d, _ in cluster.catalog().descriptors()]

    def found(start):
        return find_continuation(cluster.objects, NAME, start, record=owned.record, runs=())

    assert [(d.start, d.end) for d in found(20)] == [(20, 30), (30, 40), (40, 50)]
    assert [d.checksum for d in found(20)] == [d.checksum for d in uploaded[2:]]
    assert found(25) == []
    assert found(50) == []
    cluster.objects.corrupt(cluster.key("data-30-39.dnb1"), 20)
    assert [(d.start, d.end) for d in found(20)] == [(20, 30)]


# -- a whole topic ------------------------------------------------------------------------------


def forget(cluster):
    """The metadata store is lost."""
    cluster.metadata.delete_prefix("/danube/")


def rebuild(cluster, objects=None, *, dry_run=False, **options):
    return rebuild_topic(
        cluster.objects,
        cluster.metadata,
        cluster.keys,
        find_topics(cluster.objects)[NAME] if objects is None else objects,
        clock=cluster.clock,
        dry_run=dry_run,
        **options,
    )


def test_metadata_is_written_as_the_uploader_wrote_it(cluster):
    frames = Frames(payloads(50))
    owned = cluster.filled(frames, 10, 30, 50, index_every_messages=1000)
    record = owned.record
    save_manifest(
        cluster.objects,
        NAME,
        Manifest(
            ack=record.ack,
            codec=record.codec,
            incarnation=record.incarnation,
            created_at=record.created_at,
        ),
    )
    before = [d for d, _ in cluster.catalog().descriptors()]
    current = cluster.metadata.get(cluster.keys.current).value
    forget(cluster)
    report = rebuild(cluster)
    assert report.status == "recovered"
    assert (report.errors, report.gaps, report.left_out) == ([], [], [])
    assert [d for d, _ in cluster.catalog().descriptors()] == before == report.objects
    assert cluster.metadata.get(cluster.keys.current).value == current
    found, _ = cluster.catalog().record()
    assert found == replace(record, epoch=1001, claim="", lineage=(), born=0)


def test_rebuilt_topic_is_claimed_and_goes_on(cluster):
    frames = Frames(payloads(50))
    cluster.filled(frames, 10, 30)
    forget(cluster)
    cluster.clock.advance(60)
    rebuild(cluster)
    owned = cluster.claim("b", create=False)
    assert (owned.epoch, owned.tiered, owned.start) == (1002, 30, 30)
    cluster.uploader(owned).upload(frames, 30, 50)
    found = read_all(cluster.reader(), 0, 50)
    assert [frame for _, frame in found] == frames.frames


def test_epoch_goes_on_behind_every_object_even_those_left_out(cluster):
    cluster.filled(Frames(payloads(10)), 10)
    cluster.objects.put(cluster.key("data-0-4-7.dnb1"), b"garbage of a later owner")
    forget(cluster)
    rebuild(cluster)
    assert cluster.catalog().record()[0].epoch == 1007
    assert cluster.claim("b").epoch == 1008


def test_topic_without_a_manifest_gets_what_its_objects_tell(cluster):
    owned = cluster.claim("a", codec=Codec.BINCODE1, ack=AckLevel.WRITTEN)
    cluster.uploader(owned).upload(Frames(payloads(10), codec=Codec.BINCODE1), 0, 10)
    forget(cluster)
    rebuild(cluster)
    record, _ = cluster.catalog().record()
    assert (record.codec, record.ack) == (Codec.BINCODE1, AckLevel.SYNCED)
    assert {d.incarnation for d, _ in cluster.catalog().descriptors()} == {record.incarnation}


def test_damaged_object_is_told_and_what_is_whole_in_it_can_be_read(cluster):
    frames = Frames(payloads(30))
    cluster.filled(frames, 10, 20, 30)
    cluster.objects.corrupt(cluster.key("data-10-19.dnb1"), len(frames.between(10, 15)) + 20)
    forget(cluster)
    report = rebuild(cluster)
    assert [type(error) for error in report.errors] == [CorruptDataError]
    assert report.errors[0].path == cluster.key("data-10-19.dnb1")
    assert report.errors[0].offset == 15
    assert [(d.start, d.end) for d in report.objects] == [(0, 10), (10, 20), (20, 30)]
    reader = cluster.reader()
    assert frames_of(reader.fetch(12, 15, bytes_max=1 << 20)) == frames.frames[12:15]
    with pytest.raises(CorruptDataError):
        reader.fetch(15, 20, bytes_max=1 << 20)
    assert frames_of(reader.fetch(16, 20, bytes_max=1 << 20)) == frames.frames[16:20]


def test_objects_that_fit_nowhere_are_told(cluster):
    frames = Frames(payloads(30))
    cluster.filled(frames, 10, 20, 30)
    for object_id in ("data-10-14.dnb1", "data-30-pending-1.dnb1", "notes.txt"):
        cluster.objects.put(cluster.key(object_id), b"garbage")
    forget(cluster)
    report = rebuild(cluster)
    assert sorted(report.left_out) == ["data-10-14.dnb1", "data-30-pending-1.dnb1", "notes.txt"]
    assert [(d.start, d.end) for d in report.objects] == [(0, 10), (10, 20), (20, 30)]


def test_gaps_are_told(cluster):
    cluster.filled(Frames(payloads(30)), 10, 20, 30)
    cluster.objects.drop(cluster.key("data-10-19.dnb1"))
    forget(cluster)
    report = rebuild(cluster)
    assert report.gaps == [(10, 20)]
    assert [d.start for d, _ in cluster.catalog().descriptors()] == [0, 20]


def test_topic_that_the_store_knows_is_left_as_it_is(cluster):
    owned = cluster.filled(Frames(payloads(30)), 10, 20)
    before = {kv.key: kv.value for kv in cluster.metadata.range("/")}
    report = rebuild(cluster)
    assert report.status == "failed"
    assert [type(error) for error in report.errors] == [AlreadyExistsError]
    assert {kv.key: kv.value for kv in cluster.metadata.range("/")} == before
    owned.check()


def test_dry_run_writes_nothing(cluster):
    cluster.filled(Frames(payloads(30)), 10, 20)
    forget(cluster)
    report = rebuild(cluster, dry_run=True)
    assert report.status == "planned"
    assert len(report.objects) == 2
    assert cluster.metadata.range("/danube/") == []


def test_crash_before_the_record_leaves_what_the_next_run_replaces(cluster):
    cluster.filled(Frames(payloads(30)), 10, 20)
    forget(cluster)
    cluster.metadata.before = crash_on("transact")
    with pytest.raises(SimulatedCrash):
        rebuild(cluster)
    cluster.metadata.before = calm
    assert cluster.catalog().record() is None
    # An object is lost between the two runs; what the first one wrote about it must not stay.
    cluster.objects.drop(cluster.key("data-10-19.dnb1"))
    assert rebuild(cluster).status == "recovered"
    assert [d.start for d, _ in cluster.catalog().descriptors()] == [0]
    assert cluster.catalog().record() is not None


def test_topic_made_meanwhile_is_not_overwritten(cluster):
    cluster.filled(Frames(payloads(10)), 10)
    forget(cluster)
    done = []

    def interfere(kind, key):
        if kind == "transact" and not done:
            done.append(1)
            cluster.claim("b")

    cluster.metadata.before = interfere
    with pytest.raises(ConflictError):
        rebuild(cluster)
    assert cluster.catalog().record()[0].lineage[0].node == "b"


# -- merged objects that are not sound ----------------------------------------------------------

FORMATS = ["dnb1", "parquet"]
TAG = "0123abcd"


def merge(cluster, first, last, *, kind="dnb1", **options):
    """An object of those that the catalog has from one number up to another; its name."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    objects = [described for described, _ in cluster.catalog().descriptors()]
    return merged(cluster.objects, objects[first:last], format=kind, **options).object_id


def spoil(cluster, object_id, how):
    """Changes a byte of an object, or leaves a half of it."""
    data = bytearray(cluster.object_bytes(object_id))
    if how == "half":
        del data[len(data) // 2 :]
    else:
        data[100] ^= 1
    cluster.objects.put(cluster.key(object_id), bytes(data))


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("how", ["byte", "half"])
@pytest.mark.parametrize("kind", FORMATS)
def test_merged_object_that_is_not_sound_gives_way_to_others(cluster, kind, how, epoch):
    frames = Frames(payloads(400))
    cluster.filled(frames, 100, 200, 300, 400)
    new = merge(cluster, 1, 3, kind=kind, epoch=epoch)
    spoil(cluster, new, how)
    forget(cluster)
    report = rebuild(cluster)
    assert [(d.start, d.end) for d in report.objects] == [
        (start, start + 100) for start in range(0, 400, 100)
    ]
    assert (report.left_out, report.errors, report.gaps) == ([new], [], [])
    assert [frame for _, frame in read_all(cluster.reader(), 0, 400)] == frames.frames


@pytest.mark.parametrize("kind", FORMATS)
def test_merged_object_that_is_not_sound_is_taken_where_others_are_gone(cluster, kind):
    cluster.filled(Frames(payloads(400)), 100, 200, 300, 400)
    new = merge(cluster, 1, 3, kind=kind)
    spoil(cluster, new, "byte")
    cluster.objects.drop(cluster.key("data-200-299.dnb1"))
    forget(cluster)
    report = rebuild(cluster)
    assert [(d.start, d.end) for d in report.objects] == [(0, 100), (100, 300), (300, 400)]
    assert report.left_out == ["data-100-199.dnb1"]
    assert [error.path for error in report.errors] == [cluster.key(new)]


def test_of_several_merged_objects_a_sound_one_is_taken(cluster):
    frames = Frames(payloads(400))
    cluster.filled(frames, 100, 200, 300, 400)
    small = merge(cluster, 0, 2, epoch=2, tag="00000001")
    large = merge(cluster, 0, 4, epoch=3, tag="00000002")
    spoil(cluster, large, "half")
    for object_id in ("data-0-99.dnb1", "data-100-199.dnb1"):
        cluster.objects.drop(cluster.key(object_id))
    forget(cluster)
    report = rebuild(cluster)
    assert [d.object_id for d in report.objects] == [
        small,
        "data-200-299.dnb1",
        "data-300-399.dnb1",
    ]
    assert (report.left_out, report.errors) == ([large], [])
    assert [frame for _, frame in read_all(cluster.reader(), 0, 400)] == frames.frames


def test_each_object_is_read_once(cluster):
    cluster.filled(Frames(payloads(300)), 100, 200, 300)
    spoil(cluster, merge(cluster, 0, 2), "byte")
    read = []
    forget(cluster)
    rebuild(cluster, dry_run=True, on_object=lambda: read.append(1))
    assert len(read) == 4


def test_sound_merged_object_of_a_later_epoch_keeps_others_out(cluster):
    frames = Frames(payloads(200))
    cluster.filled(frames, 100, 200)
    new = merge(cluster, 0, 2, epoch=2)
    # Of an owner that had been fenced, and went on.
    cluster.objects.put(cluster.key("data-150-250.dnb1"), b"other")
    forget(cluster)
    report = rebuild(cluster)
    assert [d.object_id for d in report.objects] == [new]


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_continuation_goes_around_merged_objects_that_are_not_sound(cluster, kind, epoch):
    owned = cluster.filled(Frames(payloads(400)), 100, 200, 300, 400)
    record = replace(owned.record, epoch=epoch)
    new = merge(cluster, 1, 3, kind=kind, epoch=epoch)

    def found():
        objects = find_continuation(cluster.objects, NAME, 100, record=record, runs=())
        return [(d.start, d.end) for d in objects]

    assert found() == [(100, 300), (300, 400)]
    spoil(cluster, new, "half")
    assert found() == [(100, 200), (200, 300), (300, 400)]
    # Nothing else has it: what is damaged is not taken into a catalog.
    cluster.objects.drop(cluster.key("data-200-299.dnb1"))
    assert found() == []


def test_name_of_an_object_that_is_not_sound_keeps_nothing_out(cluster):
    """Goal: no merged object that is in no history cuts one short by its name."""
    owned = cluster.filled(Frames(payloads(400)), 100, 200, 300, 400)
    record = replace(owned.record, epoch=2)
    cluster.objects.put(cluster.key(f"data-150-249-2-c{TAG}.dnb1"), b"half of something")
    found = find_continuation(cluster.objects, NAME, 0, record=record, runs=())
    assert [(d.start, d.end) for d in found] == [(0, 100), (100, 200), (200, 300), (300, 400)]
    forget(cluster)
    report = rebuild(cluster)
    assert len(report.objects) == 4
    assert (report.gaps, report.errors) == ([], [])


# -- topics and manifests -----------------------------------------------------------------------


def test_topics_are_found_by_their_keys(cluster):
    other = TopicName(namespace="b", topic="t")
    empty = TopicName(namespace="c", topic="t")
    cluster.objects.put(object_key(NAME, "data-0-9.dnb1"), b"x")
    cluster.objects.put(object_key(NAME, "data-10-19.dnb1"), b"x")
    cluster.objects.put(manifest_key(NAME), b"{}")
    cluster.objects.put(object_key(other, "data-0-9.dnb1"), b"x")
    cluster.objects.put(manifest_key(empty), b"{}")
    cluster.objects.put("storage/elsewhere/x", b"x")
    found = find_topics(cluster.objects)
    assert {topic: len(objects) for topic, objects in found.items()} == {
        NAME: 2,
        other: 1,
        empty: 0,
    }
    assert all(isinstance(info, ObjectInfo) for info in found[NAME])


MANIFEST = Manifest(ack=AckLevel.TIERED, codec=Codec.BINCODE1, incarnation="abc", created_at=5)


def test_manifest_comes_back_as_it_was(cluster):
    assert load_manifest(cluster.objects, NAME) is None
    save_manifest(cluster.objects, NAME, MANIFEST)
    assert load_manifest(cluster.objects, NAME) == MANIFEST
    save_manifest(cluster.objects, NAME, replace(MANIFEST, incarnation="def"))
    assert load_manifest(cluster.objects, NAME).incarnation == "def"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"5", b"null", b"{}", b"\xff", b'{"ack": "never"}', b"[" * 60_000],
    ids=["empty", "cut", "list", "number", "null", "fields", "not UTF-8", "ack", "nested"],
)
def test_damaged_manifest_is_as_good_as_none(cluster, data):
    cluster.objects.put(manifest_key(NAME), data)
    assert load_manifest(cluster.objects, NAME) is None
