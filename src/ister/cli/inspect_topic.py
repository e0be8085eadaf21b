"""`ister inspect topic NAME`: one topic in all tiers, in words or as JSON.

Owns: arguments, output, exit code. Does not own: finding it out (`stored_topics`).

Exit code 1 means that there is no such topic, or that something about it could not be found out:
the metadata is missing or damaged. What is known is shown all the same.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Final

from ister.cli.errors_out import answer, print_errors, print_json
from ister.cli.location import add_place_arguments, load_place, parse_topic, wal_root
from ister.cli.output import Subparsers, add_command, print_table
from ister.cli.stored_topics import describe_topic, to_json
from ister.topic.describe import count_messages
from ister.topic.offline import OfflineTopic

_INDEX_FIELDS: Final = ("offset_index", "publish_time_index")


def register(kinds: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        kinds,
        "topic",
        help="show watermarks, files, objects, owner and subscriptions of a topic",
        description="Shows a topic without changing or locking anything, even while another "
        "process has the log open; messages that it has not written yet are not shown.",
        examples=(
            "ister inspect topic /default/orders",
            "ister inspect topic /default/orders --config ister.yml --json --index",
        ),
    )
    parser.add_argument(
        "topic", metavar="NAME", type=parse_topic, help="topic name, such as /default/orders"
    )
    parser.add_argument(
        "--index", action="store_true", help="with --json: include the indexes of objects"
    )
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return answer(options, lambda: _inspect(options), {"topic": str(options.topic)})


def _inspect(options: argparse.Namespace) -> int:
    storage = load_place(options).storage
    facts = describe_topic(storage, wal_root(storage), options.topic)
    if options.json:
        print_json(to_json(facts, with_index=options.index))
    else:
        _print_topic(facts)
    print_errors(facts.errors)
    return 1 if facts.errors else 0


# -- for people -----------------------------------------------------------------------------


def _print_topic(facts: OfflineTopic) -> None:
    record = facts.record
    print(facts.topic)
    about = f"ack {facts.ack or '-'}, codec {facts.codec or '-'}"
    if record is not None:
        about += f", epoch {record.epoch}, incarnation {record.incarnation}"
        if not record.is_open:
            about += f", {record.state}"
    print(about)
    if facts.owner is not None:
        print(f"owner: node {facts.owner.node}, epoch {facts.owner.epoch}")
    elif record is not None:
        print("owner: none (no process has the topic open)")
    if facts.sealed is not None:
        print(f"sealed by node {facts.sealed.node} at offset {facts.sealed.next_offset}")
    marks = asdict(facts.watermarks)
    print(" ≤ ".join(f"{name} {value}" for name, value in marks.items()))
    print()
    print_table(("tier", "start", "next", "pieces", "bytes"), _tiers(facts))
    if facts.local is not None and not facts.local.is_current:
        print("the local files are outdated: another node has written the topic since")
    if facts.objects:
        print()
        shown = facts.objects[-_OBJECTS_SHOWN:]
        print_table(
            ("object", "first offset", "next offset", "messages", "bytes", "kept"),
            [
                (
                    item.object_id,
                    item.start,
                    item.end,
                    count_messages(item),
                    item.size_bytes,
                    item.kept or "all",
                )
                for item in shown
            ],
        )
        if len(shown) < len(facts.objects):
            print(f"and {len(facts.objects) - len(shown)} older ones; --json has all of them")
    if facts.subscriptions:
        print()
        rows = [
            (item.name, item.progress.offset, max(0, marks["next"] - item.progress.offset))
            for item in facts.subscriptions
        ]
        print_table(("subscription", "cursor", "lag"), rows)


_OBJECTS_SHOWN = 20


def _tiers(facts: OfflineTopic) -> list[tuple[object, ...]]:
    """A line for the bucket and one for the local files."""
    objects = facts.objects
    files = facts.local.files if facts.local is not None else []
    return [
        (
            "bucket",
            objects[0].start if objects else None,
            objects[-1].end if objects else None,
            f"{len(objects)} objects",
            sum(described.size_bytes for described in objects),
        ),
        (
            "local",
            files[0].first_offset if files else None,
            files[-1].next_offset if files else None,
            f"{len(files)} files",
            sum(file.bytes for file in files),
        ),
    ]
