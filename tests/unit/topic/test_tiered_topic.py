"""A topic over two tiers: uploads, chained reads, retention, and who may acknowledge."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from ister.base.model import AckLevel, Codec, TopicState
from ister.errors import (
    CapacityError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
    WaitTimeoutError,
)
from ister.format.frame import scan_frames
from ister.format.records import Progress, encode_progress
from ister.topic.bucket_link import RepairedObjects
from tests.support.machine import ROOT, NoThreads, Task, eventually, numbered, payloads, waiting
from tests.support.stores import NAME, TTL_SECONDS

TEXT = str(NAME)
PATH = f"{ROOT}{TEXT}"
ROTATE = {"rotate_max_bytes": 4096, "cache_capacity": 1}
KEEP_NOTHING = {"retention": {"time_minutes": 0, "size_mb": 0}}
DAY_SECONDS = 86_400


def a_topic(site, disk="a", *, ack=None, codec=None, take_over=False, **settings):
    return site.open(disk, **settings).topic(
        TEXT, create=True, ack=ack, codec=codec, take_over=take_over
    )


def fill(topic, count, *, size=0, first=None):
    """Appends numbered messages, a file boundary allowed after each; what they were."""
    start = topic.watermarks.next if first is None else first
    sent = numbered(count, first=start, size=size)
    for payload in sent:
        topic.append(payload)
        topic.flush()
    return sent


def later(site, topic, seconds=60):
    """Lets time pass under a lease that is kept."""
    site.clock.advance(seconds)
    topic.bucket._stores.membership.renew()


def uploaded(site, *, seconds=60, **settings):
    """A topic that the bucket has whole, with local files that may go; what was sent."""
    topic = a_topic(site, **{**ROTATE, **KEEP_NOTHING, **settings})
    sent = fill(topic, 40, size=500)
    topic.upload()
    later(site, topic, seconds)
    return topic, sent


def cold(site, **settings):
    """A topic of which all but the end is in the bucket alone."""
    topic, sent = uploaded(site, seconds=DAY_SECONDS, **settings)
    assert topic.bucket.retention.trim() > 2
    return topic, sent


def silent(*_):
    raise UnavailableError("silent")


# -- uploads ------------------------------------------------------------------------------------


def test_upload_moves_everything_appended_so_far(site):
    topic = a_topic(site)
    topic.append_many(numbered(10))
    tiered = topic.upload()
    assert (tiered.start, tiered.end, len(tiered.objects)) == (0, 10, 1)
    assert tiered.size_bytes == len(site.objects.read(site.key(0), 0, 1 << 20))
    assert site.ranges() == [(0, 10)]
    marks = topic.watermarks
    assert (marks.trimmed, marks.tiered, marks.synced, marks.next) == (0, 10, 10, 10)


def test_upload_of_nothing_is_an_empty_range(site):
    topic = a_topic(site)
    assert (topic.upload().start, topic.upload().end) == (0, 0)
    topic.append(b"x")
    topic.upload()
    again = topic.upload()
    assert (again.start, again.end, again.objects) == (1, 1, ())
    assert site.ranges() == [(0, 1)]


def test_upload_leaves_a_checkpoint_beside_the_files(site):
    topic = a_topic(site)
    fill(topic, 10)
    topic.upload()
    found = topic.wal.directory.load_uploader()
    assert found.last_committed_offset == 9
    assert found.last_object_id == site.catalog().last().object_id
    assert found.last_read_byte_position == len(site.disk()._find(f"{PATH}/wal.log").cache)


def test_checkpoint_that_cannot_be_saved_does_not_fail_the_upload(site):
    topic = a_topic(site)
    fill(topic, 10)

    def fail(kind, path):
        if path.endswith("uploader.ckpt.tmp"):
            raise OSError(28, "full")

    site.disk().before = fail
    assert topic.upload().end == 10


def test_log_without_a_bucket_uploads_nothing(site):
    topic = a_topic(site, storage={"mode": "local_only"})
    with pytest.raises(InvalidRequestError):
        topic.upload()
    with pytest.raises(InvalidRequestError):
        topic.wait(topic.append(b"x"), "tiered")


def test_failed_upload_is_remembered_until_one_succeeds(site):
    topic = a_topic(site)
    offset = topic.append(b"x")
    site.objects.before = silent
    with pytest.raises(UnavailableError):
        topic.upload()
    assert "silent" in str(topic.bucket.uploads.last_error)
    with pytest.raises(WaitTimeoutError) as late:
        topic.wait(offset, "tiered", timeout=0.01)
    assert "silent" in late.value.hint
    site.objects.before = lambda kind, key: None
    topic.upload()
    assert topic.bucket.uploads.last_error is None
    topic.wait(offset, "tiered")


def test_damage_in_a_local_file_uploads_what_lies_before_it(site):
    topic = a_topic(site)
    fill(topic, 50, size=100)
    corrupt_local(site, "wal.log", 20)
    with pytest.raises(CorruptDataError) as refused:
        topic.upload()
    assert refused.value.offset == 20
    assert site.ranges() == [(0, 20)]
    assert topic.watermarks.tiered == 20


# -- waiting ------------------------------------------------------------------------------------


def test_wait_for_tiered_returns_when_the_bucket_has_it(site):
    topic = a_topic(site)
    offset = topic.append(b"x")
    task = Task(topic.wait, offset, "tiered")
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 1)
    assert topic.bucket.uploads.is_wanted
    assert task.is_running
    topic.upload()
    task.result()
    topic.wait(offset, "tiered")


def test_topic_with_ack_tiered_waits_for_the_bucket_and_shows_what_is_there(site):
    topic = a_topic(site, ack="tiered")
    offset = topic.append(b"x")
    topic.flush()
    assert (topic.synced, topic.visible) == (1, 0)
    task = Task(topic.wait, offset)
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 1)
    reader = topic.reader()
    assert list(reader.poll()) == []
    assert task.is_running
    topic.upload()
    task.result()
    assert payloads(reader.poll()) == [b"x"]


def test_reader_of_a_tiered_topic_waits_for_the_upload_and_does_not_cause_it(site):
    topic = a_topic(site, ack="tiered")
    topic.append(b"x")
    topic.flush()
    reading = Task(lambda: payloads(topic.read()))
    following = Task(lambda: payloads(topic.reader().next_batch()))
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 2)
    assert not topic.bucket.uploads.is_wanted
    assert not topic.wal.levels.is_tiered_wanted
    assert reading.is_running
    assert following.is_running
    topic.upload()
    assert reading.result() == following.result() == [b"x"]


def test_bounded_read_of_a_tiered_topic_ends_with_its_timeout(site):
    topic = a_topic(site, ack="tiered")
    topic.append(b"x")
    with pytest.raises(WaitTimeoutError):
        topic.read(timeout=0.01)


def test_tasks_that_read_a_tiered_topic_are_woken_by_the_upload(site):
    topic = a_topic(site, ack="tiered")

    async def follow():
        reader = topic.aio.reader()
        waits = asyncio.ensure_future(reader.next_batch())
        while not waiting(topic, AckLevel.TIERED):
            await asyncio.sleep(0)
        topic.append(b"x")
        await asyncio.to_thread(topic.flush)
        assert not topic.bucket.uploads.is_wanted
        bounded = asyncio.ensure_future(anext(aiter(topic.aio.read())))
        await asyncio.sleep(0)
        assert not waits.done()
        await topic.aio.upload()
        assert payloads(await waits) == [b"x"]
        assert (await bounded).payload == b"x"
        reader.close()

    asyncio.run(follow())


def test_start_by_time_in_a_tiered_topic_is_after_older_messages_that_nobody_sees_yet(site):
    topic = a_topic(site, ack="tiered")
    old = datetime.fromtimestamp(1000, UTC)
    topic.append(b"seen", publish_time=old)
    topic.upload()
    topic.append(b"older", publish_time=old)
    topic.append(b"newer", publish_time=old + timedelta(hours=1))
    assert topic.resolve_start(old + timedelta(minutes=1)) == 2
    assert topic.visible == 1


def test_topic_with_ack_tiered_in_a_log_without_a_bucket_does_not_wait_forever(site):
    log = site.open()
    log.topic(TEXT, create=True, ack="tiered")
    log.close()
    topic = site.open(storage={"mode": "local_only"}).topic(TEXT)
    offset = topic.append(b"x")
    with pytest.raises(InvalidRequestError):
        topic.wait(offset, timeout=0.05)


# -- chained reads ------------------------------------------------------------------------------


def test_read_goes_from_the_bucket_over_the_files_to_the_cache(site):
    topic, sent = cold(site)
    sent += fill(topic, 10, size=500)
    offset = topic.append(b"the last")
    topic.wait(offset)
    sent.append(b"the last")
    marks = topic.watermarks
    assert 0 == topic.earliest < marks.trimmed <= marks.tiered < marks.synced
    assert payloads(topic.read()) == sent
    counted = topic._metrics.snapshot()
    assert counted["reader.history_entered_total"] == 1
    assert counted["reader.handoffs_total"] == 1


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("ranged", [True, False])
def test_read_from_every_offset_is_the_rest(site, read_ahead, ranged):
    reader = {"read_ahead": read_ahead, "enable_ranged_reads": ranged}
    topic, sent = cold(site, storage={"cloud_reader": reader})
    sent += fill(topic, 3)
    for start in range(len(sent)):
        assert payloads(topic.read(start)) == sent[start:]
    for start in (0, 5, topic.watermarks.trimmed - 1):
        for end in (start, start + 1, topic.watermarks.trimmed + 1, len(sent)):
            assert payloads(topic.read(start, end=end)) == sent[start:end]


def test_trim_inside_of_a_readers_own_file_operation_hurts_nothing(site):
    topic, sent = uploaded(site, scheduler=NoThreads())
    for kind, suffix in (("open_read", "wal.log"), ("read", "wal.1.log")):
        reader = topic.reader(topic.watermarks.trimmed)

        def trim(operation, path, kind=kind, suffix=suffix):
            if operation == kind and path.endswith(suffix):
                site.disk().before = lambda kind, path: None
                topic.bucket.retention.trim()

        site.disk().before = trim
        start = reader.next_offset
        got = []
        while start + len(got) < 40:
            got += payloads(reader.next_batch(timeout=1))
        assert got == sent[start:]


def corrupt_local(site, name, number, *, disk="a"):
    """Changes a byte in the body of a frame of a local file."""
    fs = site.disk(disk)
    inode = fs._find(f"{PATH}/{name}")
    starts = scan_frames(bytes(inode.cache), expected_offset=None).starts
    file = fs.open(f"{PATH}/{name}")
    position = starts[number] + 20
    file.write_at(position, [bytes([inode.cache[position] ^ 1])])
    file.sync()
    file.close()


def test_local_damage_is_served_from_the_bucket(site):
    topic = a_topic(site, cache_capacity=1)
    sent = fill(topic, 30, size=100)
    topic.upload()
    sent += fill(topic, 10, size=100)
    corrupt_local(site, "wal.log", 12)
    assert payloads(topic.read()) == sent
    assert payloads(topic.read(12)) == sent[12:]
    assert payloads(topic.read(13)) == sent[13:]


def test_local_damage_that_the_bucket_does_not_have_is_an_error(site):
    topic = a_topic(site, cache_capacity=1)
    sent = fill(topic, 10, size=100)
    topic.upload()
    sent += fill(topic, 10, size=100)
    corrupt_local(site, "wal.log", 15)
    reader = topic.reader(0)
    got = []
    while len(got) < 15:
        got += payloads(reader.next_batch(timeout=1))
    assert got == sent[:15]
    with pytest.raises(CorruptDataError) as refused:
        reader.next_batch(timeout=1)
    assert (refused.value.offset, reader.next_offset) == (15, 15)


def test_silent_bucket_is_an_error_that_leaves_the_reader_where_it_is(site):
    topic, sent = cold(site)
    reader = topic.reader(0)
    site.objects.before = silent
    with pytest.raises(UnavailableError):
        reader.next_batch(timeout=1)
    site.objects.before = lambda kind, key: None
    assert payloads(reader.next_batch(1)) == sent[:1]
    # What is local can be read all the same.
    site.objects.before = silent
    trimmed = topic.watermarks.trimmed
    assert payloads(topic.read(trimmed)) == sent[trimmed:]


@pytest.mark.parametrize("on_damage", ["skip", "error"])
def test_lost_object_is_left_out_where_that_is_wished(site, on_damage):
    topic, sent = cold(site, storage={"cloud_reader": {"on_damage": on_damage}})
    lost = site.catalog().find(5)
    site.objects.drop(site.key(5))
    reader = topic.reader(0, end=len(sent))
    if on_damage == "error":
        with pytest.raises(NotFoundError):
            payloads(reader)
        return
    end = topic.watermarks.trimmed
    assert lost.start < end < lost.end, "the files have the object's last messages"
    assert payloads(reader) == sent[: lost.start] + sent[end:]
    assert reader.damage_left_out == end - lost.start


def test_bucket_without_a_single_object_is_not_left_out(site):
    """Goal: with the wrong bucket, or one that is not mounted, `skip` does not skip everything."""
    topic, _ = cold(site, storage={"cloud_reader": {"on_damage": "skip"}})
    for key in [info.key for info in site.objects.list("")]:
        site.objects.drop(key)
    with pytest.raises(NotFoundError):
        payloads(topic.read())


def test_offset_that_no_tier_keeps_is_out_of_range(site):
    topic, sent = cold(site, storage={"cloud": {"retention": {"time_minutes": 1}}})
    later(site, topic, 3600)
    fill(topic, 1)
    topic.upload()
    assert topic.bucket.retention.expire() == 1
    assert topic.earliest > 0
    with pytest.raises(OffsetOutOfRangeError) as refused:
        topic.reader(0)
    assert refused.value.earliest == topic.earliest
    rest = [*sent, b"40"][topic.earliest :]
    assert payloads(topic.read()) == rest


# -- by time ------------------------------------------------------------------------------------


def test_start_by_time_is_found_in_whichever_tier(site):
    topic = a_topic(site, **ROTATE, **KEEP_NOTHING)
    began = datetime.fromtimestamp(site.clock.now_ns() / 1e9, UTC)
    sent = []
    for number in range(40):
        sent += fill(topic, 1, size=500)
        if number == 29:
            topic.upload()
        later(site, topic, 1)
    later(site, topic)
    topic.bucket.retention.trim()
    assert 0 < topic.watermarks.trimmed <= 30
    for number in (0, 1, 7, topic.watermarks.trimmed - 1, topic.watermarks.trimmed, 30, 39):
        start = began + timedelta(seconds=number)
        assert topic.reader(start).next_offset == number
        just_before = start - timedelta(milliseconds=500)
        assert topic.reader(just_before).next_offset == number
    assert topic.reader(began + timedelta(seconds=1000)).next_offset == 40
    assert topic.reader(began - timedelta(days=1)).next_offset == 0


# -- retention ----------------------------------------------------------------------------------


def test_trim_removes_what_is_in_the_bucket_and_nothing_else(site):
    topic = a_topic(site, **ROTATE, **KEEP_NOTHING)
    sent = fill(topic, 20, size=500)
    later(site, topic)
    assert topic.bucket.retention.trim() == 0
    topic.upload()
    sent += fill(topic, 20, size=500)
    files = len(topic.wal.files)
    later(site, topic)
    assert 0 < topic.bucket.retention.trim() < files - 1
    assert 0 < topic.watermarks.trimmed <= 20
    assert topic.bucket.retention.trim() == 0
    assert payloads(topic.read()) == sent


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_bad_object_is_uploaded_again_before_the_local_copy_goes(site, how):
    topic, sent = uploaded(site)
    if how == "lost":
        site.objects.drop(site.key(0))
    else:
        site.objects.corrupt(site.key(0), 3000)
    assert topic.bucket.retention.trim() > 2
    assert topic._metrics.snapshot()["uploader.objects_repaired_total"] == 1
    assert payloads(topic.read()) == sent
    assert topic.bucket.repair_objects() == RepairedObjects()


def test_size_alone_does_not_notice_a_flipped_bit(site):
    topic, _ = uploaded(site, retention={**KEEP_NOTHING["retention"], "verify": "size"})
    site.objects.corrupt(site.key(0), 3000)
    reads = len(site.objects.reads)
    assert topic.bucket.retention.trim() > 2
    assert len(site.objects.reads) == reads


def cursor(site, name, offset, *, age_seconds=0, incarnation=""):
    keys = site.catalog().keys
    timestamp = site.clock.now_ns() // 1_000_000 - age_seconds * 1000
    progress = Progress(offset=offset, timestamp=timestamp, incarnation=incarnation)
    site.metadata.put(keys.progress(name), encode_progress(progress))


def test_active_subscription_keeps_what_it_has_yet_to_read(site):
    topic, _ = uploaded(site)
    cursor(site, "slow", 5)
    cursor(site, "fast", 40)
    assert topic.bucket.retention.trim() == 0
    cursor(site, "slow", 20)
    assert topic.bucket.retention.trim() > 0
    assert topic.watermarks.trimmed <= 20


@pytest.mark.parametrize(
    "gone", [{"age_seconds": 301}, {"incarnation": "of another life"}], ids=["idle", "another"]
)
def test_subscription_that_is_not_active_keeps_nothing(site, gone):
    topic, _ = uploaded(site)
    cursor(site, "slow", 5, **gone)
    assert topic.bucket.retention.trim() > 2


def test_files_that_an_active_subscription_keeps_are_read_after_their_objects_have_expired(site):
    """Goal: the bucket's time limit takes nothing from a subscription that local files serve."""
    expiring = {"cloud": {"retention": {"time_minutes": 60}}}
    topic = a_topic(site, **ROTATE, **KEEP_NOTHING, storage=expiring)
    sent = []
    for _ in range(4):
        sent += fill(topic, 10, size=500)
        topic.upload()
    later(site, topic, 3601)
    cursor(site, "slow", 0)
    assert topic.bucket.retention.expire() == 3
    assert site.ranges() == [(30, 40)]
    assert topic.bucket.retention.trim() == 0
    assert topic.earliest == 0
    assert payloads(topic.read()) == sent
    cursor(site, "slow", 20)
    assert topic.bucket.retention.trim() > 0
    assert 0 < topic.watermarks.trimmed <= 20
    assert payloads(topic.read()) == sent[topic.earliest :]
    # Its grace is over: what is left is the bucket's.
    later(site, topic, 301)
    assert topic.bucket.retention.trim() > 0
    assert topic.watermarks.trimmed > 20
    assert topic.earliest == 30
    assert payloads(topic.read()) == sent[30:]


# -- lag ----------------------------------------------------------------------------------------

LAG = {"uploader": {"max_lag_bytes": 5000}}


def test_producers_wait_while_too_much_waits_for_its_upload(site):
    topic = a_topic(site, storage=LAG)
    sent = fill(topic, 10, size=600)
    assert topic.bucket.uploads.lag_bytes > 5000
    topic.bucket.uploads.apply_pressure()
    task = Task(topic.append, b"10")
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    assert topic.bucket.uploads.is_wanted
    topic.bucket.uploads.upload()
    assert topic.bucket.uploads.lag_bytes == 0
    assert task.result() == 10
    topic.flush()
    assert payloads(topic.read()) == [*sent, b"10"]


def test_producers_are_refused_where_that_is_the_policy(site):
    topic = a_topic(site, storage=LAG, buffer_full="refuse")
    fill(topic, 10, size=600)
    site.objects.before = silent
    with pytest.raises(UnavailableError):
        topic.upload()
    with pytest.raises(CapacityError, match="silent") as refused:
        topic.append(b"x")
    assert "max_lag_bytes" in refused.value.hint
    site.objects.before = lambda kind, key: None
    topic.bucket.uploads.upload()
    assert topic.append(b"x") == 10


# -- leases and fencing -------------------------------------------------------------------------


def test_wait_after_the_lease_has_lapsed_is_not_acknowledged(site):
    topic = a_topic(site)
    offset = topic.append(b"x")
    site.clock.advance(TTL_SECONDS + 1)
    topic.wait(offset, "memory")  # promises nothing
    with pytest.raises(UnavailableError):
        topic.wait(offset, "synced")
    with pytest.raises(UnavailableError):
        asyncio.run(topic.aio.wait(offset, "synced"))
    assert topic.watermarks.synced == 1
    topic.bucket._stores.membership.renew()
    topic.wait(offset, "synced")


def taken_over(site):
    """A topic, and the log on another machine that has taken it while this one slept."""
    topic = a_topic(site)
    fill(topic, 10)
    topic.upload()
    fill(topic, 5)
    site.clock.advance(TTL_SECONDS + 1)
    other = a_topic(site, "b", take_over=True)
    return topic, other


def test_owner_that_was_replaced_acknowledges_and_uploads_nothing(site):
    topic, other = taken_over(site)
    assert other.append(b"theirs") == 10
    other.flush()
    with pytest.raises(UnavailableError):
        topic.wait(12, "synced")
    topic.bucket._stores.membership.renew()
    with pytest.raises(FencedError):
        topic.wait(12, "synced")
    with pytest.raises(FencedError):
        topic.append(b"mine")
    with pytest.raises(FencedError):
        topic.upload()
    other.upload()
    assert site.ranges() == [(0, 10), (10, 11)]
    assert payloads(other.read()) == [*numbered(10), b"theirs"]


def test_wait_for_tiered_ends_when_the_owner_was_replaced(site):
    topic, _ = taken_over(site)
    task = Task(topic.wait, 12, "tiered")
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 1)
    with pytest.raises(FencedError):
        topic.upload()
    task.join(2)
    assert not task.is_running, "waits for an upload that cannot come"
    assert isinstance(task.error(), FencedError)


def test_held_append_ends_when_the_owner_was_replaced(site):
    topic = a_topic(site, storage=LAG)
    fill(topic, 10, size=600)
    topic.bucket.uploads.apply_pressure()
    task = Task(topic.append, b"x")
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    site.clock.advance(TTL_SECONDS + 1)
    a_topic(site, "b", take_over=True)
    with pytest.raises(FencedError):
        topic.bucket.uploads.upload()
    task.join(2)
    is_held = task.is_running
    topic.close()
    assert not is_held, "waits for an upload that cannot come"
    assert isinstance(task.error(), FencedError)


# -- opening again ------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 5])
def test_checkpoint_without_files_goes_on_where_the_catalog_ends_if_that_is_the_end(site, more):
    log = site.open()
    topic = log.topic(TEXT, create=True)
    sent = fill(topic, 10)
    topic.upload()
    fill(topic, more)
    log.close()
    fs = site.disk()
    for name in fs.list_directory(PATH):
        if name != "wal.ckpt":
            fs.remove(f"{PATH}/{name}")
    fs.sync_directory(PATH)
    topic = site.open().topic(TEXT)
    if more:
        assert topic.state is TopicState.QUARANTINED
        with pytest.raises(CorruptDataError):
            topic.append(b"x")
    else:
        assert (topic.state, topic.watermarks.next, topic.earliest) == (TopicState.OPEN, 10, 0)
        assert topic.append(b"10") == 10
        topic.flush()
    assert payloads(topic.read(0, end=10)) == sent


def test_log_made_without_a_bucket_is_adopted(site):
    log = site.open(storage={"mode": "local_only"}, **ROTATE)
    topic = log.topic(TEXT, create=True, ack="written", codec="bincode1")
    sent = fill(topic, 20, size=500)
    log.close()
    log = site.open(**ROTATE)
    assert log.topics() == [TEXT]
    topic = log.topic(TEXT)
    assert (topic.ack, topic.codec) == (AckLevel.WRITTEN, Codec.BINCODE1)
    topic.upload()
    assert site.ranges()[0][0] == 0
    assert site.ranges()[-1][1] == 20
    assert payloads(topic.read()) == sent


# -- deletion -----------------------------------------------------------------------------------


def test_topic_that_does_not_exist_is_not_deleted(site):
    with pytest.raises(NotFoundError):
        site.open().delete(TEXT)


# -- the whole ----------------------------------------------------------------------------------


def test_time_is_found_in_the_bucket_where_a_local_frame_is_damaged(site):
    log = site.open(cache_capacity=10)
    topic = log.topic(TEXT, create=True)
    for number in range(2000):
        topic.append(b"x" * 300, publish_time=1000 + number)
    topic.upload()
    log.close()
    topic = site.open(cache_capacity=10).topic(TEXT)
    corrupt_local(site, "wal.log", 3)
    assert topic.reader(datetime.fromtimestamp(1.01, UTC)).next_offset == 10
    assert topic.reader(datetime.fromtimestamp(2.99, UTC)).next_offset == 1990
