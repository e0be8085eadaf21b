"""A directory of Parquet files: what a crash leaves, lost answers, directories of others."""

import json
import os

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ister.base import failpoints
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    IsterError,
    UnavailableError,
)
from ister.objectstore.base import Capabilities
from ister.spark.tables.columns import ENVELOPE
from ister.spark.tables.parquet_directory import ParquetDirectory
from ister.spark.tables.targets import Storage
from tests.support.clock import ManualClock
from tests.support.exports import (
    TOPIC,
    add_rows,
    adding,
    offsets_in,
    rows_of,
    table_at,
    write_files,
)
from tests.support.memory_store import MemoryObjectStore
from tests.support.spark_here import killed_at


@pytest.mark.parametrize("visit", [0, 1, 2])
def test_files_get_their_names_after_a_crash(tmp_path, visit):
    """The commit counts from its record on; the next export finishes what is left of it."""
    table = table_at(tmp_path, "parquet")
    layout = table.open(ENVELOPE)
    rows = rows_of(0, 30, step_us=3_600_000_000)
    files = write_files(table.target("a"), layout, rows)
    assert len(files) == 2
    # After the record, after the first file, after the second.
    point = "export.after_publish" if visit else "export.after_table_commit"
    with killed_at(point, max(visit, 1)):
        table.commit(adding(files, (0, 30)), check=lambda: None)
    table.close()
    before = offsets_in(tmp_path, "parquet")
    assert len(before) < 30 or visit == 2
    again = table_at(tmp_path, "parquet")
    assert again.coverage().of(TOPIC, "i") == ((0, 30),)
    again.open(ENVELOPE)
    assert offsets_in(tmp_path, "parquet") == list(range(30))
    assert not list((tmp_path / "parquet/orders/_ister/pending").rglob("*.parquet*"))
    again.close()


def test_leftovers_go_after_a_grace(tmp_path):
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    [left] = write_files(table.target("dead"), table.open(ENVELOPE), rows_of(5, 9))
    path = tmp_path / "parquet/orders" / left.path
    assert table.tidy(3600) == 0
    assert path.exists()
    os.utime(path, (0, 0))
    # The export says that it is under way.
    assert table.tidy(3600) == 0
    os.utime(tmp_path / "parquet/orders/_ister/runs/dead", (0, 0))
    assert table.tidy(3600) == 1
    assert not (tmp_path / "parquet/orders/_ister/runs/dead").exists()
    assert not path.exists()
    assert offsets_in(tmp_path, "parquet") == list(range(5))
    table.close()


def test_readers_pass_over_what_is_not_committed(tmp_path):
    """Goal: not even by a pattern, which knows nothing of names with `_`."""
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    write_files(table.target("b"), table.open(ENVELOPE), rows_of(5, 9))
    found = pq.read_table(tmp_path / "parquet/orders", columns=["offset"])
    assert sorted(found.column("offset").to_pylist()) == list(range(5))
    pattern = tmp_path / "parquet/orders/**/*.parquet"
    assert duckdb.sql(f"SELECT count(*) FROM read_parquet('{pattern}')").fetchall() == [(5,)]
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


def test_a_store_without_conditions_is_known(store):
    assert _in_memory().has_exclusive_commits()
    store.ignores_conditions = True
    assert not _in_memory().has_exclusive_commits()


def test_a_record_says_what_is_in_the_table(store):
    table = _in_memory()
    add_rows(table, 0, 5)
    [info] = store.list("_ister/commits/")
    fields = json.loads(store.read(info.key, 0, 1 << 20))
    assert fields["coverage"]["topics"][TOPIC]["i"]["ranges"] == [[0, 5]]
    assert [item["path"].startswith("publish_date=") for item in fields["files"]] == [True]


# -- what is committed stays, whatever fails then -----------------------------------------------

_COMMITS = "_ister/commits/"


def _rows_files(store) -> list[str]:
    return [info.key for info in store.list("") if info.key.startswith("publish_date=")]


@pytest.mark.parametrize("error", [UnavailableError, CapacityError, ConflictError])
@pytest.mark.parametrize("is_lost", [False, True])
def test_whatever_fails_after_the_record_takes_nothing_back(store, error, is_lost):
    """Each call of the store after the record fails once; the next export goes on from there."""
    for number in range(30):
        table = _in_memory()
        run, start = f"r{number}", number * 10
        layout = table.open(ENVELOPE)
        files = write_files(
            table.target(run), layout, rows_of(start, start + 10, step_us=20_000_000_000)
        )
        assert len(files) > 1
        calls = []

        def fail(kind: str, key: str, calls=calls, number=number) -> None:
            if calls or (kind == "put" and key.startswith(_COMMITS)):
                calls.append((kind, key))
            if len(calls) == number + 2:
                raise error("it failed")

        # The record itself is made; what comes after it fails, before or after it has happened.
        if is_lost:
            store.after = fail
        else:
            store.before = fail
        failed = None
        try:
            table.commit(adding(files, (start, start + 10), id=run), check=lambda: None)
        except IsterError as caught:
            failed = caught
        store.before = store.after = lambda kind, key: None
        assert not isinstance(failed, ConflictError)
        again = _in_memory()
        again.open(ENVELOPE)
        assert again.coverage().of(TOPIC, "i") == ((0, start + 10),)
        assert not list(store.list("_ister/pending/"))
        if len(calls) < number + 2:
            break
    else:
        pytest.fail("it never came to an end")
    assert number > 4
    found = [name.rpartition("/")[2] for name in _rows_files(store)]
    assert len(found) == len(set(found))


def test_names_that_cannot_be_given_are_told_as_committed(store):
    table = _in_memory()
    files = write_files(table.target("a"), table.open(ENVELOPE), rows_of(0, 5))

    def full(kind: str, key: str) -> None:
        if kind == "copy":
            raise CapacityError("no room")

    store.before = full
    with pytest.raises(CommitUnknownError, match=r"is in the table.*no room"):
        table.commit(adding(files, (0, 5)), check=lambda: None)
    store.before = lambda kind, key: None
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    _in_memory().open(ENVELOPE)
    assert len(_rows_files(store)) == 1


def test_a_copy_that_is_not_whole_costs_nothing(store, monkeypatch):
    table = _in_memory()
    files = write_files(table.target("a"), table.open(ENVELOPE), rows_of(0, 5))
    real = MemoryObjectStore.copy

    def half(self, source: str, target: str) -> None:
        self.put(target, self.read(source, 0, 10))

    monkeypatch.setattr(MemoryObjectStore, "copy", half)
    with pytest.raises(CommitUnknownError, match="10 bytes"):
        table.commit(adding(files, (0, 5)), check=lambda: None)
    monkeypatch.setattr(MemoryObjectStore, "copy", real)
    _in_memory().open(ENVELOPE)
    [name] = _rows_files(store)
    assert store.stat(name).size == files[0].bytes


def test_a_file_that_is_gone_before_it_has_its_name_is_told_with_its_offsets(tmp_path):
    table = table_at(tmp_path, "parquet")
    layout = table.open(ENVELOPE)
    rows = rows_of(100, 130, step_us=3_600_000_000)
    files = write_files(table.target("a"), layout, rows)
    assert len(files) == 2
    failpoints.arm(
        "export.after_table_commit", (tmp_path / "parquet/orders" / files[0].path).unlink
    )
    with pytest.raises(CorruptDataError, match=f"100 up to {files[0].last_offset + 1}") as caught:
        table.commit(adding(files, (100, 130)), check=lambda: None)
    failpoints.disarm()
    assert (caught.value.topic, caught.value.offset) == (TOPIC, 100)
    # The other one is there all the same, and whoever comes next is told, too.
    assert offsets_in(tmp_path, "parquet") == list(range(files[1].first_offset, 130))
    with pytest.raises(CorruptDataError, match="100 up to"):
        table_at(tmp_path, "parquet").open(ENVELOPE)
    table.close()


def test_files_that_were_there_may_be_deleted_by_their_owner(tmp_path):
    table = table_at(tmp_path, "parquet")
    add_rows(table, 0, 5)
    for path in (tmp_path / "parquet/orders").glob("publish_date=*/*"):
        path.unlink()
    add_rows(table, 5, 9, run="b")
    assert offsets_in(tmp_path, "parquet") == list(range(5, 9))
    table.close()


def test_a_follower_does_not_make_a_commit_fail(store):
    """Another export commits between the record and the look whether it counts."""
    one, other = _in_memory(), _in_memory()
    layout = one.open(ENVELOPE)
    files = write_files(one.target("a"), layout, rows_of(0, 5))
    begun = []

    def meanwhile(kind: str, key: str) -> None:
        if kind == "put" and key.startswith(_COMMITS) and not begun:
            begun.append(1)
            add_rows(other, 0, 3, run="b", topic="/default/b")
            add_rows(other, 3, 6, run="c", topic="/default/b")

    store.after = meanwhile
    one.commit(adding(files, (0, 5), id="a"), check=lambda: None)
    assert one.coverage().of(TOPIC, "i") == ((0, 5),)
    assert one.coverage().of("/default/b", "i") == ((0, 6),)
    assert len(_rows_files(store)) == 3


def test_a_number_that_was_forgotten_together_with_its_follower_is_not_taken(store):
    table, sleeper = _in_memory(), _in_memory()
    add_rows(table, 0, 1, run="0")
    late = write_files(sleeper.target("z"), sleeper.open(ENVELOPE), rows_of(9, 10))

    def forget() -> None:
        for number in range(1, 5):
            add_rows(table, number, number + 1, run=str(number))
        for number in range(4):
            store.delete(f"{_COMMITS}{number:020d}.json")

    with pytest.raises(ConflictError, match="newer commits"):
        sleeper.commit(adding(late, (9, 10), id="z"), check=forget)
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    assert len(list(store.list(_COMMITS))) == 1


# -- tidying, beside exports that are under way ------------------------------------------------


def _of(clock) -> ParquetDirectory:
    return ParquetDirectory(Storage("s3", "s3://b/t"), clock=clock)


@pytest.fixture
def clock(store):
    """The clock of the store and of its tables."""
    return store._clock


@pytest.mark.parametrize("grace", [0.0, 3600.0])
def test_a_run_under_way_is_left_alone(store, clock, grace):
    table, other = _of(clock), _of(clock)
    files = write_files(table.target("a"), table.open(ENVELOPE), rows_of(0, 5))
    for number in range(20):
        clock.advance(600)
        table.renew("a")
        run = f"b{number}"
        add_rows(other, number, number + 1, run=run, topic="/default/b")
        other.end(run)
        assert other.tidy(grace) == 0
    table.commit(adding(files, (0, 5), id="a"), check=lambda: None)
    assert len(_rows_files(store)) == 21
    table.end("a")
    assert not list(store.list("_ister/runs/"))


def test_a_run_that_was_taken_for_dead_is_refused(store, clock):
    """Its files may be gone, or be about to go: it commits nothing, and nothing is lost."""
    table, other = _of(clock), _of(clock)
    files = write_files(table.target("a"), table.open(ENVELOPE), rows_of(0, 5))
    clock.advance(100_000)
    kept = {info.key: store.read(info.key, 0, 1 << 20) for info in store.list("_ister/pending/")}
    assert other.tidy(3600) == 1
    for key, data in kept.items():
        store.put(key, data)  # as if it was not deleted yet
    with pytest.raises(ConflictError, match="assumed that this one was dead"):
        table.commit(adding(files, (0, 5), id="a"), check=lambda: None)
    assert table.coverage().of(TOPIC, "i") == ()
    add_rows(table, 0, 5, run="c")
    assert len(_rows_files(store)) == 1
    # It is on record for as long as the run could wake up.
    assert "a" in table._last().ended
    clock.advance(8 * 86_400)
    add_rows(table, 5, 6, run="d")
    assert table._last().ended == {}


def test_a_run_that_wakes_up_while_it_is_tidied_commits_all_or_nothing(store, clock):
    """Between the look at its files and its record, and the other way round."""
    table, other = _of(clock), _of(clock)
    files = write_files(table.target("a"), table.open(ENVELOPE), rows_of(0, 5))
    clock.advance(100_000)
    with pytest.raises(ConflictError, match="assumed that this one was dead"):
        table.commit(adding(files, (0, 5), id="a"), check=lambda: other.tidy(3600))
    assert table.coverage().of(TOPIC, "i") == ()

    files = write_files(table.target("b"), table.open(ENVELOPE), rows_of(0, 5))
    clock.advance(100_000)
    begun = []

    def wake() -> None:
        if not begun:
            begun.append(1)
            table.commit(adding(files, (0, 5), id="b"), check=lambda: None)

    other.tidy(3600, check=wake)
    assert begun
    assert table.coverage().of(TOPIC, "i") == ((0, 5),)
    assert len(_rows_files(store)) == 1


def test_tidying_does_not_change_what_the_table_has(store, clock):
    table = _of(clock)
    add_rows(table, 0, 5)
    write_files(table.target("dead"), table.open(ENVELOPE), rows_of(5, 9))
    before = table.coverage()
    clock.advance(100_000)
    assert table.tidy(3600) == 1
    assert table.coverage() == before
    assert _of(clock).open(ENVELOPE).schema == ENVELOPE
    assert table.tidy(3600) == 0
    assert len(list(store.list(_COMMITS))) == 2


def test_a_tidying_whose_lease_has_ended_removes_nothing(store, clock):
    table = _of(clock)
    write_files(table.target("dead"), table.open(ENVELOPE), rows_of(5, 9))
    clock.advance(100_000)

    def ended() -> None:
        raise UnavailableError("nobody knows")

    with pytest.raises(UnavailableError):
        table.tidy(3600, check=ended)
    assert len(list(store.list("_ister/pending/"))) == 1


def test_marks_and_records_do_not_pile_up(store, clock):
    table = _of(clock)
    for number in range(130):
        add_rows(table, number, number + 1, run=str(number))
        table.end(str(number))
        clock.advance(86_400)
    table.tidy(3600)
    assert len(list(store.list(_COMMITS))) == 100
    assert len(list(store.list("_ister/published/"))) == 1
    assert not list(store.list("_ister/runs/"))
