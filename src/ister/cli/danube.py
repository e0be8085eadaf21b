"""`ister danube import FILE`, `ister danube export`: metadata from Danube, and back.

Owns: arguments, output, exit codes. Does not own: the shapes of Danube's metadata
(`ister.subscription.danube_metadata`), objects (`ister recover`).

Other processes cannot open the log during an import; an export, and a dry run, take no lock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from ister.base.clock import SystemClock
from ister.base.model import JsonObject, TopicName
from ister.cli.errors_out import answer, error_as_json, print_errors, print_json
from ister.cli.location import (
    add_place_arguments,
    load_place,
    parse_topic,
    require_bucket,
    wal_root,
)
from ister.cli.output import Subparsers, add_command, print_table
from ister.cli.stored_topics import describe_topic
from ister.errors import ConflictError, IsterError, NotFoundError
from ister.rescue.recover import lock_log
from ister.subscription.danube_metadata import Migration, find_subscriptions, parse_metadata
from ister.topic.stores import open_metadata


def register(commands: Subparsers) -> None:
    """Adds the command and its parts to the parser."""
    parser = add_command(
        commands,
        "danube",
        help="exchange metadata with Danube",
        examples=(
            "ister danube import metadata.json --data ./ister-data",
            "ister danube export --data ./ister-data",
        ),
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    importing = add_command(
        kinds,
        "import",
        help="create subscriptions at the cursors that Danube has stored",
        description="Creates the subscriptions in a file of Danube's metadata: a JSON object with "
        "its keys and values, or the output of `etcdctl get --prefix /topics -w json`. Each begins "
        "behind its last acknowledged offset. Their topics have to exist: run `ister recover` "
        "first. Existing subscriptions are left unchanged.",
        examples=(
            "ister danube import metadata.json --data ./ister-data --dry-run",
            "ister danube import metadata.json --config ister.yml --without-cursor earliest",
        ),
    )
    importing.add_argument("file", metavar="FILE", help="JSON file, or - for standard input")
    importing.add_argument(
        "--without-cursor",
        choices=("earliest", "latest"),
        help="where subscriptions begin that have acknowledged nothing (default: an error)",
    )
    importing.add_argument(
        "--dry-run", action="store_true", help="report what would be done, without writing"
    )
    add_place_arguments(importing)
    importing.set_defaults(run=lambda options: answer(options, lambda: _import(options)))
    exporting = add_command(
        kinds,
        "export",
        help="print the metadata that Danube 0.9 and later needs of topics",
        description="Prints a JSON object with the keys and values that Danube 0.9 and later has "
        "of topics: segments, delivery, subscriptions and cursors. All objects of the topics have "
        "to be in the layout `segments`, and every message has to be uploaded.",
        examples=("ister danube export /default/orders --data ./ister-data",),
    )
    exporting.add_argument(
        "topics",
        metavar="TOPIC",
        nargs="*",
        type=parse_topic,
        help="topic name, such as /default/orders (default: all topics)",
    )
    add_place_arguments(exporting)
    exporting.set_defaults(run=lambda options: answer(options, lambda: _export(options)))


@contextmanager
def _opened(options: argparse.Namespace, *, read_only: bool) -> Iterator[Migration]:
    storage, clock = load_place(options).storage, SystemClock()
    require_bucket(storage)
    with ExitStack() as stack:
        root = wal_root(storage)
        if root is not None and not read_only:
            stack.enter_context(lock_log(root))
        store = stack.enter_context(
            closing(open_metadata(storage.metadata, clock, read_only=read_only))
        )
        yield Migration(store, root_prefix=storage.metadata.root_prefix, clock=clock)


def _import(options: argparse.Namespace) -> int:
    data = sys.stdin.buffer.read() if options.file == "-" else _read(options.file)
    found = find_subscriptions(parse_metadata(data))
    rows: list[tuple[str, str, str, int | None]] = []
    errors: list[IsterError] = []
    with _opened(options, read_only=options.dry_run) as migration:
        for one in found:
            cursor: int | None = None
            try:
                cursor = migration.import_subscription(
                    one, without_cursor=options.without_cursor, dry_run=options.dry_run
                )
            except IsterError as error:
                errors.append(error)
            rows.append((str(one.topic), one.name, one.kind, cursor))
    titles = ("topic", "subscription", "type", "cursor")
    if options.json:
        print_json(
            {
                "ok": not errors,
                "dry_run": options.dry_run,
                "subscriptions": [dict(zip(titles, row, strict=True)) for row in rows],
                "errors": [error_as_json(error) for error in errors],
            }
        )
    elif rows:
        print_table(titles, rows)
    else:
        print("no subscriptions in this file")
    print_errors(errors)
    return 1 if errors else 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror}", path=path) from error


def _export(options: argparse.Namespace) -> int:
    keys: JsonObject = {}
    with _opened(options, read_only=True) as migration:
        for topic in options.topics or migration.topics():
            _require_uploaded(options, topic)
            keys |= migration.export_topic(topic)
    print_json(keys)
    return 0


def _require_uploaded(options: argparse.Namespace, topic: TopicName) -> None:
    """Refuses a topic with messages that are in local files alone.

    Raises:
        ConflictError: There are some.
    """
    storage = load_place(options).storage
    marks = describe_topic(storage, wal_root(storage), topic).watermarks
    if marks.next > marks.tiered:
        raise ConflictError(
            f"{marks.next - marks.tiered} messages are not in the bucket",
            topic=str(topic),
            offset=marks.tiered,
            hint="wait for the upload, or open the topic and call `upload()`",
        )
