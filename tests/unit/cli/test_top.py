"""`ister top`: what it adds up, its order, and how it fits a terminal."""

import json

import pytest

from ister.cli.top import SORTS, Selection, View, measure, sort_loads
from ister.errors import UnavailableError
from tests.support.clock import ManualClock


def subscription(name, lag, blocked_reason=None):
    return {"name": name, "lag": lag, "blocked_reason": blocked_reason}


def topic(name, *subscriptions, rate=0.0, size=0.0, not_uploaded=0, **fields):
    return {
        "topic": name,
        "parent": None,
        "state": "open",
        "rates": {
            "messages_in": rate,
            "bytes_in": size,
            "messages_out": 2 * rate,
            "bytes_out": 2 * size,
        },
        "upload_lag": {"messages": not_uploaded, "bytes": not_uploaded * 1024},
        "subscriptions": list(subscriptions),
        **fields,
    }


VIEWS = [
    topic("/default/quiet", rates=None),
    topic("/default/busy", subscription("a", 10), subscription("b", 500, "x"), rate=1234.5),
    topic("/default/p-part-0", subscription("a", 700), rate=2, parent="/default/p", size=100),
    topic(
        "/default/p-part-1",
        subscription("a", 800, "no consumer is connected"),
        rate=3,
        parent="/default/p",
        not_uploaded=4,
    ),
    topic("/default/sick", subscription("c", None), state="closed"),
]

SNAPSHOT = """\
broker b:1  4 topics  2026-01-31T12:00:00.000Z
in 1,240/s (100 B/s)  out 2,479/s (200 B/s)  blocked 2  not uploaded 4.0 KiB

TOPIC           IN/S*   OUT/S    LAG   BLOCKED   NOT UPLOADED   BYTES IN   BYTES OUT  STATE
/default/busy   1,234   2,469    500         1            0 B      0 B/s       0 B/s
/default/p        5.0      10  1,500         1        4.0 KiB    100 B/s     200 B/s
/default/quiet      0       0      0         0            0 B      0 B/s       0 B/s
/default/sick       0       0      0         0            0 B      0 B/s       0 B/s  closed
"""


def view(views, *, is_json=False, **selection):
    """A view of what `views` returns, or raises."""
    clock = ManualClock(now_ms=1_769_860_800_000)
    ask = views if callable(views) else lambda: views
    return View(ask, Selection(**selection), "b:1", clock, is_json=is_json), clock


def test_partitions_are_added_up():
    by_name = {one.topic: one for one in measure(VIEWS, by_partition=False)}
    assert list(by_name) == ["/default/quiet", "/default/busy", "/default/p", "/default/sick"]
    parts = by_name["/default/p"]
    assert (parts.messages_in, parts.messages_out, parts.bytes_in) == (5, 10, 100)
    # The subscription is behind in both partitions.
    assert (parts.lag, parts.subscriptions, parts.blocked) == (1500, 1, 1)
    assert (parts.upload_lag_messages, parts.upload_lag_bytes) == (4, 4096)
    assert (by_name["/default/busy"].lag, by_name["/default/busy"].blocked) == (500, 1)
    assert (by_name["/default/sick"].state, by_name["/default/sick"].lag) == ("closed", 0)
    apart = {one.topic: one for one in measure(VIEWS, by_partition=True)}
    assert apart["/default/p-part-1"].lag == 800


@pytest.mark.parametrize(
    ("by", "first"),
    [
        ("in", "/default/busy"),
        ("lag", "/default/p"),
        ("upload-lag", "/default/p"),
        ("state", "/default/sick"),
        ("topic", "/default/busy"),
        ("blocked", "/default/busy"),  # equal ones by name
    ],
)
def test_order(by, first):
    loads = sort_loads(measure(VIEWS, by_partition=False), by)
    assert loads[0].topic == first
    assert sort_loads(loads, by, is_reversed=True)[-1].topic == first


def test_a_snapshot():
    one, _ = view(VIEWS)
    one.refresh()
    assert one.lines(width=None) == SNAPSHOT.splitlines()


@pytest.mark.parametrize("width", [10, 20, 30, 40, 60, 80, 100, 200])
def test_it_fits_a_narrow_terminal(width):
    for sort in SORTS:
        one, _ = view(VIEWS, sort=sort)
        one.refresh()
        lines = one.lines(width=width, height=24)
        assert max(map(len, lines)) <= width, lines
        if width >= 30 and sort not in ("topic", "state"):
            assert "*" in lines[3], "the column of the order is shown"
    one, _ = view(VIEWS)
    one.refresh()
    wide = one.lines(width=200)[3].split()
    assert "STATE" in wide
    narrow = one.lines(width=40)[3].split()
    assert narrow[:2] == ["TOPIC", "IN/S*"]
    assert len(narrow) < len(wide)


def test_it_fits_a_low_terminal_and_says_what_is_left_out():
    one, _ = view([topic(f"/default/t{number:03}") for number in range(100)])
    one.refresh()
    lines = one.lines(width=80, height=20)
    assert len(lines) == 20
    assert lines[-1] == "… 85 more topics"
    limited, _ = view([topic(f"/default/t{number:03}") for number in range(100)], limit=3)
    limited.refresh()
    assert len(limited.lines(width=80, height=20)) == 7


def test_empty():
    one, _ = view([])
    one.refresh()
    lines = one.lines(width=None)
    assert lines[0].startswith("broker b:1  0 topics")
    assert "no topics yet; create one with `ister produce" in lines[-1]


def test_a_dead_broker_is_said_and_the_last_numbers_stay(capsys):
    answers = [VIEWS, None, VIEWS]

    def ask():
        found = answers.pop(0)
        if found is None:
            raise UnavailableError("no broker answers at b:1")
        return found

    one, clock = view(ask, is_json=True)
    one.refresh()
    clock.advance(90)
    one.refresh()
    with pytest.raises(UnavailableError):
        one.check()
    lines = one.lines(width=None)
    assert lines[2] == "no broker answers at b:1; these numbers are 2 min old; retrying"
    assert any("/default/busy" in line for line in lines)
    assert lines[0].endswith("2026-01-31T12:00:00.000Z")
    one.print()
    printed = json.loads(capsys.readouterr().out)
    assert printed["errors"][0]["message"] == "no broker answers at b:1"
    one.refresh()
    one.check()
    assert not any("no broker" in line for line in one.lines(width=None))
    assert one.lines(width=None)[0].endswith("2026-01-31T12:01:30.000Z")


def test_json_of_a_snapshot(capsys):
    one, _ = view(VIEWS, is_json=True, sort="lag", limit=1)
    one.refresh()
    one.print()
    found = json.loads(capsys.readouterr().out)
    assert found["time"] == "2026-01-31T12:00:00.000Z"
    assert found["broker"] == "b:1"
    assert (found["total"]["topics"], found["total"]["rates"]["messages_in"]) == (4, 1239.5)
    assert found["topics"] == [
        {
            "topic": "/default/p",
            "rates": {"messages_in": 5, "bytes_in": 100, "messages_out": 10, "bytes_out": 200},
            "lag": 1500,
            "subscriptions": 1,
            "blocked": 1,
            "upload_lag": {"messages": 4, "bytes": 4096},
            "state": "open",
        }
    ]


def test_keys_change_the_order():
    one, _ = view(VIEWS)
    assert one.sort == "in"
    one.next_sort()
    assert one.sort == "out"
    for _ in SORTS:
        one.next_sort()
    assert one.sort == "out"
