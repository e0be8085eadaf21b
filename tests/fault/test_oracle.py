"""The oracle of the fault tests can fail: made-up histories and logs that are wrong in one way."""

import pytest

from tests.support.cases import each
from tests.support.oracle import History, identify, payload_of

TOPIC = "/t/a"
SYNCED = frozenset({"synced"})


def a_history(steps: str = "acked 3") -> History:
    """`send ID`, `ack ID OFFSET`, `unknown ID`, `error ID`, `trim OFFSET`, one after the other.

    `acked 3` sends p.0, p.1 and p.2, each of which is acknowledged before the next.
    """
    history = History()
    for step in filter(None, map(str.strip, steps.split(";"))):
        match step.split():
            case ["acked", count, *level]:
                for number in range(int(count)):
                    history.send(TOPIC, f"p.{number}")
                    history.ack(TOPIC, f"p.{number}", number, *(level or ["synced"]))
            case ["send", *ids]:
                for message_id in ids:
                    history.send(TOPIC, message_id)
            case ["ack", message_id, offset]:
                history.ack(TOPIC, message_id, int(offset), "synced")
            case ["trim", offset]:
                history.trim(TOPIC, int(offset))
            case [name, message_id]:
                getattr(history, name)(TOPIC, message_id)
    return history


def a_log(words: str) -> list[tuple[int, bytes]]:
    """Messages by their ids; after `@5`, the next one has that offset."""
    found: list[tuple[int, bytes]] = []
    offset = 0
    for word in words.split():
        if word.startswith("@"):
            offset = int(word[1:])
            continue
        found.append((offset, payload_of(word)))
        offset += 1
    return found


STORIES = {
    # What happened, what the log has afterwards, what is found.
    "nothing is wrong": ("acked 3", "p.0 p.1 p.2", {}),
    "nothing happened": ("", "", {}),
    "the last one is gone": ("acked 3", "p.0 p.1", {"lost": 1}),
    "everything is gone": ("acked 3", "", {"lost": 3}),
    "one moved up": ("acked 3", "p.0 p.2", {"changed": 1, "lost": 1}),
    "two changed their places": ("acked 3", "p.0 p.2 p.1", {"changed": 2, "reorder": 2}),
    "one twice": ("acked 3", "p.0 p.1 p.2 p.1", {"duplicate": 1}),
    "one that nobody sent": ("acked 3", "p.0 p.1 p.2 q.0", {"phantom": 1}),
    "a hole": ("send p.0 p.1", "p.0 @2 p.1", {"hole": 1}),
    "an offset twice": ("acked 3", "p.0 p.1 p.2 @2 p.2", {"duplicate": 1}),
    "offsets that go back": ("send p.0 q.0", "@1 p.0 @0 q.0", {"hole": 1, "reorder": 1}),
    "an offset told to two": ("acked 1; send q.0; ack q.0 0", "q.0", {"changed": 1}),
    "two offsets told to one": (
        "acked 2; ack p.1 5",
        "p.0 p.1",
        {"duplicate": 1, "lost": 1},
    ),
    # The second sender's message was sent after the first one's was acknowledged.
    "before one acknowledged earlier": (
        "send p.0; ack p.0 1; send q.0",
        "q.0 p.0",
        {"reorder": 1},
    ),
    "concurrent ones in any order": ("send p.0 q.0", "q.0 p.0", {}),
    "one sender's in another order": ("send p.0 p.1", "p.1 p.0", {"reorder": 1}),
    "unknown, and not there": ("acked 1; send p.1; unknown p.1", "p.0", {}),
    "unknown, and there": ("acked 1; send p.1; unknown p.1", "p.0 p.1", {}),
    "refused, and not there": ("acked 1; send p.1; error p.1", "p.0", {}),
    "refused, and there": ("acked 1; send p.1; error p.1", "p.0 p.1", {"refused": 1}),
    "at a level that does not survive": ("acked 3 written", "p.0 p.1", {}),
    "trimmed": ("acked 3; trim 2", "@2 p.2", {}),
    "trimmed less than was asked for": ("acked 3; trim 2", "@1 p.1 p.2", {}),
    "trimmed more than was asked for": ("acked 3; trim 1", "@2 p.2", {"hole": 1}),
}


@each("name", STORIES)
def test_log_is_judged_by_what_was_promised(name):
    steps, words, found = STORIES[name]
    log = a_log(words)
    first = min((offset for offset, _ in log), default=0) if "trim" in steps else 0
    report = a_history(steps).check(TOPIC, log, survives=SYNCED, first=first)
    assert report.kinds() == found


def test_unknown_message_that_was_read_has_to_stay():
    history = a_history("acked 1; send p.1")
    for words, found in (("p.0 p.1", {}), ("p.0", {"lost": 1})):
        assert history.check(TOPIC, a_log(words), survives=SYNCED).kinds() == found


def test_unknown_message_that_was_not_read_may_lose_its_offset():
    history = a_history("acked 1; send p.1 q.0")
    assert history.check(TOPIC, a_log("p.0"), survives=SYNCED).is_clean
    history.ack(TOPIC, "q.0", 1, "synced")
    for words, found in (("p.0 q.0", {}), ("p.0 p.1", {"changed": 1})):
        assert history.check(TOPIC, a_log(words), survives=SYNCED).kinds() == found


def test_level_that_survives_is_missed():
    survives = frozenset({"written", "synced"})
    report = a_history("acked 3 written").check(TOPIC, a_log("p.0 p.1"), survives=survives)
    assert report.kinds() == {"lost": 1}


def test_damaged_payload_is_a_phantom():
    payload = payload_of("p.0#64")
    assert identify(payload) == "p.0#64"
    assert len(payload) == len("p.0#64|") + 64
    for damaged in (payload[:-1], payload[:-4], payload[:-1] + b"\0", payload + b"\0", b""):
        assert identify(damaged) is None, damaged
    report = History().check(TOPIC, [(0, payload[:-4])], survives=SYNCED)
    assert report.kinds() == {"phantom": 1}


def test_sending_an_id_twice_is_an_error_of_the_test():
    history = a_history("acked 1")
    with pytest.raises(ValueError, match=r"p\.0 was sent before"):
        history.send(TOPIC, "p.0")
    with pytest.raises(KeyError):
        history.unknown(TOPIC, "p.7")


def test_report_counts_what_it_read_and_shows_a_few_findings():
    report = a_history().check(TOPIC, a_log("p.0 p.1 p.2"), survives=SYNCED)
    assert (report.read, report.acked) == (3, 3)
    report = a_history("acked 20").check(TOPIC, [], survives=SYNCED)
    assert report.kinds() == {"lost": 20}
    assert "/t/a@0 p.0, acknowledged" in str(report)
    assert "15 more" in str(report)
