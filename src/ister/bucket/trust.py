"""Detects that the metadata store as a whole was rolled back to an older state.

    storage/metadata/<id>.json        the highest revision of the metadata store that was seen
    storage/metadata/<id>.older.json  that revision, and the lower one that was found later

Every change raises the store's revision, and restoring a backup lowers it. Each process compares
the revision with the highest one in the bucket, when it joins and once a minute. A store whose
revision has fallen is distrusted by all processes until `ister metadata accept`: nothing is
deleted, and seals and idle marks prove nothing (`ister.bucket.claim`). The `id` is in the metadata
store, so that a new store is not compared with one that was lost.

Owns: these objects and the comparison. Does not own: the terms of single topics (`terms`).

Not detected: a restore to a revision above the last one that was written here, and
`etcdutl --bump-revision`. Terms, and the adoption of objects, do not depend on this. What a crash
leaves: a highest revision that is up to a minute old. Two processes that write at once can leave
the same, which is why a fallen revision has an object of its own.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final

from ister.base.clock import Clock
from ister.base.limits import KIB
from ister.errors import CommitUnknownError, IsterError, NotFoundError
from ister.metadata.base import Absent, MetadataStore, Put
from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.bucket.trust")

TRUST_PREFIX: Final = "storage/metadata/"
_SEEN: Final = ".json"
_OLDER: Final = ".older.json"
_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Revisions of a metadata store, as processes saw them."""

    revision: int = 0
    """The highest revision."""
    fallen_to: int | None = None
    """The lower revision at which the store was found later; None while it is trusted."""
    accepted: int = 0
    """How often an operator has accepted an older state."""


class Trust:
    """Whether the metadata store is known to be older than it was. Thread-safe."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, root_prefix: str, clock: Clock
    ) -> None:
        self._objects = objects
        self._metadata = metadata
        self._id_key = f"{root_prefix}/cluster/store"
        self._clock = clock
        self._lock = threading.Lock()
        self._key: str | None = None
        self._check_at = -float("inf")
        self._seen = Seen()
        # Replaced as a whole, so that it can be read without the lock.
        self._fallen: Seen | None = None
        self.is_compared = False
        """Whether the stores have answered once since this process started."""

    @property
    def is_distrusted(self) -> bool:
        """Whether the metadata store was rolled back and not accepted since; as last checked."""
        return self._fallen is not None

    @property
    def reason(self) -> str | None:
        """Why the store is distrusted; None while it is trusted."""
        if (fallen := self._fallen) is None:
            return None
        return (
            "the metadata store was rolled back to an older state: its revision fell from "
            f"{fallen.revision} to {fallen.fallen_to}"
        )

    def check(self) -> bool:
        """Compares the revision with the highest one seen; returns whether it is distrusted.

        Raises:
            UnavailableError: A store does not answer; the result of the last comparison holds.
        """
        with self._lock:
            self._check()
            return self.is_distrusted

    def follow(self) -> bool:
        """Like `check`, but at most once a minute, and logs errors instead of raising them."""
        now = self._clock.monotonic()
        if now >= self._check_at:
            self._check_at = now + _SECONDS
            try:
                self.check()
            except IsterError as error:
                _log.warning("metadata store not compared", extra={"error": str(error)})
        return self.is_distrusted

    def check_revision(self) -> int:
        """Compares the revision with what this process saw, without the bucket; returns it."""
        # Before the store is asked: another thread may see a later revision meanwhile.
        seen = self._seen.revision
        revision = self._metadata.current_revision(self._id_key)
        if self._fallen is not None:
            return revision
        if revision < seen:
            self._distrust(replace(self._seen, fallen_to=revision))
            self._check_at = -float("inf")  # the next `follow` records it in the bucket
        else:
            # What this process saw since it last compared with the bucket counts, too.
            self._seen = replace(self._seen, revision=max(self._seen.revision, revision))
        return revision

    def _check(self) -> None:
        # The bucket first: a revision that another process has written there cannot be above one
        # that is read from the metadata store afterwards.
        stored, fallen = self._load(), self._load(_OLDER)
        if stored.accepted > self._seen.accepted:
            # An operator has accepted a state that is older than what this process saw.
            self._seen, self._fallen = replace(stored, revision=0, fallen_to=None), None
        revision = self.check_revision()
        is_told = fallen.fallen_to is not None and fallen.accepted >= stored.accepted
        if is_told:
            self._distrust(fallen)
        elif revision < stored.revision:
            self._distrust(replace(stored, fallen_to=revision))
        self.is_compared = True
        if self._fallen is not None:
            if not is_told:
                self._save(self._fallen, _OLDER)
            return
        self._seen = replace(stored, revision=revision)
        if revision != stored.revision:
            self._save(self._seen)

    def _distrust(self, fallen: Seen) -> None:
        if self._fallen is None:
            self._fallen = fallen
            _log.error(
                "metadata store was rolled back to an older state; nothing is deleted",
                extra={
                    "revision": fallen.fallen_to,
                    "seen": fallen.revision,
                    "hint": "`ister metadata check`, then `ister metadata accept`",
                },
            )

    def accept(self) -> None:
        """Trusts the metadata store as it is; other processes follow within a minute."""
        with self._lock:
            accepted = max(self._load().accepted, self._load(_OLDER).accepted) + 1
            self._seen = Seen(
                revision=self._metadata.current_revision(self._id_key), accepted=accepted
            )
            self._save(self._seen)
            self._fallen = None

    def _load(self, suffix: str = _SEEN) -> Seen:
        if self._key is None:
            self._key = f"{TRUST_PREFIX}{self._store_id()}"
        try:
            fields = json.loads(self._objects.read(self._key + suffix, 0, 64 * KIB))
            return Seen(**{name: fields[name] for name in asdict(Seen()) if name in fields})
        except NotFoundError:
            return Seen()
        except (ValueError, TypeError):
            _log.warning("unreadable revision", extra={"path": self._key})
            return Seen()

    def _save(self, seen: Seen, suffix: str = _SEEN) -> None:
        assert self._key is not None  # noqa: S101 - for mypy: set by `_load`
        self._objects.put(self._key + suffix, json.dumps(asdict(seen)).encode())

    def _store_id(self) -> str:
        found = self._metadata.get(self._id_key)
        if found is None:
            made = secrets.token_hex(8).encode()
            with suppress(CommitUnknownError):
                self._metadata.transact([Absent(self._id_key)], [Put(self._id_key, made)])
            found = self._metadata.get(self._id_key)
            if found is None:
                return made.decode()
        return found.value.decode("ascii", errors="replace")
