"""A Delta table, through delta-rs: no JVM, no Spark package.

    <table>/publish_date=2026-03-01/<file>.parquet
    <table>/_delta_log/<version>.json: add …, txn {"ister.export", number}, commitInfo {coverage}

Owns: how files and ranges become one version of the table. Does not own: the table's upkeep: its
own `vacuum` collects files that no version names.

Each commit requires that the table is still at the version that was read: a commit of any other
program in between makes it fail, and it is checked and tried again. Each commit records all offsets
that the table has of all topics. If the log was cleaned so far that the last record is gone, the
offsets are read from the table's rows.

What a crash leaves: files that no version names.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ister import failpoints
from ister.clock import Clock
from ister.errors import (
    ConflictError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.extras import missing_extra
from ister.objectstore.backends import hidden_values
from ister.objectstore.store_errors import redact
from ister.spark.tables.base import PUBLISH_DATE, Addition, DataFile, Layout
from ister.spark.tables.columns import fit
from ister.spark.tables.library_table import SHOWN_CHARACTERS, LibraryTable
from ister.spark.tables.proof import prove_files
from ister.spark.tables.ranges import (
    ANY_INCARNATION,
    Coverage,
    Covered,
    Ranges,
    normalise,
    union,
)
from ister.spark.tables.targets import FileTarget, Storage, StoreTarget

if TYPE_CHECKING:
    from deltalake import DeltaTable as _Delta
    from deltalake.transaction import AddAction

_log = logging.getLogger("ister.spark.tables")

_APP: Final = "ister.export"
_NUMBER: Final = "ister.commit"
_ID: Final = "ister.commit-id"
_COVERAGE: Final = "ister.coverage"
_HISTORY: Final = (8, 64, 1024, None)
"""How far back the log is searched, in steps."""

_OPTIONS: Final[dict[str, dict[str, str]]] = {
    "s3": {
        "endpoint": "AWS_ENDPOINT_URL",
        "region": "AWS_REGION",
        "access_key": "AWS_ACCESS_KEY_ID",
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_key": "AWS_SECRET_ACCESS_KEY",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    },
    "gcs": {
        "credential_file": "GOOGLE_SERVICE_ACCOUNT",
        "credential_path": "GOOGLE_SERVICE_ACCOUNT",
    },
    "azblob": {
        "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
        "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
        "sas_token": "AZURE_STORAGE_SAS_TOKEN",
        "endpoint": "AZURE_STORAGE_ENDPOINT",
    },
}


class DeltaTable(LibraryTable):
    """A Delta table; see the module header."""

    def __init__(self, storage: Storage, *, clock: Clock, rng: random.Random | None = None) -> None:
        super().__init__(rng)
        self._storage = storage
        self._clock = clock
        self.location = storage.root
        self._uri = storage.root.replace("azblob://", "az://", 1)

    # -- what it is -------------------------------------------------------------------------

    def open(self, wanted: pa.Schema) -> Layout:
        """Creates the table, partitioned by `publish_date`, or adds missing columns."""
        with self._errors("the table cannot be opened"):
            table = self._load()
            if table is None:
                table = self._make(wanted)
            partitions = list(table.metadata().partition_columns)
            existing, required = self._columns(table)
            if partitions not in ([], [PUBLISH_DATE]):
                raise ConflictError(
                    f"the table is partitioned by {', '.join(partitions)}",
                    path=self.location,
                    hint=f"export into a table partitioned by {PUBLISH_DATE}, or not at all",
                )
            schema, added = fit(
                existing,
                wanted,
                path=self.location,
                nested=False,
                is_required=required.__contains__,
            )
            if added:
                fields = _library().Schema.from_arrow(pa.schema(added)).fields
                table.alter.add_columns(fields)
        by_date = partitions == [PUBLISH_DATE]
        if not by_date and PUBLISH_DATE in existing.names:
            schema = schema.append(pa.field(PUBLISH_DATE, pa.date32()))
        return Layout(schema=schema, by_date=by_date)

    def _make(self, wanted: pa.Schema) -> _Delta:
        library = _library()
        schema = pa.schema([*wanted, pa.field(PUBLISH_DATE, pa.date32())])
        made = library.DeltaTable.create(
            self._uri,
            schema=library.Schema.from_arrow(schema),
            mode="ignore",
            partition_by=[PUBLISH_DATE],
            storage_options=self._storage_options(),
        )
        return self._load() or made

    def _columns(self, table: _Delta) -> tuple[pa.Schema, set[str]]:
        schema = table.schema()
        required = {item.name for item in schema.fields if not item.nullable}
        return pa.schema(schema.to_arrow()), required

    def coverage(self) -> Coverage:
        """Reads the newest record; without one, the table's rows."""
        table = self._load()
        return Coverage() if table is None else self._coverage(table)

    def has_exclusive_commits(self) -> bool:
        """Returns whether the store lets only one writer create a version."""
        return self._storage.is_local or self._storage.store().probe().conditional_create

    def target(self, run: str) -> FileTarget:
        """Returns the table's folders by date."""
        return StoreTarget(storage=self._storage, partition=PUBLISH_DATE)

    def _load(self) -> _Delta | None:
        library = _library()
        options = self._storage_options()
        with self._errors("the table cannot be read"):
            try:
                return library.DeltaTable(self._uri, storage_options=options)
            except library.exceptions.TableNotFoundError:
                return None

    def _storage_options(self) -> dict[str, str] | None:
        given = self._storage.options
        names = _OPTIONS.get(self._storage.backend, {})
        options = {names[name]: value for name, value in given.items() if name in names}
        if options.get("AWS_ENDPOINT_URL", "").startswith("http:"):
            options["AWS_ALLOW_HTTP"] = "true"
        return options or None

    # -- commits ----------------------------------------------------------------------------

    def commit(self, addition: Addition, *, check: Callable[[], None]) -> None:
        """Writes one version of the table: files, ranges, and the number of the commit."""
        self._retry_commit(lambda: self._try_commit(addition, check))
        failpoints.reach("export.after_table_commit")

    def _try_commit(self, addition: Addition, check: Callable[[], None]) -> bool:
        table = self._load()
        if table is None:
            raise ConflictError("the table was deleted during the export", path=self.location)
        number = self._number(table)
        after = addition.added_to(self._coverage(table))
        prove_files(
            addition, self._size_of, location=self.location, is_local=self._storage.is_local
        )
        actions = [self._add_action(file) for file in addition.files]
        check()
        failpoints.reach("export.before_table_commit")
        version = table.version()
        try:
            self._write(table, addition, actions, after, 0 if number is None else number + 1)
        except Exception as error:  # delta-rs has errors of many kinds
            if self._has(addition.id, after=version):
                return True
            if not isinstance(error, _library().exceptions.CommitFailedError):
                raise self._unknown() from error  # it may still come
            return False
        return True

    def _write(
        self,
        table: _Delta,
        addition: Addition,
        actions: Sequence[AddAction],
        after: Coverage,
        number: int,
    ) -> None:
        library = _library()
        partitions = list(table.metadata().partition_columns)
        table.create_write_transaction(
            list(actions),
            "append",
            table.schema(),
            partitions,
            commit_properties=library.CommitProperties(
                custom_metadata={
                    _NUMBER: str(number),
                    _ID: addition.id,
                    _COVERAGE: after.to_json(),
                },
                app_transactions=[library.Transaction(_APP, number)],
                # Never on top of a version that was not read.
                max_commit_retries=0,
            ),
        )

    def _add_action(self, file: DataFile) -> AddAction:
        least: dict[str, int | str] = {"offset": file.first_offset}
        most: dict[str, int | str] = {"offset": file.last_offset}
        for values, millis in (
            (least, file.first_time_us // 1000),
            (most, -(-file.last_time_us // 1000)),
        ):
            if (shown := _show_time(millis)) is not None:
                values["publish_time"] = shown
        stats = {
            "numRecords": file.rows,
            "minValues": least,
            "maxValues": most,
            "nullCount": {"offset": 0, "publish_time": 0},
        }
        return _library().AddAction(
            file.path,
            file.bytes,
            {} if file.date is None else {PUBLISH_DATE: file.date},
            self._clock.now_ns() // 1_000_000,
            True,
            json.dumps(stats),
        )

    def _size_of(self, path: str) -> int | None:
        try:
            return self._storage.store().stat(path).size
        except NotFoundError:
            return None

    def _has(self, id: str, *, after: int) -> bool:
        """Returns whether a commit that got an error is in the table."""
        try:
            table = self._load()
            if table is None or table.version() <= after:
                return False
            wanted = table.version() - after
            found = table.history(wanted)
        except Exception as error:
            raise self._unknown() from error
        if any(item.get(_ID) == id for item in found):
            return True
        if len(found) < wanted:
            raise self._unknown()  # the log was cleaned meanwhile
        return False

    def _number(self, table: _Delta) -> int | None:
        """Returns the number of the newest export commit."""
        with self._errors("the table cannot be read"):
            number: int | None = table.transaction_version(_APP)
        return number

    # Any: as deltalake has it; each commit has fields of its own.
    def _history(self, table: _Delta, limit: int | None) -> list[dict[str, Any]]:
        with self._errors("the table's log cannot be read"):
            return table.history(limit)

    def _coverage(self, table: _Delta) -> Coverage:
        number = self._number(table)
        if number is None:
            return Coverage()
        seen = 0
        for limit in _HISTORY:
            found = self._history(table, limit)
            for item in found[seen:]:
                if item.get(_NUMBER) == str(number) and _COVERAGE in item:
                    return Coverage.from_json(item[_COVERAGE], path=self.location)
            seen = len(found)
            if limit is not None and len(found) < limit:
                break
        _log.warning("the table's log was cleaned; reading its rows", extra={"path": self.location})
        return self._coverage_of_rows(table)

    def _coverage_of_rows(self, table: _Delta) -> Coverage:
        topics: dict[str, Ranges] = {}
        try:
            batches = table.to_pyarrow_dataset().to_batches(columns=["topic", "offset"])
            for batch in batches:
                for topic in pc.unique(batch.column("topic")).to_pylist():
                    if topic is None:
                        continue
                    rows = batch.filter(pc.equal(batch.column("topic"), topic))
                    topics[topic] = union(topics.get(topic, ()), _runs(rows.column("offset")))
        except (OSError, pa.ArrowException, KeyError) as error:
            raise CorruptDataError(
                "the table does not record which offsets it has, and its rows cannot be read",
                path=self.location,
                hint="export into another table",
            ) from error
        return Coverage(
            {topic: {ANY_INCARNATION: Covered(0, ranges)} for topic, ranges in topics.items()}
        )

    def close(self) -> None:
        """Does nothing: the store is shared."""

    def _mapped(self, what: str, error: Exception) -> IsterError:
        text = redact(str(error), hidden_values(self._storage.options)).partition("\n")[0]
        return UnavailableError(f"{what}: {text[:SHOWN_CHARACTERS]}", path=self.location)


class _Library:
    """The parts of delta-rs that are used."""

    def __init__(self) -> None:
        import deltalake  # noqa: PLC0415 - an extra
        import deltalake.exceptions  # noqa: PLC0415
        import deltalake.transaction  # noqa: PLC0415

        self.exceptions = deltalake.exceptions
        self.DeltaTable = deltalake.DeltaTable
        self.Schema = deltalake.Schema
        self.CommitProperties = deltalake.CommitProperties
        self.Transaction = deltalake.Transaction
        self.AddAction = deltalake.transaction.AddAction


_loaded: dict[str, _Library] = {}


def _library() -> _Library:
    found = _loaded.get("delta")
    if found is None:
        try:
            found = _loaded["delta"] = _Library()
        except ImportError as error:
            raise missing_extra("a Delta table", "lakehouse", error) from error
    return found


def _runs(offsets: pa.Array) -> Ranges:
    """Returns offsets as ranges, without a Python object for each."""
    ordered = pc.drop_null(offsets.take(pc.sort_indices(offsets)))
    if not len(ordered):
        return ()
    steps = pc.subtract(ordered.slice(1), ordered.slice(0, len(ordered) - 1))
    breaks = pc.indices_nonzero(pc.greater(steps, 1)).to_pylist()
    starts = [0, *(at + 1 for at in breaks)]
    ends = [*breaks, len(ordered) - 1]
    return normalise(
        (ordered[start].as_py(), ordered[end].as_py() + 1)
        for start, end in zip(starts, ends, strict=True)
    )


def _show_time(millis: int) -> str | None:
    """Formats a time for statistics, in milliseconds; None beyond year 9999."""
    seconds, rest = divmod(millis, 1000)
    try:
        when = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return None
    return f"{when:%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"
