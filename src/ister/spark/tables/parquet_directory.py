"""A directory of Parquet files, by date: a table for whoever reads files.

    <table>/publish_date=2026-03-01/<file>.parquet      what readers read
    <table>/_ister/commits/<number, 20 digits>.json     what is in the table, and since when
    <table>/_ister/pending/<run>/…                      files before their commit
    <table>/_ister/runs/<run>                           renewed while an export is under way
    <table>/_ister/published/<number>                   all files of a commit have their names

Owns: these names, the order of commits, and that files get their final names. Does not own: what is
in the files.

The commit point is the commit record, created under a name that only one can have. Its files get
their final names after it, so readers never see a file that does not count; they may see some files
of a commit a moment before others. Each record says all that the table has, so the newest is
enough, and older ones go after a while. It also names the one before it: that is how an export
whose record has got a follower in the meantime knows that it counts.

Invariants: a file that a record names is never deleted before it has its final name. Only the
newest record can have files without one: whoever commits next sees to that first. Before `tidy`
removes files of a run that was not heard of, it commits that the run has ended: a run that wakes up
either had committed before, and its files have got their names, or is refused.

What a crash leaves: files below `pending`, which `tidy` removes after a grace; or, after the commit
record, files that do not have their final names yet: the next export finishes that first.

Spark, DuckDB and pandas pass over names that begin with `_` or `.`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ister import failpoints
from ister.clock import Clock
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
from ister.limits import MIB
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.spark.tables.base import PUBLISH_DATE, Addition, DataFile, Layout
from ister.spark.tables.columns import fit
from ister.spark.tables.proof import prove_files
from ister.spark.tables.ranges import Coverage
from ister.spark.tables.targets import FileTarget, Storage, StoreTarget

__all__ = ["ParquetDirectory"]

_log = logging.getLogger("ister.spark.tables")

_COMMITS: Final = "_ister/commits/"
_PENDING: Final = "_ister/pending/"
_RUNS: Final = "_ister/runs/"
_PUBLISHED: Final = "_ister/published/"
_ATTEMPTS: Final = 20
_TRIES: Final = 3
_RECORD_BYTES_MAX: Final = 256 * MIB
_COPY_BYTES: Final = 8 * MIB
_MARK_BYTES_MAX: Final = 4096
_KEPT_RECORDS: Final = 100
_KEPT_SECONDS: Final = 7 * 86_400
"""Longer than any export could be paused and still go on: a number is never given twice."""
_ALIVE_SECONDS: Final = 900.0
"""A run that was renewed so recently is under way, however short the grace is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A file on its way to its final name."""

    pending: str
    final: str
    bytes: int | None = None
    first_offset: int | None = None
    last_offset: int | None = None

    @property
    def shown(self) -> str:
        if self.first_offset is None or self.last_offset is None:
            return self.final
        return f"{self.first_offset} up to {self.last_offset + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A commit."""

    number: int
    id: str
    coverage: Coverage
    schema: pa.Schema
    moves: tuple[_Move, ...] = ()
    topic: str | None = None
    """That of the files."""
    previous: str | None = None
    """The id of the commit before."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Runs whose files `tidy` has removed, and when, in seconds since the Unix epoch."""


class ParquetDirectory:
    """See the module header."""

    def __init__(self, storage: Storage, *, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._schema: pa.Schema | None = None
        self._opened: ObjectStore | None = None
        self.location = storage.root

    # -- what it is -------------------------------------------------------------------------

    def open(self, wanted: pa.Schema) -> Layout:
        """Finishes a commit that was interrupted, and finds out which types columns have."""
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
        """What the newest commit says."""
        if self._storage.is_local and not os.path.isdir(self._storage.root):
            return Coverage()  # opening it would make it
        last = self._last()
        return Coverage() if last is None else last.coverage

    def has_exclusive_commits(self) -> bool:
        """Whether the store lets only one of several writers create a name."""
        return self._store.probe().conditional_create

    def target(self, run: str) -> FileTarget:
        """Below `pending`."""
        self.renew(run)
        return StoreTarget(storage=self._storage, folder=f"{_PENDING}{run}", partition=None)

    def renew(self, run: str) -> None:
        """Writes the run's mark anew; the store's time of it is what counts."""
        self._store.put(f"{_RUNS}{run}", b"{}")

    def end(self, run: str) -> None:
        """Removes the run's mark."""
        with suppress(IsterError):  # else `tidy` does, later
            self._store.delete(f"{_RUNS}{run}")

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            self._opened = self._storage.open()
        return self._opened

    # -- commits ----------------------------------------------------------------------------

    def commit(self, addition: Addition, *, check: Callable[[], None]) -> None:
        """Creates the next commit record; then gives its files their names."""
        for _ in range(_ATTEMPTS):
            last = self._last()
            if last is not None and last.id == addition.id:
                self._finish(last)  # an answer got lost
                return
            if last is not None:
                self._publish(last)
            record = self._following(last, addition)
            prove_files(
                addition, self._size_of, location=self.location, is_local=self._storage.is_local
            )
            check()
            failpoints.reach("export.before_table_commit")
            if self._create(record):
                failpoints.reach("export.after_table_commit")
                self._finish(record)
                return
        raise UnavailableError(
            f"{_ATTEMPTS} other commits came first", path=self.location, hint="run it again"
        )

    def _size_of(self, path: str) -> int | None:
        try:
            return self._store.stat(path).size
        except NotFoundError:
            return None

    def _finish(self, record: _Record) -> None:
        """Gives the files of a commit that is in the table their names."""
        with self._unknown("the commit is in the table, but not all files have their names yet"):
            self._publish(record)

    @contextmanager
    def _unknown(self, what: str) -> Iterator[None]:
        """Whatever fails from the moment on when a record may exist takes nothing back."""
        try:
            yield
        except (CommitUnknownError, CorruptDataError):
            raise
        except IsterError as error:
            raise CommitUnknownError(
                f"{what}: {error.message}",
                topic=error.topic,
                path=error.path or self.location,
                hint="run it again: it finds out, and goes on from there",
            ) from error

    def _following(self, last: _Record | None, addition: Addition) -> _Record:
        before = Coverage() if last is None else last.coverage
        ended = self._still_ended(last)
        gone = sorted({_run_of(file.path) for file in addition.files} & set(ended))
        if gone:
            raise ConflictError(
                "another export took this one for dead and has removed its files",
                topic=addition.topic,
                path=f"{self.location}/{_PENDING}{gone[0]}",
                hint="it was stopped for too long, or could not reach the table's store; "
                "run it again: it adds what is missing",
            )
        return _Record(
            number=0 if last is None else last.number + 1,
            id=addition.id,
            coverage=before.add(
                addition.topic, addition.incarnation, addition.epoch, addition.ranges
            ),
            schema=self._schema if self._schema is not None else pa.schema([]),
            moves=tuple(
                _Move(
                    pending=file.path,
                    final=_final(file),
                    bytes=file.bytes,
                    first_offset=file.first_offset,
                    last_offset=file.last_offset,
                )
                for file in addition.files
            ),
            topic=addition.topic,
            previous=None if last is None else last.id,
            ended=ended,
        )

    def _still_ended(self, last: _Record | None) -> dict[str, int]:
        """Runs that have ended, as long as one of them could still wake up."""
        if last is None:
            return {}
        since = self._clock.now_ns() // 1_000_000_000 - _KEPT_SECONDS
        return {run: when for run, when in last.ended.items() if when > since}

    def _create(self, record: _Record) -> bool:
        """Creates a commit record; False if somebody else has the number.

        Raises:
            ConflictError: The number is an old one: the record does not count, and is gone again.
            CommitUnknownError: Whether it exists could not be found out, or may still change.
            IsterError: The store refused it; it may exist all the same.
        """
        key, data = _record_key(record.number), _encode(record)
        for _ in range(_TRIES):
            try:
                self._put(key, data)
            except AlreadyExistsError:
                with self._unknown("whether the commit is in the table is not known"):
                    if not self._is_own(key, record):
                        return False
            except UnavailableError as error:
                _log.info("a commit got no answer", extra={"path": key, "error": str(error)})
                continue  # the next try finds it, if it is there
            break
        else:
            raise CommitUnknownError(
                "whether the commit is in the table is not known",
                path=key,
                hint="run it again: it finds out",
            )
        with self._unknown("whether the commit counts is not known"):
            counts = self._counts(record)
            if not counts:
                self._store.delete(key)
        if not counts:
            raise ConflictError(
                "the table has newer commits: this export was stopped for too long",
                path=self.location,
                hint="run it again: it adds what is missing",
            )
        return True

    def _counts(self, record: _Record) -> bool:
        """Whether a record that exists is one of the table's.

        It is not if its number had been given before, long ago, and was forgotten since.
        """
        if max(self._numbers(), default=record.number) <= record.number:
            return True
        try:
            follower = self._read(_record_key(record.number + 1), record.number + 1)
        except NotFoundError:
            # Records are forgotten from the oldest on: if the follower is, ours would be as well.
            self._store.stat(_record_key(record.number))
            return False
        return follower.previous == record.id

    def _put(self, key: str, data: bytes) -> None:
        store = self._store
        try:
            store.put(key, data, if_absent=True)
        except UnsupportedOperationError:
            # The export's lease is all that there is.
            try:
                store.stat(key)
            except NotFoundError:
                store.put(key, data)
            else:
                raise AlreadyExistsError("there is such a commit", path=key) from None

    def _is_own(self, key: str, record: _Record) -> bool:
        try:
            return self._read(key, record.number).id == record.id
        except NotFoundError:
            return False  # somebody else took theirs back

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
                continue  # taken back between the two
        raise UnavailableError("the table's commits keep changing", path=self.location)

    def _read(self, key: str, number: int) -> _Record:
        return _decode(self._store.read(key, 0, _RECORD_BYTES_MAX), number, path=key)

    # -- names ------------------------------------------------------------------------------

    def _publish(self, record: _Record) -> None:
        """Gives the files of a commit their final names, as far as they have not got them.

        Raises:
            CorruptDataError: A file is there under neither name.
            IsterError: The store does not answer, or refuses.
        """
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
                f"the table says that it has offsets of {record.topic}, and the file with "
                f"{missing[0].shown} is gone, and {len(missing) - 1} more: somebody deleted "
                "them before they had their final names",
                topic=record.topic,
                offset=missing[0].first_offset,
                path=f"{self.location}/{missing[0].pending}",
                hint="put the file back, or export into another directory",
            )
        try:
            self._store.put(_published_key(record.number), record.id.encode())
        except IsterError as error:
            _log.info("not marked", extra={"path": self.location, "error": str(error)})
        if self._storage.is_local:
            for folder in {move.pending.rpartition("/")[0] for move in record.moves}:
                with suppress(IsterError):  # others may have files in there
                    LocalFileSystem().remove_directory(f"{self._storage.root}/{folder}")

    def _is_published(self, record: _Record) -> bool:
        """Whether all files have had their names: from then on, who deletes some means it."""
        try:
            found = self._store.read(_published_key(record.number), 0, _MARK_BYTES_MAX)
        except NotFoundError:
            return False
        return found == record.id.encode()

    def _move(self, move: _Move) -> None:
        """Gives a file its name.

        Raises:
            NotFoundError: It is there under neither.
        """
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
                hint="run it again: it is copied anew",
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

    def discard(self, target: FileTarget, files: Sequence[DataFile]) -> None:
        """Removes files that were never committed."""
        for file in files:
            try:
                self._store.delete(file.path)
            except IsterError as error:
                _log.info("a file stays", extra={"path": file.path, "error": str(error)})

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Removes pending files of exports that are over, and records that nobody needs."""
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
            self._commit_end(over, check)
            for info in (info for run in sorted(over) for info in files[run]):
                self._store.delete(info.key)
                count += 1
        for run in set(marks) - alive:
            self._store.delete(f"{_RUNS}{run}")
        self._forget(now)
        self._store.remove_stale_parts(max(grace_seconds, _ALIVE_SECONDS))
        return count

    def _commit_end(self, runs: set[str], check: Callable[[], None] | None) -> None:
        """From here on none of the runs commits; what they had committed has its names.

        Raises:
            UnavailableError: Others commit all the time.
        """
        for _ in range(_ATTEMPTS):
            last = self._last()
            if last is not None:
                self._publish(last)
            ended = self._still_ended(last)
            if runs <= set(ended):
                return
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
            if self._create(record):
                return
        raise UnavailableError(f"{_ATTEMPTS} other commits came first", path=self.location)

    def _forget(self, now: float) -> None:
        """Removes old records, the oldest first, and marks of others than the newest."""
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

    # -- directories that somebody else has made ----------------------------------------------

    def _foreign_schema(self) -> pa.Schema:
        """The columns of files that are there already; none if there are none.

        Raises:
            ConflictError: They are not in folders by `publish_date`.
        """
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
                f"the directory has a file that is no Parquet: {info.key}", path=self.location
            ) from error
        return schema.remove_metadata()


def _record_key(number: int) -> str:
    return f"{_COMMITS}{number:020d}.json"


def _published_key(number: int) -> str:
    return f"{_PUBLISHED}{number:020d}"


def _run_of(pending: str) -> str:
    """The run that a pending file is of."""
    return pending.removeprefix(_PENDING).partition("/")[0]


def _age(info: ObjectInfo, now: float) -> float:
    """In seconds; 0 if the store does not say."""
    return now - info.modified_at if info.modified_at is not None else 0.0


def _final(file: DataFile) -> str:
    return f"{PUBLISH_DATE}={file.date}/{file.path.rpartition('/')[2]}"


def _rename(root: str, pending: str, final: str) -> None:
    """Gives a file on this machine its name; durable when this returns."""
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
    """All columns that the table has now."""
    fields = {item.name: item for item in existing}
    fields.update({item.name: item for item in ours})
    return pa.schema(list(fields.values()))


def _encode(record: _Record) -> bytes:
    fields = {
        "version": 1,
        "id": record.id,
        "coverage": json.loads(record.coverage.to_json()),
        "schema": base64.b64encode(record.schema.serialize().to_pybytes()).decode(),
        "topic": record.topic,
        "previous": record.previous,
        "ended": dict(record.ended),
        "files": [
            {
                "pending": move.pending,
                "path": move.final,
                "bytes": move.bytes,
                "first_offset": move.first_offset,
                "last_offset": move.last_offset,
            }
            for move in record.moves
        ],
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _decode(data: bytes, number: int, *, path: str) -> _Record:
    try:
        fields: Mapping[str, Any] = json.loads(data)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(fields["schema"])))
        return _Record(
            number=number,
            id=str(fields["id"]),
            coverage=Coverage.from_json(json.dumps(fields["coverage"]), path=path),
            schema=schema,
            moves=tuple(
                _Move(
                    pending=str(item["pending"]),
                    final=str(item["path"]),
                    bytes=item.get("bytes"),
                    first_offset=item.get("first_offset"),
                    last_offset=item.get("last_offset"),
                )
                for item in fields["files"]
            ),
            topic=fields.get("topic"),
            previous=fields.get("previous"),
            ended={str(run): int(when) for run, when in fields.get("ended", {}).items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException) as error:
        raise CorruptDataError(
            f"a table's commit cannot be read: {error!r}",
            path=path,
            hint="somebody changed it; export into another directory",
        ) from error
