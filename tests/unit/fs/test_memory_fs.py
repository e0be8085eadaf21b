"""The crash model itself: what it may lose, what it never loses, how it fails."""

import errno
import random
from itertools import pairwise

import pytest

from ister.errors import CapacityError, DiskError
from tests.support.cases import each
from tests.support.memory_fs import SECTOR_BYTES, FaultPlan, MemoryFileSystem, SimulatedCrash

SEEDS = range(300)


@pytest.fixture
def fs():
    """A file system with one durable directory."""
    fs = MemoryFileSystem()
    fs.make_directories("/d")
    return fs


def _file(fs, name="/d/a", *parts, durable=True):
    """An open file with synced content and, if asked for, a durable name."""
    file = fs.create(name)
    for part in parts:
        file.write_at(file.size(), [part])
    file.sync()
    if durable:
        fs.sync_directory("/d")
    return file


def _read(fs, name="/d/a"):
    file = fs.open_read(name)
    data = file.read_at(0, file.size())
    file.close()
    return data


def _outcomes(prepare):
    """What is left of `/d/a` after a crash, over many seeds; None where there is no file."""
    found = set()
    for seed in SEEDS:
        fs = MemoryFileSystem()
        fs.make_directories("/d")
        prepare(fs)
        fs.crash(random.Random(seed))
        found.add(_read(fs) if fs.exists("/d/a") else None)
    return found


def test_synced_bytes_survive_every_crash():
    def prepare(fs):
        file = _file(fs, "/d/a", b"kept" * 500)
        file.write_at(2000, [b"pending" * 500])

    outcomes = _outcomes(prepare)
    assert all(data[:2000] == b"kept" * 500 for data in outcomes)


def test_unsynced_bytes_may_be_lost_torn_or_zeroed():
    """Goal: the model is as harsh as it says: each fate of a pending write occurs.

    Method: one write of eight sectors over many seeds, sorted by what became of it.
    """
    data = bytes(range(1, 256)) * 17
    data = data[: 8 * SECTOR_BYTES]

    def prepare(fs):
        _file(fs).write_at(0, [data])

    outcomes = _outcomes(prepare)
    assert b"" in outcomes, "lost"
    assert data in outcomes, "arrived"
    assert bytes(len(data)) in outcomes, "zeroed whole"
    torn = {found for found in outcomes if 0 < len(found) < len(data)}
    assert any(len(found) % SECTOR_BYTES == 0 for found in torn), "torn at a sector"
    assert any(len(found) % SECTOR_BYTES for found in torn), "torn anywhere"
    assert all(found == data[: len(found)] for found in torn)
    holes = {found for found in outcomes if len(found) == len(data)} - {data, bytes(len(data))}
    assert holes, "some sectors zeroed"
    for found in holes:
        for start in range(0, len(data), SECTOR_BYTES):
            sector = found[start : start + SECTOR_BYTES]
            assert sector in (data[start : start + SECTOR_BYTES], bytes(SECTOR_BYTES))


def test_unsynced_writes_may_survive_in_any_combination():
    def prepare(fs):
        file = _file(fs)
        file.write_at(0, [b"A"])
        file.write_at(1, [b"B"])

    outcomes = _outcomes(prepare)
    assert {b"", b"A", b"\0B", b"AB"} <= outcomes


def test_unsynced_truncation_may_be_undone():
    def prepare(fs):
        _file(fs, "/d/a", b"content").truncate(0)

    assert _outcomes(prepare) == {b"", b"content"}


def test_unsynced_name_may_be_missing_and_a_synced_one_not():
    def without_sync(fs):
        _file(fs, "/d/a", b"x", durable=False)

    assert _outcomes(without_sync) == {None, b"x"}
    assert _outcomes(lambda fs: _file(fs, "/d/a", b"x")) == {b"x"}


def test_unsynced_removal_may_be_undone():
    def prepare(fs):
        _file(fs, "/d/a", b"x")
        fs.remove("/d/a")

    def synced(fs):
        prepare(fs)
        fs.sync_directory("/d")

    assert _outcomes(prepare) == {None, b"x"}
    assert _outcomes(synced) == {None}


def test_unsynced_rename_leaves_the_old_or_the_new_and_never_a_mix():
    def prepare(fs):
        _file(fs, "/d/a", b"old")
        _file(fs, "/d/tmp", b"new")
        fs.rename("/d/tmp", "/d/a")

    assert _outcomes(prepare) == {b"old", b"new"}


def _names_left(prepare):
    """Which names are in `/d` after a crash, over many seeds."""
    found = set()
    for seed in SEEDS:
        fs = MemoryFileSystem()
        fs.make_directories("/d")
        prepare(fs)
        fs.crash(random.Random(seed))
        found.add(tuple(fs.list_directory("/d")))
    return found


@each("kind", ["file", "directory"])
def test_unsynced_rename_loses_nothing_and_doubles_nothing(kind):
    """Goal: a rename is atomic: a crash leaves the old name or the new one, and always one."""

    def renamed(fs, names):
        if kind == "file":
            _file(fs, "/d/a", b"x")
        else:
            fs.make_directories("/d/a")
        for old, new in pairwise("a" + names):
            fs.rename(f"/d/{old}", f"/d/{new}")

    assert _names_left(lambda fs: renamed(fs, "b")) == {("a",), ("b",)}
    assert _names_left(lambda fs: renamed(fs, "bc")) == {("a",), ("b",), ("c",)}
    assert _names_left(lambda fs: renamed(fs, "ba")) == {("a",), ("b",)}


def test_unsynced_renames_survive_without_each_other():
    """Goal: nothing is said about their order: two of them need a sync between them."""

    def one_makes_room_for_the_other(fs):
        _file(fs, "/d/a", b"first")
        _file(fs, "/d/b", b"second")
        fs.rename("/d/a", "/d/c")
        fs.rename("/d/b", "/d/a")

    assert _names_left(one_makes_room_for_the_other) == {("a", "b"), ("a", "c"), ("b", "c"), ("a",)}


def test_name_that_was_removed_and_given_again_may_be_missing():
    def prepare(fs):
        _file(fs, "/d/a", b"old")
        fs.remove("/d/a")
        _file(fs, "/d/a", b"new", durable=False)

    assert _outcomes(prepare) == {None, b"old", b"new"}


def test_failed_sync_reads_back_and_is_lost_for_good(fs):
    """Goal: the fsyncgate: pages are clean after a failure, and a second sync stores nothing."""
    file = _file(fs, "/d/a", b"kept")
    file.write_at(4, [b"lost"])
    fs.before = FaultPlan(1, kinds=frozenset({"sync"}))
    with pytest.raises(DiskError):
        file.sync()
    assert _read(fs) == b"keptlost"
    file.sync()
    assert _read(fs) == b"keptlost"
    for seed in range(20):
        fs.crash(random.Random(seed))
        assert _read(fs) == b"kept"


@each("is_sticky", [False, True])
def test_fault_plan_fails_its_operation(fs, is_sticky):
    file = _file(fs, "/d/a")
    fs.before = plan = FaultPlan(
        3, errno=errno.EROFS, is_sticky=is_sticky, kinds=frozenset({"write"})
    )
    failed = []
    for number in range(1, 7):
        file.sync()
        try:
            file.write_at(0, [b"xx"])
        except DiskError as error:
            assert error.errno == errno.EROFS
            failed.append(number)
    assert failed == ([3, 4, 5, 6] if is_sticky else [3])
    assert (plan.seen, plan.fired) == (6, len(failed))


@each(
    "operation",
    [
        lambda fs: fs.open("/d/a"),
        lambda fs: fs.open_read("/d/a"),
        lambda fs: fs.create("/d/b"),
        lambda fs: fs.list_directory("/d"),
        lambda fs: fs.make_directories("/d/new"),
        lambda fs: fs.rename("/d/a", "/d/c"),
        lambda fs: fs.remove("/d/a"),
        lambda fs: fs.sync_directory("/d"),
        lambda fs: fs.lock("/d/LOCK"),
    ],
)
@each("error", [OSError(errno.EIO, "no"), SimulatedCrash()])
def test_operation_that_fails_has_changed_nothing(fs, operation, error):
    _file(fs, "/d/a", b"x").close()
    before = fs.list_directory("/d")

    def fail(kind, path):
        raise error

    fs.before = fail
    with pytest.raises((DiskError, SimulatedCrash)):
        operation(fs)
    fs.kill()
    assert fs.list_directory("/d") == before
    assert _read(fs) == b"x"


def test_failed_write_may_have_stored_a_prefix(fs):
    file = _file(fs)
    fs.before = FaultPlan(1, kinds=frozenset({"write"}))
    with pytest.raises(DiskError):
        file.write_at(0, [b"0123456789"])
    stored = _read(fs)
    assert 0 < len(stored) < 10
    assert b"0123456789".startswith(stored)
    file.write_at(0, [b"0123456789"])
    assert _read(fs) == b"0123456789"


def test_full_disk_takes_what_fits_and_lets_overwrites_pass(fs):
    file = _file(fs, "/d/a", b"12345")
    other = _file(fs, "/d/b", b"12345")
    fs.write_limit_bytes = 13
    with pytest.raises(CapacityError, match="No space left"):
        file.write_at(5, [b"abcdef"])
    assert _read(fs) == b"12345abc"
    file.write_at(0, [b"ABCDE"])
    with pytest.raises(CapacityError):
        other.write_at(5, [b"x"])
    file.truncate(0)
    other.write_at(5, [b"x"])
    fs.write_limit_bytes = None
    file.write_at(0, [bytes(100)])
    assert (len(_read(fs)), _read(fs, "/d/b")) == (100, b"12345x")


def test_same_seed_gives_the_same_crash():
    def state(seed):
        fs = MemoryFileSystem()
        fs.make_directories("/d")
        for name in "abc":
            _file(fs, f"/d/{name}", durable=False).write_at(0, [bytes(range(256)) * 8])
        fs.crash(random.Random(seed))
        return {name: _read(fs, f"/d/{name}") for name in fs.list_directory("/d")}

    assert all(state(seed) == state(seed) for seed in range(20))
    assert len({str(state(seed)) for seed in range(20)}) > 5
