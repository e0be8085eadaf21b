"""A log whose process forks again and again, with children that go on using their parent's objects.

Real files and real forks, from one seed: a forked child is a copy of everything, which nothing but
a fork makes. The parent is held still while a child lives (the locks under which it changes files
are taken before the fork), so that every change of a file is the child's doing; the child has all
of these locks as the parent's threads left them: taken.

A child calls what it has inherited, in any order, and ends in one of the ways in which processes
end. Each call has to be refused with the one error, at once. Afterwards the parent's files are what
they were, its directory is still locked, and it goes on: what it appended is there, in order.

    python -m tests.sim.fork_world 7 --mode local_only        # a seed
    python -m tests.sim.fork_world 7 --plant child_appends    # with a bug put in on purpose
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress

import ister
from ister.base import forks
from ister.errors import ClosedError, DirectoryLockedError
from ister.fs.local import LocalFileSystem, _LocalLock
from ister.metadata.sqlite import SqliteMetadata
from ister.topic.reader import Reader
from ister.topic.topic import Topic
from ister.wal.gate import AppendGate
from ister.wal.log import Wal

HANG_SECONDS = 60
DONE = b"every call was refused"
MODES = ("local_only", "wal_cloud")
ENDS = ("_exit", "exit", "exception", "with", "kill")


class BrokenError(AssertionError):
    """What must hold does not."""


def require(is_so: bool, what: str) -> None:
    if not is_so:
        raise BrokenError(what)


# -- bugs -----------------------------------------------------------------------------------


def child_unlocks() -> None:
    """The child releases the lock instead of closing its descriptor."""
    _LocalLock._after_fork = lambda self, error: self.release()


def child_keeps_the_lock() -> None:
    """The child leaves the descriptor of the lock open."""
    _LocalLock._after_fork = lambda self, error: None


def locks_stay_taken() -> None:
    forks.reset_locks = lambda *locks: None


def child_appends() -> None:
    """The log is refused in the child, and a topic that is at hand is not."""
    Topic._after_fork = lambda self, error: forks.reset_locks(
        self._readers_lock, *locks_of(self.wal)
    )


def child_writes_the_buffer() -> None:
    """Calls are refused, and closing the topic commits what the parent had buffered."""

    def after_fork(self, error):
        forks.reset_locks(*locks_of(self))
        self.gate._fork_error = error
        self.gate.refuse(self.gate.closed_error)

    Wal.after_fork = after_fork


def child_reads() -> None:
    Reader._after_fork = lambda self: forks.reset_locks(self._reading)
    AppendGate.check_process = lambda self: None


def child_uses_the_metadata() -> None:
    def _after_fork(self, error):
        forks.reset_locks(self._writer_lock, self._readers_lock, self._watching)

    SqliteMetadata._after_fork = _after_fork


PLANTED = {
    plant.__name__: plant
    for plant in (
        child_unlocks,
        child_keeps_the_lock,
        locks_stay_taken,
        child_appends,
        child_writes_the_buffer,
        child_reads,
        child_uses_the_metadata,
    )
}


# -- the world ------------------------------------------------------------------------------


def locks_of(wal):
    return (wal.lock, wal.committer.commit_lock, wal.committer.sync_lock, wal._checkpointer._lock)


class World:
    hang_seconds = HANG_SECONDS

    def __init__(self, seed: int, directory: str, mode: str) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.mode = mode
        self.expected: dict[str, list[bytes]] = {}
        self.forks = 0
        self.open()

    def open(self) -> None:
        wal = {"dir": f"{self.directory}/wal", "rotate_max_bytes": 16384}
        storage = {"mode": self.mode, "wal": wal}
        if self.mode == "wal_cloud":
            storage["cloud"] = {"backend": "fs", "root": f"{self.directory}/bucket"}
            storage["metadata"] = {"backend": "sqlite", "path": f"{self.directory}/metadata.db"}
        self.log = ister.open({"storage": storage})
        if self.log._background is not None:
            # Tries the bucket out after a while, which would look like a child's doing.
            self.log._background._probe_at = float("inf")
        self.topics = {name: self.log.topic(name, create=True) for name in ("/d/a", "/d/b")}
        self.readers = {name: topic.reader(0) for name, topic in self.topics.items()}

    def run(self, turns: int) -> None:
        for _ in range(turns):
            name = self.rng.choice(list(self.topics))
            self.rng.choices(
                [self.append, self.flush, self.read, self.upload, self.fork, self.reopen],
                [10, 2, 2, 1, 4, 0.3],
            )[0](name)
        self.fork("/d/a")
        self.reopen("/d/a")
        for name in self.topics:
            self.read(name)
        self.log.close()

    def append(self, name: str) -> None:
        payloads = [
            self.rng.randbytes(self.rng.randrange(200)) for _ in range(self.rng.choice([1, 50]))
        ]
        offsets = self.topics[name].append_many(payloads)
        known = self.expected.setdefault(name, [])
        require(offsets.start == len(known), f"{name}: {offsets} after {len(known)} messages")
        known += payloads

    def flush(self, name: str) -> None:
        self.topics[name].flush()

    def upload(self, name: str) -> None:
        if self.mode == "wal_cloud":
            self.topics[name].upload()

    def read(self, name: str) -> None:
        self.flush(name)
        found = [bytes(message.payload) for message in self.topics[name].read()]
        require(
            found == self.expected.get(name, []), f"{name}: {len(found)} messages, not the same"
        )

    def reopen(self, _name: str) -> None:
        self.log.close()
        self.open()

    # -- forks ------------------------------------------------------------------------------

    def fork(self, _name: str) -> None:
        self.forks += 1
        ending, seed = self.rng.choice(ENDS), self.rng.randrange(1 << 30)
        with ExitStack() as held:
            for topic in self.topics.values():
                if topic.bucket is not None:
                    held.enter_context(topic.bucket.uploads.lock)
                wal = topic.wal
                held.enter_context(wal.committer.commit_lock)
                held.enter_context(wal.committer.sync_lock)
                held.enter_context(wal._checkpointer._lock)
            if self.log.stores is not None:
                held.enter_context(self.log.stores.metadata._writer_lock)
            before = self.snapshot()
            # Held by another thread, as in the middle of an append.
            is_held, is_over = threading.Event(), threading.Event()
            appender = threading.Thread(target=self._hold, args=(is_held, is_over))
            appender.start()
            is_held.wait()
            told, telling = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._inherited = held.pop_all()
                self._be_a_child(ending, seed, telling)
            os.close(telling)
            is_over.set()
            appender.join()
            _, status = os.waitpid(pid, 0)
            found = os.read(told, len(DONE))
            os.close(told)
            require(found == DONE, f"a child hangs, or was not refused (status {status})")
            require(self.snapshot() == before, f"a child changed files (end: {ending})")
        wanted = {"_exit": 0, "exit": 0, "with": 0, "exception": 256, "kill": signal.SIGKILL}
        require(status == wanted[ending], f"a child ended with {status} (end: {ending})")
        try:
            LocalFileSystem().lock(f"{self.directory}/wal/.lock").release()
        except DirectoryLockedError:
            return
        raise BrokenError(f"a child released the parent's lock (end: {ending})")

    def _hold(self, is_held: threading.Event, is_over: threading.Event) -> None:
        with ExitStack() as held:
            for topic in self.topics.values():
                held.enter_context(topic.wal.lock)
            for reader in self.readers.values():
                held.enter_context(reader._reading)
            held.enter_context(self.log._lock)
            held.enter_context(self.log.metrics._lock)
            is_held.set()
            is_over.wait()

    def snapshot(self) -> dict[str, bytes]:
        found = {}
        for folder, _, names in os.walk(self.directory):
            for name in names:
                # Whoever reads marks the -shm.
                if not name.endswith("-shm"):
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        found[path] = file.read()
        return found

    # -- in the child -----------------------------------------------------------------------

    def _be_a_child(self, ending: str, seed: int, telling: int) -> None:
        faulthandler.dump_traceback_later(self.hang_seconds, exit=True)
        try:
            self._try_everything(random.Random(seed))
            if ending == "with":
                with self.log:
                    pass
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(99)
        os.write(telling, DONE)
        faulthandler.cancel_dump_traceback_later()
        if ending == "_exit":
            os._exit(0)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "exception":
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
            raise RuntimeError("a child ends by this")
        faulthandler.dump_traceback_later(self.hang_seconds, exit=True)
        sys.exit(0)

    def _try_everything(self, rng: random.Random) -> None:
        for link in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{link}")
                # SQLite's descriptors are left alone, as they have to be.
                is_files = target.startswith(f"{self.directory}/wal")
                require(not is_files, f"the child has {target} open")
        topic, reader = self.topics["/d/a"], self.readers["/d/a"]
        calls = {
            "append": lambda: topic.append(b"child"),
            "append_many": lambda: topic.append_many([b"child"]),
            "wait": lambda: topic.wait(0),
            "flush": topic.flush,
            "read": lambda: list(topic.read()),
            "reader": lambda: topic.reader("latest"),
            "next_batch": lambda: reader.next_batch(timeout=1),
            "topic": lambda: self.log.topic("/d/a"),
            "new topic": lambda: self.log.topic("/d/child", create=True),
            "topics": self.log.topics,
            "seal": lambda: self.log.seal("/d/a"),
            "delete": lambda: self.log.delete("/d/b"),
        }
        if self.log.stores is not None:
            stores = self.log.stores
            calls |= {
                "upload": topic.upload,
                "metadata": lambda: stores.metadata.get("/x"),
                "change": lambda: stores.metadata.put("/x", b""),
                "renew": stores.membership.renew,
                "objects": lambda: stores.objects.stat("x"),
                "put": lambda: stores.objects.put("x", b""),
            }
        names = rng.sample(list(calls), len(calls))
        for name in names:
            try:
                calls[name]()
            except ClosedError as error:
                require("fork" in str(error), f"{name}: {error}")
            else:
                raise BrokenError(f"{name} was not refused")
        reader.close()
        topic.close()
        self.log.close()
        self.log.metrics.snapshot()
        gc.collect()


def run_seed(seed: int, *, mode: str, turns: int = 60) -> int:
    own, directory = os.getpid(), tempfile.mkdtemp(prefix="ister-fork-")
    try:
        world = World(seed, directory, mode)
        world.run(turns)
        return world.forks
    finally:
        # A child that ends by an exception comes by here, too.
        if os.getpid() == own:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.fork_world")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, default="wal_cloud")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--plant", choices=sorted(PLANTED))
    parser.add_argument("--hang-seconds", type=float, default=HANG_SECONDS)
    given = parser.parse_args()
    World.hang_seconds = given.hang_seconds
    if given.plant is not None:
        PLANTED[given.plant]()
    forks_total = 0
    for seed in range(given.seed, given.seed + given.count):
        try:
            forks_total += run_seed(seed, mode=given.mode, turns=given.turns)
        except BrokenError as broken:
            print(f"broken: {broken}")
            print(f"again: python -m tests.sim.fork_world {seed} --mode {given.mode}")
            sys.exit(1)
    print(f"{forks_total} forks")


if __name__ == "__main__":
    main()
