"""Options of the Spark format: values, defaults, and what is refused with which words."""

import json
import pickle
import re
import traceback
from datetime import UTC, datetime, timedelta, timezone
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.limits import GIB, KIB, MIB
from ister.base.model import COLUMNS, AckLevel, Codec
from ister.errors import InvalidRequestError, TopicNameError
from ister.spark.options import (
    READ_OPTIONS,
    WRITE_OPTIONS,
    OffsetsOption,
    ReadOptions,
    WriteOptions,
)
from tests.support.cases import case, each

EXAMPLES = settings(max_examples=200, deadline=None, print_blob=True)

A, B = "/default/a", "/default/b"
BASE = {"topic": A, "config": "ister.yml"}
PLACE = {"config": "ister.yml"}


def batch(**options):
    return ReadOptions.parse(BASE | options, is_streaming=False)


def stream(**options):
    return ReadOptions.parse(BASE | options, is_streaming=True)


def write(**options):
    return WriteOptions.parse(PLACE | options, is_streaming=False)


def refused(parse, *texts, **options):
    """The options are refused, and the error has all of the texts in it."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(**options)
    for text in texts:
        assert text in str(caught.value)
    return caught.value


# -- names ------------------------------------------------------------------------------------


def test_defaults_of_a_batch():
    assert batch() == ReadOptions(
        is_streaming=False,
        topics=(A,),
        config="ister.yml",
        starting_offsets=OffsetsOption(otherwise="earliest"),
        ending_offsets=OffsetsOption(otherwise="latest"),
    )
    assert batch().split_bytes is None
    assert (batch().pushdown, batch().fail_on_data_loss, batch().include_tail) == (
        False,
        True,
        True,
    )


def test_defaults_of_a_write():
    assert write() == WriteOptions(is_streaming=False, config="ister.yml")
    assert write().create_topics is True
    assert write().commit_timeout_seconds == 60
    assert (write().topic, write().ack, write().codec, write().producer_name) == (None,) * 4


EVERY_READ_OPTION = {
    "topic": f"{A}, {B}",
    "config": "/data",
    "broker": "127.0.0.1:6651",
    "startingOffsets": '{"/default/a": 5}',
    "minPartitions": "7",
    "splitBytes": "1m",
    "columns": "offset, payload",
    "failOnDataLoss": "false",
    "includeTail": "False",
}


def test_names_are_compared_without_regard_to_case():
    for change in [str.lower, str.upper, str]:
        with case(change):
            options = {change(name): value for name, value in EVERY_READ_OPTION.items()}
            assert ReadOptions.parse(options, is_streaming=True) == ReadOptions(
                is_streaming=True,
                topics=(A, B),
                config="/data",
                brokers=("grpc://127.0.0.1:6651",),
                starting_offsets=OffsetsOption(otherwise="latest", by_topic={A: 5}),
                ending_offsets=OffsetsOption(otherwise="latest"),
                min_partitions=7,
                split_bytes=MIB,
                columns=("offset", "payload"),
                fail_on_data_loss=False,
                include_tail=False,
            )


def test_every_documented_option_is_known():
    """Goal: no name in the tables that parsing does not know.

    A value that fits no option is either refused under the option's own name, or it is a text
    that anything may be; never "unknown".
    """
    for parse in [batch, stream, write]:
        with case(parse):
            for name in WRITE_OPTIONS if parse is write else READ_OPTIONS:
                try:
                    parse(**{name.lower(): "\x01"})
                except InvalidRequestError as error:
                    assert "unknown option" not in str(error)
                    assert name in str(error) or "column" in str(error)


def test_unknown_option_is_refused_with_the_nearest():
    for name, hint in [
        ("startingoffset", "did you mean startingOffsets?"),
        ("maxbytepertrigger", "did you mean maxBytesPerTrigger?"),
        ("FailOnDataLos", "did you mean failOnDataLoss?"),
        ("topics", "Ister calls it topic"),
        ("topicsPattern", "Ister calls it topicPattern"),
        ("maxrowspertrigger", "Ister calls it maxMessagesPerTrigger"),
        ("kafka.bootstrap.servers", "set config (a data directory or an ister.yml) or broker"),
        ("kafka.sasl.mechanism", "it configures Kafka's client, which Ister does not use"),
        ("kafka.group.id", "a stream's position is in its checkpoint"),
        ("maxRecordsPerPartition", "use splitBytes, which limits the bytes"),
        ("zzzzzz", "known: topic, topicPattern, assign, config"),
        ("checkpointlocation", "unknown option 'checkpointlocation'"),
    ]:
        with case(name, hint):
            refused(batch, f"unknown option '{name}'", hint, **{name: "1"})


@each(
    ("parse", "other", "hint", "name", "value"),
    [
        (batch, stream, "not for a stream", "endingOffsets", "latest"),
        (batch, stream, "not for a stream", "endingTimestamp", "5"),
        (batch, stream, "not for a stream", "pushdown", "false"),
        (stream, batch, "not for a batch", "maxMessagesPerTrigger", "5"),
        (stream, batch, "not for a batch", "maxBytesPerTrigger", "5"),
        (stream, batch, "not for a batch", "subscription", "s"),
    ],
)
def test_option_of_a_batch_or_a_stream_is_refused_for_the_other(parse, other, hint, name, value):
    parse(**{name: value})
    where = "spark.readStream" if parse is stream else "spark.read"
    refused(other, f"the option {name} is {hint}", where, **{name.lower(): value})


def test_empty_value_is_refused():
    for value in ["", "  \t"]:
        for name in [name for name in READ_OPTIONS if name != "topicPattern"]:
            with case(value, name):
                parse = batch if name.startswith("ending") or name == "pushdown" else stream
                refused(parse, f"the option {name} is empty", **{name: value})


def test_settings_of_a_streaming_query_are_passed_over_by_its_sink_alone():
    sparks_own = {"checkpointlocation": "/c", "queryname": "q"}
    assert WriteOptions.parse(PLACE | sparks_own, is_streaming=True) == (
        WriteOptions(is_streaming=True, config="ister.yml")
    )
    refused(write, "unknown option 'checkpointlocation'", checkpointlocation="/c")


@each(
    ("parse", "options", "texts"),
    [
        (write, {"maxrowspertrigger": "1"}, ["unknown option 'maxrowspertrigger'"]),
        (batch, {"createtopics": "true"}, ["createTopics is not for reading", "writing"]),
        (stream, {"producername": "p"}, ["producerName is not for reading"]),
        (write, {"splitBytes": "1m"}, ["splitBytes is not for writing", "reading"]),
        (batch, {"checkpointLocation": "x"}, ["unknown option", "writeStream"]),
        (write, {"checkpointLocation": "x"}, ["unknown option", "writeStream"]),
        (batch, {"minPartitions": None}, ["the option minPartitions is empty"]),
        (batch, {"minPartitions": "1", "minpartitions": "1"}, ["minPartitions is given twice"]),
        (batch, {"subscribe": A}, ["both", "subscribe", "topic", "mean the same: set one"]),
        (
            stream,
            {"maxOffsetsPerTrigger": "5", "maxMessagesPerTrigger": "5"},
            ["maxOffsetsPerTrigger", "maxMessagesPerTrigger", "they mean the same"],
        ),
        (batch, {"topicPattern": "/default/.*"}, ["both topic and topicPattern are given"]),
        (batch, {"columns": "ofset"}, ["an unknown column 'ofset'", "did you mean offset?"]),
        (batch, {"columns": "offset,value"}, ["column 'value'", "did you mean payload?"]),
        (batch, {"columns": "key"}, ["unknown column 'key'", "did you mean routing_key?"]),
        (batch, {"columns": "zzz"}, ["unknown column 'zzz'", "known: topic, offset"]),
        (batch, {"columns": "offset,"}, ["unknown column ''"]),
        (batch, {"columns": "offset,offset"}, ["columns names offset twice"]),
        (
            batch,
            {"startingTimestamp": "6", "endingTimestamp": "5"},
            ["startingTimestamp (6 ms) is after"],
        ),
        (batch, {"startingOffsets": '{"/default/b": 1}'}, ["startingOffsets names a topic", A]),
        (batch, {"startingOffsets": '{"/default/b-part-1": 7}'}, ["startingOffsets names a topic"]),
        (
            batch,
            {
                "startingOffsets": '{"/default/a-part-1": 5}',
                "endingOffsets": '{"/default/a": 4}',
            },
            ["startingOffsets (5) is after endingOffsets (4)", f"{A}-part-1"],
        ),
    ],
)
def test_options_that_cannot_be_together_or_there_are_refused(parse, options, texts):
    refused(parse, *texts, **options)


def test_read_without_a_topic_is_refused():
    with pytest.raises(InvalidRequestError, match="no topic is given"):
        ReadOptions.parse(PLACE, is_streaming=False)
    with pytest.raises(InvalidRequestError, match=r"no option is given.*WITH \(config"):
        ReadOptions.parse({}, is_streaming=False)
    with pytest.raises(InvalidRequestError, match="not Java's"):
        ReadOptions.parse(PLACE | {"topicpattern": "(?<name>a)\\p{L}"}, is_streaming=True)


# -- topics and places ------------------------------------------------------------------------


def test_seconds_are_not_taken_for_milliseconds():
    for text in ["1767225600", "100000000", "99999999999"]:
        with case(text):
            hint = f"{text}000 if it is in seconds"
            refused(batch, f"startingTimestamp is '{text}'", hint, startingTimestamp=text)
            refused(batch, f"endingTimestamp is '{text}'", hint, endingTimestamp=text)
            by_topic = f'{{"/default/a": {text}}}'
            name = "startingOffsetsByTimestamp"
            refused(batch, f"{name} is '{text}'", hint, startingOffsetsByTimestamp=by_topic)
    refused(batch, "in milliseconds", "1767225600000", startingTimestamp="1767225600")
    refused(batch, "1970-01-21", "use milliseconds", startingTimestamp="1767225600")
    refused(batch, "1767225600000000", "microseconds", startingTimestamp="1767225600000000")
    for text, time_ms in [("0", 0), ("99999999", 99999999), ("100000000000", 100000000000)]:
        with case(text):
            assert batch(startingTimestamp=text).starting_timestamp_ms == time_ms
    assert batch(startingTimestamp="1970-01-21T00:00:00Z").starting_timestamp_ms == 1_728_000_000


def test_pattern_matches_whole_names():
    options = ReadOptions.parse(PLACE | {"topicpattern": "/default/[ab]|/x/.*"}, is_streaming=True)
    assert options.topics == ()
    found = [t for t in (A, B, "/default/ab", "/x/", "/x/y", "x/y") if options.matches(t)]
    assert found == [A, B, "/x/", "/x/y"]
    assert [name for name in (A, B) if batch().matches(name)] == [A]


def test_path_is_another_name_for_config():
    for kind in [ReadOptions, WriteOptions]:
        with case(kind):
            assert kind.parse({"topic": A, "path": "/d"}, is_streaming=False).config == "/d"
            with pytest.raises(
                InvalidRequestError, match=re.escape("load(path) and save(path) mean")
            ):
                kind.parse({"topic": A, "path": "/d", "config": "/d"}, is_streaming=False)


def test_one_of_config_and_broker_is_needed():
    for kind in [ReadOptions, WriteOptions]:
        with case(kind):
            with pytest.raises(InvalidRequestError, match="neither config nor broker is given"):
                kind.parse({"topic": A}, is_streaming=False)
            both = kind.parse({"topic": A, "config": "/d", "broker": "h:1"}, is_streaming=False)
            assert (both.config, both.brokers) == ("/d", ("grpc://h:1",))
            alone = kind.parse({"topic": A, "broker": "h:1"}, is_streaming=False)
            assert (alone.config, alone.brokers) == (None, ("grpc://h:1",))


def test_what_is_no_address_is_refused_without_its_credentials():
    text = "grpc://user:{}@host:6651".format("s3cret")
    for parse in (batch, write):
        with pytest.raises(InvalidRequestError, match=r"\*\*\*@host:6651") as error:
            parse(broker=text)
        assert "s3cret" not in "".join(traceback.format_exception(error.value))


# -- offsets ----------------------------------------------------------------------------------


@each(
    ("given", "expected"),
    [
        ({A: 3}, {A: 3, B: "latest"}),
        ({A: 7, f"{A}-part-1": 3}, {A: 7, f"{A}-part-0": 7, f"{A}-part-1": 3, f"{A}-part-12": 7}),
        ({A: 7}, {f"{B}-part-0": "latest"}),
        # Those of a partition go for no other.
        ({f"{A}-part-1": 3}, {f"{A}-part-1": 3, f"{A}-part-11": "latest", A: "latest"}),
        # A partition is one of the nearest parent.
        (
            {A: 7, f"{A}-part-1": 3},
            {f"{A}-part-1-part-2": 3, f"{A}-part-2-part-2": "latest"},
        ),
        ({A: "earliest"}, {f"{A}-part-4": "earliest"}),
    ],
)
def test_offsets_of_a_topic_go_for_its_partitions(given, expected):
    offsets = stream(startingOffsets=json.dumps(given)).starting_offsets
    assert {topic: offsets.of(topic) for topic in expected} == expected


def test_offsets_of_topics_that_were_found_are_known():
    for named, found in [
        ([], []),
        ([], [A]),
        ([A], [A, B]),
        ([A, B], [B, A]),
        ([A], [f"{A}-part-0", f"{A}-part-1"]),
        ([f"{A}-part-1"], [f"{A}-part-0", f"{A}-part-1"]),
        ([A, f"{A}-part-1"], [f"{A}-part-1"]),
    ]:
        with case(named, found):
            offsets = OffsetsOption(otherwise="latest", by_topic=dict.fromkeys(named, 5))
            offsets.check_known("startingOffsets", iter(found))


def test_offsets_of_a_topic_that_was_not_found_are_refused():
    for named, found, unknown in [
        ([A], [], A),
        ([A, B], [A], B),
        ([f"{A}-part-2"], [f"{A}-part-0", f"{A}-part-1"], f"{A}-part-2"),
        ([f"{A}-part-1"], [A], f"{A}-part-1"),
        ([A], [f"{B}-part-0"], A),
        ([A], [f"{A}b"], A),
        ([A], [f"{A}-part-0-part-1"], A),
    ]:
        with case(named, found, unknown):
            offsets = OffsetsOption(otherwise="latest", by_topic=dict.fromkeys(named, 5))
            with pytest.raises(
                InvalidRequestError, match="endingOffsets names a topic that is not read"
            ) as (caught):
                offsets.check_known("endingOffsets", found)
            assert caught.value.topic == unknown


def test_offsets_with_a_pattern_may_name_any_topic():
    """Which ones there are shows when topics are looked for; see `check_known`."""
    options = ReadOptions.parse(
        PLACE | {"topicpattern": ".*", "startingoffsets": '{"/x/y": 1}'}, is_streaming=False
    )
    assert options.starting_offsets.of("/x/y") == 1


# -- times ------------------------------------------------------------------------------------


@EXAMPLES
@given(
    st.datetimes(
        min_value=datetime(1970, 1, 2),
        max_value=datetime(9999, 12, 30),
        timezones=st.integers(-720, 720).map(lambda m: timezone(timedelta(minutes=m))),
    )
)
def test_time_is_the_first_millisecond_that_is_not_before_it(time):
    time_ms = batch(startingTimestamp=time.isoformat()).starting_timestamp_ms
    found = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    assert time <= found < time + timedelta(milliseconds=1)


def test_times_come_before_offsets_as_with_kafka():
    """A time for all topics, then a time for a topic, then its offset."""
    options = batch(
        topic=f"{A},{B}",
        startingTimestamp="5",
        startingOffsetsByTimestamp='{"/default/a": 6}',
        startingOffsets='{"/default/a": 7}',
    )
    assert options.start_time_ms(A) == options.start_time_ms(B) == 5
    options = batch(
        topic=f"{A},{B}",
        startingOffsetsByTimestamp='{"/default/a": 6}',
        startingOffsets='{"/default/a": 7, "/default/b": 8}',
        endingOffsetsByTimestamp='{"/default/b": "1970-01-01T00:00:00.009Z"}',
    )
    assert (options.start_time_ms(A), options.start_time_ms(B)) == (6, None)
    assert (options.end_time_ms(A), options.end_time_ms(B)) == (None, 9)
    assert options.starting_offsets.of(B) == 8


def test_time_that_no_message_has_reached_is_an_error_as_with_kafka_unless_told():
    by_topic = {"startingOffsetsByTimestamp": '{"/default/a": 6}'}
    strategy = "startingOffsetsByTimestampStrategy"
    for options, expected in [
        (by_topic, True),
        ({"startingTimestamp": "6"}, False),
        (by_topic | {strategy: "latest"}, False),
        ({"startingTimestamp": "6", strategy: "error"}, True),
        (by_topic | {"startingTimestamp": "6"}, False),
    ]:
        with case(options, expected):
            assert batch(**options).time_must_match is expected
    refused(batch, strategy, "one of: error, latest", **{strategy: "earliest"})


# -- names of the Kafka source ----------------------------------------------------------------


def test_names_of_the_kafka_source_mean_the_same():
    kafka = {
        "subscribe": f"{A},{B}",
        "maxOffsetsPerTrigger": "5",
        "minOffsetsPerTrigger": "2",
        "maxTriggerDelay": "30s",
        "startingOffsets": '{"/default/a": {"0": 7, "1": -2}}',
    }
    own = {
        "topic": f"{A},{B}",
        "maxMessagesPerTrigger": "5",
        "minMessagesPerTrigger": "2",
        "maxTriggerDelay": "30000",
        "startingOffsets": kafka["startingOffsets"],
    }
    assert ReadOptions.parse(PLACE | kafka, is_streaming=True) == ReadOptions.parse(
        PLACE | own, is_streaming=True
    )
    options = ReadOptions.parse(PLACE | {"subscribePattern": ".*"}, is_streaming=True)
    assert options.topic_pattern == ".*"


def test_errors_use_the_name_that_was_given():
    with pytest.raises(TopicNameError, match=r"subscribe: topic name 'orders'.*/default/orders"):
        ReadOptions.parse(PLACE | {"subscribe": "orders"}, is_streaming=False)
    refused(stream, "maxOffsetsPerTrigger is '0'", maxOffsetsPerTrigger="0")
    refused(batch, "the option maxOffsetsPerTrigger is not for a batch", maxOffsetsPerTrigger="1")
    refused(write, "unknown option 'subscribe'", subscribe=A)


def test_partitions_are_assigned():
    options = ReadOptions.parse(
        PLACE | {"assign": '{"/default/a": [0, 2], "/default/b": [1]}'}, is_streaming=False
    )
    assert options.assigned == ((A, 0), (A, 2), (B, 1))
    assert options.topics == ()
    for text in ["5", "{}", '{"/default/a": 0}', '{"/default/a": []}', '{"/default/a": ["x"]}']:
        with case(text), pytest.raises(InvalidRequestError, match=r"assign"):
            ReadOptions.parse(PLACE | {"assign": text}, is_streaming=False)
    refused(batch, "both topic and assign are given", assign='{"/default/a": [0]}')


def test_offsets_of_partitions_go_for_those_partitions():
    options = batch(startingOffsets='{"/default/a": {"0": 23, "1": -2, "2": "earliest"}}')
    assert options.starting_offsets.of(f"{A}-part-0") == 23
    assert options.starting_offsets.of(f"{A}-part-1") == "earliest"
    assert options.starting_offsets.of(f"{A}-part-3") == "earliest"  # the default of a batch
    assert options.starting_offsets.of(A) == 23, "a topic without partitions has partition 0"
    options.check_topics([f"{A}-part-{number}" for number in range(3)])
    with pytest.raises(InvalidRequestError, match="names a topic that is not read") as caught:
        options.check_topics([f"{A}-part-0", f"{A}-part-1"])
    assert caught.value.topic == f"{A}-part-2"
    batch(startingOffsets='{"/default/a": {"0": 23}}').check_topics([A])
    refused(
        batch,
        "startingOffsets (5) is after endingOffsets (4)",
        startingOffsets='{"/default/a": {"1": 5}}',
        endingOffsets='{"/default/a": {"1": 4}}',
    )
    refused(batch, "cannot be latest", startingOffsets='{"/default/a": {"1": -1}}')


# -- payloads ---------------------------------------------------------------------------------


def test_format_of_payloads():
    assert batch().payload_format is None
    assert batch(payloadFormat="TEXT").payload_format == "text"
    assert batch(payloadSchema="id BIGINT").payload_format == "json"
    assert batch(payloadFormat="text", payloadErrors="fail").payload_errors == "fail"
    refused(batch, "payloadFormat is 'xml'", "one of: binary, text, json", payloadFormat="xml")
    refused(batch, "payloadSchema is given", payloadFormat="text", payloadSchema="id INT")
    refused(batch, "payloadErrors is given", payloadFormat="binary", payloadErrors="fail")
    refused(batch, "payloadErrors is 'drop'", payloadErrors="drop")


def test_options_add_columns():
    assert batch().all_columns is None
    assert batch(includeHeaders="true").all_columns == (*COLUMNS, "headers")
    found = batch(columns="offset", includeHeaders="true", payloadErrors="column")
    assert found.all_columns == ("offset", "headers", "payload_error")
    assert batch(columns="headers, offset", includeHeaders="true").all_columns == (
        "headers",
        "offset",
    )


# -- numbers, flags and the rest --------------------------------------------------------------


def test_write_options():
    options = write(
        topic=A,
        createTopics="false",
        ack="Tiered",
        codec="bincode1",
        producerName="a job",
        commitTimeoutSeconds="2.5",
    )
    assert options == WriteOptions(
        is_streaming=False,
        topic=A,
        config="ister.yml",
        create_topics=False,
        ack=AckLevel.TIERED,
        codec=Codec.BINCODE1,
        producer_name="a job",
        commit_timeout_seconds=2.5,
    )


SIZES = {
    "1": 1,
    "1000b": 1000,
    "512k": 512 * KIB,
    "512K": 512 * KIB,
    "3kb": 3 * KIB,
    "3 KiB": 3 * KIB,
    "64MB": 64 * MIB,
    "64MiB": 64 * MIB,
    "2GiB": 2 * GIB,
    "1t": 1024 * GIB,
}
TIMES = {
    "0": 0,
    "99999999": 99_999_999,
    "100000000000": 100_000_000_000,
    "1700000000123": 1_700_000_000_123,
    "2023-11-14T22:13:20Z": 1_700_000_000_000,
    "2023-11-14T23:13:20+01:00": 1_700_000_000_000,
    "2023-11-14 22:13:20.123Z": 1_700_000_000_123,
    "2023-11-14T22:13:20.123001Z": 1_700_000_000_124,
    "9999-12-31T23:59:59Z": 253_402_300_799_000,
}
DELAYS = {"0": 0, "0s": 0, "500ms": 500, "30s": 30_000, "15m": 900_000, "1h": 3_600_000}
FLAGS = {"true": True, "TRUE": True, "False": False}
WITH_LEAST = partial(stream, minMessagesPerTrigger="5")


@each(
    ("parse", "option", "field", "values"),
    [
        (batch, "topic", "topics", {f"{B} ,{A}": (B, A)}),
        (stream, "maxBytesPerTrigger", "max_bytes_per_trigger", SIZES),
        (batch, "splitBytes", "split_bytes", {"64k": 64 * KIB}),
        (batch, "startingTimestamp", "starting_timestamp_ms", TIMES),
        (batch, "endingTimestamp", "ending_timestamp_ms", TIMES),
        (WITH_LEAST, "maxTriggerDelay", "max_trigger_delay_ms", DELAYS),
        (batch, "pushdown", "pushdown", FLAGS),
        (batch, "failOnDataLoss", "fail_on_data_loss", FLAGS),
        (batch, "includeTail", "include_tail", FLAGS),
        (write, "createTopics", "create_topics", FLAGS),
        (stream, "subscription", "subscription", {"spark-job_1": "spark-job_1"}),
        (batch, "columns", "columns", {"payload,Offset , topic": ("payload", "offset", "topic")}),
        (
            write,
            "broker",
            "brokers",
            {
                "b-1.example.org:65535": ("grpc://b-1.example.org:65535",),
                "[::1]:6651": ("grpc://[::1]:6651",),
                "grpc+tls://h:1": ("grpc+tls://h:1",),
                "a:1, grpc+tls://b:2": ("grpc://a:1", "grpc+tls://b:2"),
            },
        ),
    ],
)
def test_texts_and_their_values(parse, option, field, values):
    for text, value in values.items():
        with case(text):
            assert getattr(parse(**{option: text}), field) == value


@each(
    ("text", "offset"),
    [
        ("earliest", "earliest"),
        ("Latest", "latest"),
        ('{"/default/a": 0}', 0),
        ('{"/default/a": 9223372036854775807}', 2**63 - 1),
        ('{"/default/a": -2}', "earliest"),
        ('{"/default/a": -1}', "latest"),
        ('{"/default/a": "EARLIEST"}', "earliest"),
        ('{"/default/b": 3}', "latest"),
        ("{}", "latest"),
    ],
)
def test_starting_offsets_of_a_stream(text, offset):
    assert stream(topic=f"{A},{B}", startingOffsets=text).starting_offsets.of(A) == offset


NO_TIMES = (
    "2023-11-14T22:13:20",
    "2023-11-14",
    "yesterday",
    "-5",
    "1.5",
    "1969-12-31T23:59:59Z",
    "1700000000123456",
)
NO_ADDRESSES = (
    *("h", "h:", ":1", "h:0", "h:65536", "h:x", "http://h:1", "h:1/x", "u@h:1", "::1:6651"),
    *("-h:1", "a:1,", ",a:1", "a:1,,b:2", "a:1 b:2", "a:1;b:2", "a:1,b", "a:1,grpc://a:1"),
)
NO_OFFSETS = (
    *("first", "5", "-2", "[1]", '{"/default/a": 1', "[" * 100_000, '{"a": 1}'),
    '{"/default/a": -3}',
    '{"/default/a": 9223372036854775808}',
    '{"/default/a": 1.0}',
    '{"/default/a": true}',
    '{"/default/a": null}',
    '{"/default/a": "5"}',
    '{"/default/a": {"x": 23}}',
    '{"/default/a": {"-1": 23}}',
    '{"/default/a": {"0": {"0": 1}}}',
    '{"/default/a": {"0": 1, "0": 2}}',
    '{"/default/a": 1, "/default/a": 2}',
)


@each(
    ("parse", "option", "texts"),
    [
        (batch, "topic", ("a", "/default", f"{A},", "/default/a.b", ",", f"{A},{B},{A}")),
        (stream, "startingOffsets", NO_OFFSETS),
        (batch, "startingOffsets", ("LATEST", '{"/default/a": -1}', '{"/default/a":"latest"}')),
        (batch, "endingOffsets", ("earliest", '{"/default/a": -2}', '{"/default/a":"earliest"}')),
        (batch, "startingTimestamp", NO_TIMES),
        (
            stream,
            "startingOffsetsByTimestamp",
            (
                *("5", '{"/default/a": -1}', '{"/default/a": true}', '{"/default/b": 1}'),
                '{"/default/a": {"0": "noon"}}',
            ),
        ),
        (WITH_LEAST, "maxTriggerDelay", ("soon", "-1s", "31d", "1 week")),
        (stream, "maxTriggerDelay", ("5s",)),
        (
            stream,
            "maxBytesPerTrigger",
            ("0", "0m", "-1", "1.5m", "m", "1x", "1mm", "1ib2", "9" * 18 + "t"),
        ),
        (batch, "splitBytes", ("65535", "1")),
        (stream, "minPartitions", ("0", "-1", "1.0", "ten", "2147483648", "1k")),
        (stream, "maxMessagesPerTrigger", ("0", "2147483648")),
        (batch, "includeTail", ("1", "yes", "on", "truee")),
        (stream, "subscription", ("a b", "a/b", "a.b", "x" * 121, "é")),
        (batch, "broker", NO_ADDRESSES),
        (write, "topic", (f"{A},{B}",)),
        (write, "ack", ("safe",)),
        (write, "codec", ("json",)),
        (write, "commitTimeoutSeconds", ("0", "-1", "86401", "x", "1e3", "nan")),
    ],
)
def test_text_without_a_value_is_refused_by_its_name(parse, option, texts):
    for text in texts:
        with case(text):
            refused(parse, option, **{option: text})


@each("text", ["(", "[a", "*", "(?P<x", "a{99999999999999999999}"])
def test_pattern_that_does_not_compile_is_refused(text):
    with pytest.raises(InvalidRequestError, match="topicPattern is not a regular expression"):
        ReadOptions.parse(PLACE | {"topicpattern": text}, is_streaming=False)


@EXAMPLES
@given(
    st.dictionaries(
        st.sampled_from([*READ_OPTIONS, *WRITE_OPTIONS, "path", "x"]),
        # Without `[`: Python warns of a set in a set, and here warnings are errors.
        st.text(st.characters(exclude_characters="["), max_size=12)
        | st.sampled_from(["true", "5", A, "latest", "earliest", '{"/default/a":1}', "h:1", "1m"]),
        max_size=6,
    ),
    st.booleans(),
)
def test_any_options_are_parsed_or_refused_as_a_wrong_call(options, is_streaming):
    for kind in (ReadOptions, WriteOptions):
        try:
            parsed = kind.parse(options, is_streaming=is_streaming)
        except InvalidRequestError as error:
            assert str(error)
        else:
            assert pickle.loads(pickle.dumps(parsed)) == parsed
