"""Leased keys of a job: taken, renewed on a thread until the job ends, then released.

Owns: the renewal. Does not own: what a key protects (`ister.bucket.fence`), which keys there are.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final, Self

from ister.base import threads
from ister.base.clock import Clock
from ister.bucket.fence import Fence, read_holder
from ister.errors import ConflictError, FencedError, IsterError
from ister.metadata.base import MetadataStore

_log = logging.getLogger("ister.spark.jobs")

_RENEWALS_PER_LEASE: Final = 3
_MARK_RENEWAL_SECONDS: Final = 60.0


class LeaseKeeper:
    """Holds the leased keys of one job; a context manager. Thread-safe."""

    def __init__(
        self, store: MetadataStore, *, ttl_seconds: float, clock: Clock, thread: str
    ) -> None:
        self._store = store
        self._ttl = ttl_seconds
        self._clock = clock
        self._thread = thread
        self._lock = threading.Lock()
        self._fences: list[Fence] = []
        self._marks: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._renewing = threads.start(self._thread, self._renew_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._renewing is not None:
            self._renewing.join()
        for fence in self._fences:
            fence.release()

    def take(
        self,
        key: str,
        about: Mapping[str, object],
        *,
        holder: str | None = None,
        topic: str | None = None,
    ) -> Fence:
        """Takes a key and keeps it until the end.

        `about` is shown about the holder: the job, and what else others may want to know. `holder`
        is its unique id, random by default; `topic` is named in errors.

        Raises:
            ConflictError: Another process has the key; says which.
            UnavailableError: The metadata store does not respond.
        """
        try:
            fence = Fence.take(
                self._store,
                key,
                id=holder if holder is not None else secrets.token_hex(8),
                about={**about, "host": socket.gethostname(), "process": os.getpid()},
                ttl_seconds=self._ttl,
                clock=self._clock,
            )
        except ConflictError as error:
            what = "pipeline" if about["job"] in ("run", "tier") else f"{about['job']} job"
            raise ConflictError(
                f"another {what} is running{self._describe_holder(key)}",
                topic=topic,
                path=key,
                hint="wait until it ends; after a crash its lease expires within "
                f"{self._ttl:g} seconds",
            ) from error
        with self._lock:
            self._fences.append(fence)
        return fence

    def renew_also(self, renew: Callable[[], None]) -> None:
        """Calls `renew` once a minute, until the end."""
        with self._lock:
            self._marks.append(renew)

    def _describe_holder(self, key: str) -> str:
        holder = read_holder(self._store, key)
        if holder is None:
            return ""
        about = holder.about
        return f": {about.get('job')} on {about.get('host')}, process {about.get('process')}"

    def _renew_all(self) -> None:
        marked_at = self._clock.monotonic()
        lost: set[str] = set()
        while not self._stop.wait(self._ttl / _RENEWALS_PER_LEASE):
            with self._lock:
                renewals = {fence.key: fence.renew for fence in self._fences}
                if self._clock.monotonic() - marked_at >= _MARK_RENEWAL_SECONDS:
                    marked_at = self._clock.monotonic()
                    renewals |= {f"mark {at}": mark for at, mark in enumerate(self._marks)}
            for name, renew in renewals.items():
                if name in lost:
                    continue
                try:
                    renew()
                except FencedError:
                    lost.add(name)  # the job finds out at its next commit
                except IsterError as error:
                    _log.warning("lease not renewed", extra={"error": str(error)})
                except Exception as error:  # noqa: BLE001 - the next renewal may succeed
                    threads.record(self._thread, error)
