"""The health of a broker: whether clients should connect, and what an operator should look at.

Owns: the checks and their texts. Does not own: probes of the stores and the machine
(`observe.probe`), how health is served (`ister.broker.http`, `observe.prometheus`).

- `/ready` is for machines: 200 while every topic is recovered and the lease is valid;
- a check is for people: `ok`, `attention` (look at it, nothing is lost) or `bad` (messages are
  refused or not delivered, or soon will be). Each says what was found and what to do.

No request waits for a store or a disk: the probe reads them every few seconds in a thread. Topics
are named only to callers that may see them (`names`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Final, Literal

from ister.base import threads
from ister.base.clock import Clock
from ister.base.limits import GIB, MIB
from ister.base.model import JsonObject, TopicState
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.flight.service import FlightService
from ister.broker.observe.probe import HealthProbe
from ister.broker.security.tls import ServerTls
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.config import Config, Engine, StorageMode
from ister.metadata.base import StoreUsage
from ister.topic.log import Log
from ister.topic.memory_guard import MemoryGuard

_log = logging.getLogger("ister.broker.observe.health")

State = Literal["ok", "attention", "bad"]
STATES: Final[tuple[State, ...]] = ("ok", "attention", "bad")
"""From best to worst."""

_FRESH_SECONDS: Final = 1.0
_NAMES_SHOWN: Final = 5
_SUBJECTS_SHOWN: Final = 20

_QUOTA_BAD_SHARE: Final = 0.9
_DISK_LOW_SHARE: Final = 0.1
_DISK_LOW_BYTES: Final = 1 * GIB
_DISK_BAD_SHARE: Final = 0.02
_DISK_BAD_BYTES: Final = 128 * MIB
_SYNC_BAD_SECONDS: Final = 10.0
# Share of `storage.uploader.max_lag_bytes`, at which producers are throttled.
_LAG_LOW_SHARE: Final = 0.5
_LAG_SECONDS_MIN: Final = 300.0
_LAG_INTERVALS: Final = 6
_FAILING_SECONDS: Final = 600.0
_CERTIFICATE_LOW_SECONDS: Final = 14 * 86_400.0
_CERTIFICATE_BAD_SECONDS: Final = 86_400.0
_CLOCK_JUMP_SHOWN_SECONDS: Final = 3600.0
# 2024: a machine without a battery starts in 1970.
_CLOCK_EARLIEST_NS: Final = 1_704_067_200 * 10**9
_FILES_LOW_SHARE: Final = 0.8
# Of `broker.limits.max_flight_streams`.
_STREAMS_LOW_SHARE: Final = 0.8
# The rest is for the files of open topics.
_FILES_FULL_SHARE: Final = 0.97
_THREAD_FAILURE_SHOWN_SECONDS: Final = 3600.0
_REPLACED: Final = "a copy of this broker's data directory replaced it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A topic that a check is about, or a subscription of it."""

    topic: str
    subscription: str | None = None

    def __str__(self) -> str:
        if self.subscription is None:
            return self.topic
        return f"{self.subscription} of {self.topic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    words: str
    hint: str | None = None
    subjects: tuple[Subject, ...] = ()
    """The first of those that are not ok, where they may be named."""


@dataclass(slots=True)
class _Survey:
    """The topics and subscriptions with problems."""

    count: int
    by_state: dict[str, list[ServedTopic]]
    failing: list[ServedTopic]
    """Topics whose uploads fail."""
    held: list[ServedTopic]
    """Topics whose producers are throttled until uploads catch up."""
    behind: list[ServedTopic]
    slow: list[tuple[float, ServedTopic]]
    """Topics with a slow sync, and the seconds that it took or has taken so far."""
    blocked: list[Subject]


class BrokerHealth:
    """The checks of a broker. Used on its loop."""

    def __init__(self, config: Config, log: Log, probe: HealthProbe, *, clock: Clock) -> None:
        self.probe = probe
        self.tls: ServerTls | None = None
        self.flight: FlightService | None = None
        self.has_started = False
        """Whether every topic is recovered and every port is open."""
        self.is_ending = False
        self._config = config
        self._log = log
        self._clock = clock
        self._topics: Topics | None = None
        self._known: tuple[float, list[Check], list[Check]] | None = None

    @property
    def topics(self) -> Topics | None:
        """The broker's topics; None before recovery."""
        return self._topics

    @topics.setter
    def topics(self, topics: Topics) -> None:
        self._topics = self.probe.topics = topics

    # -- for machines -----------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether clients should connect: the broker has recovered and is not stopping."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why the broker is not ready; empty if it is."""
        found = []
        if self.is_ending:
            found.append("the broker is shutting down")
        elif not self.has_started:
            found.append(self._recovering())
        stores = self._log.stores
        if stores is not None and stores.membership.replaced is not None:
            found.append(_REPLACED)
        elif stores is not None and not stores.membership.is_valid:
            found.append("the lease in the metadata store has expired")
        used, limit = self.probe.open_files, self.probe.files_max
        if limit and used >= limit * _FILES_FULL_SHARE:
            found.append(f"{used} of {limit} file descriptors in use: clients cannot connect")
        return found

    def _recovering(self) -> str:
        done, total = self._topics.opening if self._topics is not None else (0, 0)
        return "recovering topics" + (f": {done} of {total} open" if total else "")

    def report(self, *, names: bool) -> JsonObject:
        """The content of `/health`.

        `names` allows topics and subscriptions to be named, not only counted.
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
            "checks": [asdict(check) for check in checks],
        }

    def overview(self, *, names: bool = True) -> JsonObject:
        """Readiness, the worst state, all checks, and the texts of those that are not ok."""
        checks = self.checks(names=names)
        words = [check.words for check in checks if check.state != "ok"]
        return {
            "ready": self.is_ready,
            "state": worst(checks),
            "words": words or ["all checks are ok"],
            "checks": [asdict(check) for check in checks],
        }

    # -- for people -------------------------------------------------------------------------

    def checks(self, *, names: bool = True) -> list[Check]:
        """All checks, at most a second old."""
        now = self._clock.monotonic()
        known = self._known
        if known is None or now - known[0] >= _FRESH_SECONDS:
            survey = self._survey()
            named, counted = list(self._check(survey, True)), list(self._check(survey, False))
            self._known = known = (now, named, counted)
        # Readiness is never cached.
        ready = self._check_ready()
        return [ready, *(known[1] if names else known[2])]

    def _served(self) -> list[ServedTopic]:
        return self._topics.served if self._topics is not None else []

    def _survey(self) -> _Survey:
        """Goes over all topics once, since there may be thousands."""
        found = _Survey(0, {}, [], [], [], [], [])
        settings = self._config.storage.uploader
        limit = settings.max_lag_bytes
        patience = max(_LAG_SECONDS_MIN, _LAG_INTERVALS * settings.interval_seconds)
        for topic in self._served():
            found.count += 1
            core = topic.topic
            if core is None:
                continue
            if seconds := core.wal.committer.slow_sync_seconds:
                found.slow.append((seconds, topic))
            if core.state is not TopicState.OPEN:
                found.by_state.setdefault(core.state.value, []).append(topic)
            bucket = core.bucket
            if bucket is not None:
                if bucket.uploads.last_error is not None:
                    found.failing.append(topic)
                lag = bucket.uploads.lag_bytes
                if lag > limit:
                    found.held.append(topic)
                elif lag > limit * _LAG_LOW_SHARE or (
                    lag and self.probe.lag_seconds(topic) > patience
                ):
                    found.behind.append(topic)
            found.blocked += [
                Subject(topic=topic.name, subscription=one.name)
                for one in topic.subscriptions.values()
                if isinstance(one, Dispatcher) and one.delivery.blocked_count
            ]
        return found

    def _check(self, survey: _Survey, names: bool) -> Iterator[Check]:
        yield self._check_metadata(names)
        if self.probe.usage is not None:
            yield self._check_metadata_size(self.probe.usage)
        if self._log.stores is not None:
            yield self._check_lease()
            yield self._check_uploads(survey.failing, names)
            yield self._check_lag(survey, names)
            yield self._check_pipeline()
            yield self._check_jobs()
        if self._log.room.memory is not None:
            yield self._check_memory(self._log.room.memory)
        yield from self._check_disk(len(survey.by_state.get(TopicState.STALLED.value, ())))
        if self._log.room.disk is not None and not self._log.is_diskless:
            yield self._check_syncs(survey.slow, names)
        yield self._check_topics(survey, names)
        yield self._check_subscriptions(survey.blocked, names)
        if self.tls is not None:
            yield self._check_certificate(self.tls)
        yield self._check_clock()
        yield self._check_files()
        if self.flight is not None:
            yield self._check_streams(self.flight)
        yield self._check_threads(names)

    def _check_ready(self) -> Check:
        reasons = self.reasons
        if not reasons:
            return Check(name="ready", state="ok", words="ready for clients")
        is_lost = self.has_started and not self.is_ending
        return Check(
            name="ready",
            state="bad" if is_lost else "attention",
            words="; ".join(reasons),
            hint="clients retry until then",
        )

    def _check_metadata(self, names: bool) -> Check:
        probe, backend = self.probe, self._config.storage.metadata.backend.value
        stores = self._log.stores
        if probe.metadata_answers and stores is not None and stores.trust.reason is not None:
            return Check(
                name="metadata",
                state="bad",
                words=f"{stores.trust.reason}; nothing is deleted",
                hint="`ister metadata check` shows what the bucket and the local files have, and "
                "`ister metadata accept` continues from it",
            )
        if probe.metadata_answers:
            return Check(name="metadata", state="ok", words="the metadata store answers")
        why = f": {probe.error}" if probe.error is not None and names else ""
        return Check(
            name="metadata",
            state="bad",
            words=f"the metadata store ({backend}) does not answer{why}",
            hint="topics cannot be opened, uploaded or looked up until it answers; "
            "see storage.metadata",
        )

    @staticmethod
    def _check_metadata_size(usage: StoreUsage) -> Check:
        words = f"{_size(usage.size_bytes)} of etcd's quota of {_size(usage.quota_bytes)} taken, "
        words += f"{_size(usage.used_bytes)} in use"
        if not usage.is_compacted:
            words = f"etcd is not compacted and grows with every change: {words}"
        if usage.alarms:
            words = f"etcd has raised an alarm ({'; '.join(usage.alarms)}): {words}"
        is_bad = bool(usage.alarms) or usage.share >= _QUOTA_BAD_SHARE
        state: State = "ok" if usage.advice is None else "bad" if is_bad else "attention"
        return Check(name="metadata_size", state=state, words=words, hint=usage.advice)

    def _check_lease(self) -> Check:
        stores = self._log.stores
        if stores is None or stores.membership.is_valid:
            return Check(name="lease", state="ok", words="the lease is valid")
        if stores.membership.replaced is not None:
            return Check(
                name="lease",
                state="bad",
                words=f"{_REPLACED}: this broker refuses all messages",
                hint="stop this broker; its log names the copy. Messages that it acknowledged "
                "and did not upload are only in its local files",
            )
        stand_in = self._topics.stand_in if self._topics is not None else None
        member = stand_in.member if stand_in is not None else None
        return Check(
            name="lease",
            state="bad",
            words="the lease has expired: messages are refused, another node may own the topics"
            + (f"; clients are sent to {member.connect_url}" if member is not None else "")
            + ("; no other broker responds" if stand_in and stand_in.is_isolated else ""),
            hint="the broker renews it as soon as the metadata store answers",
        )

    def _check_uploads(self, failing: list[ServedTopic], names: bool) -> Check:
        if not failing:
            return Check(name="uploads", state="ok", words="uploads succeed")
        since, now = self.probe.failing_since, self._clock.monotonic()
        is_old = since is not None and now - since > _FAILING_SECONDS
        why = f" ({_error_of(failing[0])})" if names else ""
        meanwhile = "messages stay in local files meanwhile"
        if self._log.is_diskless:
            meanwhile = "messages are not acknowledged meanwhile"
        return Check(
            name="uploads",
            state="bad" if is_old else "attention",
            words=f"uploads are failing: {_named(failing, names)}{why}",
            hint=f"{meanwhile}; check that the bucket exists and the "
            "broker may write to it (storage.cloud)",
            subjects=_subjects(failing, names),
        )

    def _check_lag(self, survey: _Survey, names: bool) -> Check:
        if survey.held:
            held = _named(survey.held, names)
            return Check(
                name="upload_lag",
                state="bad",
                words=f"producers are throttled until uploads catch up: {held}",
                hint="the limit is storage.uploader.max_lag_bytes; find out why uploads are slow",
                subjects=_subjects(survey.held, names),
            )
        if survey.behind:
            return Check(
                name="upload_lag",
                state="attention",
                words=f"uploads are behind: {_named(survey.behind, names)}",
                hint="check whether the bucket or the pipeline keeps up with producers",
                subjects=_subjects(survey.behind, names),
            )
        return Check(name="upload_lag", state="ok", words="uploads keep up")

    def _check_pipeline(self) -> Check:
        is_wanted = self._config.storage.uploader.engine is Engine.SPARK
        if self.probe.pipeline_is_running:
            failing = _number((self.probe.status or {}).get("tier"), "failing_topics_total")
            if failing:
                return Check(
                    name="pipeline",
                    state="attention",
                    words=f"the pipeline fails for {_count(failing, 'topic')}",
                    hint="`ister pipeline status` has the last error",
                )
            return Check(name="pipeline", state="ok", words="the pipeline is running")
        if not is_wanted:
            return Check(
                name="pipeline", state="ok", words="no pipeline is running, and none is needed"
            )
        return Check(
            name="pipeline",
            state="attention",
            words="no pipeline is running: nothing is uploaded",
            hint="start `ister pipeline run`, or set storage.uploader.engine to auto",
        )

    def _check_jobs(self) -> Check:
        failed = sorted(
            name for name, report in self.probe.reports.items() if report.get("ok") is False
        )
        if not failed:
            return Check(name="jobs", state="ok", words="the last run of every job succeeded")
        return Check(
            name="jobs",
            state="attention",
            words=f"the last run failed: {', '.join(failed)}",
            hint="`ister pipeline status` has the errors",
        )

    def _check_memory(self, memory: MemoryGuard) -> Check:
        used = f"{_size(memory.used_bytes)} of {_size(memory.limit_bytes)} in use"
        if not memory.is_full:
            words = f"{used} for messages on their way to the bucket"
            return Check(name="memory", state="ok", words=words)
        return Check(
            name="memory",
            state="bad",
            words=f"producers are held until uploads catch up: {used}",
            hint="find out why uploads are slow, or raise storage.bucket.memory_max_bytes",
        )

    def _check_disk(self, stalled: int) -> Iterator[Check]:
        disk = self.probe.disk
        if disk is None and not stalled:
            return
        free, total = (disk.free_bytes, disk.total_bytes) if disk is not None else (0, 1)
        share = free / max(1, total)
        words = f"{_size(free)} of {_size(total)} free on the log's disk"
        state: State = "ok"
        if stalled or free < _DISK_BAD_BYTES or share < _DISK_BAD_SHARE:
            state = "bad"
        elif free < _DISK_LOW_BYTES or share < _DISK_LOW_SHARE:
            state = "attention"
        if stalled:
            words = f"the disk is full for {_count(stalled, 'topic')}: {words}"
        hint = (
            "free some space, or keep fewer local files (storage.wal.retention); "
            "writing resumes by itself"
        )
        guard = self._log.room.disk
        if guard is not None and guard.is_low():
            error = guard.error()
            state, words, hint = "bad", f"appends are stopped: {error.message}", error.hint or hint
        yield Check(name="disk", state=state, words=words, hint=None if state == "ok" else hint)

    @staticmethod
    def _check_syncs(slow: list[tuple[float, ServedTopic]], names: bool) -> Check:
        if not slow:
            return Check(name="syncs", state="ok", words="the log's disk syncs without delay")
        slow.sort(key=itemgetter(0), reverse=True)
        seconds, worst_one = slow[0]
        topics = [topic for _, topic in slow]
        core = worst_one.topic
        directory = core.wal.directory if core is not None else None
        where = f" ({directory.path})" if names and directory is not None else ""
        return Check(
            name="syncs",
            state="bad" if seconds >= _SYNC_BAD_SECONDS else "attention",
            words=f"the log's disk is slow: a sync took {seconds:.1f} s{where}: "
            f"{_named(topics, names)}",
            hint="producers of these topics wait; look for errors and other programs on the disk "
            "(dmesg, iostat)",
            subjects=_subjects(topics, names),
        )

    def _check_topics(self, survey: _Survey, names: bool) -> Check:
        found: list[str] = []
        bad_ones: list[ServedTopic | str] = []
        state: State = "ok"
        for wanted in (TopicState.FAILED, TopicState.QUARANTINED, TopicState.STALLED):
            bad = survey.by_state.get(wanted.value)
            if bad:
                state = "bad"
                bad_ones += bad
                found.append(f"{wanted.value}: {_named(bad, names)}")
        unopened = self._topics.unopened if self._topics is not None else {}
        if unopened:
            state = "bad"
            bad_ones += unopened
            found.append(f"cannot be opened: {_named(list(unopened), names)}")
        if state == "ok":
            words = f"{_count(survey.count, 'topic')} open"
            return Check(name="topics", state=state, words=words)
        return Check(
            name="topics",
            state=state,
            words="; ".join(found),
            hint="`ister inspect` shows the damage, `ister repair` restores it from the bucket",
            subjects=_subjects(bad_ones, names),
        )

    def _check_subscriptions(self, blocked: list[Subject], names: bool) -> Check:
        if not blocked:
            return Check(name="subscriptions", state="ok", words="no subscription is blocked")
        listed = _named(blocked, names, what="subscription")
        return Check(
            name="subscriptions",
            state="attention",
            words=f"blocked by a message that failed too often: {listed}",
            hint="acknowledge or skip the message, or set the poison policy to dead_letter or drop",
            subjects=_subjects(blocked, names),
        )

    def _check_certificate(self, tls: ServerTls) -> Check:
        left = tls.material().value.expires_at - self._clock.now_ns() / 1e9
        if left > _CERTIFICATE_LOW_SECONDS:
            words = f"the certificate is valid for {left / 86_400:.0f} days"
            return Check(name="certificate", state="ok", words=words)
        when = "has expired" if left <= 0 else f"expires in {_span(left)}"
        return Check(
            name="certificate",
            state="bad" if left < _CERTIFICATE_BAD_SECONDS else "attention",
            words=f"the broker's certificate {when}",
            hint="replace broker.tls.cert_file and key_file; the broker reloads them",
        )

    def _check_clock(self) -> Check:
        now_ns, now = self._clock.now_ns(), self._clock.monotonic()
        jump = self.probe.clock_jump
        if now_ns < _CLOCK_EARLIEST_NS:
            words = "the machine's clock is not set: messages get wrong times"
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
                words=f"the machine's clock jumped by {jump[1]:+.0f} s {_span(now - jump[0])} ago",
                hint="the times of messages jump too, offsets do not; check that NTP is running",
            )
        return Check(name="clock", state="ok", words="the clock is steady")

    def _check_files(self) -> Check:
        used, limit = self.probe.open_files, self.probe.files_max
        words = f"{used} of {limit} file descriptors in use" if limit else f"{used} files"
        if not limit or used < limit * _FILES_LOW_SHARE:
            return Check(name="files", state="ok", words=words)
        return Check(
            name="files",
            state="bad" if used >= limit * _FILES_FULL_SHARE else "attention",
            words=words,
            hint="raise the limit (systemd: LimitNOFILE), or lower storage.wal.max_open_files",
        )

    def _check_streams(self, flight: FlightService) -> Check:
        busy, limit = flight.busy_streams, flight.streams_max
        words = f"{busy} of {limit} Flight streams in use"
        if busy < limit * _STREAMS_LOW_SHARE:
            return Check(name="streams", state="ok", words=words)
        return Check(
            name="streams",
            state="bad" if busy >= limit else "attention",
            words=words,
            hint="raise broker.limits.max_flight_streams, or add a broker",
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
    """A topic's state; a topic without a log is open."""
    return topic.topic.state.value if topic.topic is not None else TopicState.OPEN.value


def _error_of(topic: ServedTopic) -> str | None:
    bucket = topic.topic.bucket if topic.topic is not None else None
    error = bucket.uploads.last_error if bucket is not None else None
    return error.message if error is not None else None


def _subjects(found: Sequence[ServedTopic | str | Subject], names: bool) -> tuple[Subject, ...]:
    """The first of them, if they may be named."""
    shown = found[:_SUBJECTS_SHOWN] if names else ()
    return tuple(
        one if isinstance(one, Subject) else Subject(topic=getattr(one, "name", str(one)))
        for one in shown
    )


def _named(
    found: Sequence[ServedTopic | str | Subject], names: bool, *, what: str = "topic"
) -> str:
    """The first names, or only the number."""
    if not names:
        return _count(len(found), what)
    shown = [str(getattr(one, "name", one)) for one in found[:_NAMES_SHOWN]]
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
