"""A directory of Parquet files: what a crash leaves, lost answers, directories of others."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from export_rig import (
    TOPIC,
    add_rows,
    adding,
    offsets_in,
    rows_of,
    table_at,
    tasks_here,
    write_files,
)
from ister import failpoints
from ister.clock import ManualClock
from ister.errors import CommitUnknownError, ConflictError, CorruptDataError, UnavailableError
from ister.objectstore.base import Capabilities
from ister.objectstore.memory import MemoryObjectStore
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.parquet_directory import ParquetDirectory
from ister.spark.tables.targets import Storage, StoreTarget


@pytest.fixture(autouse=True)
def _closed():
    with tasks_here():
        yield


class _KilledError(BaseException):
    """Ends whatever is under way, as a killed process does."""


def _kill_at(visit: int):
    visits = []

    def act() -> None:
        visits.append(1)
        if len(visits) == visit:
            raise _KilledError

    return act


@pytest.mark.parametrize("visit", [1, 2, 3])
def test_files_get_their_names_after_a_crash(tmp_path, visit):
    """The commit counts from its record on; the next export finishes what is left of it."""
    table = table_at(tmp_path, "parquet")
    layout = table.open(ENVELOPE)
    rows = rows_of(0, 30, step_us=3_600_000_000)
    files = write_files(table.target("a"), layout, rows)
    assert len(files) == 2
    # After the record, after the first file, after the second.
    points = ["export.after_table_commit", "export.after_publish"]
    for point in points[: 1 if visit == 1 else 2][-1:]:
        failpoints.arm(point, _kill_at(max(visit - 1, 1)))
    with pytest.raises(_KilledError):
        table.commit(adding(files, (0, 30)), check=lambda: None)
    failpoints.disarm()
    table.close()
    before = offsets_in(tmp_path, "parquet")
    assert len(before) < 30 or visit == 3
    again = table_at(tmp_path, "parquet")
    assert again.coverage().of(TOPIC, "i") == ((0, 30),)
    again.open(ENVELOPE)
    assert offsets_in(tmp_path, "parquet") == list(range(30))
    assert not list((tmp_path / "parquet/orders/_ister/pending").rglob("*.parquet"))
    again.close()


def test_leftovers_go_after_a_grace(tmp_path):
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    [left] = write_files(table.target("dead"), table.open(ENVELOPE), rows_of(5, 9))
    path = tmp_path / "parquet/orders" / left.path
    assert table.tidy(3600) == 0
    assert path.exists()
    os.utime(path, (0, 0))
    assert table.tidy(3600) == 1
    assert not path.exists()
    assert offsets_in(tmp_path, "parquet") == list(range(5))
    table.close()


def test_readers_pass_over_what_is_not_committed(tmp_path):
    """Names that begin with `_` and `.` are not data to Spark, pyarrow and DuckDB's pattern."""
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    write_files(table.target("b"), table.open(ENVELOPE), rows_of(5, 9))
    found = pq.read_table(tmp_path / "parquet/orders", columns=["offset"])
    assert sorted(found.column("offset").to_pylist()) == list(range(5))
    table.close()


def test_a_directory_of_somebody_else_is_taken_if_it_is_by_date(tmp_path):
    home = tmp_path / "parquet/orders/publish_date=2020-01-01"
    home.mkdir(parents=True)
    theirs = rows_of(0, 2).append_column("note", pa.array(["a", "b"]))
    pq.write_table(theirs, home / "theirs.parquet")
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    assert len(offsets_in(tmp_path, "parquet")) == 7
    with pytest.raises(ConflictError, match="note"):
        table_at(tmp_path, "parquet").open(pa.schema([*ENVELOPE, ("note", pa.int64())]))
    table.close()


@pytest.mark.parametrize("place", ["x.parquet", "day=1/x.parquet", "publish_date=1/b/x.parquet"])
def test_a_directory_with_another_layout_is_refused(tmp_path, place):
    path = tmp_path / "parquet/orders" / place
    path.parent.mkdir(parents=True)
    pq.write_table(rows_of(0, 2), path)
    table = table_at(tmp_path, "parquet")
    with pytest.raises(ConflictError, match="publish_date"):
        table.open(ENVELOPE)
    table.close()


def test_a_commit_that_cannot_be_read_is_told(tmp_path):
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    [record] = (tmp_path / "parquet/orders/_ister/commits").iterdir()
    record.write_text("{}")
    with pytest.raises(CorruptDataError):
        table.coverage()
    table.close()


# -- stores that fail -----------------------------------------------------------------------------


class _Store(MemoryObjectStore):
    """Loses answers of commits, before or after they have happened."""

    def __init__(self) -> None:
        super().__init__(clock=ManualClock())
        self.lost: list[str] = []
        self.ignores_conditions = False

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        what = self.lost.pop(0) if self.lost else ""
        if what != "before":
            super().put(key, data, if_absent=if_absent)
        if what:
            raise UnavailableError("no answer")

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=not self.ignores_conditions, copy=True)


@pytest.fixture
def store(monkeypatch):
    """What all storages are, in this test."""
    found = _Store()
    monkeypatch.setattr(Storage, "open", lambda self: found)
    monkeypatch.setattr(Storage, "store", lambda self: found)
    return found


def _in_memory() -> ParquetDirectory:
    return ParquetDirectory(Storage("s3", "s3://b/t"), clock=ManualClock())


@pytest.mark.parametrize("lost", [["after"], ["before"], ["before", "after"]])
def test_a_lost_answer_is_found_out(store, lost):
    table = _in_memory()
    layout = table.open(ENVELOPE)
    files = write_files(table.target("a"), layout, rows_of(0, 5))
    store.lost = list(lost)
    table.commit(adding(files, (0, 5)), check=lambda: None)
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    keys = [info.key for info in store.list("")]
    assert len([key for key in keys if key.startswith("publish_date=")]) == 1
    assert not [key for key in keys if "pending" in key]
    assert len([key for key in keys if "commits" in key]) == 1


def test_an_answer_that_stays_lost_is_told_and_costs_nothing(store):
    table = _in_memory()
    layout = table.open(ENVELOPE)
    target = table.target("a")
    files = write_files(target, layout, rows_of(0, 5))
    store.lost = ["before"] * 9
    with pytest.raises(CommitUnknownError):
        table.commit(adding(files, (0, 5)), check=lambda: None)
    store.lost = []
    table.commit(adding(files, (0, 5)), check=lambda: None)
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)


def test_a_commit_done_under_the_same_id_is_not_done_again(store):
    table = _in_memory()
    layout = table.open(ENVELOPE)
    files = write_files(table.target("a"), layout, rows_of(0, 5))
    table.commit(adding(files, (0, 5)), check=lambda: None)
    table.commit(adding(files, (0, 5)), check=lambda: None)
    assert len(list(store.list("_ister/commits/"))) == 1


def test_a_number_that_was_forgotten_is_not_taken(store):
    """An export that slept for so long that old records are gone finds newer ones."""
    table, sleeper = _in_memory(), _in_memory()
    for number in range(3):
        add_rows(table, number, number + 1, run=str(number))
    late = write_files(sleeper.target("z"), sleeper.open(ENVELOPE), rows_of(9, 10))

    def forget() -> None:
        add_rows(table, 3, 4, run="3")
        add_rows(table, 4, 5, run="4")
        for number in range(4):
            store.delete(f"_ister/commits/{number:020d}.json")

    with pytest.raises(ConflictError):
        sleeper.commit(adding(late, (9, 10), id="z"), check=forget)
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)


def test_a_store_without_conditions_is_known(store):
    assert _in_memory().has_exclusive_commits()
    store.ignores_conditions = True
    assert not _in_memory().has_exclusive_commits()


def test_names_of_files(store):
    target = StoreTarget(storage=Storage("s3", "s3://b/t"), folder="data", partition="d")
    assert target.path("2020-01-01", "x") == "data/d=2020-01-01/x"
    assert target.path(None, "x") == "data/x"


def test_a_record_says_what_is_in_the_table(store):
    table = _in_memory()
    add_rows(table, 0, 5)
    [info] = store.list("_ister/commits/")
    fields = json.loads(store.read(info.key, 0, 1 << 20))
    assert fields["coverage"]["topics"][TOPIC]["i"]["ranges"] == [[0, 5]]
    assert [item["path"].startswith("publish_date=") for item in fields["files"]] == [True]
