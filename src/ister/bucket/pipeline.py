"""The pipeline in the metadata store: its keys, its lease, requests for jobs, and its status.

    <root>/pipeline/lease            the process that uploads; expires with its lease
    <root>/pipeline/jobs/<id>        a running job; expires with its lease
    <root>/pipeline/exports/<id>     a running export into one table; likewise
    <root>/pipeline/gc               a running `gc`; likewise
    <root>/pipeline/clock            the clock of the last `gc`, to compare the next one's with
    <root>/pipeline/status           the service's last status
    <root>/pipeline/reports/<job>    the last report of each job
    <root>/pipeline/requests/<job>   a request to run a job now; deleted when the job starts

Does not own: jobs and their reports (`ister.spark.jobs`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock
from ister.base.model import JsonObject, TopicName
from ister.bucket.fence import read_holder
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.metadata.base import Absent, Compare, Delete, MetadataStore, Put, RevisionIs
from ister.metadata.transact import transact

_log = logging.getLogger("ister.bucket.pipeline")

_CHECKS_PER_LEASE: Final = 5


class PipelineKeys:
    """The metadata keys of the pipeline."""

    def __init__(self, root_prefix: str) -> None:
        self._root = f"{root_prefix}/pipeline/"
        self.lease = f"{self._root}lease"
        self.status = f"{self._root}status"
        self.gc = f"{self._root}gc"
        self.clock = f"{self._root}clock"

    def job(self, id: str) -> str:
        """The key of a running job."""
        return f"{self._root}jobs/{id}"

    def export(self, id: str) -> str:
        """The key of an export into one table."""
        return f"{self._root}exports/{id}"

    def report(self, job: str) -> str:
        """The key of a job's last report."""
        return f"{self._root}reports/{job}"

    def request(self, job: str) -> str:
        """The key of a request for a job; with an empty name, the prefix of all requests."""
        return f"{self._root}requests/{job}"

    def has_jobs(self, store: MetadataStore, *, besides: str | None = None) -> bool:
        """Whether a job has a lease; the caller's own key, `besides`, does not count.

        Nor does `gc`, which makes no objects.
        """
        jobs = [found.key for found in store.range(self.job(""), limit=2)]
        return store.get(self.lease) is not None or any(key != besides for key in jobs)


class PipelineWatch:
    """Tells whether a pipeline holds the lease, from a cache that is a fraction of a lease old.

    Used by one thread at a time. While the metadata store does not respond, the last result counts:
    no process can commit meanwhile.
    """

    def __init__(
        self, store: MetadataStore, keys: PipelineKeys, *, ttl_seconds: float, clock: Clock
    ) -> None:
        self._store = store
        self._key = keys.lease
        self._every = ttl_seconds / _CHECKS_PER_LEASE
        self._clock = clock
        self._check_at = -float("inf")
        self._is_running = False

    def is_running(self) -> bool:
        """Whether a pipeline holds the lease, as of a moment ago."""
        now = self._clock.monotonic()
        if now < self._check_at:
            return self._is_running
        self._check_at = now + self._every
        try:
            is_running = self._store.get(self._key) is not None
        except IsterError as error:
            _log.debug("pipeline lease cannot be read", extra={"error": str(error)})
            return self._is_running
        if is_running != self._is_running:
            _log.info("the pipeline uploads" if is_running else "no pipeline: this process uploads")
        self._is_running = is_running
        return is_running


REQUESTED_JOBS: Final = ("tier", "compact", "export", "gc", "scrub")
"""The jobs that can be requested, most important one first."""
REQUEST_SECONDS_MAX: Final = 3600
"""Older requests are dropped."""

_TOPICS_MAX: Final = 1000
_BY_CHARACTERS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """A request to run a job as soon as possible."""

    job: str
    requested_at: int
    """Seconds since the Unix epoch."""
    by: str
    """Name of the requester."""
    topics: tuple[str, ...] | None
    """Topic names; None for those that the pipeline's settings name."""
    revision: int
    """Revision of its key."""

    def as_json(self) -> JsonObject:
        """The request as JSON, for the status."""
        return {
            "requested_at": self.requested_at,
            "by": self.by,
            "topics": None if self.topics is None else list(self.topics),
        }


def request_job(
    store: MetadataStore,
    keys: PipelineKeys,
    job: str,
    *,
    by: str,
    topics: Sequence[str] | None,
    clock: Clock,
) -> PipelineRequest:
    """Requests a job from the running pipeline.

    `topics`: topic names; None for those that the pipeline's settings name.

    Raises:
        InvalidRequestError: There is no such job, or a topic has no name.
        ConflictError: No pipeline is running.
    """
    if job not in REQUESTED_JOBS:
        raise InvalidRequestError(
            f"unknown job {job[:40]!r}", hint=f"one of: {', '.join(REQUESTED_JOBS)}"
        )
    if topics is not None:
        if not 0 < len(topics) <= _TOPICS_MAX:
            raise InvalidRequestError(
                f"a request for {len(topics)} topics",
                hint=f"name 1 to {_TOPICS_MAX}, or none at all",
            )
        topics = [str(TopicName.parse(topic)) for topic in topics]
    holder = read_holder(store, keys.lease)
    if holder is None or holder.about.get("job") != "run":
        raise ConflictError(
            "no pipeline is running",
            hint="`ister pipeline run` starts one; `ister pipeline "
            f"{job}` does this job alone, now",
        )
    key, now = keys.request(job), clock.now_ns() // 1_000_000_000

    def attempt() -> PipelineRequest | None:
        found = _read_request(store, keys, job)
        wanted = None if topics is None else tuple(sorted(set(topics)))
        compare: Compare = Absent(key)
        if found is not None:
            compare = RevisionIs(key, found.revision)
            if now - found.requested_at <= REQUEST_SECONDS_MAX:
                wanted = _union(wanted, found.topics)
        request = {
            "requested_at": now,
            "by": by[:_BY_CHARACTERS_MAX],
            "topics": None if wanted is None else list(wanted),
        }
        revision = store.transact([compare], [Put(key, json.dumps(request).encode())])
        if revision is None:
            return None
        return PipelineRequest(
            job=job, requested_at=now, by=by[:_BY_CHARACTERS_MAX], topics=wanted, revision=revision
        )

    # A lost answer is harmless: the request is repeated.
    return transact(attempt, UnavailableError("the request could not be stored", path=key))


def read_requests(store: MetadataStore, keys: PipelineKeys) -> list[PipelineRequest]:
    """The pending requests, most important job first."""
    found = {item.key: item for item in store.range(keys.request(""), limit=100)}
    requests = []
    for job in REQUESTED_JOBS:
        item = found.get(keys.request(job))
        request = None if item is None else _decode_request(job, item.value, item.revision)
        if request is not None:
            requests.append(request)
    return requests


def take_request(
    store: MetadataStore,
    keys: PipelineKeys,
    request: PipelineRequest,
    *,
    compares: Sequence[Compare] = (),
) -> bool:
    """Removes a request whose job begins; returns whether it was unchanged until then."""
    key = keys.request(request.job)
    try:
        done = store.transact([RevisionIs(key, request.revision), *compares], [Delete(key)])
    except CommitUnknownError:
        # Running a job twice does no harm; losing a request would.
        return True
    return done is not None


def _read_request(store: MetadataStore, keys: PipelineKeys, job: str) -> PipelineRequest | None:
    item = store.get(keys.request(job))
    if item is None:
        return None
    decoded = _decode_request(job, item.value, item.revision)
    if decoded is not None:
        return decoded
    # An invalid request is replaced.
    return PipelineRequest(job=job, requested_at=0, by="", topics=(), revision=item.revision)


def _union(some: tuple[str, ...] | None, others: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if some is None or others is None:
        return None
    both = tuple(sorted({*some, *others}))
    return both if len(both) <= _TOPICS_MAX else some


def _decode_request(job: str, value: bytes, revision: int) -> PipelineRequest | None:
    """Decodes a stored request; None if it is invalid."""
    try:
        fields = json.loads(value)
        topics = fields.get("topics")
        return PipelineRequest(
            job=job,
            requested_at=int(fields["requested_at"]),
            by=str(fields.get("by") or ""),
            topics=None if topics is None else tuple(str(TopicName.parse(one)) for one in topics),
            revision=revision,
        )
    except (ValueError, TypeError, KeyError, AttributeError, IsterError):
        return None
