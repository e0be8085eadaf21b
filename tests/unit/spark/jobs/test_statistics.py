"""`stats` with tasks in this process: the numbers are those of the messages."""

from collections import Counter

import pytest

from ister.errors import NotFoundError
from ister.spark.jobs.statistics import stats
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace, fill, without_spark
from tests.support.spark_here import SparkHere

HOUR_MS = 3_600_000


@pytest.fixture
def place(tmp_path):
    """Two topics; one has a tail, which is on this machine alone."""
    place = SparkPlace(tmp_path / "data")
    with place.open() as log:
        orders = log.topic("/default/orders", create=True)
        fill(orders, 60, step_ms=10 * 60_000)
        orders.upload()
        for number in range(20):
            orders.append(
                b"x" * number,
                publish_time=PUBLISHED_MS + 60 * 10 * 60_000,
                producer_name=f"q{number % 3}",
                routing_key=f"k{number % 7}" if number % 2 else None,
            )
        orders.flush()
        log.topic("/default/none", create=True)
    with without_spark():
        yield place


def messages(place, name="/default/orders"):
    with place.open() as log:
        return list(log.topic(name).read())


def test_the_numbers_are_those_of_the_messages(place):
    expected = messages(place)
    report = stats(SparkHere(), place.config)
    assert report.ok, report.errors
    none, orders = report.as_json()["topics"]
    assert (none["topic"], none["messages"]) == ("/default/none", 0)
    assert orders["messages"] == len(expected) == 80
    assert orders["bytes"] == sum(len(message.payload) for message in expected)
    hours = Counter(message.publish_time.strftime("%Y-%m-%dT%H:00:00.000Z") for message in expected)
    assert {item["hour"]: item["messages"] for item in orders["hours"]} == hours
    producers = Counter(message.producer_name for message in expected)
    assert {item["producer"]: item["messages"] for item in orders["producers"]} == producers
    sizes = Counter(len(message.payload).bit_length() for message in expected)
    assert {item["below_bytes"].bit_length() - 1: item["messages"] for item in orders["sizes"]} == (
        sizes
    )
    assert orders["keys"] == {"messages": 10, "distinct": 7, "is_exact": True}
    assert orders["tail"]["messages"] == 20
    assert orders["tail"]["is_counted"]
    assert orders["formats"]["dnb1"]["messages"] == 60
    assert orders["compression"]["ratio"] > 1
    totals = report.as_json()["totals"]
    assert totals["messages"] == 80


def test_the_bucket_alone(place):
    (orders,) = stats(
        SparkHere(), place.config, topics="/default/orders", include_tail=False
    ).as_json()["topics"]
    assert orders["messages"] == 60
    assert orders["tail"]["messages"] == 0


def test_a_tail_that_is_out_of_reach_is_left_out_and_an_error(place):
    report = stats(SparkHere(), place.elsewhere, topics="/default/orders")
    (error,) = report.errors
    assert (error["topic"], report.ok) == ("/default/orders", False)
    assert "is not running" in error["message"]
    with place.open() as log:
        log.topic("/default/orders")
        report = stats(SparkHere(), place.elsewhere, topics="/default/orders")
    (error,) = report.errors
    assert "not a broker" in error["message"]
    (orders,) = report.as_json()["topics"]
    assert orders["messages"] == 60
    assert orders["tail"]["is_counted"] is False


def test_a_dry_run_says_how_much_would_be_read(place):
    report = stats(SparkHere(), place.config, topics="/default/orders", dry_run=True)
    (orders,) = report.as_json()["topics"]
    assert orders["messages"] == 80
    assert orders["bytes"] >= orders["stored_bytes"] > 0
    assert "hours" not in orders


@pytest.mark.nightly
def test_one_topics_damage_is_its_own(place):
    next((place.root / "objects").rglob("data-*.dnb1")).unlink()
    report = stats(SparkHere(), place.elsewhere, include_tail=False)
    assert [error["topic"] for error in report.errors] == ["/default/orders"]
    assert {topic["topic"] for topic in report.as_json()["topics"]} == {
        "/default/none",
        "/default/orders",
    }


def test_a_topic_that_does_not_exist_is_refused(place):
    with pytest.raises(NotFoundError):
        stats(SparkHere(), place.config, topics="/default/unknown")
