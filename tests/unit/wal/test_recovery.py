"""Opening after anything: what is cut, what is damage, what a hint may get wrong."""

import errno
import itertools
import random
from contextlib import suppress
from operator import methodcaller

import pytest

from ister.base.model import Codec, TopicState
from ister.errors import CorruptDataError, DiskError, IsterError, UnsupportedVersionError
from ister.format.checkpoint import decode_wal_checkpoint
from ister.wal import index
from tests.support.builders import with_valid_crc
from tests.support.cases import each
from tests.support.machine import NAME, ROOT, Calls, Machine, numbered, payloads
from tests.support.memory_fs import SimulatedCrash

PATH = f"{ROOT}{NAME}"
CHECKPOINT = f"{PATH}/wal.ckpt"
ROTATE = {"rotate_max_bytes": 4096}


def _closed_log(machine, count=30, *, size=500, ack=None, **settings):
    """A log of `count` messages, closed in order."""
    topic = machine.topic(ack=ack, **settings)
    for payload in numbered(count, size=size):
        topic.append(payload)
        topic.flush()
    machine._logs[-1].close()
    machine._logs.clear()
    return numbered(count, size=size)


# -- torn tails ---------------------------------------------------------------------------------


def _half_frame(frame):
    return frame[: len(frame) // 2]


def _with_bad_crc(frame):
    return frame[:-1] + bytes([frame[-1] ^ 1])


_TAILS = {
    "half a header": lambda frame: frame[:7],
    "half a frame": _half_frame,
    "all but a byte": lambda frame: frame[:-1],
    "zeros": lambda frame: bytes(len(frame)),
    "zeros of a page": lambda frame: bytes(4096),
    "a bad crc": _with_bad_crc,
    "a bad crc, then a good frame": lambda frame: _with_bad_crc(frame) + frame,
    "garbage": lambda frame: random.Random(1).randbytes(300),
    "an older frame again": lambda frame: frame,
    "a length bomb": lambda frame: (30).to_bytes(8, "little") + b"\xff" * 8,
}


@pytest.mark.parametrize("tail", _TAILS.values(), ids=_TAILS)
def test_torn_tail_is_cut_and_the_cut_synced_before_appends(machine, tail):
    sent = _closed_log(machine)
    path = f"{PATH}/wal.log"
    data = machine.read(path)
    start = machine.frame_starts(path)[-1]
    torn = tail(data[start:])
    machine.overwrite(path, len(data), torn)
    machine.fs.before = calls = Calls()
    topic = machine.reopened()
    order = [kind for kind, where, _ in calls.seen if where == path]
    assert order.index("truncate") < order.index("sync")
    assert topic.state is TopicState.OPEN
    assert machine.read(path) == data
    assert topic.wal._metrics.snapshot()["wal.recovery_cut_bytes"] == len(torn)
    assert topic.append(b"new") == 30
    topic.flush()
    machine.cut_power(seed=4)
    assert payloads(machine.reopened().read()) == [*sent, b"new"]


# -- damage -------------------------------------------------------------------------------------


def _damage_at(machine, path, frame_number, change):
    start = machine.frame_starts(path)[frame_number]
    data = machine.read(path)
    machine.overwrite(path, start, change(data[start : start + 16]))
    return start


_CHANGES = {
    "another offset": lambda header: bytes([header[0] ^ 1]) + header[1:],
    "another length": lambda header: header[:8] + b"\xff\xff\xff\xff" + header[12:],
    "another crc": lambda header: header[:12] + bytes([header[12] ^ 1]) + header[13:],
    "zeros": lambda header: bytes(16),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_damage_below_the_watermark_quarantines_the_topic_alone(machine, change):
    """Goal: durable bytes that are bad are never cut; the topic is read-only, others go on."""
    sent = _closed_log(machine)
    path = f"{PATH}/wal.log"
    position = _damage_at(machine, path, 20, change)
    before = machine.read(path)
    log = machine.open()
    topic = log.topic(NAME)
    assert topic.state is TopicState.QUARANTINED
    for append in (lambda: topic.append(b"new"), lambda: topic.append_many([b"new"])):
        with pytest.raises(CorruptDataError) as refused:
            append()
        error = refused.value
        assert (error.path, error.position, error.offset) == (path, position, 20)
        assert (error.topic, error.code) == (NAME, "DATA_LOSS")
    assert topic.watermarks.next == 30
    reader = topic.reader()
    got = []
    with pytest.raises(CorruptDataError) as met:
        got.extend(message.payload for message in reader)
    assert got == sent[:20]
    assert (met.value.path, met.value.position, met.value.offset) == (path, position, 20)
    assert reader.next_offset == 20
    other = log.topic("/default/other", create=True)
    other.wait(other.append(b"fine"))
    log.close()
    assert machine.read(path) == before


@pytest.mark.parametrize("size_left", [0, 700], ids=["empty", "cut"])
def test_last_file_shorter_than_the_watermark_is_damage(machine, size_left):
    _closed_log(machine)
    machine.truncate(f"{PATH}/wal.log", size_left)
    topic = machine.reopened()
    assert topic.state is TopicState.QUARANTINED
    assert topic.watermarks.next == 30
    with pytest.raises(CorruptDataError):
        topic.append(b"new")


@pytest.mark.parametrize("missing", [0, 2, -1, None], ids=["first", "middle", "last", "all"])
def test_missing_file_is_damage_and_the_others_stay_readable(machine, missing):
    """Goal: a hole is never skipped in silence, and what is whole on both sides is readable."""
    sent = _closed_log(machine, **ROTATE)
    log = machine.open(**ROTATE)
    files = log.topic(NAME).wal.files
    log.close()
    machine._logs.clear()
    assert len(files) > 3
    if missing is None:
        for file in files[:-1]:
            machine.remove(f"{PATH}/wal.{file.seq}.log" if file.seq else f"{PATH}/wal.log")
    gone = files[-1 if missing is None else missing]
    at = files.index(gone)
    end = files[at + 1].first_offset if gone is not files[-1] else 30
    machine.remove(f"{PATH}/wal.{gone.seq}.log" if gone.seq else f"{PATH}/wal.log")
    topic = machine.reopened(**ROTATE)
    assert topic.state is TopicState.QUARANTINED
    assert topic.watermarks.next == 30
    with pytest.raises(CorruptDataError):
        topic.append(b"new")
    if at and missing is not None:
        assert payloads(topic.reader(end=gone.first_offset)) == sent[: gone.first_offset]
        with pytest.raises(CorruptDataError):
            topic.reader(gone.first_offset).next_batch(timeout=1)
    if end < 30:
        assert payloads(topic.reader(end, end=30)) == sent[end:]


def test_files_out_of_order_are_damage_without_a_checkpoint_too(machine):
    """Goal: files that were renamed by hand do not make a log that goes on in its middle."""
    _closed_log(machine, **ROTATE)
    first, second = machine.read(f"{PATH}/wal.log"), machine.read(f"{PATH}/wal.1.log")
    for name in [name for name in machine.fs.list_directory(PATH) if name != "wal.origin"]:
        machine.remove(f"{PATH}/{name}")
    machine.create(f"{PATH}/wal.log", second)
    machine.create(f"{PATH}/wal.1.log", first)
    topic = machine.reopened(**ROTATE)
    assert topic.state is TopicState.QUARANTINED
    assert "the one before it at" in topic.damage[0].reason


# -- hints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [None, b"", b"ISTR", b"\0" * 200, bytes(range(256))],
    ids=["missing", "empty", "cut", "zeros", "garbage"],
)
@pytest.mark.parametrize("settings", [{}, ROTATE], ids=["one file", "rotated"])
def test_checkpoint_that_is_no_help_costs_no_data(machine, content, settings):
    sent = _closed_log(machine, **settings)
    if content is None:
        machine.remove(CHECKPOINT)
    else:
        machine.truncate(CHECKPOINT, 0)
        machine.overwrite(CHECKPOINT, 0, content)
    topic = machine.reopened(**settings)
    assert topic.state is TopicState.OPEN
    assert payloads(topic.read()) == sent
    assert topic.append(b"new") == 30
    topic.flush()
    machine.cut_power(seed=6)
    assert payloads(machine.reopened(**settings).read()) == [*sent, b"new"]


def test_tail_without_a_checkpoint_to_judge_it_is_set_aside(machine):
    sent = _closed_log(machine)
    path = f"{PATH}/wal.log"
    position = _damage_at(machine, path, 25, _CHANGES["zeros"])
    tail = machine.read(path)[position:]
    machine.remove(CHECKPOINT)
    topic = machine.reopened()
    assert payloads(topic.read()) == sent[:25]
    machine.cut_power(seed=1)
    assert machine.read(f"{path}.cut-{position}") == tail


def test_older_checkpoint_hides_nothing(machine):
    topic = machine.topic(**ROTATE)
    topic.flush()
    old = machine.read(CHECKPOINT)
    for payload in numbered(30, size=500):
        topic.wait(topic.append(payload))
    machine.kill()
    machine.truncate(CHECKPOINT, 0)
    machine.overwrite(CHECKPOINT, 0, old)
    topic = machine.reopened(**ROTATE)
    assert topic.state is TopicState.OPEN
    assert payloads(topic.read()) == numbered(30, size=500)


def test_checkpoint_of_a_newer_version_is_refused_and_left_alone(machine):
    _closed_log(machine)
    data = machine.read(CHECKPOINT)
    newer = _with_newer_version(data)
    machine.overwrite(CHECKPOINT, 0, newer)
    log = machine.open()
    with pytest.raises(UnsupportedVersionError):
        log.topic(NAME)
    assert machine.read(CHECKPOINT) == newer
    other = log.topic("/default/other", create=True)
    other.wait(other.append(b"fine"))


def _with_newer_version(data: bytes) -> bytes:
    """The first change of one byte of the head that reads as another version."""
    for at in range(12):
        changed = with_valid_crc(data[:at] + b"\x63" + data[at + 1 : -4])
        try:
            decode_wal_checkpoint(changed)
        except UnsupportedVersionError:
            return changed
    raise AssertionError("no byte of the head is the version")


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64], ids=["missing", "empty", "garbage"])
def test_index_that_is_no_help_is_built_again(machine, content):
    """Goal: an index is a hint: without it reads from any offset are right, only slower."""
    sent = _closed_log(machine, 60, size=20_000, rotate_max_bytes=600_000)
    indexes = [n for n in machine.fs.list_directory(PATH) if n.endswith(".idx")]
    assert indexes
    for name in indexes:
        machine.remove(f"{PATH}/{name}")
        if content is not None:
            machine.create(f"{PATH}/{name}", content)
    topic = machine.reopened(rotate_max_bytes=600_000)
    for offset in (0, 1, 29, 30, 45, 59):
        assert payloads(topic.reader(offset, end=offset + 1)) == [sent[offset]]
    assert payloads(topic.read()) == sent
    assert machine.read(f"{PATH}/wal.idx") not in (b"", content)


@pytest.mark.parametrize("codec", list(Codec))
def test_codec_is_recognised_without_a_checkpoint(machine, codec):
    _closed_log(machine, storage={"codec": codec})
    machine.remove(CHECKPOINT)
    other = next(c for c in Codec if c is not codec)
    topic = machine.reopened(storage={"codec": other})
    assert topic.codec is codec
    assert payloads(topic.read()) == numbered(30, size=500)


# -- failed syncs -------------------------------------------------------------------------------


def _failing(*kinds, suffix=".log", times=1):
    """Fails the first so many operations of these kinds."""
    left = [times]

    def fail(kind, path):
        if kind in kinds and path.endswith(suffix) and left[0]:
            left[0] -= 1
            return OSError(errno.EIO, "broken")
        return None

    return Calls(fail=fail)


@pytest.mark.parametrize("is_closed_first", [False, True], ids=["reopened", "closed, reopened"])
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("seed", range(6))
def test_failed_sync_then_reopen_loses_nothing_acknowledged(
    machine, is_closed_first, is_recorded, seed
):
    """Goal: bytes that a failed sync left in the page cache are not taken for durable."""
    log = machine.open()
    topic = log.topic(NAME, create=True)
    topic.wait(topic.append(b"one"))
    poison = [] if is_recorded else [OSError(errno.EIO, "broken")]

    def fail(kind, path):
        if kind == "sync" and path.endswith("wal.log") and not fail.is_done:
            fail.is_done = True
            return OSError(errno.EIO, "broken")
        return poison.pop() if poison and fail.is_done and path.endswith(".tmp") else None

    fail.is_done = False
    machine.fs.before = Calls(fail=fail)
    offset = topic.append(b"two" * 400)
    with pytest.raises(DiskError):
        topic.wait(offset)
    if is_closed_first:
        topic.close()
    reopened = log.topic(NAME)
    assert reopened is not topic
    assert reopened.wal.files[-1].seq == 1
    last = reopened.append(b"three")
    reopened.wait(last)
    kept = payloads(reopened.read())
    assert kept[0] == b"one"
    assert kept[-1] == b"three"
    machine.cut_power(seed)
    again = machine.reopened()
    assert again.state is TopicState.OPEN
    assert payloads(again.read()) == kept


def test_sync_that_fails_inside_of_recovery_is_reported_and_not_trusted_later(machine):
    topic = machine.topic(ack="written")
    topic.wait(topic.append(b"one"))
    machine.kill()
    machine.fs.before = _failing("sync")
    log = machine.open()
    with pytest.raises(DiskError):
        log.topic(NAME)
    topic = log.topic(NAME)
    topic.wait(topic.append(b"two"), "synced")
    kept = payloads(topic.read())
    machine.cut_power(seed=1)
    assert payloads(machine.reopened().read()) == kept
    assert kept == [b"one", b"two"]


# -- crashes inside of recovery -----------------------------------------------------------------


def _torn(machine):
    _closed_log(machine, 6)
    machine.overwrite(f"{PATH}/wal.log", len(machine.read(f"{PATH}/wal.log")), b"torn" * 20)
    return numbered(6, size=500)


def _torn_without_checkpoint(machine):
    sent = _torn(machine)
    machine.remove(CHECKPOINT)
    return sent


def _written_only(machine):
    topic = machine.topic(ack="written")
    for payload in numbered(6, size=500):
        topic.wait(topic.append(payload))
    machine.kill()
    return numbered(6, size=500)


def _poisoned(machine):
    topic = machine.topic(ack="written")
    for payload in numbered(3, size=500):
        topic.wait(topic.append(payload), "synced")
    for payload in numbered(3, first=3, size=500):
        topic.wait(topic.append(payload), "written")
    machine.fs.before = _failing("sync", suffix="wal.log")
    with pytest.raises(DiskError):
        topic.flush()
    machine.kill()
    return numbered(6, size=500)


def _recovered_after_crash(prepare, at, end_life):
    """Recovers once, crashing at operation number `at`, and then again; whether it came so far."""
    with Machine() as machine:
        sent = prepare(machine)
        left = itertools.count(at, -1)

        def crash(kind, path):
            if next(left) == 1:
                raise SimulatedCrash

        machine.fs.before = crash
        with suppress(SimulatedCrash):
            machine.reopened(**ROTATE)
        is_over = next(left) > 0
        end_life(machine)
        topic = machine.reopened(**ROTATE)
        assert topic.state is TopicState.OPEN, at
        assert payloads(topic.read()) == sent, at
        topic.wait(topic.append(b"new"), "synced")
        machine.cut_power(at)
        assert payloads(machine.reopened(**ROTATE).read()) == [*sent, b"new"], at
        return not is_over


def _empty_last_file(machine):
    sent = _closed_log(machine, 6, **ROTATE)
    machine.create(f"{PATH}/wal.1.log")
    return sent


@each("prepare", [_torn, _torn_without_checkpoint, _written_only, _empty_last_file, _poisoned])
def test_crash_at_any_point_of_recovery_changes_nothing(prepare):
    """Goal: recovery ends the same however often it was killed on the way, or the power cut."""
    ends = [Machine.kill]
    if prepare in (_torn, _torn_without_checkpoint):  # all of their frames are durable
        ends += [methodcaller("cut_power", seed) for seed in range(3)]
    for end_life in ends:
        at = 1
        while _recovered_after_crash(prepare, at, end_life):
            at += 1
        assert at > 10


def test_last_file_with_a_bad_first_frame_and_no_checkpoint_is_set_aside(machine):
    _closed_log(machine, 12, **ROTATE)
    path = f"{PATH}/wal.1.log"
    _damage_at(machine, path, 0, _CHANGES["another crc"])
    tail = machine.read(path)
    machine.remove(CHECKPOINT)
    topic = machine.reopened(**ROTATE)
    assert payloads(topic.read()) == numbered(8, size=500)
    names = machine.fs.list_directory(PATH)
    kept = [machine.read(f"{PATH}/{name}") for name in names if name.startswith("wal.1.log")]
    assert tail in kept


def test_topic_that_cannot_be_opened_concerns_no_other(machine):
    _closed_log(machine, 2)
    log = machine.open()
    machine.fs.before = Calls(
        fail=lambda kind, path: OSError(errno.EIO, "bad") if path.startswith(PATH) else None
    )
    with pytest.raises(IsterError):
        log.topic(NAME)
    other = log.topic("/other/fine", create=True)
    other.wait(other.append(b"fine"))
    machine.fs.before = Calls()
    assert payloads(log.topic(NAME).read()) == numbered(2, size=500)


@pytest.mark.parametrize("has_index", [True, False])
def test_messages_behind_damage_can_be_read_by_starting_there(machine, has_index, monkeypatch):
    """Whatever lies on the way: the frame asked for is found behind a damaged one."""
    monkeypatch.setattr(index, "INDEX_STRIDE_BYTES", 4096)
    sent = _closed_log(machine, 30)
    path = f"{PATH}/wal.log"
    at = machine.read(path).find(sent[10])
    machine.overwrite(path, at, b"\xff\xff\xff")
    if not has_index:
        machine.remove(f"{PATH}/wal.idx")
    topic = machine.reopened()
    assert payloads(topic.read(0, end=10)) == sent[:10]
    with pytest.raises(CorruptDataError) as damaged:
        list(topic.read(10))
    assert damaged.value.offset == 10
    for start in (11, 12, 29):
        assert payloads(topic.read(start)) == sent[start:]
    reader = topic.reader(10)
    with pytest.raises(CorruptDataError):
        reader.next_batch(timeout=1)
    reader.seek(11)
    assert payloads(reader.next_batch(timeout=1)) == sent[11:]
