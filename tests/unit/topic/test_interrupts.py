"""Calls that an exception from a signal handler ends: at every bytecode, one after the other.

`Injector` raises before the n-th bytecode or line that the calling thread runs in the modules of
the hot paths. A test makes a call once for each of them, and looks at the topic each time. Left out
is the last bytecode of the outermost call: the caller has its result, and CPython runs no signal
handler between the two.
"""

from __future__ import annotations

import itertools
import opcode
import os
import random
import sys
import threading
from functools import cache

import pyarrow as pa
import pytest

import ister
from ister.base.limits import APPEND_CHUNK_BYTES
from ister.base.model import StreamMessage, TopicState
from ister.errors import InvalidRequestError
from tests.support.machine import NAME, PATIENCE_SECONDS, NoThreads, Task, eventually
from tests.support.scale import IS_NIGHTLY

MODULES = (
    "/ister/metadata/sqlite.py",
    "/ister/topic/",
    "/ister/wal/",
    "/ister/bucket/history_reader.py",
    "/ister/format/frame",
    "/ister/format/message",
)
RETURN = opcode.opmap["RETURN_VALUE"]
CAPACITY = 16
POINTS_BY_DAY = 80
THREADS = ("ister-commit", "ister-timer", "ister-call", "ister-open")


class Interrupt(BaseException):
    """What the signal handler of a test raises."""


class Injector:
    """Raises `Interrupt` before the bytecode number `at` of this thread; counts them otherwise."""

    def __init__(self, at=None):
        self.count = 0
        self.where = None
        self._at = at
        self._depth = 0
        self._outermost = None

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _enter(self, frame, event, arg):
        if not _is_ours(frame):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, arg):
        if event not in ("opcode", "line"):
            return self._step
        is_return = event == "opcode" and frame.f_code.co_code[frame.f_lasti] == RETURN
        if is_return and not _is_ours(frame.f_back):
            return self._step
        self.count += 1
        if self.count == self._at:
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}, {event} {self.count}"
            sys.settrace(None)
            raise Interrupt
        return self._step


def _is_ours(frame):
    return frame is not None and _is_traced(frame.f_code.co_filename)


@cache
def _is_traced(path):
    return any(part in path for part in MODULES)


def points(call):
    """The numbers of the bytecodes and lines of a call."""
    with Injector() as injector:
        call()
    # A busy machine takes another way now and then; a few more do no harm.
    return sampled(range(1, injector.count + 4))


def sampled(every):
    """All of them in nightly, and some by day, in their order."""
    if IS_NIGHTLY or len(every) <= POINTS_BY_DAY:
        return every
    seed = int(os.environ.get("ISTER_INTERRUPT_SEED") or random.randrange(1 << 32))
    print(f"replay: ISTER_INTERRUPT_SEED={seed}; all of {len(every)} points: ISTER_NIGHTLY=1")
    return sorted(random.Random(seed).sample(every, POINTS_BY_DAY))


def interrupted(call, at):
    """Makes a call that is interrupted at a point; where that was, None if it had ended before."""
    with Injector(at) as injector:
        try:
            call()
        except Interrupt:
            assert injector.where is not None
    return injector.where


def frames_of(topic, start):
    """What the files hold, by offset."""
    reader = topic.reader(start)
    found = []
    while (batch := reader.next_frames()) is not None:
        ends = [*batch.starts[1:], batch.end]
        found += [batch.chunk[a + 16 : b] for a, b in zip(batch.starts, ends, strict=True)]
    reader.close()
    return found


class Checks:
    """Looks at a topic after each interrupted call."""

    def __init__(self, topic):
        self.topic = topic
        self.stored = []
        self.first = topic.watermarks.next
        self.number = 0

    def next_payloads(self, count):
        self.number += 1
        return [b"%d of call %d" % (n, self.number) for n in range(count)]

    def check(self, offered, where):
        """Everything that was offered is in, or nothing; and the topic goes on."""
        topic, cache = self.topic, self.topic.cache
        assert not topic.wal.gate.holds_lock, where
        probe = b"probe %d" % self.number
        offset = topic.append(probe)
        self.show()
        got = [
            m.payload for m in cache.read(self.first + len(self.stored), 1 << 60, bytes_max=1 << 30)
        ]
        assert got in ([probe], [*offered, probe]), where
        self.stored += got
        assert cache.end == topic.watermarks.next == offset + 1 == self.first + len(self.stored), (
            where
        )
        assert len(cache) <= CAPACITY, where
        bodies = cache.bodies(cache.start, cache.end, bytes_max=1 << 30)
        assert len(bodies) == len(cache), where
        size = cache.size_bytes
        assert size >= sum(map(len, bodies)), where
        cache.mend(cache.end, [])  # counts all that it holds
        assert cache.size_bytes == size, where
        if not self.number % 25:
            self.check_files(where)

    def show(self):
        """Has the cache hold all messages."""
        with self.topic.wal.lock:
            self.topic.wal.fill_cache(self.topic.wal.next)

    def check_files(self, where):
        """Another thread goes on too, and the files hold what was accepted."""
        topic = self.topic
        self.stored.append(b"of another thread")
        assert Task(topic.append, self.stored[-1]).result() == self.first + len(self.stored) - 1
        if topic.wal.directory is None:
            return
        Task(topic.flush).result()
        self.show()
        found = [m.payload for m in topic.read(start=self.first)]
        assert found == self.stored, where
        cache = topic.cache
        bodies = cache.bodies(cache.start, cache.end, bytes_max=1 << 30)
        assert frames_of(topic, cache.start) == bodies, where
        assert topic.wal.buffer.pending_bytes == 0, where


def kinds_of_append(topic):
    def record(payloads):
        topic.appender.append_record(StreamMessage(payload=payloads[0], publish_time=5))

    def arrow(payloads):
        batch = pa.RecordBatch.from_pydict({"payload": pa.array(payloads, pa.binary())})
        topic.append_arrow(batch)

    return {
        "append": (1, lambda payloads: topic.append(payloads[0])),
        "append with fields": (
            1,
            lambda payloads: topic.append(payloads[0], attributes={"a": "b"}, producer_name="p"),
        ),
        "append_many": (3, topic.append_many),
        "append_record": (1, record),
        "append_arrow": (3, arrow),
    }


@pytest.fixture(params=["synced", "memory", "no files"])
def topic(request, machine):
    settings = {"cache_capacity": CAPACITY}
    if request.param == "no files":
        log = ister.open({"storage": {"mode": "memory", "wal": settings}})
        yield log.topic(NAME, create=True)
        log.close()
    else:
        yield machine.topic(ack=request.param, **settings)


@pytest.mark.parametrize(
    "kind", ["append", "append with fields", "append_many", "append_record", "append_arrow"]
)
@pytest.mark.parametrize("chunk_bytes", [APPEND_CHUNK_BYTES, 1], ids=["in a chunk", "sealing"])
def test_append_that_is_interrupted_anywhere_is_whole_or_not_at_all(
    topic, kind, chunk_bytes, monkeypatch
):
    for module in ("buffer", "commit"):
        monkeypatch.setattr(f"ister.wal.{module}.APPEND_CHUNK_BYTES", chunk_bytes)
    count, append = kinds_of_append(topic)[kind]
    checks = Checks(topic)
    append(checks.next_payloads(count))
    checks.check([b"%d of call 1" % n for n in range(count)], "at first")
    offered = checks.next_payloads(count)
    every = points(lambda: append(offered))
    checks.check(offered, "counting")
    for at in every:
        offered = checks.next_payloads(count)
        where = interrupted(lambda offered=offered: append(offered), at)
        checks.check(offered, where)
        if where is None:
            assert offered[-1] in checks.stored[-3:]
    checks.check_files("in the end")
    print(f"{len(every)} points")
    Task(topic.close).result()


@pytest.mark.parametrize("timeout", [None, PATIENCE_SECONDS])
def test_wait_that_is_interrupted_anywhere_leaves_the_topic_whole(machine, timeout):
    topic = machine.topic(cache_capacity=CAPACITY)
    checks = Checks(topic)
    every = points(lambda: topic.wait(topic.append(b"counted"), timeout=timeout))
    checks.stored.append(b"counted")
    for at in every:
        offered = checks.next_payloads(1)
        offset = topic.append(offered[0])
        where = interrupted(lambda offset=offset: topic.wait(offset, timeout=timeout), at)
        topic.wait(offset, timeout=PATIENCE_SECONDS)
        assert topic.watermarks.synced > offset, where
        checks.check(offered, where)
    checks.check_files("in the end")
    assert not topic.wal.gate.waiting
    Task(topic.close).result()


def fill(topic, first, count):
    sent = [b"message %d " % number + b"." * 1000 for number in range(first, first + count)]
    topic.append_many(sent)
    topic.flush()
    return sent


@pytest.mark.parametrize("capacity", [1, 4, CAPACITY], ids=["files", "both", "cache"])
@pytest.mark.parametrize("ack", ["synced", "memory"])
def test_next_batch_that_is_interrupted_anywhere_skips_and_repeats_nothing(machine, capacity, ack):
    topic = machine.topic(ack=ack, cache_capacity=capacity, rotate_max_bytes=4096)
    sent = [sent for first in (0, 4) for sent in fill(topic, first, 4)]
    check_reader(topic, sent, max_messages=3)


def check_reader(topic, sent, max_messages):
    """Interrupts a reader that reads everything once at each point, or at a sample of them."""

    def read_all(injector):
        got = []
        with topic.reader(0, end=len(sent)) as reader:
            while len(got) < len(sent):
                try:
                    with injector:
                        batch = reader.next_batch(max_messages, timeout=PATIENCE_SECONDS)
                except Interrupt:
                    assert not topic.wal.gate.holds_lock, injector.where
                    continue
                assert batch, injector.where
                got += [(m.offset, m.payload) for m in batch]
        assert got == [*enumerate(sent)], injector.where
        return injector

    every = range(1, read_all(Injector()).count + 1)
    assert len(every) > 100
    for at in sampled(every):
        read_all(Injector(at))
    Task(topic.close).result()


def test_follow_that_is_interrupted_anywhere_is_told_of_the_next_message(machine):
    """At the tail: nothing can be read, the reader waits, and gives up for lack of time."""
    topic = machine.topic(ack="memory")
    reader = topic.reader("latest")
    every = points(lambda: reader.next_batch(timeout=0.0005))
    for at in every:
        where = interrupted(lambda: reader.next_batch(timeout=0.0005), at)
        waiting = Task(reader.next_batch, timeout=PATIENCE_SECONDS)
        topic.append(b"%d" % at)
        assert [m.payload for m in waiting.result()] == [b"%d" % at], where
    Task(topic.close).result()


def test_read_of_an_open_chunk_that_is_interrupted_anywhere_loses_nothing(machine):
    topic = machine.topic(ack="memory", scheduler=NoThreads())
    reader = topic.reader("latest")
    topic.append(b"0")
    every = points(reader.next_batch)
    for at in every:
        topic.append(b"%d" % at)
        with Injector(at) as injector:
            try:
                batch = reader.next_batch()
            except Interrupt:
                batch = []
        assert not topic.wal.gate.holds_lock, injector.where
        batch = batch or reader.next_batch()
        assert [m.payload for m in batch] == [b"%d" % at], injector.where
    Task(topic.close).result()


@pytest.mark.parametrize("kind", ["topic", "log"])
def test_close_that_is_interrupted_anywhere_ends_with_the_next_call(tmp_path, kind):
    def opened():
        log = ister.open({"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path / "d")}}})
        topic = log.topic(NAME, create=True, ack="memory")
        topic.append(b"x")
        return log, topic

    at, where, count = 0, True, 0
    while where:
        at += 1
        log, topic = opened()
        count += 1
        where = interrupted(log.close if kind == "log" else topic.close, at)
        topic.close()
        assert topic.state is TopicState.CLOSED
        log.close()
        eventually(
            lambda: not any(t.name.startswith(THREADS) for t in threading.enumerate()), where
        )
    log, topic = opened()  # the directory's lock is free
    assert [m.payload for m in topic.read()] == [b"x"] * (count + 1)
    log.close()
    assert at > 20


def config_of(tmp_path, mode):
    storage = {"mode": mode, "wal": {"dir": str(tmp_path / "d")}}
    if mode == "wal_cloud":
        storage["cloud"] = {"backend": "fs", "root": str(tmp_path / "bucket")}
        storage["metadata"] = {"path": str(tmp_path / "metadata.db")}
    return {"storage": storage}


NUMBERS = itertools.count()
CALLS = {
    "topic": lambda log, topic: log.topic(f"{NAME}-{next(NUMBERS)}", create=True),
    "topic again": lambda log, topic: log.topic(NAME),
    "rotate": lambda log, topic: topic.rotate(),
    "upload": lambda log, topic: topic.upload(),
    "trim": lambda log, topic: log.trim(NAME),
    "seal": lambda log, topic: log.seal(NAME),
    "repair": lambda log, topic: log.repair(NAME),
    "delete": lambda log, topic: log.delete(NAME),
}
LOCAL_CALLS = ("topic", "topic again", "rotate", "trim", "delete")


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*(("local_only", kind) for kind in LOCAL_CALLS), *(("wal_cloud", kind) for kind in CALLS)],
)
def test_call_that_is_interrupted_anywhere_leaves_the_log_usable(tmp_path, mode, kind):
    log = ister.open(config_of(tmp_path, mode))
    at, where = 0, "at first"
    while where:

        def go_on():
            # In another thread, which would hang where a lock was left behind.
            topic = log.topic(NAME, create=True)
            sent = b"%d" % topic.append(b"x")
            topic.append(sent)
            topic.flush()
            assert [m.payload for m in topic.read()][-1] == sent
            return topic

        topic = Task(go_on).result()
        if kind == "topic again":
            Task(topic.close).result()
        at += 1
        where = interrupted(lambda topic=topic: CALLS[kind](log, topic), at)
        if kind == "delete":
            # It runs on behind the interrupt, and would delete what the next round creates.
            eventually(lambda: not any(t.name == "ister-call" for t in threading.enumerate()))
    Task(go_on).result()
    Task(log.close).result()
    assert at > 10


@pytest.mark.parametrize("mode", ["local_only", "wal_cloud"])
def test_open_that_is_interrupted_anywhere_gives_the_directory_back(tmp_path, mode):
    config = config_of(tmp_path, mode)
    at, where, log = 0, "at first", None

    def reopen():
        nonlocal log
        log = ister.open(config)

    while where:
        at += 1
        where = interrupted(reopen, at)
        if log is None:
            reopen()  # at once: it waits until the directory is free
        log.close()
        log = None
        eventually(
            lambda: not any(t.name.startswith(THREADS) for t in threading.enumerate()), where
        )
    assert at > 20


# -- what was seen ------------------------------------------------------------------------------


def test_lock_is_free_after_an_interrupt_right_after_it_was_taken(machine):
    topic = machine.topic(ack="memory")

    class Raising:
        def __init__(self, lock):
            self._lock = lock

        def __call__(self):
            self._lock.acquire()
            topic.appender._acquire = self._lock.acquire
            raise Interrupt

    topic.appender._acquire = Raising(topic.wal.lock)
    with pytest.raises(Interrupt):
        topic.append(b"a")
    assert Task(topic.append, b"b").result() == 0


def test_cache_gives_no_older_body_for_a_new_offset(machine):
    """The cache is a ring: a message that never came to it had the body of an older one."""
    topic = machine.topic(ack="memory", cache_capacity=4, scheduler=NoThreads())
    topic.append_many([b"0", b"1", b"2", b"3"])
    assert len(list(topic.read(start=0))) == 4
    topic.append(b"4")

    def interrupt(_chunk):
        topic.wal.buffer._on_sealed = topic.cache.append
        raise Interrupt

    topic.wal.buffer._on_sealed = interrupt
    with pytest.raises(Interrupt):
        list(topic.read(start=2))
    topic.append(b"5")
    # From the cache, which does not go back to the first message.
    found = [(m.offset, m.payload) for m in topic.read(start=2)]
    assert found == [(2, b"2"), (3, b"3"), (4, b"4"), (5, b"5")]
    Task(topic.close).result()


def test_next_batch_gives_again_what_an_interrupt_took(machine):
    topic = machine.topic()
    fill(topic, 0, 3)
    reader = topic.reader(0)
    poll = reader.poll

    def interrupt(*arguments):
        poll(*arguments)
        raise Interrupt

    reader.poll = interrupt
    with pytest.raises(Interrupt):
        reader.next_batch()
    del reader.poll
    assert [m.offset for m in reader.next_batch()] == [0, 1, 2]


@pytest.mark.parametrize("call", ["append", "append_many", "close", "log.close"])
def test_signal_handler_in_the_middle_of_an_append_is_refused_instead_of_blocked(machine, call):
    log = machine.open()
    topic = log.topic(NAME, create=True)
    calls = {
        "append": lambda: topic.append(b"of the handler"),
        "append_many": lambda: topic.append_many([b"of the handler"]),
        "close": topic.close,
        "log.close": log.close,
    }

    def handler(offset, body):
        topic._remember = topic.cache.append
        with pytest.raises(InvalidRequestError, match="signal handler"):
            calls[call]()
        topic.cache.append(offset, body)

    topic._remember = handler
    assert topic.append(b"a") == 0
    assert topic.append(b"b") == 1
    topic.flush()
    assert [m.payload for m in topic.read()] == [b"a", b"b"]
