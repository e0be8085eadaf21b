"""Cursors in the metadata store: forward, whoever writes them and whatever becomes of answers."""

import pytest

from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    UnavailableError,
)
from ister.format.records import Progress, decode_progress, encode_progress
from ister.tier.cursors import clip_progress, load_progress, save_progress
from tier_rig import NAME, PREFIX, Cluster
from tier_rig import TTL_SECONDS as TTL

CURSORS = f"{PREFIX}/subscriptions{NAME}/"
KEY = f"{CURSORS}billing/progress"
LIFE = "0123456789abcdef"
ATTEMPTS = 5


@pytest.fixture
def cluster():
    return Cluster()


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


def offset_of(store, key=KEY):
    return load_progress(store, key).offset


def interfere(store, kind, change, *, times=1):
    """Has `change` happen before the next operations of a kind, by somebody else."""
    left = [times]

    def before(seen, key):
        if seen == kind and left[0]:
            left[0] -= 1
            store.before = lambda kind, key: None
            change()
            store.before = before

    store.before = before
    return left


def lose_answers(store, times):
    """The next transactions happen, and nobody hears of it."""
    left = [times]

    def after(kind, key):
        if kind == "transact" and left[0]:
            left[0] -= 1
            raise CommitUnknownError("the answer was lost")

    store.after = after


# -- reading ------------------------------------------------------------------------------------


def test_cursor_that_nobody_has_written_is_none(store):
    assert load_progress(store, KEY) is None


def test_cursor_comes_back_as_it_was_saved(store, owned):
    saved = save_progress(owned, "billing", a_cursor(7, host="h1"))
    assert saved == a_cursor(7, host="h1")
    assert load_progress(store, KEY) == saved


def test_cursor_that_is_something_else_is_named(store):
    store.put(KEY, b"[]")
    with pytest.raises(CorruptDataError) as damaged:
        load_progress(store, KEY)
    assert damaged.value.path == KEY


# -- forward ------------------------------------------------------------------------------------


def test_cursor_moves_forward(store, owned):
    for offset in (0, 3, 3, 8):
        assert save_progress(owned, "billing", a_cursor(offset)).offset == offset
    assert offset_of(store) == 8


def test_lower_offset_leaves_the_cursor_and_shows_that_the_subscription_lives(store, owned):
    put(store, 10, at=1000)
    saved = save_progress(owned, "billing", a_cursor(4, at=2000))
    assert (saved.offset, saved.timestamp) == (10, 2000)
    assert load_progress(store, KEY) == saved


def test_older_timestamp_does_not_make_a_subscription_look_idle(store, owned):
    put(store, 10, at=5000)
    assert save_progress(owned, "billing", a_cursor(12, at=3000)).timestamp == 5000
    assert (load_progress(store, KEY).offset, load_progress(store, KEY).timestamp) == (12, 5000)


def test_fields_that_others_keep_in_a_cursor_stay(store, owned):
    put(store, 1, zone="north", host="h1")
    save_progress(owned, "billing", a_cursor(2, host="h2"))
    assert load_progress(store, KEY).more == {"zone": "north", "host": "h2"}


def test_cursor_of_a_topic_that_was_made_again_begins_anew(store, owned):
    put(store, 900, at=9000, life="of another life", zone="north")
    saved = save_progress(owned, "billing", a_cursor(3, at=100))
    assert saved == a_cursor(3, at=100)
    assert load_progress(store, KEY) == saved


# -- races --------------------------------------------------------------------------------------


def test_cursor_that_another_moves_further_in_between_is_not_put_back(store, owned):
    put(store, 1)
    interfere(store, "transact", lambda: put(store, 50))
    assert save_progress(owned, "billing", a_cursor(10)).offset == 50
    assert offset_of(store) == 50


def test_cursor_that_another_moves_less_far_in_between_goes_on(store, owned):
    put(store, 1)
    interfere(store, "transact", lambda: put(store, 5))
    assert save_progress(owned, "billing", a_cursor(10)).offset == 10
    assert offset_of(store) == 10


def test_first_cursor_that_another_makes_in_between_is_not_put_back(store, owned):
    interfere(store, "transact", lambda: put(store, 50))
    assert save_progress(owned, "billing", a_cursor(10)).offset == 50


def test_cursor_that_vanishes_in_between_is_made(store, owned):
    put(store, 1)
    interfere(store, "transact", lambda: store.delete(KEY))
    assert save_progress(owned, "billing", a_cursor(10)).offset == 10
    assert offset_of(store) == 10


def test_cursor_that_changes_at_every_attempt_is_a_conflict(store, owned):
    put(store, 1)
    left = interfere(store, "transact", lambda: put(store, 2), times=100)
    with pytest.raises(ConflictError) as refused:
        save_progress(owned, "billing", a_cursor(10))
    assert refused.value.path == KEY
    assert left[0] == 100 - ATTEMPTS
    assert offset_of(store) == 2


def test_cursor_that_changes_at_all_attempts_but_one_is_saved(store, owned):
    put(store, 1)
    interfere(store, "transact", lambda: put(store, 2), times=ATTEMPTS - 1)
    assert save_progress(owned, "billing", a_cursor(10)).offset == 10


# -- who may move them --------------------------------------------------------------------------


def test_owner_that_was_replaced_does_not_move_a_cursor(cluster, store, owned):
    """Goal: it may be ahead of what its successor has, and messages would be passed over."""
    put(store, 5)
    cluster.clock.advance(TTL + 1)
    successor = cluster.claim("b", take_over=True)
    with pytest.raises(FencedError):
        save_progress(owned, "billing", a_cursor(900))
    assert offset_of(store) == 5
    assert save_progress(successor, "billing", a_cursor(6)).offset == 6


def test_owner_that_is_replaced_in_between_does_not_move_a_cursor(cluster, store, owned):
    put(store, 5)
    cluster.clock.advance(TTL + 1)
    interfere(store, "transact", lambda: cluster.claim("b", take_over=True))
    with pytest.raises(FencedError):
        save_progress(owned, "billing", a_cursor(900))
    assert offset_of(store) == 5


def test_change_of_a_replaced_owner_that_lands_late_moves_nothing(cluster, store, owned):
    put(store, 5)
    store.delay_next_change(100)
    with pytest.raises((ConflictError, UnavailableError)):
        save_progress(owned, "billing", a_cursor(900))
    store._changes_to_delay = 0
    cluster.clock.advance(TTL + 1)
    cluster.claim("b", take_over=True)
    assert set(store.deliver_delayed()) == {None}
    assert offset_of(store) == 5


def test_topic_record_that_others_add_to_keeps_no_cursor_back(cluster, store, owned):
    key = cluster.keys.record
    value = store.get(key).value
    store.put(key, value.replace(b'{"', b'{"schema":"x","', 1))
    assert save_progress(owned, "billing", a_cursor(3)).offset == 3
    assert b"schema" in store.get(key).value


# -- lost answers -------------------------------------------------------------------------------


def test_answer_that_never_landed_is_written_again(store, owned):
    put(store, 1)
    store.delay_next_change()
    assert save_progress(owned, "billing", a_cursor(10)).offset == 10
    assert offset_of(store) == 10


def test_change_that_lands_late_does_not_put_the_cursor_back(store, owned):
    put(store, 1)
    store.delay_next_change()
    save_progress(owned, "billing", a_cursor(10))
    save_progress(owned, "billing", a_cursor(30))
    assert store.deliver_delayed() == [None]
    assert offset_of(store) == 30


def test_change_that_lands_between_the_attempts_is_found(store, owned):
    put(store, 1)
    store.delay_next_change()
    landed = []

    def before(kind, key):
        if store.delayed and not landed:
            landed.extend(store.deliver_delayed())

    store.before = before
    assert save_progress(owned, "billing", a_cursor(10)).offset == 10
    assert len(landed) == 1
    assert landed != [None]
    assert offset_of(store) == 10


@pytest.mark.parametrize("known", [None, 1])
def test_change_that_happened_and_was_not_heard_of_is_found(store, owned, known):
    if known is not None:
        put(store, known)
    lose_answers(store, 1)
    assert save_progress(owned, "billing", a_cursor(10)) == a_cursor(10)
    assert load_progress(store, KEY) == a_cursor(10)


def test_first_cursor_that_lands_late_does_not_replace_a_later_one(store, owned):
    store.delay_next_change()
    save_progress(owned, "billing", a_cursor(10))
    save_progress(owned, "billing", a_cursor(11))
    assert store.deliver_delayed() == [None]
    assert offset_of(store) == 11


def test_answers_that_are_lost_again_and_again_are_an_error(store, owned):
    put(store, 1)
    store.delay_next_change(100)
    with pytest.raises((ConflictError, UnavailableError)):
        save_progress(owned, "billing", a_cursor(10))
    assert len(store.delayed) >= ATTEMPTS
    assert offset_of(store) == 1
    results = store.deliver_delayed()
    assert len([result for result in results if result is not None]) == 1
    assert offset_of(store) == 10


def test_silent_store_is_an_error_and_moves_nothing(store, owned):
    put(store, 1)

    def silent(kind, key):
        if kind == "transact":
            raise UnavailableError("silent")

    store.before = silent
    with pytest.raises(UnavailableError):
        save_progress(owned, "billing", a_cursor(10))
    store.before = lambda kind, key: None
    assert offset_of(store) == 1


# -- putting back to the end --------------------------------------------------------------------


def test_cursors_ahead_of_the_end_are_put_back_and_the_others_stay(store):
    for name, offset in {"a": 3, "b": 10, "c": 11, "d": 500}.items():
        put(store, offset, key=f"{CURSORS}{name}/progress", at=1234, zone=name)
    assert clip_progress(store, CURSORS, 10) == [f"{CURSORS}c/progress", f"{CURSORS}d/progress"]
    found = {kv.key: decode_progress(kv.value, key=kv.key) for kv in store.range(CURSORS)}
    assert [progress.offset for progress in found.values()] == [3, 10, 10, 10]
    # It was not seen alive by this, and what others keep in it stays.
    assert found[f"{CURSORS}d/progress"] == a_cursor(10, at=1234, zone="d")


def test_nothing_ahead_of_the_end_changes_nothing(store):
    put(store, 10)
    revision = store.revision
    assert clip_progress(store, CURSORS, 10) == []
    assert clip_progress(store, "/danube/subscriptions/default/others/", 0) == []
    assert store.revision == revision


def test_keys_beside_the_cursors_are_left_alone(store):
    store.put(f"{CURSORS}billing/config", b"not even json")
    store.put("/danube/subscriptions/default/orders2/x/progress", encode_progress(a_cursor(99)))
    put(store, 99)
    assert clip_progress(store, CURSORS, 5) == [KEY]
    assert store.get(f"{CURSORS}billing/config").value == b"not even json"
    assert offset_of(store, "/danube/subscriptions/default/orders2/x/progress") == 99


def test_cursor_that_cannot_be_read_does_not_keep_the_others_from_being_put_back(store):
    store.put(f"{CURSORS}a/progress", b"not json")
    put(store, 99)
    assert clip_progress(store, CURSORS, 5) == [KEY]
    assert store.get(f"{CURSORS}a/progress").value == b"not json"


def test_end_of_an_empty_topic_puts_cursors_to_its_beginning(store):
    put(store, 99)
    assert clip_progress(store, CURSORS, 0) == [KEY]
    assert offset_of(store) == 0


def test_cursor_that_moves_while_it_is_put_back_is_put_back_all_the_same(store):
    put(store, 20)
    interfere(store, "transact", lambda: put(store, 30, at=7777))
    assert clip_progress(store, CURSORS, 10) == [KEY]
    assert load_progress(store, KEY) == a_cursor(10, at=7777)


def test_cursor_that_another_puts_back_meanwhile_is_left_to_that_one(store):
    put(store, 20)
    interfere(store, "transact", lambda: put(store, 4))
    assert clip_progress(store, CURSORS, 10) == []
    assert offset_of(store) == 4


def test_cursors_that_keep_changing_are_a_conflict(store):
    put(store, 20)
    interfere(store, "transact", lambda: put(store, 20), times=100)
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
    lose_answers(store, 1)
    try:
        told = clip_progress(store, CURSORS, 10)
    except UnavailableError:
        told = clip_progress(store, CURSORS, 10)
    assert told in ([], [KEY])
    assert offset_of(store) == 10


def test_put_back_that_lands_late_does_not_undo_what_came_after(store, owned):
    put(store, 20)
    store.delay_next_change()
    try:
        clip_progress(store, CURSORS, 10)
    except UnavailableError:
        clip_progress(store, CURSORS, 10)
    save_progress(owned, "billing", a_cursor(12))
    assert store.deliver_delayed() == [None]
    assert offset_of(store) == 12


@pytest.mark.parametrize(
    ("delivery", "is_kept"),
    [
        ({"end": 8}, True),
        ({"end": 9}, False),
        ({"acked": []}, False),
        ({"end": "8"}, False),
        ("text", False),
        ({}, True),
    ],
)
def test_what_is_acknowledged_beyond_the_end_is_forgotten(store, owned, delivery, is_kept):
    put(store, 5, delivery=delivery, host="h1")
    assert clip_progress(store, CURSORS, 8, owned=owned) == ([] if is_kept else [KEY])
    found = load_progress(store, KEY)
    assert (found.offset, found.more["host"]) == (5, "h1")
    assert found.more["delivery"] == (delivery if is_kept else {})
