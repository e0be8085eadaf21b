"""A small disk with a log and its metadata on it, driven by one seed: it fills up, and heals.

One node. Its disk has a size; the log's files, the reserve, the metadata store (which needs room
for every change, as SQLite does) and somebody else's files share it. The bucket is silent now and
then, somebody takes all the room at once and gives it back, the process is killed or loses its
power, also on a full disk, and begins again there.

What is checked:

- everything acknowledged is there, in order, unchanged, after every opening and at the end;
- when the bucket answers again, appends go on within `HEAL_SECONDS` of simulated time, although
  nobody gives room back, as long as the log has files that it can free. Where it has not, or where
  the disk was full before it could take its reserve, they go on when there is room;
- appends are refused while less is free than the settings say, and never without a reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ister.base.limits import KIB
from ister.config import load_config
from ister.errors import CapacityError, IsterError, UnavailableError
from ister.topic.log import Log
from ister.topic.topic import Topic
from tests.sim.world import BrokenPromiseError, InlineSchedule, replay, replayable
from tests.support.clock import ManualClock
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

TOPICS = ("/ns/a", "/ns/b")
HEAL_SECONDS = 60.0
_TICK_SECONDS = 0.5
_PAGE = 4 * KIB
_JOURNAL_PAGES = 6
_T = TypeVar("_T")


class DiskMetadata(MemoryMetadata):
    """Metadata on the log's disk: a change needs a page for its journal, or there is none.

    The journal is written over from its beginning when it has its size, as SQLite's is.
    """

    def __init__(self, clock: ManualClock, fs: MemoryFileSystem) -> None:
        super().__init__(clock)
        self._fs = fs
        self._pages = 0
        self.on_full: Callable[[], bool] = lambda: False
        fs.others_bytes = self.disk_bytes
        self.ballast = 0
        """What somebody else has on the disk."""

    def disk_bytes(self) -> int:
        stored = sum(len(key) + len(entry.value) for key, entry in self._entries.items())
        return self.ballast + self._pages * _PAGE + -(-stored // _PAGE) * _PAGE

    def _write(self) -> None:
        if self._pages < _JOURNAL_PAGES:
            if self._fs.room_for(_PAGE) < _PAGE:
                raise CapacityError("the metadata's disk is full")
            self._pages += 1

    def _with_room(self) -> None:
        try:
            self._write()
        except CapacityError:
            if not self.on_full():
                raise
            self._write()

    def _change(self, change: Callable[[], _T]) -> _T:
        self._with_room()
        return super()._change(change)

    def renew_lease(self, lease) -> float:
        self._with_room()
        return super().renew_lease(lease)

    def close(self) -> None:
        """It outlives the processes; the last one that closes it removes the journal."""
        self._pages = 0


class DiskWorld:
    """See the module header."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock = ManualClock()
        self.fs = MemoryFileSystem()
        self.fs.now_ms = lambda: self.clock.now_ns() // 1_000_000
        self.fs.capacity_bytes = rng.choice((400, 700)) * KIB
        self.meta = DiskMetadata(self.clock, self.fs)
        self.store = MemoryObjectStore(clock=self.clock)
        self.store.close = lambda: None
        self.store.before = self._enter_store
        self.is_silent = False
        self.min_free = rng.choice((0, 0, 32 * KIB, 64 * KIB))
        self.reserve = 48 * KIB
        self.acked: dict[str, dict[int, bytes]] = {name: {} for name in TOPICS}
        self.sent = 0
        self.heals = self.refused = self.crashes = 0
        self.had_reserve = True
        """Whether the log could take its reserve before the disk was full."""
        self.config = load_config(
            {
                "storage": {
                    "wal": {
                        "dir": "/data/wal",
                        "rotate_max_bytes": rng.choice((8, 64, 1024)) * KIB,
                        "stream_chunk_size": 64 * KIB,
                        "cache_capacity": 2,
                        "retention": {"time_minutes": None, "size_mb": None},
                    },
                    "uploader": {
                        "engine": "none",
                        "stream_chunk_size": 64 * KIB,
                        "max_object_bytes": rng.choice((8, 64)) * KIB,
                    },
                    "cloud": {"backend": "memory"},
                    "cloud_reader": {"fetch_chunk_size": 64 * KIB, "read_ahead": False},
                    "metadata": {"backend": "memory", "lease_ttl_seconds": 5},
                    "disk": {"min_free": self.min_free, "reserve": self.reserve},
                }
            },
            {},
        )
        self.log: Log | None = None
        self.schedule = InlineSchedule()

    def _enter_store(self, kind: str, key: str) -> None:
        if self.is_silent:
            raise UnavailableError(f"{kind}: the bucket is silent")

    @property
    def free(self) -> int:
        return self.fs.room_for(1 << 62)

    # -- lives ------------------------------------------------------------------------------

    def live(self, lives: int) -> None:
        """Fills the disk and heals it, `lives` times."""
        self.open()
        for name in TOPICS:
            self.topic(name)
        for _ in range(lives):
            for _ in range(self.rng.randrange(20, 120)):
                self.step()
            self.heal()
        self.end(in_order=True)
        self.open()
        self.check()
        self.end(in_order=True)

    def open(self) -> None:
        """Opens the log; on a full disk that has no reserve, when there is a little room."""
        self.schedule = InlineSchedule()
        self.meta.on_full = self._give_up
        try:
            self.log = self._open()
        except CapacityError:
            if self.had_reserve:
                raise BrokenPromiseError("the log cannot be opened, with its reserve") from None
            self.meta.ballast = 0
            self.log = self._open()
        self._look()

    def _open(self) -> Log:
        self.log = None
        return Log(
            self.config,
            fs=self.fs,
            clock=self.clock,
            scheduler=self.schedule,
            objects=self.store,
            metadata=self.meta,
            background=False,
        )

    def _give_up(self) -> bool:
        if self.log is not None and self.log.room.disk is not None:
            return self.log.room.disk.free_reserve()
        # Before `Log` is made the caller of a real store has the guard already.
        size = 0
        with suppress(IsterError):
            file = self.fs.open("/data/wal/.reserve")
            size = file.size()
            file.truncate(0)
            file.close()
        return size > 0

    def topic(self, name: str) -> Topic:
        return self.log.topic(name, create=True)

    def end(self, *, in_order: bool) -> None:
        """The process ends: in order, by a kill, or with the power."""
        if in_order:
            with suppress(IsterError):
                self.log.close()
        self.crashes += not in_order
        if self.rng.random() < 0.5:
            self.fs.kill()
        else:
            self.fs.crash(self.rng)
        # Its lease has to end before the next one may claim.
        self.clock.advance(10)

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> None:
        action = self.rng.choices(
            (self.append, self.tick, self.silence, self.fill, self.give_back, self.restart),
            (12, 6, 0.6, 0.25, 0.15, 0.3),
        )[0]
        action()

    def append(self) -> None:
        """Appends, and notes what is acknowledged."""
        topic = self.topic(self.rng.choice(TOPICS))
        for _ in range(self.rng.randrange(1, 8)):
            self.sent += 1
            payload = b"%d:" % self.sent + bytes(self.rng.choice((100, 2000, 6000)))
            self._look()
            is_low = self.free < self.min_free
            try:
                offset = topic.append(payload)
            except (CapacityError, UnavailableError):
                self.refused += 1
                continue
            if is_low:
                raise BrokenPromiseError(
                    f"{offset} was taken with {self.free} bytes free, of {self.min_free}"
                )
            if self.rng.random() < 0.6:
                with suppress(CapacityError, UnavailableError):
                    topic.wait(offset, "synced")
                    self.acked[topic.name][offset] = payload

    def _look(self) -> None:
        self.log.room.disk.measure()

    def tick(self, seconds: float | None = None) -> None:
        """Time passes, and the log's threads do what they do."""
        self.clock.advance(self.rng.choice((0.1, 0.5, 2.0)) if seconds is None else seconds)
        with suppress(IsterError):
            self.log.stores.membership.renew()
        self._look()
        now = self.clock.monotonic()
        for name in TOPICS:
            bucket = self.topic(name).bucket
            if bucket.uploads.is_due(now):
                with suppress(IsterError):
                    bucket.uploads.upload()
        self.schedule.run()
        if any(state.is_tight for state in self.log.room.disk.states):
            self.log.room.disk.free_space()
        self._look()

    def silence(self) -> None:
        self.is_silent = not self.is_silent

    def fill(self) -> None:
        """Somebody takes all the room that there is."""
        self._look()
        # A reserve is owed where it was held, or where there was plenty of room to take it.
        is_roomy = self.free >= 2 * max(self.min_free, self.reserve) + self.reserve
        self.had_reserve = is_roomy or self.log.room.disk.reserve_bytes >= self.reserve
        self.meta.ballast += self.free
        self._look()

    def give_back(self) -> None:
        self.meta.ballast = 0

    def restart(self) -> None:
        self.end(in_order=self.rng.random() < 0.5)
        self.open()
        self.check()

    # -- checks -----------------------------------------------------------------------------

    def heal(self) -> None:
        """The bucket answers: appends go on, on each topic."""
        self.is_silent = False
        # What a kill or a crash leaves cannot be freed before it is uploaded; nor can nothing.
        local = sum(self.fs._used_bytes(self.fs._directory(f"/data/wal{name}")) for name in TOPICS)
        if local < 4 * max(self.min_free, self.reserve) or not self.had_reserve:
            self.meta.ballast = 0
        deadline = self.clock.monotonic() + HEAL_SECONDS
        pending = dict.fromkeys(TOPICS)
        error: IsterError | None = None
        while pending:
            if self.clock.monotonic() > deadline:
                raise BrokenPromiseError(
                    f"not healed: {self.free} bytes free, ballast {self.meta.ballast}, "
                    f"reserve {self.log.room.disk.reserve_bytes}: {error}"
                )
            self.tick(_TICK_SECONDS)
            for name in list(pending):
                topic = self.topic(name)
                try:
                    if pending[name] is None:
                        self.sent += 1
                        payload = b"%d:healed" % self.sent
                        pending[name] = (topic.append(payload), payload)
                    offset, payload = pending[name]
                    topic.wait(offset, "synced")
                except (CapacityError, UnavailableError) as refused:
                    error = refused
                else:
                    self.acked[name][offset] = payload
                    del pending[name]
        self.heals += 1
        self.check()

    def check(self) -> None:
        """Everything acknowledged is there."""
        if self.is_silent:
            return
        for name in TOPICS:
            found = {m.offset: m.payload for m in self.topic(name).read()}
            if sorted(found) != list(range(len(found))):
                raise BrokenPromiseError(f"{name} has a hole")
            for offset, payload in self.acked[name].items():
                if found.get(offset) != payload:
                    raise BrokenPromiseError(f"{offset} of {name} was acknowledged and is gone")


@replayable(SimulatedCrash)
def run_seed(seed: int, *, lives: int = 4) -> DiskWorld:
    """One world from its beginning to its end."""
    world = DiskWorld(seed)
    world.live(lives)
    return world


if __name__ == "__main__":
    replay(
        run_seed,
        lambda world: (
            f"healed {world.heals} times, refused {world.refused}, {world.crashes} crashes"
        ),
    )
