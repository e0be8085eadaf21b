"""An Iceberg table, through pyiceberg: any catalog that it knows, a SQL catalog by default.

    data files of tasks ─► one transaction: a snapshot with files and `ister.coverage`,
                           and the properties `ister.offsets.<topic>` …, `ister.last`

Owns: how files and ranges become one snapshot of the table. Does not own: the table's upkeep: the
catalog's own tools remove orphan files; which column is which of ours (`column_ids`).

Each of our snapshots records all offsets that the table has of all topics: the newest one among
the ancestors of the current snapshot counts, so a table that was rolled back has what it had then.
The same record is in the table's properties, which outlive snapshots. It counts if none of ours is
left among the ancestors, and if the last of ours is known to have been one: the oldest ancestor
that is left names it as its parent, or the table still has the last row that was recorded.

Each commit appends to the snapshot that was read and to no other one (also an append without files,
to record that offsets were skipped): a commit of another program in between makes it fail, and it
is checked and tried again. Files have the ids of the table's columns in them, so it does not matter
what a column is called when they are read. pyiceberg's own retries are off for these commits,
because they would overwrite the ranges of another export. So is its cleanup after a failed commit:
a request that was repeated on its way fails although it succeeded, and its manifests belong to the
table. The table tells whether it did.

What a crash, or a lost race, leaves: files and manifests that no snapshot names.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ister.base import failpoints
from ister.base.extras import missing_extra
from ister.errors import (
    ConfigError,
    ConflictError,
    CorruptDataError,
    IsterError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.objectstore.backends import hidden_values
from ister.objectstore.store_errors import redact
from ister.spark.tables.base import (
    PUBLISH_DATE,
    SHOWN_CHARACTERS,
    Addition,
    Layout,
    Table,
    prove_files,
)
from ister.spark.tables.column_ids import (
    Path,
    decode_ids,
    encode_ids,
    ids_of,
    places_of,
    to_ours,
    to_table,
)
from ister.spark.tables.columns import fit
from ister.spark.tables.ranges import Coverage
from ister.spark.tables.targets import (
    FileTarget,
    IcebergTarget,
    Storage,
    StoreTarget,
    local_path,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile as IcebergDataFile
    from pyiceberg.table import CommitTableResponse, Transaction
    from pyiceberg.table import Table as _Iceberg
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import TableRequirement, TableUpdate

_OFFSETS: Final = "ister.offsets."
_LAST: Final = "ister.last"
_COLUMNS: Final = "ister.columns"
_COVERAGE: Final = "ister.coverage"
_ID: Final = "ister.commit-id"
_PICKED_FROM: Final = "source-snapshot-id"
"""A snapshot that was picked has the rows of another one, which is not among its ancestors."""
_FORMAT_MAX: Final = 2
_RETRIES: Final = "commit.retry.num-retries"
_MERGES: Final = "commit.manifest-merge.enabled"
"""pyiceberg's default adds a manifest with every commit, and each commit lists them all."""
_PAYLOAD_METRICS: Final = "write.metadata.metrics.column.payload"
_SQLITE: Final = "sqlite:///"
_DAY_FIELD: Final = "publish_time_day"
_SHOWN_TOPICS: Final = 100
_SHOWN_RANGES: Final = 10


class _Last(msgspec.Struct, frozen=True, kw_only=True):
    """Our last commit, as the table's properties have it."""

    snapshot: int
    row: tuple[str, int] | None = None


class _RefusedError(Exception):
    """A catalog rejected a commit; not an exception that pyiceberg knows."""


class _WithoutCleanup:
    """A catalog after whose rejections pyiceberg deletes nothing."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def commit_table(
        self,
        table: _Iceberg,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 - an extra

        try:
            return self._catalog.commit_table(table, requirements, updates)
        except CommitFailedException as error:
            raise _RefusedError(str(error)) from error

    def __getattr__(self, name: str) -> object:
        return getattr(self._catalog, name)


class IcebergTable(Table):
    """An Iceberg table; see the module header."""

    def __init__(
        self,
        name: str,
        catalog: Mapping[str, str],
        *,
        rng: random.Random | None = None,
    ) -> None:
        """A table of a catalog."""
        super().__init__(rng)
        self._name = name
        self._properties = dict(catalog)
        self._catalog_name = self._properties.pop("name", "ister")
        self._opened: Catalog | None = None
        self._hidden = hidden_values(self._properties)
        where = self._properties.get("warehouse") or self._properties.get("uri", "")
        self.location = f"{redact(where, self._hidden)}#{name}"

    # -- what it is -------------------------------------------------------------------------

    def open(self, wanted: pa.Schema) -> Layout:
        """Creates the table, partitioned by day of `publish_time`, or adds missing columns."""
        with self._errors("the table cannot be opened"):
            table = self._load()
            if table is None:
                table = self._create(wanted)
            known = self._known_columns(table)
            by_date = self._check_partitions(table, known)
            existing, required = self._columns(table)
            places = places_of(wanted, known, ids_of(existing), where=self.location)
            schema, added = fit(
                existing,
                to_table(wanted, places),
                path=self.location,
                nested=True,
                is_required=required.__contains__,
            )
            with table.transaction() as change:
                if added:
                    with change.update_schema() as update:
                        update.union_by_name(pa.schema(added))
                ids = ids_of(change.table_metadata.schema().as_arrow())
                now = {**known, **{path: ids[place] for path, place in places.items() if path}}
                if now != known:
                    change.set_properties({_COLUMNS: encode_ids(now)})
            if PUBLISH_DATE in existing.names:
                schema = schema.append(pa.field(PUBLISH_DATE, pa.date32()))
            return Layout(schema=to_ours(schema, places, ids), by_date=by_date)

    def _known_columns(self, table: _Iceberg) -> Mapping[Path, int]:
        return decode_ids(table.properties.get(_COLUMNS, "[]"), where=self.location)

    def _create(self, wanted: pa.Schema) -> _Iceberg:
        from pyiceberg.exceptions import TableAlreadyExistsError  # noqa: PLC0415 - an extra
        from pyiceberg.transforms import DayTransform  # noqa: PLC0415

        if (file := self._sqlite()) is not None:
            os.makedirs(os.path.dirname(file), exist_ok=True)
        catalog = self._catalog()
        namespace = self._name.rpartition(".")[0]
        catalog.create_namespace_if_not_exists(namespace)
        try:
            with (
                catalog.create_table_transaction(self._name, schema=wanted) as making,
                making.update_spec() as spec,
            ):
                spec.add_field("publish_time", DayTransform(), _DAY_FIELD)
        except TableAlreadyExistsError:
            pass  # another export was faster
        return catalog.load_table(self._name)

    def _check_partitions(self, table: _Iceberg, known: Mapping[Path, int]) -> bool:
        """Returns whether files are divided by date."""
        ours = {number: path[0] for path, number in known.items() if len(path) == 1}
        fields = [
            (
                ours.get(item.source_id) or table.schema().find_column_name(item.source_id),
                str(item.transform),
            )
            for item in table.spec().fields
        ]
        if fields in ([("publish_time", "day")], [(PUBLISH_DATE, "identity")]):
            return True
        if fields:
            shown = ", ".join(f"{transform}({column})" for column, transform in fields)
            raise ConflictError(
                f"the table is partitioned by {shown}",
                path=self.location,
                hint="export into a table that is partitioned by day(publish_time), by "
                f"{PUBLISH_DATE}, or not partitioned",
            )
        return False

    def _columns(self, table: _Iceberg) -> tuple[pa.Schema, set[str]]:
        """Returns the table's columns, and those that may not be null."""
        schema = table.schema()
        if table.metadata.format_version > _FORMAT_MAX:
            raise ConflictError(
                f"the table has the format version {table.metadata.format_version}, and exports "
                f"write {_FORMAT_MAX}",
                path=self.location,
                hint="export into another table, and copy from there with Spark",
            )
        required = {item.name for item in schema.fields if item.required}
        return schema.as_arrow(), required

    def coverage(self) -> Coverage:
        """Reads the record of the table's current snapshot."""
        with self._errors("the table cannot be read"):
            table = self._load()
            return Coverage() if table is None else self._coverage(table)

    def _coverage(self, table: _Iceberg) -> Coverage:
        snapshots = {item.snapshot_id: item for item in table.metadata.snapshots}
        last, known = self._last(table)
        at = table.metadata.current_snapshot_id
        ancestors = set()
        while at is not None and (found := snapshots.get(at)) is not None:
            ancestors.add(at)
            summary = _summary_of(found)
            if (text := summary.get(_COVERAGE)) is not None:
                before = None if known is None or at == last else known
                return replace(Coverage.from_json(text, path=self.location), before=before)
            if (picked := summary.get(_PICKED_FROM)) is not None:
                source = snapshots.get(int(picked))
                if source is None or _COVERAGE in _summary_of(source):
                    raise self._unknown_coverage(known, f"the snapshot {picked} was picked")
            at = found.parent_snapshot_id
        if known is None:
            return Coverage()
        if at is None and ancestors & _ancestors(snapshots, last):
            return Coverage(before=known)  # rolled back to before the first export
        if at == last or known.row is None or self._has_row(table, *known.row):
            return known
        raise self._unknown_coverage(
            known, "the table was replaced, or its snapshots have expired since the last export"
        )

    def _last(self, table: _Iceberg) -> tuple[int | None, Coverage | None]:
        """Returns our last snapshot, and its record; None if there was none."""
        text = table.properties.get(_LAST)
        if text is None:
            return None, None
        texts = {
            name.removeprefix(_OFFSETS): value
            for name, value in table.properties.items()
            if name.startswith(_OFFSETS)
        }
        try:
            last = msgspec.json.decode(text, type=_Last)
        except msgspec.MsgspecError as error:
            raise CorruptDataError(
                f"the table's property {_LAST} is invalid: {error}",
                path=self.location,
                hint="another program changed it; export into another table",
            ) from error
        return last.snapshot, Coverage.from_topics(texts, row=last.row, path=self.location)

    def _unknown_coverage(self, known: Coverage | None, why: str) -> ConflictError:
        exported = "" if known is None else f"; {known.shown()} were exported"
        return ConflictError(
            f"the table's snapshots do not say any more which offsets it has: {why}{exported}",
            path=self.location,
            hint="export into another table",
        )

    def _has_row(self, table: _Iceberg, topic: str, offset: int) -> bool:
        from pyiceberg.expressions import And, EqualTo  # noqa: PLC0415 - an extra

        schema, known = table.schema(), self._known_columns(table)
        names = [
            schema.find_column_name(known.get((name,), -1)) or name for name in ("topic", "offset")
        ]
        if not set(names) <= set(schema.column_names):
            return False
        rows = table.scan(
            # mypy sees the constructors that pydantic makes.
            row_filter=And(
                EqualTo(names[0], topic),  # type: ignore[call-arg,arg-type]
                EqualTo(names[1], offset),  # type: ignore[call-arg,arg-type]
            ),
            selected_fields=(names[1],),
            limit=1,
        )
        return len(rows.to_arrow()) > 0

    def has_exclusive_commits(self) -> bool:
        """Returns True: a catalog guarantees it."""
        return True

    def target(self, run: str) -> FileTarget:
        """Returns the table's `data` folder."""
        with self._errors("the table cannot be read"):
            table = self._catalog().load_table(self._name)
        directory = local_path(table.location())
        if directory is not None:
            # Durable, unlike what pyiceberg itself writes to a local disk.
            storage = Storage("fs", directory)
            return StoreTarget(storage=storage, folder="data", partition=_DAY_FIELD)
        return IcebergTarget(location=table.location(), properties=dict(table.io.properties))

    def _sqlite(self) -> str | None:
        """Returns the file of a catalog in SQLite; None for any other."""
        uri = self._properties.get("uri", "")
        return uri.removeprefix(_SQLITE) if uri.startswith(_SQLITE) else None

    def _catalog(self) -> Catalog:
        if self._opened is None:
            try:
                from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise missing_extra("an Iceberg table", "lakehouse", error) from error
            try:
                self._opened = load_catalog(self._catalog_name, **self._properties)
            except ImportError as error:
                raise missing_extra("this catalog", "lakehouse", error) from error
            except ValueError as error:
                text = redact(str(error), self._hidden)
                raise ConfigError(f"the catalog's properties: {text}") from error
        return self._opened

    def _load(self) -> _Iceberg | None:
        if (file := self._sqlite()) is not None and not os.path.exists(file):
            return None  # opening the catalog would create it
        catalog = self._catalog()
        from pyiceberg.exceptions import (  # noqa: PLC0415 - an extra
            NoSuchNamespaceError,
            NoSuchTableError,
        )

        try:
            return catalog.load_table(self._name)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    # -- commits ----------------------------------------------------------------------------

    def commit(self, addition: Addition, *, check: Callable[[], None]) -> None:
        """Commits one snapshot: files, and the ranges of their topics."""
        self._catalog()
        self._retry_commit(lambda: self._try_commit(addition, check))
        failpoints.reach("export.after_table_commit")

    def _try_commit(self, addition: Addition, check: Callable[[], None]) -> bool:
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 - an extra

        with self._errors("the table cannot be read"):
            table = self._load()
        if table is None:
            raise ConflictError("the table was deleted during the export", path=self.location)
        after = addition.added_to(self._coverage(table))
        self._prove(table, addition)
        with self._errors("the table does not accept the files"):
            transaction = self._prepare(table, addition, after)
        check()
        failpoints.reach("export.before_table_commit")
        try:
            transaction.commit_transaction()
        except (CommitFailedException, _RefusedError):
            return self._has(addition.id)
        except Exception as error:  # of a catalog, a database driver, a store
            if not self._has(addition.id):
                raise self._unknown() from error  # it may still come
        return True

    def _prove(self, table: _Iceberg, addition: Addition) -> None:
        base = table.location().rstrip("/")

        def size_of(path: str) -> int | None:
            with self._errors("a file of the table cannot be read"):
                try:
                    return len(table.io.new_input(f"{base}/{path}"))
                except FileNotFoundError:
                    return None

        prove_files(
            addition, size_of, location=base, is_local=local_path(table.location()) is not None
        )

    def _prepare(self, table: _Iceberg, addition: Addition, after: Coverage) -> Transaction:
        # Changed in this object only, not in the table.
        properties = {
            **table.metadata.properties,
            _RETRIES: "0",
            _PAYLOAD_METRICS: "none",
            _MERGES: "true",
        }
        table.metadata = table.metadata.model_copy(update={"properties": properties})
        table.catalog = cast("Catalog", _WithoutCleanup(table.catalog))
        base = table.location().rstrip("/")
        transaction = table.transaction()
        files = [
            self._data_file(transaction.table_metadata, table.io, f"{base}/{file.path}")
            for file in addition.files
        ]
        update = transaction.update_snapshot(
            {_ID: addition.id, _COVERAGE: after.to_json(), **_summary(addition)}
        )
        with update.merge_append() as append:
            for file in files:
                append.append_data_file(file)
        last = _Last(snapshot=append.snapshot_id, row=after.row)
        texts = {f"{_OFFSETS}{topic}": after.topic_to_json(topic) for topic in after.topics}
        texts[_LAST] = msgspec.json.encode(last).decode()
        # Of topics that the table had before it was rolled back.
        old = [name for name in properties if name.startswith(_OFFSETS) and name not in texts]
        if old:
            transaction.remove_properties(*old)
        return transaction.set_properties(
            {name: text for name, text in texts.items() if properties.get(name) != text}
        )

    @staticmethod
    def _data_file(metadata: TableMetadata, files: FileIO, path: str) -> IcebergDataFile:
        """Returns what the table says of a file, whose columns have ids."""
        from pyiceberg.io.pyarrow import (  # noqa: PLC0415 - an extra
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
            pyarrow_to_schema,
        )
        from pyiceberg.manifest import (  # noqa: PLC0415
            DataFile,
            DataFileContent,
            FileFormat,
        )

        file = files.new_input(path)
        with file.open() as stream:
            footer = pq.read_metadata(stream)
        schema = pyarrow_to_schema(footer.schema.to_arrow_schema())
        statistics = data_file_statistics_from_parquet_metadata(
            footer,
            stats_columns=compute_statistics_plan(schema, metadata.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(schema),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=statistics.partition(metadata.spec(), metadata.schema()),
            file_size_in_bytes=len(file),
            sort_order_id=None,
            spec_id=metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def _has(self, id: str) -> bool:
        """Returns whether a commit that got an error is in the table."""
        try:
            table = self._load()
        except Exception as error:
            raise self._unknown() from error
        if table is None:
            return False
        return any(
            item.summary is not None and item.summary.additional_properties.get(_ID) == id
            for item in table.metadata.snapshots
        )

    def close(self) -> None:
        """Closes the catalog."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _mapped(self, what: str, error: Exception) -> IsterError:
        name = type(error).__name__
        text = redact(str(error), self._hidden).partition("\n")[0][:SHOWN_CHARACTERS]
        if name in ("ForbiddenError", "UnauthorizedError", "AuthorizationExpiredError"):
            return PermissionDeniedError(f"{what}: {text}", path=self.location)
        if isinstance(error, ValueError):
            return ConflictError(f"{what}: {text}", path=self.location)
        return UnavailableError(f"{what}: {name}: {text}", path=self.location)


def _summary_of(snapshot: Snapshot) -> Mapping[str, str]:
    return {} if snapshot.summary is None else snapshot.summary.additional_properties


def _ancestors(snapshots: Mapping[int, Snapshot], last: int | None) -> set[int]:
    """Returns a snapshot and those before it, as far as they have not expired."""
    found: set[int] = set()
    at = last
    while at is not None and at in snapshots:
        found.add(at)
        at = snapshots[at].parent_snapshot_id
    return found


def _summary(addition: Addition) -> dict[str, str]:
    """Returns the snapshot's properties, for people to read; long lists are cut."""
    shown = {
        item.topic: [list(one) for one in item.ranges[:_SHOWN_RANGES]]
        for item in addition.topics[:_SHOWN_TOPICS]
    }
    return {"ister.topics": str(len(addition.topics)), "ister.ranges": json.dumps(shown)}
