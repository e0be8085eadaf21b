"""A topic's files read by somebody who does not own it, while the owner goes on."""

import errno
import logging
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import ister
from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.errors import (
    CorruptDataError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import decode_message
from ister.fs.local import LocalFileSystem
from ister.topic.local_tail import LocalTail
from ister.topic.node import NODE_NAME
from ister.wal.directory import WalDirectory
from ister.wal.reader import WalReader
from tests.support.clock import ManualClock
from tests.support.machine import Task, fill, numbered, payloads
from tests.support.scale import first_seed, scaled
from tests.support.stores import NAME, Site

TEXT = str(NAME)
CHUNK = 1 << 16
SECONDS = scaled(1.5, 15.0)


class Place:
    """A data directory on a real disk."""

    def __init__(self, path: Path):
        self.path = path
        self.wal = path / "wal"
        self.log = None
        self.topic = None

    def open(self, **wal):
        self.log = ister.open(
            {
                "storage": {
                    "wal": {"dir": str(self.wal), **wal},
                    "cloud": {"root": str(self.path / "objects")},
                    "metadata": {"path": str(self.path / "metadata.db")},
                    "uploader": {"engine": "none"},
                }
            }
        )
        return self.make()

    def make(self, **settings):
        self.topic = self.log.topic(TEXT, create=True, **settings)
        return self.topic

    def make_again(self, **settings):
        """Another topic of the same name."""
        self.log.delete(TEXT)
        return self.make(**settings)

    @property
    def directory(self):
        return self.wal / NAME.namespace / NAME.topic

    @property
    def node(self):
        return (self.wal / NODE_NAME).read_text().strip()

    @property
    def incarnation(self):
        """Of the topic that was opened last."""
        return self.topic.bucket.owned.record.incarnation

    def tail(self, *, node=None, name=NAME, incarnation=None, clock=None):
        return LocalTail.find(
            str(self.wal),
            name,
            self.node if node is None else node,
            self.incarnation if incarnation is None else incarnation,
            clock=clock or SystemClock(),
            metrics=Metrics(),
        )


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    if place.log is not None:
        place.log.close()


def decoded(batches):
    """(offset, payload) of every frame; offsets follow each other."""
    found = []
    for batch in batches:
        ends = [*batch.starts[1:], batch.end]
        assert not found or batch.first_offset == found[-1][0] + 1
        for offset, (head, tail) in enumerate(
            zip(batch.starts, ends, strict=True), batch.first_offset
        ):
            message = decode_message(batch.chunk[head + FRAME_HEADER_SIZE : tail], batch.codec)
            assert message.msg_id.topic_offset == offset
            found.append((offset, message.payload))
    return found


def read(tail, start=0, end=1 << 60, *, chunk_bytes=CHUNK):
    return decoded(tail.frames(start, end, chunk_bytes=chunk_bytes))


def expected(start, end, *, size=200):
    return list(enumerate(numbered(end - start, first=start, size=size), start))


def warnings_of(caplog):
    return [
        record
        for record in caplog.records
        if record.name == "ister.topic.local_tail" and record.levelno >= logging.WARNING
    ]


# -- whose files --------------------------------------------------------------------------------


def test_directory_of_a_node_that_was_replaced_is_not_used():
    """Goal: messages that were given up are never read in the place of those that count."""
    with Site() as site:
        old = site.open("a").topic(TEXT, create=True)
        old.append_many(numbered(5))
        old.upload()
        old.append_many([b"given up"] * 5)
        old.flush()
        old.wal.save_checkpoint()
        site.clock.advance(100)
        new = site.open("b").topic(TEXT, take_over=True)
        new.append_many([b"counts"] * 5)
        new.flush()
        new.wal.save_checkpoint()
        record = site.catalog().record()[0]

        def tail(disk):
            return LocalTail.find(
                "/data",
                NAME,
                record.node,
                record.incarnation,
                clock=site.clock,
                metrics=Metrics(),
                fs=site.disk(disk),
            )

        assert tail("a") is None
        assert [payload for _, payload in read(tail("b"), 5)] == [b"counts"] * 5


@pytest.mark.parametrize("content", [None, "", "\n", "garbage", "\xff\xfe"])
def test_directory_without_a_nodes_name_is_not_used(place, content):
    topic = place.open()
    node = place.node
    fill(topic, 3, size=200)
    topic.wal.save_checkpoint()
    (place.wal / NODE_NAME).unlink()
    if content is not None:
        (place.wal / NODE_NAME).write_text(content)
    assert place.tail(node=node) is None
    # A topic whose metadata was rebuilt names nobody, and nobody's files are its own.
    assert place.tail(node="") is None


def test_no_directory_no_tail(place, tmp_path, caplog):
    clock, metrics = SystemClock(), Metrics()
    assert LocalTail.find(None, NAME, "x", "y", clock=clock, metrics=metrics) is None
    missing = str(tmp_path / "nowhere")
    assert LocalTail.find(missing, NAME, "x", "y", clock=clock, metrics=metrics) is None
    assert not Path(missing).exists()
    place.open()
    other = TopicName(namespace="default", topic="other")
    assert place.tail(name=other) is None
    assert not (place.wal / "default" / "other").exists()
    assert place.tail(node="0123456789abcdef") is None
    assert not warnings_of(caplog)


def test_topic_that_was_handed_over_has_no_tail_here(place):
    topic = place.open()
    fill(topic, 3, size=200)
    place.log.seal(TEXT)
    assert place.tail() is None


# -- which topic of the name --------------------------------------------------------------------


def test_files_of_another_topic_of_the_same_name_are_not_read(place):
    """Goal: messages of a topic that was deleted and made again are not given under its name."""
    topic = place.open()
    old = place.incarnation
    fill(topic, 5, size=200)
    topic = place.make_again()
    topic.append_many([b"of the new one"] * 5)
    topic.flush()
    topic.wal.save_checkpoint()
    assert place.incarnation != old
    for tail in (place.tail(incarnation=old), place.tail(incarnation="0123456789abcdef")):
        assert tail.snapshot() is None
        assert tail.mark() is None
        assert tail.catch_up((0, 10)) is None
        assert read(tail) == []
        assert tail.find_time(0, 0, 5) is None
    assert [payload for _, payload in read(place.tail())] == [b"of the new one"] * 5


def test_checkpoint_that_does_not_say_which_topic_it_is_of_is_accepted(place):
    """An older Ister wrote it."""
    topic = place.open()
    fill(topic, 5, size=200)
    place.log.close()
    directory = WalDirectory(LocalFileSystem(), str(place.directory))
    directory.save_state(replace(directory.load_state(), incarnation=""))
    tail = place.tail()
    assert tail.snapshot().incarnation == ""
    assert read(tail) == expected(0, 5)
    topic = place.open()
    topic.wal.save_checkpoint()
    assert place.tail().snapshot().incarnation == place.incarnation != ""
    assert read(place.tail()) == expected(0, 5)


@pytest.mark.parametrize(
    ("count", "size"),
    [(0, 0), (3, 200), (200, 280), (200, 100)],
    ids=["nothing", "less", "longer messages", "shorter messages"],
)
@pytest.mark.parametrize("moment", ["before a fetch", "in a fetch", "after a fetch"])
def test_reading_ends_where_another_topic_takes_the_name(place, monkeypatch, count, size, moment):
    """Goal: at whichever moment it does, nothing of it is given as the first one's, and files that
    begin elsewhere are not taken for damaged ones.
    """
    topic = place.open(rotate_max_bytes=4096)
    fill(topic, 100, size=200)
    topic.wal.save_checkpoint()
    tail = place.tail()

    def take():
        fill(place.make_again(), count, size=size)
        place.topic.wal.save_checkpoint()

    frames = tail.frames(0, 100, chunk_bytes=CHUNK)
    found = [next(frames)]
    fetch, calls = WalReader.fetch, []

    def fetch_and_take(self, *args, **named):
        calls.append(args)
        if len(calls) == 1 and moment == "in a fetch":
            self.close()
            take()
        batch = fetch(self, *args, **named)
        if len(calls) == 1 and moment == "after a fetch":
            take()
        return batch

    if moment == "before a fetch":
        take()
    else:
        monkeypatch.setattr(WalReader, "fetch", fetch_and_take)
    found += frames
    assert decoded(found) == expected(0, found[-1].next_offset)
    assert len(decoded(found)) < 100
    assert tail.snapshot() is None


# -- files that may not be read -----------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP])
@pytest.mark.parametrize("what", ["node", "directory"])
def test_files_that_may_not_be_read_are_passed_over(place, monkeypatch, caplog, what, error):
    """Goal: whoever has no right to the files reads elsewhere, and it is said why."""
    topic = place.open()
    fill(topic, 3, size=200)
    place.log.close()
    node = place.node
    name, refused = {
        "node": ("open", str(place.wal / NODE_NAME)),
        "directory": ("listdir", str(place.directory)),
    }[what]
    real = getattr(os, name)

    def refuse(path, *more, **named):
        if os.fspath(path) == refused:
            raise OSError(error, os.strerror(error), path)
        return real(path, *more, **named)

    monkeypatch.setattr(os, name, refuse)
    assert place.tail(node=node) is None
    (said,) = warnings_of(caplog)
    assert said.path == str(place.directory)
    assert os.strerror(error) in said.error
    monkeypatch.undo()
    assert read(place.tail(node=node)) == expected(0, 3)


# -- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_files_without_a_whole_checkpoint_are_not_taken_for_an_empty_topic(place, damage):
    topic = place.open()
    fill(topic, 5, size=200)
    place.log.close()
    path = place.directory / "wal.ckpt"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"x" + path.read_bytes()[1:])
    tail = place.tail(clock=ManualClock())
    for call in (
        tail.snapshot,
        tail.mark,
        lambda: tail.catch_up((7, 7)),
        lambda: read(tail),
        lambda: tail.find_time(0, 0, 100),
    ):
        with pytest.raises(UnavailableError, match="checkpoint") as caught:
            call()
        assert caught.value.path == str(path)
    topic = place.open()
    assert place.tail().catch_up(None).synced == 5
    assert read(place.tail()) == expected(0, 5)


def test_directory_without_files_and_checkpoint_has_nothing_yet(place):
    """A topic that was just made, before its first checkpoint."""
    place.open()
    place.log.close()
    for path in place.directory.iterdir():
        if path.name == "wal.ckpt" or path.suffix == ".log":
            path.unlink()
    tail = place.tail(clock=ManualClock())
    assert tail.snapshot() is None
    assert tail.mark() is None
    assert tail.catch_up((7, 7)) is None
    assert read(tail) == []
    assert tail.find_time(0, 0, 100) is None


@pytest.mark.parametrize("is_open", [True, False])
def test_ranges_are_read_whether_somebody_has_the_log_open_or_not(place, is_open):
    topic = place.open(rotate_max_bytes=4096)
    fill(topic, 100, size=200)
    topic.wal.save_checkpoint()
    if not is_open:
        place.log.close()
    tail = place.tail()
    assert read(tail) == expected(0, 100)
    for start, end in [(0, 1), (17, 55), (99, 100), (50, 1000)]:
        assert read(tail, start, end) == expected(start, min(end, 100))
    assert read(tail, 100, 200) == read(tail, 500, 600) == read(tail, 5, 5) == []


def test_range_that_grows_meanwhile_is_read_to_its_end(place):
    """`frames` takes a newer checkpoint where the one it began with ends."""
    topic = place.open()
    fill(topic, 5, size=200)
    topic.wal.save_checkpoint()
    frames = place.tail().frames(0, 12, chunk_bytes=CHUNK)
    found = decoded([next(frames)])
    fill(topic, 10, size=200)
    topic.wal.save_checkpoint()
    found += decoded(frames)
    assert found == expected(0, 12)


def test_reading_ends_where_files_were_trimmed(place):
    topic = place.open(rotate_max_bytes=4096)
    fill(topic, 100, size=200)
    topic.upload()
    tail = place.tail()
    topic.wal.save_checkpoint()
    frames = tail.frames(0, 100, chunk_bytes=CHUNK)
    first = decoded([next(frames)])
    topic.wal.trim(80)
    rest = decoded(frames)
    # What was open is read to its end; behind it the caller looks elsewhere.
    found = first + rest
    assert found == expected(0, len(found))
    assert len(found) < topic.watermarks.trimmed
    assert read(tail, 0, 100) == []
    trimmed = topic.watermarks.trimmed
    assert read(tail, trimmed) == expected(trimmed, 100)


def test_file_that_is_lost_is_not_taken_for_one_that_was_trimmed(place):
    topic = place.open(rotate_max_bytes=4096)
    fill(topic, 100, size=200)
    place.log.close()
    (place.directory / "wal.2.log").unlink()
    with pytest.raises(NotFoundError):
        read(place.tail())


def test_damaged_frame_raises_behind_those_before_it(place):
    topic = place.open()
    fill(topic, 20, size=200)
    place.log.close()
    path = place.directory / "wal.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    found = []
    with pytest.raises(CorruptDataError) as caught:
        found.extend(place.tail().frames(0, 20, chunk_bytes=CHUNK))
    assert decoded(found) == expected(0, caught.value.offset)
    assert 5 < caught.value.offset < 15


def a_timed_topic(place):
    topic = place.open(rotate_max_bytes=4096)
    for number in range(100):
        topic.append(b"x" * 200, publish_time=1000 + number * 10)
        topic.flush()
    topic.upload()
    topic.wal.save_checkpoint()
    return topic, place.tail()


def test_time_is_found_below_the_durable_end(place):
    topic, tail = a_timed_topic(place)
    topic.append(b"too new", publish_time=5000)
    topic.flush()
    assert tail.find_time(0, 0, 100) == 0
    assert tail.find_time(1500, 0, 100) == 50
    assert tail.find_time(1501, 0, 100) == 51
    assert tail.find_time(1000, 30, 100) == 30
    assert tail.find_time(1500, 0, 50) is None
    assert tail.find_time(3000, 0, 1000) is None
    assert tail.find_time(1000, 100, 100) is None


@pytest.mark.parametrize("is_late", [True, False], ids=["before", "meanwhile"])
def test_time_is_not_looked_for_behind_what_was_trimmed(place, monkeypatch, is_late):
    """Goal: the first message of a time is never passed over because it lies in the bucket by now;
    the caller hears that the range is not here, and looks there.
    """
    topic, tail = a_timed_topic(place)
    old = tail.snapshot()
    topic.wal.trim(80)
    if not is_late:
        snapshots, load = iter([old]), tail.snapshot
        monkeypatch.setattr(tail, "snapshot", lambda: next(snapshots, None) or load())
    with pytest.raises(OffsetOutOfRangeError) as caught:
        tail.find_time(1050, 0, 100)
    assert caught.value.offset == 0
    trimmed = topic.watermarks.trimmed
    assert tail.find_time(1000 + 10 * trimmed, trimmed, 100) == trimmed


@pytest.mark.parametrize("what", ["log", "idx"])
def test_file_that_vanishes_under_a_look_for_a_time_is_out_of_range(place, monkeypatch, what):
    """It was trimmed after the snapshot was taken: the caller looks in the bucket."""
    topic, tail = a_timed_topic(place)
    real = tail._directory.fs.open_read

    def open_read(path):
        if path.endswith(f".{what}"):
            topic.wal.trim(80)
        return real(path)

    monkeypatch.setattr(tail._directory.fs, "open_read", open_read)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        tail.find_time(1050, 0, 100)
    assert (caught.value.offset, caught.value.topic) == (0, TEXT)
    assert topic.watermarks.trimmed > 5


def test_topic_that_is_deleted_meanwhile_ends_the_reading(place):
    topic = place.open(rotate_max_bytes=4096)
    fill(topic, 100, size=200)
    topic.wal.save_checkpoint()
    tail = place.tail()
    frames = tail.frames(0, 100, chunk_bytes=CHUNK)
    found = decoded([next(frames)])
    place.log.delete(TEXT)
    found += decoded(frames)
    assert found == expected(0, len(found))
    assert tail.snapshot() is None


# -- catching up --------------------------------------------------------------------------------


def test_catching_up_does_not_wait_where_nothing_is_missing(place):
    topic = place.open()
    fill(topic, 5, size=200)
    topic.wal.save_checkpoint()
    tail = place.tail(clock=ManualClock())  # a wait would never end
    assert tail.catch_up(tail.mark()).synced == 5
    assert tail.catch_up(None).synced == 5


def test_catching_up_gives_up_when_the_owner_is_dead(place, caplog):
    """Goal: what no checkpoint covers stays out of sight, and the wait has an end."""
    topic = place.open()
    fill(topic, 5, size=200)
    place.log.close()
    with (place.directory / "wal.log").open("ab") as file:
        file.write(b"torn")
    clock = ManualClock()
    tail = place.tail(clock=clock)
    waiting = Task(tail.catch_up, tail.mark())
    waiting.join(0.2)
    assert waiting.is_running
    assert not warnings_of(caplog)
    clock.advance(60)
    assert waiting.result().synced == 5
    (said,) = warnings_of(caplog)
    assert (said.topic, said.synced) == (TEXT, 5)


# -- beside an owner that works -----------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("codec", ["bincode2", "bincode1"])
@pytest.mark.timeout(120)
def test_every_snapshot_is_what_was_appended_while_the_owner_works(place, codec):
    """Goal: appends, rotations, uploads and trims beside it: every frame read is the one appended,
    none is above what is synced, and reading ends only where files were trimmed.
    """
    seed = first_seed()
    print(f"ISTER_SIM_SEED={seed}")
    place.open(rotate_max_bytes=16_384, cache_capacity=64)
    topic = place.make_again(codec=codec)
    stop = threading.Event()

    def payload(offset):
        return b"%d" % offset + b"." * (offset * 7919 % 300)

    def own():
        rng = random.Random(seed)
        while not stop.is_set():
            for _ in range(rng.randint(1, 30)):
                topic.append(payload(topic.watermarks.next))
            choice = rng.random()
            if choice < 0.7:
                topic.flush()
            if choice < 0.1:
                topic.upload()
                topic.wal.trim(topic.watermarks.tiered)
            elif choice < 0.3:
                topic.wal.save_checkpoint()

    def look(number):
        rng = random.Random(seed + number)
        tail = place.tail()
        reads = frames = ended_early = 0
        while not stop.is_set():
            snapshot = tail.snapshot()
            if snapshot is None or snapshot.trimmed == snapshot.synced:
                continue
            assert snapshot.synced <= topic.watermarks.synced
            start = rng.randint(snapshot.trimmed, snapshot.synced - 1)
            end = min(snapshot.synced, start + rng.randint(1, 400))
            found = read(tail, start, end, chunk_bytes=rng.choice((1 << 16, 1 << 20)))
            assert found == [(n, payload(n)) for n in range(start, start + len(found))]
            if len(found) < end - start:
                assert topic.watermarks.trimmed > start + len(found)
                ended_early += 1
            snapshot.measure(start, end)
            reads, frames = reads + 1, frames + len(found)
        return reads, frames, ended_early

    owner = Task(own)
    readers = [Task(look, number) for number in range(2)]
    threading.Event().wait(SECONDS)
    stop.set()
    owner.result()
    for reader in readers:
        reads, frames, ended_early = reader.result()
        print(f"{reads} reads of {frames} frames, {ended_early} met a trim")
        assert reads > 20
    assert topic.watermarks.trimmed > 0
    assert payloads(topic.read(topic.watermarks.next - 1)) == [payload(topic.watermarks.next - 1)]
