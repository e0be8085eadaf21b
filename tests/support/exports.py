"""Exports without Spark: a session that runs tasks in this process, tables, and what is in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from ister.base.clock import SystemClock
from ister.config import TableFormat, load_config
from ister.spark.jobs.export_job import export
from ister.spark.location import _close_all
from ister.spark.tables.base import Addition, DataFile, Layout, Table, TopicAddition
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.opening import TablePlace, open_table
from ister.spark.tables.targets import FileTarget, close_stores
from ister.spark.tables.writing import FileMaker
from tests.integration.spark_topics import SparkPlace
from tests.support.cases import making
from tests.support.spark_here import SparkHere

TOPIC = "/default/orders"
DAY_US = 86_400_000_000
NOON_US = 1_700_000_000_000_000 // DAY_US * DAY_US + DAY_US // 2
FORMATS = ("parquet", "iceberg", "delta")


@contextmanager
def tasks_here() -> Iterator[SparkHere]:
    """A session whose tasks run in this process; what they share is closed at the end."""
    try:
        yield SparkHere()
    finally:
        close_stores()
        _close_all()


@making("tmp_path", "place")
def fresh(path: Path) -> dict[str, object]:
    """A data directory, and a directory for tables, of one case."""
    return {"tmp_path": path, "place": SparkPlace(path / "data")}


def export_here(spark, place: SparkPlace, root: Path, format: str = "parquet", **options):
    """Exports a place's topics into a table, unless `to` says where."""
    to = options.pop("to", where(root, format))
    return export(spark, place.config, to=to, format=format, **options)


# -- tables -------------------------------------------------------------------------------------


def where(root: Path, format: str, name: str = "orders") -> str:
    """A table's place, as `to` has it."""
    return str(root / format / name)


def table_at(root: Path, format: str, name: str = "orders", clock=None) -> Table:
    """A table, opened by nobody yet."""
    config = load_config({"storage": {"wal": {"dir": str(root / "wal")}}}, {})
    place = TablePlace(config=config, format=TableFormat(format))
    return open_table(where(root, format, name), place, clock=clock or SystemClock())


def rows_of(start: int, end: int, *, time_us: int = NOON_US, step_us: int = 0, **more) -> pa.Table:
    """Rows of the envelope, and of more columns."""
    count = end - start
    columns = {
        "topic": [TOPIC] * count,
        "offset": range(start, end),
        "publish_time": [time_us + number * step_us for number in range(count)],
        "producer_name": ["p"] * count,
        "payload": [b"%d" % number for number in range(start, end)],
        "attributes": [[("k", "v")]] * count,
        "routing_key": [None] * count,
        "schema_id": [None] * count,
        "schema_version": [None] * count,
    }
    arrays = [pa.array(columns[item.name], item.type) for item in ENVELOPE]
    table = pa.Table.from_arrays(arrays, schema=ENVELOPE)
    for name, values in more.items():
        table = table.append_column(name, values)
    return table


def write_files(target: FileTarget, layout: Layout, rows: pa.Table, **settings) -> list[DataFile]:
    """Files of rows, as a task writes them."""
    maker = FileMaker(
        target, layout, name="f", **{"file_bytes": 1 << 20, "zstd_level": 3, **settings}
    )
    for batch in rows.to_batches():
        maker.write(batch)
    return maker.finish()


def adding(files: list[DataFile], *ranges: tuple[int, int], **fields) -> Addition:
    """A commit of files of one topic."""
    commit_id = fields.pop("id", "one")
    return Addition(id=commit_id, topics=[part_of(files, *ranges, **fields)])


def part_of(files: list[DataFile], *ranges: tuple[int, int], **fields) -> TopicAddition:
    """What a commit has of one topic."""
    known = {"topic": TOPIC, "incarnation": "i", "epoch": 1}
    return TopicAddition(**{**known, **fields}, ranges=tuple(ranges), files=files)


def add_rows(table: Table, start: int, end: int, run: str = "r", **fields) -> None:
    """Writes and commits a range of rows."""
    layout = table.open(ENVELOPE)
    files = write_files(table.target(run), layout, rows_of(start, end, step_us=1000))
    table.commit(adding(files, (start, end), **{"id": run, **fields}), check=lambda: None)


# -- reading, by other programs -----------------------------------------------------------------


def read_table(root: Path, format: str, name: str = "orders") -> pa.Table:
    """All rows of a table, read without Ister."""
    place = where(root, format, name)
    if format == "parquet":
        query = f"""select * from read_parquet('{place}/publish_date=*/*.parquet',
            hive_partitioning=true, union_by_name=true) order by "offset" """
        return _query(query)
    if format == "delta":
        data = DeltaTable(place).to_pyarrow_table()
        with duckdb.connect() as connection:
            connection.register("data", data)
            return _arrow(connection, 'select * from data order by "offset"')
    with iceberg_catalog(root) as catalog:
        data = catalog.load_table(f"default.{name}").scan().to_arrow()
    with duckdb.connect() as connection:
        connection.register("data", data)
        return _arrow(connection, 'select * from data order by "offset"')


def _query(query: str) -> pa.Table:
    with duckdb.connect() as connection:
        return _arrow(connection, query)


def _arrow(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    connection.execute("set timezone = 'UTC'")
    return connection.sql(query).to_arrow_table()


def offsets_in(root: Path, format: str, name: str = "orders") -> list[int]:
    """The offsets of a table's rows, each as often as it is there."""
    if format == "parquet" and not list(Path(where(root, format, name)).glob("publish_date=*/*")):
        return []
    return read_table(root, format, name).column("offset").to_pylist()


def commits_in(root: Path, format: str, name: str = "orders") -> int:
    """How many commits of exports a table has got, counted without Ister."""
    place = Path(where(root, format, name))
    if format == "parquet":
        return len(list(place.glob("_ister/commits/*.json")))
    if format == "delta":
        return sum("ister.commit-id" in item for item in DeltaTable(place).history())
    with iceberg_catalog(root) as catalog:
        return len(catalog.load_table(f"default.{name}").snapshots())


# -- what people do to tables, without Ister ---------------------------------------------------


def states_of(root: Path, format: str, name: str = "orders") -> list[int]:
    """The states that a table has had and has, the oldest first: versions or snapshots."""
    if format == "delta":
        return [
            item["version"] for item in reversed(DeltaTable(where(root, format, name)).history())
        ]
    with iceberg_catalog(root) as catalog:
        found = catalog.load_table(f"default.{name}").snapshots()
        return [item.snapshot_id for item in sorted(found, key=lambda item: item.sequence_number)]


def state_of(root: Path, format: str, name: str = "orders") -> int | None:
    """The state that a table has; None if it has none."""
    if format == "delta":
        return DeltaTable(where(root, format, name)).version()
    with iceberg_catalog(root) as catalog:
        return catalog.load_table(f"default.{name}").metadata.current_snapshot_id


def roll_back(root: Path, format: str, state: int, name: str = "orders") -> None:
    """Puts a table back to a state that it had."""
    if state == state_of(root, format, name):
        return
    if format == "delta":
        DeltaTable(where(root, format, name)).restore(state)
        return
    with (
        iceberg_catalog(root) as catalog,
        catalog.load_table(f"default.{name}").manage_snapshots() as change,
    ):
        change.set_current_snapshot(snapshot_id=state)


def forget_history(root: Path, format: str, name: str = "orders") -> None:
    """What upkeep does: only the current state of a table is left."""
    if format == "iceberg":
        with iceberg_catalog(root) as catalog:
            table = catalog.load_table(f"default.{name}")
            current = table.metadata.current_snapshot_id
            table.maintenance.expire_snapshots().by_ids(
                [item.snapshot_id for item in table.snapshots() if item.snapshot_id != current]
            ).commit()
        return
    table = DeltaTable(where(root, format, name))
    table.create_checkpoint()
    log = Path(where(root, format, name)) / "_delta_log"
    for number in range(table.version()):
        (log / f"{number:020d}.json").unlink(missing_ok=True)


def commit_nothing(root: Path, format: str, name: str = "orders") -> None:
    """A commit of another program, without rows."""
    if format == "delta":
        place = where(root, format, name)
        schema = pa.schema(DeltaTable(place).schema().to_arrow())
        write_deltalake(place, schema.empty_table(), mode="append")
        return
    with (
        iceberg_catalog(root) as catalog,
        catalog.load_table(f"default.{name}").transaction() as change,
        change.update_snapshot().fast_append(),
    ):
        pass


def add_foreign_rows(root: Path, format: str, start: int, end: int, name: str = "orders") -> None:
    """Rows that another program adds."""
    rows = rows_of(start, end)
    if format == "iceberg":
        with iceberg_catalog(root) as catalog:
            table = catalog.load_table(f"default.{name}")
            file = f"{table.location()}/data/theirs-{start}.parquet"
            path = Path(file.removeprefix("file://"))
            path.parent.mkdir(exist_ok=True)
            pq.write_table(rows, path)
            table.add_files([file])
        return
    day = pa.array(["2020-01-01"] * len(rows)).cast(pa.date32())
    write_deltalake(
        where(root, format, name), rows.append_column("publish_date", day), mode="append"
    )


@contextmanager
def iceberg_catalog(root: Path, warehouse: str = "iceberg"):
    """The catalog that an export makes by default."""
    directory = root / warehouse
    catalog = load_catalog(
        "ister",
        type="sql",
        uri=f"sqlite:///{directory}/catalog.db",
        warehouse=f"file://{directory}",
    )
    try:
        yield catalog
    finally:
        catalog.close()
