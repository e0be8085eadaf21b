"""Values to payloads and back."""

import math
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import pytest

from ister.base.serializers import JSON, TEXT, JsonSerializer, find_serializer
from ister.errors import InvalidRequestError
from tests.support.cases import each


@dataclass
class Order:
    number: int
    shop: str


@each("value", [None, True, 7, 2.5, "ü", [1, "a"], {"a": {"b": [None]}}, {}])
def test_json_comes_back_as_it_was(value):
    assert JSON.deserialize(JSON.serialize(value)) == value


def test_json_of_objects():
    key = uuid.uuid4()
    when = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert JSON.serialize(Order(1, "Ulm")) == b'{"number":1,"shop":"Ulm"}'
    assert JSON.deserialize(JSON.serialize({"when": when, "key": key})) == {
        "when": "2026-01-31T12:00:00Z",
        "key": str(key),
    }
    assert JSON.serialize(math.nan) == b"null"


def test_json_of_a_model_of_pydantic():
    class Model:  # what pydantic's models have
        def model_dump(self, *, mode):
            return {"mode": mode}

    assert JSON.serialize([Model()]) == b'[{"mode":"json"}]'


@each("value", [object(), {1: object()}, {"a": {(1, 2): 3}}, "\ud800"])
def test_json_of_anything_else_is_refused(value):
    with pytest.raises(InvalidRequestError):
        JSON.serialize(value)


@each("payload", [b"", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_not_json_is_refused(payload):
    with pytest.raises(InvalidRequestError):
        JSON.deserialize(payload)


def test_json_of_a_type():
    orders = JsonSerializer(Order)
    assert orders.deserialize(orders.serialize(Order(1, "Ulm"))) == Order(1, "Ulm")
    with pytest.raises(InvalidRequestError):
        orders.deserialize(b'{"number": "1", "shop": "Ulm"}')
    assert JsonSerializer(msgspec.Raw).deserialize(b"{}") == msgspec.Raw(b"{}")


def test_text():
    assert TEXT.deserialize(TEXT.serialize("Donau-ü")) == "Donau-ü"
    with pytest.raises(InvalidRequestError):
        TEXT.serialize(b"x")
    with pytest.raises(InvalidRequestError):
        TEXT.serialize("\ud800")
    with pytest.raises(InvalidRequestError):
        TEXT.deserialize(b"\xff")


def test_serializers_are_found_by_name_or_brought():
    class Own:
        def serialize(self, value):
            return b"%d" % value

        def deserialize(self, payload):
            return int(payload)

    own = Own()
    assert find_serializer(own) is own
    assert find_serializer("json") is JSON
    assert find_serializer("text") is TEXT
    plain = find_serializer("bytes")
    assert plain.serialize(b"x") == plain.deserialize(b"x") == b"x"
    with pytest.raises(InvalidRequestError) as caught:
        find_serializer("yaml")
    assert caught.value.hint == "use json, text, bytes, or an object with serialize and deserialize"
    with pytest.raises(InvalidRequestError):
        find_serializer(7)
