"""One transaction of the SQLite metadata: entries, leases, and the list of changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from ister.errors import NotFoundError
from ister.metadata.base import Lease, Operation, Put
from ister.metadata.checks import encode_key
from ister.metadata.leases import LeaseStore, number_of

CHANGES_KEPT: Final = 1000
"""Revisions that a watch may be late by before it is notified of every key instead."""
_CHANGES_REMOVED: Final = 64
"""Old changes are removed once in this many revisions, instead of in every transaction."""


class Change:
    """A transaction under way."""

    def __init__(
        self, store: LeaseStore, connection: sqlite3.Connection, boot: str, now: float
    ) -> None:
        self.connection = connection
        self.now = now
        self._store = store
        self._boot = boot
        self._revision = self._first_revision = last_revision(connection)
        self._changed: list[tuple[int, bytes]] = []
        self._leases: set[int] = set()

    def apply(self, operations: Sequence[Operation]) -> int:
        """Does all operations under one revision, which it returns."""
        revision = self._revision + 1
        for operation in operations:
            key = encode_key(operation.key)
            if isinstance(operation, Put):
                self.connection.execute(
                    "INSERT OR REPLACE INTO entries (key, value, revision, lease) "
                    "VALUES (?, ?, ?, ?)",
                    (key, operation.value, revision, self._lease_id(operation.lease)),
                )
            else:
                cursor = self.connection.execute("DELETE FROM entries WHERE key = ?", (key,))
                if cursor.rowcount == 0:
                    continue
            self._record(revision, [key])
        return self._revision

    def remove(self, where: str, values: Sequence[object]) -> int:
        """Removes keys under one revision; how many there were."""
        # Selected, then deleted: RETURNING is younger than some SQLite that Python comes with.
        found = self.connection.execute(f"SELECT key FROM entries WHERE {where}", values)  # noqa: S608
        keys: list[bytes] = [key for (key,) in found.fetchall()]
        self.connection.execute(f"DELETE FROM entries WHERE {where}", values)  # noqa: S608
        if keys:
            self._record(self._revision + 1, keys)
        return len(keys)

    def end_leases(self, where: str, values: Sequence[object]) -> None:
        """Ends leases and removes their keys."""
        found = self.connection.execute(f"SELECT id FROM leases WHERE {where}", values)  # noqa: S608
        ended: list[int] = [lease_id for (lease_id,) in found.fetchall()]
        if ended:
            self.connection.execute(f"DELETE FROM leases WHERE {where}", values)  # noqa: S608
        for lease_id in ended:
            self._leases.discard(lease_id)
            self.remove("lease = ?", [lease_id])

    def finish(self) -> None:
        """Stores the revision and the list of changed keys."""
        if self._revision == self._first_revision:
            return
        self.connection.execute(
            "UPDATE state SET value = ? WHERE name = 'revision'", (self._revision,)
        )
        self.connection.executemany(
            "INSERT INTO changes (revision, key) VALUES (?, ?)", self._changed
        )
        if self._revision // _CHANGES_REMOVED > self._first_revision // _CHANGES_REMOVED:
            self.connection.execute(
                "DELETE FROM changes WHERE revision <= ?", (self._revision - CHANGES_KEPT,)
            )

    def _record(self, revision: int, keys: Sequence[bytes]) -> None:
        self._revision = revision
        self._changed += [(revision, key) for key in keys]

    def _lease_id(self, lease: Lease | None) -> int | None:
        if lease is None:
            return None
        lease_id = number_of(lease, self._store)
        if lease_id in self._leases:
            return lease_id
        # Those that have ended by now were removed when the transaction began.
        if not self.connection.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone():
            raise NotFoundError(f"the lease {lease_id} has ended")
        self._leases.add(lease_id)
        return lease_id


def last_revision(connection: sqlite3.Connection) -> int:
    """The revision of the last change."""
    row = connection.execute("SELECT value FROM state WHERE name = 'revision'").fetchone()
    return int(row[0])
