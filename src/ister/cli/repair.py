"""`ister repair [TOPIC …]`: restores what one tier has lost from the other one.

Owns: arguments, output, exit code, and the confirmation before messages are given up. Does not own:
the work (`ister.rescue.repair`).

The log is opened, so no other process may have it open. Without names, topics that another node
wrote last are skipped: their local files are not here, and claiming them would take them away.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

from ister.base.model import JsonObject, TopicName
from ister.cli.command import Arg, Shown, UsageError, command, confirmed, register_command
from ister.cli.errors_out import error_as_json
from ister.cli.location import Place, parse_topic, require_bucket, wal_root
from ister.cli.output import print_table, progress
from ister.config import Config, StorageConfig
from ister.errors import DirectoryLockedError, InvalidRequestError, IsterError
from ister.rescue.giving_up import GivenUp
from ister.rescue.repair import (
    LostRange,
    Repaired,
    find_given_up,
    find_lost,
    keep_lease,
    try_repair,
)
from ister.topic.log import Log


@command(None, "repair", failed={"ok": False, "job": "repair", "topics": []})
def repair(
    place: Place,
    topics: Annotated[
        list[TopicName],
        Arg(
            "topic name, such as /default/orders (default: all topics that this node wrote last)",
            "TOPIC",
            parse_topic,
        ),
    ],
    *,
    quick: Annotated[
        bool, Arg("do not read contents: only check that objects exist with the right size")
    ] = False,
    take_over: Annotated[
        bool,
        Arg(
            "take over the named topics from a node whose disk is lost; messages that it had not "
            "uploaded are lost",
            one_of="losing",
        ),
    ] = False,
    give_up: Annotated[
        bool,
        Arg(
            "give up the messages of the named topics that neither tier has: readers pass over "
            "them, and the topics accept messages again",
            one_of="losing",
        ),
    ] = False,
    yes: Annotated[bool, Arg("with --take-over and --give-up: skip the confirmation")] = False,
    dry_run: Annotated[
        bool, Arg("with --give-up: show what would be given up; change nothing")
    ] = False,
) -> Shown:
    """Restore damaged files from the bucket, and objects from files.

    Checks topics in both tiers and repairs them: replaces damaged local files if the bucket has
    their messages, and uploads lost and damaged objects again if local files have theirs. Removes
    nothing: replaced files are kept under a name with `.aside`. What neither tier has can be given
    up with --give-up. The log must not be open: stop the broker first. Exit code 1 if something
    cannot be repaired.

    Examples:
        ister repair --data ./ister-data
        ister repair /default/orders --quick --json
        ister repair /default/orders --take-over --yes
        ister repair /default/orders --give-up --dry-run
    """
    if (take_over or give_up) and not topics:
        # Not for all topics: those of a node that is only restarting would lose messages.
        raise UsageError(f"{'--take-over' if take_over else '--give-up'} needs topic names")
    if dry_run and not give_up:
        raise UsageError("--dry-run needs --give-up")
    config = place.load()
    if not give_up:
        _require_bucket(config.storage)
    wal_root(config.storage)
    rows: list[Repaired] = []
    names: Sequence[TopicName] = sorted(set(topics), key=str)
    # Without the log's own threads: they would also upload, trim local files and remove orphans,
    # and a repair removes nothing that it may need. Only the lease is renewed meanwhile.
    with _open(config) as log, keep_lease(log), ExitStack() as stack:
        names = names or [TopicName.parse(name) for name in log.topics()]
        lost: dict[str, LostRange | GivenUp] = {}
        if take_over:
            lost |= {str(name): one for name in names if (one := find_lost(log, name)) is not None}
        elif give_up:
            lost |= {str(name): find_given_up(log, name) for name in names}
        _confirm(lost, names, take_over=take_over, is_confirmed=yes or dry_run)
        bar = stack.enter_context(progress("repair", len(names), unit="topics"))
        for name in names:
            bar.describe(f"repair {name}")
            rows.append(
                try_repair(
                    log,
                    name,
                    take_over=take_over,
                    content=not quick,
                    is_named=bool(topics),
                    gives_up=give_up,
                )
                if not dry_run
                else _planned(str(name), lost)
            )
            bar.advance()
    errors = [error for row in rows for error in row.errors]
    found = _as_json(rows, errors, lost, dry_run=dry_run)
    return Shown(found, lambda: _print_rows(rows), not errors, errors=errors)


register = register_command(repair)


def _open(config: Config) -> Log:
    try:
        return Log(config, background=False)
    except DirectoryLockedError as error:
        error.hint = "stop the broker or program that has it open, and start it again afterwards"
        raise


def _require_bucket(storage: StorageConfig) -> None:
    try:
        require_bucket(storage)
    except InvalidRequestError as error:
        error.hint = "--give-up works without one; it gives up what the local files have lost"
        raise


def _confirm(
    lost: Mapping[str, LostRange | GivenUp],
    names: Sequence[TopicName],
    *,
    take_over: bool,
    is_confirmed: bool,
) -> None:
    """Lists what is lost, and asks.

    Raises:
        InvalidRequestError: There is no terminal to ask on, and --yes was not given.
        DeclinedError: The user declined.
    """
    listed = [f"{name} loses {one}" for name, one in lost.items() if str(one)]
    if is_confirmed or not listed:
        for line in listed:
            print(f"ister: {line}", file=sys.stderr)
        return
    option = "--take-over" if take_over else "--give-up"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidRequestError(
            f"{option} is not confirmed: {', '.join(listed)}", hint="pass --yes"
        )
    for line in listed:
        print(line, file=sys.stderr)
    what = f"Take {', '.join(map(str, names))} over, and lose" if take_over else "Give up"
    confirmed(f"{what} these messages?", yes=False)


def _planned(name: str, lost: Mapping[str, LostRange | GivenUp]) -> Repaired:
    return Repaired(topic=name, status="damaged" if str(lost[name]) else "whole")


def _as_json(
    rows: Sequence[Repaired],
    errors: Sequence[IsterError],
    lost: Mapping[str, LostRange | GivenUp],
    *,
    dry_run: bool,
) -> JsonObject:
    return {
        "ok": not errors,
        "job": "repair",
        **({"dry_run": True} if dry_run else {}),
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


def _print_rows(rows: Sequence[Repaired]) -> None:
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
