"""`ister recover [TOPIC …]`: rebuilds all metadata from the bucket alone.

Owns: arguments, output, exit code. Does not own: the work (`ister.rescue.recover`). Other
processes cannot open the log meanwhile; a dry run takes no lock and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Annotated

from ister.base.clock import SystemClock
from ister.base.model import JsonObject, TopicName
from ister.cli.command import Arg, Shown, command, register_command
from ister.cli.errors_out import error_as_json
from ister.cli.location import Place, open_bucket, parse_topic, require_bucket, wal_root
from ister.cli.output import print_table, progress
from ister.config import MetadataBackend
from ister.errors import InvalidRequestError, IsterError
from ister.rescue.rebuild import TopicReport
from ister.rescue.recover import MetadataFound, Recovery, lock_log
from ister.topic.describe import count_messages


@command(
    None,
    "recover",
    failed={"ok": False, "job": "recover", "metadata": None, "topics": []},
    echo=["dry_run"],
)
def recover(
    place: Place,
    topics: Annotated[
        list[TopicName],
        Arg(
            "topic name, such as /default/orders (default: all topics in the bucket)",
            "TOPIC",
            parse_topic,
        ),
    ],
    *,
    dry_run: Annotated[bool, Arg("report what would be done, without writing")] = False,
) -> Shown:
    """Rebuild lost metadata from the bucket.

    Rebuilds the metadata of topics from the objects in the bucket: after the metadata store was
    lost, or for a bucket of Danube, or copied from elsewhere. Reads and checks every object. Topics
    known to the metadata store are left unchanged. A damaged SQLite file is renamed to a name with
    `.damaged-`. The positions of subscriptions are not in the bucket and are lost. Exit code 1 if
    something is damaged or missing, or if an object that Danube wrote was not taken.

    Examples:
        ister recover --data ./ister-data --dry-run
        ister recover /default/orders --config ister.yml --json
    """
    storage = place.load().storage
    require_bucket(storage)
    if storage.metadata.backend is MetadataBackend.MEMORY:
        raise InvalidRequestError(
            "storage.metadata.backend is 'memory', so there is nothing to recover into"
        )
    rows: list[TopicReport] = []
    clock = SystemClock()
    with ExitStack() as stack:
        root = wal_root(storage)
        if root is not None and not dry_run:
            stack.enter_context(lock_log(root))
        store = stack.enter_context(closing(open_bucket(storage, clock)))
        recovery = Recovery(storage, store, clock=clock, dry_run=dry_run)
        stack.callback(recovery.close)
        counts = recovery.topics(topics)
        bar = stack.enter_context(progress("recover", sum(counts.values()), unit="objects"))
        for name in counts:
            bar.describe(f"recover {name}")
            rows.append(recovery.recover(name, on_object=bar.advance))
    found = recovery.metadata_found
    errors = [*recovery.errors, *(error for row in rows for error in row.errors)]
    return Shown(
        _as_json(rows, errors, found, dry_run=dry_run),
        lambda: _print_rows(rows, found, store.location),
        not errors,
        errors=errors,
    )


register = register_command(recover)


# -- output ---------------------------------------------------------------------------------


def _as_json(
    rows: Sequence[TopicReport],
    errors: Sequence[IsterError],
    found: MetadataFound,
    *,
    dry_run: bool,
) -> JsonObject:
    return {
        "ok": not errors,
        "job": "recover",
        "dry_run": dry_run,
        "metadata": asdict(found),
        "topics": [
            {
                "topic": row.topic,
                "status": row.status,
                **_count(row),
                "left_out": row.left_out,
                "copied": row.copied,
                "gaps": [list(gap) for gap in row.gaps],
            }
            for row in rows
        ],
        "errors": [error_as_json(error) for error in errors],
    }


def _count(row: TopicReport) -> JsonObject:
    start, end = row.bounds
    return {
        "objects": len(row.objects),
        "messages": sum(map(count_messages, row.objects)),
        "bytes": sum(described.size_bytes for described in row.objects),
        "start_offset": start,
        "next_offset": end,
    }


def _print_rows(rows: Sequence[TopicReport], found: MetadataFound, location: str) -> None:
    if found.set_aside is not None:
        print(f"the damaged metadata file was renamed to {found.set_aside}")
    elif found.state != "ok":
        print(f"the metadata file is {found.state}: {found.location}")
    if not rows:
        print(f"no topics in {location}")
        return
    titles = ("topic", "status", "objects", "messages", "bytes", "start", "next")
    print_table(titles, [(row.topic, row.status, *_count(row).values()) for row in rows])
    for row in rows:
        for name in row.left_out:
            print(f"left out of {row.topic}: {name}")
        for name in row.copied:
            print(f"copied for {row.topic}, from a left-out object: {name}")
