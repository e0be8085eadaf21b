"""Which principal a producer name belongs to, in one topic.

A name belongs to the principal that first used it, until it is released. Other principals are
refused under that name, so that no principal can publish as another producer, or fence it by a
higher epoch.

    <root>/broker/producers/<ns>/<topic>/<name>     {"principal": "service:shop", "at": seconds}

One record per name. All records of a topic are read when the first name is used, and then held in
memory: a topic is open on one broker. A record is written when the name is claimed, and once a day
while it is in use, never per message. Names from before this version have no record: their next use
claims them.

The names per principal and topic are bounded, because programs may make up a name at each start.
Beyond the bound the name that the principal has not used for longest is released, never a name of
another principal.

Without authentication the principal is "", and nothing is checked or written.

Owns: the table and its bounds. Does not own: the records' form (`topics.records`). A crash leaves a
name claimed or not; both are found again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.broker.topics.broker_records import BrokerRecords, NameRecord
from ister.errors import IsterError, PermissionDeniedError

_log = logging.getLogger("ister.broker.publish.producer_names")

_NAMES_PER_PRINCIPAL_MAX: Final = 1_000
_REFRESH_SECONDS: Final = 86_400
_RETRY_SECONDS: Final = 60


class ProducerNames:
    """The producer names of one open topic. Thread-safe."""

    def __init__(
        self,
        records: BrokerRecords,
        topic: TopicName,
        *,
        clock: Clock,
        names_max: int = _NAMES_PER_PRINCIPAL_MAX,
    ) -> None:
        self._records = records
        self._topic = topic
        self._clock = clock
        self._names_max = names_max
        self._lock = threading.Lock()
        self._owners: dict[str, NameRecord] | None = None
        # The names of each principal, the one longest unused first.
        self._by_principal: dict[str, dict[str, None]] = {}

    def is_settled(self, name: str, principal: str) -> bool:
        """Whether `claim` would succeed without calling the metadata store. Does not block."""
        if not principal:
            return True
        found = None if self._owners is None else self._owners.get(name)
        return (
            found is not None
            and found.principal == principal
            and self._now() - found.at < _REFRESH_SECONDS
        )

    def claim(self, name: str, principal: str) -> None:
        """Claims a name for a principal, unless it has it already. Blocks."""
        if self.is_settled(name, principal):
            return
        with self._lock:
            owners = self._load()
            found = owners.get(name)
            if found is None:
                # Another broker may have had the topic meanwhile: what is written counts.
                found = self._records.claim_producer(self._topic, name, principal, self._now())
                self._keep(name, found)
                self._forget_oldest(principal, keep=name)
            if found.principal != principal:
                raise self._refusal(name)
            if self._now() - found.at >= _REFRESH_SECONDS:
                self._refresh(name, principal)

    def check(self, names: Iterable[str], principal: str) -> None:
        """Refuses names that belong to other principals; claims none. Blocks."""
        if not principal:
            return
        with self._lock:
            owners = self._load()
            for name in names:
                found = owners.get(name)
                if found is not None and found.principal != principal:
                    raise self._refusal(name)

    def release(self, name: str) -> str | None:
        """Releases a name: its next use claims it. Blocks.

        Returns:
            The principal that it belonged to; None if the name was not claimed.
        """
        with self._lock:
            found = self._load().get(name)
            self._records.release_producer(self._topic, name)
            self._drop(name)
        return None if found is None else found.principal

    # -- with the lock held -----------------------------------------------------------------

    def _refresh(self, name: str, principal: str) -> None:
        """Records that a name is in use; retries later if the metadata store does not answer."""
        at = self._now()
        try:
            self._records.refresh_producer(self._topic, name, principal, at)
        except IsterError as error:
            _log.info(
                "producer name not refreshed",
                extra={"topic": str(self._topic), "producer": name, "error": str(error)},
            )
            at += _RETRY_SECONDS - _REFRESH_SECONDS
        self._keep(name, NameRecord(principal=principal, at=at))

    def _load(self) -> dict[str, NameRecord]:
        if self._owners is None:
            found = self._records.producer_names(self._topic)
            self._owners = {}
            for name, record in sorted(found.items(), key=lambda item: item[1].at):
                self._keep(name, record)
        return self._owners

    def _keep(self, name: str, record: NameRecord) -> None:
        self._drop(name)
        if self._owners is not None:
            self._owners[name] = record
        self._by_principal.setdefault(record.principal, {})[name] = None

    def _drop(self, name: str) -> None:
        found = None if self._owners is None else self._owners.pop(name, None)
        if found is not None:
            self._by_principal.get(found.principal, {}).pop(name, None)

    def _forget_oldest(self, principal: str, *, keep: str) -> None:
        names = self._by_principal.get(principal, {})
        while len(names) > self._names_max:
            oldest = next(iter(names))
            if oldest == keep:
                return
            self._records.release_producer(self._topic, oldest)
            self._drop(oldest)

    def _refusal(self, name: str) -> PermissionDeniedError:
        return PermissionDeniedError(
            f"producer name {name[:256]!r} belongs to another principal",
            topic=str(self._topic),
            hint="use another name; an operator can release it: ister topics release-producer",
        )

    def _now(self) -> int:
        return self._clock.now_ns() // 1_000_000_000
