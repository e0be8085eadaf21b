"""`stats` on Spark: the same numbers as from the messages themselves."""

from collections import Counter

from ister.spark.jobs import stats
from tests.integration.spark_topics import SparkPlace, fill, without_spark


def test_the_numbers_on_spark(spark, tmp_path):
    place = SparkPlace(tmp_path / "data")
    expected = {}
    with place.open() as log:
        for number in range(3):
            topic = log.topic(f"/default/t{number}", create=True)
            fill(topic, 200, step_ms=60_000)
            topic.upload()
            fill(topic, 50, first=200, step_ms=60_000)
            expected[topic.name] = list(topic.read())
    with without_spark():
        report = stats(spark, place.config)
    assert report.ok, report.errors
    for fields in report.as_json()["topics"]:
        messages = expected[fields["topic"]]
        assert fields["messages"] == len(messages) == 250
        assert fields["bytes"] == sum(len(message.payload) for message in messages)
        hours = Counter(m.publish_time.strftime("%Y-%m-%dT%H:00:00.000Z") for m in messages)
        assert {item["hour"]: item["messages"] for item in fields["hours"]} == hours
    assert report.as_json()["totals"]["messages"] == 750
