"""The nouns: names, watermarks, levels."""

import itertools

import pytest

from ister.base.limits import NAME_PART_CHARACTERS_MAX
from ister.base.model import TopicName, Watermarks
from ister.errors import InvariantError, TopicNameError
from tests.support.cases import each

_LONG = "a" * NAME_PART_CHARACTERS_MAX


@each("text", ["/default/orders", "/a/b", "/A-1/b_2", "/0/-", f"/{_LONG}/{_LONG}", "/Cur/curs"])
def test_name_parses_and_prints_the_same(text):
    name = TopicName.parse(text)
    assert str(name) == text
    assert f"/{name.namespace}/{name.topic}" == text


_BAD_NAMES = [
    *("", "/", "orders", "/orders", "default/orders", "/a/b/c", "/a/b/c/d", "/a/b/", "//b", "/a/"),
    *("/../../x", "/a/..", "/a/.", "/a/b..c", "/a/.b", "/a/cur", "/cur/a"),
    *("/a/b\\c", "/a/b\0", "/a\0b/c", "/a/b\n", "/a/b\nc", "/a/b c", "/a/\t", "/a/b%2f", "/a/b:c"),
    *("/a/" + "b" * 300, f"/a/{_LONG}b"),
    # Letters and digits of others, composed or not, and characters that nobody sees.
    *("/a/ö", "/a/o\u0308", "/a/\uff42", "/a/\u0663", "/a/\u0430", "/a/b\u200b", "/a/\ud800"),
]


@each("text", _BAD_NAMES)
def test_bad_name_is_refused(text):
    with pytest.raises(TopicNameError) as refused:
        TopicName.parse(text)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert "\n" not in str(refused.value)
    assert "\0" not in str(refused.value)
    assert len(str(refused.value)) < 400


@each("value", [None, 5, b"/a/b", ["a", "b"]])
def test_name_that_is_no_text_is_refused(value):
    with pytest.raises(TopicNameError):
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
            with pytest.raises(InvariantError):
                Watermarks(**marks)
    assert taken == 21
