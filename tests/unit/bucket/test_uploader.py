"""The upload cycle: what becomes of synced frames, step by step, and what a failure leaves."""

import pytest

from ister.bucket.names import format_pending_id
from ister.errors import CorruptDataError, FencedError, UnavailableError
from tests.support.stores import KIB, NOW_MS, Frames, failing

FINALIZE = pytest.mark.parametrize("copies", [False, True], ids=["direct", "copy"])


def payloads(count, size=100):
    return [b"%d." % number + b"x" * size for number in range(count)]


# -- what comes out -----------------------------------------------------------------------------


@FINALIZE
def test_object_has_exactly_the_frames_and_its_descriptor_says_so(cluster, copies):
    frames = Frames(payloads(50), times=range(1000, 1050))
    owned = cluster.claim("a")
    found = cluster.uploader(owned, copies=copies).upload(frames, 0, 50)
    assert cluster.object_bytes(found.object_id) == frames.between(0, 50)
    assert found.object_id == "data-0-49.dnb1"
    assert (found.start, found.end, found.messages) == (0, 50, 50)
    assert (found.epoch, found.incarnation) == (1, owned.record.incarnation)
    assert found.created_at == NOW_MS // 1000
    assert (found.publish_time_min, found.publish_time_max) == (1000, 1049)
    assert [offset for offset, _ in found.offset_index] == [0, 10, 20, 30, 40]
    info = cluster.objects.stat(cluster.key(found.object_id))
    assert (found.size_bytes, found.etag) == (info.size, info.etag)
    assert cluster.catalog().last() == found
    assert owned.tiered == 50
    assert cluster.data_keys() == ["data-0-49.dnb1"]
    assert owned.session() is None
    opened = [key for kind, key in cluster.objects.calls if kind == "open_writer"]
    assert opened[0] == cluster.key(format_pending_id(0, 1) if copies else "data-0-49.dnb1")


def test_store_without_copies_is_copied_by_hand(cluster):
    cluster.objects.supports_copy = False
    frames = Frames(payloads(300, size=1000))
    found = cluster.uploader(cluster.claim("a"), copies=True).upload(frames, 0, 300)
    assert cluster.object_bytes(found.object_id) == frames.between(0, 300)
    assert cluster.data_keys() == ["data-0-299.dnb1"]


def test_nothing_to_upload_asks_nobody(cluster):
    uploader = cluster.uploader(cluster.claim("a"))
    frames = Frames(payloads(5))
    uploader.upload(frames, 0, 5)
    cluster.objects.calls.clear()
    revision = cluster.metadata.revision
    assert uploader.upload(frames, 5, 5) is None
    assert cluster.objects.calls == []
    assert cluster.metadata.revision == revision


def test_object_of_a_later_owner_has_its_epoch_in_the_name(cluster):
    frames = Frames(payloads(20))
    cluster.filled(frames, 10)
    owned = cluster.claim("a")
    found = cluster.uploader(owned).upload(frames, 10, 20)
    assert (found.object_id, found.epoch) == ("data-10-19-2.dnb1", 2)


# -- limits of an object ------------------------------------------------------------------------


def test_object_is_cut_before_it_becomes_too_large(cluster):
    frames = Frames(payloads(100, size=1000))
    size = frames.size(10)
    owned = cluster.claim("a")
    uploader = cluster.uploader(owned, object_bytes_max=10 * size)
    ends = []
    while (found := uploader.upload(frames, owned.tiered, 100)) is not None:
        assert found.size_bytes <= 10 * size
        ends.append(found.end)
    assert ends[-1] == 100
    assert len(ends) in (10, 11)
    assert [d.start for d, _ in cluster.catalog().descriptors()] == [0, *ends[:-1]]


def test_message_over_the_limit_has_an_object_of_its_own(cluster):
    frames = Frames([b"a", b"b" * 100_000, b"c", b"d"])
    owned = cluster.claim("a")
    uploader = cluster.uploader(owned, object_bytes_max=4 * KIB)
    while uploader.upload(frames, owned.tiered, 4) is not None:
        pass
    assert cluster.ranges() == [(0, 1), (1, 2), (2, 4)]


def test_object_is_cut_before_a_message_published_too_much_later(cluster):
    frames = Frames(payloads(6), times=[1000, 1300, 1299, 1301, 1302, 9000])
    owned = cluster.claim("a")
    uploader = cluster.uploader(owned, object_span_ms_max=300)
    while uploader.upload(frames, owned.tiered, 6) is not None:
        pass
    assert cluster.ranges() == [(0, 3), (3, 5), (5, 6)]


# -- lost answers and failures ------------------------------------------------------------------


@FINALIZE
def test_completion_whose_answer_is_lost_is_settled_by_reading_back(cluster, copies):
    frames = Frames(payloads(50))
    cluster.objects.after = failing("close", times=1)
    found = cluster.uploader(cluster.claim("a"), copies=copies).upload(frames, 0, 50)
    assert cluster.object_bytes(found.object_id) == frames.between(0, 50)
    assert cluster.ranges() == [(0, 50)]


_STEPS = [*(("write", at) for at in (1, 3, 4)), *((x, 1) for x in ("open_writer", "close", "stat"))]
_STEPS = [
    *((kind, at, copies) for kind, at in _STEPS for copies in (False, True)),
    ("copy", 1, True),
]


def test_completion_that_left_something_else_is_an_error(cluster):
    key = cluster.key("data-0-49.dnb1")

    def half(kind, name):
        if kind == "close":
            cluster.objects.store(key, b"half of it")
            raise UnavailableError("no answer")

    cluster.objects.after = half
    with pytest.raises(UnavailableError):
        cluster.uploader(cluster.claim("a")).upload(Frames(payloads(50)), 0, 50)
    assert cluster.ranges() == []


@pytest.mark.parametrize(("kind", "at", "copies"), _STEPS, ids=str)
def test_failure_at_any_step_publishes_nothing_and_the_next_cycle_goes_on(
    cluster, kind, at, copies
):
    frames = Frames(payloads(50))
    owned = cluster.claim("a")
    held = []
    uploader = cluster.uploader(owned, copies=copies, on_memory=held.append)
    cluster.objects.before = failing(kind, at=at, times=1)
    with pytest.raises(UnavailableError):
        uploader.upload(frames, 0, 50)
    assert cluster.ranges() == []
    if kind in ("open_writer", "write"):
        assert cluster.data_keys() == []
    assert sum(held) == 0
    cluster.heal()
    found = uploader.upload(frames, owned.tiered, 50)
    assert cluster.object_bytes(found.object_id) == frames.between(0, 50)
    assert (cluster.ranges(), cluster.data_keys()) == ([(0, 50)], ["data-0-49.dnb1"])


def test_pending_object_that_cannot_be_removed_hurts_nothing(cluster):
    frames = Frames(payloads(50))
    cluster.objects.before = failing("delete", times=1)
    cluster.uploader(cluster.claim("a"), copies=True).upload(frames, 0, 50)
    assert cluster.ranges() == [(0, 50)]
    assert cluster.data_keys() == ["data-0-49.dnb1", format_pending_id(0, 1)]


def test_object_of_another_size_than_was_sent_is_not_published(cluster):
    key = cluster.key("data-0-49.dnb1")

    def cut(kind, name):
        if kind == "close":
            cluster.objects.store(key, cluster.objects.read(key, 0, 100))

    cluster.objects.after = cut
    with pytest.raises(CorruptDataError):
        cluster.uploader(cluster.claim("a")).upload(Frames(payloads(50)), 0, 50)
    assert cluster.ranges() == []


# -- damage -------------------------------------------------------------------------------------


@FINALIZE
@pytest.mark.parametrize("damaged_at", [1, 49])
def test_damage_in_the_middle_uploads_what_lies_before_it(cluster, copies, damaged_at):
    frames = Frames(payloads(50))
    frames.damaged_at = damaged_at
    owned = cluster.claim("a")
    uploader = cluster.uploader(owned, copies=copies)
    found = uploader.upload(frames, 0, 50)
    assert (found.start, found.end) == (0, damaged_at)
    assert cluster.object_bytes(found.object_id) == frames.between(0, damaged_at)
    assert cluster.data_keys() == [found.object_id]
    with pytest.raises(CorruptDataError) as refused:
        uploader.upload(frames, owned.tiered, 50)
    assert refused.value.offset == damaged_at
    assert cluster.ranges() == [(0, damaged_at)]


class DamagedPlan(Frames):
    """A source that meets the damage when it plans already, as one that counts frames does."""

    def plan(self, start, end, *, bytes_max, span_ms_max):
        if start <= self.damaged_at < end:
            raise CorruptDataError("damaged", offset=self.damaged_at)
        return super().plan(start, end, bytes_max=bytes_max, span_ms_max=span_ms_max)


def test_damage_met_while_planning_uploads_what_lies_before_it(cluster):
    frames = DamagedPlan(payloads(50))
    frames.damaged_at = 20
    found = cluster.uploader(cluster.claim("a")).upload(frames, 0, 50)
    assert (found.start, found.end) == (0, 20)
    assert cluster.ranges() == [(0, 20)]


# -- owners -------------------------------------------------------------------------------------


def test_owner_that_was_replaced_writes_no_object(cluster):
    frames = Frames(payloads(50))
    owned = cluster.claim("a")
    cluster.claim("a")
    with pytest.raises(FencedError):
        cluster.uploader(owned).upload(frames, 0, 50)
    assert [kind for kind, _ in cluster.objects.calls if kind == "open_writer"] == []


# -- again --------------------------------------------------------------------------------------


def test_lost_object_is_uploaded_again_in_its_place(cluster):
    frames = Frames(payloads(30))
    cluster.filled(frames, 10, 20, 30)
    owned = cluster.claim("a")
    old, revision = list(cluster.catalog().descriptors())[1]
    cluster.objects.drop(cluster.key(old.object_id))
    new = cluster.uploader(owned).upload_again(frames, old, revision)
    assert (new.start, new.end, new.epoch) == (10, 20, 2)
    assert cluster.catalog().find(15) == new
    assert cluster.object_bytes(new.object_id) == frames.between(10, 20)
    assert cluster.ranges() == [(0, 10), (10, 20), (20, 30)]
    assert owned.tiered == 30


def test_object_replaced_meanwhile_is_left_alone(cluster):
    frames = Frames(payloads(10))
    cluster.filled(frames, 10)
    owned = cluster.claim("a")
    ((old, revision),) = cluster.catalog().descriptors()
    uploader = cluster.uploader(owned)
    assert uploader.upload_again(frames, old, revision) is not None
    assert uploader.upload_again(frames, old, revision) is None


def test_objects_and_bytes_are_counted(cluster):
    frames = Frames(payloads(30))
    cluster.filled(frames, 10, 30)
    found = cluster.metrics.snapshot()
    assert found["uploader.objects_created_total"] == 2
    assert found["uploader.bytes_uploaded_total"] == len(frames.between(0, 30))
    assert found["metadata.descriptor_write_total"] == 2


# -- what is counted ----------------------------------------------------------------------------


def counted(cluster, *names):
    values = cluster.metrics.snapshot()
    return [values[name] for name in names]


def test_upload_that_begins_again_after_an_error_is_resumed(cluster):
    """Sessions are what Danube's designs call them; an object is uploaded from its first byte."""
    frames, events = Frames(payloads(80)), ("session.resume_events", "session.abort_events")
    uploader = cluster.uploader(cluster.claim("a"))
    uploader.upload(frames, 0, 50)
    assert counted(cluster, *events) == [0, 0]
    cluster.objects.before = failing("write", times=1)
    with pytest.raises(UnavailableError):
        uploader.upload(frames, 50, 60)
    assert counted(cluster, *events) == [0, 1]
    uploader.upload(frames, 50, 80)
    assert counted(cluster, *events) == [1, 1]
    uploader.upload(Frames(payloads(90)), 80, 90)
    assert counted(cluster, *events) == [1, 1]


def test_sizes_of_uploads_are_told_as_a_histogram(cluster):
    frames = Frames(payloads(50))
    uploader = cluster.uploader(cluster.claim("a"))
    made = [uploader.upload(frames, 0, 10), uploader.upload(frames, 10, 50)]
    (told,) = counted(cluster, "upload.batch_bytes")
    assert told["count"] == 2
    assert told["max"] == made[1].size_bytes
    assert told["mean"] * 2 == sum(described.size_bytes for described in made)


def test_log_line_of_an_upload_has_its_pieces_and_its_time(cluster, caplog):
    caplog.set_level("INFO", logger="ister.bucket.upload")
    frames = Frames(payloads(500, size=1000))
    cluster.objects.after = lambda kind, key: cluster.clock.advance(0.25 * (kind == "write"))
    found = cluster.uploader(cluster.claim("a")).upload(frames, 0, 500)
    (line,) = (vars(one) for one in caplog.records if one.getMessage() == "uploaded")
    writes = sum(kind == "write" for kind, _ in cluster.objects.calls)
    assert (line["bytes"], line["chunks"]) == (found.size_bytes, writes)
    assert line["chunks"] > 1
    assert line["duration_ms"] == 250 * writes
