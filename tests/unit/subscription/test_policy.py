"""Failure policies: what is refused, how long pauses are, how they are stored."""

import pytest

from ister.errors import InvalidRequestError, TopicNameError
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy, SubscriptionKind
from tests.support.cases import each


def test_defaults_are_danubes():
    assert FailurePolicy().to_json() == {
        "max_redelivery_count": 5,
        "ack_timeout_ms": 30_000,
        "base_redelivery_delay_ms": 1_000,
        "max_redelivery_delay_ms": 60_000,
        "backoff": "exponential",
        "poison": "block",
        "dead_letter_topic": None,
    }


def test_kinds_have_their_names():
    assert [*SubscriptionKind] == ["exclusive", "shared", "failover", "key_shared"]


def test_exponential_pauses_double_up_to_the_maximum():
    policy = FailurePolicy()
    pauses = [policy.delay_ms(attempt) for attempt in range(1, 9)]
    assert pauses == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]
    assert policy.delay_ms(10**12) == 60_000


def test_fixed_pauses_stay():
    policy = FailurePolicy(backoff=Backoff.FIXED)
    assert [policy.delay_ms(attempt) for attempt in (1, 2, 50)] == [1000] * 3


@each(("requested", "pause"), [(None, 2000), (0, 2000), (-1, 2000), (5000, 5000), (2**64, 60_000)])
def test_longer_pause_is_granted_up_to_the_maximum(requested, pause):
    assert FailurePolicy().delay_ms(2, requested) == pause


@each(
    ("changes", "word"),
    [
        ({"max_redelivery_count": -1}, "max_redelivery_count"),
        ({"max_redelivery_count": True}, "max_redelivery_count"),
        ({"max_redelivery_count": 1.5}, "max_redelivery_count"),
        ({"ack_timeout_ms": 0}, "ack_timeout_ms"),
        ({"ack_timeout_ms": 10**12}, "ack_timeout_ms"),
        ({"base_redelivery_delay_ms": -1}, "base_redelivery_delay_ms"),
        ({"max_redelivery_delay_ms": "5"}, "max_redelivery_delay_ms"),
        ({"base_redelivery_delay_ms": 10, "max_redelivery_delay_ms": 9}, "is above"),
        ({"backoff": "random"}, "backoff"),
        ({"poison": "explode"}, "poison"),
        ({"poison": "dead_letter"}, "dead_letter_topic"),
    ],
)
def test_senseless_value_is_refused_by_name(changes, word):
    with pytest.raises(InvalidRequestError, match=word):
        FailurePolicy(**changes)
    with pytest.raises(InvalidRequestError, match=word):
        FailurePolicy.from_json(changes)


@each("poison", list(PoisonPolicy))
def test_dead_letter_topic_is_a_topic(poison):
    with pytest.raises(TopicNameError):
        FailurePolicy(poison=poison, dead_letter_topic="dead")
    assert FailurePolicy(poison=poison, dead_letter_topic="/a/dead").dead_letter_topic == "/a/dead"


def test_policy_comes_back_as_it_was_stored():
    policy = FailurePolicy(
        max_redelivery_count=0, poison=PoisonPolicy.DEAD_LETTER, dead_letter_topic="/a/dead"
    )
    assert FailurePolicy.from_json(policy.to_json()) == policy


def test_policy_of_a_newer_ister_is_read():
    assert FailurePolicy.from_json({"poison": "drop", "colour": 1}) == FailurePolicy(
        poison=PoisonPolicy.DROP
    )


def test_policy_that_is_no_object_is_refused():
    with pytest.raises(InvalidRequestError):
        FailurePolicy.from_json([])


def test_texts_become_values():
    policy = FailurePolicy(poison="drop", backoff="fixed")
    assert policy.poison is PoisonPolicy.DROP
    assert policy.backoff is Backoff.FIXED
