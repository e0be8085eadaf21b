"""Seeded crashes between the local log, the bucket and the metadata store; owners that wake late.

The worlds of `tier_world` take what a seed gives them. The tests below them go through one
situation operation by operation: the life of a process ends, or another node takes the topic, at
the first operation, then at the second, until there is none left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from ister.base.model import TopicName
from ister.bucket.names import object_key
from ister.config import load_config
from ister.errors import ConflictError, FencedError, NotFoundError, UnavailableError
from ister.format.descriptor import ObjectDescriptor
from ister.topic.log import Log
from ister.topic.topic import Topic
from tests.sim.tier_world import POINTS, read_all, run_seed
from tests.sim.world import InlineSchedule
from tests.support.clock import ManualClock
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore
from tests.support.scale import first_seed, scaled

RUNS = scaled(100, 20_000)
HITS_PER_FAILPOINT = scaled(1, 50)
TOPIC = "/ns/a"
NAME = TopicName.parse(TOPIC)


@pytest.mark.sim
@pytest.mark.timeout(6000)
def test_any_crash_between_the_tiers_leaves_every_promise_kept() -> None:
    """Goal: no crash, fault, pause or change of owner loses, changes, repeats or invents anything.

    Method: worlds from consecutive seeds, beginning with `first_seed`, which is printed.
    """
    first = first_seed()
    crashes = faults = messages = takeovers = shared = removed = recovered = 0
    for seed in range(first, first + RUNS):
        world = run_seed(seed)
        if world.sharing is not None:
            shared += len(world.sharing.puts)
            removed += world.sharing.removed
            recovered += world.sharing.recovered
        crashes += world.crashes
        faults += world.faults
        messages += world.sent
        takeovers += world.takeovers
    print(
        f"{RUNS} worlds from seed {first}: {crashes} crashes, {faults} faults, "
        f"{takeovers} take-overs, {messages} messages; {shared} express objects, "
        f"{removed} removed, {recovered} recoveries"
    )
    assert crashes > RUNS
    assert messages > crashes
    assert shared >= removed > RUNS / 10
    assert recovered > RUNS / 10


@pytest.mark.sim
@pytest.mark.parametrize(
    "seed",
    [
        # The node that uploaded knew that its clock was wrong; the next owner did not.
        3170120284,
        # The clock that ended a step was wrong as well.
        500018739,
        500022918,
        900018612,
    ],
)
def test_worlds_whose_clocks_once_broke_a_promise(seed: int) -> None:
    run_seed(seed, shares=False)


@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", POINTS)
def test_a_crash_at_every_failpoint_leaves_every_promise_kept(name: str) -> None:
    hits = 0
    for seed in range(1000):
        hits += name in run_seed(seed, turns=30, failpoint=name).crashed_at
        if hits >= HITS_PER_FAILPOINT:
            break
    assert hits >= HITS_PER_FAILPOINT


# -- one situation, every operation ---------------------------------------------------------


class Stage:
    """Two machines and the stores, and a hook that acts at one operation of a process."""

    def __init__(self, **storage: dict) -> None:
        self.clock = ManualClock()
        self.store = MemoryObjectStore(clock=self.clock)
        self.meta = MemoryMetadata(self.clock)
        self.meta.close = lambda: None
        self.disks = [MemoryFileSystem(), MemoryFileSystem()]
        for disk in self.disks:
            disk.now_ms = lambda: self.clock.now_ns() // 1_000_000
        self.config = load_config(
            {
                "storage": {
                    "wal": {
                        "dir": "/data/wal",
                        "rotate_max_bytes": 4096,
                        "cache_capacity": 1,
                        "retention": {"time_minutes": 0, "size_mb": None},
                    },
                    "uploader": {"engine": "none", "max_object_bytes": 4096},
                    "cloud_reader": {"read_ahead": False},
                    "metadata": {"backend": "memory", "lease_ttl_seconds": 5},
                    "cloud": {"backend": "memory"},
                    **storage,
                }
            },
            {},
        )

    def open(self, node: int) -> Log:
        """A process begins on a machine."""
        return Log(
            self.config,
            fs=self.disks[node],
            clock=self.clock,
            scheduler=InlineSchedule(),
            objects=self.store,
            metadata=self.meta,
            background=False,
        )

    def act_at(self, number: int, action: Callable[[], None], *, disk: int | None = None) -> None:
        """Has `action` called at an operation on a store, or on a disk; then no more."""
        left = number

        def hook(kind: str, key: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.pass_all()
                action()

        self.store.before = self.store.after = self.meta.before = self.meta.after = hook
        if disk is not None:
            self.disks[disk].before = hook

    def pass_all(self) -> None:
        """No more hooks."""
        self.store.before = self.store.after = lambda kind, key: None
        self.meta.before = self.meta.after = lambda kind, key: None
        for disk in self.disks:
            disk.before = lambda kind, path: None

    def crash_at(self, number: int, disk: int, work: Callable[[], object]) -> bool:
        """Runs `work` and ends its process at an operation; whether there was one so late."""
        dead = False

        def die() -> None:
            nonlocal dead
            dead = True
            self.store.before = self.store.after = _die
            self.meta.before = self.meta.after = _die
            self.disks[disk].before = _die
            raise SimulatedCrash

        self.act_at(number, die, disk=disk)
        with suppress(SimulatedCrash):
            work()
        self.pass_all()
        self.disks[disk].crash(random.Random(number))
        return dead

    def descriptors(self, topic: Topic) -> list[ObjectDescriptor]:
        """The topic's, as committed."""
        return [described for described, _ in topic.bucket.owned.catalog.descriptors()]

    def keys_of_topic(self) -> list[str]:
        """What both stores hold of the topic, but for its record."""
        objects = [
            key for key in sorted(self.store._objects) if key.startswith("storage/topics/ns/a/")
        ]
        found = self.meta.range("/danube/storage/topics/ns/a/")
        return objects + [item.key for item in found]


def _die(kind: str, key: str) -> None:
    raise SimulatedCrash


def _fill(topic: Topic, count: int, mark: bytes) -> dict[int, bytes]:
    payloads = [mark + b"%d:" % number + bytes(900) for number in range(count)]
    offsets = topic.append_many(payloads)
    topic.flush()
    return dict(zip(offsets, payloads, strict=True))


@pytest.mark.sim
@pytest.mark.parametrize("finalize", ["direct", "copy"])
def test_an_uploader_that_was_paused_and_fenced_publishes_nothing(finalize: str) -> None:
    """Node A stands still at every operation of an upload in turn, and node B takes the topic."""
    for number in range(1, 200):
        stage = Stage(uploader={"engine": "none", "max_object_bytes": 4096, "finalize": finalize})
        log_a, log_b = stage.open(0), stage.open(1)
        a = log_a.topic(TOPIC, create=True)
        sent_a = _fill(a, 4, b"first")
        a.upload()
        sent_a |= _fill(a, 6, b"a")
        at_claim: list[ObjectDescriptor] = []
        sent_b: dict[int, bytes] = {}

        def take_over(stage=stage, log_b=log_b, at_claim=at_claim, sent_b=sent_b) -> None:
            stage.clock.advance(6)
            b = log_b.topic(TOPIC, take_over=True)
            at_claim += stage.descriptors(b)
            sent_b |= _fill(b, 3, b"b")
            b.upload()

        stage.act_at(number, take_over)
        with suppress(FencedError):
            a.upload()
        stage.pass_all()
        if not at_claim:
            break
        b = log_b.topic(TOPIC)
        # A has noticed, or does now; it says so from then on, and nobody is acknowledged.
        with pytest.raises((UnavailableError, FencedError)):
            a.wait(0)
        log_a.stores.membership.renew()
        if a.watermarks.tiered < a.watermarks.synced:
            with pytest.raises(FencedError):
                a.upload()
        with pytest.raises(FencedError):
            a.wait(0)
        with pytest.raises(FencedError):
            a.append(b"late")
        found = stage.descriptors(b)
        assert found[: len(at_claim)] == at_claim
        assert {described.epoch for described in found[len(at_claim) :]} == {b.bucket.owned.epoch}
        assert [d.start for d in found[1:]] == [d.end for d in found[:-1]]
        kept = {o: body for o, body in sent_a.items() if o < at_claim[-1].end}
        assert read_all(b) == kept | sent_b
        log_b.close()
        log_a.close()
    assert number > 10


@pytest.mark.sim
@pytest.mark.parametrize("finalize", ["direct", "copy"])
def test_garbage_collection_of_an_owner_that_was_fenced_takes_nothing(finalize: str) -> None:
    for number in range(1, 100):
        collect_late(number, finalize)


def collect_late(number: int, finalize: str = "direct") -> None:
    """Node B uploads what it took over; at one operation node A wakes up and collects garbage."""
    stage = Stage(
        uploader={"engine": "none", "max_object_bytes": 4096, "finalize": finalize},
        cloud={"backend": "memory", "orphan_grace_minutes": 1},
    )
    log_a, log_b = stage.open(0), stage.open(1)
    a = log_a.topic(TOPIC, create=True)
    sent = _fill(a, 4, b"a")
    a.upload()
    stage.clock.advance(6)
    b = log_b.topic(TOPIC, take_over=True)
    sent |= _fill(b, 6, b"b")

    def collect() -> None:
        stage.clock.advance(100)
        with suppress(FencedError):
            a.bucket.retention.collect_orphans()

    stage.act_at(number, collect)
    b.upload()
    stage.pass_all()
    stage.disks[1] = MemoryFileSystem()
    stage.clock.advance(6)
    assert read_all(stage.open(1).topic(TOPIC, take_over=True)) == sent


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(3))
def test_a_hand_over_that_crashed_anywhere_loses_nothing(seed: int) -> None:
    for number in range(1, 400):
        stage = Stage()
        log = stage.open(0)
        sent = _fill(log.topic(TOPIC, create=True), 5 + seed, b"a")
        log.topic(TOPIC).upload()
        sent |= _fill(log.topic(TOPIC), 3, b"b")
        has_crashed = stage.crash_at(number, 0, lambda log=log: log.seal(TOPIC))
        # Where the seal had not been committed the topic is still the first node's.
        log = stage.open(0)
        topic = log.topic(TOPIC)
        assert read_all(topic) == sent
        sent |= _fill(topic, 1, b"c")
        log.seal(TOPIC)
        other = stage.open(1).topic(TOPIC)
        assert read_all(other) == sent
        if not has_crashed:
            break
    assert number > 20


@pytest.mark.sim
def test_a_deletion_that_crashed_anywhere_goes_on_and_leaves_nothing() -> None:
    for number in range(1, 400):
        stage = Stage()
        log = stage.open(0)
        topic = log.topic(TOPIC, create=True)
        _fill(topic, 9, b"a")
        topic.upload()
        _fill(topic, 2, b"b")
        has_crashed = stage.crash_at(number, 0, lambda log=log: log.delete(TOPIC))
        log = stage.open(0)
        with suppress(NotFoundError):
            log.delete(TOPIC)
        assert stage.keys_of_topic() == []
        topic = log.topic(TOPIC, create=True)
        assert (topic.earliest, topic.wal.next) == (0, 0)
        if not has_crashed:
            break
    assert number > 20


@pytest.mark.sim
def test_a_deletion_that_was_paused_leaves_the_next_topic_of_that_name_alone() -> None:
    """Node A stands still in a deletion, B finishes it and makes the topic anew, A goes on."""
    calls: list[int] = []
    for number in range(1, 200):
        stage = Stage()
        log_a, log_b = stage.open(0), stage.open(1)
        topic = log_a.topic(TOPIC, create=True)
        _fill(topic, 9, b"a")
        topic.upload()
        sent: dict[int, bytes] = {}

        def make_anew(stage=stage, log_b=log_b, sent=sent, number=number) -> None:
            stage.clock.advance(6)
            with suppress(ConflictError, NotFoundError):  # not marked yet; finished already
                log_b.delete(TOPIC)
            calls.append(number)
            if log_b.stores.catalog(NAME).record()[0].is_open:
                return
            anew = log_b.topic(TOPIC, create=True)
            sent |= _fill(anew, 4, b"b")
            anew.upload()

        stage.act_at(number, make_anew)
        with suppress(FencedError):
            log_a.delete(TOPIC)
        stage.pass_all()
        if sent:
            anew = log_b.topic(TOPIC)
            assert [d.start for d in stage.descriptors(anew)][:1] == [0]
            log_b.close()
            stage.disks[1] = MemoryFileSystem()
            stage.clock.advance(6)
            assert read_all(stage.open(1).topic(TOPIC, take_over=True)) == sent
        if number not in calls:
            break
    assert number > 20


@pytest.mark.sim
def test_a_claim_that_crashed_anywhere_does_not_bring_old_files_back() -> None:
    """B had the topic, A took it and wrote on, B takes it back and crashes in the middle."""
    for number in range(1, 400):
        stage = Stage()
        log_b = stage.open(1)
        b = log_b.topic(TOPIC, create=True)
        sent = _fill(b, 3, b"tiered")
        b.upload()
        _fill(b, 9, b"lost")
        log_b.close()
        log_a = stage.open(0)
        a = log_a.topic(TOPIC, take_over=True)
        sent |= _fill(a, 4, b"a")
        a.upload()
        log_a.close()
        log_b = stage.open(1)
        has_crashed = stage.crash_at(number, 1, lambda log=log_b: log.topic(TOPIC, take_over=True))
        stage.clock.advance(6)
        assert read_all(stage.open(1).topic(TOPIC, take_over=True)) == sent, number
        if not has_crashed:
            break
    assert number > 10


@pytest.mark.sim
def test_a_new_topic_whose_claim_crashed_has_nothing_of_the_deleted_one() -> None:
    """A deletion lost its last step, the local files, and so did the next claim."""
    for number in range(1, 400):
        stage = Stage()
        log = stage.open(0)
        topic = log.topic(TOPIC, create=True)
        _fill(topic, 5, b"a")
        topic.upload()
        other = stage.open(1)
        log.close()
        other.topic(TOPIC, take_over=True)
        other.delete(TOPIC)
        other.close()
        log = stage.open(0)
        has_crashed = stage.crash_at(number, 0, lambda log=log: log.topic(TOPIC, create=True))
        assert read_all(stage.open(0).topic(TOPIC, create=True)) == {}, number
        if not has_crashed:
            break
    assert number > 10


@pytest.mark.sim
@pytest.mark.parametrize("is_lost", [True, False])
def test_sealing_checks_the_bucket_before_the_local_files_go(is_lost: bool) -> None:
    stage = Stage()
    log = stage.open(0)
    topic = log.topic(TOPIC, create=True)
    sent = _fill(topic, 9, b"a")
    topic.upload()
    key = object_key(NAME, stage.descriptors(topic)[0].object_id)
    if is_lost:
        stage.store.drop(key)
    else:
        stage.store.corrupt(key, 100)
    log.seal(TOPIC)
    assert read_all(stage.open(1).topic(TOPIC)) == sent


@pytest.mark.sim
def test_expired_messages_are_not_a_gap_although_the_answer_was_lost() -> None:
    for number in range(1, 60):
        stage = Stage(cloud={"backend": "memory", "retention": {"time_minutes": 1}})
        log = stage.open(0)
        topic = log.topic(TOPIC, create=True)
        for _ in range(4):
            _fill(topic, 9, b"a")
            topic.upload()
        stage.clock.advance(200)
        log.stores.membership.renew()
        topic.bucket.retention.trim()
        failed = False

        def fail() -> None:
            nonlocal failed
            failed = True
            raise UnavailableError("no answer")

        stage.act_at(number, fail)
        with suppress(UnavailableError):
            topic.bucket.retention.expire()
        stage.pass_all()
        found = read_all(topic)
        assert sorted(found) == list(range(topic.earliest, topic.wal.next)), number
        if not failed:
            break
    assert number > 3
