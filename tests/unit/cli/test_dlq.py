"""Dead letters that match a filter are found page by page, as far as no broker is needed."""

import base64

import pytest

pytest.importorskip("grpc")

from ister.base.message_filter import MessageFilter
from ister.cli.dlq import _letter_text, _matching
from ister.client.descriptions import LetterFilter


class Queue:
    """A client of a dead-letter topic with 250 letters; odd ones have a key."""

    def __init__(self):
        self.calls = 0

    @property
    def admin(self):
        return self

    def show_dead_letters(self, topic, which, *, limit):
        self.calls += 1
        offsets = [
            one
            for one in range(1000, 1250)
            if any(first <= one < end for first, end in which.offsets)
        ]
        return [
            {
                "offset": one,
                "routing_key": "k" if one % 2 else None,
                "attributes": {},
                "payload_base64": base64.b64encode(b'{"id": %d}' % one).decode(),
            }
            for one in offsets[:limit]
        ]


def find(limit, *, offsets=(), **parts):
    queue = Queue()
    which, wanted = LetterFilter(offsets=offsets), MessageFilter.parse(**parts)
    found = [one["offset"] for one in _matching(queue, "/default/dead", which, wanted, limit)]
    return found, queue.calls


def test_pages_are_read_until_there_are_enough():
    assert find(3) == ([1000, 1001, 1002], 1)
    assert find(2, keys=["k"]) == ([1001, 1003], 1)
    assert find(5, where=["id >= 1247"]) == ([1247, 1248, 1249], 3)
    assert find(1, where=["id == 1150"]) == ([1150], 2)
    assert find(5, keys=["none"]) == ([], 3)
    assert find(0) == ([], 0)


def test_offsets_stay_what_they_are():
    ranges = ((1010, 1012), (1200, 1202))
    assert find(9, offsets=ranges, where=["id > 0"]) == ([1010, 1011, 1200, 1201], 1)
    assert find(200, offsets=((1000, 1120),), where=["id > 1100"])[0] == list(range(1101, 1120))


def test_no_part_of_a_letter_controls_a_terminal():
    hostile = "\x1b]0;title\x07\x9b2J\r\n\u202e"
    letter = {
        "offset": 3,
        "publish_time": None,
        "producer_name": hostile,
        "routing_key": hostile,
        "attributes": {hostile: hostile},
        "text": hostile,
        "size": 9,
        "is_cut": False,
        "dead_letter": {
            "topic": f"/default/{hostile}",
            "subscription": hostile,
            "offset": 1,
            "reason": hostile,
            "attempt": 2,
            "dropped_attributes": 0,
            "is_verified": True,
        },
    }
    lines = _letter_text("/default/dead", letter).split("\n")
    assert len(lines) == 7
    assert all(line.isprintable() for line in lines)
    letter["dead_letter"]["is_verified"] = False
    found = _letter_text("/default/dead", letter).split("\n")
    assert found[1] == f"{lines[1]} (unverified: no broker has written it)"
