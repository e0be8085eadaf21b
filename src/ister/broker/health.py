"""How the broker is, in words: whether clients should come, and what somebody should look at.

Owns: the checks and their words; looks at the stores and the machine, now and then. Does not own:
what is checked (topics, leases, uploads), how it is told (`ister.broker.http`, `exposition`).

- `/ready` is for machines: 200 while every topic is recovered and the lease holds;
- a check is for people: `ok`, `attention` (somebody should look, nothing is lost) or `bad`
  (somebody is kept from their messages, or soon will be). Each says what it found, and what to do
  about it.

Nobody who asks waits for a store or a disk: a task looks at them every few seconds, in a thread,
and the answers are remembered. So asking is cheap, however often it is done.

Topics are named only to those who may know of them: `names` says so.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from ister import threads
from ister.broker.dispatch import Dispatch
from ister.broker.security.tls import ServerTls
from ister.broker.served import ServedTopic
from ister.broker.topics import Topics
from ister.clock import Clock
from ister.config import Config, Engine, StorageMode
from ister.errors import IsterError
from ister.limits import GIB, MIB
from ister.metadata.base import MetadataStore
from ister.model import TopicState
from ister.tier.pipeline import PipelineKeys
from ister.topic.log import Log

__all__ = [
    "LOOK_SECONDS",
    "STATES",
    "BrokerHealth",
    "Check",
    "Disk",
    "State",
    "Watch",
    "state_of",
    "worst",
]

_log = logging.getLogger("ister.broker.health")

State = Literal["ok", "attention", "bad"]
STATES: Final[tuple[State, ...]] = ("ok", "attention", "bad")
"""From good to bad."""

_TICK_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 10.0
"""How often the metadata store is asked, at the most."""
_FRESH_SECONDS: Final = 1.0
# A store that has not answered for so long does not answer.
_SILENT_SECONDS: Final = 30.0
_NAMES_SHOWN: Final = 5
_MARKS_MAX: Final = 64
_TOPICS_AT_ONCE: Final = 200

_DISK_LOW_SHARE: Final = 0.1
_DISK_LOW_BYTES: Final = 1 * GIB
_DISK_BAD_SHARE: Final = 0.02
_DISK_BAD_BYTES: Final = 128 * MIB
# Of `storage.uploader.max_lag_bytes`, from which on producers are kept back.
_LAG_LOW_SHARE: Final = 0.5
_LAG_SECONDS_MIN: Final = 300.0
_LAG_INTERVALS: Final = 6
_FAILING_SECONDS: Final = 600.0
_CERTIFICATE_LOW_SECONDS: Final = 14 * 86_400.0
_CERTIFICATE_BAD_SECONDS: Final = 86_400.0
_CLOCK_JUMP_SECONDS: Final = 5.0
_CLOCK_JUMP_SHOWN_SECONDS: Final = 3600.0
# 2024: a machine without a battery begins in 1970.
_CLOCK_EARLIEST_NS: Final = 1_704_067_200 * 10**9
_FILES_LOW_SHARE: Final = 0.8
# The rest is for files of topics that are open: a connection more would be at their cost.
_FILES_FULL_SHARE: Final = 0.97
_THREAD_FAILURE_SHOWN_SECONDS: Final = 3600.0
_REPLACED: Final = "a copy of this broker's data directory has replaced it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    words: str
    hint: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """As `/health` tells it."""
        return {"name": self.name, "state": self.state, "words": self.words, "hint": self.hint}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system that the log is on."""

    path: str
    total_bytes: int
    free_bytes: int


class _Lag:
    """When the messages came that are not in the bucket yet, about."""

    __slots__ = ("marks", "topic")

    def __init__(self, topic: ServedTopic) -> None:
        self.topic = topic
        # Each an end of the log, and when it was there.
        self.marks: deque[tuple[int, float]] = deque()

    def note(self, end: int, tiered: int, now: float) -> None:
        marks = self.marks
        while marks and marks[0][0] <= tiered:
            marks.popleft()
        if end > tiered and (not marks or end > marks[-1][0]):
            marks.append((end, now))
            if len(marks) > _MARKS_MAX:
                # The oldest stays; of the others every second one.
                self.marks = deque([*list(marks)[:-1:2], marks[-1]])


class Watch:
    """What has to be asked for, as of a moment ago. Of the loop, but for `look`."""

    def __init__(
        self, metadata: MetadataStore, config: Config, *, clock: Clock, directory: str | None
    ) -> None:
        """Nothing is known before `start`.

        Args:
            metadata: The store that is to answer.
            config: The settings.
            clock: Where time comes from.
            directory: Where the log's files are; None for one in memory.
        """
        self._metadata = metadata
        self._keys = PipelineKeys(config.storage.metadata.root_prefix)
        self._clock = clock
        self._directory = directory
        self._began_at = clock.monotonic()
        self._lags: dict[str, _Lag] = {}
        self._task: asyncio.Task[None] | None = None
        self._drift: float | None = None
        self.topics: Topics | None = None
        self.answered_at: float | None = None
        """When the metadata store last answered, by the monotonic clock."""
        self.error: str | None = None
        """Why it did not, when it was last asked."""
        self.pipeline_is_running = False
        self.status: dict[str, Any] | None = None
        """What the pipeline has last said about itself."""
        self.reports: dict[str, dict[str, Any]] = {}
        """The last report of each job."""
        self.disk: Disk | None = None
        self.open_files = 0
        self.files_max = 0
        self.clock_jump: tuple[float, float] | None = None
        """When the machine's clock was last set, and by how many seconds."""
        self.failing_since: float | None = None
        """Since when some upload fails."""

    def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    async def stop(self) -> None:
        """Ends it; a look under way may go on in its thread. May be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _keep_looking(self) -> None:
        looking: asyncio.Future[None] | None = None
        looked_at = -LOOK_SECONDS
        while True:
            now = self._clock.monotonic()
            # A store that does not answer holds one thread, not one more each time.
            if now - looked_at >= LOOK_SECONDS and (looking is None or looking.done()):
                looked_at = now
                looking = asyncio.ensure_future(
                    asyncio.to_thread(threads.run, "ister-health", self.look)
                )
            with threads.guard("ister-lags"):
                await self.note_lags()
            await asyncio.sleep(_TICK_SECONDS)

    # -- in a thread ------------------------------------------------------------------------

    def look(self) -> None:
        """Asks the store and the machine. Blocks."""
        self._look_at_clock()
        self._look_at_machine()
        try:
            lease = self._metadata.get(self._keys.lease)
            status = self._metadata.get(self._keys.status)
            reports = self._metadata.range(self._keys.report(""), limit=32)
        except IsterError as error:
            self.error = error.message
            return
        self.answered_at, self.error = self._clock.monotonic(), None
        self.pipeline_is_running = lease is not None
        self.status = None if status is None else _parse(status.value)
        prefix = len(self._keys.report(""))
        found = {one.key[prefix:]: _parse(one.value) for one in reports}
        self.reports = {name: report for name, report in found.items() if report is not None}

    def _look_at_clock(self) -> None:
        now = self._clock.monotonic()
        # Not against `monotonic`: a machine that was suspended has not set its clock.
        drift = self._clock.now_ns() / 1e9 - self._clock.boottime()
        if self._drift is not None and abs(drift - self._drift) > _CLOCK_JUMP_SECONDS:
            self.clock_jump = (now, drift - self._drift)
            _log.warning("the clock was set", extra={"seconds": round(drift - self._drift, 1)})
        self._drift = drift

    def _look_at_machine(self) -> None:
        if self._directory is not None:
            with suppress(OSError):
                found = os.statvfs(self._directory)
                self.disk = Disk(
                    path=self._directory,
                    total_bytes=found.f_blocks * found.f_frsize,
                    free_bytes=found.f_bavail * found.f_frsize,
                )
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.files_max = 0 if limit == resource.RLIM_INFINITY else limit
        try:
            self.open_files = len(os.listdir("/proc/self/fd"))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # To count them takes one, and there is none.
                self.open_files = self.files_max

    # -- on the loop ------------------------------------------------------------------------

    @property
    def metadata_answers(self) -> bool:
        """Whether the metadata store does, as far as is known."""
        now = self._clock.monotonic()
        since = self._began_at if self.answered_at is None else self.answered_at
        return self.error is None and now - since < _SILENT_SECONDS

    async def note_lags(self) -> None:
        """Looks how far uploads have come."""
        topics = self.topics
        if topics is None:
            return
        now = self._clock.monotonic()
        served = topics.served
        is_failing = False
        for at, topic in enumerate(served):
            if at % _TOPICS_AT_ONCE == _TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            core = topic.topic
            if core is None or core.tier is None:
                continue
            is_failing = is_failing or core.tier.last_error is not None
            end, tiered = core.wal.synced, core.wal.tiered or 0
            lag = self._lags.get(topic.name)
            if end <= tiered:
                if lag is not None:
                    del self._lags[topic.name]
                continue
            if lag is None or lag.topic is not topic:
                lag = self._lags[topic.name] = _Lag(topic)
            lag.note(end, tiered, now)
        names = {topic.name for topic in served}
        for name in [name for name in self._lags if name not in names]:
            del self._lags[name]
        if not is_failing:
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = now

    def lag_seconds(self, topic: ServedTopic) -> float:
        """How long the oldest message has waited that the bucket does not have, about.

        It is not known of messages from before the start: they count from then on.
        """
        core, lag = topic.topic, self._lags.get(topic.name)
        if core is None or core.tier is None or lag is None or lag.topic is not topic:
            return 0.0
        tiered = core.wal.tiered or 0
        since = next((at for end, at in lag.marks if end > tiered), None)
        return 0.0 if since is None else max(0.0, self._clock.monotonic() - since)


def _parse(value: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(value)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


@dataclass(slots=True)
class _Survey:
    """What a walk over all topics found."""

    count: int
    by_state: dict[str, list[ServedTopic]]
    failing: list[ServedTopic]
    """Whose uploads fail."""
    held: list[ServedTopic]
    """Whose producers are kept back until uploads catch up."""
    behind: list[ServedTopic]
    blocked: list[str]


class BrokerHealth:
    """See the module header. Of the broker's loop."""

    def __init__(self, config: Config, log: Log, watch: Watch, *, clock: Clock) -> None:
        self.watch = watch
        self.tls: ServerTls | None = None
        self.has_started = False
        """Whether every topic is recovered and every port open."""
        self.is_ending = False
        self._config = config
        self._log = log
        self._clock = clock
        self._topics: Topics | None = None
        self._known: tuple[float, list[Check], list[Check]] | None = None

    @property
    def topics(self) -> Topics | None:
        """The broker's topics; None before they are looked for."""
        return self._topics

    @topics.setter
    def topics(self, topics: Topics) -> None:
        self._topics = self.watch.topics = topics

    # -- for machines -----------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether clients should come: everything is recovered, and it does not end yet."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it is not ready; empty if it is."""
        found = []
        if self.is_ending:
            found.append("the broker is ending")
        elif not self.has_started:
            found.append(self._recovering())
        tiers = self._log.tiers
        if tiers is not None and tiers.membership.replaced is not None:
            found.append(_REPLACED)
        elif tiers is not None and not tiers.membership.is_valid:
            found.append("the lease in the metadata store has ended")
        used, limit = self.watch.open_files, self.watch.files_max
        if limit and used >= limit * _FILES_FULL_SHARE:
            found.append(f"{used} of {limit} file descriptors are used: clients cannot connect")
        return found

    def _recovering(self) -> str:
        done, total = self._topics.opening if self._topics is not None else (0, 0)
        return "topics are being recovered" + (f": {done} of {total} are open" if total else "")

    def report(self, *, names: bool) -> dict[str, Any]:
        """How things are, with reasons, as `/health` tells it.

        Args:
            names: Whether topics and subscriptions may be named, or are counted only.
        """
        states: dict[str, int] = {}
        for topic in self._served() if self.has_started else ():
            state = state_of(topic)
            states[state] = states.get(state, 0) + 1
        storage, broker = self._config.storage, self._config.broker
        checks = self.checks(names=names)
        return {
            "ready": self.is_ready,
            "state": worst(checks),
            "reasons": self.reasons,
            "words": [check.words for check in checks if check.state != "ok"],
            "topics": states,
            "ack": storage.ack.value if storage.mode is not StorageMode.MEMORY else "memory",
            "auth": broker.auth.mode.value,
            "tls": self.tls is not None,
            "checks": [check.to_json() for check in checks],
        }

    def overview(self, *, names: bool = True) -> dict[str, Any]:
        """The same in short: whether it is ready, the worst state, and what is not well."""
        checks = self.checks(names=names)
        words = [check.words for check in checks if check.state != "ok"]
        return {
            "ready": self.is_ready,
            "state": worst(checks),
            "words": words or ["everything is well"],
        }

    # -- for people -------------------------------------------------------------------------

    def checks(self, *, names: bool = True) -> list[Check]:
        """Everything that is looked at, as of a second ago at the most."""
        now = self._clock.monotonic()
        known = self._known
        if known is None or now - known[0] >= _FRESH_SECONDS:
            survey = self._survey()
            named, counted = list(self._check(survey, True)), list(self._check(survey, False))
            self._known = known = (now, named, counted)
        # Readiness is always of this moment.
        ready = self._check_ready()
        return [ready, *(known[1] if names else known[2])]

    def _served(self) -> list[ServedTopic]:
        return self._topics.served if self._topics is not None else []

    def _survey(self) -> _Survey:
        """One walk over all topics, of which there may be thousands."""
        found = _Survey(0, {}, [], [], [], [])
        settings = self._config.storage.uploader
        limit = settings.max_lag_bytes
        patience = max(_LAG_SECONDS_MIN, _LAG_INTERVALS * settings.interval_seconds)
        for topic in self._served():
            found.count += 1
            core = topic.topic
            if core is None:
                continue
            if core.state is not TopicState.OPEN:
                found.by_state.setdefault(core.state.value, []).append(topic)
            tier = core.tier
            if tier is not None:
                if tier.last_error is not None:
                    found.failing.append(topic)
                lag = tier.lag_bytes
                if lag > limit:
                    found.held.append(topic)
                elif lag > limit * _LAG_LOW_SHARE or (
                    lag and self.watch.lag_seconds(topic) > patience
                ):
                    found.behind.append(topic)
            found.blocked += [
                f"{one.name} of {topic.name}"
                for one in topic.subscriptions.values()
                if isinstance(one, Dispatch) and one.delivery.blocked_count
            ]
        return found

    def _check(self, survey: _Survey, names: bool) -> Iterator[Check]:
        yield self._check_metadata(names)
        if self._log.tiers is not None:
            yield self._check_lease()
            yield self._check_uploads(survey.failing, names)
            yield self._check_lag(survey, names)
            yield self._check_pipeline()
            yield self._check_jobs()
        yield from self._check_disk(len(survey.by_state.get(TopicState.STALLED.value, ())))
        yield self._check_topics(survey, names)
        yield self._check_subscriptions(survey.blocked, names)
        if self.tls is not None:
            yield self._check_certificate(self.tls)
        yield self._check_clock()
        yield self._check_files()
        yield self._check_threads(names)

    def _check_ready(self) -> Check:
        reasons = self.reasons
        if not reasons:
            return Check(name="ready", state="ok", words="clients are served")
        is_lost = self.has_started and not self.is_ending
        return Check(
            name="ready",
            state="bad" if is_lost else "attention",
            words="; ".join(reasons),
            hint="clients are told to come again until then",
        )

    def _check_metadata(self, names: bool) -> Check:
        watch, backend = self.watch, self._config.storage.metadata.backend.value
        if watch.metadata_answers:
            return Check(name="metadata", state="ok", words="the metadata store answers")
        why = f": {watch.error}" if watch.error is not None and names else ""
        return Check(
            name="metadata",
            state="bad",
            words=f"the metadata store ({backend}) does not answer{why}",
            hint="nothing can be claimed, committed or looked up until it does; "
            "see storage.metadata",
        )

    def _check_lease(self) -> Check:
        tiers = self._log.tiers
        if tiers is None or tiers.membership.is_valid:
            return Check(name="lease", state="ok", words="this node surely owns its topics")
        if tiers.membership.replaced is not None:
            return Check(
                name="lease",
                state="bad",
                words=f"{_REPLACED}: messages are refused for good",
                hint="stop this broker; its log names the other one. What this one acknowledged "
                "and had not uploaded is in its local files alone",
            )
        return Check(
            name="lease",
            state="bad",
            words="the lease has ended: messages are refused, since another node may have them",
            hint="it goes on by itself when the metadata store answers",
        )

    def _check_uploads(self, failing: list[ServedTopic], names: bool) -> Check:
        if not failing:
            return Check(name="uploads", state="ok", words="no upload fails")
        since, now = self.watch.failing_since, self._clock.monotonic()
        is_old = since is not None and now - since > _FAILING_SECONDS
        why = f" ({_error_of(failing[0])})" if names else ""
        return Check(
            name="uploads",
            state="bad" if is_old else "attention",
            words=f"uploads fail: {_named(failing, names)}{why}",
            hint="messages stay in local files meanwhile; is the bucket there, and may the broker "
            "write to it? See storage.cloud",
        )

    def _check_lag(self, survey: _Survey, names: bool) -> Check:
        if survey.held:
            held = _named(survey.held, names)
            return Check(
                name="upload_lag",
                state="bad",
                words=f"producers are kept back until uploads catch up: {held}",
                hint="storage.uploader.max_lag_bytes is the limit; see why uploads are slow",
            )
        if survey.behind:
            return Check(
                name="upload_lag",
                state="attention",
                words=f"uploads are behind: {_named(survey.behind, names)}",
                hint="see whether the bucket, or the pipeline, keeps up with producers",
            )
        return Check(name="upload_lag", state="ok", words="uploads keep up")

    def _check_pipeline(self) -> Check:
        is_wanted = self._config.storage.uploader.engine is Engine.SPARK
        if self.watch.pipeline_is_running:
            failing = _number((self.watch.status or {}).get("tier"), "failing_topics_total")
            if failing:
                return Check(
                    name="pipeline",
                    state="attention",
                    words=f"the pipeline runs, and fails with {_count(failing, 'topic')}",
                    hint="`ister pipeline status` has the last error",
                )
            return Check(name="pipeline", state="ok", words="a pipeline runs")
        if not is_wanted:
            return Check(name="pipeline", state="ok", words="no pipeline runs, and none is needed")
        return Check(
            name="pipeline",
            state="attention",
            words="no pipeline runs, and uploads are left to one: nothing goes to the bucket",
            hint="`ister pipeline run` starts it; else set storage.uploader.engine to auto",
        )

    def _check_jobs(self) -> Check:
        failed = sorted(
            name for name, report in self.watch.reports.items() if report.get("ok") is False
        )
        if not failed:
            return Check(name="jobs", state="ok", words="no job has failed when it last ran")
        return Check(
            name="jobs",
            state="attention",
            words=f"failed when last run: {', '.join(failed)}",
            hint="`ister pipeline status` has the errors",
        )

    def _check_disk(self, stalled: int) -> Iterator[Check]:
        disk = self.watch.disk
        if disk is None and not stalled:
            return
        free, total = (disk.free_bytes, disk.total_bytes) if disk is not None else (0, 1)
        share = free / max(1, total)
        words = f"{_size(free)} of {_size(total)} are free on the log's disk"
        state: State = "ok"
        if stalled or free < _DISK_BAD_BYTES or share < _DISK_BAD_SHARE:
            state = "bad"
        elif free < _DISK_LOW_BYTES or share < _DISK_LOW_SHARE:
            state = "attention"
        if stalled:
            words = f"the disk is full for {_count(stalled, 'topic')}: {words}"
        hint = (
            "make room, or keep fewer local files: storage.wal.retention. "
            "Writing goes on by itself when there is room"
        )
        guard = self._log.disk
        if guard is not None and guard.is_low():
            error = guard.error()
            state, words, hint = "bad", f"appends are stopped: {error.message}", error.hint or hint
        yield Check(name="disk", state=state, words=words, hint=None if state == "ok" else hint)

    def _check_topics(self, survey: _Survey, names: bool) -> Check:
        found: list[str] = []
        state: State = "ok"
        for wanted in (TopicState.FAILED, TopicState.QUARANTINED, TopicState.STALLED):
            bad = survey.by_state.get(wanted.value)
            if bad:
                state = "bad"
                found.append(f"{wanted.value}: {_named(bad, names)}")
        unopened = self._topics.unopened if self._topics is not None else {}
        if unopened:
            state = "bad"
            found.append(f"cannot be opened: {_named(list(unopened), names)}")
        if state == "ok":
            words = f"{_count(survey.count, 'topic')} open, and well"
            return Check(name="topics", state=state, words=words)
        return Check(
            name="topics",
            state=state,
            words="; ".join(found),
            hint="`ister inspect` says what is damaged, `ister repair` takes it from the bucket",
        )

    def _check_subscriptions(self, blocked: list[str], names: bool) -> Check:
        if not blocked:
            return Check(name="subscriptions", state="ok", words="no subscription is blocked")
        listed = _named(blocked, names, what="subscription")
        return Check(
            name="subscriptions",
            state="attention",
            words=f"blocked by a message that failed too often: {listed}",
            hint="acknowledge or skip that message, or give the subscription another policy: "
            "dead_letter or drop",
        )

    def _check_certificate(self, tls: ServerTls) -> Check:
        left = tls.material().expires_at - self._clock.now_ns() / 1e9
        if left > _CERTIFICATE_LOW_SECONDS:
            words = f"the certificate is good for {left / 86_400:.0f} days"
            return Check(name="certificate", state="ok", words=words)
        when = "has expired" if left <= 0 else f"ends in {_span(left)}"
        return Check(
            name="certificate",
            state="bad" if left < _CERTIFICATE_BAD_SECONDS else "attention",
            words=f"the broker's certificate {when}",
            hint="replace broker.tls.cert_file and key_file; they are read again by themselves",
        )

    def _check_clock(self) -> Check:
        now_ns, now = self._clock.now_ns(), self._clock.monotonic()
        jump = self.watch.clock_jump
        if now_ns < _CLOCK_EARLIEST_NS:
            words = "the machine's clock is not set: messages get times of the past"
            return Check(name="clock", state="bad", words=words, hint="start NTP or chrony")
        step = self._log.clock_step
        if step is not None:
            ahead = "ahead of" if step.seconds > 0 else "behind"
            return Check(
                name="clock",
                state="attention",
                words=f"the machine's clock is {_span(abs(step.seconds))} {ahead} the expected "
                f"time: {step.reason}; deletion by age is suspended",
                hint="correct the clock, and deletion resumes; if the clock is right, confirm it: "
                "POST /api/clock/confirm",
            )
        if jump is not None and now - jump[0] < _CLOCK_JUMP_SHOWN_SECONDS:
            return Check(
                name="clock",
                state="attention",
                words=f"the machine's clock was set by {jump[1]:+.0f} s {_span(now - jump[0])} ago",
                hint="times of messages jump with it; offsets do not. Is NTP running?",
            )
        return Check(name="clock", state="ok", words="the clock runs evenly")

    def _check_files(self) -> Check:
        used, limit = self.watch.open_files, self.watch.files_max
        words = f"{used} of {limit} file descriptors are used" if limit else f"{used} files"
        if not limit or used < limit * _FILES_LOW_SHARE:
            return Check(name="files", state="ok", words=words)
        return Check(
            name="files",
            state="bad" if used >= limit * _FILES_FULL_SHARE else "attention",
            words=words,
            hint="raise the limit (LimitNOFILE of systemd), or lower storage.wal.max_open_files",
        )

    @staticmethod
    def _check_threads(names: bool) -> Check:
        found = [
            failure
            for failure in threads.failures()
            if failure.has_ended or failure.age_seconds < _THREAD_FAILURE_SHOWN_SECONDS
        ]
        if not found:
            return Check(name="threads", state="ok", words="no background thread has failed")
        told = [
            f"{one.thread} {'ended' if one.has_ended else 'failed'} ({_count(one.count, 'error')}, "
            f"latest {_span(one.age_seconds)} ago{f': {one.error}' if names else ''})"
            for one in found[:_NAMES_SHOWN]
        ]
        has_ended = any(one.has_ended for one in found)
        restart = "restart the broker and " if has_ended else ""
        return Check(
            name="threads",
            state="bad" if has_ended else "attention",
            words=f"unexpected errors in background threads: {'; '.join(told)}",
            hint=f"this is a bug in Ister: {restart}report it with the traceback from the log",
        )


def worst(checks: Sequence[Check]) -> State:
    """The worst state of some checks."""
    return max((check.state for check in checks), key=STATES.index, default="ok")


def state_of(topic: ServedTopic) -> str:
    """A topic's state; one without a log is open."""
    return topic.topic.state.value if topic.topic is not None else TopicState.OPEN.value


def _error_of(topic: ServedTopic) -> str | None:
    tier = topic.topic.tier if topic.topic is not None else None
    error = tier.last_error if tier is not None else None
    return error.message if error is not None else None


def _named(found: Sequence[ServedTopic | str], names: bool, *, what: str = "topic") -> str:
    """Some of what was found, or how many."""
    if not names:
        return _count(len(found), what)
    shown = [one if isinstance(one, str) else one.name for one in found[:_NAMES_SHOWN]]
    more = len(found) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _number(fields: object, name: str) -> int:
    found = fields.get(name) if isinstance(fields, dict) else None
    return found if isinstance(found, int) else 0


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 2 * 86_400:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 86_400:.0f} days"
