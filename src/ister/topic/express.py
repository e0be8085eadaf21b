"""Uploads of topics that share express objects: one object for all of them, a few times a second.

    synced ─► noted ─► one object of all noted topics ─► put ─► commit ─► `tiered` rises

Owns: which topics wait, when the next object is written, and retries. Does not own: the objects and
their commit (`ister.bucket.express`), what becomes of a topic's watermarks (`uploads`), the thread
(`background`).

An object begins at least `linger_ms` after the one before it, or as soon as `max_bytes` wait: a
message that comes after a pause is not delayed, and the number of objects does not depend on that
of topics. Topics take turns: each gets an even share of the room that is left, and those for which
there is none are the first of the next object, which follows without a pause.

One object is written at a time, in memory, so memory is bounded by `max_bytes` and the largest
message. If the bucket is slow, objects are larger and messages wait longer; producers are held back
by the upload lag (`storage.uploader.max_lag_bytes`), as with other uploads.

What a crash leaves: an object that is part of no topic, or of some; and messages in local files.
"""

from __future__ import annotations

import logging
import threading
from itertools import count
from typing import Final

from ister import threads
from ister.bucket.express import ExpressObject, Run, commit_runs
from ister.bucket.express_collection import ExpressCollection, collect_express
from ister.bucket.names import express_name
from ister.errors import ClosedError, ConflictError, FencedError, IsterError
from ister.retry import backoff_seconds
from ister.topic.bucket_link import TopicTier
from ister.topic.stores import Tiers

_log = logging.getLogger("ister.topic.express")

_RETRY_SECONDS_MIN: Final = 0.25
_RETRY_SECONDS_MAX: Final = 30.0
_STEPS: Final = 4
"""How often it is checked within `linger_ms` whether `max_bytes` wait."""
_LATER_SECONDS: Final = 1.0
"""How long a topic with an error of its own is left out."""


class Express:
    """Writes the express objects of one log. `write_next` is called by one thread at a time."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._settings = tiers.storage.uploader.express
        self._clock = tiers.clock
        self._metrics = tiers.metrics
        self._stopping = threading.Event()
        self._wake = threading.Event()
        # Topics that wait, oldest first; each step on it is a single, atomic operation.
        self._waiting: dict[TopicTier, None] = {}
        self._later: dict[TopicTier, float] = {}
        self._sequence = count()
        self._failures = 0
        self._under_way: str | None = None

    @property
    def under_way(self) -> str | None:
        """The key of the object that is being written or committed."""
        return self._under_way

    def collect(self) -> ExpressCollection | None:
        """Removes express objects that no topic needs; None if another process is doing that."""
        tiers, storage = self._tiers, self._tiers.storage
        if tiers.node_clock.check() is not None:
            return None
        try:
            return collect_express(
                tiers.objects,
                tiers.metadata,
                storage.metadata.root_prefix,
                grace_seconds=storage.cloud.orphan_grace_minutes * 60,
                clock=self._clock,
                metrics=self._metrics,
                process=tiers.membership.instance,
                is_under_way=lambda key: key == self._under_way,
                correct_ms=tiers.node_clock.correct_ms,
            )
        except (ConflictError, FencedError, ClosedError):
            return None
        except IsterError as error:
            _log.warning("express objects not collected", extra={"error": str(error)})
            return None

    def add(self, tier: TopicTier) -> None:
        """Adds a topic that was opened, if it shares express objects."""
        if tier.is_express:
            tier.on_express = lambda: self._note(tier)
            # Messages that an earlier process has synced.
            self._note(tier)

    def remove(self, tier: TopicTier) -> None:
        """Forgets a closed topic."""
        tier.on_express = lambda: None
        self._waiting.pop(tier, None)
        self._later.pop(tier, None)

    def _note(self, tier: TopicTier) -> None:
        """Called after every sync: takes no lock."""
        self._waiting.setdefault(tier)
        if not self._wake.is_set():
            self._wake.set()

    # -- the thread -------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `run`; an object that is being written is completed or fails first."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        """Writes objects until `stop`."""
        began = -float("inf")
        while not self._stopping.is_set():
            self._wake.wait(_LATER_SECONDS if self._later else None)
            self._linger(began)
            if self._stopping.is_set():
                return
            self._wake.clear()
            began = self._clock.monotonic()
            # An unexpected error must not end the uploads of all topics.
            with threads.guard("ister-express"):
                if self.write_next():
                    began = -float("inf")
                    self._wake.set()
            if self._failures:
                pause = backoff_seconds(
                    self._failures, first=_RETRY_SECONDS_MIN, most=_RETRY_SECONDS_MAX
                )
                self._stopping.wait(pause)
                self._wake.set()

    def _linger(self, began: float) -> None:
        """Waits until the next object may begin, or enough bytes wait."""
        linger = self._settings.linger_ms / 1000
        while not self._stopping.is_set():
            left = began + linger - self._clock.monotonic()
            if left <= 0 or self._waiting_bytes() >= self._settings.max_bytes:
                return
            self._stopping.wait(min(left, linger / _STEPS))

    def _waiting_bytes(self) -> int:
        return sum(tier.lag_bytes for tier in list(self._waiting))

    # -- one object -------------------------------------------------------------------------

    def write_next(self) -> bool:
        """Writes and commits one object for the topics that wait; whether some are left.

        Errors are recorded with the topics, which stay in the list.
        """
        membership = self._tiers.membership
        name = express_name(membership.node, membership.instance, next(self._sequence))
        made = ExpressObject(
            name,
            index_every_messages=self._tiers.storage.uploader.index_every_messages,
            created_at=self._clock.now_ns() // 1_000_000_000,
        )
        tiers: dict[str, TopicTier] = {}
        self._recall()
        waiting = list(self._waiting)
        is_more = False
        for number, tier in enumerate(waiting):
            room = self._settings.max_bytes - made.size_bytes
            if room <= 0:
                is_more = True
                break
            # First: what is synced after this is noted again.
            self._waiting.pop(tier, None)
            try:
                if tier.add_run(made, max(1, room // (len(waiting) - number))):
                    self._waiting.setdefault(tier)
                    is_more = True
            except (FencedError, ClosedError):
                continue
            except IsterError as error:
                self._put_off(tier, error)
                continue
            tiers[tier.owned.topic] = tier
        if made.runs:
            self._write(made, tiers)
        return is_more and not self._failures

    def _write(self, made: ExpressObject, tiers: dict[str, TopicTier]) -> None:
        self._under_way = made.key
        try:
            presence = self._tiers.membership.presence()
            self._tiers.wait_for_egress(made.size_bytes, self._stopping.is_set)
            began = self._clock.monotonic()
            size_bytes = made.put(self._tiers.objects)
            put_at = self._clock.monotonic()
            self._metrics.observe("express.put_latency_ms", (put_at - began) * 1000)
            self._metrics.count("express.objects_total")
            self._metrics.count("express.bytes_total", size_bytes)
            failure: IsterError | None = None
            for run, error in commit_runs(self._tiers.metadata, made.runs, presence):
                failure = self._finish(run, tiers[run.owned.topic], error) or failure
            self._metrics.observe(
                "express.commit_latency_ms", (self._clock.monotonic() - put_at) * 1000
            )
            if failure is not None:
                raise failure
            self._failures = 0
        except IsterError as error:
            self._fail(made, tiers, error)
        finally:
            self._under_way = None

    def _finish(self, run: Run, tier: TopicTier, error: IsterError | None) -> IsterError | None:
        """Takes note of a run's outcome; returns an error that may concern all topics."""
        if error is None:
            tier.take_run(run.descriptor)
            self._metrics.count("express.runs_total")
            return None
        if isinstance(error, FencedError):
            return None
        if isinstance(error, ConflictError):
            try:
                tier.take_run_conflict()
            except FencedError:
                return None
            except IsterError as unknown:
                error = unknown
            else:
                self._note(tier)
                return None
        tier.take_run_failure(error)
        self._note(tier)
        return error

    def _fail(self, made: ExpressObject, tiers: dict[str, TopicTier], error: IsterError) -> None:
        """All topics whose messages did not get into the bucket wait again."""
        if self._stopping.is_set():
            return
        self._failures += 1
        self._metrics.count("express.errors_total")
        _log.warning(
            "express object failed",
            extra={"object": made.key, "topics": len(made.runs), "error": str(error)},
        )
        for run in made.runs:
            tier = tiers[run.owned.topic]
            if run.owned.tiered < run.descriptor.end:
                tier.take_run_failure(error)
                self._note(tier)

    def _put_off(self, tier: TopicTier, error: IsterError) -> None:
        """Leaves out a topic that cannot be read, for a while."""
        if tier.failures == 0:
            _log.warning("not uploaded", extra={"topic": tier.owned.topic, "error": str(error)})
        tier.take_run_failure(error)
        self._later[tier] = self._clock.monotonic() + _LATER_SECONDS

    def _recall(self) -> None:
        now = self._clock.monotonic()
        for tier, at in list(self._later.items()):
            if now >= at and self._later.pop(tier, None) is not None:
                self._waiting.setdefault(tier)
