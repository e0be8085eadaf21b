"""Probes of the metadata store, the disk and the machine, for the health checks.

A task runs them every few seconds, in a thread where they may block, and keeps the results.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ister.base import threads
from ister.base.clock import Clock
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.bucket.pipeline import PipelineKeys
from ister.config import Config
from ister.errors import IsterError
from ister.metadata.base import MetadataStore, StoreUsage

_log = logging.getLogger("ister.broker.observe.health")

_TICK_SECONDS: Final = 5.0
_PROBE_SECONDS: Final = 10.0
# A store that has not answered for this long counts as not answering.
_SILENT_SECONDS: Final = 30.0
_MARKS_MAX: Final = 64
_TOPICS_AT_ONCE: Final = 200
_CLOCK_JUMP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system that the log is on."""

    path: str
    total_bytes: int
    free_bytes: int


class _Lag:
    """When the messages arrived that are not in the bucket yet, approximately."""

    __slots__ = ("marks", "topic")

    def __init__(self, topic: ServedTopic) -> None:
        self.topic = topic
        # Ends of the log, each with the time when it was seen.
        self.marks: deque[tuple[int, float]] = deque()

    def record(self, end: int, tiered: int, now: float) -> None:
        marks = self.marks
        while marks and marks[0][0] <= tiered:
            marks.popleft()
        if end > tiered and (not marks or end > marks[-1][0]):
            marks.append((end, now))
            if len(marks) > _MARKS_MAX:
                # Keep the oldest, and every second one of the others.
                self.marks = deque([*list(marks)[:-1:2], marks[-1]])


class HealthProbe:
    """The last results of the probes. Used on the loop, except `probe`."""

    def __init__(
        self, metadata: MetadataStore, config: Config, *, clock: Clock, directory: str | None
    ) -> None:
        """Probes nothing before `start`.

        `directory` has the log's files; None for a log in memory.
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
        """When the metadata store last answered, in monotonic seconds."""
        self.error: str | None = None
        """Why the last probe of the metadata store failed."""
        self.usage: StoreUsage | None = None
        """How full the metadata store is; None if it does not report it."""
        self.pipeline_is_running = False
        self.status: dict[str, object] | None = None
        """The last status of the pipeline."""
        self.reports: dict[str, dict[str, object]] = {}
        """The last report of each job."""
        self.disk: Disk | None = None
        self.open_files = 0
        self.files_max = 0
        self.clock_jump: tuple[float, float] | None = None
        """When the machine's clock last jumped, and by how many seconds."""
        self.failing_since: float | None = None
        """Since when uploads fail."""

    def start(self) -> None:
        """Starts probing."""
        self._task = asyncio.get_running_loop().create_task(self._keep_probing())

    async def stop(self) -> None:
        """Stops; a running probe may continue in its thread. May be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _keep_probing(self) -> None:
        probing: asyncio.Future[None] | None = None
        probed_at = -_PROBE_SECONDS
        while True:
            now = self._clock.monotonic()
            # A store that does not answer blocks one thread, not one more each time.
            if now - probed_at >= _PROBE_SECONDS and (probing is None or probing.done()):
                probed_at = now
                probing = asyncio.ensure_future(
                    asyncio.to_thread(threads.run, "ister-health", self.probe)
                )
            with threads.guard("ister-lags"):
                await self.record_lags()
            await asyncio.sleep(_TICK_SECONDS)

    # -- in a thread ------------------------------------------------------------------------

    def probe(self) -> None:
        """Probes the store and the machine. Blocks."""
        self._probe_clock()
        self._probe_machine()
        try:
            lease = self._metadata.get(self._keys.lease)
            status = self._metadata.get(self._keys.status)
            reports = self._metadata.range(self._keys.report(""), limit=32)
            usage = self._metadata.usage(self._keys.lease)
        except IsterError as error:
            self.error = error.message
            return
        self.answered_at, self.error = self._clock.monotonic(), None
        self.usage = usage
        self.pipeline_is_running = lease is not None
        self.status = None if status is None else _parse(status.value)
        prefix = len(self._keys.report(""))
        found = {one.key[prefix:]: _parse(one.value) for one in reports}
        self.reports = {name: report for name, report in found.items() if report is not None}

    def _probe_clock(self) -> None:
        now = self._clock.monotonic()
        # Not against `monotonic`, which stops while a machine is suspended.
        drift = self._clock.now_ns() / 1e9 - self._clock.boottime()
        if self._drift is not None and abs(drift - self._drift) > _CLOCK_JUMP_SECONDS:
            self.clock_jump = (now, drift - self._drift)
            _log.warning("the clock jumped", extra={"seconds": round(drift - self._drift, 1)})
        self._drift = drift

    def _probe_machine(self) -> None:
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
                # Counting them needs one, and none is left.
                self.open_files = self.files_max

    # -- on the loop ------------------------------------------------------------------------

    @property
    def metadata_answers(self) -> bool:
        """Whether the metadata store answers, by the last probes."""
        now = self._clock.monotonic()
        since = self._began_at if self.answered_at is None else self.answered_at
        return self.error is None and now - since < _SILENT_SECONDS

    async def record_lags(self) -> None:
        """Records how far uploads have come."""
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
            if core is None or core.bucket is None:
                continue
            is_failing = is_failing or core.bucket.uploads.last_error is not None
            end, tiered = core.synced, core.tiered
            lag = self._lags.get(topic.name)
            if end <= tiered:
                if lag is not None:
                    del self._lags[topic.name]
                continue
            if lag is None or lag.topic is not topic:
                lag = self._lags[topic.name] = _Lag(topic)
            lag.record(end, tiered, now)
        names = {topic.name for topic in served}
        for name in [name for name in self._lags if name not in names]:
            del self._lags[name]
        if not is_failing:
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = now

    def lag_seconds(self, topic: ServedTopic) -> float:
        """The approximate age of the oldest message that is not in the bucket.

        Messages from before the start count from the start on.
        """
        core, lag = topic.topic, self._lags.get(topic.name)
        if core is None or core.bucket is None or lag is None or lag.topic is not topic:
            return 0.0
        tiered = core.tiered
        since = next((at for end, at in lag.marks if end > tiered), None)
        return 0.0 if since is None else max(0.0, self._clock.monotonic() - since)


def _parse(value: bytes) -> dict[str, object] | None:
    try:
        fields = json.loads(value)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
