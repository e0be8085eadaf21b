"""What is counted while messages pass."""

import random
import threading

import pyarrow as pa

from ister.broker.counters import Calls, SubscriptionCounters, TopicCounters
from tests.support.cases import each


def a_batch(sizes):
    return pa.record_batch({"payload": pa.array([b"x" * size for size in sizes], pa.binary())})


def test_messages_and_batches_add_up():
    counters = TopicCounters()
    for size in (0, 16, 17, 1000):
        counters.count_messages([size])
    counters.count_batch(a_batch([5, 5, 5]))
    counters.count_batch(a_batch([1, 100, 10_000]))
    assert counters.messages_in == 10
    assert counters.bytes_in == 1033 + 15 + 10_101
    sizes = counters.sizes
    assert (sizes.count, sizes.sum, sizes.max) == (10, 11_149.0, 10_000.0)


@each("seed", range(5))
def test_batch_is_counted_as_its_messages_would_be(seed):
    rng = random.Random(seed)
    bounds = TopicCounters().sizes.bounds
    edges = [int(bound) + step for bound in bounds[:8] for step in (-1, 0, 1)]
    sizes = [
        rng.choice([*edges, 0, 1, rng.randrange(100_000)]) for _ in range(rng.randrange(1, 60))
    ]
    one_by_one, at_once = TopicCounters(), TopicCounters()
    for size in sizes:
        one_by_one.count_messages([size])
    at_once.count_batch(a_batch(sizes))
    assert at_once.sizes.counts == one_by_one.sizes.counts, f"seed {seed}: {sizes}"
    assert (at_once.messages_in, at_once.bytes_in) == (one_by_one.messages_in, one_by_one.bytes_in)


def test_few_rows_are_counted_without_giving_the_interpreter_lock_away(monkeypatch):
    """Each kernel of Arrow's does, and a busy broker then waits for the lock again."""
    monkeypatch.setattr("pyarrow.compute.call_function", None)
    monkeypatch.setattr("pyarrow.compute.binary_length", None)
    counters = TopicCounters()
    counters.count_batch(a_batch([3, 0, 400]))
    assert (counters.messages_in, counters.bytes_in) == (3, 403)


def test_empty_batch_and_huge_message_are_counted():
    counters = TopicCounters()
    counters.count_batch(a_batch([]))
    assert counters.messages_in == 0
    counters.count_messages([1 << 40])
    assert counters.sizes.counts[-1] == 1


def test_threads_of_flight_lose_nothing():
    counters = TopicCounters()
    batch = a_batch([10, 20])

    def work():
        for _ in range(300):
            counters.count_batch(batch)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters.messages_in, counters.bytes_in) == (2400, 36_000)
    assert counters.sizes.count == 2400


def test_what_leaves_counts_for_the_subscription_and_for_the_topic():
    topic = TopicCounters()
    one, other = SubscriptionCounters(topic), SubscriptionCounters(topic)
    one.count_out(5)
    one.count_out(6)
    other.count_out(7)
    assert (one.messages_out, one.bytes_out) == (2, 11)
    assert (topic.messages_out, topic.bytes_out) == (3, 18)


def test_sends_and_calls_have_latencies():
    counters = TopicCounters()
    counters.count_sends(1, 0.004)
    assert counters.sends == 1
    assert counters.send_latency.max == 4.0
    calls = Calls()
    calls.of("s", "m").count_answers(1, 0.5)
    calls.of("s", "m").refused["NOT_FOUND"] += 1
    assert calls.of("s", "m") is calls.by_method["s", "m"]
    assert calls.by_method["s", "m"].answered == 1
    assert calls.by_method["s", "m"].latency.sum == 0.5
