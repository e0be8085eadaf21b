"""`ister metadata check` and `accept`: a metadata store that was rolled back to an older state.

Does not own: the work (`ister.topic.metadata_trust`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Annotated

from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.cli.command import Arg, Group, Shown, Yes, command, confirmed
from ister.cli.errors_out import error_as_json
from ister.cli.location import Place, open_bucket, parse_topic, require_bucket, wal_root
from ister.cli.output import print_table
from ister.config import MetadataBackend
from ister.errors import InvalidRequestError
from ister.topic.metadata_trust import (
    INCOMPLETE,
    MISSING,
    OK,
    OLDER,
    UNKNOWN,
    MetadataTrust,
    TopicTrust,
)
from ister.topic.stores import open_identity, open_metadata

METADATA = Group(
    "metadata",
    "compare the metadata store with the bucket and the local files",
    description="For use after etcd or SQLite was restored from a backup: finds topics whose "
    "metadata is older than the bucket or this node's files, and brings it up to date.",
    examples=(
        "ister metadata check --config ister.yml",
        "ister metadata accept --config ister.yml --yes",
    ),
    metavar="COMMAND",
)
register = METADATA.register

Topics = Annotated[
    list[TopicName],
    Arg("topic name, such as /default/orders (default: all topics)", "TOPIC", parse_topic),
]


@command(METADATA, "check", failed={"ok": False, "job": "metadata check", "topics": []})
def check(place: Place, topics: Topics) -> Shown:
    """Show topics whose metadata is older than the bucket or the local files.

    Lists the topics, with the epoch and the end offset that each store has. Changes nothing. Exit
    code 1 if the metadata store is older, or if objects are missing.

    Examples:
        ister metadata check --config ister.yml
    """
    with _opened(place) as trust:
        rows = [trust.check(name) for name in _names(trust, topics)]
        return _shown("metadata check", rows, trust.reason, _older(rows))


@command(METADATA, "accept", failed={"ok": False, "job": "metadata accept", "topics": []})
def accept(place: Place, topics: Topics, *, yes: Yes = False) -> Shown:
    """Continue from what the bucket and the local files have.

    Brings older metadata up to date with the newest owner that the bucket or this node's files
    name, and trusts the metadata store again. Deletes no messages. Run it on each node whose files
    are newer than the bucket.

    Examples:
        ister metadata accept --config ister.yml --yes
    """
    with _opened(place) as trust:
        names, reason = _names(trust, topics), trust.reason
        older = _older([trust.check(name) for name in names])
        if older or reason:
            _confirm(older, reason, yes=yes)
        rows = [trust.accept(name) for name in names]
        # If topics were named, others may still be older.
        if not topics:
            trust.finish()
            reason = None
        return _shown("metadata accept", rows, reason, [])


def _names(trust: MetadataTrust, topics: Sequence[TopicName]) -> list[TopicName]:
    return sorted(set(topics), key=str) or trust.topics()


def _older(rows: Sequence[TopicTrust]) -> list[TopicTrust]:
    return [row for row in rows if row.status not in (OK, MISSING)]


def _shown(
    job: str, rows: Sequence[TopicTrust], reason: str | None, older: Sequence[TopicTrust]
) -> Shown:
    errors = [error for row in rows for error in row.errors]
    is_ok = not (errors or older or reason)
    json = {
        "ok": is_ok,
        "job": job,
        "distrusted": reason,
        "topics": [
            {name: value for name, value in asdict(row).items() if name != "errors"} for row in rows
        ],
        "errors": [error_as_json(error) for error in errors],
    }
    return Shown(json, lambda: _print_rows(rows, reason), is_ok, errors=errors)


@contextmanager
def _opened(place: Place) -> Iterator[MetadataTrust]:
    storage, clock = place.load().storage, SystemClock()
    if storage.metadata.backend is MetadataBackend.MEMORY:
        raise InvalidRequestError("storage.metadata.backend is 'memory': no metadata is stored")
    require_bucket(storage)
    with open_identity(storage, clock) as identity:
        identity.verify()
    with (
        closing(open_bucket(storage, clock)) as objects,
        closing(open_metadata(storage.metadata, clock)) as metadata,
    ):
        yield MetadataTrust(
            objects, metadata, storage.metadata.root_prefix, wal_root=wal_root(storage), clock=clock
        )


def _confirm(older: Sequence[TopicTrust], reason: str | None, *, yes: bool) -> None:
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        names = ", ".join(row.topic for row in older)
        raise InvalidRequestError(f"not confirmed: {names or reason}", hint="pass --yes")
    for row in older if not yes else ():
        print(_describe(row), file=sys.stderr)
    confirmed("Continue from what the bucket and the local files have?", yes=yes)


def _describe(row: TopicTrust) -> str:
    newest = max(row.bucket_epoch, row.local_epoch)
    local = "" if row.local_end is None else f", the local files at {row.local_end}"
    return (
        f"{row.topic}: the metadata store has epoch {row.epoch}, the other stores {newest}; its "
        f"catalog ends at offset {row.catalog_end}, the bucket's objects at {row.bucket_end}{local}"
    )


def _print_rows(rows: Sequence[TopicTrust], reason: str | None) -> None:
    if not rows:
        print("no topics")
        return
    print_table(
        (
            "topic",
            "status",
            "epoch",
            "bucket epoch",
            "local epoch",
            "catalog end",
            "bucket end",
            "local end",
        ),
        [
            (
                row.topic,
                row.status,
                row.epoch,
                row.bucket_epoch,
                row.local_epoch,
                row.catalog_end,
                row.bucket_end,
                "-" if row.local_end is None else row.local_end,
            )
            for row in rows
        ],
    )
    if reason is not None:
        print(reason)
    if any(row.status == UNKNOWN for row in rows):
        print("unknown: not in the metadata store")
    if reason is not None or any(row.status in (OLDER, INCOMPLETE, UNKNOWN) for row in rows):
        print("`ister metadata accept` continues from what the bucket and the local files have")
    elif all(row.status == OK for row in rows):
        print("the metadata store is up to date")
