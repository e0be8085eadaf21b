"""Filters of messages: patterns, paths and conditions, what they match and what is refused."""

import json

import pytest

from ister.base.message_filter import NOT_JSON, Condition, MessageFilter, Pattern, parse_payload
from ister.errors import InvalidRequestError

ORDER = {
    "user": {"id": 7, "name": "Ana", "first name": "A"},
    "items": [{"sku": "A-1"}, {"sku": "B-2"}],
    "total": 99.5,
    "paid": True,
    "note": 'a "late" one',
    "tags": ["x", 1, None],
    "none": None,
}


@pytest.mark.parametrize(
    "text",
    [
        "user.id == 7",
        ".user.id==7",
        "user.id == 7.0",
        "user.id != 8",
        "user.id >= 7 and user.id <= 7",
        "user.id > 6 and user.id < 8",
        'user["first name"] == "A"',
        "user['first name'] == 'A'",
        'items[0].sku == "A-1"',
        'items[-1].sku == "B-2"',
        'note ~ "late"',
        'note ~ "\\"late\\""',
        "note ~ '\"late\"'",
        'tags ~ "x"',
        "tags ~ 1",
        "tags ~ null",
        "paid == true",
        "none == null",
        "missing == null",
        "missing.deeper != 7",
        "items[9].sku == null",
        'user.name < "B"',
        "total == 9.95e1",
        'total < 1 or user.name == "Ana" and paid == true',
        "user.id != true",
    ],
)
def test_a_condition_holds(text):
    assert Condition.parse(text).holds(ORDER)


@pytest.mark.parametrize(
    "text",
    [
        "user.id == 8",
        'user.id == "7"',
        "user.id < 7",
        'user.id < "8"',
        "paid == 1",
        "paid > 0",
        "tags ~ true",  # 1 is not true
        "total ~ 9",
        "user ~ 7",
        "missing < 1",
        'missing ~ "x"',
        "none != null",
        'user.name == "ana"',
        "user.id == 7 and paid == false or total > 100",
        "user[0] == 7",
        "items.sku == 7",
    ],
)
def test_a_condition_does_not_hold(text):
    assert not Condition.parse(text).holds(ORDER)


def test_a_payload_that_is_not_json_matches_nothing():
    for payload in (b"hello", b"\xff\xfe", b"NaN", b"[" * 100_000):
        document = parse_payload(payload)
        assert document is NOT_JSON
        assert not Condition.parse("missing != 1").holds(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid condition '': expected a field such as user.id, not the end"),
        ("user.id", "expected ==, !=, <, <=, >, >= or ~, not the end"),
        ("user.id = 7", "not '= 7' at character 9; use == to compare"),
        ("user.id == ", "expected a value, not the end"),
        ("status == failed", "expected a value, not 'failed' at character 11"),
        ('a == "x', "quoted text is not terminated: '\"x' at character 6"),
        ("a. == 7", "expected a field name, not ' == 7' at character 3"),
        ("a[x] == 7", "expected a number or a \"name\" in brackets, not 'x] == 7' at character 3"),
        ("a[0 == 7", "expected ], not ' == 7' at character 4"),
        ("a == 007", "expected a value, not '007'"),
        ("a == 7 b == 8", "expected and, or, or the end, not 'b == 8' at character 8"),
        ("a == 7 and", "expected a field such as user.id, not the end"),
        ("a == 7andy == 8", "expected a value, not '7andy == 8' at character 6"),
        ('a == "\\q"', "invalid escape in"),
        ("a" * 5000 + " == 1", "condition of 5005 characters; at most 4096"),
    ],
)
def test_an_error_says_where(text, message):
    with pytest.raises(InvalidRequestError) as caught:
        Condition.parse(text)
    assert message in str(caught.value)


def test_a_pattern_of_many_stars_takes_bounded_time():
    # With ordinary backtracking this takes longer than anybody waits.
    assert not Pattern.parse("*a" * 30 + "*b").matches("a" * 5000)


def test_all_parts_of_a_filter_have_to_match():
    payload = json.dumps(ORDER).encode()
    message = {"key": "eu-7", "attributes": {"kind": "order", "empty": ""}, "payload": payload}

    def matches(**parts):
        return MessageFilter.parse(**parts).matches(**message)

    assert matches()
    assert matches(keys=["us-*", "eu-*"])
    assert not matches(keys=["us-*"])
    assert matches(attributes=["kind=ord*", "empty", "empty="])
    assert not matches(attributes=["kind=ord*", "other"])
    assert not matches(attributes=["kind"], keys=["us"])
    assert not matches(attributes=["kind="])
    assert matches(where=["user.id == 7", "paid == true"], contains="late")
    assert not matches(where=["user.id == 7", "paid == false"])
    assert not matches(where=["user.id == 7"], contains="early")


def test_what_a_schema_decoded_is_compared_instead_of_the_payload():
    one = MessageFilter.parse(where=["user.id == 7"])
    assert one.matches(key=None, attributes={}, payload=b"\0\1", decoded={"user": {"id": 7}})
    assert not one.matches(key=None, attributes={}, payload=b"\0\1")


def test_a_filter_knows_whether_it_leaves_out_anything():
    assert not MessageFilter.parse()
    assert all(
        MessageFilter.parse(**part)
        for part in (
            {"keys": [""]},
            {"attributes": ["a"]},
            {"where": ["a == 1"]},
            {"contains": "x"},
        )
    )
