"""Room on the disks of a log: the watermark, the reserve, what is said about them."""

import pytest

from ister.base.limits import GIB, KIB, MIB
from ister.base.metrics import Metrics
from ister.config import load_config
from ister.errors import CapacityError
from ister.fs.base import DiskUsage
from ister.fs.local import LocalFileSystem
from ister.metadata.sqlite import SqliteMetadata
from ister.topic.disk import RESERVE_NAME, DiskGuard
from tests.support.cases import each
from tests.support.machine import ManualClock
from tests.support.memory_fs import MemoryFileSystem


def a_guard(fs, **disk) -> DiskGuard:
    config = load_config(
        {"storage": {"mode": "local_only", "wal": {"dir": "/d"}, "disk": disk}}, {}
    )
    fs.make_directories("/d")
    return DiskGuard(config.storage, fs=fs, root="/d", topics=list, metrics=Metrics())


def a_disk(size: int) -> MemoryFileSystem:
    fs = MemoryFileSystem()
    fs.capacity_bytes = size
    return fs


def use(fs: MemoryFileSystem, size: int) -> None:
    fs.others_bytes = lambda: size


@each(
    ("total", "min_free", "reserve"),
    [
        (4 * GIB // 1024, 4 * GIB // 1024 // 20, 0),
        (64 * MIB, 64 * MIB // 20, MIB),
        (1 * GIB, 1 * GIB // 20, 1 * GIB // 100),
    ],
)
def test_defaults_follow_the_size_of_the_disk(total, min_free, reserve):
    guard = a_guard(a_disk(total))
    (state,) = guard.states
    assert state.min_free_bytes == min_free
    assert guard.reserve_bytes == reserve


def test_watermark_and_reserve_of_a_large_disk(monkeypatch):
    usage = DiskUsage(device=1, total_bytes=1000 * GIB, free_bytes=500 * GIB)
    fs = MemoryFileSystem()
    monkeypatch.setattr(fs, "disk_usage", lambda path: usage)
    guard = a_guard(fs)
    assert guard.states[0].min_free_bytes == 256 * MIB
    assert guard.reserve_bytes == 16 * MIB


def test_disk_without_a_size_has_no_watermark_and_no_reserve():
    guard = a_guard(MemoryFileSystem())
    assert guard.states == ()
    assert guard.reserve_bytes == 0
    assert not guard.is_low()


def test_appends_stop_at_the_mark_and_go_on_a_quarter_above_it():
    fs = a_disk(MIB)
    guard = a_guard(fs, min_free=100 * KIB, reserve=0)
    for free, is_low in ((101, False), (99, True), (101, True), (124, True), (125, False)):
        use(fs, MIB - free * KIB)
        guard.measure()
        assert guard.is_low() is is_low, free


def test_reserve_is_freed_once_and_allocated_again_when_there_is_space():
    fs = a_disk(MIB)
    guard = a_guard(fs, min_free=64 * KIB, reserve=128 * KIB)
    assert guard.reserve_bytes == 128 * KIB
    use(fs, MIB - 128 * KIB)
    assert fs.room_for(MIB) == 0
    assert guard.free_reserve()
    assert fs.room_for(MIB) == 128 * KIB
    assert not guard.free_reserve()
    guard.measure()
    assert guard.is_low(), "what it gave is not for appends"
    assert not guard.may_write()
    use(fs, 0)
    guard.measure()
    assert guard.reserve_bytes == 128 * KIB
    assert not guard.is_low()
    assert guard.may_write()


def test_reserve_of_an_earlier_process_is_known():
    fs = a_disk(MIB)
    a_guard(fs, min_free=0, reserve=64 * KIB)
    use(fs, fs.room_for(MIB))
    guard = a_guard(fs, min_free=0, reserve=64 * KIB)
    assert guard.reserve_bytes == 64 * KIB
    assert guard.free_reserve()


def test_zero_turns_watermark_and_reserve_off():
    fs = a_disk(MIB)
    use(fs, MIB)
    guard = a_guard(fs, min_free=0, reserve=0)
    assert not guard.is_low()
    assert not fs.exists(f"/d/{RESERVE_NAME}")


def test_error_says_how_much_is_free_and_needed_and_that_it_goes_on():
    fs = a_disk(MIB)
    guard = a_guard(fs, min_free=100 * KIB, reserve=0)
    use(fs, MIB - 50 * KIB)
    guard.measure()
    error = guard.error("/ns/t")
    assert str(error).startswith(
        "50 KiB of 1.0 MiB are free on the disk; appends stop below 100 KiB and resume at 125 KiB"
    )
    assert error.path == "/d"
    assert "appends resume when" in error.hint
    assert "storage.disk.min_free" in error.hint
    assert "bucket" not in error.hint  # local_only has none
    assert "storage.wal.retention" in error.hint


def test_error_says_that_the_bucket_is_on_the_same_disk(tmp_path):
    tree = {"storage": {"wal": {"dir": str(tmp_path / "wal")}, "disk": {"min_free": 1 << 60}}}
    config = load_config(tree, {})
    (tmp_path / "wal").mkdir()
    guard = DiskGuard(
        config.storage,
        fs=LocalFileSystem(),
        root=str(tmp_path / "wal"),
        topics=list,
        metrics=Metrics(),
    )
    (state,) = guard.states  # one disk, although three paths are on it
    assert state.holds_log
    assert state.holds_bucket
    assert "the bucket is on the same disk" in guard.error().hint


def test_reserve_takes_blocks(tmp_path):
    file = LocalFileSystem().create(str(tmp_path / "f"))
    file.allocate(256 * KIB)
    assert (tmp_path / "f").stat().st_blocks * 512 >= 256 * KIB
    file.close()


# -- SQLite -------------------------------------------------------------------------------------


def test_full_metadata_disk_is_a_capacity_error_and_the_reserve_helps(tmp_path):
    """SQLite is told that its file may not grow; the reserve lifts that."""
    is_allowed = False
    asked = []

    def on_full() -> bool:
        asked.append(True)
        if is_allowed:
            store._writer.execute("PRAGMA max_page_count = 100000")
        return is_allowed

    store = SqliteMetadata(str(tmp_path / "m.db"), clock=ManualClock(), on_full=on_full)
    try:
        store.put("/a", b"1")
        store._writer.execute("PRAGMA max_page_count = 1")
        with pytest.raises(CapacityError, match="full"):
            store.put("/b", bytes(100_000))
        assert asked == [True]
        assert store.get("/b") is None
        store.put("/a", b"2")
        is_allowed = True
        store.put("/b", bytes(100_000))
        assert len(store.get("/b").value) == 100_000
    finally:
        store.close()
