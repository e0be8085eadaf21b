"""A stream's offset: its text, how it goes on, and what is lost."""

import base64
import hashlib
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.errors import (
    ConflictError,
    DataGapError,
    InvalidRequestError,
    InvariantError,
    UnsupportedVersionError,
)
from ister.spark.offsets import (
    StreamOffset,
    TopicHead,
    TopicOffset,
    advance,
    check_loss,
    has_news,
)
from tests.support.cases import case, each

_GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "stream_offset.json"

EXAMPLES = settings(max_examples=200, deadline=None, print_blob=True)

A, B, C = "/default/a", "/default/b", "/default/c"


def at(offset, start=None, incarnation="i", epoch=1):
    return TopicOffset(
        incarnation=incarnation,
        epoch=epoch,
        offset=offset,
        start=offset if start is None else start,
    )


def head(earliest, end, incarnation="i", lineage=((1, 0),)):
    return TopicHead(incarnation=incarnation, earliest=earliest, end=end, lineage=lineage)


def ends_of(heads):
    return {topic: found.end for topic, found in heads.items()}


# -- the value --------------------------------------------------------------------------------


def test_golden_offset_is_decoded_and_encoded_unchanged():
    text = _GOLDEN.read_text().rstrip("\n")
    offset = StreamOffset.from_json_text(text)
    assert offset.to_json_text() == text
    assert offset.topics["/default/a"] == at(123, 90, "0123456789abcdef", epoch=4)


def test_ranges_are_those_of_the_batch_that_ends_here():
    offset = StreamOffset({A: at(10, 4), B: at(7), C: at(1, 0)})
    assert offset.ranges() == {A: (4, 10), C: (0, 1)}


def test_topic_offset_that_goes_backwards_is_a_bug():
    for offset, start in [(1, 2), (0, -1), (-1, -1)]:
        with case(offset, start), pytest.raises(InvariantError):
            at(offset, start)


def many(count, **more):
    return {
        f"/default/topic-{number:05}": at(1_000_000 + 7 * number, **more) for number in range(count)
    }


def test_unchanged_topics_of_a_batch_take_a_quarter_of_the_space():
    """Goal: Spark writes all topics down for each micro-batch, and few of them have news."""
    topics = {
        name: replace(place, incarnation=hashlib.sha256(name.encode()).hexdigest()[:16])
        for name, place in many(1000).items()
    }
    topics[A] = at(10, 4)
    offset = StreamOffset(topics)
    text = offset.to_json_text()
    assert len(text) < 25_000, "90,000 without"
    assert StreamOffset.from_json_text(text) == offset
    assert json.loads(text)["topics"] == {
        A: {"incarnation": "i", "epoch": 1, "offset": 10, "from": 4}
    }
    assert json.dumps(json.loads(text)) == text


def test_few_unchanged_topics_stay_readable_by_everybody():
    for count, version in [(0, 1), (19, 1), (20, 2)]:
        with case(count, version):
            value = StreamOffset({A: at(10, 4), **many(count)}).to_dict()
            assert value["version"] == version
            assert len(value["topics"]) == (20 if version == 1 and count else 1)
            assert StreamOffset.from_dict(value).topics == {A: at(10, 4), **many(count)}


def test_other_version_is_unsupported_and_not_wrong():
    for version in [0, 3, 99]:
        with (
            case(version),
            pytest.raises(
                UnsupportedVersionError, match=f"version {version}, and this Ister knows"
            ),
        ):
            StreamOffset.from_dict({"version": version, "whatever": {}})


GOOD = {"incarnation": "i", "epoch": 1, "offset": 2, "from": 1}


def plain(topics, **more):
    return {"version": 1, "topics": topics, **more}


def packed(value):
    text = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    return {"version": 2, "topics": {}, "unchanged": text}


@each(
    "value",
    [
        *(None, [1], {}, {"o": 100, "from": 90}),
        {"version": "1", "topics": {}},
        {"version": True, "topics": {}},
        {"version": 1},
        plain({}, x=1),
        plain({}, unchanged=""),
        plain([]),
        plain({"a": GOOD}),
        plain({A: 5}),
        plain({A: {"0": 23}}),
        plain({A: GOOD | {"x": 1}}),
        plain({A: GOOD | {"incarnation": None}}),
        plain({A: {"incarnation": "i", "offset": 2, "from": 1}}),
        *(plain({A: GOOD | {"epoch": bad}}) for bad in (-1, "1", True)),
        *(plain({A: GOOD | {"offset": bad}}) for bad in (-1, 2.0)),
        *(plain({A: GOOD | {"from": bad}}) for bad in (True, 3)),
        {"version": 2, "topics": {}},
        *({"version": 2, "topics": {}, "unchanged": bad} for bad in (5, "%", "AAAA")),
        *(
            packed(bad)
            for bad in ([], {A: 5}, {A: ["i", 1]}, {A: ["i", 1, -1]}, {"a": ["i", 1, 1]})
        ),
    ],
)
def test_what_is_no_offset_is_refused_as_another_sources_checkpoint(value):
    with pytest.raises(InvalidRequestError, match="not one of this source") as caught:
        StreamOffset.from_dict(value)
    assert "checkpointLocation" in caught.value.hint


def test_text_that_is_no_json_is_refused():
    for text in ["", "{", "serialized offset", "[" * 100_000]:
        with case(text), pytest.raises(InvalidRequestError, match="this source: it is no JSON"):
            StreamOffset.from_json_text(text)


# -- going on ---------------------------------------------------------------------------------


STOOD = {A: at(10, 4), B: at(7, 2)}
OWNED_AGAIN = ((1, 0), (2, 10))


@each(
    ("previous", "heads", "ends", "expected"),
    [
        # It goes on where it stood; without news it is the previous one itself, because another
        # `from` or epoch for the same place would be another text, and so an empty batch for ever.
        (STOOD, {A: head(0, 20), B: head(0, 30)}, {A: 15}, {A: at(15, 10), B: at(7)}),
        (STOOD, {A: head(0, 10), B: head(0, 7)}, {A: 10, B: 7}, None),
        (STOOD, {A: head(0, 10), B: head(0, 7)}, {}, None),
        (STOOD, {A: head(0, 10, lineage=OWNED_AGAIN), B: head(0, 7)}, {A: 10, B: 7}, None),
        # A topic without news is not read again beside one that has some.
        (STOOD, {A: head(0, 10), B: head(0, 8)}, {A: 10, B: 8}, {A: at(10), B: at(8, 7)}),
        (
            STOOD,
            {A: head(0, 10, lineage=OWNED_AGAIN), B: head(0, 8)},
            {A: 10, B: 8},
            {A: at(10, epoch=2), B: at(8, 7)},
        ),
        # A new topic begins at its earliest, and is no news without messages.
        ({A: at(10)}, {A: head(0, 10), B: head(5, 9)}, {B: 7}, {A: at(10), B: at(7, 5)}),
        ({A: at(10, 3)}, {A: head(0, 10), B: head(5, 5)}, {A: 10, B: 5}, None),
        (
            {A: at(10, 3)},
            {A: head(0, 11), B: head(5, 5)},
            {A: 11, B: 5},
            {A: at(11, 10), B: at(5)},
        ),
        ({}, {A: head(5, 9, lineage=((1, 0), (6, 2)))}, {A: 9}, {A: at(9, 5, epoch=6)}),
        # One that has vanished stays where it is, with its epoch.
        (
            {A: at(10, 4, epoch=3), B: at(7, 2)},
            {B: head(0, 9)},
            {B: 9},
            {A: at(10, epoch=3), B: at(9, 7)},
        ),
        (STOOD, {}, {}, None),
        # It never goes backwards.
        (STOOD, {A: head(0, 8), B: head(0, 9)}, {A: 8, B: 9}, {A: at(10), B: at(9, 7)}),
        # A node that opens its own topic again has a new epoch, and the lineage stays.
        (
            {A: at(10, 4, epoch=4)},
            {A: head(0, 12, lineage=((1, 0), (4, 3)))},
            {A: 12},
            {A: at(12, 10, epoch=4)},
        ),
        *(
            (
                {A: at(10, 4)},
                {A: head(0, 15, lineage=((1, 0), (2, start)))},
                {A: 12},
                {A: at(12, 10, epoch=2)},
            )
            for start in (10, 11, 15)
        ),
    ],
)
def test_stream_goes_on(previous, heads, ends, expected):
    previous = StreamOffset(previous)
    following = advance(previous, heads, ends)
    if expected is None:
        assert following is previous
    else:
        assert following == StreamOffset(expected)
    if set(previous.topics) <= set(heads) and heads[A].end >= 10:
        assert check_loss(previous, heads, fails=True) == (previous, []), "nothing is lost"


def test_news_are_messages_that_the_previous_offset_had_not():
    for before, after, expected in [
        ({A: at(5, 1)}, {A: at(5, 1)}, False),
        ({A: at(5, 1)}, {A: at(6, 5)}, True),
        ({A: at(5, 1)}, {A: at(5, 5)}, False),
        ({A: at(5, 1)}, {}, False),
        ({}, {A: at(5, 5)}, False),
        ({}, {A: at(5, 4)}, True),
        ({A: at(5, 1)}, {A: at(5, 0, "j")}, True),
        ({A: at(9, 8)}, {A: at(9, 5)}, True),
        ({A: at(9, 5)}, {A: at(9, 5, epoch=2)}, True),
        ({A: at(9, 5)}, {A: at(9, 9, epoch=2)}, False),
    ]:
        with case(before, after, expected):
            assert has_news(StreamOffset(before), StreamOffset(after)) is expected


NAMES = st.sampled_from([A, B, C, "/x/1", "/x/2"])


@st.composite
def topics_growing(draw):
    """The ends of some topics over some polls, and how far each poll may go."""
    polls = []
    ends = {}
    for _ in range(draw(st.integers(1, 8))):
        for topic in draw(st.sets(NAMES, max_size=3)):
            ends[topic] = ends.get(topic, 0) + draw(st.integers(0, 5))
        limits = {topic: draw(st.integers(0, end)) for topic, end in ends.items()}
        polls.append((dict(ends), limits))
    return polls


@EXAMPLES
@given(topics_growing())
def test_batches_of_a_growing_stream_have_every_message_once_and_in_order(polls):
    stream = StreamOffset({})
    read = {}
    for ends, limits in polls:
        heads = {topic: head(0, end) for topic, end in ends.items()}
        following = advance(stream, heads, limits)
        if following is stream:
            assert not has_news(stream, following)
            continue
        assert has_news(stream, following)
        for topic, (start, end) in following.ranges().items():
            assert start == read.get(topic, 0)
            assert end <= ends[topic]
            read[topic] = end
        stream = StreamOffset.from_json_text(following.to_json_text())
        assert stream == following
    for topic, place in stream.topics.items():
        assert place.offset == read.get(topic, 0)


# -- losses -----------------------------------------------------------------------------------


LOSSES = [
    ({B: head(0, 9)}, ConflictError, "the topic was deleted", "leaves the topic out", None),
    (
        {A: head(3, 99, "j"), B: head(0, 9)},
        ConflictError,
        "the topic was deleted and made again",
        "reads the new one from its earliest message, 3, on",
        at(3, incarnation="j"),
    ),
    (
        {A: head(15, 99), B: head(0, 9)},
        DataGapError,
        "the messages 10 up to, not including, 15 aged out",
        "continues at message 15",
        at(15),
    ),
    (
        {A: head(0, 8), B: head(0, 9)},
        ConflictError,
        "the topic ends at 8, and the stream had come to 10",
        "continues at 8",
        at(8),
    ),
    (
        {A: head(0, 99, lineage=((1, 0), (2, 8))), B: head(0, 9)},
        ConflictError,
        "a disk was lost, and the topic's new owner went on from 8",
        "goes back to 8",
        at(8, epoch=2),
    ),
    (
        {A: head(0, 8, lineage=((1, 0), (2, 8))), B: head(0, 9)},
        ConflictError,
        "a disk was lost, and the topic's new owner went on from 8",
        "goes back to 8",
        at(8, epoch=2),
    ),
    *(
        (
            {A: head(0, 40, lineage=lineage), B: head(0, 9)},
            ConflictError,
            "a disk was lost, and the topic's new owner went on from 6",
            "goes back to 6",
            at(6, epoch=5),
        )
        for lineage in (
            ((1, 0), (2, 8), (5, 6)),
            ((1, 0), (2, 6), (5, 8)),
            ((1, 0), (2, 6), (5, 30)),
        )
    ),
    (
        # Where it goes on aged out.
        {A: head(9, 20, lineage=((1, 0), (2, 8))), B: head(0, 9)},
        ConflictError,
        "a disk was lost, and the topic's new owner went on from 8",
        "goes back to 9",
        at(9, epoch=2),
    ),
    (
        # The new owner took over beyond the stream: what is missing was kept, and aged out.
        {A: head(15, 40, lineage=((1, 0), (2, 30))), B: head(0, 9)},
        DataGapError,
        "the messages 10 up to, not including, 15 aged out",
        "continues at message 15",
        at(15, epoch=2),
    ),
    (
        # Its epochs go on from those of the deleted one, so its first owner is a newer one.
        {A: head(3, 99, "j", lineage=((4, 0),)), B: head(0, 9)},
        ConflictError,
        "the topic was deleted and made again",
        "reads the new one from its earliest message, 3, on",
        at(3, incarnation="j", epoch=4),
    ),
    (
        {A: head(12, 12), B: head(0, 9)},
        DataGapError,
        "the messages 10 up to, not including, 12 aged out",
        "continues at message 12",
        at(12),
    ),
]
PREVIOUS = StreamOffset({A: at(10, 4), B: at(7, 2)})


@each("heads, kind, what, remedy, place", LOSSES)
def test_loss_ends_a_stream_by_name_or_is_passed_with_a_warning(heads, kind, what, remedy, place):
    """Goal: no batch without messages, and none read twice, after a loss that is passed.

    Each loss is followed by polls without and with news, as the stream reader makes them.
    """
    with pytest.raises(kind) as caught:
        check_loss(PREVIOUS, heads, fails=True)
    assert (caught.value.topic, caught.value.offset) == (A, 10)
    assert what in str(caught.value)
    assert f"failOnDataLoss=false {remedy}" in str(caught.value)
    if isinstance(caught.value, DataGapError):
        assert (caught.value.start, caught.value.end) == (10, heads[A].earliest)
    adjusted, (warning,) = check_loss(PREVIOUS, heads, fails=False)
    assert warning.startswith(f"{A}, offset 10: {what}")
    assert warning.endswith(f"the stream {remedy}")
    assert adjusted.topics.get(A) == place
    assert adjusted.topics[B] is PREVIOUS.topics[B]
    quiet = {topic: found.earliest if topic == A else 7 for topic, found in heads.items()}
    assert not has_news(PREVIOUS, advance(adjusted, heads, quiet))
    following = advance(adjusted, heads, {B: 9})
    assert has_news(PREVIOUS, following)
    assert following.ranges() == {B: (7, 9)}
    assert check_loss(following, heads, fails=True) == (following, [])


# -- take-overs -------------------------------------------------------------------------------


def test_epoch_that_was_moved_lets_the_next_take_over_be_seen():
    """Goal: an owner is judged once. What it gave up was not read then, and may be read now."""
    heads = {A: head(0, 20, lineage=((1, 0), (2, 10)))}
    stream = advance(StreamOffset({A: at(10, 4)}), heads, {A: 18})
    assert check_loss(stream, heads, fails=True) == (stream, [])
    heads = {A: head(0, 20, lineage=((1, 0), (2, 10), (3, 18)))}
    assert check_loss(stream, heads, fails=True) == (stream, [])
    heads = {A: head(0, 20, lineage=((1, 0), (2, 10), (3, 17)))}
    with pytest.raises(ConflictError, match="new owner went on from 17"):
        check_loss(stream, heads, fails=True)


def test_given_up_is_the_lowest_start_of_the_owners_since():
    for epoch, lineage, start in [
        (1, (), None),
        (1, ((1, 0),), None),
        (1, ((1, 0), (2, 8)), 8),
        (1, ((1, 0), (2, 8), (5, 6)), 6),
        (1, ((1, 0), (2, 6), (5, 8)), 6),
        (1, ((1, 0), (2, 9), (3, 5), (5, 30)), 5),
        (2, ((1, 0), (2, 6), (5, 8)), 8),
        (3, ((1, 0), (2, 6), (5, 8)), 8),
        (5, ((1, 0), (2, 6), (5, 8)), None),
        (1, ((3, 40), (4, 50)), 40),
    ]:
        with case(epoch, lineage, start):
            assert head(0, 99, lineage=lineage).given_up_from(epoch) == start


def test_messages_of_a_new_owner_in_a_range_that_was_read_are_read():
    """Goal: a new owner's messages are not taken for the lost ones that had their offsets.

    The range and the place are those of the last batch; the epoch alone makes it another text.
    """
    previous = StreamOffset({A: at(10, 8)})
    heads = {A: head(0, 10, lineage=((1, 0), (2, 8)))}
    adjusted, _ = check_loss(previous, heads, fails=False)
    following = advance(adjusted, heads, ends_of(heads))
    assert following == StreamOffset({A: at(10, 8, epoch=2)})
    assert has_news(previous, following)
    assert following.to_json_text() != previous.to_json_text()
    assert check_loss(following, heads, fails=True) == (following, [])
    assert advance(following, heads, ends_of(heads)) is following


def test_replay_of_a_batch_has_the_same_text_whatever_owners_came_since():
    """Spark gives back what it wrote down: its text must not depend on how topics stand now."""
    heads = {A: head(0, 12, lineage=((1, 0), (2, 10))), B: head(0, 9)}
    end = advance(StreamOffset({A: at(10, 4), B: at(7)}), heads, ends_of(heads))
    text = end.to_json_text()
    assert text == (
        '{"version": 1, "topics": {'
        '"/default/a": {"incarnation": "i", "epoch": 2, "offset": 12, "from": 10}, '
        '"/default/b": {"incarnation": "i", "epoch": 1, "offset": 9, "from": 7}}}'
    )
    replayed = StreamOffset.from_json_text(text)
    assert replayed == end
    assert replayed.to_json_text() == text
    heads[A] = head(0, 12, lineage=((1, 0), (2, 10), (3, 12)))
    checked, _ = check_loss(replayed, heads, fails=True)
    assert advance(checked, heads, ends_of(heads)).to_json_text() == text


@st.composite
def heads_found(draw):
    """A topic's head whose owners each began somewhere at or before its end."""
    earliest = draw(st.integers(0, 9))
    end = earliest + draw(st.integers(0, 5))
    epochs = sorted(draw(st.sets(st.integers(1, 6), max_size=3)))
    lineage = ((0, 0), *((epoch, draw(st.integers(0, end))) for epoch in epochs))
    return head(earliest, end, draw(st.sampled_from("ij")), lineage)


@EXAMPLES
@given(
    st.dictionaries(NAMES, st.tuples(st.integers(0, 9), st.sampled_from("ij"), st.integers(0, 6))),
    st.dictionaries(NAMES, heads_found()),
)
def test_adjusted_offset_lies_within_what_topics_hold(places, heads):
    previous = StreamOffset(
        {
            topic: at(offset, 0, incarnation, epoch)
            for topic, (offset, incarnation, epoch) in places.items()
        }
    )
    adjusted, warnings = check_loss(previous, heads, fails=False)
    for topic, place in adjusted.topics.items():
        assert place.incarnation == heads[topic].incarnation
        assert heads[topic].earliest <= place.offset <= heads[topic].end
    assert check_loss(adjusted, heads, fails=True) == (adjusted, [])
    assert not has_news(previous, adjusted)
    if warnings:
        with pytest.raises((ConflictError, DataGapError)):
            check_loss(previous, heads, fails=True)
    else:
        assert adjusted is previous
