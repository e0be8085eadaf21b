"""`ister repair [TOPIC …]`: restores what one tier has lost from the other one.

Owns: arguments, output, exit code, and the question before a take-over. Does not own: the work
(`ister.topic.offline_repair`).

The log is opened, so no other process may have it open. Without names, topics that another node
wrote last are skipped: their local files are not here, and claiming them would take them away.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from ister.cli.errors_out import answer, error_as_json, print_errors, print_json
from ister.cli.location import (
    add_place_arguments,
    load_place,
    parse_topic,
    require_bucket,
    wal_root,
)
from ister.cli.output import Subparsers, add_command, confirm, print_table, progress
from ister.errors import InvalidRequestError, IsterError
from ister.model import JsonObject, TopicName
from ister.topic.log import Log
from ister.topic.offline_repair import LostRange, TopicRepair, find_lost, keep_lease, try_repair


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "repair",
        help="restore damaged files from the bucket, and objects from files",
        description="Checks topics in both tiers and repairs them: replaces damaged local "
        "files if the bucket has their messages, and uploads lost and damaged objects again "
        "if local files have theirs. Removes nothing: replaced files are kept under a name "
        "with `.aside`. Exit code 1 if something cannot be repaired.",
        examples=(
            "ister repair --data ./ister-data",
            "ister repair /default/orders --quick --json",
            "ister repair /default/orders --take-over --yes",
        ),
    )
    parser.add_argument(
        "topics",
        metavar="TOPIC",
        nargs="*",
        type=parse_topic,
        help="topic name, such as /default/orders (default: all topics that this node wrote last)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="do not read contents: only check that objects exist with the right size",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over the named topics from a node whose disk is lost; messages that it "
        "had not uploaded are lost",
    )
    parser.add_argument(
        "--yes", action="store_true", help="with --take-over: skip the confirmation"
    )
    add_place_arguments(parser)

    def run(options: argparse.Namespace) -> int:
        if options.take_over and not options.topics:
            # Of all topics, those of a node that is only being restarted would lose messages.
            parser.error("--take-over needs topic names")
        return _run(options)

    parser.set_defaults(run=run)


def _run(options: argparse.Namespace) -> int:
    return answer(options, lambda: _repair(options), {"ok": False, "job": "repair", "topics": []})


def _repair(options: argparse.Namespace) -> int:
    config = load_place(options)
    require_bucket(config.storage)
    wal_root(config.storage)
    rows: list[TopicRepair] = []
    names: Sequence[TopicName] = sorted(set(options.topics), key=str)
    is_named = bool(names)
    # Without the log's own threads: they would also upload, trim local files and remove orphans,
    # and a repair removes nothing that it may need. Only the lease is renewed meanwhile.
    with Log(config, background=False) as log, keep_lease(log), ExitStack() as stack:
        names = names or [TopicName.parse(name) for name in log.topics()]
        lost = _confirm_take_over(log, names, options) if options.take_over else {}
        if lost is None:
            return 1
        bar = stack.enter_context(progress("repair", len(names), unit="topics"))
        for name in names:
            bar.describe(f"repair {name}")
            rows.append(
                try_repair(
                    log,
                    name,
                    take_over=options.take_over,
                    content=not options.quick,
                    is_named=is_named,
                )
            )
            bar.advance()
    errors = [error for row in rows for error in row.errors]
    if options.json:
        print_json(_as_json(rows, errors, lost))
    else:
        _print_rows(rows)
    print_errors(errors)
    return 1 if errors else 0


def _confirm_take_over(
    log: Log, names: Sequence[TopicName], options: argparse.Namespace
) -> dict[str, LostRange] | None:
    """Lists what taking topics over loses, and asks; None if the answer is no.

    Raises:
        InvalidRequestError: There is no terminal to ask on, and --yes was not given.
    """
    found = {str(name): lost for name in names if (lost := find_lost(log, name)) is not None}
    listed = [f"{name} loses {lost}" for name, lost in found.items()]
    if options.yes or not found:
        for line in listed:
            print(f"ister: {line}", file=sys.stderr)
        return found
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidRequestError(
            f"--take-over is not confirmed: {', '.join(listed)}", hint="pass --yes"
        )
    for line in listed:
        print(line, file=sys.stderr)
    question = f"Take {', '.join(map(str, names))} over, and lose these messages?"
    return found if confirm(question, is_confirmed=False) else None


def _as_json(
    rows: Sequence[TopicRepair], errors: Sequence[IsterError], lost: Mapping[str, LostRange]
) -> JsonObject:
    return {
        "ok": not errors,
        "job": "repair",
        "topics": [
            {
                "topic": row.topic,
                "status": row.status,
                "local_frames": row.local_frames,
                "objects": row.objects,
                "gives_up": asdict(lost[row.topic]) if row.topic in lost else None,
            }
            for row in rows
        ],
        "errors": [error_as_json(error) for error in errors],
    }


def _print_rows(rows: Sequence[TopicRepair]) -> None:
    if not rows:
        print("no topics")
        return
    print_table(
        ("topic", "status", "local frames rewritten", "objects uploaded again"),
        [(row.topic, row.status, row.local_frames, len(row.objects)) for row in rows],
    )
    if any(row.status == "skipped" for row in rows):
        print("skipped: last written by another node; name the topic to repair it here")
    for row in rows:
        for name in row.objects:
            print(f"uploaded again: {row.topic} {name}")
