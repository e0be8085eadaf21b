"""What is counted while messages pass."""

import random
import threading

import pyarrow as pa

from ister.broker.counters import Calls, SubscriptionCounters, TopicCounters
from tests.support.cases import each


def a_batch(sizes):
    return pa.record_batch({"payload": pa.array([b"x" * size for size in sizes], pa.binary())})


@each("seed", range(5))
def test_batch_is_counted_as_its_messages_would_be(seed):
    rng = random.Random(seed)
    bounds = TopicCounters().sizes.bounds
    edges = [int(bound) + step for bound in bounds[:8] for step in (-1, 0, 1)]
    sizes = [rng.choice([*edges, 0, 1, rng.randrange(100_000)]) for _ in range(seed * 12)]
    one_by_one, at_once = TopicCounters(), TopicCounters()
    for size in sizes:
        one_by_one.count_messages([size])
    at_once.count_batch(a_batch(sizes))
    assert at_once.sizes.counts == one_by_one.sizes.counts, f"seed {seed}: {sizes}"
    for one in (at_once, one_by_one):
        assert (one.messages_in, one.bytes_in) == (len(sizes), sum(sizes))
        assert (one.sizes.count, one.sizes.sum, one.sizes.max) == (
            len(sizes),
            sum(sizes),
            max(sizes, default=0),
        )
    one_by_one.count_messages([1 << 40])
    assert one_by_one.sizes.counts[-1] == 1


def test_few_rows_are_counted_without_giving_the_interpreter_lock_away(monkeypatch):
    """Each kernel of Arrow's does, and a busy broker then waits for the lock again."""
    monkeypatch.setattr("pyarrow.compute.call_function", None)
    monkeypatch.setattr("pyarrow.compute.binary_length", None)
    counters = TopicCounters()
    counters.count_batch(a_batch([3, 0, 400]))
    assert (counters.messages_in, counters.bytes_in) == (3, 403)


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
    for counters, size in ((one, 5), (one, 6), (other, 7)):
        counters.count_out(size)
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
