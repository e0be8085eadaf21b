"""A directory of Parquet files, by date: a table for whoever reads files.

    <table>/publish_date=2026-03-01/<file>.parquet      what readers read
    <table>/_ister/commits/<number, 20 digits>.json     what is in the table, and since when
    <table>/_ister/pending/<run>/…                      files before their commit

Owns: these names, the order of commits, and that files get their final names. Does not own: what is
in the files.

The commit point is the commit record, created under a name that only one can have. Its files get
their final names after it, so readers never see a file that does not count; they may see some files
of a commit a moment before others. Each record says all that the table has, so the newest is
enough, and older ones go after a while.

What a crash leaves: files below `pending`, which `tidy` removes after a grace; or, after the commit
record, files that do not have their final names yet: the next export finishes that first.

Spark, DuckDB and pandas pass over names that begin with `_` or `.`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from ister.spark.tables.ranges import Coverage
from ister.spark.tables.targets import FileTarget, Storage, StoreTarget

__all__ = ["ParquetDirectory"]

_log = logging.getLogger("ister.spark.tables")

_COMMITS: Final = "_ister/commits/"
_PENDING: Final = "_ister/pending/"
_ATTEMPTS: Final = 20
_TRIES: Final = 3
_RECORD_BYTES_MAX: Final = 256 * MIB
_COPY_BYTES: Final = 8 * MIB
_KEPT_RECORDS: Final = 100
_KEPT_SECONDS: Final = 7 * 86_400
"""Longer than any export could be paused and still go on: a number is never given twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A commit."""

    number: int
    id: str
    coverage: Coverage
    schema: pa.Schema
    moves: tuple[tuple[str, str], ...]
    """(pending, final) names of the commit's files."""


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
        return StoreTarget(storage=self._storage, folder=f"{_PENDING}{run}", partition=None)

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
                self._publish(last)  # an answer got lost
                return
            if last is not None:
                self._publish(last)
            record = self._following(last, addition)
            check()
            failpoints.reach("export.before_table_commit")
            if self._create(record):
                failpoints.reach("export.after_table_commit")
                self._publish(record)
                return
        raise UnavailableError(
            f"{_ATTEMPTS} other commits came first", path=self.location, hint="run it again"
        )

    def _following(self, last: _Record | None, addition: Addition) -> _Record:
        before = Coverage() if last is None else last.coverage
        return _Record(
            number=0 if last is None else last.number + 1,
            id=addition.id,
            coverage=before.add(
                addition.topic, addition.incarnation, addition.epoch, addition.ranges
            ),
            schema=self._schema if self._schema is not None else pa.schema([]),
            moves=tuple((file.path, _final(file)) for file in addition.files),
        )

    def _create(self, record: _Record) -> bool:
        """Creates a commit record; False if somebody else has the number.

        Raises:
            CommitUnknownError: Whether it exists could not be found out, or may still change.
        """
        key, data = f"{_COMMITS}{record.number:020d}.json", _encode(record)
        for _ in range(_TRIES):
            try:
                self._put(key, data)
            except AlreadyExistsError:
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
        if self._numbers()[-1] > record.number:
            # Only if the export was paused for so long that its number was forgotten.
            self._store.delete(key)
            raise ConflictError("the table has newer commits", path=self.location)
        return True

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
        return self._read(key, record.number).id == record.id

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
                return self._read(f"{_COMMITS}{numbers[-1]:020d}.json", numbers[-1])
            except NotFoundError:
                continue  # taken back between the two
        raise UnavailableError("the table's commits keep changing", path=self.location)

    def _read(self, key: str, number: int) -> _Record:
        return _decode(self._store.read(key, 0, _RECORD_BYTES_MAX), number, path=key)

    # -- names ------------------------------------------------------------------------------

    def _publish(self, record: _Record) -> None:
        """Gives the files of a commit their final names, as far as they have not got them."""
        if not record.moves:
            return
        folders = {pending.rpartition("/")[0] for pending, _ in record.moves}
        waiting: set[str] = set()
        for folder in folders:
            waiting.update(info.key for info in self._store.list(f"{folder}/"))
        for pending, final in record.moves:
            if pending in waiting:
                self._move(pending, final)
                failpoints.reach("export.after_publish")
        if self._storage.is_local:
            for folder in folders:
                with suppress(IsterError):  # others may have files in there
                    LocalFileSystem().remove_directory(f"{self._storage.root}/{folder}")

    def _move(self, pending: str, final: str) -> None:
        if self._storage.is_local:
            _rename(self._storage.root, pending, final)
            return
        try:
            self._copy(pending, final)
        except NotFoundError:
            self._store.stat(final)  # another export was faster
            return
        self._store.delete(pending)

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

    def tidy(self, grace_seconds: float) -> int:
        """Removes pending files of exports that are over, and records that nobody needs."""
        last = self._last()
        needed = {pending for pending, _ in last.moves} if last is not None else set()
        now = self._clock.now_ns() / 1e9
        count = 0
        for info in self._store.list(_PENDING):
            age = now - info.modified_at if info.modified_at is not None else 0.0
            if info.key not in needed and age > grace_seconds:
                self._store.delete(info.key)
                count += 1
        for _, info in self._records()[:-_KEPT_RECORDS]:
            if info.modified_at is not None and now - info.modified_at > _KEPT_SECONDS:
                self._store.delete(info.key)
        self._store.remove_stale_parts(grace_seconds)
        return count

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
        "files": [{"pending": pending, "path": final} for pending, final in record.moves],
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
            moves=tuple((str(item["pending"]), str(item["path"])) for item in fields["files"]),
        )
    except (ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise CorruptDataError(
            f"a table's commit cannot be read: {error!r}",
            path=path,
            hint="somebody changed it; export into another directory",
        ) from error
