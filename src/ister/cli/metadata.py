"""`ister metadata check` and `accept`: a metadata store that was rolled back to an older state.

Owns: arguments, output, exit code. Does not own: the work (`ister.topic.metadata_trust`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict

from ister.base.clock import SystemClock
from ister.base.model import JsonObject
from ister.cli.errors_out import answer, error_as_json, print_errors, print_json
from ister.cli.location import (
    add_place_arguments,
    load_place,
    open_bucket,
    parse_topic,
    require_bucket,
    wal_root,
)
from ister.cli.output import Subparsers, add_command, confirm, print_table
from ister.config import MetadataBackend
from ister.errors import InvalidRequestError, IsterError
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


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "metadata",
        help="compare the metadata store with the bucket and the local files",
        description="For use after etcd or SQLite was restored from a backup: finds topics whose "
        "metadata is older than the bucket or this node's files, and brings it up to date.",
        examples=(
            "ister metadata check --config ister.yml",
            "ister metadata accept --config ister.yml --yes",
        ),
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = add_command(
        actions,
        "check",
        help="show topics whose metadata is older than the bucket or the local files",
        description="Lists the topics, with the epoch and the end offset that each store has. "
        "Changes nothing. Exit code 1 if the metadata store is older, or if objects are missing.",
        examples=("ister metadata check --config ister.yml",),
    )
    accept = add_command(
        actions,
        "accept",
        help="continue from what the bucket and the local files have",
        description="Brings older metadata up to date with the newest owner that the bucket or "
        "this node's files name, and trusts the metadata store again. Deletes no messages. "
        "Run it on each node whose files are newer than the bucket.",
        examples=("ister metadata accept --config ister.yml --yes",),
    )
    for one in (check, accept):
        one.add_argument(
            "topics",
            metavar="TOPIC",
            nargs="*",
            type=parse_topic,
            help="topic name, such as /default/orders (default: all topics)",
        )
        add_place_arguments(one)
    accept.add_argument("--yes", action="store_true", help="skip the confirmation")
    check.set_defaults(run=_run, accepts=False)
    accept.set_defaults(run=_run, accepts=True)


def _run(options: argparse.Namespace) -> int:
    empty: JsonObject = {"ok": False, "job": _job(options), "topics": []}
    return answer(options, lambda: _compare(options), empty)


def _job(options: argparse.Namespace) -> str:
    return "metadata accept" if options.accepts else "metadata check"


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[MetadataTrust]:
    storage, clock = load_place(options).storage, SystemClock()
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
            objects,
            metadata,
            storage.metadata.root_prefix,
            wal_root=wal_root(storage),
            clock=clock,
        )


def _compare(options: argparse.Namespace) -> int:
    with _opened(options) as trust:
        names = sorted(set(options.topics), key=str) or trust.topics()
        rows = [trust.check(name) for name in names]
        reason = trust.reason
        older = [row for row in rows if row.status not in (OK, MISSING)]
        errors = [error for row in rows for error in row.errors]
        if options.accepts:
            if not _is_confirmed(older, reason, options):
                return 1
            rows = [trust.accept(name) for name in names]
            # If topics were named, others may still be older.
            if not options.topics:
                trust.finish()
                reason = None
            errors = [error for row in rows for error in row.errors]
            older = []
    is_ok = not (errors or older or reason)
    if options.json:
        print_json(_as_json(rows, errors, reason, options, is_ok=is_ok))
    else:
        _print_rows(rows, reason)
    print_errors(errors)
    return 0 if is_ok else 1


def _is_confirmed(
    older: Sequence[TopicTrust], reason: str | None, options: argparse.Namespace
) -> bool:
    if options.yes or not (older or reason):
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        names = ", ".join(row.topic for row in older)
        raise InvalidRequestError(f"not confirmed: {names or reason}", hint="pass --yes")
    for row in older:
        print(_describe(row), file=sys.stderr)
    return confirm("Continue from what the bucket and the local files have?", is_confirmed=False)


def _describe(row: TopicTrust) -> str:
    newest = max(row.bucket_epoch, row.local_epoch)
    local = "" if row.local_end is None else f", the local files at {row.local_end}"
    return (
        f"{row.topic}: the metadata store has epoch {row.epoch}, the other stores {newest}; its "
        f"catalog ends at offset {row.catalog_end}, the bucket's objects at {row.bucket_end}{local}"
    )


def _as_json(
    rows: Sequence[TopicTrust],
    errors: Sequence[IsterError],
    reason: str | None,
    options: argparse.Namespace,
    *,
    is_ok: bool,
) -> JsonObject:
    return {
        "ok": is_ok,
        "job": _job(options),
        "distrusted": reason,
        "topics": [
            {name: value for name, value in asdict(row).items() if name != "errors"} for row in rows
        ],
        "errors": [error_as_json(error) for error in errors],
    }


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
