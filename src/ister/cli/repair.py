"""`ister repair [TOPIC …]`: restores what one tier has lost from the other one.

Owns: arguments, output, exit code, which topics, and that everything is as before afterwards but
for the damage: a topic that was sealed is sealed again. Does not own: repairing (`Log.repair`).

The log is opened for it, so no other process may have it open. Without names, topics that another
node wrote last are left alone: their local files are not here, and claiming them would take them
away from it.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ister import threads
from ister.cli.look import add_command, confirm, print_table, progress
from ister.cli.place import (
    add_place_arguments,
    load_place,
    parse_topic,
    require_bucket,
    wal_root,
)
from ister.cli.report import answer, error_as_json, print_errors, print_json
from ister.cli.survey import BadRange, FileSurvey, Kind, survey
from ister.errors import CorruptDataError, InvalidRequestError, InvariantError, IsterError
from ister.fs.local import LocalFileSystem
from ister.model import TopicName, TopicState
from ister.tier.catalog import Catalog
from ister.topic.log import Log
from ister.topic.tiers import Tiers
from ister.wal.directory import WalDirectory

if TYPE_CHECKING:
    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "repair",
        help="restore what one tier has lost from the other",
        description="Checks topics in both tiers and repairs them: damaged local files are "
        "replaced where the bucket has their messages, lost and damaged objects are uploaded again "
        "where local files have theirs. Nothing is removed: files that were replaced stay beside "
        "the new ones, with `.aside` in their names. Exit code 1 if something cannot be repaired.",
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
        help="such as /default/orders (default: all that this node wrote last)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="read no object and no local file whole: only look whether each object is there, "
        "with its size",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the named topics from a node whose disk is lost: what that node had not "
        "uploaded is given up",
    )
    parser.add_argument(
        "--yes", action="store_true", help="with --take-over: do not ask; needed in scripts"
    )
    add_place_arguments(parser)

    def run(options: argparse.Namespace) -> int:
        if options.take_over and not options.topics:
            # Of all topics, those of a node that is only being restarted would lose messages.
            parser.error("--take-over needs the names of the topics")
        return _run(options)

    parser.set_defaults(run=run)


def _run(options: argparse.Namespace) -> int:
    def failed(error: IsterError) -> dict[str, Any]:
        return _as_json([], [error])

    return answer(lambda: _repair(options), as_json=options.json, on_error=failed)


@dataclass(slots=True, kw_only=True)
class _Row:
    """What was found of one topic, and what was done."""

    topic: str
    status: str = "failed"
    """`whole`, `repaired`, `damaged`; `failed` if it could not be looked at; `skipped` if it is
    another node's."""
    local_frames: int | None = None
    objects: list[str] = field(default_factory=list)
    errors: list[IsterError] = field(default_factory=list)
    gives_up: _GivenUp | None = None
    """The messages that are given up by taking the topic over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenUp:
    """Offsets that were given out by a node whose disk is lost, and are not in the bucket."""

    start: int
    known_end: int
    """Up to here there were messages: a subscription has acknowledged them. There may be more."""

    def __str__(self) -> str:
        text = f"all offsets from {self.start} on"
        if self.known_end > self.start:
            return f"{text}; of these, {self.start} up to {self.known_end} were consumed"
        return text


def _repair(options: argparse.Namespace) -> int:
    config = load_place(options)
    require_bucket(config.storage)
    wal_root(config.storage)
    rows: list[_Row] = []
    # Without the log's own threads: they would also upload, trim local files and remove orphans,
    # and a repair takes nothing away that it may need. Only the lease has to be kept meanwhile.
    names: Sequence[TopicName] = sorted(set(options.topics), key=str)
    is_named = bool(names)
    with Log(config, background=False) as log, _kept_lease(log) as tiers, ExitStack() as stack:
        names = names or [TopicName.parse(name) for name in log.topics()]
        given_up = _confirm_take_over(log, tiers, names, options) if options.take_over else {}
        if given_up is None:
            return 1
        bar = stack.enter_context(progress("repair", len(names), unit="topics"))
        for name in names:
            bar.describe(f"repair {name}")
            row = _Row(topic=str(name), gives_up=given_up.get(name))
            rows.append(row)
            try:
                _repair_topic(log, tiers, name, row, options, is_named=is_named)
            except InvariantError:
                raise
            except IsterError as error:
                row.errors.append(error)
            for found in row.errors:
                found.topic = found.topic or row.topic
            bar.advance()
    errors = [error for row in rows for error in row.errors]
    if options.json:
        print_json(_as_json(rows, errors))
    else:
        _print_rows(rows)
    print_errors(errors)
    return 1 if errors else 0


def _confirm_take_over(
    log: Log, tiers: Tiers, names: Sequence[TopicName], options: argparse.Namespace
) -> dict[TopicName, _GivenUp] | None:
    """Lists what taking topics over gives up, and asks; None if it must not be done.

    Raises:
        InvalidRequestError: Nobody can be asked, and --yes was not given.
    """
    root = wal_root(log.config.storage)
    found = {
        name: given_up
        for name in names
        if (given_up := _given_up(tiers, name, f"{root}/{name.namespace}/{name.topic}")) is not None
    }
    listed = [f"{name} gives up {given_up}" for name, given_up in found.items()]
    if options.yes or not found:
        for line in listed:
            print(f"ister: {line}", file=sys.stderr)
        return found
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidRequestError(
            f"--take-over is not confirmed: {', '.join(listed)}", hint="pass --yes to go on"
        )
    for line in listed:
        print(line, file=sys.stderr)
    question = f"Take {', '.join(map(str, names))} over, and give these messages up?"
    return found if confirm(question, is_confirmed=False) else None


def _given_up(tiers: Tiers, name: TopicName, path: str) -> _GivenUp | None:
    """What a topic loses when it is taken over; None if nothing."""
    catalog = tiers.catalog(name)
    record = catalog.record()
    if record is None or not record[0].lineage or catalog.sealed() is not None:
        return None
    has_files = not WalDirectory(LocalFileSystem(), path).is_blank()
    if has_files and _is_of_node(catalog, tiers.membership.node):
        return None
    last = catalog.last()
    tiered = 0 if last is None else last.end
    cursors = [one.progress.offset for one in catalog.subscriptions()]
    return _GivenUp(start=tiered, known_end=max(cursors, default=tiered))


def _repair_topic(
    log: Log,
    tiers: Tiers,
    name: TopicName,
    row: _Row,
    options: argparse.Namespace,
    *,
    is_named: bool,
) -> None:
    catalog = tiers.catalog(name)
    if not is_named and not _is_of_node(catalog, tiers.membership.node):
        row.status = "skipped"
        return
    is_sealed = catalog.sealed() is not None
    try:
        _repair_opened(log, name, row, options)
    finally:
        if is_sealed:
            # Opening it has taken the seal, and whoever was to have the topic would be refused.
            log.seal(row.topic)


def _repair_opened(log: Log, name: TopicName, row: _Row, options: argparse.Namespace) -> None:
    if options.take_over:
        log.topic(row.topic, take_over=True)
    repaired = log.repair(row.topic, content=not options.quick)
    row.local_frames, row.objects = repaired.local_frames, list(repaired.objects)
    row.errors += repaired.errors
    if not options.quick and log.topic(row.topic).state is not TopicState.QUARANTINED:
        # Opening a log reads its end alone; damage further up is found by reading everything.
        row.errors += _local_damage(log, name)
    if row.errors:
        row.status = "damaged"
    elif row.local_frames is not None or row.objects:
        row.status = "repaired"
    else:
        row.status = "whole"


def _is_of_node(catalog: Catalog, node: str) -> bool:
    """Whether a topic was last written here; so it is if nobody knows."""
    found = catalog.record()
    return found is None or not found[0].lineage or found[0].lineage[-1].node == node


def _local_damage(log: Log, name: TopicName) -> list[IsterError]:
    path = f"{wal_root(log.config.storage)}/{name.namespace}/{name.topic}"
    if not LocalFileSystem().exists(path):
        return []
    return [
        _as_error(file, bad)
        for file in survey(path).files
        for bad in file.damage
        if bad.kind is Kind.DAMAGE
    ]


def _as_error(file: FileSurvey, bad: BadRange) -> CorruptDataError:
    upto = f" up to {bad.end_offset}" if bad.end_offset is not None else ""
    offsets = f", offsets {bad.offset}{upto}" if bad.offset is not None else ""
    return CorruptDataError(
        f"a local file is damaged: {bad.reason}{offsets}",
        topic=file.topic,
        offset=bad.offset,
        path=file.path,
        position=bad.position,
        hint="readers take these messages from the bucket where it has them",
    )


@contextmanager
def _kept_lease(log: Log) -> Iterator[Tiers]:
    """Renews the log's lease in the background: a repair may take longer than it lasts."""
    tiers = log.tiers
    if tiers is None:
        raise InvariantError("a log with a bucket has stores")
    stopping = threading.Event()

    def keep() -> None:
        while not stopping.wait(log.config.storage.metadata.lease_ttl_seconds / 3):
            # A failed renewal is harmless: every transaction checks the ownership of its topic,
            # and the next renewal puts the owner keys back.
            with threads.guard("ister-repair-lease"), suppress(IsterError):
                tiers.membership.renew()

    thread = threads.start("ister-repair-lease", keep)
    try:
        yield tiers
    finally:
        stopping.set()
        thread.join()


def _as_json(rows: Sequence[_Row], errors: Sequence[IsterError]) -> dict[str, Any]:
    return {
        "ok": not errors,
        "job": "repair",
        "topics": [
            {
                "topic": row.topic,
                "status": row.status,
                "local_frames": row.local_frames,
                "objects": row.objects,
                "gives_up": None if row.gives_up is None else asdict(row.gives_up),
            }
            for row in rows
        ],
        "errors": [error_as_json(error) for error in errors],
    }


def _print_rows(rows: Sequence[_Row]) -> None:
    if not rows:
        print("no topics")
        return
    print_table(
        ("topic", "status", "local frames rewritten", "objects uploaded again"),
        [(row.topic, row.status, row.local_frames, len(row.objects)) for row in rows],
    )
    if any(row.status == "skipped" for row in rows):
        print("skipped: last written by another node; name the topic to repair it from here")
    for row in rows:
        for name in row.objects:
            print(f"uploaded again: {row.topic} {name}")
