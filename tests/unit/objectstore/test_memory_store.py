"""The fake's own features: hooks, switches, damage."""

import pytest

from ister.errors import NotFoundError, UnavailableError, UnsupportedOperationError
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_store import MemoryObjectStore


def fail(kind, error):
    def hook(seen, key):
        if seen == kind:
            raise error

    return hook


CALLS = {
    "open_writer": lambda store: store.open_writer("a", chunk_bytes=1, concurrent_parts=1),
    "put": lambda store: store.put("a", b"new"),
    "read": lambda store: store.read("a", 0, 1),
    "stat": lambda store: store.stat("a"),
    "list": lambda store: store.list(""),
    "copy": lambda store: store.copy("a", "b"),
    "delete": lambda store: store.delete("a"),
}


@each("error", [UnavailableError("x"), SimulatedCrash()])
@each("kind", CALLS)
def test_error_before_an_operation_leaves_the_store_as_it_was(kind, error):
    store = MemoryObjectStore()
    store.put("a", b"old")
    store.before = fail(kind, error)
    with pytest.raises(type(error)):
        CALLS[kind](store)
    store.before = lambda kind, key: None
    assert (store.keys(), store.read("a", 0, 9)) == (("a",), b"old")
    assert (kind, "" if kind == "list" else "a") in store.calls


@each(("kind", "keys", "data"), [("put", ("a",), b"new"), ("copy", ("a", "b"), b"old")])
def test_lost_answer_leaves_the_change(kind, keys, data):
    store = MemoryObjectStore()
    store.put("a", b"old")
    store.after = fail(kind, UnavailableError("lost"))
    with pytest.raises(UnavailableError):
        CALLS[kind](store)
    assert store.keys() == keys
    assert store.read(keys[-1], 0, 9) == data


@each(
    ("hook", "kind", "exists"),
    [
        ("before", "write", False),
        ("after", "write", False),
        ("before", "close", False),
        ("after", "close", True),
    ],
)
def test_crash_while_an_object_is_under_way(hook, kind, exists):
    store = MemoryObjectStore()
    setattr(store, hook, fail(kind, SimulatedCrash()))
    writer = store.open_writer("a", chunk_bytes=1, concurrent_parts=1)

    def write_and_close():
        writer.write(b"data")
        writer.close()

    with pytest.raises(SimulatedCrash):
        write_and_close()
    writer.abort()
    assert store.keys() == (("a",) if exists else ())


def test_primitive_store_shows_an_object_under_way():
    store = MemoryObjectStore(half_written_visible=True)
    writer = store.open_writer("a", chunk_bytes=1, concurrent_parts=1)
    writer.write(b"ha")
    writer.write(b"lf")
    assert store.read("a", 0, 9) == b"half"
    writer.abort()
    assert store.keys() == ("a",)


def test_store_without_conditions_overwrites_until_it_was_probed():
    store = MemoryObjectStore(conditional_create=False)
    store.put("a", b"1", if_absent=True)
    store.put("a", b"2", if_absent=True)
    assert store.read("a", 0, 1) == b"2"
    assert not store.probe().conditional_create
    with pytest.raises(UnsupportedOperationError):
        store.put("b", b"1", if_absent=True)


def test_store_without_copies_says_so():
    store = MemoryObjectStore(supports_copy=False)
    store.put("a", b"1")
    with pytest.raises(UnsupportedOperationError):
        store.copy("a", "b")
    assert not store.probe().copy


def test_damage_and_loss_are_made_by_the_test():
    store = MemoryObjectStore()
    store.put("a", b"AAAA")
    store.corrupt("a", 2)
    assert store.read("a", 0, 9) == b"AA@A"
    store.drop("a")
    with pytest.raises(NotFoundError):
        store.stat("a")


def test_reads_are_counted_and_times_come_from_the_clock():
    clock = ManualClock(now_ms=5_000)
    store = MemoryObjectStore(clock=clock)
    store.put("a", b"0123456789")
    clock.advance(7)
    store.put("b", b"")
    store.read("a", 2, 3)
    store.read("a", 8, 30)
    assert store.reads == [("a", 2, 3), ("a", 8, 2)]
    assert store.bytes_read("a") == 5
    assert [info.modified_at for info in store.list("")] == [5.0, 12.0]
    assert store.stat("a").etag != store.stat("b").etag
