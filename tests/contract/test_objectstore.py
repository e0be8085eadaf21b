"""What `ister.objectstore.base` promises, on every store there is."""

import random
import threading

import pytest

from ister.base.clock import SystemClock
from ister.errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedOperationError,
)
from ister.objectstore.opendal_store import open_store
from tests.servers.emulators import azurite, fake_gcs
from tests.servers.s3 import BUCKET, moto_server, rclone_server
from tests.support.cases import each
from tests.support.memory_store import MemoryObjectStore
from tests.support.scale import nightly

MIB = 1024 * 1024
STORES = ["fake", "memory", "fs", "rclone", "moto", nightly("azblob"), nightly("gcs")]


@pytest.fixture(scope="module")
def rclone():
    with rclone_server() as server:
        yield server


@pytest.fixture(scope="module")
def moto():
    with moto_server() as server:
        yield server


@pytest.fixture(scope="module")
def azblob():
    with azurite() as emulator:
        yield emulator


@pytest.fixture(scope="module")
def gcs():
    with fake_gcs() as emulator:
        yield emulator


@pytest.fixture
def open_at(request, tmp_path):
    """Opens a store by name, in a place of its own."""
    opened = []

    def open_one(name):
        if name == "fake":
            return MemoryObjectStore()
        if name in ("rclone", "moto"):
            server = request.getfixturevalue(name)
            root, options = f"s3://{BUCKET}/{random.randbytes(6).hex()}/deep", server.options()
            store = open_store("s3", root, options, clock=SystemClock())
        elif name in ("azblob", "gcs"):
            emulator = request.getfixturevalue(name)
            root = f"{emulator.root}/{random.randbytes(6).hex()}/deep"
            store = open_store(emulator.backend, root, emulator.options, clock=SystemClock())
        else:
            root = str(tmp_path / "objects") if name == "fs" else ""
            store = open_store(name, root, {}, clock=SystemClock())
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture(params=STORES)
def store(request, open_at):
    """Each store in turn."""
    return open_at(request.param)


def write(store, key, *pieces, chunk_bytes=5 * MIB):
    writer = store.open_writer(key, chunk_bytes=chunk_bytes, concurrent_parts=2)
    for piece in pieces:
        writer.write(piece)
    writer.close()


def read_all(store, key):
    return store.read(key, 0, store.stat(key).size)


def keys(store, prefix=""):
    return [info.key for info in store.list(prefix)]


# -- one piece ----------------------------------------------------------------------------------


@each("data", [b"", b"x", bytes(range(256)) * 300])
def test_put_object_reads_back(store, data):
    store.put("a/b/c", data)
    assert read_all(store, "a/b/c") == data
    info = store.stat("a/b/c")
    assert (info.key, info.size) == ("a/b/c", len(data))


def test_put_replaces_the_object_whole(store):
    store.put("a", b"a long first one")
    store.put("a", b"short")
    assert read_all(store, "a") == b"short"
    assert keys(store) == ["a"]


def test_missing_object_is_not_found(store):
    store.put("there", b"x")
    for call in (
        lambda: store.stat("a"),
        lambda: store.read("a", 0, 10),
        lambda: store.read("a", 0, 0),
        lambda: store.view("a", 0, MIB),
        lambda: store.read("a/b/c", 5, 10),
        lambda: store.stat("there/below"),
        lambda: store.read("there/below", 0, 1),
    ):
        with pytest.raises(NotFoundError):
            call()


def test_folder_of_objects_is_no_object(store):
    store.put("folder/a", b"x")
    with pytest.raises(NotFoundError):
        store.stat("folder")
    with pytest.raises(NotFoundError):
        store.read("folder", 0, 1)
    with pytest.raises(NotFoundError):
        store.view("folder", 0, MIB)
    assert keys(store) == ["folder/a"]


@each("name", ["fake", "memory", "fs", "moto"])
def test_deleting_the_name_of_a_folder_changes_nothing(open_at, name):
    # rclone keeps objects as files, too, and fails with an error of its own.
    store = open_at(name)
    store.put("folder/a", b"x")
    store.delete("folder")
    assert keys(store) == ["folder/a"]
    store.delete("folder/a")
    store.delete("folder")
    store.put("folder/a", b"y")
    assert keys(store) == ["folder/a"]


@each(
    ("start", "size", "expected"),
    [
        (0, 10, b"0123456789"),
        (3, 4, b"3456"),
        (0, 1, b"0"),
        (9, 1, b"9"),
        (7, 100, b"789"),
        (0, 11, b"0123456789"),
        (10, 1, b""),
        (10, 0, b""),
        (11, 5, b""),
        (10_000, 5, b""),
        (4, 0, b""),
    ],
)
def test_read_is_shorter_only_at_the_end(store, start, size, expected):
    store.put("a", b"0123456789")
    assert store.read("a", start, size) == expected
    assert bytes(store.view("a", start, size)) == expected


def test_negative_range_is_refused(store):
    store.put("a", b"x")
    for start, size in ((-1, 1), (0, -1)):
        with pytest.raises(InvalidRequestError):
            store.read("a", start, size)
        with pytest.raises(InvalidRequestError):
            store.view("a", start, size)


@each(
    "key",
    [
        "with blank in it",
        "per%20cent%",
        "plus+and&equals=x",
        "question?mark#hash",
        "quote'double\"back`tick",
        "umlaut-ü-日本",
        "dots..and...more",
        ".hidden/.deeper",
        "a=1/b=2/part-0.log",
        "brackets[0]{1}(2)",
        "tilde~star*comma,semi;colon:at@dollar$bang!",
        "n" * 200,
    ],
)
def test_odd_key_is_kept_as_it_is(store, key):
    store.put(key, b"odd")
    assert read_all(store, key) == b"odd"
    assert keys(store) == [key]
    store.delete(key)
    assert keys(store) == []


@each(
    "key",
    [
        *("", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".", " a", "a ", "a\0b", "a\nb"),
        *(".tmp/a", ".tmp", "k" * 1025),
    ],
)
def test_key_with_two_meanings_is_refused(store, key):
    for call in (
        lambda: store.put(key, b"x"),
        lambda: store.read(key, 0, 1),
        lambda: store.stat(key),
        lambda: store.delete(key),
        lambda: store.copy(key, "b"),
        lambda: store.copy("b", key),
        lambda: store.open_writer(key, chunk_bytes=MIB, concurrent_parts=1),
    ):
        with pytest.raises(InvalidRequestError):
            call()


# -- streams ------------------------------------------------------------------------------------


def test_streamed_object_of_many_parts_reads_back(store):
    data = random.Random(1).randbytes(12 * MIB + 345)
    pieces = [data[start : start + 700_001] for start in range(0, len(data), 700_001)]
    write(store, "big", *pieces)
    assert store.stat("big").size == len(data)
    assert store.read("big", 5 * MIB - 3, 7) == data[5 * MIB - 3 : 5 * MIB + 4]
    view = store.view("big", 5 * MIB - 3, 9 * MIB)
    store.delete("big")
    assert bytes(view) == data[5 * MIB - 3 :]
    write(store, "big", *pieces)
    assert read_all(store, "big") == data


def test_writer_takes_every_kind_of_buffer(store):
    write(store, "a", b"one ", bytearray(b"two "), memoryview(b"-three ")[1:], b"", b"four")
    assert read_all(store, "a") == b"one two three four"


def test_buffer_may_be_reused_after_a_write(store):
    buffer = bytearray(b"first")
    writer = store.open_writer("a", chunk_bytes=5 * MIB, concurrent_parts=1)
    writer.write(memoryview(buffer))
    buffer[:] = b"other"
    writer.write(buffer)
    buffer[:] = b"-----"
    writer.close()
    assert read_all(store, "a") == b"firstother"


def test_object_appears_with_close_and_not_before(store):
    writer = store.open_writer("a/b", chunk_bytes=5 * MIB, concurrent_parts=2)
    writer.write(bytes(11 * MIB))
    assert keys(store) == []
    with pytest.raises(NotFoundError):
        store.stat("a/b")
    writer.close()
    assert keys(store) == ["a/b"]


def test_stream_replaces_the_object_when_it_completes_and_only_then(store):
    store.put("a", b"old")
    writer = store.open_writer("a", chunk_bytes=5 * MIB, concurrent_parts=2)
    writer.write(b"new one")
    assert read_all(store, "a") == b"old"
    writer.close()
    writer.abort()
    assert read_all(store, "a") == b"new one"
    for end in (lambda writer: writer.abort(), lambda writer: None):
        writer = store.open_writer("a", chunk_bytes=5 * MIB, concurrent_parts=2)
        writer.write(bytes(6 * MIB))
        end(writer)
        del writer
        assert read_all(store, "a") == b"new one"


@each("size", [0, 10, 12 * MIB])
def test_aborted_object_does_not_come_to_exist(store, size):
    writer = store.open_writer("a", chunk_bytes=5 * MIB, concurrent_parts=2)
    writer.write(bytes(size))
    writer.abort()
    writer.abort()
    with pytest.raises(ClosedError):
        writer.write(b"x")
    with pytest.raises(ClosedError):
        writer.close()
    del writer
    assert keys(store) == []
    with pytest.raises(NotFoundError):
        store.stat("a")


def test_threads_write_objects_beside_each_other(store):
    def work(number):
        try:
            write(store, f"t/{number}", bytes([number]) * 100_000)
            results[number] = read_all(store, f"t/{number}") == bytes([number]) * 100_000
        except Exception as error:
            results[number] = error

    results = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(8), True)
    assert keys(store) == [f"t/{number}" for number in range(8)]


# -- conditional creates ------------------------------------------------------------------------


def test_conditional_create_refuses_an_object_that_exists(store):
    if not store.probe().conditional_create:
        with pytest.raises(UnsupportedOperationError):
            store.put("a", b"x", if_absent=True)
        assert keys(store) == []
        return
    store.put("a", b"first", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"second", if_absent=True)
    assert read_all(store, "a") == b"first"
    store.delete("a")
    store.put("a", b"third", if_absent=True)
    assert read_all(store, "a") == b"third"


# moto honours the condition of one request at a time: it looks, and then it puts.
@each("name", ["fake", "memory", "fs"])
def test_one_of_many_concurrent_creates_wins(open_at, name):
    """Goal: a create is exclusive. Method: threads that begin together, each with its own bytes."""
    store = open_at(name)
    count = 6
    for round_ in range(5):
        barrier = threading.Barrier(count)
        outcomes = {}

        def create(number, key=f"lock/{round_}", barrier=barrier, outcomes=outcomes):
            barrier.wait()
            try:
                store.put(key, b"%d" % number * 1000, if_absent=True)
                outcomes[number] = True
            except AlreadyExistsError:
                outcomes[number] = False

        threads = [threading.Thread(target=create, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [number for number, has_won in outcomes.items() if has_won]
        assert (len(outcomes), len(winners)) == (count, 1)
        assert read_all(store, f"lock/{round_}") == b"%d" % winners[0] * 1000


# -- listings -----------------------------------------------------------------------------------


def test_listing_is_recursive_sorted_and_of_objects_only(store):
    for key in ("b", "a/2", "a/10", "a/1/x", "a/1-y", "ab/1", "A", "a.b"):
        store.put(key, key.encode())
    assert keys(store) == sorted(["b", "a/2", "a/10", "a/1/x", "a/1-y", "ab/1", "A", "a.b"])
    assert keys(store, "a/") == ["a/1-y", "a/1/x", "a/10", "a/2"]
    assert keys(store, "a/1/") == ["a/1/x"]
    assert [info.size for info in store.list("a/")] == [5, 5, 4, 3]


def test_listing_without_objects_is_empty(store):
    assert keys(store) == []
    store.put("a", b"x")
    assert keys(store, "b/") == []
    assert keys(store, "a/") == []


def test_prefix_that_is_no_folder_is_refused(store):
    for prefix in ("a", "/", "a//", "../"):
        with pytest.raises(InvalidRequestError):
            store.list(prefix)


def test_listing_and_stat_agree(store):
    store.put("a/b", b"12345")
    (listed,) = store.list("a/")
    found = store.stat("a/b")
    assert (listed.key, listed.size) == (found.key, found.size) == ("a/b", 5)
    now = SystemClock().now_ns() / 1e9
    for info in (listed, found):
        # opendal's own memory has no times.
        if info.modified_at is not None:
            assert abs(info.modified_at - now) < 60
    assert (listed.modified_at is None) == (store.location == "memory://" and not listed.etag)


# -- copies, deletes, the rest ------------------------------------------------------------------


def test_copy_is_whole_and_independent(store):
    store.put("a/source", b"bytes" * 1000)
    if not store.probe().copy:
        with pytest.raises(UnsupportedOperationError):
            store.copy("a/source", "b/target")
        return
    store.put("b/target", b"old")
    store.copy("a/source", "b/target")
    store.delete("a/source")
    assert read_all(store, "b/target") == b"bytes" * 1000
    assert keys(store) == ["b/target"]


def test_copy_of_a_missing_object_is_not_found(store):
    if not store.probe().copy:
        pytest.skip("this store has no copies")
    with pytest.raises(NotFoundError):
        store.copy("none", "target")
    assert keys(store) == []


def test_deleted_object_is_gone_and_may_be_deleted_again(store):
    store.put("a/b", b"x")
    store.put("a/c", b"y")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/was/there")
    assert keys(store) == ["a/c"]
    with pytest.raises(NotFoundError):
        store.stat("a/b")


def test_probe_leaves_nothing_and_says_the_same_again(store):
    capabilities = store.probe()
    assert store.probe() == capabilities
    assert keys(store) == []


@each(
    ("name", "conditional_create", "copy"),
    [
        ("fake", True, True),
        ("memory", True, False),
        ("fs", True, True),
        ("rclone", False, True),
        ("moto", True, True),
    ],
)
def test_probe_finds_out_what_a_store_can_do(open_at, name, conditional_create, copy):
    found = open_at(name).probe()
    assert (found.conditional_create, found.copy) == (conditional_create, copy)


def test_store_may_be_closed_twice(store):
    store.put("a", b"x")
    assert store.close() is None
    assert store.close() is None
