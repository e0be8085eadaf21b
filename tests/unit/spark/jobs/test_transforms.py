"""A user's function: found, told apart by its signature, called, and checked."""

import pickle
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from ister.errors import InvalidRequestError, MessageTooLargeError, NotFoundError
from ister.format.arrow.schema import arrow_schema
from ister.spark.jobs.transforms import (
    MARK,
    ReplayMessage,
    Transform,
    identify,
    load_transform,
    parse_transform,
    takes_batches,
)
from tests.support.cases import case

A, B = "/default/a", "/default/b"
MOMENT = datetime(2026, 1, 31, tzinfo=UTC)


def batch_of(count, *, first=0):
    rows = [
        {
            "topic": A,
            "offset": offset,
            "publish_time": MOMENT,
            "producer_name": "p",
            "payload": b"%d" % offset,
            "attributes": [("n", str(offset))],
            "routing_key": "k",
            "schema_id": 7,
            "schema_version": 1,
        }
        for offset in range(first, first + count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema())


def run(function, count=3, *, first=0, marked=False, per_message=None, payload_bytes_max=1000):
    transform = Transform(
        function=function,
        per_message=per_message,
        target=B,
        is_marked=marked,
        payload_bytes_max=payload_bytes_max,
    )
    batches = list(transform.apply(batch_of(count, first=first)))
    return [row for batch in batches for row in batch.to_pylist()]


def payloads(rows):
    return [row["payload"] for row in rows]


# -- by message ---------------------------------------------------------------------------------


def test_what_a_function_of_messages_may_return():
    for returned, expected in [
        (None, []),
        ([], []),
        (b"x", [b"x"]),
        ("ü", ["ü".encode()]),
        (bytearray(b"x"), [b"x"]),
        ({"payload": b"x"}, [b"x"]),
        ([b"x", None, ["y"]], [b"x", b"y"]),
        (ReplayMessage(payload=b"new"), [b"new"]),
    ]:
        with case(returned, expected):
            assert payloads(run(lambda message, returned=returned: returned, 1)) == expected


def test_fields_that_are_not_mentioned_stay():
    [row] = run(lambda message: {"payload": "x", "routing_key": None}, 1)
    assert row["routing_key"] is None
    assert row["producer_name"] == "p"
    assert row["publish_time"] == MOMENT
    assert dict(row["attributes"]) == {"n": "0"}
    assert (row["schema_id"], row["schema_version"]) == (7, 1)


def test_function_sees_every_message_in_order_and_may_yield():
    seen = []

    def twice(message):
        seen.append((message.topic, message.offset, message.text, message.attributes))
        yield message
        yield message.replace(payload=message.payload * 2)

    rows = run(twice, 3000)
    assert seen == [(A, n, str(n), {"n": str(n)}) for n in range(3000)]
    assert payloads(rows) == [p for n in range(3000) for p in (b"%d" % n, b"%d" % n * 2)]


def test_what_it_may_not_return_names_the_message():
    for returned, text in [
        (7, "returned int"),
        ({"value": b"x"}, "unknown field 'value'"),
        ({"payload": 7}, "payload that is int"),
        ({"attributes": {"a": 1}}, "attribute 'a'"),
        ({"routing_key": 1}, "int for routing_key"),
        ({"schema_id": True}, "bool for schema_id"),
        ({"publish_time": datetime(2026, 1, 1)}, "without a time zone"),
    ]:
        with case(returned, text):
            with pytest.raises(InvalidRequestError, match=text) as failure:
                run(
                    lambda message, returned=returned: returned if message.offset == 11 else b"",
                    5,
                    first=9,
                )
            assert failure.value.offset == 11
            assert failure.value.topic == A


def test_exception_names_the_message_and_the_line():
    def fail(message):
        return {}[message.offset]

    with pytest.raises(InvalidRequestError, match="KeyError: 9") as failure:
        run(fail, 2, first=9)
    assert failure.value.offset == 9
    assert failure.value.path.startswith(__file__)
    assert isinstance(failure.value.__cause__, KeyError)


def test_message_that_is_too_large_is_named():
    with pytest.raises(MessageTooLargeError) as failure:
        run(lambda m: b"x" * (11 if m.offset == 2 else 10), payload_bytes_max=10)
    assert failure.value.offset == 2


# -- by batch -----------------------------------------------------------------------------------


def test_batches_may_be_changed_divided_and_left_out():
    def halves(batch: pa.RecordBatch):
        yield batch.slice(0, 1)
        yield pa.record_batch({"payload": ["t"]})

    rows = run(halves)
    assert payloads(rows) == [b"0", b"t"]
    assert rows[1]["publish_time"] is None
    assert run(lambda batch: None) == []
    assert payloads(run(lambda batch: pa.Table.from_batches([batch]))) == [b"0", b"1", b"2"]
    assert payloads(run(None)) == [b"0", b"1", b"2"]


def test_batches_that_are_no_messages_name_the_first_one():
    for returned, text in [
        (b"x", "returned bytes"),
        (pa.record_batch({"text": ["x"]}), "unknown column 'text'"),
        (pa.record_batch({"routing_key": ["x"]}), "no column payload"),
        (pa.record_batch({"payload": [[1]]}), "payload|types"),
    ]:
        with case(returned, text):
            with pytest.raises(InvalidRequestError, match=text) as failure:
                run(lambda batch, returned=returned: returned, first=40)
            assert failure.value.offset == 40


# -- the mark -----------------------------------------------------------------------------------


def test_mark_says_where_messages_come_from():
    for function in [
        None,
        lambda message: {"attributes": {MARK: "old", **message.attributes}},
        lambda batch: batch,
        lambda batch: batch.drop_columns(["offset"]),
    ]:
        with case(function):
            rows = run(function, first=5, marked=True)
            assert [dict(row["attributes"]) for row in rows] == [
                {"n": str(n), MARK: str(n)} for n in (5, 6, 7)
            ]


def test_mark_of_rows_that_come_from_nowhere():
    with pytest.raises(InvalidRequestError, match="source messages"):
        run(lambda batch: pa.record_batch({"payload": [b"x"]}), marked=True)


# -- which kind ---------------------------------------------------------------------------------


def annotated(rows: pa.RecordBatch): ...


def by_text(rows: "pyarrow.RecordBatch"): ...  # noqa: F821


def of_message(batch: ReplayMessage): ...


def test_kind_follows_from_the_signature():
    for function, expected in [
        (annotated, True),
        (by_text, True),
        (of_message, False),
        (lambda batch: None, True),
        (lambda message: None, False),
        (len, False),
    ]:
        with case(function, expected):
            assert takes_batches(function) is expected


def test_caller_says_which_kind_it_is():
    assert payloads(run(lambda batch: batch.payload, per_message=True)) == [b"0", b"1", b"2"]
    with pytest.raises(InvalidRequestError, match="AttributeError"):
        run(lambda message: message.payload, per_message=False)


def test_function_without_arguments():
    with pytest.raises(InvalidRequestError, match="no argument"):
        run(lambda: None)


# -- finding one --------------------------------------------------------------------------------


def test_function_in_a_file_travels_as_text(tmp_path):
    (tmp_path / "helper_of_shop.py").write_text("SUFFIX = b'!'\n")
    file = tmp_path / "shop.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from helper_of_shop import SUFFIX\n"
        "@dataclass\n"
        "class Kinds:\n"
        "    @staticmethod\n"
        "    def loud(message):\n"
        "        return message.payload + SUFFIX\n"
    )
    source = pickle.loads(pickle.dumps(parse_transform(f"{file}:Kinds.loud")))
    file.unlink()
    assert payloads(run(source)) == [b"0!", b"1!", b"2!"]
    assert source.identity == f"{file}:Kinds.loud"
    assert "SUFFIX" not in repr(source)


def test_function_in_a_module():
    source = parse_transform("json:dumps")
    assert load_transform(source)([1]) == "[1]"
    assert source.identity == "json:dumps"


def test_reference_of_another_form():
    for reference in ["", "json", ":f", "json:", "json:a b", "x.py:1f"]:
        with case(reference), pytest.raises(InvalidRequestError, match="invalid transform"):
            parse_transform(reference)


def test_references_to_nothing(tmp_path):
    with pytest.raises(NotFoundError):
        parse_transform(f"{tmp_path}/nothing.py:f")
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nraise RuntimeError('no')\n")
    for reference, text in (
        ("no_such_module_at_all:f", "cannot be loaded: ModuleNotFoundError"),
        ("json:no_such_name", "does not exist"),
        ("json:__name__", "not a function"),
        (f"{broken}:f", "RuntimeError: no"),
    ):
        with pytest.raises(InvalidRequestError, match=text) as failure:
            load_transform(parse_transform(reference))
    assert failure.value.path == f"{broken}:2"


def test_names_of_functions():
    assert identify(test_names_of_functions).endswith("test_transforms:test_names_of_functions")
    for nameless in (lambda message: message, run.__get__(1)):
        if "<" in getattr(nameless, "__qualname__", "<"):
            with pytest.raises(InvalidRequestError, match="name"):
                identify(nameless)
