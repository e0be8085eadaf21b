"""A machine with a disk that fails on command, and what tests of the log do with it."""

import random
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

from ister.base.clock import Clock, SystemClock
from ister.config import load_config
from ister.errors import IsterError
from ister.format.frame import scan_frames
from ister.topic.log import Log
from ister.topic.topic import Topic
from tests.support.clock import ManualClock
from tests.support.memory_fs import MemoryFileSystem
from tests.support.waiting import PATIENCE_SECONDS, eventually

ROOT = "/data"
NAME = "/default/orders"


class Disk:
    """The files of a file system, looked at and harmed by hand."""

    def __init__(self, fs: MemoryFileSystem) -> None:
        self.fs = fs

    def read(self, path: str) -> bytes:
        """A whole file."""
        file = self.fs.open_read(path)
        try:
            return file.read_at(0, file.size())
        finally:
            file.close()

    def overwrite(self, path: str, position: int, data: bytes) -> None:
        """Changes bytes of a file for good."""
        file = self.fs.open(path)
        file.write_at(position, [data])
        file.sync()
        file.close()

    def truncate(self, path: str, size: int) -> None:
        """Cuts a file for good."""
        file = self.fs.open(path)
        file.truncate(size)
        file.sync()
        file.close()

    def create(self, path: str, data: bytes = b"") -> None:
        """Makes a file for good."""
        file = self.fs.create(path)
        file.write_at(0, [data])
        file.sync()
        file.close()
        self.fs.sync_directory(path.rpartition("/")[0])

    def remove(self, path: str) -> None:
        """Removes a file for good."""
        self.fs.remove(path)
        self.fs.sync_directory(path.rpartition("/")[0])

    def frame_starts(self, path: str) -> list[int]:
        """Where each whole frame of a file begins."""
        return scan_frames(self.read(path), expected_offset=None).starts

    def flip(self, path: str, position: int) -> None:
        """Changes a bit of a file for good."""
        self.overwrite(path, position, bytes([self.read(path)[position] ^ 1]))

    def content(self, directory: str) -> dict[str, bytes]:
        """Every file of a directory with its bytes, but for what is being written."""
        names = [name for name in self.fs.list_directory(directory) if not name.endswith(".tmp")]
        return {name: self.read(f"{directory}/{name}") for name in names}


class Machine(Disk):
    """A file system in memory and the logs opened on it, one process life after the other."""

    def __init__(self) -> None:
        super().__init__(MemoryFileSystem())
        self._logs: list[Log] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def open(
        self, *, clock: Clock | None = None, scheduler=None, storage: dict | None = None, **wal
    ) -> Log:
        """A log on this machine's disk; `wal` are settings below `storage.wal`."""
        tree = {"storage": {"mode": "local_only", **(storage or {}), "wal": {"dir": ROOT, **wal}}}
        config = load_config(tree, {})
        log = Log(config, fs=self.fs, clock=clock, scheduler=scheduler, background=False)
        self._logs.append(log)
        return log

    def topic(self, name: str = NAME, *, ack: str | None = None, **settings) -> Topic:
        """A new topic in a log of its own."""
        return self.open(**settings).topic(name, create=True, ack=ack)

    def reopened(self, name: str = NAME, **settings) -> Topic:
        """The topic as the next process finds it."""
        return self.open(**settings).topic(name)

    def kill(self) -> None:
        """Ends the process: nothing of it touches the disk again, the page cache stays."""
        self._end_processes()
        self.fs.kill()

    def cut_power(self, seed: int = 0) -> None:
        """Ends the machine in one of the states that a power cut leaves."""
        self._end_processes()
        self.fs.crash(random.Random(seed))

    def _end_processes(self) -> None:
        for log in self._logs:
            log._scheduler.stop()
        self._logs.clear()

    def shut_down(self) -> None:
        """Closes what is open, with the disk in order again."""
        self.fs.before = lambda kind, path: None
        self.fs.write_limit_bytes = None
        for log in self._logs:
            with suppress(IsterError):
                log.close()

    def used_bytes(self) -> int:
        """What all files take."""
        return self.fs._used_bytes(self.fs._root)


class Calls:
    """A hook that counts operations and may fail some of them."""

    def __init__(
        self,
        *,
        fail: Callable[[str, str], OSError | None] = lambda kind, path: None,
    ) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self._fail = fail

    def __call__(self, kind: str, path: str) -> None:
        self.seen.append((kind, path, threading.get_ident()))
        if (error := self._fail(kind, path)) is not None:
            raise error

    def count(self, kind: str, suffix: str = "") -> int:
        """How many operations of a kind there were on paths that end so."""
        return sum(k == kind and p.endswith(suffix) for k, p, _ in self.seen)

    def threads(self, kind: str, suffix: str = "") -> set[int]:
        """Which threads did them."""
        return {t for k, p, t in self.seen if k == kind and p.endswith(suffix)}


class Gate(Calls):
    """A hook that holds back the operations of one kind until it is opened."""

    def __init__(self, kind: str, suffix: str | tuple[str, ...] = ".log", **options) -> None:
        super().__init__(**options)
        self._kind = kind
        self._suffix = suffix
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, kind: str, path: str) -> None:
        if kind == self._kind and path.endswith(self._suffix):
            self._reached.set()
            assert self._opened.wait(PATIENCE_SECONDS), "the gate was never opened"
        super().__call__(kind, path)

    def wait_reached(self) -> None:
        """Returns once an operation is held back."""
        assert self._reached.wait(PATIENCE_SECONDS), "nothing came to the gate"

    def open(self) -> None:
        """Lets everything pass from here on."""
        self._opened.set()


class NoThreads:
    """A scheduler that never runs anything: whoever calls does the work."""

    def submit(self, log) -> None:
        """Nobody comes."""

    def submit_at(self, log, when) -> None:
        """Nobody comes."""

    def submit_upkeep(self, log) -> None:
        """Nobody comes."""

    def is_interruptible(self) -> bool:
        """Nobody else could do the work."""
        return False

    def forget(self, log) -> None:
        """Nothing is kept."""

    def stop(self) -> None:
        """There is nothing to stop."""


class Task:
    """A function on a thread of its own, with its result or its error."""

    def __init__(self, function: Callable, *args, **kwargs) -> None:
        self._outcome: list = []
        self._call = (function, args, kwargs)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        function, args, kwargs = self._call
        try:
            self._outcome = [function(*args, **kwargs), None]
        except Exception as error:
            self._outcome = [None, error]

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Waits for its end, not longer than so many seconds."""
        self._thread.join(timeout)

    def result(self):
        """What it returned; raises what it raised."""
        value, error = self._finish()
        if error is not None:
            raise error
        return value

    def error(self) -> Exception:
        """What it raised."""
        value, error = self._finish()
        assert error is not None, f"returned {value!r}"
        return error

    def _finish(self) -> list:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the task has not ended"
        return self._outcome


class TurningClock(SystemClock):
    """The machine's clock with time that passes by hand, as if the machine were suspended."""

    def __init__(self) -> None:
        self.shift_ns = 0

    def now_ns(self) -> int:
        return SystemClock.now_ns() + self.shift_ns

    def boottime(self) -> float:
        return SystemClock.boottime() + self.shift_ns / 1e9


def payloads(messages: Iterable) -> list[bytes]:
    """Their payloads."""
    return [message.payload for message in messages]


def numbered(count: int, *, first: int = 0, size: int = 0) -> list[bytes]:
    """Payloads that differ, of at least `size` bytes."""
    return [b"%d" % number + b"." * size for number in range(first, first + count)]


def fill(topic: Topic, count: int, *, size: int = 0, tag: bytes = b"") -> list[bytes]:
    """Appends numbered payloads and flushes after each; returns them."""
    sent = [tag + payload for payload in numbered(count, first=topic.watermarks.next, size=size)]
    for payload in sent:
        topic.append(payload)
        topic.flush()
    return sent


def waiting(topic: Topic, level: str) -> int:
    """How many waiters a topic has at a level."""
    return len(topic.wal.levels.waiters[level]._heap)


__all__ = [
    "NAME",
    "PATIENCE_SECONDS",
    "ROOT",
    "Calls",
    "Disk",
    "Gate",
    "Machine",
    "ManualClock",
    "NoThreads",
    "Task",
    "TurningClock",
    "eventually",
    "fill",
    "numbered",
    "payloads",
    "waiting",
]
