"""How far a query is behind, from what Spark reports."""

import json

from ister.spark import offsets_behind
from ister.spark.offsets import StreamOffset, TopicOffset
from tests.support.streams import A, B


def offset(**topics):
    return StreamOffset(
        {
            {"a": A, "b": B}[name]: TopicOffset(incarnation="i", epoch=0, offset=at, start=0)
            for name, at in topics.items()
        }
    )


def source(end, latest):
    return {
        "description": "PythonMicroBatchStream",
        "endOffset": end and end.to_dict(),
        "latestOffset": latest and latest.to_dict(),
        "metrics": {},
    }


def test_messages_behind_by_topic():
    progress = {"sources": [source(offset(a=5, b=9), offset(a=8, b=9))]}
    (found,) = offsets_behind(progress)
    assert found.by_topic == {A: 3, B: 0}
    assert (found.total, found.max, found.min, found.avg) == (3, 3, 0, 1.5)


def test_report_may_be_text_or_an_object_with_it_or_have_offsets_as_text():
    report = {"sources": [source(offset(a=5), offset(a=8))]}

    class Progress:
        json = ""

    Progress.json = json.dumps(report)
    as_text = {"endOffset": offset(a=5).to_json_text(), "latestOffset": offset(a=8).to_json_text()}
    for progress in (json.dumps(report), Progress(), {"sources": [as_text]}):
        assert [found.total for found in offsets_behind(progress)] == [3]


def test_other_sources_and_reports_without_an_offset_are_left_out():
    kafka = {"endOffset": {"t": {"0": 5}}, "latestOffset": {"t": {"0": 9}}}
    nothing = {"endOffset": None, "latestOffset": None}
    ours = source(offset(a=5), offset(a=6))
    assert [found.total for found in offsets_behind({"sources": [kafka, nothing, ours]})] == [1]
    assert offsets_behind({"sources": []}) == offsets_behind(None) == []


def test_lag_is_unknown_where_spark_does_not_report_the_end():
    ours = source(offset(a=5), offset(a=6))
    unknown, known = offsets_behind({"sources": [source(offset(a=5), None), ours]})
    assert unknown is None
    assert known.total == 1
