"""The drawing of a topic's tiers: where things stand, in any width, for any topic."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ister.cli.tier_map import column_of, draw, draw_spans

FULL, SPLIT, PARQUET, GAP, POINTER = "█", "▌", "▚", "·", "▲"
SHADES = "░▒▓"


def an_object(start, end, format="dnb1"):
    return {"start_offset": start, "end_offset": end - 1, "format": format}


def a_view(objects=(), files=(), cache=None, cursors=(), *, earliest=0, next=0, **marks):
    return {
        "topic": "/default/t",
        "partitions": [],
        "earliest": earliest,
        "watermarks": {
            **dict.fromkeys(("trimmed", "tiered", "synced", "written"), next),
            **marks,
            "next": next,
        },
        "objects": [an_object(*one) for one in objects],
        "files": [{"first_offset": start, "next_offset": end} for start, end in files],
        "cache": None if cache is None else {"start": cache[0], "next": cache[1]},
        "subscriptions": [{"name": name, "cursor": cursor} for name, cursor in cursors],
    }


def row(lines, label):
    (line,) = [line for line in lines if line.split()[:1] == [label]]
    return line


def cells(lines, label):
    """The characters of a row above the axis."""
    (axis,) = [line for line in lines if "└" in line]
    first, last = axis.index("└"), axis.index("┘")
    return row(lines, label).ljust(last + 1)[first : last + 1]


# -- by example -----------------------------------------------------------------------------


def test_a_topic_in_three_tiers():
    view = a_view(
        objects=[(0, 500, "parquet"), (500, 700)],
        files=[(600, 1000)],
        cache=(900, 1000),
        cursors=[("billing", 250)],
        next=1000,
        trimmed=600,
        tiered=700,
    )
    lines = draw(view, 100)
    columns = len(cells(lines, "bucket"))
    bucket, files, cache = (cells(lines, name) for name in ("bucket", "files", "cache"))
    assert abs(bucket.rstrip().rindex(PARQUET) - columns / 2) <= 2
    assert abs(len(bucket.rstrip()) - columns * 0.7) <= 1
    assert abs(len(files) - len(files.lstrip()) - columns * 0.6) <= 1
    assert files[-1] == cache[-1] == FULL
    assert abs(len(cache) - len(cache.lstrip()) - columns * 0.9) <= 1
    assert abs(cells(lines, "billing").index(POINTER) - columns / 4) <= 1
    assert row(lines, "billing").endswith(" 250")
    assert row(lines, "next").endswith("▲ 1,000")
    assert any("▚ parquet" in line for line in lines)


def test_objects_that_are_wide_enough_are_told_apart():
    lines = draw(a_view(objects=[(0, 100), (100, 200), (200, 300)], next=300), 80)
    assert cells(lines, "bucket").count(SPLIT) == 2
    lines = draw(a_view(objects=[(n, n + 1) for n in range(5000)], next=5000), 80)
    assert set(cells(lines, "bucket")) == {FULL}


def test_a_gap_is_seen_however_small():
    objects = [(0, 100_000), (100_001, 1_000_000)]
    bucket = cells(draw(a_view(objects=objects, next=1_000_000), 80), "bucket")
    assert sum(cell in SHADES for cell in bucket) == 1
    objects = [(0, 100_000), (500_000, 1_000_000)]
    lines = draw(a_view(objects=objects, next=1_000_000), 80)
    bucket = cells(lines, "bucket")
    assert abs(bucket.count(GAP) - len(bucket) * 0.4) <= 2
    assert any("· gap" in line for line in lines)


def test_many_objects_with_gaps_are_a_shade():
    objects = [(start, start + 30) for start in range(0, 1_000_000, 100)]
    bucket = cells(draw(a_view(objects=objects, next=1_000_000), 80), "bucket")
    assert set(bucket) <= set(SHADES)
    dense = [(start, start + 80) for start in range(0, 1_000_000, 100)]
    assert cells(draw(a_view(objects=dense, next=1_000_000), 80), "bucket") > bucket


def test_a_run_that_a_broker_tells_of_as_one_has_the_shade_of_its_messages():
    view = a_view(next=1000)
    view["objects"] = [
        {"start_offset": 0, "end_offset": 999, "messages": 400, "merged_objects": 300}
    ]
    assert set(cells(draw(view, 80), "bucket")) <= set(SHADES)


def test_an_empty_topic_says_so():
    assert draw(a_view(), 80)[-1] == "no messages yet"
    assert draw(a_view(earliest=7, next=7), 80)[-1] == "no messages any more"


def test_what_has_no_tiers():
    assert "keeps no messages" in draw({"topic": "/default/t", "watermarks": None}, 80)[0]
    assert "3 partitions" in draw({"partitions": ["a", "b", "c"]}, 80)[0]


def test_ascii_has_no_other_characters():
    view = a_view(
        objects=[(0, 300, "parquet"), (300, 400), (600, 700)],
        files=[(650, 1000)],
        cursors=[("a-name-that-is-longer-than-there-is-room-for-it", 5)],
        next=1000,
    )
    text = "\n".join(draw(view, 80, ascii=True))
    assert text.isascii()
    assert set("P#.^|~") <= set(text)


def test_many_subscriptions_are_cut_and_the_farthest_behind_are_shown():
    view = a_view(next=1000, cursors=[(f"s{n:03}", n) for n in range(100)])
    lines = draw(view, 80)
    assert row(lines, "s000").endswith(" 0")
    assert any("and 70 subscriptions" in line for line in lines)


def test_what_is_not_known_is_left_out():
    view = a_view(next=10)
    view["files"] = [{"first_offset": None, "next_offset": None}]
    view["subscriptions"] = [{"name": "s", "cursor": None}]
    assert cells(draw(view, 80), "files").strip() == ""


def test_spans_are_the_same_text():
    view = a_view(objects=[(0, 30, "parquet"), (50, 90)], files=[(80, 100)], next=100)
    spans = ["".join(span.text for span in line).rstrip() for line in draw_spans(view, 90)]
    assert spans == draw(view, 90)


# -- for any topic --------------------------------------------------------------------------

OFFSETS = st.integers(min_value=0, max_value=10**12)


@given(start=OFFSETS, span=st.integers(1, 10**12), columns=st.integers(8, 400), data=st.data())
def test_columns_are_proportional_and_in_order(start, span, columns, data):
    offsets = sorted(data.draw(st.lists(st.integers(start, start + span), max_size=20)))
    found = [column_of(offset, start, start + span, columns) for offset in offsets]
    assert found == sorted(found)
    for offset, column in zip(offsets, found, strict=True):
        assert 0 <= column < columns
        assert abs(column - (offset - start) / span * columns) <= 1.0001


@st.composite
def topics(draw_from):
    """A view whose objects and files are anywhere, gaps and overlaps among them."""
    earliest = draw_from(st.integers(0, 10**9))
    span = draw_from(st.one_of(st.integers(0, 300), st.integers(0, 10**9)))
    end = earliest + span
    edges = st.lists(st.integers(earliest, end), max_size=60).map(sorted)

    def pieces():
        found = draw_from(edges)
        return [(a, b) for a, b in pairwise(found) if a < b][::2]

    formats = st.sampled_from(["dnb1", "parquet"])
    marks = sorted(draw_from(st.lists(st.integers(earliest, end), min_size=4, max_size=4)))
    cursors = draw_from(st.lists(st.integers(earliest, end), max_size=5))
    return a_view(
        objects=[(a, b, draw_from(formats)) for a, b in pieces()],
        files=pieces(),
        cache=next(iter(pieces()), None),
        cursors=[(f"s{number}", cursor) for number, cursor in enumerate(cursors)],
        earliest=earliest,
        next=end,
        **dict(zip(("trimmed", "tiered", "synced", "written"), marks, strict=True)),
    )


@settings(max_examples=60, deadline=None)
@given(view=topics(), width=st.integers(40, 220), ascii=st.booleans())
def test_no_line_is_wider_than_the_terminal(view, width, ascii):
    for line in draw(view, width, ascii=ascii):
        assert len(line) <= width


@settings(max_examples=60, deadline=None)
@given(view=topics(), width=st.integers(60, 220))
def test_every_mark_is_within_a_column_of_its_place(view, width):
    lines = draw(view, width)
    start, end = view["earliest"], view["watermarks"]["next"]
    columns = len(cells(lines, "bucket"))
    pointers = {**view["watermarks"], **{s["name"]: s["cursor"] for s in view["subscriptions"]}}
    for name, offset in pointers.items():
        at = cells(lines, name).index(POINTER)
        assert abs(at - (offset - start) * columns / max(end - start, 1)) <= 1.0001
        assert row(lines, name).endswith(f" {offset:,}")


@settings(max_examples=80, deadline=None)
@given(view=topics(), width=st.integers(60, 220))
def test_a_column_is_full_shaded_or_a_gap_as_its_offsets_are_there(view, width):
    lines = draw(view, width)
    start, end = view["earliest"], view["watermarks"]["next"]
    columns, span = len(cells(lines, "bucket")), max(end - start, 1)
    pieces = {
        "bucket": [(one["start_offset"], one["end_offset"] + 1) for one in view["objects"]],
        "files": [(one["first_offset"], one["next_offset"]) for one in view["files"]],
    }
    for label, ranges in pieces.items():
        for column, cell in enumerate(cells(lines, label)):
            # The offsets that have some of this column, and those that have it and its neighbours.
            low, high = start + column * span // columns, start + (column + 1) * span / columns
            near = (span // columns) + 1
            covered = any(a < high + near and b > low - near for a, b in ranges)
            if cell not in (" ", GAP):
                assert covered, f"{label} column {column} shows what is not there"
            wholly = any(a <= low - near and b >= high + near for a, b in ranges)
            if cell in (" ", GAP):
                assert not wholly, f"{label} column {column} hides what is there"
