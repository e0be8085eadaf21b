"""What `ister.fs.base` promises, on every file system there is."""

import errno
import os
import threading

import pytest

from ister.base.clock import SystemClock
from ister.errors import DirectoryLockedError, DiskError, NotFoundError
from ister.fs.local import LocalFileSystem, map_os_error
from ister.fs.memory import MemoryFileSystem
from tests.support.cases import each
from tests.support.memory_fs import MemoryFileSystem as CrashingFileSystem


class Place:
    """A file system and a directory on it."""

    def __init__(self, fs, root):
        self.fs = fs
        self.root = root

    def path(self, name):
        return f"{self.root}/{name}"

    def file(self, name, data=b""):
        """A file that was made, filled and closed."""
        file = self.fs.create(self.path(name))
        file.write_at(0, [data])
        file.close()
        return self.path(name)

    def read(self, name):
        file = self.fs.open_read(self.path(name))
        try:
            return file.read_at(0, file.size())
        finally:
            file.close()

    def now_ms(self):
        """The time that files are stamped with."""
        return SystemClock().now_ns() // 1_000_000

    def age(self, path, milliseconds):
        """Makes a file look as if it had last been written so long ago."""
        if not isinstance(self.fs, LocalFileSystem):
            self.fs._find(path).modified_ms -= milliseconds
        else:
            then = self.now_ms() * 1_000_000 - milliseconds * 1_000_000
            os.utime(path, ns=(then, then))


@pytest.fixture(params=["local", "memory", "crashing"])
def place(request, tmp_path):
    """Each file system in turn."""
    if request.param == "local":
        return Place(LocalFileSystem(), str(tmp_path))
    if request.param == "memory":
        fs = MemoryFileSystem()
        fs.make_directories("/root")
        return Place(fs, "/root")
    fs = CrashingFileSystem()
    fs.make_directories("/root")
    fs.now_ms = lambda: SystemClock().now_ns() // 1_000_000
    return Place(fs, "/root")


# -- files --------------------------------------------------------------------------------------


def test_written_bytes_read_back_at_their_position(place):
    file = place.fs.create(place.path("a"))
    assert (file.path, file.size()) == (place.path("a"), 0)
    file.write_at(0, [b"hello ", bytearray(b"wor"), memoryview(b"ld")])
    file.write_at(4, [b"O"])
    assert file.size() == 11
    assert file.read_at(0, 11) == b"hellO world"
    assert file.read_at(6, 3) == b"wor"
    file.close()
    assert place.read("a") == b"hellO world"


def test_read_is_shorter_only_at_the_end(place):
    place.file("a", b"0123456789")
    file = place.fs.open_read(place.path("a"))
    assert file.read_at(7, 100) == b"789"
    assert file.read_at(10, 5) == b""
    assert file.read_at(50, 5) == b""
    assert file.read_at(3, 0) == b""
    file.close()


def test_write_beyond_the_end_leaves_zeros_between(place):
    file = place.fs.create(place.path("a"))
    file.write_at(5, [b"x"])
    assert file.read_at(0, 10) == b"\0\0\0\0\0x"
    file.close()


def test_more_buffers_than_one_call_takes_are_all_written(place):
    file = place.fs.create(place.path("a"))
    buffers = [b"%d," % number for number in range(5000)]
    file.write_at(3, buffers)
    assert file.read_at(3, 1 << 20) == b"".join(buffers)
    file.close()


def test_truncate_cuts(place):
    file = place.fs.create(place.path("a"))
    file.write_at(0, [b"0123456789"])
    file.truncate(4)
    assert (file.size(), file.read_at(0, 10)) == (4, b"0123")
    file.write_at(4, [b"x"])
    file.sync()
    file.close()
    assert place.read("a") == b"0123x"


def test_two_handles_see_one_file(place):
    place.file("a", b"old")
    writer, reader = place.fs.open(place.path("a")), place.fs.open_read(place.path("a"))
    writer.write_at(0, [b"new!"])
    assert reader.read_at(0, 10) == b"new!"
    writer.close()
    reader.close()


def test_sync_may_run_beside_writes(place):
    file = place.fs.create(place.path("a"))
    syncs = threading.Thread(target=lambda: [file.sync() for _ in range(30)])
    syncs.start()
    for position in range(300):
        file.write_at(position, [b"x"])
    syncs.join()
    assert file.size() == 300
    file.close()


_USES = {
    "read": lambda file: file.read_at(0, 1),
    "write": lambda file: file.write_at(0, [b"x"]),
    "size": lambda file: file.size(),
    "sync": lambda file: file.sync(),
    "truncate": lambda file: file.truncate(0),
}


@each("use", _USES)
def test_close_may_be_called_twice_and_ends_the_handle(place, use):
    file = place.fs.create(place.path("a"))
    file.close()
    file.close()
    with pytest.raises(DiskError) as refused:
        _USES[use](file)
    assert refused.value.errno == errno.EBADF


def test_handle_for_reading_refuses_writes(place):
    place.file("a", b"old")
    file = place.fs.open_read(place.path("a"))
    try:
        with pytest.raises(DiskError):
            file.write_at(0, [b"new"])
    finally:
        file.close()
    assert place.read("a") == b"old"


# -- names --------------------------------------------------------------------------------------


def test_create_empties_what_is_there(place):
    place.file("a", b"old content")
    file = place.fs.create(place.path("a"))
    assert file.size() == 0
    file.close()
    assert place.read("a") == b""


@each(
    "operation",
    [
        "open",
        "open_read",
        "remove",
        "list_directory",
        "modified_ms",
        "identity",
        "remove_directory",
    ],
)
def test_missing_path_is_not_found(place, operation):
    with pytest.raises(NotFoundError) as missing:
        getattr(place.fs, operation)(place.path("missing"))
    assert missing.value.path == place.path("missing")


@each("operation", ["create", "open", "sync_directory"])
def test_missing_directory_is_not_found(place, operation):
    name = "missing/a" if operation != "sync_directory" else "missing"
    with pytest.raises(NotFoundError):
        getattr(place.fs, operation)(place.path(name))


def test_rename_of_what_is_missing_is_not_found(place):
    place.file("target", b"kept")
    with pytest.raises(NotFoundError):
        place.fs.rename(place.path("missing"), place.path("target"))
    assert place.read("target") == b"kept"


def test_exists_tells_files_and_directories(place):
    assert not place.fs.exists(place.path("a"))
    place.file("a")
    place.fs.make_directories(place.path("b/c"))
    for name in ("a", "b", "b/c"):
        assert place.fs.exists(place.path(name))
    assert not place.fs.exists(place.path("b/d"))


def test_list_is_sorted_and_has_names_only(place):
    for name in ("b", "a", "c.log"):
        place.file(name)
    place.fs.make_directories(place.path("aa/inside"))
    assert place.fs.list_directory(place.root) == ["a", "aa", "b", "c.log"]
    assert place.fs.list_directory(place.path("aa")) == ["inside"]


def test_rename_replaces_and_takes_the_old_name_away(place):
    place.file("new", b"new")
    place.file("old", b"old")
    reader = place.fs.open_read(place.path("old"))
    place.fs.rename(place.path("new"), place.path("old"))
    place.fs.sync_directory(place.root)
    assert place.read("old") == b"new"
    assert place.fs.list_directory(place.root) == ["old"]
    assert reader.read_at(0, 10) == b"old"
    reader.close()


def test_removed_file_stays_readable_through_its_handles(place):
    place.file("a", b"content")
    reader = place.fs.open_read(place.path("a"))
    place.fs.remove(place.path("a"))
    assert not place.fs.exists(place.path("a"))
    assert reader.read_at(0, 10) == b"content"
    reader.close()
    with pytest.raises(NotFoundError):
        place.fs.remove(place.path("a"))


def test_directories_are_made_where_missing(place):
    for _ in range(2):
        place.fs.make_directories(place.path("a/b/c"))
    place.fs.make_directories(place.path("a/b/d/"))
    assert place.fs.list_directory(place.path("a/b")) == ["c", "d"]
    place.file("a/b/c/file", b"x")
    place.fs.make_directories(place.path("a/b/c"))
    assert place.read("a/b/c/file") == b"x"


_WRONG_KIND = [
    (lambda place: place.fs.make_directories(place.path("file")), None),
    (lambda place: place.fs.make_directories(place.path("file/below")), None),
    (lambda place: place.fs.create(place.path("folder")), None),
    (lambda place: place.fs.open(place.path("folder")), None),
    (lambda place: place.fs.remove(place.path("folder")), None),
    (lambda place: place.fs.remove_directory(place.path("folder")), errno.ENOTEMPTY),
    (lambda place: place.fs.remove_directory(place.path("file")), errno.ENOTDIR),
    (lambda place: place.fs.rename(place.path("other"), place.path("folder")), None),
]


@each(("use", "number"), _WRONG_KIND)
def test_use_of_another_kind_of_path_is_refused_and_changes_nothing(place, use, number):
    files = {"file": b"a", "folder/inside": b"b", "other/inside": b"c"}
    for name, data in files.items():
        place.fs.make_directories(
            place.path(name.rpartition("/")[0]) if "/" in name else place.root
        )
        place.file(name, data)
    with pytest.raises(DiskError) as refused:
        use(place)
    assert number in (None, refused.value.errno)
    assert {name: place.read(name) for name in files} == files


def test_empty_directory_is_removed_as_one(place):
    place.fs.make_directories(place.path("a/b"))
    place.fs.remove_directory(place.path("a/b"))
    assert not place.fs.exists(place.path("a/b"))
    assert place.fs.list_directory(place.path("a")) == []
    with pytest.raises(NotFoundError):
        place.fs.remove_directory(place.path("a/b"))


def test_renamed_directory_takes_what_is_in_it_along(place):
    place.fs.make_directories(place.path("old/inside"))
    place.file("old/inside/file", b"content")
    place.fs.rename(place.path("old"), place.path("new"))
    place.fs.sync_directory(place.root)
    assert place.fs.list_directory(place.root) == ["new"]
    assert place.read("new/inside/file") == b"content"


# -- times --------------------------------------------------------------------------------------


def test_file_says_when_it_was_last_written_to(place):
    now = place.now_ms()
    path = place.file("a", b"content")
    stamped = place.fs.modified_ms(path)
    assert now - 2000 <= stamped <= place.now_ms() + 2000
    # Reading, syncing and renaming leave the stamp alone.
    place.read("a")
    place.fs.rename(path, place.path("b"))
    assert place.fs.modified_ms(place.path("b")) == stamped


def test_write_moves_the_time_of_a_file(place):
    path = place.file("a", b"content")
    place.age(path, 3_600_000)
    before = place.fs.modified_ms(path)
    assert before < place.now_ms() - 3_000_000
    file = place.fs.open(path)
    file.write_at(0, [b"C"])
    file.close()
    assert place.fs.modified_ms(path) > before + 3_000_000


# -- identity -----------------------------------------------------------------------------------


def test_identity_tells_a_file_from_its_copies(place):
    path, copied = place.file("a", b"content"), place.file("b", b"content")
    identity = place.fs.identity(path)
    assert identity
    place.read("a")
    assert place.fs.identity(path) == identity
    assert place.fs.identity(copied) != identity
    place.fs.remove(path)
    assert place.fs.identity(place.file("a", b"content")) != identity, "made anew"


# -- room ---------------------------------------------------------------------------------------


def test_allocated_bytes_are_zeros_behind_what_was_there(place):
    file = place.fs.open(place.file("a", b"content"))
    file.allocate(10_000)
    assert file.size() == 10_000
    assert file.read_at(0, 20_000) == b"content".ljust(10_000, b"\0")
    file.allocate(100)
    assert file.size() == 10_000, "nothing is cut"
    file.close()


def test_disk_usage_is_that_of_the_nearest_parent(place):
    if not isinstance(place.fs, LocalFileSystem):
        assert place.fs.disk_usage(place.root) is None, "without a size"
        if isinstance(place.fs, MemoryFileSystem):
            return
        place.fs.capacity_bytes = 1 << 20
    usage = place.fs.disk_usage(place.root)
    assert 0 < usage.free_bytes <= usage.total_bytes
    assert place.fs.disk_usage(place.path("not/there")).device == usage.device


# -- lock ---------------------------------------------------------------------------------------


def test_lock_has_one_holder_and_may_be_released_twice(place):
    lock = place.fs.lock(place.path("LOCK"))
    with pytest.raises(DirectoryLockedError) as held:
        place.fs.lock(place.path("LOCK"))
    assert held.value.path == place.path("LOCK")
    assert "process" in held.value.message
    place.fs.lock(place.path("OTHER")).release()
    lock.release()
    lock.release()
    again = place.fs.lock(place.path("LOCK"))
    again.release()


# -- the real one alone -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["open", "open_read", "create", "lock"])
def test_symbolic_link_is_refused(tmp_path, operation):
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(DiskError) as refused:
        getattr(LocalFileSystem(), operation)(str(tmp_path / "link"))
    assert refused.value.errno == errno.ELOOP
    assert target.read_bytes() == b"secret"


_ERRORS = {
    errno.ENOSPC: "CapacityError",
    errno.EDQUOT: "CapacityError",
    errno.EFBIG: "CapacityError",
    errno.EMFILE: "CapacityError",
    errno.ENFILE: "CapacityError",
    errno.ENOMEM: "CapacityError",
    errno.ENOENT: "NotFoundError",
    errno.EIO: "DiskError",
    errno.EROFS: "DiskError",
    errno.EACCES: "DiskError",
}


@each(("number", "name"), _ERRORS.items())
def test_errors_of_the_system_become_ours(number, name):
    error = map_os_error(OSError(number, "what it said"), "write", "/a/b")
    assert type(error).__name__ == name
    assert "write failed: what it said" in str(error)
    assert error.path == "/a/b"
    assert getattr(error, "errno", number) == number


def test_new_files_are_not_for_everyone(tmp_path):
    fs = LocalFileSystem()
    fs.make_directories(str(tmp_path / "new"))
    fs.create(str(tmp_path / "new" / "a")).close()
    assert (tmp_path / "new").stat().st_mode & 0o007 == 0
    assert (tmp_path / "new" / "a").stat().st_mode & 0o117 == 0
