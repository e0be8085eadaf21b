"""A Delta table, through delta-rs: no JVM, no Spark package.

    <table>/publish_date=2026-03-01/<file>.parquet
    <table>/_delta_log/<version>.json: add …, txn {"ister.export", number}, commitInfo {coverage}
    <table>/_ister/<number>.json: coverage

Owns: how files and ranges become one version of the table. Does not own: the table's upkeep: its
own `vacuum` collects files that no version names.

Each commit requires that the table is still at the version that was read: a commit of any other
program in between makes it fail, and it is checked and tried again. Each commit records all offsets
that the table has of all topics. The log is read backwards to the newest record; where it says that
the table was restored, reading goes on at the restored version. The log may be cleaned, but the
number of the newest commit stays in the table's state: what was written to `_ister` before that
commit then counts, if the table still has the last row that was recorded.

Tables with features or constraints that this module does not observe are refused.

What a crash leaves: files that no version names, and records below `_ister` of commits that were
not made; a later export removes the records.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.extras import missing_extra
from ister.base.limits import MIB
from ister.errors import ConflictError, IsterError, NotFoundError, UnavailableError
from ister.objectstore.backends import hidden_values
from ister.objectstore.store_errors import redact
from ister.spark.tables.base import (
    PUBLISH_DATE,
    SHOWN_CHARACTERS,
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

if TYPE_CHECKING:
    from deltalake import DeltaTable as _Delta
    from deltalake.transaction import AddAction

_APP: Final = "ister.export"
_NUMBER: Final = "ister.commit"
_ID: Final = "ister.commit-id"
_COVERAGE: Final = "ister.coverage"
_HISTORY: Final = (8, 64, 1024, None)
"""How far back the log is searched, in steps."""
_RECORDS: Final = "_ister/"
"""No part of the table: Delta and Spark pass over names that begin with `_`."""
_RECORD_BYTES_MAX: Final = 64 * MIB
_RANDOM_BITS: Final = 32
"""A commit's number ends with so many random bits: no other attempt has its record."""

_HELD_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
    }
)
"""What a table may be able to do. Of some, `_check_writable` refuses the use."""
_MAPPING: Final = "delta.columnMapping.mode"
_CONSTRAINT: Final = "delta.constraints."
_IDENTITY_VERSION: Final = 6
"""The writers' version with identity columns; the one after it names features."""
_RULES: Final = {
    "delta.generationExpression": "is a generated column",
    "delta.identity.start": "is an identity column",
    "delta.invariants": "has an invariant",
    "CURRENT_DEFAULT": "has a default",
    "__CHAR_VARCHAR_TYPE_STRING": "has a length of its own",
}
"""What a column's metadata may ask of writers."""

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


class DeltaTable(Table):
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
            self._check_writable(table)
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

    def _check_writable(self, table: _Delta) -> None:
        """Checks that the table asks nothing of writers that would not be observed."""
        protocol = table.protocol()
        refused = sorted(set(protocol.writer_features or ()) - _HELD_FEATURES)
        if protocol.min_writer_version == _IDENTITY_VERSION:
            refused.append("identityColumns")
        configuration = table.metadata().configuration
        if configuration.get(_MAPPING, "none") != "none":
            refused.append(f"columnMapping ({_MAPPING}={configuration[_MAPPING]})")
        if refused:
            raise self._not_writable(f"the table has features: {', '.join(refused)}")
        for name in sorted(configuration):
            if name.startswith(_CONSTRAINT):
                raise self._not_writable(
                    f"the table has a CHECK constraint, {name.removeprefix(_CONSTRAINT)}: "
                    f"{configuration[name]}"
                )
        for column, metadata in _fields(json.loads(table.schema().to_json()), ""):
            for rule in _RULES.keys() & metadata.keys():
                raise self._not_writable(f"the table's column {column} {_RULES[rule]}")

    def _not_writable(self, what: str) -> ConflictError:
        return ConflictError(
            f"{what}; exports do not observe that",
            path=self.location,
            hint="remove it, or export into another table and copy from there with Spark",
        )

    def coverage(self) -> Coverage:
        """Reads the record of the table's state."""
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
                found: _Delta = library.DeltaTable(self._uri, storage_options=options)
            except library.exceptions.TableNotFoundError:
                return None
        return found

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
        with self._errors("the table cannot be read"):
            self._check_writable(table)
        number = (((self._number(table) or 0) >> _RANDOM_BITS) + 1) << _RANDOM_BITS
        number |= self._rng.getrandbits(_RANDOM_BITS)
        after = addition.added_to(self._coverage(table))
        store = self._storage.store()
        prove_files(
            addition,
            lambda path: size_in(store, path),
            location=self.location,
            is_local=self._storage.is_local,
        )
        actions = [self._add_action(file) for file in addition.files]
        store.put(_record_key(number), after.to_json().encode())
        check()
        failpoints.reach("export.before_table_commit")
        version = table.version()
        try:
            self._write(table, addition, actions, after, number)
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
        action: AddAction = _library().transaction.AddAction(
            file.path,
            file.bytes,
            {} if file.date is None else {PUBLISH_DATE: file.date},
            self._clock.now_ns() // 1_000_000,
            True,
            json.dumps(stats),
        )
        return action

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

    def _coverage(self, table: _Delta) -> Coverage:
        number = self._number(table)
        if number is None:
            return Coverage()
        found, is_restored = self._logged(table)
        known = self._recorded(number) if found is None or is_restored else None
        if found is not None:
            return replace(found, before=known)
        if known is not None and (known.row is None or self._has_row(table, *known.row)):
            return known
        raise ConflictError(
            "the table's log does not say any more which offsets the table has: it was cleaned "
            "since the last export, or the table was replaced"
            + ("" if known is None else f"; {known.shown()} were exported"),
            path=self.location,
            hint="export into another table",
        )

    def _logged(self, table: _Delta) -> tuple[Coverage | None, bool]:
        """Returns what the log says of the table's state, and whether the table was restored.

        None if the log does not say it.
        """
        at, is_restored = table.version(), False
        for item in self._log(table):
            if item["version"] > at:
                continue  # undone
            if item["version"] < at:
                return None, is_restored  # something is missing
            operation = item.get("operation", "")
            if _COVERAGE in item:
                return Coverage.from_json(item[_COVERAGE], path=self.location), is_restored
            if operation == "RESTORE":
                restored = self._restored(item)
                if restored is None:
                    return None, True
                at, is_restored = restored, True
            elif "REPLACE" in operation or operation == "CLONE":
                return None, is_restored
            else:
                at -= 1
        return (Coverage() if at < 0 else None), is_restored

    # Any: as deltalake has it; each commit has fields of its own.
    def _log(self, table: _Delta) -> Iterator[dict[str, Any]]:
        """Yields what the log says of each version, the newest first."""
        seen = 0
        for limit in _HISTORY:
            with self._errors("the table's log cannot be read"):
                found: list[dict[str, Any]] = table.history(limit)
            yield from found[seen:]
            seen = len(found)
            if limit is not None and seen < limit:
                return

    def _restored(self, item: Mapping[str, Any]) -> int | None:
        """Returns the version to which a table was restored; None if that is not known any more."""
        given = item.get("operationParameters", {}).get("version")
        if given is not None:
            return int(given)
        # It was restored to a time, which each program writes and counts in another way.
        files = self._files_of(item["version"])
        for version in range(item["version"] - 1, -1, -1):
            found = self._files_of(version)
            if found is None or files is None:
                return None
            if found == files:
                return version
        return None

    def _files_of(self, version: int) -> list[str] | None:
        """Returns the files of a version; None if the log does not have it any more."""
        library = _library()
        try:
            found = library.DeltaTable(
                self._uri, version=version, storage_options=self._storage_options()
            )
            return sorted(found.file_uris())
        except library.exceptions.DeltaError:
            return None

    def _recorded(self, number: int) -> Coverage | None:
        """Returns what was recorded beside the log for a commit."""
        key = _record_key(number)
        try:
            data = self._storage.store().read(key, 0, _RECORD_BYTES_MAX)
        except NotFoundError:
            return None
        return Coverage.from_json(data, path=f"{self.location}/{key}")

    def _has_row(self, table: _Delta, topic: str, offset: int) -> bool:
        with self._errors("the table's rows cannot be read"):
            quoted = topic.replace("'", "''")
            rows = table.scan(["offset"], f"\"offset\" = {offset} and topic = '{quoted}'")
            return any(batch.num_rows for batch in rows)

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Removes the records of earlier commits, and of commits that were not made.

        Other files are left to the table's own upkeep.
        """
        table = self._load()
        number = None if table is None else self._number(table)
        store = self._storage.store()
        old = [
            info.key
            for info in (store.list(_RECORDS) if number is not None else ())
            # Of an attempt on top of an earlier commit, which fails if it is still under way.
            if _number_of(info.key) >> _RANDOM_BITS < (number or 0) >> _RANDOM_BITS
        ]
        for key in old:
            store.delete(key)
        return len(old)

    def _mapped(self, what: str, error: Exception) -> IsterError:
        text = redact(str(error), hidden_values(self._storage.options)).partition("\n")[0]
        return UnavailableError(f"{what}: {text[:SHOWN_CHARACTERS]}", path=self.location)


def _library() -> Any:  # noqa: ANN401 - a module
    try:
        import deltalake  # noqa: PLC0415 - an extra
        import deltalake.exceptions  # noqa: PLC0415
        import deltalake.transaction  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("a Delta table", "lakehouse", error) from error
    return deltalake


def _record_key(number: int) -> str:
    return f"{_RECORDS}{number:020d}.json"


def _number_of(key: str) -> int:
    """Returns the number of a record; one beyond all others if it is not a record."""
    text = key.removeprefix(_RECORDS).removesuffix(".json")
    return int(text) if text.isdigit() else 1 << 64


def _fields(kind: object, path: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields each field of a type in JSON, at any depth, with its metadata."""
    if not isinstance(kind, dict):
        return
    for item in kind.get("fields", ()):
        name = f"{path}.{item['name']}" if path else item["name"]
        yield name, item.get("metadata") or {}
        yield from _fields(item["type"], name)
    for part in ("elementType", "keyType", "valueType"):
        yield from _fields(kind.get(part), path)


def _show_time(millis: int) -> str | None:
    """Formats a time for statistics, in milliseconds; None beyond year 9999."""
    seconds, rest = divmod(millis, 1000)
    try:
        when = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return None
    return f"{when:%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"
