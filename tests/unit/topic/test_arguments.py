"""What callers pass, checked in one place."""

import asyncio
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

import ister
from ister.base.model import MessageId, StreamMessage
from ister.errors import InvalidRequestError
from ister.topic.arguments import as_bytes, as_number, as_offset, as_timeout
from tests.support.cases import each

NOT_NUMBERS = [
    Decimal("NaN"),
    Decimal("sNaN"),
    math.nan,
    "1",
    b"1",
    [1],
    np.array([1, 2]),
    object(),
]


@pytest.fixture
def topic():
    with ister.open() as log:
        topic = log.topic("/default/t", create=True)
        topic.append(b"x")
        yield topic


@each("given", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_of_any_kind_are_bytes(given):
    found = as_bytes(given)
    assert (type(found), found) == (bytes, b"x")


@each("given", ["x", 7, None, [b"x"]])
def test_something_else_is_no_payload(given):
    with pytest.raises(InvalidRequestError, match=f"not {type(given).__name__}") as caught:
        as_bytes(given)
    assert (caught.value.hint is not None) is isinstance(given, str)


@each("given", [0, 1, 2**63])
def test_offset_is_a_whole_number(given):
    assert as_offset("start", given) == given


@each("given", [-1, True, 1.0, "1", None])
def test_something_else_is_no_offset_and_the_argument_is_named(given):
    with pytest.raises(InvalidRequestError, match="end"):
        as_offset("end", given)


@each("given", [0, -1.5, True, Fraction(1, 2), Decimal("1.5"), np.float32(2)])
def test_timeout_is_a_number_of_seconds(given):
    assert as_timeout(given) == float(given)


@each("given", [None, math.inf, Decimal("Infinity"), 10**400, 2**63])
def test_timeout_that_no_clock_measures_has_no_end(given):
    assert as_timeout(given) is None


@each("given", NOT_NUMBERS)
def test_something_else_is_no_timeout(given):
    with pytest.raises(InvalidRequestError, match="timeout must be a number of seconds"):
        as_timeout(given)


@each("given", [*NOT_NUMBERS, None, 1.0, math.inf, 0, 11])
def test_something_else_is_no_number_and_the_argument_is_named(given):
    with pytest.raises(InvalidRequestError, match="count must be"):
        as_number("count", given, least=1, most=10)
    assert as_number("count", np.int64(10), least=1, most=10) == 10


@each("given", NOT_NUMBERS)
@each(
    "call",
    [
        lambda topic, bad: topic.wait(0, timeout=bad),
        lambda topic, bad: topic.flush(bad),
        lambda topic, bad: topic.read(timeout=bad),
        lambda topic, bad: topic.read_arrow(timeout=bad),
        lambda topic, bad: topic.reader().next_batch(timeout=bad),
        lambda topic, bad: asyncio.run(topic.aio.wait(0, timeout=bad)),
        lambda topic, bad: topic.reader().next_batch(bad),
        lambda topic, bad: topic.reader().next_batch(max_bytes=bad),
        lambda topic, bad: asyncio.run(next_batch(topic, max_messages=bad)),
        lambda topic, bad: asyncio.run(next_batch(topic, max_bytes=bad)),
        lambda topic, bad: topic.reader().seek(bad),
        lambda topic, bad: topic.read(bad),
        lambda topic, bad: topic.read(end=bad),
        lambda topic, bad: topic.wait(bad),
        lambda topic, bad: asyncio.run(topic.aio.wait(bad)),
        lambda topic, bad: topic.append(b"x", schema_id=bad),
        lambda topic, bad: topic.append(b"x", schema_version=bad),
        lambda topic, bad: topic.append(b"x", publish_time=bad),
        lambda topic, bad: topic.append_arrow(ROWS, producer_id=bad),
        lambda topic, bad: topic.append_arrow(ROWS, first_request_id=bad),
    ],
)
def test_something_else_than_a_number_is_refused_everywhere(topic, call, given):
    with pytest.raises(InvalidRequestError):
        call(topic, given)
    assert topic.next_offset == 1


async def next_batch(topic, **options):
    return await topic.aio.reader().next_batch(**options)


ROWS = pa.record_batch({"payload": [b"a"]})
RECORD = StreamMessage(msg_id=MessageId(topic_name="/default/t"), payload=b"x", publish_time=1)


@each("given", [Decimal("NaN"), 1.5, [1], np.array([1, 2]), object()])
@each("field", [*StreamMessage.__dataclass_fields__, "producer_id", "topic_name", "broker_addr"])
def test_record_with_a_field_of_another_type_is_refused(topic, field, given):
    """Goal: nothing that cannot be read again is stored (an array has a length, and more bytes)."""
    if field in StreamMessage.__dataclass_fields__:
        record = replace(RECORD, **{field: given})
    else:
        record = replace(RECORD, msg_id=replace(RECORD.msg_id, **{field: given}))
    with pytest.raises(InvalidRequestError, match=field):
        topic.appender.append_record(record)
    assert topic.appender.append_record(RECORD) == topic.next_offset - 1
    assert {message.payload for message in topic.read()} == {b"x"}


def test_values_of_another_type_are_refused_by_name(topic):
    numbers = memoryview(b"abcd").cast("I")  # hashing it raises ValueError
    identity = replace(RECORD.msg_id, topic_name=numbers)
    named = replace(RECORD, producer_name=numbers)
    for call, match in (
        (lambda: topic.appender.append_record(b"x"), "record must be a StreamMessage, not bytes"),
        (lambda: topic.appender.append_record(named), "producer_name must be a string"),
        (
            lambda: topic.appender.append_record(replace(RECORD, msg_id=identity)),
            "topic_name must be a str",
        ),
        (lambda: topic.append(b"x", producer_name=numbers), "producer_name must be a string"),
        (lambda: topic.append_many(1), "payloads must be an iterable of bytes, not int"),
        (lambda: asyncio.run(topic.aio.append_many(1)), "payloads must be an iterable"),
        (lambda: asyncio.run(topic.aio.append_arrow(1)), "pyarrow.RecordBatch, not int"),
        (lambda: topic.append_arrow(ROWS, producer_name=1), "producer_name must be str, not int"),
        (lambda: topic.read_arrow(columns=1), "columns must be a list of names"),
        (lambda: topic.read_arrow(columns="payload"), "columns must be a list of names"),
        (lambda: topic.read_arrow(columns=[[]]), "columns must be a list of names"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            call()
    with ister.open() as log:
        for call in (log.seal, log.repair, log.delete, log.trim):
            with pytest.raises(InvalidRequestError):
                call([])
