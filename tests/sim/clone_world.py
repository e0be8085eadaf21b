"""One node whose disk is copied while it is in use, another node, and several topics; by one seed.

A `CloneWorld` begins with two machines. Disks are copied at any time, `.node` included, and the
copies are started beside the original, or after it. Processes are killed, lose their power, close,
or stand still for longer than their lease; in the middle of one's work on the metadata store others
get their turns. Answers of the metadata store are lost.

What is checked, by rules that know nothing of how copies are told apart:

- an acknowledgement comes from the process that has the topic, by the topic's record;
- an acknowledged message is in the topic from then on, at its offset, with two exceptions, both
  of which take an owner that was alone when it stopped answering: another node was told to take the
  topic over; or a copy of the disk goes on in the place of the very last process, which has not
  closed. What was acknowledged before the copy was made, or is in the bucket, is there even then;
- when everything else has ended, the last holder's disk opens, and every other copy is refused.

With `restores`, stores are put back to older states, too, and other rules apply (`restores`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import ister.bucket.membership
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys
from ister.config import load_config
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    FencedError,
    InvariantError,
    NotFoundError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.topic.log import Log
from ister.topic.topic import Topic
from ister.wal.directory import WalDirectory
from tests.sim.restores import REFUSALS, Restores
from tests.sim.tier_world import read_all
from tests.sim.world import (
    BrokenPromiseError,
    InlineSchedule,
    few_per_transaction,
    other_processes,
    replay,
    replayable,
    seeded_names,
)
from tests.support.clock import ManualClock
from tests.support.memory_fs import MemoryFileSystem
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

__all__ = ["CloneWorld", "run_seed"]

LEASE_SECONDS: Final = 5
TOPICS: Final = tuple(f"/ns/t{number}" for number in range(5))
_DISKS_MAX: Final = 5
_EXPECTED: Final = (ConflictError, FencedError, UnavailableError)


@dataclass(eq=False)
class Disk:
    """A machine's disk."""

    number: int
    family: int
    """Which node it is, or was copied from."""
    fs: MemoryFileSystem
    parent: Disk | None = None
    copied_at: int = 0
    process: Process | None = None

    def had(self, acked: Acked) -> bool:
        """Whether what one disk had at some moment is on this one, by how it was copied."""
        disk, until = self, None
        while disk is not None:
            if disk is acked.run.disk and (until is None or acked.at < until):
                return True
            until = disk.copied_at if until is None else min(until, disk.copied_at)
            disk = disk.parent
        return False


@dataclass(eq=False)
class Process:
    """One life on a disk."""

    disk: Disk
    log: Log | None
    """None if it ended before it had begun: it may have joined."""
    schedule: InlineSchedule
    has_closed: bool = False


@dataclass(frozen=True)
class Acked:
    """A message that was acknowledged."""

    payload: bytes
    run: Process
    at: int


@dataclass
class Owed:
    """What one topic owes its users."""

    acked: dict[int, Acked] = field(default_factory=dict)
    taken_over: dict[int, int] = field(default_factory=dict)
    """By node: when it was last told to take the topic over from another one."""


class CloneWorld:
    """See the module header."""

    def __init__(self, seed: int, *, restores: bool = False) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock = ManualClock()
        self.store = MemoryObjectStore(clock=self.clock)
        self.store.close = lambda: None
        self.meta = MemoryMetadata(self.clock)
        self.meta.close = lambda: None  # both outlive the processes
        self.meta.before = self._before
        self.meta.after = self._after
        self.fault_rate = rng.choice((0.0, 0.0, 0.01, 0.05))
        nodes = rng.choice((1, 1, 2))
        self.disks = [Disk(number, number, MemoryFileSystem()) for number in range(nodes)]
        self.owed = {name: Owed() for name in TOPICS}
        self.joined: dict[int, list[Process]] = {number: [] for number in range(nodes)}
        """By node: who joined, in order."""
        self.at = 0
        self.acks = self.copies = self.replaced = self.refused = self.regained = 0
        self.trace: Callable[[str], None] = lambda text: None
        self._running: list[Disk] = []
        self._interrupt_in = 0
        self._is_quiet = False
        self.restores: Restores | None = None
        self._expected = REFUSALS if restores else _EXPECTED
        if restores:
            self.restores = Restores(
                seed,
                meta=self.meta,
                store=self.store,
                machines=lambda: self.disks,
                names=TOPICS,
                stop=self.kill,
                clock=self.clock,
                quietly=self._quietly,
                trace=self._say,
            )
        self._config = load_config(
            {
                "storage": {
                    "mode": "wal_cloud",
                    "ack": "synced",
                    "wal": {"dir": "/data/wal", "rotate_max_bytes": 4096},
                    "uploader": {"engine": "none"},
                    "cloud": {"backend": "memory"},
                    "cloud_reader": {"read_ahead": False},
                    "metadata": {"backend": "memory", "lease_ttl_seconds": LEASE_SECONDS},
                }
            },
            {},
        )

    # -- faults -----------------------------------------------------------------------------

    def _before(self, kind: str, key: str) -> None:
        if self._is_quiet:
            return
        if self._interrupt_in:
            self._interrupt_in -= 1
            if not self._interrupt_in:
                self._interrupt()
        if self.rng.random() < self.fault_rate:
            raise UnavailableError(f"no answer to {kind}")

    def _after(self, kind: str, key: str) -> None:
        if self._is_quiet or kind not in ("put", "delete", "transact"):
            return
        if self.rng.random() < self.fault_rate:
            raise CommitUnknownError(f"no answer to {kind}")

    def _interrupt(self) -> None:
        """Time passes, and others have their turns."""
        self.trace("interrupted")
        self.clock.advance(self.rng.choice((0.0, 1.0, 6.0, 6.0, 20.0)))
        with other_processes():
            for _ in range(self.rng.randrange(1, 6)):
                free = [disk for disk in self.disks if disk not in self._running]
                if free:
                    self.turn(self.rng.choice(free))
        self.trace("goes on")

    @contextmanager
    def _on(self, disk: Disk) -> Iterator[None]:
        self._running.append(disk)
        try:
            yield
        finally:
            self._running.pop()

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Nothing fails in here."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def _say(self, text: str) -> None:
        self.trace(text)

    # -- lives ------------------------------------------------------------------------------

    def live(self, turns: int) -> None:
        """Lives through `turns` turns, and checks that everything is in order."""
        logging.disable(logging.CRITICAL)
        try:
            for _ in range(turns):
                if self.rng.random() < 0.2:
                    self._interrupt_in = self.rng.randrange(1, 12)
                self.turn(self.rng.choice(self.disks))
                if self.restores is not None:
                    self.restores.maybe_act()
            self.heal()
        finally:
            logging.disable(logging.NOTSET)

    def turn(self, disk: Disk) -> None:
        """One thing that happens on a disk."""
        self.at += 1
        process = disk.process
        if process is None:
            action = self.rng.choice((self.start, self.start, self.start, self.copy, self.idle))
        else:
            actions = {
                self.append: 8,
                self.upload: 3,
                self.renew: 4,
                self.idle: 4,
                self.copy: 1.5,
                self.kill: 0.7,
                self.cut_power: 0.5,
                self.close: 0.7,
            }
            action = self.rng.choices(list(actions), list(actions.values()))[0]
        self.trace(f"{self.at}: disk {disk.number}: {action.__name__}")
        try:
            with self._on(disk):
                action(disk)
        except InvariantError as error:
            raise BrokenPromiseError(f"{error!r}") from error
        except self._expected as error:
            self.trace(f"disk {disk.number}: {error!r}")
        if self.restores is not None:
            self.restores.check_kept()

    def start(self, disk: Disk) -> None:
        """A process begins; where it may not, it says so."""
        schedule = InlineSchedule()
        joined = self.joined[disk.family]
        try:
            log = Log(
                self._config,
                fs=disk.fs,
                clock=self.clock,
                scheduler=schedule,
                objects=self.store,
                metadata=self.meta,
                background=False,
            )
        except ConflictError:
            self.refused += 1
            raise
        except UnavailableError:
            joined.append(Process(disk, None, schedule))
            raise
        disk.process = Process(disk, log, schedule)
        self.replaced += bool(joined) and joined[-1].disk is not disk
        begun = [one.disk for one in joined if one.log is not None]
        if self.restores is not None and begun and begun[-1] is not disk:
            self.restores.note_replaced(disk)
        joined.append(disk.process)

    def copy(self, disk: Disk) -> None:
        """The disk is copied as it reads now, or as a power cut would leave it."""
        disks_max = _DISKS_MAX if self.restores is None else 2
        if len(self.disks) >= disks_max or not disk.fs.exists("/data/wal/.node"):
            return
        self.copies += 1
        fs = disk.fs.copied()
        fs.kill()
        if self.rng.random() < 0.5:
            fs.crash(self.rng)
        self.disks.append(Disk(len(self.disks), disk.family, fs, disk, self.at))

    def idle(self, disk: Disk) -> None:
        self.clock.advance(self.rng.choice((0.1, 1.0, 3.0, 6.0, 20.0)))

    def kill(self, disk: Disk) -> None:
        disk.process = None
        disk.fs.kill()

    def cut_power(self, disk: Disk) -> None:
        disk.process = None
        disk.fs.crash(self.rng)
        if self.restores is not None:
            self.restores.rebase()

    def close(self, disk: Disk) -> None:
        process = disk.process
        # Whether others can know of it, which takes a store that answers.
        process.has_closed = not self.fault_rate and process.log.stores.membership.is_valid
        self._interrupt_in = 0
        try:
            process.log.close()
        finally:
            disk.process = None
            disk.fs.kill()

    # -- work -------------------------------------------------------------------------------

    def append(self, disk: Disk) -> None:
        process = disk.process
        name, topic = self._open(process)
        if self.restores is not None:
            self.restores.append(disk, name, topic, process.schedule)
            return
        payload = b"%d on %d" % (self.at, disk.number)
        offset = topic.append(payload)
        process.schedule.run()
        topic.wait(offset, "synced")
        joined = [one for one in self.joined[disk.family] if one.log is not None]
        if not self._has(name, topic) or joined[-1] is not process:
            raise BrokenPromiseError(f"{name}: disk {disk.number} was replaced, and acknowledged")
        self.acks += 1
        owed = self.owed[name]
        if offset in owed.acked:
            raise BrokenPromiseError(f"{name}: {offset} was acknowledged twice")
        owed.acked[offset] = Acked(payload, process, self.at)

    def upload(self, disk: Disk) -> None:
        _, topic = self._open(disk.process)
        topic.upload()

    def renew(self, disk: Disk) -> None:
        membership = disk.process.log.stores.membership
        was_valid = membership.is_valid
        membership.renew()
        if self.restores is not None:
            self.restores.renew(disk.process.log)
        self.regained += not was_valid

    def _open(self, process: Process) -> tuple[str, Topic]:
        name = self.rng.choice(TOPICS)
        take_over = self.rng.random() < 0.3
        if self.restores is not None:
            return name, self._open_restored(process, name)
        before = process.log._topics.get(name)
        try:
            topic = process.log.topic(name, create=True, take_over=take_over)
        finally:
            if take_over:
                # At the end: others had turns meanwhile, and it may have waited for them.
                self.owed[name].taken_over[process.disk.family] = self.at
        if topic is not before:
            with self._quietly():
                self._check_opened(process, name, topic)
        return name, topic

    def _open_restored(self, process: Process, name: str) -> Topic:
        before = process.log._topics.get(name)
        topic = process.log.topic(name, create=True)
        if topic is not before:
            self.restores.note_opened(process.disk, name)
        return topic

    def _has(self, name: str, topic: Topic) -> bool:
        """Whether a topic is still its owner's, by its record."""
        keys = TopicKeys("/danube", TopicName.parse(name))
        catalog = Catalog(self.meta, keys, clock=self.clock, metrics=topic.bucket._stores.metrics)
        with self._quietly():
            found = catalog.record()
        return found is not None and found[0].claim == topic.bucket.owned.record.claim

    def _check_opened(self, process: Process, name: str, topic: Topic) -> None:
        if not self._has(name, topic):
            return  # replaced while it was opened; it notices before its first answer
        owed, held = self.owed[name], read_all(topic)
        for offset, acked in list(owed.acked.items()):
            if held.get(offset) == acked.payload:
                continue
            if not self._may_lack(process, owed, acked):
                raise BrokenPromiseError(
                    f"{name}: {offset} was {acked.payload!r}, acknowledged on disk "
                    f"{acked.run.disk.number} at {acked.at}, and is {held.get(offset)!r} on "
                    f"disk {process.disk.number}"
                )
            del owed.acked[offset]

    def _may_lack(self, process: Process, owed: Owed, acked: Acked) -> bool:
        """Whether a message may be missing that was acknowledged; see the module header."""
        family = acked.run.disk.family
        if any(other != family and at >= acked.at for other, at in owed.taken_over.items()):
            return True
        if acked.run.has_closed:
            return False
        # A copy went on in the place of the very process that gave the acknowledgement.
        joined = self.joined[family]
        for successor in joined[joined.index(acked.run) + 1 :]:
            if not successor.disk.had(acked):
                return True
            if successor.log is not None:
                return False
        return False

    # -- the end ----------------------------------------------------------------------------

    def heal(self) -> None:
        """No more faults: one disk of each node goes on, and all others are refused."""
        self._is_quiet = True
        had_faults = self.fault_rate > 0
        for disk in self.disks:
            disk.process = None
            disk.fs.kill()
        self.clock.advance(LEASE_SECONDS + 2)
        if self.restores is not None:
            self._settle()
            return
        for family, joined in self.joined.items():
            last = [joined[-1].disk] if joined else []
            disks = [disk for disk in self.disks if disk.family == family]
            opened = None
            for disk in [*last, *disks] if had_faults else last:
                try:
                    self.start(disk)
                except ConflictError:
                    continue
                opened = disk
                break
            if opened is None:
                if joined:
                    raise BrokenPromiseError(f"no disk of node {family} can be used")
                continue
            self._check_topics(opened)
            opened.process.log.close()
            opened.process = None
            for disk in disks:
                if disk is not opened and disk.fs.exists("/data/wal/.instances"):
                    self._check_refused(disk)

    def _settle(self) -> None:
        """One disk of each node goes on, with what was put back."""

        def start(disk: Disk) -> None:
            if any(one.family == disk.family and one.process is not None for one in self.disks):
                raise ConflictError("another copy runs")
            self.start(disk)

        self.restores.settle(start, lambda: self.clock.advance(LEASE_SECONDS + 2))

    def _check_topics(self, disk: Disk) -> None:
        process = disk.process
        for name in TOPICS:
            owed = self.owed[name].acked.values()
            try:
                topic = process.log.topic(name)
            except (ConflictError, NotFoundError) as error:
                # A copy from before the topic was made says that it has no files of it. One that
                # is older than what others know of it is refused.
                is_older = not all(map(disk.had, owed)) or self._has_newer(disk, name)
                if isinstance(error, WaitsForDiskError) and is_older:
                    continue
                if len(self.joined) == 1 and any(map(disk.had, owed)):
                    raise BrokenPromiseError(f"{name} cannot be opened: {error!r}") from error
                continue
            self._check_opened(process, name, topic)
            offset = topic.append(b"the end")
            topic.flush()
            topic.wait(offset, "synced")

    def _has_newer(self, disk: Disk, name: str) -> bool:
        """Whether another copy has files of a later term."""
        epochs = []
        for one in (disk, *(other for other in self.disks if other is not disk)):
            state = WalDirectory(one.fs, f"/data/wal{name}").load_state()
            epochs.append(state.epoch if state is not None else 0)
        return max(epochs) > epochs[0]

    def _check_refused(self, disk: Disk) -> None:
        try:
            self.start(disk)
        except ConflictError:
            return
        raise BrokenPromiseError(f"disk {disk.number}, an older copy, is not refused")


@replayable()
def run_seed(
    seed: int,
    *,
    turns: int = 60,
    trace: Callable[[str], None] | None = None,
    restores: bool = False,
) -> CloneWorld:
    """One world from its beginning to its end; with `restores`, stores are put back."""
    world = CloneWorld(seed, restores=restores)
    if trace is not None:
        world.trace = trace
    # A few topics are many: they come back in several transactions.
    with few_per_transaction(ister.bucket.membership), seeded_names(seed):
        world.live(turns)
    return world


if __name__ == "__main__":
    replay(
        run_seed,
        lambda world: (
            f"{world.acks} acknowledged, {world.copies} copies, {world.refused} refused, "
            f"{world.replaced} replaced"
        ),
    )
