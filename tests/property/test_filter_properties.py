"""Filters and templates take any text: they parse it, or refuse it with a typed error."""

import json
from contextlib import suppress

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ister.base.message_filter import NOT_JSON, Condition, JsonPath, Pattern, parse_payload
from ister.cli.messages_out import Received
from ister.cli.templates import parse_template
from ister.errors import InvalidRequestError
from tests.support.scale import scaled

EXAMPLES = settings(max_examples=scaled(75, 150), deadline=None, print_blob=True)
_WORDS = st.sampled_from(
    [
        *"ab.[]\"'\\0179-~=!<> {}*?\n",
        "and",
        "or",
        "true",
        "null",
        "payload",
        "==",
        "\\x",
        "{offset}",
    ]
)
TEXTS = st.lists(_WORDS | st.text(max_size=2), max_size=14).map("".join)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@EXAMPLES
@given(TEXTS, DOCUMENTS)
@example('a == "\\u', {})
def test_a_condition_is_parsed_or_refused(text, document):
    with suppress(InvalidRequestError):
        assert Condition.parse(text).holds(document) in (True, False)
    with suppress(InvalidRequestError):
        JsonPath.parse(text).find(document)


@EXAMPLES
@given(st.text(min_size=1), DOCUMENTS.filter(lambda one: not isinstance(one, float | list | dict)))
def test_a_field_equals_its_own_value(name, value):
    text = f"[{json.dumps(name)}] == {json.dumps(value)}"
    if len(text) < 4000:
        assert Condition.parse(text).holds({name: value})
        assert not Condition.parse(text.replace("==", "!=", 1)).holds({name: value})


@EXAMPLES
@given(TEXTS, st.binary(max_size=20))
def test_a_template_is_rendered_or_refused(text, payload):
    message = Received("/default/t", 1, 0, "p", payload, {"a": "b"}, None)
    with suppress(InvalidRequestError):
        assert isinstance(parse_template(text, bytes)(message), bytes)


@EXAMPLES
@given(st.text("ab*?\\", max_size=8), st.text("ab*?\\", max_size=10))
def test_patterns_match_as_one_letter_after_the_other(pattern, text):
    assert Pattern.parse(pattern).matches(text) == _matches(pattern, text)


def _matches(pattern, text):
    if not pattern:
        return not text
    first, rest = pattern[0], pattern[1:]
    if first == "*":
        return any(_matches(rest, text[at:]) for at in range(len(text) + 1))
    if first == "?":
        return bool(text) and _matches(rest, text[1:])
    if first == "\\" and rest and rest[0] in "*?\\":
        first, rest = rest[0], rest[1:]
    return text[:1] == first and _matches(rest, text[1:])


@EXAMPLES
@given(st.binary(max_size=30))
def test_bytes_are_json_or_not(payload):
    value = parse_payload(payload)
    if value is not NOT_JSON:
        assert parse_payload(json.dumps(value).encode()) == value


@EXAMPLES
@given(DOCUMENTS)
def test_document_is_read_as_it_was_written(document):
    text = json.dumps(document, allow_nan=False)
    assert parse_payload(text.encode()) == document
    assert parse_payload(text.encode() + b"}") is NOT_JSON
