"""The `fs` backend: objects appear whole, exclusively and for good."""

import errno
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ister.base.clock import SystemClock
from ister.base.limits import KIB
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    DiskError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.fs.local import LocalFileSystem
from ister.objectstore.opendal_store import open_store
from ister.objectstore.staged_files import StagedFiles
from tests.support.clock import ManualClock


@pytest.fixture
def store(tmp_path):
    store = open_store("fs", str(tmp_path), {}, clock=SystemClock())
    yield store
    store.close()


class RecordingFileSystem(LocalFileSystem):
    """Notes what was synced, and what had which name at that time."""

    def __init__(self):
        self.events = []
        self.fail = None

    def rename(self, old, new):
        self.events.append(("rename", new))
        super().rename(old, new)

    def sync_directory(self, path):
        self.events.append(("sync_directory", path))
        if self.fail == path:
            raise DiskError("sync failed", errno=5, path=path)
        super().sync_directory(path)

    def open_read(self, path):
        file = super().open_read(path)
        sync = file.sync
        file.sync = lambda: (self.events.append(("sync", path)), sync())[1]
        return file


def staged(files, root, data=b"data"):
    key = files.stage()
    Path(root, key).write_bytes(data)
    return key


def test_bytes_are_synced_before_the_name_and_the_name_before_the_return(tmp_path):
    root, fs = str(tmp_path / "root"), RecordingFileSystem()
    files = StagedFiles(root, fs)
    key = staged(files, root)
    # The root's own name is durable from the start.
    assert ("sync_directory", os.path.dirname(root)) in fs.events
    fs.events.clear()
    files.publish(key, "a/b/object")
    assert fs.events[0] == ("sync", f"{root}/{key}")
    named = fs.events.index(("rename", f"{root}/a/b/object"))
    # The folders are durable before anything is in them.
    for folder in (root, f"{root}/a"):
        assert ("sync_directory", folder) in fs.events[:named]
    assert fs.events[named + 1 :] == [("sync_directory", f"{root}/a/b")]


def test_folders_are_made_durable_once_whoever_made_them(tmp_path):
    root, fs = str(tmp_path / "root"), RecordingFileSystem()
    files = StagedFiles(root, fs)
    Path(root, "a").mkdir()  # by a process that died before it could sync its name
    for number in range(3):
        files.publish(staged(files, root), f"a/{number}/object")
    synced = [path for kind, path in fs.events if kind == "sync_directory"]
    assert synced.count(root) == 2, "the staging folder's name, and that of a"
    assert synced.count(f"{root}/a") == 3
    assert synced.count(os.path.dirname(root)) == 1


def test_folder_that_somebody_removes_is_made_again(tmp_path):
    root = str(tmp_path / "root")
    files = StagedFiles(root, RecordingFileSystem())
    files.publish(staged(files, root), "a/b/object")
    shutil.rmtree(f"{root}/a")
    files.publish(staged(files, root), "a/c/object")
    assert Path(root, "a/c/object").read_bytes() == b"data"


def test_exclusive_name_is_synced_too_and_when_it_was_taken(tmp_path):
    root, fs = str(tmp_path), RecordingFileSystem()
    files = StagedFiles(root, fs)
    first, second = staged(files, root, b"first"), staged(files, root, b"second")
    files.publish(first, "a/lock", is_exclusive=True)
    assert fs.events[-1] == ("sync_directory", f"{root}/a")
    fs.events.clear()
    with pytest.raises(AlreadyExistsError):
        files.publish(second, "a/lock", is_exclusive=True)
    assert fs.events[-1] == ("sync_directory", f"{root}/a")
    assert Path(root, "a/lock").read_bytes() == b"first"
    assert not Path(root, first).exists()


def test_large_range_is_mapped_and_not_copied(tmp_path, store):
    store.put("a", bytes(range(256)) * 4096)
    view = store.view("a", 5, 512 * KIB)
    assert isinstance(memoryview(view).obj, mmap.mmap)
    assert bytes(view[:4]) == bytes([5, 6, 7, 8])
    assert isinstance(store.view("a", 5, 64 * KIB), bytes)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENODEV, "no maps here"), ValueError("mmap length is greater than file size")],
)
def test_file_that_cannot_be_mapped_is_read(store, monkeypatch, error):
    def refuse(*arguments, **named):
        raise error

    store.put("a", bytes(range(256)) * 4096)
    monkeypatch.setattr(mmap, "mmap", refuse)
    view = store.view("a", 5, 512 * KIB)
    assert isinstance(view, bytes)
    assert view == (bytes(range(256)) * 4096)[5 : 5 + 512 * KIB]


def test_failed_sync_of_the_folder_is_an_unknown_outcome(tmp_path):
    root, fs = str(tmp_path), RecordingFileSystem()
    files = StagedFiles(root, fs)
    files.publish(staged(files, root), "a/1")
    fs.fail = f"{root}/a"
    with pytest.raises(UnavailableError):
        files.publish(staged(files, root), "a/2")


def test_file_system_without_links_cannot_create_exclusively(tmp_path, store, monkeypatch):
    def refuse(*arguments, **settings):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UnsupportedOperationError):
        store.put("a", b"x", if_absent=True)
    assert not store.probe().conditional_create
    assert os.listdir(tmp_path / ".tmp") == []


def test_staged_file_that_was_removed_is_no_object_and_no_success(tmp_path, store):
    writer = store.open_writer("a", chunk_bytes=1 << 20, concurrent_parts=1)
    writer.write(bytes(3 << 20))
    for name in os.listdir(tmp_path / ".tmp"):
        (tmp_path / ".tmp" / name).unlink()
    with pytest.raises(UnavailableError):
        writer.close()
    assert list(store.list("")) == []


def test_nothing_is_left_below_the_staging_folder(tmp_path, store):
    store.put("a", b"x")
    store.put("b", b"x", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        store.put("b", b"x", if_absent=True)
    store.copy("a", "c")
    writer = store.open_writer("d", chunk_bytes=1 << 20, concurrent_parts=2)
    writer.write(bytes(3 << 20))
    writer.close()
    writer = store.open_writer("e", chunk_bytes=1 << 20, concurrent_parts=2)
    writer.write(bytes(3 << 20))
    assert len(os.listdir(tmp_path / ".tmp")) == 1
    writer.abort()
    store.probe()
    assert os.listdir(tmp_path / ".tmp") == []


def test_killed_writer_leaves_a_part_that_age_removes(tmp_path):
    """Goal: what a dead process leaves is found. Method: a real one that ends in mid-object."""
    program = f"""
import os
from ister.base.clock import SystemClock
from ister.objectstore.opendal_store import open_store
store = open_store("fs", {str(tmp_path)!r}, {{}}, clock=SystemClock())
writer = store.open_writer("a/b", chunk_bytes=1 << 20, concurrent_parts=2)
writer.write(bytes(5 << 20))
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    clock = ManualClock(now_ms=SystemClock().now_ns() // 1_000_000)
    store = open_store("fs", str(tmp_path), {}, clock=clock)
    assert list(store.list("")) == []
    assert len(os.listdir(tmp_path / ".tmp")) == 1
    assert store.remove_stale_parts(3600) == 0
    clock.advance(3700)
    assert store.remove_stale_parts(3600) == 1
    assert open_store("memory", "", {}, clock=clock).remove_stale_parts(0) == 0
    assert os.listdir(tmp_path / ".tmp") == []


def test_create_is_exclusive_between_processes(tmp_path):
    """Goal: one winner. Method: processes that wait for a file and then create the same keys."""
    program = f"""
import os, sys, time
from ister.base.clock import SystemClock
from ister.errors import AlreadyExistsError
from ister.objectstore.opendal_store import open_store
store = open_store("fs", {str(tmp_path / "objects")!r}, {{}}, clock=SystemClock())
print("ready", flush=True)
sys.stdin.readline()
won = 0
for number in range(40):
    try:
        store.put(f"lock/{{number}}", sys.argv[1].encode(), if_absent=True)
        won += 1
    except AlreadyExistsError:
        pass
print(won, flush=True)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        won = [int(process.stdout.readline()) for process in processes]
    finally:
        for process in processes:
            process.communicate(timeout=60)
    assert sum(won) == 40
    store = open_store("fs", str(tmp_path / "objects"), {}, clock=SystemClock())
    owners = [store.read(f"lock/{number}", 0, 9) for number in range(40)]
    assert [owners.count(b"%d" % number) for number in range(3)] == won


def test_full_disk_is_a_lack_of_capacity():
    """Goal: ENOSPC keeps its meaning. Method: a file size limit, in a process of its own."""
    program = """
import resource, signal, sys, tempfile
from ister.base.clock import SystemClock
from ister.errors import CapacityError
from ister.objectstore.opendal_store import open_store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryDirectory() as root:
    store = open_store("fs", root, {}, clock=SystemClock())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    store.put("small", b"fits")
    for call in (
        lambda: store.put("a", bytes(2 << 20)),
        lambda: (w := store.open_writer("b", chunk_bytes=1 << 19, concurrent_parts=1),
                 [w.write(bytes(1 << 19)) for _ in range(4)], w.close()),
    ):
        try:
            call()
        except CapacityError:
            print("full")
    print([info.key for info in store.list("")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "full\nfull\n['small']\n"
    assert CapacityError.retriable


def test_others_can_read_neither_objects_nor_what_becomes_one(tmp_path):
    """As the files of the log: 0640 in directories of 0750, whatever the umask allows."""
    before = os.umask(0)
    try:
        store = open_store("fs", str(tmp_path / "bucket"), {}, clock=SystemClock())
        store.put("a/put", b"1")
        store.put("a/created", b"1", if_absent=True)
        store.copy("a/put", "b/copied")
        writer = store.open_writer("c/d/streamed", chunk_bytes=1024, concurrent_parts=2)
        writer.write(bytes(10_000))
        under_way = list((tmp_path / "bucket" / ".tmp").iterdir())
        assert [path.stat().st_mode & 0o777 for path in under_way] == [0o640]
        writer.close()
        store.close()
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777
        for path in tmp_path.rglob("*")
    }
    assert {path for path, mode in modes.items() if mode == 0o640} == {
        "bucket/a/put",
        "bucket/a/created",
        "bucket/b/copied",
        "bucket/c/d/streamed",
    }
    assert set(modes.values()) == {0o640, 0o750}
