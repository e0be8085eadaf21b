"""Two to nine brokers that share a bucket and a metadata store, and move topics; by one seed.

Each broker has a real log on a disk of its own, and the real members, leader, assignments and
routes. What a broker's loop does, this world does in turns on one thread: rounds (own entry, lead,
follow the assignments), creations through any broker, appends, uploads, moves, drains, rebalances.
Brokers are killed, lose their power or their disk, end in order, stand still for longer than their
lease, and are cut off from the metadata store or from the bucket. In the middle of any call to the
metadata store a broker may be paused, while time passes and the others have their turns, or killed;
answers get lost. A topic has the level `synced` or `tiered`, or no log.

In a world with `diskless`, most brokers keep no files (`storage.mode: bucket`), so whatever ends
such a process loses all that it had, and all topics with a log have the level `tiered`.

With `restores`, stores are put back to older states, too, and other rules apply (`restores`).

What is checked, by reading the stores directly, without the code under test:

- an acknowledgement comes from the process that has the topic, by the topic's record;
- what was acknowledged is in the topic from then on, once, at its offset, whoever opens it; but
  for what an operator has given up with the disk of a broker that is down;
- an assignment that a leader writes is written while that process has the leader's key;
- at most one broker with a lease takes itself for the owner of a topic without a log;
- a broker that was drained leaves nothing that needs its disk;
- when the faults are over, every topic that does not wait for a disk is served after a bounded
  time, by one broker, on which all brokers agree: the one that it is assigned to, or that has its
  disk; then assignments do not change any more, and no request is left.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import ister.broker.cluster.assignments
import ister.bucket.membership
from ister.base.model import TopicName
from ister.broker.cluster.cluster import Cluster
from ister.bucket.members import Load, Member, MemberState
from ister.config import ClusterConfig, Config, RebalanceConfig, Strategy, load_config
from ister.errors import (
    ClosedError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    InvariantError,
    NotFoundError,
    UnavailableError,
)
from ister.topic.log import Log
from ister.topic.topic import Topic
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
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

__all__ = ["ClusterWorld", "run_seed"]

ROOT: Final = "/danube"
LEASE_SECONDS: Final = 6
BEAT_SECONDS: Final = 2.5
SWEEP_SECONDS: Final = 8.0
LOGGED: Final = tuple(f"/ns/t{number}" for number in range(5))
UNLOGGED: Final = ("/ns/u0", "/ns/u1")
_SETTLE_BEATS: Final = 40
_ASSIGNMENTS: Final = f"{ROOT}/cluster/assignments/"
_EXPECTED: Final = (ConflictError, FencedError, UnavailableError, NotFoundError, ClosedError)


class SharedClock(ManualClock):
    """A clock on which one broker's sleep is time for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self.on_sleep()


@dataclass(eq=False)
class Process:
    """One life of a broker."""

    log: Log
    cluster: Cluster
    schedule: InlineSchedule
    beat_at: float
    sweep_at: float = 0.0
    members: frozenset[tuple[str, MemberState]] = frozenset()
    changes: int = -1
    unlogged: set[str] = field(default_factory=set)

    @property
    def node(self) -> str:
        return self.cluster.own.node


@dataclass(eq=False)
class Machine:
    """A broker's machine: its disk, and its connections."""

    number: int
    fs: MemoryFileSystem
    is_diskless: bool = False
    process: Process | None = None
    paused_until: float = 0.0
    no_metadata_until: float = 0.0
    no_bucket_until: float = 0.0


class ClusterWorld:
    """See the module header."""

    def __init__(self, seed: int, *, diskless: bool = False, restores: bool = False) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock = SharedClock()
        self.clock.on_sleep = self._on_sleep
        self.store = MemoryObjectStore(clock=self.clock)
        self.store.close = lambda: None
        self.store.before = self._before_bucket
        self.meta = MemoryMetadata(self.clock)
        self.meta.close = lambda: None  # both outlive the processes
        self.meta.before = self._before
        self.meta.after = self._after
        self.fault_rate = rng.choice((0.0, 0.0, 0.01, 0.03))
        count = rng.choice((2, 2, 3, 3, 3, 4, 5)) if rng.random() < 0.97 else rng.randrange(6, 10)
        self.machines = [Machine(number, MemoryFileSystem()) for number in range(count)]
        self.levels = {name: rng.choice(("synced", "tiered")) for name in LOGGED}
        if diskless:
            self.levels = dict.fromkeys(LOGGED, "tiered")
            for machine in self.machines:
                machine.is_diskless = rng.random() < 0.7
            self.machines[0].is_diskless = True
        self.acked: dict[str, dict[int, bytes]] = {name: {} for name in LOGGED}
        self.lost_nodes: set[str] = set()
        self.unlogged_exists: set[str] = set()
        self.at = 0
        self.acks = self.created = self.handed_over = self.failed_over = 0
        self.elections = self.drains = self.rebalanced = self.waiting = 0
        self.taken_over = 0
        self.trace: Callable[[str], None] = lambda text: None
        self._running: list[Machine] = []
        self._interrupt_in = 0
        self._is_quiet = False
        self._wishing: list[Machine] = []
        self._entry_before: object = None
        self._changes = 0
        self._owner_of: dict[str, str] = {}
        self._leader = ""
        self.rebalance = RebalanceConfig(
            enabled=rng.random() < 0.5,
            threshold_percent=20,
            interval_seconds=4,
            cooldown_seconds=8,
            max_moves=2,
        )
        self.strategy = Strategy.FAIR
        self._config = _config(mode="wal_cloud", wal={"dir": "/data/wal"})
        self._diskless_config = _config(mode="bucket", wal={})
        self.restores: Restores | None = None
        self._expected = REFUSALS if restores else _EXPECTED
        if restores:
            self.restores = Restores(
                seed,
                meta=self.meta,
                store=self.store,
                machines=lambda: self.machines,
                names=LOGGED,
                stop=self.kill,
                clock=self.clock,
                quietly=self._quietly,
                trace=self._say,
            )

    # -- what the stores hold, read directly ------------------------------------------------

    def _peek(self, key: str) -> dict[str, object] | None:
        """A value of the metadata store; nothing happens meanwhile."""
        found = self.meta._find(ROOT + key)
        return None if found is None else json.loads(found.value)

    def _record(self, topic: str) -> dict[str, object] | None:
        return self._peek(f"/topics{topic}")

    def _owner(self, topic: str) -> str | None:
        found = self._peek(f"/cluster/owners{topic}")
        return None if found is None else str(found["node"])

    def _assigned(self) -> dict[str, tuple[str, int]]:
        """The node and the revision of each assignment."""
        with self._quietly():
            found = self.meta.range(_ASSIGNMENTS)
        return {
            "/" + item.key.removeprefix(_ASSIGNMENTS): (
                json.loads(item.value)["node"],
                item.revision,
            )
            for item in found
        }

    def _last_node(self, topic: str) -> str | None:
        """The node whose disk a topic needs; None if it does not exist or needs none."""
        record = self._record(topic)
        if record is None or self.levels[topic] == "tiered":
            return None
        if self._peek(f"/storage/topics{topic}/state") is not None:
            return None
        return str(record["lineage"][-1]["node"])

    # -- faults -----------------------------------------------------------------------------

    def _before(self, kind: str, key: str) -> None:
        if self._is_quiet:
            return
        machine = self._running[-1] if self._running else None
        if self._interrupt_in and machine is not None:
            self._interrupt_in -= 1
            if not self._interrupt_in:
                if self.rng.random() < 0.2:
                    self.trace(f"{machine.number} dies before {kind} {key}")
                    raise SimulatedCrash
                self._interrupt()
        if machine is not None and self.clock.monotonic() < machine.no_metadata_until:
            raise UnavailableError(f"no answer to {kind}: cut off")
        if self.rng.random() < self.fault_rate:
            raise UnavailableError(f"no answer to {kind}")
        self._entry_before = self.meta._entries.get(key)

    def _after(self, kind: str, key: str) -> None:
        if self._is_quiet:
            return
        if kind == "transact" and key.startswith(_ASSIGNMENTS):
            self._changes += 1
            self._check_leading(key)
        if kind in ("put", "delete", "transact") and self.rng.random() < self.fault_rate:
            raise CommitUnknownError(f"no answer to {kind}")

    def _before_bucket(self, kind: str, key: str) -> None:
        if self._is_quiet or not self._running:
            return
        if self.clock.monotonic() < self._running[-1].no_bucket_until:
            raise UnavailableError(f"no answer to {kind}: cut off")

    def _check_leading(self, key: str) -> None:
        """An assignment was written, perhaps: was it by the leader?"""
        if self.restores is not None:
            return  # its key may be that of a process that ended long ago
        entry = self.meta._entries.get(key)
        if entry is self._entry_before:
            return
        self.trace(f"{self._running[-1].number}: {key} = {entry and entry.value}")
        if self._running[-1] in self._wishing:
            return
        process = self._running[-1].process
        leader = self._peek("/cluster/leader")
        instance = process.log.stores.membership.instance if process is not None else ""
        if leader is None or leader["instance"] != instance:
            raise BrokenPromiseError(
                f"{key} was written by broker {self._running[-1].number}, which does not lead"
            )

    def _interrupt(self) -> None:
        """Time passes, and the others have their turns."""
        self.trace("paused")
        pause = self.rng.choice((0.0, 1.0, LEASE_SECONDS + 1, LEASE_SECONDS + 1, 15.0))
        end = self.clock.monotonic() + pause
        while self.clock.monotonic() < end:
            self.clock.advance(min(BEAT_SECONDS, end - self.clock.monotonic()))
            self._beat_all()
        with other_processes():
            for _ in range(self.rng.randrange(1, 4)):
                self.turn()
        self.trace("goes on")

    def _on_sleep(self) -> None:
        if not self._is_quiet:
            self._beat_all()

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Nothing fails in here, and no time passes for others."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def _wish(self, process: Process, name: str, to: str, reason: str) -> None:
        """Assigns a topic without leading, as brokers do that hand topics over."""
        self._wishing.append(self._running[-1])
        try:
            process.cluster.assign(name, to, reason)
        finally:
            self._wishing.pop()

    def _say(self, text: str) -> None:
        self.trace(text)

    # -- lives ------------------------------------------------------------------------------

    def live(self, turns: int) -> None:
        """Lives through `turns` turns, and checks that everything is in order."""
        logging.disable(logging.CRITICAL)
        try:
            for machine in self.machines:
                self._act(machine, self.start)
            for name in LOGGED:
                self._act(self.rng.choice(self.machines), partial(self._use, name=name))
            for _ in range(turns):
                if self.rng.random() < 0.25:
                    self._interrupt_in = self.rng.randrange(1, 25)
                self.turn()
                self.clock.advance(self.rng.choice((0.05, 0.2, 0.5, 1.0)))
                self._beat_all()
                self._interrupt_in = 0
                if self.restores is not None:
                    self.restores.maybe_act()
                else:
                    self._check_unlogged()
            self.heal()
        finally:
            logging.disable(logging.NOTSET)

    def _free(self) -> list[Machine]:
        now = self.clock.monotonic()
        return [
            one for one in self.machines if one not in self._running and one.paused_until <= now
        ]

    def turn(self) -> None:
        """One thing that happens at one broker."""
        free = self._free()
        if not free:
            return
        self.at += 1
        machine = self.rng.choice(free)
        if machine.process is None:
            self._act(machine, self.rng.choice((self.start, self.start, self.idle)))
            return
        actions = {
            self.append: 10,
            self.create: 3,
            self.use_unlogged: 2,
            self.look_up: 2,
            self.upload: 2,
            self.beat: 2,
            self.move: 1.5,
            self.take_over: 0.7,
            self.idle: 1,
            self.pause: 0.7,
            self.cut_metadata: 0.5,
            self.cut_bucket: 0.4,
            self.kill: 0.5,
            self.cut_power: 0.3,
            self.lose_disk: 0.3,
            self.drain: 0.5,
            self.activate: 0.7,
            self.end: 0.4,
        }
        self._act(machine, self.rng.choices(list(actions), list(actions.values()))[0])

    def _act(self, machine: Machine, action: Callable[[Machine], None]) -> None:
        self.trace(f"{self.at} ({self.clock.monotonic():.1f} s): {machine.number}: {_name(action)}")
        self._running.append(machine)
        try:
            action(machine)
        except SimulatedCrash:
            self.kill(machine)
        except InvariantError as error:
            raise BrokenPromiseError(f"{error!r}") from error
        except self._expected as error:
            self.trace(f"{machine.number}: {error!r}")
        finally:
            self._running.pop()
        if self.restores is not None:
            self.restores.check_kept()

    def start(self, machine: Machine) -> None:
        schedule = InlineSchedule()
        log = Log(
            self._diskless_config if machine.is_diskless else self._config,
            fs=None if machine.is_diskless else machine.fs,
            clock=self.clock,
            scheduler=schedule,
            objects=self.store,
            metadata=self.meta,
            background=False,
        )
        node = log.stores.membership.node
        own = Member(
            node=node,
            broker_url=f"http://{node}",
            connect_url=f"http://{node}",
            flight_url=f"grpc://{node}",
            state=MemberState.STARTING,
        )
        config = ClusterConfig(strategy=self.strategy, rebalance=self.rebalance)
        cluster = Cluster(own, log.stores, config=config, clock=self.clock)
        machine.process = process = Process(log, cluster, schedule, self.clock.monotonic())
        cluster.members.publish()
        try:
            names = cluster.own_topics()
            for name in log.topics() if names is None else names:
                with suppress(*_EXPECTED):
                    self._serve(process, name)
        finally:
            cluster.members.publish(state=MemberState.ACTIVE)

    def idle(self, machine: Machine) -> None:
        self.clock.advance(self.rng.choice((0.5, 2.0)))

    def pause(self, machine: Machine) -> None:
        """The process stands still; others go on."""
        seconds = self.rng.choice((2.0, LEASE_SECONDS + 1.0, 20.0))
        machine.paused_until = self.clock.monotonic() + seconds

    def cut_metadata(self, machine: Machine) -> None:
        seconds = self.rng.choice((1.0, LEASE_SECONDS + 2.0))
        machine.no_metadata_until = self.clock.monotonic() + seconds

    def cut_bucket(self, machine: Machine) -> None:
        machine.no_bucket_until = self.clock.monotonic() + self.rng.choice((2.0, 10.0))

    def kill(self, machine: Machine) -> None:
        machine.process = None
        machine.fs.kill()

    def cut_power(self, machine: Machine) -> None:
        machine.process = None
        machine.fs.crash(self.rng)
        self._rebase()

    def _rebase(self) -> None:
        if self.restores is not None:
            self.restores.rebase()

    def lose_disk(self, machine: Machine) -> None:
        """The machine gets a new disk, and with it becomes another node."""
        self.lost_nodes.add(machine.process.node)
        machine.process = None
        machine.fs = MemoryFileSystem()
        self._rebase()

    def end(self, machine: Machine) -> None:
        """The broker hands over and ends, as SIGTERM has it."""
        process = machine.process
        try:
            self.drain(machine)
        finally:
            self._end(machine, process)

    def _end(self, machine: Machine, process: Process) -> None:
        try:
            with suppress(*_EXPECTED):
                process.cluster.leave()
                process.log.close()
        finally:
            machine.process = None
            machine.fs.kill()

    # -- rounds -----------------------------------------------------------------------------

    def _beat_all(self) -> None:
        """The rounds of all brokers that are due."""
        with other_processes():
            for machine in self._free():
                process = machine.process
                if process is not None and process.beat_at <= self.clock.monotonic():
                    self._act(machine, self.beat)

    def beat(self, machine: Machine) -> None:
        """Renews the lease, and does what `Assignee.run_round` does."""
        process = machine.process
        now = self.clock.monotonic()
        process.beat_at = now + BEAT_SECONDS
        process.log.stores.membership.renew()
        if self.restores is not None:
            self.restores.renew(process.log)
        cluster = process.cluster
        members = cluster.members.recent()
        served = [one for one in process.log._topics.values() if not one.has_stopped]
        cluster.members.publish(load=Load(topics=len(served)))
        for lost in cluster.renew_unlogged():
            process.unlogged.discard(lost)
        states = frozenset((one.node, one.state) for one in members)
        has_changed = states != process.members or now >= process.sweep_at
        cluster.lead(has_changed=has_changed)
        self._note_leader(process)
        process.members = states
        if now >= process.sweep_at:
            process.sweep_at = now + SWEEP_SECONDS
        # A watch tells a broker that assignments have changed.
        if len(members) < 2 or not (has_changed or process.changes != self._changes):
            return
        process.changes = self._changes
        changes = cluster.assignment_changes()
        for name in changes.opens:
            with suppress(*_EXPECTED):
                self._serve(process, name)
        for name, node in changes.leaves.items():
            with suppress(*_EXPECTED):
                self._unload(process, name, node, "moved")

    def _note_leader(self, process: Process) -> None:
        if process.cluster.leadership.is_leader and process.node != self._leader:
            self._leader = process.node
            self.elections += 1

    # -- topics -----------------------------------------------------------------------------

    def _route(self, process: Process, name: str, *, creates: bool = False) -> Member:
        return process.cluster.route(
            TopicName.parse(name),
            is_unlogged=lambda: name in self.unlogged_exists,
            creates=creates,
        )

    def _serve(self, process: Process, name: str, *, creates: bool = False) -> Topic | None:
        """Opens a topic where it should be; see `Topics`."""
        if self._route(process, name, creates=creates).node != process.node:
            raise UnavailableError("elsewhere", topic=name)
        if name in UNLOGGED:
            process.cluster.claim_unlogged(TopicName.parse(name))
            process.unlogged.add(name)
            self.unlogged_exists.add(name)
            return None
        log = process.log
        before = log._topics.get(name)
        try:
            topic = log.topic(name)
        except NotFoundError:
            if not creates:
                raise
            topic = log.topic(name, create=True, ack=self.levels[name])
            self.created += 1
        if topic is not before:
            self._check_opened(process, name, topic)
        return topic

    def _served(self, machine: Machine) -> list[str]:
        topics = machine.process.log._topics.items()
        return sorted(name for name, topic in topics if not topic.has_stopped)

    def create(self, machine: Machine) -> None:
        """A client asks any broker for a new topic, and goes where it is sent."""
        self._use(machine, self.rng.choice(LOGGED))

    def use_unlogged(self, machine: Machine) -> None:
        self._use(machine, self.rng.choice(UNLOGGED))

    def _use(self, machine: Machine, name: str) -> None:
        if machine.process is None:
            return
        node = self._route(machine.process, name, creates=True).node
        for other in [machine, *self._free()]:
            if other.process is not None and other.process.node == node:
                self._running.append(other)
                try:
                    self._serve(other.process, name, creates=True)
                except SimulatedCrash:
                    self.kill(other)
                finally:
                    self._running.pop()

    def look_up(self, machine: Machine) -> None:
        self._route(machine.process, self.rng.choice((*LOGGED, *UNLOGGED)))

    def append(self, machine: Machine) -> None:
        """A producer sends to a topic that this broker has, and waits for its answer."""
        served = self._served(machine)
        if served:
            self._append(machine.process, self.rng.choice(served))

    def _append(self, process: Process, name: str) -> None:
        topic = process.log.topic(name)
        if self.restores is not None:
            machine = next(one for one in self.machines if one.process is process)
            self.restores.append(machine, name, topic, process.schedule)
            return
        payload = b"%d of %s" % (self.at * 1000 + self.rng.randrange(1000), name.encode())
        offset = topic.append(payload)
        process.schedule.run()
        if self.levels[name] == "tiered":
            topic.upload()
        topic.wait(offset)
        record = self._record(name)
        if record is None or record["claim"] != topic.bucket.owned.record.claim:
            raise BrokenPromiseError(f"{name}: {process.node} acknowledged {offset}; it is not its")
        if offset in self.acked[name]:
            raise BrokenPromiseError(f"{name}: {offset} was acknowledged twice")
        self.acks += 1
        self.acked[name][offset] = payload

    def upload(self, machine: Machine) -> None:
        served = self._served(machine)
        if served:
            topic = machine.process.log.topic(self.rng.choice(served))
            topic.upload()
            if machine.is_diskless:
                topic.bucket.retention.drop_tiered(is_enough=lambda: False)

    def _unload(self, process: Process, name: str, to: str, reason: str) -> None:
        """Hands a topic over; see `Topics.unload`."""
        topic = process.log._topics.get(name)
        if name not in process.unlogged and (topic is None or topic.has_stopped):
            self._serve(process, name)
        if name in UNLOGGED:
            self._wish(process, name, to, reason)
            process.unlogged.discard(name)
            process.cluster.release_unlogged(TopicName.parse(name))
        else:
            assured = process.log.topic(name).bucket.prepare_seal()
            if self.rng.random() < 0.5:
                self._append(process, name)
            self._wish(process, name, to, reason)
            process.log.seal(name, assured=assured)
            self.handed_over += 1
        self._wish(process, name, to, reason)

    def move(self, machine: Machine) -> None:
        """An operator asks any broker to move a topic; see `Topics.move`."""
        process, name = machine.process, self.rng.choice((*LOGGED, *UNLOGGED))
        targets = [one.node for one in process.cluster.brokers() if one.is_active]
        if not targets:
            return
        to = self.rng.choice(targets)
        node = self._route(process, name).node
        if node == to:
            return
        if node == process.node:
            self._serve(process, name)
            self._unload(process, name, to, "moved")
        else:
            self._wish(process, name, to, "moved")

    def take_over(self, machine: Machine) -> None:
        """An operator gives up what is on the disk of a broker that is down; see `Topics`."""
        process = machine.process
        waiting = [one for one in LOGGED if self._last_node(one) and not self._owner(one)]
        if not waiting:
            return
        name = self.rng.choice(waiting)
        node = self._last_node(name)
        if any(one.node == node for one in process.cluster.brokers()):
            return
        if self.restores is not None and self.restores.is_pending:
            return  # an operator accepts first what was put back
        try:
            process.log.topic(name, take_over=True)
        finally:
            begun = self._record(name)["lineage"][-1]
            if begun["node"] == process.node != node:
                self.trace(f"{name} was taken over from {begun['start']} on")
                self.taken_over += 1
                if self.restores is not None:
                    self.restores.note_taken_over(name, begun["start"])
                acked = self.acked[name]
                for offset in [one for one in acked if one >= begun["start"]]:
                    del acked[offset]
        self._wish(process, name, process.node, "taken over")

    def drain(self, machine: Machine) -> None:
        """Hands all topics over; see `Topics.hand_over`."""
        process, cluster = machine.process, machine.process.cluster
        cluster.drain()
        placement, is_whole = cluster.placement(), True
        served = [*self._served(machine), *sorted(process.unlogged)]
        chosen = {name: placement.choose(name) for name in served}
        for name, to in chosen.items():
            if to is None:
                continue
            try:
                self._unload(process, name, to, "its broker is drained")
            except _EXPECTED as error:
                self.trace(f"{machine.number}: {name} not handed over: {error!r}")
                is_whole = False
        if is_whole and any(chosen.values()) and self.restores is None:
            self.drains += 1
            for name in served:
                if name in LOGGED and self._last_node(name) == process.node:
                    raise BrokenPromiseError(f"{name} was not handed over by a drain")

    def activate(self, machine: Machine) -> None:
        """A drained broker takes topics again."""
        machine.process.cluster.members.publish(state=MemberState.ACTIVE)

    # -- checks -----------------------------------------------------------------------------

    def _check_opened(self, process: Process, name: str, topic: Topic) -> None:
        if self.restores is not None:
            machine = next(one for one in self.machines if one.process is process)
            self.restores.note_opened(machine, name)
            return
        with self._quietly():
            record = self._record(name)
            if record is None or record["claim"] != topic.bucket.owned.record.claim:
                return  # replaced while it was opened; it notices before its first answer
            held = read_all(topic)
        before = self._owner_of.get(name)
        self.failed_over += before is not None and before != process.node
        self._owner_of[name] = process.node
        if sorted(held) != list(range(len(held))):
            raise BrokenPromiseError(f"{name}: holes: {sorted(held)}")
        for offset, payload in self.acked[name].items():
            if held.get(offset) != payload:
                raise BrokenPromiseError(
                    f"{name}: {offset} was {payload!r}, and is {held.get(offset)!r} at "
                    f"{process.node}"
                )

    def _check_unlogged(self) -> None:
        for name in UNLOGGED:
            holders = []
            for machine in self.machines:
                process = machine.process
                if process is None or name not in process.unlogged:
                    continue
                lease = process.log.stores.membership.lease
                held = process.cluster._unlogged.get(name)
                if held is lease and self.clock.boottime() < lease.valid_until:
                    holders.append(machine.number)
            if len(holders) > 1:
                raise BrokenPromiseError(f"{name}: brokers {holders} all have it")

    # -- the end ----------------------------------------------------------------------------

    def heal(self) -> None:
        """No more faults: the brokers that are left settle, and serve what can be served."""
        self.fault_rate, self._interrupt_in = 0.0, 0
        for machine in self.machines:
            machine.paused_until = machine.no_metadata_until = machine.no_bucket_until = 0.0
            if machine.process is None and self.rng.random() < 0.7:
                self._act(machine, self.start)
        if self.restores is not None:
            self._settle_restored()
            return
        if all(machine.process is None for machine in self.machines):
            self._act(self.machines[0], self.start)
        live = [machine for machine in self.machines if machine.process is not None]
        for machine in live:
            self._act(machine, self.activate)
        # Longer than a lease, a sweep and the time in which a moved topic stays.
        self._settle(still=5)
        for name in LOGGED:
            self._check_served(live, name)
        self._settle(still=2)
        self._check_settled(live)

    def _settle_restored(self) -> None:
        """All brokers start again, and topics go on with what was put back."""
        for machine in self.machines:
            self.kill(machine)
        with self._quietly():
            self.restores.settle(
                lambda machine: self._act(machine, self.start),
                lambda: self.clock.advance(LEASE_SECONDS + 1),
            )

    def _settle(self, *, still: int) -> None:
        """Passes beats until assignments have not changed for `still` of them."""
        seen, left, since = self._assigned(), _SETTLE_BEATS, 0
        while since < still:
            if not left:
                raise BrokenPromiseError(f"assignments do not settle: {seen}")
            left -= 1
            self.clock.advance(BEAT_SECONDS)
            self._beat_all()
            self._check_unlogged()
            before, seen = seen, self._assigned()
            since = since + 1 if seen == before else 0

    def _check_served(self, live: list[Machine], name: str) -> None:
        nodes = {machine.process.node: machine for machine in live}
        record = self._record(name)
        if record is None or record["state"] != "open":
            if self.acked[name]:
                raise BrokenPromiseError(f"{name} is gone")
            return
        disk = self._last_node(name)
        if disk is not None and disk not in nodes:
            self.waiting += 1
            if self._owner(name) is not None:
                raise BrokenPromiseError(f"{name} has an owner without its disk")
            return
        routes = {self._route(machine.process, name).node for machine in live}
        if len(routes) != 1:
            raise BrokenPromiseError(f"{name}: brokers send clients to {routes}")
        node = routes.pop()
        with self._running_on(nodes[node]):
            self._serve(nodes[node].process, name)
            self._append(nodes[node].process, name)
        topic = nodes[node].process.log.topic(name)
        self._check_opened(nodes[node].process, name, topic)

    @contextmanager
    def _running_on(self, machine: Machine) -> Iterator[None]:
        self._running.append(machine)
        try:
            yield
        finally:
            self._running.pop()

    def _check_settled(self, live: list[Machine]) -> None:
        nodes = {machine.process.node: machine for machine in live}
        for name, (node, _) in self._assigned().items():
            owner = self._owner(name)
            if len(live) > 1 and owner is not None and node != owner:
                raise BrokenPromiseError(f"{name} is at {owner} and assigned to {node}")
        for name in LOGGED:
            owner = self._owner(name)
            holders = [
                node
                for node, machine in nodes.items()
                if name in self._served(machine)
                and machine.process.log._topics[name].bucket.owned.is_leased
            ]
            if owner is None:
                continue
            if owner not in nodes or owner not in holders:
                raise BrokenPromiseError(f"{name} belongs to {owner}, which does not serve it")
        for machine in live:
            for name in machine.process.unlogged:
                if self._owner(name) != machine.process.node:
                    raise BrokenPromiseError(f"{name}: {machine.number} serves what it has not")
        with self._quietly():
            left = [item.key for item in self.meta.range(f"{ROOT}/cluster/unassigned/")]
        if left and len(live) > 1:
            raise BrokenPromiseError(f"requests are left: {left}")
        self.rebalanced += sum(len(one.process.cluster.leader.moves) for one in live)


def _config(**storage: object) -> Config:
    """Settings with stores in memory; `storage` are laid over them."""
    wal = {**storage.pop("wal"), "rotate_max_bytes": 4096}
    stores = {
        "uploader": {"engine": "none"},
        "cloud": {"backend": "memory"},
        "cloud_reader": {"read_ahead": False},
        "metadata": {"backend": "memory", "lease_ttl_seconds": LEASE_SECONDS},
    }
    return load_config({"storage": {**stores, **storage, "wal": wal}}, {})


def _name(action: Callable[..., object]) -> str:
    return action.func.__name__ if isinstance(action, partial) else action.__name__


@replayable()
def run_seed(
    seed: int,
    *,
    turns: int = 60,
    trace: Callable[[str], None] | None = None,
    diskless: bool = False,
    restores: bool = False,
) -> ClusterWorld:
    """One world from its beginning to its end; with `diskless`, most brokers keep no files."""
    world = ClusterWorld(seed, diskless=diskless, restores=restores)
    if trace is not None:
        world.trace = trace
    # A few topics are many: they take several transactions.
    modules = ister.bucket.membership, ister.broker.cluster.assignments
    with few_per_transaction(*modules), seeded_names(seed):
        world.live(turns)
    return world


if __name__ == "__main__":
    replay(
        run_seed,
        lambda world: (
            f"{len(world.machines)} brokers, {world.acks} acknowledged, {world.handed_over} "
            f"handed over, {world.failed_over} changes of owner, {world.elections} leaders"
        ),
    )
