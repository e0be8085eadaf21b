"""What `ister.metadata.base` promises, on every metadata store there is."""

import itertools
import threading
import time
from contextlib import closing

import pytest

from ister.base.clock import SystemClock
from ister.errors import CapacityError, ClosedError, InvalidRequestError, IsterError, NotFoundError
from ister.metadata.base import VALUE_BYTES_MAX, Absent, Delete, KeyValue, Put, RevisionIs, ValueIs
from ister.metadata.etcd import EtcdMetadata
from ister.metadata.memory import MemoryMetadata
from ister.metadata.sqlite import SqliteMetadata
from tests.servers.etcd import EtcdServer
from tests.support.cases import each
from tests.support.waiting import eventually

_BACKENDS = ["memory", "sqlite", "etcd"]
_roots = itertools.count()


@pytest.fixture(scope="module")
def etcd_server():
    with EtcdServer() as server:
        yield server


@pytest.fixture(params=_BACKENDS)
def open_store(request, tmp_path):
    """Opens the same store again and again, and closes what was opened."""
    opened = []
    memory = MemoryMetadata()

    def open_it():
        if request.param == "memory":
            return memory
        if request.param == "sqlite":
            store = SqliteMetadata(str(tmp_path / "meta.db"), clock=SystemClock())
        else:
            server = request.getfixturevalue("etcd_server")
            store = EtcdMetadata([server.endpoint], clock=SystemClock())
        opened.append(store)
        return store

    yield open_it
    for store in [*opened, memory]:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def root():
    """A prefix that no other test has: etcd is one for all of them."""
    return f"/contract{next(_roots)}"


def _keys(found):
    return [pair.key for pair in found]


# -- keys and values ----------------------------------------------------------------------------


def test_missing_key_is_none(store, root):
    assert store.get(f"{root}/none") is None
    assert store.range(f"{root}/") == []


def test_put_value_reads_back_with_its_revision(store, root):
    revision = store.put(f"{root}/a", b"one")
    assert store.get(f"{root}/a") == KeyValue(f"{root}/a", b"one", revision)
    again = store.put(f"{root}/a", b"one")
    assert again > revision
    assert store.get(f"{root}/a") == KeyValue(f"{root}/a", b"one", again)


def test_change_is_seen_through_another_handle(open_store, root):
    first, second = open_store(), open_store()
    for number in range(20):
        first.put(f"{root}/a", b"%d" % number)
        assert second.get(f"{root}/a").value == b"%d" % number


@each("value", [b"", b"\0", bytes(range(256))])
def test_values_are_any_bytes(store, root, value):
    store.put(f"{root}/a", value)
    assert store.get(f"{root}/a").value == value
    assert store.transact([ValueIs(f"{root}/a", value)], [Put(f"{root}/b", value)])
    assert store.range(f"{root}/b")[0].value == value


def test_largest_value_is_taken_and_one_more_byte_is_not(store, root):
    value = bytes(range(256)) * (VALUE_BYTES_MAX // 256)
    store.put(f"{root}/a", value)
    assert store.get(f"{root}/a").value == value
    assert store.transact([ValueIs(f"{root}/none", b"")], [Put(f"{root}/a", value)]) is None
    with pytest.raises(CapacityError):
        store.put(f"{root}/a", value + b"x")
    with pytest.raises(CapacityError):
        store.transact([], [Put(f"{root}/a", value), Put(f"{root}/b", value)])
    assert store.get(f"{root}/b") is None


def test_many_keys_are_read_at_once(store, root):
    names = [f"{root}/{number:03d}" for number in range(300)]
    for start in range(0, len(names), 100):
        store.transact([], [Put(name, name.encode()) for name in names[start : start + 100]])
    absent = [f"{root}/none", f"{root}/00"]
    found = store.get_many([*names, *absent, names[0]])
    assert sorted(found) == names
    assert all(found[name] == store.get(name) for name in (names[0], names[150], names[-1]))
    assert {key: pair.value for key, pair in found.items()} == {n: n.encode() for n in names}
    assert store.get_many([]) == {}
    with pytest.raises(InvalidRequestError):
        store.get_many([names[0], ""])


def test_many_large_values_are_read_at_once(store, root):
    value = b"x" * VALUE_BYTES_MAX
    names = [f"{root}/{number}" for number in range(6)]
    for name in names:  # over gRPC's own limit of 4 MiB
        store.put(name, value)
    assert [len(pair.value) for pair in store.get_many(names).values()] == [VALUE_BYTES_MAX] * 6


def test_range_of_large_values_is_complete(store, root):
    value = b"x" * VALUE_BYTES_MAX
    for number in range(6):  # over gRPC's own limit of 4 MiB
        store.put(f"{root}/{number}", value)
    assert [len(pair.value) for pair in store.range(f"{root}/")] == [VALUE_BYTES_MAX] * 6


def test_revisions_grow_with_every_change(store, root):
    revisions = [
        store.put(f"{root}/a", b"1"),
        store.put(f"{root}/b", b"2"),
        store.transact([], [Put(f"{root}/c", b"3"), Delete(f"{root}/a")]),
        store.put(f"{root}/a", b"4"),
    ]
    assert revisions == sorted(set(revisions))
    store.delete(f"{root}/a")
    assert store.put(f"{root}/a", b"5") > revisions[-1] + 1


@each("key", ["", "\ud800", "x" * 5000])
def test_key_that_is_none_is_refused(store, key):
    for use in (
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.delete(key),
        lambda: store.transact([Absent(key)], []),
        lambda: store.transact([], [Delete(key)]),
        lambda: store.range(key or "\ud800"),
        lambda: store.watch(key or "\ud800", print),
    ):
        with pytest.raises(InvalidRequestError):
            use()


# -- order and ranges ---------------------------------------------------------------------------


def test_keys_are_sorted_by_their_bytes(store, root):
    names = ["b", "a", "Z", "a/b", "a-b", "aa", "ä", "é", "z", "日本", "\uffff", "😀", "~", "a\0"]
    for name in names:
        store.put(f"{root}/{name}", b"")
    expected = sorted((f"{root}/{name}" for name in names), key=str.encode)
    assert _keys(store.range(f"{root}/")) == expected


def test_prefix_of_another_name_is_not_its_directory(store, root):
    for name in ("t", "t/1", "t/2", "t2", "t2/1", "s/1"):
        store.put(f"{root}/{name}", b"")
    assert _keys(store.range(f"{root}/t/")) == [f"{root}/t/1", f"{root}/t/2"]
    assert _keys(store.range(f"{root}/t2/")) == [f"{root}/t2/1"]
    assert _keys(store.range(f"{root}/t")) == [
        f"{root}/{name}" for name in ("t", "t/1", "t/2", "t2", "t2/1")
    ]
    assert store.delete_prefix(f"{root}/t/") == 2
    assert len(store.range(f"{root}/")) == 4


def test_prefix_ending_in_a_wide_character_ends_there(store, root):
    for name in ("ÿ1", "ÿ2", "Ā", "y", "\U0010ffff1", "\U0010ffff"):
        store.put(f"{root}/{name}", b"")
    assert _keys(store.range(f"{root}/ÿ")) == [f"{root}/ÿ1", f"{root}/ÿ2"]
    assert len(store.range(f"{root}/\U0010ffff")) == 2


_RANGES = {
    "all": ({}, "0123456789"),
    "from a key": ({"start": "3"}, "3456789"),
    "before a key": ({"end": "3"}, "012"),
    "between": ({"start": "3", "end": "6"}, "345"),
    "between in vain": ({"start": "6", "end": "6"}, ""),
    "wrong way round": ({"start": "6", "end": "3"}, ""),
    "from between keys": ({"start": "35"}, "456789"),
    "limited": ({"limit": 4}, "0123"),
    "limit as many as there are": ({"limit": 10}, "0123456789"),
    "limit above": ({"limit": 99}, "0123456789"),
    "limit of none": ({"limit": 0}, ""),
    "limited in between": ({"start": "2", "end": "8", "limit": 2}, "23"),
}


@each("case", _RANGES)
def test_range_is_cut(store, root, case):
    arguments, expected = _RANGES[case]
    for number in range(10):
        store.put(f"{root}/k/{number}", b"%d" % number)
    store.put(f"{root}/j", b"before")
    store.put(f"{root}/k2", b"after")
    arguments = {
        name: f"{root}/k/{value}" if name in ("start", "end") else value
        for name, value in arguments.items()
    }
    found = store.range(f"{root}/k/", **arguments)
    assert _keys(found) == [f"{root}/k/{number}" for number in expected]
    assert [pair.value for pair in found] == [number.encode() for number in expected]


def test_bounds_outside_of_the_prefix_do_not_widen_it(store, root):
    for name in ("a/1", "b/1", "c/1"):
        store.put(f"{root}/{name}", b"")
    found = store.range(f"{root}/b/", start=f"{root}/a/1", end=f"{root}/c/2")
    assert _keys(found) == [f"{root}/b/1"]
    assert store.range(f"{root}/b/", start=f"{root}/c") == []
    assert store.range(f"{root}/b/", end=f"{root}/a") == []
    assert _keys(store.range("", start=f"{root}/a", limit=1)) == [f"{root}/a/1"]
    with pytest.raises(InvalidRequestError):
        store.range(root, limit=-1)


def test_range_over_several_pages_is_complete(store, root):
    names = [f"{root}/{number:05d}" for number in range(2100)]
    for start in range(0, len(names), 100):
        store.transact([], [Put(name, b"v") for name in names[start : start + 100]])
    assert _keys(store.range(f"{root}/")) == names
    assert _keys(store.range(f"{root}/", limit=1500)) == names[:1500]
    assert store.delete_prefix(f"{root}/") == len(names)


# -- deletion -----------------------------------------------------------------------------------


def test_delete_tells_whether_the_key_existed(store, root):
    store.put(f"{root}/a", b"")
    assert store.delete(f"{root}/a") is True
    assert store.delete(f"{root}/a") is False
    assert store.get(f"{root}/a") is None


def test_delete_prefix_counts_and_leaves_the_rest(store, root):
    for name in ("a/1", "a/2", "ab"):
        store.put(f"{root}/{name}", b"")
    assert store.delete_prefix(f"{root}/a/") == 2
    assert store.delete_prefix(f"{root}/a/") == 0
    assert _keys(store.range(f"{root}/")) == [f"{root}/ab"]


def test_empty_prefix_deletes_nothing(store, root):
    store.put(f"{root}/a", b"")
    with pytest.raises(InvalidRequestError):
        store.delete_prefix("")
    assert store.get(f"{root}/a") is not None


# -- transactions -------------------------------------------------------------------------------


def test_compares_hold_for_what_is_there(store, root):
    revision = store.put(f"{root}/a", b"one")
    for compare, holds in [
        (ValueIs(f"{root}/a", b"one"), True),
        (ValueIs(f"{root}/a", b"on"), False),
        (ValueIs(f"{root}/a", b""), False),
        (RevisionIs(f"{root}/a", revision), True),
        (RevisionIs(f"{root}/a", revision - 1), False),
        (RevisionIs(f"{root}/a", revision + 1), False),
        (Absent(f"{root}/a"), False),
    ]:
        done = store.transact([compare], [Put(f"{root}/done", b"")])
        assert (done is not None) is holds, compare
        assert store.delete(f"{root}/done") is holds


def test_compares_hold_for_what_is_absent(store, root):
    for compare, holds in [
        (ValueIs(f"{root}/a", b""), False),
        (ValueIs(f"{root}/a", b"one"), False),
        (RevisionIs(f"{root}/a", 0), False),
        (RevisionIs(f"{root}/a", 1), False),
        (RevisionIs(f"{root}/a", -1), False),
        (Absent(f"{root}/a"), True),
    ]:
        done = store.transact([compare], [Put(f"{root}/done", b"")])
        assert (done is not None) is holds, compare
        assert store.delete(f"{root}/done") is holds


def test_key_made_anew_has_another_revision(store, root):
    old = store.put(f"{root}/a", b"one")
    store.delete(f"{root}/a")
    assert store.transact([Absent(f"{root}/a")], [Put(f"{root}/a", b"one")]) > old
    assert store.transact([RevisionIs(f"{root}/a", old)], [Delete(f"{root}/a")]) is None
    assert store.transact([ValueIs(f"{root}/a", b"one")], [Delete(f"{root}/a")])
    assert store.get(f"{root}/a") is None


def test_transaction_does_all_or_nothing(store, root):
    store.put(f"{root}/a", b"1")
    store.put(f"{root}/b", b"1")
    operations = [Put(f"{root}/a", b"2"), Delete(f"{root}/b"), Put(f"{root}/c", b"2")]
    refused = store.transact(
        [ValueIs(f"{root}/a", b"1"), Absent(f"{root}/c"), Absent(f"{root}/b")], operations
    )
    assert refused is None
    assert [pair.value for pair in store.range(f"{root}/")] == [b"1", b"1"]
    revision = store.transact([ValueIs(f"{root}/a", b"1"), Absent(f"{root}/c")], operations)
    assert store.range(f"{root}/") == [
        KeyValue(f"{root}/a", b"2", revision),
        KeyValue(f"{root}/c", b"2", revision),
    ]


def test_transaction_that_changes_nothing_answers_the_revision(store, root):
    revision = store.put(f"{root}/a", b"1")
    assert store.transact([RevisionIs(f"{root}/a", revision)], []) >= revision
    assert store.transact([], [Delete(f"{root}/none")]) >= revision
    assert store.transact([Absent(f"{root}/a")], []) is None
    assert store.put(f"{root}/a", b"2") > revision


def test_key_changed_twice_by_one_transaction_is_refused(store, root):
    with pytest.raises(InvalidRequestError):
        store.transact([], [Put(f"{root}/a", b"1"), Delete(f"{root}/a")])
    assert store.get(f"{root}/a") is None


def test_transaction_of_128_operations_is_done_and_one_more_is_refused(store, root):
    names = [f"{root}/{number:03d}" for number in range(129)]
    with pytest.raises(InvalidRequestError):
        store.transact([], [Put(name, b"") for name in names])
    assert store.range(f"{root}/") == []
    assert store.transact([Absent(name) for name in names[1:]], [Put(n, b"") for n in names[1:]])
    assert len(store.range(f"{root}/")) == 128


def test_one_of_many_threads_creates_a_key(open_store, root):
    stores = [open_store(), open_store()]
    barrier = threading.Barrier(8)
    winners = []

    def create(number):
        barrier.wait()
        if stores[number % 2].transact([Absent(f"{root}/a")], [Put(f"{root}/a", b"%d" % number)]):
            winners.append(b"%d" % number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners == [stores[0].get(f"{root}/a").value]


def test_readers_see_whole_transactions(open_store, root):
    """Two keys always change together; no read of both sees them differ."""
    writer, reader = open_store(), open_store()
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            writer.transact([], [Put(f"{root}/{name}", b"%d" % number) for name in "ab"])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = []
        while len(seen) < 50:
            found = reader.range(f"{root}/")
            assert len({(pair.value, pair.revision) for pair in found}) <= 1
            seen.extend(pair.revision for pair in found[:1])
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen)


# -- leases -------------------------------------------------------------------------------------


def test_lease_holds_for_less_than_its_time(store, root):
    before = SystemClock.boottime()
    lease = store.grant_lease(60)
    assert lease.ttl_seconds == 60
    assert before < lease.valid_until <= SystemClock.boottime() + 60
    first = lease.valid_until
    time.sleep(0.01)
    lease.renew()
    assert first < lease.valid_until <= SystemClock.boottime() + 60
    lease.revoke()
    assert lease.valid_until <= SystemClock.boottime()


@pytest.mark.nightly
def test_keys_vanish_when_their_lease_ends(open_store, root):
    """One lease is renewed past the end of another: only the other's keys vanish."""
    store, other = open_store(), open_store()
    left, kept = store.grant_lease(1), store.grant_lease(2)
    store.put(f"{root}/left", b"", left)
    last = store.transact([], [Put(f"{root}/left2", b"", left), Put(f"{root}/kept", b"", kept)])
    store.put(f"{root}/forever", b"")

    def gone():
        kept.renew()
        return other.get(f"{root}/left") is None

    eventually(gone)
    assert SystemClock.boottime() >= left.valid_until
    assert _keys(other.range(f"{root}/")) == [f"{root}/forever", f"{root}/kept"]
    assert other.transact([Absent(f"{root}/left")], [Put(f"{root}/left", b"new")]) > last
    with pytest.raises(NotFoundError):
        left.renew()
    with pytest.raises(NotFoundError):
        store.put(f"{root}/x", b"", left)
    with pytest.raises(NotFoundError):
        store.transact([], [Put(f"{root}/x", b""), Put(f"{root}/y", b"", left)])
    assert store.range(f"{root}/x") == []
    assert store.get(f"{root}/left").value == b"new"
    kept.revoke()


def test_revoked_lease_takes_its_keys_with_it(open_store, root):
    store, other = open_store(), open_store()
    lease = store.grant_lease(30)
    store.put(f"{root}/a", b"", lease)
    lease.revoke()
    assert other.get(f"{root}/a") is None
    lease.revoke()
    with pytest.raises(NotFoundError):
        lease.renew()


def test_key_put_again_without_the_lease_stays(store, root):
    lease = store.grant_lease(30)
    store.put(f"{root}/a", b"", lease)
    store.put(f"{root}/b", b"", lease)
    store.put(f"{root}/a", b"mine")
    lease.revoke()
    assert _keys(store.range(f"{root}/")) == [f"{root}/a"]


@each("ttl", [0, -1, float("nan"), float("inf")])
def test_lease_of_no_time_is_refused(store, ttl):
    with pytest.raises(InvalidRequestError):
        store.grant_lease(ttl)


def test_lease_of_another_store_is_refused(store, root):
    class Strange:
        ttl_seconds = 1.0
        valid_until = 0.0

    with pytest.raises(InvalidRequestError):
        store.put(f"{root}/a", b"", Strange())
    assert store.get(f"{root}/a") is None


# -- watches ------------------------------------------------------------------------------------


def test_watch_hints_at_changes_below_its_prefix(open_store, root):
    store, other = open_store(), open_store()
    heard = []
    watch = store.watch(f"{root}/t/", heard.append)
    other.put(f"{root}/t/a", b"")
    other.put(f"{root}/t2", b"")
    eventually(lambda: f"{root}/t/a" in heard)
    heard.clear()
    other.transact([], [Put(f"{root}/t/b", b""), Delete(f"{root}/t/a")])
    eventually(lambda: {f"{root}/t/a", f"{root}/t/b"} <= set(heard))
    assert f"{root}/t2" not in heard
    watch.close()
    watch.close()
    heard.clear()
    later = []
    with closing(store.watch(f"{root}/t/", later.append)):
        other.put(f"{root}/t/c", b"")
        eventually(lambda: later)
    assert heard == []


def test_watch_is_ended_by_close(open_store, root):
    store = open_store()
    heard = []
    watch = store.watch(f"{root}/", heard.append)
    store.close()
    watch.close()
    other = open_store()
    if other is not store:  # the one in memory is gone for good
        later = []
        with closing(other.watch(f"{root}/", later.append)):
            other.put(f"{root}/a", b"")
            eventually(lambda: later)
    assert heard == []


# -- closing ------------------------------------------------------------------------------------

_USES = {
    "get": lambda store: store.get("/a"),
    "range": lambda store: store.range("/a"),
    "empty range": lambda store: store.range("/a", limit=0),
    "put": lambda store: store.put("/a", b""),
    "delete": lambda store: store.delete("/a"),
    "delete_prefix": lambda store: store.delete_prefix("/a"),
    "transact": lambda store: store.transact([], []),
    "grant_lease": lambda store: store.grant_lease(1),
    "watch": lambda store: store.watch("/a", print),
}


@each("use", _USES)
def test_close_may_be_called_twice_and_ends_the_store(store, use):
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        _USES[use](store)


def test_close_under_use_gives_every_thread_an_answer(open_store, root):
    store = open_store()
    started = threading.Barrier(5)
    unexpected = []

    def use(number):
        started.wait()
        try:
            while True:
                store.put(f"{root}/{number}", b"")
                store.get(f"{root}/{number}")
        except IsterError as error:
            if not isinstance(error, ClosedError) and type(error).__name__ != "CommitUnknownError":
                unexpected.append(error)
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.05)
    store.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert unexpected == []
