"""Bounds of topics: where they come from, what may be set, and rates that delay."""

import json
import threading

import pytest

from ister.base.limits import MESSAGE_SIZE_BYTES_MAX
from ister.broker.policies import NAMES, Policies, Rate, parse_overrides
from ister.config import BrokerPoliciesConfig
from ister.errors import InvalidRequestError
from tests.support.cases import each


def test_the_closest_setting_counts():
    defaults = BrokerPoliciesConfig(max_producers_per_topic=9, max_publish_rate=5)
    namespace = {"max_producers_per_topic": 3, "max_message_size": 100}
    topic = {"max_producers_per_topic": 0}
    policies = Policies.of(defaults, namespace, topic)
    assert policies.max_producers_per_topic == 0  # no bound, although others have one
    assert policies.max_message_size == 100
    assert policies.max_publish_rate == 5
    assert policies.max_consumers_per_topic == 0


def test_every_default_of_the_settings_is_taken():
    wanted = {name: number for number, name in enumerate(NAMES, 1)}
    policies = Policies.of(BrokerPoliciesConfig(**wanted))
    assert json.loads(policies.to_json()) == wanted


def test_overrides_are_read():
    given = {"max_publish_rate": 7, "max_message_size": 0}
    assert parse_overrides(json.dumps(given)) == given
    assert parse_overrides("") == parse_overrides("{}") == {}
    # An unknown one is answered with the known ones.
    with pytest.raises(InvalidRequestError, match="max_consumers_per_subscription"):
        parse_overrides('{"max_cats": 1}')


@each(
    "text",
    [
        "nonsense",
        "[]",
        "7",
        "null",
        '"max_publish_rate"',
        '{"max_publish_rate": -1}',
        '{"max_publish_rate": 1.5}',
        '{"max_publish_rate": true}',
        '{"max_publish_rate": "1"}',
        '{"max_publish_rate": null}',
        '{"max_publish_rate": 2147483648}',
        json.dumps({"max_message_size": MESSAGE_SIZE_BYTES_MAX + 1}),
        "[" * 100_000,
    ],
)
def test_other_overrides_are_refused(text):
    with pytest.raises(InvalidRequestError):
        parse_overrides(text)


# -- rates ------------------------------------------------------------------------------------


def test_a_rate_is_kept_in_the_long_run():
    rate, now = Rate(100), 50.0
    for _ in range(1000):
        now += rate.reserve(1, now)
    # The burst of a tenth of a second is the only thing that comes early.
    assert now - 50.0 == pytest.approx(9.99, abs=0.15)


def test_a_short_burst_is_not_delayed():
    rate = Rate(100)
    assert [rate.reserve(1, 5.0) for _ in range(10)] == [0.0] * 10
    assert rate.reserve(100, 5.0) == pytest.approx(0.0, abs=1e-9)
    assert rate.reserve(1, 5.0) == pytest.approx(1.0, abs=0.01)


def test_an_idle_time_is_not_saved_up():
    rate = Rate(10)
    rate.reserve(1, 0.0)
    waits = [rate.reserve(1, 1000.0) for _ in range(20)]
    assert waits[-1] == pytest.approx(1.8, abs=0.01)


def test_another_rate_counts_at_once_also_for_what_was_reserved_before():
    rate = Rate(1)
    rate.reserve(1000, 0.0)
    assert rate.reserve(1, 0.0) > 900
    rate.per_second = 1000
    assert rate.reserve(1, 0.0) < 2
    rate.per_second = 1
    assert rate.reserve(1, 0.0) > 900
    rate.per_second = 0
    assert rate.reserve(1_000_000, 0.0) == rate.reserve(1, 0.0) == 0.0


def test_many_threads_together_keep_the_rate():
    rate, waits = Rate(1000), []
    lock = threading.Lock()

    def work():
        own = [rate.reserve(1, 0.0) for _ in range(500)]
        with lock:
            waits.extend(own)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(waits) == pytest.approx(1.999 - 0.1, abs=1e-6)
    assert len({round(wait, 6) for wait in waits if wait > 0}) == len([w for w in waits if w > 0])
