"""What a log does on its own: renew its lease, upload, remove what retention does not keep.

    keeper   renews the lease every third of its time; holds appends back when it cannot
    tender   checks topics with a backlog a few times a second, and hands out what is due
    pool     runs uploads, `storage.uploader.threads` at a time: that bounds their memory; and
             re-sorts express runs, on half of them
    express  writes the objects that topics share (`express`)
    retainer trims, expires and collects, a few topics at a time: uploads do not wait for it
    marker   marks idle topics, and removes the mark when a producer waits for that

Owns: threads and when things are due. Does not own: how it is done (`uploads`, `retention`).

With `storage.uploader.engine: auto`, uploads and re-sorting are left to a pipeline while one holds
the lease, and taken back when it does not; a topic that it leaves behind for long is served here
all the same. Topics that wait to be re-sorted take turns, the one that waits longest first.

A failing topic does not affect others: its error is logged and counted, and its uploads pause.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

from ister.base import threads
from ister.base.clock import Clock
from ister.bucket.pipeline import PipelineKeys, PipelineWatch
from ister.config import Engine, StorageConfig
from ister.errors import ClosedError, ConflictError, FencedError, IsterError
from ister.topic.express import Express
from ister.topic.idle_mark import IdleMark
from ister.topic.resorting import RunSorter
from ister.topic.stores import Stores
from ister.topic.topic import Topic
from ister.topic.uploads import NoWatcher, TopicUploads

_log = logging.getLogger("ister.topic.background")

_TICK_SECONDS: Final = 0.25
_ORPHAN_CHECK_SECONDS: Final = 3600.0
_PROBE_AFTER_SECONDS: Final = 10.0
_MARK_THREADS: Final = 8
"""A producer that comes back waits for one transaction, not for those of many other topics."""
_RETENTION_THREADS: Final = 4
"""Each thread buffers one chunk of the object that it reads back."""
# How often all topics are checked: a thread interrupted right after a sync may not have listed its
# topic.
_SWEEP_SECONDS: Final = 10.0
# How often topics with express runs are checked.
_RESORT_CHECK_SECONDS: Final = 1.0
# Checks of the objects of newly opened topics: a burst, then a rate. Opening thousands of topics
# must not keep the node busy with checks.
_CHECKS_BURST: Final = 32
_CHECKS_PER_SECOND: Final = 4.0


class Background:
    """The background threads of one log."""

    def __init__(
        self,
        topics: Callable[[], list[Topic]],
        stores: Stores,
        storage: StorageConfig,
        clock: Clock,
        on_tick: Callable[[], None],
    ) -> None:
        """Starts the threads; one of them calls `on_tick` four times a second."""
        self._on_tick = on_tick
        self._was_distrusted = stores.trust.is_distrusted
        self._express = Express(stores)
        self._topics = topics
        self._stores = stores
        self._storage = storage
        self._clock = clock
        self._stopping = threading.Event()
        self._due = threading.Event()
        engine = storage.uploader.engine
        self._uploads = engine in (Engine.AUTO, Engine.EMBEDDED)
        self._follows = engine in (Engine.AUTO, Engine.SPARK)
        self._pipeline = PipelineWatch(
            stores.metadata,
            PipelineKeys(storage.metadata.root_prefix),
            ttl_seconds=storage.metadata.lease_ttl_seconds,
            clock=clock,
        )
        self._added: set[Topic] = set()
        # Topics that may have a backlog, or whose producers wait.
        self._listed: set[Topic] = set()
        self._unchecked: deque[Topic] = deque()
        self._checks = float(_CHECKS_BURST)
        now = self._checks_at = clock.monotonic()
        self._sweep_at = now + _SWEEP_SECONDS
        self._retention_at = now + storage.wal.retention.check_interval_minutes * 60
        self._orphans_at = now + _ORPHAN_CHECK_SECONDS
        # Not at once: a program that ends soon would leave a probe half way.
        self._probe_at = now + _PROBE_AFTER_SECONDS
        self._pool = ThreadPoolExecutor(storage.uploader.threads, thread_name_prefix="ister-upload")
        self._queue_lock = threading.Lock()
        self._queued_count = 0
        # Topics with express runs, as far as is known, and how many are being re-sorted.
        self._with_runs: set[Topic] = set()
        self._resorts = 0
        # Those that are due, the one that waits longest first; found anew every second.
        self._unsorted: deque[Topic] = deque()
        self._unsorted_at = now
        self._retainer = ThreadPoolExecutor(
            _RETENTION_THREADS, thread_name_prefix="ister-retention"
        )
        self._marker = ThreadPoolExecutor(_MARK_THREADS, thread_name_prefix="ister-idle")
        # Topics whose mark could not be removed: it is tried again.
        self._held_up: set[Topic] = set()
        self._threads = [
            threads.start("ister-lease", self._keep),
            threads.start("ister-tender", self._maintain),
            threads.start("ister-express", self._express.run),
        ]

    def add(self, topic: Topic) -> None:
        """Adds a topic that was opened."""
        bucket = topic.bucket
        if bucket is None:
            return
        self._added.add(topic)
        bucket.uploads.watcher = _Watcher(self, topic, bucket.uploads)
        # After that: later syncs list the topic, earlier ones are covered here.
        self.watch(topic, bucket.uploads)
        self._express.add(bucket.uploads)
        self._with_runs.add(topic)
        if self._uploads:
            self._unchecked.append(topic)
        self._due.set()

    def remove(self, topic: Topic) -> None:
        """Forgets a closed topic."""
        self._added.discard(topic)
        self._listed.discard(topic)
        self._held_up.discard(topic)
        self._with_runs.discard(topic)
        if topic.bucket is not None:
            topic.bucket.uploads.watcher = NoWatcher()
            self._express.remove(topic.bucket.uploads)

    def wake(self) -> None:
        """Has the tender check at once what is due."""
        self._due.set()

    def list_runs(self, topic: Topic) -> None:
        """Has a topic's runs re-sorted when they are due."""
        self._with_runs.add(topic)

    def watch(self, topic: Topic, uploads: TopicUploads) -> None:
        """Lists a topic for the tender until it is idle. Called after every sync: takes no lock.

        Each step is a single, atomic set operation.
        """
        uploads.is_listed = True
        self._listed.add(topic)

    def _unlist_idle(self, topic: Topic, uploads: TopicUploads) -> bool:
        """Removes a topic from the tender's list if it is idle; returns whether it is."""
        uploads.is_listed = False
        self._listed.discard(topic)
        # After removing it: syncs before this check are seen by it, later ones list the topic.
        if uploads.is_idle:
            return True
        if topic in self._added:
            self.watch(topic, uploads)
        return False

    def stop(self) -> None:
        """Ends the threads; a running upload stops between two chunks."""
        self._stopping.set()
        self._due.set()
        for topic in self._topics():
            if topic.bucket is not None:
                topic.bucket.uploads.stop()
        self._express.stop()
        # Calls that pause between two attempts end here.
        self._stores.objects.close()
        if not self._stores.membership.is_valid:
            # Nothing is left to be released, and a store that does not answer delays each call.
            self._stores.metadata.close()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._retainer.shutdown(wait=True, cancel_futures=True)
        self._marker.shutdown(wait=True, cancel_futures=True)

    # -- the lease --------------------------------------------------------------------------

    def _keep(self) -> None:
        ttl = self._storage.metadata.lease_ttl_seconds
        pause = ttl / 3
        while not self._stopping.wait(pause):
            pause = ttl / 15
            # An unexpected error must not end renewals. If it persists, the lease expires, and
            # nothing is acknowledged any more.
            with threads.guard("ister-lease"):
                if self._renew():
                    pause = ttl / 3
            with threads.guard("ister-lease"):
                self._give_up_if_rolled_back()
                self._hold_or_let_go()

    def _renew(self) -> bool:
        """Renews the lease; returns whether the next renewal may wait for the normal interval."""
        try:
            self._stores.membership.renew()
            self._stores.trust.check_revision()
        except IsterError as error:
            _log.warning("lease not renewed", extra={"error": str(error)})
            return isinstance(error, FencedError)
        return True

    def _give_up_if_rolled_back(self) -> None:
        """Gives up all topics if the metadata store was rolled back: reopening compares stores."""
        is_distrusted = self._stores.trust.is_distrusted
        if is_distrusted and not self._was_distrusted:
            reason = ConflictError(
                self._stores.trust.reason or "",
                hint="`ister metadata check` shows what the other stores have",
            )
            for topic in self._topics():
                if topic.bucket is not None:
                    topic.bucket.owned.give_up(reason)
        self._was_distrusted = is_distrusted

    def _hold_or_let_go(self) -> None:
        for topic in self._topics():
            if topic.bucket is None:
                continue
            if topic.bucket.owned.is_leased:
                topic.wal.gate.unhold("lease")
            else:
                topic.wal.gate.hold("lease", topic.bucket.refused_error, waits=False)

    # -- uploads and retention --------------------------------------------------------------

    def _maintain(self) -> None:
        while not self._stopping.is_set():
            self._due.wait(_TICK_SECONDS)
            self._due.clear()
            if self._stopping.is_set():
                return
            # An unexpected error must not end the uploads of all topics.
            with threads.guard("ister-tender"):
                try:
                    if not threads.have_pools_ended():
                        self._hand_out(self._clock.monotonic())
                except RuntimeError:
                    # A pool that ends meanwhile refuses work.
                    if not threads.have_pools_ended():
                        raise
                if threads.have_pools_ended():
                    self._end_uploads()

    def _end_uploads(self) -> None:
        """Fails all waits for `tiered`: uploads need thread pools."""
        error = ClosedError(
            "uploads stopped because the main thread has ended",
            hint="the main thread has to close the log, or to wait for the threads that use it",
        )
        for topic in self._topics():
            topic.wal.levels.end_tiering(error)

    def _hand_out(self, now: float) -> None:
        self._stores.node_clock.check()
        self._on_tick()
        has_retention, has_orphans = now >= self._retention_at, now >= self._orphans_at
        if has_retention:
            self._retention_at = now + self._storage.wal.retention.check_interval_minutes * 60
        if has_orphans:
            self._orphans_at = now + _ORPHAN_CHECK_SECONDS
        is_left = self._follows and (not self._uploads or self._pipeline.is_running())
        self._hand_out_checks(now)
        is_sweep = has_retention or has_orphans or now >= self._sweep_at
        if is_sweep:
            self._sweep_at = now + _SWEEP_SECONDS
            self._retainer.submit(threads.run, "ister-trust", self._stores.trust.follow)
        for topic in tuple(self._held_up):
            self._held_up.discard(topic)
            if topic.bucket is not None:
                self.clear_soon(topic, topic.bucket.uploads.idle_mark)
        for topic in list(self._added if is_sweep else self._listed):
            bucket = topic.bucket
            if bucket is None:
                continue
            uploads = bucket.uploads
            if is_sweep and self._stores.marks_idle and uploads.idle_mark.is_due(now):
                self._marker.submit(threads.run, "ister-idle", self._mark, topic, uploads.idle_mark)
            if self._unlist_idle(topic, uploads) and not has_retention and not has_orphans:
                continue
            uploads.apply_pressure()
            if not (uploads.has_begun or uploads.is_idle) and now >= uploads.begin_at:
                # Not by the first upload, which may be much later.
                uploads.begin_at = now + _SWEEP_SECONDS
                self._retainer.submit(threads.run, "ister-term", self._begin, topic)
            if not uploads.is_submitted:
                self._hand_out_upload(topic, uploads, now, is_left=is_left)
            if has_retention and not bucket.retention.is_submitted:
                bucket.retention.is_submitted = True
                self._retainer.submit(threads.run, "ister-retention", self._retain, topic)
            if has_orphans:
                self._retainer.submit(threads.run, "ister-orphans", self._collect, topic)
        if self._uploads:
            self._hand_out_resorts(now, is_left=is_left)
        if has_orphans:
            self._retainer.submit(threads.run, "ister-express-gc", self._express.collect)
            staged = self._stores.collect_shared_staging
            self._retainer.submit(threads.run, "ister-staging-gc", staged)
        if now >= self._probe_at:
            self._probe_at = now + _ORPHAN_CHECK_SECONDS
            self._retainer.submit(threads.run, "ister-probe", self._stores.probe)

    def _hand_out_checks(self, now: float) -> None:
        passed = now - self._checks_at
        self._checks = min(_CHECKS_BURST, self._checks + passed * _CHECKS_PER_SECOND)
        self._checks_at = now
        while self._unchecked and self._checks >= 1:
            self._checks -= 1
            topic = self._unchecked.popleft()
            self._retainer.submit(threads.run, "ister-check", self._check, topic)

    def _hand_out_upload(
        self, topic: Topic, uploads: TopicUploads, now: float, *, is_left: bool
    ) -> None:
        if is_left and not (self._uploads and uploads.is_left_behind(now)):
            if uploads.is_follow_due(now):
                self._submit(topic, uploads, uploads.follow)
        elif self._uploads and uploads.is_due(now):
            self._submit(topic, uploads, partial(uploads.upload, is_crowded=self._is_crowded))

    def _hand_out_resorts(self, now: float, *, is_left: bool) -> None:
        """Hands out topics with runs, few at a time: uploads need threads, too."""
        if now >= self._unsorted_at:
            self._unsorted_at = now + _RESORT_CHECK_SECONDS
            self._unsorted = deque(self._find_unsorted(now, is_left=is_left))
        room = max(1, self._storage.uploader.threads // 2) - self._resorts
        while self._unsorted and room > 0:
            topic = self._unsorted.popleft()
            uploads = topic.bucket.uploads if topic.bucket is not None else None
            if uploads is None or uploads.is_submitted or not uploads.sorter.is_due(now):
                continue
            room -= 1
            with self._queue_lock:
                self._resorts += 1
            self._submit(topic, uploads, partial(self._resort, uploads))

    def _find_unsorted(self, now: float, *, is_left: bool) -> list[Topic]:
        """The topics whose runs are due, the one that waits longest first."""
        due: list[tuple[float, int, Topic]] = []
        for number, topic in enumerate(tuple(self._with_runs)):
            sorter = topic.bucket.uploads.sorter if topic.bucket is not None else None
            if sorter is None or self._forget_sorted(topic, sorter):
                continue
            is_ours = not is_left or sorter.is_left_behind(now)
            if is_ours and sorter.is_due(now):
                due.append((sorter.since or now, number, topic))
        return [topic for _, _, topic in sorted(due)]

    def _forget_sorted(self, topic: Topic, sorter: RunSorter) -> bool:
        """Removes a topic from the set if it has no runs; returns whether it has none."""
        if sorter.has_runs():
            return False
        self._with_runs.discard(topic)
        # After removing it: a run before this check is seen by it, a later one adds the topic.
        if sorter.has_runs():
            self._with_runs.add(topic)
        return True

    def _resort(self, uploads: TopicUploads) -> None:
        try:
            uploads.resort()
        finally:
            with self._queue_lock:
                self._resorts -= 1
            if self._unsorted:
                self._due.set()

    def _submit(self, topic: Topic, uploads: TopicUploads, work: Callable[[], object]) -> None:
        uploads.is_submitted = True
        with self._queue_lock:
            self._queued_count += 1
        self._pool.submit(self._run, topic, uploads, work)

    def _is_crowded(self) -> bool:
        """Whether topics wait for a thread; a topic with a long backlog then yields to them."""
        return self._queued_count > 0

    def _run(self, topic: Topic, uploads: TopicUploads, work: Callable[[], object]) -> None:
        with self._queue_lock:
            self._queued_count -= 1
        try:
            work()
        except IsterError:
            # Recorded by `TopicUploads`, which decides when to try again.
            _log.debug("upload", exc_info=True)
        except Exception as error:  # noqa: BLE001 - the thread has other topics to serve
            threads.record("ister-upload", error, topic=topic.name)
        finally:
            uploads.is_submitted = False
            if uploads.is_wanted and work != uploads.follow:
                # An upload was requested during this cycle, or the cycle yielded to other topics;
                # the tender skipped the topic meanwhile.
                self._due.set()

    # -- terms ------------------------------------------------------------------------------

    def _begin(self, topic: Topic) -> None:
        """Records a topic's term in the bucket; if that fails, the next sweep tries again."""
        if topic.bucket is not None and not topic.wal.damage:
            _attempt(topic, "term not recorded", topic.bucket.uploads.begin_term)

    # -- marks of idle topics ---------------------------------------------------------------

    def _mark(self, topic: Topic, mark: IdleMark) -> None:
        try:
            mark.set()
        except IsterError as error:
            _log.info("idle topic not marked", extra={"topic": topic.name, "error": str(error)})

    def clear_soon(self, topic: Topic, mark: IdleMark) -> None:
        """Has a mark removed. Called for each append that waits, with the log's lock held."""
        if not mark.is_clearing:
            mark.is_clearing = True
            with suppress(RuntimeError):  # the log is being closed, and so is the topic
                self._marker.submit(threads.run, "ister-idle", self._clear, topic, mark)

    def _clear(self, topic: Topic, mark: IdleMark) -> None:
        # First: an append that is held after this has it called again.
        mark.is_clearing = False
        try:
            mark.clear()
        except (FencedError, ClosedError):
            return
        except IsterError as error:
            _log.warning("appends wait", extra={"topic": topic.name, "error": str(error)})
            self._held_up.add(topic)

    def _retain(self, topic: Topic) -> None:
        if topic.bucket is None:
            return
        retention = topic.bucket.retention
        try:
            for what in (retention.trim, retention.expire):
                try:
                    what()
                except (FencedError, ClosedError):
                    return
                except IsterError as error:
                    self._stores.metrics.count("retention.errors_total")
                    _log.warning("retention", extra={"topic": topic.name, "error": str(error)})
        finally:
            retention.is_submitted = False

    def _check(self, topic: Topic) -> None:
        """Uploads lost objects of a newly opened topic again while local files still have them."""
        if topic.bucket is not None:
            _attempt(topic, "objects not checked", topic.bucket.check_recent)

    def _collect(self, topic: Topic) -> None:
        if topic.bucket is not None:
            _attempt(topic, "orphans", topic.bucket.retention.collect_orphans)


def _attempt(topic: Topic, what: str, work: Callable[[], object]) -> None:
    """Does what the next turn does again if it fails."""
    try:
        work()
    except ClosedError:
        return  # the log is being closed
    except IsterError as error:
        _log.warning(what, extra={"topic": topic.name, "error": str(error)})


class _Watcher:
    """The `UploadWatcher` of one topic: tells the threads of its log."""

    def __init__(self, background: Background, topic: Topic, uploads: TopicUploads) -> None:
        self._background = background
        self._topic = topic
        self._uploads = uploads
        self.on_wanted = background.wake

    def on_backlog(self) -> None:
        """Has the tender check the topic until it is idle."""
        self._background.watch(self._topic, self._uploads)

    def on_runs(self) -> None:
        """Has the runs re-sorted when they are due."""
        self._background.list_runs(self._topic)

    def on_append(self) -> None:
        """Has the mark of the idle topic removed."""
        self._background.clear_soon(self._topic, self._uploads.idle_mark)
