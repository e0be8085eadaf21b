"""A log on a file system that crashes, driven by one seed, with everything it promises checked.

One `World` lives many lives: in each, a log is opened through recovery and worked with (appends,
waits, reads, rotation, trim, checkpoints, passing time), until a power cut or a kill ends it
between any two file operations. The next recovery may crash too, several times, and a checkpoint
or an index may be lost or damaged in between. After each, the whole log is read back and compared
with what had been promised.

What is checked, in `Promises`:
- a message acknowledged at a level that survives this kind of crash is there, unchanged;
- a message that any reader has seen is there, unchanged (unless its level survives nothing);
- what is there was sent, at that offset: no phantom, no other message under the same offset;
- offsets follow each other without a hole, from `trimmed` to `next`;
- a crash alone never makes a topic quarantined;
- once a recovery has shown a message, it stays.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ister.base import guarded_lock
from ister.base.model import AckLevel, TopicState
from ister.config import load_config
from ister.errors import ClosedError, IsterError
from ister.topic.log import Log
from ister.topic.topic import Topic
from ister.wal.commit import Committer
from tests.support.clock import ManualClock
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash

TOPICS = ("/ns/a", "/ns/b")
World_ = TypeVar("World_")


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


@contextmanager
def seeded_names(seed: int) -> Iterator[None]:
    """Has nodes, claims and topics get names by a seed: they decide between equals."""
    token_hex, names = secrets.token_hex, random.Random(seed)
    secrets.token_hex = lambda size=8: names.randbytes(size).hex()
    try:
        yield
    finally:
        secrets.token_hex = token_hex


@contextmanager
def few_per_transaction(*modules: Any) -> Iterator[None]:
    """Has modules put two topics into a transaction."""
    before = [module._TOPICS_PER_TRANSACTION for module in modules]
    for module in modules:
        module._TOPICS_PER_TRANSACTION = 2
    try:
        yield
    finally:
        for module, count in zip(modules, before, strict=True):
            module._TOPICS_PER_TRANSACTION = count


@contextmanager
def other_processes() -> Iterator[None]:
    """In here the thread is one of other processes: it holds none of the locks that it holds."""
    held, guarded_lock._held.count = guarded_lock._held.count, 0
    try:
        yield
    finally:
        guarded_lock._held.count = held


class InlineSchedule:
    """Runs logs when the simulation says so, on its one thread."""

    def __init__(self) -> None:
        self.queue: list[Committer] = []
        self.upkeep: list[Committer] = []
        self.alarms: list[tuple[Committer, float]] = []

    def submit(self, log: Committer) -> None:
        self.queue.append(log)

    def submit_at(self, log: Committer, when: float) -> None:
        self.alarms.append((log, when))

    def submit_upkeep(self, log: Committer) -> None:
        self.upkeep.append(log)

    def is_interruptible(self) -> bool:
        return False

    def forget(self, log: Committer) -> None:
        """Nothing is kept."""

    def stop(self) -> None:
        self.queue.clear()
        self.upkeep.clear()
        self.alarms.clear()

    def run(self) -> None:
        """Everything that is queued, once."""
        alarms, self.alarms = self.alarms, []
        for log, when in alarms:
            log.on_timer(when)
        queue, self.queue = self.queue, []
        for log in queue:
            log.run()
        upkeep, self.upkeep = self.upkeep, []
        for log in upkeep:
            log.run_upkeep()


@dataclass
class Promises:
    """What one topic owes its users."""

    sent: dict[int, set[bytes]] = field(default_factory=dict)
    """Every payload that was ever given this offset."""
    current: dict[int, bytes] = field(default_factory=dict)
    """The payload that has this offset in this life."""
    written: dict[int, bytes] = field(default_factory=dict)
    """Acknowledged at `written`: survives a kill."""
    durable: dict[int, bytes] = field(default_factory=dict)
    """Acknowledged at `synced`, seen by a reader, or found by a recovery: survives everything."""
    trimmed: int = 0

    def check(self, found: dict[int, bytes], *, first: int, next_offset: int, kill: bool) -> None:
        """Compares a log that was just recovered with what was promised."""
        owed = {**self.durable, **(self.written if kill else {})}
        for offset, payload in owed.items():
            if offset < first:
                if offset >= self.trimmed:
                    raise BrokenPromiseError(f"{offset} was promised and the log begins at {first}")
                continue
            if offset >= next_offset:
                raise BrokenPromiseError(f"{offset} was promised and the log ends at {next_offset}")
            if found.get(offset) != payload:
                raise BrokenPromiseError(f"{offset} was {payload!r} and is {found.get(offset)!r}")
        if sorted(found) != list(range(first, next_offset)):
            raise BrokenPromiseError(f"a hole between {first} and {next_offset}: {sorted(found)}")
        for offset, payload in found.items():
            if payload not in self.sent.get(offset, ()):
                raise BrokenPromiseError(f"{offset} holds {payload!r}, which was never sent there")
        # From here on these are what the log says, and it must not change its mind.
        self.current = dict(found)
        self.durable = dict(found)
        self.written = {}


class World:
    """See the module header."""

    def __init__(self, seed: int, *, ack: str = "synced") -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.ack = ack
        self.fs = MemoryFileSystem()
        self.clock = ManualClock()
        self.promises = {name: Promises() for name in TOPICS}
        self.crashes = 0
        self.sent = 0
        self.config = load_config(
            {
                "storage": {
                    "mode": "local_only",
                    "ack": ack,
                    "wal": {
                        "dir": "/data/wal",
                        "rotate_max_bytes": 4096,
                        "rotate_max_seconds": 30,
                        "cache_capacity": self.rng.choice((1, 3, 64)),
                        "fsync_max_batch_bytes": self.rng.choice((1, 2000, 1 << 20)),
                        "stream_chunk_size": 65536,
                    },
                }
            },
            {},
        )

    # -- lives ------------------------------------------------------------------------------

    def live(self, lives: int) -> None:
        """Lives and crashes `lives` times; every crash is checked by the recovery after it."""
        kill = False
        for _ in range(lives):
            kill = self._one_life(kill)
        self._recover(kill, crash_in_recovery=False)[0].close()

    def _one_life(self, kill_before: bool) -> bool:
        log, schedule = self._recover(kill_before, crash_in_recovery=True)
        self._arm(self.rng.randrange(1, 60))
        try:
            for _ in range(self.rng.randrange(1, 25)):
                self.step(log, schedule)
            if self.rng.random() < 0.2:
                log.close()
        except (SimulatedCrash, ClosedError):
            pass
        return self._crash()

    def _recover(self, kill: bool, *, crash_in_recovery: bool) -> tuple[Log, InlineSchedule]:
        """Opens the log again, through crashes inside of recovery, and checks what it says."""
        attempts = self.rng.randrange(0, 4) if crash_in_recovery else 0
        for _ in range(attempts):
            self._arm(self.rng.randrange(1, 30))
            try:
                log, _ = self._open()
                for name in TOPICS:
                    log.topic(name, create=True)
            except SimulatedCrash:
                kill = self._crash() and kill
            else:
                # No crash came: end this life here, as a kill would.
                kill = self._crash() and kill
        self.fs.before = lambda kind, path: None
        log, schedule = self._open()
        for name in TOPICS:
            self._check(log.topic(name, create=True), kill)
        return log, schedule

    def _open(self) -> tuple[Log, InlineSchedule]:
        schedule = InlineSchedule()
        log = Log(self.config, fs=self.fs, clock=self.clock, scheduler=schedule)
        return log, schedule

    def _crash(self) -> bool:
        """Ends the process: with the power, or alone. Returns whether the page cache survived."""
        self.crashes += 1
        kill = self.rng.random() < 0.25
        if kill:
            self.fs.kill()
        else:
            self.fs.crash(self.rng)
        if self.rng.random() < 0.2:
            self._spoil_a_hint()
        return kill

    def _spoil_a_hint(self) -> None:
        """Checkpoints and indexes are hints: losing or damaging one costs time, never data."""
        directory = f"/data/wal{self.rng.choice(TOPICS)}"
        if not self.fs.exists(directory):
            return
        hints = [n for n in self.fs.list_directory(directory) if n.endswith((".ckpt", ".idx"))]
        if not hints:
            return
        path = f"{directory}/{self.rng.choice(hints)}"
        if self.rng.random() < 0.5:
            self.fs.remove(path)
        else:
            file = self.fs.open(path)
            size = file.size()
            if size:
                file.write_at(self.rng.randrange(size), [self.rng.randbytes(1)])
            file.sync()
            file.close()
        self.fs.sync_directory(directory)

    def _arm(self, operations: int) -> None:
        left = operations

        def before(kind: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise SimulatedCrash(kind)

        self.fs.before = before

    # -- work -------------------------------------------------------------------------------

    def step(self, log: Log, schedule: InlineSchedule) -> None:
        """One thing that a program, or time, does to the log."""
        name = self.rng.choice(TOPICS)
        topic = log.topic(name, create=True)
        action = self.rng.choices(
            (
                self.append,
                self.wait,
                self.read,
                self.pass_time,
                self.trim,
                self.release,
                self.rotate,
            ),
            weights=(8, 6, 3, 3, 1, 1, 1),
        )[0]
        action(topic, self.promises[name])
        if self.rng.random() < 0.5:
            schedule.run()

    def append(self, topic: Topic, promises: Promises) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self.sent += 1
            payload = b"%d:" % self.sent + bytes(self.rng.choice((0, 20, 400, 1500)))
            # Noted first: a crash inside of `append` leaves the frame queued or not at all.
            promises.sent.setdefault(topic.wal.next, set()).add(payload)
            promises.current[topic.append(payload)] = payload

    def wait(self, topic: Topic, promises: Promises) -> None:
        if topic.wal.next == topic.wal.synced:
            return
        offset = self.rng.randrange(topic.wal.synced, topic.wal.next)
        level = self.rng.choice(("synced", "synced", "written"))
        topic.wait(offset, level)
        marks = topic.watermarks
        if not (marks.synced > offset if level == "synced" else marks.written > offset):
            raise BrokenPromiseError(f"told that {offset} is {level}, watermarks say {marks}")
        promised = promises.durable if level == "synced" else promises.written
        for below in range(topic.earliest, offset + 1):
            promised.setdefault(below, promises.current[below])

    def read(self, topic: Topic, promises: Promises) -> None:
        """What a reader sees at the level `synced` has to stay."""
        start = self.rng.randrange(topic.earliest, topic.wal.next + 1)
        with topic.reader(start) as reader:
            while messages := reader.poll(self.rng.randrange(1, 50), self.rng.choice((1, 1 << 20))):
                for message in messages:
                    if topic.ack is AckLevel.SYNCED:
                        promises.durable.setdefault(message.offset, message.payload)
                    elif topic.ack is AckLevel.WRITTEN:
                        promises.written.setdefault(message.offset, message.payload)

    def pass_time(self, topic: Topic, promises: Promises) -> None:
        self.clock.advance(self.rng.choice((0.01, 0.3, 1.1, 6.0, 40.0)))

    def trim(self, topic: Topic, promises: Promises) -> None:
        before = self.rng.randrange(topic.earliest, topic.wal.synced + 1)
        promises.trimmed = max(promises.trimmed, before)
        topic.wal.trim(before)

    def release(self, topic: Topic, promises: Promises) -> None:
        topic.wal.committer.release_file()

    def rotate(self, topic: Topic, promises: Promises) -> None:
        topic.rotate()

    # -- checks -----------------------------------------------------------------------------

    def _check(self, topic: Topic, kill: bool) -> None:
        if topic.state is TopicState.QUARANTINED:
            raise BrokenPromiseError(f"a crash made {topic.name} quarantined: {topic.damage}")
        self.promises[topic.name].check(
            read_all(topic), first=topic.earliest, next_offset=topic.wal.next, kill=kill
        )


def read_all(topic: Topic) -> dict[int, bytes]:
    """Everything that the topic holds now."""
    found: dict[int, bytes] = {}
    with topic.reader("earliest", end=topic.wal.next) as reader:
        while messages := reader.poll():
            for message in messages:
                if message.offset in found:
                    raise BrokenPromiseError(f"{message.offset} came twice")
                found[message.offset] = message.payload
    return found


def replayable(
    *more: type[BaseException],
) -> Callable[[Callable[..., World_]], Callable[..., World_]]:
    """Has a function that runs the world of a seed say how to see a broken promise again."""

    def decorate(run: Callable[..., World_]) -> Callable[..., World_]:
        parameters = [*inspect.signature(run).parameters.values()][1:]

        @functools.wraps(run)
        def run_seed(seed: int, **options: Any) -> World_:
            try:
                return run(seed, **options)
            except (BrokenPromiseError, IsterError, *more) as error:
                words = [
                    f"--no-{one.name}"
                    if value is False
                    else f"--{one.name}"
                    if value is True
                    else f"--{one.name} {value}"
                    for one in parameters
                    if one.name != "trace"
                    and (value := options.get(one.name, one.default)) != one.default
                ]
                place = f"tests.sim.{Path(inspect.getfile(run)).stem}"
                command = " ".join(["python -m", place, str(seed), *words])
                raise BrokenPromiseError(f"seed {seed}: {error!r}\nreplay: {command}") from error

        return run_seed

    return decorate


def replay(run: Callable[..., World_], tell: Callable[[World_], str]) -> None:
    """Runs the world of one seed from the command line, with the options of `run`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    for one in [*inspect.signature(run).parameters.values()][1:]:
        flag, kind = f"--{one.name}", str(one.annotation)
        if one.name == "trace":
            parser.add_argument(flag, action="store_const", const=print, help="show every turn")
        elif "bool" in kind:
            boolean = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=boolean, default=one.default)
        else:
            parser.add_argument(flag, type=int if kind == "int" else str, default=one.default)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}: {tell(run(**vars(arguments)))}, nothing broken")


@replayable()
def run_seed(seed: int, *, lives: int = 8, ack: str = "synced") -> World:
    """One world from its beginning to its end."""
    world = World(seed, ack=ack)
    world.live(lives)
    return world


def find_break(seeds: range, run: Callable[[int], object]) -> int | None:
    """The first seed that breaks a promise, or None."""
    for seed in seeds:
        try:
            run(seed)
        except (BrokenPromiseError, IsterError, LookupError, ValueError, OSError):
            return seed
    return None


if __name__ == "__main__":
    replay(run_seed, lambda world: f"{world.crashes} crashes, {world.sent} messages")
