"""Parts of objects that are read like objects."""

import pytest

from ister.errors import CorruptDataError, NotFoundError, UnsupportedOperationError
from ister.objectstore.slices import SlicedStore
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.memory_store import MemoryObjectStore

KEY = "storage/express/n/0000000000000000/00000000000000000000.dnbx"
SLICE = f"{KEY}@3+4"


@pytest.fixture
def store():
    inner = MemoryObjectStore(clock=ManualClock())
    inner.put(KEY, b"0123456789")
    return SlicedStore(inner)


@each(
    ("start", "size", "wanted"),
    [(0, 4, b"3456"), (0, 100, b"3456"), (1, 2, b"45"), (3, 5, b"6"), (4, 1, b""), (9, 9, b"")],
)
def test_read_stays_within_the_slice(store, start, size, wanted):
    assert store.read(SLICE, start, size) == wanted


def test_stat_is_that_of_the_slice(store):
    assert (store.stat(SLICE).size, store.stat(SLICE).key) == (4, SLICE)
    assert store.stat(KEY).size == 10


def test_object_that_ends_before_the_slice_is_damage(store):
    with pytest.raises(CorruptDataError):
        store.stat(f"{KEY}@7+4")


def test_slice_of_nothing_is_not_found(store):
    with pytest.raises(NotFoundError):
        store.stat(f"{KEY.replace('0.dnbx', '1.dnbx')}@0+1")
    with pytest.raises(NotFoundError):
        store.read(f"{KEY.replace('0.dnbx', '1.dnbx')}@0+1", 0, 1)


def test_deleting_a_slice_leaves_the_object(store):
    store.delete(SLICE)
    assert store.read(KEY, 0, 10) == b"0123456789"
    store.delete(KEY)
    with pytest.raises(NotFoundError):
        store.stat(KEY)


def test_slices_are_only_read(store):
    with pytest.raises(UnsupportedOperationError):
        store.put(SLICE, b"x")
    with pytest.raises(UnsupportedOperationError):
        store.open_writer(SLICE, chunk_bytes=1, concurrent_parts=1)
    with pytest.raises(UnsupportedOperationError):
        store.copy(SLICE, "y")
    assert [info.key for info in store.list("storage/")] == [KEY]
