"""Bugs planted into express objects on purpose, each of which the worlds have to catch.

Each entry loses a run, removes an object too early, or commits what it must not. Proof that the
worlds of `tier_world` in which topics share objects (`express_part`) can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise

import pytest

import ister.bucket.express
import ister.bucket.express_collection
import ister.bucket.ownership
import ister.bucket.resort
import ister.rescue.rebuild
import ister.topic.express
import ister.topic.stores
from ister.bucket.express import Run, commit_runs
from ister.bucket.express_collection import collect_express, read_footer
from ister.bucket.membership import Membership
from ister.bucket.ownership import OwnedTopic
from ister.errors import CommitUnknownError, CorruptDataError, UnavailableError
from ister.format.descriptor import RunId, decode_descriptor
from ister.format.express import encode_footer
from ister.format.records import decode_retired
from ister.metadata.base import Delete, Put
from ister.objectstore.slices import SlicedStore
from ister.topic.express import Express
from tests.sim.known_seeds import Plant, catch, plants_of
from tests.sim.test_tier_planted_bugs import (
    a_swap_forgets_the_pointer,
    a_swap_leaves_the_last_one,
)
from tests.sim.tier_world import run_seed
from tests.sim.world import BrokenPromiseError
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.scale import nightly
from tests.support.stores import TTL_SECONDS, Cluster, Pipeline, Site, a_descriptor
from tests.unit.bucket.test_express import Node, topic_name
from tests.unit.topic.test_express import Shared

SEEDS_MAX = 2000
TURNS = 80


# -- lost runs ------------------------------------------------------------------------------


def a_run_is_left_out_of_the_commit(patch: pytest.MonkeyPatch) -> None:
    real = ister.bucket.express.commit_runs

    def commit_runs(store, runs, presence):
        yield from real(store, runs[:-1], presence)
        yield runs[-1], None

    patch.setattr(ister.topic.express, "commit_runs", commit_runs)


def a_run_is_left_out_of_the_footer(patch: pytest.MonkeyPatch) -> None:
    def encode(name, runs, position):
        return encode_footer(name, runs[:-1] if len(runs) > 1 else runs, position)

    patch.setattr(ister.bucket.express, "encode_footer", encode)


def every_run_begins_at_the_beginning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ister.bucket.express, "RunId", lambda name, position, length: RunId(name, 0, length)
    )


def acknowledged_when_the_object_was_put(patch: pytest.MonkeyPatch) -> None:
    real = Express.put

    def put(self: Express, batch):
        error = real(self, batch)
        if error is None:
            for run in batch.made.runs:
                batch.planned[run.owned.topic].uploads.take_run(run.descriptor)
        return error

    patch.setattr(Express, "put", put)


def a_failed_commit_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    real = Express._take

    def take(self: Express, run, planned, error):
        return real(self, run, planned, None if isinstance(error, UnavailableError) else error)

    patch.setattr(Express, "_take", take)


def a_topic_that_was_lost_is_acknowledged_with_the_others(patch: pytest.MonkeyPatch) -> None:
    """What a transaction was refused for is not looked at."""
    patch.setattr(ister.bucket.express, "_commit_alone", lambda run, presence: None)


def a_lost_answer_counts_as_a_commit(patch: pytest.MonkeyPatch) -> None:
    real = ister.bucket.express._commit

    def commit(store, runs, presence):
        class Sure:
            get = store.get

            @staticmethod
            def transact(compares, operations):
                try:
                    return store.transact(compares, operations)
                except CommitUnknownError:
                    return store.revision

        return real(Sure, runs, presence)

    patch.setattr(ister.bucket.express, "_commit", commit)


def a_run_follows_one_that_was_lost(patch: pytest.MonkeyPatch) -> None:
    """As the topic's first object, because it has none yet."""
    patch.setattr(
        ister.bucket.express,
        "Run",
        lambda owned, descriptor, is_first: Run(owned, descriptor, is_first=True),
    )


def a_topic_has_no_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ister.topic.stores, "save_manifest", lambda *_: None)


def recovery_does_not_know_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ister.rescue.rebuild, "_name_runs", lambda topic, runs: {})


def recovery_takes_runs_of_a_deleted_topic(patch: pytest.MonkeyPatch) -> None:
    real = ister.rescue.rebuild._name_runs

    def name_runs(topic, runs):
        newest = max(runs, key=lambda run: run.epoch, default=None)
        return real(topic, [replace(run, incarnation=newest.incarnation) for run in runs])

    patch.setattr(ister.rescue.rebuild, "_name_runs", name_runs)


# -- commits --------------------------------------------------------------------------------


def _without(patch: pytest.MonkeyPatch, is_left_out: Callable[[object, OwnedTopic], bool]) -> None:
    real = OwnedTopic.prepare_commit

    def prepare(self: OwnedTopic, descriptor, *, is_first):
        compares, operations = real(self, descriptor, is_first=is_first)
        return [c for c in compares if not is_left_out(c, self)], operations

    patch.setattr(OwnedTopic, "prepare_commit", prepare)


def a_shared_commit_forgets_the_record(patch: pytest.MonkeyPatch) -> None:
    _without(patch, lambda compare, owned: compare.key == owned.catalog.keys.record)


def a_shared_commit_forgets_the_pointer(patch: pytest.MonkeyPatch) -> None:
    _without(patch, lambda compare, owned: compare.key == owned.catalog.keys.current)


def a_process_that_is_back_commits_what_it_put_before(patch: pytest.MonkeyPatch) -> None:
    """Its object may have been removed meanwhile."""
    patch.setattr(Membership, "presence", lambda self: self.is_here)


# -- early collection -----------------------------------------------------------------------


def collection_looks_at_one_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ister.bucket.express_collection,
        "read_footer",
        lambda store, info: read_footer(store, info)[:1],
    )


def collection_forgets_the_readers_of_replaced_runs(patch: pytest.MonkeyPatch) -> None:
    def decode(value, *, key):
        return replace(decode_retired(value, key=key), until=0)

    patch.setattr(ister.bucket.express_collection, "decode_retired", decode)


def collection_takes_nobody_for_running(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ister.bucket.express_collection, "_running_processes", lambda metadata, prefix: set()
    )


def collection_removes_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Express, "is_under_way", lambda self, key: False)


def collection_waits_for_no_reader(patch: pytest.MonkeyPatch) -> None:
    def collect(*arguments, grace_seconds, **settings):
        return collect_express(*arguments, grace_seconds=0, **settings)

    patch.setattr(ister.topic.express, "collect_express", collect)


def collection_takes_what_was_not_committed_yet(patch: pytest.MonkeyPatch) -> None:
    """By the descriptors alone: nobody is asked who is about to commit."""

    def is_needed(run, record, *, described, last, kept):
        return run.object_id in kept

    patch.setattr(ister.bucket.express_collection, "is_needed", is_needed)
    collection_removes_what_is_under_way(patch)


def expiry_removes_the_whole_object(patch: pytest.MonkeyPatch) -> None:
    """A run's object goes with it, and the runs of others."""

    def delete(self: SlicedStore, key: str) -> None:
        self._store.delete(key.partition("@")[0])

    patch.setattr(SlicedStore, "delete", delete)


# -- re-sorting -----------------------------------------------------------------------------


def a_re_sort_forgets_a_run(patch: pytest.MonkeyPatch) -> None:
    """The object ends with the last run but one, and takes the place of all of them."""
    real = ister.bucket.resort._make

    def make(owned, runs, frames, **settings):
        return real(owned, runs[:-1] if len(runs) > 1 else runs, frames, **settings)

    patch.setattr(ister.bucket.resort, "_make", make)
    patch.setattr(ister.bucket.resort, "InvariantError", CorruptDataError)
    patch.setattr(ister.bucket.ownership, "check", lambda holds, what: None)


def half_a_swap(patch: pytest.MonkeyPatch) -> None:
    """The new object takes its place in one transaction, and the runs go in the next one."""
    real = MemoryMetadata.transact

    def transact(self: MemoryMetadata, compares, operations):
        parts = [
            [one for one in operations if isinstance(one, Put)],
            [one for one in operations if isinstance(one, Delete) and "/objects/" in one.key],
        ]
        if not all(parts) or not all("/storage/" in one.key for one in operations):
            return real(self, compares, operations)
        revision = real(self, compares, parts[0])
        return revision if revision is None else real(self, [], parts[1])

    patch.setattr(MemoryMetadata, "transact", transact)


# Worlds hardly come by two of them, which have situations of their own.
PLANTS = plants_of(
    __name__, but=(a_shared_commit_forgets_the_pointer, a_shared_commit_forgets_the_record)
)

# Planted into the tiers, too.
OF_SWAPS: list[Plant] = [a_swap_forgets_the_pointer, a_swap_leaves_the_last_one]


# Many worlds pass before one comes by these.
RARE: list[Plant] = [
    half_a_swap,
    a_run_follows_one_that_was_lost,
    recovery_takes_runs_of_a_deleted_topic,
    collection_looks_at_one_run,
    collection_removes_what_is_under_way,
    collection_takes_nobody_for_running,
]


@pytest.mark.sim
@pytest.mark.parametrize(
    "plant",
    [nightly(plant) if plant in RARE else plant for plant in [*PLANTS, *OF_SWAPS]],
    ids=lambda plant: plant.__name__,
)
def test_worlds_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(
        "express",
        plant,
        monkeypatch,
        lambda seed: run_seed(seed, turns=TURNS, shares=True),
        SEEDS_MAX,
    )


# -- ways that worlds hardly come by --------------------------------------------------------


def commit_before_the_topic_is_known_to_be_lost() -> None:
    """A process is back, and writes an object before it has looked at all of its topics.

    Raises:
        BrokenPromiseError: What it wrote is part of a topic that another node has.
    """
    cluster = Cluster()
    node = Node(cluster)
    cluster.clock.advance(2 * TTL_SECONDS)
    owner = cluster.claim("b", name=topic_name(1), create=False)
    real, node.membership._reclaim = node.membership._reclaim, lambda: node.write([3, 3, 3])
    node.membership.renew()
    node.membership._reclaim = real
    last = cluster.catalog(topic_name(1)).last()
    if last is not None and last.epoch != owner.epoch:
        raise BrokenPromiseError(f"an owner that was fenced has committed {last}")
    assert [cluster.catalog(topic_name(n)).last().end for n in (0, 2)] == [3, 3]


def commit_behind_a_merge() -> None:
    """A pipeline commits for an owner and merges the newest while an object is on its way.

    Raises:
        BrokenPromiseError: Two descriptors have the same offsets.
    """
    cluster = Cluster()
    node, name = Node(cluster), topic_name(1)
    node.write([3, 3, 3])
    made, presence = node.make([7, 7, 7], start=3), node.membership.presence()
    made.put(cluster.objects)
    job = Pipeline(cluster).acting(name)
    job.commit(a_descriptor(3, 5, epoch=1, incarnation=job.record.incarnation))
    found = list(cluster.catalog(name).descriptors())
    merged = a_descriptor(0, 5, object_id="data-0-4-c01234567.dnb1")
    assert job.swap(found, merged, until=2**40)
    for _ in commit_runs(cluster.metadata, made.runs, presence):
        pass
    ranges = [(one.start, one.end) for one, _ in cluster.catalog(name).descriptors()]
    if any(before[1] != after[0] for before, after in pairwise(ranges)):
        raise BrokenPromiseError(f"descriptors: {ranges}")
    assert [cluster.catalog(topic_name(n)).last().end for n in (0, 2)] == [7, 7]


def kill_a_re_sort_at_any_operation() -> None:
    """Three runs become one object, and the process ends before each of its operations in turn.

    Raises:
        BrokenPromiseError: The topic has not all of its messages, or some of them twice.
    """
    for number in count(1):
        with Site() as site:
            shared = Shared(site, topics=1)
            for payload in (b"a", b"b", b"c"):
                shared.append(0, payload)
                shared.express.write_next()
            site.clock.advance(600)
            shared.log.stores.membership.renew()
            left = number

            def end(kind: str, key: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise SimulatedCrash(kind)

            site.metadata.before = site.metadata.after = end
            site.objects.before = site.objects.after = end
            with suppress(SimulatedCrash):
                shared.topics[0].bucket.uploads.resort()
            site.metadata.before = site.metadata.after = lambda kind, key: None
            site.objects.before = site.objects.after = lambda kind, key: None
            keys = shared.topics[0].bucket.owned.catalog.keys
            found = site.metadata.range(keys.objects, end=keys.objects_end)
            described = [decode_descriptor(one.value, key=one.key) for one in found]
            ranges = [(one.start, one.end) for one in described]
            if ranges not in ([(0, 1), (1, 2), (2, 3)], [(0, 3)]):
                raise BrokenPromiseError(f"killed at operation {number}: {ranges}")
            reader = shared.log.stores.reader(shared.topics[0].bucket.owned.catalog)
            batches = [reader.fetch(at, at + 1, bytes_max=1) for at in range(3)]
            reader.close()
            assert [batch.next_offset for batch in batches] == [1, 2, 3]
            if left > 0:
                assert ranges == [(0, 3)]
                return


BY_SITUATIONS: dict[Plant, Callable[[], None]] = {
    a_shared_commit_forgets_the_record: commit_before_the_topic_is_known_to_be_lost,
    a_shared_commit_forgets_the_pointer: commit_behind_a_merge,
    half_a_swap: kill_a_re_sort_at_any_operation,
}


@pytest.mark.sim
@pytest.mark.parametrize("plant", BY_SITUATIONS, ids=lambda plant: plant.__name__)
def test_situations_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    BY_SITUATIONS[plant]()
    plant(monkeypatch)
    with pytest.raises(BrokenPromiseError):
        BY_SITUATIONS[plant]()
