"""What every table promises, whichever format it has."""

import pyarrow as pa
import pytest

from ister.errors import ConflictError, CorruptDataError, FencedError, NotFoundError
from ister.spark.tables.columns import ENVELOPE
from tests.support.cases import each, product
from tests.support.exports import (
    DAY_US,
    FORMATS,
    NOON_US,
    TOPIC,
    add_rows,
    adding,
    offsets_in,
    read_table,
    rows_of,
    table_at,
    write_files,
)
from tests.support.spark_here import killed_at


@each("format", FORMATS)
def test_nothing_is_made_by_looking(tmp_path, format):
    table = table_at(tmp_path, format)
    assert table.coverage().topics == {}
    table.close()
    assert list(tmp_path.iterdir()) == []


@each("format", FORMATS)
def test_files_that_are_not_committed_are_not_seen(tmp_path, format):
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    layout = table.open(ENVELOPE)
    target = table.target("other")
    files = write_files(target, layout, rows_of(5, 9))
    assert offsets_in(tmp_path, format) == list(range(5))
    table.discard(target, files)
    assert not [path for path in tmp_path.rglob("*.parquet*") if "other" in str(path)]
    table.close()


@each("format", FORMATS)
def test_offsets_that_the_table_has_are_refused(tmp_path, format):
    table = table_at(tmp_path, format)
    add_rows(table, 0, 10)
    with pytest.raises(ConflictError, match="5 up to 10"):
        add_rows(table, 5, 15, run="again")
    assert offsets_in(tmp_path, format) == list(range(10))
    # Of another topic, or of a topic that was made anew, they are others.
    add_rows(table, 5, 15, run="third", topic="/default/other")
    add_rows(table, 0, 3, run="fourth", incarnation="j")
    assert table.coverage().of(TOPIC, "i") == ((0, 10),)
    assert len(offsets_in(tmp_path, format)) == 23
    table.close()


@each("format", FORMATS)
def test_a_range_without_files_counts(tmp_path, format):
    table = table_at(tmp_path, format)
    table.open(ENVELOPE)
    table.commit(adding([], (0, 4)), check=lambda: None)
    add_rows(table, 4, 6)
    assert table.coverage().of(TOPIC, "i") == ((0, 6),)
    with pytest.raises(ConflictError):
        table.commit(adding([], (3, 5), id="again"), check=lambda: None)
    assert offsets_in(tmp_path, format) == [4, 5]
    table.close()


@each("format", FORMATS)
def test_two_writers_do_not_lose_each_others_ranges(tmp_path, format):
    """Whoever commits second looks again, adds to what is there, or is refused."""
    one, other = table_at(tmp_path, format), table_at(tmp_path, format)
    add_rows(one, 0, 5, run="a")
    layout = other.open(ENVELOPE)
    fresh = write_files(other.target("b"), layout, rows_of(5, 10))
    late = write_files(other.target("c"), layout, rows_of(3, 7))
    visits = []

    def meanwhile() -> None:
        if not visits:
            visits.append(1)
            add_rows(one, 20, 25, run="d")

    # The check runs after the table was looked at, and before the commit.
    other.commit(adding(fresh, (5, 10), id="b"), check=meanwhile)
    assert one.coverage().of(TOPIC, "i") == ((0, 10), (20, 25))

    def overtake() -> None:
        if len(visits) < 2:
            visits.append(2)
            add_rows(one, 10, 12, run="e")

    with pytest.raises(ConflictError):
        other.commit(adding(late, (3, 7), id="c"), check=overtake)
    assert offsets_in(tmp_path, format) == [*range(10), *range(20, 25)]
    one.close()
    other.close()


@each("format", FORMATS)
def test_nothing_is_committed_once_the_lease_has_ended(tmp_path, format):
    table = table_at(tmp_path, format)
    layout = table.open(ENVELOPE)
    files = write_files(table.target("a"), layout, rows_of(0, 5))

    def ended() -> None:
        raise FencedError("the lease has ended")

    with pytest.raises(FencedError):
        table.commit(adding(files, (0, 5)), check=ended)
    assert table.coverage().of(TOPIC, "i") == ()
    assert offsets_in(tmp_path, format) == []
    table.close()


@each(
    ("format", "point"),
    product(FORMATS, ["export.before_table_commit", "export.after_table_commit"]),
)
def test_a_commit_is_one_step(tmp_path, format, point):
    is_in = point == "export.after_table_commit"
    table = table_at(tmp_path, format)
    add_rows(table, 0, 5)
    with killed_at(point):
        add_rows(table, 5, 10, run="b")
    table.close()
    again = table_at(tmp_path, format)
    again.open(ENVELOPE)
    assert again.coverage().of(TOPIC, "i") == (((0, 10),) if is_in else ((0, 5),))
    assert offsets_in(tmp_path, format) == list(range(10 if is_in else 5))
    again.close()


def _paths(root, files):
    """Where files are, whatever they are relative to."""
    names = {file.path.rpartition("/")[2] for file in files}
    return [path for path in root.rglob("*.parquet*") if path.name in names]


@pytest.mark.nightly
@each(("format", "how", "days"), product(FORMATS, ["gone", "short"], [1, 9]))
def test_files_that_are_not_there_are_not_committed(tmp_path, format, how, days):
    """Written on another machine, tidied away, cut short: the ranges would never come again."""
    table = table_at(tmp_path, format)
    layout = table.open(ENVELOPE)
    rows = rows_of(10, 10 + days, step_us=DAY_US)
    files = write_files(table.target("a"), layout, rows)
    assert len(files) == days
    path = next(p for p in _paths(tmp_path, files) if p.name in files[-1].path)
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1])
    asked = []
    kind = NotFoundError if how == "gone" else CorruptDataError
    with pytest.raises(kind, match=f"{9 + days} up to {10 + days}") as caught:
        table.commit(adding(files, (10, 10 + days)), check=lambda: asked.append(1))
    assert asked == []
    assert (caught.value.topic, caught.value.offset) == (TOPIC, 9 + days)
    if how == "gone":
        assert "machines" in caught.value.hint
    assert table.coverage().topics == {}
    assert offsets_in(tmp_path, format) == []
    path.write_bytes(data)
    table.commit(adding(files, (10, 10 + days)), check=lambda: None)
    assert offsets_in(tmp_path, format) == list(range(10, 10 + days))
    table.close()


@each("format", FORMATS)
def test_files_are_looked_at_before_each_attempt(tmp_path, format):
    one, other = table_at(tmp_path, format), table_at(tmp_path, format)
    layout = one.open(ENVELOPE)
    files = write_files(one.target("a"), layout, rows_of(0, 5))
    begun = []

    def meanwhile() -> None:
        assert not begun
        begun.append(1)
        add_rows(other, 0, 5, run="b", topic="/default/b")
        _paths(tmp_path, files)[0].unlink()

    with pytest.raises(NotFoundError):
        one.commit(adding(files, (0, 5), id="a"), check=meanwhile)
    assert begun
    assert one.coverage().of(TOPIC, "i") == ()
    one.close()
    other.close()


@each("format", FORMATS)
def test_new_columns_are_added(tmp_path, format):
    table = table_at(tmp_path, format)
    add_rows(table, 0, 3)
    wanted = pa.schema([*ENVELOPE, ("price", pa.float64()), ("tags", pa.list_(pa.string()))])
    layout = table.open(wanted)
    rows = rows_of(
        3, 5, price=pa.array([1.5, None]), tags=pa.array([["a"], None], pa.list_(pa.string()))
    )
    files = write_files(table.target("b"), layout, rows)
    table.commit(adding(files, (3, 5), id="b"), check=lambda: None)
    found = read_table(tmp_path, format)
    assert found.column("price").to_pylist() == [None, None, None, 1.5, None]
    assert found.column("tags").to_pylist() == [None, None, None, ["a"], None]
    # And who does not know them goes on.
    add_rows(table, 5, 6, run="c")
    assert read_table(tmp_path, format).column("price").to_pylist()[-1] is None
    table.close()


@each("format", FORMATS)
def test_a_column_of_another_type_is_refused(tmp_path, format):
    table = table_at(tmp_path, format)
    table.open(pa.schema([*ENVELOPE, ("price", pa.string())]))
    files = write_files(
        table.target("a"),
        table.open(pa.schema([*ENVELOPE, ("price", pa.string())])),
        rows_of(0, 1, price=pa.array(["x"])),
    )
    table.commit(adding(files, (0, 1)), check=lambda: None)
    with pytest.raises(ConflictError, match="price"):
        table.open(pa.schema([*ENVELOPE, ("price", pa.float64())]))
    with pytest.raises(ConflictError, match="price"):
        table.open(pa.schema([*ENVELOPE, ("Price", pa.string())]))
    table.close()


@each("format", FORMATS)
def test_rows_go_to_their_dates(tmp_path, format):
    table = table_at(tmp_path, format)
    layout = table.open(ENVELOPE)
    assert layout.by_date
    rows = rows_of(0, 30, time_us=NOON_US, step_us=DAY_US // 10)
    files = write_files(table.target("a"), layout, rows)
    assert len(files) == 4
    assert sum(file.rows for file in files) == 30
    table.commit(adding(files, (0, 30)), check=lambda: None)
    assert offsets_in(tmp_path, format) == list(range(30))
    table.close()
