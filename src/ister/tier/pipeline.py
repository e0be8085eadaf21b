"""The pipeline as seen from a log: its keys in the metadata store, and whether one is running.

    <root>/pipeline/lease            who does the uploads; ends with its lease
    <root>/pipeline/jobs/<id>        a job under way, whatever it does; likewise
    <root>/pipeline/exports/<id>     an export into one table; likewise
    <root>/pipeline/status           what the service has done last
    <root>/pipeline/reports/<job>    the last report of each job
    <root>/pipeline/requests/<job>   a job that somebody wants done now; gone once it has begun

Owns: these names, and a log's view of the lease. Does not own: what is stored there, jobs.
"""

from __future__ import annotations

import logging
from typing import Final

from ister.clock import Clock
from ister.errors import IsterError
from ister.metadata.base import MetadataStore

__all__ = ["PipelineKeys", "PipelineWatch"]

_log = logging.getLogger("ister.tier.pipeline")

_LOOKS_PER_LEASE: Final = 5


class PipelineKeys:
    """The metadata keys of the pipeline."""

    def __init__(self, root_prefix: str) -> None:
        self._root = f"{root_prefix}/pipeline/"
        self.lease = f"{self._root}lease"
        self.status = f"{self._root}status"

    def job(self, id: str) -> str:
        """The key of a job under way."""
        return f"{self._root}jobs/{id}"

    def export(self, id: str) -> str:
        """The key of an export into one table."""
        return f"{self._root}exports/{id}"

    def report(self, job: str) -> str:
        """The key of a job's last report."""
        return f"{self._root}reports/{job}"

    def request(self, job: str) -> str:
        """The key of a request for a job; of all of them, with an empty name, what they share."""
        return f"{self._root}requests/{job}"

    def has_jobs(self, store: MetadataStore) -> bool:
        """Whether any job is under way, or was a lease's time ago."""
        return store.get(self.lease) is not None or bool(store.range(self.job(""), limit=1))


class PipelineWatch:
    """Whether a pipeline holds the lease: asked often, looked up a few times in a lease's time.

    Used by one thread at a time. While the metadata store does not answer, the last answer counts:
    nobody can commit meanwhile.
    """

    def __init__(
        self, store: MetadataStore, keys: PipelineKeys, *, ttl_seconds: float, clock: Clock
    ) -> None:
        self._store = store
        self._key = keys.lease
        self._every = ttl_seconds / _LOOKS_PER_LEASE
        self._clock = clock
        self._look_at = -float("inf")
        self._is_running = False

    def is_running(self) -> bool:
        """Whether one does, as of a moment ago."""
        now = self._clock.monotonic()
        if now < self._look_at:
            return self._is_running
        self._look_at = now + self._every
        try:
            is_running = self._store.get(self._key) is not None
        except IsterError as error:
            _log.debug("pipeline", extra={"error": str(error)})
            return self._is_running
        if is_running != self._is_running:
            _log.info("uploads are left to a pipeline" if is_running else "uploads are taken back")
        self._is_running = is_running
        return is_running
