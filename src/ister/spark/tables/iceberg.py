"""An Iceberg table, through pyiceberg: any catalog that it knows, a SQL catalog by default.

    data files of tasks ─► one transaction: add files, `ister.offsets.<topic>`, a snapshot

Owns: how files and ranges become one snapshot of the table. Does not own: the table's upkeep: files
that no snapshot names are collected by whatever removes orphan files of the catalog's tables.

The ranges are properties of the table, which outlive its snapshots. Each commit appends to the
snapshot that was looked at and to no other one (an append without files, too, if all that there is
to say is that offsets were passed over): whoever else commits in between makes it fail, and it is
checked and tried anew. pyiceberg's own repetitions are off for our commits: they would put our
ranges over those of another export. So is its tidying after a commit that was called a failure: a
request that was repeated on its way fails although it has happened, and its manifests are the
table's. Whether it has, the table itself is asked.

What a crash leaves, and a commit that came second: files, and manifests, that no snapshot names.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from ister import failpoints
from ister.errors import (
    CommitUnknownError,
    ConfigError,
    ConflictError,
    IsterError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.extras import missing_extra
from ister.objectstore.backends import hidden_values
from ister.objectstore.store_errors import redact
from ister.spark.tables.base import PUBLISH_DATE, Addition, DataFile, Layout
from ister.spark.tables.columns import fit
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

__all__ = ["IcebergTable"]

_log = logging.getLogger("ister.spark.tables")

_OFFSETS: Final = "ister.offsets."
_ID: Final = "ister.commit-id"
_RETRIES: Final = "commit.retry.num-retries"
_PAYLOAD_METRICS: Final = "write.metadata.metrics.column.payload"
_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.05
_SHOWN_CHARACTERS: Final = 300
_SQLITE: Final = "sqlite:///"
_DAY_FIELD: Final = "publish_time_day"


class _RefusedError(Exception):
    """A catalog says that a commit has not happened: pyiceberg does not know this word."""


class _NothingIsTidied:
    """A catalog whose refusals do not make pyiceberg delete what it takes for uncommitted."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def commit_table(self, *arguments: Any) -> CommitTableResponse:  # noqa: ANN401 - its own
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 - an extra

        try:
            return self._catalog.commit_table(*arguments)
        except CommitFailedException as error:
            raise _RefusedError(str(error)) from error

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it has
        return getattr(self._catalog, name)


class IcebergTable:
    """See the module header."""

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
        self._name = name
        self._properties = dict(catalog)
        self._catalog_name = self._properties.pop("name", "ister")
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - pauses
        self._opened: Catalog | None = None
        self._hidden = hidden_values(self._properties)
        where = self._properties.get("warehouse") or self._properties.get("uri", "")
        self.location = f"{redact(where, self._hidden)}#{name}"

    # -- what it is -------------------------------------------------------------------------

    def open(self, wanted: pa.Schema) -> Layout:
        """Makes the table, by day of `publish_time`, or adds the columns that it lacks."""
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
        """Whether files are divided by date.

        Raises:
            ConflictError: The table is partitioned in another way.
        """
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
                hint="an export takes tables that are partitioned by day(publish_time), or by "
                f"{PUBLISH_DATE}, or not",
            )
        return False

    def _columns(self, table: _Iceberg) -> tuple[pa.Schema, set[str]]:
        schema = table.schema()
        required = {item.name for item in schema.fields if item.required}
        return schema.as_arrow(), required

    def coverage(self) -> Coverage:
        """What the table's properties say."""
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
        """It is what catalogs are for."""
        return True

    def target(self, run: str) -> FileTarget:
        """The table's `data` folder."""
        with self._errors("the table cannot be read"):
            table = self._catalog().load_table(self._name)
        directory = local_path(table.location())
        if directory is not None:
            # Durable, unlike what pyiceberg itself writes to a local disk.
            storage = Storage("fs", directory)
            return StoreTarget(storage=storage, folder="data", partition=_DAY_FIELD)
        return IcebergTarget(location=table.location(), properties=dict(table.io.properties))

    def renew(self, run: str) -> None:
        """Nothing: what is not committed is left alone by us."""

    def end(self, run: str) -> None:
        """Nothing."""

    def _sqlite(self) -> str | None:
        """The file of a catalog in SQLite; None for any other."""
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
            return None  # opening the catalog would make it
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
        """One snapshot: files, and the topic's ranges."""
        self._catalog()
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 - an extra

        pause = threading.Event()
        for attempt in range(_ATTEMPTS):
            with self._errors("the table cannot be read"):
                table = self._load()
            if table is None:
                raise ConflictError("the table is gone", path=self.location)
            after = self._coverage(table).add(
                addition.topic, addition.incarnation, addition.epoch, addition.ranges
            )
            self._prove(table, addition)
            with self._errors("the table does not take the files"):
                transaction = self._prepare(table, addition, after)
            check()
            failpoints.reach("export.before_table_commit")
            try:
                transaction.commit_transaction()
            except (CommitFailedException, _RefusedError):
                if self._has(addition.id):
                    break
                pause.wait(_PAUSE_SECONDS * self._rng.uniform(0, 2 ** min(attempt, 6)))
                continue
            except Exception as error:  # of a catalog, a database driver, a store
                if self._has(addition.id):
                    break
                raise self._unknown() from error  # it may still come
            break
        else:
            raise UnavailableError(
                f"{_ATTEMPTS} other commits came first", path=self.location, hint="run it again"
            )
        failpoints.reach("export.after_table_commit")

    def _prove(self, table: _Iceberg, addition: Addition) -> None:
        base = table.location().rstrip("/")

        def size_of(path: str) -> int | None:
            with self._errors("a file of the table cannot be looked at"):
                try:
                    return len(table.io.new_input(f"{base}/{path}"))
                except FileNotFoundError:
                    return None

        prove_files(
            addition, size_of, location=base, is_local=local_path(table.location()) is not None
        )

    def _prepare(self, table: _Iceberg, addition: Addition, after: Coverage) -> Transaction:
        # Only this value says so, not the table.
        properties = {**table.metadata.properties, _RETRIES: "0", _PAYLOAD_METRICS: "none"}
        table.metadata = table.metadata.model_copy(update={"properties": properties})
        table.catalog = cast("Catalog", _NothingIsTidied(table.catalog))
        base = table.location().rstrip("/")
        transaction = table.transaction()
        transaction.set_properties(
            {f"{_OFFSETS}{addition.topic}": after.topic_to_json(addition.topic)}
        )
        transaction.add_files(
            [f"{base}/{file.path}" for file in addition.files],
            snapshot_properties={
                _ID: addition.id,
                "ister.topic": addition.topic,
                "ister.ranges": str([list(item) for item in addition.ranges[:100]]),
            },
            # Their names are unlike any others.
            check_duplicate_files=False,
        )
        return transaction

    def _has(self, id: str) -> bool:
        """Whether a commit is in the table whose answer was an error.

        Raises:
            CommitUnknownError: That cannot be found out.
        """
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

    # -- leftovers --------------------------------------------------------------------------

    def discard(self, target: FileTarget, files: Sequence[DataFile]) -> None:
        """Removes files that were never committed."""
        for file in files:
            try:
                target.delete(file.path)
            except IsterError as error:
                _log.info("a file stays", extra={"path": file.path, "error": str(error)})

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Nothing: what removes orphan files of the catalog's tables does it."""
        return 0

    def close(self) -> None:
        """Closes the catalog."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # -- errors -----------------------------------------------------------------------------

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Errors of catalogs, in our words."""
        try:
            yield
        except IsterError:
            raise
        except Exception as error:  # of a catalog, a database driver, a store
            raise self._mapped(what, error) from error

    def _unknown(self) -> CommitUnknownError:
        return CommitUnknownError(
            "whether the commit is in the table is not known",
            path=self.location,
            hint="run it again: it finds out",
        )

    def _mapped(self, what: str, error: Exception) -> IsterError:
        name = type(error).__name__
        text = redact(str(error), self._hidden).partition("\n")[0][:_SHOWN_CHARACTERS]
        if name in ("ForbiddenError", "UnauthorizedError", "AuthorizationExpiredError"):
            return PermissionDeniedError(f"{what}: {text}", path=self.location)
        if isinstance(error, ValueError):
            return ConflictError(f"{what}: {text}", path=self.location)
        return UnavailableError(f"{what}: {name}: {text}", path=self.location)
