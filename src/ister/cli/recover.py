"""`ister recover [TOPIC …]`: rebuilds all metadata from the bucket alone.

Owns: arguments, output, exit code, which topics, and taking a damaged SQLite file out of the way.
Does not own: how a topic is rebuilt (`ister.tier.rebuild`).

A topic that the metadata store knows is left as it is. One topic's trouble does not stop the
others. Nobody else may have the log open meanwhile: the WAL directory's lock sees to it. A dry run
takes no lock and writes nothing.

What a crash leaves: topics that are whole, topics that nobody knows yet, and possibly a metadata
file that was set aside; the next run does the rest.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ister.cli.look import Progress, add_command, print_table, progress
from ister.cli.place import (
    add_place_arguments,
    load_place,
    open_bucket,
    parse_topic,
    require_bucket,
    wal_root,
)
from ister.cli.report import answer, error_as_json, print_errors, print_json
from ister.clock import SystemClock
from ister.config import MetadataBackend, MetadataConfig, StorageConfig
from ister.errors import (
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NotFoundError,
)
from ister.format.descriptor import ObjectDescriptor, count_messages
from ister.fs.local import LocalFileSystem
from ister.metadata.base import MetadataStore
from ister.metadata.memory import MemoryMetadata
from ister.metrics import Metrics
from ister.model import TopicName
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.tier.catalog import Catalog
from ister.tier.names import TopicKeys
from ister.tier.rebuild import TopicReport, find_topics, rebuild_topic
from ister.topic.tiers import open_metadata
from ister.wal.directory import LOCK_NAME

if TYPE_CHECKING:
    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]

_DAMAGED_SUFFIX: Final = ".damaged-"
_SQLITE_SUFFIXES: Final = ("", "-wal", "-shm")
"""The database first: SQLite drops a log that it finds beside a new, empty database, so a crash in
between leaves nothing that could come to life again."""


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "recover",
        help="rebuild lost metadata from the bucket",
        description="Rebuilds the metadata of topics from the objects in the bucket: after the "
        "metadata store was lost, or for a bucket that came from elsewhere. Every object is read "
        "and checked. Topics that the metadata store knows are left as they are. A damaged SQLite "
        "file is set aside, under a name with `.damaged-`. Subscriptions' cursors are not in the "
        "bucket: they begin anew. Exit code 1 if something is damaged, missing or unreadable; "
        "what is whole was recovered all the same.",
        examples=(
            "ister recover --data ./ister-data --dry-run",
            "ister recover /default/orders --config ister.yml --json",
        ),
    )
    parser.add_argument(
        "topics",
        metavar="TOPIC",
        nargs="*",
        type=parse_topic,
        help="such as /default/orders (default: all that are in the bucket)",
    )
    parser.add_argument("--dry-run", action="store_true", help="look and report, write nothing")
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    def failed(error: IsterError) -> dict[str, Any]:
        return _as_json([], [error], None, dry_run=options.dry_run)

    return answer(lambda: _recover(options), as_json=options.json, on_error=failed)


def _recover(options: argparse.Namespace) -> int:
    storage = load_place(options).storage
    require_bucket(storage)
    if storage.metadata.backend is MetadataBackend.MEMORY:
        raise InvalidRequestError(
            "storage.metadata.backend is 'memory', so there is nothing to recover into"
        )
    with _locked(storage, dry_run=options.dry_run):
        recovery = _Recovery(storage, dry_run=options.dry_run)
        try:
            recovery.run(options.topics)
        finally:
            recovery.close()
    errors = [error for row in recovery.rows for error in row.errors]
    if options.json:
        print_json(
            _as_json(recovery.rows, errors, recovery.metadata_found, dry_run=options.dry_run)
        )
    else:
        _print_rows(recovery)
    print_errors(errors)
    return 1 if errors else 0


@contextmanager
def _locked(storage: StorageConfig, *, dry_run: bool) -> Iterator[None]:
    """Keeps everybody else from opening the log meanwhile.

    Raises:
        DirectoryLockedError: Somebody has it open.
    """
    if dry_run:
        yield
        return
    fs, root = LocalFileSystem(), wal_root(storage)
    fs.make_directories(root)
    lock = fs.lock(f"{root}/{LOCK_NAME}")
    try:
        yield
    finally:
        lock.release()


# -- the work -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Row:
    """What was found of one topic, and what was done; without an object, offsets are 0."""

    topic: str
    status: str
    """`recovered`, `known`, `planned` or `failed`."""
    objects: int = 0
    messages: int = 0
    bytes: int = 0
    start_offset: int = 0
    next_offset: int = 0
    left_out: list[str] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    errors: list[IsterError] = field(default_factory=list)

    def count(self, objects: Sequence[ObjectDescriptor]) -> None:
        """Takes the objects that make up the topic, in their order."""
        self.objects = len(objects)
        self.messages = sum(map(count_messages, objects))
        self.bytes = sum(described.size_bytes for described in objects)
        if objects:
            self.start_offset, self.next_offset = objects[0].start, objects[-1].end


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetadataFound:
    """How the metadata store was found."""

    location: str
    state: str
    """`ok`, `missing` or `damaged`."""
    set_aside: str | None = None
    """Where a damaged file is now."""


class _Recovery:
    """One run of the command."""

    def __init__(self, storage: StorageConfig, *, dry_run: bool) -> None:
        self.rows: list[_Row] = []
        self._storage = storage
        self._is_dry = dry_run
        self._clock = SystemClock()
        self.store: ObjectStore = open_bucket(storage, self._clock)
        try:
            self._metadata, self.metadata_found = self._open_metadata()
        except BaseException:
            self.store.close()
            raise

    def close(self) -> None:
        self._metadata.close()
        self.store.close()

    def run(self, wanted: Sequence[TopicName]) -> None:
        """Recovers the topics of these names; all that are in the bucket if none is given."""
        found = find_topics(self.store)
        names = sorted(set(wanted) or found, key=str)
        total = sum(len(found.get(name, ())) for name in names)
        with progress("recover", total, unit="objects") as bar:
            for name in names:
                bar.describe(f"recover {name}")
                self.rows.append(self._recover_topic(name, found, bar))

    def _recover_topic(
        self, name: TopicName, found: dict[TopicName, list[ObjectInfo]], bar: Progress
    ) -> _Row:
        row = _Row(topic=str(name), status="failed")
        keys = TopicKeys(self._storage.metadata.root_prefix, name)
        try:
            if self._metadata.get(keys.record) is not None:
                # Asked before the objects are read, which may take hours.
                self._describe_known(row, keys)
                bar.advance(len(found.get(name, ())))
            elif name in found:
                report = rebuild_topic(
                    self.store,
                    self._metadata,
                    keys,
                    found[name],
                    clock=self._clock,
                    dry_run=self._is_dry,
                    on_object=bar.advance,
                )
                self._take(row, report)
            else:
                row.errors.append(self._not_found(name, found))
        except InvariantError:
            raise
        except IsterError as error:
            row.errors.append(error)
        for failure in row.errors:
            failure.topic = failure.topic or row.topic
        return row

    def _describe_known(self, row: _Row, keys: TopicKeys) -> None:
        catalog = Catalog(self._metadata, keys, clock=self._clock, metrics=Metrics())
        objects = [described for described, _ in catalog.descriptors()]
        row.count(objects)
        row.gaps = [(a.end, b.start) for a, b in pairwise(objects) if a.end < b.start]
        row.status = "known"

    def _take(self, row: _Row, report: TopicReport) -> None:
        row.count(report.objects)
        row.left_out, row.gaps = report.left_out, report.gaps
        row.errors += report.errors
        row.errors += [
            DataGapError("no object holds the offset", start=start, end=end, topic=row.topic)
            for start, end in report.gaps
        ]
        if report.is_written:
            row.status = "recovered"
        elif self._is_dry:
            row.status = "planned"

    def _not_found(self, name: TopicName, found: Iterable[TopicName]) -> NotFoundError:
        near = difflib.get_close_matches(str(name), [str(topic) for topic in found])
        return NotFoundError(
            "nothing of this topic is in the bucket",
            topic=str(name),
            path=self.store.location,
            hint=f"did you mean {', '.join(near)}?" if near else "without a name all are recovered",
        )

    # -- metadata ---------------------------------------------------------------------------

    def _open_metadata(self) -> tuple[MetadataStore, _MetadataFound]:
        """The metadata store; a new one where the old one is missing or damaged."""
        config = self._storage.metadata
        is_file = config.backend is MetadataBackend.SQLITE
        location = config.path or ", ".join(config.endpoints)
        is_missing = is_file and not os.path.exists(config.path or "")
        state = "missing" if is_missing else "ok"
        try:
            opened = open_metadata(config, self._clock, read_only=self._is_dry)
        except NotFoundError:
            if not self._is_dry:
                raise
            # Nothing is known, which is what an empty store says.
            return MemoryMetadata(self._clock), _MetadataFound(location=location, state="missing")
        except CorruptDataError:
            if not is_file:
                raise
            if self._is_dry:
                empty = MemoryMetadata(self._clock)
                return empty, _MetadataFound(location=location, state="damaged")
            aside = _set_aside(config)
            opened = open_metadata(config, self._clock)
            return opened, _MetadataFound(location=location, state="damaged", set_aside=aside)
        return opened, _MetadataFound(location=location, state=state)


def _set_aside(config: MetadataConfig) -> str:
    """Takes a damaged SQLite file, and what belongs to it, out of the way; returns where to."""
    fs = LocalFileSystem()
    path = os.path.abspath(config.path or "")
    number = 1
    while any(fs.exists(f"{path}{_DAMAGED_SUFFIX}{number}{suffix}") for suffix in _SQLITE_SUFFIXES):
        number += 1
    aside = f"{path}{_DAMAGED_SUFFIX}{number}"
    for suffix in _SQLITE_SUFFIXES:
        # Named as SQLite expects them beside each other, for whoever tries to save more.
        if fs.exists(path + suffix):
            fs.rename(path + suffix, aside + suffix)
    fs.sync_directory(os.path.dirname(path))
    return aside


# -- output ---------------------------------------------------------------------------------


def _as_json(
    rows: Sequence[_Row],
    errors: Sequence[IsterError],
    found: _MetadataFound | None,
    *,
    dry_run: bool,
) -> dict[str, Any]:
    return {
        "ok": not errors,
        "job": "recover",
        "dry_run": dry_run,
        "metadata": None
        if found is None
        else {"location": found.location, "state": found.state, "set_aside": found.set_aside},
        "topics": [
            {
                "topic": row.topic,
                "status": row.status,
                "objects": row.objects,
                "messages": row.messages,
                "bytes": row.bytes,
                "start_offset": row.start_offset,
                "next_offset": row.next_offset,
                "left_out": row.left_out,
                "gaps": [list(gap) for gap in row.gaps],
            }
            for row in rows
        ],
        "errors": [error_as_json(error) for error in errors],
    }


def _print_rows(recovery: _Recovery) -> None:
    found = recovery.metadata_found
    if found.set_aside is not None:
        print(f"the metadata file was damaged and is now {found.set_aside}")
    elif found.state != "ok":
        print(f"the metadata file is {found.state}: {found.location}")
    if not recovery.rows:
        print(f"no topics in {recovery.store.location}")
        return
    titles = ("topic", "status", "objects", "messages", "bytes", "start", "next")
    print_table(
        titles,
        [
            (
                row.topic,
                row.status,
                row.objects,
                row.messages,
                row.bytes,
                row.start_offset,
                row.next_offset,
            )
            for row in recovery.rows
        ],
    )
    for row in recovery.rows:
        for name in row.left_out:
            print(f"left out of {row.topic}: {name}")
