"""The nouns: names, watermarks, levels."""

import itertools

import pytest

from ister.base.limits import NAME_PART_CHARACTERS_MAX
from ister.base.model import AckLevel, Codec, TopicName, Watermarks
from ister.errors import InvariantError, TopicNameError
from tests.support.cases import each

_LONG = "a" * NAME_PART_CHARACTERS_MAX


@each("text", ["/default/orders", "/a/b", "/A-1/b_2", "/0/-", f"/{_LONG}/{_LONG}", "/Cur/curs"])
def test_name_parses_and_prints_the_same(text):
    name = TopicName.parse(text)
    assert str(name) == text
    assert f"/{name.namespace}/{name.topic}" == text


_BAD_NAMES = {
    "empty": "",
    "slash": "/",
    "no slash": "orders",
    "one part": "/orders",
    "no leading slash": "default/orders",
    "four parts": "/a/b/c",
    "five parts": "/a/b/c/d",
    "trailing slash": "/a/b/",
    "empty namespace": "//b",
    "empty topic": "/a/",
    "traversal": "/../../x",
    "traversal in the topic": "/a/..",
    "dot": "/a/.",
    "dots inside": "/a/b..c",
    "hidden": "/a/.b",
    "back slash": "/a/b\\c",
    "NUL": "/a/b\0",
    "NUL inside": "/a\0b/c",
    "newline at the end": "/a/b\n",
    "newline inside": "/a/b\nc",
    "space": "/a/b c",
    "tab": "/a/\t",
    "300 characters": "/a/" + "b" * 300,
    "one too many": f"/a/{_LONG}b",
    "reserved topic": "/a/cur",
    "reserved namespace": "/cur/a",
    "umlaut": "/a/ö",
    "decomposed umlaut": "/a/o\u0308",
    "full width letter": "/a/\uff42",
    "Arabic digit": "/a/\u0663",
    "Cyrillic a": "/a/\u0430",
    "zero width space": "/a/b\u200b",
    "percent": "/a/b%2f",
    "colon": "/a/b:c",
    "surrogate": "/a/\ud800",
}


@each("text", _BAD_NAMES.values())
def test_bad_name_is_refused(text):
    with pytest.raises(TopicNameError) as refused:
        TopicName.parse(text)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert "\n" not in str(refused.value)
    assert "\0" not in str(refused.value)
    assert len(str(refused.value)) < 400


@each("value", [None, 5, b"/a/b", ["a", "b"]])
def test_name_that_is_no_text_is_refused(value):
    with pytest.raises(TopicNameError, match="is a string"):
        TopicName.parse(value)


def test_watermarks_hold_only_in_their_order():
    """Goal: of all ways to give five marks the values 0 to 2, only ascending ones are taken."""
    names = ("trimmed", "tiered", "synced", "written", "next")
    taken = 0
    for values in itertools.product(range(3), repeat=5):
        marks = dict(zip(names, values, strict=True))
        if list(values) == sorted(values):
            taken += 1
            assert Watermarks(**marks).next == values[-1]
        else:
            with pytest.raises(InvariantError, match="out of order"):
                Watermarks(**marks)
    assert taken == 21


def test_levels_and_codecs_are_the_words_of_the_design():
    assert list(AckLevel) == ["memory", "written", "synced", "tiered"]
    assert list(Codec) == ["bincode1", "bincode2"]
