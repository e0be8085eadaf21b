"""An Iceberg table, through pyiceberg: any catalog that it knows, a SQL catalog by default.

    data files of tasks ─► one transaction: add files, `ister.offsets.<topic>` …, a snapshot

Owns: how files and ranges become one snapshot of the table. Does not own: the table's upkeep: the
catalog's own tools remove orphan files.

The ranges are properties of the table, which outlive its snapshots. Each commit appends to the
snapshot that was read and to no other one (also an append without files, to record that offsets
were skipped): a commit of another program in between makes it fail, and it is checked and tried
again. pyiceberg's own retries are off for these commits, because they would overwrite the ranges of
another export. So is its cleanup after a failed commit: a request that was repeated on its way
fails although it succeeded, and its manifests belong to the table. The table tells whether it did.

What a crash, or a lost race, leaves: files and manifests that no snapshot names.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa

from ister import failpoints
from ister.errors import (
    ConfigError,
    ConflictError,
    IsterError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.extras import missing_extra
from ister.objectstore.backends import hidden_values
from ister.objectstore.store_errors import redact
from ister.spark.tables.base import PUBLISH_DATE, Addition, Layout
from ister.spark.tables.columns import fit
from ister.spark.tables.library_table import SHOWN_CHARACTERS, LibraryTable
from ister.spark.tables.proof import prove_files
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
    from pyiceberg.table import CommitTableResponse, Transaction
    from pyiceberg.table import Table as _Iceberg
    from pyiceberg.table.update import TableRequirement, TableUpdate

_OFFSETS: Final = "ister.offsets."
_ID: Final = "ister.commit-id"
_RETRIES: Final = "commit.retry.num-retries"
_MERGES: Final = "commit.manifest-merge.enabled"
"""pyiceberg's default adds a manifest with every commit, and each commit lists them all."""
_PAYLOAD_METRICS: Final = "write.metadata.metrics.column.payload"
_SQLITE: Final = "sqlite:///"
_DAY_FIELD: Final = "publish_time_day"
_SHOWN_TOPICS: Final = 100
_SHOWN_RANGES: Final = 10


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


class IcebergTable(LibraryTable):
    """An Iceberg table; see the module header."""

    def __init__(
        self,
        name: str,
        catalog: Mapping[str, str],
        *,
        rng: random.Random | None = None,
    ) -> None:
        """A table of a catalog.

        Args:
            name: `<namespace>.<table>`.
            catalog: The catalog's properties, among them its `name`, as pyiceberg has them.
            rng: For the pauses between attempts.
        """
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
            by_date = self._check_partitions(table)
            existing, required = self._columns(table)
            schema, added = fit(
                existing,
                wanted,
                path=self.location,
                nested=True,
                is_required=required.__contains__,
            )
            if added:
                with table.update_schema() as update:
                    update.union_by_name(pa.schema(added))
            if PUBLISH_DATE in existing.names:
                schema = schema.append(pa.field(PUBLISH_DATE, pa.date32()))
            return Layout(schema=schema, by_date=by_date)

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

    def _check_partitions(self, table: _Iceberg) -> bool:
        """Returns whether files are divided by date."""
        fields = [
            (table.schema().find_column_name(item.source_id), str(item.transform))
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
        schema = table.schema()
        required = {item.name for item in schema.fields if item.required}
        return schema.as_arrow(), required

    def coverage(self) -> Coverage:
        """Reads the table's properties."""
        with self._errors("the table cannot be read"):
            table = self._load()
        return Coverage() if table is None else self._coverage(table)

    def _coverage(self, table: _Iceberg) -> Coverage:
        texts = {
            name.removeprefix(_OFFSETS): text
            for name, text in table.properties.items()
            if name.startswith(_OFFSETS)
        }
        return Coverage.from_topics(texts, path=self.location)

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
        transaction.set_properties(
            {f"{_OFFSETS}{item.topic}": after.topic_to_json(item.topic) for item in addition.topics}
        )
        transaction.add_files(
            [f"{base}/{file.path}" for file in addition.files],
            snapshot_properties={_ID: addition.id, **_summary(addition)},
            # Their names are unique.
            check_duplicate_files=False,
        )
        return transaction

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


def _summary(addition: Addition) -> dict[str, str]:
    """Returns what the snapshot says about the commit, for people; it is cut if there is much."""
    shown = {
        item.topic: [list(one) for one in item.ranges[:_SHOWN_RANGES]]
        for item in addition.topics[:_SHOWN_TOPICS]
    }
    return {"ister.topics": str(len(addition.topics)), "ister.ranges": json.dumps(shown)}
