"""Uploads of topics that share express objects: one object for all of them, a few times a second.

    synced ─► noted ─► one object of all noted topics ─► put ─► commit ─► `tiered` rises

Owns: which topics wait, when the next object is written, and retries. Does not own: the objects and
their commit (`ister.bucket.express`), a topic's watermarks (`uploads`), the thread (`background`).

An object begins at least `linger_ms` after the one before it, or as soon as `max_bytes` wait. So a
message after a pause is not delayed, and the number of objects does not depend on the number of
topics. Each topic gets an equal share of the space that is left in the object. Topics that do not
fit come first in the next object, which follows without a pause.

Two objects may be written at once; they are committed in order. If the first one fails, runs of the
second one that continue it cannot be committed either, and both are planned again. Objects are in
memory, so memory is bounded by three times `max_bytes` and the largest message. If the bucket is
slow, objects are larger and messages wait longer; the upload lag holds producers back
(`storage.uploader.max_lag_bytes`), as with other uploads.

What a crash leaves: objects of which no run, or some runs, are part of their topics; and messages
in local files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Final

from ister.base import threads
from ister.base.retry import backoff_seconds
from ister.bucket.express import ExpressObject, Run, commit_runs
from ister.bucket.express_collection import ExpressCollection, collect_express
from ister.bucket.names import express_name
from ister.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvariantError,
    IsterError,
    UnavailableError,
)
from ister.metadata.base import Compare
from ister.topic.stores import Stores
from ister.topic.uploads import PlannedRun, TopicUploads

_log = logging.getLogger("ister.topic.express")

_THREAD: Final = "ister-express"
_RETRY_SECONDS_MIN: Final = 0.25
_RETRY_SECONDS_MAX: Final = 30.0
_STEPS: Final = 4
"""Number of checks within `linger_ms` whether `max_bytes` wait."""
_LATER_SECONDS: Final = 1.0
"""How long a topic with an error of its own is skipped."""

_ON_THEIR_WAY_MAX: Final = 2
"""Objects that are put or committed at once."""


@dataclass(slots=True)
class ExpressBatch:
    """An object that is being written or committed, and its topics' plans."""

    made: ExpressObject
    planned: dict[str, PlannedRun] = field(default_factory=dict)
    presence: Compare | None = None


class Express:
    """Writes the express objects of one log. One thread at a time calls `gather`."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._settings = stores.storage.uploader.express
        self._clock = stores.clock
        self._metrics = stores.metrics
        self._stopping = threading.Event()
        # Wakes the thread, once. A queue: a signal handler that raises leaves no lock taken.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._is_awake = False
        # Topics that wait, oldest first; each step on it is a single, atomic operation.
        self._waiting: dict[TopicUploads, None] = {}
        self._later: dict[TopicUploads, float] = {}
        self._sequence = count()
        self._failures = 0
        self._is_more = False
        self._under_way: set[str] = set()

    def is_under_way(self, key: str) -> bool:
        """Whether the object with this key is being written or committed."""
        return key in self._under_way

    def collect(self) -> ExpressCollection | None:
        """Removes express objects that no topic needs; None if another process is doing that."""
        stores, storage = self._stores, self._stores.storage
        if stores.node_clock.check() is not None or stores.trust.is_distrusted:
            return None
        try:
            return collect_express(
                stores.objects,
                stores.metadata,
                storage.metadata.root_prefix,
                grace_seconds=storage.cloud.orphan_grace_minutes * 60,
                clock=self._clock,
                metrics=self._metrics,
                process=stores.membership.instance,
                is_under_way=self.is_under_way,
                correct_ms=stores.node_clock.correct_ms,
            )
        except (ConflictError, FencedError, ClosedError):
            return None
        except IsterError as error:
            _log.warning("collecting express objects failed", extra={"error": str(error)})
            return None

    def add(self, uploads: TopicUploads) -> None:
        """Adds a topic that was opened, if it shares express objects."""
        if uploads.is_express:
            uploads.express = self
            # Messages that an earlier process has synced.
            self.enlist(uploads)

    def remove(self, uploads: TopicUploads) -> None:
        """Forgets a closed topic."""
        uploads.express = None
        self._waiting.pop(uploads, None)
        self._later.pop(uploads, None)

    def enlist(self, uploads: TopicUploads) -> None:
        """Has the next object include a topic; called after every sync, takes no lock."""
        self._waiting.setdefault(uploads)
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wakes.put(None)

    # -- the thread -------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `run`; objects on their way are completed or fail first."""
        self._stopping.set()
        self._wakes.put(None)

    def run(self) -> None:
        """Writes objects until `stop`."""
        began = -float("inf")
        slots = threading.Semaphore(_ON_THEIR_WAY_MAX)
        with (
            ThreadPoolExecutor(_ON_THEIR_WAY_MAX, thread_name_prefix="ister-express-put") as puts,
            ThreadPoolExecutor(1, thread_name_prefix="ister-express-commit") as commits,
        ):
            while not self._stopping.is_set():
                with suppress(Empty):
                    self._wakes.get(timeout=_LATER_SECONDS if self._later else None)
                self._linger(began)
                slots.acquire()
                self._back_off()
                if self._stopping.is_set() or threads.have_pools_ended():
                    return
                # Reset first: a topic that is noted after this wakes the thread again.
                self._is_awake = False
                began = self._clock.monotonic()
                batch = None
                # An unexpected error must not end the uploads of all topics.
                with threads.guard(_THREAD):
                    batch = self.gather()
                if batch is None:
                    slots.release()
                    continue
                if self._is_more:
                    began = -float("inf")
                    self._wake()
                put = puts.submit(self.put, batch)
                commits.submit(self._finish, put, batch, slots.release)

    def _finish(
        self, put: Future[IsterError | None], batch: ExpressBatch, on_end: Callable[[], None]
    ) -> None:
        try:
            self.commit(batch, put.result())
        except Exception as error:  # noqa: BLE001 - must not end the uploads of all topics
            threads.record(_THREAD, error)
            self.commit(batch, UnavailableError(f"unexpected error: {error!r}"))
        finally:
            on_end()

    def _back_off(self) -> None:
        """Waits a while after a failure."""
        if self._failures:
            pause = backoff_seconds(
                self._failures, first=_RETRY_SECONDS_MIN, most=_RETRY_SECONDS_MAX
            )
            self._stopping.wait(pause)

    def _linger(self, began: float) -> None:
        """Waits until the next object may begin, or enough bytes wait."""
        linger = self._settings.linger_ms / 1000
        while not self._stopping.is_set():
            left = began + linger - self._clock.monotonic()
            if left <= 0 or self._waiting_bytes() >= self._settings.max_bytes:
                return
            self._stopping.wait(min(left, linger / _STEPS))

    def _waiting_bytes(self) -> int:
        return sum(uploads.lag_bytes for uploads in list(self._waiting))

    # -- one object -------------------------------------------------------------------------

    def write_next(self) -> bool:
        """Writes and commits one object; returns whether topics are left for another one.

        Errors are recorded with the topics, which wait again.
        """
        batch = self.gather()
        if batch is None:
            return False
        self.commit(batch, self.put(batch))
        return self._is_more and not self._failures

    def gather(self) -> ExpressBatch | None:
        """Makes an object of what the waiting topics have synced; None if there is nothing."""
        membership = self._stores.membership
        name = express_name(membership.node, membership.instance, next(self._sequence))
        made = ExpressObject(
            name,
            index_every_messages=self._stores.storage.uploader.index_every_messages,
            created_at=self._clock.now_ns() // 1_000_000_000,
        )
        batch = ExpressBatch(made)
        self._recall()
        waiting = list(self._waiting)
        self._is_more = False
        for number, uploads in enumerate(waiting):
            room = self._settings.max_bytes - made.size_bytes
            if room <= 0:
                self._is_more = True
                break
            # Removed first: messages that are synced after this note the topic again.
            self._waiting.pop(uploads, None)
            try:
                planned = uploads.add_run(made, max(1, room // (len(waiting) - number)))
            except (FencedError, ClosedError):
                continue
            except IsterError as error:
                self._leave_out(uploads, error)
                continue
            except Exception as error:  # noqa: BLE001 - the other topics have to be served
                threads.record(_THREAD, error, topic=uploads.owned.topic)
                self._leave_out(uploads, InvariantError(f"unexpected error: {error!r}"))
                continue
            if planned is not None:
                batch.planned[uploads.owned.topic] = planned
                if not planned.is_all:
                    self._waiting.setdefault(uploads)
                    self._is_more = True
        if not made.runs:
            if not self._under_way:
                self._failures = 0  # those that failed are gone, or wait for a time of their own
            return None
        self._under_way.add(made.key)
        return batch

    def put(self, batch: ExpressBatch) -> IsterError | None:
        """Writes an object; returns the error if that failed."""
        made = batch.made
        try:
            batch.presence = self._stores.membership.presence()
            self._stores.wait_for_egress(made.size_bytes, self._stopping.is_set)
            began = self._clock.monotonic()
            size_bytes = made.put(self._stores.objects)
        except IsterError as error:
            return error
        self._metrics.observe("express.put_latency_ms", (self._clock.monotonic() - began) * 1000)
        self._metrics.count("express.objects_total")
        self._metrics.count("express.bytes_total", size_bytes)
        self._metrics.observe("upload.batch_bytes", size_bytes)
        return None

    def commit(self, batch: ExpressBatch, failure: IsterError | None) -> None:
        """Commits an object that was written; `failure` is what `put` returned."""
        began = self._clock.monotonic()
        failed: dict[TopicUploads, IsterError] = {}
        try:
            if failure is None and batch.presence is not None:
                for run, error in commit_runs(
                    self._stores.metadata, batch.made.runs, batch.presence
                ):
                    planned = batch.planned[run.owned.topic]
                    if (unknown := self._take(run, planned, error)) is not None:
                        failed[planned.uploads] = unknown
                self._metrics.observe(
                    "express.commit_latency_ms", (self._clock.monotonic() - began) * 1000
                )
            elif failure is not None:
                for planned in batch.planned.values():
                    self._fail(planned, failure)
                    failed[planned.uploads] = failure
        finally:
            self._under_way.discard(batch.made.key)
        self._judge(batch, failed)

    def _judge(self, batch: ExpressBatch, failed: dict[TopicUploads, IsterError]) -> None:
        """Schedules the retry of topics whose runs were not committed."""
        if len(failed) < len(batch.made.runs):
            self._failures = 0
        if not failed or self._stopping.is_set():
            return
        self._metrics.count("express.errors_total")
        uploads, error = next(iter(failed.items()))
        _log.warning(
            "express object failed",
            extra={
                "object": batch.made.key,
                "topics": len(failed),
                "topic": uploads.owned.topic,
                "error": str(error),
            },
        )
        if len(failed) < len(batch.made.runs):
            # The stores answer: the errors are about these topics.
            self._put_off(failed)
            return
        self._failures += 1
        for uploads in failed:
            self.enlist(uploads)

    def _take(self, run: Run, planned: PlannedRun, error: IsterError | None) -> IsterError | None:
        """Records a run's outcome; returns the error if the run has to be retried."""
        uploads = planned.uploads
        if error is None:
            uploads.take_run(run.descriptor)
            self._metrics.count("express.runs_total")
            return None
        if isinstance(error, FencedError):
            return None
        if isinstance(error, ConflictError):
            try:
                uploads.take_run_conflict(planned.plan)
            except FencedError:
                return None
            except IsterError as unknown:
                error = unknown
            else:
                self.enlist(uploads)
                return None
        self._fail(planned, error)
        return error

    def _fail(self, planned: PlannedRun, error: IsterError) -> None:
        if not self._stopping.is_set():
            planned.uploads.take_run_failure(error, planned.plan)

    def _leave_out(self, uploads: TopicUploads, error: IsterError) -> None:
        """Skips a topic that cannot be read, and retries it later."""
        if uploads.failures == 0:
            _log.warning("topic skipped", extra={"topic": uploads.owned.topic, "error": str(error)})
        uploads.take_run_failure(error, -1)
        self._put_off([uploads])

    def _put_off(self, stores: Iterable[TopicUploads]) -> None:
        """Skips topics with errors of their own for a while."""
        at = self._clock.monotonic() + _LATER_SECONDS
        self._later.update(dict.fromkeys(stores, at))
        self._wake()

    def _recall(self) -> None:
        now = self._clock.monotonic()
        for uploads, at in list(self._later.items()):
            if now >= at and self._later.pop(uploads, None) is not None:
                self._waiting.setdefault(uploads)
