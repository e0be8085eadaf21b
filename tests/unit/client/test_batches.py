"""A batch: what is in it, what becomes of its rows, who is told."""

import pytest

pytest.importorskip("pyarrow")

from ister.client.core.batches import Batch, as_payload, size_of
from ister.errors import InvalidRequestError, UnavailableError
from ister.format.arrow.schema import arrow_schema


def batch_of(count, **more):
    batch = Batch("/default/t")
    for number in range(count):
        fields = {
            name: more[name] if number % 2 else None
            for name in ("attributes", "routing_key", "schema_id", "schema_version")
            if name in more
        }
        batch.add(
            b"%d" % number,
            10,
            **{
                "attributes": None,
                "routing_key": None,
                "schema_id": None,
                "schema_version": None,
                **fields,
            },
        )
    return batch


def test_rows_become_arrow():
    batch = batch_of(4, attributes={"a": "b"}, routing_key="k", schema_id=7, schema_version=2)
    columns = ("payload", *sorted(batch.columns))
    rows = batch.to_arrow(arrow_schema(columns), 1, 3)
    assert rows.to_pydict() == {
        "payload": [b"1", b"2", b"3"],
        "attributes": [[("a", "b")], None, [("a", "b")]],
        "routing_key": ["k", None, "k"],
        "schema_id": [7, None, 7],
        "schema_version": [2, None, 2],
    }
    assert batch_of(1).columns == frozenset()
    assert batch_of(1).to_arrow(arrow_schema(columns), 0, 1)["routing_key"].to_pylist() == [None]


def test_it_is_done_when_every_row_is_decided():
    batch, told = batch_of(4), []
    assert batch.when_done(lambda: told.append(1))
    assert batch.place(0, 1, 100) == []
    error = UnavailableError("x")
    assert batch.fail(1, 1, error) == []
    assert not batch.is_done
    [call] = batch.place(2, 2, 200)
    call()
    assert told == [1]
    assert not batch.when_done(call)
    assert [batch.outcome(row) for row in (0, 2, 3)] == [100, 200, 201]
    assert not batch.is_seen
    assert batch.outcome(1) is error
    assert batch.is_seen
    assert batch.failure is error


def test_the_rest_is_given_up():
    batch = batch_of(3)
    batch.place(1, 1, 9)
    batch.give_up(UnavailableError("x"))
    assert batch.is_done
    assert batch.outcome(1) == 9
    assert isinstance(batch.outcome(2), UnavailableError)
    assert batch.give_up(UnavailableError("x")) == []


def test_what_can_be_a_message():
    changing = bytearray(b"abc")
    payload = as_payload(changing)
    changing[0] = 0
    assert payload == b"abc"
    assert as_payload(memoryview(b"abc")) == b"abc"
    for wrong in ("text", None, 5):
        with pytest.raises(InvalidRequestError):
            as_payload(wrong)
    assert size_of(b"abc", {"a": "b"}, "key") > size_of(b"abc", None, None) > 3
    for attributes, key in (({"a": 1}, None), ({1: "a"}, None), (None, b"k"), (None, "\ud800")):
        with pytest.raises(InvalidRequestError):
            size_of(b"", attributes, key)
