"""The fake's own features: hooks, switches, damage."""

import pytest

from ister.errors import UnsupportedOperationError
from tests.support.cases import each
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_store import MemoryObjectStore


def fail(kind, error):
    def hook(seen, key):
        if seen == kind:
            raise error

    return hook


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


def test_store_without_conditions_overwrites_until_it_was_probed():
    store = MemoryObjectStore(conditional_create=False)
    store.put("a", b"1", if_absent=True)
    store.put("a", b"2", if_absent=True)
    assert store.read("a", 0, 1) == b"2"
    assert not store.probe().conditional_create
    with pytest.raises(UnsupportedOperationError):
        store.put("b", b"1", if_absent=True)
