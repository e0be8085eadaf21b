"""Receipts: who has one was given the message."""

from ister.subscription.receipts import ATTEMPT_MAX, Receipts, new_key
from tests.support.cases import each

BIG = 2**64 - 1


@each("address", ["", "http://127.0.0.1:6650", "x#1.2", "a#1.0123456789abcdef"])
@each(("consumer", "offset"), [(1, 0), (BIG, BIG), (2**63, 7)])
def test_a_stamp_says_whom_the_message_was_given_to(address, consumer, offset):
    receipts = Receipts(new_key())
    stamped = receipts.stamp(address, consumer, offset, 3)
    assert stamped.startswith(f"{address}#")
    assert receipts.find_delivery(stamped, offset) == (consumer, 3)
    late = receipts.stamp(address, consumer, offset, 1000)
    assert receipts.find_delivery(late, offset) == (consumer, ATTEMPT_MAX)


def test_a_stamp_is_of_one_subscription_one_consumer_and_one_message():
    key = new_key()
    receipts, others = Receipts(key), Receipts(new_key())
    stamped = receipts.stamp("", 5, 7)
    assert Receipts(key).find_delivery(stamped, 7) == (5, 1)
    assert receipts.find_delivery(stamped, 8) is None
    assert others.find_delivery(stamped, 7) is None
    assert receipts.find_delivery(stamped.replace("#5", "#6"), 7) is None
    assert receipts.token(5, 7) not in (receipts.token(7, 5), others.token(5, 7))


def test_receipts_of_neighbours_differ_and_are_made_again_alike():
    key = new_key()
    receipts = Receipts(key)
    made = [receipts.token(consumer, offset) for consumer in (1, 2) for offset in range(5000)]
    assert len(set(made)) == len(made)
    again = Receipts(key)
    assert [again.token(2, offset) for offset in reversed(range(5000))] == made[:4999:-1]


@each(
    "text",
    ["", "#", "#.", "#1.", "#1.0", "#x.0123456789abcdef", "#1.0123456789abcdeX", "#" * 10**6],
)
def test_other_texts_are_no_stamps(text):
    assert Receipts(new_key()).find_delivery(text, 0) is None
