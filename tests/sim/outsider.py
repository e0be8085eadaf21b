"""A pipeline in a `TierWorld`: it uploads and merges in the owner's name, crashes, and wakes late.

It reads the disk of whichever node wrote last, by that node's checkpoint, as a Spark task on that
machine does. Its lease ends when time passes in the middle of its work, or in between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ister.base.metrics import Metrics
from ister.bucket.catalog import Catalog
from ister.bucket.check import walk_frames
from ister.bucket.claim import act_outside
from ister.bucket.fence import Fence
from ister.bucket.names import format_object_id, object_key
from ister.bucket.object_maker import ObjectMaker, ObjectSummary
from ister.bucket.ownership import OwnedTopic
from ister.bucket.pipeline import PipelineKeys
from ister.bucket.terms import Term, newest_terms, refuse_older, save_term
from ister.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvariantError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.objectstore.slices import with_slices
from ister.topic.local_tail import LocalTail
from ister.topic.stores import upload_settings
from tests.sim.world import BrokenPromiseError
from tests.support.memory_fs import MemoryFileSystem, SimulatedCrash

if TYPE_CHECKING:
    from tests.sim.tier_world import Process, TierWorld

OUTSIDE_POINTS: Final = ("tier.before_swap", "tier.after_swap")
"""Failpoints that only a pipeline comes by."""

_KEPT_SECONDS_MAX: Final = 100
_EXPECTED: Final = (
    ConflictError,  # the owner was faster, the topic has changed hands, or the lease has ended
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)


class Outsider:
    """See the module header."""

    def __init__(self, world: TierWorld, make_process: Callable[[], Process]) -> None:
        self._world = world
        self._make_process = make_process
        self._fence: Fence | None = None
        self._lives = 0
        self.process: Process | None = None
        self.uploads = self.merges = 0
        self._metrics = Metrics()
        self._before: tuple[bool, dict[str, int]] | None = None

    def turn(self) -> None:
        """One thing that a pipeline does."""
        world = self._world
        if world.wrong_ms:
            return  # it is on a machine whose clock is right
        if self.process is None:
            self.process = self._make_process()
            self._lives += 1
        process = self.process
        leads = world.failpoint in OUTSIDE_POINTS
        action = world.rng.choices(
            (self.upload, self.merge, self.renew), (5, 9 if leads else 3, 2)
        )[0]
        if world.sharing is not None and world.sharing.rng.random() < 0.15:
            action = world.sharing.collect_outside
        world.trace(f"pipeline: {action.__name__}")
        process.had_fault = False
        try:
            with world._running_as(process):
                if self._fence is None:
                    self._take()
                action()
        except SimulatedCrash:
            self.process = self._fence = None
        except IsterError as error:
            world.trace(f"pipeline: {error!r}")
            if isinstance(error, FencedError):
                self._fence = None  # a job ends then, and another one begins
            elif isinstance(error, InvariantError) or not isinstance(error, _EXPECTED):
                raise BrokenPromiseError(f"pipeline: {error!r}") from error
        finally:
            world.look()

    def end(self) -> None:
        """There is no pipeline any more."""
        self.process = self._fence = None

    def _take(self) -> None:
        world = self._world
        keys = PipelineKeys("/danube")
        number = f"{self._lives}-{world.rng.getrandbits(32)}"
        self._fence = Fence.take(
            world.meta,
            keys.lease if world.rng.random() < 0.5 else keys.job(number),
            id=number,
            about={},
            ttl_seconds=5.0,
            clock=world.clock,
        )

    def note_change(self, process: Process) -> None:
        """A process is about to change metadata."""
        self._before = self._look() if process is self.process else None

    def check_change(self, process: Process) -> None:
        """It has done so, or something that it requires did not hold."""
        before, self._before = self._before, None
        if process is not self.process or self._fence is None or before is None:
            return
        has_lease, content = before
        if self._look()[1] != content and not has_lease:
            raise BrokenPromiseError("a pipeline whose lease has ended has changed something")

    def _look(self) -> tuple[bool, dict[str, int]]:
        """Whether the lease is this one's, and what there is about the topic."""
        world = self._world
        with world._quietly():
            found = world.meta.get(self._fence.key) if self._fence is not None else None
            has_lease = found is not None and found.revision == self._fence.compare.revision
            about = world.meta.range(world.seen.keys.storage)
            return has_lease, {found.key: found.revision for found in about}

    def renew(self) -> None:
        """The lease lasts on."""
        if self._fence is not None:
            self._fence.renew()

    def _act(self) -> OwnedTopic:
        world = self._world
        catalog = Catalog(world.meta, world.seen.keys, clock=world.clock, metrics=self._metrics)
        return act_outside(catalog, self._fence, clock=world.clock, metrics=self._metrics)

    # -- uploads ----------------------------------------------------------------------------

    def upload(self) -> None:
        """Some objects, from the files of the node that wrote last, up to anywhere."""
        world, owned = self._world, self._act()
        record, name = owned.record, world.seen.keys.topic
        terms = newest_terms(world.store, name)
        refuse_older(name, record, terms, where="the bucket")
        fs = next((node.fs for node in world.nodes if node.id == record.node), None)
        tail = self._tail(owned, fs) if fs is not None else None
        if tail is None:
            return
        if Term(record.epoch, record.claim) not in terms and tail.sync_term(record):
            save_term(world.store, name, record)
        if (opened := tail.source(chunk_bytes=65536)) is None:
            return
        source, snapshot = opened
        settings = upload_settings(world.config.storage.uploader)
        maker = ObjectMaker(
            world.seen.keys.topic,
            world.store,
            settings=settings,
            clock=world.clock,
            metrics=self._metrics,
            pending_tag=f"{world.rng.getrandbits(32):08x}",
        )
        try:
            start = owned.tiered if owned.last is not None else snapshot.trimmed
            for _ in range(world.rng.randrange(1, 4)):
                if not snapshot.trimmed <= start < snapshot.synced:
                    return
                stop = world.rng.choice((snapshot.synced, start + 1, start + 3))
                end = source.plan(
                    start,
                    min(stop, snapshot.synced),
                    bytes_max=settings.object_bytes_max,
                    span_ms_max=settings.object_span_ms_max,
                )
                owned.commit(
                    maker.make(
                        source, start, end, epoch=owned.epoch, incarnation=record.incarnation
                    )
                )
                self.uploads += 1
                start = end
        except CorruptDataError:
            # Files that were removed and made anew meanwhile are another topic's, or another
            # owner's: what was read of them must not have been committed, and is no damage.
            if self._is_unchanged(owned):
                raise
        finally:
            source.close()

    def _tail(self, owned: OwnedTopic, fs: MemoryFileSystem) -> LocalTail | None:
        return LocalTail.find(
            "/data/wal",
            self._world.seen.keys.topic,
            owned.record.node,
            owned.record.incarnation,
            clock=self._world.clock,
            metrics=self._metrics,
            fs=fs,
        )

    def _is_unchanged(self, owned: OwnedTopic) -> bool:
        with self._world._quietly(), suppress(FencedError):
            owned._refresh_record()
            return True
        return False

    # -- merges -----------------------------------------------------------------------------

    def merge(self) -> None:
        """Neighbours become one object; what is damaged is left to the owner."""
        world, owned = self._world, self._act()
        found = list(owned.catalog.descriptors())
        if len(found) < 2:
            return
        count = world.rng.randrange(2, min(len(found), 5) + 1)
        at = world.rng.randrange(len(found) - count + 1)
        old = found[at : at + count]
        if any(one.end != after.start for (one, _), (after, _) in pairwise(old)):
            return  # the catalog was put back to an older one while it was listed
        try:
            new = self._copy(owned, [described for described, _ in old])
        except (CorruptDataError, NotFoundError):
            return
        now = world.clock.now_ns() // 1_000_000_000
        until = now + world.rng.choice((0, 10, _KEPT_SECONDS_MAX))
        self.merges += owned.swap(old, new, until=until)

    def _copy(self, owned: OwnedTopic, old: list[ObjectDescriptor]) -> ObjectDescriptor:
        world, topic = self._world, self._world.seen.keys.topic
        tag = f"{world.rng.getrandbits(32):08x}"
        object_id = format_object_id(old[0].start, old[-1].end, owned.epoch, tag=tag)
        summary = ObjectSummary(old[0].start, index_every_messages=2)
        writer = world.store.open_writer(
            object_key(topic, object_id), chunk_bytes=65536, concurrent_parts=1
        )
        try:
            for described in old:
                key = object_key(topic, described.object_id)
                for batch in walk_frames(
                    with_slices(world.store),
                    key,
                    described.start,
                    described.end,
                    chunk_bytes=65536,
                ):
                    writer.write(summary.add(batch))
            writer.close()
        finally:
            writer.abort()
        described = summary.describe(
            object_id,
            epoch=owned.epoch,
            incarnation=owned.record.incarnation,
            created_at=world.clock.now_ns() // 1_000_000_000,
            etag=None,
        )
        return replace(described, arrival_time_max=max(one.arrived_ms for one in old))
