"""One term of the pipeline: from taking the lease until it is lost, or the service is stopped.

    tier, every second or so                                  ─┐
    resort, compact, export, gc, scrub: scheduled or requested ─┼─ three threads
    status, reports, and stops while Spark works              ─┘

Owns: when each job runs, requests, the status, which has the memory of the driver, its JVM and its
Python workers. Does not own: the lease (`job`), what jobs do.

Invariants:

- uploads never wait for a slow job, which runs on a thread and under a fence of its own;
- a failure of one topic, or of one job, does not stop others;
- once the lease is lost, neither the pipeline nor its slow job commits anything.

Only the holder of the lease takes a request (`ister.bucket.pipeline`). A request's key is
gone once its job starts; the status shows what became of it.

Nothing here grows with time: reports hold the last result, not a history.

What a crash leaves: keys that expire with their leases, and what each job leaves.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from ister.base import threads
from ister.base.clock import Clock
from ister.base.retry import backoff_seconds
from ister.bucket.directory import TopicDirectory
from ister.bucket.pipeline import (
    REQUEST_SECONDS_MAX,
    REQUESTED_JOBS,
    PipelineKeys,
    PipelineRequest,
    read_requests,
    take_request,
)
from ister.errors import FencedError, InvariantError, IsterError, UnavailableError
from ister.metadata.base import Put
from ister.spark.jobs.job import Job, open_job, shorten
from ister.spark.jobs.job_report import JobReport
from ister.spark.location import LogLocation
from ister.spark.owners import read_watermarks

if TYPE_CHECKING:
    from ister.spark.jobs.tier_topics import Cycle

_log = logging.getLogger("ister.spark.jobs.service")

# How soon a stop is noticed while Spark works.
_WATCH_SECONDS: Final = 0.2
_LIST_SECONDS: Final = 5.0
_LAG_SECONDS: Final = 15.0
_LAG_TOPICS_MAX: Final = 500
_REPORT_SECONDS: Final = 10.0
# A cycle that is nearly done when the service is stopped may commit what it has.
_GRACE_SECONDS: Final = 2.0
_CANCEL_SECONDS: Final = 0.5
_FAILURE_SECONDS: Final = 2.0
_FAILURE_SECONDS_MAX: Final = 60.0
_TEXT_MAX: Final = 500
_SHOWN_FAILING_TOPICS: Final = 20
_RETRY_SECONDS: Final = 30.0
# A job that became due while no pipeline ran does not start at once.
_OVERDUE_SECONDS: Final = 5.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

TierCycle: TypeAlias = "Callable[[Job, Sequence[str], JobReport, bool], Cycle]"
"""Uploads topics: those that are due, or everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowJob:
    """A job that runs now and then."""

    name: str
    every_seconds: float
    work: Callable[[Job], object]
    key: Callable[[PipelineKeys], str] | None = None
    """The key that only one such job may hold at a time; None for a key of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermSettings:
    """What a term does."""

    tier: TierCycle | None
    """None if the pipeline does not upload."""
    jobs: tuple[SlowJob, ...]
    make_job: Callable[[str, Sequence[str] | None], SlowJob]
    """Creates a requested job."""
    tick_seconds: float = 1.0
    """Between two upload cycles."""
    status_seconds: float = 3.0
    """Between two status records."""
    request_seconds: float = 1.0
    """Between two looks for requests."""


@dataclass(slots=True, kw_only=True)
class TierTotals:
    """What was tiered since the service started, over all terms."""

    started_at: int
    terms: int = 0
    cycles: int = 0
    objects: int = 0
    messages: int = 0
    bytes: int = 0
    last_cycle_at: int | None = None
    last_cycle_seconds: float | None = None

    def add(self, cycle: Cycle, seconds: float, now: int) -> None:
        """Adds a cycle that took `seconds` and ended at `now`."""
        self.cycles += 1
        self.objects += cycle.objects
        self.messages += cycle.messages
        self.bytes += cycle.bytes
        self.last_cycle_at, self.last_cycle_seconds = now, round(seconds, 3)


class Schedule:
    """When a repeated job is due, by the monotonic clock. Used by one thread.

    A job that was cut off is retried early, and later after every further failure: after half a
    minute, a minute, two, up to its interval. A job that ran to its end, and found something wrong,
    keeps its interval: a retry would find the same.
    """

    def __init__(
        self,
        every_seconds: float,
        *,
        clock: Clock,
        rng: random.Random,
        last_started_at: int | None = None,
    ) -> None:
        """Continues the schedule of an earlier process.

        `rng` is the randomness of pauses after failures; `last_started_at` is in seconds since the
        Unix epoch.
        """
        self._every = every_seconds
        self._clock = clock
        self._rng = rng
        self._failures = 0
        self.last_started_at = last_started_at
        self.last_seconds: float | None = None
        self.last_ok: bool | None = None
        self.last_error: str | None = None
        self.runs = 0
        self._began = 0.0
        wait = every_seconds
        if last_started_at is None:
            wait = min(every_seconds, _OVERDUE_SECONDS)
        else:
            passed = clock.now_ns() / 1e9 - last_started_at
            # A clock that was set back must not delay it for ever.
            wait = min(max(every_seconds - passed, min(every_seconds, _OVERDUE_SECONDS)), wait)
        self._next = clock.monotonic() + wait

    @property
    def is_due(self) -> bool:
        """Whether the job is due."""
        return self._clock.monotonic() >= self._next

    @property
    def wait_seconds(self) -> float:
        """Time until the job is due."""
        return max(self._next - self._clock.monotonic(), 0.0)

    def begin(self) -> None:
        """Records that the job starts now."""
        self._began = self._clock.monotonic()
        self.last_started_at = self._clock.now_ns() // 1_000_000_000
        self.runs += 1

    def end(self, error: str | None, *, is_cut_off: bool = False) -> None:
        """Records that the job has ended.

        A job that `is_cut_off` did not run to its end, and is retried early.
        """
        now = self._clock.monotonic()
        self.last_seconds = now - self._began
        self.last_ok, self.last_error = error is None, error
        if not is_cut_off:
            self._failures = 0
            # Counted from its start: a long job is not delayed.
            self._next = max(self._began + self._every, now)
        else:
            self._failures += 1
            self._next = now + backoff_seconds(
                self._failures, first=_RETRY_SECONDS, most=self._every, rng=self._rng
            )

    def put_off(self) -> None:
        """Records that the job was stopped from outside: it stays due."""
        self.last_seconds = self._clock.monotonic() - self._began

    def as_json(self) -> dict[str, object]:
        """Returns the fields for the pipeline's status."""
        return {
            "every_seconds": self._every,
            "next_at": round(self._clock.now_ns() / 1e9 + self.wait_seconds),
            "runs": self.runs,
            "last_started_at": self.last_started_at,
            "last_seconds": None if self.last_seconds is None else round(self.last_seconds, 3),
            "last_ok": self.last_ok,
            "last_error": self.last_error,
        }


class PipelineTerm:
    """See the module header. `run`, then `end`."""

    def __init__(
        self,
        job: Job,
        settings: TermSettings,
        totals: TierTotals,
        stop: threading.Event,
        *,
        ends_at: float,
        rng: random.Random,
    ) -> None:
        self._job = job
        self._settings = settings
        self._totals = totals
        self._stop = stop
        self._ends_at = ends_at
        self._clock = job.clock
        self._rng = rng
        self._began = self._clock.monotonic()
        self._over = threading.Event()
        """Set when the lease is lost or the service is stopped: nothing new starts."""
        self._is_idle = threading.Event()
        """Set while no tier cycle runs."""
        self._is_idle.set()
        self._lock = threading.Lock()
        self._status_lock = threading.Lock()
        self._slow: Job | None = None
        """The slow job that is running."""
        self._topics: list[str] = []
        self._report = JobReport("tier", started_at=self._now())
        self._reported: tuple[int, int] | None = None
        self._report_at = -float("inf")
        self._cycle_error: str | None = None
        self._lag: int | None = None
        self._lag_at = -float("inf")
        self._schedules = {
            slow.name: Schedule(
                slow.every_seconds,
                clock=self._clock,
                rng=rng,
                last_started_at=self._last_started(slow.name),
            )
            for slow in settings.jobs
        }
        self._threads: list[threading.Thread] = []
        self._requests: dict[str, dict[str, object]] = {}
        """What became of the last request for each job."""

    def _now(self) -> int:
        return self._clock.now_ns() // 1_000_000_000

    def _last_started(self, name: str) -> int | None:
        """Returns when a job last started, in whichever process."""
        try:
            found = self._job.store.get(self._job.keys.report(name))
            return None if found is None else int(json.loads(found.value)["started_at"])
        except (IsterError, ValueError, TypeError, KeyError):
            return None

    # -- the three threads ------------------------------------------------------------------

    def run(self) -> None:
        """Tiers until the lease is lost, or the service is stopped."""
        self._start("ister-pipeline-status", self._watch)
        self._start("ister-pipeline-jobs", self._run_slow_jobs)
        listed_at = -float("inf")
        failures = 0
        while not self._is_ending():
            self._job.check()
            now = self._clock.monotonic()
            pause = self._settings.tick_seconds
            try:
                if now - listed_at >= _LIST_SECONDS:
                    self._topics = self._job.topics(["*"])
                    listed_at = now
                self._run_cycle(self._take_request(("tier",)))
                failures, self._cycle_error = 0, None
            except (FencedError, InvariantError):
                raise
            except Exception as error:
                if self._is_ending():
                    break  # cancelled
                if self._job.spark.is_stopped:
                    raise UnavailableError(
                        "Spark has stopped", hint="start the pipeline again"
                    ) from error
                failures += 1
                self._cycle_error = _shorten(error)
                _log.warning("tier cycle failed", extra={"error": self._cycle_error})
                pause = backoff_seconds(
                    failures, first=_FAILURE_SECONDS, most=_FAILURE_SECONDS_MAX, rng=self._rng
                )
            left = max(self._ends_at - self._clock.monotonic(), 0.0)
            self._stop.wait(min(pause, left))

    def _run_cycle(self, request: PipelineRequest | None) -> None:
        tier, topics = self._settings.tier, self._topics
        if tier is None:
            self._totals.cycles += 1
            if request is not None:
                self._end_request(request, "this pipeline does not upload")
            return
        self._is_idle.clear()
        error: str | None = None
        try:
            began = self._clock.monotonic()
            if request is not None and request.topics is not None:
                # List again: a topic may have been created a moment ago.
                self._topics = self._job.topics(["*"])
                topics = [topic for topic in request.topics if topic in self._topics]
            cycle = tier(self._job, topics, self._report, request is None)
            if cycle.failed:
                error = f"{cycle.failed} topics failed"
        except BaseException as failure:
            error = _shorten(failure)
            raise
        finally:
            self._is_idle.set()
            if request is not None:
                self._end_request(request, error)
        self._totals.add(cycle, self._clock.monotonic() - began, self._now())
        for gone in self._report.topics.keys() - set(self._topics):
            del self._report.topics[gone]

    def _run_slow_jobs(self) -> None:
        look_at = -float("inf")
        while not self._over.is_set():
            try:
                if self._clock.monotonic() >= look_at:
                    look_at = self._clock.monotonic() + self._settings.request_seconds
                    request = self._take_request(REQUESTED_JOBS[1:])
                    if request is not None:
                        self._run_requested(request)
                        look_at = -float("inf")  # another one may be waiting
                        continue
                due = next((s for s in self._settings.jobs if self._schedules[s.name].is_due), None)
                if due is None:
                    waits = [schedule.wait_seconds for schedule in self._schedules.values()]
                    pause = min([self._settings.request_seconds, *waits])
                    self._over.wait(max(pause, 0.05))
                    continue
                self._run_slow_job(due, self._schedules[due.name])
            except Exception as error:  # noqa: BLE001 - the other jobs keep running
                threads.record("ister-pipeline-jobs", error)
                self._over.wait(_FAILURE_SECONDS)

    def _run_requested(self, request: PipelineRequest) -> None:
        try:
            slow = self._settings.make_job(request.job, request.topics)
        except IsterError as error:
            _log.warning("request refused", extra={"job": request.job, "error": str(error)})
            self._end_request(request, _shorten(error))
            return
        self._end_request(request, self._run_slow_job(slow, self._schedules.get(slow.name)))

    def _run_slow_job(self, slow: SlowJob, schedule: Schedule | None) -> str | None:
        """Runs a job; returns its error, if any."""
        if schedule is not None:
            schedule.begin()
        error: str | None = None
        is_cut_off = False
        try:
            with open_job(
                slow.name,
                self._job.spark,
                self._job.place,
                exclusive=slow.key,
                clock=self._clock,
            ) as job:
                with self._lock:
                    self._slow = job
                try:
                    # After registering the job: either `end` sees it, or this sees the end.
                    if not self._over.is_set():
                        slow.work(job)
                finally:
                    with self._lock:
                        self._slow = None
                if job.report.errors:
                    error = str(job.report.errors[0].get("message"))[:_TEXT_MAX]
        except Exception as failure:  # noqa: BLE001 - other jobs keep running
            error, is_cut_off = _shorten(failure), True
        if self._over.is_set():
            if schedule is not None:
                schedule.put_off()
            return error or "the pipeline was stopped"
        if error is not None:
            _log.warning("job failed", extra={"job": slow.name, "error": error})
        if schedule is not None:
            schedule.end(error, is_cut_off=is_cut_off)
        return error

    # -- requests ---------------------------------------------------------------------------

    def _take_request(self, jobs: Sequence[str]) -> PipelineRequest | None:
        """Takes the next request for one of some jobs."""
        store, keys = self._job.store, self._job.keys
        try:
            for request in read_requests(store, keys):
                is_taken = request.job in jobs and take_request(
                    store, keys, request, compares=[self._job.fence.compare]
                )
                if not is_taken:
                    continue
                now = self._now()
                if now - request.requested_at > REQUEST_SECONDS_MAX:
                    _log.warning("request expired", extra={"job": request.job})
                    continue
                _log.info("job requested", extra={"job": request.job, "by": request.by})
                with self._lock:
                    self._requests[request.job] = {
                        **request.as_json(),
                        "state": "running",
                        "started_at": now,
                        "ended_at": None,
                        "error": None,
                    }
                # At once: the request's key is gone, and the requester looks for it here.
                self._save_status("running")
                return request
        except IsterError as error:
            _log.warning("requests not read", extra={"error": str(error)})
        return None

    def _end_request(self, request: PipelineRequest, error: str | None) -> None:
        with self._lock:
            self._requests[request.job] |= {
                "state": "done" if error is None else "failed",
                "ended_at": self._now(),
                "error": error,
            }

    def _watch(self) -> None:
        """Writes the status, and cancels Spark's work when the term ends."""
        saved_at = self._clock.monotonic()
        while not self._over.wait(min(_WATCH_SECONDS, self._settings.status_seconds)):
            if self._is_ending():
                break
            if self._clock.monotonic() - saved_at < self._settings.status_seconds:
                continue
            saved_at = self._clock.monotonic()
            try:
                self._job.fence.check()
            except FencedError:
                break
            except IsterError as error:
                _log.warning("lease could not be checked", extra={"error": str(error)})
                continue
            with threads.guard("ister-pipeline-status"):
                self._save_status("running")
                self._save_report()
        self._over.set()
        if self._stop.is_set():
            self._save_status("stopping")
            self._is_idle.wait(_GRACE_SECONDS)
        self._fence_slow_job()
        while not self._is_idle.is_set():
            # Release at once: the broker resumes its uploads while Spark is being cancelled.
            self._job.fence.release()
            self._cancel_tasks()
            self._is_idle.wait(_CANCEL_SECONDS)

    # -- the end ----------------------------------------------------------------------------

    def end(self) -> dict[str, object]:
        """Ends the threads and returns the last status."""
        self._over.set()
        self._fence_slow_job()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_CANCEL_SECONDS)
                if thread.is_alive():
                    self._fence_slow_job()
        self._save_report(force=True)
        return self._save_status("stopped")

    def _fence_slow_job(self) -> None:
        """Makes sure that the slow job that is running commits nothing more."""
        with self._lock:
            slow = self._slow
        if slow is not None:
            slow.fence.release()
            self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        """Cancels what Spark is doing; the threads that wait for it get an error."""
        self._job.spark.cancel()

    def _is_ending(self) -> bool:
        is_late = self._clock.monotonic() >= self._ends_at
        return is_late or self._stop.is_set() or self._over.is_set()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        self._threads.append(self._job.spark.start_thread(name, work))

    # -- status and report ------------------------------------------------------------------

    def _save_status(self, state: str) -> dict[str, object]:
        # One at a time: an older status must not replace a newer one.
        with self._status_lock:
            status = self._status(state)
            data = json.dumps(status).encode()
            try:
                # Only the holder of the lease may write the status.
                self._job.store.transact(
                    [self._job.fence.compare], [Put(self._job.keys.status, data)]
                )
            except IsterError as error:
                _log.warning("pipeline status not saved", extra={"error": str(error)})
        return status

    def _status(self, state: str) -> dict[str, object]:
        totals = self._totals
        with self._lock:
            slow = None if self._slow is None else self._slow.name
            requests = {job: dict(request) for job, request in self._requests.items()}
        failing = sorted({str(error.get("topic")) for error in list(self._report.errors)})
        return {
            "state": state,
            "holder": self._job.fence.id,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started_at": totals.started_at,
            "updated_at": self._now(),
            "cycles": totals.cycles,
            "terms": totals.terms,
            "tier": {
                "is_on": self._settings.tier is not None,
                "topics": len(self._topics),
                "lag_messages": self._measure_lag(),
                "last_cycle_at": totals.last_cycle_at,
                "last_cycle_seconds": totals.last_cycle_seconds,
                "tiered_objects_total": totals.objects,
                "tiered_messages_total": totals.messages,
                "tiered_bytes_total": totals.bytes,
                "failing_topics": failing[:_SHOWN_FAILING_TOPICS],
                "failing_topics_total": len(failing),
                "last_error": self._cycle_error,
            },
            "jobs": {
                name: {**schedule.as_json(), "is_running": name == slow}
                for name, schedule in self._schedules.items()
            },
            "requests": requests,
            "memory": sample_memory(),
            "threads": threading.active_count(),
        }

    def _measure_lag(self) -> int | None:
        """Counts messages that are synced and not tiered, cached; None if unknown."""
        now = self._clock.monotonic()
        if now < self._lag_at:
            return self._lag
        self._lag_at = now + _LAG_SECONDS
        try:
            self._lag = measure_lag(self._job.place, self._topics[:_LAG_TOPICS_MAX])
        except Exception as error:  # noqa: BLE001 - informational
            _log.debug("upload lag cannot be measured", extra={"error": _shorten(error)})
            self._lag = None
        return self._lag

    def _save_report(self, *, force: bool = False) -> None:
        """Saves what was tiered last, if that has changed, for `ister pipeline status`."""
        now = self._clock.monotonic()
        mark = (self._totals.objects, len(self._report.errors))
        if mark == self._reported or (now < self._report_at and not force):
            return
        self._report_at = now + _REPORT_SECONDS
        self._report.seconds = now - self._began
        with suppress(IsterError):
            self._job.store.transact(
                [self._job.fence.compare],
                [Put(self._job.keys.report("tier"), shorten(self._report))],
            )
            self._reported = mark


def measure_lag(place: LogLocation, topics: Sequence[str]) -> int:
    """Counts the messages of topics that are synced and not in the bucket yet."""
    if not topics:
        return 0
    history = place.history()
    directory = TopicDirectory(history.metadata, place.config.storage.metadata.root_prefix)
    records = directory.records(topics)
    durable: dict[str, tuple[int, int]] = {}
    elsewhere: list[str] = []
    for name in topics:
        if name not in records or not (record := records[name].value).is_open:
            continue  # deleted, or unreadable, which uploads report
        local = place.local_tail(name, record.node, record.incarnation)
        snapshot = local.snapshot() if local is not None else None
        if snapshot is not None:
            durable[name] = snapshot.trimmed, snapshot.synced
        elif local is None:
            elsewhere.append(name)
    total = 0
    pointers = directory.pointers(durable)
    for name, (trimmed, synced) in durable.items():
        end: int | None = 0
        if name in pointers and (end := pointers[name].value.end) is None:
            end = history.topic(name).tiered
        total += max(synced - max(end or 0, trimmed), 0)
    if elsewhere:
        # Topics that cannot be reached are among the errors of the upload.
        statuses, _ = read_watermarks(place, elsewhere)
        total += sum(max(status.synced - status.tiered, 0) for status in statuses.values())
    return total


def _shorten(error: BaseException) -> str:
    """Returns the first line of an error: Spark's errors have a page each."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    name = "" if isinstance(error, IsterError) else f"{type(error).__name__}: "
    return f"{name}{first}"[:_TEXT_MAX]


def sample_memory(root: str = "/proc") -> dict[str, int | None]:
    """Returns resident bytes, and the number of workers; None for what `/proc` does not say.

    Workers are Python processes below the JVM, on a cluster only those of this machine.
    """
    own = os.getpid()
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    with suppress(OSError):
        for entry in os.listdir(root):
            if entry.isdigit() and (found := _read_stat(root, int(entry))) is not None:
                names[int(entry)], parent = found
                children.setdefault(parent, []).append(int(entry))
    jvm = next((pid for pid in children.get(own, []) if names[pid] == "java"), None)
    workers = _below(jvm, children) if jvm is not None else []
    sizes = [size for pid in workers if (size := _resident(root, pid)) is not None]
    return {
        "driver_rss_bytes": _resident(root, own),
        "jvm_rss_bytes": _resident(root, jvm) if jvm is not None else None,
        "workers_rss_bytes": sum(sizes) if jvm is not None else None,
        "workers": len(sizes) if jvm is not None else None,
    }


def _below(pid: int, children: dict[int, list[int]]) -> list[int]:
    found: list[int] = []
    waiting = list(children.get(pid, []))
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting += children.get(child, [])
    return found


def _read_stat(root: str, pid: int) -> tuple[str, int] | None:
    """Returns a process's name and parent; None if it has ended."""
    try:
        with open(f"{root}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
        # A name may have spaces and brackets in it.
        name, _, rest = text.partition("(")[2].rpartition(")")
        return name, int(rest.split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _resident(root: str, pid: int) -> int | None:
    try:
        with open(f"{root}/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
