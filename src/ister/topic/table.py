"""Topics as tables, for pandas, Polars, DuckDB and notebooks.

Owns: nothing. Each use reads the range again, so a table without an end includes new messages.
Libraries are loaded on first use; none is a dependency.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Final

from ister.base.extras import missing_library
from ister.base.notebook import render_table

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from ister.topic.topic import Topic

_ROWS_SHOWN: Final = 10


class TopicTable:
    """Messages of a topic as rows. Made by `table` of a topic or a client.

    Everything that accepts Arrow streams accepts it: `polars.DataFrame(table)`,
    `duckdb.from_arrow(table.read_arrow())`, `pyarrow.table(table)`.
    """

    def __init__(self, name: str, open_reader: Callable[[], pa.RecordBatchReader]) -> None:
        self.name = name
        """The topic's name."""
        self._open_reader = open_reader

    def read_arrow(self) -> pa.RecordBatchReader:
        """The rows as record batches, read while they are consumed; for large topics."""
        return self._open_reader()

    def to_arrow(self) -> pa.Table:
        """All rows in memory, as an Arrow table."""
        return self._open_reader().read_all()

    def to_pandas(self) -> pd.DataFrame:
        """All rows in memory, as a pandas frame; attributes are dicts.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas  # noqa: F401, PLC0415
        except ImportError as error:
            raise missing_library("to_pandas", "pandas", error) from error
        return self.to_arrow().to_pandas(maps_as_pydicts="lossy")

    def to_polars(self) -> pl.DataFrame:
        """All rows in memory, as a Polars frame.

        Raises:
            ConfigError: Polars is not installed.
        """
        try:
            import polars  # noqa: PLC0415
        except ImportError as error:
            raise missing_library("to_polars", "polars", error) from error
        return polars.DataFrame(self.to_arrow())

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        """All rows in memory, as a DuckDB relation: `table.to_duckdb().query("t", "SELECT …")`.

        Args:
            connection: Whose relation it is; DuckDB's default connection if None.

        Raises:
            ConfigError: DuckDB is not installed.
        """
        try:
            import duckdb  # noqa: PLC0415
        except ImportError as error:
            raise missing_library("to_duckdb", "duckdb", error) from error
        return (duckdb if connection is None else connection).from_arrow(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._open_reader().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return f"<TopicTable {self.name}>"

    def _repr_html_(self) -> str:
        reader = self._open_reader()
        names, rows = reader.schema.names, list[list[object]]()
        for batch in reader:
            head = batch.slice(0, _ROWS_SHOWN - len(rows))
            rows += [list(row.values()) for row in head.to_pylist(maps_as_pydicts="lossy")]
            if len(rows) >= _ROWS_SHOWN:
                break
        note = f"the first {len(rows)} rows" if len(rows) == _ROWS_SHOWN else ""
        return render_table(f"Table {self.name}", names, rows, note=note)


class AsyncTopicTable:
    """Messages of a topic as rows. Made by `table` of an `AsyncClient`.

    The methods are those of `TopicTable`, as coroutines; threads do the work.
    """

    def __init__(
        self, table: TopicTable, batches: Callable[[], AsyncIterator[pa.RecordBatch]]
    ) -> None:
        self.name = table.name
        """The topic's name."""
        self._table = table
        self._batches = batches

    def read_arrow(self) -> AsyncIterator[pa.RecordBatch]:
        """The rows as record batches, read while they are consumed: `async for batch in …`."""
        return self._batches()

    async def to_arrow(self) -> pa.Table:
        """See `TopicTable.to_arrow`."""
        return await asyncio.to_thread(self._table.to_arrow)

    async def to_pandas(self) -> pd.DataFrame:
        """See `TopicTable.to_pandas`."""
        return await asyncio.to_thread(self._table.to_pandas)

    async def to_polars(self) -> pl.DataFrame:
        """See `TopicTable.to_polars`."""
        return await asyncio.to_thread(self._table.to_polars)

    async def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        """See `TopicTable.to_duckdb`."""
        return await asyncio.to_thread(self._table.to_duckdb, connection)

    def __repr__(self) -> str:
        return f"<AsyncTopicTable {self.name}>"


def render_topics(title: str, topics: Iterable[Topic | str]) -> str:
    """HTML with the watermarks of topics; only the name of one that is not open."""
    headers = ("topic", "state", "ack", "trimmed", "tiered", "synced", "written", "next")
    rows: list[list[object]] = []
    for topic in topics:
        if isinstance(topic, str):
            rows.append([topic, "not open", *[None] * (len(headers) - 2)])
            continue
        marks = topic.watermarks
        numbers = (marks.trimmed, marks.tiered, marks.synced, marks.written, marks.next)
        rows.append([topic.name, topic.state.value, str(topic.ack), *numbers])
    return render_table(title, headers, rows)
