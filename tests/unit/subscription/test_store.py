"""Subscriptions in the metadata store: made whole, moved forward, fenced, whatever gets lost."""

import functools
import inspect
import json
from dataclasses import replace

import pytest

from ister.base.model import TopicName
from ister.bucket.cursors import clip_progress
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from ister.format.records import Progress, decode_progress, encode_progress
from ister.subscription import store as module
from ister.subscription.delivery import Delivery
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from ister.subscription.store import (
    PlannedSettings,
    StoredConsumer,
    StoredSubscription,
    SubscriptionStore,
    check_subscription_name,
)
from tests.support.cases import each
from tests.support.stores import NAME, PREFIX, TTL_SECONDS, Cluster

LIFE = "0123456789abcdef"
PLACE = f"{PREFIX}/subscriptions{NAME}/"
PLANNED = f"{PLACE}planned"
DROPPING = FailurePolicy(max_redelivery_count=0, poison=PoisonPolicy.DROP)
OPTIONS, PROGRESS = f"{PLACE}billing/options", f"{PLACE}billing/progress"
SAVED = {"floor": 4, "acked": [[6, 8]], "failed": [[5, 2, "why"]], "end": 8}


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def metadata(cluster):
    return cluster.metadata


@pytest.fixture
def store(cluster):
    return SubscriptionStore(cluster.metadata, root_prefix=PREFIX, clock=cluster.clock)


def on_both_kinds_of_topics(test):
    """Runs a test for a topic with an owner in the metadata store, and for one without."""
    signature = inspect.signature(test)
    own = [one for one in signature.parameters if one in ("cluster", "metadata", "store", "owned")]

    @functools.wraps(test)
    def run(**fixtures):
        for is_owned in (True, False):
            cluster = Cluster()
            made = {
                "cluster": cluster,
                "metadata": cluster.metadata,
                "store": SubscriptionStore(
                    cluster.metadata, root_prefix=PREFIX, clock=cluster.clock
                ),
                "owned": cluster.claim("a") if is_owned else None,
            }
            try:
                test(**fixtures, **{name: made[name] for name in own})
            except BaseException as error:
                error.add_note(f"with an owner: {is_owned}")
                raise

    left = [one for name, one in signature.parameters.items() if name not in own]
    run.__signature__ = signature.replace(parameters=left)
    return run


def create(store, owned, name="billing", *, cursor=4, life=LIFE, **settings):
    settings = {"kind": SubscriptionKind.SHARED, **settings}
    return store.create(NAME, name, cursor=cursor, incarnation=life, owned=owned, **settings)


def save(store, owned, cursor, saved=None, *, name="billing", life=LIFE, **settings):
    return store.save_cursor(
        NAME, name, cursor=cursor, saved=saved, incarnation=life, owned=owned, **settings
    )


def cursor_of(metadata):
    return decode_progress(metadata.get(PROGRESS).value, key=PROGRESS).offset


def lose_answers(metadata, times, *, kind="transact"):
    left = [times]

    def after(seen, key):
        if seen == kind and left[0]:
            left[0] -= 1
            raise CommitUnknownError("the answer was lost")

    metadata.after = after


def interfere(metadata, change, *, kind="transact"):
    """Has `change` happen right before the next operation of that kind."""

    def before(seen, key):
        if seen == kind:
            metadata.before = lambda kind, key: None
            change()

    metadata.before = before


# -- names --------------------------------------------------------------------------------------


@each("name", ["a", "A-z_0.9", "x" * 120, ".."])
def test_names_that_are_taken(name):
    assert check_subscription_name(name) == name


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ü", "x" * 121, "a\n", None, 5])
def test_names_that_are_refused(store, name):
    with pytest.raises(InvalidRequestError):
        check_subscription_name(name)
    with pytest.raises(InvalidRequestError):
        create(store, None, name)


# -- making -------------------------------------------------------------------------------------


@on_both_kinds_of_topics
def test_new_subscription_has_its_cursor_at_once(store, metadata, owned, cluster):
    policy = FailurePolicy(poison=PoisonPolicy.DROP)
    made = create(store, owned, policy=policy, window=7)
    assert made == StoredSubscription(
        name="billing",
        kind=SubscriptionKind.SHARED,
        policy=policy,
        window=7,
        cursor=4,
        incarnation=LIFE,
        created_ms=cluster.clock.now_ns() // 1_000_000,
        receipt_key=made.receipt_key,
    )
    assert len(made.receipt_key) == 32
    assert made.receipt_key not in repr(made)
    assert metadata.get(OPTIONS).revision == metadata.get(PROGRESS).revision
    assert cursor_of(metadata) == 4
    assert store.load(NAME, LIFE) == {"billing": made}


@on_both_kinds_of_topics
def test_options_are_json_of_these_fields(store, metadata, owned):
    create(store, owned)
    fields = json.loads(metadata.get(OPTIONS).value)
    assert fields.keys() == {
        "kind",
        "failure_policy",
        "max_unacked_messages",
        "consumers",
        "created_ms",
        "incarnation",
        "receipt_key",
    }
    assert (fields["kind"], fields["max_unacked_messages"]) == ("shared", None)


@on_both_kinds_of_topics
def test_subscription_that_exists_is_given_as_it_is(store, owned):
    made = create(store, owned)
    save(store, owned, 9)
    again = create(store, owned, kind=SubscriptionKind.EXCLUSIVE, cursor=100)
    assert again == replace(made, cursor=9)


@on_both_kinds_of_topics
def test_a_subscription_of_an_earlier_version_has_no_key_until_it_gets_one(store, metadata, owned):
    made = create(store, owned)
    fields = json.loads(metadata.get(OPTIONS).value)
    del fields["receipt_key"]
    metadata.put(OPTIONS, json.dumps(fields).encode())
    [old] = store.load(NAME, LIFE).values()
    assert old == replace(made, receipt_key="")
    renewed = store.renew_key(NAME, old, owned=owned)
    assert len(renewed.receipt_key) == 32
    assert store.load(NAME, LIFE) == {"billing": renewed}
    assert store.renew_key(NAME, renewed, owned=owned).receipt_key != renewed.receipt_key


@on_both_kinds_of_topics
def test_lost_answers_make_no_second_subscription(store, metadata, owned):
    lose_answers(metadata, 2)
    made = create(store, owned)
    metadata.after = lambda kind, key: None
    assert store.load(NAME, LIFE) == {"billing": made}


def test_two_that_make_it_at_once_get_the_same(store, metadata, cluster):
    others = []
    interfere(metadata, lambda: others.append(create(store, None, cursor=2)))
    assert create(store, None, cursor=5) == others[0]
    assert cursor_of(metadata) == 2


@on_both_kinds_of_topics
def test_subscription_of_a_topic_that_is_gone_is_replaced(store, owned):
    create(store, owned, life="before", cursor=77)
    assert store.load(NAME, LIFE) == {}
    assert create(store, owned, cursor=0).cursor == 0
    assert store.load(NAME, "before") == {}


@on_both_kinds_of_topics
def test_cursor_of_a_stream_is_not_taken_for_a_subscription(store, metadata, owned):
    stream = encode_progress(Progress(offset=3, timestamp=1, incarnation=LIFE))
    metadata.put(PROGRESS, stream)
    assert store.load(NAME, LIFE) == {}
    assert store.topics() == []
    with pytest.raises(AlreadyExistsError):
        create(store, owned)
    with pytest.raises(NotFoundError):
        save(store, owned, 9)
    assert not store.delete(NAME, "billing", owned=owned)
    assert metadata.get(PROGRESS).value == stream


def test_one_that_was_fenced_makes_nothing(store, metadata, cluster):
    owned = cluster.claim("a")
    cluster.clock.advance(TTL_SECONDS + 1)
    cluster.claim("b", take_over=True)
    with pytest.raises(FencedError):
        create(store, owned)
    assert metadata.get(OPTIONS) is None


def test_store_that_keeps_changing_is_a_conflict(store, metadata):
    changes = iter(range(1000))

    def before(kind, key):
        if kind == "transact":
            metadata.before = lambda kind, key: None
            stream = Progress(offset=next(changes), timestamp=1, incarnation="other")
            metadata.put(PROGRESS, encode_progress(stream))
            metadata.before = before

    metadata.before = before
    with pytest.raises(ConflictError):
        create(store, None)


# -- cursors ------------------------------------------------------------------------------------


@on_both_kinds_of_topics
def test_cursor_moves_forward_with_what_is_saved(store, owned):
    create(store, owned)
    assert save(store, owned, 4, SAVED) == 4
    assert store.load(NAME, LIFE)["billing"].saved == SAVED
    assert save(store, owned, 8) == 8
    loaded = store.load(NAME, LIFE)["billing"]
    assert (loaded.cursor, loaded.saved) == (8, None)


@on_both_kinds_of_topics
def test_cursor_moves_back_only_by_force(store, metadata, owned):
    create(store, owned, cursor=50)
    assert save(store, owned, 3) == 50
    assert cursor_of(metadata) == 50
    assert save(store, owned, 3, force=True) == 3
    assert cursor_of(metadata) == 3


def test_fields_and_times_of_others_stay(store, metadata, cluster):
    create(store, None)
    known = decode_progress(metadata.get(PROGRESS).value, key=PROGRESS)
    later = replace(known, timestamp=known.timestamp + 10**6, more={**known.more, "host": "h"})
    metadata.put(PROGRESS, encode_progress(later))
    save(store, None, 9)
    found = decode_progress(metadata.get(PROGRESS).value, key=PROGRESS)
    assert (found.timestamp, found.more["host"]) == (later.timestamp, "h")
    cluster.clock.advance(10_000)
    save(store, None, 9)
    found = decode_progress(metadata.get(PROGRESS).value, key=PROGRESS)
    assert found.timestamp == cluster.clock.now_ns() // 1_000_000


@on_both_kinds_of_topics
def test_lost_answer_is_read_back(store, metadata, owned):
    create(store, owned)
    lose_answers(metadata, 1)
    assert save(store, owned, 9, SAVED) == 9
    assert cursor_of(metadata) == 9


def test_late_write_of_an_earlier_cursor_changes_nothing(store, metadata):
    """Its answer was lost and it lands when the next one has been written."""
    create(store, None)
    metadata.delay_next_change()
    assert save(store, None, 6) == 6
    save(store, None, 2, force=True)
    metadata.deliver_delayed()
    assert cursor_of(metadata) == 2


@on_both_kinds_of_topics
def test_cursor_of_a_subscription_that_was_deleted_is_not_made_again(store, metadata, owned):
    create(store, owned)
    store.delete(NAME, "billing", owned=owned)
    with pytest.raises(NotFoundError):
        save(store, owned, 9)
    assert metadata.get(PROGRESS) is None


def test_one_that_was_fenced_moves_nothing(store, metadata, cluster):
    owned = cluster.claim("a")
    create(store, owned)
    cluster.clock.advance(TTL_SECONDS + 1)
    cluster.claim("b", take_over=True)
    for change in (
        lambda: save(store, owned, 9),
        lambda: save(store, owned, 1, force=True),
        lambda: store.delete(NAME, "billing", owned=owned),
    ):
        with pytest.raises(FencedError):
            change()
    stored = store.load(NAME, LIFE)["billing"]
    with pytest.raises(FencedError):
        store.save_options(NAME, replace(stored, window=3), owned=owned)
    assert store.load(NAME, LIFE)["billing"] == stored


@on_both_kinds_of_topics
def test_store_that_does_not_answer_says_so(store, metadata, owned):
    create(store, owned)

    def before(kind, key):
        raise UnavailableError("down")

    metadata.before = before
    for change in (
        lambda: create(store, owned),
        lambda: save(store, owned, 9),
        lambda: store.load(NAME, LIFE),
        store.topics,
        lambda: store.delete(NAME, "billing", owned=owned),
        lambda: store.delete_all(NAME),
    ):
        with pytest.raises(UnavailableError):
            change()
    metadata.before = lambda kind, key: None


@on_both_kinds_of_topics
@each("value", [b"{", None], ids=["damaged", "lost"])
def test_cursor_that_cannot_be_read_begins_at_zero_and_is_replaced(store, metadata, owned, value):
    create(store, owned)
    if value is None:
        metadata.delete(PROGRESS)
    else:
        metadata.put(PROGRESS, value)
    loaded = store.load(NAME, LIFE)["billing"]
    assert (loaded.cursor, loaded.saved) == (0, None)
    assert create(store, owned, cursor=100).cursor == 0
    assert save(store, owned, 2) == 2
    assert cursor_of(metadata) == 2


# -- options ------------------------------------------------------------------------------------


@on_both_kinds_of_topics
def test_options_come_back_as_they_were_saved(store, owned):
    made = create(store, owned)
    wanted = replace(
        made,
        policy=FailurePolicy(max_redelivery_count=1),
        window=20,
        consumers={
            "one": StoredConsumer(id=2**62, filters=("eu-*", "us-?"), seen_ms=5),
            "zwölf / 12": StoredConsumer(id=7),
        },
    )
    store.save_options(NAME, wanted, owned=owned)
    assert store.load(NAME, LIFE) == {"billing": wanted}


@on_both_kinds_of_topics
def test_options_that_are_the_same_are_not_written(store, metadata, owned):
    made = create(store, owned)
    before = metadata.get(OPTIONS).revision
    store.save_options(NAME, made, owned=owned)
    assert metadata.get(OPTIONS).revision == before


@on_both_kinds_of_topics
def test_options_of_a_newer_ister_keep_their_fields(store, metadata, owned):
    made = create(store, owned)
    fields = json.loads(metadata.get(OPTIONS).value)
    metadata.put(OPTIONS, json.dumps({**fields, "colour": "red"}).encode())
    store.save_options(NAME, replace(made, window=3), owned=owned)
    assert json.loads(metadata.get(OPTIONS).value)["colour"] == "red"


@on_both_kinds_of_topics
def test_options_of_a_subscription_that_is_gone_are_not_made_again(store, metadata, owned):
    made = create(store, owned)
    store.delete(NAME, "billing", owned=owned)
    with pytest.raises(NotFoundError):
        store.save_options(NAME, made, owned=owned)
    create(store, owned, life="another")
    with pytest.raises(NotFoundError):
        store.save_options(NAME, made, owned=owned)


@on_both_kinds_of_topics
@each(
    "value",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"incarnation": 5}',
        b'{"incarnation": "0123456789abcdef"}',
        (
            b'{"incarnation": "0123456789abcdef", "kind": "odd", "failure_policy": {}, '
            b'"max_unacked_messages": null}'
        ),
        (
            b'{"incarnation": "0123456789abcdef", "kind": "shared", "failure_policy": {}, '
            b'"max_unacked_messages": null, "consumers": []}'
        ),
    ],
)
def test_damaged_options_keep_nobody_from_the_others(store, metadata, owned, value):
    create(store, owned)
    create(store, owned, "other")
    metadata.put(OPTIONS, value)
    assert list(store.load(NAME, LIFE)) == ["other"]
    with pytest.raises(CorruptDataError) as damaged:
        create(store, owned)
    assert damaged.value.path == OPTIONS
    assert store.delete(NAME, "billing", owned=owned)
    assert create(store, owned).cursor == 4


# -- settings of subscriptions to come -------------------------------------------------------------


def plan(store, owned, name="billing", *, life=LIFE, **settings):
    store.plan(NAME, name, PlannedSettings(**settings), incarnation=life, owned=owned)


@on_both_kinds_of_topics
def test_planned_settings_are_those_of_the_new_subscription_and_used_once(store, metadata, owned):
    assert store.planned(NAME, "billing", LIFE) is None
    plan(store, owned, policy=DROPPING)
    plan(store, owned, window=3)
    plan(store, owned, "other", window=4)
    assert store.planned(NAME, "billing", LIFE) == PlannedSettings(policy=DROPPING, window=3)
    assert store.load(NAME, LIFE) == {}
    assert store.topics() == []
    lose_answers(metadata, 1)
    made = create(store, owned)
    assert (made.policy, made.window) == (DROPPING, 3)
    assert store.load(NAME, LIFE)["billing"] == made
    assert store.planned(NAME, "billing", LIFE) is None
    assert store.planned(NAME, "other", LIFE) == PlannedSettings(window=4)
    create(store, owned, "other")
    assert metadata.get(PLANNED) is None
    assert (create(store, owned, "third").policy, create(store, owned, "third").window) == (
        FailurePolicy(),
        None,
    )


def test_planned_settings_are_json_of_these_fields(store, metadata):
    plan(store, None, policy=DROPPING)
    plan(store, None, "b", window=3)
    assert json.loads(metadata.get(PLANNED).value) == {
        "incarnation": LIFE,
        "subscriptions": {
            "billing": {"failure_policy": DROPPING.to_json()},
            "b": {"max_unacked_messages": 3},
        },
    }


@on_both_kinds_of_topics
def test_settings_that_are_planned_while_the_subscription_is_created_are_in_it(
    store, metadata, owned
):
    interfere(metadata, lambda: plan(store, owned, policy=DROPPING))
    assert create(store, owned).policy == DROPPING
    assert metadata.get(PLANNED) is None


@on_both_kinds_of_topics
def test_nothing_is_planned_for_a_subscription_that_exists(store, metadata, owned):
    interfere(metadata, lambda: create(store, owned))
    with pytest.raises(AlreadyExistsError):
        plan(store, owned, window=3)
    assert metadata.get(PLANNED) is None
    assert store.load(NAME, LIFE)["billing"].window is None


def test_planned_settings_of_a_topic_that_is_gone_are_not_the_next_ones(store, metadata):
    plan(store, None, window=3)
    assert store.planned(NAME, "billing", "another life") is None
    assert create(store, None, life="another life").window is None
    store.delete_all(NAME)
    assert metadata.get(PLANNED) is None


@each(
    "value", [b"{", b"[]", b'{"incarnation": "0123456789abcdef", "subscriptions": {"billing": 5}}']
)
def test_damaged_planned_settings_keep_nobody_from_subscribing(store, metadata, value):
    metadata.put(PLANNED, value)
    assert store.planned(NAME, "billing", LIFE) is None
    assert create(store, None).policy == FailurePolicy()
    plan(store, None, "b", window=3)
    assert store.planned(NAME, "b", LIFE) == PlannedSettings(window=3)


def test_damaged_planned_policy_is_the_default(store, metadata):
    plan(store, None, policy=DROPPING, window=3)
    metadata.put(PLANNED, metadata.get(PLANNED).value.replace(b'"drop"', b'"explode"'))
    made = create(store, None)
    assert (made.policy, made.window) == (FailurePolicy(), 3)


def test_planned_settings_are_bounded(store, monkeypatch):
    monkeypatch.setattr(module, "_PLANNED_MAX", 2)
    plan(store, None, "a", window=1)
    plan(store, None, "b", window=1)
    with pytest.raises(CapacityError):
        plan(store, None, "c", window=1)
    plan(store, None, "b", window=2)
    with pytest.raises(InvalidRequestError):
        plan(store, None, "a/b", window=1)


def test_one_that_was_fenced_plans_nothing(store, metadata, cluster):
    owned = cluster.claim("a")
    cluster.clock.advance(TTL_SECONDS + 1)
    cluster.claim("b", take_over=True)
    with pytest.raises(FencedError):
        plan(store, owned, window=3)
    assert metadata.get(PLANNED) is None


# -- removing -----------------------------------------------------------------------------------


@on_both_kinds_of_topics
def test_deleted_subscription_is_gone_with_its_cursor(store, metadata, owned):
    create(store, owned)
    create(store, owned, "billing2")
    assert store.delete(NAME, "billing", owned=owned)
    assert not store.delete(NAME, "billing", owned=owned)
    assert list(store.load(NAME, LIFE)) == ["billing2"]
    assert [item.key for item in metadata.range(f"{PLACE}billing/")] == []


def test_deleted_topic_has_no_subscriptions(store, metadata):
    longer = TopicName(namespace=NAME.namespace, topic=f"{NAME.topic}-2")
    create(store, None)
    store.create(longer, "s", kind=SubscriptionKind.SHARED, cursor=0, incarnation=LIFE, owned=None)
    lose_answers(metadata, 1, kind="delete_prefix")
    store.delete_all(NAME)
    assert store.load(NAME, LIFE) == {}
    assert list(store.load(longer, LIFE)) == ["s"]
    assert store.topics() == [longer]


def test_topics_are_those_with_subscriptions(store, metadata):
    names = [TopicName(namespace="ns", topic=f"t{n}") for n in range(40)]
    for name in names:
        for subscription in ("a", "b", "c"):
            store.create(
                name,
                subscription,
                kind=SubscriptionKind.EXCLUSIVE,
                cursor=0,
                incarnation=LIFE,
                owned=None,
            )
    metadata.put(f"{PREFIX}/subscriptions/bad name/t/s/options", b"{}")
    metadata.put(f"{PREFIX}/subscriptions/ns/deep/er/s/options", b"{}")
    assert sorted(map(str, store.topics())) == sorted(map(str, names))


# -- with deliveries ----------------------------------------------------------------------------


@on_both_kinds_of_topics
def test_cursor_that_the_topic_put_back_takes_its_saved_state_along(store, metadata, owned):
    """After a take-over offsets are given out again: nothing may be taken for acknowledged."""
    create(store, owned)
    delivery = Delivery(kind="shared", policy=FailurePolicy(), window=10, cursor=4)
    delivery.attach(1, now=0.0)
    delivery.offer([(offset, "") for offset in range(4, 10)], now=0.0)
    delivery.set_room(1, 10)
    delivery.take()
    delivery.ack(8, end=10, now=0.0)
    save(store, owned, delivery.cursor, delivery.saved())
    assert clip_progress(metadata, PLACE, 9, owned=owned) == []
    assert clip_progress(metadata, PLACE, 7, owned=owned) == [PROGRESS]
    loaded = store.load(NAME, LIFE)["billing"]
    assert (loaded.cursor, loaded.saved) == (4, None)
    save(store, owned, 4, delivery.saved())
    assert clip_progress(metadata, PLACE, 2, owned=owned) == [PROGRESS]
    loaded = store.load(NAME, LIFE)["billing"]
    assert (loaded.cursor, loaded.saved) == (2, None)
    assert save(store, owned, 3) == 3
