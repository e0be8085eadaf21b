"""Disks that are full, out of handles or broken: real ones where that needs root, limits otherwise.

What every test ends with: everything acknowledged is there, in order, and nothing that was refused.
"""

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ister
from ister.base.limits import STALL_RETRY_SECONDS
from ister.base.model import MessageId, StreamMessage, TopicState
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import encode_message
from ister.fs import local
from ister.wal.directory import LOCK_NAME
from tests.support.disks import (
    fill,
    mounted_disk,
    mounted_tmpfs,
    skip_if,
    why_no_disks,
    why_no_strace,
    why_no_tmpfs,
)
from tests.support.oracle import SURVIVES_KILL, History, payload_of, settings_of, verify
from tests.support.scale import scaled
from tests.support.waiting import eventually
from tests.support.writer_child import WriterChild, new_seed, say_replay

NAME = "/fault/t0"
PAGE = 4096
_MESSAGES_MAX = 2000
_RESUMES_IN = 20 * STALL_RETRY_SECONDS


class Producer:
    """Appends to one topic and keeps the history; ids are p.100, p.101 …

    Messages have `size` bytes of filler, or whole frames have `frame` bytes.
    """

    def __init__(
        self,
        topic: ister.Topic,
        history: History,
        *,
        size: int = 0,
        frame: int = 0,
        sender: str = "p",
    ) -> None:
        self.topic = topic
        self.history = history
        self._size = size
        self._frame = frame
        self._sender = sender
        self._number = 100
        self.accepted = ("", -1)
        """The last message that was accepted, and its offset."""

    def append(self) -> tuple[str, int]:
        size = self._size or self._size_for_frame()
        message_id = f"{self._sender}.{self._number}#{size}"
        self._number += 1
        self.history.send(self.topic.name, message_id)
        try:
            return message_id, self.topic.append(payload_of(message_id))
        except ister.IsterError:
            self.history.error(self.topic.name, message_id)
            raise

    def _size_for_frame(self) -> int:
        """The filler that makes the next frame as large as wanted."""
        offset, now_ms = self.topic.watermarks.next, time.time_ns() // 1_000_000
        for size in range(self._frame, 0, -4):
            payload = payload_of(f"{self._sender}.{self._number}#{size}")
            identity = MessageId(topic_name=self.topic.name, topic_offset=offset)
            message = StreamMessage(msg_id=identity, payload=payload, publish_time=now_ms)
            body = encode_message(message, self.topic.codec)
            if len(body) + FRAME_HEADER_SIZE == self._frame:
                return size
        raise AssertionError("no size fits: make the sender's name a byte longer")

    def wait(self, message_id: str, offset: int, level: str = "synced") -> None:
        self.topic.wait(offset, level, timeout=30)
        self.history.ack(self.topic.name, message_id, offset, level)

    def put(self) -> None:
        """Appends and waits."""
        self.accepted = self.append()
        self.wait(*self.accepted)

    def put_until_it_raises(self) -> None:
        """Appends and waits until that fails; `accepted` is the message it failed for."""
        for _ in range(_MESSAGES_MAX):
            self.put()


def payload_ids(topic: ister.Topic, end: int) -> list[str]:
    return [m.payload.partition(b"|")[0].decode() for m in topic.read("earliest", end=end)]


# -- full -------------------------------------------------------------------------------------


def test_full_disk_stalls_and_goes_on_by_itself():
    """Goal: a full disk refuses appends and costs nothing that was acknowledged; room is enough
    to go on.

    Method: a tmpfs of 1 MiB, filled by the topic itself up to the last page, with a wait for each
    message. Then reads and refused appends; then a file beside it is removed, and nobody calls
    anything: the topic has to come back alone and to write what it had accepted.
    """
    skip_if(why_no_tmpfs())
    history = History()
    with mounted_tmpfs(size_kib=1024) as where:
        ballast = where / "ballast"
        ballast.write_bytes(bytes(512 * 1024))
        settings = settings_of(str(where), rotate_max_bytes=64 * 1024)
        with ister.open(settings) as log:
            topic = log.topic(NAME, create=True)
            producer = Producer(topic, history, size=3000)
            with pytest.raises(ister.CapacityError, match="No space left"):
                producer.put_until_it_raises()
            accepted = producer.accepted
            durable = topic.watermarks.synced
            assert durable == history.acks > 50
            assert accepted[1] == durable, "the one that failed had been accepted"
            assert topic.state is TopicState.STALLED

            for _ in range(3):
                with pytest.raises(ister.CapacityError, match="resumes when there is room"):
                    producer.append()
            assert topic.watermarks.next == durable + 1, "a refused append takes no offset"
            with pytest.raises(ister.CapacityError):
                producer.wait(*accepted)
            assert len(payload_ids(topic, end=durable)) == durable
            assert [m.offset for m in topic.read(durable - 2, end=durable)] == [
                durable - 2,
                durable - 1,
            ]

            ballast.unlink()
            eventually(lambda: topic.state is TopicState.OPEN, "open again", within=_RESUMES_IN)
            producer.wait(*accepted)
            for _ in range(20):
                producer.put()
            assert payload_ids(topic, end=durable + 1)[-1] == accepted[0]
            verify(history, log, survives=SURVIVES_KILL)
        with ister.open(settings) as log:
            verify(history, log, survives=SURVIVES_KILL)
    print(f"acked {history.acks}, refused {history.errors}")


def test_kill_on_a_full_disk_leaves_everything_acknowledged(request):
    """Goal: a partial frame at the end of a full disk is cut, and the log opens with some room.

    Method: a writer on a tmpfs that fills up is killed while it stalls, several times, with a
    little more room each time.
    """
    skip_if(why_no_tmpfs())
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(seed)
    history = History()
    with mounted_tmpfs(size_kib=4096) as where:
        ballast = where / "ballast"
        for cycle in range(4):
            fill(ballast, leave=chance.randrange(200_000, 400_000))
            with WriterChild(
                where, history, level="mixed", topics=2, session=f"c{cycle}", seed=seed, size=900
            ) as child:
                assert child.listen(60.0, until="error"), child.complaints()
                child.listen(chance.uniform(0.05, 0.3))
                assert set(child.errors) == {"CapacityError"}, child.errors
                assert "stalled" in child.states
                assert child.kill() == -signal.SIGKILL
            os.truncate(ballast, ballast.stat().st_size - 200_000)
            with ister.open(settings_of(str(where), level="mixed")) as log:
                verify(history, log, survives=SURVIVES_KILL)
    print(f"acked {history.acks}, refused {history.errors}")


def test_opening_on_a_full_disk_still_reads():
    """Goal: a process that starts on a full disk gives out what is there.

    Method: a small log, then not a byte of room; open, read, a refused append; then room.
    """
    skip_if(why_no_tmpfs())
    history = History()
    with mounted_tmpfs(size_kib=512) as where:
        settings = settings_of(str(where))
        with ister.open(settings) as log:
            producer = Producer(log.topic(NAME, create=True), history, size=100)
            for _ in range(10):
                producer.put()
        fill(where / "ballast")
        with ister.open(settings) as log:
            verify(history, log, survives=SURVIVES_KILL)
            again = Producer(log.topic(NAME), history, size=20_000, sender="q")
            with pytest.raises(ister.CapacityError):
                again.put()
            (where / "ballast").unlink()
            topic = again.topic
            eventually(lambda: topic.state is TopicState.OPEN, "open again", within=_RESUMES_IN)
            again.wait(*again.accepted)
            again.put()
            verify(history, log, survives=SURVIVES_KILL)


def test_directory_opens_on_a_full_disk():
    """Goal: a log without a bucket needs no room to be opened, and leaves nothing behind.

    Method: a lock file without its page, no room for one; opened twice.
    """
    skip_if(why_no_tmpfs())
    with mounted_tmpfs(size_kib=256) as where:
        settings = settings_of(str(where))
        with ister.open(settings):
            pass
        os.truncate(where / "wal" / LOCK_NAME, 0)
        fill(where / "ballast")
        with pytest.raises(OSError) as caught:
            (where / "more").write_bytes(bytes(PAGE))
        assert caught.value.errno == errno.ENOSPC
        handles = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            ister.open(settings).close()
            assert len(os.listdir("/proc/self/fd")) == handles, "a handle was left behind"


# -- limits: no root needed -------------------------------------------------------------------


def run_under_limit(
    directory: Path,
    history: History,
    *,
    is_felt: Callable[[WriterChild], bool],
    lifted: bool,
    **options: object,
) -> WriterChild:
    """Runs a writer under a limit until it is felt, and some messages after it was lifted."""
    with WriterChild(directory, history, **options) as child:
        assert child.listen(60.0, until="ready"), child.complaints()
        deadline = time.monotonic() + 60.0
        while not is_felt(child):
            child.listen(0.05)
            assert time.monotonic() < deadline, f"the limit is not felt: {child.lines}"
        if lifted:
            child.signal(signal.SIGUSR1)
            assert child.listen(60.0, until="lifted"), child.complaints()
            for _ in range(20):
                assert child.listen(60.0, until="ack"), "nothing goes on after the limit was lifted"
        assert child.kill() == -signal.SIGKILL, child.complaints()
        return child


def test_file_size_limit_stalls_and_goes_on_when_lifted(tmp_path, request):
    """Goal: EFBIG is a full disk: CapacityError, stalled, reads as before, on when there is room.

    Method: RLIMIT_FSIZE below the size at which files rotate, lifted when a topic has stalled and
    somebody was told; then a kill.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = History()
    child = run_under_limit(
        tmp_path,
        history,
        is_felt=lambda child: "stalled" in child.states and bool(child.errors),
        lifted=True,
        level="mixed",
        seed=seed,
        topics=2,
        size=1000,
        rotate_bytes=1 << 20,
        limit_file_size=100_000,
    )
    assert set(child.errors) == {"CapacityError"}, child.errors
    assert "stalled" in child.states
    with ister.open(settings_of(str(tmp_path), level="mixed")) as log:
        verify(history, log, survives=SURVIVES_KILL)
    print(f"acked {history.acks}, told {dict(child.errors)}")


@pytest.mark.nightly
@pytest.mark.parametrize("free", [0, 1, 2, 3])
@pytest.mark.parametrize("lifted", [True, False], ids=["lifted", "for good"])
def test_no_free_handles_loses_nothing(tmp_path, request, free, lifted):
    """Goal: without free handles the old file stays in use, or appends are refused; nothing is
    lost, and it goes on when there are handles again.

    Method: RLIMIT_NOFILE so low that rotation fails at its first, second or third open; then a
    kill, and recovery of what half-done rotations left.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = History()
    child = run_under_limit(
        tmp_path,
        history,
        # Enough for a few rotations, or refused often.
        is_felt=lambda child: child.lines["ack"] + child.lines["error"] >= 60,
        lifted=lifted,
        level="mixed",
        seed=seed,
        topics=3,
        trim_keep=200,
        rotate_bytes=4096,
        limit_free_files=1 + free,
    )
    assert set(child.errors) <= {"CapacityError"}, child.errors
    with ister.open(settings_of(str(tmp_path), level="mixed")) as log:
        verify(history, log, survives=SURVIVES_KILL)
        assert all(log.topic(name).state is TopicState.OPEN for name in log.topics())
    assert history.acks >= 20 or not lifted
    print(f"acked {history.acks}, told {dict(child.errors)}, states {child.states}")


# -- sync that fails --------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("reopen", ["asked for again", "closed first"])
def test_failed_sync_fails_the_topic_and_reopening_keeps_what_was_synced(reopen):
    """Goal: a sync that the kernel fails is final: told to everyone, nothing retried, nothing
    believed that it covered.

    Method: ext4 without a journal on a sparse image that lies on a tmpfs too small for it: the
    device takes writes until the tmpfs is full, and the next fdatasync fails, for real. The same
    fdatasync called again would succeed and mean nothing (the kernel reports an error once).
    Then room is made below the device, and the topic asked for again.

    Each frame fills one page exactly: the loop device calls a write that was stored in part a
    success, and only a write of one page is never stored in part.
    """
    skip_if(why_no_disks())
    history = History()
    without_journal = ("-O", "^has_journal", "-b", str(PAGE))
    with mounted_tmpfs(size_kib=8192) as below:
        ballast = below / "ballast"
        with mounted_disk(size_mib=32, options=without_journal, home=below) as disk:
            settings = settings_of(str(disk.where), rotate_max_bytes=1 << 26)
            with ister.open(settings) as log:
                topic = log.topic(NAME, create=True)
                producer = Producer(topic, history, frame=PAGE)
                for _ in range(20):
                    producer.put()
                assert os.stat(topic.wal.directory.log_path(0)).st_size == 20 * PAGE
                fill(ballast, leave=128 * 1024)
                with pytest.raises(ister.DiskError) as caught:
                    producer.put_until_it_raises()
                print(f"after {history.acks} messages: {caught.value}")
                assert topic.state is TopicState.FAILED
                durable = topic.watermarks.synced
                assert durable == history.acks
                with pytest.raises(ister.ClosedError, match="open the topic again"):
                    producer.append()
                with pytest.raises(ister.IsterError):
                    topic.wait(producer.accepted[1])
                assert topic.watermarks.synced == durable, "nothing became durable afterwards"
                if reopen == "closed first":
                    topic.close()

                ballast.unlink()
                os.sync()
                again = log.topic(NAME)
                assert again is not topic
                assert again.state is TopicState.OPEN
                assert again.watermarks.synced >= durable
                verify(history, log, survives=SURVIVES_KILL)
                more = Producer(again, history, size=3000, sender="q")
                for _ in range(20):
                    more.put()
                verify(history, log, survives=SURVIVES_KILL)
            # The page cache goes, the device stays: what was acknowledged is on it.
            disk.unmount()
            disk.mount()
            with ister.open(settings) as log:
                verify(history, log, survives=SURVIVES_KILL)
    print(f"acked {history.acks}")


def strace(path: Path | None, *injections: str) -> tuple[str, ...]:
    """A prefix for a command that has system calls of it, on `path` alone, fail."""
    names = sorted({injection.partition(":")[0] for injection in injections})
    words = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={','.join(names)}"]
    if path is not None:
        words += ["-P", str(path)]
    for injection in injections:
        words += ["-e", f"inject={injection}"]
    return tuple(words)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("injection", "error"),
    [
        pytest.param("fdatasync:error=EIO:when=5", "DiskError", id="fdatasync EIO once"),
        pytest.param("fdatasync:error=ENOSPC:when=4", "DiskError", id="fdatasync ENOSPC once"),
        pytest.param("pwritev,pwritev2:error=EIO:when=7", "DiskError", id="write EIO once"),
        pytest.param(
            "pwritev,pwritev2:error=ENOSPC:when=3..9", "CapacityError", id="write ENOSPC a while"
        ),
        pytest.param(
            "pwritev,pwritev2:error=EDQUOT:when=4", "CapacityError", id="write EDQUOT once"
        ),
        pytest.param("fdatasync:delay_enter=50000:when=3+4", None, id="slow sync"),
    ],
)
def test_failing_call_on_the_active_file_loses_nothing(tmp_path, request, injection, error):
    """Goal: an error of one system call on a topic's file reaches those who waited, and no more.

    Method: a writer under strace, which has the call fail at a given count on `wal.log` alone;
    the writer opens the topic again where it is told to, and goes on until it is killed.
    """
    skip_if(why_no_strace())
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = History()
    file = tmp_path / "wal" / "fault" / "t0" / "wal.log"
    with WriterChild(
        tmp_path,
        history,
        prefix=strace(file, injection),
        level="synced",
        topics=2,
        seed=seed,
        rotate_bytes=1 << 20,
    ) as child:
        assert child.listen(60.0, until="ready"), child.complaints()
        if error is not None:
            assert child.listen(60.0, until="state"), "the error reached nobody"
        for _ in range(50):
            assert child.listen(60.0, until="ack"), f"nothing goes on: {child.states}"
        assert child.kill() == -signal.SIGKILL, child.complaints()
        # Those who come late find the topic closed and are told that, too.
        allowed = {error, "ClosedError"} if error == "DiskError" else {error} - {None}
        assert set(child.errors) <= allowed, child.errors
        if error is not None:
            assert child.errors[error] > 0
        if error == "DiskError":
            assert "failed" in child.states
            assert child.lines["reopened"] > 0
    with ister.open(settings_of(str(tmp_path))) as log:
        verify(history, log, survives=SURVIVES_KILL)
    print(f"acked {history.acks}, told {dict(child.errors)}, states {child.states}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("call", "stride"),
    # Opening calls fsync some ten times before the first append.
    [("fdatasync", 1), ("pwritev,pwritev2", 1), ("fsync", 6), ("rename", 1), ("unlink", 1)],
)
def test_kill_at_nth_system_call_loses_nothing(tmp_path, request, call, stride):
    """Goal: no system call of the writer is the wrong place to die.

    Method: strace kills the writer at its n-th call of one kind, for one n after the other in the
    same directory; each log is opened and compared.
    """
    skip_if(why_no_strace())
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = History()
    for kill in range(scaled(4, 40)):
        nth = 1 + kill * stride
        with WriterChild(
            tmp_path,
            history,
            prefix=strace(None, f"{call}:signal=SIGKILL:when={nth}"),
            level="mixed",
            topics=2,
            threads=2,
            session=f"c{kill}",
            seed=seed,
            rotate_bytes=4096,
            trim_keep=30,
        ) as child:
            assert not child.listen(60.0), f"{call} was not called {nth} times"
            assert child.ended() == -signal.SIGKILL, child.complaints()
        with ister.open(settings_of(str(tmp_path), level="mixed")) as log:
            verify(history, log, survives=SURVIVES_KILL)
    print(
        json.dumps({"test": f"kill at {call}", "kills": kill + 1, "acked": history.acks, "lost": 0})
    )


def test_short_writes_are_finished(tmp_path, monkeypatch):
    """Goal: a write that the kernel takes in pieces ends up whole, or fails as a whole.

    Method: the first call of every commit takes only some bytes; the log is read back, also by a
    second opening.
    """
    chance = random.Random(7)
    history = History()

    def short_pwritev(fd, buffers, position):
        data = b"".join(buffers)
        return os.pwrite(fd, data[: chance.randrange(1, len(data) + 1)], position)

    monkeypatch.setattr(local.os, "pwritev", short_pwritev)
    settings = settings_of(str(tmp_path))
    with ister.open(settings) as log:
        producer = Producer(log.topic(NAME, create=True), history, size=700)
        for _ in range(200):
            producer.put()
        verify(history, log, survives=SURVIVES_KILL)
    with ister.open(settings) as log:
        verify(history, log, survives=SURVIVES_KILL)
