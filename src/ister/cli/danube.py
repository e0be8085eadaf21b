"""`ister danube import FILE`, `ister danube export`: metadata from Danube, and back.

Owns: arguments, output, exit codes. Does not own: the shapes of Danube's metadata
(`ister.subscription.danube_metadata`), objects (`ister recover`).

Other processes cannot open the log during an import; an export, and a dry run, take no lock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Final

from ister.base.clock import SystemClock
from ister.base.model import JsonObject, TopicName
from ister.cli.command import Arg, Group, Shown, Table, command
from ister.cli.errors_out import error_as_json, print_json
from ister.cli.location import Place, parse_topic, require_bucket, wal_root
from ister.cli.stored_topics import describe_topic
from ister.errors import ConflictError, IsterError, NotFoundError
from ister.rescue.recover import lock_log
from ister.subscription.danube_metadata import Migration, find_subscriptions, parse_metadata
from ister.topic.stores import open_metadata

DANUBE: Final = Group(
    "danube",
    "exchange metadata with Danube",
    examples=(
        "ister danube import metadata.json --data ./ister-data",
        "ister danube export --data ./ister-data",
    ),
    metavar="WHAT",
)
register = DANUBE.register


@command(DANUBE, "import", failed={})
def import_metadata(
    place: Place,
    file: Annotated[str, Arg("JSON file, or - for standard input", "FILE")],
    *,
    without_cursor: Annotated[
        str | None,
        Arg(
            "where subscriptions begin that have acknowledged nothing (default: an error)",
            choices=("earliest", "latest"),
        ),
    ] = None,
    dry_run: Annotated[bool, Arg("report what would be done, without writing")] = False,
) -> Shown:
    """Create subscriptions at the cursors that Danube has stored.

    Creates the subscriptions in a file of Danube's metadata: a JSON object with its keys and
    values, or the output of `etcdctl get --prefix /topics -w json`. Each begins behind its last
    acknowledged offset. Their topics have to exist: run `ister recover` first. Existing
    subscriptions are left unchanged.

    Examples:
        ister danube import metadata.json --data ./ister-data --dry-run
        ister danube import metadata.json --config ister.yml --without-cursor earliest
    """
    data = sys.stdin.buffer.read() if file == "-" else _read(file)
    rows: list[tuple[str, str, str, int | None]] = []
    errors: list[IsterError] = []
    found = find_subscriptions(parse_metadata(data))
    with _opened(place, read_only=dry_run) as migration:
        for one in found:
            cursor: int | None = None
            try:
                cursor = migration.import_subscription(
                    one, without_cursor=without_cursor, dry_run=dry_run
                )
            except IsterError as error:
                errors.append(error)
            rows.append((str(one.topic), one.name, one.kind, cursor))
    titles = ("topic", "subscription", "type", "cursor")
    json = {
        "ok": not errors,
        "dry_run": dry_run,
        "subscriptions": [dict(zip(titles, row, strict=True)) for row in rows],
        "errors": [error_as_json(error) for error in errors],
    }
    table = Table(titles, rows, empty="no subscriptions in this file")
    return Shown(json, table, not errors, errors=errors)


@command(DANUBE, "export", failed={})
def export_metadata(
    place: Place,
    topics: Annotated[
        list[TopicName],
        Arg("topic name, such as /default/orders (default: all topics)", "TOPIC", parse_topic),
    ],
) -> Shown:
    """Print the metadata that Danube 0.9 and later needs of topics.

    Prints a JSON object with the keys and values that Danube 0.9 and later has of topics: segments,
    delivery, subscriptions and cursors. All objects of the topics have to be in the layout
    `segments`, and every message has to be uploaded.

    Examples:
        ister danube export /default/orders --data ./ister-data
    """
    keys: JsonObject = {}
    with _opened(place, read_only=True) as migration:
        for topic in topics or migration.topics():
            _require_uploaded(place, topic)
            keys |= migration.export_topic(topic)
    return Shown(keys, lambda: print_json(keys))


@contextmanager
def _opened(place: Place, *, read_only: bool) -> Iterator[Migration]:
    storage, clock = place.load().storage, SystemClock()
    require_bucket(storage)
    with ExitStack() as stack:
        root = wal_root(storage)
        if root is not None and not read_only:
            stack.enter_context(lock_log(root))
        store = stack.enter_context(
            closing(open_metadata(storage.metadata, clock, read_only=read_only))
        )
        yield Migration(store, root_prefix=storage.metadata.root_prefix, clock=clock)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror}", path=path) from error


def _require_uploaded(place: Place, topic: TopicName) -> None:
    """Refuses a topic with messages that are in local files alone.

    Raises:
        ConflictError: There are some.
    """
    storage = place.load().storage
    marks = describe_topic(storage, wal_root(storage), topic).watermarks
    if marks.next > marks.tiered:
        raise ConflictError(
            f"{marks.next - marks.tiered} messages are not in the bucket",
            topic=str(topic),
            offset=marks.tiered,
            hint="wait for the upload, or open the topic and call `upload()`",
        )
