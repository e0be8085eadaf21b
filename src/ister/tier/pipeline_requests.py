"""Requests to a running pipeline: a job that somebody wants done now, whatever its schedule says.

    <root>/pipeline/requests/<job>    {"requested_at": …, "by": …, "topics": ["/ns/topic", …]}

Owns: these keys. Does not own: who may ask (the broker), doing it (`ister.spark.jobs.service`).

A request waits until a pipeline takes it, and is gone from the store once its job has begun. Two
requests for one job that nobody has taken yet become one, for the topics of both. One that has
waited for longer than `REQUEST_SECONDS_MAX` is forgotten: whoever asked has long done without.

What a crash leaves: a request that waits, or one that was taken and is asked for again by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ister.clock import Clock
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.metadata.base import Absent, Compare, Delete, MetadataStore, Put, RevisionIs
from ister.model import TopicName
from ister.tier.fence import read_holder
from ister.tier.pipeline import PipelineKeys

__all__ = [
    "REQUESTED_JOBS",
    "REQUEST_SECONDS_MAX",
    "PipelineRequest",
    "read_requests",
    "request_job",
    "take_request",
]

REQUESTED_JOBS: Final = ("tier", "compact", "export", "scrub")
"""The jobs that can be asked for, most important one first."""
REQUEST_SECONDS_MAX: Final = 3600
"""How long a request may wait."""

_TOPICS_MAX: Final = 1000
_BY_CHARACTERS_MAX: Final = 256
_ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """A job that is to be done as soon as possible."""

    job: str
    requested_at: int
    """Seconds since the Unix epoch."""
    by: str
    """Who asked."""
    topics: tuple[str, ...] | None
    """Which ones; None for those that the pipeline's settings name."""
    revision: int
    """Of its key."""

    def as_json(self) -> dict[str, Any]:
        """For a status."""
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
    """Asks the running pipeline for a job.

    Args:
        store: The metadata store.
        keys: The pipeline's keys in it.
        job: One of `REQUESTED_JOBS`.
        by: Who asks.
        topics: For which topics; None for those that the pipeline's settings name.
        clock: Where time comes from.

    Raises:
        InvalidRequestError: There is no such job, or a topic has no name.
        ConflictError: No pipeline is running.
        UnavailableError: The metadata store does not answer.
    """
    if job not in REQUESTED_JOBS:
        raise InvalidRequestError(
            f"a pipeline cannot be asked for {job[:40]!r}",
            hint=f"one of: {', '.join(REQUESTED_JOBS)}",
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
            "no pipeline is running that could be asked",
            hint="`ister pipeline run` starts one; `ister pipeline "
            f"{job}` does this job alone, now",
        )
    key, now = keys.request(job), clock.now_ns() // 1_000_000_000
    for _ in range(_ATTEMPTS):
        found = _read(store, keys, job)
        wanted = None if topics is None else tuple(sorted(set(topics)))
        compare: Compare = Absent(key)
        if found is not None:
            compare = RevisionIs(key, found.revision)
            if now - found.requested_at <= REQUEST_SECONDS_MAX:
                wanted = _both(wanted, found.topics)
        request = {
            "requested_at": now,
            "by": by[:_BY_CHARACTERS_MAX],
            "topics": None if wanted is None else list(wanted),
        }
        try:
            revision = store.transact([compare], [Put(key, json.dumps(request).encode())])
        except CommitUnknownError:
            continue  # asking again changes nothing
        if revision is not None:
            return PipelineRequest(
                job=job,
                requested_at=now,
                by=by[:_BY_CHARACTERS_MAX],
                topics=wanted,
                revision=revision,
            )
    raise UnavailableError("the request could not be written down", path=key)


def read_requests(store: MetadataStore, keys: PipelineKeys) -> list[PipelineRequest]:
    """The requests that nobody has taken yet, most important job first.

    Raises:
        UnavailableError: The metadata store does not answer.
    """
    found = {item.key: item for item in store.range(keys.request(""), limit=100)}
    requests = []
    for job in REQUESTED_JOBS:
        item = found.get(keys.request(job))
        request = None if item is None else _decode(job, item.value, item.revision)
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
    """Removes a request whose job begins; whether it was still there, as it was read.

    Args:
        store: The metadata store.
        keys: The pipeline's keys in it.
        request: As `read_requests` gave it.
        compares: What has to hold, too: that whoever takes it has the lease.

    Raises:
        UnavailableError: The metadata store does not answer.
    """
    key = keys.request(request.job)
    try:
        done = store.transact([RevisionIs(key, request.revision), *compares], [Delete(key)])
    except CommitUnknownError:
        # A job that is done twice does no harm; one that nobody does would.
        return True
    return done is not None


def _read(store: MetadataStore, keys: PipelineKeys, job: str) -> PipelineRequest | None:
    item = store.get(keys.request(job))
    if item is None:
        return None
    decoded = _decode(job, item.value, item.revision)
    if decoded is not None:
        return decoded
    # Whatever it is, it is replaced.
    return PipelineRequest(job=job, requested_at=0, by="", topics=(), revision=item.revision)


def _both(some: tuple[str, ...] | None, others: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if some is None or others is None:
        return None
    both = tuple(sorted({*some, *others}))
    return both if len(both) <= _TOPICS_MAX else some


def _decode(job: str, value: bytes, revision: int) -> PipelineRequest | None:
    """A request as it is stored; None if it is none."""
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
