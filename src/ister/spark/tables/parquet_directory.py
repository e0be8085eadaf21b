"""A directory of Parquet files, by date: a table for any program that reads files.

    <table>/publish_date=2026-03-01/<file>.parquet      what readers read
    <table>/_ister/commits/<number, 20 digits>.json     what is in the table, and since when
    <table>/_ister/pending/<run>/…                      files before their commit
    <table>/_ister/runs/<run>                           renewed while an export is running
    <table>/_ister/published/<number>                   all files of a commit have their names

Owns: these names, the order of commits, and that files get their final names. Does not own: what is
in the files.

The commit point is the commit record, created under a number that only one writer can get. Its
files get their final names afterwards, so readers never see an uncommitted file; they may see some
files of a commit before others. Each record has all offsets of the table, so the newest one is
enough, and older ones are removed after a while. It also names its predecessor: that is how an
export whose record has a successor knows that its record is valid.

Invariants: a file that a record names is never deleted before it has its final name. Only the
newest record can have files without one: the next commit publishes them first. Before `tidy`
removes files of a silent run, it commits that the run has ended: a run that wakes up either had
committed before, and its files have their names, or is refused.

What a crash leaves: files below `pending`, which `tidy` removes after a grace; or, after the commit
record, files without their final names, which the next export publishes first.

Spark and pandas ignore names that start with `_` or `.`. A pattern like `**/*.parquet` does not, so
files below `pending` have names that it does not match.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.structs import known
from ister.errors import (
    AlreadyExistsError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.fs.local import LocalFileSystem
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.spark.tables.base import (
    PUBLISH_DATE,
    Addition,
    DataFile,
    Layout,
    Table,
    prove_files,
    size_in,
)
from ister.spark.tables.columns import fit
from ister.spark.tables.ranges import Coverage
from ister.spark.tables.targets import FileTarget, Storage, StoreTarget

_log = logging.getLogger("ister.spark.tables")

_COMMITS: Final = "_ister/commits/"
_PENDING: Final = "_ister/pending/"
_SUFFIX: Final = ".pending"
_RUNS: Final = "_ister/runs/"
_PUBLISHED: Final = "_ister/published/"
_ATTEMPTS: Final = 20
_TRIES: Final = 3
_RECORD_BYTES_MAX: Final = 256 * MIB
_COPY_BYTES: Final = 8 * MIB
_MARK_BYTES_MAX: Final = 4096
_KEPT_RECORDS: Final = 100
_KEPT_SECONDS: Final = 3600
"""Older records are removed, except the last 100: each commit lists all records."""
_ENDED_SECONDS: Final = 7 * 86_400
"""Longer than an export could be paused and continue: its files are gone, it must not commit."""
_ALIVE_SECONDS: Final = 900.0
"""A run that was renewed this recently is alive, however short the grace is."""


class _Move(msgspec.Struct, frozen=True, kw_only=True, rename={"final": "path"}):
    """A file and its final name."""

    pending: str
    final: str
    topic: str | None = None
    bytes: int | None = None
    first_offset: int | None = None
    last_offset: int | None = None

    @property
    def shown(self) -> str:
        if self.first_offset is None or self.last_offset is None:
            return self.final
        return f"{self.first_offset} up to {self.last_offset + 1}"


class _StoredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A commit record as it is stored."""

    version: int = 1
    id: str
    coverage: msgspec.Raw
    schema: bytes
    previous: str | None = None
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    files: tuple[_Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A commit record."""

    number: int
    id: str
    coverage: Coverage
    schema: pa.Schema
    moves: tuple[_Move, ...] = ()
    previous: str | None = None
    """The id of the commit before."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Runs whose files `tidy` has removed, and when, in seconds since the Unix epoch."""


class ParquetDirectory(Table):
    """A table in a directory or bucket; see the module header."""

    def __init__(self, storage: Storage, *, clock: Clock, rng: random.Random | None = None) -> None:
        super().__init__(rng)
        self._storage = storage
        self._clock = clock
        self._schema: pa.Schema | None = None
        self._opened: ObjectStore | None = None
        self.location = storage.root

    # -- what it is -------------------------------------------------------------------------

    def open(self, wanted: pa.Schema) -> Layout:
        """Publishes files of an interrupted commit, and reads the types of columns."""
        last = self._last()
        if last is not None:
            self._publish(last)
            existing = last.schema
        else:
            existing = self._foreign_schema()
        schema, _ = fit(existing, wanted, path=self.location, nested=True)
        self._schema = _merged(existing, schema)
        return Layout(schema=schema, by_date=True)

    def coverage(self) -> Coverage:
        """Reads the newest commit record."""
        if self._storage.is_local and not os.path.isdir(self._storage.root):
            return Coverage()  # opening it would create it
        last = self._last()
        return Coverage() if last is None else last.coverage

    def has_exclusive_commits(self) -> bool:
        """Returns whether the store lets only one writer create a name."""
        return self._store.probe().conditional_create

    def target(self, run: str) -> FileTarget:
        """Returns a folder below `pending`."""
        self.renew(run)
        return StoreTarget(
            storage=self._storage, folder=f"{_PENDING}{run}", partition=None, suffix=_SUFFIX
        )

    def renew(self, run: str) -> None:
        """Writes the run's mark again; its modification time in the store counts."""
        self._store.put(f"{_RUNS}{run}", b"{}")

    def end(self, run: str) -> None:
        """Removes the run's mark."""
        with suppress(IsterError):  # otherwise `tidy` does it later
            self._store.delete(f"{_RUNS}{run}")

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            self._opened = self._storage.open()
        return self._opened

    # -- commits ----------------------------------------------------------------------------

    def commit(self, addition: Addition, *, check: Callable[[], None]) -> None:
        """Creates the next commit record; then publishes its files."""
        self._retry_commit(lambda: self._try_commit(addition, check))

    def _try_commit(self, addition: Addition, check: Callable[[], None]) -> bool:
        last = self._last()
        if last is not None and last.id == addition.id:
            self._finish(last)  # the answer was lost
            return True
        if last is not None:
            self._publish(last)
        record = self._following(last, addition)
        prove_files(
            addition,
            lambda path: size_in(self._store, path),
            location=self.location,
            is_local=self._storage.is_local,
        )
        check()
        failpoints.reach("export.before_table_commit")
        if not self._create(record):
            return False
        failpoints.reach("export.after_table_commit")
        self._finish(record)
        return True

    def _finish(self, record: _Record) -> None:
        """Publishes the files of a commit that is in the table."""
        with self._as_unknown("the commit is in the table, but not all files are published yet"):
            self._publish(record)

    @contextmanager
    def _as_unknown(self, what: str) -> Iterator[None]:
        """Reports a failure as an unknown commit, because the record may exist."""
        try:
            yield
        except (CommitUnknownError, CorruptDataError):
            raise
        except IsterError as error:
            raise CommitUnknownError(
                f"{what}: {error.message}",
                topic=error.topic,
                path=error.path or self.location,
                hint="run it again: it finds out, and continues from there",
            ) from error

    def _following(self, last: _Record | None, addition: Addition) -> _Record:
        before = Coverage() if last is None else last.coverage
        ended = self._still_ended(last)
        gone = sorted({_run_of(file.path) for file in addition.files} & set(ended))
        if gone:
            raise ConflictError(
                "another export assumed that this one was dead, and removed its files",
                path=f"{self.location}/{_PENDING}{gone[0]}",
                hint="it was paused for too long, or could not reach the table's store; "
                "run it again: it adds what is missing",
            )
        return _Record(
            number=0 if last is None else last.number + 1,
            id=addition.id,
            coverage=addition.added_to(before),
            schema=self._schema if self._schema is not None else pa.schema([]),
            moves=tuple(
                _Move(
                    pending=file.path,
                    final=_final(file),
                    topic=item.topic,
                    bytes=file.bytes,
                    first_offset=file.first_offset,
                    last_offset=file.last_offset,
                )
                for item in addition.topics
                for file in item.files
            ),
            previous=None if last is None else last.id,
            ended=ended,
        )

    def _still_ended(self, last: _Record | None) -> dict[str, int]:
        """Returns runs that have ended and could still wake up."""
        if last is None:
            return {}
        since = self._clock.now_ns() // 1_000_000_000 - _ENDED_SECONDS
        return {run: when for run, when in last.ended.items() if when > since}

    def _create(self, record: _Record) -> bool:
        """Creates a commit record; False if another writer has the number."""
        key, data = _record_key(record.number), _encode(record)
        for _ in range(_TRIES):
            try:
                self._put(key, data)
            except AlreadyExistsError:
                with self._as_unknown("the commit may be in the table"):
                    if not self._is_own(key, record):
                        return False
            except UnavailableError as error:
                _log.info("commit got no response", extra={"path": key, "error": str(error)})
                continue  # the next try finds out
            break
        else:
            raise self._unknown()
        with self._as_unknown("the commit may be in the table"):
            counts = self._counts(record)
            if not counts:
                self._store.delete(key)
        if not counts:
            raise ConflictError(
                "the table has newer commits: this export was paused for too long",
                path=self.location,
                hint="run it again: it adds what is missing",
            )
        return True

    def _counts(self, record: _Record) -> bool:
        """Returns whether an existing record is valid.

        It is not if its number was used before, long ago, and that record was removed since.
        """
        if max(self._numbers(), default=record.number) <= record.number:
            return True
        try:
            follower = self._read(_record_key(record.number + 1), record.number + 1)
        except NotFoundError:
            # Records are removed oldest first: if the successor is gone, ours would be, too.
            self._store.stat(_record_key(record.number))
            return False
        return follower.previous == record.id

    def _put(self, key: str, data: bytes) -> None:
        store = self._store
        try:
            store.put(key, data, if_absent=True)
        except UnsupportedOperationError:
            # Only the export's lease protects the name.
            try:
                store.stat(key)
            except NotFoundError:
                store.put(key, data)
            else:
                raise AlreadyExistsError("the commit exists", path=key) from None

    def _is_own(self, key: str, record: _Record) -> bool:
        try:
            return self._read(key, record.number).id == record.id
        except NotFoundError:
            return False  # the other writer removed its record

    def _numbers(self) -> list[int]:
        return [number for number, _ in self._records()]

    def _records(self) -> list[tuple[int, ObjectInfo]]:
        found = []
        for info in self._store.list(_COMMITS):
            stem, dot, rest = info.key[len(_COMMITS) :].partition(".")
            if stem.isdigit() and dot and rest == "json":
                found.append((int(stem), info))
        return sorted(found, key=lambda item: item[0])

    def _last(self) -> _Record | None:
        for _ in range(_ATTEMPTS):
            numbers = self._numbers()
            if not numbers:
                return None
            try:
                return self._read(_record_key(numbers[-1]), numbers[-1])
            except NotFoundError:
                continue  # removed between the two calls
        raise UnavailableError("the table's commits keep changing", path=self.location)

    def _read(self, key: str, number: int) -> _Record:
        return _decode(self._store.read(key, 0, _RECORD_BYTES_MAX), number, path=key)

    # -- files ------------------------------------------------------------------------------

    def _publish(self, record: _Record) -> None:
        """Gives the files of a commit their final names, if they do not have them."""
        if not record.moves or self._is_published(record):
            return
        missing = []
        for move in record.moves:
            try:
                self._move(move)
            except NotFoundError:
                missing.append(move)
            failpoints.reach("export.after_publish")
        if missing:
            raise CorruptDataError(
                f"the table records offsets of {missing[0].topic}, and the file with "
                f"{missing[0].shown} is gone, and {len(missing) - 1} more: they were deleted "
                "before they had their final names",
                topic=missing[0].topic,
                offset=missing[0].first_offset,
                path=f"{self.location}/{missing[0].pending}",
                hint="restore the file, or export into another directory",
            )
        try:
            self._store.put(_published_key(record.number), record.id.encode())
        except IsterError as error:
            _log.info(
                "publication not recorded", extra={"path": self.location, "error": str(error)}
            )
        if self._storage.is_local:
            for folder in {move.pending.rpartition("/")[0] for move in record.moves}:
                with suppress(IsterError):  # another run may have files there
                    LocalFileSystem().remove_directory(f"{self._storage.root}/{folder}")

    def _is_published(self, record: _Record) -> bool:
        """Returns whether all files got their names; later deletions are on purpose."""
        try:
            found = self._store.read(_published_key(record.number), 0, _MARK_BYTES_MAX)
        except NotFoundError:
            return False
        return found == record.id.encode()

    def _move(self, move: _Move) -> None:
        """Gives a file its final name."""
        if self._storage.is_local:
            _rename(self._storage.root, move.pending, move.final)
            return
        try:
            self._copy(move.pending, move.final)
        except NotFoundError:
            self._store.stat(move.final)  # another export was faster
            return
        found = self._store.stat(move.final)
        if move.bytes is not None and found.size != move.bytes:
            raise UnavailableError(
                f"a copy has {found.size} bytes, and {move.bytes} were written",
                path=f"{self.location}/{move.final}",
                hint="run it again: it copies the file again",
            )
        self._store.delete(move.pending)

    def _copy(self, source: str, target: str) -> None:
        try:
            self._store.copy(source, target)
        except UnsupportedOperationError:
            writer = self._store.open_writer(target, chunk_bytes=_COPY_BYTES, concurrent_parts=2)
            try:
                position = 0
                while chunk := self._store.read(source, position, _COPY_BYTES):
                    writer.write(chunk)
                    position += len(chunk)
                writer.close()
            finally:
                writer.abort()

    # -- leftovers --------------------------------------------------------------------------

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Removes pending files of exports that have ended, and old records."""
        now = self._clock.now_ns() / 1e9
        marks = {info.key[len(_RUNS) :]: _age(info, now) for info in self._store.list(_RUNS)}
        alive = {run for run, age in marks.items() if age <= max(grace_seconds, _ALIVE_SECONDS)}
        files: dict[str, list[ObjectInfo]] = {}
        for info in self._store.list(_PENDING):
            files.setdefault(_run_of(info.key), []).append(info)
        over = {
            run
            for run, found in files.items()
            if run not in alive and all(_age(info, now) > grace_seconds for info in found)
        }
        count = 0
        if over:
            self._retry_commit(lambda: self._commit_end(over, check))
            for info in (info for run in sorted(over) for info in files[run]):
                self._store.delete(info.key)
                count += 1
        for run in set(marks) - alive:
            self._store.delete(f"{_RUNS}{run}")
        self._forget(now)
        self._store.remove_stale_parts(max(grace_seconds, _ALIVE_SECONDS))
        return count

    def _commit_end(self, runs: set[str], check: Callable[[], None] | None) -> bool:
        """Commits that runs have ended: none of them can commit any more."""
        last = self._last()
        if last is not None:
            self._publish(last)
        ended = self._still_ended(last)
        if runs <= set(ended):
            return True
        now = self._clock.now_ns() // 1_000_000_000
        record = _Record(
            number=0 if last is None else last.number + 1,
            id=secrets.token_hex(8),
            coverage=Coverage() if last is None else last.coverage,
            schema=self._foreign_schema() if last is None else last.schema,
            previous=None if last is None else last.id,
            ended={**ended, **dict.fromkeys(sorted(runs), now)},
        )
        if check is not None:
            check()
        return self._create(record)

    def _forget(self, now: float) -> None:
        """Removes old records, the oldest first, and old publication marks."""
        records = self._records()
        newest = records[-1][0] if records else 0
        for info in self._store.list(_PUBLISHED):
            number = info.key[len(_PUBLISHED) :]
            if number.isdigit() and int(number) < newest:
                self._store.delete(info.key)
        for _, info in records[:-_KEPT_RECORDS]:
            if _age(info, now) <= _KEPT_SECONDS:
                break
            self._store.delete(info.key)

    def close(self) -> None:
        """Closes its store."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # -- directories that another program has made ------------------------------------------

    def _foreign_schema(self) -> pa.Schema:
        """Returns the columns of existing files; none if there are none."""
        for info in self._store.list(""):
            if not info.key.endswith(".parquet") or info.key.startswith(("_", ".")):
                continue
            folder, slash, rest = info.key.partition("/")
            if not slash or not folder.startswith(f"{PUBLISH_DATE}=") or "/" in rest:
                raise ConflictError(
                    f"the directory has Parquet files that are not in folders by {PUBLISH_DATE}: "
                    f"{info.key}",
                    path=self.location,
                    hint="export into another directory",
                )
            return self._footer(info)
        return pa.schema([])

    def _footer(self, info: ObjectInfo) -> pa.Schema:
        store = self._store
        tail = store.read(info.key, max(info.size - 8, 0), 8)
        size = min(int.from_bytes(tail[:4], "little") + 8, info.size)
        data = store.read(info.key, info.size - size, size)
        try:
            schema = pq.read_metadata(pa.BufferReader(b"PAR1" + data)).schema.to_arrow_schema()
        except (pa.ArrowInvalid, OSError) as error:
            raise ConflictError(
                f"the directory has a file that is not Parquet: {info.key}", path=self.location
            ) from error
        return schema.remove_metadata()


def _record_key(number: int) -> str:
    return f"{_COMMITS}{number:020d}.json"


def _published_key(number: int) -> str:
    return f"{_PUBLISHED}{number:020d}"


def _run_of(pending: str) -> str:
    """Returns the run of a pending file."""
    return pending.removeprefix(_PENDING).partition("/")[0]


def _age(info: ObjectInfo, now: float) -> float:
    """Returns the age in seconds; 0 if the store does not report it."""
    return now - info.modified_at if info.modified_at is not None else 0.0


def _final(file: DataFile) -> str:
    name = file.path.rpartition("/")[2].removesuffix(_SUFFIX)
    return f"{PUBLISH_DATE}={file.date}/{name}"


def _rename(root: str, pending: str, final: str) -> None:
    """Gives a local file its name; durable on return."""
    fs = LocalFileSystem()
    source, target = f"{root}/{pending}", f"{root}/{final}"
    folder = target.rpartition("/")[0]
    fs.make_directories(folder)
    try:
        fs.rename(source, target)
    except NotFoundError:
        if not fs.exists(target):
            raise
    fs.sync_directory(folder)


def _merged(existing: pa.Schema, ours: pa.Schema) -> pa.Schema:
    """Returns all columns that the table has now."""
    fields = {item.name: item for item in existing}
    fields.update({item.name: item for item in ours})
    return pa.schema(list(fields.values()))


def _encode(record: _Record) -> bytes:
    return msgspec.json.encode(
        _StoredRecord(
            id=record.id,
            coverage=msgspec.Raw(record.coverage.to_json()),
            schema=record.schema.serialize().to_pybytes(),
            previous=record.previous,
            ended=dict(record.ended),
            files=record.moves,
        )
    )


def _decode(data: bytes, number: int, *, path: str) -> _Record:
    try:
        stored = msgspec.json.decode(data, type=known(_StoredRecord))
        schema = pa.ipc.read_schema(pa.py_buffer(stored.schema))
    except (msgspec.MsgspecError, RecursionError, pa.ArrowException, OSError) as error:
        raise CorruptDataError(
            f"the table's commit record cannot be read: {error!r}",
            path=path,
            hint="another program changed it; export into another directory",
        ) from error
    return _Record(
        number=number,
        id=stored.id,
        coverage=Coverage.from_json(bytes(stored.coverage), path=path),
        schema=schema,
        moves=stored.files,
        previous=stored.previous,
        ended=stored.ended,
    )
