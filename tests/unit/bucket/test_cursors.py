"""Cursors ahead of a topic's end are moved back to it, whatever becomes of the answers."""

import pytest

from ister.bucket.cursors import clip_progress
from ister.errors import CommitUnknownError, ConflictError, FencedError, UnavailableError
from ister.format.records import Progress, decode_progress, encode_progress
from tests.support.stores import NAME, PREFIX, failing, once
from tests.support.stores import TTL_SECONDS as TTL

CURSORS = f"{PREFIX}/subscriptions{NAME}/"
KEY = f"{CURSORS}billing/progress"
LIFE = "0123456789abcdef"


@pytest.fixture
def store(cluster):
    return cluster.metadata


@pytest.fixture
def owned(cluster):
    """The topic, as its owner has it."""
    return cluster.claim("a")


def a_cursor(offset, *, at=1000, life=LIFE, **more):
    return Progress(offset=offset, timestamp=at, incarnation=life, more=more)


def put(store, offset, *, key=KEY, **fields):
    store.put(key, encode_progress(a_cursor(offset, **fields)))


def load(store, key=KEY):
    return decode_progress(store.get(key).value, key=key)


def offset_of(store, key=KEY):
    return load(store, key).offset


def test_cursors_ahead_of_the_end_are_put_back_and_the_others_stay(store):
    for name, offset in {"a": 3, "b": 10, "c": 11, "d": 500}.items():
        put(store, offset, key=f"{CURSORS}{name}/progress", at=1234, zone=name)
    assert clip_progress(store, CURSORS, 10) == [f"{CURSORS}c/progress", f"{CURSORS}d/progress"]
    found = {kv.key: decode_progress(kv.value, key=kv.key) for kv in store.range(CURSORS)}
    assert [progress.offset for progress in found.values()] == [3, 10, 10, 10]
    # It was not seen alive by this, and what others keep in it stays.
    assert found[f"{CURSORS}d/progress"] == a_cursor(10, at=1234, zone="d")


def test_keys_beside_the_cursors_are_left_alone(store):
    store.put(f"{CURSORS}billing/config", b"not even json")
    store.put("/danube/subscriptions/default/orders2/x/progress", encode_progress(a_cursor(99)))
    put(store, 99)
    assert clip_progress(store, CURSORS, 5) == [KEY]
    assert store.get(f"{CURSORS}billing/config").value == b"not even json"
    assert offset_of(store, "/danube/subscriptions/default/orders2/x/progress") == 99


def test_unreadable_cursor_does_not_keep_the_others_from_being_put_back(store):
    store.put(f"{CURSORS}a/progress", b"not json")
    put(store, 99)
    assert clip_progress(store, CURSORS, 0) == [KEY]
    assert offset_of(store) == 0
    assert store.get(f"{CURSORS}a/progress").value == b"not json"


def test_cursor_that_moves_while_it_is_put_back_is_put_back_all_the_same(store):
    put(store, 20)
    store.before = once("transact", lambda: put(store, 30, at=7777))
    assert clip_progress(store, CURSORS, 10) == [KEY]
    assert load(store) == a_cursor(10, at=7777)


def test_cursor_that_another_puts_back_meanwhile_is_left_to_that_one(store):
    put(store, 20)
    store.before = once("transact", lambda: put(store, 4))
    assert clip_progress(store, CURSORS, 10) == []
    assert offset_of(store) == 4


def test_cursors_that_keep_changing_are_a_conflict(store):
    put(store, 20)
    store.before = lambda kind, key: put(store, 20) if kind == "transact" else None
    with pytest.raises(ConflictError) as refused:
        clip_progress(store, CURSORS, 10)
    assert refused.value.path == CURSORS


def test_lost_answer_does_not_keep_cursors_from_being_put_back(store):
    """Goal: opening a topic does not fail because one answer was lost."""
    put(store, 20)
    put(store, 30, key=f"{CURSORS}other/progress")
    store.delay_next_change()
    clip_progress(store, CURSORS, 10)
    assert (offset_of(store), offset_of(store, f"{CURSORS}other/progress")) == (10, 10)


def test_put_back_that_happened_and_was_not_heard_of_is_told_at_most_once(store):
    put(store, 20)
    store.after = failing("transact", times=1, error=CommitUnknownError)
    try:
        told = clip_progress(store, CURSORS, 10)
    except UnavailableError:
        told = clip_progress(store, CURSORS, 10)
    assert told in ([], [KEY])
    assert offset_of(store) == 10


def test_put_back_that_lands_late_does_not_undo_what_came_after(store):
    put(store, 20)
    store.delay_next_change()
    try:
        clip_progress(store, CURSORS, 10)
    except UnavailableError:
        clip_progress(store, CURSORS, 10)
    put(store, 12)
    assert store.deliver_delayed() == [None]
    assert offset_of(store) == 12


def test_what_is_acknowledged_beyond_the_end_is_forgotten(store, owned):
    for delivery, is_kept in [
        ({"end": 8}, True),
        ({"end": 9}, False),
        ({"acked": []}, False),
        ({"end": "8"}, False),
        ("text", False),
        ({}, True),
    ]:
        put(store, 5, delivery=delivery, host="h1")
        clipped = clip_progress(store, CURSORS, 8, owned=owned)
        assert clipped == ([] if is_kept else [KEY]), delivery
        found = load(store)
        assert (found.offset, found.more["host"]) == (5, "h1"), delivery
        assert found.more["delivery"] == (delivery if is_kept else {})


def test_replaced_owner_moves_no_cursor(cluster, store, owned):
    put(store, 20)
    cluster.clock.advance(TTL + 1)
    cluster.claim("b", take_over=True)
    with pytest.raises(FencedError):
        clip_progress(store, CURSORS, 10, owned=owned)
    assert offset_of(store) == 20
