"""One object of several: what comes out is what went in, or nothing does."""

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.compute as pc  # noqa: E402

from ister.base.model import Codec, Layout  # noqa: E402
from ister.bucket.check import verify_content  # noqa: E402
from ister.bucket.history_reader import NothingLeftError  # noqa: E402
from ister.bucket.merge import merge_objects  # noqa: E402
from ister.bucket.names import (  # noqa: E402
    ObjectName,
    parse_object_id,
    segment_name,
    segments_prefix,
)
from ister.errors import (  # noqa: E402
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.format.descriptor import KEPT_LATEST, encode_descriptor  # noqa: E402
from ister.rescue.rebuild import (  # noqa: E402
    choose_objects,
    describe_object,
    find_topics,
    rebuild_topic,
)
from tests.support.stores import (  # noqa: E402
    KIB,
    NAME,
    NOW_MS,
    UPLOADS,
    Cluster,
    Frames,
    frames_of,
    read_all,
)

SETTINGS = replace(UPLOADS, chunk_bytes=64 * KIB)
FORMATS = pytest.mark.parametrize("format", ["dnb1", "parquet"])


def payloads(count, size=300):
    noise = random.Random(count)
    return [b"%d." % number + noise.randbytes(size) for number in range(count)]


def a_topic(cluster, *ends, codec=Codec.BINCODE2):
    times = [NOW_MS + 10 * number for number in range(ends[-1])]
    frames = Frames(payloads(ends[-1]), codec=codec, times=times)
    cluster.filled(frames, *ends)
    return frames


_tags = iter(range(1 << 32))


def merged(cluster, objects, format="parquet", *, survives=None, **named):
    return merge_objects(
        NAME,
        objects,
        store=cluster.objects,
        settings=named.pop("settings", SETTINGS),
        format=format,
        epoch=named.pop("epoch", 1),
        incarnation="i",
        tag=f"{next(_tags):08x}",
        created_at=5,
        survives=survives,
        row_group_bytes=named.pop("row_group_bytes", 16 * KIB),
        **named,
    )


def swap(cluster, old, new):
    """What a commit does, without the ceremony."""
    for described in old:
        cluster.metadata.delete(cluster.keys.descriptor(described.start))
    cluster.metadata.put(cluster.keys.descriptor(new.start), encode_descriptor(new))


def every(step):
    """Keeps the offsets that `step` divides."""
    return lambda batch: pc.equal(
        pc.subtract(
            batch.column("offset"), pc.multiply(pc.divide(batch.column("offset"), step), step)
        ),
        0,
    )


def read_there(reader, start, end, **named):
    """As `read_all`, over what is not there."""
    found = []
    while start < end:
        try:
            batch = reader.fetch(start, end, bytes_max=named.get("bytes_max", 1 << 20))
        except NothingLeftError as nothing:
            start = nothing.next_offset
            continue
        assert batch.first_offset >= start
        found += enumerate(frames_of(batch), batch.first_offset)
        start = batch.next_offset
    return found


# -- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
@FORMATS
def test_merged_object_has_the_frames_of_its_inputs(cluster, format, codec):
    frames = a_topic(cluster, 100, 250, 400, codec=codec)
    objects = cluster.descriptors()
    new = merged(cluster, objects, format)
    assert (new.start, new.end, new.messages) == (0, 400, 400)
    assert (new.format, new.kept, new.codec, new.epoch) == (format, "", codec, 1)
    assert (new.publish_time_min, new.publish_time_max) == (NOW_MS, NOW_MS + 3990)
    name = parse_object_id(new.object_id)
    assert (name.start, name.end, name.format) == (0, 400, format)
    assert name.tag
    verify_content(cluster.objects, cluster.key(new.object_id), new, chunk_bytes=1000)
    again = merged(cluster, [new], "dnb1")
    assert cluster.object_bytes(again.object_id) == frames.between(0, 400)
    assert again.offset_index == merged(cluster, objects, "dnb1").offset_index


def test_objects_of_both_formats_go_together(cluster):
    frames = a_topic(cluster, 100, 250, 400)
    objects = cluster.descriptors()
    middle = merged(cluster, objects[1:2])
    for kind in ("dnb1", "parquet"):
        new = merged(cluster, [objects[0], middle, objects[2]], kind)
        assert cluster.object_bytes(merged(cluster, [new], "dnb1").object_id) == frames.between(
            0, 400
        )


def test_messages_that_do_not_survive_are_not_there(cluster):
    frames = a_topic(cluster, 100, 250, 400)
    objects = cluster.descriptors()
    new = merged(cluster, objects, survives=every(7))
    assert (new.kept, new.messages, new.end) == (KEPT_LATEST, 58, 400)
    swap(cluster, objects, new)
    wanted = [(offset, frames.frames[offset]) for offset in range(0, 400, 7)]
    assert read_there(cluster.reader(), 0, 400) == wanted
    # Once more over what is left.
    more = merged(cluster, [new], survives=every(14))
    assert (more.kept, more.messages) == (KEPT_LATEST, 29)
    same = merged(cluster, [new])
    assert (same.kept, same.messages) == (KEPT_LATEST, 58)


def test_a_range_of_which_nothing_survives_is_an_object(cluster):
    frames = a_topic(cluster, 100, 250)
    objects = cluster.descriptors()
    new = merged(cluster, objects[:1], survives=lambda batch: pc.less(batch.column("offset"), 0))
    assert (new.messages, new.kept, new.offset_index) == (0, KEPT_LATEST, ())
    swap(cluster, objects[:1], new)
    found = read_there(cluster.reader(), 0, 250)
    assert [offset for offset, _ in found] == list(range(100, 250))
    assert merged(cluster, [new, objects[1]]).messages == 150
    with pytest.raises(NothingLeftError) as caught:
        cluster.reader().fetch(3, 50, bytes_max=1)
    assert caught.value.next_offset == 50
    assert frames.first == 0


def test_what_is_refused(cluster):
    a_topic(cluster, 100, 250, 400)
    first, second, third = cluster.descriptors()
    with pytest.raises(InvalidRequestError, match="--keep latest-per-key needs --format parquet"):
        merged(cluster, [first], "dnb1", survives=every(2))
    with pytest.raises(InvalidRequestError, match="does not begin where"):
        merged(cluster, [first, third])
    with pytest.raises(InvalidRequestError, match="no objects"):
        merged(cluster, [])
    with pytest.raises(InvalidRequestError, match="bincode1"):
        merged(cluster, [first, replace(second, codec=Codec.BINCODE1)])
    with pytest.raises(InvalidRequestError, match="left out of"):
        merged(cluster, [merged(cluster, [first], survives=every(2))], "dnb1")
    with pytest.raises(ClosedError):
        merged(cluster, [first], is_stopping=lambda: True)


@FORMATS
def test_codec_that_no_descriptor_says_is_recognised(cluster, format):
    frames = a_topic(cluster, 100, codec=Codec.BINCODE1)
    [described] = cluster.descriptors()
    new = merged(cluster, [replace(described, codec=None, checksum=None)], format)
    assert new.codec is Codec.BINCODE1
    assert cluster.object_bytes(merged(cluster, [new], "dnb1").object_id) == frames.between(0, 100)


@FORMATS
@pytest.mark.parametrize("is_parquet", [False, True])
@pytest.mark.parametrize("where", [0.3, 0.999])
def test_damaged_input_makes_no_object(cluster, format, is_parquet, where):
    a_topic(cluster, 100, 250)
    objects = cluster.descriptors()
    if is_parquet:
        objects[1] = merged(cluster, objects[1:])
    before = cluster.data_keys()
    key = cluster.key(objects[1].object_id)
    data = bytearray(cluster.objects.read(key, 0, 1 << 30))
    data[int(len(data) * where)] ^= 1
    cluster.objects.put(key, bytes(data))
    with pytest.raises(CorruptDataError) as caught:
        merged(cluster, objects, format)
    assert caught.value.path == key
    assert cluster.data_keys() == before
    cluster.objects.put(key, bytes(data[: int(len(data) * where)]))
    with pytest.raises(CorruptDataError):
        merged(cluster, objects, format)
    cluster.objects.delete(key)
    with pytest.raises(NotFoundError):
        merged(cluster, objects, format)
    assert cluster.data_keys() == [name for name in before if not key.endswith(name)]


@FORMATS
def test_whole_frames_of_another_object_are_not_taken(cluster, format):
    """Goal: a store that hands out the bytes of another object is found out by the checksum."""
    a_topic(cluster, 100)
    [described] = cluster.descriptors()
    other = Frames(payloads(100, size=301), times=[NOW_MS] * 100)
    data = other.between(0, 100)
    cluster.objects.put(cluster.key(described.object_id), data)
    with pytest.raises(CorruptDataError, match="checksum"):
        merged(cluster, [replace(described, size_bytes=len(data))], format)


def test_completion_whose_answer_is_lost_counts(cluster):
    a_topic(cluster, 100)
    [described] = cluster.descriptors()

    def lose(kind, key):
        if kind == "close":
            cluster.objects.after = lambda kind, key: None
            raise UnavailableError("no answer")

    cluster.objects.after = lose
    new = merged(cluster, [described])
    verify_content(cluster.objects, cluster.key(new.object_id), new, chunk_bytes=1000)


# -- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranged", [True, False])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_history_is_read_from_any_place_of_a_parquet_object(cluster, ranged, is_ahead):
    frames = a_topic(cluster, 100, 250, 400)
    objects = cluster.descriptors()
    swap(cluster, objects[:2], merged(cluster, objects[:2]))
    wanted = list(enumerate(frames.frames))
    with ThreadPoolExecutor(1) as ahead:
        reader = cluster.reader(ranged=ranged, ahead=ahead if is_ahead else None)
        assert read_all(reader, 0, 400) == wanted
        assert read_all(reader, 0, 400, bytes_max=1) == wanted
        for start, end in ((0, 1), (99, 101), (249, 251), (17, 300), (248, 250)):
            assert read_all(reader, start, end) == wanted[start:end]
        assert reader.held_bytes > 0
        reader.close()
        assert reader.held_bytes == 0


def test_time_is_found_in_a_parquet_object(cluster):
    a_topic(cluster, 100, 250)
    objects = cluster.descriptors()
    for survives in (None, every(7)):
        new = merged(cluster, objects, survives=survives)
        swap(cluster, cluster.descriptors(), new)
        step = 1 if survives is None else 7
        for offset in (0, 7, 14, 133, 245):
            at = NOW_MS + 10 * offset
            assert cluster.reader().find_time(at, end=250) == offset
            assert cluster.reader().find_time(at + 1, end=250) == (
                offset + step if offset + step < 250 else None
            )
        assert cluster.reader().find_time(NOW_MS + 2500, end=250) is None


def test_holes_are_no_damage(cluster, caplog):
    a_topic(cluster, 100, 250)
    objects = cluster.descriptors()
    swap(cluster, objects, merged(cluster, objects, survives=every(60)))
    caplog.set_level(logging.INFO)
    found = [offset for offset, _ in read_there(cluster.reader(skips_damage=True), 0, 250)]
    assert found == [0, 60, 120, 180, 240]
    assert "damaged" not in caplog.text
    assert cluster.metrics.snapshot().get("cloud_reader.errors_total", 0) == 0
    with pytest.raises(NothingLeftError) as caught:
        cluster.reader().fetch(61, 100, bytes_max=1)
    assert caught.value.next_offset == 100


def test_damaged_row_group_raises_or_is_left_out(cluster):
    frames = a_topic(cluster, 100, 250)
    objects = cluster.descriptors()
    new = merged(cluster, objects)
    swap(cluster, objects, new)
    key = cluster.key(new.object_id)
    data = bytearray(cluster.objects.read(key, 0, 1 << 30))
    first, position = new.offset_index[1]
    after = new.offset_index[2][0]
    data[position + 100] ^= 1
    cluster.objects.put(key, bytes(data))
    reader = cluster.reader()
    assert read_all(reader, 0, first) == list(enumerate(frames.frames))[:first]
    with pytest.raises(CorruptDataError) as caught:
        reader.fetch(first, 250, bytes_max=1)
    assert (caught.value.path, caught.value.offset, caught.value.position) == (key, first, position)
    assert read_all(reader, after, 250) == list(enumerate(frames.frames))[after:]
    skipping = cluster.reader(skips_damage=True)
    found = [offset for offset, _ in read_there(skipping, 0, 250)]
    assert found == [*range(first), *range(after, 250)]
    assert skipping.damage_left_out == after - first
    cluster.objects.put(key, bytes(data[:-20]))
    with pytest.raises(CorruptDataError):
        cluster.reader().fetch(0, 250, bytes_max=1)
    assert read_there(cluster.reader(skips_damage=True), 0, 250) == []


def test_bits_that_flip_on_the_way_are_fetched_again(cluster):
    frames = a_topic(cluster, 250)
    objects = cluster.descriptors()
    new = merged(cluster, objects)
    swap(cluster, objects, new)
    read, calls = cluster.objects.read, []

    def flaky(key, start, size):
        data = read(key, start, size)
        calls.append(start)
        if len(calls) % 2:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data

    cluster.objects.read = flaky
    assert read_all(cluster.reader(), 0, 250) == list(enumerate(frames.frames))


# -- verifying ----------------------------------------------------------------------------------


@FORMATS
def test_sound_objects_pass_with_and_without_a_checksum(cluster, format):
    a_topic(cluster, 100, 250)
    for survives in (None, every(7)) if format == "parquet" else (None,):
        new = merged(cluster, cluster.descriptors(), format, survives=survives)
        key = cluster.key(new.object_id)
        for described in (new, replace(new, checksum=None)):
            verify_content(cluster.objects, key, described, chunk_bytes=5000)


def test_damage_is_found_with_and_without_a_checksum(cluster):
    a_topic(cluster, 250)
    for kind in ("dnb1", "parquet"):
        new = merged(cluster, cluster.descriptors(), kind)
        key = cluster.key(new.object_id)
        cluster.objects.corrupt(key, new.offset_index[1][1] + 40)
        for described in (new, replace(new, checksum=None)):
            with pytest.raises(CorruptDataError):
                verify_content(cluster.objects, key, described, chunk_bytes=5000)


def test_merged_frames_of_the_layout_segments_are_a_segment(cluster):
    frames = a_topic(cluster, 100, 250)
    settings = replace(SETTINGS, layout=Layout.SEGMENTS)
    new = merged(cluster, cluster.descriptors(), "dnb1", epoch=3, settings=settings)
    assert segment_name(new.object_id) is not None
    assert cluster.objects.stat(segments_prefix(NAME) + segment_name(new.object_id))
    swap(cluster, cluster.descriptors(), new)
    assert read_all(cluster.reader(), 0, 250) == list(enumerate(frames.frames))
    assert segment_name(merged(cluster, [new], settings=settings).object_id) is None


# -- rebuilding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("survives", [None, every(7)])
def test_archive_describes_itself(cluster, survives):
    a_topic(cluster, 100, 250)
    new = merged(cluster, cluster.descriptors(), survives=survives, epoch=3)
    found = describe_object(
        cluster.objects,
        NAME,
        new.object_id,
        parse_object_id(new.object_id),
        incarnation="i",
        created_at=5,
    )
    # When its messages arrived is in the descriptor alone.
    assert found == replace(new, etag=found.etag, arrival_time_max=None)


def rebuilt(cluster):
    fresh = Cluster()
    fresh.objects = cluster.objects
    [(topic, objects)] = find_topics(cluster.objects).items()
    assert topic == NAME
    report = rebuild_topic(
        cluster.objects, fresh.metadata, fresh.keys, objects, clock=fresh.clock, dry_run=False
    )
    return fresh, report


@pytest.mark.parametrize("epoch", [1, 4])
@pytest.mark.parametrize("survives", [None, every(7)])
def test_topic_is_rebuilt_from_merged_objects_and_originals(cluster, survives, epoch):
    """Goal: either will do, unless messages were left out: then the originals, where they are."""
    frames = a_topic(cluster, 100, 250, 400)
    objects = cluster.descriptors()
    new = merged(cluster, objects[:2], survives=survives, epoch=epoch)
    fresh, report = rebuilt(cluster)
    assert (report.gaps, report.errors) == ([], [])
    assert read_all(fresh.reader(), 0, 400) == list(enumerate(frames.frames))
    for described in objects[:2]:
        cluster.objects.delete(cluster.key(described.object_id))
    fresh, report = rebuilt(cluster)
    assert (report.gaps, report.errors) == ([], [])
    assert [item.object_id for item in report.objects] == [new.object_id, objects[2].object_id]
    step = 1 if survives is None else 7
    wanted = [*range(0, 250, step), *range(250, 400)]
    assert [offset for offset, _ in read_there(fresh.reader(), 0, 400)] == wanted


def test_partial_object_is_taken_only_where_nothing_else_is():
    def name(start, end, epoch=1, tag=None):
        return ObjectName(start=start, end=end, epoch=epoch, tag=tag)

    def chosen(names, partial):
        yes, _, gaps = choose_objects(names, partial=partial)
        return [(n.start, n.end, n.epoch) for n in yes], gaps

    thin = name(0, 20, 3, "aaaaaaaa")
    originals = [name(0, 10), name(10, 20), name(20, 30)]
    assert chosen([thin, *originals], {thin}) == ([(0, 10, 1), (10, 20, 1), (20, 30, 1)], [])
    assert chosen([thin, *originals[1:]], {thin}) == ([(0, 20, 3), (20, 30, 1)], [])
    # What a fenced owner has left does not make up the range: it is not the original.
    assert chosen([thin, name(0, 14), name(14, 23), originals[2]], {thin}) == (
        [(0, 20, 3), (20, 30, 1)],
        [],
    )
    # A plain merge is as good as the originals, and of a later epoch than what was fenced.
    plain = name(0, 20, 3, "bbbbbbbb")
    assert chosen([plain, thin, name(0, 14)], {thin}) == ([(0, 20, 3)], [])
